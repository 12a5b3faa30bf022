//! Emulated sampling compared with its definition in integers: sort all tokens, add up their
//! weights, cut, draw. Tokens must always be equal: at ties, at the ends of lists and bins, and in
//! rows that no model produces.
use kernels::philox;
use kernels::sampling::{SampleParams, Sampled};

use crate::cuda_sampling::{Row, params, row_of_logits, sample};
use crate::masks::{allows, random_mask};
use crate::support::Random;

/// Size of the kernel's token list (`LIST_MAX` of select.cuh).
const LISTED: u32 = 2048;
const VOCAB: usize = 5003;
const NOTHING: f32 = f32::NEG_INFINITY;

/// The weight in units of 2^-40 of the largest.
fn weight(x: f32, max: f32, p: &SampleParams) -> u64 {
    let exponent =
        (f64::from(x) - f64::from(max)) * (std::f64::consts::LOG2_E / f64::from(p.temperature));
    if exponent.is_nan() || exponent < -64.0 {
        return 0;
    }
    let whole = exponent.round_ties_even();
    let weight = ((exponent - whole) as f32).exp2() * (whole as f32).exp2();
    if weight < p.min_p { 0 } else { (f64::from(weight) * (1u64 << 40) as f64) as u64 }
}

/// All ids, the largest logit first, ties by lower id.
fn ranked(logits: &[f32]) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    ids.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
    ids
}

/// The token to be drawn from a valid row.
fn wanted(logits: &[f32], row: &Row) -> u32 {
    let p = &row.params;
    let allowed = |id: usize| row.allowed.as_ref().is_none_or(|mask| allows(mask, id));
    let masked: Vec<f32> =
        (0..logits.len()).map(|id| if allowed(id) { logits[id] } else { NOTHING }).collect();
    let order = ranked(&masked);
    let max = masked[order[0] as usize];
    let weigh = |id: u32| weight(masked[id as usize], max, p);
    let sum = |ids: &[u32]| ids.iter().map(|&id| u128::from(weigh(id))).sum::<u128>();
    let mut kept: Vec<u32> = order.into_iter().filter(|&id| weigh(id) > 0).collect();
    let cuts_rank = (1..logits.len()).contains(&(p.top_k as usize));
    if cuts_rank {
        kept.truncate(p.top_k as usize);
    }
    // The first token at which the running sum reaches `least`.
    let first = |ids: &[u32], least: u128| {
        let mut so_far = 0;
        let reaches = |&id: &u32| {
            so_far += u128::from(weigh(id));
            so_far >= least
        };
        ids.iter().position(reaches).unwrap()
    };
    if p.top_p < 1.0 {
        let total = sum(&kept);
        let least = (total as f64 * f64::from(p.top_p)).ceil() as u128;
        kept.truncate(first(&kept, least.clamp(1, total)) + 1);
    } else if !cuts_rank {
        kept.sort_unstable();
    }
    let uniform = philox::uniform(p.seed, p.choice, row.output.len() as u32, 0);
    let bits = (uniform * (1u64 << 53) as f64) as u128;
    kept[first(&kept, ((bits * sum(&kept)) >> 53) + 1)]
}

/// Draws from every row and compares; returns the draws.
fn check(what: &str, stride: usize, rows: &[(Vec<f32>, Row)]) -> Vec<Sampled> {
    let vocab = rows[0].0.len();
    let mut logits = Vec::new();
    for (row, _) in rows {
        logits.extend(row);
        // After the vocabulary there is padding that would win.
        logits.resize(logits.len() + stride - vocab, 1e9);
    }
    let settings: Vec<Row> = rows.iter().map(|(_, row)| row.clone()).collect();
    let found = sample(&logits, stride, vocab, &settings);
    for (i, (found, (logits, row))) in found.iter().zip(rows).enumerate() {
        let what = format!("{what}, row {i}, {:?}", row.params);
        assert!(!found.corrupted, "{what}");
        assert_eq!(found.token, wanted(logits, row), "{what}");
        let order = ranked(logits);
        let top: Vec<u32> = found.top.iter().map(|(id, _)| *id).collect();
        assert_eq!(top, order[..top.len()], "{what}");
        if row.params.logprobs.is_some() {
            // 0 and -0 count as equal here.
            let own = logits[found.token as usize];
            let ahead = |&(id, x): &(u32, &f32)| *x > own || (*x == own && id < found.token);
            let rank = (0u32..).zip(logits).filter(ahead).count() as u32 + 1;
            assert_eq!(found.rank, rank, "{what}");
        }
    }
    found
}

/// Rows that are each hard in one way.
fn hard_rows(random: &mut Random) -> Vec<(&'static str, Vec<f32>)> {
    let listed = LISTED as usize;
    let of = |f: &mut dyn FnMut(usize) -> f32| (0..VOCAB).map(f).collect::<Vec<f32>>();
    // A bijection: ids in pseudorandom order.
    let mixed = |i: usize| i * 1009 % VOCAB;
    vec![
        ("all equal", of(&mut |_| 0.25)),
        ("two values", of(&mut |i| if i % 2 == 0 { 1.0 } else { 0.5 })),
        ("zeros of both signs", of(&mut |i| if i % 3 == 0 { -0.0 } else { 0.0 })),
        ("a full list", of(&mut |i| if mixed(i) < listed { 3.0 } else { -200.0 })),
        ("one too many", of(&mut |i| if mixed(i) <= listed { 3.0 } else { -200.0 })),
        ("a full list, the rest close", of(&mut |i| if mixed(i) < listed { 3.0 } else { 2.0 })),
        ("the largest often", of(&mut |i| if i % 5 < 3 { 7.0 } else { -random.f32().abs() })),
        ("spread", of(&mut |_| random.f32() * 3.4e38)),
        ("denormal", of(&mut |i| f32::from_bits(mixed(i) as u32))),
        ("nearly equal", of(&mut |i| f32::from_bits(1.0f32.to_bits() + mixed(i) as u32 / 3))),
        ("hardly anything", of(&mut |i| if i % 10 == 3 { random.f32() } else { NOTHING })),
        ("one token", of(&mut |i| if i == 4711 { -1e30 } else { NOTHING })),
        ("stairs", of(&mut |i| -0.01 * mixed(i) as f32)),
        ("steps of many", of(&mut |i| 0.5 * (mixed(i) / 40) as f32)),
        ("a far bulk", of(&mut |i| if i == 77 { 12.0 } else { 0.001 * random.f32() })),
        ("an outlier below", of(&mut |i| if i == 5 { -1e30 } else { 0.1 * random.f32() })),
        ("a flat bell", of(&mut |_| (0..6).map(|_| random.f32()).sum::<f32>() * 0.1)),
        ("as of a model", row_of_logits(random, VOCAB)),
    ]
}

#[test]
fn hard_rows_are_cut_and_drawn_exactly() {
    let mut random = Random(81);
    let ranks = [0, 1, 2, 40, LISTED - 1, LISTED, LISTED + 1, VOCAB as u32 - 1, VOCAB as u32];
    let shares = [1.0, 0.9, 1e-9, 0.5, 0.999_999, f32::from_bits(1.0f32.to_bits() - 1)];
    for (what, logits) in hard_rows(&mut random) {
        let mut rows = Vec::new();
        for (i, top_k) in ranks.into_iter().enumerate() {
            let shares = if top_k == 0 { &shares[..] } else { &shares[i % 2..][..1] };
            for &top_p in shares {
                let one_of = |random: &mut Random, list: &[f32]| list[random.below(list.len())];
                let mut row = Row::of(SampleParams {
                    top_k,
                    top_p,
                    temperature: one_of(&mut random, &[1.0, 0.7, 2.0, 1e-3, 40.0, 1e-42, 1e30]),
                    min_p: one_of(&mut random, &[0.0, 0.0, 0.0, 1e-9, 0.1, 0.999, 1.0]),
                    seed: random.next(),
                    choice: random.below(3) as u32,
                    logprobs: [None, Some(8)][i % 2],
                    ..params()
                });
                if random.below(4) == 0 {
                    let mut mask = random_mask(&mut random, VOCAB);
                    let best = ranked(&logits)[0] as usize;
                    mask[best / 32] |= 1 << (best % 32);
                    row.allowed = Some(mask);
                }
                rows.push((logits.clone(), row));
            }
        }
        check(what, if random.below(2) == 0 { VOCAB } else { VOCAB + 1 }, &rows);
    }
}

/// Few distinct values, so that cuts fall among equal ones; with few tokens, and with more than the
/// list holds.
#[test]
fn cuts_among_equal_tokens_are_exact() {
    let mut random = Random(82);
    for (vocab, n) in [(1, 3), (2, 12), (7, 30), (190, 60), (3001, 30)] {
        let rows: Vec<(Vec<f32>, Row)> = (0..n)
            .map(|_| {
                let coarse = [1.0, 4.0, 8.0][random.below(3)];
                let logits = (0..vocab).map(|_| (random.f32() * 5.0 * coarse).round() / coarse);
                let one_of = |random: &mut Random, list: &[f32]| list[random.below(list.len())];
                let logits: Vec<f32> = logits.collect();
                let params = SampleParams {
                    temperature: one_of(&mut random, &[0.05, 0.5, 1.0, 3.0]),
                    top_k: [0, random.below(vocab + 2), vocab / 2][random.below(3)] as u32,
                    top_p: one_of(&mut random, &[1.0, 0.2, 0.5, 0.9, 0.99]),
                    min_p: one_of(&mut random, &[0.0, 0.0, 0.05]),
                    seed: random.next(),
                    logprobs: Some(8),
                    ..params()
                };
                (logits, Row::of(params))
            })
            .collect();
        check(&format!("vocab {vocab}"), vocab.next_multiple_of(4), &rows);
    }
}

/// Targets at the very first and the very last unit of weight.
#[test]
fn all_that_top_p_keeps_can_be_drawn_and_nothing_else() {
    // Weights 1/2, 1/4, 1/8, ..: the first three are 7/8.
    let logits: Vec<f32> = (0..40u8).map(|i| -f32::from(i) * std::f32::consts::LN_2).collect();
    for (top_p, kept) in [(0.4, 1), (0.74, 2), (0.76, 3), (0.876, 4)] {
        let row = |seed| Row::of(SampleParams { top_p, seed, ..params() });
        let rows: Vec<(Vec<f32>, Row)> = (0..60).map(|seed| (logits.clone(), row(seed))).collect();
        let found = check(&format!("top_p {top_p}"), 40, &rows);
        let mut seen = [0; 40];
        found.iter().for_each(|found| seen[found.token as usize] += 1);
        assert!(seen[..kept].iter().all(|&count| count > 0), "{top_p}: {seen:?}");
        assert!(seen[kept..].iter().all(|&count| count == 0), "{top_p}: {seen:?}");
    }
}

/// Vocabularies of realistic size: bins hold hundreds of tokens, and tens of thousands share the
/// weight.
#[test]
fn a_whole_vocabulary_is_cut_exactly() {
    let mut random = Random(83);
    let logits: Vec<f32> =
        (0..151_936).map(|_| (0..12).map(|_| random.f32()).sum::<f32>() * 1.2).collect();
    let row = |top_k, top_p, seed| {
        let row = Row::of(SampleParams { top_k, top_p, seed, logprobs: Some(8), ..params() });
        (logits.clone(), row)
    };
    let rows = [row(0, 0.95, 1), row(0, 0.02, 2), row(50, 0.9, 3), row(5000, 0.9, 4)];
    check("a vocabulary", logits.len(), &rows);
}
