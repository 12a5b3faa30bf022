//! Multi-head latent attention, against one in f64 that makes K and V of every head of the latents,
//! as the models are defined, where backends never make them.
use kernels::backend::prelude::*;
use kernels::backend::{
    AttentionAt, AttentionShape, Batch, KvShape, KvStorage, LatentInput, RopeTable, SeqRows,
};
use kernels::cpu::{CpuBackend, Precision};

use crate::attention::shuffled;
use crate::support::{
    Random, Weight, as_taken, assert_close, backend_in, bits, buffer, poisoned, rounded_fp8,
    variants,
};

const POSITIONS: usize = 64;
const LAYERS: usize = 2;

/// A layer and one sequence's projected rows.
struct Case {
    heads: usize,
    plain: usize,
    rotated: usize,
    latent: usize,
    value: usize,
    block_size: usize,
    storage: KvStorage,
    scale: f32,
    norm: Vec<f32>,
    /// For each head, what makes K of a latent, transposed; and what makes V.
    keys: Vec<Weight>,
    values: Vec<Weight>,
    /// `[rows, heads * (plain + rotated)]`
    q: Vec<f32>,
    /// `[rows, latent + rotated]`
    kv: Vec<f32>,
    rows: usize,
}

impl Case {
    fn random(random: &mut Random, heads: usize, sizes: [usize; 4], block_size: usize) -> Self {
        let [plain, rotated, latent, value] = sizes;
        let rows = 45;
        let mut matrices = |n: usize, k: usize| {
            (0..heads).map(|_| Weight::random(random, n, k)).collect::<Vec<_>>()
        };
        let (keys, values) = (matrices(latent, plain), matrices(value, latent));
        let peaked = |all: Vec<f32>| all.iter().map(|x| 2.0 * x).collect::<Vec<f32>>();
        Self {
            heads,
            plain,
            rotated,
            latent,
            value,
            block_size,
            storage: KvStorage::AsTaken,
            scale: 0.7,
            norm: random.vec(latent),
            keys,
            values,
            q: peaked(random.vec(rows * heads * (plain + rotated))),
            kv: random.vec(rows * (latent + rotated)),
            rows,
        }
    }

    fn width(&self) -> usize {
        self.latent + self.rotated
    }

    /// The angle by which pair `i` is rotated.
    fn angle(&self, position: usize, i: usize) -> f64 {
        position as f64 * 50f64.powf(-(i as f64) / (self.rotated / 2) as f64)
    }

    fn rotate(&self, position: usize, x: &[f64]) -> Vec<f64> {
        let half = self.rotated / 2;
        (0..self.rotated)
            .map(|i| {
                let (sin, cos) = self.angle(position, i % half).sin_cos();
                if i < half {
                    x[i] * cos - x[i + half] * sin
                } else {
                    x[i] * cos + x[i - half] * sin
                }
            })
            .collect()
    }

    /// Results of all rows, `[rows, heads * value]`, in exact arithmetic on what the cache holds.
    fn want(&self, precision: Precision) -> Vec<f64> {
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
        let cached: Vec<Vec<f64>> = (0..self.rows)
            .map(|row| {
                let kv = wide(&self.kv[row * self.width()..][..self.width()]);
                let squares: f64 = kv[..self.latent].iter().map(|x| x * x).sum();
                let rms = (squares / self.latent as f64 + 1e-6).sqrt();
                let normed = kv[..self.latent].iter().zip(&self.norm);
                let mut all: Vec<f64> = normed.map(|(x, w)| x / rms * f64::from(*w)).collect();
                all.extend(self.rotate(row, &kv[self.latent..]));
                match (self.storage, precision) {
                    (KvStorage::Fp8, _) => all.iter().map(|&x| rounded_fp8(x)).collect(),
                    (KvStorage::AsTaken, precision) => {
                        let narrow: Vec<f32> = all.iter().map(|&x| x as f32).collect();
                        wide(&as_taken(precision, &narrow))
                    }
                }
            })
            .collect();
        let mut out = Vec::new();
        for row in 0..self.rows {
            for head in 0..self.heads {
                let per_head = self.plain + self.rotated;
                let q = wide(&self.q[(row * self.heads + head) * per_head..][..per_head]);
                let rotated = self.rotate(row, &q[self.plain..]);
                let scores: Vec<f64> = cached[..=row]
                    .iter()
                    .map(|token| {
                        let (latent, shared) = token.split_at(self.latent);
                        // This head's K of the token.
                        let key = |d: usize| -> f64 {
                            let column = (0..self.latent).map(|c| self.keys[head].row(c)[d]);
                            column.zip(latent).map(|(w, c)| f64::from(w) * c).sum()
                        };
                        let plain: f64 = (0..self.plain).map(|d| q[d] * key(d)).sum();
                        let turned: f64 = rotated.iter().zip(shared).map(|(a, b)| a * b).sum();
                        (plain + turned) * f64::from(self.scale) / (self.width() as f64).sqrt()
                    })
                    .collect();
                let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
                let total: f64 = weights.iter().sum();
                for d in 0..self.value {
                    let of = |token: &Vec<f64>| -> f64 {
                        let row = self.values[head].row(d).iter();
                        row.zip(token).map(|(&w, c)| f64::from(w) * c).sum()
                    };
                    let sum: f64 =
                        weights.iter().zip(&cached).map(|(w, token)| w * of(token)).sum();
                    out.push(sum / total);
                }
            }
        }
        out
    }

    /// Results of all rows, computed in these chunks.
    fn run(&self, backend: &mut CpuBackend, random: &mut Random, chunks: &[usize]) -> Vec<f32> {
        let half = self.rotated / 2;
        let table = |of: fn(f64) -> f64| -> Vec<f32> {
            let all = (0..POSITIONS * half).map(|i| of(self.angle(i / half, i % half)) as f32);
            all.collect()
        };
        let mut vector = |values: &[f32]| backend.load_vector(values).unwrap();
        let (cos, sin) = (vector(&table(f64::cos)), vector(&table(f64::sin)));
        let rope = RopeTable { cos, sin, q_scale: None };
        let norm = vector(&self.norm);
        let mut stack = |all: &[Weight]| {
            backend.load_stack(&all.iter().map(Weight::host).collect::<Vec<_>>()).unwrap()
        };
        let (keys, values) = (stack(&self.keys), stack(&self.values));
        let shape = AttentionShape {
            num_heads: self.heads,
            num_kv_heads: 1,
            head_dim: self.width(),
            norm_eps: 1e-6,
            sliding_window: None,
            softcap: None,
            latent: Some(self.latent),
        };
        let blocks = shuffled(random, self.rows.div_ceil(self.block_size) + 2);
        let kv_shape = KvShape {
            num_layers: LAYERS,
            num_kv_heads: 1,
            head_dim: self.width(),
            latent: Some(self.latent),
            block_size: self.block_size,
            num_blocks: blocks.len(),
            storage: self.storage,
        };
        let mut cache = backend.new_kv_cache(kv_shape).unwrap();
        let (mut out, mut done) = (Vec::new(), 0);
        for &rows in chunks {
            let seq = SeqRows {
                row_start: 0,
                num_rows: rows as u32,
                context_len: (done + rows) as u32,
                table_start: 0,
                table_len: blocks.len() as u32,
            };
            let positions: Vec<u32> = (done..done + rows).map(|at| at as u32).collect();
            let size = self.block_size;
            let slots: Vec<u32> = (done..done + rows)
                .map(|at| blocks[at / size] * size as u32 + (at % size) as u32)
                .collect();
            let seqs = [seq];
            let batch =
                Batch { positions: &positions, slots: &slots, seqs: &seqs, block_tables: &blocks };
            let at = AttentionAt { shape: &shape, batch: &batch, layer: 1 };
            let part =
                |all: &[f32], width: usize| all[done * width..(done + rows) * width].to_vec();
            let q_width = self.heads * (self.plain + self.rotated);
            let q = buffer(backend, &part(&self.q, q_width), q_width);
            let mut kv = buffer(backend, &part(&self.kv, self.width()), self.width());
            let mut plain = poisoned(backend, rows + 1, self.heads * self.plain);
            let mut q_out = poisoned(backend, rows + 1, self.heads * self.width());
            let mut attended = poisoned(backend, rows + 1, self.heads * self.latent);
            let mut mixed = poisoned(backend, rows + 1, self.heads * self.value);
            let input =
                LatentInput { q: &q, kv: &mut kv, norm: &norm, rope: &rope, scale: self.scale };
            backend.latent_write(input, at, &mut cache, &mut plain, &mut q_out).unwrap();
            backend.heads_product(&plain, &keys, self.scale, &mut q_out).unwrap();
            backend.paged_attention(&q_out, None, at, &cache, &mut attended).unwrap();
            backend.heads_product(&attended, &values, 1.0, &mut mixed).unwrap();
            out.extend_from_slice(mixed.values());
            done += rows;
        }
        out
    }
}

fn check(case: &Case) {
    let whole = [case.rows];
    for (isa, precision) in variants() {
        let mut backend = backend_in(isa, precision, 2);
        let mut random = Random(5);
        let got = case.run(&mut backend, &mut random, &whole);
        // q, attention's weights and its results are rounded to bf16; so is what heads make of q.
        let (relative, least) = match precision {
            Precision::Float32 => (1e-4, 1e-4),
            Precision::Bfloat16 => (0.03, 0.05),
        };
        for (i, (&got, want)) in got.iter().zip(case.want(precision)).enumerate() {
            assert_close(got, want, relative * want.abs() + least, format!("{isa} {i}"));
        }
        for chunks in [&[44, 1][..], &[1, 17, 1, 26]] {
            let other = case.run(&mut backend, &mut random, chunks);
            assert_eq!(bits(&got), bits(&other), "{isa} {precision}: {chunks:?}");
        }
        let mut alone = backend_in(isa, precision, 1);
        assert_eq!(bits(&got), bits(&case.run(&mut alone, &mut random, &whole)), "{isa}");
    }
}

#[test]
fn attention_over_latents_is_that_over_the_heads_they_make() {
    let mut random = Random(91);
    check(&Case::random(&mut random, 3, [8, 4, 24, 6], 5));
    check(&Case::random(&mut random, 10, [16, 8, 32, 12], 16));
    let fp8 = Case::random(&mut random, 2, [8, 16, 80, 8], 16);
    check(&Case { storage: KvStorage::Fp8, ..fp8 });
}
