/* Every kernel that a host may launch: the one list of entry points, their arguments and limits.
 *
 * A host mirrors the structs below field by field and passes the arguments in this order. All
 * pointers are device memory unless an entry says otherwise. Strides count elements.
 *
 * Rules that hold for every kernel
 * - `bf16` is 16 raw bits. Weights, K, V and the inputs of matrix products are bf16; the residual
 *   stream, results of matrix products, norms, biases, tables and logits are f32. Sums are f32
 *   (tensor cores), except where an entry says f64.
 * - Pointers are 16-byte aligned, and so are rows where an entry says `rows 16-byte aligned`:
 *   the stride is a multiple of 8 (bf16) or 4 (f32). Padding up to it must be readable and is
 *   never used.
 * - `live`: null, or a word in device memory. Items (rows, tiles, sequences) at or beyond `*live`
 *   are skipped: nothing of theirs is read or written. So a captured graph serves any number of
 *   items up to its grid.
 * - Arguments that change from step to step are read from device memory, so every launch can be
 *   captured in a graph.
 * - A result depends on its own row or sequence, the shapes of weights and constants of the model:
 *   never on what else is in the batch, on the grid, or on the order of blocks.
 * - Every kernel begins by releasing the next and waiting for those before it (griddepcontrol): each
 *   block that does anything, and one at least of every grid, so it is complete after those. So
 *   launches may have the attribute programmatic-stream-serialization. Without it, and before
 *   sm_90, that does nothing. Read before the wait are constants of the model (weights, norms, tables)
 *   and what the host gives a step: `live`, positions, slots, sequences, items, parts, block tables,
 *   rows' numbers. So no kernel may write those, and a copy that does must be complete before the first
 *   kernel behind it begins. Tokens, which a kernel may write, are read behind the wait.
 * - Rows, of which a step may have more than 65535, are the grid's x.
 * - Static shared memory is not listed. `shared` is the dynamic shared memory to launch with; above
 *   48 KiB the host must raise the function's limit first.
 */
#pragma once
#include <stdint.h>

/* 16 raw bits in every interface; `device.cuh` computes with them. */
typedef uint16_t tutti_bf16;

/* One sequence's rows in a step: `kernels::backend::SeqRows`. 20 bytes. */
typedef struct {
    uint32_t row_start;   /* first row */
    uint32_t num_rows;    /* rows, at least 1 */
    uint32_t context_len; /* tokens in the cache, this step's included: at least num_rows */
    uint32_t table_start; /* where its block table begins in `block_tables` */
    uint32_t table_len;   /* blocks in it */
} TuttiSeq;

/* A tile of 64 queries of one sequence and KV head. Query p of a KV head is the head p % group of
 * the sequence's row p / group, where group = num_heads / num_kv_heads. 8 bytes. */
typedef struct {
    uint32_t seq;   /* index into `seqs` */
    uint32_t first; /* first query: a multiple of 64 below num_rows * group */
} TuttiTile;

/* 8 bytes. */
typedef struct {
    uint32_t id;
    float value;
} TuttiIdValue;

/* `kernels::sampling::SampleParams` and `SampleRow` of one row. 88 bytes, aligned to 8. */
typedef struct {
    uint64_t seed;
    float temperature; /* <= 0: greedy */
    float top_p;       /* >= 1: off */
    float min_p;       /* 0: off */
    uint32_t top_k;    /* 0: off */
    uint32_t choice;
    uint32_t position; /* number of output tokens: first word of the Philox counter */
    float presence_penalty;
    float frequency_penalty;
    float repetition_penalty;    /* 1: off */
    uint32_t bias_start;         /* into `biases` */
    uint32_t bias_len;           /* at most TUTTI_BIAS_MAX */
    uint32_t suppress_start;     /* into `ids`; the host gives length 0 once min_tokens exist */
    uint32_t suppress_len;
    uint32_t prompt_start;       /* into `ids`; length 0 where no penalty needs it */
    uint32_t prompt_len;
    uint32_t output_start;       /* into `ids` */
    uint32_t output_len;
    uint32_t top_n;              /* most likely tokens wanted; TUTTI_NO_LOGPROBS: nothing */
    uint32_t mask_start;         /* into `masks`; TUTTI_NO_MASK: every token may be chosen */
    uint32_t reserved;
} TuttiSampleParams;

/* `kernels::sampling::Sampled` without its list. 16 bytes. */
typedef struct {
    uint32_t token;     /* 0 when corrupted */
    uint32_t corrupted; /* 1: a logit is NaN or +infinity, or all are -infinity */
    float logprob;      /* 0 unless asked for */
    uint32_t rank;      /* 1-based; 0 unless asked for */
} TuttiSampled;

/* Ranks of a group that see each other's memory; the table is in each rank's own, made before the
 * first launch and never written by kernels. 192 bytes, aligned to 8. Addresses are those of this
 * rank's address space. `blocks` is the largest grid. */
#define TUTTI_PEERS_MAX 8u
typedef struct {
    uint64_t slots[8];  /* rank r's slots: f32 [2, blocks, ranks, slot] */
    uint64_t flags[8];  /* rank r's flags: u64 [blocks, ranks], 0 at first, never set back */
    uint64_t rounds;    /* u64 [blocks], 0 at first: how many exchanges each block has made */
    uint64_t failed;    /* u32, 0 at first; once it is not, launches do nothing */
    uint64_t abort;     /* u32 in host memory, 0 at first: the host ends all waiting by another */
    uint64_t outcome;   /* u32 in host memory, 0 at first: TUTTI_PEERS_* of what went wrong */
    uint64_t spin_ns;   /* how long a block waits for one exchange */
    uint32_t rank;
    uint32_t ranks;     /* 2, 4 or 8 */
    uint32_t slot;      /* f32 elements of a slot: a multiple of 4 */
    uint32_t blocks;
    uint64_t reserved;
} TuttiPeers;
/* Outcomes: which of them, and the rank that was waited for in the lower 8 bits. */
#define TUTTI_PEERS_ABORTED 0x100u
#define TUTTI_PEERS_TIMEOUT 0x200u

/* Some slots of one expert: slots[first .. first + slots]. 12 bytes. */
typedef struct {
    uint32_t expert;
    uint32_t first;
    uint32_t slots; /* at least 1, at most as many as the product's variant takes */
} TuttiExpertTile;
/* Experts of a layer; of a row's. */
#define TUTTI_EXPERTS_MAX 1024u
/* Of a row that goes to no matrix: NOT_ASSIGNED of kernels::backend. */
#define TUTTI_NOT_ASSIGNED 0xffffffffu
#define TUTTI_TOP_EXPERTS_MAX 32u

#define TUTTI_NO_LOGPROBS 0xffffffffu
#define TUTTI_NO_MASK 0xffffffffu
#define TUTTI_NO_ROW 0xffffffffu
/* In place of a token's id. */
#define TUTTI_CORRUPTED 0xffffffffu
#define TUTTI_NOTHING_ALLOWED 0xfffffffeu
#define TUTTI_BIAS_MAX 1024u
/* Most likely tokens per row. */
#define TUTTI_TOP_MAX 128u
/* Vocabulary, whole: weights of sampling are summed as integers that this bounds. */
#define TUTTI_VOCAB_MAX (1u << 20)

/* Queries per tile of prefill attention; its shared memory in bytes. */
#define TUTTI_PREFILL_QUERIES 64u
#define TUTTI_PREFILL_SHARED(head_dim) (320u * 2u * (head_dim))
/* How the parts of decode attention are named. */
#define TUTTI_PART_SHIFT 8u
/* Query heads that one block of decode attention computes; blocks per KV head. */
#define TUTTI_DECODE_HEADS 16u
#define TUTTI_DECODE_BLOCKS(group) (((group) + 15u) / 16u)

#if defined(__cplusplus)
extern "C" {
#if !defined(__CUDACC__)
#define __global__
#endif

/* ---- elementwise.cu ------------------------------------------------------------------------ */

/* out[i] = table[ids[i] - first_id] * scale, or zeros where that row is not on this rank.
 * ids u32 [rows]; table bf16 [table_rows, table_stride]; out f32 [rows, width] contiguous.
 * grid (rows), block 256. */
__global__ void tutti_embed(const uint32_t* ids, const tutti_bf16* table, float* out, uint32_t width,
                            uint32_t table_stride, uint32_t first_id, uint32_t table_rows,
                            float scale, const uint32_t* live);

/* residual += delta (where not null); out = residual / rms(residual) * weight.
 * residual f32 [rows, width], in and out; delta f32 [rows, width] or null; weight f32 [width];
 * out bf16 [rows, out_stride]; residual and delta contiguous. grid (rows), block 512. */
__global__ void tutti_add_rmsnorm(float* residual, const float* delta, const float* weight,
                                  tutti_bf16* out, uint32_t width, uint32_t out_stride, float eps,
                                  const uint32_t* live);

/* residual += delta / rms(delta) * delta_weight; out = residual / rms(residual) * weight. As above;
 * delta_weight f32 [width]. grid (rows), block 512. */
__global__ void tutti_add_normed_rmsnorm(float* residual, const float* delta,
                                         const float* delta_weight, const float* weight,
                                         tutti_bf16* out, uint32_t width, uint32_t out_stride,
                                         float eps, const uint32_t* live);

/* out = a(gate) * up, where input row = gate ++ up, each `inner` wide, plus `bias` (f32
 * [2 * inner], or null), and a is SiLU, or GELU by its approximation with tanh where `gelu` is not 0.
 * input [rows, 2 * inner] contiguous, f32;
 * out bf16 [rows, out_stride]. grid (rows, ceil(inner / 1024)), block 256; `live` counts rows. */
__global__ void tutti_activate_mul_f32(const float* input, const float* bias, tutti_bf16* out,
                                       uint32_t inner, uint32_t out_stride, uint32_t gelu,
                                       const uint32_t* live);

/* data += bias, per row. data f32 [rows, width] contiguous; bias f32 [width].
 * grid (rows, ceil(width / 1024)), block 256; `live` counts rows. */
__global__ void tutti_add_bias(float* data, const float* bias, uint32_t width, const uint32_t* live);

/* data = data * scales + bias, per row: what the sums of int8 weights become. data f32 [rows, width]
 * contiguous; scales f32 [width]; bias f32 [width] or null.
 * grid (rows, ceil(width / 1024)), block 256; `live` counts rows. */
__global__ void tutti_scale_add_bias(float* data, const float* scales, const float* bias,
                                     uint32_t width, const uint32_t* live);

/* out = w - 128, exactly: int8 weights, as tutti_skinny_int8_8 takes them, for products that take
 * bf16. w u8, out bf16, both [rows, stride], the stride a multiple of 16.
 * grid (rows, ceil(stride / 4096)), block 256. */
__global__ void tutti_widen_int8(const uint8_t* w, tutti_bf16* out, uint32_t stride);

/* out = (integer - zero) * scale, rounded: weights of 4 bits, as tutti_skinny_int4_8 takes them. out
 * bf16 [rows, stride], `k` of each row, zeros behind them. grid (rows, ceil(stride / 8192)), block 256. */
__global__ void tutti_widen_int4(const uint8_t* w, const uint32_t* groups, tutti_bf16* out,
                                 uint32_t stride, uint32_t k, uint32_t shift);

/* sum += other, both f32 [rows, width] contiguous. grid (rows, ceil(width / 1024)), block 256;
 * `live` counts rows. */
__global__ void tutti_add(float* sum, const float* other, uint32_t width, const uint32_t* live);

/* out = the sum of `ranks` arrays [rows, width] that lie one behind the other, `part_stride`
 * elements apart, as a binary tree over the ranks in order: (0 + 1) + (2 + 3). f32; ranks 1 to 64;
 * out may be the first of the arrays. grid (rows, ceil(width / 1024)), block 256; `live`: rows. */
__global__ void tutti_tree_sum(const float* parts, float* out, uint32_t ranks, uint64_t part_stride,
                               uint32_t width, const uint32_t* live);

/* out[i] = in[rows[i]], or as it was where rows[i] is TUTTI_NO_ROW. in, out bf16 [.., width], rows
 * `stride` apart; rows u32 [n].
 * grid (n, ceil(width / 1024)), block 256; `live` counts n. */
__global__ void tutti_gather_rows(const tutti_bf16* in, const uint32_t* rows, tutti_bf16* out,
                                  uint32_t width, uint32_t in_stride, uint32_t out_stride,
                                  const uint32_t* live);

/* out = in[.., first .. first + width]: makes a product over some of the columns possible where
 * `first` is not a multiple of 8. bf16. grid (rows, ceil(width / 1024)), block 256; `live`: rows. */
__global__ void tutti_copy_columns(const tutti_bf16* in, tutti_bf16* out, uint32_t first,
                                   uint32_t width, uint32_t in_stride, uint32_t out_stride,
                                   const uint32_t* live);

/* full[row, rank * width + i] = gathered[rank][row][i], f32: logits gathered from all ranks become
 * rows. `gathered` is [ranks, rows, width]. grid (rows, ceil(width / 1024), ranks), block 256.
 * `rows` is the number of rows gathered, grid or not; `live` counts rows. */
__global__ void tutti_interleave_ranks(const float* gathered, float* full, uint32_t rows,
                                       uint32_t width, uint32_t full_stride, const uint32_t* live);

/* Reads `n` times 16 bytes, and writes what shows that it did: out[i] is the exclusive or of the words
 * that warp i reads, i < 8 ceil(n / 2048). What a GPU's memory gives is measured by it.
 * grid (ceil(n / 2048)), block 256. */
__global__ void tutti_read(const uint32_t* from, uint32_t* out, uint32_t n);

/* to[i] = from[i], i < words, not before `delay` nanoseconds have passed; the kernel behind it may begin
 * at once. For tests: one that reads `to` before it has waited finds what was there before.
 * grid any, block 256. */
__global__ void tutti_late(const uint32_t* from, uint32_t* to, uint64_t words, uint64_t delay);

/* ---- all_reduce.cu --------------------------------------------------------------------------
 * Exchange between GPUs that see each other's memory. Every rank launches the same entries with the
 * same sizes and grids in the same order, each on one stream; grids up to `peers->blocks`, all of
 * whose blocks must be able to run at once, beside those of other ranks on the same GPU. Sums are
 * f32, as a binary tree over the ranks: (0 + 1) + (2 + 3), the same bits on every rank, and those
 * of tutti_tree_sum. No launch waits longer than `peers->spin_ns` for another rank: then, or when
 * the host sets *abort, it sets *outcome, leaves, and all later ones do nothing. Results are
 * undefined once *outcome is not 0. A launch changes nothing that the host would have to renew, so
 * graphs can replay it. */

/* data = the sum of all ranks' data. data f32 [count]. One exchange: every rank sends all to all.
 * grid (any), block: a multiple of 32 from 32 to 512. */
__global__ void tutti_peer_sum(const TuttiPeers* peers, float* data, uint64_t count);

/* The same in two exchanges: every rank adds up its part, and sends it to all. */
__global__ void tutti_peer_sum_two_shot(const TuttiPeers* peers, float* data, uint64_t count);

/* data = the sum of all ranks' data, then residual += data; out = residual / rms(residual) * weight:
 * the bits of tutti_peer_sum and tutti_add_rmsnorm, except that data is left as it is.
 * data f32 [rows, width] contiguous, width a multiple of 4 and at most `peers->slot`; the others
 * as for tutti_add_rmsnorm. grid (any), block 512. */
__global__ void tutti_peer_sum_add_rmsnorm(const TuttiPeers* peers, const float* data,
                                           float* residual, const float* weight, tutti_bf16* out,
                                           uint32_t width, uint32_t out_stride, float eps,
                                           uint32_t rows, const uint32_t* live);

/* all[r * count ..] = rank r's local. local f32 [count]; all f32 [ranks, count].
 * grid (any), block: a multiple of 32 from 32 to 512. */
__global__ void tutti_peer_gather(const TuttiPeers* peers, const float* local, float* all,
                                  uint64_t count);

/* ---- qkv.cu ---------------------------------------------------------------------------------
 * The cache of one layer is two arrays, K and V, bf16 [num_blocks, num_kv_heads, block_size,
 * head_dim], block_size = 1 << block_shift. A slot is block * block_size + offset. */

/* What follows the fused QKV product: bias (f32 [width], or null), RMSNorm per q and k head
 * (q_norm, k_norm: f32 [head_dim], or null), RoPE (cos, sin: f32 [positions, head_dim / 2]), K and
 * V to the cache, q to q_out.
 * qkv f32 [rows, (num_heads + 2 * num_kv_heads) * head_dim] contiguous: q, k, v;
 * positions, slots u32 [rows]; q_out bf16 [rows, num_heads * head_dim] contiguous.
 * head_dim even, at most 256. grid (rows, ceil((num_heads + 2 * num_kv_heads) / 8)), block 256. */
__global__ void tutti_qkv_finish(const float* qkv, const float* bias, const float* q_norm,
                                 const float* k_norm, const float* cos, const float* sin,
                                 const uint32_t* positions, const uint32_t* slots,
                                 tutti_bf16* q_out, tutti_bf16* k_cache, tutti_bf16* v_cache,
                                 uint32_t num_heads, uint32_t num_kv_heads, uint32_t head_dim,
                                 uint32_t block_shift, float eps, const uint32_t* live);

/* ---- attention_prefill.cu -------------------------------------------------------------------
 * Causal attention of every row over its sequence's K and V, on tensor cores. q and out bf16
 * [rows, num_heads * head_dim] contiguous. Row i of a sequence is at position context_len -
 * num_rows + i. `window`: attend to the last `window` tokens, the current one included; 0: to all.
 * `scale` is 1 / sqrt(head_dim). sinks f32 [num_heads] or null: a score, not scaled, of a token besides
 * without V, which is in the sum that weights are divided by. Writes the rows of the tiles named.
 * tiles: any order, longest first is best; `live` counts tiles.
 * grid (tiles, num_kv_heads), block 128, shared TUTTI_PREFILL_SHARED(head_dim). */
#define TUTTI_PREFILL_ARGUMENTS                                                                    \
    const tutti_bf16 *q, const tutti_bf16 *k_cache, const tutti_bf16 *v_cache,                     \
        const TuttiSeq *seqs, const TuttiTile *tiles, const uint32_t *block_tables,                \
        tutti_bf16 *out, uint32_t num_heads, uint32_t num_kv_heads, uint32_t block_shift,          \
        uint32_t window, float scale, const float *sinks, const uint32_t *live
__global__ void tutti_prefill_attention_16(TUTTI_PREFILL_ARGUMENTS);
__global__ void tutti_prefill_attention_32(TUTTI_PREFILL_ARGUMENTS);
__global__ void tutti_prefill_attention_64(TUTTI_PREFILL_ARGUMENTS);
__global__ void tutti_prefill_attention_96(TUTTI_PREFILL_ARGUMENTS);
__global__ void tutti_prefill_attention_128(TUTTI_PREFILL_ARGUMENTS);
__global__ void tutti_prefill_attention_256(TUTTI_PREFILL_ARGUMENTS);

/* ---- attention_decode.cu --------------------------------------------------------------------
 * The same for sequences with one row, whose tokens are split into parts, each with a partial result,
 * which a second kernel puts together. The split depends on the sequence's length, the window,
 * `max_splits` and `least_split` alone: `max_splits` is a constant of the model (64 is good, 128 the
 * most); `least_split`, a multiple of 64, is the host's choice by how many sequences there are, and the
 * one thing by which a result may depend on the batch. With n = the tokens from the first visible one,
 * rounded down to a multiple of 16, to the last:
 * split_len = max(least_split, round_up(ceil(n / max_splits), 16)),
 * splits = ceil(n / split_len) <= max_splits.
 * parts u32 [*live]: index into `seqs` << TUTTI_PART_SHIFT | number of the split, each split of each
 * such sequence once, in any order, parts of long splits first is best. A block computes every
 * gridDim.x-th part, so grid.x may be anything; as many blocks as run at once are best. `live` counts
 * parts and is not null.
 * partial_out f32 [seqs, num_heads, max_splits, head_dim];
 * partial_ml f32 [seqs, num_heads, max_splits, 2]: maximum (of base-2 exponents) and sum, a sink's
 * weight in the first split's. A sequence of one split has no partial result: its row of out is written at once.
 * attention: grid (any, num_kv_heads * TUTTI_DECODE_BLOCKS(group)), block 128.
 * reduce: items u32 [n]: indices into `seqs`, readable for the whole grid; `live` counts items.
 * grid (num_heads, n), block 128; any head_dim. */
#define TUTTI_DECODE_ARGUMENTS                                                                     \
    const tutti_bf16 *q, const tutti_bf16 *k_cache, const tutti_bf16 *v_cache,                     \
        const TuttiSeq *seqs, const uint32_t *parts, const uint32_t *block_tables,                 \
        float *partial_out, float *partial_ml, tutti_bf16 *out, uint32_t num_heads,                \
        uint32_t num_kv_heads, uint32_t block_shift, uint32_t window, uint32_t max_splits,         \
        uint32_t least_split, float scale, const float *sinks, const uint32_t *live
__global__ void tutti_decode_attention_16(TUTTI_DECODE_ARGUMENTS);
__global__ void tutti_decode_attention_32(TUTTI_DECODE_ARGUMENTS);
__global__ void tutti_decode_attention_64(TUTTI_DECODE_ARGUMENTS);
__global__ void tutti_decode_attention_96(TUTTI_DECODE_ARGUMENTS);
__global__ void tutti_decode_attention_128(TUTTI_DECODE_ARGUMENTS);
__global__ void tutti_decode_attention_256(TUTTI_DECODE_ARGUMENTS);
__global__ void tutti_decode_reduce(const float* partial_out, const float* partial_ml,
                                    const TuttiSeq* seqs, const uint32_t* items, tutti_bf16* out,
                                    uint32_t num_heads, uint32_t head_dim, uint32_t window,
                                    uint32_t max_splits, uint32_t least_split,
                                    const uint32_t* live);

/* ---- attention_any.cu -----------------------------------------------------------------------
 * Causal attention of any row for head dimensions without a kernel of their own (even, at most
 * 256): simple and slow. One warp per row and head. `num_seqs`: a word in device memory.
 * grid (rows, ceil(num_heads / 4)), block 128; `live` counts rows. */
__global__ void tutti_attention_any(const tutti_bf16* q, const tutti_bf16* k_cache,
                                    const tutti_bf16* v_cache, const TuttiSeq* seqs,
                                    const uint32_t* num_seqs, const uint32_t* block_tables,
                                    tutti_bf16* out, uint32_t num_heads, uint32_t num_kv_heads,
                                    uint32_t head_dim, uint32_t block_shift, uint32_t window,
                                    float scale, const float* sinks, const uint32_t* live);

/* ---- skinny.cu ------------------------------------------------------------------------------
 * out = x W^T + bias for few rows of x: streams the weights once per 64 rows. The name's number is
 * the most rows of x that one grid.y computes: take the smallest that holds all rows; the result
 * is the same bits with each.
 * x bf16 [.., x_stride], rows 16-byte aligned; w bf16 [n, w_stride], rows 16-byte aligned;
 * bias f32 [n] or null; out f32 [rows, out_stride]; `row_index` u32 [rows] or null: row i of the
 * product takes x's row row_index[i]. Any n and k of at least 1. `live` counts rows.
 * grid (ceil(n / R), ceil(rows / number)), block 256, with R = TUTTI_SKINNY_FEATURES(number). */
#define TUTTI_SKINNY_FEATURES(number) ((number) <= 16u ? 16u : 32u)
#define TUTTI_SKINNY_ARGUMENTS                                                                     \
    const tutti_bf16 *x, const tutti_bf16 *w, const float *bias, float *out,                       \
        const uint32_t *row_index, uint32_t rows, uint32_t n, uint32_t k, uint32_t x_stride,       \
        uint32_t w_stride, uint32_t out_stride, const uint32_t *live
__global__ void tutti_skinny_8(TUTTI_SKINNY_ARGUMENTS);
__global__ void tutti_skinny_16(TUTTI_SKINNY_ARGUMENTS);
__global__ void tutti_skinny_32(TUTTI_SKINNY_ARGUMENTS);
__global__ void tutti_skinny_64(TUTTI_SKINNY_ARGUMENTS);

/* The same with weights of int8: w u8 [n, w_stride], each weight plus 128, rows 16-byte aligned (the
 * stride is a multiple of 16); scales f32 [n]: out = (x W^T) * scales + bias. */
#define TUTTI_SKINNY_INT8_ARGUMENTS                                                                \
    const tutti_bf16 *x, const uint8_t *w, const float *scales, const float *bias, float *out,     \
        const uint32_t *row_index, uint32_t rows, uint32_t n, uint32_t k, uint32_t x_stride,       \
        uint32_t w_stride, uint32_t out_stride, const uint32_t *live
__global__ void tutti_skinny_int8_8(TUTTI_SKINNY_INT8_ARGUMENTS);
__global__ void tutti_skinny_int8_16(TUTTI_SKINNY_INT8_ARGUMENTS);
__global__ void tutti_skinny_int8_32(TUTTI_SKINNY_INT8_ARGUMENTS);
__global__ void tutti_skinny_int8_64(TUTTI_SKINNY_INT8_ARGUMENTS);

/* The same with weights of 4 bits: w u8 [n, w_stride / 2], rows 64-byte aligned (w_stride, in weights,
 * is a multiple of 128); 128 weights are 64 bytes, of which word 4t + j has k = 32j + 8t + 2i in its
 * bits 4i and the next k 16 bits above. groups u32 [n, ceil(k / 2^shift)], shift in 5..31: a scale in
 * f32, in whose last four bits the zero is; a weight is (integer - zero) * scale. */
#define TUTTI_SKINNY_INT4_ARGUMENTS                                                                \
    const tutti_bf16 *x, const uint8_t *w, const uint32_t *groups, const float *bias, float *out,  \
        const uint32_t *row_index, uint32_t rows, uint32_t n, uint32_t k, uint32_t x_stride,       \
        uint32_t w_stride, uint32_t out_stride, uint32_t shift, const uint32_t *live
__global__ void tutti_skinny_int4_8(TUTTI_SKINNY_INT4_ARGUMENTS);
__global__ void tutti_skinny_int4_16(TUTTI_SKINNY_INT4_ARGUMENTS);
__global__ void tutti_skinny_int4_32(TUTTI_SKINNY_INT4_ARGUMENTS);

/* out = a(x Wg^T + bg) * (x Wu^T + bu), a as of tutti_activate_mul_f32. As above with w bf16 [2 * inner, w_stride]: gate rows,
 * then up rows; bias f32 [2 * inner] or null; out bf16 [rows, out_stride].
 * grid (ceil(inner / 16), ceil(rows / number)), block 256. */
#define TUTTI_SKINNY_GATE_UP_ARGUMENTS                                                             \
    const tutti_bf16 *x, const tutti_bf16 *w, const float *bias, tutti_bf16 *out, uint32_t rows,   \
        uint32_t inner, uint32_t k, uint32_t x_stride, uint32_t w_stride, uint32_t out_stride,     \
        uint32_t gelu, const uint32_t *live
__global__ void tutti_skinny_gate_up_8(TUTTI_SKINNY_GATE_UP_ARGUMENTS);
__global__ void tutti_skinny_gate_up_16(TUTTI_SKINNY_GATE_UP_ARGUMENTS);
__global__ void tutti_skinny_gate_up_32(TUTTI_SKINNY_GATE_UP_ARGUMENTS);
__global__ void tutti_skinny_gate_up_64(TUTTI_SKINNY_GATE_UP_ARGUMENTS);

/* The same with w u8 [2 * inner, w_stride] as above, and scales f32 [2 * inner]. */
#define TUTTI_SKINNY_GATE_UP_INT8_ARGUMENTS                                                        \
    const tutti_bf16 *x, const uint8_t *w, const float *scales, const float *bias,                 \
        tutti_bf16 *out, uint32_t rows, uint32_t inner, uint32_t k, uint32_t x_stride,             \
        uint32_t w_stride, uint32_t out_stride, uint32_t gelu, const uint32_t *live
__global__ void tutti_skinny_gate_up_int8_8(TUTTI_SKINNY_GATE_UP_INT8_ARGUMENTS);
__global__ void tutti_skinny_gate_up_int8_16(TUTTI_SKINNY_GATE_UP_INT8_ARGUMENTS);
__global__ void tutti_skinny_gate_up_int8_32(TUTTI_SKINNY_GATE_UP_INT8_ARGUMENTS);
__global__ void tutti_skinny_gate_up_int8_64(TUTTI_SKINNY_GATE_UP_INT8_ARGUMENTS);

/* The same with w u8 [2 * inner, w_stride / 2] and groups u32 [2 * inner, ..] of 4 bits, as above. */
#define TUTTI_SKINNY_GATE_UP_INT4_ARGUMENTS                                                        \
    const tutti_bf16 *x, const uint8_t *w, const uint32_t *groups, const float *bias,              \
        tutti_bf16 *out, uint32_t rows, uint32_t inner, uint32_t k, uint32_t x_stride,             \
        uint32_t w_stride, uint32_t out_stride, uint32_t gelu, uint32_t shift,                     \
        const uint32_t *live
__global__ void tutti_skinny_gate_up_int4_8(TUTTI_SKINNY_GATE_UP_INT4_ARGUMENTS);
__global__ void tutti_skinny_gate_up_int4_16(TUTTI_SKINNY_GATE_UP_INT4_ARGUMENTS);
__global__ void tutti_skinny_gate_up_int4_32(TUTTI_SKINNY_GATE_UP_INT4_ARGUMENTS);

/* ---- experts.cu -----------------------------------------------------------------------------
 * A slot is one row at one of its experts: row r's expert j is slot r * top_k + j.
 * At most TUTTI_EXPERTS_MAX experts, TUTTI_TOP_EXPERTS_MAX of them for each row. */

/* The experts of the top_k largest logits, largest first, of equal ones the lowest first (what is
 * not a number comes last), and their weights: softmax over all logits, divided by the sum of the
 * chosen ones' where `normalise` is not 0. logits f32 [rows, num_experts]; experts u32, weights f32
 * [rows, top_k]. grid (rows), block 32. */
__global__ void tutti_route(const float* logits, uint32_t* experts, float* weights,
                            uint32_t num_experts, uint32_t top_k, uint32_t normalise,
                            const uint32_t* live);

/* Groups slots by their experts, `chunk_rows` rows at a time: block c makes of the slots of the
 * rows c * chunk_rows and on the tiles [c * tiles_stride ..], num_tiles[c] of them, by expert and
 * then by slot, and slots[c * chunk_rows * top_k ..], which tiles name. experts u32 [rows, top_k];
 * slots u32 [rows * top_k]; tiles_stride at least the least of a chunk's slots and its slots /
 * tile_slots + num_experts. grid (ceil(rows / chunk_rows)), block 1024; `live` counts rows. */
__global__ void tutti_group_experts(const uint32_t* experts, uint32_t* slots, TuttiExpertTile* tiles,
                                    uint32_t* num_tiles, uint32_t rows, uint32_t top_k,
                                    uint32_t num_experts, uint32_t chunk_rows, uint32_t tile_slots,
                                    uint32_t tiles_stride, const uint32_t* live);

/* out[slot] = a(x[slot / top_k] Wg^T + bg, x[slot / top_k] Wu^T + bu) for the slots of all tiles, with
 * a(g, u) = m * sigmoid(alpha * m) * (v + shift), where m = g, at most `limit`, and v = u, in
 * -limit..limit: silu(g) * u with 1, infinity, 0. bias f32 [num_experts * 2 * inner] or null. Tiles are of at most so many slots as the name's number. x bf16, rows 16-byte aligned; w bf16
 * [num_experts * 2 * inner, w_stride], rows 16-byte aligned: each expert's gate rows, then its up
 * rows; out bf16 [slots, out_stride]. A slot's result is the same bits with each variant.
 * grid (most tiles, ceil(inner / 16)), block 256. */
#define TUTTI_EXPERTS_GATE_UP_ARGUMENTS                                                            \
    const tutti_bf16 *x, const tutti_bf16 *w, tutti_bf16 *out, const uint32_t *slots,              \
        const TuttiExpertTile *tiles, const uint32_t *num_tiles, uint32_t top_k, uint32_t inner,   \
        uint32_t k, uint32_t x_stride, uint32_t w_stride, uint32_t out_stride, const float *bias,  \
        float alpha, float limit, float shift
__global__ void tutti_experts_gate_up_8(TUTTI_EXPERTS_GATE_UP_ARGUMENTS);
__global__ void tutti_experts_gate_up_16(TUTTI_EXPERTS_GATE_UP_ARGUMENTS);
__global__ void tutti_experts_gate_up_32(TUTTI_EXPERTS_GATE_UP_ARGUMENTS);
__global__ void tutti_experts_gate_up_64(TUTTI_EXPERTS_GATE_UP_ARGUMENTS);

/* The same with weights of int8: see tutti_skinny_int8_8. w u8 [num_experts * 2 * inner, w_stride],
 * scales f32 [num_experts * 2 * inner]. */
#define TUTTI_EXPERTS_GATE_UP_INT8_ARGUMENTS                                                       \
    const tutti_bf16 *x, const uint8_t *w, const float *scales, tutti_bf16 *out,                   \
        const uint32_t *slots, const TuttiExpertTile *tiles, const uint32_t *num_tiles,            \
        uint32_t top_k, uint32_t inner, uint32_t k, uint32_t x_stride, uint32_t w_stride,          \
        uint32_t out_stride, const float *bias, float alpha, float limit, float shift
__global__ void tutti_experts_gate_up_int8_8(TUTTI_EXPERTS_GATE_UP_INT8_ARGUMENTS);
__global__ void tutti_experts_gate_up_int8_16(TUTTI_EXPERTS_GATE_UP_INT8_ARGUMENTS);
__global__ void tutti_experts_gate_up_int8_32(TUTTI_EXPERTS_GATE_UP_INT8_ARGUMENTS);
__global__ void tutti_experts_gate_up_int8_64(TUTTI_EXPERTS_GATE_UP_INT8_ARGUMENTS);

/* out[slot - first_slot] = x[slot] W^T + bias for the slots of all tiles. x bf16 [slots, x_stride], w
 * bf16 [num_experts * n, w_stride], rows 16-byte aligned; bias f32 [num_experts * n] or null; out f32
 * [.., out_stride].
 * grid (most tiles, ceil(n / R)), block 256, with R = TUTTI_SKINNY_FEATURES(number). */
#define TUTTI_EXPERTS_DOWN_ARGUMENTS                                                               \
    const tutti_bf16 *x, const tutti_bf16 *w, float *out, const uint32_t *slots,                   \
        const TuttiExpertTile *tiles, const uint32_t *num_tiles, uint32_t first_slot, uint32_t n,  \
        uint32_t k, uint32_t x_stride, uint32_t w_stride, uint32_t out_stride, const float *bias
__global__ void tutti_experts_down_8(TUTTI_EXPERTS_DOWN_ARGUMENTS);
__global__ void tutti_experts_down_16(TUTTI_EXPERTS_DOWN_ARGUMENTS);
__global__ void tutti_experts_down_32(TUTTI_EXPERTS_DOWN_ARGUMENTS);
__global__ void tutti_experts_down_64(TUTTI_EXPERTS_DOWN_ARGUMENTS);

/* The same with weights of int8: w u8 [num_experts * n, w_stride], scales f32 [num_experts * n]. */
#define TUTTI_EXPERTS_DOWN_INT8_ARGUMENTS                                                          \
    const tutti_bf16 *x, const uint8_t *w, const float *scales, float *out, const uint32_t *slots, \
        const TuttiExpertTile *tiles, const uint32_t *num_tiles, uint32_t first_slot, uint32_t n,  \
        uint32_t k, uint32_t x_stride, uint32_t w_stride, uint32_t out_stride, const float *bias
__global__ void tutti_experts_down_int8_8(TUTTI_EXPERTS_DOWN_INT8_ARGUMENTS);
__global__ void tutti_experts_down_int8_16(TUTTI_EXPERTS_DOWN_INT8_ARGUMENTS);
__global__ void tutti_experts_down_int8_32(TUTTI_EXPERTS_DOWN_INT8_ARGUMENTS);
__global__ void tutti_experts_down_int8_64(TUTTI_EXPERTS_DOWN_INT8_ARGUMENTS);

/* out[r] = sum over j, in order, of weights[r, j] * parts[r, j]. parts f32 [rows, top_k, width],
 * weights f32 [rows, top_k], out f32 [rows, width]. grid (rows, ceil(width / 1024)), block 256;
 * `live` counts rows from `first_row` before the first of these on. */
__global__ void tutti_experts_sum(const float* parts, const float* weights, float* out,
                                  uint32_t top_k, uint32_t width, uint32_t first_row,
                                  const uint32_t* live);

/* out[r] = parts[r] where row r went to a matrix (experts[r] is not TUTTI_NOT_ASSIGNED), else 0: of
 * rows with one slot each, whose matrices others chose. parts f32 [rows, width], experts u32 [rows],
 * out f32 [rows, width]. grid (rows, ceil(width / 1024)), block 256; `live` counts rows from
 * `first_row` before the first of these on. */
__global__ void tutti_assigned_rows(const float* parts, const uint32_t* experts, float* out,
                                    uint32_t width, uint32_t first_row, const uint32_t* live);

/* The same, rounded: out bf16 [rows, out_stride]. */
__global__ void tutti_assigned_rows_bf16(const float* parts, const uint32_t* experts,
                                         tutti_bf16* out, uint32_t width, uint32_t out_stride,
                                         uint32_t first_row, const uint32_t* live);

/* ---- sample.cu ------------------------------------------------------------------------------
 * logits f32 [rows, stride], of which the first `vocab` columns count; at most TUTTI_VOCAB_MAX. */

/* Samples each row as `params[row]` says, in the order of kernels::reference: the mask, bias,
 * suppression, penalties, then arg-max or temperature, min-p, top-k, top-p and one uniform number.
 * biases: all rows' logit biases; ids u32: all rows' suppressed, prompt and output tokens.
 * masks u32: the tokens that rows may choose, where they may not choose all: bit i % 32 of a mask's
 * word i / 32 is token i's, ceil(vocab / 32) words each; may be null when no row has one.
 * edited f32 [rows, vocab], scratch; counts u32 [rows, vocab], scratch that must be all 0 before
 * the first call and is all 0 again after each; both may be null when no row has bias,
 * suppression or penalties. top_ids u32, top_logprobs f32 [rows, top_stride]: the most likely
 * tokens, best first; at most min(top_n, vocab, TUTTI_TOP_MAX, top_stride) are written; may be
 * null when no row wants any.
 * Weights are whole multiples of 2^-40 of the largest, summed exactly.
 * grid (rows), block 1024. */
__global__ void tutti_sample(const float* logits, const TuttiSampleParams* params,
                             const TuttiIdValue* biases, const uint32_t* ids,
                             const uint32_t* masks, float* edited, uint32_t* counts,
                             TuttiSampled* out, uint32_t* top_ids, float* top_logprobs,
                             uint32_t stride, uint32_t vocab, uint32_t top_stride,
                             const uint32_t* live);

/* Log-probability and rank of targets[row] (below vocab), and the top_n most likely tokens.
 * grid (rows), block 1024. */
__global__ void tutti_logprobs(const float* logits, const uint32_t* targets, TuttiSampled* out,
                               uint32_t* top_ids, float* top_logprobs, uint32_t stride,
                               uint32_t vocab, uint32_t top_n, uint32_t top_stride,
                               const uint32_t* live);

/* The largest logit of each row, ties by lower id, plus first_id: TuttiIdValue [rows]; id
 * TUTTI_CORRUPTED when the row is corrupted. The tokens are those from first_id on of a vocabulary of
 * which params[row] has a mask (the only word of params that is read; params may be null): id
 * TUTTI_NOTHING_ALLOWED when it leaves none of them above -infinity. grid (rows), block 1024. */
__global__ void tutti_argmax(const float* logits, const TuttiSampleParams* params,
                             const uint32_t* masks, TuttiIdValue* out, uint32_t stride,
                             uint32_t vocab, uint32_t first_id, const uint32_t* live);

/* The best of what tutti_argmax found of each rank's part of the vocabulary, ties by lower id:
 * found TuttiIdValue [ranks, rows], parts in the order of their ids. Corrupted when any part is,
 * or when no part has anything that is allowed; logprob and rank are 0. grid (ceil(rows / 256)),
 * block 256; `live` counts rows. */
__global__ void tutti_argmax_merge(const TuttiIdValue* found, TuttiSampled* out, uint32_t ranks,
                                   uint32_t rows, const uint32_t* live);

/* ---- blocks.cu ------------------------------------------------------------------------------
 * A KV cache is `planes` arrays (K and V of every layer), `plane_stride` elements apart, of blocks
 * of `block_elements` (= num_kv_heads * block_size * head_dim, a multiple of 8) bf16. */

/* staging[i] = block blocks[i] of all planes, and back. staging bf16 [n, planes, block_elements]:
 * device memory, or host memory that the device can address. grid (n, planes), block 256. */
__global__ void tutti_blocks_out(const tutti_bf16* cache, const uint32_t* blocks,
                                 tutti_bf16* staging, uint64_t plane_stride,
                                 uint32_t block_elements, const uint32_t* live);
__global__ void tutti_blocks_in(tutti_bf16* cache, const uint32_t* blocks,
                                const tutti_bf16* staging, uint64_t plane_stride,
                                uint32_t block_elements, const uint32_t* live);

}
#endif
