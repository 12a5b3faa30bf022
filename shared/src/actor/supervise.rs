//! PURE: when a crashed child is restarted.
use std::time::Duration;

/// Limits and backoff of restarts.
#[derive(Clone, Copy, Debug)]
pub struct RestartPolicy {
    /// Restarts in a row before giving up.
    pub max_restarts: u32,
    /// First backoff; doubles with each restart in a row.
    pub backoff_min: Duration,
    /// Longest backoff.
    pub backoff_max: Duration,
    /// A child that lived this long resets the count of restarts in a row.
    pub stable_after: Duration,
}

impl Default for RestartPolicy {
    fn default() -> Self {
        Self {
            max_restarts: 10,
            backoff_min: Duration::from_millis(100),
            backoff_max: Duration::from_secs(10),
            stable_after: Duration::from_secs(30),
        }
    }
}

/// What to do about a child that has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Restart it after this wait.
    RestartAfter(Duration),
    /// Do not restart it.
    GiveUp {
        /// Why, in one sentence.
        reason: String,
    },
}

/// Tracks one child's restarts.
#[derive(Clone, Debug)]
pub struct Supervisor {
    policy: RestartPolicy,
    in_a_row: u32,
    total: u64,
    started: Duration,
    random: u64,
}

impl Supervisor {
    /// Supervises a child that starts now. `seed` spreads the backoff of many children.
    #[must_use]
    pub fn new(policy: RestartPolicy, seed: u64) -> Self {
        Self { policy, in_a_row: 0, total: 0, started: Duration::ZERO, random: seed | 1 }
    }

    /// Supervises a child that was restarted before, elsewhere.
    #[must_use]
    pub fn resumed(policy: RestartPolicy, seed: u64, in_a_row: u32, total: u64) -> Self {
        Self { in_a_row, total, ..Self::new(policy, seed) }
    }

    /// Number of restarts so far.
    #[must_use]
    pub fn restarts(&self) -> u64 {
        self.total
    }

    /// Number of restarts since the child last lived for a while.
    #[must_use]
    pub fn in_a_row(&self) -> u32 {
        self.in_a_row
    }

    /// The child lives from `now` on, if that is later than expected.
    pub fn began(&mut self, now: Duration) {
        self.started = now;
    }

    /// Whether a child that lives has lived long enough at `now` that its restarts in a row are
    /// forgotten, where there were any.
    pub fn forgets(&mut self, now: Duration) -> bool {
        let stable = now.saturating_sub(self.started) >= self.policy.stable_after;
        let forgets = stable && self.in_a_row > 0;
        if forgets {
            self.in_a_row = 0;
        }
        forgets
    }

    /// Decides what to do about a child that ended at time `now`.
    pub fn on_exit(&mut self, now: Duration) -> Decision {
        self.forgets(now);
        if self.in_a_row >= self.policy.max_restarts {
            return Decision::GiveUp {
                reason: format!("it ended {} times in a row", self.in_a_row + 1),
            };
        }
        let doubled = self.policy.backoff_min.saturating_mul(1 << self.in_a_row.min(20));
        let wait = doubled.min(self.policy.backoff_max);
        self.in_a_row += 1;
        self.total += 1;
        // Add up to a quarter, so that children that died together do not come back together.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let jitter = wait.mul_f64((self.random % 1000) as f64 / 4000.0);
        self.started = now + wait + jitter;
        Decision::RestartAfter(wait + jitter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait(decision: &Decision) -> Duration {
        match decision {
            Decision::RestartAfter(wait) => *wait,
            Decision::GiveUp { reason } => panic!("gave up: {reason}"),
        }
    }

    #[test]
    fn waits_double_up_to_the_bound_then_it_gives_up() {
        let policy = RestartPolicy::default();
        let mut supervisor = Supervisor::new(policy, 7);
        let mut now = Duration::ZERO;
        for i in 0..policy.max_restarts {
            let wait = wait(&supervisor.on_exit(now));
            let base = policy.backoff_min.saturating_mul(1 << i).min(policy.backoff_max);
            assert!(wait >= base && wait <= base.mul_f64(1.25), "{i}: {wait:?} of {base:?}");
            now += wait;
        }
        assert!(matches!(supervisor.on_exit(now), Decision::GiveUp { .. }));
    }

    #[test]
    fn a_stable_life_starts_the_count_anew() {
        let mut supervisor = Supervisor::new(RestartPolicy::default(), 7);
        let mut now = Duration::ZERO;
        for _ in 0..50 {
            let wait = wait(&supervisor.on_exit(now));
            assert!(wait < Duration::from_millis(130));
            now += wait + Duration::from_secs(31);
        }
        assert_eq!(supervisor.restarts(), 50);
    }
}
