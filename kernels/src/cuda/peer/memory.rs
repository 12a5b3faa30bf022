//! GPU memory shared with other processes, and two words of host memory that kernels and all
//! threads see.
use std::ffi::c_char;
use std::fmt;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::collective::AbortHandle;
use crate::cuda::calls::driver as sys;
use crate::cuda::context::{Context, check};
use crate::cuda::memory::{DeviceMemory, DevicePtr, Pinned};
use crate::error::{CollectiveError, KernelError};

/// Size of a handle in bytes.
pub(super) const HANDLE_BYTES: usize = 64;

/// Returns the handle that another process opens the memory with.
pub(super) fn handle_of(memory: &DeviceMemory) -> Result<[u8; HANDLE_BYTES], KernelError> {
    let mut handle = sys::CUipcMemHandle { reserved: [0; HANDLE_BYTES] };
    // SAFETY: the address is that of an allocation; writes the handle.
    let status = unsafe { sys::cuIpcGetMemHandle(&raw mut handle, memory.ptr().0) };
    check(status, "give GPU memory to another process")?;
    Ok(handle.reserved.map(|byte| byte as u8))
}

/// Another process's memory, mapped here.
pub(super) struct Mapped {
    ptr: DevicePtr,
    context: Rc<Context>,
}

impl Mapped {
    /// Opens the memory; the other process keeps it until this one has closed it.
    ///
    /// # Errors
    /// [`KernelError`], such as when the GPUs cannot access each other.
    pub(super) fn open(
        context: &Rc<Context>,
        handle: &[u8; HANDLE_BYTES],
    ) -> Result<Self, KernelError> {
        let handle = sys::CUipcMemHandle { reserved: handle.map(|byte| byte as c_char) };
        let flags =
            sys::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as std::ffi::c_uint;
        let mut ptr = 0;
        // SAFETY: a context is current; the handle comes from `handle_of` of another process;
        // closed when `Self` is dropped.
        let status = unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut ptr, handle, flags) };
        check(status, "open another rank's GPU memory")?;
        Ok(Self { ptr: DevicePtr(ptr), context: context.clone() })
    }

    pub(super) fn ptr(&self) -> DevicePtr {
        self.ptr
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if !self.context.is_usable() {
            return;
        }
        // SAFETY: opened in `open`; nothing on the stream uses it any more.
        let _ = unsafe { sys::cuIpcCloseMemHandle(self.ptr.0) };
    }
}

impl fmt::Debug for Mapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mapped({:#x})", self.ptr.0)
    }
}

/// Checks that this process's GPU can access the memory of another.
///
/// # Errors
/// [`KernelError::Unsupported`] with the reason.
pub(super) fn check_access(
    context: &Context,
    rank: usize,
    uuid: &[u8; 16],
) -> Result<(), KernelError> {
    let own = context.info();
    if own.uuid_bytes == *uuid {
        return Ok(());
    }
    let driver = context.driver();
    for ordinal in 0..driver.count()? {
        if driver.device(ordinal)?.uuid_bytes == *uuid {
            return match driver.can_access(own.ordinal, ordinal)? {
                true => Ok(()),
                false => Err(KernelError::Unsupported(format!(
                    "GPU {} cannot reach the memory of rank {rank}'s GPU",
                    own.ordinal
                ))),
            };
        }
    }
    Err(KernelError::Unsupported(format!("rank {rank}'s GPU is not visible to this process")))
}

/// The word with which the host ends all waits, and the word in which kernels report failures. Any
/// thread can use them, even after the group is gone.
pub(super) struct SignalWords(Mutex<Option<Shared>>);

struct Shared(Pinned<u32>);
// SAFETY: the memory is the host's own; it is only used through atomic operations under a lock, and
// freed by the thread that owns the context (`SignalWords::close`).
unsafe impl Send for Shared {}

const ABORT: usize = 0;
const OUTCOME: usize = 1;
/// As in `kernels.h`; the lower 8 bits are the rank that was waited for.
const ABORTED: u32 = 0x100;

impl SignalWords {
    pub(super) fn new(context: &Rc<Context>) -> Result<Self, KernelError> {
        let words = Pinned::new(context, 2, "the words that ranks are ended by")?;
        Ok(Self(Mutex::new(Some(Shared(words)))))
    }

    fn with<T>(&self, call: impl FnOnce(&Pinned<u32>) -> T) -> Option<T> {
        let words = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        words.as_ref().map(|words| call(&words.0))
    }

    /// Their addresses for kernels.
    pub(super) fn places(&self) -> (DevicePtr, DevicePtr) {
        let at = |index: usize| self.with(|words| words.device_ptr(index)).unwrap_or_default();
        (at(ABORT), at(OUTCOME))
    }

    /// Result reported by the kernels.
    pub(super) fn outcome(&self, timeout: Duration) -> Result<(), CollectiveError> {
        let word = |index| self.with(|words| words.word(index).load(Ordering::Acquire));
        match word(OUTCOME) {
            Some(0) if word(ABORT) == Some(0) => Ok(()),
            Some(outcome) if outcome != 0 && outcome & ABORTED == 0 => {
                Err(CollectiveError::TimedOut {
                    op: "exchange between GPUs",
                    waited: timeout,
                    rank: outcome & 0xff,
                })
            }
            _ => Err(CollectiveError::Aborted),
        }
    }

    /// Frees the words; nothing on the stream may use them any more.
    pub(super) fn close(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

impl AbortHandle for SignalWords {
    fn abort(&self) {
        self.with(|words| words.word(ABORT).store(1, Ordering::Release));
    }
}

impl fmt::Debug for SignalWords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Words")
    }
}
