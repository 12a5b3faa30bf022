//! An adapter's folder: its configuration and its matrices, checked against the model.
use std::path::Path;

use kernels::backend::DType;
use kernels::weights;
use shared::model_identity::ModelIdentity;
use shared::protocol::Adapter;

use super::config::LoraConfig;
use crate::model::ModelError;
use crate::model::config::ModelConfig;
use crate::model::modules::{Module, Place};
use crate::model::rope::RopeConfig;
use crate::model::safetensors::{TensorView, WeightFiles};

/// Modules outside layers, which adapters cannot change.
const BESIDE_LAYERS: [&str; 2] = ["embed_tokens", "lm_head"];

/// An adapter whose matrices are checked, but not read yet.
#[derive(Debug)]
pub(super) struct AdapterFiles {
    adapter: Adapter,
    /// What the folder contains.
    identity: Option<ModelIdentity>,
    config: LoraConfig,
    files: WeightFiles,
}

/// The two matrices, A and B, of a module.
#[derive(Clone, Copy, Debug)]
pub(super) struct Factors<'a> {
    a: TensorView<'a>,
    /// B of all modules that the adapter stores as one.
    b: TensorView<'a>,
    /// First row of B that belongs to the module.
    first: usize,
    /// Head size and rotary embedding, if the module's outputs are rotated heads.
    heads: Option<(usize, &'a RopeConfig)>,
    pub(super) rank: usize,
    pub(super) scale: f32,
}

impl AdapterFiles {
    /// Opens an adapter's folder and checks everything in it.
    ///
    /// # Errors
    /// [`ModelError`] naming the adapter's file and what is wrong with it.
    pub(super) fn open(
        adapter: &Adapter,
        config: &ModelConfig,
        max_rank: usize,
    ) -> Result<Self, ModelError> {
        let folder = Path::new(&adapter.path);
        let own = LoraConfig::load(folder, max_rank)?;
        let path = folder.join("adapter_model.safetensors");
        if !path.is_file() && folder.join("adapter_model.bin").is_file() {
            let message = "is missing; adapter_model.bin is not read, since it can contain code: \
                           save the adapter with safe_serialization";
            return Err(ModelError::file(&path, message));
        }
        let files = WeightFiles::of_file(path)?;
        let identity = ModelIdentity::of_adapter(folder).ok();
        let opened = Self { adapter: adapter.clone(), identity, config: own, files };
        opened.check(config)?;
        if adapter.identity.is_some() && adapter.identity != identity {
            let message = "has other contents than when the adapter was loaded: unload it, and \
                           load it again";
            return Err(ModelError::file(folder, message));
        }
        Ok(opened)
    }

    pub(super) fn adapter(&self) -> &Adapter {
        &self.adapter
    }

    pub(super) fn identity(&self) -> Option<ModelIdentity> {
        self.identity
    }

    /// Checks that every tensor belongs to a module that adapters may change, and that every module
    /// has both matrices.
    fn check(&self, config: &ModelConfig) -> Result<(), ModelError> {
        let mut found = Vec::new();
        for tensor in self.files.names() {
            let wrong = |message: String| self.wrong(tensor, message);
            found.extend(places(tensor, config).map_err(wrong)?);
        }
        for (layer, module) in &found {
            self.factors(*layer, *module, config)?;
        }
        if found.is_empty() {
            return Err(self.wrong("*.lora_A.weight", "is missing: the file has none".to_owned()));
        }
        for target in &self.config.targets {
            let is_named = |name: &str| {
                let ends = |name: &str, with: &str| {
                    name.strip_suffix(with).is_some_and(|it| it.is_empty() || it.ends_with('.'))
                };
                ends(name, target) || ends(target, name)
            };
            if found.iter().any(|(_, module)| is_named(module.place(config).name)) {
                continue;
            }
            let known = Module::ALL.into_iter().filter(|module| module.is_known(config));
            let mut known = known.map(|module| module.place(config).name).chain(BESIDE_LAYERS);
            if known.any(is_named) {
                let message = "is missing, but target_modules in adapter_config.json names it";
                return Err(self.wrong(target, message.to_owned()));
            }
            // As in PEFT, a list may name modules of several families.
            let adapter = self.adapter.name.as_str();
            tracing::warn!(
                adapter,
                target,
                "target_modules names a module that the model does not have; it is left out"
            );
        }
        Ok(())
    }

    /// Returns the matrices of a module; `None` if the adapter does not change it.
    ///
    /// # Errors
    /// [`ModelError::Tensor`] if one of the two is missing, or does not match the model or the
    /// configuration.
    pub(super) fn factors<'a>(
        &'a self,
        layer: usize,
        module: Module,
        config: &'a ModelConfig,
    ) -> Result<Option<Factors<'a>>, ModelError> {
        let Place { name, shape: [rows, cols], first } = module.place(config);
        let name = format!("model.layers.{layer}.{name}");
        let tensor = |which: &str| format!("base_model.model.{name}.{which}.weight");
        let [a_name, b_name] = ["lora_A", "lora_B"].map(tensor);
        if !self.files.has(&a_name) && !self.files.has(&b_name) {
            return Ok(None);
        }
        let wrong = |message: String| self.wrong(&a_name, message);
        let rank = self.config.rank(&name).map_err(wrong)?;
        let scale = self.config.scale(&name).map_err(wrong)?;
        let a = self.matrix(&a_name, [rank, cols])?;
        let b = self.matrix(&b_name, [rows, rank])?;
        let is_rotated = matches!(module, Module::Q | Module::K);
        let heads = is_rotated.then_some((config.head_dim, &config.ropes[layer]));
        Ok(Some(Factors { a, b, first, heads, rank, scale }))
    }

    fn matrix(&self, name: &str, shape: [usize; 2]) -> Result<TensorView<'_>, ModelError> {
        let view = self.files.any_tensor(name, None)?;
        if let DType::F8E4M3 | DType::I8 = view.dtype {
            let message = format!("is of type {:?}; it must be BF16, F16 or F32", view.dtype);
            return Err(self.wrong(name, message));
        }
        if view.shape != shape {
            let message = format!(
                "has shape {:?}; the model and adapter_config.json require {shape:?}",
                view.shape
            );
            return Err(self.wrong(name, message));
        }
        Ok(view)
    }

    fn wrong(&self, tensor: &str, message: String) -> ModelError {
        let file = self.files.folder().join("adapter_model.safetensors");
        ModelError::Tensor { file, tensor: tensor.to_owned(), message }
    }
}

/// Returns the layer and modules that a tensor belongs to; several if the model stores them as one.
fn places(tensor: &str, config: &ModelConfig) -> Result<Vec<(usize, Module)>, String> {
    if BESIDE_LAYERS.iter().any(|it| tensor.split('.').any(|part| part == *it)) {
        return Err("adapters of embeddings and output heads are not supported".to_owned());
    }
    let module = tensor
        .strip_suffix(".lora_A.weight")
        .or_else(|| tensor.strip_suffix(".lora_B.weight"))
        .ok_or("is neither a lora_A.weight nor a lora_B.weight of a module")?;
    let Some(rest) = module.strip_prefix("base_model.model.model.layers.") else {
        let what = "does not belong to one of the model's layers (base_model.model.model.layers.N)";
        return Err(what.to_owned());
    };
    if rest.contains(".experts.") || rest.contains("block_sparse_moe") {
        return Err("adapters of experts are not supported".to_owned());
    }
    let (layer, name) = rest.split_once('.').unwrap_or((rest, ""));
    let known: Vec<Module> = Module::ALL.into_iter().filter(|it| it.is_known(config)).collect();
    let is_it = |module: &Module| module.place(config).name == name;
    let modules: Vec<Module> = known.iter().copied().filter(is_it).collect();
    if modules.is_empty() {
        let mut names: Vec<&str> = known.iter().map(|module| module.place(config).name).collect();
        names.dedup();
        let names = names.join(", ");
        return Err(format!("belongs to none of the modules that adapters can change: {names}"));
    }
    let count = config.num_layers;
    let is_there = |index: &usize| *index < count && index.to_string() == layer;
    let index: Option<usize> = layer.parse().ok().filter(is_there);
    let index =
        index.ok_or_else(|| format!("belongs to layer {layer}, but the model has {count}"))?;
    if modules.iter().any(|module| !module.is_in(config, index)) {
        return Err(format!("layer {index} has experts: adapters of them are not supported"));
    }
    Ok(modules.into_iter().map(|module| (index, module)).collect())
}

impl Factors<'_> {
    /// Writes `cols` columns of A, from `first` on, to the rows of `out`, `[rank, cols]`.
    pub(super) fn write_a(&self, first: usize, cols: usize, out: &mut [f32]) {
        for (row, out) in out.chunks_exact_mut(cols.max(1)).take(self.rank).enumerate() {
            widen(&self.a, row, first, out);
        }
    }

    /// Writes the row of B for output `row` of the module, scaled: `rank` elements.
    pub(super) fn write_b(&self, row: usize, out: &mut [f32]) {
        let row = match self.heads {
            Some((head_dim, rope)) => {
                row / head_dim * head_dim + rope.source(head_dim, row % head_dim)
            }
            None => row,
        };
        widen(&self.b, self.first + row, 0, out);
        out.iter_mut().for_each(|x| *x *= self.scale);
    }
}

/// Converts a row's columns, from `first` on, to f32.
fn widen(tensor: &TensorView<'_>, row: usize, first: usize, out: &mut [f32]) {
    let size = tensor.dtype.bytes();
    let start = (row * tensor.shape[1] + first) * size;
    weights::widen(tensor.dtype, &tensor.data[start..][..out.len() * size], out);
}
