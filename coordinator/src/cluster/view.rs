//! What others may see of the cluster, without asking its actor: for `/ready` and for displays.
use std::sync::Arc;
use std::time::Duration;

use shared::ids::WorkerId;

use super::{ReplicaPhase, ReplicaStatus};
use crate::replica::actor::ReplicaLoad;

/// The cluster at one moment.
#[derive(Clone, Debug, Default)]
pub struct ClusterView {
    /// Live workers.
    pub workers: Vec<(WorkerId, String, u32)>,
    /// Replicas and where they are in their lives.
    pub replicas: Vec<ReplicaStatus>,
    /// Loads of the replicas that serve.
    pub serving: Vec<Arc<ReplicaLoad>>,
    /// Bytes of weights loaded, bytes to load.
    pub load: (u64, u64),
    /// Set when trying again cannot help.
    pub unservable: Option<String>,
    /// A worker that is alive by its process but silent: its node and pid, for whoever started it.
    pub frozen: Option<(String, u32)>,
}

/// Why nothing can be served, in one sentence for clients: what went wrong where is for the log and
/// `tutti status`, not for whoever asks.
#[must_use]
pub fn not_ready(view: &ClusterView, tensor_parallel: u32) -> String {
    if view.unservable.is_some() {
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
            "waiting for workers after a failure, which the server's log has".to_owned()
        }
        (ReplicaPhase::Forming, _) => {
            format!("loading weights: {} of {} bytes", view.load.0, view.load.1)
        }
        (phase, _) => format!("the replica is {}", phase.as_str()),
    }
}

impl ClusterView {
    /// Whether some replica can serve: its steps are answered.
    #[must_use]
    pub fn is_ready(&self, now: Duration) -> bool {
        self.serving.iter().any(|load| load.is_ready(now))
    }
}
