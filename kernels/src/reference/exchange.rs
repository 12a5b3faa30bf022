//! Exchanges between ranks, through the collective.
use std::time::{Duration, Instant};

use super::ReferenceBackend;
use crate::backend::{Buffer as _, ExchangeOps, Tensors as _};
use crate::check;
use crate::collective::Collective;
use crate::error::{CollectiveError, KernelError};

impl ExchangeOps for ReferenceBackend {
    fn all_reduce(&mut self, data: &mut Self::Buffer) -> Result<(), KernelError> {
        self.timed(|collective| collective.all_reduce_sum(data.values_mut()))
    }

    fn gather_logits(
        &mut self,
        local: &Self::Buffer,
        full: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        if self.rank() != 0 {
            return self.timed(|collective| collective.gather(local.values(), &mut [], 0));
        }
        let (rows, width) = (local.rows(), local.width());
        let world = self.world_size() as usize;
        check::gathered(local, full, world)?;
        full.set_rows(rows)?;
        let mut gathered = std::mem::take(&mut self.gathered);
        gathered.resize(world * rows * width, 0.0);
        self.timed(|collective| collective.gather(local.values(), &mut gathered, 0))?;
        for rank in 0..world {
            for i in 0..rows {
                let from = &gathered[(rank * rows + i) * width..][..width];
                full.row_mut(i)[rank * width..][..width].copy_from_slice(from);
            }
        }
        self.gathered = gathered;
        Ok(())
    }

    fn broadcast_tokens(&mut self, tokens: &mut [u32]) -> Result<(), KernelError> {
        self.timed(|collective| collective.broadcast(tokens, 0))
    }

    fn take_collective_time(&mut self) -> Duration {
        std::mem::take(&mut self.collective_time)
    }
}

impl ReferenceBackend {
    fn timed<T>(
        &mut self,
        exchange: impl FnOnce(&mut dyn Collective) -> Result<T, CollectiveError>,
    ) -> Result<T, KernelError> {
        let started = Instant::now();
        let result = exchange(self.collective.as_mut());
        self.collective_time += started.elapsed();
        Ok(result?)
    }
}
