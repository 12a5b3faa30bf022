//! qkv_rope_write and paged_attention against a naive attention over unpaged K and V in f64.
use kernels::KernelError;
use kernels::backend::prelude::*;
use kernels::backend::{
    AttentionAt, AttentionShape, Batch, KvShape, KvStorage, QkvInput, QkvWeights, RopeTable,
    SeqRows,
};
use kernels::cpu::{CpuBackend, CpuKvCache, CpuMatrix, CpuVector, Isa, Precision};

use crate::support::{
    Random, Weight, as_taken, assert_close, backend, backend_in, bits, buffer, poisoned,
    rounded_fp8, variants,
};

pub(crate) const LAYERS: usize = 2;
pub(crate) const MAX_POSITIONS: usize = 128;

/// One attention layer and its inputs, as plain numbers.
pub(crate) struct Case {
    pub(crate) shape: AttentionShape,
    pub(crate) hidden: usize,
    pub(crate) block_size: usize,
    /// How K and V are stored.
    pub(crate) storage: KvStorage,
    weight: Weight,
    bias: Option<Vec<f32>>,
    norms: Option<(Vec<f32>, Vec<f32>)>,
    sinks: Option<Vec<f32>>,
    cos: Vec<f32>,
    sin: Vec<f32>,
    q_scale: Option<Vec<f32>>,
}

/// The same layer, loaded into a backend.
pub(crate) struct Loaded {
    weights: QkvWeights<CpuMatrix, CpuVector>,
    sinks: Option<CpuVector>,
    rope: RopeTable<CpuVector>,
    cache: CpuKvCache,
}

/// One sequence's rows of a step.
pub(crate) struct Rows<'a> {
    /// `[rows, hidden]`
    pub(crate) x: &'a [f32],
    /// Position of the first row.
    pub(crate) start: usize,
    /// Block table.
    pub(crate) blocks: &'a [u32],
}

impl Case {
    pub(crate) fn random(
        random: &mut Random,
        shape: AttentionShape,
        block_size: usize,
        extras: bool,
    ) -> Self {
        let hidden = 24;
        let out = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim;
        let half = shape.head_dim / 2;
        let angle = |i: usize| {
            let (position, i) = (i / half, i % half);
            position as f64 * 100f64.powf(-(i as f64) / half as f64)
        };
        Self {
            shape,
            hidden,
            block_size,
            storage: KvStorage::AsTaken,
            weight: Weight::random(random, out, hidden),
            bias: extras.then(|| random.vec(out)),
            norms: extras.then(|| (random.vec(shape.head_dim), random.vec(shape.head_dim))),
            // Weights of sinks range from below that of any token to above all tokens' together.
            sinks: extras.then(|| random.vec(shape.num_heads).iter().map(|x| 5.0 * x).collect()),
            cos: (0..MAX_POSITIONS * half).map(|i| angle(i).cos() as f32).collect(),
            sin: (0..MAX_POSITIONS * half).map(|i| angle(i).sin() as f32).collect(),
            q_scale: extras.then(|| random.vec(MAX_POSITIONS).iter().map(|x| 1.0 + x).collect()),
        }
    }

    pub(crate) fn load(&self, backend: &mut CpuBackend, num_blocks: usize) -> Loaded {
        let mut vector = |values: &[f32]| backend.load_vector(values).unwrap();
        let bias = self.bias.as_ref().map(|bias| vector(bias));
        let q_norm = self.norms.as_ref().map(|norms| vector(&norms.0));
        let k_norm = self.norms.as_ref().map(|norms| vector(&norms.1));
        let sinks = self.sinks.as_ref().map(|sinks| vector(sinks));
        let (cos, sin) = (vector(&self.cos), vector(&self.sin));
        let q_scale = self.q_scale.as_ref().map(|scale| vector(scale));
        let rope = RopeTable { cos, sin, q_scale };
        let weight = self.weight.load(backend);
        let kv = KvShape {
            num_layers: LAYERS,
            num_kv_heads: self.shape.num_kv_heads,
            head_dim: self.shape.head_dim,
            latent: None,
            block_size: self.block_size,
            num_blocks,
            storage: self.storage,
        };
        let cache = backend.new_kv_cache(kv).unwrap();
        Loaded { weights: QkvWeights { weight, bias, q_norm, k_norm }, sinks, rope, cache }
    }

    /// Runs one step on the last layer; returns q and the attention output of every row.
    pub(crate) fn step(
        &self,
        backend: &mut CpuBackend,
        loaded: &mut Loaded,
        seqs: &[Rows<'_>],
    ) -> (Vec<f32>, Vec<f32>) {
        let (mut x, mut positions, mut slots, mut tables, mut list) =
            (vec![], vec![], vec![], vec![], vec![]);
        for seq in seqs {
            let num_rows = seq.x.len() / self.hidden;
            list.push(SeqRows {
                row_start: positions.len() as u32,
                num_rows: num_rows as u32,
                context_len: (seq.start + num_rows) as u32,
                table_start: tables.len() as u32,
                table_len: seq.blocks.len() as u32,
            });
            x.extend_from_slice(seq.x);
            tables.extend_from_slice(seq.blocks);
            for position in seq.start..seq.start + num_rows {
                positions.push(position as u32);
                let block = seq.blocks[position / self.block_size] as usize;
                slots.push((block * self.block_size + position % self.block_size) as u32);
            }
        }
        let batch =
            Batch { positions: &positions, slots: &slots, seqs: &list, block_tables: &tables };
        let width = self.shape.num_heads * self.shape.head_dim;
        let input = buffer(backend, &x, self.hidden);
        let mut q = poisoned(backend, positions.len(), width);
        let mut out = poisoned(backend, positions.len(), width);
        let Loaded { weights, sinks, rope, cache } = loaded;
        backend
            .qkv_rope_write(
                QkvInput { x: &input, weights, addend: None, rope },
                AttentionAt { shape: &self.shape, batch: &batch, layer: LAYERS - 1 },
                cache,
                &mut q,
            )
            .unwrap();
        let at = AttentionAt { shape: &self.shape, batch: &batch, layer: LAYERS - 1 };
        backend.paged_attention(&q, sinks.as_ref(), at, cache, &mut out).unwrap();
        (q.values().to_vec(), out.values().to_vec())
    }

    /// One head of a projected row: bias, norm and rotation, by definition.
    fn head(
        &self,
        projected: &[(f64, f64)],
        head: usize,
        norm: Option<&[f32]>,
        position: Option<usize>,
    ) -> Vec<f64> {
        let head_dim = self.shape.head_dim;
        let mut x: Vec<f64> =
            projected[head * head_dim..][..head_dim].iter().map(|p| p.0).collect();
        if let Some(norm) = norm {
            let square: f64 = x.iter().map(|x| x * x).sum();
            let rms = (square / head_dim as f64 + f64::from(self.shape.norm_eps)).sqrt();
            x.iter_mut().zip(norm).for_each(|(x, &w)| *x = *x / rms * f64::from(w));
        }
        let Some(position) = position else { return x };
        let half = head_dim / 2;
        (0..head_dim)
            .map(|i| {
                let at = position * half + i % half;
                let (cos, sin) = (f64::from(self.cos[at]), f64::from(self.sin[at]));
                let rotated = if i < half { -x[i + half] } else { x[i - half] };
                x[i] * cos + rotated * sin
            })
            .collect()
    }

    /// q and attention outputs of a whole sequence, in f64, except that the projection's
    /// activations, and the queries, K and V of attention, are rounded to the precision; K and V to
    /// FP8 if they are stored in it.
    fn oracle(&self, x: &[f32], precision: Precision) -> (Vec<f64>, Vec<f64>) {
        let taken = |values: &[f64]| -> Vec<f64> {
            let values: Vec<f32> = values.iter().map(|&x| x as f32).collect();
            as_taken(precision, &values).into_iter().map(f64::from).collect()
        };
        let AttentionShape { num_heads, num_kv_heads, head_dim, sliding_window, softcap, .. } =
            self.shape;
        let rows = x.len() / self.hidden;
        let (mut q, mut k, mut v) = (vec![], vec![], vec![]);
        let q_norm = self.norms.as_ref().map(|norms| &norms.0[..]);
        let k_norm = self.norms.as_ref().map(|norms| &norms.1[..]);
        for (position, x) in x.chunks(self.hidden).enumerate() {
            let row = self.weight.product(&as_taken(precision, x), self.bias.as_deref());
            for head in 0..num_heads {
                let scale = self.q_scale.as_ref().map_or(1.0, |scale| f64::from(scale[position]));
                let head = self.head(&row, head, q_norm, Some(position));
                q.extend(head.into_iter().map(|x| x * scale));
            }
            for head in 0..num_kv_heads {
                k.extend(self.head(&row, num_heads + head, k_norm, Some(position)));
                v.extend(self.head(&row, num_heads + num_kv_heads + head, None, None));
            }
        }
        let exact_q = q.clone();
        if precision == Precision::Bfloat16 {
            q = taken(&q);
        }
        match (self.storage, precision) {
            (KvStorage::Fp8, _) => {
                k.iter_mut().chain(&mut v).for_each(|x| *x = rounded_fp8(*x));
            }
            (KvStorage::AsTaken, Precision::Bfloat16) => (k, v) = (taken(&k), taken(&v)),
            (KvStorage::AsTaken, Precision::Float32) => {}
        }
        let mut out = vec![];
        for row in 0..rows {
            for head in 0..num_heads {
                let kv_head = head / (num_heads / num_kv_heads);
                let at = |position: usize| (position * num_kv_heads + kv_head) * head_dim;
                let query = &q[(row * num_heads + head) * head_dim..][..head_dim];
                let first = sliding_window.map_or(0, |n| (row + 1).saturating_sub(n as usize));
                let weights: Vec<f64> = (first..=row)
                    .map(|position| {
                        let dot: f64 =
                            query.iter().zip(&k[at(position)..]).map(|(q, k)| q * k).sum();
                        let score = dot / (head_dim as f64).sqrt();
                        let cap = softcap.map(f64::from);
                        cap.map_or(score, |cap| cap * (score / cap).tanh()).exp()
                    })
                    .collect();
                let sink = self.sinks.as_ref().map_or(0.0, |sinks| f64::from(sinks[head]).exp());
                let total: f64 = weights.iter().sum::<f64>() + sink;
                for d in 0..head_dim {
                    let sum: f64 = weights.iter().zip(first..).map(|(w, p)| w * v[at(p) + d]).sum();
                    out.push(sum / total);
                }
            }
        }
        (exact_q, out)
    }
}

pub(crate) fn shape(
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    window: Option<u32>,
) -> AttentionShape {
    AttentionShape {
        num_heads,
        num_kv_heads,
        head_dim,
        norm_eps: 1e-6,
        sliding_window: window,
        softcap: None,
        latent: None,
    }
}

/// Blocks in random order.
pub(crate) fn shuffled(random: &mut Random, count: usize) -> Vec<u32> {
    let mut blocks: Vec<u32> = (0..count as u32).collect();
    for i in (1..count).rev() {
        blocks.swap(i, random.below(i + 1));
    }
    blocks
}

#[test]
fn attention_matches_the_naive_version_however_the_prompt_is_chunked() {
    let shapes = [
        (shape(2, 2, 16, None), 4, false),
        (shape(4, 2, 32, None), 16, true),
        (shape(8, 2, 64, None), 16, false),
        (shape(3, 3, 128, Some(5)), 4, true),
        (shape(8, 1, 96, Some(20)), 32, true),
        (shape(16, 2, 20, Some(17)), 16, false),
        (shape(6, 2, 80, None), 5, true),
        (shape(4, 1, 2, Some(1)), 1, false),
    ];
    let chunks = [&[53][..], &[1, 52], &[20, 1, 1, 16, 15], &[52, 1], &[17, 19, 17]];
    matches_however_chunked(&mut Random(31), KvStorage::AsTaken, &shapes, &chunks);
}

#[test]
fn attention_over_several_vectors_of_tokens_matches_the_naive_version() {
    // Full vectors of tokens that all queries attend to, and every number of queries at a time.
    let shapes = [
        (shape(3, 3, 128, None), 16, false),
        (shape(6, 2, 64, None), 16, false),
        (shape(5, 1, 72, Some(70)), 32, false),
        (shape(12, 2, 16, Some(3)), 16, true),
        (shape(7, 1, 64, None), 48, true),
    ];
    let chunks = [&[117][..], &[1; 117], &[96, 1, 20], &[40, 37, 40]];
    matches_however_chunked(&mut Random(35), KvStorage::AsTaken, &shapes, &chunks);
}

#[test]
fn capped_scores_match_the_naive_version() {
    let capped = |shape, cap| AttentionShape { softcap: Some(cap), ..shape };
    let shapes = [
        (capped(shape(4, 2, 32, None), 1.0), 16, false),
        (capped(shape(6, 2, 64, Some(40)), 0.5), 16, true),
        (capped(shape(3, 3, 20, Some(9)), 2.0), 5, true),
        (capped(shape(16, 2, 128, None), 30.0), 32, false),
    ];
    let chunks = [&[61][..], &[1, 60], &[20, 1, 40]];
    matches_however_chunked(&mut Random(37), KvStorage::AsTaken, &shapes, &chunks);
}

#[test]
fn attention_over_fp8_matches_the_naive_version() {
    let shapes = [
        (shape(6, 2, 64, None), 16, false),
        (shape(4, 2, 32, Some(20)), 16, true),
        (shape(3, 3, 128, Some(5)), 4, true),
        (shape(7, 1, 72, None), 32, false),
        (shape(6, 2, 80, None), 5, true),
    ];
    let chunks = [&[53][..], &[1, 52], &[20, 1, 1, 16, 15]];
    matches_however_chunked(&mut Random(38), KvStorage::Fp8, &shapes, &chunks);
}

/// Checks shapes, each with a block size in tokens and whether it has biases, norms and sinks.
fn matches_however_chunked(
    random: &mut Random,
    storage: KvStorage,
    shapes: &[(AttentionShape, usize, bool)],
    all_chunks: &[&[usize]],
) {
    for (isa, precision) in variants() {
        // A rounded weight may be off by one part in 256, and an element of q, K or V that is
        // halfway between two bf16 may be rounded differently than in the oracle.
        // In FP8 such an element is off by one part in 16, and a row may attend to it alone; but
        // that is rare.
        let (tolerance, mean_most) = match (precision, storage) {
            (Precision::Float32, KvStorage::AsTaken) => (1e-3, 1e-3),
            (Precision::Bfloat16, KvStorage::AsTaken) => (3e-2, 3e-2),
            (Precision::Float32, KvStorage::Fp8) => (0.3, 2e-3),
            (Precision::Bfloat16, KvStorage::Fp8) => (0.3, 5e-3),
        };
        for &(shape, block_size, extras) in shapes {
            let case = Case { storage, ..Case::random(random, shape, block_size, extras) };
            let rows = all_chunks[0][0];
            let x = random.vec(rows * case.hidden);
            let (want_q, want) = case.oracle(&x, precision);
            let blocks = shuffled(random, rows.div_ceil(block_size) + 2);
            let mut whole: Option<Vec<u32>> = None;
            for &chunks in all_chunks {
                let mut backend = backend_in(isa, precision, 2);
                let mut loaded = case.load(&mut backend, blocks.len());
                let (mut q, mut out, mut start) = (vec![], vec![], 0);
                for &chunk in chunks {
                    let x = &x[start * case.hidden..(start + chunk) * case.hidden];
                    let seq = Rows { x, start, blocks: &blocks };
                    let (chunk_q, chunk_out) = case.step(&mut backend, &mut loaded, &[seq]);
                    q.extend(chunk_q);
                    out.extend(chunk_out);
                    start += chunk;
                }
                let what = format!(
                    "{isa} {precision} {storage:?} {shape:?} blocks of {block_size} chunks {chunks:?}"
                );
                assert_eq!(q.len(), want_q.len());
                for (&got, &want) in q.iter().zip(&want_q) {
                    assert_close(got, want, 2e-4, format!("q {what}"));
                }
                // Normalising heads scales them by up to 1/rms, and the scores' error with them;
                // values are below 10.
                for (&got, &want) in out.iter().zip(&want) {
                    assert_close(got, want, tolerance, format!("out {what}"));
                }
                let errors =
                    out.iter().zip(&want).map(|(&got, want)| (f64::from(got) - want).abs());
                let mean = errors.sum::<f64>() / out.len() as f64;
                assert!(mean < mean_most, "{what}: mean error {mean}");
                assert_eq!(*whole.get_or_insert_with(|| bits(&out)), bits(&out), "{what}");
            }
        }
    }
}

#[test]
fn stale_and_foreign_cache_contents_do_not_matter() {
    // NaN in every slot that the sequence does not own: a mask by multiplication would spread it.
    let mut random = Random(32);
    let storages = [KvStorage::AsTaken, KvStorage::Fp8];
    let sizes = storages.into_iter().flat_map(|storage| [4, 5, 16].map(|size| (storage, size)));
    for ((isa, precision), (storage, block_size)) in
        variants().flat_map(|it| sizes.clone().map(move |size| (it, size)))
    {
        let case = Case::random(&mut random, shape(4, 2, 32, Some(6)), block_size, false);
        let case = Case { storage, ..case };
        let mut backend = backend_in(isa, precision, 1);
        let mut loaded = case.load(&mut backend, 4);
        let poison = vec![f32::NAN; 4 * block_size * case.hidden];
        case.step(
            &mut backend,
            &mut loaded,
            &[Rows { x: &poison, start: 0, blocks: &[0, 1, 2, 3] }],
        );
        let is_exact = precision == Precision::Float32 && storage == KvStorage::AsTaken;
        let tolerance = if is_exact { 1e-4 } else { 3e-2 };
        for rows in [9, 10] {
            let x = random.vec(rows * case.hidden);
            let seq = Rows { x: &x, start: 0, blocks: &[2, 0, 3] };
            let (_, out) = case.step(&mut backend, &mut loaded, &[seq]);
            for (&got, &want) in out.iter().zip(&case.oracle(&x, precision).1) {
                assert_close(got, want, tolerance, format!("{isa} {precision} {storage:?}"));
            }
        }
    }
}

#[test]
fn non_finite_activations_reach_the_output() {
    // Otherwise a corrupted request would look like a sound one.
    let mut random = Random(33);
    let storages = [KvStorage::AsTaken, KvStorage::Fp8];
    for ((isa, precision), storage) in variants().flat_map(|it| storages.map(|how| (it, how))) {
        let case = Case::random(&mut random, shape(2, 1, 16, None), 4, false);
        let case = Case { storage, ..case };
        let mut backend = backend_in(isa, precision, 1);
        let mut loaded = case.load(&mut backend, 1);
        let mut x = random.vec(2 * case.hidden);
        x[case.hidden + 3] = f32::NAN;
        let (_, out) =
            case.step(&mut backend, &mut loaded, &[Rows { x: &x, start: 0, blocks: &[0] }]);
        let (first, second) = out.split_at(32);
        let what = format!("{isa} {precision} {storage:?}");
        assert!(first.iter().all(|x| x.is_finite()), "{what}: {first:?}");
        assert!(second.iter().all(|x| x.is_nan()), "{what}: {second:?}");
        // The next row, sound by itself, reads the corrupted one's K and V.
        let next = random.vec(case.hidden);
        let (_, out) =
            case.step(&mut backend, &mut loaded, &[Rows { x: &next, start: 2, blocks: &[0] }]);
        assert!(out.iter().all(|x| x.is_nan()), "{what}: {out:?}");
    }
}

#[test]
fn shapes_that_do_not_fit_are_errors() {
    let mut random = Random(34);
    let mut backend = backend(Isa::Portable, 1);
    let good = shape(2, 1, 4, None);
    let case = Case::random(&mut random, good, 4, false);
    let mut loaded = case.load(&mut backend, 3);
    let x = buffer(&mut backend, &random.vec(2 * case.hidden), case.hidden);
    let mut q = poisoned(&mut backend, 2, 8);
    let Loaded { weights, rope, cache, .. } = &mut loaded;
    let seq = SeqRows { row_start: 0, num_rows: 2, context_len: 2, table_start: 0, table_len: 1 };
    let seqs = [seq];
    let batch = Batch { positions: &[0, 1], slots: &[0, 1], seqs: &seqs, block_tables: &[0] };
    let mut qkv = |shape: &AttentionShape, batch: &Batch<'_>, layer: usize| {
        let input = QkvInput { x: &x, weights, addend: None, rope };
        backend.qkv_rope_write(input, AttentionAt { shape, batch, layer }, cache, &mut q)
    };
    let shape_with = |change: fn(&mut AttentionShape)| {
        let mut shape = good;
        change(&mut shape);
        shape
    };
    qkv(&good, &batch, 0).unwrap();
    let errors = [
        qkv(&good, &batch, LAYERS),
        qkv(&shape_with(|s| s.num_heads = 3), &batch, 0),
        qkv(&shape_with(|s| s.num_kv_heads = 0), &batch, 0),
        qkv(&shape_with(|s| s.head_dim = 2), &batch, 0),
        qkv(&shape_with(|s| s.sliding_window = Some(0)), &batch, 0),
        qkv(&good, &Batch { positions: &[0], ..batch }, 0),
        qkv(&good, &Batch { slots: &[0, 12], ..batch }, 0),
        qkv(&good, &Batch { positions: &[0, MAX_POSITIONS as u32], ..batch }, 0),
    ];
    for (i, error) in errors.into_iter().enumerate() {
        assert!(matches!(error, Err(KernelError::Shape { .. })), "qkv case {i}: {error:?}");
    }
    let q = buffer(&mut backend, &[0.5; 16], 8);
    let mut out = poisoned(&mut backend, 2, 8);
    let (two, three) = ([0.0; 2].as_slice(), [0.0; 3].as_slice());
    let [two, three] = [two, three].map(|sinks| backend.load_vector(sinks).unwrap());
    let mut attend = |seqs: &[SeqRows], block_tables: &[u32], sinks: Option<&CpuVector>| {
        let batch = Batch { seqs, block_tables, ..batch };
        let at = AttentionAt { shape: &good, batch: &batch, layer: 0 };
        backend.paged_attention(&q, sinks, at, cache, &mut out)
    };
    attend(&seqs, &[0], None).unwrap();
    attend(&seqs, &[0], Some(&two)).unwrap();
    let errors = [
        attend(&[], &[0], None),
        attend(&[SeqRows { row_start: 1, ..seq }], &[0], None),
        attend(&[SeqRows { num_rows: 3, ..seq }], &[0], None),
        attend(&[SeqRows { num_rows: 0, ..seq }], &[0], None),
        attend(&[SeqRows { context_len: 1, ..seq }], &[0], None),
        attend(&[SeqRows { context_len: 5, ..seq }], &[0], None),
        attend(&[SeqRows { table_start: 1, ..seq }], &[0], None),
        attend(&seqs, &[3], None),
        attend(&seqs, &[], None),
        attend(&[seq, seq], &[0], None),
        attend(&seqs, &[0], Some(&three)),
    ];
    for (i, error) in errors.into_iter().enumerate() {
        assert!(matches!(error, Err(KernelError::Shape { .. })), "attention case {i}: {error:?}");
    }
}
