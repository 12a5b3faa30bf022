//! Products with MXFP4 weights on CPUs, compared with sums in f64 of values decoded by the format's
//! definition; with interleaved rows, and with tensors stored by column.
use kernels::backend::prelude::*;
use kernels::backend::{Buffer, DType, ExpertActivation, HostMatrix, Routing, Scales};
use kernels::cpu::Precision;
use kernels::weights::{Columns, Groups, Packed, Packing, int4_groups};

use crate::support::{
    Random, Weight, as_taken, assert_close, assert_same_in_batches, backend_in, bits, buffer,
    expert_activated, isas, poisoned, variants,
};

const TOLERANCE: f64 = 1.5e-5;
const GROUP: usize = 32;

/// A tensor as in a file: the first of two neighbours is in the low bits of a byte.
struct Tensor {
    rows: usize,
    cols: usize,
    blocks: Vec<u8>,
    scales: Vec<u8>,
    values: Vec<f32>,
}

/// Decodes sign, exponent and mantissa by definition: OCP Microscaling Formats, 5.3.3.
fn worth(code: u8) -> f64 {
    let (sign, exponent, mantissa) = (code >> 3 & 1, i32::from(code >> 1 & 3), code & 1);
    let magnitude = match exponent {
        0 => f64::from(mantissa) * 0.5,
        _ => 2f64.powi(exponent - 1) * (1.0 + f64::from(mantissa) * 0.5),
    };
    if sign == 1 { -magnitude } else { magnitude }
}

impl Tensor {
    fn random(random: &mut Random, rows: usize, cols: usize) -> Self {
        let codes: Vec<u8> = (0..rows * cols).map(|_| random.below(16) as u8).collect();
        let scales: Vec<u8> =
            (0..rows * cols / GROUP).map(|_| 120 + random.below(6) as u8).collect();
        let number = |(i, code): (usize, &u8)| {
            (worth(*code) * 2f64.powi(i32::from(scales[i / GROUP]) - 127)) as f32
        };
        let values = codes.iter().enumerate().map(number).collect();
        let blocks = codes.as_chunks::<2>().0.iter().map(|[low, high]| low | high << 4).collect();
        Self { rows, cols, blocks, scales, values }
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.cols..][..self.cols]
    }

    /// `rows` rows, `step` apart, from `first` on, and a range of their columns.
    fn part(
        &self,
        (first, step, rows): (usize, usize, usize),
        (col_start, cols): (usize, usize),
    ) -> HostMatrix<'_> {
        let packed = Packed {
            packing: Packing::Mxfp4 { step },
            bits: 4,
            rows: self.rows,
            cols: self.cols,
            words: &self.blocks,
            zeros: None,
            scales: &self.scales,
            scale_type: DType::E8M0,
            num_groups: self.cols / GROUP,
            groups: Groups::Even(GROUP),
            first_row: first,
        };
        HostMatrix {
            data: &[],
            dtype: DType::Packed,
            rows,
            cols,
            col_start,
            row_stride: self.cols,
            scales: Some(Scales::Packed(packed)),
        }
    }

    fn host(&self) -> HostMatrix<'_> {
        self.part((0, 1, self.rows), (0, self.cols))
    }
}

fn dot(x: &[f32], w: &[f32]) -> (f64, f64) {
    let terms = x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w));
    terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()))
}

#[test]
fn rows_are_read_as_the_format_means_them() {
    let mut random = Random(91);
    let tensor = Tensor::random(&mut random, 150, 96);
    // Beginning and ending within a group, as a rank's part may.
    for (rows, cols) in [
        ((0, 1, 150), (0, 96)),
        ((0, 2, 75), (0, 96)),
        ((61, 2, 40), (16, 72)),
        ((3, 1, 65), (40, 16)),
        ((5, 1, 9), (7, 50)),
    ] {
        let part = tensor.part(rows, cols);
        part.check("test", cols.1).unwrap();
        let is_aligned = cols.0 % 8 == 0 || cols.0 + cols.1 <= GROUP;
        assert_eq!(int4_groups(&[part]).is_some(), is_aligned, "{cols:?}");
        for isa in isas() {
            let mut backend = backend_in(isa, Precision::Float32, 1);
            let table = backend.load_matrix(&[part]).unwrap();
            let ids: Vec<u32> = (0..rows.2 as u32).collect();
            let mut out = poisoned(&mut backend, rows.2, cols.1);
            backend.embed(&table, &ids, 0, 1.0, &mut out).unwrap();
            for (i, got) in out.values().chunks(cols.1).enumerate() {
                let want = &tensor.row(rows.0 + i * rows.1)[cols.0..][..cols.1];
                assert_eq!(got, want, "{isa} {rows:?} {cols:?} {i}");
            }
        }
    }
}

#[test]
fn linear_matches_the_naive_product() {
    let mut random = Random(92);
    for (isa, precision) in variants() {
        let mut backend = backend_in(isa, precision, 2);
        for (rows, cols) in [(1, 32), (65, 64), (130, 96), (320, 512)] {
            let tensor = Tensor::random(&mut random, rows, cols);
            let packed = backend.load_matrix(&[tensor.host()]).unwrap();
            for m in (1..=7).chain([48, 49]) {
                let x = random.vec(m * cols);
                let input = buffer(&mut backend, &x, cols);
                let mut out = poisoned(&mut backend, m, rows);
                backend.linear(&input, &packed, None, &mut out).unwrap();
                for (i, (x, out)) in x.chunks(cols).zip(out.values().chunks(rows)).enumerate() {
                    let x = as_taken(precision, x);
                    for (j, &got) in out.iter().enumerate() {
                        let (want, size) = dot(&x, tensor.row(j));
                        let what = format!("{isa} {precision} {m}x{cols}x{rows} [{i},{j}]");
                        assert_close(got, want, TOLERANCE * size + 1e-7, what);
                    }
                }
            }
        }
    }
}

#[test]
fn products_do_not_depend_on_the_batch_the_threads_or_the_panels_beside() {
    let mut random = Random(93);
    for (isa, precision) in variants() {
        for (rows, cols) in [(704, 192), (128, 608)] {
            let tensor = Tensor::random(&mut random, rows, cols);
            assert_same_in_batches(
                (isa, precision),
                &mut random,
                [rows, cols],
                &[1, 2, 3, 5, 7, 12, 33, 49, 67],
                |backend| backend.load_matrix(&[tensor.host()]).unwrap(),
                format!("{rows}x{cols}"),
            );
        }
    }
}

/// A tensor with alternating gate and up rows, of which a rank takes some columns; and the same
/// tensor in f32, stored by column.
#[test]
fn experts_are_what_their_tensors_mean() {
    let mut random = Random(94);
    let (experts, hidden, inner, own) = (3, 64, 96, 24..72);
    let routing = Routing::softmax(experts, 2, true);
    let router = Weight::random(&mut random, experts, hidden);
    let both = Tensor::random(&mut random, experts * 2 * inner, hidden);
    let activation = ExpertActivation::Clamped { alpha: 1.702, limit: 1.25 };
    let transposed: Vec<Vec<u8>> = (0..experts)
        .map(|expert| {
            let at = |input: usize, output: usize| both.row(expert * 2 * inner + output)[input];
            let all = (0..hidden).flat_map(|input| (0..2 * inner).map(move |o| (input, o)));
            all.flat_map(|(input, output)| at(input, output).to_le_bytes()).collect()
        })
        .collect();
    let parts =
        |expert: usize| [0, 1].map(|part| (expert * 2 * inner, 2 * own.start + part, own.len()));
    let four: Vec<HostMatrix<'_>> = (0..experts)
        .flat_map(parts)
        .map(|(base, first, rows)| both.part((base + first, 2, rows), (0, hidden)))
        .collect();
    let plain: Vec<HostMatrix<'_>> = (0..experts)
        .flat_map(|expert| parts(expert).map(|(_, first, rows)| (expert, first, rows)))
        .map(|(expert, first_row, rows)| HostMatrix {
            data: &[],
            dtype: DType::Packed,
            rows,
            cols: hidden,
            col_start: 0,
            row_stride: hidden,
            scales: Some(Scales::Columns(Columns {
                data: &transposed[expert],
                dtype: DType::F32,
                cols: hidden,
                outputs: 2 * inner,
                first_row,
                step: 2,
            })),
        })
        .collect();
    assert!(int4_groups(&four).is_some_and(|groups| groups.is_float));
    assert_eq!(int4_groups(&plain), None);
    let x = random.vec(19 * hidden);
    for (isa, precision) in variants() {
        let mut backend = backend_in(isa, precision, 2);
        let router = router.load(&mut backend);
        let input = buffer(&mut backend, &x, hidden);
        let mut routes = backend.new_routes(19, routing).unwrap();
        backend.route(&input, &router, None, &mut routes).unwrap();
        let (chosen, _) = backend.read_routes(&routes).unwrap();
        for matrices in [&four, &plain] {
            let stack = backend.load_stack(matrices).unwrap();
            let mut out = poisoned(&mut backend, 38, own.len());
            backend.experts_gate_up(&input, &stack, None, activation, &routes, &mut out).unwrap();
            assert_eq!(out.rows(), 38);
            for (slot, out) in out.values().chunks(own.len()).enumerate() {
                let x = as_taken(precision, &x[slot / 2 * hidden..][..hidden]);
                let base = chosen[slot] as usize * 2 * inner + 2 * own.start;
                for (i, got) in out.iter().enumerate() {
                    let [(gate, gate_size), (up, up_size)] =
                        [0, 1].map(|part| dot(&x, both.row(base + 2 * i + part)));
                    let want = expert_activated(activation, gate, up);
                    let size = gate_size * (2.0 + up.abs()) + up_size * (1.0 + gate.abs());
                    let what = format!("{isa} {precision} slot {slot} {i}");
                    assert_close(*got, want, TOLERANCE * size + 1e-6, what);
                }
            }
        }
    }
}

/// A scale that is NaN makes its products NaN, and affects nothing else.
#[test]
fn a_scale_that_is_no_number_reaches_the_output() {
    let mut tensor = Tensor::random(&mut Random(95), 70, 64);
    tensor.scales[2 * 3] = 0xff;
    for (isa, precision) in variants() {
        let mut backend = backend_in(isa, precision, 1);
        let packed = backend.load_matrix(&[tensor.host()]).unwrap();
        let input = buffer(&mut backend, &[0.5; 64], 64);
        let mut out = poisoned(&mut backend, 1, 70);
        backend.linear(&input, &packed, None, &mut out).unwrap();
        let wrong: Vec<usize> = (0..70).filter(|row| out.values()[*row].is_nan()).collect();
        assert_eq!(wrong, [3], "{isa} {precision}: {:?}", bits(out.values()));
    }
}
