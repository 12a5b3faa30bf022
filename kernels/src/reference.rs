//! The oracle: every operation of [`crate::Backend`] in plain float32 loops, single-threaded.
//!
//! Kept as simple as possible: weights are widened to f32 when loaded, the KV cache is f32, and
//! each operation follows its definition. Every kernel, CPU or CUDA, is compared with this backend,
//! so it must be obvious rather than fast.
//!
//! Map: `tensor` (buffers, matrices, the cache) and `loading`, `rows`, `products`, `attention`
//! (QKV, RoPE, attention), `qk_norm`, `latent`, `delta`, `experts`, `exchange`, `steps` over
//! `sampler`.
mod attention;
mod delta;
mod exchange;
mod experts;
mod latent;
mod loading;
mod products;
mod qk_norm;
mod rows;
mod sampler;
mod steps;
mod tensor;

use std::time::Duration;

pub use delta::ReferenceStates;
pub use experts::ReferenceRoutes;
pub use tensor::{ReferenceBuffer, ReferenceKvCache, ReferenceMatrix};

use crate::collective::Collective;

/// The float32 reference backend of one rank.
#[derive(Debug)]
pub struct ReferenceBackend {
    collective: Box<dyn Collective>,
    collective_time: Duration,
    /// One row of the QKV projection, of gate and up, or of an addend of the residual stream.
    row: Vec<f32>,
    /// Attention weights of one head over one sequence.
    scores: Vec<f32>,
    /// Logits gathered from all ranks, one block per rank.
    gathered: Vec<f32>,
}

impl ReferenceBackend {
    /// Creates the backend of the collective's rank.
    #[must_use]
    pub fn new(collective: Box<dyn Collective>) -> Self {
        Self {
            collective,
            collective_time: Duration::ZERO,
            row: Vec::new(),
            scores: Vec::new(),
            gathered: Vec::new(),
        }
    }
}

/// The inner product, in eight interleaved partial sums that are added in a fixed order.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 8;
    let mut sums = [0.0f32; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let tail: f32 = a_chunks.remainder().iter().zip(b_chunks.remainder()).map(|(x, y)| x * y).sum();
    for (x, y) in a_chunks.zip(b_chunks) {
        for lane in 0..LANES {
            sums[lane] += x[lane] * y[lane];
        }
    }
    sums.iter().sum::<f32>() + tail
}

/// `out = weight x + bias` for one row of activations.
fn project(x: &[f32], weight: &ReferenceMatrix, bias: Option<&[f32]>, out: &mut [f32]) {
    for (i, y) in out.iter_mut().enumerate() {
        *y = dot(weight.row(i), x) + bias.map_or(0.0, |bias| bias[i]);
    }
}

/// `out = x / rms(x) * weight`
fn rmsnorm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = 1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt();
    for ((y, x), w) in out.iter_mut().zip(x).zip(weight) {
        *y = x * scale * w;
    }
}

/// `row += addend[i]`
fn add_row(row: &mut [f32], addend: Option<&ReferenceBuffer>, i: usize) {
    let Some(addend) = addend else { return };
    row.iter_mut().zip(addend.row(i)).for_each(|(x, a)| *x += a);
}
