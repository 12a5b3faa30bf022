//! The laws of the merge, with random processes that count, report, die and come back, over a
//! network that loses, repeats and reorders.
//!
//! The oracle keeps every single event of every process and counts from scratch: for each process,
//! the events up to the newest report that arrived while it lived.
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;
use shared::ids::{Incarnation, WorkerId};
use shared::metrics::catalogue::{
    HTTP_REQUEST_DURATION, HTTP_REQUESTS, HTTP_REQUESTS_IN_FLIGHT, RANK_STEP, RANK_WEIGHTS,
};
use shared::metrics::merger::checkpoint::Checkpoint;
use shared::metrics::{
    LocalStats, Merged, Merger, PartialSnapshot, ReportOutcome, Source, Value, decode_snapshot,
    encode_snapshot,
};
use shared::protocol::FrontendId;

const ROUTES: [&str; 2] = ["/a", "/b"];

/// An event that a process counts.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// Frontends: an answer. All frontends share its series.
    Answer { route: usize, micros: u32, in_flight: u8 },
    /// Workers: a step. Its series is the worker's own.
    Step { micros: u32, weights: u8 },
}

#[derive(Clone, Debug)]
enum Act {
    /// The process at this place counts an event.
    Happen(usize, Event),
    /// The process sends a report into the network, where it stays forever.
    Send(usize),
    /// A report arrives, perhaps again, perhaps never.
    Deliver(usize),
    /// The link to the process breaks; it may report again.
    Lose(usize),
    /// The process is found dead and another takes its place.
    Restart(usize),
    /// The coordinator ends, with its own frontend; another one continues from its checkpoint.
    TakeOver,
}

/// Places: two frontends and two workers.
const SOURCES: [Source; 4] = [
    Source::Frontend(FrontendId(0)),
    Source::Frontend(FrontendId(1)),
    Source::Worker(WorkerId(0)),
    Source::Worker(WorkerId(1)),
];

fn act() -> impl Strategy<Value = Act> {
    let place = 0..SOURCES.len();
    // Durations on and around bucket bounds, where a wrong comparison matters.
    let micros = prop_oneof![0u32..2_000_000, Just(1_000), Just(1_001), Just(2_500), Just(10_000)];
    prop_oneof![
        6 => (place.clone(), micros, any::<u8>(), 0..ROUTES.len()).prop_map(
            |(place, micros, small, route)| {
                let event = if place < 2 {
                    Event::Answer { route, micros, in_flight: small }
                } else {
                    Event::Step { micros, weights: small }
                };
                Act::Happen(place, event)
            }
        ),
        3 => place.clone().prop_map(Act::Send),
        4 => any::<usize>().prop_map(Act::Deliver),
        1 => place.clone().prop_map(Act::Lose),
        1 => place.prop_map(Act::Restart),
        1 => Just(Act::TakeOver),
    ]
}

/// One process, which counts as real ones do.
struct Process {
    stats: LocalStats,
    incarnation: Incarnation,
    sequence: u64,
    events: Vec<Event>,
}

impl Process {
    fn new(incarnation: u64) -> Self {
        let incarnation = Incarnation(incarnation);
        Self { stats: LocalStats::new(), incarnation, sequence: 0, events: Vec::new() }
    }

    fn happen(&mut self, place: usize, event: Event) {
        self.events.push(event);
        let stats = &mut self.stats;
        match event {
            Event::Answer { route, micros, in_flight } => {
                let route = ROUTES[route];
                let answers = stats.counter(HTTP_REQUESTS, ["GET", route, "200"]);
                let durations = stats.histogram(HTTP_REQUEST_DURATION, ["GET", route]);
                let gauge = stats.gauge(HTTP_REQUESTS_IN_FLIGHT, []);
                stats.add(answers, 1);
                stats.observe_duration(durations, Duration::from_micros(micros.into()));
                stats.set(gauge, in_flight.into());
            }
            Event::Step { micros, weights } => {
                let worker = (place - 2).to_string();
                let labels = ["0", "0", &worker];
                let steps = stats.histogram(RANK_STEP, labels);
                let gauge = stats.gauge(RANK_WEIGHTS, labels);
                stats.observe_n(steps, f64::from(micros) / 1e6, 1);
                stats.set(gauge, weights.into());
            }
        }
    }
}

/// A report in transit.
#[derive(Clone)]
struct Report {
    source: Source,
    incarnation: Incarnation,
    sequence: u64,
    snapshot: PartialSnapshot,
    /// For the oracle: the events it covers.
    events: Vec<Event>,
}

impl Report {
    fn apply(&self, merger: &mut Merger) -> Option<ReportOutcome> {
        let bytes = encode_snapshot(&self.snapshot).unwrap();
        let snapshot = decode_snapshot(&bytes).unwrap();
        merger.apply(self.source, self.incarnation, self.sequence, snapshot).ok()
    }
}

/// Keeps everything that counts, event by event.
#[derive(Default)]
struct Oracle {
    newest: BTreeMap<(Source, Incarnation), (u64, Vec<Event>)>,
    dead: Vec<(Source, Incarnation)>,
    lost: BTreeSet<(Source, Incarnation)>,
}

impl Oracle {
    fn deliver(&mut self, report: &Report) {
        let key = (report.source, report.incarnation);
        if self.dead.contains(&key) {
            return;
        }
        let newest = self.newest.entry(key).or_default();
        if report.sequence > newest.0 {
            *newest = (report.sequence, report.events.clone());
            self.lost.remove(&key);
        }
    }

    fn events(&self) -> impl Iterator<Item = (Source, Event)> {
        self.newest
            .iter()
            .flat_map(|((source, _), (_, events))| events.iter().map(|event| (*source, *event)))
    }

    fn check(&self, merged: &Merged) {
        for (index, route) in ROUTES.iter().enumerate() {
            let times: Vec<u32> = self
                .events()
                .filter_map(|(_, event)| match event {
                    Event::Answer { route, micros, .. } if route == index => Some(micros),
                    _ => None,
                })
                .collect();
            let answers = merged.counter(HTTP_REQUESTS, ["GET", route, "200"]);
            assert_eq!(answers.unwrap_or(0), times.len() as u64);
            let bounds = HTTP_REQUEST_DURATION.series().definition().buckets();
            match merged.histogram(HTTP_REQUEST_DURATION, ["GET", route]) {
                Some(totals) => check_histogram(bounds, totals, &times),
                None => assert!(times.is_empty()),
            }
        }
        for worker in 0..2 {
            let times: Vec<u32> = self
                .events()
                .filter_map(|(source, event)| match event {
                    Event::Step { micros, .. } if source == SOURCES[2 + worker] => Some(micros),
                    _ => None,
                })
                .collect();
            let bounds = RANK_STEP.series().definition().buckets();
            match merged.histogram(RANK_STEP, ["0", "0", &worker.to_string()]) {
                Some(totals) => check_histogram(bounds, totals, &times),
                None => assert!(times.is_empty()),
            }
        }
        self.check_gauges(merged);
    }

    /// Checks that gauges have the values that living processes reported last.
    fn check_gauges(&self, merged: &Merged) {
        let living = self
            .newest
            .iter()
            .filter(|(key, _)| !self.dead.contains(key) && !self.lost.contains(key));
        let mut in_flight: Option<f64> = None;
        let mut weights = [None; 2];
        for ((source, _), (_, events)) in living {
            match (source, events.last()) {
                (Source::Frontend(_), Some(Event::Answer { in_flight: value, .. })) => {
                    *in_flight.get_or_insert(0.0) += f64::from(*value);
                }
                (Source::Worker(worker), Some(Event::Step { weights: value, .. })) => {
                    *weights[worker.0 as usize].get_or_insert(0.0) += f64::from(*value);
                }
                _ => {}
            }
        }
        assert_eq!(merged.gauge(HTTP_REQUESTS_IN_FLIGHT, []), in_flight);
        for (worker, weights) in weights.into_iter().enumerate() {
            assert_eq!(merged.gauge(RANK_WEIGHTS, ["0", "0", &worker.to_string()]), weights);
        }
    }
}

fn check_histogram(bounds: &[f64], totals: &shared::metrics::HistogramTotals, micros: &[u32]) {
    let seconds = |micros: &u32| f64::from(*micros) / 1e6;
    let mut cumulative = 0;
    for (bound, count) in bounds.iter().zip(&totals.buckets) {
        cumulative += count;
        let expected = micros.iter().filter(|time| seconds(time) <= *bound).count();
        assert_eq!(cumulative, expected as u64, "at most {bound}");
    }
    assert_eq!(totals.count(), micros.len() as u64);
    let sum: u64 = micros.iter().map(|time| u64::from(*time)).sum();
    assert_eq!(totals.sum_nanos, u128::from(sum) * 1000);
}

/// Checks that no total is lower in `now` than in `before`, or missing.
fn assert_monotone(before: &Merged, now: &Merged) {
    for (definition, family) in before.families() {
        let later: BTreeMap<_, _> = now
            .families()
            .filter(|(other, _)| other.name == definition.name)
            .flat_map(|(_, family)| family)
            .collect();
        for (labels, value) in family {
            match (value, later.get(labels)) {
                (Value::Gauge(_), _) => {}
                (Value::Counter(before), Some(Value::Counter(now))) => assert!(now >= before),
                (Value::Histogram(before), Some(Value::Histogram(now))) => {
                    assert!(now.continues(before));
                    assert!(now.sum() >= before.sum());
                }
                (_, later) => panic!("{} {labels:?}: {value:?} then {later:?}", definition.name),
            }
        }
    }
}

struct World {
    processes: Vec<Process>,
    network: Vec<Report>,
    started: u64,
}

impl World {
    fn new() -> Self {
        let processes = (0..SOURCES.len() as u64).map(Process::new).collect();
        Self { processes, network: Vec::new(), started: SOURCES.len() as u64 }
    }

    fn send(&mut self, place: usize) {
        let process = &mut self.processes[place];
        process.sequence += 1;
        self.network.push(Report {
            source: SOURCES[place],
            incarnation: process.incarnation,
            sequence: process.sequence,
            snapshot: process.stats.snapshot(),
            events: process.events.clone(),
        });
    }

    fn restart(&mut self, place: usize) -> Incarnation {
        // Incarnations are random: a later one may be smaller.
        self.started += 1;
        let next = self.started.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        std::mem::replace(&mut self.processes[place], Process::new(next)).incarnation
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn totals_are_what_an_observer_of_every_event_counts(
        acts in prop::collection::vec(act(), 1..120),
    ) {
        let mut world = World::new();
        let mut merger = Merger::default();
        let mut oracle = Oracle::default();
        let mut last = merger.merged();
        for act in acts {
            match act {
                Act::Happen(place, event) => world.processes[place].happen(place, event),
                Act::Send(place) => world.send(place),
                Act::Deliver(index) => {
                    if !world.network.is_empty() {
                        let report = &world.network[index % world.network.len()];
                        report.apply(&mut merger);
                        oracle.deliver(report);
                    }
                }
                Act::Lose(place) => {
                    let key = (SOURCES[place], world.processes[place].incarnation);
                    merger.lost(key.0, key.1);
                    oracle.lost.insert(key);
                }
                Act::Restart(place) => {
                    let dead = world.restart(place);
                    merger.retire(SOURCES[place], dead);
                    oracle.dead.push((SOURCES[place], dead));
                }
                Act::TakeOver => {
                    let bytes = merger.checkpoint().encode().unwrap();
                    merger = Merger::default();
                    prop_assert_eq!(merger.restore(Checkpoint::decode(&bytes).unwrap()), 0);
                    let dead = (SOURCES[0], world.restart(0));
                    // Reports of a dead coordinator are not delivered any more.
                    world.network.retain(|report| (report.source, report.incarnation) != dead);
                    oracle.dead.push(dead);
                    let others = oracle.newest.keys().copied().collect::<Vec<_>>();
                    oracle.lost.extend(others);
                }
            }
            let merged = merger.merged();
            assert_monotone(&last, &merged);
            oracle.check(&merged);
            last = merged;
        }
    }

    /// Any order of arrival, and any repetition, gives the same totals.
    #[test]
    fn order_and_repetition_of_reports_change_nothing(
        acts in prop::collection::vec(act(), 1..120),
        order in prop::collection::vec(any::<usize>(), 200),
        dead in prop::collection::vec(any::<bool>(), SOURCES.len()),
    ) {
        let mut world = World::new();
        for act in acts {
            match act {
                Act::Happen(place, event) => world.processes[place].happen(place, event),
                Act::Send(place) => world.send(place),
                Act::Deliver(_) | Act::Lose(_) | Act::TakeOver => {}
                Act::Restart(place) => {
                    world.restart(place);
                }
            }
        }
        // Once in the order of sending.
        let mut orderly = Merger::default();
        for report in &world.network {
            prop_assert_eq!(report.apply(&mut orderly), Some(ReportOutcome::Fresh));
        }
        // And shuffled, with repetitions.
        let mut shuffled = Merger::default();
        let mut left = world.network.clone();
        for pick in &order {
            if left.is_empty() {
                break;
            }
            let report = left.swap_remove(pick % left.len());
            prop_assert!(report.apply(&mut shuffled).is_some());
            let again = &world.network[pick % world.network.len()];
            if again.sequence <= report.sequence && again.source == report.source
                && again.incarnation == report.incarnation
            {
                prop_assert_eq!(again.apply(&mut shuffled), Some(ReportOutcome::Stale));
            }
        }
        prop_assume!(left.is_empty());
        prop_assert_eq!(orderly.merged(), shuffled.merged());
        // Whichever process then dies, and in whatever order, totals and bits stay the same.
        let live: Vec<_> = (0..SOURCES.len()).filter(|place| dead[*place]).collect();
        for place in &live {
            orderly.retire(SOURCES[*place], world.processes[*place].incarnation);
        }
        for place in live.iter().rev() {
            shuffled.retire(SOURCES[*place], world.processes[*place].incarnation);
        }
        prop_assert_eq!(orderly.merged(), shuffled.merged());
    }
}
