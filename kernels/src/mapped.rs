//! Read-only memory-mapped files.
#![allow(unsafe_code, reason = "mapping a file is unsafe: someone may change it meanwhile")]
use std::fs::File;
use std::io;
use std::path::Path;

use memmap2::Mmap;

/// A memory-mapped file: only the pages touched are read, and the system can evict them again.
#[derive(Debug)]
pub struct MappedFile {
    file: File,
    map: Mmap,
}

impl MappedFile {
    /// Maps a file.
    ///
    /// # Errors
    /// If it cannot be opened or mapped.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        // SAFETY: the map is read only and private to this process. Nothing can rule out for good
        // that a model file is changed or truncated while it is mapped; security.md tells operators
        // to replace model folders instead of writing into them, and `len_now` detects most
        // truncated files.
        let map = unsafe { Mmap::map(&file)? };
        Ok(Self { file, map })
    }

    /// The file's bytes. Reading beyond the end of a file that has been truncated kills the process
    /// (SIGBUS). Call [`Self::len_now`] first; this leaves only truncation during the read.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Current length of the file in bytes.
    ///
    /// # Errors
    /// If the metadata cannot be read.
    pub fn len_now(&self) -> io::Result<u64> {
        self.file.metadata().map(|metadata| metadata.len())
    }
}
