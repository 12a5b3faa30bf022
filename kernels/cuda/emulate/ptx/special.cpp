// See special.h.
#include "special.h"

#include "flags.h"

namespace emulate::ptx {
namespace {

template <class T>
void load_parameter(Warp& w, const Instruction& i) {
    const uint64_t value = w.cta->arguments[i.immediate];
    T* d = w.row<T>(i.at[0]);
    each(w.mask, [&](uint32_t lane) { d[lane] = static_cast<T>(value); });
}

void tid_x(Warp& w, const Instruction& i) {
    uint32_t* d = w.row<uint32_t>(i.at[0]);
    each(w.mask, [&](uint32_t lane) { d[lane] = w.first_thread + lane; });
}

template <uint32_t dim3::*WHICH, dim3& (*OF)()>
void same_for_all(Warp& w, const Instruction& i) {
    const uint32_t value = OF().*WHICH;
    uint32_t* d = w.row<uint32_t>(i.at[0]);
    each(w.mask, [&](uint32_t lane) { d[lane] = value; });
}
dim3& ctaid() { return block_index; }
dim3& nctaid() { return grid_size; }
dim3& ntid() { return block_size; }

void globaltimer(Warp& w, const Instruction& i) {
    in_order(w.mask, [&](uint32_t lane) {
        run_as(w, lane);
        w.row<uint64_t>(i.at[0])[lane] = now_in_nanoseconds();
    });
}

}  // namespace

Execute parameter(const std::string& type, char width) {
    if (type == "u64" && width == 'q') {
        return load_parameter<uint64_t>;
    }
    return (type == "u32" || type == "f32") && width == 'w' ? load_parameter<uint32_t> : nullptr;
}

Execute special_register(const std::string& opcode, const std::string& name) {
    if (opcode == "mov.u64") {
        return name == "%globaltimer" ? globaltimer : nullptr;
    }
    if (opcode != "mov.u32") {
        return nullptr;
    }
    static const std::map<std::string, Execute> all = {
        {"%tid.x", tid_x},
        {"%ntid.x", same_for_all<&dim3::x, ntid>},
        {"%ctaid.x", same_for_all<&dim3::x, ctaid>},
        {"%ctaid.y", same_for_all<&dim3::y, ctaid>},
        {"%ctaid.z", same_for_all<&dim3::z, ctaid>},
        {"%nctaid.x", same_for_all<&dim3::x, nctaid>},
        {"%nctaid.y", same_for_all<&dim3::y, nctaid>},
        {"%nctaid.z", same_for_all<&dim3::z, nctaid>},
    };
    const auto found = all.find(name);
    return found != all.end() ? found->second : nullptr;
}

}  // namespace emulate::ptx
