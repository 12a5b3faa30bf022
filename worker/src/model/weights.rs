//! From named tensors in files to one rank's weights on its device.
//!
//! Owns the tensor names of the Llama family, their shapes and which rectangle of each a rank
//! takes. Everything is checked before anything is loaded, so that a folder with a wrong last
//! layer fails at once. Only the pages of this rank's rectangles are read from the files.
use std::ops::Range;

use half::{bf16, f16};
use kernels::backend::{Backend, DType, HostMatrix, QkvWeights};
use kernels::error::KernelError;

use super::Progress;
use super::config::ModelConfig;
use super::files::{self, ModelFiles, Tensor};
use super::shard::Shard;
use crate::error::ModelError;

/// One rank's weights.
pub(super) struct Weights<B: Backend> {
    /// `[vocab_width, hidden]`
    pub(super) embedding: B::Matrix,
    /// In order.
    pub(super) layers: Vec<LayerWeights<B>>,
    /// The last RMSNorm, `[hidden]`.
    pub(super) norm: B::Vector,
    /// `[vocab_width, hidden]`; absent where it is the embedding.
    pub(super) output: Option<B::Matrix>,
}

/// One rank's part of one decoder layer.
pub(super) struct LayerWeights<B: Backend> {
    /// RMSNorm before the attention, `[hidden]`.
    pub(super) attention_norm: B::Vector,
    /// See [`QkvWeights`].
    pub(super) qkv: QkvWeights<B::Matrix, B::Vector>,
    /// `[hidden, heads * head_dim]`
    pub(super) o: B::Matrix,
    /// `[hidden]`, on rank 0 alone.
    pub(super) o_bias: Option<B::Vector>,
    /// RMSNorm before the MLP, `[hidden]`.
    pub(super) mlp_norm: B::Vector,
    /// `[2 * inner, hidden]`: gate rows, then up rows.
    pub(super) gate_up: B::Matrix,
    /// Likewise, `[2 * inner]`.
    pub(super) gate_up_bias: Option<B::Vector>,
    /// `[hidden, inner]`
    pub(super) down: B::Matrix,
    /// `[hidden]`, on rank 0 alone.
    pub(super) down_bias: Option<B::Vector>,
}

/// Checks all tensors, then packs this rank's part of each. Returns the weights and their size in
/// the files, in bytes.
///
/// # Errors
/// [`ModelError::Tensor`] for a missing tensor or one of another shape or type;
/// [`ModelError::Kernel`] when the device is out of memory.
pub(super) fn load<B: Backend>(
    backend: &mut B,
    config: &ModelConfig,
    shard: &Shard,
    files: &ModelFiles,
    progress: Progress<'_>,
) -> Result<(Weights<B>, u64), ModelError> {
    let part = Part { config, shard, files };
    let padding = vec![0; (shard.vocab_width - shard.vocab.len()) * config.hidden_size * 4];
    let embedding = part.vocab("model.embed_tokens.weight", &padding)?;
    let layers = (0..config.num_layers).map(|i| part.layer(i)).collect::<Result<Vec<_>, _>>()?;
    let norm = part.vector("model.norm.weight", config.hidden_size)?;
    let output = match config.tied_embeddings {
        true => None,
        false => Some(part.vocab("lm_head.weight", &padding)?),
    };

    let matrices = layers.iter().flat_map(|layer| {
        [layer.qkv.as_slice(), &layer.o, &layer.gate_up, &layer.down].into_iter().flatten()
    });
    let total = embedding.iter().chain(output.iter().flatten()).chain(matrices).map(bytes).sum();
    progress(0, total);
    let mut loader = Loader { backend, progress, done: 0, total };
    let weights = Weights {
        embedding: loader.matrix(&embedding)?,
        layers: layers.iter().map(|layer| loader.layer(layer)).collect::<Result<_, _>>()?,
        norm: loader.vector(&norm)?,
        output: output.map(|output| loader.matrix(&output)).transpose()?,
    };
    Ok((weights, total))
}

fn bytes(matrix: &HostMatrix<'_>) -> u64 {
    (matrix.rows * matrix.cols * matrix.dtype.bytes()) as u64
}

/// What one rank takes of one layer: checked, not yet read.
struct LayerPart<'a> {
    attention_norm: Vec<f32>,
    qkv: [HostMatrix<'a>; 3],
    qkv_bias: Option<Vec<f32>>,
    q_norm: Option<Vec<f32>>,
    k_norm: Option<Vec<f32>>,
    o: [HostMatrix<'a>; 1],
    o_bias: Option<Vec<f32>>,
    mlp_norm: Vec<f32>,
    gate_up: [HostMatrix<'a>; 2],
    gate_up_bias: Option<Vec<f32>>,
    down: [HostMatrix<'a>; 1],
    down_bias: Option<Vec<f32>>,
}

/// Finds tensors and cuts this rank's part out of them.
struct Part<'a> {
    config: &'a ModelConfig,
    shard: &'a Shard,
    files: &'a ModelFiles,
}

impl<'a> Part<'a> {
    fn layer(&self, index: usize) -> Result<LayerPart<'a>, ModelError> {
        let Self { config, shard, .. } = *self;
        let name = |suffix: &str| format!("model.layers.{index}.{suffix}");
        let (hidden, head_dim) = (config.hidden_size, config.head_dim);
        let scaled = |range: &Range<usize>| range.start * head_dim..range.end * head_dim;
        // All features of q, k, v and the MLP, and the ones of this rank.
        let q = (config.num_heads * head_dim, scaled(&shard.heads));
        let kv = (config.num_kv_heads * head_dim, scaled(&shard.kv_heads));
        let inner = (config.intermediate_size, shard.inner.clone());
        let columns = [("q", &q), ("k", &kv), ("v", &kv)];

        let rows = |suffix: &str, (all, own): &(usize, Range<usize>)| {
            Ok::<_, ModelError>(rows_of(&self.tensor(&name(suffix), &[*all, hidden])?, own))
        };
        let cols = |suffix: &str, (all, own): &(usize, Range<usize>)| {
            Ok::<_, ModelError>(cols_of(&self.tensor(&name(suffix), &[hidden, *all])?, own))
        };
        let biases = |wanted: bool, parts: &[(&str, &(usize, Range<usize>))]| {
            if !wanted {
                return Ok(None);
            }
            let mut joined = Vec::new();
            for (suffix, (all, own)) in parts {
                joined.extend_from_slice(&self.vector(&name(suffix), *all)?[own.clone()]);
            }
            Ok::<_, ModelError>(Some(joined))
        };
        // Checked on every rank, kept on one.
        let row_parallel_bias = |wanted: bool, suffix: &str| {
            let bias = biases(wanted, &[(suffix, &(hidden, 0..hidden))])?;
            Ok::<_, ModelError>(bias.filter(|_| shard.adds_row_parallel_bias()))
        };
        let head_norm =
            |suffix: &str| config.qk_norm.then(|| self.vector(&name(suffix), head_dim)).transpose();

        let [q_suffix, k_suffix, v_suffix] =
            columns.map(|(letter, _)| format!("self_attn.{letter}_proj.bias"));
        Ok(LayerPart {
            attention_norm: self.vector(&name("input_layernorm.weight"), hidden)?,
            qkv: [
                rows("self_attn.q_proj.weight", &q)?,
                rows("self_attn.k_proj.weight", &kv)?,
                rows("self_attn.v_proj.weight", &kv)?,
            ],
            qkv_bias: biases(
                config.qkv_bias,
                &[(&q_suffix, &q), (&k_suffix, &kv), (&v_suffix, &kv)],
            )?,
            q_norm: head_norm("self_attn.q_norm.weight")?,
            k_norm: head_norm("self_attn.k_norm.weight")?,
            o: [cols("self_attn.o_proj.weight", &q)?],
            o_bias: row_parallel_bias(config.output_bias, "self_attn.o_proj.bias")?,
            mlp_norm: self.vector(&name("post_attention_layernorm.weight"), hidden)?,
            gate_up: [rows("mlp.gate_proj.weight", &inner)?, rows("mlp.up_proj.weight", &inner)?],
            gate_up_bias: biases(
                config.mlp_bias,
                &[("mlp.gate_proj.bias", &inner), ("mlp.up_proj.bias", &inner)],
            )?,
            down: [cols("mlp.down_proj.weight", &inner)?],
            down_bias: row_parallel_bias(config.mlp_bias, "mlp.down_proj.bias")?,
        })
    }

    /// This rank's rows of an embedding or output matrix, and zero rows up to the common width.
    fn vocab<'b>(&self, name: &str, padding: &'b [u8]) -> Result<[HostMatrix<'b>; 2], ModelError>
    where
        'a: 'b,
    {
        let Self { config, shard, .. } = *self;
        let tensor = self.tensor(name, &[config.vocab_size, config.hidden_size])?;
        let own = rows_of(&tensor, &shard.vocab);
        let rows = shard.vocab_width - shard.vocab.len();
        Ok([own, HostMatrix { data: padding, rows, ..own }])
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        let tensor = self.tensor(name, &[len])?;
        Ok(widen(tensor.dtype, tensor.data))
    }

    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Checked<'a>, ModelError> {
        let error = |tensor: Option<&Tensor<'_>>, problem| ModelError::Tensor {
            path: tensor.map_or(self.files.dir(), |tensor| tensor.path).to_owned(),
            tensor: name.to_owned(),
            problem,
        };
        let Some(tensor) = self.files.tensor(name) else {
            return Err(error(None, format!("is missing; expected with shape {shape:?}")));
        };
        if tensor.shape != shape {
            let problem = format!("has shape {:?}, expected {shape:?}", tensor.shape);
            return Err(error(Some(&tensor), problem));
        }
        let Some(dtype) = files::dtype(tensor.dtype) else {
            let problem = format!("has type {:?}, expected BF16, F16 or F32", tensor.dtype);
            return Err(error(Some(&tensor), problem));
        };
        let cols = shape.last().copied().unwrap_or(0);
        Ok(Checked { dtype, rows: shape[0], cols, data: tensor.data })
    }
}

/// A tensor of the expected shape and a known type.
struct Checked<'a> {
    dtype: DType,
    rows: usize,
    cols: usize,
    data: &'a [u8],
}

fn rows_of<'a>(tensor: &Checked<'a>, rows: &Range<usize>) -> HostMatrix<'a> {
    let start = rows.start * tensor.cols * tensor.dtype.bytes();
    HostMatrix {
        data: tensor.data.get(start..).unwrap_or_default(),
        dtype: tensor.dtype,
        rows: rows.len(),
        cols: tensor.cols,
        col_start: 0,
        row_stride: tensor.cols,
    }
}

fn cols_of<'a>(tensor: &Checked<'a>, cols: &Range<usize>) -> HostMatrix<'a> {
    HostMatrix {
        data: tensor.data,
        dtype: tensor.dtype,
        rows: tensor.rows,
        cols: cols.len(),
        col_start: cols.start,
        row_stride: tensor.cols,
    }
}

fn widen(dtype: DType, data: &[u8]) -> Vec<f32> {
    let (pairs, _) = data.as_chunks::<2>();
    match dtype {
        DType::Bf16 => pairs.iter().map(|&pair| bf16::from_le_bytes(pair).to_f32()).collect(),
        DType::F16 => pairs.iter().map(|&pair| f16::from_le_bytes(pair).to_f32()).collect(),
        DType::F32 => {
            data.as_chunks::<4>().0.iter().map(|&quad| f32::from_le_bytes(quad)).collect()
        }
    }
}

/// Packs matrices and reports how far it is.
struct Loader<'a, 'p, B> {
    backend: &'a mut B,
    progress: Progress<'p>,
    done: u64,
    total: u64,
}

impl<B: Backend> Loader<'_, '_, B> {
    fn layer(&mut self, part: &LayerPart<'_>) -> Result<LayerWeights<B>, KernelError> {
        Ok(LayerWeights {
            attention_norm: self.vector(&part.attention_norm)?,
            qkv: QkvWeights {
                weight: self.matrix(&part.qkv)?,
                bias: self.optional(part.qkv_bias.as_deref())?,
                q_norm: self.optional(part.q_norm.as_deref())?,
                k_norm: self.optional(part.k_norm.as_deref())?,
            },
            o: self.matrix(&part.o)?,
            o_bias: self.optional(part.o_bias.as_deref())?,
            mlp_norm: self.vector(&part.mlp_norm)?,
            gate_up: self.matrix(&part.gate_up)?,
            gate_up_bias: self.optional(part.gate_up_bias.as_deref())?,
            down: self.matrix(&part.down)?,
            down_bias: self.optional(part.down_bias.as_deref())?,
        })
    }

    fn matrix(&mut self, parts: &[HostMatrix<'_>]) -> Result<B::Matrix, KernelError> {
        let matrix = self.backend.load_matrix(parts)?;
        self.done += parts.iter().map(bytes).sum::<u64>();
        (self.progress)(self.done, self.total);
        Ok(matrix)
    }

    fn vector(&mut self, values: &[f32]) -> Result<B::Vector, KernelError> {
        self.backend.load_vector(values)
    }

    fn optional(&mut self, values: Option<&[f32]>) -> Result<Option<B::Vector>, KernelError> {
        values.map(|values| self.backend.load_vector(values)).transpose()
    }
}
