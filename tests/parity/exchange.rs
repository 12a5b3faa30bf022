//! The simplest collective that is correct: ranks are threads that meet at one mutex.
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use kernels::collective::{AbortHandle, Collective};
use kernels::error::CollectiveError;

const DEADLINE: Duration = Duration::from_secs(60);

/// One rank of a group.
#[derive(Debug)]
pub(crate) struct Exchange {
    rank: u32,
    world_size: u32,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    round: Mutex<Round>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Round {
    /// What each rank brought, as bits.
    brought: Vec<Option<Arc<Vec<u32>>>>,
    /// Ranks that have yet to take the round's result.
    readers_left: u32,
    aborted: bool,
}

/// All ranks of a group.
pub(crate) fn group(world_size: u32) -> Vec<Exchange> {
    let round = Round { brought: vec![None; world_size as usize], ..Round::default() };
    let shared = Arc::new(Shared { round: Mutex::new(round), changed: Condvar::new() });
    (0..world_size).map(|rank| Exchange { rank, world_size, shared: Arc::clone(&shared) }).collect()
}

impl Shared {
    fn wait<'a>(
        &self,
        round: MutexGuard<'a, Round>,
        until: fn(&Round) -> bool,
    ) -> Result<MutexGuard<'a, Round>, CollectiveError> {
        let (round, timeout) = self
            .changed
            .wait_timeout_while(round, DEADLINE, |round| !round.aborted && !until(round))
            .unwrap();
        match (round.aborted, timeout.timed_out()) {
            (true, _) => Err(CollectiveError::Aborted),
            (_, true) => Err(CollectiveError::TimedOut {
                op: "exchange",
                waited: DEADLINE,
                rank: round.brought.iter().position(Option::is_none).unwrap_or(0) as u32,
            }),
            _ => Ok(round),
        }
    }
}

impl Exchange {
    /// Brings `bits`; returns what every rank brought, in rank order.
    fn exchange(&self, bits: Vec<u32>) -> Result<Vec<Arc<Vec<u32>>>, CollectiveError> {
        let round = self.shared.round.lock().unwrap();
        let mut round = self.shared.wait(round, |round| round.readers_left == 0)?;
        round.brought[self.rank as usize] = Some(Arc::new(bits));
        if round.brought.iter().all(Option::is_some) {
            round.readers_left = self.world_size;
            self.shared.changed.notify_all();
        }
        let mut round = self.shared.wait(round, |round| round.readers_left > 0)?;
        let all: Vec<_> = round.brought.iter().flatten().cloned().collect();
        round.readers_left -= 1;
        if round.readers_left == 0 {
            round.brought.fill(None);
            self.shared.changed.notify_all();
        }
        assert!(all.iter().all(|bits| bits.len() == all[0].len()), "ranks differ in size");
        Ok(all)
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

impl Collective for Exchange {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn world_size(&self) -> u32 {
        self.world_size
    }

    fn all_reduce_sum(&mut self, data: &mut [f32]) -> Result<(), CollectiveError> {
        let all = self.exchange(bits(data))?;
        for (i, sum) in data.iter_mut().enumerate() {
            *sum = all.iter().map(|values| f32::from_bits(values[i])).sum();
        }
        Ok(())
    }

    fn gather(
        &mut self,
        local: &[f32],
        global: &mut [f32],
        root: u32,
    ) -> Result<(), CollectiveError> {
        let all = self.exchange(bits(local))?;
        if self.rank == root {
            for (to, from) in global.iter_mut().zip(all.iter().flat_map(|values| values.iter())) {
                *to = f32::from_bits(*from);
            }
        }
        Ok(())
    }

    fn all_gather(&mut self, local: &[f32], global: &mut [f32]) -> Result<(), CollectiveError> {
        self.gather(local, global, self.rank)
    }

    fn broadcast(&mut self, data: &mut [u32], root: u32) -> Result<(), CollectiveError> {
        let all = self.exchange(data.to_vec())?;
        data.copy_from_slice(&all[root as usize]);
        Ok(())
    }

    fn barrier(&mut self) -> Result<(), CollectiveError> {
        self.exchange(Vec::new()).map(drop)
    }

    fn abort_handle(&self) -> Arc<dyn AbortHandle> {
        Arc::clone(&self.shared) as Arc<dyn AbortHandle>
    }
}

impl AbortHandle for Shared {
    fn abort(&self) {
        self.round.lock().unwrap().aborted = true;
        self.changed.notify_all();
    }
}
