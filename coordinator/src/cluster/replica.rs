//! PURE: the life of one replica.
use std::collections::BTreeSet;
use std::time::Duration;

use shared::ids::{Epoch, ReplicaId, WorkerId};
use shared::model_identity::ModelIdentity;
use shared::protocol::Formed;

use super::absence::EXPECTED_FOR;
use super::placement::joins;
use super::{Member, PlacementRules};

/// First wait before a broken replica is formed again; doubles with each failure in a row.
const BACKOFF_MIN: Duration = Duration::from_millis(100);
/// Longest such wait.
const BACKOFF_MAX: Duration = Duration::from_secs(10);
/// First wait after a failure that retrying cannot fix; doubles with each in a row. It ends when
/// members come or go, since that may fix the cause.
const HOLD_MIN: Duration = Duration::from_secs(60);
/// Longest such wait.
const HOLD_MAX: Duration = Duration::from_secs(600);
/// The same for one that ended because a step hung, which takes time by itself.
const STABLE_WITHOUT_HANG: Duration = Duration::from_secs(600);
/// A replica that served this long counts failures anew: the backoff is against repeating a failure
/// over and over, and clients wait as long.
const STABLE_AFTER: Duration = Duration::from_secs(5);

/// Where a replica is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicaPhase {
    /// Ranks are missing, or the backoff after a failure runs.
    Waiting,
    /// Ranks load weights and connect their collective.
    Forming,
    /// Ranks allocate their KV caches.
    Starting,
    /// Steps can run.
    Serving,
}

impl ReplicaPhase {
    /// The name operators see.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Forming => "forming",
            Self::Starting => "starting",
            Self::Serving => "serving",
        }
    }
}

/// One replica, for status displays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaStatus {
    /// Its id.
    pub id: ReplicaId,
    /// Its present or last epoch.
    pub epoch: Epoch,
    /// Where it is in its life.
    pub phase: ReplicaPhase,
    /// Its workers in rank order; `None` where one is missing.
    pub ranks: Vec<Option<WorkerId>>,
    /// Why it last broke.
    pub last_failure: Option<String>,
    /// Until when it is not retried, because that would fail in the same way.
    pub held_until: Option<Duration>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    worker: Option<WorkerId>,
    /// Nobody holds it, because an operator drained who held it last.
    drained: bool,
    /// When who held it last left on purpose; counts while nobody holds it.
    left: Option<Duration>,
    /// The last holder: preferred when it is back, since it may still hold the weights.
    last: Option<WorkerId>,
    /// KV blocks it has room for, in the KV cache and in host memory.
    room: Option<(u32, u32)>,
    /// Contents of its model folder, once it is formed.
    identity: Option<ModelIdentity>,
    /// Those of its adapters' folders, likewise.
    adapters: Option<u64>,
    started: bool,
    /// It has reported progress in this epoch.
    progressed: bool,
    bytes_done: u64,
    bytes_total: u64,
}

#[derive(Debug)]
pub(super) struct Replica {
    /// Number of replicas made before it; unlike ids, this is never reused.
    born: u64,
    slots: Vec<Slot>,
    epoch: Epoch,
    phase: ReplicaPhase,
    not_before: Duration,
    failures: u32,
    served_since: Duration,
    /// When its formation last advanced.
    advanced: Duration,
    /// Since when a rank has been missing.
    incomplete_since: Option<Duration>,
    /// Whether the missing rank left on purpose, so that it is not waited for.
    left_on_purpose: bool,
    last_failure: Option<String>,
    /// Until when it waits after failing for good, unless something changes first.
    held_until: Option<Duration>,
    /// Failures for good in a row.
    holds: u32,
    /// Maximum number of tokens in one step of this epoch.
    step_tokens: u32,
    /// Whether a step of this epoch hung.
    hung: bool,
    /// Whether rank 0's NCCL id was relayed to the other ranks in this epoch.
    relayed: bool,
    /// Numbers of the adapters that every rank has.
    adapters: BTreeSet<u32>,
    /// Adapters that ranks were told to load, and have not answered about.
    owed: BTreeSet<(WorkerId, u32)>,
}

impl Replica {
    /// Makes a complete group that may be formed at once.
    pub(super) fn new(ranks: Vec<WorkerId>) -> Self {
        let slot = |worker| Slot { worker: Some(worker), last: Some(worker), ..Slot::default() };
        Self {
            born: 0,
            slots: ranks.into_iter().map(slot).collect(),
            epoch: Epoch(0),
            phase: ReplicaPhase::Waiting,
            not_before: Duration::ZERO,
            failures: 0,
            served_since: Duration::ZERO,
            advanced: Duration::ZERO,
            incomplete_since: None,
            left_on_purpose: false,
            last_failure: None,
            held_until: None,
            holds: 0,
            step_tokens: 0,
            hung: false,
            relayed: false,
            adapters: BTreeSet::new(),
            owed: BTreeSet::new(),
        }
    }

    /// Notes that it is made after this many others.
    pub(super) fn set_creation_order(&mut self, others: u64) {
        self.born = others;
    }

    /// Number of replicas made before it.
    pub(super) fn creation_order(&self) -> u64 {
        self.born
    }

    /// Returns the recipients of rank 0's NCCL id: the other ranks of an epoch that is being
    /// formed, once; none if the sender is not rank 0.
    pub(super) fn group_id_recipients(&mut self, worker: WorkerId) -> Vec<WorkerId> {
        let is_first = self.slots.first().is_some_and(|slot| slot.worker == Some(worker));
        if self.phase != ReplicaPhase::Forming || !is_first || self.relayed {
            return Vec::new();
        }
        self.relayed = true;
        self.slots.iter().skip(1).filter_map(|slot| slot.worker).collect()
    }

    pub(super) fn status(&self, id: ReplicaId) -> ReplicaStatus {
        ReplicaStatus {
            id,
            epoch: self.epoch,
            phase: self.phase,
            ranks: self.slots.iter().map(|slot| slot.worker).collect(),
            last_failure: self.last_failure.clone(),
            held_until: self.held_until.filter(|_| !self.is_live()),
        }
    }

    pub(super) fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Whether an epoch is under way.
    pub(super) fn is_live(&self) -> bool {
        self.phase != ReplicaPhase::Waiting
    }

    pub(super) fn is_serving(&self) -> bool {
        self.phase == ReplicaPhase::Serving
    }

    /// Whether its ranks load or allocate.
    pub(super) fn is_forming(&self) -> bool {
        matches!(self.phase, ReplicaPhase::Forming | ReplicaPhase::Starting)
    }

    /// A rank has reported progress.
    pub(super) fn advanced(&mut self, now: Duration) {
        self.advanced = self.advanced.max(now);
    }

    /// Returns when its formation last advanced, while it is being formed.
    pub(super) fn forming_since(&self) -> Option<Duration> {
        self.is_forming().then_some(self.advanced)
    }

    /// Returns the ranks that have not answered what they were last told, while it is being formed.
    pub(super) fn unanswered(&self) -> Vec<WorkerId> {
        let owes = |slot: &&Slot| match self.phase {
            ReplicaPhase::Forming => slot.room.is_none(),
            ReplicaPhase::Starting => {
                !slot.started || slot.worker.is_some_and(|worker| self.owes(worker))
            }
            ReplicaPhase::Waiting | ReplicaPhase::Serving => false,
        };
        self.slots.iter().filter(owes).filter_map(|slot| slot.worker).collect()
    }

    /// Whether a rank is missing.
    pub(super) fn has_gap(&self) -> bool {
        self.slots.iter().any(|slot| slot.worker.is_none())
    }

    /// Returns the present workers in rank order.
    pub(super) fn ranks(&self) -> Vec<WorkerId> {
        self.slots.iter().filter_map(|slot| slot.worker).collect()
    }

    /// Number of ranks it has or waits for.
    pub(super) fn degree(&self) -> usize {
        self.slots.len()
    }

    /// Returns how long a rank has been missing, while no epoch is under way.
    pub(super) fn incomplete_for(&self, now: Duration) -> Option<Duration> {
        let since = self.incomplete_since.filter(|_| !self.is_live())?;
        Some(if self.left_on_purpose { Duration::MAX } else { now.saturating_sub(since) })
    }

    /// Returns when it may be formed, when ranks have been missing for `grace`, when those that
    /// left on purpose are not expected back, and when its formation has not advanced for
    /// `patience`; each only if it waits for that.
    pub(super) fn waits(
        &self,
        grace: Duration,
        patience: Duration,
    ) -> impl Iterator<Item = Duration> {
        let idle = !self.is_live();
        let backoff = idle.then_some(self.not_before);
        let absence =
            self.incomplete_since.filter(|_| idle).map(|since| since.saturating_add(grace));
        let formation = self.forming_since().map(|since| since.saturating_add(patience));
        let abandoned = self.abandoned_since().map(|since| since.saturating_add(EXPECTED_FOR));
        backoff.into_iter().chain(absence).chain(formation).chain(abandoned)
    }

    /// Changes to another degree. Present ranks stay, in order; if there are too many, the last
    /// ones are released.
    pub(super) fn resize(&mut self, now: Duration, degree: usize) {
        let mut slots: Vec<Slot> =
            self.slots.iter().filter(|slot| slot.worker.is_some()).copied().collect();
        slots.truncate(degree);
        let vacant = Slot { worker: None, last: None, ..Slot::default() };
        slots.resize(degree, vacant);
        self.slots = slots;
        self.note_completeness(now);
    }

    /// The missing rank left on purpose: a smaller degree may be used at once.
    pub(super) fn do_not_wait(&mut self) {
        self.left_on_purpose = true;
    }

    /// Forgets the backoff: the next attempt does not repeat a failure.
    pub(super) fn form_at_once(&mut self) {
        self.not_before = Duration::ZERO;
        self.held_until = None;
    }

    /// It broke for a reason that will not go away by itself.
    pub(super) fn hold(&mut self, now: Duration) {
        let until = now + HOLD_MIN.saturating_mul(1 << self.holds.min(10)).min(HOLD_MAX);
        self.holds = self.holds.saturating_add(1);
        self.held_until = Some(until);
        self.not_before = self.not_before.max(until);
    }

    /// Something has changed: it may be retried.
    pub(super) fn release(&mut self) {
        if self.held_until.take().is_some() {
            self.not_before = Duration::ZERO;
            self.holds = 0;
        }
    }

    /// Whether it waits for a change.
    pub(super) fn is_held(&self) -> bool {
        self.held_until.is_some()
    }

    fn note_completeness(&mut self, now: Duration) {
        if self.slots.iter().all(|slot| slot.worker.is_some()) {
            self.incomplete_since = None;
        } else {
            self.incomplete_since.get_or_insert(now);
        }
    }

    pub(super) fn vacate(&mut self, now: Duration, worker: WorkerId) {
        for slot in self.slots.iter_mut().filter(|slot| slot.worker == Some(worker)) {
            slot.worker = None;
        }
        self.note_completeness(now);
    }

    /// Like [`Replica::vacate`], for a worker that is not to return to its rank.
    pub(super) fn dismiss(&mut self, now: Duration, worker: WorkerId) {
        for slot in self.slots.iter_mut().filter(|slot| slot.worker == Some(worker)) {
            slot.last = None;
        }
        self.vacate(now, worker);
    }

    /// Like [`Replica::vacate`], for a worker that an operator drained.
    pub(super) fn drain(&mut self, now: Duration, worker: WorkerId) {
        for slot in self.slots.iter_mut().filter(|slot| slot.worker == Some(worker)) {
            slot.drained = true;
        }
        self.vacate(now, worker);
    }

    /// Like [`Replica::vacate`], for a worker that ends on purpose.
    pub(super) fn leave(&mut self, now: Duration, worker: WorkerId) {
        for slot in self.slots.iter_mut().filter(|slot| slot.worker == Some(worker)) {
            slot.left = Some(now);
        }
        self.vacate(now, worker);
    }

    /// Since when all missing ranks have been gone, if each of them left on purpose.
    pub(super) fn abandoned_since(&self) -> Option<Duration> {
        let vacant = || self.slots.iter().filter(|slot| slot.worker.is_none());
        if self.is_live() || vacant().any(|slot| slot.left.is_none()) {
            return None;
        }
        vacant().filter_map(|slot| slot.left).max()
    }

    /// Whether ranks that operators drained are missing. A smaller degree does without them.
    pub(super) fn lacks_drained(&self) -> bool {
        !self.is_live() && self.slots.iter().any(|slot| slot.drained)
    }

    /// Moves workers from `free` into vacant ranks: a returning one into its own rank, then the one
    /// nearest to the `present` ranks; none of another build.
    pub(super) fn fill(
        &mut self,
        free: &mut Vec<&Member>,
        present: &[Member],
        rules: &PlacementRules,
    ) {
        let mut present = present.to_vec();
        let mut take = |slot: &mut Slot, wanted: Option<WorkerId>| {
            let index = match wanted {
                Some(wanted) => {
                    free.iter().position(|it| it.worker == wanted && joins(it, &present))
                }
                None => rules.nearest(free, &present),
            };
            if let Some(index) = index {
                let member = free.remove(index);
                slot.worker = Some(member.worker);
                slot.drained = false;
                slot.left = None;
                slot.last = Some(member.worker);
                present.push(member.clone());
            }
        };
        for slot in self.slots.iter_mut().filter(|slot| slot.worker.is_none()) {
            if let Some(last) = slot.last {
                take(slot, Some(last));
            }
        }
        for slot in self.slots.iter_mut().filter(|slot| slot.worker.is_none()) {
            take(slot, None);
        }
        if self.slots.iter().all(|slot| slot.worker.is_some()) {
            self.incomplete_since = None;
        }
    }

    pub(super) fn may_form(&self, now: Duration) -> bool {
        !self.is_live()
            && now >= self.not_before
            && self.slots.iter().all(|slot| slot.worker.is_some())
    }

    /// An epoch begins; its ranks are told of these adapters.
    pub(super) fn form(&mut self, now: Duration, epoch: Epoch, adapters: BTreeSet<u32>) {
        self.adapters = adapters;
        self.owed.clear();
        self.epoch = epoch;
        self.advanced = now;
        self.held_until = None;
        self.phase = ReplicaPhase::Forming;
        self.left_on_purpose = false;
        self.hung = false;
        self.relayed = false;
        for slot in &mut self.slots {
            slot.room = None;
            slot.identity = None;
            slot.adapters = None;
            slot.started = false;
            slot.progressed = false;
            slot.bytes_done = 0;
            slot.bytes_total = 0;
        }
    }

    /// Ranks of the present epoch were told this maximum number of tokens in one step.
    pub(super) fn set_step_tokens(&mut self, tokens: u32) {
        self.step_tokens = tokens;
    }

    /// Maximum number of tokens in one step of the present epoch.
    pub(super) fn step_tokens(&self) -> u32 {
        self.step_tokens
    }

    pub(super) fn progress(&mut self, worker: WorkerId, bytes_done: u64, bytes_total: u64) {
        if let Some(slot) = self.slot(worker) {
            slot.progressed = true;
            slot.bytes_done = bytes_done;
            slot.bytes_total = bytes_total;
        }
    }

    /// Whether a rank other than this one was at work when the formation ended: others may have
    /// waited for it in vain, for before it meets them it fetches what it lacks.
    pub(super) fn waited_for_files(&self, other_than: WorkerId) -> bool {
        let mut others = self.slots.iter().filter(|slot| slot.worker != Some(other_than));
        others.any(|slot| slot.progressed && slot.room.is_none())
    }

    pub(super) fn load_progress(&self) -> (u64, u64) {
        self.slots
            .iter()
            .fold((0, 0), |sum, slot| (sum.0 + slot.bytes_done, sum.1 + slot.bytes_total))
    }

    /// Returns a rank that has formed already with other contents in its model folder.
    pub(super) fn rank_with_other_files(
        &self,
        identity: ModelIdentity,
    ) -> Option<(WorkerId, ModelIdentity)> {
        let of = |slot: &Slot| Some((slot.worker?, slot.identity?));
        self.slots.iter().filter_map(of).find(|(_, other)| *other != identity)
    }

    /// Returns a rank that has formed already with other contents in its adapters' folders.
    pub(super) fn differs_in_adapters(&self, contents: u64) -> Option<WorkerId> {
        let of = |slot: &Slot| Some((slot.worker?, slot.adapters?));
        let other = |(_, other): &(WorkerId, u64)| *other != contents;
        self.slots.iter().filter_map(of).find(other).map(|(worker, _)| worker)
    }

    /// Returns the block counts (KV cache, host memory) to start with once every rank is formed:
    /// the minimum over all ranks.
    pub(super) fn formed(&mut self, worker: WorkerId, formed: &Formed) -> Option<(u32, u32)> {
        if self.phase != ReplicaPhase::Forming {
            return None;
        }
        if let Some(slot) = self.slot(worker) {
            slot.room = Some((formed.kv_blocks, formed.host_blocks));
            slot.identity = Some(formed.identity);
            slot.adapters = Some(formed.adapters);
        }
        let room = self.room()?;
        self.phase = ReplicaPhase::Starting;
        Some(room)
    }

    /// A rank has started.
    pub(super) fn started(&mut self, worker: WorkerId) {
        if self.phase == ReplicaPhase::Starting
            && let Some(slot) = self.slot(worker)
        {
            slot.started = true;
        }
    }

    /// Whether every rank has started, and it does not serve yet.
    pub(super) fn has_started(&self) -> bool {
        self.phase == ReplicaPhase::Starting && self.slots.iter().all(|slot| slot.started)
    }

    /// Serves from now on, if every rank has started; returns the block counts.
    pub(super) fn serve(&mut self, now: Duration) -> Option<(u32, u32)> {
        if !self.has_started() {
            return None;
        }
        self.phase = ReplicaPhase::Serving;
        self.served_since = now;
        self.holds = 0;
        self.room()
    }

    /// Whether every rank has this adapter.
    pub(super) fn has(&self, adapter: u32) -> bool {
        self.adapters.contains(&adapter)
    }

    /// Whether a rank has not answered about an adapter.
    pub(super) fn owes(&self, worker: WorkerId) -> bool {
        self.owed.iter().any(|(of, _)| *of == worker)
    }

    /// Whether some rank has not answered about some adapter.
    pub(super) fn is_loading_adapter(&self) -> bool {
        !self.owed.is_empty()
    }

    /// The ranks that have not answered about this adapter.
    pub(super) fn owing(&self, adapter: u32) -> Vec<WorkerId> {
        let owed = self.owed.iter().filter(|(_, number)| *number == adapter);
        owed.map(|(worker, _)| *worker).collect()
    }

    /// Returns the ranks to be told to load this adapter; none if they have been.
    pub(super) fn ask_for(&mut self, adapter: u32) -> Vec<WorkerId> {
        if self.has(adapter) || !self.owing(adapter).is_empty() {
            return Vec::new();
        }
        let ranks = self.ranks();
        self.owed.extend(ranks.iter().map(|worker| (*worker, adapter)));
        ranks
    }

    /// A rank has answered about an adapter; returns whether it was asked. With the last answer
    /// every rank has the adapter, unless one said that it has not.
    pub(super) fn has_answered(&mut self, worker: WorkerId, adapter: u32) -> bool {
        let was_asked = self.owed.remove(&(worker, adapter));
        if was_asked && self.owing(adapter).is_empty() {
            self.adapters.insert(adapter);
        }
        was_asked
    }

    /// Returns the ranks to be told to drop this adapter.
    pub(super) fn drop_adapter(&mut self, adapter: u32) -> Vec<WorkerId> {
        let was_asked = !self.owing(adapter).is_empty();
        self.owed.retain(|(_, number)| *number != adapter);
        let had = self.adapters.remove(&adapter);
        if self.is_live() && (had || was_asked) { self.ranks() } else { Vec::new() }
    }

    /// Since when it serves, or served last.
    pub(super) fn served_since(&self) -> Duration {
        self.served_since
    }

    /// A step of the present epoch hangs.
    pub(super) fn step_hung(&mut self) {
        self.hung = true;
    }

    /// Whether a step of the present or last epoch hung.
    pub(super) fn has_hung(&self) -> bool {
        self.hung
    }

    pub(super) fn broke(&mut self, now: Duration, reason: &str) {
        self.owed.clear();
        let stable = if self.hung { STABLE_WITHOUT_HANG } else { STABLE_AFTER };
        if self.is_serving() && now.saturating_sub(self.served_since) >= stable {
            self.failures = 0;
        }
        let backoff = BACKOFF_MIN.saturating_mul(1 << self.failures.min(10)).min(BACKOFF_MAX);
        self.failures = self.failures.saturating_add(1);
        self.not_before = now + backoff;
        self.phase = ReplicaPhase::Waiting;
        self.last_failure = Some(reason.to_owned());
    }

    /// It broke already, and this is why: retrying would fail in the same way.
    pub(super) fn fails_for_good(&mut self, now: Duration, reason: String) {
        self.last_failure = Some(reason);
        if !self.is_held() {
            self.hold(now);
        }
    }

    fn room(&self) -> Option<(u32, u32)> {
        let least = |(kv, host): (u32, u32), (other_kv, other_host): (u32, u32)| {
            (kv.min(other_kv), host.min(other_host))
        };
        let rooms: Option<Vec<(u32, u32)>> = self.slots.iter().map(|slot| slot.room).collect();
        rooms?.into_iter().reduce(least)
    }

    fn slot(&mut self, worker: WorkerId) -> Option<&mut Slot> {
        self.slots.iter_mut().find(|slot| slot.worker == Some(worker))
    }
}
