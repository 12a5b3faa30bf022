//! One rank's shard of the weights, packed for its backend.
use kernels::Backend;
use kernels::backend::{DType, HostMatrix, QkvWeights, RopeTable};

use super::ModelError;
use super::config::ModelConfig;
use super::safetensors::{TensorView, WeightFiles};
use super::shard::Shard;

/// One decoder layer.
#[derive(Debug)]
pub struct LayerWeights<M, V> {
    /// RMSNorm before attention.
    pub input_norm: V,
    /// q, k, v projections.
    pub qkv: QkvWeights<M, V>,
    /// Output projection, row-parallel.
    pub output: M,
    /// Its bias; on rank 0 alone, since partial products are summed.
    pub output_bias: Option<V>,
    /// RMSNorm before the MLP.
    pub post_norm: V,
    /// gate rows, then up rows.
    pub gate_up: M,
    /// Their biases.
    pub gate_up_bias: Option<V>,
    /// Down projection, row-parallel.
    pub down: M,
    /// Its bias; on rank 0 alone.
    pub down_bias: Option<V>,
}

/// One rank's weights.
#[derive(Debug)]
pub struct Weights<M, V> {
    /// `[vocab_width, hidden]`.
    pub embedding: M,
    /// `[vocab_width, hidden]`; absent when tied to the embedding.
    pub lm_head: Option<M>,
    /// The layers.
    pub layers: Vec<LayerWeights<M, V>>,
    /// RMSNorm before the output head.
    pub final_norm: V,
    /// Rotary tables.
    pub rope: RopeTable<V>,
    /// Bytes of the shard, as stored.
    pub bytes: u64,
}

struct Loader<'a, B> {
    backend: &'a mut B,
    files: &'a WeightFiles,
    config: &'a ModelConfig,
    shard: &'a Shard,
    done: u64,
    total: u64,
    progress: &'a mut dyn FnMut(u64, u64),
}

/// Loads one rank's shard; touches no other bytes of the files. `max_positions` bounds the rotary
/// tables; `progress` is called with (bytes done, bytes total).
///
/// # Errors
/// [`ModelError`].
pub fn load<B: Backend>(
    backend: &mut B,
    files: &WeightFiles,
    config: &ModelConfig,
    shard: &Shard,
    max_positions: usize,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Weights<B::Matrix, B::Vector>, ModelError> {
    let total = shard_bytes(config, shard);
    progress(0, total);
    let mut loader = Loader { backend, files, config, shard, done: 0, total, progress };
    let hidden = config.hidden_size;
    let embedding = loader.vocabulary("model.embed_tokens.weight")?;
    let lm_head = if config.tied { None } else { Some(loader.vocabulary("lm_head.weight")?) };
    let layers = (0..config.num_layers).map(|i| loader.layer(i)).collect::<Result<_, _>>()?;
    let final_norm = loader.vector("model.norm.weight", hidden, 0..hidden)?;
    let (cos, sin) = config.rope.tables(config.head_dim, max_positions);
    let rope = RopeTable {
        cos: loader.backend.load_vector(&cos)?,
        sin: loader.backend.load_vector(&sin)?,
    };
    let bytes = loader.done;
    (loader.progress)(bytes, bytes);
    Ok(Weights { embedding, lm_head, layers, final_norm, rope, bytes })
}

/// An estimate for the progress bar: matrices at two bytes an element.
fn shard_bytes(config: &ModelConfig, shard: &Shard) -> u64 {
    let hidden = config.hidden_size;
    let heads = shard.heads.len() * config.head_dim;
    let kv = shard.kv_heads.len() * config.head_dim;
    let layer = hidden * (2 * heads + 2 * kv + 3 * shard.intermediate.len());
    let vocabularies = if config.tied { 1 } else { 2 };
    let elements = layer * config.num_layers + vocabularies * shard.vocab.len() * hidden;
    2 * elements as u64
}

impl<B: Backend> Loader<'_, B> {
    fn layer(&mut self, index: usize) -> Result<LayerWeights<B::Matrix, B::Vector>, ModelError> {
        let (config, shard) = (self.config, self.shard);
        let prefix = format!("model.layers.{index}");
        let name = |part: &str| format!("{prefix}.{part}");
        let (hidden, dim) = (config.hidden_size, config.head_dim);
        let rows = |heads: &std::ops::Range<usize>| heads.start * dim..heads.end * dim;
        let projections = [
            ("q", config.num_heads * dim, rows(&shard.heads)),
            ("k", config.num_kv_heads * dim, rows(&shard.kv_heads)),
            ("v", config.num_kv_heads * dim, rows(&shard.kv_heads)),
        ];
        let mut parts = Vec::new();
        let mut biases = Vec::new();
        for (letter, out, rows) in &projections {
            let weight = name(&format!("self_attn.{letter}_proj.weight"));
            parts.push((weight, *out, rows.clone()));
            if config.qkv_bias {
                let bias = name(&format!("self_attn.{letter}_proj.bias"));
                biases.extend(self.values(&bias, *out, rows.clone())?);
            }
        }
        let weight = self.column_parallel(&parts)?;
        let bias = if config.qkv_bias { Some(self.backend.load_vector(&biases)?) } else { None };
        let mut head_norm = |part: &str| -> Result<Option<B::Vector>, ModelError> {
            if config.qk_norm { self.vector(&name(part), dim, 0..dim).map(Some) } else { Ok(None) }
        };
        let qkv = QkvWeights {
            weight,
            bias,
            q_norm: head_norm("self_attn.q_norm.weight")?,
            k_norm: head_norm("self_attn.k_norm.weight")?,
        };
        let inner = config.intermediate_size;
        let columns = shard.intermediate.clone();
        let gate_up = self.column_parallel(&[
            (name("mlp.gate_proj.weight"), inner, columns.clone()),
            (name("mlp.up_proj.weight"), inner, columns.clone()),
        ])?;
        let gate_up_bias = if config.mlp_bias {
            let mut values = self.values(&name("mlp.gate_proj.bias"), inner, columns.clone())?;
            values.extend(self.values(&name("mlp.up_proj.bias"), inner, columns.clone())?);
            Some(self.backend.load_vector(&values)?)
        } else {
            None
        };
        let heads = rows(&shard.heads);
        let out = config.num_heads * dim;
        Ok(LayerWeights {
            input_norm: self.vector(&name("input_layernorm.weight"), hidden, 0..hidden)?,
            qkv,
            output: self.row_parallel(&name("self_attn.o_proj.weight"), out, heads)?,
            output_bias: self.row_bias(config.output_bias, &name("self_attn.o_proj.bias"))?,
            post_norm: self.vector(&name("post_attention_layernorm.weight"), hidden, 0..hidden)?,
            gate_up,
            gate_up_bias,
            down: self.row_parallel(&name("mlp.down_proj.weight"), inner, columns)?,
            down_bias: self.row_bias(config.mlp_bias, &name("mlp.down_proj.bias"))?,
        })
    }

    /// Output rows of several `[out, hidden]` tensors, one below the other.
    fn column_parallel(
        &mut self,
        parts: &[(String, usize, std::ops::Range<usize>)],
    ) -> Result<B::Matrix, ModelError> {
        let hidden = self.config.hidden_size;
        let mut matrices = Vec::with_capacity(parts.len());
        for (name, out, rows) in parts {
            let tensor = self.files.tensor(name, &[*out, hidden])?;
            matrices.push(rows_of(&tensor, hidden, rows));
        }
        self.matrix(&matrices)
    }

    /// Input columns of a `[hidden, input]` tensor.
    fn row_parallel(
        &mut self,
        name: &str,
        input: usize,
        columns: std::ops::Range<usize>,
    ) -> Result<B::Matrix, ModelError> {
        let hidden = self.config.hidden_size;
        let tensor = self.files.tensor(name, &[hidden, input])?;
        let matrix = HostMatrix {
            data: tensor.data,
            dtype: tensor.dtype,
            rows: hidden,
            cols: columns.len(),
            col_start: columns.start,
            row_stride: input,
        };
        self.matrix(&[matrix])
    }

    /// A row-parallel projection's bias is added once: on rank 0.
    fn row_bias(&mut self, has: bool, name: &str) -> Result<Option<B::Vector>, ModelError> {
        let hidden = self.config.hidden_size;
        if !has {
            return Ok(None);
        }
        let values = self.values(name, hidden, 0..hidden)?;
        if self.shard.rank == 0 { Ok(Some(self.backend.load_vector(&values)?)) } else { Ok(None) }
    }

    /// This rank's rows of a `[vocab, hidden]` tensor, zero rows behind them up to `vocab_width`.
    fn vocabulary(&mut self, name: &str) -> Result<B::Matrix, ModelError> {
        let hidden = self.config.hidden_size;
        let tensor = self.files.tensor(name, &[self.config.vocab_size, hidden])?;
        let rows = &self.shard.vocab;
        let padding = self.shard.vocab_width - rows.len();
        let zeros = vec![0u8; padding * hidden * tensor.dtype.bytes()];
        let mut parts = vec![rows_of(&tensor, hidden, rows)];
        if padding > 0 {
            parts.push(HostMatrix { data: &zeros, rows: padding, ..parts[0] });
        }
        parts.retain(|part| part.rows > 0);
        self.matrix(&parts)
    }

    fn matrix(&mut self, parts: &[HostMatrix<'_>]) -> Result<B::Matrix, ModelError> {
        let matrix = self.backend.load_matrix(parts)?;
        let bytes: usize =
            parts.iter().map(|part| part.rows * part.cols * part.dtype.bytes()).sum();
        self.done += bytes as u64;
        (self.progress)(self.done.min(self.total), self.total);
        Ok(matrix)
    }

    fn vector(
        &mut self,
        name: &str,
        len: usize,
        range: std::ops::Range<usize>,
    ) -> Result<B::Vector, ModelError> {
        let values = self.values(name, len, range)?;
        Ok(self.backend.load_vector(&values)?)
    }

    fn values(
        &self,
        name: &str,
        len: usize,
        range: std::ops::Range<usize>,
    ) -> Result<Vec<f32>, ModelError> {
        let tensor = self.files.tensor(name, &[len])?;
        let width = tensor.dtype.bytes();
        let bytes = &tensor.data[range.start * width..range.end * width];
        Ok(widen(bytes, tensor.dtype))
    }
}

fn rows_of<'a>(
    tensor: &TensorView<'a>,
    width: usize,
    rows: &std::ops::Range<usize>,
) -> HostMatrix<'a> {
    let row_bytes = width * tensor.dtype.bytes();
    HostMatrix {
        data: &tensor.data[rows.start * row_bytes..rows.end * row_bytes],
        dtype: tensor.dtype,
        rows: rows.len(),
        cols: width,
        col_start: 0,
        row_stride: width,
    }
}

fn widen(bytes: &[u8], dtype: DType) -> Vec<f32> {
    let halves = || bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
    match dtype {
        DType::Bf16 => halves().map(|bits| f32::from_bits(u32::from(bits) << 16)).collect(),
        DType::F16 => halves().map(|bits| half::f16::from_bits(bits).to_f32()).collect(),
        DType::F32 => {
            bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
        }
    }
}
