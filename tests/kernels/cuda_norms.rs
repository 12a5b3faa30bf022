//! Emulated kernels of norms that few models have.
use crate::cuda_emulation::{
    Arg, f32s, launch, poison_bf16, poison_f32, read_bf16, read_f32, some_f32s, u32s,
};
use crate::cuda_rmsnorm::is_live;
use crate::norms::layernorm;
use crate::support::{Random, assert_close, bits};

/// Half a unit in the last place of bf16, relative, with some margin.
const BF16: f64 = 1.01 / 256.0;

#[test]
fn add_layernorm_is_its_definition() {
    let mut random = Random(51);
    for (width, adds) in [(4, true), (100, false), (63, true), (1, false), (8196, true)] {
        let (rows, stride) = (3, width + 4);
        let x: Vec<f32> = random.vec(rows * width).iter().map(|x| x + 3.0).collect();
        let delta = random.vec(rows * width);
        let (weight, bias) = (random.vec(width), random.vec(width));
        let args = [
            f32s(&x),
            some_f32s(adds.then_some(&delta)),
            f32s(&weight),
            f32s(&bias),
            poison_bf16(rows * stride),
            Arg::U32(width as u32),
            Arg::U32(stride as u32),
            Arg::F32(1e-5),
            u32s(&[2]),
        ];
        let results = launch("tutti_add_layernorm", [rows, 1, 1], 512).run(&args);
        let (residual, out) =
            (read_f32(&results[0]), read_bf16(&results[if adds { 4 } else { 3 }]));
        for row in 0..rows {
            let at = row * width..(row + 1) * width;
            let out = &out[row * stride..(row + 1) * stride];
            if !is_live(row, &x[at.clone()], &residual[at.clone()], out) {
                continue;
            }
            let sums: Vec<f32> =
                at.clone().map(|i| if adds { x[i] + delta[i] } else { x[i] }).collect();
            assert_eq!(bits(&residual[at]), bits(&sums));
            for (i, want) in layernorm(&sums, &weight, &bias, 1e-5).into_iter().enumerate() {
                assert_close(out[i], want, want.abs() * BF16 + 2e-5, (width, row, i).0);
            }
        }
    }
}

#[test]
fn q_and_k_are_normalised_over_all_heads() {
    let mut random = Random(52);
    for ([q, k], [q_sections, k_sections], parts) in
        [([8, 8], [1, 1], 1), ([96, 32], [4, 2], 4), ([640, 80], [8, 1], 8), ([6, 3], [2, 1], 2)]
    {
        let (rows, stride) = (3, q + 2 * k);
        let values = random.vec(rows * stride);
        let weight = random.vec(q + k);
        let (n, k_count) = (|n: usize| Arg::U32(n as u32), k * parts / k_sections);
        let args = [
            f32s(&values),
            poison_f32(rows * 2),
            n(q),
            n(k),
            n(stride),
            n(q_sections),
            n(k_sections),
            n(parts),
            u32s(&[2]),
        ];
        let squares = read_f32(&launch("tutti_qk_squares", [rows, 1, 1], 256).run(&args)[1]);
        assert!(squares[4..].iter().all(|x| x.is_nan()), "not live");
        let of = |row: usize, which: usize| {
            let start = row * stride + which * q;
            let own = &values[start..start + [q, k][which]];
            own.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>()
        };
        let known: Vec<f32> = squares[..4].iter().copied().chain([1.0, 1.0]).collect();
        let args = [
            f32s(&values),
            f32s(&known),
            f32s(&weight),
            n(q),
            n(k),
            n(stride),
            n(q),
            n(k_count),
            Arg::F32(1e-6),
            u32s(&[2]),
        ];
        let grid = [rows, (q + k).div_ceil(1024), 1];
        let made = read_f32(&launch("tutti_qk_scale", grid, 256).run(&args)[0]);
        for row in 0..rows {
            for column in 0..stride {
                let at = row * stride + column;
                let Some(weight) = weight.get(column).filter(|_| row < 2) else {
                    assert_eq!(made[at].to_bits(), values[at].to_bits(), "v, or not live");
                    continue;
                };
                let which = usize::from(column >= q);
                let mean = of(row, which) / [q, k][which] as f64;
                let want = f64::from(values[at]) / (mean + 1e-6).sqrt() * f64::from(*weight);
                assert_close(made[at], want, want.abs() * 1e-5 + 1e-6, (q, k, parts).0);
            }
            if row < 2 {
                let copies = (parts / k_sections) as f64;
                for (which, copies) in [1.0, copies].into_iter().enumerate() {
                    let want = of(row, which) * copies;
                    assert_close(squares[row * 2 + which], want, want * 1e-5, which);
                }
            }
        }
    }
}
