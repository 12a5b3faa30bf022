// The inner loop of skinny.cuh for 4-bit weights, with a scale and a zero for each group of k.
//
// A lane's 16 bytes are four words of 8 k, and the same word of 4 lanes is 32 consecutive k: word j
// of lane t has k = 32j + 8t .. 32j + 8t + 7 of 128, as x is read for bf16 weights. The two k of a
// pair are 16 bits apart in a word, so a shift, a mask and an exponent turn it into two bf16, 128 +
// integer; one instruction then subtracts 128 + zero, exactly. Each group is summed from zero and
// added times its scale: one group, at most 128 k, at a time.
#pragma once
#include "skinny.cuh"

namespace tutti {
namespace {

constexpr uint32_t K_LOAD_INT4 = 128;
// As many bytes in flight as for int8.
constexpr uint32_t LOADS_INT4 = 2;
constexpr uint32_t CHUNK_INT4 = K_LOAD_INT4 * LOADS_INT4;

// A group's scale and zero: see kernels.h.
__device__ __forceinline__ float scale_of(uint32_t group) {
    return __uint_as_float(group & 0xfffffff0u);
}
// -(128 + zero), twice.
__device__ __forceinline__ uint32_t zeros_of(uint32_t group) {
    return 0xc300c300u | (group & 15u) * 0x00010001u;
}

// Pair `at` of a word minus its zeros, as bf16.
template <uint32_t at>
__device__ __forceinline__ uint32_t widen_pair(uint32_t word, uint32_t zeros) {
    const uint32_t biased = (word >> (4 * at) & 0x000f000fu) | 0x43004300u;
    return fma_bf16x2(biased, 0x3f803f80u, zeros);
}

// One lane's part of 16 * FEATURES rows of W, and one chunk of it, with the groups in which its
// loads begin.
template <int FEATURES>
struct Int4Weights {
    using Element = uint8_t;
    static constexpr int COUNT = FEATURES;
    static constexpr uint32_t FIRST_BYTES = WARPS * CHUNK_INT4 / 2;
    const uint8_t* rows[FEATURES][2];
    const uint32_t* groups[FEATURES][2];
    // Logarithm of the k per group.
    uint32_t shift;
    uint4 chunk[FEATURES][2][LOADS_INT4];
    uint32_t first[FEATURES][2][LOADS_INT4];

    static __device__ __forceinline__ uint32_t row_bytes(uint32_t k) { return k / 2; }
    // Loads this lane's part of 128 k from `k` on.
    __device__ __forceinline__ void load(uint32_t i, uint32_t k) {
#pragma unroll
        for (int f = 0; f < FEATURES; f++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const void* at = rows[f][half] + k / 2 + 16 * (threadIdx.x % 4);
                chunk[f][half][i] = load_weights(static_cast<const tutti_bf16*>(at));
                first[f][half][i] = load_constant(groups[f][half] + (k >> shift));
            }
        }
    }
    // Rows are padded to a multiple of 128 k; the padding is multiplied by zeros of x.
    __device__ __forceinline__ void load_before(uint32_t i, uint32_t k, uint32_t end) {
        if (k < end) {
            load(i, k);
            return;
        }
#pragma unroll
        for (int f = 0; f < FEATURES; f++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                chunk[f][half][i] = make_uint4(0, 0, 0, 0);
                first[f][half][i] = 0;
            }
        }
    }
    __device__ __forceinline__ void load_first(uint32_t k) {
        const uint32_t start = threadIdx.x / 32 * CHUNK_INT4;
        if (start + CHUNK_INT4 <= k) {
#pragma unroll
            for (uint32_t i = 0; i < LOADS_INT4; i++) {
                load(i, start + K_LOAD_INT4 * i);
            }
        }
    }
};

// Finishes sums, which need nothing more; and gives the weights their groups.
struct Grouped {
    const uint32_t* groups;
    uint32_t stride;
    uint32_t shift;

    __device__ __forceinline__ float operator()(float sum, size_t) const { return sum; }
    template <int FEATURES>
    __device__ __forceinline__ void attach(Int4Weights<FEATURES>& w, int f, int half,
                                           size_t row) const {
        w.groups[f][half] = groups + row * stride;
        w.shift = shift;
    }
};

// Adds the products of 128 k from `at` on. Reads x only up to `end`, unless WHOLE.
template <int FEATURES, int ROWS, bool WHOLE>
__device__ __forceinline__ void multiply_load(const Int4Weights<FEATURES>& w, uint32_t i,
                                              const tutti_bf16* const (&x)[ROWS], uint32_t at,
                                              uint32_t end, float (&sums)[FEATURES][ROWS][4]) {
    const uint32_t within = (1u << w.shift) - 1;
    uint32_t group[FEATURES][2];
#pragma unroll
    for (int f = 0; f < FEATURES; f++) {
        group[f][0] = w.first[f][0][i];
        group[f][1] = w.first[f][1][i];
    }
    float parts[FEATURES][ROWS][4] = {};
#pragma unroll
    for (uint32_t j = 0; j < 4; j++) {
        const uint32_t from = at + 32 * j;
        if (!WHOLE && from >= end) {
            break;
        }
        if (j > 0 && (from & within) == 0) {
#pragma unroll
            for (int f = 0; f < FEATURES; f++) {
                group[f][0] = load_constant(w.groups[f][0] + (from >> w.shift));
                group[f][1] = load_constant(w.groups[f][1] + (from >> w.shift));
            }
        }
        uint32_t even[FEATURES][4];
        uint32_t odd[FEATURES][4];
#pragma unroll
        for (int f = 0; f < FEATURES; f++) {
            const uint4 upper = w.chunk[f][0][i];
            const uint4 lower = w.chunk[f][1][i];
            const uint32_t u = j == 0 ? upper.x : j == 1 ? upper.y : j == 2 ? upper.z : upper.w;
            const uint32_t l = j == 0 ? lower.x : j == 1 ? lower.y : j == 2 ? lower.z : lower.w;
            const uint32_t u_zeros = zeros_of(group[f][0]);
            const uint32_t l_zeros = zeros_of(group[f][1]);
            even[f][0] = widen_pair<0>(u, u_zeros);
            even[f][1] = widen_pair<0>(l, l_zeros);
            even[f][2] = widen_pair<1>(u, u_zeros);
            even[f][3] = widen_pair<1>(l, l_zeros);
            odd[f][0] = widen_pair<2>(u, u_zeros);
            odd[f][1] = widen_pair<2>(l, l_zeros);
            odd[f][2] = widen_pair<3>(u, u_zeros);
            odd[f][3] = widen_pair<3>(l, l_zeros);
        }
        const uint32_t k = from + 8 * (threadIdx.x % 4);
        const bool ends = j == 3 || ((from + 32) & within) == 0 || (!WHOLE && from + 32 >= end);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const uint4 b = WHOLE ? *reinterpret_cast<const uint4*>(x[r] + k)
                                  : load8_before<false>(x[r], k, end);
#pragma unroll
            for (int f = 0; f < FEATURES; f++) {
                float(&part)[4] = parts[f][r];
                mma_bf16(part, even[f], b.x, b.y);
                mma_bf16(part, odd[f], b.z, b.w);
                if (ends) {
#pragma unroll
                    for (int n = 0; n < 4; n++) {
                        const float scaled = __fmul_rn(part[n], scale_of(group[f][n / 2]));
                        sums[f][r][n] = __fadd_rn(sums[f][r][n], scaled);
                        part[n] = 0.0f;
                    }
                }
            }
        }
    }
}

template <int FEATURES, int ROWS>
__device__ __forceinline__ void multiply(Int4Weights<FEATURES>& w,
                                         const tutti_bf16* const (&x)[ROWS], uint32_t k,
                                         float (&sums)[FEATURES][ROWS][4]) {
    uint32_t start = threadIdx.x / 32 * CHUNK_INT4;
    for (; start + CHUNK_INT4 <= k; start += WARPS * CHUNK_INT4) {
        const uint32_t next = start + WARPS * CHUNK_INT4;
        const bool more = next + CHUNK_INT4 <= k;
#pragma unroll
        for (uint32_t i = 0; i < LOADS_INT4; i++) {
            multiply_load<FEATURES, ROWS, true>(w, i, x, start + K_LOAD_INT4 * i, k, sums);
            if (more) {
                w.load(i, next + K_LOAD_INT4 * i);
            }
        }
    }
    if (start < k) {
#pragma unroll
        for (uint32_t i = 0; i < LOADS_INT4; i++) {
            const uint32_t at = start + K_LOAD_INT4 * i;
            w.load_before(i, at, k);
            multiply_load<FEATURES, ROWS, false>(w, i, x, at, k, sums);
        }
    }
}

}  // namespace
}  // namespace tutti
