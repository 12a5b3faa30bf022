//! Multi-head latent attention on the GPU.
use super::backend::CudaBackend;
use super::experts::CudaStack;
use super::launch::{self, LATENT_MOST, LatentFinish};
use super::step::LaunchRows;
use super::tensors::{CudaBuffer, CudaKvCache, CudaVector, Element};
use crate::backend::{AttentionAt, AttentionShape, Buffer as _, LatentInput, LatentOps};
use crate::check::{attention, ensure, latent as check, shape_error};
use crate::error::KernelError;

impl CudaBackend {
    /// Checks the limits on latents that only GPUs have: `latent` elements of `width`, and the
    /// elements of a head without positions.
    ///
    /// # Errors
    /// What GPUs do not take, and what they take.
    pub fn check_latents(latent: usize, width: usize, plain: usize) -> Result<(), String> {
        let (latent_most, width_most) = LATENT_MOST;
        if latent > latent_most || width > width_most {
            return Err(format!(
                "latents of {latent} in vectors of {width}: GPUs take up to {latent_most} and \
                 {width_most}"
            ));
        }
        if !(latent.is_multiple_of(16) && width.is_multiple_of(16)) {
            return Err(format!(
                "latents of {latent} in vectors of {width}: GPUs take multiples of 16"
            ));
        }
        if !plain.is_multiple_of(8) {
            return Err(format!(
                "heads have {plain} elements without positions: GPUs take a multiple of 8"
            ));
        }
        Ok(())
    }
}

/// The same for an operation, with or without the elements of a head without positions.
pub(super) fn latents(
    op: &'static str,
    shape: &AttentionShape,
    plain: Option<usize>,
) -> Result<(), KernelError> {
    CudaBackend::check_latents(shape.value_dim(), shape.head_dim, plain.unwrap_or(0))
        .map_err(|message| shape_error(op, message))
}

impl LatentOps for CudaBackend {
    fn latent_write(
        &mut self,
        input: LatentInput<'_, CudaBuffer, CudaVector>,
        at: AttentionAt<'_>,
        cache: &mut CudaKvCache,
        plain: &mut CudaBuffer,
        q_out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        let op = "latent_write";
        let parts = check::write(&input, at, cache.shape(), plain, q_out)?;
        let LatentInput { q, kv, norm, rope, scale } = input;
        let AttentionAt { shape, batch, layer } = at;
        latents(op, shape, Some(parts.plain))?;
        let bounds = check::bounds(rope, parts, cache.shape());
        if self.step.is_unchecked(op, batch, bounds) {
            attention::places(op, batch, bounds)?;
            self.step.checked(op, bounds);
        }
        let from = q.of(Element::F32, op, "q")?.ptr;
        let kv_from = kv.of(Element::F32, op, "kv")?.ptr;
        let plain_out = plain.of(Element::Bf16, op, "plain")?.ptr;
        let to = q_out.of(Element::Bf16, op, "q_out")?.ptr;
        let rows = q.rows();
        plain.set_rows(rows)?;
        q_out.set_rows(rows)?;
        self.stage(batch, shape)?;
        let cache = cache.layer(layer);
        if self.step.record_or_skip(op, [from.0, norm.ptr().0, cache.keys.0]) || rows == 0 {
            return Ok(());
        }
        let most = [q, &*kv, &*plain, &*q_out].map(|buffer| buffer.rows_max()).into_iter().min();
        let LaunchRows { rows: count, live } = self.step.launched(op, rows, most.unwrap_or(0))?;
        let layout = *self.step.layout();
        let io = LatentFinish {
            q: from,
            kv: kv_from,
            norm: norm.ptr(),
            cos: rope.cos.ptr(),
            sin: rope.sin.ptr(),
            positions: self.step.at(layout.positions),
            slots: self.step.at(layout.slots),
            plain_out,
            q_out: to,
            cache,
        };
        let sizes = [parts.plain, parts.latent, parts.rotated];
        let call = launch::latent_finish(&io, shape, sizes, scale, count, live);
        // SAFETY: shapes, positions and slots were checked.
        unsafe { self.device.launch(call) }
    }

    fn heads_product(
        &mut self,
        x: &CudaBuffer,
        weight: &CudaStack,
        scale: f32,
        out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        let op = "heads_product";
        let sizes = weight.sizes();
        let stride = check::heads_product(x, sizes, out)?;
        let (heads, n, k) = sizes;
        let w = weight.all.weight();
        ensure!(op, w.is_bf16(), "the heads' matrices are quantised: they must be bf16");
        ensure!(op, k.is_multiple_of(8), "heads have {k} inputs: GPUs take a multiple of 8");
        let from = x.of(Element::Bf16, op, "x")?;
        let to = out.of(Element::Bf16, op, "out")?;
        let rows = x.rows();
        out.set_rows(rows)?;
        if self.step.record_or_skip(op, [from.ptr.0, w.at.ptr.0, to.ptr.0]) || rows == 0 {
            return Ok(());
        }
        let most = x.rows_max().min(out.rows_max());
        let LaunchRows { rows: count, live } = self.step.launched(op, rows, most)?;
        let sizes = (count, heads, n, k);
        let call = launch::heads_product(from, w.at, to, sizes, stride, scale, live);
        // SAFETY: shapes were checked.
        unsafe { self.device.launch(call) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_gpus_do_not_take_are_named() {
        let check = CudaBackend::check_latents;
        for (latent, width, plain) in [(512, 576, 128), (32, 48, 24), (16, 32, 8)] {
            assert_eq!(check(latent, width, plain), Ok(()));
        }
        for (latent, width, plain, expected) in [
            (528, 576, 128, "latents of 528 in vectors of 576: GPUs take up to 512 and 576"),
            (512, 592, 128, "latents of 512 in vectors of 592: GPUs take up to 512 and 576"),
            (40, 64, 128, "latents of 40 in vectors of 64: GPUs take multiples of 16"),
            (48, 56, 128, "latents of 48 in vectors of 56: GPUs take multiples of 16"),
            (512, 576, 20, "heads have 20 elements without positions: GPUs take a multiple of 8"),
        ] {
            assert_eq!(check(latent, width, plain), Err(expected.to_owned()));
        }
    }
}
