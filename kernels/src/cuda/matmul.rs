//! Matrix products of many rows, with cuBLASLt. The algorithm is chosen once per shape: the fastest
//! of those that the library proposes, measured when the shape first occurs. It is kept as long as
//! the backend, so that a product has the same bits in every step.
//!
//! `out = x W^T`, bf16 times bf16 to f32, with f32 sums. In cuBLASLt's column-major terms: D = A^T
//! B with A = W, B = x, D = out.
//!
//! - `descriptors`: the library's descriptions of a product
//! - `measuring`: measures which algorithm is the fastest
//! - `ahead`: plans made before they are needed
use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use super::bucket::product_bucket;
use super::calls::{Status, cublaslt as sys};
use super::context::Context;
use super::failure;
use super::libraries::{self, CudaLibrary, LibraryError};
use super::memory::{DeviceMemory, DevicePtr};
use super::stream::Stream;
use crate::error::KernelError;

mod ahead;
mod descriptors;
mod measuring;

use descriptors::{Preference, Shape};
use measuring::MEASURING_MOST;

/// Size of cuBLASLt's workspace: NVIDIA's recommendation for Hopper.
const WORKSPACE: usize = 32 << 20;
/// Alignment of operands in bytes that the library assumes by default.
const ALIGNMENT_MOST: u64 = 256;
/// Maximum number of plans: some twenty row counts for a handful of matrix shapes.
const PLANS_MAX: usize = 512;
/// `CUBLAS_STATUS_NOT_SUPPORTED`
const NOT_SUPPORTED: u32 = 15;
/// Statuses (`INVALID_VALUE`, `ARCH_MISMATCH`, `NOT_SUPPORTED`) with which the library rejects a
/// product before it launches anything.
const REFUSED: [u32; 3] = [7, 8, NOT_SUPPORTED];
/// Number of algorithms to request: the library can propose some that cannot run.
const CHOICES: usize = 8;

/// A product: `out [rows, n] = x [rows, k] W^T`, W `[n, k]`; strides in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Product {
    /// Number of rows of x.
    pub(super) rows: u32,
    /// Number of rows of W.
    pub(super) n: u32,
    /// Number of columns of both.
    pub(super) k: u32,
    /// Stride of the rows of x.
    pub(super) x_stride: u32,
    /// Stride of the rows of W.
    pub(super) w_stride: u32,
    /// Stride of the rows of the result.
    pub(super) out_stride: u32,
}

impl Product {
    /// Key of its plan, for operands at these addresses.
    fn key(&self, operands: [DevicePtr; 3]) -> Key {
        Key {
            product: Self { rows: product_bucket(self.rows), ..*self },
            alignment: alignment(operands),
        }
    }
}

/// Products that share a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    product: Product,
    /// Common alignment of all operands in bytes.
    alignment: u32,
}

/// Common alignment of all operands in bytes: a power of two, up to what matters.
fn alignment(operands: [DevicePtr; 3]) -> u32 {
    let bits = operands.into_iter().fold(ALIGNMENT_MOST, |bits, ptr| bits | ptr.0);
    1 << bits.trailing_zeros()
}

/// cuBLASLt on one stream.
pub(super) struct Matmul {
    handle: sys::cublasLtHandle_t,
    workspace: DeviceMemory,
    /// Plan per bucket; `None` if the library has no algorithm.
    plans: HashMap<Key, Option<sys::cublasLtMatmulAlgo_t>>,
    /// Plans of products that their bucket's plan was rejected for, by exact number of rows.
    refits: HashMap<Key, Option<sys::cublasLtMatmulAlgo_t>>,
    /// Total GPU time spent on measuring.
    measured: Duration,
    /// The library's first failure to choose, until it is told.
    fault: Option<String>,
    version: usize,
    context: Rc<Context>,
}

fn check(status: Status, what: &'static str) -> Result<(), KernelError> {
    match status {
        0 => Ok(()),
        code => Err(failure::cublas(code, what)),
    }
}

impl Matmul {
    /// Loads the library and makes it ready.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] if it is missing; [`KernelError::Device`].
    pub(super) fn new(context: &Rc<Context>, folders: &[PathBuf]) -> Result<Self, KernelError> {
        let unusable = |missing: LibraryError| KernelError::Unsupported(missing.to_string());
        libraries::find(CudaLibrary::CublasLt, folders).map_err(unusable)?;
        let workspace = DeviceMemory::new(context, WORKSPACE, "cuBLASLt's workspace")?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: a context is current; destroyed when `Self` is dropped.
        check(unsafe { sys::cublasLtCreate(&raw mut handle) }, "start cuBLASLt")?;
        // SAFETY: the library is loaded.
        let version = unsafe { sys::cublasLtGetVersion() };
        let (plans, refits) = (HashMap::new(), HashMap::new());
        Ok(Self {
            handle,
            workspace,
            plans,
            refits,
            measured: Duration::ZERO,
            fault: None,
            version,
            context: context.clone(),
        })
    }

    /// The library's first failure to choose an algorithm since the last call.
    pub(super) fn take_fault(&mut self) -> Option<String> {
        self.fault.take()
    }

    /// Its version, such as 130000.
    pub(super) fn version(&self) -> usize {
        self.version
    }

    /// Queues a product in stream order. Returns false, with nothing queued, if the library has no
    /// algorithm for it (such as for rows with an odd number of elements).
    ///
    /// # Safety
    /// The pointers must point to as many elements as the shape requires, alive until the stream
    /// has passed the product.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    pub(super) unsafe fn run(
        &mut self,
        stream: &Stream,
        product: &Product,
        x: DevicePtr,
        w: DevicePtr,
        out: DevicePtr,
    ) -> Result<bool, KernelError> {
        let key = product.key([x, w, out]);
        let exact = Key { product: *product, ..key };
        let planned = self.refits.get(&exact).or_else(|| self.plans.get(&key));
        if let Some(None) = planned {
            return Ok(false);
        }
        let shape = Shape::new(product)?;
        if let Some(Some(algorithm)) = planned {
            // SAFETY: this function's contract.
            match unsafe { self.launch(stream, &shape, algorithm, x, w, out) } {
                Ok(true) => return Ok(true),
                Ok(false) => {}
                Err(error) if stream.captures() => return Err(error),
                // It was chosen for another number of rows, and may need memory for this one.
                // Where the stream is well nothing has begun: as if it were rejected.
                Err(_) => stream.is_idle().map(drop)?,
            }
        }
        // The library may fail to choose while the stream captures (an internal error was reported
        // for 13.3). Captured calls have run before, so only shapes beyond `PLANS_MAX` get here.
        if stream.captures() {
            return Ok(false);
        }
        // There is no plan yet, or one that rejects this number of rows: that one stays, for the
        // others.
        let is_refit = planned.is_some();
        let kept = if is_refit { self.refits.len() } else { self.plans.len() };
        let is_kept = kept < PLANS_MAX;
        if is_refit && !is_kept {
            // As during a capture: another choice in every step would change the sums.
            return Ok(false);
        }
        let named = match self.choose(&shape, key.alignment) {
            Ok(named) => named,
            // Nothing was launched: where the stream is well, other kernels multiply as well.
            Err(error) => {
                stream.is_idle()?;
                self.fault.get_or_insert_with(|| error.to_string());
                Vec::new()
            }
        };
        // A choice that is not kept is not measured either: it could differ the next time.
        let measures = is_kept && self.measured < MEASURING_MOST;
        let mut quickest = None;
        if measures && named.len() > 1 {
            // SAFETY: this function's contract.
            quickest = unsafe { self.quickest(stream, (product, &shape), &named, [x, w, out]) }?;
        }
        let mut chosen = None;
        for algorithm in quickest.into_iter().chain(named) {
            // SAFETY: this function's contract.
            match unsafe { self.launch(stream, &shape, &algorithm, x, w, out) } {
                Ok(false) => {}
                Ok(true) => {
                    chosen = Some(algorithm);
                    break;
                }
                // One that runs for the first time is loaded, for which there may be no memory.
                // Where the stream is well nothing has begun, and other kernels multiply as well.
                Err(_) => stream.is_idle().map(drop)?,
            }
        }
        if is_kept && is_refit {
            self.refits.insert(exact, chosen);
        } else if is_kept {
            self.plans.insert(key, chosen);
        }
        Ok(chosen.is_some())
    }

    /// Runs one algorithm; returns false if the library rejects it.
    ///
    /// # Safety
    /// As [`Matmul::run`].
    unsafe fn launch(
        &self,
        stream: &Stream,
        shape: &Shape,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        x: DevicePtr,
        w: DevicePtr,
        out: DevicePtr,
    ) -> Result<bool, KernelError> {
        let (one, zero) = (1.0f32, 0.0f32);
        let pointer = |ptr: DevicePtr| std::ptr::without_provenance_mut::<c_void>(ptr.0 as usize);
        // SAFETY: the descriptors are alive; the operands match them, by the contract.
        let status = unsafe {
            sys::cublasLtMatmul(
                self.handle,
                shape.product,
                (&raw const one).cast(),
                pointer(w),
                shape.w,
                pointer(x),
                shape.x,
                (&raw const zero).cast(),
                pointer(out),
                shape.out,
                pointer(out),
                shape.out,
                algorithm,
                pointer(self.workspace.ptr()),
                WORKSPACE,
                stream.raw().cast(),
            )
        };
        if REFUSED.contains(&status) {
            return Ok(false);
        }
        let launched = check(status, "a matrix product").map_err(|error| stream.failed(error));
        launched.map(|()| true)
    }

    /// The algorithms that the library proposes for operands of this alignment, the best first by
    /// its own estimate.
    fn choose(
        &self,
        shape: &Shape,
        alignment: u32,
    ) -> Result<Vec<sys::cublasLtMatmulAlgo_t>, KernelError> {
        let preference = Preference::new(WORKSPACE, alignment)?;
        type Found = sys::cublasLtMatmulHeuristicResult_t;
        let mut found = [const { std::mem::MaybeUninit::<Found>::zeroed() }; CHOICES];
        let mut count = 0;
        // SAFETY: all descriptors are alive; at most `CHOICES` results are written.
        let status = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                shape.product,
                shape.w,
                shape.x,
                shape.out,
                shape.out,
                preference.0,
                CHOICES as i32,
                found.as_mut_ptr().cast(),
                &raw mut count,
            )
        };
        if status == NOT_SUPPORTED {
            return Ok(Vec::new());
        }
        check(status, "choose an algorithm for a matrix product")?;
        let count = usize::try_from(count).unwrap_or(0);
        let usable = |found: &std::mem::MaybeUninit<Found>| {
            let found = found.as_ptr();
            // SAFETY: within the value that `found` points to.
            let state = unsafe { &raw const (*found).state };
            // SAFETY: as above.
            let algo = unsafe { &raw const (*found).algo };
            // SAFETY: zeroed, then written by the library. Read as a number, because a later
            // library may write a status that the enumeration does not have.
            let state = unsafe { state.cast::<Status>().read() };
            // SAFETY: as above; an algorithm is an array of numbers.
            (state == 0).then(|| unsafe { algo.read() })
        };
        Ok(found.iter().take(count).filter_map(usable).collect())
    }
}

impl Drop for Matmul {
    fn drop(&mut self) {
        if !self.context.is_usable() {
            return;
        }
        // SAFETY: made in `new`.
        let _ = unsafe { sys::cublasLtDestroy(self.handle) };
    }
}

impl fmt::Debug for Matmul {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Matmul(cuBLASLt {}, {} plans)", self.version, self.plans.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn like_products_share_a_plan_and_unlike_ones_do_not() {
        let product =
            Product { rows: 100, n: 512, k: 64, x_stride: 64, w_stride: 64, out_stride: 512 };
        let at = [DevicePtr(0x1000), DevicePtr(0x2000), DevicePtr(0x3000)];
        assert_eq!(product.key(at), Product { rows: 120, ..product }.key(at));
        for other in [
            Product { rows: 129, ..product },
            Product { n: 513, ..product },
            Product { k: 65, ..product },
            Product { x_stride: 72, ..product },
            Product { out_stride: 1024, ..product },
        ] {
            assert_ne!(product.key(at), other.key(at), "{other:?}");
        }
        // A plan for aligned operands is not used for others.
        let less = [DevicePtr(0x1000), DevicePtr(0x2010), DevicePtr(0x3000)];
        assert_ne!(product.key(at), product.key(less));
    }

    #[test]
    fn the_least_aligned_operand_counts() {
        let of = |a, b, c| alignment([DevicePtr(a), DevicePtr(b), DevicePtr(c)]);
        assert_eq!(of(0x1000, 0x2000, 0), 256);
        assert_eq!(of(0x1000, 0x2010, 0x40), 16);
        assert_eq!(of(0x1002, 0x2010, 0x40), 2);
    }
}
