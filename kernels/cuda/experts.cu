// Mixtures of experts: the choice of experts for each row, the grouping of rows by expert, their
// products, and the weighted sum of the experts' results for a row. A slot is one row at one of its
// experts: row r's expert j is slot r * top_k + j.
//
// Everything stays on the device, and grids depend only on the number of slots, so a decode step
// with experts is captured like any other. Grouping makes a list of tiles, each some slots of one
// expert. A product has a block for each possible tile; those past the last tile end immediately. A
// tile's product is that of skinny.cu: its sums depend only on k, so a row's result has the same
// bits in every tile. Many rows (prefill) take the same path: an expert's weights are read once per
// tile. Tiles are the grid's first axis, features its second: blocks that run at the same time have
// few features of many tiles. So the tiles of one expert, which are neighbours, read the same
// weights at about the same time, from memory once and then from L2, however large the expert is.
#include "rows.cuh"
#include "skinny_fp8.cuh"
#include "skinny_int8.cuh"

namespace tutti {
namespace {

// A candidate: larger logits come first, ties by lower number. NaN is below all numbers.
struct Pick {
    float logit;
    uint32_t expert;

    __device__ __forceinline__ bool before(const Pick& b) const {
        return logit > b.logit || (logit == b.logit && expert < b.expert);
    }
};

constexpr uint32_t NO_EXPERT = 0xffffffffu;

__device__ __forceinline__ float ordered(float logit) { return logit == logit ? logit : -INFINITY; }

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ __forceinline__ Pick first_of_warp(Pick best) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        const Pick other = {__shfl_xor_sync(ALL_LANES, best.logit, distance),
                            __shfl_xor_sync(ALL_LANES, best.expert, distance)};
        if (other.before(best)) {
            best = other;
        }
    }
    return best;
}

// Sum over the lanes before this one.
__device__ __forceinline__ uint32_t sum_before(uint32_t mine) {
    return warp_running_sum(mine) - mine;
}

constexpr uint32_t GROUP_WARPS = 32;

// Rows of x that are this lane's columns of the instruction: see skinny.cu. A column without a slot
// takes the tile's last one.
template <int ROWS>
__device__ __forceinline__ void rows_of_slots(const tutti_bf16* x, const uint32_t* slots,
                                              const TuttiExpertTile& tile, uint32_t per_row,
                                              uint32_t stride, const tutti_bf16* (&out)[ROWS]) {
    const uint32_t g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const uint32_t slot = slots[tile.first + at_most(8 * r + g, tile.slots - 1)];
        out[r] = x + static_cast<size_t>(slot / per_row) * stride;
    }
}

// This block's tile, or its share of one that the blocks along grid.z divide; without slots if
// none are left.
template <class W, int ROWS>
__device__ __forceinline__ TuttiExpertTile own_tile(const TuttiExpertTile* tiles) {
    TuttiExpertTile tile = tiles[blockIdx.x];
    if constexpr (W::DIVIDES_TILES) {
        const uint32_t before = at_most(8 * ROWS * blockIdx.z, tile.slots);
        tile.first += before;
        tile.slots = at_most(tile.slots - before, 8 * ROWS);
    }
    return tile;
}

// Combines gate and up: see kernels.h. The comparisons are false for NaN, so that it propagates.
__device__ __forceinline__ float gated(float gate, float up, float alpha, float limit,
                                       float shift) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up;
    up = up < -limit ? -limit : up;
    return gate / (1.0f + expf(-alpha * gate)) * (up + shift);
}

template <class W, int ROWS, class Scale>
__device__ __forceinline__ void experts_gate_up(const tutti_bf16* x, const typename W::Element* w,
                                                Scale scale, tutti_bf16* out, const uint32_t* slots,
                                                const TuttiExpertTile* tiles,
                                                const uint32_t* num_tiles, uint32_t top_k,
                                                uint32_t inner, uint32_t k, uint32_t x_stride,
                                                uint32_t w_stride, uint32_t out_stride,
                                                const float* bias, float alpha, float limit,
                                                float shift) {
    release_successors();
    wait_for_predecessors();
    if (blockIdx.x >= *num_tiles) {
        return;
    }
    const TuttiExpertTile tile = own_tile<W, ROWS>(tiles);
    if (W::DIVIDES_TILES && tile.slots == 0) {
        return;
    }
    const uint32_t g = threadIdx.x % 32 / 4;
    const uint32_t t = threadIdx.x % 4;
    const uint32_t first_feature = blockIdx.y * 16;
    // [0]: gate, [1]: up.
    W weights;
#pragma unroll
    for (uint32_t part = 0; part < 2; part++) {
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            const uint32_t feature = at_most(first_feature + 8 * half + g, inner - 1);
            const size_t row = (static_cast<size_t>(tile.expert) * 2 + part) * inner + feature;
            weights.rows[part][half] = w + row * w_stride;
            scale.attach(weights, part, half, row);
        }
    }
    weights.load_first(k);
    const tutti_bf16* x_rows[ROWS];
    rows_of_slots(x, slots, tile, top_k, x_stride, x_rows);
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
            const uint32_t row = 8 * r + 2 * t + i % 2;
            if (feature < inner && row < tile.slots) {
                const size_t slot = slots[tile.first + row];
                const size_t gate_row = static_cast<size_t>(tile.expert) * 2 * inner + feature;
                float gate = scale(sums[0][r][i], gate_row);
                float up = scale(sums[1][r][i], gate_row + inner);
                if (bias != nullptr) {
                    gate += bias[gate_row];
                    up += bias[gate_row + inner];
                }
                out[slot * out_stride + feature] = to_bf16(gated(gate, up, alpha, limit, shift));
            }
        }
    }
}

template <class W, int ROWS, class Scale>
__device__ __forceinline__ void experts_down(const tutti_bf16* x, const typename W::Element* w,
                                             Scale scale, float* out, const uint32_t* slots,
                                             const TuttiExpertTile* tiles,
                                             const uint32_t* num_tiles, uint32_t first_slot,
                                             uint32_t n, uint32_t k, uint32_t x_stride,
                                             uint32_t w_stride, uint32_t out_stride,
                                             const float* bias) {
    constexpr int FEATURES = W::COUNT;
    release_successors();
    wait_for_predecessors();
    if (blockIdx.x >= *num_tiles) {
        return;
    }
    const TuttiExpertTile tile = own_tile<W, ROWS>(tiles);
    if (W::DIVIDES_TILES && tile.slots == 0) {
        return;
    }
    const uint32_t g = threadIdx.x % 32 / 4;
    const uint32_t t = threadIdx.x % 4;
    const uint32_t first_feature = blockIdx.y * FEATURES * 16;
    W weights;
#pragma unroll
    for (int f = 0; f < FEATURES; f++) {
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            const uint32_t feature = at_most(first_feature + 16 * f + 8 * half + g, n - 1);
            const size_t row = static_cast<size_t>(tile.expert) * n + feature;
            weights.rows[f][half] = w + row * w_stride;
            scale.attach(weights, f, half, row);
        }
    }
    weights.load_first(k);
    const tutti_bf16* x_rows[ROWS];
    rows_of_slots(x, slots, tile, 1, x_stride, x_rows);
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
                const uint32_t row = 8 * r + 2 * t + i % 2;
                if (feature < n && row < tile.slots) {
                    const size_t slot = slots[tile.first + row] - first_slot;
                    const size_t w_row = static_cast<size_t>(tile.expert) * n + feature;
                    const float sum = scale(sums[f][r][i], w_row);
                    out[slot * out_stride + feature] = bias == nullptr ? sum : sum + bias[w_row];
                }
            }
        }
    }
}

}  // namespace
}  // namespace tutti

extern "C" __global__ void __launch_bounds__(32)
    tutti_route(const float* logits, const float* bias, uint32_t* experts, float* weights,
                uint32_t num_experts, uint32_t chosen, uint32_t shared, uint32_t groups,
                uint32_t kept_groups, uint32_t flags, float scale, const uint32_t* live) {
    using namespace tutti;
    release_successors();
    wait_for_predecessors();
    if (!is_live(live, blockIdx.x)) {
        return;
    }
    const uint32_t lane = threadIdx.x;
    const bool is_sigmoid = (flags & TUTTI_ROUTE_SIGMOID) != 0;
    const bool is_gated = (flags & TUTTI_ROUTE_GATED) != 0;
    const float* own = logits + static_cast<size_t>(blockIdx.x) * (num_experts + is_gated);
    const size_t out = static_cast<size_t>(blockIdx.x) * (chosen + shared);
    const auto key_of = [&](uint32_t expert) {
        const float key = own[expert];
        return is_sigmoid ? sigmoid(key) + (bias == nullptr ? 0.0f : bias[expert]) : key;
    };
    // Bit i: the row chooses experts of group i.
    const uint32_t group_size = num_experts / groups;
    uint32_t allowed = ALL_LANES;
    if (kept_groups < groups) {
        // Lane i keeps the score of group i.
        float score = -INFINITY;
        for (uint32_t group = 0; group < groups; group++) {
            float sum = 0.0f;
            Pick first = {};
            for (uint32_t i = 0; i < (is_sigmoid ? 2 : 1); i++) {
                Pick best = {-INFINITY, NO_EXPERT};
                for (uint32_t at = lane; at < group_size; at += 32) {
                    const uint32_t expert = group * group_size + at;
                    const Pick pick = {ordered(key_of(expert)), expert};
                    if (pick.before(best) && (i == 0 || first.before(pick))) {
                        best = pick;
                    }
                }
                first = first_of_warp(best);
                sum += first.logit;
            }
            score = lane == group ? sum : score;
        }
        allowed = 0;
        for (uint32_t i = 0; i < kept_groups; i++) {
            const bool is_left = lane < groups && (allowed >> lane & 1) == 0;
            const Pick own_group = {is_left ? score : -INFINITY, is_left ? lane : NO_EXPERT};
            allowed |= 1u << first_of_warp(own_group).expert;
        }
    }
    Pick last = {};
    // Lane i keeps the i-th choice.
    uint32_t mine = NO_EXPERT;
    for (uint32_t i = 0; i < chosen; i++) {
        Pick best = {-INFINITY, NO_EXPERT};
        for (uint32_t expert = lane; expert < num_experts; expert += 32) {
            if ((allowed >> expert / group_size & 1) == 0) {
                continue;
            }
            const Pick pick = {ordered(key_of(expert)), expert};
            if (pick.before(best) && (i == 0 || last.before(pick))) {
                best = pick;
            }
        }
        last = first_of_warp(best);
        mine = lane == i ? last.expert : mine;
    }
    float weight = 0.0f;
    float sum = 0.0f;
    if (is_sigmoid) {
        weight = lane < chosen ? sigmoid(own[mine]) : 0.0f;
        // Added to the sum, which could be 0.
        sum = (flags & TUTTI_ROUTE_NORMALISE) != 0 ? warp_sum(weight) + 1e-20f : 1.0f;
    } else {
        const float logit = lane < chosen ? ordered(own[mine]) : -INFINITY;
        const float most = __shfl_sync(ALL_LANES, logit, 0);
        weight = lane < chosen ? expf(logit - most) : 0.0f;
        sum = weight;
        if ((flags & TUTTI_ROUTE_NORMALISE) == 0) {
            sum = 0.0f;
            for (uint32_t expert = lane; expert < num_experts; expert += 32) {
                sum += expf(own[expert] - most);
            }
        }
        sum = warp_sum(sum);
    }
    if (lane < chosen) {
        experts[out + lane] = mine;
        weights[out + lane] = weight / sum * scale;
    } else if (lane < chosen + shared) {
        experts[out + lane] = num_experts + lane - chosen;
        weights[out + lane] = is_gated ? sigmoid(own[num_experts]) : 1.0f;
    }
}

extern "C" __global__ void __launch_bounds__(1024)
    tutti_group_experts(const uint32_t* experts, uint32_t* slots, TuttiExpertTile* tiles,
                        uint32_t* num_tiles, uint32_t rows, uint32_t top_k, uint32_t num_experts,
                        uint32_t chunk_rows, uint32_t tile_slots, uint32_t tiles_stride,
                        const uint32_t* live) {
    using namespace tutti;
    release_successors();
    wait_for_predecessors();
    SHARED_ARRAY(uint32_t, counts, TUTTI_EXPERTS_MAX);
    SHARED_ARRAY(uint32_t, starts, TUTTI_EXPERTS_MAX);
    SHARED_ARRAY(uint32_t, first_tiles, TUTTI_EXPERTS_MAX);
    if (live != nullptr) {
        rows = at_most(rows, *live);
    }
    const uint32_t warp = threadIdx.x / 32;
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t first_row = blockIdx.x * chunk_rows;
    const uint32_t end_row = at_most(first_row + chunk_rows, rows);
    const uint32_t first = first_row * top_k;
    const uint32_t count = first_row < end_row ? (end_row - first_row) * top_k : 0;
    const uint32_t* own = experts + first;
    for (uint32_t expert = warp; expert < num_experts; expert += GROUP_WARPS) {
        uint32_t found = 0;
        for (uint32_t at = 0; at < count; at += 32) {
            const bool hit = at + lane < count && own[at + lane] == expert;
            found += __popc(__ballot_sync(ALL_LANES, hit));
        }
        if (lane == 0) {
            counts[expert] = found;
        }
    }
    __syncthreads();
    if (warp == 0) {
        const uint32_t each = divide_up(num_experts, 32);
        const uint32_t begin = at_most(lane * each, num_experts);
        const uint32_t end = at_most(begin + each, num_experts);
        uint32_t in_slots = 0;
        uint32_t in_tiles = 0;
        for (uint32_t expert = begin; expert < end; expert++) {
            in_slots += counts[expert];
            in_tiles += divide_up(counts[expert], tile_slots);
        }
        uint32_t slot = sum_before(in_slots);
        uint32_t tile = sum_before(in_tiles);
        for (uint32_t expert = begin; expert < end; expert++) {
            starts[expert] = slot;
            first_tiles[expert] = tile;
            slot += counts[expert];
            tile += divide_up(counts[expert], tile_slots);
        }
        if (lane == 31) {
            num_tiles[blockIdx.x] = tile;
        }
    }
    __syncthreads();
    for (uint32_t expert = warp; expert < num_experts; expert += GROUP_WARPS) {
        const uint32_t found = counts[expert];
        if (found == 0) {
            continue;
        }
        uint32_t to = first + starts[expert];
        for (uint32_t i = lane; i * tile_slots < found; i += 32) {
            TuttiExpertTile tile;
            tile.expert = expert;
            tile.first = to + i * tile_slots;
            tile.slots = at_most(tile_slots, found - i * tile_slots);
            tiles[static_cast<size_t>(blockIdx.x) * tiles_stride + first_tiles[expert] + i] = tile;
        }
        for (uint32_t at = 0; at < count; at += 32) {
            const bool hit = at + lane < count && own[at + lane] == expert;
            const uint32_t hits = __ballot_sync(ALL_LANES, hit);
            if (hit) {
                slots[to + __popc(hits & ((1u << lane) - 1))] = first + at + lane;
            }
            to += __popc(hits);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    tutti_experts_sum(const float* parts, const float* weights, float* out, uint32_t top_k,
                      uint32_t width, uint32_t first_row, const uint32_t* live) {
    using namespace tutti;
    release_successors();
    wait_for_predecessors();
    const uint32_t at = blockIdx.y * 1024 + threadIdx.x * 4;
    if (!is_live(live, first_row + blockIdx.x) || at >= width) {
        return;
    }
    Four sum = {};
    for (uint32_t j = 0; j < top_k; j++) {
        const size_t slot = static_cast<size_t>(blockIdx.x) * top_k + j;
        const Four part = load_up_to_4(parts + slot * width, at, width);
        const float weight = weights[slot];
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            sum.v[i] = __fadd_rn(sum.v[i], __fmul_rn(weight, part.v[i]));
        }
    }
    store_up_to_4(out + static_cast<size_t>(blockIdx.x) * width, at, width, sum);
}

namespace tutti {
namespace {

// This thread's elements of a row that is assigned to a matrix; zeros if it is assigned to none.
__device__ __forceinline__ Four assigned(const float* parts, const uint32_t* experts, uint32_t at,
                                         uint32_t width) {
    Four kept = {};
    if (experts[blockIdx.x] != TUTTI_NOT_ASSIGNED) {
        kept = load_up_to_4(parts + static_cast<size_t>(blockIdx.x) * width, at, width);
    }
    return kept;
}

}  // namespace
}  // namespace tutti

extern "C" __global__ void __launch_bounds__(256)
    tutti_assigned_rows(const float* parts, const uint32_t* experts, float* out, uint32_t width,
                        uint32_t first_row, const uint32_t* live) {
    using namespace tutti;
    release_successors();
    wait_for_predecessors();
    const uint32_t at = blockIdx.y * 1024 + threadIdx.x * 4;
    if (!is_live(live, first_row + blockIdx.x) || at >= width) {
        return;
    }
    store_up_to_4(out + static_cast<size_t>(blockIdx.x) * width, at, width,
                  assigned(parts, experts, at, width));
}

extern "C" __global__ void __launch_bounds__(256)
    tutti_assigned_rows_bf16(const float* parts, const uint32_t* experts, tutti_bf16* out,
                             uint32_t width, uint32_t out_stride, uint32_t first_row,
                             const uint32_t* live) {
    using namespace tutti;
    release_successors();
    wait_for_predecessors();
    const uint32_t at = blockIdx.y * 1024 + threadIdx.x * 4;
    if (!is_live(live, first_row + blockIdx.x) || at >= width) {
        return;
    }
    store_bf16(out + static_cast<size_t>(blockIdx.x) * out_stride, at, width,
               width % 4 == 0 && out_stride % 4 == 0, assigned(parts, experts, at, width));
}

// For int8, the number of resident blocks per multiprocessor, where the compiler would spill for
// one more.
#define EXPERTS_GATE_UP(number, ...)                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        tutti_experts_gate_up_##number(TUTTI_EXPERTS_GATE_UP_ARGUMENTS) {                          \
        using namespace tutti;                                                                     \
        experts_gate_up<Weights<2>, number / 8>(x, w, Unscaled{}, out, slots, tiles, num_tiles,    \
                                                top_k, inner, k, x_stride, w_stride, out_stride,   \
                                                bias, alpha, limit, shift);                        \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(256, ##__VA_ARGS__)                               \
        tutti_experts_gate_up_int8_##number(TUTTI_EXPERTS_GATE_UP_INT8_ARGUMENTS) {                \
        using namespace tutti;                                                                     \
        experts_gate_up<Int8Weights<2>, number / 8>(x, w, Scaled{scales}, out, slots, tiles,       \
                                                    num_tiles, top_k, inner, k, x_stride,          \
                                                    w_stride, out_stride, bias, alpha, limit,      \
                                                    shift);                                        \
    }
EXPERTS_GATE_UP(8, 3)
EXPERTS_GATE_UP(16)
EXPERTS_GATE_UP(32)
EXPERTS_GATE_UP(64)

#define EXPERTS_DOWN(number, features)                                                             \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        tutti_experts_down_##number(TUTTI_EXPERTS_DOWN_ARGUMENTS) {                                \
        using namespace tutti;                                                                     \
        experts_down<Weights<features>, number / 8>(x, w, Unscaled{}, out, slots, tiles,           \
                                                    num_tiles, first_slot, n, k, x_stride,         \
                                                    w_stride, out_stride, bias);                   \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        tutti_experts_down_int8_##number(TUTTI_EXPERTS_DOWN_INT8_ARGUMENTS) {                      \
        using namespace tutti;                                                                     \
        experts_down<Int8Weights<features>, number / 8>(x, w, Scaled{scales}, out, slots, tiles,   \
                                                        num_tiles, first_slot, n, k, x_stride,     \
                                                        w_stride, out_stride, bias);               \
    }
EXPERTS_DOWN(8, 1)
EXPERTS_DOWN(16, 1)
EXPERTS_DOWN(32, 2)
EXPERTS_DOWN(64, 2)

// A tile of 64 slots is divided between two blocks. For down, the number of resident blocks as
// above.
#define EXPERTS_FP8(number, features, ...)                                                         \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        tutti_experts_gate_up_fp8_##number(TUTTI_EXPERTS_GATE_UP_FP8_ARGUMENTS) {                  \
        using namespace tutti;                                                                     \
        const Fp8Scaled scale{scales, divide_up(k, 1u << group_shift), group_shift};               \
        experts_gate_up<Fp8Weights<2>, number / 8>(x, w, scale, out, slots, tiles, num_tiles,      \
                                                   top_k, inner, k, x_stride, w_stride,            \
                                                   out_stride, bias, alpha, limit, shift);         \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(256, ##__VA_ARGS__)                               \
        tutti_experts_down_fp8_##number(TUTTI_EXPERTS_DOWN_FP8_ARGUMENTS) {                        \
        using namespace tutti;                                                                     \
        const Fp8Scaled scale{scales, divide_up(k, 1u << group_shift), group_shift};               \
        experts_down<Fp8Weights<features>, number / 8>(x, w, scale, out, slots, tiles, num_tiles,  \
                                                       first_slot, n, k, x_stride, w_stride,       \
                                                       out_stride, bias);                          \
    }
EXPERTS_FP8(8, 1)
EXPERTS_FP8(16, 1, 3)
EXPERTS_FP8(32, 2)
