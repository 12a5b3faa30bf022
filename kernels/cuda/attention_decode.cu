// Attention of sequences with one row, whose tokens are split into parts ("split K");
// attention_reduce.cu puts the parts' results together.
//
//   out = sum_j softmax(q . K_j * scale) V_j over the visible tokens j, and a sink without V, which
//   the first warp of the first part counts
//
// The host lists all parts. As many blocks run as are resident at once, and each takes every n-th
// part of the list, so a step's cost follows its number of tokens: a long sequence among short ones
// adds no blocks for the short ones.
//
// A block computes up to 16 query heads of one KV head over one part at a time: the heads are the
// 16 rows of the tensor cores' A, so K and V are read once for a whole group. Every lane loads 16
// bytes at a time, which no other lane uses:
// - scores: B's k is head_dim, permuted so that a lane's 16 bytes are 4 registers of B. q is
//   permuted in the same way.
// - weighted sum: B's k is the token. A lane loads the same 8 dims of tokens 2t, 2t+1, 2t+8, 2t+9
//   and pairs them; B's column n of product j is dim 8n + j.
//
// 4 warps take the part's tiles of 16 tokens in turn, and their results are combined in a fixed
// order at the end. Weights are rounded to bf16 before they are summed and multiplied by V, so
// numerator and denominator agree: a constant V comes out exact.
//
// For heads up to 64, all of a tile's K and V is loaded to registers before any of it is used.
// Wider heads have too few registers for that, and the assembler would postpone V until K has been
// used. Each lane then copies its part of the next tile's K and V to shared memory in the
// background, as soon as this tile's have been used. As each lane reads only its own copies, no
// lane waits for another.
//
// Heads of 256 have twice as many sums: q is in shared memory instead of registers, K is not copied
// ahead, and the warps' results are combined 128 dims at a time.
//
// K and V in FP8 come in pieces of 8 bytes for the same 8 dims, and are widened to bf16 in registers.
// That loses NaN, so each lane looks for it in what it loads; a warp that has found one makes its
// sums NaN.
//
// The result of a sequence with one part is written directly. How a sequence is split depends only
// on its length and the launch's constants, hence so does every bit. Limits: head_dim 16, 32, 64, 96, 128 or 256 (FP8: from 64 on); any group.
#include "attention_decode.cuh"

namespace tutti {
namespace {

template <int HEAD_DIM, class Kv>
__device__ __forceinline__ void decode(const tutti_bf16* q, const Kv* k_cache, const Kv* v_cache,
                                       TUTTI_DECODE_ARGUMENTS) {
    using Piece = typename Stored<Kv>::Piece;
    // Sets of 64 dims of V: lane g has 8 of them, from 8g.
    constexpr int SETS = (HEAD_DIM + 63) / 64;
    // Number of a row's dims that the warps combine at a time.
    constexpr bool IS_WIDE = HEAD_DIM > 128;
    constexpr uint32_t PIECE = IS_WIDE ? 128 : HEAD_DIM;
    constexpr uint32_t PIECE_SETS = SETS / (HEAD_DIM / PIECE);
    static_assert(HEAD_DIM == PIECE || HEAD_DIM == 2 * PIECE, "one or two pieces");
    SHARED_ARRAY(float, maxima, WARPS * 16);
    SHARED_ARRAY(float, totals, WARPS * 16);
    using In = Mixed<PIECE>;
    static_assert(In::stores_are_spread() && In::loads_are_spread(), "banks are met twice");
    // Also holds the copies ahead, until the warps' sums are combined.
    SHARED_ARRAY(float, mixed, WARPS * 16 * In::WIDTH);
    using Next = Ahead<HEAD_DIM, Kv>;
    static_assert(WARPS * Next::PIECES * 32 * sizeof(Piece) <= WARPS * 16 * In::WIDTH * sizeof(float),
                  "what is on its way has no room");

    release_successors();
    // The step's lists were copied before all kernels, so they are read, and K and V of the first
    // part are prefetched, while earlier kernels still run.
    const uint32_t num_parts = load_input(live);
    if (blockIdx.x >= num_parts) {
        // Most blocks, if few rows are decoded: see `end_without_waiting`.
        end_without_waiting(blockIdx.x == 0);
        return;
    }

    const uint32_t group = num_heads / num_kv_heads;
    const uint32_t kv_head = blockIdx.y % num_kv_heads;
    const uint32_t first_of_group = blockIdx.y / num_kv_heads * 16;
    const uint32_t first_head = kv_head * group + first_of_group;
    const uint32_t heads = group - first_of_group < 16 ? group - first_of_group : 16;

    const uint32_t warp = threadIdx.x / 32;
    const uint32_t g = threadIdx.x % 32 / 4;
    const uint32_t t = threadIdx.x % 4;

    const Next ahead = {reinterpret_cast<Piece*>(mixed) + warp * Next::PIECES * 32 +
                        threadIdx.x % 32};

    const bool tile_in_block = block_shift >= 4;
    const float to_exponent = scale * LOG2_E;
    for (uint32_t part = blockIdx.x; part < num_parts; part += gridDim.x) {
        const uint32_t named = load_input(parts + part);
        const uint32_t index = named >> TUTTI_PART_SHIFT;
        const uint32_t split = named & ((1u << TUTTI_PART_SHIFT) - 1);
        const Single seq(seqs, index);
        const Splits splits(seq.context_len, window, max_splits, least_split);
        const uint32_t first = splits.aligned + split * splits.len;
        const uint32_t end = first + splits.len < splits.end ? first + splits.len : splits.end;
        const Pages pages = {block_tables + seq.table_start, num_kv_heads, kv_head,
                             block_shift};
        float sums[SETS][8][4] = {};
        Running row[2];
        // Of FP8.
        uint32_t nans = 0;

        // Looked up one iteration ahead, so that K and V need not wait for it.
        const auto block_of = [&](uint32_t tile) {
            return tile_in_block && tile < end ? pages.block(tile >> block_shift) : 0;
        };
        uint32_t next_block = block_of(first + warp * TILE);
        const bool is_first = part == blockIdx.x;
        if (is_first && tile_in_block && first + warp * TILE < end && threadIdx.x % 32 == 0) {
            const uint32_t tile = first + warp * TILE;
            const uint32_t tokens = end - tile < TILE ? end - tile : TILE;
            const size_t at = (pages.start_of(next_block) + pages.in_block(tile)) * HEAD_DIM;
            prefetch(k_cache + at, tokens * HEAD_DIM * sizeof(Kv));
            prefetch(v_cache + at, tokens * HEAD_DIM * sizeof(Kv));
        }
        if (is_first) {
            wait_for_predecessors();
        }

        // Reads a token inside the range in place of those outside, which can hold anything.
        const auto token = [&](uint32_t tile, size_t start, uint32_t i) {
            uint32_t position = tile + i;
            position = position < splits.start ? splits.start : position;
            position = position < end ? position : end - 1;
            return (tile_in_block ? start + pages.in_block(position) : pages.token(position)) *
                   HEAD_DIM;
        };
        // One group of copies each, even if there is nothing left to copy, because waits count
        // groups.
        const auto copy_k = [&](uint32_t tile, size_t start) {
            if (tile < end) {
#pragma unroll
                for (uint32_t part = 0; part < 2; part++) {
                    const Kv* k_row = k_cache + token(tile, start, g + 8 * part) + 8 * t;
#pragma unroll
                    for (int i = 0; i < Row<HEAD_DIM>::FULL; i++) {
                        copy_piece(ahead.k(part, i), k_row + 32 * i, true);
                    }
                }
            }
            commit_copies();
        };
        const auto copy_v = [&](uint32_t tile, size_t start) {
            if (tile < end) {
#pragma unroll
                for (uint32_t i = 0; i < 4; i++) {
                    const Kv* v_row =
                        v_cache + token(tile, start, 2 * t + i % 2 + i / 2 * 8);
#pragma unroll
                    for (uint32_t set = 0; set < SETS; set++) {
                        const uint32_t dim = 64 * set + 8 * g;
                        const bool is_there = HEAD_DIM % 64 == 0 || dim < HEAD_DIM;
                        copy_piece(ahead.v(set, i), v_row + (is_there ? dim : 0), is_there);
                    }
                }
            }
            commit_copies();
        };
        size_t this_start = pages.start_of(next_block);
        if (Next::V) {
            if (!is_first) {
                // Other threads may still be reading the previous part's sums there.
                __syncthreads();
            }
            next_block = block_of(first + (WARPS + warp) * TILE);
            if (Next::K) {
                copy_k(first + warp * TILE, this_start);
            }
            copy_v(first + warp * TILE, this_start);
        }

        const tutti_bf16* q_row =
            q + (static_cast<size_t>(seq.row) * num_heads + first_head) * HEAD_DIM;
        if (sinks != nullptr && split == 0 && warp == 0) {
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                const uint32_t r = g + 8 * half;
                if (r < heads) {
                    row[half].begin(load_constant(sinks + first_head + r), t == 0);
                }
            }
        }
        const Queries<HEAD_DIM> queries(q_row, heads);
        for (uint32_t tile = first + warp * TILE; tile < end; tile += WARPS * TILE) {
            const uint32_t next = tile + WARPS * TILE;
            const size_t next_start = pages.start_of(next_block);
            const size_t start = Next::V ? this_start : next_start;
            next_block = block_of(Next::V ? next + WARPS * TILE : next);
            Row<HEAD_DIM, Kv> k[2];
            Piece v[SETS][4];
            if (Next::K) {
                // Waits for everything but V.
                wait_copies<1>();
#pragma unroll
                for (int i = 0; i < Row<HEAD_DIM>::FULL; i++) {
                    k[0].full[i] = *ahead.k(0, i);
                    k[1].full[i] = *ahead.k(1, i);
                }
            } else {
                k[0].load(k_cache + token(tile, start, g), t);
                k[1].load(k_cache + token(tile, start, g + 8), t);
            }
            if (!Next::V) {
#pragma unroll
                for (uint32_t i = 0; i < 4; i++) {
                    const Kv* v_row =
                        v_cache + token(tile, start, 2 * t + i % 2 + i / 2 * 8);
#pragma unroll
                    for (int set = 0; set < SETS; set++) {
                        const uint32_t dim = 64 * set + 8 * g;
                        make_zero(v[set][i]);
                        if (HEAD_DIM % 64 == 0 || dim < HEAD_DIM) {
                            v[set][i] = load_once(v_row + dim);
                        }
                    }
                }
            }
            float scores[2][4] = {};
            queries.add_scores(scores, k);
            if (Stored<Kv>::IS_FP8) {
#pragma unroll
                for (int i = 0; i < Row<HEAD_DIM>::FULL; i++) {
                    nans |= nans_in(k[0].full[i]) | nans_in(k[1].full[i]);
                }
            }
            if (Next::K) {
                copy_k(next, next_start);
            }
            if (cap != 0.0f) {
                cap_scores(scores[0], scale, cap);
                cap_scores(scores[1], scale, cap);
            }
#pragma unroll
            for (uint32_t part = 0; part < 2; part++) {
#pragma unroll
                for (uint32_t i = 0; i < 4; i++) {
                    const uint32_t position = tile + 8 * part + 2 * t + i % 2;
                    const bool seen = position >= splits.start && position < end;
                    scores[part][i] = seen ? scores[part][i] * to_exponent : NOTHING;
                }
            }
            // Rows g and g + 8. p: columns 2t, 2t+1 of the tile's first 8 tokens, then of its last
            // 8.
            uint32_t p[2][2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float* s0 = &scores[0][2 * half];
                float* s1 = &scores[1][2 * half];
                const float most = quad_max(fmaxf(fmaxf(s0[0], s0[1]), fmaxf(s1[0], s1[1])));
                const float factor = row[half].raise(most);
                const float base = row[half].base();
                p[half][0] = pack_bf16(exp2_fast(s0[0] - base), exp2_fast(s0[1] - base));
                p[half][1] = pack_bf16(exp2_fast(s1[0] - base), exp2_fast(s1[1] - base));
                row[half].sum += (low_bf16(p[half][0]) + high_bf16(p[half][0])) +
                                 (low_bf16(p[half][1]) + high_bf16(p[half][1]));
#pragma unroll
                for (int set = 0; set < SETS; set++) {
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        sums[set][j][2 * half] *= factor;
                        sums[set][j][2 * half + 1] *= factor;
                    }
                }
            }
            const uint32_t a[4] = {p[0][0], p[1][0], p[0][1], p[1][1]};
            if (Next::V) {
                // Waits for everything but the next K.
                wait_copies<Next::K ? 1 : 0>();
            }
#pragma unroll
            for (int set = 0; set < SETS; set++) {
                if (Next::V) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        v[set][i] = *ahead.v(set, i);
                    }
                }
                if (Stored<Kv>::IS_FP8) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        nans |= nans_in(v[set][i]);
                    }
                }
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    mma_bf16(sums[set][j], a, pair_of(v[set][0], v[set][1], j),
                             pair_of(v[set][2], v[set][3], j));
                }
            }
            if (Next::V) {
                copy_v(next, next_start);
                this_start = next_start;
            }
        }

        if (Stored<Kv>::IS_FP8 && __any_sync(ALL_LANES, (nans & FP8_NANS) != 0)) {
            row[0].sum = row[1].sum = NAN;
        }
        // Combines the warps' results, once those of the previous part have been read.
        __syncthreads();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float sum = quad_sum(row[half].sum);
            if (t == 0) {
                maxima[warp * 16 + g + 8 * half] = row[half].maximum;
                totals[warp * 16 + g + 8 * half] = sum;
            }
        }
        __syncthreads();
        const size_t first_slot = static_cast<size_t>(index) * num_heads + first_head;
        // For a head: the largest exponent of all warps, and the sum of weights relative to it.
        const auto maximum_of = [&](uint32_t r) {
            float most = NOTHING;
#pragma unroll
            for (uint32_t w = 0; w < WARPS; w++) {
                most = fmaxf(most, maxima[w * 16 + r]);
            }
            return most;
        };
        const auto total_of = [&](uint32_t r, float most) {
            float sum = 0.0f;
#pragma unroll
            for (uint32_t w = 0; w < WARPS; w++) {
                const float m = maxima[w * 16 + r];
                sum += m == NOTHING ? 0.0f : totals[w * 16 + r] * exp2_fast(m - most);
            }
            return sum;
        };
        // A function instead of a loop over pieces, which would cost narrow heads 56 more
        // registers.
        const auto put_together = [&](const uint32_t piece) {
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                const uint32_t r = g + 8 * half;
                float most = NOTHING;
#pragma unroll
                for (uint32_t w = 0; w < WARPS; w++) {
                    most = fmaxf(most, maxima[w * 16 + r]);
                }
                const float factor = most == NOTHING ? 0.0f : exp2_fast(row[half].maximum - most);
                if (r < heads) {
#pragma unroll
                    for (int set = 0; set < static_cast<int>(PIECE_SETS); set++) {
#pragma unroll
                        for (int j = 0; j < 8; j++) {
                            const uint32_t dim = In::dim_of(set, t, j);
                            if (HEAD_DIM % 64 == 0 || dim < HEAD_DIM) {
                                mixed[In::at(warp * 16 + r, dim)] =
                                    sums[piece * PIECE_SETS + set][j][2 * half] * factor;
                            }
                            if (HEAD_DIM % 64 == 0 || dim + 8 < HEAD_DIM) {
                                mixed[In::at(warp * 16 + r, dim + 8)] =
                                    sums[piece * PIECE_SETS + set][j][2 * half + 1] * factor;
                            }
                        }
                    }
                }
            }
            __syncthreads();
            for (uint32_t i = threadIdx.x; i < heads * PIECE; i += WARPS * 32) {
                const uint32_t r = i / PIECE;
                float sum = 0.0f;
#pragma unroll
                for (uint32_t w = 0; w < WARPS; w++) {
                    sum += mixed[In::at(w * 16 + r, i % PIECE)];
                }
                if (splits.count == 1) {
                    const size_t row = static_cast<size_t>(seq.row) * num_heads + first_head + r;
                    out[row * HEAD_DIM + piece * PIECE + i % PIECE] =
                        to_bf16(sum / total_of(r, maximum_of(r)));
                } else {
                    const size_t slot = (first_slot + r) * max_splits + split;
                    partial_out[slot * HEAD_DIM + piece * PIECE + i % PIECE] = sum;
                }
            }
        };
        put_together(0);
        if (IS_WIDE) {
            // The first piece has been summed.
            __syncthreads();
            put_together(1);
        }
        if (splits.count != 1 && threadIdx.x < heads) {
            const uint32_t r = threadIdx.x;
            const float most = maximum_of(r);
            const size_t slot = (first_slot + r) * max_splits + split;
            partial_ml[2 * slot] = most;
            partial_ml[2 * slot + 1] = total_of(r, most);
        }
    }
}

}  // namespace
}  // namespace tutti

// `blocks` run at a time on a multiprocessor: the host launches as many.
#define DECODE(name, kv, head_dim, blocks)                                                         \
    extern "C" __global__ void __launch_bounds__(128, blocks)                                      \
        tutti_decode_attention_##name(const tutti_bf16* q, const kv* k_cache, const kv* v_cache,   \
                                      TUTTI_DECODE_ARGUMENTS) {                                    \
        tutti::decode<head_dim, kv>(q, k_cache, v_cache, seqs, parts, block_tables, partial_out,   \
                                    partial_ml, out, num_heads, num_kv_heads, block_shift, window, \
                                    max_splits, least_split, scale, cap, sinks, live);             \
    }
DECODE(16, tutti_bf16, 16, 5)
DECODE(32, tutti_bf16, 32, 5)
DECODE(64, tutti_bf16, 64, 4)
DECODE(96, tutti_bf16, 96, 3)
DECODE(128, tutti_bf16, 128, 3)
DECODE(256, tutti_bf16, 256, 2)
DECODE(fp8_64, tutti_fp8, 64, 4)
DECODE(fp8_96, tutti_fp8, 96, 3)
DECODE(fp8_128, tutti_fp8, 128, 3)
DECODE(fp8_256, tutti_fp8, 256, 2)
