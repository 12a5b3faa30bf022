//! Linear attention, token by token.
use super::tensor::zeroed;
use super::{ReferenceBackend, rmsnorm};
use crate::backend::{
    Buffer as _, DeltaAt, DeltaInput, DeltaOps, DeltaShape, Rule, RuleWeights, StatesShape,
};
use crate::check::delta as check;
use crate::error::KernelError;

/// States of sequences: of each layer and slot those of the value heads,
/// `[value_heads, key_dim, value_dim]`, then the channels of the last tokens, `[kernel - 1,
/// channels]`, the oldest first.
#[derive(Debug)]
pub struct ReferenceStates {
    shape: StatesShape,
    values: Vec<f32>,
}

impl DeltaOps for ReferenceBackend {
    type States = ReferenceStates;

    fn new_states(&mut self, shape: StatesShape) -> Result<ReferenceStates, KernelError> {
        check::states(&shape)?;
        Ok(ReferenceStates { shape, values: zeroed("states of sequences", &[shape.num_values()])? })
    }

    fn copy_states(
        &mut self,
        states: &mut ReferenceStates,
        pairs: &[(u32, u32)],
    ) -> Result<(), KernelError> {
        check::copies(&states.shape, pairs)?;
        let (slots, len) = (states.shape.slots, states.shape.layer.state_len());
        for layer in states.values.chunks_exact_mut(slots * len) {
            for &(from, to) in pairs {
                let from = from as usize * len;
                layer.copy_within(from..from + len, to as usize * len);
            }
        }
        Ok(())
    }

    fn delta_attention(
        &mut self,
        input: DeltaInput<'_, Self::Buffer, Self::Vector>,
        at: DeltaAt<'_>,
        states: &mut ReferenceStates,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        check::attend(&input, at, &states.shape, out)?;
        let DeltaInput { qkvz, ba, weights, eps } = input;
        let shape = states.shape.layer;
        let DeltaShape { key_heads, value_heads, key_dim, value_dim, kernel, .. } = shape;
        let (channels, len) = (shape.channels(), shape.state_len());
        out.set_rows(qkvz.rows())?;
        let (conv_bias, _) = weights.rule.mamba2();
        for (seq, &slot) in at.batch.seqs.iter().zip(at.states) {
            let place = at.layer * states.shape.slots + slot as usize;
            let state = &mut states.values[place * len..][..len];
            if seq.context_len == seq.num_rows {
                state.fill(0.0);
            }
            let (heads, last) = state.split_at_mut(value_heads * key_dim * value_dim);
            for row in (seq.row_start..seq.row_start + seq.num_rows).map(|row| row as usize) {
                let (x, z) = qkvz.row(row).split_at(channels);
                let (b, a) = ba.row(row).split_at(shape.gates_width() - value_heads);
                let mut mixed = vec![0.0; channels];
                for (channel, mixed) in mixed.iter_mut().enumerate() {
                    let conv = &weights.conv[channel * kernel..][..kernel];
                    let before = (0..kernel - 1).map(|j| conv[j] * last[j * channels + channel]);
                    let bias = conv_bias.map_or(0.0, |bias| bias[channel]);
                    *mixed = silu(before.sum::<f32>() + conv[kernel - 1] * x[channel] + bias);
                }
                last.copy_within(channels.., 0);
                let newest = last.len() - channels;
                last[newest..].copy_from_slice(x);
                let (q, rest) = mixed.split_at_mut(shape.key_width());
                let (k, v) = rest.split_at_mut(shape.key_width());
                if shape.rule == Rule::GatedDelta {
                    for head in 0..key_heads {
                        normalise(&mut q[head * key_dim..][..key_dim], (key_dim as f32).sqrt());
                        normalise(&mut k[head * key_dim..][..key_dim], 1.0);
                    }
                }
                for head in 0..value_heads {
                    let from = head / (value_heads / key_heads) * key_dim;
                    let (q, k) = (&q[from..][..key_dim], &k[from..][..key_dim]);
                    let v = &v[head * value_dim..][..value_dim];
                    let s = &mut heads[head * key_dim * value_dim..][..key_dim * value_dim];
                    let step = softplus(a[head] + weights.dt_bias[head]);
                    let kept = (-weights.decay[head] * step).exp();
                    s.iter_mut().for_each(|s| *s *= kept);
                    let mut o = vec![0.0; value_dim];
                    for column in 0..value_dim {
                        let at = |i: usize| i * value_dim + column;
                        let (u, added) = match &weights.rule {
                            RuleWeights::GatedDelta { .. } => {
                                let beta = 1.0 / (1.0 + (-b[head]).exp());
                                let recalled: f32 = (0..key_dim).map(|i| k[i] * s[at(i)]).sum();
                                (beta * (v[column] - recalled), 0.0)
                            }
                            RuleWeights::Mamba2 { skip, .. } => {
                                (step * v[column], skip[head] * v[column])
                            }
                        };
                        (0..key_dim).for_each(|i| s[at(i)] += k[i] * u);
                        o[column] = (0..key_dim).map(|i| q[i] * s[at(i)]).sum::<f32>() + added;
                    }
                    let out = &mut out.row_mut(row)[head * value_dim..][..value_dim];
                    match weights.rule.norm() {
                        Some(norm) => rmsnorm(&o, norm, eps, out),
                        None => out.copy_from_slice(&o),
                    }
                    let z = &z[head * value_dim..][..value_dim];
                    out.iter_mut().zip(z).for_each(|(out, &z)| *out *= silu(z));
                }
            }
        }
        Ok(())
    }

    fn gate(&mut self, gate: &Self::Buffer, x: &mut Self::Buffer) -> Result<(), KernelError> {
        check::gate(gate, x)?;
        for (x, gate) in x.values_mut().iter_mut().zip(gate.values()) {
            *x /= 1.0 + (-gate).exp();
        }
        Ok(())
    }
}

/// Divides by the length and by `divisor`.
fn normalise(x: &mut [f32], divisor: f32) {
    let squares: f32 = x.iter().map(|x| x * x).sum();
    let length = (squares + DeltaShape::EPS).sqrt();
    x.iter_mut().for_each(|x| *x = *x / length / divisor);
}

fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

/// `ln(1 + exp(x))`
fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}
