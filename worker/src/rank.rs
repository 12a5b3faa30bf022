//! What the executor drives: one rank of a replica, from forming to steps.
//!
//! The trait is the seam between message handling (epochs, order, deadlines: [`crate::executor`])
//! and arithmetic ([`crate::engine`] over a `kernels::Backend`). Only the executor thread calls it;
//! other threads only touch [`AbortSlot`].
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kernels::collective::{AbortHandle, ByteCounters};
use shared::ids::{Epoch, StepId};
use shared::model_identity::ModelIdentity;
use shared::protocol::{
    Adapter, Form, SequenceOutput, StepMasks, StepPlan, StepTimings, TokenMask,
};

use crate::model::lora::Piece;

/// Number of steps whose masks are held until asked for. The coordinator has two steps in flight.
const MASKS_MAX: usize = 4;

/// One rank.
pub trait Rank {
    /// Connects the collective and loads the shard, or keeps the weights if the same shard is asked
    /// for.
    ///
    /// # Errors
    /// See [`FormError`]; the rank is then as if it had never been formed.
    fn form(
        &mut self,
        form: &Form,
        abort: &AbortSlot,
        observer: &mut dyn FormObserver,
    ) -> Result<RankReady, FormError>;

    /// Allocates the KV cache, and blocks in host memory to swap to.
    ///
    /// # Errors
    /// One sentence.
    fn start(&mut self, num_blocks: u32, host_blocks: u32) -> Result<(), String>;

    /// Runs one step. Appends to `outputs` on rank 0. While it waits for its device it may begin
    /// the next step, which it finds in `source` and which must then be the next call's.
    ///
    /// # Errors
    /// One sentence; the epoch has then ended.
    fn step(
        &mut self,
        plan: &StepPlan,
        source: &mut dyn StepSource,
        outputs: &mut Vec<SequenceOutput>,
    ) -> Result<StepTimings, String>;

    /// Reserves a place for an adapter, and returns what reads its matrices on another thread.
    ///
    /// # Errors
    /// One sentence.
    fn open_adapter(&mut self, adapter: &Adapter) -> Result<AdapterReading, String> {
        Err(format!("adapter {} cannot be loaded here", adapter.name))
    }

    /// Takes a piece of an adapter that is being read.
    ///
    /// # Errors
    /// One sentence.
    fn put_adapter(&mut self, number: u32, piece: &Piece) -> Result<(), String> {
        let _ = piece;
        Err(format!("adapter {number} is not being loaded"))
    }

    /// All of an adapter's pieces are there: plans may use it from now on.
    fn complete_adapter(&mut self, number: u32, identity: ModelIdentity) {
        let _ = (number, identity);
    }

    /// Frees an adapter's place.
    fn drop_adapter(&mut self, number: u32) {
        let _ = number;
    }

    /// Returns the digest of the last step's tokens on this rank.
    fn digest(&self) -> u32;

    /// Returns the number of tokens that the draft model drafted in the last step for each sequence
    /// that it was asked about, on rank 0.
    fn drafted(&self) -> Vec<u32> {
        Vec::new()
    }

    /// Leaves the epoch: drops the collective and the KV cache, keeps the weights.
    fn release(&mut self);

    /// Returns what it exchanged with other ranks since the last call.
    fn take_exchanged(&mut self) -> ExchangeStats {
        ExchangeStats { is_timed: true, ..ExchangeStats::default() }
    }

    /// Returns why this rank's device no longer works, if so: then only another process helps.
    fn lost_device(&self) -> Option<&str> {
        None
    }
}

/// Reads an adapter and hands over its pieces, until one is not wanted; returns what its folder
/// contains.
pub type AdapterReading =
    Box<dyn FnOnce(&mut dyn AdapterSink) -> Result<ModelIdentity, String> + Send>;

/// What becomes of an adapter that is being read.
pub trait AdapterSink {
    /// Takes a piece; returns whether the next one is wanted.
    fn take(&mut self, piece: Piece) -> bool;

    /// Its files are still being fetched: so many bytes are there, of so many, if more than before.
    /// Returns whether they are still wanted.
    fn fetches(&mut self, news: Option<(u64, u64)>) -> bool;
}

/// What a rank reports while it is being formed.
pub trait FormObserver {
    /// `done` bytes of weights are loaded, of `total`.
    fn progress(&mut self, done: u64, total: u64);
    /// Rank 0's NCCL unique id, for the other ranks.
    fn group_id(&mut self, bytes: Vec<u8>);
}

/// A rank's data exchange with the other ranks of its replica.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExchangeStats {
    /// Bytes it sent, by algorithm.
    pub bytes: ByteCounters,
    /// Exchanges that were aborted, failed, or were not finished in time.
    pub unfinished: u64,
    /// Whether their duration is known: devices that exchange data by themselves do not report it.
    pub is_timed: bool,
}

/// Gives access to queued steps and to the masks of the step that is being run.
pub trait StepSource {
    /// Returns the next step of the epoch, if it has arrived, without taking it.
    fn peek(&mut self) -> Option<&StepPlan>;

    /// Waits for the masks of a step's masked entries, in their order; call it once per step.
    ///
    /// # Errors
    /// One sentence if they do not come.
    fn masks(&mut self, step: StepId) -> Result<Vec<Option<TokenMask>>, String>;
}

/// A source without steps and masks.
#[derive(Clone, Copy, Debug)]
pub struct EmptyStepSource;

impl StepSource for EmptyStepSource {
    fn peek(&mut self) -> Option<&StepPlan> {
        None
    }

    fn masks(&mut self, _: StepId) -> Result<Vec<Option<TokenMask>>, String> {
        Err("no masks come here".to_owned())
    }
}

/// What a formed rank reports.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RankReady {
    /// Number of KV blocks that fit in the memory allowed.
    pub kv_blocks: u32,
    /// Number of KV blocks that fit in the host memory for swapping.
    pub host_blocks: u32,
    /// Bytes of weights held.
    pub weight_bytes: u64,
    /// Seconds spent loading; 0 if weights were kept.
    pub load_seconds: f64,
    /// Identity of the model folder's contents.
    pub identity: ModelIdentity,
    /// Fingerprint of the adapters, where they come and go.
    pub adapters: u64,
}

/// Why a rank could not be formed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct FormError {
    /// One sentence naming file, tensor or peer, and the reason.
    pub message: String,
    /// Whether trying again with the same model cannot help.
    pub permanent: bool,
}

/// Lets other threads abort the collective operation that the executor is in, and hand it data that
/// it waits for there.
///
/// Each coordinator counts epochs itself, so an epoch is identified together with the link over
/// which it came. The executor may lag behind: it may still be in a command of an earlier link when
/// the next link is up.
#[derive(Clone, Debug, Default)]
pub struct AbortSlot {
    inner: Arc<Slot>,
}

#[derive(Debug, Default)]
struct Slot {
    state: Mutex<SlotState>,
    /// Notified when masks or a group id have come, or an epoch has ended.
    changed: Condvar,
}

/// A link's number, which grows from link to link, and an epoch that came over it.
type LinkEpoch = (u64, Epoch);

#[derive(Default)]
struct SlotState {
    /// The current or last link.
    link: u64,
    /// The link over which the executor's current command came.
    entered: u64,
    /// The last term that has ended, and all before it.
    aborted: LinkEpoch,
    current: Option<(LinkEpoch, Arc<dyn AbortHandle>)>,
    /// Group id from rank 0 of an epoch.
    group_id: Option<(LinkEpoch, Vec<u8>)>,
    /// Masks of steps that have not ended, oldest first.
    masks: VecDeque<(LinkEpoch, StepMasks)>,
}

impl fmt::Debug for SlotState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let current = self.current.as_ref().map(|(term, _)| term);
        f.debug_struct("SlotState")
            .field("link", &self.link)
            .field("entered", &self.entered)
            .field("aborted", &self.aborted)
            .field("current", &current)
            .finish()
    }
}

impl AbortSlot {
    /// Sets the handle that aborts `epoch`; fires it at once if that epoch has already ended.
    pub fn set(&self, epoch: Epoch, handle: Arc<dyn AbortHandle>) {
        let mut state = self.state();
        let term = (state.entered, epoch);
        if state.aborted >= term {
            handle.abort();
        }
        state.current = Some((term, handle));
    }

    /// Ends `epoch` of the current link, and all terms before it.
    pub fn abort(&self, epoch: Epoch) {
        let mut state = self.state();
        let term = (state.link, epoch);
        state.abort(term);
        self.inner.changed.notify_all();
    }

    /// Ends `epoch` of the executor's current command.
    pub fn abort_own(&self, epoch: Epoch) {
        let mut state = self.state();
        let term = (state.entered, epoch);
        state.abort(term);
        self.inner.changed.notify_all();
    }

    /// Whether `epoch` of the executor's current command has ended.
    #[must_use]
    pub fn is_aborted(&self, epoch: Epoch) -> bool {
        let state = self.state();
        state.aborted >= (state.entered, epoch)
    }

    /// Whether `epoch` of a link has ended.
    #[must_use]
    pub fn is_over(&self, link: u64, epoch: Epoch) -> bool {
        self.state().aborted >= (link, epoch)
    }

    /// Stores the group id that rank 0 of `epoch` sent over the current link.
    pub fn tell_group_id(&self, epoch: Epoch, bytes: Vec<u8>) {
        let mut state = self.state();
        let term = (state.link, epoch);
        if state.aborted < term {
            state.group_id = Some((term, bytes));
            self.inner.changed.notify_all();
        }
    }

    /// Waits for the group id from rank 0 of `epoch` of the executor's current command, and takes
    /// it. `None` if the epoch has ended or nothing comes within `patience`.
    #[must_use]
    pub fn wait_for_group_id(&self, epoch: Epoch, patience: Duration) -> Option<Vec<u8>> {
        let began = Instant::now();
        let mut state = self.state();
        let term = (state.entered, epoch);
        loop {
            if let Some((_, bytes)) = state.group_id.take_if(|(of, _)| *of == term) {
                return Some(bytes);
            }
            if state.aborted >= term {
                return None;
            }
            let left = patience.checked_sub(began.elapsed())?;
            let waited = self.inner.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Stores the masks of a step of the current link.
    pub fn tell_masks(&self, masks: StepMasks) {
        let mut state = self.state();
        let term = (state.link, masks.epoch);
        if state.aborted >= term {
            return;
        }
        // No rank that needs the dropped masks lags that far behind.
        if state.masks.len() >= MASKS_MAX {
            state.masks.pop_front();
        }
        state.masks.push_back((term, masks));
        self.inner.changed.notify_all();
    }

    /// Waits for the masks of a step of `epoch` of the executor's current command.
    ///
    /// # Errors
    /// One sentence if the epoch has ended or they do not come within `patience`.
    pub fn wait_for_masks(
        &self,
        epoch: Epoch,
        step: StepId,
        patience: Duration,
    ) -> Result<Vec<Option<TokenMask>>, String> {
        let began = Instant::now();
        let mut state = self.state();
        let term = (state.entered, epoch);
        loop {
            if state.aborted >= term {
                return Err(format!("{epoch} is over, and {step} had no masks yet"));
            }
            let found = state.masks.iter().position(|(of, it)| (*of, it.step) == (term, step));
            if let Some((_, masks)) = found.and_then(|at| state.masks.remove(at)) {
                return Ok(masks.masks);
            }
            let Some(left) = patience.checked_sub(began.elapsed()) else {
                let seconds = patience.as_secs_f64();
                return Err(format!("the masks of {step} did not come within {seconds} s"));
            };
            let waited = self.inner.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Drops the masks up to a step of `epoch` of the executor's current command, which has ended.
    pub fn forget_masks(&self, epoch: Epoch, step: StepId) {
        let mut state = self.state();
        let term = (state.entered, epoch);
        state.masks.retain(|(of, masks)| *of > term || (*of == term && masks.step > step));
    }

    /// Forgets the handle when its collective is dropped.
    pub fn clear(&self) {
        self.state().current = None;
    }

    /// Returns the number of the current or last link.
    #[must_use]
    pub fn link(&self) -> u64 {
        self.state().link
    }

    /// Starts a new link and returns its number.
    pub fn new_link(&self) -> u64 {
        let mut state = self.state();
        state.link += 1;
        state.link
    }

    /// Records that the executor begins a command that came over `link`.
    pub fn enter(&self, link: u64) {
        self.state().entered = link;
    }

    fn state(&self) -> MutexGuard<'_, SlotState> {
        self.inner.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SlotState {
    fn abort(&mut self, term: LinkEpoch) {
        self.aborted = self.aborted.max(term);
        let aborted = self.aborted;
        self.masks.retain(|(of, _)| *of > aborted);
        if let Some((current, handle)) = &self.current
            && *current <= term
        {
            handle.abort();
        }
    }
}
