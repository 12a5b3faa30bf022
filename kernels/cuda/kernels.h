/* Every kernel that a host can launch: the only list of entry points, their arguments and limits.
 *
 * A host mirrors the structs below field by field and passes the arguments in this order. All
 * pointers point to device memory unless an entry says otherwise. Strides count elements.
 *
 * Rules that hold for every kernel
 * - `bf16` is 16 raw bits. Weights, K, V and the inputs of matrix products are bf16; the residual
 *   stream, results of matrix products, norms, biases, tables and logits are f32. Sums are f32
 *   (tensor cores), except where an entry says f64.
 * - Pointers are 16-byte aligned, and so are rows where an entry says `rows 16-byte aligned`:
 *   the stride is a multiple of 8 (bf16) or 4 (f32). Padding up to the stride must be readable;
 *   its values are never used.
 * - `live`: null, or a word in device memory. Items (rows, tiles, sequences) at or beyond `*live`
 *   are skipped: their data is neither read nor written. So a captured graph serves any number of
 *   items up to its grid.
 * - Arguments that change from step to step are read from device memory, so every launch can be
 *   captured in a graph.
 * - A result depends on its own row or sequence, the shapes of weights and constants of the model:
 *   never on the rest of the batch, the grid, or the order of blocks.
 * - Every kernel begins by releasing the next kernel, unless its entry says otherwise, and waiting
 *   for the preceding ones (griddepcontrol). Every block that does any work waits, and at least one
 *   block of every grid does, so a kernel completes after its predecessors. So launches may have
 *   the attribute programmatic-stream-serialization; without it, and before sm_90, griddepcontrol
 *   does nothing.
 *   Before the wait, kernels read only constants of the model (weights, norms, tables) and the
 *   host's inputs to a step: `live`, positions, slots, sequences, items, parts, block tables, row
 *   indices. So no kernel may write those, and a copy that does must be complete before the next
 *   kernel begins. Tokens, which a kernel may write, are read after the wait.
 * - Rows are the grid's x, since a step may have more than 65535 of them.
 * - Static shared memory is not listed. `shared` is the dynamic shared memory to launch with; above
 *   48 KiB the host must raise the function's limit first.
 */
#pragma once
#include <stdint.h>

/* 16 raw bits in every interface; `device.cuh` has the arithmetic. */
typedef uint16_t tutti_bf16;
/* E4M3 without infinities, as KV caches can have it: `kernels::fp8`. */
typedef uint8_t tutti_fp8;

/* One sequence's rows in a step: `kernels::backend::SeqRows`. 20 bytes. */
typedef struct {
    uint32_t row_start;   /* first row */
    uint32_t num_rows;    /* at least 1 */
    uint32_t context_len; /* tokens in the cache, this step's included: at least num_rows */
    uint32_t table_start; /* start of its block table in `block_tables` */
    uint32_t table_len;   /* blocks in its table */
} TuttiSeq;

/* A tile of 64 queries of one sequence and KV head. Query p of a KV head belongs to head p % group
 * of the sequence's row p / group, where group = num_heads / num_kv_heads. 8 bytes. */
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
    uint32_t top_n;              /* most likely tokens to return; TUTTI_NO_LOGPROBS: no logprobs */
    uint32_t mask_start;         /* into `masks`; TUTTI_NO_MASK: every token may be chosen */
    uint32_t reserved;
} TuttiSampleParams;

/* `kernels::sampling::Sampled` without its list of top tokens. 16 bytes. */
typedef struct {
    uint32_t token;     /* 0 when corrupted */
    uint32_t corrupted; /* 1: a logit is NaN or +infinity, or all are -infinity */
    float logprob;      /* 0 unless asked for */
    uint32_t rank;      /* 1-based; 0 unless asked for */
} TuttiSampled;

/* A group of ranks that can access each other's memory. Each rank has its own table, in its own
 * memory, filled in before the first launch and never written by kernels. Addresses are valid in
 * this rank's address space. `blocks` is the largest grid. 200 bytes, aligned to 8. */
#define TUTTI_PEERS_MAX 8u
typedef struct {
    uint64_t slots[8];  /* rank r's slots: f32 [2, blocks, ranks, slot] */
    uint64_t flags[8];  /* rank r's flags: u64 [blocks, ranks], 0 at first, never reset */
    uint64_t rounds;    /* u64 [blocks], 0 at first: number of exchanges of each block */
    uint64_t failed;    /* u32, 0 at first; while nonzero, launches do nothing */
    uint64_t abort;     /* u32 in host memory, 0 at first: the host sets it to end all waits */
    uint64_t outcome;   /* u32 in host memory, 0 at first: the failure, as TUTTI_PEERS_* */
    uint64_t spin_ns;   /* how long a block waits in one exchange */
    uint32_t rank;
    uint32_t ranks;     /* 2, 4 or 8 */
    uint32_t slot;      /* f32 elements per slot: a multiple of 4 */
    uint32_t blocks;
    uint64_t spent;     /* u64, 0 at first: nanoseconds that exchanges have taken */
    uint32_t shares_gpu; /* not 0: blocks of other ranks may run on this GPU */
    uint32_t reserved;
} TuttiPeers;
/* Outcomes: one of these, with the rank that was waited for in the low 8 bits. */
#define TUTTI_PEERS_ABORTED 0x100u
#define TUTTI_PEERS_TIMEOUT 0x200u

/* Slots of one expert: slots[first .. first + slots]. 12 bytes. */
typedef struct {
    uint32_t expert;
    uint32_t first;
    uint32_t slots; /* at least 1, at most the product variant's number */
} TuttiExpertTile;
/* Experts of a layer, and (TUTTI_TOP_EXPERTS_MAX) of one row. */
#define TUTTI_EXPERTS_MAX 1024u
/* A row that no matrix is assigned to: NOT_ASSIGNED of kernels::backend. */
#define TUTTI_NOT_ASSIGNED 0xffffffffu
#define TUTTI_TOP_EXPERTS_MAX 32u

#define TUTTI_NO_LOGPROBS 0xffffffffu
#define TUTTI_NO_MASK 0xffffffffu
#define TUTTI_NO_ROW 0xffffffffu
/* In place of a token id. */
#define TUTTI_CORRUPTED 0xffffffffu
#define TUTTI_NOTHING_ALLOWED 0xfffffffeu
#define TUTTI_BIAS_MAX 1024u
/* Most likely tokens per row. */
#define TUTTI_TOP_MAX 128u
/* Size of the whole vocabulary: it bounds the integers in which sampling weights are summed. */
#define TUTTI_VOCAB_MAX (1u << 20)

/* Queries per tile of prefill attention; its shared memory in bytes. */
#define TUTTI_PREFILL_QUERIES 64u
#define TUTTI_PREFILL_SHARED(head_dim) (320u * 2u * (head_dim))
#define TUTTI_PREFILL_FP8_SHARED(head_dim) (256u * 2u * (head_dim))
/* A part of decode attention is seq << TUTTI_PART_SHIFT | split. */
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

/* out[i] = table[ids[i] - first_id] * scale, or zeros if that row is not on this rank.
 * ids u32 [rows]; table bf16 [table_rows, table_stride]; out f32 [rows, width] contiguous.
 * grid (rows), block 256. */
__global__ void tutti_embed(const uint32_t* ids, const tutti_bf16* table, float* out, uint32_t width,
                            uint32_t table_stride, uint32_t first_id, uint32_t table_rows,
                            float scale, const uint32_t* live);

/* out = a(gate) * up, where input row = gate ++ up, each `inner` wide, plus `bias` (f32
 * [2 * inner], or null), and a is SiLU, or the tanh approximation of GELU if `gelu` is not 0.
 * input f32 [rows, 2 * inner] contiguous; out bf16 [rows, out_stride].
 * grid (rows, ceil(inner / 1024)), block 256; `live` counts rows. */
__global__ void tutti_activate_mul_f32(const float* input, const float* bias, tutti_bf16* out,
                                       uint32_t inner, uint32_t out_stride, uint32_t gelu,
                                       const uint32_t* live);

/* out = a(input), per element: GELU in its tanh approximation, or max(x, 0)^2 if `squared_relu` is not
 * 0. input f32 [rows, inner] contiguous; out bf16 [rows, out_stride].
 * grid (rows, ceil(inner / 1024)), block 256; `live` counts rows. */
__global__ void tutti_activate_f32(const float* input, tutti_bf16* out, uint32_t inner,
                                   uint32_t out_stride, uint32_t squared_relu,
                                   const uint32_t* live);

/* data += bias, per row. data f32 [rows, width] contiguous; bias f32 [width].
 * grid (rows, ceil(width / 1024)), block 256; `live` counts rows. */
__global__ void tutti_add_bias(float* data, const float* bias, uint32_t width, const uint32_t* live);

/* data = cap * tanh(data / cap). data f32 [rows, width] contiguous.
 * grid (rows, ceil(width / 1024)), block 256; `live` counts rows. */
__global__ void tutti_cap(float* data, float cap, uint32_t width, const uint32_t* live);

/* data = data * scales + bias, per row: the end of a product with int8 weights.
 * data f32 [rows, width] contiguous; scales f32 [width]; bias f32 [width] or null.
 * grid (rows, ceil(width / 1024)), block 256; `live` counts rows. */
__global__ void tutti_scale_add_bias(float* data, const float* scales, const float* bias,
                                     uint32_t width, const uint32_t* live);

/* out = w - 128, exactly: widens int8 weights in the layout of tutti_skinny_int8_8, for products
 * that take bf16. w u8, out bf16, both [rows, stride], the stride a multiple of 16.
 * grid (rows, ceil(stride / 4096)), block 256. */
__global__ void tutti_widen_int8(const uint8_t* w, tutti_bf16* out, uint32_t stride);

/* out = w * scale, rounded: widens weights in FP8 in the layout of tutti_skinny_fp8_8, of which
 * `k` per row count. w u8, out bf16, both [rows, stride], the stride a multiple of 16.
 * grid (rows, ceil(stride / 4096)), block 256. */
__global__ void tutti_widen_fp8(const uint8_t* w, const float* scales, tutti_bf16* out,
                                uint32_t stride, uint32_t k, uint32_t shift);

/* out = (integer - zero) * scale, rounded: widens 4-bit weights in the layout of
 * tutti_skinny_int4_8. out bf16 [rows, stride]: `k` weights per row, then zeros.
 * grid (rows, ceil(stride / 8192)), block 256. */
__global__ void tutti_widen_int4(const uint8_t* w, const uint32_t* groups, tutti_bf16* out,
                                 uint32_t stride, uint32_t k, uint32_t shift);

/* sum += other, both f32 [rows, width] contiguous. grid (rows, ceil(width / 1024)), block 256;
 * `live` counts rows. */
__global__ void tutti_add(float* sum, const float* other, uint32_t width, const uint32_t* live);

/* out = the sum of `ranks` arrays [rows, width], `part_stride` elements apart, as a binary tree
 * over the ranks in order: (0 + 1) + (2 + 3). f32; ranks 1 to 64; out may be the first array.
 * grid (rows, ceil(width / 1024)), block 256; `live` counts rows. */
__global__ void tutti_tree_sum(const float* parts, float* out, uint32_t ranks, uint64_t part_stride,
                               uint32_t width, const uint32_t* live);

/* out = in, rounded to the nearest, ties to even; in f32, out bf16, both [rows, width] contiguous.
 * grid (rows, ceil(width / 1024)), block 256; `live` counts rows. */
__global__ void tutti_narrow_rows(const float* in, tutti_bf16* out, uint32_t width,
                                  const uint32_t* live);

/* The reverse: in bf16, out f32. */
__global__ void tutti_widen_rows(const tutti_bf16* in, float* out, uint32_t width,
                                 const uint32_t* live);

/* out[i] = in[rows[i]]; unchanged if rows[i] is TUTTI_NO_ROW. in, out bf16 [.., width], rows
 * `in_stride` and `out_stride` apart; rows u32 [n].
 * grid (n, ceil(width / 1024)), block 256; `live` counts n. */
__global__ void tutti_gather_rows(const tutti_bf16* in, const uint32_t* rows, tutti_bf16* out,
                                  uint32_t width, uint32_t in_stride, uint32_t out_stride,
                                  const uint32_t* live);

/* out = in[.., first .. first + width], bf16: allows a product over a range of columns whose
 * `first` is no multiple of 8. grid (rows, ceil(width / 1024)), block 256; `live` counts rows. */
__global__ void tutti_copy_columns(const tutti_bf16* in, tutti_bf16* out, uint32_t first,
                                   uint32_t width, uint32_t in_stride, uint32_t out_stride,
                                   const uint32_t* live);

/* full[row, rank * width + i] = gathered[rank][row][i], f32: turns logits gathered from all ranks
 * into rows. `gathered`: [ranks, rows, width]. grid (rows, ceil(width / 1024), ranks), block 256.
 * `rows` is the number of rows gathered, whatever the grid; `live` counts rows. */
__global__ void tutti_interleave_ranks(const float* gathered, float* full, uint32_t rows,
                                       uint32_t width, uint32_t full_stride, const uint32_t* live);

/* Reads `n` times 16 bytes, to measure a GPU's memory bandwidth: out[i] is the exclusive or of the
 * words that warp i reads, i < 8 ceil(n / 2048). grid (ceil(n / 2048)), block 256. */
__global__ void tutti_read(const uint32_t* from, uint32_t* out, uint32_t n);

/* to[i] = from[i], i < words, not before `delay` nanoseconds have passed; the kernel behind it may begin
 * at once. For tests: one that reads `to` before it has waited finds what was there before.
 * grid any, block 256. */
__global__ void tutti_late(const uint32_t* from, uint32_t* to, uint64_t words, uint64_t delay);

/* ---- rmsnorm.cu ---------------------------------------------------------------------------- */

/* residual += delta (if not null); out = residual / rms(residual) * weight.
 * residual f32 [rows, width], in and out; delta f32 [rows, width] or null; weight f32 [width];
 * out bf16 [rows, out_stride]; residual and delta contiguous. grid (rows), block 512. */
__global__ void tutti_add_rmsnorm(float* residual, const float* delta, const float* weight,
                                  tutti_bf16* out, uint32_t width, uint32_t out_stride, float eps,
                                  const uint32_t* live);

/* The same with a delta in bf16. */
__global__ void tutti_add_rmsnorm_bf16(float* residual, const tutti_bf16* delta,
                                       const float* weight, tutti_bf16* out, uint32_t width,
                                       uint32_t out_stride, float eps, const uint32_t* live);

/* residual += delta / rms(delta) * delta_weight; out = residual / rms(residual) * weight. As above;
 * delta_weight f32 [width]. grid (rows), block 512. */
__global__ void tutti_add_normed_rmsnorm(float* residual, const float* delta,
                                         const float* delta_weight, const float* weight,
                                         tutti_bf16* out, uint32_t width, uint32_t out_stride,
                                         float eps, const uint32_t* live);

/* residual += delta / rms(delta) * weight (if delta is not null); out = residual. As above; weight
 * f32 [width], or null without delta. grid (rows), block 512. */
__global__ void tutti_add_normed(float* residual, const float* delta, const float* weight,
                                 tutti_bf16* out, uint32_t width, uint32_t out_stride, float eps,
                                 const uint32_t* live);

/* ---- norms.cu ------------------------------------------------------------------------------- */

/* residual += delta (if not null); out = (residual - mean) / sqrt(variance + eps) * weight + bias.
 * residual f32 [rows, width], in and out; delta f32 [rows, width] or null; weight, bias f32 [width];
 * out bf16 [rows, out_stride]; residual and delta contiguous. grid (rows), block 512. */
__global__ void tutti_add_layernorm(float* residual, const float* delta, const float* weight,
                                    const float* bias, tutti_bf16* out, uint32_t width,
                                    uint32_t out_stride, float eps, const uint32_t* live);

/* Sums of squares of q and of k, for a norm over the heads of all ranks. q's and k's columns are cut
 * into equal sections; part i of `parts` has section i * sections / parts; the parts are added as a
 * binary tree. out[row] = {of q, of k}. qkv f32 [rows, stride]: q columns of q, k of k, then others;
 * out f32 [rows, 2]; parts a power of two, at most TUTTI_QK_PARTS_MAX, and a multiple of both
 * numbers of sections, which divide their columns. grid (rows), block 256. */
#define TUTTI_QK_PARTS_MAX 64u
__global__ void tutti_qk_squares(const float* qkv, float* out, uint32_t q, uint32_t k,
                                 uint32_t stride, uint32_t q_sections, uint32_t k_sections,
                                 uint32_t parts, const uint32_t* live);

/* q = q / sqrt(squares[0] / q_count + eps) * weight, and k with squares[1] and k_count.
 * qkv as above, in and out; squares f32 [rows, 2]; weight f32 [q + k].
 * grid (rows, ceil((q + k) / 1024)), block 256. */
__global__ void tutti_qk_scale(float* qkv, const float* squares, const float* weight, uint32_t q,
                               uint32_t k, uint32_t stride, uint32_t q_count, uint32_t k_count,
                               float eps, const uint32_t* live);

/* ---- all_reduce.cu --------------------------------------------------------------------------
 * Exchange between GPUs that can access each other's memory. Every rank launches the same entries
 * with the same sizes and grids in the same order, each rank on one stream. A grid has at most
 * `peers->blocks` blocks, all of which must be able to run at once, beside those of other ranks on
 * the same GPU. Unless `peers->shares_gpu`, a launch releases the next kernel before it waits for
 * other ranks, otherwise after its last exchange. Sums are f32, as a binary tree over the ranks:
 * (0 + 1) + (2 + 3). They have the same bits on every rank and as with tutti_tree_sum. No launch waits longer than `peers->spin_ns`
 * for another rank: then, or when the host sets *abort, it sets *outcome and returns, and all later
 * launches do nothing. Results are undefined once *outcome is not 0. A launch leaves no state that
 * the host would have to reset, so graphs can replay it. */

/* data = the sum of all ranks' data. data f32 [count]. One exchange: every rank sends all of its
 * data to all others.
 * grid (any), block: a multiple of 32 from 32 to 512. */
__global__ void tutti_peer_sum(const TuttiPeers* peers, float* data, uint64_t count);

/* The same in two exchanges: every rank sums its part, then sends the sum to all others. */
__global__ void tutti_peer_sum_two_shot(const TuttiPeers* peers, float* data, uint64_t count);

/* data = sum of all ranks' data, then residual += data; out = residual / rms(residual) * weight:
 * the bits of tutti_peer_sum and tutti_add_rmsnorm, except that data is left unchanged.
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
 * head_dim], block_size = 1 << block_shift. A slot is block * block_size + offset. Kernels with
 * `fp8` in their names are the same for a cache in FP8. */

/* All that follows the fused QKV product: adds the bias (f32 [width], or null), applies RMSNorm per
 * q and k head (q_norm, k_norm: f32 [head_dim], or null) and RoPE (cos, sin: f32 [positions,
 * head_dim / 2]), multiplies q by a factor of its position (q_scale: f32 [positions], or null), and
 * writes K and V to the cache, q to q_out.
 * qkv f32 [rows, (num_heads + 2 * num_kv_heads) * head_dim] contiguous: q, k, v;
 * positions, slots u32 [rows]; q_out bf16 [rows, num_heads * head_dim] contiguous.
 * head_dim even, at most 256. grid (rows, ceil((num_heads + 2 * num_kv_heads) / 8)), block 256. */
#define TUTTI_QKV_IN_ARGUMENTS                                                                     \
    const float *qkv, const float *bias, const float *q_norm, const float *k_norm,                 \
        const float *cos, const float *sin, const float *q_scale, const uint32_t *positions,       \
        const uint32_t *slots, tutti_bf16 *q_out
#define TUTTI_QKV_SIZE_ARGUMENTS                                                                   \
    uint32_t num_heads, uint32_t num_kv_heads, uint32_t head_dim, uint32_t block_shift, float eps, \
        const uint32_t *live
__global__ void tutti_qkv_finish(TUTTI_QKV_IN_ARGUMENTS, tutti_bf16* k_cache, tutti_bf16* v_cache,
                                 TUTTI_QKV_SIZE_ARGUMENTS);
__global__ void tutti_qkv_finish_fp8(TUTTI_QKV_IN_ARGUMENTS, tutti_fp8* k_cache,
                                     tutti_fp8* v_cache, TUTTI_QKV_SIZE_ARGUMENTS);

/* ---- attention_prefill.cu -------------------------------------------------------------------
 * Causal attention of every row over its sequence's K and V, on tensor cores. q and out bf16
 * [rows, num_heads * head_dim] contiguous. Row i of a sequence is at position context_len -
 * num_rows + i. `window`: attend to the last `window` tokens, the current one included; 0: to all.
 * `scale` is 1 / sqrt(head_dim). sinks f32 [num_heads] or null: the score (not scaled) of one more
 * token, without V, which adds to the softmax's denominator. Writes the rows of the given tiles.
 * tiles: in any order, longest first is best; `live` counts tiles.
 * grid (tiles, num_kv_heads), block 128, shared TUTTI_PREFILL_SHARED(head_dim), or
 * TUTTI_PREFILL_FP8_SHARED(head_dim). */
#define TUTTI_BF16_ATTENTION_ARGUMENTS                                                             \
    const tutti_bf16 *q, const tutti_bf16 *k_cache, const tutti_bf16 *v_cache
#define TUTTI_FP8_ATTENTION_ARGUMENTS                                                              \
    const tutti_bf16 *q, const tutti_fp8 *k_cache, const tutti_fp8 *v_cache
#define TUTTI_PREFILL_ARGUMENTS                                                                    \
    const TuttiSeq *seqs, const TuttiTile *tiles, const uint32_t *block_tables, tutti_bf16 *out,   \
        uint32_t num_heads, uint32_t num_kv_heads, uint32_t block_shift, uint32_t window,          \
        float scale, float cap, const float *sinks, const uint32_t *live
__global__ void tutti_prefill_attention_16(TUTTI_BF16_ATTENTION_ARGUMENTS, TUTTI_PREFILL_ARGUMENTS);
__global__ void tutti_prefill_attention_32(TUTTI_BF16_ATTENTION_ARGUMENTS, TUTTI_PREFILL_ARGUMENTS);
__global__ void tutti_prefill_attention_64(TUTTI_BF16_ATTENTION_ARGUMENTS, TUTTI_PREFILL_ARGUMENTS);
__global__ void tutti_prefill_attention_96(TUTTI_BF16_ATTENTION_ARGUMENTS, TUTTI_PREFILL_ARGUMENTS);
__global__ void tutti_prefill_attention_128(TUTTI_BF16_ATTENTION_ARGUMENTS,
                                            TUTTI_PREFILL_ARGUMENTS);
__global__ void tutti_prefill_attention_256(TUTTI_BF16_ATTENTION_ARGUMENTS,
                                            TUTTI_PREFILL_ARGUMENTS);
__global__ void tutti_prefill_attention_fp8_64(TUTTI_FP8_ATTENTION_ARGUMENTS,
                                               TUTTI_PREFILL_ARGUMENTS);
__global__ void tutti_prefill_attention_fp8_96(TUTTI_FP8_ATTENTION_ARGUMENTS,
                                               TUTTI_PREFILL_ARGUMENTS);
__global__ void tutti_prefill_attention_fp8_128(TUTTI_FP8_ATTENTION_ARGUMENTS,
                                                TUTTI_PREFILL_ARGUMENTS);
__global__ void tutti_prefill_attention_fp8_256(TUTTI_FP8_ATTENTION_ARGUMENTS,
                                                TUTTI_PREFILL_ARGUMENTS);

/* ---- attention_decode.cu, attention_reduce.cu -----------------------------------------------
 * The same for sequences with one row. Their tokens are split into parts, each with a partial
 * result; a second kernel combines these. The split depends only on the sequence's length, the
 * window, `max_splits` and `least_split`. `max_splits` is a constant of the model (64 is good, 128
 * the maximum, good for a single KV head). `least_split`, a multiple of 64, is chosen by the host
 * for the number of sequences: the only way in which a result can depend on the batch. With n = the
 * tokens from the first visible one, rounded down to a multiple of 16, to the last:
 * split_len = max(least_split, round_up(ceil(n / max_splits), 16)),
 * splits = ceil(n / split_len) <= max_splits.
 * parts u32 [*live]: index into `seqs` << TUTTI_PART_SHIFT | number of the split: each split of
 * each such sequence once, in any order; long splits first is best. A block computes every
 * gridDim.x-th part, so grid.x is free; best are as many blocks as can run at once. `live` counts
 * parts and is not null.
 * partial_out f32 [seqs, num_heads, max_splits, head_dim];
 * partial_ml f32 [seqs, num_heads, max_splits, 2]: maximum (of base-2 exponents) and sum; the first
 * split's include the sink. A sequence with one split has no partial result: its row of out is
 * written directly.
 * attention: grid (any, num_kv_heads * TUTTI_DECODE_BLOCKS(group)), block 128.
 * reduce: items u32 [n]: indices into `seqs`, readable up to the size of the grid; `live` counts
 * items.
 * grid (num_heads, n), block 128; any head_dim. */
#define TUTTI_DECODE_ARGUMENTS                                                                     \
    const TuttiSeq *seqs, const uint32_t *parts, const uint32_t *block_tables, float *partial_out, \
        float *partial_ml, tutti_bf16 *out, uint32_t num_heads, uint32_t num_kv_heads,             \
        uint32_t block_shift, uint32_t window, uint32_t max_splits, uint32_t least_split,          \
        float scale, float cap, const float *sinks, const uint32_t *live
__global__ void tutti_decode_attention_16(TUTTI_BF16_ATTENTION_ARGUMENTS, TUTTI_DECODE_ARGUMENTS);
__global__ void tutti_decode_attention_32(TUTTI_BF16_ATTENTION_ARGUMENTS, TUTTI_DECODE_ARGUMENTS);
__global__ void tutti_decode_attention_64(TUTTI_BF16_ATTENTION_ARGUMENTS, TUTTI_DECODE_ARGUMENTS);
__global__ void tutti_decode_attention_96(TUTTI_BF16_ATTENTION_ARGUMENTS, TUTTI_DECODE_ARGUMENTS);
__global__ void tutti_decode_attention_128(TUTTI_BF16_ATTENTION_ARGUMENTS, TUTTI_DECODE_ARGUMENTS);
__global__ void tutti_decode_attention_256(TUTTI_BF16_ATTENTION_ARGUMENTS, TUTTI_DECODE_ARGUMENTS);
__global__ void tutti_decode_attention_fp8_64(TUTTI_FP8_ATTENTION_ARGUMENTS,
                                              TUTTI_DECODE_ARGUMENTS);
__global__ void tutti_decode_attention_fp8_96(TUTTI_FP8_ATTENTION_ARGUMENTS,
                                              TUTTI_DECODE_ARGUMENTS);
__global__ void tutti_decode_attention_fp8_128(TUTTI_FP8_ATTENTION_ARGUMENTS,
                                               TUTTI_DECODE_ARGUMENTS);
__global__ void tutti_decode_attention_fp8_256(TUTTI_FP8_ATTENTION_ARGUMENTS,
                                               TUTTI_DECODE_ARGUMENTS);
__global__ void tutti_decode_reduce(const float* partial_out, const float* partial_ml,
                                    const TuttiSeq* seqs, const uint32_t* items, tutti_bf16* out,
                                    uint32_t num_heads, uint32_t head_dim, uint32_t window,
                                    uint32_t max_splits, uint32_t least_split,
                                    const uint32_t* live);

/* ---- attention_any.cu -----------------------------------------------------------------------
 * Causal attention of any row for head dimensions without a kernel of their own (even, at most
 * 256): simple and slow. One warp per row and head. `num_seqs`: a word in device memory.
 * grid (rows, ceil(num_heads / 4)), block 128; `live` counts rows. */
#define TUTTI_ATTENTION_ANY_ARGUMENTS                                                              \
    const TuttiSeq *seqs, const uint32_t *num_seqs, const uint32_t *block_tables, tutti_bf16 *out, \
        uint32_t num_heads, uint32_t num_kv_heads, uint32_t head_dim, uint32_t block_shift,        \
        uint32_t window, float scale, float cap, const float *sinks, const uint32_t *live
__global__ void tutti_attention_any(TUTTI_BF16_ATTENTION_ARGUMENTS, TUTTI_ATTENTION_ANY_ARGUMENTS);
__global__ void tutti_attention_any_fp8(TUTTI_FP8_ATTENTION_ARGUMENTS,
                                        TUTTI_ATTENTION_ANY_ARGUMENTS);

/* ---- latent.cu ------------------------------------------------------------------------------
 * Multi-head latent attention: see kernels::backend::latent. A token has one vector of latent +
 * rotated elements in a layer's cache, bf16 or FP8 [num_blocks, block_size, latent + rotated]: at
 * most TUTTI_LATENT_MAX, and TUTTI_LATENT_WIDTH_MAX together, multiples of 16. */
#define TUTTI_LATENT_MAX 512
#define TUTTI_LATENT_WIDTH_MAX 576
/* Shared memory of attention: two tiles of 16 tokens and 16 heads of q, 8 elements between rows. */
#define TUTTI_LATENT_SHARED (3u * 16u * 2u * (TUTTI_LATENT_WIDTH_MAX + 8u))

/* kv: the latent divided by its root mean square, times norm, and the rest rotated, to the cache.
 * q: of each head, `plain` elements to plain_out; the others are rotated and, times scale, become
 * the last `rotated` elements of each head of q_out. q f32 [rows, num_heads, plain + rotated];
 * kv f32 [rows, latent + rotated]; norm f32 [latent]; cos, sin f32 [positions, rotated / 2];
 * plain_out bf16 [rows, num_heads, plain]; q_out bf16 [rows, num_heads, latent + rotated].
 * grid (rows, ceil((num_heads + 1) / 8)), block 256; `live` counts rows. */
#define TUTTI_LATENT_IN_ARGUMENTS                                                                  \
    const float *q, const float *kv, const float *norm, const float *cos, const float *sin,        \
        const uint32_t *positions, const uint32_t *slots, tutti_bf16 *plain_out, tutti_bf16 *q_out
#define TUTTI_LATENT_SIZE_ARGUMENTS                                                                \
    uint32_t num_heads, uint32_t plain, uint32_t latent, uint32_t rotated, float eps, float scale, \
        const uint32_t *live
__global__ void tutti_latent_finish(TUTTI_LATENT_IN_ARGUMENTS, tutti_bf16* k_cache,
                                    TUTTI_LATENT_SIZE_ARGUMENTS);
__global__ void tutti_latent_finish_fp8(TUTTI_LATENT_IN_ARGUMENTS, tutti_fp8* k_cache,
                                        TUTTI_LATENT_SIZE_ARGUMENTS);

/* out[row, head] = scale * x[row, head] W[head]^T: the first n of each head's head_stride elements.
 * x bf16 [rows, x_stride], heads of k elements, a multiple of 8; w bf16 [heads * n, w_stride], rows
 * 16-byte aligned as those of x; out bf16 [rows, out_stride]. The name's number is the most rows
 * that one grid.x computes; the result is the same bits with each.
 * grid (ceil(rows / number), ceil(n / 128), heads), block 256; `live` counts rows. */
#define TUTTI_HEADS_PRODUCT_ARGUMENTS                                                              \
    const tutti_bf16 *x, const tutti_bf16 *w, tutti_bf16 *out, uint32_t rows, uint32_t n,          \
        uint32_t k, uint32_t x_stride, uint32_t w_stride, uint32_t out_stride,                     \
        uint32_t head_stride, float scale, const uint32_t *live
__global__ void tutti_heads_product_8(TUTTI_HEADS_PRODUCT_ARGUMENTS);
__global__ void tutti_heads_product_32(TUTTI_HEADS_PRODUCT_ARGUMENTS);

/* Causal attention of any row; V is the first `latent` elements of K. q bf16 [rows, num_heads,
 * latent + rotated], out bf16 [rows, num_heads, latent]. `num_seqs`: a word in device memory.
 * `skips_single`: not of sequences with one row.
 * grid (rows, ceil(num_heads / 16)), block 256, shared TUTTI_LATENT_SHARED; `live` counts rows. */
#define TUTTI_LATENT_ATTENTION_ARGUMENTS                                                           \
    const TuttiSeq *seqs, const uint32_t *num_seqs, const uint32_t *block_tables, tutti_bf16 *out, \
        uint32_t num_heads, uint32_t latent, uint32_t rotated, uint32_t block_shift,               \
        uint32_t window, float scale, uint32_t skips_single, const uint32_t *live
__global__ void tutti_latent_attention(const tutti_bf16* q, const tutti_bf16* k_cache,
                                       TUTTI_LATENT_ATTENTION_ARGUMENTS);
__global__ void tutti_latent_attention_fp8(const tutti_bf16* q, const tutti_fp8* k_cache,
                                           TUTTI_LATENT_ATTENTION_ARGUMENTS);

/* The same for sequences with one row, whose tokens are split: see tutti_decode_attention_16, which
 * has the same lists; tutti_decode_reduce combines the parts, with `latent` as head_dim.
 * partial_out f32 [seqs, num_heads, max_splits, latent].
 * grid (any, ceil(num_heads / 16)), block 256, shared TUTTI_LATENT_SHARED. */
#define TUTTI_LATENT_DECODE_ARGUMENTS                                                              \
    const TuttiSeq *seqs, const uint32_t *parts, const uint32_t *block_tables, float *partial_out, \
        float *partial_ml, tutti_bf16 *out, uint32_t num_heads, uint32_t latent, uint32_t rotated, \
        uint32_t block_shift, uint32_t window, uint32_t max_splits, uint32_t least_split,          \
        float scale, const uint32_t *live
__global__ void tutti_latent_decode(const tutti_bf16* q, const tutti_bf16* k_cache,
                                    TUTTI_LATENT_DECODE_ARGUMENTS);
__global__ void tutti_latent_decode_fp8(const tutti_bf16* q, const tutti_fp8* k_cache,
                                        TUTTI_LATENT_DECODE_ARGUMENTS);

/* ---- delta.cu -------------------------------------------------------------------------------
 * Linear attention: see kernels::backend::delta, which has the formulas. A
 * layer's state of a sequence is its slot, f32: the value heads' S, transposed,
 * [value_heads, value_dim, key_dim], then the channels of its last tokens, [kernel - 1, channels],
 * the oldest first. A token's channels are q [key_heads, key_dim], k of the same shape, and
 * v [value_heads, value_dim]. key_dim and value_dim are multiples of 8 up to 256, kernel is from 2
 * to 8, value_heads a multiple of key_heads. `states` u32: each sequence's own slot. That of a
 * sequence whose context_len is its num_rows is not read: it begins with zeros. */
#define TUTTI_DELTA_SIZE_ARGUMENTS                                                                 \
    uint32_t key_heads, uint32_t value_heads, uint32_t key_dim, uint32_t value_dim,                \
        uint32_t kernel, uint32_t adds
/* Columns of S that a block of tutti_delta_update_* has; channels that one of its others keeps. */
#define TUTTI_DELTA_COLUMNS 32u
#define TUTTI_DELTA_KEPT 1024u

/* What a token brings: its channels, convolved with those of the tokens before it, with SiLU; by the
 * delta rule (`adds` is 0) q and k then divided by their lengths and q by sqrt(key_dim). And for each
 * value head, with step = softplus(a + dt_bias): kept = exp(-decay * step); beta = sigmoid(b), or the
 * step in Mamba 2 (`adds` is 1); q k; skip, or 0. qkvz f32 [rows, channels + value_heads *
 * value_dim]; ba f32 [rows, 2 * value_heads], b before a, or a alone in Mamba 2; conv f32 [channels,
 * kernel]; conv_bias f32 [channels] or null, added before SiLU; decay, dt_bias, and skip in Mamba 2
 * f32 [value_heads]; mixed f32 [rows, channels]; gates f32 [rows, value_heads, 4]. `num_seqs`: a word
 * in device memory. A block has `each` rows. `releases`: 0 where a sequence has many rows. Then the
 * next kernel, tutti_delta_update_*, begins only when this one ends. Its blocks run for long, and
 * begun earlier they would pile up on the multiprocessors that were done first.
 * grid (ceil(rows / each), ceil((key_heads + value_heads) / 8)), block 256; `live` counts rows. */
__global__ void tutti_delta_mix(const float* qkvz, const float* ba, const float* conv,
                                const float* conv_bias, const float* decay, const float* dt_bias,
                                const float* skip, const float* slots, const TuttiSeq* seqs,
                                const uint32_t* states, const uint32_t* num_seqs, float* mixed,
                                float* gates, TUTTI_DELTA_SIZE_ARGUMENTS, uint32_t rows,
                                uint32_t each, uint32_t releases, const uint32_t* live);

/* The recurrence, token by token: S *= kept, u = beta (v - S k), S += u k^T, and o = S q replaces v
 * in `mixed`; in Mamba 2 u = step v, and o = S q + skip v. And the slot gets the channels of the
 * sequence's last tokens from qkvz, which tutti_delta_mix must have read by then. qkvz, gates and
 * mixed as there. The name's number is the largest key_dim. With B = value_heads * ceil(value_dim /
 * TUTTI_DELTA_COLUMNS):
 * grid (B + ceil(channels / TUTTI_DELTA_KEPT), seqs), block 256; `live` counts sequences. A
 * sequence's blocks are neighbours, so that a long one's come to different multiprocessors; there
 * are at most 65535 sequences. */
#define TUTTI_DELTA_UPDATE_ARGUMENTS                                                               \
    const float *qkvz, const float *gates, const TuttiSeq *seqs, const uint32_t *states,           \
        float *mixed, float *slots, TUTTI_DELTA_SIZE_ARGUMENTS, const uint32_t *live
__global__ void tutti_delta_update_32(TUTTI_DELTA_UPDATE_ARGUMENTS);
__global__ void tutti_delta_update_128(TUTTI_DELTA_UPDATE_ARGUMENTS);
__global__ void tutti_delta_update_256(TUTTI_DELTA_UPDATE_ARGUMENTS);

/* out = o / rms(o) * norm * silu(z), the root mean square over each value head: o of mixed, z of
 * qkvz. norm f32 [value_dim]; out bf16 [rows, out_stride], rows 16-byte aligned. Without a norm,
 * gated = o * silu(z), f32 [rows, value_heads * value_dim].
 * grid (rows, ceil(value_heads / 8)), block 256; `live` counts rows. */
__global__ void tutti_delta_finish(const float* qkvz, const float* mixed, const float* norm,
                                   tutti_bf16* out, float* gated, uint32_t value_heads,
                                   uint32_t value_dim, uint32_t channels, uint32_t out_stride,
                                   float eps, const uint32_t* live);

/* x *= sigmoid(gate). gate f32 [rows, width] contiguous; x bf16 [rows, x_stride], rows 16-byte
 * aligned. grid (rows, ceil(width / 1024)), block 256; `live` counts rows. */
__global__ void tutti_gate(const float* gate, tutti_bf16* x, uint32_t width, uint32_t x_stride,
                           const uint32_t* live);

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

/* The same with int8 weights: w u8 [n, w_stride], each weight plus 128, rows 16-byte aligned (the
 * stride is a multiple of 16); scales f32 [n]: out = (x W^T) * scales + bias. */
#define TUTTI_SKINNY_INT8_ARGUMENTS                                                                \
    const tutti_bf16 *x, const uint8_t *w, const float *scales, const float *bias, float *out,     \
        const uint32_t *row_index, uint32_t rows, uint32_t n, uint32_t k, uint32_t x_stride,       \
        uint32_t w_stride, uint32_t out_stride, const uint32_t *live
__global__ void tutti_skinny_int8_8(TUTTI_SKINNY_INT8_ARGUMENTS);
__global__ void tutti_skinny_int8_16(TUTTI_SKINNY_INT8_ARGUMENTS);
__global__ void tutti_skinny_int8_32(TUTTI_SKINNY_INT8_ARGUMENTS);
__global__ void tutti_skinny_int8_64(TUTTI_SKINNY_INT8_ARGUMENTS);

/* The same with weights in FP8 (E4M3): w u8 [n, w_stride], rows 16-byte aligned; scales f32
 * [n, ceil(k / 2^shift)], shift in 6..31; a weight is number * scale. No byte is taken for NaN: a
 * row that has one needs scales that are NaN. */
#define TUTTI_SKINNY_FP8_ARGUMENTS                                                                 \
    const tutti_bf16 *x, const uint8_t *w, const float *scales, const float *bias, float *out,     \
        const uint32_t *row_index, uint32_t rows, uint32_t n, uint32_t k, uint32_t x_stride,       \
        uint32_t w_stride, uint32_t out_stride, uint32_t shift, const uint32_t *live
__global__ void tutti_skinny_fp8_8(TUTTI_SKINNY_FP8_ARGUMENTS);
__global__ void tutti_skinny_fp8_16(TUTTI_SKINNY_FP8_ARGUMENTS);
__global__ void tutti_skinny_fp8_32(TUTTI_SKINNY_FP8_ARGUMENTS);

/* The same with 4-bit weights: w u8 [n, w_stride / 2], rows 64-byte aligned (w_stride, in weights,
 * is a multiple of 128). 128 weights are 64 bytes: word 4t + j has k = 32j + 8t + 2i at bit 4i and
 * the next k 16 bits above. groups u32 [n, ceil(k / 2^shift)], fewer than 2^32, shift in 5..31: a
 * scale in f32 with the zero in its last four bits; a weight is (integer - zero) * scale. */
#define TUTTI_SKINNY_INT4_ARGUMENTS                                                                \
    const tutti_bf16 *x, const uint8_t *w, const uint32_t *groups, const float *bias, float *out,  \
        const uint32_t *row_index, uint32_t rows, uint32_t n, uint32_t k, uint32_t x_stride,       \
        uint32_t w_stride, uint32_t out_stride, uint32_t shift, const uint32_t *live
__global__ void tutti_skinny_int4_8(TUTTI_SKINNY_INT4_ARGUMENTS);
__global__ void tutti_skinny_int4_16(TUTTI_SKINNY_INT4_ARGUMENTS);
__global__ void tutti_skinny_int4_32(TUTTI_SKINNY_INT4_ARGUMENTS);

/* out = a(x Wg^T + bg) * (x Wu^T + bu), with the a of tutti_activate_mul_f32. As above, with w bf16
 * [2 * inner, w_stride]: gate rows, then up rows; bias f32 [2 * inner] or null; out bf16 [rows,
 * out_stride].
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

/* The same with weights in FP8: w u8 [2 * inner, w_stride], scales f32 [2 * inner, ..]. */
#define TUTTI_SKINNY_GATE_UP_FP8_ARGUMENTS                                                         \
    const tutti_bf16 *x, const uint8_t *w, const float *scales, const float *bias,                 \
        tutti_bf16 *out, uint32_t rows, uint32_t inner, uint32_t k, uint32_t x_stride,             \
        uint32_t w_stride, uint32_t out_stride, uint32_t gelu, uint32_t shift,                     \
        const uint32_t *live
__global__ void tutti_skinny_gate_up_fp8_8(TUTTI_SKINNY_GATE_UP_FP8_ARGUMENTS);
__global__ void tutti_skinny_gate_up_fp8_16(TUTTI_SKINNY_GATE_UP_FP8_ARGUMENTS);
__global__ void tutti_skinny_gate_up_fp8_32(TUTTI_SKINNY_GATE_UP_FP8_ARGUMENTS);

/* The same with 4-bit weights: w u8 [2 * inner, w_stride / 2], groups u32 [2 * inner, ..]. */
#define TUTTI_SKINNY_GATE_UP_INT4_ARGUMENTS                                                        \
    const tutti_bf16 *x, const uint8_t *w, const uint32_t *groups, const float *bias,              \
        tutti_bf16 *out, uint32_t rows, uint32_t inner, uint32_t k, uint32_t x_stride,             \
        uint32_t w_stride, uint32_t out_stride, uint32_t gelu, uint32_t shift,                     \
        const uint32_t *live
__global__ void tutti_skinny_gate_up_int4_8(TUTTI_SKINNY_GATE_UP_INT4_ARGUMENTS);
__global__ void tutti_skinny_gate_up_int4_16(TUTTI_SKINNY_GATE_UP_INT4_ARGUMENTS);
__global__ void tutti_skinny_gate_up_int4_32(TUTTI_SKINNY_GATE_UP_INT4_ARGUMENTS);

/* ---- experts.cu -----------------------------------------------------------------------------
 * A slot is a pair of a row and one of its experts: slot r * top_k + j is row r's expert j.
 * At most TUTTI_EXPERTS_MAX experts, TUTTI_TOP_EXPERTS_MAX of them for each row. */

/* Flags of tutti_route. NORMALISE: divide the chosen experts' weights by their sum. SIGMOID: an
 * expert's score is the sigmoid of its logit; otherwise, softmax over all logits. GATED: the shared
 * experts' weight is the sigmoid of one more logit, the last; otherwise it is 1. */
#define TUTTI_ROUTE_NORMALISE 1
#define TUTTI_ROUTE_SIGMOID 2
#define TUTTI_ROUTE_GATED 4

/* The `chosen` experts with the largest logits, or with SIGMOID with the largest scores plus
 * `bias` (null: none; not read otherwise), largest first, ties by lower index (NaN comes last).
 * Only experts of the `kept_groups` best of `groups` groups of one size, at most 32: a group's score
 * is its largest, or with SIGMOID the sum of its two largest.
 * Then the `shared` experts num_experts, num_experts + 1, .. . The chosen experts' weights are
 * their scores times `scale`. logits f32 [rows, num_experts + (GATED ? 1 : 0)]; bias f32 [num_experts];
 * experts u32, weights f32 [rows, chosen + shared], at most 32 of them. grid (rows), block 32. */
__global__ void tutti_route(const float* logits, const float* bias, uint32_t* experts,
                            float* weights, uint32_t num_experts, uint32_t chosen, uint32_t shared,
                            uint32_t groups, uint32_t kept_groups, uint32_t flags, float scale,
                            const uint32_t* live);

/* Groups slots by expert, `chunk_rows` rows at a time. For the rows from c * chunk_rows on, block c
 * writes num_tiles[c] tiles to tiles[c * tiles_stride ..], ordered by expert, then by slot, and the
 * slots that the tiles refer to, to slots[c * chunk_rows * top_k ..]. experts u32 [rows, top_k];
 * slots u32 [rows * top_k]; tiles_stride is at least the smaller of a chunk's slots and its slots /
 * tile_slots + num_experts. grid (ceil(rows / chunk_rows)), block 1024; `live` counts rows. */
__global__ void tutti_group_experts(const uint32_t* experts, uint32_t* slots, TuttiExpertTile* tiles,
                                    uint32_t* num_tiles, uint32_t rows, uint32_t top_k,
                                    uint32_t num_experts, uint32_t chunk_rows, uint32_t tile_slots,
                                    uint32_t tiles_stride, const uint32_t* live);

/* out[slot] = a(x[slot / top_k] Wg^T + bg, x[slot / top_k] Wu^T + bu) for the slots of all tiles,
 * with a(g, u) = m * sigmoid(alpha * m) * (v + shift), where m is g limited to at most `limit` and
 * v is u clamped to -limit..limit: silu(g) * u for alpha 1, limit infinity, shift 0. The name's
 * number is the most slots of a tile. bias f32 [num_experts * 2 * inner] or null; x bf16, rows
 * 16-byte aligned; w bf16 [num_experts * 2 * inner, w_stride], rows 16-byte aligned: each expert's
 * gate rows, then its up rows; out bf16 [slots, out_stride]. A slot's result is the same bits with
 * each variant.
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

/* The same with int8 weights: see tutti_skinny_int8_8. w u8 [num_experts * 2 * inner, w_stride],
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

/* The same with weights in FP8: see tutti_skinny_fp8_8. w u8 [num_experts * 2 * inner, w_stride],
 * scales f32 [num_experts * 2 * inner, ceil(k / 2^group_shift)]. Tiles of more slots than the
 * name's number are divided among the blocks along grid.z.
 * grid (most tiles, ceil(inner / 16), ceil(slots of a tile / number)), block 256. */
#define TUTTI_EXPERTS_GATE_UP_FP8_ARGUMENTS                                                        \
    const tutti_bf16 *x, const uint8_t *w, const float *scales, tutti_bf16 *out,                   \
        const uint32_t *slots, const TuttiExpertTile *tiles, const uint32_t *num_tiles,            \
        uint32_t top_k, uint32_t inner, uint32_t k, uint32_t x_stride, uint32_t w_stride,          \
        uint32_t out_stride, const float *bias, float alpha, float limit, float shift,             \
        uint32_t group_shift
__global__ void tutti_experts_gate_up_fp8_8(TUTTI_EXPERTS_GATE_UP_FP8_ARGUMENTS);
__global__ void tutti_experts_gate_up_fp8_16(TUTTI_EXPERTS_GATE_UP_FP8_ARGUMENTS);
__global__ void tutti_experts_gate_up_fp8_32(TUTTI_EXPERTS_GATE_UP_FP8_ARGUMENTS);

/* out[slot - first_slot] = x[slot] W^T + bias for the slots of all tiles. x bf16 [slots, x_stride],
 * w bf16 [num_experts * n, w_stride], rows 16-byte aligned; bias f32 [num_experts * n] or null;
 * out f32 [.., out_stride].
 * grid (most tiles, ceil(n / R)), block 256, with R = TUTTI_SKINNY_FEATURES(number). */
#define TUTTI_EXPERTS_DOWN_ARGUMENTS                                                               \
    const tutti_bf16 *x, const tutti_bf16 *w, float *out, const uint32_t *slots,                   \
        const TuttiExpertTile *tiles, const uint32_t *num_tiles, uint32_t first_slot, uint32_t n,  \
        uint32_t k, uint32_t x_stride, uint32_t w_stride, uint32_t out_stride, const float *bias
__global__ void tutti_experts_down_8(TUTTI_EXPERTS_DOWN_ARGUMENTS);
__global__ void tutti_experts_down_16(TUTTI_EXPERTS_DOWN_ARGUMENTS);
__global__ void tutti_experts_down_32(TUTTI_EXPERTS_DOWN_ARGUMENTS);
__global__ void tutti_experts_down_64(TUTTI_EXPERTS_DOWN_ARGUMENTS);

/* The same with int8 weights: w u8 [num_experts * n, w_stride], scales f32 [num_experts * n]. */
#define TUTTI_EXPERTS_DOWN_INT8_ARGUMENTS                                                          \
    const tutti_bf16 *x, const uint8_t *w, const float *scales, float *out, const uint32_t *slots, \
        const TuttiExpertTile *tiles, const uint32_t *num_tiles, uint32_t first_slot, uint32_t n,  \
        uint32_t k, uint32_t x_stride, uint32_t w_stride, uint32_t out_stride, const float *bias
__global__ void tutti_experts_down_int8_8(TUTTI_EXPERTS_DOWN_INT8_ARGUMENTS);
__global__ void tutti_experts_down_int8_16(TUTTI_EXPERTS_DOWN_INT8_ARGUMENTS);
__global__ void tutti_experts_down_int8_32(TUTTI_EXPERTS_DOWN_INT8_ARGUMENTS);
__global__ void tutti_experts_down_int8_64(TUTTI_EXPERTS_DOWN_INT8_ARGUMENTS);

/* The same with weights in FP8: w u8 [num_experts * n, w_stride], scales f32 [num_experts * n, ..];
 * tiles as above. grid (most tiles, ceil(n / R), ceil(slots of a tile / number)), block 256. */
#define TUTTI_EXPERTS_DOWN_FP8_ARGUMENTS                                                           \
    const tutti_bf16 *x, const uint8_t *w, const float *scales, float *out, const uint32_t *slots, \
        const TuttiExpertTile *tiles, const uint32_t *num_tiles, uint32_t first_slot, uint32_t n,  \
        uint32_t k, uint32_t x_stride, uint32_t w_stride, uint32_t out_stride, const float *bias,  \
        uint32_t group_shift
__global__ void tutti_experts_down_fp8_8(TUTTI_EXPERTS_DOWN_FP8_ARGUMENTS);
__global__ void tutti_experts_down_fp8_16(TUTTI_EXPERTS_DOWN_FP8_ARGUMENTS);
__global__ void tutti_experts_down_fp8_32(TUTTI_EXPERTS_DOWN_FP8_ARGUMENTS);

/* out[r] = sum over j, in order, of weights[r, j] * parts[r, j]. parts f32 [rows, top_k, width],
 * weights f32 [rows, top_k], out f32 [rows, width]. grid (rows, ceil(width / 1024)), block 256;
 * `live` counts from `first_row` rows before the first of these. */
__global__ void tutti_experts_sum(const float* parts, const float* weights, float* out,
                                  uint32_t top_k, uint32_t width, uint32_t first_row,
                                  const uint32_t* live);

/* out[r] = parts[r] if row r has a matrix (experts[r] is not TUTTI_NOT_ASSIGNED), otherwise 0: for
 * rows with one slot each, whose matrices the caller chose. parts f32 [rows, width], experts u32
 * [rows], out f32 [rows, width]. grid (rows, ceil(width / 1024)), block 256; `live` counts from
 * `first_row` rows before the first of these. */
__global__ void tutti_assigned_rows(const float* parts, const uint32_t* experts, float* out,
                                    uint32_t width, uint32_t first_row, const uint32_t* live);

/* The same, rounded: out bf16 [rows, out_stride]. */
__global__ void tutti_assigned_rows_bf16(const float* parts, const uint32_t* experts,
                                         tutti_bf16* out, uint32_t width, uint32_t out_stride,
                                         uint32_t first_row, const uint32_t* live);

/* ---- sample.cu ------------------------------------------------------------------------------
 * logits f32 [rows, stride], only the first `vocab` columns used; at most TUTTI_VOCAB_MAX. */

/* Samples each row with `params[row]`, in the order of kernels::reference: mask, bias, suppression,
 * penalties, then arg-max or temperature, min-p, top-k, top-p and one uniform number.
 * biases: all rows' logit biases; ids u32: all rows' suppressed, prompt and output tokens.
 * masks u32: the allowed tokens of rows with a mask: bit i % 32 of a mask's word i / 32 is for
 * token i, ceil(vocab / 32) words each; may be null when no row has one.
 * edited f32 [rows, vocab], scratch; counts u32 [rows, vocab], scratch that must be all 0 before
 * the first call and is all 0 again after each; both may be null when no row has bias,
 * suppression or penalties. top_ids u32, top_logprobs f32 [rows, top_stride]: the most likely
 * tokens, best first; at most min(top_n, vocab, TUTTI_TOP_MAX, top_stride) are written; may be
 * null when no row asks for any.
 * Weights are integer multiples of 2^-40 of the largest, summed exactly.
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

/* The largest logit of each row, ties by lower id, plus first_id: TuttiIdValue [rows]. The columns
 * are the tokens from first_id on of a vocabulary; params[row] can have a mask over all of it (the
 * only field of params that is read; params may be null). Id TUTTI_CORRUPTED when there is a NaN or
 * +infinity; TUTTI_NOTHING_ALLOWED, with -infinity, when no column, or none that the mask leaves, is
 * above -infinity: whether that is so of the whole row is for tutti_argmax_merge to say.
 * grid (rows), block 1024. */
__global__ void tutti_argmax(const float* logits, const TuttiSampleParams* params,
                             const uint32_t* masks, TuttiIdValue* out, uint32_t stride,
                             uint32_t vocab, uint32_t first_id, const uint32_t* live);

/* The best of tutti_argmax's results for each rank's part of the vocabulary, ties by lower id:
 * found TuttiIdValue [ranks, rows], parts in the order of their ids. Corrupted when any part is,
 * or when no part has an allowed token; logprob and rank are 0. grid (ceil(rows / 256)),
 * block 256; `live` counts rows. */
__global__ void tutti_argmax_merge(const TuttiIdValue* found, TuttiSampled* out, uint32_t ranks,
                                   uint32_t rows, const uint32_t* live);

/* Of each row the order keys (see select.cuh) of the tokens that can be chosen, as far as this part
 * of the vocabulary decides that: out u64 [rows, most], the largest first, then 0. With a
 * temperature above 0, the best min(top_k, most, those with weight beside the part's best);
 * otherwise the best. The columns are the tokens from first_id on, whose ids the keys have; only
 * temperature, min_p, top_k and mask_start of params[row] are read. The first key is all ones when
 * there is a NaN or +infinity, and 0 when no column that the mask leaves is above -infinity.
 * most up to TUTTI_TOP_MAX. grid (rows), block 1024. */
__global__ void tutti_best_keys(const float* logits, const TuttiSampleParams* params,
                                const uint32_t* masks, uint64_t* out, uint32_t stride,
                                uint32_t vocab, uint32_t first_id, uint32_t most,
                                const uint32_t* live);

/* Chooses each row's token from what tutti_best_keys found in each rank's part of the vocabulary:
 * the one that tutti_sample chooses from the whole row with the same mask, for rows without bias,
 * suppression, penalties and log-probabilities whose temperature is 0 or whose top_k is from 1 to
 * `most` and below the whole vocabulary. keys u64 [ranks, rows, most], ranks * most up to 2048.
 * Corrupted when any part is, or when no part has an allowed token; logprob and rank are 0.
 * grid (rows), block 1024. */
__global__ void tutti_draw_best(const uint64_t* keys, const TuttiSampleParams* params,
                                TuttiSampled* out, uint32_t ranks, uint32_t rows, uint32_t most,
                                const uint32_t* live);

/* ---- blocks.cu ------------------------------------------------------------------------------
 * A KV cache is `planes` arrays (K and V of every layer), `plane_stride` elements apart, of blocks
 * of `block_elements` (= num_kv_heads * block_size * head_dim, a multiple of 8) bf16. A cache in FP8
 * counts as one of half as many elements: bytes are copied. */

/* out: staging[i] = block blocks[i] of all planes; in: the reverse. staging bf16 [n, planes,
 * block_elements]: device memory, or host memory that the device can address.
 * grid (n, planes), block 256. */
__global__ void tutti_blocks_out(const tutti_bf16* cache, const uint32_t* blocks,
                                 tutti_bf16* staging, uint64_t plane_stride,
                                 uint32_t block_elements, const uint32_t* live);
__global__ void tutti_blocks_in(tutti_bf16* cache, const uint32_t* blocks,
                                const tutti_bf16* staging, uint64_t plane_stride,
                                uint32_t block_elements, const uint32_t* live);

}
#endif
