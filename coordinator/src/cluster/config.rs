//! A cluster's configuration, and what is known of a live worker.
use core::net::SocketAddr;
use std::time::Duration;

use shared::hub::HubModel;
use shared::ids::{Incarnation, WorkerId};
use shared::model_config::ConfigOverrides;
use shared::model_identity::ModelIdentity;
use shared::protocol::{Adapter, Dtype, EngineConfig, Lora, NodeResources, Quantization, ToFetch};
use shared::wire::auth::Secret;

use super::PlacementRules;

/// What the operator asked for.
#[derive(Clone, Debug)]
pub struct ClusterConfig {
    /// Ranks per replica, at least 1.
    pub tensor_parallel: u32,
    /// Degrees that a replica may have, largest first; the first is `tensor_parallel`. Smaller ones
    /// are used when ranks stay away.
    pub degrees: Vec<u32>,
    /// How long ranks may stay away before a smaller degree is used: longer than a restart takes.
    pub reshard_after: Duration,
    /// Maximum number of replicas; absent: as many as the members allow.
    pub max_replicas: Option<u32>,
    /// The model folder, as every worker sees it, or a model on the hub.
    pub model: String,
    /// Its contents as read here, if it can be read: every rank must have the same.
    pub identity: Option<ModelIdentity>,
    /// What every rank lays over its `config.json`.
    pub config_overrides: ConfigOverrides,
    /// Compute data type, the same on every rank of every replica.
    pub dtype: Dtype,
    /// Quantization of the weights, likewise.
    pub quantization: Quantization,
    /// Sizes sent to every rank.
    pub engine: EngineConfig,
    /// Maximum number of tokens in one step of a replica with a rank on a CPU; for others `engine`
    /// has it.
    pub cpu_step_tokens: u32,
    /// Deadline of collective set-up and operations.
    pub collective_timeout: Duration,
    /// Deadline of a step, for devices that cannot be interrupted.
    pub step_timeout: Duration,
    /// How long a formation may go unheard of before it has failed: longer than collectives wait,
    /// and than the largest matrix takes to load.
    pub form_timeout: Duration,
    /// LoRA adapters beside the model, at the start.
    pub lora: Lora,
    /// The model's own names, which no adapter can have.
    pub model_names: Vec<String>,
    /// The folder of the model that drafts, as the host of every rank 0 sees it, or one on the hub.
    pub draft_model: Option<String>,
    /// Whether workers report metrics.
    pub worker_stats: bool,
    /// Makes the handshakes of TCP collectives unguessable: drawn at random per run.
    pub collective_key: Secret,
    /// Which workers go together.
    pub placement: PlacementRules,
    /// Makes names of shared memory objects unique on a host: drawn at random per coordinator run.
    pub run: u64,
}

impl ClusterConfig {
    /// The sizes of a replica of these ranks.
    #[must_use]
    pub fn engine_of(&self, ranks: &[&Member]) -> EngineConfig {
        let mut engine = self.engine.clone();
        if ranks.iter().any(|member| member.gpu.is_empty()) {
            engine.max_num_batched_tokens = self.cpu_step_tokens;
        }
        engine
    }

    /// What workers must have fetched of the hub before they can be ranks with these adapters.
    #[must_use]
    pub fn to_fetch(&self, adapters: &[Adapter]) -> ToFetch {
        let of_hub = |text: &&String| HubModel::parse(text).is_some();
        let models = [&self.model].into_iter().chain(&self.draft_model);
        let adapters = adapters.iter().map(|adapter| &adapter.path);
        ToFetch {
            models: models.filter(of_hub).cloned().collect(),
            adapters: adapters.filter(of_hub).cloned().collect(),
        }
    }
}

/// A live worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its slot, stable across restarts under the same node name.
    pub worker: WorkerId,
    /// The process run.
    pub incarnation: Incarnation,
    /// The node's name.
    pub node: String,
    /// Identifies the host.
    pub host: String,
    /// Where the worker's TCP collective listens.
    pub collective_addr: SocketAddr,
    /// Whether it is leaving and takes no rank.
    pub draining: bool,
    /// What its node offers.
    pub offer: NodeResources,
    /// The GPU it computes on, by its driver's name for it; empty on CPUs.
    pub gpu: String,
    /// What its results depend on bit for bit: ranks of one replica have the same build.
    pub build: String,
}

impl Member {
    /// Returns what fails when its device does: the GPU, or the node's processor.
    #[must_use]
    pub fn device(&self) -> &str {
        if self.gpu.is_empty() { &self.node } else { &self.gpu }
    }
}
