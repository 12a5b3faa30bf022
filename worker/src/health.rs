//! Whether a worker does what it is there for, as far as it can know: it is linked to its
//! coordinator, and serves as a rank or is free to become one. For who updates or moves one worker
//! after another, and must not take the next before this one is back.
//!
//! The actor records the link and what it is told to become, the executor what comes of it.
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use shared::ids::Epoch;
use shared::protocol::FromWorker;

/// A worker that has just joined, and is to be a rank, is told so sooner than this.
const JOINED: Duration = Duration::from_secs(5);
/// A worker whose replica has ended, and is to be a rank again, is mostly told so sooner than this:
/// the coordinator waits between attempts, and for who is missing.
const RELEASED: Duration = Duration::from_secs(30);

/// What a worker knows of its readiness. Clones share it.
#[derive(Clone, Debug)]
pub struct WorkerHealth {
    state: Arc<Mutex<State>>,
    started: Instant,
}

impl Default for WorkerHealth {
    fn default() -> Self {
        let state = State {
            link: Err("it dials its coordinator".to_owned()),
            stage: Stage::Free { wait: JOINED },
            epoch: None,
            since: Duration::ZERO,
            ends: false,
        };
        Self { state: Arc::new(Mutex::new(state)), started: Instant::now() }
    }
}

/// PURE: the same, with time as a value.
#[derive(Debug)]
struct State {
    /// The link's number at the executor, or why there is none.
    link: Result<u64, String>,
    stage: Stage,
    /// The epoch of its stage, if that has one.
    epoch: Option<Epoch>,
    /// When the stage began.
    since: Duration,
    /// Whether the worker is about to end.
    ends: bool,
}

/// How far a worker has come.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Stage {
    /// In no replica. A spare, if nothing else has come after this wait.
    Free { wait: Duration },
    /// It loads its part of the model.
    Forming,
    /// It waits for the other ranks to have loaded theirs.
    Formed,
    /// It waits for the replica's first step.
    Started,
    /// It has run a step.
    Serves,
    /// It could not become a rank, and trying again cannot help.
    Failed(String),
}

impl State {
    fn enter(&mut self, now: Duration, stage: Stage, epoch: Option<Epoch>) {
        (self.stage, self.epoch, self.since) = (stage, epoch, now);
    }

    fn readiness(&self, now: Duration) -> Result<String, String> {
        if self.ends {
            return Err("it is about to end".to_owned());
        }
        self.link.as_ref().map_err(|why| format!("it is not linked to a coordinator: {why}"))?;
        match &self.stage {
            Stage::Serves => Ok("it serves as a rank".to_owned()),
            Stage::Free { wait } if now.saturating_sub(self.since) >= *wait => {
                Ok("it is a spare".to_owned())
            }
            Stage::Free { .. } => Err("it waits to be told what to do".to_owned()),
            Stage::Forming => Err("it loads the model".to_owned()),
            Stage::Formed => Err("it waits for the other ranks of its replica".to_owned()),
            Stage::Started => Err("it waits for the first step of its replica".to_owned()),
            Stage::Failed(why) => Err(format!("it could not become a rank: {why}")),
        }
    }

    /// The executor sends this over a link.
    fn told(&mut self, now: Duration, link: u64, message: &FromWorker) {
        if self.link != Ok(link) {
            return;
        }
        let (epoch, stage) = match message {
            FromWorker::Formed(formed) => (formed.epoch, Stage::Formed),
            FromWorker::Started(started) => (started.epoch, Stage::Started),
            FromWorker::FormFailed(failed) if failed.permanent => {
                (failed.epoch, Stage::Failed(failed.message.clone()))
            }
            FromWorker::FormFailed(failed) => (failed.epoch, Stage::Free { wait: RELEASED }),
            FromWorker::StepFailed(failed) => (failed.epoch, Stage::Free { wait: RELEASED }),
            _ => return,
        };
        if self.epoch == Some(epoch) {
            // A failure stays until it is told to become a rank again.
            let failed = matches!(stage, Stage::Failed(_) | Stage::Free { .. });
            self.enter(now, stage, (!failed).then_some(epoch));
        }
    }
}

impl WorkerHealth {
    /// Returns what it does if it is ready, otherwise why not, in one line.
    ///
    /// # Errors
    /// Why it is not ready.
    pub fn readiness(&self) -> Result<String, String> {
        self.state().readiness(self.started.elapsed())
    }

    /// There is a link, with this number at the executor.
    pub(crate) fn linked(&self, link: u64) {
        let mut state = self.state();
        state.link = Ok(link);
        state.enter(self.started.elapsed(), Stage::Free { wait: JOINED }, None);
    }

    /// There is no link, and why.
    pub(crate) fn unlinked(&self, why: String) {
        self.state().link = Err(why);
    }

    /// It is told to become a rank.
    pub(crate) fn forms(&self, epoch: Epoch) {
        self.state().enter(self.started.elapsed(), Stage::Forming, Some(epoch));
    }

    /// This epoch is over.
    pub(crate) fn aborted(&self, epoch: Epoch) {
        let mut state = self.state();
        if state.epoch.is_some_and(|current| current <= epoch) {
            state.enter(self.started.elapsed(), Stage::Free { wait: RELEASED }, None);
        }
    }

    /// The executor has run a step of this epoch.
    pub(crate) fn stepped(&self, epoch: Epoch) {
        let mut state = self.state();
        if state.epoch == Some(epoch) && state.stage == Stage::Started {
            state.enter(self.started.elapsed(), Stage::Serves, Some(epoch));
        }
    }

    /// The executor sends this over a link.
    pub(crate) fn told(&self, link: u64, message: &FromWorker) {
        self.state().told(self.started.elapsed(), link, message);
    }

    /// The worker is about to end.
    pub(crate) fn ends(&self) {
        self.state().ends = true;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere leaves a whole state behind.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use shared::model_identity::ModelIdentity;
    use shared::protocol::{FormFailed, Formed, Started, StepFailed};

    use super::*;

    const EPOCH: Epoch = Epoch(7);

    fn formed() -> FromWorker {
        FromWorker::Formed(Formed {
            epoch: EPOCH,
            kv_blocks: 1,
            host_blocks: 0,
            weight_bytes: 1,
            load_seconds: 0.0,
            identity: ModelIdentity(7),
            adapters: 0,
        })
    }

    fn failed(permanent: bool) -> FromWorker {
        let message = "no such file".to_owned();
        FromWorker::FormFailed(FormFailed { epoch: EPOCH, message, permanent })
    }

    /// Whether it is ready, now and after half a minute more, as nothing else happens.
    fn ready(health: &WorkerHealth) -> (bool, bool) {
        let (state, now) = (health.state(), health.started.elapsed());
        (state.readiness(now).is_ok(), state.readiness(now + RELEASED).is_ok())
    }

    #[test]
    fn a_rank_is_ready_after_a_step_and_a_free_worker_after_a_while() {
        let health = WorkerHealth::default();
        assert_eq!(ready(&health), (false, false), "no link");
        health.linked(1);
        assert_eq!(ready(&health), (false, true), "a spare, if nobody wants it");
        health.forms(EPOCH);
        for message in [formed(), FromWorker::Started(Started { epoch: EPOCH })] {
            assert_eq!(ready(&health), (false, false), "{message:?}");
            health.told(1, &message);
        }
        assert_eq!(ready(&health), (false, false), "no step yet");
        health.stepped(Epoch(6));
        assert_eq!(ready(&health), (false, false), "another epoch's");
        health.stepped(EPOCH);
        assert_eq!(ready(&health), (true, true));
        health.aborted(Epoch(6));
        assert_eq!(ready(&health), (true, true), "an epoch before this one");
        health.aborted(EPOCH);
        assert_eq!(ready(&health), (false, true));
        health.unlinked("gone".to_owned());
        assert_eq!(ready(&health), (false, false));
        health.linked(2);
        health.ends();
        assert_eq!(ready(&health), (false, false), "it ends");
    }

    #[test]
    fn a_failure_that_stays_keeps_it_from_being_ready_until_it_is_tried_again() {
        for (message, stays) in [
            (failed(true), true),
            (failed(false), false),
            (
                FromWorker::StepFailed(StepFailed {
                    epoch: EPOCH,
                    step: shared::ids::StepId(1),
                    message: "late".to_owned(),
                }),
                false,
            ),
        ] {
            let health = WorkerHealth::default();
            health.linked(1);
            health.forms(EPOCH);
            health.told(9, &message);
            assert!(health.readiness().unwrap_err().contains("loads"), "another link's");
            health.told(1, &message);
            // The coordinator ends the epoch, too.
            health.aborted(EPOCH);
            assert_eq!(ready(&health), (false, !stays), "{message:?}");
            health.forms(Epoch(8));
            assert!(health.readiness().unwrap_err().contains("loads"));
        }
    }
}
