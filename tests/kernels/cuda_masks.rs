//! Emulated masked sampling compared with the reference backend; and the arg-max over parts of a
//! vocabulary compared with plain loops.
use kernels::sampling::SampleParams;

use crate::cuda_emulation::{Arg, f32s, launch, poison_f32, read_u32, u32s};
use crate::cuda_sampling::{NO_MASK, Row, compare, params, random_row, row_of_logits};
use crate::masks::{allows, random_mask};
use crate::support::Random;

const CORRUPTED: u32 = u32::MAX;
const NOTHING_ALLOWED: u32 = u32::MAX - 1;

#[test]
fn masked_sampling_chooses_the_references_tokens() {
    let mut random = Random(61);
    let mut kinds = [0; 3];
    for (vocab, stride, n) in
        [(384, 384, 40), (1, 4, 4), (33, 40, 30), (1025, 1028, 40), (5003, 5003, 20)]
    {
        let mut rows: Vec<Row> = (0..n).map(|_| random_row(&mut random, vocab)).collect();
        for row in &mut rows {
            row.allowed = (random.below(6) > 0).then(|| random_mask(&mut random, vocab));
        }
        let mut logits = Vec::new();
        for _ in 0..n {
            logits.extend(row_of_logits(&mut random, vocab));
            // After the vocabulary there is padding that would win.
            logits.resize(logits.len() + stride - vocab, 1e9);
        }
        if vocab == 1 {
            logits = logits.chunks(4).flat_map(|_| [0.5, 1e9, 1e9, 1e9]).collect();
        }
        let found = compare(&logits, stride, vocab, &rows, &format!("masks, vocab {vocab}"));
        for (row, found) in rows.iter().zip(found) {
            let Some(mask) = &row.allowed else { continue };
            assert!(found.corrupted || allows(mask, found.token as usize));
            kinds[0] += 1;
            kinds[1] += u32::from(found.corrupted);
            kinds[2] += u32::from(found.rank > 1);
        }
    }
    // Includes masks that leave nothing, and masks that exclude the most likely token.
    assert!(kinds[0] > 90 && kinds[1] > 2 && kinds[2] > 20, "{kinds:?}");
}

#[test]
fn what_is_wrong_beside_the_mask_is_noticed() {
    let greedy = || SampleParams { temperature: 0.0, ..params() };
    let row = |params, mask: u32| Row { allowed: Some(vec![mask, 0]), ..Row::of(params) };
    let good: Vec<f32> = (0..40u8).map(f32::from).collect();
    let mut bad = good.clone();
    bad[39] = f32::NAN;
    let rows = [
        row(greedy(), 0b1010),
        row(greedy(), 0),
        row(params(), 0b1010),
        row(params(), 0),
        row(greedy(), 0b1010),
        row(SampleParams { logit_bias: vec![(1, 9.0), (5, 99.0)], ..greedy() }, 0b1010),
    ];
    let logits = [&good, &good, &good, &good, &bad, &good].map(Vec::as_slice).concat();
    let found = compare(&logits, 40, 40, &rows, "masks");
    let corrupted: Vec<bool> = found.iter().map(|found| found.corrupted).collect();
    assert_eq!(corrupted, [false, true, false, true, true, false]);
    assert_eq!((found[0].token, found[5].token), (3, 1));
}

/// The best of each part, then the best of those, compared with a loop over the whole vocabulary.
/// Parts begin within a word of the mask, and the rows' masks lie among unrelated words.
#[test]
fn the_best_allowed_of_all_parts_is_the_best_allowed_of_the_whole() {
    let mut random = Random(62);
    let rows = 60;
    for (ranks, width) in [(1, 70), (2, 45), (3, 7), (4, 257), (4, 64)] {
        let vocab = ranks * width;
        // Few distinct values: ties within parts and across them.
        let values = [-1.0, 0.0, 0.5, 0.5, f32::NEG_INFINITY, 2.0, f32::NAN];
        let mut whole: Vec<Vec<f32>> = (0..rows)
            .map(|row| (0..vocab).map(|_| values[random.below(6 + row / 55)]).collect())
            .collect();
        // In some rows one part is all -infinity, in others the whole row: only the latter is
        // corrupted.
        for row in (3..rows).step_by(7) {
            let first = row % ranks * width;
            whole[row][first..first + width].fill(f32::NEG_INFINITY);
        }
        whole[12].fill(f32::NEG_INFINITY);
        let mut masks = vec![u32::MAX; 5];
        let mut words = vec![0xdead_beef_u32; rows * 22];
        let allowed: Vec<Option<Vec<u32>>> = (0..rows)
            .map(|row| {
                let mask = (random.below(5) > 0).then(|| random_mask(&mut random, vocab));
                words[row * 22 + 20] = mask.as_ref().map_or(NO_MASK, |_| masks.len() as u32);
                masks.extend(mask.iter().flatten());
                mask
            })
            .collect();
        let mut all = Vec::new();
        for rank in 0..ranks {
            let parts: Vec<f32> =
                whole.iter().flat_map(|row| &row[rank * width..][..width]).copied().collect();
            let args = [
                f32s(&parts),
                u32s(&words),
                u32s(&masks),
                poison_f32(rows * 2),
                Arg::U32(width as u32),
                Arg::U32(width as u32),
                Arg::U32((rank * width) as u32),
                Arg::Null,
            ];
            let found = read_u32(&launch("tutti_argmax", [rows, 1, 1], 1024).run(&args)[3]);
            for (row, found) in found.chunks(2).enumerate() {
                let mask = allowed[row].as_deref();
                let first = rank * width;
                assert_eq!(found, best(&whole[row], mask, first..first + width), "row {row}");
            }
            all.extend(found);
        }
        let args = [
            u32s(&all),
            poison_f32(rows * 4),
            Arg::U32(ranks as u32),
            Arg::U32(rows as u32),
            Arg::Null,
        ];
        let merged = read_u32(&launch("tutti_argmax_merge", [1, 1, 1], 256).run(&args)[1]);
        let mut kinds = [0; 4];
        for (row, merged) in merged.chunks(4).enumerate() {
            let mask = allowed[row].as_deref();
            let parts = (0..ranks).map(|rank| rank * width..(rank + 1) * width);
            let is_corrupted =
                parts.clone().any(|part| best(&whole[row], mask, part)[0] == CORRUPTED);
            let [id, _] = best(&whole[row], mask, 0..vocab);
            let wanted = if is_corrupted || id >= NOTHING_ALLOWED { [0, 1] } else { [id, 0] };
            assert_eq!(merged, [wanted[0], wanted[1], 0, 0], "row {row}");
            let only_elsewhere = parts.map(|part| best(&whole[row], mask, part)[0]);
            kinds[0] += u32::from(wanted[1] == 0);
            kinds[1] += u32::from(wanted[1] == 1);
            kinds[2] += u32::from(only_elsewhere.into_iter().any(|id| id == NOTHING_ALLOWED));
            let is_empty = |part: &[f32]| part.iter().all(|&x| x == f32::NEG_INFINITY);
            let has_empty = whole[row].chunks(width).any(is_empty);
            kinds[3] += u32::from(has_empty && (wanted[1] == 0 || ranks == 1));
        }
        assert!(kinds.iter().all(|&count| count > 0), "{kinds:?} of {ranks} ranks");
    }
}

/// Id and bits of the largest allowed logit in `part`, or the marker for none. Whether a row
/// without any is corrupted depends on its other parts.
fn best(row: &[f32], mask: Option<&[u32]>, part: std::ops::Range<usize>) -> [u32; 2] {
    if row[part.clone()].iter().any(|x| x.is_nan()) {
        return [CORRUPTED, 0];
    }
    let (mut id, mut largest) = (NOTHING_ALLOWED, f32::NEG_INFINITY);
    for token in part {
        if mask.is_none_or(|mask| allows(mask, token)) && row[token] > largest {
            (id, largest) = (token as u32, row[token]);
        }
    }
    [id, largest.to_bits()]
}
