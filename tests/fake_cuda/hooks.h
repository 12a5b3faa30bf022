// What a stand-in for another of NVIDIA's libraries needs of the stand-in for the driver.
#pragma once
#include <cstddef>
#include <functional>

namespace fake_cuda {

// Work under way: says whether it is done. Must not wait, nor call the driver.
using Run = std::function<bool()>;
// Begins work that may have to wait for others; called each time its turn comes.
using Later = std::function<Run()>;

// Puts work on a stream, or into the graph that is being captured from it; says which.
bool enqueue(void* stream, Later later);
// Whether a graph is being captured from a stream.
bool captures(void* stream);
// Whether the calling thread has a context.
bool is_ready();
// Whether the device may touch these bytes.
bool is_memory(const void* at, size_t bytes);

}  // namespace fake_cuda
