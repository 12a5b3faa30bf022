//! What a step reads, on the GPU; and whether it runs call by call or as a graph.
//!
//! A decode step of a kind that was not seen before runs call by call, which loads and chooses what
//! is loaded and chosen at first use. The second is recorded and run, later ones only run the
//! record: their calls are compared with the recorded ones and do nothing else.
use std::rc::Rc;
use std::time::Duration;

use super::batch::{Capacity, Cut, Layout, SampleLists, largest, live, sizes};
use super::bucket::{Stage, StagedCache, decode_bucket};
use super::context::Context;
use super::memory::{DeviceMemory, DevicePtr, Pinned};
use super::parts::Windows;
use super::stream::{Event, Graph, Stream};
use crate::backend::{AttentionShape, Batch, StepInputs};
use crate::error::KernelError;

/// Graphs kept: those of all numbers of rows, each with and without adapters, with sampling over whole
/// logits, over parts, and left out of either. Each holds a few hundred nodes: about a megabyte.
const GRAPHS_MAX: usize = 176;
/// How long an upload may take.
const UPLOAD_PATIENCE: Duration = Duration::from_secs(60);

/// What tells one graph from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct GraphKey {
    /// Rows it is made for.
    rows: u32,
    /// Sampling is part of it.
    samples: bool,
    /// Each rank looks at its own logits.
    parts: bool,
    /// Some rows have adapters.
    adapters: bool,
}

/// A graph and the calls it was made of.
#[derive(Debug)]
pub(super) struct Recorded {
    graph: Graph,
    signature: u64,
}

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
    checked: Vec<(&'static str, [usize; 2])>,
    layout: Layout,
    windows: Windows,
    counts: Counts,
    actual: Capacity,
    /// The largest number of rows that all buffers have room for.
    rows_max: usize,
    /// The largest number of rows that any buffer has room for.
    rows_most: usize,
    block: Option<DeviceMemory>,
    staging: Vec<(Pinned<u32>, Event)>,
    next: usize,
    pub(super) lists: SampleLists,
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
            rows_max: usize::MAX,
            rows_most: 0,
            block: None,
            staging: Vec::new(),
            next: 0,
            lists: SampleLists::default(),
        }
    }

    /// A buffer of `rows` rows was made: no graph is made for more rows, and none that knows of
    /// other buffers is kept.
    pub(super) fn buffer_made(&mut self, rows: usize) {
        self.rows_max = self.rows_max.min(rows);
        self.rows_most = self.rows_most.max(rows);
        self.graphs.clear();
    }

    /// Memory that graphs may name was moved.
    pub(super) fn forget_graphs(&mut self) {
        self.graphs.clear();
    }

    /// No graphs from now on.
    pub(super) fn give_up_graphs(&mut self, reason: &str) {
        self.graphs.clear();
        self.graphs_off.get_or_insert_with(|| reason.to_owned());
    }

    /// A step could not be captured: the next one is, without kernels that begin early; where that is
    /// how it was done, none is from now on.
    pub(super) fn capture_failed(&mut self, reason: &str) {
        self.graphs.clear();
        if self.overlaps {
            self.overlaps = false;
            self.overlap_off = Some(reason.to_owned());
        } else {
            self.give_up_graphs(reason);
        }
    }

    /// Whether kernels may begin before those before them are complete.
    pub(super) fn overlaps(&self) -> bool {
        self.overlaps
    }

    /// Says whether they may; graphs of the other kind are forgotten.
    pub(super) fn set_overlap(&mut self, overlaps: bool) {
        self.graphs.clear();
        self.overlaps = overlaps && self.overlap_off.is_none();
    }

    /// Whether graphs are captured, as far as this rank decides.
    pub(super) fn can_capture(&self) -> bool {
        self.graphs_off.is_none()
    }

    /// Whether decode steps become graphs now: alike on all ranks of a group.
    pub(super) fn captures(&self) -> bool {
        self.graphs_off.is_none() && self.graphs_rest.is_none()
    }

    /// Forgets all graphs; none are made for the reason given, until this is called again.
    pub(super) fn use_graphs(&mut self, not: Option<&'static str>) {
        self.graphs.clear();
        self.graphs_rest = not;
    }

    /// Whether ranks can tell each other the best of their own logits.
    pub(super) fn allow_parts(&mut self, parts: bool) {
        self.parts = parts;
    }

    /// Whether the step's tokens can be chosen without anybody's seeing all logits.
    pub(super) fn may_be_in_parts(&self) -> bool {
        self.parts && self.is_plain && self.lists.greedy
    }

    /// For people: how many graphs there are, or why there are none.
    pub(super) fn graphs_text(&self) -> String {
        match self.graphs_off.as_deref().or(self.graphs_rest) {
            Some(reason) => format!("no graphs ({reason})"),
            None => {
                let made = self.graphs.made();
                self.overlap_off.as_ref().map_or_else(
                    || format!("{made} graphs"),
                    |reason| format!("{made} graphs whose kernels do not begin early ({reason})"),
                )
            }
        }
    }

    /// How many graphs there are.
    pub(super) fn num_graphs(&self) -> usize {
        self.graphs.made()
    }

    /// Items to launch for.
    pub(super) fn counts(&self) -> Counts {
        self.counts
    }

    /// How attention's queries are cut into tiles.
    pub(super) fn cut(&self, shape: &AttentionShape, windows: Windows) -> Cut {
        let group = shape.num_heads / shape.num_kv_heads.max(1);
        Cut { group, all_tiles: self.all_tiles, windows }
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

    /// The graph's key, when the step can be one.
    fn key(&self, inputs: &StepInputs<'_>, found: &Capacity) -> Option<GraphKey> {
        let decodes = inputs.is_plain
            && self.captures()
            && inputs.batch.seqs.iter().all(|seq| seq.num_rows == 1)
            && found.samples == found.rows
            && found.seqs == found.rows
            && inputs.sampling.len() == found.samples;
        if !decodes {
            return None;
        }
        let rows = u32::try_from(found.rows).ok()?;
        let rows_max = u32::try_from(self.rows_max).unwrap_or(u32::MAX);
        Some(GraphKey {
            rows: decode_bucket(rows, rows_max)?,
            parts: self.may_be_in_parts(),
            adapters: !inputs.adapters.is_empty(),
            samples: !inputs.masked
                && !self.lists.edits
                && self.lists.top == 0
                && !inputs.sampling.is_empty(),
        })
    }

    /// Lays out and uploads what a step, or a call outside of one, reads.
    #[allow(clippy::too_many_arguments, reason = "a step's inputs, and where they go")]
    pub(super) fn stage(
        &mut self,
        context: &Rc<Context>,
        stream: &Stream,
        capacity: Capacity,
        ids: &[u32],
        (feed, adapters): (&[u32], &[u32]),
        batch: &Batch<'_>,
        cut: Cut,
        samples: &[u32],
    ) -> Result<(), KernelError> {
        let layout = Layout::new(capacity);
        let words = layout.words(batch.block_tables.len());
        let places_rows = self.lists.params.len() <= layout.feed - layout.params;
        // Room for every step at once, but for block tables: moving costs all graphs.
        let samples_most = self.rows_max.min(self.rows_most);
        let most =
            Layout::new(largest(self.rows_most, samples_most, cut)).words(batch.block_tables.len());
        self.reserve(context, stream, words, most)?;
        let (Some(block), Some((pinned, travelled))) =
            (&self.block, self.staging.get_mut(self.next))
        else {
            return Err(KernelError::Device("no memory for a step's inputs".to_owned()));
        };
        // The one before the last has long travelled.
        travelled.wait(UPLOAD_PATIENCE)?;
        let staged = &mut pinned.as_mut_slice()[..words];
        layout.fill(staged, ids, batch, cut, samples)?;
        if places_rows {
            let params = &self.lists.params;
            staged[layout.params..][..params.len()].copy_from_slice(params);
        }
        if feed.len() <= layout.adapters - layout.feed {
            staged[layout.feed..][..feed.len()].copy_from_slice(feed);
        }
        if adapters.len() <= layout.tables - layout.adapters {
            staged[layout.adapters..][..adapters.len()].copy_from_slice(adapters);
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
        // Half as much again: contexts grow token by token.
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

    /// Where the word at `offset` of the step's inputs is.
    pub(super) fn at(&self, offset: usize) -> DevicePtr {
        self.block.as_ref().map_or(DevicePtr::default(), |block| block.ptr().offset(offset * 4))
    }

    /// Offsets of the step's inputs.
    pub(super) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Where the parts are that the layers of a window have, where it is said how many there are, and how
    /// many there are at most.
    pub(super) fn parts(
        &self,
        window: Option<u32>,
    ) -> Result<(DevicePtr, DevicePtr, usize), KernelError> {
        let Some(place) = self.windows.place(window) else {
            let message = format!("the window {window:?} is none that the step began with");
            return Err(KernelError::Shape { op: "paged_attention", message });
        };
        let list = self.at(self.layout.parts_of(place, self.windows));
        Ok((list, self.at(live::PARTS + place), self.counts.parts / self.windows.count().max(1)))
    }

    /// Rows to launch for an operation on `rows` rows, and the word that says how many there are.
    pub(super) fn launched(
        &self,
        op: &'static str,
        rows: usize,
    ) -> Result<(usize, DevicePtr), KernelError> {
        if self.is_open() && rows == self.actual.rows {
            return Ok((self.counts.rows, self.at(live::ROWS)));
        }
        if self.is_graph() {
            let message = format!("{rows} rows in a step of {}", self.actual.rows);
            return Err(KernelError::Shape { op, message });
        }
        Ok((rows, DevicePtr::default()))
    }

    /// As [`Step::launched`], of rows that are sampled.
    pub(super) fn launched_samples(
        &self,
        op: &'static str,
        rows: usize,
    ) -> Result<(usize, DevicePtr), KernelError> {
        if self.is_open() && rows == self.actual.samples {
            return Ok((self.counts.samples, self.at(live::SAMPLES)));
        }
        if self.is_graph() {
            let message = format!("{rows} rows in a step that samples {}", self.actual.samples);
            return Err(KernelError::Shape { op, message });
        }
        Ok((rows, DevicePtr::default()))
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
        bounds: [usize; 2],
    ) -> bool {
        !self.has_batch(batch) || !self.checked.contains(&(op, bounds))
    }

    /// The batch keeps these bounds.
    pub(super) fn checked(&mut self, op: &'static str, bounds: [usize; 2]) {
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

    /// Runs what was recorded or put off; calls are run at once from now on.
    pub(super) fn close(&mut self, stream: &Stream) -> Result<(), KernelError> {
        let signature = std::mem::take(&mut self.signature);
        match self.mode {
            Mode::Record(key) => {
                self.mode = Mode::Eager;
                let graph = stream.end_capture().inspect_err(|error| {
                    self.capture_failed(&error.to_string());
                })?;
                graph.launch(stream)?;
                self.graphs.insert(key, Recorded { graph, signature });
            }
            Mode::Replay(key) => {
                self.mode = Mode::Eager;
                match self.graphs.get(&key) {
                    Some(recorded) if recorded.signature == signature => {
                        recorded.graph.launch(stream)?;
                    }
                    _ => {
                        self.give_up_graphs("a step's calls were not the recorded ones");
                        return Err(KernelError::Device(
                            "a step's calls were not those of its graph: a bug in this program"
                                .to_owned(),
                        ));
                    }
                }
            }
            Mode::Eager | Mode::Loose => {}
        }
        Ok(())
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
