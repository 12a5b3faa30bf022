//! Quantised checkpoints: what `quantization_config` of a `config.json` says.
use serde::Deserialize;

/// The key, as much of it as tells methods apart.
#[derive(Deserialize)]
pub(crate) struct RawQuantization {
    quant_method: Option<String>,
    bits: Option<u32>,
    load_in_4bit: Option<bool>,
    load_in_8bit: Option<bool>,
}

/// Refuses what cannot be read.
///
/// # Errors
/// The method by its name, and what is supported.
pub(crate) fn check(raw: &RawQuantization) -> Result<(), String> {
    let method = match (&raw.quant_method, raw.load_in_4bit, raw.load_in_8bit) {
        (Some(method), ..) => format!("quant_method \"{method}\""),
        (None, Some(true), _) | (None, _, Some(true)) => "bitsandbytes".to_owned(),
        (None, ..) => "without a quant_method".to_owned(),
    };
    let bits = raw.bits.map_or(String::new(), |bits| format!(", {bits} bits"));
    Err(format!(
        "quantization_config ({method}{bits}) is not supported: weights are read from checkpoints \
         in bf16, f16 and f32; take the model's unquantised folder"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_read_is_named() {
        let cases = [
            (r#"{"quant_method": "gptq", "bits": 4}"#, "(quant_method \"gptq\", 4 bits)"),
            (r#"{"quant_method": "awq", "bits": 4}"#, "(quant_method \"awq\", 4 bits)"),
            (r#"{"quant_method": "mxfp4"}"#, "(quant_method \"mxfp4\")"),
            (r#"{"load_in_4bit": true}"#, "(bitsandbytes)"),
            (r#"{"bits": 3}"#, "(without a quant_method, 3 bits)"),
        ];
        for (text, expected) in cases {
            let error = check(&serde_json::from_str(text).unwrap()).unwrap_err();
            assert!(error.contains(expected) && error.contains("bf16, f16 and f32"), "{error}");
            assert!(!error.contains('\n'));
        }
    }
}
