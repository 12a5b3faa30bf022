//! What can happen, and the summary of a run.
use shared::ids::ReplicaId;

use crate::coordinator::Life;
use crate::etcd::MemberId;
use crate::network::{LinkId, Side};
use crate::scenario::Time;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Heal {
    Unfreeze { slot: usize, incarnation: u64 },
    Unblock { slot: usize, up: bool, down: bool },
    Faster { slot: usize, extra: Time },
    Quicker { slot: usize, factor: u64 },
    NoOccasion { slot: usize },
    Single { twin: usize },
    Thaw { seat: usize, incarnation: u64 },
    EtcdBack,
    JoinEtcd { who: MemberId },
    ChangesArrive { who: MemberId },
    StepsRun { slot: usize, incarnation: u64 },
    Together { slots: [usize; 2] },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Event {
    Arrive { link: LinkId, to: Side },
    Poll { link: LinkId, side: Side },
    Closed { link: LinkId, side: Side },
    Tick,
    ReplicaMail(Life, ReplicaId),
    ClusterMail(Life),
    Checkpoint(Life),
    Scale(Life, u32),
    SeatStart { seat: usize },
    Load { seat: usize, incarnation: u64 },
    EtcdOpen { who: MemberId, session: u64 },
    EtcdAsked { who: MemberId, session: u64, number: u64 },
    EtcdAnswered { who: MemberId, session: u64, number: u64 },
    EtcdDeadline { who: MemberId, session: u64, number: u64 },
    EtcdSaid { who: MemberId, session: u64 },
    EtcdTick { who: MemberId, session: u64 },
    EtcdKept { who: MemberId, session: u64, lease: i64 },
    Start { slot: usize },
    Dial { slot: usize, incarnation: u64, generation: u64 },
    HandshakeDeadline { slot: usize, link: LinkId },
    Executed { slot: usize, token: u64 },
    Broken { slot: usize, token: u64 },
    Deadline { slot: usize, token: u64 },
    Reader { slot: usize, token: u64 },
    ReportDue { slot: usize, incarnation: u64, generation: u64 },
    LeaveDeadline { slot: usize, incarnation: u64 },
    Submit(usize),
    Leave(usize),
    Fault(usize),
    Heal(Heal),
    Scrape,
}

impl PartialOrd for Side {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Side {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (*self as u8).cmp(&(*other as u8))
    }
}

/// The summary of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Report {
    pub(crate) events: u64,
    pub(crate) faults: u64,
    /// Times that a rank was told to form.
    pub(crate) forms: u64,
    pub(crate) finished: u64,
    pub(crate) unavailable: u64,
    /// Coordinators that were replaced, and requests that ended with them.
    pub(crate) replaced: u64,
    pub(crate) lost: u64,
    /// Coordinators that ended because another led.
    pub(crate) superseded: u64,
    /// Times that etcd was unreachable for everybody.
    pub(crate) outages: u64,
    /// Requests given up because epochs repeatedly ended with them alone.
    pub(crate) quarantined: u64,
    /// Requests that continued at another replica.
    pub(crate) moved: u64,
    /// Of these, those that a replica gave from its queue to one with fewer requests.
    pub(crate) shared: u64,
    /// Formations with fewer ranks than wanted.
    pub(crate) resharded: u64,
    pub(crate) drained: u64,
    /// Epochs that ended because ranks had different tokens.
    pub(crate) disagreed: u64,
    /// Steps that took much longer than such steps do.
    pub(crate) overdue: u64,
    /// Slow ranks replaced by spares.
    pub(crate) relieved: u64,
    /// Ranks that did not answer when they were formed.
    pub(crate) silent: u64,
    /// Steps that hung, and so ended their epoch.
    pub(crate) hung: u64,
    /// Operators' commands about adapters that were carried out, and those that were not.
    pub(crate) adapters_changed: u64,
    pub(crate) adapters_refused: u64,
    /// Processes ended by what they computed.
    pub(crate) poisoned: u64,
    pub(crate) preemptions: u64,
    /// Of these, those that went to host memory.
    pub(crate) swapped: u64,
    /// Choices without a bound that ended where the KV cache did.
    pub(crate) filled: u64,
    /// Steps whose ranks were done before their masks were there.
    pub(crate) masks_awaited: u64,
    /// Prompt tokens that were in the KV cache.
    pub(crate) cached: u64,
    /// Tokens drafted, and those of them that were right.
    pub(crate) drafted: u64,
    pub(crate) accepted: u64,
    pub(crate) fenced: u64,
    pub(crate) lasted: Time,
    /// From the last fault until all workers served again, and until all requests had ended.
    pub(crate) converged_after: Time,
    pub(crate) ended_after: Time,
    /// A hash of everything that happened, in order.
    pub(crate) trace: u64,
}
