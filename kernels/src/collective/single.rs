//! One rank: nothing to exchange.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::exchange::{Exchange, Op, Transport};
use super::{AbortHandle, Collective};
use crate::error::CollectiveError;

#[derive(Debug, Default)]
struct Flag(AtomicBool);

impl AbortHandle for Flag {
    fn abort(&self) {
        self.0.store(true, Ordering::Release);
    }
}

#[derive(Debug, Default)]
struct SingleRank {
    aborted: Arc<Flag>,
}

impl Transport for SingleRank {
    fn rank(&self) -> u32 {
        0
    }

    fn world_size(&self) -> u32 {
        1
    }

    fn round_max(&self) -> usize {
        usize::MAX
    }

    fn round(
        &mut self,
        _op: Op,
        mine: &[u32],
        see: &mut dyn FnMut(usize, &[u32]),
    ) -> Result<(), CollectiveError> {
        if self.is_aborted() {
            return Err(CollectiveError::Aborted);
        }
        see(0, mine);
        Ok(())
    }

    fn abort_handle(&self) -> Arc<dyn AbortHandle> {
        self.aborted.clone()
    }

    fn is_aborted(&self) -> bool {
        self.aborted.0.load(Ordering::Acquire)
    }
}

/// The collective of a replica with one rank.
#[must_use]
pub fn single_rank() -> Box<dyn Collective> {
    Box::new(Exchange::new(SingleRank::default()))
}
