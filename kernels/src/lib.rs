//! All arithmetic of Tutti, and the only crate with `unsafe`.
//!
//! Map:
//! - [`backend`]: the operations a device must offer; shapes and dtypes of every argument
//! - `check`: argument checks that all backends share
//! - [`collective`]: data exchange between tensor-parallel ranks on CPUs
//! - [`cpu`]: the CPU backend, SIMD and portable
//! - [`cuda`]: the CUDA backend
//! - [`mapped`]: memory-mapped model files
//! - [`error`]: error types
//! - [`fp8`]: the 8-bit floats of KV caches
//! - [`philox`]: the random numbers of sampling
//! - `pool`: thread pool of the CPU backend
//! - [`process`]: the end of a process that must not wait for anything
//! - [`mod@reference`]: the float32 backend that all other backends are tested against
//! - [`sampling`]: the parameters and results of token sampling
//! - [`weights`]: weights as stored in files, and how they are quantised
//!
//! Depends on no other crate of the workspace.

pub mod backend;
mod check;
pub mod collective;
pub mod cpu;
pub mod cuda;
pub mod error;
pub mod fp8;
pub mod mapped;
pub mod philox;
mod pool;
pub mod process;
pub mod reference;
pub mod sampling;
pub mod weights;

pub use backend::Backend;
pub use collective::Collective;
pub use cpu::CpuBackend;
pub use error::{CollectiveError, KernelError};
pub use mapped::MappedFile;
pub use reference::ReferenceBackend;
