//! Whether the cluster is whole again.
use std::time::Duration;

use coordinator::cluster::{ReplicaPhase, ReplicaStatus};
use shared::actor::liveness::LivenessConfig;
use shared::ids::{Epoch, WorkerId};

use crate::coordinator::Connected;
use crate::scenario::{S, Time};
use crate::world::World;

impl World {
    /// Members and their slots, with the epoch in which each is a rank of a replica that serves.
    pub(crate) fn places(&self) -> Vec<(WorkerId, usize, Option<Epoch>)> {
        let epoch_of = |worker: WorkerId| {
            let serves = |it: &ReplicaStatus| it.phase == ReplicaPhase::Serving;
            let holds = |it: &ReplicaStatus| it.ranks.contains(&Some(worker));
            self.coordinator.core.replicas().find(|it| serves(it) && holds(it)).map(|it| it.epoch)
        };
        let connected = self.coordinator.connected.iter();
        let place = |(worker, it): (&WorkerId, &Connected)| {
            (*worker, self.links[it.link].slot, epoch_of(*worker))
        };
        connected.map(place).collect()
    }

    /// Whether a replica waits because it failed for good.
    pub(crate) fn waits_for_a_change(&self) -> bool {
        self.coordinator.core.replicas().any(|replica| replica.held_until.is_some())
    }

    /// Checks that no wait is longer than ten minutes, and that none goes on after it has run out.
    pub(crate) fn check_holds(&mut self) {
        let now = self.time();
        let (most, late) = (Duration::from_secs(600), Duration::from_secs(15));
        let holds = self.coordinator.core.replicas().filter_map(|replica| replica.held_until);
        let wrong = holds.filter(|until| *until > now + most || *until + late < now).max();
        if let Some(until) = wrong {
            self.fail(format!("a replica is held until {until:?}, and it is {now:?}"));
        }
    }

    /// The slot of a connected worker.
    pub(crate) fn slot_of(&self, worker: WorkerId) -> Option<usize> {
        self.coordinator.connected.get(&worker).map(|it| self.links[it.link].slot)
    }

    /// A connection whose other end has been silent for too long, if there is one.
    pub(crate) fn unnoticed_silence(&self) -> Option<WorkerId> {
        let silent = |(_, it): &(&WorkerId, &Connected)| {
            self.now
                > self.links[it.link].heard
                    + LivenessConfig::default().dead_after.as_micros() as Time
                    + S / 5
        };
        self.coordinator.connected.iter().find(silent).map(|(worker, _)| *worker)
    }

    /// Whether all members serve, as far as they can, and all workers are linked.
    pub(crate) fn converged(&self) -> Result<(), String> {
        if self.coordinator.lives().len() > 1 {
            return Err(format!("coordinators serve: {:?}", self.coordinator.lives()));
        }
        if let Some(run) = self.undrained() {
            return Err(format!("process run {run} was drained, and stays"));
        }
        let alive = self.processes.iter().filter(|process| process.alive).count();
        let connected = self.coordinator.num_connected();
        let core = &self.coordinator.core;
        let all = || core.replicas().collect::<Vec<_>>();
        if connected != alive {
            return Err(format!("{connected} of {alive} workers are connected: {:?}", all()));
        }
        let degrees: Vec<usize> = self.scenario.degrees.iter().map(|it| *it as usize).collect();
        let (largest, least) = (degrees[0], degrees[degrees.len() - 1]);
        let present = |replica: &ReplicaStatus| replica.ranks.iter().flatten().count();
        let free = alive - core.replicas().map(|replica| present(&replica)).sum::<usize>();
        let max = core.max_replicas().map_or(usize::MAX, |max| max as usize);
        let there = core.replicas().count();
        let waiting: usize = core
            .replicas()
            .filter(|it| it.phase != ReplicaPhase::Serving)
            .map(|it| present(&it))
            .sum();
        if there > max {
            return Err(format!("{there} replicas, not {max}: {:?}", all()));
        }
        if there < max && free >= if there == 0 { least } else { largest } {
            return Err(format!("{free} workers are spare: {:?}", all()));
        }
        for replica in core.replicas() {
            let degree = replica.ranks.len();
            if replica.phase != ReplicaPhase::Serving {
                if waiting + free >= least {
                    return Err(format!("{} could serve: {:?}", replica.id, all()));
                }
                continue;
            }
            let holds = |it: &WorkerId| core.replicas().any(|r| r.ranks.contains(&Some(*it)));
            let resting = self.coordinator.connected.keys();
            let resting = resting.filter(|it| core.rests(**it) && !holds(it)).count();
            if degrees.iter().any(|it| *it > degree && *it + resting <= degree + free) {
                return Err(format!("{} could have more ranks: {:?}", replica.id, all()));
            }
            let running = self.coordinator.replicas.get(&replica.id);
            if running.and_then(|running| running.core.epoch()) != Some(replica.epoch) {
                return Err(format!("{} is not told of {}", replica.id, replica.epoch));
            }
        }
        Ok(())
    }
}
