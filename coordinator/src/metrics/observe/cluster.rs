//! Replicas, workers and actors as they come and go.
use std::time::Duration;

use shared::ids::{ReplicaId, WorkerId};
use shared::metrics::LocalStats;
use shared::metrics::catalogue;
use shared::metrics::labels::{
    ActorState, FailoverReason, FencedReason, HandshakeRefusal, LinkEnd,
};
use shared::protocol::{EngineConfig, FrontendId};

use super::swap::HostCells;
use super::{Cells, Recording, WorkerCells};

/// Sizes of a replica's engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaConfig {
    /// Sizes sent to every rank.
    pub engine: EngineConfig,
    /// KV blocks on every rank.
    pub num_blocks: u32,
    /// Blocks in host memory on every rank, to swap to.
    pub host_blocks: u32,
    /// Number of ranks.
    pub tensor_parallel: u32,
}

impl Recording<'_> {
    /// A replica can serve: its gauges appear.
    pub fn replica_ready(&mut self, replica: ReplicaId, config: &ReplicaConfig) {
        self.replica_gone(replica);
        let Some(cells) = self.cells.as_deref_mut() else { return };
        let (dtype, prefix_caching) = cells.cache;
        let (cells, stats) = cells.replica(replica);
        cells.serves(stats, true);
        stats.set(cells.used_blocks, 0.0);
        stats.set(cells.blocks, f64::from(config.num_blocks));
        if config.host_blocks > 0 {
            cells.host = Some(HostCells::shown(stats, replica, config.host_blocks));
            cells.swapped.show_zero(stats, true);
        }
        let engine = &config.engine;
        let info = stats.gauge(
            catalogue::CACHE_CONFIG_INFO,
            [
                &engine.block_size.to_string(),
                dtype,
                if prefix_caching { "true" } else { "false" },
                &engine.max_model_len.to_string(),
                &engine.max_num_batched_tokens.to_string(),
                &engine.max_num_seqs.to_string(),
                &config.num_blocks.to_string(),
                &config.host_blocks.to_string(),
                &replica.0.to_string(),
                &config.tensor_parallel.to_string(),
            ],
        );
        stats.set(info, 1.0);
        cells.config = Some(info);
    }

    /// A replica cannot serve: the series of its cache vanish, and those of its load once its
    /// requests have been moved, one by one, with [`Recording::interrupted`].
    pub fn replica_gone(&mut self, replica: ReplicaId) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        let (cells, stats) = cells.replica(replica);
        cells.serves(stats, false);
        stats.clear(cells.used_blocks);
        stats.clear(cells.blocks);
        if let Some(host) = cells.host.take() {
            host.hide(stats);
            cells.swapped.show_zero(stats, false);
        }
        if let Some(info) = cells.config.take() {
            stats.remove(info);
        }
    }

    /// A replica is given up for good.
    pub fn replica_removed(&mut self, replica: ReplicaId) {
        self.replica_gone(replica);
        let Some(cells) = self.cells.as_deref_mut() else { return };
        let (cells, stats) = cells.replica(replica);
        stats.clear(cells.up);
    }

    /// A serving replica broke; its requests go elsewhere.
    pub fn failover(&mut self, replica: ReplicaId, reason: FailoverReason) {
        self.replica_gone(replica);
        let Some(cells) = self.cells.as_deref_mut() else { return };
        let (cells, stats) = cells.replica(replica);
        stats.add(cells.failovers.get(reason), 1);
    }

    /// A step's result had no effect.
    pub fn fenced_frame(&mut self, reason: FencedReason) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        let Cells { stats, fixed, .. } = cells;
        stats.add(fixed.fenced.get(reason), 1);
    }

    /// A connection did not become a link.
    pub fn handshake_refused(&mut self, reason: HandshakeRefusal) {
        let Some(Cells { stats, fixed, .. }) = self.cells.as_deref_mut() else { return };
        let counter = fixed.handshakes.get(reason);
        stats.add(counter, 1);
    }

    /// A link of a worker or front end ended.
    pub fn link_ended(&mut self, end: LinkEnd) {
        let Some(Cells { stats, fixed, .. }) = self.cells.as_deref_mut() else { return };
        let counter = fixed.links.get(end);
        stats.add(counter, 1);
    }

    /// A worker is linked; or it was, and is expected back.
    pub fn worker_up(&mut self, worker: WorkerId, up: bool) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        let (cells, stats) = cells.worker(worker);
        stats.set(cells.up, if up { 1.0 } else { 0.0 });
        if up {
            // A rank has to be slow for a while first. Whether its device is set aside, however,
            // only the cluster knows.
            stats.set(cells.slow, 0.0);
            return;
        }
        stats.clear(cells.slow);
        stats.clear(cells.set_aside);
        if let Some(info) = cells.info.take() {
            stats.remove(info);
        }
    }

    /// Sets which program runs in a worker's slot.
    pub fn worker_info(&mut self, worker: WorkerId, node: &str, version: &str) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        let name = worker.0.to_string();
        let (cells, stats) = cells.worker(worker);
        if let Some(old) = cells.info.take() {
            stats.remove(old);
        }
        let info = stats.gauge(catalogue::WORKER_INFO, [node, version, &name]);
        stats.set(info, 1.0);
        cells.info = Some(info);
    }

    /// A worker computes much slower than the others of its replica, or no longer does.
    pub fn rank_slow(&mut self, worker: WorkerId, slow: bool) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        let (cells, stats) = cells.worker(worker);
        stats.set(cells.slow, f64::from(u8::from(slow)));
    }

    /// Sets whether a worker gets no rank because its device failed again and again.
    pub fn device_set_aside(&mut self, worker: WorkerId, aside: bool) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        let (cells, stats) = cells.worker(worker);
        stats.set(cells.set_aside, f64::from(u8::from(aside)));
    }

    /// A worker came back as another process.
    pub fn worker_restarted(&mut self, worker: WorkerId) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        let (cells, stats) = cells.worker(worker);
        stats.add(cells.restarts, 1);
    }

    /// A worker's stats arrived, at wall-clock time `since_1970`.
    pub fn worker_reported(&mut self, worker: WorkerId, since_1970: Duration) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        let (cells, stats) = cells.worker(worker);
        stats.set(cells.last_report, since_1970.as_secs_f64());
    }

    /// A worker left and is not expected back.
    pub fn worker_gone(&mut self, worker: WorkerId) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        let (cells, stats) = cells.worker(worker);
        stats.clear(cells.up);
        stats.clear(cells.slow);
        stats.clear(cells.set_aside);
        stats.clear(cells.last_report);
        if let Some(info) = cells.info.take() {
            stats.remove(info);
        }
    }

    /// A front end in its own process is linked.
    pub fn frontend_up(&mut self, frontend: FrontendId) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        cells.lost_frontends.remove(&frontend);
        cells.leaving_frontends.remove(&frontend);
        let gauge = cells.stats.gauge(catalogue::FRONTEND_UP, [&frontend.0.to_string()]);
        cells.stats.set(gauge, 1.0);
    }

    /// A front end says goodbye: it is not missed when its link ends.
    pub fn frontend_leaves(&mut self, frontend: FrontendId) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        cells.leaving_frontends.insert(frontend);
    }

    /// A front end's link ended.
    pub fn frontend_down(&mut self, frontend: FrontendId, now: Duration) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        let name = frontend.0.to_string();
        let last_report = cells.stats.gauge(catalogue::FRONTEND_LAST_REPORT, [&name]);
        cells.stats.remove(last_report);
        let gauge = cells.stats.gauge(catalogue::FRONTEND_UP, [&name]);
        if cells.leaving_frontends.remove(&frontend) {
            cells.stats.remove(gauge);
        } else {
            cells.stats.set(gauge, 0.0);
            cells.lost_frontends.insert(frontend, now);
        }
    }

    /// Forgets front ends that have been missing for `patience`.
    pub fn forget_frontends(&mut self, now: Duration, patience: Duration) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        let Cells { stats, lost_frontends, .. } = cells;
        lost_frontends.retain(|frontend, since| {
            let missed = now.saturating_sub(*since) < patience;
            if !missed {
                let gauge = stats.gauge(catalogue::FRONTEND_UP, [&frontend.0.to_string()]);
                stats.remove(gauge);
            }
            missed
        });
    }

    /// Sets the number of replicas wanted.
    pub fn replicas_wanted(&mut self, count: usize) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        let gauge = cells.stats.gauge(catalogue::REPLICAS_WANTED, []);
        cells.stats.set(gauge, count as f64);
    }

    /// A front end's stats arrived, at wall-clock time `since_1970`.
    pub fn frontend_reported(&mut self, frontend: FrontendId, since_1970: Duration) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        let stats = &mut cells.stats;
        let gauge = stats.gauge(catalogue::FRONTEND_LAST_REPORT, [&frontend.0.to_string()]);
        stats.set(gauge, since_1970.as_secs_f64());
    }

    /// Sets the number of actors in a state.
    pub fn actors(&mut self, state: ActorState, count: u64) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        let Cells { stats, fixed, .. } = cells;
        let gauge = fixed.actors.get(state);
        stats.set(gauge, count as f64);
    }

    /// The coordinator started as version `version`, at wall-clock time `since_1970`.
    pub fn started(&mut self, version: &str, since_1970: Duration) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        let stats = &mut cells.stats;
        let info = stats.gauge(catalogue::BUILD_INFO, [version]);
        stats.set(info, 1.0);
        let start = stats.gauge(catalogue::PROCESS_START_TIME, []);
        stats.set(start, since_1970.as_secs_f64());
    }
}

impl Cells {
    fn worker(&mut self, worker: WorkerId) -> (&mut WorkerCells, &mut LocalStats) {
        let stats = &mut self.stats;
        let cells = self.workers.entry(worker).or_insert_with(|| {
            let name = worker.0.to_string();
            WorkerCells {
                up: stats.gauge(catalogue::WORKER_UP, [&name]),
                info: None,
                restarts: stats.counter(catalogue::WORKER_RESTARTS, [&name]),
                slow: stats.gauge(catalogue::SLOW_RANKS, [&name]),
                set_aside: stats.gauge(catalogue::DEVICES_SET_ASIDE, [&name]),
                last_report: stats.gauge(catalogue::WORKER_LAST_REPORT, [&name]),
            }
        });
        (cells, stats)
    }
}
