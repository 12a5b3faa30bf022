//! The exchange to use for each size. The choice is PURE, the measurements at the end are not.
//!
//! One-shot sends everything to everyone: it moves the most data, and waits once. Two-shot moves a
//! fraction and waits twice. Large messages are left to another group, if there is one. The
//! crossover points depend on the GPUs and their links, so all ranks measure them together, once;
//! every rank uses the times of the slowest rank, so all make the same choice.
use std::time::{Duration, Instant};

use super::PeerGroup;
use crate::collective::{AbortHandle as _, Collective};
use crate::cuda::device::Device;
use crate::cuda::group::DeviceGroup as _;
use crate::cuda::memory::DeviceMemory;
use crate::cuda::stream::{Event, pause};
use crate::cuda::tensors::Element;
use crate::error::{CollectiveError, KernelError};

/// How a message is exchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllReduceAlgorithm {
    /// Each rank sends everything to everyone.
    OneShot,
    /// Each rank sums a part and sends the result.
    TwoShot,
    /// Through another group.
    Large,
}

/// Largest messages for each exchange, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thresholds {
    /// Largest for one-shot.
    pub one_shot: usize,
    /// Largest for two-shot, or one-shot.
    pub two_shot: usize,
}

impl Default for Thresholds {
    /// Defaults without measurements.
    fn default() -> Self {
        Self { one_shot: 256 << 10, two_shot: 4 << 20 }
    }
}

/// Times of each exchange for messages of one size.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Size of the message.
    pub bytes: usize,
    /// One-shot.
    pub one_shot: Duration,
    /// Two-shot.
    pub two_shot: Duration,
    /// The other group, if there is one.
    pub large: Option<Duration>,
}

impl Thresholds {
    /// The exchange for a message.
    #[must_use]
    pub fn algorithm_for(&self, bytes: usize, has_large: bool) -> AllReduceAlgorithm {
        match () {
            () if bytes <= self.one_shot => AllReduceAlgorithm::OneShot,
            () if bytes <= self.two_shot || !has_large => AllReduceAlgorithm::TwoShot,
            () => AllReduceAlgorithm::Large,
        }
    }

    /// The sizes up to which each exchange is the fastest, from samples in order of size: up to the
    /// first size at which another is clearly faster, so that a single outlier at a large size has
    /// no effect.
    #[must_use]
    pub fn of(samples: &[Sample]) -> Self {
        let up_to = |wins: &dyn Fn(&Sample) -> bool| {
            samples.iter().take_while(|sample| wins(sample)).last().map_or(0, |last| last.bytes)
        };
        let least = |sample: &Sample| sample.one_shot.min(sample.two_shot);
        let clearly = |time: Duration, other: Duration| time.mul_f32(1.0 + MARGIN) < other;
        let beaten =
            |sample: &Sample| sample.large.is_some_and(|large| clearly(large, least(sample)));
        let one_shot =
            up_to(&|sample| !clearly(sample.two_shot, sample.one_shot) && !beaten(sample));
        let two_shot = up_to(&|sample| !beaten(sample));
        Self { one_shot, two_shot: two_shot.max(one_shot) }
    }
}

/// Sizes to measure.
const SIZES: [usize; 7] = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20];
const TIMES: u32 = 20;
/// Number of runs, the fastest of which counts: other activity on the host only lengthens the
/// others.
const RUNS: usize = 5;
/// Margin by which another exchange must be faster.
const MARGIN: f32 = 0.1;
/// Limit beyond which an exchange is too slow to measure further: larger sizes are skipped.
const TOO_SLOW: Duration = Duration::from_millis(20);

impl PeerGroup {
    /// Measures all exchanges together with all ranks, for messages of up to `most` bytes, and sets
    /// the thresholds accordingly.
    ///
    /// # Errors
    /// [`KernelError`].
    pub(super) fn tune(
        &mut self,
        device: &Device,
        collective: &mut dyn Collective,
        most: usize,
    ) -> Result<(), KernelError> {
        let mut samples = Vec::new();
        for bytes in SIZES.into_iter().filter(|bytes| *bytes <= most) {
            let data =
                DeviceMemory::zeroed(&device.context, &device.stream, bytes, "a measurement")?;
            let mut own = [0.0; 3];
            for (way, time) in own.iter_mut().enumerate() {
                *time = self.measure(device, collective, &data, way)?.as_secs_f32() * 1e6;
            }
            let mut all = vec![0.0; own.len() * collective.world_size() as usize];
            collective.all_gather(&own, &mut all)?;
            let slowest = |way: usize| {
                let times = all.iter().skip(way).step_by(own.len());
                Duration::from_secs_f32(times.copied().fold(0.0, f32::max) / 1e6)
            };
            let sample = Sample {
                bytes,
                one_shot: slowest(0),
                two_shot: slowest(1),
                large: self.large.is_some().then(|| slowest(2)),
            };
            samples.push(sample);
            if sample.one_shot.min(sample.two_shot) > TOO_SLOW {
                break;
            }
        }
        self.thresholds = Thresholds::of(&samples);
        Ok(())
    }

    /// Measures one exchange of all of `data` in one way.
    fn measure(
        &mut self,
        device: &Device,
        collective: &mut dyn Collective,
        data: &DeviceMemory,
        way: usize,
    ) -> Result<Duration, KernelError> {
        let count = data.bytes() / 4;
        let mut quickest = None::<Duration>;
        // The first one warms up; if it is slow, its time is used.
        for times in std::iter::once(1).chain([TIMES; RUNS]) {
            collective.barrier()?;
            let began = Instant::now();
            for _ in 0..times {
                match (way, &mut self.large) {
                    // In f32: decode steps of any size are exchanged so.
                    (2, Some(large)) => {
                        large.all_reduce_sum(device, data.ptr(), count, Element::F32)?;
                    }
                    (2, None) => return Ok(Duration::ZERO),
                    _ => self.sum(device, way == 1, data.ptr(), count)?,
                }
            }
            let event = Event::new(&device.context, false)?;
            event.record(&device.stream)?;
            self.wait(&event)?;
            let taken = began.elapsed() / times;
            if self.all_too_slow(collective, taken)? {
                return Ok(quickest.unwrap_or(taken));
            }
            if times > 1 {
                quickest = Some(quickest.map_or(taken, |least| least.min(taken)));
            }
        }
        Ok(quickest.unwrap_or_default())
    }

    /// This group does not belong to the context yet, so waits of the context do not poll it.
    fn wait(&mut self, event: &Event) -> Result<(), KernelError> {
        let began = Instant::now();
        while !event.is_done()? {
            self.poll()?;
            let waited = began.elapsed();
            if waited > self.timeout.saturating_mul(2) {
                // Not the GPU's fault: a rank is gone, and the other group waits for it.
                self.abort.abort();
                let stalled = CollectiveError::Stalled { algorithm: "measuring", waited };
                return Err(stalled.into());
            }
            pause(waited);
        }
        self.poll().map_err(KernelError::from)
    }

    fn all_too_slow(
        &self,
        collective: &mut dyn Collective,
        taken: Duration,
    ) -> Result<bool, CollectiveError> {
        let mut slow = [if taken > TOO_SLOW { 1.0 } else { 0.0 }];
        collective.all_reduce_sum(&mut slow)?;
        Ok(slow[0] > 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(bytes: usize, one: u64, two: u64, large: Option<u64>) -> Sample {
        let micros = Duration::from_micros;
        Sample { bytes, one_shot: micros(one), two_shot: micros(two), large: large.map(micros) }
    }

    #[test]
    fn each_way_is_taken_where_it_is_quickest() {
        let samples = [
            sample(4096, 5, 9, Some(20)),
            sample(65_536, 9, 10, Some(20)),
            sample(1 << 20, 30, 15, Some(22)),
            sample(4 << 20, 90, 45, Some(30)),
            sample(16 << 20, 1, 1, Some(90)),
        ];
        let found = Thresholds::of(&samples);
        assert_eq!(found, Thresholds { one_shot: 65_536, two_shot: 1 << 20 });
        assert_eq!(found.algorithm_for(4096, true), AllReduceAlgorithm::OneShot);
        assert_eq!(found.algorithm_for(65_537, true), AllReduceAlgorithm::TwoShot);
        assert_eq!(found.algorithm_for((1 << 20) + 1, true), AllReduceAlgorithm::Large);
        assert_eq!(found.algorithm_for(1 << 30, false), AllReduceAlgorithm::TwoShot);
    }

    #[test]
    fn without_another_group_two_shot_takes_the_rest() {
        let samples = [sample(4096, 5, 9, None), sample(65_536, 9, 5, None)];
        let found = Thresholds::of(&samples);
        assert_eq!(found, Thresholds { one_shot: 4096, two_shot: 65_536 });
        assert_eq!(Thresholds::of(&[]), Thresholds { one_shot: 0, two_shot: 0 });
        assert_eq!(Thresholds::of(&[]).algorithm_for(1, true), AllReduceAlgorithm::Large);
    }
}
