//! The keys of `config.json` for sliding windows.
use super::Raw;
use super::architecture::Architecture;

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
    /// All but every `sliding_window_pattern`th, by default the 6th.
    ButEachPatternth,
    /// Every second layer, starting with the first.
    EverySecond,
    /// Layers from `max_window_layers` on.
    FromMaxWindowLayers,
    /// Layers without a rotary embedding.
    WithoutRope,
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
        return listed(types, num_layers);
    }
    let step = raw.sliding_window_pattern.or(raw.own_sliding_window_pattern).unwrap_or(6);
    let first = raw.max_window_layers.unwrap_or(num_layers);
    if usual == Usual::ButEachPatternth && step == 0 {
        return Err("sliding_window_pattern is 0, it must be at least 1".to_owned());
    }
    let slides = |layer: usize| match usual {
        Usual::ButEachPatternth => !(layer + 1).is_multiple_of(step),
        Usual::EverySecond => layer.is_multiple_of(2),
        Usual::FromMaxWindowLayers => layer >= first,
        Usual::WithoutRope => !told[layer],
    };
    Ok((0..num_layers).map(slides).collect())
}

/// Which layers slide, according to `layer_types`.
fn listed(types: &[String], num_layers: usize) -> Result<Vec<bool>, String> {
    if types.len() != num_layers {
        let len = types.len();
        return Err(format!("layer_types has {len} entries, num_hidden_layers is {num_layers}"));
    }
    types
        .iter()
        .map(|kind| match kind.as_str() {
            "sliding_attention" => Ok(true),
            "full_attention" => Ok(false),
            _ => Err(format!(
                "layer_types has \"{kind}\"; supported are: full_attention, sliding_attention"
            )),
        })
        .collect()
}
