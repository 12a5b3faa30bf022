//! Compiles grammars for requests on separate threads, a few at a time, with a bounded queue and a
//! deadline, so that neither other requests nor a client wait long.
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use shared::protocol::GuideSpec;
use tokio::sync::{Semaphore, oneshot, watch};
use tokio::time::{Instant, timeout, timeout_at};

use super::{Grammar, STACK_BYTES};
use crate::text::model::TextModel;

/// Longest wait for a free thread.
const QUEUE_DEADLINE: Duration = Duration::from_secs(30);
/// Maximum number of specifications waiting or being compiled.
const UNDER_WAY_MAX: usize = 256;
/// Longest time that a client waits while its grammar is compiled.
const COMPILE_DEADLINE: Duration = Duration::from_secs(10);
/// Maximum number of threads.
const THREADS_MAX: usize = 8;

/// Why there is no grammar.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GrammarError {
    /// The specification is at fault; one sentence that continues after the field's name.
    Refused(String),
    /// Too much other work is waiting.
    Busy,
    /// The server failed.
    Broke,
}

impl fmt::Display for GrammarError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Refused(why) => why,
            Self::Busy => "too many grammars are waiting to be compiled",
            Self::Broke => "compiling the grammar was interrupted",
        })
    }
}

type Outcome = Result<Arc<Grammar>, GrammarError>;

/// Compiles grammars of one model. Clones share the work.
#[derive(Clone)]
pub struct GrammarCompiler(Arc<Inner>);

struct Inner {
    threads: Arc<Semaphore>,
    /// Specifications waiting or being compiled: each only once, however many requests want it.
    under_way: Mutex<HashMap<GuideSpec, Arc<watch::Sender<State>>>>,
    queue_deadline: Duration,
    compile_deadline: Duration,
}

#[derive(Clone)]
enum State {
    Waits,
    Runs(Instant),
    Over(Outcome),
}

impl fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarCompiler").finish_non_exhaustive()
    }
}

impl Default for GrammarCompiler {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let threads = if cores <= 2 { 1 } else { (cores / 2).clamp(2, THREADS_MAX) };
        Self::new(threads, QUEUE_DEADLINE, COMPILE_DEADLINE)
    }
}

impl GrammarCompiler {
    fn new(threads: usize, queue_deadline: Duration, compile_deadline: Duration) -> Self {
        let threads = Arc::new(Semaphore::new(threads));
        let under_way = Mutex::default();
        Self(Arc::new(Inner { threads, under_way, queue_deadline, compile_deadline }))
    }

    /// Compiles a specification over `text`'s vocabulary; `text` must always be the same model.
    ///
    /// # Errors
    /// [`GrammarError`].
    pub async fn compile(
        &self,
        text: &Arc<TextModel>,
        spec: &GuideSpec,
    ) -> Result<Arc<Grammar>, GrammarError> {
        if let Some(made) = text.loaded_guides().and_then(|guides| guides.cached(spec)) {
            return made.map_err(GrammarError::Refused);
        }
        let text = text.clone();
        let work = move |spec: &GuideSpec| text.guides()?.compile_on_this_thread(spec);
        self.share(spec, work).await
    }

    /// Waits for the result of `work`, or of an earlier caller's work on the same specification.
    async fn share(
        &self,
        spec: &GuideSpec,
        work: impl FnOnce(&GuideSpec) -> Result<Arc<Grammar>, String> + Send + 'static,
    ) -> Outcome {
        let mut state = self.join(spec, work)?;
        loop {
            let seen = state.borrow_and_update().clone();
            let changed = match seen {
                State::Over(outcome) => return outcome,
                State::Waits => state.changed().await,
                State::Runs(since) => {
                    let deadline = self.0.compile_deadline;
                    let changed = timeout_at(since + deadline, state.changed()).await;
                    changed.map_err(|_| {
                        let seconds = deadline.as_secs();
                        let why = format!("takes too long to compile: more than {seconds} s");
                        GrammarError::Refused(why)
                    })?
                }
            };
            changed.map_err(|_| GrammarError::Broke)?;
        }
    }

    fn under_way(&self) -> MutexGuard<'_, HashMap<GuideSpec, Arc<watch::Sender<State>>>> {
        self.0.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn join(
        &self,
        spec: &GuideSpec,
        work: impl FnOnce(&GuideSpec) -> Result<Arc<Grammar>, String> + Send + 'static,
    ) -> Result<watch::Receiver<State>, GrammarError> {
        let mut under_way = self.under_way();
        if let Some(state) = under_way.get(spec) {
            return Ok(state.subscribe());
        }
        if under_way.len() >= UNDER_WAY_MAX {
            return Err(GrammarError::Busy);
        }
        let (state, receiver) = watch::channel(State::Waits);
        let state = Arc::new(state);
        under_way.insert(spec.clone(), state.clone());
        drop(under_way);
        // Not in the first client's task: others may wait for it, and the first may leave.
        tokio::spawn(self.clone().run(spec.clone(), state, work));
        Ok(receiver)
    }

    async fn run(
        self,
        spec: GuideSpec,
        state: Arc<watch::Sender<State>>,
        work: impl FnOnce(&GuideSpec) -> Result<Arc<Grammar>, String> + Send + 'static,
    ) {
        let threads = self.0.threads.clone();
        let outcome = match timeout(self.0.queue_deadline, threads.acquire_owned()).await {
            Err(_) => Err(GrammarError::Busy),
            Ok(Err(_)) => Err(GrammarError::Broke),
            Ok(Ok(permit)) => {
                let mut under_way = self.under_way();
                if state.receiver_count() == 0 {
                    // All requests that waited for it are gone.
                    under_way.remove(&spec);
                    return;
                }
                drop(under_way);
                state.send_replace(State::Runs(Instant::now()));
                let (done, outcome) = oneshot::channel();
                let (builder, wanted) = (std::thread::Builder::new(), spec.clone());
                // Rules that refer to rules are compiled recursively, and a stack overflow would
                // end the process. The thread is detached: nobody waits for it when the process
                // ends.
                let thread = builder.name("grammar".to_owned()).stack_size(STACK_BYTES);
                let thread = thread.spawn(move || {
                    // Held until the end, even after all clients were told that it takes too long.
                    let _permit = permit;
                    let _ = done.send(work(&wanted).map_err(GrammarError::Refused));
                });
                match thread {
                    Ok(_) => outcome.await.unwrap_or(Err(GrammarError::Broke)),
                    Err(_) => Err(GrammarError::Busy),
                }
            }
        };
        // From now on, it is found in the cache.
        self.under_way().remove(&spec);
        state.send_replace(State::Over(outcome));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use super::*;

    fn spec(name: &str) -> GuideSpec {
        GuideSpec::Regex(name.to_owned())
    }

    fn refused(why: &str) -> GrammarError {
        GrammarError::Refused(why.to_owned())
    }

    #[tokio::test]
    async fn what_takes_too_long_is_refused_keeps_its_thread_and_is_not_begun_twice() {
        let (short, long) = (Duration::from_secs(1), Duration::from_secs(60));
        let compiler = GrammarCompiler::new(1, long, short);
        let (go, wait) = mpsc::channel::<()>();
        let begun = Arc::new(AtomicUsize::new(0));
        let slow = {
            let begun = begun.clone();
            move |_: &GuideSpec| {
                begun.fetch_add(1, Ordering::Relaxed);
                let _ = wait.recv();
                Err("is slow".to_owned())
            }
        };
        let too_long = |outcome: Outcome| {
            let said = outcome.unwrap_err().to_string();
            assert!(said.contains("takes too long to compile"), "{said}");
        };
        too_long(compiler.share(&spec("slow"), slow).await);
        // Its thread keeps running: another specification waits for it, the same one is rejected at
        // once.
        too_long(compiler.share(&spec("slow"), |_| Err("began again".to_owned())).await);
        let other = {
            let compiler = compiler.clone();
            tokio::spawn(async move {
                compiler.share(&spec("other"), |_| Err("its own words".to_owned())).await
            })
        };
        tokio::time::sleep(2 * short).await;
        assert!(!other.is_finished());
        assert_eq!(compiler.0.threads.available_permits(), 0);
        go.send(()).unwrap();
        assert_eq!(other.await.unwrap().unwrap_err(), refused("its own words"));
        assert_eq!(begun.load(Ordering::Relaxed), 1);
        assert!(compiler.under_way().is_empty());
    }

    #[tokio::test]
    async fn a_wait_has_an_end_and_what_nobody_wants_any_more_is_not_begun() {
        let (short, long) = (Duration::from_millis(200), Duration::from_secs(60));
        let compiler = GrammarCompiler::new(1, short, long);
        let (go, wait) = mpsc::channel::<()>();
        let slow = {
            let compiler = compiler.clone();
            tokio::spawn(async move {
                let work = move |_: &GuideSpec| {
                    let _ = wait.recv();
                    panic!("a grammar's thread");
                };
                compiler.share(&spec("slow"), work).await
            })
        };
        while compiler.0.threads.available_permits() > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let late = compiler.share(&spec("late"), |_| Err(String::new())).await;
        assert_eq!(late.unwrap_err(), GrammarError::Busy);
        let unwanted = spec("left");
        let left = compiler.share(&unwanted, |_| panic!("nobody wants it"));
        assert!(timeout(short / 8, left).await.is_err());
        go.send(()).unwrap();
        assert_eq!(slow.await.unwrap().unwrap_err(), GrammarError::Broke);
        let next = compiler.share(&spec("next"), |_| Err("is next".to_owned())).await;
        assert_eq!(next.unwrap_err(), refused("is next"));
        assert!(compiler.under_way().is_empty());
    }
}
