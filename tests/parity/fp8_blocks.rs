//! Checkpoints in FP8 with a scale for each block, as published of models whose projections are
//! divided, or joined, in ways of their own: what is computed are the values that the bytes and
//! scales make.
use kernels::fp8;
use serde_json::json;

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

/// A model's folder in which the tensors that `converts` are in blocks, and one with the values
/// that these make.
fn in_both_forms(model: &str, converts: impl Fn(&str) -> bool) -> [Folder; 2] {
    let [folder, twin] = [(); 2].map(|()| Folder::copy_of(model));
    let blocks = [BLOCK, BLOCK];
    folder.configure(
        "quantization_config",
        json!({"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
            "weight_block_size": blocks}),
    );
    let mut made = Vec::new();
    folder.edit(|tensors| {
        let mut all = Vec::new();
        for tensor in tensors.drain(..) {
            if !converts(&tensor.name) {
                all.push(tensor);
                continue;
            }
            let [quantised, scales, values] = in_blocks(&tensor);
            made.push(values);
            all.extend([quantised, scales]);
        }
        *tensors = all;
    });
    assert!(made.len() > 10, "{} are in blocks", made.len());
    twin.edit(|tensors| {
        for tensor in tensors.iter_mut() {
            if let Some(at) = made.iter().position(|made| made.name == tensor.name) {
                *tensor = made.swap_remove(at);
            }
        }
    });
    assert!(made.is_empty());
    [folder, twin]
}

fn check([folder, twin]: &[Folder; 2]) {
    for (on, degree) in [(On::Cpu, 1), (On::Cpu, 2), (On::Reference, 1)] {
        let [found, want] =
            [folder, twin].map(|folder| some_answers(on, folder.path(), degree, 3, 8));
        close(&found, &want, 1e-3, &format!("{on:?} at tp {degree}"));
    }
}

/// All projections, also of latents; and behind the last layer one that predicts several tokens,
/// which nobody reads.
#[test]
fn deepseek_v3() {
    let both = in_both_forms("deepseek-v3", |name| {
        name.ends_with("_proj.weight") || name.contains("_with_mqa")
    });
    both[0].configure("num_nextn_predict_layers", json!(1));
    both[0].edit(|tensors| {
        let name = "model.layers.3.eh_proj.weight".to_owned();
        tensors.push(Tensor { name, ..tensors[0].clone() });
    });
    check(&both);
}

/// All projections but those that make gates of linear attention.
#[test]
fn qwen3_next() {
    check(&in_both_forms("qwen3-next", |name| {
        name.ends_with("_proj.weight") || name.contains("in_proj_qkvz")
    }));
}

#[test]
fn qwen3_5() {
    check(&in_both_forms("qwen3_5", |name| {
        let is_joined = name.contains("in_proj_qkv") || name.contains("in_proj_z");
        !name.contains("visual") && (name.ends_with("_proj.weight") || is_joined)
    }));
}
