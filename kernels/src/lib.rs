//! All arithmetic of Tutti, and the only crate with `unsafe`.
//!
//! Map:
//! - [`backend`]: the list of operations a device must offer; shapes and dtypes of every argument
//! - `check`: what all backends ask of their arguments
//! - [`collective`]: how tensor-parallel ranks on CPUs exchange data
//! - [`cpu`]: the CPU backend, SIMD and portable
//! - [`cuda`]: the CUDA backend
//! - [`mapped`]: model files in memory
//! - [`error`]: what can go wrong
//! - [`philox`]: the random numbers of sampling
//! - `pool`: threads that work through tasks
//! - [`mod@reference`]: the float32 backend that is every other backend's oracle
//! - [`sampling`]: the parameters and results of token sampling
//! - [`weights`]: weights as files have them, and how they are quantised
//!
//! Names no other crate of the workspace.

pub mod backend;
mod check;
pub mod collective;
pub mod cpu;
pub mod cuda;
pub mod error;
pub mod mapped;
pub mod philox;
mod pool;
pub mod reference;
pub mod sampling;
pub mod weights;

pub use backend::Backend;
pub use collective::Collective;
pub use cpu::CpuBackend;
pub use error::{CollectiveError, KernelError};
pub use mapped::MappedFile;
pub use reference::ReferenceBackend;
