//! The thread that talks to etcd: it registers this process under a lease, keeps the lease alive,
//! watches the cluster's keys and campaigns to lead.
//!
//! It has a thread and a runtime of its own, so that no amount of other work delays a keepalive.
//! Nor does a slow etcd: keepalives go on while other answers are pending. A session is a
//! connection with its lease and its watch. When any part of it fails, the next one begins with a
//! new list, under the old lease if that is still alive. This goes on for ever: no failure of etcd
//! ends the process. Only another process with the same name does.
//!
//! A lease that is kept by a thread of its own says nothing of the thread that does the work. That
//! one may have a [`Pulse`]: while it is silent for too long, the lease is left to end.
//!
//! - `session`: one session
//! - `writes`: what a process writes, and on which conditions
mod session;
mod writes;

use std::time::{Duration, Instant};

use tokio::sync::{oneshot, watch};

use self::session::{Session, SessionEnd};
use super::connect::is_full;
use super::core::{DEADLINE, MembershipCore, RETRY_MAX, RETRY_MIN};
use super::{DesiredState, EtcdOptions, FatalError, Record, Serves, View};
use crate::actor::link::join::Unreached;
use crate::actor::pulse::Pulse;
use crate::clock::{jittered, since_1970};

/// A running membership. Dropping it without [`EtcdMembership::leave`] acts like a crash: others
/// notice when the lease expires.
#[derive(Debug)]
pub struct EtcdMembership {
    view: watch::Receiver<View>,
    desires: DesiredStateSender,
    serves: ServesSender,
    leave: Option<oneshot::Sender<oneshot::Sender<()>>>,
    fatal: Option<oneshot::Receiver<FatalError>>,
    pulse: Pulse,
}

/// Sender for commands that a leader received from operators; the view shows when they are stored.
pub type DesiredStateSender = watch::Sender<Option<DesiredState>>;

/// Sender for what a coordinator would serve, where that changes while it runs.
pub type ServesSender = watch::Sender<Option<Serves>>;

impl EtcdMembership {
    /// Registers `record`, and campaigns to lead if asked to. Returns at once; the view shows
    /// whether etcd answers.
    ///
    /// # Errors
    /// When the operating system refuses a thread.
    pub fn start(options: EtcdOptions, record: Record, campaign: bool) -> std::io::Result<Self> {
        let (publish, view) = watch::channel(View::default());
        let (leave, left) = oneshot::channel();
        let (die, fatal) = oneshot::channel();
        let (desires, desired) = watch::channel(None);
        let (serves, served) = watch::channel(None);
        let pulse = Pulse::default();
        let watched = pulse.clone();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        std::thread::Builder::new().name("membership".into()).spawn(move || {
            let told = (desired, served);
            let member = EtcdMember::new(options, record, campaign, publish, told, watched);
            runtime.block_on(member.run(left, die));
        })?;
        Ok(Self { view, desires, serves, leave: Some(leave), fatal: Some(fatal), pulse })
    }

    /// Returns the view of the cluster, updated as it changes.
    #[must_use]
    pub fn view(&self) -> watch::Receiver<View> {
        self.view.clone()
    }

    /// Returns the sender for commands that operators give to this process while it leads.
    #[must_use]
    pub fn desires(&self) -> DesiredStateSender {
        self.desires.clone()
    }

    /// Returns the sender for what this process would serve, by which its record is written again.
    #[must_use]
    pub fn serves(&self) -> ServesSender {
        self.serves.clone()
    }

    /// Returns the pulse of the thread whose work this process is registered for. Once it has begun
    /// to beat, the lease is kept only while it goes on: after a silence as long as the lease
    /// lives, others may take over.
    #[must_use]
    pub fn pulse(&self) -> Pulse {
        self.pulse.clone()
    }

    /// Resolves when membership cannot go on.
    pub async fn failed(&mut self) -> FatalError {
        match &mut self.fatal {
            Some(fatal) => fatal.await.unwrap_or(FatalError::Ended),
            None => std::future::pending().await,
        }
    }

    /// Deletes this process's keys, so that others need not wait for the lease to expire.
    pub async fn leave(mut self) {
        let (done, gone) = oneshot::channel();
        if let Some(leave) = self.leave.take()
            && leave.send(done).is_ok()
        {
            let _ = tokio::time::timeout(DEADLINE, gone).await;
        }
    }
}

/// State of an outage of etcd, and what was logged about it.
struct Outage {
    /// Upper bound of the next wait.
    wait: Duration,
    attempt: u64,
    seed: u64,
    /// Whether it was logged that etcd does not answer.
    said: bool,
    /// A full etcd answers reads and refuses the writes after them: logged once, too.
    full: bool,
    /// Whether it was logged that the lease is not kept.
    stuck: bool,
    unreached: Unreached,
}

impl Outage {
    fn new(seed: u64) -> Self {
        let unreached = Unreached::default();
        let (said, full, stuck) = (false, false, false);
        Self { wait: RETRY_MIN, attempt: 0, seed, said, full, stuck, unreached }
    }

    /// Records that a session has begun.
    fn answered(&mut self, options: &EtcdOptions) {
        if std::mem::take(&mut self.stuck) {
            tracing::info!("the main thread goes on");
        }
        // An etcd that was full counts as repaired only after it has kept a session for a while.
        if !self.full {
            tracing::info!(cluster = options.cluster, "etcd answers");
            self.said = false;
        }
    }

    /// Records that etcd answered for a while: the next failure is a new outage.
    fn over(&mut self) {
        (self.wait, self.full, self.said) = (RETRY_MIN, false, false);
    }

    /// Records that a session ended or could not begin. What that means depends on whether
    /// something `is_known` of the cluster.
    fn broke(&mut self, reason: &str, now: Duration, is_known: bool, options: &EtcdOptions) {
        if is_full(reason) {
            if !std::mem::replace(&mut self.full, true) {
                tracing::error!(%reason, "nobody can join or take over; going on without etcd");
            }
            self.said = true;
            return;
        }
        if !std::mem::replace(&mut self.said, true) {
            self.unreached.reached();
        }
        let etcd = options.endpoints.join(",");
        match (self.unreached.failed(now), is_known) {
            (Some(seconds), false) => {
                tracing::warn!(etcd, %reason, seconds, "etcd does not answer; waiting until it does");
            }
            (Some(seconds), true) => {
                tracing::warn!(etcd, %reason, seconds, "etcd does not answer; going on without it");
            }
            (None, _) => tracing::debug!(%reason, "etcd does not answer"),
        }
    }

    /// Records that the lease is not kept, because the main thread is silent, or even stuck.
    fn silent(&mut self, is_stuck: bool, silence: Option<Duration>) {
        // When it goes on, it must soon learn who leads.
        self.wait = RETRY_MIN;
        if is_stuck && !std::mem::replace(&mut self.stuck, true) {
            let seconds = silence.unwrap_or_default().as_secs();
            tracing::error!(
                seconds,
                "the main thread is stuck: until it goes on, this process's lease is not kept, so \
                 that another one can take over"
            );
        }
    }

    /// Returns the wait before the next session.
    fn pause(&mut self) -> Duration {
        let wait = jittered(self.wait, self.seed, self.attempt);
        self.wait = (self.wait * 2).min(RETRY_MAX);
        self.attempt += 1;
        wait
    }
}

struct EtcdMember {
    options: EtcdOptions,
    core: MembershipCore,
    /// Time zero of the core.
    start: Instant,
    /// When etcd last confirmed the view, in seconds since 1970.
    confirmed: u64,
    publish: watch::Sender<View>,
    desired: watch::Receiver<Option<DesiredState>>,
    serves: watch::Receiver<Option<Serves>>,
    pulse: Pulse,
}

impl EtcdMember {
    fn new(
        options: EtcdOptions,
        record: Record,
        campaign: bool,
        publish: watch::Sender<View>,
        (desired, serves): (watch::Receiver<Option<DesiredState>>, watch::Receiver<Option<Serves>>),
        pulse: Pulse,
    ) -> Self {
        let core = MembershipCore::new(record, campaign, options.lease_ttl);
        let start = Instant::now();
        Self { options, core, start, confirmed: 0, publish, desired, serves, pulse }
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// Whether the lease must not be kept now.
    fn is_silent(&mut self) -> bool {
        self.core.looks_silent(self.now(), self.pulse.silence())
    }

    async fn run(
        mut self,
        mut left: oneshot::Receiver<oneshot::Sender<()>>,
        die: oneshot::Sender<FatalError>,
    ) {
        let mut outage = Outage::new(self.core.record().incarnation);
        loop {
            let ended = match self.open_or_leave(&mut left).await {
                Ok(mut session) => {
                    outage.answered(&self.options);
                    let began = Instant::now();
                    let ended = self.serve(&mut session, &mut left).await;
                    // Time in which a session was waited for does not count: nobody answered.
                    if began.elapsed() > RETRY_MAX {
                        outage.over();
                    }
                    ended
                }
                Err(ended) => ended,
            };
            self.core.closed();
            self.publish();
            match ended {
                SessionEnd::Left(done) => {
                    let _ = done.send(());
                    return;
                }
                SessionEnd::Dropped => return,
                SessionEnd::Fatal(error) => {
                    let _ = die.send(error);
                    return;
                }
                SessionEnd::Silent => {
                    outage.silent(self.core.is_stuck(self.now()), self.pulse.silence());
                }
                SessionEnd::Broken(reason) => {
                    outage.broke(&reason, self.now(), self.confirmed > 0, &self.options);
                }
            }
            tokio::select! {
                () = tokio::time::sleep(outage.pause()) => {}
                done = &mut left => {
                    if let Ok(done) = done {
                        let _ = done.send(());
                    }
                    return;
                }
            }
        }
    }

    /// Opens a session. If told to leave meanwhile, it finishes only for a process that may have
    /// keys to delete.
    async fn open_or_leave(
        &mut self,
        left: &mut oneshot::Receiver<oneshot::Sender<()>>,
    ) -> Result<Session, SessionEnd> {
        let has_keys = self.core.lease().is_some();
        let (opened, done) = {
            let opening = self.open();
            tokio::pin!(opening);
            tokio::select! {
                opened = &mut opening => return opened,
                done = left => match done {
                    Err(_) => return Err(SessionEnd::Dropped),
                    Ok(done) if !has_keys => return Err(SessionEnd::Left(done)),
                    Ok(done) => (opening.await, done),
                },
            }
        };
        if let Ok(mut session) = opened {
            let _ = tokio::time::timeout(DEADLINE, self.hand_over(&mut session)).await;
        }
        Err(SessionEnd::Left(done))
    }

    fn prefix(&self) -> String {
        format!("/{}/", self.options.cluster)
    }

    fn publish(&self) {
        self.publish.send_replace(View { confirmed: self.confirmed, ..self.core.view().clone() });
    }

    /// Records that etcd has just confirmed the view.
    fn confirm(&mut self) {
        self.confirmed = since_1970().as_secs();
        self.publish();
    }

    fn key(&self, rest: &str) -> String {
        format!("{}{rest}", self.prefix())
    }
}
