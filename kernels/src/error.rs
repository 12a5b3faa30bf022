//! Errors of arithmetic and of exchanges between ranks.
use std::time::Duration;

/// Why an operation of a backend failed.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// The arguments do not fit together: a bug in the caller, detected before any memory access.
    #[error("{op}: {message}")]
    Shape {
        /// Operation that failed.
        op: &'static str,
        /// What does not fit.
        message: String,
    },
    /// Memory for a buffer, matrix or cache could not be allocated.
    #[error("cannot allocate {bytes} bytes for {what}")]
    OutOfMemory {
        /// Purpose of the memory.
        what: &'static str,
        /// Size of the allocation.
        bytes: u64,
    },
    /// The ranks could not exchange data.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// The device does not support this.
    #[error("{0}")]
    Unsupported(String),
    /// Nothing of the step was computed. A retry helps, because the device will then compute it
    /// differently.
    #[error("{0}")]
    Again(String),
    /// The device failed while computing; its buffers are undefined.
    #[error("the device failed: {0}")]
    Device(String),
}

/// Why ranks could not exchange data. After any of these errors the collective is unusable and is
/// dropped.
#[derive(Debug, thiserror::Error)]
pub enum CollectiveError {
    /// A thread, on this or another rank, aborted the collective.
    #[error("the collective was aborted")]
    Aborted,
    /// Other ranks did not arrive in time.
    #[error("{op} timed out after {waited:?} waiting for rank {rank}")]
    TimedOut {
        /// Operation that timed out.
        op: &'static str,
        /// How long this rank waited.
        waited: Duration,
        /// First rank that has not arrived.
        rank: u32,
    },
    /// The ranks' devices did not finish an exchange in time.
    #[error("{algorithm}: the ranks' devices did not finish an exchange in {waited:?}")]
    Stalled {
        /// Algorithm of the exchange.
        algorithm: &'static str,
        /// How long this rank waited.
        waited: Duration,
    },
    /// The devices' communication library reported an error.
    #[error("{algorithm}: {message}")]
    Failed {
        /// Algorithm of the exchange.
        algorithm: &'static str,
        /// Error message, in one line.
        message: String,
    },
    /// The link to a rank broke.
    #[error("lost the link to rank {rank}: {message}")]
    LinkLost {
        /// Rank at the other end.
        rank: u32,
        /// The operating system's error message.
        message: String,
    },
    /// The collective could not be set up.
    #[error("cannot set up the collective: {0}")]
    Setup(String),
    /// Ranks called different operations, or the same one with different sizes.
    #[error("{op}: rank {rank} takes part with {theirs} elements, this rank with {ours}")]
    Mismatch {
        /// Operation that this rank called.
        op: &'static str,
        /// The other rank.
        rank: u32,
        /// The other rank's element count.
        theirs: u64,
        /// This rank's element count.
        ours: u64,
    },
}
