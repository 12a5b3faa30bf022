// Drawing a token: weights, and the cuts by top-k and top-p. One block of 1024 threads.
//
// The cost is in the passes over the row, which are bound by the instructions of one multiprocessor
// (see estimates.md). Top-p takes two passes: one sums the weights in the bins of select.cuh, for
// the cut and for the draw; one lists all tokens that are kept. If those are too many, there are
// two short lists.
#pragma once
#include "select.cuh"

namespace tutti {

constexpr int WEIGHT_BITS = 40;

// e^((logit - max) / temperature), as a whole number of units of 2^-WEIGHT_BITS.
struct Weights {
    float max;
    double log2_per_unit; // log2(e) / temperature
    float least;          // smaller weights count as zero: min-p, or a unit
    float far;            // tokens farther than this from the largest logit have no weight

    __device__ __forceinline__ Weights(float max, float temperature, float min_p)
        : max(max),
          log2_per_unit(1.4426950408889634 / static_cast<double>(temperature)),
          least(fmaxf(min_p, 1.0f / (1ull << WEIGHT_BITS))) {
        // Powers of 2 from the largest weight down to the least, plus 1/1000: a thousand times the
        // error of f32 and `exp2_fast`.
        const float bits = 0.001f - log2f(least);
        far = fmaxf(bits * 0.693147181f * temperature, 1e-30f);
    }

    __device__ __forceinline__ u64 of(float logit) const {
        // f64 for the large exponents of small temperatures, f32 for the power itself.
        const double exponent = __dmul_rn(
            static_cast<double>(logit) - static_cast<double>(max), log2_per_unit);
        // At most half a unit, so no weight; also catches NaN.
        if (!(exponent > -1.0 - WEIGHT_BITS)) {
            return 0;
        }
        // Adding 2^52 + 2^51 rounds to the nearest whole number, in the sum's lower bits.
        const double shifted = __dadd_rn(exponent, 6755399441055744.0);
        const double whole = __dadd_rn(shifted, -6755399441055744.0);
        const float part = exp2_fast(static_cast<float>(__dadd_rn(exponent, -whole)));
        const uint32_t n = static_cast<uint32_t>(__double2loint(shifted));
        const float weight = __fmul_rn(part, __uint_as_float((127 + n) << 23));
        // In two words, exactly: a weight has 24 bits and is at most 1. Adding 2^23, rounded down,
        // extracts the whole part of 2^8 times the weight.
        const float upper = weight < least ? 0.0f : __fmul_rn(weight, 256.0f);
        const float shifted_upper = __fadd_rd(upper, 8388608.0f);
        const float lower = __fsub_rn(upper, __fsub_rn(shifted_upper, 8388608.0f));
        return static_cast<u64>(__float_as_uint(shifted_upper) & 0x1ffu) << 32 |
               static_cast<uint32_t>(__fmul_rn(lower, 4294967296.0f));
    }

    // Whether a token can have weight; also true for a few that have none, after all those that do.
    __device__ __forceinline__ bool may_be(float logit) const {
        return __fsub_rn(max, logit) <= far;
    }
};

// Philox4x32-10, as in kernels/src/philox.rs; the upper 53 of 64 random bits.
__device__ __forceinline__ u64 random_bits(u64 seed, uint32_t choice, uint32_t position) {
    uint32_t c0 = position;
    uint32_t c1 = 0;
    uint32_t c2 = choice;
    uint32_t c3 = 0;
    uint32_t k0 = static_cast<uint32_t>(seed);
    uint32_t k1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        if (round > 0) {
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        const uint32_t high0 = __umulhi(0xD2511F53u, c0);
        const uint32_t low0 = 0xD2511F53u * c0;
        const uint32_t high1 = __umulhi(0xCD9E8D57u, c2);
        const uint32_t low1 = 0xCD9E8D57u * c2;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
    }
    return (static_cast<u64>(c0) << 32 | c1) >> 11;
}

// The token at `bits` / 2^53 of the cumulative weights in order of id; `otherwise` if there are no
// weights.
__device__ __forceinline__ uint32_t draw_by_id(const Tokens& row, const Weights& weights, u64 bits,
                                               uint32_t otherwise, SelectScratch& s) {
    // Each warp has a part of the row, in multiples of 128; each lane has 4 of every 128.
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t part = divide_up(divide_up(row.count, 32), 128) * 128;
    const uint32_t start = threadIdx.x / 32 * part;
    const uint32_t end = start + part < row.count ? start + part : row.count;
    // A missing token has the logit -infinity, and so no weight.
    const auto weights_of = [&](uint32_t first, u64 (&w)[4]) {
        const float4 x = row.four(first);
        w[0] = weights.of(x.x);
        w[1] = weights.of(x.y);
        w[2] = weights.of(x.z);
        w[3] = weights.of(x.w);
    };
    u64 sum = 0;
    for (uint32_t i = start + 4 * lane; i < end; i += 128) {
        u64 w[4];
        weights_of(i, w);
        sum += (w[0] + w[1]) + (w[2] + w[3]);
    }
    u64 total;
    const u64 before_thread = block_sum_before(sum, s, &total);
    const u64 before = __shfl_sync(ALL_LANES, before_thread, 0);
    const u64 mine = __shfl_sync(ALL_LANES, before_thread + sum, 31) - before;
    // floor(u * total): a whole number is above u * total if and only if it is above this.
    const u64 target = __umul64hi(bits << 11, total);
    if (total == 0) {
        return otherwise;
    }
    if (before <= target && target < before + mine) {
        u64 so_far = before;
        bool found = false;
        for (uint32_t i = start; i < end && !found; i += 128) {
            u64 w[4];
            weights_of(i + 4 * lane, w);
            const u64 own = (w[0] + w[1]) + (w[2] + w[3]);
            u64 cumulated = so_far + warp_running_sum(own);
            so_far = __shfl_sync(ALL_LANES, cumulated, 31);
            const uint32_t above = __ballot_sync(ALL_LANES, cumulated > target);
            if (above != 0) {
                found = true;
                if (lane == static_cast<uint32_t>(__ffs(above)) - 1) {
                    cumulated -= own;
                    uint32_t id = i + 4 * lane;
#pragma unroll
                    for (uint32_t j = 0; j < 3; j++) {
                        cumulated += w[j];
                        id += cumulated > target ? 0 : 1;
                    }
                    s.found = id;
                }
            }
        }
    }
    __syncthreads();
    const uint32_t token = s.found;
    __syncthreads();
    return token;
}

// Number of tokens in the bins up to `last`, in 256ths. Estimated from the least weight possible in
// each bin, so slightly too high.
__device__ __forceinline__ u64 tokens_up_to(uint32_t last, const Pair& pair, SelectScratch& s) {
    const auto tokens = [&](uint32_t bin, u64 sum) {
        const float bits = fminf(static_cast<float>(bin + 1) * s.bits_per_bin, WEIGHT_BITS);
        const float many = static_cast<float>(sum) * exp2_fast(bits - WEIGHT_BITS);
        return bin <= last ? static_cast<u64>(256.0f * fminf(many, 2.0f * LIST_MAX)) : 0;
    };
    u64 all;
    const uint32_t bin = 2 * threadIdx.x;
    block_sum_before(tokens(bin, pair.first) + tokens(bin + 1, pair.second), s, &all);
    return all;
}

// The cumulative weight at which a draw from weights that sum to `kept` ends, from 1 to `kept`.
__device__ __forceinline__ u64 drawn(u64 random, u64 kept) {
    return __umul64hi(random << 11, kept) + 1;
}

// The cumulative weight at which top-p cuts, from 1 to `total`.
__device__ __forceinline__ u64 share_of(u64 total, float top_p) {
    const double share = ceil(static_cast<double>(total) * static_cast<double>(top_p));
    const u64 wanted = share < 1.0 ? 1 : static_cast<u64>(share);
    return wanted < total ? wanted : total;
}

// The weights of the list's first `listed` tokens.
__device__ __forceinline__ Pair weigh_list(const Weights& weights, uint32_t listed,
                                           SelectScratch& s, u64* total) {
    const uint32_t i = 2 * threadIdx.x;
    return pair_of(i < listed ? weights.of(logit_of(s.keys[i])) : 0,
                   i + 1 < listed ? weights.of(logit_of(s.keys[i + 1])) : 0, s, total);
}

// Draws one of the list's first `listed` tokens, which are all that top-k keeps.
__device__ __forceinline__ uint32_t draw_listed(const TuttiSampleParams& p, const Weights& weights,
                                                uint32_t listed, SelectScratch& s) {
    if (threadIdx.x == 0) {
        s.random = random_bits(p.seed, p.choice, p.position);
    }
    // The barriers within also make the random bits visible.
    u64 total;
    const Pair pair = weigh_list(weights, listed, s, &total);
    if (total == 0) {
        return id_of(s.keys[0]);
    }
    u64 kept = total;
    if (p.top_p < 1.0f) {
        const Place last = reach(pair, share_of(total, p.top_p), s);
        kept = last.before + last.own;
    }
    return id_of(s.keys[reach(pair, drawn(s.random, kept), s).index]);
}

// Draws a token from a sound row.
__device__ __forceinline__ uint32_t draw(const TuttiSampleParams& p, const Tokens& row,
                                         const RowSummary& summary, SelectScratch& s) {
    const Weights weights(logit_of(summary.best), p.temperature, p.min_p);
    const bool cuts_rank = p.top_k > 0 && p.top_k < row.count;
    const bool cuts_share = p.top_p < 1.0f;
    if (!cuts_rank && !cuts_share) {
        const u64 random = random_bits(p.seed, p.choice, p.position);
        return draw_by_id(row, weights, random, id_of(summary.best), s);
    }
    const Scale scale(summary, weights.far);
    Best best = {0, 0};
    if (cuts_rank) {
        best = best_tokens(
            row, scale, [&](float x, uint32_t) { return weights.may_be(x); }, p.top_k, s);
    }
    if (best.listed > 0) {
        return draw_listed(p, weights, best.listed, s);
    }
    const auto weigh = [&](float x, uint32_t) { return weights.of(x); };
    const auto measure = [&](float x, uint32_t id) {
        return best.last == 0 || order_key(x, id) >= best.last ? weights.of(x) : 0;
    };
    u64 total;
    if (best.last == 0) {
        fill_bins(row, scale, weigh, s, &total);
    } else {
        fill_bins(row, scale, measure, s, &total);
    }
    if (total == 0) {
        return id_of(summary.best);
    }
    if (threadIdx.x == 0) {
        s.random = random_bits(p.seed, p.choice, p.position);
        s.bits_per_bin = static_cast<float>(weights.log2_per_unit) / scale.per_unit;
        s.begin = 0;
        s.end = 0;
    }
    __syncthreads();
    u64 wanted = cuts_share ? share_of(total, p.top_p) : drawn(s.random, total);
    // First finds the last token of top-p, then draws among those up to it.
    bool draws = !cuts_share;
    uint32_t listed = 0;
#pragma unroll 1
    for (;; draws = true) {
        if (wanted <= s.begin || wanted > s.end) {
            const Pair bins = pair_of_bins(s, &total);
            const Place bin = reach(bins, wanted, s);
            // If all tokens up to it are in the list, so is the one drawn.
            const bool all = !draws && tokens_up_to(bin.index, bins, s) <= 256 * LIST_MAX;
            uint32_t first = all ? 0 : bin.index;
#pragma unroll 1
            for (;; first = bin.index) {
                listed = list_bins(row, scale, measure, first, bin.index, s);
                // `all` was only an estimate.
                if (listed <= LIST_MAX || first == bin.index) {
                    break;
                }
            }
            if (listed > LIST_MAX) {
                break;
            }
            if (threadIdx.x == 0) {
                s.begin = first == 0 ? 0 : bin.before;
                s.end = bin.before + bin.own;
            }
        }
        Pair pair = weigh_list(weights, listed, s, &total);
        pair.before += s.begin;
        const Place place = reach(pair, wanted, s);
        if (draws) {
            return id_of(s.keys[place.index]);
        }
        wanted = drawn(s.random, place.before + place.own);
    }
#pragma unroll 1
    for (;; draws = true) {
        const Reached reached = reach_by_digits(row, measure, wanted, s);
        if (draws) {
            return id_of(reached.key);
        }
        wanted = drawn(s.random, reached.through);
    }
}

}  // namespace tutti
