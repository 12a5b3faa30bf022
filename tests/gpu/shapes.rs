//! Models with random weights in the shapes of known ones.
use kernels::backend::prelude::*;
use kernels::backend::{DType, HostMatrix, QkvWeights, RopeTable, Routing};
use kernels::cuda::CudaBackend;
use serde_json::json;
use shared::protocol::{EngineConfig, KvCacheDtype, Quantization};
use worker::engine::Engine;
use worker::model::ModelError;
use worker::model::config::ModelConfig;
use worker::model::decoder::Decoder;
use worker::model::shard::Shard;
use worker::model::size;
use worker::model::weights::{BackendWeights, LayerWeights, Mlp, Norm, Projection, Weights};

use crate::goldens::PLANNING;
use crate::speed::{BLOCK_SIZE, Sizes};

pub(crate) struct Shape {
    pub(crate) name: &'static str,
    pub(crate) hidden: usize,
    /// Inner size of the MLP, or of an expert.
    pub(crate) inner: usize,
    pub(crate) experts: Option<Routing>,
    pub(crate) layers: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) vocab: usize,
    pub(crate) tied: bool,
    pub(crate) quantization: Quantization,
}

/// Llama 3.1 8B.
const DENSE: Shape = Shape {
    name: "8B",
    hidden: 4096,
    inner: 14_336,
    experts: None,
    layers: 32,
    heads: 32,
    kv_heads: 8,
    head_dim: 128,
    vocab: 128_256,
    tied: false,
    quantization: Quantization::None,
};
/// Llama 3.1 8B, the one for comparisons with other engines; Llama 3.2 1B; a third of the layers of
/// Qwen3 30B-A3B.
pub(crate) static SHAPES: [Shape; 4] = [
    DENSE,
    Shape {
        name: "1B",
        hidden: 2048,
        inner: 8192,
        experts: None,
        layers: 16,
        heads: 32,
        kv_heads: 8,
        head_dim: 64,
        vocab: 128_256,
        tied: true,
        quantization: Quantization::None,
    },
    Shape {
        name: "30B-A3B, 16 layers",
        hidden: 2048,
        inner: 768,
        experts: Some(Routing::softmax(128, 8, true)),
        layers: 16,
        heads: 32,
        kv_heads: 4,
        head_dim: 128,
        vocab: 151_936,
        tied: false,
        quantization: Quantization::None,
    },
    Shape { name: "8B, int8", quantization: Quantization::Int8, ..DENSE },
];
pub(crate) static TINY: [Shape; 3] = [
    TINY_DENSE,
    Shape {
        name: "tiny experts",
        inner: 24,
        experts: Some(Routing::softmax(4, 2, true)),
        ..TINY_DENSE
    },
    Shape { name: "tiny, int8", quantization: Quantization::Int8, ..TINY_DENSE },
];
const TINY_DENSE: Shape = Shape {
    name: "tiny",
    hidden: 64,
    inner: 96,
    experts: None,
    layers: 2,
    heads: 4,
    kv_heads: 2,
    head_dim: 16,
    vocab: 300,
    tied: false,
    quantization: Quantization::None,
};

impl Shape {
    pub(crate) fn config(&self) -> Result<ModelConfig, ModelError> {
        let mut config = json!({
            "architectures": ["LlamaForCausalLM"], "hidden_size": self.hidden,
            "intermediate_size": self.inner, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim, "vocab_size": self.vocab,
            "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
            "tie_word_embeddings": self.tied, "dtype": "bfloat16"});
        if let Some(Routing { num_experts, top_k, normalise, .. }) = self.experts {
            assert!(normalise, "Mixtral's are");
            config["architectures"] = json!(["MixtralForCausalLM"]);
            config["num_local_experts"] = json!(num_experts);
            config["num_experts_per_tok"] = json!(top_k);
        }
        let file = self.name.into();
        ModelConfig::from_value(config).map_err(|message| ModelError::File { file, message })
    }

    /// Expected bytes of weights that a step of this many rows reads. Of the experts, it counts
    /// those that at least one row chooses, if rows choose at random.
    pub(crate) fn read_bytes(&self, all: u64, rows: u32) -> u64 {
        let Some(routing) = self.experts else { return all };
        let experts = routing.num_experts as f64;
        let missed = (1.0 - routing.top_k as f64 / experts).powf(f64::from(rows));
        let one = 2 * 3 * self.hidden * self.inner * self.layers;
        all - (experts * missed * one as f64) as u64
    }

    /// Creates all matrices from one run of random bytes.
    fn weights(
        &self,
        backend: &mut CudaBackend,
        positions: usize,
    ) -> Result<BackendWeights<CudaBackend>, ModelError> {
        let config = self.config()?;
        let widths = [self.vocab, 2 * self.inner, (self.heads + 2 * self.kv_heads) * self.head_dim];
        let count = widths.into_iter().max().unwrap_or(1) * self.hidden;
        let mut state = 1u64;
        // Random sign and mantissa, exponents of about 1/32: sums stay small.
        let mut data = vec![0u8; count * 2];
        for element in data.chunks_exact_mut(2) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let bits = (state >> 48) as u16;
            element.copy_from_slice(&(0x3c80 ^ (bits & 0x80ff)).to_le_bytes());
        }
        let part = |rows: usize, cols: usize| HostMatrix {
            data: &data,
            dtype: DType::Bf16,
            rows,
            cols,
            col_start: 0,
            row_stride: cols,
            scales: None,
        };
        let quantization = self.quantization;
        let matrix = |backend: &mut CudaBackend, rows: usize, cols: usize| match quantization {
            Quantization::None => backend.load_matrix(&[part(rows, cols)]),
            Quantization::Int8 => backend.load_int8_matrix(&[part(rows, cols)]),
        };
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let embedding = backend.load_matrix(&[part(self.vocab, self.hidden)])?;
        let lm_head = (!self.tied).then(|| matrix(backend, self.vocab, self.hidden)).transpose()?;
        let mut products = Vec::new();
        for _ in 0..self.layers {
            let qkv = matrix(backend, q + 2 * kv, self.hidden)?;
            products.push((qkv, matrix(backend, self.hidden, q)?));
        }
        let ones = vec![1.0; self.hidden];
        let mut layers = Vec::new();
        for (qkv, output) in products {
            let mlp = match self.experts {
                None => Mlp::Dense {
                    gate_up: matrix(backend, 2 * self.inner, self.hidden)?,
                    gate_up_bias: None,
                    down: vec![matrix(backend, self.hidden, self.inner)?],
                    down_bias: None,
                },
                Some(Routing { num_experts, .. }) => {
                    let gate_up = vec![part(self.inner, self.hidden); 2 * num_experts];
                    let down = vec![part(self.hidden, self.inner); num_experts];
                    Mlp::Experts {
                        router: backend.load_matrix(&[part(num_experts, self.hidden)])?,
                        router_bias: None,
                        gate_up: backend.load_stack(&gate_up)?,
                        gate_up_bias: None,
                        down: vec![backend.load_stack(&down)?],
                        down_bias: None,
                    }
                }
            };
            layers.push(LayerWeights {
                rope: 0,
                input_norm: Some(Norm::Rms(backend.load_vector(&ones)?)),
                projection: Projection::Qkv(QkvWeights {
                    weight: qkv,
                    bias: None,
                    q_norm: None,
                    k_norm: None,
                }),
                qk_norm: None,
                sinks: None,
                gate: None,
                output: vec![output],
                output_bias: None,
                output_norm: None,
                post_norm: Some(Norm::Rms(backend.load_vector(&ones)?)),
                mlp,
                down_norm: None,
            });
        }
        let (cos, sin) = config.ropes[0].tables(config.head_dim, positions);
        let shard = Shard::new(&config, 0, 1)?;
        Ok(Weights {
            embedding,
            embedding_scale: 1.0,
            lm_head,
            has_head: true,
            class_head: None,
            layers,
            final_norm: Norm::Rms(backend.load_vector(&ones)?),
            ropes: vec![RopeTable {
                cos: backend.load_vector(&cos)?,
                sin: backend.load_vector(&sin)?,
                q_scale: None,
            }],
            bytes: size::weight_bytes(&config, &shard, quantization),
        })
    }

    pub(crate) fn engine(
        &self,
        mut backend: CudaBackend,
        sizes: &Sizes,
    ) -> Result<Engine<CudaBackend>, ModelError> {
        let batch = sizes.rows();
        let longest = sizes.prefill.max(sizes.context.max(sizes.long) + sizes.steps + 2);
        let config = EngineConfig {
            block_size: BLOCK_SIZE,
            max_model_len: longest,
            max_num_seqs: batch,
            max_num_batched_tokens: sizes.prefill.max(batch),
            kv_cache_bytes: 0,
            swap_bytes: 0,
            kv_cache_dtype: KvCacheDtype::Auto,
            prefix_states: 0,
        };
        let weights = self.weights(&mut backend, longest as usize)?;
        let model = self.config()?;
        let shard = Shard::new(&model, 0, 1)?;
        let decoder = Decoder::new(&mut backend, model, shard, weights, &config)?;
        let mut engine = Engine::new(backend, decoder, config);
        engine.profile()?;
        engine.backend().settle()?;
        engine.backend().plan_products(PLANNING)?;
        engine.start(sizes.blocks(), 0)?;
        Ok(engine)
    }
}
