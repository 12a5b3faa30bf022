//! What a cluster is made with, and what is known of a live worker.
use core::net::SocketAddr;
use std::time::Duration;

use shared::hub::HubModel;
use shared::ids::{Incarnation, WorkerId};
use shared::model_identity::ModelIdentity;
use shared::protocol::{Dtype, EngineConfig, Lora, NodeResources, Quantization, ToFetch};
use shared::wire::auth::Secret;

use super::PlacementRules;

/// What the operator asked for.
#[derive(Clone, Debug)]
pub struct ClusterConfig {
    /// Ranks per replica, at least 1.
    pub tensor_parallel: u32,
    /// Degrees that a replica may have, largest first; the first is `tensor_parallel`. Smaller ones
    /// are taken when ranks stay away.
    pub degrees: Vec<u32>,
    /// How long ranks may stay away before a smaller degree is taken: longer than a restart takes.
    pub reshard_after: Duration,
    /// Most replicas; as many as the members allow when absent.
    pub max_replicas: Option<u32>,
    /// The model folder, as every worker sees it, or a model on the hub.
    pub model: String,
    /// What is in it here, where that can be read: no rank may have anything else.
    pub identity: Option<ModelIdentity>,
    /// How matrix products are computed, the same on every rank of every replica.
    pub dtype: Dtype,
    /// How weights are kept, likewise.
    pub quantization: Quantization,
    /// Sizes sent to every rank.
    pub engine: EngineConfig,
    /// Deadline of collective set-up and operations.
    pub collective_timeout: Duration,
    /// A formation of which nothing is heard for so long has failed: longer than collectives wait,
    /// and than the largest matrix takes to load.
    pub form_timeout: Duration,
    /// The adapters beside the model.
    pub lora: Lora,
    /// The folder of the model that drafts, as the host of every rank 0 sees it, or one on the hub.
    pub draft_model: Option<String>,
    /// Whether workers shall measure anything.
    pub worker_stats: bool,
    /// Makes greetings of TCP collectives that cannot be guessed: drawn at random per run.
    pub collective_key: Secret,
    /// Which workers go together.
    pub placement: PlacementRules,
    /// Makes names of shared memory objects unique on a host: drawn at random per coordinator run.
    pub run: u64,
}

impl ClusterConfig {
    /// What workers must have fetched of the hub before they can be ranks.
    #[must_use]
    pub fn to_fetch(&self) -> ToFetch {
        let of_hub = |text: &&String| HubModel::parse(text).is_some();
        let models = [&self.model].into_iter().chain(&self.draft_model);
        let adapters = self.lora.adapters.iter().map(|adapter| &adapter.path);
        ToFetch {
            models: models.filter(of_hub).cloned().collect(),
            adapters: adapters.filter(of_hub).cloned().collect(),
        }
    }
}

/// A live worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// The slot, stable over restarts of the same node name.
    pub worker: WorkerId,
    /// The process run.
    pub incarnation: Incarnation,
    /// The node's name.
    pub node: String,
    /// Identifies the host.
    pub host: String,
    /// Where the worker's TCP collective listens.
    pub collective_addr: SocketAddr,
    /// It is leaving and takes no rank.
    pub draining: bool,
    /// What its node offers.
    pub offer: NodeResources,
    /// The GPU it computes on, as its driver names it; empty on CPUs.
    pub gpu: String,
    /// What its bits come from: ranks of one replica are of one build.
    pub build: String,
}

impl Member {
    /// What fails when its device does: the GPU, or the node's processor.
    #[must_use]
    pub fn device(&self) -> &str {
        if self.gpu.is_empty() { &self.node } else { &self.gpu }
    }
}
