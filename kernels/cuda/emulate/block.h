// Runs emulated blocks: the interface of `block.cpp` for `main.cpp` and `ranks.cpp`.
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
    // Chooses the order of threads and blocks, whether warps run in step (0) or far ahead of each
    // other, and when asynchronous copies arrive: as late as allowed (even), or at once (odd).
    uint32_t seed;
};

// Allocates memory that ends (or, with `at_start`, begins) at a page that faults. Its size is
// rounded up to a multiple of 16 bytes.
void* guarded(size_t bytes, bool at_start);

// Makes memory from `guarded` writable or read-only.
void protect(void* memory, size_t bytes, bool at_start, bool may_be_written);

// A block whose threads are fibers of the calling host thread.
class Block {
   public:
    struct State;
    Block();
    ~Block();

    // Prepares all its threads to run `kernel`, which must outlive them. `Settings::threads` must
    // be valid; the number of blocks in the grid does not matter.
    void begin(const Settings& settings, dim3 index, const std::function<void()>& kernel);
    bool is_done() const;
    // Whether its threads, all or none, had waited for the preceding kernels when they ended.
    bool has_waited() const;
    // Runs all threads to completion.
    void run(const std::vector<uint32_t>& order, bool in_turn);
    // Runs the first runnable thread from `first` on, until it meets others or is about to access
    // memory that ranks share. False when no thread is runnable.
    bool run_one(uint32_t first);

   private:
    void enter();
    std::unique_ptr<State> state;
};

// Memory that ranks share. A test implements it, to decide which rank sees what, and when. While
// one is set, a thread lets others run before each access. `thread_index` is the calling thread.
class PeerMemory {
   public:
    virtual ~PeerMemory() = default;
    // Whether ranks exchange what is there: in PTX a push is an ordinary store of 16 bytes, and a take
    // a load.
    virtual bool is_exchanged(const void* at) = 0;
    virtual void push(void* to, const void* from) = 0;
    virtual void take(void* to, const void* from) = 0;
    virtual void store_release(uint64_t* at, uint64_t value) = 0;
    virtual uint64_t load_acquire(const uint64_t* at) = 0;
    virtual uint64_t nanoseconds() = 0;
    // The current state, for messages.
    virtual const char* where() = 0;
    // Called when all threads of a block are at a barrier.
    virtual void met() = 0;
    // Called when a thread lets the next kernel begin.
    virtual void released() = 0;
};
// The one of this process. Null: accesses go to the host's own memory.
extern PeerMemory* peer_memory;

// If set, it is called with false before each block, and with true when the first thread of the
// block has waited for the preceding kernels: only from then on may the block write.
extern std::function<void(bool)> may_write;

// The seed of the schedule that takes the least time.
extern const uint32_t QUICKEST_SEED;

// Runs `kernel` for every thread of every block, one block at a time.
void run_grid(const Settings& settings, const std::function<void()>& kernel);

}  // namespace emulate
