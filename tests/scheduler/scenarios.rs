//! The main cases, in readable form.
use std::time::Instant;

use coordinator::engine::{EngineError, FinishReason};
use coordinator::scheduler::{
    ApplyError, EpochEnd, Method, NgramConfig, Scheduler, SchedulerConfig, Speculation,
};
use shared::ids::{Epoch, StepId};
use shared::protocol::{SequenceOutput, StepPlan};
use shared::sampling::Pooling;

use crate::rig::{ClientRequest, Rig, sizes};

pub(crate) fn config() -> SchedulerConfig {
    SchedulerConfig { max_queued_requests: 3, ..sizes() }
}

fn ready() -> Rig {
    let mut rig = Rig::new(config());
    rig.ready(64);
    rig
}

fn prompt(len: u32) -> ClientRequest {
    ClientRequest { prompt: (0..len).map(|i| i % 50).collect(), ..ClientRequest::default() }
}

/// (count, sample) of each sequence of the last plan.
fn shares(plan: &StepPlan) -> Vec<(u32, bool)> {
    plan.sequences.iter().map(|entry| (entry.count, entry.sample)).collect()
}

#[test]
fn a_long_prompt_is_prefilled_in_chunks_while_others_decode() {
    let mut rig = ready();
    rig.submit(ClientRequest { max_tokens: 20, ..prompt(4) }).unwrap();
    rig.submit(prompt(70)).unwrap();
    assert!(rig.plan());
    assert_eq!(shares(&rig.plan), [(4, true), (28, false)]);
    assert!(rig.plan());
    assert_eq!(
        shares(&rig.plan),
        [(1, true), (31, false)],
        "decode first, the rest for the prompt"
    );
    rig.deliver();
    rig.deliver();
    assert!(rig.plan());
    assert_eq!(shares(&rig.plan), [(1, true), (11, true)]);
    rig.drain();
}

/// Plans until nothing more can be planned, without answers: what a replica has begun when it dies
/// in the middle of a step.
fn begin(rig: &mut Rig) {
    while rig.plan() {}
}

#[test]
fn another_replica_goes_on_where_the_broken_one_was_oldest_first() {
    let mut rig = ready();
    for max_tokens in [30, 20, 10] {
        rig.submit(ClientRequest { max_tokens, n: 2, stop_token: Some(7), ..prompt(6) }).unwrap();
    }
    for _ in 0..4 {
        rig.plan();
        rig.deliver();
    }
    let generated = rig.totals.generated;
    assert!(generated > 0);
    rig.move_on();
    assert_eq!(rig.scheduler.gauges().waiting, 3);
    rig.ready(64);
    rig.plan();
    let admitted: Vec<u32> = rig.plan.admitted.iter().map(|new| new.tokens.len() as u32).collect();
    assert!(admitted[0] > 6, "the oldest comes first, with what was accepted: {admitted:?}");
    rig.drain();
    assert!(rig.totals.recomputed > 0, "its tokens are computed again, and not counted again");
}

#[test]
fn a_request_that_ends_epochs_is_tried_alone_and_then_given_up() {
    let mut rig = ready();
    let ends = rig.submit(prompt(4)).unwrap();
    let others = [rig.submit(prompt(5)).unwrap(), rig.submit(prompt(6)).unwrap()];
    // Run together at first: it is unknown which one is the cause.
    begin(&mut rig);
    assert!(rig.plan.sequences.len() + rig.plan.admitted.len() > 0);
    rig.lost();
    for _ in 0..2 {
        rig.ready(64);
        begin(&mut rig);
        assert_eq!(rig.scheduler.gauges().running, 1, "alone");
        rig.lost();
    }
    let (_, got) = &rig.requests[&ends];
    assert_eq!(got.dropped, Some(Some(EngineError::Quarantined { epochs: 3 })));
    rig.ready(64);
    rig.drain();
    for other in others {
        assert!(rig.requests[&other].1.dropped.is_none(), "the others go on");
    }
}

#[test]
fn what_ends_epochs_late_in_its_prompt_is_given_up_too() {
    let mut rig = ready();
    // Its first shares are computed again and again, which is not progress.
    let ends = rig.submit(prompt(90)).unwrap();
    for epoch in 0..4 {
        assert!(rig.requests[&ends].1.dropped.is_none(), "epoch {epoch}");
        begin(&mut rig);
        rig.deliver();
        begin(&mut rig);
        rig.lost();
        rig.ready(64);
    }
    let (_, got) = &rig.requests[&ends];
    assert_eq!(got.dropped, Some(Some(EngineError::Quarantined { epochs: 3 })));
}

#[test]
fn epochs_that_end_on_purpose_make_no_suspects() {
    let mut rig = ready();
    let requests = [rig.submit(prompt(4)).unwrap(), rig.submit(prompt(5)).unwrap()];
    for _ in 0..5 {
        begin(&mut rig);
        assert_eq!(rig.scheduler.gauges().running, 2, "together");
        rig.ended(EpochEnd::Planned);
        rig.ready(64);
    }
    rig.drain();
    assert!(requests.iter().all(|id| rig.requests[id].1.dropped.is_none()));
}

#[test]
fn a_suspect_that_gets_on_is_one_no_more() {
    let mut rig = ready();
    for _ in 0..3 {
        rig.submit(ClientRequest { max_tokens: 100, ..prompt(4) }).unwrap();
    }
    for _ in 0..8 {
        begin(&mut rig);
        rig.lost();
        rig.ready(64);
        // Each gets a step without other suspects; then they run together again.
        for _ in 0..6 {
            rig.plan();
            rig.deliver();
        }
        assert_eq!(rig.scheduler.gauges().running, 3);
    }
    rig.drain();
    assert!(rig.requests.values().all(|(_, got)| got.dropped.is_none()));
}

#[test]
fn one_step_ahead_begins_where_only_the_worker_knows_the_token() {
    let mut rig = ready();
    rig.submit(prompt(3)).unwrap();
    assert!(rig.plan() && rig.plan());
    assert_eq!((rig.plan.sequences[0].start, rig.plan.sequences[0].count), (3, 1));
    assert!(!rig.plan(), "two steps are in flight");
}

#[test]
fn length_is_known_ahead_and_wastes_nothing() {
    let mut rig = ready();
    let id = rig.submit(prompt(3)).unwrap();
    rig.drain();
    assert_eq!(rig.requests[&id].1.reasons, [Some(FinishReason::Length)]);
    assert_eq!((rig.totals.generated, rig.totals.wasted, rig.totals.prompt), (5, 0, 3));
}

#[test]
fn a_late_finish_wastes_one_token_and_emits_nothing() {
    let mut rig = ready();
    let probe = rig.submit(prompt(3)).unwrap();
    rig.drain();
    let second = rig.requests[&probe].1.tokens[0][1];
    let id = rig.submit(ClientRequest { stop_token: Some(second), ..prompt(3) }).unwrap();
    rig.totals = Default::default();
    while rig.plan() || rig.deliver() {}
    assert_eq!(rig.requests[&id].1.reasons, [Some(FinishReason::StopString)]);
    assert_eq!((rig.totals.generated, rig.totals.wasted), (2, 1));
}

#[test]
fn out_of_blocks_the_last_admitted_waits_at_the_front_and_goes_on_identically() {
    let mut rig = Rig::new(config());
    rig.ready(5);
    let ids: Vec<_> = (0..3)
        .map(|seed| rig.submit(ClientRequest { max_tokens: 40, seed, ..prompt(14) }).unwrap())
        .collect();
    rig.drain();
    assert!(rig.preemptions > 0, "five blocks cannot hold three sequences of four");
    assert!(rig.totals.recomputed > 0);
    assert_eq!(rig.totals.prompt, 3 * 14, "recomputed prompt tokens are not counted again");
    for id in ids {
        assert_eq!(rig.requests[&id].1.tokens[0].len(), 40);
    }
}

#[test]
fn a_lost_replica_keeps_what_was_accepted() {
    let mut rig = ready();
    let id = rig.submit(ClientRequest { max_tokens: 30, ..prompt(10) }).unwrap();
    for _ in 0..10 {
        rig.plan();
        rig.deliver();
    }
    let before = rig.requests[&id].1.tokens[0].clone();
    assert!(!before.is_empty());
    rig.plan();
    rig.lost();
    assert!(!rig.plan(), "without a replica nothing is planned");
    rig.ready(64);
    assert!(rig.plan());
    let again = &rig.plan.admitted[0];
    assert_eq!((again.num_prompt, again.tokens.len()), (10, 10 + before.len()));
    rig.drain();
    assert_eq!(rig.requests[&id].1.tokens[0].len(), 30);
}

#[test]
fn what_is_lost_with_its_epoch_was_not_computed() {
    let mut rig = ready();
    rig.submit(prompt(70)).unwrap();
    assert!(rig.plan() && rig.plan());
    rig.deliver();
    rig.lost();
    rig.ready(64);
    rig.drain();
    assert_eq!((rig.totals.prompt, rig.totals.recomputed), (70, 32), "one step of 32 was answered");
}

#[test]
fn refusals_name_the_bound() {
    let mut rig = ready();
    let large = rig.submit(ClientRequest { max_tokens: 1000, ..prompt(40) });
    assert!(large.is_ok(), "64 blocks hold 1,024 tokens");
    let mut rig = Rig::new(config());
    rig.ready(8);
    let error = rig.submit(ClientRequest { max_tokens: 200, ..prompt(40) }).unwrap_err();
    assert_eq!(error, EngineError::TooLarge { needed: 15, available: 8 });
    for _ in 0..3 {
        rig.submit(prompt(3)).unwrap();
    }
    let error = rig.submit(prompt(3)).unwrap_err();
    assert_eq!(error, EngineError::QueueFull { queued: 3, max: 3, retry_after_s: 1 });
}

/// A request without a bound gets what the cache has room for, wherever it runs, and ends as if it
/// had reached its bound.
#[test]
fn without_a_bound_the_cache_is_the_bound() {
    let open = ClientRequest { max_tokens: 900, open_ended: true, ..prompt(40) };
    let ends_at = |rig: &mut Rig, id, room: usize| {
        rig.drain();
        let got = &rig.requests[&id].1;
        assert_eq!(got.reasons, [Some(FinishReason::Length)]);
        assert_eq!(got.tokens[0].len(), room - 40);
    };
    // 8 blocks of 16 tokens.
    let mut rig = Rig::new(config());
    rig.ready(8);
    let id = rig.submit(open.clone()).unwrap();
    ends_at(&mut rig, id, 128);
    // Accepted before the number of blocks is known.
    let mut rig = Rig::new(config());
    let id = rig.submit(open.clone()).unwrap();
    rig.ready(8);
    ends_at(&mut rig, id, 128);
    // Begun where there is more room.
    let mut rig = ready();
    let id = rig.submit(open.clone()).unwrap();
    for _ in 0..30 {
        rig.plan();
        rig.deliver();
    }
    rig.lost();
    rig.ready(8);
    ends_at(&mut rig, id, 128);
    // If it already has more tokens than the smaller cache holds, it ends with those: in the
    // replica that comes back smaller, and in another one that continues it.
    for moves in [false, true] {
        let mut rig = ready();
        let id = rig.submit(open.clone()).unwrap();
        while rig.requests[&id].1.tokens[0].len() < 100 {
            rig.plan();
            rig.deliver();
        }
        let got = rig.requests[&id].1.tokens[0].len();
        match moves {
            false => {
                rig.lost();
                rig.ready(8);
            }
            true => rig.move_on_to(8),
        }
        ends_at(&mut rig, id, 40 + got);
    }
    // If not even its prompt fits, it is refused.
    let mut rig = Rig::new(config());
    rig.ready(2);
    let error = rig.submit(open).unwrap_err();
    assert_eq!(error, EngineError::TooLarge { needed: 3, available: 2 });
}

/// A replica that comes back larger, or another one, goes on as if the cache had never been small.
#[test]
fn a_small_cache_is_the_bound_only_while_it_lasts() {
    let open = ClientRequest { max_tokens: 300, open_ended: true, ..prompt(40) };
    let steps = |rig: &mut Rig| {
        for _ in 0..10 {
            rig.plan();
            rig.deliver();
        }
    };
    for moves in [false, true] {
        let mut rig = Rig::new(config());
        rig.ready(8);
        let id = rig.submit(open.clone()).unwrap();
        steps(&mut rig);
        rig.lost();
        rig.ready(6);
        steps(&mut rig);
        match moves {
            false => {
                rig.lost();
                rig.ready(64);
            }
            true => rig.move_on_to(64),
        }
        rig.drain();
        let got = &rig.requests[&id].1;
        assert_eq!((got.tokens[0].len(), &*got.reasons), (300, &[Some(FinishReason::Length)][..]));
    }
}

/// What runs goes on: a prompt that takes the last free blocks would be preempted with the next
/// block that another sequence begins, and computed again.
#[test]
fn a_prompt_waits_for_more_blocks_than_its_own_while_others_run() {
    let mut rig = Rig::new(SchedulerConfig { prefix_caching: false, ..config() });
    rig.ready(8);
    rig.submit(ClientRequest { max_tokens: 20, ..prompt(30) }).unwrap();
    rig.plan();
    rig.deliver();
    rig.submit(ClientRequest { seed: 1, ..prompt(80) }).unwrap();
    rig.drain();
    assert_eq!((rig.preemptions, rig.totals.recomputed, rig.totals.prompt), (0, 0, 110));
}

#[test]
fn a_token_that_the_model_lacks_is_refused_with_its_request_alone() {
    let mut rig = Rig::new(SchedulerConfig { vocab_size: 50, ..config() });
    rig.ready(64);
    let other = rig.submit(prompt(3)).unwrap();
    let prompt = vec![1, 50, 2];
    let poison = rig.submit(ClientRequest { prompt, ..ClientRequest::default() });
    let Err(EngineError::Broke { message }) = poison else { panic!("{poison:?}") };
    assert!(message.contains("token 50 of a vocabulary of 50"), "{message}");
    rig.drain();
    assert_eq!(rig.requests[&other].1.tokens[0].len(), 5);
}

#[test]
fn answers_of_another_epoch_or_step_change_nothing() {
    let mut rig = ready();
    rig.submit(prompt(3)).unwrap();
    rig.plan();
    let before = rig.scheduler.gauges();
    let mut apply = |epoch, step| {
        let mut effects = Vec::new();
        let result = rig.scheduler.apply(
            Epoch(epoch),
            StepId(step),
            Vec::new(),
            &[],
            &mut |_, _| false,
            &mut effects,
        );
        assert!(effects.is_empty());
        result
    };
    assert_eq!(apply(9, 1), Err(ApplyError::StaleEpoch { got: Epoch(9) }));
    assert_eq!(apply(1, 2), Err(ApplyError::UnexpectedStep { got: StepId(2) }));
    assert_eq!(rig.scheduler.gauges(), before);
    rig.drain();
}

#[test]
fn a_request_for_no_tokens_ends_with_its_prompt() {
    let mut rig = ready();
    let client = ClientRequest { max_tokens: 0, prompt_logprobs: Some(0), ..prompt(70) };
    let id = rig.submit(client).unwrap();
    rig.drain();
    let got = &rig.requests[&id].1;
    assert_eq!((got.prompt_logprobs, &got.tokens[0]), (Some(69), &Vec::new()));
    assert_eq!(got.reasons, [Some(FinishReason::Length)]);
}

#[test]
fn log_probabilities_of_a_prompt_that_are_not_of_its_next_tokens_fail_it() {
    type Change = fn(&mut SequenceOutput);
    // Three steps of 32, 32 and 6 tokens; which of their answers is changed, and how.
    let changes: [(usize, Change); 5] = [
        (0, |output| output.prompt_start = 0),
        (1, |output| output.prompt_start += 1),
        (1, |output| drop(output.prompt_logprobs.pop())),
        (2, |output| output.prompt_logprobs.clear()),
        (2, |output| output.prompt_logprobs.extend_from_within(..1)),
    ];
    for (index, (step, change)) in changes.into_iter().enumerate() {
        let mut rig = ready();
        let client = ClientRequest { prompt_logprobs: Some(0), ..prompt(70) };
        let id = rig.submit(client).unwrap();
        for at in 0..3 {
            rig.plan();
            if at == step {
                rig.tamper(|outputs| change(&mut outputs[0]));
            }
            rig.deliver();
        }
        rig.drain();
        let got = &rig.requests[&id].1;
        assert_eq!(got.dropped, Some(Some(EngineError::Corrupted)), "change {index}");
        assert_eq!((got.prompt_logprobs, got.tokens[0].len()), (None, 0), "change {index}");
    }
}

#[test]
fn an_embedding_is_a_prompt_that_is_computed_and_is_no_token() {
    for pooling in [Pooling::Last, Pooling::First, Pooling::Mean] {
        let mut rig = ready();
        let client = ClientRequest { max_tokens: 0, pooling: Some(pooling), ..prompt(70) };
        // The rig compares the vector with the model's for the whole prompt; the second request may
        // begin after blocks of the first.
        let ids = [rig.submit(client.clone()).unwrap(), {
            rig.drain();
            rig.submit(client).unwrap()
        }];
        rig.drain();
        for id in ids {
            let got = &rig.requests[&id].1;
            assert!(got.embedded && got.tokens[0].is_empty());
            assert_eq!(got.reasons, [Some(FinishReason::Complete)]);
        }
        let computed = if pooling.needs_all() { 140 } else { 70 + 70 % 16 };
        assert_eq!((rig.totals.prompt, rig.totals.generated), (computed, 0), "{pooling:?}");
    }
}

/// As vLLM counts: of a prompt that has to be computed as a whole, nothing is looked up.
#[test]
fn only_what_may_be_cached_is_counted_as_looked_up() {
    let mut rig = ready();
    let plain = || prompt(40);
    let scored = || ClientRequest { prompt_logprobs: Some(0), ..plain() };
    let pooled = |pooling| ClientRequest { max_tokens: 0, pooling: Some(pooling), ..prompt(40) };
    // Only the first choice has the prompt's log-probabilities.
    let choices = ClientRequest { n: 3, ..scored() };
    let clients = [
        (plain(), (40, 0)),
        (plain(), (40, 32)),
        (scored(), (0, 0)),
        (choices, (80, 64)),
        (pooled(Pooling::Last), (40, 32)),
        (pooled(Pooling::Mean), (0, 0)),
    ];
    for (at, (client, expected)) in clients.into_iter().enumerate() {
        rig.totals = Default::default();
        let generated = client.max_tokens * client.n;
        rig.submit(client).unwrap();
        while rig.plan() || rig.deliver() {}
        let totals = rig.totals;
        assert_eq!((totals.looked_up, totals.found), expected, "client {at}");
        assert_eq!(totals.generated, generated, "client {at}");
    }
    // Nor when it comes back and may be looked up, which is no first time.
    let mut rig = Rig::new(config());
    rig.ready(5);
    for seed in 0..3 {
        rig.submit(ClientRequest { max_tokens: 40, seed, prompt_logprobs: Some(0), ..prompt(14) })
            .unwrap();
    }
    rig.drain();
    assert!(rig.preemptions > 0);
    assert_eq!((rig.totals.looked_up, rig.totals.found), (0, 0));
}

#[test]
fn cancelling_frees_everything_at_once() {
    let mut rig = ready();
    let id = rig.submit(ClientRequest { n: 3, max_tokens: 50, ..prompt(20) }).unwrap();
    rig.plan();
    rig.plan();
    assert!(rig.scheduler.gauges().blocks_used > 0);
    rig.cancel(id);
    let gauges = rig.scheduler.gauges();
    assert_eq!((gauges.in_flight, gauges.blocks_used), (0, 0));
    rig.drain();
    assert_eq!(rig.requests[&id].1.dropped, Some(None));
}

#[test]
fn bounds_in_conflict_are_named() {
    let bad = SchedulerConfig { max_num_batched_tokens: 3, ..config() };
    let error = Scheduler::new(bad).unwrap_err().to_string();
    assert!(error.contains("max_num_batched_tokens (3)") && error.contains("max_num_seqs (4)"));
}

/// Run with `--release -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn time_of_a_decode_step_of_256() {
    for (what, speculation) in [("", None), (", which look for drafts", DRAFTS)] {
        let spent = spent_on_256(SchedulerConfig { speculation, ..config() });
        println!("plan + apply of 256 sequences{what}: {:.1} us", spent.as_secs_f64() * 1e6);
    }
}

/// Run with `--release -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn time_of_a_plan_before_a_long_prompt_that_waits() {
    let mut rig = Rig::new(SchedulerConfig {
        max_num_seqs: 64,
        max_num_batched_tokens: 200_000,
        max_model_len: 131_072,
        max_queued_requests: 100,
        ..config()
    });
    // The prompt's blocks are kept; others take the rest, and it waits for a few blocks.
    rig.ready(8400);
    let long = ClientRequest { max_tokens: 1, seed: 1, ..prompt(131_000) };
    rig.submit(long.clone()).unwrap();
    rig.drain();
    for seed in 0..32 {
        rig.submit(ClientRequest { max_tokens: 400, seed: seed * 3 + 2, ..prompt(100) }).unwrap();
    }
    assert!(rig.plan());
    assert!(rig.deliver());
    rig.submit(long).unwrap();
    let mut plan = StepPlan::default();
    let mut effects = Vec::new();
    let mut spent = std::time::Duration::ZERO;
    for _ in 0..200 {
        let began = Instant::now();
        assert!(rig.scheduler.plan(&mut plan, &mut effects));
        spent += began.elapsed();
        assert!(plan.admitted.is_empty(), "it waits");
        let outputs = rig.worker.as_mut().unwrap().run(&plan, &[]);
        let epoch = Epoch(rig.epoch);
        rig.scheduler
            .apply(epoch, plan.step, outputs, &[], &mut |_, _| false, &mut effects)
            .unwrap();
        effects.clear();
    }
    println!("plan before a prompt of 131,000 tokens: {:.1} us", spent.as_secs_f64() * 1e6 / 200.0);
}

const DRAFTS: Option<Speculation> = Some(Speculation {
    num_speculative_tokens: 5,
    method: Method::Ngram(NgramConfig { prompt_lookup_max: 4, prompt_lookup_min: 2 }),
    disable_by_batch_size: None,
});

/// Per step.
fn spent_on_256(config: SchedulerConfig) -> std::time::Duration {
    let wide = SchedulerConfig {
        max_num_seqs: 256,
        max_num_batched_tokens: 8192,
        max_queued_requests: 1000,
        ..config
    };
    let mut rig = Rig::new(wide);
    rig.ready(100_000);
    for seed in 0..256 {
        rig.submit(ClientRequest { max_tokens: 400, seed: seed * 3 + 1, ..prompt(16) }).unwrap();
    }
    let mut plan = StepPlan::default();
    let mut effects = Vec::new();
    let mut spent = std::time::Duration::ZERO;
    let steps = 300;
    for _ in 0..steps {
        let began = Instant::now();
        assert!(rig.scheduler.plan(&mut plan, &mut effects));
        spent += began.elapsed();
        let outputs = rig.worker.as_mut().unwrap().run(&plan, &[]);
        let began = Instant::now();
        let epoch = Epoch(rig.epoch);
        rig.scheduler
            .apply(epoch, plan.step, outputs, &[], &mut |_, _| false, &mut effects)
            .unwrap();
        spent += began.elapsed();
        effects.clear();
    }
    spent / steps
}
