//! Emulated sampling and log-probabilities compared with the reference backend, which uses sorted
//! lists and f64: same tokens, same random draws.
use kernels::backend::prelude::*;
use kernels::reference::{ReferenceBackend, ReferenceBuffer};
use kernels::sampling::{SampleParams, SampleRow, Sampled};

use crate::cuda_emulation::{Arg, f32s, launch, poison_f32, read_f32, read_u32, u32s};
use crate::support::{Pretend, Random, assert_close};

/// Room for the most likely tokens.
const TOP_STRIDE: usize = 8;
const NO_LOGPROBS: u32 = u32::MAX;
pub(crate) const NO_MASK: u32 = u32::MAX;

/// One row: its parameters, the preceding tokens, and its mask.
#[derive(Clone)]
pub(crate) struct Row {
    pub(crate) params: SampleParams,
    pub(crate) prompt: Vec<u32>,
    pub(crate) output: Vec<u32>,
    pub(crate) allowed: Option<Vec<u32>>,
}

pub(crate) fn params() -> SampleParams {
    SampleParams::default()
}

impl Row {
    pub(crate) fn of(params: SampleParams) -> Self {
        Self { params, prompt: vec![], output: vec![], allowed: None }
    }

    fn penalised(&self) -> bool {
        let p = &self.params;
        p.repetition_penalty != 1.0 || p.frequency_penalty != 0.0 || p.presence_penalty != 0.0
    }
}

fn reference(logits: &[f32], width: usize) -> (ReferenceBackend, ReferenceBuffer) {
    let mut backend = ReferenceBackend::new(Box::new(Pretend { world: 1 }));
    let mut buffer = backend.new_buffer(logits.len() / width, width).unwrap();
    buffer.values_mut().copy_from_slice(logits);
    (backend, buffer)
}

/// Reads the results from the kernel's buffers.
fn results(
    out: &[u8],
    ids: &[u8],
    logprobs: &[u8],
    wanted: impl Fn(usize) -> usize,
) -> Vec<Sampled> {
    let out = read_u32(out);
    let (ids, logprobs) = (read_u32(ids), read_f32(logprobs));
    let rows = out.chunks(4).enumerate().map(|(i, words)| {
        let list = i * TOP_STRIDE..(i + 1) * TOP_STRIDE;
        let n = if words[1] == 0 { wanted(i) } else { 0 };
        let top = ids[list.clone()].iter().copied().zip(logprobs[list].iter().copied());
        let top: Vec<(u32, f32)> = top.collect();
        assert!(top[n..].iter().all(|(id, x)| *id == u32::MAX && x.is_nan()), "too many");
        Sampled {
            token: words[0],
            corrupted: words[1] != 0,
            logprob: f32::from_bits(words[2]),
            rank: words[3],
            top: top[..n].to_vec(),
        }
    });
    rows.collect()
}

/// The rows' parameters and lists as the kernels read them.
#[derive(Default)]
pub(crate) struct Lists {
    pub(crate) words: Vec<u32>,
    biases: Vec<u32>,
    ids: Vec<u32>,
    pub(crate) masks: Vec<u32>,
}

impl Lists {
    pub(crate) fn of(rows: &[Row]) -> Self {
        let Self { mut words, mut biases, mut ids, mut masks } = Self::default();
        let mut put = |list: &[u32]| {
            let start = ids.len();
            ids.extend(list);
            [start as u32, list.len() as u32]
        };
        for row in rows {
            let p = &row.params;
            let bias_start = biases.len() as u32 / 2;
            biases.extend(p.logit_bias.iter().flat_map(|&(id, bias)| [id, bias.to_bits()]));
            let early = row.output.len() < p.min_tokens as usize;
            let suppressed = put(if early { &p.suppress_until_min } else { &[] });
            let [prompt, output] = [&row.prompt, &row.output]
                .map(|list| put(if row.penalised() { list } else { &[] }));
            words.extend([p.seed as u32, (p.seed >> 32) as u32]);
            words.extend([p.temperature, p.top_p, p.min_p].map(f32::to_bits));
            words.extend([p.top_k, p.choice, row.output.len() as u32]);
            words.extend(
                [p.presence_penalty, p.frequency_penalty, p.repetition_penalty].map(f32::to_bits),
            );
            words.extend([bias_start, p.logit_bias.len() as u32]);
            words.extend([suppressed, prompt, output].as_flattened());
            words.push(p.logprobs.unwrap_or(NO_LOGPROBS));
            words.push(row.allowed.as_ref().map_or(NO_MASK, |_| masks.len() as u32));
            masks.extend(row.allowed.iter().flatten());
            words.push(0);
        }
        assert_eq!(words.len(), rows.len() * 22);
        Self { words, biases, ids, masks }
    }
}

/// Runs the kernel on `logits [rows, stride]`.
pub(crate) fn sample(logits: &[f32], stride: usize, vocab: usize, rows: &[Row]) -> Vec<Sampled> {
    let Lists { words, biases, ids, masks } = Lists::of(rows);
    let n = rows.len();
    let args = [
        f32s(logits),
        u32s(&words),
        u32s(&biases),
        u32s(&ids),
        u32s(&masks),
        poison_f32(n * vocab),
        u32s(&vec![0; n * vocab]),
        poison_f32(n * 4),
        poison_f32(n * TOP_STRIDE),
        poison_f32(n * TOP_STRIDE),
        Arg::U32(stride as u32),
        Arg::U32(vocab as u32),
        Arg::U32(TOP_STRIDE as u32),
        Arg::Null,
    ];
    let buffers = launch("tutti_sample", [n, 1, 1], 1024).run(&args);
    assert!(buffers[6].iter().all(|&byte| byte == 0), "counts are left behind");
    let wanted = |i: usize| {
        let rows: &Row = &rows[i];
        (rows.params.logprobs.unwrap_or(0) as usize).min(vocab).min(TOP_STRIDE)
    };
    results(&buffers[7], &buffers[8], &buffers[9], wanted)
}

fn assert_same(got: &Sampled, want: &Sampled, what: &str) {
    assert_eq!(
        (got.corrupted, got.token, got.rank),
        (want.corrupted, want.token, want.rank),
        "{what}"
    );
    assert_close(got.logprob, f64::from(want.logprob), 2e-5, what);
    assert_eq!(got.top.len(), want.top.len(), "{what}");
    for (got, want) in got.top.iter().zip(&want.top) {
        assert_eq!(got.0, want.0, "{what}");
        if want.1.is_finite() {
            assert_close(got.1, f64::from(want.1), 2e-5, what);
        } else {
            assert_eq!(got.1, want.1, "{what}");
        }
    }
}

pub(crate) fn compare(
    logits: &[f32],
    stride: usize,
    vocab: usize,
    rows: &[Row],
    what: &str,
) -> Vec<Sampled> {
    let got = sample(logits, stride, vocab, rows);
    let (mut backend, buffer) = reference(logits, stride);
    let given: Vec<SampleRow<'_>> = rows
        .iter()
        .map(|row| SampleRow {
            params: &row.params,
            prompt: &row.prompt,
            output: &row.output,
            allowed: row.allowed.as_deref(),
        })
        .collect();
    let mut want = Vec::new();
    backend.sample(&buffer, vocab, 0, &given, &mut want).unwrap();
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        assert_same(got, want, &format!("{what}, row {i}, {:?}", rows[i].params));
    }
    got
}

/// Logits like a model's: a bell curve with a few peaks, some ties, some -infinity.
pub(crate) fn row_of_logits(random: &mut Random, vocab: usize) -> Vec<f32> {
    (0..vocab)
        .map(|_| {
            let bell = (0..4).map(|_| random.f32()).sum::<f32>() * 2.5;
            match random.below(100) {
                0 => bell + 6.0,
                1 => f32::NEG_INFINITY,
                2..10 => bell.round(),
                _ => bell,
            }
        })
        .collect()
}

pub(crate) fn random_row(random: &mut Random, vocab: usize) -> Row {
    let one_of = |random: &mut Random, list: &[f32]| list[random.below(list.len())];
    let ids = |random: &mut Random, most: usize| -> Vec<u32> {
        let n = random.below(most + 1);
        // Repeated tokens, some beyond the vocabulary.
        (0..n).map(|_| random.below(vocab.min(20)) as u32 * (1 + random.below(3) as u32)).collect()
    };
    let mut p = SampleParams {
        temperature: one_of(random, &[0.0, 0.3, 0.8, 1.0, 1.0, 1.7, 0.01, 1e-40]),
        top_p: one_of(random, &[1.0, 1.0, 0.95, 0.5, 0.1, 1e-6]),
        top_k: [0, 0, 1, 2, 5, 40, 1500, 1 << 30][random.below(8)],
        min_p: one_of(random, &[0.0, 0.0, 0.0, 0.05, 0.5, 1.0]),
        seed: random.next(),
        choice: random.below(3) as u32,
        logprobs: [None, Some(0), Some(1), Some(5), Some(8)][random.below(5)],
        ..params()
    };
    if random.below(2) == 0 {
        p.repetition_penalty = one_of(random, &[1.0, 1.3, 0.7]);
        p.presence_penalty = one_of(random, &[0.0, 0.5, -0.5]);
        p.frequency_penalty = one_of(random, &[0.0, 0.25, -1.0]);
    }
    if random.below(3) == 0 {
        let biased = ids(random, 6);
        p.logit_bias = biased.into_iter().map(|id| (id, 3.0 * random.f32())).collect();
        p.suppress_until_min = ids(random, 3);
        p.min_tokens = random.below(8) as u32;
    }
    Row { params: p, prompt: ids(random, 12), output: ids(random, 6), allowed: None }
}

#[test]
fn sampling_chooses_the_references_tokens() {
    let mut random = Random(41);
    let mut greedy = 0;
    for (vocab, stride, n) in
        [(384, 384, 40), (1, 4, 4), (33, 40, 30), (1025, 1028, 30), (5003, 5003, 20)]
    {
        let rows: Vec<Row> = (0..n).map(|_| random_row(&mut random, vocab)).collect();
        greedy += rows.iter().filter(|row| row.params.temperature == 0.0).count();
        let mut logits = Vec::new();
        for _ in 0..n {
            logits.extend(row_of_logits(&mut random, vocab));
            // After the vocabulary there is padding that would win.
            logits.resize(logits.len() + stride - vocab, 1e9);
        }
        if vocab == 1 {
            logits = logits.chunks(4).flat_map(|_| [0.5, 1e9, 1e9, 1e9]).collect();
        }
        compare(&logits, stride, vocab, &rows, &format!("vocab {vocab}"));
    }
    assert!(greedy > 5, "{greedy}");
}

#[test]
fn equal_logits_go_by_id() {
    let vocab = 700;
    let flat = vec![0.25f32; vocab];
    // Only ties: the digits of the ids decide.
    let variants = [(0, 1.0), (1, 1.0), (7, 1.0), (300, 0.4), (0, 0.333), (0, 1e-9)];
    let mut rows = vec![Row::of(SampleParams { temperature: 0.0, logprobs: Some(3), ..params() })];
    for (top_k, top_p) in variants {
        for seed in 0..4 {
            rows.push(Row::of(SampleParams { top_k, top_p, seed, ..params() }));
        }
    }
    let logits: Vec<f32> = rows.iter().flat_map(|_| flat.clone()).collect();
    let got = compare(&logits, vocab, vocab, &rows, "ties");
    assert_eq!(got[0].token, 0);
    assert_eq!(got[0].top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [0, 1, 2]);
    for (row, got) in rows.iter().zip(&got) {
        if row.params.top_k > 0 {
            assert!(got.token < row.params.top_k);
        }
    }
}

#[test]
fn draws_are_spread_as_the_weights_are() {
    // 4 tokens with weights 8 : 4 : 2 : 2, drawn in every way.
    let logits = [8.0f32, 2.0, 4.0, 2.0].map(f32::ln);
    // The last two cut nothing, so they draw in id order, like the first.
    for (top_k, top_p) in [(0, 1.0), (3, 1.0), (0, 0.99), (4, 1.0), (5, 1.0)] {
        let n = 128;
        let rows: Vec<Row> = (0..n as u64)
            .map(|seed| Row::of(SampleParams { seed, top_k, top_p, ..params() }))
            .collect();
        let got = compare(&logits.repeat(n), 4, 4, &rows, "spread");
        let share = |id: u32| got.iter().filter(|row| row.token == id).count() as f64 / n as f64;
        let all = if top_k == 3 { 14.0 } else { 16.0 };
        // 128 draws with p = 1/2: a standard deviation of 4.4 %. The seeds are fixed.
        assert!((share(0) - 8.0 / all).abs() < 0.15, "{}", share(0));
        assert!((share(2) - 4.0 / all).abs() < 0.15, "{}", share(2));
        assert_eq!(share(3) == 0.0, top_k == 3);
    }
}

#[test]
fn corrupted_rows_say_so() {
    let mut random = Random(43);
    let good = random.vec(40);
    let with = |at: usize, x: f32| {
        let mut row = good.clone();
        row[at] = x;
        row
    };
    let rows = [
        good.clone(),
        with(39, f32::NAN),
        with(0, f32::INFINITY),
        vec![f32::NEG_INFINITY; 40],
        with(3, f32::NEG_INFINITY),
    ];
    let wanted = [0, 1, 1, 1, 0];
    let settings = vec![Row::of(SampleParams { logprobs: Some(2), ..params() }); 5];
    let got = compare(&rows.concat(), 40, 40, &settings, "corrupted");
    assert_eq!(got.iter().map(|row| u32::from(row.corrupted)).collect::<Vec<_>>(), wanted);

    // Suppressing all remaining tokens, or a bias that is not finite.
    let one = (0..40).map(|i| if i == 7 { good[i] } else { f32::NEG_INFINITY });
    let suppress = SampleParams { suppress_until_min: vec![7], min_tokens: 1, ..params() };
    let infinite = SampleParams { logit_bias: vec![(2, f32::INFINITY)], ..params() };
    let settings = [Row::of(suppress), Row::of(infinite)];
    let logits: Vec<f32> = one.chain(good.iter().copied()).collect();
    let got = compare(&logits, 40, 40, &settings, "corrupted by edits");
    assert!(got.iter().all(|row| row.corrupted));

    let args = [
        f32s(&rows.concat()),
        Arg::Null,
        Arg::Null,
        poison_f32(10),
        Arg::U32(40),
        Arg::U32(40),
        Arg::U32(100),
        Arg::Null,
    ];
    let found = read_u32(&launch("tutti_argmax", [5, 1, 1], 1024).run(&args)[1]);
    for (row, found) in rows.iter().zip(found.chunks(2)) {
        let best = (0..40).reduce(|a, b| if row[b] > row[a] { b } else { a }).unwrap();
        if row.iter().all(|&x| x < f32::INFINITY) && row[best].is_finite() {
            assert_eq!(found, [100 + best as u32, row[best].to_bits()]);
        } else if row.iter().all(|&x| x == f32::NEG_INFINITY) {
            // Other parts of the vocabulary decide.
            assert_eq!(found, [u32::MAX - 1, f32::NEG_INFINITY.to_bits()]);
        } else {
            assert_eq!(found, [u32::MAX, 0]);
        }
    }
}

#[test]
fn the_best_of_all_parts_is_the_best_of_the_whole() {
    let (ranks, rows, width) = (3, 300, 7);
    let mut random = Random(46);
    // Few distinct values: ties within parts and across them.
    let values = [-1.0, 0.0, 0.5, 0.5, f32::NEG_INFINITY, 2.0];
    let mut whole: Vec<Vec<f32>> = (0..rows)
        .map(|row| {
            let mut value = || values[(random.next() % (5 + u64::from(row % 3 == 0))) as usize];
            (0..ranks * width).map(|_| value()).collect()
        })
        .collect();
    // A part without any token, and a row without any.
    whole[5][width..2 * width].fill(f32::NEG_INFINITY);
    whole[6].fill(f32::NEG_INFINITY);
    let mut found = Vec::new();
    let best = |row: &[f32]| {
        (0..row.len()).reduce(|a, b| if row[b] > row[a] { b } else { a }).unwrap_or_default()
    };
    for rank in 0..ranks {
        for (index, row) in whole.iter().enumerate() {
            let part = &row[rank * width..][..width];
            let at = best(part);
            match part[at] {
                _ if index == 17 && rank == 1 => found.extend([u32::MAX, 0]),
                f32::NEG_INFINITY => found.extend([u32::MAX - 1, part[at].to_bits()]),
                _ => found.extend([(rank * width + at) as u32, part[at].to_bits()]),
            }
        }
    }
    let args = [
        u32s(&found),
        poison_f32(rows * 4),
        Arg::U32(ranks as u32),
        Arg::U32(rows as u32),
        Arg::Null,
    ];
    let out = read_u32(&launch("tutti_argmax_merge", [2, 1, 1], 256).run(&args)[1]);
    for (index, row) in whole.iter().enumerate() {
        let is_bad = |rank| found[(rank * rows + index) * 2] == u32::MAX;
        let is_corrupted = (0..ranks).any(is_bad) || index == 6;
        let expected = if is_corrupted { [0, 1, 0, 0] } else { [best(row) as u32, 0, 0, 0] };
        assert_eq!(out[index * 4..][..4], expected, "row {index}");
    }
}

#[test]
fn an_ids_biases_add_up_in_order() {
    let vocab = 50;
    // 1e8 - 1e8 + 1 is 1 only in this order.
    let bias = vec![(5, 1e8), (9, 2.0), (5, -1e8), (5, 1.0), (9, -4.0), (60, 9.0)];
    let row =
        Row::of(SampleParams { logit_bias: bias, temperature: 0.0, logprobs: None, ..params() });
    let logits = vec![0.5f32; vocab];
    let got = compare(&logits, vocab, vocab, &[row], "biases");
    assert_eq!(got[0].token, 5);
}

#[test]
fn log_probabilities_match_the_reference() {
    let mut random = Random(44);
    for (vocab, stride, top_n) in [(384, 384, 5), (3, 5, 8), (4099, 4100, 0), (1, 1, 1)] {
        let n = 6;
        let mut logits = Vec::new();
        for _ in 0..n {
            let row = if vocab == 1 { vec![0.5] } else { row_of_logits(&mut random, vocab) };
            logits.extend(row);
            logits.resize(logits.len() + stride - vocab, 1e9);
        }
        logits[2 * stride] = 50.0;
        if vocab > 1 {
            logits[4 * stride + 1] = f32::NAN;
        }
        let targets: Vec<u32> = (0..n).map(|_| random.below(vocab) as u32).collect();
        let args = [
            f32s(&logits),
            u32s(&targets),
            poison_f32(n * 4),
            poison_f32(n * TOP_STRIDE),
            poison_f32(n * TOP_STRIDE),
            Arg::U32(stride as u32),
            Arg::U32(vocab as u32),
            Arg::U32(top_n),
            Arg::U32(TOP_STRIDE as u32),
            Arg::Null,
        ];
        let buffers = launch("tutti_logprobs", [n, 1, 1], 1024).run(&args);
        let wanted = (top_n as usize).min(vocab);
        let got = results(&buffers[2], &buffers[3], &buffers[4], |_| wanted);
        let (mut backend, buffer) = reference(&logits, stride);
        let mut want = Vec::new();
        backend.logprobs(&buffer, vocab, 0, &targets, top_n, &mut want).unwrap();
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            if want.logprob == f32::NEG_INFINITY {
                assert_eq!((got.logprob, got.rank), (want.logprob, want.rank));
            } else {
                assert_same(got, want, &format!("vocab {vocab}, row {i}"));
            }
        }
    }
}
