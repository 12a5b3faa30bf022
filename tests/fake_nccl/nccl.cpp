// A stand-in for NCCL on top of the driver's stand-in (tests/fake_cuda): ranks are threads or
// processes of one host and exchange data through a file in shared memory, in stream order, also
// from graphs. Sums over more than two ranks have an order of their own. Only what Tutti calls.
//
// It is as strict as the real one can be. It waits for a missing rank until the communicator is
// aborted. Connecting continues in the background, and so does every call: a collective is on its
// stream, or in its graph, only when NCCL reports nothing in progress. An abort waits until all
// graphs with captured collectives are destroyed, and then until every other rank has come as far in
// its own abort or is gone: all ranks are on one host. It ends the process where the real one may
// fail: when a communicator is used during or after its abort, when its context is given back before
// an abort has ended, and on an abort while a call is in progress or on a thread without a context
// (where the real one would create a context on the first GPU).
//
// Environment; `rank:n` is the n-th such call, from 1, of this rank (or any: `*`) in its process:
// - FAKE_NCCL_VERSION: default 22809
// - FAKE_NCCL_INIT_HANG=rank:n: this rank never connects
// - FAKE_NCCL_INIT_FAIL=rank:n: connecting ends with ncclSystemError
// - FAKE_NCCL_INIT_REFUSE=rank:n: the same, but at once and with a communicator
// - FAKE_NCCL_HANG=rank:n: this collective never finishes when its turn comes
// - FAKE_NCCL_STUCK=rank:n: the same, not even after an abort
// - FAKE_NCCL_LATE=rank:n: this collective begins 300 ms late
// - FAKE_NCCL_ASYNC_ERROR=rank:n: this collective never finishes, with ncclRemoteError
// - FAKE_NCCL_CALL_FAIL=rank:n: this collective's call returns ncclUnhandledCudaError 400 ms after all
//   other ranks have made theirs
// - FAKE_NCCL_CAPTURE_FAIL=rank: calls of this rank that are to be captured return
//   ncclUnhandledCudaError
// - FAKE_NCCL_BLOCK=rank:n: the call of this collective does not return before an abort
// - FAKE_NCCL_SLOW=rank:n: the call of this collective is in progress for 1200 ms
// - FAKE_NCCL_ABORT_HANG=rank:n: this abort does not return
// - FAKE_NCCL_ABORT_SLOW=rank:n: this abort takes 3 s
// - NCCL_COMM_BLOCKING=1: as with the real one, calls wait for the other ranks
// - FAKE_NCCL_LOG: a file to which calls are appended
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hooks.h"

namespace {

constexpr int SUCCESS = 0, UNHANDLED_CUDA_ERROR = 1, SYSTEM_ERROR = 2, INTERNAL_ERROR = 3,
              INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6, IN_PROGRESS = 7;
constexpr int RANKS_MAX = 16;
constexpr size_t ROOM = 64u << 20;  // Most bytes of one rank in a collective; pages are lazy.

struct UniqueId {
    char bytes[128];
};

struct Config {
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster_size, min_ctas, max_ctas;
    const char* net_name;
    int split_share, unused;
};

// One rank's part of the shared table.
struct Seat {
    std::atomic<uint32_t> joined;
    std::atomic<uint64_t> shown;    // Collectives for which this rank has published its data.
    std::atomic<uint64_t> finished; // Collectives for which this rank has read all data.
    std::atomic<uint64_t> called;   // Collectives whose calls this rank has made, or is within.
    uint64_t what[2];               // Kinds of the last two published collectives.
};
struct Table {
    Seat seats[RANKS_MAX];
};

struct Comm {
    int rank = 0, ranks = 0;
    unsigned char* mapped = nullptr;
    size_t bytes = 0;
    std::string path;
    int file = -1;  // Its byte at a rank's number is locked while the rank has connections.
    std::atomic<bool> aborted{false};
    std::atomic<int> error{SUCCESS};
    bool fails = false;      // Connecting fails.
    int looks = 0;           // Number of polls still to be answered with "in progress".
    std::function<void()> pending;  // Remaining work of a call.
    std::chrono::steady_clock::time_point called, due;  // Times of the call and its completion.
    std::atomic<int> inside{0};     // Number of running calls that are not blocked.
    uint64_t begun = 0;      // Number of collectives whose turn has come.
    uint64_t calls = 0;      // Number of collectives that were called.
    uint64_t resets = fake_cuda::resets();  // Of its context, when it was made.
    std::shared_ptr<int> recorded = std::make_shared<int>(0);  // Held by every captured collective.

    Seat& seat(int of) const { return reinterpret_cast<Table*>(mapped)->seats[of]; }
    unsigned char* part(int of, uint64_t number) const {
        const size_t index = static_cast<size_t>(of) * 2 + number % 2;
        return mapped + 4096 * 4 + index * ROOM;
    }
    bool connected() const {
        for (int of = 0; of < ranks; of++) {
            if (seat(of).joined.load() == 0) {
                return false;
            }
        }
        return true;
    }
    // Locks belong to the open file, and go with the process that has it, or with `file`.
    bool lock(int kind, int of, int what) const {
        struct flock lock {};
        lock.l_type = static_cast<short>(what);
        lock.l_whence = SEEK_SET;
        lock.l_start = of;
        lock.l_len = 1;
        return fcntl(file, kind, &lock) == 0 && lock.l_type == what;
    }
    void called_another() { seat(rank).called.store(++calls); }
    // Waits until all other ranks have made that many calls, or this one is aborted.
    void await_others(uint64_t calls_of_each) const {
        for (int of = 0; of < ranks; of++) {
            while (of != rank && seat(of).called.load() < calls_of_each && !aborted.load()) {
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
        }
    }
    bool others_are_gone() const {
        for (int of = 0; of < ranks; of++) {
            // Finding it unlocked changes the kind of lock that was asked about.
            if (of != rank && lock(F_OFD_GETLK, of, F_WRLCK)) {
                return false;
            }
        }
        return true;
    }
    ~Comm() {
        if (mapped != nullptr) {
            munmap(mapped, bytes);
        }
        if (file >= 0) {
            close(file);
        }
    }
};

std::map<void*, std::shared_ptr<Comm>> comms;
std::mutex comms_lock;
thread_local std::string last_error;

void log_line(const char* format, ...) {
    static FILE* file = [] {
        const char* path = getenv("FAKE_NCCL_LOG");
        return path == nullptr ? nullptr : fopen(path, "a");
    }();
    if (file == nullptr) {
        return;
    }
    va_list args;
    va_start(args, format);
    char line[256];
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    fprintf(file, "%d %s\n", getpid(), line);
    fflush(file);
}

// Whether the environment selects this call of this rank.
bool told(const char* name, int rank, int number) {
    const char* text = getenv(name);
    const char* colon = text == nullptr ? nullptr : strchr(text, ':');
    const bool is_this = colon != nullptr && (*text == '*' || atoi(text) == rank);
    return is_this && atoi(colon + 1) == number;
}

int next(const char* what, int rank) {
    static std::mutex lock;
    static std::map<std::pair<std::string, int>, int> counts;
    std::lock_guard<std::mutex> guard(lock);
    return ++counts[{what, rank}];
}

std::shared_ptr<Comm> find(void* comm) {
    std::lock_guard<std::mutex> guard(comms_lock);
    auto found = comms.find(comm);
    return found == comms.end() ? nullptr : found->second;
}

[[noreturn]] void die(const char* words) {
    fprintf(stderr, "fake NCCL: %s\n", words);
    log_line("died: %s", words);
    abort();
}

// A call on a communicator.
struct Inside {
    std::shared_ptr<Comm> comm;
    explicit Inside(void* handle) : comm(find(handle)) {
        if (comm == nullptr || comm->aborted.load()) {
            die("a communicator is used after its abort");
        }
        comm->inside++;
    }
    ~Inside() { comm->inside--; }
};

int fail(int status, const char* words) {
    last_error = words;
    return status;
}

float from_bf16(uint16_t half) {
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// To the nearest, ties to even; what is no number stays none.
uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) {
        return 0x7fff;
    }
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Adds up all ranks' values in sequence, from a rank that depends on the place on, as rings do.
float sum(const float* values, int count, size_t place) {
    float all = 0.0f;
    for (int i = 0; i < count; i++) {
        const float value = values[(place / 64 + static_cast<size_t>(i)) % static_cast<size_t>(count)];
        all = i == 0 ? value : all + value;
    }
    return all;
}

// The same in bf16: rounded on each hop.
uint16_t sum_bf16(const float* values, int count, size_t place) {
    float all = 0.0f;
    for (int i = 0; i < count; i++) {
        const float value = values[(place / 64 + static_cast<size_t>(i)) % static_cast<size_t>(count)];
        all = i == 0 ? value : from_bf16(to_bf16(all + value));
    }
    return to_bf16(all);
}

enum What : uint64_t { GATHERS, SUMS, SUMS_BF16 };

struct Collective {
    What does;
    const void* from;
    void* to;
    size_t bytes;  // Per rank.
    bool recorded;

    // The properties that must be equal on all ranks, including whether it is captured.
    uint64_t kind() const { return bytes * 8 + does * 2 + (recorded ? 1 : 0); }
    const char* name() const {
        return does == GATHERS ? "all_gather" : does == SUMS ? "all_reduce" : "all_reduce_bf16";
    }
};

void finish(const Comm& comm, const Collective& what, uint64_t number) {
    if (what.does == GATHERS) {
        for (int of = 0; of < comm.ranks; of++) {
            memcpy(static_cast<unsigned char*>(what.to) + static_cast<size_t>(of) * what.bytes,
                   comm.part(of, number), what.bytes);
        }
        return;
    }
    float values[RANKS_MAX];
    if (what.does == SUMS_BF16) {
        auto* to = static_cast<uint16_t*>(what.to);
        for (size_t i = 0; i < what.bytes / 2; i++) {
            for (int of = 0; of < comm.ranks; of++) {
                const auto* part = reinterpret_cast<const uint16_t*>(comm.part(of, number));
                values[of] = from_bf16(part[i]);
            }
            to[i] = sum_bf16(values, comm.ranks, i);
        }
        return;
    }
    auto* to = static_cast<float*>(what.to);
    for (size_t i = 0; i < what.bytes / 4; i++) {
        for (int of = 0; of < comm.ranks; of++) {
            values[of] = reinterpret_cast<const float*>(comm.part(of, number))[i];
        }
        to[i] = sum(values, comm.ranks, i);
    }
}

// Begins a collective whose turn has come.
fake_cuda::Run begin(const std::shared_ptr<Comm>& comm, const Collective& what) {
    const uint64_t number = comm->begun++;
    const int turn = next("turn", comm->rank);
    const auto began = std::chrono::steady_clock::now();
    auto shown = std::make_shared<bool>(false);
    return [=] {
        if (told("FAKE_NCCL_STUCK", comm->rank, turn)) {
            return false;
        }
        if (comm->aborted.load()) {
            return true;
        }
        if (told("FAKE_NCCL_HANG", comm->rank, turn)) {
            return false;
        }
        if (told("FAKE_NCCL_ASYNC_ERROR", comm->rank, turn)) {
            comm->error.store(REMOTE_ERROR);
            return false;
        }
        if (told("FAKE_NCCL_LATE", comm->rank, turn)) {
            if (std::chrono::steady_clock::now() - began < std::chrono::milliseconds(300)) {
                return false;
            }
            if (!*shown) {
                log_line("late rank %d", comm->rank);
            }
        }
        if (!*shown) {
            for (int of = 0; of < comm->ranks; of++) {
                // All ranks must have read the collective that used this place before.
                if (comm->seat(of).finished.load() + 1 < number) {
                    return false;
                }
            }
            Seat& own = comm->seat(comm->rank);
            memcpy(comm->part(comm->rank, number), what.from, what.bytes);
            own.what[number % 2] = what.kind();
            own.shown.store(number + 1);
            *shown = true;
        }
        for (int of = 0; of < comm->ranks; of++) {
            if (comm->seat(of).shown.load() < number + 1) {
                return false;
            }
            if (comm->seat(of).what[number % 2] != what.kind()) {
                // With the real one, mismatched collectives hang, or worse.
                return false;
            }
        }
        finish(*comm, what, number);
        comm->seat(comm->rank).finished.store(number + 1);
        return true;
    };
}

int collective(void* handle, void* stream, Collective what) {
    const Inside inside(handle);
    const auto comm = inside.comm;
    if (!comm->connected()) {
        return fail(INVALID_USAGE, "not connected yet");
    }
    const size_t parts = what.does == GATHERS ? static_cast<size_t>(comm->ranks) : 1;
    const size_t gathered = what.bytes * parts;
    if (what.bytes > ROOM || !fake_cuda::is_memory(what.from, what.bytes) ||
        !fake_cuda::is_memory(what.to, gathered)) {
        return fail(INVALID_ARGUMENT, "memory that is not the device's, or too much of it");
    }
    const int number = next("call", comm->rank);
    if (told("FAKE_NCCL_CALL_FAIL", comm->rank, number)) {
        comm->inside--;
        comm->await_others(comm->calls + 1);
        comm->inside++;
        std::this_thread::sleep_for(std::chrono::milliseconds(400));
        return fail(UNHANDLED_CUDA_ERROR, "as it was told");
    }
    const char* uncaptured = getenv("FAKE_NCCL_CAPTURE_FAIL");
    if (uncaptured != nullptr && atoi(uncaptured) == comm->rank && fake_cuda::captures(stream)) {
        log_line("not captured rank %d", comm->rank);
        return fail(UNHANDLED_CUDA_ERROR, "it cannot be captured");
    }
    if (comm->pending) {
        return fail(INVALID_USAGE, "a call is in progress");
    }
    if (told("FAKE_NCCL_BLOCK", comm->rank, number)) {
        log_line("blocked rank %d", comm->rank);
        comm->called_another();
        comm->inside--;
        while (!comm->aborted.load()) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        comm->inside++;
        return fail(INTERNAL_ERROR, "it was aborted");
    }
    // One rank has only to copy, which is done at once; a sum in place is there already.
    if (comm->ranks == 1) {
        if (what.from != what.to) {
            fake_cuda::enqueue(stream, [what]() -> fake_cuda::Run {
                memmove(what.to, what.from, what.bytes);
                return [] { return true; };
            });
        }
        comm->called_another();
        log_line("%s %zu copied rank 0", what.name(), what.bytes);
        return SUCCESS;
    }
    what.recorded = fake_cuda::captures(stream);
    std::shared_ptr<int> recorded = what.recorded ? comm->recorded : nullptr;
    comm->called = comm->due = std::chrono::steady_clock::now();
    if (told("FAKE_NCCL_SLOW", comm->rank, number)) {
        log_line("slow rank %d", comm->rank);
        comm->due += std::chrono::milliseconds(1200);
    }
    comm->pending = [comm = std::weak_ptr<Comm>(comm), stream, what, recorded] {
        if (what.recorded != fake_cuda::captures(stream)) {
            die("a capture ended before a call that it records");
        }
        fake_cuda::enqueue(stream, [comm, what, recorded]() -> fake_cuda::Run {
            auto alive = comm.lock();
            if (alive == nullptr) {
                return [] { return true; };
            }
            return begin(alive, what);
        });
    };
    comm->looks = 1;
    comm->called_another();
    log_line("%s %zu %s rank %d", what.name(), what.bytes, recorded ? "recorded" : "called",
             comm->rank);
    return IN_PROGRESS;
}

}  // namespace

extern "C" {

int ncclGetVersion(int* version) {
    const char* text = getenv("FAKE_NCCL_VERSION");
    *version = text == nullptr ? 22809 : atoi(text);
    return SUCCESS;
}

int ncclGetUniqueId(UniqueId* id) {
    memset(id, 0, sizeof *id);
    static std::atomic<unsigned> count{0};
    timeval now{};
    gettimeofday(&now, nullptr);
    snprintf(id->bytes, sizeof id->bytes, "/dev/shm/fake-nccl-%d-%u-%ld", getpid(), count++,
             static_cast<long>(now.tv_usec));
    const int file = open(id->bytes, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (file < 0 || ftruncate(file, static_cast<off_t>(4096 * 4 + RANKS_MAX * 2 * ROOM)) != 0) {
        return fail(SYSTEM_ERROR, "no shared memory");
    }
    close(file);
    log_line("id");
    return SUCCESS;
}

int ncclCommInitRankConfig(void** handle, int ranks, UniqueId id, int rank, const Config* config) {
    if (config == nullptr || config->size != sizeof(Config) || config->magic != 0xcafebeef ||
        config->version < 21400 || config->blocking != 0 || rank < 0 || rank >= ranks ||
        ranks > RANKS_MAX || strncmp(id.bytes, "/dev/shm/fake-nccl-", 19) != 0) {
        return fail(INVALID_ARGUMENT, "a configuration or id that is none");
    }
    if (!fake_cuda::is_ready()) {
        return fail(UNHANDLED_CUDA_ERROR, "no context");
    }
    auto comm = std::make_shared<Comm>();
    const int file = comm->file = open(id.bytes, O_RDWR | O_CLOEXEC);
    if (file < 0) {
        return fail(SYSTEM_ERROR, "nobody knows this id");
    }
    comm->bytes = 4096 * 4 + RANKS_MAX * 2 * ROOM;
    void* mapped = mmap(nullptr, comm->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (mapped == MAP_FAILED || !comm->lock(F_OFD_SETLK, rank, F_WRLCK)) {
        return fail(SYSTEM_ERROR, "shared memory cannot be mapped or locked");
    }
    comm->mapped = static_cast<unsigned char*>(mapped);
    comm->rank = rank;
    comm->ranks = ranks;
    comm->path = id.bytes;
    comm->looks = 2;
    const int number = next("init", rank);
    const bool refused = told("FAKE_NCCL_INIT_REFUSE", rank, number);
    comm->fails = refused || told("FAKE_NCCL_INIT_FAIL", rank, number);
    if (!comm->fails && !told("FAKE_NCCL_INIT_HANG", rank, number)) {
        comm->seat(rank).joined.store(1);
    }
    log_line("init rank %d of %d", rank, ranks);
    *handle = comm.get();
    {
        std::lock_guard<std::mutex> guard(comms_lock);
        comms[comm.get()] = comm;
    }
    const char* blocking = getenv("NCCL_COMM_BLOCKING");
    if (blocking != nullptr && atoi(blocking) == 1) {
        log_line("waits in a call, rank %d", rank);
        while (!comm->connected() && !comm->aborted.load()) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    }
    return refused ? fail(SYSTEM_ERROR, "as it was told") : IN_PROGRESS;
}

int ncclCommGetAsyncError(void* handle, int* error) {
    const Inside inside(handle);
    const auto comm = inside.comm;
    if (comm->fails) {
        *error = fail(SYSTEM_ERROR, "as it was told");
    } else if (comm->error.load() != SUCCESS) {
        *error = comm->error.load();
    } else if (!comm->connected() || comm->looks > 0) {
        comm->looks -= comm->looks > 0 ? 1 : 0;
        *error = IN_PROGRESS;
    } else if (comm->pending) {
        if (std::chrono::steady_clock::now() >= comm->due) {
            std::exchange(comm->pending, nullptr)();
        }
        *error = IN_PROGRESS;
    } else {
        unlink(comm->path.c_str());
        *error = SUCCESS;
    }
    return SUCCESS;
}

int ncclCommAbort(void* handle) {
    auto comm = find(handle);
    if (comm == nullptr || comm->aborted.exchange(true)) {
        die("a communicator is aborted that is gone");
    }
    if (!fake_cuda::is_ready()) {
        die("an abort on a thread without a context");
    }
    // An abort is allowed once a call has been in progress for a second.
    if (comm->inside.load() > 0 || (comm->pending && std::chrono::steady_clock::now() - comm->called <
                                                         std::chrono::seconds(1))) {
        die("an abort while a call is in progress");
    }
    comm->pending = nullptr;
    const int abort = next("abort", comm->rank);
    if (told("FAKE_NCCL_ABORT_SLOW", comm->rank, abort)) {
        log_line("abort is slow rank %d", comm->rank);
        std::this_thread::sleep_for(std::chrono::seconds(3));
    }
    if (told("FAKE_NCCL_ABORT_HANG", comm->rank, abort)) {
        log_line("abort hangs rank %d", comm->rank);
        for (;;) {
            std::this_thread::sleep_for(std::chrono::seconds(1));
        }
    }
    unlink(comm->path.c_str());
    // Like NCCL, wait until the graphs are destroyed.
    while (comm->recorded.use_count() > 1) {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    comm->lock(F_OFD_SETLK, comm->rank, F_UNLCK);
    // Ranks that never were connected do not wait for each other.
    while (comm->connected() && !comm->others_are_gone()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (!fake_cuda::is_ready() || fake_cuda::resets() != comm->resets) {
        die("the context is gone before the communicator in it");
    }
    log_line("abort rank %d", comm->rank);
    std::lock_guard<std::mutex> guard(comms_lock);
    comms.erase(handle);
    return SUCCESS;
}

const char* ncclGetLastError(void*) { return last_error.c_str(); }

int ncclAllReduce(const void* from, void* to, size_t count, int type, int op, void* comm, void* stream) {
    const bool halves = type == 9;
    if (!(type == 7 || halves) || op != 0) {
        return fail(INVALID_ARGUMENT, "only sums of floats, or of bfloat16");
    }
    const size_t bytes = count * (halves ? 2 : 4);
    return collective(comm, stream, Collective{halves ? SUMS_BF16 : SUMS, from, to, bytes, false});
}

int ncclAllGather(const void* from, void* to, size_t count, int type, void* comm, void* stream) {
    if (type != 0) {
        return fail(INVALID_ARGUMENT, "only bytes");
    }
    return collective(comm, stream, Collective{GATHERS, from, to, count, false});
}

}  // extern "C"
