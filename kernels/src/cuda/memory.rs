//! Memory on the GPU and pinned memory on the host, and copies between them on a stream.
//!
//! Device memory comes from `cuMemAlloc` instead of a pool: its addresses are stable (graphs keep
//! them) and can be shared with other processes.
use std::fmt;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use super::calls::driver as sys;
use super::context::{Context, check, check_bytes};
use super::stream::Stream;
use crate::error::KernelError;

/// Kernels read 16 bytes at a time; `cuMemAlloc` aligns to 256.
pub(crate) const ALIGNMENT: usize = 16;

/// An address on the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// The address `bytes` further on.
    #[must_use]
    pub fn offset(self, bytes: usize) -> Self {
        Self(self.0.wrapping_add(bytes as u64))
    }
}

/// Memory on the GPU.
pub struct DeviceMemory {
    ptr: DevicePtr,
    bytes: usize,
    /// Kept alive longer than the memory.
    context: Rc<Context>,
}

impl DeviceMemory {
    /// Allocates at least `bytes` bytes with undefined contents.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`] naming `what`.
    pub fn new(
        context: &Rc<Context>,
        bytes: usize,
        what: &'static str,
    ) -> Result<Self, KernelError> {
        let mut ptr = 0;
        // SAFETY: a context is current; freed when `Self` is dropped.
        let status = unsafe { sys::cuMemAlloc_v2(&raw mut ptr, bytes.max(ALIGNMENT)) };
        check_bytes(status, what, bytes as u64)?;
        Ok(Self { ptr: DevicePtr(ptr), bytes, context: context.clone() })
    }

    /// As [`DeviceMemory::new`], zeroed in stream order.
    ///
    /// # Errors
    /// As [`DeviceMemory::new`].
    pub fn zeroed(
        context: &Rc<Context>,
        stream: &Stream,
        bytes: usize,
        what: &'static str,
    ) -> Result<Self, KernelError> {
        let memory = Self::new(context, bytes, what)?;
        memory.fill(stream, 0)?;
        Ok(memory)
    }

    /// Address of the memory.
    #[must_use]
    pub fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    /// Size of the memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Sets every byte, in stream order.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    pub fn fill(&self, stream: &Stream, byte: u8) -> Result<(), KernelError> {
        if self.bytes == 0 {
            // The driver does not document what it does with an empty range.
            return Ok(());
        }
        // SAFETY: the range is this allocation.
        let status = unsafe { sys::cuMemsetD8Async(self.ptr.0, byte, self.bytes, stream.raw()) };
        check(status, "fill GPU memory")
    }

    fn covers(&self, at: usize, bytes: usize, op: &'static str) -> Result<(), KernelError> {
        if at.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            let message = format!("{bytes} bytes at {at} of {}", self.bytes);
            return Err(KernelError::Shape { op, message });
        }
        Ok(())
    }

    /// Copies pinned memory here, in stream order; `from` must not be written until the stream has
    /// passed the copy.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if it does not fit, [`KernelError::Device`].
    pub fn upload_pinned<T: Plain>(
        &self,
        stream: &Stream,
        at: usize,
        from: &Pinned<T>,
        count: usize,
    ) -> Result<(), KernelError> {
        let source = &from.as_slice()[..count.min(from.len)];
        self.upload_from(stream, at, source)
    }

    /// Copies the first `bytes` of `from` here, in stream order.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if they do not fit, [`KernelError::Device`].
    pub fn copy_from(&self, stream: &Stream, from: &Self, bytes: usize) -> Result<(), KernelError> {
        self.covers(0, bytes, "copy")?;
        from.covers(0, bytes, "copy")?;
        // SAFETY: both ranges were checked.
        let status =
            unsafe { sys::cuMemcpyDtoDAsync_v2(self.ptr.0, from.ptr.0, bytes, stream.raw()) };
        check(status, "copy on the GPU")
    }

    /// Copies `bytes` from byte `from` to byte `to`, which do not overlap, in stream order.
    ///
    /// # Errors
    /// As [`DeviceMemory::copy_from`].
    pub fn copy_within(
        &self,
        stream: &Stream,
        from: usize,
        to: usize,
        bytes: usize,
    ) -> Result<(), KernelError> {
        self.covers(from, bytes, "copy")?;
        self.covers(to, bytes, "copy")?;
        let (from, to) = (self.ptr.offset(from), self.ptr.offset(to));
        // SAFETY: both ranges were checked.
        let status = unsafe { sys::cuMemcpyDtoDAsync_v2(to.0, from.0, bytes, stream.raw()) };
        check(status, "copy on the GPU")
    }

    /// Copies host memory here and waits until it has been read.
    ///
    /// # Errors
    /// As [`DeviceMemory::upload_pinned`].
    pub fn upload<T: Plain>(
        &self,
        stream: &Stream,
        at: usize,
        from: &[T],
    ) -> Result<(), KernelError> {
        self.upload_from(stream, at, from)?;
        stream.synchronize()
    }

    fn upload_from<T: Plain>(
        &self,
        stream: &Stream,
        at: usize,
        from: &[T],
    ) -> Result<(), KernelError> {
        let bytes = size_of_val(from);
        self.covers(at, bytes, "upload")?;
        if bytes == 0 {
            return Ok(());
        }
        let (to, from) = (self.ptr.offset(at).0, from.as_ptr().cast());
        // SAFETY: both ranges were checked; the callers keep the source until it has been read.
        let status = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from, bytes, stream.raw()) };
        check(status, "copy to the GPU")
    }

    /// Copies `count` elements from byte `at` into pinned memory, in stream order; wait for the
    /// stream before reading them.
    ///
    /// # Errors
    /// As [`DeviceMemory::upload_pinned`].
    pub fn download_pinned<T: Plain>(
        &self,
        stream: &Stream,
        at: usize,
        to: &mut Pinned<T>,
        count: usize,
    ) -> Result<(), KernelError> {
        self.download_to(stream, at, to, (0, count))
    }

    /// As [`DeviceMemory::download_pinned`], to `count` elements from `first` on.
    ///
    /// # Errors
    /// As [`DeviceMemory::upload_pinned`].
    pub fn download_to<T: Plain>(
        &self,
        stream: &Stream,
        at: usize,
        to: &mut Pinned<T>,
        (first, count): (usize, usize),
    ) -> Result<(), KernelError> {
        let bytes = count.saturating_mul(size_of::<T>());
        self.covers(at, bytes, "download")?;
        let len = to.len;
        let room = to.as_mut_slice().get_mut(first..).and_then(|room| room.get_mut(..count));
        let Some(room) = room else {
            let message = format!("{count} elements from {first} on into {len}");
            return Err(KernelError::Shape { op: "download", message });
        };
        if bytes == 0 {
            return Ok(());
        }
        let (from, to) = (self.ptr.offset(at).0, room.as_mut_ptr().cast());
        // SAFETY: both ranges were checked; whoever has the `Pinned` waits for the copy.
        let status = unsafe { sys::cuMemcpyDtoHAsync_v2(to, from, bytes, stream.raw()) };
        check(status, "copy from the GPU")
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if !self.context.is_usable() {
            return;
        }
        // SAFETY: allocated in `new`. Whoever drops it while kernels use it relies on cuMemFree to
        // wait for them, which it does implicitly for memory from cuMemAlloc.
        let _ = unsafe { sys::cuMemFree_v2(self.ptr.0) };
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceMemory({} bytes)", self.bytes)
    }
}

/// Types with the same representation on the GPU and the host: any bit pattern is a value.
///
/// # Safety
/// Implementors must have no padding and be valid for every bit pattern.
pub unsafe trait Plain: Copy + 'static {}
// SAFETY: every bit pattern is a value of it.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for u16 {}
// SAFETY: as above.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for u64 {}
// SAFETY: as above.
unsafe impl Plain for i32 {}
// SAFETY: as above.
unsafe impl Plain for f32 {}
// SAFETY: any bits, and none, are a value of it.
unsafe impl<T: Plain> Plain for MaybeUninit<T> {}

/// Host memory that the GPU copies from and to by DMA. Its owner keeps it until nothing on the GPU
/// uses it any more: NVIDIA does not document that freeing it waits, as freeing GPU memory does.
pub struct Pinned<T: Plain> {
    data: NonNull<T>,
    len: usize,
    context: Rc<Context>,
    _owns: PhantomData<T>,
}

impl<T: Plain> Pinned<T> {
    /// Allocates `len` elements, zeroed.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`] naming `what`.
    pub fn new(context: &Rc<Context>, len: usize, what: &'static str) -> Result<Self, KernelError> {
        let memory = Self::allocate(context, len, what)?;
        // SAFETY: the allocation has room for one element even where `len` is 0.
        unsafe { memory.data.as_ptr().write_bytes(0, len.max(1)) };
        Ok(memory)
    }

    fn allocate(
        context: &Rc<Context>,
        len: usize,
        what: &'static str,
    ) -> Result<Self, KernelError> {
        let bytes = len.max(1).saturating_mul(size_of::<T>());
        let mut data = std::ptr::null_mut();
        // SAFETY: a context is current; freed when `Self` is dropped.
        let status = unsafe { sys::cuMemAllocHost_v2(&raw mut data, bytes) };
        check_bytes(status, what, bytes as u64)?;
        let data = NonNull::new(data.cast::<T>())
            .ok_or(KernelError::OutOfMemory { what, bytes: bytes as u64 })?;
        Ok(Self { data, len, context: context.clone(), _owns: PhantomData })
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The contents. Undefined during a download.
    #[must_use]
    pub fn as_slice(&self) -> &[T] {
        // SAFETY: `len` elements, initialised where `T` must be, alive as long as `self`.
        unsafe { std::slice::from_raw_parts(self.data.as_ptr(), self.len) }
    }

    /// Address of an element for kernels: host and device share one address space.
    #[must_use]
    pub fn device_ptr(&self, index: usize) -> DevicePtr {
        DevicePtr(self.data.as_ptr() as u64).offset(index * size_of::<T>())
    }

    /// The contents, to be written; not while an upload from it is in flight.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as in `as_slice`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr(), self.len) }
    }
}

impl<T: Plain> Pinned<MaybeUninit<T>> {
    /// Allocates `len` elements with undefined contents, for pools that kernels write before they
    /// read: one thread would take half a minute to zero 100 GiB.
    ///
    /// # Errors
    /// As [`Pinned::new`].
    pub fn unfilled(
        context: &Rc<Context>,
        len: usize,
        what: &'static str,
    ) -> Result<Self, KernelError> {
        Self::allocate(context, len, what)
    }
}

impl Pinned<u32> {
    /// A word that kernels or other threads can use at the same time.
    #[must_use]
    pub fn word(&self, index: usize) -> &AtomicU32 {
        let at = &self.as_slice()[index];
        // SAFETY: aligned, alive as long as `self`, and in writable memory.
        unsafe { AtomicU32::from_ptr(std::ptr::from_ref(at).cast_mut()) }
    }
}

impl Pinned<u64> {
    /// A word that the GPU can write at the same time.
    #[must_use]
    pub fn word(&self, index: usize) -> &AtomicU64 {
        let at = &self.as_slice()[index];
        // SAFETY: aligned, alive as long as `self`, and in writable memory.
        unsafe { AtomicU64::from_ptr(std::ptr::from_ref(at).cast_mut()) }
    }
}

impl<T: Plain> Drop for Pinned<T> {
    fn drop(&mut self) {
        if !self.context.is_usable() {
            return;
        }
        // SAFETY: allocated in `new`; its owner has waited for whatever used it.
        let _ = unsafe { sys::cuMemFreeHost(self.data.as_ptr().cast()) };
    }
}

impl<T: Plain> fmt::Debug for Pinned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pinned({} elements)", self.len)
    }
}
