//! Matrix products of many rows: cuBLASLt, with the algorithm chosen once per shape: of those that
//! the library names the quickest, as measured when the shape is first met. It is kept as long as
//! the backend, so that a product has the same bits in every step.
//!
//! `out = x W^T`, bf16 times bf16 to f32, f32 sums. In cuBLASLt's column-major words: D = A^T B
//! with A = W, B = x, D = out.
use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use cudarc::cublaslt::sys;

use super::bucket::product_bucket;
use super::context::Context;
use super::failure;
use super::libraries::{self, Missing, Wanted};
use super::memory::{DeviceMemory, DevicePtr};
use super::stream::{Event, Stream};
use crate::error::KernelError;

/// What products may use besides their operands: NVIDIA's advice for Hopper.
const WORKSPACE: usize = 32 << 20;
/// `CUBLAS_OP_T`, which the bindings of cuBLASLt alone do not have.
const TRANSPOSED: i32 = 1;
/// What the library takes every operand to be aligned to unless it is told otherwise, in bytes.
const ALIGNMENT_MOST: u64 = 256;
/// Plans kept: some twenty row counts for a handful of matrix shapes.
const PLANS_MAX: usize = 512;
/// `CUBLAS_STATUS_NOT_SUPPORTED`
const NOT_SUPPORTED: u32 = 15;
/// By these (`INVALID_VALUE`, `ARCH_MISMATCH`, `NOT_SUPPORTED`) the library refuses a product
/// before anything of it is launched.
const REFUSED: [u32; 3] = [7, 8, NOT_SUPPORTED];
/// Algorithms asked for: the library may name some that cannot run.
const CHOICES: usize = 8;
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
const MEASURING_MOST: Duration = Duration::from_secs(3);
/// No more of one shape, which requests may wait for.
const MEASURING_EACH: Duration = Duration::from_millis(100);

/// A product: `out [rows, n] = x [rows, k] W^T`, W `[n, k]`; strides in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Product {
    /// Rows of x.
    pub(super) rows: u32,
    /// Rows of W.
    pub(super) n: u32,
    /// Columns of both.
    pub(super) k: u32,
    /// From row to row of x.
    pub(super) x_stride: u32,
    /// From row to row of W.
    pub(super) w_stride: u32,
    /// From row to row of the result.
    pub(super) out_stride: u32,
}

impl Product {
    /// Whether its W would lie in L2 when it is computed again and again, and that would matter.
    fn finds_weights_in_cache(&self) -> bool {
        let bytes = 2 * u64::from(self.n) * u64::from(self.w_stride);
        self.rows <= FLUSHED_ROWS_MOST && bytes < FLUSHED as u64
    }

    /// The key of its plan, for operands at these addresses.
    fn key(&self, operands: [DevicePtr; 3]) -> Key {
        Key {
            product: Self { rows: product_bucket(self.rows), ..*self },
            alignment: alignment(operands),
        }
    }
}

/// What a plan is good for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    product: Product,
    /// Bytes that all operands are aligned to.
    alignment: u32,
}

/// Bytes that all of these are aligned to: a power of two, as large as matters.
fn alignment(operands: [DevicePtr; 3]) -> u32 {
    let bits = operands.into_iter().fold(ALIGNMENT_MOST, |bits, ptr| bits | ptr.0);
    1 << bits.trailing_zeros()
}

/// cuBLASLt on one stream.
pub(super) struct Matmul {
    handle: sys::cublasLtHandle_t,
    workspace: DeviceMemory,
    /// None where the library has no algorithm.
    plans: HashMap<Key, Option<sys::cublasLtMatmulAlgo_t>>,
    /// Of products that their bucket's plan is refused for: by exact numbers of rows.
    refits: HashMap<Key, Option<sys::cublasLtMatmulAlgo_t>>,
    /// How long the GPU has been measured, all in all.
    measured: Duration,
    version: usize,
    context: Rc<Context>,
}

fn check(status: sys::cublasStatus_t, what: &'static str) -> Result<(), KernelError> {
    match status as u32 {
        0 => Ok(()),
        code => Err(failure::cublas(code, what)),
    }
}

impl Matmul {
    /// Loads the library and makes it ready.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] when it is not there; [`KernelError::Device`].
    pub(super) fn new(context: &Rc<Context>, folders: &[PathBuf]) -> Result<Self, KernelError> {
        let unusable = |missing: Missing| KernelError::Unsupported(missing.to_string());
        libraries::find(Wanted::CublasLt, folders).map_err(unusable)?;
        let workspace = DeviceMemory::new(context, WORKSPACE, "cuBLASLt's workspace")?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: a context is current; destroyed when `Self` is dropped.
        check(unsafe { sys::cublasLtCreate(&raw mut handle) }, "start cuBLASLt")?;
        // SAFETY: the library is loaded.
        let version = unsafe { sys::cublasLtGetVersion() };
        let (plans, refits) = (HashMap::new(), HashMap::new());
        let measured = Duration::ZERO;
        Ok(Self { handle, workspace, plans, refits, measured, version, context: context.clone() })
    }

    /// Its version, as 130000.
    pub(super) fn version(&self) -> usize {
        self.version
    }

    /// Computes a product in stream order; false, with nothing queued, where the library has no
    /// algorithm for it (rows of an odd number of elements, say).
    ///
    /// # Safety
    /// The pointers lead to as many elements as the shape says, alive until the stream has come so
    /// far.
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
            if unsafe { self.launch(stream, &shape, algorithm, x, w, out) }? {
                return Ok(true);
            }
        }
        // The library may refuse to choose while the stream captures (13.3 does, with an internal
        // error). What is captured has run before, so only shapes beyond `PLANS_MAX` come here.
        if stream.captures() {
            return Ok(false);
        }
        // No plan yet, or one that these rows are too few for: that stays, for the others.
        let is_refit = planned.is_some();
        let kept = if is_refit { self.refits.len() } else { self.plans.len() };
        let is_kept = kept < PLANS_MAX;
        let named = self.choose(&shape, key.alignment)?;
        // One that is not kept is not measured either: it would be another the next time.
        let measures = is_kept && self.measured < MEASURING_MOST;
        let mut quickest = None;
        if measures && named.len() > 1 {
            // SAFETY: this function's contract.
            quickest = unsafe { self.quickest(stream, (product, &shape), &named, [x, w, out]) }?;
        }
        let mut chosen = None;
        for algorithm in quickest.into_iter().chain(named) {
            // SAFETY: this function's contract.
            if unsafe { self.launch(stream, &shape, &algorithm, x, w, out) }? {
                chosen = Some(algorithm);
                break;
            }
        }
        if is_kept && is_refit {
            self.refits.insert(exact, chosen);
        } else if is_kept {
            self.plans.insert(key, chosen);
        }
        Ok(chosen.is_some())
    }

    /// The one of these algorithms that takes the least time, if any can run: one whose call fails
    /// though the stream is well is none. The result is written as often as it is computed.
    ///
    /// # Safety
    /// As [`Matmul::run`].
    unsafe fn quickest(
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

    /// Runs one algorithm; false when the library refuses to.
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
        // SAFETY: the descriptions are alive; the operands are as they say, by the contract.
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
        if REFUSED.contains(&(status as u32)) {
            return Ok(false);
        }
        let launched = check(status, "a matrix product").map_err(|error| stream.failed(error));
        launched.map(|()| true)
    }

    /// What the library names for operands that are aligned to so many bytes, what it takes for the
    /// best first.
    fn choose(
        &self,
        shape: &Shape,
        alignment: u32,
    ) -> Result<Vec<sys::cublasLtMatmulAlgo_t>, KernelError> {
        let preference = Preference::new(WORKSPACE, alignment)?;
        type Found = sys::cublasLtMatmulHeuristicResult_t;
        let mut found = [const { std::mem::MaybeUninit::<Found>::zeroed() }; CHOICES];
        let mut count = 0;
        // SAFETY: all descriptions are alive; as many results are written at most.
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
        if status as u32 == NOT_SUPPORTED {
            return Ok(Vec::new());
        }
        check(status, "choose an algorithm for a matrix product")?;
        let count = usize::try_from(count).unwrap_or(0);
        let found = found.iter().take(count).map(|found| {
            // SAFETY: all-zero is a value of the type, and the library wrote one if it says so.
            unsafe { found.assume_init() }
        });
        Ok(found.filter(|found| found.state as u32 == 0).map(|found| found.algo).collect())
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

/// The library's descriptions of a product.
struct Shape {
    product: sys::cublasLtMatmulDesc_t,
    w: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
}

impl Shape {
    fn new(product: &Product) -> Result<Self, KernelError> {
        let mut shape = Self {
            product: std::ptr::null_mut(),
            w: std::ptr::null_mut(),
            x: std::ptr::null_mut(),
            out: std::ptr::null_mut(),
        };
        let what = "describe a matrix product";
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let (bf16, f32) = (sys::cudaDataType_t::CUDA_R_16BF, sys::cudaDataType_t::CUDA_R_32F);
        // SAFETY: writes a handle, destroyed when `shape` is dropped.
        let status = unsafe { sys::cublasLtMatmulDescCreate(&raw mut shape.product, compute, f32) };
        check(status, what)?;
        let transposed = TRANSPOSED;
        let attribute = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
        // SAFETY: the attribute is of the size given.
        let status = unsafe {
            sys::cublasLtMatmulDescSetAttribute(
                shape.product,
                attribute,
                (&raw const transposed).cast(),
                size_of_val(&transposed),
            )
        };
        check(status, what)?;
        let Product { rows, n, k, x_stride, w_stride, out_stride } = *product;
        let layouts = [
            (&mut shape.w, bf16, k, n, w_stride),
            (&mut shape.x, bf16, k, rows, x_stride),
            (&mut shape.out, f32, n, rows, out_stride),
        ];
        for (layout, element, rows, columns, stride) in layouts {
            let (rows, columns, stride) = (u64::from(rows), u64::from(columns), i64::from(stride));
            // SAFETY: writes a handle, destroyed when `shape` is dropped.
            let status =
                unsafe { sys::cublasLtMatrixLayoutCreate(layout, element, rows, columns, stride) };
            check(status, what)?;
        }
        Ok(shape)
    }
}

impl Drop for Shape {
    fn drop(&mut self) {
        for layout in [self.w, self.x, self.out] {
            if !layout.is_null() {
                // SAFETY: made in `new`.
                let _ = unsafe { sys::cublasLtMatrixLayoutDestroy(layout) };
            }
        }
        if !self.product.is_null() {
            // SAFETY: made in `new`.
            let _ = unsafe { sys::cublasLtMatmulDescDestroy(self.product) };
        }
    }
}

struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new(workspace: usize, alignment: u32) -> Result<Self, KernelError> {
        let what = "choose an algorithm for a matrix product";
        let mut made = Self(std::ptr::null_mut());
        // SAFETY: writes a handle, destroyed when `made` is dropped.
        check(unsafe { sys::cublasLtMatmulPreferenceCreate(&raw mut made.0) }, what)?;
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        made.set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace)?;
        for operand in [
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            made.set(operand, &alignment)?;
        }
        Ok(made)
    }

    /// Sets an attribute whose type is `T`.
    fn set<T>(
        &self,
        attribute: sys::cublasLtMatmulPreferenceAttributes_t,
        value: &T,
    ) -> Result<(), KernelError> {
        let value = (&raw const *value).cast();
        // SAFETY: the attribute is of the size given.
        let status = unsafe {
            sys::cublasLtMatmulPreferenceSetAttribute(self.0, attribute, value, size_of::<T>())
        };
        check(status, "choose an algorithm for a matrix product")
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: made in `new`.
            let _ = unsafe { sys::cublasLtMatmulPreferenceDestroy(self.0) };
        }
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
        // What was chosen for aligned operands is not used for others.
        let less = [DevicePtr(0x1000), DevicePtr(0x2010), DevicePtr(0x3000)];
        assert_ne!(product.key(at), product.key(less));
    }

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

    #[test]
    fn the_least_aligned_operand_counts() {
        let of = |a, b, c| alignment([DevicePtr(a), DevicePtr(b), DevicePtr(c)]);
        assert_eq!(of(0x1000, 0x2000, 0), 256);
        assert_eq!(of(0x1000, 0x2010, 0x40), 16);
        assert_eq!(of(0x1002, 0x2010, 0x40), 2);
    }
}
