//! One rank's model: from a Hugging Face folder to a forward pass.
//!
//! Map:
//! - [`config`]: what the model is (`config.json`, both dialects)
//! - `files`: the safetensors files, mapped and checked
//! - [`shard`]: which part each tensor-parallel rank holds
//! - `weights`: tensor names, shapes, and packing of a shard
//! - `rope`: rotary embedding tables
//! - `decoder`: the forward pass
pub mod config;
pub(crate) mod decoder;
mod fields;
mod files;
mod rope;
pub mod shard;
mod weights;

use std::fmt;
use std::path::Path;

pub use config::ModelConfig;
pub(crate) use decoder::Decoder;
use kernels::backend::{Backend, KvShape};
pub use shard::Shard;

use crate::error::ModelError;

/// Called with the bytes packed so far and the bytes of the whole shard.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64);

/// One rank's shard of a model, on its device. Outlives epochs: a replica that is formed again with
/// the same rank and degree keeps it.
pub struct Model<B: Backend> {
    /// What the model is.
    pub config: ModelConfig,
    /// What this rank holds of it.
    pub shard: Shard,
    weights: weights::Weights<B>,
    /// Their size in the model files, in bytes.
    pub weight_bytes: u64,
}

impl<B: Backend> Model<B> {
    /// Loads the part of the backend's rank from a model folder. `progress` is told the bytes
    /// packed and the bytes of the shard.
    ///
    /// # Errors
    /// [`ModelError`] naming the file, the key or tensor, what was found and what was expected.
    pub fn load(backend: &mut B, dir: &Path, progress: Progress<'_>) -> Result<Self, ModelError> {
        let config = ModelConfig::from_dir(dir)?;
        let shard = Shard::new(&config, backend.rank(), backend.world_size())?;
        let files = files::ModelFiles::open(dir)?;
        let (weights, weight_bytes) = weights::load(backend, &config, &shard, &files, progress)?;
        Ok(Self { config, shard, weights, weight_bytes })
    }

    /// Sizes of this rank's KV cache.
    #[must_use]
    pub fn kv_shape(&self, block_size: usize, num_blocks: usize) -> KvShape {
        KvShape {
            num_layers: self.config.num_layers,
            num_kv_heads: self.shard.kv_heads.len(),
            head_dim: self.config.head_dim,
            block_size,
            num_blocks,
        }
    }
}

impl<B: Backend> fmt::Debug for Model<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model")
            .field("config", &self.config)
            .field("shard", &self.shard)
            .field("weight_bytes", &self.weight_bytes)
            .finish_non_exhaustive()
    }
}
