//! Norms that few models have, against naive versions: LayerNorms; q and k normalised over all
//! heads.
use kernels::backend::prelude::*;
use kernels::backend::{
    AttentionAt, Batch, Buffer, KvShape, KvStorage, LayerNorm, QkNorm, QkvInput, QkvWeights,
    RopeTable,
};
use kernels::collective::single_rank;
use kernels::cpu::Precision;
use kernels::{Backend, KernelError, ReferenceBackend};

use crate::attention::shape;
use crate::support::{
    Random, Weight, assert_close, backend, backend_in, bits, buffer, isas, poisoned,
};

/// The LayerNorm of a row, in f64.
pub(crate) fn layernorm(row: &[f32], weight: &[f32], bias: &[f32], eps: f64) -> Vec<f64> {
    let len = row.len() as f64;
    let mean = row.iter().map(|x| f64::from(*x)).sum::<f64>() / len;
    let variance = row.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / len;
    let norm = |x: &f32| (f64::from(*x) - mean) / (variance + eps).sqrt();
    let vectors = weight.iter().zip(bias);
    row.iter().zip(vectors).map(|(x, (w, b))| norm(x) * f64::from(*w) + f64::from(*b)).collect()
}

#[test]
fn add_layernorm_matches_the_naive_version() {
    let mut random = Random(41);
    for isa in isas() {
        let mut backend = backend(isa, 2);
        for (width, rows, adds) in
            [(1, 1, true), (5, 9, true), (16, 2, false), (200, 2, true), (5000, 3, false)]
        {
            // Far from zero, so that a mean that is not subtracted shows.
            let x: Vec<f32> = random.vec(rows * width).iter().map(|x| x + 3.0).collect();
            let delta = random.vec(rows * width);
            let (weight, bias) = (random.vec(width), random.vec(width));
            let mut residual = buffer(&mut backend, &x, width);
            let delta_buffer = buffer(&mut backend, &delta, width);
            let vectors = [&weight, &bias].map(|it| backend.load_vector(it).unwrap());
            let norm = LayerNorm { weight: &vectors[0], bias: &vectors[1] };
            let mut out = poisoned(&mut backend, rows + 1, width);
            let given = adds.then_some(&delta_buffer);
            backend.add_layernorm(&mut residual, given, norm, 1e-5, &mut out).unwrap();
            assert_eq!(out.rows(), rows);
            let sums: Vec<f32> =
                x.iter().zip(&delta).map(|(x, d)| if adds { x + d } else { *x }).collect();
            assert_eq!(bits(residual.values()), bits(&sums));
            for (sums, out) in sums.chunks(width).zip(out.values().chunks(width)) {
                for (got, want) in out.iter().zip(layernorm(sums, &weight, &bias, 1e-5)) {
                    assert_close(*got, want, want.abs() * 1e-5 + 2e-5, isa);
                }
            }
        }
    }
}

/// Sums of squares of q and k over `parts` parts, and both normalised by them.
fn normed<B: Backend>(
    backend: &mut B,
    read: impl Fn(&mut B, &B::Buffer) -> Vec<f32>,
    fill: impl Fn(&mut B, &[f32], usize) -> B::Buffer,
    qkv: (&[f32], usize),
    norm: &QkNorm,
    weight: &[f32],
) -> (Vec<f32>, Vec<f32>) {
    let mut rows = fill(backend, qkv.0, qkv.1);
    let mut squares = backend.new_buffer(rows.rows() + 1, 2).unwrap();
    backend.qk_squares(&rows, norm, &mut squares).unwrap();
    let weight = backend.load_vector(weight).unwrap();
    backend.qk_scale(&mut rows, norm, &squares, &weight).unwrap();
    (read(backend, &squares), read(backend, &rows))
}

#[test]
fn q_and_k_are_normalised_over_all_heads() {
    let mut random = Random(42);
    for ([q, k], v, [sections, k_sections], parts) in [
        ([8, 4], 4, [1, 1], 1),
        ([48, 16], 16, [4, 2], 4),
        ([320, 40], 40, [8, 1], 8),
        ([1024, 1024], 1024, [2, 2], 2),
    ] {
        let (rows, width) = (3, q + k + v);
        let values: Vec<f32> = random.vec(rows * width).iter().map(|x| x / 8.0).collect();
        let weight = random.vec(q + k);
        // As if there were a second rank with the same values.
        let copies = parts / k_sections;
        let counts = [q, k * copies];
        let norm =
            QkNorm { columns: [q, k], sections: [sections, k_sections], parts, counts, eps: 1e-6 };
        let of = |row: usize, which: usize| {
            let start = row * width + which * q;
            let own = &values[start..start + norm.columns[which]];
            own.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>()
        };
        let check = |squares: &[f32], made: &[f32], what: &str| {
            for row in 0..rows {
                for (which, copies) in [1, copies].into_iter().enumerate() {
                    let want = of(row, which) * copies as f64;
                    assert_close(squares[row * 2 + which], want, want * 1e-5, what);
                }
                for column in 0..width {
                    let at = row * width + column;
                    let Some(weight) = weight.get(column) else {
                        assert_eq!(made[at].to_bits(), values[at].to_bits(), "v is not changed");
                        continue;
                    };
                    let which = usize::from(column >= q);
                    let mean = of(row, which) / norm.columns[which] as f64;
                    let want = f64::from(values[at]) / (mean + 1e-6).sqrt();
                    let want = want * f64::from(*weight);
                    assert_close(made[at], want, want.abs() * 1e-5 + 1e-6, what);
                }
            }
        };
        for isa in isas() {
            let (squares, made) = normed(
                &mut backend(isa, 2),
                |_, rows| rows.values().to_vec(),
                buffer,
                (&values, width),
                &norm,
                &weight,
            );
            check(&squares, &made, &format!("{isa}"));
        }
        let fill = |backend: &mut ReferenceBackend, values: &[f32], width: usize| {
            let mut made = backend.new_buffer(rows, width).unwrap();
            made.values_mut().copy_from_slice(values);
            made
        };
        let read = |_: &mut ReferenceBackend, rows: &_| Buffered::values(rows);
        let reference = &mut ReferenceBackend::new(single_rank());
        let (squares, made) = normed(reference, read, fill, (&values, width), &norm, &weight);
        check(&squares, &made, "the reference");
    }
}

trait Buffered {
    fn values(&self) -> Vec<f32>;
}

impl Buffered for kernels::reference::ReferenceBuffer {
    fn values(&self) -> Vec<f32> {
        self.values().to_vec()
    }
}

/// Several ranks' sums, added up as ranks do, have the bits of one rank's with their parts.
#[test]
fn sums_of_squares_have_the_same_bits_at_every_degree() {
    let mut random = Random(43);
    let (q, k) = (8 * 20, 2 * 20);
    let values = random.vec(q + 2 * k);
    for isa in isas() {
        let mut backend = backend(isa, 1);
        let mut of = |degree: usize| -> Vec<f32> {
            let parts = 8 / degree;
            // Four of eight ranks have the same KV head.
            let kv_heads = (2 / degree).max(1);
            let one = |rank: usize| {
                let own = &values[rank * q / degree..(rank + 1) * q / degree];
                let kv = rank * 2 / degree * 20;
                let keys = &values[q + kv..q + kv + kv_heads * 20];
                let all = [own, keys].concat();
                let norm = QkNorm {
                    columns: [own.len(), keys.len()],
                    sections: [parts, parts.min(kv_heads)],
                    parts,
                    counts: [1; 2],
                    eps: 0.0,
                };
                let mut out = backend.new_buffer(1, 2).unwrap();
                let rows = buffer(&mut backend, &all, all.len());
                backend.qk_squares(&rows, &norm, &mut out).unwrap();
                out.values().to_vec()
            };
            let mut sums: Vec<Vec<f32>> = (0..degree).map(one).collect();
            while sums.len() > 1 {
                let add =
                    |pair: &[Vec<f32>]| vec![pair[0][0] + pair[1][0], pair[0][1] + pair[1][1]];
                sums = sums.chunks(2).map(add).collect();
            }
            sums.remove(0)
        };
        let whole = of(8);
        for degree in [1, 2, 4] {
            assert_eq!(bits(&of(degree)), bits(&whole), "{isa}: {degree} ranks as 8");
        }
    }
}

/// Projected by a product of its own and then rotated and written, q, K and V have the bits of the
/// fused operation.
#[test]
fn what_is_projected_before_is_rotated_and_written_as_always() {
    let mut random = Random(44);
    let (shape, hidden, rows) = (shape(4, 2, 16, None), 24, 5);
    let width = (4 + 2 * 2) * 16;
    let weight = Weight::random(&mut random, width, hidden);
    let (bias, x) = (random.vec(width), random.vec(rows * hidden));
    let angles = [random.vec(rows * 8), random.vec(rows * 8)];
    let positions: Vec<u32> = (0..rows as u32).collect();
    let seq = kernels::backend::SeqRows {
        row_start: 0,
        num_rows: rows as u32,
        context_len: rows as u32,
        table_start: 0,
        table_len: 2,
    };
    let batch =
        Batch { positions: &positions, slots: &positions, seqs: &[seq], block_tables: &[0, 1] };
    let at = AttentionAt { shape: &shape, batch: &batch, layer: 0 };
    let kv = KvShape {
        num_layers: 1,
        num_kv_heads: 2,
        head_dim: 16,
        latent: None,
        block_size: 4,
        num_blocks: 2,
        storage: KvStorage::AsTaken,
    };
    for (isa, precision) in
        isas().flat_map(|isa| [Precision::Float32, Precision::Bfloat16].map(|it| (isa, it)))
    {
        let run = |apart: bool| {
            let mut backend = backend_in(isa, precision, 2);
            let matrix = weight.load(&mut backend);
            let rope = RopeTable {
                cos: backend.load_vector(&angles[0]).unwrap(),
                sin: backend.load_vector(&angles[1]).unwrap(),
                q_scale: Some(backend.load_vector(&[1.0, 1.5, 0.5, 2.0, 3.0]).unwrap()),
            };
            let bias = Some(backend.load_vector(&bias).unwrap());
            let mut cache = backend.new_kv_cache(kv).unwrap();
            let x = buffer(&mut backend, &x, hidden);
            let mut q = poisoned(&mut backend, rows, 64);
            if apart {
                let mut projected = poisoned(&mut backend, rows, width);
                backend.linear(&x, &matrix, bias.as_ref(), &mut projected).unwrap();
                backend.rope_write(&mut projected, &rope, at, &mut cache, &mut q).unwrap();
            } else {
                let weights = QkvWeights { weight: matrix, bias, q_norm: None, k_norm: None };
                let input = QkvInput { x: &x, weights: &weights, addend: None, rope: &rope };
                backend.qkv_rope_write(input, at, &mut cache, &mut q).unwrap();
            }
            let mut out = poisoned(&mut backend, rows, 64);
            backend.paged_attention(&q, None, at, &cache, &mut out).unwrap();
            [bits(q.values()), bits(out.values())]
        };
        assert_eq!(run(true), run(false), "{isa} {precision}");
    }
    let mut backend = backend(kernels::cpu::Isa::Portable, 1);
    let qkv = buffer(&mut backend, &[0.0; 24], 12);
    let mut out = poisoned(&mut backend, 2, 2);
    let norm = QkNorm { columns: [8, 4], sections: [1; 2], parts: 1, counts: [8, 4], eps: 0.0 };
    for wrong in [
        QkNorm { columns: [8, 5], ..norm },
        QkNorm { parts: 3, ..norm },
        QkNorm { parts: 128, ..norm },
        QkNorm { sections: [2, 1], ..norm },
        QkNorm { sections: [0, 1], ..norm },
        QkNorm { counts: [8, 0], ..norm },
    ] {
        let result = backend.qk_squares(&qkv, &wrong, &mut out);
        assert!(matches!(result, Err(KernelError::Shape { .. })), "{wrong:?}");
    }
}
