//! Scalar functions and sums that compilers vectorise, with a fixed order of operations.
//!
//! They use neither fused operations nor the C library, so they give the same bits everywhere.

/// Lanes of sums in fixed order.
pub(crate) const LANES: usize = 16;

/// `e^x`, accurate to about 2 units in the last place. 0 below -87.33 (where f32 becomes
/// subnormal); above 88.0 the value at 88.0, which is near the largest f32; NaN for NaN.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits.
    const MAGIC: f32 = 12_582_912.0;
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    // Comparisons that are false for NaN, so that NaN is kept.
    let clamped = if x > 88.0 { 88.0 } else { x };
    let shifted = clamped * std::f32::consts::LOG2_E + MAGIC;
    let n = shifted - MAGIC;
    let r = (clamped - n * LN2_HI) - n * LN2_LO;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    p = p * r * r + r + 1.0;
    let two_to_n = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    if x < -87.33 { 0.0 } else { p * two_to_n }
}

/// The nearest bf16 (ties to even), as the bits of an f32 with a zero low half.
#[inline(always)]
pub(crate) fn round_bf16(x: f32) -> u32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1));
    // Rounding up must not turn a NaN into an infinity, or overflow its bits.
    (if x.is_nan() { bits | 0x0040_0000 } else { rounded }) & 0xFFFF_0000
}

/// Two elements rounded to bf16, in one word: the first in the low half.
#[inline(always)]
pub(crate) fn bf16_pair(first: f32, second: f32) -> u32 {
    round_bf16(first) >> 16 | round_bf16(second)
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `x * sigmoid(x)`.
#[inline(always)]
pub(crate) fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// `ln(1 + e^x)`.
#[inline(always)]
pub(crate) fn softplus(x: f32) -> f32 {
    let small = exp(-x.abs());
    // ln(1 + e) = 2 atanh(e / (2 + e)), of at most 1/3.
    let s = small / (2.0 + small);
    let square = s * s;
    let mut sum = 1.0 / 15.0;
    for odd in [13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0] {
        sum = sum * square + 1.0 / odd;
    }
    x.max(0.0) + 2.0 * s * sum
}

/// `cap * tanh(x / cap)`.
#[inline(always)]
pub(crate) fn soft_capped(x: f32, cap: f32) -> f32 {
    // tanh(y) = 1 - 2 / (1 + e^2y)
    cap * (1.0 - 2.0 / (1.0 + exp(2.0 * x / cap)))
}

/// GELU in its tanh approximation, computed as `x * sigmoid(2 y)`, which equals `x / 2 * (1 +
/// tanh(y))`.
#[inline(always)]
pub(crate) fn gelu_tanh(x: f32) -> f32 {
    // 2 sqrt(2 / pi), and that times 0.044715.
    const FIRST: f32 = 1.595_769;
    const THIRD: f32 = 0.071_354_82;
    x / (1.0 + exp(-x * (FIRST + THIRD * x * x)))
}

/// The sum of `f(x)`: element `i` goes to lane `i % 16`, and the lanes are added as a tree.
#[inline(always)]
pub(crate) fn sum_by(values: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let (chunks, rest) = values.as_chunks::<LANES>();
    let mut lanes = [0.0f32; LANES];
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += f(x);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane += f(x);
    }
    sum_lanes(lanes)
}

/// The sum of the lanes, added as a tree.
#[inline(always)]
pub(crate) fn sum_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_accurate() {
        let mut x = -87.3f32;
        while x < 88.0 {
            let want = f64::from(x).exp();
            let relative = (f64::from(exp(x)) - want).abs() / want;
            assert!(relative < 3e-7, "exp({x}): relative error {relative}");
            x += 0.0137;
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-100.0), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(1e9).is_finite());
    }

    #[test]
    fn softplus_is_near_to_that_in_f64() {
        for x in (-4000..4000).map(|x| x as f32 / 100.0) {
            let exact = f64::from(x).exp().ln_1p();
            let error = (f64::from(softplus(x)) - exact).abs() / exact.max(1e-30);
            assert!(error < 6e-7, "{x}: {} for {exact}", softplus(x));
        }
        assert_eq!((softplus(-200.0), softplus(200.0)), (0.0, 200.0));
        assert!(softplus(f32::NAN).is_nan());
    }

    #[test]
    fn silu_at_the_ends() {
        assert_eq!(silu(0.0), 0.0);
        assert!((silu(1.0) - 0.731_058_6).abs() < 1e-6);
        assert!(silu(-200.0).abs() < 1e-30);
        assert_eq!(silu(200.0), 200.0);
        assert!(silu(f32::NAN).is_nan());
    }

    #[test]
    fn gelu_is_accurate_and_has_its_ends() {
        let mut x = -12.0f32;
        while x < 12.0 {
            let wide = f64::from(x);
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (wide + 0.044_715 * wide.powi(3));
            let want = 0.5 * wide * (1.0 + inner.tanh());
            let error = (f64::from(gelu_tanh(x)) - want).abs();
            assert!(error < 1e-6 * want.abs() + 1e-7, "gelu_tanh({x}): error {error}");
            x += 0.0037;
        }
        assert_eq!(gelu_tanh(0.0), 0.0);
        assert_eq!(gelu_tanh(1e30), 1e30);
        assert!(gelu_tanh(-1e30).abs() < 1e-7);
        assert!(gelu_tanh(f32::NAN).is_nan());
    }

    #[test]
    fn sums_count_every_element() {
        for len in 0..70usize {
            let values: Vec<f32> = (0..len).map(|i| i as f32).collect();
            let want = (len * len.saturating_sub(1) / 2) as f32;
            assert_eq!(sum_by(&values, |x| x), want);
        }
    }
}
