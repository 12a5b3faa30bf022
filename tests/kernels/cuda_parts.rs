//! Emulated sampling from a vocabulary in parts, with top-k, compared with sampling from the whole
//! rows: by the kernel that does that, and by the reference backend.
use kernels::sampling::SampleParams;

use crate::cuda_emulation::{Arg, f32s, launch, poison_f32, read_u32, u32s};
use crate::cuda_sampling::{Lists, Row, compare, params, row_of_logits};
use crate::masks::{allows, random_mask};
use crate::support::Random;

/// Rows of logits over a vocabulary that ranks have parts of.
struct Case {
    ranks: usize,
    /// Tokens of every part but the last, which has fewer.
    width: usize,
    vocab: usize,
    /// Elements from one row of a part to the next.
    stride: usize,
    /// Keys that are exchanged for each row.
    most: usize,
    rows: Vec<Row>,
    logits: Vec<Vec<f32>>,
}

/// Parameters with which few tokens can be chosen.
fn choosy(random: &mut Random, top_k: u32) -> SampleParams {
    let one_of = |random: &mut Random, list: &[f32]| list[random.below(list.len())];
    SampleParams {
        temperature: one_of(random, &[0.0, 0.3, 0.8, 1.0, 1.0, 1.7, 30.0, 0.01, 1e-40]),
        top_p: one_of(random, &[1.0, 1.0, 0.95, 0.5, 0.1, 1e-6]),
        top_k,
        min_p: one_of(random, &[0.0, 0.0, 0.0, 0.05, 0.5, 1.0]),
        seed: random.next(),
        choice: random.below(3) as u32,
        logprobs: None,
        ..params()
    }
}

impl Case {
    /// `width` and `vocab` leave the last part a few tokens fewer.
    fn new(random: &mut Random, (ranks, width): (usize, usize), most: usize, n: usize) -> Self {
        let vocab = ranks * width - width / 3;
        let mut rows = Vec::new();
        let mut logits = Vec::new();
        for index in 0..n {
            let top_k = [1, 2, 5, 20, 40, 64, 65, 100, 128][random.below(9)].min(most as u32);
            let params = choosy(random, top_k.min(vocab as u32 - 1));
            let mut row = Row::of(params);
            row.output = vec![3; random.below(4)];
            row.allowed = (random.below(3) == 0).then(|| random_mask(random, vocab));
            rows.push(row);
            let mut row = row_of_logits(random, vocab);
            // A part without any token, only ties, and what is corrupted.
            let part = index % ranks * width..((index % ranks + 1) * width).min(vocab);
            match index % 9 {
                3 => row[part].fill(f32::NEG_INFINITY),
                5 => row.iter_mut().for_each(|x| *x = x.round()),
                7 => row.fill(0.25),
                8 if index > 30 => row[part.start] = f32::NAN,
                8 if index > 20 => row[part.start] = f32::INFINITY,
                8 if index > 10 => row.fill(f32::NEG_INFINITY),
                _ => {}
            }
            logits.push(row);
        }
        let stride = if ranks == 4 { width.next_multiple_of(4) } else { width + 1 };
        Self { ranks, width, vocab, stride, most, rows, logits }
    }

    fn part(&self, rank: usize) -> std::ops::Range<usize> {
        rank * self.width..((rank + 1) * self.width).min(self.vocab)
    }

    /// The keys that a rank finds. A last row, which is not live, stays as it was.
    fn keys(&self, rank: usize, lists: &Lists) -> Vec<u64> {
        let part = self.part(rank);
        let mut own = Vec::new();
        for row in &self.logits {
            own.extend(&row[part.clone()]);
            // Padding that would win.
            own.resize(own.len() + self.stride - part.len(), 1e9);
        }
        own.resize(own.len() + self.stride, 0.0);
        let n = self.rows.len();
        let args = [
            f32s(&own),
            u32s(&lists.words),
            u32s(&lists.masks),
            poison_f32((n + 1) * self.most * 2),
            Arg::U32(self.stride as u32),
            Arg::U32(part.len() as u32),
            Arg::U32(part.start as u32),
            Arg::U32(self.most as u32),
            u32s(&[n as u32]),
        ];
        let found = read_u32(&launch("tutti_best_keys", [n + 1, 1, 1], 1024).run(&args)[3]);
        let (pairs, _) = found.as_chunks::<2>();
        pairs.iter().map(|[low, high]| u64::from(*high) << 32 | u64::from(*low)).collect()
    }

    /// The tokens that all ranks choose, or `None` for rows that are corrupted.
    fn tokens(&self) -> Vec<Option<u32>> {
        let lists = Lists::of(&self.rows);
        let (n, most) = (self.rows.len(), self.most);
        let mut all = Vec::new();
        for rank in 0..self.ranks {
            let keys = self.keys(rank, &lists);
            let (last, keys) = (&keys[n * most..], &keys[..n * most]);
            assert!(last.iter().all(|&key| key == u64::MAX), "a row that is not live");
            for (row, keys) in keys.chunks(most).enumerate() {
                self.check(row, rank, keys);
            }
            all.extend(keys.iter().flat_map(|key| [*key as u32, (key >> 32) as u32]));
            // Rows beyond the live ones: as at the end of a graph.
            all.extend(vec![0x3f80_0000; most * 2]);
        }
        let args = [
            u32s(&all),
            u32s(&lists.words),
            poison_f32((n + 1) * 4),
            Arg::U32(self.ranks as u32),
            Arg::U32(n as u32 + 1),
            Arg::U32(most as u32),
            u32s(&[n as u32]),
        ];
        let out = read_u32(&launch("tutti_draw_best", [n + 1, 1, 1], 1024).run(&args)[2]);
        assert!(out[n * 4..].iter().all(|&word| word == u32::MAX), "a row that is not live");
        let token = |words: &[u32]| {
            assert!(words[1] < 2 && words[2..] == [0, 0] && (words[1] == 0 || words[0] == 0));
            (words[1] == 0).then_some(words[0])
        };
        out[..n * 4].chunks(4).map(token).collect()
    }

    /// Compares a rank's keys with its part's tokens in their order.
    fn check(&self, row: usize, rank: usize, keys: &[u64]) {
        let (logits, part) = (&self.logits[row], self.part(rank));
        let Row { params, allowed, .. } = &self.rows[row];
        let at = format!("row {row}, rank {rank} of {}, {params:?}", self.ranks);
        if logits[part.clone()].iter().any(|x| x.is_nan() || *x == f32::INFINITY) {
            assert_eq!(keys[0], u64::MAX, "{at}");
            assert!(keys[1..].iter().all(|&key| key == 0), "{at}");
            return;
        }
        let is_there = |id: &usize| {
            let mask = allowed.as_deref();
            logits[*id] > f32::NEG_INFINITY && mask.is_none_or(|mask| allows(mask, *id))
        };
        let mut ids: Vec<usize> = part.filter(is_there).collect();
        // Stable: the first of equal ones stays so.
        ids.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
        let wanted = if params.temperature == 0.0 { 1 } else { params.top_k as usize };
        ids.truncate(wanted);
        let found: Vec<usize> = keys
            .iter()
            .take_while(|key| **key != 0)
            .map(|key| (u32::MAX - *key as u32) as usize)
            .collect();
        assert!(keys[found.len()..].iter().all(|&key| key == 0), "{at}");
        assert_eq!(found, ids[..found.len().min(ids.len())], "{at}");
        // What is left out has no weight, whatever other parts have: 2^-40 is the least.
        if let Some(out) = ids.get(found.len()) {
            let distance = f64::from(logits[ids[0]]) - f64::from(logits[*out]);
            let bits = distance / f64::from(params.temperature) * std::f64::consts::LOG2_E;
            let least = f64::from(params.min_p).max(2f64.powi(-40));
            assert!(!found.is_empty() && bits > -least.log2(), "{at}: {bits}");
        }
    }

    /// The same tokens as from whole rows, by either sampler; returns them.
    fn check_tokens(&self) -> Vec<Option<u32>> {
        let found = self.tokens();
        let whole = self.logits.concat();
        let expected = compare(&whole, self.vocab, self.vocab, &self.rows, "whole rows");
        for (row, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let expected = (!expected.corrupted).then_some(expected.token);
            let Row { params, allowed, .. } = &self.rows[row];
            let masked = allowed.is_some();
            assert_eq!(*found, expected, "row {row}, masked {masked}, {params:?}");
        }
        found
    }
}

#[test]
fn top_k_of_all_parts_gives_the_tokens_of_whole_rows() {
    let mut random = Random(71);
    let mut kinds = [0; 3];
    let shapes = [((2, 45), 64), ((4, 257), 128), ((8, 301), 128), ((3, 70), 64)];
    for (shape, most) in shapes {
        let case = Case::new(&mut random, shape, most, 24);
        for (row, token) in case.check_tokens().into_iter().enumerate() {
            let Row { params, allowed, .. } = &case.rows[row];
            let best = |x: &f32| case.logits[row].iter().all(|other| other <= x);
            kinds[0] += u32::from(token.is_none());
            kinds[1] += u32::from(allowed.is_some() && params.temperature > 0.0);
            kinds[2] += u32::from(token.is_some_and(|id| !best(&case.logits[row][id as usize])));
        }
    }
    // Corrupted ones, masked ones, and draws that are not simply the best.
    assert!(kinds[0] >= 8 && kinds[1] > 18 && kinds[2] > 15, "{kinds:?}");
}

/// Parts with more equal logits at the cut than a list holds, with as many as it holds behind
/// better ones, and with few that are far from the rest.
#[test]
fn top_k_of_parts_with_crowds_gives_the_tokens_of_whole_rows() {
    let mut random = Random(72);
    let mut case = Case::new(&mut random, (2, 3000), 128, 5);
    for (index, row) in case.logits.iter_mut().enumerate() {
        match index {
            0 => row.fill(1.5),
            1 => row.iter_mut().enumerate().for_each(|(id, x)| {
                *x = if id % 101 == 7 { 3.0 } else { 1.5 };
            }),
            2 => row.iter_mut().enumerate().for_each(|(id, x)| {
                *x = if id % 3 == 1 { 1.5 } else { 1.5 - 1e-6 * (id % 7) as f32 };
            }),
            3 => row.iter_mut().enumerate().for_each(|(id, x)| {
                *x = if id % 2900 == 11 { 60.0 } else { 0.5 };
            }),
            _ => {}
        }
    }
    for row in &mut case.rows {
        row.params = SampleParams {
            temperature: 1.3,
            top_k: 128,
            top_p: 0.97,
            min_p: 0.0,
            ..row.params.clone()
        };
        row.allowed = None;
    }
    case.rows[1].allowed = Some(random_mask(&mut random, case.vocab));
    case.check_tokens();
}
