//! Plans that do not fit the worker's state are rejected with one sentence before the device sees
//! them; plans exactly at the bounds run.
use kernels::ReferenceBackend;
use kernels::collective::single_rank;
use shared::ids::{BlockId, SeqId, StateId, StepId};
use shared::protocol::{
    Drafts, EngineConfig, KeptState, KvCacheDtype, NewSequence, SequenceStep, StepPlan, TokenMask,
};
use shared::sampling::{Pooling, SamplingParams};
use testkit::models::variant;
use worker::engine::Engine;
use worker::rank::{EmptyStepSource, StepSource};

use crate::rig::{Given, engine_of};

const NUM_BLOCKS: u32 = 8;
const TOKENS: [u32; 5] = [1, 2, 3, 4, 5];

fn unstarted() -> Engine<ReferenceBackend> {
    of("llama-gqa", 0)
}

fn of(model: &str, prefix_states: u32) -> Engine<ReferenceBackend> {
    let sizes = EngineConfig {
        block_size: 4,
        max_model_len: 12,
        max_num_seqs: 2,
        max_num_batched_tokens: 14,
        kv_cache_bytes: 1 << 20,
        swap_bytes: 0,
        kv_cache_dtype: KvCacheDtype::Auto,
        prefix_states,
    };
    let backend = ReferenceBackend::new(single_rank());
    engine_of(&variant(model), 0, 1, backend, sizes).unwrap()
}

/// An engine that has run `seq-1`: five prompt tokens and one sampled, in blocks 0 and 1.
fn engine() -> Engine<ReferenceBackend> {
    let mut engine = unstarted();
    engine.start(NUM_BLOCKS, 0).unwrap();
    let plan = StepPlan {
        admitted: vec![new(1, &TOKENS, 5)],
        sequences: vec![run(1, 0, 5, &[0, 1])],
        ..plan(1)
    };
    step(&mut engine, &plan).unwrap();
    engine
}

fn plan(step: u64) -> StepPlan {
    StepPlan { step: StepId(step), ..StepPlan::default() }
}

fn new(seq: u64, tokens: &[u32], num_prompt: u32) -> NewSequence {
    let sampling = SamplingParams { logprobs: Some(3), ..SamplingParams::greedy() };
    NewSequence { seq: SeqId(seq), tokens: tokens.to_vec(), num_prompt, adapter: 0, sampling }
}

fn run(seq: u64, start: u32, count: u32, blocks: &[u32]) -> SequenceStep {
    let new_blocks = blocks.iter().copied().map(BlockId).collect();
    SequenceStep {
        seq: SeqId(seq),
        start,
        count,
        new_blocks,
        sample: true,
        masked: false,
        drafts: Drafts::none(),
    }
}

fn step(engine: &mut Engine<ReferenceBackend>, plan: &StepPlan) -> Result<Vec<u32>, String> {
    let mut outputs = Vec::new();
    engine.step(plan, &mut EmptyStepSource, &mut outputs).map_err(|error| error.to_string())?;
    Ok(outputs.iter().filter_map(|output| output.token).collect())
}

#[test]
fn plans_that_do_not_fit() {
    let chunk = |seq, start, count, blocks: &[u32]| SequenceStep {
        sample: false,
        ..run(seq, start, count, blocks)
    };
    let drafts = |drafts: &[u32]| SequenceStep {
        drafts: Drafts::Known(drafts.to_vec()),
        ..run(1, 5, 1 + drafts.len() as u32, &[2])
    };
    let pooled = |pooling| {
        let NewSequence { sampling, .. } = new(2, &TOKENS, 5);
        let sampling = SamplingParams { pooling: Some(pooling), ..sampling };
        vec![NewSequence { sampling, ..new(2, &TOKENS, 5) }]
    };
    let cases = [
        (
            pooled(Pooling::Last),
            vec![run(2, 0, 5, &[2, 3])],
            "seq-2 is to have an embedding, not a token",
        ),
        (
            pooled(Pooling::Mean),
            vec![chunk(2, 4, 1, &[2, 3])],
            "seq-2 needs all its tokens, but is to be computed from 4",
        ),
        (vec![], vec![run(7, 0, 1, &[2])], "seq-7 is not known"),
        (vec![new(1, &[1], 1)], vec![], "seq-1 is admitted twice"),
        (vec![], vec![chunk(1, 5, 1, &[]); 2], "seq-1 occurs twice"),
        (vec![], vec![run(1, 5, 1, &[8])], "seq-1 is given block-8 of 8"),
        (vec![], vec![run(1, 5, 0, &[])], "seq-1 is to be computed beyond its 6 tokens"),
        (vec![], vec![run(1, 5, 2, &[])], "seq-1 is to be computed beyond its 6 tokens"),
        (vec![], vec![run(1, 5, u32::MAX, &[])], "seq-1 is to be computed beyond its 6 tokens"),
        (
            vec![],
            vec![run(1, 6, 1, &[])],
            "seq-1 is to be computed from 6, but its cache ends at 5",
        ),
        (
            vec![new(2, &TOKENS, 5)],
            vec![run(2, 0, 4, &[2])],
            "seq-2 is to be sampled at 4, but has 5 tokens",
        ),
        (
            vec![new(2, &TOKENS, 5)],
            vec![run(2, 0, 5, &[2])],
            "seq-2 has 1 blocks, too few for 5 tokens",
        ),
        (vec![new(2, &[], 0)], vec![], "seq-2 has 0 tokens, the limit is 12"),
        (vec![new(2, &[1; 13], 1)], vec![], "seq-2 has 13 tokens, the limit is 12"),
        (vec![new(2, &[1], 2)], vec![], "seq-2 has fewer tokens than its prompt"),
        (vec![new(2, &[384], 1)], vec![run(2, 0, 1, &[2])], "seq-2 has token 384 of 384"),
        (
            vec![new(2, &[1], 1), new(3, &[1], 1)],
            vec![run(1, 5, 1, &[]), run(2, 0, 1, &[2]), run(3, 0, 1, &[3])],
            "3 sequences, the limit is 2",
        ),
        (
            vec![new(2, &[1; 8], 1), new(3, &[1; 8], 1)],
            vec![run(2, 0, 8, &[2, 3]), run(3, 0, 8, &[4, 5])],
            "16 tokens, the limit is 14",
        ),
        (
            vec![],
            vec![SequenceStep { sample: false, masked: true, ..run(1, 5, 1, &[]) }],
            "seq-1 is masked, but is not to be sampled",
        ),
        (
            vec![],
            vec![SequenceStep { count: 1, ..drafts(&[7]) }],
            "seq-1 is to be sampled at 6, but has 7 tokens",
        ),
        (
            vec![new(2, &TOKENS, 5)],
            vec![SequenceStep { drafts: Drafts::Known(vec![7]), ..run(2, 0, 6, &[2, 3]) }],
            "seq-2 has 1 drafts, but 6 tokens to compute",
        ),
        (
            vec![new(2, &TOKENS, 5)],
            vec![SequenceStep { drafts: Drafts::Known(vec![7]), ..run(2, 0, 2, &[2, 3]) }],
            "seq-2 is to be sampled at 2, but has 6 tokens",
        ),
        (
            vec![],
            vec![SequenceStep { drafts: Drafts::UpTo(1), ..drafts(&[7]) }],
            "drafts are asked for, but there is no draft model",
        ),
        (
            vec![],
            vec![SequenceStep { drafts: Drafts::UpTo(2), ..drafts(&[7, 8]) }],
            "3 sequences and drafts, the limit is 2",
        ),
        (
            vec![],
            vec![SequenceStep { drafts: Drafts::UpTo(2), ..run(1, 5, 2, &[2]) }],
            "seq-1 is to be sampled at 7, but has 8 tokens",
        ),
        (
            vec![],
            vec![SequenceStep { masked: true, drafts: Drafts::UpTo(1), ..drafts(&[7]) }],
            "seq-1 has drafts, but is not to be sampled freely",
        ),
        (
            vec![new(2, &TOKENS, 5)],
            vec![SequenceStep { drafts: Drafts::UpTo(1), ..run(2, 0, 6, &[2, 3]) }],
            "seq-2 has 1 drafts, but 6 tokens to compute",
        ),
        (
            vec![],
            vec![SequenceStep { sample: false, ..drafts(&[7]) }],
            "seq-1 has drafts, but is not to be sampled freely",
        ),
        (
            vec![],
            vec![SequenceStep { masked: true, ..drafts(&[7]) }],
            "seq-1 has drafts, but is not to be sampled freely",
        ),
        (vec![], vec![drafts(&[7, 384])], "seq-1 has draft 384 of 384"),
        (vec![], vec![drafts(&[7, 8])], "3 sequences and drafts, the limit is 2"),
        (
            vec![new(2, &TOKENS, 5)],
            vec![drafts(&[7]), SequenceStep { sample: false, ..run(2, 0, 1, &[2]) }],
            "3 sequences and drafts, the limit is 2",
        ),
        (vec![], vec![drafts(&[7; 7])], "seq-1 is to be sampled at 13, but has 13 tokens"),
        (
            vec![],
            vec![SequenceStep { new_blocks: vec![], ..drafts(&[7, 7, 7]) }],
            "seq-1 has 2 blocks, too few for 9 tokens",
        ),
        (
            (2..10).map(|seq| new(seq, &[1], 1)).collect(),
            vec![],
            "8 sequences are held, the limit is reached",
        ),
    ];
    for (admitted, sequences, expected) in cases {
        let error = step(&mut engine(), &StepPlan { admitted, sequences, ..plan(2) }).unwrap_err();
        assert_eq!(error, format!("step 2: {expected}"));
    }
    let error = step(
        &mut unstarted(),
        &StepPlan {
            admitted: vec![new(1, &TOKENS, 5)],
            sequences: vec![run(1, 0, 5, &[0, 1])],
            ..plan(1)
        },
    );
    assert_eq!(error.unwrap_err(), "step 1: there is no KV cache yet");
}

#[test]
fn masks_that_do_not_fit_their_plan() {
    let masked = SequenceStep { masked: true, ..run(1, 5, 1, &[]) };
    let decode = StepPlan { sequences: vec![masked.clone()], ..plan(2) };
    let step = |plan: &StepPlan, source: &mut dyn StepSource| {
        let mut outputs = Vec::new();
        let result = engine().step(plan, source, &mut outputs);
        let tokens = || outputs.iter().filter_map(|output| output.token).collect::<Vec<_>>();
        result.map(|_| tokens()).map_err(|error| error.to_string())
    };
    let given = |masks: Vec<Option<TokenMask>>| step(&decode, &mut Given(masks));
    assert_eq!(given(vec![Some(TokenMask::Only(vec![7]))]), Ok(vec![7]));
    let free =
        step(&StepPlan { sequences: vec![run(1, 5, 1, &[])], ..plan(2) }, &mut EmptyStepSource);
    assert_eq!(given(vec![None]), free, "without one all may be sampled");
    for (masks, expected) in [
        (vec![], "0 masks came for 1 masked sequences"),
        (vec![None, None], "2 masks came for 1 masked sequences"),
        (
            vec![Some(TokenMask::Only(vec![5, 384]))],
            "seq-1: a mask's list of tokens (only) has token 384; the vocabulary has 384",
        ),
        (
            vec![Some(TokenMask::Except(vec![5, 5]))],
            "seq-1: a mask's list of tokens (except) is not ascending: 5 follows 5",
        ),
        (
            vec![Some(TokenMask::Bits(vec![1; 13]))],
            "seq-1: a mask of 13 words of bits; a vocabulary of 384 tokens has 12",
        ),
        (vec![Some(TokenMask::Only(vec![]))], "seq-1: a mask allows no token at all"),
    ] {
        assert_eq!(given(masks).unwrap_err(), format!("step 2: {expected}"));
    }
    assert_eq!(step(&decode, &mut EmptyStepSource).unwrap_err(), "step 2: no masks come here");
    // Masks belong only to the masked entries, in the plan's order.
    let both = StepPlan {
        admitted: vec![new(2, &TOKENS, 5)],
        sequences: vec![run(2, 0, 5, &[2, 3]), masked],
        ..plan(2)
    };
    let tokens = step(&both, &mut Given(vec![Some(TokenMask::Only(vec![9]))])).unwrap();
    assert_eq!((tokens.len(), tokens[1]), (2, 9));
}

/// The bounds that the plans above exceed by one.
#[test]
fn the_last_position_is_computed_and_no_further() {
    let mut engine = engine();
    let fill = StepPlan {
        finished: vec![SeqId(1)],
        admitted: vec![new(2, &[9; 12], 12)],
        sequences: vec![run(2, 0, 12, &[7, 6, 5])],
        ..plan(2)
    };
    assert_eq!(step(&mut engine, &fill).unwrap().len(), 1);
    let beyond = StepPlan { sequences: vec![run(2, 12, 1, &[4])], ..plan(3) };
    let error = step(&mut engine, &beyond).unwrap_err();
    assert_eq!(error, "step 3: seq-2 is to be sampled at 13, but has 13 tokens");
}

/// `finished` is processed first: its ids and blocks are free within the same plan. Unknown ids are
/// ignored.
#[test]
fn a_finished_sequence_makes_room_in_the_same_plan() {
    let mut fresh = unstarted();
    fresh.start(NUM_BLOCKS, 0).unwrap();
    let again = |step: u64| StepPlan {
        finished: vec![SeqId(1), SeqId(99)],
        admitted: vec![new(1, &[7, 8, 9], 3)],
        sequences: vec![run(1, 0, 3, &[0])],
        ..plan(step)
    };
    let expected = step(&mut fresh, &again(1)).unwrap();
    assert_eq!(step(&mut engine(), &again(2)).unwrap(), expected);
}

/// A sequence may start after a prefix that another one has computed, in the same blocks.
#[test]
fn a_prefix_computed_by_another_sequence_is_read() {
    let tokens = [TOKENS.as_slice(), &[6]].concat();
    let whole = StepPlan {
        admitted: vec![new(2, &tokens, 6)],
        sequences: vec![run(2, 0, 6, &[2, 3])],
        ..plan(2)
    };
    let shared = StepPlan { sequences: vec![run(2, 4, 2, &[0, 3])], ..whole.clone() };
    let other = StepPlan { sequences: vec![run(2, 4, 2, &[5, 3])], ..whole.clone() };
    let scored = |plan: &StepPlan| {
        let mut outputs = Vec::new();
        engine().step(plan, &mut EmptyStepSource, &mut outputs).unwrap();
        outputs
    };
    assert_eq!(scored(&shared), scored(&whole));
    assert_ne!(scored(&other), scored(&whole), "an empty block is another prefix");
}

#[test]
fn a_new_start_forgets_everything() {
    let mut engine = engine();
    engine.start(NUM_BLOCKS, 0).unwrap();
    let error = step(&mut engine, &StepPlan { sequences: vec![run(1, 5, 1, &[])], ..plan(2) });
    assert_eq!(error.unwrap_err(), "step 2: seq-1 is not known");
}

#[test]
fn a_sequence_begins_with_a_state_that_was_kept_behind_what_comes_before() {
    let kept = |seq, place| KeptState { seq: SeqId(seq), place: StateId(place) };
    let engine = || {
        let mut engine = of("qwen3_5", 2);
        engine.start(NUM_BLOCKS, 0).unwrap();
        let first = StepPlan {
            admitted: vec![new(1, &TOKENS, 5)],
            sequences: vec![SequenceStep { sample: false, ..run(1, 0, 4, &[0, 1]) }],
            keep: vec![kept(1, 0)],
            ..plan(1)
        };
        step(&mut engine, &first).unwrap();
        engine
    };
    let second = |entry, begin_with| StepPlan {
        admitted: vec![new(2, &TOKENS, 5)],
        sequences: vec![entry, run(1, 4, 1, &[])],
        begin_with,
        ..plan(2)
    };
    let begun = || run(2, 4, 1, &[0, 2]);
    let tokens = step(&mut engine(), &second(begun(), vec![kept(2, 0)])).unwrap();
    assert_eq!(tokens[0], tokens[1], "the same prompt");
    for (plan, words) in [
        (second(begun(), vec![]), "seq-2 is to be computed from 4, where it has no state"),
        (second(begun(), vec![kept(2, 1)]), "with state 1, which has seen nothing"),
        (second(begun(), vec![kept(2, 2)]), "seq-2 names state 2 of 2 kept ones"),
        (second(begun(), vec![kept(2, 0), kept(1, 0)]), "seq-1 is not new, but is to begin"),
        (
            second(run(2, 0, 5, &[2, 3]), vec![kept(2, 0)]),
            "seq-2 is to be computed from 0 with state 0, which has seen 4 tokens",
        ),
        (
            StepPlan { sequences: vec![run(1, 4, 1, &[])], ..second(begun(), vec![kept(2, 0)]) },
            "seq-2 begins with a state, but is not computed",
        ),
        (
            StepPlan { keep: vec![kept(3, 0)], ..second(begun(), vec![kept(2, 0)]) },
            "seq-3 is not computed, but its state is to be kept",
        ),
        (
            StepPlan { keep: vec![kept(1, u32::MAX)], ..second(begun(), vec![kept(2, 0)]) },
            "seq-1 names state 4294967295 of 2 kept ones",
        ),
    ] {
        let error = step(&mut engine(), &plan).unwrap_err();
        assert!(error.contains(words), "{words}: {error}");
    }
    // A model without linear attention has no states: the blocks are enough.
    let mut plain = of("llama-gqa", u32::MAX);
    plain.start(NUM_BLOCKS, 0).unwrap();
    let entry = SequenceStep { sample: false, ..run(1, 0, 4, &[0, 1]) };
    let admitted = vec![new(1, &TOKENS, 5)];
    let keep = vec![kept(1, u32::MAX - 1)];
    step(&mut plain, &StepPlan { admitted, sequences: vec![entry], keep, ..plan(1) }).unwrap();
    step(&mut plain, &second(begun(), vec![kept(2, 7)])).unwrap();
}
