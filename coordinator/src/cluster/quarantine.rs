//! PURE: devices that fail again and again are set aside: their workers get no rank for a while.
//!
//! A broken GPU takes its replica down each time, with everything that runs there, and its process
//! is back within seconds to do it again. Failures are counted by device name, across all processes
//! that used the device.
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// This many failures within [`WINDOW`] are no accident.
const FAILURES: usize = 3;
/// See [`FAILURES`].
const WINDOW: Duration = Duration::from_secs(600);
/// First rest of a device; doubles each time, until it has gone [`FORGOTTEN`] without a failure.
const REST_MIN: Duration = Duration::from_secs(600);
/// Longest rest.
pub(super) const REST_MAX: Duration = Duration::from_secs(6 * 3600);
/// A device without a failure for this long starts afresh.
pub(super) const FORGOTTEN: Duration = Duration::from_secs(24 * 3600);
/// Maximum number of devices remembered; beyond it, those that failed longest ago are forgotten.
const DEVICES_MAX: usize = 4096;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Quarantine {
    devices: BTreeMap<String, Record>,
}

#[derive(Debug, Default)]
struct Record {
    /// Its recent failures, oldest first.
    failures: VecDeque<Duration>,
    last: Duration,
    rests: u32,
    until: Option<Duration>,
}

impl Quarantine {
    /// A device failed. Returns how long it rests, if a rest begins now.
    pub(super) fn failed(&mut self, now: Duration, device: &str) -> Option<Duration> {
        self.devices.retain(|_, it| it.until.is_some() || now < it.last.saturating_add(FORGOTTEN));
        if self.devices.len() >= DEVICES_MAX && !self.devices.contains_key(device) {
            let oldest = self.devices.iter().min_by_key(|(_, it)| it.last);
            let oldest = oldest.map(|(name, _)| name.clone());
            oldest.and_then(|name| self.devices.remove(&name));
        }
        let record = self.devices.entry(device.to_owned()).or_default();
        record.last = now;
        record.failures.retain(|at| now < at.saturating_add(WINDOW));
        record.failures.push_back(now);
        if record.failures.len() < FAILURES || record.until.is_some() {
            return None;
        }
        record.failures.clear();
        let rest = rest_after(record.rests);
        record.rests += 1;
        record.until = Some(now.saturating_add(rest));
        Some(rest)
    }

    /// Whether a device rests.
    pub(super) fn is_resting(&self, device: &str) -> bool {
        self.devices.get(device).is_some_and(|it| it.until.is_some())
    }

    /// Time passes: devices that have rested long enough are tried again.
    pub(super) fn advance(&mut self, now: Duration) {
        for record in self.devices.values_mut() {
            record.until = record.until.filter(|until| now < *until);
        }
    }

    /// Returns when rests end.
    pub(super) fn ends(&self) -> impl Iterator<Item = Duration> {
        self.devices.values().filter_map(|it| it.until)
    }

    /// All are tried again at once.
    pub(super) fn forgive(&mut self) {
        self.devices.clear();
    }
}

/// How long a device rests that has rested so many times before.
pub(super) fn rest_after(rests: u32) -> Duration {
    REST_MIN.saturating_mul(1 << rests.min(10)).min(REST_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn minutes(minutes: u64) -> Duration {
        Duration::from_secs(60 * minutes)
    }

    /// Three failures a minute apart, the last one now.
    fn thrice(quarantine: &mut Quarantine, now: Duration) -> Option<Duration> {
        assert_eq!(quarantine.failed(now - minutes(2), "a"), None);
        assert_eq!(quarantine.failed(now - minutes(1), "a"), None);
        quarantine.failed(now, "a")
    }

    #[test]
    fn the_third_failure_in_ten_minutes_begins_a_rest() {
        let mut quarantine = Quarantine::default();
        for (at, rest) in [(0, None), (5, None), (10, None), (14, Some(minutes(10)))] {
            // The failure at 0 no longer counts at 10.
            assert_eq!(quarantine.failed(minutes(at), "a"), rest, "{at}");
        }
        assert!(quarantine.is_resting("a") && !quarantine.is_resting("b"));
        assert_eq!(quarantine.failed(minutes(14), "b"), None);
        assert_eq!(quarantine.ends().collect::<Vec<_>>(), [minutes(24)]);
        quarantine.advance(minutes(24) - Duration::from_millis(1));
        assert!(quarantine.is_resting("a"));
        quarantine.advance(minutes(24));
        assert!(!quarantine.is_resting("a") && quarantine.ends().next().is_none());
    }

    #[test]
    fn rests_double_up_to_a_bound_and_a_good_day_is_a_new_beginning() {
        let mut quarantine = Quarantine::default();
        let mut now = minutes(10);
        let mut rests = Vec::new();
        for _ in 0..8 {
            let rest = thrice(&mut quarantine, now).unwrap();
            rests.push(rest.as_secs() / 60);
            now += rest + minutes(10);
            quarantine.advance(now);
        }
        assert_eq!(rests, [10, 20, 40, 80, 160, 320, 360, 360]);
        assert_eq!(thrice(&mut quarantine, now + FORGOTTEN + minutes(10)), Some(minutes(10)));
    }

    #[test]
    fn an_operator_s_word_ends_all_rests_and_devices_are_bounded() {
        let mut quarantine = Quarantine::default();
        assert!(thrice(&mut quarantine, minutes(10)).is_some());
        quarantine.forgive();
        assert!(!quarantine.is_resting("a"));
        for device in 0..2 * DEVICES_MAX {
            let now = minutes(10) + Duration::from_millis(device as u64);
            quarantine.failed(now, &device.to_string());
        }
        assert_eq!(quarantine.devices.len(), DEVICES_MAX);
        assert!(!quarantine.devices.contains_key("0"), "the oldest are forgotten");
    }
}
