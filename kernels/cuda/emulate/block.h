// Running one block: what `block.cpp` offers to `main.cpp`.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "../kernels.h"
#include "device.h"

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

// Lets what `guarded` gave be written, or not.
void protect(void* memory, size_t bytes, bool at_start, bool may_be_written);

// A block whose threads are fibers of the host's thread that calls it.
class Block {
   public:
    struct State;
    Block();
    ~Block();

    // All its threads are to run `kernel`, which must live until they have. Needs what
    // `Settings::threads` may be; the grid's number of blocks is of no interest.
    void begin(const Settings& settings, dim3 index, const std::function<void()>& kernel);
    bool is_done() const;
    // Whether its threads had waited for the kernels before when they ended: all of them or none.
    bool has_waited() const;
    // Runs all threads to their end.
    void run(const std::vector<uint32_t>& order, bool in_turn);
    // Runs the first thread from `first` on that can run, until it meets others or touches what
    // ranks share. False when none can.
    bool run_one(uint32_t first);

   private:
    void enter();
    std::unique_ptr<State> state;
};

// Memory that ranks share; a test decides which rank sees what, and when. While there is one, a thread
// lets others run before each access. Calls come from the thread that `thread_index` names.
class PeerMemory {
   public:
    virtual ~PeerMemory() = default;
    virtual void push(void* to, const void* from) = 0;
    virtual void take(void* to, const void* from) = 0;
    virtual void store_release(uint64_t* at, uint64_t value) = 0;
    virtual uint64_t load_acquire(const uint64_t* at) = 0;
    virtual uint64_t nanoseconds() = 0;
    // What is going on, for messages.
    virtual const char* where() = 0;
    // All threads of a block are at a barrier.
    virtual void met() = 0;
};
// The one of this process, or null: memory is the host's.
extern PeerMemory* peer_memory;

// Where it is set: is told before each block that nothing may be written, and that it may when the first
// thread of the block has waited for the kernels before.
extern std::function<void(bool)> may_write;

// Runs `kernel` for every thread of every block, one block after the other.
void run_grid(const Settings& settings, const std::function<void()>& kernel);

}  // namespace emulate
