// Sums and gathers over GPUs that access each other's memory, with kernels of this project: faster
// than a general library for small messages, and able to stop when a rank is gone.
//
// Everything is built from one step, the exchange. Every rank pushes data into a slot of its own at
// each of the other ranks, raises a flag there, and waits for their flags. Then everything that was
// pushed to it is in its own memory. Blocks are independent: block b of a rank exchanges with block
// b of the other ranks, with slots, flags and a count of exchanges (rounds) of its own.
//
// - A flag is the number of the round, which only grows. So no flag is ever reset, a flag that is
//   ahead counts like the expected one, and replays of a graph continue where the last one ended.
// - Slots alternate between two halves by the round's parity, and no rank waits until a slot has
//   been read. Two halves suffice: rank A writes round n + 2 into the half of round n after its
//   wait of round n + 1, so after it has seen B's flag of round n + 1. B raised that flag (release)
//   after its threads had met at a barrier, after all their reads of round n. So B's reads are over
//   before A's writes begin. (With one half they might not be: A could write round n + 1 when B has
//   just raised its flag of round n and has not read yet.)
// - A wait ends when the flag arrives, when the host aborts, or when the time is up. In the last
//   two cases the block records what happened, sets a word that keeps later launches from
//   beginning, and leaves: nothing keeps spinning. Threads decide that together, so none is left at
//   a barrier.
//
// - The first thread of the first block adds up how long exchanges take: from where a launch has
//   waited for its predecessors until what the other ranks pushed in its last exchange is there. On
//   the rank that the others wait for, that is the least.
//
// Launches can wait for a long time. The next kernel is released before that, so that it reads its
// first weights meanwhile. It cannot be in the way: its blocks begin only once all of this launch's
// are there, they take nothing that those need, and no kernel that is not yet there has to run for
// the exchange to end, as long as every rank has its GPU to itself. Where ranks share one, waiting
// blocks of one rank's next kernel could keep another rank's exchange off it for ever, so there the
// next kernel is released only after the last exchange. Either way it waits for the end of this
// launch before it touches anything that an exchange reads or writes.
#include "rows.cuh"

namespace tutti {
namespace {

// Loops that must not be unrolled say so: a thread of such blocks has 128 registers. One block on a
// multiprocessor is enough; for more, the assembler would rather spill.
constexpr uint32_t PEER_THREADS = 512;
// Polls of a flag between two checks of the clock and of the host's word, which is across the bus.
constexpr uint32_t POLLS = 64;

// The table's addresses, in the block's shared memory: a flag that is acquired empties L1, and they
// would come from L2 again, before every push and every read.
struct Addresses {
    // By how far a rank is behind this one, so that a push knows the place in advance.
    float* slots[TUTTI_PEERS_MAX];
    // By rank.
    uint64_t* flags[TUTTI_PEERS_MAX];
    // This block's count of exchanges, and the time that the first thread keeps.
    uint64_t* rounds;
    uint64_t* spent;
    // The time spent before this launch, less the time at its begin.
    uint64_t clock;
    uint32_t blocks;
};

// The state of a block's exchanges.
struct Lane {
    const TuttiPeers* peers;
    Addresses* addresses;
    uint32_t rank, ranks, slot;
    bool shares_gpu;
    const uint64_t* rounds; // this block's
    const uint32_t* failed;
    const uint64_t* spent;
    uint64_t round;
};

__device__ __forceinline__ bool keeps_time() { return blockIdx.x == 0 && threadIdx.x == 0; }

// Reads the table, before the wait: it is there before the first launch and never changes while
// any runs.
__device__ __forceinline__ Lane look_up(const TuttiPeers* peers) {
    SHARED_ARRAY(Addresses, addresses, 1);
    Lane lane = {};
    lane.peers = peers;
    lane.addresses = addresses;
    lane.rank = load_input(&peers->rank);
    lane.ranks = load_input(&peers->ranks);
    lane.slot = load_input(&peers->slot);
    const uint32_t blocks = load_input(&peers->blocks);
    lane.shares_gpu = load_input(&peers->shares_gpu) != 0;
    uint64_t* rounds = reinterpret_cast<uint64_t*>(load_input(&peers->rounds)) + blockIdx.x;
    uint64_t* spent = reinterpret_cast<uint64_t*>(load_input(&peers->spent));
    lane.failed = reinterpret_cast<const uint32_t*>(load_input(&peers->failed));
    lane.rounds = rounds;
    lane.spent = spent;
    if (threadIdx.x < TUTTI_PEERS_MAX) {
        // Read whether there is such a rank or not, so that no load waits for another.
        const uint64_t slots = load_input(peers->slots + threadIdx.x);
        const uint64_t flags = load_input(peers->flags + threadIdx.x);
        if (threadIdx.x < lane.ranks) {
            const uint32_t behind = (threadIdx.x - lane.rank) & (lane.ranks - 1);
            addresses->slots[behind] = reinterpret_cast<float*>(slots);
            addresses->flags[threadIdx.x] = reinterpret_cast<uint64_t*>(flags);
        }
        if (threadIdx.x == 0) {
            addresses->rounds = rounds;
            addresses->spent = spent;
            addresses->blocks = blocks;
        }
    }
    return lane;
}

// Releases the next kernel if that is in no other rank's way.
__device__ __forceinline__ void release_early(const Lane& lane) {
    if (!lane.shares_gpu) {
        release_successors();
    }
}

// Starts this block's exchanges, after the wait. False, for all threads of the block, after a
// failure. What the caller has requested to send comes together with what earlier launches left.
__device__ __forceinline__ bool begin(Lane* lane) {
    const uint64_t rounds = load_word(lane->rounds);
    const uint32_t failed = load_word(lane->failed);
    if (keeps_time()) {
        const uint64_t now = nanoseconds();
        lane->addresses->clock = load_word(lane->spent) - now;
    }
    lane->round = rounds + 1;
    return all_of_block(failed == 0);
}

// Ends the exchanges; `round` is the next one.
__device__ __forceinline__ void end(const Lane& lane) {
    if (threadIdx.x == 0) {
        *lane.addresses->rounds = lane.round - 1;
    }
}

// The slot for the data that rank `from` pushes in this round, at the rank so far behind this one
// (0: at this one).
__device__ __forceinline__ float* slot_of(const Lane& lane, uint32_t behind, uint32_t from) {
    // A rank's slots have fewer than 2^32 elements in total.
    const uint32_t half = static_cast<uint32_t>(lane.round % 2);
    const uint32_t index = (half * lane.addresses->blocks + blockIdx.x) * lane.ranks + from;
    return lane.addresses->slots[behind] + index * lane.slot;
}

__device__ __forceinline__ uint64_t* flag_of(const Lane& lane, uint32_t at, uint32_t from) {
    return lane.addresses->flags[at] + static_cast<uint64_t>(blockIdx.x) * lane.ranks + from;
}

__device__ __forceinline__ void say(const TuttiPeers* peers, uint32_t outcome) {
    store_word(reinterpret_cast<uint32_t*>(peers->failed), 1);
    store_word(reinterpret_cast<uint32_t*>(peers->outcome), outcome);
}

// Waits for rank `from`'s flag of this round.
__device__ __forceinline__ bool wait_for(const Lane& lane, uint32_t from) {
    const TuttiPeers* peers = lane.peers;
    const uint64_t* flag = flag_of(lane, lane.rank, from);
    const uint64_t began = nanoseconds();
    while (true) {
#pragma unroll 1
        for (uint32_t poll = 0; poll < POLLS; poll++) {
            if (load_acquire(flag) >= lane.round) {
                return true;
            }
        }
        if (load_word(reinterpret_cast<const uint32_t*>(peers->abort)) != 0) {
            say(peers, TUTTI_PEERS_ABORTED | from);
            return false;
        }
        const uint64_t now = nanoseconds();
        if (now > began && now - began > peers->spin_ns) {
            say(peers, TUTTI_PEERS_TIMEOUT | from);
            return false;
        }
    }
}

// Ends the pushes of a round; true once everything pushed here can be read.
__device__ __forceinline__ bool exchange(const Lane& lane) {
    // All threads' pushes, and their reads of the previous round, come before the flags.
    __syncthreads();
    const uint32_t peer = threadIdx.x;
    bool there = true;
    if (peer < lane.ranks && peer != lane.rank) {
        store_release(flag_of(lane, peer, lane.rank), lane.round);
        there = wait_for(lane, peer);
    }
    const bool all = all_of_block(there);
    if (keeps_time()) {
        *lane.addresses->spent = lane.addresses->clock + nanoseconds();
    }
    return all;
}

// 4 elements of every rank. There are RANKS slots here; this rank's own is not used.
template <uint32_t RANKS>
struct Terms {
    float4 of[RANKS];
};

// The elements from `at` on; `own` are this rank's. With AT_ONCE, loads are unconditional and only
// the choice among their results depends on the rank, so no load waits for another; that takes more
// registers than kernels of 1024 threads have.
template <uint32_t RANKS, bool AT_ONCE>
__device__ __forceinline__ Terms<RANKS> read_terms(const Lane& lane, const float* slots,
                                                   uint32_t at, float4 own) {
    const auto taken = [&](uint32_t rank) {
        return take(reinterpret_cast<const float4*>(slots + rank * lane.slot + at));
    };
    if constexpr (RANKS == 2) {
        // Two terms have the same sum in either order.
        return {{own, taken(1 - lane.rank)}};
    } else {
        Terms<RANKS> terms;
#pragma unroll
        for (uint32_t rank = 0; rank < RANKS; rank++) {
            const bool is_own = rank == lane.rank;
            if (AT_ONCE) {
                const float4 v = taken(is_own ? rank ^ 1 : rank);
                terms.of[rank] = is_own ? own : v;
            } else {
                terms.of[rank] = is_own ? own : taken(rank);
            }
        }
        return terms;
    }
}

// The sum of the terms, as a tree.
template <uint32_t RANKS>
__device__ __forceinline__ float4 add_terms(Terms<RANKS> terms) {
#pragma unroll
    for (uint32_t apart = 1; apart < RANKS; apart *= 2) {
#pragma unroll
        for (uint32_t rank = 0; rank < RANKS; rank += 2 * apart) {
            terms.of[rank] = add4(terms.of[rank], terms.of[rank + apart]);
        }
    }
    return terms.of[0];
}

template <uint32_t RANKS>
__device__ __forceinline__ float4 tree(const Lane& lane, const float* slots, uint32_t at,
                                       float4 own) {
    return add_terms(read_terms<RANKS, false>(lane, slots, at, own));
}

// Pushes 4 elements to all other ranks' slots.
template <uint32_t RANKS>
__device__ __forceinline__ void push_to_all(const Lane& lane, uint32_t at, float4 v) {
#pragma unroll
    for (uint32_t i = 1; i < RANKS; i++) {
        // Staggered, so that not all ranks push to the same one at the same time.
        push(reinterpret_cast<float4*>(slot_of(lane, i, lane.rank) + at), v);
    }
}

// 4 elements of an array of `count`, zeros past its end.
__device__ __forceinline__ float4 load_within(const float* data, uint64_t at, uint64_t count) {
    if (at + 4 <= count) {
        return load4(data + at);
    }
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (at < count) {
        v.x = data[at];
        v.y = at + 1 < count ? data[at + 1] : 0.0f;
        v.z = at + 2 < count ? data[at + 2] : 0.0f;
    }
    return v;
}

// `whole`: `data` is 16-byte aligned.
__device__ __forceinline__ void store_within(float* data, uint64_t at, uint64_t count, bool whole,
                                             float4 v) {
    if (whole && at + 4 <= count) {
        store4(data + at, v);
        return;
    }
    const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        if (at + i < count) {
            data[at + i] = values[i];
        }
    }
}

// Number of the `count` elements that a block takes per exchange: the same for all, a multiple of
// `unit`.
__device__ __forceinline__ uint64_t share(uint64_t count, uint32_t unit, uint64_t most) {
    const uint64_t units = (count + unit - 1) / unit;
    const uint64_t even = (units + gridDim.x - 1) / gridDim.x * unit;
    return even < most ? even : most;
}

__device__ __forceinline__ uint32_t at_most(uint64_t count, uint64_t most) {
    return static_cast<uint32_t>(count < most ? count : most);
}

// The first 4 elements that this thread sends in pieces of this size: requested before the block
// knows the round and meets.
__device__ __forceinline__ float4 load_first(const float* data, uint64_t piece, uint64_t count) {
    const uint64_t at = blockIdx.x * piece + threadIdx.x * 4;
    // Behind the piece is another block's.
    if (threadIdx.x * 4 >= piece) {
        return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    return at + 4 <= count ? load_row(data + at) : load_within(data, at, count);
}

template <uint32_t RANKS>
__device__ __forceinline__ bool sum_one_shot(Lane& lane, float* data, uint64_t count,
                                             uint64_t piece, float4 ahead) {
    // Which it is; a constant takes no register.
    lane.ranks = RANKS;
    for (uint64_t first = blockIdx.x * piece; first < count; first += gridDim.x * piece) {
        const uint32_t here = at_most(count - first, piece);
        bool is_ahead = first == blockIdx.x * piece;
        for (uint32_t at = threadIdx.x * 4; at < here; at += blockDim.x * 4) {
            push_to_all<RANKS>(lane, at, is_ahead ? ahead : load_within(data, first + at, count));
            is_ahead = false;
        }
        if (!exchange(lane)) {
            return false;
        }
        const float* slots = slot_of(lane, 0, 0);
        for (uint32_t at = threadIdx.x * 4; at < here; at += blockDim.x * 4) {
            const float4 own = load_within(data, first + at, count);
            store_within(data, first + at, count, true, tree<RANKS>(lane, slots, at, own));
        }
        lane.round++;
    }
    return true;
}

template <uint32_t RANKS>
__device__ __forceinline__ bool sum_two_shot(Lane& lane, float* data, uint64_t count) {
    // A piece is cut into one part per rank, which that rank sums.
    const uint64_t piece = share(count, 4 * RANKS, static_cast<uint64_t>(lane.slot) * RANKS);
    const uint32_t part = static_cast<uint32_t>(piece / RANKS);
    for (uint64_t first = blockIdx.x * piece; first < count; first += gridDim.x * piece) {
#pragma unroll 1
        for (uint32_t i = 1; i < RANKS; i++) {
            const uint32_t peer = (lane.rank + i) % RANKS;
            float* slot = slot_of(lane, i, lane.rank);
            const uint64_t theirs = first + static_cast<uint64_t>(peer) * part;
#pragma unroll 1
            for (uint32_t at = threadIdx.x * 4; at < part && theirs + at < count;
                 at += blockDim.x * 4) {
                push(reinterpret_cast<float4*>(slot + at), load_within(data, theirs + at, count));
            }
        }
        if (!exchange(lane)) {
            return false;
        }
        const uint64_t mine = first + static_cast<uint64_t>(lane.rank) * part;
        Lane next = lane;
        next.round++;
        const float* slots = slot_of(lane, 0, 0);
#pragma unroll 1
        for (uint32_t at = threadIdx.x * 4; at < part && mine + at < count; at += blockDim.x * 4) {
            const float4 sum = tree<RANKS>(lane, slots, at, load_within(data, mine + at, count));
            store_within(data, mine + at, count, true, sum);
            push_to_all<RANKS>(next, at, sum);
        }
        lane.round++;
        if (!exchange(lane)) {
            return false;
        }
#pragma unroll 1
        for (uint32_t i = 1; i < RANKS; i++) {
            const uint32_t peer = (lane.rank + i) % RANKS;
            const float* slot = slot_of(lane, 0, peer);
            const uint64_t theirs = first + static_cast<uint64_t>(peer) * part;
#pragma unroll 1
            for (uint32_t at = threadIdx.x * 4; at < part && theirs + at < count;
                 at += blockDim.x * 4) {
                store_within(data, theirs + at, count, true,
                             take(reinterpret_cast<const float4*>(slot + at)));
            }
        }
        lane.round++;
    }
    return true;
}

// This thread's part of a row to send, as far as it is requested at once.
struct SentRow {
    float4 kept[NORM_KEPT];

    __device__ __forceinline__ void load(const float* row, uint32_t width) {
#pragma unroll
        for (uint32_t i = 0; i < NORM_KEPT; i++) {
            const uint32_t at = threadIdx.x * 4 + i * NORM_THREADS * 4;
            if (at < width) {
                kept[i] = load_row(row + at);
            }
        }
    }
    // `to`: where the row begins in the slot. Forgets it, or it would take registers until the
    // next.
    template <uint32_t RANKS>
    __device__ __forceinline__ void push(const Lane& lane, uint32_t to, const float* row,
                                         uint32_t width) {
#pragma unroll
        for (uint32_t i = 0; i < NORM_KEPT; i++) {
            const uint32_t at = threadIdx.x * 4 + i * NORM_THREADS * 4;
            if (at < width) {
                push_to_all<RANKS>(lane, to + at, kept[i]);
            }
            kept[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
#pragma unroll 1
        for (uint32_t at = threadIdx.x * 4 + NORM_KEPT * NORM_THREADS * 4; at < width;
             at += NORM_THREADS * 4) {
            push_to_all<RANKS>(lane, to + at, load4(row + at));
        }
    }
};

// `sent` holds the block's first row.
template <uint32_t RANKS>
__device__ __forceinline__ bool sum_add_rmsnorm(Lane& lane, const float* data, float* residual,
                                                const float* weight,
                                                const NormWeights& weights, tutti_bf16* out,
                                                uint32_t width, uint32_t out_stride, float eps,
                                                uint32_t rows, float* scratch, SentRow& sent) {
    // Which it is; a constant takes no register.
    lane.ranks = RANKS;
    // A block has rows blockIdx.x, + gridDim.x, ..; as many per exchange as fit into a slot.
    const uint32_t at_once = lane.slot / width;
    const auto is_here = [&](uint32_t first, uint32_t i) {
        return i < at_once && first + i * gridDim.x < rows;
    };
    for (uint32_t first = blockIdx.x; first < rows; first += at_once * gridDim.x) {
        for (uint32_t i = 0; is_here(first, i); i++) {
            const float* row = data + static_cast<size_t>(first + i * gridDim.x) * width;
            if (i != 0 || first != blockIdx.x) {
                sent.load(row, width);
            }
            sent.template push<RANKS>(lane, i * width, row, width);
        }
        if (!exchange(lane)) {
            return false;
        }
        for (uint32_t i = 0; is_here(first, i); i++) {
            const size_t index = first + i * gridDim.x;
            const float* row = data + index * width;
            const float* slots = slot_of(lane, 0, 0) + i * width;
            float* r = residual + index * width;
            const auto norm = [&](auto read, auto sum) {
                add_rmsnorm_row(r, weight, weights, out + index * out_stride, width,
                                out_stride % 4 == 0, eps, scratch, true, read, sum);
            };
            // With two ranks, all of a thread's loads are issued at once. With more ranks,
            // registers would not hold their results.
            if constexpr (RANKS == 2) {
                norm([&](uint32_t, uint32_t at) {
                         return read_terms<RANKS, true>(lane, slots, at, load4(row + at));
                     },
                     [](const Terms<RANKS>& terms) { return add_terms(terms); });
            } else {
                norm([&](uint32_t, uint32_t at) {
                         return add_terms(
                             read_terms<RANKS, true>(lane, slots, at, load4(row + at)));
                     },
                     AsRead{});
            }
            // `scratch` is reused.
            __syncthreads();
        }
        lane.round++;
    }
    return true;
}

__device__ __forceinline__ bool gather(Lane& lane, const float* local, float* all, uint64_t count,
                                       uint64_t piece, float4 ahead) {
    const bool whole = count % 4 == 0;
    float* own = all + lane.rank * count;
    for (uint64_t first = blockIdx.x * piece; first < count; first += gridDim.x * piece) {
        const uint32_t here = at_most(count - first, piece);
        bool is_ahead = first == blockIdx.x * piece;
#pragma unroll 1
        for (uint32_t at = threadIdx.x * 4; at < here; at += blockDim.x * 4) {
            const float4 v = is_ahead ? ahead : load_within(local, first + at, count);
            is_ahead = false;
            store_within(own, first + at, count, whole, v);
#pragma unroll 1
            for (uint32_t i = 1; i < lane.ranks; i++) {
                push(reinterpret_cast<float4*>(slot_of(lane, i, lane.rank) + at), v);
            }
        }
        if (!exchange(lane)) {
            return false;
        }
#pragma unroll 1
        for (uint32_t i = 1; i < lane.ranks; i++) {
            const uint32_t peer = (lane.rank + i) & (lane.ranks - 1);
            const float* slot = slot_of(lane, 0, peer);
#pragma unroll 1
            for (uint32_t at = threadIdx.x * 4; at < here; at += blockDim.x * 4) {
                store_within(all + peer * count, first + at, count, whole,
                             take(reinterpret_cast<const float4*>(slot + at)));
            }
        }
        lane.round++;
    }
    return true;
}

}  // namespace
}  // namespace tutti

using namespace tutti;

// The instance of an exchange for the number of ranks.
#define BY_RANKS(exchange, ...)                                                                    \
    (lane.ranks == 2   ? exchange<2>(__VA_ARGS__)                                                  \
     : lane.ranks == 4 ? exchange<4>(__VA_ARGS__)                                                  \
                       : exchange<8>(__VA_ARGS__))

extern "C" __global__ void __launch_bounds__(PEER_THREADS, 1)
    tutti_peer_sum(const TuttiPeers* peers, float* data, uint64_t count) {
    Lane lane = look_up(peers);
    const uint64_t piece = share(count, 4, lane.slot);
    wait_for_predecessors();
    release_early(lane);
    const float4 ahead = load_first(data, piece, count);
    if (!begin(&lane)) {
        return;
    }
    const bool done = BY_RANKS(sum_one_shot, lane, data, count, piece, ahead);
    release_successors();
    if (done) {
        end(lane);
    }
}

extern "C" __global__ void __launch_bounds__(PEER_THREADS, 1)
    tutti_peer_sum_two_shot(const TuttiPeers* peers, float* data, uint64_t count) {
    Lane lane = look_up(peers);
    wait_for_predecessors();
    release_early(lane);
    if (!begin(&lane)) {
        return;
    }
    const bool done = BY_RANKS(sum_two_shot, lane, data, count);
    release_successors();
    if (done) {
        end(lane);
    }
}

extern "C" __global__ void __launch_bounds__(NORM_THREADS, 1)
    tutti_peer_sum_add_rmsnorm(const TuttiPeers* peers, const float* data, float* residual,
                               const float* weight, tutti_bf16* out, uint32_t width,
                               uint32_t out_stride, float eps, uint32_t rows,
                               const uint32_t* live) {
    SHARED_ARRAY(float, scratch, NORM_WARPS);
    const uint32_t items = live_items(live);
    NormWeights weights;
    weights.load(weight, width);
    Lane lane = look_up(peers);
    rows = items < rows ? items : rows;
    wait_for_predecessors();
    release_early(lane);
    SentRow sent = {};
    if (blockIdx.x < rows) {
        sent.load(data + static_cast<size_t>(blockIdx.x) * width, width);
    }
    if (!begin(&lane)) {
        return;
    }
    const bool done = BY_RANKS(sum_add_rmsnorm, lane, data, residual, weight, weights, out, width,
                               out_stride, eps, rows, scratch, sent);
    release_successors();
    if (done) {
        end(lane);
    }
}

extern "C" __global__ void __launch_bounds__(PEER_THREADS, 1)
    tutti_peer_gather(const TuttiPeers* peers, const float* local, float* all, uint64_t count) {
    Lane lane = look_up(peers);
    const uint64_t piece = share(count, 4, lane.slot);
    wait_for_predecessors();
    release_early(lane);
    const float4 ahead = load_first(local, piece, count);
    if (!begin(&lane)) {
        return;
    }
    const bool done = gather(lane, local, all, count, piece, ahead);
    release_successors();
    if (done) {
        end(lane);
    }
}
