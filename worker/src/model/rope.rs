//! The cos and sin tables of rotary position embedding, for every scaling that is supported.
//!
//! Follows transformers' rounding (`modeling_rope_utils.py`): the inverse frequencies and their
//! product with the position are float32, as at training; at position 100,000 a more exact angle
//! would differ by more than the rounding of everything else.
use std::f64::consts::PI;

use kernels::backend::{Backend, RopeTable};
use kernels::error::KernelError;

use super::config::{RopeConfig, RopeScaling};

/// Tables for positions `0..positions`, uploaded.
///
/// # Errors
/// [`KernelError::OutOfMemory`].
pub(super) fn load<B: Backend>(
    backend: &mut B,
    rope: &RopeConfig,
    head_dim: usize,
    positions: usize,
) -> Result<RopeTable<B::Vector>, KernelError> {
    let frequencies = inverse_frequencies(rope, head_dim);
    let table = |function: fn(f64) -> f64| -> Vec<f32> {
        (0..positions)
            .flat_map(|position| {
                frequencies.iter().map(move |&frequency| {
                    let angle = position as f32 * frequency;
                    function(f64::from(angle)) as f32
                })
            })
            .collect()
    };
    Ok(RopeTable {
        cos: backend.load_vector(&table(f64::cos))?,
        sin: backend.load_vector(&table(f64::sin))?,
    })
}

/// Radians per position, `head_dim / 2` of them, highest first.
#[must_use]
pub(super) fn inverse_frequencies(rope: &RopeConfig, head_dim: usize) -> Vec<f32> {
    (0..head_dim / 2)
        .map(|i| {
            let frequency = rope.theta.powf(-((2 * i) as f64) / head_dim as f64);
            scale(frequency, &rope.scaling) as f32
        })
        .collect()
}

fn scale(frequency: f64, scaling: &RopeScaling) -> f64 {
    match *scaling {
        RopeScaling::Default => frequency,
        RopeScaling::Linear { factor } => frequency / factor,
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } => {
            let wavelength = 2.0 * PI / frequency;
            if wavelength < original_positions / high_freq_factor {
                frequency
            } else if wavelength > original_positions / low_freq_factor {
                frequency / factor
            } else {
                let smooth = (original_positions / wavelength - low_freq_factor)
                    / (high_freq_factor - low_freq_factor);
                (1.0 - smooth) * frequency / factor + smooth * frequency
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_fall_from_one_as_powers_of_theta() {
        let rope = RopeConfig { theta: 10_000.0, scaling: RopeScaling::Default };
        assert_eq!(inverse_frequencies(&rope, 4), [1.0, 0.01]);
        let rope = RopeConfig { theta: 10_000.0, scaling: RopeScaling::Linear { factor: 4.0 } };
        assert_eq!(inverse_frequencies(&rope, 4), [0.25, 0.0025]);
    }

    /// Llama 3.1 8B's values from transformers 5.23, `_compute_llama3_parameters`: first, one in the
    /// blended range, last.
    #[test]
    fn llama3_keeps_high_and_divides_low_frequencies() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_positions: 8192.0,
        };
        let plain = RopeConfig { theta: 500_000.0, scaling: RopeScaling::Default };
        let scaled = RopeConfig { theta: 500_000.0, scaling };
        let (plain, scaled) = (inverse_frequencies(&plain, 128), inverse_frequencies(&scaled, 128));
        let mut kept = 0;
        let mut divided = 0;
        for (plain, scaled) in plain.iter().zip(&scaled) {
            let wavelength = 2.0 * std::f32::consts::PI / plain;
            if wavelength < 2048.0 {
                assert_eq!(plain, scaled);
                kept += 1;
            } else if wavelength > 8192.0 {
                assert!((plain / 8.0 - scaled).abs() <= f32::EPSILON * plain);
                divided += 1;
            } else {
                assert!(*scaled < *plain && *scaled > plain / 8.0);
            }
        }
        assert_eq!((kept, divided), (29, 29));
    }
}
