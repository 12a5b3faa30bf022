// What follows the fused QKV product: bias, RMSNorm per head, RoPE, K and V to the paged cache.
//
//   x = qkv + bias;  q, k: x = x / sqrt(mean(x^2) + eps) * norm (if the model has it), then
//   x[i], x[i + h/2] = x[i] cos - x[i + h/2] sin, x[i + h/2] cos + x[i] sin   (h = head_dim)
//
// One warp per row and head; a lane holds the pairs lane, lane + 32, .. of the head, both halves,
// so that RoPE needs no exchange. Limits: head_dim even, at most 256. Rounded to bf16 once, at the
// end.
#include "device.cuh"

namespace tutti {
namespace {

constexpr uint32_t WARPS = 8;
constexpr uint32_t PAIRS = 4;

}  // namespace
}  // namespace tutti

using namespace tutti;

extern "C" __global__ void __launch_bounds__(256)
    tutti_qkv_finish(const float* qkv, const float* bias, const float* q_norm,
                     const float* k_norm, const float* cos, const float* sin,
                     const uint32_t* positions, const uint32_t* slots, tutti_bf16* q_out,
                     tutti_bf16* k_cache, tutti_bf16* v_cache, uint32_t num_heads,
                     uint32_t num_kv_heads, uint32_t head_dim, uint32_t block_shift, float eps,
                     const uint32_t* live) {
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
    uint32_t slot = 0;
    if (!idle) {
        const size_t table = static_cast<size_t>(load_input(positions + row)) * half;
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
            a[i] = x * c[i] - b[i] * s[i];
            b[i] = b[i] * c[i] + x * s[i];
        }
    }

    tutti_bf16* to;
    if (head < num_heads) {
        to = q_out + (static_cast<size_t>(row) * num_heads + head) * head_dim;
    } else {
        const uint32_t kv_head = (head - num_heads) % num_kv_heads;
        const size_t block = slot >> block_shift;
        const uint32_t offset = slot & ((1u << block_shift) - 1);
        const size_t token = ((block * num_kv_heads + kv_head) << block_shift) + offset;
        to = (is_v ? v_cache : k_cache) + token * head_dim;
    }
#pragma unroll
    for (uint32_t i = 0; i < PAIRS; i++) {
        const uint32_t at = lane + 32 * i;
        if (at < half) {
            to[at] = to_bf16(a[i]);
            to[at + half] = to_bf16(b[i]);
        }
    }
}
