//! linear, gate_up, lm_head and embed against naive products.
use kernels::backend::prelude::*;
use kernels::backend::{Activation, Buffer, DType, HostMatrix, Inspect, PlainActivation};
use kernels::collective::single_rank;
use kernels::cpu::{CpuBuffer, Isa, Precision};
use kernels::reference::ReferenceBuffer;
use kernels::{Backend, KernelError, ReferenceBackend};

use crate::support::{
    ACTIVATIONS, Random, Weight, activated, as_taken, assert_close, backend, backend_in, bits,
    buffer, isas, poisoned, variants,
};

/// Relative to the sum of absolute terms. Rounding activations to bf16 where f32 is required, or
/// not to the nearest bf16 where bf16 is required, would be off by about 1e-3 of a term.
const TOLERANCE: f64 = 1.5e-5;

/// `[in, out]`: not multiples of 2, 16 or 64; one; and long enough for several blocks of inputs.
const SHAPES: [(usize, usize); 8] =
    [(1, 1), (2, 64), (7, 65), (33, 100), (64, 330), (67, 63), (131, 257), (2311, 70)];

#[test]
fn linear_matches_the_naive_product() {
    let mut random = Random(1);
    for (isa, precision) in variants() {
        let mut backend = backend_in(isa, precision, 2);
        for ((cols, rows), is_int8) in SHAPES.iter().flat_map(|it| [(*it, false), (*it, true)]) {
            let weight = Weight::random(&mut random, rows, cols);
            let weight = if is_int8 { weight.quantised() } else { weight };
            let packed = weight.load(&mut backend);
            let bias = random.vec(rows);
            let bias_vector = backend.load_vector(&bias).unwrap();
            for m in 1..=17 {
                let x = random.vec(m * cols);
                let input = buffer(&mut backend, &x, cols);
                for biased in [false, true] {
                    let mut out = poisoned(&mut backend, m, rows);
                    let vector = biased.then_some(&bias_vector);
                    backend.linear(&input, &packed, vector, &mut out).unwrap();
                    let out = backend.read_buffer(&out).unwrap();
                    for (i, (x, out)) in x.chunks(cols).zip(out.chunks(rows)).enumerate() {
                        let x = as_taken(precision, x);
                        let want = weight.product(&x, biased.then_some(&bias[..]));
                        for (j, (&got, (want, size))) in out.iter().zip(want).enumerate() {
                            let what =
                                format!("{isa} {precision} {is_int8} {m}x{cols}x{rows} [{i},{j}]");
                            assert_close(got, want, TOLERANCE * size + 1e-7, what);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn large_activations_keep_their_precision() {
    // Row values of many magnitudes; the high bf16 term alone would fail.
    let mut random = Random(2);
    for isa in isas() {
        let mut backend = backend(isa, 1);
        let weight = Weight::random(&mut random, 64, 96);
        let packed = weight.load(&mut backend);
        let x: Vec<f32> = (0..96).map(|i| random.f32() * 10f32.powi(i % 12 - 6)).collect();
        let input = buffer(&mut backend, &x, 96);
        let mut out = poisoned(&mut backend, 1, 64);
        backend.linear(&input, &packed, None, &mut out).unwrap();
        for (&got, (want, size)) in out.values().iter().zip(weight.product(&x, None)) {
            assert_close(got, want, TOLERANCE * size, isa);
        }
    }
}

#[test]
fn bfloat16_rounds_activations_to_the_nearest_ties_to_even() {
    // One output of weight 1 per input, so that the result is the rounded activation.
    let taken = [
        (1.0, 1.0),
        // 1 + 2^-8 is halfway between 1 and 1 + 2^-7; 1 + 3 * 2^-8 between that and 1 + 2^-6.
        (1.0 + 1.0 / 256.0, 1.0),
        (1.0 + 1.0 / 256.0 + f32::EPSILON, 1.0 + 1.0 / 128.0),
        (1.0 + 3.0 / 256.0, 1.0 + 1.0 / 64.0),
        (-1.0 - 3.0 / 256.0, -1.0 - 1.0 / 64.0),
        (-1.0 - 3.0 / 256.0 + f32::EPSILON, -1.0 - 1.0 / 128.0),
        // Rounding carries into the exponent.
        (1.998_046_9, 2.0),
        (3.0e38, f32::from_bits(0x7F62_0000)),
        (1.2e-38, f32::from_bits(0x0083_0000)),
    ];
    let mut weight = Weight::random(&mut Random(7), taken.len(), taken.len());
    weight.set(|row, column| if row == column { 1.0 } else { 0.0 });
    let x: Vec<f32> = taken.iter().map(|(x, _)| *x).collect();
    let want: Vec<f32> = taken.iter().map(|(_, want)| *want).collect();
    assert_eq!(bits(&as_taken(Precision::Bfloat16, &x)), bits(&want), "the oracle");
    for isa in isas() {
        let mut backend = backend_in(isa, Precision::Bfloat16, 1);
        let packed = weight.load(&mut backend);
        for rows in [1, 2] {
            let input = buffer(&mut backend, &x.repeat(rows), x.len());
            let mut out = poisoned(&mut backend, rows, taken.len());
            backend.linear(&input, &packed, None, &mut out).unwrap();
            assert_eq!(bits(out.values()), bits(&want.repeat(rows)), "{isa} {rows}");
        }
    }
}

/// Squared ReLUs of three rows of one number.
fn squared<B: Backend + Inspect>(
    backend: &mut B,
    values: [f32; 3],
    fill: impl Fn(&mut B::Buffer, &[f32]),
) -> Vec<f32> {
    let (data, dtype) = (&1f32.to_le_bytes(), DType::F32);
    let one =
        HostMatrix { data, dtype, rows: 1, cols: 1, col_start: 0, row_stride: 1, scales: None };
    let one = backend.load_matrix(&[one]).unwrap();
    let [mut x, mut out] = [0, 1].map(|_| backend.new_input_buffer(3, 1).unwrap());
    x.set_rows(3).unwrap();
    fill(&mut x, &values);
    let activation = PlainActivation::SquaredRelu;
    backend.activated(&x, &one, None, None, activation, &mut out).unwrap();
    backend.read_buffer(&out).unwrap()
}

#[test]
fn a_nan_stays_one_in_an_mlp_without_a_gate() {
    let values = [f32::NAN, -2.0, 3.0];
    let check = |made: &[f32]| assert!(made[0].is_nan() && made[1..] == [0.0, 9.0], "{made:?}");
    for (isa, precision) in variants() {
        let fill = |buffer: &mut CpuBuffer, values: &[f32]| {
            buffer.values_mut().copy_from_slice(values);
        };
        check(&squared(&mut backend_in(isa, precision, 1), values, fill));
    }
    let fill = |buffer: &mut ReferenceBuffer, values: &[f32]| {
        buffer.values_mut().copy_from_slice(values);
    };
    check(&squared(&mut ReferenceBackend::new(single_rank()), values, fill));
}

#[test]
fn gate_up_matches_the_naive_version() {
    let mut random = Random(3);
    for (isa, precision) in variants() {
        let mut backend = backend_in(isa, precision, 2);
        let shapes = [(9, 1), (16, 5), (33, 64), (20, 70), (40, 192)].into_iter();
        for ((cols, inner), is_int8) in shapes.flat_map(|it| [(it, false), (it, true)]) {
            let weight = Weight::random(&mut random, inner * 2, cols);
            let weight = if is_int8 { weight.quantised() } else { weight };
            let packed = weight.load(&mut backend);
            let bias = random.vec(inner * 2);
            let bias_vector = backend.load_vector(&bias).unwrap();
            let sizes = [(1, false), (2, true), (6, false), (7, true), (17, false)].into_iter();
            let cases = sizes.flat_map(|size| ACTIVATIONS.map(|activation| (size, activation)));
            for ((m, biased), activation) in cases {
                let x = random.vec(m * cols);
                let input = buffer(&mut backend, &x, cols);
                let mut out = poisoned(&mut backend, m, inner);
                let vector = biased.then_some(&bias_vector);
                backend.gate_up(&input, &packed, vector, None, activation, &mut out).unwrap();
                for (x, out) in x.chunks(cols).zip(out.values().chunks(inner)) {
                    let x = as_taken(precision, x);
                    let both = weight.product(&x, biased.then_some(&bias[..]));
                    for (j, &got) in out.iter().enumerate() {
                        let ((gate, gate_size), (up, up_size)) = (both[j], both[inner + j]);
                        let want = activated(activation, gate) * up;
                        let bound = TOLERANCE
                            * (gate_size * (up.abs() + 1.0) * 1.2 + up_size * (gate.abs() + 1.0));
                        let what = format!("{isa} {precision} {m}x{cols}x{inner}");
                        assert_close(got, want, bound + 1e-6, what);
                    }
                }
            }
        }
    }
}

#[test]
fn lm_head_takes_the_rows_named() {
    let mut random = Random(4);
    for (isa, precision) in variants() {
        let mut backend = backend_in(isa, precision, 1);
        let (cols, vocab) = (24, 150);
        let weight = Weight::random(&mut random, vocab, cols);
        let weight = if isa == Isa::detect() { weight.quantised() } else { weight };
        let packed = weight.load(&mut backend);
        let x = random.vec(9 * cols);
        let input = buffer(&mut backend, &x, cols);
        for rows in [&[][..], &[8], &[3, 0, 3], &[0, 1, 2, 3, 4, 5, 6, 7, 8]] {
            let mut out = poisoned(&mut backend, 12, vocab);
            backend.lm_head(&input, rows, &packed, None, &mut out).unwrap();
            assert_eq!(out.rows(), rows.len());
            let mut capped = poisoned(&mut backend, 12, vocab);
            backend.lm_head(&input, rows, &packed, Some(0.75), &mut capped).unwrap();
            assert_eq!(capped.rows(), rows.len());
            for (&got, &logit) in capped.values().iter().zip(out.values()) {
                assert_close(got, 0.75 * f64::from(logit / 0.75).tanh(), 1e-6, isa);
            }
            for (&row, out) in rows.iter().zip(out.values().chunks(vocab)) {
                let x = as_taken(precision, &x[row as usize * cols..][..cols]);
                for (&got, (want, size)) in out.iter().zip(weight.product(&x, None)) {
                    assert_close(got, want, TOLERANCE * size, isa);
                }
            }
        }
    }
}

#[test]
fn embed_returns_rows_of_this_rank_and_zeros() {
    let mut random = Random(5);
    for isa in isas() {
        for (cols, scale) in [(1, 1.0), (7, 1.0), (64, 50.75)] {
            let mut backend = backend(isa, 3);
            let table = Weight::random(&mut random, 100, cols);
            let table = if isa == Isa::Portable { table.quantised() } else { table };
            let packed = table.load(&mut backend);
            let ids = [50, 149, 49, 150, 0, u32::MAX, 113, 50];
            let mut out = poisoned(&mut backend, 9, cols);
            backend.embed(&packed, &ids, 50, scale, &mut out).unwrap();
            assert_eq!(out.rows(), ids.len());
            for (&id, out) in ids.iter().zip(out.values().chunks(cols)) {
                let want = match id {
                    50..150 => table.row(id as usize - 50).iter().map(|x| x * scale).collect(),
                    _ => vec![0.0; cols],
                };
                assert_eq!(bits(out), bits(&want), "{isa} id {id}");
            }
        }
    }
}

#[test]
fn shapes_that_do_not_fit_are_errors() {
    let mut random = Random(6);
    let mut backend = backend(Isa::Portable, 1);
    let matrix = Weight::random(&mut random, 10, 8).load(&mut backend);
    let odd = Weight::random(&mut random, 9, 8).load(&mut backend);
    let short = backend.load_vector(&[0.0; 9]).unwrap();
    let x = buffer(&mut backend, &[0.5; 16], 8);
    let narrow = buffer(&mut backend, &[0.5; 14], 7);
    let mut out = poisoned(&mut backend, 2, 10);
    let mut few_rows = poisoned(&mut backend, 1, 10);
    let mut half = poisoned(&mut backend, 2, 5);
    let errors = [
        backend.linear(&narrow, &matrix, None, &mut out),
        backend.linear(&x, &matrix, None, &mut half),
        backend.linear(&x, &matrix, Some(&short), &mut out),
        backend.linear(&x, &matrix, None, &mut few_rows),
        backend.gate_up(&x, &matrix, None, None, Activation::Silu, &mut out),
        backend.gate_up(&x, &odd, None, None, Activation::Silu, &mut half),
        backend.lm_head(&x, &[2], &matrix, None, &mut out),
        backend.lm_head(&x, &[0, 1, 0], &matrix, None, &mut out),
        backend.embed(&matrix, &[1], 0, 1.0, &mut out),
        out.set_rows(3),
    ];
    for (i, error) in errors.into_iter().enumerate() {
        assert!(matches!(error, Err(KernelError::Shape { .. })), "case {i}: {error:?}");
    }
    // None of them wrote anything.
    assert!(out.values().iter().chain(half.values()).all(|x| x.is_nan()));
}
