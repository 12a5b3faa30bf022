//! Commands to the executor: in order, bounded, and without those of ended epochs. A load takes
//! minutes while the cluster changes; commands of epochs that came and went meanwhile must not fill
//! the queue.
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use shared::ids::Epoch;
use shared::protocol::lora::ADAPTERS_MAX;
use shared::protocol::{AdapterChange, ChangeAdapter};

use super::{ExecutorCommand, ExecutorError};

/// Maximum number of queued commands, without those that are counted apart (see [`Kind`]). The
/// coordinator keeps two steps in flight, so a full queue means that something is badly wrong.
pub(super) const COMMANDS_MAX: usize = 32;

/// Maximum number of queued commands to drop an adapter, which are counted apart: while a rank is
/// being formed, all its adapters may be unloaded.
const DROPS_MAX: usize = 2 * ADAPTERS_MAX;

/// A command, and the link over which it came.
pub(super) type QueuedCommand = (u64, ExecutorCommand);

#[derive(Debug, Default)]
struct Shared {
    commands: Mutex<VecDeque<QueuedCommand>>,
    /// Length of the queue, for checks without the lock.
    count: AtomicUsize,
    /// Set when either side is dropped.
    over: AtomicBool,
    changed: Condvar,
    /// When the oldest pending release was queued, or when the executor last reported progress.
    leaving_since: Mutex<Option<Instant>>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, VecDeque<QueuedCommand>> {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn leaving_since(&self) -> MutexGuard<'_, Option<Instant>> {
        self.leaving_since.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self) {
        let commands = self.lock();
        self.over.store(true, Ordering::Release);
        drop(commands);
        self.changed.notify_all();
    }
}

/// The sending side. When it is dropped, the receiver ends after taking all queued commands.
#[derive(Debug)]
pub(super) struct Commands(Arc<Shared>);

/// The receiving side.
#[derive(Debug)]
pub(super) struct Receiver(Arc<Shared>);

pub(super) fn queue() -> (Commands, Receiver) {
    let shared = Arc::new(Shared::default());
    (Commands(shared.clone()), Receiver(shared))
}

/// The link and epoch of a command.
fn term(link: u64, command: &ExecutorCommand) -> Option<(u64, Epoch)> {
    let epoch = match command {
        ExecutorCommand::Form(form) => form.epoch,
        ExecutorCommand::Start(start) => start.epoch,
        ExecutorCommand::Step(plan) => plan.epoch,
        ExecutorCommand::Release(epoch) => *epoch,
        ExecutorCommand::Adapter(command) => command.epoch,
        ExecutorCommand::Piece(piece) => piece.epoch,
        ExecutorCommand::Fetched(progress) => progress.epoch,
        ExecutorCommand::Read(done) => done.epoch,
        ExecutorCommand::Report => return None,
    };
    Some((link, epoch))
}

/// What is counted together, so that it takes no room from the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Usual,
    /// Drops an adapter.
    Drop,
    /// How far a reader's files are; the newest is enough.
    Fetched,
    /// The outcome of a reader: there is one for each adapter that a queued command told to load,
    /// and without it the adapter would keep its place.
    Read,
}

impl Kind {
    fn of(command: &ExecutorCommand) -> Self {
        match command {
            ExecutorCommand::Adapter(ChangeAdapter { change: AdapterChange::Drop(_), .. }) => {
                Self::Drop
            }
            ExecutorCommand::Fetched(_) => Self::Fetched,
            ExecutorCommand::Read(_) => Self::Read,
            _ => Self::Usual,
        }
    }

    /// How many of this kind may be queued.
    const fn max(self) -> usize {
        match self {
            Self::Usual => COMMANDS_MAX,
            Self::Drop => DROPS_MAX,
            Self::Fetched => 1,
            Self::Read => usize::MAX,
        }
    }
}

impl Shared {
    /// Queues a command; a release replaces the queued commands of epochs that it ends.
    ///
    /// # Errors
    /// [`ExecutorError`].
    pub(super) fn push(&self, link: u64, command: ExecutorCommand) -> Result<(), ExecutorError> {
        let mut commands = self.lock();
        if self.over.load(Ordering::Acquire) {
            return Err(ExecutorError::Ended);
        }
        if let ExecutorCommand::Release(epoch) = command {
            commands.retain(|(of, it)| term(*of, it).is_none_or(|term| term > (link, epoch)));
        }
        let kind = Kind::of(&command);
        let queued = commands.iter().filter(|(_, it)| Kind::of(it) == kind).count();
        if queued >= kind.max() {
            return Err(ExecutorError::Full);
        }
        if matches!(command, ExecutorCommand::Release(_)) {
            self.leaving_since().get_or_insert_with(Instant::now);
        }
        commands.push_back((link, command));
        self.count.store(commands.len(), Ordering::Release);
        drop(commands);
        self.changed.notify_one();
        Ok(())
    }
}

/// Queues commands from another thread; unlike [`Commands`], the receiver does not end with it.
#[derive(Debug)]
pub(super) struct Aside(Arc<Shared>);

impl Aside {
    /// See [`Commands::push`].
    ///
    /// # Errors
    /// [`ExecutorError`].
    pub(super) fn push(&self, link: u64, command: ExecutorCommand) -> Result<(), ExecutorError> {
        self.0.push(link, command)
    }
}

impl Commands {
    /// Queues a command; a release replaces the queued commands of epochs that it ends.
    ///
    /// # Errors
    /// [`ExecutorError`].
    pub(super) fn push(&self, link: u64, command: ExecutorCommand) -> Result<(), ExecutorError> {
        self.0.push(link, command)
    }

    /// Returns for how long the executor has failed to leave an epoch as told, without progress.
    pub(super) fn leaving_for(&self) -> Option<Duration> {
        self.0.leaving_since().map(|since| since.elapsed())
    }
}

impl Drop for Commands {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl Receiver {
    /// Takes the next command, if there is one.
    pub(super) fn try_take(&self) -> Option<QueuedCommand> {
        if self.0.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        self.pop(&mut self.0.lock())
    }

    /// Waits for the next command; `None` if no more will come.
    pub(super) fn take(&self) -> Option<QueuedCommand> {
        let mut commands = self.0.lock();
        // The previous command has ended.
        let leaves = commands.iter().any(|(_, it)| matches!(it, ExecutorCommand::Release(_)));
        *self.0.leaving_since() = leaves.then(Instant::now);
        loop {
            if let Some(next) = self.pop(&mut commands) {
                return Some(next);
            }
            if self.0.over.load(Ordering::Acquire) {
                return None;
            }
            commands = self.0.changed.wait(commands).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// For another thread that queues commands.
    pub(super) fn aside(&self) -> Aside {
        Aside(self.0.clone())
    }

    /// Records progress of the executor.
    pub(super) fn record_progress(&self) {
        if let Some(since) = &mut *self.0.leaving_since() {
            *since = Instant::now();
        }
    }

    fn pop(&self, commands: &mut VecDeque<QueuedCommand>) -> Option<QueuedCommand> {
        let next = commands.pop_front();
        self.0.count.store(commands.len(), Ordering::Release);
        next
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.0.end();
    }
}
