//! Totals of `/metrics` that outlive the coordinator: the leader writes them to etcd every few
//! seconds and at its orderly end; the next leader continues from them, so that no counter falls.
//!
//! When a leader dies, only what it counted itself since its last checkpoint is lost, and nobody
//! has seen that, since pages show what is in etcd ([`published`]). Workers and front ends report
//! their totals again to any leader.
mod publication;
pub mod published;

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use shared::clock::since_1970;
use shared::membership::ledger::{Ledger, LedgerError};
use shared::membership::{EtcdOptions, View};
use shared::metrics::catalogue::{TOTALS_CHECKPOINT, TOTALS_CHECKPOINT_INTERVAL};
use shared::metrics::merger::checkpoint::{Checkpoint, CheckpointError};
use tokio::sync::{oneshot, watch};

pub use self::publication::{PageSnapshot, Publication};
use crate::metrics::Hub;

/// Interval between attempts to read what the last leader left.
const RETRY: Duration = Duration::from_millis(500);
/// How long a new leader waits for what the last one left before it serves without; its pages then
/// wait, as on a standby.
const LOAD_PATIENCE: Duration = Duration::from_secs(5);
/// Delay of the first checkpoint: a new leader has much to show.
const FIRST: Duration = Duration::from_secs(1);
/// Interval between attempts to write a checkpoint after a failure.
const AGAIN: Duration = Duration::from_secs(1);
/// How long etcd may take to acknowledge a checkpoint, beyond the interval, before pages show the
/// present: longer than a successful write ever takes.
const ACKNOWLEDGE_PATIENCE: Duration = Duration::from_secs(3);
/// While nothing of note is counted, a checkpoint is written only every so many intervals: an idle
/// cluster does not fill etcd.
const IDLE_INTERVALS: u32 = 12;
/// How long the last checkpoint may take.
const LAST_PATIENCE: Duration = Duration::from_secs(5);

/// The thread that writes checkpoints and does nothing else, so that no step waits for it.
#[derive(Debug)]
pub struct Checkpoints {
    publication: Arc<Publication>,
    stop: mpsc::Sender<()>,
    loaded: Option<oneshot::Receiver<()>>,
    done: oneshot::Receiver<()>,
}

impl Checkpoints {
    /// Restores into `hub` what the last leader left, then writes its totals every `interval`.
    ///
    /// # Errors
    /// If the operating system cannot start a thread.
    pub fn start(
        hub: Arc<Hub>,
        view: watch::Receiver<View>,
        etcd: EtcdOptions,
        interval: Duration,
    ) -> std::io::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let (loading, loaded) = oneshot::channel();
        let (end, done) = oneshot::channel();
        let patience = interval.saturating_add(ACKNOWLEDGE_PATIENCE);
        // A lease is renewed three times in its life: after half of it another may lead.
        let stall = etcd.lease_ttl / 2;
        let publication = Arc::new(Publication::new(hub.clone(), patience, stall));
        let (pages, beats) = (publication.clone(), Arc::downgrade(&publication));
        // Starts the age of the checkpoint now, so that totals that are never written are noticed.
        noted(&hub);
        hub.membership().with(|stats| {
            let every = stats.gauge(TOTALS_CHECKPOINT_INTERVAL, []);
            stats.set(every, interval.as_secs_f64());
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        std::thread::Builder::new().name("checkpoints".into()).spawn(move || {
            let ledger = Ledger::new(etcd);
            let writer =
                Writer { hub, pages, view, ledger, runtime, failing: false, written: None };
            writer.run(interval, &stopped, loading);
            let _ = end.send(());
        })?;
        // A thread of its own, since the other one waits for etcd.
        std::thread::Builder::new().name("beats".into()).spawn(move || {
            while let Some(publication) = beats.upgrade() {
                publication.record_progress();
                drop(publication);
                std::thread::sleep(stall / 4);
            }
        })?;
        Ok(Self { publication, stop, loaded: Some(loaded), done })
    }

    /// What `/metrics` shows.
    #[must_use]
    pub fn publication(&self) -> Arc<Publication> {
        self.publication.clone()
    }

    /// Waits until the last leader's totals are restored, but only for some seconds, since requests
    /// matter more than counters.
    pub async fn loaded(&mut self) {
        let Some(loaded) = self.loaded.take() else { return };
        if tokio::time::timeout(LOAD_PATIENCE, loaded).await.is_err() {
            tracing::warn!("the last leader's totals are not loaded yet: /metrics waits for them");
        }
    }

    /// Writes the last checkpoint and ends.
    pub async fn finish(self) {
        let _ = self.stop.send(());
        let _ = tokio::time::timeout(LAST_PATIENCE, self.done).await;
    }
}

struct Writer {
    hub: Arc<Hub>,
    pages: Arc<Publication>,
    view: watch::Receiver<View>,
    ledger: Ledger,
    runtime: tokio::runtime::Runtime,
    /// Whether a failure has been logged already.
    failing: bool,
    /// What is in etcd, when it was written, and by the leader of which epoch.
    written: Option<(Checkpoint, Instant, i64)>,
}

impl Writer {
    fn run(
        mut self,
        interval: Duration,
        stopped: &mpsc::Receiver<()>,
        loading: oneshot::Sender<()>,
    ) {
        // Nothing is written before the old totals are known: they would be lost.
        while !self.load() {
            match stopped.recv_timeout(RETRY) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
            }
        }
        self.pages.restored();
        let _ = loading.send(());
        let mut wait = interval.min(FIRST);
        loop {
            let last = !matches!(stopped.recv_timeout(wait), Err(RecvTimeoutError::Timeout));
            wait = interval;
            let idle = if last { Duration::ZERO } else { interval.saturating_mul(IDLE_INTERVALS) };
            if let Err(error) = self.save(idle) {
                let fenced = matches!(error, SaveError::Ledger(LedgerError::Fenced));
                if fenced && self.view.borrow().connected {
                    self.pages.keep_page();
                }
                self.failed("the totals cannot be written to etcd", &error);
                wait = interval.min(AGAIN);
            }
            if last {
                return;
            }
        }
    }

    fn failed(&mut self, what: &str, error: &dyn std::fmt::Display) {
        if self.failing {
            tracing::debug!(%error, "{what}");
        } else {
            tracing::warn!(%error, "{what}; continuing without");
        }
        self.failing = true;
    }

    /// Loads the last leader's totals; returns whether there is nothing more to load.
    fn load(&mut self) -> bool {
        let found = match self.runtime.block_on(self.ledger.load()) {
            Ok(found) => found,
            Err(error @ LedgerError::Damaged(_)) => {
                tracing::error!(%error, "the last leader's totals are lost");
                return true;
            }
            Err(error) => {
                self.failed("the last leader's totals cannot be read", &error);
                return false;
            }
        };
        let Some(bytes) = found else { return true };
        match Checkpoint::decode(&bytes) {
            Ok(checkpoint) => {
                let unknown = self.hub.restore(checkpoint);
                tracing::info!(
                    bytes = bytes.len(),
                    unknown,
                    "continuing from the last leader's totals"
                );
            }
            Err(error) => tracing::error!(%error, "the last leader's totals are lost"),
        }
        true
    }

    /// Writes the totals, unless what is in etcd is as good and younger than `idle`.
    fn save(&mut self, idle: Duration) -> Result<(), SaveError> {
        let (epoch, connected) = {
            let view = self.view.borrow();
            (view.own().map(|leader| leader.epoch), view.connected)
        };
        // Not the leader at present: the lease ended, or another leads.
        let Some(epoch) = epoch else { return Err(LedgerError::Fenced.into()) };
        let written = self.written.take();
        // An etcd that does not answer, or that another leader wrote to, may have lost it.
        let good = written.filter(|(_, at, by)| connected && *by == epoch && at.elapsed() < idle);
        let Some(checkpoint) = self.pages.writing(good.as_ref().map(|(written, ..)| written))
        else {
            self.written = good;
            self.acknowledged();
            return Ok(());
        };
        let saved = checkpoint
            .encode()
            .map_err(SaveError::from)
            .and_then(|bytes| Ok(self.runtime.block_on(self.ledger.save(epoch, &bytes))?));
        self.pages.written(saved.is_ok());
        saved?;
        self.written = Some((checkpoint, Instant::now(), epoch));
        self.acknowledged();
        Ok(())
    }

    /// etcd has everything that the next leader needs.
    fn acknowledged(&mut self) {
        self.failing = false;
        noted(&self.hub);
    }
}

/// Publishes that etcd has the totals as of now.
fn noted(hub: &Hub) {
    hub.membership().with(|stats| {
        let written = stats.gauge(TOTALS_CHECKPOINT, []);
        stats.set(written, since_1970().as_secs_f64());
    });
}

#[derive(Debug, thiserror::Error)]
enum SaveError {
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}
