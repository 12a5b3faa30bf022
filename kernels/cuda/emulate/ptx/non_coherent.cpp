// See non_coherent.h.
#include "non_coherent.h"

namespace emulate::ptx {
namespace {

// What was read and what was written, a bit for each 4 bytes of a line of 64.
struct Line {
    uintptr_t number = 0;
    uint32_t grid = 0;
    uint16_t read = 0;
    uint16_t written = 0;
};

// Open addressing; a line of another grid is a free one.
struct Lines {
    std::vector<Line> slots = std::vector<Line>(1 << 10);
    uint32_t grid = 1;
    size_t count = 0;

    Line& of(uintptr_t number) {
        for (size_t at = number * 0x9e3779b97f4a7c15u >> 32;; at++) {
            Line& slot = slots[at & (slots.size() - 1)];
            if (slot.grid == grid && slot.number == number) {
                return slot;
            }
            if (slot.grid != grid) {
                if (2 * ++count > slots.size()) {
                    grow();
                    return of(number);
                }
                slot = {number, grid, 0, 0};
                return slot;
            }
        }
    }
    void grow() {
        std::vector<Line> old(slots.size() * 4);
        old.swap(slots);
        count = 0;
        for (const Line& line : old) {
            if (line.grid == grid) {
                of(line.number) = line;
            }
        }
    }
};
thread_local Lines lines;

// Of an aligned access, which is within a line.
uint16_t bits_in_line(uintptr_t at, uint32_t bytes) {
    const uint32_t words = (bytes + 3) / 4;
    return static_cast<uint16_t>(((1u << words) - 1) << (at % 64 / 4));
}

}  // namespace

void forget_accesses() {
    lines.grid++;
    lines.count = 0;
}

void never_written(Warp& w, const Instruction& i, uint32_t lane, const void* at, uint32_t bytes) {
    const auto address = reinterpret_cast<uintptr_t>(at);
    Line& line = lines.of(address / 64);
    const uint16_t bits = bits_in_line(address, bytes);
    line.read |= bits;
    if ((line.written & bits) != 0) {
        fail_at(w, i, lane, "reads on the non-coherent path what the same kernel writes");
    }
}

void is_written(Warp& w, const Instruction& i, uint32_t lane, const void* at, uint32_t bytes) {
    const auto address = reinterpret_cast<uintptr_t>(at);
    Line& line = lines.of(address / 64);
    const uint16_t bits = bits_in_line(address, bytes);
    line.written |= bits;
    if ((line.read & bits) != 0) {
        fail_at(w, i, lane, "writes what the same kernel reads on the non-coherent path");
    }
}

}  // namespace emulate::ptx
