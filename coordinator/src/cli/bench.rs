//! `tutti bench`: the engine's speed on this machine, without HTTP and links.
use serde_json::{Map, Value, json};
use worker::bench::{BenchOptions, WARM_UP_STEPS, run as measure};

use super::options::BenchArgs;
use super::output::print_line;
use super::serve::demo_model;
use super::work::cores;
use super::{CliError, devices, logging};

pub(crate) fn run(args: &BenchArgs) -> Result<(), CliError> {
    logging::init("warn");
    let model = args.model.clone().map_or_else(demo_model, Ok)?;
    let threads = args.compute.threads.unwrap_or_else(|| (cores() / args.tensor_parallel).max(1));
    let needs = worker::check::model(&model, args.tensor_parallel, args.quantization)
        .map_err(|error| CliError::Failed(error.to_string()))?;
    if args.prompt_tokens as usize + WARM_UP_STEPS as usize > needs.max_positions {
        return Err(CliError::Usage(format!(
            "--prompt-tokens {} is too many: the model has {} positions, and {WARM_UP_STEPS} are for \
             the steps behind the prompt",
            args.prompt_tokens, needs.max_positions
        )));
    }
    let options = BenchOptions {
        model,
        dtype: args.dtype,
        quantization: args.quantization,
        tensor_parallel: args.tensor_parallel,
        device: devices::choose(&args.compute, threads)?,
        prompt_tokens: args.prompt_tokens,
        decode_steps: args.decode_steps,
        batches: args.batches.clone(),
    };
    let figures = measure(&options).map_err(CliError::Failed)?;
    let mut line = Map::new();
    line.insert(format!("prefill{}", args.prompt_tokens), json!(round(figures.prefill)));
    for (batch, tokens_per_second) in figures.decode {
        line.insert(format!("decode_b{batch}"), json!(round(tokens_per_second)));
    }
    line.insert("empty_step_us".to_owned(), json!(round(figures.empty_step_us)));
    line.insert("tensor_parallel".to_owned(), json!(args.tensor_parallel));
    line.insert("threads".to_owned(), json!(threads));
    line.insert("dtype".to_owned(), json!(figures.dtype));
    line.insert("quantization".to_owned(), json!(args.quantization.name()));
    line.insert("backend".to_owned(), json!(figures.backend));
    print_line(&Value::Object(line).to_string());
    Ok(())
}

fn round(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}
