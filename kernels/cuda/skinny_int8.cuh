// The inner loop of skinny.cuh for int8 weights, stored as bytes with 128 added.
//
// A lane's 16 bytes are 16 k, so 4 lanes load 64 k of a row at once. They are converted to bf16 in
// registers, exactly, 8 at a time, and then used like bf16 weights. A byte below the exponent of
// 2^23 is a float, from which 2^23 + 128 is subtracted; the result is exact in its upper half.
#pragma once
#include "skinny.cuh"

namespace tutti {
namespace {

constexpr uint32_t K_LOAD_INT8 = 64;
// As many k in flight as for bf16, in half the bytes: more would not leave registers for the
// converted weights.
constexpr uint32_t LOADS_INT8 = CHUNK / K_LOAD_INT8;

// Byte `at` of a word as a float.
template <uint32_t at>
__device__ __forceinline__ float widen_byte(uint32_t word) {
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440u + at)) - 8388736.0f;
}

// Bytes `at` and `at` + 1 of a word as a pair of bf16.
template <uint32_t at>
__device__ __forceinline__ uint32_t widen_two(uint32_t word) {
    return __byte_perm(__float_as_uint(widen_byte<at>(word)),
                       __float_as_uint(widen_byte<at + 1>(word)), 0x7632u);
}

// One lane's part of 16 * FEATURES rows of W, and one chunk of it.
template <int FEATURES>
struct Int8Weights {
    using Element = uint8_t;
    static constexpr int COUNT = FEATURES;
    static constexpr bool DIVIDES_TILES = false;
    static constexpr uint32_t FIRST_BYTES = WARPS * CHUNK;
    const uint8_t* rows[FEATURES][2];
    uint4 chunk[FEATURES][2][LOADS_INT8];

    static __device__ __forceinline__ uint32_t row_bytes(uint32_t k) { return k; }

    __device__ __forceinline__ void load(uint32_t i, uint32_t k) {
#pragma unroll
        for (int f = 0; f < FEATURES; f++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const void* at = rows[f][half] + k;
                chunk[f][half][i] = load_weights(static_cast<const tutti_bf16*>(at));
            }
        }
    }
    // Bytes past the row's end are multiplied by zeros of x, and any byte is a number.
    __device__ __forceinline__ void load_before(uint32_t i, uint32_t k, uint32_t end) {
        if (k < end) {
            load(i, k);
            return;
        }
#pragma unroll
        for (int f = 0; f < FEATURES; f++) {
            chunk[f][0][i] = make_uint4(0, 0, 0, 0);
            chunk[f][1][i] = make_uint4(0, 0, 0, 0);
        }
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
                a[f][part][0] = widen_two<0>(u[part]);
                a[f][part][1] = widen_two<0>(l[part]);
                a[f][part][2] = widen_two<2>(u[part]);
                a[f][part][3] = widen_two<2>(l[part]);
            }
        }
    }
    __device__ __forceinline__ void load_first(uint32_t k) {
        const uint32_t start = threadIdx.x / 32 * CHUNK;
        if (start + CHUNK <= k) {
#pragma unroll
            for (uint32_t i = 0; i < LOADS_INT8; i++) {
                load(i, start + K_LOAD_INT8 * i + 16 * (threadIdx.x % 4));
            }
        }
    }
};

// As for bf16 weights. Reads x only up to `end`, unless WHOLE.
template <bool WHOLE, class W, int FEATURES, int ROWS>
__device__ __forceinline__ void multiply_bytes(const W& w, uint32_t i,
                                               const tutti_bf16* const (&x)[ROWS], uint32_t at,
                                               uint32_t end, float (&sums)[FEATURES][ROWS][4]) {
#pragma unroll
    for (int second = 0; second < 2; second++) {
        uint32_t a[FEATURES][2][4];
        w.widen(i, second, a);
        const uint32_t k = at + 8 * second;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const uint4 b = WHOLE ? *reinterpret_cast<const uint4*>(x[r] + k)
                                  : load8_before<false>(x[r], k, end);
#pragma unroll
            for (int f = 0; f < FEATURES; f++) {
                mma_bf16(sums[f][r], a[f][0], b.x, b.y);
                mma_bf16(sums[f][r], a[f][1], b.z, b.w);
            }
        }
    }
}

template <int FEATURES, int ROWS>
__device__ __forceinline__ void multiply(Int8Weights<FEATURES>& w,
                                         const tutti_bf16* const (&x)[ROWS], uint32_t k,
                                         float (&sums)[FEATURES][ROWS][4]) {
    const uint32_t lane_k = 16 * (threadIdx.x % 4);
    uint32_t start = threadIdx.x / 32 * CHUNK;
    for (; start + CHUNK <= k; start += WARPS * CHUNK) {
        const uint32_t next = start + WARPS * CHUNK;
        const bool more = next + CHUNK <= k;
#pragma unroll
        for (uint32_t i = 0; i < LOADS_INT8; i++) {
            const uint32_t at = start + K_LOAD_INT8 * i + lane_k;
            multiply_bytes<true>(w, i, x, at, k, sums);
            if (more) {
                stay_here<FEATURES>();
                w.load(i, next + K_LOAD_INT8 * i + lane_k);
            }
        }
    }
    if (start < k) {
#pragma unroll
        for (uint32_t i = 0; i < LOADS_INT8; i++) {
            const uint32_t at = start + K_LOAD_INT8 * i + lane_k;
            w.load_before(i, at, k);
            multiply_bytes<false>(w, i, x, at, k, sums);
        }
    }
}

}  // namespace
}  // namespace tutti
