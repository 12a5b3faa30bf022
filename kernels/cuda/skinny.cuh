// The inner loop of products of few rows with a large matrix: 16 (or 32) rows of W times up to 64
// rows of x, by 8 warps that share k. Purpose, and order of the sums: skinny.cu. int8 weights:
// skinny_int8.cuh; FP8: skinny_fp8.cuh; 4-bit weights: skinny_int4.cuh.
#pragma once
#include "device.cuh"

namespace tutti {
namespace {

constexpr uint32_t WARPS = 8;
// k per load of a row's 4 lanes, and number of loads in flight: a chunk.
constexpr uint32_t K_LOAD = 32;
constexpr uint32_t LOADS = 4;
constexpr uint32_t CHUNK = K_LOAD * LOADS;

// Bytes that waiting blocks can prefetch to L2 in addition to their first loads: half to two thirds
// of an H200's 50 MiB, which the kernels before use as well. And the number of blocks assumed to
// run at once (about 4 on each of 132 multiprocessors): later ones have nothing to wait for when
// they begin.
constexpr uint32_t AHEAD_BYTES = 32u << 20;
constexpr uint32_t AHEAD_BLOCKS = 512;


// Prefetches the parts of the block's rows of W that follow the first loads to L2, up to the
// block's share, before the wait for earlier kernels; `row_of` returns the rows. This uses the
// memory bandwidth that those kernels leave. Does nothing if other blocks read the same rows of W.
template <class W, class RowOf>
__device__ __forceinline__ void ask_for_more(uint32_t k, const RowOf& row_of) {
#if defined(TUTTI_EMULATE) || __CUDA_ARCH__ >= 900
    constexpr uint32_t COUNT = 16 * W::COUNT;
    const uint32_t row_bytes = W::row_bytes(k);
    if (threadIdx.x % 32 != 0 || gridDim.y != 1 || blockIdx.x >= AHEAD_BLOCKS ||
        row_bytes <= W::FIRST_BYTES) {
        return;
    }
    // Rounds the number of blocks up to a power of two: a division takes registers, and precision
    // does not matter.
    const uint32_t blocks = at_most(gridDim.x, AHEAD_BLOCKS);
    const uint32_t share = AHEAD_BYTES / COUNT >> (32 - __clz(static_cast<int>(2 * blocks - 1)) - 1);
    const uint32_t bytes = at_most(row_bytes - W::FIRST_BYTES, share) & ~15u;
    if (bytes == 0) {
        return;
    }
#pragma unroll
    for (uint32_t row = 0; row < COUNT; row += WARPS) {
        const void* from = row_of(row + threadIdx.x / 32);
        prefetch(static_cast<const char*>(from) + W::FIRST_BYTES, bytes);
    }
#endif
}

// The part of 8 elements from column `k` of a row that is before column `end`; zeros for the rest,
// so that anything past the row's end, even NaN, does not count.
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

// One lane's part of 16 * FEATURES rows of W, and one chunk of it.
template <int FEATURES>
struct Weights {
    using Element = tutti_bf16;
    static constexpr int COUNT = FEATURES;
    // Whether the blocks along grid.z divide a tile of experts' slots.
    static constexpr bool DIVIDES_TILES = false;
    // Bytes of a row in the first chunks of all warps.
    static constexpr uint32_t FIRST_BYTES = WARPS * CHUNK * sizeof(tutti_bf16);
    const tutti_bf16* rows[FEATURES][2];
    uint4 chunk[FEATURES][2][LOADS];

    static __device__ __forceinline__ uint32_t row_bytes(uint32_t k) { return 2 * k; }

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
    // Loads the first chunk of a warp, if it is a whole one. Needs nothing from earlier kernels, so
    // it can run at the same time.
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

// Finishes a sum: bf16 weights need nothing, int8 weights a product with the output's scale.
struct Unscaled {
    __device__ __forceinline__ float operator()(float sum, size_t) const { return sum; }
    template <class W>
    __device__ __forceinline__ void attach(W&, int, int, size_t) const {}
};
struct Scaled {
    const float* scales;

    __device__ __forceinline__ float operator()(float sum, size_t row) const {
        return __fmul_rn(sum, scales[row]);
    }
    template <class W>
    __device__ __forceinline__ void attach(W&, int, int, size_t) const {}
};

// Keeps requests for weights between the instructions that use the ones before. The assembler makes
// few of them conditional and puts them off until the chunk is over, when nothing is in flight any
// more; a branch that the warp meets in stays one. `check` looks at what comes of it.
template <int FEATURES>
__device__ __forceinline__ void stay_here() {
    if (FEATURES == 1) {
        __syncwarp();
    }
}

// Whether 8 rows of x with 16 of W have registers for the x of a whole chunk, without costing a
// resident block.
#if defined(TUTTI_EMULATE) || __CUDA_ARCH__ >= 900
constexpr bool X_AT_ONCE = true;
#else
constexpr bool X_AT_ONCE = false;
#endif

// Sums the products of FEATURES * 16 rows of W with ROWS * 8 rows of x over this warp's part of k.
// `w` holds its first chunk.
template <int FEATURES, int ROWS>
__device__ __forceinline__ void multiply(Weights<FEATURES>& w, const tutti_bf16* const (&x)[ROWS],
                                         uint32_t k, float (&sums)[FEATURES][ROWS][4]) {
    const uint32_t lane_k = 8 * (threadIdx.x % 4);
    // For few rows, all of the chunk's x is loaded at once, so that waits are only for W. Not for
    // 16 rows of x with 16 of W, where it would cost a resident block. For 8 rows with 32, whose
    // blocks have registers to spare, x is requested together with the weights that it belongs to.
    constexpr bool AHEAD = ROWS == 1 && FEATURES == 2;
    constexpr bool AT_ONCE = AHEAD || (ROWS == 1 && X_AT_ONCE) || (ROWS == 2 && FEATURES == 2);
    // Used weights are replaced after so many loads, so that about the same amount is always in
    // flight. Not after each where it is two requests: their addresses would take registers.
    constexpr uint32_t REPLACED = FEATURES == 1 ? 2 : 1;
    uint4 all[AT_ONCE ? LOADS : 1][ROWS];
    const auto load_x = [&](uint32_t i, uint32_t from) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            all[AT_ONCE ? i : 0][r] = load_row(x[r] + from + K_LOAD * i + lane_k);
        }
    };
    const auto load_all_x = [&](uint32_t from) {
#pragma unroll
        for (uint32_t i = 0; i < LOADS; i++) {
            load_x(i, from);
        }
    };
    uint32_t start = threadIdx.x / 32 * CHUNK;
    if (AHEAD && start + CHUNK <= k) {
        load_all_x(start);
    }
    for (; start + CHUNK <= k; start += WARPS * CHUNK) {
        const uint32_t next = start + WARPS * CHUNK;
        const bool more = next + CHUNK <= k;
        if (AT_ONCE && !AHEAD) {
            load_all_x(start);
        }
#pragma unroll
        for (uint32_t i = 0; i < LOADS; i++) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const uint4 b = AT_ONCE ? all[AT_ONCE ? i : 0][r]
                                        : *reinterpret_cast<const uint4*>(
                                              x[r] + start + K_LOAD * i + lane_k);
#pragma unroll
                for (int f = 0; f < FEATURES; f++) {
                    w.multiply(i, b, sums[f][r], f);
                }
            }
            if ((i + 1) % REPLACED == 0 && more) {
                stay_here<FEATURES>();
#pragma unroll
                for (uint32_t used = i + 1 - REPLACED; used <= i; used++) {
                    w.load(used, next + K_LOAD * used + lane_k);
                    if (AHEAD) {
                        load_x(used, next);
                    }
                }
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

// Adds the sums of the 8 warps into warp 0's; once per block. For few rows, shared memory holds the
// sums of all warps, and warp 0 adds the whole tree after one barrier; for more, half of the warps
// add the other half's at each level. The tree is the same.
template <int FEATURES, int ROWS>
__device__ __forceinline__ void add_warps(float (&sums)[FEATURES][ROWS][4]) {
    constexpr int COUNT = FEATURES * ROWS * 4;
    constexpr bool AT_ONCE = ROWS <= 2;
    SHARED_ARRAY(float, parts, (AT_ONCE ? WARPS - 1 : WARPS / 2) * COUNT * 32);
    const uint32_t warp = threadIdx.x / 32;
    const uint32_t lane = threadIdx.x % 32;
    if constexpr (AT_ONCE) {
        if (warp > 0) {
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                parts[((warp - 1) * COUNT + i) * 32 + lane] = (&sums[0][0][0])[i];
            }
        }
        __syncthreads();
        if (warp == 0) {
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                const auto of = [&](uint32_t from) {
                    return parts[((from - 1) * COUNT + i) * 32 + lane];
                };
                float& own = (&sums[0][0][0])[i];
                own = ((own + of(4)) + (of(2) + of(6))) + ((of(1) + of(5)) + (of(3) + of(7)));
            }
        }
    } else {
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
}

}  // namespace
}  // namespace tutti
