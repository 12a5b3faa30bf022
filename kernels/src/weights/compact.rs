//! PURE: the forms of fewer bits than bf16 in which matrices can stay as their files have them.
use super::{Fp8Groups, HostMatrix, Int4Groups, fp8_groups, int4_groups};

/// A form of fewer bits than bf16. What it stands for depends only on the file and on the columns
/// taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compact {
    /// 4-bit integers or floats.
    Int4(Int4Groups),
    /// FP8 (E4M3).
    Fp8(Fp8Groups),
}

impl Compact {
    /// The form in which these matrices could stay together, if there is one.
    #[must_use]
    pub fn of(parts: &[HostMatrix<'_>]) -> Option<Self> {
        let int4 = int4_groups(parts).map(Self::Int4);
        int4.or_else(|| fp8_groups(parts).map(Self::Fp8))
    }

    /// Bytes of `rows` x `cols` weights, including their scales.
    #[must_use]
    pub fn bytes(&self, rows: u64, cols: u64) -> u64 {
        match self {
            Self::Int4(groups) => groups.bytes(rows, cols),
            Self::Fp8(groups) => groups.bytes(rows, cols),
        }
    }
}
