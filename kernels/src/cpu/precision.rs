//! The precision of activations in matrix products.
use std::fmt;

use super::isa::Isa;

/// The precision in which matrix products and attention take activations. Sums, and everything that
/// is not a product, are always f32.
///
/// It means the same with every instruction set: the results of two sets differ only by the order
/// and rounding of sums, and by the last bits of exponentials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// f32, or two bf16 terms of it (16 bits of mantissa), whichever is faster.
    Float32,
    /// Rounded to the nearest bf16 (ties to even), even where the instructions could take more.
    Bfloat16,
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Float32 => "float32",
            Self::Bfloat16 => "bfloat16",
        })
    }
}

/// The instruction set and the precision of products.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arithmetic {
    pub(crate) isa: Isa,
    pub(crate) precision: Precision,
}
