//! One rank's shard of the weights, packed for its backend.
//!
//! Owns the tensor names of the Llama family, their shapes, and which rectangle of each tensor a
//! rank takes. Everything is checked before anything is loaded, so that a folder with a bad last
//! layer fails at once. Only the file pages of this rank's rectangles are read, with one exception:
//! int8 scales are computed from whole rows, so when weights are quantised to int8, every rank
//! reads row-parallel matrices completely.
use std::ops::Range;

use half::{bf16, f16};
use kernels::backend::{
    Backend, DType, HostMatrix, QkvWeights, RopeTable, Scales, Tensors as Types,
};
use kernels::error::KernelError;
use kernels::weights::{Int4Groups, int4_groups};
use shared::protocol::Quantization;

use super::ModelError;
use super::config::ModelConfig;
use super::experts::ExpertParts;
use super::modules::Module;
use super::quantization::Tensors;
use super::rope::RopeConfig;
use super::safetensors::{TensorView, WeightFiles};
use super::shard::Shard;

/// The weights of one decoder layer.
#[derive(Debug)]
pub struct LayerWeights<M, S, V> {
    /// RMSNorm before attention.
    pub input_norm: V,
    /// q, k, v projections.
    pub qkv: QkvWeights<M, V>,
    /// Index into [`Weights::ropes`] for q and k.
    pub rope: usize,
    /// Attention sinks, `[heads]`: a learned logit per head that joins the softmax (gpt-oss).
    pub sinks: Option<V>,
    /// Output projection, row-parallel: one matrix per part of the sum.
    pub output: Vec<M>,
    /// Its bias; only on rank 0, since partial products are summed.
    pub output_bias: Option<V>,
    /// RMSNorm of the attention's output, before the residual add (Gemma 3).
    pub output_norm: Option<V>,
    /// RMSNorm before the MLP.
    pub post_norm: V,
    /// The MLP, or the experts in its place.
    pub mlp: Mlp<M, S, V>,
    /// RMSNorm of the MLP's output, before the residual add (Gemma 3).
    pub down_norm: Option<V>,
}

/// The feed-forward part of a layer.
#[derive(Debug)]
pub enum Mlp<M, S, V> {
    /// A dense MLP.
    Dense {
        /// The gate's rows, then the up's rows.
        gate_up: M,
        /// The biases of both.
        gate_up_bias: Option<V>,
        /// Down projection, row-parallel: one matrix per part of the sum.
        down: Vec<M>,
        /// Its bias; only on rank 0.
        down_bias: Option<V>,
    },
    /// A mixture of experts.
    Experts {
        /// Router, `[num_experts, hidden]`.
        router: M,
        /// Its bias, the same on all ranks.
        router_bias: Option<V>,
        /// For each expert its gate, then its up.
        gate_up: S,
        /// The biases of both.
        gate_up_bias: Option<V>,
        /// Down projections of all experts, row-parallel: one stack per part of the sum.
        down: Vec<S>,
        /// Their biases; only on rank 0.
        down_bias: Option<V>,
    },
}

/// The weights in a backend's own types.
pub type BackendWeights<B> =
    Weights<<B as Types>::Matrix, <B as Types>::Stack, <B as Types>::Vector>;
type BackendLayer<B> =
    LayerWeights<<B as Types>::Matrix, <B as Types>::Stack, <B as Types>::Vector>;
type BackendMlp<B> = Mlp<<B as Types>::Matrix, <B as Types>::Stack, <B as Types>::Vector>;

/// One rank's weights.
#[derive(Debug)]
pub struct Weights<M, S, V> {
    /// `[vocab_width, hidden]`.
    pub embedding: M,
    /// Factor of its rows.
    pub embedding_scale: f32,
    /// Output head, `[vocab_width, hidden]`; `None` when tied to the embedding.
    pub lm_head: Option<M>,
    /// The layers.
    pub layers: Vec<LayerWeights<M, S, V>>,
    /// RMSNorm before the output head.
    pub final_norm: V,
    /// Rotary tables, each distinct one once; layers refer to them by index.
    pub ropes: Vec<RopeTable<V>>,
    /// Bytes of the shard's matrices as kept: as stored, or quantised.
    pub bytes: u64,
}

/// The files, configuration and shard to load from.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// The model's files.
    pub files: &'a WeightFiles,
    /// The configuration of their model.
    pub config: &'a ModelConfig,
    /// This rank's share.
    pub shard: &'a Shard,
}

/// Checks all tensors, then packs this rank's shard of each. With `quantization`, quantises all
/// matrices of the layers except routers, and the output head; a head tied to the embedding then
/// becomes a separate matrix, since the embedding stays as it is. `max_positions` bounds the rotary
/// tables; `progress` is called with (bytes done, bytes total) of the matrices as stored.
///
/// # Errors
/// [`ModelError`].
pub fn load<B: Backend>(
    backend: &mut B,
    source: &Source<'_>,
    quantization: Quantization,
    max_positions: usize,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<BackendWeights<B>, ModelError> {
    let Source { config, shard, .. } = *source;
    let part = Part(*source);
    let padding = vec![0; (shard.vocab_width - shard.vocab.len()) * config.hidden_size * 4];
    let embedding = part.vocabulary("model.embed_tokens.weight", &padding)?;
    if embedding.iter().any(|it| matches!(it.scales, Some(Scales::Packed(_)))) {
        return Err(ModelError::Tensor {
            file: source.files.folder().to_owned(),
            tensor: "model.embed_tokens".to_owned(),
            message: "is packed: embeddings of 4 bits are not supported".to_owned(),
        });
    }
    let lm_head = match (config.tied, quantization) {
        (true, Quantization::None) => None,
        (true, Quantization::Int8) => Some(embedding.clone()),
        (false, _) => Some(part.vocabulary("lm_head.weight", &padding)?),
    };
    let layers = (0..config.num_layers).map(|i| part.layer(i)).collect::<Result<Vec<_>, _>>()?;
    let final_norm = part.norm("model.norm.weight", config.hidden_size)?;
    let dtype = embedding.first().map_or(DType::F32, |matrix| matrix.dtype);

    let matrices = layers
        .iter()
        .flat_map(|layer| layer.qkv.iter().chain(&layer.output).chain(layer.mlp.matrices()));
    let total = embedding.iter().chain(lm_head.iter().flatten()).chain(matrices).map(bytes).sum();
    progress(0, total);
    let mut loader = Loader { backend, quantization, progress, done: 0, total, held: 0 };
    let kinds = kinds(&config.ropes);
    Ok(Weights {
        embedding: loader.small(&embedding)?,
        embedding_scale: embedding_scale(config.embedding_scale, dtype),
        lm_head: lm_head.map(|matrix| loader.matrix(&matrix)).transpose()?,
        layers: layers.iter().map(|layer| loader.layer(layer)).collect::<Result<_, _>>()?,
        final_norm: loader.vector(&final_norm)?,
        ropes: kinds
            .iter()
            .map(|rope| {
                let (cos, sin) = rope.tables(config.head_dim, max_positions);
                Ok(RopeTable { cos: loader.vector(&cos)?, sin: loader.vector(&sin)? })
            })
            .collect::<Result<_, KernelError>>()?,
        bytes: loader.held,
    })
}

/// Rounds the embedding's factor to the embedding's type, as the models' reference code does.
fn embedding_scale(scale: f64, dtype: DType) -> f32 {
    match dtype {
        DType::Bf16 => bf16::from_f32(scale as f32).to_f32(),
        DType::F16 => f16::from_f32(scale as f32).to_f32(),
        _ => scale as f32,
    }
}

/// Each distinct rotary embedding once, in the order of the first layers that use it.
fn kinds(ropes: &[RopeConfig]) -> Vec<&RopeConfig> {
    let mut kinds: Vec<&RopeConfig> = Vec::new();
    for rope in ropes {
        if !kinds.contains(&rope) {
            kinds.push(rope);
        }
    }
    kinds
}

fn bytes(matrix: &HostMatrix<'_>) -> u64 {
    (matrix.rows * matrix.cols * matrix.dtype.bytes()) as u64
}

/// Bytes of a matrix as kept; `int4` holds the groups of a matrix that stays in 4 bits.
fn held(matrix: &HostMatrix<'_>, kept: Quantization, int4: Option<&Int4Groups>) -> u64 {
    let (rows, cols) = (matrix.rows as u64, matrix.cols as u64);
    match (kept, int4) {
        (Quantization::Int8, _) => rows * (cols + 4),
        (Quantization::None, Some(groups)) => groups.bytes(rows, cols),
        (Quantization::None, None) if matrix.scales.is_some() => rows * cols * 2,
        (Quantization::None, None) => bytes(matrix),
    }
}

/// One rank's share of one layer: checked, not read yet.
struct LayerPart<'a> {
    input_norm: Vec<f32>,
    rope: usize,
    qkv: Vec<HostMatrix<'a>>,
    qkv_bias: Option<Vec<f32>>,
    q_norm: Option<Vec<f32>>,
    k_norm: Option<Vec<f32>>,
    sinks: Option<Vec<f32>>,
    output: Vec<HostMatrix<'a>>,
    output_bias: Option<Vec<f32>>,
    output_norm: Option<Vec<f32>>,
    post_norm: Vec<f32>,
    mlp: MlpPart<'a>,
    down_norm: Option<Vec<f32>>,
}

enum MlpPart<'a> {
    Dense {
        gate_up: Vec<HostMatrix<'a>>,
        gate_up_bias: Option<Vec<f32>>,
        down: Vec<HostMatrix<'a>>,
        down_bias: Option<Vec<f32>>,
    },
    Experts(ExpertParts<'a>),
}

impl<'a> MlpPart<'a> {
    fn matrices(&self) -> Box<dyn Iterator<Item = &HostMatrix<'a>> + '_> {
        match self {
            Self::Dense { gate_up, down, .. } => Box::new(gate_up.iter().chain(down)),
            Self::Experts(parts) => Box::new(parts.matrices()),
        }
    }
}

/// Finds tensors and cuts out this rank's share.
struct Part<'a>(Source<'a>);

impl<'a> Part<'a> {
    fn layer(&self, index: usize) -> Result<LayerPart<'a>, ModelError> {
        let Source { config, shard, .. } = self.0;
        let name = |suffix: &str| format!("model.layers.{index}.{suffix}");
        let (hidden, head_dim) = (config.hidden_size, config.head_dim);
        let scaled = |range: &Range<usize>| range.start * head_dim..range.end * head_dim;
        let rope = &config.ropes[index];
        // This rank's features of q, k, v and the MLP; rotated ones in the order in which backends
        // rotate them.
        let (q, kv) = (scaled(&shard.heads), scaled(&shard.kv_heads));
        let inner = shard.intermediate.clone();
        let qkv = [
            (Module::Q, rope.rows(head_dim, shard.heads.clone())),
            (Module::K, rope.rows(head_dim, shard.kv_heads.clone())),
            (Module::V, vec![kv]),
        ];
        let gate_up = [Module::Gate, Module::Up].map(|module| (module, vec![inner.clone()]));

        let rows = |modules: &[(Module, Vec<Range<usize>>)]| {
            let mut parts = Vec::new();
            for (module, own) in modules {
                let place = module.place(config);
                let tensor = self.weight(&name(&format!("{}.weight", place.name)), place.shape)?;
                parts.extend(own.iter().map(|own| rows_of(&tensor, &module.rows(config, own))));
            }
            Ok::<_, ModelError>(parts)
        };
        let cols = |module: Module, own: &Range<usize>| {
            let place = module.place(config);
            let tensor = self.weight(&name(&format!("{}.weight", place.name)), place.shape)?;
            let width = own.len() / shard.parts;
            let part = |i: usize| own.start + i * width..own.start + (i + 1) * width;
            let parts = (0..shard.parts).map(|i| cols_of(&tensor, &part(i)));
            Ok::<_, ModelError>(parts.collect::<Vec<_>>())
        };
        let biases = |wanted: bool, modules: &[(Module, Vec<Range<usize>>)]| {
            if !wanted {
                return Ok(None);
            }
            let mut joined = Vec::new();
            for (module, own) in modules {
                let place = module.place(config);
                let all = self.vector(&name(&format!("{}.bias", place.name)), place.shape[0])?;
                own.iter().for_each(|own| joined.extend(&all[module.rows(config, own)]));
            }
            Ok::<_, ModelError>(Some(joined))
        };
        // Checked on every rank, kept on rank 0.
        let row_parallel_bias = |wanted: bool, module: Module| {
            let all = 0..hidden;
            let bias = biases(wanted, &[(module, vec![all])])?;
            Ok::<_, ModelError>(bias.filter(|_| shard.rank == 0))
        };
        let head_norm = |suffix: &str| {
            let all = config.qk_norm.then(|| self.norm(&name(suffix), head_dim)).transpose()?;
            let ordered = |all: Vec<f32>| {
                (0..head_dim).map(|i| all[rope.source(head_dim, i)]).collect::<Vec<f32>>()
            };
            Ok::<_, ModelError>(all.map(ordered))
        };
        // In models with `delta_norms`, `post_attention_layernorm` normalises the attention's
        // output.
        let (output_norm, post_norm, down_norm) = match config.delta_norms {
            false => (None, "post_attention_layernorm.weight", None),
            true => (
                Some("post_attention_layernorm.weight"),
                "pre_feedforward_layernorm.weight",
                Some("post_feedforward_layernorm.weight"),
            ),
        };
        let hidden_norm = |suffix: &str| self.norm(&name(suffix), hidden);

        let ropes = kinds(&config.ropes);
        Ok(LayerPart {
            input_norm: hidden_norm("input_layernorm.weight")?,
            rope: ropes.iter().position(|kind| *kind == rope).unwrap_or(0),
            qkv: rows(&qkv)?,
            qkv_bias: biases(config.qkv_bias, &qkv)?,
            q_norm: head_norm("self_attn.q_norm.weight")?.map(|mut norm| {
                norm.iter_mut().for_each(|weight| *weight *= config.query_scale);
                norm
            }),
            k_norm: head_norm("self_attn.k_norm.weight")?,
            sinks: match config.sinks {
                true => {
                    let all = self.vector(&name("self_attn.sinks"), config.num_heads)?;
                    Some(all[shard.heads.clone()].to_vec())
                }
                false => None,
            },
            output: cols(Module::O, &q)?,
            output_bias: row_parallel_bias(config.output_bias, Module::O)?,
            output_norm: output_norm.map(hidden_norm).transpose()?,
            post_norm: hidden_norm(post_norm)?,
            mlp: match config.experts.as_ref().filter(|experts| experts.layers[index]) {
                Some(experts) => {
                    let layer = format!("model.layers.{index}");
                    let found = ExpertParts::find(self.tensors(), experts, &layer, hidden, shard);
                    MlpPart::Experts(found?)
                }
                None => MlpPart::Dense {
                    gate_up: rows(&gate_up)?,
                    gate_up_bias: biases(config.mlp_bias, &gate_up)?,
                    down: cols(Module::Down, &inner)?,
                    down_bias: row_parallel_bias(config.mlp_bias, Module::Down)?,
                },
            },
            down_norm: down_norm.map(hidden_norm).transpose()?,
        })
    }

    /// This rank's rows of a `[vocab, hidden]` tensor, padded with zero rows to `vocab_width`.
    fn vocabulary<'b>(
        &self,
        name: &str,
        padding: &'b [u8],
    ) -> Result<Vec<HostMatrix<'b>>, ModelError>
    where
        'a: 'b,
    {
        let Source { config, shard, .. } = self.0;
        let tensor = self.weight(name, [config.vocab_size, config.hidden_size])?;
        let own = rows_of(&tensor, &shard.vocab);
        let rows = shard.vocab_width - shard.vocab.len();
        let behind = match own.scales {
            // Rows after the last one of a packed matrix read as zeros.
            Some(Scales::Packed(_)) => {
                tensor.cut(config.vocab_size..config.vocab_size + rows, 0..own.cols)
            }
            _ => HostMatrix { data: padding, rows, scales: None, ..own },
        };
        let mut parts = vec![own, behind];
        parts.retain(|part| part.rows > 0);
        Ok(parts)
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        self.0.files.numbers(name, &[len])
    }

    /// The weight of an RMSNorm, with `norm_offset` added.
    fn norm(&self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        let mut values = self.vector(name, len)?;
        values.iter_mut().for_each(|weight| *weight += self.0.config.norm_offset);
        Ok(values)
    }

    fn weight(&self, name: &str, shape: [usize; 2]) -> Result<TensorView<'a>, ModelError> {
        self.tensors().weight(name, &shape)
    }

    fn tensors(&self) -> Tensors<'a> {
        Tensors { files: self.0.files, quantised: self.0.config.quantised }
    }
}

fn rows_of<'a>(tensor: &TensorView<'a>, rows: &Range<usize>) -> HostMatrix<'a> {
    tensor.cut(rows.clone(), 0..tensor.size().1)
}

fn cols_of<'a>(tensor: &TensorView<'a>, cols: &Range<usize>) -> HostMatrix<'a> {
    tensor.cut(0..tensor.size().0, cols.clone())
}

/// Packs matrices and reports progress.
struct Loader<'a, 'p, B> {
    backend: &'a mut B,
    quantization: Quantization,
    progress: &'p mut dyn FnMut(u64, u64),
    done: u64,
    total: u64,
    /// Bytes kept so far.
    held: u64,
}

impl<B: Backend> Loader<'_, '_, B> {
    fn layer(&mut self, part: &LayerPart<'_>) -> Result<BackendLayer<B>, KernelError> {
        Ok(LayerWeights {
            input_norm: self.vector(&part.input_norm)?,
            rope: part.rope,
            qkv: QkvWeights {
                weight: self.matrix(&part.qkv)?,
                bias: self.optional(part.qkv_bias.as_deref())?,
                q_norm: self.optional(part.q_norm.as_deref())?,
                k_norm: self.optional(part.k_norm.as_deref())?,
            },
            sinks: self.optional(part.sinks.as_deref())?,
            output: self.parts(&part.output)?,
            output_bias: self.optional(part.output_bias.as_deref())?,
            output_norm: self.optional(part.output_norm.as_deref())?,
            post_norm: self.vector(&part.post_norm)?,
            mlp: self.mlp(&part.mlp)?,
            down_norm: self.optional(part.down_norm.as_deref())?,
        })
    }

    fn mlp(&mut self, part: &MlpPart<'_>) -> Result<BackendMlp<B>, KernelError> {
        Ok(match part {
            MlpPart::Dense { gate_up, gate_up_bias, down, down_bias } => Mlp::Dense {
                gate_up: self.matrix(gate_up)?,
                gate_up_bias: self.optional(gate_up_bias.as_deref())?,
                down: self.parts(down)?,
                down_bias: self.optional(down_bias.as_deref())?,
            },
            MlpPart::Experts(ExpertParts { router, gate_up, down, biases }) => Mlp::Experts {
                router: self.small(std::slice::from_ref(router))?,
                router_bias: self.optional(biases.router.as_deref())?,
                gate_up: self.stack(gate_up)?,
                gate_up_bias: self.optional(biases.gate_up.as_deref())?,
                down: down.iter().map(|part| self.stack(part)).collect::<Result<_, _>>()?,
                down_bias: self.optional(biases.down.as_deref())?,
            },
        })
    }

    fn stack(&mut self, matrices: &[HostMatrix<'_>]) -> Result<B::Stack, KernelError> {
        let stack = match self.quantization {
            Quantization::None => self.backend.load_stack(matrices),
            Quantization::Int8 => self.backend.load_int8_stack(matrices),
        }?;
        self.advance(matrices, self.quantization, true);
        Ok(stack)
    }

    /// Packs a matrix that is quantised where `quantization` says so.
    fn matrix(&mut self, parts: &[HostMatrix<'_>]) -> Result<B::Matrix, KernelError> {
        let matrix = match self.quantization {
            Quantization::None => self.backend.load_matrix(parts),
            Quantization::Int8 => self.backend.load_int8_matrix(parts),
        }?;
        self.advance(parts, self.quantization, false);
        Ok(matrix)
    }

    /// Packs a matrix that is never quantised: an embedding, a router.
    fn small(&mut self, parts: &[HostMatrix<'_>]) -> Result<B::Matrix, KernelError> {
        let matrix = self.backend.load_matrix(parts)?;
        self.advance(parts, Quantization::None, false);
        Ok(matrix)
    }

    fn advance(&mut self, loaded: &[HostMatrix<'_>], kept: Quantization, is_stack: bool) {
        self.done += loaded.iter().map(bytes).sum::<u64>();
        let int4 = int4_groups(loaded).filter(|groups| self.backend.keeps_int4(groups, is_stack));
        self.held += loaded.iter().map(|matrix| held(matrix, kept, int4.as_ref())).sum::<u64>();
        (self.progress)(self.done, self.total);
    }

    /// Packs each matrix separately.
    fn parts(&mut self, parts: &[HostMatrix<'_>]) -> Result<Vec<B::Matrix>, KernelError> {
        parts.iter().map(|part| self.matrix(std::slice::from_ref(part))).collect()
    }

    fn vector(&mut self, values: &[f32]) -> Result<B::Vector, KernelError> {
        self.backend.load_vector(values)
    }

    fn optional(&mut self, values: Option<&[f32]>) -> Result<Option<B::Vector>, KernelError> {
        values.map(|values| self.backend.load_vector(values)).transpose()
    }
}
