// Accesses of one block's threads, or of several blocks, to the same memory that nothing orders: on
// a GPU either may come first, whatever order the emulation has run them in.
//
// Compiled with TUTTI_RACES, and with kernels whose loads and stores the compiler reports
// (-fsanitize=thread without its library: `races.cpp` is what it calls). Otherwise all of this is
// nothing.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emulate {

enum class Access { read, write, atomic };

// What orders accesses: which thread of which block it is, and how many barriers of the block, and
// of the warp, it has passed.
struct Moment {
    uint32_t block;
    uint32_t thread;
    uint32_t barriers;
    uint32_t warp_barriers;
};

#if defined(TUTTI_RACES)

// From now on accesses to this memory count. What is shared by a block is another block's anew.
void watch(const void* memory, size_t bytes, bool is_shared);
// An access by the thread that runs, from the code at `from`.
void touch(const void* at, size_t bytes, Access access, const void* from);
inline void touch(const void* at, size_t bytes, Access access) {
    touch(at, bytes, access, __builtin_return_address(0));
}
// While there is one, the accesses of the thread that runs are one atomic operation.
class Atomically {
   public:
    Atomically();
    ~Atomically();
};
// Where the thread is that runs; `block.cpp` knows. False between threads.
bool now(Moment* moment);

#else

inline void watch(const void*, size_t, bool) {}
inline void touch(const void*, size_t, Access) {}
inline void touch(const void*, size_t, Access, const void*) {}
class Atomically {
   public:
    Atomically() {}
    ~Atomically() {}
};

#endif

}  // namespace emulate
