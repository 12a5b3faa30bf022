//! Attention of a step, with its rows cut into tasks that threads take head by head; and the
//! swapping of its cache.
use super::attention::{self, Attention};
use super::gemm::{self, Output};
use super::memory::Disjoint;
use super::{CpuBackend, CpuBuffer, CpuKvCache, CpuMatrix, CpuVector, GRAIN, kv, qkv};
use crate::backend::{AttentionAt, AttentionOps, Buffer as _, QkvInput};
use crate::check::attention as check;
use crate::error::KernelError;

impl AttentionOps for CpuBackend {
    fn qkv_rope_write(
        &mut self,
        input: QkvInput<'_, CpuBuffer, CpuMatrix, CpuVector>,
        at: AttentionAt<'_>,
        cache: &mut CpuKvCache,
        q_out: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        check::qkv(&input, at, cache.shape(), q_out)?;
        let QkvInput { x, weights, addend, rope } = input;
        let AttentionAt { shape, batch, layer } = at;
        check::places("qkv_rope_write", batch, check::bounds(rope, shape, cache.shape()))?;
        q_out.set_rows(x.rows())?;
        let arithmetic = self.arithmetic();
        let Self { isa, pool, acts, wide, .. } = self;
        let width = weights.weight.rows();
        let projected = wide.get(x.rows() * width)?;
        let acts = gemm::prepare(arithmetic, pool, acts, x.rows(), x.width(), &|i| x.row(i))?;
        let out = Output { data: Disjoint::new(projected), stride: width, first_row: 0, column: 0 };
        let bias = weights.bias.as_deref();
        gemm::multiply(*isa, pool, &acts, &weights.weight, bias, &out)?;
        let norms = [weights.q_norm.as_deref(), weights.k_norm.as_deref()];
        qkv::Heads { isa: *isa, projected, addend, norms, rope, shape, batch, layer }
            .finish(pool, cache, q_out)
    }

    fn paged_attention(
        &mut self,
        q: &CpuBuffer,
        sinks: Option<&CpuVector>,
        at: AttentionAt<'_>,
        cache: &CpuKvCache,
        out: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        let AttentionAt { shape, batch, layer } = at;
        check::attention(q, sinks, at, cache.shape(), out)?;
        let (block_size, num_blocks) = (cache.shape().block_size, cache.shape().num_blocks);
        check::sequences("paged_attention", batch, q.rows(), block_size, num_blocks)?;
        out.set_rows(q.rows())?;
        let blocks = batch.seqs.iter().map(|seq| seq.table_len as usize).max().unwrap_or(0);
        let positions = blocks * cache.shape().block_size;
        for worker in &mut self.workers {
            worker.attention.reserve(self.isa, blocks, cache)?;
        }
        attention::cut(batch, shape, &mut self.tiles);
        let tiles = &self.tiles;
        let attention = Attention {
            isa: self.isa,
            shape,
            batch,
            cache,
            layer,
            q: q.values(),
            sinks: sinks.map(|sinks| &**sinks),
            out: Disjoint::new(out.values_mut()),
        };
        let workers = Disjoint::new(&mut self.workers);
        // Head by head, so that each thread has K and V of its own heads in its cache, and long
        // rows as well as short ones. Tasks differ by their rows' positions, so they are handed out
        // in small batches.
        let tasks = tiles.len() * shape.num_kv_heads;
        // The queries of a row are the least that a task has, if it is not a part of a row.
        let group = (shape.num_heads / shape.num_kv_heads).min(attention::queries_most(shape));
        let grain = (GRAIN / (positions * group * shape.head_dim).max(1)).max(1);
        self.pool.run(tasks.div_ceil(grain), &|index, worker| {
            // SAFETY: no two running tasks have the same worker.
            let scratch = &mut unsafe { workers.slice(worker, 1) }[0].attention;
            for task in index * grain..((index + 1) * grain).min(tasks) {
                let (kv_head, tile) = (task / tiles.len(), task % tiles.len());
                attention.tile(tiles[tile], kv_head, scratch);
            }
        })
    }

    fn swap_out(
        &mut self,
        cache: &CpuKvCache,
        host: &mut CpuKvCache,
        pairs: &[(u32, u32)],
    ) -> Result<(), KernelError> {
        check::swap("swap_out", cache.shape(), host.shape(), pairs, true)?;
        let pair = |i: usize| (pairs[i].0 as usize, pairs[i].1 as usize);
        kv::copy_blocks(&mut self.pool, cache, host, pair, pairs.len())
    }

    fn swap_in(
        &mut self,
        cache: &mut CpuKvCache,
        host: &mut CpuKvCache,
        pairs: &[(u32, u32)],
    ) -> Result<(), KernelError> {
        check::swap("swap_in", cache.shape(), host.shape(), pairs, false)?;
        let pair = |i: usize| (pairs[i].1 as usize, pairs[i].0 as usize);
        kv::copy_blocks(&mut self.pool, host, cache, pair, pairs.len())
    }
}
