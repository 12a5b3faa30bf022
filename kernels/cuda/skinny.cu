// Products of few rows of activations with a large weight matrix: out = x W^T + bias.
//
// Bound by reading W once, so W goes straight from memory to registers, 16 bytes per lane, in the
// layout in which a tensor-core instruction takes it: a permutation of k, applied to W and x alike,
// changes no sum. W's rows are the instruction's 16 rows, the rows of x its 8 columns.
//
//   block:  16 (or 32) features, all of k, up to 8, 16, 32 or 64 rows of x; 8 warps
//   warp w: the chunks w, w + 8, w + 16, .. of 128 k each; its sums stay in registers
//   lane (g, t): features g and g + 8, k = 8t .. 8t + 7 of every 32
//   end:    the 8 warps' sums are added as a tree, ((0+4) + (2+6)) + ((1+5) + (3+7))
//
// The order of every sum depends on k alone, so each row's result has the same bits with any number
// of rows, in any variant. Shapes and launch rules: kernels.h. Limits: rows of x and W begin at
// multiples of 16 bytes. Best up to 32 rows; each further 64 read W again.
#include "device.cuh"

namespace tutti {
namespace {

constexpr uint32_t WARPS = 8;
// k per lane group and load, and loads in flight: a chunk.
constexpr uint32_t K_LOAD = 32;
constexpr uint32_t LOADS = 4;
constexpr uint32_t CHUNK = K_LOAD * LOADS;

// 8 elements from column `k` of a row; zeros from column `end` on. `row` may be null: zeros.
template <bool WEIGHTS>
__device__ __forceinline__ uint4 load8(const tutti_bf16* row, uint32_t k, uint32_t end) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (row != nullptr && k < end) {
        v = WEIGHTS ? load_weights(row + k) : *reinterpret_cast<const uint4*>(row + k);
        const uint32_t left = end - k;
        if (left < 8) {
            // Whatever is behind the row's end, NaN too, must not count.
            const uint32_t odd = left % 2 == 1 ? 0x0000ffffu : 0u;
            v.x &= left >= 2 ? 0xffffffffu : odd;
            v.y = left >= 4 ? v.y : (left > 2 ? v.y & odd : 0u);
            v.z = left >= 6 ? v.z : (left > 4 ? v.z & odd : 0u);
            v.w = left > 6 ? v.w & odd : 0u;
        }
    }
    return v;
}

// Adds up the products of FEATURES x 16 rows of W with ROWS x 8 rows of x over all k. The sums of
// all warps end up in warp 0, in the layout of `mma_bf16`'s c.
template <int FEATURES, int ROWS>
__device__ __forceinline__ void multiply(const tutti_bf16* const (&w)[FEATURES][2],
                                         const tutti_bf16* const (&x)[ROWS], uint32_t k,
                                         float (&sums)[FEATURES][ROWS][4], bool first_is_loaded,
                                         uint4 (&a)[FEATURES][2][LOADS]) {
    const uint32_t warp = threadIdx.x / 32;
    const uint32_t t = threadIdx.x % 4;
    for (uint32_t start = warp * CHUNK; start < k; start += WARPS * CHUNK) {
        const uint32_t lane_start = start + 8 * t;
        if (!first_is_loaded) {
#pragma unroll
            for (int f = 0; f < FEATURES; f++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
#pragma unroll
                    for (uint32_t i = 0; i < LOADS; i++) {
                        a[f][half][i] = load8<true>(w[f][half], lane_start + K_LOAD * i, k);
                    }
                }
            }
        }
        first_is_loaded = false;
#pragma unroll
        for (uint32_t i = 0; i < LOADS; i++) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const uint4 b = load8<false>(x[r], lane_start + K_LOAD * i, k);
#pragma unroll
                for (int f = 0; f < FEATURES; f++) {
                    const uint4 upper = a[f][0][i];
                    const uint4 lower = a[f][1][i];
                    const uint32_t even[4] = {upper.x, lower.x, upper.y, lower.y};
                    const uint32_t odd[4] = {upper.z, lower.z, upper.w, lower.w};
                    mma_bf16(sums[f][r], even, b.x, b.y);
                    mma_bf16(sums[f][r], odd, b.z, b.w);
                }
            }
        }
    }
}

// Loads the first chunk of a warp. It needs nothing from the kernels before, so it may run while
// they do.
template <int FEATURES>
__device__ __forceinline__ void load_first(const tutti_bf16* const (&w)[FEATURES][2], uint32_t k,
                                           uint4 (&a)[FEATURES][2][LOADS]) {
    const uint32_t start = threadIdx.x / 32 * CHUNK + 8 * (threadIdx.x % 4);
#pragma unroll
    for (int f = 0; f < FEATURES; f++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (uint32_t i = 0; i < LOADS; i++) {
                a[f][half][i] = load8<true>(w[f][half], start + K_LOAD * i, k);
            }
        }
    }
}

// Adds the sums of the 8 warps into warp 0's.
template <int FEATURES, int ROWS>
__device__ __forceinline__ void add_warps(float (&sums)[FEATURES][ROWS][4]) {
    constexpr int COUNT = FEATURES * ROWS * 4;
    SHARED_ARRAY(float, parts, WARPS / 2 * COUNT * 32);
    const uint32_t warp = threadIdx.x / 32;
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (uint32_t half = WARPS / 2; half > 0; half /= 2) {
        if (warp >= half && warp < 2 * half) {
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                parts[((warp - half) * COUNT + i) * 32 + lane] = (&sums[0][0][0])[i];
            }
        }
        __syncthreads();
        if (warp < half) {
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                (&sums[0][0][0])[i] += parts[(warp * COUNT + i) * 32 + lane];
            }
        }
        __syncthreads();
    }
}

// Rows of x that are this lane's columns of the instruction.
template <int ROWS>
__device__ __forceinline__ void rows_of_lane(const tutti_bf16* x, const uint32_t* row_index,
                                             uint32_t first, uint32_t rows, uint32_t stride,
                                             const tutti_bf16* (&out)[ROWS]) {
    const uint32_t g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const uint32_t row = first + 8 * r + g;
        out[r] = nullptr;
        if (row < rows) {
            const size_t from = row_index == nullptr ? row : row_index[row];
            out[r] = x + from * stride;
        }
    }
}

template <int FEATURES, int ROWS>
__device__ __forceinline__ void skinny(TUTTI_SKINNY_ARGUMENTS) {
    const uint32_t g = threadIdx.x % 32 / 4;
    const uint32_t t = threadIdx.x % 4;
    const uint32_t first_feature = blockIdx.x * FEATURES * 16;
    const uint32_t first_row = blockIdx.y * ROWS * 8;
    const tutti_bf16* weights[FEATURES][2];
#pragma unroll
    for (int f = 0; f < FEATURES; f++) {
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            const uint32_t feature = first_feature + 16 * f + 8 * half + g;
            weights[f][half] = feature < n ? w + static_cast<size_t>(feature) * w_stride : nullptr;
        }
    }
    uint4 a[FEATURES][2][LOADS];
    load_first(weights, k, a);
    wait_for_predecessors();
    release_successors();
    if (live != nullptr && *live < rows) {
        rows = *live;
    }
    if (first_row >= rows) {
        return;
    }
    const tutti_bf16* x_rows[ROWS];
    rows_of_lane(x, row_index, first_row, rows, x_stride, x_rows);
    float sums[FEATURES][ROWS][4] = {};
    multiply(weights, x_rows, k, sums, true, a);
    add_warps(sums);
    if (threadIdx.x >= 32) {
        return;
    }
#pragma unroll
    for (int f = 0; f < FEATURES; f++) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                const uint32_t feature = first_feature + 16 * f + g + i / 2 * 8;
                const uint32_t row = first_row + 8 * r + 2 * t + i % 2;
                if (feature < n && row < rows) {
                    const float b = bias == nullptr ? 0.0f : bias[feature];
                    out[static_cast<size_t>(row) * out_stride + feature] = sums[f][r][i] + b;
                }
            }
        }
    }
}

template <int ROWS>
__device__ __forceinline__ void skinny_gate_up(TUTTI_SKINNY_GATE_UP_ARGUMENTS) {
    const uint32_t g = threadIdx.x % 32 / 4;
    const uint32_t t = threadIdx.x % 4;
    const uint32_t first_feature = blockIdx.x * 16;
    const uint32_t first_row = blockIdx.y * ROWS * 8;
    // [0]: gate, [1]: up.
    const tutti_bf16* weights[2][2];
#pragma unroll
    for (uint32_t part = 0; part < 2; part++) {
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            const uint32_t feature = first_feature + 8 * half + g;
            const size_t row = static_cast<size_t>(part) * inner + feature;
            weights[part][half] = feature < inner ? w + row * w_stride : nullptr;
        }
    }
    uint4 a[2][2][LOADS];
    load_first(weights, k, a);
    wait_for_predecessors();
    release_successors();
    if (live != nullptr && *live < rows) {
        rows = *live;
    }
    if (first_row >= rows) {
        return;
    }
    const tutti_bf16* x_rows[ROWS];
    rows_of_lane(x, nullptr, first_row, rows, x_stride, x_rows);
    float sums[2][ROWS][4] = {};
    multiply(weights, x_rows, k, sums, true, a);
    add_warps(sums);
    if (threadIdx.x >= 32) {
        return;
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t feature = first_feature + g + i / 2 * 8;
            const uint32_t row = first_row + 8 * r + 2 * t + i % 2;
            if (feature < inner && row < rows) {
                const float gate = sums[0][r][i] + (bias == nullptr ? 0.0f : bias[feature]);
                const float up = sums[1][r][i] + (bias == nullptr ? 0.0f : bias[inner + feature]);
                out[static_cast<size_t>(row) * out_stride + feature] = to_bf16(silu(gate) * up);
            }
        }
    }
}

}  // namespace
}  // namespace tutti

#define SKINNY(number, features)                                                                   \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        tutti_skinny_##number(TUTTI_SKINNY_ARGUMENTS) {                                            \
        tutti::skinny<features, number / 8>(x, w, bias, out, row_index, rows, n, k, x_stride,      \
                                            w_stride, out_stride, live);                           \
    }
SKINNY(8, 1)
SKINNY(16, 1)
SKINNY(32, 2)
SKINNY(64, 2)

#define SKINNY_GATE_UP(number)                                                                     \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        tutti_skinny_gate_up_##number(TUTTI_SKINNY_GATE_UP_ARGUMENTS) {                            \
        tutti::skinny_gate_up<number / 8>(x, w, bias, out, rows, inner, k, x_stride, w_stride,     \
                                          out_stride, live);                                       \
    }
SKINNY_GATE_UP(8)
SKINNY_GATE_UP(16)
SKINNY_GATE_UP(32)
SKINNY_GATE_UP(64)
