// Multi-head latent attention (DeepSeek V2 and V3): what goes to the cache and to attention, a
// product for each head, and attention whose V is the first part of its K.
//
// The cache has one vector per token for all heads, so the heads of a row are the 16 rows of the
// tensor cores' A, and a token's vector is read once for 16 heads. Rows are computed one by one:
// all heads of a row attend to the same tokens. Those of sequences with one row are split into parts
// as in attention_decode.cu.
//
// A token's vector comes to shared memory in the background, while tiles before it are used: in bf16
// to one of two buffers, one tile ahead; in FP8 to one of two staging areas, two tiles ahead, from
// where the thread that copied a piece widens it to the one tile of bf16. A thread copies pieces of
// one token of each tile, so it looks up one block, a tile earlier.
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
// Threads that copy a row: of 16 heads or 16 tokens.
constexpr uint32_t COPIERS = THREADS / TILE;
static_assert(HEADS == TILE, "rows of q and of tokens are copied alike");
// Bytes of shared memory for tokens: two tiles of bf16.
constexpr uint32_t TOKENS_SHARED = 2 * TILE * ROW * sizeof(tutti_bf16);
static_assert(TOKENS_SHARED + HEADS * ROW * sizeof(tutti_bf16) == TUTTI_LATENT_SHARED,
              "as kernels.h says");

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
// order. A head's matrix is small and has few blocks, so what counts is how often a warp waits for
// memory: it requests the weights of HELD chunks together, the first ones before the wait for
// preceding kernels, and the next ones as these are used.
template <int ROWS, uint32_t HELD>
__device__ __forceinline__ void heads_product(TUTTI_HEADS_PRODUCT_ARGUMENTS) {
    release_successors();
    rows = at_most(rows, live_items(live));
    const uint32_t first_row = blockIdx.x * 8 * ROWS;
    const uint32_t first_feature = (blockIdx.y * WARPS + threadIdx.x / 32) * 16;
    const uint32_t head = blockIdx.z;
    if (first_row >= rows) {
        end_without_waiting(blockIdx.x == 0);
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
    uint4 weights[HELD][LOADS][2];
    const auto load = [&](uint32_t held, uint32_t i, uint32_t start) {
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            weights[held][i][half] = load_weights(w_rows[half] + start + K_LOAD * i + 8 * t);
        }
    };
    const auto is_whole = [&](uint32_t start) { return start + CHUNK <= k; };
#pragma unroll
    for (uint32_t held = 0; held < HELD; held++) {
        if (is_whole(held * CHUNK)) {
            // Where the warp meets, a branch stays one. The assembler would make the loads
            // conditional instead, and put them off until after the wait.
            __syncwarp();
#pragma unroll
            for (uint32_t i = 0; i < LOADS; i++) {
                load(held, i, held * CHUNK);
            }
        }
    }
    wait_for_predecessors();
    if (first_feature >= n) {
        return;
    }
    const tutti_bf16* x_rows[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const size_t row = at_most(first_row + 8 * r + g, rows - 1);
        x_rows[r] = x + row * x_stride + head * k;
    }
    float sums[ROWS][4] = {};
    const auto multiply = [&](const uint4 (&a)[2], const uint4 (&b)[ROWS]) {
        const uint32_t even[4] = {a[0].x, a[1].x, a[0].y, a[1].y};
        const uint32_t odd[4] = {a[0].z, a[1].z, a[0].w, a[1].w};
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            mma_bf16(sums[r], even, b[r].x, b[r].y);
            mma_bf16(sums[r], odd, b[r].z, b[r].w);
        }
    };
    uint32_t start = 0;
    for (; is_whole(start); start += HELD * CHUNK) {
        // For few rows so is x. For more it would cost resident blocks.
        uint4 b[HELD][LOADS][ROWS];
        const auto load_x = [&](uint32_t held, uint32_t i) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const uint32_t at = start + held * CHUNK + K_LOAD * i + 8 * t;
                b[held][i][r] = load_row(x_rows[r] + at);
            }
        };
#pragma unroll
        for (uint32_t held = 0; held < HELD; held++) {
            if (ROWS == 1 && (held == 0 || is_whole(start + held * CHUNK))) {
#pragma unroll
                for (uint32_t i = 0; i < LOADS; i++) {
                    load_x(held, i);
                }
            }
        }
#pragma unroll
        for (uint32_t held = 0; held < HELD; held++) {
            if (held == 0 || is_whole(start + held * CHUNK)) {
                const uint32_t next = start + (HELD + held) * CHUNK;
#pragma unroll
                for (uint32_t i = 0; i < LOADS; i++) {
                    if (ROWS > 1) {
                        load_x(held, i);
                    }
                    multiply(weights[held][i], b[held][i]);
                    if (is_whole(next)) {
                        load(held, i, next);
                    }
                }
            }
        }
    }
    // What is behind the last whole chunk.
    for (start = k / CHUNK * CHUNK; start < k; start += K_LOAD) {
        const uint32_t at = start + 8 * t;
        const uint4 a[2] = {load8_before<true>(w_rows[0], at, k),
                            load8_before<true>(w_rows[1], at, k)};
        uint4 b[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            b[r] = load8_before<false>(x_rows[r], at, k);
        }
        multiply(a, b);
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

// Begins to copy this thread's pieces of a row of `width` bf16; zeros unless `valid`.
__device__ __forceinline__ void copy_row(tutti_bf16* to, const tutti_bf16* from, uint32_t width,
                                         bool valid) {
#pragma unroll
    for (uint32_t i = 0; i < divide_up(TUTTI_LATENT_WIDTH_MAX / 8, COPIERS); i++) {
        const uint32_t at = (threadIdx.x % COPIERS + i * COPIERS) * 8;
        if (at < width) {
            copy_async(to + at, from + at, valid);
        }
    }
}

// The tokens that a block has in shared memory.
template <class Kv>
struct Tokens;

template <>
struct Tokens<tutti_bf16> {
    // How many tiles are on their way while one is used.
    static constexpr uint32_t AHEAD = 1;
    tutti_bf16* tiles;
    uint32_t width;

    __device__ __forceinline__ Tokens(unsigned char* shared, uint32_t width)
        : tiles(reinterpret_cast<tutti_bf16*>(shared)), width(width) {}
    // Begins to copy a tile, the `index`-th; `from` is this thread's token.
    __device__ __forceinline__ void copy(uint32_t index, const tutti_bf16* from, bool valid) {
        tutti_bf16* to = tiles + (index % 2 * TILE + threadIdx.x / COPIERS) * ROW;
        copy_row(to, from, width, valid);
    }
    // This thread's part of the oldest tile on its way has come; others' too once they have met, and
    // then the tile before is free.
    __device__ __forceinline__ void come(uint32_t) { wait_copies<0>(); }
    __device__ __forceinline__ const tutti_bf16* tile(uint32_t index) const {
        return tiles + index % 2 * TILE * ROW;
    }
    // The tile has been used. The next one is elsewhere.
    __device__ __forceinline__ void done() {}
};

template <>
struct Tokens<tutti_fp8> {
    static constexpr uint32_t AHEAD = 2;
    // Pieces of 16 elements of a token, and those of a thread.
    static constexpr uint32_t PIECES = TUTTI_LATENT_WIDTH_MAX / 16;
    static constexpr uint32_t COUNT = (PIECES + COPIERS - 1) / COPIERS;
    static_assert((TILE * ROW + TILE * PIECES * 16) * sizeof(tutti_bf16) <= TOKENS_SHARED,
                  "two staging areas fit behind a tile");
    tutti_bf16* widened;
    uint4* staged;
    uint32_t width;

    __device__ __forceinline__ Tokens(unsigned char* shared, uint32_t width)
        : widened(reinterpret_cast<tutti_bf16*>(shared)),
          staged(reinterpret_cast<uint4*>(widened + TILE * ROW)), width(width) {}
    __device__ __forceinline__ uint4* place(uint32_t index, uint32_t piece) const {
        return staged + (index % 2 * TILE + threadIdx.x / COPIERS) * PIECES + piece;
    }
    __device__ __forceinline__ void copy(uint32_t index, const tutti_fp8* from, bool valid) {
#pragma unroll
        for (uint32_t i = 0; i < COUNT; i++) {
            const uint32_t piece = threadIdx.x % COPIERS + i * COPIERS;
            if (piece * 16 < width) {
                copy_async(place(index, piece), from + piece * 16, valid);
            }
        }
    }
    // Also widens it: the block has met since the tile before was used.
    __device__ __forceinline__ void come(uint32_t index) {
        wait_copies<1>();
        tutti_bf16* to = widened + threadIdx.x / COPIERS * ROW;
#pragma unroll
        for (uint32_t i = 0; i < COUNT; i++) {
            const uint32_t piece = threadIdx.x % COPIERS + i * COPIERS;
            if (piece * 16 < width) {
                const uint4 bytes = *place(index, piece);
                uint4* eights = reinterpret_cast<uint4*>(to + piece * 16);
                eights[0] = eight({bytes.x, bytes.y});
                eights[1] = eight({bytes.z, bytes.w});
            }
        }
    }
    static __device__ __forceinline__ uint4 eight(uint2 bytes) {
        const uint4 wide = widen(bytes);
        return (nans_of(bytes) & FP8_NANS) != 0 ? with_nans(wide) : wide;
    }
    __device__ __forceinline__ const tutti_bf16* tile(uint32_t) const { return widened; }
    // The next one comes to the same place.
    __device__ __forceinline__ void done() { __syncthreads(); }
};

// Prefetches the first tokens of a part to L2, a tile by each warp.
template <class Kv>
__device__ __forceinline__ void ask_for_tokens(const Kv* k_cache, const Pages& pages,
                                               uint32_t begin, uint32_t first, uint32_t end,
                                               uint32_t width) {
    const uint32_t tile = first + threadIdx.x / 32 * TILE;
    if (threadIdx.x % 32 != 0 || pages.block_shift < 4 || tile >= end) {
        return;
    }
    const uint32_t from = tile < begin ? begin : tile;
    const uint32_t tokens = at_most(end, tile + TILE) - from;
    prefetch(k_cache + pages.token(from) * width,
             tokens * width * static_cast<uint32_t>(sizeof(Kv)));
}

// Of each head, the exponents' reference and the sum of the weights.
struct Weighed {
    const float* maxima;
    const float* totals;
};

// Attention of up to 16 heads of a row, whose q begins at `q`, over the tokens from `begin` to
// `end`; `first` is `begin` or a multiple of 16 before it. Then calls finish(head, dim, two sums)
// for all dims, and returns what they are to be divided by. With `waits`, waits for preceding
// kernels once it has looked up where the first tokens are and prefetched them.
template <class Kv, class Finish>
__device__ __forceinline__ Weighed attend(const tutti_bf16* q, uint32_t heads, const Kv* k_cache,
                                          const Pages& pages, uint32_t begin, uint32_t first,
                                          uint32_t end, uint32_t latent, uint32_t rotated,
                                          float scale, bool waits, const Finish& finish) {
    DYNAMIC_SHARED(shared);
    tutti_bf16* queries = reinterpret_cast<tutti_bf16*>(shared + TOKENS_SHARED);
    // Each warp's part of the scores, [warp, head, token].
    SHARED_ARRAY(float, parts, WARPS * HEADS * TILE);
    SHARED_ARRAY(tutti_bf16, weights, HEADS * WEIGHTS_ROW);
    SHARED_ARRAY(float, factors, HEADS);
    SHARED_ARRAY(float, totals, HEADS);
    SHARED_ARRAY(float, maxima, HEADS);
    const uint32_t width = latent + rotated;
    Tokens<Kv> tokens(shared, width);
    const uint32_t own = threadIdx.x / COPIERS;
    // Others can hold anything.
    const auto is_seen = [&](uint32_t position) { return position >= begin && position < end; };
    // The block of this thread's token of a tile.
    const auto block_of = [&](uint32_t tile) {
        return is_seen(tile + own) ? pages.block((tile + own) >> pages.block_shift) : 0;
    };
    // One group of copies for each tile, even if there is none, because waits count groups.
    const auto copy = [&](uint32_t index, uint32_t block) {
        const uint32_t position = first + index * TILE + own;
        const size_t token = pages.start_of(block) + pages.in_block(position);
        if (first + index * TILE < end) {
            tokens.copy(index, k_cache + token * width, is_seen(position));
        }
        commit_copies();
    };
    uint32_t blocks[Tokens<Kv>::AHEAD];
#pragma unroll
    for (uint32_t i = 0; i < Tokens<Kv>::AHEAD; i++) {
        blocks[i] = block_of(first + i * TILE);
    }
    if (waits) {
        ask_for_tokens(k_cache, pages, begin, first, end, width);
        wait_for_predecessors();
    }
    copy_row(queries + own * ROW, q + (own < heads ? own * width : 0), width, own < heads);
#pragma unroll
    for (uint32_t i = 0; i < Tokens<Kv>::AHEAD; i++) {
        copy(i, blocks[i]);
    }
    uint32_t next_block = block_of(first + Tokens<Kv>::AHEAD * TILE);
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
    uint32_t index = 0;
    for (uint32_t tile = first; tile < end; tile += TILE) {
        tokens.come(index);
        __syncthreads();
        copy(index + Tokens<Kv>::AHEAD, next_block);
        next_block = block_of(tile + (Tokens<Kv>::AHEAD + 1) * TILE);
        const tutti_bf16* k_tile = tokens.tile(index);
        float scores[2][4] = {};
        for (uint32_t step = warp; step < width / 16; step += WARPS) {
            uint32_t a[4];
            uint32_t b[4];
            load_matrices(a, queries + row_down * ROW + 16 * step + column_on);
            load_matrices(b, k_tile + row_across * ROW + 16 * step + column_across);
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
        score = is_seen(tile + own_token) ? score * to_exponent : NOTHING;
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
                load_matrices_transposed(b, k_tile + row_down * ROW + dim + column_on);
                mma_bf16(sums[i][0], a, b[0], b[1]);
                mma_bf16(sums[i][1], a, b[2], b[3]);
            }
        }
        tokens.done();
        index++;
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
           latent, rotated, scale, false, finish);
}

template <class Kv>
__device__ __forceinline__ void latent_decode(const tutti_bf16* q, const Kv* k_cache,
                                              TUTTI_LATENT_DECODE_ARGUMENTS) {
    release_successors();
    // As in attention_decode.cu, the step's lists are read while earlier kernels still run.
    const uint32_t num_parts = load_input(live);
    if (blockIdx.x >= num_parts) {
        end_without_waiting(blockIdx.x == 0);
        return;
    }
    const uint32_t first_head = blockIdx.y * HEADS;
    const uint32_t heads = at_most(num_heads - first_head, HEADS);
    for (uint32_t part = blockIdx.x; part < num_parts; part += gridDim.x) {
        const uint32_t named = load_input(parts + part);
        const uint32_t index = named >> TUTTI_PART_SHIFT;
        const uint32_t split = named & ((1u << TUTTI_PART_SHIFT) - 1);
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
                                       splits.start, first, end, latent, rotated, scale,
                                       part == blockIdx.x, finish);
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

#define HEADS_PRODUCT(rows_most, held, blocks)                                                     \
    extern "C" __global__ void __launch_bounds__(256, blocks)                                      \
        tutti_heads_product_##rows_most(TUTTI_HEADS_PRODUCT_ARGUMENTS) {                           \
        tutti::heads_product<rows_most / 8, held>(x, w, out, rows, n, k, x_stride, w_stride,       \
                                                  out_stride, head_stride, scale, live);           \
    }
HEADS_PRODUCT(8, 2, 2)
HEADS_PRODUCT(32, 1, 2)

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
