//! Prefix caching by models with linear attention: a sequence begins with a prefix whose state was
//! kept. The worker checks what each kept state has seen.
use coordinator::scheduler::SchedulerConfig;
use proptest::prelude::*;
use shared::ids::{RequestId, SeqId};
use shared::sampling::Pooling;

use crate::guided::Guidance;
use crate::rig::{ClientRequest, Rig, sizes};

/// Room for so many kept states.
fn config(prefix_states: u32) -> SchedulerConfig {
    SchedulerConfig { max_num_batched_tokens: 512, prefix_states: Some(prefix_states), ..sizes() }
}

fn rig(prefix_states: u32) -> Rig {
    rig_ahead(prefix_states, 2)
}

fn rig_ahead(prefix_states: u32, max_steps_in_flight: u32) -> Rig {
    let mut rig = Rig::new(SchedulerConfig { max_steps_in_flight, ..config(prefix_states) });
    rig.ready(400);
    rig
}

/// Tokens that no other text has, unless it has the same name.
fn text(name: u32, length: u32) -> impl Iterator<Item = u32> {
    (0..length).map(move |at| 7 * at + 100_000 * name)
}

/// Runs a request alone; returns how much of its prompt was found, and its output.
fn run(rig: &mut Rig, prompt: Vec<u32>, max_tokens: u32) -> (u32, Vec<u32>) {
    let before = rig.totals.found;
    let id = rig.submit(ClientRequest { prompt, max_tokens, ..Default::default() }).unwrap();
    rig.drain();
    (rig.totals.found - before, rig.requests[&id].1.tokens[0].clone())
}

#[test]
fn a_conversation_goes_on_with_the_last_state_before_its_new_turn() {
    // Whether or not the token behind which a state is kept is known when that is planned.
    for steps in 1..4 {
        goes_on(rig_ahead(8, steps));
    }
}

fn goes_on(mut rig: Rig) {
    let mut prompt: Vec<u32> = text(1, 200).collect();
    let (found, output) = run(&mut rig, prompt.clone(), 100);
    assert_eq!((found, output.len()), (0, 100));
    // The same again: all but the last 8 tokens of the prompt, whatever was answered.
    assert_eq!(run(&mut rig, prompt.clone(), 1).0, 192);
    // With the answer: the last state while it was given, behind 256 tokens.
    prompt.extend(output);
    prompt.extend(text(2, 30));
    assert_eq!(run(&mut rig, prompt.clone(), 1).0, 256);
    // Without the reasoning that came first, say: the last one that the prompt left.
    let mut other: Vec<u32> = text(1, 200).collect();
    other.extend(text(3, 90));
    assert_eq!(run(&mut rig, other, 1).0, 192);
    // And the whole second turn: 330 tokens.
    prompt.extend(text(4, 1));
    assert_eq!(run(&mut rig, prompt, 1).0, 320);
}

#[test]
fn what_two_prompts_have_in_common_is_kept_for_the_third() {
    let mut rig = rig(8);
    let prompt = |name| text(1, 150).chain(text(name, 90)).collect::<Vec<u32>>();
    // 144 tokens in whole blocks are the same; the first prompt's state is that behind 224.
    let found: Vec<u32> = (2..6).map(|name| run(&mut rig, prompt(name), 3).0).collect();
    assert_eq!(found, [0, 0, 144, 144]);
    // Each prompt's own state was kept besides.
    assert_eq!(run(&mut rig, prompt(3), 3).0, 224);
}

#[test]
fn a_prompt_that_is_computed_soon_takes_no_step_more() {
    let mut rig = rig(8);
    // The state behind 64 tokens is worth a step; that behind 48 is not.
    for (length, steps) in [(80, 2), (79, 2), (68, 2), (67, 1), (20, 1)] {
        let before = rig.scheduler.last_step().0;
        run(&mut rig, text(length, length).collect(), 1);
        assert_eq!(rig.scheduler.last_step().0 - before, steps, "{length} tokens");
    }
    // Nor does any without room for states.
    for none in [Some(0), None] {
        let mut rig = Rig::new(SchedulerConfig { prefix_states: none, ..config(0) });
        rig.ready(400);
        let prompt: Vec<u32> = text(1, 300).collect();
        assert_eq!(run(&mut rig, prompt.clone(), 1).0, 0);
        assert_eq!(rig.scheduler.last_step().0, 1);
        assert_eq!(run(&mut rig, prompt, 1).0, if none.is_none() { 288 } else { 0 });
    }
}

#[test]
fn the_states_that_were_not_used_for_longest_make_room() {
    let mut rig = rig(2);
    let prompt = |name| text(name, 100).collect::<Vec<u32>>();
    assert_eq!([1, 2, 1, 3].map(|name| run(&mut rig, prompt(name), 1).0), [0, 0, 96, 0]);
    assert_eq!([1, 2, 3].map(|name| run(&mut rig, prompt(name), 1).0), [96, 0, 0]);
}

#[test]
fn a_long_answer_takes_one_place() {
    let mut rig = rig(3);
    let (own, other) = (text(1, 100).collect::<Vec<u32>>(), text(2, 100).collect::<Vec<u32>>());
    run(&mut rig, other.clone(), 1);
    let (_, output) = run(&mut rig, own.clone(), 700);
    assert_eq!(run(&mut rig, other, 1).0, 96);
    assert_eq!(run(&mut rig, own.clone(), 1).0, 96);
    let whole: Vec<u32> = own.into_iter().chain(output).collect();
    assert_eq!(run(&mut rig, whole, 1).0, 768);
}

#[test]
fn choices_of_a_request_wait_for_the_state_that_the_first_leaves() {
    let mut rig = rig(8);
    let prompt: Vec<u32> = text(1, 100).collect();
    let ask = ClientRequest { prompt, n: 3, max_tokens: 3, ..Default::default() };
    rig.submit(ask.clone()).unwrap();
    rig.drain();
    assert_eq!(rig.totals.found, 2 * 96);
    rig.submit(ask).unwrap();
    rig.drain();
    assert_eq!(rig.totals.found, (2 + 3) * 96);
    // Not for one that is not worth a step: behind 48 tokens of 60.
    let short = text(2, 60).collect();
    rig.submit(ClientRequest { prompt: short, n: 3, max_tokens: 3, ..Default::default() }).unwrap();
    rig.drain();
    assert_eq!(rig.totals.found, (2 + 3) * 96);
}

/// Nobody else waits for that: not those behind, and not beside a prompt longer than a step.
#[test]
fn others_pass_who_waits_for_a_state() {
    for long in [0, 900] {
        let mut rig = Rig::new(SchedulerConfig { max_num_seqs: 16, ..config(30) });
        rig.ready(400);
        let mut ask = |prompt: Vec<u32>, n| {
            rig.submit(ClientRequest { prompt, n, max_tokens: 1, ..Default::default() }).unwrap()
        };
        if long > 0 {
            ask(text(1, long).collect(), 1);
        }
        for name in 2..5 {
            ask(text(name, 70).collect(), 2);
        }
        let last = ask(text(9, 75).collect(), 1);
        let before = rig.scheduler.last_step().0;
        while rig.requests[&last].1.tokens[0].is_empty() {
            while rig.plan() {}
            rig.deliver();
        }
        let steps = rig.scheduler.last_step().0 - before;
        // Planned ahead, too.
        assert!(steps <= 3, "{steps} steps beside {long} tokens");
        rig.drain();
        assert_eq!(rig.totals.found, 3 * 64);
    }
}

#[test]
fn requests_that_come_together_compute_what_they_have_in_common_twice() {
    let mut rig = rig(8);
    let steps = rig.scheduler.last_step().0;
    // The first knows of no other; the second leaves the state that the others wait a step for.
    for name in 2..8 {
        let prompt = text(1, 150).chain(text(name, 40)).collect();
        rig.submit(ClientRequest { prompt, max_tokens: 1, ..Default::default() }).unwrap();
    }
    rig.drain();
    assert_eq!(rig.totals.found, 4 * 144);
    // In the third, all are computed to their ends.
    assert!(rig.scheduler.last_step().0 - steps <= 4, "{} steps", rig.scheduler.last_step().0);
}

/// A template for a model that reasons ends a prompt with a mark that the next one does not have.
#[test]
fn a_turn_need_not_begin_as_the_last_prompt_ended() {
    for length in 192..208 {
        let mut rig = rig(8);
        let turn: Vec<u32> = text(1, length).collect();
        let asked = turn.iter().copied().chain(text(2, 2)).collect();
        assert_eq!(run(&mut rig, asked, 30).0, 0);
        let next = turn.into_iter().chain(text(3, 60)).collect();
        let found = run(&mut rig, next, 1).0;
        assert!((176..=length).contains(&found), "{found} of {length}");
    }
}

#[test]
fn many_of_a_kind_take_one_place() {
    let mut rig = rig(3);
    let prompt = |name| text(name, 100).collect::<Vec<u32>>();
    assert_eq!([1, 2].map(|name| run(&mut rig, prompt(name), 1).0), [0, 0]);
    let ask = ClientRequest { prompt: prompt(3), n: 8, max_tokens: 3, ..Default::default() };
    rig.submit(ask).unwrap();
    rig.drain();
    assert_eq!([1, 2, 3].map(|name| run(&mut rig, prompt(name), 1).0), [96; 3]);
}

#[test]
fn answers_under_way_take_half_of_the_places() {
    let mut rig = rig(4);
    let prompt = |name| text(name, 100).collect::<Vec<u32>>();
    assert_eq!([1, 2].map(|name| run(&mut rig, prompt(name), 1).0), [0, 0]);
    // Prompts too short to leave a state.
    for name in 3..7 {
        let prompt = text(name, 20).collect();
        let seed = u64::from(name);
        rig.submit(ClientRequest { prompt, max_tokens: 400, seed, ..Default::default() }).unwrap();
    }
    rig.drain();
    assert_eq!([1, 2].map(|name| run(&mut rig, prompt(name), 1).0), [96; 2]);
    // Two of the answers have left one.
    let texts = rig.requests.values().filter(|(client, _)| client.max_tokens == 400);
    let texts = texts.map(|(client, got)| [&client.prompt[..], &got.tokens[0]].concat());
    let texts: Vec<Vec<u32>> = texts.collect();
    let found: Vec<u32> = texts.into_iter().map(|text| run(&mut rig, text, 1).0).collect();
    assert_eq!(found.iter().filter(|found| **found == 384).count(), 2, "{found:?}");
}

#[test]
fn what_is_computed_as_a_whole_each_time_leaves_nothing() {
    let mut rig = rig(2);
    let prompt = |name| text(name, 100).collect::<Vec<u32>>();
    assert_eq!(run(&mut rig, prompt(1), 1).0, 0);
    let plain = ClientRequest { prompt: prompt(2), max_tokens: 1, ..Default::default() };
    for (name, pooling) in [(3, Pooling::Mean), (4, Pooling::Last)] {
        let (prompt, pooling) = (prompt(name), Some(pooling));
        let ask = ClientRequest { prompt, pooling, max_tokens: 0, ..plain.clone() };
        let steps = rig.scheduler.last_step().0;
        rig.submit(ask).unwrap();
        rig.drain();
        assert_eq!(rig.scheduler.last_step().0, steps + 1, "{name}");
    }
    let steps = rig.scheduler.last_step().0;
    rig.submit(ClientRequest { prompt_logprobs: Some(0), ..plain }).unwrap();
    rig.drain();
    assert_eq!(rig.scheduler.last_step().0, steps + 1);
    assert_eq!(run(&mut rig, prompt(1), 1).0, 96);
}

/// What a corrupted sequence has left is behind blocks that another one had computed, too.
#[test]
fn states_of_corrupted_sequences_are_not_found() {
    let mut rig = rig(8);
    let begins = |name, length| text(1, 100).chain(text(name, length)).collect::<Vec<u32>>();
    // The first one's blocks are found while it runs, and no state of what others have in common.
    let long = ClientRequest { prompt: begins(2, 50), max_tokens: 300, ..Default::default() };
    rig.submit(long).unwrap();
    for _ in 0..5 {
        rig.plan();
        rig.deliver();
    }
    // The second leaves the state behind 96 tokens before its first output.
    let corrupted = ClientRequest { prompt: begins(3, 5), max_tokens: 9, ..Default::default() };
    rig.submit(corrupted).unwrap();
    let mut is_over = false;
    while !is_over {
        rig.plan();
        rig.tamper(|outputs| {
            let own = outputs.iter_mut().find(|output| output.seq == SeqId(2));
            is_over = own.map(|output| output.corrupted = true).is_some();
        });
        rig.deliver();
    }
    assert!(rig.scheduler.gauges().running > 0, "the first one runs");
    assert_eq!([4, 5].map(|name| run(&mut rig, begins(name, 5), 1).0), [0, 96]);
    // It may be the state that it began with.
    let again = ClientRequest { prompt: begins(6, 5), max_tokens: 9, ..Default::default() };
    rig.submit(again).unwrap();
    rig.plan();
    rig.tamper(|outputs| outputs[0].corrupted = true);
    rig.drain();
    assert_eq!(run(&mut rig, begins(7, 5), 1).0, 0);
}

#[test]
fn a_state_is_lost_with_its_blocks_and_with_its_replica() {
    let mut rig = Rig::new(config(8));
    rig.ready(20);
    let prompt = |name| text(name, 150).collect::<Vec<u32>>();
    assert_eq!([1, 1].map(|name| run(&mut rig, prompt(name), 1).0), [0, 144]);
    // These take most of the blocks, the end of the first one's among them.
    assert_eq!([2, 3, 1].map(|name| run(&mut rig, prompt(name), 1).0), [0, 0, 0]);
    assert_eq!(run(&mut rig, prompt(1), 1).0, 144);
    rig.lost();
    rig.ready(20);
    assert_eq!([1, 1].map(|name| run(&mut rig, prompt(name), 1).0), [0, 144]);
    rig.scheduler.forget_prefixes();
    assert_eq!([1, 1].map(|name| run(&mut rig, prompt(name), 1).0), [0, 144]);
    // What is under way then leaves nothing, and holds no place.
    let mut rig = rig_ahead(2, 2);
    for steps in 0..70 {
        let ask = ClientRequest { prompt: prompt(2), max_tokens: 80, ..Default::default() };
        rig.submit(ask).unwrap();
        for _ in 0..steps {
            rig.plan();
            rig.deliver();
        }
        rig.scheduler.forget_prefixes();
        rig.drain();
        assert_eq!(run(&mut rig, prompt(2), 1).0, if steps == 0 { 144 } else { 0 }, "{steps}");
        rig.scheduler.forget_prefixes();
    }
}

#[derive(Clone, Debug)]
enum Event {
    Submit(ClientRequest),
    Plan,
    Deliver,
    Cancel(u64),
    Lost,
    Forget,
    Corrupt,
}

/// Prompts that begin alike, and may go on alike; some need all of their tokens to be computed.
fn request() -> impl Strategy<Value = ClientRequest> {
    let parts = prop::collection::vec((1u32..4, prop_oneof![Just(40u32), 1u32..90]), 1..5);
    let kind = (0u32..12, prop_oneof![3 => Just(0), 1 => -1i32..2]);
    (parts, 1u32..3, 0u32..150, any::<u64>(), kind).prop_map(
        |(parts, n, max_tokens, seed, (kind, priority))| {
            let prompt = parts.into_iter().flat_map(|(name, length)| text(name, length)).collect();
            // The same seed answers the same.
            let seed = seed % 4;
            let plain =
                ClientRequest { prompt, n, max_tokens, seed, priority, ..Default::default() };
            let pools = |pooling| ClientRequest { pooling, n: 1, max_tokens: 0, ..plain.clone() };
            match kind {
                0 => pools(Some(Pooling::Last)),
                1 => pools(Some(Pooling::Mean)),
                2 if plain.prompt.len() > 1 => ClientRequest { prompt_logprobs: Some(0), ..plain },
                3 => ClientRequest { guide: Some(Guidance::default()), ..plain },
                _ => plain,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_sequence_begins_with_its_own_state(
        (states, block_size, seqs, budget, steps) in
            (0u32..12, prop_oneof![Just(16u32), 1u32..90], 1u32..6, 0u32..300, 1u32..4),
        blocks in 1u32..4,
        events in prop::collection::vec(
            prop_oneof![
                4 => request().prop_map(Event::Submit),
                20 => Just(Event::Plan),
                18 => Just(Event::Deliver),
                1 => (0u64..40).prop_map(Event::Cancel),
                1 => Just(Event::Lost),
                1 => Just(Event::Forget),
                1 => Just(Event::Corrupt),
            ],
            1..200,
        ),
    ) {
        let mut rig = Rig::new(SchedulerConfig {
            block_size,
            max_num_seqs: seqs,
            max_num_batched_tokens: seqs + budget,
            max_steps_in_flight: steps,
            ..config(states)
        });
        // Room for one sequence of maximum length, or for some.
        let blocks = (blocks * rig.config.max_model_len).div_ceil(block_size);
        rig.ready(blocks);
        for event in events {
            match event {
                Event::Submit(client) => {
                    rig.submit(client).unwrap();
                }
                Event::Plan => {
                    rig.plan();
                }
                Event::Deliver => {
                    rig.deliver();
                }
                Event::Cancel(id) => rig.cancel(RequestId(id)),
                Event::Corrupt if rig.scheduler.gauges().steps_in_flight > 0 => {
                    rig.tamper(|outputs| {
                        outputs.iter_mut().take(1).for_each(|it| it.corrupted = true);
                    });
                }
                Event::Corrupt => {}
                Event::Forget => rig.scheduler.forget_prefixes(),
                Event::Lost => {
                    rig.lost();
                    rig.ready(blocks);
                }
            }
        }
        rig.drain();
    }
}
