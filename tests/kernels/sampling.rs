//! Sampling and log-probabilities compared with direct definitions and with distributions.
use std::collections::BTreeSet;

use kernels::KernelError;
use kernels::backend::Buffer;
use kernels::backend::prelude::*;
use kernels::cpu::Isa;
use kernels::cpu::sample::Sampler;
use kernels::sampling::{SampleParams, SampleRow, Sampled};

use crate::support::{Random, assert_close, backend, buffer};

fn params() -> SampleParams {
    SampleParams::default()
}

fn greedy() -> SampleParams {
    SampleParams { temperature: 0.0, ..params() }
}

fn sample(logits: &[f32], params: &SampleParams, prompt: &[u32], output: &[u32]) -> Sampled {
    Sampler::new().sample(logits, &SampleRow { params, prompt, output, allowed: None })
}

/// Number of draws of each token over `draws` seeds.
fn histogram(logits: &[f32], params: &SampleParams, draws: u64) -> Vec<u64> {
    let mut sampler = Sampler::new();
    let mut counts = vec![0; logits.len()];
    for seed in 0..draws {
        let params = SampleParams { seed, ..params.clone() };
        let row = SampleRow { params: &params, prompt: &[], output: &[1, 2], allowed: None };
        counts[sampler.sample(logits, &row).token as usize] += 1;
    }
    counts
}

fn softmax(logits: &[f32], temperature: f64) -> Vec<f64> {
    let weights: Vec<f64> = logits.iter().map(|&x| (f64::from(x) / temperature).exp()).collect();
    let total: f64 = weights.iter().sum();
    weights.iter().map(|w| w / total).collect()
}

/// Pearson's chi-squared statistic; its mean is the degrees of freedom (dof), its standard
/// deviation sqrt(2 dof).
fn assert_distributed(counts: &[u64], probabilities: &[f64]) {
    let draws: u64 = counts.iter().sum();
    let mut statistic = 0.0;
    let mut dof = -1.0f64;
    for (&count, &p) in counts.iter().zip(probabilities) {
        let expected = p * draws as f64;
        if p == 0.0 {
            assert_eq!(count, 0);
            continue;
        }
        assert!(expected > 5.0, "too few draws for the test to mean anything");
        statistic += (count as f64 - expected).powi(2) / expected;
        dof += 1.0;
    }
    assert!(statistic < dof + 5.0 * (2.0 * dof).sqrt(), "chi-square {statistic}, dof {dof}");
}

#[test]
fn tokens_are_distributed_as_the_softmax_says() {
    let logits = [0.3, -1.0, 2.0, 1.1, 0.0, -0.5, 1.9, f32::NEG_INFINITY];
    for temperature in [0.5, 1.0, 1.7] {
        let params = SampleParams { temperature, ..params() };
        let counts = histogram(&logits, &params, 40_000);
        assert_distributed(&counts, &softmax(&logits, f64::from(temperature)));
    }
}

#[test]
fn truncated_tokens_are_distributed_as_the_rest_of_the_softmax() {
    let logits = [0.3, -1.0, 2.0, 1.1, 0.0, -0.5, 1.9, 0.9];
    let params = SampleParams { top_k: 4, ..params() };
    let mut p = softmax(&logits, 1.0);
    for out in [0, 1, 4, 5] {
        p[out] = 0.0;
    }
    let total: f64 = p.iter().sum();
    p.iter_mut().for_each(|p| *p /= total);
    assert_distributed(&histogram(&logits, &params, 40_000), &p);
}

/// The definition: sort by probability; cut by rank, by ratio to the best, by cumulative mass.
fn allowed(logits: &[f32], params: &SampleParams) -> BTreeSet<u32> {
    let p = softmax(logits, f64::from(params.temperature));
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    if params.top_k > 0 {
        order.truncate(params.top_k as usize);
    }
    order.retain(|&i| p[i] >= f64::from(params.min_p) * p[order_best(&p)]);
    let total: f64 = order.iter().map(|&i| p[i]).sum();
    let mut mass = 0.0;
    let mut kept = BTreeSet::new();
    for i in order {
        kept.insert(i as u32);
        mass += p[i];
        if params.top_p < 1.0 && mass >= f64::from(params.top_p) * total {
            break;
        }
    }
    kept
}

fn order_best(p: &[f64]) -> usize {
    (0..p.len()).max_by(|&a, &b| p[a].total_cmp(&p[b])).unwrap()
}

#[test]
fn only_the_allowed_tokens_are_chosen_and_all_of_them() {
    let mut random = Random(51);
    for case in 0..60 {
        let vocab = 2 + random.below(30);
        let logits: Vec<f32> = (0..vocab).map(|_| random.f32() * 2.0).collect();
        let params = SampleParams {
            temperature: [0.7, 1.0, 1.5][case % 3],
            top_k: [0, 1, 3, 8, 100][random.below(5)],
            top_p: [1.0, 0.9, 0.5, 0.05][random.below(4)],
            min_p: [0.0, 0.1, 0.4][random.below(3)],
            ..params()
        };
        let counts = histogram(&logits, &params, 4000);
        let seen: BTreeSet<u32> = (0..vocab as u32).filter(|&i| counts[i as usize] > 0).collect();
        let allowed = allowed(&logits, &params);
        assert!(seen.is_subset(&allowed), "{params:?} {logits:?}: {seen:?} vs {allowed:?}");
        // The least likely of 30 tokens with logits in -2..2 has a probability of at least 1e-3.
        assert!(seen.len() * 10 >= allowed.len() * 9, "{params:?}: {seen:?} vs {allowed:?}");
    }
}

#[test]
fn nucleus_over_a_large_vocabulary() {
    // So flat that the nucleus is far larger than the first guess of its size.
    let mut random = Random(52);
    let logits: Vec<f32> = (0..5000).map(|_| random.f32()).collect();
    let params = SampleParams { top_p: 0.6, ..params() };
    let allowed = allowed(&logits, &params);
    assert!((1000..4000).contains(&allowed.len()));
    let counts = histogram(&logits, &params, 10_000);
    let outside = (0..5000u32).filter(|i| counts[*i as usize] > 0 && !allowed.contains(i)).count();
    // Rounding may shift the place where the mass reaches 0.6 by one token.
    assert!(outside <= 1, "{outside}");
    assert!(counts.iter().filter(|&&count| count > 0).count() * 10 > allowed.len() * 9);
}

#[test]
fn equal_logits_go_by_id() {
    let logits = [1.0, 2.0, 2.0, 2.0, 0.0];
    assert_eq!(sample(&logits, &greedy(), &[], &[]).token, 1);
    let top_2 = SampleParams { top_k: 2, ..params() };
    let counts = histogram(&logits, &top_2, 1000);
    assert!(counts[1] > 400 && counts[2] > 400);
    assert_eq!(counts[0] + counts[3] + counts[4], 0);
    let scored = sample(&logits, &SampleParams { logprobs: Some(9), ..greedy() }, &[], &[]);
    let ids: Vec<u32> = scored.top.iter().map(|top| top.0).collect();
    assert_eq!(ids, [1, 2, 3, 0, 4]);
    assert_eq!(Sampler::new().score(&logits, 3, 0).rank, 3);
}

#[test]
fn draws_depend_on_seed_choice_and_position_alone() {
    let logits: Vec<f32> = Random(53).vec(1000);
    let run = |seed, choice, output: &[u32]| {
        let params = SampleParams { seed, choice, ..params() };
        sample(&logits, &params, &[], output).token
    };
    let tokens: Vec<u32> = (0..50).map(|i| run(9, 0, &vec![0; i])).collect();
    assert_eq!(tokens, (0..50).map(|i| run(9, 0, &vec![7; i])).collect::<Vec<_>>());
    assert_ne!(tokens, (0..50).map(|i| run(10, 0, &vec![0; i])).collect::<Vec<_>>());
    assert_ne!(tokens, (0..50).map(|i| run(9, 1, &vec![0; i])).collect::<Vec<_>>());
    assert!(tokens.iter().collect::<BTreeSet<_>>().len() > 40);
}

#[test]
fn penalties_follow_their_definitions() {
    let logits = [2.0, 1.9, -1.0, 0.5];
    let repetition = SampleParams { repetition_penalty: 2.0, ..greedy() };
    // 2.0 / 2 = 1.0 < 1.9; the prompt counts, and counts once.
    assert_eq!(sample(&logits, &repetition, &[0, 0], &[0]).token, 1);
    // Negative logits are multiplied: -1 becomes -2, below -1.5.
    assert_eq!(sample(&[-1.0, -1.5], &repetition, &[0], &[]).token, 1);
    let presence = SampleParams { presence_penalty: 0.2, ..greedy() };
    assert_eq!(sample(&logits, &presence, &[], &[0]).token, 1);
    // Once, however often the token occurred; and not for the prompt.
    assert_eq!(sample(&[2.0, 1.7], &presence, &[], &[0, 0, 0]).token, 0);
    assert_eq!(sample(&logits, &presence, &[0], &[]).token, 0);
    let frequency = SampleParams { frequency_penalty: 0.04, ..greedy() };
    assert_eq!(sample(&logits, &frequency, &[], &[0, 0]).token, 0);
    assert_eq!(sample(&logits, &frequency, &[], &[0, 0, 0]).token, 1);
    // Tokens beyond the vocabulary are ignored.
    assert_eq!(sample(&logits, &frequency, &[99], &[99, 4]).token, 0);
    // The repetition penalty is applied before the subtractions: (3 / 2) - 1 = 0.5 < 0.8 (not (3 -
    // 1) / 2 = 1).
    let both = SampleParams { presence_penalty: 1.0, ..repetition };
    assert_eq!(sample(&[3.0, 0.8], &both, &[], &[0]).token, 1);
}

#[test]
fn a_sampler_forgets_the_row_before() {
    let frequency = SampleParams { frequency_penalty: 1.0, repetition_penalty: 1.5, ..greedy() };
    let mut sampler = Sampler::new();
    for _ in 0..3 {
        let row = SampleRow { params: &frequency, prompt: &[1], output: &[0, 0, 1], allowed: None };
        assert_eq!(sampler.sample(&[2.0, 1.9, 0.5], &row).token, 2);
        let row = SampleRow { params: &frequency, prompt: &[], output: &[], allowed: None };
        assert_eq!(sampler.sample(&[2.0, 1.9], &row).token, 0);
    }
}

#[test]
fn bias_and_suppression() {
    let logits = [2.0, 1.0, 0.0];
    let bias = SampleParams { logit_bias: vec![(2, 1.5), (2, 1.0), (77, 100.0)], ..greedy() };
    assert_eq!(sample(&logits, &bias, &[], &[]).token, 2);
    let suppress = SampleParams { suppress_until_min: vec![0, 88], min_tokens: 2, ..greedy() };
    assert_eq!(sample(&logits, &suppress, &[], &[5]).token, 1);
    assert_eq!(sample(&logits, &suppress, &[], &[5, 5]).token, 0);
    // No bias brings a suppressed token back.
    let both = SampleParams { logit_bias: vec![(0, 100.0)], ..suppress };
    assert_eq!(sample(&logits, &both, &[], &[]).token, 1);
}

#[test]
fn log_probabilities_are_of_the_unmodified_distribution() {
    let mut random = Random(54);
    let logits: Vec<f32> = (0..300).map(|_| random.f32() * 8.0).collect();
    let p = softmax(&logits, 1.0);
    let odd = SampleParams {
        temperature: 0.3,
        top_k: 5,
        logit_bias: vec![(17, 30.0)],
        logprobs: Some(6),
        ..params()
    };
    let sampled = sample(&logits, &odd, &[], &[]);
    assert_eq!(sampled.token, 17);
    assert_close(sampled.logprob, p[17].ln(), 1e-5, "logprob");
    assert_eq!(sampled.rank as usize, 1 + p.iter().filter(|&&q| q > p[17]).count());
    let mut order: Vec<usize> = (0..300).collect();
    order.sort_by(|&a, &b| p[b].total_cmp(&p[a]));
    assert_eq!(sampled.top.len(), 6);
    for (&(token, logprob), &want) in sampled.top.iter().zip(&order) {
        assert_eq!(token as usize, want);
        assert_close(logprob, p[want].ln(), 1e-5, "top");
    }
}

#[test]
fn non_finite_logits_are_corrupted() {
    let inf = f32::INFINITY;
    for logits in [&[1.0, f32::NAN][..], &[inf, 0.0], &[-inf, -inf], &[f32::NAN; 3]] {
        for params in [greedy(), params(), SampleParams { top_k: 1, logprobs: Some(1), ..params() }]
        {
            let sampled = sample(logits, &params, &[], &[]);
            assert!(sampled.corrupted && sampled.token == 0, "{logits:?}");
        }
        assert!(Sampler::new().score(logits, 0, 1).corrupted);
    }
    assert!(!sample(&[-inf, 0.0], &params(), &[], &[]).corrupted);
    // Everything suppressed: nothing can be chosen.
    let none = SampleParams { suppress_until_min: vec![0, 1], min_tokens: 1, ..greedy() };
    assert!(sample(&[1.0, 2.0], &none, &[], &[]).corrupted);
}

#[test]
fn the_backend_samples_rows_without_padding() {
    let mut random = Random(55);
    for threads in [1, 3] {
        let mut backend = backend(Isa::detect(), threads);
        let logits = random.vec(9 * 80);
        let mut padded = buffer(&mut backend, &logits, 80);
        // 70 columns count; the padding is larger than any logit, or not even finite.
        for row in padded.values_mut().chunks_mut(80) {
            row[70..75].fill(100.0);
            row[75..].fill(f32::NAN);
        }
        let all: Vec<SampleParams> =
            (0..7).map(|seed| SampleParams { seed, logprobs: Some(2), ..params() }).collect();
        let rows: Vec<SampleRow<'_>> = all
            .iter()
            .map(|params| SampleRow { params, prompt: &[1], output: &[2], allowed: None })
            .collect();
        let mut out = vec![Sampled::default(); 40];
        backend.sample(&padded, 70, 2, &rows, &mut out).unwrap();
        let want: Vec<Sampled> = (0..7)
            .map(|i| Sampler::new().sample(&logits[(i + 2) * 80..][..70], &rows[i]))
            .collect();
        assert_eq!(out, want);

        let targets: Vec<u32> = out.iter().map(|sampled| sampled.token).collect();
        let mut scored = vec![];
        backend.logprobs(&padded, 70, 2, &targets, 2, &mut scored).unwrap();
        assert_eq!(scored, want);

        let errors = [
            backend.sample(&padded, 81, 0, &rows, &mut out),
            backend.sample(&padded, 0, 0, &rows, &mut out),
            backend.sample(&padded, 70, 3, &rows, &mut out),
            backend.logprobs(&padded, 70, 0, &[70], 0, &mut out),
            backend.logprobs(&padded, 70, 10, &[], 0, &mut out),
        ];
        for (i, error) in errors.into_iter().enumerate() {
            assert!(matches!(error, Err(KernelError::Shape { .. })), "case {i}: {error:?}");
        }
        assert_eq!(padded.rows(), 9);
    }
}
