//! The compiled kernels embedded in this build. Owns only the bytes; `module` loads them.
//!
//! `kernels/build.rs` compiles them on request (`TUTTI_CUDA=1`): one image per file of
//! `kernels/cuda`, each with machine code for every architecture named there, and PTX.

// `pub(crate) const IMAGES: &[(&str, &[u8])]`: name of the source file without `.cu`, fatbin.
include!(concat!(env!("OUT_DIR"), "/fatbins.rs"));

/// Whether this build has kernels for GPUs.
pub(crate) const fn built_with_kernels() -> bool {
    !IMAGES.is_empty()
}
