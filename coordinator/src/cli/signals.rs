//! SIGTERM, Ctrl-C and the end of a terminal (SIGHUP): the first lets a process finish its work,
//! the second ends it at once.
use std::fs;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::CliError;
use super::output::print_line;

/// Kept by one part of a start for the next, so that no signal between them is lost.
static KEPT: Mutex<Option<Signals>> = Mutex::new(None);

/// The bit of SIGHUP in a set of signals.
const HANGUP: u64 = 1;

/// Listens for the signals from its creation on.
#[derive(Debug)]
pub(crate) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    /// Absent if the process was started to ignore it (`nohup`).
    hangup: Option<Signal>,
}

impl Signals {
    /// Starts to listen, or continues from what was kept: from now on the signals no longer end
    /// the process by themselves.
    pub(crate) fn listen() -> Result<Self, CliError> {
        if let Some(kept) = KEPT.lock().unwrap_or_else(PoisonError::into_inner).take() {
            return Ok(kept);
        }
        let listen = |kind| {
            let failed = |error| CliError::Failed(format!("cannot listen for signals: {error}"));
            signal(kind).map_err(failed)
        };
        let (terminate, interrupt) =
            (listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?);
        let hangup = match ignores_hangup() {
            true => None,
            false => Some(listen(SignalKind::hangup())?),
        };
        Ok(Self { terminate, interrupt, hangup })
    }

    /// Keeps these, with any signal that arrives meanwhile, for who listens next, which may be in
    /// another runtime.
    pub(crate) fn keep(self) {
        *KEPT.lock().unwrap_or_else(PoisonError::into_inner) = Some(self);
    }

    /// Resolves on the next SIGINT (Ctrl-C), SIGTERM or SIGHUP, and logs it.
    pub(crate) async fn next(&mut self) {
        let Self { terminate, interrupt, hangup } = self;
        let hung_up = async {
            match hangup {
                Some(hangup) => hangup.recv().await,
                None => std::future::pending().await,
            }
        };
        let signal = tokio::select! {
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
            _ = hung_up => "SIGHUP",
        };
        tracing::info!(signal, "told to end");
    }

    /// Lets `finish` run for at most `patience`, and no longer than until the next signal. `finish`
    /// resolves to whether all `requests` have ended. Returns false if told to stop at once.
    pub(crate) async fn drain(
        &mut self,
        requests: usize,
        patience: Duration,
        finish: impl Future<Output = bool>,
    ) -> bool {
        tracing::info!(requests, ?patience, "new requests are refused, running ones may finish");
        if requests > 0 {
            print_line(&format!(
                "finishing {requests} requests, for at most {} s; signal again to stop at once",
                patience.as_secs()
            ));
        }
        tokio::select! {
            finished = finish => {
                match finished {
                    true => tracing::info!("running requests have finished"),
                    false => tracing::warn!(
                        ?patience,
                        "some requests did not finish in time and will fail"
                    ),
                }
                true
            }
            () = self.next() => {
                tracing::warn!("told to stop at once: running requests fail");
                false
            }
        }
    }
}

/// Whether this process was started to ignore SIGHUP: it is to outlive its terminal.
fn ignores_hangup() -> bool {
    fs::read_to_string("/proc/self/status").is_ok_and(|status| is_hangup_ignored(&status))
}

/// Reads the mask of ignored signals in `/proc/PID/status`.
fn is_hangup_ignored(status: &str) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & HANGUP != 0)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn in_a_runtime<T>(work: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
    }

    #[test]
    fn a_signal_between_two_runtimes_is_not_lost() {
        in_a_runtime(async { Signals::listen().unwrap().keep() });
        let id = std::process::id().to_string();
        let signals = if ignores_hangup() { &["-TERM"][..] } else { &["-TERM", "-HUP"] };
        for signal in signals {
            assert!(Command::new("kill").args([*signal, &id]).status().unwrap().success());
            in_a_runtime(async {
                let mut signals = Signals::listen().unwrap();
                let next = tokio::time::timeout(Duration::from_secs(10), signals.next());
                next.await.expect("the signal");
                signals.keep();
            });
        }
        // It counts once.
        in_a_runtime(async {
            let mut signals = Signals::listen().unwrap();
            let next = tokio::time::timeout(Duration::from_millis(50), signals.next());
            assert!(next.await.is_err());
        });
    }

    #[test]
    fn a_process_under_nohup_outlives_its_terminal() {
        let status = |mask: &str| format!("Name:\ttutti\nSigBlk:\t0001\nSigIgn:\t{mask}\n");
        assert!(is_hangup_ignored(&status("0000000000001001")));
        assert!(!is_hangup_ignored(&status("0000000000001000")) && !is_hangup_ignored(""));
    }
}
