//! Attention of a step: its rows cut into tasks, which threads take head by head.
use super::attention::{self, Attention};
use super::memory::Disjoint;
use super::{CpuBackend, CpuBuffer, CpuKvCache, CpuVector, GRAIN, check};
use crate::backend::{AttentionShape, Batch, Buffer};
use crate::error::KernelError;

impl CpuBackend {
    /// [`crate::Backend::paged_attention`].
    #[allow(clippy::too_many_arguments, reason = "the operation's own arguments")]
    pub(super) fn attend(
        &mut self,
        q: &CpuBuffer,
        sinks: Option<&CpuVector>,
        shape: &AttentionShape,
        batch: &Batch<'_>,
        cache: &CpuKvCache,
        layer: usize,
        out: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        check::attention(q, shape, batch, cache, layer, out)?;
        check::vector("paged_attention", "sinks", sinks, shape.num_heads)?;
        out.set_rows(q.rows())?;
        let blocks = batch.seqs.iter().map(|seq| seq.table_len as usize).max().unwrap_or(0);
        let positions = blocks * cache.shape().block_size;
        for worker in &mut self.workers {
            worker.attention.reserve(self.isa, blocks, cache)?;
        }
        attention::cut(batch, &mut self.tiles);
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
        // Head by head: each thread has K and V of its own heads in its cache, and long rows as
        // well as short ones. Tasks differ by their rows' positions, so they are handed out in
        // small numbers.
        let tasks = tiles.len() * shape.num_kv_heads;
        let group = shape.num_heads / shape.num_kv_heads;
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
}
