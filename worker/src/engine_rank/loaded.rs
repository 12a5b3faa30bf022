//! What a rank has loaded, and how it loads.
use std::path::Path;
use std::time::Duration;

use kernels::collective::single_rank;
use kernels::{Collective, KernelError};
use shared::model_config::ConfigOverrides;
use shared::model_identity::ModelIdentity;
use shared::protocol::{Dtype, EngineConfig, Form, KvCacheDtype, Lora, Quantization};

use super::host::ranks_here;
use super::joining::{Formation, join};
use crate::device::{Device, ShardOptions, bytes_text};
use crate::engine::Engine;
use crate::model::ModelError;
use crate::model::config::ModelConfig;
use crate::model::decoder::Decoder;
use crate::model::draft::DraftFiles;
use crate::model::lora::LoraFiles;
use crate::model::safetensors::WeightFiles;
use crate::model::shard::Shard;
use crate::model::weights::{self, Source};

/// Identifies what was loaded; a request with an equal key needs no loading.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LoadedKey {
    model: String,
    lora: Lora,
    /// Folder of rank 0's draft model, and its identity.
    draft: Option<(String, Option<ModelIdentity>)>,
    /// Identity of the contents of the model's folder, and of the adapters' if they never change.
    pub(super) identity: ModelIdentity,
    config_overrides: ConfigOverrides,
    dtype: Dtype,
    quantization: Quantization,
    rank: u32,
    world_size: u32,
    reduction_ranks: u32,
    max_model_len: u32,
    max_num_seqs: u32,
    prefix_states: u32,
}

impl LoadedKey {
    pub(super) fn new(form: &Form, identity: ModelIdentity) -> Self {
        let sizes = &form.engine;
        Self {
            model: form.model.clone(),
            lora: form.lora.lasting(),
            draft: draft_model(form).map(|folder| {
                let identity = ModelIdentity::read(Path::new(folder), &Lora::default());
                (folder.to_owned(), identity.ok())
            }),
            identity,
            config_overrides: form.config_overrides.clone(),
            dtype: form.dtype,
            quantization: form.quantization,
            rank: form.rank,
            world_size: form.world_size,
            reduction_ranks: form.reduction_ranks,
            max_model_len: sizes.max_model_len,
            max_num_seqs: sizes.max_num_seqs,
            prefix_states: sizes.prefix_states,
        }
    }
}

/// A loaded shard.
pub(super) struct LoadedShard<D: Device> {
    pub(super) engine: Engine<D::Backend>,
    pub(super) key: LoadedKey,
    /// The largest steps that there is room for, in tokens. Weights do not depend on it.
    pub(super) step_tokens: u32,
    /// It has not served yet.
    pub(super) is_new: bool,
}

impl<D: Device> LoadedShard<D> {
    /// As [`Device::set_patience`], for all models.
    pub(super) fn set_patience(&mut self, patience: Option<Duration>) {
        D::set_patience(self.engine.backend(), patience);
        if let Some(own) = self.engine.draft_backend() {
            D::set_patience(own, patience);
        }
    }

    /// Checks, before anything is given up, that it can have these sizes.
    ///
    /// # Errors
    /// [`ModelError`].
    pub(super) fn check(&mut self, device: &D, sizes: &EngineConfig) -> Result<(), ModelError> {
        self.engine.models().try_for_each(|model| device.check_limits(model, sizes))?;
        // Smaller steps only give memory back.
        if sizes.max_num_batched_tokens <= self.step_tokens {
            return Ok(());
        }
        let before = EngineConfig { max_num_batched_tokens: self.step_tokens, ..sizes.clone() };
        device.check_steps(&mut self.engine, self.key.quantization, [&before, sizes])
    }
}

/// Loads what `joining` asks for, and joins the other ranks on the way.
///
/// # Errors
/// [`ModelError`].
pub(super) fn load<D: Device>(
    device: &D,
    collective: Box<dyn Collective>,
    joining: &mut Formation<'_>,
) -> Result<Engine<D::Backend>, ModelError> {
    let form = joining.form;
    let folder = Path::new(&form.model);
    let config = ModelConfig::load_with(folder, &form.config_overrides)?;
    let shard = Shard::new(&config, form.rank, form.world_size)?
        .with_reduction(&config, form.reduction_ranks)?;
    let files = WeightFiles::open(folder)?;
    let adapters = LoraFiles::open(&form.lora, &config)?;
    let draft = draft_model(form).map(|folder| DraftFiles::open(Path::new(folder), &config));
    let draft = draft.transpose()?;
    if files.has_kv_scales() {
        match form.engine.kv_cache_dtype {
            KvCacheDtype::Fp8 => tracing::warn!(
                "the checkpoint has scales for a KV cache in FP8; they are not used: keys and \
                 values beyond 448 become 448"
            ),
            KvCacheDtype::Auto => tracing::info!(
                "the checkpoint was made for a KV cache in FP8, which --kv-cache-dtype fp8 asks for"
            ),
        }
    }
    let precision = device.precision(form.dtype, &config)?;
    let mut backend = device.backend(precision, collective)?;
    // Join now, because ranks that have already loaded wait for this one. If they leave while it
    // loads, it learns that when it first needs them; its weights are good for the next epoch.
    join::<D>(&mut backend, joining)?;
    D::set_alone(&mut backend, true);
    let positions = form.engine.max_model_len as usize;
    if positions > config.max_positions {
        let message = format!(
            "max_position_embeddings is {}, below the max_model_len asked for ({positions})",
            config.max_positions
        );
        return Err(ModelError::file(&folder.join("config.json"), message));
    }
    let (quantization, adapting) = (form.quantization, &adapters);
    let ranks_here = ranks_here(form);
    let beside =
        ShardOptions { quantization, adapters: adapting, draft: draft.as_ref(), ranks_here };
    let source = Source { files: &files, config: &config, shard: &shard };
    for model in [(&config, &shard)].into_iter().chain(draft.as_ref().map(DraftFiles::model)) {
        device.check_limits(model, &form.engine)?;
    }
    device.check_fit(&backend, &source, beside, &form.engine)?;
    let mut progress = |done, total| joining.observer.progress(done, total);
    let weights =
        weights::load(&mut backend, &source, form.quantization, positions, &mut progress)?;
    let tokens_max = form.engine.max_num_batched_tokens as usize;
    let adapters = adapters.load(&mut backend, &config, &shard, tokens_max)?;
    if let Some(loaded) = &adapters {
        let bytes = bytes_text(loaded.bytes());
        tracing::info!(places = loaded.count(), bytes, "room for LoRA adapters");
    }
    let decoder =
        Decoder::new(&mut backend, config, shard, weights, &form.engine)?.with_adapters(adapters);
    let draft = match draft {
        Some(files) => {
            let own = device.draft_backend()?;
            Some(files.load(own, &mut backend, &form.engine)?)
        }
        None => None,
    };
    let mut engine = Engine::new(backend, decoder, form.engine.clone()).with_draft(draft);
    device.prepare(&mut engine)?;
    D::set_alone(engine.backend(), false);
    Ok(engine)
}

/// Makes room for steps of another size beside the same weights. What ranks that leave meanwhile
/// have to say counts when they are next needed, as while weights are loaded.
///
/// # Errors
/// [`KernelError`]; the weights are gone.
pub(super) fn resize<D: Device>(
    device: &D,
    loaded: LoadedShard<D>,
    sizes: &EngineConfig,
) -> Result<LoadedShard<D>, KernelError> {
    let LoadedShard { mut engine, key, step_tokens: before, is_new } = loaded;
    let step_tokens = sizes.max_num_batched_tokens;
    tracing::info!(step_tokens, before, "steps are of another size; the weights stay");
    D::set_alone(engine.backend(), true);
    let mut engine = engine.resized(sizes.clone())?;
    device.prepare(&mut engine)?;
    D::set_alone(engine.backend(), false);
    Ok(LoadedShard { engine, key, step_tokens, is_new })
}

/// Lets the draft model's own backend, which is in no collective, drop what it recorded in an
/// epoch, since the next epoch has another cache.
pub(super) fn rest_draft<D: Device>(engine: &mut Engine<D::Backend>) -> Result<(), KernelError> {
    let own = engine.draft_backend();
    own.map_or(Ok(()), |own| D::set_collective(own, single_rank()))
}

/// The draft model's folder, if this rank is to load it.
fn draft_model(form: &Form) -> Option<&str> {
    form.draft_model.as_deref().filter(|_| form.rank == 0)
}
