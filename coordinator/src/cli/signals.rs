//! SIGTERM and Ctrl-C: the first lets a process finish its work, the second ends it at once.
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::CliError;
use super::output::print_line;

/// Listens for both signals from its creation on.
#[derive(Debug)]
pub(crate) struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Starts to listen: from now on the signals no longer end the process by themselves.
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

    /// Lets `finish` run for at most `patience`, and no longer than until the next signal. `finish`
    /// resolves to whether all `requests` have ended.
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
