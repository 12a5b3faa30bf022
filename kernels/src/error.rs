//! What can go wrong in arithmetic and between ranks.
use std::time::Duration;

/// An operation of a backend failed.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// Arguments do not fit together: a bug in the caller, found before memory is touched.
    #[error("{op}: {message}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// What does not fit.
        message: String,
    },
    /// Memory for a buffer, matrix or cache could not be had.
    #[error("cannot allocate {bytes} bytes for {what}")]
    OutOfMemory {
        /// What it was for.
        what: &'static str,
        /// How much.
        bytes: u64,
    },
    /// The ranks could not exchange data.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// The device cannot do this.
    #[error("{0}")]
    Unsupported(String),
    /// Nothing of the step was computed; running it again helps, since the device will do it in
    /// another way.
    #[error("{0}")]
    Again(String),
    /// The device failed while it computed; its buffers are undefined.
    #[error("the device failed: {0}")]
    Device(String),
}

/// Ranks could not exchange data. After any of these the collective is unusable and is dropped.
#[derive(Debug, thiserror::Error)]
pub enum CollectiveError {
    /// Another thread called abort, here or on another rank.
    #[error("the collective was aborted")]
    Aborted,
    /// Other ranks did not arrive in time.
    #[error("{op} timed out after {waited:?} waiting for rank {rank}")]
    TimedOut {
        /// The operation.
        op: &'static str,
        /// How long it waited.
        waited: Duration,
        /// The first rank that had not arrived.
        rank: u32,
    },
    /// What the ranks' devices exchange did not end in time.
    #[error("{algorithm}: the ranks' devices did not finish an exchange in {waited:?}")]
    Stalled {
        /// How they exchange data.
        algorithm: &'static str,
        /// How long was waited.
        waited: Duration,
    },
    /// What the devices exchange data by found an error by itself.
    #[error("{algorithm}: {message}")]
    Failed {
        /// How they exchange data.
        algorithm: &'static str,
        /// What it found, in one line.
        message: String,
    },
    /// The link to a rank broke.
    #[error("lost the link to rank {rank}: {message}")]
    LinkLost {
        /// The rank.
        rank: u32,
        /// The operating system's words.
        message: String,
    },
    /// It could not be set up.
    #[error("cannot set up the collective: {0}")]
    Setup(String),
    /// Ranks called different operations or sizes.
    #[error("{op}: rank {rank} takes part with {theirs} elements, this rank with {ours}")]
    Mismatch {
        /// The operation.
        op: &'static str,
        /// The other rank.
        rank: u32,
        /// Its element count.
        theirs: u64,
        /// Ours.
        ours: u64,
    },
}
