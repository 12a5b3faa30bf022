//! Created actors as etcd keeps them for the next coordinator: what the process that leads writes,
//! and what it finds. The [`placement`](crate::actor::placement::keep) core decides.
use std::sync::Arc;

use tokio::sync::Notify;

use super::ActorRuntime;
use crate::actor::placement::keep::{Kept, Write, Written};

impl ActorRuntime {
    /// From now on created actors are kept in etcd; called at the hub. The bell rings when there is
    /// something to write.
    #[must_use]
    pub fn keep(&self) -> Arc<Notify> {
        let mut state = self.state();
        state.placement.keep_from_now_on();
        let bell = Arc::new(Notify::new());
        state.keeper = Some(bell.clone());
        bell
    }

    /// Takes what earlier coordinators kept. Returns the names of those that cannot be taken: etcd
    /// will not keep them.
    pub fn resume(&self, all: Vec<Kept>) -> Vec<String> {
        let (mut effects, now) = (Vec::new(), self.inner.clock.now());
        let mut state = self.state();
        let mut refused = Vec::new();
        for kept in all {
            let name = kept.creation.name.clone();
            let taken = state.is_taken(&name);
            if !state.placement.resume(now, kept, taken, &mut effects) {
                refused.push(name);
            }
        }
        self.decided(&mut state, effects);
        refused
    }

    /// What is to be written to etcd next, all of it in one transaction, if anything. Then comes
    /// [`ActorRuntime::written`].
    #[must_use]
    pub fn next_to_keep(&self) -> Vec<Write> {
        self.state().placement.next_to_keep()
    }

    /// Takes what came of the last writes.
    pub fn written(&self, outcome: Written) {
        let mut effects = Vec::new();
        let mut state = self.state();
        state.placement.written(outcome, &mut effects);
        self.decided(&mut state, effects);
    }

    /// Etcd may have lost what it had, and has actors of these names: all is written again.
    pub fn keep_anew(&self, names: Vec<String>) {
        self.state().placement.keep_anew(names);
    }
}
