//! Calls the stats loggers at the configured interval.
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use shared::clock::Clock;
use shared::log::queue::LineQueue;

use super::options::{LogStats, StartError};
use crate::metrics::{Hub, JsonLines, LogLine, StatLogger, StatLoggers, ThroughputGauges, logger};

/// Makes the configured loggers; returns them with their interval.
pub(super) fn loggers(
    options: &LogStats,
    hub: &Hub,
    now: Duration,
    clock_start: Duration,
) -> Result<(Vec<Box<dyn StatLogger>>, Duration), StartError> {
    let mut loggers: Vec<Box<dyn StatLogger>> =
        vec![Box::new(ThroughputGauges::new(now, hub.observer().clone()))];
    if options.interval.is_zero() {
        // The gauges are updated all the same.
        return Ok((loggers, logger::DEFAULT_INTERVAL));
    }
    loggers.push(Box::new(LogLine::new(now, options.fields.clone())));
    if let Some(file) = &options.json {
        let queue = queue(file);
        let queue = queue.map_err(|error| StartError::StatsFile { file: file.clone(), error })?;
        loggers.push(Box::new(JsonLines::new(now, clock_start, Box::new(queue))));
    }
    Ok((loggers, options.interval))
}

/// Opens a queue to a file or to stdout, so that nothing waits for a slow disk or reader.
fn queue(file: &Path) -> io::Result<LineQueue> {
    if file.as_os_str() == "-" {
        return LineQueue::start("stats", io::stdout());
    }
    let file = std::fs::OpenOptions::new().create(true).append(true).open(file)?;
    LineQueue::start("stats", SaysOnce { out: file, failed: false })
}

/// Logs the first write error only: a full disk would otherwise fill the log, too.
struct SaysOnce<W> {
    out: W,
    failed: bool,
}

impl<W: io::Write> io::Write for SaysOnce<W> {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.out.write(text).inspect_err(|error| {
            let passes =
                matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock);
            if !passes && !std::mem::replace(&mut self.failed, true) {
                tracing::error!(%error, "stats cannot be written as JSON");
            }
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Calls the loggers forever.
pub(super) async fn run(
    hub: Arc<Hub>,
    clock: Arc<dyn Clock>,
    loggers: Vec<Box<dyn StatLogger>>,
    interval: Duration,
) {
    let mut loggers = StatLoggers::new(loggers, interval, clock.now());
    // An earlier leader's totals may arrive late.
    let mut restorations = None;
    loop {
        let restored = Some(hub.restorations());
        if restorations != restored {
            restorations = restored;
            loggers.begin(clock.now(), &hub.merged());
        }
        tokio::time::sleep(loggers.next().saturating_sub(clock.now())).await;
        if restorations != Some(hub.restorations()) {
            continue;
        }
        loggers.tick(clock.now(), || hub.merged());
    }
}
