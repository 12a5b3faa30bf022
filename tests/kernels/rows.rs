//! add_rmsnorm and add_normed_rmsnorm against naive versions.
use kernels::KernelError;
use kernels::backend::Buffer;
use kernels::backend::prelude::*;

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

/// The residual stream and its norm after a normalised delta was added, in f64.
pub(crate) fn normed_twice(
    x: &[f32],
    delta: &[f32],
    delta_weight: &[f32],
    weight: &[f32],
    eps: f64,
) -> (Vec<f64>, Vec<f64>) {
    let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    let norm = |x: &[f64], weight: &[f32]| {
        let square: f64 = x.iter().map(|x| x * x).sum();
        let rms = (square / x.len() as f64 + eps).sqrt();
        x.iter().zip(weight).map(|(x, &w)| x / rms * f64::from(w)).collect::<Vec<_>>()
    };
    let added = norm(&wide(delta), delta_weight);
    let sums: Vec<f64> = wide(x).iter().zip(added).map(|(x, d)| x + d).collect();
    let out = norm(&sums, weight);
    (sums, out)
}

#[test]
fn add_normed_rmsnorm_matches_the_naive_version() {
    let mut random = Random(12);
    for isa in isas() {
        let mut backend = backend(isa, 2);
        for width in [1, 5, 16, 63, 200, 5000] {
            for rows in [1, 2, 9, 17] {
                let (x, delta) = (random.vec(rows * width), random.vec(rows * width));
                let delta: Vec<f32> = delta.iter().map(|x| x / 64.0).collect();
                let (delta_weight, weight) = (random.vec(width), random.vec(width));
                let mut residual = buffer(&mut backend, &x, width);
                let delta_buffer = buffer(&mut backend, &delta, width);
                let vectors = [&delta_weight, &weight].map(|it| backend.load_vector(it).unwrap());
                let [first, second] = &vectors;
                let mut out = poisoned(&mut backend, rows + 1, width);
                backend
                    .add_normed_rmsnorm(&mut residual, &delta_buffer, first, second, 1e-6, &mut out)
                    .unwrap();
                assert_eq!(out.rows(), rows);
                for row in 0..rows {
                    let at = row * width..(row + 1) * width;
                    let (sums, want) = normed_twice(
                        &x[at.clone()],
                        &delta[at.clone()],
                        &delta_weight,
                        &weight,
                        1e-6,
                    );
                    let got = residual.values()[at.clone()].iter().zip(sums);
                    for (&got, want) in got.chain(out.values()[at].iter().zip(want)) {
                        assert_close(got, want, want.abs() * 4e-6 + 4e-6, isa);
                    }
                }
            }
        }
    }
}

#[test]
fn add_normed_matches_the_naive_version() {
    let mut random = Random(14);
    for isa in isas() {
        let mut backend = backend(isa, 2);
        for (width, rows, adds) in [(1, 1, true), (5, 9, true), (200, 2, false), (5000, 3, true)] {
            let (x, delta) = (random.vec(rows * width), random.vec(rows * width));
            let weight = random.vec(width);
            let mut residual = buffer(&mut backend, &x, width);
            let delta_buffer = buffer(&mut backend, &delta, width);
            let weight_vector = backend.load_vector(&weight).unwrap();
            let mut out = poisoned(&mut backend, rows + 1, width);
            let added = adds.then_some((&delta_buffer, &weight_vector));
            backend.add_normed(&mut residual, added, 1e-6, &mut out).unwrap();
            assert_eq!(bits(residual.values()), bits(out.values()));
            for row in 0..rows {
                let at = row * width..(row + 1) * width;
                let want = match adds {
                    true => {
                        normed_twice(&x[at.clone()], &delta[at.clone()], &weight, &weight, 1e-6).0
                    }
                    false => x[at.clone()].iter().map(|x| f64::from(*x)).collect(),
                };
                for (&got, want) in out.values()[at].iter().zip(want) {
                    assert_close(got, want, want.abs() * 4e-6 + 4e-6, isa);
                }
            }
        }
    }
}

#[test]
fn sums_are_the_same_bits_however_many_threads_make_them() {
    let mut random = Random(13);
    for isa in isas() {
        for (rows, width) in [(1, 1), (3, 77), (40, 2050)] {
            let (x, other) = (random.vec(rows * width), random.vec(rows * width));
            let want: Vec<f32> = x.iter().zip(&other).map(|(x, y)| x + y).collect();
            for threads in [1, 3] {
                let mut backend = backend(isa, threads);
                let mut sum = buffer(&mut backend, &x, width);
                let other = buffer(&mut backend, &other, width);
                backend.add(&mut sum, &other).unwrap();
                assert_eq!(bits(sum.values()), bits(&want), "{isa} {rows} x {width} {threads}");
            }
        }
    }
    let mut backend = backend(kernels::cpu::Isa::Portable, 2);
    let mut sum = buffer(&mut backend, &[1.0; 8], 4);
    for unlike in [buffer(&mut backend, &[1.0; 8], 2), buffer(&mut backend, &[1.0; 4], 4)] {
        assert!(matches!(backend.add(&mut sum, &unlike), Err(KernelError::Shape { .. })));
    }
}

#[test]
fn shapes_that_do_not_fit_are_errors() {
    let mut backend = backend(kernels::cpu::Isa::Portable, 1);
    let mut residual = buffer(&mut backend, &[1.0; 8], 4);
    let fewer = buffer(&mut backend, &[1.0; 4], 4);
    let delta = buffer(&mut backend, &[1.0; 8], 4);
    let (weight, long) =
        (backend.load_vector(&[1.0; 4]).unwrap(), backend.load_vector(&[1.0; 5]).unwrap());
    let mut out = poisoned(&mut backend, 2, 4);
    let mut wide = poisoned(&mut backend, 2, 5);
    for error in [
        backend.add_rmsnorm(&mut residual, Some(&fewer), &weight, 0.0, &mut out),
        backend.add_rmsnorm(&mut residual, None, &long, 0.0, &mut out),
        backend.add_rmsnorm(&mut residual, None, &weight, 0.0, &mut wide),
        backend.add_normed_rmsnorm(&mut residual, &fewer, &weight, &weight, 0.0, &mut out),
        backend.add_normed_rmsnorm(&mut residual, &delta, &long, &weight, 0.0, &mut out),
        backend.add_normed_rmsnorm(&mut residual, &delta, &weight, &long, 0.0, &mut out),
        backend.add_normed_rmsnorm(&mut residual, &delta, &weight, &weight, 0.0, &mut wide),
    ] {
        assert!(matches!(error, Err(KernelError::Shape { .. })), "{error:?}");
    }
}
