//! The compiled kernels, as this build has them. Owns nothing but the bytes; who loads them is the
//! driver's affair.
//!
//! `kernels/build.rs` compiles them when asked (`TUTTI_CUDA=1`), one image per file of
//! `kernels/cuda`, each with machine code of every architecture named there, and PTX.

// `pub(crate) const IMAGES: &[(&str, &[u8])]`: name of the source file without `.cu`, fatbin.
include!(concat!(env!("OUT_DIR"), "/fatbins.rs"));

/// Whether this build has kernels for GPUs.
pub(crate) const fn built_with_kernels() -> bool {
    !IMAGES.is_empty()
}
