//! Data exchange between tensor-parallel ranks on CPUs: all-reduce, gather, broadcast and barrier
//! in host memory, in f32.
//!
//! All ranks call the same operations in the same order with the same sizes. Data moves in rounds;
//! every round has the deadline given at set-up and can be aborted from another thread. Every rank
//! sums in the same order, a binary tree over the ranks ((0 + 1) + (2 + 3), `exchange::Tree`), so
//! all ranks hold bitwise equal results, and smaller groups get the same ones.
//!
//! - [`abort`]: aborts several collectives at once
//! - `exchange`: the operations in terms of a single one, in which each rank shows its data to all
//! - [`single`]: one rank
//! - [`local`]: threads of one process
//! - `region`: the protocol of ranks that share memory, used by `local` and `shared_memory`
//! - [`mod@shared_memory`]: processes of one host
//! - [`byte_counters`]: bytes that each transport carried
//! - [`mod@tcp`]: processes of several hosts
pub mod abort;
pub mod byte_counters;
mod exchange;
pub mod local;
mod region;
pub mod shared_memory;
pub mod single;
pub mod tcp;

use std::fmt::Debug;
use std::sync::Arc;

pub use abort::AbortAll;
pub use byte_counters::ByteCounters;
pub use local::local_group;
pub use shared_memory::{SharedMemoryOptions, shared_memory, shared_memory_bytes};
pub use single::single_rank;
pub use tcp::{TcpOptions, tcp};

use crate::error::CollectiveError;

/// Releases a rank, and through it all other ranks, from any operation they are in.
pub trait AbortHandle: Send + Sync + Debug {
    /// Makes the current and all later operations on every rank return [`CollectiveError::Aborted`]
    /// soon. Idempotent; never blocks.
    fn abort(&self);
}

/// One rank's handle on a group of ranks. Owned by the rank's executor thread.
pub trait Collective: Send + Debug {
    /// This rank, from 0.
    fn rank(&self) -> u32;

    /// Number of ranks.
    fn world_size(&self) -> u32;

    /// Replaces `data` with the element-wise sum over all ranks, added as a binary tree:
    /// `(0 + 1) + (2 + 3)`.
    ///
    /// # Errors
    /// [`CollectiveError`]; the contents of `data` are then undefined.
    fn all_reduce_sum(&mut self, data: &mut [f32]) -> Result<(), CollectiveError>;

    /// Concatenates the `local` of all ranks (of equal lengths), in rank order, into `global` on
    /// rank `root`. On other ranks `global` is not touched and can be empty.
    ///
    /// # Errors
    /// [`CollectiveError`].
    fn gather(
        &mut self,
        local: &[f32],
        global: &mut [f32],
        root: u32,
    ) -> Result<(), CollectiveError>;

    /// As [`gather`](Self::gather), into `global` on every rank.
    ///
    /// # Errors
    /// [`CollectiveError`].
    fn all_gather(&mut self, local: &[f32], global: &mut [f32]) -> Result<(), CollectiveError>;

    /// Overwrites `data` on every rank with the data of rank `root`.
    ///
    /// # Errors
    /// [`CollectiveError`].
    fn broadcast(&mut self, data: &mut [u32], root: u32) -> Result<(), CollectiveError>;

    /// Returns once every rank has called it.
    ///
    /// # Errors
    /// [`CollectiveError`].
    fn barrier(&mut self) -> Result<(), CollectiveError>;

    /// A handle with which another thread can abort this group.
    fn abort_handle(&self) -> Arc<dyn AbortHandle>;

    /// Whether the group was aborted: every operation says so from now on.
    fn is_aborted(&self) -> bool {
        false
    }
}
