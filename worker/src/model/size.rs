//! PURE: memory of one rank's share of a model on a device that keeps weights (except quantised
//! ones), KV (unless it is in FP8) and the inputs of products in bf16, and everything else in f32.
use kernels::backend::EXPERT_SLOTS;
use kernels::weights::{Compact, Fp8Groups, Int4Groups};
use shared::protocol::{EngineConfig, KvCacheDtype, Quantization};

use super::config::ModelConfig;
use super::quantization::Quantised;
use super::shard::Shard;

/// Bytes per output of a quantised matrix for its scale.
const SCALE: u64 = 4;

/// Whether a device keeps a matrix in this form (or a stack of them, if true).
pub type Keeps<'a> = &'a dyn Fn(&Compact, bool) -> bool;

/// Size of a shard's weights, in bytes. Assumes that if some matrices are quantised according to the
/// configuration, all matrices of the layers are, and that the output head is not.
#[must_use]
pub fn weight_bytes(
    config: &ModelConfig,
    shard: &Shard,
    quantization: Quantization,
    keeps: Keeps<'_>,
) -> u64 {
    let quantised = config.quantised.filter(|_| quantization == Quantization::None);
    let n = |n: usize| n as u64;
    let hidden = n(config.hidden_size);
    let q = n(shard.heads.len() * config.head_dim);
    let kv = n(shard.kv_heads.len() * config.head_dim);
    // Sizes of: a matrix that the files never have quantised; a matrix of a layer; a matrix that
    // always keeps the type of the products.
    let head = |rows: u64, cols: u64| match quantization {
        Quantization::None => 2 * rows * cols,
        Quantization::Int8 => rows * (cols + SCALE),
    };
    let matrix = |rows: u64, cols: u64, is_stack: bool| {
        let form = quantised.and_then(|quantised| compact(&quantised, cols, is_stack));
        match form.filter(|form| keeps(form, is_stack)) {
            Some(form) => form.bytes(rows, cols),
            None => head(rows, cols),
        }
    };
    let as_is = |rows: u64, cols: u64| 2 * rows * cols;
    // Each part of a row-parallel matrix has its own scales.
    let parts = n(shard.parts);
    let row_parallel = |cols: u64, is_stack| parts * matrix(hidden, cols / parts, is_stack);
    // Gate and up, or up alone.
    let gates = if config.is_gated() { 2 } else { 1 };
    let mlp = |ups: u64, inner: u64, is_stack| {
        matrix(ups * inner, hidden, is_stack) + row_parallel(inner, is_stack)
    };
    let (dense, sparse) = layers(config);
    let routing = config.experts.as_ref().map(|experts| experts.routing);
    let [experts, logits] =
        routing.map_or([0, 0], |routing| [routing.num_experts, routing.num_logits()].map(n));
    let attention = matrix(q + 2 * kv, hidden, false) + row_parallel(q, false);
    let vocab = n(shard.vocab_width);
    let output = match (config.tied, quantization) {
        (true, Quantization::None) => 0,
        (false, _) | (true, Quantization::Int8) => head(vocab, hidden),
    };
    n(config.num_layers) * attention
        + dense * mlp(gates, n(shard.intermediate.len()), false)
        + sparse * (as_is(logits, hidden) + experts * mlp(2, n(shard.expert.len()), true))
        + as_is(vocab, hidden)
        + output
}

/// The form in which matrices of `cols` inputs can stay, according to the configuration.
fn compact(quantised: &Quantised, cols: u64, is_stack: bool) -> Option<Compact> {
    let cols = cols as usize;
    let Some(form) = quantised.packed else {
        let width = quantised.block.map_or(usize::MAX, |block| block.1);
        return Fp8Groups::new(0, cols, width).map(Compact::Fp8).filter(|_| quantised.is_fp8);
    };
    let len = form.group.unwrap_or(cols).max(1);
    let (count, is_float) = (cols.div_ceil(len), form.is_of_experts());
    let groups = Int4Groups { first: 0, first_len: len, len, count, is_float };
    (form.may_stay() && (is_stack || !is_float)).then_some(Compact::Int4(groups))
}

/// The number of layers with an MLP, and with experts.
fn layers(config: &ModelConfig) -> (u64, u64) {
    let sparse = config
        .experts
        .as_ref()
        .map_or(0, |experts| experts.layers.iter().filter(|has_experts| **has_experts).count());
    ((config.num_layers - sparse) as u64, sparse as u64)
}

/// Size of the activations of the largest step, in bytes. `widens` tells whether some products
/// convert int8 weights to bf16 first.
#[must_use]
pub fn activation_bytes(
    config: &ModelConfig,
    shard: &Shard,
    widens: bool,
    sizes: &EngineConfig,
) -> u64 {
    let n = |n: usize| n as u64;
    let hidden = n(config.hidden_size);
    let q = n(shard.heads.len() * config.head_dim);
    let kv = n(shard.kv_heads.len() * config.head_dim);
    let inner = n(shard.intermediate.len());
    let deltas = u64::from(shard.parts.ilog2()) + 1 + u64::from(config.is_parallel);
    // Buffers, plus the intermediates of fused operations.
    let row = hidden * (4 + 2 + 4 * deltas) + q * 2 * 2 + inner * 2 + (q + 2 * kv) * 4;
    let product = u64::from(sizes.max_num_batched_tokens.min(1024)) * inner * 2 * 4;
    let logits = n(shard.vocab_width) * n(shard.degree + 1) * 4;
    let experts = config.experts.as_ref().map_or(0, |experts| {
        // The chosen experts and their inner activations, plus the inputs and outputs of a product
        // over a limited number of rows.
        let top = n(experts.routing.top_k);
        let tokens = u64::from(sizes.max_num_batched_tokens);
        let slot = n(shard.expert.len()) * 2 + 16;
        tokens * (top * slot + n(experts.routing.num_experts) * 4)
            + (tokens * top).min(EXPERT_SLOTS as u64) * hidden * (2 + 4)
    });
    // The largest quantised matrix of a layer, converted for products of many rows.
    let widened = if widens { 2 * hidden * (q + 2 * kv).max(2 * inner) } else { 0 };
    experts
        + widened
        + u64::from(sizes.max_num_batched_tokens) * row
        + product.max(u64::from(sizes.max_num_seqs) * q * 64 * 4)
        + u64::from(sizes.max_num_seqs) * logits
}

/// Size of the KV cache of one sequence of maximum length, in bytes.
#[must_use]
pub fn sequence_bytes(config: &ModelConfig, shard: &Shard, sizes: &EngineConfig) -> u64 {
    let element = match sizes.kv_cache_dtype {
        KvCacheDtype::Auto => 2,
        KvCacheDtype::Fp8 => 1,
    };
    let token = config.num_layers * shard.kv_heads.len() * config.head_dim * 2 * element;
    u64::from(sizes.max_model_len.next_multiple_of(sizes.block_size.max(1))) * token as u64
}

#[cfg(test)]
mod tests {
    use kernels::backend::{ExpertActivation, Routing};
    use kernels::weights::Packing;
    use serde_json::json;

    use super::super::experts::ExpertsConfig;
    use super::super::quantization::{PackedForm, check};
    use super::*;

    /// Llama 3.1 8B.
    fn config() -> ModelConfig {
        let config = json!({"architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
            "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 128_256,
            "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 5e5});
        ModelConfig::from_value(config).unwrap()
    }

    fn plain_bytes(config: &ModelConfig, shard: &Shard, quantization: Quantization) -> u64 {
        weight_bytes(config, shard, quantization, &|_, _| false)
    }

    fn compact_bytes(config: &ModelConfig, shard: &Shard, quantization: Quantization) -> u64 {
        weight_bytes(config, shard, quantization, &|_, _| true)
    }

    #[test]
    fn eight_billion_parameters_take_sixteen_billion_bytes() {
        let config = config();
        let whole = Shard::new(&config, 0, 1).unwrap();
        let bytes = plain_bytes(&config, &whole, Quantization::None);
        // 8.03e9 parameters, 266,240 of them in norms.
        assert_eq!(bytes / 2 + 266_240, 8_030_261_248);
        let half = Shard::new(&config, 1, 2).unwrap();
        assert_eq!(plain_bytes(&config, &half, Quantization::None) * 2, bytes);
        let tied = ModelConfig { tied: true, ..config.clone() };
        assert_eq!(plain_bytes(&tied, &whole, Quantization::None), bytes - 2 * 128_256 * 4096);
        // Everything but the embedding takes half the space, plus a scale per output: q, k, v,
        // output, gate, up and down of 32 layers, and the head.
        let outputs = 32 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096) + 128_256;
        let int8 = bytes / 2 + 128_256 * 4096 + 4 * outputs;
        assert_eq!(plain_bytes(&config, &whole, Quantization::Int8), int8);
        // The head is then a separate matrix, tied or not.
        assert_eq!(plain_bytes(&tied, &whole, Quantization::Int8), int8);
        // AWQ's usual form: embedding and head stay bf16; 128 inputs share a scale and a zero
        // point.
        let awq = PackedForm {
            packing: Packing::Awq,
            bits: 4,
            group: Some(128),
            is_listed: false,
            has_zeros: true,
        };
        let quantised = Some(Quantised { packed: Some(awq), ..Quantised::PLAIN });
        let awq = ModelConfig { quantised, ..config.clone() };
        let layers = bytes / 2 - 2 * 128_256 * 4096;
        let int4 = layers / 2 + layers / 128 * 5 + 2 * 2 * 128_256 * 4096;
        assert_eq!(compact_bytes(&awq, &whole, Quantization::None), int4);
        assert_eq!(compact_bytes(&awq, &half, Quantization::None) * 2, int4);
        assert_eq!(compact_bytes(&awq, &whole, Quantization::Int8), int8);
        // FP8 has a byte per weight, with a scale per output, or for each 128 inputs of one.
        let others = 2 * 2 * 128_256 * 4096;
        let fp8 = |raw| ModelConfig { quantised: Some(check(&raw).unwrap()), ..config.clone() };
        let plain = fp8(json!({"quant_method": "fp8"}));
        let of_layers = 4 * (outputs - 128_256);
        let bytes_of =
            |config: &ModelConfig, shard: &Shard| compact_bytes(config, shard, Quantization::None);
        assert_eq!(bytes_of(&plain, &whole), layers + of_layers + others);
        let blocks = fp8(json!({"quant_method": "fp8", "weight_block_size": [128, 128]}));
        assert_eq!(bytes_of(&blocks, &whole), layers + layers / 128 * 4 + others);
        assert_eq!(bytes_of(&blocks, &half) * 2, bytes_of(&blocks, &whole));
        assert_eq!(compact_bytes(&blocks, &whole, Quantization::Int8), int8);
        assert_eq!(plain_bytes(&blocks, &whole, Quantization::None), bytes);
        // Blocks that no device keeps, and integers.
        let wide = fp8(json!({"quant_method": "fp8", "weight_block_size": [128, 256]}));
        assert_eq!(bytes_of(&wide, &whole), bytes);
        let group = json!({"num_bits": 8, "type": "int", "strategy": "channel"});
        let integers = fp8(json!({"quant_method": "compressed-tensors", "format": "int-quantized",
            "config_groups": {"group_0": {"weights": group}}}));
        assert_eq!(bytes_of(&integers, &whole), bytes);
        // Other devices convert to bf16, and a checkpoint without 4-bit weights does not change.
        assert_eq!(plain_bytes(&awq, &whole, Quantization::None), bytes);
        assert_eq!(compact_bytes(&config, &whole, Quantization::None), bytes);
    }

    #[test]
    fn experts_are_counted_in_the_layers_that_have_them() {
        // Qwen3-30B-A3B: 48 layers with 128 experts of width 768, and no MLP.
        let routing = Routing::softmax(128, 8, true);
        let experts = ExpertsConfig {
            routing,
            intermediate_size: 768,
            layers: vec![true; 48],
            activation: ExpertActivation::Silu,
            is_interleaved: false,
            shared: None,
        };
        let sparse = ModelConfig {
            hidden_size: 2048,
            intermediate_size: 0,
            experts: Some(experts.clone()),
            num_layers: 48,
            num_kv_heads: 4,
            vocab_size: 151_936,
            ..config()
        };
        let whole = Shard::new(&sparse, 0, 1).unwrap();
        // 30,532,122,624 parameters, of which 48 x (2 x 2048 + 2 x 128) + 2048 are in norms.
        assert_eq!(
            plain_bytes(&sparse, &whole, Quantization::None) / 2 + 48 * 4352 + 2048,
            30_532_122_624
        );
        let half = Shard::new(&sparse, 0, 2).unwrap();
        let routers = 2 * 48 * 128 * 2048;
        assert_eq!(
            (plain_bytes(&sparse, &half, Quantization::None) - routers) * 2,
            plain_bytes(&sparse, &whole, Quantization::None) - routers
        );
        let mixed = ModelConfig {
            intermediate_size: 6144,
            experts: Some(ExpertsConfig {
                layers: (0..48).map(|layer| layer > 0).collect(),
                ..experts
            }),
            ..sparse.clone()
        };
        let whole = Shard::new(&mixed, 0, 1).unwrap();
        let expert_layer = 128 * 2048 * (3 * 768 + 1);
        assert_eq!(
            plain_bytes(&mixed, &whole, Quantization::None) / 2 + expert_layer - 2048 * 3 * 6144,
            plain_bytes(&sparse, &Shard::new(&sparse, 0, 1).unwrap(), Quantization::None) / 2
        );
    }

    /// gpt-oss-20b: 24 layers with 32 experts, whose matrices have 4 bits in groups of 32;
    /// attention, embedding and head are bf16.
    #[test]
    fn experts_alone_of_mxfp4_stay_small() {
        let experts = ExpertsConfig {
            routing: Routing::softmax(32, 4, true),
            intermediate_size: 2880,
            layers: vec![true; 24],
            activation: ExpertActivation::Silu,
            is_interleaved: true,
            shared: None,
        };
        let raw = serde_json::json!({"quant_method": "mxfp4"});
        let config = ModelConfig {
            hidden_size: 2880,
            intermediate_size: 0,
            experts: Some(experts),
            sinks: true,
            num_layers: 24,
            num_heads: 64,
            num_kv_heads: 8,
            head_dim: 64,
            vocab_size: 201_088,
            quantised: Some(check(&raw).unwrap()),
            ..config()
        };
        let whole = Shard::new(&config, 0, 1).unwrap();
        let expert_weights = 24 * 32 * 3 * 2880 * 2880u64;
        let others = 24 * 2880 * (2 * 4096 + 2 * 512 + 32) + 2 * 201_088 * 2880u64;
        let bf16 = plain_bytes(&config, &whole, Quantization::None);
        assert_eq!(bf16, 2 * (expert_weights + others));
        // One f32 scale per group.
        let int4 = compact_bytes(&config, &whole, Quantization::None);
        assert_eq!(int4, expert_weights / 2 + expert_weights / 32 * 4 + 2 * others);
        // Groups that the division cuts have a scale in each part.
        let quarter = Shard::new(&config, 3, 4).unwrap();
        assert_eq!(quarter.expert, 2160..2880);
        let all = 4 * compact_bytes(&config, &quarter, Quantization::None);
        assert!(all > int4 && all < int4 * 51 / 50, "{all} of {int4}");
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
            swap_bytes: 0,
            kv_cache_dtype: KvCacheDtype::Auto,
        };
        let whole = Shard::new(&config, 0, 1).unwrap();
        assert_eq!(sequence_bytes(&config, &whole, &sizes), 8192 * 128 * 1024);
        let eighth = Shard::new(&config, 0, 8).unwrap();
        assert_eq!(sequence_bytes(&config, &eighth, &sizes), 8192 * 16 * 1024);
        let fp8 = EngineConfig { kv_cache_dtype: KvCacheDtype::Fp8, ..sizes.clone() };
        assert_eq!(sequence_bytes(&config, &eighth, &fp8), 8192 * 8 * 1024);
        let more = EngineConfig { max_num_batched_tokens: 4096, ..sizes.clone() };
        let bytes = |sizes| activation_bytes(&config, &whole, false, sizes);
        assert!(bytes(&sizes) < bytes(&more) && bytes(&more) < 2 << 30);
        // Gate and up projections of one layer in bf16.
        let int8 = activation_bytes(&config, &whole, true, &sizes);
        assert_eq!(int8 - bytes(&sizes), 2 * 2 * 14336 * 4096);
    }
}
