// Choosing a token from a row of logits, and log-probabilities. One block per row.
//
// Order: the mask, logit bias, suppression of end tokens, penalties (repetition, frequency,
// presence); then the arg-max if the temperature is 0; otherwise temperature, min-p, top-k, top-p
// and one uniform number of Philox4x32-10 (key: seed; counter: position, draw 0, choice). The
// number selects from the cumulative weights, in order of probability if top-k or top-p can cut,
// otherwise in order of token id. Ties go to the lower id. The same steps as in
// `kernels::reference`, whose sums are f64: here weights are whole multiples of 2^-40 of the
// largest (see draw.cuh), so a draw differs from the reference's only if a uniform number falls
// within about 1e-6 of a boundary.
//
// Log-probabilities are of the unmodified logits: x - max - ln(sum of e^(x - max)), the sum in f64.
//
// Ranks that each have the logits of a part of the vocabulary need not gather them where few tokens
// can be chosen: the best, or the best 128 with top-k. Each finds those of its own part, all gather
// these, and each chooses, in the same way. What top-k drops or top-p cuts depends on the order
// alone, and sums of weights are exact, so the token is the one that the whole row would give.
//
// Shapes and launch rules: kernels.h. Limits: vocabulary up to 2^20, 1024 biases per row, 128 most
// likely tokens.
#include "draw.cuh"

namespace tutti {
namespace {

constexpr uint32_t THREADS = SELECT_THREADS;
// Distance from the largest logit at which the most likely tokens are searched: e^-28.
constexpr float LIKELY = 28.0f;

// The mask of a row; null if it allows all tokens.
__device__ __forceinline__ const uint32_t* mask_of(const TuttiSampleParams& p,
                                                   const uint32_t* masks) {
    return p.mask_start == TUTTI_NO_MASK ? nullptr : masks + p.mask_start;
}

// Summarizes all logits of a row; `out` is in shared memory.
__device__ __forceinline__ void summarize(const Tokens& row, SelectScratch& s, RowSummary* out) {
    // Subtracted from keys of floats, so that the key of -infinity wraps around to the largest.
    constexpr uint32_t LOWEST_FINITE = 0x00800000u;
    uint32_t lowest = 0xffffffffu;
    uint32_t key = 0;
    uint32_t id_of_best = 0;
    bool bad = false;
    row.each([&](float x, uint32_t id) {
        // Written so that NaN counts as bad.
        bad = bad || !(x < INFINITY);
        const uint32_t own = float_key(x);
        const uint32_t above = own - LOWEST_FINITE;
        lowest = above < lowest ? above : lowest;
        // A thread's ids are ascending, so the first of equal logits stays.
        id_of_best = own > key ? id : id_of_best;
        key = own > key ? own : key;
    });
    u64 best = warp_largest(static_cast<u64>(key) << 32 | (0xffffffffu - id_of_best));
    lowest = __reduce_min_sync(ALL_LANES, lowest);
    bad = __any_sync(ALL_LANES, bad);
    const uint32_t lane = threadIdx.x % 32;
    if (lane == 0) {
        s.warp_best[threadIdx.x / 32] = best;
        s.warp_lowest[threadIdx.x / 32] = lowest;
        s.warp_bad[threadIdx.x / 32] = bad ? 1 : 0;
    }
    __syncthreads();
    best = warp_largest(s.warp_best[lane]);
    lowest = __reduce_min_sync(ALL_LANES, s.warp_lowest[lane]);
    bad = __any_sync(ALL_LANES, s.warp_bad[lane] != 0);
    if (threadIdx.x == 0) {
        const float x = logit_of(static_cast<u64>(lowest + LOWEST_FINITE) << 32);
        *out = {best, x, !bad && x > -INFINITY};
    }
    __syncthreads();
}

// Whether a token of a part of a vocabulary may be chosen. The mask's bits for a part can begin
// anywhere in a word: `bit` is the token's id in the whole vocabulary.
__device__ __forceinline__ bool is_allowed(float x, uint32_t bit, const uint32_t* mask) {
    // Tests x first: past the row, the mask may have ended as well.
    return x > -INFINITY && (mask == nullptr || (mask[bit / 32] >> (bit % 32) & 1u) != 0);
}

// Instead of a part's best order key, if it has NaN or +infinity. The key of a NaN, so of no token.
constexpr u64 CORRUPTED_KEY = ~0ull;

// The largest order key of a part of a vocabulary, whose first token is `first_id`, among tokens
// that the mask allows and whose logit is above -infinity: 0 if there is none, since other parts
// may have one. Summarizes all of the part in `s.given`.
__device__ __forceinline__ u64 best_of_part(const Tokens& part, const uint32_t* mask,
                                            uint32_t first_id, SelectScratch& s) {
    summarize(part, s, &s.given);
    if (!s.given.sound) {
        // Only -infinity. NaN and +infinity have no such lowest.
        return s.given.lowest == -INFINITY ? 0 : CORRUPTED_KEY;
    }
    if (mask == nullptr) {
        return s.given.best;
    }
    u64 best = 0;
    part.each([&](float x, uint32_t id) {
        best = larger(best, is_allowed(x, first_id + id, mask) ? order_key(x, id) : 0);
    });
    best = warp_largest(best);
    if (threadIdx.x % 32 == 0) {
        s.warp_best[threadIdx.x / 32] = best;
    }
    __syncthreads();
    best = s.warp_best[threadIdx.x % 32];
    best = warp_largest(best);
    __syncthreads();
    return best;
}

// Applies bias, suppression and penalties to `edited`, which holds the row's logits. Rounds after
// every operation, as the reference does.
__device__ __forceinline__ void edit(const TuttiSampleParams& p, const TuttiIdValue* biases,
                                     const uint32_t* ids, float* edited, uint32_t* counts,
                                     uint32_t vocab) {
    const TuttiIdValue* bias = biases + p.bias_start;
    for (uint32_t i = threadIdx.x; i < p.bias_len; i += THREADS) {
        const uint32_t id = bias[i].id;
        bool first = id < vocab;
        for (uint32_t j = 0; j < i && first; j++) {
            first = bias[j].id != id;
        }
        // An id's first entry applies all of the id's entries, in order.
        for (uint32_t j = i; j < p.bias_len && first; j++) {
            if (bias[j].id == id) {
                edited[id] = __fadd_rn(edited[id], bias[j].value);
            }
        }
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < p.suppress_len; i += THREADS) {
        const uint32_t id = ids[p.suppress_start + i];
        if (id < vocab) {
            // It may be listed twice.
            store_alike(&edited[id], -INFINITY);
        }
    }
    // The highest bit marks a token that was seen at all; the others count how often it was
    // generated.
    for (uint32_t i = threadIdx.x; i < p.prompt_len; i += THREADS) {
        const uint32_t id = ids[p.prompt_start + i];
        if (id < vocab) {
            atomicOr(&counts[id], 0x80000000u);
        }
    }
    for (uint32_t i = threadIdx.x; i < p.output_len; i += THREADS) {
        const uint32_t id = ids[p.output_start + i];
        if (id < vocab) {
            atomicAdd(&counts[id], 1u);
        }
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < p.prompt_len + p.output_len; i += THREADS) {
        const uint32_t id = i < p.prompt_len ? ids[p.prompt_start + i]
                                             : ids[p.output_start + (i - p.prompt_len)];
        // The thread that takes the count applies it and resets it to 0.
        const uint32_t count = id < vocab ? atomicExch(&counts[id], 0u) : 0;
        if (count != 0) {
            float x = edited[id];
            x = x > 0.0f ? __fdiv_rn(x, p.repetition_penalty)
                         : __fmul_rn(x, p.repetition_penalty);
            const uint32_t generated = count & 0x7fffffffu;
            if (generated > 0) {
                x = __fsub_rn(x, __fmul_rn(p.frequency_penalty, static_cast<float>(generated)));
                x = __fsub_rn(x, p.presence_penalty);
            }
            edited[id] = x;
        }
    }
    __syncthreads();
}

// Log-probability and rank of `token`, and the most likely tokens. The row is sound.
__device__ __forceinline__ void score(const Tokens& row, const RowSummary& summary, uint32_t token,
                                      uint32_t top_n, TuttiSampled* out, uint32_t* top_ids,
                                      float* top_logprobs, SelectScratch& s) {
    const float max = logit_of(summary.best);
    const float own = row.logits[token];
    double sum = 0.0;
    u64 better = 0;
    row.each([&](float x, uint32_t id) {
        sum += static_cast<double>(expf(x - max));
        better += x > own || (x == own && id < token) ? 1 : 0;
    });
    sum = warp_sum(sum);
    const uint32_t lane = threadIdx.x % 32;
    if (lane == 0) {
        s.warp_sum[threadIdx.x / 32] = sum;
    }
    u64 all_better;
    // The barriers within also make the sums visible.
    block_sum_before(better, s, &all_better);
    sum = warp_sum(s.warp_sum[lane]);
    const double log_total = static_cast<double>(max) + log(sum);
    if (threadIdx.x == 0) {
        out->logprob = static_cast<float>(static_cast<double>(own) - log_total);
        out->rank = static_cast<uint32_t>(all_better) + 1;
    }
    if (top_n == 0) {
        return;
    }
    const Scale scale(summary, LIKELY);
    const Best best = best_tokens(
        row, scale, [&](float, uint32_t id) { return id < row.count; }, top_n, s);
    if (best.listed == 0) {
        list_tokens(row, [&](float x, uint32_t id) { return order_key(x, id) >= best.last; }, s);
    }
    if (threadIdx.x < top_n) {
        const u64 key = s.keys[threadIdx.x];
        top_ids[threadIdx.x] = id_of(key);
        top_logprobs[threadIdx.x] =
            static_cast<float>(static_cast<double>(logit_of(key)) - log_total);
    }
}

__device__ __forceinline__ uint32_t tops(uint32_t wanted, uint32_t vocab, uint32_t top_stride) {
    return at_most(at_most(wanted, vocab), at_most(TUTTI_TOP_MAX, top_stride));
}

}  // namespace
}  // namespace tutti

using namespace tutti;

extern "C" __global__ void __launch_bounds__(1024, 1)
    tutti_sample(const float* logits, const TuttiSampleParams* params, const TuttiIdValue* biases,
                 const uint32_t* ids, const uint32_t* masks, float* edited, uint32_t* counts,
                 TuttiSampled* out, uint32_t* top_ids, float* top_logprobs, uint32_t stride,
                 uint32_t vocab, uint32_t top_stride, const uint32_t* live) {
    SHARED_ARRAY(SelectScratch, scratch, 1);
    release_successors();
    wait_for_predecessors();
    const uint32_t row = blockIdx.x;
    if (!is_live(live, row)) {
        return;
    }
    SelectScratch& s = scratch[0];
    const float* own = logits + static_cast<size_t>(row) * stride;
    // Read from memory at each use: there are too few registers for a copy.
    const TuttiSampleParams& p = params[row];
    const Tokens given = row_of_tokens(own, vocab, stride);
    summarize(given, s, &s.given);
    const RowSummary* summary = &s.given;
    Tokens used = row_of_tokens(own, vocab, stride, mask_of(p, masks));
    const bool edits = (p.bias_len | p.suppress_len | p.prompt_len | p.output_len) != 0;
    if (s.given.sound && edits) {
        float* copy = edited + static_cast<size_t>(row) * vocab;
        used.each([&](float x, uint32_t id) {
            if (id < vocab) {
                copy[id] = x;
            }
        });
        __syncthreads();
        edit(p, biases, ids, copy, counts + static_cast<size_t>(row) * vocab, vocab);
        used = row_of_tokens(copy, vocab, vocab);
    }
    if (s.given.sound && (edits || used.mask != nullptr)) {
        summarize(used, s, &s.edited);
        summary = &s.edited;
    }
    if (threadIdx.x == 0) {
        out[row] = {0, summary->sound ? 0u : 1u, 0.0f, 0};
    }
    if (!summary->sound) {
        return;
    }
    const uint32_t token =
        p.temperature <= 0.0f ? id_of(summary->best) : draw(p, used, *summary, s);
    if (threadIdx.x == 0) {
        out[row].token = token;
    }
    if (p.top_n != TUTTI_NO_LOGPROBS) {
        const size_t top = static_cast<size_t>(row) * top_stride;
        score(given, s.given, token, tops(p.top_n, vocab, top_stride), &out[row], top_ids + top,
              top_logprobs + top, s);
    }
}

extern "C" __global__ void __launch_bounds__(1024, 1)
    tutti_logprobs(const float* logits, const uint32_t* targets, TuttiSampled* out,
                   uint32_t* top_ids, float* top_logprobs, uint32_t stride, uint32_t vocab,
                   uint32_t top_n, uint32_t top_stride, const uint32_t* live) {
    SHARED_ARRAY(SelectScratch, scratch, 1);
    release_successors();
    wait_for_predecessors();
    const uint32_t row = blockIdx.x;
    if (!is_live(live, row)) {
        return;
    }
    SelectScratch& s = scratch[0];
    const float* own = logits + static_cast<size_t>(row) * stride;
    const Tokens given = row_of_tokens(own, vocab, stride);
    summarize(given, s, &s.given);
    const RowSummary& summary = s.given;
    const uint32_t token = summary.sound ? targets[row] : 0;
    if (threadIdx.x == 0) {
        out[row] = {token, summary.sound ? 0u : 1u, 0.0f, 0};
    }
    if (!summary.sound) {
        return;
    }
    const size_t top = static_cast<size_t>(row) * top_stride;
    score(given, summary, token, tops(top_n, vocab, top_stride), &out[row], top_ids + top,
          top_logprobs + top, s);
}

extern "C" __global__ void __launch_bounds__(1024, 1)
    tutti_argmax(const float* logits, const TuttiSampleParams* params, const uint32_t* masks,
                 TuttiIdValue* out, uint32_t stride, uint32_t vocab, uint32_t first_id,
                 const uint32_t* live) {
    SHARED_ARRAY(SelectScratch, scratch, 1);
    release_successors();
    wait_for_predecessors();
    const uint32_t row = blockIdx.x;
    if (!is_live(live, row)) {
        return;
    }
    const Tokens part =
        row_of_tokens(logits + static_cast<size_t>(row) * stride, vocab, stride);
    const uint32_t* mask = params == nullptr ? nullptr : mask_of(params[row], masks);
    const u64 best = best_of_part(part, mask, first_id, scratch[0]);
    if (threadIdx.x == 0) {
        const TuttiIdValue found = {first_id + id_of(best), logit_of(best)};
        const TuttiIdValue nothing = {TUTTI_NOTHING_ALLOWED, -INFINITY};
        const TuttiIdValue corrupted = {TUTTI_CORRUPTED, 0.0f};
        out[row] = best == 0 ? nothing : best == CORRUPTED_KEY ? corrupted : found;
    }
}

extern "C" __global__ void __launch_bounds__(256)
    tutti_argmax_merge(const TuttiIdValue* found, TuttiSampled* out, uint32_t ranks, uint32_t rows,
                       const uint32_t* live) {
    release_successors();
    wait_for_predecessors();
    const uint32_t row = blockIdx.x * 256 + threadIdx.x;
    if (row >= rows || !is_live(live, row)) {
        return;
    }
    TuttiIdValue best = found[row];
    bool sound = best.id != TUTTI_CORRUPTED;
    for (uint32_t rank = 1; rank < ranks; rank++) {
        const TuttiIdValue other = found[static_cast<size_t>(rank) * rows + row];
        sound = sound && other.id != TUTTI_CORRUPTED;
        // The first of equal ones wins, since ids ascend with ranks. If nothing is allowed, it is
        // -infinity.
        if (other.value > best.value) {
            best = other;
        }
    }
    sound = sound && best.id != TUTTI_NOTHING_ALLOWED;
    const TuttiSampled picked = {best.id, 0, 0.0f, 0};
    const TuttiSampled corrupted = {0, 1, 0.0f, 0};
    out[row] = sound ? picked : corrupted;
}

extern "C" __global__ void __launch_bounds__(1024, 1)
    tutti_best_keys(const float* logits, const TuttiSampleParams* params, const uint32_t* masks,
                    uint64_t* out, uint32_t stride, uint32_t vocab, uint32_t first_id,
                    uint32_t most, const uint32_t* live) {
    SHARED_ARRAY(SelectScratch, scratch, 1);
    release_successors();
    wait_for_predecessors();
    const uint32_t row = blockIdx.x;
    if (!is_live(live, row)) {
        return;
    }
    SelectScratch& s = scratch[0];
    const TuttiSampleParams& p = params[row];
    const Tokens part =
        row_of_tokens(logits + static_cast<size_t>(row) * stride, vocab, stride);
    const uint32_t* mask = mask_of(p, masks);
    const u64 best = best_of_part(part, mask, first_id, s);
    const bool any = best != 0 && best != CORRUPTED_KEY;
    const uint32_t wanted = p.temperature <= 0.0f ? 1 : at_most(p.top_k, most);
    // The first is known.
    uint32_t listed = 1;
    if (any && wanted > 1) {
        // Relative to this part's best, which is no better than the whole row's: so what has
        // weight beside that is among them.
        const Weights weights(logit_of(best), p.temperature, p.min_p);
        const Scale scale({best, s.given.lowest, true}, weights.far);
        const auto may_be = [&](float x, uint32_t id) {
            return weights.may_be(x) && is_allowed(x, first_id + id, mask);
        };
        const Best found = best_tokens(part, scale, may_be, wanted, s);
        listed = found.listed;
        if (listed == 0) {
            listed = list_tokens(
                part,
                [&](float x, uint32_t id) {
                    return order_key(x, id) >= found.last && may_be(x, id);
                },
                s);
        }
    }
    if (threadIdx.x < most) {
        // Ids of the whole vocabulary: a key's lower word falls as the id rises.
        u64 key = 0;
        if (threadIdx.x == 0) {
            key = any ? best - first_id : best;
        } else if (threadIdx.x < listed) {
            key = s.keys[threadIdx.x] - first_id;
        }
        out[static_cast<size_t>(row) * most + threadIdx.x] = key;
    }
}

extern "C" __global__ void __launch_bounds__(1024, 1)
    tutti_draw_best(const uint64_t* keys, const TuttiSampleParams* params, TuttiSampled* out,
                    uint32_t ranks, uint32_t rows, uint32_t most, const uint32_t* live) {
    SHARED_ARRAY(SelectScratch, scratch, 1);
    release_successors();
    wait_for_predecessors();
    const uint32_t row = blockIdx.x;
    if (!is_live(live, row)) {
        return;
    }
    SelectScratch& s = scratch[0];
    const TuttiSampleParams& p = params[row];
    const uint32_t count = ranks * most;
    uint32_t padded = 1;
    while (padded < count) {
        padded *= 2;
    }
    for (uint32_t i = threadIdx.x; i < padded; i += THREADS) {
        const size_t list = static_cast<size_t>(i / most) * rows + row;
        s.keys[i] = i < count ? keys[list * most + i % most] : 0;
    }
    __syncthreads();
    sort_list(padded, s);
    const u64 best = s.keys[0];
    // Of a corrupted part, which is larger than all tokens; or no part has a token.
    const bool sound = best != CORRUPTED_KEY && best != 0;
    uint32_t token = 0;
    if (sound) {
        token = id_of(best);
        if (!(p.temperature <= 0.0f)) {
            const Weights weights(logit_of(best), p.temperature, p.min_p);
            // A missing token's key, 0, has a logit that is NaN, and so no weight.
            token = draw_listed(p, weights, at_most(p.top_k, count), s);
        }
    }
    if (threadIdx.x == 0) {
        out[row] = {token, sound ? 0u : 1u, 0.0f, 0};
    }
}
