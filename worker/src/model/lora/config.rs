//! PEFT's `adapter_config.json`: the ranks and scales of an adapter; unsupported features are
//! refused.
use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use crate::model::ModelError;

/// Largest rank that any adapter may have.
pub const RANK_MAX: usize = 512;

/// The ranks and scales of an adapter's modules.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct LoraConfig {
    /// Rank of modules that `ranks` does not list.
    rank: usize,
    /// Alpha, the scale's numerator, of modules that `alphas` does not list.
    alpha: f64,
    /// Whether the scale is `alpha / sqrt(rank)` instead of `alpha / rank` (rsLoRA).
    rank_stabilised: bool,
    ranks: BTreeMap<String, usize>,
    alphas: BTreeMap<String, f64>,
    /// Modules that must have matrices in some layer, if the file lists them by name.
    pub(super) targets: Vec<String>,
}

/// The raw file. Keys that only matter in training are ignored.
#[derive(Deserialize)]
struct Raw {
    peft_type: Option<String>,
    r: Option<usize>,
    lora_alpha: Option<f64>,
    use_rslora: Option<bool>,
    rank_pattern: Option<BTreeMap<String, usize>>,
    alpha_pattern: Option<BTreeMap<String, f64>>,
    target_modules: Option<Value>,
    bias: Option<String>,
    #[serde(flatten)]
    others: BTreeMap<String, Value>,
}

/// Keys that change the computation in unsupported ways, unless they are absent, null, false or
/// empty.
const REFUSED: [&str; 13] = [
    "use_dora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
    "alora_invocation_tokens",
    "arrow_config",
    "use_qalora",
    "use_bdlora",
    "kasa_config",
    "monteclora_config",
];

impl LoraConfig {
    /// Reads and checks `adapter_config.json` of `folder`.
    ///
    /// # Errors
    /// [`ModelError::File`] naming the key, its value's problem and the bound.
    pub(super) fn load(folder: &Path, max_rank: usize) -> Result<Self, ModelError> {
        let file = folder.join("adapter_config.json");
        let text = std::fs::read_to_string(&file)
            .map_err(|error| ModelError::file(&file, format!("cannot be read: {error}")))?;
        Self::parse(&text, max_rank).map_err(|message| ModelError::file(&file, message))
    }

    fn parse(text: &str, max_rank: usize) -> Result<Self, String> {
        let raw: Raw = serde_json::from_str(text)
            .map_err(|error| format!("not an adapter's configuration: {error}"))?;
        match raw.peft_type.as_deref() {
            Some("LORA") => {}
            Some(other) => {
                return Err(format!("peft_type is \"{other}\", only \"LORA\" is supported"));
            }
            None => return Err("key peft_type is missing".to_owned()),
        }
        if let Some(bias) = raw.bias.as_deref().filter(|bias| *bias != "none") {
            return Err(format!("bias is \"{bias}\", only \"none\" is supported"));
        }
        for key in REFUSED {
            if let Some(value) = raw.others.get(key).filter(|value| !is_off(value)) {
                return Err(format!("{key} is {value}: adapters with it are not supported"));
            }
        }
        // Other initialisations change the model's own weights, which are not in this model folder.
        let beginning = raw.others.get("init_lora_weights").and_then(Value::as_str);
        let keeps = |it: &&str| ["gaussian", "eva", "orthogonal"].contains(&&*it.to_lowercase());
        if let Some(other) = beginning.filter(|it| !keeps(it)) {
            return Err(format!(
                "init_lora_weights is \"{other}\": it changes the model's own weights; save the adapter \
                 with path_initial_model_for_weight_conversion"
            ));
        }
        let rank = raw.r.ok_or("key r is missing")?;
        let ranks = raw.rank_pattern.unwrap_or_default();
        for (key, rank) in [("r", &rank)].into_iter().chain(ranks.iter().map(|(k, r)| (&**k, r))) {
            if !(1..=max_rank).contains(rank) {
                let of =
                    if key == "r" { String::new() } else { format!(" of rank_pattern \"{key}\"") };
                return Err(format!(
                    "r{of} is {rank}, it must be 1 to {max_rank} (--max-lora-rank)"
                ));
            }
        }
        let alpha = raw.lora_alpha.ok_or("key lora_alpha is missing")?;
        let alphas = raw.alpha_pattern.unwrap_or_default();
        for key in ranks.keys().chain(alphas.keys()) {
            let is_plain = |c: char| c.is_ascii_alphanumeric() || "_.".contains(c);
            if key.is_empty() || !key.chars().all(is_plain) {
                return Err(format!(
                    "rank_pattern or alpha_pattern has \"{key}\": names of modules are supported, \
                     regular expressions are not"
                ));
            }
        }
        if let Some(alpha) = alphas.values().chain([&alpha]).find(|alpha| !alpha.is_finite()) {
            return Err(format!("lora_alpha is {alpha}, it must be finite"));
        }
        let excludes = raw.others.get("exclude_modules").is_some_and(|value| !is_off(value));
        let targets = match raw.target_modules {
            Some(Value::Array(names)) if !excludes => {
                names.iter().filter_map(Value::as_str).map(str::to_owned).collect()
            }
            // A regular expression, "all-linear", or a subset: the file with the matrices shows
            // what it covers.
            _ => Vec::new(),
        };
        let rank_stabilised = raw.use_rslora.unwrap_or(false);
        Ok(Self { rank, alpha, rank_stabilised, ranks, alphas, targets })
    }

    /// Returns the rank of a module with a name such as `model.layers.0.self_attn.q_proj`.
    ///
    /// # Errors
    /// One sentence if patterns contradict each other.
    pub(super) fn rank(&self, module: &str) -> Result<usize, String> {
        Ok(of_pattern("rank_pattern", &self.ranks, module)?.unwrap_or(self.rank))
    }

    /// Returns the factor of a module's product.
    ///
    /// # Errors
    /// Same as [`LoraConfig::rank`].
    pub(super) fn scale(&self, module: &str) -> Result<f32, String> {
        let rank = self.rank(module)? as f64;
        let alpha = of_pattern("alpha_pattern", &self.alphas, module)?.unwrap_or(self.alpha);
        let by = if self.rank_stabilised { rank.sqrt() } else { rank };
        Ok((alpha / by) as f32)
    }
}

/// Returns the value of the pattern that matches the end of a module's name.
fn of_pattern<T: Copy + PartialEq>(
    key: &str,
    patterns: &BTreeMap<String, T>,
    module: &str,
) -> Result<Option<T>, String> {
    let names = |pattern: &str| {
        module.strip_suffix(pattern).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    };
    let mut found = patterns.iter().filter(|(pattern, _)| names(pattern));
    let Some((first, value)) = found.next() else { return Ok(None) };
    match found.find(|(_, other)| *other != value) {
        Some((other, _)) => {
            Err(format!("{key} has \"{first}\" and \"{other}\" for {module}, and different values"))
        }
        None => Ok(Some(*value)),
    }
}

/// Whether the value means the same as an absent key.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(items) => items.is_empty(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(rest: &str) -> Result<LoraConfig, String> {
        let text = format!(r#"{{"peft_type":"LORA","r":8,"lora_alpha":16,"bias":"none"{rest}}}"#);
        LoraConfig::parse(&text, 16)
    }

    #[test]
    fn scales_are_alpha_by_rank_or_by_its_root_and_patterns_go_first() {
        let module = "model.layers.1.self_attn.q_proj";
        assert_eq!(parse("").unwrap().scale(module), Ok(2.0));
        let stable = parse(r#","use_rslora":true"#).unwrap();
        assert_eq!(stable.scale(module), Ok((16.0 / 8f64.sqrt()) as f32));
        let patterns = r#","rank_pattern":{"q_proj":4,"layers.1.self_attn.q_proj":4,"roj":2},
            "alpha_pattern":{"v_proj":1},"use_dora":false,"modules_to_save":null"#;
        let patterned = parse(patterns).unwrap();
        assert_eq!((patterned.rank(module), patterned.scale(module)), (Ok(4), Ok(4.0)));
        let other = "model.layers.0.self_attn.v_proj";
        assert_eq!((patterned.rank(other), patterned.scale(other)), (Ok(8), Ok(0.125)));
        let unclear = parse(r#","rank_pattern":{"q_proj":4,"self_attn.q_proj":2}"#).unwrap();
        assert!(unclear.rank(module).unwrap_err().contains("\"q_proj\" and \"self_attn.q_proj\""));
    }

    #[test]
    fn what_is_not_supported_is_named() {
        let refused = |rest: &str, words: &str| {
            let error = parse(rest).unwrap_err();
            assert!(error.contains(words), "{error}");
        };
        refused(r#","use_dora":true"#, "use_dora is true");
        refused(r#","modules_to_save":["lm_head"]"#, "modules_to_save is [\"lm_head\"]");
        refused(r#","fan_in_fan_out":true"#, "fan_in_fan_out");
        refused(
            r#","init_lora_weights":"pissa_niter_16""#,
            "init_lora_weights is \"pissa_niter_16\"",
        );
        for kept in ["true", "false", "\"gaussian\"", "\"EVA\""] {
            assert!(parse(&format!(r#","init_lora_weights":{kept}"#)).is_ok(), "{kept}");
        }
        refused(r#","rank_pattern":{"^q":4}"#, "\"^q\": names of modules are supported");
        refused(r#","rank_pattern":{"q_proj":32}"#, "\"q_proj\" is 32, it must be 1 to 16");
        let parse = |text: &str| LoraConfig::parse(text, 4).unwrap_err();
        assert!(parse(r#"{"peft_type":"IA3"}"#).contains("peft_type is \"IA3\""));
        assert_eq!(
            parse(r#"{"peft_type":"LORA","r":8,"lora_alpha":16}"#),
            "r is 8, it must be 1 to 4 (--max-lora-rank)"
        );
        assert!(parse(r#"{"peft_type":"LORA","r":2}"#).contains("lora_alpha is missing"));
        assert!(
            parse(r#"{"peft_type":"LORA","r":2,"lora_alpha":1,"bias":"all"}"#).contains("\"all\"")
        );
    }
}
