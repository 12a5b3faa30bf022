// Shared by all kernels: bf16, vector loads, tensor-core instructions, reductions.
//
// The only file that contains PTX. Each such function has a twin for the host in
// `emulate/device.h`, so that GPU and emulation share the source of the kernels.
#pragma once
#include "kernels.h"

namespace tutti {

constexpr uint32_t ALL_LANES = 0xffffffffu;
typedef unsigned long long u64;

}  // namespace tutti

#if defined(TUTTI_EMULATE)
#include "emulate/device.h"
#else

// Shared memory of the block. The emulation adds guard pages and poison to every array.
#define SHARED_ARRAY(type, name, count) __shared__ __align__(16) type name[count]
#define DYNAMIC_SHARED(name)                                                                       \
    extern __shared__ uint4 tutti_dynamic_shared[];                                                \
    unsigned char* name = reinterpret_cast<unsigned char*>(tutti_dynamic_shared)

namespace tutti {

// Waits until earlier kernels are complete and their writes visible.
__device__ __forceinline__ void wait_for_predecessors() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel's blocks start once all of this one's have. Called first, so that a product
// loads its weights while smaller kernels before it still run. The next kernel waits for this one's
// end, which comes after this one's own wait, so nothing is read too early. A block that never
// calls it releases the next kernel by its end.
__device__ __forceinline__ void release_successors() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// 16 bytes of weights, which are read once and never written while kernels run. Not volatile, so
// the compiler can move the load, even above `wait_for_predecessors`.
__device__ __forceinline__ uint4 load_weights(const tutti_bf16* at) {
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(at));
    return v;
}

// A word that is never written while kernels run, and that other threads read as well.
__device__ __forceinline__ uint32_t load_constant(const uint32_t* at) {
    uint32_t v;
    asm("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(at));
    return v;
}

// A word that no kernel of the step writes: it was copied before all of them, and the first of them
// has waited for the copy. So it can be read before `wait_for_predecessors`. Read from L2, since
// other words were there in the previous step: the non-coherent path guarantees nothing about
// memory that changes while any kernel runs, and kernels of two steps can run at the same time. Not
// for token ids: a kernel overwrites some of them with tokens of the previous step.
__device__ __forceinline__ uint32_t load_input(const uint32_t* at) {
    uint32_t v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}

// The same for 8 bytes.
__device__ __forceinline__ uint64_t load_input(const uint64_t* at) {
    uint64_t v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
    return v;
}

// 4 floats of the model (norms), 16-byte aligned, readable early as well. They are never written,
// but on the non-coherent path the assembler would move the loads to their first use, after the
// wait.
__device__ __forceinline__ float4 load_constants(const float* at) {
    float4 v;
    asm volatile("ld.relaxed.gpu.global.L2::128B.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}
// The same for one float.
__device__ __forceinline__ float load_early(const float* at) {
    float v;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(at) : "memory");
    return v;
}
// A float of the model's tables.
__device__ __forceinline__ float load_constant(const float* at) {
    float v;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(at));
    return v;
}

// 16 bytes of a row of activations; volatile, so that the load stays before later computations.
__device__ __forceinline__ uint4 load_row(const tutti_bf16* at) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}

// 4 floats of a row; stays before later loads.
__device__ __forceinline__ float4 load_row(const float* at) {
    float4 v;
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}

// Writes 4 floats of a row at once: of an ordinary store the compiler sometimes makes four.
__device__ __forceinline__ void store_row(float* at, float4 v) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(v.x), "f"(v.y), "f"(v.z),
                 "f"(v.w)
                 : "memory");
}

// The same for 4 elements of bf16.
__device__ __forceinline__ void store_row(tutti_bf16* at, uint2 v) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(at), "r"(v.x), "r"(v.y) : "memory");
}

// Prefetches memory to L2 without waiting. `at` and `bytes` must be multiples of 16. A kernel may
// still be writing to the memory, since writes go to L2, too. Only a hint; does nothing before
// sm_90.
__device__ __forceinline__ void prefetch(const void* at, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(bytes) : "memory");
#endif
}

// 16 bytes that are read once per kernel and were written by an earlier one: K and V.
__device__ __forceinline__ uint4 load_once(const tutti_bf16* at) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}

// The same for 8 bytes.
__device__ __forceinline__ uint2 load_once(const tutti_fp8* at) {
    uint2 v;
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(v.x), "=r"(v.y)
                 : "l"(at)
                 : "memory");
    return v;
}

// Rounds to nearest even; NaN stays NaN.
__device__ __forceinline__ tutti_bf16 to_bf16(float x) {
    tutti_bf16 r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
    return r;
}

// A pair of bf16, `low` in the lower half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

// word & mask | bits in one instruction: of two constants the assembler would make two.
__device__ __forceinline__ uint32_t masked_with(uint32_t word, uint32_t mask, uint32_t bits) {
    uint32_t r;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(word), "r"(mask), "r"(bits));
    return r;
}

// a b + c for two bf16 each, rounded once.
__device__ __forceinline__ uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

// c += a b on tensor cores. a: 16 x 16 row-major, b: 16 x 8 column-major, bf16; c: 16 x 8 f32.
// With g = lane / 4, t = lane % 4: a[0] = row g, columns 2t, 2t+1; a[1] = row g+8; a[2], a[3] the
// same with columns + 8; b0 = rows 2t, 2t+1 of column g, b1 = rows + 8; c[0], c[1] = row g,
// columns 2t, 2t+1; c[2], c[3] = row g+8.
__device__ __forceinline__ void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices of bf16 from shared memory; lanes 8i .. 8i+7 pass the rows of matrix i.
// r[i] = row lane / 4, columns 2 (lane % 4), + 1 of matrix i.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const void* row) {
    uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
    uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

// Copies 16 bytes to shared memory in the background. Unless `valid`, writes zeros and does not
// read `from`. Both are 16-byte aligned.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool valid) {
    uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from),
                 "r"(valid ? 16 : 0)
                 : "memory");
}

// The same for 8 bytes, 8-byte aligned.
__device__ __forceinline__ void copy_async_8(void* to, const void* from, bool valid) {
    uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(at), "l"(from),
                 "r"(valid ? 8 : 0)
                 : "memory");
}

// Ends a group of this thread's copies.
__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until all of this thread's groups but the last `pending` are complete.
template <int pending>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// What several threads of a block may write at once, each the same.
__device__ __forceinline__ void store_alike(float* at, float value) {
    asm volatile("st.relaxed.cta.global.f32 [%0], %1;" ::"l"(at), "f"(value) : "memory");
}

// Flags between ranks, and to the host, at system scope. Seeing a flag makes everything visible
// that its writer, or threads that it met at a barrier before, had written or read.
__device__ __forceinline__ void store_release(uint64_t* at, uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
__device__ __forceinline__ uint64_t load_acquire(const uint64_t* at) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}
// A relaxed word: nothing else is ordered by it.
__device__ __forceinline__ void store_word(uint32_t* at, uint32_t value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t load_word(const uint32_t* at) {
    uint32_t value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
// The same for 8 bytes.
__device__ __forceinline__ uint64_t load_word(const uint64_t* at) {
    uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}
// Writes 16 bytes to a peer's memory; ordered by the next flag.
__device__ __forceinline__ void push(float4* at, float4 v) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(v.x), "f"(v.y), "f"(v.z),
                 "f"(v.w)
                 : "memory");
}
// Reads 16 bytes that a peer has pushed here; bypasses L1, since they are used only once.
__device__ __forceinline__ float4 take(const float4* at) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}
// Whether `mine` is true for all threads of the block.
__device__ __forceinline__ bool all_of_block(bool mine) { return __syncthreads_and(mine) != 0; }
// A monotonic clock in nanoseconds; its steps can be a microsecond long.
__device__ __forceinline__ uint64_t nanoseconds() {
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// 2^x with a relative error of about 2^-22; 0 for -infinity.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Every lane gets the same bits: at each level both partners add the same two numbers.
template <class T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        x += __shfl_xor_sync(ALL_LANES, x, distance);
    }
    return x;
}

__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ u64 larger(u64 a, u64 b) { return a > b ? a : b; }

template <class T>
__device__ __forceinline__ T warp_largest(T x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        x = larger(x, __shfl_xor_sync(ALL_LANES, x, distance));
    }
    return x;
}

// Inclusive prefix sum of integers over the lanes.
template <class T>
__device__ __forceinline__ T warp_running_sum(T x) {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const T other = __shfl_up_sync(ALL_LANES, x, distance);
        x += lane >= static_cast<uint32_t>(distance) ? other : 0;
    }
    return x;
}

}  // namespace tutti
#endif

namespace tutti {

__device__ __forceinline__ float from_bf16(tutti_bf16 x) {
    return __uint_as_float(static_cast<uint32_t>(x) << 16);
}
// The lower and the upper of a pair.
__device__ __forceinline__ float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(uint32_t pair) {
    return __uint_as_float(pair & 0xffff0000u);
}

// FP8: E4M3 without infinities (`kernels::fp8`).

// Rounds to the nearest, ties to even. Finite numbers never become NaN: beyond 448 they become
// that. What is not finite becomes NaN.
__device__ __forceinline__ tutti_fp8 to_fp8(float x) {
    const uint32_t bits = __float_as_uint(x);
    const float size = __uint_as_float(bits & 0x7fffffffu);
    const float clamped = size > 448.0f ? 448.0f : size;
    // Adding 2^14, whose last place is worth 2^-9, rounds to multiples of that.
    const uint32_t small = __float_as_uint(__fadd_rn(clamped, 16384.0f)) - 0x46800000u;
    // Keeps 3 bits of mantissa; the exponent's bias is 7 instead of 127.
    const uint32_t whole = __float_as_uint(clamped);
    const uint32_t large = ((whole + 0x7ffffu + (whole >> 20 & 1u)) >> 20) - (120u << 3);
    uint32_t magnitude = clamped < 0.015625f ? small : large;
    if ((bits & 0x7f800000u) == 0x7f800000u) {
        magnitude = 0x7f;
    }
    return static_cast<tutti_fp8>((bits >> 24 & 0x80u) | magnitude);
}

// Two bytes, in bits 8 to 15 and 24 to 31 (the other bits do not matter), as a pair of bf16. Exact,
// except that NaN becomes 480: see `nans_of`. An exponent and a mantissa are moved to where bf16 has
// them, and multiplied by 2^120, the difference of the exponents' biases; multiples of 2^-9 are
// subnormal before and normal after that.
__device__ __forceinline__ uint32_t widen_fp8(uint32_t bytes) {
    const uint32_t moved = (bytes >> 4 & 0x07f007f0u) | (bytes & 0x80008000u);
    return fma_bf16x2(moved, 0x7b807b80u, 0x80008000u);
}
// 4 and 8 bytes, in order.
__device__ __forceinline__ uint2 widen(uint32_t bytes) {
    uint2 pairs;
    pairs.x = widen_fp8(__byte_perm(bytes, 0, 0x1404));
    pairs.y = widen_fp8(__byte_perm(bytes, 0, 0x3424));
    return pairs;
}
__device__ __forceinline__ uint4 widen(uint2 bytes) {
    const uint2 low = widen(bytes.x);
    const uint2 high = widen(bytes.y);
    return make_uint4(low.x, low.y, high.x, high.y);
}

constexpr uint32_t FP8_NANS = 0x80808080u;
// One of the bits of FP8_NANS is set for each of 4 bytes that is NaN; other bits mean nothing.
__device__ __forceinline__ uint32_t nans_of(uint32_t bytes) {
    return (bytes & 0x7f7f7f7fu) + 0x01010101u;
}
__device__ __forceinline__ uint32_t nans_of(uint2 bytes) {
    return nans_of(bytes.x) | nans_of(bytes.y);
}
// What `widen` made, with NaN again where it made 480.
__device__ __forceinline__ uint4 with_nans(uint4 pairs) {
    const auto restored = [](uint32_t pair) {
        pair |= (pair & 0x7fffu) == 0x43f0u ? 0x7fffu : 0u;
        return pair | ((pair >> 16 & 0x7fffu) == 0x43f0u ? 0x7fff0000u : 0u);
    };
    return make_uint4(restored(pairs.x), restored(pairs.y), restored(pairs.z), restored(pairs.w));
}
__device__ __forceinline__ float from_fp8(tutti_fp8 x) {
    const float value = low_bf16(widen_fp8(static_cast<uint32_t>(x) << 8));
    return (x & 0x7f) == 0x7f ? __uint_as_float(0x7fffffffu) : value;
}

// Elements of K and V, as they are stored.
__device__ __forceinline__ float from_stored(tutti_bf16 x) { return from_bf16(x); }
__device__ __forceinline__ float from_stored(tutti_fp8 x) { return from_fp8(x); }
template <class Kv>
__device__ __forceinline__ Kv to_stored(float x);
template <>
__device__ __forceinline__ tutti_bf16 to_stored<tutti_bf16>(float x) {
    return to_bf16(x);
}
template <>
__device__ __forceinline__ tutti_fp8 to_stored<tutti_fp8>(float x) {
    return to_fp8(x);
}

// Ends a block without work, which has read only inputs and written nothing. It need not wait for
// earlier kernels, and so frees its registers for other blocks. But some block of the grid has to
// wait, the one with `is_chosen`: the next kernel waits only for this one ("blocks until all
// primary kernels the secondary depends on have completed and flushed results to global memory":
// cudaGridDependencySynchronize in the CUDA programming guide; griddepcontrol.wait in the PTX
// manual, "until all prerequisite grids in flight have completed"), so it can only read the results
// of kernels further back if this one does not complete before them. One waiting block is enough,
// since a grid is complete only when all of its blocks have ended. For the start of the next
// kernel, a block that has ended counts as one that has released it.
__device__ __forceinline__ void end_without_waiting(bool is_chosen) {
    if (is_chosen) {
        wait_for_predecessors();
    }
}

__device__ __forceinline__ uint32_t divide_up(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

__device__ __forceinline__ uint32_t at_most(uint32_t a, uint32_t b) { return a < b ? a : b; }

// Whether item `index` has to be computed: see kernels.h.
__device__ __forceinline__ bool is_live(const uint32_t* live, uint32_t index) {
    return live == nullptr || index < *live;
}

// Number of items to compute. Can be read before `wait_for_predecessors`.
__device__ __forceinline__ uint32_t live_items(const uint32_t* live) {
    return live == nullptr ? 0xffffffffu : load_input(live);
}

// The sum over a block of WARPS warps, for every thread. `scratch`: WARPS floats of shared memory,
// which can be reused after the next __syncthreads.
template <int WARPS>
__device__ __forceinline__ float block_sum(float x, float* scratch) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) {
        scratch[threadIdx.x / 32] = x;
    }
    __syncthreads();
    const uint32_t lane = threadIdx.x % 32;
    return warp_sum(lane < WARPS ? scratch[lane] : 0.0f);
}

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

// SiLU, or, if `gelu` is not 0, GELU in its tanh approximation, computed as x sigmoid(2 y), which
// is x / 2 (1 + tanh(y)): the constants are 2 sqrt(2 / pi), and that times 0.044715.
__device__ __forceinline__ float activated(float x, uint32_t gelu) {
    const float factor = gelu != 0 ? 1.5957691f + 0.07135482f * (x * x) : 1.0f;
    return x / (1.0f + expf(-x * factor));
}

}  // namespace tutti
