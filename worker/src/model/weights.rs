//! One rank's shard of the weights, packed for its backend.
//!
//! - `part`: which rectangle of each tensor a rank takes
//! - `latent`: those of multi-head latent attention; `delta`: of linear attention, and gates
//! - `loader`: packs what was taken
//! - `classes`: the matrix of a model that sorts texts into classes
//!
//! Defines the tensor names of the Llama family, their shapes, and which rectangle of each tensor a
//! rank takes. Everything is checked before anything is loaded, so that a folder with a bad last
//! layer fails at once. Only the file pages of this rank's rectangles are read, with one exception:
//! int8 scales are computed from whole rows, so when quantising to int8, every rank reads
//! row-parallel matrices completely.
use half::{bf16, f16};
use kernels::backend::{
    Backend, DType, DeltaWeights, HostMatrix, QkvWeights, RopeTable, Tensors as Types,
};
use kernels::error::KernelError;
use kernels::weights::Compact;
use shared::protocol::Quantization;

pub use self::classes::ClassHead;
use self::loader::{Loader, bytes, kept};
use self::part::{Kind, Part};
use super::ModelError;
use super::config::ModelConfig;
use super::rope;
use super::safetensors::WeightFiles;
use super::shard::Shard;
use super::size::Keeps;

mod classes;
mod delta;
mod latent;
mod loader;
mod part;

/// The weights of one decoder layer.
#[derive(Debug)]
pub struct LayerWeights<M, S, V> {
    /// Norm before attention, or before attention and MLP.
    pub input_norm: Option<Norm<V>>,
    /// What makes q, k and v.
    pub projection: Projection<M, S, V>,
    /// Norm of q and of k over all heads, for this rank's columns of both, in place of norms in
    /// `qkv` (OLMo 2).
    pub qk_norm: Option<V>,
    /// Index into [`Weights::ropes`] for q and k.
    pub rope: usize,
    /// Attention sinks, `[heads]`: a learned logit per head that joins the softmax (gpt-oss).
    pub sinks: Option<V>,
    /// Makes the gates of attention's result, `[heads * head_dim, hidden]`, if it has them.
    pub gate: Option<M>,
    /// Output projection, row-parallel: one matrix per part of the sum.
    pub output: Vec<M>,
    /// Its bias; only on rank 0, since partial products are summed.
    pub output_bias: Option<V>,
    /// RMSNorm of the attention's output, before the residual add (Gemma, OLMo 2).
    pub output_norm: Option<V>,
    /// Norm before the MLP.
    pub post_norm: Option<Norm<V>>,
    /// The MLP, or the experts in its place.
    pub mlp: Mlp<M, S, V>,
    /// RMSNorm of the MLP's output, before the residual add (Gemma, OLMo 2).
    pub down_norm: Option<V>,
}

/// What makes q, k and v.
#[derive(Debug)]
pub enum Projection<M, S, V> {
    /// A product for all of them.
    Qkv(QkvWeights<M, V>),
    /// Multi-head latent attention.
    Latent(LatentWeights<M, S, V>),
    /// Linear attention.
    Delta(DeltaProjection<M, V>),
}

/// Weights of linear attention.
#[derive(Debug)]
pub struct DeltaProjection<M, V> {
    /// Makes q, k, v and z, `[channels + value_width, hidden]`.
    pub qkvz: M,
    /// Makes b, if there is one, and a, `[gates_width, hidden]`. Never quantised.
    pub ba: M,
    /// Norm over all heads, for this rank's columns (Mamba 2).
    pub norm: Option<V>,
    /// The others.
    pub own: DeltaWeights<V>,
}

/// Weights of multi-head latent attention.
#[derive(Debug)]
pub struct LatentWeights<M, S, V> {
    /// If there are two projections that make q: the first, and the norm of what it makes; the same
    /// on all ranks.
    pub q_down: Option<(M, V)>,
    /// The only or second projection that makes q, `[heads * (plain + rotated), in]`.
    pub q: M,
    /// Makes latents and rotated parts of K, `[rank + rotated, hidden]`; the same on all ranks.
    pub kv: M,
    /// RMSNorm of latents.
    pub kv_norm: V,
    /// What would make K of latents, transposed: `[rank, plain]` for each head. Never quantised.
    pub keys: S,
    /// What makes V of latents: `[value, rank]` for each head. Never quantised.
    pub values: S,
}

/// A norm of the residual stream.
#[derive(Debug)]
pub enum Norm<V> {
    /// RMSNorm, with this weight.
    Rms(V),
    /// LayerNorm.
    Layer {
        /// Factors.
        weight: V,
        /// Added at the end.
        bias: V,
    },
}

/// The feed-forward part of a layer.
#[derive(Debug)]
pub enum Mlp<M, S, V> {
    /// A dense MLP.
    Dense {
        /// The gate's rows, then the up's rows; without a gate, only the latter.
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
        /// Router, `[num_logits, hidden]`.
        router: M,
        /// Its bias, or that of its choices; the same on all ranks.
        router_bias: Option<V>,
        /// Gates and ups of all experts, each expert's gate followed by its up.
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
pub(super) type BackendLatent<B> =
    LatentWeights<<B as Types>::Matrix, <B as Types>::Stack, <B as Types>::Vector>;
pub(super) type BackendDelta<B> = DeltaProjection<<B as Types>::Matrix, <B as Types>::Vector>;
pub(super) type BackendLayer<B> =
    LayerWeights<<B as Types>::Matrix, <B as Types>::Stack, <B as Types>::Vector>;
pub(super) type BackendMlp<B> =
    Mlp<<B as Types>::Matrix, <B as Types>::Stack, <B as Types>::Vector>;

/// One rank's weights.
#[derive(Debug)]
pub struct Weights<M, S, V> {
    /// Embedding, `[vocab_width, hidden]`.
    pub embedding: M,
    /// Factor of its rows.
    pub embedding_scale: f32,
    /// Output head, `[vocab_width, hidden]`; `None` if tied to the embedding, or not needed.
    pub lm_head: Option<M>,
    /// Whether it has a head, be it the embedding. Without one its logits mean nothing.
    pub has_head: bool,
    /// The matrix of classes, if the model has them.
    pub class_head: Option<ClassHead>,
    /// The layers.
    pub layers: Vec<LayerWeights<M, S, V>>,
    /// Norm before the output head.
    pub final_norm: Norm<V>,
    /// The distinct rotary tables; layers refer to them by index.
    pub ropes: Vec<RopeTable<V>>,
    /// Size of the shard's matrices as kept (as stored, or quantised), in bytes.
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
/// matrices of the layers except routers, those that make gates of linear attention, and those that
/// make K and V of latents, and the output head; a head tied to the embedding then becomes a
/// separate matrix, since the embedding is not quantised. `max_positions` bounds the rotary tables;
/// `progress` is called with (bytes done, bytes total) of the matrices as stored.
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
    let Source { config, shard, files } = *source;
    let part = Part(*source);
    let padding = padding(config, shard);
    let embedding = part.embedding(&padding)?;
    let lm_head = output_head(&part, &embedding, quantization, &padding)?;
    let class_head = ClassHead::read(source)?;
    let layers = (0..config.num_layers).map(|i| part.layer(i)).collect::<Result<Vec<_>, _>>()?;
    let mut final_norm = part.stream_norm("model.norm")?;
    final_norm.divide(config.logits_scaling);
    let dtype = embedding.first().map_or(DType::F32, |matrix| matrix.dtype);

    if quantization == Quantization::None {
        warn_of_mixed_experts(&layers, &|form| backend.keeps(form, true));
    }
    let loads = layers.iter().flat_map(part::LayerPart::loads);
    let matrices = loads.flat_map(|(matrices, _)| matrices);
    let total = embedding.iter().chain(lm_head.iter().flatten()).chain(matrices).map(bytes).sum();
    progress(0, total);
    let mut loader = Loader { backend, quantization, progress, done: 0, total, held: 0 };
    let ropes = rope::distinct(&config.ropes);
    Ok(Weights {
        embedding: loader.small(&embedding)?,
        embedding_scale: match config.rounds_embedding_scale {
            true => rounded(config.embedding_scale, dtype),
            false => config.embedding_scale as f32,
        },
        lm_head: lm_head.map(|matrix| loader.matrix(&matrix)).transpose()?,
        has_head: !(config.has_own_head() && files.lacks_head()),
        layers: layers.iter().map(|layer| loader.layer(layer)).collect::<Result<_, _>>()?,
        final_norm: loader.norm(&final_norm)?,
        ropes: ropes
            .iter()
            .map(|rope| {
                let (mut cos, mut sin) = rope.tables(config.rope_dim(), max_positions);
                // Without a norm on q to carry it, the scores' factor is split between q and k.
                // That of latents is an argument.
                let carries = config.qk_norm || config.latent.is_some();
                if !carries && config.query_scale != 1.0 {
                    let scale = config.query_scale.sqrt();
                    cos.iter_mut().chain(&mut sin).for_each(|value| *value *= scale);
                }
                let q_scale = rope.q_scale(max_positions);
                Ok(RopeTable {
                    cos: loader.vector(&cos)?,
                    sin: loader.vector(&sin)?,
                    q_scale: q_scale.map(|scale| loader.vector(&scale)).transpose()?,
                })
            })
            .collect::<Result<_, KernelError>>()?,
        bytes: loader.held + class_head.as_ref().map_or(0, ClassHead::bytes),
        class_head,
    })
}

/// Checks the tensors of the first and the last layer, of the last one with another kind of
/// attention than that, and those outside layers, in the same way
/// as [`load`].
///
/// # Errors
/// [`ModelError`].
pub(crate) fn check(source: &Source<'_>) -> Result<(), ModelError> {
    let Source { config, shard, files } = *source;
    let (part, padding) = (Part(*source), padding(config, shard));
    part.embedding(&padding)?;
    if config.has_own_head() && !files.lacks_head() {
        part.vocabulary("lm_head.weight", &padding)?;
    }
    ClassHead::read(source)?;
    let last = config.num_layers.saturating_sub(1);
    // And the last of the other kind of attention.
    let kind = config.is_linear(last);
    let other = (0..last).rev().find(|layer| config.is_linear(*layer) != kind);
    for layer in [Some(0), other, Some(last)].into_iter().flatten() {
        part.layer(layer)?;
    }
    part.stream_norm("model.norm").map(drop)
}

/// What a device allocates for the layers, the embedding and the output head of a shard: the size
/// of each allocation, in bytes. For scales of groups of inputs, and the weights that have them, an
/// estimate: devices keep them in forms of their own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeptSizes {
    /// Of the weights of each matrix, or of all matrices of a stack, and of their scales.
    pub matrices: Vec<u64>,
    /// Of the vectors: norms and biases.
    pub vectors: Vec<u64>,
}

/// Size of a shard's matrices on a device that keeps them in the forms that `keeps` says, and
/// others in bf16 unless `quantization` changes them; in bytes. Which matrices have which form is
/// read from the headers: configurations do not list all exceptions. Reads no matrix.
///
/// # Errors
/// [`ModelError`].
pub fn kept_bytes(
    source: &Source<'_>,
    quantization: Quantization,
    keeps: Keeps<'_>,
) -> Result<u64, ModelError> {
    Ok(kept_sizes(source, quantization, keeps)?.matrices.iter().sum())
}

/// As [`kept_bytes`], allocation by allocation, and with the vectors.
///
/// # Errors
/// [`ModelError`].
pub fn kept_sizes(
    source: &Source<'_>,
    quantization: Quantization,
    keeps: Keeps<'_>,
) -> Result<KeptSizes, ModelError> {
    let Source { config, shard, .. } = *source;
    let (part, padding) = (Part(*source), padding(config, shard));
    let kept = |matrices: &[HostMatrix<'_>], kind| kept(matrices, kind, quantization, keeps);
    let embedding = part.embedding(&padding)?;
    let head = output_head(&part, &embedding, quantization, &padding)?;
    let mut sizes = KeptSizes::default();
    sizes.matrices.extend(head.iter().flat_map(|matrix| kept(matrix, Kind::Matrix)));
    sizes.matrices.extend(kept(&embedding, Kind::Small));
    for index in 0..config.num_layers {
        let layer = part.layer(index)?;
        let loads = layer.loads();
        sizes.matrices.extend(loads.iter().flat_map(|(matrices, kind)| kept(matrices, *kind)));
        let vectors = layer.vectors();
        sizes.vectors.extend(vectors.iter().map(|vector| size_of_val::<[f32]>(*vector) as u64));
    }
    sizes.matrices.retain(|bytes| *bytes > 0);
    Ok(sizes)
}

/// The output head, if there is a matrix beside the embedding.
fn output_head<'a>(
    part: &Part<'a>,
    embedding: &[HostMatrix<'a>],
    quantization: Quantization,
    padding: &'a [u8],
) -> Result<Option<Vec<HostMatrix<'a>>>, ModelError> {
    let Source { config, files, .. } = part.0;
    Ok(match (config.has_own_head(), quantization) {
        (true, _) if files.lacks_head() => None,
        (true, _) => Some(part.vocabulary("lm_head.weight", padding)?),
        (false, Quantization::Int8) if config.classifier.is_none() => Some(embedding.to_vec()),
        (false, _) => None,
    })
}

/// Zeros for the rows of the vocabulary that no token has.
fn padding(config: &ModelConfig, shard: &Shard) -> Vec<u8> {
    vec![0; (shard.vocab_width - shard.vocab.len()) * config.hidden_size * 4]
}

/// Says in how many layers experts become larger than in the files: all matrices of a stack have
/// one form, so quantised ones, which `keeps` would leave as they are, become bf16 if others of the
/// stack (often a shared expert's) are not quantised, or have other groups.
fn warn_of_mixed_experts(layers: &[part::LayerPart<'_>], keeps: &dyn Fn(&Compact) -> bool) {
    let is_mixed = |layer: &&part::LayerPart<'_>| layer.mlp.has_mixed_experts(keeps);
    let count = layers.iter().filter(is_mixed).count();
    if count > 0 {
        tracing::warn!(
            layers = count,
            "in some layers the checkpoint has experts of 4 or 8 bits beside experts that are not \
             quantised, or whose weights share scales in another way: the experts' projections of \
             that kind (gate and up, or down) become bf16 in these layers, four times or twice as \
             large"
        );
    }
}

/// Rounds the embedding's factor to the embedding's type, as the models' reference code does.
fn rounded(scale: f64, dtype: DType) -> f32 {
    match dtype {
        DType::Bf16 => bf16::from_f32(scale as f32).to_f32(),
        DType::F16 => f16::from_f32(scale as f32).to_f32(),
        _ => scale as f32,
    }
}
