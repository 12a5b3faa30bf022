// Rows of activations: embedding, an activation times up, sums, copies, conversions.
//
//   activate:     y = GELU(x), or max(x, 0)^2
//   activate_mul: y = g / (1 + e^-h) * u, with h = g (SiLU) or
//                 2 sqrt(2 / pi) (g + 0.044715 g^3) (GELU, tanh approximation)
//
// Shapes and launch rules: kernels.h. All are bound by memory. Loads and stores are 16 bytes wide
// if rows allow it (width a multiple of 4), otherwise one element at a time, with the same sums in
// the same order. Limits: none on widths.
#include "rows.cuh"
#include "skinny_int4.cuh"
#include "skinny_int8.cuh"

namespace tutti {
namespace {

// The first of this thread's 4 elements in the tile of 1024 given by blockIdx.y.
__device__ __forceinline__ uint32_t first_of_tile() { return (blockIdx.y * 256 + threadIdx.x) * 4; }

// Reads this thread's elements of a row, and gives them to `store` with where they are.
template <class In, class Store>
__device__ __forceinline__ void convert(const In* in, uint32_t width, const uint32_t* live,
                                        Store store) {
    release_successors();
    wait_for_predecessors();
    const uint32_t first = first_of_tile();
    if (!is_live(live, blockIdx.x) || first >= width) {
        return;
    }
    const size_t row = static_cast<size_t>(blockIdx.x) * width;
    store(row, first, load_up_to_4(in + row, first, width));
}

}  // namespace
}  // namespace tutti

using namespace tutti;

extern "C" __global__ void __launch_bounds__(256)
    tutti_embed(const uint32_t* ids, const tutti_bf16* table, float* out, uint32_t width,
                uint32_t table_stride, uint32_t first_id, uint32_t table_rows, float scale,
                const uint32_t* live) {
    release_successors();
    wait_for_predecessors();
    const uint32_t row = blockIdx.x;
    if (!is_live(live, row)) {
        return;
    }
    // An id below first_id wraps around to a large number.
    const uint32_t table_row = ids[row] - first_id;
    const bool here = table_row < table_rows;
    const tutti_bf16* from = table + static_cast<size_t>(here ? table_row : 0) * table_stride;
    float* to = out + static_cast<size_t>(row) * width;
    const bool whole = width % 4 == 0 && table_stride % 4 == 0;
    for (uint32_t first = threadIdx.x * 4; first < width; first += 256 * 4) {
        Four v = {};
        if (here && whole) {
            v = widened(load4_bf16(from + first));
        } else if (here) {
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                v.v[i] = first + i < width ? from_bf16(from[first + i]) : 0.0f;
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            v.v[i] *= scale;
        }
        store_up_to_4(to, first, width, v);
    }
}

extern "C" __global__ void __launch_bounds__(256)
    tutti_cap(float* data, float cap, uint32_t width, const uint32_t* live) {
    release_successors();
    wait_for_predecessors();
    const uint32_t first = first_of_tile();
    if (!is_live(live, blockIdx.x) || first >= width) {
        return;
    }
    float* row = data + static_cast<size_t>(blockIdx.x) * width;
    Four v = load_up_to_4(row, first, width);
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        v.v[i] = cap * tanhf(v.v[i] / cap);
    }
    store_up_to_4(row, first, width, v);
}

extern "C" __global__ void __launch_bounds__(256)
    tutti_activate_mul_f32(const float* input, const float* bias, tutti_bf16* out, uint32_t inner,
                           uint32_t out_stride, uint32_t gelu, const uint32_t* live) {
    release_successors();
    wait_for_predecessors();
    const uint32_t row = blockIdx.x;
    const uint32_t first = first_of_tile();
    if (!is_live(live, row) || first >= inner) {
        return;
    }
    const float* gate = input + static_cast<size_t>(row) * 2 * inner;
    const float* up = gate + inner;
    const bool whole = inner % 4 == 0;
    Four g = load_up_to_4(gate, first, inner);
    Four u = load_up_to_4(up, first, inner);
    Four y = {};
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        if (bias != nullptr && first + i < inner) {
            g.v[i] += bias[first + i];
            u.v[i] += bias[inner + first + i];
        }
        y.v[i] = activated(g.v[i], gelu) * u.v[i];
    }
    store_bf16(out + static_cast<size_t>(row) * out_stride, first, inner,
               whole && out_stride % 4 == 0, y);
}

extern "C" __global__ void __launch_bounds__(256)
    tutti_activate_f32(const float* input, tutti_bf16* out, uint32_t inner, uint32_t out_stride,
                       uint32_t squared_relu, const uint32_t* live) {
    release_successors();
    wait_for_predecessors();
    const uint32_t row = blockIdx.x;
    const uint32_t first = first_of_tile();
    if (!is_live(live, row) || first >= inner) {
        return;
    }
    Four v = load_up_to_4(input + static_cast<size_t>(row) * inner, first, inner);
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        const float x = v.v[i];
        // NaN stays NaN.
        v.v[i] = squared_relu == 0 ? activated(x, 1) : (x < 0.0f ? 0.0f : x * x);
    }
    store_bf16(out + static_cast<size_t>(row) * out_stride, first, inner,
               inner % 4 == 0 && out_stride % 4 == 0, v);
}

extern "C" __global__ void __launch_bounds__(256)
    tutti_add_bias(float* data, const float* bias, uint32_t width, const uint32_t* live) {
    release_successors();
    wait_for_predecessors();
    const uint32_t first = first_of_tile();
    if (!is_live(live, blockIdx.x) || first >= width) {
        return;
    }
    float* row = data + static_cast<size_t>(blockIdx.x) * width;
    Four v = load_up_to_4(row, first, width);
    const Four b = load_up_to_4(bias, first, width);
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        v.v[i] += b.v[i];
    }
    store_up_to_4(row, first, width, v);
}

extern "C" __global__ void __launch_bounds__(256)
    tutti_scale_add_bias(float* data, const float* scales, const float* bias, uint32_t width,
                         const uint32_t* live) {
    release_successors();
    wait_for_predecessors();
    const uint32_t first = first_of_tile();
    if (!is_live(live, blockIdx.x) || first >= width) {
        return;
    }
    float* row = data + static_cast<size_t>(blockIdx.x) * width;
    Four v = load_up_to_4(row, first, width);
    const Four s = load_up_to_4(scales, first, width);
    Four b = {};
    if (bias != nullptr) {
        b = load_up_to_4(bias, first, width);
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        v.v[i] = __fmul_rn(v.v[i], s.v[i]) + b.v[i];
    }
    store_up_to_4(row, first, width, v);
}

extern "C" __global__ void __launch_bounds__(256)
    tutti_widen_int8(const uint8_t* w, tutti_bf16* out, uint32_t stride) {
    release_successors();
    wait_for_predecessors();
    const uint32_t at = (blockIdx.y * 256 + threadIdx.x) * 16;
    if (at >= stride) {
        return;
    }
    const size_t place = static_cast<size_t>(blockIdx.x) * stride + at;
    const void* from = w + place;
    const uint4 v = load_weights(static_cast<const tutti_bf16*>(from));
    uint4* to = reinterpret_cast<uint4*>(out + place);
    to[0] = make_uint4(widen_two<0>(v.x), widen_two<2>(v.x), widen_two<0>(v.y), widen_two<2>(v.y));
    to[1] = make_uint4(widen_two<0>(v.z), widen_two<2>(v.z), widen_two<0>(v.w), widen_two<2>(v.w));
}

extern "C" __global__ void __launch_bounds__(256)
    tutti_widen_fp8(const uint8_t* w, const float* scales, tutti_bf16* out, uint32_t stride,
                    uint32_t k, uint32_t shift) {
    release_successors();
    wait_for_predecessors();
    const uint32_t at = (blockIdx.y * 256 + threadIdx.x) * 16;
    if (at >= stride) {
        return;
    }
    const size_t place = static_cast<size_t>(blockIdx.x) * stride + at;
    const float* own = scales + static_cast<size_t>(blockIdx.x) * divide_up(k, 1u << shift);
    const float scale = own[at_most(at, k - 1) >> shift];
    const void* from = w + place;
    const uint4 v = load_weights(static_cast<const tutti_bf16*>(from));
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    uint32_t pairs[8];
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        const uint2 both = tutti::widen(words[i]);
        const auto scaled = [scale](uint32_t pair) {
            return pack_bf16(__fmul_rn(low_bf16(pair), scale), __fmul_rn(high_bf16(pair), scale));
        };
        pairs[2 * i] = scaled(both.x);
        pairs[2 * i + 1] = scaled(both.y);
    }
    uint4* to = reinterpret_cast<uint4*>(out + place);
    to[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    to[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
}

extern "C" __global__ void __launch_bounds__(256)
    tutti_widen_int4(const uint8_t* w, const uint32_t* groups, tutti_bf16* out, uint32_t stride,
                     uint32_t k, uint32_t shift) {
    release_successors();
    wait_for_predecessors();
    const uint32_t at = (blockIdx.y * 256 + threadIdx.x) * 32;
    if (at >= stride) {
        return;
    }
    const size_t row = static_cast<size_t>(blockIdx.x) * stride;
    const uint32_t* own = groups + static_cast<size_t>(blockIdx.x) * divide_up(k, 1u << shift);
    const void* from = w + (row + at) / 2;
    const uint4 v = load_weights(static_cast<const tutti_bf16*>(from));
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (uint32_t j = 0; j < 4; j++) {
        const uint32_t first = at / 128 * 128 + 32 * j + at % 128 / 4;
        uint32_t pairs[4] = {0, 0, 0, 0};
        if (first < k) {
            const uint32_t group = load_constant(own + (first >> shift));
            const float scale = scale_of(group);
            const uint32_t zeros = zeros_of(group);
            pairs[0] = widen_pair<0>(words[j], zeros);
            pairs[1] = widen_pair<1>(words[j], zeros);
            pairs[2] = widen_pair<2>(words[j], zeros);
            pairs[3] = widen_pair<3>(words[j], zeros);
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                const uint32_t even = first + 2 * i;
                const float low = even < k ? __fmul_rn(low_bf16(pairs[i]), scale) : 0.0f;
                const float high = even + 1 < k ? __fmul_rn(high_bf16(pairs[i]), scale) : 0.0f;
                pairs[i] = pack_bf16(low, high);
            }
        }
        *reinterpret_cast<uint4*>(out + row + first) =
            make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
}

extern "C" __global__ void __launch_bounds__(256)
    tutti_add(float* sum, const float* other, uint32_t width, const uint32_t* live) {
    release_successors();
    wait_for_predecessors();
    const uint32_t first = first_of_tile();
    if (!is_live(live, blockIdx.x) || first >= width) {
        return;
    }
    const size_t row = static_cast<size_t>(blockIdx.x) * width;
    Four v = load_up_to_4(sum + row, first, width);
    const Four o = load_up_to_4(other + row, first, width);
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        v.v[i] += o.v[i];
    }
    store_up_to_4(sum + row, first, width, v);
}

extern "C" __global__ void __launch_bounds__(256)
    tutti_tree_sum(const float* parts, float* out, uint32_t ranks, uint64_t part_stride,
                   uint32_t width, const uint32_t* live) {
    release_successors();
    wait_for_predecessors();
    const uint32_t first = first_of_tile();
    if (!is_live(live, blockIdx.x) || first >= width) {
        return;
    }
    const size_t row = static_cast<size_t>(blockIdx.x) * width;
    // Subtrees of 64, 32, .. 1 ranks: one of a size exists if that bit of the number of ranks so
    // far is set. Indexed only by constants, so that it stays in registers.
    Four levels[7] = {};
    for (uint32_t rank = 0; rank < ranks; rank++) {
        Four v = load_up_to_4(parts + rank * part_stride + row, first, width);
        bool placed = false;
#pragma unroll
        for (uint32_t level = 0; level < 7; level++) {
            if (!placed) {
                if ((rank >> level & 1) != 0) {
#pragma unroll
                    for (uint32_t i = 0; i < 4; i++) {
                        v.v[i] = levels[level].v[i] + v.v[i];
                    }
                } else {
                    levels[level] = v;
                    placed = true;
                }
            }
        }
    }
    // Combines the remaining subtrees, smallest first: each is added to the next larger one.
    Four total = {};
    bool any = false;
#pragma unroll
    for (uint32_t level = 0; level < 7; level++) {
        if ((ranks >> level & 1) != 0) {
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                total.v[i] = any ? levels[level].v[i] + total.v[i] : levels[level].v[i];
            }
            any = true;
        }
    }
    store_up_to_4(out + row, first, width, total);
}

extern "C" __global__ void __launch_bounds__(256)
    tutti_narrow_rows(const float* in, tutti_bf16* out, uint32_t width, const uint32_t* live) {
    convert(in, width, live, [&](size_t row, uint32_t first, Four v) {
        store_bf16(out + row, first, width, width % 4 == 0, v);
    });
}

extern "C" __global__ void __launch_bounds__(256)
    tutti_widen_rows(const tutti_bf16* in, float* out, uint32_t width, const uint32_t* live) {
    convert(in, width, live, [&](size_t row, uint32_t first, Four v) {
        store_up_to_4(out + row, first, width, v);
    });
}

extern "C" __global__ void __launch_bounds__(256)
    tutti_gather_rows(const tutti_bf16* in, const uint32_t* rows, tutti_bf16* out, uint32_t width,
                      uint32_t in_stride, uint32_t out_stride, const uint32_t* live) {
    release_successors();
    wait_for_predecessors();
    const uint32_t first = first_of_tile();
    if (!is_live(live, blockIdx.x) || first >= width) {
        return;
    }
    const uint32_t row = rows[blockIdx.x];
    if (row == TUTTI_NO_ROW) {
        return;
    }
    const tutti_bf16* from = in + static_cast<size_t>(row) * in_stride + first;
    tutti_bf16* to = out + static_cast<size_t>(blockIdx.x) * out_stride + first;
    if (width % 4 == 0 && in_stride % 4 == 0 && out_stride % 4 == 0) {
        *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(from);
    } else {
        for (uint32_t i = 0; i < 4 && first + i < width; i++) {
            to[i] = from[i];
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    tutti_copy_columns(const tutti_bf16* in, tutti_bf16* out, uint32_t first, uint32_t width,
                       uint32_t in_stride, uint32_t out_stride, const uint32_t* live) {
    release_successors();
    wait_for_predecessors();
    const uint32_t at = first_of_tile();
    if (!is_live(live, blockIdx.x) || at >= width) {
        return;
    }
    const tutti_bf16* from = in + static_cast<size_t>(blockIdx.x) * in_stride + first + at;
    tutti_bf16* to = out + static_cast<size_t>(blockIdx.x) * out_stride + at;
    for (uint32_t i = 0; i < 4 && at + i < width; i++) {
        to[i] = from[i];
    }
}

extern "C" __global__ void __launch_bounds__(256)
    tutti_interleave_ranks(const float* gathered, float* full, uint32_t rows, uint32_t width,
                           uint32_t full_stride, const uint32_t* live) {
    release_successors();
    wait_for_predecessors();
    const uint32_t first = first_of_tile();
    const uint32_t row = blockIdx.x;
    const uint32_t rank = blockIdx.z;
    if (!is_live(live, row) || row >= rows || first >= width) {
        return;
    }
    const float* from = gathered + (static_cast<size_t>(rank) * rows + row) * width;
    float* to = full + static_cast<size_t>(row) * full_stride + static_cast<size_t>(rank) * width;
    const Four v = load_up_to_4(from, first, width);
    if (width % 4 == 0 && full_stride % 4 != 0) {
        for (uint32_t i = 0; i < 4; i++) {
            to[first + i] = v.v[i];
        }
    } else {
        store_up_to_4(to, first, width, v);
    }
}

// All of a thread's loads are issued before the first is used, and blocks are small, so that a
// multiprocessor has as many bytes in flight as it can.
extern "C" __global__ void __launch_bounds__(256)
    tutti_read(const uint32_t* from, uint32_t* out, uint32_t n) {
    constexpr uint32_t LOADS_READ = 8;
    release_successors();
    wait_for_predecessors();
    const uint64_t first = static_cast<uint64_t>(blockIdx.x) * LOADS_READ * 256 + threadIdx.x;
    uint4 v[LOADS_READ];
#pragma unroll
    for (uint32_t i = 0; i < LOADS_READ; i++) {
        const uint64_t at = first + i * 256;
        v[i] = make_uint4(0, 0, 0, 0);
        if (at < n) {
            v[i] = load_weights(reinterpret_cast<const tutti_bf16*>(from) + 8 * at);
        }
    }
    uint32_t all = 0;
#pragma unroll
    for (uint32_t i = 0; i < LOADS_READ; i++) {
        all ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        all ^= __shfl_xor_sync(ALL_LANES, all, distance);
    }
    if (threadIdx.x % 32 == 0) {
        out[static_cast<uint64_t>(blockIdx.x) * 8 + threadIdx.x / 32] = all;
    }
}

extern "C" __global__ void __launch_bounds__(256)
    tutti_late(const uint32_t* from, uint32_t* to, uint64_t words, uint64_t delay) {
    release_successors();
    wait_for_predecessors();
    if (threadIdx.x == 0) {
        const uint64_t began = nanoseconds();
        while (nanoseconds() - began < delay) {
        }
    }
    __syncthreads();
    const uint64_t step = static_cast<uint64_t>(gridDim.x) * 256;
    for (uint64_t at = static_cast<uint64_t>(blockIdx.x) * 256 + threadIdx.x; at < words; at += step) {
        to[at] = from[at];
    }
}
