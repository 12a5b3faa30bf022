//! PURE: element types of model files, and their conversion to f32.
use half::{bf16, f16};

/// Element type of a tensor in a model file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DType {
    /// bfloat16, little endian.
    Bf16,
    /// IEEE half, little endian.
    F16,
    /// IEEE single, little endian.
    F32,
    /// FP8: 4 bits of exponent, 3 of mantissa, no infinities (OCP's E4M3, PyTorch's `e4m3fn`).
    F8E4M3,
    /// Signed integers of 8 bits.
    I8,
    /// Powers of two: an 8-bit exponent with a bias of 127; all ones is NaN (OCP's E8M0).
    E8M0,
    /// Not in the matrix's `data`: see [`Scales`](super::Scales).
    Packed,
}

impl DType {
    /// Maximum number of bytes per element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F8E4M3 | Self::I8 | Self::E8M0 | Self::Packed => 1,
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

/// Converts elements to f32, which is exact; stops at the end of the shorter slice.
pub fn widen(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        DType::Bf16 => {
            for (to, &from) in out.iter_mut().zip(bytes.as_chunks().0) {
                *to = bf16::from_le_bytes(from).to_f32();
            }
        }
        DType::F16 => {
            for (to, &from) in out.iter_mut().zip(bytes.as_chunks().0) {
                *to = f16::from_le_bytes(from).to_f32();
            }
        }
        DType::F32 => {
            for (to, &from) in out.iter_mut().zip(bytes.as_chunks().0) {
                *to = f32::from_le_bytes(from);
            }
        }
        DType::F8E4M3 => {
            for (to, &from) in out.iter_mut().zip(bytes) {
                *to = F8E4M3[usize::from(from)];
            }
        }
        DType::I8 => {
            for (to, &from) in out.iter_mut().zip(bytes) {
                *to = f32::from(from.cast_signed());
            }
        }
        DType::E8M0 => {
            for (to, &from) in out.iter_mut().zip(bytes) {
                *to = match from {
                    0 => f32::from_bits(1 << 22),
                    0xff => f32::NAN,
                    exponent => f32::from_bits(u32::from(exponent) << 23),
                };
            }
        }
        // `data` holds no elements.
        DType::Packed => out.fill(f32::NAN),
    }
}

/// Value of each byte of FP8.
const F8E4M3: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        let (exponent, mantissa) = (byte as u32 >> 3 & 15, byte as u32 & 7);
        let magnitude = if exponent == 15 && mantissa == 7 {
            f32::NAN.to_bits()
        } else if exponent > 0 {
            // The bias is 7; that of f32 is 127.
            ((exponent + 120) << 23) | (mantissa << 20)
        } else {
            // Multiples of 2^-9, which are normal numbers in f32.
            (mantissa as f32 / 512.0).to_bits()
        };
        table[byte] = f32::from_bits(magnitude | (byte as u32 >> 7) << 31);
        byte += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fp8_has_its_known_values() {
        // From OCP's table of E4M3.
        let known = [
            (0x00, 0.0),
            (0x01, 0.001_953_125),
            (0x07, 0.013_671_875),
            (0x08, 0.015_625),
            (0x38, 1.0),
            (0x3c, 1.5),
            (0x7e, 448.0),
            (0xfe, -448.0),
            (0xb8, -1.0),
        ];
        for (byte, value) in known {
            assert_eq!(F8E4M3[byte].to_bits(), f32::to_bits(value), "{byte:#x}");
        }
        assert!(F8E4M3[0x7f].is_nan() && F8E4M3[0xff].is_nan());
        assert_eq!(F8E4M3[0x80].to_bits(), (-0.0f32).to_bits());
        assert_eq!(F8E4M3.iter().filter(|x| x.is_finite()).count(), 254);
        // Sorted by value.
        assert!(F8E4M3[..0x7f].is_sorted() && (0..0x7e).all(|i| F8E4M3[i] < F8E4M3[i + 1]));
    }

    #[test]
    fn powers_of_two_have_their_known_values() {
        let mut all = [0.0; 256];
        widen(DType::E8M0, &std::array::from_fn::<_, 256, _>(|i| i as u8), &mut all);
        assert_eq!((all[127], all[128], all[120]), (1.0, 2.0, 1.0 / 128.0));
        assert!((0..255).all(|i| f64::from(all[i]) == 2f64.powi(i as i32 - 127)));
        assert!(all[255].is_nan());
    }
}
