//! Sequences that repeat themselves, and how the scheduler handles their drafts.
use std::time::Duration;

use coordinator::engine::{EngineError, EventSender, FinishReason, GenerateRequest};
use coordinator::metrics::Hub;
use coordinator::replica::driver::{DriverLimits, ReplicaDriver};
use coordinator::scheduler::{
    ApplyError, Effect, Method, NgramConfig, Scheduler, SchedulerConfig, Speculation,
};
use shared::ids::{BlockId, Epoch, Incarnation, ReplicaId, RequestId, SeqId, StepId};
use shared::metrics::Limits;
use shared::metrics::catalogue::INTER_TOKEN_LATENCY;
use shared::protocol::{
    SequenceOutput, SequenceStep, StepPlan, StepResult, StepTimings, WorkerStats,
};
use shared::sampling::{Pooling, SamplingParams};
use tokio::sync::mpsc;

use crate::guided::Guidance;
use crate::rig::{ClientRequest, Rig, sizes};

fn config() -> SchedulerConfig {
    SchedulerConfig {
        max_model_len: 400,
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        speculation: Some(Speculation {
            num_speculative_tokens: 4,
            method: Method::Ngram(NgramConfig { prompt_lookup_max: 3, prompt_lookup_min: 2 }),
            disable_by_batch_size: None,
        }),
        ..sizes()
    }
}

/// A request whose text repeats itself: its seed is divisible by 3.
fn repetitive(max_tokens: u32) -> ClientRequest {
    ClientRequest {
        seed: 3,
        prompt: vec![0, 1, 2, 3, 4, 0, 1, 2],
        max_tokens,
        ..Default::default()
    }
}

/// A request whose text does not repeat itself.
fn plain(max_tokens: u32) -> ClientRequest {
    ClientRequest { seed: 1, prompt: vec![7, 8, 9], max_tokens, ..ClientRequest::default() }
}

fn entries(rig: &Rig) -> &[SequenceStep] {
    &rig.plan.sequences
}

#[test]
fn a_text_that_repeats_itself_takes_far_fewer_steps() {
    let steps = |speculation| {
        let mut rig = Rig::new(SchedulerConfig { speculation, ..config() });
        rig.ready(30);
        rig.submit(repetitive(200)).unwrap();
        let mut steps = 0;
        while rig.plan() || rig.deliver() {
            steps = rig.plan.step.0;
        }
        rig.drain();
        (steps, rig.drafted)
    };
    let (without, none) = steps(None);
    let (with, (drafted, accepted)) = steps(config().speculation);
    assert_eq!((without, none), (200, (0, 0)));
    assert!(with < 100 && accepted > 100, "{with} steps, {accepted} of {drafted} accepted");
}

#[test]
fn what_does_not_repeat_itself_stays_one_step_ahead() {
    let mut rig = Rig::new(config());
    rig.ready(30);
    rig.submit(plain(60)).unwrap();
    assert!(rig.plan());
    for step in 2..=60 {
        assert!(rig.plan(), "step {step} is planned before the one before is answered");
        assert!(rig.deliver());
    }
    rig.drain();
}

#[test]
fn drafts_wait_for_their_token_and_others_for_nothing() {
    let mut rig = Rig::new(config());
    rig.ready(30);
    rig.submit(repetitive(100)).unwrap();
    let others: Vec<_> = (0..2).map(|_| rig.submit(plain(100)).unwrap()).collect();
    assert!(rig.plan() && rig.plan(), "others are planned ahead");
    assert_eq!(entries(&rig).len(), 2);
    assert!(rig.deliver() && rig.plan());
    let drafts: Vec<usize> = entries(&rig).iter().map(|entry| entry.drafts.len()).collect();
    assert_eq!(drafts, [4, 0, 0]);
    assert!(rig.deliver() && rig.plan());
    assert_eq!(entries(&rig).len(), 2, "nobody knows how many tokens the first one gets");
    assert!(!rig.plan() && rig.deliver());
    assert!(rig.plan() && entries(&rig).len() == 3);
    rig.drain();
    assert_eq!(rig.requests[&others[0]].1.tokens[0].len(), 100);
}

#[test]
fn no_draft_reaches_beyond_the_last_token_or_the_longest_sequence() {
    for (max_tokens, max_model_len) in [(1, 400), (2, 400), (3, 400), (7, 400), (90, 32), (90, 33)]
    {
        let mut rig = Rig::new(SchedulerConfig { max_model_len, ..config() });
        // As many blocks as the longest sequence needs: the worker takes no more.
        rig.ready(max_model_len.min(8 + max_tokens).div_ceil(16));
        let id = rig.submit(repetitive(max_tokens)).unwrap();
        rig.drain();
        let got = &rig.requests[&id].1;
        assert_eq!(got.tokens[0].len() as u32, max_tokens.min(max_model_len - 8));
        assert_eq!(got.reasons, [Some(FinishReason::Length)]);
    }
}

/// The last token of a prompt is known, so drafts may follow it, even while the part before it is
/// still being computed.
#[test]
fn a_prompts_last_token_drafts_while_the_part_before_is_in_flight() {
    let mut rig = Rig::new(SchedulerConfig { max_num_batched_tokens: 8, ..config() });
    rig.ready(30);
    let prompt: Vec<u32> = (0..17).map(|at| at % 5).collect();
    rig.submit(ClientRequest { prompt, ..repetitive(40) }).unwrap();
    assert!(rig.plan() && rig.plan() && rig.deliver());
    assert!(rig.plan() && rig.scheduler.gauges().steps_in_flight == 2);
    let last = &entries(&rig)[0];
    assert_eq!((last.start, last.drafts.len()), (16, 4));
    rig.drain();
    assert!(rig.drafted.1 > 10);
}

#[test]
fn an_end_in_the_middle_of_a_draft_ends_the_text_there() {
    let mut rig = Rig::new(config());
    rig.ready(30);
    let whole = rig.submit(repetitive(100)).unwrap();
    rig.drain();
    let text = rig.requests[&whole].1.tokens[0].clone();
    let before = rig.totals.wasted;
    // `finish_reason_is_right` checks that nothing comes after it.
    for token in 0..5 {
        let end_tokens = vec![token];
        rig.submit(ClientRequest { end_tokens, min_tokens: 9, ..repetitive(100) }).unwrap();
        let stop_token = Some(token);
        rig.submit(ClientRequest { stop_token, min_tokens: 9, ..repetitive(100) }).unwrap();
    }
    rig.drain();
    assert!(rig.totals.wasted > before, "some ended in the middle: {text:?}");
}

#[test]
fn nothing_is_drafted_where_more_sequences_run_than_were_said() {
    let speculation =
        Speculation { disable_by_batch_size: Some(2), ..config().speculation.unwrap() };
    let mut rig = Rig::new(SchedulerConfig { speculation: Some(speculation), ..config() });
    rig.ready(40);
    for _ in 0..3 {
        rig.submit(repetitive(60)).unwrap();
    }
    for step in 0..40 {
        assert!(rig.plan() && (step == 0 || rig.deliver()));
        assert!(entries(&rig).iter().all(|entry| entry.drafts.is_empty()));
    }
    rig.drain();
    assert_eq!(rig.drafted, (0, 0));
    rig.submit(repetitive(60)).unwrap();
    rig.submit(repetitive(60)).unwrap();
    rig.drain();
    assert!(rig.drafted.1 > 0);
}

#[test]
fn drafts_take_what_is_left_of_rows_and_budget() {
    // There are 8 rows: 6 sequences leave 2 free, and one more if a sequence waits. A prompt takes
    // what is left of the 10 tokens.
    let mut rig = Rig::new(SchedulerConfig { max_num_batched_tokens: 10, ..config() });
    rig.ready(60);
    for _ in 0..6 {
        rig.submit(repetitive(60)).unwrap();
    }
    let mut most = 0;
    while rig.plan() || rig.deliver() {
        let drafts: usize = entries(&rig).iter().map(|entry| entry.drafts.len()).sum();
        if entries(&rig).len() >= 5 {
            assert!(entries(&rig).len() + drafts <= 8);
            most = most.max(drafts);
        }
    }
    assert!((2..=3).contains(&most), "{most}");
    rig.drain();
}

/// A sequence that waits to draft and then cannot would run only in every other step.
#[test]
fn nobody_waits_to_draft_where_no_row_is_left() {
    let steps = |speculation| {
        let mut rig = Rig::new(SchedulerConfig { speculation, ..config() });
        rig.ready(100);
        for _ in 0..8 {
            rig.submit(repetitive(100)).unwrap();
        }
        // 8 tokens per prompt: one step for all.
        loop {
            if rig.plan() {
                assert_eq!(entries(&rig).len(), 8, "each is in every step");
            } else if !rig.deliver() {
                break;
            }
        }
        rig.drain();
        (rig.plan.step.0, rig.drafted)
    };
    assert_eq!(steps(config().speculation), steps(None));
}

#[test]
fn the_most_urgent_draft_where_few_rows_are_left_and_others_do_not_wait() {
    let steps = |speculation| {
        let mut rig = Rig::new(SchedulerConfig { speculation, ..config() });
        rig.ready(100);
        for _ in 0..6 {
            rig.submit(repetitive(100)).unwrap();
        }
        // Two rows belong to one sequence; another one's answer may be pending.
        loop {
            if rig.plan() {
                let all = rig.scheduler.gauges().in_flight == 6;
                assert!(!all || entries(&rig).len() >= 4, "{:?}", entries(&rig));
            } else if !rig.deliver() {
                break;
            }
        }
        rig.drain();
        rig.plan.step.0
    };
    assert!(steps(config().speculation) <= steps(None));
}

#[test]
fn nobody_waits_to_draft_while_prompts_take_the_whole_step() {
    let steps = |speculation, waits| {
        let mut rig = Rig::new(SchedulerConfig { speculation, max_model_len: 4000, ..config() });
        rig.ready(1000);
        for _ in 0..3 {
            rig.submit(repetitive(90)).unwrap();
        }
        assert!(rig.plan() && rig.deliver());
        // One long prompt, or many that wait for each other.
        let long = ClientRequest { prompt: vec![9; 3000], ..plain(1) };
        let short = |token| ClientRequest { prompt: vec![token; 63], ..plain(1) };
        let others = if waits { (10..57).map(short).collect() } else { vec![long] };
        let others: Vec<_> = others.into_iter().map(|it| rig.submit(it).unwrap()).collect();
        let is_over = |rig: &Rig| others.iter().all(|id| rig.requests[id].1.reasons[0].is_some());
        let (mut missed, mut planned) = (0, 0);
        while !is_over(&rig) {
            let before = rig.plan.step;
            assert!(rig.plan() || rig.deliver());
            let of_three = entries(&rig).iter().filter(|entry| entry.seq.0 <= 3).count();
            if rig.plan.step != before {
                planned += 1;
                missed += 3 - of_three.min(3);
            }
        }
        let over = rig.plan.step.0;
        rig.drain();
        (missed, planned, over, rig.plan.step.0)
    };
    for waits in [false, true] {
        let (missed, planned, over, all) = steps(config().speculation, waits);
        let (_, _, over_without, all_without) = steps(None, waits);
        assert!(planned > 40, "{planned}");
        // Before the prompt comes, and with the room left after its last part, they may wait.
        assert!(missed <= 6, "{missed} of {planned} steps");
        assert!(over <= over_without + 2 && all <= all_without + 2, "{over} {all}");
    }
}

#[test]
fn nobody_waits_to_draft_where_no_block_is_left() {
    // A block holds one token, so a draft needs blocks of its own.
    let steps = |speculation| {
        let mut rig = Rig::new(SchedulerConfig { block_size: 1, speculation, ..config() });
        rig.ready(60);
        for _ in 0..2 {
            rig.submit(repetitive(50)).unwrap();
        }
        // It waits for blocks: until it is admitted, drafts take none.
        let other = rig.submit(ClientRequest { prompt: vec![5; 50], ..plain(1) }).unwrap();
        let mut drafted = 0;
        while rig.requests[&other].1.reasons[0].is_none() {
            assert!(rig.plan() || rig.deliver());
            let drafts = entries(&rig).iter().map(|entry| entry.drafts.len()).sum::<usize>();
            drafted += drafts;
        }
        (drafted, rig.preemptions, rig.plan.step)
    };
    assert_eq!(steps(config().speculation), steps(None));
}

#[test]
fn prompts_and_embeddings_are_rows_as_drafts_are() {
    let mut rig = Rig::new(config());
    rig.ready(100);
    rig.submit(repetitive(60)).unwrap();
    assert!(rig.plan() && rig.deliver());
    // `budget_respected` counts rows.
    for _ in 0..60 {
        for _ in 0..5 {
            let pooling = Some(Pooling::Last);
            let embedding = ClientRequest { prompt: vec![4], pooling, ..plain(0) };
            rig.submit(embedding).unwrap();
        }
        assert!(rig.plan() || rig.deliver());
        rig.deliver();
    }
    rig.drain();
    assert!(rig.drafted.0 > 0);
}

#[test]
fn no_block_is_taken_for_a_draft_that_another_may_need() {
    let mut rig = Rig::new(config());
    // Two sequences of 8 + 8 tokens have a block each, and each needs another for its next token.
    // Of 3 blocks, the free one is kept for that.
    rig.ready(3);
    rig.submit(repetitive(24)).unwrap();
    rig.submit(repetitive(24)).unwrap();
    while rig.plan() || rig.deliver() {
        for entry in entries(&rig).iter().filter(|entry| !entry.drafts.is_empty()) {
            let own_end = entry.start + 1;
            let within = (entry.start + entry.count).div_ceil(16) == own_end.div_ceil(16);
            assert!(within || rig.scheduler.gauges().blocks_used < 3, "{entry:?}");
        }
    }
    rig.drain();
}

#[test]
fn guided_sequences_do_not_draft() {
    let mut rig = Rig::new(config());
    rig.ready(30);
    rig.submit(ClientRequest { guide: Some(Guidance::default()), ..repetitive(60) }).unwrap();
    rig.drain();
    assert_eq!(rig.drafted, (0, 0));
}

#[test]
fn drafts_survive_preemption_loss_and_a_move_of_their_sequence() {
    let mut rig = Rig::new(config());
    rig.ready(9);
    for seed in 0..4 {
        let prompt = (0..20).map(|at| at % 5).collect();
        rig.submit(ClientRequest { seed: seed * 3, prompt, ..repetitive(60) }).unwrap();
    }
    // The rig compares every token with the undisturbed one.
    rig.disturbed(9, |_| {});
    assert!(rig.preemptions > 0 && rig.drafted.1 > 20, "{} {:?}", rig.preemptions, rig.drafted);
}

/// Wrong answers from a rank.
#[test]
fn more_than_was_verified_is_not_believed() {
    let output = |position: u32, token: u32| SequenceOutput {
        seq: SeqId(1),
        position,
        token: Some(token),
        logprobs: None,
        prompt_logprobs: Vec::new(),
        prompt_start: 0,
        corrupted: false,
        embedding: Vec::new(),
    };
    // For drafts 4 0 1 2 after 3: the answer, and how many tokens are believed, if it is accepted.
    type Case = (&'static [(u32, u32)], Option<usize>);
    let cases: [Case; 7] = [
        (&[(9, 4), (10, 0), (11, 1), (12, 2), (13, 3)], Some(5)),
        (&[(9, 4), (10, 7)], Some(2)),
        (&[(9, 4)], Some(1)),
        (&[(9, 7), (10, 0)], None),
        (&[(9, 4), (10, 0), (11, 1), (12, 2), (13, 3), (14, 4)], None),
        (&[(9, 4), (11, 1)], None),
        (&[], None),
    ];
    for (outputs, believed) in cases {
        let mut rig = Rig::new(config());
        rig.ready(30);
        rig.submit(repetitive(100)).unwrap();
        let (mut effects, mut plan) = (Vec::new(), Default::default());
        let scheduler: &mut Scheduler = &mut rig.scheduler;
        assert!(scheduler.plan(&mut plan, &mut effects));
        let apply = |scheduler: &mut Scheduler, step, outputs: &[(u32, u32)]| {
            let outputs = outputs.iter().map(|(position, token)| output(*position, *token));
            let (outputs, mut effects) = (outputs.collect(), Vec::new());
            let applied: Result<(), ApplyError> = scheduler.apply(
                Epoch(1),
                StepId(step),
                outputs,
                &[],
                &mut |_, _| false,
                &mut effects,
            );
            applied.unwrap();
            effects
        };
        apply(scheduler, 1, &[(8, 3)]);
        assert!(scheduler.plan(&mut plan, &mut effects));
        assert_eq!(plan.sequences[0].drafts.known(), [4, 0, 1, 2]);
        let effects = apply(scheduler, 2, outputs);
        let is_token = |effect: &&Effect| matches!(effect, Effect::Token { .. });
        let tokens = effects.iter().filter(is_token).count();
        let corrupted = Some(EngineError::Corrupted);
        let ended = effects
            .iter()
            .any(|effect| matches!(effect, Effect::Dropped { error, .. } if *error == corrupted));
        assert_eq!(ended, believed.is_none(), "{outputs:?}");
        if let Some(believed) = believed {
            assert_eq!(tokens, believed, "{outputs:?}");
            assert!(scheduler.plan(&mut plan, &mut Vec::new()));
            assert_eq!(plan.sequences[0].start, 8 + believed as u32, "{outputs:?}");
        }
    }
}

/// The tokens of a draft arrive at once and share the time since the previous token, as a client
/// would measure it.
#[test]
fn a_drafts_tokens_share_the_time_they_took() {
    let hub = Hub::new(Incarnation(1), Limits::default());
    let limits = DriverLimits {
        step_timeout: Duration::from_secs(9),
        step_floor: Duration::from_secs(9),
        unavailable_timeout: Duration::from_secs(9),
        max_queue_wait: None,
    };
    let scheduler = Scheduler::new(config()).unwrap();
    let observer = hub.observer();
    let mut driver =
        ReplicaDriver::new(Duration::ZERO, ReplicaId(0), scheduler, observer.clone(), limits);
    let request = |id, max_tokens| {
        GenerateRequest::new(
            RequestId(id),
            vec![0, 1, 2, 3, 4, 0, 1, 2],
            vec![SamplingParams::greedy()],
            max_tokens,
        )
    };
    let (events, _tokens) = mpsc::channel(64);
    // The last token of the first one's draft ends it; the second one's tokens come after it.
    driver.submit(Duration::ZERO, request(1, 6), EventSender::Local(events.clone()));
    driver.submit(Duration::ZERO, request(2, 30), EventSender::Local(events));
    driver.ready(Duration::ZERO, Epoch(1), 30, 0);
    let mut plan = StepPlan::default();
    let mut answer = |driver: &mut ReplicaDriver, now, drafts: [usize; 2]| {
        let now = Duration::from_millis(now);
        assert!(driver.next_plan(now, &mut plan));
        let drafted: Vec<usize> = plan.sequences.iter().map(|entry| entry.drafts.len()).collect();
        assert_eq!(drafted, drafts);
        // All drafts are right, and the sequences continue.
        let rows = plan.sequences.iter().flat_map(|entry| {
            let first = entry.start + entry.count - entry.drafts.len() as u32;
            (first..=entry.start + entry.count).map(|position| (entry.seq, position))
        });
        let outputs = rows.map(|(seq, position)| SequenceOutput {
            seq,
            position,
            token: Some(position % 5),
            logprobs: None,
            prompt_logprobs: Vec::new(),
            prompt_start: 0,
            corrupted: false,
            embedding: Vec::new(),
        });
        let (timings, stats) = (StepTimings::default(), WorkerStats::default());
        let (epoch, step, outputs) = (plan.epoch, plan.step, outputs.collect());
        driver.apply(
            now,
            StepResult { epoch, step, outputs, drafted: Vec::new(), digest: 0, timings, stats },
        );
    };
    answer(&mut driver, 1000, [0, 0]);
    answer(&mut driver, 1600, [4, 2]);
    let between = hub.merged().histogram_sum(INTER_TOKEN_LATENCY);
    // Five in 600 ms and three in 600 ms.
    assert_eq!((between.count(), between.sum_nanos), (8, 1_200_000_000));
    let buckets = between.buckets.iter().filter(|count| **count > 0);
    assert_eq!(buckets.copied().collect::<Vec<_>>(), [5, 3], "{between:?}");
}

/// Other requests find a block only once all of its tokens are accepted, as if there were no
/// drafts.
#[test]
fn blocks_of_drafts_are_nobody_elses() {
    let mut rig = Rig::new(config());
    rig.ready(30);
    // 13 tokens and one more: the first draft fills the first block.
    let prompt: Vec<u32> = (0..13).map(|at| at % 5).collect();
    rig.submit(ClientRequest { prompt, ..repetitive(40) }).unwrap();
    // Further requests, so that a step is planned after the draft's.
    for _ in 0..3 {
        rig.submit(plain(40)).unwrap();
    }
    assert!(rig.plan() && rig.deliver() && rig.plan());
    assert_eq!(entries(&rig)[0].drafts.len(), 4);
    // Another prompt that begins with what the draft predicts shares nothing yet.
    let alike: Vec<u32> = (0..20).map(|at| at % 5).collect();
    rig.submit(ClientRequest { prompt: alike, ..repetitive(2) }).unwrap();
    assert!(rig.plan());
    let shared = entries(&rig).iter().find(|entry| entry.seq == SeqId(5)).unwrap();
    assert_eq!((shared.start, shared.new_blocks.contains(&BlockId(0))), (0, false));
    // `cache_holds_what_it_shall` checks what every sequence reads.
    rig.drain();
}
