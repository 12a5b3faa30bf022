//! All arithmetic of Tutti, and the only crate with `unsafe`.
//!
//! Map:
//! - [`backend`]: the list of operations a device must offer; shapes and dtypes of every argument
//! - [`collective`]: how tensor-parallel ranks on CPUs exchange data
//! - [`cpu`]: the CPU backend, SIMD and portable
//! - [`error`]: what can go wrong
//! - [`philox`]: the random numbers of sampling
//! - [`sampling`]: the parameters and results of token sampling
//!
//! Names no other crate of the workspace.

pub mod backend;
pub mod collective;
pub mod cpu;
pub mod error;
pub mod philox;
pub mod sampling;

pub use backend::Backend;
pub use collective::Collective;
pub use cpu::CpuBackend;
pub use error::{CollectiveError, KernelError};
