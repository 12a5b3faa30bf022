//! A step that takes much longer than such steps do ends its epoch, long before the time-out; what
//! is no fault of the ranks does not count.
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use coordinator::metrics::Hub;
use coordinator::replica::core::{ReplicaCore, ReplicaLoad, TICK};
use coordinator::replica::driver::DriverLimits;
use coordinator::scheduler::{EpochEnd, SchedulerConfig};
use shared::ids::{Epoch, Incarnation};
use shared::metrics::catalogue::STEPS_OVERDUE;
use tokio::sync::mpsc;

use crate::agreement::{SentMessages, WORKERS, config, core_with, request, result};
use shared::metrics::labels::FailoverReason;

/// How long each step takes, as long as all is well.
const STEP: Duration = Duration::from_millis(20);

struct Rig {
    hub: Hub,
    core: ReplicaCore,
    sent: SentMessages,
    load: Arc<ReplicaLoad>,
    now: Duration,
    answered: usize,
    /// The clients' ends, which nobody reads and nobody drops.
    unread: Vec<mpsc::Receiver<coordinator::engine::EngineEvent>>,
}

impl Rig {
    fn new(timeout: u64, floor: u64) -> Self {
        let hub = Hub::new(Incarnation(1), shared::metrics::Limits::default());
        let seconds = Duration::from_secs;
        let limits = DriverLimits {
            step_timeout: seconds(timeout),
            step_floor: seconds(floor),
            unavailable_timeout: seconds(90),
            max_queue_wait: None,
        };
        let load = Arc::new(ReplicaLoad::default());
        let config = SchedulerConfig { max_model_len: 4096, ..config() };
        let core = core_with(config, hub.observer(), limits, load.clone());
        let now = Duration::from_millis(1);
        let sent = SentMessages::default();
        let mut rig = Self { hub, core, sent, load, now, answered: 0, unread: vec![] };
        rig.form(3);
        rig
    }

    fn form(&mut self, epoch: u64) {
        let (workers, sent) = (WORKERS.to_vec(), &mut self.sent);
        self.core.epoch_formed(self.now, Epoch(epoch), 256, 0, workers, sent);
    }

    /// All ranks answer so many steps, each after this time.
    fn run(&mut self, steps: usize, takes: Duration) {
        for _ in 0..steps {
            let until = self.now + takes;
            while self.now < until {
                self.now = until.min(self.now + TICK);
                self.core.tick(self.now, &mut self.sent);
            }
            self.answer();
            self.core.tick(self.now, &mut self.sent);
            while self.sent.plans.len() == self.answered {
                // Nothing to do: the next sign of life.
                self.now += TICK;
                self.core.tick(self.now, &mut self.sent);
            }
        }
    }

    fn answer(&mut self) {
        let plan = self.sent.plans[self.answered].clone();
        self.answered += 1;
        for worker in WORKERS {
            self.core.step_done(self.now, worker, result(&plan, 5), &mut self.sent);
        }
    }

    /// Nobody answers, and time passes by these ticks. Returns after how many milliseconds the
    /// epoch ended.
    fn hang(&mut self, tick: Duration, at_most: Duration) -> Option<u64> {
        let (since, ends) = (self.now, self.sent.ends.len());
        while self.now < since + at_most {
            self.now += tick;
            self.core.tick(self.now, &mut self.sent);
            if self.sent.ends.len() > ends {
                return Some((self.now - since).as_millis() as u64);
            }
        }
        None
    }

    fn submit(&mut self, max_tokens: u32) {
        let mut request = request();
        request.max_tokens = max_tokens;
        let (events, tokens) = mpsc::channel(4096);
        self.unread.push(tokens);
        let events = coordinator::engine::EventSender::Local(events);
        self.core.submit(self.now, request, events, &mut self.sent);
    }
}

const MINUTE: Duration = Duration::from_secs(61);

#[test]
fn a_step_that_hangs_is_given_up_once_it_is_known_how_long_steps_take() {
    for (known, waits) in [(100, 5_000), (3, 60_000)] {
        let mut rig = Rig::new(60, 5);
        rig.submit(2000);
        rig.run(known, STEP);
        let waited = rig.hang(TICK, MINUTE).unwrap();
        assert!((waits..=waits + 100).contains(&waited), "{known} steps: {waited} ms");
        let reason = rig.sent.ends[0].clone();
        let seconds = waits / 1000;
        let named = format!("a step took over {seconds} s on worker-4, worker-1");
        assert!(reason.starts_with(&named), "{reason}");
        assert_eq!(rig.sent.hung, WORKERS);
        // Said once, and counted once, however long its end takes.
        assert_eq!(rig.hang(TICK, MINUTE), None);
        assert_eq!(rig.hub.merged().counter_sum(STEPS_OVERDUE), 1);
    }
}

#[test]
fn a_rank_that_waits_for_another_is_not_among_those_that_hang() {
    let mut rig = Rig::new(60, 5);
    rig.submit(2000);
    rig.run(100, STEP);
    // One rank answers two steps, the second of which waits until the ranks agree on the first.
    for step in rig.answered..rig.answered + 2 {
        let done = result(&rig.sent.plans[step], 5);
        rig.core.step_done(rig.now, WORKERS[0], done, &mut rig.sent);
    }
    assert_eq!(rig.sent.plans.len(), rig.answered + 3, "another step is in flight");
    assert!(rig.hang(TICK, MINUTE).is_some());
    assert_eq!(rig.sent.hung, WORKERS[1..]);
}

#[test]
fn a_slow_replica_is_given_ten_times_its_time() {
    let mut rig = Rig::new(60, 5);
    rig.submit(2000);
    rig.run(40, Duration::from_millis(900));
    let waited = rig.hang(TICK, MINUTE).unwrap();
    assert!((8_900..=9_500).contains(&waited), "{waited}");
    let mut slower = Rig::new(60, 5);
    slower.submit(2000);
    slower.run(40, Duration::from_secs(7));
    assert_eq!(slower.hang(TICK, MINUTE * 2), Some(60_000), "the time-out is the bound");
}

#[test]
fn an_idle_replicas_signs_of_life_are_missed_as_well() {
    let mut rig = Rig::new(60, 5);
    rig.run(30, STEP);
    let waited = rig.hang(TICK, MINUTE).unwrap();
    assert!((4_900..=6_200).contains(&waited), "{waited}");
}

#[test]
fn the_floor_may_be_the_time_out() {
    let mut rig = Rig::new(9, 60);
    rig.submit(2000);
    rig.run(100, STEP);
    assert_eq!(rig.hang(TICK, MINUTE), Some(9_000));
}

#[test]
fn time_that_says_nothing_of_the_ranks_does_not_count() {
    // This process stood still: what came meanwhile is not read yet.
    let mut rig = Rig::new(60, 5);
    rig.submit(2000);
    rig.run(100, STEP);
    rig.now += Duration::from_secs(30);
    rig.core.tick(rig.now, &mut rig.sent);
    assert!(rig.sent.ends.is_empty(), "{:?}", rig.sent.ends);
    rig.run(100, STEP);
    // One rank is silent: how long it may be is decided elsewhere.
    rig.load.doubtful.store(true, Ordering::Relaxed);
    assert_eq!(rig.hang(TICK, Duration::from_secs(20)), None);
    rig.load.doubtful.store(false, Ordering::Relaxed);
    let waited = rig.hang(TICK, MINUTE).unwrap();
    assert!((4_900..=5_100).contains(&waited), "from then on: {waited}");
}

#[test]
fn the_next_epoch_begins_to_learn_anew_and_the_next_alarm_takes_longer() {
    let mut rig = Rig::new(60, 5);
    rig.submit(2000);
    rig.run(100, STEP);
    assert!(rig.hang(TICK, MINUTE).unwrap() < 5_200);
    rig.core.epoch_ended(rig.now, Epoch(3), EpochEnd::Failed(FailoverReason::StepOverdue));
    rig.answered = rig.sent.plans.len();
    rig.form(4);
    rig.run(4, STEP);
    // A first step may load kernels and record graphs.
    rig.run(1, Duration::from_secs(30));
    assert_eq!(rig.sent.ends.len(), 1, "{:?}", rig.sent.ends);
    rig.run(400, STEP);
    let waited = rig.hang(TICK, MINUTE).unwrap();
    assert!((19_900..=20_200).contains(&waited), "four times as long: {waited}");
}
