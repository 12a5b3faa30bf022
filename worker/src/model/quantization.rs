//! Quantised checkpoints: the `quantization_config` of a `config.json`, and the scales of quantised
//! tensors.
//!
//! FP8 and int8 weights are found with their scales; 4-bit and 8-bit integers packed into words are
//! found by `packed`. Activations have the type given by `--dtype`, whatever the checkpoint was
//! made for: `input_scale` and the scales of KV caches are ignored.
//!
//! - `compressed`: the configuration of compressed-tensors
//! - `packed`: integers packed into words
use std::path::Path;

use kernels::backend::{BlockScales, DType, Scales};
use serde_json::Value;

use super::ModelError;
use super::safetensors::{TensorView, WeightFiles};

mod compressed;
mod packed;

pub(crate) use packed::PACKED;
pub use packed::PackedForm;

/// The supported formats, for error messages.
const SUPPORTED: &str = "supported are checkpoints in bf16, f16 and f32, and quant_method \"fp8\", \
                         \"gptq\" with 4 or 8 bits, \"awq\" with 4 bits (version gemm), \
                         \"compressed-tensors\" with 8-bit weights, float or symmetric int, and a \
                         scale per tensor, channel or (float) block, or pack-quantized with 4 or 8 \
                         bits, and gpt-oss's \"mxfp4\"";

/// The format of a quantised checkpoint that can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantised {
    /// Rows and columns that share a scale, if scales are per block.
    pub block: Option<(usize, usize)>,
    /// Suffix of scale tensors' names in such checkpoints, for error messages; both suffixes are
    /// read.
    pub scale: &'static str,
    /// How integers are packed into words, if they are.
    pub packed: Option<PackedForm>,
}

impl Quantised {
    /// Scales per tensor or per channel.
    pub(crate) const PLAIN: Self = Self { block: None, scale: SCALES[1], packed: None };
}

/// Suffixes of scale tensors: DeepSeek's, and everyone else's. Weights are multiplied by the scale
/// under either name.
const SCALES: [&str; 2] = ["_scale_inv", "_scale"];

/// Reads how a checkpoint's weights are quantised.
///
/// # Errors
/// The name of the unsupported feature, and what is supported.
pub(crate) fn check(raw: &Value) -> Result<Quantised, String> {
    match raw["quant_method"].as_str() {
        Some("fp8") => Ok(match &raw["weight_block_size"] {
            Value::Null => Quantised::PLAIN,
            sizes => Quantised { block: Some(block(sizes)?), scale: SCALES[0], packed: None },
        }),
        Some(method @ ("gptq" | "awq")) => {
            let found = if method == "gptq" { packed::gptq(raw) } else { packed::awq(raw) };
            let named = |what| unsupported(&format!("quant_method \"{method}\", {what}"));
            Ok(Quantised { packed: Some(found.map_err(named)?), ..Quantised::PLAIN })
        }
        Some("compressed-tensors") => compressed::read(raw),
        Some("mxfp4") => Ok(Quantised { packed: Some(packed::MXFP4), ..Quantised::PLAIN }),
        method => {
            let is_set = |key: &str| raw[key] == Value::Bool(true);
            let method = match method {
                Some(method) => format!("quant_method \"{method}\""),
                None if is_set("load_in_4bit") || is_set("load_in_8bit") => {
                    "bitsandbytes".to_owned()
                }
                None => "without a quant_method".to_owned(),
            };
            // EXL2 has fractional numbers of bits.
            let bits = match &raw["bits"] {
                Value::Number(bits) => format!(", {bits} bits"),
                _ => String::new(),
            };
            Err(unsupported(&format!("{method}{bits}")))
        }
    }
}

fn unsupported(what: &str) -> String {
    format!("quantization_config ({what}) is not supported; {SUPPORTED}")
}

/// Reads the rows and columns of a block: `[128, 128]` or `"128x128"`.
fn block(sizes: &Value) -> Result<(usize, usize), String> {
    let numbers: Option<Vec<usize>> = match sizes {
        Value::Array(all) => all.iter().map(|size| usize::try_from(size.as_u64()?).ok()).collect(),
        Value::String(text) => text.split('x').map(|size| size.trim().parse().ok()).collect(),
        _ => None,
    };
    match numbers.as_deref() {
        Some(&[rows, cols]) if rows > 0 && cols > 0 => Ok((rows, cols)),
        found => {
            let found = found.map_or_else(|| sizes.to_string(), |found| format!("{found:?}"));
            Err(unsupported(&format!("blocks of {found}, not of two numbers above 0")))
        }
    }
}

/// A string itself, or other values as JSON.
fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// A model's tensors; quantised ones come with their scales.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tensors<'a> {
    /// The files.
    pub(crate) files: &'a WeightFiles,
    /// Quantisation according to their configuration.
    pub(crate) quantised: Option<Quantised>,
}

impl<'a> Tensors<'a> {
    /// Returns a weight matrix of exactly this shape, `[out, in]`.
    ///
    /// # Errors
    /// [`ModelError::Tensor`] if it or its scales are missing, or have another shape or type.
    pub(crate) fn weight(
        &self,
        name: &str,
        shape: &[usize; 2],
    ) -> Result<TensorView<'a>, ModelError> {
        // The files show which matrices are packed.
        if let Some(form) = self.quantised.and_then(|quantised| quantised.packed)
            && !form.is_of_experts()
            && !self.files.has(name)
        {
            return form.find(self.files, name, shape);
        }
        let view = self.files.any_tensor(name, Some(shape))?;
        if !matches!(view.dtype, DType::F8E4M3 | DType::I8) {
            return Ok(view);
        }
        let wrong = |file: &Path, tensor: &str, message: String| {
            let (file, tensor) = (file.to_owned(), tensor.to_owned());
            Err(ModelError::Tensor { file, tensor, message })
        };
        let Some(quantised) = self.quantised else {
            let message = "is quantised, but quantization_config in config.json does not mention \
                           it";
            return wrong(view.file, name, message.to_owned());
        };
        let names = SCALES.map(|scale| format!("{name}{scale}"));
        let Some(scale_name) = names.iter().find(|name| self.files.has(name)) else {
            let lacking = format!("{name}{}", quantised.scale);
            let message = "is missing: the scales of a quantised tensor".to_owned();
            return wrong(self.files.folder(), &lacking, message);
        };
        // Its scales may be in another file.
        let scales = self.files.any_tensor(scale_name, None)?;
        let wrong = |message: String| wrong(scales.file, scale_name, message);
        if matches!(scales.dtype, DType::F8E4M3 | DType::I8) {
            return wrong(format!("is of type {:?}; scales are BF16, F16 or F32", scales.dtype));
        }
        let [rows, cols] = *shape;
        let blocks = quantised.block.map(|(a, b)| (a, b, [rows.div_ceil(a), cols.div_ceil(b)]));
        let (block, row_stride) = match (blocks, scales.shape) {
            (Some((a, b, counts)), found) if found == counts => ((a, b), counts[1]),
            (_, [] | [1] | [1, 1]) => ((usize::MAX, usize::MAX), 1),
            (_, [n] | [n, 1]) if *n == rows => ((1, usize::MAX), 1),
            (_, found) => {
                return wrong(format!("has shape {found:?}, which fits no tensor of {shape:?}"));
            }
        };
        let Some(data) = Some(scales.data).filter(|data| !data.is_empty()) else {
            return wrong("is empty".to_owned());
        };
        let scales = BlockScales { data, dtype: scales.dtype, block, row_stride, first_row: 0 };
        Ok(TensorView { scales: Some(Scales::Blocks(scales)), ..view })
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
            (r#"{"quant_method": "hqq", "bits": 4}"#, "(quant_method \"hqq\", 4 bits)"),
            (r#"{"quant_method": "mxfp8"}"#, "(quant_method \"mxfp8\")"),
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
            // Values of unusual types must not hide the method's name.
            (r#"{"quant_method": "exl2", "bits": 4.65}"#, "(quant_method \"exl2\", 4.65 bits)"),
            (r#"{"quant_method": "exl3", "bits": "4-6"}"#, "(quant_method \"exl3\")"),
            (
                r#"{"quant_method": "quark", "config_groups": [], "format": 3,
                    "weight_block_size": "?", "sparsity_config": [1], "load_in_4bit": "no"}"#,
                "(quant_method \"quark\")",
            ),
            (r#""fp8""#, "without a quant_method"),
            (r#"{"quant_method": 8}"#, "without a quant_method"),
            (r#"{"quant_method": "fp8", "weight_block_size": 128}"#, "blocks of 128"),
            (r#"{"quant_method": "compressed-tensors", "format": 3}"#, "format \"3\""),
            (r#"{"quant_method": "compressed-tensors", "config_groups": [8]}"#, "not a table"),
            (&group(r#"{"num_bits": 7.5}"#), "group_0: 7.5 bits, int, by tensor"),
            (&group(r#"{"num_bits": 8, "symmetric": "no"}"#), "asymmetric"),
            (
                &group(
                    r#"{"num_bits": 8, "type": "float", "strategy": "block",
                        "block_structure": "128x0"}"#,
                ),
                "blocks of [128, 0]",
            ),
            (
                r#"{"quant_method": "compressed-tensors", "format": "mixed-precision",
                    "config_groups": {"group_0": {"format": "pack-quantized",
                    "weights": {"num_bits": 4, "strategy": "group"}}}}"#,
                "format \"pack-quantized\"",
            ),
            (
                r#"{"quant_method": "compressed-tensors", "format": "mixed-precision",
                    "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}"#,
                "format \"mixed-precision\", of group_0 none",
            ),
        ];
        for (text, expected) in cases {
            let error = read(text).unwrap_err();
            assert!(error.contains(expected) && error.contains("bf16, f16 and f32"), "{error}");
            assert!(!error.contains('\n'));
        }
    }

    #[test]
    fn what_can_be_read_says_how_its_scales_lie() {
        let plain = Quantised { block: None, scale: "_scale", packed: None };
        let deepseek = r#"{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
            "weight_block_size": [128, 128]}"#;
        assert_eq!(
            read(deepseek).unwrap(),
            Quantised { block: Some((128, 128)), scale: "_scale_inv", packed: None }
        );
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
        let by_block = Quantised { block: Some((128, 64)), ..plain };
        assert_eq!(compressed(weights, "float-quantized"), by_block);
        // As in the first such files.
        let weights = weights.replace("[128, 64]", "\"128x64\"");
        assert_eq!(compressed(&weights, "float-quantized"), by_block);
        let mixed = r#"{"quant_method": "compressed-tensors", "format": "mixed-precision",
            "config_groups": {
                "group_0": {"format": "float-quantized",
                    "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}},
                "group_1": {"format": "int-quantized",
                    "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}}}"#;
        assert_eq!(read(mixed).unwrap(), plain);
    }
}
