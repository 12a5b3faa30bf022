//! LoRA adapters with synthetic weights, written in PEFT's format.
//!
//! Writes the safetensors format itself, so that the loader is not tested against itself.
use std::fs;
use std::io;
use std::path::Path;

use serde_json::{Map, Value, json};

/// The shape of an adapter.
#[derive(Clone, Debug)]
pub struct AdapterSpec {
    /// The modules that are adapted in every layer, such as `self_attn.q_proj`.
    pub modules: Vec<&'static str>,
    /// Their rank.
    pub rank: usize,
    /// Alpha: the numerator of their scale.
    pub alpha: f64,
    /// The seed of the weights.
    pub seed: u64,
}

/// The modules of attention.
pub const ATTENTION: [&str; 4] =
    ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"];
/// The modules of an MLP.
pub const MLP: [&str; 3] = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"];

/// The modules of models that fuse q, k and v, and gate and up.
pub const FUSED: [&str; 4] =
    ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"];

/// One module's matrices.
#[derive(Clone, Debug)]
pub struct Factors {
    /// The module, such as `model.layers.0.self_attn.q_proj`.
    pub module: String,
    /// The module's outputs and inputs.
    pub shape: (usize, usize),
    /// `[rank, inputs]`
    pub a: Vec<f32>,
    /// `[outputs, rank]`
    pub b: Vec<f32>,
}

impl AdapterSpec {
    /// All modules, with this rank and a scale of 2.
    #[must_use]
    pub fn whole(rank: usize, seed: u64) -> Self {
        let modules = ATTENTION.into_iter().chain(MLP).collect();
        Self { modules, rank, alpha: 2.0 * rank as f64, seed }
    }

    /// Only the modules of attention.
    #[must_use]
    pub fn attention(rank: usize, seed: u64) -> Self {
        Self { modules: ATTENTION.to_vec(), ..Self::whole(rank, seed) }
    }

    /// Writes an adapter for `model` to the existing folder `folder`; returns its matrices.
    ///
    /// # Errors
    /// When a file cannot be read or written.
    pub fn write(&self, model: &Path, folder: &Path) -> io::Result<Vec<Factors>> {
        let config: Value = serde_json::from_str(&fs::read_to_string(model.join("config.json"))?)?;
        let factors = self.make(&config);
        let names: Vec<&str> = self.modules.iter().filter_map(|it| it.rsplit('.').next()).collect();
        let own = json!({
            "peft_type": "LORA", "r": self.rank, "lora_alpha": self.alpha, "bias": "none",
            "target_modules": names, "base_model_name_or_path": "elsewhere", "use_dora": false,
            "modules_to_save": null, "rank_pattern": {}, "lora_dropout": 0.05,
        });
        fs::write(folder.join("adapter_config.json"), own.to_string())?;
        let mut tensors = Vec::new();
        for Factors { module, shape: (outputs, inputs), a, b } in &factors {
            let name = |which: &str| format!("base_model.model.{module}.{which}.weight");
            tensors.push((name("lora_A"), [self.rank, *inputs], a));
            tensors.push((name("lora_B"), [*outputs, self.rank], b));
        }
        fs::write(folder.join("adapter_model.safetensors"), safetensors(&tensors))?;
        Ok(factors)
    }

    fn make(&self, config: &Value) -> Vec<Factors> {
        let number = |key: &str| config[key].as_u64().and_then(|it| usize::try_from(it).ok());
        let hidden = number("hidden_size").unwrap_or(0);
        let inner = number("intermediate_size").unwrap_or(0);
        let heads = number("num_attention_heads").unwrap_or(1);
        let kv_heads = number("num_key_value_heads").unwrap_or(heads);
        let head_dim = number("head_dim").unwrap_or(hidden / heads.max(1));
        let mut state = self.seed.wrapping_mul(2).wrapping_add(1);
        // Multiples of 1/512 with few bits: exact in every type.
        let mut draw = |count: usize| -> Vec<f32> {
            let mut next = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695);
                ((state >> 40) % 127) as f32 - 63.0
            };
            (0..count).map(|_| next() / 512.0).collect()
        };
        let mut factors = Vec::new();
        for layer in 0..number("num_hidden_layers").unwrap_or(0) {
            for module in &self.modules {
                let shape = match module.rsplit('.').next() {
                    Some("q_proj") => (heads * head_dim, hidden),
                    Some("k_proj" | "v_proj") => (kv_heads * head_dim, hidden),
                    Some("qkv_proj") => ((heads + 2 * kv_heads) * head_dim, hidden),
                    Some("gate_up_proj") => (2 * inner, hidden),
                    Some("o_proj") => (hidden, heads * head_dim),
                    Some("down_proj") => (hidden, inner),
                    _ => (inner, hidden),
                };
                let module = format!("model.layers.{layer}.{module}");
                let (a, b) = (draw(self.rank * shape.1), draw(shape.0 * self.rank));
                factors.push(Factors { module, shape, a, b });
            }
        }
        factors
    }
}

fn safetensors(tensors: &[(String, [usize; 2], &Vec<f32>)]) -> Vec<u8> {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (name, shape, values) in tensors {
        let start = data.len();
        data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        let offsets = [start, data.len()];
        let info = json!({"dtype": "F32", "shape": shape, "data_offsets": offsets});
        header.insert(name.clone(), info);
    }
    let header = Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(&data);
    bytes
}
