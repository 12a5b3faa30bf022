//! Commands on their way to the executor: in order, bounded, and without those of epochs that are
//! over. A load goes on for minutes while the cluster around it changes; what was said of epochs
//! that came and went meanwhile must not fill the queue.
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use shared::ids::Epoch;

use super::{ExecutorCommand, ExecutorError};

/// Commands waiting for the executor. The coordinator keeps two steps in flight, so a queue this
/// long is full only if something is badly wrong.
pub(super) const COMMANDS_MAX: usize = 32;

/// A command, and over which link it came.
pub(super) type Queued = (u64, ExecutorCommand);

#[derive(Debug, Default)]
struct Shared {
    commands: Mutex<VecDeque<Queued>>,
    /// How many there are, for a look without the lock.
    count: AtomicUsize,
    /// One side is gone.
    over: AtomicBool,
    changed: Condvar,
    /// Since when a release waits or is executed, or when the executor last showed that it gets on.
    leaving_since: Mutex<Option<Instant>>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Queued>> {
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

/// The side that commands. Dropping it ends the other's waiting once all is taken.
#[derive(Debug)]
pub(super) struct Commands(Arc<Shared>);

/// The side that executes.
#[derive(Debug)]
pub(super) struct Receiver(Arc<Shared>);

pub(super) fn queue() -> (Commands, Receiver) {
    let shared = Arc::new(Shared::default());
    (Commands(shared.clone()), Receiver(shared))
}

/// Of which epoch of which link it is.
fn term(link: u64, command: &ExecutorCommand) -> Option<(u64, Epoch)> {
    let epoch = match command {
        ExecutorCommand::Form(form) => form.epoch,
        ExecutorCommand::Start(start) => start.epoch,
        ExecutorCommand::Step(plan) => plan.epoch,
        ExecutorCommand::Release(epoch) => *epoch,
        ExecutorCommand::Report => return None,
    };
    Some((link, epoch))
}

impl Commands {
    /// Queues a command; a release takes the place of what waits of epochs that are over by it.
    ///
    /// # Errors
    /// [`ExecutorError`].
    pub(super) fn push(&self, link: u64, command: ExecutorCommand) -> Result<(), ExecutorError> {
        let mut commands = self.0.lock();
        if self.0.over.load(Ordering::Acquire) {
            return Err(ExecutorError::Ended);
        }
        if let ExecutorCommand::Release(epoch) = command {
            commands.retain(|(of, it)| term(*of, it).is_none_or(|term| term > (link, epoch)));
        }
        if commands.len() >= COMMANDS_MAX {
            return Err(ExecutorError::Full);
        }
        if matches!(command, ExecutorCommand::Release(_)) {
            self.0.leaving_since().get_or_insert_with(Instant::now);
        }
        commands.push_back((link, command));
        self.0.count.store(commands.len(), Ordering::Release);
        drop(commands);
        self.0.changed.notify_one();
        Ok(())
    }

    /// For how long the executor has not left an epoch that it was told to leave, without a sign
    /// that it gets on with what it does.
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
    /// The next command, if there is one.
    pub(super) fn try_take(&self) -> Option<Queued> {
        if self.0.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        self.pop(&mut self.0.lock())
    }

    /// Waits for the next command; `None` when no more come.
    pub(super) fn take(&self) -> Option<Queued> {
        let mut commands = self.0.lock();
        // Whatever was under way is over.
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

    /// The executor gets on with what it does.
    pub(super) fn advances(&self) {
        if let Some(since) = &mut *self.0.leaving_since() {
            *since = Instant::now();
        }
    }

    fn pop(&self, commands: &mut VecDeque<Queued>) -> Option<Queued> {
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
