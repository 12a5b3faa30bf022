// Finding a token by rank or by cumulated weight, without sorting. One block of 1024 threads.
//
// Tokens are ordered by logit, larger first, ties by lower id. `order_key` maps that to one u64
// whose larger values come first, so any cut ("the k best", "the best until p of the weight") is a
// threshold on it, found digit by digit from the top: a histogram over one digit, the digit in
// which the wanted token falls, the next digit among the tokens that share those before.
//
// Weights are whole multiples of 2^-40 of the largest token's, so sums are exact: independent of
// the order of threads, and equal however they are divided. 2^20 tokens of weight 2^40 fit 64 bits.
#pragma once
#include "device.cuh"

namespace tutti {

constexpr uint32_t SELECT_THREADS = 1024;
constexpr uint32_t SELECT_BINS = 2048;
constexpr int WEIGHT_BITS = 40;

typedef unsigned long long u64;

// As f32's total order: -infinity, .., -0, +0, .., +infinity.
__device__ __forceinline__ uint32_t float_key(float x) {
    const uint32_t bits = __float_as_uint(x);
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ u64 order_key(float x, uint32_t id) {
    return static_cast<u64>(float_key(x)) << 32 | (0xffffffffu - id);
}

__device__ __forceinline__ uint32_t id_of(u64 key) {
    return 0xffffffffu - static_cast<uint32_t>(key);
}

// Tokens that may be chosen: those of a row, or of a list in shared memory.
struct Tokens {
    const float* logits;
    const uint32_t* ids; // null: the index is the id
    uint32_t count;
    bool wide; // logits begin at a multiple of 16 bytes
    const uint32_t* mask; // of a row: a bit for each token, 1 where it may be chosen; null: all may

    // The logits of the 4 tokens from `first` on, a multiple of 4; -infinity where there is none or
    // it may not be chosen. Of a row.
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

    // Calls `look(logit, id)` once for every token. Which thread does it depends on `count` alone.
    template <class Look>
    __device__ __forceinline__ void each(const Look& look) const {
        if (ids != nullptr) {
            for (uint32_t i = threadIdx.x; i < count; i += SELECT_THREADS) {
                look(logits[i], ids[i]);
            }
            return;
        }
        constexpr uint32_t STEP = SELECT_THREADS * 4;
        for (uint32_t first = threadIdx.x * 4; first < count; first += 2 * STEP) {
            // Both loads are on their way before either is looked at.
            const float4 both[2] = {four(first), four(first + STEP)};
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                const uint32_t id = first + half * STEP;
                const float4 x = both[half];
                if (id < count) look(x.x, id);
                if (id + 1 < count) look(x.y, id + 1);
                if (id + 2 < count) look(x.z, id + 2);
                if (id + 3 < count) look(x.w, id + 3);
            }
        }
    }
};

// A row of `stride` between it and the next.
__device__ __forceinline__ Tokens row_of_tokens(const float* logits, uint32_t vocab,
                                                uint32_t stride,
                                                const uint32_t* mask = nullptr) {
    return {logits, nullptr, vocab, stride % 4 == 0, mask};
}

// e^((logit - max) / temperature), as a whole number of 2^-WEIGHT_BITS, for tokens that are kept.
struct Weights {
    float max;
    double log2_per_unit; // log2(e) / temperature
    float min_p;          // tokens with less weight have none
    u64 floor;            // tokens before this order key have none

    __device__ __forceinline__ u64 of(float logit, u64 key) const {
        if (key < floor) {
            return 0;
        }
        // f64 where a small temperature makes large exponents, f32 for the power itself.
        const double exponent = (static_cast<double>(logit) - static_cast<double>(max)) *
                                log2_per_unit;
        if (!(exponent > -64.0)) {
            return 0;
        }
        const double whole = rint(exponent);
        const float part = exp2_fast(static_cast<float>(exponent - whole));
        const int n = static_cast<int>(whole);
        const float weight = part * __uint_as_float(static_cast<uint32_t>(127 + n) << 23);
        if (weight < min_p) {
            return 0;
        }
        return static_cast<u64>(weight * static_cast<float>(1ull << WEIGHT_BITS));
    }
};

// What all threads of the block share; `name` in their shared memory.
struct SelectScratch {
    u64 weight[SELECT_BINS];
    uint32_t count[SELECT_BINS];
    u64 warp_total[32];
    u64 total;
    u64 before;   // weight of all tokens in front of the chosen digit
    uint32_t digit;
    uint32_t digit_count;
    u64 found;
    uint32_t length;
    double warp_sum[32];
    u64 warp_best[32];
    uint32_t warp_flags[32];
};

// The inclusive sum over lanes up to this one.
__device__ __forceinline__ u64 warp_running_sum(u64 x) {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const u64 other = __shfl_up_sync(ALL_LANES, x, distance);
        x += lane >= static_cast<uint32_t>(distance) ? other : 0;
    }
    return x;
}

// The sum over the threads in front of this one; `total` becomes that of all.
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

// The order key of the first token whose cumulated measure, the best token first, reaches
// `target(total)`, where `measure(logit, key)` is a weight or 1 and `total` its sum. 0 when the
// target is more than the total. `target` is at least 1.
template <class Measure, class Target>
__device__ __forceinline__ u64 select_token(const Tokens tokens, const Measure measure,
                                         const Target target, SelectScratch& s) {
    u64 wanted = 0;
    u64 prefix = 0;
    uint32_t shift = 64;
#pragma unroll 1
    for (uint32_t level = 0; level < 6; level++) {
        const uint32_t width = level % 3 == 2 ? 10 : 11;
        for (uint32_t i = threadIdx.x; i < SELECT_BINS; i += SELECT_THREADS) {
            s.weight[i] = 0;
            s.count[i] = 0;
        }
        __syncthreads();
        const uint32_t low = shift - width;
        tokens.each([&](float logit, uint32_t id) {
            const u64 key = order_key(logit, id);
            if (level == 0 || key >> shift == prefix) {
                const u64 m = measure(logit, key);
                if (m != 0) {
                    const uint32_t bin = static_cast<uint32_t>(key >> low) & ((1u << width) - 1);
                    atomicAdd(&s.weight[bin], m);
                    atomicAdd(&s.count[bin], 1u);
                }
            }
        });
        __syncthreads();
        // Thread i has the bins 2047 - 2i and 2046 - 2i: the largest first.
        const uint32_t first_bin = SELECT_BINS - 1 - 2 * threadIdx.x;
        const u64 first = s.weight[first_bin];
        const u64 second = s.weight[first_bin - 1];
        u64 total;
        const u64 before = block_sum_before(first + second, s, &total);
        if (level == 0) {
            wanted = target(total);
            if (wanted > total) {
                __syncthreads();
                return 0;
            }
        }
        if (before < wanted && wanted <= before + first + second) {
            const bool in_first = wanted <= before + first;
            s.digit = in_first ? first_bin : first_bin - 1;
            s.digit_count = s.count[s.digit];
            s.before = in_first ? before : before + first;
        }
        __syncthreads();
        prefix = prefix << width | s.digit;
        wanted -= s.before;
        shift = low;
        const uint32_t left = s.digit_count;
        __syncthreads();
        if (left == 1 || shift == 0) {
            break;
        }
    }
    // One token has this prefix.
    tokens.each([&](float logit, uint32_t id) {
        const u64 key = order_key(logit, id);
        if (key >> shift == prefix && measure(logit, key) != 0) {
            s.found = key;
        }
    });
    __syncthreads();
    const u64 found = s.found;
    __syncthreads();
    return found;
}

}  // namespace tutti
