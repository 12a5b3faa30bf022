// cvt, and numbers in halves.
#include <cmath>

#include "machine.h"
#include "numbers.h"
#include "rows.h"

namespace emulate::ptx {
namespace {

template <class D, class A>
D convert(A a) {
    return static_cast<D>(a);
}
uint32_t pack(float a, float b) { return static_cast<uint32_t>(to_bf16(a)) << 16 | to_bf16(b); }
// "Clamps to [0.0, 1.0]; NaN becomes +0."
float saturate(float a) { return a >= 1.0f ? 1.0f : a > 0.0f ? a : 0.0f; }
double up(double a) { return std::ceil(a); }

// "For packing, the first is the lower": a pair of registers in braces.
void pack_64(Warp& w, const Instruction& i) {
    uint64_t* d = w.row<uint64_t>(i.at[0]);
    const uint32_t *a = w.row<uint32_t>(i.at[1]), *b = w.row<uint32_t>(i.at[2]);
    each(w.mask, [&](uint32_t lane) { d[lane] = uint64_t{b[lane]} << 32 | a[lane]; });
}
void unpack_64(Warp& w, const Instruction& i) {
    uint32_t *d = w.row<uint32_t>(i.at[0]), *e = w.row<uint32_t>(i.at[1]);
    const uint64_t* a = w.row<uint64_t>(i.at[2]);
    each(w.mask, [&](uint32_t lane) {
        d[lane] = static_cast<uint32_t>(a[lane]);
        e[lane] = static_cast<uint32_t>(a[lane] >> 32);
    });
}

}  // namespace

const std::vector<Form>& conversions() {
    static const std::vector<Form> all = {
        {"mov.b64.pack", "q{ww}", pack_64},
        {"mov.b64.unpack", "{ww}q", unpack_64},
        {"cvt.u64.u32", "qw", map<convert<uint64_t, uint32_t>>},
        {"cvt.u64.u16", "qh", map<convert<uint64_t, uint16_t>>},
        {"cvt.u32.u64", "wq", map<convert<uint32_t, uint64_t>>},
        {"cvt.u32.u16", "wh", map<convert<uint32_t, uint16_t>>},
        {"cvt.u16.u32", "hw", map<convert<uint16_t, uint32_t>>},
        {"cvt.f64.f32", "qw", map<convert<double, float>>},
        {"cvt.rn.f32.f64", "wq", map<convert<float, double>>},
        {"cvt.rn.f32.u32", "ww", map<convert<float, uint32_t>>},
        {"cvt.rn.f32.s32", "ww", map<convert<float, int32_t>>},
        {"cvt.rn.f32.u64", "wq", map<convert<float, uint64_t>>},
        {"cvt.rn.f64.u64", "qq", map<convert<double, uint64_t>>},
        {"cvt.rzi.u32.f32", "ww", map<to_unsigned<uint32_t, float>>},
        {"cvt.rzi.u64.f32", "qw", map<to_unsigned<uint64_t, float>>},
        {"cvt.rzi.u64.f64", "qq", map<to_unsigned<uint64_t, double>>},
        {"cvt.rpi.f64.f64", "qq", map<up>},
        {"cvt.sat.f32.f32", "ww", map<saturate>},
        {"cvt.rn.bf16.f32", "hw", map<to_bf16>},
        {"cvt.rn.bf16x2.f32", "www", map<pack>},
    };
    return all;
}

}  // namespace emulate::ptx
