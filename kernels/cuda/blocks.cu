// Copies whole blocks of the KV cache to a staging area, and back.
//
// Shapes and launch rules: kernels.h. 16 bytes per load and store.
#include "device.cuh"

namespace tutti {
namespace {

__device__ __forceinline__ void copy_block(const tutti_bf16* from, tutti_bf16* to,
                                           uint32_t elements) {
    for (uint32_t at = threadIdx.x * 8; at < elements; at += 256 * 8) {
        *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(from + at);
    }
}

}  // namespace
}  // namespace tutti

using namespace tutti;

extern "C" __global__ void __launch_bounds__(256)
    tutti_blocks_out(const tutti_bf16* cache, const uint32_t* blocks, tutti_bf16* staging,
                     uint64_t plane_stride, uint32_t block_elements, const uint32_t* live) {
    release_successors();
    wait_for_predecessors();
    if (!is_live(live, blockIdx.x)) {
        return;
    }
    const uint64_t slot = static_cast<uint64_t>(blockIdx.x) * gridDim.y + blockIdx.y;
    const uint64_t block = blocks[blockIdx.x];
    copy_block(cache + blockIdx.y * plane_stride + block * block_elements,
               staging + slot * block_elements, block_elements);
}

extern "C" __global__ void __launch_bounds__(256)
    tutti_blocks_in(tutti_bf16* cache, const uint32_t* blocks, const tutti_bf16* staging,
                    uint64_t plane_stride, uint32_t block_elements, const uint32_t* live) {
    release_successors();
    wait_for_predecessors();
    if (!is_live(live, blockIdx.x)) {
        return;
    }
    const uint64_t slot = static_cast<uint64_t>(blockIdx.x) * gridDim.y + blockIdx.y;
    const uint64_t block = blocks[blockIdx.x];
    copy_block(staging + slot * block_elements,
               cache + blockIdx.y * plane_stride + block * block_elements, block_elements);
}
