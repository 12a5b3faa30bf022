//! The fast sampler chooses the same tokens as the reference sampler, for thousands of random
//! parameters; logits are coarse, so that many are equal.
use std::cell::{Cell, RefCell};

use kernels::backend::{DType, HostMatrix};
use kernels::collective::single_rank;
use kernels::cpu::Precision;
use kernels::sampling::{SampleParams, SampleRow, Sampled};
use kernels::{Backend, CpuBackend, ReferenceBackend};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

const WIDTH: usize = 200;
/// The rest of a row is padding.
const VOCAB: usize = 187;

#[derive(Clone, Debug)]
struct Case {
    /// In eighths, which bf16 represents exactly.
    logits: Vec<i8>,
    params: SampleParams,
    prompt: Vec<u32>,
    output: Vec<u32>,
    /// The allowed tokens, all within a few words; all other words are 0 or all ones.
    allowed: Option<Vec<u32>>,
}

fn cases() -> impl Strategy<Value = Case> {
    let tokens = || prop::collection::vec(0..VOCAB as u32 + 5, 0..12);
    let truncation = (
        prop_oneof![Just(0.0f32), 0.05f32..2.0],
        prop_oneof![Just(1.0f32), 0.01f32..1.0],
        prop_oneof![Just(0u32), 1u32..300],
        prop_oneof![Just(0.0f32), 0.0f32..=1.0],
    );
    let penalties = (
        prop_oneof![Just(0.0f32), -2.0f32..2.0],
        prop_oneof![Just(0.0f32), -2.0f32..2.0],
        prop_oneof![Just(1.0f32), 0.5f32..2.0],
    );
    let edits =
        (prop::collection::vec((0..VOCAB as u32 + 5, -20.0f32..20.0), 0..4), tokens(), 0u32..16);
    let rest = (any::<u64>(), 0u32..4, prop::option::of(0u32..25));
    let logits = prop::collection::vec(-127i8..=127, WIDTH);
    let word = prop_oneof![Just(0u32), Just(u32::MAX), any::<u32>()];
    let allowed = prop::option::of(prop::collection::vec(word, VOCAB.div_ceil(32)));
    (logits, truncation, penalties, edits, rest, tokens(), tokens(), allowed).prop_map(
        |(logits, truncation, penalties, edits, rest, prompt, output, allowed)| Case {
            logits,
            params: SampleParams {
                temperature: truncation.0,
                top_p: truncation.1,
                top_k: truncation.2,
                min_p: truncation.3,
                presence_penalty: penalties.0,
                frequency_penalty: penalties.1,
                repetition_penalty: penalties.2,
                logit_bias: edits.0,
                suppress_until_min: edits.1,
                min_tokens: edits.2,
                seed: rest.0,
                choice: rest.1,
                logprobs: rest.2,
            },
            prompt,
            output,
            allowed,
        },
    )
}

/// Samples for the case, and scores its first token.
fn sample<B: Backend>(backend: &mut B, case: &Case) -> [Sampled; 2] {
    let bytes: Vec<u8> =
        case.logits.iter().flat_map(|x| (f32::from(*x) / 8.0).to_le_bytes()).collect();
    let row = HostMatrix {
        data: &bytes,
        dtype: DType::F32,
        rows: 1,
        cols: WIDTH,
        col_start: 0,
        row_stride: WIDTH,
        scales: None,
    };
    let table = backend.load_matrix(&[row]).unwrap();
    let mut logits = backend.new_buffer(1, WIDTH).unwrap();
    backend.embed(&table, &[0], 0, 1.0, &mut logits).unwrap();
    let row = SampleRow {
        params: &case.params,
        prompt: &case.prompt,
        output: &case.output,
        allowed: case.allowed.as_deref(),
    };
    let (mut sampled, mut scored) = (Vec::new(), Vec::new());
    backend.sample(&logits, VOCAB, 0, &[row], &mut sampled).unwrap();
    backend.logprobs(&logits, VOCAB, 0, &[3], 7, &mut scored).unwrap();
    [sampled.remove(0), scored.remove(0)]
}

/// Temperatures whose inverse is not finite in f32: only the most likely tokens remain.
#[test]
fn temperatures_near_zero_leave_the_most_likely_tokens() {
    let mut fast = CpuBackend::new(1, Precision::Float32, single_rank()).unwrap();
    let mut oracle = ReferenceBackend::new(single_rank());
    let mut logits = vec![-20; WIDTH];
    // Two equal logits, one just below.
    (logits[40], logits[7], logits[90]) = (9, 9, 8);
    let mut seen = [false; 2];
    for temperature in [f32::from_bits(1), 1e-40, 2.9e-39, 3e-39, f32::MIN_POSITIVE] {
        for (top_k, top_p, min_p) in [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.5)] {
            for seed in 0..8 {
                let params =
                    SampleParams { temperature, top_k, top_p, min_p, seed, ..Default::default() };
                let (prompt, output) = (vec![], vec![]);
                let mut case =
                    Case { logits: logits.clone(), params, prompt, output, allowed: None };
                for allowed in [None, Some(vec![!(1 << 7); VOCAB.div_ceil(32)])] {
                    case.allowed = allowed;
                    let found = sample(&mut fast, &case).map(|s| (s.token, s.corrupted));
                    let wanted = sample(&mut oracle, &case).map(|s| (s.token, s.corrupted));
                    assert_eq!(found, wanted, "{:?} {:?}", case.params, case.allowed);
                    assert!([7, 40].contains(&found[0].0));
                    seen[usize::from(found[0].0 == 40 && case.allowed.is_none())] = true;
                }
            }
        }
    }
    assert_eq!(seen, [true; 2], "both of the most likely, of different draws");
}

#[test]
fn both_backends_choose_the_same() {
    let fast = RefCell::new(CpuBackend::new(1, Precision::Float32, single_rank()).unwrap());
    let oracle = RefCell::new(ReferenceBackend::new(single_rank()));
    let (random, lower) = (Cell::new(0), Cell::new(0));
    // A fixed set of cases: one sampler adds weights in f32 and the other in f64, so about one draw
    // in a million falls between the two.
    let config = Config { cases: 4096, failure_persistence: None, ..Config::default() };
    let random_cases = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let mut runner = TestRunner::new_with_rng(config, random_cases);
    runner
        .run(&cases(), |case| {
            let (found, wanted) =
                (sample(&mut *fast.borrow_mut(), &case), sample(&mut *oracle.borrow_mut(), &case));
            for (found, wanted) in found.iter().zip(&wanted) {
                prop_assert_eq!(
                    (found.token, found.corrupted, found.rank),
                    (wanted.token, wanted.corrupted, wanted.rank)
                );
                prop_assert!((found.logprob - wanted.logprob).abs() < 1e-4);
                prop_assert_eq!(found.top.len(), wanted.top.len());
                for (found, wanted) in found.top.iter().zip(&wanted.top) {
                    prop_assert_eq!(found.0, wanted.0);
                    prop_assert!((found.1 - wanted.1).abs() < 1e-4);
                }
            }
            random.set(random.get() + u32::from(case.params.temperature > 0.0));
            lower.set(lower.get() + u32::from(wanted[0].rank > 1));
            Ok(())
        })
        .unwrap();
    // The cases would prove little if the most likely token always won.
    let (random, lower) = (random.get(), lower.get());
    assert!(random > 1000 && lower > 400, "{random} random, {lower} not the most likely");
}
