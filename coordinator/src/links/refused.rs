//! Processes that were not let into the cluster of late, for operators: such a process ends or
//! dials for ever, and its own log is on another host.
use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use shared::metrics::labels::HandshakeRefusal;

use super::RejectedPeer;
use crate::cluster::status::RefusedProcess;

/// Most of them that are remembered; beyond it, those seen longest ago are forgotten.
const REMEMBERED_MAX: usize = 32;
/// How long they are remembered after the last attempt.
const REMEMBERED_FOR: Duration = Duration::from_secs(600);

/// See the module's documentation. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct RefusedProcesses(Arc<Mutex<VecDeque<Refused>>>);

#[derive(Debug)]
struct Refused {
    address: IpAddr,
    refusal: HandshakeRefusal,
    /// Its name in the cluster, if it got as far as telling.
    node: Option<String>,
    /// Of the last attempt: strangers choose parts of it, and must not fill the list with that.
    reason: String,
    times: u64,
    /// Since 1970.
    last: Duration,
}

impl RefusedProcesses {
    /// A peer at this address was refused; kept if an operator may want to know why. `now` is the
    /// time since 1970.
    pub(super) fn note(
        &self,
        now: Duration,
        address: IpAddr,
        RejectedPeer { refusal, reason, node }: RejectedPeer,
    ) {
        // The others are no processes of a cluster, or are gone.
        let is_process = matches!(
            refusal,
            HandshakeRefusal::Version
                | HandshakeRefusal::Authentication
                | HandshakeRefusal::Admission
        );
        if !is_process {
            return;
        }
        let mut all = self.lock();
        let known = all.iter().position(|it| it.address == address && it.refusal == refusal);
        let before = known.and_then(|at| all.remove(at)).map_or(0, |it| it.times);
        if all.len() >= REMEMBERED_MAX {
            all.pop_front();
        }
        all.push_back(Refused { address, refusal, node, reason, times: before + 1, last: now });
    }

    /// The process of this name at this address is let in: it had to wait, or what was wrong with
    /// it is mended.
    pub(super) fn let_in(&self, address: IpAddr, node: &str) {
        self.lock().retain(|it| it.address != address || it.node.as_deref() != Some(node));
    }

    /// Those of late, the last one first.
    #[must_use]
    pub fn list(&self, now: Duration) -> Vec<RefusedProcess> {
        let of = |it: &Refused| RefusedProcess {
            address: it.address.to_string(),
            reason: it.reason.clone(),
            times: it.times,
            at: it.last.as_secs(),
        };
        let all = self.lock();
        let recent = all.iter().rev().filter(|it| now < it.last.saturating_add(REMEMBERED_FOR));
        recent.map(of).collect()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Refused>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    #[test]
    fn one_that_is_let_in_after_all_is_not_listed() {
        let (refused, now) = (RefusedProcesses::default(), Duration::from_secs(1000));
        for (at, node) in [(1, "a"), (2, "b")] {
            let waits = RejectedPeer::new(HandshakeRefusal::Admission, "its name is taken");
            refused.note(now, address(at), waits.of(node));
        }
        let unnamed = RejectedPeer::new(HandshakeRefusal::Authentication, "another secret");
        refused.note(now, address(1), unnamed);
        refused.let_in(address(2), "a");
        assert_eq!(refused.list(now).len(), 3, "another process of this name");
        refused.let_in(address(1), "a");
        let listed: Vec<_> = refused.list(now).into_iter().map(|it| it.reason).collect();
        assert_eq!(listed, ["another secret", "its name is taken"]);
        assert_eq!(refused.list(now)[1].address, address(2).to_string());
    }

    #[test]
    fn those_of_late_are_listed_once_each_and_have_a_bound() {
        let (refused, secs) = (RefusedProcesses::default(), Duration::from_secs);
        let note = |at, last: u8, refusal, reason: &str| {
            refused.note(secs(at), address(last), RejectedPeer::new(refusal, reason));
        };
        for at in [1000, 1001, 1002] {
            note(at, 1, HandshakeRefusal::Version, "another version");
        }
        note(1100, 2, HandshakeRefusal::Version, "another version");
        note(1200, 1, HandshakeRefusal::Authentication, "another secret");
        note(1300, 3, HandshakeRefusal::Malformed, "a web browser");
        let listed = |now| -> Vec<(String, String, u64, u64)> {
            let list = refused.list(secs(now)).into_iter();
            list.map(|it| (it.address, it.reason, it.times, it.at)).collect()
        };
        let of = |address: &str, reason: &str, times, at| {
            (format!("10.0.0.{address}"), format!("another {reason}"), times, at)
        };
        let all = [of("1", "secret", 1, 1200), of("2", "version", 1, 1100)];
        assert_eq!(listed(1601), [&all[..], &[of("1", "version", 3, 1002)]].concat());
        assert_eq!(listed(1602), all);
        assert_eq!(listed(1800), []);
        // One that dials often takes no room from others.
        for at in 0..100 {
            note(2000 + at, 9, HandshakeRefusal::Version, &format!("version {at}"));
        }
        assert_eq!(refused.list(secs(2100))[0].reason, "version 99");
        assert_eq!((listed(2100)[0].2, listed(1601).len()), (100, 4));
        for at in 0..100 {
            note(3000, at, HandshakeRefusal::Version, "another version");
        }
        assert_eq!(listed(3000).len(), REMEMBERED_MAX);
    }
}
