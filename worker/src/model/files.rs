//! The safetensors files of a model folder: found, mapped and their headers checked.
//!
//! Owns which file has which tensor and that every tensor lies within its file; so a truncated or
//! damaged file is an error here and not a bus error later. What a tensor means is
//! `weights`' business.
use std::collections::HashMap;
use std::path::{Path, PathBuf};

use ::safetensors::Dtype;
use ::safetensors::tensor::Metadata;
use kernels::MappedFile;
use kernels::backend::DType;
use serde::Deserialize;

use crate::error::ModelError;

/// A header is refused beyond this. The largest models have about 1 MiB in one file.
const HEADER_BYTES_MAX: u64 = 16 << 20;
/// `model.safetensors.index.json` is refused beyond this.
const INDEX_BYTES_MAX: u64 = 16 << 20;
/// The header's length, a u64, comes first.
const LENGTH_BYTES: usize = 8;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// All weight files of a model folder, mapped.
#[derive(Debug)]
pub(super) struct ModelFiles {
    dir: PathBuf,
    files: Vec<TensorFile>,
    /// Tensor name to index in `files`.
    tensors: HashMap<String, usize>,
}

#[derive(Debug)]
struct TensorFile {
    path: PathBuf,
    map: MappedFile,
    metadata: Metadata,
    /// Where the data begins in the file.
    data_start: usize,
}

/// One tensor in a mapped file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tensor<'a> {
    /// The file that has it.
    pub(super) path: &'a Path,
    /// Element type as the file names it.
    pub(super) dtype: Dtype,
    /// Its sizes.
    pub(super) shape: &'a [usize],
    /// Its bytes, row-major, little endian.
    pub(super) data: &'a [u8],
}

#[derive(Deserialize)]
struct Index {
    weight_map: HashMap<String, String>,
}

impl ModelFiles {
    /// Maps `model.safetensors`, or every file that `model.safetensors.index.json` names, and
    /// checks their headers. No weight is read.
    ///
    /// # Errors
    /// [`ModelError::Io`] for what cannot be opened, [`ModelError::File`] for what is damaged,
    /// [`ModelError::Tensor`] when the index promises a tensor that its file lacks.
    pub(super) fn open(dir: &Path) -> Result<Self, ModelError> {
        let index_path = dir.join(INDEX);
        if dir.join(SINGLE).is_file() || !index_path.is_file() {
            let file = TensorFile::open(&dir.join(SINGLE))?;
            let tensors = file.metadata.tensors().into_keys().map(|name| (name, 0)).collect();
            return Ok(Self { dir: dir.to_owned(), files: vec![file], tensors });
        }
        let index = read_index(&index_path)?;
        let mut files: Vec<TensorFile> = Vec::new();
        let mut by_name: HashMap<String, usize> = HashMap::new();
        let mut tensors = HashMap::with_capacity(index.weight_map.len());
        // Sorted, so that what is wrong with several files is always reported in the same order.
        let mut entries: Vec<_> = index.weight_map.into_iter().collect();
        entries.sort_unstable();
        for (tensor, name) in entries {
            let file = match by_name.get(&name) {
                Some(&file) => file,
                None => {
                    files.push(TensorFile::open(&member(&index_path, &name)?)?);
                    by_name.insert(name, files.len() - 1);
                    files.len() - 1
                }
            };
            if files[file].metadata.info(&tensor).is_none() {
                return Err(ModelError::Tensor {
                    path: files[file].path.clone(),
                    tensor,
                    problem: format!("is missing; {INDEX} says it is in this file"),
                });
            }
            tensors.insert(tensor, file);
        }
        Ok(Self { dir: dir.to_owned(), files, tensors })
    }

    /// The folder.
    #[must_use]
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// A tensor, if any file has it.
    #[must_use]
    pub(super) fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        let file = &self.files[*self.tensors.get(name)?];
        let info = file.metadata.info(name)?;
        let (start, end) = info.data_offsets;
        let data = file.map.get(file.data_start..)?.get(start..end)?;
        Some(Tensor { path: &file.path, dtype: info.dtype, shape: &info.shape, data })
    }
}

impl TensorFile {
    fn open(path: &Path) -> Result<Self, ModelError> {
        let map = MappedFile::open(path)
            .map_err(|source| ModelError::Io { path: path.to_owned(), source })?;
        let damaged = |problem| ModelError::File { path: path.to_owned(), problem };
        let Some((length, rest)) = map.split_first_chunk::<LENGTH_BYTES>() else {
            let bytes = map.len();
            return Err(damaged(format!("has {bytes} bytes: not a safetensors file")));
        };
        let length = u64::from_le_bytes(*length);
        if length > HEADER_BYTES_MAX {
            return Err(damaged(format!(
                "announces a header of {length} bytes, the bound is {HEADER_BYTES_MAX}: damaged, \
                 or not a safetensors file"
            )));
        }
        let length = length as usize;
        let Some(header) = rest.get(..length) else {
            let problem = format!(
                "is truncated: it announces a header of {length} bytes and has {} bytes",
                map.len()
            );
            return Err(damaged(problem));
        };
        let metadata: Metadata = serde_json::from_slice(header)
            .map_err(|error| damaged(format!("has a damaged header: {error}")))?;
        let data_start = LENGTH_BYTES + length;
        let (found, wanted) = (map.len() - data_start, metadata.data_len());
        if found < wanted {
            let problem = format!(
                "is truncated: its header describes {wanted} bytes of data, {found} are there"
            );
            return Err(damaged(problem));
        }
        if found > wanted {
            let problem = format!(
                "is damaged: its header describes {wanted} bytes of data, {found} are there"
            );
            return Err(damaged(problem));
        }
        Ok(Self { path: path.to_owned(), map, metadata, data_start })
    }
}

fn read_index(path: &Path) -> Result<Index, ModelError> {
    let map = MappedFile::open(path)
        .map_err(|source| ModelError::Io { path: path.to_owned(), source })?;
    let damaged = |problem| ModelError::File { path: path.to_owned(), problem };
    if map.len() as u64 > INDEX_BYTES_MAX {
        let problem = format!("has {} bytes, the bound is {INDEX_BYTES_MAX}", map.len());
        return Err(damaged(problem));
    }
    serde_json::from_slice(&map).map_err(|error| damaged(format!("is damaged: {error}")))
}

/// The path of a file that the index names; one that leaves the folder is refused.
fn member(index_path: &Path, name: &str) -> Result<PathBuf, ModelError> {
    let path = Path::new(name);
    if path.file_name().is_none_or(|file_name| file_name != path.as_os_str()) {
        let problem = format!("names `{name}`, which is not a file of this folder");
        return Err(ModelError::File { path: index_path.to_owned(), problem });
    }
    Ok(index_path.with_file_name(path))
}

/// The element types that weights can have.
#[must_use]
pub(super) fn dtype(dtype: Dtype) -> Option<DType> {
    match dtype {
        Dtype::BF16 => Some(DType::Bf16),
        Dtype::F16 => Some(DType::F16),
        Dtype::F32 => Some(DType::F32),
        _ => None,
    }
}
