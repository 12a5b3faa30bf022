//! Drives one replica's scheduler and carries its effects to where they belong: plans to the ranks,
//! tokens to the requests' channels, events to the metrics.
//!
//! No socket and no clock here; the shell passes the time in and sends the plans.
use std::collections::HashMap;
use std::time::Duration;

use shared::ids::{Epoch, RequestId, SeqId};
use shared::protocol::{StepPlan, StepResult};
use tokio::sync::mpsc;

use crate::engine::{EngineError, EngineEvent, GenerateRequest, StopCheck};
use crate::metrics::observe::EngineObserver;
use crate::scheduler::{Effect, Scheduler};

/// One replica's scheduler and everything that hangs off its effects.
#[derive(Debug)]
pub struct ReplicaDriver {
    scheduler: Scheduler,
    observer: EngineObserver,
    /// Where the events of accepted, unfinished requests go.
    events: HashMap<RequestId, mpsc::Sender<EngineEvent>>,
    /// Stop checks of the sequences whose request has stop strings.
    stop_checks: HashMap<SeqId, Box<dyn StopCheck>>,
    effects: Vec<Effect>,
    /// Requests whose client is gone, found while events were delivered.
    gone: Vec<RequestId>,
    /// When each step in flight was planned, oldest first.
    in_flight: std::collections::VecDeque<Duration>,
    epoch: Option<Epoch>,
    /// Since when no epoch has been under way.
    unavailable_since: Duration,
    limits: DriverLimits,
}

/// How long the driver waits for what.
#[derive(Clone, Copy, Debug)]
pub struct DriverLimits {
    /// A step that takes longer ends its epoch.
    pub step_timeout: Duration,
    /// Requests fail when no epoch has been under way for so long.
    pub unavailable_timeout: Duration,
}

/// What the shell has to do after a tick.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing.
    Fine,
    /// The step in flight is overdue: end the epoch.
    StepOverdue {
        /// How long it has been in flight.
        waited: Duration,
    },
}

impl ReplicaDriver {
    /// A replica without an epoch.
    #[must_use]
    pub fn new(
        now: Duration,
        scheduler: Scheduler,
        observer: EngineObserver,
        limits: DriverLimits,
    ) -> Self {
        Self {
            scheduler,
            observer,
            events: HashMap::new(),
            stop_checks: HashMap::new(),
            effects: Vec::new(),
            gone: Vec::new(),
            in_flight: std::collections::VecDeque::new(),
            epoch: None,
            unavailable_since: now,
            limits,
        }
    }

    /// Requests accepted and not finished.
    #[must_use]
    pub fn num_requests(&self) -> usize {
        self.events.len()
    }

    /// Takes a request, or tells it at once why not.
    pub fn submit(
        &mut self,
        now: Duration,
        mut request: GenerateRequest,
        events: mpsc::Sender<EngineEvent>,
    ) {
        let id = request.id;
        let stop_checks = std::mem::take(&mut request.stop_checks);
        match self.scheduler.submit(now, request) {
            Ok(seqs) => {
                self.stop_checks.extend(seqs.into_iter().zip(stop_checks));
                self.events.insert(id, events);
                self.observer.accepted();
                self.publish_gauges();
            }
            Err(error) => {
                self.observer.rejected(&error);
                // The receiver may be gone already; nothing is lost then.
                let _ = events.try_send(EngineEvent::Failed(error));
            }
        }
    }

    /// Frees everything a request holds.
    pub fn cancel(&mut self, now: Duration, id: RequestId) {
        if self.events.remove(&id).is_some() {
            self.scheduler.cancel(now, id, &mut self.effects);
            self.deliver(now);
        }
    }

    /// The ranks are formed: steps can run.
    pub fn ready(&mut self, epoch: Epoch, num_blocks: u32) {
        self.epoch = Some(epoch);
        self.in_flight.clear();
        self.scheduler.replica_ready(epoch, num_blocks);
        self.publish_gauges();
    }

    /// The epoch is over; its requests wait for the next with their accepted tokens.
    pub fn lost(&mut self, now: Duration) {
        if self.epoch.take().is_some() {
            self.unavailable_since = now;
            self.in_flight.clear();
            self.scheduler.replica_lost(now, &mut self.effects);
            self.observer.failover();
            self.deliver(now);
        }
    }

    /// Fills `plan` with the next step, if one should be sent now.
    pub fn next_plan(&mut self, now: Duration, plan: &mut StepPlan) -> bool {
        let planned = self.scheduler.plan(now, plan, &mut self.effects);
        if planned {
            self.in_flight.push_back(now);
        }
        self.deliver(now);
        planned
    }

    /// Takes rank 0's result of a step.
    pub fn apply(&mut self, now: Duration, result: StepResult) {
        let stop_checks = &mut self.stop_checks;
        let mut stopped =
            |seq: SeqId, token| stop_checks.get_mut(&seq).is_some_and(|check| check.push(token));
        let applied = self.scheduler.apply(
            now,
            result.epoch,
            result.step,
            result.outputs,
            &mut stopped,
            &mut self.effects,
        );
        match applied {
            Ok(()) => {
                self.in_flight.pop_front();
            }
            Err(error) => self.observer.fenced(&error),
        }
        self.deliver(now);
    }

    /// Time passes: gives up what waited too long, finds clients that are gone.
    pub fn tick(&mut self, now: Duration) -> Verdict {
        let closed = self.events.iter().filter(|(_, events)| events.is_closed());
        self.gone.extend(closed.map(|(id, _)| *id));
        self.drop_gone(now);
        if self.epoch.is_none() {
            let waited = now.saturating_sub(self.unavailable_since);
            if waited >= self.limits.unavailable_timeout && !self.events.is_empty() {
                let error = EngineError::Unavailable {
                    message: format!("the replica has been down for {} s", waited.as_secs()),
                };
                self.fail_all(now, &error);
            }
            return Verdict::Fine;
        }
        let waited = self.in_flight.front().map_or(Duration::ZERO, |at| now.saturating_sub(*at));
        if waited >= self.limits.step_timeout { Verdict::StepOverdue { waited } } else { Verdict::Fine }
    }

    /// Fails every request: the replica is not coming back, or the server shuts down.
    pub fn fail_all(&mut self, now: Duration, error: &EngineError) {
        let mut ids: Vec<RequestId> = self.events.keys().copied().collect();
        ids.sort_unstable();
        for id in ids {
            self.scheduler.fail(now, id, error.clone(), &mut self.effects);
        }
        self.deliver(now);
    }

    fn drop_gone(&mut self, now: Duration) {
        while let Some(id) = self.gone.pop() {
            if self.events.remove(&id).is_some() {
                self.scheduler.cancel(now, id, &mut self.effects);
            }
        }
        self.deliver(now);
    }

    /// Carries out what the scheduler decided.
    fn deliver(&mut self, now: Duration) {
        let mut effects = std::mem::take(&mut self.effects);
        for effect in effects.drain(..) {
            self.observer.observe(now, &effect);
            self.carry_out(effect);
        }
        self.effects = effects;
        self.publish_gauges();
    }

    fn send(&mut self, id: RequestId, event: EngineEvent) {
        // The channel holds a whole request, so it is never full; closed means the client left.
        if let Some(events) = self.events.get(&id)
            && events.try_send(event).is_err()
        {
            self.gone.push(id);
        }
    }

    fn publish_gauges(&mut self) {
        self.observer.gauges(&self.scheduler.gauges());
    }
}
