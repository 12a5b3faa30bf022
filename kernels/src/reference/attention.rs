//! RoPE, QK-norm and causal attention over a paged cache, one row and one head at a time.
use super::tensor::{ReferenceBuffer, ReferenceKvCache};
use super::{ReferenceBackend, add_row, dot, project, rmsnorm};
use crate::backend::{
    AttentionAt, AttentionOps, AttentionShape, Batch, Buffer as _, QkvInput, RopeTable, SeqRows,
};
use crate::check::attention as check;
use crate::error::KernelError;

impl AttentionOps for ReferenceBackend {
    fn qkv_rope_write(
        &mut self,
        input: QkvInput<'_, Self::Buffer, Self::Matrix, Self::Vector>,
        at: AttentionAt<'_>,
        cache: &mut Self::KvCache,
        q_out: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        check::qkv(&input, at, cache.shape(), q_out)?;
        let QkvInput { x, weights, addend, rope } = input;
        let AttentionAt { shape, batch, layer } = at;
        check::places("qkv_rope_write", batch, check::bounds(rope, shape, cache.shape()))?;
        q_out.set_rows(x.rows())?;
        let (q_width, kv_width) =
            (shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim);
        let mut qkv = std::mem::take(&mut self.row);
        qkv.resize(q_width + 2 * kv_width, 0.0);
        for i in 0..x.rows() {
            project(x.row(i), &weights.weight, weights.bias.as_deref(), &mut qkv);
            add_row(&mut qkv, addend, i);
            let (q, kv) = qkv.split_at_mut(q_width);
            let (k, v) = kv.split_at_mut(kv_width);
            let (cos, sin) = rope_row(rope, shape.head_dim, batch.positions[i]);
            finish_heads(q, weights.q_norm.as_deref(), cos, sin, shape);
            scale_q(q, rope, batch.positions[i]);
            finish_heads(k, weights.k_norm.as_deref(), cos, sin, shape);
            q_out.row_mut(i).copy_from_slice(q);
            cache.store(layer, batch.slots[i] as usize, k, v);
        }
        self.row = qkv;
        Ok(())
    }

    fn paged_attention(
        &mut self,
        q: &Self::Buffer,
        sinks: Option<&Self::Vector>,
        at: AttentionAt<'_>,
        cache: &Self::KvCache,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        let AttentionAt { shape, batch, layer } = at;
        check::attention(q, sinks, at, cache.shape(), out)?;
        let (block_size, num_blocks) = (cache.shape().block_size, cache.shape().num_blocks);
        check::sequences("paged_attention", batch, q.rows(), block_size, num_blocks)?;
        out.set_rows(q.rows())?;
        for seq in batch.seqs {
            let scores = &mut self.scores;
            attend((q, sinks), shape, batch, seq, cache, layer, scores, out);
        }
        Ok(())
    }

    fn swap_out(
        &mut self,
        cache: &Self::KvCache,
        host: &mut Self::HostKv,
        pairs: &[(u32, u32)],
    ) -> Result<(), KernelError> {
        check::swap("swap_out", cache.shape(), host.shape(), pairs, true)?;
        pairs.iter().for_each(|(block, to)| host.copy_block(cache, *block, *to));
        Ok(())
    }

    fn swap_in(
        &mut self,
        cache: &mut Self::KvCache,
        host: &mut Self::HostKv,
        pairs: &[(u32, u32)],
    ) -> Result<(), KernelError> {
        check::swap("swap_in", cache.shape(), host.shape(), pairs, false)?;
        pairs.iter().for_each(|(block, from)| cache.copy_block(host, *from, *block));
        Ok(())
    }
}

/// cos and sin of one position, `head_dim / 2` of each.
pub(super) fn rope_row(
    rope: &RopeTable<Vec<f32>>,
    head_dim: usize,
    position: u32,
) -> (&[f32], &[f32]) {
    let half = head_dim / 2;
    let start = position as usize * half;
    (&rope.cos[start..][..half], &rope.sin[start..][..half])
}

/// Normalises every head if the model does, then rotates it in place.
pub(super) fn finish_heads(
    heads: &mut [f32],
    norm: Option<&[f32]>,
    cos: &[f32],
    sin: &[f32],
    shape: &AttentionShape,
) {
    for head in heads.chunks_exact_mut(shape.head_dim) {
        if let Some(norm) = norm {
            let plain = head.to_vec();
            rmsnorm(&plain, norm, shape.norm_eps, head);
        }
        rotate(head, cos, sin);
    }
}

/// Multiplies q by the factor of its position, if there are any.
pub(super) fn scale_q(q: &mut [f32], rope: &RopeTable<Vec<f32>>, position: u32) {
    if let Some(scale) = &rope.q_scale {
        q.iter_mut().for_each(|x| *x *= scale[position as usize]);
    }
}

/// Rotates element `i` with `i + half`.
pub(super) fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let half = cos.len();
    for i in 0..half {
        let (x, y) = (head[i], head[i + half]);
        head[i] = x * cos[i] - y * sin[i];
        head[i + half] = y * cos[i] + x * sin[i];
    }
}

/// Attention of all rows and heads of one sequence.
#[allow(clippy::too_many_arguments, reason = "the operation's own arguments and its scratch")]
fn attend(
    (q, sinks): (&ReferenceBuffer, Option<&Vec<f32>>),
    shape: &AttentionShape,
    batch: &Batch<'_>,
    seq: &SeqRows,
    cache: &ReferenceKvCache,
    layer: usize,
    scores: &mut Vec<f32>,
    out: &mut ReferenceBuffer,
) {
    let block_size = cache.shape().block_size;
    let table = &batch.block_tables[seq.table_start as usize..][..seq.table_len as usize];
    let slot = |position: usize| {
        table[position / block_size] as usize * block_size + position % block_size
    };
    let (head_dim, value_dim) = (shape.head_dim, shape.value_dim());
    let scale = 1.0 / (head_dim as f32).sqrt();
    let group = shape.num_heads / shape.num_kv_heads;
    for i in 0..seq.num_rows as usize {
        let row = seq.row_start as usize + i;
        let end = seq.context_len as usize - seq.num_rows as usize + i + 1;
        let window = shape.sliding_window.map_or(end, |window| window as usize);
        let visible = end.saturating_sub(window)..end;
        for head in 0..shape.num_heads {
            let query = &q.row(row)[head * head_dim..][..head_dim];
            scores.clear();
            scores.extend(visible.clone().map(|position| {
                let score = scale * dot(query, cache.key(layer, slot(position), head / group));
                shape.softcap.map_or(score, |cap| cap * (score / cap).tanh())
            }));
            // An additional token, whose weight is discarded.
            scores.extend(sinks.map(|sinks| sinks[head]));
            softmax(scores);
            let mixed = &mut out.row_mut(row)[head * value_dim..][..value_dim];
            mixed.fill(0.0);
            for (position, weight) in visible.clone().zip(scores.iter()) {
                let value = cache.value(layer, slot(position), head / group);
                for (y, v) in mixed.iter_mut().zip(value) {
                    *y += weight * v;
                }
            }
        }
    }
}

fn softmax(scores: &mut [f32]) {
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for score in scores.iter_mut() {
        *score = (*score - max).exp();
        sum += *score;
    }
    for score in scores.iter_mut() {
        *score /= sum;
    }
}
