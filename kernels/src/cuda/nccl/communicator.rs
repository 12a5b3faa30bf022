//! One communicator and the thread that watches it. NCCL's calls on it are made one at a time; none
//! waits for other ranks. Whoever aborts only says so: the watcher makes the call, which may wait
//! until the graphs that recorded collectives are gone.
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::library::{Comm, Config, Nccl, Status, UNIQUE_ID_BYTES, UniqueId};
use crate::collective::AbortHandle;
use crate::error::CollectiveError;

/// Errors that NCCL finds by itself are looked for this often.
const WATCH_INTERVAL: Duration = Duration::from_millis(20);
/// A call that goes on in the background is looked at without a pause for so long: every call does
/// for some microseconds, on a thread of NCCL's.
const SPIN: Duration = Duration::from_micros(200);
/// Between two looks after that.
const NAP: Duration = Duration::from_micros(50);
/// How long the watcher waits for a call under way before it aborts the communicator under it.
const CALL_PATIENCE: Duration = Duration::from_secs(1);
/// How long the end of a communicator is waited for.
const END_PATIENCE: Duration = Duration::from_secs(5);

pub(super) const ALGORITHM: &str = "nccl";

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Communicator {
    shared: Arc<Shared>,
    watcher: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    nccl: Arc<Nccl>,
    /// As in `state`, for one that cannot have its lock.
    comm: CommPtr,
    state: Mutex<State>,
    changed: Condvar,
    /// It is to be aborted, or was: no call is begun any more. As in `state`, to be read without
    /// waiting for a call.
    aborted: AtomicBool,
    /// What NCCL found wrong.
    fault: Mutex<Option<String>>,
}

#[derive(Debug)]
struct State {
    comm: Option<CommPtr>,
    /// The communicator is gone.
    ended: bool,
}

#[derive(Clone, Copy, Debug)]
struct CommPtr(Comm);
// SAFETY: NCCL allows calls from any thread; they are made one at a time, under the lock.
unsafe impl Send for CommPtr {}
// SAFETY: as above; the pointer itself is never changed.
unsafe impl Sync for CommPtr {}

/// Bytes for the other ranks to find this one by.
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
    /// Begins to connect this rank with the others; [`Communicator::connected`] ends it.
    pub(super) fn begin(
        nccl: Arc<Nccl>,
        id: [u8; UNIQUE_ID_BYTES],
        rank: u32,
        ranks: u32,
    ) -> Result<Self, CollectiveError> {
        let small = |n: u32| i32::try_from(n).unwrap_or(i32::MAX);
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
        if status != Status::SUCCESS && status != Status::IN_PROGRESS || comm.is_null() {
            return Err(failed(nccl.line(status, "connect to the other ranks")));
        }
        let shared = Arc::new(Shared {
            nccl,
            comm: CommPtr(comm),
            state: Mutex::new(State { comm: Some(CommPtr(comm)), ended: false }),
            changed: Condvar::new(),
            aborted: AtomicBool::new(false),
            fault: Mutex::new(None),
        });
        let watched = shared.clone();
        let name = "nccl watcher".to_owned();
        let watcher = std::thread::Builder::new().name(name).spawn(move || watched.watch());
        let watcher = watcher.map_err(|error| {
            shared.end();
            CollectiveError::Setup(format!("no thread to watch NCCL: {error}"))
        })?;
        Ok(Self { shared, watcher: Some(watcher) })
    }

    /// Waits until all ranks are connected.
    pub(super) fn connected(
        &self,
        timeout: Duration,
        is_given_up: &dyn Fn() -> bool,
    ) -> Result<(), CollectiveError> {
        self.settle("connect to the other ranks", timeout, is_given_up)
    }

    /// Makes a call on the communicator, and waits while NCCL goes on with it in the background.
    pub(super) fn call(
        &self,
        what: &'static str,
        timeout: Duration,
        call: impl FnOnce(&Nccl, Comm) -> i32,
    ) -> Result<(), CollectiveError> {
        let status = {
            let state = lock(&self.shared.state);
            let Some(CommPtr(comm)) = state.comm.filter(|_| !self.shared.is_aborted()) else {
                drop(state);
                return self.shared.poll();
            };
            Status(call(&self.shared.nccl, comm))
        };
        match status {
            Status::SUCCESS => Ok(()),
            Status::IN_PROGRESS => self.settle(what, timeout, &|| false),
            status => {
                let message = self.shared.nccl.line(status, what);
                self.shared.fail(message.clone());
                Err(failed(message))
            }
        }
    }

    /// Waits until no call goes on in the background.
    fn settle(
        &self,
        what: &'static str,
        timeout: Duration,
        is_given_up: &dyn Fn() -> bool,
    ) -> Result<(), CollectiveError> {
        let began = Instant::now();
        loop {
            self.shared.poll()?;
            if is_given_up() {
                self.shared.abort();
                return Err(CollectiveError::Aborted);
            }
            match self.shared.status() {
                None | Some(Status::SUCCESS) => return self.shared.poll(),
                Some(Status::IN_PROGRESS) => {}
                Some(status) => self.shared.fail(self.shared.nccl.line(status, what)),
            }
            let waited = began.elapsed();
            if waited > timeout {
                self.shared.abort();
                return Err(CollectiveError::Stalled { algorithm: ALGORITHM, waited: timeout });
            }
            if waited > SPIN {
                std::thread::sleep(NAP);
            } else {
                std::hint::spin_loop();
            }
        }
    }

    /// What has gone wrong.
    pub(super) fn poll(&self) -> Result<(), CollectiveError> {
        self.shared.poll()
    }

    pub(super) fn abort_handle(&self) -> Arc<dyn AbortHandle> {
        Arc::new(Handle(self.shared.clone()))
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.shared.abort();
        let state = lock(&self.shared.state);
        let ended = self.shared.changed.wait_timeout_while(state, END_PATIENCE, |s| !s.ended);
        let ended = ended.is_ok_and(|(state, _)| state.ended);
        // One that NCCL holds up stays behind.
        if ended && let Some(watcher) = self.watcher.take() {
            let _ = watcher.join();
        }
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

    /// Has the watcher abort it.
    fn abort(&self) {
        self.aborted.store(true, Ordering::Release);
        self.changed.notify_all();
    }

    /// Remembers the first thing that went wrong, and aborts: what the stream waits for may never
    /// come.
    fn fail(&self, message: String) {
        if !self.is_aborted() {
            lock(&self.fault).get_or_insert(message);
        }
        self.abort();
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

    /// What NCCL says of the communicator; none when it is gone.
    fn status(&self) -> Option<Status> {
        let state = lock(&self.state);
        let CommPtr(comm) = state.comm?;
        let mut found = 0;
        // SAFETY: the communicator is alive while it is in `state`; writes one int.
        let status = unsafe { (self.nccl.comm_get_async_error)(comm, &raw mut found) };
        Some(if status == 0 { Status(found) } else { Status(status) })
    }

    /// The watcher's life.
    fn watch(&self) {
        while !self.is_aborted() {
            match self.status() {
                None | Some(Status::SUCCESS | Status::IN_PROGRESS) => {}
                Some(status) => self.fail(self.nccl.line(status, "exchange data")),
            }
            let state = lock(&self.state);
            // An abort between the look above and here is seen at the next one.
            let _ = self
                .changed
                .wait_timeout_while(state, WATCH_INTERVAL, |_| !self.is_aborted())
                .map(drop);
        }
        self.end();
    }

    /// Aborts the communicator, which also frees it.
    fn end(&self) {
        let began = Instant::now();
        let comm = loop {
            match self.state.try_lock() {
                Ok(mut state) => break state.comm.take(),
                Err(TryLockError::Poisoned(state)) => break state.into_inner().comm.take(),
                // A call that does not come back is freed by the abort, too; its lock is not to be
                // had before.
                Err(TryLockError::WouldBlock) if began.elapsed() > CALL_PATIENCE => {
                    break Some(self.comm);
                }
                Err(TryLockError::WouldBlock) => std::thread::sleep(NAP),
            }
        };
        if let Some(CommPtr(comm)) = comm {
            // SAFETY: nobody begins a call with it from now on: it was taken out of `state`, or the
            // one call under way keeps others out.
            let _ = unsafe { (self.nccl.comm_abort)(comm) };
        }
        let mut state = lock(&self.state);
        state.comm = None;
        state.ended = true;
        drop(state);
        self.changed.notify_all();
    }
}
