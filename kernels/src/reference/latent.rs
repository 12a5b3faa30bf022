//! Multi-head latent attention: what is written to the cache, and products per head.
use super::attention::{rope_row, rotate};
use super::experts::sizes;
use super::{ReferenceBackend, dot, rmsnorm};
use crate::backend::{AttentionAt, Buffer as _, LatentInput, LatentOps};
use crate::check::{attention, latent as check};
use crate::error::KernelError;

impl LatentOps for ReferenceBackend {
    fn latent_write(
        &mut self,
        input: LatentInput<'_, Self::Buffer, Self::Vector>,
        at: AttentionAt<'_>,
        cache: &mut Self::KvCache,
        plain: &mut Self::Buffer,
        q_out: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        let parts = check::write(&input, at, cache.shape(), plain, q_out)?;
        let LatentInput { q, kv, norm, rope, scale } = input;
        let AttentionAt { shape, batch, layer } = at;
        attention::places("latent_write", batch, check::bounds(rope, parts, cache.shape()))?;
        plain.set_rows(q.rows())?;
        q_out.set_rows(q.rows())?;
        for i in 0..q.rows() {
            let (cos, sin) = rope_row(rope, parts.rotated, batch.positions[i]);
            let mut k = kv.row(i).to_vec();
            rmsnorm(&kv.row(i)[..parts.latent], norm, shape.norm_eps, &mut k[..parts.latent]);
            rotate(&mut k[parts.latent..], cos, sin);
            cache.store(layer, batch.slots[i] as usize, &k, &[]);
            let heads = q.row(i).chunks_exact(parts.plain + parts.rotated);
            let plain = plain.row_mut(i).chunks_exact_mut(parts.plain);
            let out = q_out.row_mut(i).chunks_exact_mut(shape.head_dim);
            for ((head, plain), out) in heads.zip(plain).zip(out) {
                let (first, second) = head.split_at(parts.plain);
                plain.copy_from_slice(first);
                let out = &mut out[parts.latent..];
                out.copy_from_slice(second);
                rotate(out, cos, sin);
                out.iter_mut().for_each(|x| *x *= scale);
            }
        }
        Ok(())
    }

    fn heads_product(
        &mut self,
        x: &Self::Buffer,
        weight: &Self::Stack,
        scale: f32,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        let sizes = sizes(weight);
        let stride = check::heads_product(x, sizes, out)?;
        out.set_rows(x.rows())?;
        for i in 0..x.rows() {
            let heads = x.row(i).chunks_exact(sizes.2).zip(weight);
            for ((x, weight), out) in heads.zip(out.row_mut(i).chunks_exact_mut(stride)) {
                for (row, out) in out[..weight.rows()].iter_mut().enumerate() {
                    *out = scale * dot(weight.row(row), x);
                }
            }
        }
        Ok(())
    }
}
