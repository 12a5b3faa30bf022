//! The forward pass of one rank, written once over `kernels::Backend`.
//!
//! Activations live in buffers allocated once for the largest step; a step allocates nothing.
//!
//! - `pass`: one batch through the layers
use kernels::backend::{
    AttentionShape, Batch, KvShape, NOT_ASSIGNED, QkNorm, Routing, StatesShape,
};
use kernels::{Backend, KernelError};
use shared::protocol::{EngineConfig, Quantization};

use self::pass::{LayerIndex, Pass, Pending};
use super::config::{Latent, ModelConfig};
use super::lora::Adapters;
use super::shard::Shard;
use super::size;
use super::weights::{BackendWeights, ClassHead};

mod pass;

/// One rank's model on its backend.
pub struct Decoder<B: Backend> {
    weights: BackendWeights<B>,
    config: ModelConfig,
    shard: Shard,
    /// Attention shape of every layer, except for its window.
    attention: AttentionShape,
    /// The distinct windows of the layers.
    windows: Vec<Option<u32>>,
    /// The place of each layer among those of its kind ([`ModelConfig::place`]).
    places: Vec<usize>,
    buffers: Buffers<B>,
    adapters: Option<Adapters<B>>,
    /// Whether the last logits were gathered from all ranks.
    gathered: bool,
}

struct Buffers<B: Backend> {
    /// The residual stream, `[tokens, hidden]`.
    residual: B::Buffer,
    /// Its normalised form (or, without a norm, itself), `[tokens, hidden]`.
    normed: B::Buffer,
    /// What attention or MLP adds to the residual stream, `[tokens, hidden]`; the buffers after the
    /// first hold partial sums, the last one the MLP's part if both are added up together.
    deltas: Vec<B::Buffer>,
    /// Queries, `[tokens, heads * head_dim]`.
    q: B::Buffer,
    /// What q and k need to be normalised over all heads, if they are.
    qk_norm: Option<QkNormBuffers<B>>,
    /// What multi-head latent attention needs, if the model has it.
    latent: Option<LatentBuffers<B>>,
    /// What linear attention needs, if some layers have it, and the states of sequences.
    delta: Option<DeltaBuffers<B>>,
    /// Gates of attention's result, as projected, `[tokens, heads * head_dim]`; if it has them.
    gate: Option<B::Buffer>,
    /// Output of attention, `[tokens, heads * head_dim]`; with latents, `[tokens, heads * rank]`.
    attended: B::Buffer,
    /// Inner activations of the MLP, `[tokens, intermediate]`; if some layer has an MLP.
    inner: Option<B::Buffer>,
    /// Buffers of experts, if some layer has experts.
    experts: Option<ExpertBuffers<B>>,
    /// This rank's logits, `[rows, vocab_width]`.
    logits_local: B::Buffer,
    /// All ranks' logits, `[rows, degree * vocab_width]`, if there are several ranks.
    logits: Option<B::Buffer>,
}

struct QkNormBuffers<B: Backend> {
    norm: QkNorm,
    /// q, k and v as projected, `[tokens, (heads + 2 * kv_heads) * head_dim]`.
    projected: B::Buffer,
    /// Sums of the squares of q, and of k, `[tokens, 2]`.
    squares: B::Buffer,
}

impl<B: Backend> QkNormBuffers<B> {
    fn new(backend: &mut B, rows_max: usize, norm: QkNorm) -> Result<Self, KernelError> {
        let [q, k] = norm.columns;
        let projected = backend.new_buffer(rows_max, q + 2 * k)?;
        Ok(Self { norm, projected, squares: backend.new_buffer(rows_max, 2)? })
    }
}

struct LatentBuffers<B: Backend> {
    /// What the first of two projections makes, and its norm, `[tokens, q_rank]`.
    down: Option<[B::Buffer; 2]>,
    /// q as projected, `[tokens, heads * (plain + rotated)]`.
    q: B::Buffer,
    /// Latents and rotated parts of K, as projected, `[tokens, rank + rotated]`.
    kv: B::Buffer,
    /// The parts of q without positions, `[tokens, heads * plain]`.
    plain: B::Buffer,
    /// What heads make of attention's output, `[tokens, heads * value]`.
    mixed: B::Buffer,
}

impl<B: Backend> LatentBuffers<B> {
    fn new(
        backend: &mut B,
        rows_max: usize,
        heads: usize,
        sizes: &Latent,
    ) -> Result<Self, KernelError> {
        let Latent { q_rank, plain, rotated, value, .. } = *sizes;
        Ok(Self {
            down: match q_rank {
                None => None,
                Some(rank) => Some([
                    backend.new_buffer(rows_max, rank)?,
                    backend.new_input_buffer(rows_max, rank)?,
                ]),
            },
            q: backend.new_buffer(rows_max, heads * (plain + rotated))?,
            kv: backend.new_buffer(rows_max, sizes.width())?,
            plain: backend.new_input_buffer(rows_max, heads * plain)?,
            mixed: backend.new_input_buffer(rows_max, heads * value)?,
        })
    }
}

struct DeltaBuffers<B: Backend> {
    /// q, k, v and z as projected, `[tokens, channels + value_width]`.
    qkvz: B::Buffer,
    /// b, if there is one, and a, `[tokens, gates_width]`.
    ba: B::Buffer,
    /// What the norm over all heads needs, if there is one.
    norm: Option<DeltaNormBuffers<B>>,
    /// Output of linear attention, `[tokens, value_width]`.
    attended: B::Buffer,
    states: B::States,
}

struct DeltaNormBuffers<B: Backend> {
    norm: QkNorm,
    /// What is normalised, `[tokens, value_width]`.
    gated: B::Buffer,
    /// Sums of its squares, and zeros, `[tokens, 2]`.
    squares: B::Buffer,
}

impl<B: Backend> DeltaBuffers<B> {
    fn new(
        backend: &mut B,
        rows_max: usize,
        shape: StatesShape,
        norm: Option<QkNorm>,
    ) -> Result<Self, KernelError> {
        let (channels, values) = (shape.layer.channels(), shape.layer.value_width());
        Ok(Self {
            qkvz: backend.new_buffer(rows_max, channels + values)?,
            ba: backend.new_buffer(rows_max, shape.layer.gates_width())?,
            norm: match norm {
                None => None,
                Some(norm) => Some(DeltaNormBuffers {
                    norm,
                    gated: backend.new_buffer(rows_max, values)?,
                    squares: backend.new_buffer(rows_max, 2)?,
                }),
            },
            attended: backend.new_input_buffer(rows_max, values)?,
            states: backend.new_states(shape)?,
        })
    }
}

struct ExpertBuffers<B: Backend> {
    /// Which experts each row is routed to.
    routes: B::Routes,
    /// The experts' inner activations, `[tokens * top_k, intermediate]`.
    inner: B::Buffer,
}

impl<B: Backend> ExpertBuffers<B> {
    fn new(
        backend: &mut B,
        rows_max: usize,
        routing: Routing,
        width: usize,
    ) -> Result<Self, KernelError> {
        let routes = backend.new_routes(rows_max, routing)?;
        let inner = backend.new_input_buffer(rows_max * routing.top_k, width)?;
        Ok(Self { routes, inner })
    }
}

impl<B: Backend> std::fmt::Debug for Decoder<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Decoder")
            .field("config", &self.config)
            .field("shard", &self.shard)
            .finish_non_exhaustive()
    }
}

impl<B: Backend> Decoder<B> {
    /// Creates a decoder with room for the largest step of these sizes and, with linear attention,
    /// for the states of sequences: those that run, then those that are kept.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    pub fn new(
        backend: &mut B,
        config: ModelConfig,
        shard: Shard,
        weights: BackendWeights<B>,
        sizes: &EngineConfig,
    ) -> Result<Self, KernelError> {
        let tokens_max = sizes.max_num_batched_tokens as usize;
        let rows_max = sizes.max_num_seqs as usize;
        let hidden = config.hidden_size;
        let heads = shard.heads.len();
        let per_head = config.latent.map_or(config.head_dim, |latent| latent.rank);
        let everywhere = shard.rank == 0 || backend.may_sample_everywhere();
        let all_logits = if everywhere { rows_max } else { 1 };
        let buffers = Buffers {
            residual: backend.new_buffer(tokens_max, hidden)?,
            normed: backend.new_input_buffer(tokens_max, hidden)?,
            deltas: (0..=shard.parts.ilog2() + u32::from(config.is_parallel))
                .map(|_| backend.new_buffer(tokens_max, hidden))
                .collect::<Result<_, _>>()?,
            q: backend.new_input_buffer(tokens_max, heads * config.head_dim)?,
            qk_norm: match shard.qk_norm(&config) {
                None => None,
                Some(norm) => Some(QkNormBuffers::new(backend, tokens_max, norm)?),
            },
            latent: match &config.latent {
                None => None,
                Some(sizes) => Some(LatentBuffers::new(backend, tokens_max, heads, sizes)?),
            },
            delta: match shard.states(&config, size::num_states(sizes)) {
                None => None,
                Some(shape) => {
                    let norm = shard.delta_norm(&config);
                    Some(DeltaBuffers::new(backend, tokens_max, shape, norm)?)
                }
            },
            gate: match config.gates_attention {
                false => None,
                true => Some(backend.new_buffer(tokens_max, heads * config.head_dim)?),
            },
            attended: backend.new_input_buffer(tokens_max, heads * per_head)?,
            inner: match shard.intermediate.len() {
                0 => None,
                width => Some(backend.new_input_buffer(tokens_max, width)?),
            },
            experts: match &config.experts {
                None => None,
                Some(experts) => {
                    let width = shard.expert.len();
                    Some(ExpertBuffers::new(backend, tokens_max, experts.routing, width)?)
                }
            },
            logits_local: backend.new_buffer(rows_max, shard.vocab_width)?,
            logits: match shard.degree {
                1 => None,
                degree => Some(backend.new_buffer(all_logits, shard.vocab_width * degree)?),
            },
        };
        let (attention, windows) = (shard.attention(&config), config.windows());
        let places = (0..config.num_layers).map(|layer| config.place(layer)).collect();
        Ok(Self {
            weights,
            config,
            shard,
            attention,
            windows,
            places,
            buffers,
            adapters: None,
            gathered: false,
        })
    }

    /// The same with the same weights and room for other steps.
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn resized(self, backend: &mut B, sizes: &EngineConfig) -> Result<Self, KernelError> {
        let Self { weights, config, shard, buffers, adapters, .. } = self;
        // The old buffers go first: there may not be enough memory for both.
        drop(buffers);
        let tokens = sizes.max_num_batched_tokens as usize;
        let adapters = adapters.map(|it| it.resized(backend, tokens)).transpose()?;
        let resized = Self::new(backend, config, shard, weights, sizes)?;
        Ok(resized.with_adapters(adapters))
    }

    /// Adds LoRA adapters, if there are any.
    #[must_use]
    pub fn with_adapters(self, adapters: Option<Adapters<B>>) -> Self {
        Self { adapters, ..self }
    }

    /// Returns the number of adapters that there is room for.
    #[must_use]
    pub fn num_adapters(&self) -> u32 {
        self.adapters.as_ref().map_or(0, Adapters::count)
    }

    /// Returns what stands for an adapter in the rows of [`Decoder::forward`]; `None` if it is not
    /// here.
    #[must_use]
    pub fn adapter_row(&self, number: u32) -> Option<u32> {
        if number == 0 {
            return Some(NOT_ASSIGNED);
        }
        self.adapters.as_ref()?.row_of(number)
    }

    /// Returns the adapters, if there is room for any, and what their matrices depend on.
    pub fn adapting(&mut self) -> Option<(&mut Adapters<B>, &ModelConfig, &Shard)> {
        let Self { adapters, config, shard, .. } = self;
        adapters.as_mut().map(|adapters| (adapters, &*config, &*shard))
    }

    /// Returns the model's configuration.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the model's configuration, and this rank's share of it.
    #[must_use]
    pub fn model(&self) -> (&ModelConfig, &Shard) {
        (&self.config, &self.shard)
    }

    /// Returns the matrix of classes, if the model has them.
    #[must_use]
    pub fn class_head(&self) -> Option<&ClassHead> {
        self.weights.class_head.as_ref()
    }

    /// Returns the attention shape of every layer, except for its window.
    #[must_use]
    pub fn attention(&self) -> &AttentionShape {
        &self.attention
    }

    /// Returns the distinct windows of the layers.
    #[must_use]
    pub fn windows(&self) -> &[Option<u32>] {
        &self.windows
    }

    /// Returns the size of the weights, in bytes.
    #[must_use]
    pub fn weight_bytes(&self) -> u64 {
        self.weights.bytes + self.adapters.as_ref().map_or(0, Adapters::bytes)
    }

    /// Returns the bytes of the activations of the largest step, and of the KV cache of one
    /// sequence of maximum length. `widens` tells whether steps of that size convert quantised
    /// weights to bf16 first.
    #[must_use]
    pub fn step_bytes(
        &self,
        sizes: &EngineConfig,
        quantization: Quantization,
        widens: bool,
    ) -> (u64, u64) {
        let Self { config, shard, adapters, .. } = self;
        let is_quantised = quantization == Quantization::Int8 || config.quantised.is_some();
        let tokens = sizes.max_num_batched_tokens as usize;
        let room = adapters.as_ref().map_or(0, |adapters| adapters.room_bytes(tokens));
        let activations = size::activation_bytes(config, shard, widens && is_quantised, sizes);
        (activations + room, size::sequence_bytes(config, shard, sizes))
    }

    /// Returns the shape of a KV cache of `num_blocks` blocks for this rank.
    #[must_use]
    pub fn kv_shape(&self, sizes: &EngineConfig, num_blocks: u32) -> KvShape {
        self.shard.kv_shape(&self.config, sizes, num_blocks)
    }

    /// Computes the batch's tokens: K and V go to the cache, the last layer's output stays in the
    /// decoder for [`Decoder::logits`]. `rows` holds the adapter of each row
    /// ([`Decoder::adapter_row`]), and is empty if no row has one. `states` holds the state of each
    /// sequence; it is read if the model has linear attention. Every rank must call it with the
    /// same batch.
    ///
    /// # Errors
    /// [`KernelError`]; the cache and the states are undefined then.
    pub fn forward(
        &mut self,
        backend: &mut B,
        cache: &mut B::KvCache,
        ids: &[u32],
        batch: &Batch<'_>,
        states: &[u32],
        rows: &[u32],
    ) -> Result<(), KernelError> {
        let Self { weights, config, shard, attention, places, buffers, adapters, .. } = self;
        let mut adapters = adapters.as_mut().filter(|_| !rows.is_empty());
        if let Some(adapters) = &mut adapters {
            adapters.begin(backend, rows)?;
        }
        let first_id = u32::try_from(shard.vocab.start).unwrap_or(u32::MAX);
        let scale = weights.embedding_scale;
        backend.embed(&weights.embedding, ids, first_id, scale, &mut buffers.residual)?;
        if shard.degree > 1 {
            backend.all_reduce(&mut buffers.residual)?;
        }
        let mut pass = Pass { backend, cache, batch, states, config, shard, buffers, adapters };
        let mut pending = Pending::Nothing;
        for (index, layer) in weights.layers.iter().enumerate() {
            pass.backend.check_abort()?;
            let sliding_window = config.sliding_windows[index];
            let shape = AttentionShape { sliding_window, ..*attention };
            let index = LayerIndex { layer: index, place: places[index] };
            pass.norm(pending, layer.input_norm.as_ref())?;
            let rope = &weights.ropes[layer.rope];
            if config.is_parallel {
                pass.attention_and_mlp(index, layer, rope, &shape)?;
            } else {
                pass.attention(index, layer, rope, &shape)?;
                pass.norm(Pending::of(layer.output_norm.as_ref()), layer.post_norm.as_ref())?;
                pass.mlp(index.layer, &layer.mlp)?;
            }
            pending = Pending::of(layer.down_norm.as_ref());
        }
        pass.norm(pending, Some(&weights.final_norm))
    }

    /// Copies states of linear attention, if the model has some, as
    /// [`copy_states`](kernels::backend::DeltaOps::copy_states).
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn copy_states(
        &mut self,
        backend: &mut B,
        pairs: &[(u32, u32)],
    ) -> Result<(), KernelError> {
        match &mut self.buffers.delta {
            Some(delta) => backend.copy_states(&mut delta.states, pairs),
            None => Ok(()),
        }
    }

    /// Reads the last norm's output for some rows of the last batch, one range after another,
    /// `[rows, hidden]`; equal on every rank. Clears and fills `out`.
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn read_hidden(
        &self,
        backend: &mut B,
        rows: &[std::ops::Range<usize>],
        out: &mut Vec<f32>,
    ) -> Result<(), KernelError> {
        backend.read_rows(&self.buffers.normed, rows, out)?;
        // The norm's weight is divided by it, for the logits.
        let scaling = self.config.logits_scaling;
        if scaling != 1.0 {
            out.iter_mut().for_each(|value| *value *= scaling);
        }
        Ok(())
    }

    /// Computes logits of some rows of the last batch, `[rows.len(), at least vocab_size]`; whole
    /// on rank 0, or if [`samples_everywhere`](kernels::backend::ExchangeOps::samples_everywhere).
    /// Every rank must call it with the same rows.
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn logits(&mut self, backend: &mut B, rows: &[u32]) -> Result<&B::Buffer, KernelError> {
        // The log-probabilities of a long prompt take many calls.
        backend.check_abort()?;
        let Self { weights, shard, buffers, .. } = self;
        let head = weights.lm_head.as_ref().unwrap_or(&weights.embedding);
        let cap = self.config.logits_cap;
        backend.lm_head(&buffers.normed, rows, head, cap, &mut buffers.logits_local)?;
        self.gathered = false;
        let Some(logits) = &mut buffers.logits else { return Ok(&buffers.logits_local) };
        let (vocab, others) = (self.config.vocab_size, shard.vocab_width * (shard.degree - 1));
        let first_id = u32::try_from(shard.vocab.start).unwrap_or(u32::MAX);
        if others < vocab && backend.keeps_logits_apart(first_id, shard.vocab.len(), vocab) {
            return Ok(&buffers.logits_local);
        }
        backend.gather_logits(&buffers.logits_local, logits)?;
        self.gathered = true;
        Ok(logits)
    }

    /// Whether logits are those of the model: weights without an output head make none.
    pub fn has_head(&self) -> bool {
        self.weights.has_head
    }

    /// Returns the last result of [`Decoder::logits`].
    pub fn last_logits(&self) -> &B::Buffer {
        let gathered = self.buffers.logits.as_ref().filter(|_| self.gathered);
        gathered.unwrap_or(&self.buffers.logits_local)
    }
}
