//! Lists that calls read on the GPU, brought there in stream order from pinned memory: the host
//! waits for the device where they grow, and nowhere else.
use std::time::Duration;

use super::device::Device;
use super::memory::{DeviceMemory, DevicePtr, Pinned};
use super::stream::Event;
use crate::error::KernelError;

/// How long an upload may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// Room that is made at least, in words.
const WORDS_MIN: usize = 1 << 12;

/// One list at a time on the device, two on their way there.
#[derive(Debug)]
pub(super) struct Uploads {
    memory: Option<DeviceMemory>,
    /// Where lists are written, in turn, and when each was read.
    staging: Vec<(Pinned<u32>, Event)>,
    next: usize,
    what: &'static str,
}

impl Uploads {
    pub(super) fn new(what: &'static str) -> Self {
        Self { memory: None, staging: Vec::new(), next: 0, what }
    }

    /// Brings `words` words to the device, which `fill` writes. They stay there for the calls up to
    /// the next list.
    pub(super) fn send(
        &mut self,
        device: &Device,
        words: usize,
        fill: impl FnOnce(&mut [u32]),
    ) -> Result<DevicePtr, KernelError> {
        self.reserve(device, words)?;
        let (Some(memory), Some((pinned, read))) = (&self.memory, self.staging.get_mut(self.next))
        else {
            return Err(KernelError::Device(format!("no memory for {}", self.what)));
        };
        // The one before the last has long been read.
        read.wait(PATIENCE)?;
        fill(&mut pinned.as_mut_slice()[..words]);
        memory.upload_pinned(&device.stream, 0, pinned, words)?;
        read.record(&device.stream)?;
        self.next = 1 - self.next;
        Ok(memory.ptr())
    }

    fn reserve(&mut self, device: &Device, words: usize) -> Result<(), KernelError> {
        let has_room = self.memory.as_ref().is_some_and(|memory| memory.bytes() / 4 >= words);
        if has_room && self.staging.len() == 2 {
            return Ok(());
        }
        // Calls that read the old lists have been waited for.
        device.stream.synchronize()?;
        self.staging.clear();
        self.memory = None;
        // Some grow token by token.
        let words = words.max(WORDS_MIN).next_power_of_two();
        self.memory = Some(DeviceMemory::new(&device.context, words * 4, self.what)?);
        for _ in 0..2 {
            let pinned = Pinned::new(&device.context, words, self.what)?;
            self.staging.push((pinned, Event::new(&device.context, false)?));
        }
        Ok(())
    }
}
