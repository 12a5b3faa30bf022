//! Weight files: `model.safetensors`, or shards with an index; memory-mapped, checked, and never
//! copied as a whole.
//!
//! Headers are bounded and validated before any tensor is accessed: all offsets lie within the
//! file, so a truncated file is an error here rather than a fault later.
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use kernels::backend::{DType, HostMatrix, Scales};
use kernels::mapped::MappedFile;
use kernels::weights::widen;
use safetensors::tensor::{Metadata, TensorInfo};

use super::ModelError;

/// Largest accepted header, in bytes: far above any model's.
const HEADER_MAX: u64 = 16 << 20;

/// A tensor in its file.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// Its shape.
    pub shape: &'a [usize],
    /// Its element type.
    pub dtype: DType,
    /// Its bytes, row-major.
    pub data: &'a [u8],
    /// Factors of its elements, if it is quantised.
    pub scales: Option<Scales<'a>>,
    /// The file, for error messages.
    pub file: &'a Path,
}

impl<'a> TensorView<'a> {
    /// Rows (all outer dimensions merged) and columns; for packed integers, those of the weights.
    pub(crate) fn size(&self) -> (usize, usize) {
        if let Some(Scales::Packed(packed)) = &self.scales {
            return (packed.rows, packed.cols);
        }
        let cols = self.shape.last().copied().unwrap_or(0);
        (self.shape.iter().rev().skip(1).product(), cols)
    }

    /// Cuts out a rectangle of its rows and columns.
    pub(crate) fn cut(&self, rows: Range<usize>, cols: Range<usize>) -> HostMatrix<'a> {
        let stride = self.size().1;
        let data: &'a [u8] = match &self.scales {
            Some(Scales::Packed(_)) => &[],
            _ => {
                let row_bytes = stride * self.dtype.bytes();
                &self.data[rows.start * row_bytes..rows.end * row_bytes]
            }
        };
        HostMatrix {
            data,
            dtype: self.dtype,
            rows: rows.len(),
            cols: cols.len(),
            col_start: cols.start,
            row_stride: stride,
            scales: self.scales.map(|scales| scales.behind(rows.start)),
        }
    }
}

/// A tensor of integers in its file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IntegersView<'a> {
    /// Shape of the tensor.
    pub(crate) shape: &'a [usize],
    /// Bytes per integer: 4 or 8.
    pub(crate) size: usize,
    /// Bytes of the integers.
    pub(crate) data: &'a [u8],
    /// The file, for error messages.
    pub(crate) file: &'a Path,
}

#[derive(Debug)]
struct WeightFile {
    path: PathBuf,
    map: MappedFile,
    metadata: Metadata,
    /// Offset of the first tensor's data in the file.
    data_start: usize,
}

/// All tensors of a model folder.
#[derive(Debug)]
pub struct WeightFiles {
    folder: PathBuf,
    files: Vec<WeightFile>,
    /// Place of each tensor, by its name in a text-only model.
    tensors: BTreeMap<String, Place>,
}

#[derive(Debug)]
struct Place {
    /// Index of the file.
    file: usize,
    /// Name of the tensor in that file.
    name: String,
}

/// A tensor and its bytes.
struct Found<'a> {
    file: &'a Path,
    name: &'a str,
    info: &'a TensorInfo,
    data: &'a [u8],
}

/// Returns the name that a tensor has in a text-only model. Multimodal models add the prefix
/// `language_model` (as saved by transformers 4) or `model.language_model` (its naming since then);
/// adapters put their own prefix before that, and those of a base model lack its `model`.
fn name_alone(name: &str) -> String {
    let adapter = "base_model.model.";
    let (before, name) = match name.strip_prefix(adapter) {
        Some(name) => (adapter, name),
        None => ("", name),
    };
    match (name.strip_prefix("language_model."), name.strip_prefix("model.language_model.")) {
        (Some(own), _) => format!("{before}{own}"),
        (_, Some(own)) => format!("{before}model.{own}"),
        _ if !before.is_empty() && name.starts_with("layers.") => format!("{before}model.{name}"),
        _ => format!("{before}{name}"),
    }
}

impl WeightFiles {
    /// Maps the folder's weight files and checks their headers.
    ///
    /// # Errors
    /// [`ModelError::File`].
    pub fn open(folder: &Path) -> Result<Self, ModelError> {
        let single = folder.join("model.safetensors");
        let index = folder.join("model.safetensors.index.json");
        let mut opened =
            Self { folder: folder.to_owned(), files: Vec::new(), tensors: BTreeMap::new() };
        if index.is_file() {
            opened.open_index(&index)?;
        } else if single.is_file() {
            let file = WeightFile::open(single)?;
            opened.add(file)?;
        } else {
            let message = "is missing, and so is model.safetensors.index.json";
            return Err(ModelError::file(&single, message));
        }
        opened.complete_names()?;
        Ok(opened)
    }

    /// Gives the tensors of a base model the names that they have in a model with a head, as
    /// transformers does while it loads: embedding models are saved without it.
    fn complete_names(&mut self) -> Result<(), ModelError> {
        const EMBEDDING: &str = "embed_tokens.weight";
        const WHOLE: [&str; 3] = ["model.", "lm_head.", "score."];
        let has = |name: &str| self.tensors.contains_key(name);
        if !has(EMBEDDING) || has(&format!("model.{EMBEDDING}")) {
            return Ok(());
        }
        for (name, place) in std::mem::take(&mut self.tensors) {
            let is_whole = WHOLE.iter().any(|prefix| name.starts_with(prefix));
            let whole = if is_whole { name } else { format!("model.{name}") };
            if let Some(other) = self.tensors.insert(whole.clone(), place) {
                let message = format!("is a duplicate: there is a tensor {whole} as well");
                return Err(wrong(&self.files[other.file].path, &other.name, message));
            }
        }
        Ok(())
    }

    /// Whether they are those of a base model without an output head.
    pub(crate) fn lacks_head(&self) -> bool {
        shared::model_config::lacks_head(self.tensors.values().map(|place| place.name.as_str()))
    }

    /// Maps one weight file and checks its header.
    ///
    /// # Errors
    /// [`ModelError::File`].
    pub(crate) fn of_file(path: PathBuf) -> Result<Self, ModelError> {
        let folder = path.parent().unwrap_or(Path::new("")).to_owned();
        let mut opened = Self { folder, files: Vec::new(), tensors: BTreeMap::new() };
        opened.add(WeightFile::open(path)?)?;
        Ok(opened)
    }

    /// Adds a file with all its tensors.
    fn add(&mut self, file: WeightFile) -> Result<(), ModelError> {
        let names: Vec<String> = file.metadata.tensors().into_keys().collect();
        self.files.push(file);
        names.into_iter().try_for_each(|name| self.insert(self.files.len() - 1, name))
    }

    fn insert(&mut self, file: usize, name: String) -> Result<(), ModelError> {
        let place = Place { file, name };
        let Some(other) = self.tensors.insert(name_alone(&place.name), place) else {
            return Ok(());
        };
        let again = self.tensors.get(&name_alone(&other.name)).map_or("", |place| &place.name);
        let message = format!("is a duplicate, also found as {again}");
        Err(wrong(&self.files[other.file].path, &other.name, message))
    }

    /// Whether the checkpoint has scales for a KV cache, under any of the names that vLLM knows.
    pub(crate) fn has_kv_scales(&self) -> bool {
        let names =
            [".k_scale", ".v_scale", ".kv_scale", "k_proj.output_scale", "v_proj.output_scale"];
        self.names().any(|name| names.iter().any(|end| name.ends_with(end)))
    }

    /// The names of all tensors, sorted.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    fn open_index(&mut self, index: &Path) -> Result<(), ModelError> {
        #[derive(serde::Deserialize)]
        struct Index {
            weight_map: BTreeMap<String, String>,
        }
        let text = std::fs::read_to_string(index)
            .map_err(|error| ModelError::file(index, format!("cannot be read: {error}")))?;
        let parsed: Index = serde_json::from_str(&text)
            .map_err(|error| ModelError::file(index, format!("not a weight index: {error}")))?;
        let mut numbers: BTreeMap<String, usize> = BTreeMap::new();
        for (tensor, name) in parsed.weight_map {
            if name.contains(['/', '\\']) || name.starts_with('.') {
                let message =
                    format!("tensor {tensor} is in \"{name}\", which is not a plain file name");
                return Err(ModelError::file(index, message));
            }
            let number = match numbers.get(&name) {
                Some(number) => *number,
                None => {
                    self.files.push(WeightFile::open(self.folder.join(&name))?);
                    numbers.insert(name, self.files.len() - 1);
                    self.files.len() - 1
                }
            };
            let file = &self.files[number];
            if file.metadata.info(&tensor).is_none() {
                return Err(ModelError::Tensor {
                    file: file.path.clone(),
                    tensor,
                    message: "is not in this file, though the index says so".to_owned(),
                });
            }
            self.insert(number, tensor)?;
        }
        Ok(())
    }

    /// The model folder.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the number of files, and the bytes of a text model's weights in them. Behind its
    /// layers may be others, which predict several tokens and are not loaded.
    #[must_use]
    pub fn size(&self, num_layers: usize) -> (usize, u64) {
        let beside = ["model.embed_tokens.", "model.norm.", "lm_head."];
        let is_text = |name: &str| match name.strip_prefix("model.layers.") {
            Some(rest) => rest
                .split_once('.')
                .and_then(|(layer, _)| layer.parse().ok())
                .is_some_and(|layer: usize| layer < num_layers),
            None => beside.iter().any(|part| name.starts_with(part)),
        };
        let all = self.tensors.iter().filter(|(name, _)| is_text(name));
        let infos = all.filter_map(|(_, place)| self.files[place.file].metadata.info(&place.name));
        let bytes = infos.map(|info| (info.data_offsets.1 - info.data_offsets.0) as u64).sum();
        (self.files.len(), bytes)
    }

    /// Whether the tensor exists.
    #[must_use]
    pub fn has(&self, tensor: &str) -> bool {
        self.tensors.contains_key(tensor)
    }

    /// Returns a tensor of exactly this shape, which must not be quantised.
    ///
    /// # Errors
    /// [`ModelError::Tensor`] if it is missing, or has another shape or type.
    pub fn tensor(&self, tensor: &str, shape: &[usize]) -> Result<TensorView<'_>, ModelError> {
        let view = self.any_tensor(tensor, Some(shape))?;
        if let DType::F8E4M3 | DType::I8 = view.dtype {
            let (file, tensor) = (view.file.to_owned(), tensor.to_owned());
            let message = format!("is of type {:?}; it must be BF16, F16 or F32 here", view.dtype);
            return Err(ModelError::Tensor { file, tensor, message });
        }
        Ok(view)
    }

    /// Returns the elements of a tensor of exactly this shape as f32; it must not be quantised.
    ///
    /// # Errors
    /// Same as [`WeightFiles::tensor`].
    pub(crate) fn numbers(&self, tensor: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        let tensor = self.tensor(tensor, shape)?;
        let mut values = vec![0.0; shape.iter().product()];
        widen(tensor.dtype, tensor.data, &mut values);
        Ok(values)
    }

    /// Returns the bytes of a U8 tensor of exactly this shape, and its file.
    ///
    /// # Errors
    /// [`ModelError::Tensor`] if it is missing, or has another shape or type.
    pub(crate) fn bytes(
        &self,
        tensor: &str,
        shape: &[usize],
    ) -> Result<(&[u8], &Path), ModelError> {
        let Found { file, name, info, data } = self.find(tensor)?;
        if info.dtype != safetensors::Dtype::U8 {
            let message = format!("is of type {:?}; it must be U8 here", info.dtype);
            return Err(wrong(file, name, message));
        }
        if info.shape != shape {
            let message = format!("has shape {:?}, but config.json requires {shape:?}", info.shape);
            return Err(wrong(file, name, message));
        }
        Ok((data, file))
    }

    /// Returns a tensor, of exactly `shape` if given, without any scales that it needs.
    ///
    /// # Errors
    /// [`ModelError::Tensor`] if it is missing, has another shape, or has an unknown type.
    pub fn any_tensor(
        &self,
        tensor: &str,
        shape: Option<&[usize]>,
    ) -> Result<TensorView<'_>, ModelError> {
        let Found { file, name, info, data } = self.find(tensor)?;
        let wrong = |file: &Path, message: String| wrong(file, name, message);
        let dtype = match info.dtype {
            safetensors::Dtype::BF16 => DType::Bf16,
            safetensors::Dtype::F16 => DType::F16,
            safetensors::Dtype::F32 => DType::F32,
            safetensors::Dtype::F8_E4M3 => DType::F8E4M3,
            safetensors::Dtype::I8 => DType::I8,
            other => {
                let message =
                    format!("is of type {other:?}; BF16, F16, F32, F8_E4M3 and I8 are supported");
                return Err(wrong(file, message));
            }
        };
        if let Some(shape) = shape.filter(|shape| info.shape != *shape) {
            let message = format!("has shape {:?}, but config.json requires {shape:?}", info.shape);
            return Err(wrong(file, message));
        }
        Ok(TensorView { shape: &info.shape, dtype, data, scales: None, file })
    }

    /// Returns a tensor of 32-bit or 64-bit integers.
    ///
    /// # Errors
    /// [`ModelError::Tensor`] if it is missing or has another type.
    pub(crate) fn integers(&self, tensor: &str) -> Result<IntegersView<'_>, ModelError> {
        let Found { file, name, info, data } = self.find(tensor)?;
        let size = match info.dtype {
            safetensors::Dtype::I32 => 4,
            safetensors::Dtype::I64 => 8,
            other => {
                let message = format!("is of type {other:?}; it must be I32 or I64 here");
                return Err(wrong(file, name, message));
            }
        };
        Ok(IntegersView { shape: &info.shape, size, data, file })
    }

    /// Returns the shape of a tensor, if there is one of this name.
    pub(crate) fn shape(&self, tensor: &str) -> Option<&[usize]> {
        self.find(tensor).ok().map(|found| found.info.shape.as_slice())
    }

    /// Locates a tensor.
    fn find(&self, tensor: &str) -> Result<Found<'_>, ModelError> {
        let place = self.tensors.get(tensor);
        let found = place.and_then(|Place { file, name }| {
            let file = &self.files[*file];
            Some((file, name, file.metadata.info(name)?))
        });
        let Some((file, name, info)) = found else {
            return Err(wrong(&self.folder, tensor, "is missing".to_owned()));
        };
        let (start, end) = info.data_offsets;
        let data = file.map.bytes().get(file.data_start + start..file.data_start + end);
        let Some(data) = data else {
            let message = "lies beyond the end of the file".to_owned();
            return Err(wrong(&file.path, name, message));
        };
        // If the file was cut after it was mapped, touching missing pages would end the process.
        let (end, len) = ((file.data_start + end) as u64, file.map.len_now());
        let len =
            len.map_err(|error| wrong(&file.path, name, format!("cannot be read: {error}")))?;
        if len < end {
            let message = format!(
                "ends at byte {end}, but the file has been truncated to {len} since it was opened: \
                 replace model folders, do not write into them"
            );
            return Err(wrong(&file.path, name, message));
        }
        Ok(Found { file: &file.path, name, info, data })
    }
}

fn wrong(file: &Path, tensor: &str, message: String) -> ModelError {
    ModelError::Tensor { file: file.to_owned(), tensor: tensor.to_owned(), message }
}

impl WeightFile {
    fn open(path: PathBuf) -> Result<Self, ModelError> {
        let map = MappedFile::open(&path)
            .map_err(|error| ModelError::file(&path, format!("cannot be read: {error}")))?;
        let bytes = map.bytes();
        let Some(length) = bytes.first_chunk::<8>().map(|bytes| u64::from_le_bytes(*bytes)) else {
            return Err(ModelError::file(&path, "is shorter than a safetensors header"));
        };
        if length > HEADER_MAX {
            let message = format!("its header claims {length} bytes, the limit is {HEADER_MAX}");
            return Err(ModelError::file(&path, message));
        }
        let data_start = 8 + length as usize;
        let Some(header) = bytes.get(8..data_start) else {
            let message =
                format!("is truncated: its header has {length} bytes, the file {}", bytes.len());
            return Err(ModelError::file(&path, message));
        };
        // The crate checks that tensors are contiguous and match the sizes of their shapes.
        let metadata: Metadata = serde_json::from_slice(header)
            .map_err(|error| ModelError::file(&path, format!("its header is damaged: {error}")))?;
        let (found, described) = (bytes.len() - data_start, metadata.data_len());
        if found != described {
            let fault = if found < described { "truncated" } else { "damaged" };
            let message = format!(
                "is {fault}: its header describes {described} bytes of weights, but {found} are \
                 there"
            );
            return Err(ModelError::file(&path, message));
        }
        Ok(Self { path, map, metadata, data_start })
    }
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;

    use super::{Metadata, WeightFiles, name_alone};

    #[test]
    fn a_file_that_was_cut_since_it_was_opened_is_an_error_and_no_signal() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        // Two tensors, the second in pages of its own.
        let header = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[8192],"data_offsets":[8,32776]}}"#;
        let _: Metadata = serde_json::from_str(header).unwrap();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        let data = bytes.len() as u64;
        bytes.resize(bytes.len() + 32_776, 7);
        std::fs::write(&path, &bytes).unwrap();
        let files = WeightFiles::open(folder.path()).unwrap();
        assert_eq!(files.find("b").map(|found| found.data.len()).ok(), Some(32_768));
        OpenOptions::new().write(true).open(&path).unwrap().set_len(data + 8).unwrap();
        assert_eq!(files.find("a").map(|found| found.data[7]).ok(), Some(7));
        let error = files.find("b").map(|_| ()).unwrap_err().to_string();
        for part in ["model.safetensors", &format!("byte {}", data + 32_776), "truncated to"] {
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn names_are_those_of_a_model_alone() {
        for (name, alone) in [
            ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
            ("language_model.model.norm.weight", "model.norm.weight"),
            ("language_model.lm_head.weight", "lm_head.weight"),
            ("model.language_model.norm.weight", "model.norm.weight"),
            ("model.vision_tower.ln_pre.weight", "model.vision_tower.ln_pre.weight"),
            ("base_model.model.model.layers.1.q", "base_model.model.model.layers.1.q"),
            ("base_model.model.language_model.model.q", "base_model.model.model.q"),
            ("base_model.model.layers.1.q", "base_model.model.model.layers.1.q"),
            ("layers.1.q", "layers.1.q"),
            (
                "base_model.model.model.language_model.layers.1.q",
                "base_model.model.model.layers.1.q",
            ),
        ] {
            assert_eq!(name_alone(name), alone);
        }
    }
}
