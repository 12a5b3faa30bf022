//! The executor: one OS thread that owns the rank and runs one command at a time.
//!
//! It enforces order and epochs: a command of an epoch that has ended does nothing. Its only
//! network IO is to hand messages to the [`Outbox`]; it never waits for the link.
//!
//! - `queue`: the commands that wait
//! - `adapters`: LoRA adapters that are loaded beside steps
mod adapters;
mod queue;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use shared::ids::{Epoch, StepId};
use shared::protocol::{
    AdapterDone, ChangeAdapter, Form, FormFailed, Formed, FromWorker, GroupId, LoadProgress,
    SequenceOutput, Start, Started, StepFailed, StepMasks, StepPlan, StepResult, TokenLogprobs,
    TokenMask, WorkerStats,
};
use shared::wire::codec;
use shared::wire::frame::BODY_MAX;
use tokio::sync::oneshot;

pub use self::adapters::AdapterPiece;
use self::queue::{COMMANDS_MAX, Commands, QueuedCommand, Receiver, queue};
use crate::rank::{AbortSlot, ExchangeStats, FormObserver, Rank, StepSource};

/// How long the executor's owner waits for the thread to end.
const END_PATIENCE: Duration = Duration::from_millis(200);
/// How long a rank waits for a step's masks: longer than the coordinator waits for whoever computes
/// them, and longer than it allows most steps.
const MASKS_PATIENCE: Duration = Duration::from_secs(60);
/// Minimum interval between reports of load progress.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(50);

/// A command to the executor.
#[derive(Debug)]
pub enum ExecutorCommand {
    /// Become a rank.
    Form(Form),
    /// Allocate the KV cache.
    Start(Start),
    /// Run a step.
    Step(StepPlan),
    /// The epoch has ended: drop its collective and cache, keep the weights.
    Release(Epoch),
    /// Report the stats, since there may be no step to carry them.
    Report,
    /// Load or drop an adapter.
    Adapter(ChangeAdapter),
    /// A piece of an adapter that is being read.
    Piece(AdapterPiece),
    /// More of an adapter's files is there.
    Fetched(LoadProgress),
    /// An adapter has been read, or cannot be.
    Read(AdapterDone),
}

/// Receives the executor's messages.
pub trait Outbox: Send {
    /// Sends one message to the coordinator, about a command that came over `link`. If that link
    /// has ended, the message is dropped: the peer of the next link may use the same epoch number.
    /// Must not block.
    fn send(&mut self, link: u64, message: FromWorker);
    /// Records a finished step of this plan and returns the cumulative stats to send with its
    /// result.
    fn step_finished(&mut self, plan: &StepPlan, result: &StepResult) -> WorkerStats;
    /// Records what a step, finished or not, exchanged with other ranks; before `step_finished`.
    fn exchanged(&mut self, exchanged: ExchangeStats) {
        let _ = exchanged;
    }
    /// Records a finished load.
    fn loaded(&mut self, form: &Form, formed: &Formed);
    /// Records that the rank is no longer in an epoch.
    fn released(&mut self) {}
    /// Returns the cumulative stats.
    fn report(&mut self) -> WorkerStats;
    /// Records that the device no longer works, and why: nothing is sent after this.
    fn device_lost(&mut self, reason: &str) {
        tracing::error!(reason, "the device is lost");
    }
}

/// Reports that are asked for.
#[derive(Debug, Default)]
struct Reports {
    /// Whether a command to report is queued.
    queued: AtomicBool,
    /// Whether a report was asked for since the last one was made.
    due: AtomicBool,
}

/// A handle to the executor thread. Dropping it ends the thread after the current command.
#[derive(Debug)]
pub struct Executor {
    commands: Option<Commands>,
    thread: Option<JoinHandle<()>>,
    abort: AbortSlot,
    /// Number of the current link; queued with each command, which may outlive the link.
    link: AtomicU64,
    reports: Arc<Reports>,
    /// Closed when the thread ends; for the first caller of [`Executor::ended`].
    ended: Option<oneshot::Receiver<Infallible>>,
    /// The same, for when the handle is dropped.
    over: mpsc::Receiver<Infallible>,
}

/// Why the executor does not accept a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExecutorError {
    /// Its queue is full.
    #[error("the executor has {COMMANDS_MAX} commands waiting and takes no more")]
    Full,
    /// Its thread has ended, because it panicked or its device is lost.
    #[error("the executor thread has ended")]
    Ended,
}

impl Executor {
    /// Starts the thread. `make_rank` runs on it, since a rank may hold things that must stay on
    /// one thread.
    ///
    /// # Errors
    /// When the operating system refuses a thread.
    pub fn spawn<R, M>(make_rank: M, outbox: impl Outbox + 'static) -> std::io::Result<Self>
    where
        R: Rank,
        M: FnOnce() -> R + Send + 'static,
    {
        let (commands, receiver) = queue();
        let abort = AbortSlot::default();
        let slot = abort.clone();
        let reports = Arc::<Reports>::default();
        let asked = reports.clone();
        let (lives, ended) = oneshot::channel::<Infallible>();
        let (runs, over) = mpsc::channel::<Infallible>();
        let thread = std::thread::Builder::new().name("executor".into()).spawn(move || {
            // Dropped last, even after a panic: whoever learns of the end finds the queue closed.
            // Captured variables would be dropped after everything declared here.
            let _lives = (lives, runs);
            let receiver = receiver;
            let rank = make_rank();
            let (entered, epoch, reading) = (0, None, BTreeMap::new());
            Loop { rank, outbox, abort: slot, entered, epoch, reading, reports: asked }
                .run(&receiver)
        })?;
        let (commands, thread, ended) = (Some(commands), Some(thread), Some(ended));
        Ok(Self { commands, thread, abort, link: AtomicU64::new(0), reports, ended, over })
    }

    /// Resolves to an error when the thread has ended; only the first caller gets it.
    pub fn ended(&mut self) -> Option<oneshot::Receiver<Infallible>> {
        self.ended.take()
    }

    /// Returns for how long the executor has failed to leave an epoch as told, without a sign of
    /// progress: its current command may never end.
    #[must_use]
    pub fn leaving_for(&self) -> Option<Duration> {
        self.commands.as_ref()?.leaving_for()
    }

    /// Queues a command.
    ///
    /// # Errors
    /// [`ExecutorError`].
    pub fn command(&self, command: ExecutorCommand) -> Result<(), ExecutorError> {
        let Some(commands) = &self.commands else { return Err(ExecutorError::Ended) };
        commands.push(self.link.load(Ordering::Relaxed), command)
    }

    /// Queues a report, unless one is already queued: a long step or load must not fill the queue.
    /// A rank that is being formed reports without the queue, with its progress.
    ///
    /// # Errors
    /// [`ExecutorError`].
    pub fn report(&self) -> Result<(), ExecutorError> {
        self.reports.due.store(true, Ordering::Relaxed);
        if self.reports.queued.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let queued = self.command(ExecutorCommand::Report);
        if queued.is_err() {
            self.reports.queued.store(false, Ordering::Relaxed);
        }
        queued
    }

    /// Ends `epoch`: aborts the executor's collective operation at once, then releases the epoch.
    pub fn abort(&self, epoch: Epoch) {
        self.abort.abort(epoch);
        // If the queue is full, the next Form releases it; queued commands of this epoch are
        // removed anyway.
        let _ = self.command(ExecutorCommand::Release(epoch));
    }

    /// Ends every epoch, because the link to the coordinator is gone.
    pub fn abort_all(&self) {
        self.abort(Epoch(u64::MAX));
    }

    /// Hands rank 0's group id to the rank that is being formed, bypassing the queue: the executor
    /// is in the middle of its command.
    pub fn tell_group_id(&self, id: GroupId) {
        self.abort.tell_group_id(id.epoch, id.bytes);
    }

    /// Hands over the masks of a planned step, bypassing the queue: the executor may be in the
    /// middle of that step, with the next step's plan ahead of them in the queue.
    pub fn tell_masks(&self, masks: StepMasks) {
        self.abort.tell_masks(masks);
    }

    /// Starts a new link; call it before the link's first message. All epochs of earlier links have
    /// ended, including those in queued commands; the new link's have not, whatever their numbers.
    /// Returns the link's number.
    pub fn new_link(&self) -> u64 {
        let link = self.abort.new_link();
        self.link.store(link, Ordering::Relaxed);
        link
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        self.abort.abort(Epoch(u64::MAX));
        drop(self.commands.take());
        // A device that hangs, or a long load, delays it; the process must end nonetheless.
        let Some(thread) = self.thread.take() else { return };
        if self.over.recv_timeout(END_PATIENCE) == Err(RecvTimeoutError::Disconnected) {
            let _ = thread.join();
        }
    }
}

/// Commands in order; the next one can be looked at before it is taken.
struct Inbox<'a> {
    commands: &'a Receiver,
    held: Option<QueuedCommand>,
}

impl Inbox<'_> {
    fn take(&mut self) -> Option<QueuedCommand> {
        self.held.take().or_else(|| self.commands.take())
    }
}

/// The queued steps of one epoch.
struct EpochSteps<'a, 'b> {
    inbox: &'a mut Inbox<'b>,
    term: (u64, Epoch),
    abort: &'a AbortSlot,
}

impl StepSource for EpochSteps<'_, '_> {
    fn peek(&mut self) -> Option<&StepPlan> {
        if self.inbox.held.is_none() {
            self.inbox.held = self.inbox.commands.try_take();
        }
        let (link, epoch) = self.term;
        match &self.inbox.held {
            Some((of, ExecutorCommand::Step(plan)))
                if (*of, plan.epoch) == (link, epoch) && !self.abort.is_aborted(epoch) =>
            {
                Some(plan)
            }
            _ => None,
        }
    }

    fn masks(&mut self, step: StepId) -> Result<Vec<Option<TokenMask>>, String> {
        let (_, epoch) = self.term;
        self.abort.wait_for_masks(epoch, step, MASKS_PATIENCE)
    }
}

/// Passes on what a rank reports while it is being formed.
struct FormReporter<'a, O> {
    link: u64,
    epoch: Epoch,
    /// When progress was last reported.
    last: Option<Instant>,
    outbox: &'a mut O,
    commands: &'a Receiver,
    abort: &'a AbortSlot,
    reports: &'a Reports,
}

impl<O: Outbox> FormReporter<'_, O> {
    /// Reports the stats if that is due: the command to do so is queued behind the load, which may
    /// take many minutes.
    fn report_if_due(&mut self) {
        if self.reports.due.swap(false, Ordering::Relaxed) {
            // Stats belong to no epoch: they may go over a link that has come since the load began.
            // It is looked up before they are made, so that they are not under a later one's slot.
            let link = self.abort.link();
            let stats = self.outbox.report();
            self.outbox.send(link, FromWorker::Stats(stats));
        }
    }
}

impl<O: Outbox> FormObserver for FormReporter<'_, O> {
    fn progress(&mut self, bytes_done: u64, bytes_total: u64) {
        self.commands.record_progress();
        self.report_if_due();
        let due = self.last.is_none_or(|last| last.elapsed() >= PROGRESS_INTERVAL);
        if due || bytes_done == bytes_total {
            self.last = Some(Instant::now());
            let (epoch, adapter) = (self.epoch, 0);
            let progress = LoadProgress { epoch, adapter, bytes_done, bytes_total };
            self.outbox.send(self.link, FromWorker::Progress(progress));
        }
    }

    fn group_id(&mut self, bytes: Vec<u8>) {
        let id = GroupId { epoch: self.epoch, bytes };
        self.outbox.send(self.link, FromWorker::GroupId(id));
    }
}

struct Loop<R, O> {
    rank: R,
    outbox: O,
    abort: AbortSlot,
    /// Link over which the current command came.
    entered: u64,
    /// The formed epoch, and the link over which it came.
    epoch: Option<(u64, Epoch)>,
    /// Adapters that are being read, and whether each has been dropped since.
    reading: BTreeMap<(Epoch, u32), Arc<AtomicBool>>,
    reports: Arc<Reports>,
}

impl<R: Rank, O: Outbox> Loop<R, O> {
    fn run(mut self, commands: &Receiver) {
        let mut idle_since = Instant::now();
        let mut inbox = Inbox { commands, held: None };
        while let Some((link, command)) = inbox.take() {
            let idle = idle_since.elapsed();
            self.entered = link;
            self.abort.enter(link);
            // A sign of life does not count as work: the idle time continues.
            let is_work =
                !matches!(&command, ExecutorCommand::Step(plan) if plan.sequences.is_empty());
            match command {
                ExecutorCommand::Form(form) => self.form(&form, commands),
                ExecutorCommand::Start(start) => self.start(start),
                ExecutorCommand::Step(plan) => self.step(&plan, idle, &mut inbox),
                ExecutorCommand::Adapter(command) => self.change_adapter(&command, commands),
                ExecutorCommand::Piece(piece) => self.put_adapter(piece),
                ExecutorCommand::Fetched(progress) => self.adapter_fetched(progress),
                ExecutorCommand::Read(done) => self.adapter_read(done),
                ExecutorCommand::Report => {
                    self.reports.queued.store(false, Ordering::Relaxed);
                    self.reports.due.store(false, Ordering::Relaxed);
                    let stats = self.outbox.report();
                    self.outbox.send(self.entered, FromWorker::Stats(stats));
                    // Nor does a report.
                    continue;
                }
                ExecutorCommand::Release(epoch) => {
                    if self.epoch.is_some_and(|current| current <= (link, epoch)) {
                        self.release();
                        // No step says so: a rank that was late with one, and then waits for
                        // others in silence, would pass for one that hangs.
                        let sign = FromWorker::Stats(WorkerStats::default());
                        self.outbox.send(link, sign);
                    }
                }
            }
            if let Some(reason) = self.rank.lost_device() {
                return self.outbox.device_lost(reason);
            }
            if is_work {
                idle_since = Instant::now();
            }
        }
    }

    fn release(&mut self) {
        self.rank.release();
        self.abort.clear();
        self.epoch = None;
        self.outbox.released();
    }

    fn form(&mut self, form: &Form, commands: &Receiver) {
        self.release();
        let epoch = form.epoch;
        if self.rank.lost_device().is_some() || self.abort.is_aborted(epoch) {
            return;
        }
        let link = self.entered;
        let mut observer = FormReporter {
            link,
            epoch,
            last: None,
            outbox: &mut self.outbox,
            commands,
            abort: &self.abort,
            reports: &self.reports,
        };
        match self.rank.form(form, &self.abort, &mut observer) {
            Ok(ready) => {
                self.epoch = Some((self.entered, epoch));
                let formed = Formed {
                    epoch,
                    kv_blocks: ready.kv_blocks,
                    host_blocks: ready.host_blocks,
                    weight_bytes: ready.weight_bytes,
                    load_seconds: ready.load_seconds,
                    identity: ready.identity,
                    adapters: ready.adapters,
                };
                self.outbox.loaded(form, &formed);
                self.outbox.send(self.entered, FromWorker::Formed(formed));
            }
            Err(error) => {
                self.outbox.exchanged(self.rank.take_exchanged());
                self.release();
                self.outbox.send(
                    self.entered,
                    FromWorker::FormFailed(FormFailed {
                        epoch,
                        message: error.message,
                        permanent: error.permanent,
                    }),
                );
            }
        }
    }

    fn start(&mut self, start: Start) {
        if self.epoch != Some((self.entered, start.epoch)) {
            return;
        }
        let epoch = start.epoch;
        match self.rank.start(start.num_blocks, start.host_blocks) {
            Ok(()) => self.outbox.send(self.entered, FromWorker::Started(Started { epoch })),
            Err(message) => {
                self.release();
                let failed = FormFailed { epoch, message, permanent: false };
                self.outbox.send(self.entered, FromWorker::FormFailed(failed));
            }
        }
    }

    fn step(&mut self, plan: &StepPlan, idle: Duration, inbox: &mut Inbox<'_>) {
        // An abort drops queued steps, but not the one that the step before it looked at.
        let is_over = self.abort.is_aborted(plan.epoch);
        if is_over || self.epoch != Some((self.entered, plan.epoch)) {
            return;
        }
        let began = Instant::now();
        let mut outputs = Vec::with_capacity(plan.sequences.len());
        let term = (self.entered, plan.epoch);
        let mut source = EpochSteps { inbox, term, abort: &self.abort };
        let stepped = self.rank.step(plan, &mut source, &mut outputs);
        self.abort.forget_masks(plan.epoch, plan.step);
        self.outbox.exchanged(self.rank.take_exchanged());
        match stepped {
            Ok(mut timings) => {
                timings.idle_us = micros(idle);
                timings.step_us = micros(began.elapsed());
                let mut result = StepResult {
                    epoch: plan.epoch,
                    step: plan.step,
                    outputs,
                    drafted: self.rank.drafted(),
                    digest: self.rank.digest(),
                    timings,
                    stats: WorkerStats::default(),
                };
                result.stats = self.outbox.step_finished(plan, &result);
                match fitting(result) {
                    Ok(result) => self.outbox.send(self.entered, result),
                    Err(message) => self.step_failed(plan, message),
                }
            }
            // The ranks no longer agree on what has been run.
            Err(message) => self.step_failed(plan, message),
        }
    }

    /// Ends the epoch, which is broken on all its ranks.
    fn step_failed(&mut self, plan: &StepPlan, message: String) {
        let (epoch, step) = (plan.epoch, plan.step);
        self.abort.abort_own(epoch);
        self.release();
        let failed = StepFailed { epoch, step, message };
        self.outbox.send(self.entered, FromWorker::StepFailed(failed));
    }
}

/// Makes the message that carries a result, if it fits into a frame: otherwise it would be lost,
/// and the coordinator would wait for it.
fn fitting(result: StepResult) -> Result<FromWorker, String> {
    let (at_most, step) = (encoded_max(&result), result.step);
    let message = FromWorker::Step(result);
    if at_most <= BODY_MAX as usize {
        return Ok(message);
    }
    // The exact size, which is mostly smaller.
    let bytes = codec::encode(&message).map_err(|error| error.to_string())?.len();
    if bytes <= BODY_MAX as usize {
        return Ok(message);
    }
    Err(format!(
        "the results of {step} take {bytes} bytes, and a frame has room for {BODY_MAX}: fewer \
         embeddings or log-probabilities of prompts fit into one step (a smaller \
         --max-num-batched-tokens or --max-num-seqs)"
    ))
}

/// Quickly computed upper bound of a result's encoded size, in bytes.
fn encoded_max(result: &StepResult) -> usize {
    // Numbers take up to 5 bytes, lengths and 64-bit numbers up to 9.
    let token = |it: &TokenLogprobs| 24 + it.top.len() * 9;
    let output = |it: &SequenceOutput| {
        let prompt: usize = it.prompt_logprobs.iter().map(token).sum();
        let own = it.logprobs.as_ref().map_or(0, token);
        64 + own + prompt + it.embedding.len() * size_of::<f32>()
    };
    let outputs: usize = result.outputs.iter().map(output).sum();
    256 + outputs + result.drafted.len() * 5 + result.stats.snapshot.len()
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
