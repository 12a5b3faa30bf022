//! Damaged and unsupported model folders: one error that names file, key or tensor, and the reason;
//! never a panic, never a bus error.
use std::fs;
use std::path::Path;

use kernels::ReferenceBackend;
use serde_json::{Value, json};
use worker::error::ModelError;
use worker::model::Model;

use crate::checkpoint::Folder;
use crate::exchange;

fn load(dir: &Path, tp: u32) -> Result<Model<ReferenceBackend>, ModelError> {
    let rank = exchange::group(tp).remove(0);
    Model::load(&mut ReferenceBackend::new(Box::new(rank)), dir, &mut |_, _| {})
}

/// Asserts that loading fails for good with `expected`, all names relative to the folder.
#[track_caller]
fn assert_refused(folder: &Folder, expected: &str) {
    let error = load(folder.path(), 1).map(|_| ()).unwrap_err();
    let message = error.to_string();
    let folder_path = folder.path().display().to_string();
    let message = message.replace(&format!("{folder_path}/"), "").replace(&folder_path, "DIR");
    assert_eq!(message, expected);
    assert!(error.is_permanent());
}

const WEIGHTS: &str = "model.safetensors";

#[test]
fn an_undamaged_copy_loads() {
    load(Folder::copy_of("llama-gqa").path(), 1).unwrap();
    load(Folder::copy_of("llama-gqa-sharded").path(), 1).unwrap();
}

#[test]
fn truncated_files() {
    let folder = Folder::copy_of("llama-gqa");
    folder.damage(WEIGHTS, |bytes| bytes.truncate(bytes.len() - 1));
    assert_refused(
        &folder,
        "model.safetensors: is truncated: its header describes 246400 bytes of data, 246399 are \
         there",
    );
    folder.damage(WEIGHTS, |bytes| bytes.truncate(1000));
    assert_refused(
        &folder,
        "model.safetensors: is truncated: it announces a header of 2160 bytes and has 1000 bytes",
    );
    folder.damage(WEIGHTS, |bytes| bytes.truncate(7));
    assert_refused(&folder, "model.safetensors: has 7 bytes: not a safetensors file");
    folder.damage(WEIGHTS, Vec::clear);
    assert_refused(&folder, "model.safetensors: has 0 bytes: not a safetensors file");
}

#[test]
fn an_appended_byte_is_damage() {
    let folder = Folder::copy_of("llama-gqa");
    folder.damage(WEIGHTS, |bytes| bytes.push(0));
    assert_refused(
        &folder,
        "model.safetensors: is damaged: its header describes 246400 bytes of data, 246401 are there",
    );
}

#[test]
fn a_header_length_beyond_the_bound_is_not_believed() {
    let folder = Folder::copy_of("llama-gqa");
    folder.damage(WEIGHTS, |bytes| bytes[..8].copy_from_slice(&u64::MAX.to_le_bytes()));
    assert_refused(
        &folder,
        "model.safetensors: announces a header of 18446744073709551615 bytes, the bound is \
         16777216: damaged, or not a safetensors file",
    );
}

/// Every single bit flip in length and header either is noticed, or changes nothing that matters
/// (a name in the metadata): it never panics.
#[test]
fn no_flipped_header_bit_panics() {
    let folder = Folder::copy_of("llama-gqa");
    let original = fs::read(folder.file(WEIGHTS)).unwrap();
    let header = 8 + u64::from_le_bytes(*original.first_chunk().unwrap()) as usize;
    let mut refused = 0;
    let mut tried = 0;
    // Every 7th byte and, over them, every bit: enough to hit every kind of field.
    for (i, byte) in (0..header).step_by(7).enumerate() {
        let mut bytes = original.clone();
        bytes[byte] ^= 1 << (i % 8);
        fs::write(folder.file(WEIGHTS), bytes).unwrap();
        tried += 1;
        if let Err(error) = load(folder.path(), 1) {
            assert!(error.to_string().contains(WEIGHTS) || error.to_string().contains("tensor"));
            refused += 1;
        }
    }
    assert!(refused * 10 > tried * 9, "{refused} of {tried}");
}

#[test]
fn missing_files() {
    let folder = Folder::copy_of("llama-gqa");
    fs::remove_file(folder.file(WEIGHTS)).unwrap();
    assert_refused(&folder, "model.safetensors: No such file or directory (os error 2)");
    fs::remove_file(folder.file("config.json")).unwrap();
    assert_refused(&folder, "config.json: No such file or directory (os error 2)");

    let folder = Folder::copy_of("llama-gqa-sharded");
    fs::remove_file(folder.file("model-00003-of-00004.safetensors")).unwrap();
    assert_refused(
        &folder,
        "model-00003-of-00004.safetensors: No such file or directory (os error 2)",
    );
}

#[test]
fn an_index_that_does_not_fit_its_files() {
    let index = "model.safetensors.index.json";
    let edit = |folder: &Folder, change: fn(&mut Value)| {
        folder.damage(index, |bytes| {
            let mut value = serde_json::from_slice(bytes).unwrap();
            change(&mut value);
            *bytes = value.to_string().into_bytes();
        });
    };
    let folder = Folder::copy_of("llama-gqa-sharded");
    edit(&folder, |value| {
        value["weight_map"]["lm_head.weight"] = json!("model-00001-of-00004.safetensors");
    });
    assert_refused(
        &folder,
        "model-00001-of-00004.safetensors: tensor `lm_head.weight` is missing; \
         model.safetensors.index.json says it is in this file",
    );
    edit(&folder, |value| value["weight_map"]["lm_head.weight"] = json!("../../etc/passwd"));
    assert_refused(
        &folder,
        "model.safetensors.index.json: names `../../etc/passwd`, which is not a file of this folder",
    );
    folder.damage(index, |bytes| bytes.truncate(10));
    let error = load(folder.path(), 1).unwrap_err().to_string();
    assert!(error.contains("model.safetensors.index.json: is damaged: EOF"), "{error}");
}

#[test]
fn tensors_that_do_not_fit_the_configuration() {
    let name = "model.layers.1.mlp.down_proj.weight";
    let folder = Folder::copy_of("llama-gqa");
    folder.edit(|tensors| tensors.retain(|tensor| tensor.name != name));
    assert_refused(
        &folder,
        "DIR: tensor `model.layers.1.mlp.down_proj.weight` is missing; expected with shape \
         [64, 128]",
    );

    let folder = Folder::copy_of("llama-gqa");
    folder.edit(|tensors| {
        tensors.iter_mut().find(|tensor| tensor.name == name).unwrap().shape = vec![128, 64];
    });
    assert_refused(
        &folder,
        "model.safetensors: tensor `model.layers.1.mlp.down_proj.weight` has shape [128, 64], \
         expected [64, 128]",
    );

    let folder = Folder::copy_of("llama-gqa");
    folder.edit(|tensors| {
        tensors.iter_mut().find(|tensor| tensor.name == name).unwrap().dtype = "I16".to_owned();
    });
    assert_refused(
        &folder,
        "model.safetensors: tensor `model.layers.1.mlp.down_proj.weight` has type I16, expected \
         BF16, F16 or F32",
    );

    // The bias that a rank would not keep is checked all the same.
    let folder = Folder::copy_of("llama-gqa");
    folder.configure("mlp_bias", json!(true));
    let error = load(folder.path(), 1).unwrap_err().to_string();
    assert!(error.contains("`model.layers.0.mlp.gate_proj.bias` is missing"), "{error}");
}

#[test]
fn configurations() {
    let supported = "supported: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, \
                     Qwen3ForCausalLM";
    let cases = [
        (
            "architectures",
            json!(["GPT2LMHeadModel"]),
            format!("[\"GPT2LMHeadModel\"] is not supported; {supported}"),
        ),
        ("architectures", Value::Null, format!("is missing; {supported}")),
        ("hidden_size", Value::Null, "is missing".to_owned()),
        ("vocab_size", Value::Null, "is missing".to_owned()),
        ("num_hidden_layers", json!(0), "is 0, it must be an integer in 1..=1024".to_owned()),
        (
            "num_attention_heads",
            json!("4"),
            "is \"4\", it must be an integer in 1..=4096".to_owned(),
        ),
        ("intermediate_size", json!(-1), "is -1, it must be an integer in 1..=1048576".to_owned()),
        ("num_key_value_heads", json!(3), "is 3, it must divide num_attention_heads, 4".to_owned()),
        ("head_dim", json!(15), "is 15, it must be even for rotary embedding".to_owned()),
        ("tie_word_embeddings", json!(1), "is 1, it must be true or false".to_owned()),
        ("hidden_act", json!("gelu"), "is `gelu`, supported: silu".to_owned()),
        ("rms_norm_eps", json!(2), "is 2, it must be a number in 0..=1".to_owned()),
        ("eos_token_id", json!([2, 384]), "has 384, token ids are in 0..384".to_owned()),
        (
            "quantization_config",
            json!({"quant_method": "awq"}),
            "quantized weights are not supported; use the bf16, f16 or f32 model".to_owned(),
        ),
    ];
    for (key, value, problem) in cases {
        let folder = Folder::copy_of("llama-gqa");
        folder.configure(key, value);
        assert_refused(&folder, &format!("config.json: {key}: {problem}"));
    }
}

#[test]
fn rope_scalings() {
    for (scaling, message) in [
        (
            json!({"rope_type": "yarn", "factor": 4.0}),
            "config.json: rope_scaling.rope_type: \"yarn\" is not supported; supported: default, \
             linear, llama3",
        ),
        (
            json!({"type": "dynamic", "factor": 4.0}),
            "config.json: rope_scaling.rope_type: \"dynamic\" is not supported; supported: \
             default, linear, llama3",
        ),
        (json!({"rope_type": "linear"}), "config.json: rope_scaling.factor: is missing"),
        (json!(3), "config.json: rope_scaling: is 3, it must be an object"),
    ] {
        let folder = Folder::copy_of("llama-gqa");
        folder.configure("rope_scaling", scaling);
        assert_refused(&folder, message);
    }
}

#[test]
fn text_that_is_no_configuration() {
    let folder = Folder::copy_of("llama-gqa");
    folder.damage("config.json", |bytes| bytes.truncate(20));
    let error = load(folder.path(), 1).unwrap_err().to_string();
    assert!(error.contains("config.json: is not a JSON object: EOF"), "{error}");
    folder.damage("config.json", |bytes| *bytes = b"[1]".to_vec());
    let error = load(folder.path(), 1).unwrap_err().to_string();
    assert!(error.contains("config.json: is not a JSON object"), "{error}");
    folder.damage("config.json", |bytes| bytes.resize(2 << 20, b' '));
    assert_refused(&folder, "config.json: has 2097152 bytes, the bound is 1048576");
}

#[test]
fn a_degree_that_does_not_divide_names_those_that_do() {
    let error = load(Folder::copy_of("llama-gqa").path(), 3).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the model cannot be split over 3 ranks: it has 4 attention heads; possible degrees: \
         1, 2, 4"
    );
    assert!(error.is_permanent());
}

#[test]
fn progress_ends_with_all_bytes_of_the_shard() {
    let folder = Folder::copy_of("llama-gqa");
    let rank = exchange::group(2).remove(0);
    let mut reports = Vec::new();
    let model = Model::load(
        &mut ReferenceBackend::new(Box::new(rank)),
        folder.path(),
        &mut |done, total| reports.push((done, total)),
    )
    .unwrap();
    // Half of the matrices' parameters in bf16; norms are not counted.
    let matrices = model.config.num_parameters() - 5 * 64;
    assert_eq!(model.weight_bytes, matrices);
    assert!(reports.is_sorted() && reports.len() > 4);
    assert_eq!(reports.first(), Some(&(0, matrices)));
    assert_eq!(reports.last(), Some(&(matrices, matrices)));
    assert_eq!(model.config.num_parameters(), 123_200, "as the sharded copy's index says");
}
