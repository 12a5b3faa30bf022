//! Checkpoints whose weights are integers packed into 32-bit words: the configurations of GPTQ, AWQ
//! and compressed-tensors, and their tensors.
//!
//! The files show which matrices are packed: those listed as exceptions (`modules_to_not_convert`,
//! `ignore`, `-:` in `dynamic`) have a plain `weight`. If inputs are ordered by activation
//! (`desc_act`, `actorder`), a list of group indices (`g_idx`) assigns them to groups.
use std::path::Path;

use kernels::backend::{DType, Scales};
use kernels::weights::{Groups, Packed, Packing};
use serde_json::Value;

use super::super::ModelError;
use super::super::experts::MXFP4_GROUP;
use super::super::safetensors::{IntegersView, TensorView, WeightFiles};

/// Suffix of the tensor of integers, in each packing.
pub(crate) const PACKED: [&str; 2] = ["qweight", "weight_packed"];

/// How a checkpoint's integers are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedForm {
    /// Layout of the integers in the files.
    pub packing: Packing,
    /// 4 or 8.
    pub bits: u32,
    /// Number of inputs that share a scale; `None` if each output has a single scale.
    pub group: Option<usize>,
    /// Whether a list may assign inputs to groups.
    pub is_listed: bool,
    /// Whether each group has its own zero point. Otherwise the zero is the middle of the integers'
    /// range, even if the files have zeros: those of some symmetric checkpoints are meaningless.
    pub has_zeros: bool,
}

/// Returns the string under the first of `keys` that exists, in lower case.
fn word(raw: &Value, keys: &[&str]) -> Option<String> {
    let value = keys.iter().map(|key| &raw[*key]).find(|value| !value.is_null())?;
    Some(super::text(value).to_ascii_lowercase())
}

/// Reads the number of inputs per group; `None` for -1, which means all.
fn group_size(value: &Value) -> Result<Option<usize>, String> {
    match (value.as_i64(), value) {
        (Some(-1), _) => Ok(None),
        (Some(size @ 1..=0x1_0000), _) => Ok(usize::try_from(size).ok()),
        (_, Value::Null) => Err("group_size is missing".to_owned()),
        _ => Err(format!("group_size is {value}, not -1 or in 1..=65536")),
    }
}

fn bits(value: &Value, known: &[u64]) -> Result<u32, String> {
    let found = value.as_u64().filter(|bits| known.contains(bits));
    found.and_then(|bits| u32::try_from(bits).ok()).ok_or_else(|| match value {
        Value::Null => "bits is missing".to_owned(),
        value => format!("{} bits", super::text(value)),
    })
}

/// Reads the configuration of `quant_method` gptq.
///
/// # Errors
/// What is not supported.
pub(super) fn gptq(raw: &Value) -> Result<PackedForm, String> {
    let bits = bits(&raw["bits"], &[4, 8])?;
    let named = |what: String| format!("{bits} bits, {what}");
    let group = group_size(&raw["group_size"]).map_err(named)?;
    let zero_less = match word(raw, &["checkpoint_format", "format"]).as_deref() {
        None | Some("gptq" | "") => 1,
        Some("gptq_v2") => 0,
        Some(other) => return Err(named(format!("checkpoint_format \"{other}\""))),
    };
    if raw["is_marlin_format"] == Value::Bool(true) {
        return Err(named("marlin's format".to_owned()));
    }
    if let Some(other) = word(raw, &["pack_dtype"]).filter(|packed| packed != "int32") {
        return Err(named(format!("pack_dtype \"{other}\"")));
    }
    let empty = serde_json::Map::new();
    let rules = match &raw["dynamic"] {
        Value::Null | Value::Bool(false) => &empty,
        Value::Object(rules) => rules,
        _ => return Err(named("dynamic that is not a table".to_owned())),
    };
    for (rule, own) in rules.iter().filter(|(rule, _)| !rule.starts_with("-:")) {
        for key in ["bits", "group_size", "sym"] {
            if !own[key].is_null() && own[key] != raw[key] {
                return Err(named(format!("dynamic \"{rule}\" with {key} {}", own[key])));
            }
        }
    }
    // Without `desc_act` the list is ignored: it is meaningless in some checkpoints.
    let is_set = |value: &Value| *value == Value::Bool(true);
    let is_listed =
        is_set(&raw["desc_act"]) || rules.values().any(|rule| is_set(&rule["desc_act"]));
    let has_zeros = !is_set(&raw["sym"]);
    Ok(PackedForm { packing: Packing::Gptq { zero_less }, bits, group, is_listed, has_zeros })
}

/// Reads the configuration of `quant_method` awq.
///
/// # Errors
/// What is not supported.
pub(super) fn awq(raw: &Value) -> Result<PackedForm, String> {
    // The key in transformers, or AutoAWQ's own key.
    let or = |key: &str, own: &str| match &raw[key] {
        Value::Null => raw[own].clone(),
        value => value.clone(),
    };
    let bits = bits(&or("bits", "w_bit"), &[4])?;
    let named = |what: String| format!("{bits} bits, {what}");
    let group = group_size(&or("group_size", "q_group_size")).map_err(named)?;
    let version = word(raw, &["version", "format", "checkpoint_format"]);
    if let Some(other) = version.filter(|version| version != "gemm") {
        return Err(named(format!("version \"{other}\"")));
    }
    if let Some(other) = word(raw, &["backend"]).filter(|backend| backend == "llm-awq") {
        return Err(named(format!("backend \"{other}\"")));
    }
    if !matches!(raw["zero_point"], Value::Null | Value::Bool(true)) {
        return Err(named("without zero points".to_owned()));
    }
    Ok(PackedForm { packing: Packing::Awq, bits, group, is_listed: false, has_zeros: true })
}

/// Reads the `weights` of a group in a pack-quantized compressed-tensors configuration.
///
/// # Errors
/// What is not supported.
pub(super) fn compressed(weights: &Value) -> Result<PackedForm, String> {
    let bits = bits(&weights["num_bits"], &[4, 8])?;
    let named = |what: String| format!("{bits} bits, {what}");
    let kind = word(weights, &["type"]).unwrap_or_else(|| "int".to_owned());
    let strategy = word(weights, &["strategy"]);
    let group = match (kind.as_str(), strategy.as_deref()) {
        ("int", Some("group")) => group_size(&weights["group_size"]).map_err(named)?,
        ("int", Some("channel")) => None,
        (kind, strategy) => {
            return Err(named(format!("{kind}, by {}", strategy.unwrap_or("tensor"))));
        }
    };
    // A list exists if inputs are ordered by activation and the file keeps that order.
    let has_zeros = weights["symmetric"] == Value::Bool(false);
    Ok(PackedForm { packing: Packing::Compressed, bits, group, is_listed: true, has_zeros })
}

/// gpt-oss in MXFP4: only its experts are packed.
pub(super) const MXFP4: PackedForm = PackedForm {
    packing: Packing::Mxfp4 { step: 1 },
    bits: 4,
    group: Some(MXFP4_GROUP),
    is_listed: false,
    has_zeros: false,
};

impl PackedForm {
    /// Whether only experts are packed; their tensors have names of their own.
    pub(crate) fn is_of_experts(&self) -> bool {
        matches!(self.packing, Packing::Mxfp4 { .. })
    }

    /// Finds the tensors of a matrix `[out, in]`; its `name` ends in `weight`.
    ///
    /// # Errors
    /// [`ModelError::Tensor`] if one is missing, or has another shape or type.
    pub(super) fn find<'a>(
        &self,
        files: &'a WeightFiles,
        name: &str,
        &[rows, cols]: &[usize; 2],
    ) -> Result<TensorView<'a>, ModelError> {
        let stem = name.strip_suffix("weight").unwrap_or(name);
        let matrix = Matrix { form: *self, files, stem, rows, cols };
        matrix.check_filled()?;
        let [words_shape, zeros_shape, scales_shape] = matrix.shapes();
        let [integers, zeros, scales, list] = matrix.names();
        let words = of_shape(files, &integers, &words_shape)?;
        matrix.check_shape()?;
        let zeros = match self.has_zeros {
            false => None,
            true => Some(of_shape(files, &zeros, &zeros_shape)?.data),
        };
        let found = files.tensor(&scales, &scales_shape)?;
        let packed = Packed {
            packing: self.packing,
            bits: self.bits,
            rows,
            cols,
            words: words.data,
            zeros,
            scales: found.data,
            scale_type: found.dtype,
            num_groups: matrix.num_groups(),
            groups: matrix.groups(&list)?,
            first_row: 0,
        };
        Ok(TensorView {
            shape: words.shape,
            dtype: DType::Packed,
            data: &[],
            scales: Some(Scales::Packed(packed)),
            file: words.file,
        })
    }
}

/// A packed matrix to find.
struct Matrix<'a, 'n> {
    form: PackedForm,
    files: &'a WeightFiles,
    /// Common prefix of its tensors' names.
    stem: &'n str,
    rows: usize,
    cols: usize,
}

impl<'a> Matrix<'a, '_> {
    fn at(&self, part: &str) -> String {
        format!("{}{part}", self.stem)
    }

    fn is_compressed(&self) -> bool {
        self.form.packing == Packing::Compressed
    }

    fn per_word(&self) -> usize {
        (32 / self.form.bits) as usize
    }

    fn num_groups(&self) -> usize {
        self.form.group.map_or(1, |size| self.cols.div_ceil(size))
    }

    /// Names of the integers, the zeros, the scales and the list of groups.
    fn names(&self) -> [String; 4] {
        match self.form.packing {
            Packing::Compressed => {
                ["weight_packed", "weight_zero_point", "weight_scale", "weight_g_idx"]
            }
            _ => ["qweight", "qzeros", "scales", "g_idx"],
        }
        .map(|part| self.at(part))
    }

    /// Shapes of the integers, the zeros and the scales.
    fn shapes(&self) -> [[usize; 2]; 3] {
        let (rows, cols, groups) = (self.rows, self.cols, self.num_groups());
        let (words_in, words_out) =
            (cols.div_ceil(self.per_word()), rows.div_ceil(self.per_word()));
        match self.form.packing {
            Packing::Gptq { .. } => [[words_in, rows], [groups, words_out], [groups, rows]],
            Packing::Awq => [[cols, words_out], [groups, words_out], [groups, rows]],
            Packing::Compressed | Packing::Mxfp4 { .. } => {
                [[rows, words_in], [words_out, groups], [rows, groups]]
            }
        }
    }

    /// Checks that all words are full; only compressed-tensors may have partly filled ones.
    fn check_filled(&self) -> Result<(), ModelError> {
        let per_word = self.per_word();
        let (what, size) = match self.form.packing {
            Packing::Compressed => return Ok(()),
            Packing::Gptq { .. } if !self.cols.is_multiple_of(per_word) => ("inputs", self.cols),
            _ => ("outputs", self.rows),
        };
        if size.is_multiple_of(per_word) {
            return Ok(());
        }
        let message = format!("has {size} {what}, which is not a multiple of {per_word}");
        Err(wrong(self.files.folder(), &self.at("qweight"), message))
    }

    /// Checks the shape that compressed-tensors stores as a tensor.
    fn check_shape(&self) -> Result<(), ModelError> {
        if !self.is_compressed() {
            return Ok(());
        }
        let name = self.at("weight_shape");
        let found = self.files.integers(&name)?;
        let numbers = found.data.chunks(found.size).map(|bytes| {
            bytes.iter().rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte))
        });
        let (numbers, shape): (Vec<u64>, _) = (numbers.collect(), [self.rows, self.cols]);
        if numbers == shape.map(|size| size as u64) {
            return Ok(());
        }
        let message = format!("is {numbers:?}, but config.json requires {shape:?}");
        Err(wrong(found.file, &name, message))
    }

    /// Returns which inputs belong to which group.
    fn groups(&self, list: &str) -> Result<Groups<'a>, ModelError> {
        let groups = self.num_groups();
        let size = self.form.group.unwrap_or(self.cols).max(1);
        let even = Groups::Even(size);
        let may_be_missing = self.is_compressed();
        if !self.form.is_listed || groups <= 1 || (may_be_missing && !self.files.has(list)) {
            return Ok(even);
        }
        let all = of_shape(self.files, list, &[self.cols])?;
        let number = |bytes: &[u8; 4]| usize::try_from(i32::from_le_bytes(*bytes));
        let numbers = all.data.as_chunks::<4>().0;
        // compressed-tensors writes -1 if there is no order.
        let is_unset = self.is_compressed() && numbers.contains(&[0xff; 4]);
        let is_there = |bytes: &[u8; 4]| number(bytes).is_ok_and(|n| n < groups);
        let unknown = numbers.iter().find(|bytes| !is_unset && !is_there(bytes));
        if let Some(bytes) = unknown {
            let number = i32::from_le_bytes(*bytes);
            return Err(wrong(
                all.file,
                list,
                format!("has {number}, but there are {groups} groups"),
            ));
        }
        // The usual case: groups in order.
        let is_even =
            numbers.iter().enumerate().all(|(i, n)| number(n).is_ok_and(|n| n == i / size));
        Ok(if is_unset || is_even { even } else { Groups::Listed(all.data) })
    }
}

fn wrong(file: &Path, tensor: &str, message: String) -> ModelError {
    ModelError::Tensor { file: file.to_owned(), tensor: tensor.to_owned(), message }
}

/// Finds a tensor of 32-bit words of exactly this shape.
fn of_shape<'a>(
    files: &'a WeightFiles,
    name: &str,
    shape: &[usize],
) -> Result<IntegersView<'a>, ModelError> {
    let found = files.integers(name)?;
    if found.size != 4 {
        return Err(wrong(found.file, name, "is of type I64; it must be I32".to_owned()));
    }
    if found.shape != shape {
        let message = format!("has shape {:?}, but config.json requires {shape:?}", found.shape);
        return Err(wrong(found.file, name, message));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::super::check;
    use super::*;

    fn read(text: &str) -> Result<PackedForm, String> {
        let found = check(&serde_json::from_str(text).unwrap())?;
        Ok(found.packed.unwrap())
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let compressed = |weights: &str| {
            format!(
                r#"{{"quant_method": "compressed-tensors", "format": "pack-quantized",
                    "config_groups": {{"group_0": {{"weights": {weights}}}}}}}"#
            )
        };
        let gptq = |more: &str| {
            format!(r#"{{"quant_method": "gptq", "bits": 4, "group_size": 128, {more}}}"#)
        };
        let awq = |more: &str| {
            format!(r#"{{"quant_method": "awq", "bits": 4, "group_size": 128, {more}}}"#)
        };
        let cases = [
            (r#"{"quant_method": "gptq", "bits": 3, "group_size": 128}"#, "\"gptq\", 3 bits"),
            (r#"{"quant_method": "gptq", "bits": 2, "group_size": 128}"#, "\"gptq\", 2 bits"),
            (r#"{"quant_method": "gptq", "group_size": 128}"#, "\"gptq\", bits is missing"),
            (r#"{"quant_method": "gptq", "bits": 4}"#, "\"gptq\", 4 bits, group_size is missing"),
            (
                r#"{"quant_method": "gptq", "bits": 4, "group_size": 0}"#,
                "group_size is 0, not -1 or in 1..=65536",
            ),
            (&gptq(r#""checkpoint_format": "marlin""#), "checkpoint_format \"marlin\""),
            (&gptq(r#""checkpoint_format": "bitblas""#), "checkpoint_format \"bitblas\""),
            (&gptq(r#""is_marlin_format": true"#), "marlin's format"),
            (&gptq(r#""pack_dtype": "int16""#), "pack_dtype \"int16\""),
            (&gptq(r#""dynamic": {"+:.*down.*": {"bits": 8}}"#), "\"+:.*down.*\" with bits 8"),
            (&gptq(r#""dynamic": {".*q.*": {"group_size": 32}}"#), "\".*q.*\" with group_size 32"),
            (&gptq(r#""dynamic": {".*q.*": {"sym": false}}"#), "\".*q.*\" with sym false"),
            (&gptq(r#""dynamic": [1]"#), "dynamic that is not a table"),
            (r#"{"quant_method": "awq", "bits": 8, "group_size": 128}"#, "\"awq\", 8 bits"),
            (&awq(r#""version": "gemv""#), "\"awq\", 4 bits, version \"gemv\""),
            (&awq(r#""version": "GEMV_fast""#), "version \"gemv_fast\""),
            (&awq(r#""version": "exllama""#), "version \"exllama\""),
            (&awq(r#""backend": "llm-awq""#), "backend \"llm-awq\""),
            (&awq(r#""zero_point": false"#), "without zero points"),
            (&compressed(r#"{"num_bits": 3, "strategy": "group"}"#), "group_0: 3 bits"),
            (
                &compressed(r#"{"num_bits": 4, "strategy": "group"}"#),
                "format \"pack-quantized\", group_0: 4 bits, group_size is missing",
            ),
            (&compressed(r#"{"num_bits": 4}"#), "group_0: 4 bits, int, by tensor"),
            (&compressed(r#"{"num_bits": 4, "type": "float"}"#), "group_0: 4 bits, float"),
            (
                r#"{"quant_method": "compressed-tensors", "format": "pack-quantized",
                    "config_groups": {
                    "group_0": {"weights": {"num_bits": 4, "strategy": "channel"}},
                    "group_1": {"weights": {"num_bits": 8, "strategy": "channel"}}}}"#,
                "format \"pack-quantized\", several kinds of groups",
            ),
        ];
        for (text, expected) in cases {
            let error = read(text).unwrap_err();
            assert!(error.contains(expected) && error.contains("bf16, f16 and f32"), "{error}");
            assert!(!error.contains('\n'));
        }
    }

    #[test]
    fn what_can_be_read_says_how_integers_lie() {
        let gptq = |zero_less, bits, group, is_listed, has_zeros| PackedForm {
            packing: Packing::Gptq { zero_less },
            bits,
            group,
            is_listed,
            has_zeros,
        };
        let text = r#"{"bits": 4, "checkpoint_format": "gptq", "damp_percent": 0.01,
            "desc_act": false, "group_size": 128, "lm_head": false, "quant_method": "gptq",
            "dynamic": {"-:.*mlp.gate$": {}, "+:.*q_proj": {"bits": 4, "damp_percent": 0.1}},
            "static_groups": false, "sym": true, "true_sequential": true, "pack_dtype": "int32"}"#;
        assert_eq!(read(text).unwrap(), gptq(1, 4, Some(128), false, false));
        let text = r#"{"bits": 8, "checkpoint_format": "gptq_v2", "desc_act": true,
            "group_size": -1, "quant_method": "gptq", "sym": false}"#;
        assert_eq!(read(text).unwrap(), gptq(0, 8, None, true, true));
        let awq = PackedForm {
            packing: Packing::Awq,
            bits: 4,
            group: Some(64),
            is_listed: false,
            has_zeros: true,
        };
        let text = r#"{"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm",
            "zero_point": true, "modules_to_not_convert": ["mlp.gate"]}"#;
        assert_eq!(read(text).unwrap(), awq);
        let text = r#"{"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}"#;
        assert_eq!(read(text).unwrap(), awq);
        let text = r#"{"quant_method": "compressed-tensors", "format": "pack-quantized",
            "ignore": ["lm_head"], "config_groups": {"group_0": {"targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32,
            "symmetric": false, "actorder": "weight", "dynamic": false}}}}"#;
        let compressed = PackedForm {
            packing: Packing::Compressed,
            bits: 4,
            group: Some(32),
            is_listed: true,
            has_zeros: true,
        };
        assert_eq!(read(text).unwrap(), compressed);
        let text = text.replace("\"group\"", "\"channel\"");
        assert_eq!(read(&text).unwrap(), PackedForm { group: None, ..compressed });
    }
}
