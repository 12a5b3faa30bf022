// Causal attention of many rows over a paged cache, on tensor cores.
//
//   out = sum_j softmax(q . K_j * scale) V_j over the visible tokens j, and a sink without V
//
// A block computes a tile of 64 queries of one sequence and KV head: rows times the heads of the
// group, so K and V are read once for the whole group. Each of 4 warps has 16 queries. K and V come
// through shared memory in tiles of 64 tokens, double-buffered: the next tile is copied in the
// background while this one is used. The running softmax is that of FlashAttention 2.
//
// Tiles of tokens begin at positions that are multiples of 64, and a tile outside a query's range
// changes none of its bits. So a row's result does not depend on how a prompt is cut into chunks or
// which queries share its tile. Weights are rounded to bf16 before they are summed and before they
// are multiplied by V.
//
// K and V in FP8 are copied to a staging area instead, one tile ahead, each piece by the thread that
// then widens it to the one tile of bf16 that all use.
//
// Shared memory: rows of head_dim bf16 in pieces of 16 bytes, permuted within a row so that the 8
// rows that ldmatrix reads at once lie in different banks.
//
// Heads of 256 have twice as many sums, so their q stays in shared memory and is read from there
// for each tile of tokens. They take 160 KiB of shared memory, so only one such block fits on a
// multiprocessor. Limits: head_dim 16, 32, 64, 96, 128 or 256 (FP8: from 64 on); any group; blocks
// of a power of two of tokens.
#include "attention.cuh"

namespace tutti {
namespace {

constexpr uint32_t QUERIES = TUTTI_PREFILL_QUERIES;
constexpr uint32_t TOKENS = 64;
constexpr uint32_t THREADS = 128;

template <int HEAD_DIM>
struct Tile {
    static constexpr uint32_t PIECES = HEAD_DIM / 8;

    // Element offset of piece `piece` of row `row`.
    static __device__ __forceinline__ uint32_t at(uint32_t row, uint32_t piece) {
        const uint32_t swap = HEAD_DIM % 64 == 0   ? row & 7
                              : HEAD_DIM % 32 == 0 ? row >> 1 & 3
                                                   : row >> 2 & 1;
        return row * HEAD_DIM + (piece ^ swap) * 8;
    }
};

template <int HEAD_DIM>
__device__ __forceinline__ void load_tokens(tutti_bf16* k_tile, tutti_bf16* v_tile,
                                            const tutti_bf16* k_cache, const tutti_bf16* v_cache,
                                            const Pages& pages, uint32_t first, uint32_t low,
                                            uint32_t high) {
    using T = Tile<HEAD_DIM>;
    constexpr uint32_t COUNT = TOKENS * T::PIECES / THREADS;
    // All look-ups in the block table first, so that they wait for memory together.
    size_t from[COUNT];
#pragma unroll
    for (uint32_t i = 0; i < COUNT; i++) {
        const uint32_t position = first + (threadIdx.x + i * THREADS) / T::PIECES;
        from[i] = pages.token(position < high ? position : high - 1) * HEAD_DIM;
    }
#pragma unroll
    for (uint32_t i = 0; i < COUNT; i++) {
        const uint32_t row = (threadIdx.x + i * THREADS) / T::PIECES;
        const uint32_t piece = (threadIdx.x + i * THREADS) % T::PIECES;
        // Tokens that no query of this tile attends to become zero: their memory can hold anything.
        const bool seen = first + row >= low && first + row < high;
        copy_async(k_tile + T::at(row, piece), k_cache + from[i] + piece * 8, seen);
        copy_async(v_tile + T::at(row, piece), v_cache + from[i] + piece * 8, seen);
    }
}

// A tile of K and V in FP8: a thread's pieces of 16 dims, staged and widened.
template <int HEAD_DIM>
struct Staged {
    static constexpr uint32_t PIECES = HEAD_DIM / 16;
    static constexpr uint32_t COUNT = TOKENS * PIECES / THREADS;
    uint4* pieces;

    __device__ __forceinline__ void copy(const tutti_fp8* k_cache, const tutti_fp8* v_cache,
                                         const Pages& pages, uint32_t first, uint32_t low,
                                         uint32_t high) const {
        size_t from[COUNT];
#pragma unroll
        for (uint32_t i = 0; i < COUNT; i++) {
            const uint32_t position = first + (threadIdx.x + i * THREADS) / PIECES;
            from[i] = pages.token(position < high ? position : high - 1) * HEAD_DIM;
        }
#pragma unroll
        for (uint32_t i = 0; i < COUNT; i++) {
            const uint32_t at = threadIdx.x + i * THREADS;
            const uint32_t row = at / PIECES;
            const bool seen = first + row >= low && first + row < high;
            const size_t place = from[i] + at % PIECES * 16;
            copy_async(pieces + at, k_cache + place, seen);
            copy_async(pieces + COUNT * THREADS + at, v_cache + place, seen);
        }
    }
    // What this thread has copied. NaN stays NaN: it is looked for, and written in a second round,
    // which hardly ever happens.
    __device__ __forceinline__ void widen_to(tutti_bf16* k_tile, tutti_bf16* v_tile) const {
        uint32_t nans = 0;
#pragma unroll 2
        for (uint32_t i = 0; i < 2 * COUNT; i++) {
            const Halves half(piece(i));
            uint4* to[2];
            places(to, i, k_tile, v_tile);
            *to[0] = widen(half.first);
            *to[1] = widen(half.second);
            nans |= nans_of(half.first) | nans_of(half.second);
        }
        if ((nans & FP8_NANS) != 0) {
#pragma unroll 1
            for (uint32_t i = 0; i < 2 * COUNT; i++) {
                uint4* to[2];
                places(to, i, k_tile, v_tile);
                *to[0] = with_nans(*to[0]);
                *to[1] = with_nans(*to[1]);
            }
        }
    }

  private:
    struct Halves {
        uint2 first;
        uint2 second;
        __device__ __forceinline__ explicit Halves(const uint4& bytes) {
            first.x = bytes.x;
            first.y = bytes.y;
            second.x = bytes.z;
            second.y = bytes.w;
        }
    };
    // Piece i of K, and then of V.
    __device__ __forceinline__ uint4 piece(uint32_t i) const {
        return pieces[threadIdx.x + i * THREADS];
    }
    // Where it goes: 8 dims each.
    __device__ __forceinline__ void places(uint4* (&to)[2], uint32_t i, tutti_bf16* k_tile,
                                           tutti_bf16* v_tile) const {
        using T = Tile<HEAD_DIM>;
        const uint32_t at = threadIdx.x + i % COUNT * THREADS;
        tutti_bf16* tile = i < COUNT ? k_tile : v_tile;
        to[0] = reinterpret_cast<uint4*>(tile + T::at(at / PIECES, at % PIECES * 2));
        to[1] = reinterpret_cast<uint4*>(tile + T::at(at / PIECES, at % PIECES * 2 + 1));
    }
};

// The tiles of K and V that a block has in shared memory: two of each in bf16, or, of FP8, one and a
// staging area for the next.
template <int HEAD_DIM, class Kv>
struct KvTiles;

template <int HEAD_DIM>
struct KvTiles<HEAD_DIM, tutti_bf16> {
    tutti_bf16* k_tiles;
    tutti_bf16* v_tiles;
    uint32_t buffer;

    __device__ __forceinline__ explicit KvTiles(tutti_bf16* at)
        : k_tiles(at), v_tiles(at + 2 * TOKENS * HEAD_DIM), buffer(0) {}
    // Begins to copy the first tile.
    __device__ __forceinline__ void begin(const tutti_bf16* k_cache, const tutti_bf16* v_cache,
                                          const Pages& pages, uint32_t first, uint32_t low,
                                          uint32_t high) {
        load_tokens<HEAD_DIM>(k_tiles, v_tiles, k_cache, v_cache, pages, first, low, high);
    }
    // Waits for this thread's part of the next tile, and begins to copy the one behind it, from
    // token `next` on.
    __device__ __forceinline__ void advance(const tutti_bf16* k_cache, const tutti_bf16* v_cache,
                                            const Pages& pages, uint32_t next, uint32_t low,
                                            uint32_t high) {
        if (next < high) {
            load_tokens<HEAD_DIM>(k_tiles + (buffer ^ 1) * TOKENS * HEAD_DIM,
                                  v_tiles + (buffer ^ 1) * TOKENS * HEAD_DIM, k_cache, v_cache,
                                  pages, next, low, high);
        }
        commit_copies();
        wait_copies<1>();
    }
    __device__ __forceinline__ const tutti_bf16* k() const {
        return k_tiles + buffer * TOKENS * HEAD_DIM;
    }
    __device__ __forceinline__ const tutti_bf16* v() const {
        return v_tiles + buffer * TOKENS * HEAD_DIM;
    }
    // The tile has been used.
    __device__ __forceinline__ void done() { buffer ^= 1; }
};

template <int HEAD_DIM>
struct KvTiles<HEAD_DIM, tutti_fp8> {
    tutti_bf16* tiles;
    Staged<HEAD_DIM> staged;

    __device__ __forceinline__ explicit KvTiles(tutti_bf16* at)
        : tiles(at), staged{reinterpret_cast<uint4*>(at + 2 * TOKENS * HEAD_DIM)} {}
    __device__ __forceinline__ void begin(const tutti_fp8* k_cache, const tutti_fp8* v_cache,
                                          const Pages& pages, uint32_t first, uint32_t low,
                                          uint32_t high) {
        staged.copy(k_cache, v_cache, pages, first, low, high);
    }
    __device__ __forceinline__ void advance(const tutti_fp8* k_cache, const tutti_fp8* v_cache,
                                            const Pages& pages, uint32_t next, uint32_t low,
                                            uint32_t high) {
        wait_copies<0>();
        staged.widen_to(tiles, tiles + TOKENS * HEAD_DIM);
        if (next < high) {
            staged.copy(k_cache, v_cache, pages, next, low, high);
        }
        commit_copies();
    }
    __device__ __forceinline__ const tutti_bf16* k() const { return tiles; }
    __device__ __forceinline__ const tutti_bf16* v() const { return tiles + TOKENS * HEAD_DIM; }
    __device__ __forceinline__ void done() {}
};

template <int HEAD_DIM, class Kv>
__device__ __forceinline__ void prefill(const tutti_bf16* q, const Kv* k_cache, const Kv* v_cache,
                                        TUTTI_PREFILL_ARGUMENTS) {
    using T = Tile<HEAD_DIM>;
    constexpr uint32_t DIM_STEPS = HEAD_DIM / 16;
    constexpr uint32_t TOKEN_STEPS = TOKENS / 16;
    constexpr bool IN_REGISTERS = HEAD_DIM <= 128;
    DYNAMIC_SHARED(shared);
    tutti_bf16* q_tile = reinterpret_cast<tutti_bf16*>(shared);
    KvTiles<HEAD_DIM, Kv> tiles_of_kv(q_tile + QUERIES * HEAD_DIM);

    release_successors();
    wait_for_predecessors();
    if (!is_live(live, blockIdx.x)) {
        return;
    }
    const TuttiTile tile = tiles[blockIdx.x];
    const TuttiSeq seq = seqs[tile.seq];
    const uint32_t kv_head = blockIdx.y;
    const uint32_t group = num_heads / num_kv_heads;
    const uint32_t queries = seq.num_rows * group;
    const uint32_t last = tile.first + QUERIES < queries ? tile.first + QUERIES - 1 : queries - 1;
    const uint32_t first_position = seq.context_len - seq.num_rows;
    const Pages pages = {block_tables + seq.table_start, num_kv_heads, kv_head,
                         block_shift};
    // Tokens that some query of the tile attends to.
    const uint32_t low = first_seen(first_position + tile.first / group, window);
    const uint32_t high = first_position + last / group + 1;

    const auto query_offset = [&](uint32_t query) {
        const size_t row = seq.row_start + query / group;
        return (row * num_heads + kv_head * group + query % group) * HEAD_DIM;
    };
    for (uint32_t i = threadIdx.x; i < QUERIES * T::PIECES; i += THREADS) {
        const uint32_t row = i / T::PIECES;
        const uint32_t piece = i % T::PIECES;
        const bool there = tile.first + row <= last;
        const size_t from = there ? query_offset(tile.first + row) + piece * 8 : 0;
        copy_async(q_tile + T::at(row, piece), q + from, there);
    }
    uint32_t start = low / TOKENS * TOKENS;
    tiles_of_kv.begin(k_cache, v_cache, pages, start, low, high);
    commit_copies();

    const uint32_t warp = threadIdx.x / 32;
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t g = lane / 4;
    const uint32_t t = lane % 4;
    // Row and piece that a lane passes to ldmatrix: rows 0 to 15, then the same rows one piece
    // further on.
    const uint32_t row_down = lane % 16;
    const uint32_t piece_on = lane / 16;
    // Rows 0 to 7, the same rows one piece further on, then rows 8 to 15.
    const uint32_t row_across = lane % 8 + lane / 16 * 8;
    const uint32_t piece_across = lane / 8 % 2;

    // End and start of the positions that rows g and g + 8 of this warp attend to.
    uint32_t seen_end[2];
    uint32_t seen_start[2];
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        const uint32_t query = tile.first + warp * 16 + g + 8 * half;
        const uint32_t position = first_position + query / group;
        seen_end[half] = query <= last ? position + 1 : 0;
        seen_start[half] = first_seen(position, window);
    }
    const float to_exponent = scale * LOG2_E;
    Running running[2];
    if (sinks != nullptr) {
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            const uint32_t query = tile.first + warp * 16 + g + 8 * half;
            running[half].begin(sinks[kv_head * group + query % group], t == 0);
        }
    }
    float sums[HEAD_DIM / 8][4] = {};
    uint32_t query[IN_REGISTERS ? DIM_STEPS : 1][4];
    const auto load_query = [&](uint32_t (&to)[4], uint32_t step) {
        load_matrices(to, q_tile + T::at(warp * 16 + row_down, 2 * step + piece_on));
    };

    bool first_round = true;
    for (; start < high; start += TOKENS) {
        tiles_of_kv.advance(k_cache, v_cache, pages, start + TOKENS, low, high);
        __syncthreads();
        if (IN_REGISTERS && first_round) {
            first_round = false;
#pragma unroll
            for (uint32_t step = 0; step < DIM_STEPS; step++) {
                load_query(query[IN_REGISTERS ? step : 0], step);
            }
        }
        const tutti_bf16* k_tile = tiles_of_kv.k();
        const tutti_bf16* v_tile = tiles_of_kv.v();

        float scores[TOKENS / 8][4] = {};
#pragma unroll
        for (uint32_t step = 0; step < DIM_STEPS; step++) {
            uint32_t(&a)[4] = query[IN_REGISTERS ? step : 0];
            if (!IN_REGISTERS) {
                load_query(a, step);
            }
#pragma unroll
            for (uint32_t j = 0; j < TOKEN_STEPS; j++) {
                uint32_t b[4];
                load_matrices(b, k_tile + T::at(16 * j + row_across, 2 * step + piece_across));
                mma_bf16(scores[2 * j], a, b[0], b[1]);
                mma_bf16(scores[2 * j + 1], a, b[2], b[3]);
            }
        }

        if (cap != 0.0f) {
#pragma unroll
            for (uint32_t j = 0; j < TOKENS / 8; j++) {
                cap_scores(scores[j], scale, cap);
            }
        }
        uint32_t weights[TOKENS / 8][2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float most = NOTHING;
#pragma unroll
            for (uint32_t j = 0; j < TOKENS / 8; j++) {
#pragma unroll
                for (uint32_t i = 0; i < 2; i++) {
                    const uint32_t position = start + 8 * j + 2 * t + i;
                    const bool seen = position >= seen_start[half] && position < seen_end[half];
                    float& score = scores[j][2 * half + i];
                    score = seen ? score * to_exponent : NOTHING;
                    most = fmaxf(most, score);
                }
            }
            const float factor = running[half].raise(quad_max(most));
            const float base = running[half].base();
#pragma unroll
            for (uint32_t j = 0; j < TOKENS / 8; j++) {
                weights[j][half] = pack_bf16(exp2_fast(scores[j][2 * half] - base),
                                             exp2_fast(scores[j][2 * half + 1] - base));
                running[half].sum += low_bf16(weights[j][half]) + high_bf16(weights[j][half]);
            }
#pragma unroll
            for (uint32_t n = 0; n < HEAD_DIM / 8; n++) {
                sums[n][2 * half] *= factor;
                sums[n][2 * half + 1] *= factor;
            }
        }
#pragma unroll
        for (uint32_t j = 0; j < TOKEN_STEPS; j++) {
            const uint32_t a[4] = {weights[2 * j][0], weights[2 * j][1], weights[2 * j + 1][0],
                                   weights[2 * j + 1][1]};
#pragma unroll
            for (uint32_t n = 0; n < DIM_STEPS; n++) {
                uint32_t b[4];
                load_matrices_transposed(
                    b, v_tile + T::at(16 * j + row_down, 2 * n + piece_on));
                mma_bf16(sums[2 * n], a, b[0], b[1]);
                mma_bf16(sums[2 * n + 1], a, b[2], b[3]);
            }
        }
        // The next iteration overwrites what this one has read.
        __syncthreads();
        tiles_of_kv.done();
    }

#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint32_t query_index = tile.first + warp * 16 + g + 8 * half;
        const float inverse = 1.0f / quad_sum(running[half].sum);
        if (query_index <= last) {
            tutti_bf16* to = out + query_offset(query_index) + 2 * t;
#pragma unroll
            for (uint32_t n = 0; n < HEAD_DIM / 8; n++) {
                *reinterpret_cast<uint32_t*>(to + 8 * n) =
                    pack_bf16(sums[n][2 * half] * inverse, sums[n][2 * half + 1] * inverse);
            }
        }
    }
}

}  // namespace
}  // namespace tutti

#define PREFILL(name, kv, head_dim, blocks)                                                        \
    extern "C" __global__ void __launch_bounds__(128, blocks)                                      \
        tutti_prefill_attention_##name(const tutti_bf16* q, const kv* k_cache, const kv* v_cache,  \
                                       TUTTI_PREFILL_ARGUMENTS) {                                  \
        tutti::prefill<head_dim, kv>(q, k_cache, v_cache, seqs, tiles, block_tables, out,          \
                                     num_heads, num_kv_heads, block_shift, window, scale, cap,     \
                                     sinks, live);                                                 \
    }
PREFILL(16, tutti_bf16, 16, 2)
PREFILL(32, tutti_bf16, 32, 2)
PREFILL(64, tutti_bf16, 64, 2)
PREFILL(96, tutti_bf16, 96, 2)
PREFILL(128, tutti_bf16, 128, 2)
PREFILL(256, tutti_bf16, 256, 1)
PREFILL(fp8_64, tutti_fp8, 64, 2)
PREFILL(fp8_96, tutti_fp8, 96, 2)
PREFILL(fp8_128, tutti_fp8, 128, 2)
PREFILL(fp8_256, tutti_fp8, 256, 1)
