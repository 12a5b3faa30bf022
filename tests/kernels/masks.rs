//! Token masks in sampling. The expected results are defined without masks: a row chooses as if all
//! other logits were -infinity, and its log-probabilities are those of the original row.
use kernels::KernelError;
use kernels::backend::prelude::*;
use kernels::cpu::Isa;
use kernels::cpu::sample::Sampler;
use kernels::reference::ReferenceBackend;
use kernels::sampling::{SampleParams, SampleRow, Sampled};

use crate::support::{Pretend, Random, backend, buffer};

pub(crate) fn allows(mask: &[u32], token: usize) -> bool {
    mask[token / 32] >> (token % 32) & 1 == 1
}

/// Masks of a few tokens, of nearly all, of half, of runs, of one, of none; never with bits beyond
/// the vocabulary.
pub(crate) fn random_mask(random: &mut Random, vocab: usize) -> Vec<u32> {
    let mut mask = vec![0u32; vocab.div_ceil(32)];
    let kind = random.below(6);
    let run = 1 + random.below(vocab);
    let one = random.below(vocab);
    for token in 0..vocab {
        let allowed = match kind {
            0 => random.below(50) == 0,
            1 => random.below(50) != 0,
            2 => random.below(2) == 0,
            3 => (token / run).is_multiple_of(2),
            4 => token == one,
            // Usually not empty.
            _ => one.is_multiple_of(4) && random.below(10) == 0,
        };
        mask[token / 32] |= u32::from(allowed) << (token % 32);
    }
    mask
}

fn random_params(random: &mut Random) -> SampleParams {
    let mut one_of = |list: &[f32]| list[random.below(list.len())];
    let mut params = SampleParams {
        temperature: one_of(&[0.0, 0.0, 0.5, 1.0, 1.5]),
        top_p: one_of(&[1.0, 1.0, 0.9, 0.3]),
        min_p: one_of(&[0.0, 0.0, 0.1]),
        top_k: one_of(&[0.0, 0.0, 3.0, 40.0]) as u32,
        repetition_penalty: one_of(&[1.0, 1.0, 1.5]),
        frequency_penalty: one_of(&[0.0, 0.0, -3.0]),
        seed: random.next(),
        logprobs: [None, Some(0), Some(4)][random.below(3)],
        ..SampleParams::default()
    };
    if random.below(4) == 0 {
        params.logit_bias = (0..4).map(|_| (random.below(60) as u32, 20.0)).collect();
        params.suppress_until_min = vec![random.below(60) as u32];
        params.min_tokens = 3;
    }
    params
}

/// The expected result of a row, by a sampler that does not see the mask.
fn expected(
    sample: &mut dyn FnMut(&[f32], &SampleRow<'_>) -> Sampled,
    logits: &[f32],
    row: &SampleRow<'_>,
) -> Sampled {
    let mut left = logits.to_vec();
    for (token, x) in left.iter_mut().enumerate() {
        if row.allowed.is_some_and(|mask| !allows(mask, token)) {
            *x = f32::NEG_INFINITY;
        }
    }
    let chosen = sample(&left, &SampleRow { allowed: None, ..*row });
    if chosen.corrupted || row.params.logprobs.is_none() {
        return chosen;
    }
    // Greedy, and forced to choose that token by an overwhelming bias.
    let logit_bias = vec![(chosen.token, 1e30)];
    let params = SampleParams { temperature: 0.0, logit_bias, ..SampleParams::default() };
    let params = SampleParams { logprobs: row.params.logprobs, ..params };
    sample(logits, &SampleRow { params: &params, prompt: &[], output: &[], allowed: None })
}

fn check(sample: &mut dyn FnMut(&[f32], &SampleRow<'_>) -> Sampled, cases: usize) {
    let mut random = Random(71);
    let (mut corrupted, mut lower) = (0, 0);
    for case in 0..cases {
        let vocab = [1, 2, 31, 32, 33, 64, 100, 257, 1000][random.below(9)];
        // Some equal, some -infinity.
        let logits: Vec<f32> = (0..vocab)
            .map(|_| match random.below(20) {
                0 => f32::NEG_INFINITY,
                1..4 => (random.f32() * 4.0).round(),
                _ => random.f32() * 6.0,
            })
            .collect();
        if logits.iter().all(|&x| x == f32::NEG_INFINITY) {
            continue;
        }
        let params = random_params(&mut random);
        let mask = random_mask(&mut random, vocab);
        let output: Vec<u32> = (0..random.below(6)).map(|_| random.below(vocab) as u32).collect();
        let row =
            SampleRow { params: &params, prompt: &[0, 1], output: &output, allowed: Some(&mask) };
        let found = sample(&logits, &row);
        let wanted = expected(sample, &logits, &row);
        assert_eq!(found, wanted, "case {case}: {params:?}, mask {mask:x?}");
        assert!(found.corrupted || allows(&mask, found.token as usize));
        corrupted += usize::from(found.corrupted);
        lower += usize::from(found.rank > 1);
    }
    assert!(corrupted * 40 > cases && lower * 10 > cases, "{corrupted}, {lower} of {cases}");
}

#[test]
fn the_cpus_sampler_chooses_as_if_the_others_were_impossible() {
    let mut sampler = Sampler::new();
    check(&mut |logits, row| sampler.sample(logits, row), 20_000);
}

#[test]
fn the_reference_chooses_as_if_the_others_were_impossible() {
    let mut backend = ReferenceBackend::new(Box::new(Pretend { world: 1 }));
    let mut sample = |logits: &[f32], row: &SampleRow<'_>| {
        let mut buffer = backend.new_buffer(1, logits.len()).unwrap();
        buffer.values_mut().copy_from_slice(logits);
        let mut out = Vec::new();
        backend.sample(&buffer, logits.len(), 0, &[*row], &mut out).unwrap();
        out.remove(0)
    };
    check(&mut sample, 3000);
}

#[test]
fn draws_are_spread_over_what_is_allowed() {
    // Weights 8 : 4 : 2 : 2; without the first, 4 : 2 : 2.
    let logits = [8.0f32, 4.0, 2.0, 2.0].map(f32::ln);
    let mut sampler = Sampler::new();
    for top_p in [1.0, 0.999] {
        let mut counts = [0u32; 4];
        for seed in 0..4000 {
            let params = SampleParams { seed, top_p, ..SampleParams::default() };
            let row =
                SampleRow { params: &params, prompt: &[], output: &[], allowed: Some(&[0b1110]) };
            counts[sampler.sample(&logits, &row).token as usize] += 1;
        }
        // Allows a deviation of 32.
        assert_eq!(counts[0], 0);
        assert!(counts[1].abs_diff(2000) < 160 && counts[2].abs_diff(1000) < 160, "{counts:?}");
    }
}

#[test]
fn a_logit_that_is_not_finite_is_noticed_beside_the_mask_too() {
    let greedy = SampleParams { temperature: 0.0, ..SampleParams::default() };
    for wrong in [f32::NAN, f32::INFINITY] {
        for params in [&greedy, &SampleParams::default()] {
            let row = SampleRow { params, prompt: &[], output: &[], allowed: Some(&[0b01]) };
            assert!(Sampler::new().sample(&[1.0, wrong], &row).corrupted);
            assert!(!Sampler::new().sample(&[1.0, 2.0], &row).corrupted);
        }
    }
}

#[test]
fn a_mask_that_is_too_short_is_an_error() {
    let mut cpu = backend(Isa::detect(), 1);
    let mut reference = ReferenceBackend::new(Box::new(Pretend { world: 1 }));
    let logits = vec![0.5; 40];
    let on_cpu = buffer(&mut cpu, &logits, 40);
    let mut plain = reference.new_buffer(1, 40).unwrap();
    plain.values_mut().copy_from_slice(&logits);
    let params = SampleParams::default();
    for (mask, is_right) in
        [(&[1u32][..], false), (&[], false), (&[1, 1], true), (&[1, 1, 1], true)]
    {
        let row = [SampleRow { params: &params, prompt: &[], output: &[], allowed: Some(mask) }];
        let mut out = Vec::new();
        let found = [
            cpu.sample(&on_cpu, 40, 0, &row, &mut out),
            reference.sample(&plain, 40, 0, &row, &mut out),
        ];
        for found in found {
            assert_eq!(found.is_ok(), is_right, "{mask:?}");
            assert!(is_right || matches!(found, Err(KernelError::Shape { .. })));
        }
    }
}

/// Several threads sample rows, each reusing the scratch memory of its previous row.
#[test]
fn a_row_is_masked_alike_alone_and_beside_others() {
    let mut random = Random(72);
    let mut backend = backend(Isa::detect(), 3);
    let logits = random.vec(24 * 80);
    let buffer = buffer(&mut backend, &logits, 80);
    let all: Vec<(SampleParams, Option<Vec<u32>>)> = (0..24)
        .map(|i| (random_params(&mut random), (i % 3 > 0).then(|| random_mask(&mut random, 70))))
        .collect();
    let rows: Vec<SampleRow<'_>> = all
        .iter()
        .map(|(params, mask)| SampleRow {
            params,
            prompt: &[1],
            output: &[2],
            allowed: mask.as_deref(),
        })
        .collect();
    let mut together = Vec::new();
    backend.sample(&buffer, 70, 0, &rows, &mut together).unwrap();
    for (i, wanted) in together.iter().enumerate() {
        let mut alone = Vec::new();
        backend.sample(&buffer, 70, i, &rows[i..=i], &mut alone).unwrap();
        assert_eq!(&alone[0], wanted, "row {i}");
        assert_eq!(&Sampler::new().sample(&logits[i * 80..][..70], &rows[i]), wanted);
    }
}
