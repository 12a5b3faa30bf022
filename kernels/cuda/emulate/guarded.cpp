// See guarded.h.
#include "guarded.h"

#include <sys/mman.h>
#include <unistd.h>

#include "block.h"

namespace emulate {

void* guarded(size_t bytes, bool at_start) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t size = (bytes + page - 1) / page * page;
    auto* base = static_cast<unsigned char*>(mmap(nullptr, size + 2 * page, PROT_NONE,
                                                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base == MAP_FAILED || mprotect(base + page, size, PROT_READ | PROT_WRITE) != 0) {
        if (size != 0) {
            fail("out of memory");
        }
    }
    const size_t rounded = (bytes + 15) / 16 * 16;
    return at_start ? base + page : base + page + size - rounded;
}

void protect(void* memory, size_t bytes, bool at_start, bool may_be_written) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t size = (bytes + page - 1) / page * page;
    const size_t rounded = (bytes + 15) / 16 * 16;
    unsigned char* first = static_cast<unsigned char*>(memory) - (at_start ? 0 : size - rounded);
    if (size != 0 && mprotect(first, size, PROT_READ | (may_be_written ? PROT_WRITE : 0)) != 0) {
        fail("memory cannot be protected");
    }
}

void release_guarded(void* memory, size_t bytes) {
    if (memory == nullptr) {
        return;
    }
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t size = (bytes + page - 1) / page * page;
    const size_t rounded = (bytes + 15) / 16 * 16;
    munmap(static_cast<unsigned char*>(memory) + rounded - size - page, size + 2 * page);
}

}  // namespace emulate
