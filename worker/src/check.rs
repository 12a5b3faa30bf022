//! What a model folder needs of a host, read from its headers and norms: no matrix is loaded.
use std::path::Path;

use shared::model_config::ConfigOverrides;
use shared::protocol::{Lora, Quantization};

use crate::model::ModelError;
use crate::model::config::ModelConfig;
use crate::model::draft::DraftFiles;
use crate::model::lora::LoraFiles;
use crate::model::safetensors::WeightFiles;
use crate::model::shard::Shard;
use crate::model::weights::{self, Source};

/// What a model needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelNeeds {
    /// Number of its weight files.
    pub files: usize,
    /// Size of its weights as ranks keep them, summed over all ranks, in bytes.
    pub weight_bytes: u64,
    /// Size of the states of linear attention of one sequence, summed over all ranks, in bytes.
    pub state_bytes: u64,
    /// Number of decoder layers.
    pub layers: usize,
    /// Maximum sequence length that it supports, in tokens.
    pub max_positions: usize,
}

/// Whether a folder has weight files at all.
#[must_use]
pub fn has_weights(folder: &Path) -> bool {
    ["model.safetensors", "model.safetensors.index.json"]
        .iter()
        .any(|file| folder.join(file).exists())
}

/// Reads only the folder's configuration, with `overrides` laid over it, and checks that `degree`
/// ranks can divide the model.
///
/// # Errors
/// [`ModelError`], with the sentence that a worker would end with.
pub fn degree(folder: &Path, overrides: &ConfigOverrides, degree: u32) -> Result<(), ModelError> {
    Shard::new(&ModelConfig::load_with(folder, overrides)?, 0, degree).map(drop)
}

/// Reads the folder's configuration and the headers of its weight files. Checks that `degree` ranks
/// can divide the model, and that the tensors of its first and last layers, the embedding and the
/// output head exist with the shapes that the configuration demands, quantised ones with their
/// scales.
///
/// # Errors
/// [`ModelError`], with the sentence that a worker would end with.
pub fn model(
    folder: &Path,
    degree: u32,
    quantization: Quantization,
) -> Result<ModelNeeds, ModelError> {
    model_with(folder, &ConfigOverrides::default(), degree, quantization)
}

/// The same with `overrides` laid over the folder's configuration.
///
/// # Errors
/// As [`model`].
pub fn model_with(
    folder: &Path,
    overrides: &ConfigOverrides,
    degree: u32,
    quantization: Quantization,
) -> Result<ModelNeeds, ModelError> {
    let config = ModelConfig::load_with(folder, overrides)?;
    let part = Shard::new(&config, 0, degree)?;
    let whole = Shard::new(&config, 0, 1)?;
    let files = WeightFiles::open(folder)?;
    let source = Source { files: &files, config: &config, shard: &whole };
    weights::check(&source)?;
    let (count, stored_bytes) = files.size(config.num_layers);
    // Assumes that matrices of 4 bits and in FP8 stay as they are, as on CPUs.
    let bytes =
        |shard| weights::kept_bytes(&Source { shard, ..source }, quantization, &|_, _| true);
    // Otherwise ranks keep what the files have, or less.
    let weight_bytes = match (quantization, config.quantised, config.latent) {
        // What makes latents is on every rank.
        (.., Some(_)) => bytes(&part)? * u64::from(degree),
        (Quantization::None, None, None) => stored_bytes,
        _ => bytes(&whole)?,
    };
    let (layers, max_positions) = (config.num_layers, config.max_positions);
    let state_bytes = whole.states(&config, 1).map_or(0, |states| states.bytes() as u64);
    Ok(ModelNeeds { files: count, weight_bytes, state_bytes, layers, max_positions })
}

/// Opens adapters' folders and checks them against the model. Returns the memory that they need on
/// each of `degree` ranks, in bytes.
///
/// # Errors
/// [`ModelError`], with the sentence that a worker would end with.
pub fn adapters(
    folder: &Path,
    overrides: &ConfigOverrides,
    lora: &Lora,
    degree: u32,
) -> Result<u64, ModelError> {
    let config = ModelConfig::load_with(folder, overrides)?;
    let shard = Shard::new(&config, 0, degree)?;
    let (matrices, _) = LoraFiles::open(lora, &config)?.bytes(&config, &shard, 0)?;
    Ok(matrices)
}

/// Opens a draft model's folder and checks it against the model, over whose configuration alone
/// `overrides` are laid. Returns the memory that its weights need on the rank that drafts, in
/// bytes; its KV is part of that rank's KV cache.
///
/// # Errors
/// [`ModelError`], with the sentence that a worker would end with.
pub fn draft(folder: &Path, overrides: &ConfigOverrides, draft: &Path) -> Result<u64, ModelError> {
    DraftFiles::open(draft, &ModelConfig::load_with(folder, overrides)?)?;
    Ok(model(draft, 1, Quantization::None)?.weight_bytes)
}

/// Shared memory that `workers` workers on one host need, in groups of `degree`, in bytes: while a
/// group is formed again, the old region may still exist beside the new one.
#[must_use]
pub fn shared_memory_bytes(workers: u32, degree: u32) -> u64 {
    let group = kernels::collective::shared_memory_bytes(degree as usize) as u64;
    if degree < 2 { 0 } else { u64::from(workers.div_ceil(degree)) * group * 2 }
}
