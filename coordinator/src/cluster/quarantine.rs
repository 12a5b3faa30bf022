//! PURE: devices that fail again and again are set aside: their workers get no rank for a while.
//!
//! A broken GPU takes its replica down each time, with everything that runs there, and its process
//! is back within seconds to do it again. Failures are counted by device name, across all processes
//! that used the device. The process that has the device now is told, and brings that to the next
//! coordinator.
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use shared::protocol::FailedGroups;

use super::failing_ranks::ToldGroups;

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
/// Maximum number of rests that a worker can bring; later ones are no longer.
pub(super) const BROUGHT_RESTS_MAX: u32 = 10;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Quarantine {
    devices: BTreeMap<String, Record>,
    /// When an operator had everything forgotten: workers that were away then do not know it.
    forgiven: Option<Duration>,
}

#[derive(Debug, Default)]
struct Record {
    /// Its recent failures, oldest first.
    failures: VecDeque<Duration>,
    last: Duration,
    /// How long before the beginning of time the last one was, at a coordinator that is younger.
    before: Duration,
    rests: u32,
    until: Option<Duration>,
}

impl Record {
    /// How long ago it failed.
    fn ago(&self, now: Duration) -> Duration {
        now.saturating_sub(self.last).saturating_add(self.before)
    }
}

impl Quarantine {
    /// A device failed. Returns how long it rests, if a rest begins now.
    pub(super) fn failed(&mut self, now: Duration, device: &str) -> Option<Duration> {
        self.advance(now);
        if self.devices.len() >= DEVICES_MAX && !self.devices.contains_key(device) {
            let oldest = self.devices.iter().max_by_key(|(_, it)| it.ago(now));
            let oldest = oldest.map(|(name, _)| name.clone());
            oldest.and_then(|name| self.devices.remove(&name));
        }
        let record = self.devices.entry(device.to_owned()).or_default();
        let before = std::mem::take(&mut record.before);
        record.failures.retain(|at| now.saturating_add(before) < at.saturating_add(WINDOW));
        record.last = now;
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

    /// Time passes: devices that have rested long enough are tried again, and those that have not
    /// failed for long are forgotten.
    pub(super) fn advance(&mut self, now: Duration) {
        self.devices.retain(|_, record| {
            record.until = record.until.filter(|until| now < *until);
            record.until.is_some() || record.ago(now) < FORGOTTEN
        });
    }

    /// Returns when rests end.
    pub(super) fn ends(&self) -> impl Iterator<Item = Duration> {
        self.devices.values().filter_map(|it| it.until)
    }

    /// All are tried again at once.
    pub(super) fn forgive(&mut self, now: Duration) {
        self.devices.clear();
        self.forgiven = Some(now);
    }

    /// Whether no device has failed of late.
    pub(super) fn is_empty(&self) -> bool {
        self.devices.is_empty()
    }

    /// Whether a device has failed of late.
    pub(super) fn has(&self, device: &str) -> bool {
        self.devices.contains_key(device)
    }

    /// What is known of a device, as the worker on it is told.
    pub(super) fn noted(&self, now: Duration, device: &str) -> FailedGroups {
        let Some(record) = self.devices.get(device) else { return FailedGroups::default() };
        let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        FailedGroups {
            failures: u32::try_from(record.failures.len()).unwrap_or(u32::MAX),
            last_ms: ms(record.ago(now)),
            rests: record.rests,
            rests_ms: record.until.map_or(0, |until| ms(until.saturating_sub(now))),
        }
    }

    /// What is known of a device, as it is compared with what the worker on it was told.
    pub(super) fn to_tell(&self, device: &str) -> ToldGroups {
        let of = |record: &Record| {
            (u32::try_from(record.failures.len()).unwrap_or(u32::MAX), record.rests, record.last)
        };
        self.devices.get(device).map(of).unwrap_or_default()
    }

    /// A worker brings what an earlier coordinator knew of its device. What is known here is newer.
    /// It is believed as far as devices come.
    pub(super) fn brought(&mut self, now: Duration, device: &str, noted: FailedGroups) {
        let FailedGroups { failures, last_ms, rests, rests_ms } = noted;
        let ago = Duration::from_millis(last_ms);
        // One more makes it rest, as it would have there.
        let most = if ago < WINDOW { FAILURES - 1 } else { 0 };
        let recent = usize::try_from(failures).unwrap_or(usize::MAX).min(most);
        let is_old = match rests {
            0 => recent == 0,
            _ => rests_ms == 0 && ago >= FORGOTTEN,
        };
        let last = now.saturating_sub(ago);
        let is_forgiven = self.forgiven.is_some_and(|forgiven| last <= forgiven);
        if is_old || is_forgiven || self.has(device) || self.devices.len() >= DEVICES_MAX {
            return;
        }
        let left = Duration::from_millis(rests_ms).min(REST_MAX);
        let record = Record {
            failures: VecDeque::from(vec![last; recent]),
            last,
            before: ago.saturating_sub(now),
            rests: rests.min(BROUGHT_RESTS_MAX),
            until: (!left.is_zero()).then(|| now.saturating_add(left)),
        };
        self.devices.insert(device.to_owned(), record);
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
        now += FORGOTTEN + minutes(10);
        quarantine.advance(now + FORGOTTEN - Duration::from_millis(1));
        assert!(quarantine.has("a"));
        quarantine.advance(now + FORGOTTEN);
        assert!(quarantine.is_empty(), "nobody has to fail for that");
    }

    #[test]
    fn an_operator_s_word_ends_all_rests_and_devices_are_bounded() {
        let mut quarantine = Quarantine::default();
        assert!(thrice(&mut quarantine, minutes(10)).is_some());
        quarantine.forgive(minutes(10));
        assert!(!quarantine.is_resting("a"));
        for device in 0..2 * DEVICES_MAX {
            let now = minutes(10) + Duration::from_millis(device as u64);
            quarantine.failed(now, &device.to_string());
        }
        assert_eq!(quarantine.devices.len(), DEVICES_MAX);
        assert!(!quarantine.devices.contains_key("0"), "the oldest are forgotten");
    }

    /// What the next coordinator, which is a minute old, makes of what is known at `now`.
    fn next(quarantine: &Quarantine, now: Duration) -> Quarantine {
        let mut next = Quarantine::default();
        next.brought(minutes(1), "a", quarantine.noted(now, "a"));
        next
    }

    #[test]
    fn a_rest_goes_on_at_the_next_coordinator_and_the_one_after_it_is_longer() {
        let mut quarantine = Quarantine::default();
        assert_eq!(thrice(&mut quarantine, minutes(100)), Some(minutes(10)));
        let mut next = next(&quarantine, minutes(104));
        assert!(next.is_resting("a") && !next.is_resting("b"));
        assert_eq!(next.ends().collect::<Vec<_>>(), [minutes(7)], "six minutes are left");
        // It is told what it brought.
        assert_eq!(next.noted(minutes(2), "a"), quarantine.noted(minutes(105), "a"));
        next.advance(minutes(7));
        assert_eq!(thrice(&mut next, minutes(20)), Some(minutes(20)));
    }

    #[test]
    fn failures_count_at_the_next_coordinator_as_long_as_they_would_have() {
        let mut quarantine = Quarantine::default();
        assert_eq!(quarantine.failed(minutes(100), "a"), None);
        assert_eq!(quarantine.failed(minutes(101), "a"), None);
        let mut soon = next(&quarantine, minutes(105));
        assert_eq!(soon.failed(minutes(2), "a"), Some(minutes(10)), "the third");
        let mut late = next(&quarantine, minutes(111));
        assert!(!late.has("a") && late.failed(minutes(2), "a").is_none());
        let mut young = next(&quarantine, minutes(105));
        assert_eq!(young.failed(minutes(8), "a"), None, "eleven minutes after the last");
    }

    #[test]
    fn nobody_brings_more_than_a_device_can_come_to_nor_what_an_operator_had_forgotten() {
        let all =
            FailedGroups { failures: u32::MAX, last_ms: 1000, rests: u32::MAX, rests_ms: u64::MAX };
        let mut quarantine = Quarantine::default();
        quarantine.brought(minutes(1), "a", all);
        assert_eq!(quarantine.ends().collect::<Vec<_>>(), [minutes(1) + REST_MAX]);
        let told = quarantine.noted(minutes(1), "a");
        assert_eq!((told.failures, told.rests), (2, BROUGHT_RESTS_MAX));
        // What is known here is newer.
        quarantine.brought(minutes(2), "a", FailedGroups { failures: 1, ..all });
        assert_eq!(quarantine.noted(minutes(2), "a").failures, 2);
        quarantine.forgive(minutes(3));
        quarantine.brought(minutes(4), "a", FailedGroups { last_ms: 90_000, ..all });
        assert!(!quarantine.has("a"));
        quarantine.brought(minutes(4), "a", all);
        assert!(quarantine.is_resting("a"), "it is newer");
        let old = FailedGroups { last_ms: u64::MAX, rests_ms: 0, ..all };
        quarantine.brought(minutes(4), "b", old);
        quarantine.brought(minutes(4), "c", FailedGroups::default());
        assert!(!quarantine.has("b") && !quarantine.has("c"));
    }
}
