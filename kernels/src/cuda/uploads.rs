//! Lists that calls read on the GPU, uploaded in stream order from pinned memory. The host only
//! waits for the device when they grow.
use super::device::Device;
use super::memory::{DeviceMemory, DevicePtr, Pinned};
use super::stream::Event;
use crate::error::KernelError;

/// Minimum capacity in words.
const WORDS_MIN: usize = 1 << 12;

/// One list on the device, and up to two in flight.
#[derive(Debug)]
pub(super) struct Uploads {
    memory: Option<DeviceMemory>,
    /// Staging memory, used in turn, and events for when it has been read.
    staging: Vec<(Pinned<u32>, Event)>,
    next: usize,
    what: &'static str,
}

impl Uploads {
    pub(super) fn new(what: &'static str) -> Self {
        Self { memory: None, staging: Vec::new(), next: 0, what }
    }

    /// Uploads `words` words, which `fill` writes. They stay valid for calls before the next list.
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
        // The upload before the previous one finished long ago.
        read.wait(device.stream.patience())?;
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
        // Waits for calls that read the old lists.
        device.stream.synchronize()?;
        self.staging.clear();
        self.memory = None;
        // Some lists grow token by token.
        let words = words.max(WORDS_MIN).next_power_of_two();
        self.memory = Some(DeviceMemory::new(&device.context, words * 4, self.what)?);
        for _ in 0..2 {
            let pinned = Pinned::new(&device.context, words, self.what)?;
            self.staging.push((pinned, Event::new(&device.context, false)?));
        }
        Ok(())
    }
}
