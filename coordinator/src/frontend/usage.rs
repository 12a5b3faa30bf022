//! Resource use of a front end's process, under the slot that its coordinator gave it.
use std::collections::BTreeMap;
use std::path::PathBuf;

use shared::host::HostThread;
use shared::metrics::{PartialSnapshot, SharedStats};
use shared::protocol::FrontendId;

/// Maximum number of other coordinators' slots whose cells are kept.
const EARLIER_MAX: usize = 16;

/// Samples the process; its series carry the slot's name.
#[derive(Debug)]
pub(super) struct ProcessUsage {
    nvml: Option<PathBuf>,
    current: Option<(FrontendId, SharedStats, HostThread)>,
    /// Cells of slots that other coordinators assigned. If a slot comes back, its coordinator may
    /// know the old totals, so they must continue.
    earlier: BTreeMap<FrontendId, SharedStats>,
}

impl ProcessUsage {
    /// Samples nothing yet. `nvml` is the path of NVML's library, if it is given.
    pub(super) fn new(nvml: Option<PathBuf>) -> Self {
        Self { nvml, current: None, earlier: BTreeMap::new() }
    }

    /// Samples under this slot's name from now on.
    pub(super) fn sample_as(&mut self, slot: FrontendId) {
        if self.current.as_ref().is_some_and(|(current, ..)| *current == slot) {
            return;
        }
        let before = self.current.take().map(|(left, cells, host)| {
            if self.earlier.len() < EARLIER_MAX {
                self.earlier.insert(left, cells);
            }
            host
        });
        let cells = self.earlier.remove(&slot).unwrap_or_default();
        let (name, nvml) = (slot.to_string(), self.nvml.clone());
        let host = HostThread::start_after(before, &name, nvml, cells.clone());
        self.current = Some((slot, cells, host));
    }

    /// Takes the totals under the present slot.
    pub(super) fn snapshot(&self) -> PartialSnapshot {
        self.current.as_ref().map(|(_, cells, _)| cells.snapshot()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use shared::metrics::Merged;
    use shared::metrics::catalogue::PROCESS_CPU;

    use super::*;

    /// A report with another slot's name in it is refused as a whole.
    #[test]
    fn what_is_reported_carries_the_present_slot_alone() {
        let mut usage = ProcessUsage::new(None);
        let names = |usage: &ProcessUsage| -> Vec<String> {
            let merged = Merged::of(&usage.snapshot());
            let family = merged.family(PROCESS_CPU.series()).into_iter().flatten();
            family.map(|(labels, _)| labels.concat()).collect()
        };
        assert!(names(&usage).is_empty());
        for slot in [1, 2, 1] {
            usage.sample_as(FrontendId(slot));
            let began = Instant::now();
            loop {
                let found = names(&usage);
                assert!(found.iter().all(|it| *it == format!("frontend-{slot}")), "{found:?}");
                if !found.is_empty() {
                    break;
                }
                assert!(began.elapsed() < Duration::from_secs(60), "nothing is sampled");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}
