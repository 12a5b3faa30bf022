//! Ranks of one host that access each other's GPU memory and exchange data with this project's own
//! kernels (`kernels/cuda/all_reduce.cu`). Faster than NCCL for the small messages of decode steps,
//! and able to stop when a rank is gone. Large messages go through another group, if there is one.
//!
//! - `memory`: memory shared with other processes (CUDA IPC), and the words shared with kernels
//! - `connect`: how ranks find out whether they can, and set up the group
//! - `retired`: memory of groups that were left
//! - `trial`: a test exchange of known numbers before anything depends on it
//! - [`tuning`]: PURE: the kernel for each size, chosen from measured times; and the measurements
mod connect;
mod memory;
mod retired;
mod trial;
pub mod tuning;

use std::mem::ManuallyDrop;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::context::Context;
use super::device::Device;
use super::group::{DeviceGroup, FusedNorm, GroupEnd};
use super::launch::{self, PEER_SLOT};
use super::memory::{DeviceMemory, DevicePtr, Pinned};
use super::tensors::Element;
use crate::collective::{AbortAll, AbortHandle};
use crate::error::{CollectiveError, KernelError};
pub(super) use connect::{AgreeError, SetupContext, agree, process_id};
use memory::{Mapped, SignalWords};
pub(super) use retired::Retired;
use tuning::{AllReduceAlgorithm, Thresholds};

/// A group of such ranks; see the module. Dropped once the stream is idle.
#[derive(Debug)]
pub(super) struct PeerGroup {
    /// `TuttiPeers`
    table: DeviceMemory,
    /// Slots, flags, rounds, the word that records a failure, and the time of exchanges.
    own: Option<DeviceMemory>,
    /// Other ranks' memory, mapped here; unmapped before `own` is retired.
    mapped: Vec<Mapped>,
    words: Arc<SignalWords>,
    clock: Clock,
    abort: Arc<AbortAll>,
    thresholds: Thresholds,
    large: Option<Box<dyn DeviceGroup>>,
    /// Whether ranks of this process use `own` without having opened it.
    shares_process: bool,
    retired: Retired,
    /// The processes that have opened `own`.
    processes: Box<[u64]>,
    timeout: Duration,
}

/// How long the kernels' exchanges have taken: the GPU adds it up, and copies the sum here when
/// asked.
#[derive(Debug)]
struct Clock {
    /// Nanoseconds.
    reported: Pinned<u64>,
    /// Byte offset of the sum within the group's own memory.
    at: usize,
    taken: u64,
}

impl Clock {
    fn new(context: &Rc<Context>, at: usize) -> Result<Self, KernelError> {
        let reported = Pinned::new(context, 1, "the time that exchanges between GPUs take")?;
        Ok(Self { reported, at, taken: 0 })
    }

    fn take(&mut self) -> Duration {
        let reported = self.reported.word(0).load(Ordering::Relaxed);
        let before = std::mem::replace(&mut self.taken, reported);
        Duration::from_nanos(reported.saturating_sub(before))
    }
}

impl PeerGroup {
    fn algorithm_for(&self, bytes: usize) -> AllReduceAlgorithm {
        self.thresholds.algorithm_for(bytes, self.large.is_some())
    }

    /// Forgets the time of exchanges so far; waits for the stream.
    fn reset_clock(&mut self, device: &Device) -> Result<(), KernelError> {
        self.report_time(device)?;
        device.stream.synchronize()?;
        self.clock.take();
        Ok(())
    }

    /// Description for people.
    pub(super) fn describe(&self) -> String {
        let Thresholds { one_shot, two_shot } = self.thresholds;
        let (one_shot, two_shot) = (one_shot >> 10, two_shot >> 10);
        let rest = match &self.large {
            Some(large) => format!("two-shot up to {two_shot} KiB, {} above", large.algorithm(0)),
            None => "two-shot above".to_owned(),
        };
        format!("GPUs see each other's memory: one-shot up to {one_shot} KiB, {rest}")
    }

    /// Sums with one of the two kernels, whatever the size.
    fn sum(
        &self,
        device: &Device,
        two_shot: bool,
        data: DevicePtr,
        count: usize,
    ) -> Result<(), KernelError> {
        let call = launch::peer_sum(self.table.ptr(), data, count, two_shot);
        // SAFETY: the table and the memory it refers to live until the group is dropped, which only
        // happens once the stream is idle; the callers vouch for `data`.
        unsafe { device.launch(call) }
    }
}

impl DeviceGroup for PeerGroup {
    fn all_reduce_sum(
        &mut self,
        device: &Device,
        data: DevicePtr,
        count: usize,
        element: Element,
    ) -> Result<(), KernelError> {
        match (self.algorithm_for(count * 4), &mut self.large, element) {
            (AllReduceAlgorithm::Large, Some(large), _) => {
                large.all_reduce_sum(device, data, count, element)
            }
            (how, _, Element::F32) => {
                self.sum(device, how != AllReduceAlgorithm::OneShot, data, count)
            }
            (.., Element::Bf16) => {
                let message = "own kernels sum f32 only".to_owned();
                Err(KernelError::Shape { op: "all_reduce", message })
            }
        }
    }

    fn sums_in_bf16(&self, bytes: usize) -> bool {
        match (self.algorithm_for(bytes), &self.large) {
            (AllReduceAlgorithm::Large, Some(large)) => large.sums_in_bf16(bytes),
            _ => false,
        }
    }

    fn all_gather(
        &mut self,
        device: &Device,
        local: DevicePtr,
        all: DevicePtr,
        bytes: usize,
    ) -> Result<(), KernelError> {
        if let (AllReduceAlgorithm::Large, Some(large)) =
            (self.algorithm_for(bytes), &mut self.large)
        {
            return large.all_gather(device, local, all, bytes);
        }
        let call = launch::peer_gather(self.table.ptr(), local, all, bytes / 4);
        // SAFETY: as in `sum`.
        unsafe { device.launch(call) }
    }

    fn all_reduce_add_rmsnorm(
        &mut self,
        device: &Device,
        io: &FusedNorm,
    ) -> Result<bool, KernelError> {
        let fits = io.width.is_multiple_of(4) && io.width <= PEER_SLOT;
        if !fits || self.algorithm_for(io.rows * io.width * 4) != AllReduceAlgorithm::OneShot {
            return Ok(false);
        }
        let call = launch::peer_sum_add_rmsnorm(self.table.ptr(), io);
        // SAFETY: as in `sum`; the callers have checked the shapes.
        unsafe { device.launch(call) }?;
        Ok(true)
    }

    fn begin_timing(&mut self, _graphs: bool) -> bool {
        if let Some(large) = &mut self.large {
            // Of large messages those within graphs are left out: most are not, and those of most
            // steps are small, for which the kernels of this group keep the time.
            large.begin_timing(false);
        }
        true
    }

    fn report_time(&mut self, device: &Device) -> Result<(), KernelError> {
        let Some(own) = &self.own else { return Ok(()) };
        let Clock { reported, at, .. } = &mut self.clock;
        own.download_pinned(&device.stream, *at, reported, 1)
    }

    fn take_time(&mut self) -> Duration {
        let large = self.large.as_mut().map_or(Duration::ZERO, |large| large.take_time());
        self.clock.take() + large
    }

    fn poll(&mut self) -> Result<(), CollectiveError> {
        self.words.outcome(self.timeout)?;
        self.large.as_mut().map_or(Ok(()), |large| large.poll())
    }

    fn is_capturable(&self) -> bool {
        self.large.as_ref().is_none_or(|large| large.is_capturable())
    }

    fn sums_in_order(&self, bytes: usize) -> bool {
        match (self.algorithm_for(bytes), &self.large) {
            (AllReduceAlgorithm::Large, Some(large)) => large.sums_in_order(bytes),
            _ => true,
        }
    }

    fn algorithm(&self, bytes: usize) -> &'static str {
        match (self.algorithm_for(bytes), &self.large) {
            (AllReduceAlgorithm::Large, Some(large)) => large.algorithm(bytes),
            (AllReduceAlgorithm::OneShot, _) => "one_shot",
            _ => "two_shot",
        }
    }

    fn abort_handle(&self) -> Arc<dyn AbortHandle> {
        self.abort.clone()
    }

    fn end(&mut self) -> Result<GroupEnd, String> {
        self.large.as_mut().map_or(Ok(GroupEnd::Released), |large| large.end())
    }
}

impl Drop for PeerGroup {
    fn drop(&mut self) {
        self.mapped.clear();
        self.words.close();
        let Some(own) = self.own.take() else { return };
        if self.shares_process {
            // Nothing tells when the other ranks of this process no longer use it, so it is leaked;
            // only tests have several.
            let _kept = ManuallyDrop::new(own);
        } else {
            self.retired.retire(own, &self.processes);
        }
    }
}
