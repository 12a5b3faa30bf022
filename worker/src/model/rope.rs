//! PURE: rotary position embedding (RoPE): frequencies, their scalings, tables of cosines and
//! sines, and the order of rotated elements in checkpoints.
use std::ops::Range;

/// The rotary embedding of one or more layers.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Number of rotated elements at the front of each head: even; 0 for layers without RoPE
    /// (NoPE).
    pub dim: usize,
    /// Base of the frequencies.
    pub theta: f64,
    /// Scaling for contexts longer than the model was trained on.
    pub scaling: RopeScaling,
    /// Whether checkpoints have the two elements of a rotated pair next to each other.
    pub is_interleaved: bool,
    /// A factor of q that grows with the position (Ministral 3).
    pub growth: Option<Growth>,
}

/// The factor `1 + beta * ln(1 + floor(position / original_positions))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Growth {
    /// How much it grows.
    pub beta: f64,
    /// Original context length, in tokens: up to it the factor is 1.
    pub original_positions: f64,
}

/// Supported scaling methods.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// None.
    None,
    /// All frequencies divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3: low frequencies divided by `factor`, high ones kept, smooth in between.
    Llama3 {
        /// The divisor.
        factor: f64,
        /// Wavelengths above `original_positions / low_freq_factor` are divided.
        low_freq_factor: f64,
        /// Wavelengths below `original_positions / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Original context length, in tokens.
        original_positions: f64,
    },
    /// YaRN: frequencies with few turns within the original context are divided by `factor`, those
    /// with many are kept, with a linear ramp over the pairs in between.
    Yarn {
        /// The divisor.
        factor: f64,
        /// Original context length, in tokens.
        original_positions: f64,
        /// Number of turns within that context from which a frequency is kept.
        beta_fast: f64,
        /// Number of turns up to which a frequency is divided.
        beta_slow: f64,
        /// Whether to round the ends of the ramp to whole pairs.
        truncate: bool,
        /// Factor of cosines and sines.
        attention_factor: f64,
    },
    /// LongRoPE: each frequency has its own divisor; one set applies if no sequence may exceed the
    /// original context, another if some may.
    LongRope {
        /// Original context length, in tokens.
        original_positions: f64,
        /// Divisors up to that length, `[dim / 2]`.
        short: Vec<f64>,
        /// Divisors beyond it, `[dim / 2]`.
        long: Vec<f64>,
        /// Factor of cosines and sines.
        attention_factor: f64,
    },
}

/// Returns the distinct rotary embeddings, in the order of the first layers that use them.
pub(super) fn distinct(ropes: &[RopeConfig]) -> Vec<&RopeConfig> {
    let mut distinct: Vec<&RopeConfig> = Vec::new();
    for rope in ropes {
        if !distinct.contains(&rope) {
            distinct.push(rope);
        }
    }
    distinct
}

impl RopeConfig {
    /// For layers without RoPE (NoPE).
    #[must_use]
    pub fn none() -> Self {
        Self { dim: 0, theta: 1.0, scaling: RopeScaling::None, is_interleaved: false, growth: None }
    }

    /// Whether not all factors of q are 1.
    #[must_use]
    pub fn scales_q(&self, positions: usize) -> bool {
        self.growth.is_some_and(|growth| positions as f64 > growth.original_positions)
    }

    /// Returns the factors of q, `[positions]`, if not all are 1.
    #[must_use]
    pub fn q_scale(&self, positions: usize) -> Option<Vec<f32>> {
        let Growth { beta, original_positions: original } = self.growth?;
        let factor = |position: usize| beta * (position as f64 / original).floor().ln_1p() + 1.0;
        self.scales_q(positions)
            .then(|| (0..positions).map(|position| factor(position) as f32).collect())
    }

    /// Returns the angle per position of each rotated pair of elements, `[dim / 2]`, for sequences
    /// of up to `positions` tokens. It does not depend on the length of the individual sequence.
    #[must_use]
    pub fn inverse_frequencies(&self, positions: usize) -> Vec<f64> {
        let dim = self.dim as f64;
        let plain = (0..self.dim / 2).map(|i| self.theta.powf(-(2.0 * i as f64) / dim));
        match &self.scaling {
            RopeScaling::None => plain.collect(),
            RopeScaling::Linear { factor } => plain.map(|frequency| frequency / factor).collect(),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_positions,
            } => plain
                .map(|frequency| {
                    let wavelength = 2.0 * std::f64::consts::PI / frequency;
                    if wavelength < original_positions / high_freq_factor {
                        frequency
                    } else if wavelength > original_positions / low_freq_factor {
                        frequency / factor
                    } else {
                        let smooth = (original_positions / wavelength - low_freq_factor)
                            / (high_freq_factor - low_freq_factor);
                        (1.0 - smooth) * frequency / factor + smooth * frequency
                    }
                })
                .collect(),
            RopeScaling::Yarn {
                factor,
                original_positions,
                beta_fast,
                beta_slow,
                truncate,
                ..
            } => {
                // The (fractional) index of the pair that makes this many turns in the original
                // context.
                let pair = |turns: f64| {
                    let wavelength = original_positions / (turns * 2.0 * std::f64::consts::PI);
                    dim * wavelength.ln() / (2.0 * self.theta.ln())
                };
                let (mut first, mut last) = (pair(*beta_fast), pair(*beta_slow));
                if *truncate {
                    (first, last) = (first.floor(), last.ceil());
                }
                (first, last) = (first.max(0.0), last.min(dim - 1.0));
                if first == last {
                    last += 0.001;
                }
                let divided = |i: usize| ((i as f64 - first) / (last - first)).clamp(0.0, 1.0);
                let scaled = |(i, frequency)| {
                    let divided = divided(i);
                    frequency / factor * divided + frequency * (1.0 - divided)
                };
                plain.enumerate().map(scaled).collect()
            }
            RopeScaling::LongRope { original_positions, short, long, .. } => {
                let is_long = positions as f64 > *original_positions;
                let divisors = if is_long { long } else { short };
                plain.zip(divisors).map(|(frequency, divisor)| frequency / divisor).collect()
            }
        }
    }

    /// Returns the factor of cosines and sines.
    #[must_use]
    pub fn attention_factor(&self) -> f64 {
        match self.scaling {
            RopeScaling::Yarn { attention_factor, .. }
            | RopeScaling::LongRope { attention_factor, .. } => attention_factor,
            RopeScaling::None | RopeScaling::Linear { .. } | RopeScaling::Llama3 { .. } => 1.0,
        }
    }

    /// Returns the index, within a head of a checkpoint, of the backend's element `i`. Backends
    /// rotate element `i` with `i + head_dim / 2`. Checkpoints have the pairs at `i` and
    /// `i + dim / 2`, or at `2 i` and `2 i + 1` if they are interleaved, followed by all unrotated
    /// elements. The order of elements does not affect the product of q and k.
    #[must_use]
    pub fn source(&self, head_dim: usize, i: usize) -> usize {
        let (rotated, half) = (self.dim / 2, head_dim / 2);
        let is_rotated = i < rotated || (half..half + rotated).contains(&i);
        if self.is_interleaved && is_rotated {
            return if i < half { 2 * i } else { 2 * (i - half) + 1 };
        }
        if self.dim == 0 || i < rotated {
            i
        } else if i < half {
            i + rotated
        } else if i < half + rotated {
            i + rotated - half
        } else {
            i
        }
    }

    /// Returns the rows of whole heads in a checkpoint, in the order of [`RopeConfig::source`], as
    /// few ranges.
    pub(super) fn rows(&self, head_dim: usize, heads: Range<usize>) -> Vec<Range<usize>> {
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for head in heads {
            for row in (0..head_dim).map(|i| head * head_dim + self.source(head_dim, i)) {
                match ranges.last_mut() {
                    Some(last) if last.end == row => last.end += 1,
                    _ => ranges.push(row..row + 1),
                }
            }
        }
        ranges
    }

    /// Returns cosines and sines, each `[positions, head_dim / 2]`, row-major; 1 and 0 for
    /// unrotated pairs. Angles are first rounded to f32, as in transformers.
    #[must_use]
    pub fn tables(&self, head_dim: usize, positions: usize) -> (Vec<f32>, Vec<f32>) {
        let frequencies: Vec<f32> =
            self.inverse_frequencies(positions).into_iter().map(|f| f as f32).collect();
        let (half, factor) = (head_dim / 2, self.attention_factor() as f32);
        let mut cos = Vec::with_capacity(positions * half);
        let mut sin = Vec::with_capacity(positions * half);
        for position in 0..positions {
            for frequency in &frequencies {
                let angle = f64::from(position as f32 * frequency);
                cos.push(angle.cos() as f32 * factor);
                sin.push(angle.sin() as f32 * factor);
            }
            cos.resize((position + 1) * half, 1.0);
            sin.resize((position + 1) * half, 0.0);
        }
        (cos, sin)
    }
}
