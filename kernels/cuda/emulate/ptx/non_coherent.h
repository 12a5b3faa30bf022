// What a kernel reads on the non-coherent path (ld.global.nc) must not change while it runs.
#pragma once
#include "machine.h"

namespace emulate::ptx {

// A grid begins.
void forget_accesses();
// Ends the process if the grid has written any of it, or, the other way round, has read it that
// way.
void never_written(Warp& w, const Instruction& i, uint32_t lane, const void* at, uint32_t bytes);
void is_written(Warp& w, const Instruction& i, uint32_t lane, const void* at, uint32_t bytes);

}  // namespace emulate::ptx
