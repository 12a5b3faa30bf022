//! Step framing, sampling and log-probabilities on the GPU.
use std::time::Instant;

use super::backend::{CudaBackend, ScratchKind, VocabShard};
use super::batch::live;
use super::edits::{self, SampleLaunch};
use super::launch::{self, Rows, SampleIo};
use super::memory::DevicePtr;
use super::results::{QUEUED_MAX, SAMPLED};
use super::sample_lists::{Candidates, PARAMS, TOP_MAX, candidate_bytes, row_bytes};
use super::sampling::PendingTokens;
use super::step::LaunchRows;
use super::tensors::{CudaBuffer, Element};
use crate::backend::{StepInputs, StepOps, Tensors as _};
use crate::check::{self, ensure};
use crate::error::KernelError;
use crate::sampling::{SampleRow, Sampled};

/// Address of rows `first..first + count` of logits.
fn rows_at(
    op: &'static str,
    logits: &CudaBuffer,
    vocab: usize,
    first: usize,
    count: usize,
) -> Result<Rows, KernelError> {
    check::logits(op, logits, vocab, first, count)?;
    ensure!(op, vocab <= 1 << 20, "vocab is {vocab}: GPUs sample from at most {}", 1 << 20);
    let at = logits.of(Element::F32, op, "logits")?;
    Ok(Rows { ptr: at.ptr.offset(first * at.stride * 4), ..at })
}

impl StepOps for CudaBackend {
    fn begin_step(&mut self, inputs: &StepInputs<'_>) -> Result<(), KernelError> {
        self.apart = None;
        let rows = inputs.sample_rows.len();
        let Self { device, step, sampling, .. } = self;
        // Before anything is recorded, since graphs keep these addresses.
        if sampling.reserve(device, rows)? {
            step.forget_graphs();
        }
        step.begin(&device.context, &device.stream, inputs)?;
        // An earlier step may have switched the overlap off.
        device.set_overlap(step.overlaps());
        sampling.begin(inputs);
        if !inputs.feed.is_empty() {
            // Tokens are 32-bit words: two of the 16-bit elements that this kernel moves.
            let tokens = Rows { ptr: sampling.fed(inputs.feed)?, stride: 8 };
            let ids = Rows { ptr: step.at(step.layout().ids), stride: 2 };
            let index = step.at(step.layout().feed);
            let call =
                launch::gather_rows(tokens, index, ids, 2, inputs.feed.len(), DevicePtr::default());
            // SAFETY: the given rows were sampled by the previous step, and ids has room for all.
            unsafe { device.launch(call) }?;
        }
        step.open(&device.stream)
    }

    fn launch_step(&mut self) -> Result<(), KernelError> {
        self.step.close(&self.device.stream)
    }

    fn end_step(&mut self) -> Result<(), KernelError> {
        self.step.end(&self.device.stream)
    }

    fn keeps_logits_apart(&mut self, first_id: u32, count: usize, vocab: usize) -> bool {
        let (candidates, ranks) = (self.step.candidates(), self.world_size() as usize);
        let enough = candidates.are_enough(vocab, ranks);
        let apart = !self.alone && self.step.is_open() && enough;
        self.apart = apart.then_some(VocabShard { first_id, count, candidates });
        apart
    }

    fn sample(
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
        let at = rows_at("sample", logits, vocab, first_row, rows.len())?;
        if rows.is_empty() {
            return Ok(());
        }
        let slot = self.launch_sampling(at, vocab, first_row, rows)?;
        let top = self.step.lists.top;
        let patience = self.device.stream.patience();
        let results = self.sampling.results()?;
        results.host[slot].1.wait(patience)?;
        let row = |(i, row): (usize, &SampleRow<'_>)| {
            results.row(slot, (i, rows.len()), row.params.logprobs, top, vocab)
        };
        out.extend(rows.iter().enumerate().map(row));
        Ok(())
    }

    fn queues_samples(&self) -> bool {
        self.world_size() == 1 || self.is_grouped()
    }

    fn queue_sample(
        &mut self,
        logits: &CudaBuffer,
        vocab: usize,
        rows: &[SampleRow<'_>],
    ) -> Result<(), KernelError> {
        let op = "queue_sample";
        rows.iter().try_for_each(|row| row.check_mask(vocab))?;
        let vocab = self.apart.map_or(vocab, |part| part.count);
        let at = rows_at(op, logits, vocab, 0, rows.len())?;
        let are_own = self.is_staged(rows) || self.is_late(rows);
        ensure!(op, are_own && !rows.is_empty(), "there are no rows, or they are not the step's");
        let slot = self.launch_sampling(at, vocab, 0, rows)?;
        let wanted = rows.iter().map(|row| row.params.logprobs).collect();
        let (top, since) = (self.step.lists.top, Instant::now());
        self.sampling.queued.push_back(PendingTokens { slot, wanted, top, vocab, since });
        Ok(())
    }

    fn is_sampled(&mut self) -> Result<bool, KernelError> {
        // Tokens that have arrived are valid no matter how late they are polled: this process may
        // have been stopped meanwhile.
        let is_done = self.sampling.is_done()?;
        if !is_done {
            self.device.context.check_group(self.sampling.waited())?;
        }
        Ok(is_done)
    }

    fn take_sampled(&mut self, out: &mut Vec<Sampled>) -> Result<(), KernelError> {
        self.sampling.take(self.device.stream.patience(), out)
    }

    fn logprobs(
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
        let at = rows_at(op, logits, vocab, first_row, targets.len())?;
        check::below_bound(op, "target", targets, vocab)?;
        ensure!(op, top_n <= TOP_MAX, "{top_n} most likely tokens, at most {TOP_MAX}");
        if targets.is_empty() {
            return Ok(());
        }
        let patience = self.device.stream.patience();
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

impl CudaBackend {
    /// Samples and starts copying the results; returns the slot that they go to.
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
        // For queued tokens, too: this is the slot of the older step, which has been taken.
        let is_free = sampling.queued.iter().all(|queued| queued.slot != slot);
        ensure!("sample", is_free, "{QUEUED_MAX} steps are queued already");
        sampling.results()?.download(device, slot, rows.len(), top)?;
        // After the tokens, which need not wait for it.
        let report = device.context.group.call(|group| group.report_time(device));
        report.unwrap_or(Ok(()))?;
        Ok(slot)
    }

    /// Whether these are the step's own rows, with parameters uploaded at its beginning.
    fn is_staged(&self, rows: &[SampleRow<'_>]) -> bool {
        !self.step.samples_late() && self.step.has_sampling(rows)
    }

    /// Whether these are the step's own rows, with parameters uploaded together with their masks.
    fn is_late(&self, rows: &[SampleRow<'_>]) -> bool {
        self.step.samples_late() && self.step.has_samples(rows.len())
    }

    /// Chooses each row's token without gathering its logits: each rank finds the candidates in its
    /// own part of the vocabulary and sends them to the others. Then runs the graph, if there is
    /// one; `late` rows are sampled after it.
    fn pick(
        &mut self,
        logits: Rows,
        part: VocabShard,
        rows: &[SampleRow<'_>],
        late: bool,
    ) -> Result<(), KernelError> {
        let op = "sample";
        let VocabShard { first_id, count, candidates } = part;
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
        if !self.step.record_or_skip(op, [logits.ptr.0, u64::from(first_id), count as u64]) {
            let LaunchRows { rows, live } = match late {
                true => LaunchRows { rows, live: DevicePtr::default() },
                false => {
                    let most = self.sampling.results()?.rows;
                    self.step.launched_samples(op, rows, most)?
                }
            };
            let (bytes, ranks) = (rows * row_bytes(candidates), self.world_size() as usize);
            let own = self.scratch(ScratchKind::Best, candidate_bytes(candidates, ranks, rows))?;
            let all = own.offset(bytes);
            let Self { device, sampling, .. } = self;
            let out = sampling.results()?.device.ptr();
            let (find, choose) = match candidates {
                Candidates::Few(most) => {
                    let sizes = (count, first_id, most);
                    let find = launch::best_keys(logits, masked, own, sizes, rows, live);
                    let sizes = (ranks, rows, most);
                    (find, launch::draw_best(all, masked.0, out, sizes, live))
                }
                Candidates::All | Candidates::Best => {
                    let sizes = (count, first_id);
                    let find = launch::argmax(logits, Some(masked), own, sizes, rows, Some(live));
                    (find, launch::argmax_merge(all, out, (ranks, rows), live))
                }
            };
            // SAFETY: the logits have as many rows and columns; the scratch was made for it; masks
            // were checked to cover the whole vocabulary.
            unsafe { device.launch(find) }?;
            let group = &device.context.group;
            group.call(|group| group.all_gather(device, own, all, bytes)).unwrap_or(Ok(()))?;
            // SAFETY: results have room for the largest graph's rows, and for this step's; a list
            // was checked to hold the keys of as many ranks.
            unsafe { device.launch(choose) }?;
        }
        self.count(rows * row_bytes(candidates));
        self.step.close(&self.device.stream)
    }

    /// Samples as the last part of a graph, and runs the graph.
    fn sample_in_graph(&mut self, logits: Rows, vocab: usize) -> Result<(), KernelError> {
        let count = self.step.counts().samples;
        if !self.step.record_or_skip("sample", [logits.ptr.0, vocab as u64, count as u64]) {
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

    /// Samples immediately: rows with edited logits a few at a time, separate from others.
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
        let sample_launches = edits::sample_launches(&lists.edited, edits::rows_at_once(vocab));
        let scratch = sampling.scratch(device, vocab, &sample_launches)?;
        let top_n = lists.top;
        let results = sampling.results()?;
        let top = results.top(device, rows.len(), top_n)?;
        for SampleLaunch { first, count, edited } in sample_launches {
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
            // SAFETY: rows were checked; every list and result has room for them, and scratch has
            // room for as many as are sampled together.
            unsafe { device.launch(launch::sample(&io, vocab, count, None)) }?;
        }
        Ok(())
    }
}
