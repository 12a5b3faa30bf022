//! Quantised checkpoints: what `quantization_config` of a `config.json` says, and where the scales of
//! a quantised tensor are.
//!
//! FP8 and int8 weights are read, each multiplied by its scale, as numbers: activations stay what
//! `--dtype` makes of them, whatever the checkpoint was made for (`input_scale`, scales of KV caches
//! are left alone).
use kernels::backend::{DType, Scales};
use serde::Deserialize;
use std::collections::BTreeMap;

use super::ModelError;
use super::safetensors::{TensorView, WeightFiles};

/// What is read, for messages.
const SUPPORTED: &str = "supported are checkpoints in bf16, f16 and f32, quant_method \"fp8\", and \
                         \"compressed-tensors\" with weights of 8 bits, float or symmetric int, \
                         with a scale for each tensor, channel or (float) block";

/// A checkpoint with quantised weights that can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantised {
    /// Rows and columns that share a scale, where scales are of blocks.
    pub block: Option<(usize, usize)>,
}

/// The key of `config.json`, as much of it as tells methods apart.
#[derive(Deserialize)]
pub(crate) struct RawQuantization {
    quant_method: Option<String>,
    bits: Option<u32>,
    load_in_4bit: Option<bool>,
    load_in_8bit: Option<bool>,
    weight_block_size: Option<Vec<usize>>,
    format: Option<String>,
    config_groups: Option<BTreeMap<String, RawGroup>>,
    sparsity_config: Option<RawFormat>,
    transform_config: Option<RawTransforms>,
}

#[derive(Deserialize)]
struct RawGroup {
    weights: Option<RawWeights>,
    format: Option<String>,
}

#[derive(Deserialize)]
struct RawWeights {
    num_bits: Option<u32>,
    #[serde(rename = "type")]
    kind: Option<String>,
    strategy: Option<String>,
    symmetric: Option<bool>,
    block_structure: Option<Vec<usize>>,
}

#[derive(Deserialize)]
struct RawFormat {
    format: Option<String>,
}

#[derive(Deserialize)]
struct RawTransforms {
    config_groups: Option<BTreeMap<String, serde::de::IgnoredAny>>,
}

/// How a checkpoint's weights are quantised.
///
/// # Errors
/// What cannot be read by its name, and what is supported.
pub(crate) fn check(raw: &RawQuantization) -> Result<Quantised, String> {
    match raw.quant_method.as_deref() {
        Some("fp8") => {
            Ok(Quantised { block: raw.weight_block_size.as_deref().map(block).transpose()? })
        }
        Some("compressed-tensors") => compressed_tensors(raw),
        method => {
            let method = match method {
                Some(method) => format!("quant_method \"{method}\""),
                None if raw.load_in_4bit == Some(true) || raw.load_in_8bit == Some(true) => {
                    "bitsandbytes".to_owned()
                }
                None => "without a quant_method".to_owned(),
            };
            let bits = raw.bits.map_or(String::new(), |bits| format!(", {bits} bits"));
            Err(unsupported(&format!("{method}{bits}")))
        }
    }
}

fn unsupported(what: &str) -> String {
    format!("quantization_config ({what}) is not supported; {SUPPORTED}")
}

fn block(sizes: &[usize]) -> Result<(usize, usize), String> {
    match sizes {
        &[rows, cols] if rows > 0 && cols > 0 => Ok((rows, cols)),
        _ => Err(unsupported(&format!("blocks of {sizes:?}, not of two numbers above 0"))),
    }
}

fn compressed_tensors(raw: &RawQuantization) -> Result<Quantised, String> {
    let refuse =
        |what: String| Err(unsupported(&format!("quant_method \"compressed-tensors\", {what}")));
    let readable = ["float-quantized", "int-quantized", "naive-quantized", "dense"];
    let groups = raw.config_groups.iter().flatten();
    let formats = groups.clone().filter_map(|(_, group)| group.format.as_ref());
    for format in raw.format.iter().chain(formats) {
        if !readable.contains(&format.as_str()) {
            return refuse(format!("format \"{format}\""));
        }
    }
    let sparsity = raw.sparsity_config.as_ref().and_then(|config| config.format.as_deref());
    if let Some(format) = sparsity.filter(|format| *format != "dense") {
        return refuse(format!("sparsity \"{format}\""));
    }
    let transforms = raw.transform_config.as_ref().and_then(|all| all.config_groups.as_ref());
    if transforms.is_some_and(|groups| !groups.is_empty()) {
        return refuse("with transforms".to_owned());
    }
    let mut found = Quantised { block: None };
    for (name, group) in groups {
        let Some(weights) = &group.weights else { continue };
        let (kind, bits) = (weights.kind.as_deref().unwrap_or("int"), weights.num_bits);
        let strategy = weights.strategy.as_deref().unwrap_or("tensor");
        let is_good = bits == Some(8)
            && weights.symmetric.unwrap_or(true)
            && matches!(
                (kind, strategy),
                ("int" | "float", "tensor" | "channel") | ("float", "block")
            );
        if !is_good {
            let bits = bits.map_or("?".to_owned(), |bits| bits.to_string());
            let form = if weights.symmetric == Some(false) { ", asymmetric" } else { "" };
            return refuse(format!("{name}: {bits} bits, {kind}, by {strategy}{form}"));
        }
        if strategy == "block" {
            let own = block(weights.block_structure.as_deref().unwrap_or_default())?;
            if found.block.is_some_and(|other| other != own) {
                return refuse("with blocks of several sizes".to_owned());
            }
            found.block = Some(own);
        }
    }
    Ok(found)
}

/// A model's tensors, quantised ones with their scales.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tensors<'a> {
    /// The files.
    pub(crate) files: &'a WeightFiles,
    /// What their configuration says of quantisation.
    pub(crate) quantised: Option<Quantised>,
}

impl<'a> Tensors<'a> {
    /// A weight matrix of exactly this shape, `[out, in]`.
    ///
    /// # Errors
    /// [`ModelError::Tensor`] when it or its scales are missing, or of another shape or type.
    pub(crate) fn weight(
        &self,
        name: &str,
        shape: &[usize; 2],
    ) -> Result<TensorView<'a>, ModelError> {
        let view = self.files.any_tensor(name, Some(shape))?;
        if !matches!(view.dtype, DType::F8E4M3 | DType::I8) {
            return Ok(view);
        }
        let wrong = |tensor: &str, message: String| {
            let (file, tensor) = (view.file.to_owned(), tensor.to_owned());
            Err(ModelError::Tensor { file, tensor, message })
        };
        let Some(quantised) = self.quantised else {
            let message = "is quantised, of which quantization_config in config.json says nothing";
            return wrong(name, message.to_owned());
        };
        // The first name is DeepSeek's; both are multiplied by.
        let names = [format!("{name}_scale_inv"), format!("{name}_scale")];
        let Some(scale_name) = names.iter().find(|name| self.files.has(name)) else {
            return wrong(&names[1], "is missing, the scales of a quantised tensor".to_owned());
        };
        let scales = self.files.any_tensor(scale_name, None)?;
        if matches!(scales.dtype, DType::F8E4M3 | DType::I8) {
            let message = format!("is of type {:?}; scales are BF16, F16 or F32", scales.dtype);
            return wrong(scale_name, message);
        }
        let [rows, cols] = *shape;
        let blocks = quantised.block.map(|(a, b)| (a, b, [rows.div_ceil(a), cols.div_ceil(b)]));
        let (block, row_stride) = match (blocks, scales.shape) {
            (Some((a, b, counts)), found) if found == counts => ((a, b), counts[1]),
            (_, [] | [1] | [1, 1]) => ((usize::MAX, usize::MAX), 1),
            (_, [n] | [n, 1]) if *n == rows => ((1, usize::MAX), 1),
            (_, found) => {
                let message = format!("has shape {found:?}, which fits no tensor of {shape:?}");
                return wrong(scale_name, message);
            }
        };
        let Some(data) = Some(scales.data).filter(|data| !data.is_empty()) else {
            return wrong(scale_name, "is empty".to_owned());
        };
        let scales = Scales { data, dtype: scales.dtype, block, row_stride, first_row: 0 };
        Ok(TensorView { scales: Some(scales), ..view })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Quantised, String> {
        check(&serde_json::from_str(text).unwrap())
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let group = |weights: &str| {
            format!(
                r#"{{"quant_method": "compressed-tensors", "format": "float-quantized",
                    "config_groups": {{"group_0": {{"weights": {weights}}}}}}}"#
            )
        };
        let cases = [
            (r#"{"quant_method": "gptq", "bits": 4}"#, "(quant_method \"gptq\", 4 bits)"),
            (r#"{"quant_method": "awq", "bits": 4}"#, "(quant_method \"awq\", 4 bits)"),
            (r#"{"quant_method": "mxfp4"}"#, "(quant_method \"mxfp4\")"),
            (r#"{"load_in_4bit": true}"#, "(bitsandbytes)"),
            (r#"{"bits": 3}"#, "(without a quant_method, 3 bits)"),
            (r#"{"quant_method": "fp8", "weight_block_size": [128]}"#, "blocks of [128]"),
            (r#"{"quant_method": "fp8", "weight_block_size": [0, 128]}"#, "blocks of [0, 128]"),
            (
                r#"{"quant_method": "compressed-tensors", "format": "pack-quantized"}"#,
                "format \"pack-quantized\"",
            ),
            (
                r#"{"quant_method": "compressed-tensors",
                    "sparsity_config": {"format": "sparse-24-bitmask"}}"#,
                "sparsity \"sparse-24-bitmask\"",
            ),
            (
                r#"{"quant_method": "compressed-tensors",
                    "transform_config": {"config_groups": {"R1": {}}}}"#,
                "with transforms",
            ),
            (&group(r#"{"num_bits": 4, "type": "float"}"#), "group_0: 4 bits, float, by tensor"),
            (
                &group(r#"{"num_bits": 8, "type": "int", "strategy": "group"}"#),
                "group_0: 8 bits, int, by group",
            ),
            (&group(r#"{"num_bits": 8, "type": "int", "symmetric": false}"#), "asymmetric"),
        ];
        for (text, expected) in cases {
            let error = read(text).unwrap_err();
            assert!(error.contains(expected) && error.contains("bf16, f16 and f32"), "{error}");
            assert!(!error.contains('\n'));
        }
    }

    #[test]
    fn what_can_be_read_says_how_its_scales_lie() {
        let plain = Quantised { block: None };
        let deepseek = r#"{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
            "weight_block_size": [128, 128]}"#;
        assert_eq!(read(deepseek).unwrap(), Quantised { block: Some((128, 128)) });
        let fp8 = r#"{"quant_method": "fp8", "activation_scheme": "static"}"#;
        assert_eq!(read(fp8).unwrap(), plain);
        let compressed = |weights: &str, format: &str| {
            let text = format!(
                r#"{{"quant_method": "compressed-tensors", "format": "{format}",
                    "quantization_status": "compressed", "kv_cache_scheme": null,
                    "ignore": ["lm_head"], "sparsity_config": {{}}, "transform_config": {{}},
                    "config_groups": {{"group_0": {{"targets": ["Linear"], "input_activations": null,
                    "weights": {weights}}}}}}}"#
            );
            read(&text).unwrap()
        };
        let weights = r#"{"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": true,
            "dynamic": false, "block_structure": null, "group_size": null}"#;
        assert_eq!(compressed(weights, "float-quantized"), plain);
        let weights = r#"{"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": true}"#;
        assert_eq!(compressed(weights, "int-quantized"), plain);
        let weights = r#"{"num_bits": 8, "type": "float", "strategy": "block",
            "block_structure": [128, 64]}"#;
        assert_eq!(compressed(weights, "float-quantized").block, Some((128, 64)));
    }
}
