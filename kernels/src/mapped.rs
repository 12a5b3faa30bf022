//! Files mapped into memory, read only.
#![allow(unsafe_code, reason = "mapping a file is unsafe: someone may change it meanwhile")]
use std::fs::File;
use std::io;
use std::path::Path;

use memmap2::Mmap;

/// A file's bytes, mapped: only what is touched is read, and it can be dropped by the system again.
#[derive(Debug)]
pub struct MappedFile {
    file: File,
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
        // or truncated while it is mapped is outside of what can be checked for good; security.md
        // tells operators to replace model folders, not to write into them, and `len_now` finds
        // most of those that were cut.
        let map = unsafe { Mmap::map(&file)? };
        Ok(Self { file, map })
    }

    /// Its bytes. Reading some that the file does not have any more ends the process (SIGBUS): ask
    /// [`Self::len_now`] before, which leaves only what is cut while they are read.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// How many bytes the file has at present.
    ///
    /// # Errors
    /// When it cannot be asked.
    pub fn len_now(&self) -> io::Result<u64> {
        self.file.metadata().map(|metadata| metadata.len())
    }
}
