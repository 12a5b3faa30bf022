//! The forward pass, written once over [`Backend`], and the activations it needs.
//!
//! Owns the order of operations and every buffer, allocated once from the step's bounds: a step
//! allocates nothing. What is in a batch is the engine's business. On more than one rank, each
//! rank computes its heads and features and two all-reduces per layer add up what they found.
use kernels::KernelError;
use kernels::backend::{AttentionShape, Backend, Batch, Buffer, RopeTable};

use super::config::ModelConfig;
use super::shard::Shard;
use super::weights::Weights;
use super::{Model, rope};

/// A model, ready to run on its device.
pub(crate) struct Decoder<B: Backend> {
    model: Model<B>,
    rope: RopeTable<B::Vector>,
    /// The residual stream, `[rows, hidden]`.
    residual: B::Buffer,
    /// The residual stream normalised, `[rows, hidden]`; after the last layer, lm_head's input.
    normed: B::Buffer,
    /// What a block adds to the residual stream, `[rows, hidden]`.
    delta: B::Buffer,
    /// `[rows, heads * head_dim]`
    q: B::Buffer,
    /// `[rows, heads * head_dim]`
    attended: B::Buffer,
    /// `[rows, inner]`
    inner: B::Buffer,
    /// `[sampled rows, vocab_width]`
    local_logits: B::Buffer,
    /// Rank 0 of several: `[sampled rows, world_size * vocab_width]`; else unused.
    full_logits: B::Buffer,
}

impl<B: Backend> Decoder<B> {
    /// Allocates buffers for steps of at most `rows_max` tokens with logits for at most
    /// `logit_rows_max` of them at a time, and RoPE tables for `positions_max` positions.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    pub(crate) fn new(
        backend: &mut B,
        model: Model<B>,
        rows_max: usize,
        logit_rows_max: usize,
        positions_max: usize,
    ) -> Result<Self, KernelError> {
        let (config, shard) = (&model.config, &model.shard);
        let q_width = shard.heads.len() * config.head_dim;
        let gathers = shard.world_size > 1 && shard.rank == 0;
        let full_rows = if gathers { logit_rows_max } else { 1 };
        let full_width = if gathers { shard.world_size as usize * shard.vocab_width } else { 1 };
        Ok(Self {
            rope: rope::load(backend, &config.rope, config.head_dim, positions_max)?,
            residual: backend.new_buffer(rows_max, config.hidden_size)?,
            normed: backend.new_buffer(rows_max, config.hidden_size)?,
            delta: backend.new_buffer(rows_max, config.hidden_size)?,
            q: backend.new_buffer(rows_max, q_width)?,
            attended: backend.new_buffer(rows_max, q_width)?,
            inner: backend.new_buffer(rows_max, shard.inner.len())?,
            local_logits: backend.new_buffer(logit_rows_max, shard.vocab_width)?,
            full_logits: backend.new_buffer(full_rows, full_width)?,
            model,
        })
    }

    /// The model.
    #[must_use]
    pub(crate) fn model(&self) -> &Model<B> {
        &self.model
    }

    /// Frees the buffers and keeps the weights.
    #[must_use]
    pub(crate) fn into_model(self) -> Model<B> {
        self.model
    }

    /// Runs all layers over `tokens`, one per row of `batch`, and writes their K and V to `cache`.
    ///
    /// # Errors
    /// [`KernelError`]; the cache and the collective are then undefined.
    pub(crate) fn forward(
        &mut self,
        backend: &mut B,
        cache: &mut B::KvCache,
        tokens: &[u32],
        batch: &Batch<'_>,
    ) -> Result<(), KernelError> {
        let Model { config, shard, weights, .. } = &self.model;
        let eps = config.rms_norm_eps;
        let several_ranks = shard.world_size > 1;
        let rows = tokens.len();
        let buffers = [&mut self.normed, &mut self.delta, &mut self.q, &mut self.attended];
        for buffer in buffers.into_iter().chain([&mut self.inner]) {
            buffer.set_rows(rows)?;
        }

        backend.embed(&weights.embedding, tokens, shard.first_id(), &mut self.residual)?;
        if several_ranks {
            backend.all_reduce(&mut self.residual)?;
        }
        for (index, layer) in weights.layers.iter().enumerate() {
            let shape = attention_shape(config, shard, index);
            // The MLP's sum of the layer before enters the residual stream here.
            let delta = (index > 0).then_some(&self.delta);
            backend.add_rmsnorm(
                &mut self.residual,
                delta,
                &layer.attention_norm,
                eps,
                &mut self.normed,
            )?;
            backend.qkv_rope_write(
                &self.normed,
                &layer.qkv,
                &self.rope,
                &shape,
                batch,
                cache,
                index,
                &mut self.q,
            )?;
            backend.paged_attention(&self.q, &shape, batch, cache, index, &mut self.attended)?;
            backend.linear(&self.attended, &layer.o, layer.o_bias.as_ref(), &mut self.delta)?;
            if several_ranks {
                backend.all_reduce(&mut self.delta)?;
            }
            backend.add_rmsnorm(
                &mut self.residual,
                Some(&self.delta),
                &layer.mlp_norm,
                eps,
                &mut self.normed,
            )?;
            backend.gate_up_silu(
                &self.normed,
                &layer.gate_up,
                layer.gate_up_bias.as_ref(),
                &mut self.inner,
            )?;
            backend.linear(&self.inner, &layer.down, layer.down_bias.as_ref(), &mut self.delta)?;
            if several_ranks {
                backend.all_reduce(&mut self.delta)?;
            }
        }
        let Weights { norm, .. } = weights;
        backend.add_rmsnorm(&mut self.residual, Some(&self.delta), norm, eps, &mut self.normed)
    }

    /// Computes the logits of `rows` of the last forward pass and brings them to rank 0.
    ///
    /// # Errors
    /// [`KernelError`].
    pub(crate) fn compute_logits(
        &mut self,
        backend: &mut B,
        rows: &[u32],
    ) -> Result<(), KernelError> {
        let Model { shard, weights, .. } = &self.model;
        let matrix = weights.output.as_ref().unwrap_or(&weights.embedding);
        self.local_logits.set_rows(rows.len())?;
        backend.lm_head(&self.normed, rows, matrix, &mut self.local_logits)?;
        if shard.world_size > 1 {
            backend.gather_logits(&self.local_logits, &mut self.full_logits)?;
        }
        Ok(())
    }

    /// The logits computed last, `[rows, vocab and padding]`. Meaningful on rank 0 alone.
    #[must_use]
    pub(crate) fn logits(&self) -> &B::Buffer {
        if self.model.shard.world_size > 1 { &self.full_logits } else { &self.local_logits }
    }
}

fn attention_shape(config: &ModelConfig, shard: &Shard, layer: usize) -> AttentionShape {
    AttentionShape {
        num_heads: shard.heads.len(),
        num_kv_heads: shard.kv_heads.len(),
        head_dim: config.head_dim,
        norm_eps: config.rms_norm_eps,
        sliding_window: config.sliding_windows[layer],
    }
}
