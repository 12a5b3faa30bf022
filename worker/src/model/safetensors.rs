//! Weight files: `model.safetensors`, or shards with an index; mapped, checked, never copied whole.
//!
//! Headers are bounded and validated before a tensor is looked at: offsets lie within the file, so
//! a truncated file is an error here and not a fault later.
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use kernels::backend::{DType, HostMatrix, Scales};
use kernels::mapped::MappedFile;
use safetensors::tensor::{Metadata, TensorInfo};

use super::ModelError;

/// Largest header taken: far above any model's.
const HEADER_MAX: u64 = 16 << 20;

/// A tensor as it lies in its file.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// Its shape.
    pub shape: &'a [usize],
    /// Its element type.
    pub dtype: DType,
    /// Its bytes, row-major.
    pub data: &'a [u8],
    /// What its elements are multiplied by, when it is quantised.
    pub scales: Option<Scales<'a>>,
    /// The file, for messages.
    pub file: &'a Path,
}

impl<'a> TensorView<'a> {
    /// Its rows, outer dimensions taken as one, and its columns: of packed integers those of the
    /// weights.
    pub(crate) fn size(&self) -> (usize, usize) {
        if let Some(Scales::Packed(packed)) = &self.scales {
            return (packed.rows, packed.cols);
        }
        let cols = self.shape.last().copied().unwrap_or(0);
        (self.shape.iter().rev().skip(1).product(), cols)
    }

    /// Some of its rows and columns.
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

/// Integers as they lie in their file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IntegersView<'a> {
    /// Their shape.
    pub(crate) shape: &'a [usize],
    /// Bytes of one of them: 4 or 8.
    pub(crate) size: usize,
    /// Their bytes.
    pub(crate) data: &'a [u8],
    /// The file, for messages.
    pub(crate) file: &'a Path,
}

#[derive(Debug)]
struct WeightFile {
    path: PathBuf,
    map: MappedFile,
    metadata: Metadata,
    /// Where the data begins.
    data_start: usize,
}

/// All tensors of a model folder.
#[derive(Debug)]
pub struct WeightFiles {
    folder: PathBuf,
    files: Vec<WeightFile>,
    /// Which file has which tensor.
    tensors: BTreeMap<String, usize>,
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
            opened.tensors = file.metadata.tensors().into_keys().map(|name| (name, 0)).collect();
            opened.files.push(file);
        } else {
            let message = "is missing, and so is model.safetensors.index.json";
            return Err(ModelError::file(&single, message));
        }
        Ok(opened)
    }

    /// Maps one file of weights and checks its header.
    ///
    /// # Errors
    /// [`ModelError::File`].
    pub(crate) fn of_file(path: PathBuf) -> Result<Self, ModelError> {
        let folder = path.parent().unwrap_or(Path::new("")).to_owned();
        let file = WeightFile::open(path)?;
        let tensors = file.metadata.tensors().into_keys().map(|name| (name, 0)).collect();
        Ok(Self { folder, files: vec![file], tensors })
    }

    /// The names of all tensors, in order.
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
                    format!("tensor {tensor} is in \"{name}\", which is no plain file name");
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
            self.tensors.insert(tensor, number);
        }
        Ok(())
    }

    /// Where they are.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// How many files there are, and the bytes of weights in them.
    #[must_use]
    pub fn size(&self) -> (usize, u64) {
        let bytes = self.files.iter().map(|file| file.metadata.data_len() as u64).sum();
        (self.files.len(), bytes)
    }

    /// Whether there is such a tensor.
    #[must_use]
    pub fn has(&self, tensor: &str) -> bool {
        self.tensors.contains_key(tensor)
    }

    /// A tensor of exactly this shape, which is not quantised.
    ///
    /// # Errors
    /// [`ModelError::Tensor`] when it is missing, of another shape or of another type.
    pub fn tensor(&self, tensor: &str, shape: &[usize]) -> Result<TensorView<'_>, ModelError> {
        let view = self.any_tensor(tensor, Some(shape))?;
        if let DType::F8E4M3 | DType::I8 = view.dtype {
            let (file, tensor) = (view.file.to_owned(), tensor.to_owned());
            let message =
                format!("is of type {:?}; it has to be BF16, F16 or F32 here", view.dtype);
            return Err(ModelError::Tensor { file, tensor, message });
        }
        Ok(view)
    }

    /// A tensor, of exactly this shape where one is given; without the scales that it may need.
    ///
    /// # Errors
    /// [`ModelError::Tensor`] when it is missing, of another shape or of an unknown type.
    pub fn any_tensor(
        &self,
        tensor: &str,
        shape: Option<&[usize]>,
    ) -> Result<TensorView<'_>, ModelError> {
        let (file, info, data) = self.find(tensor)?;
        let wrong = |file: &Path, message: String| wrong(file, tensor, message);
        let dtype = match info.dtype {
            safetensors::Dtype::BF16 => DType::Bf16,
            safetensors::Dtype::F16 => DType::F16,
            safetensors::Dtype::F32 => DType::F32,
            safetensors::Dtype::F8_E4M3 => DType::F8E4M3,
            safetensors::Dtype::I8 => DType::I8,
            other => {
                let message =
                    format!("is of type {other:?}; BF16, F16, F32, F8_E4M3 and I8 are supported");
                return Err(wrong(&file.path, message));
            }
        };
        if let Some(shape) = shape.filter(|shape| info.shape != *shape) {
            let message = format!("has shape {:?}, config.json asks for {shape:?}", info.shape);
            return Err(wrong(&file.path, message));
        }
        Ok(TensorView { shape: &info.shape, dtype, data, scales: None, file: &file.path })
    }

    /// A tensor of integers of 32 bits, or of 64.
    ///
    /// # Errors
    /// [`ModelError::Tensor`] when it is missing or of another type.
    pub(crate) fn integers(&self, tensor: &str) -> Result<IntegersView<'_>, ModelError> {
        let (file, info, data) = self.find(tensor)?;
        let size = match info.dtype {
            safetensors::Dtype::I32 => 4,
            safetensors::Dtype::I64 => 8,
            other => {
                let message = format!("is of type {other:?}; it has to be I32 or I64 here");
                return Err(wrong(&file.path, tensor, message));
            }
        };
        Ok(IntegersView { shape: &info.shape, size, data, file: &file.path })
    }

    /// Where a tensor is.
    fn find(&self, tensor: &str) -> Result<(&WeightFile, &TensorInfo, &[u8]), ModelError> {
        let file = self.tensors.get(tensor).map(|number| &self.files[*number]);
        let Some((file, info)) = file.and_then(|file| Some((file, file.metadata.info(tensor)?)))
        else {
            return Err(wrong(&self.folder, tensor, "is missing".to_owned()));
        };
        let (start, end) = info.data_offsets;
        let data = file.map.bytes().get(file.data_start + start..file.data_start + end);
        let Some(data) = data else {
            let message = "lies beyond the end of the file".to_owned();
            return Err(wrong(&file.path, tensor, message));
        };
        Ok((file, info, data))
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
            let message = format!("its header claims {length} bytes, the bound is {HEADER_MAX}");
            return Err(ModelError::file(&path, message));
        }
        let data_start = 8 + length as usize;
        let Some(header) = bytes.get(8..data_start) else {
            let message =
                format!("is truncated: its header has {length} bytes, the file {}", bytes.len());
            return Err(ModelError::file(&path, message));
        };
        // The crate checks that tensors follow one another without gaps and have their shapes' sizes.
        let metadata: Metadata = serde_json::from_slice(header)
            .map_err(|error| ModelError::file(&path, format!("its header is damaged: {error}")))?;
        let (found, described) = (bytes.len() - data_start, metadata.data_len());
        if found != described {
            let fault = if found < described { "truncated" } else { "damaged" };
            let message = format!(
                "is {fault}: its header describes {described} bytes of weights, {found} are there"
            );
            return Err(ModelError::file(&path, message));
        }
        Ok(Self { path, map, metadata, data_start })
    }
}
