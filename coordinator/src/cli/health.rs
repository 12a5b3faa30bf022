//! `--health-listen`: probes of a process that serves no other HTTP, a worker or several.
use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coordinator::http::probes;
use coordinator::http::state::{Readiness, ReadinessCheck};
use shared::actor::pulse::Pulse;
use worker::health::WorkerHealth;

use super::CliError;

/// Answers probes from now on, if there is an address for them.
pub(crate) fn serve(listen: Option<SocketAddr>, check: ReadinessCheck) -> Result<(), CliError> {
    let Some(address) = listen else { return Ok(()) };
    let pulse = Pulse::default();
    drop(actix::spawn(pulse.clone().keep()));
    let start = || {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Ok((address, probes::start(listener, check, pulse)?))
    };
    let (address, server) = start().map_err(|error: std::io::Error| {
        CliError::Failed(format!("cannot listen on {address} (--health-listen): {error}"))
    })?;
    tracing::info!("answers probes at http://{address}");
    drop(actix::spawn(server));
    Ok(())
}

/// The readiness of one worker.
pub(crate) fn of_worker(health: WorkerHealth) -> ReadinessCheck {
    Arc::new(move || match health.readiness() {
        Ok(message) => Readiness { ready: true, message },
        Err(message) => Readiness { ready: false, message },
    })
}

/// Which of several workers are ready, as their heartbeats say. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReadyWorkers(Arc<Mutex<BTreeMap<String, bool>>>);

impl ReadyWorkers {
    /// A worker is wanted, and ready or not.
    pub(crate) fn set(&self, node: &str, ready: bool) {
        let mut workers = self.workers();
        match workers.get_mut(node) {
            Some(is_ready) => *is_ready = ready,
            None => drop(workers.insert(node.to_owned(), ready)),
        }
    }

    /// A worker is not wanted any more.
    pub(crate) fn forget(&self, node: &str) {
        self.workers().remove(node);
    }

    /// The readiness of all together.
    pub(crate) fn check(&self) -> ReadinessCheck {
        let this = self.clone();
        Arc::new(move || {
            let workers = this.workers();
            let (all, ready) = (workers.len(), workers.values().filter(|ready| **ready).count());
            let waits = workers.iter().find(|(_, ready)| !**ready).map(|(node, _)| node);
            let message = match waits {
                Some(node) => format!("{ready} of {all} workers are ready; {node} is not"),
                None => format!("{all} workers are ready"),
            };
            Readiness { ready: waits.is_none(), message }
        })
    }

    fn workers(&self) -> MutexGuard<'_, BTreeMap<String, bool>> {
        // A panic elsewhere leaves whole entries behind.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_workers_are_ready_when_all_are_that_are_wanted() {
        let workers = ReadyWorkers::default();
        let check = workers.check();
        for (node, ready) in [("a", true), ("b", false), ("c", true)] {
            workers.set(node, ready);
        }
        let found = check();
        assert!(!found.ready && found.message.contains("2 of 3"), "{found:?}");
        assert!(found.message.contains("b is not"), "{found:?}");
        workers.set("b", true);
        assert!(check().ready);
        workers.set("c", false);
        assert!(!check().ready);
        workers.forget("c");
        assert!(check().ready);
    }
}
