//! PURE: which heads, columns and rows of a model one rank holds (tensor parallelism).
//!
//! Column-parallel: q, k, v, gate and up, including those of experts: a rank holds whole output
//! rows. Row-parallel: the output and down projections: a rank holds input columns, and the ranks'
//! partial products are summed. The vocabulary is divided for the embedding and the output head.
use std::ops::Range;

use kernels::backend::{AttentionShape, DeltaShape, KvShape, KvStorage, QkNorm, Rule, StatesShape};
use shared::protocol::{EngineConfig, KvCacheDtype};

use super::ModelError;
use super::config::{Latent, ModelConfig};

/// One rank's share of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub degree: usize,
    /// Number of parts in which this rank's sums over heads and over the MLP are computed; see
    /// [`Shard::with_reduction`].
    pub parts: usize,
    /// Query heads on this rank.
    pub heads: Range<usize>,
    /// KV heads on this rank; replicated if there are more ranks than KV heads.
    pub kv_heads: Range<usize>,
    /// Key heads of linear attention on this rank; replicated if there are more ranks than that.
    pub delta_keys: Range<usize>,
    /// Its value heads on this rank.
    pub delta_values: Range<usize>,
    /// MLP columns on this rank, in dense layers.
    pub intermediate: Range<usize>,
    /// Columns of each expert on this rank.
    pub expert: Range<usize>,
    /// Token ids on this rank; the last ranks may have fewer than `vocab_width`, or none.
    pub vocab: Range<usize>,
    /// Rows of this rank's embedding and output head matrices, equal on all ranks.
    pub vocab_width: usize,
}

impl Shard {
    /// Divides a model among `degree` ranks.
    ///
    /// # Errors
    /// [`ModelError::Degree`] naming what does not divide, and the possible degrees.
    pub fn new(config: &ModelConfig, rank: u32, degree: u32) -> Result<Self, ModelError> {
        let (rank, n) = (rank as usize, degree as usize);
        if n == 0 || rank >= n || !divides(config, n) {
            let possible: Vec<String> =
                (1..=64).filter(|n| divides(config, *n)).map(|n| n.to_string()).collect();
            let mlp = match config.intermediate_size {
                0 => String::new(),
                size => format!(", an MLP of {size}"),
            };
            let delta = match delta_heads(config) {
                (0, _) => String::new(),
                (keys, values) => {
                    format!(", {keys} key heads and {values} value heads of linear attention")
                }
            };
            let experts = match expert_size(config) {
                0 => String::new(),
                size => format!(", experts of {size}"),
            };
            let message = format!(
                "{} heads, {} KV heads{delta}{mlp}{experts} cannot be divided that way; possible \
                 degrees: {}",
                config.num_heads,
                config.num_kv_heads,
                possible.join(", ")
            );
            return Err(ModelError::Degree { degree, message });
        }
        let heads = part(config.num_heads, rank, n);
        let (delta_keys, delta_values) = delta_heads(config);
        let vocab_width = config.vocab_size.div_ceil(n);
        let first = (rank * vocab_width).min(config.vocab_size);
        let vocab = first..(first + vocab_width).min(config.vocab_size);
        Ok(Self {
            rank,
            degree: n,
            parts: 1,
            heads,
            kv_heads: part_or_copy(config.num_kv_heads, rank, n),
            delta_keys: part_or_copy(delta_keys, rank, n),
            delta_values: part(delta_values, rank, n),
            intermediate: part(config.intermediate_size, rank, n),
            expert: part(expert_size(config), rank, n),
            vocab,
            vocab_width,
        })
    }

    /// Computes sums over heads and over the MLP as `reduction` ranks would, so that every degree
    /// that divides `reduction` gives the same bits.
    ///
    /// # Errors
    /// Same as [`Shard::new`] for `reduction` ranks; also if `reduction` is not this degree times a
    /// power of two.
    pub fn with_reduction(self, config: &ModelConfig, reduction: u32) -> Result<Self, ModelError> {
        let wanted = reduction as usize;
        if !wanted.is_multiple_of(self.degree) || !(wanted / self.degree).is_power_of_two() {
            let message = format!("{} ranks cannot add up as {reduction} do", self.degree);
            return Err(ModelError::Degree { degree: reduction, message });
        }
        Self::new(config, 0, reduction)?;
        Ok(Self { parts: wanted / self.degree, ..self })
    }

    /// Returns the shape of every layer's attention on this rank, except for its window.
    #[must_use]
    pub fn attention(&self, config: &ModelConfig) -> AttentionShape {
        AttentionShape {
            num_heads: self.heads.len(),
            num_kv_heads: self.kv_heads.len(),
            head_dim: config.head_dim,
            norm_eps: config.latent.map_or(config.norm_eps, |_| Latent::NORM_EPS),
            sliding_window: None,
            softcap: config.attention_cap,
            latent: config.latent.map(|latent| latent.rank),
        }
    }

    /// Returns the shape of this rank's KV cache of `num_blocks` blocks.
    #[must_use]
    pub fn kv_shape(&self, config: &ModelConfig, sizes: &EngineConfig, num_blocks: u32) -> KvShape {
        KvShape {
            num_layers: config.num_kv_layers(),
            num_kv_heads: self.kv_heads.len(),
            head_dim: config.head_dim,
            latent: config.latent.map(|latent| latent.rank),
            block_size: sizes.block_size as usize,
            num_blocks: num_blocks as usize,
            storage: match sizes.kv_cache_dtype {
                KvCacheDtype::Auto => KvStorage::AsTaken,
                KvCacheDtype::Fp8 => KvStorage::Fp8,
            },
        }
    }

    /// Returns the shape of linear attention on this rank, if some layers have it.
    #[must_use]
    pub fn delta(&self, config: &ModelConfig) -> Option<DeltaShape> {
        let whole = config.delta.as_ref()?.shape;
        let (key_heads, value_heads) = (self.delta_keys.len(), self.delta_values.len());
        Some(DeltaShape { key_heads, value_heads, ..whole })
    }

    /// What this rank has of the results of linear attention, if they are normalised over all
    /// heads: as q alone.
    #[must_use]
    pub fn delta_norm(&self, config: &ModelConfig) -> Option<QkNorm> {
        let delta = config.delta.as_ref().filter(|delta| delta.shape.rule == Rule::Mamba2)?;
        Some(QkNorm {
            columns: [self.delta_values.len() * delta.shape.value_dim, 0],
            sections: [self.parts, 1],
            parts: self.parts,
            counts: [delta.shape.value_width(), 1],
            eps: delta.norm_eps,
        })
    }

    /// Returns the shape of the states of `slots` sequences, if some layers have linear attention.
    #[must_use]
    pub fn states(&self, config: &ModelConfig, slots: usize) -> Option<StatesShape> {
        let layer = self.delta(config)?;
        Some(StatesShape { num_layers: config.num_linear_layers(), slots, layer })
    }

    /// What this rank has of q and k, if they are normalised over all heads.
    #[must_use]
    pub fn qk_norm(&self, config: &ModelConfig) -> Option<QkNorm> {
        if !config.qk_norm_whole {
            return None;
        }
        let (head_dim, parts) = (config.head_dim, self.parts);
        let (heads, kv_heads) = (self.heads.len(), self.kv_heads.len());
        // As many ranks as there are parts would hold this many copies of each KV head.
        let copies = (self.degree * parts / config.num_kv_heads).max(1);
        Some(QkNorm {
            columns: [heads * head_dim, kv_heads * head_dim],
            sections: [parts, parts.min(kv_heads)],
            parts,
            counts: [config.num_heads * head_dim, config.num_kv_heads * head_dim * copies],
            eps: config.norm_eps,
        })
    }
}

fn divides(config: &ModelConfig, n: usize) -> bool {
    let (delta_keys, delta_values) = delta_heads(config);
    let as_copies = |heads: usize| heads.is_multiple_of(n) || n.is_multiple_of(heads);
    config.num_heads.is_multiple_of(n)
        && config.intermediate_size.is_multiple_of(n)
        && expert_size(config).is_multiple_of(n)
        && delta_values.is_multiple_of(n)
        && as_copies(config.num_kv_heads)
        && (delta_keys == 0 || as_copies(delta_keys))
}

fn expert_size(config: &ModelConfig) -> usize {
    config.experts.as_ref().map_or(0, |experts| experts.intermediate_size)
}

/// Key heads and value heads of linear attention.
fn delta_heads(config: &ModelConfig) -> (usize, usize) {
    config.delta.as_ref().map_or((0, 0), |delta| (delta.shape.key_heads, delta.shape.value_heads))
}

/// A rank's part of some heads, or the one that it shares with other ranks if there are fewer.
fn part_or_copy(heads: usize, rank: usize, n: usize) -> Range<usize> {
    if heads >= n || heads == 0 {
        return part(heads, rank, n);
    }
    let head = rank * heads / n;
    head..head + 1
}

fn part(size: usize, rank: usize, n: usize) -> Range<usize> {
    let width = size / n;
    rank * width..(rank + 1) * width
}

#[cfg(test)]
mod tests {
    use kernels::backend::{ExpertActivation, Routing};
    use serde_json::json;

    use super::super::config::{Delta, Layout};
    use super::super::experts::ExpertsConfig;
    use super::*;

    fn config(num_heads: usize, num_kv_heads: usize, vocab_size: usize) -> ModelConfig {
        let config = json!({"architectures": ["LlamaForCausalLM"], "hidden_size": 64,
            "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads, "head_dim": 16, "vocab_size": vocab_size,
            "max_position_embeddings": 32, "rms_norm_eps": 1e-5});
        ModelConfig::from_value(config).unwrap()
    }

    #[test]
    fn every_head_column_and_token_is_held_and_kv_heads_fit_their_query_heads() {
        for (heads, kv) in [(8, 8), (8, 4), (8, 2), (8, 1), (4, 2)] {
            for n in [1u32, 2, 4] {
                let config = config(heads, kv, 385);
                let shards: Vec<Shard> =
                    (0..n).map(|rank| Shard::new(&config, rank, n).unwrap()).collect();
                let all: Vec<usize> = shards.iter().flat_map(|s| s.heads.clone()).collect();
                assert_eq!(all, (0..heads).collect::<Vec<_>>());
                let tokens: Vec<usize> = shards.iter().flat_map(|s| s.vocab.clone()).collect();
                assert_eq!(tokens, (0..385).collect::<Vec<_>>());
                for shard in shards {
                    // Query head h uses KV head h * kv / heads, whichever rank it is on.
                    let group = shard.heads.len() / shard.kv_heads.len();
                    for (i, head) in shard.heads.clone().enumerate() {
                        assert_eq!(shard.kv_heads.start + i / group, head * kv / heads);
                    }
                }
            }
        }
    }

    #[test]
    fn value_heads_of_linear_attention_are_held_once_beside_their_key_heads() {
        for (keys, values, rule) in
            [(2, 8, Rule::GatedDelta), (4, 4, Rule::GatedDelta), (1, 12, Rule::Mamba2)]
        {
            let shape = DeltaShape {
                rule,
                key_heads: keys,
                value_heads: values,
                key_dim: 16,
                value_dim: 8,
                kernel: 4,
            };
            let delta = Delta { shape, layers: vec![true], layout: Layout::Split, norm_eps: 1e-6 };
            let config = ModelConfig { delta: Some(delta), ..config(8, 8, 100) };
            for n in [1u32, 2, 4] {
                let shards: Vec<Shard> =
                    (0..n).map(|rank| Shard::new(&config, rank, n).unwrap()).collect();
                let all: Vec<usize> = shards.iter().flat_map(|s| s.delta_values.clone()).collect();
                assert_eq!(all, (0..values).collect::<Vec<_>>());
                for shard in shards {
                    let own = shard.delta(&config).unwrap();
                    let group = own.value_heads / own.key_heads;
                    assert_eq!(own.value_heads, group * own.key_heads);
                    for (i, head) in shard.delta_values.clone().enumerate() {
                        assert_eq!(shard.delta_keys.start + i / group, head * keys / values);
                    }
                }
            }
            let error = Shard::new(&config, 0, 8).map(drop);
            assert_eq!(error.is_ok(), values == 8, "{keys}, {values}");
        }
    }

    #[test]
    fn a_degree_that_does_not_divide_names_those_that_would() {
        let error = Shard::new(&config(12, 4, 100), 0, 5).unwrap_err().to_string();
        assert!(error.contains("degree 5") && error.contains("12 heads"), "{error}");
        assert!(error.contains("possible degrees: 1, 2, 4"), "{error}");
        // Experts are divided, too; if all layers have them, there is no MLP to divide.
        let routing = Routing::softmax(4, 2, true);
        let experts = ExpertsConfig {
            routing,
            intermediate_size: 6,
            layers: vec![true],
            activation: ExpertActivation::Silu,
            is_interleaved: false,
            shared: None,
        };
        let sparse =
            ModelConfig { intermediate_size: 0, experts: Some(experts), ..config(12, 4, 100) };
        let error = Shard::new(&sparse, 0, 4).unwrap_err().to_string();
        assert!(error.contains("4 KV heads, experts of 6 cannot be divided that way"), "{error}");
        assert!(error.ends_with("possible degrees: 1, 2"), "{error}");
        let shard = Shard::new(&sparse, 1, 2).unwrap();
        assert_eq!((shard.expert, shard.intermediate), (3..6, 0..0));
    }
}
