//! Inputs of a step's kernels: laid out in pinned memory, copied before the step; and the address
//! of each part.
use std::rc::Rc;

use super::{Counts, Step};
use crate::backend::{AttentionShape, Batch};
use crate::check::ensure;
use crate::cuda::batch::{AttentionTiling, Capacity, Layout, largest, live, sizes};
use crate::cuda::context::Context;
use crate::cuda::launch::splits_of;
use crate::cuda::memory::{DeviceMemory, DevicePtr, Pinned};
use crate::cuda::parts::Windows;
use crate::cuda::stream::{Event, Stream};
use crate::error::KernelError;

/// Rows that an operation is launched for.
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct LaunchRows {
    /// Number of rows: those of the step, or those of its graph.
    pub(in crate::cuda) rows: usize,
    /// Address of a word with the number of actual rows; null if all are.
    pub(in crate::cuda) live: DevicePtr,
}

/// Lists that few steps have; each may be empty.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::cuda) struct StepLists<'a> {
    /// As [`StepInputs::feed`](crate::backend::StepInputs::feed).
    pub(in crate::cuda) feed: &'a [u32],
    /// An adapter for each row.
    pub(in crate::cuda) adapters: &'a [u32],
    /// A state for each sequence.
    pub(in crate::cuda) states: &'a [u32],
}

impl Step {
    /// How attention's queries are cut into tiles.
    pub(in crate::cuda) fn cut(&self, shape: &AttentionShape, windows: Windows) -> AttentionTiling {
        let group = shape.num_heads / shape.num_kv_heads.max(1);
        AttentionTiling { group, all_tiles: self.all_tiles, splits: splits_of(shape), windows }
    }

    /// Lays out and uploads the inputs of a step, or of a call outside of one.
    #[allow(clippy::too_many_arguments, reason = "a step's inputs, and where they go")]
    pub(in crate::cuda) fn stage(
        &mut self,
        context: &Rc<Context>,
        stream: &Stream,
        capacity: Capacity,
        ids: &[u32],
        lists: StepLists<'_>,
        batch: &Batch<'_>,
        cut: AttentionTiling,
        samples: &[u32],
    ) -> Result<(), KernelError> {
        let layout = Layout::new(capacity);
        let words = layout.words(batch.block_tables.len());
        let places_rows = self.lists.params.len() <= layout.feed - layout.params;
        // Room for any step at once, apart from block tables, since moving drops all graphs.
        let samples_most = self.least_room.min(self.most_room);
        let most =
            Layout::new(largest(self.most_room, samples_most, cut)).words(batch.block_tables.len());
        self.reserve(context, stream, words, most)?;
        let (Some(block), Some((pinned, travelled))) =
            (&self.block, self.staging.get_mut(self.next))
        else {
            return Err(KernelError::Device("no memory for a step's inputs".to_owned()));
        };
        // The upload before the previous one finished long ago.
        travelled.wait(stream.patience())?;
        let staged = &mut pinned.as_mut_slice()[..words];
        layout.fill(staged, ids, batch, cut, samples, &mut self.found)?;
        if places_rows {
            let params = &self.lists.params;
            staged[layout.params..][..params.len()].copy_from_slice(params);
        }
        for (list, begin, end) in [
            (lists.feed, layout.feed, layout.adapters),
            (lists.adapters, layout.adapters, layout.states),
            (lists.states, layout.states, layout.tables),
        ] {
            if list.len() <= end - begin {
                staged[begin..][..list.len()].copy_from_slice(list);
            }
        }
        block.upload_pinned(stream, 0, pinned, words)?;
        travelled.record(stream)?;
        self.next = 1 - self.next;
        self.layout = layout;
        self.windows = cut.windows;
        self.actual = sizes(ids.len(), batch, cut, samples.len());
        let Capacity { rows, seqs, tiles, parts, samples } = self.actual;
        self.counts = Counts { rows, tiles, seqs, items: cut.items(batch), parts, samples };
        Ok(())
    }

    fn reserve(
        &mut self,
        context: &Rc<Context>,
        stream: &Stream,
        words: usize,
        most: usize,
    ) -> Result<(), KernelError> {
        let room = self.block.as_ref().map_or(0, |block| block.bytes() / 4);
        if words <= room && !self.staging.is_empty() {
            return Ok(());
        }
        stream.synchronize()?;
        // Half as much again, since contexts grow token by token.
        let words = words.max(most);
        let words = (words + words / 2).next_multiple_of(1 << 12);
        self.graphs.clear();
        self.staging.clear();
        self.block = None;
        self.block = Some(DeviceMemory::new(context, words * 4, "a step's inputs")?);
        for _ in 0..2 {
            let pinned = Pinned::new(context, words, "pinned memory for a step's inputs")?;
            self.staging.push((pinned, Event::new(context, false)?));
        }
        Ok(())
    }

    /// Address of the word at `offset` of the step's inputs.
    pub(in crate::cuda) fn at(&self, offset: usize) -> DevicePtr {
        self.block.as_ref().map_or(DevicePtr::default(), |block| block.ptr().offset(offset * 4))
    }

    /// Offsets of the step's inputs.
    pub(in crate::cuda) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Address of the parts of layers with this window, address of their number, and their maximum
    /// number.
    pub(in crate::cuda) fn parts(
        &self,
        window: Option<u32>,
    ) -> Result<(DevicePtr, DevicePtr, usize), KernelError> {
        let Some(place) = self.windows.place(window) else {
            let message = format!("the window {window:?} is not one that the step began with");
            return Err(KernelError::Shape { op: "paged_attention", message });
        };
        let list = self.at(self.layout.parts_of(place, self.windows));
        Ok((list, self.at(live::PARTS + place), self.counts.parts / self.windows.count().max(1)))
    }

    /// The launch for an operation on `rows` rows, with buffers that have room for `most`.
    pub(in crate::cuda) fn launched(
        &self,
        op: &'static str,
        rows: usize,
        most: usize,
    ) -> Result<LaunchRows, KernelError> {
        let own = (self.actual.rows, self.counts.rows, live::ROWS);
        self.launched_of(op, rows, most, own, "a step of")
    }

    /// As [`Step::launched`], for sampled rows.
    pub(in crate::cuda) fn launched_samples(
        &self,
        op: &'static str,
        rows: usize,
        most: usize,
    ) -> Result<LaunchRows, KernelError> {
        let own = (self.actual.samples, self.counts.samples, live::SAMPLES);
        self.launched_of(op, rows, most, own, "a step that samples")
    }

    /// `own`: actual rows of the step, rows that it is launched for, offset of the word with the
    /// former.
    fn launched_of(
        &self,
        op: &'static str,
        rows: usize,
        most: usize,
        (actual, count, word): (usize, usize, usize),
        what: &str,
    ) -> Result<LaunchRows, KernelError> {
        let is_own = self.is_open() && rows == actual;
        ensure!(op, is_own || !self.is_graph(), "{rows} rows in {what} {actual}");
        let (rows, live) =
            if is_own { (count, self.at(word)) } else { (rows, DevicePtr::default()) };
        ensure!(op, rows <= most, "{rows} rows, room for {most}");
        Ok(LaunchRows { rows, live })
    }
}
