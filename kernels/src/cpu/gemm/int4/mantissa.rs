//! 4-bit integers as floats without a conversion: where they are in a word, put into the mantissa
//! of a power of two of which the bit that is their lowest one counts 1. What is subtracted from
//! that, the power and the zero point, leaves their difference. Nothing is rounded.
use super::super::super::pack::{MIDDLE, PANEL};

/// The bits of the number of each of four pairs, in half of a word.
pub(in super::super) const MASKS: [i32; 4] = [0xf, 0xf0, 0xf00, 0xf000];

/// The powers of two for each of four pairs, as bits.
pub(in super::super) const POWERS: [i32; 4] = {
    let mut powers = [0; 4];
    let mut pair = 0;
    while pair < 4 {
        powers[pair] = (127 + 23 - 4 * pair as i32) << 23;
        pair += 1;
    }
    powers
};

/// What to subtract if all zero points are [`MIDDLE`], for each of four pairs.
pub(in super::super) const MIDDLES: [f32; 4] = {
    let mut middles = [0.0; 4];
    let mut pair = 0;
    while pair < 4 {
        middles[pair] = power(pair) + MIDDLE as f32;
        pair += 1;
    }
    middles
};

const fn power(pair: usize) -> f32 {
    f32::from_bits(POWERS[pair].cast_unsigned())
}

/// What to subtract for each of four pairs and each output of a panel. Aligned, so that no vector
/// lies in two cache lines.
#[repr(C, align(64))]
pub(in super::super) struct Zeros(pub(in super::super) [[[f32; 16]; 4]; 4]);

impl Zeros {
    #[inline(always)]
    pub(in super::super) fn new(zeros: &[i8; PANEL]) -> Self {
        let mut all = [[[0.0; 16]; 4]; 4];
        for (pair, all) in all.iter_mut().enumerate() {
            for (to, &zero) in all.as_flattened_mut().iter_mut().zip(zeros) {
                *to = power(pair) + f32::from(zero);
            }
        }
        Self(all)
    }
}
