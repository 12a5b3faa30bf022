//! State of sampling: lists on the GPU, scratch, and tokens on their way to the host through pinned
//! memory.
use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::device::{Device, Scratch};
use super::edits::{self, SampleLaunch};
use super::launch::{self, Rows};
use super::memory::DevicePtr;
use super::results::Results;
use super::sample_lists::SampleLists;
use super::uploads::Uploads;
use crate::backend::{NOT_FED, StepInputs};
use crate::check::ensure;
use crate::error::KernelError;
use crate::sampling::Sampled;

/// A step's tokens on their way to the host.
#[derive(Debug)]
pub(super) struct PendingTokens {
    /// Slot of the results.
    pub(super) slot: usize,
    /// For each row, the number of most likely tokens requested with its log-probability, or `None`
    /// for neither.
    pub(super) wanted: Vec<Option<u32>>,
    /// Length of the longest list of most likely tokens.
    pub(super) top: u32,
    pub(super) vocab: usize,
    /// Since when it waits only for its own step, and for earlier steps that sample nothing.
    pub(super) since: Instant,
}

/// State of sampling.
#[derive(Debug)]
pub(super) struct Sampling {
    results: Option<Results>,
    /// Steps with tokens in flight, oldest first.
    pub(super) queued: VecDeque<PendingTokens>,
    pub(super) next: usize,
    /// For each row that the open step samples, the row of the previous step whose token is its
    /// last.
    fed: Vec<u32>,
    pub(super) lists: Uploads,
    /// Edited logits, and the counts of tokens, which are zero between launches.
    edited: Scratch,
    counts: Scratch,
}

/// Addresses of rows' lists on the device.
pub(super) struct ListAddresses {
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

    /// Frees all memory, and forgets what is queued. The device must be idle.
    pub(super) fn free(&mut self) {
        *self = Self::new();
    }

    /// Makes room for the results of `rows` rows; returns whether anything moved.
    pub(super) fn reserve(&mut self, device: &Device, rows: usize) -> Result<bool, KernelError> {
        if self.results.as_ref().is_some_and(|results| results.rows >= rows) {
            return Ok(false);
        }
        device.stream.synchronize()?;
        let mut made = Results::new(device, rows)?;
        // Results in flight have arrived: kept for `take` and for the step that they are fed to.
        if let Some(old) = self.results.take().filter(|_| !self.queued.is_empty()) {
            made.take_over(device, &old)?;
        }
        self.results = Some(made);
        Ok(true)
    }

    /// Begins a step: records which of its sampled rows are fed.
    pub(super) fn begin(&mut self, inputs: &StepInputs<'_>) {
        self.fed.clear();
        let fed = |row: &u32| inputs.feed.get(*row as usize).copied().unwrap_or(NOT_FED);
        if !inputs.feed.is_empty() {
            self.fed.extend(inputs.sample_rows.iter().map(fed));
        }
    }

    /// Address of the tokens that the previous step sampled, after checking the rows in `feed`.
    pub(super) fn fed(&mut self, feed: &[u32]) -> Result<DevicePtr, KernelError> {
        let rows = self.queued.back().map_or(0, |queued| queued.wanted.len());
        let fed = feed.iter().filter(|row| **row != NOT_FED);
        let most = fed.max().map_or(0, |&row| row as usize + 1);
        ensure!("begin_step", most <= rows, "row {} of {rows} queued ones is fed", most - 1);
        Ok(self.results()?.device.ptr())
    }

    /// How long the oldest queued tokens have been in flight.
    pub(super) fn waited(&self) -> Duration {
        self.queued.front().map_or(Duration::ZERO, |queued| queued.since.elapsed())
    }

    /// Whether the oldest queued tokens have arrived.
    pub(super) fn is_done(&mut self) -> Result<bool, KernelError> {
        let Some(&PendingTokens { slot, .. }) = self.queued.front() else { return Ok(true) };
        self.results()?.host[slot].1.is_done()
    }

    /// Fetches the oldest queued tokens.
    pub(super) fn take(
        &mut self,
        patience: Duration,
        out: &mut Vec<Sampled>,
    ) -> Result<(), KernelError> {
        out.clear();
        let Some(PendingTokens { slot, wanted, top, vocab, .. }) = self.queued.pop_front() else {
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

    /// Drops everything queued: its steps are over.
    pub(super) fn forget(&mut self) {
        self.queued.clear();
    }

    /// Uploads the rows' lists; parameters and masks only if the step has not done so.
    pub(super) fn send<'a>(
        &mut self,
        device: &Device,
        lists: &'a SampleLists,
        staged: bool,
    ) -> Result<ListAddresses, KernelError> {
        let fed = if staged { edits::fed_tokens(&lists.params, &self.fed) } else { None };
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
            // Tokens are 32-bit words: two of the 16-bit elements that this kernel moves.
            let tokens = Rows { ptr: self.results()?.device.ptr(), stride: 8 };
            let to = Rows { ptr: ids.offset(fed.first * 4), stride: 2 };
            let rows = fed.rows.len();
            let call = launch::gather_rows(tokens, index, to, 2, rows, DevicePtr::default());
            // SAFETY: the given rows were sampled by the previous step, as checked at the step's
            // beginning; lists reach as far as the last token that is fed.
            unsafe { device.launch(call) }?;
        }
        Ok(ListAddresses { params, masks, biases, ids })
    }

    /// Scratch for edited logits and counts of as many rows as are sampled together.
    pub(super) fn scratch(
        &mut self,
        device: &Device,
        vocab: usize,
        sample_launches: &[SampleLaunch],
    ) -> Result<Option<(DevicePtr, DevicePtr)>, KernelError> {
        let edited = sample_launches.iter().filter(|sample_launches| sample_launches.edited);
        let Some(most) = edited.map(|sample_launches| sample_launches.count).max() else {
            return Ok(None);
        };
        // Few distinct sizes, so that it does not grow row by row.
        let bytes = most.next_power_of_two().min(edits::rows_at_once(vocab)).max(most) * vocab * 4;
        let (logits, _) = self.edited.get(device, bytes)?;
        // New memory is zeroed, and the kernel leaves the counts zero.
        let (counts, _) = self.counts.get(device, bytes)?;
        Ok(Some((logits, counts)))
    }

    pub(super) fn results(&mut self) -> Result<&mut Results, KernelError> {
        self.results.as_mut().ok_or_else(|| KernelError::Device("no memory for tokens".to_owned()))
    }
}
