//! Log text for a reader that may stall (such as a pipe from stderr): a separate thread writes it,
//! so that logging never waits for the reader.
//!
//! The backlog is bounded. Lines beyond the bound are dropped and counted, and the reader is told
//! how many once it reads again.
use std::io::{self, ErrorKind, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Maximum number of queued bytes; the thread may hold as many again.
pub const WAITING_MAX: usize = 1 << 20;
/// Wait between two attempts to write to a full non-blocking pipe.
const AGAIN: Duration = Duration::from_millis(10);

/// Lines dropped by the whole process.
static DROPPED: AtomicU64 = AtomicU64::new(0);

/// Number of this process's log lines dropped because a reader was too slow.
#[must_use]
pub fn lines_dropped() -> u64 {
    DROPPED.load(Ordering::Relaxed)
}

/// A bounded queue of log text; see the module's documentation. Clones share it; the thread ends
/// after the last clone is dropped, once everything is written.
#[derive(Clone, Debug)]
pub struct LineQueue(Arc<Handle>);

#[derive(Debug)]
struct Handle(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Says that so many lines were dropped.
    note: fn(u64) -> String,
}

#[derive(Debug, Default)]
struct State {
    waiting: Vec<u8>,
    /// Lines dropped since the reader was last told.
    dropped: u64,
    /// Whether the thread has taken queued text and is writing it.
    writing: bool,
    closed: bool,
}

impl State {
    fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.dropped == 0
    }

    /// Takes all queued text, followed by a note about dropped lines.
    fn take(&mut self, note: fn(u64) -> String) -> Vec<u8> {
        let mut text = std::mem::take(&mut self.waiting);
        let dropped = std::mem::take(&mut self.dropped);
        if dropped > 0 {
            if text.last().is_some_and(|last| *last != b'\n') {
                text.push(b'\n');
            }
            text.extend_from_slice(note(dropped).as_bytes());
            text.push(b'\n');
        }
        text
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere leaves only whole pieces of text behind.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_on(&self, mut out: impl Write) {
        loop {
            let text = {
                let mut state = self.state();
                while state.is_empty() {
                    if state.closed {
                        return;
                    }
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                state.writing = true;
                state.take(self.note)
            };
            write_all(&mut out, &text);
            self.state().writing = false;
            self.changed.notify_all();
        }
    }
}

/// Writes all of `text`, however long that takes; gives up without an error if the reader is gone.
fn write_all(out: &mut impl Write, mut text: &[u8]) {
    while !text.is_empty() {
        match out.write(text) {
            Ok(0) => return,
            Ok(written) => text = text.get(written..).unwrap_or_default(),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::sleep(AGAIN),
            Err(_) => return,
        }
    }
    let _ = out.flush();
}

impl LineQueue {
    /// Starts the thread `name` that writes to `out`.
    ///
    /// # Errors
    /// When the operating system refuses a thread.
    pub fn start(name: &str, out: impl Write + Send + 'static) -> io::Result<Self> {
        let note = |lines| format!("{lines} lines dropped here: the reader was too slow");
        Self::start_telling(name, out, note)
    }

    /// The same, where `note` makes the line that says how many lines were dropped.
    ///
    /// # Errors
    /// When the operating system refuses a thread.
    pub fn start_telling(
        name: &str,
        out: impl Write + Send + 'static,
        note: fn(u64) -> String,
    ) -> io::Result<Self> {
        let (state, changed) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { state, changed, note });
        let writer = shared.clone();
        std::thread::Builder::new().name(name.to_owned()).spawn(move || writer.write_on(out))?;
        Ok(Self(Arc::new(Handle(shared))))
    }

    /// Queues text of one or more lines. If it does not fit as a whole, it is dropped, and so is
    /// everything after it until the reader catches up.
    pub fn push(&self, text: &[u8]) {
        let shared = &self.0.0;
        let mut state = shared.state();
        if state.dropped > 0 || state.waiting.len() + text.len() > WAITING_MAX {
            let lines = text.iter().filter(|byte| **byte == b'\n').count().max(1) as u64;
            state.dropped = state.dropped.saturating_add(lines);
            DROPPED.fetch_add(lines, Ordering::Relaxed);
            return;
        }
        state.waiting.extend_from_slice(text);
        drop(state);
        shared.changed.notify_all();
    }

    /// Waits up to `patience` until everything is written; returns whether it is.
    pub fn flush(&self, patience: Duration) -> bool {
        let (shared, until) = (&self.0.0, Instant::now() + patience);
        let mut state = shared.state();
        while !state.is_empty() || state.writing {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = shared.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

/// Never blocks; each write queues one piece of text.
impl Write for LineQueue {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.push(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.state().closed = true;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    /// A writer that blocks until it is released.
    struct Gate {
        let_on: Receiver<()>,
        written: Sender<Vec<u8>>,
    }

    impl Write for Gate {
        fn write(&mut self, text: &[u8]) -> io::Result<usize> {
            if self.let_on.recv().is_err() {
                return Err(ErrorKind::BrokenPipe.into());
            }
            // A pipe may accept only a part.
            let some = text.len().min(64 << 10);
            let _ = self.written.send(text[..some].to_vec());
            Ok(some)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn gate() -> (LineQueue, Sender<()>, Receiver<Vec<u8>>) {
        let ((open, let_on), (written, read)) = (channel(), channel());
        (LineQueue::start("gate", Gate { let_on, written }).unwrap(), open, read)
    }

    #[test]
    fn a_reader_that_stalls_holds_nobody_up_and_hears_what_it_missed() {
        let (queue, open, read) = gate();
        queue.push(b"first\n");
        let line = format!("{}\n", "x".repeat(1023));
        let (began, before) = (Instant::now(), lines_dropped());
        for _ in 0..4096 {
            queue.push(line.as_bytes());
        }
        assert!(began.elapsed() < LONG);
        // 1024 lines are queued and as many may be in the thread's hands; other tests in this
        // process may drop lines, too.
        let dropped = lines_dropped() - before;
        assert!((2047..=3073).contains(&dropped), "{dropped}");
        assert!(!queue.flush(Duration::from_millis(20)), "nothing is written yet");
        for _ in 0..200 {
            open.send(()).unwrap();
        }
        assert!(queue.flush(LONG));
        queue.push(b"last\n");
        assert!(queue.flush(LONG));
        let text = String::from_utf8(read.try_iter().flatten().collect()).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        // There is one note, or several if the thread took lines meanwhile.
        let dropped_here = |line: &&str| -> Option<u64> {
            let (number, _) = line.split_once(" lines dropped here: the reader was")?;
            number.parse().ok()
        };
        let notes: Vec<u64> = lines.iter().filter_map(dropped_here).collect();
        assert_eq!(notes.iter().sum::<u64>(), dropped, "{notes:?}");
        assert_eq!((lines[0], lines.last()), ("first", Some(&"last")));
        assert_eq!(lines.len() - notes.len(), 4096 - dropped as usize + 2);
    }

    #[test]
    fn a_reader_that_is_gone_is_no_reason_to_wait() {
        let (queue, open, _read) = gate();
        drop(open);
        queue.push(b"nobody reads this");
        assert!(queue.flush(LONG));
    }

    #[test]
    fn what_waits_is_written_after_the_last_handle_is_gone() {
        let (queue, open, read) = gate();
        let mut clone = queue.clone();
        writeln!(clone, "a line").unwrap();
        drop((queue, clone));
        for _ in 0..9 {
            let _ = open.send(());
        }
        let mut text = Vec::new();
        while let Ok(more) = read.recv_timeout(LONG) {
            text.extend(more);
        }
        assert_eq!(text, b"a line\n");
    }
}
