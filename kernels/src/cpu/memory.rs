//! Memory of the CPU backend: aligned zeroed vectors, scratch memory that grows and can be
//! freed, and slices that several tasks write at disjoint places. Knows nothing of their contents.
use std::alloc::{Layout, alloc, dealloc};
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::error::KernelError;

/// One cache line, and one 512-bit vector.
const ALIGNMENT: usize = 64;
/// Allocations of at least this size are aligned to it, and request huge pages.
const HUGE_PAGE: usize = 2 << 20;

/// Types for which all-zero bytes are a valid value and that need no drop.
///
/// # Safety
/// Implementors must be valid when all bytes are zero.
pub(crate) unsafe trait Zeroable: Copy + 'static {}
// SAFETY: zero is a value of it.
unsafe impl Zeroable for f32 {}
// SAFETY: zero is a value of it.
unsafe impl Zeroable for u32 {}
// SAFETY: zero is a value of it.
unsafe impl Zeroable for i8 {}
// SAFETY: zero is a value of it.
unsafe impl Zeroable for u8 {}
// SAFETY: zero is a value of it.
unsafe impl Zeroable for u16 {}

/// A vector of fixed length, aligned for vector instructions.
pub(crate) struct AlignedVec<T: Zeroable> {
    data: NonNull<T>,
    len: usize,
    layout: Layout,
}

// SAFETY: owns its memory like `Vec<T>`, and `T` is plain data.
unsafe impl<T: Zeroable + Send> Send for AlignedVec<T> {}
// SAFETY: as above; shared access only reads.
unsafe impl<T: Zeroable + Sync> Sync for AlignedVec<T> {}

impl<T: Zeroable> AlignedVec<T> {
    /// `len` zeros; `what` names them in errors. Touches the memory, so that it is resident when a
    /// step needs it.
    pub(crate) fn zeroed(len: usize, what: &'static str) -> Result<Self, KernelError> {
        let out_of_memory = || KernelError::OutOfMemory {
            what,
            bytes: (len as u64).saturating_mul(size_of::<T>() as u64),
        };
        let bytes = len.max(1).checked_mul(size_of::<T>()).ok_or_else(out_of_memory)?;
        let align = if bytes >= HUGE_PAGE { HUGE_PAGE } else { ALIGNMENT };
        let layout = Layout::from_size_align(bytes, align).map_err(|_| out_of_memory())?;
        // SAFETY: the layout's size is not zero.
        let raw = unsafe { alloc(layout) };
        let data = NonNull::new(raw.cast::<T>()).ok_or_else(out_of_memory)?;
        #[cfg(target_os = "linux")]
        if align == HUGE_PAGE {
            // Fewer TLB misses when weights are streamed; a refusal changes nothing.
            // SAFETY: the range is the allocation just made.
            unsafe { libc::madvise(raw.cast(), bytes, libc::MADV_HUGEPAGE) };
        }
        // SAFETY: the allocation has `bytes` bytes.
        unsafe { raw.write_bytes(0, bytes) };
        Ok(Self { data, len, layout })
    }
}

impl<T: Zeroable> Deref for AlignedVec<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `len` initialized elements were allocated; they live as long as `self`.
        unsafe { std::slice::from_raw_parts(self.data.as_ptr(), self.len) }
    }
}

impl<T: Zeroable> DerefMut for AlignedVec<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr(), self.len) }
    }
}

impl<T: Zeroable> Drop for AlignedVec<T> {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this layout.
        unsafe { dealloc(self.data.as_ptr().cast(), self.layout) };
    }
}

impl<T: Zeroable> fmt::Debug for AlignedVec<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AlignedVec(len {})", self.len)
    }
}

/// Scratch memory that is reused from call to call and grows when a call needs more than any
/// before.
#[derive(Debug)]
pub(crate) struct Scratch<T: Zeroable> {
    room: AlignedVec<T>,
    what: &'static str,
}

impl<T: Zeroable> Scratch<T> {
    pub(crate) fn new(what: &'static str) -> Result<Self, KernelError> {
        Ok(Self { room: AlignedVec::zeroed(0, what)?, what })
    }

    /// `len` elements with arbitrary contents.
    pub(crate) fn get(&mut self, len: usize) -> Result<&mut [T], KernelError> {
        if len > self.room.len() {
            // There may not be enough memory for both.
            self.free()?;
            // Grows by half: a context that grows token by token then rarely reallocates.
            self.room = AlignedVec::zeroed(len.saturating_add(len / 2), self.what)?;
        }
        Ok(&mut self.room[..len])
    }

    /// Frees the memory.
    pub(crate) fn free(&mut self) -> Result<(), KernelError> {
        self.room = AlignedVec::zeroed(0, self.what)?;
        Ok(())
    }

    /// As [`get`](Self::get), for a `len` that an earlier `get` has made room for.
    pub(crate) fn reserved(&mut self, len: usize) -> &mut [T] {
        &mut self.room[..len]
    }
}

/// A slice that tasks on several threads write at disjoint places.
pub(crate) struct Disjoint<'a, T> {
    data: *mut T,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: hands out elements only through `slice`, whose callers keep ranges disjoint from all
// others, and `read`, whose callers keep them disjoint from those that are written.
unsafe impl<T: Send + Sync> Send for Disjoint<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { data: slice.as_mut_ptr(), len: slice.len(), borrow: PhantomData }
    }

    /// A copy for another user, who must keep the same promise.
    pub(crate) fn again(&self) -> Self {
        Self { data: self.data, len: self.len, borrow: PhantomData }
    }

    /// The elements `start..start + len`, which several may read.
    ///
    /// # Safety
    /// While the returned slice lives, nobody writes what overlaps it.
    #[inline(always)]
    pub(crate) unsafe fn read(&self, start: usize, len: usize) -> &[T] {
        assert!(start <= self.len && len <= self.len - start, "a task left its slice");
        // SAFETY: in bounds (just checked); not written (the caller's promise).
        unsafe { std::slice::from_raw_parts(self.data.wrapping_add(start), len) }
    }

    /// The elements `start..start + len`.
    ///
    /// # Safety
    /// While the returned slice lives, no other slice obtained from `self`, or from its copies
    /// ([`Disjoint::again`]), may overlap it, whether to be written or read.
    #[allow(clippy::mut_from_ref, reason = "the caller keeps the ranges disjoint")]
    pub(crate) unsafe fn slice(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start <= self.len && len <= self.len - start, "a task left its slice");
        // SAFETY: in bounds (just checked); not aliased (the caller's promise).
        unsafe { std::slice::from_raw_parts_mut(self.data.wrapping_add(start), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alignment_and_zeros() {
        for len in [0, 1, 33, HUGE_PAGE / 4 + 5] {
            let vec = AlignedVec::<f32>::zeroed(len, "test").unwrap();
            assert_eq!(vec.len(), len);
            assert_eq!(vec.as_ptr() as usize % ALIGNMENT, 0);
            assert!(vec.iter().all(|x| x.to_bits() == 0));
        }
    }

    #[test]
    fn scratch_grows_and_can_be_freed() {
        let mut scratch = Scratch::<f32>::new("test").unwrap();
        assert_eq!(scratch.get(100).unwrap().len(), 100);
        assert_eq!((scratch.room.len(), scratch.get(120).unwrap().len()), (150, 120));
        assert!(scratch.get(usize::MAX / 2).is_err());
        assert_eq!(scratch.get(7).unwrap().len(), 7, "after an error, too");
        scratch.free().unwrap();
        assert_eq!(scratch.room.len(), 0);
    }

    #[test]
    fn too_much_is_an_error() {
        assert!(matches!(
            AlignedVec::<f32>::zeroed(usize::MAX / 2, "test"),
            Err(KernelError::OutOfMemory { .. })
        ));
    }
}
