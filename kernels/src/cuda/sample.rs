//! Sampling and log-probabilities on the GPU; results come back through pinned memory.
use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::backend::{CudaBackend, Part, Which};
use super::batch::{PARAMS, SampleLists, TOP_MAX, live};
use super::device::{Device, Scratch};
use super::edits::{self, Together};
use super::exchange::best_bytes;
use super::launch::{self, Rows, SampleIo};
use super::memory::DevicePtr;
use super::results::{QUEUED_MAX, Results, SAMPLED};
use super::tensors::{CudaBuffer, Element};
use super::uploads::Uploads;
use crate::backend::{Backend as _, Buffer, NOT_FED, StepInputs};
use crate::check::ensure;
use crate::error::KernelError;
use crate::sampling::{SampleRow, Sampled};

/// Tokens on their way.
#[derive(Debug)]
struct Queued {
    /// Where they go.
    slot: usize,
    /// Of each row, how many likely tokens are wanted beside its log-probability, or neither.
    wanted: Vec<Option<u32>>,
    /// The longest list of likely tokens.
    top: u32,
    vocab: usize,
    /// Since when nothing but their own step keeps them, and steps before it that sample nothing.
    since: Instant,
}

/// What sampling needs besides logits.
#[derive(Debug)]
pub(super) struct Sampling {
    results: Option<Results>,
    /// Steps, the oldest first.
    queued: VecDeque<Queued>,
    next: usize,
    /// Of each row that the open step samples, the row of the step before whose token is its last.
    fed: Vec<u32>,
    lists: Uploads,
    /// Edited logits, and how often tokens occurred: zero between launches.
    edited: Scratch,
    counts: Scratch,
}

/// Where rows' lists are on the device.
struct Sent {
    params: DevicePtr,
    masks: DevicePtr,
    biases: DevicePtr,
    ids: DevicePtr,
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
    fn send<'a>(
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
    fn scratch(
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

    fn results(&mut self) -> Result<&mut Results, KernelError> {
        self.results.as_mut().ok_or_else(|| KernelError::Device("no memory for tokens".to_owned()))
    }
}

fn check(
    op: &'static str,
    logits: &CudaBuffer,
    vocab: usize,
    first: usize,
    count: usize,
) -> Result<Rows, KernelError> {
    let (rows, width) = (logits.rows(), logits.width());
    ensure!(op, vocab >= 1 && vocab <= width, "vocab is {vocab}, the logits have {width} columns");
    ensure!(op, vocab <= 1 << 20, "vocab is {vocab}: GPUs sample from at most {}", 1 << 20);
    ensure!(
        op,
        first <= rows && count <= rows - first,
        "rows {first}..{} of {rows} are named",
        first.saturating_add(count)
    );
    let at = logits.of(Element::F32, op, "logits")?;
    Ok(Rows { ptr: at.ptr.offset(first * at.stride * 4), ..at })
}

impl CudaBackend {
    pub(super) fn sample_rows(
        &mut self,
        logits: &CudaBuffer,
        vocab: usize,
        first_row: usize,
        rows: &[SampleRow<'_>],
        out: &mut Vec<Sampled>,
    ) -> Result<(), KernelError> {
        out.clear();
        rows.iter().try_for_each(|row| row.check_mask(vocab))?;
        let vocab = self.apart.map_or(vocab, |part| part.count);
        let at = check("sample", logits, vocab, first_row, rows.len())?;
        if rows.is_empty() {
            return Ok(());
        }
        let slot = self.launch_sampling(at, vocab, first_row, rows)?;
        let top = self.step.lists.top;
        let patience = self.options.patience;
        let results = self.sampling.results()?;
        results.host[slot].1.wait(patience)?;
        let row = |(i, row): (usize, &SampleRow<'_>)| {
            results.row(slot, (i, rows.len()), row.params.logprobs, top, vocab)
        };
        out.extend(rows.iter().enumerate().map(row));
        Ok(())
    }

    /// Samples and sends the results on their way; says in which slot they will be.
    fn launch_sampling(
        &mut self,
        logits: Rows,
        vocab: usize,
        first_row: usize,
        rows: &[SampleRow<'_>],
    ) -> Result<usize, KernelError> {
        let staged = first_row == 0 && self.is_staged(rows);
        if let Some(part) = self.apart {
            let late = first_row == 0 && self.is_late(rows);
            let what = "rows that are not the step's, of logits on several ranks";
            ensure!("sample", staged || late, "{what}");
            self.pick(logits, part, rows, late)?;
        } else if staged && self.step.samples_within() {
            self.sample_in_graph(logits, vocab)?;
        } else {
            self.step.close(&self.device.stream)?;
            self.sample_now(logits, vocab, rows, staged)?;
        }
        let top = self.step.lists.top;
        let Self { sampling, device, .. } = self;
        let slot = sampling.next;
        sampling.next = (slot + 1) % QUEUED_MAX;
        // Of queued tokens too: the slot that is taken is the older one's, which has been taken.
        let is_free = sampling.queued.iter().all(|queued| queued.slot != slot);
        ensure!("sample", is_free, "{QUEUED_MAX} steps are queued already");
        sampling.results()?.download(device, slot, rows.len(), top)?;
        Ok(slot)
    }

    /// As `sample_rows`, but leaves the tokens on their way.
    pub(super) fn queue_rows(
        &mut self,
        logits: &CudaBuffer,
        vocab: usize,
        rows: &[SampleRow<'_>],
    ) -> Result<(), KernelError> {
        let op = "queue_sample";
        rows.iter().try_for_each(|row| row.check_mask(vocab))?;
        let vocab = self.apart.map_or(vocab, |part| part.count);
        let at = check(op, logits, vocab, 0, rows.len())?;
        let are_own = self.is_staged(rows) || self.is_late(rows);
        ensure!(op, are_own && !rows.is_empty(), "there are no rows, or they are not the step's");
        let slot = self.launch_sampling(at, vocab, 0, rows)?;
        let wanted = rows.iter().map(|row| row.params.logprobs).collect();
        let (top, since) = (self.step.lists.top, Instant::now());
        self.sampling.queued.push_back(Queued { slot, wanted, top, vocab, since });
        Ok(())
    }

    /// Whether these are the step's own rows, whose parameters came with it.
    fn is_staged(&self, rows: &[SampleRow<'_>]) -> bool {
        !self.step.samples_late() && self.step.has_sampling(rows)
    }

    /// Whether these are the step's own rows, whose parameters come with their masks.
    fn is_late(&self, rows: &[SampleRow<'_>]) -> bool {
        self.step.samples_late() && self.step.has_samples(rows.len())
    }

    /// The largest logit of each row over all ranks: each looks at its own part of the vocabulary
    /// and tells the others what it found. Then the graph runs, if it is one; those that come
    /// `late` are no part of it.
    fn pick(
        &mut self,
        logits: Rows,
        part: Part,
        rows: &[SampleRow<'_>],
        late: bool,
    ) -> Result<(), KernelError> {
        let op = "sample";
        let Part { first_id, count } = part;
        let masked = if late {
            self.step.close(&self.device.stream)?;
            let Self { sampling, device, step, .. } = self;
            step.lists.pack(rows)?;
            let sent = sampling.send(device, &step.lists, false)?;
            (sent.params, sent.masks)
        } else {
            (self.step.at(self.step.layout().params), DevicePtr::default())
        };
        let rows = rows.len();
        if !self.step.skips(op, [logits.ptr.0, u64::from(first_id), count as u64]) {
            let (rows, live) = match late {
                true => (rows, DevicePtr::default()),
                false => self.step.launched_samples(op, rows)?,
            };
            let (bytes, ranks) = (rows * 8, self.world_size() as usize);
            let own = self.scratch(Which::Best, best_bytes(ranks, rows))?;
            let all = own.offset(bytes);
            let Self { device, sampling, .. } = self;
            let sizes = (count, first_id);
            let argmax = launch::argmax(logits, Some(masked), own, sizes, rows, Some(live));
            // SAFETY: the logits have as many rows and columns; the scratch was made for it; masks
            // were found to be of the whole vocabulary.
            unsafe { device.launch(argmax) }?;
            let group = &device.context.group;
            group.call(|group| group.all_gather(device, own, all, bytes)).unwrap_or(Ok(()))?;
            let out = sampling.results()?.device.ptr();
            let merge = launch::argmax_merge(all, out, (ranks, rows), live);
            // SAFETY: results have room for the largest graph's rows, and for this step's.
            unsafe { device.launch(merge) }?;
        }
        self.count(rows * 8);
        self.step.close(&self.device.stream)
    }

    /// As the last part of a graph, which then runs.
    fn sample_in_graph(&mut self, logits: Rows, vocab: usize) -> Result<(), KernelError> {
        let count = self.step.counts().samples;
        if !self.step.skips("sample", [logits.ptr.0, vocab as u64, count as u64]) {
            let params = self.step.at(self.step.layout().params);
            let live = self.step.at(live::SAMPLES);
            let Self { sampling, device, .. } = self;
            let results = sampling.results()?;
            let io = SampleIo {
                logits,
                params,
                biases: None,
                ids: None,
                masks: None,
                scratch: None,
                out: results.device.ptr(),
                top: None,
                top_stride: 0,
            };
            let call = launch::sample(&io, vocab, count, Some(live));
            // SAFETY: logits have as many rows; results have room for the largest graph.
            unsafe { device.launch(call) }?;
        }
        self.step.close(&self.device.stream)
    }

    /// At once: rows whose logits are edited some at a time, apart from others.
    fn sample_now(
        &mut self,
        logits: Rows,
        vocab: usize,
        rows: &[SampleRow<'_>],
        staged: bool,
    ) -> Result<(), KernelError> {
        if !staged {
            self.step.lists.pack(rows)?;
        }
        let Self { sampling, device, step, .. } = self;
        if sampling.reserve(device, rows.len())? {
            step.forget_graphs();
        }
        let lists = &step.lists;
        let sent = sampling.send(device, lists, staged)?;
        let (params, masks) = match staged {
            true => (step.at(step.layout().params), DevicePtr::default()),
            false => (sent.params, sent.masks),
        };
        let together = edits::together(&lists.edited, edits::at_once(vocab));
        let scratch = sampling.scratch(device, vocab, &together)?;
        let top_n = lists.top;
        let results = sampling.results()?;
        let top = results.top(device, rows.len(), top_n)?;
        for Together { first, count, edited } in together {
            let skip = first * top_n as usize * 4;
            let io = SampleIo {
                logits: Rows { ptr: logits.ptr.offset(first * logits.stride * 4), ..logits },
                params: params.offset(first * PARAMS * 4),
                biases: edited.then_some(sent.biases),
                ids: edited.then_some(sent.ids),
                masks: Some(masks),
                scratch: scratch.filter(|_| edited),
                out: results.device.ptr().offset(first * SAMPLED * 4),
                top: top.map(|(ids, logprobs)| (ids.offset(skip), logprobs.offset(skip))),
                top_stride: top_n as usize,
            };
            // SAFETY: rows were checked; every list and result has room for them, and scratch for
            // as many as are sampled together.
            unsafe { device.launch(launch::sample(&io, vocab, count, None)) }?;
        }
        Ok(())
    }

    pub(super) fn score_rows(
        &mut self,
        logits: &CudaBuffer,
        vocab: usize,
        first_row: usize,
        targets: &[u32],
        top_n: u32,
        out: &mut Vec<Sampled>,
    ) -> Result<(), KernelError> {
        let op = "logprobs";
        out.clear();
        let at = check(op, logits, vocab, first_row, targets.len())?;
        let largest = targets.iter().max().map_or(0, |&token| token as usize + 1);
        ensure!(op, largest <= vocab, "target {} of {vocab} is named", largest - 1);
        ensure!(op, top_n <= TOP_MAX, "{top_n} most likely tokens, at most {TOP_MAX}");
        if targets.is_empty() {
            return Ok(());
        }
        let patience = self.options.patience;
        let Self { sampling, device, step, .. } = self;
        step.close(&device.stream)?;
        if sampling.reserve(device, targets.len())? {
            step.forget_graphs();
        }
        let list =
            sampling.lists.send(device, targets.len(), |words| words.copy_from_slice(targets))?;
        let results = sampling.results()?;
        let top = results.top(device, targets.len(), top_n)?;
        let sizes = (vocab, top_n, targets.len());
        let call = launch::logprobs(at, list, results.device.ptr(), top, sizes);
        // SAFETY: rows and targets were checked; results have room for them.
        unsafe { device.launch(call) }?;
        ensure!(op, sampling.queued.is_empty(), "a step is queued");
        let results = sampling.results()?;
        results.download(device, 0, targets.len(), top_n)?;
        results.host[0].1.wait(patience)?;
        out.extend(targets.iter().enumerate().map(|(i, target)| {
            let mut sampled = results.row(0, (i, targets.len()), Some(top_n), top_n, vocab);
            sampled.token = if sampled.corrupted { 0 } else { *target };
            sampled
        }));
        Ok(())
    }
}
