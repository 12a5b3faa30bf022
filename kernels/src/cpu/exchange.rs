//! What ranks exchange beyond sums: the logits of all.
use std::time::Instant;

use super::{CpuBackend, CpuBuffer, WAY};
use crate::backend::{Backend as _, Buffer};
use crate::check::ensure;
use crate::error::KernelError;

impl CpuBackend {
    /// [`crate::Backend::gather_logits`].
    pub(super) fn gather_rows(
        &mut self,
        local: &CpuBuffer,
        full: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        let (rank, world) = (self.rank(), self.world_size() as usize);
        let (rows, width) = (local.rows(), local.width());
        if world > 1 {
            self.exchanged.add(WAY, size_of_val(local.values()));
        }
        if rank != 0 {
            return self.timed(|collective| collective.gather(local.values(), &mut [], 0));
        }
        let full_width = full.width();
        ensure!(
            "gather_logits",
            full_width == world * width,
            "full.width is {full_width}, not {world} x {width}"
        );
        full.set_rows(rows)?;
        if world == 1 {
            full.values_mut().copy_from_slice(local.values());
            return Ok(());
        }
        let Self { wide, collective, .. } = self;
        let gathered = wide.get(world * rows * width)?;
        let start = Instant::now();
        let result = collective.gather(local.values(), gathered, 0);
        self.collective_time += start.elapsed();
        result?;
        // From one block per rank to one row per row.
        for (i, from) in gathered.chunks_exact(width.max(1)).enumerate() {
            let (rank, row) = (i / rows, i % rows);
            full.values_mut()[row * full_width + rank * width..][..width].copy_from_slice(from);
        }
        Ok(())
    }
}
