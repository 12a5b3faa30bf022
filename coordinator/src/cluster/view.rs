//! The cluster as seen without asking its actor: for `/ready` and for displays.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use shared::ids::WorkerId;

use super::{ReplicaPhase, ReplicaStatus};
use crate::replica::actor::ReplicaLoad;

/// Nodes whose workers do not answer, with their process ids.
pub type UnresponsiveNodes = BTreeMap<String, u32>;

/// The cluster at one moment.
#[derive(Clone, Debug, Default)]
pub struct ClusterView {
    /// Live workers.
    pub workers: Vec<(WorkerId, String, u32)>,
    /// Live workers that are drained and end soon: their nodes, and their processes' ids.
    pub leaving: Vec<(String, u32)>,
    /// Replicas and their phases.
    pub replicas: Vec<ReplicaStatus>,
    /// Loads of the replicas that serve.
    pub serving: Vec<Arc<ReplicaLoad>>,
    /// Bytes of weights loaded, and bytes to load.
    pub load: (u64, u64),
    /// Why no replica can be served at all, whatever its ranks do.
    pub broken: Option<String>,
    /// Workers whose processes live but are silent, for their supervisors.
    pub frozen: UnresponsiveNodes,
}

/// Returns why nothing can be served, in one sentence for clients. The details are for the log and
/// `tutti status`, not for whoever asks.
#[must_use]
pub fn not_ready(view: &ClusterView, tensor_parallel: u32) -> String {
    if view.unservable().is_some() {
        return "the model cannot be served: the server's log says why".to_owned();
    }
    let Some(replica) = view.replicas.first() else {
        return format!(
            "{} of {tensor_parallel} workers of the first replica have joined",
            view.workers.len()
        );
    };
    match (replica.phase, &replica.last_failure) {
        (ReplicaPhase::Waiting, Some(_)) => {
            "waiting for workers after a failure; the server's log says why".to_owned()
        }
        (ReplicaPhase::Forming, _) => {
            format!("loading weights: {} of {} bytes", view.load.0, view.load.1)
        }
        (phase, _) => format!("the replica is {}", phase.as_str()),
    }
}

impl ClusterView {
    /// Returns why retrying cannot help any replica: each failed for a reason that stays. A replica
    /// that waits for its ranks, or is being formed, may serve soon.
    #[must_use]
    pub fn unservable(&self) -> Option<&str> {
        if self.broken.is_some() {
            return self.broken.as_deref();
        }
        let is_held = |replica: &ReplicaStatus| replica.held_until.is_some();
        let all = self.replicas.iter().all(is_held);
        self.replicas.iter().find_map(|it| it.last_failure.as_deref()).filter(|_| all)
    }

    /// Whether some replica can serve: its steps are answered.
    #[must_use]
    pub fn is_ready(&self, now: Duration) -> bool {
        self.serving.iter().any(|load| load.is_ready(now))
    }
}

#[cfg(test)]
mod tests {
    use shared::ids::{Epoch, ReplicaId};

    use super::*;

    fn replica(id: u32, phase: ReplicaPhase, held: bool, why: Option<&str>) -> ReplicaStatus {
        ReplicaStatus {
            id: ReplicaId(id),
            epoch: Epoch(1),
            phase,
            ranks: Vec::new(),
            last_failure: why.map(str::to_owned),
            held_until: held.then_some(Duration::from_secs(60)),
        }
    }

    #[test]
    fn nothing_can_help_where_no_replica_can_be_helped() {
        use ReplicaPhase::{Forming, Waiting};
        let of = |replicas: &[ReplicaStatus]| {
            let view = ClusterView { replicas: replicas.to_vec(), ..ClusterView::default() };
            view.unservable().map(str::to_owned)
        };
        let held = replica(0, Waiting, true, Some("truncated"));
        assert_eq!(of(&[]), None, "nobody has joined yet");
        assert_eq!(of(std::slice::from_ref(&held)).as_deref(), Some("truncated"));
        assert_eq!(of(&[held.clone(), replica(1, Forming, false, Some("a rank died"))]), None);
        assert_eq!(of(&[held.clone(), replica(1, Waiting, false, Some("a rank died"))]), None);
        let other = replica(1, Waiting, true, Some("too large"));
        assert_eq!(of(&[held.clone(), other]).as_deref(), Some("truncated"));
        // Members came: it is tried again.
        assert_eq!(of(&[replica(0, Waiting, false, Some("truncated"))]), None);
        let broken = ClusterView { broken: Some("no room".to_owned()), ..ClusterView::default() };
        assert_eq!(broken.unservable(), Some("no room"));
    }
}
