// Puts the results of a sequence's parts together, which attention_decode.cu and latent.cu leave:
//
//   out = sum_s 2^(m_s - m) o_s / sum_s 2^(m_s - m) l_s
//
// with a part's maximum m_s of exponents, sum l_s of weights and sum o_s of values, and m the largest
// m_s. The parts are added in their order. Sequences with one part are complete already. Limits:
// at most 128 parts; any head_dim.
#include "attention.cuh"

using namespace tutti;

constexpr uint32_t WARPS = 4;

extern "C" __global__ void __launch_bounds__(128)
    tutti_decode_reduce(const float* partial_out, const float* partial_ml, const TuttiSeq* seqs,
                        const uint32_t* items, tutti_bf16* out, uint32_t num_heads,
                        uint32_t head_dim, uint32_t window, uint32_t max_splits,
                        uint32_t least_split, const uint32_t* live) {
    release_successors();
    const uint32_t head = blockIdx.x;
    const uint32_t item = blockIdx.y;
    const uint32_t index = load_input(items + item);
    if (item >= live_items(live)) {
        end_without_waiting(item == 0);
        return;
    }
    const Single seq(seqs, index);
    const Splits splits(seq.context_len, window, max_splits, least_split);
    wait_for_predecessors();
    if (splits.count == 1) {
        // The attention kernel has already written the result.
        return;
    }
    const size_t first = (static_cast<size_t>(index) * num_heads + head) * max_splits;

    // Maxima and sums of all parts, one per thread: read in parallel instead of one after another.
    SHARED_ARRAY(float, maxima, WARPS);
    SHARED_ARRAY(float, factors, WARPS * 32);
    SHARED_ARRAY(float, totals, WARPS * 32);
    const bool has_part = threadIdx.x < splits.count;
    float2 ml = {NOTHING, 0.0f};
    if (has_part) {
        ml = reinterpret_cast<const float2*>(partial_ml)[first + threadIdx.x];
    }
    const float own = ml.x;
    float most = warp_largest(own);
    if (threadIdx.x % 32 == 0) {
        maxima[threadIdx.x / 32] = most;
    }
    __syncthreads();
#pragma unroll
    for (uint32_t warp = 0; warp < WARPS; warp++) {
        most = fmaxf(most, maxima[warp]);
    }
    if (has_part) {
        factors[threadIdx.x] = exp2_fast(own - most);
        totals[threadIdx.x] = ml.y;
    }
    __syncthreads();
    float total = 0.0f;
    for (uint32_t s = 0; s < splits.count; s++) {
        total += totals[s] * factors[s];
    }
    for (uint32_t dim = threadIdx.x; dim < head_dim; dim += WARPS * 32) {
        float sum = 0.0f;
        // As many loads in flight as a sequence of 1024 tokens has parts.
#pragma unroll 16
        for (uint32_t s = 0; s < splits.count; s++) {
            sum += partial_out[(first + s) * head_dim + dim] * factors[s];
        }
        const size_t row = static_cast<size_t>(seq.row) * num_heads + head;
        out[row * head_dim + dim] = to_bf16(sum / total);
    }
}
