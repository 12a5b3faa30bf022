//! Broken model folders give one clear error with the file, the tensor and the reason.
use std::path::Path;

use kernels::ReferenceBackend;
use kernels::collective::single_rank;
use shared::model_config::ConfigOverrides;
use shared::protocol::Quantization;
use testkit::models::variant;
use worker::model::config::ModelConfig;
use worker::model::safetensors::WeightFiles;
use worker::model::shard::Shard;
use worker::model::weights::{self, Source};

use crate::checkpoint::{Folder, Tensor};
use crate::rig::{On, engine};

const WEIGHTS: &str = "model.safetensors";

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
    names(&error, &["model.safetensors", "header claims", "the limit is"]);
    let error = broken("llama-gqa", |dir| edit(&dir.join("model.safetensors"), |b| b[9] = b'!'));
    names(&error, &["model.safetensors"]);
    let error =
        broken("llama-gqa", |dir| edit(&dir.join("model.safetensors"), |b| b.extend([0; 9])));
    names(&error, &["model.safetensors"]);
}

/// An incomplete download is reported as such, with sizes in bytes; overflowing sizes do not panic.
#[test]
fn truncation_is_called_truncation() {
    let cut = |keep| broken("llama-gqa", |dir| edit(&dir.join(WEIGHTS), |b| b.truncate(keep)));
    let whole = std::fs::metadata(variant("llama-gqa").join(WEIGHTS)).unwrap().len() as usize;
    let described = "is truncated: its header describes 246400 bytes of weights, but 246399 are \
                     there";
    names(&cut(whole - 1), &[WEIGHTS, described]);
    names(&cut(100), &[WEIGHTS, "is truncated: its header has 2160 bytes, the file 100"]);
    let error = broken("llama-gqa", |dir| {
        let header = r#"{"a":{"dtype":"U8","shape":[1152921504606846976],
            "data_offsets":[0,1152921504606846976]}}"#;
        edit(&dir.join(WEIGHTS), |bytes| {
            *bytes = (header.len() as u64).to_le_bytes().to_vec();
            bytes.extend_from_slice(header.as_bytes());
        });
    });
    names(&error, &[WEIGHTS, "is truncated", "1152921504606846976"]);
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
fn experts_that_are_not_there() {
    let error = broken("mixtral", |dir| {
        edit(&dir.join("model.safetensors"), |bytes| {
            let from = b"model.layers.1.block_sparse_moe.experts.7.w2";
            let at = bytes.windows(from.len()).position(|w| w == from).unwrap();
            bytes[at + from.len() - 2..][..2].copy_from_slice(b"x2");
        });
    });
    names(&error, &["tensor model.layers.1.block_sparse_moe.experts.7.w2.weight", "missing"]);
    let resized = |model, from: &'static str, to: &'static str| {
        broken(model, move |dir| replace(&dir.join("config.json"), from, to))
    };
    let error = resized("mixtral", "\"num_local_experts\": 8", "\"num_local_experts\": 9");
    names(&error, &["model.layers.0.block_sparse_moe.gate.weight", "[8, 64]", "[9, 64]"]);
    let stacked = "qwen3-moe-stacked";
    let error = resized(stacked, "\"moe_intermediate_size\": 32", "\"moe_intermediate_size\": 16");
    names(&error, &["model.layers.1.mlp.experts.gate_up_proj", "[6, 64, 64]", "[6, 32, 64]"]);
    // The tensors' names determine the layout; if none is known, the error names the usual tensor.
    let error = resized(stacked, "\"decoder_sparse_step\": 2", "\"decoder_sparse_step\": 1");
    names(&error, &["tensor model.layers.0.mlp.gate.weight", "missing"]);
    // `tutti doctor` reports the same.
    let folder = Folder::copy_of("mixtral");
    assert!(worker::check::model(folder.path(), 1, Quantization::None).is_ok());
    folder.edit(|tensors| tensors.retain(|tensor| !tensor.name.ends_with("experts.3.w1.weight")));
    let error = worker::check::model(folder.path(), 1, Quantization::None).unwrap_err().to_string();
    names(&error, &["block_sparse_moe.experts.3.w1.weight", "missing"]);
    let error = worker::check::model(&variant("qwen3-moe"), 16, Quantization::None)
        .unwrap_err()
        .to_string();
    names(&error, &["degree 16", "experts of 40", "possible degrees: 1, 2, 4"]);
}

/// The error of a model's engine, which is also `tutti doctor`'s.
fn refusal(folder: &Folder) -> String {
    let error = engine(folder.path(), 0, 1, single_rank()).map(|_| ()).unwrap_err().to_string();
    let said = worker::check::model(folder.path(), 1, Quantization::None).unwrap_err();
    assert_eq!(said.to_string(), error, "what doctor says");
    error
}

#[test]
fn norms_that_lack_a_part() {
    for (model, lacking) in [
        ("starcoder2", "model.layers.1.input_layernorm.bias"),
        ("starcoder2", "model.norm.bias"),
        ("olmo2", "model.layers.0.self_attn.k_norm.weight"),
        ("olmo2", "model.layers.1.post_feedforward_layernorm.weight"),
        ("gemma3", "model.layers.0.pre_feedforward_layernorm.weight"),
    ] {
        let folder = Folder::copy_of(model);
        folder.edit(|tensors| {
            let count = tensors.len();
            tensors.retain(|tensor| tensor.name != lacking);
            assert_eq!(tensors.len(), count - 1, "{lacking}");
        });
        names(&refusal(&folder), &[lacking, "missing"]);
    }
}

/// Ignoring them would make other tokens, and no error.
#[test]
fn activations_with_scales() {
    let folder = Folder::copy_of("starcoder2");
    let scales = "model.layers.1.mlp.act.scales";
    folder.edit(|tensors| {
        let (name, dtype) = (scales.to_owned(), "F16".to_owned());
        tensors.push(Tensor { name, dtype, shape: vec![128], data: vec![0; 256] });
    });
    names(&refusal(&folder), &[scales, "AutoAWQ", "not supported"]);
}

#[test]
fn quantised_tensors_need_their_scales() {
    let folder = |change: &dyn Fn(&mut Vec<Tensor>)| {
        let folder = Folder::copy_of("qwen3-fp8-blocks");
        folder.edit(change);
        folder
    };
    let error = |folder: &Folder| {
        engine(folder.path(), 0, 1, single_rank()).map(|_| ()).unwrap_err().to_string()
    };
    let scale = "model.layers.1.mlp.up_proj.weight_scale_inv";
    let find = |tensors: &mut Vec<Tensor>| tensors.iter().position(|t| t.name == scale).unwrap();
    let lacking = folder(&|tensors| {
        let at = find(tensors);
        tensors.remove(at);
    });
    names(&error(&lacking), &[scale, "missing", "scales"]);
    let short = folder(&|tensors| {
        let at = find(tensors);
        tensors[at].cut_rows(1);
    });
    names(&error(&short), &[scale, "[1, 2]", "[128, 64]"]);
    let plain = folder(&|_| ());
    plain.configure("quantization_config", serde_json::Value::Null);
    names(&error(&plain), &["q_proj.weight", "quantised", "quantization_config"]);
    let other = folder(&|_| ());
    other.configure("quantization_config", serde_json::json!({"quant_method": "awq", "bits": 4}));
    names(&error(&other), &["config.json", "quant_method \"awq\", 4 bits", "\"fp8\""]);
    let said = worker::check::model(other.path(), 1, Quantization::None).unwrap_err().to_string();
    assert_eq!(said, error(&other), "what doctor says");
    for folder in [&lacking, &short] {
        let said = worker::check::model(folder.path(), 1, Quantization::None).unwrap_err();
        assert_eq!(said.to_string(), error(folder), "what doctor says");
    }
    for lacking in ["lm_head.weight", "model.layers.1.self_attn.o_proj.weight"] {
        let dense = Folder::copy_of("llama-gqa");
        dense.edit(|tensors| tensors.retain(|tensor| tensor.name != lacking));
        let said = worker::check::model(dense.path(), 1, Quantization::None).unwrap_err();
        assert_eq!(said.to_string(), error(&dense), "what doctor says");
        names(&said.to_string(), &[lacking, "missing"]);
    }
    // Norms are never quantised.
    let norm = folder(&|tensors| {
        let norm = tensors.iter_mut().find(|t| t.name == "model.norm.weight").unwrap();
        norm.dtype = "F8_E4M3".to_owned();
        norm.data.truncate(norm.shape[0]);
    });
    names(&error(&norm), &["model.norm.weight", "F8E4M3", "BF16, F16 or F32"]);
}

/// The worker's error for a model with changed tensors; `tutti doctor` must report the same.
fn error_of(model: &str, change: &dyn Fn(&mut Vec<Tensor>)) -> String {
    let folder = Folder::copy_of(model);
    folder.edit(change);
    let error = engine(folder.path(), 0, 1, single_rank()).map(|_| ()).unwrap_err().to_string();
    let said = worker::check::model(folder.path(), 1, Quantization::None).unwrap_err();
    assert_eq!(said.to_string(), error, "what doctor says");
    error
}

#[test]
fn packed_tensors_need_all_their_parts() {
    let layer = "model.layers.1.mlp.up_proj";
    for (model, parts) in [
        ("llama-gptq", &["qweight", "scales"][..]),
        ("qwen2-gptq-order", &["g_idx", "qzeros"]),
        ("qwen3-awq", &["qweight", "qzeros", "scales"]),
        ("llama-w4a16", &["weight_packed", "weight_scale", "weight_shape"]),
    ] {
        for part in parts {
            let name = format!("{layer}.{part}");
            let lacking = error_of(model, &|tensors| tensors.retain(|tensor| tensor.name != name));
            names(&lacking, &[&name, "missing"]);
        }
    }
    let edited = |model: &str, part: &str, change: &dyn Fn(&mut Tensor)| {
        let name = format!("{layer}.{part}");
        error_of(model, &|tensors| change(tensors.iter_mut().find(|t| t.name == name).unwrap()))
    };
    let short = edited("llama-gptq", "qweight", &|tensor| tensor.cut_rows(7));
    names(&short, &["up_proj.qweight", "[7, 128]", "[8, 128]"]);
    let few = edited("qwen3-awq", "scales", &|tensor| tensor.cut_rows(3));
    names(&few, &["up_proj.scales", "[3, 128]", "[4, 128]"]);
    let float = edited("qwen2-gptq-order", "qzeros", &|tensor| tensor.dtype = "F32".to_owned());
    names(&float, &["up_proj.qzeros", "F32", "I32"]);
    let beyond = edited("qwen2-gptq-order", "g_idx", &|tensor| tensor.data[4] = 4);
    names(&beyond, &["up_proj.g_idx", "has 4, but there are 4 groups"]);
    let other = edited("llama-w4a16", "weight_shape", &|tensor| tensor.data[0] = 7);
    names(&other, &["up_proj.weight_shape", "is [7, 64]", "[128, 64]"]);
}

#[test]
fn experts_of_gpt_oss_need_all_their_parts() {
    for (model, parts) in [
        ("gpt-oss", &["experts.gate_up_proj", "experts.down_proj", "experts.down_proj_bias"][..]),
        ("gpt-oss", &["router.weight", "router.bias", "experts.gate_up_proj_bias"]),
        ("gpt-oss-mxfp4", &["experts.gate_up_proj_scales", "experts.down_proj_scales"]),
    ] {
        for part in parts {
            let name = format!("model.layers.1.mlp.{part}");
            let lacking = error_of(model, &|tensors| tensors.retain(|tensor| tensor.name != name));
            names(&lacking, &[&name, "missing"]);
        }
    }
    let edited = |part: &str, change: &dyn Fn(&mut Tensor)| {
        let name = format!("model.layers.1.mlp.experts.{part}");
        let change = |tensors: &mut Vec<Tensor>| {
            change(tensors.iter_mut().find(|tensor| tensor.name == name).unwrap());
        };
        error_of("gpt-oss-mxfp4", &change)
    };
    let short = edited("down_proj_scales", &|tensor| tensor.cut_rows(5));
    names(&short, &["down_proj_scales", "[5, 64, 2]", "[6, 64, 2]"]);
    let signed = edited("gate_up_proj_blocks", &|tensor| tensor.dtype = "I8".to_owned());
    names(&signed, &["gate_up_proj_blocks", "I8", "U8"]);
    // Includes the sinks of each rank's heads.
    let folder = Folder::copy_of("gpt-oss");
    folder.edit(|tensors| {
        tensors.retain(|tensor| !tensor.name.ends_with("layers.1.self_attn.sinks"))
    });
    let error = engine(folder.path(), 0, 1, single_rank()).map(|_| ()).unwrap_err().to_string();
    names(&error, &["model.layers.1.self_attn.sinks", "missing"]);
    // Columns that are not a multiple of a scale's inputs do not rule out a degree.
    let error = worker::check::model(&variant("gpt-oss-mxfp4"), 3, Quantization::None);
    let error = error.unwrap_err().to_string();
    names(&error, &["degree 3", "experts of 64", "possible degrees: 1, 2, 4"]);
}

/// Symmetric checkpoints may store plain zero points in a format that stores them reduced by one,
/// or none at all.
#[test]
fn zeros_of_symmetric_checkpoints_mean_nothing() {
    let tokens = |change: &dyn Fn(&mut Vec<Tensor>)| {
        let folder = Folder::copy_of("llama-gptq");
        folder.edit(change);
        let answers = crate::quantised::answers(On::Reference, folder.path(), 1);
        answers.iter().map(|seq| seq.output().to_vec()).collect::<Vec<_>>()
    };
    let is_zeros = |tensor: &Tensor| tensor.name.ends_with("qzeros");
    let written = tokens(&|tensors| assert!(tensors.iter().any(is_zeros)));
    let other = tokens(&|tensors| {
        let zeros = tensors.iter_mut().filter(|tensor| is_zeros(tensor));
        zeros.for_each(|tensor| tensor.data.fill(0x88));
    });
    assert_eq!(other, written);
    assert_eq!(tokens(&|tensors| tensors.retain(|tensor| !is_zeros(tensor))), written);
}

/// Checkpoints with a zero point per group must have the tensor.
#[test]
fn zeros_of_other_checkpoints_are_needed() {
    let folder = Folder::copy_of("qwen3-moe-w4a16");
    folder.edit(|tensors| tensors.retain(|tensor| !tensor.name.ends_with("weight_zero_point")));
    let error = engine(folder.path(), 0, 1, single_rank()).map(|_| ()).unwrap_err().to_string();
    names(&error, &["weight_zero_point", "missing"]);
}

/// Ranks keep about as many bytes as the files have.
#[test]
fn weights_of_4_and_8_bits_stay_small() {
    let bytes_with = |model: &str, quantization| {
        worker::check::model(&variant(model), 1, quantization).unwrap().weight_bytes
    };
    let bytes = |model: &str| bytes_with(model, Quantization::None);
    assert!(bytes("llama-gptq") < bytes("llama-gqa") * 2 / 3);
    assert!(bytes("qwen3-moe-w4a16") < bytes("qwen3-moe") / 2);
    assert!(bytes("mistral-gptq-8") > bytes("mistral-swa") * 9 / 10);
    assert!(bytes("gpt-oss-mxfp4") < bytes("gpt-oss") * 3 / 5);
    assert!(bytes("qwen2-fp8") < bytes("qwen2") * 3 / 4);
    assert!(bytes("qwen3-fp8-blocks") < bytes("qwen3") * 4 / 5);
    assert!(bytes("qwen3-moe-fp8") < bytes("qwen3-moe") * 2 / 3);
    assert!(bytes_with("qwen3-moe-fp8", Quantization::Int8) < bytes("qwen3-moe-fp8"));
    // Computed from the shapes in the files: 5 bytes for each output of a group of 4-bit integers,
    // 4 of floats, 4 for each scale of FP8.
    for (model, want) in [
        ("llama-gptq", 146_688),
        ("qwen3-moe-w4a16", 247_616),
        ("llama-w4a16", 152_064),
        ("gpt-oss-mxfp4", 290_304),
        ("qwen2-fp8", 126_976),
        ("qwen3-fp8-blocks", 159_744),
        ("qwen3-moe-fp8", 369_408),
    ] {
        assert_eq!(bytes(model), want, "{model}");
        let config = ModelConfig::load(&variant(model)).unwrap();
        let (files, shard) =
            (WeightFiles::open(&variant(model)).unwrap(), Shard::new(&config, 0, 1).unwrap());
        let source = Source { files: &files, config: &config, shard: &shard };
        let mut backend = ReferenceBackend::new(single_rank());
        let loaded =
            weights::load(&mut backend, &source, Quantization::None, 32, &mut |_, _| {}).unwrap();
        assert_eq!(loaded.bytes, bytes(model), "{model}");
    }
}

/// Configurations do not list every matrix that the files have in bf16.
#[test]
fn weights_that_are_not_quantised_are_counted_as_they_are() {
    let bytes = |model: &str, plain: &str| {
        let folder = Folder::copy_of(model);
        folder.edit(|tensors| {
            let tensor = tensors.iter_mut().find(|tensor| tensor.name == plain).unwrap();
            (tensor.dtype, tensor.data) = ("BF16".to_owned(), vec![0; 2 * tensor.data.len()]);
        });
        worker::check::model(folder.path(), 1, Quantization::None).unwrap().weight_bytes
    };
    let down = "model.layers.1.mlp.down_proj.weight";
    assert_eq!(bytes("qwen2-fp8", down), 126_976 + 64 * (128 - 4));
    // All gates and ups of the layer's ten experts become bf16.
    let gate = "model.layers.2.mlp.experts.3.gate_proj.weight";
    assert_eq!(bytes("qwen3-moe-fp8", gate), 369_408 + 10 * 2 * 40 * (64 - 4));
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

#[test]
fn keys_laid_over_a_configuration_are_checked_like_its_own() {
    let over = |text: &str| ConfigOverrides::parse(text).unwrap();
    let error = |text: &str| {
        let model = variant("llama-gqa");
        let checked = worker::check::model_with(&model, &over(text), 1, Quantization::None);
        checked.unwrap_err().to_string()
    };
    let negative = "config.json: with --hf-overrides: rms_norm_eps is -1, it must be between";
    names(&error(r#"{"rms_norm_eps": -1}"#), &[negative]);
    names(&error(r#"{"hidden_size": null}"#), &["with --hf-overrides: key hidden_size is missing"]);
    names(&error(r#"{"hidden_size": "a"}"#), &["with --hf-overrides: hidden_size: invalid type"]);
    // Tensors are held against the result.
    names(&error(r#"{"intermediate_size": 96}"#), &["gate_proj", "config.json requires [96, 64]"]);
    let inner = |text: &str| ModelConfig::load_with(&variant("mistral3"), &over(text)).unwrap();
    let plain = inner("{}");
    let changed = inner(r#"{"text_config": {"rms_norm_eps": 0.5}, "rms_norm_eps": 0.25}"#);
    assert_eq!(changed, ModelConfig { norm_eps: 0.5, ..plain.clone() });
    assert_ne!(changed, plain);
}

/// An incomplete download lacks the last layer, which is noticed before anything is packed.
#[test]
fn a_missing_last_layer_is_found_before_anything_is_loaded() {
    let folder = Folder::copy_of("llama-gqa");
    folder.edit(|tensors| tensors.retain(|tensor| tensor.name != "model.norm.weight"));
    let config = ModelConfig::load(folder.path()).unwrap();
    let shard = Shard::new(&config, 0, 1).unwrap();
    let files = WeightFiles::open(folder.path()).unwrap();
    let mut backend = ReferenceBackend::new(single_rank());
    let mut reports = 0;
    let source = Source { files: &files, config: &config, shard: &shard };
    let mut progress = |_, _| reports += 1;
    let loaded = weights::load(&mut backend, &source, Quantization::None, 16, &mut progress);
    names(&loaded.unwrap_err().to_string(), &["tensor model.norm.weight", "missing"]);
    assert_eq!(reports, 0);
}

/// Counts bytes as in the files, of any type; replicated KV heads count on every rank.
#[test]
fn progress_ends_with_all_bytes_of_the_shard() {
    let folder = Folder::copy_of("llama-gqa");
    folder.edit(|tensors| tensors.iter_mut().for_each(Tensor::widen));
    let config = ModelConfig::load(folder.path()).unwrap();
    // f32 weights of embedding, head, q, k, v, o, gate, up and down.
    let (hidden, q, kv, inner) = (64, 64, 32, 128);
    for (degree, kv) in [(1, kv), (2, kv / 2), (4, 16)] {
        let share = 2 * 384 * hidden + 2 * (2 * q * hidden + 3 * inner * hidden);
        let expected = 4 * (share / u64::from(degree) + 2 * 2 * kv * hidden);
        let shard = Shard::new(&config, degree - 1, degree).unwrap();
        let files = WeightFiles::open(folder.path()).unwrap();
        let mut backend = ReferenceBackend::new(single_rank());
        let mut reports = Vec::new();
        let mut progress = |done, total| reports.push((done, total));
        let source = Source { files: &files, config: &config, shard: &shard };
        weights::load(&mut backend, &source, Quantization::None, 16, &mut progress).unwrap();
        assert_eq!(reports.first(), Some(&(0, expected)), "tp {degree}");
        assert_eq!(reports.last(), Some(&(expected, expected)), "tp {degree}");
        assert!(reports.is_sorted());
    }
}

/// Flipped bits anywhere in the length or the header are noticed, or change nothing that matters
/// (the name of an unused tensor); none causes a panic.
#[test]
fn no_flipped_header_bit_panics() {
    let folder = Folder::copy_of("llama-gqa");
    let file = folder.file("model.safetensors");
    let original = std::fs::read(&file).unwrap();
    let header = 8 + u64::from_le_bytes(*original.first_chunk().unwrap()) as usize;
    let (mut refused, mut tried) = (0, 0);
    for (i, byte) in (0..header).step_by(7).enumerate() {
        let mut bytes = original.clone();
        bytes[byte] ^= 1 << (i % 8);
        std::fs::write(&file, bytes).unwrap();
        tried += 1;
        if let Err(error) = engine(folder.path(), 0, 1, single_rank()) {
            names(&error.to_string(), &[folder.path().to_str().unwrap()]);
            refused += 1;
        }
    }
    assert!(refused * 10 > tried * 9, "{refused} of {tried}");
}

#[test]
fn an_index_names_files_of_its_folder_that_have_what_it_says() {
    let index = "model.safetensors.index.json";
    let assign = |file: &str| {
        let folder = Folder::copy_of("llama-gqa-sharded");
        folder.damage(index, |bytes| {
            let mut value: serde_json::Value = serde_json::from_slice(bytes).unwrap();
            value["weight_map"]["lm_head.weight"] = file.into();
            *bytes = value.to_string().into_bytes();
        });
        engine(folder.path(), 0, 1, single_rank()).map(|_| ()).unwrap_err().to_string()
    };
    let first = "model-00001-of-00004.safetensors";
    names(&assign(first), &[first, "tensor lm_head.weight", "not in this file"]);
    names(&assign("../../etc/passwd"), &[index, "../../etc/passwd", "not a plain file name"]);
}
