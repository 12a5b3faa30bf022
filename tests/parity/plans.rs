//! Plans that do not fit what a worker has are refused with one sentence, before the device sees
//! them; plans at the very bounds are run.
use std::sync::Arc;

use kernels::ReferenceBackend;
use shared::clock::SystemClock;
use shared::ids::{BlockId, SeqId, StepId};
use shared::protocol::{EngineConfig, NewSequence, SequenceStep, StepPlan};
use shared::sampling::SamplingParams;
use worker::engine::Engine;
use worker::model::Model;

use crate::{exchange, repository};

const NUM_BLOCKS: u32 = 8;

fn config() -> EngineConfig {
    EngineConfig {
        block_size: 4,
        max_model_len: 12,
        max_num_seqs: 2,
        max_num_batched_tokens: 16,
        kv_cache_bytes: 1 << 20,
    }
}

fn unstarted(config: EngineConfig) -> Result<Engine<ReferenceBackend>, String> {
    let mut backend = ReferenceBackend::new(Box::new(exchange::group(1).remove(0)));
    let dir = repository("tests/models/llama-gqa");
    let model = Model::load(&mut backend, &dir, &mut |_, _| {}).unwrap();
    Engine::new(backend, model, config, Arc::new(SystemClock::start()))
        .map_err(|error| error.to_string())
}

/// An engine that has run `seq-1`: five tokens and one sampled, in blocks 0 and 1.
fn engine() -> Engine<ReferenceBackend> {
    let mut engine = unstarted(config()).unwrap();
    engine.start(NUM_BLOCKS).unwrap();
    let plan = StepPlan {
        admitted: vec![new(1, &[1, 2, 3, 4, 5], 5)],
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
    let sampling = SamplingParams::greedy();
    NewSequence { seq: SeqId(seq), tokens: tokens.to_vec(), num_prompt, sampling }
}

fn run(seq: u64, start: u32, count: u32, blocks: &[u32]) -> SequenceStep {
    let new_blocks = blocks.iter().copied().map(BlockId).collect();
    SequenceStep { seq: SeqId(seq), start, count, new_blocks, sample: true }
}

fn step(engine: &mut Engine<ReferenceBackend>, plan: &StepPlan) -> Result<Vec<u32>, String> {
    let mut outputs = Vec::new();
    engine.step(plan, &mut outputs).map_err(|error| error.to_string())?;
    Ok(outputs.iter().filter_map(|output| output.token).collect())
}

#[test]
fn sequences_that_do_not_fit() {
    let chunk = SequenceStep { sample: false, ..run(1, 5, 1, &[]) };
    let cases = [
        (vec![], vec![run(7, 0, 1, &[2])], "seq-7 is not known here"),
        (vec![new(1, &[1], 1)], vec![], "seq-1 is admitted twice"),
        (vec![], vec![chunk.clone(), chunk], "seq-1 occurs twice in one step"),
        (vec![], vec![run(1, 5, 1, &[8])], "seq-1: block-8 is not below num_blocks, 8"),
        (vec![], vec![run(1, 5, 0, &[])], "seq-1: count is 0, it must be at least 1"),
        (vec![], vec![run(1, 5, 2, &[])], "seq-1: tokens 5..7 are to be computed, it has 6"),
        (
            vec![],
            vec![run(1, 4, 1, &[])],
            "seq-1: a token is to be sampled after 5 tokens, it has 6",
        ),
        (
            vec![],
            vec![run(1, u32::MAX, u32::MAX, &[])],
            "number of tokens in a step is 4294967295, it must be in 0..=16",
        ),
        (
            vec![new(2, &[1, 2, 3, 4, 5], 5)],
            vec![run(2, 0, 5, &[2])],
            "seq-2: 5 tokens do not fit in its blocks, which hold 4",
        ),
        (vec![new(2, &[], 0)], vec![], "seq-2: has 0 tokens, it must have 1..=12"),
        (vec![new(2, &[1; 13], 1)], vec![], "seq-2: has 13 tokens, it must have 1..=12"),
        (vec![new(2, &[1], 0)], vec![], "seq-2: num_prompt is 0, it must be in 1..=1"),
        (vec![new(2, &[1], 2)], vec![], "seq-2: num_prompt is 2, it must be in 1..=1"),
        (vec![new(2, &[384], 1)], vec![], "seq-2: has token 384, tokens are in 0..384"),
        (
            vec![new(2, &[1], 1), new(3, &[1], 1)],
            vec![run(1, 5, 1, &[]), run(2, 0, 1, &[2]), run(3, 0, 1, &[3])],
            "number of sequences in a step is 3, it must be in 0..=2",
        ),
        (
            (2..10).map(|seq| new(seq, &[1], 1)).collect(),
            vec![],
            "number of sequences held is 9, it must be in 0..=8",
        ),
    ];
    for (admitted, sequences, expected) in cases {
        let error = step(&mut engine(), &StepPlan { admitted, sequences, ..plan(2) }).unwrap_err();
        assert_eq!(error, expected);
    }
}

#[test]
fn holes_in_the_cache_are_refused() {
    let mut engine = engine();
    let admitted = vec![new(2, &[1, 2, 3, 4, 5, 6], 6)];
    let chunk = |start, count| SequenceStep { sample: false, ..run(2, start, count, &[]) };
    let sequences =
        vec![SequenceStep { new_blocks: run(2, 0, 1, &[2, 3]).new_blocks, ..chunk(0, 2) }];
    step(&mut engine, &StepPlan { admitted, sequences, ..plan(2) }).unwrap();
    let hole = StepPlan { sequences: vec![chunk(3, 1)], ..plan(3) };
    let error = step(&mut engine, &hole).unwrap_err();
    assert_eq!(error, "seq-2: start is 3, only 2 tokens are in the KV cache");
}

#[test]
fn plans_come_in_order_and_after_start() {
    let mut engine = engine();
    let error = step(&mut engine, &plan(3)).unwrap_err();
    assert_eq!(error, "step-3 arrived where step-2 was due");
    step(&mut engine, &plan(2)).unwrap();
    let error = step(&mut engine, &plan(2)).unwrap_err();
    assert_eq!(error, "step-2 arrived where step-3 was due");
    // A new epoch begins where it likes, with nothing known.
    engine.start(NUM_BLOCKS).unwrap();
    let error = step(&mut engine, &StepPlan { sequences: vec![run(1, 5, 1, &[])], ..plan(40) });
    assert_eq!(error.unwrap_err(), "seq-1 is not known here");

    let mut unstarted = unstarted(config()).unwrap();
    let error = step(&mut unstarted, &plan(1)).unwrap_err();
    assert_eq!(error, "the KV cache is not allocated: the engine was not started");
}

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
    assert_eq!(error, "seq-2: token 12 is to be computed, max_model_len is 12");
}

/// `finished` comes first: its id and its blocks are free within the same plan.
#[test]
fn a_finished_sequence_makes_room_in_the_same_plan() {
    let mut fresh = unstarted(config()).unwrap();
    fresh.start(NUM_BLOCKS).unwrap();
    let again = |step: u64| StepPlan {
        finished: vec![SeqId(1), SeqId(99)],
        admitted: vec![new(1, &[7, 8, 9], 3)],
        sequences: vec![run(1, 0, 3, &[0])],
        ..plan(step)
    };
    let expected = step(&mut fresh, &again(1)).unwrap();
    assert_eq!(step(&mut engine(), &again(2)).unwrap(), expected);
}

#[test]
fn sizes_out_of_bounds() {
    type Change = fn(&mut EngineConfig);
    let cases: [(Change, &str); 5] = [
        (|config| config.block_size = 0, "block_size is 0, it must be in 1..=4096"),
        (|config| config.max_model_len = 513, "max_model_len is 513, it must be in 1..=512"),
        (|config| config.max_num_seqs = 0, "max_num_seqs is 0, it must be in 1..=65536"),
        (
            |config| config.max_num_batched_tokens = 0,
            "max_num_batched_tokens is 0, it must be in 1..=1048576",
        ),
        (|config| config.max_model_len = 0, "max_model_len is 0, it must be in 1..=512"),
    ];
    for (change, expected) in cases {
        let mut config = config();
        change(&mut config);
        assert_eq!(unstarted(config).unwrap_err(), expected);
    }
    let mut engine = unstarted(config()).unwrap();
    let error = engine.start(0).unwrap_err().to_string();
    assert_eq!(error, "num_blocks is 0, it must be in 1..=1073741823");
}

#[test]
fn capacity_counts_keys_and_values_of_all_layers() {
    let engine = unstarted(config()).unwrap();
    // 2 layers, K and V, 4 tokens, 2 heads of 16, 4 bytes.
    let block_bytes = 2 * 2 * 4 * 2 * 16 * 4;
    assert_eq!(engine.kv_blocks_capacity(), (1 << 20) / block_bytes);
}

/// The weights outlive an engine: the next epoch's gives the same tokens.
#[test]
fn weights_are_kept_between_engines() {
    let first = |engine: &mut Engine<ReferenceBackend>| {
        engine.start(NUM_BLOCKS).unwrap();
        let admitted = vec![new(1, &[1, 2, 3, 4, 5], 5)];
        step(engine, &StepPlan { admitted, sequences: vec![run(1, 0, 5, &[0, 1])], ..plan(1) })
    };
    let mut engine = engine();
    let expected = first(&mut engine).unwrap();
    let (backend, model) = engine.into_parts();
    let mut next = Engine::new(backend, model, config(), Arc::new(SystemClock::start())).unwrap();
    assert_eq!(first(&mut next).unwrap(), expected);
}
