//! What a step reads, on the GPU; and whether it runs call by call or as a graph.
//!
//! A decode step of a kind that was not seen before runs call by call, which loads and chooses what
//! is loaded and chosen at first use. The second is recorded and run, later ones only run the
//! record: their calls are compared with the recorded ones and do nothing else.
//! - `graphs`: which graph, whether there are any, how they come about
//! - `inputs`: where what the kernels read lies
use std::rc::Rc;

use super::batch::{Capacity, Layout, sizes};
use super::bucket::{Stage, StagedCache};
use super::context::Context;
use super::memory::{DeviceMemory, DevicePtr, Pinned};
use super::parts::{Splits, Windows};
use super::sample_lists::SampleLists;
use super::stream::{Event, Stream};
use crate::backend::{Batch, StepInputs};
use crate::error::KernelError;

mod graphs;
mod inputs;

pub(super) use inputs::Launched;

use graphs::{GRAPHS_MAX, GraphKey, Recorded};

/// How calls are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// No step is under way: every call stands for itself.
    Loose,
    /// At once.
    Eager,
    /// Recorded, and run when the step is closed.
    Record(GraphKey),
    /// Only compared; the record runs when the step is closed.
    Replay(GraphKey),
}

/// Where a slice is: two equal ones within a step are the same slice.
type Place = (usize, usize);

fn place<T>(slice: &[T]) -> Place {
    (slice.as_ptr().addr(), slice.len())
}

fn batch_place(batch: &Batch<'_>) -> [Place; 4] {
    [place(batch.positions), place(batch.slots), place(batch.seqs), place(batch.block_tables)]
}

/// The slices that a step was begun with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Identity {
    ids: Place,
    batch: [Place; 4],
    sample_rows: Place,
    sampling: Place,
    adapters: Place,
}

/// Items that launches are made for: as many as there are, or as many as a graph has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) rows: usize,
    pub(super) tiles: usize,
    pub(super) seqs: usize,
    /// Sequences of one row, and the parts that they are split in.
    pub(super) items: usize,
    pub(super) parts: usize,
    pub(super) samples: usize,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Step {
    // Graphs first: they name the memory below.
    graphs: StagedCache<GraphKey, Recorded>,
    /// Attention treats sequences of one row as it does those of many.
    all_tiles: bool,
    /// Why there are none, when they were given up.
    graphs_off: Option<String>,
    /// Why there are none for now.
    graphs_rest: Option<&'static str>,
    /// Kernels may begin before those before them are complete, also within a graph.
    overlaps: bool,
    /// Why they may not any more.
    overlap_off: Option<String>,
    /// Ranks can tell each other the best of their own logits.
    parts: bool,
    /// Nobody wants to know more of the step's rows than a token each.
    is_plain: bool,
    /// Its rows are sampled later, with masks.
    late: bool,
    mode: Mode,
    /// What the mode will be once the step is open.
    planned: Mode,
    signature: u64,
    identity: Identity,
    /// Bounds that the step's batch was found to keep: every layer asks.
    checked: Vec<(&'static str, (usize, usize))>,
    layout: Layout,
    windows: Windows,
    counts: Counts,
    actual: Capacity,
    /// Rows of the smallest buffer, so what all have room for, and of the largest.
    least_room: usize,
    most_room: usize,
    block: Option<DeviceMemory>,
    staging: Vec<(Pinned<u32>, Event)>,
    next: usize,
    pub(super) lists: SampleLists,
    /// Scratch: how sequences are split.
    found: Vec<(u32, Splits)>,
}

impl Step {
    pub(super) fn new(graphs: bool, overlaps: bool, all_tiles: bool) -> Self {
        Self {
            all_tiles,
            graphs: StagedCache::new(GRAPHS_MAX),
            graphs_off: (!graphs).then(|| "they are switched off".to_owned()),
            graphs_rest: None,
            overlaps,
            overlap_off: None,
            parts: false,
            is_plain: false,
            late: false,
            mode: Mode::Loose,
            planned: Mode::Loose,
            signature: 0,
            identity: Identity::default(),
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

    /// Whether ranks can tell each other the best of their own logits.
    pub(super) fn allow_parts(&mut self, parts: bool) {
        self.parts = parts;
    }

    /// Whether the step's tokens can be chosen without anybody's seeing all logits.
    pub(super) fn may_be_in_parts(&self) -> bool {
        self.parts && self.is_plain && self.lists.greedy
    }

    /// Items to launch for.
    pub(super) fn counts(&self) -> Counts {
        self.counts
    }

    /// Whether a step is under way.
    pub(super) fn is_open(&self) -> bool {
        self.mode != Mode::Loose
    }

    /// Whether the step runs as a graph, as far as can be told yet.
    pub(super) fn is_graph(&self) -> bool {
        matches!(self.mode, Mode::Record(_) | Mode::Replay(_))
    }

    /// Whether the graph has the sampling in it.
    pub(super) fn samples_within(&self) -> bool {
        matches!(self.mode, Mode::Record(key) | Mode::Replay(key) if key.samples)
    }

    /// Whether its rows are sampled behind its launch, with masks.
    pub(super) fn samples_late(&self) -> bool {
        self.is_open() && self.late
    }

    /// Compares or records a call; true when nothing else is to be done for it.
    pub(super) fn skips(&mut self, op: &'static str, what: [u64; 3]) -> bool {
        if self.is_graph() {
            // FNV-1a over words: calls are told apart, nobody attacks this.
            for word in what.into_iter().chain([op.len() as u64, op.as_ptr().addr() as u64]) {
                self.signature =
                    (self.signature ^ word).wrapping_mul(0x0100_0000_01b3).rotate_left(29);
            }
        }
        matches!(self.mode, Mode::Replay(_))
    }

    /// Begins a step. A recording that was not finished is given up, and graphs with it: something
    /// in it failed.
    pub(super) fn begin(
        &mut self,
        context: &Rc<Context>,
        stream: &Stream,
        inputs: &StepInputs<'_>,
    ) -> Result<(), KernelError> {
        if self.abandon(stream) {
            self.capture_failed("a step failed while its graph was captured");
        }
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
        let given = (inputs.feed, inputs.adapters);
        self.stage(context, stream, capacity, ids, given, &inputs.batch, cut, samples)?;
        if key.is_some() {
            let Capacity { rows, seqs, tiles, parts, samples } = capacity;
            let (items, _) = cut.of_single_rows(rows);
            self.counts = Counts { rows, tiles, seqs, items, parts, samples };
        }
        self.identity = Identity {
            ids: place(inputs.ids),
            batch: batch_place(&inputs.batch),
            sample_rows: place(inputs.sample_rows),
            sampling: place(inputs.sampling),
            adapters: place(inputs.adapters),
        };
        // Only now: making room for the inputs may have cost all graphs.
        self.planned = match key.map(|key| (self.graphs.stage(key), key)) {
            Some((Stage::Make, key)) => Mode::Record(key),
            Some((Stage::Use, key)) => Mode::Replay(key),
            _ => Mode::Eager,
        };
        Ok(())
    }

    /// From here on calls are the step's. What is launched between [`Step::begin`] and this is
    /// no part of its graph.
    pub(super) fn open(&mut self, stream: &Stream) -> Result<(), KernelError> {
        if let Mode::Record(_) = self.planned {
            stream.begin_capture().inspect_err(|error| {
                self.capture_failed(&error.to_string());
            })?;
        }
        self.mode = self.planned;
        Ok(())
    }

    /// Whether these are the step's own token ids.
    pub(super) fn has_ids(&self, ids: &[u32]) -> bool {
        self.is_open() && self.identity.ids == place(ids)
    }

    /// Where the step's own rows' adapters are, if these are they.
    pub(super) fn adapters(&self, adapters: &[u32]) -> Option<DevicePtr> {
        let is_own = self.is_open() && self.identity.adapters == place(adapters);
        is_own.then(|| self.at(self.layout.adapters))
    }

    /// Whether this is the step's own batch.
    pub(super) fn has_batch(&self, batch: &Batch<'_>) -> bool {
        self.is_open() && self.identity.batch == batch_place(batch)
    }

    /// Whether it is not known yet that the batch keeps these bounds.
    pub(super) fn is_unchecked(
        &self,
        op: &'static str,
        batch: &Batch<'_>,
        bounds: (usize, usize),
    ) -> bool {
        !self.has_batch(batch) || !self.checked.contains(&(op, bounds))
    }

    /// The batch keeps these bounds.
    pub(super) fn checked(&mut self, op: &'static str, bounds: (usize, usize)) {
        if self.is_open() {
            self.checked.push((op, bounds));
        }
    }

    /// Whether these are the step's own rows to sample.
    pub(super) fn has_sample_rows(&self, rows: &[u32]) -> bool {
        self.is_open() && self.identity.sample_rows == place(rows)
    }

    /// Whether the step samples so many rows.
    pub(super) fn has_samples(&self, rows: usize) -> bool {
        self.is_open() && self.actual.samples == rows
    }

    /// Whether these are the step's own rows' parameters.
    pub(super) fn has_sampling<T>(&self, rows: &[T]) -> bool {
        self.is_open() && self.identity.sampling == place(rows)
    }

    /// The step is over.
    pub(super) fn end(&mut self, stream: &Stream) -> Result<(), KernelError> {
        let closed = self.close(stream);
        self.mode = Mode::Loose;
        self.identity = Identity::default();
        closed
    }

    /// Drops a step that was not ended; says whether it was being recorded.
    pub(super) fn abandon(&mut self, stream: &Stream) -> bool {
        let recorded = matches!(self.mode, Mode::Record(_));
        if recorded {
            stream.abandon_capture();
        }
        self.mode = Mode::Loose;
        self.checked.clear();
        self.signature = 0;
        self.identity = Identity::default();
        recorded
    }
}
