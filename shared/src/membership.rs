//! Who is in the cluster, by etcd: coordinators, workers and front ends find each other through it
//! alone, and one coordinator leads.
//!
//! - [`view`]: PURE: what is known of the cluster, from lists and events
//! - [`etcd`]: the thread that registers this process, keeps its lease, watches, and campaigns
//!
//! etcd is asked for nothing on the way of a request. While it cannot be reached, everybody goes on
//! with the last view; only joining and a change of the leader wait.
pub mod etcd;
pub mod view;

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::watch;

pub use self::etcd::{EtcdMembership, EtcdOptions, FatalError};
pub use self::view::View;

/// What a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Serves HTTP and schedules.
    Coordinator,
    /// Computes.
    Worker,
    /// Serves HTTP for a coordinator.
    Frontend,
}

/// What a process says of itself, as JSON under its key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Its name, unique among processes of its role.
    pub node: String,
    /// What it is.
    pub role: Role,
    /// This process run.
    pub incarnation: u64,
    /// Where workers and front ends reach a coordinator, `HOST:PORT`; empty for others.
    pub address: String,
    /// Its process id on its host.
    pub pid: u32,
    /// The program's version.
    pub version: String,
}

/// Where the coordinator is: known from the start, or followed through etcd.
#[derive(Clone, Debug)]
pub enum CoordinatorAddress {
    /// `HOST:PORT`.
    Fixed(String),
    /// That of whoever leads.
    Followed(watch::Receiver<View>),
}

impl CoordinatorAddress {
    /// Where to dial now; `None` while nobody leads.
    #[must_use]
    pub fn current(&self) -> Option<String> {
        match self {
            Self::Fixed(address) => Some(address.clone()),
            Self::Followed(view) => {
                view.borrow().leader.as_ref().map(|leader| leader.record.address.clone())
            }
        }
    }
}

impl From<&str> for CoordinatorAddress {
    fn from(address: &str) -> Self {
        Self::Fixed(address.to_owned())
    }
}

/// How long a lease lives without being kept alive.
pub const LEASE_TTL: Duration = Duration::from_secs(10);
