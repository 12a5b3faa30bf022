//! Cluster membership through etcd: coordinators, workers and front ends find each other through it
//! alone, and one coordinator leads.
//!
//! - [`ledger`]: bytes that the leader leaves for the next one
//! - [`kept`]: created actors that the leader keeps for the next one
//! - [`view`]: PURE: the cluster as a process knows it, from lists and events
//! - [`desired`]: PURE: operators' commands to the leader, which the next leader follows too
//! - [`serves`]: PURE: what a coordinator would serve, and how that differs from the leader's
//! - [`connect`]: how to connect to etcd
//! - [`credential`]: certificates, keys and passwords, read again whenever etcd is dialled
//! - [`core`]: PURE: a process's lease, registration and candidacy
//! - [`etcd`]: the thread that registers this process, keeps its lease, watches, and campaigns
//!
//! etcd is never on the path of a request. While it cannot be reached, all processes continue with
//! the last view; only joining and a change of leader wait.
pub mod connect;
pub mod core;
pub mod credential;
pub mod desired;
pub mod etcd;
pub mod kept;
pub mod ledger;
pub mod serves;
pub mod view;

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::watch;

pub use self::connect::{DatabaseUsage, EtcdOptions, FULL_REMEDY, ProbeError, Tls};
pub use self::credential::Credential;
pub use self::desired::{ChangedAdapters, DesiredState};
pub use self::etcd::{DesiredStateSender, EtcdMembership};
pub use self::serves::Serves;
pub use self::view::View;

/// Role of a process.
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

/// Why membership cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FatalError {
    /// Two processes have the same name.
    #[error("another process is registered as `{key}` and alive: names must be unique")]
    NameTaken {
        /// Key that both want.
        key: String,
    },
    /// The membership thread ended, so nobody keeps the lease alive.
    #[error("the membership thread has ended")]
    Ended,
}

/// A process's record of itself, stored as JSON under its key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Its name, unique among processes of its role.
    pub node: String,
    /// Its role.
    pub role: Role,
    /// This process run.
    pub incarnation: u64,
    /// Where workers and front ends reach a coordinator, `HOST:PORT`; empty for other roles.
    pub address: String,
    /// Where clients reach a coordinator, `HOST:PORT`; empty for other roles.
    #[serde(default)]
    pub http: String,
    /// Its process id on its host.
    pub pid: u32,
    /// The program's version.
    pub version: String,
    /// The version of the protocol that it speaks; 0 if it does not say.
    #[serde(default)]
    pub protocol: u16,
    /// Which state of a model of the hub a coordinator serves; none for others, and for folders.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<Box<PinnedRevision>>,
    /// What a coordinator would serve; none for others, and if it does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serves: Option<Box<Serves>>,
}

/// Which commit a revision of a model on the hub was when a cluster began to serve it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PinnedRevision {
    /// `ORG/NAME`.
    pub name: String,
    /// As it was asked for: a branch, a tag or a commit.
    pub revision: String,
    /// The commit's whole hash.
    pub commit: String,
}

/// A coordinator to dial.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Destination {
    /// `HOST:PORT`.
    pub address: String,
    /// The coordinator's process run, if known.
    pub incarnation: Option<u64>,
}

/// How to find the coordinator: at a fixed address, or through etcd.
#[derive(Clone, Debug)]
pub enum CoordinatorAddress {
    /// `HOST:PORT`.
    Fixed(String),
    /// The address of the current leader.
    Followed(watch::Receiver<View>),
}

impl CoordinatorAddress {
    /// Returns where to dial now; `None` while there is no leader.
    #[must_use]
    pub fn current(&self) -> Option<Destination> {
        match self {
            Self::Fixed(address) => {
                Some(Destination { address: address.clone(), incarnation: None })
            }
            Self::Followed(view) => view.borrow().destination(),
        }
    }

    /// Waits for a leader other than `than`. While there is no leader, or etcd cannot be reached,
    /// nothing has changed: the previous leader continues.
    pub async fn other(&mut self, than: Option<&Destination>) -> Destination {
        loop {
            if let Some(now) = self.current()
                && Some(&now) != than
            {
                return now;
            }
            let followed = match self {
                Self::Fixed(_) => false,
                Self::Followed(view) => view.changed().await.is_ok(),
            };
            if !followed {
                std::future::pending::<()>().await;
            }
        }
    }
}

impl From<&str> for CoordinatorAddress {
    fn from(address: &str) -> Self {
        Self::Fixed(address.to_owned())
    }
}

/// Time to live of a lease without keepalives, for workers and front ends.
pub const LEASE_TTL: Duration = Duration::from_secs(10);
/// Default for a coordinator. This long after its death, another one takes over.
pub const LEADER_LEASE_TTL: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::view::Leader;
    use super::*;

    fn led_by(incarnation: u64) -> View {
        let record = Record {
            node: "c".to_owned(),
            role: Role::Coordinator,
            incarnation,
            address: "h:1".to_owned(),
            http: String::new(),
            pid: 1,
            version: String::new(),
            protocol: 0,
            model: None,
            serves: None,
        };
        View { leader: Some(Leader { record, epoch: 1, lease: 0 }), ..View::default() }
    }

    #[tokio::test]
    async fn only_another_leader_is_a_change() {
        let (publish, view) = watch::channel(View::default());
        let mut address = CoordinatorAddress::Followed(view);
        assert_eq!(address.current(), None);
        publish.send_replace(led_by(1));
        let first = address.other(None).await;
        assert_eq!((first.address.as_str(), first.incarnation), ("h:1", Some(1)));
        // Its lease ended and nobody took over; then it leads again.
        publish.send_replace(View::default());
        publish.send_replace(View { leader: led_by(1).leader, revision: 9, ..View::default() });
        let moment = Duration::from_millis(20);
        assert!(tokio::time::timeout(moment, address.other(Some(&first))).await.is_err());
        publish.send_replace(led_by(2));
        assert_eq!(address.other(Some(&first)).await.incarnation, Some(2), "at the same address");
        let mut fixed = CoordinatorAddress::from("h:2");
        let known = fixed.other(None).await;
        assert!(tokio::time::timeout(moment, fixed.other(Some(&known))).await.is_err());
    }
}
