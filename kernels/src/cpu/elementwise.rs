//! Operations on one row or head at a time: RMSNorm, RoPE, gated activations. Compiled for each
//! instruction set; the order of every sum depends only on the row's length.
use super::isa::{Isa, multiversion};
use super::math::{exp, gelu_tanh, silu, soft_capped, sum_by};
use crate::backend::{Activation, ExpertActivation, PlainActivation};

multiversion! {
    /// `residual += delta`, then `out = residual / rms(residual) * weight`. All of length `hidden`.
    pub(crate) fn add_rmsnorm(
        residual: &mut [f32],
        delta: Option<&[f32]>,
        weight: &[f32],
        eps: f32,
        out: &mut [f32],
    ) = add_rmsnorm_body
}

#[inline(always)]
fn add_rmsnorm_body<const FMA: bool>(
    residual: &mut [f32],
    delta: Option<&[f32]>,
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
) {
    if let Some(delta) = delta {
        for (x, &delta) in residual.iter_mut().zip(delta) {
            *x += delta;
        }
    }
    rmsnorm(residual, weight, eps, out);
}

multiversion! {
    /// `residual += delta`, then `out` = its LayerNorm. All of length `hidden`.
    pub(crate) fn add_layernorm(
        residual: &mut [f32],
        delta: Option<&[f32]>,
        weight: &[f32],
        bias: &[f32],
        eps: f32,
        out: &mut [f32],
    ) = add_layernorm_body
}

#[inline(always)]
fn add_layernorm_body<const FMA: bool>(
    residual: &mut [f32],
    delta: Option<&[f32]>,
    weight: &[f32],
    bias: &[f32],
    eps: f32,
    out: &mut [f32],
) {
    if let Some(delta) = delta {
        for (x, &delta) in residual.iter_mut().zip(delta) {
            *x += delta;
        }
    }
    let mean = sum_by(residual, |x| x) / residual.len() as f32;
    let variance = sum_by(residual, |x| (x - mean) * (x - mean)) / residual.len() as f32;
    let scale = 1.0 / (variance + eps).sqrt();
    for (((out, &x), &weight), &bias) in out.iter_mut().zip(&*residual).zip(weight).zip(bias) {
        *out = (x - mean) * scale * weight + bias;
    }
}

multiversion! {
    /// `residual += delta / rms(delta) * delta_weight`, then `out = residual / rms(residual) *
    /// weight` (Gemma 3). All of length `hidden`.
    pub(crate) fn add_normed_rmsnorm(
        residual: &mut [f32],
        delta: &[f32],
        delta_weight: &[f32],
        weight: &[f32],
        eps: f32,
        out: &mut [f32],
    ) = add_normed_rmsnorm_body
}

#[inline(always)]
fn add_normed_rmsnorm_body<const FMA: bool>(
    residual: &mut [f32],
    delta: &[f32],
    delta_weight: &[f32],
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
) {
    let scale = rms_scale(delta, eps);
    for ((x, &delta), &weight) in residual.iter_mut().zip(delta).zip(delta_weight) {
        *x += delta * scale * weight;
    }
    rmsnorm(residual, weight, eps, out);
}

multiversion! {
    /// `residual += delta / rms(delta) * weight` (if given), then `out = residual`. All of length
    /// `hidden`.
    pub(crate) fn add_normed(
        residual: &mut [f32],
        added: Option<(&[f32], &[f32])>,
        eps: f32,
        out: &mut [f32],
    ) = add_normed_body
}

#[inline(always)]
fn add_normed_body<const FMA: bool>(
    residual: &mut [f32],
    added: Option<(&[f32], &[f32])>,
    eps: f32,
    out: &mut [f32],
) {
    if let Some((delta, weight)) = added {
        let scale = rms_scale(delta, eps);
        for ((x, &delta), &weight) in residual.iter_mut().zip(delta).zip(weight) {
            *x += delta * scale * weight;
        }
    }
    out.copy_from_slice(residual);
}

multiversion! {
    /// Replaces every element by `cap * tanh(x / cap)`.
    pub(crate) fn soft_cap(row: &mut [f32], cap: f32) = soft_cap_body
}

#[inline(always)]
fn soft_cap_body<const FMA: bool>(row: &mut [f32], cap: f32) {
    row.iter_mut().for_each(|x| *x = soft_capped(*x, cap));
}

#[inline(always)]
fn rmsnorm(row: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = rms_scale(row, eps);
    for ((out, &x), &weight) in out.iter_mut().zip(row).zip(weight) {
        *out = x * scale * weight;
    }
}

#[inline(always)]
fn rms_scale(row: &[f32], eps: f32) -> f32 {
    1.0 / (sum_by(row, |x| x * x) / row.len() as f32 + eps).sqrt()
}

multiversion! {
    /// The sum of the squares.
    pub(crate) fn squares(row: &[f32]) -> f32 = squares_body
}

#[inline(always)]
fn squares_body<const FMA: bool>(row: &[f32]) -> f32 {
    sum_by(row, |x| x * x)
}

multiversion! {
    /// `row *= scale * weight`.
    pub(crate) fn scale_by(row: &mut [f32], scale: f32, weight: &[f32]) = scale_by_body
}

#[inline(always)]
fn scale_by_body<const FMA: bool>(row: &mut [f32], scale: f32, weight: &[f32]) {
    for (x, &weight) in row.iter_mut().zip(weight) {
        *x = *x * scale * weight;
    }
}

multiversion! {
    /// Optional RMSNorm of one head (with weight `norm`), then RoPE ("rotate half"): `head` has
    /// `head_dim` elements, `cos` and `sin` half as many.
    pub(crate) fn norm_rope(head: &mut [f32], norm: Option<&[f32]>, eps: f32, cos: &[f32], sin: &[f32])
        = norm_rope_body
}

#[inline(always)]
fn norm_rope_body<const FMA: bool>(
    head: &mut [f32],
    norm: Option<&[f32]>,
    eps: f32,
    cos: &[f32],
    sin: &[f32],
) {
    if let Some(weight) = norm {
        let scale = rms_scale(head, eps);
        for (x, &weight) in head.iter_mut().zip(weight) {
            *x = *x * scale * weight;
        }
    }
    let (first, second) = head.split_at_mut(cos.len());
    for (((a, b), &cos), &sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

multiversion! {
    /// `out = silu(gate) * up`.
    fn silu_mul(gate: &[f32], up: &[f32], out: &mut [f32]) = silu_mul_body
}

#[inline(always)]
fn silu_mul_body<const FMA: bool>(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
        *out = silu(gate) * up;
    }
}

multiversion! {
    /// `out = gelu_tanh(gate) * up`.
    fn gelu_tanh_mul(gate: &[f32], up: &[f32], out: &mut [f32]) = gelu_tanh_mul_body
}

#[inline(always)]
fn gelu_tanh_mul_body<const FMA: bool>(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
        *out = gelu_tanh(gate) * up;
    }
}

/// `out = activation(gate) * up`.
pub(crate) fn activate_mul(
    isa: Isa,
    activation: Activation,
    gate: &[f32],
    up: &[f32],
    out: &mut [f32],
) {
    match activation {
        Activation::Silu => silu_mul(isa, gate, up, out),
        Activation::GeluTanh => gelu_tanh_mul(isa, gate, up, out),
    }
}

multiversion! {
    /// GELU of every element.
    fn gelu_tanh_all(row: &mut [f32]) = gelu_tanh_all_body
}

#[inline(always)]
fn gelu_tanh_all_body<const FMA: bool>(row: &mut [f32]) {
    row.iter_mut().for_each(|x| *x = gelu_tanh(*x));
}

multiversion! {
    /// `max(x, 0)^2` of every element.
    fn squared_relu_all(row: &mut [f32]) = squared_relu_all_body
}

#[inline(always)]
fn squared_relu_all_body<const FMA: bool>(row: &mut [f32]) {
    // NaN stays NaN.
    row.iter_mut().for_each(|x| *x = if *x < 0.0 { 0.0 } else { *x * *x });
}

/// Replaces every element by `activation` of it.
pub(crate) fn activate(isa: Isa, activation: PlainActivation, row: &mut [f32]) {
    match activation {
        PlainActivation::GeluTanh => gelu_tanh_all(isa, row),
        PlainActivation::SquaredRelu => squared_relu_all(isa, row),
    }
}

multiversion! {
    /// `out = g * sigmoid(alpha * g) * (u + 1)`, with gate and up clamped (clamped SwiGLU,
    /// gpt-oss).
    fn clamped_mul(gate: &[f32], up: &[f32], alpha: f32, limit: f32, out: &mut [f32])
        = clamped_mul_body
}

#[inline(always)]
fn clamped_mul_body<const FMA: bool>(
    gate: &[f32],
    up: &[f32],
    alpha: f32,
    limit: f32,
    out: &mut [f32],
) {
    // NaN stays NaN.
    let below = |x: f32, most: f32| if x > most { most } else { x };
    let above = |x: f32, least: f32| if x < least { least } else { x };
    for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
        let gate = below(gate, limit);
        let up = above(below(up, limit), -limit);
        *out = gate / (1.0 + exp(-alpha * gate)) * (up + 1.0);
    }
}

/// `out = activation(gate, up)` of an expert.
pub(crate) fn expert_mul(
    isa: Isa,
    activation: ExpertActivation,
    gate: &[f32],
    up: &[f32],
    out: &mut [f32],
) {
    match activation {
        ExpertActivation::Silu => silu_mul(isa, gate, up, out),
        ExpertActivation::Clamped { alpha, limit } => clamped_mul(isa, gate, up, alpha, limit, out),
    }
}

multiversion! {
    /// `out += x`.
    pub(crate) fn add(out: &mut [f32], x: &[f32]) = add_body
}

#[inline(always)]
fn add_body<const FMA: bool>(out: &mut [f32], x: &[f32]) {
    for (out, &x) in out.iter_mut().zip(x) {
        *out += x;
    }
}

multiversion! {
    /// `out += x * scale`; product and sum are rounded separately.
    pub(crate) fn add_scaled(out: &mut [f32], x: &[f32], scale: f32) = add_scaled_body
}

#[inline(always)]
fn add_scaled_body<const FMA: bool>(out: &mut [f32], x: &[f32], scale: f32) {
    for (out, &x) in out.iter_mut().zip(x) {
        *out += x * scale;
    }
}
