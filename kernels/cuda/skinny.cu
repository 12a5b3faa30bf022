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
// k per load of the 4 lanes of a row, and loads on their way: a chunk.
constexpr uint32_t K_LOAD = 32;
constexpr uint32_t LOADS = 4;
constexpr uint32_t CHUNK = K_LOAD * LOADS;

// What of 8 elements from column `k` of a row lies before column `end`; zeros for the rest, so that
// whatever is behind the row's end, NaN too, does not count.
template <bool WEIGHTS>
__device__ __forceinline__ uint4 load8_before(const tutti_bf16* row, uint32_t k, uint32_t end) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (k < end) {
        v = WEIGHTS ? load_weights(row + k) : *reinterpret_cast<const uint4*>(row + k);
        const uint32_t left = end - k;
        if (left < 8) {
            const uint32_t odd = left % 2 == 1 ? 0x0000ffffu : 0u;
            v.x &= left >= 2 ? 0xffffffffu : odd;
            v.y = left >= 4 ? v.y : (left > 2 ? v.y & odd : 0u);
            v.z = left >= 6 ? v.z : (left > 4 ? v.z & odd : 0u);
            v.w = left > 6 ? v.w & odd : 0u;
        }
    }
    return v;
}

// 16 * FEATURES rows of W, as far as one lane has them, and one chunk of them.
template <int FEATURES>
struct Weights {
    const tutti_bf16* rows[FEATURES][2];
    uint4 chunk[FEATURES][2][LOADS];

    __device__ __forceinline__ void load(uint32_t i, uint32_t k) {
#pragma unroll
        for (int f = 0; f < FEATURES; f++) {
            chunk[f][0][i] = load_weights(rows[f][0] + k);
            chunk[f][1][i] = load_weights(rows[f][1] + k);
        }
    }
    __device__ __forceinline__ void load_before(uint32_t i, uint32_t k, uint32_t end) {
#pragma unroll
        for (int f = 0; f < FEATURES; f++) {
            chunk[f][0][i] = load8_before<true>(rows[f][0], k, end);
            chunk[f][1][i] = load8_before<true>(rows[f][1], k, end);
        }
    }
    // Adds the products of load `i` with 8 rows of x.
    __device__ __forceinline__ void multiply(uint32_t i, uint4 b, float (&sums)[4], int f) const {
        const uint4 upper = chunk[f][0][i];
        const uint4 lower = chunk[f][1][i];
        const uint32_t even[4] = {upper.x, lower.x, upper.y, lower.y};
        const uint32_t odd[4] = {upper.z, lower.z, upper.w, lower.w};
        mma_bf16(sums, even, b.x, b.y);
        mma_bf16(sums, odd, b.z, b.w);
    }
    // Loads the first chunk of a warp, if it is a whole one. It needs nothing from the kernels
    // before, so it may run while they do.
    __device__ __forceinline__ void load_first(uint32_t k) {
        const uint32_t start = threadIdx.x / 32 * CHUNK;
        if (start + CHUNK <= k) {
#pragma unroll
            for (uint32_t i = 0; i < LOADS; i++) {
                load(i, start + K_LOAD * i + 8 * (threadIdx.x % 4));
            }
        }
    }
};

// Adds up the products of FEATURES * 16 rows of W with ROWS * 8 rows of x over this warp's part of
// k. `w` has its first chunk.
template <int FEATURES, int ROWS>
__device__ __forceinline__ void multiply(Weights<FEATURES>& w, const tutti_bf16* const (&x)[ROWS],
                                         uint32_t k, float (&sums)[FEATURES][ROWS][4]) {
    const uint32_t lane_k = 8 * (threadIdx.x % 4);
    uint32_t start = threadIdx.x / 32 * CHUNK;
    for (; start + CHUNK <= k; start += WARPS * CHUNK) {
        const uint32_t next = start + WARPS * CHUNK;
        const bool more = next + CHUNK <= k;
#pragma unroll
        for (uint32_t i = 0; i < LOADS; i++) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const uint4 b =
                    *reinterpret_cast<const uint4*>(x[r] + start + K_LOAD * i + lane_k);
#pragma unroll
                for (int f = 0; f < FEATURES; f++) {
                    w.multiply(i, b, sums[f][r], f);
                }
            }
            // What was used is replaced at once: so much is always on its way.
            if (more) {
                w.load(i, next + K_LOAD * i + lane_k);
            }
        }
    }
    if (start < k) {
#pragma unroll
        for (uint32_t i = 0; i < LOADS; i++) {
            const uint32_t at = start + K_LOAD * i + lane_k;
            w.load_before(i, at, k);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const uint4 b = load8_before<false>(x[r], at, k);
#pragma unroll
                for (int f = 0; f < FEATURES; f++) {
                    w.multiply(i, b, sums[f][r], f);
                }
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

__device__ __forceinline__ uint32_t at_most(uint32_t a, uint32_t b) { return a < b ? a : b; }

// Rows of x that are this lane's columns of the instruction. A column without a row takes the last
// one: its sums are not used, and columns do not touch each other.
template <int ROWS>
__device__ __forceinline__ void rows_of_lane(const tutti_bf16* x, const uint32_t* row_index,
                                             uint32_t first, uint32_t rows, uint32_t stride,
                                             const tutti_bf16* (&out)[ROWS]) {
    const uint32_t g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const uint32_t row = at_most(first + 8 * r + g, rows - 1);
        const size_t from = row_index == nullptr ? row : row_index[row];
        out[r] = x + from * stride;
    }
}

template <int FEATURES, int ROWS>
__device__ __forceinline__ void skinny(TUTTI_SKINNY_ARGUMENTS) {
    const uint32_t g = threadIdx.x % 32 / 4;
    const uint32_t t = threadIdx.x % 4;
    const uint32_t first_feature = blockIdx.x * FEATURES * 16;
    const uint32_t first_row = blockIdx.y * ROWS * 8;
    Weights<FEATURES> weights;
#pragma unroll
    for (int f = 0; f < FEATURES; f++) {
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            // A row without a feature takes the last one, likewise.
            const size_t feature = at_most(first_feature + 16 * f + 8 * half + g, n - 1);
            weights.rows[f][half] = w + feature * w_stride;
        }
    }
    weights.load_first(k);
    release_successors();
    wait_for_predecessors();
    if (live != nullptr) {
        rows = at_most(rows, *live);
    }
    if (first_row >= rows) {
        return;
    }
    const tutti_bf16* x_rows[ROWS];
    rows_of_lane(x, row_index, first_row, rows, x_stride, x_rows);
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
    Weights<2> weights;
#pragma unroll
    for (uint32_t part = 0; part < 2; part++) {
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            const uint32_t feature = at_most(first_feature + 8 * half + g, inner - 1);
            const size_t row = static_cast<size_t>(part) * inner + feature;
            weights.rows[part][half] = w + row * w_stride;
        }
    }
    weights.load_first(k);
    release_successors();
    wait_for_predecessors();
    if (live != nullptr) {
        rows = at_most(rows, *live);
    }
    if (first_row >= rows) {
        return;
    }
    const tutti_bf16* x_rows[ROWS];
    rows_of_lane(x, nullptr, first_row, rows, x_stride, x_rows);
    float sums[2][ROWS][4] = {};
    multiply(weights, x_rows, k, sums);
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
