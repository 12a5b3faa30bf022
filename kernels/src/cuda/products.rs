//! Matrix products: by this project's kernels for few rows, by cuBLASLt for more.
use std::time::Duration;

use super::backend::{CudaBackend, ScratchKind};
use super::batch::live;
use super::device::Device;
use super::launch::{self, Rows};
use super::matmul::Product;
use super::memory::DevicePtr;
use super::step::LaunchRows;
use super::tensors::{CudaBuffer, CudaMatrix, CudaVector, Element};
use crate::backend::{Activation, Buffer as _, PlainActivation, ProductOps};
use crate::check::{self, ensure};
use crate::error::KernelError;

/// Maximum number of rows for this project's own kernels; cuBLASLt computes the rest. These kernels
/// reread all rows of x from L2 for every 32 outputs. For 64 rows that is twice the size of the
/// weights, more than L2 can deliver in addition to them.
pub(super) const SKINNY_MAX: usize = 32;

/// The same for quantised weights, which cuBLASLt needs widened to bf16: five bytes are then moved
/// for a weight, by memory. Here L2 moves a weight and its share of x for each tile of rows: five
/// bytes for up to 64 rows of int8, three or less for up to 32 of those whose groups of inputs have
/// scales. With two tiles of 64 rows that is more than L2 moves in the time: see estimates.md.
const QUANTISED_SKINNY_MAX: usize = 64;

/// Rows of gate and up to compute at a time, since their f32 products are large.
const GATE_UP_ROWS: usize = 1024;
/// The same without a gate. Quantised weights are widened once for each.
const ACTIVATED_ROWS: usize = 2 * GATE_UP_ROWS;

/// Address of an addend.
pub(super) fn addend_at(
    op: &'static str,
    addend: Option<&CudaBuffer>,
) -> Result<Option<DevicePtr>, KernelError> {
    let at = addend.map(|addend| addend.of(Element::F32, op, "addend")).transpose()?;
    Ok(at.map(|rows| rows.ptr))
}

impl ProductOps for CudaBackend {
    fn linear(
        &mut self,
        x: &CudaBuffer,
        weight: &CudaMatrix,
        bias: Option<&CudaVector>,
        out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        check::product("linear", x, weight, bias, weight.rows(), out)?;
        self.linear_columns(x, 0, weight, bias, out)
    }

    fn linear_columns(
        &mut self,
        x: &CudaBuffer,
        first: usize,
        weight: &CudaMatrix,
        bias: Option<&CudaVector>,
        out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        let op = "linear_columns";
        let cols = weight.cols();
        check::columns(op, x, first, cols)?;
        check::width(op, "out", out, weight.rows())?;
        check::vector(op, "bias", bias, weight.rows())?;
        let mut from = x.of(Element::Bf16, op, "x")?;
        let to = out.of(Element::F32, op, "out")?;
        let rows = x.rows();
        out.set_rows(rows)?;
        if self.step.record_or_skip(op, [from.ptr.0, weight.at().ptr.0, to.ptr.0]) || rows == 0 {
            return Ok(());
        }
        let most = x.rows_max().min(out.rows_max());
        let LaunchRows { rows: count, live } = self.step.launched(op, rows, most)?;
        // This project's kernels need rows aligned to 16 bytes; cuBLASLt has its best choice at
        // 256.
        let step = if self.is_skinny_with(count, weight) { 8 } else { 128 };
        if first.is_multiple_of(step) {
            from.ptr = from.ptr.offset(first * 2);
        } else {
            let stride = cols.next_multiple_of(8);
            let copy = Rows { ptr: self.scratch(ScratchKind::Narrow, count * stride * 2)?, stride };
            let call = launch::copy_columns(from, copy, first, cols, count, live);
            // SAFETY: the scratch was made for it; the columns were checked.
            unsafe { self.device.launch(call) }?;
            from = copy;
        }
        self.product(from, None, weight, bias, to, count, live)
    }

    fn gate_up(
        &mut self,
        x: &CudaBuffer,
        weight: &CudaMatrix,
        bias: Option<&CudaVector>,
        addend: Option<&CudaBuffer>,
        activation: Activation,
        out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        let (op, features) = ("gate_up", weight.rows());
        let inner = check::gate_up(x, weight, bias, addend, out)?;
        let from = x.of(Element::Bf16, op, "x")?;
        let to = out.of(Element::Bf16, op, "out")?;
        let rows = x.rows();
        let addend = addend_at(op, addend)?;
        out.set_rows(rows)?;
        if self.step.record_or_skip(op, [from.ptr.0, weight.at().ptr.0, to.ptr.0]) || rows == 0 {
            return Ok(());
        }
        let most = x.rows_max().min(out.rows_max());
        let LaunchRows { rows: count, live } = self.step.launched(op, rows, most)?;
        let bias = bias.map(CudaVector::ptr);
        if addend.is_none() && self.is_skinny_with(count, weight) {
            let sizes = (count, inner, weight.cols());
            let call =
                launch::skinny_gate_up(from, weight.weight(), bias, to, sizes, activation, live);
            // SAFETY: shapes were checked.
            return unsafe { self.device.launch(call) };
        }
        // No part is larger than the first: if that one needs no bf16 copy, none does.
        let bf16 = match self.is_skinny_with(count.min(GATE_UP_ROWS), weight) {
            true => None,
            false => Some(self.widen(weight)?),
        };
        let mut done = 0;
        while done < count {
            let part = (count - done).min(GATE_UP_ROWS);
            let both = self.scratch(ScratchKind::Wide, part * features * 4)?;
            let x = Rows { ptr: from.ptr.offset(done * from.stride * 2), ..from };
            let y = Rows { ptr: to.ptr.offset(done * to.stride * 2), ..to };
            let wide = Rows { ptr: both, stride: features };
            // Graphs have a single part; in a later part, all rows launched for exist.
            let live = if done == 0 { live } else { DevicePtr::default() };
            match bf16 {
                Some(bf16) if !self.is_skinny_with(part, weight) => {
                    self.multiply(x, weight, bf16, None, wide, part, live)?;
                }
                _ => self.product(x, None, weight, None, wide, part, live)?,
            }
            if let Some(addend) = addend {
                let own = addend.offset(done * features * 4);
                let call = launch::add(both, own, features, part, live);
                // SAFETY: shapes were checked.
                unsafe { self.device.launch(call) }?;
            }
            let call = launch::activate_mul(both, bias, y, inner, activation, part, live);
            // SAFETY: shapes were checked.
            unsafe { self.device.launch(call) }?;
            done += part;
        }
        Ok(())
    }

    fn activated(
        &mut self,
        x: &CudaBuffer,
        weight: &CudaMatrix,
        bias: Option<&CudaVector>,
        addend: Option<&CudaBuffer>,
        activation: PlainActivation,
        out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        let (op, inner) = ("activated", weight.rows());
        check::activated(x, weight, bias, addend, out)?;
        let from = x.of(Element::Bf16, op, "x")?;
        let to = out.of(Element::Bf16, op, "out")?;
        let rows = x.rows();
        let addend = addend_at(op, addend)?;
        out.set_rows(rows)?;
        if self.step.record_or_skip(op, [from.ptr.0, weight.at().ptr.0, to.ptr.0]) || rows == 0 {
            return Ok(());
        }
        let most = x.rows_max().min(out.rows_max());
        let LaunchRows { rows: count, live } = self.step.launched(op, rows, most)?;
        let mut done = 0;
        while done < count {
            let part = (count - done).min(ACTIVATED_ROWS);
            let wide = self.scratch(ScratchKind::Wide, part * inner * 4)?;
            let x = Rows { ptr: from.ptr.offset(done * from.stride * 2), ..from };
            let y = Rows { ptr: to.ptr.offset(done * to.stride * 2), ..to };
            // Graphs have a single part; in a later part, all rows launched for exist.
            let live = if done == 0 { live } else { DevicePtr::default() };
            let product = Rows { ptr: wide, stride: inner };
            self.product(x, None, weight, bias, product, part, live)?;
            if let Some(addend) = addend {
                let own = addend.offset(done * inner * 4);
                let call = launch::add(wide, own, inner, part, live);
                // SAFETY: shapes were checked.
                unsafe { self.device.launch(call) }?;
            }
            let call = launch::activate(wide, y, inner, activation, part, live);
            // SAFETY: shapes were checked.
            unsafe { self.device.launch(call) }?;
            done += part;
        }
        Ok(())
    }

    fn lm_head(
        &mut self,
        x: &CudaBuffer,
        rows: &[u32],
        weight: &CudaMatrix,
        cap: Option<f32>,
        out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        let op = "lm_head";
        check::product(op, x, weight, None::<&CudaVector>, weight.rows(), out)?;
        check::below_bound(op, "row", rows, x.rows())?;
        check::attention::softcap(op, cap)?;
        let from = x.of(Element::Bf16, op, "x")?;
        let to = out.of(Element::F32, op, "out")?;
        out.set_rows(rows.len())?;
        if rows.is_empty() {
            return Ok(());
        }
        if self.alone {
            // For other steps, which compute the log-probabilities of prompts.
            self.scratch(ScratchKind::Index, size_of_val(rows))?;
        }
        let own = self.step.has_sample_rows(rows);
        if self.step.record_or_skip(op, [from.ptr.0, weight.at().ptr.0, to.ptr.0]) {
            return Ok(());
        }
        let (index, count, live) = if own {
            let index = self.step.at(self.step.layout().sample_rows);
            (index, self.step.counts().samples, self.step.at(live::SAMPLES))
        } else {
            ensure!(op, !self.step.is_graph(), "the rows are not those the step began with");
            let index = self.scratch(ScratchKind::Index, size_of_val(rows))?;
            self.index_upload(rows)?;
            (index, rows.len(), DevicePtr::default())
        };
        ensure!(op, count <= out.rows_max(), "{count} rows, room for {}", out.rows_max());
        self.product(from, Some(index), weight, None, to, count, live)?;
        let Some(cap) = cap else { return Ok(()) };
        let call = launch::cap(to.ptr, cap, weight.rows(), count, live);
        // SAFETY: the logits have as many rows and columns, without gaps.
        unsafe { self.device.launch(call) }
    }
}

impl CudaBackend {
    /// Plans the products of all steps that are smaller than those so far, for at most `limit`, so
    /// that what the library loads for them is there before memory is divided, and no request waits
    /// for it. Returns how many were planned.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    pub fn plan_products(&mut self, limit: Duration) -> Result<usize, KernelError> {
        let above = u32::try_from(SKINNY_MAX).unwrap_or(u32::MAX);
        let Device { matmul, stream, .. } = &mut self.device;
        matmul.as_mut().map_or(Ok(0), |matmul| matmul.plan_ahead(stream, above, limit))
    }

    /// The first failure of cuBLASLt to choose an algorithm since the last call. This project's own
    /// kernels then compute such products, which is slow for many rows.
    pub fn take_product_fault(&mut self) -> Option<String> {
        self.device.matmul.as_mut().ok()?.take_fault()
    }

    /// Whether this project's own kernels compute a product of this many rows, in which case each
    /// row's bits do not depend on the other rows.
    pub(super) fn is_skinny(&self, rows: usize) -> bool {
        rows <= SKINNY_MAX || self.options.batch_invariant || self.device.matmul.is_err()
    }

    /// As [`Self::is_skinny`], for a product with this matrix.
    pub(super) fn is_skinny_with(&self, rows: usize, weight: &CudaMatrix) -> bool {
        self.is_skinny(rows) || (!weight.weight().is_bf16() && rows <= QUANTISED_SKINNY_MAX)
    }

    /// Whether steps of up to `rows` rows can convert quantised weights to bf16, which takes
    /// memory.
    #[must_use]
    pub fn widens_int8(&self, rows: usize) -> bool {
        rows > QUANTISED_SKINNY_MAX && !self.is_skinny(rows)
    }

    /// `out = x W^T + bias`, or of the rows of x listed in `index`.
    #[allow(clippy::too_many_arguments, reason = "a product's operands")]
    pub(super) fn product(
        &mut self,
        x: Rows,
        index: Option<DevicePtr>,
        weight: &CudaMatrix,
        bias: Option<&CudaVector>,
        out: Rows,
        rows: usize,
        live: DevicePtr,
    ) -> Result<(), KernelError> {
        let (n, k) = (weight.rows(), weight.cols());
        let w = weight.weight();
        // An index is only used for the output head, the largest matrix of all: in bf16, it would
        // take much of the memory that quantisation saves.
        if self.is_skinny_with(rows, weight) || (!w.is_bf16() && index.is_some()) {
            let bias = bias.map(CudaVector::ptr);
            let call = launch::skinny((x, index), w, bias, out, (rows, n, k), live);
            // SAFETY: operands and result have the rows and columns that were checked.
            return unsafe { self.device.launch(call) };
        }
        let x = match index {
            None => x,
            Some(index) => {
                let stride = k.next_multiple_of(8);
                let ptr = self.scratch(ScratchKind::Narrow, rows * stride * 2)?;
                let gathered = Rows { ptr, stride };
                let call = launch::gather_rows(x, index, gathered, k, rows, live);
                // SAFETY: the scratch was made for it; the callers have checked the row numbers.
                unsafe { self.device.launch(call) }?;
                gathered
            }
        };
        let bf16 = self.widen(weight)?;
        self.multiply(x, weight, bf16, bias, out, rows, live)
    }

    /// The address of a matrix in bf16, as [`CudaBackend::multiply`] takes it. Quantised weights
    /// are converted into scratch, which is valid until the next matrix is widened.
    pub(super) fn widen(&mut self, weight: &CudaMatrix) -> Result<DevicePtr, KernelError> {
        let w = weight.weight();
        if w.is_bf16() {
            return Ok(w.at.ptr);
        }
        let n = weight.rows();
        let widened = self.scratch(ScratchKind::Widened, n * w.at.stride * 2)?;
        let k = weight.cols();
        let call = match (w.groups, w.fp8) {
            (None, None) => launch::widen_int8(w.at, widened, n),
            (Some(groups), _) => launch::widen_int4(w.at, groups, widened, n, k),
            (None, Some(scales)) => launch::widen_fp8(w.at, scales, widened, n, k),
        };
        // SAFETY: the scratch was made for as many rows of that stride.
        unsafe { self.device.launch(call) }?;
        Ok(widened)
    }

    /// `out = x W^T + bias` for more than a few rows; `bf16` is the matrix [widened](Self::widen).
    #[allow(clippy::too_many_arguments, reason = "a product's operands")]
    pub(super) fn multiply(
        &mut self,
        x: Rows,
        weight: &CudaMatrix,
        bf16: DevicePtr,
        bias: Option<&CudaVector>,
        out: Rows,
        rows: usize,
        live: DevicePtr,
    ) -> Result<(), KernelError> {
        let (n, k) = (weight.rows(), weight.cols());
        let bias = bias.map(CudaVector::ptr);
        let w = weight.weight();
        let product = Product {
            rows: small(rows)?,
            n: small(n)?,
            k: small(k)?,
            x_stride: small(x.stride)?,
            w_stride: small(w.at.stride)?,
            out_stride: small(out.stride)?,
        };
        // SAFETY: operands and result have the rows and columns that were checked.
        let done = unsafe { self.device.multiply(&product, x.ptr, bf16, out.ptr) }?;
        match (w.scales, bias) {
            _ if !done => {
                // Slower, but correct for all shapes.
                let call = launch::skinny((x, None), w, bias, out, (rows, n, k), live);
                // SAFETY: as above.
                unsafe { self.device.launch(call) }
            }
            (None, None) => Ok(()),
            (Some(scales), bias) => {
                let call = launch::scale_add_bias(out.ptr, scales, bias, n, rows, live);
                // SAFETY: the result is contiguous, and scales and bias are as wide.
                unsafe { self.device.launch(call) }
            }
            (None, Some(bias)) => {
                let call = launch::add_bias(out.ptr, bias, n, rows, live);
                // SAFETY: the result is contiguous, and the bias is as wide.
                unsafe { self.device.launch(call) }
            }
        }
    }
}

pub(super) fn small(n: usize) -> Result<u32, KernelError> {
    u32::try_from(n).map_err(|_| KernelError::Shape {
        op: "product",
        message: format!("{n} is more than a kernel can count"),
    })
}
