// Fibers, barriers, warp meetings and memory of an emulated block. See device.h.
#include "block.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "../kernels.h"
#include "device.h"
#include "guarded.h"
#include "races.h"

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emulate {

thread_local dim3 thread_index, block_index, block_size, grid_size;
PeerMemory* peer_memory = nullptr;
std::function<void(bool)> may_write;
// Where each warp runs ahead of the others, the stacks in use at a time are few enough for the cache.
const uint32_t QUICKEST_SEED = 1;

namespace {

constexpr size_t STACK_BYTES = 256 * 1024;
constexpr uint32_t NOBODY = UINT32_MAX;
// NaN as f32 and as bf16, and an invalid index.
constexpr unsigned char POISON = 0xff;

struct Copy {
    void* to;
    const void* from;
    bool valid;
    size_t bytes;
    int group;
};

// What a fiber has beside its stack and whether it can run: see `Block::State`.
struct Fiber {
    bool waited = false;
#if !defined(__x86_64__)
    ucontext_t context;
#endif
    std::vector<Copy> copies;
    int group = 0;
};

struct Warp {
    uint32_t arrived = 0;
    uint32_t mask = 0;
    const char* what = nullptr;
    void* operands[32] = {};
    // __syncwarp, so far.
    uint32_t barriers = 0;
};

struct SharedBlock {
    void* memory;
    size_t bytes;
    uint64_t block;
};

void perform(const Copy& copy) {
    touch(copy.to, copy.bytes, Access::write);
    if (copy.valid) {
        memcpy(copy.to, copy.from, copy.bytes);
    } else {
        memset(copy.to, 0, copy.bytes);
    }
}

}  // namespace

// The block being run. Its memory is reused for the next one, also if that is smaller or larger:
// giving it back to the kernel and getting it again took more time than many blocks.
struct Block::State {
    std::vector<Fiber> fibers;
    // The threads that can run, one bit each, in their order: what every switch looks at, close
    // together, for the caches are full of stacks. And where in that order each thread is.
    std::vector<uint32_t> runnable;
    std::vector<uint32_t> positions;
    uint32_t& word_of(uint32_t thread) { return runnable[positions[thread] / 32]; }
    uint32_t bit_of(uint32_t thread) const { return 1u << positions[thread] % 32; }
    void stop(uint32_t thread) { word_of(thread) &= ~bit_of(thread); }
    bool can_run(uint32_t thread) { return (word_of(thread) & bit_of(thread)) != 0; }
#if defined(__x86_64__)
    std::vector<void*> stack_pointers;
#endif
    // At least one for each fiber.
    std::vector<unsigned char*> stacks;
    std::vector<Warp> warps;
    uint32_t current = NOBODY;
    uint32_t waiting_at_barrier = 0;
    uint32_t finished = 0;
    // Number of ended threads that had waited for the preceding kernels.
    uint32_t have_waited = 0;
    // Whether any thread has waited, so that the block may write.
    bool is_free = false;
    // Votes at the current barrier so far, and the result of the last complete one.
    bool votes = true;
    bool verdict = true;
    uint32_t barriers = 0;
    bool copies_arrive_early = false;
    const std::function<void()>* entry = nullptr;
    dim3 grid, index;
    // The order of `Block::run`, or null in `Block::run_one`; of it, the part being run and the
    // position there, and whether any thread has run in this round over the part, and over all.
    const std::vector<uint32_t>* order = nullptr;
    size_t part = 0;
    size_t first = 0;
    size_t next = 0;
    bool again = false;
    bool progress = false;
    // The current thread's.
    Fiber& own() { return fibers[current]; }
    std::map<const void*, SharedBlock> shared_arrays;
    // Those that were found last: every thread of a block asks for them.
    struct {
        const void* key = nullptr;
        SharedBlock* array = nullptr;
    } recent[16];
    // By size.
    std::map<size_t, SharedBlock> dynamic_arrays;
    SharedBlock* dynamic = nullptr;
    uint64_t number = 0;
};

namespace {

// The block that this host thread runs.
thread_local Block::State* running = nullptr;

#if defined(__x86_64__)
thread_local void* scheduler_sp = nullptr;
extern "C" void tutti_emulate_switch(void** save, void* to);
asm(R"(
.text
.globl tutti_emulate_switch
tutti_emulate_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
#else
thread_local ucontext_t scheduler_context;
#endif

// The next thread to run: round and round a part of the order until none of it can run, then on to
// the next part. `NOBODY` when a round over all parts has found none.
uint32_t pick(Block::State& s) {
    for (;;) {
        while (s.next < s.first + s.part) {
            // A part is of whole words.
            const uint32_t rest = s.runnable[s.next / 32] >> s.next % 32;
            if (rest == 0) {
                s.next = (s.next / 32 + 1) * 32;
                continue;
            }
            const auto after = [&](uint32_t bits) {
                return s.next + static_cast<uint32_t>(__builtin_ctz(bits));
            };
            const size_t found = after(rest);
#if defined(__x86_64__)
            // Each stack is on a page of its own, which takes a while to reach.
            const size_t then = (rest & (rest - 1)) != 0 ? after(rest & (rest - 1)) : s.first;
            __builtin_prefetch(s.stack_pointers[(*s.order)[then]]);
#endif
            s.next = found + 1;
            s.again = s.progress = true;
            return (*s.order)[found];
        }
        if (!std::exchange(s.again, false)) {
            s.first += s.part;
            if (s.first == s.order->size()) {
                s.first = 0;
                if (!std::exchange(s.progress, false)) {
                    return NOBODY;
                }
            }
        }
        s.next = s.first;
    }
}

// Lets the next thread run: without a detour if the order is known, since most time of an emulation
// is spent here. The scheduler itself runs when no thread can.
void yield() {
    Block::State& block = *running;
    const uint32_t from = block.current;
    const uint32_t to = block.order != nullptr ? pick(block) : NOBODY;
    if (to == from) {
        return;
    }
    if (to != NOBODY) {
        block.current = to;
        thread_index = {to, 0, 0};
    }
#if defined(__x86_64__)
    void** const pointers = block.stack_pointers.data();
    tutti_emulate_switch(&pointers[from], to != NOBODY ? pointers[to] : scheduler_sp);
#else
    swapcontext(&block.fibers[from].context,
                to != NOBODY ? &block.fibers[to].context : &scheduler_context);
#endif
}

void fiber_main() {
    (*running->entry)();
    running->have_waited += running->own().waited ? 1 : 0;
    running->stop(running->current);
    running->finished++;
    if (running->finished == running->fibers.size() && running->have_waited != 0 &&
        running->have_waited != running->finished) {
        fail("some threads of a block have waited for the kernels before, others not");
    }
    if (running->finished == running->fibers.size() && running->have_waited == 0 &&
        peer_memory != nullptr) {
        fail("a block that exchanges data ends and has not waited for the kernels before");
    }
    yield();
    abort();
}

void start(Block::State& block, uint32_t index) {
    Fiber& fiber = block.fibers[index];
    unsigned char* const stack = block.stacks[index];
    fiber.waited = false;
    fiber.copies.clear();
    fiber.group = 0;
#if defined(__x86_64__)
    // Stacks are pages apart: without these steps their tops would share few lines of the cache.
    const size_t step = index % 64 * 5 * 64;
    void** top = reinterpret_cast<void**>(stack + STACK_BYTES - step);
    // As after a call: the stack pointer is 16 k + 8 on entry, after six registers are popped.
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(fiber_main);
    for (int i = 0; i < 6; i++) {
        *--top = nullptr;
    }
    block.stack_pointers[index] = top;
#else
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stack;
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, fiber_main, 0);
#endif
}

void resume(uint32_t index) {
    running->current = index;
    thread_index = {index, 0, 0};
#if defined(__x86_64__)
    tutti_emulate_switch(&scheduler_sp, running->stack_pointers[index]);
#else
    swapcontext(&scheduler_context, &running->fibers[index].context);
#endif
}

void* poisoned(SharedBlock& array) {
    if (array.block != running->number) {
        memset(array.memory, POISON, array.bytes);
        array.block = running->number;
    }
    return array.memory;
}

}  // namespace

Block::Block() : state(new State) {}

Block::~Block() {
    for (unsigned char* stack : state->stacks) {
        free(stack);
    }
    for (const auto& array : state->shared_arrays) {
        release_guarded(array.second.memory, array.second.bytes);
    }
    for (const auto& array : state->dynamic_arrays) {
        release_guarded(array.second.memory, array.second.bytes);
    }
}

void Block::begin(const Settings& settings, dim3 index, const std::function<void()>& kernel) {
    State& s = *state;
    if (s.fibers.size() != settings.threads) {
        s.fibers.resize(settings.threads);
        s.positions.resize(settings.threads);
#if defined(__x86_64__)
        s.stack_pointers.resize(settings.threads);
#endif
        s.warps.resize(settings.threads / 32);
    }
    auto dynamic = s.dynamic_arrays.find(settings.shared_bytes);
    if (dynamic == s.dynamic_arrays.end()) {
        const SharedBlock made{guarded(settings.shared_bytes, false), settings.shared_bytes, 0};
        dynamic = s.dynamic_arrays.emplace(settings.shared_bytes, made).first;
        watch(made.memory, made.bytes, true);
    }
    s.dynamic = &dynamic->second;
    while (s.stacks.size() < settings.threads) {
        s.stacks.push_back(static_cast<unsigned char*>(aligned_alloc(4096, STACK_BYTES)));
    }
    for (uint32_t i = 0; i < settings.threads; i++) {
        start(s, i);
    }
    s.runnable.assign(settings.threads / 32, ~0u);
    std::iota(s.positions.begin(), s.positions.end(), 0u);
    for (Warp& warp : s.warps) {
        warp = Warp{};
    }
    s.waiting_at_barrier = s.finished = s.have_waited = 0;
    s.votes = s.verdict = true;
    s.barriers = 0;
    s.is_free = false;
    s.copies_arrive_early = settings.seed % 2 == 1;
    s.entry = &kernel;
    s.grid = {settings.grid[0], settings.grid[1], settings.grid[2]};
    s.index = index;
    s.number++;
}

bool Block::has_waited() const { return state->have_waited != 0; }

bool Block::is_done() const { return state->finished == state->fibers.size(); }

void Block::enter() {
    running = state.get();
    grid_size = state->grid;
    block_index = state->index;
    block_size = {static_cast<uint32_t>(state->fibers.size()), 1, 1};
}

bool Block::run_one(uint32_t first) {
    enter();
    state->order = nullptr;
    const auto count = static_cast<uint32_t>(state->fibers.size());
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t index = (first + i) % count;
        if (state->can_run(index)) {
            resume(index);
            return true;
        }
    }
    return false;
}

// `order` lists threads, one whole warp after the other. `in_turn`: all warps proceed in step;
// otherwise each runs as far ahead of the others as barriers allow, which exposes missing barriers.
void Block::run(const std::vector<uint32_t>& order, bool in_turn) {
    enter();
    State& s = *state;
    s.order = &order;
    for (uint32_t i = 0; i < order.size(); i++) {
        s.positions[order[i]] = i;
    }
    s.part = in_turn ? order.size() : 32;
    s.first = s.next = 0;
    s.again = s.progress = false;
    if (const uint32_t index = pick(s); index != NOBODY) {
        resume(index);
    }
    if (!is_done()) {
        fail("a deadlock: some threads wait for others that wait elsewhere or have ended");
    }
}

void fail(const char* what) {
    fprintf(stderr, "%sblock (%u, %u, %u), thread %u: %s\n",
            peer_memory != nullptr ? peer_memory->where() : "", block_index.x, block_index.y,
            block_index.z, thread_index.x, what);
    _exit(3);
}

void* shared_array(const void* key, size_t bytes) {
    auto& last = running->recent[reinterpret_cast<uintptr_t>(key) % 16];
    if (last.key == key) {
        return poisoned(*last.array);
    }
    auto& arrays = running->shared_arrays;
    auto found = arrays.find(key);
    if (found == arrays.end()) {
        found = arrays.emplace(key, SharedBlock{guarded(bytes, false), bytes, 0}).first;
        watch(found->second.memory, bytes, true);
    }
    last = {key, &found->second};
    return poisoned(found->second);
}

void* dynamic_shared() { return poisoned(*running->dynamic); }

bool barrier_and(bool vote) {
    Block::State& block = *running;
    if (block.finished > 0) {
        fail("a barrier after some threads of the block have ended");
    }
    block.votes = block.votes && vote;
    if (++block.waiting_at_barrier == block.fibers.size()) {
        block.waiting_at_barrier = 0;
        block.barriers++;
        // Safe until all have read it: the next write needs all threads at a barrier again.
        block.verdict = std::exchange(block.votes, true);
        std::fill(block.runnable.begin(), block.runnable.end(), ~0u);
        if (peer_memory != nullptr) {
            peer_memory->met();
        }
        // Yield: the last thread to arrive must not always be the first to continue.
    } else {
        block.stop(block.current);
    }
    yield();
    return block.verdict;
}

void barrier() { barrier_and(true); }

void meet(uint32_t mask, const char* what, void* operands, void (*compute)(void* const* lanes)) {
    const uint32_t index = running->current;
    const uint32_t lane = index % 32;
    const uint32_t first = index - lane;
    Warp& warp = running->warps[index / 32];
    if ((mask >> lane & 1) == 0) {
        fail("an instruction of a warp whose mask lacks this lane");
    }
    // The names are literals: mostly one and the same pointer.
    const bool same = warp.what == what || (warp.what != nullptr && strcmp(warp.what, what) == 0);
    if (warp.arrived != 0 && (warp.mask != mask || !same)) {
        fail("lanes of a warp meet at different instructions");
    }
    warp.mask = mask;
    warp.what = what;
    warp.arrived |= 1u << lane;
    warp.operands[lane] = operands;
    if (warp.arrived != mask) {
        running->stop(index);
        yield();
        return;
    }
    void* lanes[32];
    for (uint32_t i = 0; i < 32; i++) {
        lanes[i] = (mask >> i & 1) != 0 ? warp.operands[i] : nullptr;
    }
    warp.arrived = 0;
    compute(lanes);
    if (mask == ~0u) {
        running->word_of(index) = ~0u;
    } else {
        for (uint32_t i = 0; i < 32; i++) {
            if (lanes[i] != nullptr) {
                running->word_of(first + i) |= running->bit_of(first + i);
            }
        }
    }
    yield();
}

void count_warp_barrier() { running->warps[running->current / 32].barriers++; }

#if defined(TUTTI_RACES)
bool now(Moment* moment) {
    if (running == nullptr || running->current == NOBODY || running->finished == running->fibers.size()) {
        return false;
    }
    const uint32_t thread = running->current;
    *moment = {static_cast<uint32_t>(running->number), thread, running->barriers,
               running->warps[thread / 32].barriers};
    return true;
}
#endif

void waited() {
    running->own().waited = true;
    if (may_write && !std::exchange(running->is_free, true)) {
        may_write(true);
    }
}

void must_have_waited() {
    if (!running->own().waited) {
        fail("what kernels before write is read before they are complete");
    }
}

void released() {
    if (peer_memory != nullptr) {
        peer_memory->released();
    }
}

void copy_async(void* to, const void* from, bool valid, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(to) % bytes != 0 ||
        reinterpret_cast<uintptr_t>(from) % bytes != 0) {
        fail("a background copy that is not aligned to its size");
    }
    if (valid) {
        touch(from, bytes, Access::read);
    }
    // From now on until it is waited for it may arrive.
    touch(to, bytes, Access::write);
    const Copy copy{to, from, valid, bytes, running->own().group};
    if (running->copies_arrive_early) {
        perform(copy);
    } else {
        running->own().copies.push_back(copy);
    }
}

void commit_copies() { running->own().group++; }

void wait_copies(int pending) {
    auto& copies = running->own().copies;
    const int complete = running->own().group - pending;
    for (const Copy& copy : copies) {
        if (copy.group < complete) {
            perform(copy);
        }
    }
    copies.erase(std::remove_if(copies.begin(), copies.end(),
                                [complete](const Copy& copy) { return copy.group < complete; }),
                 copies.end());
}

// ---- Memory that ranks share: `peer_memory` if set, otherwise the host's memory and clock. ----

void push(void* to, const void* from) {
    if (reinterpret_cast<uintptr_t>(to) % 16 != 0) {
        fail("a push that is not 16-byte aligned");
    }
    if (peer_memory != nullptr) {
        yield();
        peer_memory->push(to, from);
        return;
    }
    touch(to, 16, Access::write);
    memcpy(to, from, 16);
}

void take(void* to, const void* from) {
    if (reinterpret_cast<uintptr_t>(from) % 16 != 0) {
        fail("a take that is not 16-byte aligned");
    }
    if (peer_memory != nullptr) {
        yield();
        peer_memory->take(to, from);
        return;
    }
    touch(from, 16, Access::read);
    memcpy(to, from, 16);
}

void store_release(uint64_t* at, uint64_t value) {
    if (peer_memory != nullptr) {
        yield();
        peer_memory->store_release(at, value);
        return;
    }
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
}

uint64_t load_acquire(const uint64_t* at) {
    // A waiting thread lets the block's other threads run (those of other warps only if all proceed
    // in step: what waits and what it waits for have to be in one warp), and the other ranks.
    yield();
    if (peer_memory != nullptr) {
        return peer_memory->load_acquire(at);
    }
    thread_local uint32_t polls = 0;
    if (++polls % 32 == 0) {
        usleep(20);
    }
    return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}

void store_word(uint32_t* at, uint32_t value) {
    if (peer_memory != nullptr) {
        yield();
    }
    __atomic_store_n(at, value, __ATOMIC_RELAXED);
}

uint32_t load_word(const uint32_t* at) {
    if (peer_memory != nullptr) {
        yield();
    }
    return __atomic_load_n(at, __ATOMIC_RELAXED);
}

uint64_t load_word(const uint64_t* at) {
    if (peer_memory != nullptr) {
        yield();
    }
    return __atomic_load_n(at, __ATOMIC_RELAXED);
}

uint64_t nanoseconds() {
    if (peer_memory != nullptr) {
        return peer_memory->nanoseconds();
    }
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<uint64_t>(std::chrono::nanoseconds(now).count());
}

float round_to_bf16_as_float(float x) {
    uint32_t bits = __float_as_uint(x);
    if (x != x) {
        return __uint_as_float(0x7fff0000u);
    }
    bits += 0x7fffu + (bits >> 16 & 1);
    return __uint_as_float(bits & 0xffff0000u);
}

void run_grid(const Settings& settings, const std::function<void()>& kernel) {
    if (settings.threads == 0 || settings.threads > 1024 || settings.threads % 32 != 0) {
        fail("threads per block must be a multiple of 32 from 32 to 1024");
    }
    // Reused by all launches of this host thread.
    static thread_local Block block;
    const uint32_t* grid = settings.grid;

    std::mt19937 random(settings.seed);
    std::vector<uint32_t> order(settings.threads);
    std::iota(order.begin(), order.end(), 0u);
    std::vector<uint32_t> warp_order(settings.threads / 32);
    std::iota(warp_order.begin(), warp_order.end(), 0u);
    const uint64_t blocks = uint64_t{1} * grid[0] * grid[1] * grid[2];
    std::vector<uint64_t> block_order(blocks);
    std::iota(block_order.begin(), block_order.end(), uint64_t{0});
    // Seed 0 is index order, 1 the reverse; others shuffle blocks, the warps in each block, and the
    // lanes in each warp.
    if (settings.seed == 1) {
        std::reverse(order.begin(), order.end());
        std::reverse(block_order.begin(), block_order.end());
    } else if (settings.seed > 1) {
        std::shuffle(block_order.begin(), block_order.end(), random);
    }
    bool some_wait = false;
    for (uint64_t number : block_order) {
        if (settings.seed > 1) {
            std::shuffle(warp_order.begin(), warp_order.end(), random);
            for (size_t warp = 0; warp < warp_order.size(); warp++) {
                const auto lanes = order.begin() + static_cast<std::ptrdiff_t>(32 * warp);
                std::iota(lanes, lanes + 32, 32 * warp_order[warp]);
                std::shuffle(lanes, lanes + 32, random);
            }
        }
        const dim3 index = {static_cast<uint32_t>(number % grid[0]),
                            static_cast<uint32_t>(number / grid[0] % grid[1]),
                            static_cast<uint32_t>(number / grid[0] / grid[1])};
        if (may_write) {
            may_write(false);
        }
        block.begin(settings, index, kernel);
        block.run(order, settings.seed == 0);
        some_wait = some_wait || block.has_waited();
    }
    if (may_write) {
        may_write(true);
    }
    if (!some_wait) {
        fail("no block of the grid has waited for the kernels before");
    }
}

}  // namespace emulate

uint32_t __ballot_sync(uint32_t mask, bool vote) {
    struct Operands {
        bool vote;
        uint32_t result;
    } mine{vote, 0};
    emulate::meet(mask, "vote", &mine, [](void* const* lanes) {
        uint32_t result = 0;
        for (int i = 0; i < 32; i++) {
            if (lanes[i] != nullptr && static_cast<Operands*>(lanes[i])->vote) {
                result |= 1u << i;
            }
        }
        for (int i = 0; i < 32; i++) {
            if (lanes[i] != nullptr) {
                static_cast<Operands*>(lanes[i])->result = result;
            }
        }
    });
    return mine.result;
}

void __syncwarp() {
    int nothing = 0;
    emulate::meet(0xffffffffu, "syncwarp", &nothing,
                  [](void* const*) { emulate::count_warp_barrier(); });
}

namespace tutti {
namespace {

float half_of(uint32_t pair, int which) {
    return __uint_as_float(which == 0 ? pair << 16 : pair & 0xffff0000u);
}

struct Mma {
    float* c;
    const uint32_t* a;
    uint32_t b[2];
};

struct Matrices {
    uint32_t* r;
    const void* row;
};

template <bool TRANSPOSED>
void load(void* const* lanes) {
    uint16_t element[4][8][8];
    for (int i = 0; i < 32; i++) {
        const void* row = static_cast<Matrices*>(lanes[i])->row;
        if (reinterpret_cast<uintptr_t>(row) % 16 != 0) {
            emulate::fail("a row of ldmatrix that is not 16-byte aligned");
        }
        memcpy(element[i / 8][i % 8], row, 16);
    }
    for (int i = 0; i < 32; i++) {
        uint32_t* r = static_cast<Matrices*>(lanes[i])->r;
        for (int matrix = 0; matrix < 4; matrix++) {
            const int row = i / 4;
            const int column = i % 4 * 2;
            const auto& m = element[matrix];
            const uint32_t low = TRANSPOSED ? m[column][row] : m[row][column];
            const uint32_t high = TRANSPOSED ? m[column + 1][row] : m[row][column + 1];
            r[matrix] = high << 16 | low;
        }
    }
}

}  // namespace

void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    Mma mine{c, a, {b0, b1}};
    emulate::meet(0xffffffffu, "mma", &mine, [](void* const* lanes) {
        const auto at = [&](int lane) { return static_cast<Mma*>(lanes[lane]); };
        double a[16][16], b[16][8], sum[16][8];
        for (int lane = 0; lane < 32; lane++) {
            const int g = lane / 4;
            const int t = lane % 4;
            for (int i = 0; i < 8; i++) {
                const int row = g + (i / 2 % 2) * 8;
                const int column = 2 * t + i % 2 + i / 4 * 8;
                a[row][column] = half_of(at(lane)->a[i / 2], i % 2);
            }
            for (int i = 0; i < 4; i++) {
                b[2 * t + i % 2 + i / 2 * 8][g] = half_of(at(lane)->b[i / 2], i % 2);
            }
        }
        const auto each = [&](auto visit) {
            for (int lane = 0; lane < 32; lane++) {
                for (int i = 0; i < 4; i++) {
                    visit(at(lane)->c[i], sum[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
                }
            }
        };
        each([](float& c, double& sum) { sum = c; });
        // Column by column in the inner loop: the compiler computes several at once.
        for (int row = 0; row < 16; row++) {
            for (int k = 0; k < 16; k++) {
                for (int column = 0; column < 8; column++) {
                    sum[row][column] += a[row][k] * b[k][column];
                }
            }
        }
        each([](float& c, double& sum) { c = static_cast<float>(sum); });
    });
}

void load_matrices(uint32_t (&r)[4], const void* row) {
    emulate::touch(row, 16, emulate::Access::read);
    Matrices mine{r, row};
    emulate::meet(0xffffffffu, "ldmatrix", &mine, load<false>);
}

void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
    emulate::touch(row, 16, emulate::Access::read);
    Matrices mine{r, row};
    emulate::meet(0xffffffffu, "ldmatrix.trans", &mine, load<true>);
}

}  // namespace tutti
