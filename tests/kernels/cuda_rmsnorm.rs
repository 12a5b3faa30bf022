//! Emulated kernels of `rmsnorm.cu`.
use crate::cuda_emulation::{
    Arg, bf16s, f32s, launch, poison_bf16, read_bf16, read_f32, rounded_all, some_f32s, u32s,
};
use crate::rows::normed_twice;
use crate::support::{Random, assert_close, bits};

/// Half a unit in the last place of bf16, relative, with some margin.
const BF16: f64 = 1.01 / 256.0;

/// Whether a row is live: rows 0 and 1 are. Its padding must not be written, and nothing of a row
/// that is not live: neither `x`, which became `sums`, nor `out`, which has `x.len()` elements and
/// padding.
pub(crate) fn is_live(row: usize, x: &[f32], sums: &[f32], out: &[f32]) -> bool {
    assert!(out[x.len()..].iter().all(|x| x.is_nan()), "padding is written");
    if row == 2 {
        assert_eq!(bits(sums), bits(x), "not live");
        assert!(out.iter().all(|x| x.is_nan()), "not live");
    }
    row < 2
}

#[test]
fn add_rmsnorm_is_its_definition() {
    let mut random = Random(2);
    for (width, with_delta) in [
        (4, true),
        (64, false),
        (100, true),
        (63, true),
        (1, false),
        (2048, true),
        (8196, true),
        (9999, false),
    ] {
        let rows = 3;
        let stride = width + 4;
        let x = random.vec(rows * width);
        let delta = random.vec(rows * width);
        let weight = random.vec(width);
        let args = [
            f32s(&x),
            if with_delta { f32s(&delta) } else { Arg::Null },
            f32s(&weight),
            poison_bf16(rows * stride),
            Arg::U32(width as u32),
            Arg::U32(stride as u32),
            Arg::F32(1e-5),
            u32s(&[2]),
        ];
        let results = launch("tutti_add_rmsnorm", [rows, 1, 1], 512).run(&args);
        let residual = read_f32(&results[0]);
        let out = read_bf16(&results[if with_delta { 3 } else { 2 }]);
        for row in 0..rows {
            let at = row * width..(row + 1) * width;
            let live = row < 2;
            let sums: Vec<f32> = at
                .clone()
                .map(|i| if with_delta && live { x[i] + delta[i] } else { x[i] })
                .collect();
            assert_eq!(bits(&residual[at]), bits(&sums));
            let square: f64 = sums.iter().map(|&x| f64::from(x).powi(2)).sum();
            let scale = 1.0 / (square / width as f64 + 1e-5).sqrt();
            let out = &out[row * stride..(row + 1) * stride];
            for i in 0..width {
                if live {
                    let want = f64::from(sums[i]) * scale * f64::from(weight[i]);
                    assert_close(out[i], want, want.abs() * BF16 + 1e-6, (width, row, i).0);
                } else {
                    assert!(out[i].is_nan());
                }
            }
            assert!(out[width..].iter().all(|x| x.is_nan()), "padding is written");
        }
    }
}

/// An addend in bf16 gives what the same numbers give in f32, bit for bit.
#[test]
fn add_rmsnorm_takes_addends_in_bf16() {
    let mut random = Random(21);
    for width in [4, 100, 63, 1, 2048, 8196, 9999] {
        let (rows, stride) = (3, width + 4);
        let (x, weight) = (random.vec(rows * width), random.vec(width));
        let delta = rounded_all(&random.vec(rows * width));
        let run = |name: &str, delta: Arg| {
            let args = [
                f32s(&x),
                delta,
                f32s(&weight),
                poison_bf16(rows * stride),
                Arg::U32(width as u32),
                Arg::U32(stride as u32),
                Arg::F32(1e-5),
                u32s(&[2]),
            ];
            let results = launch(name, [rows, 1, 1], 512).run(&args);
            (bits(&read_f32(&results[0])), bits(&read_bf16(&results[3])))
        };
        let wide = run("tutti_add_rmsnorm", f32s(&delta));
        assert_eq!(run("tutti_add_rmsnorm_bf16", bf16s(&delta)), wide, "{width}");
        assert_ne!(wide.0, bits(&x), "something is added");
    }
}

#[test]
fn add_normed_rmsnorm_is_its_definition() {
    let mut random = Random(13);
    for width in [4, 64, 100, 63, 1, 2560, 8196, 9999] {
        let (rows, stride) = (3, width + 4);
        let (x, delta) = (random.vec(rows * width), random.vec(rows * width));
        // Very small values: the norm scales them to the size of the weight.
        let delta: Vec<f32> = delta.iter().map(|x| x / 64.0).collect();
        let (delta_weight, weight) = (random.vec(width), random.vec(width));
        let args = [
            f32s(&x),
            f32s(&delta),
            f32s(&delta_weight),
            f32s(&weight),
            poison_bf16(rows * stride),
            Arg::U32(width as u32),
            Arg::U32(stride as u32),
            Arg::F32(1e-6),
            u32s(&[2]),
        ];
        let results = launch("tutti_add_normed_rmsnorm", [rows, 1, 1], 512).run(&args);
        let (residual, out) = (read_f32(&results[0]), read_bf16(&results[4]));
        for row in 0..rows {
            let at = row * width..(row + 1) * width;
            let (x, sums) = (&x[at.clone()], &residual[at.clone()]);
            let out = &out[row * stride..(row + 1) * stride];
            if !is_live(row, x, sums, out) {
                continue;
            }
            let (want_sums, want) = normed_twice(x, &delta[at], &delta_weight, &weight, 1e-6);
            for i in 0..width {
                let (sum, want) = (want_sums[i], want[i]);
                assert_close(sums[i], sum, sum.abs() * 2e-6 + 2e-6, (width, row, i).0);
                assert_close(out[i], want, want.abs() * BF16 + 1e-5, (width, row, i).0);
            }
        }
    }
}

#[test]
fn add_normed_is_its_definition() {
    let mut random = Random(14);
    for (width, adds) in
        [(4, true), (64, false), (100, true), (63, true), (1, false), (2560, true), (8196, true)]
    {
        let (rows, stride) = (3, width + 4);
        let (x, delta) = (random.vec(rows * width), random.vec(rows * width));
        let weight = random.vec(width);
        let args = [
            f32s(&x),
            some_f32s(adds.then_some(&delta)),
            some_f32s(adds.then_some(&weight)),
            poison_bf16(rows * stride),
            Arg::U32(width as u32),
            Arg::U32(stride as u32),
            Arg::F32(1e-6),
            u32s(&[2]),
        ];
        let results = launch("tutti_add_normed", [rows, 1, 1], 512).run(&args);
        let (residual, out) =
            (read_f32(&results[0]), read_bf16(&results[if adds { 3 } else { 1 }]));
        for row in 0..rows {
            let at = row * width..(row + 1) * width;
            let (x, sums) = (&x[at.clone()], &residual[at.clone()]);
            let out = &out[row * stride..(row + 1) * stride];
            if !is_live(row, x, sums, out) {
                continue;
            }
            let want = match adds {
                true => normed_twice(x, &delta[at], &weight, &weight, 1e-6).0,
                false => x.iter().map(|x| f64::from(*x)).collect(),
            };
            for i in 0..width {
                assert_close(sums[i], want[i], want[i].abs() * 2e-6 + 2e-6, (width, row, i).0);
                assert_close(out[i], want[i], want[i].abs() * BF16 + 1e-5, (width, row, i).0);
            }
        }
    }
}
