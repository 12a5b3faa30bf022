//! Measures which algorithm is the fastest: runs each a few times, under the conditions of a step.
use std::time::Duration;

use super::descriptors::Shape;
use super::{Matmul, Product};
use crate::cuda::calls::cublaslt as sys;
use crate::cuda::memory::{DeviceMemory, DevicePtr};
use crate::cuda::stream::{Event, Stream};
use crate::error::KernelError;

/// Measured runs per algorithm, after one that is not measured. The fastest counts, because
/// disturbances only lengthen the others.
const RUNS: usize = 3;
/// Bytes written before each of these runs to flush the GPU's L2, because in a step all other
/// weights have been read since W was last used. More than an L2 holds (50 MiB on H200, 126 MiB on
/// B200). Also keeps the GPU busy while the host launches the measured run.
const FLUSHED: usize = 128 << 20;
/// Above this number of rows, a product takes longer than reading W from memory.
const FLUSHED_ROWS_MOST: u32 = 256;
/// Limit of the GPU time for all measurements; shapes that occur later use the library's own first
/// choice. About two hundred shapes occur; the largest take milliseconds.
pub(super) const MEASURING_MOST: Duration = Duration::from_secs(3);
/// Limit for one shape, since requests may wait for it.
const MEASURING_EACH: Duration = Duration::from_millis(100);

impl Product {
    /// Whether repeated runs would find W in L2, and it would matter.
    fn finds_weights_in_cache(&self) -> bool {
        let bytes = 2 * u64::from(self.n) * u64::from(self.w_stride);
        self.rows <= FLUSHED_ROWS_MOST && bytes < FLUSHED as u64
    }
}

impl Matmul {
    /// Returns the fastest of these algorithms, if any can run; skips one whose call fails although
    /// the stream is fine. Writes the result in every run.
    ///
    /// # Safety
    /// As [`Matmul::run`].
    pub(super) unsafe fn quickest(
        &mut self,
        stream: &Stream,
        (product, shape): (&Product, &Shape),
        named: &[sys::cublasLtMatmulAlgo_t],
        [x, w, out]: [DevicePtr; 3],
    ) -> Result<Option<sys::cublasLtMatmulAlgo_t>, KernelError> {
        let flushed = match product.finds_weights_in_cache() {
            false => None,
            true => match DeviceMemory::new(&self.context, FLUSHED, "measuring products") {
                Ok(memory) => Some(memory),
                // Better than nothing: measure with a warm cache.
                Err(KernelError::OutOfMemory { .. }) => None,
                Err(error) => return Err(error),
            },
        };
        let mark = || Event::new(&self.context, true);
        let marks: Vec<(Event, Event)> =
            (0..RUNS).map(|_| Ok((mark()?, mark()?))).collect::<Result<_, KernelError>>()?;
        let (Some((first, _)), Some((_, last))) = (marks.first(), marks.last()) else {
            return Ok(None);
        };
        let mut best: Option<(Duration, sys::cublasLtMatmulAlgo_t)> = None;
        let mut spent = Duration::ZERO;
        for algorithm in named {
            let run = || -> Result<bool, KernelError> {
                // SAFETY: this function's contract.
                match unsafe { self.launch(stream, shape, algorithm, x, w, out) } {
                    Err(_) => stream.is_idle().map(|_| false),
                    done => done,
                }
            };
            let runs = || -> Result<bool, KernelError> {
                if !run()? {
                    return Ok(false);
                }
                for (began, ended) in &marks {
                    if let Some(memory) = &flushed {
                        memory.fill(stream, 0)?;
                    }
                    began.record(stream)?;
                    if !run()? {
                        return Ok(false);
                    }
                    ended.record(stream)?;
                }
                Ok(true)
            };
            if !runs()? {
                continue;
            }
            last.wait(stream.patience())?;
            spent += last.since(first)?;
            let mut took = Duration::MAX;
            for (began, ended) in &marks {
                took = took.min(ended.since(began)?);
            }
            // The first of equals, because the library puts the best first by its own estimate.
            if best.as_ref().is_none_or(|(least, _)| took < *least) {
                best = Some((took, *algorithm));
            }
            if spent > MEASURING_EACH {
                break;
            }
        }
        self.measured += spent;
        Ok(best.map(|(_, algorithm)| algorithm))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_that_a_cache_would_hold_are_measured_without_it() {
        let of = |rows, n, k| {
            let product = Product { rows, n, k, x_stride: k, w_stride: k, out_stride: n };
            product.finds_weights_in_cache()
        };
        // qkv, output and down projection of an 8B model; gate and up, which fit in no cache; a
        // prompt.
        assert!(of(33, 6144, 4096) && of(256, 4096, 4096) && of(64, 4096, 14_336));
        assert!(!of(33, 28_672, 4096) && !of(257, 6144, 4096));
    }
}
