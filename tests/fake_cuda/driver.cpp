// A stand-in for NVIDIA's driver and cuBLASLt: one or more GPUs, whose memory is host memory and
// whose kernels are this project's own, emulated. It implements only what Tutti calls.
//
// It is as strict as the real ones can be: work on a stream runs as late as possible, new memory is
// NaN, every allocation ends at a page that faults, freed pinned memory faults at once, and during
// the capture of a stream no call that could wait is allowed, nor an algorithm of cuBLASLt that has
// not run before. The work of a stream runs on the thread that waits for it, without any
// lock: kernels of several ranks, on threads or in processes, wait for each other.
//
// Environment:
// - FAKE_CUDA_DEVICES: number of GPUs; default 1, or as `fake_cuda_of` says
// - FAKE_CUDA_MEMORY: bytes of each GPU; default 4 GiB
// - FAKE_CUDA_VERSION: the driver's version; default 13000
// - FAKE_CUDA_CAPABILITY: compute capability times ten; default 90
// - FAKE_CUDA_MULTIPROCESSORS: default 132
// - FAKE_CUDA_SHARED_MEMORY: bytes that a block may ask for; default 227 KiB
// - FAKE_CUDA_MPS: 1 when other processes' kernels may run beside this one's; default 0
// - FAKE_CUDA_DEAF: 1 when what is written to another process's memory does not arrive there
// - FAKE_CUDA_PEER_ACCESS: 0 when no GPU reaches another's memory; default 1
// - FAKE_CUDA_FAIL: `function:n=code,...`: the n-th call of a function gives this status. Codes of
//   faults of the hardware or of kernels break the context: every later call gives it too. -1: it never returns; -2: it ends the
//   process. `captured_cuLaunchKernel` counts only launches that are captured.
// - FAKE_CUDA_SLOW: `kernel:n=milliseconds,...`: the n-th launch of a kernel in this process takes so
//   long, and FAKE_CUDA_ONCE is for it as well
// - FAKE_CUDA_CAPTURED_OVERLAP: 0 when kernels that may begin early cannot be captured; default 1
// - FAKE_CUDA_HASTY: 1 when kernels that may begin early do not wait for `tutti_late`
// - FAKE_CUDA_ALGORITHMS: how many algorithms cuBLASLt offers for a product; default 1
// - FAKE_CUDA_EXIT_WAITS: 1 when the process's exit handlers wait, for ever, for a GPU that failed or
//   whose context was not given back
// - FAKE_CUDA_ONCE: a file that marks that FAKE_CUDA_FAIL took effect: only once in all processes
// - FAKE_CUDA_LOG: a file to which launches, graphs, copies and allocations are appended.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels.h"

#include "hooks.h"

#include "emulate/block.h"
#include "emulate/device.h"

// A unit by itself, so that this one is compiled once for all numbers.
extern const unsigned default_devices;

namespace {

// Work on a stream. `now` completes when it runs; `later` may have to wait for others: it is begun,
// then polled until it is done.
struct Work {
    std::function<void()> now;
    fake_cuda::Later later;
};
struct Item {
    Work work;
    fake_cuda::Run run;
};
constexpr int SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100,
              INVALID_DEVICE = 101, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500,
              NOT_READY = 600, OUT_OF_RESOURCES = 701,
              CONTEXT_IS_DESTROYED = 709, LAUNCH_FAILED = 719, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901,
              CAPTURED_EVENT = 907, CAPTURE_WRONG_THREAD = 908;

// Faults after which a context gives nothing else: of memory and links, and of kernels.
bool is_sticky(int code) {
    return code == 214 || code == 220 || code == 226 || (code >= 700 && code < 800 && code != 701) || code == 999;
}

std::recursive_mutex driver_lock;
#define LOCKED std::lock_guard<std::recursive_mutex> guard(driver_lock)

// Releases the lock, so that other threads can call the driver while work runs.
struct Unlocked {
    Unlocked() { driver_lock.unlock(); }
    ~Unlocked() { driver_lock.lock(); }
};

struct Kernel {
    const char* name;
    std::vector<size_t> sizes;
    std::function<void(const std::vector<uint64_t>&)> call;
    // The compiled kernel's most threads per block, registers per thread and static shared memory.
    unsigned threads, registers, shared;
};

template <class T>
T argument(uint64_t raw) {
    T value;
    memcpy(&value, &raw, sizeof value);
    return value;
}
template <class... A, size_t... I>
void call(void (*kernel)(A...), const std::vector<uint64_t>& raw, std::index_sequence<I...>) {
    kernel(argument<A>(raw[I])...);
}
template <class... A>
Kernel entry(const char* name, void (*kernel)(A...), unsigned threads, unsigned registers,
             unsigned shared) {
    return {name, {sizeof(A)...}, [kernel](const std::vector<uint64_t>& raw) {
                call(kernel, raw, std::index_sequence_for<A...>{});
            }, threads, registers, shared};
}
#define ENTRY(name, ...) entry(#name, name, __VA_ARGS__)
const std::vector<Kernel>& kernels() {
    static const std::vector<Kernel> all = {
#include "entries.inc"
    };
    return all;
}

// A GPU and its primary context, which exists while it is retained.
struct Gpu {
    int retained = 0;
    uint64_t resets = 0;  // How often its context has come to its end.
    size_t used = 0;
};
Gpu gpus[64];
thread_local Gpu* current = nullptr;

struct Stream {
    Gpu* gpu = current;
    std::vector<Item> queue;
    std::thread::id owner = std::this_thread::get_id();
    bool captures = false;
    bool invalid = false;
    std::vector<Work> captured;
    float milliseconds = 0;  // Simulated time of its work, where the stand-in defines one.
};
struct Event {
    Gpu* gpu = current;
    bool timed = false;
    bool captured = false;  // Recorded within a capture: must not be queried.
    Stream* stream = nullptr;
    size_t mark = 0;  // Number of work items before it, from the stream's beginning.
    bool asked = false;
    float milliseconds = 0;
};
struct Graph {
    std::vector<Work> work;
    bool uploaded = false;  // Its memory on the GPU is there.
};

std::map<Stream*, size_t> done;  // Number of finished work items, per stream.
thread_local Stream* capturing = nullptr;
// Captured in the mode in which no thread may make calls that could wait.
Stream* capturing_for_all = nullptr;
bool initialised = false;
// A module, and its kernels as functions: what one module has loaded or been allowed says nothing of
// another's.
struct Module;
struct Function {
    const Kernel* kernel;
    const Module* module;
    bool loaded = false;  // On the GPU. Loading at first launch may wait for running work.
    unsigned dynamic_shared = 0;  // The limit, if it was raised.
};
struct Module {
    std::map<const Kernel*, Function> functions;
    bool unloaded = false;
};
int broken = SUCCESS;
struct Allocation {
    size_t bytes, mapped;
    Gpu* gpu;
    std::thread::id owner;
};
std::map<uint64_t, Allocation> allocations;  // By address.
std::map<uint64_t, size_t> pinned;
thread_local const char* running = "";
// Opened memory of other processes, by address. What is opened twice has one address, and is closed
// twice.
struct Opened {
    size_t mapped;
    int process, file, count;
};
std::map<uint64_t, Opened> opened;
// Algorithms of cuBLASLt, by number and sizes, whose code is loaded.
std::set<std::vector<uint64_t>> loaded_algorithms;

uint64_t setting(const char* name, uint64_t otherwise) {
    const char* text = getenv(name);
    return text == nullptr ? otherwise : strtoull(text, nullptr, 10);
}
unsigned shared_memory() { return static_cast<unsigned>(setting("FAKE_CUDA_SHARED_MEMORY", 227 * 1024)); }

void log_line(const char* format, ...) {
    static FILE* file = [] {
        const char* path = getenv("FAKE_CUDA_LOG");
        return path == nullptr ? nullptr : fopen(path, "a");
    }();
    if (file == nullptr) {
        return;
    }
    va_list args;
    va_start(args, format);
    vfprintf(file, format, args);
    va_end(args);
    fputc('\n', file);
    fflush(file);
}

// Returns the injected status of this call of `function`, or that of a broken context.
int injected(const char* function) {
    static std::map<std::string, int> calls;
    const int count = ++calls[function];
    const char* text = getenv("FAKE_CUDA_FAIL");
    for (const char* at = text; at != nullptr && *at != 0;) {
        const char* colon = strchr(at, ':');
        const char* equals = strchr(at, '=');
        if (colon == nullptr || equals == nullptr) {
            break;
        }
        if (std::string(at, colon) == function && atoi(colon + 1) == count) {
            const int code = atoi(equals + 1);
            const char* once = getenv("FAKE_CUDA_ONCE");
            if (once != nullptr && open(once, O_CREAT | O_EXCL, 0600) < 0) {
                return broken;
            }
            if (code == -2) {
                abort();
            }
            while (code == -1) {
                pause();
            }
            if (is_sticky(code)) {
                broken = code;
            }
            return code;
        }
        at = strchr(equals, ',');
        at = at == nullptr ? nullptr : at + 1;
    }
    return broken;
}

#define ENTER(function)                                                                            \
    LOCKED;                                                                                        \
    if (const int code = injected(function)) {                                                     \
        return code;                                                                               \
    }
#define NEEDS_CONTEXT                                                                              \
    if (current == nullptr) {                                                                      \
        return INVALID_CONTEXT;                                                                    \
    }                                                                                              \
    if (current->retained == 0) {                                                                  \
        return CONTEXT_IS_DESTROYED;                                                               \
    }
// Calls on a stream or event need its GPU's context.
#define NEEDS_CONTEXT_OF(thing)                                                                    \
    NEEDS_CONTEXT                                                                                  \
    if ((thing)->gpu != current) {                                                                 \
        return INVALID_HANDLE;                                                                     \
    }
// Calls that may wait invalidate a capture on their thread.
#define NO_CAPTURE                                                                                 \
    for (Stream* captured : {capturing, capturing_for_all}) {                                      \
        if (captured != nullptr) {                                                                 \
            captured->invalid = true;                                                              \
            return CAPTURE_UNSUPPORTED;                                                            \
        }                                                                                          \
    }

void on_fault(int) {
    char text[256];
    const int length = snprintf(text, sizeof text, "fake driver: %s: reaches outside of its memory\n", running);
    if (write(2, text, static_cast<size_t>(length)) < 0) {
        _exit(5);
    }
    _exit(4);
}

void watch_faults() {
    static unsigned char stack[64 * 1024];
    stack_t signal_stack{};
    signal_stack.ss_sp = stack;
    signal_stack.ss_size = sizeof stack;
    sigaltstack(&signal_stack, nullptr);
    struct sigaction action {};
    action.sa_handler = on_fault;
    action.sa_flags = SA_ONSTACK;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
}

// Runs the queued work up to a mark; false when some of it waits for others.
bool flush(Stream* stream, size_t up_to) {
    auto& finished = done[stream];
    size_t count = 0;
    bool waits = false;
    while (count < stream->queue.size() && finished < up_to && !waits) {
        Item& item = stream->queue[count];
        if (item.work.now) {
            const Unlocked others;
            item.work.now();
        } else {
            if (!item.run) {
                item.run = item.work.later();
            }
            waits = !item.run();
        }
        count += waits ? 0 : 1;
        finished += waits ? 0 : 1;
    }
    stream->queue.erase(stream->queue.begin(), stream->queue.begin() + static_cast<long>(count));
    return !waits;
}
bool flush(Stream* stream) { return flush(stream, SIZE_MAX); }

// Flushes until all is done; other threads can use the driver meanwhile.
void drain(Stream* stream, size_t up_to) {
    while (done.count(stream) != 0 && !flush(stream, up_to)) {
        driver_lock.unlock();
        usleep(20);
        driver_lock.lock();
    }
}
void drain(Stream* stream) { drain(stream, SIZE_MAX); }

// Drains all streams of this rank (a thread or a process), as freeing memory does. The real driver
// also waits for other ranks' work on the same GPU; here that work could depend on this rank.
void drain_all() {
    std::vector<Stream*> own;
    for (auto& entry : done) {
        if (entry.first->owner == std::this_thread::get_id()) {
            own.push_back(entry.first);
        }
    }
    for (Stream* stream : own) {
        drain(stream);
    }
}

int enqueue_work(Stream* stream, Work work) {
    if (stream->captures) {
        stream->captured.push_back(std::move(work));
        return SUCCESS;
    }
    stream->queue.push_back(Item{std::move(work), nullptr});
    return SUCCESS;
}
int enqueue(Stream* stream, std::function<void()> now) {
    return enqueue_work(stream, Work{std::move(now), nullptr});
}

// Looks up this launch of a kernel in FAKE_CUDA_SLOW.
unsigned slowness(const char* kernel) {
    static std::map<std::string, int> launches;
    const char* text = getenv("FAKE_CUDA_SLOW");
    const int count = text == nullptr ? 0 : ++launches[kernel];
    for (const char* at = text; at != nullptr && *at != 0;) {
        const char* colon = strchr(at, ':');
        const char* equals = strchr(at, '=');
        if (colon == nullptr || equals == nullptr) {
            break;
        }
        if (std::string(at, colon) == kernel && atoi(colon + 1) == count) {
            const char* once = getenv("FAKE_CUDA_ONCE");
            const bool takes = once == nullptr || open(once, O_CREAT | O_EXCL, 0600) >= 0;
            return takes ? static_cast<unsigned>(atoi(equals + 1)) : 0;
        }
        at = strchr(equals, ',');
        at = at == nullptr ? nullptr : at + 1;
    }
    return 0;
}
fake_cuda::Run lasting(unsigned milliseconds) {
    log_line("slow %u", milliseconds);
    const auto ends = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
    return [=] { return std::chrono::steady_clock::now() >= ends; };
}

bool is_pinned(const void* at, size_t bytes = 1) {
    const auto address = reinterpret_cast<uint64_t>(at);
    auto found = pinned.upper_bound(address);
    return found != pinned.begin() && address + bytes <= (--found)->first + found->second;
}

// Whether the device can access these bytes.
bool is_device(uint64_t at, size_t bytes) {
    auto found = allocations.upper_bound(at);
    return found != allocations.begin() && at + bytes <= (--found)->first + found->second.bytes;
}

}  // namespace

namespace fake_cuda {
bool enqueue(void* stream, Later later) {
    LOCKED;
    auto* to = static_cast<Stream*>(stream);
    const bool captures = to->captures;
    enqueue_work(to, Work{nullptr, std::move(later)});
    return captures;
}
bool captures(void* stream) {
    LOCKED;
    return static_cast<Stream*>(stream)->captures;
}
uint64_t resets() {
    LOCKED;
    return current == nullptr ? 0 : current->resets;
}
bool is_ready() { return initialised && current != nullptr && current->retained > 0; }
bool is_memory(const void* at, size_t bytes) {
    LOCKED;
    return is_device(reinterpret_cast<uint64_t>(at), bytes);
}
}  // namespace fake_cuda

extern "C" {

int cuDriverGetVersion(int* version) {
    ENTER("cuDriverGetVersion");
    *version = static_cast<int>(setting("FAKE_CUDA_VERSION", 13000));
    return SUCCESS;
}
// Without the lock: a call that never returns may have it.
void wait_for_gpus() {
    log_line("exit handler");
    const auto is_held = [](const Gpu& gpu) { return gpu.retained > 0; };
    while (broken != SUCCESS || std::any_of(std::begin(gpus), std::end(gpus), is_held)) {
        pause();
    }
}
int cuInit(unsigned) {
    ENTER("cuInit");
    if (!std::exchange(initialised, true) && setting("FAKE_CUDA_EXIT_WAITS", 0) != 0) {
        atexit(wait_for_gpus);
    }
    return setting("FAKE_CUDA_DEVICES", default_devices) == 0 ? NO_DEVICE : SUCCESS;
}
int cuDeviceGetCount(int* count) {
    ENTER("cuDeviceGetCount");
    if (!initialised) {
        return NOT_INITIALIZED;
    }
    *count = static_cast<int>(setting("FAKE_CUDA_DEVICES", default_devices));
    return SUCCESS;
}
int cuDeviceGet(int* device, int ordinal) {
    ENTER("cuDeviceGet");
    if (ordinal < 0 || ordinal >= static_cast<int>(setting("FAKE_CUDA_DEVICES", default_devices))) {
        return INVALID_DEVICE;
    }
    *device = ordinal;
    return SUCCESS;
}
int cuDeviceGetName(char* name, int length, int device) {
    ENTER("cuDeviceGetName");
    snprintf(name, static_cast<size_t>(length), "Fake GPU %c", 'A' + device);
    return SUCCESS;
}
int cuDeviceGetPCIBusId(char* id, int length, int device) {
    ENTER("cuDeviceGetPCIBusId");
    snprintf(id, static_cast<size_t>(length), "0000:%02x:00.0", 0x17 + device);
    return SUCCESS;
}
int cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
    ENTER("cuDeviceGetUuid_v2");
    memset(uuid, 0xab, 16);
    uuid[15] = static_cast<unsigned char>(device);
    return SUCCESS;
}
int cuDeviceTotalMem_v2(size_t* bytes, int) {
    ENTER("cuDeviceTotalMem_v2");
    *bytes = setting("FAKE_CUDA_MEMORY", 4ull << 30);
    return SUCCESS;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
    ENTER("cuDeviceGetAttribute");
    const int capability = static_cast<int>(setting("FAKE_CUDA_CAPABILITY", 90));
    switch (attribute) {
        case 16: *value = static_cast<int>(setting("FAKE_CUDA_MULTIPROCESSORS", 132)); return SUCCESS;
        case 75: *value = capability / 10; return SUCCESS;
        case 76: *value = capability % 10; return SUCCESS;
        case 97: *value = static_cast<int>(shared_memory()); return SUCCESS;
        case 133: *value = static_cast<int>(setting("FAKE_CUDA_MPS", 0)); return SUCCESS;
        default: return INVALID_VALUE;
    }
}
int cuDevicePrimaryCtxRetain(Gpu** context, int device) {
    ENTER("cuDevicePrimaryCtxRetain");
    watch_faults();
    log_line("context %d", device);
    *context = &gpus[device];
    gpus[device].retained++;
    return SUCCESS;
}
int cuDevicePrimaryCtxRelease_v2(int device) {
    ENTER("cuDevicePrimaryCtxRelease_v2");
    if (gpus[device].retained == 0) {
        return INVALID_CONTEXT;
    }
    if (--gpus[device].retained == 0) {
        gpus[device].resets++;
        log_line("the context of %d is gone", device);
    }
    return SUCCESS;
}
int cuCtxSetCurrent(Gpu* context) {
    ENTER("cuCtxSetCurrent");
    if (context != nullptr && context->retained == 0) {
        return CONTEXT_IS_DESTROYED;
    }
    current = context;
    return SUCCESS;
}
int cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
    ENTER("cuMemGetInfo_v2");
    NEEDS_CONTEXT;
    *total = setting("FAKE_CUDA_MEMORY", 4ull << 30);
    // Counts only what this rank has, a thread or a process: tests of one process run side by side.
    size_t own = 0;
    for (const auto& entry : allocations) {
        if (entry.second.gpu == current && entry.second.owner == std::this_thread::get_id()) {
            own += entry.second.bytes;
        }
    }
    *free_bytes = *total - own;
    return SUCCESS;
}
int cuMemAlloc_v2(uint64_t* at, size_t bytes) {
    ENTER("cuMemAlloc_v2");
    NEEDS_CONTEXT;
    NO_CAPTURE;
    log_line("alloc %zu", bytes);
    if (bytes == 0) {
        return INVALID_VALUE;
    }
    if (current->used + bytes > setting("FAKE_CUDA_MEMORY", 4ull << 30)) {
        return OUT_OF_MEMORY;
    }
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t rounded = (bytes + 15) / 16 * 16;
    const size_t size = (rounded + page - 1) / page * page;
    auto* base = static_cast<unsigned char*>(
        mmap(nullptr, size + page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (base == MAP_FAILED || mprotect(base, size, PROT_READ | PROT_WRITE) != 0) {
        return OUT_OF_MEMORY;
    }
    // Large memory stays untouched, so that a test can have a large cache.
    if (size <= (64u << 20)) {
        memset(base, 0xff, size);
    }
    *at = reinterpret_cast<uint64_t>(base + size - rounded);
    allocations[*at] = {bytes, size + page, current, std::this_thread::get_id()};
    current->used += bytes;
    return SUCCESS;
}
int cuMemFree_v2(uint64_t at) {
    ENTER("cuMemFree_v2");
    NEEDS_CONTEXT;
    NO_CAPTURE;
    auto found = allocations.find(at);
    if (found == allocations.end()) {
        return INVALID_VALUE;
    }
    drain_all();
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    munmap(reinterpret_cast<void*>(at / page * page), found->second.mapped);
    found->second.gpu->used -= found->second.bytes;
    allocations.erase(found);
    return SUCCESS;
}
struct IpcHandle {
    int process, file;
    uint64_t bytes, mapped, inner;
    char rest[32];
};
static_assert(sizeof(IpcHandle) == 64, "as large as the driver's");
// Moves the allocation, in place, into a file that other processes open through this process's
// descriptors.
int cuIpcGetMemHandle(IpcHandle* handle, uint64_t at) {
    ENTER("cuIpcGetMemHandle");
    NEEDS_CONTEXT;
    NO_CAPTURE;
    auto found = allocations.find(at);
    if (found == allocations.end()) {
        return INVALID_VALUE;
    }
    drain_all();
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const uint64_t base = at / page * page;
    const size_t size = found->second.mapped - page;
    const int file = memfd_create("fake-cuda", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, static_cast<off_t>(size)) != 0) {
        return OUT_OF_MEMORY;
    }
    for (size_t done = 0; done < size;) {
        const ssize_t wrote = pwrite(file, reinterpret_cast<void*>(base + done), size - done,
                                     static_cast<off_t>(done));
        if (wrote <= 0) {
            return OUT_OF_MEMORY;
        }
        done += static_cast<size_t>(wrote);
    }
    if (mmap(reinterpret_cast<void*>(base), size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
             file, 0) == MAP_FAILED) {
        return OUT_OF_MEMORY;
    }
    memset(handle, 0, sizeof *handle);
    *handle = IpcHandle{getpid(), file, found->second.bytes, size, at - base, {}};
    log_line("ipc give %zu", found->second.bytes);
    return SUCCESS;
}
int cuIpcOpenMemHandle_v2(uint64_t* at, IpcHandle handle, unsigned flags) {
    ENTER("cuIpcOpenMemHandle_v2");
    NEEDS_CONTEXT;
    NO_CAPTURE;
    // Like the real one, it refuses handles of its own process.
    if (handle.process == getpid() || flags != 1) {
        return INVALID_CONTEXT;
    }
    for (auto& [known, memory] : opened) {
        if (memory.process == handle.process && memory.file == handle.file) {
            memory.count++;
            *at = known;
            return SUCCESS;
        }
    }
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.process, handle.file);
    const int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) {
        return INVALID_VALUE;
    }
    const int kind = setting("FAKE_CUDA_DEAF", 0) != 0 ? MAP_PRIVATE : MAP_SHARED;
    void* base = mmap(nullptr, handle.mapped, PROT_READ | PROT_WRITE, kind, file, 0);
    close(file);
    if (base == MAP_FAILED) {
        return OUT_OF_MEMORY;
    }
    *at = reinterpret_cast<uint64_t>(base) + handle.inner;
    opened[*at] = Opened{handle.mapped, handle.process, handle.file, 1};
    log_line("ipc open %zu", static_cast<size_t>(handle.bytes));
    return SUCCESS;
}
int cuIpcCloseMemHandle(uint64_t at) {
    ENTER("cuIpcCloseMemHandle");
    NEEDS_CONTEXT;
    NO_CAPTURE;
    auto found = opened.find(at);
    if (found == opened.end()) {
        return INVALID_VALUE;
    }
    if (--found->second.count > 0) {
        return SUCCESS;
    }
    drain_all();
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    munmap(reinterpret_cast<void*>(at / page * page), found->second.mapped);
    opened.erase(found);
    log_line("ipc close");
    return SUCCESS;
}
int cuDeviceCanAccessPeer(int* can, int device, int peer) {
    ENTER("cuDeviceCanAccessPeer");
    *can = device != peer && setting("FAKE_CUDA_PEER_ACCESS", 1) != 0;
    return SUCCESS;
}
int cuMemAllocHost_v2(void** at, size_t bytes) {
    ENTER("cuMemAllocHost_v2");
    NEEDS_CONTEXT;
    NO_CAPTURE;
    *at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*at == MAP_FAILED) {
        return OUT_OF_MEMORY;
    }
    // Large memory stays untouched, as above.
    if (bytes <= (64u << 20)) {
        memset(*at, 0xff, bytes);
    }
    pinned[reinterpret_cast<uint64_t>(*at)] = bytes;
    return SUCCESS;
}
// Does not wait, since NVIDIA does not document that the real one does: work that still uses the
// memory faults.
int cuMemFreeHost(void* at) {
    ENTER("cuMemFreeHost");
    NEEDS_CONTEXT;
    NO_CAPTURE;
    auto found = pinned.find(reinterpret_cast<uint64_t>(at));
    if (found == pinned.end()) {
        return INVALID_VALUE;
    }
    munmap(at, found->second);
    pinned.erase(found);
    return SUCCESS;
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, Stream* stream) {
    ENTER("cuMemcpyHtoDAsync_v2");
    NEEDS_CONTEXT_OF(stream);
    log_line("upload %zu %s", bytes, is_pinned(from) ? "pinned" : "pageable");
    if (!is_device(to, bytes)) {
        return INVALID_VALUE;
    }
    // The graph would read it again whenever it runs.
    if (!is_pinned(from) && stream->captures) {
        stream->invalid = true;
        return CAPTURE_UNSUPPORTED;
    }
    auto copy = [=] { memcpy(reinterpret_cast<void*>(to), from, bytes); };
    const int status = enqueue(stream, copy);
    if (!is_pinned(from)) {
        drain(stream);
    }
    return status;
}
int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, Stream* stream) {
    ENTER("cuMemcpyDtoHAsync_v2");
    NEEDS_CONTEXT_OF(stream);
    log_line("download %zu", bytes);
    if (!is_device(from, bytes) || !is_pinned(to, bytes)) {
        return INVALID_VALUE;
    }
    return enqueue(stream, [=] { memcpy(to, reinterpret_cast<void*>(from), bytes); });
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, Stream* stream) {
    ENTER("cuMemcpyDtoDAsync_v2");
    NEEDS_CONTEXT_OF(stream);
    if (!is_device(from, bytes) || !is_device(to, bytes)) {
        return INVALID_VALUE;
    }
    return enqueue(stream, [=] {
        memmove(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes);
    });
}
int cuMemsetD8Async(uint64_t at, unsigned char byte, size_t bytes, Stream* stream) {
    ENTER("cuMemsetD8Async");
    NEEDS_CONTEXT_OF(stream);
    if (bytes == 0 || !is_device(at, bytes)) {
        return INVALID_VALUE;
    }
    return enqueue(stream, [=] {
        // Fresh pages are already zero, and large memory was left so.
        if (byte != 0 || bytes <= (64u << 20)) {
            memset(reinterpret_cast<void*>(at), byte, bytes);
        }
    });
}
int cuStreamCreate(Stream** stream, unsigned) {
    ENTER("cuStreamCreate");
    NEEDS_CONTEXT;
    *stream = new Stream;
    done[*stream] = 0;
    return SUCCESS;
}
int cuStreamDestroy_v2(Stream* stream) {
    ENTER("cuStreamDestroy_v2");
    drain(stream);
    done.erase(stream);
    if (capturing == stream) {
        capturing = nullptr;
    }
    delete stream;
    return SUCCESS;
}
int cuStreamSynchronize(Stream* stream) {
    ENTER("cuStreamSynchronize");
    NEEDS_CONTEXT_OF(stream);
    NO_CAPTURE;
    drain(stream);
    return SUCCESS;
}
// Not ready at first, like events.
int cuStreamQuery(Stream* stream) {
    ENTER("cuStreamQuery");
    NEEDS_CONTEXT_OF(stream);
    NO_CAPTURE;
    if (stream->queue.empty()) {
        return SUCCESS;
    }
    flush(stream);
    return NOT_READY;
}
int cuStreamBeginCapture_v2(Stream* stream, int mode) {
    ENTER("cuStreamBeginCapture_v2");
    NEEDS_CONTEXT_OF(stream);
    if (stream->captures) {
        return INVALID_VALUE;
    }
    stream->captures = true;
    stream->invalid = false;
    stream->captured.clear();
    // Relaxed captures allow everything; the others are ended by the thread that began them.
    capturing = mode == 2 ? nullptr : stream;
    capturing_for_all = mode == 0 ? stream : nullptr;
    return SUCCESS;
}
int cuStreamEndCapture(Stream* stream, Graph** graph) {
    LOCKED;
    const int told = injected("cuStreamEndCapture");
    if (!stream->captures) {
        return INVALID_VALUE;
    }
    if (capturing != stream) {
        return CAPTURE_WRONG_THREAD;
    }
    // The capture ends even if it fails.
    stream->captures = false;
    capturing = capturing_for_all = nullptr;
    *graph = nullptr;
    if (told != SUCCESS || stream->invalid) {
        return told != SUCCESS ? told : CAPTURE_INVALIDATED;
    }
    *graph = new Graph{std::move(stream->captured), false};
    stream->captured.clear();
    log_line("capture %zu", (*graph)->work.size());
    return SUCCESS;
}
int cuGraphInstantiateWithFlags(Graph** exec, Graph* graph, unsigned long long) {
    ENTER("cuGraphInstantiateWithFlags");
    *exec = new Graph(*graph);
    return SUCCESS;
}
int cuGraphDestroy(Graph* graph) {
    ENTER("cuGraphDestroy");
    delete graph;
    return SUCCESS;
}
int cuGraphExecDestroy(Graph* graph) {
    ENTER("cuGraphExecDestroy");
    delete graph;
    return SUCCESS;
}
int cuGraphUpload(Graph* graph, Stream* stream) {
    ENTER("cuGraphUpload");
    NEEDS_CONTEXT_OF(stream);
    // It allocates, which a capture forbids.
    NO_CAPTURE;
    graph->uploaded = true;
    return SUCCESS;
}
int cuGraphLaunch(Graph* graph, Stream* stream) {
    ENTER("cuGraphLaunch");
    NEEDS_CONTEXT_OF(stream);
    // The real one makes room for the graph now, if there is any.
    if (!graph->uploaded) {
        return OUT_OF_MEMORY;
    }
    log_line("graph %zu", graph->work.size());
    for (const Work& work : graph->work) {
        enqueue_work(stream, work);
    }
    return SUCCESS;
}
int cuEventCreate(Event** event, unsigned flags) {
    ENTER("cuEventCreate");
    NEEDS_CONTEXT;
    *event = new Event;
    (*event)->timed = (flags & 2) == 0;
    return SUCCESS;
}
int cuEventDestroy_v2(Event* event) {
    ENTER("cuEventDestroy_v2");
    delete event;
    return SUCCESS;
}
int cuEventRecord(Event* event, Stream* stream) {
    ENTER("cuEventRecord");
    NEEDS_CONTEXT_OF(stream);
    if (event->gpu != stream->gpu) {
        return INVALID_HANDLE;
    }
    event->captured = stream->captures;
    event->stream = stream;
    event->mark = done[stream] + stream->queue.size();
    event->asked = false;
    event->milliseconds = stream->milliseconds;
    return SUCCESS;
}
// Not ready at first, to detect a caller that does not query again.
int cuEventQuery(Event* event) {
    ENTER("cuEventQuery");
    NEEDS_CONTEXT_OF(event);
    NO_CAPTURE;
    if (event->captured) {
        return CAPTURED_EVENT;
    }
    if (event->stream == nullptr || done.count(event->stream) == 0 ||
        done[event->stream] >= event->mark) {
        return SUCCESS;
    }
    if (!std::exchange(event->asked, true)) {
        return NOT_READY;
    }
    return flush(event->stream, event->mark) ? SUCCESS : NOT_READY;
}
int cuEventSynchronize(Event* event) {
    ENTER("cuEventSynchronize");
    NEEDS_CONTEXT_OF(event);
    NO_CAPTURE;
    if (event->stream != nullptr && done.count(event->stream) != 0) {
        drain(event->stream, event->mark);
    }
    return SUCCESS;
}
int cuEventElapsedTime_v2(float* milliseconds, Event* from, Event* to) {
    ENTER("cuEventElapsedTime_v2");
    for (const Event* event : {from, to}) {
        if (!event->timed || event->stream == nullptr) {
            return INVALID_HANDLE;
        }
        if (done.count(event->stream) != 0 && done[event->stream] < event->mark) {
            return NOT_READY;
        }
    }
    *milliseconds = 1.0f + to->milliseconds - from->milliseconds;
    return SUCCESS;
}
int cuModuleLoadData(void** module, const void* image) {
    ENTER("cuModuleLoadData");
    NEEDS_CONTEXT;
    NO_CAPTURE;
    if (memcmp(image, "fake fatbin", 11) != 0) {
        return INVALID_IMAGE;
    }
    *module = new Module;  // Never freed: whoever still has a function of it is to be told.
    return SUCCESS;
}
int cuModuleUnload(Module* module) {
    ENTER("cuModuleUnload");
    NEEDS_CONTEXT;
    NO_CAPTURE;
    if (module->unloaded) {
        return INVALID_HANDLE;
    }
    module->unloaded = true;
    return SUCCESS;
}
int cuModuleGetFunction(Function** function, Module* module, const char* name) {
    ENTER("cuModuleGetFunction");
    NEEDS_CONTEXT;
    if (module->unloaded) {
        return INVALID_HANDLE;
    }
    for (const Kernel& kernel : kernels()) {
        if (strcmp(kernel.name, name) == 0) {
            *function = &module->functions.try_emplace(&kernel, Function{&kernel, module}).first->second;
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}
int cuFuncLoad(Function* function) {
    ENTER("cuFuncLoad");
    NEEDS_CONTEXT;
    NO_CAPTURE;
    if (function->module->unloaded) {
        return INVALID_HANDLE;
    }
    function->loaded = true;
    return SUCCESS;
}
int cuFuncSetAttribute(Function* function, int attribute, int value) {
    ENTER("cuFuncSetAttribute");
    const Kernel* kernel = function->kernel;
    if (function->module->unloaded) {
        return INVALID_HANDLE;
    }
    if (attribute == 9) {
        // Share of the L1 cache, in per cent; -1 leaves it to the driver.
        log_line("carveout %s %d", kernel->name, value);
        return value >= -1 && value <= 100 ? SUCCESS : INVALID_VALUE;
    }
    if (attribute != 8 || value < 0 ||
        static_cast<unsigned>(value) + kernel->shared > shared_memory()) {
        return INVALID_VALUE;
    }
    function->dynamic_shared = static_cast<unsigned>(value);
    return SUCCESS;
}
int cuLaunchKernel(const Function* function, unsigned x, unsigned y, unsigned z, unsigned threads,
                   unsigned threads_y, unsigned threads_z, unsigned shared, Stream* stream,
                   void** params, void** extra) {
    ENTER("cuLaunchKernel");
    NEEDS_CONTEXT_OF(stream);
    if (stream->captures) {
        ENTER("captured_cuLaunchKernel");
    }
    const Kernel* kernel = function->kernel;
    if (function->module->unloaded) {
        return INVALID_HANDLE;
    }
    if (!function->loaded) {
        NO_CAPTURE;
        return LAUNCH_FAILED;
    }
    log_line("launch %s %u %u %u %u %u", kernel->name, x, y, z, threads, shared);
    if (x == 0 || y == 0 || z == 0 || threads == 0 || threads > 1024 || threads_y != 1 ||
        threads_z != 1 || extra != nullptr || y > 65535 || z > 65535) {
        return INVALID_VALUE;
    }
    // Static shared memory counts towards the usual 48 KiB.
    const unsigned usual = 48u * 1024 - kernel->shared;
    const unsigned allowed = function->dynamic_shared == 0 ? usual : function->dynamic_shared;
    if (threads > kernel->threads || shared > allowed) {
        return INVALID_VALUE;
    }
    const unsigned warps = (threads + 31) / 32;
    if ((kernel->registers * 32 + 255) / 256 * 256 * warps > 65536) {
        return OUT_OF_RESOURCES;
    }
    std::vector<uint64_t> raw;
    for (size_t i = 0; i < kernel->sizes.size(); i++) {
        uint64_t word = 0;
        memcpy(&word, params[i], kernel->sizes[i]);
        raw.push_back(word);
    }
    if (const unsigned milliseconds = slowness(kernel->name)) {
        enqueue_work(stream, Work{nullptr, [=] { return lasting(milliseconds); }});
    }
    return enqueue(stream, [=] {
        running = kernel->name;
        if (strncmp(kernel->name, "tutti_peer_", 11) == 0) {
            const auto* peers = reinterpret_cast<const TuttiPeers*>(raw[0]);
            log_line("peers %s", peers->shares_gpu != 0 ? "share a GPU" : "have a GPU each");
        }
        emulate::Settings settings{{x, y, z}, threads, shared, emulate::QUICKEST_SEED};
        emulate::run_grid(settings, [&] { kernel->call(raw); });
        running = "";
    });
}

struct LaunchConfig {
    unsigned grid[3], block[3], shared;
    Stream* stream;
    struct {
        int id;
        char pad[4];
        union {
            char bytes[64];
            int value;
        };
    }* attributes;
    unsigned count;
};
// What a kernel that does not wait would be the next of.
struct Held {
    LaunchConfig config;
    const Function* function;
    uint64_t words[4];
};
static std::vector<Held> held;

static int launch_held() {
    const std::vector<Held> all = std::exchange(held, {});
    for (Held one : all) {
        void* params[4];
        for (int i = 0; i < 4; i++) {
            params[i] = &one.words[i];
        }
        const LaunchConfig& config = one.config;
        const int status =
            cuLaunchKernel(one.function, config.grid[0], config.grid[1], config.grid[2], config.block[0],
                           config.block[1], config.block[2], config.shared, config.stream, params,
                           nullptr);
        if (status != SUCCESS) {
            return status;
        }
    }
    return SUCCESS;
}

int cuLaunchKernelEx(const LaunchConfig* config, const Function* function, void** params,
                     void** extra) {
    for (unsigned i = 0; i < config->count; i++) {
        // Programmatic stream serialization, which the emulation does not need.
        if (config->attributes[i].id != 6 || config->attributes[i].value != 1 ||
            setting("FAKE_CUDA_CAPABILITY", 90) < 90) {
            return INVALID_VALUE;
        }
        if (config->stream->captures && setting("FAKE_CUDA_CAPTURED_OVERLAP", 1) == 0) {
            return CAPTURE_UNSUPPORTED;
        }
    }
    if (setting("FAKE_CUDA_HASTY", 0) != 0 && strcmp(function->kernel->name, "tutti_late") == 0) {
        Held one{*config, function, {}};
        for (int i = 0; i < 4; i++) {
            memcpy(&one.words[i], params[i], sizeof one.words[i]);
        }
        held.push_back(one);
        return SUCCESS;
    }
    const bool waits = config->count == 0;
    const int before = waits ? launch_held() : SUCCESS;
    if (before != SUCCESS) {
        return before;
    }
    const int status = cuLaunchKernel(function, config->grid[0], config->grid[1], config->grid[2],
                                      config->block[0], config->block[1], config->block[2],
                                      config->shared, config->stream, params, extra);
    return status == SUCCESS && !waits ? launch_held() : status;
}

/* ---- cuBLASLt: column-major D = op(A) B, bf16 to f32. ---- */

constexpr int NOT_SUPPORTED = 15;

struct Layout {
    int type;
    uint64_t rows, columns;
    int64_t stride;
};

size_t cublasLtGetVersion() { return 130000; }
int cublasLtCreate(void** handle) {
    ENTER("cublasLtCreate");
    static int the_handle;
    *handle = &the_handle;
    return SUCCESS;
}
int cublasLtDestroy(void*) { return SUCCESS; }
int cublasLtMatmulDescCreate(int** description, int compute, int scale) {
    // Sums and scales in f32.
    if (compute != 68 || scale != 0) {
        return NOT_SUPPORTED;
    }
    *description = new int(0);
    return SUCCESS;
}
int cublasLtMatmulDescDestroy(int* description) {
    delete description;
    return SUCCESS;
}
int cublasLtMatmulDescSetAttribute(int* description, int attribute, const void* value, size_t bytes) {
    if (attribute != 3 || bytes != sizeof(int)) {
        return 7;
    }
    memcpy(description, value, bytes);
    return SUCCESS;
}
int cublasLtMatrixLayoutCreate(Layout** layout, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    *layout = new Layout{type, rows, columns, stride};
    return SUCCESS;
}
int cublasLtMatrixLayoutDestroy(Layout* layout) {
    delete layout;
    return SUCCESS;
}
// Alignment of the operands A, B, C and D.
struct Preference {
    uint32_t alignment[4] = {256, 256, 256, 256};
};
int cublasLtMatmulPreferenceCreate(Preference** preference) {
    *preference = new Preference;
    return SUCCESS;
}
int cublasLtMatmulPreferenceDestroy(Preference* preference) {
    delete preference;
    return SUCCESS;
}
int cublasLtMatmulPreferenceSetAttribute(Preference* preference, int attribute, const void* value,
                                         size_t bytes) {
    if (attribute >= 5 && attribute <= 8 && bytes == 4) {
        memcpy(&preference->alignment[attribute - 5], value, bytes);
        return SUCCESS;
    }
    return attribute == 1 && bytes == 8 ? SUCCESS : 7;
}
int cublasLtMatmulAlgoGetHeuristic(void*, int*, Layout* a, Layout* b, Layout*, Layout* d,
                                   const Preference* preference, int room, uint64_t* results,
                                   int* count) {
    ENTER("cublasLtMatmulAlgoGetHeuristic");
    log_line("plan %zu %zu %zu", static_cast<size_t>(b->columns), static_cast<size_t>(a->columns),
             static_cast<size_t>(a->rows));
    // It may load code to find out.
    if (capturing != nullptr || capturing_for_all != nullptr) {
        return 14;
    }
    // Like a library without kernels for results whose rows are not aligned.
    if (d->stride % 4 != 0) {
        *count = 0;
        return NOT_SUPPORTED;
    }
    const int most = static_cast<int>(setting("FAKE_CUDA_ALGORITHMS", 1));
    *count = most < room ? most : room;
    for (int number = 0; number < *count; number++) {
        uint64_t* result = results + 12 * number;
        memset(result, 0, 12 * 8);
        result[0] = d->rows;
        // An algorithm that relies on the promised alignment.
        for (size_t i = 0; i < 4; i++) {
            result[1 + i] = preference->alignment[i];
        }
        result[5] = static_cast<uint64_t>(number);
    }
    return SUCCESS;
}
int cublasLtMatmul(void*, int* description, const float* alpha, const uint16_t* a, Layout* a_layout,
                   const uint16_t* b, Layout* b_layout, const float* beta, const float*, Layout*, float* d,
                   Layout* d_layout, const uint64_t* algorithm, void* workspace, size_t bytes, Stream* stream) {
    ENTER("cublasLtMatmul");
    NEEDS_CONTEXT_OF(stream);
    const Layout la = *a_layout, lb = *b_layout, ld = *d_layout;
    if (*description != 1 || la.type != 14 || lb.type != 14 || ld.type != 0 || *alpha != 1.0f ||
        *beta != 0.0f || la.rows != lb.rows || ld.rows != la.columns || ld.columns != lb.columns ||
        algorithm[0] != ld.rows) {
        return 7;
    }
    const uint64_t n = la.columns, m = lb.columns, k = la.rows;
    const auto address = [](const void* at) { return reinterpret_cast<uint64_t>(at); };
    if (!is_device(address(a), ((n - 1) * static_cast<uint64_t>(la.stride) + k) * 2) ||
        !is_device(address(b), ((m - 1) * static_cast<uint64_t>(lb.stride) + k) * 2) ||
        !is_device(address(d), ((m - 1) * static_cast<uint64_t>(ld.stride) + n) * 4)) {
        return 13;
    }
    if (address(workspace) % 16 != 0 || !is_device(address(workspace), bytes)) {
        return 7;
    }
    if (address(a) % algorithm[1] != 0 || address(b) % algorithm[2] != 0 ||
        address(d) % algorithm[3] != 0 || address(d) % algorithm[4] != 0) {
        return 13;
    }
    // The first algorithm is not the fastest, and the second one cannot run.
    const size_t number = algorithm[5];
    if (number == 1) {
        return NOT_SUPPORTED;
    }
    // The real one loads an algorithm's code when it first runs, which a capture forbids.
    const std::vector<uint64_t> code = {number, n, k, algorithm[1], algorithm[2], algorithm[3]};
    if (stream->captures && loaded_algorithms.count(code) == 0) {
        stream->invalid = true;
        return 14;
    }
    loaded_algorithms.insert(code);
    stream->milliseconds += number == 0 ? 3.0f : 4.0f - static_cast<float>(number);
    log_line("product %zu %zu %zu by %zu", static_cast<size_t>(m), static_cast<size_t>(n),
             static_cast<size_t>(k), number);
    return enqueue(stream, [=] {
        const auto wide = [](uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); };
        for (uint64_t row = 0; row < m; row++) {
            for (uint64_t feature = 0; feature < n; feature++) {
                const uint16_t* x = b + row * static_cast<uint64_t>(lb.stride);
                const uint16_t* w = a + feature * static_cast<uint64_t>(la.stride);
                float sum = 0.0f;
                for (uint64_t i = 0; i < k; i++) {
                    sum += wide(x[i]) * wide(w[i]);
                }
                d[row * static_cast<uint64_t>(ld.stride) + feature] = sum;
            }
        }
    });
}

}  // extern "C"
