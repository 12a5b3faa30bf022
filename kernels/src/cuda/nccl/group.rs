//! Ranks that exchange data through NCCL: the backend's interface.
use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::communicator::{ALGORITHM, CallError, Communicator, unique_id};
use super::library::{BFLOAT16, FLOAT32, INT8, Nccl, SUM, UNIQUE_ID_BYTES, load};
use crate::collective::AbortHandle;
use crate::cuda::connect::GroupSetup;
use crate::cuda::device::Device;
use crate::cuda::group::{DeviceGroup, GroupEnd, give_up};
use crate::cuda::memory::{DeviceMemory, DevicePtr};
use crate::cuda::stopwatch::Stopwatch;
use crate::cuda::stream::{Event, pause};
use crate::cuda::tensors::Element;
use crate::error::{CollectiveError, KernelError};

/// Bytes of the messages that ranks exchange once when they connect. From 2.22 on NCCL connects
/// ranks for each of its algorithms when that is first needed, and it chooses by size: what this
/// takes of the GPU's memory has to be taken before the KV cache gets the rest, and ranks that
/// cannot connect have to learn it while they can still go another way.
const TRIED: [usize; 3] = [16 << 10, 512 << 10, TRIED_MOST];
const TRIED_MOST: usize = 8 << 20;

/// A rank of an NCCL communicator.
#[derive(Debug)]
pub(in crate::cuda) struct NcclGroup {
    communicator: Communicator,
    timeout: Duration,
    /// Measures how long exchanges take, once asked to.
    stopwatch: Option<Stopwatch>,
}

impl NcclGroup {
    /// Connects this rank with all others within `patience`, and tries that out; rank 0 creates the
    /// id that the others connect with. `falls_back`: whether ranks will agree on another way if
    /// that fails.
    pub(in crate::cuda) fn connect(
        device: &Device,
        (folders, file): (&[PathBuf], Option<&Path>),
        (rank, ranks): (u32, u32),
        setup: &mut GroupSetup<'_>,
        (patience, falls_back): (Duration, bool),
    ) -> Result<Self, KernelError> {
        let (context, deadline) = (&device.context, Instant::now() + patience);
        // Before anyone waits for this rank; freed when the stream no longer uses it.
        let data = DeviceMemory::new(context, TRIED_MOST, "a first exchange")?;
        let all = DeviceMemory::new(context, TRIED_MOST, "a first exchange")?;
        let nccl: Arc<Nccl> =
            load(folders, file).map_err(|missing| CollectiveError::Setup(missing.to_string()))?;
        let id = if rank == 0 {
            let id = unique_id(&nccl)?;
            if ranks > 1 {
                setup.relay.send(&id)?;
            }
            id
        } else {
            let bytes = setup.relay.receive(patience)?;
            let found = bytes.len();
            <[u8; UNIQUE_ID_BYTES]>::try_from(bytes).map_err(|_| {
                let message = format!("a unique id of {found} bytes, not {UNIQUE_ID_BYTES}");
                CollectiveError::Setup(message)
            })?
        };
        let mut communicator = Communicator::begin(nccl, context, id, rank, ranks)?;
        (setup.on_abort_handle)(communicator.abort_handle());
        if let Err(error) = communicator.connected(patience, setup.is_given_up) {
            communicator.end_unconnected().map_err(|reason| context.hangs(reason))?;
            return Err(error.into());
        }
        let mut group = Self { communicator, timeout: setup.timeout, stopwatch: None };
        let memory = [&data, &all];
        let tried = group.try_out(device, memory, ranks as usize, deadline, setup.is_given_up);
        if let Err(error) = tried {
            // Other ranks may be trying until the deadline, and NCCL may not release this one while
            // they do. Where ranks agree on another way, they have to be waited for in any case;
            // otherwise they are told sooner.
            if falls_back && matches!(error, KernelError::Collective(_)) {
                let rest = deadline.saturating_duration_since(Instant::now());
                group.communicator.abort_for(rest, setup.is_given_up);
            }
            give_up(Box::new(group), &device.stream)?;
            return Err(error);
        }
        group.timeout = setup.timeout;
        Ok(group)
    }

    /// Runs every collective once with messages of all sizes in [`TRIED`].
    fn try_out(
        &mut self,
        device: &Device,
        [data, all]: [&DeviceMemory; 2],
        ranks: usize,
        deadline: Instant,
        is_given_up: &dyn Fn() -> bool,
    ) -> Result<(), KernelError> {
        data.fill(&device.stream, 0)?;
        for bytes in TRIED {
            self.timeout = deadline.saturating_duration_since(Instant::now());
            for element in [Element::F32, Element::Bf16] {
                self.all_reduce_sum(device, data.ptr(), bytes / element.bytes(), element)?;
            }
            self.all_gather(device, data.ptr(), all.ptr(), bytes / ranks / 4 * 4)?;
        }
        let event = Event::new(&device.context, false)?;
        event.record(&device.stream)?;
        let began = Instant::now();
        // The context knows nothing of this group yet, so its own waits would not poll it.
        while !event.is_done()? {
            self.poll()?;
            if is_given_up() {
                return Err(CollectiveError::Aborted.into());
            }
            if Instant::now() > deadline {
                let (algorithm, waited) = (ALGORITHM, began.elapsed());
                return Err(CollectiveError::Stalled { algorithm, waited }.into());
            }
            pause(began.elapsed());
        }
        Ok(self.poll()?)
    }
}

impl NcclGroup {
    fn timed(
        &mut self,
        device: &Device,
        call: impl FnOnce(&mut Communicator, Duration) -> Result<(), CallError>,
    ) -> Result<(), KernelError> {
        let Self { communicator, timeout, stopwatch } = self;
        let call = || {
            call(communicator, *timeout).map_err(|CallError { error, is_own }| {
                if is_own {
                    device.stream.note_refusal();
                }
                KernelError::from(error)
            })
        };
        match stopwatch {
            Some(stopwatch) => stopwatch.time(device, call),
            None => call(),
        }
    }
}

fn at(ptr: DevicePtr) -> *mut c_void {
    ptr.0 as *mut c_void
}

impl DeviceGroup for NcclGroup {
    fn all_reduce_sum(
        &mut self,
        device: &Device,
        data: DevicePtr,
        count: usize,
        element: Element,
    ) -> Result<(), KernelError> {
        let stream = device.stream.raw();
        let number = match element {
            Element::F32 => FLOAT32,
            Element::Bf16 => BFLOAT16,
        };
        self.timed(device, |communicator, timeout| {
            communicator.call("all_reduce", timeout, |nccl, comm| {
                // SAFETY: the callers have `count` such numbers there, alive until the stream is
                // past the call; the communicator is alive, and its GPU is this thread's.
                unsafe { (nccl.all_reduce)(at(data), at(data), count, number, SUM, comm, stream) }
            })
        })
    }

    fn sums_in_bf16(&self, _bytes: usize) -> bool {
        true
    }

    fn all_gather(
        &mut self,
        device: &Device,
        local: DevicePtr,
        all: DevicePtr,
        bytes: usize,
    ) -> Result<(), KernelError> {
        let stream = device.stream.raw();
        self.timed(device, |communicator, timeout| {
            communicator.call("all_gather", timeout, |nccl, comm| {
                // SAFETY: as above: `bytes` at `local`, and as many per rank at `all`.
                unsafe { (nccl.all_gather)(at(local), at(all), bytes, INT8, comm, stream) }
            })
        })
    }

    fn begin_timing(&mut self, graphs: bool) -> bool {
        self.stopwatch = (!graphs).then(Stopwatch::default);
        self.stopwatch.is_some()
    }

    fn take_time(&mut self) -> Duration {
        self.stopwatch.as_mut().map_or(Duration::ZERO, Stopwatch::take)
    }

    fn poll(&mut self) -> Result<(), CollectiveError> {
        self.communicator.poll()
    }

    fn is_capturable(&self) -> bool {
        true
    }

    fn algorithm(&self, _bytes: usize) -> &'static str {
        ALGORITHM
    }

    fn abort_handle(&self) -> Arc<dyn AbortHandle> {
        self.communicator.abort_handle()
    }

    fn end(&mut self) -> Result<GroupEnd, String> {
        self.communicator.end()
    }
}
