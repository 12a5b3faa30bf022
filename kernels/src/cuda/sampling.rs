//! What sampling keeps beside logits: lists on the GPU, scratch, and tokens on their way to the
//! host through pinned memory.
use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::device::{Device, Scratch};
use super::edits::{self, Together};
use super::launch::{self, Rows};
use super::memory::DevicePtr;
use super::results::Results;
use super::sample_lists::SampleLists;
use super::uploads::Uploads;
use crate::backend::{NOT_FED, StepInputs};
use crate::check::ensure;
use crate::error::KernelError;
use crate::sampling::Sampled;

/// Tokens on their way.
#[derive(Debug)]
pub(super) struct Queued {
    /// Where they go.
    pub(super) slot: usize,
    /// Of each row, how many likely tokens are wanted beside its log-probability, or neither.
    pub(super) wanted: Vec<Option<u32>>,
    /// The longest list of likely tokens.
    pub(super) top: u32,
    pub(super) vocab: usize,
    /// Since when nothing but their own step keeps them, and steps before it that sample nothing.
    pub(super) since: Instant,
}

/// What sampling needs besides logits.
#[derive(Debug)]
pub(super) struct Sampling {
    results: Option<Results>,
    /// Steps, the oldest first.
    pub(super) queued: VecDeque<Queued>,
    pub(super) next: usize,
    /// Of each row that the open step samples, the row of the step before whose token is its last.
    fed: Vec<u32>,
    pub(super) lists: Uploads,
    /// Edited logits, and how often tokens occurred: zero between launches.
    edited: Scratch,
    counts: Scratch,
}

/// Where rows' lists are on the device.
pub(super) struct Sent {
    pub(super) params: DevicePtr,
    pub(super) masks: DevicePtr,
    pub(super) biases: DevicePtr,
    pub(super) ids: DevicePtr,
}

impl Sampling {
    pub(super) fn new() -> Self {
        Self {
            results: None,
            queued: VecDeque::new(),
            next: 0,
            fed: Vec::new(),
            lists: Uploads::new("sampling's lists"),
            edited: Scratch::new("edited logits"),
            counts: Scratch::new("counts of tokens"),
        }
    }

    /// Makes room for the results of `rows` rows; whether anything moved.
    pub(super) fn reserve(&mut self, device: &Device, rows: usize) -> Result<bool, KernelError> {
        if self.results.as_ref().is_some_and(|results| results.rows >= rows) {
            return Ok(false);
        }
        device.stream.synchronize()?;
        let mut made = Results::new(device, rows)?;
        // What is on its way has arrived: for whoever takes it, and for the step that it is fed to.
        if let Some(old) = self.results.take().filter(|_| !self.queued.is_empty()) {
            made.take_over(device, &old)?;
        }
        self.results = Some(made);
        Ok(true)
    }

    /// The open step's rows, and which of them are fed.
    pub(super) fn begin(&mut self, inputs: &StepInputs<'_>) {
        self.fed.clear();
        let fed = |row: &u32| inputs.feed.get(*row as usize).copied().unwrap_or(NOT_FED);
        if !inputs.feed.is_empty() {
            self.fed.extend(inputs.sample_rows.iter().map(fed));
        }
    }

    /// Where the tokens are that the step before sampled, whose rows `feed` names.
    pub(super) fn fed(&mut self, feed: &[u32]) -> Result<DevicePtr, KernelError> {
        let rows = self.queued.back().map_or(0, |queued| queued.wanted.len());
        let fed = feed.iter().filter(|row| **row != NOT_FED);
        let most = fed.max().map_or(0, |&row| row as usize + 1);
        ensure!("begin_step", most <= rows, "row {} of {rows} queued ones is fed", most - 1);
        Ok(self.results()?.device.ptr())
    }

    /// For how long the oldest queued tokens have been on their way.
    pub(super) fn waited(&self) -> Duration {
        self.queued.front().map_or(Duration::ZERO, |queued| queued.since.elapsed())
    }

    /// Whether the oldest queued tokens are there.
    pub(super) fn is_done(&mut self) -> Result<bool, KernelError> {
        let Some(&Queued { slot, .. }) = self.queued.front() else { return Ok(true) };
        self.results()?.host[slot].1.is_done()
    }

    /// Fetches the oldest queued tokens.
    pub(super) fn take(
        &mut self,
        patience: Duration,
        out: &mut Vec<Sampled>,
    ) -> Result<(), KernelError> {
        out.clear();
        let Some(Queued { slot, wanted, top, vocab, .. }) = self.queued.pop_front() else {
            return Err(KernelError::Shape {
                op: "take_sampled",
                message: "nothing is queued".to_owned(),
            });
        };
        let results = self.results()?;
        results.host[slot].1.wait(patience)?;
        let count = wanted.len();
        out.extend((0..count).map(|i| results.row(slot, (i, count), wanted[i], top, vocab)));
        // The next step's time begins where this one's ends.
        if let Some(next) = self.queued.front_mut() {
            next.since = Instant::now();
        }
        Ok(())
    }

    /// Forgets what is queued: its steps are over.
    pub(super) fn forget(&mut self) {
        self.queued.clear();
    }

    /// Brings the lists of rows to the device: parameters, and masks, where the step has not.
    pub(super) fn send<'a>(
        &mut self,
        device: &Device,
        lists: &'a SampleLists,
        staged: bool,
    ) -> Result<Sent, KernelError> {
        let fed = if staged { edits::fed_ids(&lists.params, &self.fed) } else { None };
        let index: &[u32] = fed.as_ref().map_or(&[], |fed| &fed.rows);
        let only = |wanted: bool, list: &'a [u32]| if wanted { list } else { &[] };
        let parts = [
            only(!staged, &lists.params),
            only(!staged, &lists.masks),
            only(lists.edits, &lists.biases),
            only(lists.edits, &lists.ids),
            index,
        ];
        let (mut at, mut words) = ([0; 5], 0);
        for (at, part) in at.iter_mut().zip(parts) {
            *at = words;
            words += part.len().next_multiple_of(4);
        }
        let all = if words == 0 {
            DevicePtr::default()
        } else {
            self.lists.send(device, words, |to| {
                for (at, part) in at.iter().zip(parts) {
                    to[*at..][..part.len()].copy_from_slice(part);
                }
            })?
        };
        let [params, masks, biases, ids, index] = at.map(|at| all.offset(at * 4));
        if let Some(fed) = fed {
            // Tokens are words of 32 bits: two of the elements that this kernel moves.
            let tokens = Rows { ptr: self.results()?.device.ptr(), stride: 8 };
            let to = Rows { ptr: ids.offset(fed.first * 4), stride: 2 };
            let rows = fed.rows.len();
            let call = launch::gather_rows(tokens, index, to, 2, rows, DevicePtr::default());
            // SAFETY: the rows named were sampled by the step before, as its beginning has found;
            // lists reach as far as the last token that is fed.
            unsafe { device.launch(call) }?;
        }
        Ok(Sent { params, masks, biases, ids })
    }

    /// Room for edited logits and counts of as many rows as are sampled together.
    pub(super) fn scratch(
        &mut self,
        device: &Device,
        vocab: usize,
        together: &[Together],
    ) -> Result<Option<(DevicePtr, DevicePtr)>, KernelError> {
        let edited = together.iter().filter(|together| together.edited);
        let Some(most) = edited.map(|together| together.count).max() else { return Ok(None) };
        // Few sizes, so that it does not grow row by row.
        let bytes = most.next_power_of_two().min(edits::at_once(vocab)).max(most) * vocab * 4;
        let (logits, _) = self.edited.get(device, bytes)?;
        // New memory is zeroed, and the kernel leaves the counts so.
        let (counts, _) = self.counts.get(device, bytes)?;
        Ok(Some((logits, counts)))
    }

    pub(super) fn results(&mut self) -> Result<&mut Results, KernelError> {
        self.results.as_mut().ok_or_else(|| KernelError::Device("no memory for tokens".to_owned()))
    }
}
