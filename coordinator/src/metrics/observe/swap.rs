//! Requests whose KV blocks are swapped to host memory and back. The series exist only for replicas
//! with host memory to swap to.
use shared::ids::ReplicaId;
use shared::metrics::catalogue;
use shared::metrics::labels::SwapDirection;
use shared::metrics::local::PerValue;
use shared::metrics::{Counter, Gauge, LocalStats};

use super::request::{RequestGauge, WaitingAt};
use super::{Cells, Recording, RequestTrack};

/// Series of one replica.
#[derive(Debug)]
pub(super) struct HostCells {
    used_blocks: Gauge,
    blocks: Gauge,
    preemptions: Counter,
    moved: PerValue<Counter>,
}

impl HostCells {
    /// Makes the series of a replica with `blocks` blocks of host memory.
    pub(super) fn shown(stats: &mut LocalStats, replica: ReplicaId, blocks: u32) -> Self {
        let name = replica.0.to_string();
        let label = [name.as_str()];
        let cells = Self {
            used_blocks: stats.gauge(catalogue::HOST_KV_CACHE_BLOCKS_USED, label),
            blocks: stats.gauge(catalogue::HOST_KV_CACHE_BLOCKS, label),
            preemptions: stats.counter(catalogue::PREEMPTIONS_SWAPPED, label),
            moved: PerValue::new::<SwapDirection>(|direction| {
                stats.counter(catalogue::KV_SWAPPED_BLOCKS, [direction, &name])
            }),
        };
        stats.set(cells.used_blocks, 0.0);
        stats.set(cells.blocks, f64::from(blocks));
        cells
    }

    /// The replica no longer serves.
    pub(super) fn hide(self, stats: &mut LocalStats) {
        stats.clear(self.used_blocks);
        stats.clear(self.blocks);
    }
}

impl Recording<'_> {
    /// A sequence of the request, of `blocks` blocks, is moved to host memory, and no other one is
    /// in the batch.
    pub fn swapped_out(&mut self, track: &mut RequestTrack, replica: ReplicaId, blocks: u32) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        cells.move_to(track, RequestGauge::Swapped(replica));
        track.preempted();
        let (cells, stats) = cells.replica(replica);
        stats.add(cells.preemptions, 1);
        if let Some(host) = &cells.host {
            stats.add(host.preemptions, 1);
            stats.add(host.moved.get(SwapDirection::Out), u64::from(blocks));
        }
    }

    /// So many blocks of a sequence come back from host memory.
    pub fn swapped_in(&mut self, replica: ReplicaId, blocks: u32) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        let (cells, stats) = cells.replica(replica);
        if let Some(host) = &cells.host {
            stats.add(host.moved.get(SwapDirection::In), u64::from(blocks));
        }
    }

    /// No sequence of the request is in the batch any more; one is in host memory, or all wait.
    pub fn left_batch(&mut self, track: &mut RequestTrack, replica: ReplicaId, swapped: bool) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        let waiting = RequestGauge::Waiting(replica, WaitingAt::Preempted);
        cells.move_to(track, if swapped { RequestGauge::Swapped(replica) } else { waiting });
    }

    /// Sets a replica's number of host blocks in use.
    pub fn host_kv_blocks(&mut self, replica: ReplicaId, used: u32) {
        let Some(Cells { stats, replicas, .. }) = self.cells.as_deref_mut() else { return };
        if let Some(host) = replicas.get(&replica).and_then(|cells| cells.host.as_ref()) {
            stats.set(host.used_blocks, f64::from(used));
        }
    }
}
