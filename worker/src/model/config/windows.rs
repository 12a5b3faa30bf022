//! The keys of `config.json` for sliding windows.
use serde_json::Value;

use super::architecture::Architecture;
use super::{Raw, listed};

/// Which layers of an architecture have the sliding window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Windows {
    /// None, whatever the file says.
    Nowhere,
    /// All.
    Everywhere,
    /// The layers that `layer_types` lists; without that key, the default ones.
    Listed(Usual),
}

/// Which layers slide if `layer_types` is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Usual {
    /// All but every `sliding_window_pattern`th, or this one by default.
    ButEachPatternth(usize),
    /// Every second layer, starting with the first.
    EverySecond,
    /// Every second layer of the first `max_window_layers`, by default of so many, starting with
    /// the first.
    EverySecondUpToMaxWindowLayers(usize),
    /// Layers from `max_window_layers` on, or from this one by default.
    FromMaxWindowLayers(usize),
    /// Layers without a rotary embedding.
    WithoutRope,
    /// All.
    All,
}

/// Adds the window that transformers' own configurations have where a file has no key for it. With
/// null there is none.
pub(super) fn completed(mut config: Value) -> Value {
    const USUAL: [(&str, u32); 10] = [
        ("Cohere2ForCausalLM", 4096),
        ("Dots1ForCausalLM", 4096),
        ("Exaone4ForCausalLM", 4096),
        ("ExaoneMoeForCausalLM", 4096),
        ("Gemma2ForCausalLM", 4096),
        ("GptOssForCausalLM", 128),
        ("MinistralForCausalLM", 4096),
        ("MistralForCausalLM", 4096),
        ("Olmo3ForCausalLM", 4096),
        ("Qwen2MoeForCausalLM", 4096),
    ];
    if let Some((_, window)) = USUAL.iter().find(|(it, _)| config["architectures"][0] == *it)
        && let Some(keys) = config.as_object_mut()
    {
        keys.entry("sliding_window").or_insert((*window).into());
    }
    config
}

/// Returns the sliding window of each layer, `None` for full attention; `told` says which layers
/// have a rotary embedding.
///
/// # Errors
/// The key, its value's problem and the bound.
pub(super) fn read(
    raw: &Raw,
    architecture: Architecture,
    told: &[bool],
) -> Result<Vec<Option<u32>>, String> {
    let is_used = !architecture.reads_use_sliding_window() || raw.use_sliding_window == Some(true);
    let window = match (architecture.windows(), raw.sliding_window.filter(|_| is_used)) {
        (Windows::Nowhere, _) => None,
        (_, Some(0)) => return Err("sliding_window is 0, it must be at least 1".to_owned()),
        (_, window) => window,
    };
    match (architecture.windows(), window) {
        (Windows::Listed(usual), Some(_)) => {
            let slides = slides(raw, usual, told)?;
            Ok(slides.into_iter().map(|slides| window.filter(|_| slides)).collect())
        }
        _ => Ok(vec![window; told.len()]),
    }
}

/// Returns which layers slide, if the model has a window.
///
/// # Errors
/// Same as [`read`].
pub(super) fn slides(raw: &Raw, usual: Usual, told: &[bool]) -> Result<Vec<bool>, String> {
    let num_layers = told.len();
    if let Some(types) = &raw.layer_types {
        return listed("layer_types", types, num_layers, ["full_attention", "sliding_attention"]);
    }
    let step = match usual {
        Usual::ButEachPatternth(step) => pattern(raw)?.unwrap_or(step),
        _ => 1,
    };
    let first = |usual| raw.max_window_layers.unwrap_or(usual);
    let slides = |layer: usize| match usual {
        Usual::ButEachPatternth(_) => !(layer + 1).is_multiple_of(step),
        Usual::EverySecond => layer.is_multiple_of(2),
        Usual::EverySecondUpToMaxWindowLayers(usual) => {
            layer.is_multiple_of(2) && layer < first(usual)
        }
        Usual::FromMaxWindowLayers(usual) => layer >= first(usual),
        Usual::WithoutRope => !told[layer],
        Usual::All => true,
    };
    Ok((0..num_layers).map(slides).collect())
}

/// `sliding_window_pattern`, if the file has it. EXAONE 4 writes it in letters, such as "LLLG", and
/// then has `layer_types`, too.
fn pattern(raw: &Raw) -> Result<Option<usize>, String> {
    let both = [&raw.sliding_window_pattern, &raw.own_sliding_window_pattern];
    match both.into_iter().flatten().next() {
        None => Ok(None),
        Some(said) => match said.as_u64().and_then(|step| usize::try_from(step).ok()) {
            Some(step) if step > 0 => Ok(Some(step)),
            _ => Err(format!(
                "sliding_window_pattern is {said}, it must be at least 1, or layer_types be given"
            )),
        },
    }
}
