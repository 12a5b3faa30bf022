//! Ranks that exchange data in GPU memory, in the order of a stream, without their hosts.
//!
//! The host's [`Collective`](crate::Collective) is always there besides: ranks find each other by
//! it, agree by it on what they use ([`super::choice`]), and do without a group when there is none.
//! A group is part of the context that it works in, because every wait for the GPU looks at it: a
//! rank that does not come would otherwise be waited for for ever.
use std::cell::{Cell, RefCell};
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::device::Device;
use super::launch::Rows;
use super::memory::DevicePtr;
use super::stream::{Stream, pause};
use crate::collective::AbortHandle;
use crate::error::{CollectiveError, KernelError};

/// How long a stream may take to come to its end once what it waits for was aborted.
const DRAIN_PATIENCE: Duration = Duration::from_secs(5);

/// Ranks that exchange data in GPU memory, in the order of a stream. Dropped after the graphs that
/// its calls were recorded in.
pub(super) trait DeviceGroup: fmt::Debug {
    /// Replaces `count` f32 at `data` by their sums over the ranks; bitwise equal on every rank.
    /// Queued on the stream, not waited for.
    fn all_reduce_sum(
        &mut self,
        device: &Device,
        data: DevicePtr,
        count: usize,
    ) -> Result<(), KernelError>;

    /// `all[r * bytes ..]` = rank r's `local`, on every rank; `bytes` is a multiple of 4. Queued.
    fn all_gather(
        &mut self,
        device: &Device,
        local: DevicePtr,
        all: DevicePtr,
        bytes: usize,
    ) -> Result<(), KernelError>;

    /// [`DeviceGroup::all_reduce_sum`] of `io.data`, and [`crate::backend::RowOps::add_rmsnorm`]
    /// with the result, in one; `io.data` is undefined then. False, with nothing queued, where this
    /// group cannot, or would be slower. Queued.
    fn all_reduce_add_rmsnorm(
        &mut self,
        device: &Device,
        io: &FusedNorm,
    ) -> Result<bool, KernelError> {
        let _ = (device, io);
        Ok(false)
    }

    /// What the group has found wrong by itself (asynchronous errors, aborts). Asked while the host
    /// waits for the stream, and after.
    fn poll(&mut self) -> Result<(), CollectiveError>;

    /// Whether calls may be recorded into graphs.
    fn is_capturable(&self) -> bool;

    /// Whether sums of this many bytes are made as a binary tree over the ranks in order, wherever
    /// in `data` they lie: `(0 + 1) + (2 + 3)`.
    fn sums_in_order(&self, bytes: usize) -> bool {
        let _ = bytes;
        false
    }

    /// `nccl`, `one_shot`, ...: for logs and metrics.
    fn algorithm(&self, bytes: usize) -> &'static str;

    /// Frees this rank from whatever its stream waits for; from any thread; idempotent, never
    /// blocks.
    fn abort_handle(&self) -> Arc<dyn AbortHandle>;

    /// Lets go of what the group holds besides memory, when it was aborted and the stream has come
    /// to its end.
    ///
    /// # Errors
    /// In words, when that does not come to an end.
    fn end(&mut self) -> Result<(), String> {
        Ok(())
    }
}

/// What a fused all-reduce, residual add and norm reads and writes.
#[derive(Clone, Copy, Debug)]
pub(super) struct FusedNorm {
    /// f32 [rows, width]: this rank's part.
    pub(super) data: DevicePtr,
    /// f32 [rows, width]
    pub(super) residual: DevicePtr,
    /// `f32 [width]`
    pub(super) weight: DevicePtr,
    /// bf16 [rows, width]
    pub(super) out: Rows,
    pub(super) width: usize,
    pub(super) eps: f32,
    /// Launched for so many, of which `*live` are computed.
    pub(super) rows: usize,
    pub(super) live: DevicePtr,
}

/// A group and how long its exchanges may take.
#[derive(Debug)]
struct Joined {
    group: Box<dyn DeviceGroup>,
    timeout: Duration,
}

/// The group of a context, if it is in one.
#[derive(Debug, Default)]
pub(super) struct GroupSlot {
    joined: RefCell<Option<Joined>>,
    /// Nothing is exchanged for now.
    rests: Cell<bool>,
}

impl GroupSlot {
    /// Whether there is none.
    pub(super) fn is_empty(&self) -> bool {
        self.joined.try_borrow().is_ok_and(|joined| joined.is_none())
    }

    /// Joins a group whose exchanges, and what waits for them, may take `timeout`.
    pub(super) fn join(&self, group: Box<dyn DeviceGroup>, timeout: Duration) {
        *self.joined.borrow_mut() = Some(Joined { group, timeout });
    }

    /// While it rests nothing is exchanged, and so the group is nothing to those who wait: what
    /// other ranks do meanwhile is seen later.
    pub(super) fn rest(&self, rests: bool) {
        self.rests.set(rests);
    }

    /// Calls the group, if there is one.
    pub(super) fn call<T>(&self, call: impl FnOnce(&mut dyn DeviceGroup) -> T) -> Option<T> {
        self.joined.borrow_mut().as_mut().map(|joined| call(joined.group.as_mut()))
    }

    /// What the group has found wrong.
    pub(super) fn poll(&self) -> Result<(), KernelError> {
        self.look(None)
    }

    /// As [`GroupSlot::poll`], for one that has waited for so long; a wait that is too long aborts
    /// the group.
    pub(super) fn check(&self, waited: Duration) -> Result<(), KernelError> {
        self.look(Some(waited))
    }

    fn look(&self, waited: Option<Duration>) -> Result<(), KernelError> {
        if self.rests.get() {
            return Ok(());
        }
        // A group that waits within a call of its own looks after itself.
        let Ok(mut joined) = self.joined.try_borrow_mut() else { return Ok(()) };
        let Some(Joined { group, timeout }) = joined.as_mut() else { return Ok(()) };
        group.poll()?;
        match waited {
            Some(waited) if waited > *timeout => {
                group.abort_handle().abort();
                let (algorithm, waited) = (group.algorithm(0), *timeout);
                Err(CollectiveError::Stalled { algorithm, waited }.into())
            }
            _ => Ok(()),
        }
    }

    /// Leaves the group, if there is one: frees the stream, waits until it has come to its end, and
    /// drops the group. Its graphs are gone already.
    ///
    /// # Errors
    /// [`KernelError::Device`] when the stream failed or does not come to its end.
    pub(super) fn leave(&self, stream: &Stream) -> Result<(), KernelError> {
        let joined = self.joined.borrow_mut().take();
        joined.map_or(Ok(()), |joined| give_up(joined.group, stream))
    }
}

/// As [`GroupSlot::leave`], of a group that is in no context.
///
/// # Errors
/// As there.
pub(super) fn give_up(group: Box<dyn DeviceGroup>, stream: &Stream) -> Result<(), KernelError> {
    // Until the stream is done with what it holds; kept for good when it never is.
    let mut group = ManuallyDrop::new(group);
    group.abort_handle().abort();
    let began = Instant::now();
    while !stream.is_idle()? {
        let waited = began.elapsed();
        if waited > DRAIN_PATIENCE {
            let error = stream.context().hangs(format!(
                "the GPU is still running {DRAIN_PATIENCE:?} after its exchange with other ranks \
                 was aborted: it hangs"
            ));
            return Err(error);
        }
        pause(waited);
    }
    if let Err(reason) = group.end() {
        return Err(stream.context().hangs(reason));
    }
    drop(ManuallyDrop::into_inner(group));
    Ok(())
}
