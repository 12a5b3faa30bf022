//! FP8 weights on CPUs, compared with sums in f64 of the file's numbers times their scales,
//! unrounded. Law 7: a row's bits depend neither on other rows nor on the threads.
use kernels::backend::prelude::*;
use kernels::backend::{
    Activation, BlockScales, DType, ExpertActivation, HostMatrix, Routing, Scales,
};
use kernels::cpu::{CpuBackend, CpuMatrix, Precision};
use kernels::reference::ReferenceBackend;
use kernels::weights::fp8_groups;

use crate::support::{
    Pretend, Random, Weight, as_taken, assert_close, assert_same_in_batches, backend_in, bits,
    buffer, fp8_value, isas, poisoned, variants,
};

/// As for bf16 products. A weight rounded to bf16 would be off by about 1e-3 of a term.
const TOLERANCE: f64 = 1.5e-5;
/// All of a row or column.
const ALL: usize = usize::MAX;

/// A tensor in FP8 and the part of it that a matrix takes.
pub(crate) struct Eight {
    /// Rows and columns of the tensor.
    tensor: (usize, usize),
    /// First row and column taken, and how many.
    first: (usize, usize),
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    block: (usize, usize),
    pub(crate) bytes: Vec<u8>,
    scales: Vec<f32>,
    scale_bytes: Vec<u8>,
    /// Number times scale of the part taken.
    values: Vec<f64>,
}

impl Eight {
    /// Takes `rows` and `cols` (first, number) of a random tensor that has as few more as makes
    /// them end in the middle of a block.
    pub(crate) fn random(
        random: &mut Random,
        rows: (usize, usize),
        cols: (usize, usize),
        block: (usize, usize),
    ) -> Self {
        let tensor = (rows.0 + rows.1 + 1, cols.0 + cols.1 + 3);
        // All bytes but NaN. Three quarters of the columns have no small number, as most neighbours
        // of real weights have none; in the others some rows have mostly subnormal numbers.
        let byte = |random: &mut Random, row: usize, col: usize| loop {
            let least = if (col / 4).is_multiple_of(4) { 0 } else { 0x20 };
            let byte = least | random.below(if row % 7 == 3 { 12 } else { 256 }) as u8;
            if byte & 0x7f != 0x7f {
                return byte | if row % 7 == 3 { (random.below(2) as u8) << 7 } else { 0 };
            }
        };
        let bytes =
            (0..tensor.0 * tensor.1).map(|i| byte(random, i / tensor.1, i % tensor.1)).collect();
        let count = tensor.0.div_ceil(block.0) * tensor.1.div_ceil(block.1);
        // Not exact in bf16, and different enough that a wrong one shows.
        let scales: Vec<f32> = (0..count)
            .map(|_| (0.01 + random.f32().abs()) * [0.01, 1.0][random.below(2)])
            .collect();
        let scale_bytes = scales.iter().flat_map(|x| x.to_le_bytes()).collect();
        let (first, rows, cols) = ((rows.0, cols.0), rows.1, cols.1);
        let values = Vec::new();
        let mut made =
            Self { tensor, first, rows, cols, block, bytes, scales, scale_bytes, values };
        let value = |i: usize| {
            let (number, scale) = made.element(i / cols, i % cols);
            number * f64::from(scale)
        };
        made.values = (0..rows * cols).map(value).collect();
        made
    }

    /// A part of the rows taken.
    fn some_rows(&self, first: usize, rows: usize) -> HostMatrix<'_> {
        let start = self.first.0 + first;
        HostMatrix {
            data: &self.bytes[start * self.tensor.1..],
            dtype: DType::F8E4M3,
            rows,
            cols: self.cols,
            col_start: self.first.1,
            row_stride: self.tensor.1,
            scales: Some(Scales::Blocks(BlockScales {
                data: &self.scale_bytes,
                dtype: DType::F32,
                block: self.block,
                row_stride: self.tensor.1.div_ceil(self.block.1),
                first_row: start,
            })),
        }
    }

    pub(crate) fn host(&self) -> HostMatrix<'_> {
        self.some_rows(0, self.rows)
    }

    fn load(&self, backend: &mut CpuBackend) -> CpuMatrix {
        assert!(fp8_groups(&[self.host()]).is_some());
        backend.load_matrix(&[self.host()]).unwrap()
    }

    /// Number and scale of an element.
    fn element(&self, row: usize, col: usize) -> (f64, f32) {
        let (row, col) = (self.first.0 + row, self.first.1 + col);
        let width = self.tensor.1.div_ceil(self.block.1);
        let scale = self.scales[row / self.block.0 * width + col / self.block.1];
        (fp8_value(self.bytes[row * self.tensor.1 + col]), scale)
    }

    /// Products of a row of x, with the sums of their absolute terms.
    pub(crate) fn product(&self, x: &[f32], bias: Option<&[f32]>) -> Vec<(f64, f64)> {
        let row = |r: usize| {
            let bias = bias.map_or(0.0, |bias| f64::from(bias[r]));
            let weights = &self.values[r * self.cols..][..self.cols];
            let terms = weights.iter().zip(x).map(|(w, x)| w * f64::from(*x));
            terms.fold((bias, bias.abs()), |(sum, size), term| (sum + term, size + term.abs()))
        };
        (0..self.rows).map(row).collect()
    }
}

/// (first row and rows, first column and columns, block): a scale per tensor and per channel; odd
/// lengths; one group and several, cut at the front or only behind; short groups; partial panels;
/// more groups than are converted at a time for many rows.
const SHAPES: [[(usize, usize); 3]; 10] = [
    [(0, 1), (0, 1), (ALL, ALL)],
    [(5, 65), (2, 7), (ALL, ALL)],
    [(3, 130), (9, 61), (1, ALL)],
    [(0, 64), (0, 600), (1, ALL)],
    [(0, 70), (0, 40), (128, 128)],
    [(7, 130), (40, 201), (48, 40)],
    [(64, 66), (64, 320), (128, 128)],
    [(0, 128), (100, 90), (16, 16)],
    [(11, 300), (96, 331), (128, 128)],
    [(128, 70), (0, 1400), (128, 128)],
];

#[test]
fn linear_matches_the_naive_product() {
    let mut random = Random(81);
    for (isa, precision) in variants() {
        let mut backend = backend_in(isa, precision, 2);
        for [rows, cols, block] in SHAPES {
            let weight = Eight::random(&mut random, rows, cols, block);
            let (rows, cols) = (weight.rows, weight.cols);
            let packed = weight.load(&mut backend);
            let bias = random.vec(rows);
            let bias_vector = backend.load_vector(&bias).unwrap();
            for m in [1, 2, 3, 4, 5, 6, 7, 48, 49] {
                let x = random.vec(m * cols);
                let input = buffer(&mut backend, &x, cols);
                let biased = m % 2 == 1;
                let mut out = poisoned(&mut backend, m, rows);
                let vector = biased.then_some(&bias_vector);
                backend.linear(&input, &packed, vector, &mut out).unwrap();
                for (i, (x, out)) in x.chunks(cols).zip(out.values().chunks(rows)).enumerate() {
                    // The sums of other rows take time, and tiles have six rows.
                    if i % 5 > 1 && i + 1 < m {
                        continue;
                    }
                    let x = as_taken(precision, x);
                    let want = weight.product(&x, biased.then_some(&bias[..]));
                    for (j, (&got, (want, size))) in out.iter().zip(want).enumerate() {
                        let what =
                            format!("{isa} {precision} {m}x{cols}x{rows} {block:?} [{i},{j}]");
                        assert_close(got, want, TOLERANCE * size + 1e-7, what);
                    }
                }
            }
        }
    }
}

#[test]
fn rows_are_read_as_the_file_means_them() {
    let mut random = Random(82);
    for isa in isas() {
        let mut backend = backend_in(isa, Precision::Float32, 1);
        for (rows, cols, block) in [
            ((3, 72), (24, 201), (48, 40)),
            ((1, 67), (0, 31), (1, ALL)),
            ((0, 9), (4, 8), (ALL, ALL)),
        ] {
            let weight = Eight::random(&mut random, rows, cols, block);
            let value = |i: usize| {
                let (number, scale) = weight.element(i / weight.cols, i % weight.cols);
                number as f32 * scale
            };
            let values: Vec<f32> = (0..weight.rows * weight.cols).map(value).collect();
            // In parts, and followed by rows of zeros without scales.
            let zeros = vec![0; 5 * weight.tensor.1];
            let behind = HostMatrix { data: &zeros, rows: 5, scales: None, ..weight.host() };
            let parts = [weight.some_rows(0, 4), weight.some_rows(4, weight.rows - 4), behind];
            let table = backend.load_matrix(&parts).unwrap();
            let ids: Vec<u32> = (0..weight.rows as u32 + 5).collect();
            let mut out = poisoned(&mut backend, ids.len(), weight.cols);
            backend.embed(&table, &ids, 0, 1.0, &mut out).unwrap();
            let (got, behind) = out.values().split_at(values.len());
            assert_eq!(bits(got), bits(&values), "{isa} {block:?}");
            assert!(behind.iter().all(|x| *x == 0.0));
            // As an embedding, rounded to bf16.
            let table = backend.load_bf16_matrix(&[weight.host()]).unwrap();
            let ids: Vec<u32> = (0..weight.rows as u32).collect();
            backend.embed(&table, &ids, 0, 1.0, &mut out).unwrap();
            assert_eq!(bits(out.values()), bits(&as_taken(Precision::Bfloat16, &values)), "{isa}");
        }
    }
}

#[test]
fn what_is_no_number_shows() {
    for (isa, precision) in variants() {
        let mut backend = backend_in(isa, precision, 1);
        for (block, cols) in [((1, ALL), 64), ((128, 128), 300)] {
            let mut weight = Eight::random(&mut Random(83), (0, 70), (0, cols), block);
            let at = 67 * weight.tensor.1 + cols - 3;
            weight.bytes[at] = 0xff;
            let packed = weight.load(&mut backend);
            for m in [1, 5, 20] {
                let input = buffer(&mut backend, &vec![0.5; m * cols], cols);
                let mut out = poisoned(&mut backend, m, 70);
                backend.linear(&input, &packed, None, &mut out).unwrap();
                for row in out.values().chunks(70) {
                    let odd: Vec<usize> = (0..70).filter(|i| !row[*i].is_finite()).collect();
                    assert_eq!(odd, [67], "{isa} {precision} {m} {block:?}");
                }
            }
        }
    }
}

#[test]
fn products_do_not_depend_on_the_batch_the_threads_or_the_panels_beside() {
    let mut random = Random(84);
    for (isa, precision) in variants() {
        for (rows, cols, block) in [
            ((0, 384), (0, 200), (1, ALL)),
            ((9, 384), (40, 420), (128, 128)),
            ((1, 256), (0, 1000), (48, 40)),
        ] {
            let weight = Eight::random(&mut random, rows, cols, block);
            assert_same_in_batches(
                (isa, precision),
                &mut random,
                [weight.rows, weight.cols],
                &[1, 2, 3, 5, 7, 12, 33, 49, 67],
                |backend| weight.load(backend),
                format!("{rows:?} {cols:?} {block:?}"),
            );
        }
    }
}

/// The matrices of a stack equal matrices loaded separately, whose products are compared with
/// naive ones.
#[test]
fn experts_are_what_their_matrices_are() {
    let mut random = Random(85);
    // One expert per row, with weight 1.
    let routing = Routing::softmax(3, 1, true);
    let (hidden, inner) = (200, 72);
    let router = Weight::random(&mut random, 3, hidden);
    let mut eight = |rows, cols, block| Eight::random(&mut random, rows, cols, block);
    let gate_up: Vec<Eight> =
        (0..6).map(|i| eight((i * 5, inner), (0, hidden), (128, 128))).collect();
    let down: Vec<Eight> = (0..3).map(|_| eight((0, hidden), (24, inner), (48, 40))).collect();
    let x = Random(86).vec(19 * hidden);
    fn hosts(all: &[Eight]) -> Vec<HostMatrix<'_>> {
        all.iter().map(Eight::host).collect()
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
        let silu = ExpertActivation::Silu;
        backend.experts_gate_up(&input, &gate_up_stack, None, silu, &routes, &mut inners).unwrap();
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

/// Parts that do not have the same groups, and groups that are too long or too short, become bf16
/// together, as in the oracle.
#[test]
fn what_is_not_kept_in_fp8_is_bf16() {
    let mut random = Random(87);
    let mut eight = |cols, block| Eight::random(&mut random, (0, 20), cols, block);
    let (a, b) = (eight((0, 48), (16, 16)), eight((0, 48), (16, 24)));
    let (long, odd) = (eight((0, 300), (8, 256)), eight((3, 48), (16, 16)));
    let plain = Weight::random(&mut Random(88), 20, 48);
    for parts in [
        vec![a.host(), b.host()],
        vec![a.host(), plain.host()],
        vec![long.host()],
        vec![odd.host()],
    ] {
        assert_eq!(fp8_groups(&parts), None);
        let cols = parts[0].cols;
        let mut oracle = ReferenceBackend::new(Box::new(Pretend { world: 1 }));
        let want = oracle.load_matrix(&parts).unwrap();
        for isa in isas() {
            let mut backend = backend_in(isa, Precision::Float32, 1);
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
