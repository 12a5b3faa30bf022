//! PURE: finds ranks that compute much slower than the others of their replica for long. All ranks
//! of a step wait for the slowest, so one such rank slows its whole replica down.
use std::time::Duration;

/// Steps over this long are judged together.
const WINDOW: Duration = Duration::from_secs(5);
/// This many windows in a row must agree before it counts: 30 s.
const WINDOWS: i32 = 6;
/// A window lasts until it has this many steps: fewer say nothing.
const STEPS_MIN: u64 = 3;
/// A rank is slow in a window if it computes longer than this many times the others' median.
const FACTOR: u64 = 3;
/// Average step time, in microseconds, below which a window says nothing: an idle replica's.
const NOTHING_US: u64 = 200;

/// The pace of the ranks of one epoch.
#[derive(Debug, Default)]
pub struct Stragglers {
    began: Option<Duration>,
    steps: u64,
    /// Microseconds of computing in this window, by rank.
    sums: Vec<u64>,
    /// Windows in a row in which a rank was slow or, if negative, was not, by rank.
    rows: Vec<i32>,
    /// Sums of the other ranks while one is judged; reused.
    others: Vec<u64>,
}

/// A rank was slow for long, or was not for as long.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PaceChange {
    /// The rank.
    pub rank: usize,
    /// Whether it is slow; repeated with each window while it is.
    pub slow: bool,
    /// How many times as long as the others it computed in the last window.
    pub times: f64,
}

impl Stragglers {
    /// Begins another epoch, with so many ranks.
    pub fn begin(&mut self, ranks: usize) {
        self.rows = vec![0; ranks];
        self.next_window();
        self.began = None;
    }

    fn next_window(&mut self) {
        self.steps = 0;
        self.sums.clear();
        self.sums.resize(self.rows.len(), 0);
    }

    /// All ranks have finished a step; `own_us` is how long each computed by itself.
    pub fn step(&mut self, now: Duration, own_us: &[u64]) -> Vec<PaceChange> {
        self.steps += 1;
        for (sum, own) in self.sums.iter_mut().zip(own_us) {
            *sum = sum.saturating_add(*own);
        }
        let began = *self.began.get_or_insert(now);
        if now.saturating_sub(began) < WINDOW || self.steps < STEPS_MIN {
            return Vec::new();
        }
        let paces = self.judge();
        self.began = Some(now);
        self.next_window();
        paces
    }

    fn judge(&mut self) -> Vec<PaceChange> {
        let longest = self.sums.iter().copied().max().unwrap_or_default();
        if self.sums.len() < 2 || longest / self.steps.max(1) < NOTHING_US {
            return Vec::new();
        }
        let mut paces = Vec::new();
        for rank in 0..self.sums.len() {
            let own = self.sums[rank];
            let usual = self.median_without(rank);
            let slow = own > usual.saturating_mul(FACTOR);
            let row = &mut self.rows[rank];
            *row = match (slow, *row) {
                (true, row) => row.max(0).saturating_add(1),
                (false, row) => row.min(0).saturating_sub(1),
            };
            let times = own as f64 / usual.max(1) as f64;
            if *row >= WINDOWS || *row == -WINDOWS {
                paces.push(PaceChange { rank, slow, times });
            }
        }
        paces
    }

    fn median_without(&mut self, rank: usize) -> u64 {
        self.others.clear();
        let others = self.sums.iter().enumerate().filter(|(index, _)| *index != rank);
        self.others.extend(others.map(|(_, sum)| *sum));
        self.others.sort_unstable();
        let middle = self.others.len() / 2;
        match self.others.len() % 2 {
            1 => self.others[middle],
            _ => u64::midpoint(self.others[middle - 1], self.others[middle]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs for `seconds` with a step every 100 ms; `own` gives each rank's time. Returns the
    /// verdicts: second, rank, whether slow.
    fn run(seconds: u64, ranks: usize, own: impl Fn(u64, usize) -> u64) -> Vec<(u64, usize, bool)> {
        let mut stragglers = Stragglers::default();
        stragglers.begin(ranks);
        let mut found = Vec::new();
        for step in 0..seconds * 10 {
            let now = Duration::from_millis(step * 100);
            let own: Vec<u64> = (0..ranks).map(|rank| own(now.as_secs(), rank)).collect();
            let paces = stragglers.step(now, &own);
            found.extend(paces.iter().map(|pace| (now.as_secs(), pace.rank, pace.slow)));
        }
        found
    }

    #[test]
    fn a_rank_that_is_slow_for_half_a_minute_is_found_and_nobody_else() {
        let slow = |second: u64, rank| if rank == 1 && second >= 20 { 40_000 } else { 10_000 };
        for ranks in [2, 3, 4, 5] {
            let found = run(80, ranks, slow);
            let slow: Vec<_> = found.iter().filter(|(_, _, slow)| *slow).collect();
            assert!(slow.iter().all(|(_, rank, _)| *rank == 1), "{found:?}");
            assert!((50..=56).contains(&slow[0].0), "{found:?}");
            assert!(slow.len() >= 4, "it is said again: {found:?}");
            assert_eq!(found.iter().filter(|it| it.1 == 0).count(), 1, "well, once: {found:?}");
        }
    }

    #[test]
    fn what_is_short_small_or_common_to_all_is_nothing() {
        let of = |own: &dyn Fn(u64, usize) -> u64, ranks| {
            run(120, ranks, own).iter().any(|(_, _, slow)| *slow)
        };
        let now_and_then = |second: u64, rank| if rank == 1 && second % 30 < 24 { 90 } else { 10 };
        assert!(!of(&|second, rank| now_and_then(second, rank) * 1000, 2));
        assert!(!of(&|_, rank| if rank == 0 { 29_000 } else { 10_000 }, 2), "not three times");
        assert!(!of(&|_, rank| if rank == 0 { 190 } else { 10 }, 2), "idle");
        assert!(!of(&|_, _| 500_000, 4), "all are");
        assert!(!of(&|_, rank| if rank < 3 { 90_000 } else { 10_000 }, 4), "most of them are");
        assert!(of(&|_, rank| if rank < 2 { 90_000 } else { 10_000 }, 5), "fewer than half");
        assert!(!of(&|_, _| 90_000, 1), "one alone");
    }

    #[test]
    fn a_rank_that_keeps_pace_again_is_told_once() {
        let found =
            run(120, 2, |second, rank| if rank == 1 && second < 50 { 90 } else { 10 } * 1000);
        let of_one: Vec<_> = found.iter().filter(|it| it.1 == 1).collect();
        let again = of_one.iter().position(|(_, _, slow)| !slow).unwrap();
        assert!((75..=86).contains(&of_one[again].0), "{found:?}");
        assert_eq!(of_one.len(), again + 1, "{found:?}");
    }
}
