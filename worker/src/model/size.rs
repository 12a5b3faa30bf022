//! PURE: how much memory one rank's part of a model takes on a device that keeps weights, KV and
//! products' inputs in bf16 and the rest in f32.
use shared::protocol::EngineConfig;

use super::config::ModelConfig;
use super::shard::Shard;

/// Weights of a shard, in bytes.
#[must_use]
pub fn weight_bytes(config: &ModelConfig, shard: &Shard) -> u64 {
    let n = |n: usize| n as u64;
    let hidden = n(config.hidden_size);
    let q = n(shard.heads.len() * config.head_dim);
    let kv = n(shard.kv_heads.len() * config.head_dim);
    let inner = n(shard.intermediate.len());
    let layer = hidden * (2 * q + 2 * kv + 3 * inner);
    let tables = if config.tied { 1 } else { 2 };
    2 * (n(config.num_layers) * layer + tables * n(shard.vocab_width) * hidden)
}

/// Activations of the largest step, in bytes.
#[must_use]
pub fn activation_bytes(config: &ModelConfig, shard: &Shard, sizes: &EngineConfig) -> u64 {
    let n = |n: usize| n as u64;
    let hidden = n(config.hidden_size);
    let q = n(shard.heads.len() * config.head_dim);
    let kv = n(shard.kv_heads.len() * config.head_dim);
    let inner = n(shard.intermediate.len());
    let deltas = u64::from(shard.parts.ilog2()) + 1;
    // Buffers, then what fused operations keep within.
    let row = hidden * (4 + 2 + 4 * deltas) + q * 2 * 2 + inner * 2 + (q + 2 * kv) * 4;
    let product = u64::from(sizes.max_num_batched_tokens.min(1024)) * inner * 2 * 4;
    let logits = n(shard.vocab_width) * n(shard.degree + 1) * 4;
    u64::from(sizes.max_num_batched_tokens) * row
        + product.max(u64::from(sizes.max_num_seqs) * q * 64 * 4)
        + u64::from(sizes.max_num_seqs) * logits
}

/// KV cache of one sequence of the greatest length, in bytes.
#[must_use]
pub fn sequence_bytes(config: &ModelConfig, shard: &Shard, sizes: &EngineConfig) -> u64 {
    let token = config.num_layers * shard.kv_heads.len() * config.head_dim * 2 * 2;
    u64::from(sizes.max_model_len.next_multiple_of(sizes.block_size.max(1))) * token as u64
}

#[cfg(test)]
mod tests {
    use super::super::rope::{RopeConfig, RopeScaling};
    use super::*;

    /// Llama 3.1 8B.
    fn config() -> ModelConfig {
        ModelConfig {
            hidden_size: 4096,
            intermediate_size: 14336,
            num_layers: 32,
            num_heads: 32,
            num_kv_heads: 8,
            head_dim: 128,
            vocab_size: 128_256,
            max_positions: 131_072,
            norm_eps: 1e-5,
            rope: RopeConfig { theta: 5e5, scaling: RopeScaling::None },
            sliding_windows: vec![None; 32],
            tied: false,
            qkv_bias: false,
            output_bias: false,
            mlp_bias: false,
            qk_norm: false,
            is_bf16: true,
        }
    }

    #[test]
    fn eight_billion_parameters_take_sixteen_billion_bytes() {
        let config = config();
        let whole = Shard::new(&config, 0, 1).unwrap();
        let bytes = weight_bytes(&config, &whole);
        // 8.03e9 parameters, of which 266,240 are norms.
        assert_eq!(bytes / 2 + 266_240, 8_030_261_248);
        let half = Shard::new(&config, 1, 2).unwrap();
        assert_eq!(weight_bytes(&config, &half) * 2, bytes);
        let tied = ModelConfig { tied: true, ..config };
        assert_eq!(weight_bytes(&tied, &whole), bytes - 2 * 128_256 * 4096);
    }

    #[test]
    fn a_sequence_takes_128_kib_a_token() {
        let config = config();
        let sizes = EngineConfig {
            block_size: 16,
            max_model_len: 8190,
            max_num_seqs: 64,
            max_num_batched_tokens: 2048,
            kv_cache_bytes: 0,
        };
        let whole = Shard::new(&config, 0, 1).unwrap();
        assert_eq!(sequence_bytes(&config, &whole, &sizes), 8192 * 128 * 1024);
        let eighth = Shard::new(&config, 0, 8).unwrap();
        assert_eq!(sequence_bytes(&config, &eighth, &sizes), 8192 * 16 * 1024);
        let more = EngineConfig { max_num_batched_tokens: 4096, ..sizes.clone() };
        let bytes = |sizes| activation_bytes(&config, &whole, sizes);
        assert!(bytes(&sizes) < bytes(&more) && bytes(&more) < 2 << 30);
    }
}
