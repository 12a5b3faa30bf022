//! Which algorithm is the quickest: each is run a few times, as a step would find it.
use std::time::Duration;

use cudarc::cublaslt::sys;

use super::descriptors::Shape;
use super::{Matmul, Product};
use crate::cuda::memory::{DeviceMemory, DevicePtr};
use crate::cuda::stream::{Event, Stream};
use crate::error::KernelError;

/// Measured runs of each, behind one that is not measured. The quickest counts: what else happened
/// lengthens the others.
const RUNS: usize = 3;
/// Written before each of these runs, in bytes, so that they find as little of W in the GPU's L2 as
/// a step does, which has passed over all other weights since. More than an L2 holds (an H200's 50
/// MiB, a B200's 126). The GPU is busy with that while the host launches what is measured.
const FLUSHED: usize = 128 << 20;
/// Of more rows a product takes longer than W takes to come from memory.
const FLUSHED_ROWS_MOST: u32 = 256;
/// What all measuring may take of the GPU's time: shapes met after that take the library's own
/// first choice. Some two hundred shapes are met, of which the largest take milliseconds.
pub(super) const MEASURING_MOST: Duration = Duration::from_secs(3);
/// No more of one shape, which requests may wait for.
const MEASURING_EACH: Duration = Duration::from_millis(100);

impl Product {
    /// Whether its W would lie in L2 when it is computed again and again, and that would matter.
    fn finds_weights_in_cache(&self) -> bool {
        let bytes = 2 * u64::from(self.n) * u64::from(self.w_stride);
        self.rows <= FLUSHED_ROWS_MOST && bytes < FLUSHED as u64
    }
}

impl Matmul {
    /// The one of these algorithms that takes the least time, if any can run: one whose call fails
    /// though the stream is well is none. The result is written as often as it is computed.
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
                // Better than nothing: they are measured with what is in the cache.
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
            // The first of equals: the library names the best first, as it sees them.
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
        // qkv, output and down of 8B; gate and up, which no cache holds; a prompt.
        assert!(of(33, 6144, 4096) && of(256, 4096, 4096) && of(64, 4096, 14_336));
        assert!(!of(33, 28_672, 4096) && !of(257, 6144, 4096));
    }
}
