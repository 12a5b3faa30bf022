// Products of few rows of activations with a large weight matrix: out = x W^T + bias.
//
// Bound by reading W once. W goes straight from memory to registers, 16 bytes per lane, in the
// layout of a tensor-core instruction: a permutation of k, applied to both W and x, changes no sum.
// W's rows are the instruction's 16 rows, the rows of x its 8 columns.
//
//   block:  16 (or 32) features, all of k, up to 8, 16, 32 or 64 rows of x; 8 warps
//   warp w: the chunks w, w + 8, w + 16, .. of 128 k each; its sums stay in registers
//   lane (g, t): features g and g + 8, k = 8t .. 8t + 7 of every 32
//   end:    the 8 warps' sums are added as a tree, ((0+4) + (2+6)) + ((1+5) + (3+7))
//
// int8 weights work the same way (skinny_int8.cuh): a lane has k = 16t .. 16t + 15 of every 64, and
// each sum is multiplied by its feature's scale at the end. FP8 (skinny_fp8.cuh) has the same k, and
// a scale for each group of k. 4-bit weights (skinny_int4.cuh) have the k of bf16, chunks of 256, and
// a scale for each group of k.
//
// The order of every sum depends only on k, so each row's result has the same bits with any number
// of rows, in any variant. Shapes and launch rules: kernels.h. Limits: rows of x and W begin at
// multiples of 16 bytes. Best up to 32 rows; every 64 rows read W again (FP8 and 4 bits:
// every 32).
#include "skinny_fp8.cuh"
#include "skinny_int4.cuh"
#include "skinny_int8.cuh"

namespace tutti {
namespace {

// Rows of x that are this lane's columns of the instruction. A column without a row takes the last
// row: its sums are not used, and columns do not affect each other.
template <int ROWS>
__device__ __forceinline__ void rows_of_lane(const tutti_bf16* x, const uint32_t* row_index,
                                             uint32_t first, uint32_t rows, uint32_t stride,
                                             const tutti_bf16* (&out)[ROWS]) {
    const uint32_t g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const uint32_t row = at_most(first + 8 * r + g, rows - 1);
        size_t from = row;
        if (row_index != nullptr) {
            from = ROWS == 8 ? row_index[row] : load_input(row_index + row);
        }
        out[r] = x + from * stride;
    }
}

// Waits for earlier kernels and determines this block's rows; returns the number of rows. The row
// lists were copied before the step, so they are read while those kernels still run, except for 64
// rows, whose addresses would take registers from the weights that are loaded across the wait. All
// threads wait, even in blocks without rows, since later kernels rely on it.
template <int ROWS>
__device__ __forceinline__ uint32_t wait_for_rows(const tutti_bf16* x, const uint32_t* row_index,
                                                  uint32_t first, uint32_t rows, uint32_t stride,
                                                  const uint32_t* live,
                                                  const tutti_bf16* (&out)[ROWS]) {
    if (ROWS == 8) {
        wait_for_predecessors();
        if (live != nullptr) {
            rows = at_most(rows, *live);
        }
    } else {
        rows = at_most(rows, live_items(live));
    }
    if (first < rows) {
        rows_of_lane(x, row_index, first, rows, stride, out);
    }
    if (ROWS != 8) {
        wait_for_predecessors();
    }
    return rows;
}

template <class W, int ROWS, class Scale>
__device__ __forceinline__ void skinny(const tutti_bf16* x, const typename W::Element* w,
                                       Scale scale, const float* bias, float* out,
                                       const uint32_t* row_index, uint32_t rows, uint32_t n,
                                       uint32_t k, uint32_t x_stride, uint32_t w_stride,
                                       uint32_t out_stride, const uint32_t* live) {
    constexpr int FEATURES = W::COUNT;
    const uint32_t g = threadIdx.x % 32 / 4;
    const uint32_t t = threadIdx.x % 4;
    const uint32_t first_feature = blockIdx.x * FEATURES * 16;
    const uint32_t first_row = blockIdx.y * ROWS * 8;
    W weights;
#pragma unroll
    for (int f = 0; f < FEATURES; f++) {
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            // A row without a feature takes the last feature.
            const size_t feature = at_most(first_feature + 16 * f + 8 * half + g, n - 1);
            weights.rows[f][half] = w + feature * w_stride;
            scale.attach(weights, f, half, feature);
        }
    }
    release_successors();
    if (ROWS <= 2) {
        // Before the first loads: after them, it would take registers and cost a resident block.
        ask_for_more<W>(k, [=](uint32_t row) {
            return w + static_cast<size_t>(at_most(first_feature + row, n - 1)) * w_stride;
        });
    }
    weights.load_first(k);
    const tutti_bf16* x_rows[ROWS];
    rows = wait_for_rows(x, row_index, first_row, rows, x_stride, live, x_rows);
    if (first_row >= rows) {
        return;
    }
    float sums[FEATURES][ROWS][4] = {};
    multiply(weights, x_rows, k, sums);
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
                    out[static_cast<size_t>(row) * out_stride + feature] =
                        scale(sums[f][r][i], feature) + b;
                }
            }
        }
    }
}

template <class W, int ROWS, class Scale>
__device__ __forceinline__ void skinny_gate_up(const tutti_bf16* x, const typename W::Element* w,
                                               Scale scale, const float* bias, tutti_bf16* out,
                                               uint32_t rows, uint32_t inner, uint32_t k,
                                               uint32_t x_stride, uint32_t w_stride,
                                               uint32_t out_stride, uint32_t gelu,
                                               const uint32_t* live) {
    const uint32_t g = threadIdx.x % 32 / 4;
    const uint32_t t = threadIdx.x % 4;
    const uint32_t first_feature = blockIdx.x * 16;
    const uint32_t first_row = blockIdx.y * ROWS * 8;
    // [0]: gate, [1]: up.
    W weights;
#pragma unroll
    for (uint32_t part = 0; part < 2; part++) {
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            const uint32_t feature = at_most(first_feature + 8 * half + g, inner - 1);
            const size_t row = static_cast<size_t>(part) * inner + feature;
            weights.rows[part][half] = w + row * w_stride;
            scale.attach(weights, part, half, row);
        }
    }
    weights.load_first(k);
    release_successors();
    if (ROWS <= 2) {
        ask_for_more<W>(k, [=](uint32_t row) {
            const uint32_t feature = at_most(first_feature + row % 16, inner - 1);
            return w + (static_cast<size_t>(row / 16) * inner + feature) * w_stride;
        });
    }
    const tutti_bf16* x_rows[ROWS];
    rows = wait_for_rows(x, nullptr, first_row, rows, x_stride, live, x_rows);
    if (first_row >= rows) {
        return;
    }
    float sums[2][ROWS][4] = {};
    multiply(weights, x_rows, k, sums);
    add_warps(sums);
    if (threadIdx.x >= 32) {
        return;
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        // One r at a time: all at once would take registers from the loop above, and for 16 rows
        // cost a multiprocessor its second block.
        __syncwarp();
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t feature = first_feature + g + i / 2 * 8;
            const uint32_t row = first_row + 8 * r + 2 * t + i % 2;
            if (feature < inner && row < rows) {
                const uint32_t other = inner + feature;
                const float gate =
                    scale(sums[0][r][i], feature) + (bias == nullptr ? 0.0f : bias[feature]);
                const float up =
                    scale(sums[1][r][i], other) + (bias == nullptr ? 0.0f : bias[other]);
                out[static_cast<size_t>(row) * out_stride + feature] =
                    to_bf16(activated(gate, gelu) * up);
            }
        }
    }
}

}  // namespace
}  // namespace tutti

#define SKINNY(number, features)                                                                   \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        tutti_skinny_##number(TUTTI_SKINNY_ARGUMENTS) {                                            \
        using namespace tutti;                                                                     \
        skinny<Weights<features>, number / 8>(x, w, Unscaled{}, bias, out, row_index, rows, n, k,  \
                                              x_stride, w_stride, out_stride, live);               \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        tutti_skinny_int8_##number(TUTTI_SKINNY_INT8_ARGUMENTS) {                                  \
        using namespace tutti;                                                                     \
        skinny<Int8Weights<features>, number / 8>(x, w, Scaled{scales}, bias, out, row_index,      \
                                                  rows, n, k, x_stride, w_stride, out_stride,      \
                                                  live);                                           \
    }
SKINNY(8, 1)
SKINNY(16, 1)
SKINNY(32, 2)
SKINNY(64, 2)

#define SKINNY_GATE_UP(number)                                                                     \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        tutti_skinny_gate_up_##number(TUTTI_SKINNY_GATE_UP_ARGUMENTS) {                            \
        using namespace tutti;                                                                     \
        skinny_gate_up<Weights<2>, number / 8>(x, w, Unscaled{}, bias, out, rows, inner, k,        \
                                               x_stride, w_stride, out_stride, gelu, live);        \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        tutti_skinny_gate_up_int8_##number(TUTTI_SKINNY_GATE_UP_INT8_ARGUMENTS) {                  \
        using namespace tutti;                                                                     \
        skinny_gate_up<Int8Weights<2>, number / 8>(x, w, Scaled{scales}, bias, out, rows, inner,   \
                                                   k, x_stride, w_stride, out_stride, gelu, live); \
    }
SKINNY_GATE_UP(8)
SKINNY_GATE_UP(16)
SKINNY_GATE_UP(32)
SKINNY_GATE_UP(64)

// No variant for 64 rows: two sums per output would not fit in registers.
#define SKINNY_INT4(number, features)                                                              \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        tutti_skinny_int4_##number(TUTTI_SKINNY_INT4_ARGUMENTS) {                                  \
        using namespace tutti;                                                                     \
        const Grouped scale{groups, divide_up(k, 1u << shift), shift};                             \
        skinny<Int4Weights<features>, number / 8>(x, w, scale, bias, out, row_index, rows, n, k,   \
                                                  x_stride, w_stride / 2, out_stride, live);       \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        tutti_skinny_gate_up_int4_##number(TUTTI_SKINNY_GATE_UP_INT4_ARGUMENTS) {                  \
        using namespace tutti;                                                                     \
        const Grouped scale{groups, divide_up(k, 1u << shift), shift};                             \
        skinny_gate_up<Int4Weights<2>, number / 8>(x, w, scale, bias, out, rows, inner, k,         \
                                                   x_stride, w_stride / 2, out_stride, gelu,       \
                                                   live);                                          \
    }
SKINNY_INT4(8, 1)
SKINNY_INT4(16, 1)
SKINNY_INT4(32, 2)

// As for 4-bit weights.
#define SKINNY_FP8(number, features)                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        tutti_skinny_fp8_##number(TUTTI_SKINNY_FP8_ARGUMENTS) {                                    \
        using namespace tutti;                                                                     \
        const Fp8Scaled scale{scales, divide_up(k, 1u << shift), shift};                           \
        skinny<Fp8Weights<features>, number / 8>(x, w, scale, bias, out, row_index, rows, n, k,    \
                                                 x_stride, w_stride, out_stride, live);            \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        tutti_skinny_gate_up_fp8_##number(TUTTI_SKINNY_GATE_UP_FP8_ARGUMENTS) {                    \
        using namespace tutti;                                                                     \
        const Fp8Scaled scale{scales, divide_up(k, 1u << shift), shift};                           \
        skinny_gate_up<Fp8Weights<2>, number / 8>(x, w, scale, bias, out, rows, inner, k,          \
                                                  x_stride, w_stride, out_stride, gelu, live);     \
    }
SKINNY_FP8(8, 1)
SKINNY_FP8(16, 1)
SKINNY_FP8(32, 2)
