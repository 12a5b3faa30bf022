//! One communicator and the thread that watches it. NCCL's calls on it are made one at a time; none
//! of them should wait for other ranks, and the watcher never waits for one that does. An abort
//! only sets a flag: the watcher makes the actual call, which waits until the graphs that recorded
//! collectives are gone and, with most versions and in most containers, until the other ranks of
//! this host have aborted theirs or have ended. A rank that stands still does neither, so the
//! watcher is left to wait for it, with what NCCL holds, and this rank goes on: it may have to tell
//! the coordinator, which tells the others. What is left behind is waited for when the rank joins
//! others again.
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::library::{Comm, Config, Nccl, Status, UNIQUE_ID_BYTES, UniqueId};
use crate::collective::AbortHandle;
use crate::cuda::context::{Context, RetainedContext};
use crate::cuda::group::GroupEnd;
use crate::error::{CollectiveError, KernelError};

/// Interval between checks for errors that NCCL detects by itself.
const WATCH_INTERVAL: Duration = Duration::from_millis(20);
/// Time to spin on a call that continues in the background: every call does for some microseconds,
/// on a thread of NCCL's.
const SPIN: Duration = Duration::from_micros(200);
/// Interval between checks after that.
const NAP: Duration = Duration::from_micros(50);
/// Time that the watcher waits for a call in progress, including one that continues in the
/// background, before it aborts the communicator under it.
const CALL_PATIENCE: Duration = Duration::from_secs(1);
/// Maximum wait for the end of a call in progress, when a communicator is ended; it takes longer
/// than [`CALL_PATIENCE`] only if the abort has to end the call.
const END_PATIENCE: Duration = Duration::from_secs(3);
/// Maximum wait for NCCL to release it after that, before it is left behind.
const RELEASE_PATIENCE: Duration = Duration::from_millis(100);
/// The same for one that is still connecting: NCCL notices only between the steps of that, of which
/// some search the host or the network. No kernel of it is on the GPU, so nothing is urgent.
const UNCONNECTED_PATIENCE: Duration = Duration::from_secs(30);
/// Communicators of this process that may be left behind at a time: each keeps some hundred
/// megabytes of its GPU's memory.
const LEFT_MOST: usize = 4;
/// Maximum wait for those that are left behind: ranks learn at about the same time that an epoch is
/// over, and may then be in a call for [`CALL_PATIENCE`].
const LEFT_PATIENCE: Duration = Duration::from_secs(3);
/// Number of communicators that are left behind, and what signals that it has become less.
static LEFT: Mutex<usize> = Mutex::new(0);
static LESS: Condvar = Condvar::new();

/// Waits until at most `most` communicators are left behind, for at most [`LEFT_PATIENCE`]. Returns
/// their number, locked.
fn left_at_most(most: usize) -> MutexGuard<'static, usize> {
    let waited = LESS.wait_timeout_while(lock(&LEFT), LEFT_PATIENCE, |left| *left > most);
    waited.unwrap_or_else(PoisonError::into_inner).0
}

/// Waits for the communicators that this process has left behind. If some are still there, it says
/// so in one line.
pub(in crate::cuda) fn await_left() -> Option<String> {
    let left = *left_at_most(0);
    (left > 0).then(|| {
        format!(
            "NCCL has not released a communicator {LEFT_PATIENCE:?} after its abort, as when \
             another rank of this host does not leave it; it is left behind, with its memory on \
             the GPU ({left} of at most {LEFT_MOST})"
        )
    })
}

pub(super) const ALGORITHM: &str = "nccl";

/// A communicator and its watcher; see the module.
#[derive(Debug)]
pub(super) struct Communicator {
    shared: Arc<Shared>,
    watcher: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    nccl: Arc<Nccl>,
    /// The same as in `calls`, for use without its lock.
    comm: CommPtr,
    /// Held during NCCL's calls.
    calls: Mutex<Calls>,
    /// Set once the communicator is, or is about to be, aborted: no call begins any more.
    aborted: AtomicBool,
    /// Set if it was aborted under a call that did not return.
    torn: AtomicBool,
    /// Never held during any other wait.
    stage: Mutex<Stage>,
    /// Signals changes of `aborted` and `stage`.
    changed: Condvar,
    /// Error that NCCL reported.
    fault: Mutex<Option<String>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The communicator is there, and a call on it may be in progress.
    There,
    /// No call is in progress, and NCCL is releasing it.
    Ending,
    /// Nobody waits for its end any more.
    LeftBehind,
    /// It is gone.
    Gone,
}

/// Why a call has not been made, or has come to nothing.
#[derive(Debug)]
pub(super) struct CallError {
    pub(super) error: CollectiveError,
    /// NCCL could not do on this rank what the call asked for. Otherwise it is over for another
    /// reason: an abort, another rank, time.
    pub(super) is_own: bool,
}

impl From<CollectiveError> for CallError {
    fn from(error: CollectiveError) -> Self {
        Self { error, is_own: false }
    }
}

#[derive(Debug)]
struct Calls {
    comm: Option<CommPtr>,
    /// NCCL continues a call in the background: its thread may be adding to a stream, or to the
    /// graph that is captured from it.
    under_way: bool,
}

#[derive(Clone, Copy, Debug)]
struct CommPtr(Comm);
// SAFETY: NCCL allows calls from any thread; they are made one at a time, under the lock.
unsafe impl Send for CommPtr {}
// SAFETY: as above; the pointer itself is never changed.
unsafe impl Sync for CommPtr {}

/// Id that the other ranks connect with.
pub(super) fn unique_id(nccl: &Nccl) -> Result<[u8; UNIQUE_ID_BYTES], CollectiveError> {
    let mut id = UniqueId([0; UNIQUE_ID_BYTES]);
    // SAFETY: writes the id.
    let status = Status(unsafe { (nccl.get_unique_id)(&raw mut id) });
    match status {
        Status::SUCCESS => Ok(id.0),
        status => Err(failed(nccl.line(status, "make a unique id"))),
    }
}

fn failed(message: String) -> CollectiveError {
    CollectiveError::Failed { algorithm: ALGORITHM, message }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Communicator {
    /// Begins to connect this rank with the others; [`Communicator::connected`] waits for the
    /// result.
    pub(super) fn begin(
        nccl: Arc<Nccl>,
        context: &Context,
        id: [u8; UNIQUE_ID_BYTES],
        rank: u32,
        ranks: u32,
    ) -> Result<Self, KernelError> {
        let small = |n: u32| i32::try_from(n).unwrap_or(i32::MAX);
        let retained = context.retain()?;
        let mut comm = std::ptr::null_mut();
        let mut config = Config::non_blocking();
        // SAFETY: a context is current on this thread; writes the communicator, reads the
        // configuration. The communicator is aborted, and so freed, by the watcher.
        let status = Status(unsafe {
            (nccl.comm_init)(
                &raw mut comm,
                small(ranks),
                UniqueId(id),
                small(rank),
                &raw mut config,
            )
        });
        let begun = matches!(status, Status::SUCCESS | Status::IN_PROGRESS) && !comm.is_null();
        let fault = (!begun).then(|| nccl.line(status, "connect to the other ranks"));
        if let (Some(fault), true) = (&fault, comm.is_null()) {
            return Err(failed(fault.clone()).into());
        }
        let shared = Arc::new(Shared {
            nccl,
            comm: CommPtr(comm),
            calls: Mutex::new(Calls { comm: Some(CommPtr(comm)), under_way: false }),
            aborted: AtomicBool::new(false),
            torn: AtomicBool::new(false),
            stage: Mutex::new(Stage::There),
            changed: Condvar::new(),
            fault: Mutex::new(None),
        });
        let watched = shared.clone();
        let name = "nccl watcher".to_owned();
        let watcher = std::thread::Builder::new().name(name).spawn(move || watched.watch(retained));
        let watcher = watcher.map_err(|error| {
            shared.end(None);
            CollectiveError::Setup(format!("cannot start the thread that watches NCCL: {error}"))
        })?;
        let mut made = Self { shared, watcher: Some(watcher) };
        // A communicator that failed to begin still has to be freed.
        match fault {
            Some(fault) => {
                made.shared.fail(fault.clone());
                made.end_unconnected().map_err(|reason| context.hangs(reason))?;
                Err(failed(fault).into())
            }
            None => Ok(made),
        }
    }

    /// Waits until all ranks are connected.
    pub(super) fn connected(
        &self,
        timeout: Duration,
        is_given_up: &dyn Fn() -> bool,
    ) -> Result<(), CollectiveError> {
        let settled = self.settle("connect to the other ranks", timeout, is_given_up);
        settled.map_err(|failure| failure.error)
    }

    /// Makes a call on the communicator, and waits while it continues in the background.
    pub(super) fn call(
        &self,
        what: &'static str,
        timeout: Duration,
        call: impl FnOnce(&Nccl, Comm) -> i32,
    ) -> Result<(), CallError> {
        let status = {
            let mut calls = lock(&self.shared.calls);
            let Some(CommPtr(comm)) = calls.comm.filter(|_| !self.shared.is_aborted()) else {
                drop(calls);
                return self.shared.poll().map_err(CallError::from);
            };
            let status = Status(call(&self.shared.nccl, comm));
            calls.under_way = status == Status::IN_PROGRESS;
            status
        };
        match status {
            Status::SUCCESS => Ok(()),
            Status::IN_PROGRESS => self.settle(what, timeout, &|| false),
            // Ignored if it was aborted within the call.
            status => self.shared.fails_with(status, what),
        }
    }

    /// Waits until no call continues in the background; if the communicator is aborted meanwhile,
    /// no longer than the watcher waits.
    fn settle(
        &self,
        what: &'static str,
        timeout: Duration,
        is_given_up: &dyn Fn() -> bool,
    ) -> Result<(), CallError> {
        let began = Instant::now();
        loop {
            let (is_pending, found) = match self.shared.status() {
                None | Some(Status::SUCCESS) => (false, Ok(())),
                Some(Status::IN_PROGRESS) => (true, Ok(())),
                Some(status) => (false, self.shared.fails_with(status, what)),
            };
            if let Err(error) = found.and_then(|()| self.shared.poll().map_err(CallError::from)) {
                self.shared.wait_until_idle();
                return Err(error);
            }
            if !is_pending {
                return Ok(());
            }
            let waited = began.elapsed();
            let ended = match is_given_up() {
                true => Some(CollectiveError::Aborted),
                false if waited > timeout => {
                    Some(CollectiveError::Stalled { algorithm: ALGORITHM, waited: timeout })
                }
                false => None,
            };
            if let Some(error) = ended {
                self.shared.abort();
                self.shared.wait_until_idle();
                return Err(error.into());
            }
            if waited > SPIN {
                std::thread::sleep(NAP);
            } else {
                std::hint::spin_loop();
            }
        }
    }

    /// Reports what has gone wrong.
    pub(super) fn poll(&self) -> Result<(), CollectiveError> {
        self.shared.poll()
    }

    pub(super) fn abort_handle(&self) -> Arc<dyn AbortHandle> {
        Arc::new(Handle(self.shared.clone()))
    }

    /// Aborts the communicator, and waits until it is gone; if NCCL does not release it, it is left
    /// behind with its watcher. The graphs that recorded its calls must already be gone.
    ///
    /// # Errors
    /// A message, if too many have been left behind.
    pub(super) fn end(&mut self) -> Result<GroupEnd, String> {
        self.end_within(RELEASE_PATIENCE)
    }

    /// The same for one that has not connected.
    ///
    /// # Errors
    /// Like [`Self::end`].
    pub(super) fn end_unconnected(&mut self) -> Result<GroupEnd, String> {
        self.end_within(UNCONNECTED_PATIENCE)
    }

    /// Aborts the communicator, and waits until it is gone or this has been given up, for at most
    /// `patience`.
    pub(super) fn abort_for(&self, patience: Duration, is_given_up: &dyn Fn() -> bool) {
        self.shared.abort();
        let began = Instant::now();
        // Asked without the lock: whoever gives up may be about to abort this communicator.
        while began.elapsed() < patience && !is_given_up() {
            if self.shared.wait_while(WATCH_INTERVAL, |stage| stage != Stage::Gone) == Stage::Gone {
                return;
            }
        }
    }

    fn end_within(&mut self, patience: Duration) -> Result<GroupEnd, String> {
        self.shared.abort();
        let Some(watcher) = self.watcher.take() else { return Ok(GroupEnd::Released) };
        self.shared.wait_while(END_PATIENCE, |stage| stage == Stage::There);
        if self.shared.wait_while(patience, |stage| stage != Stage::Gone) == Stage::Gone {
            let _ = watcher.join();
            return Ok(GroupEnd::Released);
        }
        let mut left = left_at_most(LEFT_MOST - 1);
        if *left >= LEFT_MOST {
            return Err(format!(
                "NCCL has not released {LEFT_MOST} communicators since their abort, nor another \
                 one: it hangs"
            ));
        }
        let mut stage = lock(&self.shared.stage);
        if *stage != Stage::Gone {
            *stage = Stage::LeftBehind;
            *left += 1;
        }
        Ok(GroupEnd::LeftBehind)
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // Anyone interested in the result has called `end` before.
        let _ = self.end();
    }
}

#[derive(Debug)]
struct Handle(Arc<Shared>);

impl AbortHandle for Handle {
    fn abort(&self) {
        self.0.abort();
    }
}

impl Shared {
    fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }

    /// Makes the watcher abort the communicator.
    fn abort(&self) {
        // Locked so that the watcher cannot miss the notification between its check and its wait.
        let stage = lock(&self.stage);
        self.aborted.store(true, Ordering::Release);
        drop(stage);
        self.changed.notify_all();
    }

    /// Records the first error and aborts, since data that the stream waits for may never arrive.
    fn fail(&self, message: String) {
        if !self.is_aborted() {
            lock(&self.fault).get_or_insert(message);
        }
        self.abort();
    }

    /// Waits while the stage is such, for at most `patience`; returns the stage.
    fn wait_while(&self, patience: Duration, is_such: impl Fn(Stage) -> bool) -> Stage {
        let stage = lock(&self.stage);
        let waited = self.changed.wait_timeout_while(stage, patience, |stage| is_such(*stage));
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// The result of a call that ended with this status.
    fn fails_with(&self, status: Status, what: &str) -> Result<(), CallError> {
        let is_own = status.is_own() && !self.is_aborted();
        self.fail(self.nccl.line(status, what));
        self.poll().map_err(|error| CallError { error, is_own })
    }

    fn poll(&self) -> Result<(), CollectiveError> {
        if !self.is_aborted() {
            return Ok(());
        }
        match &*lock(&self.fault) {
            Some(message) => Err(failed(message.clone())),
            None => Err(CollectiveError::Aborted),
        }
    }

    /// Status of the communicator; `None` if it is gone.
    fn status(&self) -> Option<Status> {
        self.poll_status(&mut lock(&self.calls))
    }

    fn poll_status(&self, calls: &mut Calls) -> Option<Status> {
        let CommPtr(comm) = calls.comm.filter(|_| !self.torn.load(Ordering::Acquire))?;
        let mut found = 0;
        // SAFETY: the communicator is alive while it is in `calls` and not torn; writes one int.
        let status = unsafe { (self.nccl.comm_get_async_error)(comm, &raw mut found) };
        let status = if status == 0 { Status(found) } else { Status(status) };
        calls.under_way &= status == Status::IN_PROGRESS;
        Some(status)
    }

    /// Waits until NCCL has finished the call in progress, as long as the watcher does.
    fn wait_until_idle(&self) {
        let began = Instant::now();
        while began.elapsed() < CALL_PATIENCE {
            let mut calls = lock(&self.calls);
            if self.poll_status(&mut calls).is_none() || !calls.under_way {
                return;
            }
            drop(calls);
            std::thread::sleep(NAP);
        }
    }

    /// Main loop of the watcher. It claims the GPU's context until the communicator is gone: one
    /// that is left behind may outlive the claim of the rank, which loads something else meanwhile.
    fn watch(&self, context: RetainedContext) {
        // Otherwise NCCL would create a context on the first GPU.
        context.set_current();
        while !self.is_aborted() {
            // A thread that is in a call learns of errors from the call.
            let status = match self.calls.try_lock() {
                Ok(mut calls) => self.poll_status(&mut calls),
                Err(_) => None,
            };
            match status {
                None | Some(Status::SUCCESS | Status::IN_PROGRESS) => {}
                Some(status) => self.fail(self.nccl.line(status, "exchange data")),
            }
            let stage = lock(&self.stage);
            let _ = self
                .changed
                .wait_timeout_while(stage, WATCH_INTERVAL, |_| !self.is_aborted())
                .map(drop);
        }
        self.end(Some(context));
    }

    /// Aborts the communicator, which also frees it; then nothing needs its claim to the context.
    fn end(&self, context: Option<RetainedContext>) {
        let began = Instant::now();
        let comm = loop {
            let is_late = began.elapsed() > CALL_PATIENCE;
            match self.calls.try_lock() {
                Ok(mut calls) => {
                    self.poll_status(&mut calls);
                    if !calls.under_way || is_late {
                        if !calls.under_way {
                            *lock(&self.stage) = Stage::Ending;
                            self.changed.notify_all();
                        }
                        break calls.comm.take();
                    }
                }
                Err(TryLockError::Poisoned(calls)) => break calls.into_inner().comm.take(),
                // The abort also ends a call that does not return; its lock is not available before
                // that.
                Err(TryLockError::WouldBlock) if is_late => {
                    self.torn.store(true, Ordering::Release);
                    break Some(self.comm);
                }
                Err(TryLockError::WouldBlock) => {}
            }
            std::thread::sleep(NAP);
        };
        if let Some(CommPtr(comm)) = comm {
            // SAFETY: no call on it begins from now on: it was taken out of `calls`, or the call in
            // progress holds the lock, and `torn` is set.
            let _ = unsafe { (self.nccl.comm_abort)(comm) };
        }
        drop(context);
        let was = std::mem::replace(&mut *lock(&self.stage), Stage::Gone);
        if was == Stage::LeftBehind {
            *lock(&LEFT) -= 1;
            LESS.notify_all();
        }
        self.changed.notify_all();
    }
}
