//! Read-only memory-mapped files: the safe face of `mmap` for crates that forbid `unsafe`.
use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::Path;

use memmap2::Mmap;

/// A file's bytes, paged in when they are touched. The mapping is private to this process and ends
/// with the value.
#[derive(Debug)]
pub struct MappedFile {
    map: Mmap,
}

impl MappedFile {
    /// Maps a whole file. An empty file gives an empty slice.
    ///
    /// # Errors
    /// Those of opening and mapping a file; [`io::ErrorKind::InvalidInput`] for what is not a
    /// regular file.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        // SAFETY: the bytes are only ever read, as plain `u8`, and through this value, which keeps
        // the mapping alive. What the type system cannot know is that no other process shortens or
        // rewrites the file meanwhile; model folders are written once (a download renames its file
        // into place when it is complete), which the operator's guide requires.
        #[allow(unsafe_code, reason = "mmap; the only way to read a shard of a file lazily")]
        let map = unsafe { Mmap::map(&file) }?;
        Ok(Self { map })
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}
