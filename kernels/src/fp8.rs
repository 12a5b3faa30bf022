//! PURE: FP8 as KV caches store it: E4M3 without infinities (OCP's, PyTorch's `e4m3fn`), the same
//! values on every backend.
//!
//! Rounding is to the nearest value, ties to even. Finite numbers beyond the largest value, 448,
//! become that: they never become NaN. What is not finite becomes NaN, so that a corrupted request
//! does not look like a sound one.
use crate::weights;
use crate::weights::DType;

/// The largest finite value.
const LARGEST: f32 = 448.0;
/// Numbers below this are multiples of 2^-9.
const SMALLEST_NORMAL: f32 = 1.0 / 64.0;
/// The byte of NaN, without its sign.
const NAN: u8 = 0x7f;

/// The byte of the nearest value. Has no branches, so that loops over it vectorise.
#[must_use]
#[inline(always)]
pub fn to_byte(x: f32) -> u8 {
    let sign = (x.to_bits() >> 24) as u8 & 0x80;
    let clamped = if x.abs() > LARGEST { LARGEST } else { x.abs() };
    // Adding a number whose last place is worth 2^-9 rounds to multiples of that.
    const UNIT: f32 = 16384.0;
    let small = (clamped + UNIT).to_bits().wrapping_sub(UNIT.to_bits());
    // Keeps 3 bits of mantissa; the exponent's bias is 7 instead of 127.
    let bits = clamped.to_bits();
    let rounded = (bits + 0x7_ffff + (bits >> 20 & 1)) >> 20;
    let large = rounded.wrapping_sub(120 << 3);
    let magnitude = if clamped < SMALLEST_NORMAL { small } else { large };
    let magnitude = if x.is_finite() { magnitude as u8 } else { NAN };
    sign | magnitude
}

/// The value of a byte.
#[must_use]
pub fn from_byte(byte: u8) -> f32 {
    let mut value = [0.0];
    weights::widen(DType::F8E4M3, &[byte], &mut value);
    value[0]
}

/// The nearest value.
#[must_use]
pub fn rounded(x: f32) -> f32 {
    from_byte(to_byte(x))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The nearest value by search: the exact distance decides, then the even byte.
    fn nearest(x: f32) -> u8 {
        let sign = if x.is_sign_negative() { 0x80 } else { 0 };
        if !x.is_finite() {
            return sign | NAN;
        }
        // Far beyond the largest, differences of distances would be lost.
        let x = f64::from(x.abs()).min(1e6);
        let distance = |byte: u8| (f64::from(from_byte(byte)) - x).abs();
        let best = |a: u8, b: u8| {
            let (near, far) = (distance(a), distance(b));
            if near < far || (near == far && a.is_multiple_of(2)) { a } else { b }
        };
        sign | (0..NAN).fold(0, best)
    }

    #[test]
    fn numbers_become_the_nearest_value() {
        let mut all = vec![0.0, 1e-45, 2f32.powi(-10), 449.0, 464.0, 465.0, 1e30, f32::MAX];
        all.extend([f32::INFINITY, f32::NAN]);
        for byte in 0..NAN {
            let (value, next) = (from_byte(byte), from_byte(byte.min(NAN - 2) + 1));
            let middle = (value + next) / 2.0;
            all.extend([value, middle, middle.next_up(), middle.next_down(), value.next_up()]);
        }
        let mut bits = 1u32;
        for _ in 0..20_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            all.push(f32::from_bits(bits));
        }
        for x in all.into_iter().flat_map(|x| [x, -x]) {
            assert_eq!(to_byte(x), nearest(x), "{x:e}");
        }
    }

    #[test]
    fn values_stay_and_finite_numbers_stay_finite() {
        for byte in 0..=255u8 {
            assert_eq!(to_byte(from_byte(byte)), byte, "{byte:#x}");
        }
        assert_eq!(rounded(-1e9), -448.0);
        assert!(rounded(f32::NEG_INFINITY).is_nan());
        assert_eq!(rounded(0.1).to_bits(), 0.101_562_5f32.to_bits());
    }
}
