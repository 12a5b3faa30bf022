//! The forward pass of one rank, written once over `kernels::Backend`.
//!
//! Activations live in buffers made once for the largest step; a step allocates nothing.
use kernels::backend::{AttentionAt, AttentionShape, Batch, KvShape, QkvInput, Routing};
use kernels::{Backend, KernelError};

use super::config::ModelConfig;
use super::lora::{Adapters, Site};
use super::shard::Shard;
use super::weights::{Mlp, Weights};

/// One rank's model on its backend.
pub struct Decoder<B: Backend> {
    weights: Weights<B::Matrix, B::Stack, B::Vector>,
    config: ModelConfig,
    shard: Shard,
    /// Of every layer, but for its window.
    attention: AttentionShape,
    /// Those of all layers, each once.
    windows: Vec<Option<u32>>,
    buffers: Buffers<B>,
    adapters: Option<Adapters<B>>,
    /// The last logits were gathered from all ranks.
    gathered: bool,
}

struct Buffers<B: Backend> {
    /// The residual stream, `[tokens, hidden]`.
    residual: B::Buffer,
    /// Its normalised form, `[tokens, hidden]`.
    normed: B::Buffer,
    /// What attention or MLP adds to it, `[tokens, hidden]`; behind the first, what is being added
    /// up to it.
    deltas: Vec<B::Buffer>,
    /// Queries, `[tokens, heads * head_dim]`.
    q: B::Buffer,
    /// Attention's result, likewise.
    attended: B::Buffer,
    /// The MLP's inner activations, `[tokens, intermediate]`; where some layer has an MLP.
    inner: Option<B::Buffer>,
    /// Where some layer has experts.
    experts: Option<ExpertBuffers<B>>,
    /// This rank's logits, `[rows, vocab_width]`.
    logits_local: B::Buffer,
    /// All ranks' logits, where they are gathered, `[rows, degree * vocab_width]`.
    logits: B::Buffer,
}

struct ExpertBuffers<B: Backend> {
    /// Which experts rows go to.
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
    /// Puts a decoder together with room for `tokens_max` tokens and `rows_max` rows of logits.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    pub fn new(
        backend: &mut B,
        config: ModelConfig,
        shard: Shard,
        weights: Weights<B::Matrix, B::Stack, B::Vector>,
        tokens_max: usize,
        rows_max: usize,
    ) -> Result<Self, KernelError> {
        let hidden = config.hidden_size;
        let heads = shard.heads.len() * config.head_dim;
        let everywhere = shard.rank == 0 || backend.may_sample_everywhere();
        let all_logits = if everywhere { rows_max } else { 1 };
        let buffers = Buffers {
            residual: backend.new_buffer(tokens_max, hidden)?,
            normed: backend.new_input_buffer(tokens_max, hidden)?,
            deltas: (0..=shard.parts.ilog2())
                .map(|_| backend.new_buffer(tokens_max, hidden))
                .collect::<Result<_, _>>()?,
            q: backend.new_input_buffer(tokens_max, heads)?,
            attended: backend.new_input_buffer(tokens_max, heads)?,
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
            logits: backend.new_buffer(all_logits, shard.vocab_width * shard.degree)?,
        };
        let attention = AttentionShape {
            num_heads: shard.heads.len(),
            num_kv_heads: shard.kv_heads.len(),
            head_dim: config.head_dim,
            norm_eps: config.norm_eps,
            sliding_window: None,
        };
        let mut windows = config.sliding_windows.clone();
        windows.sort_unstable();
        windows.dedup();
        Ok(Self {
            weights,
            config,
            shard,
            attention,
            windows,
            buffers,
            adapters: None,
            gathered: false,
        })
    }

    /// With adapters beside the model, if there are any.
    #[must_use]
    pub fn with_adapters(self, adapters: Option<Adapters<B>>) -> Self {
        Self { adapters, ..self }
    }

    /// How many adapters there are.
    #[must_use]
    pub fn num_adapters(&self) -> u32 {
        self.adapters.as_ref().map_or(0, Adapters::count)
    }

    /// The model.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Attention of every layer, but for its window.
    #[must_use]
    pub fn attention(&self) -> &AttentionShape {
        &self.attention
    }

    /// The windows of all layers, each once.
    #[must_use]
    pub fn windows(&self) -> &[Option<u32>] {
        &self.windows
    }

    /// Bytes of weights held.
    #[must_use]
    pub fn weight_bytes(&self) -> u64 {
        self.weights.bytes + self.adapters.as_ref().map_or(0, Adapters::bytes)
    }

    /// The shape of a KV cache of `num_blocks` blocks for this rank.
    #[must_use]
    pub fn kv_shape(&self, block_size: usize, num_blocks: usize) -> KvShape {
        KvShape {
            num_layers: self.config.num_layers,
            num_kv_heads: self.shard.kv_heads.len(),
            head_dim: self.config.head_dim,
            block_size,
            num_blocks,
        }
    }

    /// Computes the batch's tokens: K and V go to the cache, the last layer's output stays in the
    /// decoder for [`Decoder::logits`]. `rows` has which adapter each row has
    /// ([`super::lora::row_of`]), and is empty where none has one. Every rank calls it with the
    /// same batch.
    ///
    /// # Errors
    /// [`KernelError`]; the cache is undefined then.
    pub fn forward(
        &mut self,
        backend: &mut B,
        cache: &mut B::KvCache,
        ids: &[u32],
        batch: &Batch<'_>,
        rows: &[u32],
    ) -> Result<(), KernelError> {
        let Self { weights, config, shard, attention, buffers, adapters, .. } = self;
        let mut adapters = adapters.as_mut().filter(|_| !rows.is_empty());
        if let Some(adapters) = &mut adapters {
            adapters.begin(backend, rows)?;
        }
        let norms = Norms { eps: config.norm_eps, sharded: shard.degree > 1 };
        let first_id = u32::try_from(shard.vocab.start).unwrap_or(u32::MAX);
        let scale = weights.embedding_scale;
        backend.embed(&weights.embedding, ids, first_id, scale, &mut buffers.residual)?;
        if norms.sharded {
            backend.all_reduce(&mut buffers.residual)?;
        }
        let mut pending = Pending::Nothing;
        for (index, layer) in weights.layers.iter().enumerate() {
            let sliding_window = config.sliding_windows[index];
            let attention = &AttentionShape { sliding_window, ..*attention };
            norms.add(backend, buffers, pending, &layer.input_norm)?;
            let addend = match &mut adapters {
                Some(adapters) => {
                    adapters.addend(backend, (index, Site::Qkv), (0, 0), &buffers.normed)?
                }
                None => None,
            };
            let (x, rope) = (&buffers.normed, &weights.ropes[layer.rope]);
            let qkv = QkvInput { x, weights: &layer.qkv, addend, rope };
            let at = AttentionAt { shape: attention, batch, layer: index };
            backend.qkv_rope_write(qkv, at, cache, &mut buffers.q)?;
            let (sinks, attended) = (layer.sinks.as_ref(), &mut buffers.attended);
            backend.paged_attention(&buffers.q, sinks, at, cache, attended)?;
            let bias = layer.output_bias.as_ref();
            let (at, deltas) = ((index, Site::Output), &mut buffers.deltas);
            let weight = (&layer.output[..], bias);
            row_parallel(backend, &buffers.attended, weight, deltas, &mut adapters, at)?;
            let attended = Pending::of(layer.output_norm.as_ref());
            norms.add(backend, buffers, attended, &layer.post_norm)?;
            match &layer.mlp {
                Mlp::Dense { gate_up, gate_up_bias, down, down_bias } => {
                    let inner = room(&mut buffers.inner)?;
                    let bias = gate_up_bias.as_ref();
                    let addend = match &mut adapters {
                        Some(adapters) => adapters.addend(
                            backend,
                            (index, Site::GateUp),
                            (0, 0),
                            &buffers.normed,
                        )?,
                        None => None,
                    };
                    let activation = config.activation;
                    backend.gate_up(&buffers.normed, gate_up, bias, addend, activation, inner)?;
                    let (at, deltas) = ((index, Site::Down), &mut buffers.deltas);
                    let weight = (&down[..], down_bias.as_ref());
                    row_parallel(backend, inner, weight, deltas, &mut adapters, at)?;
                }
                Mlp::Experts { router, router_bias, gate_up, gate_up_bias, down, down_bias } => {
                    let ExpertBuffers { routes, inner } = room(&mut buffers.experts)?;
                    let (x, bias) = (&buffers.normed, router_bias.as_ref());
                    backend.route(x, router, bias, routes)?;
                    let bias = gate_up_bias.as_ref();
                    let activation = config.expert_activation();
                    backend.experts_gate_up(x, gate_up, bias, activation, routes, inner)?;
                    let width = shard.expert.len() / shard.parts;
                    sum_parts(backend, down, &mut buffers.deltas, |backend, i, part, delta| {
                        let bias = down_bias.as_ref().filter(|_| i == 0);
                        backend.experts_down(inner, i * width, part, bias, routes, delta)
                    })?;
                }
            }
            pending = Pending::of(layer.down_norm.as_ref());
        }
        norms.add(backend, buffers, pending, &weights.final_norm)
    }

    /// What the last norm gave for some of the last batch's rows, one range behind the other,
    /// `[rows, hidden]`: the same on every rank. Clears and fills `out`.
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn read_hidden(
        &self,
        backend: &mut B,
        rows: &[std::ops::Range<usize>],
        out: &mut Vec<f32>,
    ) -> Result<(), KernelError> {
        backend.read_rows(&self.buffers.normed, rows, out)
    }

    /// Logits of some of the last batch's rows, `[rows.len(), at least vocab_size]`; whole on rank
    /// 0, or where [`samples_everywhere`](kernels::backend::ExchangeOps::samples_everywhere). Every
    /// rank calls it with the same rows.
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn logits(&mut self, backend: &mut B, rows: &[u32]) -> Result<&B::Buffer, KernelError> {
        let Self { weights, shard, buffers, .. } = self;
        let head = weights.lm_head.as_ref().unwrap_or(&weights.embedding);
        backend.lm_head(&buffers.normed, rows, head, &mut buffers.logits_local)?;
        self.gathered = false;
        if shard.degree == 1 {
            return Ok(&buffers.logits_local);
        }
        let (vocab, others) = (self.config.vocab_size, shard.vocab_width * (shard.degree - 1));
        let first_id = u32::try_from(shard.vocab.start).unwrap_or(u32::MAX);
        if others < vocab && backend.keeps_logits_apart(first_id, shard.vocab.len()) {
            return Ok(&buffers.logits_local);
        }
        backend.gather_logits(&buffers.logits_local, &mut buffers.logits)?;
        self.gathered = true;
        Ok(&buffers.logits)
    }

    /// What [`Decoder::logits`] gave last.
    pub fn last_logits(&self) -> &B::Buffer {
        if self.gathered { &self.buffers.logits } else { &self.buffers.logits_local }
    }
}

/// What the next norm has to add to the residual stream.
enum Pending<'a, V> {
    Nothing,
    /// `deltas[0]`.
    Delta,
    /// Its norm, of this weight.
    Normed(&'a V),
}

impl<'a, V> Pending<'a, V> {
    fn of(norm: Option<&'a V>) -> Self {
        norm.map_or(Self::Delta, Self::Normed)
    }
}

/// What all norms of the residual stream have in common.
struct Norms {
    eps: f32,
    /// `deltas[0]` is this rank's part of a sum.
    sharded: bool,
}

impl Norms {
    /// Adds what is `pending`, of all ranks, to the residual stream; `normed` = its norm.
    fn add<B: Backend>(
        &self,
        backend: &mut B,
        buffers: &mut Buffers<B>,
        pending: Pending<'_, B::Vector>,
        weight: &B::Vector,
    ) -> Result<(), KernelError> {
        let Self { eps, sharded } = *self;
        let Buffers { residual, normed, deltas, .. } = buffers;
        let [delta, ..] = &mut deltas[..] else { return Err(missing()) };
        match pending {
            Pending::Nothing => backend.add_rmsnorm(residual, None, weight, eps, normed),
            Pending::Delta if sharded => {
                backend.all_reduce_add_rmsnorm(delta, residual, weight, eps, normed)
            }
            Pending::Delta => backend.add_rmsnorm(residual, Some(delta), weight, eps, normed),
            Pending::Normed(own) => {
                if sharded {
                    backend.all_reduce(delta)?;
                }
                backend.add_normed_rmsnorm(residual, delta, own, weight, eps, normed)
            }
        }
    }
}

/// What a layer of this kind needs.
fn room<T>(made: &mut Option<T>) -> Result<&mut T, KernelError> {
    made.as_mut().ok_or_else(missing)
}

fn missing() -> KernelError {
    let message = "the configuration has no layer of this kind".to_owned();
    KernelError::Shape { op: "forward", message }
}

/// `deltas[0] = x W^T + bias`, where the columns of `W` are this rank's part of the whole, so that
/// all ranks' are still to be added up; and what adapters add to it there, part by part.
fn row_parallel<B: Backend>(
    backend: &mut B,
    x: &B::Buffer,
    (parts, bias): (&[B::Matrix], Option<&B::Vector>),
    deltas: &mut [B::Buffer],
    adapters: &mut Option<&mut Adapters<B>>,
    at: (usize, Site),
) -> Result<(), KernelError> {
    let mut adapt = |backend: &mut B, part: (usize, usize), delta: &mut B::Buffer| {
        let Some(adapters) = adapters.as_mut() else { return Ok(()) };
        match adapters.addend(backend, at, part, x)? {
            Some(addend) => backend.add(delta, addend),
            None => Ok(()),
        }
    };
    if let ([whole], [delta, ..]) = (parts, &mut *deltas) {
        backend.linear(x, whole, bias, delta)?;
        return adapt(backend, (0, 0), delta);
    }
    let mut first = 0;
    sum_parts(backend, parts, deltas, |backend, index, part, delta| {
        backend.linear_columns(x, first, part, bias.filter(|_| index == 0), delta)?;
        adapt(backend, (index, first), delta)?;
        first += backend.columns(part);
        Ok(())
    })
}

/// `deltas[0]` = the sum of what `make` makes of all parts, added up as a binary tree, as ranks
/// are: with the parts of several ranks in one, the sum has the same bits as theirs.
fn sum_parts<B: Backend, P>(
    backend: &mut B,
    parts: &[P],
    deltas: &mut [B::Buffer],
    mut make: impl FnMut(&mut B, usize, &P, &mut B::Buffer) -> Result<(), KernelError>,
) -> Result<(), KernelError> {
    let mut len = 0;
    for (index, part) in parts.iter().enumerate() {
        make(backend, index, part, &mut deltas[len])?;
        len += 1;
        // As in counting: a subtree is whole when the bits of the number so far say so.
        let mut bits = index;
        while bits & 1 == 1 {
            let (sums, last) = deltas.split_at_mut(len - 1);
            backend.add(&mut sums[len - 2], &last[0])?;
            len -= 1;
            bits >>= 1;
        }
    }
    Ok(())
}
