//! Ranks that exchange data in GPU memory, in stream order, without involving their hosts.
//!
//! The host's [`Collective`](crate::Collective) always exists as well: ranks find each other
//! through it, agree through it on the exchange to use ([`super::choice`]), and fall back to it
//! without a group. A group is part of its context, because every wait for the GPU polls the group;
//! otherwise a wait for a missing rank would never end.
use std::cell::{Cell, RefCell};
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::device::Device;
use super::launch::Rows;
use super::memory::DevicePtr;
use super::stream::{Stream, pause};
use super::tensors::Element;
use crate::collective::AbortHandle;
use crate::error::{CollectiveError, KernelError};

/// Maximum time for a stream to become idle after the exchange that it waits for was aborted,
/// beyond that of its own work.
const DRAIN_PATIENCE: Duration = Duration::from_secs(5);

/// Ranks that exchange data in GPU memory, in stream order. Dropped after the graphs that recorded
/// its calls.
pub(super) trait DeviceGroup: fmt::Debug {
    /// Replaces `count` elements at `data` with their sums over the ranks, bitwise equal on every
    /// rank: f32, or bf16 if [`DeviceGroup::sums_in_bf16`]. Queued on the stream; does not wait.
    fn all_reduce_sum(
        &mut self,
        device: &Device,
        data: DevicePtr,
        count: usize,
        element: Element,
    ) -> Result<(), KernelError>;

    /// Whether sums of f32 that take this many bytes go through a library, which can sum bf16 as
    /// well: half as much for the links between GPUs.
    fn sums_in_bf16(&self, bytes: usize) -> bool {
        let _ = bytes;
        false
    }

    /// `all[r * bytes ..]` = rank r's `local`, on every rank; `bytes` is a multiple of 4. Queued.
    fn all_gather(
        &mut self,
        device: &Device,
        local: DevicePtr,
        all: DevicePtr,
        bytes: usize,
    ) -> Result<(), KernelError>;

    /// [`DeviceGroup::all_reduce_sum`] of `io.data` and [`crate::backend::RowOps::add_rmsnorm`]
    /// with the result, fused and queued; `io.data` is undefined afterwards. Returns false, with
    /// nothing queued, if this group does not support it or would be slower.
    fn all_reduce_add_rmsnorm(
        &mut self,
        device: &Device,
        io: &FusedNorm,
    ) -> Result<bool, KernelError> {
        let _ = (device, io);
        Ok(false)
    }

    /// Begins to measure how long exchanges take, or says false if that would leave out those of
    /// most steps. `graphs`: whether steps run as graphs.
    fn begin_timing(&mut self, graphs: bool) -> bool {
        let _ = graphs;
        false
    }

    /// Queues a report of the time that exchanges have taken, for [`DeviceGroup::take_time`].
    fn report_time(&mut self, device: &Device) -> Result<(), KernelError> {
        let _ = device;
        Ok(())
    }

    /// Time that exchanges have taken according to the reports that have arrived, since the last
    /// call.
    fn take_time(&mut self) -> Duration {
        Duration::ZERO
    }

    /// Reports errors that the group has detected by itself (asynchronous errors, aborts). Called
    /// while the host waits for the stream, and afterwards.
    fn poll(&mut self) -> Result<(), CollectiveError>;

    /// Whether its calls can be recorded into graphs.
    fn is_capturable(&self) -> bool;

    /// Whether sums of this many bytes are computed as a binary tree over the ranks in order,
    /// independent of the position in `data`: `(0 + 1) + (2 + 3)`.
    fn sums_in_order(&self, bytes: usize) -> bool {
        let _ = bytes;
        false
    }

    /// Name for logs and metrics: `nccl`, `one_shot`, ..
    fn algorithm(&self, bytes: usize) -> &'static str;

    /// Returns a handle that releases this rank from whatever its stream waits for; usable from any
    /// thread, idempotent, never blocks.
    fn abort_handle(&self) -> Arc<dyn AbortHandle>;

    /// Releases what the group holds besides memory, after it was aborted and the stream has become
    /// idle. Called again, it does nothing.
    ///
    /// # Errors
    /// A message, if that does not finish, and cannot be left to finish by itself.
    fn end(&mut self) -> Result<GroupEnd, String> {
        Ok(GroupEnd::Released)
    }
}

/// What has become of what a group held besides memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum GroupEnd {
    /// It is released.
    Released,
    /// It is released once others have let go of it. Until then something of it stays; nothing of
    /// it runs on the GPU.
    LeftBehind,
}

/// Operands of a fused all-reduce, residual add and norm.
#[derive(Clone, Copy, Debug)]
pub(super) struct FusedNorm {
    /// f32 [rows, width]: this rank's partial sums.
    pub(super) data: DevicePtr,
    /// f32 [rows, width]
    pub(super) residual: DevicePtr,
    /// `f32 [width]`
    pub(super) weight: DevicePtr,
    /// bf16 [rows, width]
    pub(super) out: Rows,
    pub(super) width: usize,
    pub(super) eps: f32,
    /// Number of rows launched for; `*live` of them are computed.
    pub(super) rows: usize,
    pub(super) live: DevicePtr,
}

/// A group, and the time limit of its exchanges.
#[derive(Debug)]
struct ActiveGroup {
    group: Box<dyn DeviceGroup>,
    timeout: Duration,
    /// Whether it measures how long exchanges take.
    is_timed: bool,
}

/// The group of a context, if it has joined one.
#[derive(Debug, Default)]
pub(super) struct GroupSlot {
    joined: RefCell<Option<ActiveGroup>>,
    /// Set while nothing is exchanged.
    rests: Cell<bool>,
}

impl GroupSlot {
    /// Whether there is no group.
    pub(super) fn is_empty(&self) -> bool {
        self.joined.try_borrow().is_ok_and(|joined| joined.is_none())
    }

    /// Joins a group; exchanges, and waits for them, may take up to `timeout`. `graphs`: whether
    /// steps run as graphs.
    pub(super) fn join(&self, mut group: Box<dyn DeviceGroup>, timeout: Duration, graphs: bool) {
        let is_timed = group.begin_timing(graphs);
        *self.joined.borrow_mut() = Some(ActiveGroup { group, timeout, is_timed });
    }

    /// Whether the group measures how long exchanges take; true without one, because the host then
    /// does.
    pub(super) fn is_timed(&self) -> bool {
        self.joined.borrow().as_ref().is_none_or(|joined| joined.is_timed)
    }

    /// While the group rests, nothing is exchanged and waits do not poll it: errors of other ranks
    /// are noticed later.
    pub(super) fn rest(&self, rests: bool) {
        self.rests.set(rests);
    }

    /// Whether nothing is exchanged, so that a wait for this GPU is for its own work only.
    pub(super) fn is_silent(&self) -> bool {
        self.rests.get() || self.is_empty()
    }

    /// Calls the group, if there is one.
    pub(super) fn call<T>(&self, call: impl FnOnce(&mut dyn DeviceGroup) -> T) -> Option<T> {
        self.joined.borrow_mut().as_mut().map(|joined| call(joined.group.as_mut()))
    }

    /// Reports errors that the group has detected.
    pub(super) fn poll(&self) -> Result<(), KernelError> {
        self.poll_group(None)
    }

    /// As [`GroupSlot::poll`], for a wait of this duration for other ranks so far; aborts the group
    /// if it is too long.
    pub(super) fn check(&self, waited: Duration) -> Result<(), KernelError> {
        self.poll_group(Some(waited))
    }

    fn poll_group(&self, waited: Option<Duration>) -> Result<(), KernelError> {
        if self.rests.get() {
            return Ok(());
        }
        // A group that waits within a call of its own polls itself.
        let Ok(mut joined) = self.joined.try_borrow_mut() else { return Ok(()) };
        let Some(ActiveGroup { group, timeout, .. }) = joined.as_mut() else { return Ok(()) };
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

    /// Leaves the group, if there is one: aborts its exchanges, waits until the stream is idle, and
    /// drops the group. Its graphs must already have been dropped.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the stream failed or does not become idle.
    pub(super) fn leave(&self, stream: &Stream) -> Result<(), KernelError> {
        let joined = self.joined.borrow_mut().take();
        joined.map_or(Ok(()), |joined| give_up(joined.group, stream))
    }
}

/// As [`GroupSlot::leave`], for a group that is in no context.
///
/// # Errors
/// As [`GroupSlot::leave`].
pub(super) fn give_up(group: Box<dyn DeviceGroup>, stream: &Stream) -> Result<(), KernelError> {
    // Kept alive until the stream no longer uses it, and leaked if that never happens.
    let mut group = ManuallyDrop::new(group);
    group.abort_handle().abort();
    let began = Instant::now();
    let patience = DRAIN_PATIENCE.saturating_add(stream.context().own_work());
    while !stream.is_idle()? {
        let waited = began.elapsed();
        if waited > patience {
            let error = stream.context().hangs(format!(
                "the GPU is still running {patience:.1?} after its exchange with other ranks was \
                 aborted: it hangs"
            ));
            return Err(error);
        }
        pause(waited);
    }
    match group.end() {
        // What goes on without this rank must have left its stream alone.
        Ok(GroupEnd::LeftBehind) if !stream.is_idle()? => {
            let reason = "the GPU is running again after its exchange with other ranks was aborted";
            return Err(stream.context().hangs(reason.to_owned()));
        }
        Ok(GroupEnd::Released | GroupEnd::LeftBehind) => {}
        Err(reason) => return Err(stream.context().hangs(reason)),
    }
    drop(ManuallyDrop::into_inner(group));
    Ok(())
}
