//! Modified model folders: a temporary copy with changed files and tensors.
//!
//! Reads and writes the safetensors format itself, so that the loader is not tested against itself.
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use tempfile::TempDir;

use testkit::models::variant;

/// A temporary copy of a model folder; deleted on drop.
pub(crate) struct Folder {
    dir: TempDir,
}

impl Folder {
    /// A copy of `tests/models/<name>`.
    pub(crate) fn copy_of(name: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(variant(name)).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
        }
        Self { dir }
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Sets a key of `config.json`; `Value::Null` removes it.
    pub(crate) fn configure(&self, key: &str, value: Value) {
        let path = self.file("config.json");
        let mut config: Map<String, Value> =
            serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        match value {
            Value::Null => config.shift_remove(key),
            value => config.insert(key.to_owned(), value),
        };
        fs::write(&path, Value::Object(config).to_string()).unwrap();
    }

    /// Changes the bytes of a file.
    pub(crate) fn damage(&self, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = fs::read(self.file(name)).unwrap();
        change(&mut bytes);
        fs::write(self.file(name), bytes).unwrap();
    }

    /// Takes the base model's prefix from all names of tensors, as embedding models are saved.
    pub(crate) fn save_base_model(&self) {
        let without = |text: &str| text.replace("\"model.", "\"");
        for entry in fs::read_dir(self.path()).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            if name.ends_with(".safetensors") {
                self.damage(&name, |bytes| {
                    let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
                    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
                    let header = without(str::from_utf8(header).unwrap());
                    let length = (header.len() as u64).to_le_bytes();
                    *bytes = [&length, header.as_bytes(), data].concat();
                });
            } else if name.ends_with(".index.json") {
                let text = fs::read_to_string(self.file(&name)).unwrap();
                fs::write(self.file(&name), without(&text)).unwrap();
            }
        }
    }

    /// Changes the tensors of `model.safetensors`.
    pub(crate) fn edit(&self, change: impl FnOnce(&mut Vec<Tensor>)) {
        self.damage("model.safetensors", |bytes| {
            let mut tensors = parse(bytes);
            change(&mut tensors);
            *bytes = serialize(&tensors);
        });
    }
}

/// One tensor of a file.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) data: Vec<u8>,
}

impl Tensor {
    /// Keeps only the first rows.
    pub(crate) fn cut_rows(&mut self, rows: usize) {
        self.data.truncate(self.data.len() / self.shape[0] * rows);
        self.shape[0] = rows;
    }

    /// Converts bf16 to f32, which is exact.
    pub(crate) fn widen(&mut self) {
        assert_eq!(self.dtype, "BF16");
        self.dtype = "F32".to_owned();
        self.data = self.data.chunks_exact(2).flat_map(|x| [0, 0, x[0], x[1]]).collect();
    }
}

fn parse(bytes: &[u8]) -> Vec<Tensor> {
    let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let header: Map<String, Value> = serde_json::from_slice(header).unwrap();
    let tensors = header.into_iter().filter(|(name, _)| name != "__metadata__");
    let numbers = |value: &Value| -> Vec<usize> { serde_json::from_value(value.clone()).unwrap() };
    tensors
        .map(|(name, info)| {
            let offsets = numbers(&info["data_offsets"]);
            Tensor {
                name,
                dtype: info["dtype"].as_str().unwrap().to_owned(),
                shape: numbers(&info["shape"]),
                data: data[offsets[0]..offsets[1]].to_vec(),
            }
        })
        .collect()
}

fn serialize(tensors: &[Tensor]) -> Vec<u8> {
    let mut header = Map::new();
    let mut data = Vec::new();
    for tensor in tensors {
        let start = data.len();
        data.extend_from_slice(&tensor.data);
        let info = json!({
            "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, data.len()],
        });
        header.insert(tensor.name.clone(), info);
    }
    let header = Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(&data);
    bytes
}
