// Norms that few models have.
//
//   add_layernorm: r += d;  y = (r - mean(r)) / sqrt(mean((r - mean(r))^2) + eps) * w + b
//   qk_squares, qk_scale: q and k normalised over all heads (OLMo 2): each rank adds up
//                         its squares, the ranks add up these sums, and each rank scales its own
//
// Shapes and launch rules: kernels.h. All are bound by memory. Limits: none on widths.
#include "rows.cuh"

namespace tutti {
namespace {

// r + d for 4 elements, stored in r if there is a d.
__device__ __forceinline__ Four added(float* r, const float* d, uint32_t at, uint32_t width) {
    Four v = load_up_to_4(r, at, width);
    if (d != nullptr) {
        const Four more = load_up_to_4(d, at, width);
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            v.v[i] += more.v[i];
        }
        store_up_to_4(r, at, width, v);
    }
    return v;
}

// The sum of (x - mean)^2 over the elements that exist.
__device__ __forceinline__ float deviations(Four v, float mean, uint32_t at, uint32_t width) {
    float sum = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        const float apart = at + i < width ? v.v[i] - mean : 0.0f;
        sum += apart * apart;
    }
    return sum;
}

constexpr uint32_t SQUARES_WARPS = 8;
constexpr uint32_t SQUARES_THREADS = 32 * SQUARES_WARPS;

}  // namespace
}  // namespace tutti

using namespace tutti;

// Rows of up to 8192 elements are read once and stay in registers, the rest of longer ones is read
// again for each pass.
extern "C" __global__ void __launch_bounds__(NORM_THREADS)
    tutti_add_layernorm(float* residual, const float* delta, const float* weight,
                        const float* bias, tutti_bf16* out, uint32_t width, uint32_t out_stride,
                        float eps, const uint32_t* live) {
    SHARED_ARRAY(float, sums, NORM_WARPS);
    SHARED_ARRAY(float, scratch, NORM_WARPS);
    release_successors();
    wait_for_predecessors();
    const uint32_t row = blockIdx.x;
    if (!is_live(live, row)) {
        return;
    }
    float* r = residual + static_cast<size_t>(row) * width;
    const float* d = delta == nullptr ? nullptr : delta + static_cast<size_t>(row) * width;
    tutti_bf16* y = out + static_cast<size_t>(row) * out_stride;
    const uint32_t step = NORM_THREADS * 4;
    Four kept[NORM_KEPT] = {};
    float sum = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < NORM_KEPT; i++) {
        const uint32_t at = threadIdx.x * 4 + i * step;
        if (at < width) {
            kept[i] = added(r, d, at, width);
            sum += (kept[i].v[0] + kept[i].v[1]) + (kept[i].v[2] + kept[i].v[3]);
        }
    }
    for (uint32_t at = threadIdx.x * 4 + NORM_KEPT * step; at < width; at += step) {
        const Four v = added(r, d, at, width);
        sum += (v.v[0] + v.v[1]) + (v.v[2] + v.v[3]);
    }
    const float mean = block_sum<NORM_WARPS>(sum, sums) / static_cast<float>(width);
    sum = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < NORM_KEPT; i++) {
        sum += deviations(kept[i], mean, threadIdx.x * 4 + i * step, width);
    }
    // A thread rereads only elements that it wrote itself.
    for (uint32_t at = threadIdx.x * 4 + NORM_KEPT * step; at < width; at += step) {
        sum += deviations(load_up_to_4(r, at, width), mean, at, width);
    }
    const float scale = norm_scale(block_sum<NORM_WARPS>(sum, scratch), width, eps);

    const bool whole = width % 4 == 0 && out_stride % 4 == 0;
    const auto finish = [&](uint32_t at, Four v) {
        const Four w = load_up_to_4(weight, at, width);
        const Four b = load_up_to_4(bias, at, width);
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            v.v[i] = (v.v[i] - mean) * scale * w.v[i] + b.v[i];
        }
        store_bf16(y, at, width, whole, v);
    };
#pragma unroll
    for (uint32_t i = 0; i < NORM_KEPT; i++) {
        const uint32_t at = threadIdx.x * 4 + i * step;
        if (at < width) {
            finish(at, kept[i]);
        }
    }
    for (uint32_t at = threadIdx.x * 4 + NORM_KEPT * step; at < width; at += step) {
        finish(at, load_up_to_4(r, at, width));
    }
}

extern "C" __global__ void __launch_bounds__(SQUARES_THREADS)
    tutti_qk_squares(const float* qkv, float* out, uint32_t q, uint32_t k, uint32_t stride,
                     uint32_t q_sections, uint32_t k_sections, uint32_t parts,
                     const uint32_t* live) {
    // Sums of q's sections, then of k's.
    SHARED_ARRAY(float, sums, 2 * TUTTI_QK_PARTS_MAX);
    SHARED_ARRAY(float, scratch, SQUARES_WARPS);
    release_successors();
    wait_for_predecessors();
    const uint32_t row = blockIdx.x;
    if (!is_live(live, row)) {
        return;
    }
    const float* x = qkv + static_cast<size_t>(row) * stride;
    for (uint32_t i = 0; i < q_sections + k_sections; i++) {
        const bool is_q = i < q_sections;
        const uint32_t section = is_q ? i : i - q_sections;
        const uint32_t width = is_q ? q / q_sections : k / k_sections;
        const float* own = x + (is_q ? 0 : q) + section * width;
        float sum = 0.0f;
        for (uint32_t at = threadIdx.x; at < width; at += SQUARES_THREADS) {
            sum += own[at] * own[at];
        }
        sum = block_sum<SQUARES_WARPS>(sum, scratch);
        if (threadIdx.x == 0) {
            sums[(is_q ? 0 : TUTTI_QK_PARTS_MAX) + section] = sum;
        }
        // The scratch is used again.
        __syncthreads();
    }
    // One thread for q, one for k.
    if (threadIdx.x >= 2) {
        return;
    }
    float* own = sums + threadIdx.x * TUTTI_QK_PARTS_MAX;
    const uint32_t sections = threadIdx.x == 0 ? q_sections : k_sections;
    // A section is never behind the first part that has it, so none is overwritten too early.
    for (uint32_t part = parts; part-- > 0;) {
        own[part] = own[part * sections / parts];
    }
    for (uint32_t count = parts / 2; count > 0; count /= 2) {
        for (uint32_t i = 0; i < count; i++) {
            own[i] = own[2 * i] + own[2 * i + 1];
        }
    }
    out[static_cast<size_t>(row) * 2 + threadIdx.x] = own[0];
}

extern "C" __global__ void __launch_bounds__(256)
    tutti_qk_scale(float* qkv, const float* squares, const float* weight, uint32_t q, uint32_t k,
                   uint32_t stride, uint32_t q_count, uint32_t k_count, float eps,
                   const uint32_t* live) {
    release_successors();
    wait_for_predecessors();
    const uint32_t row = blockIdx.x;
    const uint32_t first = (blockIdx.y * 256 + threadIdx.x) * 4;
    if (!is_live(live, row) || first >= q + k) {
        return;
    }
    const float2 sums = *reinterpret_cast<const float2*>(squares + static_cast<size_t>(row) * 2);
    const float q_scale = norm_scale(sums.x, q_count, eps);
    const float k_scale = norm_scale(sums.y, k_count, eps);
    float* x = qkv + static_cast<size_t>(row) * stride;
    if (q % 4 == 0 && k % 4 == 0 && stride % 4 == 0) {
        store4(x + first, scaled4(load4(x + first), first < q ? q_scale : k_scale,
                                  load4(weight + first)));
        return;
    }
    for (uint32_t at = first; at < first + 4 && at < q + k; at++) {
        x[at] = x[at] * (at < q ? q_scale : k_scale) * weight[at];
    }
}
