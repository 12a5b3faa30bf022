//! PURE: what a leader's page shows, so that nobody sees a total fall when another takes over.
//!
//! The next leader continues from what etcd has. Anything that a scrape saw and etcd does not have
//! would be taken back, and Prometheus takes a falling counter for a restart: everything counted so
//! far would count twice. So a page shows a moment that etcd has acknowledged, with all of its
//! totals and gauges, so that relations between series hold within a scrape.
//!
//! While etcd does not answer, nobody can take over, either. After a while without an answer, the
//! page shows the present again, or, while a write is under way, the moment being written: it may
//! be acknowledged, and must not be less than what was seen before.
//!
//! A process that stood still for long cannot know whether another leads since. Nor can a process
//! whose machine was suspended: the monotonic clock stood still with it, and only the wall clock
//! shows that, as soon as it is right again. Who asked it
//! meanwhile is answered first of all, before it hears of that. So its page has no totals until
//! etcd has acknowledged a write that was begun afterwards, or did not answer for a while.
use std::sync::Arc;
use std::time::Duration;

/// See the module's documentation. `T` is everything that a page shows at one moment.
#[derive(Debug)]
pub struct Published<T> {
    /// Maximum age of the acknowledged moment.
    patience: Duration,
    /// How long the process may stand still without another that leads since.
    stall: Duration,
    /// When it was last seen not to stand still, also by the wall clock.
    beat: Duration,
    beat_wall: Duration,
    /// When it was found to have stood still for longer.
    doubted: Option<Duration>,
    acknowledged: Option<TakenSnapshot<T>>,
    writing: Option<TakenSnapshot<T>>,
}

#[derive(Debug)]
struct TakenSnapshot<T> {
    at: Duration,
    snapshot: Arc<T>,
}

impl<T> Published<T> {
    /// Starts with nothing acknowledged.
    #[must_use]
    pub fn new(patience: Duration, stall: Duration, now: Duration, wall: Duration) -> Self {
        Self {
            patience,
            stall,
            beat: now,
            beat_wall: wall,
            doubted: None,
            acknowledged: None,
            writing: None,
        }
    }

    /// To be called several times within the stall that is tolerated, and before any other use:
    /// the process runs. `wall` is the time since 1970: that it jumps ahead is no proof that the
    /// machine stood still, but doubts cost only the page until the next write.
    pub fn record_progress(&mut self, now: Duration, wall: Duration) {
        let still = now.saturating_sub(std::mem::replace(&mut self.beat, now));
        let by_wall = wall.saturating_sub(std::mem::replace(&mut self.beat_wall, wall));
        if still.max(by_wall) > self.stall {
            self.doubted = Some(now);
            // Time in which nothing was done is no time in which etcd did not answer.
            if let Some(taken) = &mut self.acknowledged {
                taken.at += still;
            }
        }
        if self.doubted.is_some_and(|since| now.saturating_sub(since) > self.patience) {
            self.doubted = None;
        }
    }

    /// `snapshot`, taken now, contains nothing that etcd does not have.
    pub fn acknowledged(&mut self, now: Duration, snapshot: Arc<T>) {
        self.acknowledged = Some(TakenSnapshot { at: now, snapshot });
    }

    /// `snapshot`, taken now, is being written to etcd.
    pub fn writing(&mut self, now: Duration, snapshot: Arc<T>) {
        self.writing = Some(TakenSnapshot { at: now, snapshot });
    }

    /// The write has ended; `acknowledged` tells whether etcd has confirmed it.
    pub fn written(&mut self, acknowledged: bool) {
        let written = self.writing.take();
        let Some(written) = written.filter(|_| acknowledged) else { return };
        self.doubted = self.doubted.filter(|since| written.at < *since);
        self.acknowledged = Some(written);
    }

    /// etcd answers, but this process does not lead at present: another may take over, so pages
    /// stay as they are, unless they show the present already.
    pub fn keep_page(&mut self, now: Duration) {
        let patience = self.patience;
        if let Some(taken) = &mut self.acknowledged
            && now.saturating_sub(taken.at) <= patience
        {
            taken.at = now;
        }
    }

    /// Nothing that matters was counted since the acknowledged moment was taken: pages show what
    /// `renew` makes of it, as if it were of now. False when they show another moment already, or
    /// only etcd can say whether this process still leads.
    pub fn renewed(&mut self, now: Duration, renew: impl FnOnce(&T) -> T) -> bool {
        let patience = self.patience;
        if self.doubted.is_some() {
            return false;
        }
        let fresh = |taken: &&mut TakenSnapshot<T>| now.saturating_sub(taken.at) <= patience;
        let Some(taken) = self.acknowledged.as_mut().filter(fresh) else { return false };
        *taken = TakenSnapshot { at: now, snapshot: Arc::new(renew(&taken.snapshot)) };
        true
    }

    /// Whether a page has totals to show. Before anything was acknowledged it has none: of what
    /// etcd has nobody here knows, and what is counted here is a part of it. Nor when the process
    /// has stood still: another may lead and have counted on.
    #[must_use]
    pub fn has_totals(&self) -> bool {
        self.acknowledged.is_some() && self.doubted.is_none()
    }

    /// Returns what a page shows now; `None` for the present.
    #[must_use]
    pub fn shown(&self, now: Duration) -> Option<Arc<T>> {
        let fresh = |taken: &&TakenSnapshot<T>| now.saturating_sub(taken.at) <= self.patience;
        let shown = self.acknowledged.as_ref().filter(fresh).or(self.writing.as_ref());
        shown.map(|taken| taken.snapshot.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);

    const STALL: Duration = Duration::from_secs(2);

    fn new<T>() -> Published<T> {
        Published::new(PATIENCE, STALL, Duration::ZERO, YEARS)
    }

    /// Since 1970, when the process began.
    const YEARS: Duration = Duration::from_secs(1 << 31);

    fn beat<T>(published: &mut Published<T>, count: u64) {
        published.record_progress(seconds(count), YEARS + seconds(count));
    }

    fn seconds(count: u64) -> Duration {
        Duration::from_secs(count)
    }

    #[test]
    fn shows_what_is_acknowledged_and_nothing_newer() {
        let mut published = new();
        assert!(!published.has_totals());
        published.writing(seconds(1), Arc::new(1));
        assert!(!published.has_totals());
        published.written(true);
        assert!(published.has_totals());
        published.writing(seconds(6), Arc::new(2));
        assert_eq!(published.shown(seconds(6)).as_deref(), Some(&1));
        published.written(false);
        assert_eq!(published.shown(seconds(7)).as_deref(), Some(&1));
        published.writing(seconds(8), Arc::new(3));
        published.written(true);
        assert_eq!(published.shown(seconds(8)).as_deref(), Some(&3));
    }

    #[test]
    fn is_live_again_when_nothing_is_acknowledged_for_long() {
        let mut published = new();
        published.acknowledged(seconds(0), Arc::new(1));
        assert_eq!(published.shown(seconds(10)).as_deref(), Some(&1));
        assert_eq!(published.shown(seconds(11)), None);
        // What is being written may count in a moment.
        published.writing(seconds(12), Arc::new(2));
        assert_eq!(published.shown(seconds(12)).as_deref(), Some(&2));
        published.written(false);
        assert_eq!(published.shown(seconds(13)), None);
    }

    #[test]
    fn an_acknowledged_moment_is_renewed_as_long_as_it_is_shown() {
        let mut published = new();
        assert!(!published.renewed(seconds(0), |_: &i32| 9), "there is none");
        published.acknowledged(seconds(0), Arc::new(1));
        assert!(published.renewed(seconds(10), |shown| shown + 1));
        assert_eq!(published.shown(seconds(20)).as_deref(), Some(&2));
        // Pages show the present, which may have been more.
        assert!(!published.renewed(seconds(21), |shown| shown + 1));
        assert_eq!(published.shown(seconds(21)), None);
    }

    #[test]
    fn stays_as_it_is_while_others_may_take_over() {
        let mut published = new();
        published.acknowledged(seconds(0), Arc::new(1));
        published.keep_page(seconds(8));
        assert_eq!(published.shown(seconds(18)).as_deref(), Some(&1));
        // Pages show the present already: what was seen is not taken back.
        published.keep_page(seconds(19));
        assert_eq!(published.shown(seconds(19)), None);
    }

    #[test]
    fn a_process_that_stood_still_shows_no_totals_until_etcd_has_taken_later_ones() {
        let mut published = new();
        published.acknowledged(seconds(0), Arc::new(1));
        beat(&mut published, 1);
        beat(&mut published, 3);
        assert!(published.has_totals(), "it may stand still for so long");
        published.writing(seconds(4), Arc::new(2));
        beat(&mut published, 20);
        assert!(!published.has_totals());
        // What was written before says nothing of now; nor does an idle cluster need no answer.
        published.written(true);
        assert!(!published.has_totals());
        assert!(!published.renewed(seconds(20), |shown| shown + 1));
        beat(&mut published, 21);
        published.writing(seconds(21), Arc::new(3));
        published.written(false);
        assert!(!published.has_totals());
        published.writing(seconds(21), Arc::new(4));
        published.written(true);
        assert!(published.has_totals());
        assert_eq!(published.shown(seconds(21)).as_deref(), Some(&4));
    }

    /// The monotonic clock of a machine that was suspended stood still with it.
    #[test]
    fn a_machine_that_stood_still_is_noticed_by_its_wall_clock() {
        let mut published = new();
        published.acknowledged(seconds(0), Arc::new(1));
        published.writing(seconds(1), Arc::new(2));
        let hour = seconds(3600);
        published.record_progress(seconds(2), YEARS + hour);
        assert!(!published.has_totals());
        published.written(true);
        assert!(!published.has_totals(), "the write was begun before");
        // It has run on since; the acknowledged moment is as old as it was.
        published.record_progress(seconds(3), YEARS + hour + seconds(1));
        published.writing(seconds(3), Arc::new(3));
        published.written(true);
        assert_eq!(published.shown(seconds(3)).as_deref(), Some(&3));
        assert!(published.has_totals());
        // A clock that is set back, or forward a little, says nothing.
        published.record_progress(seconds(4), YEARS);
        published.record_progress(seconds(5), YEARS + STALL);
        assert!(published.has_totals());
        published.record_progress(seconds(6), YEARS + STALL + STALL + seconds(1));
        assert!(!published.has_totals());
    }

    #[test]
    fn a_process_that_stood_still_goes_on_when_etcd_does_not_answer() {
        let mut published = new();
        published.acknowledged(seconds(0), Arc::new(1));
        beat(&mut published, 30);
        for now in 31..=40 {
            beat(&mut published, now);
            assert!(!published.has_totals());
            // Fenced: the time that it stood still does not make the page one of the present.
            published.keep_page(seconds(now));
        }
        beat(&mut published, 41);
        assert!(published.has_totals());
        assert_eq!(published.shown(seconds(41)).as_deref(), Some(&1));
        beat(&mut published, 43);
        beat(&mut published, 45);
        beat(&mut published, 47);
        beat(&mut published, 49);
        beat(&mut published, 51);
        assert_eq!(published.shown(seconds(51)), None, "etcd did not answer for long");
    }

    /// A counter that grows at every step, with scrapes, writes that etcd answers or not (having
    /// applied them or not), and leaders that die at any point: no scrape shows less than an
    /// earlier one.
    #[test]
    fn no_total_falls_when_leaders_die() {
        let mut random = 12_345_u64;
        let mut dice = |sides: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % sides
        };
        let (mut deaths, mut live) = (0, 0);
        for _ in 0..300 {
            let (mut kept, mut seen) = (0_u64, 0_u64);
            let mut now = Duration::ZERO;
            for _leader in 0..5 {
                let mut published = new();
                let mut count = kept;
                published.acknowledged(now, Arc::new(count));
                let mut away_until = Duration::ZERO;
                loop {
                    now += Duration::from_millis(100 * (1 + dice(10)));
                    count += dice(5);
                    let away = now < away_until;
                    match dice(12) {
                        0..=4 => {
                            let shown = published.shown(now).map_or(count, |shown| *shown);
                            live += u64::from(shown == count);
                            assert!(shown >= seen, "{shown} after {seen}");
                            seen = shown;
                        }
                        5..=7 => published.writing(now, Arc::new(count)),
                        8..=10 => {
                            // Nobody else leads: what was applied stays applied, whether it was
                            // answered or not.
                            if let Some(writing) = &published.writing {
                                let (taken, answered) =
                                    (!away && dice(4) > 0, !away && dice(4) > 0);
                                if taken {
                                    kept = *writing.snapshot;
                                }
                                published.written(taken && answered);
                            }
                        }
                        _ if dice(4) == 0 => away_until = now + seconds(20),
                        // A leader that dies while etcd is away is followed once etcd is back, by
                        // when its pages would have shown the present: a fall cannot be avoided
                        // then.
                        _ => {
                            let stale = published.acknowledged.as_ref();
                            if stale.is_some_and(|taken| now - taken.at <= PATIENCE) {
                                deaths += 1;
                                break;
                            }
                        }
                    }
                }
            }
        }
        assert!(deaths > 1000 && live > 1000, "{deaths} deaths, {live} live scrapes");
    }
}
