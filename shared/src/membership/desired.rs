//! PURE: commands that operators gave to running coordinators. The leader stores them in etcd for
//! the next one.
use serde::{Deserialize, Serialize};

use crate::protocol::Adapter;
use crate::protocol::lora::ADAPTERS_MAX;

/// Maximum number of remembered workers that were told to leave; the oldest are forgotten first.
const LEAVING_MAX: usize = 256;

/// Maximum number of them that had the same node's name, so that a node that is drained again and
/// again does not make the others forgotten.
const LEAVING_OF_A_NODE: usize = 8;

/// The accumulated effect of all commands, stored as JSON under its key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DesiredState {
    /// Process run that wrote it.
    pub by: u64,
    /// Number of commands so far, over all leaders.
    pub generation: u64,
    /// Maximum number of replicas; 0 is unbounded. Absent: the leader's own options decide.
    #[serde(default)]
    pub replicas: Option<u32>,
    /// Workers that were told to leave, oldest first.
    #[serde(default)]
    pub leaving: Vec<DrainedWorker>,
    /// What became of the LoRA adapters of the leader's own options.
    #[serde(default)]
    pub adapters: ChangedAdapters,
}

/// LoRA adapters that were loaded and unloaded while coordinators ran.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangedAdapters {
    /// Loaded, in the order in which they came; each takes the place of one of the same name.
    pub loaded: Vec<Adapter>,
    /// Names of those of a leader's options that were unloaded.
    pub unloaded: Vec<String>,
    /// Numbers from this one on were never used.
    pub next: u32,
}

/// A worker that was told to leave. A later process of the same node may stay.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrainedWorker {
    /// Its node's name.
    pub node: String,
    /// The worker's process run.
    pub incarnation: u64,
}

impl DesiredState {
    /// Sets the maximum number of replicas; see [`DesiredState::replicas`].
    pub fn scale(&mut self, replicas: Option<u32>) {
        self.generation += 1;
        self.replicas = replicas;
    }

    /// An adapter was loaded, or the one of this name unloaded; `is_option` if the leader's options
    /// have one of this name.
    pub fn change_adapter(
        &mut self,
        name: &str,
        loaded: Option<&Adapter>,
        is_option: bool,
        next: u32,
    ) {
        self.generation += 1;
        let ChangedAdapters { loaded: all, unloaded, next: unused } = &mut self.adapters;
        *unused = next;
        all.retain(|adapter| adapter.name != name);
        unloaded.retain(|it| it != name);
        match loaded {
            Some(adapter) => all.push(adapter.clone()),
            None if is_option => unloaded.push(name.to_owned()),
            None => {}
        }
        // Leaders with other options may follow each other for ever.
        let over = unloaded.len().saturating_sub(ADAPTERS_MAX);
        unloaded.drain(..over);
    }

    /// Tells a worker to leave.
    pub fn drain(&mut self, node: &str, incarnation: u64) {
        self.generation += 1;
        // An earlier process of that name may be back: one that hung when it was told, and whose
        // place another took meanwhile.
        let new = DrainedWorker { node: node.to_owned(), incarnation };
        self.leaving.retain(|it| *it != new);
        let of_the_node = self.leaving.iter().filter(|it| it.node == node).count();
        if of_the_node >= LEAVING_OF_A_NODE
            && let Some(oldest) = self.leaving.iter().position(|it| it.node == node)
        {
            self.leaving.remove(oldest);
        }
        self.leaving.push(new);
        let over = self.leaving.len().saturating_sub(LEAVING_MAX);
        self.leaving.drain(..over);
    }

    /// Whether this process run of a node was told to leave.
    #[must_use]
    pub fn drains(&self, node: &str, incarnation: u64) -> bool {
        self.leaving.iter().any(|it| it.node == node && it.incarnation == incarnation)
    }

    /// Whether this includes all commands that the process run `by` was given up to `generation`.
    #[must_use]
    pub fn has(&self, by: u64, generation: u64) -> bool {
        self.by == by && self.generation >= generation
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_add_up_and_are_bounded() {
        let mut desired = DesiredState { by: 7, ..DesiredState::default() };
        desired.scale(Some(2));
        desired.drain("a", 1);
        desired.drain("a", 2);
        assert!(desired.drains("a", 2) && desired.drains("a", 1), "each of them may be back");
        assert!(!desired.drains("a", 3), "a later process of the node may stay");
        assert!(!desired.drains("b", 2), "of that node alone");
        desired.drain("b", 1);
        (3..=LEAVING_OF_A_NODE as u64).for_each(|incarnation| desired.drain("a", incarnation));
        desired.drain("a", 2);
        assert_eq!(desired.leaving.len(), LEAVING_OF_A_NODE + 1, "none is there twice");
        desired.drain("a", 9);
        assert!(desired.drains("b", 1) && desired.drains("a", 9) && desired.drains("a", 2));
        assert!(!desired.drains("a", 1), "the oldest of the node is forgotten");
        for incarnation in 10..10 + LEAVING_MAX as u64 {
            desired.drain(&format!("n{incarnation}"), incarnation);
        }
        assert!(!desired.drains("a", 2) && desired.drains("n10", 10));
        assert_eq!((desired.leaving.len(), desired.replicas), (LEAVING_MAX, Some(2)));
        let generation = desired.generation;
        assert!(desired.has(7, generation) && desired.has(7, 1));
        assert!(!desired.has(7, generation + 1) && !desired.has(8, 1), "another's is not it");
    }

    #[test]
    fn what_another_version_wrote_is_read_as_far_as_it_is_known() {
        let read: DesiredState =
            serde_json::from_str(r#"{"by":1,"generation":2,"more":[3]}"#).unwrap();
        assert_eq!(read, DesiredState { by: 1, generation: 2, ..DesiredState::default() });
        let text = serde_json::to_string(&read).unwrap();
        assert_eq!(serde_json::from_str::<DesiredState>(&text).unwrap(), read);
    }
}
