//! What the executor drives: one rank of a replica, from forming to steps.
//!
//! The trait is the seam between message handling (epochs, order, deadlines: [`crate::executor`])
//! and arithmetic ([`crate::engine`] over a `kernels::Backend`). Called from the executor thread
//! alone; only [`AbortSlot`] is touched by other threads.
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kernels::collective::{AbortHandle, Tally};
use shared::ids::{Epoch, StepId};
use shared::model_identity::ModelIdentity;
use shared::protocol::{Form, SequenceOutput, StepMasks, StepPlan, StepTimings, TokenMask};

/// Steps whose masks are held until they are asked for. The coordinator has two steps under way.
const MASKS_MAX: usize = 4;

/// One rank.
pub trait Rank {
    /// Connects the collective and loads the shard, or keeps what it has when the same shard is
    /// asked for.
    ///
    /// # Errors
    /// See [`FormError`]; the rank is then as if it had never been formed.
    fn form(
        &mut self,
        form: &Form,
        abort: &AbortSlot,
        news: &mut dyn FormNews,
    ) -> Result<RankReady, FormError>;

    /// Allocates the KV cache, and blocks in host memory to swap to.
    ///
    /// # Errors
    /// One sentence.
    fn start(&mut self, num_blocks: u32, host_blocks: u32) -> Result<(), String>;

    /// Runs one step. Appends to `outputs` on rank 0. While it waits for its device it may begin
    /// the next step, which it finds in `source` and which it is then given next.
    ///
    /// # Errors
    /// One sentence; the epoch is over then.
    fn step(
        &mut self,
        plan: &StepPlan,
        source: &mut dyn StepSource,
        outputs: &mut Vec<SequenceOutput>,
    ) -> Result<StepTimings, String>;

    /// The digest of the last step's tokens, as this rank has them.
    fn digest(&self) -> u32;

    /// How many tokens the last step's draft model drafted for each sequence that it was asked to
    /// draft for, on rank 0.
    fn drafted(&self) -> Vec<u32> {
        Vec::new()
    }

    /// Leaves the epoch: drops the collective and the KV cache, keeps the weights.
    fn release(&mut self);

    /// What it exchanged with the others since the last call.
    fn take_exchanged(&mut self) -> Exchanged {
        Exchanged { is_timed: true, ..Exchanged::default() }
    }

    /// Why this rank's device computes no more, if it does not: then nothing but another process
    /// helps.
    fn lost_device(&self) -> Option<&str> {
        None
    }
}

/// What a rank says while it is formed.
pub trait FormNews {
    /// `done` bytes of weights are loaded, of `total`.
    fn progress(&mut self, done: u64, total: u64);
    /// Rank 0's NCCL unique id, for the other ranks.
    fn group_id(&mut self, bytes: Vec<u8>);
}

/// What a rank exchanged with the others of its replica.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exchanged {
    /// Bytes it gave, by the way they took.
    pub bytes: Tally,
    /// Exchanges that were broken off: aborted, failed, not finished in time.
    pub unfinished: u64,
    /// How long they took is known: devices that exchange data by themselves do not tell.
    pub is_timed: bool,
}

/// Steps that wait behind the one that is being run, and what comes for that one behind its plan.
pub trait StepSource {
    /// The next step of the epoch, if it is there; it stays there.
    fn peek(&mut self) -> Option<&StepPlan>;

    /// Waits for the masks of a step's masked entries, in their order; once.
    ///
    /// # Errors
    /// One sentence when they do not come.
    fn masks(&mut self, step: StepId) -> Result<Vec<Option<TokenMask>>, String>;
}

/// No step waits.
#[derive(Clone, Copy, Debug)]
pub struct NoSteps;

impl StepSource for NoSteps {
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
    /// KV blocks that fit in the memory allowed.
    pub kv_blocks: u32,
    /// KV blocks that fit in the host memory asked for.
    pub host_blocks: u32,
    /// Bytes of weights held.
    pub weight_bytes: u64,
    /// Seconds spent loading; 0 when weights were kept.
    pub load_seconds: f64,
    /// What is in the model folder.
    pub identity: ModelIdentity,
}

/// Why a rank could not be formed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct FormError {
    /// One sentence naming file, tensor or peer, and the reason.
    pub message: String,
    /// Trying again with the same model cannot help.
    pub permanent: bool,
}

/// Lets other threads free the executor from a collective operation, and bring it what it waits for
/// there.
///
/// Epochs are counted by a coordinator, and another one counts anew: so what is over is known by
/// the link, too, over which the epoch came. The executor may be behind: still in a command of an
/// earlier link when the next is up.
#[derive(Clone, Debug, Default)]
pub struct AbortSlot {
    inner: Arc<Slot>,
}

#[derive(Debug, Default)]
struct Slot {
    state: Mutex<SlotState>,
    /// Masks or a group's id have come, or an epoch is over.
    changed: Condvar,
}

/// Links in their order, and the epochs that came over each.
type Term = (u64, Epoch);

#[derive(Default)]
struct SlotState {
    /// The present or last link.
    link: u64,
    /// The link over which the command under way came.
    entered: u64,
    /// Epochs up to this one are over.
    aborted: Term,
    current: Option<(Term, Arc<dyn AbortHandle>)>,
    /// What rank 0 of an epoch has told this one.
    group_id: Option<(Term, Vec<u8>)>,
    /// Those of steps that are not over, the oldest first.
    masks: VecDeque<(Term, StepMasks)>,
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
    /// Names the handle that frees `epoch`; fires it at once when that epoch is already over.
    pub fn set(&self, epoch: Epoch, handle: Arc<dyn AbortHandle>) {
        let mut state = self.state();
        let term = (state.entered, epoch);
        if state.aborted >= term {
            handle.abort();
        }
        state.current = Some((term, handle));
    }

    /// Ends `epoch` of the present link and all before it.
    pub fn abort(&self, epoch: Epoch) {
        let mut state = self.state();
        let term = (state.link, epoch);
        state.abort(term);
        self.inner.changed.notify_all();
    }

    /// Ends `epoch` of the command under way.
    pub fn abort_own(&self, epoch: Epoch) {
        let mut state = self.state();
        let term = (state.entered, epoch);
        state.abort(term);
        self.inner.changed.notify_all();
    }

    /// Whether `epoch` of the command under way is over.
    #[must_use]
    pub fn is_aborted(&self, epoch: Epoch) -> bool {
        let state = self.state();
        state.aborted >= (state.entered, epoch)
    }

    /// Rank 0 of `epoch` of the present link has told this rank what its GPU is found by.
    pub fn tell_group_id(&self, epoch: Epoch, bytes: Vec<u8>) {
        let mut state = self.state();
        let term = (state.link, epoch);
        if state.aborted < term {
            state.group_id = Some((term, bytes));
            self.inner.changed.notify_all();
        }
    }

    /// Waits for what rank 0 of `epoch` of the command under way tells; it is told once. `None`
    /// when the epoch is over, or nothing comes within `patience`.
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

    /// The masks of a step of the present link have come.
    pub fn tell_masks(&self, masks: StepMasks) {
        let mut state = self.state();
        let term = (state.link, masks.epoch);
        if state.aborted >= term {
            return;
        }
        // No rank that needs them is so far behind.
        if state.masks.len() >= MASKS_MAX {
            state.masks.pop_front();
        }
        state.masks.push_back((term, masks));
        self.inner.changed.notify_all();
    }

    /// Waits for the masks of a step of `epoch` of the command under way.
    ///
    /// # Errors
    /// One sentence when the epoch is over, or they do not come within `patience`.
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

    /// A step of `epoch` of the command under way is over: its masks are needed no longer, if they
    /// were.
    pub fn forget_masks(&self, epoch: Epoch, step: StepId) {
        let mut state = self.state();
        let term = (state.entered, epoch);
        state.masks.retain(|(of, masks)| *of > term || (*of == term && masks.step > step));
    }

    /// Forgets the handle, when its collective is dropped.
    pub fn clear(&self) {
        self.state().current = None;
    }

    /// Another link is up; returns its number.
    pub fn new_link(&self) -> u64 {
        let mut state = self.state();
        state.link += 1;
        state.link
    }

    /// The executor begins a command that came over `link`.
    pub fn enter(&self, link: u64) {
        self.state().entered = link;
    }

    fn state(&self) -> MutexGuard<'_, SlotState> {
        self.inner.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SlotState {
    fn abort(&mut self, term: Term) {
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
