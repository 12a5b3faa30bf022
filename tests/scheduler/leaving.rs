//! How long it takes when many requests end at once, and readers that have stopped reading.
use std::sync::Arc;
use std::time::{Duration, Instant};

use coordinator::engine::{EngineError, EngineEvent, EventSender, GenerateRequest, TAKEN_WITHIN};
use coordinator::metrics::Hub;
use coordinator::scheduler::{Effect, Scheduler, SchedulerConfig};
use shared::ids::{Epoch, Incarnation, RequestId};
use shared::metrics::catalogue::REQUEST_SUCCESS;
use shared::metrics::labels::FinishedReason;
use shared::protocol::StepPlan;
use shared::sampling::SamplingParams;
use tokio::sync::mpsc;

use crate::agreement::{Sent, WORKERS, operation, request, result};

const REQUESTS: u64 = 1024;
const CHOICES: u32 = 128;
/// A pass over the queue for each of 131,072 sequences takes minutes.
const MOMENT: Duration = Duration::from_secs(20);

fn full_queue() -> Scheduler {
    let config = SchedulerConfig {
        hidden_size: 64,
        block_size: 16,
        max_model_len: 1024,
        max_num_seqs: 4,
        max_num_batched_tokens: 64,
        max_queued_requests: 1 << 16,
        max_steps_in_flight: 2,
        prefix_caching: false,
        speculation: None,
    };
    let mut scheduler = Scheduler::new(config).unwrap();
    scheduler.replica_ready(Epoch(1), 1 << 10, 0, &mut Vec::new());
    for id in 0..REQUESTS {
        let sampling = |choice| SamplingParams { choice, ..SamplingParams::greedy() };
        let sampling = (0..CHOICES).map(sampling).collect();
        let request = GenerateRequest { id: RequestId(id), sampling, ..request() };
        scheduler.submit(request).unwrap();
    }
    assert!(scheduler.plan(&mut StepPlan::default(), &mut Vec::new()));
    scheduler
}

#[test]
fn a_thousand_requests_end_in_a_moment() {
    for error in [None, Some(EngineError::ShuttingDown)] {
        let (mut scheduler, mut effects) = (full_queue(), Vec::new());
        let (ids, began) = ((0..REQUESTS).map(RequestId), Instant::now());
        match &error {
            None => scheduler.cancel_all(ids, &mut effects),
            Some(error) => scheduler.fail_all(ids, error, &mut effects),
        }
        let took = began.elapsed();
        assert!(took < MOMENT, "{took:?}");
        let sequences = effects.iter().map(|effect| match effect {
            Effect::Dropped { seqs, error: why, .. } if *why == error => seqs.len() as u64,
            effect => panic!("{effect:?}"),
        });
        assert_eq!(sequences.sum::<u64>(), REQUESTS * u64::from(CHOICES));
        let gauges = scheduler.gauges();
        assert_eq!((gauges.in_flight, gauges.running, gauges.blocks_used), (0, 0, 0));
    }
}

#[test]
fn a_reader_that_stops_reading_is_given_up_and_a_slow_one_is_not() {
    let hub = Hub::new(Incarnation(1), shared::metrics::Limits::default());
    let mut operation = operation(hub.observer());
    let (mut sent, mut answered) = (Sent::default(), 0);
    let (stopped, stopped_events) = mpsc::channel(64);
    let (slow, mut slow_events) = mpsc::channel(64);
    let ms = Duration::from_millis;
    operation.submit(ms(1), request(), EventSender::Local(stopped), &mut sent);
    let other = GenerateRequest { id: RequestId(2), response_id: Arc::from("2"), ..request() };
    operation.submit(ms(1), other, EventSender::Local(slow), &mut sent);
    operation.ready(ms(1), Epoch(3), 8, 0, WORKERS.to_vec(), &mut sent);
    let mut cancelled = None;
    // A step every 4 s, as on a machine that is very slow: both requests last for two minutes.
    for at in (50..110_000).step_by(50).map(ms) {
        operation.tick(at, &mut sent);
        if at.as_millis().is_multiple_of(4_000)
            && let Some(plan) = sent.plans.get(answered).cloned()
        {
            answered += 1;
            for worker in WORKERS {
                operation.step_done(at, worker, result(&plan, 5), &mut sent);
            }
        }
        if at.as_millis().is_multiple_of(40_000) {
            assert!(matches!(slow_events.try_recv(), Ok(EngineEvent::Token { .. })), "{at:?}");
        }
        let aborted = hub.merged().counter_sum_of(REQUEST_SUCCESS, FinishedReason::Abort);
        if aborted > 0 {
            cancelled = cancelled.or(Some(at));
            assert_eq!(aborted, 1, "the slow one at {at:?}");
        }
    }
    let cancelled = cancelled.expect("it is cancelled");
    assert!((TAKEN_WITHIN..TAKEN_WITHIN + ms(10_000)).contains(&cancelled), "{cancelled:?}");
    assert!(stopped_events.is_closed());
    assert!(!slow_events.is_closed() && sent.ends.is_empty(), "{:?}", sent.ends);
}
