//! The last lines of a process's log. They are bounded in number and bytes, and numbered, so that
//! they can be forwarded in batches and read after the process is gone.
//!
//! Lines are numbered from 0 in the order in which they were written. A receiver may see a batch
//! twice or miss one: the numbers reveal it, and missing lines are counted, not hidden.
//!
//! - [`queue`]: log text for a reader that may stall
pub mod queue;

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use crate::actor::{ActorMessage, NamedActor};

/// Maximum length of a kept line, in bytes; a longer line is cut and marked with ` [cut]`.
pub const LINE_MAX: usize = 2 << 10;
/// End of a cut line.
const CUT: &str = " [cut]";

/// Bounds of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogLimits {
    /// Maximum number of lines.
    pub lines: usize,
    /// Maximum total length of the lines, in bytes.
    pub bytes: usize,
}

impl LogLimits {
    /// Bounds of what a process keeps of its own log.
    pub const OWN: Self = Self { lines: 1000, bytes: 256 << 10 };
    /// Bounds of a batch, and of what a coordinator keeps of each process.
    pub const SENT: Self = Self { lines: 200, bytes: 32 << 10 };
}

/// Consecutive lines of a log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogLines {
    /// The number of the first line.
    pub first: u64,
    /// The lines, without line ends.
    pub lines: Vec<String>,
}

/// Asks a process's log actor for its last lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogQuery {
    /// Maximum number of lines to return.
    pub lines: u32,
}

impl ActorMessage for LogQuery {
    type Reply = LogLines;
}

/// The log actor of a process: answers with lines that have not been forwarded yet.
#[derive(Debug)]
pub struct LogActor(pub SharedLog);

impl LogActor {
    /// Returns its name in the process of `node`.
    #[must_use]
    pub fn name(node: &str) -> String {
        format!("log:{node}")
    }
}

impl NamedActor for LogActor {
    type Message = LogQuery;

    async fn handle(&mut self, query: LogQuery) -> Result<LogLines, String> {
        let lines = usize::try_from(query.lines).unwrap_or(usize::MAX);
        Ok(self.0.ring().since(0, LogLimits { lines, ..LogLimits::OWN }))
    }
}

/// PURE: the last lines of a log.
#[derive(Clone, Debug)]
pub struct LogRing {
    limits: LogLimits,
    lines: VecDeque<String>,
    bytes: usize,
    /// The next line's number.
    next: u64,
    /// Lines that did not fit into a batch or were lost in transit, and so never stored here.
    missing: u64,
}

impl LogRing {
    /// An empty log.
    #[must_use]
    pub fn new(limits: LogLimits) -> Self {
        Self { limits, lines: VecDeque::new(), bytes: 0, next: 0, missing: 0 }
    }

    /// Appends a line; drops the oldest lines beyond the bounds.
    pub fn push(&mut self, line: &str) {
        let line = if line.len() > LINE_MAX {
            let end = (0..=LINE_MAX).rev().find(|at| line.is_char_boundary(*at)).unwrap_or(0);
            format!("{}{CUT}", &line[..end])
        } else {
            line.to_owned()
        };
        self.bytes += line.len();
        self.lines.push_back(line);
        self.next = self.next.saturating_add(1);
        while self.lines.len() > self.limits.lines || self.bytes > self.limits.bytes {
            let Some(gone) = self.lines.pop_front() else { return };
            self.bytes -= gone.len();
        }
    }

    /// Appends a batch from another ring. Ignores lines that are already here; counts missing ones.
    pub fn append(&mut self, piece: &LogLines) {
        if piece.first > self.next {
            self.missing += piece.first - self.next;
            self.next = piece.first;
        }
        let known = usize::try_from(self.next - piece.first).unwrap_or(usize::MAX);
        for line in piece.lines.iter().skip(known) {
            self.push(line);
        }
    }

    /// Returns the newest lines numbered `from` or later that fit `limits`.
    #[must_use]
    pub fn since(&self, from: u64, limits: LogLimits) -> LogLines {
        let mut bytes = 0;
        let mut first = self.next;
        let mut lines = Vec::new();
        for line in self.lines.iter().rev() {
            bytes += line.len();
            if first <= from || lines.len() == limits.lines || bytes > limits.bytes {
                break;
            }
            first -= 1;
            lines.push(line.clone());
        }
        lines.reverse();
        LogLines { first, lines }
    }

    /// Returns the last `count` lines.
    #[must_use]
    pub fn last(&self, count: usize) -> Vec<String> {
        let skipped = self.lines.len().saturating_sub(count);
        self.lines.iter().skip(skipped).cloned().collect()
    }

    /// Number of lines kept.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lines.len()
    }

    /// Whether no line is kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// Number of lines written so far, kept or not; also the next line's number.
    #[must_use]
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Number of lines that never arrived here.
    #[must_use]
    pub fn missing(&self) -> u64 {
        self.missing
    }
}

/// A log that several threads write to. Clones share it.
#[derive(Clone, Debug)]
pub struct SharedLog(Arc<Mutex<LogRing>>);

impl Default for SharedLog {
    fn default() -> Self {
        Self::new(LogLimits::OWN)
    }
}

impl SharedLog {
    /// An empty log.
    #[must_use]
    pub fn new(limits: LogLimits) -> Self {
        Self(Arc::new(Mutex::new(LogRing::new(limits))))
    }

    /// Locks the log.
    pub fn ring(&self) -> MutexGuard<'_, LogRing> {
        // A panic elsewhere leaves only whole lines behind.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a writer that adds each line when it is complete, and the rest when dropped.
    #[must_use]
    pub fn writer(&self) -> LogWriter {
        LogWriter { log: self.clone(), partial: Vec::new() }
    }
}

/// Writes to a [`SharedLog`].
#[derive(Debug)]
pub struct LogWriter {
    log: SharedLog,
    partial: Vec<u8>,
}

impl LogWriter {
    fn end_line(&mut self) {
        let text = String::from_utf8_lossy(&self.partial);
        self.log.ring().push(&without_escapes(text.trim_end()));
        self.partial.clear();
    }
}

impl io::Write for LogWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            // The part beyond the bound will be cut anyway, so an endless line takes no memory.
            let room = (LINE_MAX + 4).saturating_sub(self.partial.len());
            self.partial.extend_from_slice(&part[..part.len().min(room)]);
            if part.ends_with(b"\n") {
                self.end_line();
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for LogWriter {
    fn drop(&mut self) {
        if !self.partial.is_empty() {
            self.end_line();
        }
    }
}

/// Removes escape sequences (`ESC [ ... letter`), such as those for colours, and other control
/// characters, which would act on the reader's terminal.
fn without_escapes(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c == '\u{1b}' {
            if chars.next_if_eq(&'[').is_some() {
                for c in chars.by_ref() {
                    if c.is_ascii_alphabetic() {
                        break;
                    }
                }
            }
        } else if c == '\t' || !c.is_control() {
            plain.push(c);
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use proptest::prelude::*;

    use super::*;

    const FEW: LogLimits = LogLimits { lines: 3, bytes: 20 };

    #[test]
    fn the_newest_lines_stay() {
        let mut ring = LogRing::new(FEW);
        for line in ["a", "b", "c", "d"] {
            ring.push(line);
        }
        assert_eq!(ring.last(9), ["b", "c", "d"]);
        assert_eq!(ring.last(1), ["d"]);
        ring.push("0123456789012345678");
        assert_eq!(ring.last(9), ["d", "0123456789012345678"], "20 bytes in all");
        let mut wide = LogRing::new(LogLimits::OWN);
        wide.push(&"\u{e9}".repeat(LINE_MAX));
        let line = wide.last(1).remove(0);
        assert!(line.ends_with(CUT) && line.len() <= LINE_MAX + CUT.len());
    }

    #[test]
    fn text_becomes_lines_without_colours() {
        let log = SharedLog::new(LogLimits::OWN);
        let mut writer = log.writer();
        writer.write_all(b"one\ntw").unwrap_or_default();
        assert_eq!(log.ring().last(9), ["one"]);
        writer.write_all(b"o\n\x1b[32m INFO\x1b[0m bell\x07\r\nend").unwrap_or_default();
        writer.write_all(&vec![b'x'; 1 << 20]).unwrap_or_default();
        drop(writer);
        let lines = log.ring().last(9);
        assert_eq!(lines[..3], ["one", "two", " INFO bell"]);
        assert!(lines[3].starts_with("endxxx") && lines[3].ends_with(CUT));
    }

    proptest! {
        /// Sends batches now and then, some twice, some lost: lines arrive in order and without
        /// repetition, and kept + missing + dropped = written.
        #[test]
        fn pieces_arrive_once_and_in_order(
            steps in proptest::collection::vec((0usize..20, any::<bool>(), any::<bool>()), 1..30),
        ) {
            let own = LogLimits { lines: 15, bytes: 1 << 20 };
            let sent = LogLimits { lines: 7, bytes: 1 << 20 };
            let mut here = LogRing::new(own);
            let mut there = LogRing::new(LogLimits { lines: 10_000, bytes: 1 << 20 });
            let (mut written, mut from) = (0, 0);
            for (count, lost, twice) in steps {
                for _ in 0..count {
                    here.push(&written.to_string());
                    written += 1;
                }
                let piece = here.since(from, sent);
                prop_assert!(piece.lines.len() <= sent.lines);
                from = here.next();
                if lost {
                    continue;
                }
                there.append(&piece);
                if twice {
                    there.append(&piece);
                }
                prop_assert_eq!(there.next(), written);
                prop_assert_eq!(there.len() as u64 + there.missing(), written);
            }
            let numbers: Vec<u64> = there.last(10_000).iter().filter_map(|l| l.parse().ok()).collect();
            prop_assert!(numbers.is_sorted_by(|a, b| a < b), "{:?}", numbers);
        }
    }
}
