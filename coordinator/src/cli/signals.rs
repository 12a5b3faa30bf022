//! SIGTERM and Ctrl-C: the first has a process finish what it does, the second ends it at once.
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::CliError;
use super::output::print_line;

/// Listens for both signals, from its making on.
#[derive(Debug)]
pub(crate) struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Begins to listen: the signals do not end the process by themselves any more.
    pub(crate) fn listen() -> Result<Self, CliError> {
        let listen = |kind| {
            let failed = |error| CliError::Failed(format!("cannot listen for signals: {error}"));
            signal(kind).map_err(failed)
        };
        let (terminate, interrupt) =
            (listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?);
        Ok(Self { terminate, interrupt })
    }

    /// Resolves on the next SIGINT (Ctrl-C) or SIGTERM.
    pub(crate) async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }

    /// Lets `finish` take its time, at most `patience`, and no longer than until the next signal.
    /// It resolves to whether all of the `requests` have ended.
    pub(crate) async fn drain(
        &mut self,
        requests: usize,
        patience: Duration,
        finish: impl Future<Output = bool>,
    ) {
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
            }
            () = self.next() => tracing::warn!("told to stop at once: running requests fail"),
        }
    }
}
