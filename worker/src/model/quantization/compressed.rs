//! The configuration of `quant_method` compressed-tensors.
use serde_json::{Map, Value};

use super::packed::{self, PackedForm};
use super::{Quantised, block, text, unsupported};

/// Reads how the weights are quantised.
///
/// # Errors
/// What is not supported.
pub(super) fn read(raw: &Value) -> Result<Quantised, String> {
    let empty = Map::new();
    let groups = match &raw["config_groups"] {
        Value::Null => &empty,
        Value::Object(groups) => groups,
        _ => return refuse("config_groups that is not a table"),
    };
    check_formats(raw, groups)?;
    check_others(raw)?;
    let format = &raw["format"];
    let mut found = Quantised::PLAIN;
    for (name, group) in groups {
        let weights = &group["weights"];
        if weights.is_null() {
            continue;
        }
        let own = &group["format"];
        if is_packed(if own.is_null() { format } else { own }) {
            let form = packed_group(name, weights)?;
            if found.packed.is_some_and(|other| other != form) {
                return refuse("format \"pack-quantized\", several kinds of groups");
            }
            found.packed = Some(form);
        } else if let Some(own) = scaled_group(name, weights)? {
            if found.block.is_some_and(|other| other != own) {
                return refuse("with blocks of several sizes");
            }
            found.block = Some(own);
        }
    }
    if is_packed(format) && found.packed.is_none() {
        return refuse("format \"pack-quantized\" without config_groups");
    }
    Ok(found)
}

fn refuse<T>(what: &str) -> Result<T, String> {
    Err(unsupported(&format!("quant_method \"compressed-tensors\", {what}")))
}

fn is_packed(format: &Value) -> bool {
    format.as_str() == Some("pack-quantized")
}

/// Checks the format of the whole configuration and of each group.
fn check_formats(raw: &Value, groups: &Map<String, Value>) -> Result<(), String> {
    let is_readable = |format: &Value| {
        let readable = ["float-quantized", "int-quantized", "naive-quantized", "dense"];
        is_packed(format) || format.as_str().is_some_and(|format| readable.contains(&format))
    };
    let format = &raw["format"];
    // With mixed precision, each group states its own format.
    let is_mixed = format.as_str() == Some("mixed-precision");
    if !is_mixed && !format.is_null() && !is_readable(format) {
        return refuse(&format!("format \"{}\"", text(format)));
    }
    for (name, group) in groups {
        let own = &group["format"];
        if is_mixed && own.is_null() && !group["weights"].is_null() {
            return refuse(&format!("format \"mixed-precision\", of {name} none"));
        }
        if !own.is_null() && !is_readable(own) {
            return refuse(&format!("format \"{}\"", text(own)));
        }
    }
    Ok(())
}

/// Checks that weights are neither sparse nor rotated.
fn check_others(raw: &Value) -> Result<(), String> {
    let sparsity = &raw["sparsity_config"]["format"];
    if !sparsity.is_null() && sparsity.as_str() != Some("dense") {
        return refuse(&format!("sparsity \"{}\"", text(sparsity)));
    }
    let transforms = &raw["transform_config"]["config_groups"];
    if !transforms.is_null() && transforms.as_object().is_none_or(|groups| !groups.is_empty()) {
        return refuse("with transforms");
    }
    Ok(())
}

/// Reads a group whose weights are integers packed into words.
fn packed_group(name: &str, weights: &Value) -> Result<PackedForm, String> {
    match packed::compressed(weights) {
        Ok(form) => Ok(form),
        Err(what) => refuse(&format!("format \"pack-quantized\", {name}: {what}")),
    }
}

/// Reads a group whose weights are numbers with scales; returns the block size, if it has blocks.
fn scaled_group(name: &str, weights: &Value) -> Result<Option<(usize, usize)>, String> {
    let or = |key: &str, otherwise: &str| match &weights[key] {
        Value::Null => otherwise.to_owned(),
        value => text(value),
    };
    let (kind, strategy) = (or("type", "int"), or("strategy", "tensor"));
    let is_symmetric = matches!(weights["symmetric"], Value::Null | Value::Bool(true));
    let is_good = weights["num_bits"].as_u64() == Some(8)
        && is_symmetric
        && matches!(
            (kind.as_str(), strategy.as_str()),
            ("int" | "float", "tensor" | "channel") | ("float", "block")
        );
    if !is_good {
        let (bits, form) = (or("num_bits", "?"), if is_symmetric { "" } else { ", asymmetric" });
        return refuse(&format!("{name}: {bits} bits, {kind}, by {strategy}{form}"));
    }
    match strategy == "block" {
        true => block(&weights["block_structure"]).map(Some),
        false => Ok(None),
    }
}
