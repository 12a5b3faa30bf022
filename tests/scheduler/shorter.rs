//! Short prompts beside long ones: which of them a step computes, and how much of each.
use std::collections::BTreeMap;

use coordinator::scheduler::SchedulerConfig;
use shared::ids::SeqId;

use crate::rig::{ClientRequest, Rig, sizes};

/// A replica, and the names of the sequences it has seen.
pub(crate) struct Prompts {
    pub(crate) rig: Rig,
    names: BTreeMap<SeqId, u32>,
    /// Per name, the tokens of its share in each step that had one.
    shares: BTreeMap<u32, Vec<u32>>,
    steps: u32,
}

impl Prompts {
    /// With steps of 64 tokens.
    pub(crate) fn new(num_blocks: u32, change: impl FnOnce(&mut SchedulerConfig)) -> Self {
        let mut config = SchedulerConfig {
            max_model_len: 2048,
            max_num_seqs: 8,
            max_num_batched_tokens: 64,
            prefix_caching: false,
            ..sizes()
        };
        change(&mut config);
        let mut rig = Rig::new(config);
        rig.ready(num_blocks);
        Self { rig, names: BTreeMap::new(), shares: BTreeMap::new(), steps: 0 }
    }

    /// Asks for one token behind a prompt of this length.
    pub(crate) fn ask(&mut self, name: u32, length: u32) {
        self.ask_for(name, length, |_| {});
    }

    pub(crate) fn ask_for(
        &mut self,
        name: u32,
        length: u32,
        change: impl FnOnce(&mut ClientRequest),
    ) {
        let prompt = std::iter::once(name).chain(1..length).collect();
        let mut client = ClientRequest { prompt, max_tokens: 1, ..ClientRequest::default() };
        change(&mut client);
        self.rig.submit(client).unwrap();
    }

    /// One step; returns who is in it, with the tokens of each, in the order of their names.
    pub(crate) fn step(&mut self) -> Vec<(u32, u32)> {
        let planned = self.rig.plan();
        if planned {
            self.steps += 1;
            let new = self.rig.plan.admitted.iter().map(|new| (new.seq, new.tokens[0]));
            self.names.extend(new);
        }
        let plan = if planned { self.rig.plan.sequences.as_slice() } else { &[] };
        let mut shares: Vec<_> =
            plan.iter().map(|entry| (self.names[&entry.seq], entry.count)).collect();
        shares.sort_unstable();
        for (name, count) in &shares {
            self.shares.entry(*name).or_default().push(*count);
        }
        self.rig.deliver();
        shares
    }

    /// Steps until nothing is left; returns the shares of each step.
    pub(crate) fn finish(&mut self) -> Vec<Vec<(u32, u32)>> {
        let steps = std::iter::from_fn(|| Some(self.step()).filter(|shares| !shares.is_empty()));
        let steps = steps.take(10_000).collect();
        self.rig.drain();
        steps
    }
}

#[test]
fn a_short_prompt_is_in_the_next_step_though_a_long_one_is_under_way() {
    let mut prompts = Prompts::new(128, |_| {});
    prompts.ask(1, 1000);
    assert_eq!(prompts.step(), [(1, 64)]);
    prompts.ask(2, 20);
    assert_eq!(prompts.step(), [(1, 44), (2, 20)]);
    // What nobody wants is the long one's again.
    assert_eq!(prompts.step(), [(1, 64)]);
    // Nor does it make a difference that the long one is not under way yet.
    let mut prompts = Prompts::new(128, |_| {});
    prompts.ask(1, 1000);
    prompts.ask(2, 20);
    assert_eq!(prompts.step(), [(1, 44), (2, 20)]);
}

#[test]
fn a_long_prompt_has_half_of_each_step_whatever_comes() {
    let mut prompts = Prompts::new(128, |_| {});
    prompts.ask(1, 1000);
    let mut next = 2;
    while prompts.shares.get(&1).is_none_or(|shares| shares.iter().sum::<u32>() < 1000) {
        for _ in 0..3 {
            prompts.ask(next, 30);
            next += 1;
        }
        let step = prompts.step();
        assert_eq!(step.iter().map(|(_, count)| count).sum::<u32>(), 64, "{step:?}");
    }
    let shares = &prompts.shares[&1];
    assert!(shares.iter().rev().skip(1).all(|count| *count >= 32), "{shares:?}");
    assert!(shares.len() <= 1000_usize.div_ceil(32), "{shares:?}");
}

/// As a naive model has it: half for the first, the rest for who has least to compute.
#[test]
fn the_shortest_goes_first_beside_a_long_one() {
    let mut prompts = Prompts::new(256, |_| {});
    prompts.ask(1, 600);
    prompts.ask(2, 90);
    prompts.ask(3, 10);
    prompts.ask(4, 40);
    assert_eq!(prompts.step(), [(1, 32), (3, 10), (4, 22)]);
    // 4 has 18 left, which is less than 2 has.
    assert_eq!(prompts.step(), [(1, 32), (2, 14), (4, 18)]);
    prompts.ask(5, 70);
    assert_eq!(prompts.step(), [(1, 32), (5, 32)]);
    let all: u32 = prompts.finish().iter().flatten().map(|(_, count)| count).sum();
    assert_eq!(all, 600 + 90 + 10 + 40 + 70 - 3 * 64);
}

#[test]
fn prompts_of_one_length_are_computed_one_after_another() {
    let mut prompts = Prompts::new(256, |_| {});
    for name in 1..=3 {
        prompts.ask(name, 160);
    }
    let steps = prompts.finish();
    // 160 is two steps and a half.
    let expected: [&[(u32, u32)]; 8] = [
        &[(1, 64)],
        &[(1, 64)],
        &[(1, 32), (2, 32)],
        &[(2, 64)],
        &[(2, 64)],
        &[(3, 64)],
        &[(3, 64)],
        &[(3, 32)],
    ];
    assert_eq!(steps, expected);
}

#[test]
fn a_prompt_that_decodes_is_not_held_up_and_others_share_what_it_leaves() {
    let mut prompts = Prompts::new(128, |_| {});
    prompts.ask_for(9, 4, |client| client.max_tokens = 40);
    assert_eq!(prompts.step(), [(9, 4)]);
    prompts.ask(1, 500);
    prompts.ask(2, 100);
    assert_eq!(prompts.step(), [(1, 32), (2, 31), (9, 1)]);
}

/// Nobody comes who would take what the long one still needs, and be preempted for it, or make it
/// wait.
#[test]
fn blocks_that_a_long_prompt_still_needs_are_not_given_away() {
    // 1000 tokens and one more take 63 blocks of the 66; each of the others takes two.
    let mut prompts = Prompts::new(66, |_| {});
    prompts.ask(1, 1000);
    assert_eq!(prompts.step(), [(1, 64)]);
    prompts.ask(2, 20);
    prompts.ask(3, 20);
    assert_eq!(prompts.step(), [(1, 44), (2, 20)]);
    let rest = prompts.finish();
    assert_eq!(prompts.rig.preemptions, 0);
    // 3 came once 2 had left its blocks.
    assert_eq!(rest[0], [(1, 44), (3, 20)]);
}

#[test]
fn nobody_passes_a_prompt_that_waits_for_blocks() {
    let mut prompts = Prompts::new(66, |_| {});
    prompts.ask(1, 900);
    assert_eq!(prompts.step(), [(1, 64)]);
    // There is no room for it beside the first, and for the third there would be.
    prompts.ask(2, 400);
    prompts.ask(3, 10);
    let steps = prompts.finish();
    let first = |name| steps.iter().position(|step| step.iter().any(|(it, _)| *it == name));
    assert!(first(2).unwrap() >= 12, "{steps:?}");
    assert!(first(3) >= first(2), "{steps:?}");
    assert_eq!(prompts.rig.preemptions, 0);
}

/// A long prompt that others pass comes as soon as it would if there were none: they leave it a
/// place in the batch, and blocks.
#[test]
fn who_passes_the_next_in_the_queue_takes_nothing_that_it_needs() {
    // With eight places, and with room for the two long ones and three others of 500 tokens.
    for blocks in [1000, 63 + 76 + 3 * 33] {
        let mut prompts = Prompts::new(blocks, |config| config.max_model_len = 1400);
        prompts.ask(1, 1000);
        prompts.ask(2, 1200);
        for name in 3..10 {
            prompts.ask_for(name, 20, |client| client.max_tokens = 400);
        }
        let steps = prompts.finish();
        let last = steps.iter().rposition(|step| step.iter().any(|(it, _)| *it == 1)).unwrap();
        let first = steps.iter().position(|step| step.iter().any(|(it, _)| *it == 2)).unwrap();
        assert!(first <= last + 1, "{first} {last}");
        assert!(steps[1].len() > 2, "some have passed it: {:?}", steps[1]);
        assert_eq!(prompts.rig.preemptions, 0);
    }
}

#[test]
fn a_prompt_under_way_has_its_part_whether_or_not_others_find_a_place() {
    let mut prompts = Prompts::new(256, |config| config.max_num_seqs = 3);
    prompts.ask(1, 600);
    prompts.ask(2, 100);
    assert_eq!(prompts.step(), [(1, 32), (2, 32)]);
    for name in [3, 5, 7] {
        prompts.ask(name, 5);
        prompts.ask(name + 1, 5);
        let step = prompts.step();
        assert!(step.iter().any(|(it, _)| *it == 2), "{step:?}");
    }
}

#[test]
fn the_urgent_have_half_of_the_step_at_once_and_the_less_urgent_nothing() {
    let mut prompts = Prompts::new(256, |_| {});
    prompts.ask(1, 600);
    assert_eq!(prompts.step(), [(1, 64)]);
    prompts.ask_for(2, 700, |client| client.priority = -1);
    prompts.ask_for(3, 10, |client| client.priority = 1);
    prompts.ask(4, 10);
    // The urgent one goes first in the next step, as the more urgent of two that run.
    assert_eq!(prompts.step(), [(1, 32), (2, 32)]);
    assert_eq!(prompts.step(), [(2, 64)]);
    let steps = prompts.finish();
    let first = |name| steps.iter().position(|step| step.iter().any(|(it, _)| *it == name));
    assert!(first(4) < first(3), "{steps:?}");
}

#[test]
fn no_more_sequences_run_than_may() {
    let mut prompts = Prompts::new(256, |config| config.max_num_seqs = 2);
    prompts.ask(1, 1000);
    for name in 2..6 {
        prompts.ask(name, 5);
    }
    for step in prompts.finish() {
        assert!(step.len() <= 2, "{step:?}");
    }
}

/// A prompt whose beginning is cached has less to compute than its length says; it comes no later.
#[test]
fn cached_prompts_come_too() {
    let mut prompts = Prompts::new(256, |config| config.prefix_caching = true);
    prompts.ask(2, 65);
    prompts.finish();
    prompts.ask(1, 1000);
    prompts.step();
    prompts.ask(2, 65);
    assert_eq!(prompts.step(), [(1, 63), (2, 1)]);
}
