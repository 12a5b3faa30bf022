// Choosing a token from a row of logits, and log-probabilities. One block per row.
//
// Order: the mask, logit bias, suppression of end tokens, penalties (repetition, frequency, presence); then
// the arg-max if the temperature is 0; else temperature, min-p, top-k, top-p and one uniform number
// of Philox4x32-10 (key: seed; counter: position, draw 0, choice), which goes up the cumulated
// weights: in order of probability where top-k or top-p may cut, else in order of token id. Ties go
// to the lower id. The same steps as `kernels::reference`, whose sums are f64: here weights are
// whole multiples of 2^-40 of the largest (see select.cuh), so a draw differs from the reference's
// only where a uniform number falls within about 1e-6 of a boundary.
//
// Log-probabilities are of the unmodified logits: x - max - ln(sum of e^(x - max)), the sum in f64.
// Shapes and launch rules: kernels.h. Limits: vocabulary up to 2^20, 1024 biases per row, 128 most
// likely tokens.
#include "select.cuh"

namespace tutti {
namespace {

constexpr uint32_t THREADS = SELECT_THREADS;
// After a cut that leaves at most this many tokens, they are looked for in a list.
constexpr uint32_t LIST_MAX = 1024;

struct RowSummary {
    u64 best;   // the largest order key
    bool sound; // no NaN, no +infinity, and something above -infinity
};

__device__ __forceinline__ u64 larger(u64 a, u64 b) { return a > b ? a : b; }

__device__ __forceinline__ u64 warp_largest(u64 x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        x = larger(x, __shfl_xor_sync(ALL_LANES, x, distance));
    }
    return x;
}

// The tokens that a row may choose from; null: all.
__device__ __forceinline__ const uint32_t* mask_of(const TuttiSampleParams& p,
                                                   const uint32_t* masks) {
    return p.mask_start == TUTTI_NO_MASK ? nullptr : masks + p.mask_start;
}

// Looks at all logits of a row.
__device__ __forceinline__ RowSummary summarize(const Tokens& row, SelectScratch& s) {
    u64 best = 0;
    bool bad = false;
    bool any = false;
    row.each([&](float x, uint32_t id) {
        // Written so that NaN is bad.
        bad = bad || !(x < INFINITY);
        any = any || x > -INFINITY;
        best = larger(best, order_key(x, id));
    });
    best = warp_largest(best);
    const uint32_t flags = (__any_sync(ALL_LANES, bad) ? 1u : 0u) |
                           (__any_sync(ALL_LANES, any) ? 2u : 0u);
    const uint32_t lane = threadIdx.x % 32;
    if (lane == 0) {
        s.warp_best[threadIdx.x / 32] = best;
        s.warp_flags[threadIdx.x / 32] = flags;
    }
    __syncthreads();
    best = s.warp_best[lane];
    const uint32_t warp_flags = s.warp_flags[lane];
    best = warp_largest(best);
    const bool any_bad = __any_sync(ALL_LANES, (warp_flags & 1) != 0);
    const bool any_finite = __any_sync(ALL_LANES, (warp_flags & 2) != 0);
    __syncthreads();
    return {best, !any_bad && any_finite};
}

// The largest order key of a token of the row that `mask` allows, whose bit `first_id` is that of the
// row's first token, and whose logit is above -infinity; 0 when there is none.
__device__ __forceinline__ u64 best_allowed(const Tokens& row, const uint32_t* mask,
                                            uint32_t first_id, SelectScratch& s) {
    u64 best = 0;
    row.each([&](float x, uint32_t id) {
        const uint32_t bit = first_id + id;
        const bool allowed = (mask[bit / 32] >> (bit % 32) & 1u) != 0 && x > -INFINITY;
        best = larger(best, allowed ? order_key(x, id) : 0);
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

// Philox4x32-10, as kernels/src/philox.rs; the upper 53 of 64 random bits.
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
        // An id's first entry applies all of them, in order.
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
            edited[id] = -INFINITY;
        }
    }
    // The highest bit says that a token was seen at all, the others how often it was generated.
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
        // Whoever takes the count applies it, and leaves 0 behind.
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

// Collects the tokens with order keys of at least `floor`, `capacity` at most, in any order.
__device__ __forceinline__ uint32_t collect(const Tokens& tokens, u64 floor, float* logits,
                                            uint32_t* ids, uint32_t capacity, SelectScratch& s) {
    if (threadIdx.x == 0) {
        s.length = 0;
    }
    __syncthreads();
    tokens.each([&](float x, uint32_t id) {
        if (order_key(x, id) >= floor) {
            const uint32_t at = atomicAdd(&s.length, 1u);
            if (at < capacity) {
                logits[at] = x;
                ids[at] = id;
            }
        }
    });
    __syncthreads();
    const uint32_t length = s.length < capacity ? s.length : capacity;
    __syncthreads();
    return length;
}

// The token at `bits` / 2^53 of the way through the weights in order of id.
__device__ __forceinline__ uint32_t draw_by_id(const Tokens& row, const Weights& weights, u64 bits,
                                               SelectScratch& s) {
    // Every warp has a part of the row, of whole 128s; a lane 4 of each.
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t part = divide_up(divide_up(row.count, 32), 128) * 128;
    const uint32_t start = threadIdx.x / 32 * part;
    const uint32_t end = start + part < row.count ? start + part : row.count;
    // A token that is not there has the logit -infinity, hence no weight.
    const auto weights_of = [&](uint32_t first, u64 (&w)[4]) {
        const float4 x = row.four(first);
        w[0] = weights.of(x.x, order_key(x.x, first));
        w[1] = weights.of(x.y, order_key(x.y, first + 1));
        w[2] = weights.of(x.z, order_key(x.z, first + 2));
        w[3] = weights.of(x.w, order_key(x.w, first + 3));
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
    // floor(u * total): a whole number is above u * total if and only if it is above its floor.
    const u64 target = __umul64hi(bits << 11, total);
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
    const uint32_t token = static_cast<uint32_t>(s.found);
    __syncthreads();
    return token;
}

// Draws a token; `best` is the largest order key of the row.
__device__ __forceinline__ uint32_t draw(const TuttiSampleParams& p, const Tokens& row, u64 best,
                                         SelectScratch& s, float* list_logits,
                                         uint32_t* list_ids) {
    Weights weights;
    weights.max = row.logits[id_of(best)];
    weights.log2_per_unit = 1.4426950408889634 / static_cast<double>(p.temperature);
    weights.min_p = p.min_p;
    weights.floor = 0;
    const u64 bits = random_bits(p.seed, p.choice, p.position);
    const bool cuts_rank = p.top_k > 0 && p.top_k < row.count;
    if (!cuts_rank && !(p.top_p < 1.0f)) {
        return draw_by_id(row, weights, bits, s);
    }
    Tokens tokens = row;
    if (cuts_rank) {
        const uint32_t k = p.top_k;
        weights.floor = select_token(
            tokens, [=](float x, u64 key) { return weights.of(x, key) != 0 ? u64{1} : u64{0}; },
            [=](u64) { return u64{k}; }, s);
        if (k <= LIST_MAX && weights.floor != 0) {
            const uint32_t n = collect(tokens, weights.floor, list_logits, list_ids, LIST_MAX, s);
            tokens = {list_logits, list_ids, n, false, nullptr};
        }
    }
    if (p.top_p < 1.0f) {
        const double share = static_cast<double>(p.top_p);
        weights.floor = select_token(
            tokens, [=](float x, u64 key) { return weights.of(x, key); },
            [=](u64 total) {
                const double wanted = ceil(static_cast<double>(total) * share);
                const u64 whole = wanted < 1.0 ? 1 : static_cast<u64>(wanted);
                return whole < total ? whole : total;
            },
            s);
    }
    const u64 chosen = select_token(
        tokens, [=](float x, u64 key) { return weights.of(x, key); },
        [=](u64 total) { return __umul64hi(bits << 11, total) + 1; }, s);
    return id_of(chosen);
}

// Log-probability and rank of `token`, and the most likely tokens. The row is sound, `best` its
// largest order key.
__device__ __forceinline__ void score(const Tokens& row, u64 best, uint32_t token, uint32_t top_n,
                                      TuttiSampled* out, uint32_t* top_ids, float* top_logprobs,
                                      SelectScratch& s, float* list_logits, uint32_t* list_ids) {
    const float max = row.logits[id_of(best)];
    const float own = row.logits[token];
    double sum = 0.0;
    u64 better = 0;
    row.each([&](float x, uint32_t id) {
        sum += static_cast<double>(expf(x - max));
        better += x > own || (x == own && id < token) ? 1 : 0;
    });
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(ALL_LANES, sum, distance);
    }
    const uint32_t lane = threadIdx.x % 32;
    if (lane == 0) {
        s.warp_sum[threadIdx.x / 32] = sum;
    }
    u64 all_better;
    // Its barriers also make the sums visible.
    block_sum_before(better, s, &all_better);
    sum = s.warp_sum[lane];
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(ALL_LANES, sum, distance);
    }
    const double log_total = static_cast<double>(max) + log(sum);
    if (threadIdx.x == 0) {
        out->logprob = static_cast<float>(static_cast<double>(own) - log_total);
        out->rank = static_cast<uint32_t>(all_better) + 1;
    }
    if (top_n == 0) {
        return;
    }
    const u64 floor = select_token(
        row, [](float, u64) { return u64{1}; }, [=](u64) { return u64{top_n}; }, s);
    const uint32_t n = collect(row, floor, list_logits, list_ids, top_n, s);
    if (threadIdx.x < n) {
        const float x = list_logits[threadIdx.x];
        const uint32_t id = list_ids[threadIdx.x];
        const u64 key = order_key(x, id);
        uint32_t place = 0;
        for (uint32_t i = 0; i < n; i++) {
            place += order_key(list_logits[i], list_ids[i]) > key ? 1 : 0;
        }
        top_ids[place] = id;
        top_logprobs[place] = static_cast<float>(static_cast<double>(x) - log_total);
    }
}

__device__ __forceinline__ uint32_t at_most(uint32_t a, uint32_t b) { return a < b ? a : b; }

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
    SHARED_ARRAY(float, list_logits, LIST_MAX);
    SHARED_ARRAY(uint32_t, list_ids, LIST_MAX);
    release_successors();
    wait_for_predecessors();
    const uint32_t row = blockIdx.x;
    if (!is_live(live, row)) {
        return;
    }
    SelectScratch& s = scratch[0];
    const float* own = logits + static_cast<size_t>(row) * stride;
    const TuttiSampleParams p = params[row];
    const Tokens given = row_of_tokens(own, vocab, stride);
    const RowSummary plain = summarize(given, s);
    RowSummary summary = plain;
    Tokens used = row_of_tokens(own, vocab, stride, mask_of(p, masks));
    const bool edits = (p.bias_len | p.suppress_len | p.prompt_len | p.output_len) != 0;
    if (plain.sound && edits) {
        float* copy = edited + static_cast<size_t>(row) * vocab;
        used.each([&](float x, uint32_t id) { copy[id] = x; });
        __syncthreads();
        edit(p, biases, ids, copy, counts + static_cast<size_t>(row) * vocab, vocab);
        used = row_of_tokens(copy, vocab, vocab);
    }
    if (plain.sound && (edits || used.mask != nullptr)) {
        summary = summarize(used, s);
    }
    if (threadIdx.x == 0) {
        out[row] = {0, summary.sound ? 0u : 1u, 0.0f, 0};
    }
    if (!summary.sound) {
        return;
    }
    const uint32_t token = p.temperature <= 0.0f
                               ? id_of(summary.best)
                               : draw(p, used, summary.best, s, list_logits, list_ids);
    if (threadIdx.x == 0) {
        out[row].token = token;
    }
    if (p.top_n != TUTTI_NO_LOGPROBS) {
        const size_t top = static_cast<size_t>(row) * top_stride;
        score(given, plain.best, token, tops(p.top_n, vocab, top_stride), &out[row],
              top_ids + top, top_logprobs + top, s, list_logits, list_ids);
    }
}

extern "C" __global__ void __launch_bounds__(1024, 1)
    tutti_logprobs(const float* logits, const uint32_t* targets, TuttiSampled* out,
                   uint32_t* top_ids, float* top_logprobs, uint32_t stride, uint32_t vocab,
                   uint32_t top_n, uint32_t top_stride, const uint32_t* live) {
    SHARED_ARRAY(SelectScratch, scratch, 1);
    SHARED_ARRAY(float, list_logits, LIST_MAX);
    SHARED_ARRAY(uint32_t, list_ids, LIST_MAX);
    release_successors();
    wait_for_predecessors();
    const uint32_t row = blockIdx.x;
    if (!is_live(live, row)) {
        return;
    }
    SelectScratch& s = scratch[0];
    const float* own = logits + static_cast<size_t>(row) * stride;
    const Tokens given = row_of_tokens(own, vocab, stride);
    const RowSummary summary = summarize(given, s);
    const uint32_t token = summary.sound ? targets[row] : 0;
    if (threadIdx.x == 0) {
        out[row] = {token, summary.sound ? 0u : 1u, 0.0f, 0};
    }
    if (!summary.sound) {
        return;
    }
    const size_t top = static_cast<size_t>(row) * top_stride;
    score(given, summary.best, token, tops(top_n, vocab, top_stride), &out[row],
          top_ids + top, top_logprobs + top, s, list_logits, list_ids);
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
    const float* own = logits + static_cast<size_t>(row) * stride;
    const Tokens given = row_of_tokens(own, vocab, stride);
    const RowSummary plain = summarize(given, scratch[0]);
    u64 best = plain.best;
    bool any = true;
    const uint32_t* mask = params == nullptr ? nullptr : mask_of(params[row], masks);
    if (plain.sound && mask != nullptr) {
        // Of this part of the vocabulary the mask's bits may begin anywhere in a word.
        best = best_allowed(given, mask, first_id, scratch[0]);
        any = best != 0;
    }
    if (threadIdx.x == 0) {
        const uint32_t id = any ? id_of(best) : 0;
        const TuttiIdValue found = {first_id + id, own[id]};
        const TuttiIdValue nothing = {TUTTI_NOTHING_ALLOWED, -INFINITY};
        const TuttiIdValue corrupted = {TUTTI_CORRUPTED, 0.0f};
        out[row] = plain.sound ? any ? found : nothing : corrupted;
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
        // Of equal ones the first: ids grow with ranks. What is allowed nowhere is -infinity.
        if (other.value > best.value) {
            best = other;
        }
    }
    sound = sound && best.id != TUTTI_NOTHING_ALLOWED;
    const TuttiSampled picked = {best.id, 0, 0.0f, 0};
    const TuttiSampled corrupted = {0, 1, 0.0f, 0};
    out[row] = sound ? picked : corrupted;
}
