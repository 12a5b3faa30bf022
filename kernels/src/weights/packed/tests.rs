//! The packings against each other and against known values, and which matrices stay in 4 bits.
use super::*;

const ROWS: usize = 16;
const COLS: usize = 24;
const GROUP: usize = 8;

fn integer(row: usize, col: usize) -> u32 {
    ((row * 7 + col * 5 + row * col) % 16) as u32
}

fn zero(row: usize, group: usize) -> u32 {
    ((row * 3 + group * 11) % 16) as u32
}

fn scale(row: usize, group: usize) -> f32 {
    0.25 + row as f32 * 0.125 + group as f32
}

/// A word with 8 integers at shifts `place(i) * 4`.
fn word(value: impl Fn(usize) -> u32, place: impl Fn(usize) -> u32) -> [u8; 4] {
    (0..8).fold(0u32, |word, i| word | (value(i) & 15) << (place(i) * 4)).to_le_bytes()
}

struct File {
    packing: Packing,
    words: Vec<u8>,
    zeros: Vec<u8>,
    scales: Vec<u8>,
}

impl File {
    fn new(packing: Packing) -> Self {
        let (groups, straight) = (COLS / GROUP, |i: usize| i as u32);
        // AutoAWQ's order: the output at each place.
        let order = [0, 2, 4, 6, 1, 3, 5, 7];
        let awq = |i: usize| order.iter().position(|at| *at == i).unwrap() as u32;
        let (mut words, mut zeros, mut scales) = (vec![], vec![], vec![]);
        match packing {
            Packing::Gptq { zero_less } => {
                for (c, r) in (0..COLS / 8).flat_map(|c| (0..ROWS).map(move |r| (c, r))) {
                    words.extend(word(|i| integer(r, c * 8 + i), straight));
                }
                for (g, r) in (0..groups).flat_map(|g| (0..ROWS / 8).map(move |r| (g, r))) {
                    let less = |i| zero(r * 8 + i, g).wrapping_sub(zero_less);
                    zeros.extend(word(less, straight));
                }
            }
            Packing::Awq => {
                for (c, r) in (0..COLS).flat_map(|c| (0..ROWS / 8).map(move |r| (c, r))) {
                    words.extend(word(|i| integer(r * 8 + i, c), awq));
                }
                for (g, r) in (0..groups).flat_map(|g| (0..ROWS / 8).map(move |r| (g, r))) {
                    zeros.extend(word(|i| zero(r * 8 + i, g), awq));
                }
            }
            Packing::Compressed | Packing::Mxfp4 { .. } => {
                for (r, c) in (0..ROWS).flat_map(|r| (0..COLS / 8).map(move |c| (r, c))) {
                    words.extend(word(|i| integer(r, c * 8 + i), straight));
                }
                for (r, g) in (0..ROWS / 8).flat_map(|r| (0..groups).map(move |g| (r, g))) {
                    zeros.extend(word(|i| zero(r * 8 + i, g), straight));
                }
            }
        }
        let by_row = packing == Packing::Compressed;
        for i in 0..ROWS * groups {
            let (r, g) = if by_row { (i / groups, i % groups) } else { (i % ROWS, i / ROWS) };
            scales.extend(scale(r, g).to_le_bytes());
        }
        Self { packing, words, zeros, scales }
    }

    fn packed(&self) -> Packed<'_> {
        Packed {
            packing: self.packing,
            bits: 4,
            rows: ROWS,
            cols: COLS,
            words: &self.words,
            zeros: Some(&self.zeros),
            scales: &self.scales,
            scale_type: DType::F32,
            num_groups: COLS / GROUP,
            groups: Groups::Even(GROUP),
            first_row: 0,
        }
    }
}

fn matrix(packed: Packed<'_>, rows: usize, cols: std::ops::Range<usize>) -> HostMatrix<'_> {
    HostMatrix {
        data: &[],
        dtype: DType::Packed,
        rows,
        cols: cols.len(),
        col_start: cols.start,
        row_stride: packed.cols,
        scales: Some(Scales::Packed(packed)),
    }
}

const PACKINGS: [Packing; 4] = [
    Packing::Gptq { zero_less: 1 },
    Packing::Gptq { zero_less: 0 },
    Packing::Awq,
    Packing::Compressed,
];

#[test]
fn every_packing_gives_the_same_numbers_from_any_rectangle() {
    for file in PACKINGS.map(File::new) {
        for (first_row, rows) in [(0, 16), (3, 9), (15, 1)] {
            for cols in [0..24, 8..24, 5..6, 3..21] {
                let part = matrix(Packed { first_row, ..file.packed() }, rows, cols.clone());
                part.check("test", cols.len()).unwrap();
                let mut out = vec![f32::NAN; cols.len()];
                for row in 0..rows {
                    part.row_f32(row, &mut out);
                    let row = row + first_row;
                    for (col, got) in cols.clone().zip(&out) {
                        let group = col / GROUP;
                        let steps = integer(row, col) as f32 - zero(row, group) as f32;
                        let want = steps * scale(row, group);
                        assert_eq!(*got, want, "{:?} {row} {col}", file.packing);
                    }
                }
            }
        }
    }
}

/// From OCP's table of E2M1; a byte has two neighbours, with the first in its lower bits.
#[test]
fn floats_of_4_bits_have_their_known_values() {
    let known = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let words: Vec<u8> = (0..16).map(|i| (2 * i % 16) | (2 * i % 16 + 1) << 4).collect();
    let packed = Packed {
        packing: Packing::Mxfp4 { step: 1 },
        bits: 4,
        rows: 1,
        cols: 32,
        words: &words,
        zeros: None,
        scales: &[128],
        scale_type: DType::E8M0,
        num_groups: 1,
        groups: Groups::Even(32),
        first_row: 0,
    };
    let part = matrix(packed, 1, 0..32);
    part.check("test", 32).unwrap();
    let mut out = [f32::NAN; 32];
    part.row_f32(0, &mut out);
    for (i, got) in out.into_iter().enumerate() {
        let want = known[i % 8] * if i / 8 % 2 == 1 { -2.0 } else { 2.0 };
        assert_eq!(got.to_bits(), f32::to_bits(want), "{i}");
    }
    // Every second row; rows beyond the last are zeros.
    let two = Packed { packing: Packing::Mxfp4 { step: 2 }, ..packed };
    let part = matrix(two, 2, 8..32);
    part.check("test", 24).unwrap();
    let mut out = [f32::NAN; 24];
    part.row_f32(1, &mut out);
    assert_eq!(out, [0.0; 24]);
    let (first_len, len, is_float) = (24, 32, true);
    let groups = Int4Groups { first: 0, first_len, len, count: 1, is_float };
    assert_eq!(int4_groups(&[part]), Some(groups));
    for bad in [
        Packed { words: &words[1..], ..packed },
        Packed { scales: &[], ..packed },
        Packed { bits: 8, ..packed },
    ] {
        assert!(matrix(bad, 1, 0..32).check("test", 32).is_err());
    }
}

#[test]
fn rows_behind_the_last_are_zeros() {
    for file in PACKINGS.map(File::new) {
        let part = matrix(Packed { first_row: ROWS, ..file.packed() }, 3, 0..COLS);
        part.check("test", COLS).unwrap();
        let mut out = [f32::NAN; COLS];
        part.row_f32(2, &mut out);
        assert_eq!(out, [0.0; COLS]);
    }
}

#[test]
fn inputs_may_be_listed_in_any_order() {
    let file = File::new(Packing::Gptq { zero_less: 1 });
    let list: Vec<u8> = (0..COLS as i32).flat_map(|c| (c * 5 % 3).to_le_bytes()).collect();
    let packed = Packed { groups: Groups::Listed(&list), ..file.packed() };
    let part = matrix(packed, ROWS, 2..20);
    part.check("test", 18).unwrap();
    let mut out = [f32::NAN; 18];
    for row in 0..ROWS {
        part.row_f32(row, &mut out);
        for (col, got) in (2..20).zip(out) {
            let group = col * 5 % 3;
            let steps = integer(row, col) as f32 - zero(row, group) as f32;
            assert_eq!(got, steps * scale(row, group));
        }
    }
    assert_eq!(int4_groups(&[part]), None);
    let beyond: Vec<u8> = (0..COLS as i32).flat_map(|c| (c % 4).to_le_bytes()).collect();
    for list in [&list[4..], &beyond, &[255; 4 * COLS]] {
        let packed = Packed { groups: Groups::Listed(list), ..file.packed() };
        assert!(matrix(packed, ROWS, 0..COLS).check("test", COLS).is_err());
    }
}

#[test]
fn a_number_is_rounded_once() {
    let file = File::new(Packing::Awq);
    // Not exact in bf16: (15 - 0) x scale and its neighbours need more than 8 bits.
    let scales: Vec<u8> = (0..ROWS * 3).flat_map(|_| 0.1f32.to_le_bytes()).collect();
    let part = matrix(Packed { scales: &scales, ..file.packed() }, ROWS, 0..COLS);
    let mut out = [0; COLS];
    part.row_bf16(4, &mut Vec::new(), &mut out);
    for (col, bits) in out.into_iter().enumerate() {
        let steps = integer(4, col) as f32 - zero(4, col / GROUP) as f32;
        assert_eq!(bits, half::bf16::from_f32(steps * 0.1).to_bits());
    }
}

#[test]
fn what_stays_in_4_bits_is_decided_by_the_file_and_the_columns() {
    let file = File::new(Packing::Compressed);
    let groups = |cols: std::ops::Range<usize>| int4_groups(&[matrix(file.packed(), 2, cols)]);
    let some = |first, first_len, count| {
        let (len, is_float) = (GROUP, false);
        Some(Int4Groups { first, first_len, len, count, is_float })
    };
    assert_eq!(groups(0..24), some(0, 8, 3));
    assert_eq!(groups(8..20), some(1, 8, 2));
    // Within one group there is no boundary, wherever the columns begin.
    assert_eq!(groups(3..7), some(0, 4, 1));
    assert_eq!(groups(4..16), None);
    let eights = Packed { bits: 8, ..file.packed() };
    assert_eq!(int4_groups(&[matrix(eights, 2, 0..24)]), None);
    let odd = Packed { groups: Groups::Even(12), ..file.packed() };
    assert_eq!(int4_groups(&[matrix(odd, 2, 0..24)]), None);
    assert!(int4_groups(&[matrix(odd, 2, 12..24)]).is_some());
    // All parts, or none.
    let four = matrix(file.packed(), 2, 0..24);
    assert_eq!(int4_groups(&[four, matrix(odd, 2, 0..24)]), None);
    assert_eq!(int4_groups(&[four, HostMatrix { scales: None, ..four }]), None);
    assert_eq!(int4_groups(&[four, four]), some(0, 8, 3));
    assert_eq!(int4_groups(&[]), None);
}

#[test]
fn what_does_not_fit_is_refused() {
    for file in PACKINGS.map(File::new) {
        let good = file.packed();
        for bad in [
            Packed { words: &good.words[1..], ..good },
            Packed { zeros: Some(&file.zeros[4..]), ..good },
            Packed { scales: &good.scales[4..], ..good },
            Packed { groups: Groups::Even(0), ..good },
            Packed { groups: Groups::Even(7), ..good },
            Packed { bits: 3, ..good },
            Packed { rows: usize::MAX, ..good },
            Packed { num_groups: usize::MAX, ..good },
        ] {
            assert!(matrix(bad, 2, 0..COLS).check("test", COLS).is_err(), "{bad:?}");
        }
        assert!(matrix(good, 2, 8..32).check("test", 24).is_err());
    }
}
