//! The vector instruction sets, and their detection. The kernels themselves are elsewhere.
use std::fmt;

/// A vector instruction set, chosen once at run time.
///
/// Results of different sets differ in the last bits; within one set they depend only on the
/// operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// AVX-512 with bf16 dot products: activations are one bf16 term, or two for f32 precision.
    Avx512Bf16,
    /// AVX-512: bf16 weights are widened to f32, then fused multiply-added.
    Avx512,
    /// AVX2 and FMA, otherwise as [`Isa::Avx512`].
    Avx2Fma,
    /// Plain loops, as the compiler translates them; for every architecture.
    Portable,
}

impl Isa {
    /// All sets, the fastest first.
    pub const ALL: [Self; 4] = [Self::Avx512Bf16, Self::Avx512, Self::Avx2Fma, Self::Portable];

    /// The fastest set that this machine supports.
    #[must_use]
    pub fn detect() -> Self {
        Self::ALL.into_iter().find(|isa| isa.is_supported()).unwrap_or(Self::Portable)
    }

    /// Whether this machine supports it.
    #[must_use]
    pub fn is_supported(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl");
            match self {
                Self::Avx512Bf16 => avx512 && is_x86_feature_detected!("avx512bf16"),
                Self::Avx512 => avx512,
                Self::Avx2Fma => avx2,
                Self::Portable => true,
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            self == Self::Portable
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Avx512Bf16 => "avx512_bf16",
            Self::Avx512 => "avx512",
            Self::Avx2Fma => "avx2_fma",
            Self::Portable => "portable",
        })
    }
}

/// Compiles the body of a plain Rust function once per instruction set, so that the compiler
/// vectorises it for each, and defines a function that dispatches to the right copy.
///
/// The body's first parameter is `const FMA: bool`: whether the hardware has fused multiply-add.
macro_rules! multiversion {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments, reason = "mirrors the body's arguments")]
        $vis fn $name(isa: $crate::cpu::isa::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            #[allow(clippy::too_many_arguments, reason = "mirrors the body's arguments")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
            fn avx512($($arg: $ty),*) $(-> $ret)? {
                $body::<true>($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[allow(clippy::too_many_arguments, reason = "mirrors the body's arguments")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $ty),*) $(-> $ret)? {
                $body::<true>($($arg),*)
            }
            match isa {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the backend refuses an instruction set that this machine lacks.
                $crate::cpu::isa::Isa::Avx512Bf16 | $crate::cpu::isa::Isa::Avx512 => unsafe { avx512($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                $crate::cpu::isa::Isa::Avx2Fma => unsafe { avx2($($arg),*) },
                _ => $body::<false>($($arg),*),
            }
        }
    };
}
pub(crate) use multiversion;
