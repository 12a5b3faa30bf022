//! A model: its configuration, its sharding and its computation.
//!
//! - [`config`]: `config.json`, both dialects, validated
//! - [`safetensors`]: weight files, mapped and checked
//! - [`size`]: PURE: how much memory a shard takes
//! - [`shard`]: PURE: which heads, columns and rows a rank holds
//! - `modules`: PURE: a layer's matrices, and their names in checkpoints
//! - [`lora`]: LoRA adapters beside the model
//! - [`draft`]: a small model that drafts for it
//! - [`experts`]: mixtures of experts: configuration and tensors
//! - [`quantization`]: quantised checkpoints
//! - [`rope`]: PURE: rotary frequencies and their scaling
//! - [`weights`]: one rank's shard, packed for its backend
//! - [`decoder`]: the forward pass, written once over `kernels::Backend`
pub mod config;
pub mod decoder;
pub mod draft;
pub mod experts;
pub mod lora;
pub(crate) mod modules;
pub mod quantization;
pub mod rope;
pub mod safetensors;
pub mod shard;
pub mod size;
pub mod weights;

use std::path::{Path, PathBuf};

/// Why a model folder cannot be used. One sentence each: which file, what in it, and why.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file is missing or cannot be read.
    #[error("{}: {message}", file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// A tensor is missing, or does not match the configuration.
    #[error("{}: tensor {tensor}: {message}", file.display())]
    Tensor {
        /// The file, or the folder when no file has it.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        message: String,
    },
    /// The model cannot be divided among that many ranks.
    #[error("tensor-parallel degree {degree}: {message}")]
    Degree {
        /// The tensor-parallel degree asked for.
        degree: u32,
        /// What does not divide, and which degrees are possible.
        message: String,
    },
    /// The device has too little memory, or does not take the model's sizes.
    #[error("{0}")]
    Fit(String),
    /// The model fits, but not into what is free now: other processes may have taken memory.
    #[error("{0}")]
    FitsLater(String),
    /// The device does not support the requested precision of matrix products.
    #[error("{0}")]
    Dtype(String),
    /// The device failed.
    #[error(transparent)]
    Kernel(#[from] kernels::KernelError),
}

impl ModelError {
    pub(crate) fn file(file: &Path, message: impl Into<String>) -> Self {
        Self::File { file: file.to_owned(), message: message.into() }
    }

    /// Whether another attempt with the same folder and degree is pointless.
    #[must_use]
    pub fn is_permanent(&self) -> bool {
        match self {
            // An unsupported feature stays unsupported; other errors may be temporary.
            Self::Kernel(error) => matches!(error, kernels::KernelError::Unsupported(_)),
            Self::FitsLater(_) => false,
            Self::File { .. }
            | Self::Tensor { .. }
            | Self::Degree { .. }
            | Self::Fit(_)
            | Self::Dtype(_) => true,
        }
    }
}
