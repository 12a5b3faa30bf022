// Shared by the attention kernels: where a token's K and V are, which tokens a row attends to, and
// how the tokens of a sequence are split.
#pragma once
#include "device.cuh"

namespace tutti {

constexpr float LOG2_E = 1.4426950408889634f;
// The exponent before any token was seen.
constexpr float NOTHING = -INFINITY;

// One sequence and KV head: positions of its tokens in K or V of a layer, in units of head_dim
// elements.
struct Pages {
    const uint32_t* table;
    uint32_t num_kv_heads;
    uint32_t kv_head;
    uint32_t block_shift;

    // Block of the cache that is block `index` of the sequence.
    __device__ __forceinline__ uint32_t block(uint32_t index) const {
        return load_input(table + index);
    }
    // Offset of the first token of a block of the cache.
    __device__ __forceinline__ size_t start_of(size_t block) const {
        return (block * num_kv_heads + kv_head) << block_shift;
    }
    __device__ __forceinline__ uint32_t in_block(uint32_t position) const {
        return position & ((1u << block_shift) - 1);
    }
    // Offset of the token at `position`.
    __device__ __forceinline__ size_t token(uint32_t position) const {
        return start_of(block(position >> block_shift)) + in_block(position);
    }
};

// The first position that the row at `position` attends to.
__device__ __forceinline__ uint32_t first_seen(uint32_t position, uint32_t window) {
    return window == 0 || position < window ? 0 : position + 1 - window;
}

// The sequence that a row belongs to: the last one that does not begin after it.
__device__ __forceinline__ uint32_t seq_of_row(const TuttiSeq* seqs, uint32_t count, uint32_t row) {
    uint32_t low = 0;
    uint32_t high = count;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (seqs[middle].row_start <= row) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// A sequence of one row; can be read before earlier kernels are complete.
struct Single {
    uint32_t row;
    uint32_t context_len;
    uint32_t table_start;

    __device__ __forceinline__ Single(const TuttiSeq* seqs, uint32_t index) {
        const TuttiSeq* seq = seqs + index;
        row = load_input(&seq->row_start);
        context_len = load_input(&seq->context_len);
        table_start = load_input(&seq->table_start);
    }
};

// How the tokens of a sequence with one row are split: see kernels.h.
struct Splits {
    uint32_t start;   // first visible token
    uint32_t aligned; // `start` rounded down to a multiple of 16: where the first split begins
    uint32_t end;     // one past the last token
    uint32_t len;
    uint32_t count;

    __device__ __forceinline__ Splits(uint32_t context_len, uint32_t window, uint32_t max_splits,
                                      uint32_t least) {
        end = context_len;
        start = first_seen(context_len - 1, window);
        aligned = start & ~15u;
        const uint32_t tokens = end - aligned;
        len = (divide_up(tokens, max_splits) + 15) & ~15u;
        len = len < least ? least : len;
        count = divide_up(tokens, len);
    }
};

// Caps scores before they are scaled: `scale` times the result is cap * tanh(scale * score / cap).
template <int N>
__device__ __forceinline__ void cap_scores(float (&scores)[N], float scale, float cap) {
    const float inner = 2.0f * LOG2_E * scale / cap;
    const float outer = cap / scale;
#pragma unroll
    for (int i = 0; i < N; i++) {
        // tanh(x) = 1 - 2 / (1 + e^2x); e^2x may be infinite.
        scores[i] = outer * (1.0f - 2.0f / (1.0f + exp2_fast(inner * scores[i])));
    }
}

// The maximum, or sum, over the 4 lanes that hold a row's columns.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

// The running softmax of one row: `maximum` is in base-2 exponents.
struct Running {
    float maximum = NOTHING;
    float sum = 0.0f;

    // Updates the maximum; returns the factor for the sums so far. Until a token was seen, the
    // maximum stays -infinity; `base()` is the exponents' reference.
    __device__ __forceinline__ float raise(float candidate) {
        const float before = maximum;
        maximum = fmaxf(maximum, candidate);
        const float factor = exp2_fast(before - base());
        sum *= factor;
        return factor;
    }
    __device__ __forceinline__ float base() const { return maximum == NOTHING ? 0.0f : maximum; }
    // Starts with a sink's score, before any token's. Among lanes whose sums are added up, only one
    // may be `first`, which counts the sink.
    __device__ __forceinline__ void begin(float sink, bool first) {
        maximum = sink * LOG2_E;
        sum = first ? 1.0f : 0.0f;
    }
};

}  // namespace tutti
