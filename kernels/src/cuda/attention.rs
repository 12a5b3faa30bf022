//! What follows the QKV product, and attention over the cache: tiles of prompt rows, split
//! sequences for decoding, and a generic kernel for head dimensions without kernels of their own.
use super::backend::{CudaBackend, ScratchKind};
use super::batch::live;
use super::latent::latents;
use super::launch::{self, AttentionIo, DecodeWork, HEAD_DIM_MAX, Partials, QkvFinish, Rows};
use super::parts::Windows;
use super::products::addend_at;
use super::step::LaunchRows;
use super::swap::CudaHostKv;
use super::tensors::{CudaBuffer, CudaKvCache, CudaMatrix, CudaVector, Element};
use crate::backend::{AttentionAt, AttentionOps, AttentionShape, Buffer as _, KvShape, QkvInput};
use crate::check::attention as check;
use crate::check::{ensure, shape_error};
use crate::error::KernelError;

impl CudaBackend {
    /// Checks the limits on attention and its cache that only GPUs have; those on latents are
    /// [`CudaBackend::check_latents`].
    ///
    /// # Errors
    /// What GPUs do not take, and what they take.
    pub fn check_attention(
        shape: &AttentionShape,
        windows: &[Option<u32>],
        cache: &KvShape,
    ) -> Result<(), String> {
        if shape.latent.is_none() {
            check_heads(shape)?;
        }
        Windows::new(windows).map_err(|error| error.to_string())?;
        CudaKvCache::check(cache)
    }
}

fn check_heads(shape: &AttentionShape) -> Result<(), String> {
    let (heads, kv_heads, head_dim) = (shape.num_heads, shape.num_kv_heads, shape.head_dim);
    if head_dim > HEAD_DIM_MAX {
        return Err(format!("head_dim is {head_dim}: GPUs take up to {HEAD_DIM_MAX}"));
    }
    if !(heads * head_dim).is_multiple_of(8) || !(kv_heads * head_dim).is_multiple_of(8) {
        return Err(format!(
            "{heads} and {kv_heads} heads of {head_dim}: GPUs take rows of a multiple of 8 elements"
        ));
    }
    Ok(())
}

/// Checks the limits on heads that only GPUs have.
pub(super) fn heads(op: &'static str, shape: &AttentionShape) -> Result<(), KernelError> {
    check_heads(shape).map_err(|message| shape_error(op, message))
}

impl AttentionOps for CudaBackend {
    fn qkv_rope_write(
        &mut self,
        input: QkvInput<'_, CudaBuffer, CudaMatrix, CudaVector>,
        at: AttentionAt<'_>,
        cache: &mut CudaKvCache,
        q_out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        let op = "qkv_rope_write";
        check::qkv(&input, at, cache.shape(), q_out)?;
        let QkvInput { x, weights, addend, rope } = input;
        let AttentionAt { shape, batch, layer } = at;
        heads(op, shape)?;
        let (rows, width) = (x.rows(), weights.weight.rows());
        let bounds = check::bounds(rope, shape, cache.shape());
        if self.step.is_unchecked(op, batch, bounds) {
            check::places(op, batch, bounds)?;
            self.step.checked(op, bounds);
        }
        let addend = addend_at(op, addend)?;
        let from = x.of(Element::Bf16, op, "x")?;
        let q = q_out.of(Element::Bf16, op, "q_out")?.ptr;
        q_out.set_rows(rows)?;
        self.stage(batch, shape)?;
        let cache = cache.layer(layer);
        if self.step.record_or_skip(op, [from.ptr.0, weights.weight.at().ptr.0, cache.keys.0])
            || rows == 0
        {
            return Ok(());
        }
        let most = x.rows_max().min(q_out.rows_max());
        let LaunchRows { rows: count, live } = self.step.launched(op, rows, most)?;
        let qkv = Rows { ptr: self.scratch(ScratchKind::Wide, count * width * 4)?, stride: width };
        self.product(from, None, &weights.weight, None, qkv, count, live)?;
        if let Some(addend) = addend {
            let call = launch::add(qkv.ptr, addend, width, count, live);
            // SAFETY: shapes were checked.
            unsafe { self.device.launch(call) }?;
        }
        let layout = *self.step.layout();
        let io = QkvFinish {
            qkv: qkv.ptr,
            bias: weights.bias.as_ref().map(CudaVector::ptr),
            q_norm: weights.q_norm.as_ref().map(CudaVector::ptr),
            k_norm: weights.k_norm.as_ref().map(CudaVector::ptr),
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

    fn paged_attention(
        &mut self,
        q: &CudaBuffer,
        sinks: Option<&CudaVector>,
        at: AttentionAt<'_>,
        cache: &CudaKvCache,
        out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        let AttentionAt { shape, batch, layer } = at;
        let op = "paged_attention";
        check::attention(q, sinks, at, cache.shape(), out)?;
        match shape.latent {
            None => heads(op, shape)?,
            Some(_) => {
                latents(op, shape, None)?;
                let is_plain = sinks.is_none() && shape.softcap.is_none();
                ensure!(op, is_plain, "sinks or caps: GPUs do not take them with latents");
            }
        }
        let from = q.of(Element::Bf16, op, "q")?.ptr;
        let to = out.of(Element::Bf16, op, "out")?.ptr;
        let rows = q.rows();
        out.set_rows(rows)?;
        let bounds = (cache.shape().block_size, cache.shape().num_blocks);
        if self.step.is_unchecked(op, batch, bounds) {
            check::sequences(op, batch, rows, bounds.0, bounds.1)?;
            self.step.checked(op, bounds);
        }
        self.stage(batch, shape)?;
        let window = u64::from(shape.sliding_window.unwrap_or(0));
        let cache = cache.layer(layer);
        if self.step.record_or_skip(op, [from.0, cache.keys.0, window]) || rows == 0 {
            return Ok(());
        }
        let layout = *self.step.layout();
        let io = AttentionIo {
            q: from,
            cache,
            seqs: self.step.at(layout.seqs),
            block_tables: self.step.at(layout.tables),
            out: to,
            sinks: sinks.map(CudaVector::ptr),
        };
        let counts = self.step.counts();
        ensure!(op, counts.rows <= out.rows_max(), "{} rows, too many", counts.rows);
        let tiles = self.step.at(layout.tiles);
        let live_tiles = self.step.at(live::TILES);
        let (seqs, live) = (self.step.at(live::SEQS), self.step.at(live::ROWS));
        let prefill = match shape.latent {
            // Tiles tell whether there are rows that are not decoded.
            Some(_) => {
                let seqs = (seqs, counts.items > 0);
                Some(launch::latent_attention(&io, shape, seqs, counts.rows, live))
            }
            None => launch::prefill_attention(&io, shape, tiles, counts.tiles, live_tiles),
        };
        let Some(prefill) = prefill.filter(|call| self.device.has_room(call)) else {
            // The other kernel's results are as wide as K.
            ensure!(op, shape.latent.is_none(), "the GPU has no room for its kernel for latents");
            let call = launch::attention_any(&io, shape, seqs, counts.rows, live);
            // SAFETY: shapes and block tables were checked.
            return unsafe { self.device.launch(call) };
        };
        if counts.tiles > 0 {
            // SAFETY: as above.
            unsafe { self.device.launch(prefill) }?;
        }
        if counts.items > 0 {
            let (out, ml) = Partials::elements(shape, counts.seqs);
            let ptr = self.scratch(ScratchKind::Partials, (out + ml) * 4)?;
            let partials = Partials { out: ptr, ml: ptr.offset(out * 4) };
            let (parts, live_parts, parts_most) = self.step.parts(shape.sliding_window)?;
            let work = DecodeWork {
                parts,
                parts_most,
                live_parts,
                items: self.step.at(layout.items),
                items_most: counts.items,
                live_items: self.step.at(live::ITEMS),
            };
            let multiprocessors = self.device.context.info().multiprocessors;
            let calls = match shape.latent {
                Some(_) => {
                    Some(launch::latent_decode(&io, shape, &work, partials, multiprocessors))
                }
                None => launch::decode_attention(&io, shape, &work, partials, multiprocessors),
            };
            for call in calls.into_iter().flatten() {
                // SAFETY: as above; the list names sequences of the batch, and the partial results
                // have room for all splits of each.
                unsafe { self.device.launch(call) }?;
            }
        }
        Ok(())
    }

    fn swap_out(
        &mut self,
        cache: &CudaKvCache,
        host: &mut CudaHostKv,
        pairs: &[(u32, u32)],
    ) -> Result<(), KernelError> {
        host.copy(&self.device, cache, pairs, true)
    }

    fn swap_in(
        &mut self,
        cache: &mut CudaKvCache,
        host: &mut CudaHostKv,
        pairs: &[(u32, u32)],
    ) -> Result<(), KernelError> {
        host.copy(&self.device, cache, pairs, false)
    }
}
