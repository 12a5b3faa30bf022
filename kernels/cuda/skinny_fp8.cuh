// The inner loop of skinny.cuh for weights in FP8 (E4M3), with a scale for each group of k.
//
// A lane has the same bytes as of int8 weights: 16 k, so 4 lanes load 64 k of a row at once. They
// are converted to bf16 in registers, exactly but for NaN: a row with one has scales that are NaN.
// Groups begin with a load. Each is summed from zero and added times its scale: one group, at most
// a chunk, at a time.
#pragma once
#include "skinny_int8.cuh"

namespace tutti {
namespace {

// One lane's part of 16 * FEATURES rows of W, and one chunk of it, with the scales of its loads.
template <int FEATURES>
struct Fp8Weights {
    using Element = uint8_t;
    static constexpr int COUNT = FEATURES;
    static constexpr bool DIVIDES_TILES = true;
    static constexpr uint32_t FIRST_BYTES = WARPS * CHUNK;
    const uint8_t* rows[FEATURES][2];
    const float* scales[FEATURES][2];
    // Logarithm of the k per scale.
    uint32_t shift;
    uint4 chunk[FEATURES][2][LOADS_INT8];
    uint32_t first[FEATURES][2][LOADS_INT8];

    static __device__ __forceinline__ uint32_t row_bytes(uint32_t k) { return k; }

    // Loads the scales of 64 k from `k` on.
    __device__ __forceinline__ void load_scales(uint32_t i, uint32_t k) {
#pragma unroll
        for (int f = 0; f < FEATURES; f++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const void* at = scales[f][half] + (k >> shift);
                first[f][half][i] = load_constant(static_cast<const uint32_t*>(at));
            }
        }
    }
    // Loads this lane's part of 64 k from `k` on.
    __device__ __forceinline__ void load(uint32_t i, uint32_t k) {
#pragma unroll
        for (int f = 0; f < FEATURES; f++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const void* at = rows[f][half] + k + 16 * (threadIdx.x % 4);
                chunk[f][half][i] = load_weights(static_cast<const tutti_bf16*>(at));
            }
        }
        load_scales(i, k);
    }
    // Bytes past the row's end are multiplied by zeros of x, and any byte becomes a number. A load
    // past the end has the scale of the last group, which may be that of the load before.
    __device__ __forceinline__ void load_before(uint32_t i, uint32_t k, uint32_t end) {
        if (k + 16 * (threadIdx.x % 4) < end) {
            load(i, k);
            return;
        }
#pragma unroll
        for (int f = 0; f < FEATURES; f++) {
            chunk[f][0][i] = make_uint4(0, 0, 0, 0);
            chunk[f][1][i] = make_uint4(0, 0, 0, 0);
        }
        load_scales(i, at_most(k, end - 1));
    }
    // The operands of two instructions: 8 k, the first or second half of load `i`.
    __device__ __forceinline__ void widen(uint32_t i, int second,
                                          uint32_t (&a)[FEATURES][2][4]) const {
#pragma unroll
        for (int f = 0; f < FEATURES; f++) {
            const uint4 upper = chunk[f][0][i];
            const uint4 lower = chunk[f][1][i];
            const uint32_t u[2] = {second ? upper.z : upper.x, second ? upper.w : upper.y};
            const uint32_t l[2] = {second ? lower.z : lower.x, second ? lower.w : lower.y};
#pragma unroll
            for (int part = 0; part < 2; part++) {
                const uint2 of_upper = tutti::widen(u[part]);
                const uint2 of_lower = tutti::widen(l[part]);
                a[f][part][0] = of_upper.x;
                a[f][part][1] = of_lower.x;
                a[f][part][2] = of_upper.y;
                a[f][part][3] = of_lower.y;
            }
        }
    }
    __device__ __forceinline__ void load_first(uint32_t k) {
        const uint32_t start = threadIdx.x / 32 * CHUNK;
        if (start + CHUNK <= k) {
#pragma unroll
            for (uint32_t i = 0; i < LOADS_INT8; i++) {
                load(i, start + K_LOAD_INT8 * i);
            }
        }
    }
};

// Finishes sums, which need nothing more; and gives the weights their scales.
struct Fp8Scaled {
    const float* scales;
    uint32_t stride;
    uint32_t shift;

    __device__ __forceinline__ float operator()(float sum, size_t) const { return sum; }
    template <int FEATURES>
    __device__ __forceinline__ void attach(Fp8Weights<FEATURES>& w, int f, int half,
                                           size_t row) const {
        w.scales[f][half] = scales + row * stride;
        w.shift = shift;
    }
};

// Adds the sums of the group of load `i` times its scale, and begins the next group.
template <int FEATURES, int ROWS>
__device__ __forceinline__ void add_group(const Fp8Weights<FEATURES>& w, uint32_t i,
                                          float (&parts)[FEATURES][ROWS][4],
                                          float (&sums)[FEATURES][ROWS][4]) {
#pragma unroll
    for (int f = 0; f < FEATURES; f++) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const float scale = __uint_as_float(w.first[f][n / 2][i]);
                const float scaled = __fmul_rn(parts[f][r][n], scale);
                sums[f][r][n] = __fadd_rn(sums[f][r][n], scaled);
                parts[f][r][n] = 0.0f;
            }
        }
    }
}

template <int FEATURES, int ROWS>
__device__ __forceinline__ void multiply(Fp8Weights<FEATURES>& w,
                                         const tutti_bf16* const (&x)[ROWS], uint32_t k,
                                         float (&sums)[FEATURES][ROWS][4]) {
    const uint32_t lane_k = 16 * (threadIdx.x % 4);
    const uint32_t within = (1u << w.shift) - 1;
    float parts[FEATURES][ROWS][4] = {};
    uint32_t start = threadIdx.x / 32 * CHUNK;
    for (; start + CHUNK <= k; start += WARPS * CHUNK) {
        const uint32_t next = start + WARPS * CHUNK;
        const bool more = next + CHUNK <= k;
#pragma unroll
        for (uint32_t i = 0; i < LOADS_INT8; i++) {
            const uint32_t at = start + K_LOAD_INT8 * i;
            multiply_bytes<true>(w, i, x, at + lane_k, k, parts);
            if (i + 1 == LOADS_INT8 || ((at + K_LOAD_INT8) & within) == 0) {
                add_group(w, i, parts, sums);
            }
            if (more) {
                w.load(i, next + K_LOAD_INT8 * i);
            }
        }
    }
    if (start < k) {
#pragma unroll
        for (uint32_t i = 0; i < LOADS_INT8; i++) {
            const uint32_t at = start + K_LOAD_INT8 * i;
            w.load_before(i, at, k);
            multiply_bytes<false>(w, i, x, at + lane_k, k, parts);
            if (i + 1 == LOADS_INT8 || ((at + K_LOAD_INT8) & within) == 0) {
                add_group(w, i, parts, sums);
            }
        }
    }
}

}  // namespace
}  // namespace tutti
