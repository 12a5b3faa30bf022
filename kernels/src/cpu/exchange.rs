//! Exchanges between ranks: all-reduce and gathering of logits.
use std::time::{Duration, Instant};

use super::{CpuBackend, CpuBuffer, WAY};
use crate::backend::{Buffer as _, ExchangeOps, Tensors as _};
use crate::check;
use crate::collective::{ByteCounters, Collective};
use crate::error::{CollectiveError, KernelError};

impl ExchangeOps for CpuBackend {
    fn all_reduce(&mut self, data: &mut CpuBuffer) -> Result<(), KernelError> {
        self.exchanged.add(WAY, size_of_val(data.values()));
        self.timed(|collective| collective.all_reduce_sum(data.values_mut()))
    }

    fn gather_logits(
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
        check::gathered(local, full, world)?;
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
        // Reorders one block per rank into one row per row.
        for (i, from) in gathered.chunks_exact(width.max(1)).enumerate() {
            let (rank, row) = (i / rows, i % rows);
            full.values_mut()[(row * world + rank) * width..][..width].copy_from_slice(from);
        }
        Ok(())
    }

    fn broadcast_tokens(&mut self, tokens: &mut [u32]) -> Result<(), KernelError> {
        self.timed(|collective| collective.broadcast(tokens, 0))
    }

    fn check_abort(&mut self) -> Result<(), KernelError> {
        if self.collective.is_aborted() { Err(CollectiveError::Aborted.into()) } else { Ok(()) }
    }

    fn take_collective_time(&mut self) -> Duration {
        std::mem::take(&mut self.collective_time)
    }

    fn take_exchanged(&mut self) -> ByteCounters {
        std::mem::take(&mut self.exchanged)
    }
}

impl CpuBackend {
    fn timed<T, E: Into<KernelError>>(
        &mut self,
        operation: impl FnOnce(&mut dyn Collective) -> Result<T, E>,
    ) -> Result<T, KernelError> {
        let start = Instant::now();
        let result = operation(self.collective.as_mut());
        self.collective_time += start.elapsed();
        result.map_err(Into::into)
    }
}
