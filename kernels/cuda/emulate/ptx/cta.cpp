// Blocks of warps: who runs when, who waits for whom. The interface of `block.h`, without fibers.
//
// Lanes of a warp have a program counter each. Those that are at the same instruction run together,
// the lowest instruction first, so that lanes that have parted meet again; with a seed other than 0
// every lane runs by itself, as far as it can. An instruction with a mask waits for the lanes in
// it.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>

#include "../guarded.h"
#include "machine.h"
#include "non_coherent.h"

namespace emulate {

thread_local dim3 thread_index, block_index, block_size, grid_size;
PeerMemory* peer_memory = nullptr;
std::function<void(bool)> may_write;
// In step, the lanes of a warp are computed at once.
const uint32_t QUICKEST_SEED = 0;

struct Block::State {
    ptx::Cta cta;
    dim3 grid, index;
    std::vector<uint64_t> arguments;
    unsigned char* registers = nullptr;
    size_t register_bytes = 0;
    size_t shared_bytes = 0;
    // What the registers' constants and the arrays are for.
    const ptx::Kernel* prepared = nullptr;
    uint32_t prepared_warps = 0;
    size_t dynamic_bytes = 0;
    uint32_t at_barrier = 0;
    uint32_t finished = 0;
    uint32_t have_waited = 0;
    uint32_t barriers = 0;
    uint32_t number = 0;
    bool in_step = true;
};

namespace {

// The block that this host thread runs, or begins.
thread_local Block::State* running = nullptr;

}  // namespace

namespace ptx {
namespace {

using State = emulate::Block::State;

unsigned char* pages(size_t bytes) {
    void* memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (memory == nullptr) {
        fail("out of memory");
    }
    return static_cast<unsigned char*>(memory);
}

// What is the same for all blocks of a launch: constants in registers, and the arrays.
void prepare(State& s, uint32_t threads, size_t dynamic_bytes) {
    Cta& cta = s.cta;
    const Kernel& kernel = *cta.kernel;
    const uint32_t warps = threads / LANES;
    if (s.prepared == &kernel && s.prepared_warps == warps && s.dynamic_bytes == dynamic_bytes) {
        return;
    }
    s.prepared = &kernel;
    s.prepared_warps = warps;
    s.dynamic_bytes = dynamic_bytes;
    if (size_t{kernel.register_bytes} * warps > s.register_bytes) {
        free(s.registers);
        s.register_bytes = size_t{kernel.register_bytes} * warps;
        s.registers = pages(s.register_bytes);
    }
    cta.warps.resize(warps);
    for (uint32_t i = 0; i < warps; i++) {
        Warp& warp = cta.warps[i];
        warp.cta = &cta;
        warp.first_thread = i * LANES;
        warp.registers = s.registers + size_t{kernel.register_bytes} * i;
        for (const auto& [at, bytes] : kernel.constants) {
            memcpy(warp.registers + at, bytes.data(), bytes.size());
        }
    }
    cta.arrays.clear();
    cta.shared_end = SHARED_BEGIN;
    for (SharedArray array : kernel.shared) {
        array.bytes = array.dynamic ? static_cast<uint32_t>(dynamic_bytes) : array.bytes;
        if (array.bytes > 0) {
            cta.arrays.push_back(array);
            cta.shared_end = std::max(cta.shared_end, (array.begin + array.bytes + 15) / 16 * 16);
        }
    }
    if (cta.shared_end > s.shared_bytes) {
        free(cta.shared);
        s.shared_bytes = cta.shared_end;
        cta.shared = pages(s.shared_bytes);
    }
    cta.owners.assign(cta.shared_end / 16, 0);
    for (size_t i = 0; i < cta.arrays.size(); i++) {
        const SharedArray& array = cta.arrays[i];
        const uint32_t end = (array.begin + array.bytes + 15) / 16;
        for (uint32_t granule = array.begin / 16; granule < end; granule++) {
            cta.owners[granule] = static_cast<uint8_t>(i + 1);
        }
        watch(cta.shared + array.begin, array.bytes, true);
    }
}

void end(State& s, Warp& warp, uint32_t lanes) {
    warp.live &= ~lanes;
    s.have_waited += static_cast<uint32_t>(__builtin_popcount(warp.waited & lanes));
    s.finished += static_cast<uint32_t>(__builtin_popcount(lanes));
    if (s.finished != s.cta.threads || !s.cta.kernel->waits) {
        return;
    }
    if (s.have_waited != 0 && s.have_waited != s.finished) {
        fail("some threads of a block have waited for the kernels before, others not");
    }
    if (s.have_waited == 0 && peer_memory != nullptr) {
        fail("a block that exchanges data ends and has not waited for the kernels before");
    }
}

// Lanes arrive at an instruction with a mask. Those of a mask that is complete execute it, and the
// others stay. True if these very lanes were all.
bool meet(Warp& warp, const Instruction& i, uint32_t pc, uint32_t group) {
    const uint32_t* masks = warp.row<uint32_t>(i.mask_at);
    const uint32_t mask = masks[__builtin_ctz(group)];
    bool alike = true;
    in_order(group, [&](uint32_t lane) { alike = alike && masks[lane] == mask; });
    if (alike && mask == group) {
        warp.mask = group;
        i.execute(warp, i);
        return true;
    }
    in_order(group, [&](uint32_t lane) {
        if ((masks[lane] >> lane & 1) == 0) {
            fail_at(warp, i, lane, "a mask that lacks the lane itself");
        }
        warp.pc[lane] = pc;
    });
    warp.in_warp |= group;
    // Of all that wait at this instruction, those with the same mask.
    for (uint32_t rest = group; rest != 0;) {
        const uint32_t wanted = masks[__builtin_ctz(rest)];
        uint32_t there = 0;
        in_order(warp.in_warp, [&](uint32_t lane) {
            there |= warp.pc[lane] == pc && masks[lane] == wanted ? 1u << lane : 0;
        });
        rest &= ~there;
        if (there == wanted) {
            warp.mask = there;
            i.execute(warp, i);
            warp.in_warp &= ~there;
            in_order(there, [&](uint32_t lane) { warp.pc[lane] = pc + 1; });
        }
    }
    return false;
}

// bar.sync 0 and bar.red: "equivalent to barrier.cta.sync.aligned".
void arrive(State& s, Warp& warp, uint32_t pc, uint32_t group) {
    if (s.finished > 0) {
        fail_at(warp, s.cta.kernel->code[pc], static_cast<uint32_t>(__builtin_ctz(group)),
                "a barrier after some threads of the block have ended");
    }
    in_order(group, [&](uint32_t lane) { warp.pc[lane] = pc; });
    warp.in_block |= group;
    s.at_barrier += static_cast<uint32_t>(__builtin_popcount(group));
    if (s.at_barrier != s.cta.threads) {
        return;
    }
    s.at_barrier = 0;
    s.barriers++;
    bool all = true;
    for (Warp& other : s.cta.warps) {
        const Instruction& i = s.cta.kernel->code[other.pc[0]];
        for (uint32_t lane = 0; lane < LANES; lane++) {
            if (other.pc[lane] != other.pc[0]) {
                fail_at(other, s.cta.kernel->code[other.pc[lane]], lane,
                        "lanes of a warp are at different barriers");
            }
        }
        all = all && (i.elements != 2 || other.predicate(i.at[1]) == ALL);
    }
    for (Warp& other : s.cta.warps) {
        const Instruction& i = s.cta.kernel->code[other.pc[0]];
        if (i.elements == 2) {
            other.predicate(i.at[0]) = all ? ALL : 0;
        }
        in_order(other.in_block, [&](uint32_t lane) { other.pc[lane]++; });
        other.in_block = 0;
    }
    if (peer_memory != nullptr) {
        peer_memory->met();
    }
}

// Runs the lowest of these lanes, and those at the same instruction, until they have to wait or
// part with others. False when none can run.
bool run_group(State& s, Warp& warp, uint32_t lanes) {
    const std::vector<Instruction>& code = s.cta.kernel->code;
    const uint32_t runnable = warp.runnable() & lanes & ~warp.yielded;
    if (runnable == 0) {
        return false;
    }
    uint32_t pc = ~uint32_t{0};
    in_order(runnable, [&](uint32_t lane) { pc = std::min(pc, warp.pc[lane]); });
    uint32_t group = 0;
    // Where others are met again.
    uint32_t next = ~uint32_t{0};
    in_order(runnable, [&](uint32_t lane) {
        if (warp.pc[lane] == pc) {
            group |= 1u << lane;
        } else {
            next = std::min(next, warp.pc[lane]);
        }
    });
    warp.mask = group;
    const auto leave = [&](uint32_t at, uint32_t which) {
        in_order(which, [&](uint32_t lane) { warp.pc[lane] = at; });
        return true;
    };
    for (;;) {
        const Instruction& i = code[pc];
        switch (i.kind) {
            case Kind::yielding:
                if ((i.flags & PEERS) == 0 || peer_memory != nullptr) {
                    if ((warp.may_go_on & group) != group) {
                        warp.may_go_on |= group;
                        warp.yielded |= group;
                        return leave(pc, group);
                    }
                    warp.may_go_on &= ~group;
                }
                [[fallthrough]];
            case Kind::plain:
                i.execute(warp, i);
                pc++;
                break;
            case Kind::branch: {
                const uint32_t p = i.guard == ALWAYS ? ALL : warp.predicate(i.guard);
                const uint32_t taken = group & (i.negated ? ~p : p);
                if (taken != 0 && taken != group) {
                    leave(i.target, taken);
                    return leave(pc + 1, group & ~taken);
                }
                pc = taken != 0 ? i.target : pc + 1;
                if (next != ~uint32_t{0} && taken != 0) {
                    return leave(pc, group);
                }
                break;
            }
            case Kind::exit:
                end(s, warp, group);
                return true;
            case Kind::warp:
            case Kind::whole_warp:
                if (!meet(warp, i, pc, group)) {
                    return true;
                }
                pc++;
                break;
            case Kind::barrier:
                arrive(s, warp, pc, group);
                return true;
        }
        if (pc >= next) {
            return leave(pc, group);
        }
    }
}

// Why nobody can run: who waits where.
[[noreturn]] void deadlock(State& s) {
    for (Warp& warp : s.cta.warps) {
        if (warp.in_warp != 0) {
            const auto lane = static_cast<uint32_t>(__builtin_ctz(warp.in_warp));
            const Instruction& i = s.cta.kernel->code[warp.pc[lane]];
            fail_at(warp, i, lane,
                    "a deadlock: the mask names lanes that do not come to this instruction");
        }
    }
    for (Warp& warp : s.cta.warps) {
        if (warp.in_block != 0) {
            const auto lane = static_cast<uint32_t>(__builtin_ctz(warp.in_block));
            fail_at(warp, s.cta.kernel->code[warp.pc[lane]], lane,
                    "a deadlock: some threads wait at a barrier that others do not come to");
        }
    }
    fail("a deadlock");
}

}  // namespace

void enter(const char* name, const uint64_t* arguments, size_t count) {
    State& s = *running;
    if (s.cta.kernel == nullptr || s.cta.kernel->name != name) {
        s.cta.kernel = &load(name);
    }
    if (s.cta.kernel->parameters != count) {
        fail("PTX with another number of parameters than kernels.h");
    }
    s.arguments.assign(arguments, arguments + count);
    s.cta.arguments = s.arguments.data();
}

void fail_at(Warp& warp, const Instruction& at, uint32_t lane, const char* what) {
    run_as(warp, lane);
    char text[512];
    const Kernel& kernel = *warp.cta->kernel;
    snprintf(text, sizeof text, "%s:%u: %s: %s", kernel.file.c_str(), at.line, at.opcode, what);
    fail(text);
}

}  // namespace ptx

Block::Block() : state(new State) {}

Block::~Block() {
    free(state->registers);
    free(state->cta.shared);
}

void Block::enter() {
    running = state.get();
    grid_size = state->grid;
    block_index = state->index;
    block_size = {state->cta.threads, 1, 1};
}

void Block::begin(const Settings& settings, dim3 index, const std::function<void()>& kernel) {
    State& s = *state;
    s.grid = {settings.grid[0], settings.grid[1], settings.grid[2]};
    s.index = index;
    ptx::Cta& cta = s.cta;
    cta.threads = settings.threads;
    cta.copies_arrive_early = settings.seed % 2 == 1;
    cta.is_free = false;
    s.in_step = settings.seed == 0;
    enter();
    // A stub, which only says which kernel it is.
    kernel();
    if (settings.threads > cta.kernel->most_threads) {
        fail("more threads than the kernel is compiled for");
    }
    ptx::prepare(s, settings.threads, settings.shared_bytes);
    for (const ptx::SharedArray& array : cta.arrays) {
        memset(cta.shared + array.begin, 0xff, array.bytes);
    }
    for (ptx::Warp& warp : cta.warps) {
        std::fill(std::begin(warp.pc), std::end(warp.pc), 0);
        std::fill(std::begin(warp.groups), std::end(warp.groups), 0);
        warp.live = ptx::ALL;
        warp.in_warp = warp.in_block = warp.yielded = warp.may_go_on = warp.barriers = 0;
        warp.waited = cta.kernel->waits ? 0 : ptx::ALL;
        for (auto& copies : warp.copies) {
            copies.clear();
        }
    }
    s.at_barrier = s.finished = s.have_waited = s.barriers = 0;
    s.number++;
    if (!cta.kernel->waits && may_write) {
        may_write(true);
    }
}

bool Block::is_done() const { return state->finished == state->cta.threads; }
bool Block::has_waited() const { return state->have_waited != 0 || !state->cta.kernel->waits; }

bool Block::run_one(uint32_t first) {
    enter();
    const uint32_t threads = state->cta.threads;
    for (uint32_t i = 0; i < threads; i++) {
        const uint32_t thread = (first + i) % threads;
        ptx::Warp& warp = state->cta.warps[thread / ptx::LANES];
        const uint32_t lane = 1u << thread % ptx::LANES;
        warp.yielded &= ~lane;
        if (ptx::run_group(*state, warp, lane)) {
            return true;
        }
    }
    return false;
}

void Block::run(const std::vector<uint32_t>& order, bool in_turn) {
    enter();
    State& s = *state;
    while (!is_done()) {
        bool progress = false;
        for (size_t from = 0; from < order.size(); from += ptx::LANES) {
            ptx::Warp& warp = s.cta.warps[order[from] / ptx::LANES];
            warp.yielded = 0;
            if (in_turn) {
                while (ptx::run_group(s, warp, ptx::ALL)) {
                    progress = true;
                }
                continue;
            }
            for (bool again = true; again;) {
                again = false;
                for (size_t i = from; i < from + ptx::LANES; i++) {
                    while (ptx::run_group(s, warp, 1u << order[i] % ptx::LANES)) {
                        again = progress = true;
                    }
                }
            }
        }
        if (!progress) {
            ptx::deadlock(s);
        }
    }
}

#if defined(TUTTI_RACES)
bool now(Moment* moment) {
    if (running == nullptr || running->cta.kernel == nullptr ||
        running->finished == running->cta.threads) {
        return false;
    }
    const uint32_t thread = thread_index.x;
    *moment = {running->number, thread, running->barriers,
               running->cta.warps[thread / ptx::LANES].barriers};
    return true;
}
#endif

void fail(const char* what) {
    fprintf(stderr, "%sblock (%u, %u, %u), thread %u: %s\n",
            peer_memory != nullptr ? peer_memory->where() : "", block_index.x, block_index.y,
            block_index.z, thread_index.x, what);
    _exit(3);
}

void run_grid(const Settings& settings, const std::function<void()>& kernel) {
    if (settings.threads == 0 || settings.threads > 1024 || settings.threads % 32 != 0) {
        fail("threads per block must be a multiple of 32 from 32 to 1024");
    }
    static thread_local Block block;
    const uint32_t* grid = settings.grid;
    // Warps, and the lanes of each: in order, from the last one on, shuffled.
    std::mt19937 random(settings.seed);
    std::vector<uint32_t> order(settings.threads);
    std::iota(order.begin(), order.end(), 0u);
    std::vector<uint32_t> warps(settings.threads / 32);
    std::iota(warps.begin(), warps.end(), 0u);
    std::vector<uint64_t> blocks(uint64_t{1} * grid[0] * grid[1] * grid[2]);
    std::iota(blocks.begin(), blocks.end(), uint64_t{0});
    if (settings.seed == 1) {
        std::reverse(order.begin(), order.end());
        std::reverse(blocks.begin(), blocks.end());
    } else if (settings.seed > 1) {
        std::shuffle(blocks.begin(), blocks.end(), random);
    }
    ptx::forget_accesses();
    bool some_wait = false;
    for (const uint64_t number : blocks) {
        if (settings.seed > 1) {
            std::shuffle(warps.begin(), warps.end(), random);
            for (size_t warp = 0; warp < warps.size(); warp++) {
                const auto lanes = order.begin() + static_cast<std::ptrdiff_t>(32 * warp);
                std::iota(lanes, lanes + 32, 32 * warps[warp]);
                std::shuffle(lanes, lanes + 32, random);
            }
        }
        if (may_write) {
            may_write(false);
        }
        const dim3 index = {static_cast<uint32_t>(number % grid[0]),
                            static_cast<uint32_t>(number / grid[0] % grid[1]),
                            static_cast<uint32_t>(number / grid[0] / grid[1])};
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
