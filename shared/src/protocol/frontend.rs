//! Messages between the coordinator and a front end in a process of its own.
//!
//! A front end dials, sends [`FrontendHello`] and gets [`FrontendWelcome`]; then requests go to the
//! coordinator ([`FromFrontend`]) and their events come back ([`ToFrontend`]), many events per
//! frame. Text stays in the front end, except for stop strings: the engine needs them because the
//! accepted-token log ends where the first one is complete.
use std::fmt;

use serde::{Deserialize, Serialize};

use super::bad_words::BadWords;
use super::control::WorkerStats;
use super::guide::GuideSpec;
use super::lora::{Adapter, AdapterCommand, AdapterError};
use super::note::RequestNote;
use super::step::TokenLogprobs;
use super::thinking::ThinkingBudget;
use crate::actor::peer::RemoteMessage;
use crate::hub::HubModel;
use crate::ids::{Incarnation, RequestId};
use crate::metrics::labels::RejectReason;
use crate::sampling::SamplingParams;
use crate::wire::frame::FrameKind;

/// A front end's slot, assigned by the coordinator; survives a restart of the process. Slot 0 is
/// the coordinator's own front end.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct FrontendId(pub u32);

impl fmt::Display for FrontendId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "frontend-{}", self.0)
    }
}

/// A front end's first message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FrontendHello {
    /// The node's name, unique among front ends; a front end that restarts under the same name gets
    /// its old slot again.
    pub node: String,
    /// This process run.
    pub incarnation: Incarnation,
    /// The process id, for the operator.
    pub pid: u32,
    /// The program's version; informational.
    pub version: String,
    /// Slot at its previous coordinator: a hint, so that a new coordinator can assign the same one,
    /// and knows that it has counted for another.
    pub slot: Option<FrontendId>,
}

/// The coordinator's answer to [`FrontendHello`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FrontendWelcome {
    /// Slot assigned to this front end.
    pub frontend: FrontendId,
    /// Interval of its stats reports, in milliseconds.
    pub stats_interval_ms: u64,
    /// What is being served.
    pub serving: Serving,
}

/// Maximum number of names of one model in the API.
pub const MODEL_NAMES_MAX: usize = 16;
/// Maximum length of such a name, in bytes.
pub const MODEL_NAME_MAX: usize = 1024;

/// Checks the names that a model is to have in the API.
///
/// # Errors
/// One sentence naming the bound that is broken.
pub fn check_model_names(names: &[String]) -> Result<(), String> {
    let count = names.len();
    if !(1..=MODEL_NAMES_MAX).contains(&count) {
        return Err(format!("{count} names, it must be 1 to {MODEL_NAMES_MAX}"));
    }
    for (index, name) in names.iter().enumerate() {
        if !(1..=MODEL_NAME_MAX).contains(&name.len()) || name.chars().any(char::is_control) {
            let len = name.len();
            return Err(format!(
                "a name has {len} bytes: it must have 1 to {MODEL_NAME_MAX}, and no control \
                 characters"
            ));
        }
        if names[..index].contains(name) {
            return Err(format!("the name {name} is given twice"));
        }
    }
    Ok(())
}

/// What a front end must know about the model to take requests for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Serving {
    /// The model folder, as a path on the coordinator's host, or a model on the hub, as
    /// [`HubModel`] is written.
    pub model: String,
    /// Name of the model in the API.
    pub served_model_name: String,
    /// Other names of the model in the API.
    pub model_aliases: Vec<String>,
    /// LoRA adapters served beside the model.
    pub adapters: Vec<Adapter>,
    /// Maximum length of a sequence, in tokens.
    pub max_model_len: u32,
    /// Fingerprint of the tokenizer's files: both sides must have the same one.
    pub text_fingerprint: u64,
    /// Whether requests are scheduled by priority.
    pub priorities: bool,
}

impl Serving {
    /// Whether a request for one can be served by the other: the path of the folder on the
    /// coordinator's host does not matter, but two states of a model on the hub are two models.
    /// Adapters come and go; each request tells its own.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        self.difference(other).is_none()
    }

    /// Says in what `other` is another model, if it is.
    #[must_use]
    pub fn difference(&self, other: &Self) -> Option<String> {
        let states = (HubModel::parse(&self.model), HubModel::parse(&other.model));
        if matches!(&states, (Some(own), Some(its)) if own != its) {
            return Some(format!("it is {}, not {}", other.model, self.model));
        }
        let (name, its_name) = (&self.served_model_name, &other.served_model_name);
        if name != its_name {
            return Some(format!("it is called {its_name}, not {name}"));
        }
        if self.model_aliases != other.model_aliases {
            let list = |names: &[String]| match names {
                [] => "none".to_owned(),
                names => names.join(", "),
            };
            let (names, its_names) = (list(&self.model_aliases), list(&other.model_aliases));
            return Some(format!(
                "it is called {name} too, but its further names are {its_names}, not {names}"
            ));
        }
        if self.max_model_len != other.max_model_len {
            return Some(format!(
                "it is called {name} too, but is served with {} tokens, not {} (--max-model-len)",
                other.max_model_len, self.max_model_len
            ));
        }
        (self.text_fingerprint != other.text_fingerprint).then(|| {
            format!("it is called {name} too, but its files or options differ: {TEXT_PARTS}")
        })
    }
}

/// What [`Serving::text_fingerprint`] covers, one of which differs if the fingerprints do.
pub const TEXT_PARTS: &str = "config.json, generation_config.json, the tokenizer's files, a chat \
     template, how texts are pooled, --hf-overrides, --chat-template, \
     --default-chat-template-kwargs, --generation-config or --override-generation-config";

/// A request submitted to the engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SubmitRequest {
    /// The front end's id for it, below 2^40 and used once per link.
    pub id: RequestId,
    /// The prompt.
    pub prompt: Vec<u32>,
    /// Sampling parameters of the first choice; the other choices differ only in their index.
    pub sampling: SamplingParams,
    /// Number of choices.
    pub n: u32,
    /// Stop strings.
    pub stops: Vec<String>,
    /// Whether to look for stop strings in text that includes special tokens.
    pub keep_special: bool,
    /// Whether each choice's text continues the prompt: a leading space of its first token then
    /// belongs to it, whatever the tokenizer does at the beginning of a text.
    pub goes_on: bool,
    /// Maximum number of tokens per choice.
    pub max_tokens: u32,
    /// Whether the client gave no bound: fewer than `max_tokens` will do if the KV cache is full.
    pub open_ended: bool,
    /// The structured output (guided decoding) that each choice as a whole must match.
    pub guide: Option<GuideSpec>,
    /// The bound on the reasoning of each choice.
    pub thinking: Option<ThinkingBudget>,
    /// The words that must not come.
    pub bad_words: Option<BadWords>,
    /// Scheduling priority; lower values are scheduled earlier.
    pub priority: i32,
    /// Salt of the prefix cache: requests with different salts do not share cached prompt prefixes.
    pub cache_salt: u64,
    /// Number of its LoRA adapter; 0 for none.
    pub adapter: u32,
    /// Name of that adapter: another leader may have given the number to another one.
    pub adapter_name: String,
    /// Tokens that end a sequence.
    pub end_tokens: Vec<u32>,
    /// Microseconds since the front end received it. An age rather than a time, since the clocks of
    /// two processes are never compared.
    pub waited_us: u64,
    /// Response id that the client sees.
    pub response_id: String,
    /// Whether to note what happens to it ([`EngineEvent::Note`]).
    pub traced: bool,
    /// What a previous coordinator accepted of it, one entry per choice; it continues from there.
    /// Empty if no token was accepted and no choice has ended.
    pub accepted: Vec<AcceptedChoice>,
    /// Whether a previous coordinator was sent it and has not refused it: it was let in before,
    /// even if nothing was accepted of it.
    pub again: bool,
}

impl SubmitRequest {
    /// Returns the number of choices that have not ended.
    #[must_use]
    pub fn choices_left(&self) -> usize {
        let is_over = |choice: &&AcceptedChoice| matches!(choice, AcceptedChoice::Over { .. });
        (self.n as usize).saturating_sub(self.accepted.iter().filter(is_over).count())
    }
}

/// What a previous coordinator accepted of one choice.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AcceptedChoice {
    /// The tokens so far, in order, perhaps none; the choice continues unless they complete it.
    GoesOn(Vec<u32>),
    /// The choice has ended: it is not run again.
    Over {
        /// Number of its tokens, for the totals of the request.
        tokens: u32,
    },
}

/// An event of a request; a request's events are in order. A request ends with one `Finished` per
/// choice or with one `Failed`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum EngineEvent {
    /// Log-probabilities of the prompt tokens from index 1 on, complete before the first generated
    /// token. Those of a long prompt arrive in several pieces, in order.
    PromptLogprobs(Vec<TokenLogprobs>),
    /// Complete embedding of the prompt as the model computes it, not normalised; or its number for
    /// each class.
    Embedding(Vec<f32>),
    /// One accepted token.
    Token {
        /// Choice it belongs to.
        choice: u32,
        /// The token.
        token: u32,
        /// Its log-probabilities, if requested.
        logprobs: Option<TokenLogprobs>,
    },
    /// One choice is complete.
    Finished {
        /// The choice.
        choice: u32,
        /// Why.
        reason: FinishReason,
        /// Prompt tokens found in the KV cache when it began (prefix caching).
        cached: u32,
    },
    /// The request failed as a whole.
    Failed(EngineError),
    /// Something happened to a request that is traced.
    Note(RequestNote),
}

impl EngineEvent {
    /// Returns how many choices are unfinished after this event, given how many were before it.
    #[must_use]
    pub fn left_after(&self, left: usize) -> usize {
        match self {
            Self::Failed(_) => 0,
            Self::Finished { .. } => left.saturating_sub(1),
            Self::Token { .. } | Self::PromptLogprobs(_) | Self::Embedding(_) | Self::Note(_) => {
                left
            }
        }
    }
}

/// Why a choice ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum FinishReason {
    /// An end token was accepted.
    EndToken(u32),
    /// A stop string was completed.
    StopString,
    /// `max_tokens` or the model's length was reached.
    Length,
    /// Structured output is complete: no token may follow.
    Complete,
}

/// Why the engine rejected or gave up on a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum EngineError {
    /// The bounded queue is full.
    #[error(
        "the queue is full: {queued} requests, choices or tokens of their prompts are waiting, the \
         limit is {max}"
    )]
    QueueFull {
        /// Number of requests waiting now, or of their choices or prompt tokens.
        queued: u32,
        /// The bound.
        max: u32,
        /// When to try again, in seconds.
        retry_after_s: u32,
    },
    /// The request can never fit into the KV cache.
    #[error(
        "prompt and max_tokens need {needed} blocks of the KV cache, which has {available}: ask for fewer tokens, or serve with more --kv-cache-memory"
    )]
    TooLarge {
        /// Blocks needed for prompt and output.
        needed: u32,
        /// Blocks that exist.
        available: u32,
    },
    /// No replica can serve the request, and none came back in time.
    #[error("no replica is ready: {message}")]
    Unavailable {
        /// What is being waited for.
        message: String,
    },
    /// Its LoRA adapter is not served.
    #[error("The model `{name}` does not exist")]
    NoAdapter {
        /// The adapter's name.
        name: String,
    },
    /// The model produced values that are not finite.
    #[error("the model produced invalid numbers for this request")]
    Corrupted,
    /// The structured output cannot be continued.
    #[error("the structured output cannot go on: {message}")]
    Guide {
        /// Why.
        message: String,
    },
    /// Replicas repeatedly failed while computing this request and nothing else.
    #[error("the engine stopped {epochs} times while computing this request, which is given up")]
    Quarantined {
        /// Number of epochs that failed.
        epochs: u32,
    },
    /// The coordinator is shutting down.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// The server is overloaded: the request was accepted but waited too long.
    #[error("the server is overloaded: {message}")]
    Overloaded {
        /// What it waited for.
        message: String,
        /// When to try again, in seconds.
        retry_after_s: u32,
    },
    /// Internal error of the server, possibly unrelated to the request.
    #[error("the server failed: {message}")]
    Broke {
        /// What failed.
        message: String,
    },
}

/// The reason under which a refusal is counted.
impl From<&EngineError> for RejectReason {
    fn from(error: &EngineError) -> Self {
        match error {
            EngineError::QueueFull { .. } => Self::QueueFull,
            EngineError::TooLarge { .. } => Self::TooLarge,
            EngineError::Unavailable { .. }
            | EngineError::Corrupted
            | EngineError::Quarantined { .. }
            | EngineError::Broke { .. } => Self::Unavailable,
            EngineError::Overloaded { .. } => Self::Overloaded,
            EngineError::Guide { .. } | EngineError::NoAdapter { .. } => Self::Invalid,
            EngineError::ShuttingDown => Self::ShuttingDown,
        }
    }
}

/// All messages from a front end to the coordinator after the handshake.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum FromFrontend {
    /// Run a request.
    Submit(Box<SubmitRequest>),
    /// The client is gone: cancel its request.
    Cancel(RequestId),
    /// Cumulative stats, on a timer.
    Stats(WorkerStats),
    /// An operator's command about an adapter, with a number for the answer.
    ChangeAdapter(u64, AdapterCommand),
    /// The front end is leaving on purpose.
    Goodbye {
        /// Why, for the coordinator's log.
        reason: String,
    },
}

/// All messages from the coordinator to a front end after the handshake.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToFrontend {
    /// Events of requests, in order.
    Events(Vec<(RequestId, EngineEvent)>),
    /// Whether requests can be served; sent whenever that changes.
    Readiness {
        /// Requests can be served.
        ready: bool,
        /// What is being waited for, if not ready.
        message: String,
    },
    /// The adapters that are served, whenever that changes.
    Adapters(Vec<Adapter>),
    /// The outcome of a command about an adapter.
    AdapterChanged(u64, Result<(), AdapterError>),
}

impl RemoteMessage for FromFrontend {
    fn kind(&self) -> FrameKind {
        match self {
            Self::Submit(_) => FrameKind::Request,
            Self::Cancel(_) | Self::Stats(_) | Self::ChangeAdapter(..) | Self::Goodbye { .. } => {
                FrameKind::Control
            }
        }
    }
}

impl RemoteMessage for ToFrontend {
    fn kind(&self) -> FrameKind {
        match self {
            Self::Events(_) => FrameKind::Events,
            Self::Readiness { .. } | Self::Adapters(_) | Self::AdapterChanged(..) => {
                FrameKind::Control
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::Lora;

    #[test]
    fn a_model_has_some_names_each_once() {
        let names = |list: &[&str]| list.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>();
        assert_eq!(check_model_names(&names(&["a", "org/b"])), Ok(()));
        let long = "x".repeat(MODEL_NAME_MAX + 1);
        for (list, what) in [
            (names(&[]), "0 names"),
            (names(&["a", "b", "a"]), "a is given twice"),
            (names(&["a", ""]), "a name has 0 bytes"),
            (names(&[&long]), "a name has 1025 bytes"),
            (names(&["a\n"]), "control characters"),
            ((0..17).map(|n| n.to_string()).collect(), "17 names"),
        ] {
            let error = check_model_names(&list).unwrap_err();
            assert!(error.contains(what), "{error}");
        }
    }

    #[test]
    fn the_same_is_served_wherever_its_folder_lies() {
        let serving = Serving {
            model: "/models/m".into(),
            served_model_name: "m".into(),
            model_aliases: Vec::new(),
            adapters: Vec::new(),
            max_model_len: 64,
            text_fingerprint: 7,
            priorities: false,
        };
        assert!(serving.is_same(&Serving { model: "/data/m".into(), ..serving.clone() }));
        let hub = |commit: &str| format!("hf://o/m@{}", commit.repeat(40));
        let of_hub = Serving { model: hub("a"), ..serving.clone() };
        assert!(of_hub.is_same(&of_hub) && of_hub.is_same(&serving));
        assert!(!of_hub.is_same(&Serving { model: hub("b"), ..serving.clone() }));
        let others = [
            Serving { served_model_name: "n".into(), ..serving.clone() },
            Serving { model_aliases: vec!["n".into()], ..serving.clone() },
            Serving { max_model_len: 65, ..serving.clone() },
            Serving { text_fingerprint: 8, ..serving.clone() },
        ];
        let adapters = Lora::fixed([("a".into(), "/a".into())], 16).adapters;
        assert!(serving.is_same(&Serving { adapters, ..serving.clone() }), "they come and go");
        let difference = |other: &Serving| serving.difference(other).unwrap_or_default();
        let said: Vec<String> = others.iter().map(difference).collect();
        let expected = [
            "called n, not m",
            "further names are n, not none",
            "65 tokens, not 64",
            "called m too, but its files or options differ: config.json",
        ];
        for (said, expected) in said.iter().zip(expected) {
            assert!(said.contains(expected), "{said}");
        }
        let other = hub("b");
        let said = of_hub.difference(&Serving { model: other.clone(), ..serving.clone() });
        assert_eq!(said, Some(format!("it is {other}, not {}", of_hub.model)));
    }
}
