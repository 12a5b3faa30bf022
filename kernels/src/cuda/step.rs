//! The state of a step on the GPU: its inputs, and whether it runs call by call or as a graph.
//!
//! The first decode step of a kind runs call by call, which loads and chooses everything that is
//! loaded and chosen at first use. The second is captured and run. Later ones only run the graph:
//! their calls are compared with the recorded ones and do nothing else.
//! - `graphs`: selection, capture and loss of graphs
//! - `shortage`: PURE: when graphs are made again after memory for one was short
//! - `inputs`: layout of the inputs that the kernels read
use std::rc::Rc;

use super::batch::{Capacity, Layout, sizes};
use super::bucket::{CacheStage, StagedCache};
use super::context::Context;
use super::memory::{DeviceMemory, DevicePtr, Pinned};
use super::parts::{Splits, Windows};
use super::sample_lists::{Candidates, SampleLists};
use super::stream::{Event, Stream};
use crate::backend::{Batch, StepInputs};
use crate::error::KernelError;

mod graphs;
mod inputs;
mod shortage;

pub(super) use inputs::{LaunchRows, StepLists};

use graphs::{GRAPHS_MAX, GraphKey, RecordedGraph};
use shortage::Shortage;

/// How calls are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// No step is open: every call stands on its own.
    Loose,
    /// Calls run immediately.
    Eager,
    /// Calls are recorded, and run when the step is closed.
    Record(GraphKey),
    /// Calls are only compared with the recorded ones; the graph runs when the step is closed.
    Replay(GraphKey),
}

/// Identity of a slice: within a step, equal places mean the same slice.
type SliceId = (usize, usize);

fn place<T>(slice: &[T]) -> SliceId {
    (slice.as_ptr().addr(), slice.len())
}

fn batch_place(batch: &Batch<'_>) -> [SliceId; 4] {
    [place(batch.positions), place(batch.slots), place(batch.seqs), place(batch.block_tables)]
}

/// The slices that a step began with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct StepSlices {
    ids: SliceId,
    batch: [SliceId; 4],
    sample_rows: SliceId,
    sampling: SliceId,
    adapters: SliceId,
    states: SliceId,
}

/// Numbers of items that launches are made for: those of the step, or those of its graph.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) rows: usize,
    pub(super) tiles: usize,
    pub(super) seqs: usize,
    /// Sequences of one row, and the parts that they are split into.
    pub(super) items: usize,
    pub(super) parts: usize,
    pub(super) samples: usize,
}

/// The state of a step; see the module.
#[derive(Debug)]
pub(super) struct Step {
    // Graphs first: they refer to the memory below.
    graphs: StagedCache<GraphKey, RecordedGraph>,
    /// Attention treats sequences of one row like those of many.
    all_tiles: bool,
    /// Why graphs were given up, if they were.
    graphs_off: Option<String>,
    /// Why there are no graphs for now.
    graphs_rest: Option<&'static str>,
    /// Of memory for graphs.
    shortage: Shortage,
    /// Kernels can begin before earlier ones are complete, also within a graph.
    overlaps: bool,
    /// Why they no longer can.
    overlap_off: Option<String>,
    /// Ranks exchange data on their devices, in the middle of steps: all of them call, record and
    /// replay the same ones. They can exchange the best of their own logits.
    grouped: bool,
    /// Each of the step's rows only needs a token.
    is_plain: bool,
    /// The step's rows are sampled later, with masks.
    late: bool,
    mode: Mode,
    /// Mode once the step is open.
    planned: Mode,
    signature: u64,
    identity: StepSlices,
    /// Bounds that the step's batch is known to satisfy; every layer asks.
    checked: Vec<(&'static str, (usize, usize))>,
    layout: Layout,
    windows: Windows,
    counts: Counts,
    actual: Capacity,
    /// Rows of the smallest buffer, which all buffers have room for, and of the largest.
    least_room: usize,
    most_room: usize,
    block: Option<DeviceMemory>,
    staging: Vec<(Pinned<u32>, Event)>,
    next: usize,
    pub(super) lists: SampleLists,
    /// Scratch: splits of sequences.
    found: Vec<(u32, Splits)>,
}

impl Step {
    pub(super) fn new(graphs: bool, overlaps: bool, all_tiles: bool) -> Self {
        Self {
            all_tiles,
            graphs: StagedCache::new(GRAPHS_MAX),
            graphs_off: (!graphs).then(|| "they are switched off".to_owned()),
            graphs_rest: None,
            shortage: Shortage::default(),
            overlaps,
            overlap_off: None,
            grouped: false,
            is_plain: false,
            late: false,
            mode: Mode::Loose,
            planned: Mode::Loose,
            signature: 0,
            identity: StepSlices::default(),
            checked: Vec::new(),
            layout: Layout::new(Capacity::default()),
            windows: Windows::ALL,
            counts: Counts::default(),
            actual: Capacity::default(),
            least_room: usize::MAX,
            most_room: 0,
            block: None,
            staging: Vec::new(),
            next: 0,
            lists: SampleLists::default(),
            found: Vec::new(),
        }
    }

    /// Sets whether ranks exchange data on their devices.
    pub(super) fn set_grouped(&mut self, grouped: bool) {
        self.grouped = grouped;
    }

    /// What the step's tokens depend on: all logits, unless ranks can exchange the best of them.
    pub(super) fn candidates(&self) -> Candidates {
        if self.grouped && self.is_plain { self.lists.candidates } else { Candidates::All }
    }

    /// Numbers of items to launch for.
    pub(super) fn counts(&self) -> Counts {
        self.counts
    }

    /// Whether a step is open.
    pub(super) fn is_open(&self) -> bool {
        self.mode != Mode::Loose
    }

    /// Whether the step runs as a graph, as far as known yet.
    pub(super) fn is_graph(&self) -> bool {
        matches!(self.mode, Mode::Record(_) | Mode::Replay(_))
    }

    /// Whether the graph includes sampling.
    pub(super) fn samples_within(&self) -> bool {
        matches!(self.mode, Mode::Record(key) | Mode::Replay(key) if key.samples)
    }

    /// Whether the step's rows are sampled after its launch, with masks.
    pub(super) fn samples_late(&self) -> bool {
        self.is_open() && self.late
    }

    /// Records or compares a call; true if nothing else has to be done for it.
    pub(super) fn record_or_skip(&mut self, op: &'static str, what: [u64; 3]) -> bool {
        if self.is_graph() {
            // FNV-1a over words: enough to distinguish calls; no protection against attacks.
            for word in what.into_iter().chain([op.len() as u64, op.as_ptr().addr() as u64]) {
                self.signature =
                    (self.signature ^ word).wrapping_mul(0x0100_0000_01b3).rotate_left(29);
            }
        }
        matches!(self.mode, Mode::Replay(_))
    }

    /// Begins a step. If an earlier capture was not finished, something in it failed, so it is
    /// abandoned and counts as a failed capture.
    pub(super) fn begin(
        &mut self,
        context: &Rc<Context>,
        stream: &Stream,
        inputs: &StepInputs<'_>,
    ) -> Result<(), KernelError> {
        self.drop_failed(stream);
        self.shortage.step_begins();
        let shape = inputs.attention;
        let cut = self.cut(shape, Windows::new(inputs.windows)?);
        if !inputs.feed.is_empty() && inputs.feed.len() != inputs.ids.len() {
            let message = format!("{} rows are fed of {}", inputs.feed.len(), inputs.ids.len());
            return Err(KernelError::Shape { op: "begin_step", message });
        }
        let (adapters, rows) = (inputs.adapters.len(), inputs.ids.len());
        if adapters > 0 && adapters != rows {
            let message = format!("{adapters} rows have adapters of {rows}");
            return Err(KernelError::Shape { op: "begin_step", message });
        }
        let (states, seqs) = (inputs.states.len(), inputs.batch.seqs.len());
        if states > 0 && states != seqs {
            let message = format!("{states} states of {seqs} sequences");
            return Err(KernelError::Shape { op: "begin_step", message });
        }
        self.lists.pack(inputs.sampling)?;
        if !self.lists.masks.is_empty() {
            let message = "masks come when the rows are sampled".to_owned();
            return Err(KernelError::Shape { op: "begin_step", message });
        }
        self.is_plain = inputs.is_plain;
        self.late = inputs.masked;
        let found = sizes(inputs.ids.len(), &inputs.batch, cut, inputs.sample_rows.len());
        let key = self.key(inputs, &found);
        let capacity = key.map_or(found, |key| {
            let rows = key.rows as usize;
            let (items, tiles) = cut.of_single_rows(rows);
            Capacity { rows, seqs: rows, tiles, parts: cut.most_parts(items), samples: rows }
        });
        let (ids, samples) = (inputs.ids, inputs.sample_rows);
        let StepInputs { feed, adapters, states, .. } = *inputs;
        let given = StepLists { feed, adapters, states };
        self.stage(context, stream, capacity, ids, given, &inputs.batch, cut, samples)?;
        if key.is_some() {
            let Capacity { rows, seqs, tiles, parts, samples } = capacity;
            let (items, _) = cut.of_single_rows(rows);
            self.counts = Counts { rows, tiles, seqs, items, parts, samples };
        }
        self.identity = StepSlices {
            ids: place(inputs.ids),
            batch: batch_place(&inputs.batch),
            sample_rows: place(inputs.sample_rows),
            sampling: place(inputs.sampling),
            adapters: place(adapters),
            states: place(states),
        };
        // In a group all ranks record the same steps, whatever a single one has memory for.
        let makes_more = self.grouped || !self.shortage.is_waiting();
        // Only now, since making room for the inputs may have dropped all graphs.
        self.planned = match key.map(|key| (self.graphs.stage(key), key)) {
            Some((CacheStage::Make, key)) if makes_more => Mode::Record(key),
            Some((CacheStage::Use, key)) => Mode::Replay(key),
            _ => Mode::Eager,
        };
        Ok(())
    }

    /// Opens the step: calls from here on belong to it. Launches between [`Step::begin`] and this
    /// are not part of its graph.
    pub(super) fn open(&mut self, stream: &Stream) -> Result<(), KernelError> {
        if let Mode::Record(_) = self.planned {
            stream.begin_capture().inspect_err(|error| {
                self.not_recorded(stream.take_capture_fault(), &error.to_string());
            })?;
        }
        self.mode = self.planned;
        Ok(())
    }

    /// Whether these are the step's own token ids.
    pub(super) fn has_ids(&self, ids: &[u32]) -> bool {
        self.is_open() && self.identity.ids == place(ids)
    }

    /// Address of the adapters of the step's rows, if these are they.
    pub(super) fn adapters(&self, adapters: &[u32]) -> Option<DevicePtr> {
        let is_own = self.is_open() && self.identity.adapters == place(adapters);
        is_own.then(|| self.at(self.layout.adapters))
    }

    /// Whether these are the states of the step's own sequences.
    pub(super) fn has_states(&self, states: &[u32]) -> bool {
        self.is_open() && self.identity.states == place(states)
    }

    /// Whether this is the step's own batch.
    pub(super) fn has_batch(&self, batch: &Batch<'_>) -> bool {
        self.is_open() && self.identity.batch == batch_place(batch)
    }

    /// Whether the batch is not yet known to satisfy these bounds.
    pub(super) fn is_unchecked(
        &self,
        op: &'static str,
        batch: &Batch<'_>,
        bounds: (usize, usize),
    ) -> bool {
        !self.has_batch(batch) || !self.checked.contains(&(op, bounds))
    }

    /// Records that the batch satisfies these bounds.
    pub(super) fn checked(&mut self, op: &'static str, bounds: (usize, usize)) {
        if self.is_open() {
            self.checked.push((op, bounds));
        }
    }

    /// Whether these are the step's own rows to sample.
    pub(super) fn has_sample_rows(&self, rows: &[u32]) -> bool {
        self.is_open() && self.identity.sample_rows == place(rows)
    }

    /// Whether the step samples this many rows.
    pub(super) fn has_samples(&self, rows: usize) -> bool {
        self.is_open() && self.actual.samples == rows
    }

    /// Whether these are the parameters of the step's own rows.
    pub(super) fn has_sampling<T>(&self, rows: &[T]) -> bool {
        self.is_open() && self.identity.sampling == place(rows)
    }

    /// Ends the step.
    pub(super) fn end(&mut self, stream: &Stream) -> Result<(), KernelError> {
        let closed = self.close(stream);
        self.mode = Mode::Loose;
        self.identity = StepSlices::default();
        closed
    }

    /// Drops a step that failed, if the last one did.
    pub(super) fn drop_failed(&mut self, stream: &Stream) {
        if self.abandon(stream) {
            let fault = stream.take_capture_fault();
            self.not_recorded(fault, "a step failed while its graph was captured");
        }
    }

    /// Drops a step that was not ended; returns whether it was being recorded.
    pub(super) fn abandon(&mut self, stream: &Stream) -> bool {
        let recorded = matches!(self.mode, Mode::Record(_));
        if recorded {
            stream.abandon_capture();
        }
        self.mode = Mode::Loose;
        self.checked.clear();
        self.signature = 0;
        self.identity = StepSlices::default();
        recorded
    }
}
