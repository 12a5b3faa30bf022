//! The actor's own side: a bounded mailbox, a handler that takes one message at a time, and what
//! happens when the handler fails.
//!
//! A handler fails by panicking, by returning an error or by taking too long. The asker is then
//! told, and after a backoff the actor is re-created with the messages still in its mailbox. After
//! too many failures in a row it is dead, and its watchers are told.
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::sync::{mpsc, oneshot};

use super::registry::RegistryError;
use super::remote::{ActorMessage, RemoteAddr};
use super::runtime::{ActorRuntime, Outcome, WeakRuntime};
use super::supervise::{Decision, RestartPolicy, Supervisor};
use crate::protocol::actors::{ActorLife, ActorReport, AskError, Wants};
use crate::wire::codec;

/// How an actor handles its messages.
pub trait NamedActor: Send + 'static {
    /// Type of the messages it takes.
    type Message: ActorMessage;

    /// Handles one message. The next one waits until this future completes.
    ///
    /// # Errors
    /// One sentence on why the actor cannot go on; it is then re-created.
    fn handle(
        &mut self,
        message: Self::Message,
    ) -> impl Future<Output = Result<<Self::Message as ActorMessage>::Reply, String>> + Send;
}

/// Settings of a named actor.
#[derive(Clone, Debug)]
pub struct ActorSpec {
    /// Its name, unique in the cluster; must not contain a slash.
    pub name: String,
    /// Its kind, shown to operators.
    pub kind: String,
    /// Mailbox capacity in messages; at least 1.
    pub mailbox: usize,
    /// How often it is re-created, and with what backoff.
    pub restarts: RestartPolicy,
    /// How long a message may take before the actor counts as failed. The handler is dropped where
    /// it waits. One that blocks its thread is not noticed, since the actor shares that thread:
    /// actors with such handlers are created by class, see
    /// [`ActorRuntime::create`](super::ActorRuntime::create).
    pub message_limit: Option<Duration>,
}

impl ActorSpec {
    /// An actor with a mailbox of 64 messages and the default restart policy.
    #[must_use]
    pub fn new(name: &str, kind: &str) -> Self {
        let (name, kind) = (name.to_owned(), kind.to_owned());
        let restarts = RestartPolicy::default();
        Self { name, kind, mailbox: 64, restarts, message_limit: None }
    }
}

/// A message in a mailbox. If it is dropped unanswered, the waiter is told that the actor failed,
/// or that it never got the message.
#[derive(Debug)]
pub(super) struct Envelope {
    runtime: WeakRuntime,
    to: String,
    /// Whether the actor has it.
    taken: bool,
    id: u64,
    wants: Wants,
    body: Vec<u8>,
}

impl Envelope {
    pub(super) fn new(
        runtime: WeakRuntime,
        to: &str,
        id: u64,
        wants: Wants,
        body: Vec<u8>,
    ) -> Self {
        Self { runtime, to: to.to_owned(), taken: false, id, wants, body }
    }

    /// Drops the message without an answer, because the sender is told by other means.
    pub(super) fn forget(mut self) {
        self.wants = Wants::Nothing;
    }

    /// The message, for the actor.
    pub(super) fn take_body(&mut self) -> Vec<u8> {
        self.taken = true;
        std::mem::take(&mut self.body)
    }

    pub(super) fn answer(mut self, outcome: Outcome) {
        if std::mem::replace(&mut self.wants, Wants::Nothing) == Wants::Reply
            && let Some(runtime) = self.runtime.upgrade()
        {
            runtime.answer(self.id, outcome);
        }
    }
}

impl Drop for Envelope {
    fn drop(&mut self) {
        if self.wants == Wants::Reply
            && let Some(runtime) = self.runtime.upgrade()
        {
            let error = match self.taken {
                true => AskError::Failed("it ended".to_owned()),
                false => AskError::Unavailable(std::mem::take(&mut self.to)),
            };
            runtime.answer(self.id, Err(error));
        }
    }
}

impl ActorRuntime {
    /// Starts a named actor on the current tokio runtime; `make` creates it, initially and after
    /// each failure. It lives until it has failed too often, is killed, or [`ActorRuntime::stop`]
    /// is called.
    ///
    /// # Errors
    /// [`RegistryError`]: the name is not valid, another actor of this process has it, or the
    /// process is about to leave. That an
    /// actor of another process has it is detected later: the actor then ends, and the log says
    /// why.
    pub fn spawn<A: NamedActor>(
        &self,
        spec: ActorSpec,
        make: impl FnMut() -> A + Send + 'static,
    ) -> Result<RemoteAddr<A::Message>, RegistryError> {
        let (sender, mailbox) = mpsc::channel(spec.mailbox.max(1));
        let mut report = ActorReport {
            name: spec.name.clone(),
            kind: spec.kind,
            generation: 0,
            life: ActorLife::Alive,
            restarts: 0,
            max_restarts: Some(spec.restarts.max_restarts),
            reason: None,
        };
        let (kill, killed) = oneshot::channel();
        report.generation = self.admit(report.clone(), sender, kill)?;
        let supervisor = Supervisor::new(spec.restarts, report.generation);
        let life = Life { runtime: self.downgrade(), report };
        let (limit, mut life) = (spec.message_limit, life);
        tokio::spawn(async move {
            let killed = async {
                match killed.await {
                    Ok(reason) => reason,
                    // Nobody can kill it any more.
                    Err(_) => std::future::pending().await,
                }
            };
            let reason = tokio::select! {
                biased;
                reason = killed => Some(reason),
                () = live(&mut life, supervisor, mailbox, make, limit) => None,
            };
            if let Some(reason) = reason {
                life.ends(reason);
            }
        });
        Ok(self.addr(&spec.name))
    }
}

/// Reports an actor's life. If it is dropped before the actor is dead, the actor's task was dropped
/// (for example because its tokio runtime ended), and it reports that death.
struct Life {
    runtime: WeakRuntime,
    report: ActorReport,
}

impl Life {
    /// Publishes the current report; false when the runtime is gone.
    fn tell(&self) -> bool {
        let runtime = self.runtime.upgrade();
        if let Some(runtime) = &runtime {
            runtime.became(self.report.clone());
        }
        runtime.is_some()
    }

    fn ends(&mut self, reason: String) {
        self.report.life = ActorLife::Dead;
        self.report.reason = Some(reason);
        self.tell();
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        if self.report.life != ActorLife::Dead {
            self.ends("its task was dropped".to_owned());
        }
    }
}

/// Runs an actor from its start to its death.
async fn live<A: NamedActor>(
    life: &mut Life,
    mut supervisor: Supervisor,
    mut mailbox: mpsc::Receiver<Envelope>,
    mut make: impl FnMut() -> A + Send + 'static,
    limit: Option<Duration>,
) {
    loop {
        let reason = match std::panic::catch_unwind(AssertUnwindSafe(&mut make)) {
            Ok(actor) => serve(actor, &mut mailbox, limit).await,
            Err(panic) => Some(words_of(&*panic)),
        };
        let Some(reason) = reason else {
            return life.ends("it was stopped".to_owned());
        };
        let now = match life.runtime.upgrade() {
            Some(runtime) => runtime.clock().now(),
            None => return,
        };
        life.report.reason = Some(reason.clone());
        match supervisor.on_exit(now) {
            Decision::RestartAfter(wait) => {
                let name = &life.report.name;
                tracing::warn!(actor = name, reason, ?wait, "an actor failed; restarting it");
                life.report.life = ActorLife::Restarting;
                if !life.tell() {
                    return;
                }
                tokio::time::sleep(wait).await;
                life.report.life = ActorLife::Alive;
                life.report.restarts = life.report.restarts.saturating_add(1);
                match life.runtime.upgrade() {
                    Some(runtime) => runtime.restarted(),
                    None => return,
                }
                life.tell();
            }
            Decision::GiveUp { reason: often } => {
                let name = &life.report.name;
                tracing::error!(actor = name, reason, "giving up on an actor: {often}");
                // Close first: dropping the queued messages answers them, and nothing arrives
                // afterwards.
                mailbox.close();
                return life.ends(format!("{reason}; {often}"));
            }
        }
    }
}

/// Handles messages until the handler fails, returning the reason, or until the mailbox is closed.
async fn serve<A: NamedActor>(
    mut actor: A,
    mailbox: &mut mpsc::Receiver<Envelope>,
    limit: Option<Duration>,
) -> Option<String> {
    while let Some(mut envelope) = mailbox.recv().await {
        let body = envelope.take_body();
        let handled = handled(&mut actor, &body);
        let handled = match limit {
            None => handled.await,
            Some(limit) => tokio::time::timeout(limit, handled).await.unwrap_or_else(|_| {
                Handled::Failed(format!("a message took over {} ms", limit.as_millis()))
            }),
        };
        match handled {
            Handled::Reply(reply) => envelope.answer(Ok(reply)),
            Handled::Malformed(error) => envelope.answer(Err(AskError::Malformed(error))),
            Handled::Failed(reason) => {
                envelope.answer(Err(AskError::Failed(reason.clone())));
                return Some(reason);
            }
        }
    }
    None
}

/// The outcome of one message.
pub(super) enum Handled {
    /// The encoded reply.
    Reply(Vec<u8>),
    /// The message, or its reply, has no encoding.
    Malformed(String),
    /// The actor cannot go on.
    Failed(String),
}

/// Has an actor handle an encoded message.
pub(super) async fn handled<A: NamedActor>(actor: &mut A, body: &[u8]) -> Handled {
    let message = match codec::decode_message::<A::Message>(body) {
        Ok(message) => message,
        Err(error) => return Handled::Malformed(error.to_string()),
    };
    match AssertUnwindSafe(actor.handle(message)).catch_unwind().await {
        Ok(Ok(reply)) => match codec::encode(&reply) {
            Ok(reply) => Handled::Reply(reply),
            Err(error) => Handled::Malformed(error.to_string()),
        },
        Ok(Err(reason)) => Handled::Failed(reason),
        Err(panic) => Handled::Failed(words_of(&*panic)),
    }
}

pub(super) fn words_of(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    format!("it panicked: {}", text.unwrap_or_else(|| "no message".to_owned()))
}
