//! vLLM's options that have another name here, or none: operators' existing command lines are
//! understood or answered with the alternative. docs/from-vllm.md has the same as a table.
use std::ffi::OsString;

use clap::error::ErrorKind;

use super::logging;

/// How an option is treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Handling {
    /// It asks for the normal behaviour: dropped.
    Ignore,
    /// The same, with this message.
    IgnoreWithNotice(&'static str),
    /// Rejected, with this alternative.
    Reject(&'static str),
}

use Handling::{Ignore, IgnoreWithNotice, Reject};

/// Models with classes have no choice.
const POOLER: &str =
    "edit the folder's `1_Pooling/config.json`; classes always take the last token";

/// The options, without leading double dashes.
pub(crate) const OPTIONS: &[(&str, Handling)] = &[
    ("enable-prefix-caching", Ignore),
    ("enable-chunked-prefill", Ignore),
    ("enable-auto-tool-choice", Ignore),
    ("enable-lora", Ignore),
    ("enable-prompt-tokens-details", Ignore),
    ("disable-log-requests", Ignore),
    ("no-enable-log-requests", Ignore),
    ("disable-uvicorn-access-log", Ignore),
    ("enable-request-id-headers", Ignore),
    ("enable-server-load-tracking", Ignore),
    ("enable-ssl-refresh", Ignore),
    ("async-scheduling", Ignore),
    ("language-model-only", Ignore),
    ("enable-reasoning", IgnoreWithNotice("`--reasoning-parser` is enough")),
    (
        "trust-remote-code",
        IgnoreWithNotice("it is never needed: no code of a model's folder is run"),
    ),
    ("host", Reject("`--listen IP:PORT`")),
    ("port", Reject("`--listen IP:PORT`")),
    ("uds", Reject("`--listen IP:PORT`")),
    ("enforce-eager", Reject("`--no-cuda-graphs`; `--cuda-warmup 0` starts sooner")),
    ("enable-log-requests", Reject("`--access-log`")),
    ("disable-log-stats", Reject("`--log-stats-interval 0`")),
    ("-tp", Reject("`--tensor-parallel N`")),
    ("-dp", Reject("`--workers` M times the tensor-parallel degree")),
    ("data-parallel-size", Reject("`--workers` M times the tensor-parallel degree")),
    ("-pp", Reject("layers are not divided among ranks: `--tensor-parallel N`")),
    ("pipeline-parallel-size", Reject("layers are not divided among ranks: `--tensor-parallel N`")),
    (
        "enable-expert-parallel",
        Reject("each rank has a part of every expert: `--tensor-parallel N`"),
    ),
    (
        "distributed-executor-backend",
        Reject("`tutti coordinator`, `tutti worker`, `tutti frontend`"),
    ),
    ("nnodes", Reject("`tutti worker` on each of the other hosts")),
    ("node-rank", Reject("`tutti worker` on each of the other hosts")),
    ("headless", Reject("`tutti worker` on each of the other hosts")),
    ("disable-custom-all-reduce", Reject("`--cuda-exchange nccl`")),
    ("hf-overrides", Reject("edit the folder's `config.json`")),
    ("rope-scaling", Reject("edit the folder's `config.json`")),
    ("rope-theta", Reject("edit the folder's `config.json`")),
    ("tokenizer", Reject("the folder's `tokenizer.json` is always used")),
    ("tokenizer-mode", Reject("the folder's `tokenizer.json` is always used")),
    ("chat-template-content-format", Reject("templates get text as a string")),
    ("trust-request-chat-template", Reject("`--chat-template FILE`, one for all requests")),
    ("limit-mm-per-prompt", Reject("only text is served")),
    ("load-format", Reject("only safetensors are read")),
    ("hf-token", Reject("`HF_TOKEN` in the environment, or the file `token` in `HF_HOME`")),
    ("seed", Reject("set `seed` in requests")),
    ("task", Reject("the model's `config.json` says what it can do")),
    ("runner", Reject("the model's `config.json` says what it can do")),
    ("convert", Reject("edit the folder's `config.json`: `architectures`")),
    ("pooler-config", Reject(POOLER)),
    ("override-pooler-config", Reject(POOLER)),
    ("max-cpu-loras", Reject("`--max-loras N`: all adapters may be in one step")),
    ("cpu-offload-gb", Reject("weights stay in the memory of the device that computes")),
    ("calculate-kv-scales", Reject("KV caches in FP8 have no scales")),
    ("num-gpu-blocks-override", Reject("`--kv-cache-memory BYTES`")),
    ("api-server-count", Reject("`tutti frontend`, any number of them")),
    ("guided-decoding-backend", Reject("llguidance is the only backend")),
    ("structured-outputs-config", Reject("llguidance is the only backend")),
    ("compilation-config", Reject("nothing is compiled; `--no-cuda-graphs`")),
    (
        "collect-detailed-traces",
        Reject("leave it out: spans always have their parts, queue, prefill and decode"),
    ),
    ("uvicorn-log-level", Reject("`--log-level`, `--access-log`")),
    ("root-path", Reject("paths are fixed: a proxy can add a prefix")),
];

/// Returns how an option is treated, given as `--name`, `--name=value` or `-tp`.
fn find(argument: &str) -> Option<(&str, Handling)> {
    let name = argument.split('=').next().unwrap_or(argument);
    let bare = name.strip_prefix("--").unwrap_or(name).replace('_', "-");
    OPTIONS.iter().find(|(known, _)| *known == bare).map(|(_, here)| (name, *here))
}

/// Returns the advice about a configuration file's key.
pub(crate) fn hint(key: &str) -> Option<String> {
    let (_, here) = find(&format!("--{key}"))?;
    Some(match here {
        Ignore => "this is always the case: leave it out".to_owned(),
        IgnoreWithNotice(why) => format!("leave it out: {why}"),
        Reject(what) => format!("this is a vLLM option; here: {what}"),
    })
}

/// Removes options without effect from the command line of the roles that correspond to `vllm
/// serve`.
///
/// # Errors
/// Names the alternative.
pub(crate) fn understood(args: &[OsString]) -> Result<Vec<OsString>, clap::Error> {
    let role = args.get(1).and_then(|role| role.to_str());
    if role == Some("serve") {
        let model = args.get(2).and_then(|it| it.to_str()).filter(|it| !it.starts_with('-'));
        let model = model.unwrap_or("MODEL");
        return Err(refused(&format!(
            "`serve` is a vLLM command; here: `tutti up --model {model}`"
        )));
    }
    if !matches!(role, Some("up" | "coordinator" | "doctor")) {
        return Ok(args.to_vec());
    }
    let mut kept = Vec::with_capacity(args.len());
    for argument in args {
        match argument.to_str().filter(|it| it.starts_with('-')).and_then(find) {
            None => kept.push(argument.clone()),
            Some((_, Ignore)) => {}
            Some((name, IgnoreWithNotice(why))) => {
                logging::pass_on(format!("note: `{name}` is left out: {why}\n").as_bytes());
            }
            Some((name, Reject(what))) => {
                return Err(refused(&format!("`{name}` is a vLLM option; here: {what}")));
            }
        }
    }
    Ok(kept)
}

fn refused(message: &str) -> clap::Error {
    clap::Error::raw(ErrorKind::UnknownArgument, format!("{message}\n"))
}

/// Parses a number of tokens like vLLM: `4096`, `4k` (4,000), `4K` (4,096), `1.5k`, `1m`, `1M`.
///
/// # Errors
/// Says what is expected.
pub(crate) fn parse_length(text: &str) -> Result<u32, String> {
    let expected =
        || "expected 2 or more tokens, such as 4096, 4K (4,096) or 4k (4,000)".to_owned();
    let text = text.trim();
    let (number, factor) = match text.char_indices().next_back() {
        Some((at, 'k')) => (&text[..at], 1_000),
        Some((at, 'K')) => (&text[..at], 1 << 10),
        Some((at, 'm')) => (&text[..at], 1_000_000),
        Some((at, 'M')) => (&text[..at], 1 << 20),
        _ => (text, 1),
    };
    // As in vLLM, fractions only of powers of ten.
    let decimal = factor % 10 == 0 && number.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    let tokens = match number.parse::<u64>() {
        Ok(number) => number.checked_mul(factor),
        Err(_) if decimal => number.parse::<f64>().ok().map(|it| (it * factor as f64) as u64),
        Err(_) => None,
    };
    let tokens = tokens.and_then(|it| u32::try_from(it).ok()).filter(|it| *it >= 2);
    tokens.ok_or_else(expected)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<OsString> {
        text.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn what_asks_for_nothing_is_left_out_and_the_rest_is_told() {
        let given =
            "tutti up --enable-prefix-caching --model a --enable_chunked_prefill --enable-lora";
        assert_eq!(understood(&words(given)).unwrap(), words("tutti up --model a"));
        let other = words("tutti worker --port 1");
        assert_eq!(understood(&other).unwrap(), other, "another role");
        for (line, told) in [
            ("tutti up --port 8000", "--listen IP:PORT"),
            ("tutti up --host=0.0.0.0", "`--host` is a vLLM option; here: `--listen"),
            ("tutti coordinator -tp 2", "--tensor-parallel N"),
            ("tutti serve org/model --port 1", "`tutti up --model org/model`"),
            ("tutti serve", "`tutti up --model MODEL`"),
        ] {
            let error = understood(&words(line)).unwrap_err().to_string();
            assert!(error.contains(told) && !error.contains("tip:"), "{line}: {error}");
        }
        assert!(hint("hf-overrides").unwrap().contains("config.json"));
        assert!(hint("model").is_none());
    }

    #[test]
    fn no_option_of_ours_is_taken_for_one_of_theirs() {
        let command = super::super::options::command();
        let ours = command.get_subcommands().flat_map(|it| it.get_arguments().collect::<Vec<_>>());
        for argument in ours {
            let names = argument.get_long_and_visible_aliases().unwrap_or_default();
            let known = names.iter().find(|name| OPTIONS.iter().any(|(theirs, _)| theirs == *name));
            assert_eq!(known, None);
        }
    }

    #[test]
    fn the_documentation_says_the_same() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/from-vllm.md");
        let text = std::fs::read_to_string(path).unwrap();
        for (name, here) in OPTIONS {
            let name = if name.starts_with('-') { (*name).to_owned() } else { format!("--{name}") };
            let mut rows = text.lines().filter(|row| {
                let names = row.split('`').skip(1).step_by(2);
                names.flat_map(|it| it.split(' ').next()).any(|it| it == name)
            });
            match here {
                Ignore => assert!(rows.any(|row| row.contains("always the case")), "{name}"),
                IgnoreWithNotice(what) | Reject(what) => {
                    assert!(rows.any(|row| row.contains(what)), "{name}: {what}");
                }
            }
        }
    }

    #[test]
    fn lengths_have_suffixes() {
        for (text, tokens) in [
            ("4096", 4096),
            ("1k", 1000),
            ("1K", 1024),
            ("25.6k", 25_600),
            ("1M", 1 << 20),
            ("2m", 2_000_000),
        ] {
            assert_eq!(parse_length(text), Ok(tokens), "{text}");
        }
        for bad in ["1", "", "k", "1.5K", "1.5", "-1", "1g", "99999M", "1 parsec"] {
            assert!(parse_length(bad).unwrap_err().contains("4K (4,096)"), "{bad}");
        }
    }
}
