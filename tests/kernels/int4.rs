//! 4-bit weights on CPUs, compared with sums in f64 of the file's integers, zero points and scales,
//! unrounded. Law 7: a row's bits depend neither on other rows nor on the threads.
use kernels::backend::prelude::*;
use kernels::backend::{Activation, DType, ExpertActivation, HostMatrix, Routing, Scales};
use kernels::cpu::{CpuBackend, CpuMatrix};
use kernels::reference::ReferenceBackend;
use kernels::weights::{Groups, Packed, Packing, int4_groups};

use crate::support::{
    Pretend, Random, Weight, activated, as_taken, assert_close, assert_same_in_batches, backend_in,
    bits, buffer, isas, poisoned, variants,
};

/// As for bf16 products. A weight rounded to bf16 would be off by about 1e-3 of a term.
const TOLERANCE: f64 = 1.5e-5;

/// A 4-bit tensor, as values and as packed in a file; a matrix takes some of its columns.
struct Four {
    packing: Packing,
    rows: usize,
    /// Number of inputs of the tensor, the first one taken, and the number taken.
    all: usize,
    first: usize,
    cols: usize,
    group: usize,
    /// The values of the columns taken, `[rows, cols]`.
    values: Vec<f32>,
    words: Vec<u8>,
    zeros: Option<Vec<u8>>,
    scales: Vec<u8>,
}

/// Packs 4-bit numbers into words of eight, in rows of `width` numbers.
fn words(numbers: &[u32], width: usize, order: [usize; 8]) -> Vec<u8> {
    let word = |eight: &[u32]| {
        let place = |i: usize| order.iter().position(|at| *at == i).unwrap();
        eight.iter().enumerate().fold(0u32, |word, (i, number)| word | number << (4 * place(i)))
    };
    numbers
        .chunks(width)
        .flat_map(|row| row.chunks(8))
        .flat_map(|e| word(e).to_le_bytes())
        .collect()
}

fn transposed<T: Copy>(numbers: &[T], width: usize) -> Vec<T> {
    (0..width).flat_map(|c| numbers.iter().skip(c).step_by(width).copied()).collect()
}

const STRAIGHT: [usize; 8] = [0, 1, 2, 3, 4, 5, 6, 7];

impl Four {
    fn random(
        random: &mut Random,
        packing: Packing,
        rows: usize,
        (all, first, cols): (usize, usize, usize),
        group: usize,
        symmetric: bool,
    ) -> Self {
        let groups = all.div_ceil(group);
        let integers: Vec<u32> = (0..rows * all).map(|_| random.below(16) as u32).collect();
        let zeros: Vec<u32> = (0..rows * groups)
            .map(|_| if symmetric { 8 } else { random.below(16) as u32 })
            .collect();
        // Not exact in bf16.
        let scales: Vec<f32> =
            (0..rows * groups).map(|_| 0.01 + random.f32().abs() * 0.1).collect();
        let value = |row: usize, col: usize| {
            let at = row * groups + col / group;
            (integers[row * all + col] as f32 - zeros[at] as f32) * scales[at]
        };
        let values = (0..rows)
            .flat_map(|row| (first..first + cols).map(move |col| (row, col)))
            .map(|(row, col)| value(row, col))
            .collect();
        let (words, zeros, scales) = match packing {
            Packing::Gptq { zero_less } => {
                // Eight inputs per word, in rows of the transposed matrix.
                let by_word =
                    transposed(words(&integers, all, STRAIGHT).as_chunks::<4>().0, all / 8);
                let less: Vec<u32> =
                    zeros.iter().map(|zero| zero.wrapping_sub(zero_less) & 15).collect();
                let zeros = words(&transposed(&less, groups), rows, STRAIGHT);
                (by_word.into_iter().flatten().collect(), zeros, transposed(&scales, groups))
            }
            Packing::Awq => {
                let order = [0, 2, 4, 6, 1, 3, 5, 7];
                (
                    words(&transposed(&integers, all), rows, order),
                    words(&transposed(&zeros, groups), rows, order),
                    transposed(&scales, groups),
                )
            }
            Packing::Compressed | Packing::Mxfp4 { .. } => {
                let by_group = words(&transposed(&zeros, groups), rows, STRAIGHT);
                let by_word = transposed(by_group.as_chunks::<4>().0, rows.div_ceil(8));
                let zeros = by_word.into_iter().flatten().collect();
                (words(&integers, all, STRAIGHT), zeros, scales)
            }
        };
        let is_left_out = symmetric && packing == Packing::Compressed;
        let zeros = (!is_left_out).then_some(zeros);
        let scales = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        Self { packing, rows, all, first, cols, group, values, words, zeros, scales }
    }

    fn host(&self) -> HostMatrix<'_> {
        self.some_rows(0, self.rows)
    }

    fn some_rows(&self, first_row: usize, rows: usize) -> HostMatrix<'_> {
        let packed = Packed {
            packing: self.packing,
            bits: 4,
            rows: self.rows,
            cols: self.all,
            words: &self.words,
            zeros: self.zeros.as_deref(),
            scales: &self.scales,
            scale_type: DType::F32,
            num_groups: self.all.div_ceil(self.group),
            groups: Groups::Even(self.group),
            first_row,
        };
        HostMatrix {
            data: &[],
            dtype: DType::Packed,
            rows,
            cols: self.cols,
            col_start: self.first,
            row_stride: self.all,
            scales: Some(Scales::Packed(packed)),
        }
    }

    fn load(&self, backend: &mut CpuBackend) -> CpuMatrix {
        assert!(int4_groups(&[self.host()]).is_some());
        backend.load_matrix(&[self.host()]).unwrap()
    }

    fn product(&self, x: &[f32], bias: Option<&[f32]>) -> Vec<(f64, f64)> {
        let row = |r: usize| {
            let bias = bias.map_or(0.0, |bias| f64::from(bias[r]));
            let weights = &self.values[r * self.cols..][..self.cols];
            let terms = weights.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x));
            terms.fold((bias, bias.abs()), |(sum, size), term| (sum + term, size + term.abs()))
        };
        (0..self.rows).map(row).collect()
    }
}

/// (outputs, (inputs of the tensor, first taken, number taken), inputs per group): one input, one
/// group, a partial last group and partial words, first groups that are cut, groups of several
/// blocks of pairs, more groups or a longer one than are converted at a time for many rows, partial
/// panels.
const SHAPES: [(usize, (usize, usize, usize), usize); 11] = [
    (1, (1, 0, 1), 8),
    (65, (7, 0, 7), 7),
    (64, (40, 0, 40), 16),
    (70, (37, 0, 37), 8),
    (130, (96, 16, 56), 32),
    (64, (128, 8, 101), 24),
    (64, (64, 33, 20), 64),
    (300, (331, 0, 331), 331),
    (320, (512, 0, 512), 128),
    (70, (2304, 0, 2304), 128),
    (66, (2500, 0, 2500), 2200),
];

#[test]
fn linear_matches_the_naive_product() {
    let mut random = Random(61);
    for (isa, precision) in variants() {
        let mut backend = backend_in(isa, precision, 2);
        for ((rows, taken, group), symmetric) in
            SHAPES.iter().flat_map(|it| [(*it, false), (*it, true)])
        {
            let cols = taken.2;
            let weight =
                Four::random(&mut random, Packing::Compressed, rows, taken, group, symmetric);
            let packed = weight.load(&mut backend);
            let bias = random.vec(rows);
            let bias_vector = backend.load_vector(&bias).unwrap();
            for m in (1..=9).chain([48, 49]) {
                let x = random.vec(m * cols);
                let input = buffer(&mut backend, &x, cols);
                let biased = m % 2 == 1;
                let mut out = poisoned(&mut backend, m, rows);
                let vector = biased.then_some(&bias_vector);
                backend.linear(&input, &packed, vector, &mut out).unwrap();
                for (i, (x, out)) in x.chunks(cols).zip(out.values().chunks(rows)).enumerate() {
                    let x = as_taken(precision, x);
                    let want = weight.product(&x, biased.then_some(&bias[..]));
                    for (j, (&got, (want, size))) in out.iter().zip(want).enumerate() {
                        let what = format!(
                            "{isa} {precision} {m}x{cols}x{rows}/{group} {symmetric} [{i},{j}]"
                        );
                        assert_close(got, want, TOLERANCE * size + 1e-7, what);
                    }
                }
            }
        }
    }
}

#[test]
fn rows_are_read_as_the_file_means_them() {
    let mut random = Random(62);
    for isa in isas() {
        let mut backend = backend_in(isa, kernels::cpu::Precision::Float32, 1);
        for packing in [
            Packing::Gptq { zero_less: 1 },
            Packing::Gptq { zero_less: 0 },
            Packing::Awq,
            Packing::Compressed,
        ] {
            let weight = Four::random(&mut random, packing, 72, (64, 16, 48), 16, false);
            let table = weight.load(&mut backend);
            let ids: Vec<u32> = (0..72).collect();
            let mut out = poisoned(&mut backend, 72, 48);
            backend.embed(&table, &ids, 0, 1.0, &mut out).unwrap();
            assert_eq!(bits(out.values()), bits(&weight.values), "{isa} {packing:?}");
            // The same in parts, and followed by rows of zeros.
            let parts = [weight.some_rows(0, 9), weight.some_rows(9, 63), weight.some_rows(72, 5)];
            let table = backend.load_matrix(&parts).unwrap();
            let ids: Vec<u32> = (0..77).collect();
            let mut out = poisoned(&mut backend, 77, 48);
            backend.embed(&table, &ids, 0, 1.0, &mut out).unwrap();
            let want = [&weight.values[..], &[0.0; 5 * 48]].concat();
            assert_eq!(out.values(), want, "{isa} {packing:?}");
        }
    }
}

/// All file formats of the same weights give the same bits.
#[test]
fn products_do_not_depend_on_the_batch_the_threads_or_the_panels_beside() {
    let mut random = Random(63);
    for (isa, precision) in variants() {
        for (rows, taken, group, symmetric) in [
            (704, (200, 0, 200), 64, false),
            (704, (200, 0, 200), 64, true),
            (384, (1000, 40, 900), 96, true),
            (128, (600, 0, 600), 600, false),
            (128, (2328, 24, 2304), 128, false),
            (128, (2500, 0, 2500), 2200, true),
        ] {
            let cols = taken.2;
            let weight =
                Four::random(&mut random, Packing::Compressed, rows, taken, group, symmetric);
            assert_same_in_batches(
                (isa, precision),
                &mut random,
                [rows, cols],
                &[1, 2, 3, 5, 7, 12, 33, 49, 67],
                |backend| weight.load(backend),
                format!("{rows}x{cols}/{group}"),
            );
        }
    }
}

#[test]
fn gate_up_and_lm_head_match_the_naive_versions() {
    let mut random = Random(64);
    for (isa, precision) in variants() {
        let mut backend = backend_in(isa, precision, 2);
        for (inner, taken, group) in
            [(5, (24, 0, 24), 8), (64, (33, 0, 33), 16), (192, (40, 0, 40), 40)]
        {
            let cols = taken.2;
            let weight =
                Four::random(&mut random, Packing::Compressed, inner * 2, taken, group, false);
            let packed = weight.load(&mut backend);
            for m in [1, 2, 6, 17] {
                let x = random.vec(m * cols);
                let input = buffer(&mut backend, &x, cols);
                let mut out = poisoned(&mut backend, m, inner);
                backend.gate_up(&input, &packed, None, None, Activation::Silu, &mut out).unwrap();
                let mut logits = poisoned(&mut backend, 1, inner * 2);
                backend.lm_head(&input, &[m as u32 - 1], &packed, None, &mut logits).unwrap();
                for (row, (x, out)) in x.chunks(cols).zip(out.values().chunks(inner)).enumerate() {
                    let both = weight.product(&as_taken(precision, x), None);
                    for (j, &got) in out.iter().enumerate() {
                        let ((gate, gate_size), (up, up_size)) = (both[j], both[inner + j]);
                        let want = activated(Activation::Silu, gate) * up;
                        let bound = TOLERANCE
                            * (gate_size * (up.abs() + 1.0) * 1.2 + up_size * (gate.abs() + 1.0));
                        assert_close(got, want, bound + 1e-6, format!("{isa} {m}x{cols}x{inner}"));
                    }
                    if row + 1 == m {
                        for (&got, (want, size)) in logits.values().iter().zip(both) {
                            assert_close(got, want, TOLERANCE * size, isa);
                        }
                    }
                }
            }
        }
    }
}

/// The matrices of a stack equal matrices loaded separately.
#[test]
fn experts_are_what_their_matrices_are() {
    let mut random = Random(65);
    // One expert per row, with weight 1.
    let routing = Routing::softmax(3, 1, true);
    let (hidden, inner) = (72, 40);
    let router = Weight::random(&mut random, 3, hidden);
    let mut four = |rows: usize, taken: (usize, usize, usize), group: usize| {
        Four::random(&mut random, Packing::Awq, rows, taken, group, false)
    };
    let gate_up: Vec<Four> = (0..6).map(|_| four(inner, (hidden, 0, hidden), 24)).collect();
    let down: Vec<Four> = (0..3).map(|_| four(hidden, (inner + 8, 8, inner), 16)).collect();
    let x = Random(66).vec(19 * hidden);
    fn hosts(all: &[Four]) -> Vec<HostMatrix<'_>> {
        all.iter().map(Four::host).collect()
    }
    for (isa, precision) in variants() {
        let mut backend = backend_in(isa, precision, 2);
        let loaded_router = router.load(&mut backend);
        let gate_up_stack = backend.load_stack(&hosts(&gate_up)).unwrap();
        let down_stack = backend.load_stack(&hosts(&down)).unwrap();
        let input = buffer(&mut backend, &x, hidden);
        let mut routes = backend.new_routes(19, routing).unwrap();
        backend.route(&input, &loaded_router, None, &mut routes).unwrap();
        let mut inners = poisoned(&mut backend, 19, inner);
        backend
            .experts_gate_up(
                &input,
                &gate_up_stack,
                None,
                ExpertActivation::Silu,
                &routes,
                &mut inners,
            )
            .unwrap();
        let mut out = poisoned(&mut backend, 19, hidden);
        backend.experts_down(&inners, 0, &down_stack, None, &routes, &mut out).unwrap();
        for (row, x) in x.chunks(hidden).enumerate() {
            let logits = router.product(x, None);
            let best = (0..3).max_by(|a, b| logits[*a].0.total_cmp(&logits[*b].0)).unwrap();
            let both = [gate_up[2 * best].host(), gate_up[2 * best + 1].host()];
            let both = backend.load_matrix(&both).unwrap();
            let input = buffer(&mut backend, x, hidden);
            let mut inner_alone = poisoned(&mut backend, 1, inner);
            backend.gate_up(&input, &both, None, None, Activation::Silu, &mut inner_alone).unwrap();
            let got = &inners.values()[row * inner..][..inner];
            assert_eq!(bits(got), bits(inner_alone.values()), "{isa} {precision} {row}");
            let matrix = down[best].load(&mut backend);
            let mut alone = poisoned(&mut backend, 1, hidden);
            backend.linear(&inner_alone, &matrix, None, &mut alone).unwrap();
            let got = &out.values()[row * hidden..][..hidden];
            assert_eq!(bits(got), bits(alone.values()), "{isa} {precision} {row}");
        }
    }
}

/// Concatenated parts that are not all in 4 bits, or have different groups, become bf16 together,
/// as in the oracle.
#[test]
fn what_is_not_kept_in_4_bits_is_bf16() {
    let mut random = Random(67);
    let mut four = |all: (usize, usize, usize), group: usize| {
        Four::random(&mut random, Packing::Compressed, 20, all, group, false)
    };
    let (a, b, odd) = (four((48, 0, 48), 16), four((48, 0, 48), 24), four((48, 4, 44), 16));
    let plain = Weight::random(&mut Random(68), 20, 48);
    for parts in [vec![a.host(), b.host()], vec![a.host(), plain.host()], vec![odd.host()]] {
        assert_eq!(int4_groups(&parts), None);
        let cols = parts[0].cols;
        let mut oracle = ReferenceBackend::new(Box::new(Pretend { world: 1 }));
        let want = oracle.load_matrix(&parts).unwrap();
        for isa in isas() {
            let mut backend = backend_in(isa, kernels::cpu::Precision::Float32, 1);
            let table = backend.load_matrix(&parts).unwrap();
            let ids: Vec<u32> = (0..20 * parts.len() as u32).collect();
            let mut out = poisoned(&mut backend, ids.len(), cols);
            backend.embed(&table, &ids, 0, 1.0, &mut out).unwrap();
            for (row, got) in out.values().chunks(cols).enumerate() {
                assert_eq!(bits(got), bits(want.row(row)), "{isa}");
                assert!(got.iter().all(|x| x.to_bits() & 0xFFFF == 0));
            }
        }
    }
}
