// Loads, stores, atomics, asynchronous copies; what orders kernels.
#include <algorithm>

#include "flags.h"
#include "machine.h"
#include "non_coherent.h"

namespace emulate::ptx {
namespace {

const void* line_of(const Instruction& i) {
    return reinterpret_cast<const void*>(uintptr_t{i.line});
}

// Where an access to shared memory goes.
unsigned char* in_shared(Warp& w, const Instruction& i, uint32_t lane, uint32_t address,
                         uint32_t bytes) {
    Cta& cta = *w.cta;
    if (address % bytes != 0) {
        fail_at(w, i, lane, "an address in shared memory that is not aligned to the access");
    }
    // Aligned, so it cannot begin in one granule and end in another.
    const uint32_t owner = address < cta.shared_end ? cta.owners[address / 16] : 0;
    if (owner == 0) {
        fail_at(w, i, lane, "an address outside of the arrays in shared memory");
    }
    const SharedArray& array = cta.arrays[owner - 1];
    if (address + bytes > array.begin + array.bytes) {
        fail_at(w, i, lane, "an address behind the end of an array in shared memory");
    }
    return cta.shared + address;
}

unsigned char* in_global(Warp& w, const Instruction& i, uint32_t lane, uint64_t address,
                         uint32_t bytes, bool generic) {
    if (address % bytes != 0) {
        fail_at(w, i, lane, "an address that is not aligned to the access (misaligned)");
    }
    auto* at = reinterpret_cast<unsigned char*>(address);
    if (!generic && at >= w.cta->shared && at < w.cta->shared + w.cta->shared_end) {
        fail_at(w, i, lane, "global memory that is shared memory");
    }
    return at;
}

enum class Space { shared, global, generic };

template <Space SPACE>
unsigned char* resolve(Warp& w, const Instruction& i, uint32_t lane, uint32_t bytes) {
    if constexpr (SPACE == Space::shared) {
        const auto offset = static_cast<uint32_t>(i.immediate);
        return in_shared(w, i, lane, w.row<uint32_t>(i.at[ADDRESS])[lane] + offset, bytes);
    } else {
        const auto offset = static_cast<uint64_t>(i.immediate);
        return in_global(w, i, lane, w.row<uint64_t>(i.at[ADDRESS])[lane] + offset, bytes,
                         SPACE == Space::generic);
    }
}

// What kernels before this one write must not be read, and nothing be written, before they have
// ended.
void must_have_waited(Warp& w, const Instruction& i) {
    if ((i.flags & EARLY) == 0 && (w.waited & w.mask) != w.mask) {
        const auto lane = static_cast<uint32_t>(__builtin_ctz(w.mask & ~w.waited));
        fail_at(w, i, lane, "memory is accessed before it has waited for the kernels before");
    }
}

// T in memory, R in registers; a T is as large as an R, or smaller and without a sign.
template <class T, class R, Space SPACE>
void read(Warp& w, const Instruction& i) {
    if (SPACE != Space::shared) {
        must_have_waited(w, i);
    }
    const uint32_t bytes = sizeof(T) * i.elements;
    in_order(w.mask, [&](uint32_t lane) {
        run_as(w, lane);
        const unsigned char* from = resolve<SPACE>(w, i, lane, bytes);
        if ((i.flags & NON_COHERENT) != 0) {
            never_written(w, i, lane, from, bytes);
        }
        T values[4];
        if ((i.flags & PEERS) != 0 && peer_memory != nullptr && peer_memory->is_exchanged(from)) {
            peer_memory->take(values, from);
        } else if ((i.flags & FLAG) != 0) {
            values[0] = load_flag<T>(from, (i.flags & ORDERED) != 0);
        } else {
            touch(from, bytes, Access::read, line_of(i));
            memcpy(values, from, bytes);
        }
        for (uint32_t e = 0; e < i.elements; e++) {
            w.row<R>(i.at[e])[lane] = values[e];
        }
    });
}

template <class T, class R, Space SPACE>
void write(Warp& w, const Instruction& i) {
    if (SPACE != Space::shared) {
        must_have_waited(w, i);
    }
    const uint32_t bytes = sizeof(T) * i.elements;
    in_order(w.mask, [&](uint32_t lane) {
        run_as(w, lane);
        unsigned char* to = resolve<SPACE>(w, i, lane, bytes);
        T values[4];
        for (uint32_t e = 0; e < i.elements; e++) {
            values[e] = static_cast<T>(w.row<R>(i.at[e])[lane]);
        }
        if (SPACE == Space::global) {
            is_written(w, i, lane, to, bytes);
        }
        if ((i.flags & PEERS) != 0 && peer_memory != nullptr && peer_memory->is_exchanged(to)) {
            peer_memory->push(to, values);
        } else if ((i.flags & FLAG) != 0) {
            store_flag<T>(to, values[0], (i.flags & ORDERED) != 0);
        } else {
            const bool same = (i.flags & ALIKE) != 0;
            touch(to, bytes, same ? Access::atomic : Access::write, line_of(i));
            memcpy(to, values, bytes);
        }
    });
}

template <class T, class R>
Execute executes(bool is_store, const std::string& space) {
    if (space == "shared") {
        return is_store ? write<T, R, Space::shared> : read<T, R, Space::shared>;
    }
    if (space == "global") {
        return is_store ? write<T, R, Space::global> : read<T, R, Space::global>;
    }
    return is_store ? write<T, R, Space::generic> : read<T, R, Space::generic>;
}

template <class R>
Execute executes(bool is_store, const std::string& space, uint32_t bytes) {
    switch (bytes) {
        case 1:
            return executes<uint8_t, R>(is_store, space);
        case 2:
            return executes<uint16_t, R>(is_store, space);
        case 4:
            return sizeof(R) >= 4 ? executes<uint32_t, R>(is_store, space) : nullptr;
        case 8:
            return sizeof(R) >= 8 ? executes<uint64_t, R>(is_store, space) : nullptr;
        default:
            return nullptr;
    }
}

template <Space SPACE, uint32_t (*F)(uint32_t, uint32_t)>
void atomic(Warp& w, const Instruction& i) {
    if (SPACE != Space::shared) {
        must_have_waited(w, i);
    }
    in_order(w.mask, [&](uint32_t lane) {
        run_as(w, lane);
        unsigned char* at = resolve<SPACE>(w, i, lane, 4);
        touch(at, 4, Access::atomic, line_of(i));
        if (SPACE == Space::global) {
            is_written(w, i, lane, at, 4);
        }
        uint32_t old;
        memcpy(&old, at, 4);
        const uint32_t value = F(old, w.row<uint32_t>(i.at[1])[lane]);
        memcpy(at, &value, 4);
        w.row<uint32_t>(i.at[0])[lane] = old;
    });
}
uint32_t atom_add(uint32_t a, uint32_t b) { return a + b; }
uint32_t atom_or(uint32_t a, uint32_t b) { return a | b; }
uint32_t atom_exch(uint32_t, uint32_t b) { return b; }

void perform(Warp& w, uint32_t lane, const Copy& copy) {
    run_as(w, lane);
    unsigned char* to = w.cta->shared + copy.to;
    const auto* from = reinterpret_cast<const void*>(uintptr_t{copy.line});
    touch(to, copy.bytes + copy.zeros, Access::write, from);
    memcpy(to, copy.from, copy.bytes);
    memset(to + copy.bytes, 0, copy.zeros);
}

// cp.async [shared], [global], cp-size, src-size: what is beyond src-size is filled with zeros, and
// nothing of it is read.
template <bool ONLY_L2>
void copy_async(Warp& w, const Instruction& i) {
    must_have_waited(w, i);
    in_order(w.mask, [&](uint32_t lane) {
        run_as(w, lane);
        const uint32_t bytes = w.row<uint32_t>(i.at[0])[lane];
        const uint32_t size = w.row<uint32_t>(i.at[1])[lane];
        if (bytes != 16 && (ONLY_L2 || (bytes != 8 && bytes != 4))) {
            fail_at(w, i, lane, "a size that cp.async does not have");
        }
        if (size > bytes) {
            fail_at(w, i, lane, "a source of cp.async that is larger than the copy");
        }
        const unsigned char* to = resolve<Space::shared>(w, i, lane, bytes);
        const uint64_t address = w.row<uint64_t>(i.at[FROM])[lane];
        const unsigned char* from = in_global(w, i, lane, address, bytes, false);
        if (size > 0) {
            touch(from, size, Access::read, line_of(i));
            // Faults here, not when it is waited for.
            static_cast<void>(*static_cast<const volatile unsigned char*>(from));
            static_cast<void>(static_cast<const volatile unsigned char*>(from)[size - 1]);
        }
        const Copy copy{static_cast<uint32_t>(to - w.cta->shared), from, size, bytes - size,
                        w.groups[lane], i.line};
        // From now on until it is waited for it may arrive.
        touch(to, bytes, Access::write, line_of(i));
        if (w.cta->copies_arrive_early) {
            perform(w, lane, copy);
        } else {
            w.copies[lane].push_back(copy);
        }
    });
}

void commit_group(Warp& w, const Instruction&) {
    in_order(w.mask, [&](uint32_t lane) { w.groups[lane]++; });
}

// Waits until at most so many of the newest groups are pending.
void wait_group(Warp& w, const Instruction& i) {
    in_order(w.mask, [&](uint32_t lane) {
        const uint32_t pending = w.row<uint32_t>(i.at[0])[lane];
        const uint32_t groups = w.groups[lane];
        auto& copies = w.copies[lane];
        const auto is_complete = [&](const Copy& copy) { return copy.group + pending < groups; };
        for (const Copy& copy : copies) {
            if (is_complete(copy)) {
                perform(w, lane, copy);
            }
        }
        copies.erase(std::remove_if(copies.begin(), copies.end(), is_complete), copies.end());
    });
}

// "Operand size must be a multiple of 16; the address must be aligned to 16 bytes."
void prefetch(Warp& w, const Instruction& i) {
    in_order(w.mask, [&](uint32_t lane) {
        run_as(w, lane);
        const uint32_t bytes = w.row<uint32_t>(i.at[0])[lane];
        const volatile unsigned char* at = resolve<Space::global>(w, i, lane, 16);
        if (bytes % 16 != 0 || bytes == 0) {
            fail_at(w, i, lane, "a prefetch that is not of whole 16 bytes");
        }
        static_cast<void>(at[0]);
        static_cast<void>(at[bytes - 1]);
    });
}

void wait_for_kernels_before(Warp& w, const Instruction&) {
    w.waited |= w.mask;
    if (may_write && !w.cta->is_free) {
        w.cta->is_free = true;
        may_write(true);
    }
}
void let_the_next_kernel_begin(Warp& w, const Instruction&) {
    if (peer_memory != nullptr) {
        in_order(w.mask, [&](uint32_t lane) {
            run_as(w, lane);
            peer_memory->released();
        });
    }
}

// The words between dots.
std::vector<std::string> words_of(const std::string& opcode) {
    std::vector<std::string> words;
    size_t begin = 0;
    for (size_t i = 0; i <= opcode.size(); i++) {
        // L1::no_allocate and the like are one.
        if (i == opcode.size() || opcode[i] == '.') {
            words.push_back(opcode.substr(begin, i - begin));
            begin = i + 1;
        }
    }
    return words;
}

}  // namespace

const unsigned char* row_of_matrix(Warp& w, const Instruction& i, uint32_t lane) {
    const unsigned char* from = resolve<Space::shared>(w, i, lane, 16);
    touch(from, 16, Access::read, line_of(i));
    return from;
}

AccessForm access_named(const std::string& opcode, char width) {
    std::vector<std::string> words = words_of(opcode);
    AccessForm form;
    form.is_store = words[0] == "st";
    size_t at = 1;
    const auto next_is = [&](const char* word) {
        const bool is = at < words.size() && words[at] == word;
        at += is ? 1 : 0;
        return is;
    };
    // In the order of the grammar.
    if (next_is("relaxed")) {
        if (next_is("gpu") && !form.is_store) {
            form.flags |= EARLY;
        } else if (next_is("sys")) {
            form.flags |= FLAG;
        } else if (next_is("cta") && form.is_store) {
            form.flags |= ALIKE;
        } else {
            return {};
        }
    } else if (next_is(form.is_store ? "release" : "acquire")) {
        if (!next_is("sys")) {
            return {};
        }
        form.flags |= FLAG | ORDERED;
    }
    const std::string space = next_is("shared") ? "shared" : next_is("global") ? "global" : "";
    if (next_is("cg") && !form.is_store) {
        form.flags |= PEERS;
    }
    if (space == "global" && !form.is_store && next_is("nc")) {
        form.flags |= NON_COHERENT | EARLY;
    }
    if (space == "global") {
        next_is("L1::no_allocate");
        next_is("L2::128B");
    }
    form.elements = next_is("v2") ? 2 : next_is("v4") ? 4 : 1;
    if (at + 1 != words.size()) {
        return {};
    }
    const std::string& type = words[at];
    const uint32_t bytes = type == "u8"                     ? 1
                           : type == "u16"                  ? 2
                           : type == "u32" || type == "f32" ? 4
                           : type == "u64" || type == "f64" ? 8
                                                            : 0;
    if (opcode == "st.global.v4.f32") {
        form.flags |= PEERS;
    }
    if ((form.flags & FLAG) != 0 && (form.elements != 1 || (bytes != 4 && bytes != 8))) {
        return {};
    }
    form.width = space == "shared" ? 'w' : 'q';
    form.kind = (form.flags & (FLAG | PEERS)) != 0 ? Kind::yielding : Kind::plain;
    form.execute = width == 'h'   ? executes<uint16_t>(form.is_store, space, bytes)
                   : width == 'w' ? executes<uint32_t>(form.is_store, space, bytes)
                                  : executes<uint64_t>(form.is_store, space, bytes);
    return form;
}

const std::vector<WarpForm>& memory_instructions() {
    static const std::vector<WarpForm> all = {
        {"atom.shared.add.u32", "waw", atomic<Space::shared, atom_add>, Kind::plain},
        {"atom.global.add.u32", "wAw", atomic<Space::global, atom_add>, Kind::plain},
        {"atom.global.or.b32", "wAw", atomic<Space::global, atom_or>, Kind::plain},
        {"atom.global.exch.b32", "wAw", atomic<Space::global, atom_exch>, Kind::plain},
        {"cp.async.cg.shared.global", "aGww", copy_async<true>, Kind::plain},
        {"cp.async.ca.shared.global", "aGww", copy_async<false>, Kind::plain},
        {"cp.async.commit_group", "", commit_group, Kind::plain},
        {"cp.async.wait_group", "w", wait_group, Kind::plain},
        {"cp.async.bulk.prefetch.L2.global", "Aw", prefetch, Kind::plain},
        {"griddepcontrol.wait", "", wait_for_kernels_before, Kind::plain},
        {"griddepcontrol.launch_dependents", "", let_the_next_kernel_begin, Kind::plain},
    };
    return all;
}

}  // namespace emulate::ptx
