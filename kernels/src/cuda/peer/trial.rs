//! A trial of the group, before anything depends on it. Even if the driver allows access, transfers
//! can hang (on a bus that does not forward writes) or deliver wrong data. In that case all ranks
//! do without, instead of failing in every epoch or, worse, not failing.
use std::time::Duration;

use super::PeerGroup;
use crate::collective::Collective;
use crate::cuda::device::Device;
use crate::cuda::group::DeviceGroup as _;
use crate::cuda::launch::{self, PEER_BLOCKS};
use crate::cuda::memory::{DeviceMemory, Pinned};
use crate::error::KernelError;

/// Time limit of the trial's exchanges; all ranks begin together.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// Number of elements, such that every block exchanges some.
const COUNT: usize = PEER_BLOCKS * 2048;

/// Element `index` that a rank sends; sums over 8 ranks are exact.
fn sent(rank: usize, index: usize) -> f32 {
    ((rank + 1) * (index % 8191 + 1)) as f32
}

/// Describes the errors in received data.
fn wrong(came: &[f32], expected: impl Fn(usize) -> f32) -> Option<String> {
    let bad = |index: &usize| came[*index].to_bits() != expected(*index).to_bits();
    let first = (0..came.len()).find(bad)?;
    let count = (first..came.len()).filter(bad).count();
    Some(format!(
        "of {} numbers that ranks sent each other for a trial {count} arrived wrong, the first as \
         {} instead of {}",
        came.len(),
        came[first],
        expected(first)
    ))
}

impl PeerGroup {
    /// Exchanges known numbers in every way and checks the results. Every rank allocates all memory
    /// before the first exchange: if ranks of one process share a GPU, an allocation may wait for
    /// another rank's kernel, which waits for this one's. The memory is left in `kept`, because the
    /// stream may use it until a failed group has been given up.
    ///
    /// # Errors
    /// [`KernelError`], also if the received data is wrong.
    pub(super) fn try_out(
        &mut self,
        device: &Device,
        collective: &mut dyn Collective,
        kept: &mut Option<TrialBuffers>,
    ) -> Result<(), KernelError> {
        let (rank, ranks) = (collective.rank() as usize, collective.world_size() as usize);
        let room = TrialBuffers::new(device, ranks);
        // The other ranks wait here, whether or not the allocation succeeded.
        collective.barrier()?;
        let TrialBuffers { data, all, host } = kept.insert(room?);
        let stream = &device.stream;
        let own: Vec<f32> = (0..COUNT).map(|index| sent(rank, index)).collect();
        let sum = |index| (0..ranks).map(|rank| sent(rank, index)).sum();
        for two_shot in [false, true] {
            data.upload(stream, 0, &own)?;
            self.sum(device, two_shot, data.ptr(), COUNT)?;
            self.compare(device, data, host, COUNT, sum)?;
        }
        data.upload(stream, 0, &own)?;
        let call = launch::peer_gather(self.table.ptr(), data.ptr(), all.ptr(), COUNT);
        // SAFETY: both have as many elements; the table lives until the stream is idle.
        unsafe { device.launch(call) }?;
        let gathered = |index| sent(index / COUNT, index % COUNT);
        self.compare(device, all, host, ranks * COUNT, gathered)
    }

    fn compare(
        &mut self,
        device: &Device,
        data: &DeviceMemory,
        host: &mut Pinned<f32>,
        count: usize,
        expected: impl Fn(usize) -> f32,
    ) -> Result<(), KernelError> {
        data.download_pinned(&device.stream, 0, host, count)?;
        device.stream.synchronize()?;
        self.poll()?;
        wrong(&host.as_slice()[..count], expected)
            .map_or(Ok(()), |what| Err(KernelError::Device(what)))
    }
}

/// Memory for a trial.
pub(super) struct TrialBuffers {
    data: DeviceMemory,
    all: DeviceMemory,
    host: Pinned<f32>,
}

impl TrialBuffers {
    fn new(device: &Device, ranks: usize) -> Result<Self, KernelError> {
        let Device { context, .. } = device;
        let what = "a trial of the exchange between GPUs";
        Ok(Self {
            data: DeviceMemory::new(context, COUNT * 4, what)?,
            all: DeviceMemory::new(context, ranks * COUNT * 4, what)?,
            host: Pinned::new(context, ranks * COUNT, "pinned memory to read a trial")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_that_arrives_wrong_is_noticed() {
        let right: Vec<f32> = (0..9000).map(|index| sent(3, index)).collect();
        assert_eq!(wrong(&right, |index| sent(3, index)), None);
        let mut some = right.clone();
        (some[8999], some[70]) = (0.0, f32::NAN);
        let words = wrong(&some, |index| sent(3, index)).unwrap();
        assert!(words.contains("2 arrived wrong") && words.contains("284"), "{words}");
        // Another rank's data is not accepted as this one's, nor an element at another place.
        assert!((0..9000).all(|index| sent(2, index) != sent(3, index)));
        assert_ne!(sent(0, 2048), sent(0, 4096));
        let most: f32 = (0..8).map(|rank| sent(rank, 8190)).sum();
        assert!(most < 16_777_216.0, "exact");
    }
}
