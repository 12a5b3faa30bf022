//! PURE: the LoRA adapters that are served, and how operators change them while the cluster runs.
//!
//! A load is told to every rank of every replica that serves, one adapter at a time, and counts
//! when all of them have it; what fails anywhere fails everywhere. Replicas that are formed
//! meanwhile or later get the list with their formation, or before they serve. An adapter that is
//! unloaded keeps its place while requests use it. The list outlives the leader as the changes that
//! operators made to the list of its options (`shared::membership::desired`).
use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use shared::ids::{Epoch, ReplicaId, WorkerId};
use shared::model_identity::ModelIdentity;
use shared::protocol::lora::ADAPTERS_MAX;
use shared::protocol::{
    Adapter, AdapterChange, AdapterCommand, AdapterDone, AdapterError, ChangeAdapter, Lora,
    ToFetch, ToWorker,
};

use super::replica::Replica;
use super::status::AdapterStatus;
use super::{Cluster, DesiredState, Effect};
use crate::scheduler::EpochEnd;
use shared::metrics::labels::FailoverReason;

/// Identifies a command for the shell that gave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// The adapters; see the module's documentation.
#[derive(Debug)]
pub(super) struct Adapters {
    /// What the coordinator was started with.
    options: Lora,
    /// Served, in the order in which they came.
    served: Vec<Adapter>,
    /// Served no longer, but used by requests.
    leaving: Vec<Adapter>,
    /// To be loaded; the ranks are told of the first.
    loads: VecDeque<Load>,
    /// The next adapter's number.
    next: u32,
}

#[derive(Debug)]
struct Load {
    ticket: Ticket,
    adapter: Adapter,
    /// When a rank was last heard about it, or its turn came.
    since: Duration,
    /// How often a replica broke that was loading it: it may be the cause.
    broke: u32,
}

/// How many replicas may break while they load an adapter.
const BROKE_MAX: u32 = 2;

/// How many numbers a leader leaves out after the last one that it knows of: more than the loads
/// that fail between two changes of the list.
const NUMBERS_SKIPPED: u32 = 1 << 16;

impl Adapters {
    pub(super) fn new(options: &Lora, run: u64) -> Self {
        // Numbers are not used again by a coordinator that knows nothing of this one.
        let first = ADAPTERS_MAX as u32 + 1;
        let next = first + (run >> 33) as u32;
        let served = options.adapters.clone();
        let (leaving, loads) = (Vec::new(), VecDeque::new());
        Self { options: options.clone(), served, leaving, loads, next }
    }

    /// Adopts what operators told the last leader; returns how many adapters found no room.
    pub(super) fn adopt_desired(&mut self, desired: &DesiredState) -> usize {
        if self.options.places == 0 {
            return desired.adapters.loaded.len();
        }
        let changed = &desired.adapters;
        let gone = |name: &String| {
            changed.unloaded.contains(name) || changed.loaded.iter().any(|it| it.name == *name)
        };
        let stays = |adapter: &&Adapter| !gone(&adapter.name);
        self.served = self.options.adapters.iter().filter(stays).cloned().collect();
        self.served.extend(changed.loaded.iter().cloned());
        let over = self.served.len().saturating_sub(self.options.places as usize);
        self.served.truncate(self.options.places as usize);
        // The last leader may have given numbers to loads that were not stored yet.
        self.next = self.next.max(changed.next.saturating_add(NUMBERS_SKIPPED));
        over
    }

    /// All that ranks must have.
    pub(super) fn lora(&self) -> Lora {
        let adapters = self.served.iter().chain(&self.leaving).cloned().collect();
        Lora { adapters, ..self.options.clone() }
    }

    fn numbers(&self) -> BTreeSet<u32> {
        self.served.iter().chain(&self.leaving).map(|adapter| adapter.number).collect()
    }

    /// Notes in what operators want that an adapter was loaded, or unloaded.
    fn note(&self, desired: &mut DesiredState, name: &str, loaded: Option<&Adapter>) {
        let is_option = self.options.adapters.iter().any(|it| it.name == name);
        desired.change_adapter(name, loaded, is_option, self.next);
    }
}

impl Cluster {
    /// The adapters that are served.
    #[must_use]
    pub fn adapters(&self) -> &[Adapter] {
        &self.adapters.served
    }

    /// The adapters that are served no longer, and whose places are not free yet.
    #[must_use]
    pub fn leaving_adapters(&self) -> &[Adapter] {
        &self.adapters.leaving
    }

    /// All adapters, for operators.
    #[must_use]
    pub fn adapter_statuses(&self) -> Vec<AdapterStatus> {
        let of = |state: &'static str| {
            move |adapter: &Adapter| AdapterStatus {
                name: adapter.name.clone(),
                path: adapter.path.clone(),
                state: state.to_owned(),
            }
        };
        let all = &self.adapters;
        let loading = all.loads.iter().map(|load| &load.adapter).map(of("loading"));
        let served = all.served.iter().map(of("serving"));
        served.chain(loading).chain(all.leaving.iter().map(of("leaving"))).collect()
    }

    /// What workers must have fetched of the hub before they can be ranks.
    #[must_use]
    pub fn to_fetch(&self) -> ToFetch {
        self.config.to_fetch(&self.adapters.served)
    }

    /// For how many adapters there is room, if they may change.
    #[must_use]
    pub fn adapter_places(&self) -> u32 {
        self.config.lora.places
    }

    /// An operator's command; [`Effect::AdapterChanged`] answers it.
    pub fn change_adapters(
        &mut self,
        now: Duration,
        ticket: Ticket,
        command: AdapterCommand,
        effects: &mut Vec<Effect>,
    ) {
        let outcome = match command {
            AdapterCommand::Load { name, path, replace } => {
                match self.accept_load(now, ticket, &name, path, replace) {
                    Ok(()) if self.adapters.loads.len() == 1 => {
                        return self.begin_load(now, effects);
                    }
                    // Its turn comes when the loads before it are over.
                    Ok(()) => return,
                    Err(error) => Err(error),
                }
            }
            AdapterCommand::Unload { name } => self.unload(&name, effects),
        };
        effects.push(Effect::AdapterChanged { ticket, outcome });
    }

    fn accept_load(
        &mut self,
        now: Duration,
        ticket: Ticket,
        name: &str,
        path: String,
        replace: bool,
    ) -> Result<(), AdapterError> {
        let places = self.config.lora.places as usize;
        if places == 0 {
            let message = "adapters cannot be loaded while this cluster runs: start its \
                           coordinators with --max-loras N, which keeps room for N of them";
            return Err(AdapterError::Wrong(message.to_owned()));
        }
        Adapter::check(name, &path).map_err(AdapterError::Wrong)?;
        if self.config.model_names.iter().any(|it| it == name) {
            let message = format!("'{name}' is a name of the model itself");
            return Err(AdapterError::Wrong(message));
        }
        let all = &self.adapters;
        if all.loads.iter().any(|load| load.adapter.name == name) {
            let message = format!("The lora adapter '{name}' is being loaded.");
            return Err(AdapterError::NotNow(message));
        }
        if !replace && all.served.iter().any(|it| it.name == name) {
            return Err(AdapterError::Taken(name.to_owned()));
        }
        let taken = all.served.len() + all.leaving.len() + all.loads.len();
        if taken >= places {
            let message = format!(
                "all {places} places for adapters (--max-loras) are taken: {} by adapters that are \
                 served, {} by unloaded ones that requests still use, {} by ones being loaded",
                all.served.len(),
                all.leaving.len(),
                all.loads.len()
            );
            return Err(match all.served.len() < places {
                true => AdapterError::NotNow(message),
                false => AdapterError::Wrong(format!("{message}; unload one first")),
            });
        }
        if !self.replicas.iter().any(|(_, replica)| replica.is_serving()) {
            return Err(AdapterError::NotNow("no replica serves at the moment".to_owned()));
        }
        let number = self.adapters.next;
        self.adapters.next = number.wrapping_add(1).max(ADAPTERS_MAX as u32 + 1);
        let adapter = Adapter { number, name: name.to_owned(), path, identity: None };
        self.adapters.loads.push_back(Load { ticket, adapter, since: now, broke: 0 });
        Ok(())
    }

    /// Tells the replicas of the first load, if they have not been told yet.
    fn begin_load(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        let Some(load) = self.adapters.loads.front_mut() else { return };
        load.since = now;
        let adapter = load.adapter.clone();
        let serving = self.replicas.iter().filter(|(_, replica)| replica.is_serving());
        let ids: Vec<ReplicaId> = serving.map(|(id, _)| id).collect();
        for id in ids {
            self.ask_for(id, &adapter, effects);
        }
        self.due = self.due.into_iter().chain(self.loads_due()).min();
    }

    /// Tells the ranks of a replica to load an adapter, unless they have been told.
    fn ask_for(
        &mut self,
        id: ReplicaId,
        adapter: &Adapter,
        effects: &mut Vec<Effect>,
    ) -> Vec<WorkerId> {
        let asked = self.replicas.change(id, |replica| {
            let ranks = replica.ask_for(adapter.number);
            (ranks, replica.epoch())
        });
        let Some((ranks, epoch)) = asked else { return Vec::new() };
        let load = AdapterChange::Load(adapter.clone());
        effects.extend(ranks.iter().map(|worker| told(*worker, epoch, load.clone())));
        ranks
    }

    /// When the first load has failed if nothing is heard of it.
    pub(super) fn loads_due(&self) -> Option<Duration> {
        let load = self.adapters.loads.front()?;
        Some(load.since.saturating_add(self.config.form_timeout))
    }

    /// A rank that was told to load an adapter fetches its files.
    pub(super) fn load_heard(&mut self, now: Duration, number: u32) {
        let first = self.adapters.loads.front_mut();
        if let Some(load) = first.filter(|load| load.adapter.number == number) {
            load.since = load.since.max(now);
        }
    }

    /// Gives up a load of which nothing has been heard for too long.
    fn give_up_load(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        if self.loads_due().is_none_or(|due| now < due) {
            return;
        }
        let Some(load) = self.adapters.loads.front() else { return };
        let number = load.adapter.number;
        let owes = |(_, replica): (ReplicaId, &Replica)| replica.owing(number);
        let owing: Vec<String> =
            self.replicas.iter().flat_map(owes).map(|worker| self.display_name(worker)).collect();
        let seconds = self.config.form_timeout.as_secs();
        let reason = match owing.is_empty() {
            true => format!("no replica has served for {seconds} s"),
            false => format!("nothing was heard from {} for {seconds} s", owing.join(", ")),
        };
        self.end_load(now, Err(AdapterError::NotNow(reason)), effects);
    }

    /// A rank has loaded an adapter, or cannot.
    pub fn adapter_done(
        &mut self,
        now: Duration,
        worker: WorkerId,
        done: AdapterDone,
        effects: &mut Vec<Effect>,
    ) {
        let AdapterDone { epoch, number, outcome } = done;
        self.pending_answers.heard(now, worker);
        let heard = self.replicas.in_epoch(worker, epoch, |replica| {
            replica.advanced(now);
            replica.has_answered(worker, number)
        });
        // Not asked, or in an epoch that is over.
        if heard != Some(true) {
            return;
        }
        let outcome = outcome.and_then(|identity| self.same_everywhere(number, identity));
        let is_loading =
            self.adapters.loads.front().is_some_and(|load| load.adapter.number == number);
        match (outcome, is_loading) {
            (Ok(()), true) => {
                if let Some(load) = self.adapters.loads.front_mut() {
                    load.since = now;
                }
                self.complete_load(now, effects);
            }
            (Err(reason), true) => {
                let reason = format!("{}: {reason}", self.display_name(worker));
                self.end_load(now, Err(AdapterError::Wrong(reason)), effects);
            }
            (Ok(()), false) => {
                let Some(id) = self.replicas.of(worker) else { return };
                if self.replicas.get(id).is_some_and(|replica| !replica.owes(worker)) {
                    self.pending_answers.answered(worker);
                }
                self.serve_if_complete(now, id, effects);
            }
            (Err(reason), false) => {
                self.pending_answers.answered(worker);
                let Some(id) = self.replicas.of(worker) else { return };
                let why = format!("{}: {reason}", self.display_name(worker));
                let end = EpochEnd::Failed(FailoverReason::RankFailed);
                self.break_replica(now, id, end, &why, effects);
                self.replicas.change(id, |replica| replica.hold(now));
                effects.push(Effect::Unservable { replica: id, reason });
            }
        }
    }

    /// Checks that a rank's adapter has the contents that the others have.
    fn same_everywhere(&mut self, number: u32, identity: ModelIdentity) -> Result<(), String> {
        let all = &mut self.adapters;
        let loading = all.loads.iter_mut().map(|load| &mut load.adapter);
        let known = all.served.iter_mut().chain(&mut all.leaving).chain(loading);
        let Some(adapter) = known.into_iter().find(|it| it.number == number) else { return Ok(()) };
        if *adapter.identity.get_or_insert(identity) == identity {
            return Ok(());
        }
        Err(format!(
            "{} has other contents there than on another host: copy the same files to both",
            adapter.path
        ))
    }

    /// Serves the first load's adapter if every rank of every replica that serves has it.
    fn complete_load(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        let Some(load) = self.adapters.loads.front() else { return };
        let number = load.adapter.number;
        let serving = || self.replicas.iter().filter(|(_, replica)| replica.is_serving());
        if serving().count() > 0 && serving().all(|(_, replica)| replica.has(number)) {
            self.end_load(now, Ok(()), effects);
        }
    }

    /// The first load is over; the next begins.
    fn end_load(
        &mut self,
        now: Duration,
        outcome: Result<(), AdapterError>,
        effects: &mut Vec<Effect>,
    ) {
        let Some(Load { ticket, adapter, .. }) = self.adapters.loads.pop_front() else { return };
        match &outcome {
            Ok(()) => {
                let same = |it: &Adapter| it.name == adapter.name;
                if let Some(at) = self.adapters.served.iter().position(same) {
                    let old = self.adapters.served.remove(at);
                    self.adapters.leaving.push(old);
                }
                self.adapters.note(&mut self.desired, &adapter.name, Some(&adapter));
                self.adapters.served.push(adapter);
                self.fetch_ahead(effects);
                effects.push(Effect::Adapters);
                effects.push(Effect::StoreDesired(self.desired.clone()));
            }
            Err(_) => self.drop_everywhere(adapter.number, effects),
        }
        effects.push(Effect::AdapterChanged { ticket, outcome });
        self.begin_load(now, effects);
    }

    /// Has workers that are no ranks fetch what they would need as ranks.
    fn fetch_ahead(&self, effects: &mut Vec<Effect>) {
        let to_fetch = self.to_fetch();
        if to_fetch.fingerprint() == 0 {
            return;
        }
        let message = ToWorker::Fetch(to_fetch);
        let spare = self.members.keys().filter(|worker| self.replicas.of(**worker).is_none());
        effects.extend(spare.map(|worker| Effect::Send {
            worker: *worker,
            epoch: self.epoch,
            message: message.clone(),
        }));
    }

    fn unload(&mut self, name: &str, effects: &mut Vec<Effect>) -> Result<(), AdapterError> {
        let Some(at) = self.adapters.served.iter().position(|it| it.name == name) else {
            return Err(AdapterError::Unknown(name.to_owned()));
        };
        if self.config.lora.places == 0 {
            let message = "adapters cannot be unloaded while this cluster runs: start its \
                           coordinators with --max-loras N";
            return Err(AdapterError::Wrong(message.to_owned()));
        }
        let adapter = self.adapters.served.remove(at);
        self.adapters.leaving.push(adapter);
        self.adapters.note(&mut self.desired, name, None);
        effects.push(Effect::Adapters);
        effects.push(Effect::StoreDesired(self.desired.clone()));
        Ok(())
    }

    /// No request uses these any more, of those that are served no longer: their places are freed.
    pub fn adapters_unused(&mut self, now: Duration, numbers: &[u32], effects: &mut Vec<Effect>) {
        let all = self.adapters.leaving.len();
        for number in numbers {
            let before = self.adapters.leaving.len();
            self.adapters.leaving.retain(|adapter| adapter.number != *number);
            if self.adapters.leaving.len() < before {
                self.drop_everywhere(*number, effects);
            }
        }
        if self.adapters.leaving.len() == all {
            return;
        }
        // One that waited for nothing else serves now.
        let started = self.replicas.iter().filter(|(_, replica)| replica.has_started());
        let ids: Vec<ReplicaId> = started.map(|(id, _)| id).collect();
        for id in ids {
            self.serve_if_complete(now, id, effects);
        }
        // Without the one that could not be loaded there, a replica may be formed.
        self.release_held();
        self.reconcile(now, effects);
    }

    /// Tells all ranks that have an adapter, or are loading it, to drop it.
    fn drop_everywhere(&mut self, number: u32, effects: &mut Vec<Effect>) {
        let ids: Vec<ReplicaId> = self.replicas.iter().map(|(id, _)| id).collect();
        for id in ids {
            let dropped = self.replicas.change(id, |replica| {
                let ranks = replica.drop_adapter(number);
                (ranks, replica.epoch())
            });
            let Some((ranks, epoch)) = dropped else { continue };
            let drop = AdapterChange::Drop(number);
            effects.extend(ranks.into_iter().map(|worker| told(worker, epoch, drop.clone())));
        }
    }

    /// The numbers of the adapters that a formation lists.
    pub(super) fn adapter_numbers(&self) -> BTreeSet<u32> {
        self.adapters.numbers()
    }

    /// A replica whose ranks have all started serves, once it has all adapters. Its ranks are told
    /// of one at a time: their queues are short.
    pub(super) fn serve_if_complete(
        &mut self,
        now: Duration,
        id: ReplicaId,
        effects: &mut Vec<Effect>,
    ) {
        let wanted = self.adapters.lora().adapters;
        let state = self.replicas.get(id).filter(|replica| replica.has_started());
        let Some(replica) = state else { return };
        if replica.is_loading_adapter() {
            return;
        }
        if let Some(adapter) = wanted.iter().find(|adapter| !replica.has(adapter.number)) {
            for rank in self.ask_for(id, adapter, effects) {
                self.pending_answers.expect(now, rank);
            }
            return;
        }
        let served = self
            .replicas
            .change(id, |replica| (replica.serve(now), replica.ranks(), replica.epoch()));
        let Some((Some((num_blocks, host_blocks)), ranks, epoch)) = served else { return };
        let step_tokens = self.replicas.get(id).map_or(0, Replica::step_tokens);
        for rank in &ranks {
            self.pending_answers.serves(*rank);
            self.failed_formations.serves(now, *rank);
            self.hung_steps.serves(now, *rank);
        }
        effects.push(Effect::ReplicaReady {
            replica: id,
            epoch,
            ranks,
            num_blocks,
            host_blocks,
            step_tokens,
        });
        // It was not there when the others were told.
        if let Some(adapter) = self.adapters.loads.front().map(|load| load.adapter.clone()) {
            self.ask_for(id, &adapter, effects);
        }
    }

    /// A replica is about to be broken.
    pub(super) fn breaks(&mut self, id: ReplicaId) {
        if let Some(load) = self.adapters.loads.front_mut()
            && let Some(replica) = self.replicas.get(id)
            && !replica.owing(load.adapter.number).is_empty()
        {
            load.broke += 1;
        }
    }

    /// Replicas have come or gone, or time has passed: the first load may be over.
    pub(super) fn settle_loads(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        if self.adapters.loads.front().is_some_and(|load| load.broke > BROKE_MAX) {
            let times = BROKE_MAX + 1;
            let message = format!("replicas broke {times} times while they were loading it");
            return self.end_load(now, Err(AdapterError::NotNow(message)), effects);
        }
        self.complete_load(now, effects);
        self.give_up_load(now, effects);
    }
}

fn told(worker: WorkerId, epoch: Epoch, change: AdapterChange) -> Effect {
    let message = ToWorker::Adapter(ChangeAdapter { epoch, change });
    Effect::Send { worker, epoch, message }
}
