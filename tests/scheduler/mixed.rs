//! Prompts beside sequences that decode, which wait for all that a step computes.
use coordinator::scheduler::{Method, NgramConfig, SchedulerConfig, Speculation};

use crate::rig::{ClientRequest, Rig, sizes};
use crate::shorter::Prompts;

/// Steps of 64 tokens with so many prompt tokens beside decodes.
fn bounded(most: u32) -> Prompts {
    Prompts::new(256, |config| config.max_mixed_prefill_tokens = Some(most))
}

#[test]
fn prompts_have_a_part_of_a_step_while_someone_decodes_and_then_all_of_it() {
    let mut prompts = bounded(16);
    prompts.ask(1, 100);
    assert_eq!(prompts.step(), [(1, 64)], "nobody waits for it");
    assert_eq!(prompts.step(), [(1, 36)]);
    prompts.ask_for(9, 4, |client| client.max_tokens = 4);
    assert_eq!(prompts.step(), [(9, 4)]);
    prompts.ask(2, 100);
    for _ in 0..3 {
        assert_eq!(prompts.step(), [(2, 16), (9, 1)]);
    }
    assert_eq!(prompts.step(), [(2, 52)], "it has ended");
    assert!(prompts.finish().is_empty());
}

/// It samples nothing until all of it is there again, and nobody waits for it.
#[test]
fn who_is_computed_again_is_not_taken_for_one_that_decodes() {
    let mut prompts = bounded(16);
    prompts.ask_for(1, 10, |client| client.max_tokens = 300);
    (0..200).for_each(|_| drop(prompts.step()));
    prompts.rig.ready(256);
    for _ in 0..3 {
        assert_eq!(prompts.step(), [(1, 64)]);
    }
    prompts.finish();
}

#[test]
fn prompts_share_that_part() {
    let mut prompts = bounded(16);
    prompts.ask_for(9, 4, |client| client.max_tokens = 40);
    assert_eq!(prompts.step(), [(9, 4)]);
    prompts.ask(1, 100);
    prompts.ask(2, 13);
    prompts.ask(3, 7);
    // The long one leaves half of it to shorter ones.
    assert_eq!(prompts.step(), [(1, 8), (2, 1), (3, 7), (9, 1)]);
    assert_eq!(prompts.step(), [(1, 8), (2, 8), (9, 1)]);
    assert_eq!(prompts.step(), [(1, 12), (2, 4), (9, 1)]);
    assert_eq!(prompts.step(), [(1, 16), (9, 1)]);
    // Prompts that fit into it are computed in one step.
    let mut prompts = bounded(16);
    prompts.ask_for(9, 4, |client| client.max_tokens = 40);
    prompts.step();
    prompts.ask(1, 9);
    prompts.ask(2, 7);
    assert_eq!(prompts.step(), [(1, 9), (2, 7), (9, 1)]);
}

/// Steps that a device needs smaller than they could be have the bound by themselves.
#[test]
fn smaller_steps_have_a_bound_of_their_own() {
    for (most, tokens, expected) in
        [(None, 64, 16), (None, 32, 8), (Some(5), 64, 5), (None, 256, 100), (Some(20), 256, 20)]
    {
        let mut prompts = Prompts::new(256, |config| {
            config.max_num_batched_tokens = 256;
            config.max_mixed_prefill_tokens = most;
        });
        prompts.rig.scheduler.limit_steps(tokens);
        prompts.ask_for(9, 4, |client| client.max_tokens = 40);
        assert_eq!(prompts.step(), [(9, 4)]);
        prompts.ask(1, 100);
        assert_eq!(prompts.step(), [(1, expected), (9, 1)], "{most:?} of {tokens}");
    }
}

/// What prompts are not given, drafts can have: a sequence does not stop drafting because a long
/// prompt is under way.
#[test]
fn drafts_have_what_prompts_are_not_given() {
    let drafted = |max_mixed_prefill_tokens| {
        let mut rig = Rig::new(SchedulerConfig {
            max_model_len: 1000,
            max_num_seqs: 8,
            max_num_batched_tokens: 64,
            max_mixed_prefill_tokens,
            speculation: Some(Speculation {
                num_speculative_tokens: 4,
                method: Method::Ngram(NgramConfig { prompt_lookup_max: 3, prompt_lookup_min: 2 }),
                disable_by_batch_size: None,
            }),
            ..sizes()
        });
        rig.ready(256);
        let repetitive = ClientRequest {
            seed: 3,
            prompt: vec![0, 1, 2, 3, 4, 0, 1, 2],
            max_tokens: 400,
            ..ClientRequest::default()
        };
        rig.submit(repetitive).unwrap();
        for _ in 0..40 {
            rig.plan();
            rig.deliver();
        }
        assert!(rig.drafted.1 > 0, "it drafts");
        let prompt = (7..900).collect();
        rig.submit(ClientRequest { prompt, max_tokens: 1, ..ClientRequest::default() }).unwrap();
        let before = rig.drafted.0;
        for _ in 0..8 {
            rig.plan();
            rig.deliver();
        }
        let drafted = rig.drafted.0 - before;
        rig.drain();
        drafted
    };
    assert_eq!(drafted(None), 0);
    assert!(drafted(Some(16)) > 0);
}

#[test]
fn a_prompt_beside_decodes_must_have_something() {
    let config = SchedulerConfig { max_mixed_prefill_tokens: Some(0), ..sizes() };
    let error = config.validate().unwrap_err().to_string();
    assert!(error.contains("max_mixed_prefill_tokens is 0"), "{error}");
}
