//! One rank's share of the tensors of linear attention, and of gates of attention, and what is
//! loaded of them.
use std::ops::Range;

use kernels::backend::{Backend, DeltaShape, DeltaWeights, HostMatrix};
use kernels::error::KernelError;

use super::loader::Loader;
use super::part::{Kind, Layer, rows_of};
use super::{BackendDelta, DeltaProjection, Source};
use crate::model::ModelError;
use crate::model::config::Delta;

/// One rank's share of one layer: checked, but not read yet.
pub(super) struct DeltaPart<'a> {
    qkvz: Vec<HostMatrix<'a>>,
    ba: Vec<HostMatrix<'a>>,
    conv: Vec<f32>,
    decay: Vec<f32>,
    dt_bias: Vec<f32>,
    norm: Vec<f32>,
    /// The output projection: one matrix per part of its sum.
    pub(super) output: Vec<HostMatrix<'a>>,
}

impl<'a> DeltaPart<'a> {
    /// All matrices but those of the output, those together that are loaded together.
    pub(super) fn loads(&self) -> Vec<(&[HostMatrix<'a>], Kind)> {
        vec![(self.qkvz.as_slice(), Kind::Matrix), (self.ba.as_slice(), Kind::Small)]
    }

    /// The vectors.
    pub(super) fn vectors(&self) -> impl Iterator<Item = &[f32]> {
        [&self.conv, &self.decay, &self.dt_bias, &self.norm].into_iter().map(Vec::as_slice)
    }
}

/// q of attention with gates, and the gates: rows of one tensor, in which they alternate by heads.
pub(super) struct GatedQ<'a> {
    pub(super) q: Vec<HostMatrix<'a>>,
    pub(super) gate: Vec<HostMatrix<'a>>,
}

impl<'a> Layer<'a> {
    pub(super) fn delta(&self, delta: &Delta) -> Result<DeltaPart<'a>, ModelError> {
        let Source { config, shard, .. } = self.part.0;
        let DeltaShape { key_heads, value_heads, key_dim, value_dim, kernel } = delta.shape;
        let (hidden, own) = (config.hidden_size, shard.delta_heads.clone());
        let group = value_heads / key_heads;
        let (keys, values) = (delta.shape.key_width(), delta.shape.value_width());
        let weight = |name: &str, shape| {
            self.part.weight(&self.name(&format!("linear_attn.{name}.weight")), shape)
        };
        let cut = |name: &str, rows: usize, ranges: Vec<Range<usize>>| {
            let tensor = weight(name, [rows, hidden])?;
            let cut = ranges.iter().map(|rows| rows_of(&tensor, rows));
            Ok::<_, ModelError>(cut.collect::<Vec<_>>())
        };
        // This rank's rows of a projection with `each` rows for a key head, from `first` on.
        let span = |first: usize, each: usize| first + own.start * each..first + own.end * each;
        let of_values = group * value_dim;
        let (qkvz, ba) = match delta.is_grouped {
            true => {
                let each = 2 * key_dim + 2 * of_values;
                let of = |first: usize, len: usize| {
                    own.clone().map(move |head| head * each + first..head * each + first + len)
                };
                let rows = of(0, key_dim)
                    .chain(of(key_dim, key_dim))
                    .chain(of(2 * key_dim, of_values))
                    .chain(of(2 * key_dim + of_values, of_values));
                let gates = |first: usize| {
                    own.clone().map(move |head| {
                        let first = 2 * head * group + first;
                        first..first + group
                    })
                };
                let gates = gates(0).chain(gates(group));
                (
                    cut("in_proj_qkvz", 2 * (keys + values), rows.collect())?,
                    cut("in_proj_ba", 2 * value_heads, gates.collect())?,
                )
            }
            false => {
                let rows = vec![span(0, key_dim), span(keys, key_dim), span(2 * keys, of_values)];
                let mut qkvz = cut("in_proj_qkv", 2 * keys + values, rows)?;
                qkvz.extend(cut("in_proj_z", values, vec![span(0, of_values)])?);
                let mut ba = cut("in_proj_b", value_heads, vec![span(0, group)])?;
                ba.extend(cut("in_proj_a", value_heads, vec![span(0, group)])?);
                (qkvz, ba)
            }
        };
        let numbers = |name: &str, shape: &[usize]| {
            self.part.0.files.numbers(&self.name(&format!("linear_attn.{name}")), shape)
        };
        let all = numbers("conv1d.weight", &[delta.shape.channels(), 1, kernel])?;
        let channels = [span(0, key_dim), span(keys, key_dim), span(2 * keys, of_values)];
        let conv = channels.iter().flat_map(|own| &all[own.start * kernel..own.end * kernel]);
        let heads = span(0, group);
        let decay = numbers("A_log", &[value_heads])?;
        let output = weight("out_proj", [hidden, values])?;
        let columns = span(0, of_values);
        Ok(DeltaPart {
            qkvz,
            ba,
            conv: conv.copied().collect(),
            // In f64, so that hosts agree on the rounded value.
            decay: decay[heads.clone()].iter().map(|log| f64::from(*log).exp() as f32).collect(),
            dt_bias: numbers("dt_bias", &[value_heads])?[heads].to_vec(),
            norm: numbers("norm.weight", &[value_dim])?,
            output: self.parts_of(&output, &columns),
        })
    }

    pub(super) fn gated_q(&self) -> Result<GatedQ<'a>, ModelError> {
        let Source { config, shard, .. } = self.part.0;
        let (head_dim, rope) = (config.head_dim, &config.ropes[self.index]);
        let shape = [2 * config.num_heads * head_dim, config.hidden_size];
        let tensor = self.part.weight(&self.name("self_attn.q_proj.weight"), shape)?;
        let mut both = GatedQ { q: Vec::new(), gate: Vec::new() };
        for head in shard.heads.clone() {
            // Features of q in the order in which backends rotate them.
            let first = head * head_dim;
            let rows = rope.rows(head_dim, head..head + 1).into_iter();
            let rows = rows.map(|rows| rows.start + first..rows.end + first);
            both.q.extend(rows.map(|rows| rows_of(&tensor, &rows)));
            let gate = 2 * first + head_dim;
            both.gate.push(rows_of(&tensor, &(gate..gate + head_dim)));
        }
        Ok(both)
    }
}

impl<B: Backend> Loader<'_, '_, B> {
    pub(super) fn delta(&mut self, part: &DeltaPart<'_>) -> Result<BackendDelta<B>, KernelError> {
        Ok(DeltaProjection {
            qkvz: self.matrix(&part.qkvz)?,
            ba: self.small(&part.ba)?,
            own: DeltaWeights {
                conv: self.vector(&part.conv)?,
                decay: self.vector(&part.decay)?,
                dt_bias: self.vector(&part.dt_bias)?,
                norm: self.vector(&part.norm)?,
            },
        })
    }
}
