// Memory between pages that fault: `guarded` and `protect` are in block.h.
#pragma once
#include <cstddef>

namespace emulate {

// Frees memory from `guarded(bytes, false)`, or null.
void release_guarded(void* memory, size_t bytes);

}  // namespace emulate
