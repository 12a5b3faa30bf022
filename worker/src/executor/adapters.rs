//! LoRA adapters that are loaded while steps run. A thread reads the adapter's files; its pieces
//! wait in the queue among the steps, one at a time, so between two steps there is at most one
//! piece: the matrices of one site (such as q, k and v) of one layer.
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use shared::ids::Epoch;
use shared::protocol::{
    Adapter, AdapterChange, AdapterDone, ChangeAdapter, FromWorker, LoadProgress,
};

use super::queue::{Aside, Receiver};
use super::{ExecutorCommand, Loop, Outbox};
use crate::model::lora::Piece;
use crate::rank::{AbortSlot, AdapterReading, AdapterSink, Rank};

/// A piece of an adapter, on its way to the rank.
#[derive(Debug)]
pub struct AdapterPiece {
    pub(super) epoch: Epoch,
    number: u32,
    piece: Piece,
    /// Told what became of the piece; dropped with it if the epoch ends.
    taken: mpsc::SyncSender<Result<(), String>>,
}

/// Minimum interval between reports of how far fetching an adapter's files is.
const FETCH_INTERVAL: Duration = Duration::from_secs(1);

/// The thread that reads one adapter.
struct Reader {
    queue: Aside,
    abort: AbortSlot,
    link: u64,
    epoch: Epoch,
    number: u32,
    /// Set when the adapter is dropped.
    is_dropped: Arc<AtomicBool>,
}

impl Reader {
    /// Reads, and queues pieces and the outcome. Ends early when its epoch does.
    fn run(&self, reading: AdapterReading) {
        let mut sink = Sink { reader: self, refused: None, reported: None };
        // The coordinator waits for an outcome, whatever is in the files.
        let caught = catch_unwind(AssertUnwindSafe(|| reading(&mut sink)));
        let panicked = "reading it panicked: this is a bug, see the worker's log";
        let read = caught.unwrap_or_else(|_| Err(panicked.to_owned()));
        let outcome = match sink.refused {
            Some(reason) => Err(reason),
            None => read,
        };
        let done = AdapterDone { epoch: self.epoch, number: self.number, outcome };
        // If its epoch is over, the outcome is dropped there.
        let _ = self.queue.push(self.link, ExecutorCommand::Read(done));
    }

    /// Queues a piece, and waits until the rank has it; `None` if the epoch is over.
    fn hand_over(&self, piece: Piece) -> Option<Result<(), String>> {
        let (taken, answer) = mpsc::sync_channel(1);
        let Self { epoch, number, .. } = *self;
        let piece = AdapterPiece { epoch, number, piece, taken };
        self.queue.push(self.link, ExecutorCommand::Piece(piece)).ok()?;
        answer.recv().ok()
    }
}

/// Takes what a reader reads.
struct Sink<'a> {
    reader: &'a Reader,
    /// Why the rank did not take a piece.
    refused: Option<String>,
    /// When it was last reported how far fetching is.
    reported: Option<Instant>,
}

impl AdapterSink for Sink<'_> {
    fn take(&mut self, piece: Piece) -> bool {
        match self.reader.hand_over(piece) {
            Some(Ok(())) => true,
            Some(Err(reason)) => {
                self.refused = Some(reason);
                false
            }
            None => false,
        }
    }

    fn fetches(&mut self, news: Option<(u64, u64)>) -> bool {
        let Reader { queue, abort, link, epoch, is_dropped, number } = self.reader;
        if is_dropped.load(Ordering::Relaxed) {
            return false;
        }
        let due = self.reported.is_none_or(|last| last.elapsed() >= FETCH_INTERVAL);
        if let Some((bytes_done, bytes_total)) = news.filter(|_| due) {
            self.reported = Some(Instant::now());
            let (epoch, adapter) = (*epoch, *number);
            let progress = LoadProgress { epoch, adapter, bytes_done, bytes_total };
            // If one is still queued, that says enough.
            let _ = queue.push(*link, ExecutorCommand::Fetched(progress));
        }
        !abort.is_over(*link, *epoch)
    }
}

impl<R: Rank, O: Outbox> Loop<R, O> {
    fn is_in(&self, epoch: Epoch) -> bool {
        self.epoch == Some((self.entered, epoch))
    }

    /// Begins to load an adapter, or drops one.
    pub(super) fn change_adapter(&mut self, command: &ChangeAdapter, commands: &Receiver) {
        let epoch = command.epoch;
        if !self.is_in(epoch) {
            return;
        }
        match &command.change {
            AdapterChange::Drop(number) => {
                if let Some(is_dropped) = self.reading.get(&(epoch, *number)) {
                    is_dropped.store(true, Ordering::Relaxed);
                }
                self.rank.drop_adapter(*number);
            }
            AdapterChange::Load(adapter) => {
                if let Err(reason) = self.read_adapter(epoch, adapter, commands) {
                    let number = adapter.number;
                    self.adapter_read(AdapterDone { epoch, number, outcome: Err(reason) });
                }
            }
        }
    }

    fn read_adapter(
        &mut self,
        epoch: Epoch,
        adapter: &Adapter,
        commands: &Receiver,
    ) -> Result<(), String> {
        let reading = self.rank.open_adapter(adapter)?;
        let (queue, link, number) = (commands.aside(), self.entered, adapter.number);
        let abort = self.abort.clone();
        let is_dropped = Arc::new(AtomicBool::new(false));
        self.reading.retain(|(of, _), _| *of == epoch);
        self.reading.insert((epoch, number), is_dropped.clone());
        let reader = Reader { queue, abort, link, epoch, number, is_dropped };
        let thread = std::thread::Builder::new().name("adapter".to_owned());
        let spawned = thread.spawn(move || reader.run(reading));
        spawned.map(drop).map_err(|error| format!("no thread to read the adapter with: {error}"))
    }

    /// More of an adapter's files is there: tells the coordinator.
    pub(super) fn adapter_fetched(&mut self, progress: LoadProgress) {
        if self.is_in(progress.epoch) {
            self.outbox.send(self.entered, FromWorker::Progress(progress));
        }
    }

    /// Hands a piece to the rank.
    pub(super) fn put_adapter(&mut self, piece: AdapterPiece) {
        let AdapterPiece { epoch, number, piece, taken } = piece;
        if self.is_in(epoch) {
            let _ = taken.send(self.rank.put_adapter(number, &piece));
        }
    }

    /// An adapter has been read, or cannot be: tells the coordinator.
    pub(super) fn adapter_read(&mut self, done: AdapterDone) {
        self.reading.remove(&(done.epoch, done.number));
        if !self.is_in(done.epoch) {
            return;
        }
        match &done.outcome {
            Ok(identity) => self.rank.complete_adapter(done.number, *identity),
            Err(_) => self.rank.drop_adapter(done.number),
        }
        self.outbox.send(self.entered, FromWorker::Adapter(done));
    }
}
