//! What `config.json` says of gpt-oss alone.
use kernels::backend::ExpertActivation;

/// Its name.
pub(super) const ARCHITECTURE: &str = "GptOssForCausalLM";

/// What gate and up of its experts become; where nothing is said, as transformers has it.
///
/// # Errors
/// The key, its value's problem and the bound.
pub(super) fn activation(
    alpha: Option<f32>,
    limit: Option<f32>,
) -> Result<ExpertActivation, String> {
    let positive = |key: &str, value: Option<f32>, usual: f32| match value.unwrap_or(usual) {
        value if value.is_finite() && value > 0.0 => Ok(value),
        value => Err(format!("{key} is {value}, it must be finite and above 0")),
    };
    let alpha = positive("swiglu_alpha", alpha, 1.702)?;
    Ok(ExpertActivation::Clamped { alpha, limit: positive("swiglu_limit", limit, 7.0)? })
}
