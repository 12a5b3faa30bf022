//! Which part of the model each tensor-parallel rank holds. Pure arithmetic.
//!
//! q, k, v, gate and up are split by output features (columns of the product), o and down by input
//! features, so that one all-reduce closes the attention and one the MLP. The vocabulary is split
//! into equal widths, the last ranks padded with zero rows.
use std::ops::Range;

use super::config::ModelConfig;
use crate::error::ModelError;

/// The part of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// This rank, 0-based.
    pub rank: u32,
    /// The tensor-parallel degree.
    pub world_size: u32,
    /// Query heads.
    pub heads: Range<usize>,
    /// Key and value heads; several ranks hold the same one when there are more ranks than heads.
    pub kv_heads: Range<usize>,
    /// Features within the MLP.
    pub inner: Range<usize>,
    /// Token ids whose embedding and logits are here.
    pub vocab: Range<usize>,
    /// Rows of the embedding and output matrices: `vocab.len()` and zero rows behind them; equal
    /// on all ranks.
    pub vocab_width: usize,
}

impl Shard {
    /// The part of `rank` among `world_size`.
    ///
    /// # Errors
    /// [`ModelError::Degree`] naming what does not divide and the degrees that work.
    pub fn new(config: &ModelConfig, rank: u32, world_size: u32) -> Result<Self, ModelError> {
        if let Some(problem) = obstacle(config, world_size) {
            let possible: Vec<_> =
                possible_degrees(config).iter().map(ToString::to_string).collect();
            return Err(ModelError::Degree { world_size, problem, possible: possible.join(", ") });
        }
        if rank >= world_size {
            let problem = format!("rank {rank} is not below it");
            return Err(ModelError::Degree { world_size, problem, possible: "any".to_owned() });
        }
        let (index, world) = (rank as usize, world_size as usize);
        let even = |total: usize| index * (total / world)..(index + 1) * (total / world);
        let kv_heads = if config.num_kv_heads >= world {
            even(config.num_kv_heads)
        } else {
            let head = index * config.num_kv_heads / world;
            head..head + 1
        };
        let vocab_width = config.vocab_size.div_ceil(world);
        let vocab = (index * vocab_width).min(config.vocab_size)
            ..((index + 1) * vocab_width).min(config.vocab_size);
        Ok(Self {
            rank,
            world_size,
            heads: even(config.num_heads),
            kv_heads,
            inner: even(config.intermediate_size),
            vocab,
            vocab_width,
        })
    }

    /// The first token id of this rank's rows, padding counted.
    #[must_use]
    pub fn first_id(&self) -> u32 {
        self.rank * self.vocab_width as u32
    }

    /// True on the one rank that adds the biases of row-parallel products: they must enter the sum
    /// over the ranks once.
    #[must_use]
    pub fn adds_row_parallel_bias(&self) -> bool {
        self.rank == 0
    }
}

/// The tensor-parallel degrees over which a model can be split, in rising order.
#[must_use]
pub fn possible_degrees(config: &ModelConfig) -> Vec<u32> {
    (1..=config.num_heads as u32).filter(|&degree| obstacle(config, degree).is_none()).collect()
}

/// Why a model cannot be split over `world_size` ranks.
fn obstacle(config: &ModelConfig, world_size: u32) -> Option<String> {
    let world = world_size as usize;
    if world == 0 {
        return Some("there must be at least one".to_owned());
    }
    let (heads, kv_heads, inner) =
        (config.num_heads, config.num_kv_heads, config.intermediate_size);
    if !heads.is_multiple_of(world) {
        return Some(format!("it has {heads} attention heads"));
    }
    if !kv_heads.is_multiple_of(world) && !world.is_multiple_of(kv_heads) {
        return Some(format!("it has {kv_heads} key-value heads"));
    }
    if !inner.is_multiple_of(world) {
        return Some(format!("its MLP has {inner} features"));
    }
    None
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn config(heads: usize, kv_heads: usize, inner: usize, vocab: usize) -> ModelConfig {
        let text = format!(
            r#"{{"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "head_dim": 16,
                "num_hidden_layers": 1, "num_attention_heads": {heads},
                "num_key_value_heads": {kv_heads}, "intermediate_size": {inner},
                "vocab_size": {vocab}, "max_position_embeddings": 64}}"#
        );
        ModelConfig::from_json(Path::new("config.json"), &text).unwrap()
    }

    fn shards(config: &ModelConfig, world: u32) -> Vec<Shard> {
        (0..world).map(|rank| Shard::new(config, rank, world).unwrap()).collect()
    }

    /// What is split is held exactly once; every query head's group has its KV head on the rank.
    #[test]
    fn every_possible_degree_covers_the_model_and_keeps_groups_together() {
        for (heads, kv_heads, inner, vocab) in
            [(8, 4, 512, 2048), (32, 8, 11_008, 32_000), (28, 4, 18_944, 152_064), (6, 1, 96, 7)]
        {
            let config = config(heads, kv_heads, inner, vocab);
            for world in possible_degrees(&config) {
                let shards = shards(&config, world);
                for (part, total) in [
                    (shards.iter().map(|shard| shard.heads.clone()).collect::<Vec<_>>(), heads),
                    (shards.iter().map(|shard| shard.inner.clone()).collect(), inner),
                    (shards.iter().map(|shard| shard.vocab.clone()).collect(), vocab),
                ] {
                    let all: Vec<usize> = part.into_iter().flatten().collect();
                    assert_eq!(all, (0..total).collect::<Vec<_>>(), "{world} ranks");
                }
                for shard in &shards {
                    assert!(shard.vocab.len() <= shard.vocab_width);
                    assert_eq!(shard.vocab_width, shards[0].vocab_width);
                    // The kernel pairs local query head i with local KV head i / local group.
                    let local_group = shard.heads.len() / shard.kv_heads.len();
                    for (local, head) in shard.heads.clone().enumerate() {
                        let kv_head = shard.kv_heads.start + local / local_group;
                        assert_eq!(kv_head, head / (heads / kv_heads), "{world} ranks");
                    }
                }
            }
        }
    }

    #[test]
    fn kv_heads_are_replicated_beyond_their_number() {
        let shards = shards(&config(8, 2, 512, 2048), 8);
        let kv_heads: Vec<_> = shards.iter().map(|shard| shard.kv_heads.start).collect();
        assert_eq!(kv_heads, [0, 0, 0, 0, 1, 1, 1, 1]);
        assert!(shards.iter().all(|shard| shard.kv_heads.len() == 1));
    }

    #[test]
    fn an_uneven_vocabulary_is_padded_behind() {
        let shards = shards(&config(4, 4, 128, 381), 4);
        let vocab: Vec<_> = shards.iter().map(|shard| shard.vocab.clone()).collect();
        assert_eq!(vocab, [0..96, 96..192, 192..288, 288..381]);
        assert!(shards.iter().all(|shard| shard.vocab_width == 96));
        assert_eq!(shards[3].first_id(), 288);
        // More ranks than can be filled: the last holds padding alone.
        let tiny = config(4, 4, 128, 5);
        assert_eq!(Shard::new(&tiny, 3, 4).unwrap().vocab, 5..5);
    }

    #[test]
    fn impossible_degrees_name_the_possible_ones() {
        let error =
            |config: &ModelConfig, world| Shard::new(config, 0, world).unwrap_err().to_string();
        assert_eq!(
            error(&config(8, 4, 512, 2048), 3),
            "the model cannot be split over 3 ranks: it has 8 attention heads; \
             possible degrees: 1, 2, 4, 8"
        );
        assert_eq!(
            error(&config(12, 4, 96, 2048), 6),
            "the model cannot be split over 6 ranks: it has 4 key-value heads; \
             possible degrees: 1, 2, 4, 12"
        );
        assert_eq!(
            error(&config(8, 8, 100, 2048), 8),
            "the model cannot be split over 8 ranks: its MLP has 100 features; \
             possible degrees: 1, 2, 4"
        );
        assert!(error(&config(8, 8, 100, 2048), 0).contains("at least one"));
    }
}
