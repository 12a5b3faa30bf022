//! Files mapped into memory, read only.
#![allow(unsafe_code, reason = "mapping a file is unsafe: someone may change it meanwhile")]
use std::fs::File;
use std::io;
use std::path::Path;

use memmap2::Mmap;

/// A file's bytes, mapped: only what is touched is read, and it can be dropped by the system again.
#[derive(Debug)]
pub struct MappedFile {
    map: Mmap,
}

impl MappedFile {
    /// Maps a file.
    ///
    /// # Errors
    /// When it cannot be opened or mapped.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        // SAFETY: the map is read only and private to this process. A model file that is changed
        // or truncated while it is mapped is outside of what can be checked; operations.md tells
        // operators to replace model folders, not to write into them.
        let map = unsafe { Mmap::map(&file)? };
        Ok(Self { map })
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }
}
