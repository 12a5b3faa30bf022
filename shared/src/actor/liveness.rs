//! PURE: when a silent link is suspect, and when it is dead.
//!
//! A stopped process keeps its TCP connections open, so an open connection proves nothing. Any
//! received byte is a sign of life; pings ensure that there are some.
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
    suspected: bool,
}

impl Liveness {
    /// Liveness of a link that has just received something.
    #[must_use]
    pub fn new(config: LivenessConfig, now: Duration) -> Self {
        Self { config, last_heard: now, last_ping: now, suspected: false }
    }

    /// Records that something arrived. Returns true if that ends a suspicion.
    pub fn heard(&mut self, now: Duration) -> bool {
        self.last_heard = now;
        std::mem::take(&mut self.suspected)
    }

    /// Decides the next action; call it about four times per ping interval.
    pub fn poll(&mut self, now: Duration) -> LivenessAction {
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
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_silent_peer_is_pinged_then_suspected_once_then_dead() {
        let mut liveness = Liveness::new(LivenessConfig::default(), ms(0));
        let mut seen = Vec::new();
        for now in (0..=5000).step_by(100) {
            match liveness.poll(ms(now)) {
                LivenessAction::Wait => {}
                action => seen.push((now, action)),
            }
        }
        let suspects: Vec<u64> =
            seen.iter().filter(|s| s.1 == LivenessAction::Suspect).map(|s| s.0).collect();
        assert_eq!(suspects, [2000]);
        assert!(seen.iter().filter(|s| s.1 == LivenessAction::Ping).count() >= 8);
        assert_eq!(seen.last(), Some(&(5000, LivenessAction::Dead { silent: ms(5000) })));
    }

    #[test]
    fn anything_heard_ends_the_suspicion() {
        let mut liveness = Liveness::new(LivenessConfig::default(), ms(0));
        assert!(!liveness.heard(ms(10)));
        assert_eq!(liveness.poll(ms(2100)), LivenessAction::Suspect);
        assert!(liveness.heard(ms(2200)));
        // Not dead at 5.1 s: the silence started afresh, and so did its report.
        assert_eq!(liveness.poll(ms(5100)), LivenessAction::Suspect);
        assert_eq!(liveness.poll(ms(7200)), LivenessAction::Dead { silent: ms(5000) });
    }
}
