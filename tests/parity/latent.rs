//! Multi-head latent attention: what published checkpoints have that the repository's models do
//! not, and what is refused.
use kernels::fp8;
use serde_json::json;
use shared::protocol::{Lora, Quantization};
use testkit::models::variant;
use worker::model::config::ModelConfig;
use worker::model::lora::LoraFiles;

use crate::checkpoint::{Folder, Tensor};
use crate::quantised::{close, some_answers};
use crate::rig::On;

/// Rows and columns that share a scale; they end within heads and within a rank's part.
const BLOCK: usize = 20;

/// The tensor in FP8 with a power of two per block, its scales, and the values that both make.
fn in_blocks(tensor: &Tensor) -> [Tensor; 3] {
    let (rows, cols) = (tensor.shape[0], tensor.shape[1]);
    let value = |at: usize| {
        let high = u16::from_le_bytes([tensor.data[2 * at], tensor.data[2 * at + 1]]);
        f32::from_bits(u32::from(high) << 16)
    };
    let shape = [rows.div_ceil(BLOCK), cols.div_ceil(BLOCK)];
    let mut scales = vec![0f32; shape[0] * shape[1]];
    let block = |at: usize| at / cols / BLOCK * shape[1] + at % cols / BLOCK;
    for at in 0..rows * cols {
        let least = (value(at).abs() / 256.0).log2().ceil().exp2();
        let scale = &mut scales[block(at)];
        *scale = scale.max(least);
    }
    let bytes: Vec<u8> =
        (0..rows * cols).map(|at| fp8::to_byte(value(at) / scales[block(at)])).collect();
    let made = bytes.iter().enumerate().flat_map(|(at, &byte)| {
        // Exact: a byte has 4 significant bits.
        let value = fp8::from_byte(byte) * scales[block(at)];
        let [.., a, b] = value.to_le_bytes();
        [a, b]
    });
    let made = Tensor { data: made.collect(), ..tensor.clone() };
    let data = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
    let name = format!("{}_scale_inv", tensor.name);
    let scales = Tensor { name, dtype: "F32".to_owned(), shape: shape.to_vec(), data };
    [Tensor { dtype: "F8_E4M3".to_owned(), data: bytes, ..tensor.clone() }, scales, made]
}

/// As DeepSeek-V3 is published: all projections in FP8, in blocks, and behind the last layer one
/// that predicts several tokens, which nobody reads.
#[test]
fn checkpoints_in_fp8_blocks_are_their_values() {
    let [folder, twin] = [(); 2].map(|()| Folder::copy_of("deepseek-v3"));
    let blocks = [BLOCK, BLOCK];
    folder.configure(
        "quantization_config",
        json!({"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
            "weight_block_size": blocks}),
    );
    folder.configure("num_nextn_predict_layers", json!(1));
    let mut made = Vec::new();
    folder.edit(|tensors| {
        let mut all = Vec::new();
        for tensor in tensors.drain(..) {
            if !tensor.name.ends_with("_proj.weight") && !tensor.name.contains("_with_mqa") {
                all.push(tensor);
                continue;
            }
            let [quantised, scales, values] = in_blocks(&tensor);
            made.push(values);
            all.extend([quantised, scales]);
        }
        let name = "model.layers.3.eh_proj.weight".to_owned();
        all.push(Tensor { name, ..all[0].clone() });
        *tensors = all;
    });
    assert!(made.iter().any(|tensor| tensor.name.contains("kv_b_proj")), "what is divided");
    twin.edit(|tensors| {
        for tensor in tensors.iter_mut() {
            if let Some(at) = made.iter().position(|made| made.name == tensor.name) {
                *tensor = made.swap_remove(at);
            }
        }
    });
    assert!(made.is_empty());
    for (on, degree) in [(On::Cpu, 1), (On::Cpu, 2), (On::Reference, 1)] {
        let [found, want] =
            [&folder, &twin].map(|folder| some_answers(on, folder.path(), degree, 3, 8));
        close(&found, &want, 1e-3, &format!("{on:?} at tp {degree}"));
    }
}

/// No rank loads a model of which it would use only a part.
#[test]
fn adapters_are_refused() {
    let fixed = Lora::fixed([("a".to_owned(), "/nowhere".to_owned())], 16);
    let places = Lora { places: 2, ..Lora::fixed([], 16) };
    for (model, kind) in [
        ("deepseek-v2", "multi-head latent attention (DeepSeek's)"),
        ("qwen3_5", "linear attention (Qwen3-Next, Qwen3.5)"),
    ] {
        let config = ModelConfig::load(&variant(model)).unwrap();
        for lora in [&fixed, &places] {
            let error = LoraFiles::open(lora, &config).unwrap_err().to_string();
            assert!(error.contains(&format!("LoRA adapters of models with {kind}")), "{error}");
        }
        assert!(LoraFiles::open(&Lora::fixed([], 16), &config).is_ok());
    }
}

/// What all ranks have counts for each of them.
#[test]
fn weights_are_counted_as_ranks_keep_them() {
    let folder = variant("deepseek-v3");
    let needs = |degree| worker::check::model(&folder, degree, Quantization::None).unwrap();
    let (one, two) = (needs(1).weight_bytes, needs(2).weight_bytes);
    // Of 3 layers q's and the latents' first projections, and of 2 the routers.
    assert_eq!(two - one, 2 * (3 * (40 + 48 + 16) * 64 + 2 * 8 * 64));
}

/// As GLM's and DeepSeek's files have one.
#[test]
fn a_layer_that_is_not_loaded_takes_no_memory() {
    let folder = Folder::copy_of("glm4-moe");
    let needs = || worker::check::model(folder.path(), 1, Quantization::None).unwrap();
    let without = needs();
    folder.edit(|tensors| {
        let name = "model.layers.3.eh_proj.weight".to_owned();
        tensors.push(Tensor { name, ..tensors[0].clone() });
    });
    assert_eq!(needs(), without);
}
