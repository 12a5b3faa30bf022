//! The graphs of steps: selection, capture, and loss.
use super::{Mode, Step};
use crate::backend::StepInputs;
use crate::cuda::batch::Capacity;
use crate::cuda::bucket::decode_bucket;
use crate::cuda::sample_lists::Candidates;
use crate::cuda::stream::{CaptureFault, Graph, Stream};
use crate::error::KernelError;

/// Maximum number of graphs: for all numbers of rows, each with and without adapters, in four of
/// the ways to sample: whole logits, the best of parts, a few of the best (of two sizes), and each
/// of these after the graph. Their memory is estimated in [`crate::cuda::capacity`].
pub(super) const GRAPHS_MAX: usize = 176;
/// What distinguishes graphs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::cuda) struct GraphKey {
    /// Number of rows that it is made for.
    pub(super) rows: u32,
    /// Whether sampling is part of it.
    pub(super) samples: bool,
    /// Which of its own logits each rank shares with others.
    pub(super) candidates: Candidates,
    /// Whether some rows have adapters.
    pub(super) adapters: bool,
}

/// A graph, and the signature of its calls.
#[derive(Debug)]
pub(in crate::cuda) struct RecordedGraph {
    pub(super) graph: Graph,
    pub(super) signature: u64,
}

impl Step {
    /// Notes a new buffer of `rows` rows: no graph may have more rows than the smallest buffer, and
    /// graphs made before are dropped.
    pub(in crate::cuda) fn buffer_made(&mut self, rows: usize) {
        self.least_room = self.least_room.min(rows);
        self.most_room = self.most_room.max(rows);
        self.graphs.clear();
    }

    /// Forgets all buffers, and frees the room for the inputs of steps that are as large as those.
    /// The device must be idle.
    pub(in crate::cuda) fn forget_buffers(&mut self) {
        self.graphs.clear();
        (self.least_room, self.most_room) = (usize::MAX, 0);
        self.staging.clear();
        self.block = None;
    }

    /// Drops all graphs, because memory that they may refer to has moved.
    pub(in crate::cuda) fn forget_graphs(&mut self) {
        self.graphs.clear();
    }

    /// Gives up graphs for good.
    pub(in crate::cuda) fn give_up_graphs(&mut self, reason: &str) {
        self.graphs.clear();
        self.graphs_off.get_or_insert_with(|| reason.to_owned());
    }

    /// Handles a step that could not be captured. If memory was short, the graphs so far and early
    /// launch of kernels stay: see `shortage`.
    pub(in crate::cuda) fn not_recorded(&mut self, fault: Option<CaptureFault>, reason: &str) {
        match fault {
            Some(CaptureFault::Memory) => self.shortage.began(reason, self.grouped),
            Some(CaptureFault::Refused) | None => self.capture_refused(reason),
        }
    }

    /// Later steps are captured without early launch of kernels; if that was already off, graphs
    /// are given up.
    fn capture_refused(&mut self, reason: &str) {
        self.graphs.clear();
        if self.overlaps {
            self.overlaps = false;
            self.overlap_off = Some(reason.to_owned());
        } else {
            self.give_up_graphs(reason);
        }
    }

    /// Whether kernels can begin before earlier ones are complete.
    pub(in crate::cuda) fn overlaps(&self) -> bool {
        self.overlaps
    }

    /// Switches early launch of kernels on or off; drops graphs of the other kind.
    pub(in crate::cuda) fn set_overlap(&mut self, overlaps: bool) {
        self.graphs.clear();
        self.overlaps = overlaps && self.overlap_off.is_none();
    }

    /// Notes that this rank is about to join a group.
    pub(in crate::cuda) fn group_begins(&mut self) {
        self.shortage.group_begins();
    }

    /// Notes that it has joined.
    pub(in crate::cuda) fn group_formed(&mut self) {
        self.shortage.group_formed();
    }

    /// Whether no more graphs are made for now, by a rank that is alone, since memory was short.
    pub(in crate::cuda) fn is_short(&self) -> bool {
        !self.grouped && self.shortage.is_waiting()
    }

    /// Whether graphs are captured in the group that this rank is about to join, as far as it can
    /// decide.
    pub(in crate::cuda) fn can_capture(&self) -> bool {
        self.graphs_off.is_none() && !self.shortage.sits_out()
    }

    /// Whether decode steps become graphs now; the same on all ranks of a group.
    pub(in crate::cuda) fn captures(&self) -> bool {
        self.graphs_off.is_none() && self.graphs_rest.is_none()
    }

    /// Drops all graphs. Given a reason, makes no more until called again.
    pub(in crate::cuda) fn use_graphs(&mut self, not: Option<&'static str>) {
        self.graphs.clear();
        self.graphs_rest = not;
    }

    /// Why graphs, or early launch of kernels, were given up, or why no more graphs are made for
    /// now, if something failed.
    pub(in crate::cuda) fn given_up(&self) -> Option<&str> {
        let lasting = self.graphs_off.as_deref().or(self.overlap_off.as_deref());
        lasting.or_else(|| self.shortage.reason(self.grouped))
    }

    /// For people: the number of graphs, or why there are none.
    pub(in crate::cuda) fn graphs_text(&self) -> String {
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

    /// Number of graphs.
    pub(in crate::cuda) fn num_graphs(&self) -> usize {
        self.graphs.made()
    }

    /// The key of the step's graph, if it can be one.
    pub(super) fn key(&self, inputs: &StepInputs<'_>, found: &Capacity) -> Option<GraphKey> {
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
        let most = u32::try_from(self.least_room).unwrap_or(u32::MAX);
        Some(GraphKey {
            rows: decode_bucket(rows, most)?,
            candidates: self.candidates(),
            adapters: !inputs.adapters.is_empty(),
            samples: !inputs.masked
                && !self.lists.edits
                && self.lists.top == 0
                && !inputs.sampling.is_empty(),
        })
    }

    /// Runs whatever was recorded or deferred; from now on calls run immediately.
    pub(in crate::cuda) fn close(&mut self, stream: &Stream) -> Result<(), KernelError> {
        let signature = std::mem::take(&mut self.signature);
        match self.mode {
            Mode::Record(key) => {
                self.mode = Mode::Eager;
                let graph = stream.end_capture().inspect_err(|error| {
                    self.not_recorded(stream.take_capture_fault(), &error.to_string());
                })?;
                graph.launch(stream)?;
                self.graphs.insert(key, RecordedGraph { graph, signature });
                self.shortage.graph_made(self.grouped);
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
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMORY: Option<CaptureFault> = Some(CaptureFault::Memory);
    const REFUSED: Option<CaptureFault> = Some(CaptureFault::Refused);

    #[test]
    fn what_is_refused_is_given_up_one_thing_at_a_time() {
        for fault in [REFUSED, None] {
            let mut step = Step::new(true, true, false);
            step.not_recorded(fault, "first");
            assert!(!step.overlaps() && step.captures() && step.can_capture());
            assert_eq!(step.given_up(), Some("first"));
            step.set_overlap(true);
            assert!(!step.overlaps(), "for good");
            step.not_recorded(fault, "second");
            assert!(!step.captures() && !step.can_capture());
            assert_eq!(step.given_up(), Some("second"));
        }
    }

    #[test]
    fn memory_that_is_short_costs_neither_graphs_nor_overlap() {
        let mut step = Step::new(true, true, false);
        for _ in 0..5 {
            step.not_recorded(MEMORY, "no memory");
            assert!(step.overlaps() && step.captures() && step.can_capture());
            assert_eq!(step.given_up(), Some("no memory"));
        }
        // What cannot be recorded without it is still given up.
        step.not_recorded(REFUSED, "refused");
        assert!(!step.overlaps() && step.captures());
        assert_eq!(step.given_up(), Some("refused"));
    }

    #[test]
    fn a_group_does_without_graphs_once_memory_was_short_twice() {
        let mut step = Step::new(true, true, false);
        let joined = |step: &mut Step| {
            step.group_begins();
            step.group_formed();
            step.set_grouped(true);
            (step.can_capture(), step.given_up().map(str::to_owned))
        };
        assert_eq!(joined(&mut step), (true, None));
        step.not_recorded(MEMORY, "no memory");
        assert_eq!(joined(&mut step), (true, None));
        step.not_recorded(MEMORY, "no memory");
        assert_eq!(joined(&mut step), (false, Some("no memory".to_owned())));
        assert_eq!(joined(&mut step), (true, None));
        assert!(step.overlaps());
    }
}
