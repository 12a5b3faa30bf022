//! Calls the loggers of stats as often as was asked for.
use std::io;
use std::sync::Arc;
use std::time::Duration;

use shared::clock::Clock;
use shared::log::queue::LineQueue;

use super::options::{LogStats, StartError};
use crate::metrics::{Hub, JsonLines, LogLine, StatLogger, StatLoggers, ThroughputGauges, logger};

/// The loggers asked for, and how often they are called.
pub(super) fn loggers(
    options: &LogStats,
    hub: &Hub,
    now: Duration,
    clock_start: Duration,
) -> Result<(Vec<Box<dyn StatLogger>>, Duration), StartError> {
    let mut loggers: Vec<Box<dyn StatLogger>> =
        vec![Box::new(ThroughputGauges::new(now, hub.observer().clone()))];
    if options.interval.is_zero() {
        // The gauges go on.
        return Ok((loggers, logger::DEFAULT_INTERVAL));
    }
    loggers.push(Box::new(LogLine::new(now, options.fields.clone())));
    if let Some(file) = &options.json {
        let out: Box<dyn io::Write + Send> = if file.as_os_str() == "-" {
            // Whoever reads it may stall.
            let queue = LineQueue::start("stats", io::stdout());
            Box::new(queue.map_err(|error| StartError::StatsFile { file: file.clone(), error })?)
        } else {
            let open = std::fs::OpenOptions::new().create(true).append(true).open(file);
            Box::new(open.map_err(|error| StartError::StatsFile { file: file.clone(), error })?)
        };
        loggers.push(Box::new(JsonLines::new(now, clock_start, out)));
    }
    Ok((loggers, options.interval))
}

/// Calls them for ever.
pub(super) async fn run(
    hub: Arc<Hub>,
    clock: Arc<dyn Clock>,
    loggers: Vec<Box<dyn StatLogger>>,
    interval: Duration,
) {
    let mut loggers = StatLoggers::new(loggers, interval, clock.now());
    // What a leader before this one left may come late.
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
