//! Integers of 4 or 8 bits packed in 32-bit words, with a scale and a zero per group of inputs, in
//! the layouts of GPTQ, AWQ and compressed-tensors; and MXFP4, whose 4 bits are a float.
//!
//! A weight is (integer - zero) x scale, or float x scale, in f32. A backend without 4-bit matrices
//! rounds this once to bf16. Otherwise, which matrices stay in 4 bits depends only on the file and
//! on the columns taken ([`int4_groups`]), so that all ranks with the same columns compute the
//! same.
use super::{DType, HostMatrix, Scales, widen};
use crate::error::KernelError;

/// Layout of integers, zeros and scales in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// GPTQ: words `[in / n, out]` of `n` consecutive inputs, zeros `[groups, out / n]` of
    /// consecutive outputs, scales `[groups, out]`.
    Gptq {
        /// Subtracted from zeros when they were written: 1, or 0 in the format's second version.
        zero_less: u32,
    },
    /// AWQ: words `[in, out / 8]` of outputs in the order 0 2 4 6 1 3 5 7, zeros
    /// `[groups, out / 8]` in the same order, scales `[groups, out]`.
    Awq,
    /// compressed-tensors: words `[out, in / n]` of consecutive inputs, zeros `[out / n, groups]`
    /// of consecutive outputs, scales `[out, groups]`; the last words are padded.
    Compressed,
    /// OCP's MXFP4, as in gpt-oss: like `Compressed`, with 4 bits (E2M1) and without zeros.
    Mxfp4 {
        /// Number of rows of the tensor from one row of the matrix to the next.
        step: usize,
    },
}

/// Values of OCP's E2M1: a sign bit, 2 bits of exponent, 1 of mantissa.
pub(crate) const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Position within an AWQ word, by the output's offset from the word's first.
const AWQ_PLACES: [u32; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Which inputs share a scale and a zero.
#[derive(Clone, Copy, Debug)]
pub enum Groups<'a> {
    /// This many neighbours; the last group can have fewer.
    Even(usize),
    /// Each input's group, i32, little endian.
    Listed(&'a [u8]),
}

/// A tensor `[rows, cols]` = `[out, in]` of packed integers. Rows beyond the last are zeros, to pad
/// a vocabulary.
#[derive(Clone, Copy, Debug)]
pub struct Packed<'a> {
    /// Layout in the file.
    pub packing: Packing,
    /// Bits per integer: 4 or 8.
    pub bits: u32,
    /// Number of output features of the whole tensor.
    pub rows: usize,
    /// Number of input features of the whole tensor.
    pub cols: usize,
    /// Words of integers, little endian.
    pub words: &'a [u8],
    /// Words of zeros; `None` if all zeros are the middle of the integers' range.
    pub zeros: Option<&'a [u8]>,
    /// Bytes of the scales.
    pub scales: &'a [u8],
    /// Element type of the scales: bf16, f16 or f32.
    pub scale_type: DType,
    /// Number of groups per row.
    pub num_groups: usize,
    /// Inputs of each group.
    pub groups: Groups<'a>,
    /// Row of the tensor that is row 0 of the matrix.
    pub first_row: usize,
}

impl Packed<'_> {
    /// Number of integers per word.
    fn per_word(&self) -> usize {
        (32 / self.bits.max(1)) as usize
    }

    /// Checks that all parts are as large as the shape requires and that the groups of all inputs
    /// exist.
    pub(super) fn check(&self, op: &'static str) -> Result<(), KernelError> {
        let fault = |message: String| Err(KernelError::Shape { op, message });
        let Self { packing, bits, rows, cols, num_groups, .. } = *self;
        let is_known = match packing {
            Packing::Awq | Packing::Mxfp4 { .. } => bits == 4,
            _ => matches!(bits, 4 | 8),
        };
        if !is_known {
            return fault(format!("integers of {bits} bits in {packing:?}"));
        }
        let n = self.per_word();
        let product = |a: usize, b: usize| a.checked_mul(b).and_then(|ab| ab.checked_mul(4));
        let (words, zeros) = match packing {
            Packing::Gptq { .. } => {
                (product(cols.div_ceil(n), rows), product(num_groups, rows.div_ceil(n)))
            }
            Packing::Awq => {
                (product(cols, rows.div_ceil(n)), product(num_groups, rows.div_ceil(n)))
            }
            Packing::Compressed | Packing::Mxfp4 { .. } => {
                (product(rows, cols.div_ceil(n)), product(rows.div_ceil(n), num_groups))
            }
        };
        let scales =
            rows.checked_mul(num_groups).and_then(|n| n.checked_mul(self.scale_type.bytes()));
        let parts = [
            ("integers", self.words.len(), words),
            ("zeros", self.zeros.map_or(usize::MAX, <[u8]>::len), zeros),
            ("scales", self.scales.len(), scales),
        ];
        for (what, found, needed) in parts {
            if needed.is_none_or(|needed| needed > found) {
                return fault(format!(
                    "{found} bytes of {what} are too few for {rows} x {cols} in {num_groups} groups"
                ));
            }
        }
        let is_covered = match self.groups {
            Groups::Even(size) => size > 0 && cols.div_ceil(size) <= num_groups,
            Groups::Listed(all) => {
                let all = all.as_chunks::<4>().0;
                let is_there = |bytes: &[u8; 4]| {
                    usize::try_from(i32::from_le_bytes(*bytes)).is_ok_and(|g| g < num_groups)
                };
                all.len() >= cols && all[..cols].iter().all(is_there)
            }
        };
        if !is_covered {
            return fault(format!("not all of {cols} inputs are in one of {num_groups} groups"));
        }
        Ok(())
    }

    /// A word, or 0 if there is none, which [`Packed::check`] rules out.
    fn word(bytes: &[u8], index: usize) -> u32 {
        bytes.as_chunks::<4>().0.get(index).map_or(0, |word| u32::from_le_bytes(*word))
    }

    /// The integers of row `row` of the matrix, from column `first` of the tensor on.
    pub(crate) fn integers(&self, row: usize, first: usize, out: &mut [u8]) {
        let (row, bits, n) = (self.row_of(row), self.bits, self.per_word());
        let mask = (1 << bits) - 1;
        if row >= self.rows {
            return out.fill(self.middle());
        }
        let (start, step) = match self.packing {
            Packing::Gptq { .. } => (row, self.rows),
            Packing::Compressed | Packing::Mxfp4 { .. } => (row * self.cols.div_ceil(n), 1),
            Packing::Awq => {
                let (start, step) = (row / n, self.rows.div_ceil(n));
                let shift = AWQ_PLACES[row % n] * bits;
                for (col, to) in (first..).zip(out) {
                    *to = (Self::word(self.words, start + col * step) >> shift & mask) as u8;
                }
                return;
            }
        };
        let (mut col, mut rest) = (first, out);
        while !rest.is_empty() {
            let mut word =
                Self::word(self.words, start + col / n * step) >> ((col % n) as u32 * bits);
            let (own, others) = rest.split_at_mut((n - col % n).min(rest.len()));
            col += own.len();
            for to in own {
                *to = (word & mask) as u8;
                word >>= bits;
            }
            rest = others;
        }
    }

    /// Integer of rows beyond the last, and of all zeros if the file has none.
    fn middle(&self) -> u8 {
        if self.is_float() { 0 } else { (1 << (self.bits - 1)) as u8 }
    }

    /// Whether the bits are a float, which has no zero.
    fn is_float(&self) -> bool {
        matches!(self.packing, Packing::Mxfp4 { .. })
    }

    /// Row of the tensor that is row `row` of the matrix.
    fn row_of(&self, row: usize) -> usize {
        let step = if let Packing::Mxfp4 { step } = self.packing { step } else { 1 };
        row.saturating_mul(step).saturating_add(self.first_row)
    }

    /// Zero and scale of a group of row `row` of the matrix.
    pub(crate) fn zero_and_scale(&self, row: usize, group: usize) -> (u8, f32) {
        let (row, bits, n) = (self.row_of(row), self.bits, self.per_word());
        if row >= self.rows {
            return (self.middle(), 0.0);
        }
        let mask = (1 << bits) - 1;
        let (word, place, less, scale) = match self.packing {
            Packing::Gptq { zero_less } => {
                let word = group * self.rows.div_ceil(n) + row / n;
                (word, (row % n) as u32, zero_less, group * self.rows + row)
            }
            Packing::Awq => {
                let word = group * self.rows.div_ceil(n) + row / n;
                (word, AWQ_PLACES[row % n], 0, group * self.rows + row)
            }
            Packing::Compressed | Packing::Mxfp4 { .. } => {
                let word = row / n * self.num_groups + group;
                (word, (row % n) as u32, 0, row * self.num_groups + group)
            }
        };
        let zero = self.zeros.map_or(self.middle(), |zeros| {
            // 0 minus 1 was written as the largest integer, so the sum wraps around.
            ((Self::word(zeros, word) >> (place * bits)).wrapping_add(less) & mask) as u8
        });
        let size = self.scale_type.bytes();
        let mut one = [f32::NAN];
        if let Some(bytes) = self.scales.get(scale * size..).and_then(|rest| rest.get(..size)) {
            widen(self.scale_type, bytes, &mut one);
        }
        (zero, one[0])
    }

    /// Group of a column of the tensor, and the column where the next group begins.
    fn group(&self, col: usize) -> (usize, usize) {
        match self.groups {
            Groups::Even(size) => (col / size, (col / size + 1).saturating_mul(size)),
            Groups::Listed(all) => (Self::word(all, col) as usize, col + 1),
        }
    }

    /// Row `row` of the matrix in f32, from column `first` of the tensor on.
    pub(super) fn row_f32(&self, row: usize, first: usize, out: &mut [f32]) {
        let mut integers = vec![0; out.len()];
        self.integers(row, first, &mut integers);
        let mut known = None;
        let mut done = 0;
        while done < out.len() {
            let (group, next) = self.group(first + done);
            let (zero, scale) = match known {
                Some((last, pair)) if last == group => pair,
                _ => self.zero_and_scale(row, group),
            };
            known = Some((group, (zero, scale)));
            let own = done..(next - first).min(out.len());
            for (to, &integer) in out[own.clone()].iter_mut().zip(&integers[own.clone()]) {
                *to = match self.is_float() {
                    true => E2M1[usize::from(integer & 15)] * scale,
                    false => (f32::from(integer) - f32::from(zero)) * scale,
                };
            }
            done = own.end;
        }
    }
}

/// Groups of the columns that a matrix takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Int4Groups {
    /// Number of the first group in the tensor.
    pub first: usize,
    /// Number of inputs in the first group, which can be cut off.
    pub first_len: usize,
    /// Number of inputs in every other group; the last can have fewer.
    pub len: usize,
    /// Number of groups.
    pub count: usize,
    /// Whether the 4 bits are a float ([`Packing::Mxfp4`]) instead of an integer.
    pub is_float: bool,
}

impl Int4Groups {
    /// Bytes of `rows` x `cols` weights, including an f32 scale per group and, for integers, a
    /// zero.
    #[must_use]
    pub fn bytes(&self, rows: u64, cols: u64) -> u64 {
        let each = if self.is_float { 4 } else { 5 };
        rows * (cols.div_ceil(2) + each * self.count as u64)
    }
}

impl HostMatrix<'_> {
    fn packed(&self) -> Option<&Packed<'_>> {
        match &self.scales {
            Some(Scales::Packed(packed)) => Some(packed),
            _ => None,
        }
    }

    /// See [`int4_groups`].
    fn own_int4_groups(&self) -> Option<Int4Groups> {
        let packed = self.packed().filter(|packed| packed.bits == 4)?;
        let Groups::Even(size) = packed.groups else { return None };
        let size = size.clamp(1, packed.cols.max(1));
        let first_len = (size - self.col_start % size).min(self.cols);
        // Eight inputs share a word: groups must not share one.
        let is_aligned =
            first_len == self.cols || (first_len.is_multiple_of(8) && size.is_multiple_of(8));
        let count = 1 + (self.cols - first_len).div_ceil(size);
        let first = self.col_start / size;
        let is_float = packed.is_float();
        is_aligned.then_some(Int4Groups { first, first_len, len: size, count, is_float })
    }
}

/// Groups of matrices that stay in 4 bits together. All of them must have 4-bit integers, groups of
/// neighbouring inputs, the same groups, and group boundaries only at multiples of 8 of the columns
/// taken. `None` if backends convert them to bf16.
#[must_use]
pub fn int4_groups(parts: &[HostMatrix<'_>]) -> Option<Int4Groups> {
    let groups = parts.first()?.own_int4_groups()?;
    // Each may begin at another group of its tensor, as the slices of a shared expert do.
    let same = |part: &HostMatrix<'_>| {
        let own = part.own_int4_groups();
        own.is_some_and(|own| Int4Groups { first: groups.first, ..own } == groups)
    };
    parts.iter().all(same).then_some(groups)
}

/// The 4-bit integers of a row, the columns taken.
pub(crate) fn int4_integers(part: &HostMatrix<'_>, row: usize, integers: &mut [u8]) {
    if let Some(packed) = part.packed() {
        packed.integers(row, part.col_start, integers);
    }
}

/// The 4-bit integers of a row, and zero and scale of each of its groups, for a matrix that stays
/// in 4 bits.
pub(crate) fn int4_row(
    part: &HostMatrix<'_>,
    row: usize,
    groups: &Int4Groups,
    integers: &mut [u8],
    mut group: impl FnMut(usize, u8, f32),
) {
    let Some(packed) = part.packed() else { return };
    packed.integers(row, part.col_start, integers);
    let first = part.own_int4_groups().map_or(groups.first, |own| own.first);
    for index in 0..groups.count {
        let (zero, scale) = packed.zero_and_scale(row, first + index);
        group(index, zero, scale);
    }
}

#[cfg(test)]
mod tests;
