//! Bounds of the queue, and leaving it.
use shared::ids::Epoch;
use shared::protocol::StepPlan;
use shared::sampling::SamplingParams;

use super::*;
use crate::engine::GenerateRequest;
use crate::scheduler::{EpochEnd, HandedOver, SchedulerConfig};
use shared::metrics::labels::FailoverReason;

fn scheduler(max_queued_requests: u32) -> Scheduler {
    let config = SchedulerConfig {
        prefix_states: None,
        hidden_size: 64,
        vocab_size: u32::MAX,
        block_size: 16,
        max_model_len: 1 << 17,
        max_num_seqs: 4,
        max_num_batched_tokens: 1 << 17,
        max_mixed_prefill_tokens: None,
        max_queued_requests,
        max_steps_in_flight: 2,
        prefix_caching: false,
        speculation: None,
    };
    let mut scheduler = Scheduler::new(config).unwrap();
    scheduler.replica_ready(Epoch(1), 1 << 14, 0, &mut Vec::new());
    scheduler
}

fn request(id: u64, prompt: usize, choices: u32) -> GenerateRequest {
    let sampling = |choice| SamplingParams { choice, ..SamplingParams::greedy() };
    GenerateRequest::new(RequestId(id), vec![1; prompt], (0..choices).map(sampling).collect(), 8)
}

fn full(queued: u32, max: u32) -> EngineError {
    EngineError::QueueFull { queued, max, retry_after_s: 1 }
}

#[test]
fn many_clients_that_leave_take_nobody_elses_place() {
    let mut here = scheduler(1 << 15);
    for id in 0..64 {
        here.submit(request(id, 3, 16)).unwrap();
    }
    // One that stays, and four running sequences.
    here.submit(request(64, 3, 2)).unwrap();
    assert!(here.plan(&mut StepPlan::default(), &mut Vec::new()));
    let mut effects = Vec::new();
    here.cancel_all((0..64).map(RequestId), &mut effects);
    assert_eq!(effects.len(), 64);
    assert_eq!((here.waiting.len(), here.queued), (2, QueueLoad::of(3, 2)));
    here.submit(request(65, 3, 2)).unwrap();
    let mut plan = StepPlan::default();
    assert!(here.plan(&mut plan, &mut Vec::new()));
    assert_eq!(plan.sequences.len(), 4);
}

#[test]
fn choices_and_their_prompts_have_a_bound_too() {
    let mut choices = scheduler(3);
    choices.submit(request(0, 3, 16_384)).unwrap();
    assert_eq!(choices.submit(request(1, 3, 1)), Err(full(16_384, 16_384)));
    let mut tokens = scheduler(3);
    tokens.submit(request(0, 131_000, 256)).unwrap();
    assert_eq!(tokens.submit(request(1, 9_217, 2)), Err(full(33_536_000, 32 << 20)));
    tokens.submit(request(1, 9_216, 2)).unwrap();
    // A request alone is let in, whatever its size.
    let mut alone = scheduler(1);
    alone.submit(request(0, 100_000, 1024)).unwrap();
    assert_eq!(alone.submit(request(1, 3, 1)), Err(full(1, 1)));
}

#[test]
fn what_has_run_does_not_count_as_queued() {
    let mut here = scheduler(1);
    let (mut plan, mut effects) = (StepPlan::default(), Vec::new());
    here.submit(request(0, 3, 2)).unwrap();
    assert_eq!(here.submit(request(1, 3, 1)), Err(full(1, 1)));
    assert!(here.plan(&mut plan, &mut effects));
    here.submit(request(1, 3, 1)).unwrap();
    assert!(here.plan(&mut plan, &mut effects));
    // Both wait again, and a new one may, too.
    here.replica_lost(EpochEnd::Failed(FailoverReason::StepOverdue), &mut effects);
    assert_eq!((here.gauges().waiting, here.queued), (2, QueueLoad::default()));
    here.submit(request(2, 3, 1)).unwrap();
    assert_eq!(here.submit(request(3, 3, 1)), Err(full(1, 1)));
    // They do not count as new where they go, either.
    let mut other = scheduler(1);
    for handed in here.hand_over() {
        other.adopt(handed).unwrap();
    }
    assert_eq!(here.queued, QueueLoad::default());
    assert_eq!((other.gauges().waiting, other.queued), (3, QueueLoad::of(3, 1)));
    other.cancel(RequestId(2), &mut effects);
    assert_eq!(other.queued, QueueLoad::default());
}

#[test]
fn what_has_not_run_is_shared_evenly_along_the_queue() {
    let mut here = scheduler(20);
    let (mut plan, mut effects) = (StepPlan::default(), Vec::new());
    here.submit(request(0, 3, 2)).unwrap();
    assert!(here.plan(&mut plan, &mut effects));
    // One that has run and waits again; the others never have.
    here.running.clone().into_iter().for_each(|slot| here.unadmit(slot));
    for id in 1..=6 {
        here.submit(request(id, 3, 1 + id as u32 % 2)).unwrap();
    }
    let ids = |handed: &[HandedOver]| handed.iter().map(|it| it.id().0).collect::<Vec<_>>();
    let shared = here.share(3, u32::MAX);
    assert_eq!(ids(&shared), [1, 3, 5]);
    let mut three = QueueLoad::default();
    (0..3).for_each(|_| three.add(QueueLoad::of(3, 1)));
    assert_eq!((here.gauges().waiting, here.queued), (4, three));
    assert_eq!(ids(&here.share(9, 10)), [0; 0], "there is no room for 3 + 8 tokens");
    let mut other = scheduler(20);
    other.submit(request(7, 3, 1)).unwrap();
    for handed in shared {
        other.adopt(handed).unwrap();
    }
    assert_eq!(other.gauges().waiting, 4);
    assert_eq!(ids(&here.share(100, u32::MAX)), [2, 4, 6], "never more than there are");
    assert_eq!(ids(&here.share(1, u32::MAX)), [0; 0], "what has run stays");
    assert_eq!((here.gauges().waiting, here.queued), (1, QueueLoad::default()));
    assert_eq!(
        ids(&other.share(9, u32::MAX)),
        [7, 1, 3, 5],
        "in their order, behind who was there"
    );
}

#[test]
fn an_open_ended_request_is_not_shared_with_who_has_hardly_room() {
    let mut here = scheduler(20);
    let open_ended = |id, prompt| GenerateRequest {
        open_ended: true,
        max_tokens: 100_000,
        ..request(id, prompt, 1)
    };
    here.submit(open_ended(0, 5000)).unwrap();
    here.submit(open_ended(1, 300)).unwrap();
    let mut ids = |room| {
        let shared = here.share(9, room);
        shared.iter().map(|it| it.id().0).collect::<Vec<_>>()
    };
    assert_eq!(ids(4395), [0; 0]);
    assert_eq!(ids(9999), [1], "for the other one, as many tokens again are too few");
    assert_eq!(ids(10_000), [0]);
}

/// A replica takes over what ran at another one, and later gives that one its part again.
#[test]
fn what_ran_elsewhere_is_shared_until_it_runs_here() {
    let ids = |handed: &[HandedOver]| handed.iter().map(|it| it.id().0).collect::<Vec<_>>();
    let queue = |of: &Scheduler| {
        let waiting = of.waiting.iter().filter_map(|slot| of.sequences[*slot].as_ref());
        waiting.map(|sequence| sequence.request.0).collect::<Vec<_>>()
    };
    let (mut plan, mut effects) = (StepPlan::default(), Vec::new());
    let (mut broken, mut here) = (scheduler(20), scheduler(20));
    (0..6).for_each(|id| drop(broken.submit(request(id, 3, 1)).unwrap()));
    (10..15).for_each(|id| drop(here.submit(request(id, 3, 1)).unwrap()));
    assert!(broken.plan(&mut plan, &mut effects) && here.plan(&mut plan, &mut effects));
    assert_eq!((broken.num_shareable(), here.num_shareable()), (2, 1), "four run");
    // Not a failure, after which they would run one by one.
    broken.replica_lost(EpochEnd::Planned, &mut effects);
    assert_eq!(broken.num_shareable(), 6, "none of them has anything left here");
    for handed in broken.hand_over().into_iter().rev() {
        here.adopt(handed).unwrap();
    }
    assert_eq!((broken.num_shareable(), here.num_shareable()), (0, 7));
    assert_eq!(queue(&here), [0, 1, 2, 3, 4, 5, 14]);
    // It serves again, and has something new already.
    broken.replica_ready(Epoch(2), 1 << 14, 0, &mut effects);
    broken.submit(request(20, 3, 1)).unwrap();
    let shared = here.share(3, u32::MAX);
    assert_eq!(ids(&shared), [0, 2, 4]);
    assert!(shared.iter().all(HandedOver::is_shared));
    shared.into_iter().for_each(|handed| drop(broken.adopt(handed).unwrap()));
    assert_eq!(queue(&here), [1, 3, 5, 14]);
    assert_eq!(queue(&broken), [0, 2, 20, 4], "who has run does not wait for who has not");
    assert_eq!(broken.num_shareable(), 4);
    assert!(broken.plan(&mut plan, &mut effects));
    assert_eq!(broken.num_shareable(), 0);
    assert_eq!(ids(&broken.share(9, u32::MAX)), [0; 0]);
    // One that has run here and ends is not counted any more.
    broken.cancel(RequestId(2), &mut effects);
    broken.submit(request(21, 3, 1)).unwrap();
    assert_eq!((broken.gauges().in_flight, broken.num_shareable()), (4, 1));
}

/// With fewer ranks a replica has a smaller cache: what fitted before is not to blame.
#[test]
fn what_a_smaller_cache_has_no_room_for_may_come_again() {
    let mut scheduler = scheduler(20);
    let mut effects = Vec::new();
    scheduler.replica_lost(EpochEnd::Planned, &mut effects);
    scheduler.replica_ready(Epoch(2), 34, 0, &mut effects);
    // Prompt and eight tokens: 34 blocks, 35, and more than there ever were.
    scheduler.submit(request(1, 34 * 16 - 8, 1)).unwrap();
    let refused = scheduler.submit(request(2, 34 * 16 - 7, 1));
    let Err(EngineError::Unavailable { message }) = refused else { panic!("{refused:?}") };
    assert!(message.contains("35 blocks") && message.contains("has 34, and had 16384"));
    let too_large = EngineError::TooLarge { needed: 8192, available: 34 };
    let too_long = scheduler.submit(request(3, 1 << 17, 1));
    assert_eq!(too_long.unwrap_err(), too_large, "for the model");
    let mut never = self::scheduler(20);
    never.blocks_most = 34;
    never.replica_ready(Epoch(2), 34, 0, &mut effects);
    let refused = never.submit(request(2, 34 * 16 - 7, 1)).unwrap_err();
    assert_eq!(refused, EngineError::TooLarge { needed: 35, available: 34 });
}

/// All streams of a front end come to the first replica of a new leader.
#[test]
fn what_ran_under_another_coordinator_is_shared_too() {
    let mut here = scheduler(20);
    for id in 0..4 {
        let choice = crate::engine::ResumedChoice { tokens: vec![7], end: None };
        let resumed = crate::engine::Resumed { choices: vec![choice], over: Vec::new() };
        let resumed = Some(Box::new(resumed));
        here.submit(GenerateRequest { resumed, ..request(id, 3, 1) }).unwrap();
    }
    let shared = here.share(2, u32::MAX);
    assert_eq!(shared.iter().map(|it| it.id().0).collect::<Vec<_>>(), [0, 2]);
    assert_eq!((here.gauges().in_flight, here.num_sequences()), (2, 2));
}

#[test]
fn a_number_that_runs_is_refused() {
    let mut scheduler = scheduler(8);
    scheduler.submit(request(7, 3, 2)).unwrap();
    let refused = scheduler.submit(request(7, 3, 1));
    assert!(matches!(refused, Err(EngineError::Unavailable { message }) if message.contains('7')));
    let mut effects = Vec::new();
    scheduler.cancel(RequestId(7), &mut effects);
    assert_eq!(scheduler.gauges().in_flight, 0);
    assert!(matches!(&effects[..], [Effect::Dropped { seqs, .. }] if seqs.len() == 2));
    scheduler.submit(request(7, 3, 1)).unwrap();
}
