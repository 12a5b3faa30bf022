// The interface of the driver's stand-in for stand-ins of other NVIDIA libraries.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>

namespace fake_cuda {

// Polls work in progress: returns whether it is done. It must neither wait nor call the driver.
using Run = std::function<bool()>;
// Begins work that may have to wait for others; called each time its turn comes.
using Later = std::function<Run()>;

// Puts work on a stream, or into the graph that is being captured from it: then it returns true.
bool enqueue(void* stream, Later later);
// Whether a graph is being captured from a stream.
bool captures(void* stream);
// Whether the calling thread has a context.
bool is_ready();
// How often the context of the calling thread has come to its end, with all that was made in it.
uint64_t resets();
// Whether the device can access these bytes.
bool is_memory(const void* at, size_t bytes);

}  // namespace fake_cuda
