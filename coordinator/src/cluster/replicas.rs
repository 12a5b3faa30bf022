//! PURE: the replicas, and each worker's replica.
//!
//! A worker's replica is looked up for every worker in every pass over the cluster, so there is an
//! index. Replicas change only through [`Replicas::change`], which keeps the index up to date.
use std::collections::BTreeMap;

use shared::ids::{Epoch, ReplicaId, WorkerId};

use super::replica::Replica;

#[derive(Debug, Default)]
pub(super) struct Replicas {
    all: BTreeMap<ReplicaId, Replica>,
    of: BTreeMap<WorkerId, ReplicaId>,
    revision: u64,
    /// Number of replicas ever made.
    made: u64,
    /// Number of look-ups of replicas.
    #[cfg(test)]
    looks: std::cell::Cell<u64>,
}

impl Replicas {
    /// Iterates in the order of ids.
    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = (ReplicaId, &Replica)> {
        self.all.iter().map(|(id, replica)| {
            self.look();
            (*id, replica)
        })
    }

    pub(super) fn get(&self, id: ReplicaId) -> Option<&Replica> {
        self.look();
        self.all.get(&id)
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Returns the replica that this worker is a rank of.
    pub(super) fn of(&self, worker: WorkerId) -> Option<ReplicaId> {
        self.look();
        self.of.get(&worker).copied()
    }

    /// Grows whenever a replica is made, changed or removed.
    pub(super) fn revision(&self) -> u64 {
        self.revision
    }

    /// Inserts a replica whose workers are ranks of no other.
    pub(super) fn insert(&mut self, id: ReplicaId, mut replica: Replica) {
        self.remove(id);
        replica.set_creation_order(self.made);
        self.made += 1;
        self.of.extend(replica.ranks().into_iter().map(|worker| (worker, id)));
        self.all.insert(id, replica);
        self.revision += 1;
    }

    pub(super) fn remove(&mut self, id: ReplicaId) {
        if let Some(replica) = self.all.remove(&id) {
            for worker in replica.ranks() {
                self.of.remove(&worker);
            }
            self.revision += 1;
        }
    }

    /// Changes a replica, its ranks included; `None` if there is no such replica.
    pub(super) fn change<T>(
        &mut self,
        id: ReplicaId,
        change: impl FnOnce(&mut Replica) -> T,
    ) -> Option<T> {
        self.look();
        let replica = self.all.get_mut(&id)?;
        let before = replica.ranks();
        let result = change(replica);
        let after = replica.ranks();
        if before != after {
            for worker in before {
                self.of.remove(&worker);
            }
            self.of.extend(after.into_iter().map(|worker| (worker, id)));
        }
        self.revision += 1;
        Some(result)
    }

    /// Changes the replica of a worker, if it is in this epoch.
    pub(super) fn in_epoch<T>(
        &mut self,
        worker: WorkerId,
        epoch: Epoch,
        change: impl FnOnce(&mut Replica) -> T,
    ) -> Option<T> {
        let id = self.of(worker)?;
        let is_meant = |replica: &Replica| replica.epoch() == epoch && replica.is_live();
        self.get(id).is_some_and(is_meant).then(|| self.change(id, change))?
    }

    #[cfg(not(test))]
    #[expect(clippy::unused_self, reason = "counts in tests")]
    const fn look(&self) {}

    #[cfg(test)]
    fn look(&self) {
        self.looks.set(self.looks.get() + 1);
    }

    /// Number of look-ups of replicas.
    #[cfg(test)]
    pub(super) fn looks(&self) -> u64 {
        self.looks.get()
    }
}
