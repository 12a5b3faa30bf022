// Runs PTX, as nvcc has written it, one warp at a time.
//
// A register of a thread is a lane of a row of 32: an instruction computes all lanes that are there
// at once, which the host's compiler makes vectors of. The semantics are those of the PTX manual
// (ISA 9.0), and share nothing with the twins of `device.cuh` in `emulate/device.h`.
#pragma once
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "../block.h"

namespace emulate::ptx {

constexpr uint32_t LANES = 32;
constexpr uint32_t ALL = 0xffffffffu;

struct Warp;
struct Instruction;
using Execute = void (*)(Warp&, const Instruction&);

enum class Kind : uint8_t {
    // Every lane by itself.
    plain,
    // The same, but other threads, blocks or ranks may have to go on before it gets what it wants.
    yielding,
    branch,
    exit,
    // Waits for the lanes of its mask to be at this very instruction. So are those without a mask
    // (`.aligned`), of which it is all lanes.
    warp,
    whole_warp,
    // A barrier of the block, aligned.
    barrier,
};

// The most operands, of mma.sync: d, a, b, c.
constexpr size_t OPERANDS = 14;

struct Instruction {
    Execute execute = nullptr;
    // Where the rows of its operands are in the registers of a warp, in bytes. Constants have rows
    // too.
    uint32_t at[OPERANDS] = {};
    // An offset of an address, a size or a position: what the instruction says.
    int64_t immediate = 0;
    uint32_t line = 0;
    // Of a branch.
    uint32_t target = 0;
    // The row of the mask of lanes, of a warp's instruction.
    uint32_t mask_at = 0;
    // The row of the predicate of a branch; and whether it is negated. ALWAYS: of none.
    uint32_t guard = 0;
    bool negated = false;
    // Of a load or store: registers, and what holds for it.
    uint8_t elements = 1;
    uint8_t flags = 0;
    Kind kind = Kind::plain;
    const char* opcode = "";
};
constexpr uint32_t ALWAYS = ~uint32_t{0};

// Where the rows of addresses are among an instruction's operands.
constexpr size_t ADDRESS = 4, FROM = 5;
// Flags: the non-coherent path; what may come before griddepcontrol.wait; what PTX calls relaxed,
// release or acquire at system scope, and of these what orders other accesses; what may be 16 bytes
// that peers exchange; what several threads may store at once.
constexpr uint8_t NON_COHERENT = 1, EARLY = 2, FLAG = 4, ORDERED = 8, PEERS = 16, ALIKE = 32;

// An array in shared memory: of the kernel, or, with `dynamic`, of the launch.
struct SharedArray {
    std::string name;
    uint32_t begin = 0;
    uint32_t bytes = 0;
    bool dynamic = false;
};

struct Kernel {
    std::string name;
    std::string file;
    uint32_t parameters = 0;
    uint32_t most_threads = 0;
    // Whether it is for sm_90 or later, whose kernels have to wait for those before them.
    bool waits = false;
    std::vector<Instruction> code;
    // All rows, and of them those of constants, which every launch begins with.
    uint32_t register_bytes = 0;
    std::vector<std::pair<uint32_t, std::vector<uint8_t>>> constants;
    std::vector<SharedArray> shared;
};

// Shared memory begins here: null is not a part of it, and the arrays have gaps between them that
// belong to nobody, since no order of them is promised.
constexpr uint32_t SHARED_BEGIN = 1024;
constexpr uint32_t SHARED_GAP = 256;

struct Copy {
    uint32_t to;
    const unsigned char* from;
    uint32_t bytes;
    uint32_t zeros;
    uint32_t group;
    uint32_t line;
};

struct Cta;

struct Warp {
    Cta* cta = nullptr;
    unsigned char* registers = nullptr;
    // The lanes that execute the instruction at hand.
    uint32_t mask = 0;
    uint32_t first_thread = 0;

    uint32_t pc[LANES] = {};
    // Lanes that have not ended; those that wait, for their warp or for the block.
    uint32_t live = 0;
    uint32_t in_warp = 0;
    uint32_t in_block = 0;
    // Lanes that let others run first, and those that have done so for their next instruction.
    uint32_t yielded = 0;
    uint32_t may_go_on = 0;
    // Lanes that have waited for the kernels before (griddepcontrol.wait).
    uint32_t waited = 0;
    // bar.warp.sync of all lanes, so far.
    uint32_t barriers = 0;
    uint32_t groups[LANES] = {};
    std::vector<Copy> copies[LANES];

    template <class T>
    T* row(uint32_t at) {
        return reinterpret_cast<T*>(registers + at);
    }
    uint32_t& predicate(uint32_t at) { return *row<uint32_t>(at); }
    uint32_t runnable() const { return live & ~in_warp & ~in_block; }
};

// A block of threads.
struct Cta {
    const Kernel* kernel = nullptr;
    const uint64_t* arguments = nullptr;
    std::vector<Warp> warps;
    unsigned char* shared = nullptr;
    uint32_t shared_end = 0;
    // Which array a granule of shared memory belongs to, from 1 on.
    std::vector<uint8_t> owners;
    std::vector<SharedArray> arrays;
    uint32_t threads = 0;
    bool copies_arrive_early = false;
    bool is_free = false;
};

// Ends the process: with the block, the thread of `lane`, and the instruction's line in the PTX.
[[noreturn]] void fail_at(Warp& warp, const Instruction& at, uint32_t lane, const char* what);

// The thread whose access follows, for the checks of accesses, and for messages about faults.
inline void run_as(const Warp& warp, uint32_t lane) { thread_index.x = warp.first_thread + lane; }

template <class F>
inline __attribute__((always_inline)) void each(uint32_t mask, const F& f) {
    if (mask == ALL) {
#pragma GCC ivdep
        for (uint32_t lane = 0; lane < LANES; lane++) {
            f(lane);
        }
    } else {
        for (; mask != 0; mask &= mask - 1) {
            f(static_cast<uint32_t>(__builtin_ctz(mask)));
        }
    }
}
// The same, in order and one after the other: where lanes can be in each other's way.
template <class F>
inline void in_order(uint32_t mask, const F& f) {
    for (; mask != 0; mask &= mask - 1) {
        f(static_cast<uint32_t>(__builtin_ctz(mask)));
    }
}

// An instruction: its name with all its modifiers; what it does; and its operands, a letter each:
// w h q registers of 32, 16 and 64 bits, or constants; p predicates. What is not a register or a
// constant is not in this table: see `parse.cpp`.
struct Form {
    const char* opcode;
    const char* operands;
    Execute execute;
};
const std::vector<Form>& arithmetic();
const std::vector<Form>& conversions();

// Of `warp.cpp`; null if there is no such instruction. Sets kind and operands' letters.
struct WarpForm {
    const char* opcode;
    const char* operands;
    Execute execute;
    Kind kind;
};
const std::vector<WarpForm>& warp_instructions();

// A load or a store, of one to four registers of this width (a row's letter). `execute` is null if
// it is none that is known.
struct AccessForm {
    Execute execute = nullptr;
    uint8_t elements = 1;
    uint8_t flags = 0;
    bool is_store = false;
    // Of the address.
    char width = 'q';
    Kind kind = Kind::plain;
};
AccessForm access_named(const std::string& opcode, char width);
// The 16 bytes that a lane of ldmatrix has the address of.
const unsigned char* row_of_matrix(Warp& w, const Instruction& i, uint32_t lane);
// What else there is with addresses, which have the letter a, or A if they have 64 bits.
const std::vector<WarpForm>& memory_instructions();

// Reads the kernel `name` of the PTX in `text`, or ends the process with what it does not know.
Kernel parse(const std::string& file, const std::string& text);
// The folder of kernels, a file each: the stubs know it.
extern const char* const folder;
const Kernel& load(const char* name);

// Called by the stubs with the interface of `kernels.h`: the block that begins runs this kernel.
void enter(const char* name, const uint64_t* arguments, size_t count);

}  // namespace emulate::ptx
