//! Vectors of f32 behind one trait, for loops that the compiler does not vectorise by itself (many
//! accumulators in a constant number). Matrix products have their own inner loops.
//!
//! The x86 implementations may only be used in code compiled for, and dispatched to, an instruction
//! set that was detected: that is the caller's part of every SAFETY comment here.

use super::fp8;

mod pairs;

pub(crate) use pairs::{HIGH, LOW, PairSimd};

/// A vector of [`Simd::LANES`] f32.
pub(crate) trait Simd: Copy {
    /// Elements per vector.
    const LANES: usize;
    /// Number of vectors to keep as accumulators.
    const ACCUMULATORS: usize;

    /// `x` in all lanes.
    fn splat(x: f32) -> Self;

    /// Loads the first elements of `values`, which must have at least `LANES`.
    fn load(values: &[f32]) -> Self;

    /// Stores to the first elements of `values`, which must have at least `LANES`.
    fn store(self, values: &mut [f32]);

    /// `self * b + c`, fused where the hardware does it.
    fn mul_add(self, b: Self, c: Self) -> Self;

    /// The maximum of each lane; `floor`'s value where `self` is NaN.
    fn max(self, floor: Self) -> Self;

    /// Runs `work` in a function of its own that is compiled for this instruction set: once, where
    /// inlining compiles a large part of several functions, or of several places in one, for each.
    fn apart<W: Work<Self>>(work: W) -> W::Output;

    /// Loads the values of the first bytes of an FP8 cache ([`super::fp8`]), which must have at
    /// least `LANES`.
    fn load_fp8(bytes: &[u8]) -> Self;

    /// As [`store`](Self::store), but only as far as `values` has room.
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

/// Something to compute with vectors `S`. Not a closure, since nothing says that one is inlined: if
/// it is not, it is compiled for no instruction set in particular, and calls a function for each
/// instruction.
pub(crate) trait Work<S> {
    /// What is computed.
    type Output;

    /// Computes it; must be `#[inline(always)]`.
    fn run(self) -> Self::Output;
}

/// Four lanes in plain Rust.
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

    #[inline(never)]
    fn apart<W: Work<Self>>(work: W) -> W::Output {
        work.run()
    }

    #[inline(always)]
    fn load_fp8(bytes: &[u8]) -> Self {
        Self([bytes[0], bytes[1], bytes[2], bytes[3]].map(fp8::decode))
    }
}

#[cfg(target_arch = "x86_64")]
macro_rules! x86_simd {
    ($vector:ident, $features:literal, $lanes:literal, $accumulators:literal, $splat:ident, $load:ident, $store:ident, $fma:ident, $max:ident, $load_bytes:ident, $fp8:ident) => {
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

            #[inline(always)]
            fn apart<W: Work<Self>>(work: W) -> W::Output {
                #[target_feature(enable = $features)]
                #[inline(never)]
                fn compiled<W: Work<std::arch::x86_64::$vector>>(work: W) -> W::Output {
                    work.run()
                }
                // SAFETY: see the module.
                unsafe { compiled(work) }
            }

            #[inline(always)]
            fn load_fp8(bytes: &[u8]) -> Self {
                let bytes = &bytes[..$lanes];
                // SAFETY: enough bytes (just checked); and see the module.
                unsafe { fp8::x86::$fp8(std::arch::x86_64::$load_bytes(bytes.as_ptr().cast())) }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
x86_simd!(
    __m512,
    "avx512f,avx512bw,avx512vl,avx2,fma",
    16,
    16,
    _mm512_set1_ps,
    _mm512_loadu_ps,
    _mm512_storeu_ps,
    _mm512_fmadd_ps,
    _mm512_max_ps,
    _mm_loadu_si128,
    floats_512
);
#[cfg(target_arch = "x86_64")]
x86_simd!(
    __m256,
    "avx2,fma",
    8,
    8,
    _mm256_set1_ps,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    _mm256_fmadd_ps,
    _mm256_max_ps,
    _mm_loadl_epi64,
    floats_256
);
