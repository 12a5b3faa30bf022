//! Sequences that go to host memory and come back.
use proptest::prelude::*;

use crate::rig::{ClientRequest, Rig};
use crate::scenarios::config;
use coordinator::scheduler::SchedulerConfig;

/// A replica with `blocks` blocks, and `host` of them in host memory.
fn rig(blocks: u32, host: u32) -> Rig {
    let mut rig = Rig::new(SchedulerConfig { prefix_caching: false, ..config() });
    rig.host_blocks = host;
    rig.ready(blocks);
    rig
}

/// A prompt with different tokens for each seed, so that no block is shared.
fn prompt(len: u32, seed: u32) -> ClientRequest {
    ClientRequest {
        prompt: (0..len).map(|i| (i + 7 * seed) % 50).collect(),
        seed: seed.into(),
        ..ClientRequest::default()
    }
}

#[test]
fn out_of_blocks_what_was_computed_goes_to_host_memory_and_is_not_computed_again() {
    let mut rig = rig(5, 20);
    let ids: Vec<_> = (0..3)
        .map(|seed| rig.submit(ClientRequest { max_tokens: 40, ..prompt(14, seed) }).unwrap())
        .collect();
    rig.drain();
    assert!(rig.swaps > 0 && rig.swaps == rig.preemptions, "{} swaps", rig.swaps);
    assert_eq!(rig.totals.recomputed, 0, "nothing is lost");
    assert_eq!(rig.totals.wasted, 0, "tokens in flight count");
    assert_eq!(rig.totals.prompt, 3 * 14);
    assert_eq!(rig.moved.0, rig.moved.1, "what went there came back");
    let worker = rig.worker.as_ref().unwrap();
    assert_eq!(worker.swapped, rig.moved, "effects tell what is copied");
    for id in ids {
        assert_eq!(rig.requests[&id].1.tokens[0].len(), 40);
    }
}

#[test]
fn what_host_memory_has_no_room_for_is_computed_again() {
    let mut rig = rig(5, 1);
    for seed in 0..3 {
        rig.submit(ClientRequest { max_tokens: 40, ..prompt(14, seed) }).unwrap();
    }
    rig.drain();
    assert!(rig.preemptions > rig.swaps && rig.totals.recomputed > 0);
}

/// Plans and answers until a sequence is in host memory.
fn until_swapped(rig: &mut Rig) {
    for _ in 0..100 {
        if rig.scheduler.gauges().swapped > 0 {
            return;
        }
        rig.plan();
        rig.deliver();
    }
    panic!("nobody is swapped: {:?}", rig.scheduler.gauges());
}

/// The tokens that a request finds in the KV cache.
fn found(rig: &mut Rig, client: ClientRequest) -> u32 {
    let before = rig.totals.found;
    rig.submit(client).unwrap();
    rig.drain();
    rig.totals.found - before
}

#[test]
fn nothing_computed_before_a_reset_is_found_after_it() {
    let block = config().block_size;
    // One in host memory: it comes back with its old blocks.
    let mut rig = Rig::new(config());
    rig.host_blocks = 20;
    rig.ready(5);
    for seed in 0..2 {
        rig.submit(ClientRequest { max_tokens: 40, ..prompt(30, seed) }).unwrap();
    }
    until_swapped(&mut rig);
    rig.scheduler.forget_prefixes();
    rig.drain();
    assert!(rig.swaps > 0);
    for seed in 0..2 {
        assert_eq!(found(&mut rig, prompt(30, seed)), 0);
        assert!(found(&mut rig, prompt(30, seed)) >= block, "it was computed again");
    }
    // One in the middle of its prompt: of the rest, too, others find nothing.
    let mut rig = Rig::new(config());
    rig.ready(64);
    rig.submit(prompt(70, 1)).unwrap();
    rig.plan();
    rig.deliver();
    rig.scheduler.forget_prefixes();
    rig.drain();
    assert_eq!(found(&mut rig, prompt(70, 1)), 0);
    assert!(found(&mut rig, prompt(70, 1)) >= 64 / block * block, "it was computed again");
}

#[test]
fn the_swapped_one_is_back_before_anything_that_waits() {
    let mut rig = rig(5, 20);
    for seed in 0..2 {
        rig.submit(ClientRequest { max_tokens: 40, ..prompt(30, seed) }).unwrap();
    }
    until_swapped(&mut rig);
    let late = rig.submit(ClientRequest { max_tokens: 1, ..prompt(3, 9) }).unwrap();
    let gauges = rig.scheduler.gauges();
    assert_eq!((gauges.running, gauges.waiting, gauges.swapped), (1, 1, 1));
    while rig.scheduler.gauges().swapped > 0 {
        assert!(rig.requests[&late].1.tokens[0].is_empty(), "it would fit, and does not pass");
        rig.plan();
        rig.deliver();
    }
    rig.drain();
}

#[test]
fn who_ends_while_swapped_frees_host_memory_at_once() {
    let mut rig = rig(5, 20);
    let ids: Vec<_> = (0..2)
        .map(|seed| rig.submit(ClientRequest { max_tokens: 40, ..prompt(30, seed) }).unwrap())
        .collect();
    until_swapped(&mut rig);
    assert!(rig.scheduler.gauges().host_used > 0);
    rig.cancel(ids[1]);
    let gauges = rig.scheduler.gauges();
    assert_eq!((gauges.swapped, gauges.host_used, gauges.in_flight), (0, 0, 1));
    rig.drain();
}

#[test]
fn with_its_epoch_host_memory_is_gone_and_everybody_waits() {
    let mut rig = rig(5, 20);
    for seed in 0..2 {
        rig.submit(ClientRequest { max_tokens: 40, ..prompt(30, seed) }).unwrap();
    }
    until_swapped(&mut rig);
    rig.lost();
    let gauges = rig.scheduler.gauges();
    assert_eq!((gauges.waiting, gauges.swapped, gauges.host_used, gauges.host_total), (2, 0, 0, 0));
    rig.ready(5);
    assert_eq!(rig.scheduler.gauges().host_total, 20);
    rig.drain();
    assert!(rig.totals.recomputed > 0);
}

#[test]
fn a_token_in_flight_may_end_the_one_that_left() {
    // Its last token is in transit when its block is needed: 30 + 18 tokens fill three blocks.
    for max_tokens in 1..24 {
        let mut rig = rig(5, 20);
        rig.submit(ClientRequest { max_tokens: 40, ..prompt(30, 0) }).unwrap();
        rig.submit(ClientRequest { max_tokens, ..prompt(30, 1) }).unwrap();
        // One step ahead: answers come a step later.
        rig.plan();
        while rig.plan() || rig.deliver() {
            rig.deliver();
        }
        rig.drain();
        assert_eq!(rig.totals.wasted, 0, "{max_tokens}");
    }
}

#[test]
fn what_the_cache_has_still_is_not_copied_back() {
    let mut rig = Rig::new(config());
    rig.host_blocks = 20;
    rig.ready(6);
    // The first two blocks are equal: the second request shares those of the first.
    for seed in 0..2 {
        let client = ClientRequest { max_tokens: 30, seed, ..prompt(36, 0) };
        rig.submit(client).unwrap();
    }
    rig.drain();
    assert!(rig.swaps > 0);
    let (out, back) = rig.moved;
    assert!(back < out, "{back} of {out} blocks came back");
    assert_eq!(rig.totals.recomputed, 0);
}

#[test]
fn choices_of_one_request_are_told_apart() {
    let mut rig = rig(6, 20);
    let id = rig.submit(ClientRequest { n: 3, max_tokens: 40, ..prompt(20, 3) }).unwrap();
    rig.drain();
    assert!(rig.swaps > 0);
    assert!(rig.requests[&id].1.tokens.iter().all(|tokens| tokens.len() == 40));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Loads beyond what the cache holds, with every size of host memory. All end, within the bound
    /// on steps in `drain`, with the tokens that the rig knows to be right.
    #[test]
    fn everybody_gets_on_whatever_the_sizes(
        blocks in 7u32..14,
        host in 0u32..40,
        steps in 1u32..3,
        seqs in 1u32..6,
        clients in prop::collection::vec((1u32..60, 1u32..40, 1u32..3, -1i32..2), 1..12),
    ) {
        let sizes = SchedulerConfig {
            max_model_len: 100,
            max_num_seqs: seqs,
            max_steps_in_flight: steps,
            max_queued_requests: 100,
            ..config()
        };
        let mut rig = Rig::new(sizes);
        rig.host_blocks = host;
        rig.ready(blocks);
        for (at, (len, max_tokens, n, priority)) in clients.into_iter().enumerate() {
            let client = ClientRequest { max_tokens, n, priority, ..prompt(len, at as u32) };
            rig.submit(client).unwrap();
            rig.plan();
        }
        rig.drain();
        prop_assert_eq!(rig.worker.as_ref().unwrap().swapped, rig.moved);
    }
}
