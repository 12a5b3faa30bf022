//! What operators ask of a cluster: who is there, what it does, who is gone and why.
use serde::{Deserialize, Serialize};

/// The cluster at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The program's version.
    pub version: String,
    /// The served model's name.
    pub model: String,
    /// Whether requests can be served.
    pub ready: bool,
    /// What is being waited for, when not.
    pub message: String,
    /// Ranks a replica has when nothing is missing.
    pub tensor_parallel: u32,
    /// Most replicas; absent without a bound.
    pub max_replicas: Option<u32>,
    /// Linked processes: workers, then front ends; then the coordinators, where there may be
    /// several.
    pub nodes: Vec<Node>,
    /// Replicas.
    pub replicas: Vec<Replica>,
    /// Processes that are gone, newest first, a bounded number of them.
    pub dead: Vec<Dead>,
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
    /// `alive` (holds a rank), `spare`, `draining`; of a coordinator `leading` or `standby`.
    pub state: String,
    /// The replica it is a rank of.
    pub replica: Option<u32>,
    /// Its rank there.
    pub rank: Option<u32>,
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
}

/// A process that is gone.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Dead {
    /// Its name.
    pub node: String,
    /// Its slot.
    pub slot: u32,
    /// Its process id.
    pub pid: u32,
    /// What ended it, as far as its link tells.
    pub reason: String,
    /// When, in seconds since 1970.
    pub at: u64,
}
