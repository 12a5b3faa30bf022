//! What happens to a request on its way, for whoever traces it: only requests that ask for notes
//! have any. They say nothing that a client is told, and losing one loses nothing else.
use serde::{Deserialize, Serialize};

use crate::ids::ReplicaId;

/// Maximum number of notes on one request; further ones are not sent.
pub const NOTES_MAX: u16 = 64;

/// See the module's documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RequestNote {
    /// It is in a step, for the first time or again after it was preempted or interrupted.
    Scheduled {
        /// The replica that runs it.
        replica: ReplicaId,
        /// Number of the replica's ranks.
        ranks: u32,
    },
    /// One of its sequences lost its place in the KV cache and waits again.
    Preempted {
        /// The replica that ran it.
        replica: ReplicaId,
    },
    /// Its replica pauses, and it waits to be continued there or elsewhere.
    Interrupted {
        /// The replica that ran it.
        replica: ReplicaId,
        /// Whether the replica broke, rather than ending its epoch as planned.
        failed: bool,
    },
    /// Its coordinator is gone, and the next one is asked for the rest. Front ends note this
    /// themselves.
    CoordinatorLost,
    /// What became of all its drafts; noted before its end, if there were any.
    Drafted {
        /// Tokens drafted.
        tokens: u64,
        /// How many of them were accepted.
        accepted: u64,
    },
}
