//! The norm of q and k over all heads: sums of squares, what they make of q and k, and then what
//! follows the QKV product of any model.
use super::backend::CudaBackend;
use super::launch::{self, QkvFinish};
use super::step::LaunchRows;
use super::tensors::{CudaBuffer, CudaKvCache, CudaVector, Element};
use crate::backend::{AttentionAt, Buffer as _, QkNorm, QkNormOps, RopeTable};
use crate::check::{self, attention};
use crate::error::KernelError;

impl QkNormOps for CudaBackend {
    fn qk_squares(
        &mut self,
        qkv: &CudaBuffer,
        norm: &QkNorm,
        out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        let op = "qk_squares";
        check::qk_norm::squares(qkv, norm, out)?;
        let from = qkv.of(Element::F32, op, "qkv")?;
        let to = out.of(Element::F32, op, "out")?.ptr;
        let rows = qkv.rows();
        out.set_rows(rows)?;
        if self.step.record_or_skip(op, [from.ptr.0, to.0, norm.parts as u64]) || rows == 0 {
            return Ok(());
        }
        let most = qkv.rows_max().min(out.rows_max());
        let LaunchRows { rows: count, live } = self.step.launched(op, rows, most)?;
        let call = launch::qk_squares(from, norm, to, count, live);
        // SAFETY: shapes were checked.
        unsafe { self.device.launch(call) }
    }

    fn qk_scale(
        &mut self,
        qkv: &mut CudaBuffer,
        norm: &QkNorm,
        squares: &CudaBuffer,
        weight: &CudaVector,
    ) -> Result<(), KernelError> {
        let op = "qk_scale";
        check::qk_norm::scale(qkv, norm, squares, weight)?;
        let to = qkv.of(Element::F32, op, "qkv")?;
        let sums = squares.of(Element::F32, op, "squares")?.ptr;
        let rows = qkv.rows();
        if self.step.record_or_skip(op, [to.ptr.0, sums.0, weight.ptr().0]) || rows == 0 {
            return Ok(());
        }
        let most = qkv.rows_max().min(squares.rows_max());
        let LaunchRows { rows: count, live } = self.step.launched(op, rows, most)?;
        let call = launch::qk_scale(to, norm, sums, weight.ptr(), count, live);
        // SAFETY: shapes were checked.
        unsafe { self.device.launch(call) }
    }

    fn rope_write(
        &mut self,
        qkv: &mut CudaBuffer,
        rope: &RopeTable<CudaVector>,
        at: AttentionAt<'_>,
        cache: &mut CudaKvCache,
        q_out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        let op = "rope_write";
        attention::projected(op, (&*qkv, rope), at, cache.shape(), q_out)?;
        let AttentionAt { shape, batch, layer } = at;
        super::attention::heads(op, shape)?;
        let rows = qkv.rows();
        let bounds = attention::bounds(rope, shape, cache.shape());
        if self.step.is_unchecked(op, batch, bounds) {
            attention::places(op, batch, bounds)?;
            self.step.checked(op, bounds);
        }
        let from = qkv.of(Element::F32, op, "qkv")?.ptr;
        let q = q_out.of(Element::Bf16, op, "q_out")?.ptr;
        q_out.set_rows(rows)?;
        self.stage(batch, shape)?;
        let cache = cache.layer(layer);
        if self.step.record_or_skip(op, [from.0, rope.cos.ptr().0, cache.keys.0]) || rows == 0 {
            return Ok(());
        }
        let most = qkv.rows_max().min(q_out.rows_max());
        let LaunchRows { rows: count, live } = self.step.launched(op, rows, most)?;
        let layout = *self.step.layout();
        let io = QkvFinish {
            qkv: from,
            bias: None,
            q_norm: None,
            k_norm: None,
            cos: rope.cos.ptr(),
            sin: rope.sin.ptr(),
            q_scale: rope.q_scale.as_ref().map(CudaVector::ptr),
            positions: self.step.at(layout.positions),
            slots: self.step.at(layout.slots),
            q_out: q,
            cache,
        };
        let call = launch::qkv_finish(&io, shape, count, live);
        // SAFETY: shapes, positions and slots were checked.
        unsafe { self.device.launch(call) }
    }
}
