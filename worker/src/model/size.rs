//! PURE: memory of one rank's share of a model on a device that keeps weights (except quantised
//! ones), KV (unless it is in FP8) and the inputs of products in bf16, and everything else in f32.
use kernels::backend::EXPERT_SLOTS;
use kernels::cuda::capacity::bytes_text;
use kernels::weights::Compact;
use shared::protocol::{EngineConfig, KvCacheDtype, Quantization};

use super::config::{Latent, ModelConfig};
use super::rope::distinct;
use super::shard::Shard;

/// Bytes per output of a quantised matrix for its scale.
const SCALE: u64 = 4;

/// Whether a device keeps a matrix in this form (or a stack of them, if true).
pub type Keeps<'a> = &'a dyn Fn(&Compact, bool) -> bool;

/// Size of a shard's weights, in bytes, if no matrix stays as a quantised checkpoint has it:
/// computed from the configuration alone, for measurements. Workers count with
/// [`super::weights::kept_bytes`].
#[must_use]
pub fn weight_bytes(config: &ModelConfig, shard: &Shard, quantization: Quantization) -> u64 {
    let n = |n: usize| n as u64;
    let hidden = n(config.hidden_size);
    let q = n(shard.heads.len() * config.head_dim);
    let kv = n(shard.kv_heads.len() * config.head_dim);
    // Sizes of a matrix that can be quantised, and of one that is always in bf16.
    let matrix = |rows: u64, cols: u64| match quantization {
        Quantization::None => 2 * rows * cols,
        Quantization::Int8 => rows * (cols + SCALE),
    };
    let as_is = |rows: u64, cols: u64| 2 * rows * cols;
    // Each part of a row-parallel matrix has its own scales.
    let parts = n(shard.parts);
    let row_parallel = |cols: u64| parts * matrix(hidden, cols / parts);
    // Gate and up, or up alone.
    let gates = if config.is_gated() { 2 } else { 1 };
    let mlp = |ups: u64, inner: u64| matrix(ups * inner, hidden) + row_parallel(inner);
    let (dense, sparse) = layers(config);
    let routing = config.experts.as_ref().map(|experts| experts.routing);
    let [experts, logits] =
        routing.map_or([0, 0], |routing| [routing.num_experts, routing.num_logits()].map(n));
    let gate = if config.gates_attention { matrix(q, hidden) } else { 0 };
    let attention = match &config.latent {
        None => matrix(q + 2 * kv, hidden) + gate + row_parallel(q),
        Some(latent) => {
            let Latent { q_rank, rank, plain, rotated, value } = *latent;
            let heads = n(shard.heads.len());
            q_rank.map_or(0, |q_rank| matrix(n(q_rank), hidden))
                + matrix(heads * n(plain + rotated), q_rank.map_or(hidden, n))
                + matrix(n(rank + rotated), hidden)
                + as_is(heads * n(plain + value), n(rank))
                + row_parallel(heads * n(value))
        }
    };
    let vocab = n(shard.vocab_width);
    // The matrix of classes is too small to count.
    let output = match (config.has_own_head(), quantization) {
        (false, Quantization::None) => 0,
        (false, _) if config.classifier.is_some() => 0,
        (true, _) | (false, Quantization::Int8) => matrix(vocab, hidden),
    };
    let linear = shard.delta(config).map_or(0, |delta| {
        let values = n(delta.value_width());
        matrix(n(delta.channels()) + values, hidden)
            + as_is(n(delta.gates_width()), hidden)
            + row_parallel(values)
    });
    n(config.num_kv_layers()) * attention
        + n(config.num_linear_layers()) * linear
        + dense * mlp(gates, n(shard.intermediate.len()))
        + sparse * (as_is(logits, hidden) + experts * mlp(2, n(shard.expert.len())))
        + as_is(vocab, hidden)
        + output
}

/// The number of layers with an MLP, and with experts.
fn layers(config: &ModelConfig) -> (u64, u64) {
    let sparse = config
        .experts
        .as_ref()
        .map_or(0, |experts| experts.layers.iter().filter(|has_experts| **has_experts).count());
    ((config.num_layers - sparse) as u64, sparse as u64)
}

/// Size of the rotary tables, in bytes: cosines and sines of each position, and factors of q, for
/// each kind of rotary embedding that layers have.
#[must_use]
pub fn table_bytes(config: &ModelConfig, sizes: &EngineConfig) -> u64 {
    let positions = config.max_positions.min(sizes.max_model_len as usize);
    let ropes = distinct(&config.ropes);
    let scales = ropes.iter().filter(|rope| rope.scales_q(positions)).count();
    ((ropes.len() * config.rope_dim() + scales) * positions * size_of::<f32>()) as u64
}

/// Size of the activations of the largest step, and of the states of sequences, in bytes. `widens`
/// tells whether some products convert int8 weights to bf16 first.
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
    let projected = match &config.latent {
        None => (q + 2 * kv) * 4,
        Some(latent) => {
            let Latent { q_rank, rank, plain, rotated, value } = *latent;
            let heads = n(shard.heads.len());
            n(q_rank.unwrap_or(0)) * (4 + 2)
                + (heads * n(plain + rotated) + n(rank + rotated)) * 4
                + heads * n(plain + value) * 2
        }
    };
    let gate = if config.gates_attention { q * 4 } else { 0 };
    // As projected, and what is made of it before the state is changed; the result.
    let linear = shard.delta(config).map_or(0, |delta| {
        let (channels, values) = (n(delta.channels()), n(delta.value_width()));
        // With a norm over all heads, the result in f32 comes before that, and a sum of squares.
        let gated = shard.delta_norm(config).map_or(0, |_| values + 2);
        let gates = n(delta.gates_width()) + 4 * n(delta.value_heads);
        (2 * channels + values + gates + gated) * 4 + values * 2
    });
    // What ranks on GPUs exchange in bf16.
    let narrowed = if shard.degree > 1 { hidden * 2 } else { 0 };
    let row = hidden * (4 + 2 + 4 * deltas)
        + narrowed
        + q * 2 * 2
        + inner * 2
        + projected
        + gate
        + linear;
    let product = u64::from(sizes.max_num_batched_tokens.min(1024)) * inner * 2 * 4;
    // This rank's, and those of all if there are several.
    let parts = if shard.degree > 1 { 1 + shard.degree } else { 1 };
    let logits = n(shard.vocab_width * parts) * 4;
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
    let projections = match &config.latent {
        None => {
            let linear =
                shard.delta(config).map_or(0, |delta| delta.channels() + delta.value_width());
            hidden * (q + 2 * kv).max(n(linear))
        }
        Some(latent) => {
            let heads = n(shard.heads.len());
            let wide = heads * n(latent.plain + latent.rotated);
            (wide * latent.q_rank.map_or(hidden, n)).max(hidden * heads * n(latent.value))
        }
    };
    let widened = if widens { 2 * projections.max(2 * hidden * inner) } else { 0 };
    let buffers = experts
        + widened
        + u64::from(sizes.max_num_batched_tokens) * row
        + product.max(u64::from(sizes.max_num_seqs) * q * 64 * 4)
        + u64::from(sizes.max_num_seqs) * logits;
    buffers.saturating_add(state_bytes(config, shard, sizes))
}

/// Size of the buffers for the largest step on a device that keeps all of them in f32, and of the
/// states of sequences, in bytes. Those of experts, of latents and of norms over all heads come on
/// top.
#[must_use]
pub fn buffer_bytes(config: &ModelConfig, shard: &Shard, sizes: &EngineConfig) -> u64 {
    let n = |n: usize| n as u64;
    let per_head = config.head_dim + config.latent.map_or(config.head_dim, |latent| latent.rank);
    let deltas = u64::from(shard.parts.ilog2()) + 1 + u64::from(config.is_parallel);
    // The residual stream, its norm and what is added to it; q and attention's output; the MLP.
    let row = n(config.hidden_size) * (2 + deltas)
        + n(shard.heads.len() * per_head)
        + n(shard.intermediate.len());
    // Rank 0 also has those of all ranks.
    let parts = if shard.degree > 1 && shard.rank == 0 { 1 + shard.degree } else { 1 };
    let logits = n(shard.vocab_width * parts);
    let gate = if config.gates_attention { n(shard.heads.len() * config.head_dim) } else { 0 };
    let linear = shard.delta(config).map_or(0, |delta| {
        let values = delta.value_width();
        let gated = shard.delta_norm(config).map_or(0, |_| values + 2);
        n(delta.channels() + 2 * values + delta.gates_width() + gated)
    });
    let row = row + gate + linear;
    let buffers = 4
        * (u64::from(sizes.max_num_batched_tokens) * row + u64::from(sizes.max_num_seqs) * logits);
    buffers.saturating_add(state_bytes(config, shard, sizes))
}

/// Number of states of linear attention: of as many sequences as run at a time, and those that are
/// kept.
#[must_use]
pub fn num_states(sizes: &EngineConfig) -> usize {
    (sizes.max_num_seqs as usize).saturating_add(sizes.prefix_states as usize)
}

/// Size of the states of linear attention, in bytes.
#[must_use]
pub fn state_bytes(config: &ModelConfig, shard: &Shard, sizes: &EngineConfig) -> u64 {
    let states = shard.states(config, num_states(sizes));
    states.map_or(0, |states| states.bytes() as u64)
}

/// What to do if the states of linear attention leave too little memory: one more clause of an
/// error's sentence, or nothing if there are no states.
#[must_use]
pub fn advice_on_states(config: &ModelConfig, shard: &Shard, sizes: &EngineConfig) -> String {
    match state_bytes(config, shard, sizes) {
        0 => String::new(),
        bytes => format!(
            "; {} of the activations are states of linear attention for --max-num-seqs {} and \
             --prefix-states {}: fewer take less",
            bytes_text(bytes),
            sizes.max_num_seqs,
            sizes.prefix_states
        ),
    }
}

/// Size of the KV cache of one sequence of maximum length, in bytes.
#[must_use]
pub fn sequence_bytes(config: &ModelConfig, shard: &Shard, sizes: &EngineConfig) -> u64 {
    let element = match sizes.kv_cache_dtype {
        KvCacheDtype::Auto => 2,
        KvCacheDtype::Fp8 => 1,
    };
    // K and V, unless one is a part of the other.
    let planes = if config.latent.is_some() { 1 } else { 2 };
    let token = config.num_kv_layers() * shard.kv_heads.len() * config.head_dim * planes * element;
    u64::from(sizes.max_model_len.next_multiple_of(sizes.block_size.max(1))) * token as u64
}

#[cfg(test)]
mod tests {
    use kernels::backend::{ExpertActivation, Routing};
    use serde_json::json;

    use super::super::experts::ExpertsConfig;
    use super::*;

    /// 64 sequences, of at most so many tokens.
    fn sizes(max_model_len: u32) -> EngineConfig {
        EngineConfig {
            block_size: 16,
            max_model_len,
            max_num_seqs: 64,
            max_num_batched_tokens: 2048,
            kv_cache_bytes: 0,
            swap_bytes: 0,
            kv_cache_dtype: KvCacheDtype::Auto,
            prefix_states: 0,
        }
    }

    /// Llama 3.1 8B.
    fn config() -> ModelConfig {
        let config = json!({"architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
            "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 128_256,
            "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 5e5});
        ModelConfig::from_value(config).unwrap()
    }

    #[test]
    fn eight_billion_parameters_take_sixteen_billion_bytes() {
        let config = config();
        let whole = Shard::new(&config, 0, 1).unwrap();
        let bytes = weight_bytes(&config, &whole, Quantization::None);
        // 8.03e9 parameters, 266,240 of them in norms.
        assert_eq!(bytes / 2 + 266_240, 8_030_261_248);
        let half = Shard::new(&config, 1, 2).unwrap();
        assert_eq!(weight_bytes(&config, &half, Quantization::None) * 2, bytes);
        let tied = ModelConfig { tied: true, ..config.clone() };
        assert_eq!(weight_bytes(&tied, &whole, Quantization::None), bytes - 2 * 128_256 * 4096);
        // Everything but the embedding takes half the space, plus a scale per output: q, k, v,
        // output, gate, up and down of 32 layers, and the head.
        let outputs = 32 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096) + 128_256;
        let int8 = bytes / 2 + 128_256 * 4096 + 4 * outputs;
        assert_eq!(weight_bytes(&config, &whole, Quantization::Int8), int8);
        // The head is then a separate matrix, tied or not.
        assert_eq!(weight_bytes(&tied, &whole, Quantization::Int8), int8);
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
            weight_bytes(&sparse, &whole, Quantization::None) / 2 + 48 * 4352 + 2048,
            30_532_122_624
        );
        let half = Shard::new(&sparse, 0, 2).unwrap();
        let routers = 2 * 48 * 128 * 2048;
        assert_eq!(
            (weight_bytes(&sparse, &half, Quantization::None) - routers) * 2,
            weight_bytes(&sparse, &whole, Quantization::None) - routers
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
            weight_bytes(&mixed, &whole, Quantization::None) / 2 + expert_layer - 2048 * 3 * 6144,
            weight_bytes(&sparse, &Shard::new(&sparse, 0, 1).unwrap(), Quantization::None) / 2
        );
    }

    /// DeepSeek-V3 without the layer that predicts several tokens: 671,026,419,200 parameters, of
    /// which 61 x (7168 + 1536 + 512 + 7168) + 7168 are in norms and 58 x 256 in biases of routers.
    #[test]
    fn latents_are_counted_once_for_all_heads() {
        let config = json!({"architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168,
            "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 4096,
            "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256,
            "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
            "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-6, "topk_group": 4, "v_head_dim": 128, "vocab_size": 129_280});
        let config = ModelConfig::from_value(config).unwrap();
        let whole = Shard::new(&config, 0, 1).unwrap();
        let others = 61 * (7168 + 1536 + 512 + 7168) + 7168 + 58 * 256;
        let bytes = weight_bytes(&config, &whole, Quantization::None);
        assert_eq!(bytes / 2 + others, 671_026_419_200);
        // The first projections and the routers are on every rank.
        let alike = 2 * (61 * (1536 + 576) * 7168 + 58 * 256 * 7168u64);
        let eighth = Shard::new(&config, 7, 8).unwrap();
        let own = weight_bytes(&config, &eighth, Quantization::None);
        assert_eq!((own - alike) * 8, bytes - alike);
        let sizes = sizes(4096);
        // 70,272 bytes a token, on every rank.
        assert_eq!(sequence_bytes(&config, &whole, &sizes), 4096 * 61 * 576 * 2);
        assert_eq!(sequence_bytes(&config, &eighth, &sizes), 4096 * 61 * 576 * 2);
        let fp8 = EngineConfig { kv_cache_dtype: KvCacheDtype::Fp8, ..sizes.clone() };
        assert_eq!(sequence_bytes(&config, &eighth, &fp8), 4096 * 61 * 576);
        let bytes = |shard| activation_bytes(&config, shard, false, &sizes);
        assert!(bytes(&eighth) < bytes(&whole) && bytes(&whole) < 4 << 30);
    }

    /// Qwen3-Next-80B-A3B.
    #[test]
    fn states_are_of_layers_with_linear_attention_and_kv_of_the_others() {
        let config = json!({"architectures": ["Qwen3NextForCausalLM"], "hidden_size": 2048,
            "max_position_embeddings": 262_144, "moe_intermediate_size": 512,
            "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10,
            "num_hidden_layers": 48, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
            "shared_expert_intermediate_size": 512, "vocab_size": 151_936});
        let config = ModelConfig::from_value(config).unwrap();
        let sizes = sizes(4096);
        let [whole, half] = [1, 2].map(|degree| Shard::new(&config, 0, degree).unwrap());
        assert_eq!(state_bytes(&config, &whole, &sizes), 64 * 79_036_416);
        assert_eq!(state_bytes(&config, &half, &sizes) * 2, 64 * 79_036_416);
        let advice = advice_on_states(&config, &whole, &sizes);
        assert!(advice.contains("4.7 GiB of the activations are states"), "{advice}");
        // 12 layers with 2 heads of 256, K and V.
        assert_eq!(sequence_bytes(&config, &whole, &sizes), 4096 * 12 * 2 * 256 * 2 * 2);
        // Without the layer that predicts several tokens, and without norms, vectors and the
        // convolution's weights: q with gates, k, v and o; linear attention's four; experts and the
        // router, whose shared expert has a gate.
        let full = 2048 * (2 * 16 * 256 + 2 * 2 * 256) + 16 * 256 * 2048;
        let linear = 2048 * (2 * 2048 + 2 * 4096 + 2 * 32) + 4096 * 2048;
        let experts = 513 * 3 * 512 * 2048 + 513 * 2048;
        let all = 12 * full + 36 * linear + 48 * experts + 2 * 151_936 * 2048u64;
        assert_eq!(weight_bytes(&config, &whole, Quantization::None), 2 * all);
        // Fewer sequences have fewer states, and rows of logits.
        let fewer = EngineConfig { max_num_seqs: 32, ..sizes.clone() };
        let activations = |sizes| activation_bytes(&config, &whole, false, sizes);
        let buffers = |sizes| buffer_bytes(&config, &whole, sizes);
        let saved = 32 * (79_036_416 + 151_936 * 4);
        // And parts of attention.
        assert_eq!(activations(&sizes) - activations(&fewer), saved + 32 * 4096 * 64 * 4);
        assert_eq!(buffers(&sizes) - buffers(&fewer), saved);
        let [two, one] = [&whole, &half].map(|shard| buffer_bytes(&config, shard, &sizes));
        assert!(one < two);
    }

    #[test]
    fn each_kind_of_rotary_embedding_has_tables_of_all_positions() {
        let sizes = sizes(100_000);
        let mut config = config();
        // 64 cosines and 64 sines.
        assert_eq!(table_bytes(&config, &sizes), 100_000 * 128 * 4);
        config.ropes[7].theta = 1e4;
        assert_eq!(table_bytes(&config, &sizes), 2 * 100_000 * 128 * 4);
        config.max_positions = 4096;
        assert_eq!(table_bytes(&config, &sizes), 2 * 4096 * 128 * 4);
    }

    #[test]
    fn a_sequence_takes_128_kib_a_token() {
        let config = config();
        let sizes = sizes(8190);
        let whole = Shard::new(&config, 0, 1).unwrap();
        assert_eq!(sequence_bytes(&config, &whole, &sizes), 8192 * 128 * 1024);
        let eighth = Shard::new(&config, 0, 8).unwrap();
        assert_eq!(sequence_bytes(&config, &eighth, &sizes), 8192 * 16 * 1024);
        let fp8 = EngineConfig { kv_cache_dtype: KvCacheDtype::Fp8, ..sizes.clone() };
        assert_eq!(sequence_bytes(&config, &eighth, &fp8), 8192 * 8 * 1024);
        let more = EngineConfig { max_num_batched_tokens: 4096, ..sizes.clone() };
        let bytes = |sizes| activation_bytes(&config, &whole, false, sizes);
        assert!(bytes(&sizes) < bytes(&more) && bytes(&more) < 2 << 30);
        let fewer = EngineConfig { max_num_seqs: 32, ..sizes.clone() };
        assert_eq!(bytes(&sizes) - bytes(&fewer), 32 * 128_256 * 4, "one row of logits each");
        let bytes_of_half = |sizes| {
            let half = Shard::new(&config, 1, 2).unwrap();
            activation_bytes(&config, &half, false, sizes)
        };
        let difference = bytes_of_half(&sizes) - bytes_of_half(&fewer);
        assert_eq!(difference, 32 * (64_128 + 128_256) * 4, "its own and the gathered ones");
        // In f32, without what is not a buffer: 3 times 4096 of the residual stream, q and
        // attention's output, the MLP; and the logits.
        let row = 3 * 4096 + 2 * 4096 + 14336;
        let buffers = 4 * (2048 * row + 64 * 128_256);
        assert_eq!(buffer_bytes(&config, &whole, &sizes), buffers);
        // Gate and up projections of one layer in bf16.
        let int8 = activation_bytes(&config, &whole, true, &sizes);
        assert_eq!(int8 - bytes(&sizes), 2 * 2 * 14336 * 4096);
    }
}
