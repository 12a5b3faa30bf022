//! `tutti bench`: the engine's speed on this machine, without HTTP and links.
use serde_json::{Map, Value, json};
use shared::hub::ModelPart;
use worker::bench::{BenchOptions, WARM_UP_STEPS, run as measure};

use super::options::BenchArgs;
use super::output::print_line;
use super::serve::demo_model;
use super::work::cores;
use super::{CliError, devices, hub, logging};

/// Default.
const PROMPT_TOKENS: u32 = 512;

pub(crate) fn run(args: &BenchArgs) -> Result<(), CliError> {
    logging::init_at("warn");
    let model = match &args.model {
        Some(model) => hub::folder(model, &args.hub, ModelPart::Weights)?,
        None => demo_model()?,
    };
    let threads = args.compute.threads.unwrap_or_else(|| (cores() / args.tensor_parallel).max(1));
    let config_overrides = args.hf_overrides.clone().unwrap_or_default();
    let (degree, quantization) = (args.tensor_parallel, args.quantization);
    let needs = worker::check::model_with(&model, &config_overrides, degree, quantization)
        .map_err(|error| CliError::Failed(error.to_string()))?;
    let longest = needs.max_positions.saturating_sub(WARM_UP_STEPS as usize);
    let longest = u32::try_from(longest).unwrap_or(u32::MAX);
    let prompt_tokens = args.prompt_tokens.unwrap_or(PROMPT_TOKENS.min(longest));
    if prompt_tokens > longest {
        return Err(CliError::Usage(format!(
            "--prompt-tokens {prompt_tokens} is too many: the model has {} positions, and \
             {WARM_UP_STEPS} are reserved for the steps after the prompt",
            needs.max_positions
        )));
    }
    let options = BenchOptions {
        model,
        config_overrides,
        dtype: args.dtype,
        quantization,
        kv_cache_dtype: args.kv_cache_dtype,
        tensor_parallel: degree,
        device: devices::choose(&args.compute, threads)?,
        prompt_tokens,
        decode_steps: args.decode_steps,
        batches: args.batches.clone(),
    };
    let figures = measure(&options).map_err(CliError::Failed)?;
    let mut line = Map::new();
    line.insert(format!("prefill{prompt_tokens}"), json!(round(figures.prefill)));
    for (batch, tokens_per_second) in figures.decode {
        line.insert(format!("decode_b{batch}"), json!(round(tokens_per_second)));
    }
    line.insert("empty_step_us".to_owned(), json!(round(figures.empty_step_us)));
    line.insert("tensor_parallel".to_owned(), json!(args.tensor_parallel));
    line.insert("threads".to_owned(), json!(threads));
    line.insert("dtype".to_owned(), json!(figures.dtype));
    line.insert("quantization".to_owned(), json!(args.quantization.name()));
    line.insert("kv_cache_dtype".to_owned(), json!(args.kv_cache_dtype.name()));
    line.insert("backend".to_owned(), json!(figures.backend));
    print_line(&Value::Object(line).to_string());
    Ok(())
}

fn round(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}
