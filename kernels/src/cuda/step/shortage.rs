//! PURE: when graphs are made again after memory for one was short.
//!
//! Others may take the GPU's memory for a while, so a shortage is no reason to do without graphs
//! for good. The graphs so far stay, and steps that have none run without. Another one is tried
//! after some steps, and after twice as many whenever that fails: so the end of a shortage is found
//! after about as many steps as it lasted, and with few tries, each of which is a step that is run
//! twice and a line of the log.
//!
//! In a group all ranks record the same steps, so a rank without memory ends the epoch. The next
//! group tries again; where that fails as well, some groups do without graphs before another one
//! tries, and twice as many after each failure.

/// Number of steps before a graph is tried again for the first time: less than a second of decode
/// steps.
const STEPS_FIRST: u64 = 64;
/// Keeps numbers within 64 bits; no rank lives for so many steps.
const DOUBLINGS_MAX: u32 = 40;

/// Of memory for graphs.
#[derive(Debug, Default)]
pub(super) struct Shortage {
    /// What there was no memory for.
    reason: String,
    /// How often there was none: since a graph was made or, in groups, ever.
    failures: u32,
    /// Number of steps before another graph is tried.
    steps: u64,
    /// Number of groups that this rank joins without graphs.
    groups: u64,
    /// The present group is one of them.
    sits_out: bool,
}

impl Shortage {
    /// Notes that memory was short.
    pub(super) fn began(&mut self, reason: &str, grouped: bool) {
        let doublings = self.failures.min(DOUBLINGS_MAX);
        if grouped {
            // None after the first failure: what was short is likely to be there again, now that
            // this epoch's graphs are gone.
            self.groups = (1 << doublings) >> 1;
        } else {
            self.steps = STEPS_FIRST << doublings;
        }
        self.failures = self.failures.saturating_add(1);
        reason.clone_into(&mut self.reason);
    }

    /// Counts a step that begins.
    pub(super) fn step_begins(&mut self) {
        self.steps = self.steps.saturating_sub(1);
    }

    /// Whether this rank, alone, makes no more graphs in the step that has begun.
    pub(super) fn is_waiting(&self) -> bool {
        self.steps > 0
    }

    /// Notes that this rank is about to join a group.
    pub(super) fn group_begins(&mut self) {
        self.sits_out = self.groups > 0;
    }

    /// Counts a group that it has joined.
    pub(super) fn group_formed(&mut self) {
        self.groups = self.groups.saturating_sub(1);
    }

    /// Whether this rank makes no graphs in the group that it last joined, or is about to join.
    pub(super) fn sits_out(&self) -> bool {
        self.sits_out
    }

    /// Notes that a graph was made. In a group it says little: the next one can be one too many in
    /// every epoch, and a rank must not end all of them.
    pub(super) fn graph_made(&mut self, grouped: bool) {
        if !grouped {
            self.failures = 0;
        }
    }

    /// Why no more graphs are made now, if so.
    pub(super) fn reason(&self, grouped: bool) -> Option<&str> {
        let is_short = if grouped { self.sits_out() } else { self.is_waiting() };
        is_short.then_some(self.reason.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The steps in which a graph is tried, if each of `count` steps wants one.
    fn tried(shortage: &mut Shortage, count: u64, has_memory: impl Fn(u64) -> bool) -> Vec<u64> {
        let mut tried = Vec::new();
        for step in 1..=count {
            shortage.step_begins();
            if shortage.is_waiting() {
                continue;
            }
            tried.push(step);
            match has_memory(step) {
                true => shortage.graph_made(false),
                false => shortage.began("a graph", false),
            }
        }
        tried
    }

    #[test]
    fn a_graph_is_tried_after_twice_as_many_steps_each_time() {
        // 64 steps after the first, then 128, 256, 512.
        let mut shortage = Shortage::default();
        assert_eq!(tried(&mut shortage, 1000, |_| false), [1, 65, 193, 449, 961]);
        assert_eq!(shortage.reason(false), Some("a graph"));
        // Try number n, from 0 on, is in step 1 + 64 (2^n - 1): the last one has n = 13.
        assert_eq!(tried(&mut Shortage::default(), 1_000_000, |_| false).len(), 14);
    }

    #[test]
    fn a_shortage_that_is_over_is_forgotten() {
        let mut shortage = Shortage::default();
        assert_eq!(tried(&mut shortage, 194, |step| step > 100), [1, 65, 193, 194]);
        assert_eq!(shortage.reason(false), None);
        // The next one is like the first.
        assert_eq!(tried(&mut shortage, 70, |_| false), [1, 65]);
    }

    /// The first failure costs an epoch, and so does the second; then groups do without: 1, 2, 4.
    #[test]
    fn groups_do_without_graphs_after_the_second_failure() {
        let mut shortage = Shortage::default();
        let mut captures = Vec::new();
        for group in 1..=12 {
            // One that does not form is none.
            shortage.group_begins();
            shortage.group_begins();
            shortage.group_formed();
            assert_eq!(shortage.reason(true).is_some(), shortage.sits_out());
            if !shortage.sits_out() {
                captures.push(group);
                shortage.graph_made(true);
                shortage.began("a graph", true);
            }
        }
        assert_eq!(captures, [1, 2, 4, 7, 12]);
        assert!(!shortage.is_waiting(), "steps of a group are the same on all ranks");
    }

    #[test]
    fn any_number_of_failures_can_be_counted() {
        let mut shortage = Shortage::default();
        for failure in 0..200 {
            shortage.began("a graph", failure % 2 == 0);
        }
        shortage.group_begins();
        assert!(shortage.is_waiting() && shortage.sits_out());
    }
}
