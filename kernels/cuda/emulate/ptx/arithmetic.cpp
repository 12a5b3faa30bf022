// Integers, bits, predicates and comparisons; f32, f64 and bf16.
#include <cmath>
#include <limits>

#include "machine.h"
#include "numbers.h"
#include "rows.h"

namespace emulate::ptx {
namespace {

using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;
using f32 = float;
using f64 = double;

// Integers wrap around: everything is computed without a sign.
template <class T> T add(T a, T b) { return static_cast<T>(a + b); }
template <class T> T sub(T a, T b) { return static_cast<T>(a - b); }
template <class T> T mul(T a, T b) { return static_cast<T>(a * b); }
u16 mul_u16(u16 a, u16 b) { return static_cast<u16>(u32{a} * b); }
template <class T> T mad(T a, T b, T c) { return static_cast<T>(a * b + c); }
u64 mul_wide(u32 a, u32 b) { return u64{a} * b; }
u32 mul_wide_16(u16 a, u16 b) { return u32{a} * b; }
u32 mul_hi(u32 a, u32 b) { return static_cast<u32>(u64{a} * b >> 32); }
u64 mul_hi_64(u64 a, u64 b) {
    return static_cast<u64>(static_cast<unsigned __int128>(a) * b >> 64);
}
u32 neg(u32 a) { return 0 - a; }
// "Division by zero yields an unspecified, machine-specific value."
template <class T> T div(T a, T b) { return b == 0 ? static_cast<T>(~T{0}) : a / b; }
template <class T> T rem(T a, T b) { return b == 0 ? a : a % b; }
template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }

template <class T> T bits_and(T a, T b) { return a & b; }
template <class T> T bits_or(T a, T b) { return a | b; }
template <class T> T bits_xor(T a, T b) { return a ^ b; }
template <class T> T bits_not(T a) { return static_cast<T>(~a); }
// "Shift amounts greater than the register width N are clamped to N."
template <class T> T shl(T a, u32 by) {
    return by >= 8 * sizeof(T) ? T{0} : static_cast<T>(a << by);
}
template <class T> T shr(T a, u32 by) {
    return by >= 8 * sizeof(T) ? T{0} : static_cast<T>(a >> by);
}
s32 shr_signed(s32 a, u32 by) { return a >> (by > 31 ? 31 : by); }
u32 clz(u32 a) { return a == 0 ? 32 : static_cast<u32>(__builtin_clz(a)); }
u32 popc(u32 a) { return static_cast<u32>(__builtin_popcount(a)); }
u32 brev(u32 a) {
    u32 d = 0;
    for (int i = 0; i < 32; i++) {
        d |= (a >> i & 1) << (31 - i);
    }
    return d;
}
// "The shift amount needed to left-shift the found bit into the most-significant bit position."
u32 bfind_shiftamt(u32 a) { return a == 0 ? ~u32{0} : static_cast<u32>(__builtin_clz(a)); }
template <class T> T bfi(T a, T b, u32 c, u32 d) {
    const u32 msb = 8 * sizeof(T) - 1;
    const u32 position = c & 0xff, length = d & 0xff;
    T f = b;
    for (u32 i = 0; i < length && position + i <= msb; i++) {
        const T bit = T{1} << (position + i);
        f = (f & ~bit) | (a >> i & 1 ? bit : T{0});
    }
    return f;
}
// The default mode: bits 0 to 2 of each of 4 digits pick a byte of {b, a}, bit 3 spreads its sign.
u32 prmt(u32 a, u32 b, u32 c) {
    const u64 bytes = u64{b} << 32 | a;
    u32 d = 0;
    for (u32 i = 0; i < 4; i++) {
        const u32 selector = c >> (4 * i);
        u32 byte = static_cast<u32>(bytes >> (8 * (selector & 7))) & 0xff;
        byte = (selector & 8) != 0 ? ((byte & 0x80) != 0 ? 0xffu : 0u) : byte;
        d |= byte << (8 * i);
    }
    return d;
}
// Bits of a, b and c are an index (a's the highest) into the table's bits.
u32 lop3(u32 a, u32 b, u32 c, u32 table) {
    u32 d = 0;
    for (int i = 0; i < 32; i++) {
        const u32 index = (a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1);
        d |= (table >> index & 1) << i;
    }
    return d;
}

template <class T> T same(T a) { return a; }

f32 fadd(f32 a, f32 b) { return a + b; }
f32 fsub(f32 a, f32 b) { return a - b; }
f32 fmul(f32 a, f32 b) { return a * b; }
f32 fdiv(f32 a, f32 b) { return a / b; }
f32 ffma(f32 a, f32 b, f32 c) { return std::fma(a, b, c); }
f32 fused_sub(f32 a, f32 b, f32 c) { return std::fma(a, b, -c); }
f32 fused_negated(f32 a, f32 b, f32 c) { return std::fma(-a, b, c); }
f32 frcp(f32 a) { return 1.0f / a; }
f32 fsqrt(f32 a) { return std::sqrt(a); }
f64 dadd(f64 a, f64 b) { return a + b; }
f64 dsub(f64 a, f64 b) { return a - b; }
f64 dmul(f64 a, f64 b) { return a * b; }
f64 ddiv(f64 a, f64 b) { return a / b; }
f64 dfma(f64 a, f64 b, f64 c) { return std::fma(a, b, c); }

u32 fneg(u32 a) { return a ^ 0x80000000u; }
u32 fabs_bits(u32 a) { return a & 0x7fffffffu; }
u64 dneg(u64 a) { return a ^ 0x8000000000000000u; }
// "Copies the sign bit of a into the value of b."
u32 copysign_bits(u32 a, u32 b) { return (a & 0x80000000u) | (b & 0x7fffffffu); }

// Of a number and NaN the number; +0.0 > -0.0.
f32 fmin_ptx(f32 a, f32 b) {
    if (a == b) {
        return std::signbit(a) ? a : b;
    }
    return a != a ? (b != b ? canonical_nan() : b) : (b != b ? a : (a < b ? a : b));
}
f32 fmax_ptx(f32 a, f32 b) {
    if (a == b) {
        return std::signbit(a) ? b : a;
    }
    return a != a ? (b != b ? canonical_nan() : b) : (b != b ? a : (a < b ? b : a));
}

f32 ex2_approx_ftz(f32 a) { return flushed(std::exp2(flushed(a))); }
f32 rcp_approx_ftz(f32 a) { return flushed(1.0f / flushed(a)); }
// Only the upper words of operand and result count.
f64 rcp_approx_ftz_f64(f64 a) {
    constexpr u64 UPPER = 0xffffffff00000000u;
    const f64 upper = of_bits<f64>(bits_of<u64>(a) & UPPER);
    const f64 operand = std::fpclassify(upper) == FP_SUBNORMAL ? std::copysign(0.0, upper) : upper;
    const f64 result = of_bits<f64>(bits_of<u64>(1.0 / operand) & UPPER);
    return std::fpclassify(result) == FP_SUBNORMAL ? std::copysign(0.0, result) : result;
}

template <class T> bool eq(T a, T b) { return a == b; }
template <class T> bool ne(T a, T b) { return a != b; }
template <class T> bool lt(T a, T b) { return a < b; }
template <class T> bool le(T a, T b) { return a <= b; }
template <class T> bool gt(T a, T b) { return a > b; }
template <class T> bool ge(T a, T b) { return a >= b; }
// Of floating point: `ne` is false for NaN, and what ends in u is true for it.
template <class T> bool num(T a, T b) { return a == a && b == b; }
template <class T> bool neu(T a, T b) { return !(a == b); }
template <class T> bool ltu(T a, T b) { return !(a >= b); }
template <class T> bool leu(T a, T b) { return !(a > b); }
template <class T> bool gtu(T a, T b) { return !(a <= b); }
template <class T> bool geu(T a, T b) { return !(a < b); }

}  // namespace

const std::vector<Form>& arithmetic() {
    static const std::vector<Form> all = {
        {"mov.b16", "hh", map<same<u16>>},
        {"mov.u16", "hh", map<same<u16>>},
        {"mov.b32", "ww", map<same<u32>>},
        {"mov.u32", "ww", map<same<u32>>},
        {"mov.s32", "ww", map<same<u32>>},
        {"mov.f32", "ww", map<same<u32>>},
        {"mov.b64", "qq", map<same<u64>>},
        {"mov.u64", "qq", map<same<u64>>},
        {"mov.f64", "qq", map<same<u64>>},
        {"mov.pred", "pp", predicates<same<u32>>},
        // Generic addresses are those of the host, and so are those of global memory.
        {"cvta.to.global.u64", "qq", map<same<u64>>},

        {"add.s16", "hhh", map<add<u16>>},
        {"add.s32", "www", map<add<u32>>},
        {"add.s64", "qqq", map<add<u64>>},
        {"sub.s16", "hhh", map<sub<u16>>},
        {"sub.s32", "www", map<sub<u32>>},
        {"sub.s64", "qqq", map<sub<u64>>},
        {"mul.lo.s16", "hhh", map<mul_u16>},
        {"mul.lo.s32", "www", map<mul<u32>>},
        {"mul.lo.s64", "qqq", map<mul<u64>>},
        {"mul.hi.u32", "www", map<mul_hi>},
        {"mul.hi.u64", "qqq", map<mul_hi_64>},
        {"mul.wide.u32", "qww", map<mul_wide>},
        {"mul.wide.u16", "whh", map<mul_wide_16>},
        {"mad.lo.s32", "wwww", map<mad<u32>>},
        {"neg.s32", "ww", map<neg>},
        {"div.u32", "www", map<div<u32>>},
        {"div.u64", "qqq", map<div<u64>>},
        {"rem.u32", "www", map<rem<u32>>},
        {"rem.u64", "qqq", map<rem<u64>>},
        {"min.u32", "www", map<min<u32>>},
        {"min.s32", "www", map<min<s32>>},
        {"min.u64", "qqq", map<min<u64>>},
        {"max.u32", "www", map<max<u32>>},
        {"max.s32", "www", map<max<s32>>},
        {"max.u64", "qqq", map<max<u64>>},

        {"and.b16", "hhh", map<bits_and<u16>>},
        {"and.b32", "www", map<bits_and<u32>>},
        {"and.b64", "qqq", map<bits_and<u64>>},
        {"and.pred", "ppp", predicates<bits_and<u32>>},
        {"or.b16", "hhh", map<bits_or<u16>>},
        {"or.b32", "www", map<bits_or<u32>>},
        {"or.b64", "qqq", map<bits_or<u64>>},
        {"or.pred", "ppp", predicates<bits_or<u32>>},
        {"xor.b32", "www", map<bits_xor<u32>>},
        {"xor.b64", "qqq", map<bits_xor<u64>>},
        {"xor.pred", "ppp", predicates<bits_xor<u32>>},
        {"not.b32", "ww", map<bits_not<u32>>},
        {"not.b64", "qq", map<bits_not<u64>>},
        {"not.pred", "pp", predicates<bits_not<u32>>},
        {"shl.b16", "hhw", map<shl<u16>>},
        {"shl.b32", "www", map<shl<u32>>},
        {"shl.b64", "qqw", map<shl<u64>>},
        {"shr.u16", "hhw", map<shr<u16>>},
        {"shr.u32", "www", map<shr<u32>>},
        {"shr.u64", "qqw", map<shr<u64>>},
        {"shr.s32", "www", map<shr_signed>},
        {"clz.b32", "ww", map<clz>},
        {"popc.b32", "ww", map<popc>},
        {"brev.b32", "ww", map<brev>},
        {"bfind.shiftamt.u32", "ww", map<bfind_shiftamt>},
        {"bfi.b32", "wwwww", map<bfi<u32>>},
        {"bfi.b64", "qqqww", map<bfi<u64>>},
        {"prmt.b32", "wwww", map<prmt>},
        {"lop3.b32", "wwwww", map<lop3>},

        {"selp.b16", "hhhp", select<u16>},
        {"selp.u16", "hhhp", select<u16>},
        {"selp.b32", "wwwp", select<u32>},
        {"selp.u32", "wwwp", select<u32>},
        {"selp.s32", "wwwp", select<u32>},
        {"selp.f32", "wwwp", select<u32>},
        {"selp.b64", "qqqp", select<u64>},
        {"selp.u64", "qqqp", select<u64>},
        {"selp.f64", "qqqp", select<u64>},

        {"setp.eq.b32", "pww", compare<eq<u32>>},
        {"setp.eq.b64", "pqq", compare<eq<u64>>},
        {"setp.eq.s16", "phh", compare<eq<u16>>},
        {"setp.ne.s16", "phh", compare<ne<u16>>},
        {"setp.eq.s32", "pww", compare<eq<u32>>},
        {"setp.ne.s32", "pww", compare<ne<u32>>},
        {"setp.eq.u32", "pww", compare<eq<u32>>},
        {"setp.ne.u32", "pww", compare<ne<u32>>},
        {"setp.lt.u32", "pww", compare<lt<u32>>},
        {"setp.le.u32", "pww", compare<le<u32>>},
        {"setp.gt.u32", "pww", compare<gt<u32>>},
        {"setp.ge.u32", "pww", compare<ge<u32>>},
        {"setp.lt.s32", "pww", compare<lt<s32>>},
        {"setp.le.s32", "pww", compare<le<s32>>},
        {"setp.gt.s32", "pww", compare<gt<s32>>},
        {"setp.ge.s32", "pww", compare<ge<s32>>},
        {"setp.eq.s64", "pqq", compare<eq<u64>>},
        {"setp.ne.s64", "pqq", compare<ne<u64>>},
        {"setp.lt.u64", "pqq", compare<lt<u64>>},
        {"setp.le.u64", "pqq", compare<le<u64>>},
        {"setp.gt.u64", "pqq", compare<gt<u64>>},
        {"setp.ge.u64", "pqq", compare<ge<u64>>},
        {"setp.eq.f32", "pww", compare<eq<f32>>},
        {"setp.lt.f32", "pww", compare<lt<f32>>},
        {"setp.le.f32", "pww", compare<le<f32>>},
        {"setp.gt.f32", "pww", compare<gt<f32>>},
        {"setp.ge.f32", "pww", compare<ge<f32>>},
        {"setp.neu.f32", "pww", compare<neu<f32>>},
        {"setp.ltu.f32", "pww", compare<ltu<f32>>},
        {"setp.leu.f32", "pww", compare<leu<f32>>},
        {"setp.gtu.f32", "pww", compare<gtu<f32>>},
        {"setp.geu.f32", "pww", compare<geu<f32>>},
        {"setp.num.f32", "pww", compare<num<f32>>},
        {"setp.lt.f64", "pqq", compare<lt<f64>>},
        {"setp.gt.f64", "pqq", compare<gt<f64>>},
        {"setp.leu.f64", "pqq", compare<leu<f64>>},

        // Without .rn an assembler may fuse a product and a sum: `Parser::fuse`.
        {"add.f32", "www", map<fadd>},
        {"fused.add", "wwww", map<ffma>},
        {"fused.sub", "wwww", map<fused_sub>},
        {"fused.negated", "wwww", map<fused_negated>},
        {"add.rn.f32", "www", map<fadd>},
        {"add.rm.f32", "www", map<add_down>},
        {"add.rz.f32", "www", map<add_to_zero>},
        {"sub.f32", "www", map<fsub>},
        {"sub.rn.f32", "www", map<fsub>},
        {"mul.f32", "www", map<fmul>},
        {"mul.rn.f32", "www", map<fmul>},
        {"fma.rn.f32", "wwww", map<ffma>},
        {"fma.rm.f32", "wwww", map<fma_down>},
        {"div.rn.f32", "www", map<fdiv>},
        {"rcp.rn.f32", "ww", map<frcp>},
        {"rcp.approx.ftz.f32", "ww", map<rcp_approx_ftz>},
        {"sqrt.rn.f32", "ww", map<fsqrt>},
        {"ex2.approx.ftz.f32", "ww", map<ex2_approx_ftz>},
        {"neg.f32", "ww", map<fneg>},
        {"abs.f32", "ww", map<fabs_bits>},
        {"copysign.f32", "www", map<copysign_bits>},
        {"min.f32", "www", map<fmin_ptx>},
        {"max.f32", "www", map<fmax_ptx>},
        {"add.f64", "qqq", map<dadd>},
        {"add.rn.f64", "qqq", map<dadd>},
        {"sub.f64", "qqq", map<dsub>},
        {"mul.f64", "qqq", map<dmul>},
        {"mul.rn.f64", "qqq", map<dmul>},
        {"div.rn.f64", "qqq", map<ddiv>},
        {"fma.rn.f64", "qqqq", map<dfma>},
        {"neg.f64", "qq", map<dneg>},
        {"rcp.approx.ftz.f64", "qq", map<rcp_approx_ftz_f64>},
        {"fma.rn.bf16x2", "wwww", map<fma_bf16x2>},
    };
    return all;
}

}  // namespace emulate::ptx
