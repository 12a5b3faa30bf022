//! Results of sampling, on the GPU and on their way to the host through pinned memory.
use super::device::Device;
use super::memory::{DeviceMemory, DevicePtr, Pinned};
use super::sample_lists::TOP_MAX;
use super::stream::Event;
use crate::error::KernelError;
use crate::sampling::Sampled;

/// Words of `TuttiSampled`.
pub(super) const SAMPLED: usize = 4;
/// Maximum number of steps whose tokens are in flight.
pub(super) const QUEUED_MAX: usize = 2;

/// Memory for results; graphs refer to both addresses.
#[derive(Debug)]
pub(super) struct Results {
    pub(super) rows: usize,
    pub(super) device: DeviceMemory,
    /// One for each step in flight.
    pub(super) host: [(Pinned<u32>, Event); QUEUED_MAX],
    top: Option<(DeviceMemory, [Pinned<u32>; QUEUED_MAX])>,
}

impl Results {
    /// Allocates room for at least `rows` rows.
    pub(super) fn new(device: &Device, rows: usize) -> Result<Self, KernelError> {
        // At least the rows of the largest graph.
        let rows = rows.max(512);
        let context = &device.context;
        let host = || -> Result<_, KernelError> {
            let what = "pinned memory for sampled tokens";
            Ok((Pinned::new(context, rows * SAMPLED, what)?, Event::new(context, false)?))
        };
        Ok(Self {
            rows,
            device: DeviceMemory::new(context, rows * SAMPLED * 4, "sampled tokens")?,
            host: [host()?, host()?],
            top: None,
        })
    }

    /// Takes over the contents of smaller memory, which have all arrived.
    pub(super) fn take_over(&mut self, device: &Device, old: &Self) -> Result<(), KernelError> {
        self.device.copy_from(&device.stream, &old.device, old.rows * SAMPLED * 4)?;
        for ((to, _), (from, _)) in self.host.iter_mut().zip(&old.host) {
            to.as_mut_slice()[..from.len()].copy_from_slice(from.as_slice());
        }
        if let Some((_, lists)) = &old.top {
            let (_, own) = self.top_memory(device)?;
            for (to, from) in own.iter_mut().zip(lists) {
                to.as_mut_slice()[..from.len()].copy_from_slice(from.as_slice());
            }
        }
        // The old memory is about to be freed.
        device.stream.synchronize()
    }

    /// Room for the most likely tokens of `count` rows: ids, then log-probabilities.
    pub(super) fn top(
        &mut self,
        device: &Device,
        count: usize,
        top: u32,
    ) -> Result<Option<(DevicePtr, DevicePtr)>, KernelError> {
        if top == 0 {
            return Ok(None);
        }
        let (memory, _) = self.top_memory(device)?;
        Ok(Some((memory.ptr(), memory.ptr().offset(count * top as usize * 4))))
    }

    fn top_memory(
        &mut self,
        device: &Device,
    ) -> Result<&mut (DeviceMemory, [Pinned<u32>; QUEUED_MAX]), KernelError> {
        let made = match self.top.take() {
            Some(made) => made,
            None => {
                let words = self.rows * TOP_MAX as usize * 2;
                let what = "the most likely tokens";
                let pinned = || Pinned::new(&device.context, words, what);
                let memory = DeviceMemory::new(&device.context, words * 4, what)?;
                (memory, [pinned()?, pinned()?])
            }
        };
        Ok(self.top.insert(made))
    }

    /// Copies the results of `count` rows to the host, in stream order.
    pub(super) fn download(
        &mut self,
        device: &Device,
        slot: usize,
        count: usize,
        top: u32,
    ) -> Result<(), KernelError> {
        let (host, done) = &mut self.host[slot];
        self.device.download_pinned(&device.stream, 0, host, count * SAMPLED)?;
        if let Some((memory, host)) = &mut self.top
            && top > 0
        {
            let words = count * top as usize * 2;
            memory.download_pinned(&device.stream, 0, &mut host[slot], words)?;
        }
        done.record(&device.stream)
    }

    /// Row `i` of `rows`, with at most `top_n` of the `stride` most likely tokens.
    pub(super) fn row(
        &self,
        slot: usize,
        (i, rows): (usize, usize),
        top_n: Option<u32>,
        stride: u32,
        vocab: usize,
    ) -> Sampled {
        let words = &self.host[slot].0.as_slice()[i * SAMPLED..][..SAMPLED];
        let corrupted = words[1] != 0;
        let mut sampled = Sampled {
            token: if corrupted { 0 } else { words[0] },
            corrupted,
            ..Sampled::default()
        };
        let Some(top_n) = top_n.filter(|_| !corrupted) else { return sampled };
        sampled.logprob = f32::from_bits(words[2]);
        sampled.rank = words[3];
        if let Some((_, host)) = &self.top
            && stride > 0
        {
            let host = host[slot].as_slice();
            let (ids, logprobs) = host.split_at((rows * stride as usize).min(host.len()));
            let at = i * stride as usize;
            let count = (top_n as usize).min(vocab).min(stride as usize);
            let ids = ids[at..].iter().take(count);
            let logprobs = logprobs[at..].iter().take(count);
            sampled.top = ids.zip(logprobs).map(|(id, p)| (*id, f32::from_bits(*p))).collect();
        }
        sampled
    }
}
