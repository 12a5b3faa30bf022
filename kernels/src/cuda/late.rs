//! Inputs that arrive late, for tests of kernels that begin before those before them are complete:
//! what is written to a buffer is brought there by a kernel that takes its time and lets the next
//! one begin at once. Until then the buffer holds NaN, and so does all scratch: a kernel, of the
//! operation's first or a later one, that reads what it has not waited for computes with that.
//!
//! Without this, a missing wait shows only where a kernel happens to be slower than the host.
use std::cell::{Cell, RefCell};
use std::time::Duration;

use super::backend::CudaBackend;
use super::device::Device;
use super::launch;
use super::memory::{DeviceMemory, DevicePtr, Plain};
use crate::error::KernelError;

/// Enough for the host to launch an operation's kernels meanwhile, which takes microseconds each.
const DELAY: Duration = Duration::from_micros(500);
/// NaN as bf16 and as f32.
const POISON: u8 = 0xff;

/// Data on its way.
#[derive(Debug)]
struct DelayedWrite {
    from: DeviceMemory,
    to: DevicePtr,
    words: usize,
}

/// What is to arrive late. Empty unless a test asks for it.
#[derive(Debug, Default)]
pub(super) struct DelayedWrites {
    is_on: Cell<bool>,
    pending: RefCell<Vec<DelayedWrite>>,
    /// Read by kernels that may not have ended.
    read: RefCell<Vec<DelayedWrite>>,
}

impl Device {
    /// Writes `values` to the beginning of a buffer's memory: at once, or late.
    pub(super) fn write<T: Plain>(
        &self,
        memory: &DeviceMemory,
        values: &[T],
    ) -> Result<(), KernelError> {
        if !self.late.is_on.get() {
            return memory.upload(&self.stream, 0, values);
        }
        let bytes = size_of_val(values);
        let what = "data that is to arrive late";
        let from = DeviceMemory::new(&self.context, bytes.next_multiple_of(4), what)?;
        from.upload(&self.stream, 0, values)?;
        memory.fill(&self.stream, POISON)?;
        // The kernel copies words: what is left of an odd number of bf16 values is there at once.
        let rest = bytes % 4 / size_of::<T>();
        memory.upload(&self.stream, bytes - bytes % 4, &values[values.len() - rest..])?;
        let pending = DelayedWrite { from, to: memory.ptr(), words: bytes / 4 };
        self.late.pending.borrow_mut().push(pending);
        Ok(())
    }

    /// Sends what is to arrive late on its way, in stream order.
    pub(super) fn deliver(&self) -> Result<(), KernelError> {
        if !self.late.is_on.get() {
            return Ok(());
        }
        let pending = std::mem::take(&mut *self.late.pending.borrow_mut());
        for DelayedWrite { from, to, words } in &pending {
            let call = launch::late(from.ptr(), *to, *words, DELAY);
            // SAFETY: both have as many words; `from` is kept until the stream has come so far, and
            // a buffer is by those who compute with it.
            unsafe { self.launch_now(call) }?;
        }
        self.late.read.borrow_mut().extend(pending);
        Ok(())
    }
}

impl CudaBackend {
    /// Whether what is written to buffers arrives late from now on: see the module. While it does,
    /// scratch and the buffers written to hold NaN until then.
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn set_late(&mut self, late: bool) -> Result<(), KernelError> {
        // Left behind by an operation that failed before it launched anything: where it was to
        // arrive may be freed.
        self.device.late.pending.borrow_mut().clear();
        self.device.stream.synchronize()?;
        self.device.late.read.borrow_mut().clear();
        self.device.late.is_on.set(late);
        if late { self.poison_scratch(POISON) } else { Ok(()) }
    }
}
