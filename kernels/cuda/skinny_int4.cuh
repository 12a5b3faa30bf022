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
    const uint32_t biased = masked_with(word >> (4 * at), 0x000f000fu, 0x43004300u);
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
    // All groups, and where each row's begin: 32 bits take half of a pointer's registers.
    const uint32_t* groups;
    uint32_t row_groups[FEATURES][2];
    // Logarithm of the k per group.
    uint32_t shift;
    uint4 chunk[FEATURES][2][LOADS_INT4];
    uint32_t first[FEATURES][2][LOADS_INT4];

    static __device__ __forceinline__ uint32_t row_bytes(uint32_t k) { return k / 2; }
    __device__ __forceinline__ uint32_t group_of(int f, int half, uint32_t k) const {
        return load_constant(groups + (row_groups[f][half] + (k >> shift)));
    }
    // Loads this lane's part of load `i` of the chunk that begins at `k`. The distance to it is
    // added to a pointer, so that it is part of the instruction.
    __device__ __forceinline__ void load(uint32_t i, uint32_t k) {
#pragma unroll
        for (int f = 0; f < FEATURES; f++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint8_t* from = rows[f][half] + (k / 2 + 16 * (threadIdx.x % 4));
                const void* at = from + K_LOAD_INT4 / 2 * i;
                chunk[f][half][i] = load_weights(static_cast<const tutti_bf16*>(at));
                first[f][half][i] = group_of(f, half, k + K_LOAD_INT4 * i);
            }
        }
    }
    // Rows are padded to a multiple of 128 k; the padding is multiplied by zeros of x.
    __device__ __forceinline__ void load_before(uint32_t i, uint32_t k, uint32_t end) {
        if (k + K_LOAD_INT4 * i < end) {
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
                load(i, start);
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
        w.groups = groups;
        w.row_groups[f][half] = static_cast<uint32_t>(row) * stride;
        w.shift = shift;
    }
};

// Words `j` of load `i` minus their zeros, as the operands of two instructions.
template <int FEATURES>
__device__ __forceinline__ void widen_words(const Int4Weights<FEATURES>& w, uint32_t i, uint32_t j,
                                            const uint32_t (&zeros)[FEATURES][2],
                                            uint32_t (&even)[FEATURES][4],
                                            uint32_t (&odd)[FEATURES][4]) {
#pragma unroll
    for (int f = 0; f < FEATURES; f++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint4 v = w.chunk[f][half][i];
            const uint32_t word = j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w;
            even[f][half] = widen_pair<0>(word, zeros[f][half]);
            even[f][half + 2] = widen_pair<1>(word, zeros[f][half]);
            odd[f][half] = widen_pair<2>(word, zeros[f][half]);
            odd[f][half + 2] = widen_pair<3>(word, zeros[f][half]);
        }
    }
}

// Adds the sums of a group times its scale.
__device__ __forceinline__ void add_scaled(float (&sums)[4], const float (&parts)[4],
                                           const uint32_t (&group)[2]) {
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const float scaled = __fmul_rn(parts[n], scale_of(group[n / 2]));
        sums[n] = __fadd_rn(sums[n], scaled);
    }
}

// Adds the products of load `i` of the chunk that begins at `start`: 128 k, of GROUPS groups.
template <int GROUPS, int FEATURES, int ROWS>
__device__ __forceinline__ void multiply_load(const Int4Weights<FEATURES>& w, uint32_t i,
                                              const tutti_bf16* const (&x)[ROWS], uint32_t start,
                                              float (&sums)[FEATURES][ROWS][4]) {
    constexpr uint32_t WORDS = 4 / GROUPS;
    uint32_t group[FEATURES][2];
    uint32_t zeros[FEATURES][2];
    float parts[FEATURES][ROWS][4];
#pragma unroll
    for (uint32_t j = 0; j < 4; j++) {
        if (j % WORDS == 0) {
#pragma unroll
            for (int f = 0; f < FEATURES; f++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    group[f][half] = j == 0 ? w.first[f][half][i]
                                            : w.group_of(f, half, start + K_LOAD_INT4 * i + 32 * j);
                    zeros[f][half] = zeros_of(group[f][half]);
                }
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
#pragma unroll
                    for (int n = 0; n < 4; n++) {
                        parts[f][r][n] = 0.0f;
                    }
                }
            }
        }
        uint32_t even[FEATURES][4];
        uint32_t odd[FEATURES][4];
        widen_words(w, i, j, zeros, even, odd);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const tutti_bf16* from = x[r] + (start + 8 * (threadIdx.x % 4));
            const uint4 b = *reinterpret_cast<const uint4*>(from + K_LOAD_INT4 * i + 32 * j);
#pragma unroll
            for (int f = 0; f < FEATURES; f++) {
                mma_bf16(parts[f][r], even[f], b.x, b.y);
                mma_bf16(parts[f][r], odd[f], b.z, b.w);
                if ((j + 1) % WORDS == 0) {
                    add_scaled(sums[f][r], parts[f][r], group[f]);
                }
            }
        }
    }
}

// The same for 128 k from `at` on, of groups of any size, a word after the other: short, with few
// registers, but slower. Reads x only up to `end`, unless WHOLE.
template <bool WHOLE, int FEATURES, int ROWS>
__device__ __forceinline__ void multiply_words(const Int4Weights<FEATURES>& w, uint32_t i,
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
#pragma unroll 1
    for (uint32_t j = 0; j < 4; j++) {
        const uint32_t from = at + 32 * j;
        if (!WHOLE && from >= end) {
            break;
        }
        uint32_t zeros[FEATURES][2];
#pragma unroll
        for (int f = 0; f < FEATURES; f++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (j > 0 && (from & within) == 0) {
                    group[f][half] = w.group_of(f, half, from);
                }
                zeros[f][half] = zeros_of(group[f][half]);
            }
        }
        uint32_t even[FEATURES][4];
        uint32_t odd[FEATURES][4];
        widen_words(w, i, j, zeros, even, odd);
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
                    add_scaled(sums[f][r], part, group[f]);
#pragma unroll
                    for (int n = 0; n < 4; n++) {
                        part[n] = 0.0f;
                    }
                }
            }
        }
    }
}

// The whole chunks from `start` on, with GROUPS groups for each load (0: any number); returns where
// they end.
template <int GROUPS, int FEATURES, int ROWS>
__device__ __forceinline__ uint32_t multiply_whole(Int4Weights<FEATURES>& w,
                                                   const tutti_bf16* const (&x)[ROWS],
                                                   uint32_t start, uint32_t k,
                                                   float (&sums)[FEATURES][ROWS][4]) {
    for (; start + CHUNK_INT4 <= k; start += WARPS * CHUNK_INT4) {
        const uint32_t next = start + WARPS * CHUNK_INT4;
        const bool more = next + CHUNK_INT4 <= k;
#pragma unroll
        for (uint32_t i = 0; i < LOADS_INT4; i++) {
            if constexpr (GROUPS == 0) {
                multiply_words<true>(w, i, x, start + K_LOAD_INT4 * i, k, sums);
            } else {
                multiply_load<GROUPS>(w, i, x, start, sums);
            }
            if (more) {
                stay_here<FEATURES>();
                w.load(i, next);
            }
        }
    }
    return start;
}

// A load begins with a group. How many groups it has is found out before the loop: in it, a zero is
// taken apart once, and nothing asks where a group begins. With 16 features that is so only for
// groups of 128 and more, which most models have: another such loop would take registers, and with
// them a resident block.
template <int FEATURES, int ROWS>
__device__ __forceinline__ void multiply(Int4Weights<FEATURES>& w,
                                         const tutti_bf16* const (&x)[ROWS], uint32_t k,
                                         float (&sums)[FEATURES][ROWS][4]) {
    uint32_t start = threadIdx.x / 32 * CHUNK_INT4;
    if (1u << w.shift >= K_LOAD_INT4) {
        start = multiply_whole<1>(w, x, start, k, sums);
    } else if constexpr (FEATURES == 1) {
        start = multiply_whole<0>(w, x, start, k, sums);
    } else if (2u << w.shift == K_LOAD_INT4) {
        start = multiply_whole<2>(w, x, start, k, sums);
    } else {
        start = multiply_whole<4>(w, x, start, k, sums);
    }
    if (start < k) {
#pragma unroll
        for (uint32_t i = 0; i < LOADS_INT4; i++) {
            w.load_before(i, start, k);
            multiply_words<false>(w, i, x, start + K_LOAD_INT4 * i, k, sums);
        }
    }
}

}  // namespace
}  // namespace tutti
