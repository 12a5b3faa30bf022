//! Checks products of a real model's sizes: this project's kernels against cuBLASLt, and a sample
//! of both against sums in f64. For `tests/gpu`.
use std::fmt;

use super::backend::CudaBackend;
use super::device::Device;
use super::measure::{Multiplier, fill, multiply, product_of, random_words};
use super::memory::{DeviceMemory, Pinned};
use crate::error::KernelError;

/// Number of results checked against sums in f64.
const SAMPLES: usize = 512;
/// Largest error, relative to the typical size of results. f32 sums in another order and the tensor
/// cores' own rounding stay far below; a missing or extra term does not.
const TOLERANCE: f64 = 2e-3;

/// Errors of products, relative to the typical size of results.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProductErrors {
    /// Largest difference between the two, over all results.
    pub apart: f64,
    /// Largest error of this project's kernels against sums in f64.
    pub own: f64,
    /// Largest error of cuBLASLt against sums in f64.
    pub library: f64,
}

impl ProductErrors {
    /// Whether both are within the tolerance.
    #[must_use]
    pub fn is_right(&self) -> bool {
        // False for NaN.
        [self.apart, self.own, self.library].iter().all(|off| *off <= TOLERANCE)
    }
}

impl fmt::Display for ProductErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { apart, own, library } = self;
        write!(f, "own off by {own:.1e}, cuBLASLt by {library:.1e}, apart by {apart:.1e}")
    }
}

/// The larger of both, or NaN.
fn worse(a: f64, b: f64) -> f64 {
    if a >= b || a.is_nan() { a } else { b }
}

fn bf16(words: &[u32], element: usize) -> f64 {
    let word = words[element / 2 % words.len()];
    let bits = if element.is_multiple_of(2) { word << 16 } else { word & 0xffff_0000 };
    f64::from(f32::from_bits(bits))
}

impl CudaBackend {
    /// Version of the cuBLASLt that computes products of many rows.
    ///
    /// # Errors
    /// Why there is none: such products are then computed correctly but slowly.
    pub fn library_of_products(&self) -> Result<String, String> {
        match &self.device.matmul {
            Ok(matmul) => Ok(format!("version {}", matmul.version())),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Multiplies `rows` random rows by a random matrix `[n, k]`, both ways.
    ///
    /// # Errors
    /// [`KernelError`]; `Unsupported` without cuBLASLt.
    pub fn compare_products(
        &mut self,
        (rows, n, k): (usize, usize, usize),
    ) -> Result<ProductErrors, KernelError> {
        let (stride, what) = (k.next_multiple_of(8), "a product to be compared");
        let Device { context, stream, .. } = &self.device;
        let weights = DeviceMemory::new(context, n * stride * 2, what)?;
        let x = DeviceMemory::new(context, rows * stride * 2, what)?;
        let out = DeviceMemory::new(context, rows * n * 4, what)?;
        let (w_words, x_words) = (random_words(1), random_words(2));
        fill(&weights, stream, &w_words)?;
        fill(&x, stream, &x_words)?;
        let product = product_of((rows, n, k), stride)?;
        let mut results = Vec::new();
        for by in [Multiplier::Own, Multiplier::Library] {
            // Elements that are not written stay NaN.
            out.fill(&self.device.stream, 0xff)?;
            let operands = [x.ptr(), weights.ptr(), out.ptr()];
            // SAFETY: operands and result have the rows and columns that are named.
            unsafe { multiply(&mut self.device, by, &product, operands) }?;
            let mut found = Pinned::<f32>::new(&self.device.context, rows * n, what)?;
            out.download_to(&self.device.stream, 0, &mut found, (0, rows * n))?;
            self.device.stream.synchronize()?;
            results.push(found);
        }
        let (own, library) = (results[0].as_slice(), results[1].as_slice());
        // Typical size of a sum of `k` such products.
        let square = (0..2 * w_words.len()).map(|at| bf16(&w_words, at).powi(2)).sum::<f64>()
            / (2 * w_words.len()) as f64;
        let unit = (k as f64).sqrt() * square;
        let off = |a: f32, b: f64| (f64::from(a) - b).abs() / unit;
        let apart = own
            .iter()
            .zip(library)
            .fold(0.0, |most, (own, library)| worse(most, off(*own, f64::from(*library))));
        let mut agreement = ProductErrors { apart, own: 0.0, library: 0.0 };
        // The first, the last, and some between.
        let step = (rows * n - 1).div_ceil(SAMPLES).max(1) | 1;
        for at in (0..rows * n).step_by(step).chain([rows * n - 1]) {
            let (row, feature) = (at / n, at % n);
            let term = |i| bf16(&x_words, row * stride + i) * bf16(&w_words, feature * stride + i);
            let exact: f64 = (0..k).map(term).sum();
            agreement.own = worse(agreement.own, off(own[at], exact));
            agreement.library = worse(agreement.library, off(library[at], exact));
        }
        Ok(agreement)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_a_number_is_not_right() {
        let right = ProductErrors { apart: 1e-5, own: 1e-6, library: 0.0 };
        assert!(right.is_right());
        assert!(!ProductErrors { own: f64::NAN, ..right }.is_right());
        assert!(!ProductErrors { apart: 0.1, ..right }.is_right());
        assert!(worse(f64::NAN, 1.0).is_nan() && worse(1.0, f64::NAN).is_nan());
        assert_eq!(worse(1.0, 2.0), 2.0);
    }

    #[test]
    fn elements_are_those_of_the_words() {
        let words = [0x4000_3f80, 0xbf80_0000];
        let all: Vec<f64> = (0..6).map(|at| bf16(&words, at)).collect();
        assert_eq!(all, [1.0, 2.0, 0.0, -1.0, 1.0, 2.0]);
    }
}
