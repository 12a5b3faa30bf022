//! Sampling and log-probabilities on the GPU; results come back through pinned memory.
use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::backend::{CudaBackend, Part, Which};
use super::batch::{PARAMS, TOP_MAX, live};
use super::device::{Device, Scratch};
use super::exchange::best_bytes;
use super::launch::{self, Rows, SampleIo};
use super::memory::{DeviceMemory, DevicePtr, Pinned};
use super::stream::Event;
use super::tensors::{CudaBuffer, Element};
use crate::backend::{Backend as _, Buffer, NOT_FED};
use crate::cpu::check::ensure;
use crate::error::KernelError;
use crate::sampling::{SampleRow, Sampled};

/// Words of `TuttiSampled`.
const SAMPLED: usize = 4;
/// Rows whose logits are edited at a time: each needs 8 bytes per token of the vocabulary.
const EDITED_ROWS: usize = 32;

/// Steps whose tokens may be on their way.
const QUEUED_MAX: usize = 2;

/// Where tokens go, of each row whether its log-probability is wanted, and since when they are on
/// their way.
type Queued = (usize, Vec<Option<u32>>, Instant);

/// What sampling needs besides logits.
#[derive(Debug)]
pub(super) struct Sampling {
    results: Option<Results>,
    /// Steps, the oldest first.
    queued: VecDeque<Queued>,
    next: usize,
    lists: Scratch,
    edits: Scratch,
}

/// Where results go: graphs name both places.
#[derive(Debug)]
struct Results {
    rows: usize,
    device: DeviceMemory,
    /// One for each step that may be under way.
    host: [(Pinned<u32>, Event); QUEUED_MAX],
    top: Option<(DeviceMemory, Pinned<u32>)>,
}

impl Sampling {
    pub(super) fn new() -> Self {
        Self {
            results: None,
            queued: VecDeque::new(),
            next: 0,
            lists: Scratch::new("sampling's lists"),
            edits: Scratch::new("edited logits"),
        }
    }

    /// Makes room for the results of `rows` rows; whether anything moved.
    pub(super) fn reserve(&mut self, device: &Device, rows: usize) -> Result<bool, KernelError> {
        if self.results.as_ref().is_some_and(|results| results.rows >= rows) {
            return Ok(false);
        }
        // As many as the largest graph has, at least.
        let rows = rows.max(512);
        device.stream.synchronize()?;
        let context = &device.context;
        let host = || -> Result<_, KernelError> {
            let what = "pinned memory for sampled tokens";
            Ok((Pinned::new(context, rows * SAMPLED, what)?, Event::new(context, false)?))
        };
        self.queued.clear();
        self.results = Some(Results {
            rows,
            device: DeviceMemory::new(context, rows * SAMPLED * 4, "sampled tokens")?,
            host: [host()?, host()?],
            top: None,
        });
        Ok(true)
    }

    /// Where the tokens are that the step before sampled, whose rows `feed` names.
    pub(super) fn fed(&mut self, feed: &[u32]) -> Result<DevicePtr, KernelError> {
        let rows = self.queued.back().map_or(0, |(_, rows, _)| rows.len());
        let fed = feed.iter().filter(|row| **row != NOT_FED);
        let most = fed.max().map_or(0, |&row| row as usize + 1);
        ensure!("begin_step", most <= rows, "row {} of {rows} queued ones is fed", most - 1);
        Ok(self.results()?.device.ptr())
    }

    /// For how long the oldest queued tokens have been on their way.
    pub(super) fn waited(&self) -> Duration {
        self.queued.front().map_or(Duration::ZERO, |(.., since)| since.elapsed())
    }

    /// Whether the oldest queued tokens are there.
    pub(super) fn is_done(&mut self) -> Result<bool, KernelError> {
        let Some(&(slot, ..)) = self.queued.front() else { return Ok(true) };
        self.results()?.host[slot].1.is_done()
    }

    /// Fetches the oldest queued tokens.
    pub(super) fn take(
        &mut self,
        patience: Duration,
        out: &mut Vec<Sampled>,
    ) -> Result<(), KernelError> {
        out.clear();
        let Some((slot, wanted, _)) = self.queued.pop_front() else {
            return Err(KernelError::Shape {
                op: "take_sampled",
                message: "nothing is queued".to_owned(),
            });
        };
        let results = self.results()?;
        results.host[slot].1.wait(patience)?;
        out.extend((0..wanted.len()).map(|i| results.row(slot, i, wanted[i], 0, 0)));
        Ok(())
    }

    /// Forgets what is queued: its steps are over.
    pub(super) fn forget(&mut self) {
        self.queued.clear();
    }

    fn results(&mut self) -> Result<&mut Results, KernelError> {
        self.results.as_mut().ok_or_else(|| KernelError::Device("no memory for tokens".to_owned()))
    }
}

impl Results {
    /// Room for the most likely tokens: ids, then log-probabilities.
    fn top(
        &mut self,
        device: &Device,
        top: u32,
    ) -> Result<Option<(DevicePtr, DevicePtr)>, KernelError> {
        if top == 0 {
            return Ok(None);
        }
        if self.top.is_none() {
            let words = self.rows * TOP_MAX as usize * 2;
            let what = "the most likely tokens";
            let memory = DeviceMemory::new(&device.context, words * 4, what)?;
            self.top = Some((memory, Pinned::new(&device.context, words, what)?));
        }
        Ok(self
            .top
            .as_ref()
            .map(|(memory, _)| (memory.ptr(), memory.ptr().offset(self.rows * top as usize * 4))))
    }

    /// Copies the results of `count` rows to the host, in stream order.
    fn download(
        &mut self,
        device: &Device,
        slot: usize,
        count: usize,
        top: u32,
    ) -> Result<(), KernelError> {
        let (host, done) = &mut self.host[slot];
        self.device.download_pinned(&device.stream, 0, host, count * SAMPLED)?;
        if let Some((memory, host)) = &mut self.top
            && top > 0
        {
            // Both halves: log-probabilities begin behind the ids of all rows.
            let words = self.rows * top as usize * 2;
            memory.download_pinned(&device.stream, 0, host, words)?;
        }
        done.record(&device.stream)
    }

    /// Row `i` as the caller wants it, with at most `top_n` of the `stride` most likely tokens.
    fn row(&self, slot: usize, i: usize, top_n: Option<u32>, stride: u32, vocab: usize) -> Sampled {
        let words = &self.host[slot].0.as_slice()[i * SAMPLED..][..SAMPLED];
        let corrupted = words[1] != 0;
        let mut sampled = Sampled {
            token: if corrupted { 0 } else { words[0] },
            corrupted,
            ..Sampled::default()
        };
        let Some(top_n) = top_n.filter(|_| !corrupted) else { return sampled };
        sampled.logprob = f32::from_bits(words[2]);
        sampled.rank = words[3];
        if let Some((_, host)) = &self.top
            && stride > 0
        {
            let host = host.as_slice();
            let (ids, logprobs) = host.split_at((self.rows * stride as usize).min(host.len()));
            let at = i * stride as usize;
            let count = (top_n as usize).min(vocab).min(stride as usize);
            let ids = ids[at..].iter().take(count);
            let logprobs = logprobs[at..].iter().take(count);
            sampled.top = ids.zip(logprobs).map(|(id, p)| (*id, f32::from_bits(*p))).collect();
        }
        sampled
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
            results.row(slot, i, row.params.logprobs, top, vocab)
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
        let staged = first_row == 0 && self.step.has_sampling(rows);
        if let Some(part) = self.apart {
            ensure!("sample", staged, "rows that are not the step's, of logits on several ranks");
            self.pick(logits, part, rows.len())?;
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
        let is_free = sampling.queued.iter().all(|(queued, ..)| *queued != slot);
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
        let lists = &self.step.lists;
        ensure!(
            op,
            self.step.has_sampling(rows) && !lists.edits && lists.top == 0 && !rows.is_empty(),
            "the rows are not the step's, or want edits or lists"
        );
        let slot = self.launch_sampling(at, vocab, 0, rows)?;
        let wanted = rows.iter().map(|row| row.params.logprobs).collect();
        self.sampling.queued.push_back((slot, wanted, Instant::now()));
        Ok(())
    }

    /// The largest logit of each row over all ranks: each looks at its own part of the vocabulary and
    /// tells the others what it found. Then the graph runs, if it is one.
    fn pick(&mut self, logits: Rows, part: Part, rows: usize) -> Result<(), KernelError> {
        let op = "sample";
        let Part { first_id, count } = part;
        if !self.step.skips(op, [logits.ptr.0, u64::from(first_id), count as u64]) {
            let (rows, live) = self.step.launched_samples(op, rows)?;
            let (bytes, ranks) = (rows * 8, self.world_size() as usize);
            let own = self.scratch(Which::Best, best_bytes(ranks, rows))?;
            let all = own.offset(bytes);
            let Self { device, sampling, .. } = self;
            let masked = (self.step.at(self.step.layout().params), self.step.at(0));
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
            let masks = Some(self.step.at(0));
            let Self { sampling, device, .. } = self;
            let results = sampling.results()?;
            let io = SampleIo {
                logits,
                params,
                biases: None,
                ids: None,
                masks,
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

    /// At once, some rows at a time where their logits are edited.
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
        let words = |list: &Vec<u32>| list.len().next_multiple_of(4);
        // Parameters and masks where the step has not brought them; biases; token ids.
        let parameters = if staged { 0 } else { words(&lists.params) };
        let (biases, ids) = (words(&lists.biases), words(&lists.ids));
        let masks_at = (parameters + biases + ids) * 4;
        let masks = if staged { 0 } else { words(&lists.masks) };
        let (all, _) = sampling.lists.get(device, masks_at + masks * 4)?;
        if parameters > 0 {
            sampling.lists.upload_at(device, 0, &lists.params)?;
            sampling.lists.upload_at(device, masks_at, &lists.masks)?;
        }
        let masks = if staged { step.at(0) } else { all.offset(masks_at) };
        if lists.edits {
            sampling.lists.upload_at(device, parameters * 4, &lists.biases)?;
            sampling.lists.upload_at(device, (parameters + biases) * 4, &lists.ids)?;
        }
        let params = if staged { step.at(step.layout().params) } else { all };
        let at_once = if lists.edits { EDITED_ROWS.min(rows.len()) } else { rows.len() };
        let scratch = match lists.edits {
            false => None,
            true => {
                // New memory is zeroed, and the kernel leaves the counts so.
                let (ptr, _) = sampling.edits.get(device, EDITED_ROWS * vocab * 8)?;
                Some((ptr, ptr.offset(EDITED_ROWS * vocab * 4)))
            }
        };
        let top_n = lists.top;
        let edits = lists.edits;
        let results = sampling.results()?;
        let top = results.top(device, top_n)?;
        for first in (0..rows.len()).step_by(at_once.max(1)) {
            let count = at_once.min(rows.len() - first);
            let skip = first * top_n as usize * 4;
            let io = SampleIo {
                logits: Rows { ptr: logits.ptr.offset(first * logits.stride * 4), ..logits },
                params: params.offset(first * PARAMS * 4),
                biases: edits.then(|| all.offset(parameters * 4)),
                ids: edits.then(|| all.offset((parameters + biases) * 4)),
                masks: Some(masks),
                scratch,
                out: results.device.ptr().offset(first * SAMPLED * 4),
                top: top.map(|(ids, logprobs)| (ids.offset(skip), logprobs.offset(skip))),
                top_stride: top_n as usize,
            };
            // SAFETY: rows were checked; every list and result has room for them.
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
        let (list, _) = sampling.lists.get(device, size_of_val(targets))?;
        sampling.lists.upload_at(device, 0, targets)?;
        let results = sampling.results()?;
        let top = results.top(device, top_n)?;
        let sizes = (vocab, top_n, targets.len());
        let call = launch::logprobs(at, list, results.device.ptr(), top, sizes);
        // SAFETY: rows and targets were checked; results have room for them.
        unsafe { device.launch(call) }?;
        ensure!(op, sampling.queued.is_empty(), "a step is queued");
        let results = sampling.results()?;
        results.download(device, 0, targets.len(), top_n)?;
        results.host[0].1.wait(patience)?;
        out.extend(targets.iter().enumerate().map(|(i, target)| {
            let mut sampled = results.row(0, i, Some(top_n), top_n, vocab);
            sampled.token = if sampled.corrupted { 0 } else { *target };
            sampled
        }));
        Ok(())
    }
}
