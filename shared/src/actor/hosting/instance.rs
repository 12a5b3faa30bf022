//! One start of one actor: its thread, and the task that hands it one message at a time.
//!
//! A message that takes too long, or a kill, ends the start. A handler that waits is dropped where
//! it waits. One that blocks or computes cannot be interrupted: its thread is left behind, its
//! actor is reported dead, and the thread ends when the handler returns.
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::runtime::Builder;
use tokio::sync::{mpsc, oneshot};

use super::{ActorContext, Factory};
use crate::actor::named::{Envelope, Handled, words_of};
use crate::actor::runtime::{Outcome, WeakRuntime};
use crate::protocol::actors::creation::Begin;
use crate::protocol::actors::{ActorLife, AskError};

/// What an instance begins with.
pub(in crate::actor) struct Start {
    pub(in crate::actor) runtime: WeakRuntime,
    pub(in crate::actor) begin: Begin,
    pub(in crate::actor) factory: Factory,
    pub(in crate::actor) context: ActorContext,
    pub(in crate::actor) mailbox: mpsc::Receiver<Envelope>,
    /// Told why the actor is to end at once.
    pub(in crate::actor) killed: oneshot::Receiver<String>,
    pub(in crate::actor) threads: Arc<AtomicUsize>,
}

/// A message for the actor's thread. The thread drops the handler if nobody waits for the outcome
/// any more.
struct Job {
    body: Vec<u8>,
    done: oneshot::Sender<Handled>,
}

/// Runs an actor from its start to its death, which it reports.
pub(in crate::actor) async fn run(start: Start) {
    let Start { runtime, begin, factory, context, mut mailbox, mut killed, threads } = start;
    let life = |life: ActorLife, reason: Option<String>| {
        if let Some(runtime) = runtime.upgrade() {
            runtime.placed_became(&begin.creation.name, begin.instance, life, reason);
        }
    };
    let limits = (begin.creation.start_limit_ms, begin.creation.message_limit_ms);
    let argument = begin.creation.argument.clone();
    let lives = async {
        let jobs = match spawn(argument, factory, context, threads, limits.0).await {
            Ok(jobs) => jobs,
            Err(reason) => return reason,
        };
        life(ActorLife::Alive, None);
        serve(&jobs, &mut mailbox, limits.1).await
    };
    let reason = tokio::select! {
        biased;
        // When the sender is gone, nobody can kill it any more.
        Ok(reason) = &mut killed => reason,
        reason = lives => reason,
    };
    // First the report: those whose messages were never handled are told after it, and ask again.
    life(ActorLife::Dead, Some(reason));
    mailbox.close();
}

/// Starts the actor's thread and waits until the actor is made.
async fn spawn(
    argument: Vec<u8>,
    factory: Factory,
    context: ActorContext,
    threads: Arc<AtomicUsize>,
    limit_ms: u32,
) -> Result<mpsc::Sender<Job>, String> {
    let (jobs, queue) = mpsc::channel(1);
    let (made, is_made) = oneshot::channel();
    let name: String = context.name.chars().take(15).collect();
    let counted = Counted::new(threads);
    let thread = thread::Builder::new().name(name).spawn(move || {
        let _counted = counted;
        live(&argument, &factory, context, made, queue);
    });
    thread.map_err(|error| format!("its thread cannot be started: {error}"))?;
    let limit = Duration::from_millis(limit_ms.into());
    match tokio::time::timeout(limit, is_made).await {
        Ok(Ok(made)) => made.map(|()| jobs),
        Ok(Err(_)) => Err("its thread ended".to_owned()),
        Err(_) => Err(format!("it was not made within {limit_ms} ms")),
    }
}

/// Hands over one message at a time until the actor fails or its mailbox is closed.
async fn serve(
    jobs: &mpsc::Sender<Job>,
    mailbox: &mut mpsc::Receiver<Envelope>,
    limit_ms: u32,
) -> String {
    while let Some(mut envelope) = mailbox.recv().await {
        let (done, handled) = oneshot::channel();
        let job = Job { body: envelope.take_body(), done };
        if jobs.send(job).await.is_err() {
            return "its thread ended".to_owned();
        }
        let handled = match limit_ms {
            0 => handled.await,
            limit => {
                let limit = Duration::from_millis(limit.into());
                match tokio::time::timeout(limit, handled).await {
                    Ok(handled) => handled,
                    Err(_) => Ok(Handled::Failed(format!("a message took over {limit_ms} ms"))),
                }
            }
        };
        let handled = handled.unwrap_or_else(|_| Handled::Failed("its thread ended".to_owned()));
        let (outcome, failed): (Outcome, _) = match handled {
            Handled::Reply(reply) => (Ok(reply), None),
            Handled::Malformed(error) => (Err(AskError::Malformed(error)), None),
            Handled::Failed(reason) => (Err(AskError::Failed(reason.clone())), Some(reason)),
        };
        envelope.answer(outcome);
        if let Some(reason) = failed {
            return reason;
        }
    }
    "it was stopped".to_owned()
}

/// The actor's thread: makes the actor and handles its messages.
fn live(
    argument: &[u8],
    factory: &Factory,
    context: ActorContext,
    made: oneshot::Sender<Result<(), String>>,
    mut queue: mpsc::Receiver<Job>,
) {
    let runtime = match Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            let _ = made.send(Err(format!("its thread has no runtime: {error}")));
            return;
        }
    };
    runtime.block_on(async {
        let actor = std::panic::catch_unwind(AssertUnwindSafe(|| factory(argument, context)));
        let mut actor = match actor {
            Ok(Ok(actor)) => actor,
            Ok(Err(reason)) => return drop(made.send(Err(reason))),
            Err(panic) => return drop(made.send(Err(words_of(&*panic)))),
        };
        if made.send(Ok(())).is_err() {
            return;
        }
        while let Some(Job { body, mut done }) = queue.recv().await {
            let handled = tokio::select! {
                biased;
                handled = AssertUnwindSafe(actor.serve(&body)).catch_unwind() => handled,
                // It was given up: the handler is dropped where it waits.
                () = done.closed() => return,
            };
            let handled = handled.unwrap_or_else(|panic| Handled::Failed(words_of(&*panic)));
            if done.send(handled).is_err() {
                return;
            }
        }
    });
    // What the actor left behind on blocking threads is not waited for.
    runtime.shutdown_background();
}

/// Counts a thread while it lives.
struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn new(threads: Arc<AtomicUsize>) -> Self {
        threads.fetch_add(1, Ordering::Relaxed);
        Self(threads)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
