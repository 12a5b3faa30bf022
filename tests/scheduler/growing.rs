//! Blocks that sequences which decode will need while a long prompt beside them is computed. A
//! prompt admitted without regard to these is preempted near its end, and computed again.
use coordinator::scheduler::SchedulerConfig;

use crate::rig::{ClientRequest, Rig, sizes};

/// Sequences that decode.
const DECODES: u32 = 8;
/// What each of them has when the long prompt comes: tokens of its prompt, and of its output.
const BEGAN: (u32, u32) = (6, 10);
/// Tokens of the long prompt, and how many of them a step computes beside those that decode.
const LONG: u32 = 500;
const EACH: u32 = 10;

/// Requests that have begun, each for up to `max` tokens.
fn decoding(config: SchedulerConfig, blocks: u32, (prompt, output): (u32, u32), max: u32) -> Rig {
    let mut rig = Rig::new(SchedulerConfig { max_num_seqs: 16, prefix_caching: false, ..config });
    rig.ready(blocks);
    for _ in 0..DECODES {
        let prompt = (0..prompt).collect();
        rig.submit(ClientRequest { prompt, max_tokens: max, ..ClientRequest::default() }).unwrap();
    }
    for _ in 0..output {
        assert!(rig.plan() && rig.deliver());
    }
    assert_eq!(rig.totals.generated, DECODES * output);
    rig
}

/// Steps of 64 tokens; a prompt takes many of them while others decode.
fn small() -> SchedulerConfig {
    let max_mixed_prefill_tokens = Some(EACH);
    SchedulerConfig { max_num_batched_tokens: 64, max_mixed_prefill_tokens, ..sizes() }
}

/// Asks for one token behind a prompt of this length; returns whether it is in the next step.
fn comes_at_once(rig: &mut Rig, length: u32, priority: i32) -> bool {
    let prompt = (0..length).map(|at| at % 50).collect();
    let client = ClientRequest { prompt, priority, max_tokens: 1, ..ClientRequest::default() };
    rig.submit(client).unwrap();
    assert!(rig.plan());
    !rig.plan.admitted.is_empty()
}

/// Blocks of all that decode, once each has `tokens` tokens, and of the long prompt with its
/// output.
fn blocks_of_all(tokens: u32) -> u32 {
    DECODES * tokens.div_ceil(16) + (LONG + 1).div_ceil(16)
}

#[test]
fn a_long_prompt_comes_as_soon_as_all_have_room_until_its_end_and_is_computed_once() {
    let enough = blocks_of_all(BEGAN.0 + BEGAN.1 + LONG / EACH);
    assert_eq!(enough, 72);
    // From as many as suffice for those that decode.
    for blocks in [48, 56, 64, enough - 1, enough, enough + 8] {
        let mut rig = decoding(small(), blocks, BEGAN, 90);
        let at_once = comes_at_once(&mut rig, LONG, 0);
        assert_eq!(at_once, blocks >= enough, "{blocks} blocks");
        rig.drain();
        assert_eq!((rig.preemptions, rig.totals.recomputed), (0, 0), "{blocks} blocks");
        assert_eq!(rig.totals.prompt, DECODES * BEGAN.0 + LONG);
    }
}

/// With the sizes that CPUs have: a block for each that decodes would be too few.
#[test]
fn a_document_that_takes_18_steps_is_computed_once() {
    let config = SchedulerConfig {
        max_model_len: 4096,
        max_num_batched_tokens: 512,
        max_mixed_prefill_tokens: Some(128),
        ..sizes()
    };
    for (blocks, expected) in [(168, false), (175, false), (176, true)] {
        let mut rig = decoding(config, blocks, (16, 15), 100);
        assert_eq!(comes_at_once(&mut rig, 2300, 0), expected, "{blocks} blocks");
        rig.drain();
        assert_eq!((rig.preemptions, rig.totals.recomputed), (0, 0), "{blocks} blocks");
    }
}

#[test]
fn who_soon_ends_keeps_no_more_than_it_will_need() {
    let max = BEGAN.1 + 2;
    let enough = blocks_of_all(BEGAN.0 + max);
    for blocks in [enough - 1, enough] {
        let mut rig = decoding(small(), blocks, BEGAN, max);
        assert_eq!(comes_at_once(&mut rig, LONG, 0), blocks == enough);
        rig.drain();
        assert_eq!((rig.preemptions, rig.totals.recomputed), (0, 0));
    }
}

/// They make room for it.
#[test]
fn an_urgent_prompt_does_not_wait_for_what_others_may_need_later() {
    // Each has one block, will soon need a second, and a fifth before the prompt is computed.
    let mut rig = decoding(small(), blocks_of_all(48), BEGAN, 90);
    assert!(comes_at_once(&mut rig, LONG, -1));
    rig.drain();
    assert!(rig.preemptions > 0);
    assert!(rig.totals.recomputed < LONG, "{} recomputed", rig.totals.recomputed);
}

/// What a replica tells others is free.
#[test]
fn a_prompt_for_which_enough_is_free_is_in_the_next_step() {
    for blocks in [56, 64, 80] {
        for (times, expected) in [(1, true), (2, false)] {
            let mut rig = decoding(small(), blocks, BEGAN, 90);
            let free = u32::try_from(rig.scheduler.free_to_admit()).unwrap();
            assert!(free > 0);
            // With its output it fills them.
            let at_once = comes_at_once(&mut rig, times * free * 16 - 1, 0);
            assert_eq!(at_once, expected, "{times} times {free} of {blocks}");
            rig.drain();
        }
    }
}

/// However much the others may come to need, it comes when they have ended.
#[test]
fn a_prompt_that_needs_all_blocks_comes_though_others_asked_later() {
    let mut rig = decoding(small(), 48, BEGAN, 90);
    assert!(!comes_at_once(&mut rig, 48 * 16 - 1, 0));
    for seed in 0..20 {
        let prompt = vec![seed; 20];
        rig.submit(ClientRequest { prompt, max_tokens: 20, ..ClientRequest::default() }).unwrap();
    }
    while rig.plan.admitted.is_empty() {
        assert!(rig.plan() || rig.deliver());
    }
    assert_eq!(rig.plan.admitted[0].num_prompt, 48 * 16 - 1);
    rig.drain();
    assert_eq!((rig.preemptions, rig.totals.recomputed), (0, 0));
}
