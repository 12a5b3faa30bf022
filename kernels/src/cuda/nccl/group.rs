//! Ranks that exchange data through NCCL: the backend's interface.
use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::communicator::{ALGORITHM, Communicator, unique_id};
use super::library::{FLOAT32, INT8, Nccl, SUM, UNIQUE_ID_BYTES, load};
use crate::collective::AbortHandle;
use crate::cuda::connect::GroupSetup;
use crate::cuda::context::Context;
use crate::cuda::device::Device;
use crate::cuda::group::DeviceGroup;
use crate::cuda::memory::DevicePtr;
use crate::error::{CollectiveError, KernelError};

/// A rank of an NCCL communicator.
#[derive(Debug)]
pub(in crate::cuda) struct NcclGroup {
    communicator: Communicator,
    timeout: Duration,
}

impl NcclGroup {
    /// Connects this rank with all others within `patience`; rank 0 creates the id that the others
    /// connect with.
    pub(in crate::cuda) fn connect(
        context: &Context,
        (folders, file): (&[PathBuf], Option<&Path>),
        (rank, ranks): (u32, u32),
        setup: &mut GroupSetup<'_>,
        patience: Duration,
    ) -> Result<Self, KernelError> {
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
            communicator.end().map_err(|reason| context.hangs(reason))?;
            return Err(error.into());
        }
        Ok(Self { communicator, timeout: setup.timeout })
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
    ) -> Result<(), KernelError> {
        let stream = device.stream.raw();
        let called = self.communicator.call("all_reduce", self.timeout, |nccl, comm| {
            // SAFETY: the callers have `count` floats there, alive until the stream is past the
            // call; the communicator is alive, and its GPU is this thread's.
            unsafe { (nccl.all_reduce)(at(data), at(data), count, FLOAT32, SUM, comm, stream) }
        });
        called.map_err(Into::into)
    }

    fn all_gather(
        &mut self,
        device: &Device,
        local: DevicePtr,
        all: DevicePtr,
        bytes: usize,
    ) -> Result<(), KernelError> {
        let stream = device.stream.raw();
        let called = self.communicator.call("all_gather", self.timeout, |nccl, comm| {
            // SAFETY: as above: `bytes` at `local`, and as many per rank at `all`.
            unsafe { (nccl.all_gather)(at(local), at(all), bytes, INT8, comm, stream) }
        });
        called.map_err(Into::into)
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

    fn end(&mut self) -> Result<(), String> {
        self.communicator.end()
    }
}
