// What follows the fused QKV product: bias, RMSNorm per head, RoPE, K and V to the paged cache.
//
//   x = qkv + bias;  q, k: x = x / sqrt(mean(x^2) + eps) * norm (if the model has it), then
//   x[i], x[i + h/2] = x[i] cos - x[i + h/2] sin, x[i + h/2] cos + x[i] sin   (h = head_dim)
//   q = q * q_scale[position] (if the model has it)
//
// One warp per row and head; a lane holds the pairs lane, lane + 32, .. of the head, both halves,
// so that RoPE needs no exchange. Limits: head_dim even, at most 256. Rounded once, at the end: q to
// bf16, K and V to what the cache holds.
#include "device.cuh"

namespace tutti {
namespace {

constexpr uint32_t WARPS = 8;
constexpr uint32_t PAIRS = 4;

// A lane's part of a head: `a` of its first half, `b` of its second.
template <class To>
__device__ __forceinline__ void store(To* to, const float (&a)[PAIRS], const float (&b)[PAIRS],
                                      uint32_t half) {
#pragma unroll
    for (uint32_t i = 0; i < PAIRS; i++) {
        const uint32_t at = threadIdx.x % 32 + 32 * i;
        if (at < half) {
            to[at] = to_stored<To>(a[i]);
            to[at + half] = to_stored<To>(b[i]);
        }
    }
}

template <class Kv>
__device__ __forceinline__ void qkv_finish(TUTTI_QKV_IN_ARGUMENTS, Kv* k_cache, Kv* v_cache,
                                           TUTTI_QKV_SIZE_ARGUMENTS) {
    release_successors();
    const uint32_t row = blockIdx.x;
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t head = blockIdx.y * WARPS + threadIdx.x / 32;
    const uint32_t heads = num_heads + 2 * num_kv_heads;
    const uint32_t half = head_dim / 2;
    const bool is_v = head >= num_heads + num_kv_heads;
    const bool idle = row >= live_items(live) || head >= heads;
    // The row's slot, cos and sin are read while the product still runs.
    float c[PAIRS];
    float s[PAIRS];
    float factor = 1.0f;
    uint32_t slot = 0;
    if (!idle) {
        const uint32_t position = load_input(positions + row);
        const size_t table = static_cast<size_t>(position) * half;
        if (q_scale != nullptr && head < num_heads) {
            factor = load_constant(q_scale + position);
        }
        slot = load_input(slots + row);
#pragma unroll
        for (uint32_t i = 0; i < PAIRS; i++) {
            const uint32_t at = lane + 32 * i;
            c[i] = 1.0f;
            s[i] = 0.0f;
            if (!is_v && at < half) {
                c[i] = load_constant(cos + table + at);
                s[i] = load_constant(sin + table + at);
            }
        }
    }
    wait_for_predecessors();
    if (idle) {
        return;
    }
    const float* in = qkv + (static_cast<size_t>(row) * heads + head) * head_dim;
    float a[PAIRS];
    float b[PAIRS];
#pragma unroll
    for (uint32_t i = 0; i < PAIRS; i++) {
        const uint32_t at = lane + 32 * i;
        a[i] = b[i] = 0.0f;
        if (at < half) {
            a[i] = in[at];
            b[i] = in[at + half];
            if (bias != nullptr) {
                a[i] += bias[head * head_dim + at];
                b[i] += bias[head * head_dim + at + half];
            }
        }
    }

    const float* norm = head < num_heads ? q_norm : (is_v ? nullptr : k_norm);
    if (norm != nullptr) {
        float sum = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < PAIRS; i++) {
            sum += a[i] * a[i] + b[i] * b[i];
        }
        const float scale = 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(head_dim) + eps);
#pragma unroll
        for (uint32_t i = 0; i < PAIRS; i++) {
            const uint32_t at = lane + 32 * i;
            if (at < half) {
                a[i] = a[i] * scale * norm[at];
                b[i] = b[i] * scale * norm[at + half];
            }
        }
    }
    if (!is_v) {
#pragma unroll
        for (uint32_t i = 0; i < PAIRS; i++) {
            const float x = a[i];
            a[i] = (x * c[i] - b[i] * s[i]) * factor;
            b[i] = (b[i] * c[i] + x * s[i]) * factor;
        }
    }

    if (head < num_heads) {
        store(q_out + (static_cast<size_t>(row) * num_heads + head) * head_dim, a, b, half);
    } else {
        const uint32_t kv_head = (head - num_heads) % num_kv_heads;
        const size_t block = slot >> block_shift;
        const uint32_t offset = slot & ((1u << block_shift) - 1);
        const size_t token = ((block * num_kv_heads + kv_head) << block_shift) + offset;
        store((is_v ? v_cache : k_cache) + token * head_dim, a, b, half);
    }
}

}  // namespace
}  // namespace tutti

#define QKV_FINISH(name, kv)                                                                       \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        name(TUTTI_QKV_IN_ARGUMENTS, kv* k_cache, kv* v_cache, TUTTI_QKV_SIZE_ARGUMENTS) {         \
        tutti::qkv_finish<kv>(qkv, bias, q_norm, k_norm, cos, sin, q_scale, positions, slots,      \
                              q_out, k_cache, v_cache, num_heads, num_kv_heads, head_dim,          \
                              block_shift, eps, live);                                             \
    }
QKV_FINISH(tutti_qkv_finish, tutti_bf16)
QKV_FINISH(tutti_qkv_finish_fp8, tutti_fp8)
