// Linear attention by the gated delta rule (Gated DeltaNet) or as in Mamba 2, in three launches:
// what each row brings, the recurrence of each sequence, and the norm or the gate of each row. And
// gates of attention's results.
//
// A column of S changes by itself: it needs k, q and the gates of a token, and its own element of
// v. So a sequence's tokens are walked by as many independent groups of 8 lanes as there are
// columns of all heads (4096 in Qwen3-Next), each with its column in registers. What a step takes
// is a token's latency times the tokens; so a token has one round of sums over lanes: with
// o = S q, and S = kept S' + u k^T,
//
//   u = beta (v - kept S' k),   o = kept S' q + (q k) u
//
// where both sums over S' can be made together, and q k does not depend on S. In Mamba 2, where
// nothing is recalled, u = step v, and skip v is added to o.
//
// Every sum that S or o is made of has one order and says where it is fused, so that it does not
// matter which copy of a loop's body computes a token: the bits are the same however steps divide a
// sequence.
//
// Shapes and launch rules: kernels.h.
#include "rows.cuh"

namespace tutti {
namespace {

constexpr uint32_t WARPS = 8;
constexpr uint32_t THREADS = 32 * WARPS;
// Of the convolution; and how many they usually are.
constexpr uint32_t TOKENS_MOST = 8;
constexpr uint32_t TOKENS_USUAL = 4;
// Fours of a head that a lane has, where a warp has a head.
constexpr uint32_t HEAD_FOURS = 2;
// Added to a sum of squares.
constexpr float LENGTH_EPS = 1e-6f;
// Lanes that share a column, and columns of a block.
constexpr uint32_t SHARERS = 8;
constexpr uint32_t COLUMNS = THREADS / SHARERS;
static_assert(COLUMNS == TUTTI_DELTA_COLUMNS, "as kernels.h says");
static_assert(4 * THREADS == TUTTI_DELTA_KEPT, "as kernels.h says");
// Tokens that come to shared memory together, while those before are used.
constexpr uint32_t CHUNK = 8;

// Sizes of a layer.
struct Sizes {
    uint32_t key_heads;
    uint32_t value_heads;
    uint32_t key_dim;
    uint32_t value_dim;
    uint32_t kernel;
    // Mamba 2.
    bool adds;

    __device__ __forceinline__ uint32_t keys() const { return key_heads * key_dim; }
    __device__ __forceinline__ uint32_t values() const { return value_heads * value_dim; }
    __device__ __forceinline__ uint32_t channels() const { return 2 * keys() + values(); }
    // Of the matrices in a slot.
    __device__ __forceinline__ size_t matrices() const {
        return static_cast<size_t>(values()) * key_dim;
    }
    __device__ __forceinline__ size_t slot() const {
        return matrices() + static_cast<size_t>(kernel - 1) * channels();
    }
};

// A sequence's rows, and its slot. Can be read before earlier kernels are complete.
struct Rows {
    uint32_t first;
    uint32_t count;
    uint32_t state;
    bool is_new;

    __device__ __forceinline__ Rows(const TuttiSeq* seqs, const uint32_t* states, uint32_t index) {
        first = load_input(&seqs[index].row_start);
        count = load_input(&seqs[index].num_rows);
        is_new = load_input(&seqs[index].context_len) == count;
        state = load_input(states + index);
    }
};

// The sequence that a row belongs to: the last one that does not begin after it.
__device__ __forceinline__ uint32_t find_seq(const TuttiSeq* seqs, uint32_t count, uint32_t row) {
    // So it is where every sequence has one row.
    if (row < count && load_input(&seqs[row].row_start) == row) {
        return row;
    }
    uint32_t low = 0;
    uint32_t high = count;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (load_input(&seqs[middle].row_start) <= row) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

__device__ __forceinline__ float4 fused4(float a, float4 b, float4 c) {
    return make_float4(fmaf(a, b.x, c.x), fmaf(a, b.y, c.y), fmaf(a, b.z, c.z), fmaf(a, b.w, c.w));
}

__device__ __forceinline__ float4 fused4(float4 a, float4 b, float4 c) {
    return make_float4(fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y), fmaf(a.z, b.z, c.z),
                       fmaf(a.w, b.w, c.w));
}

__device__ __forceinline__ float4 times4(float a, float4 b) {
    return make_float4(__fmul_rn(a, b.x), __fmul_rn(a, b.y), __fmul_rn(a, b.z), __fmul_rn(a, b.w));
}

__device__ __forceinline__ float sum4(float4 v) { return (v.x + v.y) + (v.z + v.w); }

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// ln(1 + exp(x)), by its larger part.
__device__ __forceinline__ float softplus(float x) {
    return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
}

// What a warp adds up.
template <uint32_t COUNT>
__device__ __forceinline__ float products(const float4 (&a)[COUNT], const float4 (&b)[COUNT]) {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (uint32_t i = 0; i < COUNT; i++) {
        sum = fused4(a[i], b[i], sum);
    }
    return warp_sum(sum4(sum));
}

// The tokens up to a row, as the convolution sees them.
struct Window {
    const float* row;
    // Number of tokens before it in this step, of the row's sequence.
    uint32_t before;
    // The last tokens before this step, the newest one at its end; null if there are none.
    const float* kept;
    uint32_t kernel;
    uint32_t channels;
    uint32_t row_stride;

    // Four channels of the `tap`-th of the tokens, the oldest first.
    __device__ __forceinline__ float4 at(uint32_t tap, uint32_t channel) const {
        const uint32_t back = kernel - 1 - tap;
        if (back <= before) {
            return load_row(row + channel - static_cast<size_t>(back) * row_stride);
        }
        if (kept == nullptr) {
            return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
        // Of kernel - 1 places, the last is the token right before this step.
        return load_row(kept + static_cast<size_t>(tap + before) * channels + channel);
    }
};

// Of the four channels that a lane has in each part of a head, the usual number of weights.
struct LaneWeights {
    float4 v[2][4];
};

// The convolutions' weights, f32 [channels, kernel], and those of this thread's channels in shared
// memory, since each row reads them: lanes are 64 bytes apart in `all`, so that four loads of a
// warp take 64 turns in L1, but only 16 here. With registers instead, fewer blocks would fit on a
// multiprocessor, and fewer rows be on their way.
struct Weights {
    const float* all;
    // f32 [channels], or null.
    const float* bias;
    // Where a lane has one four of a head, with the usual number of weights.
    bool are_kept;
    // This thread's, four channels of a tap at a time: the next is 4 THREADS further on.
    float* kept;

    // Those of the channels from `first` on, and in the second part `apart` further on. They never
    // change, so they can be read before earlier kernels are complete.
    __device__ __forceinline__ LaneWeights load(uint32_t first, uint32_t apart, uint32_t dim,
                                                uint32_t parts) const {
        LaneWeights own = {};
        const uint32_t at = 4 * (threadIdx.x % 32);
#pragma unroll
        for (uint32_t i = 0; i < 2 * 4; i++) {
            if (i / 4 < parts && at < dim) {
                const size_t channel = first + i / 4 * apart + at + i % 4;
                own.v[i / 4][i % 4] = load_constants(all + channel * TOKENS_USUAL);
            }
        }
        return own;
    }
    __device__ __forceinline__ void keep(const LaneWeights& own, uint32_t parts) const {
#pragma unroll
        for (uint32_t part = 0; part < 2; part++) {
            if (part < parts) {
                const float4(&w)[4] = own.v[part];
                float* to = kept + part * TOKENS_USUAL * 4 * THREADS;
                store4(to, make_float4(w[0].x, w[1].x, w[2].x, w[3].x));
                store4(to + 4 * THREADS, make_float4(w[0].y, w[1].y, w[2].y, w[3].y));
                store4(to + 8 * THREADS, make_float4(w[0].z, w[1].z, w[2].z, w[3].z));
                store4(to + 12 * THREADS, make_float4(w[0].w, w[1].w, w[2].w, w[3].w));
            }
        }
    }
    __device__ __forceinline__ float4 at(uint32_t part, uint32_t tap) const {
        return load4(kept + (part * TOKENS_USUAL + tap) * 4 * THREADS);
    }
    // What the sums of four channels begin with.
    __device__ __forceinline__ float4 begin(uint32_t channel) const {
        return bias == nullptr ? make_float4(0.0f, 0.0f, 0.0f, 0.0f)
                               : load_constants(bias + channel);
    }
};

__device__ __forceinline__ float4 silu4(float4 v) {
    return make_float4(silu(v.x), silu(v.y), silu(v.z), silu(v.w));
}

// Four channels of the row, convolved, with SiLU.
__device__ __forceinline__ float4 convolved(const Weights& weights, const Window& window,
                                            uint32_t channel) {
    const uint32_t kernel = window.kernel;
    float4 sum = weights.begin(channel);
    for (uint32_t tap = 0; tap < kernel; tap++) {
        const float* w = weights.all + static_cast<size_t>(channel) * kernel + tap;
        sum = fused4(make_float4(w[0], w[kernel], w[2 * kernel], w[3 * kernel]),
                     window.at(tap, channel), sum);
    }
    return silu4(sum);
}

// This lane's fours of a head, convolved; zeros beyond them. Its parts' channels begin at `first`,
// and `apart` further on.
template <uint32_t PARTS>
__device__ __forceinline__ void convolve_head(float4 (&fours)[PARTS][HEAD_FOURS],
                                              const Weights& weights, const Window& window,
                                              uint32_t first, uint32_t apart, uint32_t dim) {
    const uint32_t lane_first = 4 * (threadIdx.x % 32);
#pragma unroll
    for (uint32_t part = 0; part < PARTS; part++) {
#pragma unroll
        for (uint32_t i = 0; i < HEAD_FOURS; i++) {
            fours[part][i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }
    if (weights.are_kept) {
        if (lane_first >= dim) {
            return;
        }
        // All parts are on their way before the first is used.
        float4 x[PARTS][TOKENS_USUAL];
#pragma unroll
        for (uint32_t i = 0; i < PARTS * TOKENS_USUAL; i++) {
            const uint32_t part = i / TOKENS_USUAL;
            x[part][i % TOKENS_USUAL] =
                window.at(i % TOKENS_USUAL, first + part * apart + lane_first);
        }
#pragma unroll
        for (uint32_t part = 0; part < PARTS; part++) {
            float4 sum = weights.begin(first + part * apart + lane_first);
#pragma unroll
            for (uint32_t tap = 0; tap < TOKENS_USUAL; tap++) {
                sum = fused4(weights.at(part, tap), x[part][tap], sum);
            }
            fours[part][0] = silu4(sum);
        }
        return;
    }
#pragma unroll
    for (uint32_t part = 0; part < PARTS; part++) {
#pragma unroll
        for (uint32_t i = 0; i < HEAD_FOURS; i++) {
            const uint32_t at = lane_first + 4 * 32 * i;
            if (at < dim) {
                fours[part][i] = convolved(weights, window, first + part * apart + at);
            }
        }
    }
}

__device__ __forceinline__ void store_head(float* to, const float4 (&fours)[HEAD_FOURS],
                                           float scale, uint32_t dim) {
#pragma unroll
    for (uint32_t i = 0; i < HEAD_FOURS; i++) {
        const uint32_t at = 4 * (threadIdx.x % 32 + 32 * i);
        if (at < dim) {
            store_row(to + at, times4(scale, fours[i]));
        }
    }
}

// What comes to shared memory of CHUNK tokens: q and k in FOURS fours for each of the lanes that
// share a column, the block's columns of v, and the head's gates.
template <uint32_t FOURS>
struct Tokens {
    // Fours of q, or of k, of a token.
    static constexpr uint32_t KEYS = FOURS * SHARERS;
    float* keys;
    float* values;
    float* gates;
    // Where the head's q, k and gates, and the block's columns of v, are of the sequence's first
    // row; from one row to the next; what exists.
    const float* from_keys[2];
    const float* from_values;
    const float* from_gates;
    uint32_t stride;
    uint32_t gates_stride;
    uint32_t key_dim;
    uint32_t columns;

    // Begins to copy `count` tokens from the `first` on.
    __device__ __forceinline__ void copy(uint32_t buffer, uint32_t first, uint32_t count) {
        for (uint32_t i = threadIdx.x; i < count * 2 * KEYS; i += THREADS) {
            const uint32_t token = i / (2 * KEYS);
            const uint32_t at = 4 * (i % KEYS);
            const float* from = i / KEYS % 2 == 0 ? from_keys[0] : from_keys[1];
            copy_async(keys + (static_cast<size_t>(buffer) * CHUNK * 2 * KEYS + i) * 4,
                       from + static_cast<size_t>(first + token) * stride + at, at < key_dim);
        }
        constexpr uint32_t PIECES = COLUMNS / 4;
        static_assert(CHUNK * PIECES + CHUNK <= THREADS, "a thread copies one of these");
        if (threadIdx.x < count * PIECES) {
            const uint32_t token = threadIdx.x / PIECES;
            const uint32_t at = 4 * (threadIdx.x % PIECES);
            copy_async(values + (buffer * CHUNK + token) * COLUMNS + at,
                       from_values + static_cast<size_t>(first + token) * stride + at,
                       at < columns);
        }
        const uint32_t token = threadIdx.x - CHUNK * PIECES;
        if (threadIdx.x >= CHUNK * PIECES && token < count) {
            copy_async(gates + (buffer * CHUNK + token) * 4,
                       from_gates + static_cast<size_t>(first + token) * gates_stride, true);
        }
        commit_copies();
    }
    // The `which`-th of this lane's fours of q (0) or k (1) of a token.
    __device__ __forceinline__ float4 four(uint32_t buffer, uint32_t token, uint32_t of,
                                           uint32_t which) const {
        const uint32_t row = (buffer * CHUNK + token) * 2 + of;
        return load4(keys + (row * KEYS + which * SHARERS + threadIdx.x % SHARERS) * 4);
    }
};

// The channels of the sequence's last tokens, for the next step: those before this step from the
// slot itself. A thread has four channels.
__device__ __forceinline__ void keep_last(const float* qkvz, float* kept, const Rows& own,
                                          const Sizes& sizes, uint32_t channel) {
    const uint32_t channels = sizes.channels();
    if (channel >= channels) {
        return;
    }
    const uint32_t stride = channels + sizes.values();
    float4 last[TOKENS_MOST - 1];
#pragma unroll
    for (uint32_t place = 0; place < TOKENS_MOST - 1; place++) {
        last[place] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const uint32_t from = own.count + place;
        if (place >= sizes.kernel - 1) {
            continue;
        }
        if (from >= sizes.kernel - 1) {
            const size_t row = own.first + (from - (sizes.kernel - 1));
            last[place] = load_row(qkvz + row * stride + channel);
        } else if (!own.is_new) {
            last[place] = load_row(kept + static_cast<size_t>(from) * channels + channel);
        }
    }
#pragma unroll
    for (uint32_t place = 0; place < TOKENS_MOST - 1; place++) {
        if (place < sizes.kernel - 1) {
            store_row(kept + static_cast<size_t>(place) * channels + channel, last[place]);
        }
    }
}

template <uint32_t FOURS>
__device__ __forceinline__ void update(const float* qkvz, const float* gates, const TuttiSeq* seqs,
                                       const uint32_t* states, float* mixed, float* slots,
                                       const Sizes& sizes, const uint32_t* live) {
    using Some = Tokens<FOURS>;
    SHARED_ARRAY(float, shared_keys, 2 * CHUNK * 2 * Some::KEYS * 4);
    SHARED_ARRAY(float, shared_values, 2 * CHUNK * COLUMNS);
    SHARED_ARRAY(float, shared_gates, 2 * CHUNK * 4);
    release_successors();
    if (blockIdx.y >= live_items(live)) {
        end_without_waiting(blockIdx.y == 0);
        return;
    }
    const Rows own(seqs, states, blockIdx.y);
    float* slot = slots + static_cast<size_t>(own.state) * sizes.slot();
    const uint32_t blocks = divide_up(sizes.value_dim, COLUMNS);
    const uint32_t head = blockIdx.x / blocks;
    const uint32_t first_column = blockIdx.x % blocks * COLUMNS;
    const uint32_t column = first_column + threadIdx.x / SHARERS;
    const uint32_t part = threadIdx.x % SHARERS;
    // The blocks behind the last head keep channels.
    const bool updates = head < sizes.value_heads;
    const bool exists = updates && column < sizes.value_dim;
    float* s = slot + (static_cast<size_t>(head) * sizes.value_dim + column) * sizes.key_dim;
    if (threadIdx.x % 32 == 0 && exists && !own.is_new) {
        // The warp's columns: all of them exist.
        prefetch(s, 32 / SHARERS * sizes.key_dim * static_cast<uint32_t>(sizeof(float)));
    }
    wait_for_predecessors();
    if (!updates) {
        const uint32_t index = blockIdx.x - sizes.value_heads * blocks;
        keep_last(qkvz, slot + sizes.matrices(), own, sizes, 4 * (index * THREADS + threadIdx.x));
        return;
    }
    const uint32_t key_head = head / (sizes.value_heads / sizes.key_heads);
    const uint32_t channels = sizes.channels();
    float* row = mixed + static_cast<size_t>(own.first) * channels;
    float* result = row + 2 * sizes.keys() + head * sizes.value_dim + column;
    Some tokens;
    tokens.keys = shared_keys;
    tokens.values = shared_values;
    tokens.gates = shared_gates;
    tokens.from_keys[0] = row + key_head * sizes.key_dim;
    tokens.from_keys[1] = tokens.from_keys[0] + sizes.keys();
    tokens.from_values = row + 2 * sizes.keys() + head * sizes.value_dim + first_column;
    tokens.from_gates = gates + (static_cast<size_t>(own.first) * sizes.value_heads + head) * 4;
    tokens.stride = channels;
    tokens.gates_stride = 4 * sizes.value_heads;
    tokens.key_dim = sizes.key_dim;
    tokens.columns = sizes.value_dim - first_column;
    tokens.copy(0, 0, at_most(own.count, CHUNK));
    float4 kept[FOURS];
#pragma unroll
    for (uint32_t i = 0; i < FOURS; i++) {
        const uint32_t at = 4 * (part + SHARERS * i);
        kept[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (exists && !own.is_new && at < sizes.key_dim) {
            kept[i] = load_row(s + at);
        }
    }
    // A factor, since two loops are longer than one.
    const float recalls = sizes.adds ? 0.0f : -1.0f;
    uint32_t buffer = 0;
    for (uint32_t first = 0; first < own.count; first += CHUNK) {
        wait_copies<0>();
        // All copies have come, and what was in the other buffer has been used.
        __syncthreads();
        if (own.count - first > CHUNK) {
            tokens.copy(buffer ^ 1, first + CHUNK, at_most(own.count - first - CHUNK, CHUNK));
        }
        const uint32_t count = at_most(own.count - first, CHUNK);
        for (uint32_t token = 0; token < count; token++) {
            float4 keys[FOURS];
            float4 by_key = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            float4 by_query = by_key;
#pragma unroll
            for (uint32_t i = 0; i < FOURS; i++) {
                keys[i] = tokens.four(buffer, token, 1, i);
                by_key = fused4(keys[i], kept[i], by_key);
                by_query = fused4(tokens.four(buffer, token, 0, i), kept[i], by_query);
            }
            float recalled = sum4(by_key);
            float asked = sum4(by_query);
#pragma unroll
            for (uint32_t distance = SHARERS / 2; distance > 0; distance /= 2) {
                recalled += __shfl_xor_sync(ALL_LANES, recalled, distance);
                asked += __shfl_xor_sync(ALL_LANES, asked, distance);
            }
            // What is kept, beta or the step, q k, skip or 0.
            const float4 gate = load4(shared_gates + (buffer * CHUNK + token) * 4);
            const float v = shared_values[(buffer * CHUNK + token) * COLUMNS +
                                          threadIdx.x / SHARERS];
            const float u = __fmul_rn(gate.y, fmaf(__fmul_rn(recalls, gate.x), recalled, v));
            if (part == 0 && exists) {
                result[static_cast<size_t>(first + token) * channels] =
                    fmaf(gate.w, v, fmaf(gate.z, u, __fmul_rn(gate.x, asked)));
            }
#pragma unroll
            for (uint32_t i = 0; i < FOURS; i++) {
                kept[i] = fused4(u, keys[i], times4(gate.x, kept[i]));
            }
        }
        buffer ^= 1;
    }
#pragma unroll
    for (uint32_t i = 0; i < FOURS; i++) {
        const uint32_t at = 4 * (part + SHARERS * i);
        if (exists && at < sizes.key_dim) {
            store_row(s + at, kept[i]);
        }
    }
}

}  // namespace
}  // namespace tutti

using namespace tutti;

// A warp has a key head (q and k) or a value head (v and the gates) of each row.
extern "C" __global__ void __launch_bounds__(THREADS)
    tutti_delta_mix(const float* qkvz, const float* ba, const float* conv, const float* conv_bias,
                    const float* decay, const float* dt_bias, const float* skip, const float* slots,
                    const TuttiSeq* seqs, const uint32_t* states, const uint32_t* num_seqs,
                    float* mixed, float* gates, TUTTI_DELTA_SIZE_ARGUMENTS, uint32_t rows,
                    uint32_t each, uint32_t releases, const uint32_t* live) {
    SHARED_ARRAY(float, shared_weights, 2 * 4 * 4 * THREADS);
    // Otherwise the end of the block does it: see kernels.h.
    if (releases != 0) {
        release_successors();
    }
    const Sizes sizes = {key_heads, value_heads, key_dim, value_dim, kernel, adds != 0};
    rows = at_most(rows, live_items(live));
    const uint32_t first = blockIdx.x * each;
    if (first >= rows) {
        end_without_waiting(blockIdx.x == 0);
        return;
    }
    const uint32_t unit = blockIdx.y * WARPS + threadIdx.x / 32;
    const uint32_t lane = threadIdx.x % 32;
    const bool is_key = unit < key_heads;
    const uint32_t head = is_key ? unit : unit - key_heads;
    const bool exists = unit < key_heads + value_heads;
    const uint32_t dim = is_key ? key_dim : value_dim;
    const uint32_t channel = is_key ? head * key_dim : 2 * sizes.keys() + head * value_dim;
    const uint32_t parts = is_key ? 2 : 1;
    const Weights weights = {conv, conv_bias, kernel == TOKENS_USUAL && dim <= 4 * 32,
                             shared_weights + 4 * threadIdx.x};
    LaneWeights of_lane = {};
    if (exists && weights.are_kept) {
        of_lane = weights.load(channel, sizes.keys(), dim, parts);
    } else if (exists && lane < parts) {
        prefetch(conv + static_cast<size_t>(channel + lane * sizes.keys()) * kernel,
                 dim * kernel * static_cast<uint32_t>(sizeof(float)));
    }
    float rate = 0.0f;
    float bias = 0.0f;
    float skipped = 0.0f;
    if (exists && !is_key) {
        rate = load_early(decay + head);
        bias = load_early(dt_bias + head);
        skipped = sizes.adds ? load_early(skip + head) : 0.0f;
    }
    uint32_t index = find_seq(seqs, load_input(num_seqs), first);
    Rows own(seqs, states, index);
    if (exists && weights.are_kept) {
        // They have come together with the above.
        weights.keep(of_lane, parts);
    }
    wait_for_predecessors();
    if (!exists) {
        return;
    }
    const uint32_t channels = sizes.channels();
    const uint32_t group = value_heads / key_heads;
    const uint32_t end = first + at_most(each, rows - first);
#pragma unroll 1
    for (uint32_t row = first; row < end; row++) {
        if (row - own.first >= own.count) {
            index++;
            own = Rows(seqs, states, index);
        }
        const float* kept = slots + static_cast<size_t>(own.state) * sizes.slot();
        Window window;
        window.row_stride = channels + sizes.values();
        window.row = qkvz + static_cast<size_t>(row) * window.row_stride;
        window.before = row - own.first;
        window.kept = own.is_new ? nullptr : kept + sizes.matrices();
        window.kernel = kernel;
        window.channels = channels;
        float* to = mixed + static_cast<size_t>(row) * channels + channel;
        float* of_row = gates + static_cast<size_t>(row) * value_heads * 4;
        if (is_key) {
            float4 of[2][HEAD_FOURS];
            convolve_head(of, weights, window, channel, sizes.keys(), dim);
            float q_scale = 1.0f;
            float k_scale = 1.0f;
            if (!sizes.adds) {
                const float root = sqrtf(static_cast<float>(key_dim));
                q_scale = 1.0f / (sqrtf(products(of[0], of[0]) + LENGTH_EPS) * root);
                k_scale = 1.0f / sqrtf(products(of[1], of[1]) + LENGTH_EPS);
            }
            const float both = products(of[0], of[1]) * q_scale * k_scale;
            store_head(to, of[0], q_scale, dim);
            store_head(to + sizes.keys(), of[1], k_scale, dim);
#pragma unroll 1
            for (uint32_t i = lane; i < group; i += 32) {
                of_row[(head * group + i) * 4 + 2] = both;
            }
        } else {
            // On their way together with the channels.
            const float* own_ba =
                ba + static_cast<size_t>(row) * (sizes.adds ? 1 : 2) * value_heads + head;
            const float b = own_ba[0];
            const float a = sizes.adds ? b : own_ba[value_heads];
            float4 of[1][HEAD_FOURS];
            convolve_head(of, weights, window, channel, 0, dim);
            store_head(to, of[0], 1.0f, dim);
            if (lane == 0) {
                const float step = softplus(a + bias);
                const float beta = sizes.adds ? step : sigmoid(b);
                uint2 both;
                both.x = __float_as_uint(expf(-(rate * step)));
                both.y = __float_as_uint(beta);
                *reinterpret_cast<uint2*>(of_row + head * 4) = both;
                of_row[head * 4 + 3] = skipped;
            }
        }
    }
}

#define DELTA_UPDATE(key_dim_most)                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS)                                          \
        tutti_delta_update_##key_dim_most(TUTTI_DELTA_UPDATE_ARGUMENTS) {                          \
        const Sizes sizes = {key_heads, value_heads, key_dim, value_dim, kernel, adds != 0};       \
        update<key_dim_most / 4 / SHARERS>(qkvz, gates, seqs, states, mixed, slots, sizes, live);  \
    }
DELTA_UPDATE(32)
DELTA_UPDATE(128)
DELTA_UPDATE(256)

// A warp has a value head.
extern "C" __global__ void __launch_bounds__(THREADS)
    tutti_delta_finish(const float* qkvz, const float* mixed, const float* norm, tutti_bf16* out,
                       float* gated, uint32_t value_heads, uint32_t value_dim, uint32_t channels,
                       uint32_t out_stride, float eps, const uint32_t* live) {
    release_successors();
    float4 weights[HEAD_FOURS];
#pragma unroll
    for (uint32_t i = 0; i < HEAD_FOURS; i++) {
        const uint32_t at = 4 * (threadIdx.x % 32 + 32 * i);
        weights[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (norm != nullptr && at < value_dim) {
            weights[i] = load_constants(norm + at);
        }
    }
    wait_for_predecessors();
    const size_t row = blockIdx.x;
    const uint32_t head = blockIdx.y * WARPS + threadIdx.x / 32;
    if (!is_live(live, blockIdx.x) || head >= value_heads) {
        return;
    }
    const uint32_t values = value_heads * value_dim;
    const float* o = mixed + row * channels + (channels - values) + head * value_dim;
    const float* z = qkvz + row * (channels + values) + channels + head * value_dim;
    float4 fours[HEAD_FOURS];
    float4 doors[HEAD_FOURS];
#pragma unroll
    for (uint32_t i = 0; i < HEAD_FOURS; i++) {
        const uint32_t at = 4 * (threadIdx.x % 32 + 32 * i);
        fours[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        doors[i] = fours[i];
        if (at < value_dim) {
            fours[i] = load_row(o + at);
            doors[i] = load_row(z + at);
        }
    }
    if (norm == nullptr) {
        float* to = gated + row * values + head * value_dim;
#pragma unroll
        for (uint32_t i = 0; i < HEAD_FOURS; i++) {
            const uint32_t at = 4 * (threadIdx.x % 32 + 32 * i);
            const float4 v = fours[i];
            const float4 z4 = silu4(doors[i]);
            if (at < value_dim) {
                store_row(to + at, make_float4(v.x * z4.x, v.y * z4.y, v.z * z4.z, v.w * z4.w));
            }
        }
        return;
    }
    const float scale = norm_scale(products(fours, fours), value_dim, eps);
    tutti_bf16* to = out + row * out_stride + head * value_dim;
#pragma unroll
    for (uint32_t i = 0; i < HEAD_FOURS; i++) {
        const uint32_t at = 4 * (threadIdx.x % 32 + 32 * i);
        if (at < value_dim) {
            const float4 v = scaled4(fours[i], scale, weights[i]);
            const float4 z4 = doors[i];
            uint2 packed;
            packed.x = pack_bf16(v.x * silu(z4.x), v.y * silu(z4.y));
            packed.y = pack_bf16(v.z * silu(z4.z), v.w * silu(z4.w));
            store_row(to + at, packed);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    tutti_gate(const float* gate, tutti_bf16* x, uint32_t width, uint32_t x_stride,
               const uint32_t* live) {
    release_successors();
    wait_for_predecessors();
    const size_t row = blockIdx.x;
    const uint32_t first = (blockIdx.y * THREADS + threadIdx.x) * 4;
    if (!is_live(live, blockIdx.x) || first >= width) {
        return;
    }
    tutti_bf16* own = x + row * x_stride;
    Four v = load_up_to_4(own, first, width);
    const Four g = load_up_to_4(gate + row * width, first, width);
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        v.v[i] *= sigmoid(g.v[i]);
    }
    store_bf16(own, first, width, width % 4 == 0, v);
}
