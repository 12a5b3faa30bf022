//! PURE: what is known of worker processes, even after they are gone: their last log lines, what
//! ended them, and what their supervisor saw.
//!
//! Up to three sources report an end, in any order: the process itself (goodbye), its link, and its
//! supervisor. Their reports are matched by node name and process id. A link may also end under a
//! process that lives on: it is back under its incarnation, and was never dead.
use std::collections::{BTreeMap, VecDeque};

use shared::ids::{Incarnation, WorkerId};
use shared::log::{LogLimits, LogLines, LogRing};

use super::status::{DeadProcess, NodeLogs};

/// Maximum number of ended processes remembered.
const DEAD_MAX: usize = 64;
/// Maximum number of supervisors' reports about processes whose link has not ended yet.
const ENDED_MAX: usize = 64;

/// What a supervisor saw of a process's end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessExit {
    /// The node's name.
    pub node: String,
    /// The process.
    pub pid: u32,
    /// Exit code or signal, in words.
    pub status: String,
    /// The last lines of its stderr.
    pub stderr: Vec<String>,
}

#[derive(Debug)]
struct Process {
    node: String,
    pid: u32,
    incarnation: Incarnation,
    log: LogRing,
    goodbye: Option<String>,
}

#[derive(Debug)]
struct DeadRecord {
    dead: DeadProcess,
    /// `None` of one that never joined.
    incarnation: Option<Incarnation>,
    log: LogRing,
    stderr: Vec<String>,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct Records {
    live: BTreeMap<WorkerId, Process>,
    /// Oldest first.
    gone: VecDeque<DeadRecord>,
    /// Supervisors' reports on processes whose link has not ended.
    ended: VecDeque<ProcessExit>,
}

impl Records {
    /// A process took a slot. One that had only lost its link goes on with its log.
    pub fn joined(&mut self, worker: WorkerId, node: &str, pid: u32, incarnation: Incarnation) {
        // Not by its process id, which in containers is the same for all of a node's processes.
        let is_it =
            |gone: &DeadRecord| gone.incarnation == Some(incarnation) && gone.dead.node == node;
        let back = self.gone.iter().position(is_it).and_then(|index| self.gone.remove(index));
        let log = back.map_or_else(|| LogRing::new(LogLimits::SENT), |gone| gone.log);
        let process = Process { node: node.to_owned(), pid, incarnation, log, goodbye: None };
        self.live.insert(worker, process);
    }

    /// Lines of its log arrived.
    pub fn logged(&mut self, worker: WorkerId, lines: &LogLines) {
        if let Some(process) = self.live.get_mut(&worker) {
            process.log.append(lines);
        }
    }

    /// It said why it leaves.
    pub fn said_goodbye(&mut self, worker: WorkerId, reason: &str) {
        if let Some(process) = self.live.get_mut(&worker) {
            process.goodbye = Some(reason.to_owned());
        }
    }

    /// Its link ended, `at` seconds since 1970.
    pub fn left(&mut self, worker: WorkerId, reason: &str, at: u64) {
        let Some(process) = self.live.remove(&worker) else { return };
        let seen = self.ended.iter().position(|e| e.node == process.node && e.pid == process.pid);
        let seen = seen.and_then(|index| self.ended.remove(index));
        let dead = DeadProcess {
            node: process.node,
            slot: Some(worker.0),
            pid: process.pid,
            reason: process.goodbye.unwrap_or_else(|| reason.to_owned()),
            exit: seen.as_ref().map(|ended| ended.status.clone()),
            at,
            ..DeadProcess::default()
        };
        let stderr = seen.map(|ended| ended.stderr).unwrap_or_default();
        let incarnation = Some(process.incarnation);
        self.remember(DeadRecord { dead, incarnation, log: process.log, stderr });
    }

    /// Its supervisor saw it end, `at` seconds since 1970.
    pub fn ended(&mut self, ended: ProcessExit, at: u64) {
        let same = |node: &str, pid: u32| node == ended.node && pid == ended.pid;
        if self.live.values().any(|process| same(&process.node, process.pid)) {
            self.ended.push_back(ended);
            if self.ended.len() > ENDED_MAX {
                self.ended.pop_front();
            }
            return;
        }
        let gone = self.gone.iter_mut().rev().find(|gone| same(&gone.dead.node, gone.dead.pid));
        match gone {
            Some(gone) => {
                gone.dead.exit = Some(ended.status);
                gone.stderr = ended.stderr;
            }
            None => {
                let dead = DeadProcess {
                    node: ended.node,
                    pid: ended.pid,
                    reason: "it never joined".to_owned(),
                    exit: Some(ended.status),
                    at,
                    ..DeadProcess::default()
                };
                let log = LogRing::new(LogLimits::SENT);
                self.remember(DeadRecord { dead, incarnation: None, log, stderr: ended.stderr });
            }
        }
    }

    fn remember(&mut self, gone: DeadRecord) {
        self.gone.push_back(gone);
        if self.gone.len() > DEAD_MAX {
            self.gone.pop_front();
        }
    }

    /// Ended processes, newest first.
    pub fn dead(&self) -> impl Iterator<Item = DeadProcess> + '_ {
        self.gone.iter().rev().map(|gone| DeadProcess {
            lines: (gone.log.len().max(gone.stderr.len())) as u32,
            last_line: gone.stderr.last().cloned().or_else(|| gone.log.last(1).pop()),
            ..gone.dead.clone()
        })
    }

    /// Returns the last `lines` lines of the newest process of this node that `wanted` selects.
    #[must_use]
    pub fn logs(&self, node: &str, wanted: WhichProcess, lines: usize) -> Option<NodeLogs> {
        let live = self.live.values().find(|process| {
            process.node == node
                && match wanted {
                    WhichProcess::Newest => true,
                    WhichProcess::Ended => false,
                    WhichProcess::Pid(pid) => process.pid == pid,
                }
        });
        if let Some(process) = live {
            return Some(NodeLogs {
                node: process.node.clone(),
                pid: process.pid,
                alive: true,
                missing: process.log.missing(),
                lines: process.log.last(lines),
                ..NodeLogs::default()
            });
        }
        let wanted = |gone: &&DeadRecord| {
            gone.dead.node == node
                && match wanted {
                    WhichProcess::Newest | WhichProcess::Ended => true,
                    WhichProcess::Pid(pid) => gone.dead.pid == pid,
                }
        };
        let gone = self.gone.iter().rev().find(wanted)?;
        let skipped = gone.stderr.len().saturating_sub(lines);
        Some(NodeLogs {
            node: gone.dead.node.clone(),
            pid: gone.dead.pid,
            alive: false,
            reason: Some(gone.dead.reason.clone()),
            exit: gone.dead.exit.clone(),
            missing: gone.log.missing(),
            lines: gone.log.last(lines),
            stderr: gone.stderr.get(skipped..).unwrap_or_default().to_vec(),
        })
    }
}

/// Which process of a node is asked about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhichProcess {
    /// The running one, otherwise the one that ended last.
    Newest,
    /// The one that ended last.
    Ended,
    /// The one with this process id.
    Pid(u32),
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const W: WorkerId = WorkerId(7);

    fn lines(first: u64, lines: &[&str]) -> LogLines {
        LogLines { first, lines: lines.iter().map(|line| (*line).to_owned()).collect() }
    }

    fn ended(node: &str, pid: u32) -> ProcessExit {
        let stderr = vec!["last words".to_owned()];
        ProcessExit { node: node.to_owned(), pid, status: "signal: 9".to_owned(), stderr }
    }

    #[test]
    fn a_dead_process_keeps_its_reason_exit_and_lines() {
        let mut records = Records::default();
        records.joined(W, "a", 10, Incarnation(1));
        records.logged(W, &lines(0, &["one", "two"]));
        let live = records.logs("a", WhichProcess::Newest, 1).unwrap();
        assert!(live.alive && live.lines == ["two"], "{live:?}");
        records.left(W, "the peer closed the connection", 5);
        records.ended(ended("a", 10), 6);
        let dead: Vec<DeadProcess> = records.dead().collect();
        assert_eq!(dead.len(), 1);
        assert_eq!((dead[0].pid, dead[0].at, dead[0].lines), (10, 5, 2));
        assert_eq!(dead[0].exit.as_deref(), Some("signal: 9"));
        assert_eq!(dead[0].last_line.as_deref(), Some("last words"));
        let logs = records.logs("a", WhichProcess::Ended, 9).unwrap();
        assert_eq!((logs.lines.len(), logs.stderr.len(), logs.alive), (2, 1, false));
        // Its successor has the name now.
        records.joined(W, "a", 11, Incarnation(2));
        assert!(records.logs("a", WhichProcess::Newest, 9).unwrap().alive);
        assert_eq!(records.logs("a", WhichProcess::Ended, 9).unwrap().pid, 10);
        assert_eq!(records.logs("a", WhichProcess::Pid(10), 9).unwrap().pid, 10);
        assert!(records.logs("a", WhichProcess::Pid(12), 9).is_none());
        assert!(records.logs("b", WhichProcess::Newest, 9).is_none());
    }

    #[test]
    fn a_goodbye_is_the_better_reason_and_one_that_never_joined_is_there_too() {
        let mut records = Records::default();
        records.joined(W, "a", 10, Incarnation(1));
        records.said_goodbye(W, "drained");
        records.left(W, "closed", 5);
        records.ended(ended("b", 11), 6);
        let dead: Vec<DeadProcess> = records.dead().collect();
        assert_eq!(dead[1].reason, "drained");
        assert_eq!((dead[0].node.as_str(), dead[0].slot), ("b", None));
        assert_eq!(dead[0].reason, "it never joined");
    }

    #[test]
    fn one_that_only_lost_its_link_is_not_dead_and_keeps_its_log() {
        let mut records = Records::default();
        records.joined(W, "a", 1, Incarnation(10));
        records.logged(W, &lines(0, &["one", "two"]));
        records.left(W, "the peer was silent", 5);
        assert_eq!(records.dead().count(), 1);
        records.joined(W, "a", 1, Incarnation(10));
        assert_eq!(records.dead().count(), 0);
        records.logged(W, &lines(2, &["three"]));
        let logs = records.logs("a", WhichProcess::Newest, 9).unwrap();
        assert!(logs.alive && logs.missing == 0, "{logs:?}");
        assert_eq!(logs.lines, ["one", "two", "three"]);
        // In a container its successor has the same process id.
        records.left(W, "the peer closed the connection", 6);
        records.joined(W, "a", 1, Incarnation(11));
        assert_eq!(records.dead().count(), 1);
    }

    proptest! {
        /// In whatever order links and supervisors report ends, each process has one record with
        /// both, and there are never more than the bound.
        #[test]
        fn ends_are_put_together_in_any_order(order in Just((0..200u32).collect::<Vec<_>>()).prop_shuffle()) {
            let mut records = Records::default();
            for pid in 0..100 {
                let incarnation = Incarnation(u64::from(pid));
                records.joined(WorkerId(pid), &format!("n{pid}"), pid, incarnation);
            }
            for step in order {
                let pid = step / 2;
                if step % 2 == 0 {
                    records.left(WorkerId(pid), "gone", 1);
                } else {
                    records.ended(ended(&format!("n{pid}"), pid), 1);
                }
                prop_assert!(records.gone.len() <= DEAD_MAX && records.ended.len() <= ENDED_MAX);
            }
            let mut seen = std::collections::BTreeSet::new();
            for dead in records.dead() {
                // Reports long before the link's end may have been displaced by others.
                prop_assert!(seen.insert((dead.pid, dead.slot)), "{} twice", dead.pid);
            }
            prop_assert!(records.live.is_empty());
        }
    }
}
