//! Vectors of f32 under one trait, for loops that the compiler does not vectorize by itself (many
//! accumulators of constant size). Products have their own inner loops.
//!
//! Implementations for x86 must only be used in code that is compiled for, and dispatched on, an
//! instruction set that was detected: that is the callers' side of every SAFETY comment here.

mod pairs;

#[cfg(target_arch = "x86_64")]
pub(crate) use pairs::Bf16;
pub(crate) use pairs::{HIGH, LOW, PairSimd};

/// A vector of [`Simd::LANES`] f32.
pub(crate) trait Simd: Copy {
    /// Elements.
    const LANES: usize;
    /// How many vectors are worth keeping as accumulators.
    const ACCUMULATORS: usize;

    /// All lanes `x`.
    fn splat(x: f32) -> Self;

    /// The first lanes from `values`, of which there must be enough.
    fn load(values: &[f32]) -> Self;

    /// To the first elements of `values`, of which there must be enough.
    fn store(self, values: &mut [f32]);

    /// `self * b + c`, fused where the hardware does it.
    fn mul_add(self, b: Self, c: Self) -> Self;

    /// The larger of each lane; `floor`'s where `self` is NaN.
    fn max(self, floor: Self) -> Self;

    /// As `load`, with zeros where `values` is too short.
    #[inline(always)]
    fn load_some(values: &[f32]) -> Self {
        if values.len() >= Self::LANES {
            return Self::load(values);
        }
        let mut padded = [0.0; 16];
        padded[..values.len()].copy_from_slice(values);
        Self::load(&padded)
    }

    /// As `store`, as far as `values` has room.
    #[inline(always)]
    fn store_some(self, values: &mut [f32]) {
        if values.len() >= Self::LANES {
            return self.store(values);
        }
        let mut padded = [0.0; 16];
        self.store(&mut padded);
        values.copy_from_slice(&padded[..values.len()]);
    }
}

/// Four lanes of plain Rust.
#[derive(Clone, Copy)]
pub(crate) struct Plain([f32; 4]);

impl Simd for Plain {
    const LANES: usize = 4;
    const ACCUMULATORS: usize = 8;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        Self([x; 4])
    }

    #[inline(always)]
    fn load(values: &[f32]) -> Self {
        Self([values[0], values[1], values[2], values[3]])
    }

    #[inline(always)]
    fn store(self, values: &mut [f32]) {
        values[..4].copy_from_slice(&self.0);
    }

    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] * b.0[i] + c.0[i]))
    }

    #[inline(always)]
    fn max(self, floor: Self) -> Self {
        Self(std::array::from_fn(|i| if self.0[i] > floor.0[i] { self.0[i] } else { floor.0[i] }))
    }
}

#[cfg(target_arch = "x86_64")]
macro_rules! x86_simd {
    ($vector:ident, $lanes:literal, $accumulators:literal, $splat:ident, $load:ident, $store:ident, $fma:ident, $max:ident) => {
        impl Simd for std::arch::x86_64::$vector {
            const LANES: usize = $lanes;
            const ACCUMULATORS: usize = $accumulators;

            #[inline(always)]
            fn splat(x: f32) -> Self {
                // SAFETY: see the module.
                unsafe { std::arch::x86_64::$splat(x) }
            }

            #[inline(always)]
            fn load(values: &[f32]) -> Self {
                let values = &values[..$lanes];
                // SAFETY: enough elements (just checked); and see the module.
                unsafe { std::arch::x86_64::$load(values.as_ptr()) }
            }

            #[inline(always)]
            fn store(self, values: &mut [f32]) {
                let values = &mut values[..$lanes];
                // SAFETY: as in `load`.
                unsafe { std::arch::x86_64::$store(values.as_mut_ptr(), self) }
            }

            #[inline(always)]
            fn mul_add(self, b: Self, c: Self) -> Self {
                // SAFETY: see the module.
                unsafe { std::arch::x86_64::$fma(self, b, c) }
            }

            #[inline(always)]
            fn max(self, floor: Self) -> Self {
                // SAFETY: see the module.
                unsafe { std::arch::x86_64::$max(self, floor) }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
x86_simd!(
    __m512,
    16,
    16,
    _mm512_set1_ps,
    _mm512_loadu_ps,
    _mm512_storeu_ps,
    _mm512_fmadd_ps,
    _mm512_max_ps
);
#[cfg(target_arch = "x86_64")]
x86_simd!(
    __m256,
    8,
    8,
    _mm256_set1_ps,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    _mm256_fmadd_ps,
    _mm256_max_ps
);
