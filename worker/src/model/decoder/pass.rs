//! One batch through the layers: norms, attention, MLPs, and the sums of their parts.
use kernels::backend::{
    AttentionAt, AttentionShape, Batch, DeltaAt, DeltaInput, LatentInput, LayerNorm, QkvInput,
    RopeTable,
};
use kernels::{Backend, KernelError};

use super::{Buffers, DeltaBuffers, DeltaNormBuffers, ExpertBuffers, LatentBuffers, QkNormBuffers};
use crate::model::config::{Latent, MlpActivation, ModelConfig};
use crate::model::lora::{Adapters, Part, Place, Site};
use crate::model::shard::Shard;
use crate::model::weights::{
    BackendDelta, BackendLatent, BackendLayer, BackendMlp, Mlp, Norm, Projection,
};

/// What the next norm must first add to the residual stream.
pub(super) enum Pending<'a, V> {
    Nothing,
    /// `deltas[0]`.
    Delta,
    /// `deltas[0]`, normalised with this weight.
    Normed(&'a V),
}

impl<'a, V> Pending<'a, V> {
    pub(super) fn of(norm: Option<&'a V>) -> Self {
        norm.map_or(Self::Delta, Self::Normed)
    }
}

/// A layer.
#[derive(Clone, Copy)]
pub(super) struct LayerIndex {
    /// Its index.
    pub(super) layer: usize,
    /// Its place among those of its kind: in the KV cache, or among the states.
    pub(super) place: usize,
}

/// One batch's pass through the layers.
pub(super) struct Pass<'a, B: Backend> {
    pub(super) backend: &'a mut B,
    pub(super) cache: &'a mut B::KvCache,
    pub(super) batch: &'a Batch<'a>,
    /// The state of each sequence.
    pub(super) states: &'a [u32],
    pub(super) config: &'a ModelConfig,
    pub(super) shard: &'a Shard,
    pub(super) buffers: &'a mut Buffers<B>,
    /// Adapters, if some row has one.
    pub(super) adapters: Option<&'a mut Adapters<B>>,
}

impl<B: Backend> Pass<'_, B> {
    /// Adds what is `pending`, summed over all ranks, to the residual stream; `normed` = its norm,
    /// or the stream itself without a `norm`.
    pub(super) fn norm(
        &mut self,
        pending: Pending<'_, B::Vector>,
        norm: Option<&Norm<B::Vector>>,
    ) -> Result<(), KernelError> {
        let (backend, eps) = (&mut *self.backend, self.config.norm_eps);
        // If so, `deltas[0]` is only this rank's part of the sum.
        let is_sharded = self.shard.degree > 1;
        let Buffers { residual, normed, deltas, .. } = &mut *self.buffers;
        let [delta, ..] = &mut deltas[..] else { return Err(missing()) };
        if is_sharded && matches!(pending, Pending::Normed(_)) {
            backend.all_reduce_delta(delta)?;
        }
        match (pending, norm) {
            (Pending::Nothing, None) => backend.add_normed(residual, None, eps, normed),
            (Pending::Nothing, Some(Norm::Rms(weight))) => {
                backend.add_rmsnorm(residual, None, weight, eps, normed)
            }
            (Pending::Nothing, Some(Norm::Layer { weight, bias })) => {
                backend.add_layernorm(residual, None, LayerNorm { weight, bias }, eps, normed)
            }
            (Pending::Delta, Some(Norm::Rms(weight))) if is_sharded => {
                backend.all_reduce_add_rmsnorm(delta, residual, weight, eps, normed)
            }
            (Pending::Delta, Some(Norm::Rms(weight))) => {
                backend.add_rmsnorm(residual, Some(delta), weight, eps, normed)
            }
            (Pending::Delta, Some(Norm::Layer { weight, bias })) => {
                if is_sharded {
                    backend.all_reduce_delta(delta)?;
                }
                let norm = LayerNorm { weight, bias };
                backend.add_layernorm(residual, Some(delta), norm, eps, normed)
            }
            (Pending::Normed(own), None) => {
                backend.add_normed(residual, Some((delta, own)), eps, normed)
            }
            (Pending::Normed(own), Some(Norm::Rms(weight))) => {
                backend.add_normed_rmsnorm(residual, delta, own, weight, eps, normed)
            }
            // No model has such layers.
            (Pending::Delta, None) | (Pending::Normed(_), Some(Norm::Layer { .. })) => {
                Err(missing())
            }
        }
    }

    /// `deltas[0]` = attention over `normed`.
    pub(super) fn attention(
        &mut self,
        index: LayerIndex,
        layer: &BackendLayer<B>,
        rope: &RopeTable<B::Vector>,
        shape: &AttentionShape,
    ) -> Result<(), KernelError> {
        self.attend(index, layer, rope, shape)?;
        let Self { backend, buffers, adapters, .. } = self;
        let Buffers { deltas, attended, latent, delta, .. } = &mut **buffers;
        let attended = match (&layer.projection, latent, delta) {
            (Projection::Latent(_), Some(latent), _) => &latent.mixed,
            (Projection::Delta(_), _, Some(delta)) => &delta.attended,
            _ => attended,
        };
        RowParallel::output(index.layer, layer, attended).sum(*backend, deltas, adapters)
    }

    /// `deltas[0]` = attention plus the MLP, both of `normed`. They are added up part by part, so
    /// that ranks exchange one sum for both.
    pub(super) fn attention_and_mlp(
        &mut self,
        index: LayerIndex,
        layer: &BackendLayer<B>,
        rope: &RopeTable<B::Vector>,
        shape: &AttentionShape,
    ) -> Result<(), KernelError> {
        let Mlp::Dense { down, down_bias, .. } = &layer.mlp else { return Err(missing()) };
        self.attend(index, layer, rope, shape)?;
        self.widen(index.layer, &layer.mlp)?;
        let Self { backend, buffers, adapters, .. } = self;
        let Buffers { deltas, attended, inner, .. } = &mut **buffers;
        let [deltas @ .., own] = &mut deltas[..] else { return Err(missing()) };
        let output = RowParallel::output(index.layer, layer, attended);
        let down = RowParallel::down(index.layer, room(inner)?, down, down_bias.as_ref());
        sum_parts(*backend, output.parts, deltas, |backend, i, _, delta| {
            output.part(backend, i, delta, adapters)?;
            down.part(backend, i, own, adapters)?;
            backend.add(delta, own)
        })
    }

    /// `attended` = attention over `normed`, before its output projection.
    fn attend(
        &mut self,
        index: LayerIndex,
        layer: &BackendLayer<B>,
        rope: &RopeTable<B::Vector>,
        shape: &AttentionShape,
    ) -> Result<(), KernelError> {
        let qkv = match &layer.projection {
            Projection::Qkv(qkv) => qkv,
            Projection::Latent(latent) => {
                return self.attend_latents(index.place, latent, rope, shape);
            }
            Projection::Delta(delta) => return self.attend_linearly(index.place, delta),
        };
        let Self { backend, cache, batch, shard, buffers, adapters, .. } = self;
        let Buffers { normed, q, qk_norm, gate, attended, .. } = &mut **buffers;
        let at = Place { layer: index.layer, site: Site::Qkv };
        let addend = addend(*backend, adapters, at, normed)?;
        let at = AttentionAt { shape, batch, layer: index.place };
        match &layer.qk_norm {
            None => {
                let input = QkvInput { x: normed, weights: qkv, addend, rope };
                backend.qkv_rope_write(input, at, cache, q)?;
            }
            Some(weight) => {
                let QkNormBuffers { norm, projected, squares } = room(qk_norm)?;
                backend.linear(normed, &qkv.weight, qkv.bias.as_ref(), projected)?;
                if let Some(addend) = addend {
                    backend.add(projected, addend)?;
                }
                backend.qk_squares(projected, norm, squares)?;
                if shard.degree > 1 {
                    backend.all_reduce(squares)?;
                }
                backend.qk_scale(projected, norm, squares, weight)?;
                backend.rope_write(projected, rope, at, cache, q)?;
            }
        }
        let Some(weight) = &layer.gate else {
            return backend.paged_attention(q, layer.sinks.as_ref(), at, cache, attended);
        };
        let gate = room(gate)?;
        backend.linear(normed, weight, None, gate)?;
        backend.paged_attention(q, layer.sinks.as_ref(), at, cache, attended)?;
        backend.gate(gate, attended)
    }

    /// Linear attention over `normed`, before its output projection. Adapters are refused when a
    /// model is loaded.
    fn attend_linearly(
        &mut self,
        place: usize,
        weights: &BackendDelta<B>,
    ) -> Result<(), KernelError> {
        let Self { backend, batch, states: slots, config, shard, buffers, .. } = self;
        let Buffers { normed, delta, .. } = &mut **buffers;
        let DeltaBuffers { qkvz, ba, norm, attended, states } = room(delta)?;
        let eps = config.delta.as_ref().ok_or_else(missing)?.norm_eps;
        backend.linear(normed, &weights.qkvz, None, qkvz)?;
        backend.linear(normed, &weights.ba, None, ba)?;
        let input = DeltaInput { qkvz, ba, weights: &weights.own, eps };
        let at = DeltaAt { batch, states: slots, layer: place };
        let Some(weight) = &weights.norm else {
            return backend.delta_attention(input, at, states, attended);
        };
        let DeltaNormBuffers { norm, gated, squares } = room(norm)?;
        backend.delta_attention(input, at, states, gated)?;
        backend.qk_squares(gated, norm, squares)?;
        if shard.degree > 1 {
            backend.all_reduce(squares)?;
        }
        backend.qk_scale(gated, norm, squares, weight)?;
        // As an input of products.
        backend.add_normed(gated, None, eps, attended)
    }

    /// Multi-head latent attention over `normed`, before its output projection. Adapters are
    /// refused when a model is loaded.
    fn attend_latents(
        &mut self,
        place: usize,
        weights: &BackendLatent<B>,
        rope: &RopeTable<B::Vector>,
        shape: &AttentionShape,
    ) -> Result<(), KernelError> {
        let Self { backend, cache, batch, config, buffers, .. } = self;
        let Buffers { normed, q: q_out, latent, attended, .. } = &mut **buffers;
        let LatentBuffers { down, q, kv, plain, mixed } = room(latent)?;
        match &weights.q_down {
            None => backend.linear(normed, &weights.q, None, q)?,
            Some((matrix, norm)) => {
                let [projected, compressed] = room(down)?;
                backend.linear(normed, matrix, None, projected)?;
                backend.add_rmsnorm(projected, None, norm, Latent::NORM_EPS, compressed)?;
                backend.linear(compressed, &weights.q, None, q)?;
            }
        }
        backend.linear(normed, &weights.kv, None, kv)?;
        let at = AttentionAt { shape, batch, layer: place };
        let scale = config.query_scale;
        let input = LatentInput { q, kv, norm: &weights.kv_norm, rope, scale };
        backend.latent_write(input, at, cache, plain, q_out)?;
        backend.heads_product(plain, &weights.keys, scale, q_out)?;
        backend.paged_attention(q_out, None, at, cache, attended)?;
        backend.heads_product(attended, &weights.values, 1.0, mixed)
    }

    /// `inner` = the inner activations of a dense MLP over `normed`.
    fn widen(&mut self, index: usize, mlp: &BackendMlp<B>) -> Result<(), KernelError> {
        let Mlp::Dense { gate_up, gate_up_bias, .. } = mlp else { return Err(missing()) };
        let Self { backend, config, buffers, adapters, .. } = self;
        let Buffers { normed, inner, .. } = &mut **buffers;
        let inner = room(inner)?;
        let at = Place { layer: index, site: Site::GateUp };
        let addend = addend(*backend, adapters, at, normed)?;
        let bias = gate_up_bias.as_ref();
        match config.activation {
            MlpActivation::Gated(activation) => {
                backend.gate_up(normed, gate_up, bias, addend, activation, inner)
            }
            MlpActivation::Plain(activation) => {
                backend.activated(normed, gate_up, bias, addend, activation, inner)
            }
        }
    }

    /// `deltas[0]` = the MLP, or the experts in its place, of `normed`.
    pub(super) fn mlp(&mut self, index: usize, mlp: &BackendMlp<B>) -> Result<(), KernelError> {
        match mlp {
            Mlp::Dense { down, down_bias, .. } => {
                self.widen(index, mlp)?;
                let Self { backend, buffers, adapters, .. } = self;
                let Buffers { deltas, inner, .. } = &mut **buffers;
                let down = RowParallel::down(index, room(inner)?, down, down_bias.as_ref());
                down.sum(*backend, deltas, adapters)
            }
            Mlp::Experts { router, router_bias, gate_up, gate_up_bias, down, down_bias } => {
                let Self { backend, config, shard, buffers, .. } = self;
                let Buffers { normed, deltas, experts, .. } = &mut **buffers;
                let ExpertBuffers { routes, inner } = room(experts)?;
                backend.route(normed, router, router_bias.as_ref(), routes)?;
                let (bias, activation) = (gate_up_bias.as_ref(), config.expert_activation());
                backend.experts_gate_up(normed, gate_up, bias, activation, routes, inner)?;
                let width = shard.expert.len() / shard.parts;
                sum_parts(*backend, down, deltas, |backend, i, part, delta| {
                    let bias = down_bias.as_ref().filter(|_| i == 0);
                    backend.experts_down(inner, i * width, part, bias, routes, delta)
                })
            }
        }
    }
}

/// What adapters add at a place, if there are any.
fn addend<'a, B: Backend>(
    backend: &mut B,
    adapters: &'a mut Option<&mut Adapters<B>>,
    at: Place,
    x: &B::Buffer,
) -> Result<Option<&'a B::Buffer>, KernelError> {
    match adapters {
        Some(adapters) => adapters.addend(backend, at, Part::WHOLE, x),
        None => Ok(None),
    }
}

/// The buffers for a layer of this kind.
fn room<T>(made: &mut Option<T>) -> Result<&mut T, KernelError> {
    made.as_mut().ok_or_else(missing)
}

fn missing() -> KernelError {
    let message = "the configuration has no layer of this kind".to_owned();
    KernelError::Shape { op: "forward", message }
}

/// A row-parallel module and its input. The columns of its matrices are this rank's share, so what
/// it computes must still be summed over the ranks.
struct RowParallel<'a, B: Backend> {
    x: &'a B::Buffer,
    /// One matrix per part of its sum, all of one width.
    parts: &'a [B::Matrix],
    /// Added to the first part.
    bias: Option<&'a B::Vector>,
    at: Place,
}

impl<'a, B: Backend> RowParallel<'a, B> {
    /// The attention's output projection.
    fn output(index: usize, layer: &'a BackendLayer<B>, x: &'a B::Buffer) -> Self {
        let at = Place { layer: index, site: Site::Output };
        Self { x, parts: &layer.output, bias: layer.output_bias.as_ref(), at }
    }

    /// An MLP's down projection.
    fn down(
        index: usize,
        x: &'a B::Buffer,
        parts: &'a [B::Matrix],
        bias: Option<&'a B::Vector>,
    ) -> Self {
        Self { x, parts, bias, at: Place { layer: index, site: Site::Down } }
    }

    /// `delta = x W^T + bias`, plus what adapters add, of one part.
    fn part(
        &self,
        backend: &mut B,
        index: usize,
        delta: &mut B::Buffer,
        adapters: &mut Option<&mut Adapters<B>>,
    ) -> Result<(), KernelError> {
        let Self { x, parts, bias, at } = self;
        let weight = &parts[index];
        let first = index * backend.columns(weight);
        match parts.len() {
            1 => backend.linear(x, weight, *bias, delta)?,
            _ => backend.linear_columns(x, first, weight, bias.filter(|_| index == 0), delta)?,
        }
        let Some(adapters) = adapters.as_mut() else { return Ok(()) };
        match adapters.addend(backend, *at, Part { index, first }, x)? {
            Some(addend) => backend.add(delta, addend),
            None => Ok(()),
        }
    }

    /// `deltas[0]` = the sum of all parts.
    fn sum(
        &self,
        backend: &mut B,
        deltas: &mut [B::Buffer],
        adapters: &mut Option<&mut Adapters<B>>,
    ) -> Result<(), KernelError> {
        sum_parts(backend, self.parts, deltas, |backend, index, _, delta| {
            self.part(backend, index, delta, adapters)
        })
    }
}

/// `deltas[0]` = the sum of what `make` computes for the parts. They are added as a binary tree, as
/// ranks are, so that one rank with several ranks' parts gets the same bits as those ranks.
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
        // Like a binary counter: trailing one bits tell which subtrees are complete.
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
