//! PURE: when a silent link is suspect, and when it is dead.
//!
//! A stopped process keeps its TCP connections open, so an open connection proves nothing. Any
//! received byte is a sign of life; pings ensure that there are some.
//!
//! Silence counts only while this process itself runs. After a standstill of its own (a paused
//! container, Ctrl-Z), it has heard from nobody, and yet all its peers may be well.
use std::time::Duration;

/// Intervals of the failure detector.
#[derive(Clone, Copy, Debug)]
pub struct LivenessConfig {
    /// Interval between pings.
    pub ping_interval: Duration,
    /// Silence after which the peer is suspect.
    pub suspect_after: Duration,
    /// Silence after which the link is cut.
    pub dead_after: Duration,
}

impl Default for LivenessConfig {
    fn default() -> Self {
        Self {
            ping_interval: Duration::from_millis(500),
            suspect_after: Duration::from_secs(2),
            dead_after: Duration::from_secs(5),
        }
    }
}

/// Next action, as decided by [`Liveness::poll`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LivenessAction {
    /// Nothing.
    Wait,
    /// Send a ping.
    Ping,
    /// Tell the owner that the peer is silent; returned once per silence.
    Suspect,
    /// Cut the link.
    Dead {
        /// Length of the silence.
        silent: Duration,
    },
}

/// One link's liveness.
#[derive(Clone, Copy, Debug)]
pub struct Liveness {
    config: LivenessConfig,
    last_heard: Duration,
    last_ping: Duration,
    last_poll: Duration,
    suspected: bool,
}

impl Liveness {
    /// Liveness of a link that has just received something.
    #[must_use]
    pub fn new(config: LivenessConfig, now: Duration) -> Self {
        Self { config, last_heard: now, last_ping: now, last_poll: now, suspected: false }
    }

    /// Records that something arrived. Returns true if that ends a suspicion.
    pub fn heard(&mut self, now: Duration) -> bool {
        self.last_heard = now;
        std::mem::take(&mut self.suspected)
    }

    /// Decides the next action; call it about four times per ping interval.
    pub fn poll(&mut self, now: Duration) -> LivenessAction {
        self.skip_standstill(now);
        let silent = now.saturating_sub(self.last_heard);
        if silent >= self.config.dead_after {
            return LivenessAction::Dead { silent };
        }
        if silent >= self.config.suspect_after && !self.suspected {
            self.suspected = true;
            return LivenessAction::Suspect;
        }
        if now.saturating_sub(self.last_ping) >= self.config.ping_interval {
            self.last_ping = now;
            return LivenessAction::Ping;
        }
        LivenessAction::Wait
    }

    /// Takes out of the silence what this process itself missed: polls come several times per
    /// ping interval as long as it runs.
    fn skip_standstill(&mut self, now: Duration) {
        let since_poll = now.saturating_sub(std::mem::replace(&mut self.last_poll, now));
        let missed = since_poll.saturating_sub(self.config.ping_interval);
        self.last_heard = (self.last_heard + missed).min(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Polls every 100 ms, and returns what was decided and when.
    fn polled(
        liveness: &mut Liveness,
        times: std::ops::RangeInclusive<u64>,
    ) -> Vec<(u64, LivenessAction)> {
        let polls = times.step_by(100).map(|now| (now, liveness.poll(ms(now))));
        polls.filter(|(_, action)| *action != LivenessAction::Wait).collect()
    }

    /// When the peer was suspected.
    fn suspected(seen: &[(u64, LivenessAction)]) -> Vec<u64> {
        seen.iter().filter(|it| it.1 == LivenessAction::Suspect).map(|it| it.0).collect()
    }

    #[test]
    fn a_silent_peer_is_pinged_then_suspected_once_then_dead() {
        let mut liveness = Liveness::new(LivenessConfig::default(), ms(0));
        let seen = polled(&mut liveness, 0..=5000);
        assert_eq!(suspected(&seen), [2000]);
        assert!(seen.iter().filter(|s| s.1 == LivenessAction::Ping).count() >= 8);
        assert_eq!(seen.last(), Some(&(5000, LivenessAction::Dead { silent: ms(5000) })));
    }

    #[test]
    fn anything_heard_ends_the_suspicion() {
        let mut liveness = Liveness::new(LivenessConfig::default(), ms(0));
        assert!(!liveness.heard(ms(10)));
        assert_eq!(suspected(&polled(&mut liveness, 100..=2100)), [2100]);
        assert!(liveness.heard(ms(2200)));
        // Not dead at 5.1 s: the silence started afresh, and so did its report.
        let seen = polled(&mut liveness, 2200..=7200);
        assert_eq!(suspected(&seen), [4200]);
        assert_eq!(seen.last(), Some(&(7200, LivenessAction::Dead { silent: ms(5000) })));
    }

    #[test]
    fn a_peer_has_its_whole_time_after_a_standstill_of_this_process() {
        let mut liveness = Liveness::new(LivenessConfig::default(), ms(0));
        assert_eq!(liveness.poll(ms(100)), LivenessAction::Wait);
        // Nobody listened until now.
        assert_eq!(liveness.poll(ms(30_000)), LivenessAction::Ping);
        let seen = polled(&mut liveness, 30_100..=35_000);
        let dead = |it: &&(u64, LivenessAction)| matches!(it.1, LivenessAction::Dead { .. });
        let died = seen.iter().find(dead).map(|it| it.0);
        assert!(died.is_some_and(|at| (34_000..=35_000).contains(&at)), "{seen:?}");
        assert!(suspected(&seen).iter().all(|at| *at >= 31_000), "{seen:?}");
        // What came in meanwhile is read first, or after the first poll.
        for heard_first in [true, false] {
            let mut liveness = Liveness::new(LivenessConfig::default(), ms(0));
            if heard_first {
                liveness.heard(ms(9_000));
            }
            assert_eq!(liveness.poll(ms(9_000)), LivenessAction::Ping);
            liveness.heard(ms(9_000));
            let seen = polled(&mut liveness, 9_100..=13_900);
            assert!(!seen.iter().any(|it| dead(&it)), "{seen:?}");
            assert_eq!(suspected(&seen), [11_000]);
        }
    }
}
