//! The model folder, and whether its weights fit.
use std::path::{Path, PathBuf};

use coordinator::coordinator::CoordinatorOptions;
use coordinator::text::model::{TextModel, TextOptions};
use shared::host::available_memory;
use shared::hub::ModelPart;
use shared::model_config::ConfigOverrides;
use shared::protocol::Lora;
use worker::model::ModelError;

use super::super::hub::{self, HubArgs};
use super::super::serve::{adapters as adapters_of, demo_model};
use super::host::mib;
use super::{DoctorArgs, Finding};

const MODEL: &str = "model";
const ADAPTERS: &str = "adapters";
const DRAFT: &str = "draft model";
const TOKENIZER: &str = "tokenizer";
const MEMORY: &str = "memory";
/// Memory of a worker besides weights and cache: threads, a step's buffers.
const OTHER: u64 = 256 << 20;

pub(super) fn check(args: &DoctorArgs, workers: u32) -> Vec<Finding> {
    let folder = match folder(args) {
        Ok(folder) => folder,
        Err(finding) => return vec![finding],
    };
    let mut findings = Vec::new();
    let overrides = overrides(args);
    let (degree, quantization) = (args.tensor_parallel, args.quantization);
    match worker::check::model_with(&folder, &overrides, degree, quantization) {
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
            let mut taken = |beside: Option<ExtraModel>| {
                let (bytes, finding) = beside?;
                findings.push(finding);
                Some(bytes)
            };
            let adapters = taken(adapters(&folder, args)).unwrap_or(0);
            let draft = taken(draft(&folder, args)).unwrap_or(0);
            let available = available_memory(Path::new("/"));
            let ranks = u64::from(args.tensor_parallel);
            let weights = needs.weight_bytes / ranks + adapters;
            let states = needs.state_bytes.saturating_mul(num_states(args)) / ranks;
            findings.push(memory(Taken { weights, states, draft }, args, workers, available));
        }
        Err(error) => findings.push(Finding::fail(MODEL, error.to_string(), remedy(&error, args))),
    }
    let options = TextOptions { config_overrides: overrides, ..TextOptions::default() };
    let text = TextModel::load_with(&folder, &options);
    let asked = (args.swap_space > 0, args.speculative_config.is_some());
    if let Some(why) = text.as_ref().ok().and_then(|text| text.cannot(asked.0, asked.1)) {
        findings.push(Finding::fail(MODEL, why, "leave the option out"));
    }
    findings.push(match text {
        Ok(text) => match &text.lacks_tokens {
            Some(lacks) => Finding::warn(
                TOKENIZER,
                lacks,
                "use config.json, weights and tokenizer.json of the same model; until then, texts \
                 without these tokens are served",
            ),
            None => Finding::ok(
                TOKENIZER,
                format!(
                    "{} tokens{}",
                    text.vocab_size,
                    if text.template.is_some() { ", with a chat template" } else { "" }
                ),
            ),
        },
        Err(error) => Finding::fail(
            TOKENIZER,
            error.to_string(),
            "the folder needs tokenizer.json (hosts that only run workers do without)",
        ),
    });
    findings
}

/// Returns the remedy for a model that cannot be served.
fn remedy(error: &ModelError, args: &DoctorArgs) -> &'static str {
    match error {
        ModelError::Degree { .. } => "--tensor-parallel N, with one of the possible degrees",
        ModelError::File { file, .. } if !file.exists() => {
            "--model DIR, a folder in Hugging Face format with config.json and safetensors"
        }
        ModelError::File { file, .. }
            if file.ends_with("config.json") && args.hf_overrides.is_some() =>
        {
            "correct --hf-overrides, or name another model with --model"
        }
        ModelError::File { file, .. } if file.ends_with("config.json") => {
            "name another model with --model; the README lists the supported ones"
        }
        _ => "copy the folder again from its source, or name another with --model",
    }
}

/// What is laid over the model's configuration.
fn overrides(args: &DoctorArgs) -> ConfigOverrides {
    args.hf_overrides.clone().unwrap_or_default()
}

fn folder(args: &DoctorArgs) -> Result<PathBuf, Finding> {
    match (&args.model, &args.coordinator) {
        (Some(model), _) => {
            hub::cached("--model", model, &args.hub, ModelPart::All).map_err(|why| {
                let fix = "serve it once, or copy the cache from another host";
                Finding::warn(MODEL, format!("not looked at: {why}"), fix)
            })
        }
        (None, Some(_)) => Err(Finding::warn(
            MODEL,
            "not checked: the coordinator names the model's folder",
            "--model DIR, with the coordinator's path",
        )),
        (None, None) => {
            demo_model().map_err(|error| Finding::fail(MODEL, error.to_string(), "--model DIR"))
        }
    }
}

/// Something served beside the model: the bytes it takes on a worker, and the finding.
type ExtraModel = (u64, Finding);

/// Checks the adapters of `--lora-modules`, if any, and the room for others; each worker has both.
fn adapters(folder: &Path, args: &DoctorArgs) -> Option<ExtraModel> {
    let count = args.lora.adapters().count();
    if count == 0 && args.lora.max_loras.is_none() {
        return None;
    }
    let places = args.lora.max_loras.map_or(String::new(), |places| format!(" of {places}"));
    let found = local(adapters_of(&args.lora), &args.hub).and_then(|lora| {
        let overrides = overrides(args);
        let bytes = worker::check::adapters(folder, &overrides, &lora, args.tensor_parallel);
        bytes.map_err(|error| error.to_string())
    });
    Some(match found {
        Ok(bytes) => {
            let text = format!("{count}{places} adapter(s), {} on each worker", mib(bytes));
            (bytes, Finding::ok(ADAPTERS, text))
        }
        Err(error) => {
            let fix = "save the adapter as the message says, or remove it from --lora-modules";
            (0, Finding::fail(ADAPTERS, error, fix))
        }
    })
}

/// The adapters with their folders on this host.
fn local(mut lora: Lora, args: &HubArgs) -> Result<Lora, String> {
    for adapter in &mut lora.adapters {
        let given = Path::new(&adapter.path);
        let folder = hub::cached("--lora-modules", given, args, ModelPart::Adapter)?;
        adapter.path = folder.to_string_lossy().into_owned();
    }
    Ok(lora)
}

/// Checks the draft model of `--speculative-config`, if any; it is on the worker that drafts.
fn draft(folder: &Path, args: &DoctorArgs) -> Option<ExtraModel> {
    let draft = args.speculative_config.as_ref()?.draft_model.as_ref()?;
    let looked = hub::cached("--speculative-config", draft, &args.hub, ModelPart::Weights);
    let looked = looked.and_then(|draft| {
        let bytes = worker::check::draft(folder, &overrides(args), &draft);
        bytes.map_err(|error| error.to_string())
    });
    Some(match looked {
        Ok(bytes) => {
            let text = format!("{}: {} of weights on rank 0", draft.display(), mib(bytes));
            (bytes, Finding::ok(DRAFT, text))
        }
        Err(error) => {
            let fix =
                "name another folder in --speculative-config, of a model with the same tokens";
            (0, Finding::fail(DRAFT, error, fix))
        }
    })
}

/// Bytes besides the cache.
#[derive(Clone, Copy, Debug)]
struct Taken {
    /// On each worker, adapters included.
    weights: u64,
    /// States of linear attention, on each worker.
    states: u64,
    /// Of the draft model, on one worker per replica; its KV is in that worker's cache.
    draft: u64,
}

/// Compares a worker's weights, cache and the rest with what the host can give.
fn memory(taken: Taken, args: &DoctorArgs, workers: u32, available: Option<u64>) -> Finding {
    let drafting = u64::from(workers.div_ceil(args.tensor_parallel));
    let drafts = taken.draft.saturating_mul(drafting);
    let per_worker = taken
        .weights
        .saturating_add(taken.states)
        .saturating_add(args.kv_cache_memory)
        .saturating_add(args.swap_space)
        .saturating_add(OTHER);
    let needed = per_worker.saturating_mul(u64::from(workers)).saturating_add(drafts);
    let Some(available) = available else {
        let found = format!("about {} needed; the system does not report what it has", mib(needed));
        return Finding::warn(MEMORY, found, "check the host's memory yourself");
    };
    let beside = match drafts {
        0 => String::new(),
        _ => format!(" and {drafting} draft model(s) of {}", mib(taken.draft)),
    };
    let found = format!(
        "{} available, {workers} worker(s) of about {}{beside} need {}",
        mib(available),
        mib(per_worker),
        mib(needed)
    );
    if needed <= available {
        return Finding::ok(MEMORY, found);
    }
    let fix = match args.swap_space {
        _ if taken.states > 0 => {
            "more hosts (--tensor-parallel), fewer workers here, or less --kv-cache-memory, \
             --max-num-seqs or --prefix-states"
        }
        0 => "more hosts (--tensor-parallel), fewer workers here, or less --kv-cache-memory",
        _ => "more hosts, fewer workers here, less --swap-space or less --kv-cache-memory",
    };
    // All sequences together may fill less than the cache's bound; a worker checks that when it is
    // formed.
    if needed.saturating_sub(args.kv_cache_memory.saturating_mul(u64::from(workers))) <= available {
        return Finding::warn(MEMORY, found, fix);
    }
    Finding::fail(MEMORY, found, fix)
}

/// Number of states that a model with linear attention has in memory.
fn num_states(args: &DoctorArgs) -> u64 {
    let usual = CoordinatorOptions::usual_prefix_states(args.max_num_seqs);
    let kept = match args.no_enable_prefix_caching {
        true => 0,
        false => args.prefix_states.unwrap_or(usual),
    };
    u64::from(args.max_num_seqs) + u64::from(kept)
}

#[cfg(test)]
mod tests {
    use super::super::Severity;
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
        // Weights, cache and the rest: 2 + 1 + 0.25 GiB each.
        let plain = |weights| Taken { weights, states: 0, draft: 0 };
        let judged = |gib: f64, workers| {
            let available = Some((gib * (1u64 << 30) as f64) as u64);
            memory(plain(2 << 30), &args, workers, available).level
        };
        assert_eq!(judged(6.5, 2), Severity::Ok);
        assert_eq!(judged(6.4, 2), Severity::Warn);
        assert_eq!(judged(4.4, 2), Severity::Fail);
        assert_eq!(judged(4.4, 1), Severity::Ok);
        assert_eq!(memory(plain(1), &args, 1, None).level, Severity::Warn);
        // Half a GiB more for each.
        let swapping =
            Line::parse_from(["doctor", "--tensor-parallel", "2", "--swap-space", "0.5"]);
        let found = |mib: u64| memory(plain(2 << 30), &swapping.args, 2, Some(mib << 20));
        assert_eq!(found((2048 + 512 + 512 + 256) * 2).level, Severity::Ok);
        assert_eq!(found((2048 + 512 + 256) * 2 - 1).level, Severity::Fail);
        assert!(found(0).fix.unwrap_or_default().contains("--swap-space"));
        // A quarter of a GiB of states on each.
        let stateful = Taken { states: 256 << 20, ..plain(2 << 30) };
        let found = memory(stateful, &args, 2, Some(((2048 + 1024 + 512) * 2) << 20));
        assert_eq!(found.level, Severity::Ok);
        let found = memory(stateful, &args, 2, Some((((2048 + 512) * 2) << 20) - 1));
        assert_eq!(found.level, Severity::Fail);
        assert!(found.fix.unwrap_or_default().contains("--max-num-seqs"));
    }

    #[test]
    fn states_are_those_of_running_sequences_and_those_that_are_kept() {
        for (said, count) in [
            (&[][..], 64 + 32),
            (&["--prefix-states", "5"], 64 + 5),
            (&["--no-enable-prefix-caching", "--prefix-states", "5"], 64),
            (&["--max-num-seqs", "1"], 1 + 2),
        ] {
            assert_eq!(num_states(&args(said)), count, "{said:?}");
        }
    }

    #[test]
    fn what_states_do_not_allow_is_found() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let folder = root.join("tests/models/qwen3_5");
        let found = |more: &[&str]| {
            let all = [&["--tensor-parallel", "1", "--model", folder.to_str().unwrap()], more];
            let findings = check(&args(&all.concat()), 1).into_iter();
            let failed = findings.filter(|finding| finding.level == Severity::Fail);
            failed.map(|finding| finding.found).collect::<Vec<_>>()
        };
        assert_eq!(found(&[]), Vec::<String>::new());
        let ngram = r#"{"method":"ngram","num_speculative_tokens":3}"#;
        for option in [["--swap-space", "0.1"], ["--speculative-config", ngram]] {
            let [only] = &found(&option)[..] else { panic!("{option:?}: not one thing fails") };
            assert!(only.starts_with(&format!("{}: not supported", option[0])), "{only}");
        }
    }

    #[test]
    fn a_draft_model_takes_memory_of_one_worker_of_each_replica() {
        let args = args(&["--kv-cache-memory", "1GiB", "--tensor-parallel", "2"]);
        let judged = |mib: u64, workers| {
            let taken = Taken { weights: 2 << 30, states: 0, draft: 512 << 20 };
            memory(taken, &args, workers, Some(mib << 20))
        };
        let each = 2048 + 1024 + 256;
        for (workers, drafting) in [(1, 1), (2, 1), (3, 2), (4, 2)] {
            let needed = u64::from(workers) * each + drafting * 512;
            assert_eq!(judged(needed, workers).level, Severity::Ok);
            assert_eq!(judged(needed - 1, workers).level, Severity::Warn);
        }
        let found = judged(1 << 20, 4).found;
        assert!(found.contains("2 draft model(s) of 512"), "{found}");
    }

    /// The tests' model as its own draft model, and one with other tokens.
    #[test]
    fn a_draft_model_is_held_against_the_model() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let model = root.join("tests/models/llama-gqa");
        let looked = |folder: &Path| {
            let folder = folder.to_str().unwrap();
            let json = format!(r#"{{"model":"{folder}","num_speculative_tokens":3}}"#);
            draft(&model, &args(&["--speculative-config", &json])).unwrap()
        };
        let (bytes, finding) = looked(&model);
        assert_eq!(finding.level, Severity::Ok);
        let own = std::fs::metadata(model.join("model.safetensors")).unwrap().len();
        assert!((own * 9 / 10..=own).contains(&bytes), "{bytes} of {own}");
        let (bytes, finding) = looked(&root.join("models/demo"));
        assert_eq!((bytes, finding.level), (0, Severity::Fail));
        assert!(finding.found.contains("both must have the same tokens"), "{}", finding.found);
        assert_eq!(draft(&model, &args(&[])), None);
        let drafts = r#"{"method":"ngram","num_speculative_tokens":3}"#;
        assert_eq!(draft(&model, &args(&["--speculative-config", drafts])), None);
    }

    #[test]
    fn a_workers_folder_is_not_guessed() {
        assert_eq!(folder(&args(&["--coordinator", "h:1"])).unwrap_err().level, Severity::Warn);
        assert!(folder(&args(&["--model", "/a"])).is_ok());
    }
}
