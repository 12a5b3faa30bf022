//! PURE: rotary position embedding: frequencies, their scalings, tables of cosines and sines.

/// How positions are turned into angles, in one layer or in many.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Elements of a head that are rotated, the first ones: even, and 0 where positions are not told.
    pub dim: usize,
    /// Base of the frequencies.
    pub theta: f64,
    /// Stretching for contexts longer than the model was trained on.
    pub scaling: RopeScaling,
}

/// Known scalings.
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
        /// Context the model was trained on.
        original_positions: f64,
    },
}

impl RopeConfig {
    /// Angle per position of each pair of elements that is rotated, `[dim / 2]`.
    #[must_use]
    pub fn inverse_frequencies(&self) -> Vec<f64> {
        let dim = self.dim as f64;
        (0..self.dim / 2).map(|i| self.scale(self.theta.powf(-(2.0 * i as f64) / dim))).collect()
    }

    fn scale(&self, frequency: f64) -> f64 {
        match self.scaling {
            RopeScaling::None => frequency,
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_positions,
            } => {
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
            }
        }
    }

    /// Cosines and sines, each `[positions, head_dim / 2]`, row-major; of pairs that are not rotated 1
    /// and 0. Angles are rounded to f32 before, as transformers does.
    #[must_use]
    pub fn tables(&self, head_dim: usize, positions: usize) -> (Vec<f32>, Vec<f32>) {
        let frequencies: Vec<f32> =
            self.inverse_frequencies().into_iter().map(|f| f as f32).collect();
        let half = head_dim / 2;
        let mut cos = Vec::with_capacity(positions * half);
        let mut sin = Vec::with_capacity(positions * half);
        for position in 0..positions {
            for frequency in &frequencies {
                let angle = f64::from(position as f32 * frequency);
                cos.push(angle.cos() as f32);
                sin.push(angle.sin() as f32);
            }
            cos.resize((position + 1) * half, 1.0);
            sin.resize((position + 1) * half, 0.0);
        }
        (cos, sin)
    }
}
