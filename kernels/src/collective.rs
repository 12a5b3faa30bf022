//! How tensor-parallel ranks on CPUs exchange data: in host memory, in f32.
//!
//! Every operation is called by all ranks in the same order with the same sizes, has the deadline
//! given at set-up, and can be aborted from another thread. Sums are made in one order on every
//! rank, a binary tree over the wanted ranks ((0 + 1) + (2 + 3), `exchange::Tree`), so all ranks
//! hold bitwise equal results, and groups of fewer ranks the same ones.
//!
//! - [`abort`]: several of them aborted at once
//! - [`single`]: one rank
//! - [`local`]: threads of one process
//! - [`mod@shared_memory`]: processes of one host
//! - [`tally`]: how many bytes went by which way
//! - [`mod@tcp`]: processes of several hosts
pub mod abort;
mod exchange;
pub mod local;
mod region;
pub mod shared_memory;
pub mod single;
pub mod tally;
pub mod tcp;

use std::fmt::Debug;
use std::sync::Arc;

pub use abort::AbortAll;
pub use local::local_group;
pub use shared_memory::{SharedMemoryOptions, shared_memory, shared_memory_bytes};
pub use single::single_rank;
pub use tally::Tally;
pub use tcp::{TcpOptions, tcp};

use crate::error::CollectiveError;

/// Frees a rank, and through it all other ranks, from whatever operation they are in.
pub trait AbortHandle: Send + Sync + Debug {
    /// Makes the running and every later operation on every rank return
    /// [`CollectiveError::Aborted`] soon. Idempotent, never blocks.
    fn abort(&self);
}

/// A group of ranks. Owned by the executor thread of each.
pub trait Collective: Send + Debug {
    /// This rank, 0-based.
    fn rank(&self) -> u32;

    /// How many ranks there are.
    fn world_size(&self) -> u32;

    /// Replaces `data` by the element-wise sum over all ranks, added as a binary tree over them: `(0 + 1) + (2 + 3)`.
    ///
    /// # Errors
    /// See [`CollectiveError`]; `data` is then undefined.
    fn all_reduce_sum(&mut self, data: &mut [f32]) -> Result<(), CollectiveError>;

    /// Gathers every rank's `local` (equal lengths) into `global` = rank 0's, rank 1's, ...; on
    /// rank `root` only, elsewhere `global` is untouched and may be empty.
    ///
    /// # Errors
    /// See [`CollectiveError`].
    fn gather(
        &mut self,
        local: &[f32],
        global: &mut [f32],
        root: u32,
    ) -> Result<(), CollectiveError>;

    /// Gathers every rank's `local` (equal lengths) into `global` on every rank.
    ///
    /// # Errors
    /// See [`CollectiveError`].
    fn all_gather(&mut self, local: &[f32], global: &mut [f32]) -> Result<(), CollectiveError>;

    /// Overwrites `data` on every rank by rank `root`'s.
    ///
    /// # Errors
    /// See [`CollectiveError`].
    fn broadcast(&mut self, data: &mut [u32], root: u32) -> Result<(), CollectiveError>;

    /// Returns when every rank has called it.
    ///
    /// # Errors
    /// See [`CollectiveError`].
    fn barrier(&mut self) -> Result<(), CollectiveError>;

    /// A handle that another thread can use to free this group.
    fn abort_handle(&self) -> Arc<dyn AbortHandle>;
}
