//! A draft model's folder: opened, checked against the model that it drafts for, then loaded whole.
use std::path::Path;

use kernels::Backend;
use shared::protocol::{EngineConfig, Quantization};

use super::ModelError;
use super::config::ModelConfig;
use super::decoder::Decoder;
use super::safetensors::WeightFiles;
use super::shard::Shard;
use super::size::{self, Keeps};
use super::weights::{self, KeptSizes, Source};
use crate::engine::Draft;

/// Weights keep the checkpoint's quantisation.
const QUANTIZATION: Quantization = Quantization::None;

/// A draft model that is opened but not loaded.
#[derive(Debug)]
pub struct DraftFiles {
    config: ModelConfig,
    shard: Shard,
    files: WeightFiles,
}

impl DraftFiles {
    /// Opens a folder and checks that it has the model's vocabulary.
    ///
    /// # Errors
    /// [`ModelError`].
    pub fn open(folder: &Path, model: &ModelConfig) -> Result<Self, ModelError> {
        let config = ModelConfig::load(folder)?;
        if config.vocab_size != model.vocab_size {
            let (own, other) = (config.vocab_size, model.vocab_size);
            let message = format!(
                "vocab_size is {own}, but the model that it drafts for has {other}: both must have \
                 the same tokens"
            );
            return Err(ModelError::file(&folder.join("config.json"), message));
        }
        for (config, what) in [(&config, "it"), (model, "the model that it drafts for")] {
            if config.delta.is_some() {
                let message = format!(
                    "{what} has linear attention: what a rejected draft has changed cannot be \
                     undone"
                );
                return Err(ModelError::file(&folder.join("config.json"), message));
            }
        }
        if config.classifier.is_some() {
            let message = "it sorts texts into classes and drafts no text";
            return Err(ModelError::file(&folder.join("config.json"), message));
        }
        let (shard, files) = (Shard::new(&config, 0, 1)?, WeightFiles::open(folder)?);
        if config.has_own_head() && files.lacks_head() {
            let message = "the weights have no output head (lm_head.weight), so it drafts no text";
            return Err(ModelError::file(folder, message));
        }
        Ok(Self { shard, files, config })
    }

    /// The draft model's configuration, and the whole of it as a share.
    #[must_use]
    pub fn model(&self) -> (&ModelConfig, &Shard) {
        (&self.config, &self.shard)
    }

    /// Length up to which it computes sequences of at most `max_model_len` tokens.
    fn positions(&self, max_model_len: u32) -> u32 {
        let own = u32::try_from(self.config.max_positions).unwrap_or(u32::MAX);
        own.min(max_model_len)
    }

    /// Size of its weights, in bytes.
    ///
    /// # Errors
    /// [`ModelError`].
    pub fn weight_bytes(&self, keeps: Keeps<'_>) -> Result<u64, ModelError> {
        weights::kept_bytes(&self.source(), QUANTIZATION, keeps)
    }

    /// As [`weights::kept_sizes`], of its weights.
    ///
    /// # Errors
    /// [`ModelError`].
    pub fn weight_sizes(&self, keeps: Keeps<'_>) -> Result<KeptSizes, ModelError> {
        weights::kept_sizes(&self.source(), QUANTIZATION, keeps)
    }

    fn source(&self) -> Source<'_> {
        Source { files: &self.files, config: &self.config, shard: &self.shard }
    }

    /// Bytes of its largest step's activations, and of its KV cache for one longest sequence.
    /// `widens` tells whether its largest step converts quantised weights to bf16 first.
    #[must_use]
    pub fn step_bytes(&self, sizes: &EngineConfig, widens: bool) -> (u64, u64) {
        let widens = widens && self.config.quantised.is_some();
        (
            size::activation_bytes(&self.config, &self.shard, widens, sizes),
            size::sequence_bytes(&self.config, &self.shard, sizes),
        )
    }

    /// Loads it on `own` or, if the device has no separate backend for it, on `shared`, the backend
    /// of the model it drafts for.
    ///
    /// # Errors
    /// [`ModelError`].
    pub fn load<B: Backend>(
        self,
        mut own: Option<B>,
        shared: &mut B,
        sizes: &EngineConfig,
    ) -> Result<Draft<B>, ModelError> {
        let positions = self.positions(sizes.max_model_len);
        let backend = own.as_mut().unwrap_or(shared);
        let longest = positions as usize;
        let weights =
            weights::load(backend, &self.source(), QUANTIZATION, longest, &mut |_, _| {})?;
        let Self { config, shard, .. } = self;
        let decoder = Decoder::new(backend, config, shard, weights, sizes)?;
        Ok(Draft::new(own, decoder, positions))
    }
}
