//! LoRA adapters that come and go: operators' commands and the requests that name adapters, as in
//! `cluster::actor::adapters`; and how ranks fetch, read, hold and drop them, as in
//! `worker::executor::adapters` and `worker::engine_rank`.
use std::collections::{BTreeMap, BTreeSet};

use coordinator::adapters::AdapterUse;
use coordinator::cluster::Ticket;
use shared::ids::Epoch;
use shared::model_identity::ModelIdentity;
use shared::protocol::{
    Adapter, AdapterChange, AdapterCommand, AdapterDone, AdapterError, ChangeAdapter, Form,
    FromWorker, LoadProgress,
};

use crate::coordinator::Life;
use crate::events::Event;
use crate::executor::{Command, Job};
use crate::model::{OF_THE_HUB, contents_of, path_of};
use crate::random::mix;
use crate::scenario::{MS, S, Time};
use crate::world::World;

/// Interval at which whoever fetches says how far it is.
const SPEAKS_EVERY: Time = S;

/// An adapter in a place of a rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeldAdapter {
    contents: u64,
    /// Whether all of it is there.
    is_whole: bool,
}

/// A rank's adapters, by number.
pub(crate) type HeldAdapters = BTreeMap<u32, HeldAdapter>;

/// What the adapter with this number contains, if all of it is there; 0 for none.
pub(crate) fn contents_held(adapters: &HeldAdapters, number: u32) -> Result<u64, String> {
    match adapters.get(&number) {
        _ if number == 0 => Ok(0),
        Some(held) if held.is_whole => Ok(held.contents),
        _ => Err(format!("adapter {number} is not loaded")),
    }
}

/// What reads one adapter.
#[derive(Clone, Debug)]
pub(crate) struct Reader {
    /// The link and epoch of the command.
    term: (u64, Epoch),
    number: u32,
    contents: u64,
    /// Until when its files are fetched, and whether it says that it gets on.
    fetches: Option<(Time, bool)>,
    is_dropped: bool,
}

/// A download before a formation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Download {
    until: Time,
    speaks: bool,
}

/// A command whose outcome an operator waits for.
#[derive(Clone, Debug)]
pub(crate) struct AskedChange {
    pub(crate) life: Life,
    pub(crate) name: &'static str,
    /// What is to be loaded; `None` to unload it.
    pub(crate) contents: Option<u64>,
    pub(crate) since: Time,
}

fn contents(adapters: &[Adapter]) -> impl Iterator<Item = (u32, u64)> {
    adapters.iter().map(|adapter| (adapter.number, contents_of(&adapter.path)))
}

impl World {
    /// An operator tells the acting coordinator to load the adapter of a name, or to unload it.
    pub(crate) fn command_adapter(&mut self, name: &'static str, load: Option<(u64, bool)>) {
        if self.seats[self.coordinator.seat].frozen {
            return;
        }
        let (now, life, mut effects) = (self.time(), self.coordinator.life, Vec::new());
        let asked = AskedChange { life, name, contents: load.map(|(it, _)| it), since: self.now };
        let ticket = self.operators.ask(asked);
        let name = name.to_owned();
        let command = match load {
            Some((contents, replace)) => {
                AdapterCommand::Load { name, path: path_of(contents), replace }
            }
            None => AdapterCommand::Unload { name },
        };
        self.free_adapters();
        self.coordinator.core.change_adapters(now, ticket, command, &mut effects);
        self.carry_out(effects);
    }

    /// What the acting coordinator serves under a name.
    pub(crate) fn served_as(&self, name: &str) -> Option<u64> {
        let adapters = self.coordinator.core.adapters();
        adapters.iter().find(|it| it.name == name).map(|it| contents_of(&it.path))
    }

    /// A command is carried out, or cannot be.
    pub(crate) fn adapter_changed(&mut self, ticket: Ticket, outcome: &Result<(), AdapterError>) {
        let Some(asked) = self.operators.asked.remove(&ticket) else {
            return self.fail(format!("{ticket:?} is answered twice: {outcome:?}"));
        };
        self.say(|| format!("{asked:?}: {outcome:?}"));
        self.report.adapters_changed += u64::from(outcome.is_ok());
        self.report.adapters_refused += u64::from(outcome.is_err());
        if outcome.is_err() {
            return;
        }
        let served = self.served_as(asked.name);
        if served != asked.contents {
            return self.fail(format!("{asked:?} is done, and {served:?} is served"));
        }
        let led = self.etcd.led() == Some(self.seats[self.coordinator.seat].incarnation);
        let generation = self.coordinator.core.desired().generation;
        self.operators.note_change(&asked, generation, led);
    }

    /// Publishes the list of adapters.
    pub(crate) fn adapters_changed(&mut self) {
        let coordinator = &mut *self.coordinator;
        let gone = coordinator.served.replace(coordinator.core.adapters());
        coordinator.leaving.extend(gone);
    }

    /// Frees the places of unloaded adapters that no request uses any more.
    pub(crate) fn free_adapters(&mut self) {
        let (now, counts) = (self.time(), !self.switches.adapters_are_dropped_in_use);
        let coordinator = &mut *self.coordinator;
        let tracked = &coordinator.leaving;
        let in_use = |number| tracked.iter().any(|it| it.number == number && !it.is_unused());
        let leaving = coordinator.core.leaving_adapters().iter().map(|adapter| adapter.number);
        let unused: Vec<u32> = leaving.filter(|it| !(counts && in_use(*it))).collect();
        if unused.is_empty() {
            return;
        }
        coordinator.leaving.retain(|it| !unused.contains(&it.number));
        let mut effects = Vec::new();
        coordinator.core.adapters_unused(now, &unused, &mut effects);
        self.carry_out(effects);
    }

    /// The adapter that a client names, and its contents; `None` if nothing has that name now.
    pub(crate) fn adapter_for(&self, index: usize) -> Option<(AdapterUse, u64)> {
        let name = self.scenario.clients[index].adapter;
        if name.is_empty() {
            return Some((AdapterUse::default(), 0));
        }
        let adapter = self.coordinator.served.find(name)?;
        let known = contents(self.coordinator.core.adapters())
            .chain(contents(self.coordinator.core.leaving_adapters()))
            .find(|(number, _)| *number == adapter.number());
        Some((adapter, known?.1))
    }

    /// How long the slot's process fetches these contents, if they are not here; whether it speaks.
    fn fetch(&mut self, slot: usize, contents: u64) -> Option<Download> {
        if contents < OF_THE_HUB || self.processes[slot].fetched.contains(&contents) {
            return None;
        }
        let slow = self.processes[slot].slow_fetch.take();
        let (takes, speaks) = slow.unwrap_or((self.random.skewed(MS, 2 * S), true));
        if slow.is_some() {
            self.faulty_until(self.now + takes);
            self.disturb(slot, takes);
        }
        Some(Download { until: self.now + takes, speaks })
    }

    /// Returns a download that must be over before this formation goes on, if there is one. All
    /// that it needs counts as fetched then.
    pub(crate) fn missing_files(&mut self, slot: usize, form: &Form) -> Option<Download> {
        let listed: Vec<u64> = contents(&form.lora.adapters).map(|(_, it)| it).collect();
        listed.into_iter().filter_map(|it| self.fetch(slot, it)).max_by_key(|it| it.until)
    }

    /// Looks after a download before a formation.
    pub(crate) fn downloads(&mut self, slot: usize, form: Form, download: Download) {
        let executor = &self.processes[slot].executor;
        if executor.aborted >= (executor.entered, form.epoch) {
            return self.form_failed(slot, &form, "it is given up", false);
        }
        if self.now < download.until {
            if download.speaks {
                self.say_progress(slot, form.epoch);
            }
            let takes = (download.until - self.now).min(SPEAKS_EVERY);
            return self.begin_for(slot, Job::Download(form, download), takes);
        }
        let fetched = contents(&form.lora.adapters).map(|(_, it)| it);
        self.processes[slot].fetched.extend(fetched);
        self.connect(slot, form);
    }

    fn say_progress(&mut self, slot: usize, epoch: Epoch) {
        let progress = LoadProgress { epoch, adapter: 0, bytes_done: 1, bytes_total: 2 };
        self.tell(slot, FromWorker::Progress(progress));
    }

    /// A rank with its weights has the adapters of the list, and no others. Returns what tells
    /// their contents apart.
    pub(crate) fn match_adapters(&mut self, slot: usize, form: &Form, is_new: bool) -> u64 {
        let held = &mut self.processes[slot].executor.adapters;
        if is_new || !self.switches.listed_adapters_are_skipped {
            let whole = |contents| HeldAdapter { contents, is_whole: true };
            *held = contents(&form.lora.adapters).map(|(it, of)| (it, whole(of))).collect();
        }
        if form.lora.places == 0 {
            return 0;
        }
        let all: BTreeSet<u64> = contents(&form.lora.adapters).map(|(_, it)| it).collect();
        all.into_iter().fold(0, mix)
    }

    /// Begins to load an adapter, or drops one.
    pub(crate) fn change_adapter(&mut self, slot: usize, command: &ChangeAdapter) {
        let executor = &mut self.processes[slot].executor;
        let term = (executor.entered, command.epoch);
        if executor.epoch != Some(term) {
            return;
        }
        let adapter = match &command.change {
            AdapterChange::Drop(number) => {
                let its = executor.readers.values_mut().filter(|it| it.number == *number);
                its.for_each(|it| it.is_dropped = true);
                executor.adapters.remove(number);
                return;
            }
            AdapterChange::Load(adapter) => adapter,
        };
        let (number, contents) = (adapter.number, contents_of(&adapter.path));
        let held = executor.adapters.insert(number, HeldAdapter { contents, is_whole: false });
        if held.is_some() || executor.adapters.len() > self.scenario.places as usize {
            let count = self.processes[slot].executor.adapters.len();
            return self.fail(format!("slot {slot} is to load {number}, beside {count}: {held:?}"));
        }
        let fetches = self.fetch(slot, contents).map(|it| (it.until, it.speaks));
        let token = self.next_token;
        self.next_token += 1;
        let reader = Reader { term, number, contents, fetches, is_dropped: false };
        self.processes[slot].executor.readers.insert(token, reader);
        self.schedule(MS, Event::Reader { slot, token });
    }

    /// A reader has time.
    pub(crate) fn reads(&mut self, slot: usize, token: u64) {
        let executor = &mut self.processes[slot].executor;
        let Some(mut reader) = executor.readers.remove(&token) else { return };
        let (link, epoch) = reader.term;
        if executor.aborted >= reader.term || executor.link != link {
            return;
        }
        let number = reader.number;
        if let Some((until, speaks)) = reader.fetches.filter(|_| !reader.is_dropped) {
            let is_progress = |it: &(u64, Command)| matches!(it.1, Command::Fetched(_));
            let speaks = speaks && self.now < until && !executor.queue.iter().any(is_progress);
            let after = if self.now < until {
                (until - self.now).min(SPEAKS_EVERY)
            } else {
                self.processes[slot].fetched.insert(reader.contents);
                reader.fetches = None;
                self.random.skewed(MS, S)
            };
            self.processes[slot].executor.readers.insert(token, reader);
            self.schedule(after, Event::Reader { slot, token });
            if speaks {
                let (adapter, bytes_total) = (number, 2);
                let progress = LoadProgress { epoch, adapter, bytes_done: 1, bytes_total };
                self.read_says(slot, link, Command::Fetched(progress));
            }
            return;
        }
        let outcome = match std::mem::take(&mut self.processes[slot].fail_adapter) {
            true => Err("a tensor is not there".to_owned()),
            false if reader.is_dropped => Err("it is not wanted any more".to_owned()),
            false => Ok(ModelIdentity(reader.contents)),
        };
        self.read_says(slot, link, Command::Read(AdapterDone { epoch, number, outcome }));
    }

    /// A reader's word waits among the commands.
    fn read_says(&mut self, slot: usize, link: u64, command: Command) {
        self.processes[slot].executor.queue.push_back((link, command));
        if self.processes[slot].hung.is_none() {
            self.pump(slot);
        }
    }

    fn is_in(&self, slot: usize, epoch: Epoch) -> bool {
        let executor = &self.processes[slot].executor;
        executor.epoch == Some((executor.entered, epoch))
    }

    /// More of an adapter's files is there.
    pub(crate) fn adapter_fetched(&mut self, slot: usize, progress: LoadProgress) {
        if self.is_in(slot, progress.epoch) {
            self.tell(slot, FromWorker::Progress(progress));
        }
    }

    /// An adapter has been read, or cannot be.
    pub(crate) fn adapter_read(&mut self, slot: usize, done: AdapterDone) {
        if !self.is_in(slot, done.epoch) {
            return;
        }
        let held = &mut self.processes[slot].executor.adapters;
        if done.outcome.is_err() {
            held.remove(&done.number);
        } else if let Some(held) = held.get_mut(&done.number) {
            held.is_whole = true;
        }
        self.tell(slot, FromWorker::Adapter(done));
    }
}

/// Adapters that are not whole are given up with their epoch.
pub(crate) fn give_up(adapters: &mut HeldAdapters) {
    adapters.retain(|_, held| held.is_whole);
}
