//! PURE: how long a step may take, by how long steps of its size take: a rank that computes no more
//! while its process lives on is found by that, long before `--step-timeout`.
//!
//! An alarm costs a formation, so it takes much: `FACTOR` times as long as steps of this size
//! took at most lately, and seconds at the very least. Sizes of which little is known in this
//! epoch, as those of its first steps, have the whole time-out. After an alarm the least is
//! `RAISE` times as much, since the next one would be about the same.
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

    /// How long steps of a size take at most, if that is known: from those of the very size, or
    /// from all that have no less to compute.
    fn usual(&self, size: StepSize) -> Option<Duration> {
        let own = self.taken.get(&size).filter(|taken| taken.steps >= SAMPLES_MIN);
        if let Some(own) = own {
            return Some(own.longest);
        }
        let larger = self.taken.range(size..).filter(|(it, _)| it.covers(size));
        let (steps, longest) = larger.fold((0_u32, Duration::ZERO), |(steps, longest), (_, it)| {
            (steps.saturating_add(it.steps), longest.max(it.longest))
        });
        (steps >= SAMPLES_MIN).then_some(longest)
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
    fn larger_steps_say_how_long_a_smaller_one_takes_at_most_and_not_the_reverse() {
        let (small, large) = (StepSize::of(4, 4000), StepSize::of(512, 2_000_000));
        assert_eq!(alarm(&mut learned(large, ms(800), 16), small), Some(8000));
        assert_eq!(alarm(&mut learned(small, ms(20), 100), large), None);
        let (wide, long) = (StepSize::of(512, 4000), StepSize::of(4, 2_000_000));
        assert_eq!(alarm(&mut learned(wide, ms(20), 100), long), None, "it attends to more");
        assert_eq!(alarm(&mut learned(long, ms(20), 100), wide), None, "it has more tokens");
        // Its own size counts alone, once it is known.
        let mut both = learned(large, ms(800), 16);
        (0..16).for_each(|_| both.done(small, ms(20)));
        assert_eq!(alarm(&mut both, small), Some(5000));
        // An empty step is smaller than all others.
        assert_eq!(alarm(&mut learned(small, ms(600), 16), StepSize::default()), Some(6000));
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
