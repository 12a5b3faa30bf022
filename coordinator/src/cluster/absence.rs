//! PURE: workers that are gone and may be back, for as long as that is likely.
//!
//! A worker whose name contains its process id never comes back under that name, so it must not be
//! shown as down forever.
use std::collections::BTreeMap;
use std::time::Duration;

use shared::ids::WorkerId;

/// How long a worker that is gone is expected back: longer than a host takes to restart.
pub const EXPECTED_FOR: Duration = Duration::from_secs(600);

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct Absences {
    since: BTreeMap<WorkerId, Duration>,
}

impl Absences {
    /// A worker is gone.
    pub fn left(&mut self, now: Duration, worker: WorkerId) {
        self.since.insert(worker, now);
    }

    /// It is back.
    pub fn back(&mut self, worker: WorkerId) {
        self.since.remove(&worker);
    }

    /// Returns workers that have been gone for too long, each once.
    pub fn given_up(&mut self, now: Duration) -> Vec<WorkerId> {
        let over = |since: Duration| now.saturating_sub(since) >= EXPECTED_FOR;
        if !self.since.values().copied().any(over) {
            return Vec::new();
        }
        let gone: Vec<WorkerId> =
            self.since.iter().filter(|(_, since)| over(**since)).map(|(id, _)| *id).collect();
        self.since.retain(|_, since| !over(*since));
        gone
    }

    /// Number of workers expected back.
    #[must_use]
    pub fn count(&self) -> usize {
        self.since.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_stays_away_is_given_up_once_and_who_is_back_is_not() {
        let at = Duration::from_secs;
        let mut absences = Absences::default();
        absences.left(at(1), WorkerId(0));
        absences.left(at(2), WorkerId(1));
        absences.back(WorkerId(1));
        absences.left(at(300), WorkerId(2));
        assert_eq!(absences.count(), 2);
        assert!(absences.given_up(at(600)).is_empty());
        assert_eq!(absences.given_up(at(601)), [WorkerId(0)]);
        assert!(absences.given_up(at(602)).is_empty());
        absences.left(at(700), WorkerId(2));
        assert!(absences.given_up(at(1299)).is_empty(), "the last time counts");
        assert_eq!(absences.given_up(at(5000)), [WorkerId(2)]);
        assert_eq!(absences.count(), 0);
    }
}
