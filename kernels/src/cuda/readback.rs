//! Reads rows of buffers to the host, through pinned memory that is reused, with a single wait for
//! all of them.
use std::ops::Range;

use super::backend::CudaBackend;
use super::device::Device;
use super::memory::Pinned;
use super::tensors::{CudaBuffer, Element};
use crate::backend::Buffer as _;
use crate::check::ensure;
use crate::error::KernelError;

/// Pinned memory that rows arrive in.
#[derive(Debug, Default)]
pub(super) struct Readback {
    pinned: Option<Pinned<u32>>,
}

impl Readback {
    /// Returns room for `words` words.
    fn get(&mut self, device: &Device, words: usize) -> Result<&mut Pinned<u32>, KernelError> {
        let kept = self.pinned.take().filter(|pinned| pinned.len() >= words);
        let pinned = match kept {
            Some(pinned) => pinned,
            None => {
                let words = words.next_power_of_two();
                Pinned::new(&device.context, words, "pinned memory to read a buffer")?
            }
        };
        Ok(self.pinned.insert(pinned))
    }
}

impl CudaBackend {
    /// Copies a buffer's rows to the host.
    pub(super) fn download(&mut self, buffer: &CudaBuffer) -> Result<Vec<f32>, KernelError> {
        let mut values = Vec::new();
        let all = 0..buffer.rows();
        self.download_rows(buffer, std::slice::from_ref(&all), &mut values)?;
        Ok(values)
    }

    /// Copies ranges of a buffer's rows to the host, one after the other. Clears and fills `out`.
    pub(super) fn download_rows(
        &mut self,
        buffer: &CudaBuffer,
        rows: &[Range<usize>],
        out: &mut Vec<f32>,
    ) -> Result<(), KernelError> {
        let len = buffer.rows();
        for rows in rows {
            ensure!("read_rows", rows.end <= len, "rows {rows:?} are read, {len} are in use");
        }
        out.clear();
        self.step.close(&self.device.stream)?;
        self.device.deliver()?;
        let (width, element) = (buffer.width(), buffer.element());
        let row_bytes = buffer.at().stride * element.bytes();
        // Rows of bf16 are padded to 16 bytes.
        let row_words = row_bytes / 4;
        let Self { readback, device, .. } = self;
        let words = rows.iter().map(Range::len).sum::<usize>() * row_words;
        let pinned = readback.get(device, words)?;
        let mut at = 0;
        for rows in rows {
            let count = rows.len() * row_words;
            let from = rows.start * row_bytes;
            buffer.memory().download_to(&device.stream, from, pinned, (at, count))?;
            at += count;
        }
        device.stream.synchronize()?;
        for row in pinned.as_slice()[..words].chunks_exact(row_words.max(1)) {
            match element {
                Element::F32 => out.extend(row[..width].iter().copied().map(f32::from_bits)),
                Element::Bf16 => {
                    // bf16 is the upper half of f32.
                    let both = |word: &u32| [word << 16, word & 0xffff_0000];
                    out.extend(row.iter().flat_map(both).take(width).map(f32::from_bits));
                }
            }
        }
        Ok(())
    }
}
