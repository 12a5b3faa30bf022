//! SIGTERM and Ctrl-C: the first lets a process finish its work, the second ends it at once.
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::CliError;
use super::output::print_line;

/// Kept by one part of a start for the next, so that no signal between them is lost.
static KEPT: Mutex<Option<Signals>> = Mutex::new(None);

/// Listens for both signals from its creation on.
#[derive(Debug)]
pub(crate) struct Signals {
    terminate: Signal,
    interrupt: Signal,
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
        Ok(Self { terminate, interrupt })
    }

    /// Keeps these, with any signal that arrives meanwhile, for who listens next, which may be in
    /// another runtime.
    pub(crate) fn keep(self) {
        *KEPT.lock().unwrap_or_else(PoisonError::into_inner) = Some(self);
    }

    /// Resolves on the next SIGINT (Ctrl-C) or SIGTERM.
    pub(crate) async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }

    /// Lets `finish` run for at most `patience`, and no longer than until the next signal. `finish`
    /// resolves to whether all `requests` have ended. Returns false if told to stop at once.
    pub(crate) async fn drain(
        &mut self,
        requests: usize,
        patience: Duration,
        finish: impl Future<Output = bool>,
    ) -> bool {
        if requests > 0 {
            print_line(&format!(
                "finishing {requests} requests, for at most {} s; signal again to stop at once",
                patience.as_secs()
            ));
        }
        tokio::select! {
            finished = finish => {
                if !finished {
                    tracing::warn!(?patience, "some requests did not finish in time and will fail");
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
        assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
        in_a_runtime(async {
            let mut signals = Signals::listen().unwrap();
            let next = tokio::time::timeout(Duration::from_secs(10), signals.next());
            next.await.expect("the signal");
            signals.keep();
        });
        // It counts once.
        in_a_runtime(async {
            let mut signals = Signals::listen().unwrap();
            let next = tokio::time::timeout(Duration::from_millis(50), signals.next());
            assert!(next.await.is_err());
        });
    }
}
