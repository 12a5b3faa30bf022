//! Messages of the control plane: worker introductions and the formation of replicas.
use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::lora::Lora;
use crate::ids::{Epoch, Incarnation, ReplicaId, WorkerId};
use crate::model_config::ConfigOverrides;
use crate::model_identity::ModelIdentity;

/// What a worker computes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceKind {
    /// CPU cores.
    Cpu,
    /// One CUDA GPU.
    Cuda,
}

/// A worker's first message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    /// The node's name, unique in the cluster; a worker that restarts under the same name takes its
    /// old slot again.
    pub node: String,
    /// This process run.
    pub incarnation: Incarnation,
    /// Identifies the host (boot id): workers with equal values can share memory.
    pub host: String,
    /// The process id, for the operator.
    pub pid: u32,
    /// What it computes on.
    pub device: DeviceKind,
    /// Compute threads it will use.
    pub threads: u32,
    /// Resources of its host, and labels and resources that its operator declared.
    pub offer: NodeResources,
    /// Where this worker accepts connections of the TCP collective.
    pub collective_addr: SocketAddr,
    /// The program's version; informational.
    pub version: String,
    /// Fingerprint of the build, at most [`BUILD_MAX`] bytes; equal on all ranks of a replica.
    pub build: String,
    /// UUID of the GPU that it computes on, as reported by the driver; empty on CPUs.
    pub gpu: String,
    /// Of which models it has the files: the [`fingerprint`](crate::hub::name::fingerprint) of the
    /// last [`ToFetch`], if all of that is here; else 0.
    pub fetched: u64,
    /// Its place at its previous coordinator.
    pub rejoin: Rejoin,
}

/// Maximum length of a build fingerprint, in bytes.
pub const BUILD_MAX: usize = 64;

/// What a worker was at its previous coordinator: a hint that lets a new coordinator give it the
/// same place, so that it can keep its weights.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rejoin {
    /// Slot it had; with one, it has counted for another coordinator.
    pub slot: Option<WorkerId>,
    /// Weights it holds.
    pub shard: Option<HeldShard>,
    /// What it was told to remember.
    pub trouble: Trouble,
}

/// How a worker's device and groups of ranks with it have failed of late, as its coordinator counts
/// it. The worker keeps it for the next coordinator and does nothing else with it. A restarted one
/// knows nothing, and is told again what concerns its device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trouble {
    /// Formations that came to nothing.
    pub formations: FailedGroups,
    /// Steps that hung.
    pub steps: FailedGroups,
    /// Failures of its device, which ended processes on it.
    pub device: FailedGroups,
}

/// How often a worker's device, or groups with the worker, have failed in one way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedGroups {
    /// How often, in a row.
    pub failures: u32,
    /// How long ago the last time was, in milliseconds.
    pub last_ms: u64,
    /// How often groups have gone on without it, or with another in its place; of a device, how
    /// often it was set aside.
    pub rests: u32,
    /// For how much longer no group grows because of it, or the device is set aside, in
    /// milliseconds.
    pub rests_ms: u64,
}

impl Trouble {
    /// The same after some time.
    #[must_use]
    pub fn after(self, elapsed: Duration) -> Self {
        let elapsed = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX);
        let of = |groups: FailedGroups| FailedGroups {
            last_ms: groups.last_ms.saturating_add(elapsed),
            rests_ms: groups.rests_ms.saturating_sub(elapsed),
            ..groups
        };
        let Self { formations, steps, device } = self;
        Self { formations: of(formations), steps: of(steps), device: of(device) }
    }
}

/// The part of a model that a worker holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldShard {
    /// The model, as [`Form`] names it.
    pub model: String,
    /// Identity of the folder's contents when the weights were loaded.
    pub identity: ModelIdentity,
    /// The rank, 0-based.
    pub rank: u32,
    /// The tensor-parallel degree.
    pub world_size: u32,
}

/// Maximum number of labels, and of operator-defined resources, of a node.
pub const RESOURCES_MAX: usize = 8;
/// Maximum length of the name of a label or resource and of a label's value, in bytes, so that all
/// of them fit into a hello.
pub const RESOURCE_NAME_MAX: usize = 63;

/// The label that says which GPUs of a host are joined by NVLink. Workers detect its value unless
/// their operator sets it.
pub const NVLINK_LABEL: &str = "nvlink";

/// Resources and labels that a node offers for placing actors and ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeResources {
    /// Number of cores.
    pub cpus: u32,
    /// Number of GPUs.
    pub gpus: u32,
    /// Free memory for weights and KV cache, in bytes.
    pub memory_bytes: u64,
    /// Operator-defined resources, in whole units.
    pub custom: BTreeMap<String, u64>,
    /// Operator-defined labels.
    pub labels: BTreeMap<String, String>,
}

impl NodeResources {
    /// Amount of a resource: `cpus`, `gpus`, `memory` in bytes, or an operator-defined one.
    #[must_use]
    pub fn amount(&self, name: &str) -> u64 {
        match name {
            "cpus" => self.cpus.into(),
            "gpus" => self.gpus.into(),
            "memory" => self.memory_bytes,
            name => self.custom.get(name).copied().unwrap_or(0),
        }
    }

    /// Checks the bounds.
    ///
    /// # Errors
    /// The bound that is broken, in one sentence.
    pub fn check(&self) -> Result<(), String> {
        for (what, count) in [("labels", self.labels.len()), ("resources", self.custom.len())] {
            if count > RESOURCES_MAX {
                return Err(format!("{count} {what}, the limit is {RESOURCES_MAX}"));
            }
        }
        let texts = self.labels.iter().flat_map(|(key, value)| [key, value]);
        for text in texts.chain(self.custom.keys()) {
            let good = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
            if text.is_empty() || text.len() > RESOURCE_NAME_MAX || !text.chars().all(good) {
                return Err(format!(
                    "{text:?} must have 1 to {RESOURCE_NAME_MAX} letters, digits, - _ . or /"
                ));
            }
        }
        Ok(())
    }
}

/// The coordinator's answer to [`Hello`] of a worker that has not said that it has the files of
/// what is served: it fetches them, and dials again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToFetch {
    /// Models on the hub, as [`HubModel`](crate::hub::HubModel) is written; at most
    /// [`TO_FETCH_MAX`].
    pub models: Vec<String>,
    /// LoRA adapters there, likewise.
    pub adapters: Vec<String>,
}

/// Most models, and most adapters, that a worker is told to fetch.
pub const TO_FETCH_MAX: usize = super::lora::ADAPTERS_MAX;

impl ToFetch {
    /// Tells what is to be fetched apart; 0 for nothing.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        let all = [self.models.as_slice(), &self.adapters].concat();
        crate::hub::name::fingerprint(&all)
    }
}

/// The coordinator's answer to [`Hello`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Welcome {
    /// Slot of this worker in the cluster.
    pub worker: WorkerId,
    /// Interval of the worker's idle stats reports, in milliseconds; 0 if it must measure nothing.
    pub stats_interval_ms: u64,
}

/// How the ranks of a replica exchange partial sums.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CollectiveSpec {
    /// One rank: nothing to exchange.
    None,
    /// All ranks on one host: a POSIX shared memory object that rank 0 creates and unlinks as soon
    /// as every rank has mapped it.
    SharedMemory {
        /// Name of the object, without a slash; unique per epoch.
        name: String,
    },
    /// Ranks on several hosts.
    Tcp {
        /// Listening address of every rank, in rank order.
        ranks: Vec<SocketAddr>,
        /// Token with which ranks of this epoch greet each other, so that no stranger takes a
        /// rank's place. It is unguessable and sent over the links only.
        token: u64,
    },
}

/// Limits of one engine, and how it keeps its cache; equal on every rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineConfig {
    /// Tokens per KV block.
    pub block_size: u32,
    /// Maximum length of a sequence (prompt and output together), in tokens.
    pub max_model_len: u32,
    /// Maximum number of sequences in one step.
    pub max_num_seqs: u32,
    /// Maximum number of tokens computed in one step.
    pub max_num_batched_tokens: u32,
    /// Memory for the KV cache per rank, in bytes; 0: all that the rank's device has left for it.
    pub kv_cache_bytes: u64,
    /// Host memory per rank for the KV blocks of swapped-out sequences, in bytes; 0: no swapping.
    pub swap_bytes: u64,
    /// Data type of the KV cache.
    pub kv_cache_dtype: KvCacheDtype,
    /// Number of states that are kept for sequences with the same beginning, beside those of
    /// sequences that run; 0 unless the model has linear attention.
    pub prefix_states: u32,
}

impl EngineConfig {
    /// Checks that there is room for something.
    ///
    /// # Errors
    /// The size that is 0, in one sentence.
    pub fn check(&self) -> Result<(), String> {
        let sizes = [
            ("block_size", self.block_size),
            ("max_model_len", self.max_model_len),
            ("max_num_seqs", self.max_num_seqs),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
        ];
        match sizes.into_iter().find(|(_, size)| *size == 0) {
            Some((what, _)) => Err(format!("{what} is 0, it must be at least 1")),
            None => Ok(()),
        }
    }
}

/// Data type of the KV cache, named as in vLLM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum KvCacheDtype {
    /// That in which products take activations: see [`Dtype`].
    #[default]
    Auto,
    /// 8-bit floats, E4M3, without scales.
    Fp8,
}

impl KvCacheDtype {
    /// Its name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Fp8 => "fp8",
        }
    }
}

/// Data type of activations in matrix products, named as in vLLM. Everything that is not a matrix
/// product is f32; how weights are stored is [`Quantization`]'s concern.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Dtype {
    /// By the checkpoint's `config.json`: bfloat16 if it says bfloat16, otherwise float32. On GPUs
    /// bfloat16.
    #[default]
    Auto,
    /// About the precision of f32. Not on GPUs.
    Float32,
    /// Activations rounded to bf16.
    Bfloat16,
}

impl Dtype {
    /// All variants.
    pub const ALL: [Self; 3] = [Self::Auto, Self::Float32, Self::Bfloat16];

    /// Its name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Float32 => "float32",
            Self::Bfloat16 => "bfloat16",
        }
    }
}

/// How the decoder's large matrices are stored, named as in vLLM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Quantization {
    /// bf16.
    #[default]
    None,
    /// 8-bit integers with a scale per output channel, quantised from the checkpoint's weights.
    Int8,
}

impl Quantization {
    /// All variants.
    pub const ALL: [Self; 2] = [Self::None, Self::Int8];

    /// Its name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Int8 => "int8",
        }
    }
}

/// Asks a worker to become one rank of a replica.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Form {
    /// The epoch being formed.
    pub epoch: Epoch,
    /// The replica.
    pub replica: ReplicaId,
    /// This worker's rank, 0-based.
    pub rank: u32,
    /// The tensor-parallel degree.
    pub world_size: u32,
    /// Sums over ranks are computed as this many ranks would compute them, a multiple of
    /// `world_size`, so that a request gets the same bits at every degree the replica may take.
    pub reduction_ranks: u32,
    /// How the ranks are connected.
    pub collective: CollectiveSpec,
    /// Deadline for setting up the collective and for each of its operations, in milliseconds.
    pub collective_timeout_ms: u64,
    /// How long the coordinator gives a step, in milliseconds.
    pub step_timeout_ms: u64,
    /// The model folder, as a path on the worker's host; or a model on the hub, as
    /// [`HubModel`](crate::hub::HubModel) is written, whose files the worker has in its cache.
    pub model: String,
    /// What is laid over its `config.json`.
    pub config_overrides: ConfigOverrides,
    /// Data type of activations in matrix products.
    pub dtype: Dtype,
    /// How the weights are stored.
    pub quantization: Quantization,
    /// LoRA adapters to load beside the model.
    pub lora: Lora,
    /// The draft model's folder, as a path on the host of rank 0, which alone has it, or likewise
    /// a model on the hub; none where there is no draft model.
    pub draft_model: Option<String>,
    /// Limits of the engine.
    pub engine: EngineConfig,
}

impl Form {
    /// Checks that the rank is one of the group, that the group is connected as a whole, and the
    /// engine's limits.
    ///
    /// # Errors
    /// What does not fit, in one sentence.
    pub fn check(&self) -> Result<(), String> {
        let Self { rank, world_size, .. } = *self;
        if rank >= world_size {
            return Err(format!("rank {rank} of {world_size} is to be formed"));
        }
        let connected = match &self.collective {
            CollectiveSpec::None => 1,
            CollectiveSpec::SharedMemory { .. } => world_size as usize,
            CollectiveSpec::Tcp { ranks, .. } => ranks.len(),
        };
        if connected != world_size as usize {
            return Err(format!("{connected} of {world_size} ranks are to be connected"));
        }
        self.engine.check()
    }
}

/// Maximum length of a [`GroupId`], in bytes; NCCL's have 128.
pub const GROUP_ID_MAX: usize = 256;

/// Identifier by which the ranks' GPUs find each other, made by rank 0 for one epoch. Whoever knows
/// it can take part, so it is sent over the links only and never logged.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupId {
    /// The epoch being formed.
    pub epoch: Epoch,
    /// At most [`GROUP_ID_MAX`] bytes, opaque to all but the ranks.
    #[serde(with = "crate::wire::bytes")]
    pub bytes: Vec<u8>,
}

impl fmt::Debug for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GroupId({:?}, {} bytes)", self.epoch, self.bytes.len())
    }
}

/// Progress of loading the weights, or of fetching an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadProgress {
    /// The epoch being formed, or that of the command to load the adapter.
    pub epoch: Epoch,
    /// The number of the adapter that a rank that has started fetches; else 0.
    pub adapter: u32,
    /// Bytes of this rank's shard that are packed so far; or of the adapter that are here.
    pub bytes_done: u64,
    /// Total bytes of this rank's shard, or of the adapter.
    pub bytes_total: u64,
}

/// The weights are loaded and the collective is up.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Formed {
    /// The epoch.
    pub epoch: Epoch,
    /// Number of KV blocks that fit on this rank.
    pub kv_blocks: u32,
    /// Number of KV blocks that fit into its host memory for swapping.
    pub host_blocks: u32,
    /// Bytes of weights held.
    pub weight_bytes: u64,
    /// Seconds the load took; 0 if the weights were kept from an earlier epoch.
    pub load_seconds: f64,
    /// Identity of the model folder's contents on the rank's host.
    pub identity: ModelIdentity,
    /// Fingerprint of the contents of the adapters' folders, where their list may change (the
    /// identity covers them otherwise); else 0.
    pub adapters: u64,
}

/// Why a replica could not be formed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FormFailed {
    /// The epoch.
    pub epoch: Epoch,
    /// One sentence naming file, tensor or peer, and the reason.
    pub message: String,
    /// True if trying again with the same model cannot help (a corrupt file, an unsupported
    /// architecture).
    pub permanent: bool,
}

/// Asks a formed worker to allocate its KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// The epoch.
    pub epoch: Epoch,
    /// Number of KV blocks to allocate: the minimum over the ranks.
    pub num_blocks: u32,
    /// Number of blocks to allocate in host memory: the minimum over the ranks.
    pub host_blocks: u32,
}

/// The KV cache is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Started {
    /// The epoch.
    pub epoch: Epoch,
}

/// One worker's cumulative measurements: totals since the process started, never differences, so a
/// lost or repeated report does no harm.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WorkerStats {
    /// Grows with every report of this incarnation.
    pub sequence: u64,
    /// The encoded partial snapshot of the worker's series (see `shared::metrics`).
    #[serde(with = "crate::wire::bytes")]
    pub snapshot: Vec<u8>,
}
