// Multi-head latent attention (DeepSeek V2 and V3): what goes to the cache and to attention, a
// product for each head, and attention whose V is the first part of its K.
//
// The cache has one vector per token for all heads, so the heads of a row are the 16 rows of the
// tensor cores' A, and a token's vector is read once for 16 heads. Rows are computed one by one:
// all heads of a row attend to the same tokens. Those of sequences with one row are split into parts
// as in attention_decode.cu.
//
// Shapes and launch rules: kernels.h.
#include "attention.cuh"
#include "skinny.cuh"

namespace tutti {
namespace {

constexpr uint32_t THREADS = 32 * WARPS;
// Heads of a block, and tokens of a tile.
constexpr uint32_t HEADS = 16;
constexpr uint32_t TILE = 16;
// From one row in shared memory to the next: 16 bytes more than a row has, so that the 8 rows of a
// matrix are in different banks.
constexpr uint32_t ROW = TUTTI_LATENT_WIDTH_MAX + 8;
constexpr uint32_t WEIGHTS_ROW = TILE + 8;

// What lanes i and i + 1, .. write of a rotated part of `2 * half` elements.
template <class To>
__device__ __forceinline__ void rotate(const float* in, To* to, const float* cos, const float* sin,
                                       uint32_t half, float scale) {
    for (uint32_t i = threadIdx.x % 32; i < half; i += 32) {
        const float a = in[i];
        const float b = in[i + half];
        to[i] = to_stored<To>((a * cos[i] - b * sin[i]) * scale);
        to[i + half] = to_stored<To>((b * cos[i] + a * sin[i]) * scale);
    }
}

template <class Kv>
__device__ __forceinline__ void latent_finish(TUTTI_LATENT_IN_ARGUMENTS, Kv* k_cache,
                                              TUTTI_LATENT_SIZE_ARGUMENTS) {
    release_successors();
    wait_for_predecessors();
    const uint32_t row = blockIdx.x;
    const uint32_t head = blockIdx.y * WARPS + threadIdx.x / 32;
    const uint32_t lane = threadIdx.x % 32;
    if (!is_live(live, row) || head > num_heads) {
        return;
    }
    const uint32_t width = latent + rotated;
    const uint32_t half = rotated / 2;
    const size_t table = static_cast<size_t>(positions[row]) * half;
    if (head == num_heads) {
        const float* in = kv + static_cast<size_t>(row) * width;
        float sum = 0.0f;
        for (uint32_t i = lane; i < latent; i += 32) {
            sum += in[i] * in[i];
        }
        const float factor = 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(latent) + eps);
        // With one KV head, slots are places.
        Kv* to = k_cache + static_cast<size_t>(slots[row]) * width;
        for (uint32_t i = lane; i < latent; i += 32) {
            to[i] = to_stored<Kv>(in[i] * factor * norm[i]);
        }
        rotate(in + latent, to + latent, cos + table, sin + table, half, 1.0f);
        return;
    }
    const size_t own = static_cast<size_t>(row) * num_heads + head;
    const float* in = q + own * (plain + rotated);
    tutti_bf16* first = plain_out + own * plain;
    for (uint32_t i = lane; i < plain; i += 32) {
        first[i] = to_bf16(in[i]);
    }
    rotate(in + plain, q_out + own * width + latent, cos + table, sin + table, half, scale);
}

// A warp computes 16 features of one head for up to 8 * ROWS rows. Every sum is over k in the same
// order.
template <int ROWS>
__device__ __forceinline__ void heads_product(TUTTI_HEADS_PRODUCT_ARGUMENTS) {
    release_successors();
    wait_for_predecessors();
    if (live != nullptr) {
        rows = at_most(rows, *live);
    }
    const uint32_t first_row = blockIdx.x * 8 * ROWS;
    const uint32_t first_feature = (blockIdx.y * WARPS + threadIdx.x / 32) * 16;
    const uint32_t head = blockIdx.z;
    if (first_row >= rows || first_feature >= n) {
        return;
    }
    const uint32_t g = threadIdx.x % 32 / 4;
    const uint32_t t = threadIdx.x % 4;
    const tutti_bf16* w_rows[2];
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        const uint32_t feature = at_most(first_feature + 8 * half + g, n - 1);
        w_rows[half] = w + (static_cast<size_t>(head) * n + feature) * w_stride;
    }
    const tutti_bf16* x_rows[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const size_t row = at_most(first_row + 8 * r + g, rows - 1);
        x_rows[r] = x + row * x_stride + head * k;
    }
    float sums[ROWS][4] = {};
#pragma unroll 2
    for (uint32_t start = 0; start < k; start += K_LOAD) {
        const uint32_t at = start + 8 * t;
        const uint4 upper = load8_before<true>(w_rows[0], at, k);
        const uint4 lower = load8_before<true>(w_rows[1], at, k);
        const uint32_t even[4] = {upper.x, lower.x, upper.y, lower.y};
        const uint32_t odd[4] = {upper.z, lower.z, upper.w, lower.w};
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const uint4 b = load8_before<false>(x_rows[r], at, k);
            mma_bf16(sums[r], even, b.x, b.y);
            mma_bf16(sums[r], odd, b.z, b.w);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t feature = first_feature + g + i / 2 * 8;
            const uint32_t row = first_row + 8 * r + 2 * t + i % 2;
            if (feature < n && row < rows) {
                const size_t at = static_cast<size_t>(row) * out_stride + head * head_stride;
                out[at + feature] = to_bf16(sums[r][i] * scale);
            }
        }
    }
}

// 8 elements of a token, as bf16.
__device__ __forceinline__ uint4 eight(const tutti_bf16* at) { return load_once(at); }
__device__ __forceinline__ uint4 eight(const tutti_fp8* at) {
    const uint2 bytes = load_once(at);
    const uint4 wide = widen(bytes);
    return (nans_of(bytes) & FP8_NANS) != 0 ? with_nans(wide) : wide;
}

// Of each head, the exponents' reference and the sum of the weights.
struct Weighed {
    const float* maxima;
    const float* totals;
};

// Attention of up to 16 heads of a row, whose q begins at `q`, over the tokens from `begin` to
// `end`; `first` is `begin` or a multiple of 16 before it. Then calls finish(head, dim, two sums)
// for all dims, and returns what they are to be divided by.
template <class Kv, class Finish>
__device__ __forceinline__ Weighed attend(const tutti_bf16* q, uint32_t heads, const Kv* k_cache,
                                          const Pages& pages, uint32_t begin, uint32_t first,
                                          uint32_t end, uint32_t latent, uint32_t rotated,
                                          float scale, const Finish& finish) {
    SHARED_ARRAY(tutti_bf16, queries, HEADS * ROW);
    SHARED_ARRAY(tutti_bf16, tokens, TILE * ROW);
    // Each warp's part of the scores, [warp, head, token].
    SHARED_ARRAY(float, parts, WARPS * HEADS * TILE);
    SHARED_ARRAY(tutti_bf16, weights, HEADS * WEIGHTS_ROW);
    SHARED_ARRAY(float, factors, HEADS);
    SHARED_ARRAY(float, totals, HEADS);
    SHARED_ARRAY(float, maxima, HEADS);
    const uint32_t width = latent + rotated;
    const uint32_t pieces = width / 8;
    for (uint32_t i = threadIdx.x; i < HEADS * pieces; i += THREADS) {
        const uint32_t head = i / pieces;
        const uint32_t at = i % pieces * 8;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (head < heads) {
            v = load_row(q + head * width + at);
        }
        *reinterpret_cast<uint4*>(queries + head * ROW + at) = v;
    }
    const uint32_t warp = threadIdx.x / 32;
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t g = lane / 4;
    const uint32_t t = lane % 4;
    // Row and column that a lane passes to ldmatrix: rows 0 to 15, then the same 8 columns further.
    const uint32_t row_down = lane % 16;
    const uint32_t column_on = lane / 16 * 8;
    // Rows 0 to 7, the same 8 columns further, then rows 8 to 15.
    const uint32_t row_across = lane % 8 + lane / 16 * 8;
    const uint32_t column_across = lane / 8 % 2 * 8;
    // The head and the token of the tile whose weight a lane computes.
    const uint32_t own_head = 2 * warp + lane / 16;
    const uint32_t own_token = lane % 16;
    const float to_exponent = scale * LOG2_E;
    Running running;
    // Dims 16 (warp + 8 i) and the next 15.
    float sums[4][2][4] = {};
    for (uint32_t tile = first; tile < end; tile += TILE) {
        for (uint32_t i = threadIdx.x; i < TILE * pieces; i += THREADS) {
            const uint32_t token = i / pieces;
            const uint32_t at = i % pieces * 8;
            // Others can hold anything.
            uint4 v = make_uint4(0, 0, 0, 0);
            if (tile + token >= begin && tile + token < end) {
                v = eight(k_cache + pages.token(tile + token) * width + at);
            }
            *reinterpret_cast<uint4*>(tokens + token * ROW + at) = v;
        }
        __syncthreads();
        float scores[2][4] = {};
        for (uint32_t step = warp; step < width / 16; step += WARPS) {
            uint32_t a[4];
            uint32_t b[4];
            load_matrices(a, queries + row_down * ROW + 16 * step + column_on);
            load_matrices(b, tokens + row_across * ROW + 16 * step + column_across);
            mma_bf16(scores[0], a, b[0], b[1]);
            mma_bf16(scores[1], a, b[2], b[3]);
        }
#pragma unroll
        for (uint32_t j = 0; j < 2; j++) {
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                const uint32_t head = g + i / 2 * 8;
                parts[(warp * HEADS + head) * TILE + 8 * j + 2 * t + i % 2] = scores[j][i];
            }
        }
        __syncthreads();
        float score = 0.0f;
#pragma unroll
        for (uint32_t w = 0; w < WARPS; w++) {
            score += parts[(w * HEADS + own_head) * TILE + own_token];
        }
        const bool seen = tile + own_token >= begin && tile + own_token < end;
        score = seen ? score * to_exponent : NOTHING;
        float most = score;
#pragma unroll
        for (int distance = 8; distance > 0; distance /= 2) {
            most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, distance));
        }
        const float factor = running.raise(most);
        const tutti_bf16 weight = to_bf16(exp2_fast(score - running.base()));
        // What is multiplied is also what is summed.
        float sum = from_bf16(weight);
#pragma unroll
        for (int distance = 8; distance > 0; distance /= 2) {
            sum += __shfl_xor_sync(ALL_LANES, sum, distance);
        }
        running.sum += sum;
        weights[own_head * WEIGHTS_ROW + own_token] = weight;
        if (own_token == 0) {
            factors[own_head] = factor;
            totals[own_head] = running.sum;
            maxima[own_head] = running.maximum;
        }
        __syncthreads();
        uint32_t a[4];
        load_matrices(a, weights + row_down * WEIGHTS_ROW + column_on);
        const float upper = factors[g];
        const float lower = factors[g + 8];
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t dim = 16 * (warp + WARPS * i);
            if (dim < latent) {
#pragma unroll
                for (uint32_t j = 0; j < 2; j++) {
                    sums[i][j][0] *= upper;
                    sums[i][j][1] *= upper;
                    sums[i][j][2] *= lower;
                    sums[i][j][3] *= lower;
                }
                uint32_t b[4];
                load_matrices_transposed(b, tokens + row_down * ROW + dim + column_on);
                mma_bf16(sums[i][0], a, b[0], b[1]);
                mma_bf16(sums[i][1], a, b[2], b[3]);
            }
        }
        // The next tile overwrites this one.
        __syncthreads();
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
#pragma unroll
        for (uint32_t j = 0; j < 2; j++) {
            const uint32_t dim = 16 * (warp + WARPS * i) + 8 * j + 2 * t;
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                const uint32_t head = g + 8 * half;
                if (dim < latent && head < heads) {
                    finish(head, dim, totals[head], sums[i][j][2 * half],
                           sums[i][j][2 * half + 1]);
                }
            }
        }
    }
    return {maxima, totals};
}

// Two neighbouring dims of a result.
__device__ __forceinline__ void store_pair(tutti_bf16* at, float a, float b) {
    *reinterpret_cast<uint32_t*>(at) = pack_bf16(a, b);
}

template <class Kv>
__device__ __forceinline__ void latent_attention(const tutti_bf16* q, const Kv* k_cache,
                                                 TUTTI_LATENT_ATTENTION_ARGUMENTS) {
    release_successors();
    wait_for_predecessors();
    const uint32_t row = blockIdx.x;
    if (!is_live(live, row)) {
        return;
    }
    const TuttiSeq seq = seqs[seq_of_row(seqs, *num_seqs, row)];
    if (skips_single != 0 && seq.num_rows == 1) {
        return;
    }
    const uint32_t position = seq.context_len - seq.num_rows + (row - seq.row_start);
    const uint32_t begin = first_seen(position, window);
    const Pages pages = {block_tables + seq.table_start, 1, 0, block_shift};
    const uint32_t first_head = blockIdx.y * HEADS;
    const uint32_t heads = at_most(num_heads - first_head, HEADS);
    const size_t own = static_cast<size_t>(row) * num_heads + first_head;
    const auto finish = [&](uint32_t head, uint32_t dim, float total, float a, float b) {
        store_pair(out + (own + head) * latent + dim, a / total, b / total);
    };
    attend(q + own * (latent + rotated), heads, k_cache, pages, begin, begin & ~15u, position + 1,
           latent, rotated, scale, finish);
}

template <class Kv>
__device__ __forceinline__ void latent_decode(const tutti_bf16* q, const Kv* k_cache,
                                              TUTTI_LATENT_DECODE_ARGUMENTS) {
    release_successors();
    wait_for_predecessors();
    const uint32_t num_parts = *live;
    const uint32_t first_head = blockIdx.y * HEADS;
    const uint32_t heads = at_most(num_heads - first_head, HEADS);
    for (uint32_t part = blockIdx.x; part < num_parts; part += gridDim.x) {
        const uint32_t index = parts[part] >> TUTTI_PART_SHIFT;
        const uint32_t split = parts[part] & ((1u << TUTTI_PART_SHIFT) - 1);
        const Single seq(seqs, index);
        const Splits splits(seq.context_len, window, max_splits, least_split);
        const uint32_t first = splits.aligned + split * splits.len;
        const uint32_t end = first + splits.len < splits.end ? first + splits.len : splits.end;
        const Pages pages = {block_tables + seq.table_start, 1, 0, block_shift};
        const size_t own = static_cast<size_t>(seq.row) * num_heads + first_head;
        const size_t slots = (static_cast<size_t>(index) * num_heads + first_head) * max_splits;
        const bool is_whole = splits.count == 1;
        const auto finish = [&](uint32_t head, uint32_t dim, float total, float a, float b) {
            if (is_whole) {
                store_pair(out + (own + head) * latent + dim, a / total, b / total);
            } else {
                float* to = partial_out + (slots + head * max_splits + split) * latent + dim;
                to[0] = a;
                to[1] = b;
            }
        };
        const Weighed weighed = attend(q + own * (latent + rotated), heads, k_cache, pages,
                                       splits.start, first, end, latent, rotated, scale, finish);
        if (!is_whole && threadIdx.x < heads) {
            float* ml = partial_ml + 2 * (slots + threadIdx.x * max_splits + split);
            ml[0] = weighed.maxima[threadIdx.x];
            ml[1] = weighed.totals[threadIdx.x];
        }
        // The next part overwrites shared memory.
        __syncthreads();
    }
}

}  // namespace
}  // namespace tutti

#define LATENT_FINISH(name, kv_type)                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        name(TUTTI_LATENT_IN_ARGUMENTS, kv_type* k_cache, TUTTI_LATENT_SIZE_ARGUMENTS) {           \
        tutti::latent_finish<kv_type>(q, kv, norm, cos, sin, positions, slots, plain_out, q_out,   \
                                      k_cache, num_heads, plain, latent, rotated, eps, scale,      \
                                      live);                                                       \
    }
LATENT_FINISH(tutti_latent_finish, tutti_bf16)
LATENT_FINISH(tutti_latent_finish_fp8, tutti_fp8)

#define HEADS_PRODUCT(rows_most)                                                                   \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        tutti_heads_product_##rows_most(TUTTI_HEADS_PRODUCT_ARGUMENTS) {                           \
        tutti::heads_product<rows_most / 8>(x, w, out, rows, n, k, x_stride, w_stride, out_stride, \
                                            head_stride, scale, live);                             \
    }
HEADS_PRODUCT(8)
HEADS_PRODUCT(32)

#define LATENT_ATTENTION(name, kv)                                                                 \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        name(const tutti_bf16* q, const kv* k_cache, TUTTI_LATENT_ATTENTION_ARGUMENTS) {           \
        tutti::latent_attention<kv>(q, k_cache, seqs, num_seqs, block_tables, out, num_heads,      \
                                    latent, rotated, block_shift, window, scale, skips_single,     \
                                    live);                                                         \
    }
LATENT_ATTENTION(tutti_latent_attention, tutti_bf16)
LATENT_ATTENTION(tutti_latent_attention_fp8, tutti_fp8)

// 2 run at a time on a multiprocessor: the host launches as many.
#define LATENT_DECODE(name, kv)                                                                    \
    extern "C" __global__ void __launch_bounds__(256, 2)                                           \
        name(const tutti_bf16* q, const kv* k_cache, TUTTI_LATENT_DECODE_ARGUMENTS) {              \
        tutti::latent_decode<kv>(q, k_cache, seqs, parts, block_tables, partial_out, partial_ml,   \
                                 out, num_heads, latent, rotated, block_shift, window, max_splits, \
                                 least_split, scale, live);                                        \
    }
LATENT_DECODE(tutti_latent_decode, tutti_bf16)
LATENT_DECODE(tutti_latent_decode_fp8, tutti_fp8)
