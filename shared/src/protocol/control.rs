//! Messages of the control plane: who a worker is, and how a replica is formed.
use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::lora::Lora;
use crate::ids::{Epoch, Incarnation, ReplicaId, WorkerId};
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
    /// What its host offers, and what its operator says of it.
    pub offer: NodeResources,
    /// Where this worker accepts the TCP collective's connections.
    pub collective_addr: SocketAddr,
    /// The program's version; informational.
    pub version: String,
    /// What its bits come from, at most [`BUILD_MAX`] bytes: ranks of one replica are of one build.
    pub build: String,
    /// The GPU that it computes on, as the driver names it (UUID); empty on CPUs.
    pub gpu: String,
    /// What it was before.
    pub rejoin: Rejoin,
}

/// Longest name of a build, in bytes.
pub const BUILD_MAX: usize = 64;

/// What a worker was at its last coordinator: a hint, so that a new one may give it the same place
/// and it may keep its weights.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rejoin {
    /// Its slot.
    pub slot: Option<WorkerId>,
    /// The weights it holds.
    pub shard: Option<HeldShard>,
}

/// Which part of which model a worker holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldShard {
    /// The model folder.
    pub model: String,
    /// What was in it.
    pub identity: ModelIdentity,
    /// The rank, 0-based.
    pub rank: u32,
    /// The tensor-parallel degree.
    pub world_size: u32,
}

/// Most labels, and most resources of its operator's own, of a node.
pub const RESOURCES_MAX: usize = 8;
/// Longest name of a label or resource and longest value of a label, in bytes: all of them fit into
/// a hello.
pub const RESOURCE_NAME_MAX: usize = 63;

/// The label that says which GPUs of a host NVLink joins: workers find its value out themselves,
/// unless their operator gives it.
pub const NVLINK_LABEL: &str = "nvlink";

/// What a node offers to actors and ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeResources {
    /// Cores.
    pub cpus: u32,
    /// GPUs.
    pub gpus: u32,
    /// Memory for weights and KV cache that is free, in bytes.
    pub memory_bytes: u64,
    /// What its operator says that it has, in whole units.
    pub custom: BTreeMap<String, u64>,
    /// What its operator says that it is.
    pub labels: BTreeMap<String, String>,
}

impl NodeResources {
    /// How much of a resource it has: `cpus`, `gpus`, `memory` in bytes, or one of its operator's.
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
    /// Which bound, in one sentence.
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

/// The coordinator's answer to [`Hello`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Welcome {
    /// The slot this worker has in the cluster.
    pub worker: WorkerId,
    /// Interval of the worker's idle stats reports, in milliseconds; 0 when it shall measure
    /// nothing.
    pub stats_interval_ms: u64,
}

/// How the ranks of a replica exchange partial sums.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CollectiveSpec {
    /// One rank: nothing to exchange.
    None,
    /// All ranks on one host: a POSIX shared memory object, created by rank 0 and unlinked as soon
    /// as every rank has it mapped.
    SharedMemory {
        /// The object's name, without a slash; unique per epoch.
        name: String,
    },
    /// Ranks on several hosts.
    Tcp {
        /// Every rank's listening address, in rank order.
        ranks: Vec<SocketAddr>,
        /// What ranks of this epoch greet each other with, so that no stranger takes a rank's
        /// place; not to be guessed, and sent over the links alone.
        token: u64,
    },
}

/// Sizes that bound one engine; equal on every rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineConfig {
    /// Tokens per KV block.
    pub block_size: u32,
    /// Longest sequence (prompt and output together), in tokens.
    pub max_model_len: u32,
    /// Most sequences in one step.
    pub max_num_seqs: u32,
    /// Most tokens computed in one step.
    pub max_num_batched_tokens: u32,
    /// Memory for the KV cache per rank, in bytes; 0: as much as the rank's device has for it.
    pub kv_cache_bytes: u64,
    /// Host memory for the KV blocks of sequences that are swapped out, per rank, in bytes; 0: none
    /// is swapped.
    pub swap_bytes: u64,
}

/// What matrix products take of their activations, named as vLLM does. Everything that is not a
/// matrix product is f32; what weights are kept in is [`Quantization`]'s.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Dtype {
    /// What the checkpoint says in its `config.json`: bfloat16 where it is bfloat16, else float32;
    /// on GPUs bfloat16.
    #[default]
    Auto,
    /// About f32's precision. Not on GPUs.
    Float32,
    /// Activations rounded to bf16.
    Bfloat16,
}

impl Dtype {
    /// All of them.
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

/// In what the large matrices of the decoder are kept, named as vLLM does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Quantization {
    /// bf16.
    #[default]
    None,
    /// Integers of 8 bits with a scale for each output, quantised from what the checkpoint has.
    Int8,
}

impl Quantization {
    /// All of them.
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
    /// Sums over ranks are made as so many ranks would make them, a multiple of `world_size`: so
    /// that the same request gives the same bits at every degree the replica may take.
    pub reduction_ranks: u32,
    /// How the ranks are connected.
    pub collective: CollectiveSpec,
    /// Deadline of the collective's set-up and of each of its operations, in milliseconds.
    pub collective_timeout_ms: u64,
    /// The model folder, as a path on the worker's host.
    pub model: String,
    /// How its matrix products are computed.
    pub dtype: Dtype,
    /// How its weights are kept.
    pub quantization: Quantization,
    /// The adapters beside it.
    pub lora: Lora,
    /// The draft model's folder, as a path on the host of rank 0, which alone has it; none where
    /// there is no draft model.
    pub draft_model: Option<String>,
    /// The sizes.
    pub engine: EngineConfig,
}

/// Most bytes of a [`GroupId`]; NCCL's have 128.
pub const GROUP_ID_MAX: usize = 256;

/// What the ranks' GPUs find each other by, made by rank 0 for one epoch. Whoever knows it may take
/// part: it goes over the links alone, and into no log.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupId {
    /// The epoch being formed.
    pub epoch: Epoch,
    /// At most [`GROUP_ID_MAX`]; what is in them only the ranks know.
    #[serde(with = "crate::wire::bytes")]
    pub bytes: Vec<u8>,
}

impl fmt::Debug for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GroupId({:?}, {} bytes)", self.epoch, self.bytes.len())
    }
}

/// How far the weights are loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadProgress {
    /// The epoch being formed.
    pub epoch: Epoch,
    /// Bytes of this rank's shard packed so far.
    pub bytes_done: u64,
    /// Bytes of this rank's shard.
    pub bytes_total: u64,
}

/// The weights are loaded and the collective is up.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Formed {
    /// The epoch.
    pub epoch: Epoch,
    /// How many KV blocks fit on this rank.
    pub kv_blocks: u32,
    /// How many KV blocks fit into its host memory for swapping.
    pub host_blocks: u32,
    /// Bytes of weights held.
    pub weight_bytes: u64,
    /// Seconds the load took; 0 when weights were kept from an earlier epoch.
    pub load_seconds: f64,
    /// What is in the model folder of the rank's host.
    pub identity: ModelIdentity,
}

/// Why a replica could not be formed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FormFailed {
    /// The epoch.
    pub epoch: Epoch,
    /// One sentence naming file, tensor or peer, and the reason.
    pub message: String,
    /// True when trying again with the same model cannot help (a corrupt file, an unsupported
    /// architecture).
    pub permanent: bool,
}

/// Asks a formed worker to allocate its KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// The epoch.
    pub epoch: Epoch,
    /// Blocks to allocate: the minimum over the ranks.
    pub num_blocks: u32,
    /// Blocks to allocate in host memory: likewise.
    pub host_blocks: u32,
}

/// The KV cache is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Started {
    /// The epoch.
    pub epoch: Epoch,
}

/// One worker's cumulative measurements. Totals since the process started, never differences, so a
/// lost or repeated report does no harm.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WorkerStats {
    /// Grows with every report of this incarnation.
    pub sequence: u64,
    /// The encoded partial snapshot of the worker's series (see `shared::metrics`).
    #[serde(with = "crate::wire::bytes")]
    pub snapshot: Vec<u8>,
}
