//! How long work that is queued on a stream takes there, measured by events around it. Where calls
//! are recorded into a graph nothing is measured, because a graph's events cannot be subtracted.
use std::collections::VecDeque;
use std::time::Duration;

use super::device::Device;
use super::stream::Event;
use crate::error::KernelError;

/// Measures pieces of work; see the module.
#[derive(Debug, Default)]
pub(super) struct Stopwatch {
    /// Begins and ends that have not been read, oldest first.
    running: VecDeque<[Event; 2]>,
    spare: Vec<[Event; 2]>,
}

impl Stopwatch {
    /// Measures the work that `call` queues.
    ///
    /// # Errors
    /// [`KernelError::Device`], and those of `call`.
    pub(super) fn time(
        &mut self,
        device: &Device,
        call: impl FnOnce() -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        if device.stream.captures() {
            return call();
        }
        let pair = match self.spare.pop() {
            Some(pair) => pair,
            None => [Event::new(&device.context, true)?, Event::new(&device.context, true)?],
        };
        pair[0].record(&device.stream)?;
        call()?;
        pair[1].record(&device.stream)?;
        self.running.push_back(pair);
        Ok(())
    }

    /// Returns the time that work has taken which has ended since the last call.
    pub(super) fn take(&mut self) -> Duration {
        let mut total = Duration::ZERO;
        // A device that has failed says so where its results are awaited.
        while let Some([begin, end]) = self.running.front()
            && end.is_done().unwrap_or(false)
        {
            total += end.since(begin).unwrap_or_default();
            self.spare.extend(self.running.pop_front());
        }
        total
    }
}
