//! One rank's share of the tensors of linear attention, and of gates of attention, and what is
//! loaded of them.
use std::ops::Range;

use kernels::backend::{Backend, DeltaShape, DeltaWeights, HostMatrix, Rule, RuleWeights};
use kernels::error::KernelError;

use super::loader::Loader;
use super::part::{Kind, Layer, rows_of};
use super::{BackendDelta, DeltaProjection, Source};
use crate::model::ModelError;
use crate::model::config::{Delta, Layout};

/// One rank's share of one layer: checked, but not read yet.
pub(super) struct DeltaPart<'a> {
    qkvz: Vec<HostMatrix<'a>>,
    ba: Vec<HostMatrix<'a>>,
    conv: Vec<f32>,
    /// Only in Mamba 2, as `skip`.
    conv_bias: Vec<f32>,
    decay: Vec<f32>,
    dt_bias: Vec<f32>,
    skip: Vec<f32>,
    /// Of each head; in Mamba 2, for all of this rank's columns.
    norm: Vec<f32>,
    rule: Rule,
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
        let of_both = [&self.conv, &self.decay, &self.dt_bias, &self.norm];
        let of_mamba2 = [&self.conv_bias, &self.skip].into_iter().filter(|it| !it.is_empty());
        of_both.into_iter().chain(of_mamba2).map(Vec::as_slice)
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
        let DeltaShape { key_heads, value_heads, key_dim, value_dim, kernel, .. } = delta.shape;
        let (hidden, own) = (config.hidden_size, shard.delta_values.clone());
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
        // This rank's rows of a projection from `first` on: those of its key heads, and those of
        // its value heads, with `each` rows for one.
        let of_keys = |first: usize| {
            first + shard.delta_keys.start * key_dim..first + shard.delta_keys.end * key_dim
        };
        let of_values =
            |first: usize, each: usize| first + own.start * each..first + own.end * each;
        let (qkvz, ba) = match delta.layout {
            Layout::Grouped => {
                // What a key head has together: q, k, v and z, or b and a.
                let each = 2 * key_dim + 2 * group * value_dim;
                let of_key = |first: usize| {
                    let keys = shard.delta_keys.clone();
                    keys.map(move |head| head * each + first..head * each + first + key_dim)
                };
                // Those of its value heads that this rank has, `size` rows each.
                let of_group = |each: usize, first: usize, size: usize| {
                    let own = own.clone();
                    shard.delta_keys.clone().map(move |head| {
                        let start = own.start.max(head * group) - head * group;
                        let end = own.end.min((head + 1) * group) - head * group;
                        let first = head * each + first;
                        first + start * size..first + end * size
                    })
                };
                let (v, z) = (2 * key_dim, 2 * key_dim + group * value_dim);
                let rows = of_key(0)
                    .chain(of_key(key_dim))
                    .chain(of_group(each, v, value_dim))
                    .chain(of_group(each, z, value_dim));
                let gates = of_group(2 * group, 0, 1).chain(of_group(2 * group, group, 1));
                (
                    cut("in_proj_qkvz", 2 * (keys + values), rows.collect())?,
                    cut("in_proj_ba", 2 * value_heads, gates.collect())?,
                )
            }
            Layout::Mamba => return self.mamba(delta),
            Layout::Split => {
                let rows = vec![of_keys(0), of_keys(keys), of_values(2 * keys, value_dim)];
                let mut qkvz = cut("in_proj_qkv", 2 * keys + values, rows)?;
                qkvz.extend(cut("in_proj_z", values, vec![of_values(0, value_dim)])?);
                let mut ba = cut("in_proj_b", value_heads, vec![own.clone()])?;
                ba.extend(cut("in_proj_a", value_heads, vec![own.clone()])?);
                (qkvz, ba)
            }
        };
        let numbers = |name: &str, shape: &[usize]| {
            self.part.0.files.numbers(&self.name(&format!("linear_attn.{name}")), shape)
        };
        let all = numbers("conv1d.weight", &[delta.shape.channels(), 1, kernel])?;
        let channels = [of_keys(0), of_keys(keys), of_values(2 * keys, value_dim)];
        let conv = channels.iter().flat_map(|own| &all[own.start * kernel..own.end * kernel]);
        let decay = numbers("A_log", &[value_heads])?;
        let output = weight("out_proj", [hidden, values])?;
        let columns = of_values(0, value_dim);
        Ok(DeltaPart {
            qkvz,
            ba,
            conv: conv.copied().collect(),
            conv_bias: Vec::new(),
            decay: rates(&decay[own.clone()]),
            dt_bias: numbers("dt_bias", &[value_heads])?[own.clone()].to_vec(),
            skip: Vec::new(),
            norm: numbers("norm.weight", &[value_dim])?,
            rule: delta.shape.rule,
            output: self.parts_of(&output, &columns),
        })
    }

    /// Mamba 2, where z, x, B, C and dt come of one projection: z, v, k, q and a.
    fn mamba(&self, delta: &Delta) -> Result<DeltaPart<'a>, ModelError> {
        let Source { config, shard, files } = self.part.0;
        let DeltaShape { value_heads, key_dim, value_dim, kernel, .. } = delta.shape;
        let (keys, values) = (delta.shape.key_width(), delta.shape.value_width());
        let of = |heads: &Range<usize>, dim: usize, first: usize| {
            first + heads.start * dim..first + heads.end * dim
        };
        // Of the convolved channels: q, k and v of this rank.
        let (own_keys, own) = (&shard.delta_keys, &shard.delta_values);
        let channels = [
            of(own_keys, key_dim, values + keys),
            of(own_keys, key_dim, values),
            of(own, value_dim, 0),
        ];
        let name = |name: &str| self.name(&format!("mamba.{name}"));
        let rows = 2 * values + 2 * keys + value_heads;
        let projection = self.part.weight(&name("in_proj.weight"), [rows, config.hidden_size])?;
        // z comes before the channels in the file, and after them here.
        let convolved = channels.iter().map(|own| own.start + values..own.end + values);
        let qkvz = convolved.chain([of(own, value_dim, 0)]);
        let qkvz = qkvz.map(|rows| rows_of(&projection, &rows)).collect();
        let steps = of(own, 1, rows - value_heads);
        let numbers = |of: &str, shape: &[usize]| files.numbers(&name(of), shape);
        let conv = numbers("conv1d.weight", &[delta.shape.channels(), 1, kernel])?;
        let conv = channels.iter().flat_map(|own| &conv[own.start * kernel..own.end * kernel]);
        let bias = numbers("conv1d.bias", &[delta.shape.channels()])?;
        let output = self.part.weight(&name("out_proj.weight"), [config.hidden_size, values])?;
        let columns = of(own, value_dim, 0);
        let of_heads =
            |of: &str| Ok::<_, ModelError>(numbers(of, &[value_heads])?[own.clone()].to_vec());
        Ok(DeltaPart {
            qkvz,
            ba: vec![rows_of(&projection, &steps)],
            conv: conv.copied().collect(),
            conv_bias: channels.iter().flat_map(|own| &bias[own.clone()]).copied().collect(),
            decay: rates(&of_heads("A_log")?),
            dt_bias: of_heads("dt_bias")?,
            skip: of_heads("D")?,
            norm: numbers("norm.weight", &[values])?[columns.clone()].to_vec(),
            rule: delta.shape.rule,
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

/// Of logarithms. In f64, so that hosts agree on the rounded value.
fn rates(logs: &[f32]) -> Vec<f32> {
    logs.iter().map(|log| f64::from(*log).exp() as f32).collect()
}

impl<B: Backend> Loader<'_, '_, B> {
    pub(super) fn delta(&mut self, part: &DeltaPart<'_>) -> Result<BackendDelta<B>, KernelError> {
        let (qkvz, ba) = (self.matrix(&part.qkvz)?, self.small(&part.ba)?);
        let norm = self.vector(&part.norm)?;
        let (rule, norm) = match part.rule {
            Rule::GatedDelta => (RuleWeights::GatedDelta { norm }, None),
            Rule::Mamba2 => {
                let conv_bias = Some(self.vector(&part.conv_bias)?);
                (RuleWeights::Mamba2 { conv_bias, skip: self.vector(&part.skip)? }, Some(norm))
            }
        };
        let own = DeltaWeights {
            conv: self.vector(&part.conv)?,
            decay: self.vector(&part.decay)?,
            dt_bias: self.vector(&part.dt_bias)?,
            rule,
        };
        Ok(DeltaProjection { qkvz, ba, norm, own })
    }
}
