//! The model folder, and whether its weights fit.
use std::path::{Path, PathBuf};

use coordinator::text::model::TextModel;
use shared::host::available_memory;
use worker::model::ModelError;

use super::super::serve::{demo_model, lora};
use super::host::mib;
use super::{DoctorArgs, Finding};

const MODEL: &str = "model";
const ADAPTERS: &str = "adapters";
const TOKENIZER: &str = "tokenizer";
const MEMORY: &str = "memory";
/// What a worker takes besides weights and cache: threads, buffers of a step.
const OTHER: u64 = 256 << 20;

pub(super) fn check(args: &DoctorArgs, workers: u32) -> Vec<Finding> {
    let folder = match folder(args) {
        Ok(folder) => folder,
        Err(finding) => return vec![finding],
    };
    let mut findings = Vec::new();
    match worker::check::model(&folder, args.tensor_parallel, args.quantization) {
        Ok(needs) => {
            findings.push(Finding::ok(
                MODEL,
                format!(
                    "{}: {} of weights in {} file(s), {} layers, {} positions, tensor parallel {}",
                    folder.display(),
                    mib(needs.weight_bytes),
                    needs.files,
                    needs.layers,
                    needs.max_positions,
                    args.tensor_parallel
                ),
            ));
            let adapters = match adapters(&folder, args) {
                None => 0,
                Some(Ok((bytes, finding))) => {
                    findings.push(finding);
                    bytes
                }
                Some(Err(finding)) => {
                    findings.push(finding);
                    0
                }
            };
            let available = available_memory(Path::new("/"));
            let weights = needs.weight_bytes / u64::from(args.tensor_parallel);
            findings.push(memory(weights + adapters, args, workers, available));
        }
        Err(error) => findings.push(Finding::fail(MODEL, error.to_string(), remedy(&error))),
    }
    findings.push(match TextModel::load(&folder) {
        Ok(text) => Finding::ok(
            TOKENIZER,
            format!(
                "{} tokens{}",
                text.vocab_size,
                if text.template.is_some() { ", with a chat template" } else { "" }
            ),
        ),
        Err(error) => Finding::fail(
            TOKENIZER,
            error.to_string(),
            "the folder needs tokenizer.json (workers alone do without)",
        ),
    });
    findings
}

/// What mends a model that cannot be served.
fn remedy(error: &ModelError) -> &'static str {
    match error {
        ModelError::Degree { .. } => "--tensor-parallel N, one of the degrees that are possible",
        ModelError::File { file, .. } if !file.exists() => {
            "--model DIR, a folder in Hugging Face format with config.json and safetensors"
        }
        ModelError::File { file, .. } if file.ends_with("config.json") => {
            "name another model with --model; the README lists those that are served"
        }
        _ => "copy the folder again from where it came, or name another with --model",
    }
}

fn folder(args: &DoctorArgs) -> Result<PathBuf, Finding> {
    match (&args.model, &args.coordinator) {
        (Some(model), _) => Ok(std::path::absolute(model).unwrap_or_else(|_| model.clone())),
        (None, Some(_)) => Err(Finding::warn(
            MODEL,
            "not looked at: the coordinator names its folder",
            "--model DIR, the path that the coordinator has",
        )),
        (None, None) => {
            demo_model().map_err(|error| Finding::fail(MODEL, error.to_string(), "--model DIR"))
        }
    }
}

/// The adapters of `--lora-modules`, where there are any, and what they take of each worker.
fn adapters(folder: &Path, args: &DoctorArgs) -> Option<Result<(u64, Finding), Finding>> {
    let count = args.lora.adapters().count();
    if count == 0 {
        return None;
    }
    let found = lora(&args.lora).map_err(|error| error.to_string()).and_then(|lora| {
        let bytes = worker::check::adapters(folder, &lora, args.tensor_parallel);
        bytes.map_err(|error| error.to_string())
    });
    Some(match found {
        Ok(bytes) => {
            let text = format!("{count} adapter(s), {} on each worker", mib(bytes));
            Ok((bytes, Finding::ok(ADAPTERS, text)))
        }
        Err(error) => Err(Finding::fail(
            ADAPTERS,
            error,
            "save the adapter as the message says, or leave it out of --lora-modules",
        )),
    })
}

/// A worker's weights, cache and the rest against what the host can give.
fn memory(weights: u64, args: &DoctorArgs, workers: u32, available: Option<u64>) -> Finding {
    let per_worker = weights
        .saturating_add(args.kv_cache_memory)
        .saturating_add(args.swap_space)
        .saturating_add(OTHER);
    let needed = per_worker.saturating_mul(u64::from(workers));
    let Some(available) = available else {
        let found = format!("about {} needed; the system does not say what it has", mib(needed));
        return Finding::warn(MEMORY, found, "look for yourself");
    };
    let found = format!(
        "{} available, {workers} worker(s) of about {} need {}",
        mib(available),
        mib(per_worker),
        mib(needed)
    );
    if needed <= available {
        return Finding::ok(MEMORY, found);
    }
    let fix = match args.swap_space {
        0 => "more hosts (--tensor-parallel), fewer workers here, or less --kv-cache-memory",
        _ => "more hosts, fewer workers here, less --swap-space or less --kv-cache-memory",
    };
    // What all sequences together can fill may be less than the cache's bound, and a worker looks
    // for that when it is formed.
    if needed.saturating_sub(args.kv_cache_memory.saturating_mul(u64::from(workers))) <= available {
        return Finding::warn(MEMORY, found, fix);
    }
    Finding::fail(MEMORY, found, fix)
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: DoctorArgs,
    }

    fn args(words: &[&str]) -> DoctorArgs {
        Line::parse_from([&["doctor"][..], words].concat()).args
    }

    #[test]
    fn memory_is_compared_with_weights_and_cache() {
        let args = args(&["--kv-cache-memory", "1GiB", "--tensor-parallel", "2"]);
        // Of weights, cache and the rest 2 + 1 + 0.25 GiB each.
        let judged = |gib: f64, workers| {
            memory(2 << 30, &args, workers, Some((gib * (1u64 << 30) as f64) as u64)).level
        };
        assert_eq!(judged(6.5, 2), Level::Ok);
        assert_eq!(judged(6.4, 2), Level::Warn);
        assert_eq!(judged(4.4, 2), Level::Fail);
        assert_eq!(judged(4.4, 1), Level::Ok);
        assert_eq!(memory(1, &args, 1, None).level, Level::Warn);
        // Half a GiB more for each.
        let swapping =
            Line::parse_from(["doctor", "--tensor-parallel", "2", "--swap-space", "0.5"]);
        let found = |mib: u64| memory(2 << 30, &swapping.args, 2, Some(mib << 20));
        assert_eq!(found((2048 + 512 + 512 + 256) * 2).level, Level::Ok);
        assert_eq!(found((2048 + 512 + 256) * 2 - 1).level, Level::Fail);
        assert!(found(0).fix.unwrap_or_default().contains("--swap-space"));
    }

    #[test]
    fn a_workers_folder_is_not_guessed() {
        assert_eq!(folder(&args(&["--coordinator", "h:1"])).unwrap_err().level, Level::Warn);
        assert!(folder(&args(&["--model", "/a"])).is_ok());
    }
}
