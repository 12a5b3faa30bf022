//! A worker's executor, which runs one command at a time. It does what `worker::executor` does,
//! with this simulation's model.
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use kernels::CollectiveError;
use shared::ids::Epoch;
use shared::model_identity::ModelIdentity;
use shared::protocol::{
    AdapterChange, AdapterDone, ChangeAdapter, CollectiveSpec, Form, FormFailed, Formed,
    FromWorker, HeldShard, LoadProgress, SequenceOutput, Start, Started, StepFailed, StepMasks,
    StepPlan, StepResult, StepTimings, ToWorker, TokenMask, WorkerStats,
};

use crate::adapters::{Download, HeldAdapters, Reader, give_up};
use crate::engine::{Chooser, RankEngine};
use crate::events::Event;
use crate::model::{VOCABULARY, all_reduce, choose};
use crate::random::mix;
use crate::scenario::{MODEL, MS, S, Time};
use crate::world::World;

/// Same as in `worker::executor`.
const COMMANDS_MAX: usize = 32;
/// Same as in `worker::rank`.
const MASKS_MAX: usize = 4;
/// Same as in `worker::executor`.
const MASKS_PATIENCE: Time = 60 * S;
/// By then a rank on a CPU has come to its next layer, and sees that its epoch is over.
const LAYER: Time = 500 * MS;
/// Longer than in `worker::outbox`: encoding reports is most of the cost of a run.
const REPORT_INTERVAL: Time = 400 * MS;

#[derive(Clone, Debug)]
pub(crate) enum Command {
    Form(Form),
    Start(Start),
    /// Always a [`ToWorker::Step`].
    Step(Rc<ToWorker>),
    Release(Epoch),
    Report,
    Adapter(ChangeAdapter),
    /// What an adapter's reader says.
    Fetched(LoadProgress),
    Read(AdapterDone),
}

impl Command {
    /// Whether it counts among those of which only so many may wait.
    fn is_usual(&self) -> bool {
        match self {
            Self::Adapter(command) => matches!(command.change, AdapterChange::Load(_)),
            Self::Fetched(_) | Self::Read(_) => false,
            _ => true,
        }
    }
}

/// What the executor is doing.
#[derive(Debug)]
pub(crate) enum Job {
    /// Fetching what a formation needs.
    Download(Form, Download),
    /// Waiting for the other ranks to connect.
    Connect(Form),
    Load(Form),
    Start(Start),
    Compute(Rc<ToWorker>),
    /// Computed; waiting for masks.
    Masks(Rc<ToWorker>, Vec<u64>),
    /// Waiting for the other ranks' shares.
    Meet(Rc<ToWorker>),
    /// All shares are there.
    Met(Rc<ToWorker>, Vec<u32>),
}

/// The executor's collective.
#[derive(Debug)]
pub(crate) struct Collective {
    /// Where its ranks meet.
    place: u64,
    rank: u32,
    world_size: u32,
    tcp: bool,
    aborted: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Executor {
    /// Each with the number of the link over which it came.
    pub(crate) queue: VecDeque<(u64, Command)>,
    /// Number of the current link.
    pub(crate) link: u64,
    pub(crate) job: Option<Job>,
    /// Token of the event that ends the job.
    token: u64,
    pub(crate) began: Time,
    /// How long computing the current step takes.
    computes: Time,
    /// Whether that is because it stands still meanwhile.
    stands_still: bool,
    /// The link and epoch in which it is formed.
    pub(crate) epoch: Option<(u64, Epoch)>,
    /// Links and epochs up to this one have ended.
    pub(crate) aborted: (u64, Epoch),
    /// The link and epoch whose collective an abort reaches.
    handle: Option<(u64, Epoch)>,
    /// Link of the current command.
    pub(crate) entered: u64,
    /// Masks that have come but are not taken yet, each with its link.
    masks: VecDeque<(u64, StepMasks)>,
    collective: Option<Collective>,
    /// Rank and degree of the weights held.
    loaded: Option<(u32, u32)>,
    /// The adapters beside them, and what reads others.
    pub(crate) adapters: HeldAdapters,
    pub(crate) readers: BTreeMap<u64, Reader>,
    form: Option<Form>,
    /// Number of blocks that it has room for, as reported when it was formed.
    kv_blocks: u32,
    host_blocks: u32,
    engine: RankEngine,
}

/// Ranks that have arrived at the same point.
#[derive(Debug, Default)]
pub(crate) struct Meeting {
    ranks: Vec<Arrived>,
}

#[derive(Debug)]
pub(crate) struct Arrived {
    slot: usize,
    token: u64,
    rank: u32,
    /// Number of ranks that meet.
    world_size: u32,
    shares: Vec<u64>,
    choosers: Vec<Chooser>,
    plan: Option<Rc<ToWorker>>,
}

impl Executor {
    /// The weights that it holds.
    pub(crate) fn held(&self) -> Option<HeldShard> {
        let (rank, world_size) = self.loaded?;
        Some(HeldShard { model: MODEL.to_owned(), identity: ModelIdentity(1), rank, world_size })
    }
}

impl World {
    pub(crate) fn command(&mut self, slot: usize, command: Command) -> bool {
        let executor = &mut self.processes[slot].executor;
        let waiting = executor.queue.iter().filter(|(_, it)| it.is_usual()).count();
        if command.is_usual() && waiting >= COMMANDS_MAX {
            return false;
        }
        let (forms, leaves) = match command {
            Command::Form(_) => (true, false),
            Command::Release(_) => (false, true),
            _ => (false, false),
        };
        executor.queue.push_back((executor.link, command));
        if self.processes[slot].hung.is_some() {
            if leaves {
                // As in `Commands::push`: the commands that it replaces are gone.
                let queue = &mut self.processes[slot].executor.queue;
                let last = queue.pop_back();
                queue.retain(|(_, it)| matches!(it, Command::Report));
                queue.extend(last);
            }
            if forms || leaves {
                self.hung_is_asked(slot, leaves);
            }
            return true;
        }
        self.pump(slot);
        true
    }

    /// Does what `Executor::abort` does.
    pub(crate) fn abort(&mut self, slot: usize, epoch: Epoch) {
        let executor = &mut self.processes[slot].executor;
        let over = (executor.link, epoch);
        executor.aborted = executor.aborted.max(over);
        let reached = executor.handle.is_some_and(|current| current <= over);
        if reached && let Some(collective) = &mut executor.collective {
            collective.aborted = true;
        }
        if !self.switches.masks_are_for_anybody {
            executor.masks.retain(|(link, masks)| (*link, masks.epoch) > over);
        }
        let token = executor.token;
        let frees = match &executor.job {
            Some(Job::Masks(message, _)) => {
                let ToWorker::Step(plan) = &**message else { return };
                (executor.entered, plan.epoch) <= over
            }
            Some(Job::Meet(_)) => reached,
            Some(Job::Compute(message)) => {
                let ToWorker::Step(plan) = &**message else { return };
                let is_long = executor.began + executor.computes > self.now + LAYER;
                let on_cpu = !self.scenario.gpus[self.scenario.nodes[slot]];
                let is_over = (executor.entered, plan.epoch) <= over;
                is_over && is_long && on_cpu && !executor.stands_still
            }
            Some(Job::Connect(form)) => {
                (executor.entered, form.epoch) <= over && !self.switches.connecting_is_not_freed
            }
            _ => false,
        };
        if frees {
            let after = self.random.range(10, MS);
            self.schedule(after, Event::Broken { slot, token });
        }
        let _ = self.command(slot, Command::Release(epoch));
    }

    fn begin(&mut self, slot: usize, job: Job) -> u64 {
        let token = self.next_token;
        self.next_token += 1;
        let executor = &mut self.processes[slot].executor;
        executor.job = Some(job);
        executor.token = token;
        executor.began = self.now;
        token
    }

    pub(crate) fn begin_for(&mut self, slot: usize, job: Job, takes: Time) {
        let token = self.begin(slot, job);
        self.schedule(takes, Event::Executed { slot, token });
    }

    /// Starts the next command, if none is running.
    pub(crate) fn pump(&mut self, slot: usize) {
        while self.processes[slot].executor.job.is_none() && self.processes[slot].hung.is_none() {
            let executor = &mut self.processes[slot].executor;
            let Some((link, command)) = executor.queue.pop_front() else { return };
            let link = if self.switches.old_commands_run { executor.link } else { link };
            executor.entered = link;
            match command {
                Command::Form(form) => self.form(slot, form),
                Command::Start(start) => {
                    if self.processes[slot].executor.epoch == Some((link, start.epoch)) {
                        let takes = self.random.range(MS, 20 * MS);
                        self.begin_for(slot, Job::Start(start), takes);
                    }
                }
                Command::Step(message) => self.step(slot, message),
                Command::Release(epoch) => {
                    let current = self.processes[slot].executor.epoch;
                    if current.is_some_and(|current| current <= (link, epoch)) {
                        self.release(slot);
                    }
                }
                Command::Report => {
                    let stats = self.stats(slot);
                    self.tell(slot, FromWorker::Stats(stats));
                }
                Command::Adapter(command) => self.change_adapter(slot, &command),
                Command::Fetched(progress) => self.adapter_fetched(slot, progress),
                Command::Read(done) => self.adapter_read(slot, done),
            }
        }
    }

    pub(crate) fn release(&mut self, slot: usize) {
        self.leave_collective(slot);
        let executor = &mut self.processes[slot].executor;
        executor.handle = None;
        executor.epoch = None;
        give_up(&mut executor.adapters);
        if !self.switches.keeps_cache {
            self.processes[slot].executor.engine.release();
        }
    }

    fn form(&mut self, slot: usize, form: Form) {
        self.release(slot);
        let executor = &mut self.processes[slot].executor;
        if executor.aborted >= (executor.entered, form.epoch) {
            return;
        }
        match self.missing_files(slot, &form) {
            Some(download) => self.downloads(slot, form, download),
            None => self.connect(slot, form),
        }
    }

    /// Meets the other ranks.
    pub(crate) fn connect(&mut self, slot: usize, form: Form) {
        let (place, world_size, rank) = (self.place_of(&form), form.world_size, form.rank);
        let alone = form.collective == CollectiveSpec::None;
        let token = self.begin(slot, Job::Connect(form));
        if alone {
            return self.schedule(1, Event::Executed { slot, token });
        }
        let arrived = Arrived {
            slot,
            token,
            rank,
            world_size,
            shares: Vec::new(),
            choosers: Vec::new(),
            plan: None,
        };
        self.meet((place, 0), arrived);
    }

    /// Returns where the ranks of a collective meet: a place that no other epoch of any coordinator
    /// has.
    fn place_of(&self, form: &Form) -> u64 {
        if self.switches.collectives_share_names {
            return form.epoch.0 % 4;
        }
        format!("{:?}", form.collective).bytes().fold(0, |hash, byte| mix(hash, u64::from(byte)))
    }

    fn step(&mut self, slot: usize, message: Rc<ToWorker>) {
        let ToWorker::Step(plan) = &*message else { return };
        let process = &mut self.processes[slot];
        let term = (process.executor.entered, plan.epoch);
        if process.executor.epoch != Some(term) && !self.switches.runs_any_epoch {
            return;
        }
        let rows: u64 = plan.sequences.iter().map(|entry| u64::from(entry.count)).sum();
        let stall = std::mem::take(&mut process.stall);
        let slowed = process.slowed;
        let takes = self.random.range(200, self.scenario.step) * slowed + rows * 10 + stall;
        // The longest steps are within the timeout: a slow rank is not a hung one.
        let bound = self.scenario.limits.step_timeout.as_micros() as Time;
        let takes = if stall == 0 { takes.min(bound * 4 / 5) } else { takes };
        if stall > 0 || slowed > 1 {
            self.faulty_until(self.now + takes);
        }
        if stall > 0 {
            self.disturb(slot, takes);
        }
        let executor = &mut self.processes[slot].executor;
        (executor.computes, executor.stands_still) = (takes, stall > 0);
        self.begin_for(slot, Job::Compute(message), takes);
    }

    /// The job's time has passed.
    pub(crate) fn executed(&mut self, slot: usize, token: u64) {
        if self.processes[slot].executor.token != token || self.processes[slot].hung.is_some() {
            return;
        }
        match self.processes[slot].executor.job.take() {
            Some(Job::Download(form, download)) => self.downloads(slot, form, download),
            Some(Job::Connect(form)) => self.connected(slot, form),
            Some(Job::Load(form)) => self.loaded(slot, form),
            Some(Job::Start(start)) => self.started(slot, start),
            Some(Job::Compute(message)) => self.computed(slot, message),
            Some(Job::Met(message, tokens)) => self.step_finished(slot, &message, &tokens),
            Some(job @ (Job::Meet(_) | Job::Masks(..))) => {
                self.processes[slot].executor.job = Some(job)
            }
            None => {}
        }
        self.pump(slot);
    }

    fn connected(&mut self, slot: usize, form: Form) {
        let place = self.place_of(&form);
        let executor = &mut self.processes[slot].executor;
        let term = (executor.entered, form.epoch);
        executor.handle = Some(term);
        executor.collective = Some(Collective {
            place,
            rank: form.rank,
            world_size: form.world_size,
            tcp: matches!(form.collective, CollectiveSpec::Tcp { .. }),
            aborted: executor.aborted >= term,
        });
        if let Some(permanent) = self.processes[slot].fail_form.take() {
            return self.form_failed(slot, &form, "the file is not there", permanent);
        }
        if self.processes[slot].executor.loaded == Some((form.rank, form.world_size)) {
            return self.loaded(slot, form);
        }
        let progress =
            LoadProgress { epoch: form.epoch, adapter: 0, bytes_done: 1, bytes_total: 2 };
        self.tell(slot, FromWorker::Progress(progress));
        let takes = self.random.range(MS, self.scenario.load) * self.processes[slot].slowed.min(2);
        self.begin_for(slot, Job::Load(form), takes);
    }

    fn loaded(&mut self, slot: usize, form: Form) {
        let (low, high) = self.scenario.blocks;
        let kv_blocks = self.random.range(low, high) as u32;
        let (low, high) = self.scenario.host_blocks;
        let host_blocks = if high > 0 { self.random.range(low, high) as u32 } else { 0 };
        let shard = Some((form.rank, form.world_size));
        let is_new = self.processes[slot].executor.loaded != shard;
        let adapters = self.match_adapters(slot, &form, is_new);
        let process = &mut self.processes[slot];
        process.executor.loaded = shard;
        process.executor.epoch = Some((process.executor.entered, form.epoch));
        process.stats().formed(form.replica, form.rank);
        let formed = Formed {
            epoch: form.epoch,
            kv_blocks,
            host_blocks,
            weight_bytes: 1,
            load_seconds: 0.0,
            identity: ModelIdentity(1),
            adapters,
        };
        process.executor.form = Some(form);
        process.executor.kv_blocks = kv_blocks;
        process.executor.host_blocks = host_blocks;
        self.tell(slot, FromWorker::Formed(formed));
    }

    pub(crate) fn form_failed(&mut self, slot: usize, form: &Form, why: &str, permanent: bool) {
        self.release(slot);
        let failed = FormFailed { epoch: form.epoch, message: why.to_owned(), permanent };
        self.tell(slot, FromWorker::FormFailed(failed));
    }

    fn started(&mut self, slot: usize, start: Start) {
        let executor = &mut self.processes[slot].executor;
        let Some(form) = &executor.form else { return };
        let config = form.engine.clone();
        let room = executor.kv_blocks;
        if start.num_blocks > room || start.host_blocks > executor.host_blocks {
            let (blocks, epoch) = (start.num_blocks, start.epoch);
            return self.fail(format!("slot {slot} is given {blocks} blocks of {room} in {epoch}"));
        }
        if !self.switches.keeps_cache || !executor.engine.fits(start.num_blocks) {
            executor.engine.start(config, start.num_blocks, start.host_blocks);
        }
        self.tell(slot, FromWorker::Started(Started { epoch: start.epoch }));
    }

    fn computed(&mut self, slot: usize, message: Rc<ToWorker>) {
        let ToWorker::Step(plan) = &*message else { return };
        if self.processes[slot].executor.engine.is_poisoned(plan) {
            self.say(|| format!("slot {slot} crashes by what it computes"));
            self.report.poisoned += 1;
            self.kill(slot);
            self.disturb(slot, 0);
            let after = self.random.skewed(50 * MS, S);
            return self.start_again(slot, after);
        }
        if self.processes[slot].steps_hang {
            // It waits for what never comes. An abort reaches it like one that waits for others.
            let point = (u64::MAX, self.next_token);
            let (shares, choosers) = (Vec::new(), Vec::new());
            let token = self.begin(slot, Job::Meet(message.clone()));
            let (rank, world_size, plan) = (0, u32::MAX, Some(message));
            let waits = Arrived { slot, token, rank, world_size, shares, choosers, plan };
            self.meetings.entry(point).or_default().ranks.push(waits);
            return;
        }
        if std::mem::take(&mut self.processes[slot].fail_step) {
            return self.step_failed(slot, plan, "the device failed");
        }
        let executor = &mut self.processes[slot].executor;
        executor.engine.believes_drafts = self.switches.drafts_are_believed;
        executor.engine.keeps_rejected = self.switches.rejected_drafts_stay;
        let is_first = executor.collective.as_ref().is_none_or(|it| it.rank == 0);
        executor.engine.drafts_alone = self.switches.drafts_are_not_told && !is_first;
        let shares = match executor.engine.run(plan, &executor.adapters, &self.switches) {
            Ok(shares) => shares,
            // Other tokens make other drafts right, so the next plan does not fit this rank's
            // state.
            Err(_) if executor.engine.has_other_tokens => {
                return self.step_failed(slot, plan, "the plan does not fit");
            }
            Err(why) => {
                return self.fail(format!("slot {slot} refuses a plan of {}: {why}", plan.epoch));
            }
        };
        // Rank 0 chooses.
        let chooses = executor.collective.as_ref().is_none_or(|it| it.rank == 0);
        if !chooses || !plan.sequences.iter().any(|entry| entry.masked) {
            return self.exchange(slot, message, shares, &[]);
        }
        if executor.aborted >= (executor.entered, plan.epoch) {
            return self.step_failed(slot, plan, "its epoch was over before its masks came");
        }
        let token = self.begin(slot, Job::Masks(message, shares));
        self.schedule(MASKS_PATIENCE, Event::Deadline { slot, token });
        if !self.look_for_masks(slot) {
            self.report.masks_awaited += 1;
        }
    }

    /// Masks have come; does what `AbortSlot::tell_masks` does.
    pub(crate) fn tell_masks(&mut self, slot: usize, masks: &StepMasks) {
        let executor = &mut self.processes[slot].executor;
        let term = (executor.link, masks.epoch);
        if executor.aborted >= term && !self.switches.masks_are_for_anybody {
            return;
        }
        if executor.masks.len() >= MASKS_MAX {
            executor.masks.pop_front();
        }
        executor.masks.push_back((executor.link, masks.clone()));
        if self.processes[slot].hung.is_none() && self.look_for_masks(slot) {
            self.pump(slot);
        }
    }

    /// Continues the current step if its masks have come.
    fn look_for_masks(&mut self, slot: usize) -> bool {
        let any = self.switches.masks_are_for_anybody;
        let executor = &mut self.processes[slot].executor;
        let Some(Job::Masks(message, _)) = &executor.job else { return false };
        let ToWorker::Step(plan) = &**message else { return false };
        let own = (executor.entered, plan.epoch, plan.step);
        let count = plan.sequences.iter().filter(|entry| entry.masked).count();
        let is_own = |(link, masks): &(u64, StepMasks)| {
            (*link, masks.epoch, masks.step) == own || (any && masks.masks.len() == count)
        };
        let Some(at) = executor.masks.iter().position(is_own) else { return false };
        let Some((_, masks)) = executor.masks.remove(at) else { return false };
        if masks.masks.len() != count {
            self.fail(format!("slot {slot} gets {} masks for {count}", masks.masks.len()));
        }
        let Some(Job::Masks(message, shares)) = self.processes[slot].executor.job.take() else {
            return false;
        };
        self.exchange(slot, message, shares, &masks.masks);
        true
    }

    /// Meets the other ranks, if there are any; ranks that choose know the masks.
    fn exchange(
        &mut self,
        slot: usize,
        message: Rc<ToWorker>,
        shares: Vec<u64>,
        masks: &[Option<TokenMask>],
    ) {
        let ToWorker::Step(plan) = &*message else { return };
        let executor = &mut self.processes[slot].executor;
        let mut choosers = executor.engine.choosers(plan, masks);
        if self.switches.masks_are_ignored {
            choosers.iter_mut().for_each(|chooser| chooser.allowed = None);
        }
        let Some(collective) = &executor.collective else { return };
        if collective.world_size == 1 {
            let tokens = tokens_of(&[shares], &choosers);
            return self.step_finished(slot, &message, &tokens);
        }
        let (world_size, rank) = (collective.world_size, collective.rank);
        let left = collective.tcp && self.left.contains(&collective.place);
        if collective.aborted || left {
            return self.step_failed(slot, plan, "the collective was aborted");
        }
        let point = (collective.place, plan.step.0);
        let token = self.begin(slot, Job::Meet(message.clone()));
        let plan = Some(message);
        self.meet(point, Arrived { slot, token, rank, world_size, shares, choosers, plan });
    }

    /// A rank has arrived at a point where it waits for the others.
    fn meet(&mut self, point: (u64, u64), arrived: Arrived) {
        let timeout = self.scenario.collective_timeout;
        self.schedule(timeout, Event::Deadline { slot: arrived.slot, token: arrived.token });
        let meeting = self.meetings.entry(point).or_default();
        meeting.ranks.push(arrived);
        if meeting.ranks.len() < meeting.ranks[0].world_size as usize {
            return;
        }
        let there = |slot: &usize| meeting.ranks.iter().any(|rank| rank.slot == *slot);
        if self.apart.iter().any(|slots| slots.iter().all(there)) {
            // Until their deadline.
            return;
        }
        let Some(meeting) = self.meetings.remove(&point) else { return };
        let first = &meeting.ranks[0];
        if meeting.ranks.iter().any(|rank| rank.plan != first.plan) {
            return self.fail(format!("the ranks run different plans at {point:?}"));
        }
        let shares: Vec<Vec<u64>> = meeting.ranks.iter().map(|rank| rank.shares.clone()).collect();
        let chooses = meeting.ranks.iter().find(|rank| rank.rank == 0).unwrap_or(first);
        let tokens = tokens_of(&shares, &chooses.choosers);
        for rank in &meeting.ranks {
            let executor = &mut self.processes[rank.slot].executor;
            if let Some(Job::Meet(message)) = &executor.job {
                executor.job = Some(Job::Met(message.clone(), tokens.clone()));
            }
            let after = self.random.range(10, 300);
            self.schedule(after, Event::Executed { slot: rank.slot, token: rank.token });
        }
    }

    /// What the executor waits for will not come: it was aborted, others left, or it took too long.
    pub(crate) fn broken(&mut self, slot: usize, token: u64) {
        if self.processes[slot].executor.token != token || self.processes[slot].hung.is_some() {
            return;
        }
        let is_masks = |job: &mut Job| matches!(job, Job::Masks(..));
        if let Some(Job::Masks(message, _)) = self.processes[slot].executor.job.take_if(is_masks) {
            let ToWorker::Step(plan) = &*message else { return };
            self.step_failed(slot, plan, "its masks did not come");
            return self.pump(slot);
        }
        let is_step = |job: &mut Job| matches!(job, Job::Compute(_));
        if let Some(Job::Compute(message)) = self.processes[slot].executor.job.take_if(is_step) {
            let ToWorker::Step(plan) = &*message else { return };
            self.step_failed(slot, plan, "the collective was aborted");
            return self.pump(slot);
        }
        let waits = |job: &mut Job| matches!(job, Job::Connect(_) | Job::Meet(_));
        let in_meeting = |meeting: &Meeting| meeting.ranks.iter().any(|rank| rank.token == token);
        if !self.meetings.values().any(in_meeting) {
            // All ranks have arrived: that event is already scheduled.
            return;
        }
        match self.processes[slot].executor.job.take_if(waits) {
            Some(Job::Connect(form)) => {
                self.form_failed(slot, &form, "the other ranks did not connect", false);
            }
            Some(Job::Meet(message)) => {
                let ToWorker::Step(plan) = &*message else { return };
                let waited = std::time::Duration::from_secs(30);
                let error = CollectiveError::TimedOut { op: "all_reduce", waited, rank: 0 };
                self.step_failed(slot, plan, &error.to_string());
            }
            _ => return,
        }
        self.pump(slot);
    }

    fn step_failed(&mut self, slot: usize, plan: &StepPlan, why: &str) {
        let (epoch, step) = (plan.epoch, plan.step);
        let executor = &mut self.processes[slot].executor;
        executor.aborted = executor.aborted.max((executor.entered, epoch));
        self.release(slot);
        let failed = StepFailed { epoch, step, message: why.to_owned() };
        self.tell(slot, FromWorker::StepFailed(failed));
    }

    fn step_finished(&mut self, slot: usize, message: &Rc<ToWorker>, tokens: &[u32]) {
        let ToWorker::Step(plan) = &**message else { return };
        let process = &mut self.processes[slot];
        let mut learned = tokens.to_vec();
        let alone = process.executor.collective.as_ref().is_none_or(|it| it.world_size == 1);
        if !alone
            && let Some(token) = learned.first_mut()
            && std::mem::take(&mut process.diverge)
        {
            // Two ranks that diverge at once do not agree either.
            *token = (*token + 1 + slot as u32) % VOCABULARY;
        }
        let (mut outputs, digest): (Vec<SequenceOutput>, u32) =
            process.executor.engine.sampled(plan, tokens, &learned);
        let mut drafted = process.executor.engine.told(plan);
        if process.executor.collective.as_ref().is_none_or(|it| it.rank != 0) {
            outputs.clear();
            drafted.clear();
        }
        if self.switches.drafted_is_not_told {
            drafted.clear();
        }
        if !self.switches.masks_are_for_anybody {
            let over = (process.executor.entered, plan.epoch, plan.step);
            let is_needed = |(link, masks): &(u64, StepMasks)| {
                (*link, masks.epoch) > (over.0, over.1) || masks.step > over.2
            };
            process.executor.masks.retain(is_needed);
        }
        let forward_us = process.executor.computes;
        let timings = StepTimings { step_us: 1000, forward_us, ..StepTimings::default() };
        process.stats().step(&timings);
        let due = process.last_report.is_none_or(|last| self.now - last >= REPORT_INTERVAL);
        let stats = if due { self.stats(slot) } else { WorkerStats::default() };
        let (epoch, step) = (plan.epoch, plan.step);
        let result = StepResult { epoch, step, outputs, drafted, digest, timings, stats };
        self.tell(slot, FromWorker::Step(result));
    }

    /// Leaves the collective. With TCP, the others notice.
    pub(crate) fn leave_collective(&mut self, slot: usize) {
        for meeting in self.meetings.values_mut() {
            meeting.ranks.retain(|rank| rank.slot != slot);
        }
        self.meetings.retain(|_, meeting| !meeting.ranks.is_empty());
        let Some(collective) = self.processes[slot].executor.collective.take() else { return };
        if !collective.tcp {
            return;
        }
        let place = collective.place;
        self.left.insert(place);
        let others: Vec<(usize, u64)> = self
            .meetings
            .iter()
            .filter(|((of, step), _)| *of == place && *step > 0)
            .flat_map(|(_, meeting)| meeting.ranks.iter().map(|rank| (rank.slot, rank.token)))
            .collect();
        for (slot, token) in others {
            let after = self.random.range(10, MS);
            self.schedule(after, Event::Broken { slot, token });
        }
    }
}

/// Computes the tokens of the sampled rows, in order, from the ranks' shares.
fn tokens_of(shares: &[Vec<u64>], choosers: &[Chooser]) -> Vec<u32> {
    let sampled = choosers.iter().enumerate();
    sampled
        .map(|(index, Chooser { last, seed, choice, allowed })| {
            let of_ranks: Vec<u64> = shares.iter().map(|rank| rank[index]).collect();
            choose(all_reduce(&of_ranks), *last, (*seed, *choice), allowed.as_ref())
        })
        .collect()
}
