//! Created actors outlive the leader together with their process: a thread of the leader keeps in
//! etcd what the [`placement`](shared::actor::placement::keep) core wants kept, and brings it what
//! the leaders before kept.
//!
//! A new leader reads before it serves. If etcd does not answer then, it serves without, reads as
//! soon as it can, and writes nothing before.
use std::sync::Arc;
use std::time::Duration;

use shared::actor::ActorRuntime;
use shared::actor::placement::keep::Written;
use shared::membership::kept::{Found, KeptActors};
use shared::membership::ledger::LedgerError;
use shared::membership::{EtcdOptions, View};
use tokio::sync::{Notify, oneshot, watch};

/// How long a new leader waits for what the last one kept before it serves without.
const LOAD_PATIENCE: Duration = Duration::from_secs(5);
/// Interval between attempts after a failure.
const AGAIN: Duration = Duration::from_millis(500);
/// How often it is looked whether this process still leads in the same epoch: an etcd that has lost
/// its data is written everything again.
const LOOK: Duration = Duration::from_secs(2);
/// How long the last writes may take.
const LAST_PATIENCE: Duration = Duration::from_secs(1);

/// What leaders before this one kept.
#[derive(Debug)]
pub struct ActorsLeft {
    ledger: KeptActors,
    view: watch::Receiver<View>,
    /// What was found, and by the leader of which epoch.
    found: Option<(Found, i64)>,
}

impl ActorsLeft {
    /// Reads what the leaders before this process kept; it leads now. Waits for etcd for some
    /// seconds only, and not at all if it denies the access.
    pub async fn load(etcd: EtcdOptions, view: watch::Receiver<View>) -> Self {
        let mut left = Self { ledger: KeptActors::new(etcd), view, found: None };
        let mut why = "etcd does not answer".to_owned();
        let read = async {
            while let Err(error) = left.read().await {
                tracing::debug!(%error, "what actors the last leader kept cannot be read");
                why = error.to_string();
                if matches!(error, LedgerError::Denied(_)) {
                    return;
                }
                tokio::time::sleep(AGAIN).await;
            }
        };
        let _ = tokio::time::timeout(LOAD_PATIENCE, read).await;
        if left.found.is_none() {
            tracing::warn!(error = why, "the actors that the last leader kept are not read yet");
        }
        left
    }

    async fn read(&mut self) -> Result<(), LedgerError> {
        let epoch = epoch(&self.view)?;
        let found = match self.ledger.load().await {
            Err(LedgerError::Damaged(error)) => {
                tracing::error!(error, "the actors that the last leader kept are lost");
                Found::default()
            }
            found => found?,
        };
        self.found = Some((found, epoch));
        Ok(())
    }
}

/// The epoch in which this process leads.
fn epoch(view: &watch::Receiver<View>) -> Result<i64, LedgerError> {
    let view = view.borrow();
    match view.own() {
        Some(leader) => Ok(leader.epoch),
        None if view.connected => Err(LedgerError::Fenced),
        None => Err(LedgerError::Etcd("etcd does not answer".to_owned())),
    }
}

/// The thread that writes, and does nothing else.
#[derive(Debug)]
pub struct ActorKeeper {
    stop: oneshot::Sender<()>,
    done: oneshot::Receiver<()>,
}

impl ActorKeeper {
    /// Takes over what leaders before this one kept, and from now on keeps created actors.
    ///
    /// # Errors
    /// If the operating system cannot start a thread.
    pub fn start(actors: ActorRuntime, left: ActorsLeft) -> std::io::Result<Self> {
        let (stop, stopped) = oneshot::channel();
        let (end, done) = oneshot::channel();
        let mut keeper = Keeper { bell: actors.keep(), actors, left, epoch: None, failing: false };
        keeper.take_over();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        std::thread::Builder::new().name("kept-actors".into()).spawn(move || {
            runtime.block_on(keeper.run(stopped));
            let _ = end.send(());
        })?;
        Ok(Self { stop, done })
    }

    /// Writes what is still to be written, and ends.
    pub async fn finish(self) {
        let _ = self.stop.send(());
        let _ = tokio::time::timeout(LAST_PATIENCE, self.done).await;
    }
}

struct Keeper {
    actors: ActorRuntime,
    left: ActorsLeft,
    /// Rings when there is something to write.
    bell: Arc<Notify>,
    /// In which etcd has what was written; none before the first is read.
    epoch: Option<i64>,
    /// Whether a failure has been logged already.
    failing: bool,
}

impl Keeper {
    async fn run(mut self, mut stop: oneshot::Receiver<()>) {
        loop {
            let wrote = self.write().await;
            match &wrote {
                Err(error) if !self.failing => {
                    tracing::warn!(
                        %error,
                        "created actors cannot be kept in etcd for the next coordinator; \
                         continuing without"
                    );
                }
                Err(error) => tracing::debug!(%error, "created actors cannot be kept in etcd"),
                Ok(()) if self.failing => tracing::info!("created actors are kept in etcd again"),
                Ok(()) => {}
            }
            self.failing = wrote.is_err();
            let bell = async {
                match wrote {
                    Ok(()) => drop(tokio::time::timeout(LOOK, self.bell.notified()).await),
                    Err(_) => tokio::time::sleep(AGAIN).await,
                }
            };
            tokio::select! {
                () = bell => {}
                _ = &mut stop => {
                    let _ = self.write().await;
                    return;
                }
            }
        }
    }

    /// Writes until there is nothing to write.
    async fn write(&mut self) -> Result<(), LedgerError> {
        if self.epoch.is_none() {
            self.left.read().await?;
            self.take_over();
        }
        if let Ok(epoch) = epoch(&self.left.view)
            && self.epoch != Some(epoch)
        {
            // Keys that cannot be read stay.
            let found = self.left.ledger.load().await?.actors;
            self.actors.keep_anew(found.into_iter().map(|kept| kept.creation.name).collect());
            self.epoch = Some(epoch);
        }
        loop {
            let writes = self.actors.next_to_keep();
            if writes.is_empty() {
                return Ok(());
            }
            let wrote = match epoch(&self.left.view) {
                Ok(epoch) if self.epoch != Some(epoch) => {
                    Err(LedgerError::Etcd("this process leads anew".to_owned()))
                }
                Ok(epoch) => self.left.ledger.write(epoch, writes).await,
                Err(error) => Err(error),
            };
            self.actors.written(match &wrote {
                Ok(()) => Written::Stored,
                Err(LedgerError::Fenced) => Written::Fenced,
                Err(_) => Written::Failed,
            });
            wrote?;
        }
    }

    /// Brings the core what was found, if that is known.
    fn take_over(&mut self) {
        let Some((Found { actors, damaged }, epoch)) = self.left.found.take() else { return };
        self.epoch = Some(epoch);
        for (actor, error) in damaged {
            tracing::error!(actor, error, "an actor that etcd keeps cannot be read");
        }
        if actors.is_empty() {
            return;
        }
        let count = actors.len();
        tracing::info!(count, "created actors that an earlier coordinator kept");
        for actor in self.actors.resume(actors) {
            tracing::error!(actor, "an actor that an earlier coordinator kept is not taken over");
        }
    }
}
