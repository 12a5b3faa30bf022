// The host's counterpart of `device.cuh`: enough of CUDA to run one block on one CPU thread.
//
// A thread of the block is a fiber that runs until it meets the others: at __syncthreads, or at a
// warp-level instruction, whose effect is computed once all lanes in its mask have arrived. The
// schedule (`Settings::seed`) picks the next runnable thread: results must not depend on it.
// Asynchronous copies arrive as late, or as early, as allowed.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "races.h"

#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct alignas(8) uint2 {
    uint32_t x, y;
};
// The alignment lets UBSan check vector accesses.
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct dim3 {
    uint32_t x, y, z;
};

inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulate {

extern thread_local dim3 thread_index, block_index, block_size, grid_size;

// Returns a shared array of this block, poisoned at its first use in the block.
void* shared_array(const void* key, size_t bytes);
void* dynamic_shared();
void barrier();
// A barrier that also returns whether all threads of the block vote yes.
bool barrier_and(bool vote);

// Waits for all lanes in `mask`. `operands` stays valid while the lane waits; `compute` gets those
// of all 32 lanes (null for lanes not in the mask).
void meet(uint32_t mask, const char* what, void* operands, void (*compute)(void* const* lanes));
[[noreturn]] void fail(const char* what);
// A warp has passed a __syncwarp.
void count_warp_barrier();

// Records, and checks, that the thread has waited for the preceding kernels: it must before it
// reads their results or writes anything.
void waited();
void must_have_waited();
// Records that the thread has let the next kernel begin.
void released();

void copy_async(void* to, const void* from, bool valid, size_t bytes);
void commit_copies();
void wait_copies(int pending);

// Access to memory that ranks share: see `PeerMemory`. `push` and `take` copy 16 bytes.
void push(void* to, const void* from);
void take(void* to, const void* from);
void store_release(uint64_t* at, uint64_t value);
uint64_t load_acquire(const uint64_t* at);
void store_word(uint32_t* at, uint32_t value);
uint32_t load_word(const uint32_t* at);
uint64_t load_word(const uint64_t* at);
uint64_t nanoseconds();

float round_to_bf16_as_float(float x);

}  // namespace emulate

#define threadIdx emulate::thread_index
#define blockIdx emulate::block_index
#define blockDim emulate::block_size
#define gridDim emulate::grid_size
#define __syncthreads emulate::barrier

#define SHARED_ARRAY(type, name, count)                                                            \
    static const char name##_key = 0;                                                              \
    type* const name = static_cast<type*>(emulate::shared_array(&name##_key, sizeof(type) * (count)))
#define DYNAMIC_SHARED(name)                                                                       \
    unsigned char* name = static_cast<unsigned char*>(emulate::dynamic_shared())

inline float __uint_as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
inline uint32_t __float_as_uint(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
// Rounded down. The f64 sum must be exact, as it is for all operands used here.
inline float __fadd_rd(float a, float b) {
    const double sum = static_cast<double>(a) + static_cast<double>(b);
    const float nearest = static_cast<float>(sum);
    return static_cast<double>(nearest) > sum ? nextafterf(nearest, -INFINITY) : nearest;
}
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline int __double2loint(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return static_cast<int>(static_cast<uint32_t>(bits));
}
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __ffs(uint32_t x) { return __builtin_ffs(static_cast<int>(x)); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) {
    return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
// Selects bytes: digit i of `selector` picks byte i of the result among a's 0..3 and b's 4..7.
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
    uint32_t result = 0;
    for (int i = 0; i < 4; i++) {
        const uint32_t from = selector >> (4 * i) & 7;
        result |= static_cast<uint32_t>(both >> (8 * from) & 0xff) << (8 * i);
    }
    return result;
}
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

// Plain code is atomic: one thread runs at a time, and only meetings interrupt it.
template <class T>
inline T atomicAdd(T* at, T value) {
    const emulate::Atomically both;
    const T old = *at;
    *at = old + value;
    return old;
}
inline uint32_t atomicOr(uint32_t* at, uint32_t value) {
    const emulate::Atomically both;
    const uint32_t old = *at;
    *at = old | value;
    return old;
}
inline uint32_t atomicExch(uint32_t* at, uint32_t value) {
    const emulate::Atomically both;
    const uint32_t old = *at;
    *at = value;
    return old;
}

namespace emulate {

template <class T>
struct Shuffle {
    T value;
    int from;
    T result;
};

template <class T>
inline T shuffle(uint32_t mask, const char* what, T value, int from) {
    Shuffle<T> mine{value, from, T{}};
    meet(mask, what, &mine, [](void* const* lanes) {
        for (int lane = 0; lane < 32; lane++) {
            if (lanes[lane] == nullptr) {
                continue;
            }
            auto* self = static_cast<Shuffle<T>*>(lanes[lane]);
            if (lanes[self->from] == nullptr) {
                fail("a shuffle from a lane outside its mask");
            }
            self->result = static_cast<Shuffle<T>*>(lanes[self->from])->value;
        }
    });
    return mine.result;
}

inline int lane() { return static_cast<int>(thread_index.x % 32); }

}  // namespace emulate

template <class T>
inline T __shfl_xor_sync(uint32_t mask, T value, int bits) {
    return emulate::shuffle(mask, "shfl.xor", value, emulate::lane() ^ bits);
}
template <class T>
inline T __shfl_sync(uint32_t mask, T value, int from) {
    return emulate::shuffle(mask, "shfl.idx", value, from & 31);
}
template <class T>
inline T __shfl_up_sync(uint32_t mask, T value, int distance) {
    const int lane = emulate::lane();
    return emulate::shuffle(mask, "shfl.up", value, lane >= distance ? lane - distance : lane);
}
template <class T>
inline T __shfl_down_sync(uint32_t mask, T value, int distance) {
    const int lane = emulate::lane();
    return emulate::shuffle(mask, "shfl.down", value, lane + distance < 32 ? lane + distance : lane);
}

namespace emulate {

// What all lanes of a warp make of their values: one meeting, where a GPU takes five shuffles, which
// took half of an emulation's time. They are run as they are compiled: see `ptx`.
template <class T, class Compute>
inline T of_lanes(const char* what, T value, Compute) {
    meet(0xffffffffu, what, &value, [](void* const* lanes) {
        T values[32];
        for (int lane = 0; lane < 32; lane++) {
            values[lane] = *static_cast<T*>(lanes[lane]);
        }
        Compute::all(values);
        for (int lane = 0; lane < 32; lane++) {
            *static_cast<T*>(lanes[lane]) = values[lane];
        }
    });
    return value;
}

// Level by level, as the shuffles do.
template <class Combine>
struct Butterfly {
    template <class T>
    static void all(T (&values)[32]) {
        for (int distance = 16; distance > 0; distance /= 2) {
            T before[32];
            memcpy(before, values, sizeof before);
            for (int lane = 0; lane < 32; lane++) {
                values[lane] = Combine::of(before[lane], before[lane ^ distance]);
            }
        }
    }
};

struct RunningSum {
    template <class T>
    static void all(T (&values)[32]) {
        for (int lane = 1; lane < 32; lane++) {
            values[lane] += values[lane - 1];
        }
    }
};

struct Sum {
    template <class T>
    static T of(T a, T b) {
        return a + b;
    }
};
struct Largest {
    static float of(float a, float b) { return fmaxf(a, b); }
    static unsigned long long of(unsigned long long a, unsigned long long b) {
        return a > b ? a : b;
    }
};
struct Least {
    static uint32_t of(uint32_t a, uint32_t b) { return a < b ? a : b; }
};

}  // namespace emulate

inline uint32_t __reduce_min_sync(uint32_t mask, uint32_t value) {
    if (mask != 0xffffffffu) {
        emulate::fail("a minimum of some lanes only");
    }
    return emulate::of_lanes("redux.min", value, emulate::Butterfly<emulate::Least>());
}

uint32_t __ballot_sync(uint32_t mask, bool vote);
inline bool __any_sync(uint32_t mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline bool __all_sync(uint32_t mask, bool vote) { return __ballot_sync(mask, vote) == mask; }
void __syncwarp();

namespace tutti {

inline void wait_for_predecessors() { emulate::waited(); }
inline void release_successors() { emulate::released(); }

inline uint4 load_weights(const tutti_bf16* at) { return *reinterpret_cast<const uint4*>(at); }
inline uint32_t load_constant(const uint32_t* at) { return *at; }
// Written by preceding kernels.
inline uint4 load_row(const tutti_bf16* at) {
    emulate::must_have_waited();
    return *reinterpret_cast<const uint4*>(at);
}
inline float4 load_row(const float* at) {
    emulate::must_have_waited();
    return *reinterpret_cast<const float4*>(at);
}
inline void store_row(float* at, float4 v) { *reinterpret_cast<float4*>(at) = v; }
inline void store_row(tutti_bf16* at, uint2 v) { *reinterpret_cast<uint2*>(at) = v; }
inline uint32_t load_input(const uint32_t* at) { return *at; }
inline uint64_t load_input(const uint64_t* at) { return *at; }
inline float load_constant(const float* at) { return *at; }
inline float load_early(const float* at) { return *at; }
inline float4 load_constants(const float* at) { return *reinterpret_cast<const float4*>(at); }
inline void prefetch(const void* at, uint32_t bytes) {
    // Both ends must be readable and aligned.
    if (reinterpret_cast<uintptr_t>(at) % 16 != 0 || bytes % 16 != 0 || bytes == 0) {
        emulate::fail("a prefetch that is not of whole 16 bytes");
    }
    const volatile unsigned char* bytes_at = static_cast<const unsigned char*>(at);
    static_cast<void>(bytes_at[0]);
    static_cast<void>(bytes_at[bytes - 1]);
}
inline uint4 load_once(const tutti_bf16* at) { return load_row(at); }
inline uint2 load_once(const tutti_fp8* at) {
    emulate::must_have_waited();
    return *reinterpret_cast<const uint2*>(at);
}

inline tutti_bf16 to_bf16(float x) {
    return static_cast<tutti_bf16>(__float_as_uint(emulate::round_to_bf16_as_float(x)) >> 16);
}
inline uint32_t pack_bf16(float low, float high) {
    return static_cast<uint32_t>(to_bf16(high)) << 16 | to_bf16(low);
}
// For operands whose product and sum are exact in f32, as all operands here are.
inline uint32_t masked_with(uint32_t word, uint32_t mask, uint32_t bits) {
    return (word & mask) | bits;
}
inline uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    const auto wide = [](uint32_t bits) { return __uint_as_float(bits); };
    return pack_bf16(wide(a << 16) * wide(b << 16) + wide(c << 16),
                     wide(a & 0xffff0000u) * wide(b & 0xffff0000u) + wide(c & 0xffff0000u));
}

void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
void load_matrices(uint32_t (&r)[4], const void* row);
void load_matrices_transposed(uint32_t (&r)[4], const void* row);

inline void copy_async(void* to, const void* from, bool valid) {
    emulate::copy_async(to, from, valid, 16);
}
inline void copy_async_8(void* to, const void* from, bool valid) {
    emulate::copy_async(to, from, valid, 8);
}
inline void commit_copies() { emulate::commit_copies(); }
template <int pending>
inline void wait_copies() {
    emulate::wait_copies(pending);
}

inline void store_alike(float* at, float value) {
    const emulate::Atomically whole;
    *at = value;
}

inline float exp2_fast(float x) { return exp2f(x); }

using emulate::load_acquire;
using emulate::load_word;
using emulate::nanoseconds;
using emulate::store_release;
using emulate::store_word;
inline void push(float4* at, float4 v) { emulate::push(at, &v); }
inline float4 take(const float4* at) {
    float4 v;
    emulate::take(&v, at);
    return v;
}
template <class T>
inline T warp_sum(T x) {
    return emulate::of_lanes("sum", x, emulate::Butterfly<emulate::Sum>());
}
template <class T>
inline T warp_largest(T x) {
    return emulate::of_lanes("largest", x, emulate::Butterfly<emulate::Largest>());
}
template <class T>
inline T warp_running_sum(T x) {
    return emulate::of_lanes("running sum", x, emulate::RunningSum());
}
inline unsigned long long larger(unsigned long long a, unsigned long long b) {
    return emulate::Largest::of(a, b);
}
inline bool all_of_block(bool mine) { return emulate::barrier_and(mine); }

}  // namespace tutti
