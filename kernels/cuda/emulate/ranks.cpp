// Runs the sources of `all_reduce.cu` on several ranks under seeded schedules. Every thread of
// every block of every rank is a fiber; one step runs at a time.
//
// A step runs one thread to its next access to memory that ranks share, its next barrier, or its
// next meeting with its warp. The seed decides which thread is next, how long one block runs ahead
// of all others, when pushed bytes become visible (in any order, at the latest when a later flag is
// released), and whether a take still sees the value from its thread's last acquire. Each rank
// makes several launches in a row, of several kinds and sizes, with slots so small that a launch
// needs several exchanges.
//
// Usage: ranks SCENARIO FROM COUNT [THREADS]: runs COUNT seeds from FROM on. The first failure is
// reported and ends the program with status 1. Scenarios:
// - whole: all results of all ranks are right, to the bit
// - abort: the host's abort word is set at some step, for one rank, or for all, one of which may
//   have stopped
// - die: a rank stops for good; some of its pushes are lost
// - freeze: a rank stops, and continues when all others have ended
// In the last three, all ranks end soon after, and every result that a rank accepts is right.
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../kernels.h"
#include "block.h"
#include "device.h"

namespace {

constexpr uint32_t RANKS_MAX = TUTTI_PEERS_MAX;
constexpr uint64_t NEVER = ~uint64_t{0};
// How long a block waits: normally, and once another rank was aborted.
constexpr uint64_t FOR_EVER = uint64_t{1} << 40, SPIN_OF_ABORTED = 20000;

class Random {
   public:
    explicit Random(uint64_t seed) : state(seed * 0x9e3779b97f4a7c15ull + 0x1234567) {}
    uint64_t next() {
        // SplitMix64.
        uint64_t z = (state += 0x9e3779b97f4a7c15ull);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return z ^ (z >> 31);
    }
    uint32_t below(uint64_t n) { return static_cast<uint32_t>(next() % n); }
    template <class T>
    T of(std::initializer_list<T> all) {
        return all.begin()[below(all.size())];
    }

   private:
    uint64_t state;
};

enum class Kind { sum, two_shot, norm, gather };

// A launch, the same on every rank.
struct Launch {
    Kind kind;
    uint32_t grid, count, rows, live;
};

struct Pending {
    float4* to;
    float4 value;
};

// A block of a rank, and its pushes that are not visible yet.
struct Running {
    emulate::Block block;
    uint32_t rank = 0;
    bool busy = false;
    // Each thread's pushes since the last barrier, and the block's pushes before it.
    std::vector<std::vector<Pending>> own;
    std::vector<Pending> ordered;
    // Step of each thread's last acquire: its takes see nothing older.
    std::vector<uint64_t> view;
    // Which threads have let the next kernel begin, and how many.
    std::vector<bool> has_released;
    uint32_t released = 0;
};

struct Rank {
    TuttiPeers table;
    std::vector<uint64_t> rounds;
    uint32_t failed = 0, abort = 0, outcome = 0;
    uint64_t spent = 0;
    // For its first block: exchanges and time spent before this launch, the steps of the launch and
    // of its first push or flag, and for each exchange the step of the last flag it waits for.
    uint64_t rounds_before = 0, spent_before = 0, launched_at = 0, began_by = 0;
    std::vector<uint64_t> last_flag;
    float *data = nullptr, *more = nullptr, *weight = nullptr;
    tutti_bf16* rows = nullptr;
    uint32_t live = 0;
    size_t launch = 0;
    bool had_failed = false;
    bool in_launch = false;
    bool stopped = false;
    uint32_t right = 0;
    std::function<void()> kernel;
    std::vector<std::unique_ptr<Running>> blocks;
};

std::string context;

[[noreturn]] void wrong(const char* format, ...) {
    va_list args;
    va_start(args, format);
    printf("%s: ", context.c_str());
    vprintf(format, args);
    printf("\n");
    va_end(args);
    fflush(stdout);
    _exit(1);
}

// Every value is an integer times a power of two, of such different sizes that sums are not all
// exact: a different order of additions gives different bits.
float value_of(uint32_t rank, uint32_t launch, uint32_t index) {
    Random random((uint64_t{rank} << 48) ^ (uint64_t{launch} << 32) ^ index);
    const uint64_t bits = random.next();
    return static_cast<float>(static_cast<int32_t>(bits % 2000001) - 1000000) *
           exp2f(static_cast<float>(bits >> 40 & 15) - 20.0f);
}

// The sum in the order of kernels.h: (0 + 1) + (2 + 3).
float tree_of(uint32_t first, uint32_t ranks, uint32_t launch, uint32_t index) {
    if (ranks == 1) {
        return value_of(first, launch, index);
    }
    const float left = tree_of(first, ranks / 2, launch, index);
    return left + tree_of(first + ranks / 2, ranks / 2, launch, index);
}

bool same(float a, float b) { return memcmp(&a, &b, sizeof a) == 0; }

constexpr uint32_t DATA_MAX = 8192;
constexpr uint32_t BLOCKS_MAX = 3;
constexpr uint32_t SLOT_MAX = 4096;

class World : public emulate::PeerMemory {
   public:
    World() {
        slots.resize(size_t{2} * RANKS_MAX * RANKS_MAX * BLOCKS_MAX * SLOT_MAX / 4);
        old.resize(slots.size());
        overwritten.resize(slots.size());
        for (Rank& rank : ranks) {
            rank.data = static_cast<float*>(emulate::guarded(DATA_MAX * 4, false));
            rank.more = static_cast<float*>(emulate::guarded(RANKS_MAX * DATA_MAX * 4, false));
            rank.weight = static_cast<float*>(emulate::guarded(DATA_MAX * 4, false));
            rank.rows = static_cast<tutti_bf16*>(emulate::guarded(DATA_MAX * 2, false));
            for (uint32_t i = 0; i < BLOCKS_MAX; i++) {
                rank.blocks.push_back(std::make_unique<Running>());
            }
        }
    }

    void run(const std::string& scenario, uint64_t seed, uint32_t threads_wanted) {
        set_up(scenario, seed, threads_wanted);
        uint64_t frozen_until_ended = 0;
        while (true) {
            now++;
            if (now == event_at) {
                happen(scenario);
            }
            Running* block = next();
            if (block == nullptr) {
                if (scenario == "freeze" && ranks[victim].stopped && ++frozen_until_ended == 1) {
                    // It wakes late, after all others have ended.
                    ranks[victim].stopped = false;
                    limit = now + patience();
                    continue;
                }
                break;
            }
            if (now > limit) {
                wrong("it does not end: after %llu steps rank %u is in launch %zu",
                      static_cast<unsigned long long>(now), block->rank,
                      ranks[block->rank].launch);
            }
            running = block;
            if (!block->block.run_one(random.below(threads))) {
                wrong("rank %u: no thread of a block can go on", block->rank);
            }
            leak();
            if (block->block.is_done()) {
                finish(*block);
            }
        }
        check_the_end(scenario);
    }

    bool is_exchanged(const void* at) override {
        const auto* first = reinterpret_cast<const unsigned char*>(slots.data());
        return at >= first && at < first + slots.size() * sizeof slots[0];
    }

    void push(void* to, const void* from) override {
        touched("pushes");
        follows_the_release();
        began();
        Pending pending{static_cast<float4*>(to), {}};
        memcpy(&pending.value, from, 16);
        index_of(to);
        running->own[thread()].push_back(pending);
    }

    void take(void* to, const void* from) override {
        const size_t index = index_of(from);
        const bool stale = overwritten[index] > running->view[thread()] && random.below(2) == 0;
        memcpy(to, stale ? &old[index] : &slots[index], 16);
    }

    void store_release(uint64_t* at, uint64_t value) override {
        touched("raises a flag");
        check_flag(at);
        follows_the_release();
        began();
        const auto index = static_cast<size_t>(at - flags.data());
        if (index / size % blocks == 0) {
            std::vector<uint64_t>& last = ranks[index / size / blocks].last_flag;
            last.resize(std::max<size_t>(last.size(), value + 1), 0);
            last[value] = now;
        }
        become_visible(running->own[thread()]);
        become_visible(running->ordered);
        *at = value;
    }

    uint64_t load_acquire(const uint64_t* at) override {
        check_flag(at);
        follows_the_release();
        running->view[thread()] = now;
        return *at;
    }

    uint64_t nanoseconds() override { return now; }

    void released() override {
        if (!running->has_released[thread()]) {
            running->has_released[thread()] = true;
            running->released++;
        }
    }

    const char* where() override {
        static std::string text;
        text = context + ": rank " + std::to_string(running->rank) + ": ";
        return text.c_str();
    }

    void met() override {
        uint64_t latest = 0;
        for (std::vector<Pending>& own : running->own) {
            running->ordered.insert(running->ordered.end(), own.begin(), own.end());
            own.clear();
        }
        for (uint64_t view : running->view) {
            latest = std::max(latest, view);
        }
        std::fill(running->view.begin(), running->view.end(), latest);
    }

    uint64_t steps() const { return now; }
    uint64_t exchanges = 0;
    uint64_t failures = 0;

   private:
    std::vector<float4> slots, old;
    std::vector<uint64_t> overwritten, flags;
    Rank ranks[RANKS_MAX];
    uint32_t size = 0, threads = 0, slot = 0, blocks = 0, victim = 0;
    std::vector<Launch> launches;
    Random random{0};
    uint64_t now = 0, event_at = NEVER, limit = 0, spin = 0;
    uint32_t ahead = 1, left = 0, leaks = 0;
    Running* running = nullptr;
    Running* favourite = nullptr;

    uint32_t thread() const { return emulate::thread_index.x; }

    uint64_t patience() const {
        // Every wait may last its full time, and a block reads the clock once per 64 polls. If it
        // would wait forever, the host ends the wait.
        const uint64_t wait = spin == FOR_EVER ? SPIN_OF_ABORTED : spin;
        return 200000 * uint64_t{size} * threads / 32 +
               (wait + 100000) * uint64_t{size} * blocks * RANKS_MAX * 2;
    }

    void set_up(const std::string& scenario, uint64_t seed, uint32_t threads_wanted) {
        random = Random(seed);
        now = 0;
        size = random.of({2u, 2u, 2u, 4u, 4u, 8u});
        threads = threads_wanted;
        blocks = 1 + random.below(BLOCKS_MAX);
        slot = random.of({16u, 32u, 64u, 128u});
        ahead = random.of({1u, 4u, 30u, 300u, 3000u});
        leaks = random.of({0u, 1u, 8u, 64u});
        left = 0;
        favourite = nullptr;
        victim = random.below(size);
        spin = scenario == "whole" || scenario == "abort" ? FOR_EVER
                                                          : 2000 + random.below(20000);
        event_at = scenario == "whole" ? NEVER : 1 + random.below(random.of({300u, 3000u, 30000u}));
        if (scenario == "whole") {
            // However slow the schedule, it must end.
            limit = 50000000;
        } else {
            limit = event_at + patience() + 4000000;
        }
        launches.clear();
        const uint32_t number = 2 + random.below(5);
        for (uint32_t i = 0; i < number; i++) {
            Launch launch{random.of({Kind::sum, Kind::two_shot, Kind::gather}), 0, 0, 0, 0};
            if (threads == 512) {
                launch.kind = random.of({Kind::norm, Kind::norm, Kind::sum});
            }
            launch.grid = 1 + random.below(blocks);
            // At most a few exchanges per block.
            launch.count = 1 + random.below(std::min(slot * launch.grid * 3, DATA_MAX));
            if (launch.kind == Kind::norm) {
                slot = SLOT_MAX;
                launch.rows = 1 + random.below(5);
                launch.count = 4 * (1 + random.below(DATA_MAX / 4 / launch.rows));
                launch.count = std::min(launch.count, slot);
                launch.live = random.below(3) == 0 ? random.below(launch.rows + 1) : launch.rows;
            }
            launches.push_back(launch);
        }
        flags.assign(size_t{size} * blocks * size, 0);
        const size_t per_rank = size_t{2} * blocks * size * slot / 4;
        memset(slots.data(), 0xff, size * per_rank * 16);
        memset(old.data(), 0xff, size * per_rank * 16);
        std::fill_n(overwritten.begin(), size * per_rank, 0);
        for (uint32_t r = 0; r < size; r++) {
            Rank& rank = ranks[r];
            rank.rounds.assign(blocks, 0);
            rank.failed = rank.abort = rank.outcome = 0;
            rank.spent = 0;
            rank.last_flag.clear();
            rank.launch = 0;
            rank.in_launch = rank.stopped = false;
            rank.right = 0;
            TuttiPeers& table = rank.table;
            memset(&table, 0xff, sizeof table);
            for (uint32_t peer = 0; peer < size; peer++) {
                table.slots[peer] = address(slots.data() + peer * per_rank);
                table.flags[peer] = address(flags.data() + size_t{peer} * blocks * size);
            }
            table.rounds = address(rank.rounds.data());
            table.failed = address(&rank.failed);
            table.abort = address(&rank.abort);
            table.outcome = address(&rank.outcome);
            table.spent = address(&rank.spent);
            table.spin_ns = spin;
            table.rank = r;
            table.ranks = size;
            table.slot = slot;
            table.blocks = blocks;
            table.shares_gpu = random.below(2);
            for (std::unique_ptr<Running>& block : rank.blocks) {
                block->rank = r;
                block->busy = false;
                block->own.assign(threads, {});
                block->ordered.clear();
                block->view.assign(threads, 0);
                block->has_released.assign(threads, false);
            }
        }
    }

    static uint64_t address(const void* at) { return reinterpret_cast<uintptr_t>(at); }

    size_t index_of(const void* at) const {
        const auto* cell = static_cast<const float4*>(at);
        const size_t used = size_t{2} * size * blocks * size * slot / 4;
        if (cell < slots.data() || cell >= slots.data() + used) {
            wrong("rank %u reaches outside of the slots", running->rank);
        }
        return static_cast<size_t>(cell - slots.data());
    }

    void check_flag(const uint64_t* at) const {
        if (at < flags.data() || at >= flags.data() + flags.size()) {
            wrong("rank %u reaches outside of the flags", running->rank);
        }
    }

    // Checks that a rank that has failed does not touch the others' memory.
    void touched(const char* what) const {
        if (ranks[running->rank].had_failed) {
            wrong("rank %u %s in a launch after it has failed", running->rank, what);
        }
    }

    // Checks that a block that exchanges data has let the next kernel begin if its rank has the GPU
    // to itself, and has not if other ranks need the room.
    void follows_the_release() const {
        const bool shares = ranks[running->rank].table.shares_gpu != 0;
        if (shares && running->released != 0) {
            wrong("rank %u exchanges data, and the next kernel is in the other ranks' way",
                  running->rank);
        }
        if (!shares && running->released != threads) {
            wrong("rank %u exchanges data, and keeps the next kernel waiting", running->rank);
        }
    }

    // The first block of the running rank has read the clock by now.
    void began() {
        Rank& rank = ranks[running->rank];
        if (running == rank.blocks[0].get()) {
            rank.began_by = std::min(rank.began_by, now);
        }
    }

    void become_visible(const Pending& pending) {
        const auto index = static_cast<size_t>(pending.to - slots.data());
        old[index] = slots[index];
        overwritten[index] = now;
        slots[index] = pending.value;
    }

    void become_visible(std::vector<Pending>& all) {
        for (const Pending& pending : all) {
            become_visible(pending);
        }
        all.clear();
    }

    // A push can become visible before any flag.
    void leak() {
        if (leaks == 0 || random.below(leaks) != 0) {
            return;
        }
        Running& block = *ranks[random.below(size)].blocks[random.below(blocks)];
        std::vector<Pending>& all =
            random.below(2) == 0 ? block.ordered : block.own[random.below(threads)];
        if (!all.empty()) {
            std::swap(all[random.below(all.size())], all.back());
            become_visible(all.back());
            all.pop_back();
        }
    }

    // Picks the block that runs next: mostly the previous one.
    Running* next() {
        for (uint32_t r = 0; r < size; r++) {
            if (!ranks[r].stopped && !ranks[r].in_launch && ranks[r].launch < launches.size()) {
                launch(r);
            }
        }
        if (left > 0 && favourite->busy && !ranks[favourite->rank].stopped) {
            left--;
            return favourite;
        }
        Running* candidates[RANKS_MAX * BLOCKS_MAX];
        uint32_t count = 0;
        for (uint32_t r = 0; r < size; r++) {
            for (uint32_t b = 0; b < blocks; b++) {
                if (ranks[r].blocks[b]->busy && !ranks[r].stopped) {
                    candidates[count++] = ranks[r].blocks[b].get();
                }
            }
        }
        if (count == 0) {
            return nullptr;
        }
        favourite = candidates[random.below(count)];
        left = random.below(2 * ahead);
        return favourite;
    }

    void launch(uint32_t r) {
        Rank& rank = ranks[r];
        const Launch& what = launches[rank.launch];
        const auto number = static_cast<uint32_t>(rank.launch);
        rank.in_launch = true;
        rank.had_failed = rank.failed != 0;
        rank.rounds_before = rank.rounds[0];
        rank.spent_before = rank.spent;
        rank.launched_at = now;
        rank.began_by = NEVER;
        const uint32_t count = what.kind == Kind::norm ? what.count * what.rows : what.count;
        memset(rank.data, 0xff, DATA_MAX * 4);
        memset(rank.more, 0xff, size_t{RANKS_MAX} * DATA_MAX * 4);
        for (uint32_t i = 0; i < count; i++) {
            rank.data[i] = value_of(r, number, i);
        }
        const auto* peers = &rank.table;
        switch (what.kind) {
            case Kind::sum:
                rank.kernel = [&rank, peers, count] { tutti_peer_sum(peers, rank.data, count); };
                break;
            case Kind::two_shot:
                rank.kernel = [&rank, peers, count] {
                    tutti_peer_sum_two_shot(peers, rank.data, count);
                };
                break;
            case Kind::gather:
                rank.kernel = [&rank, peers, count] {
                    tutti_peer_gather(peers, rank.data, rank.more, count);
                };
                break;
            case Kind::norm:
                for (uint32_t i = 0; i < count; i++) {
                    rank.more[i] = value_of(100, number, i);
                }
                for (uint32_t i = 0; i < what.count; i++) {
                    rank.weight[i] = value_of(101, number, i);
                }
                memset(rank.rows, 0xff, DATA_MAX * 2);
                rank.live = what.live;
                rank.kernel = [&rank, peers, what] {
                    tutti_peer_sum_add_rmsnorm(peers, rank.data, rank.more, rank.weight, rank.rows,
                                               what.count, what.count, 1e-5f, what.rows,
                                               what.live == what.rows ? nullptr : &rank.live);
                };
                break;
        }
        const emulate::Settings settings{{what.grid, 1, 1}, threads, 0, 0};
        for (uint32_t b = 0; b < what.grid; b++) {
            Running& block = *rank.blocks[b];
            block.busy = true;
            std::fill(block.view.begin(), block.view.end(), now);
            std::fill(block.has_released.begin(), block.has_released.end(), false);
            block.released = 0;
            block.block.begin(settings, {b, 0, 0}, rank.kernel);
        }
    }

    // Handles the end of a block. The last one ends the launch and makes all its pushes visible.
    void finish(Running& ended) {
        Rank& rank = ranks[ended.rank];
        ended.busy = false;
        for (const std::unique_ptr<Running>& block : rank.blocks) {
            if (block->busy) {
                return;
            }
        }
        for (const std::unique_ptr<Running>& block : rank.blocks) {
            become_visible(block->ordered);
            for (std::vector<Pending>& own : block->own) {
                become_visible(own);
            }
        }
        if (rank.outcome == 0) {
            check(ended.rank);
            check_time(ended.rank);
            rank.right++;
            exchanges++;
        } else if (rank.failed == 0) {
            wrong("rank %u has an outcome, but its next launches do not know", ended.rank);
        }
        rank.in_launch = false;
        rank.launch++;
    }

    void check(uint32_t r) {
        const Rank& rank = ranks[r];
        const Launch& what = launches[rank.launch];
        const auto number = static_cast<uint32_t>(rank.launch);
        const auto expect = [&](const char* name, uint32_t i, float found, float wanted) {
            if (!same(found, wanted)) {
                wrong("rank %u of %u, launch %u (kind %d, %u elements, grid %u): %s[%u] is %g, not "
                      "%g",
                      r, size, number, static_cast<int>(what.kind), what.count, what.grid, name, i,
                      static_cast<double>(found), static_cast<double>(wanted));
            }
        };
        switch (what.kind) {
            case Kind::sum:
            case Kind::two_shot:
                for (uint32_t i = 0; i < what.count; i++) {
                    expect("data", i, rank.data[i], tree_of(0, size, number, i));
                }
                for (uint32_t i = what.count; i < DATA_MAX; i++) {
                    expect("padding", i, rank.data[i], __uint_as_float(0xffffffffu));
                }
                break;
            case Kind::gather:
                for (uint32_t from = 0; from < size; from++) {
                    for (uint32_t i = 0; i < what.count; i++) {
                        const uint32_t at = from * what.count + i;
                        expect("all", at, rank.more[at], value_of(from, number, i));
                    }
                }
                break;
            case Kind::norm: check_norm(rank, what, number, expect); break;
        }
    }

    // What a launch has added to the time of exchanges: at least from its first push to the last
    // flag it waited for, at most all that it took.
    void check_time(uint32_t r) const {
        const Rank& rank = ranks[r];
        const uint64_t rounds = rank.rounds[0];
        uint64_t least = 0, most = 0;
        if (rounds != rank.rounds_before) {
            const uint64_t flag = rank.last_flag[rounds];
            least = flag > rank.began_by ? flag - rank.began_by : 0;
            most = now - rank.launched_at;
        }
        const uint64_t spent = rank.spent - rank.spent_before;
        if (spent < least || spent > most) {
            wrong("rank %u of %u, launch %zu: its exchanges took %llu, not %llu to %llu", r, size,
                  rank.launch, static_cast<unsigned long long>(spent),
                  static_cast<unsigned long long>(least), static_cast<unsigned long long>(most));
        }
    }

    // Compares with tutti_add_rmsnorm, launched on the sums.
    template <class Expect>
    void check_norm(const Rank& rank, const Launch& what, uint32_t number, const Expect& expect) {
        static std::vector<float> residual(DATA_MAX), sums(DATA_MAX);
        static std::vector<tutti_bf16> out(DATA_MAX + 8);
        const uint32_t live = what.live * what.count;
        for (uint32_t i = 0; i < what.rows * what.count; i++) {
            sums[i] = tree_of(0, size, number, i);
            residual[i] = value_of(100, number, i);
        }
        std::fill(out.begin(), out.end(), 0xffff);
        auto* memory = std::exchange(emulate::peer_memory, nullptr);
        tutti_bf16* to = out.data();
        while (address(to) % 16 != 0) {
            to++;
        }
        if (what.live > 0) {
            // Aligned to 16 bytes, as std::vector<float> is not.
            static auto* r = static_cast<float*>(emulate::guarded(DATA_MAX * 4, false));
            static auto* d = static_cast<float*>(emulate::guarded(DATA_MAX * 4, false));
            memcpy(r, residual.data(), DATA_MAX * 4);
            memcpy(d, sums.data(), DATA_MAX * 4);
            emulate::run_grid({{what.live, 1, 1}, 512, 0, 0}, [&] {
                tutti_add_rmsnorm(r, d, rank.weight, to, what.count, what.count, 1e-5f, nullptr);
            });
            memcpy(residual.data(), r, DATA_MAX * 4);
        }
        emulate::peer_memory = memory;
        for (uint32_t i = 0; i < what.rows * what.count; i++) {
            expect("residual", i, rank.more[i], residual[i]);
            const auto wide = [](tutti_bf16 x) {
                return __uint_as_float(static_cast<uint32_t>(x) << 16);
            };
            expect("out", i, wide(rank.rows[i]), wide(i < live ? to[i] : 0xffff));
        }
    }

    void happen(const std::string& scenario) {
        if (scenario == "abort") {
            const bool all = random.below(2) == 0;
            for (uint32_t r = 0; r < size; r++) {
                if (all || r == victim) {
                    ranks[r].abort = 1;
                }
            }
            // If all are aborted, one may have stopped; only the abort ends the others.
            ranks[victim].stopped = all && random.below(2) == 0;
            // If only one is aborted, the others time out.
            for (uint32_t r = 0; r < size && !all; r++) {
                ranks[r].table.spin_ns = SPIN_OF_ABORTED;
            }
            return;
        }
        Rank& rank = ranks[victim];
        rank.stopped = true;
        if (scenario == "die") {
            for (const std::unique_ptr<Running>& block : rank.blocks) {
                for (std::vector<Pending>& own : block->own) {
                    own.clear();
                }
                block->ordered.clear();
            }
        }
    }

    void check_the_end(const std::string& scenario) {
        for (uint32_t r = 0; r < size; r++) {
            const Rank& rank = ranks[r];
            failures += rank.outcome != 0;
            if (!rank.stopped && rank.launch != launches.size()) {
                wrong("rank %u has made %zu launches of %zu", r, rank.launch, launches.size());
            }
            if (scenario == "whole" && rank.outcome != 0) {
                wrong("rank %u says %#x, though nothing happened", r, rank.outcome);
            }
            const uint32_t peer = rank.outcome & 0xff;
            if (rank.outcome != 0 && (peer >= size || peer == r)) {
                wrong("rank %u has waited for rank %u of %u", r, peer, size);
            }
            if (rank.outcome >> 8 == 1 && rank.abort == 0) {
                wrong("rank %u says it was aborted, which it was not", r);
            }
        }
    }
};

}  // namespace

int main(int count, char** options) {
    if (count < 4) {
        fprintf(stderr, "usage: ranks whole|abort|die|freeze FROM COUNT [THREADS]\n");
        return 2;
    }
    const std::string scenario = options[1];
    const uint64_t from = strtoull(options[2], nullptr, 10);
    const uint64_t number = strtoull(options[3], nullptr, 10);
    const auto threads = static_cast<uint32_t>(count > 4 ? strtoul(options[4], nullptr, 10) : 32);
    auto world = std::make_unique<World>();
    emulate::peer_memory = world.get();
    uint64_t steps = 0;
    for (uint64_t seed = from; seed < from + number; seed++) {
        context = scenario + ", seed " + std::to_string(seed);
        world->run(scenario, seed, threads);
        steps += world->steps();
    }
    printf("%s: %llu seeds, %llu steps, %llu launches right, %llu ranks failed\n", scenario.c_str(),
           static_cast<unsigned long long>(number), static_cast<unsigned long long>(steps),
           static_cast<unsigned long long>(world->exchanges),
           static_cast<unsigned long long>(world->failures));
    return 0;
}
