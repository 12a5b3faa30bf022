//! Ranks that are processes of one host: a POSIX shared memory object.
//!
//! Rank 0 creates the object, the others open it. Its name is removed as soon as all ranks have
//! mapped it, so that nothing is left behind, no matter how the processes end.
#![allow(unsafe_code, reason = "shared memory objects of the operating system")]
use std::ffi::CString;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Collective;
use super::exchange::Exchange;
use super::region::{MAGIC, RANKS_MAX, Region, RegionMemory, header, region_bytes};
use crate::error::CollectiveError;

/// Options of a connection.
#[derive(Clone, Debug)]
pub struct SharedMemoryOptions {
    /// The object's name: letters, digits, `-` and `_`; unique to this group.
    pub name: String,
    /// This rank.
    pub rank: u32,
    /// Number of ranks, 1 to 64.
    pub world_size: u32,
    /// Deadline for connecting, and for each round of an operation.
    pub timeout: Duration,
}

#[derive(Debug)]
struct Mapping {
    base: *mut u8,
    len: usize,
}

// SAFETY: all access goes through the region's protocol.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

// SAFETY: the mapping is page aligned, has a region's size and lives as long as this value.
unsafe impl RegionMemory for Mapping {
    fn base(&self) -> *mut u8 {
        self.base
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped with this length, and unmapped once.
        unsafe {
            libc::munmap(self.base.cast(), self.len);
        }
    }
}

/// Removes the object's name when set-up ends, in success or failure.
struct Unlink<'a>(&'a CString);

impl Drop for Unlink<'_> {
    fn drop(&mut self) {
        // SAFETY: the name is a C string.
        unsafe {
            libc::shm_unlink(self.0.as_ptr());
        }
    }
}

/// Bytes of shared memory for a group of `ranks` ranks.
#[must_use]
pub const fn shared_memory_bytes(ranks: usize) -> usize {
    region_bytes(ranks)
}

/// Connects this process as one rank. Returns when all ranks are connected, or soon after
/// `is_given_up` returns true.
///
/// # Errors
/// [`CollectiveError::Setup`] naming the problem, also if other ranks do not arrive in time;
/// [`CollectiveError::Aborted`].
pub fn shared_memory(
    options: &SharedMemoryOptions,
    is_given_up: &dyn Fn() -> bool,
) -> Result<Box<dyn Collective>, CollectiveError> {
    let setup = |message: String| CollectiveError::Setup(message);
    let SharedMemoryOptions { name, rank, world_size, timeout } = options;
    let (rank, ranks) = (*rank as usize, *world_size as usize);
    if ranks == 0 || ranks > RANKS_MAX || rank >= ranks {
        return Err(setup(format!("rank {rank} of {ranks}; there may be 1 to {RANKS_MAX} ranks")));
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if name.is_empty() || name.len() > 200 || !name.chars().all(plain) {
        return Err(setup(format!("the name {name:?} must be letters, digits, - and _")));
    }
    let c_name = CString::new(format!("/{name}")).map_err(|error| setup(error.to_string()))?;
    let began = Instant::now();
    let check = || if is_given_up() { Err(CollectiveError::Aborted) } else { Ok(()) };
    let len = region_bytes(ranks);
    let (memory, unlink) = if rank == 0 {
        let created =
            create(&c_name, len).map_err(|e| setup(format!("cannot create {name}: {e}")))?;
        header(&created).magic.store(MAGIC, Ordering::Release);
        (created, Some(Unlink(&c_name)))
    } else {
        let opened = loop {
            match open(&c_name, len) {
                Ok(Some(mapping)) => break mapping,
                Ok(None) if began.elapsed() < *timeout => {
                    check()?;
                    std::thread::sleep(Duration::from_micros(200));
                }
                Ok(None) => {
                    return Err(setup(format!("rank 0 did not create {name} within {timeout:?}")));
                }
                Err(error) => return Err(setup(format!("cannot open {name}: {error}"))),
            }
        };
        (opened, None)
    };
    let memory = Arc::new(memory);
    let head = header(&*memory);
    while head.magic.load(Ordering::Acquire) != MAGIC {
        if began.elapsed() >= *timeout {
            return Err(setup(format!("rank 0 did not set up {name} within {timeout:?}")));
        }
        check()?;
        std::thread::sleep(Duration::from_micros(50));
    }
    let region = Region::new(memory.clone(), rank, ranks, *timeout);
    region.announce(std::process::id());
    head.attached.fetch_add(1, Ordering::AcqRel);
    while (head.attached.load(Ordering::Acquire) as usize) < ranks {
        if began.elapsed() >= *timeout {
            let came = head.attached.load(Ordering::Acquire);
            return Err(setup(format!("{came} of {ranks} ranks opened {name} within {timeout:?}")));
        }
        check()?;
        std::thread::sleep(Duration::from_micros(100));
    }
    drop(unlink);
    Ok(Box::new(Exchange::new(region)))
}

fn create(name: &CString, len: usize) -> io::Result<Mapping> {
    let flags = libc::O_CREAT | libc::O_EXCL | libc::O_RDWR;
    // SAFETY: the name is a C string.
    let fd = unsafe { libc::shm_open(name.as_ptr(), flags, 0o600) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    let mapping = reserve(fd, len).and_then(|()| map(fd, len));
    close(fd);
    if mapping.is_err() {
        drop(Unlink(name));
    }
    mapping
}

/// Allocates the object's memory. Setting only its size would not guarantee that there is memory,
/// and writing to it could then kill the process.
fn reserve(fd: libc::c_int, len: usize) -> io::Result<()> {
    loop {
        // SAFETY: the descriptor is ours.
        match unsafe { libc::posix_fallocate(fd, 0, len as libc::off_t) } {
            0 => return Ok(()),
            libc::EINTR => {}
            libc::ENOSPC => {
                let message = format!("/dev/shm has no room for {len} bytes");
                return Err(io::Error::new(io::ErrorKind::StorageFull, message));
            }
            code => return Err(io::Error::from_raw_os_error(code)),
        }
    }
}

/// Opens the object; `None` while it does not exist or does not have its size yet.
fn open(name: &CString, len: usize) -> io::Result<Option<Mapping>> {
    // SAFETY: the name is a C string.
    let fd = unsafe { libc::shm_open(name.as_ptr(), libc::O_RDWR, 0) };
    if fd < 0 {
        let error = io::Error::last_os_error();
        return if error.kind() == io::ErrorKind::NotFound { Ok(None) } else { Err(error) };
    }
    // SAFETY: all zeroes are a value of this plain struct.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is ours, `stat` is writable.
    let known = unsafe { libc::fstat(fd, &raw mut stat) };
    let mapping = if known == 0 && stat.st_size as usize == len {
        map(fd, len).map(Some)
    } else if known == 0 {
        Ok(None)
    } else {
        Err(io::Error::last_os_error())
    };
    close(fd);
    mapping
}

fn map(fd: libc::c_int, len: usize) -> io::Result<Mapping> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping of an object of this size; nothing else is touched.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), len, access, libc::MAP_SHARED, fd, 0) };
    if base == libc::MAP_FAILED {
        Err(io::Error::last_os_error())
    } else {
        Ok(Mapping { base: base.cast(), len })
    }
}

fn close(fd: libc::c_int) {
    // SAFETY: the descriptor is ours and used no more; the mapping outlives it.
    unsafe {
        libc::close(fd);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_not_there_is_an_error_and_leaves_no_name() {
        let name = CString::new(format!("/tutti-full-{}", std::process::id())).unwrap();
        // More than any host has.
        let error = create(&name, 1 << 50).map(|_| ()).unwrap_err().to_string();
        assert_eq!(error, "/dev/shm has no room for 1125899906842624 bytes");
        assert!(open(&name, 1 << 50).unwrap().is_none());
    }
}
