//! Broken model folders give one clear error that names file, tensor and reason.
use std::path::Path;

use kernels::collective::single_rank;
use testkit::models::variant;

use crate::rig::engine;

fn broken(folder: &str, change: impl Fn(&Path)) -> String {
    let scratch = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(variant(folder)).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), scratch.path().join(entry.file_name())).unwrap();
    }
    change(scratch.path());
    engine(scratch.path(), 0, 1, single_rank()).map(|_| ()).unwrap_err().to_string()
}

fn edit(file: &Path, change: impl Fn(&mut Vec<u8>)) {
    let mut bytes = std::fs::read(file).unwrap();
    change(&mut bytes);
    std::fs::write(file, bytes).unwrap();
}

fn replace(file: &Path, from: &str, to: &str) {
    let text = std::fs::read_to_string(file).unwrap();
    assert!(text.contains(from), "{from} is not in {}", file.display());
    std::fs::write(file, text.replace(from, to)).unwrap();
}

fn names(error: &str, words: &[&str]) {
    for word in words {
        assert!(error.contains(word), "expected {word:?} in: {error}");
    }
}

#[test]
fn truncated_and_corrupt_weight_files() {
    for keep in [0, 7, 100, 50_000, 200_000] {
        let error =
            broken("llama-gqa", |dir| edit(&dir.join("model.safetensors"), |b| b.truncate(keep)));
        names(&error, &["model.safetensors"]);
    }
    let error = broken("llama-gqa", |dir| edit(&dir.join("model.safetensors"), |b| b[5] = 0x7f));
    names(&error, &["model.safetensors", "header claims", "bound"]);
    let error = broken("llama-gqa", |dir| edit(&dir.join("model.safetensors"), |b| b[9] = b'!'));
    names(&error, &["model.safetensors"]);
    let error =
        broken("llama-gqa", |dir| edit(&dir.join("model.safetensors"), |b| b.extend([0; 9])));
    names(&error, &["model.safetensors"]);
}

#[test]
fn missing_files_and_tensors() {
    let remove =
        |name: &'static str| move |dir: &Path| std::fs::remove_file(dir.join(name)).unwrap();
    names(&broken("llama-gqa", remove("model.safetensors")), &["model.safetensors", "missing"]);
    names(&broken("llama-gqa", remove("config.json")), &["config.json", "cannot be read"]);
    let shard = "model-00002-of-00004.safetensors";
    names(&broken("llama-gqa-sharded", remove("model-00002-of-00004.safetensors")), &[shard]);
    let error = broken("llama-gqa", |dir| {
        edit(&dir.join("model.safetensors"), |bytes| {
            let from = b"model.layers.1.mlp.up_proj";
            let at = bytes.windows(from.len()).position(|w| w == from).unwrap();
            bytes[at + from.len() - 7..][..7].copy_from_slice(b"xx_proj");
        });
    });
    names(&error, &["tensor model.layers.1.mlp.up_proj.weight", "missing"]);
}

#[test]
fn shapes_that_disagree_with_the_configuration() {
    let error = broken("llama-gqa", |dir| {
        replace(
            &dir.join("config.json"),
            "\"intermediate_size\": 128",
            "\"intermediate_size\": 256",
        );
    });
    names(&error, &["model.safetensors", "gate_proj.weight", "[128, 64]", "[256, 64]"]);
}

#[test]
fn configurations_that_cannot_be_served() {
    let config = |from: &'static str, to: &'static str| {
        broken("llama-gqa", move |dir| replace(&dir.join("config.json"), from, to))
    };
    let error = config("LlamaForCausalLM", "MambaForCausalLM");
    names(&error, &["config.json", "MambaForCausalLM", "Qwen3ForCausalLM"]);
    let error = config("\"hidden_size\": 64", "\"hidden_size\": 1e99");
    names(&error, &["config.json"]);
    let error = config("\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": -1");
    names(&error, &["config.json", "rms_norm_eps is -1"]);
    names(&config("\"vocab_size\": 384", "\"vocab_size\": 0"), &["vocab_size is 0", "1..="]);
}
