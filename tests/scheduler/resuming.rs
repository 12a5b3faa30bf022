//! Requests that continue from what another coordinator accepted. The random schedules check that
//! their tokens are the same, with nothing lost or repeated.
use std::time::Duration;

use coordinator::engine::{
    EngineError, EngineEvent, EventSender, FinishReason, GenerateRequest, Resumed, ResumedChoice,
};
use coordinator::metrics::Hub;
use coordinator::replica::core::ReplicaCore;
use shared::ids::{Epoch, Incarnation, RequestId};
use shared::metrics::catalogue::{
    GENERATION_TOKENS, PROMPT_TOKENS, REQUEST_SUCCESS, REQUESTS_ACCEPTED, TIME_TO_FIRST_TOKEN,
    TOKENS_RECOMPUTED,
};
use shared::sampling::SamplingParams;
use tokio::sync::mpsc;

use crate::agreement::{SentMessages, WORKERS, core, request, result};

const NOW: Duration = Duration::from_millis(1);

fn hub() -> Hub {
    Hub::new(Incarnation(1), shared::metrics::Limits::default())
}

/// A request with so many accepted tokens per choice, and how they end the choice, if they do.
fn resumed(id: u32, choices: &[(usize, Option<FinishReason>)]) -> GenerateRequest {
    let sampling = (0..).zip(choices);
    let sampling =
        sampling.map(|(choice, _)| SamplingParams { choice, ..SamplingParams::greedy() });
    let of = |(tokens, end): &(usize, Option<FinishReason>)| ResumedChoice {
        tokens: vec![7; *tokens],
        end: *end,
    };
    let choices = choices.iter().map(of).collect();
    GenerateRequest {
        id: RequestId(id.into()),
        prompt: vec![id; 3],
        sampling: sampling.collect(),
        resumed: Some(Box::new(Resumed { choices, over: Vec::new() })),
        ..request()
    }
}

fn submit(
    core: &mut ReplicaCore,
    request: GenerateRequest,
    sent: &mut SentMessages,
) -> mpsc::Receiver<EngineEvent> {
    let (events, receiver) = mpsc::channel(64);
    core.submit(NOW, request, EventSender::Local(events), sent);
    receiver
}

fn events(receiver: &mut mpsc::Receiver<EngineEvent>) -> Vec<EngineEvent> {
    std::iter::from_fn(|| receiver.try_recv().ok()).collect()
}

#[test]
fn what_was_let_in_before_is_let_in_again_though_nothing_came_of_it() {
    let (hub, mut sent) = (hub(), SentMessages::default());
    let mut core = core(hub.observer());
    let fresh =
        |id: u32| GenerateRequest { id: RequestId(id.into()), prompt: vec![id; 3], ..request() };
    let mut kept: Vec<_> = (1..=4).map(|id| submit(&mut core, fresh(id), &mut sent)).collect();
    let mut full = submit(&mut core, fresh(5), &mut sent);
    assert!(matches!(events(&mut full)[..], [EngineEvent::Failed(EngineError::QueueFull { .. })]));
    kept.push(submit(&mut core, resumed(6, &[(0, None)]), &mut sent));
    assert!(kept.iter_mut().all(|receiver| events(receiver).is_empty()), "there is no bound");
    // One that fitted the caches of the last leader's replicas is not told that it asks for too
    // much.
    core.epoch_formed(NOW, Epoch(1), 2, 0, WORKERS.to_vec(), &mut sent);
    let large = |request: GenerateRequest| GenerateRequest {
        prompt: vec![1; 16],
        max_tokens: 48,
        ..request
    };
    let mut new = submit(&mut core, large(fresh(7)), &mut sent);
    let new = events(&mut new);
    assert!(matches!(new[..], [EngineEvent::Failed(EngineError::TooLarge { .. })]), "{new:?}");
    let mut again = submit(&mut core, large(resumed(8, &[(0, None)])), &mut sent);
    let again = events(&mut again);
    assert!(
        matches!(again[..], [EngineEvent::Failed(EngineError::Unavailable { .. })]),
        "{again:?}"
    );
}

/// Only what has begun was observed by another coordinator.
#[test]
fn a_first_token_is_observed_where_it_comes() {
    for (tokens, observed) in [(0, 1), (1, 0)] {
        let (hub, mut sent) = (hub(), SentMessages::default());
        let mut core = core(hub.observer());
        let _events = submit(&mut core, resumed(1, &[(tokens, None)]), &mut sent);
        core.epoch_formed(NOW, Epoch(1), 8, 0, WORKERS.to_vec(), &mut sent);
        let plan = sent.plans[0].clone();
        core.step_done(NOW, WORKERS[0], result(&plan, 0), &mut sent);
        assert_eq!(hub.merged().counter_sum(GENERATION_TOKENS), 1);
        let count = hub.merged().histogram_sum(TIME_TO_FIRST_TOKEN).count();
        assert_eq!(count, observed, "with {tokens} tokens");
    }
}

#[test]
fn what_has_run_goes_before_what_has_not_and_takes_nothing_of_the_queue() {
    let (hub, mut sent) = (hub(), SentMessages::default());
    let mut core = core(hub.observer());
    let mut kept = Vec::new();
    let fresh =
        |id: u32| GenerateRequest { id: RequestId(id.into()), prompt: vec![id; 3], ..request() };
    for id in 1..=4 {
        kept.push(submit(&mut core, fresh(id), &mut sent));
    }
    for id in [5, 6] {
        kept.push(submit(&mut core, resumed(id, &[(2, None)]), &mut sent));
    }
    let mut full = submit(&mut core, fresh(7), &mut sent);
    let full = events(&mut full);
    assert!(matches!(full[..], [EngineEvent::Failed(EngineError::QueueFull { .. })]), "{full:?}");
    assert!(kept.iter_mut().all(|receiver| events(receiver).is_empty()));
    core.epoch_formed(NOW, Epoch(1), 64, 0, WORKERS.to_vec(), &mut sent);
    let admitted = sent.plans.iter().flat_map(|plan| &plan.admitted);
    let admitted: Vec<(u32, usize)> =
        admitted.map(|new| (new.tokens[0], new.tokens.len())).collect();
    assert_eq!(admitted, [(5, 5), (6, 5), (1, 3), (2, 3)]);
}

#[test]
fn a_choice_whose_end_was_not_heard_ends_at_once_and_the_others_go_on() {
    let (hub, mut sent) = (hub(), SentMessages::default());
    let mut core = core(hub.observer());
    let stops = Some(FinishReason::StopString);
    let request = resumed(5, &[(2, None), (4, stops)]);
    let mut client = submit(&mut core, request, &mut sent);
    let end = EngineEvent::Finished { choice: 1, reason: FinishReason::StopString, cached: 0 };
    assert_eq!(events(&mut client), [end], "and no token again");
    let both = [resumed(6, &[(30, Some(FinishReason::Length))]), resumed(8, &[(1, stops)])];
    for request in both {
        let mut client = submit(&mut core, request, &mut sent);
        assert!(matches!(events(&mut client)[..], [EngineEvent::Finished { choice: 0, .. }]));
    }
    core.epoch_formed(NOW, Epoch(1), 64, 0, WORKERS.to_vec(), &mut sent);
    let plan = sent.plans[0].clone();
    assert_eq!(plan.admitted.len(), 1);
    assert_eq!((&*plan.admitted[0].tokens, plan.admitted[0].num_prompt), (&[5, 5, 5, 7, 7][..], 3));
    core.step_done(NOW, WORKERS[0], result(&plan, 0), &mut sent);
    assert_eq!(events(&mut client), [EngineEvent::Token { choice: 0, token: 7, logprobs: None }]);
    // Only what this coordinator accepted is counted, not what the other one had.
    let merged = hub.merged();
    let tokens = [PROMPT_TOKENS, GENERATION_TOKENS, TOKENS_RECOMPUTED];
    let tokens = tokens.map(|name| merged.counter_sum(name));
    assert_eq!(tokens, [0, 1, 4], "of the five that it had the last one was never computed");
    assert_eq!(merged.counter_sum(REQUESTS_ACCEPTED), 3);
    assert_eq!(merged.counter_sum(REQUEST_SUCCESS), 2);
}

#[test]
fn what_a_smaller_cache_has_no_room_for_ends_as_it_does_anywhere() {
    let (hub, mut sent) = (hub(), SentMessages::default());
    let mut core = core(hub.observer());
    core.epoch_formed(NOW, Epoch(1), 2, 0, WORKERS.to_vec(), &mut sent);
    let open = GenerateRequest { open_ended: true, max_tokens: 60, ..resumed(5, &[(30, None)]) };
    let mut client = submit(&mut core, open, &mut sent);
    let end = EngineEvent::Finished { choice: 0, reason: FinishReason::Length, cached: 0 };
    assert_eq!(events(&mut client), [end]);
    let bound = GenerateRequest { max_tokens: 60, ..resumed(6, &[(2, None)]) };
    let mut client = submit(&mut core, bound, &mut sent);
    let failed = events(&mut client);
    let [EngineEvent::Failed(EngineError::Unavailable { message })] = &*failed else {
        panic!("{failed:?}")
    };
    assert!(message.contains("any more"), "{message}");
}
