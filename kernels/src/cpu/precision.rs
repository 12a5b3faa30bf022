//! How precisely activations enter matrix products.
use std::fmt;

use super::isa::Isa;

/// What matrix products and attention take of activations; sums are f32 always, and so is all that is no
/// product.
///
/// It means the same with every instruction set: results of two sets differ by the order and the
/// rounding of sums, and by the last bits of exponentials, alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// The whole f32, or two bf16 terms of it (16 bits of mantissa), whichever is faster.
    Float32,
    /// Rounded to the nearest bf16 (ties to even), also where the instructions could take more.
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

/// How products are computed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arithmetic {
    pub(crate) isa: Isa,
    pub(crate) precision: Precision,
}
