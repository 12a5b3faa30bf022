// Rows of activations: 16-byte accesses, and the norm of a row. The norm is also the end of a fused
// all-reduce, with the same sums in the same order, so that both give the same bits.
#pragma once
#include "device.cuh"

namespace tutti {
namespace {

constexpr uint32_t NORM_WARPS = 16;
constexpr uint32_t NORM_THREADS = 32 * NORM_WARPS;
// Number of float4 per thread that stay in registers between the two passes of a norm: rows of up
// to 512 * 4 * 4 = 8192 are read once; the rest of longer ones is read twice.
constexpr uint32_t NORM_KEPT = 4;

__device__ __forceinline__ float4 load4(const float* at) {
    return *reinterpret_cast<const float4*>(at);
}

__device__ __forceinline__ void store4(float* at, float4 v) { *reinterpret_cast<float4*>(at) = v; }

__device__ __forceinline__ float4 add4(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

__device__ __forceinline__ float squares(float4 v) {
    return (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
}

// Up to 4 elements of a row: 16-byte accesses if all 4 exist and are aligned.
struct Four {
    float v[4];
};

__device__ __forceinline__ uint2 load4_bf16(const tutti_bf16* at) {
    return *reinterpret_cast<const uint2*>(at);
}

__device__ __forceinline__ Four widened(uint2 v) {
    return {{low_bf16(v.x), high_bf16(v.x), low_bf16(v.y), high_bf16(v.y)}};
}

__device__ __forceinline__ Four load_up_to_4(const float* row, uint32_t first, uint32_t width) {
    Four r = {};
    if (width % 4 == 0) {
        const float4 v = load4(row + first);
        r = {{v.x, v.y, v.z, v.w}};
    } else {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            r.v[i] = first + i < width ? row[first + i] : 0.0f;
        }
    }
    return r;
}

__device__ __forceinline__ Four load_up_to_4(const tutti_bf16* row, uint32_t first,
                                             uint32_t width) {
    if (width % 4 == 0) {
        return widened(load4_bf16(row + first));
    }
    Four r = {};
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        r.v[i] = first + i < width ? from_bf16(row[first + i]) : 0.0f;
    }
    return r;
}

__device__ __forceinline__ void store_up_to_4(float* row, uint32_t first, uint32_t width, Four r) {
    if (width % 4 == 0) {
        store4(row + first, make_float4(r.v[0], r.v[1], r.v[2], r.v[3]));
    } else {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            if (first + i < width) {
                row[first + i] = r.v[i];
            }
        }
    }
}

// `whole`: all 4 elements exist, and the address is a multiple of 8 bytes.
__device__ __forceinline__ void store_bf16(tutti_bf16* row, uint32_t first, uint32_t width,
                                           bool whole, Four r) {
    if (whole) {
        uint2 packed;
        packed.x = pack_bf16(r.v[0], r.v[1]);
        packed.y = pack_bf16(r.v[2], r.v[3]);
        *reinterpret_cast<uint2*>(row + first) = packed;
    } else {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            if (first + i < width) {
                row[first + i] = to_bf16(r.v[i]);
            }
        }
    }
}

// a * scale * weight.
__device__ __forceinline__ float4 scaled4(float4 a, float scale, float4 weight) {
    return make_float4(a.x * scale * weight.x, a.y * scale * weight.y, a.z * scale * weight.z,
                       a.w * scale * weight.w);
}

__device__ __forceinline__ float norm_scale(float square_sum, uint32_t width, float eps) {
    return 1.0f / sqrtf(square_sum / static_cast<float>(width) + eps);
}

// For terms that are already the sum to add.
struct AsRead {
    __device__ __forceinline__ float4 operator()(float4 v) const { return v; }
};

// This thread's norm weights: constants of the model, so they are loaded before any wait.
struct NormWeights {
    float4 kept[NORM_KEPT];

    __device__ __forceinline__ void load(const float* weight, uint32_t width) {
#pragma unroll
        for (uint32_t i = 0; i < NORM_KEPT; i++) {
            const uint32_t at = threadIdx.x * 4 + i * NORM_THREADS * 4;
            kept[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (at < width) {
                kept[i] = load_constants(weight + at);
            }
        }
    }
};

// y = x / rms(x) * weight for one row x at r, by a block of NORM_THREADS. If `adds`,
// `sum(read(i, at))` is first added to x and stored there: the 4 elements from `at`, which are the
// i-th four of this thread (NORM_KEPT for all beyond the kept ones). width must be a multiple of 4.
// `whole`: so is y's stride.
//
// All kept elements are loaded before any is used: a store between two loads would delay the
// second, since it could write what is loaded, and each four would take a round trip.
template <class Read, class Sum>
__device__ __forceinline__ void add_rmsnorm_row(float* r, const float* weight,
                                                const NormWeights& weights, tutti_bf16* y,
                                                uint32_t width, bool whole, float eps,
                                                float* scratch, bool adds, Read read, Sum sum) {
    const uint32_t step = NORM_THREADS * 4;
    float4 kept[NORM_KEPT];
    decltype(read(0u, 0u)) terms[NORM_KEPT] = {};
#pragma unroll
    for (uint32_t i = 0; i < NORM_KEPT; i++) {
        const uint32_t at = threadIdx.x * 4 + i * step;
        kept[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (at < width) {
            kept[i] = load4(r + at);
            if (adds) {
                terms[i] = read(i, at);
            }
        }
    }
    float square_sum = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < NORM_KEPT; i++) {
        const uint32_t at = threadIdx.x * 4 + i * step;
        if (at < width) {
            if (adds) {
                kept[i] = add4(kept[i], sum(terms[i]));
                store4(r + at, kept[i]);
            }
            square_sum += squares(kept[i]);
        }
    }
    for (uint32_t at = threadIdx.x * 4 + NORM_KEPT * step; at < width; at += step) {
        float4 v = load4(r + at);
        if (adds) {
            v = add4(v, sum(read(NORM_KEPT, at)));
            store4(r + at, v);
        }
        square_sum += squares(v);
    }
    const float scale = norm_scale(block_sum<NORM_WARPS>(square_sum, scratch), width, eps);

    const auto finish = [&](uint32_t at, float4 v, float4 w) {
        store_bf16(y, at, width, whole,
                   {{v.x * scale * w.x, v.y * scale * w.y, v.z * scale * w.z, v.w * scale * w.w}});
    };
#pragma unroll
    for (uint32_t i = 0; i < NORM_KEPT; i++) {
        const uint32_t at = threadIdx.x * 4 + i * step;
        if (at < width) {
            finish(at, kept[i], weights.kept[i]);
        }
    }
    // A thread rereads only elements that it wrote itself.
    for (uint32_t at = threadIdx.x * 4 + NORM_KEPT * step; at < width; at += step) {
        finish(at, load4(r + at), load4(weight + at));
    }
}

}  // namespace
}  // namespace tutti
