//! A session: a connection to etcd with its lease and its watch, which ends when any of them fails.
use std::time::Duration;

use etcd_client::{
    Client, Error, EventType, GetOptions, GetResponse, KeyValue, LeaseKeepAliveResponse,
    LeaseKeepAliveStream, LeaseKeeper, WatchOptions, WatchResponse, WatchStream,
};
use tokio::sync::{oneshot, watch};
use tokio::time::Interval;

use super::EtcdMember;
use crate::membership::FatalError;
use crate::membership::connect::{entry, explained};
use crate::membership::core::{DEADLINE, Event, EventKind, NextAction, SessionBroken, WatchUpdate};
use crate::membership::view::Entry;

/// Why a session ended.
pub(super) enum SessionEnd {
    /// Try again.
    Broken(String),
    /// The main thread is silent. Try again, and go on when it does.
    Silent,
    /// Told to leave, by someone who waits for it.
    Left(oneshot::Sender<()>),
    /// The membership was dropped.
    Dropped,
    /// Do not try again.
    Fatal(FatalError),
}

impl From<Error> for SessionEnd {
    fn from(error: Error) -> Self {
        Self::Broken(explained(&error))
    }
}

impl From<SessionBroken> for SessionEnd {
    fn from(SessionBroken(reason): SessionBroken) -> Self {
        Self::Broken(reason)
    }
}

/// Resources of an open session.
pub(super) struct Session {
    pub(super) client: Client,
    lease_keeper: LeaseKeeper,
    kept: LeaseKeepAliveStream,
    watch: WatchStream,
    /// Ticks when the lease must be kept alive.
    timer: Interval,
    /// Everything is to be listed again as soon as no other answer is pending.
    lists: bool,
}

impl Session {
    pub(super) fn client(&self) -> Client {
        self.client.clone()
    }
}

impl EtcdMember {
    /// Connects, obtains a lease, lists all keys and begins to watch them.
    pub(super) async fn open(&mut self) -> Result<Session, SessionEnd> {
        if self.is_silent() {
            return Err(SessionEnd::Silent);
        }
        let mut client = self.options.connect(DEADLINE).await?;
        let (lease_keeper, kept) = self.keep_lease(&mut client).await?;
        let (revision, entries) = self.get_all(&mut client).await?;
        self.core.opened(self.now(), revision, entries);
        self.confirm();
        let watch = WatchOptions::new()
            .with_prefix()
            .with_start_revision(revision + 1)
            .with_progress_notify();
        // The connection's timeout applies to answers, not to streams.
        let watch = client.watch(self.prefix(), Some(watch)).await?;
        let timer = tokio::time::interval(self.options.lease_ttl / 3);
        Ok(Session { client, lease_keeper, kept, watch, timer, lists: false })
    }

    /// Keeps the old lease if it is still alive, otherwise obtains a new one.
    pub(super) async fn keep_lease(
        &mut self,
        client: &mut Client,
    ) -> Result<(LeaseKeeper, LeaseKeepAliveStream), SessionEnd> {
        if let Some(id) = self.core.lease() {
            let sent = self.now();
            match client.lease_keep_alive(id).await {
                Ok(kept) => {
                    self.core.leased(sent, id);
                    return Ok(kept);
                }
                Err(error) if is_gone(&error) => self.core.lease_over(),
                // It may still be alive: the next session asks again.
                Err(error) => return Err(error.into()),
            }
        }
        let sent = self.now();
        let ttl = self.options.lease_ttl.as_secs().max(2) as i64;
        let granted = client.lease_grant(ttl, None).await?;
        self.core.leased(sent, granted.id());
        Ok(client.lease_keep_alive(granted.id()).await?)
    }

    /// Lists everything; also returns the revision of the list.
    pub(super) async fn get_all(
        &self,
        client: &mut Client,
    ) -> Result<(i64, Vec<Entry>), SessionEnd> {
        let listed = client.get(self.prefix(), Some(GetOptions::new().with_prefix())).await?;
        Ok(self.entries(&listed))
    }

    pub(super) fn entries(&self, listed: &GetResponse) -> (i64, Vec<Entry>) {
        let revision = listed.header().map_or(0, |header| header.revision());
        (revision, listed.kvs().iter().filter_map(|kv| self.entry(kv)).collect())
    }

    /// Lists everything again.
    pub(super) async fn list(&mut self, session: &mut Session) -> Result<(), SessionEnd> {
        session.lists = false;
        let (mut client, prefix) = (session.client(), self.prefix());
        let options = Some(GetOptions::new().with_prefix());
        let listed =
            self.keeping_lease(session, async move { client.get(prefix, options).await }).await?;
        let (revision, entries) = self.entries(&listed);
        self.core.listed(self.now(), revision, entries);
        self.confirm();
        Ok(())
    }

    pub(super) fn entry(&self, kv: &KeyValue) -> Option<Entry> {
        entry(&self.options.cluster, kv)
    }

    pub(super) async fn serve(
        &mut self,
        session: &mut Session,
        left: &mut oneshot::Receiver<oneshot::Sender<()>>,
    ) -> SessionEnd {
        loop {
            let outcome = tokio::select! {
                _ = session.timer.tick() => self.tick(session).await,
                kept = session.kept.message() => self.kept(kept),
                change = session.watch.message() => match change {
                    Ok(Some(change)) => self.change(&change),
                    Ok(None) => Err(SessionEnd::Broken("etcd ended the watch".to_owned())),
                    Err(error) => Err(error.into()),
                },
                serves = next_of(&mut self.serves) => {
                    self.core.serves(serves);
                    Ok(())
                }
                desired = next_of(&mut self.desired) => {
                    self.core.desire(desired);
                    Ok(())
                }
                done = &mut *left => {
                    let Ok(done) = done else { return SessionEnd::Dropped };
                    // If the keys are already gone, that is just as good.
                    let _ = tokio::time::timeout(DEADLINE, self.hand_over(session)).await;
                    return SessionEnd::Left(done);
                }
            };
            if let Err(ended) = outcome {
                return ended;
            }
            if let Err(ended) = self.act(session).await {
                return ended;
            }
        }
    }

    /// Waits for an answer from etcd and keeps the lease alive meanwhile: several slow answers in a
    /// row may take longer than the lease lives.
    pub(super) async fn keeping_lease<T>(
        &mut self,
        session: &mut Session,
        answer: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, SessionEnd> {
        tokio::pin!(answer);
        loop {
            tokio::select! {
                answer = &mut answer => return Ok(answer?),
                _ = session.timer.tick() => self.tick(session).await?,
                kept = session.kept.message() => self.kept(kept)?,
            }
        }
    }

    /// Handles etcd's answer to a keepalive.
    pub(super) fn kept(
        &mut self,
        kept: Result<Option<LeaseKeepAliveResponse>, Error>,
    ) -> Result<(), SessionEnd> {
        let Some(kept) = kept? else {
            return Err(SessionEnd::Broken("etcd ended the keepalive stream".to_owned()));
        };
        let ttl = Duration::from_secs(u64::try_from(kept.ttl()).unwrap_or(0));
        self.core.kept(self.now(), ttl)?;
        self.confirm();
        Ok(())
    }

    /// Registers, runs for leader, holds the lead or stores commands, whichever is due.
    pub(super) async fn act(&mut self, session: &mut Session) -> Result<(), SessionEnd> {
        if session.lists {
            self.list(session).await?;
        }
        if self.core.next_action(self.now()) == Some(NextAction::Register) {
            self.register(session).await?;
        }
        if self.core.next_action(self.now()) == Some(NextAction::Lead) {
            self.run_for_leader(session).await?;
        }
        if let Some(NextAction::Hold(epoch)) = self.core.next_action(self.now()) {
            self.hold(session, epoch).await?;
        }
        if self.core.next_action(self.now()) == Some(NextAction::Store) {
            self.store(session).await?;
        }
        Ok(())
    }

    pub(super) async fn tick(&mut self, session: &mut Session) -> Result<(), SessionEnd> {
        if self.is_silent() {
            // The session stays while the main thread may still go on.
            let is_stuck = self.core.is_stuck(self.now());
            return if is_stuck { Err(SessionEnd::Silent) } else { Ok(()) };
        }
        session.lists |= self.core.tick(self.now())?;
        session.lease_keeper.keep_alive().await?;
        session.watch.request_progress().await?;
        Ok(())
    }

    pub(super) fn change(&mut self, response: &WatchResponse) -> Result<(), SessionEnd> {
        let cancelled = response.canceled().then(|| response.cancel_reason().to_owned());
        let events = response.events().iter().filter_map(|event| {
            let kv = event.kv()?;
            let kind = match event.event_type() {
                EventType::Put => self.entry(kv).map(EventKind::Put),
                EventType::Delete => {
                    let key = std::str::from_utf8(kv.key()).ok();
                    let key = key.and_then(|key| key.strip_prefix(&self.prefix()));
                    key.map(|key| EventKind::Delete(key.to_owned()))
                }
            };
            Some(Event { revision: kv.mod_revision(), kind: kind.unwrap_or(EventKind::Other) })
        });
        let events = events.collect();
        let change = WatchUpdate { cancelled, compacted: response.compact_revision(), events };
        let is_last = change.is_last();
        let changed = self.core.changed(self.now(), change);
        if !is_last {
            // This includes a change that shows that this process is no longer registered.
            self.confirm();
        }
        Ok(changed?)
    }
}

/// Whether etcd no longer knows the lease of a keepalive; other failures say nothing about it.
fn is_gone(error: &Error) -> bool {
    match error {
        // The client's own error for an answer without a time to live; it uses these words for
        // nothing else.
        Error::LeaseKeepAliveError(why) => why == "lease not found",
        Error::GRpcStatus(status) => status.message().contains("requested lease not found"),
        _ => false,
    }
}

/// Waits for what this process is told next: a command from operators, or what it would serve.
async fn next_of<T: Clone>(told: &mut watch::Receiver<Option<T>>) -> T {
    loop {
        if told.changed().await.is_err() {
            // The sender is gone.
            std::future::pending::<()>().await;
        }
        if let Some(told) = told.borrow_and_update().clone() {
            return told;
        }
    }
}
