// Finds a token by rank or by cumulative weight, without sorting a row. One block of 1024 threads.
//
// Tokens are ordered by logit, larger first, ties by lower id. `order_key` maps this order to one
// u64, larger for earlier tokens. A pass over the row counts, or weighs, its tokens in bins of
// equal distance to the largest logit: a bin's tokens come before all those of the next. So the
// bins' sums tell which bin has the wanted token. A second pass collects that bin's tokens in a
// list (with those before, if they are few), which is sorted. If a bin has more tokens than the
// list can hold (a row of equal logits), the key is found digit by digit instead, in six passes.
//
// Bins are linear because logits are. Binning by the upper bits of the float would put a whole
// vocabulary into a dozen bins, and lanes that add to the same address are serialized.
//
// Weights are whole numbers (see draw.cuh), so sums are exact: independent of the order of threads,
// and of how they are divided. 2^20 tokens of weight 2^40 fit into 64 bits.
#pragma once
#include "device.cuh"

namespace tutti {

constexpr uint32_t SELECT_THREADS = 1024;
// Two per thread.
constexpr uint32_t SELECT_BINS = 2 * SELECT_THREADS;
constexpr uint32_t LIST_MAX = 2 * SELECT_THREADS;


// Maps floats to keys in their total order: -infinity, .., -0, +0, .., +infinity.
__device__ __forceinline__ uint32_t float_key(float x) {
    const uint32_t bits = __float_as_uint(x);
    // Flips all bits if the sign is set, otherwise only the sign.
    return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}

__device__ __forceinline__ u64 order_key(float x, uint32_t id) {
    return static_cast<u64>(float_key(x)) << 32 | (0xffffffffu - id);
}

__device__ __forceinline__ uint32_t id_of(u64 key) {
    return 0xffffffffu - static_cast<uint32_t>(key);
}

__device__ __forceinline__ float logit_of(u64 key) {
    const uint32_t bits = static_cast<uint32_t>(key >> 32);
    return __uint_as_float((bits & 0x80000000u) != 0 ? bits & 0x7fffffffu : ~bits);
}

// The tokens of a row.
struct Tokens {
    const float* logits;
    uint32_t count;
    bool wide; // logits begin at a multiple of 16 bytes
    const uint32_t* mask; // a bit for each token, 1 if it may be chosen; null: all may

    // The logits of the 4 tokens from `first` on, a multiple of 4; -infinity for tokens that do not
    // exist or may not be chosen.
    __device__ __forceinline__ float4 four(uint32_t first) const {
        float4 x = loaded(first);
        if (mask != nullptr && first < count) {
            const uint32_t bits = mask[first / 32] >> (first % 32);
            x.x = (bits & 1u) != 0 ? x.x : -INFINITY;
            x.y = (bits & 2u) != 0 ? x.y : -INFINITY;
            x.z = (bits & 4u) != 0 ? x.z : -INFINITY;
            x.w = (bits & 8u) != 0 ? x.w : -INFINITY;
        }
        return x;
    }

    __device__ __forceinline__ float4 loaded(uint32_t first) const {
        if (wide && first + 4 <= count) {
            return *reinterpret_cast<const float4*>(logits + first);
        }
        return make_float4(first < count ? logits[first] : -INFINITY,
                           first + 1 < count ? logits[first + 1] : -INFINITY,
                           first + 2 < count ? logits[first + 2] : -INFINITY,
                           first + 3 < count ? logits[first + 3] : -INFINITY);
    }

    // Calls `look(logit, id)` once for every token, and for some ids past the last, with a logit of
    // -infinity. A thread's ids are ascending.
    template <class Look>
    __device__ __forceinline__ void each(const Look& look) const {
        constexpr uint32_t STEP = SELECT_THREADS * 4;
        uint32_t id = threadIdx.x * 4;
        float4 x = four(id);
#pragma unroll 1
        while (id < count) {
            // Loads the next four while these are processed.
            const float4 next = four(id + STEP);
            look(x.x, id);
            look(x.y, id + 1);
            look(x.z, id + 2);
            look(x.w, id + 3);
            x = next;
            id += STEP;
        }
    }
};

// A row of tokens; `stride` elements separate it from the next.
__device__ __forceinline__ Tokens row_of_tokens(const float* logits, uint32_t vocab,
                                                uint32_t stride,
                                                const uint32_t* mask = nullptr) {
    return {logits, vocab, stride % 4 == 0, mask};
}

// Result of the first pass over a row.
struct RowSummary {
    u64 best;     // the largest order key
    float lowest; // the smallest logit above -infinity
    bool sound;   // no NaN, no +infinity, and something above -infinity
};

// Distances from a row's largest logit, in bins of equal width; the last bin has all that are too
// far. The distance, and so the bin, never decreases as the logit decreases: both operations round
// monotonically, and in the same way in every pass.
struct Scale {
    float max;
    float per_unit;

    // Covers distances of at least `far`, or the whole row.
    __device__ __forceinline__ Scale(const RowSummary& row, float far) : max(logit_of(row.best)) {
        const float range = fminf(__fsub_rn(max, row.lowest), far);
        // Never 0, infinity or NaN, which would make `place` NaN.
        per_unit = fminf(fmaxf(__fdiv_rn(SELECT_BINS - 1.0f, range), 1e-30f), 1e30f);
    }

    // The whole part is the bin.
    __device__ __forceinline__ float place(float logit) const {
        return fminf(__fmul_rn(__fsub_rn(max, logit), per_unit), SELECT_BINS - 1.0f);
    }

    __device__ __forceinline__ uint32_t bin(float logit) const {
        // Adding 2^23, rounded down, puts the whole part into the lower bits.
        return __float_as_uint(__fadd_rd(place(logit), 8388608.0f)) % SELECT_BINS;
    }
};

// 64-bit sums made of 32-bit atomic additions, the only ones native to shared memory.
struct Sums {
    uint32_t low[SELECT_BINS];
    uint32_t high[SELECT_BINS];

    __device__ __forceinline__ void clear() {
        for (uint32_t i = threadIdx.x; i < SELECT_BINS; i += SELECT_THREADS) {
            low[i] = 0;
            high[i] = 0;
        }
    }

    // Adds a weight. Few weights are 2^32 or more, and the lower word overflows once per 2^32.
    __device__ __forceinline__ void add(uint32_t at, u64 x) {
        const uint32_t own = static_cast<uint32_t>(x);
        const uint32_t old = atomicAdd(&low[at], own);
        const uint32_t upper = static_cast<uint32_t>(x >> 32) + (old + own < own ? 1 : 0);
        if (upper != 0) {
            atomicAdd(&high[at], upper);
        }
    }

    // Adds a count.
    __device__ __forceinline__ void add(uint32_t at, bool one) {
        atomicAdd(&low[at], one ? 1u : 0u);
    }

    __device__ __forceinline__ u64 at(uint32_t i) const {
        return static_cast<u64>(high[i]) << 32 | low[i];
    }
};

// The place at which a running sum reaches the wanted value.
struct Place {
    uint32_t index;
    u64 before; // the sum before it
    u64 own;
};

// State shared by the threads of the block.
struct SelectScratch {
    Sums bins;
    // Order keys; or the sums of one digit's values, when no list is needed.
    union {
        u64 keys[LIST_MAX];
        Sums digits;
    };
    uint32_t length; // of the list, even if it does not fit
    // Random bits of the row's draw; powers of 2 by which weights decrease per bin; and the range
    // of running sums (above `begin`, up to `end`) whose tokens are in the list. These and those
    // below are not in registers, because there are too few.
    u64 random;
    float bits_per_bin;
    u64 begin;
    u64 end;
    Place place;
    uint32_t found; // an id
    // The row as given, and after masks and edits.
    RowSummary given;
    RowSummary edited;
    u64 warp_total[32];
    double warp_sum[32];
    u64 warp_best[32];
    uint32_t warp_lowest[32];
    uint32_t warp_bad[32];
};

// Exclusive prefix sum over the threads; sets `total` to the sum of all.
__device__ __forceinline__ u64 block_sum_before(u64 x, SelectScratch& s, u64* total) {
    const uint32_t warp = threadIdx.x / 32;
    const uint32_t lane = threadIdx.x % 32;
    const u64 running = warp_running_sum(x);
    if (lane == 31) {
        s.warp_total[warp] = running;
    }
    __syncthreads();
    const u64 warps = warp_running_sum(s.warp_total[lane]);
    *total = __shfl_sync(ALL_LANES, warps, 31);
    const u64 up_to_warp = __shfl_sync(ALL_LANES, warps, warp > 0 ? warp - 1 : 0);
    __syncthreads();
    return (warp > 0 ? up_to_warp : 0) + running - x;
}

// A thread's two sums, at places 2i and 2i + 1, and the sum before them.
struct Pair {
    u64 first;
    u64 second;
    u64 before;
};

__device__ __forceinline__ Pair pair_of(u64 first, u64 second, SelectScratch& s, u64* total) {
    return {first, second, block_sum_before(first + second, s, total)};
}

// The place where the running sum over all pairs reaches `wanted`, which is between 1 and the
// total.
__device__ __forceinline__ Place reach(const Pair& pair, u64 wanted, SelectScratch& s) {
    if (pair.before < wanted && wanted <= pair.before + pair.first + pair.second) {
        const bool in_first = wanted <= pair.before + pair.first;
        s.place = {2 * threadIdx.x + (in_first ? 0 : 1),
                   in_first ? pair.before : pair.before + pair.first,
                   in_first ? pair.first : pair.second};
    }
    __syncthreads();
    const Place place = s.place;
    __syncthreads();
    return place;
}

// Sorts the list's first `padded` keys, a power of two, in descending order.
__device__ __forceinline__ void sort_list(uint32_t padded, SelectScratch& s) {
#pragma unroll 1
    for (uint32_t size = 2; size <= padded; size *= 2) {
#pragma unroll 1
        for (uint32_t stride = size / 2; stride > 0; stride /= 2) {
            if (threadIdx.x < padded / 2) {
                const uint32_t i = 2 * threadIdx.x - (threadIdx.x & (stride - 1));
                const u64 a = s.keys[i];
                const u64 b = s.keys[i + stride];
                const bool falls = (i & size) == 0;
                if ((a < b) == falls) {
                    s.keys[i] = b;
                    s.keys[i + stride] = a;
                }
            }
            // Up to this stride, each warp's pairs are within 64 keys of its own.
            const uint32_t next = stride > 1 ? stride / 2 : size;
            if (stride > 32 || next > 32) {
                __syncthreads();
            } else {
                __syncwarp();
            }
        }
    }
    __syncthreads();
}

// Makes a sorted list of the tokens for which `wanted(logit, id)` is true. Returns their number;
// there is no list if it exceeds LIST_MAX.
template <class Wanted>
__device__ __forceinline__ uint32_t list_tokens(const Tokens& tokens, const Wanted& wanted,
                                                SelectScratch& s) {
    if (threadIdx.x == 0) {
        s.length = 0;
    }
    __syncthreads();
    tokens.each([&](float x, uint32_t id) {
        if (wanted(x, id)) {
            const uint32_t at = atomicAdd(&s.length, 1u);
            if (at < LIST_MAX) {
                s.keys[at] = order_key(x, id);
            }
        }
    });
    __syncthreads();
    const uint32_t length = s.length;
    uint32_t padded = 1;
    while (padded < length && padded < LIST_MAX) {
        padded *= 2;
    }
    // No key is 0, so the padding comes last.
    for (uint32_t i = length + threadIdx.x; i < padded; i += SELECT_THREADS) {
        s.keys[i] = 0;
    }
    __syncthreads();
    if (length <= LIST_MAX) {
        sort_list(padded, s);
    }
    return length;
}

// As `list_tokens`, for the tokens in bins `first` to `last` whose measure is not 0.
template <class Measure>
__device__ __forceinline__ uint32_t list_bins(const Tokens& tokens, const Scale& scale,
                                              const Measure& measure, uint32_t first,
                                              uint32_t last, SelectScratch& s) {
    const float begin = static_cast<float>(first);
    const float end = static_cast<float>(last + 1);
    return list_tokens(
        tokens,
        [&](float x, uint32_t id) {
            const float place = scale.place(x);
            return begin <= place && place < end && measure(x, id) != 0;
        },
        s);
}

__device__ __forceinline__ Pair pair_of_bins(SelectScratch& s, u64* total) {
    return pair_of(s.bins.at(2 * threadIdx.x), s.bins.at(2 * threadIdx.x + 1), s, total);
}

// Fills the bins with `measure(logit, id)` of all tokens: a weight, or whether to count the token.
template <class Measure>
__device__ __forceinline__ Pair fill_bins(const Tokens& tokens, const Scale& scale,
                                          const Measure& measure, SelectScratch& s, u64* total) {
    s.bins.clear();
    __syncthreads();
    tokens.each([&](float x, uint32_t id) {
        const auto m = measure(x, id);
        if (m != 0) {
            s.bins.add(scale.bin(x), m);
        }
    });
    __syncthreads();
    return pair_of_bins(s, total);
}

// A token, and the sum up to and including it.
struct Reached {
    u64 key;
    u64 through;
};

// The token at which the running sum of `measure`, from the best token on, reaches `wanted`, which
// is between 1 and the total. Keeps the bins, but overwrites the list.
template <class Measure>
__device__ __forceinline__ Reached reach_by_digits(const Tokens& tokens, const Measure& measure,
                                                   u64 wanted, SelectScratch& s) {
    u64 prefix = 0;
    u64 rest = wanted;
    uint32_t shift = 64;
#pragma unroll 1
    for (uint32_t level = 0; level < 6; level++) {
        const uint32_t width = level % 3 == 2 ? 10 : 11;
        const uint32_t low = shift - width;
        s.digits.clear();
        __syncthreads();
        tokens.each([&](float x, uint32_t id) {
            const u64 key = order_key(x, id);
            if (level == 0 || key >> shift == prefix) {
                const auto m = measure(x, id);
                if (m != 0) {
                    s.digits.add(static_cast<uint32_t>(key >> low) & ((1u << width) - 1), m);
                }
            }
        });
        __syncthreads();
        // The largest digit comes first.
        const uint32_t first = SELECT_BINS - 1 - 2 * threadIdx.x;
        u64 total;
        const Pair pair = pair_of(s.digits.at(first), s.digits.at(first - 1), s, &total);
        const Place place = reach(pair, rest, s);
        prefix = prefix << width | (SELECT_BINS - 1 - place.index);
        rest -= place.before;
        shift = low;
    }
    return {prefix, wanted - rest + s.place.own};
}

// The best `wanted` of the tokens that `measure` counts: the length of a sorted list that begins
// with them, or, if there is no such list (`listed` is 0), the key of the last of them.
struct Best {
    uint32_t listed;
    u64 last;
};

template <class Measure>
__device__ __forceinline__ Best best_tokens(const Tokens& tokens, const Scale& scale,
                                            const Measure& measure, uint32_t wanted,
                                            SelectScratch& s) {
    u64 total;
    const Pair pair = fill_bins(tokens, scale, measure, s, &total);
    const u64 count = wanted < total ? wanted : total;
    if (count == 0) {
        return {0, 0};
    }
    const Place bin = reach(pair, count, s);
    const bool all = bin.before + bin.own <= LIST_MAX;
    if (!all && bin.own > LIST_MAX) {
        return {0, reach_by_digits(tokens, measure, count, s).key};
    }
    list_bins(tokens, scale, measure, all ? 0 : bin.index, bin.index, s);
    if (all) {
        return {static_cast<uint32_t>(count), 0};
    }
    return {0, s.keys[count - bin.before - 1]};
}

}  // namespace tutti
