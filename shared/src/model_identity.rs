//! A fingerprint that distinguishes model folders at the same path: on different hosts, or before
//! and after a replacement. Ranks with different weights would compute nonsense together without
//! any error.
//!
//! It depends only on the contents of files, not on their times or owners: on the whole
//! `config.json`, and for each weight file on its name, size, header (which lists all tensors with
//! their shapes) and a sample of its tensors. Adapters are covered in the same way. So it is
//! computed in milliseconds, and yet differs between folders of one architecture with different
//! weights.
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::protocol::Lora;

/// Maximum size of a weight file's header, in bytes: far above any model's.
const HEADER_MAX: u64 = 16 << 20;
/// Maximum number of tensors sampled per file, evenly chosen.
const SAMPLES_MAX: usize = 256;
/// Bytes sampled from the middle of each tensor.
const SAMPLE_BYTES: u64 = 1024;

/// The fingerprint; see the module's documentation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ModelIdentity(pub u64);

impl std::fmt::Display for ModelIdentity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl std::fmt::Debug for ModelIdentity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ModelIdentity({self})")
    }
}

impl ModelIdentity {
    /// Computes the identity of a model folder and the adapters beside it.
    ///
    /// # Errors
    /// Which file cannot be read, and why. Loaders check the contents; this does not.
    pub fn read(folder: &Path, lora: &Lora) -> Result<Self, String> {
        let mut hash = Sha256::new();
        add_whole(&mut hash, &folder.join("config.json"))?;
        for name in weight_files(folder)? {
            add_weights(&mut hash, folder, &name)?;
        }
        add(&mut hash, &u64::from(lora.max_rank).to_le_bytes());
        for adapter in &lora.adapters {
            add_adapter(&mut hash, Path::new(&adapter.path))?;
        }
        Ok(Self::of(hash))
    }

    /// Computes the identity of one adapter's folder.
    ///
    /// # Errors
    /// As [`ModelIdentity::read`].
    pub fn of_adapter(folder: &Path) -> Result<Self, String> {
        let mut hash = Sha256::new();
        add_adapter(&mut hash, folder)?;
        Ok(Self::of(hash))
    }

    fn of(hash: Sha256) -> Self {
        let digest = hash.finalize();
        Self(digest.iter().take(8).fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
    }
}

fn add_adapter(hash: &mut Sha256, folder: &Path) -> Result<(), String> {
    add_whole(hash, &folder.join("adapter_config.json"))?;
    add_weights(hash, folder, "adapter_model.safetensors")
}

/// Returns the names of a folder's weight files, in order.
fn weight_files(folder: &Path) -> Result<BTreeSet<String>, String> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let index = folder.join("model.safetensors.index.json");
    if !index.is_file() {
        return Ok(BTreeSet::from(["model.safetensors".to_owned()]));
    }
    let bytes = std::fs::read(&index).map_err(|error| named(&index, &error))?;
    let index: Index = serde_json::from_slice(&bytes)
        .map_err(|error| format!("{}: not a weight index: {error}", index.display()))?;
    Ok(index.weight_map.into_values().collect())
}

/// Adds a field with its length, so that it cannot run into the next field.
fn add(hash: &mut Sha256, bytes: &[u8]) {
    hash.update((bytes.len() as u64).to_le_bytes());
    hash.update(bytes);
}

fn add_whole(hash: &mut Sha256, path: &Path) -> Result<(), String> {
    let bytes = std::fs::read(path).map_err(|error| named(path, &error))?;
    add(hash, &bytes);
    Ok(())
}

/// Adds a file's name, size, header and samples of its tensors.
fn add_weights(hash: &mut Sha256, folder: &Path, name: &str) -> Result<(), String> {
    let path = folder.join(name);
    let mut read = || -> io::Result<()> {
        let file = File::open(&path)?;
        let size = file.metadata()?.len();
        add(hash, name.as_bytes());
        add(hash, &size.to_le_bytes());
        let mut length = [0; 8];
        file.read_exact_at(&mut length, 0)?;
        let length = u64::from_le_bytes(length);
        if length > HEADER_MAX || length + 8 > size {
            // No loader would accept that header.
            add(hash, &length.to_le_bytes());
            return Ok(());
        }
        let mut header = vec![0; length as usize];
        file.read_exact_at(&mut header, 8)?;
        add(hash, &header);
        let mut bytes = [0; SAMPLE_BYTES as usize];
        for (begin, end) in samples(&header) {
            let taken = (end - begin).min(SAMPLE_BYTES);
            let at = (8 + length).saturating_add(begin + (end - begin - taken) / 2);
            if at.saturating_add(taken) > size {
                continue;
            }
            let bytes = &mut bytes[..taken as usize];
            file.read_exact_at(bytes, at)?;
            add(hash, bytes);
        }
        Ok(())
    };
    read().map_err(|error| named(&path, &error))
}

/// Returns the extents of the sampled tensors, relative to the end of the header.
fn samples(header: &[u8]) -> Vec<(u64, u64)> {
    #[derive(Deserialize)]
    struct Tensor {
        data_offsets: (u64, u64),
    }
    let named: BTreeMap<String, serde_json::Value> =
        serde_json::from_slice(header).unwrap_or_default();
    let tensors = named.into_values().filter_map(|value| {
        let (begin, end) = serde_json::from_value::<Tensor>(value).ok()?.data_offsets;
        (begin < end).then_some((begin, end))
    });
    let all: BTreeSet<(u64, u64)> = tensors.collect();
    let every = all.len().div_ceil(SAMPLES_MAX).max(1);
    all.into_iter().step_by(every).collect()
}

fn named(path: &Path, error: &io::Error) -> String {
    format!("{}: {error}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder with one file of tensors of 4 KiB each; the name keeps parallel tests apart.
    struct Folder(std::path::PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("tutti-{}-{name}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            std::fs::write(path.join("config.json"), "{}").unwrap();
            let folder = Self(path);
            folder.weights("model.safetensors", 3, 0);
            folder
        }

        /// Writes `count` tensors; `byte` is stored in the middle of the second one.
        fn weights(&self, name: &str, count: usize, byte: u8) {
            let entry = |index: usize| {
                let (begin, end) = (index * 4096, (index + 1) * 4096);
                format!(
                    r#""t{index}":{{"dtype":"U8","shape":[4096],"data_offsets":[{begin},{end}]}}"#
                )
            };
            let header = (0..count).map(entry).collect::<Vec<_>>().join(",");
            let header = format!("{{\"__metadata__\":{{\"format\":\"pt\"}},{header}}}");
            let mut data = vec![0; count * 4096];
            data[4096 + 2048] = byte;
            let length = (header.len() as u64).to_le_bytes();
            let file = [&length, header.as_bytes(), &data].concat();
            std::fs::write(self.0.join(name), file).unwrap();
        }

        fn identity(&self) -> ModelIdentity {
            ModelIdentity::read(&self.0, &Lora::default()).unwrap()
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn copies_are_the_same_and_whatever_is_changed_tells() {
        let (folder, copy) = (Folder::new("identity"), Folder::new("identity-copy"));
        let first = folder.identity();
        assert_eq!(copy.identity(), first, "times and paths do not count");
        copy.weights("model.safetensors", 3, 1);
        assert_ne!(copy.identity(), first, "other weights of the same shapes");
        copy.weights("model.safetensors", 4, 0);
        assert_ne!(copy.identity(), first, "another header");
        copy.weights("model.safetensors", 3, 0);
        assert_eq!(copy.identity(), first);
        std::fs::write(copy.0.join("config.json"), "{ }").unwrap();
        assert_ne!(copy.identity(), first, "another configuration");
        // Files that nobody loads do not count.
        std::fs::write(folder.0.join("consolidated.safetensors"), "x").unwrap();
        std::fs::write(folder.0.join("tokenizer.json"), "x").unwrap();
        assert_eq!(folder.identity(), first);
    }

    #[test]
    fn all_files_of_an_index_and_all_adapters_count() {
        let folder = Folder::new("identity-index");
        let index = r#"{"weight_map":{"t0":"a.safetensors","t1":"b.safetensors"}}"#;
        std::fs::write(folder.0.join("model.safetensors.index.json"), index).unwrap();
        let error = ModelIdentity::read(&folder.0, &Lora::default()).unwrap_err();
        assert!(error.contains("a.safetensors"), "{error}");
        folder.weights("a.safetensors", 2, 0);
        folder.weights("b.safetensors", 2, 0);
        let first = folder.identity();
        folder.weights("b.safetensors", 2, 1);
        let second = folder.identity();
        assert_ne!(second, first);
        let adapter = Folder::new("identity-adapter");
        std::fs::write(adapter.0.join("adapter_config.json"), "{}").unwrap();
        adapter.weights("adapter_model.safetensors", 2, 0);
        let path = adapter.0.display().to_string();
        let lora = Lora::fixed([("a".to_owned(), path)], 16);
        let with = ModelIdentity::read(&folder.0, &lora).unwrap();
        assert_ne!(with, second);
        adapter.weights("adapter_model.safetensors", 2, 1);
        assert_ne!(ModelIdentity::read(&folder.0, &lora).unwrap(), with);
    }

    #[test]
    fn files_that_are_cut_or_no_weights_have_an_identity_or_an_error_that_names_them() {
        let folder = Folder::new("identity-cut");
        let path = folder.0.join("model.safetensors");
        let whole = std::fs::read(&path).unwrap();
        for length in [0, 4, 8, 100, whole.len() - 1] {
            std::fs::write(&path, &whole[..length]).unwrap();
            match ModelIdentity::read(&folder.0, &Lora::default()) {
                Ok(other) => assert_ne!(other, ModelIdentity(0)),
                Err(error) => assert!(error.contains("model.safetensors"), "{error}"),
            }
        }
        std::fs::write(&path, [0xff; 64]).unwrap();
        assert!(ModelIdentity::read(&folder.0, &Lora::default()).is_ok());
    }

    #[test]
    fn of_many_tensors_some_are_looked_into_from_the_first_to_nearly_the_last() {
        let entry =
            |index: usize| format!(r#""t{index}":{{"data_offsets":[{index},{}]}}"#, index + 1);
        let header = format!("{{{}}}", (0..1000).map(entry).collect::<Vec<_>>().join(","));
        let chosen = samples(header.as_bytes());
        assert_eq!((chosen.len(), chosen[0], chosen[249]), (250, (0, 1), (996, 997)));
        assert_eq!(samples(b"no header"), []);
    }
}
