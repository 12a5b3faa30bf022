// Launches one kernel on the emulated device: reads a request from standard input, writes the
// buffers to standard output. `--list` lists all kernels.
//
// Request, little endian: u32 length and bytes of the name; u32 grid x, y, z; u32 threads per
// block; u32 bytes of dynamic shared memory; u32 seed; u32 number of arguments; then each argument:
// u32 kind, followed for kind 0 (null) by nothing, 1 (u32, f32) and 2 (u64) by 8 bytes, 3 (buffer)
// by u64 length and bytes, 4 (into an earlier argument's buffer) by u32 its index and u64 an offset
// in bytes.
// Answer: the bytes of every buffer, in order.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include "../kernels.h"
#include "block.h"
#include "device.h"
#include "races.h"
#if defined(TUTTI_PTX)
// What entries.inc lists and kernels.h does not.
#include "declarations.inc"
#else
#include "rules.h"
#endif

namespace {

struct Kernel {
    const char* name;
    size_t arguments;
    std::function<void(const uint64_t*)> call;
};

template <class T>
T argument(uint64_t raw) {
    T value;
    memcpy(&value, &raw, sizeof value);
    return value;
}

template <class... A, size_t... I>
void call(void (*kernel)(A...), const uint64_t* raw, std::index_sequence<I...>) {
    kernel(argument<A>(raw[I])...);
}

template <class... A>
Kernel entry(const char* name, void (*kernel)(A...)) {
    return {name, sizeof...(A), [kernel](const uint64_t* raw) {
                call(kernel, raw, std::index_sequence_for<A...>{});
            }};
}

#define ENTRY(name) entry(#name, name)

const std::vector<Kernel>& kernels() {
    static const std::vector<Kernel> all = {
#include "entries.inc"
    };
    return all;
}

// What the emulation has to tell from what is right: see rules.cu. Not listed.
const std::vector<Kernel>& rules() {
    static const std::vector<Kernel> all = {
#if !defined(TUTTI_PTX)
        ENTRY(one_block_waits),
        ENTRY(no_block_waits),
        ENTRY(half_of_a_block_waits),
        ENTRY(a_block_writes_that_does_not_wait),
        ENTRY(it_writes_before_it_waits),
        ENTRY(threads_read_what_others_wrote_behind_a_barrier),
        ENTRY(threads_read_what_others_wrote),
        ENTRY(threads_overwrite_what_others_read),
        ENTRY(lanes_read_what_others_wrote_behind_a_warp_barrier),
        ENTRY(lanes_read_what_others_wrote_behind_a_shuffle),
        ENTRY(warps_read_what_others_wrote_behind_a_warp_barrier),
        ENTRY(threads_add_atomically),
        ENTRY(a_thread_reads_what_others_add_atomically),
        ENTRY(a_copy_arrives_while_others_read),
        ENTRY(blocks_write_what_others_read),
        ENTRY(blocks_write_words_of_their_own),
#endif
    };
    return all;
}

void read_exactly(void* to, size_t bytes) {
    if (fread(to, 1, bytes, stdin) != bytes) {
        fprintf(stderr, "the request ends too early\n");
        exit(2);
    }
}

template <class T>
T read_value() {
    T value;
    read_exactly(&value, sizeof value);
    return value;
}

const char* running = "";

void on_fault(int) {
    char text[256];
    const int length =
        snprintf(text, sizeof text,
                 "%s: block (%u, %u, %u), thread %u: reaches outside of a buffer, or writes to one "
                 "before it has waited\n",
                 running,
                 emulate::block_index.x, emulate::block_index.y, emulate::block_index.z,
                 emulate::thread_index.x);
    if (write(2, text, static_cast<size_t>(length)) < 0) {
        _exit(5);
    }
    _exit(4);
}

struct Buffer {
    unsigned char* at;
    size_t bytes;
};

}  // namespace

int main(int count, char** options) {
    if (count > 1 && std::string(options[1]) == "--list") {
        for (const Kernel& kernel : kernels()) {
            printf("%s %zu\n", kernel.name, kernel.arguments);
        }
        return 0;
    }
    std::string name(read_value<uint32_t>(), '\0');
    read_exactly(name.data(), name.size());
    emulate::Settings settings;
    read_exactly(settings.grid, sizeof settings.grid);
    settings.threads = read_value<uint32_t>();
    settings.shared_bytes = read_value<uint32_t>();
    settings.seed = read_value<uint32_t>();

    const size_t arguments = read_value<uint32_t>();
    std::vector<uint64_t> raw(arguments);
    std::vector<Buffer> buffers;
    std::vector<size_t> buffer_of(arguments);
    for (size_t i = 0; i < arguments; i++) {
        const auto kind = read_value<uint32_t>();
        if (kind == 1 || kind == 2) {
            raw[i] = read_value<uint64_t>();
        } else if (kind == 3) {
            const auto bytes = static_cast<size_t>(read_value<uint64_t>());
            // One placement catches overruns, the other underruns.
            void* memory = emulate::guarded(bytes, settings.seed % 2 == 1);
            Buffer buffer{static_cast<unsigned char*>(memory), bytes};
            memset(buffer.at, 0xff, (bytes + 15) / 16 * 16);
            read_exactly(buffer.at, bytes);
            emulate::watch(buffer.at, bytes, false);
            buffer_of[i] = buffers.size();
            buffers.push_back(buffer);
            raw[i] = reinterpret_cast<uintptr_t>(buffer.at);
        } else if (kind == 4) {
            const auto of = read_value<uint32_t>();
            raw[i] = raw.at(of) + read_value<uint64_t>();
        } else if (kind != 0) {
            fprintf(stderr, "argument %zu: no kind %u\n", i, kind);
            return 2;
        }
    }

    std::vector<Kernel> known = kernels();
    known.insert(known.end(), rules().begin(), rules().end());
    for (const Kernel& kernel : known) {
        if (name != kernel.name) {
            continue;
        }
        if (kernel.arguments != arguments) {
            fprintf(stderr, "%s: %zu arguments given, %zu wanted\n", kernel.name, arguments,
                    kernel.arguments);
            return 2;
        }
        running = kernel.name;
        // Handle faults on a separate stack: the cause may be an overflow of a fiber's.
        static unsigned char signal_stack[64 * 1024];
        stack_t stack{};
        stack.ss_sp = signal_stack;
        stack.ss_size = sizeof signal_stack;
        sigaltstack(&stack, nullptr);
        struct sigaction action {};
        action.sa_handler = on_fault;
        action.sa_flags = SA_ONSTACK;
        sigaction(SIGSEGV, &action, nullptr);
        sigaction(SIGBUS, &action, nullptr);
        emulate::may_write = [&](bool allowed) {
            for (const Buffer& buffer : buffers) {
                emulate::protect(buffer.at, buffer.bytes, settings.seed % 2 == 1, allowed);
            }
        };
        emulate::run_grid(settings, [&] { kernel.call(raw.data()); });
        for (const Buffer& buffer : buffers) {
            for (size_t i = buffer.bytes; i < (buffer.bytes + 15) / 16 * 16; i++) {
                if (buffer.at[i] != 0xff) {
                    fprintf(stderr, "%s: wrote behind a buffer of %zu bytes\n", kernel.name,
                            buffer.bytes);
                    return 4;
                }
            }
            fwrite(buffer.at, 1, buffer.bytes, stdout);
        }
        return fflush(stdout) == 0 ? 0 : 2;
    }
    fprintf(stderr, "no kernel %s\n", name.c_str());
    return 2;
}
