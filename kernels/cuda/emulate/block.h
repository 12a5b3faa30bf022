// Running one block: what `block.cpp` offers to `main.cpp`.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>

namespace emulate {

struct Settings {
    uint32_t grid[3];
    uint32_t threads;
    size_t shared_bytes;
    // Chooses the order of threads and blocks, whether warps run at one pace (0) or far ahead of
    // each other, and when background copies arrive: as late as they may (even), or at once (odd).
    uint32_t seed;
};

// Memory that ends (or, with `at_start`, begins) at a page that faults; a multiple of 16 bytes.
void* guarded(size_t bytes, bool at_start);

// Runs `kernel` for every thread of every block.
void run_grid(const Settings& settings, const std::function<void()>& kernel);

}  // namespace emulate
