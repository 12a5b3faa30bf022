// Causal attention for head dimensions without a kernel of their own: one warp per row and head,
// one token at a time. Correct but slow; for unusual models, and for tests of the other kernels.
//
//   out = sum_j softmax(q . K_j * scale) V_j over the visible tokens j, and a sink without V
//
// Shapes and launch rules: kernels.h. Limits: head_dim even, at most 256.
#include "attention.cuh"

namespace tutti {
namespace {

constexpr uint32_t WARPS = 4;
// Head dimensions per lane.
constexpr uint32_t DIMS = 8;

template <class Kv>
__device__ __forceinline__ void attention_any(const tutti_bf16* q, const Kv* k_cache,
                                              const Kv* v_cache, TUTTI_ATTENTION_ANY_ARGUMENTS) {
    release_successors();
    wait_for_predecessors();
    const uint32_t row = blockIdx.x;
    const uint32_t head = blockIdx.y * WARPS + threadIdx.x / 32;
    const uint32_t lane = threadIdx.x % 32;
    if (!is_live(live, row) || head >= num_heads) {
        return;
    }
    const TuttiSeq seq = seqs[seq_of_row(seqs, *num_seqs, row)];
    const uint32_t position = seq.context_len - seq.num_rows + (row - seq.row_start);
    const Pages pages = {block_tables + seq.table_start, num_kv_heads,
                         head / (num_heads / num_kv_heads), block_shift};
    const size_t own = (static_cast<size_t>(row) * num_heads + head) * head_dim;
    float query[DIMS];
    float mixed[DIMS];
#pragma unroll
    for (uint32_t i = 0; i < DIMS; i++) {
        const uint32_t dim = lane + 32 * i;
        query[i] = dim < head_dim ? from_bf16(q[own + dim]) : 0.0f;
        mixed[i] = 0.0f;
    }
    Running running;
    if (sinks != nullptr) {
        running.begin(sinks[head], true);
    }
    for (uint32_t j = first_seen(position, window); j <= position; j++) {
        const size_t token = pages.token(j) * head_dim;
        float dot = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < DIMS; i++) {
            const uint32_t dim = lane + 32 * i;
            dot += dim < head_dim ? query[i] * from_stored(k_cache[token + dim]) : 0.0f;
        }
        float sum[1] = {warp_sum(dot)};
        if (cap != 0.0f) {
            cap_scores(sum, scale, cap);
        }
        const float score = sum[0] * (scale * LOG2_E);
        const float factor = running.raise(score);
        const float weight = exp2_fast(score - running.base());
        running.sum += weight;
#pragma unroll
        for (uint32_t i = 0; i < DIMS; i++) {
            const uint32_t dim = lane + 32 * i;
            if (dim < head_dim) {
                mixed[i] = mixed[i] * factor + weight * from_stored(v_cache[token + dim]);
            }
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < DIMS; i++) {
        const uint32_t dim = lane + 32 * i;
        if (dim < head_dim) {
            out[own + dim] = to_bf16(mixed[i] / running.sum);
        }
    }
}

}  // namespace
}  // namespace tutti

#define ATTENTION_ANY(name, kv)                                                                    \
    extern "C" __global__ void __launch_bounds__(128)                                              \
        name(const tutti_bf16* q, const kv* k_cache, const kv* v_cache,                            \
             TUTTI_ATTENTION_ANY_ARGUMENTS) {                                                      \
        tutti::attention_any<kv>(q, k_cache, v_cache, seqs, num_seqs, block_tables, out,           \
                                 num_heads, num_kv_heads, head_dim, block_shift, window, scale,    \
                                 cap, sinks, live);                                                \
    }
ATTENTION_ANY(tutti_attention_any, tutti_bf16)
ATTENTION_ANY(tutti_attention_any_fp8, tutti_fp8)
