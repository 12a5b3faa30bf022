//! add_rmsnorm against a naive version.
use kernels::KernelError;
use kernels::backend::{Backend, Buffer};

use crate::support::{Random, assert_close, backend, bits, buffer, isas, poisoned};

#[test]
fn add_rmsnorm_matches_the_naive_version() {
    let mut random = Random(11);
    for isa in isas() {
        let mut backend = backend(isa, 2);
        for width in [1, 5, 16, 63, 200, 5000] {
            for (rows, with_delta) in [(1, true), (2, false), (9, true), (17, false)] {
                let (x, delta) = (random.vec(rows * width), random.vec(rows * width));
                let weight = random.vec(width);
                let mut residual = buffer(&mut backend, &x, width);
                let delta_buffer = buffer(&mut backend, &delta, width);
                let weight_vector = backend.load_vector(&weight).unwrap();
                let mut out = poisoned(&mut backend, rows + 1, width);
                let given = with_delta.then_some(&delta_buffer);
                backend.add_rmsnorm(&mut residual, given, &weight_vector, 1e-5, &mut out).unwrap();
                assert_eq!(out.rows(), rows);
                let sums: Vec<f32> = (0..rows * width)
                    .map(|i| if with_delta { x[i] + delta[i] } else { x[i] })
                    .collect();
                assert_eq!(bits(residual.values()), bits(&sums));
                for (sums, out) in sums.chunks(width).zip(out.values().chunks(width)) {
                    let square: f64 = sums.iter().map(|&x| f64::from(x).powi(2)).sum();
                    let scale = 1.0 / (square / width as f64 + 1e-5).sqrt();
                    for ((&got, &x), &w) in out.iter().zip(sums).zip(&weight) {
                        let want = f64::from(x) * scale * f64::from(w);
                        assert_close(got, want, want.abs() * 2e-6 + 1e-9, isa);
                    }
                }
            }
        }
    }
}

#[test]
fn shapes_that_do_not_fit_are_errors() {
    let mut backend = backend(kernels::cpu::Isa::Portable, 1);
    let mut residual = buffer(&mut backend, &[1.0; 8], 4);
    let fewer = buffer(&mut backend, &[1.0; 4], 4);
    let (weight, long) =
        (backend.load_vector(&[1.0; 4]).unwrap(), backend.load_vector(&[1.0; 5]).unwrap());
    let mut out = poisoned(&mut backend, 2, 4);
    let mut wide = poisoned(&mut backend, 2, 5);
    for error in [
        backend.add_rmsnorm(&mut residual, Some(&fewer), &weight, 0.0, &mut out),
        backend.add_rmsnorm(&mut residual, None, &long, 0.0, &mut out),
        backend.add_rmsnorm(&mut residual, None, &weight, 0.0, &mut wide),
    ] {
        assert!(matches!(error, Err(KernelError::Shape { .. })), "{error:?}");
    }
}
