//! PURE: how long a step may take, by how long steps of its size take: a rank that computes no more
//! while its process lives on is found by that, long before `--step-timeout`.
//!
//! An alarm costs a formation, so it takes much: `FACTOR` times as long as steps of this size
//! took at most lately, and seconds at the very least. Other sizes bound this one: larger ones as
//! they are, smaller ones by so many times as there is more to compute, since a step's time grows
//! no faster than that; the least bound counts. So a size that is seldom has a bound as well, and
//! one slow step of it does not stand for long. Where nothing is known in this epoch, as in its
//! first steps, and where the bounds are far, as of a long prompt by steps of single tokens, the
//! whole time-out remains. After an alarm the least is `RAISE` times as much, since the next one
//! would be about the same.
use std::collections::BTreeMap;
use std::time::Duration;

use shared::protocol::StepPlan;

/// A step may take so many times as long as such steps do.
const FACTOR: u32 = 10;
/// So many steps of a size, or of larger ones, say how long one takes.
const SAMPLES_MIN: u32 = 16;
/// An alarm makes the least that a step is given so many times as much.
const RAISE: u32 = 4;
/// After so long without another it is lowered again.
const CALM: Duration = Duration::from_secs(600);
/// By each step that takes less, the longest one counts for so much less.
const FORGETS: u32 = 64;

/// What a step is to compute, in coarse classes: its time depends on how many tokens it has, and on
/// how many tokens before them these attend to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct StepSize {
    /// Of tokens: powers of two.
    tokens: u32,
    /// Of pairs of a token and one that it attends to: powers of four.
    pairs: u32,
}

impl StepSize {
    fn of(tokens: u64, pairs: u64) -> Self {
        let bits = |it: u64| u64::BITS - it.leading_zeros();
        Self { tokens: bits(tokens), pairs: bits(pairs).div_ceil(2) }
    }

    /// Whether a step of this size has all that one of the other has.
    fn covers(self, other: Self) -> bool {
        self.tokens >= other.tokens && self.pairs >= other.pairs
    }

    /// How many times as much a step of this size computes at most as one of the other, in what it
    /// has more of. Classes are compared by their far ends: 1 only if this is no larger.
    fn growth(self, other: Self) -> u32 {
        let times = |of: u32, than: u32, bits: u32| match of > than {
            true => 2_u32.checked_pow((of - than + 1).saturating_mul(bits)).unwrap_or(u32::MAX),
            false => 1,
        };
        times(self.tokens, other.tokens, 1).max(times(self.pairs, other.pairs, 2))
    }
}

/// How long steps of one size took.
#[derive(Clone, Copy, Debug, Default)]
struct StepTimes {
    steps: u32,
    /// The longest of late.
    longest: Duration,
}

/// A step takes too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverdueStep {
    /// How long it has run.
    pub waited: Duration,
    /// How long such steps take, if that is why.
    pub usual: Option<Duration>,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Deadlines {
    /// The least that a step is given.
    floor: Duration,
    /// The most.
    timeout: Duration,
    /// How many times the least is given after alarms, and since when.
    raised: u32,
    raised_at: Duration,
    taken: BTreeMap<StepSize, StepTimes>,
}

impl Deadlines {
    /// Steps are given `timeout`, or less once it is known how long they take, but at least
    /// `floor`.
    #[must_use]
    pub fn new(floor: Duration, timeout: Duration) -> Self {
        Self {
            floor: floor.min(timeout),
            timeout,
            raised: 1,
            raised_at: Duration::ZERO,
            taken: BTreeMap::new(),
        }
    }

    /// Another epoch begins, perhaps with other ranks: nothing is known of it.
    pub fn begin(&mut self) {
        self.taken.clear();
    }

    /// The size of a step, if that says how long it takes: not with a draft model. Only rank 0
    /// knows how much of each sequence that has yet to compute, so such steps have the whole
    /// time-out.
    #[must_use]
    pub fn size(plan: &StepPlan) -> Option<StepSize> {
        let (mut tokens, mut pairs) = (0_u64, 0_u64);
        for share in &plan.sequences {
            if share.drafts.asked().is_some() {
                return None;
            }
            let end = share.start.saturating_add(share.count);
            let count = u64::from(share.count);
            tokens = tokens.saturating_add(count);
            pairs = pairs.saturating_add(count.saturating_mul(u64::from(end)));
        }
        Some(StepSize::of(tokens, pairs))
    }

    /// A step is done.
    pub fn done(&mut self, size: StepSize, took: Duration) {
        let taken = self.taken.entry(size).or_default();
        taken.steps = taken.steps.saturating_add(1);
        taken.longest = took.max(taken.longest - taken.longest / FORGETS);
    }

    /// How long steps of a size take at most, if that is known: the least that its own, smaller and
    /// larger ones say, each size by enough steps, or all that have no less to compute by theirs
    /// together.
    fn usual(&self, size: StepSize) -> Option<Duration> {
        let mut least: Option<Duration> = None;
        let (mut steps, mut longest) = (0_u32, Duration::ZERO);
        for (it, taken) in &self.taken {
            if it.covers(size) {
                steps = steps.saturating_add(taken.steps);
                longest = longest.max(taken.longest);
            }
            if taken.steps >= SAMPLES_MIN {
                let bound = taken.longest.saturating_mul(size.growth(*it));
                least = Some(least.map_or(bound, |least| least.min(bound)));
            }
        }
        let together = (steps >= SAMPLES_MIN).then_some(longest);
        least.into_iter().chain(together).min()
    }

    /// Whether a step of this size that has run for so long takes too long. If so, the epoch is to
    /// end.
    pub fn judge(
        &mut self,
        now: Duration,
        size: StepSize,
        waited: Duration,
    ) -> Option<OverdueStep> {
        if self.raised > 1 && now.saturating_sub(self.raised_at) >= CALM {
            (self.raised, self.raised_at) = (self.raised / RAISE, now);
        }
        let least = self.floor.saturating_mul(self.raised);
        if waited < least.min(self.timeout) {
            return None;
        }
        let usual = self.usual(size)?;
        if waited < usual.saturating_mul(FACTOR) || waited >= self.timeout {
            return None;
        }
        (self.raised, self.raised_at) = (self.raised.saturating_mul(RAISE), now);
        Some(OverdueStep { waited, usual: Some(usual) })
    }
}

#[cfg(test)]
mod tests {
    use shared::ids::{Epoch, SeqId, StepId};
    use shared::protocol::{Drafts, SequenceStep};

    use super::*;

    const FLOOR: Duration = Duration::from_secs(5);
    const TIMEOUT: Duration = Duration::from_secs(60);

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn share(seq: u64, start: u32, count: u32) -> SequenceStep {
        let (seq, drafts) = (SeqId(seq), Drafts::none());
        SequenceStep { seq, start, count, new_blocks: vec![], sample: true, masked: false, drafts }
    }

    fn plan(sequences: Vec<SequenceStep>) -> StepPlan {
        StepPlan { epoch: Epoch(1), step: StepId(1), sequences, ..StepPlan::default() }
    }

    /// The first moment, in whole milliseconds, at which such a step is too late; a step that is
    /// never is ended by the time-out.
    fn alarm(deadlines: &mut Deadlines, size: StepSize) -> Option<u64> {
        (0..TIMEOUT.as_millis() as u64).find(|at| deadlines.judge(ms(*at), size, ms(*at)).is_some())
    }

    fn learned(size: StepSize, took: Duration, steps: u32) -> Deadlines {
        let mut deadlines = Deadlines::new(FLOOR, TIMEOUT);
        (0..steps).for_each(|_| deadlines.done(size, took));
        deadlines
    }

    #[test]
    fn a_step_has_ten_times_what_such_steps_take_and_seconds_at_least() {
        let size = StepSize::of(4, 4000);
        assert_eq!(alarm(&mut learned(size, ms(20), 16), size), Some(5000), "the least");
        assert_eq!(alarm(&mut learned(size, ms(700), 16), size), Some(7000));
        assert_eq!(alarm(&mut learned(size, ms(6001), 16), size), None, "the time-out is less");
        assert_eq!(alarm(&mut learned(size, ms(20), 15), size), None, "too little is known");
        let mut anew = learned(size, ms(20), 100);
        anew.begin();
        assert_eq!(alarm(&mut anew, size), None, "another epoch");
        let mut off = Deadlines::new(TIMEOUT, TIMEOUT);
        (0..100).for_each(|_| off.done(size, ms(20)));
        assert_eq!(alarm(&mut off, size), None);
        let mut short = Deadlines::new(FLOOR, ms(2000));
        (0..100).for_each(|_| short.done(size, ms(20)));
        assert_eq!(alarm(&mut short, size), None, "the time-out is shorter than the least");
    }

    #[test]
    fn the_slowest_of_late_counts_and_is_forgotten_in_time() {
        let size = StepSize::of(4, 4000);
        let mut deadlines = learned(size, ms(20), 100);
        deadlines.done(size, ms(900));
        assert_eq!(alarm(&mut deadlines, size), Some(9000));
        let mut deadlines = learned(size, ms(20), 100);
        deadlines.done(size, ms(3000));
        (0..30).for_each(|_| deadlines.done(size, ms(20)));
        let some = alarm(&mut deadlines, size).unwrap();
        assert!((15_000..25_000).contains(&some), "{some}");
        deadlines.raised = 1;
        (0..300).for_each(|_| deadlines.done(size, ms(20)));
        assert_eq!(alarm(&mut deadlines, size), Some(5000));
    }

    #[test]
    fn larger_steps_bound_a_smaller_one_as_they_are() {
        let (small, large) = (StepSize::of(4, 4000), StepSize::of(512, 2_000_000));
        assert_eq!(alarm(&mut learned(large, ms(800), 16), small), Some(8000));
        // Its own steps say more, once they are enough.
        let mut both = learned(large, ms(800), 16);
        (0..16).for_each(|_| both.done(small, ms(20)));
        assert_eq!(alarm(&mut both, small), Some(5000));
        // An empty step is smaller than all others.
        assert_eq!(alarm(&mut learned(small, ms(600), 16), StepSize::default()), Some(6000));
        // None of them is known well, but all together are.
        let mut several = learned(large, ms(800), 8);
        (0..8).for_each(|_| several.done(StepSize::of(2048, 4_000_000), ms(900)));
        assert_eq!(alarm(&mut several, small), Some(9000));
    }

    #[test]
    fn smaller_steps_bound_a_larger_one_by_how_much_more_it_computes() {
        let (small, large) = (StepSize::of(4, 4000), StepSize::of(512, 2_000_000));
        // 4 tokens are of the class 4 to 7, 512 of the class 512 to 1023: up to 256 times as many.
        // Pairs: 1,024 to 4,095, and 1,048,576 to 4,194,303, up to 4,096 times as many.
        assert_eq!(large.growth(small), 4096);
        assert_eq!(StepSize::of(512, 4000).growth(small), 256, "it attends to as much");
        assert_eq!(StepSize::of(4, 2_000_000).growth(small), 4096, "it has as many tokens");
        assert_eq!((small.growth(large), small.growth(small)), (1, 1));
        assert_eq!(StepSize::of(u64::MAX, u64::MAX).growth(StepSize::default()), u32::MAX);
        assert_eq!(alarm(&mut learned(small, ms(20), 100), large), None, "a bound beyond a minute");
        assert_eq!(alarm(&mut learned(small, ms(1), 100), large), Some(40_960));
        let twice = StepSize::of(8, 4000);
        assert_eq!(alarm(&mut learned(small, ms(20), 100), twice), Some(5000));
        assert_eq!(alarm(&mut learned(small, ms(200), 100), twice), Some(8000));
        assert_eq!(alarm(&mut learned(small, ms(200), 15), twice), None, "too little is known");
    }

    #[test]
    fn a_slow_step_of_a_size_that_is_seldom_is_not_what_it_is_judged_by() {
        let (often, seldom) = (StepSize::of(4, 4000), StepSize::of(8, 4000));
        let mut deadlines = learned(often, ms(10), 1000);
        (0..16).for_each(|_| deadlines.done(seldom, ms(15)));
        deadlines.done(seldom, ms(6000));
        assert_eq!(alarm(&mut deadlines, seldom), Some(5000));
    }

    /// Whatever grows at most as tokens or pairs do is within its bounds: no step that takes as
    /// long as it must is found too slow, wherever the few sizes lie that are known.
    #[test]
    fn bounds_hold_for_whatever_grows_no_faster_than_what_is_computed() {
        let sizes = [1_u64, 2, 3, 7, 8, 100, 512, 1023, 2048];
        let all: Vec<(u64, u64)> =
            sizes.iter().flat_map(|n| [1, 9, 300, 5000].map(|far| (*n, n * far))).collect();
        let time = |(tokens, pairs): (u64, u64)| {
            Duration::from_nanos(3_000_000 + 20_000 * tokens + 150 * pairs)
        };
        for known in &all {
            let one = learned(StepSize::of(known.0, known.1), time(*known), 16);
            for other in &all {
                let size = StepSize::of(other.0, other.1);
                let usual = one.usual(size).unwrap_or_default();
                // What is as large by its class may be larger by the width of one.
                let width = if StepSize::of(known.0, known.1).covers(size) { 4 } else { 1 };
                assert!(usual * width >= time(*other), "{known:?} {other:?} {usual:?}");
            }
        }
    }

    #[test]
    fn an_alarm_makes_the_next_one_come_later_for_a_while() {
        let size = StepSize::of(1, 100);
        let mut deadlines = learned(size, ms(20), 16);
        let mut now = Duration::from_secs(1000);
        let first = |deadlines: &mut Deadlines, now| {
            (0..60_u64).find(|it| deadlines.judge(now, size, Duration::from_secs(*it)).is_some())
        };
        assert_eq!(first(&mut deadlines, now), Some(5));
        assert_eq!(first(&mut deadlines, now + CALM / 2), Some(20));
        assert_eq!(first(&mut deadlines, now + CALM), None, "60 s is the time-out");
        now += CALM / 2 + CALM;
        assert_eq!(first(&mut deadlines, now), Some(20), "one step back after a while");
        let calm = Deadlines { raised: 4, raised_at: now, ..learned(size, ms(20), 16) };
        assert_eq!(first(&mut { calm }, now + CALM), Some(5));
    }

    #[test]
    fn a_steps_size_is_its_tokens_and_what_they_attend_to() {
        let size = |shares| Deadlines::size(&plan(shares)).unwrap();
        assert_eq!(size(vec![]), StepSize::default());
        assert_eq!(size(vec![share(1, 9, 1), share(2, 4, 1)]), StepSize::of(2, 15));
        assert_eq!(size(vec![share(1, 0, 100), share(2, 1000, 1)]), StepSize::of(101, 11_001));
        assert_ne!(size(vec![share(1, 100, 1)]), size(vec![share(1, 100_000, 1)]));
        assert_eq!(size(vec![share(1, u32::MAX, u32::MAX)]).tokens, 32, "no overflow");
    }

    #[test]
    fn steps_that_ask_a_draft_model_say_nothing_of_others() {
        let asks = SequenceStep { drafts: Drafts::UpTo(4), ..share(1, 1000, 5) };
        assert_eq!(Deadlines::size(&plan(vec![share(2, 7, 1), asks])), None);
        assert!(Deadlines::size(&plan(vec![share(2, 7, 1)])).is_some());
    }
}
