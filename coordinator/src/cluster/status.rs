//! The cluster as operators see it: its processes, what they do, which are gone and why.
use serde::{Deserialize, Serialize};
use shared::protocol::NodeResources;

/// The cluster at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The program's version.
    pub version: String,
    /// The served model's name.
    pub model: String,
    /// Number of classes that it sorts texts into; absent for a model that generates text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub classes: Option<u32>,
    /// Whether requests can be served.
    pub ready: bool,
    /// What is being waited for, when not.
    pub message: String,
    /// Ranks a replica has when nothing is missing.
    pub tensor_parallel: u32,
    /// Maximum number of replicas; absent without a bound.
    pub max_replicas: Option<u32>,
    /// Commands of operators.
    #[serde(default)]
    pub commands: Commands,
    /// LoRA adapters.
    #[serde(default)]
    pub adapters: Vec<AdapterStatus>,
    /// For how many there is room, if they can be loaded and unloaded now.
    #[serde(default)]
    pub adapter_places: Option<u32>,
    /// Linked processes: workers, then front ends, then the coordinators if there can be several.
    pub nodes: Vec<Node>,
    /// Replicas.
    pub replicas: Vec<Replica>,
    /// Actors by name: the cluster's own (`worker/NODE`, `replica/N`, `frontend/NODE`) and those of
    /// applications, including recently dead ones of applications.
    #[serde(default)]
    pub actors: Vec<Actor>,
    /// Processes that host classes of actors.
    #[serde(default)]
    pub hosts: Vec<ActorHost>,
    /// Processes that are gone, newest first; bounded.
    pub dead: Vec<DeadProcess>,
    /// Processes that were not let into the cluster in the last ten minutes, newest first; bounded.
    #[serde(default)]
    pub refused: Vec<RefusedProcess>,
}

/// A process that was not let into the cluster: of another version, with another secret, or under a
/// name that is taken.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedProcess {
    /// The address that it dialled from.
    pub address: String,
    /// Why, in one sentence.
    pub reason: String,
    /// How often it tried.
    pub times: u64,
    /// When it tried last, in seconds since 1970.
    pub at: u64,
}

/// Commands that operators gave while coordinators ran: scaling and draining.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Commands {
    /// Number of commands, across all leaders.
    pub count: u64,
    /// Whether an operator set the bound of replicas, rather than the coordinator's options.
    pub scaled: bool,
    /// Whether the next leader will know them all; absent if no other can lead.
    pub stored: Option<bool>,
}

/// One LoRA adapter.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdapterStatus {
    /// Its name in the API.
    pub name: String,
    /// Its folder, or its name on the hub.
    pub path: String,
    /// `serving`, `loading`, or `leaving`: unloaded, but requests still use it.
    pub state: String,
}

/// One linked process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// Its name.
    pub node: String,
    /// `worker`, `frontend` or `coordinator`.
    pub role: String,
    /// Its slot, as in the labels of metrics; coordinators have none.
    pub slot: u32,
    /// Its process id on its host.
    pub pid: u32,
    /// Identifies its host.
    pub host: String,
    /// `alive` (holds a rank), `spare`, `doubtful` (a spare that is taken last: its actor says
    /// why), `set aside` (its device failed again and again), `draining`; of a coordinator
    /// `leading` or `standby`.
    pub state: String,
    /// The replica it is a rank of.
    pub replica: Option<u32>,
    /// Its rank there.
    pub rank: Option<u32>,
    /// What it offers; workers only.
    pub offer: Option<NodeResources>,
}

/// One named actor.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Actor {
    /// Its name.
    pub name: String,
    /// Its kind.
    pub kind: String,
    /// The node whose process it lives in; a replica's scheduler lives in the coordinator.
    pub node: String,
    /// `pending`, `starting`, `alive`, `draining`, `restarting` or `dead`.
    pub state: String,
    /// The epoch of its replica.
    pub epoch: Option<u64>,
    /// Requests of its replica.
    pub load: Option<u32>,
    /// Number of its restarts.
    pub restarts: u32,
    /// Maximum number of restarts in a row; absent if nothing here restarts it.
    pub max_restarts: Option<u32>,
    /// Why it is restarting or dead.
    pub reason: Option<String>,
    /// What it takes of its node's resources, in words; actors created by class only.
    #[serde(default)]
    pub needs: Option<String>,
}

/// A process that hosts classes of actors.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ActorHost {
    /// Its node.
    pub node: String,
    /// The classes.
    pub classes: Vec<String>,
    /// Number of created actors in it.
    pub actors: u32,
    /// What they take, in words.
    pub used: String,
    /// What is left, in words.
    pub free: String,
    /// Whether it gets no more, because its node drains.
    pub draining: bool,
}

/// One replica.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Replica {
    /// Its number.
    pub id: u32,
    /// `waiting`, `forming`, `starting` or `serving`.
    pub state: String,
    /// Its present or last epoch.
    pub epoch: u64,
    /// Its workers' slots in rank order; absent where one is missing.
    pub ranks: Vec<Option<u32>>,
    /// Requests it has.
    pub requests: u32,
    /// Why it last broke.
    pub last_failure: Option<String>,
    /// It failed in a way that retrying would repeat: it is retried in this many seconds, or when
    /// workers come or go.
    #[serde(default)]
    pub held_seconds: Option<u64>,
}

/// A process that is gone.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DeadProcess {
    /// Its name.
    pub node: String,
    /// Its slot; absent when it never joined.
    pub slot: Option<u32>,
    /// Its process id.
    pub pid: u32,
    /// What ended it, in its own words or as far as its link tells.
    pub reason: String,
    /// Exit code or signal, if its supervisor reported it (`tutti up`).
    pub exit: Option<String>,
    /// When, in seconds since 1970.
    pub at: u64,
    /// Number of lines of its log that `tutti logs` has.
    pub lines: u32,
    /// The last of them.
    pub last_line: Option<String>,
}

/// The last lines of one process's log.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeLogs {
    /// The node's name.
    pub node: String,
    /// The process.
    pub pid: u32,
    /// Whether it is linked now.
    pub alive: bool,
    /// What ended it.
    pub reason: Option<String>,
    /// Its exit code or signal.
    pub exit: Option<String>,
    /// Number of lines lost because it wrote faster than they are sent on.
    pub missing: u64,
    /// What it logged, oldest first.
    pub lines: Vec<String>,
    /// The last lines of its stderr, if its supervisor reported them (`tutti up`).
    pub stderr: Vec<String>,
}
