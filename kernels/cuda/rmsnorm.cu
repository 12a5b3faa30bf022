// RMSNorms of rows, with what is added to the rows first.
//
//   add_rmsnorm:        r += d;  y = r / sqrt(mean(r^2) + eps) * w
//   add_normed_rmsnorm: r += d / sqrt(mean(d^2) + eps) * v;  y as in add_rmsnorm
//   add_normed:         r += d / sqrt(mean(d^2) + eps) * v;  y = r
//
// Shapes and launch rules: kernels.h. All are bound by memory. Loads and stores are 16 bytes wide
// (of bf16 8) if rows allow it (width a multiple of 4), otherwise one element at a time, with the
// same sums in the same order. Limits: none on widths.
#include "rows.cuh"

namespace tutti {
namespace {

// Addends of f32 or bf16, 4 at a time as they are read, and one.
__device__ __forceinline__ float4 read_addends(const float* at) { return load4(at); }
__device__ __forceinline__ uint2 read_addends(const tutti_bf16* at) { return load4_bf16(at); }
__device__ __forceinline__ float addend(const float* at) { return *at; }
__device__ __forceinline__ float addend(const tutti_bf16* at) { return from_bf16(*at); }

struct Widened : AsRead {
    using AsRead::operator();
    __device__ __forceinline__ float4 operator()(uint2 v) const {
        const Four wide = widened(v);
        return make_float4(wide.v[0], wide.v[1], wide.v[2], wide.v[3]);
    }
};

template <class Addend>
__device__ __forceinline__ void add_rmsnorm(float* residual, const Addend* delta,
                                            const float* weight, tutti_bf16* out, uint32_t width,
                                            uint32_t out_stride, float eps, const uint32_t* live,
                                            float* scratch) {
    release_successors();
    const uint32_t items = live_items(live);
    NormWeights weights;
    if (width % 4 == 0) {
        weights.load(weight, width);
    }
    wait_for_predecessors();
    const uint32_t row = blockIdx.x;
    if (row >= items) {
        return;
    }
    float* r = residual + static_cast<size_t>(row) * width;
    const Addend* d = delta == nullptr ? nullptr : delta + static_cast<size_t>(row) * width;
    tutti_bf16* y = out + static_cast<size_t>(row) * out_stride;
    if (width % 4 == 0) {
        add_rmsnorm_row(r, weight, weights, y, width, out_stride % 4 == 0, eps, scratch,
                        d != nullptr, [&](uint32_t, uint32_t at) { return read_addends(d + at); },
                        Widened{});
        return;
    }
    float sum = 0.0f;
    for (uint32_t at = threadIdx.x; at < width; at += NORM_THREADS) {
        float v = r[at];
        if (d != nullptr) {
            v += addend(d + at);
            r[at] = v;
        }
        sum += v * v;
    }
    const float scale = norm_scale(block_sum<NORM_WARPS>(sum, scratch), width, eps);
    // A thread rereads only elements that it wrote itself.
    for (uint32_t at = threadIdx.x; at < width; at += NORM_THREADS) {
        y[at] = to_bf16(r[at] * scale * weight[at]);
    }
}

}  // namespace
}  // namespace tutti

using namespace tutti;

extern "C" __global__ void __launch_bounds__(NORM_THREADS)
    tutti_add_rmsnorm(float* residual, const float* delta, const float* weight, tutti_bf16* out,
                      uint32_t width, uint32_t out_stride, float eps, const uint32_t* live) {
    SHARED_ARRAY(float, scratch, NORM_WARPS);
    add_rmsnorm(residual, delta, weight, out, width, out_stride, eps, live, scratch);
}

extern "C" __global__ void __launch_bounds__(NORM_THREADS)
    tutti_add_rmsnorm_bf16(float* residual, const tutti_bf16* delta, const float* weight,
                           tutti_bf16* out, uint32_t width, uint32_t out_stride, float eps,
                           const uint32_t* live) {
    SHARED_ARRAY(float, scratch, NORM_WARPS);
    add_rmsnorm(residual, delta, weight, out, width, out_stride, eps, live, scratch);
}

extern "C" __global__ void __launch_bounds__(512)
    tutti_add_normed_rmsnorm(float* residual, const float* delta, const float* delta_weight,
                             const float* weight, tutti_bf16* out, uint32_t width,
                             uint32_t out_stride, float eps, const uint32_t* live) {
    SHARED_ARRAY(float, delta_scratch, NORM_WARPS);
    SHARED_ARRAY(float, scratch, NORM_WARPS);
    release_successors();
    const uint32_t items = live_items(live);
    NormWeights delta_weights;
    NormWeights weights;
    if (width % 4 == 0) {
        delta_weights.load(delta_weight, width);
        weights.load(weight, width);
    }
    wait_for_predecessors();
    const uint32_t row = blockIdx.x;
    if (row >= items) {
        return;
    }
    float* r = residual + static_cast<size_t>(row) * width;
    const float* d = delta + static_cast<size_t>(row) * width;
    tutti_bf16* y = out + static_cast<size_t>(row) * out_stride;
    float sum = 0.0f;
    if (width % 4 == 0) {
        const uint32_t step = NORM_THREADS * 4;
        float4 kept[NORM_KEPT];
#pragma unroll
        for (uint32_t i = 0; i < NORM_KEPT; i++) {
            const uint32_t at = threadIdx.x * 4 + i * step;
            if (at < width) {
                kept[i] = load4(d + at);
                sum += squares(kept[i]);
            }
        }
        for (uint32_t at = threadIdx.x * 4 + NORM_KEPT * step; at < width; at += step) {
            sum += squares(load4(d + at));
        }
        const float scale = norm_scale(block_sum<NORM_WARPS>(sum, delta_scratch), width, eps);
        add_rmsnorm_row(r, weight, weights, y, width, out_stride % 4 == 0, eps, scratch,
                        true, [&](uint32_t i, uint32_t at) {
                            const bool is_kept = i < NORM_KEPT;
                            return is_kept ? scaled4(kept[i % NORM_KEPT], scale,
                                                     delta_weights.kept[i % NORM_KEPT])
                                           : scaled4(load4(d + at), scale, load4(delta_weight + at));
                        },
                        AsRead{});
        return;
    }
    for (uint32_t at = threadIdx.x; at < width; at += NORM_THREADS) {
        sum += d[at] * d[at];
    }
    const float delta_scale = norm_scale(block_sum<NORM_WARPS>(sum, delta_scratch), width, eps);
    sum = 0.0f;
    for (uint32_t at = threadIdx.x; at < width; at += NORM_THREADS) {
        const float v = r[at] + d[at] * delta_scale * delta_weight[at];
        r[at] = v;
        sum += v * v;
    }
    const float scale = norm_scale(block_sum<NORM_WARPS>(sum, scratch), width, eps);
    // A thread rereads only elements that it wrote itself.
    for (uint32_t at = threadIdx.x; at < width; at += NORM_THREADS) {
        y[at] = to_bf16(r[at] * scale * weight[at]);
    }
}

extern "C" __global__ void __launch_bounds__(NORM_THREADS)
    tutti_add_normed(float* residual, const float* delta, const float* weight, tutti_bf16* out,
                     uint32_t width, uint32_t out_stride, float eps, const uint32_t* live) {
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
    float scale = 0.0f;
    if (d != nullptr) {
        float sum = 0.0f;
        for (uint32_t at = threadIdx.x * 4; at < width; at += NORM_THREADS * 4) {
            const Four v = load_up_to_4(d, at, width);
            sum += squares(make_float4(v.v[0], v.v[1], v.v[2], v.v[3]));
        }
        scale = norm_scale(block_sum<NORM_WARPS>(sum, scratch), width, eps);
    }
    const bool whole = width % 4 == 0 && out_stride % 4 == 0;
    for (uint32_t at = threadIdx.x * 4; at < width; at += NORM_THREADS * 4) {
        Four v = load_up_to_4(r, at, width);
        if (d != nullptr) {
            const Four added = load_up_to_4(d, at, width);
            const Four weights = load_up_to_4(weight, at, width);
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                v.v[i] += added.v[i] * scale * weights.v[i];
            }
            store_up_to_4(r, at, width, v);
        }
        store_bf16(y, at, width, whole, v);
    }
}
