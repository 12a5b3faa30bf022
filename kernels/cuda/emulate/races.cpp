// Which accesses nothing orders. See races.h.
//
// Of every two bytes (of every single one where kernels write those): who wrote them last, and who
// has read them since. Two accesses by different threads, one of them a write, are ordered by a
// barrier of the block between them, within a warp also by __syncwarp; not by shuffles and the like,
// which promise nothing of memory, and between blocks of a grid by nothing. Atomic operations are not
// in each other's way.
#include "races.h"

#if defined(TUTTI_RACES)

#include <algorithm>
#include <cstdio>
#include <memory>
#include <utility>
#include <vector>

#include "../kernels.h"
#include "device.h"

namespace emulate {
namespace {

#if defined(TUTTI_PTX)
#define WHERE "(lines of the PTX, in hexadecimal: %p 0x%x)"
#else
#define WHERE "(addr2line: %p 0x%x)"
#endif

// Several threads, several blocks, several warps.
constexpr uint32_t MANY = 0xffffffffu;
constexpr uint16_t MANY_WARPS = 0xffff;
// Bytes that have one mark together, until a single one is accessed: of FP8.
constexpr size_t CELL = 2;

// Small: there are many.
struct Mark {
    // Of the first block 1, so that 0 is nobody.
    uint32_t block = 0;
    uint32_t thread = 0;
    uint32_t barriers = 0;
    uint32_t warp_barriers = 0;
    // Code lies below 4 GiB: the program is linked to a fixed address.
    uint32_t from = 0;
    uint16_t warp = 0;
    bool atomic = false;
};

struct Cell {
    Mark written;
    Mark read;
};

struct Region {
    uintptr_t begin;
    uintptr_t end;
    bool is_shared;
    size_t cell;
    std::unique_ptr<Cell[]> cells;

    size_t count() const { return (end - begin + cell - 1) / cell; }
    // From now on each byte has its own mark.
    void split() {
        auto single = std::make_unique<Cell[]>(end - begin);
        for (size_t at = 0; at < end - begin; at++) {
            single[at] = cells[at / cell];
        }
        cells = std::move(single);
        cell = 1;
    }
};

// Few, and most accesses are to the one of the last.
std::vector<Region>& regions() {
    static thread_local std::vector<Region> all;
    return all;
}
thread_local size_t last_region = 0;
thread_local uint32_t atomics = 0;

Region* region_of(uintptr_t at) {
    auto& all = regions();
    if (last_region < all.size() && at - all[last_region].begin <
                                        all[last_region].end - all[last_region].begin) {
        return &all[last_region];
    }
    for (size_t i = 0; i < all.size(); i++) {
        if (at >= all[i].begin && at < all[i].end) {
            last_region = i;
            return &all[i];
        }
    }
    return nullptr;
}

// Whether what is marked came before this moment for certain, or is this thread's own.
bool is_before(const Mark& mark, const Moment& moment, bool is_shared) {
    if (mark.block == 0 || (is_shared && mark.block != moment.block)) {
        return true;
    }
    if (mark.block != moment.block) {
        return false;
    }
    if (mark.barriers < moment.barriers || mark.thread == moment.thread) {
        return true;
    }
    return mark.warp == moment.thread / 32 && mark.warp_barriers < moment.warp_barriers;
}

Mark mark_of(const Moment& moment, const void* from, bool atomic) {
    return {moment.block,
            moment.thread,
            moment.barriers,
            moment.warp_barriers,
            static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from)),
            static_cast<uint16_t>(moment.thread / 32),
            atomic};
}

// Adds this moment to marks that it does not come after.
void join(Mark& mark, const Moment& moment, const void* from, bool atomic) {
    const Mark own = mark_of(moment, from, atomic);
    if (mark.block == MANY) {
        return;
    }
    if (mark.block != moment.block) {
        mark.block = MANY;
        return;
    }
    if (mark.thread == moment.thread) {
        mark = own;
        return;
    }
    mark.warp = mark.warp == own.warp ? own.warp : MANY_WARPS;
    mark.thread = MANY;
    mark.warp_barriers = own.warp_barriers;
    mark.from = own.from;
}

[[noreturn]] void report(const Region& region, uintptr_t at, const char* what, const Mark& mark,
                         const char* did, const void* from) {
    char who[64] = "other threads";
    if (mark.block == MANY) {
        snprintf(who, sizeof who, "other blocks");
    } else if (mark.thread != MANY) {
        snprintf(who, sizeof who, "thread %u", mark.thread);
    }
    char text[320];
    snprintf(text, sizeof text,
             "a race: %s byte %zu of %s memory of %zu bytes that %s %s, and nothing orders the two " WHERE,
             what, static_cast<size_t>(at - region.begin), region.is_shared ? "shared" : "global",
             static_cast<size_t>(region.end - region.begin), who, did, from, mark.from);
    fail(text);
}

void touch_cell(Region& region, uintptr_t at, Access access, const Moment& moment,
                const void* from) {
    Cell& cell = region.cells[(at - region.begin) / region.cell];
    const bool atomic = access == Access::atomic;
    const bool follows_write = is_before(cell.written, moment, region.is_shared);
    if (!follows_write && !(atomic && cell.written.atomic)) {
        report(region, at, access == Access::read ? "reads" : "writes", cell.written, "wrote",
               from);
    }
    const bool follows_reads = is_before(cell.read, moment, region.is_shared);
    if (access == Access::read) {
        // A later write has to come after all readers: what is ordered before the newest is dropped, but
        // not what other blocks have read.
        if (follows_reads && (cell.read.block == moment.block || region.is_shared ||
                              cell.read.block == 0)) {
            cell.read = mark_of(moment, from, false);
        } else {
            join(cell.read, moment, from, false);
        }
        return;
    }
    if (!follows_reads) {
        report(region, at, "writes", cell.read, "read", from);
    }
    if (follows_write) {
        cell.written = mark_of(moment, from, atomic);
    } else {
        join(cell.written, moment, from, atomic);
    }
}

}  // namespace

void watch(const void* memory, size_t bytes, bool is_shared) {
    const auto begin = reinterpret_cast<uintptr_t>(memory);
    auto& all = regions();
    const auto overlaps = [&](const Region& region) {
        return region.begin < begin + bytes && begin < region.end;
    };
    all.erase(std::remove_if(all.begin(), all.end(), overlaps), all.end());
    if (bytes > 0) {
        Region region{begin, begin + bytes, is_shared, CELL, nullptr};
        region.cells = std::make_unique<Cell[]>(region.count());
        all.push_back(std::move(region));
    }
}

void touch(const void* at, size_t bytes, Access access, const void* from) {
    Moment moment;
    if (!now(&moment)) {
        return;
    }
    const auto first = reinterpret_cast<uintptr_t>(at);
    Region* region = region_of(first);
    if (region == nullptr) {
        return;
    }
    const Access kind = atomics > 0 ? Access::atomic : access;
    if (bytes == 1 && region->cell > 1) {
        region->split();
    }
    const uintptr_t end = std::min(first + bytes, region->end);
    for (uintptr_t cell = first; cell < end; cell += region->cell) {
        touch_cell(*region, cell, kind, moment, from);
    }
}

Atomically::Atomically() { atomics++; }
Atomically::~Atomically() { atomics--; }

}  // namespace emulate

// What the compiler calls before each access.
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define ACCESSES(bytes)                                                                            \
    void __tsan_read##bytes(void* at) {                                                            \
        emulate::touch(at, bytes, emulate::Access::read, __builtin_return_address(0));             \
    }                                                                                              \
    void __tsan_write##bytes(void* at) {                                                           \
        emulate::touch(at, bytes, emulate::Access::write, __builtin_return_address(0));            \
    }                                                                                              \
    void __tsan_unaligned_read##bytes(void* at) {                                                  \
        emulate::touch(at, bytes, emulate::Access::read, __builtin_return_address(0));             \
    }                                                                                              \
    void __tsan_unaligned_write##bytes(void* at) {                                                 \
        emulate::touch(at, bytes, emulate::Access::write, __builtin_return_address(0));            \
    }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void* at, unsigned long bytes) {
    emulate::touch(at, bytes, emulate::Access::read, __builtin_return_address(0));
}
void __tsan_write_range(void* at, unsigned long bytes) {
    emulate::touch(at, bytes, emulate::Access::write, __builtin_return_address(0));
}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
}

#endif
