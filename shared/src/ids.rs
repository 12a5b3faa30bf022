//! Newtypes for everything identified across processes.
//!
//! All are plain integers on the wire. None is reused within a cluster's life, except [`BlockId`],
//! [`HostBlockId`], [`StateId`] and [`ReplicaId`], which name places rather than things: for a
//! replica, the [`Epoch`] tells its formations apart.
use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $inner:ty, $prefix:literal) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    };
}

id!(
    /// One client request (one HTTP completion of one prompt); it may hold several sequences (`n`).
    RequestId, u64, "req-"
);
id!(
    /// One sequence of tokens being generated: one choice of one request.
    SeqId, u64, "seq-"
);
id!(
    /// One worker slot, numbered by the coordinator; survives a restart of the process.
    WorkerId, u32, "worker-"
);
id!(
    /// One run of a process, drawn at random when it starts, so a restarted worker differs.
    Incarnation, u64, "inc-"
);
id!(
    /// One formation of a replica. Grows by one each time a replica is formed again; frames of an
    /// older epoch are fenced (dropped and counted).
    Epoch, u64, "epoch-"
);
id!(
    /// One engine step within an epoch, counted from 1.
    StepId, u64, "step-"
);
id!(
    /// One replica: a tensor-parallel group with a scheduler of its own.
    ReplicaId, u32, "replica-"
);
id!(
    /// One block of the paged KV cache: an index into every rank's cache.
    BlockId, u32, "block-"
);
id!(
    /// One block of KV in host memory: an index into every rank's host pool.
    HostBlockId, u32, "host-block-"
);
id!(
    /// A place for a kept state of linear attention: an index into every rank's.
    StateId, u32, "state-"
);
