// Rounding, beyond what the host's arithmetic does.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulate::ptx {

template <class To, class From>
inline To of_bits(From bits) {
    static_assert(sizeof(To) == sizeof(From));
    To value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
template <class To, class From>
inline To bits_of(From value) {
    return of_bits<To>(value);
}

inline float canonical_nan() { return of_bits<float>(0x7fffffffu); }

// .ftz: subnormal numbers become zero of the same sign.
inline float flushed(float a) {
    const uint32_t bits = bits_of<uint32_t>(a);
    return (bits & 0x7f800000u) == 0 ? of_bits<float>(bits & 0x80000000u) : a;
}

// a + b in f64, and what rounding has taken from it: 0 if nothing.
struct Sum {
    double value, error;
};
inline Sum exact_sum(double a, double b) {
    const double sum = a + b;
    const double part = sum - a;
    return {sum, (a - (sum - part)) + (b - part)};
}

// a b + c, rounded down: the product is exact in f64.
inline float fma_down(float a, float b, float c) {
    const double product = static_cast<double>(a) * b;
    const Sum sum = exact_sum(product, c);
    if (sum.value == 0 && sum.error == 0) {
        // Opposites add up to -0; zeros of one sign keep it.
        return product == 0 && !std::signbit(product) && !std::signbit(c) ? 0.0f : -0.0f;
    }
    const double down = sum.error < 0 ? std::nextafter(sum.value, -INFINITY) : sum.value;
    const float nearest = static_cast<float>(down);
    return static_cast<double>(nearest) > down ? std::nextafterf(nearest, -INFINITY) : nearest;
}
inline float add_down(float a, float b) { return fma_down(a, 1.0f, b); }
// Rounded towards zero. A sum that is zero is exact.
inline float add_to_zero(float a, float b) {
    const float nearest = a + b;
    if (nearest > 0) {
        return add_down(a, b);
    }
    return nearest < 0 ? -add_down(-a, -b) : nearest;
}

// To nearest, ties to even; "NaN results are canonical".
inline uint16_t to_bf16(float a) {
    const uint32_t bits = bits_of<uint32_t>(a);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return 0x7fff;
    }
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float of_bf16(uint32_t bits) { return of_bits<float>(bits << 16); }

// Rounded once: to odd on the way from f64, so that the last rounding sees that there was more.
inline uint16_t fma_bf16(uint32_t a, uint32_t b, uint32_t c) {
    const Sum sum = exact_sum(static_cast<double>(of_bf16(a)) * of_bf16(b), of_bf16(c));
    const auto odd_f64 = [&] {
        uint64_t bits = bits_of<uint64_t>(sum.value);
        if (sum.error == 0 || sum.error != sum.error || (bits & 1) != 0) {
            return sum.value;
        }
        const bool away = (sum.error > 0) == (sum.value > 0);
        return of_bits<double>(away ? bits + 1 : bits - 1);
    }();
    float narrow = static_cast<float>(odd_f64);
    const double back = narrow;
    uint32_t bits = bits_of<uint32_t>(narrow);
    if (back != odd_f64 && back == back && !std::isinf(narrow) && (bits & 1) == 0) {
        const bool away = std::fabs(back) < std::fabs(odd_f64);
        narrow = of_bits<float>(away ? bits + 1 : bits - 1);
    }
    return to_bf16(narrow);
}
inline uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    const uint32_t low = fma_bf16(a & 0xffff, b & 0xffff, c & 0xffff);
    return static_cast<uint32_t>(fma_bf16(a >> 16, b >> 16, c >> 16)) << 16 | low;
}

// "Float-to-integer conversions are clamped to the destination's range"; NaN becomes 0, or, of f64
// or to 64 bits, the upper bit alone.
template <class To, class From>
inline To to_unsigned(From a) {
    if (a != a) {
        return sizeof(From) == 8 || sizeof(To) == 8 ? To{1} << (8 * sizeof(To) - 1) : To{0};
    }
    const From whole = std::trunc(a);
    const From end = std::ldexp(From{1}, 8 * sizeof(To));
    return whole <= 0 ? To{0} : whole >= end ? static_cast<To>(~To{0}) : static_cast<To>(whole);
}

}  // namespace emulate::ptx
