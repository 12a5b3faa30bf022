//! The keys of `config.json` for layers with state (Mamba 2), as Granite 4's models have them.
use kernels::backend::{DeltaShape, Rule};
use serde::Deserialize;
use serde_json::{Value, json};

use super::delta::{Delta, Layout, head_dim, kernel};
use super::{keys, of_each_layer, size};

/// The keys, whose defaults are those of transformers.
#[derive(Deserialize)]
struct Raw {
    layer_types: Option<Vec<String>>,
    hidden_size: Option<usize>,
    mamba_n_heads: Option<usize>,
    mamba_n_groups: Option<usize>,
    mamba_d_state: Option<usize>,
    mamba_d_head: Option<Value>,
    mamba_d_conv: Option<usize>,
    mamba_expand: Option<usize>,
    mamba_conv_bias: Option<bool>,
    mamba_proj_bias: Option<bool>,
    time_step_limit: Option<Vec<Option<Value>>>,
}

/// Reads which layers have a state, and its sizes; `None` if no layer has one.
///
/// # Errors
/// The key, its value's problem and the bound.
pub(super) fn read(
    config: &Value,
    norm_eps: f64,
    num_layers: usize,
) -> Result<Option<Delta>, String> {
    let raw: Raw = keys(config)?;
    let layers = match &raw.layer_types {
        None => vec![true; num_layers],
        Some(kinds) => {
            of_each_layer("layer_types", kinds.len(), num_layers)?;
            let has_state = |kind: &String| match kind.as_str() {
                // The second names are those of transformers 5.
                "mamba" | "linear_attention" => Ok(true),
                "attention" | "full_attention" => Ok(false),
                _ => Err(format!("layer_types has \"{kind}\"; supported are: attention, mamba")),
            };
            kinds.iter().map(has_state).collect::<Result<_, _>>()?
        }
    };
    if !layers.contains(&true) {
        return Ok(None);
    }
    if !layers.contains(&false) {
        let problem = if raw.layer_types.is_some() { "leaves" } else { "is missing, which leaves" };
        return Err(format!("layer_types {problem} no layer with attention"));
    }
    let value_heads = size("mamba_n_heads", raw.mamba_n_heads.or(Some(128)))?;
    // The norm is over all of them. One of each group would be another.
    match raw.mamba_n_groups.unwrap_or(1) {
        1 => {}
        groups => return Err(format!("mamba_n_groups is {groups}, only 1 is supported")),
    }
    if raw.mamba_proj_bias == Some(true) {
        return Err("mamba_proj_bias is true, only false is supported".to_owned());
    }
    if raw.mamba_conv_bias == Some(false) {
        return Err("mamba_conv_bias is false, only true is supported".to_owned());
    }
    check_steps(raw.time_step_limit.as_deref())?;
    let hidden_size = size("hidden_size", raw.hidden_size)?;
    let all = size("mamba_expand", raw.mamba_expand.or(Some(2)))?.saturating_mul(hidden_size);
    let (key_most, value_most, _) = DeltaShape::MOST;
    let value_dim = match &raw.mamba_d_head {
        None => all / value_heads,
        Some(said) if *said == "auto" => all / value_heads,
        Some(said) => said
            .as_u64()
            .and_then(|said| usize::try_from(said).ok())
            .ok_or_else(|| format!("mamba_d_head is {said}, it must be a number or \"auto\""))?,
    };
    let value_dim = head_dim("mamba_d_head", value_dim, value_most)?;
    if value_dim * value_heads != all {
        return Err(format!(
            "mamba_n_heads ({value_heads}) times mamba_d_head ({value_dim}) is not mamba_expand \
             times hidden_size ({all})"
        ));
    }
    let shape = DeltaShape {
        rule: Rule::Mamba2,
        key_heads: 1,
        value_heads,
        key_dim: head_dim("mamba_d_state", raw.mamba_d_state.unwrap_or(256), key_most)?,
        value_dim,
        kernel: kernel("mamba_d_conv", raw.mamba_d_conv)?,
    };
    Ok(Some(Delta { shape, layers, layout: Layout::Mamba, norm_eps: norm_eps as f32 }))
}

/// Checks that steps are not bounded: they are above 0 in any case.
fn check_steps(limits: Option<&[Option<Value>]>) -> Result<(), String> {
    // Infinity is null, as `model_config::parse` reads it.
    let is_infinite = |limit: &Option<Value>| {
        limit.as_ref().is_none_or(|limit| *limit == json!({"__float__": "Infinity"}))
    };
    match limits {
        None => Ok(()),
        Some([Some(least), most]) if *least == 0.0 && is_infinite(most) => Ok(()),
        Some(limits) => {
            let said = json!(limits).to_string().replace("null", "Infinity");
            Err(format!("time_step_limit is {said}, only [0,Infinity] is supported"))
        }
    }
}

#[cfg(test)]
mod tests {
    use kernels::backend::Routing;

    use super::super::ModelConfig;
    use super::*;

    /// As published for ibm-granite/granite-4.0-h-tiny, with fewer layers.
    fn tiny() -> Value {
        json!({
            "architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": false,
            "attention_multiplier": 0.0078125, "embedding_multiplier": 12, "hidden_act": "silu",
            "hidden_size": 1536, "intermediate_size": 512,
            "layer_types": ["mamba", "mamba", "attention", "mamba"], "logits_scaling": 6,
            "mamba_chunk_size": 256, "mamba_conv_bias": true, "mamba_d_conv": 4,
            "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1,
            "mamba_n_heads": 48, "mamba_proj_bias": false, "max_position_embeddings": 131_072,
            "num_attention_heads": 12, "num_experts_per_tok": 6, "num_hidden_layers": 4,
            "num_key_value_heads": 4, "num_local_experts": 64,
            "position_embedding_type": "nope", "residual_multiplier": 0.22,
            "rms_norm_eps": 1e-5, "rope_theta": 10_000, "shared_intermediate_size": 1024,
            "tie_word_embeddings": true, "torch_dtype": "bfloat16", "vocab_size": 100_352,
        })
    }

    fn with(key: &str, value: Value) -> Result<ModelConfig, String> {
        let mut config = tiny();
        config[key] = value;
        ModelConfig::from_value(config)
    }

    #[test]
    fn the_published_configuration_is_read() {
        let config = ModelConfig::from_value(tiny()).unwrap();
        let delta = config.delta.clone().unwrap();
        let shape = DeltaShape {
            rule: Rule::Mamba2,
            key_heads: 1,
            value_heads: 48,
            key_dim: 128,
            value_dim: 64,
            kernel: 4,
        };
        assert_eq!((delta.shape, delta.layout, delta.norm_eps), (shape, Layout::Mamba, 1e-5));
        assert_eq!(delta.layers, [true, true, false, true]);
        assert!(!config.gates_attention && config.norm_offset == 0.0);
        // Two shared experts of the others' width.
        let routing = Routing { shared: 2, ..Routing::softmax(66, 8, true) };
        let experts = config.experts.as_ref().unwrap();
        assert_eq!((experts.routing, experts.intermediate_size), (routing, 512));
        // As for granite-4.0-h-micro.
        let dense = with("num_local_experts", json!(0)).unwrap();
        assert!(dense.experts.is_none() && dense.delta.is_some());
        assert_eq!(dense.intermediate_size, 1024);
    }

    #[test]
    fn what_is_not_supported_is_named() {
        for (key, value, expected) in [
            ("layer_types", Value::Null, "layer_types is missing, which leaves no layer with att"),
            ("layer_types", json!(vec!["mamba"; 4]), "layer_types leaves no layer with attention"),
            ("layer_types", json!(["mamba"]), "layer_types has 1 entries"),
            ("layer_types", json!(["mlp", "mamba", "mamba", "mamba"]), "layer_types has \"mlp\""),
            ("mamba_n_groups", json!(8), "mamba_n_groups is 8, only 1 is supported"),
            ("mamba_n_heads", json!(24), "mamba_n_heads (24) times mamba_d_head (64) is not"),
            ("mamba_d_head", json!(65), "mamba_d_head is 65, it must be a multiple of 8"),
            ("mamba_d_head", json!("all"), "mamba_d_head is \"all\", it must be a number"),
            ("mamba_d_state", json!(512), "mamba_d_state is 512, it must be a multiple of 8"),
            ("mamba_d_conv", json!(9), "mamba_d_conv is 9, it must be in 2..=8"),
            ("mamba_proj_bias", json!(true), "mamba_proj_bias is true, only false"),
            ("mamba_conv_bias", json!(false), "mamba_conv_bias is false, only true"),
            ("time_step_limit", json!([0.0, 0.1]), "is [0.0,0.1], only [0,Infinity] is supported"),
            ("time_step_limit", json!([0.1, null]), "is [0.1,Infinity], only [0,Infinity] is"),
            ("time_step_limit", json!([0.0, 0.0]), "time_step_limit is [0.0,0.0], only"),
            ("time_step_limit", json!([null, null]), "time_step_limit is [Infinity,Infinity]"),
            ("shared_intermediate_size", json!(1000), "it must be a multiple of intermediate_size"),
        ] {
            let error = with(key, value).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        for limits in [json!(null), json!([0.0, null]), json!([0.0, {"__float__": "Infinity"}])] {
            assert!(with("time_step_limit", limits.clone()).is_ok(), "{limits}");
        }
        assert!(with("mamba_d_head", json!("auto")).is_ok());
    }
}
