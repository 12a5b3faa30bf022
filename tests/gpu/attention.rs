//! Attention and the operations before it, for prompts and for single rows.
use kernels::KernelError;
use kernels::backend::{
    AttentionAt, AttentionShape, Batch, KvShape, KvStorage, QkvInput, QkvWeights, RopeTable,
    SeqRows,
};

use crate::operations::{Case, ROUNDING, Random, Writable, input, matrix, poisoned};

/// Prompts, then a step that mixes decode with the end of a prompt.
pub(crate) struct Attention {
    shape: AttentionShape,
    /// Biases and norms of q and k.
    extras: bool,
    /// Sinks and biases, as in gpt-oss.
    sinks: bool,
    /// How K and V are stored.
    storage: KvStorage,
}

impl Case for Attention {
    fn name(&self) -> String {
        let AttentionShape { num_heads, num_kv_heads, head_dim, sliding_window, .. } = self.shape;
        let sinks = if self.sinks { ", sinks" } else { "" };
        let fp8 = if self.storage == KvStorage::Fp8 { ", FP8" } else { "" };
        format!(
            "attention {num_heads}/{num_kv_heads} heads of {head_dim}, window \
             {sliding_window:?}{sinks}{fp8}"
        )
    }

    fn tolerance(&self) -> (f32, f32) {
        match self.storage {
            KvStorage::AsTaken => (2.0 * ROUNDING, 2e-2),
            // An element halfway between two values may be rounded to the other one, a sixteenth
            // away.
            KvStorage::Fp8 => (0.07, 5e-2),
        }
    }

    fn run<B: Writable>(&self, backend: &mut B) -> Result<Vec<f32>, KernelError> {
        let AttentionShape { num_heads, num_kv_heads, head_dim, .. } = self.shape;
        let mut random = Random(6);
        let (hidden, block_size, blocks, positions) = (64, 16, 40, 400);
        let width = (num_heads + 2 * num_kv_heads) * head_dim;
        let small: Vec<f32> = random.vec(width * hidden).iter().map(|x| x / 8.0).collect();
        let weight = matrix(backend, &small, hidden)?;
        let mut vector = |is_there: bool, len: usize| {
            is_there.then(|| backend.load_vector(&random.vec(len))).transpose()
        };
        let bias = vector(self.extras || self.sinks, width)?;
        let (q_norm, k_norm) = (vector(self.extras, head_dim)?, vector(self.extras, head_dim)?);
        let sinks = vector(self.sinks, num_heads)?;
        let weights = QkvWeights { weight, bias, q_norm, k_norm };
        let angle = |i: usize| (i / (head_dim / 2)) as f32 / (1 + i % (head_dim / 2)) as f32;
        let table = |f: fn(f32) -> f32| -> Vec<f32> {
            (0..positions * head_dim / 2).map(|i| f(angle(i))).collect()
        };
        let rope = RopeTable {
            cos: backend.load_vector(&table(f32::cos))?,
            sin: backend.load_vector(&table(f32::sin))?,
            q_scale: None,
        };
        let kv = KvShape {
            num_layers: 2,
            num_kv_heads,
            head_dim,
            latent: None,
            block_size,
            num_blocks: blocks,
            storage: self.storage,
        };
        let mut cache = backend.new_kv_cache(kv)?;
        let mut seen = Vec::new();
        // (rows, tokens in the cache afterwards) of three sequences of 13 blocks each.
        for step in [[(150, 150), (1, 1), (70, 70)], [(1, 151), (1, 2), (37, 107)]] {
            let mut list = Vec::new();
            let (mut at, mut slots, mut tables) = (Vec::new(), Vec::new(), Vec::new());
            for (index, (num_rows, context_len)) in (0u32..).zip(step) {
                list.push(SeqRows {
                    row_start: at.len() as u32,
                    num_rows,
                    context_len,
                    table_start: tables.len() as u32,
                    table_len: 13,
                });
                // In reverse order, so that a wrong table is detected.
                let blocks: Vec<u32> = (0..13).map(|i| index * 13 + 12 - i).collect();
                for position in context_len - num_rows..context_len {
                    at.push(position);
                    slots.push(blocks[position as usize / block_size] * 16 + position % 16);
                }
                tables.extend(blocks);
            }
            let batch = Batch { positions: &at, slots: &slots, seqs: &list, block_tables: &tables };
            let x = input(backend, &random.vec(at.len() * hidden), hidden)?;
            let mut q = poisoned(backend, at.len(), num_heads * head_dim, true)?;
            let mut out = poisoned(backend, at.len(), num_heads * head_dim, true)?;
            let input = QkvInput { x: &x, weights: &weights, addend: None, rope: &rope };
            let at = AttentionAt { shape: &self.shape, batch: &batch, layer: 1 };
            backend.qkv_rope_write(input, at, &mut cache, &mut q)?;
            let sinks = sinks.as_ref();
            backend.paged_attention(&q, sinks, at, &cache, &mut out)?;
            seen.extend(backend.read_buffer(&q)?);
            seen.extend(backend.read_buffer(&out)?);
        }
        Ok(seen)
    }
}

pub(crate) fn cases(quick: bool) -> Vec<Attention> {
    let mut cases = Vec::new();
    let heads: &[(usize, usize, usize)] = match quick {
        true => &[(4, 2, 32), (4, 1, 48)],
        false => &[
            (4, 4, 16),
            (8, 2, 32),
            (6, 2, 64),
            (4, 2, 96),
            (32, 8, 128),
            (4, 1, 256),
            (8, 4, 256),
            (20, 1, 64),
            (4, 2, 80),
        ],
    };
    for &(num_heads, num_kv_heads, head_dim) in heads {
        for (sliding_window, extras) in [(None, false), (Some(33), true)] {
            let shape = AttentionShape {
                num_heads,
                num_kv_heads,
                head_dim,
                norm_eps: 1e-6,
                sliding_window,
                softcap: None,
                latent: None,
            };
            let storage = KvStorage::AsTaken;
            cases.push(Attention { shape, extras, sinks: false, storage });
            // Kernels of their own, and the slow one.
            if head_dim > 32 {
                let storage = KvStorage::Fp8;
                cases.push(Attention { shape, extras, sinks: false, storage });
            }
        }
    }
    // As in gpt-oss, and with a head size whose K and V are copied asynchronously.
    let with_sinks: &[(usize, usize, usize)] = match quick {
        true => &[(8, 1, 64)],
        false => &[(64, 8, 64), (8, 2, 128)],
    };
    for &(num_heads, num_kv_heads, head_dim) in with_sinks {
        for sliding_window in [None, Some(128)] {
            let shape = AttentionShape {
                num_heads,
                num_kv_heads,
                head_dim,
                norm_eps: 1e-5,
                sliding_window,
                softcap: None,
                latent: None,
            };
            let storage = KvStorage::AsTaken;
            cases.push(Attention { shape, extras: false, sinks: true, storage });
        }
    }
    cases
}
