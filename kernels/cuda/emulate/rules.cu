// Kernels that break a rule, and others that look alike and do not: `tests/kernels` holds the
// emulation against them. For two warps and a buffer of 64 words.
#include "rules.h"

#include "../device.cuh"

// How kernels may wait for those before them, and how not.

void one_block_waits(uint32_t*) {
    if (blockIdx.x == 0) {
        tutti::wait_for_predecessors();
    }
}
void no_block_waits(uint32_t*) {}
void half_of_a_block_waits(uint32_t*) {
    if (threadIdx.x < blockDim.x / 2) {
        tutti::wait_for_predecessors();
    }
}
void a_block_writes_that_does_not_wait(uint32_t* words) {
    if (blockIdx.x == 0) {
        tutti::wait_for_predecessors();
    } else {
        *words = blockIdx.x;
    }
}
void it_writes_before_it_waits(uint32_t* words) {
    *words = 1;
    tutti::wait_for_predecessors();
}

// What orders accesses to the same memory, and what does not.

namespace {

constexpr uint32_t COUNT = 64;

// Each thread writes a word of shared memory, then `meet`s others, and reads the word `apart` on.
template <class Meet>
void read_another(uint32_t* words, uint32_t apart, const Meet& meet) {
    tutti::wait_for_predecessors();
    SHARED_ARRAY(uint32_t, shared, COUNT);
    shared[threadIdx.x] = threadIdx.x;
    meet();
    const uint32_t found = shared[(threadIdx.x + apart) % COUNT];
    if (blockIdx.x == 0) {
        words[threadIdx.x] = found;
    }
}

}  // namespace

void threads_read_what_others_wrote_behind_a_barrier(uint32_t* words) {
    read_another(words, 33, [] { __syncthreads(); });
}
void threads_read_what_others_wrote(uint32_t* words) {
    read_another(words, 33, [] {});
}
void threads_overwrite_what_others_read(uint32_t* words) {
    tutti::wait_for_predecessors();
    SHARED_ARRAY(uint32_t, shared, COUNT);
    shared[threadIdx.x] = threadIdx.x;
    __syncthreads();
    const uint32_t found = shared[COUNT - 1 - threadIdx.x];
    shared[threadIdx.x] = 2 * found;
    __syncthreads();
    if (blockIdx.x == 0) {
        words[threadIdx.x] = shared[threadIdx.x];
    }
}
void lanes_read_what_others_wrote_behind_a_warp_barrier(uint32_t* words) {
    // Of the same warp.
    tutti::wait_for_predecessors();
    SHARED_ARRAY(uint32_t, shared, COUNT);
    shared[threadIdx.x] = threadIdx.x;
    __syncwarp();
    const uint32_t found = shared[threadIdx.x ^ 1];
    if (blockIdx.x == 0) {
        words[threadIdx.x] = found;
    }
}
void lanes_read_what_others_wrote_behind_a_shuffle(uint32_t* words) {
    tutti::wait_for_predecessors();
    SHARED_ARRAY(uint32_t, shared, COUNT);
    shared[threadIdx.x] = threadIdx.x;
    const uint32_t other = __shfl_xor_sync(tutti::ALL_LANES, threadIdx.x, 1);
    const uint32_t found = shared[other];
    if (blockIdx.x == 0) {
        words[threadIdx.x] = found;
    }
}
void warps_read_what_others_wrote_behind_a_warp_barrier(uint32_t* words) {
    read_another(words, 33, [] { __syncwarp(); });
}
void threads_add_atomically(uint32_t* words) {
    tutti::wait_for_predecessors();
    SHARED_ARRAY(uint32_t, shared, 1);
    if (threadIdx.x == 0) {
        shared[0] = 0;
    }
    __syncthreads();
    atomicAdd(&shared[0], 1u);
    __syncthreads();
    atomicAdd(&words[0], shared[0]);
}
void a_thread_reads_what_others_add_atomically(uint32_t* words) {
    tutti::wait_for_predecessors();
    SHARED_ARRAY(uint32_t, shared, 1);
    if (threadIdx.x == 0) {
        shared[0] = 0;
    }
    __syncthreads();
    atomicAdd(&shared[0], 1u);
    if (threadIdx.x == 7 && blockIdx.x == 0) {
        words[0] = shared[0];
    }
}
void a_copy_arrives_while_others_read(uint32_t* words) {
    tutti::wait_for_predecessors();
    SHARED_ARRAY(uint32_t, shared, 4);
    if (threadIdx.x == 0) {
        tutti::copy_async(shared, words, true);
        tutti::commit_copies();
        tutti::wait_copies<0>();
    }
    // Its own copies are there for thread 0, not for others.
    const uint32_t found = shared[threadIdx.x % 4];
    if (found == 12345) {
        words[threadIdx.x] = found;
    }
}
void blocks_write_what_others_read(uint32_t* words) {
    tutti::wait_for_predecessors();
    if (blockIdx.x == 1) {
        words[threadIdx.x] = words[threadIdx.x] + 1;
    } else if (words[threadIdx.x] == 12345) {
        words[threadIdx.x] = 0;
    }
}
void blocks_write_words_of_their_own(uint32_t* words) {
    tutti::wait_for_predecessors();
    if (threadIdx.x < 16) {
        words[16 * blockIdx.x + threadIdx.x] += 1;
    }
}
