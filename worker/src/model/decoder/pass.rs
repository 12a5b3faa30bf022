//! One batch through the layers: norms, attention, MLPs, and the sums of their parts.
use kernels::backend::{AttentionAt, AttentionShape, Batch, QkvInput, RopeTable};
use kernels::{Backend, KernelError};

use super::{Buffers, ExpertBuffers};
use crate::model::config::ModelConfig;
use crate::model::lora::{Adapters, Part, Place, Site};
use crate::model::shard::Shard;
use crate::model::weights::{BackendLayer, BackendMlp, Mlp};

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

/// One batch's pass through the layers.
pub(super) struct Pass<'a, B: Backend> {
    pub(super) backend: &'a mut B,
    pub(super) cache: &'a mut B::KvCache,
    pub(super) batch: &'a Batch<'a>,
    pub(super) config: &'a ModelConfig,
    pub(super) shard: &'a Shard,
    pub(super) buffers: &'a mut Buffers<B>,
    /// Adapters, if some row has one.
    pub(super) adapters: Option<&'a mut Adapters<B>>,
}

impl<B: Backend> Pass<'_, B> {
    /// Adds what is `pending`, summed over all ranks, to the residual stream; `normed` = its norm,
    /// or the stream itself without a `weight`.
    pub(super) fn norm(
        &mut self,
        pending: Pending<'_, B::Vector>,
        weight: Option<&B::Vector>,
    ) -> Result<(), KernelError> {
        let (backend, eps) = (&mut *self.backend, self.config.norm_eps);
        // If so, `deltas[0]` is only this rank's part of the sum.
        let is_sharded = self.shard.degree > 1;
        let Buffers { residual, normed, deltas, .. } = &mut *self.buffers;
        let [delta, ..] = &mut deltas[..] else { return Err(missing()) };
        if is_sharded && matches!(pending, Pending::Normed(_)) {
            backend.all_reduce(delta)?;
        }
        match (pending, weight) {
            (Pending::Nothing, None) => backend.add_normed(residual, None, eps, normed),
            (Pending::Nothing, Some(weight)) => {
                backend.add_rmsnorm(residual, None, weight, eps, normed)
            }
            // No model has such layers.
            (Pending::Delta, None) => Err(missing()),
            (Pending::Delta, Some(weight)) if is_sharded => {
                backend.all_reduce_add_rmsnorm(delta, residual, weight, eps, normed)
            }
            (Pending::Delta, Some(weight)) => {
                backend.add_rmsnorm(residual, Some(delta), weight, eps, normed)
            }
            (Pending::Normed(own), None) => {
                backend.add_normed(residual, Some((delta, own)), eps, normed)
            }
            (Pending::Normed(own), Some(weight)) => {
                backend.add_normed_rmsnorm(residual, delta, own, weight, eps, normed)
            }
        }
    }

    /// `deltas[0]` = attention over `normed`.
    pub(super) fn attention(
        &mut self,
        index: usize,
        layer: &BackendLayer<B>,
        rope: &RopeTable<B::Vector>,
        shape: &AttentionShape,
    ) -> Result<(), KernelError> {
        let Self { backend, cache, batch, buffers, adapters, .. } = self;
        let Buffers { normed, deltas, q, attended, .. } = &mut **buffers;
        let at = Place { layer: index, site: Site::Qkv };
        let addend = addend(*backend, adapters, at, normed)?;
        let qkv = QkvInput { x: normed, weights: &layer.qkv, addend, rope };
        let at = AttentionAt { shape, batch, layer: index };
        backend.qkv_rope_write(qkv, at, cache, q)?;
        backend.paged_attention(q, layer.sinks.as_ref(), at, cache, attended)?;
        let at = Place { layer: index, site: Site::Output };
        let weight = Biased { parts: &layer.output, bias: layer.output_bias.as_ref() };
        row_parallel(*backend, attended, weight, deltas, adapters, at)
    }

    /// `deltas[0]` = the MLP, or the experts in its place, of `normed`.
    pub(super) fn mlp(&mut self, index: usize, mlp: &BackendMlp<B>) -> Result<(), KernelError> {
        let Self { backend, config, shard, buffers, adapters, .. } = self;
        let Buffers { normed, deltas, inner, experts, .. } = &mut **buffers;
        match mlp {
            Mlp::Dense { gate_up, gate_up_bias, down, down_bias } => {
                let inner = room(inner)?;
                let at = Place { layer: index, site: Site::GateUp };
                let addend = addend(*backend, adapters, at, normed)?;
                let bias = gate_up_bias.as_ref();
                backend.gate_up(normed, gate_up, bias, addend, config.activation, inner)?;
                let at = Place { layer: index, site: Site::Down };
                let weight = Biased { parts: down, bias: down_bias.as_ref() };
                row_parallel(*backend, inner, weight, deltas, adapters, at)
            }
            Mlp::Experts { router, router_bias, gate_up, gate_up_bias, down, down_bias } => {
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

/// A row-parallel module: one matrix per part of its sum, and its bias.
struct Biased<'a, B: Backend> {
    parts: &'a [B::Matrix],
    bias: Option<&'a B::Vector>,
}

/// `deltas[0] = x W^T + bias`, plus what adapters add, part by part. The columns of `W` are this
/// rank's share, so the result must still be summed over the ranks.
fn row_parallel<B: Backend>(
    backend: &mut B,
    x: &B::Buffer,
    Biased { parts, bias }: Biased<'_, B>,
    deltas: &mut [B::Buffer],
    adapters: &mut Option<&mut Adapters<B>>,
    at: Place,
) -> Result<(), KernelError> {
    let mut adapt = |backend: &mut B, part: Part, delta: &mut B::Buffer| {
        let Some(adapters) = adapters.as_mut() else { return Ok(()) };
        match adapters.addend(backend, at, part, x)? {
            Some(addend) => backend.add(delta, addend),
            None => Ok(()),
        }
    };
    if let ([whole], [delta, ..]) = (parts, &mut *deltas) {
        backend.linear(x, whole, bias, delta)?;
        return adapt(backend, Part::WHOLE, delta);
    }
    let mut first = 0;
    sum_parts(backend, parts, deltas, |backend, index, part, delta| {
        backend.linear_columns(x, first, part, bias.filter(|_| index == 0), delta)?;
        adapt(backend, Part { index, first }, delta)?;
        first += backend.columns(part);
        Ok(())
    })
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
