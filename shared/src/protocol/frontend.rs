//! Messages between the coordinator and a front end of its own process.
//!
//! A front end dials, sends [`FrontendHello`], gets [`FrontendWelcome`]; then requests go one way
//! ([`FromFrontend`]), what happens to them the other ([`ToFrontend`]), many events in one frame.
//! Text stays with the front end; the engine gets stop strings because the accepted-token log ends
//! where the first is complete.
use std::fmt;

use serde::{Deserialize, Serialize};

use super::control::WorkerStats;
use super::guide::GuideSpec;
use super::lora::Adapter;
use super::step::TokenLogprobs;
use crate::actor::peer::RemoteMessage;
use crate::ids::{Incarnation, RequestId};
use crate::metrics::labels::RejectReason;
use crate::sampling::SamplingParams;
use crate::wire::frame::FrameKind;

/// One front end process slot, as the coordinator numbers them; survives the process's restart.
/// Slot 0 is the coordinator's own front end.
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
    /// The node's name, unique among front ends; one that restarts under the same name takes its
    /// old slot again.
    pub node: String,
    /// This process run.
    pub incarnation: Incarnation,
    /// The process id, for the operator.
    pub pid: u32,
    /// The program's version; informational.
    pub version: String,
    /// The slot it had at its last coordinator: a hint, so that a new one may give it the same.
    pub slot: Option<FrontendId>,
}

/// The coordinator's answer to [`FrontendHello`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FrontendWelcome {
    /// The slot this front end has in the cluster.
    pub frontend: FrontendId,
    /// Interval of its stats reports, in milliseconds.
    pub stats_interval_ms: u64,
    /// What is served.
    pub serving: Serving,
}

/// Most names of one model in the API, and bytes of each.
pub const MODEL_NAMES_MAX: usize = 16;
/// See [`MODEL_NAMES_MAX`].
pub const MODEL_NAME_MAX: usize = 1024;

/// Checks the names that a model is to have in the API.
///
/// # Errors
/// Which bound is broken, in one sentence.
pub fn check_model_names(names: &[String]) -> Result<(), String> {
    let count = names.len();
    if !(1..=MODEL_NAMES_MAX).contains(&count) {
        return Err(format!("{count} names, it must be 1 to {MODEL_NAMES_MAX}"));
    }
    for (index, name) in names.iter().enumerate() {
        if !(1..=MODEL_NAME_MAX).contains(&name.len()) || name.chars().any(char::is_control) {
            let len = name.len();
            return Err(format!(
                "a name of {len} bytes: it must have 1 to {MODEL_NAME_MAX}, and no control \
                 characters"
            ));
        }
        if names[..index].contains(name) {
            return Err(format!("the name {name} is given twice"));
        }
    }
    Ok(())
}

/// What a front end must know of the model to take requests for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Serving {
    /// The model folder, as a path on the coordinator's host.
    pub model: String,
    /// The model's name in the API.
    pub served_model_name: String,
    /// Its other names there.
    pub model_aliases: Vec<String>,
    /// The adapters beside it.
    pub adapters: Vec<Adapter>,
    /// Longest sequence, in tokens.
    pub max_model_len: u32,
    /// Of the files that turn text into tokens and back: both sides must have the same.
    pub text_fingerprint: u64,
    /// Whether requests have priorities.
    pub priorities: bool,
}

impl Serving {
    /// Whether requests for one are requests for the other: where the folder lies on a coordinator's
    /// host does not matter.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        let of = |it: &Self| (it.max_model_len, it.text_fingerprint);
        let names = |(a, b): (&Adapter, &Adapter)| a.name == b.name;
        self.served_model_name == other.served_model_name
            && self.model_aliases == other.model_aliases
            && of(self) == of(other)
            && self.adapters.len() == other.adapters.len()
            && self.adapters.iter().zip(&other.adapters).all(names)
    }
}

/// A request on its way to the engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SubmitRequest {
    /// The front end's number for it, below 2^40 and used once per link.
    pub id: RequestId,
    /// The prompt.
    pub prompt: Vec<u32>,
    /// Of the first choice; the others differ in their index alone.
    pub sampling: SamplingParams,
    /// Number of choices.
    pub n: u32,
    /// Stop strings.
    pub stops: Vec<String>,
    /// They are looked for in text with its special tokens.
    pub keep_special: bool,
    /// The text of each choice goes on from the prompt's: a space that its first token begins with is
    /// part of it, whatever the tokenizer does at the beginning of a text.
    pub goes_on: bool,
    /// Most tokens per choice.
    pub max_tokens: u32,
    /// The client named no bound: fewer will do where the KV cache has no room for as many.
    pub open_ended: bool,
    /// What the output of each choice must be, as a whole.
    pub guide: Option<GuideSpec>,
    /// Lower is earlier.
    pub priority: i32,
    /// Requests of another salt do not share what is cached of their prompts.
    pub cache_salt: u64,
    /// The adapter that it is computed with; 0 for none.
    pub adapter: u32,
    /// Tokens that end a sequence.
    pub end_tokens: Vec<u32>,
    /// Microseconds since the front end received it: clocks of two processes are never compared.
    pub waited_us: u64,
    /// The id of the client's response.
    pub response_id: String,
}

/// What happens to a request, in order. A request ends with `Finished` for each choice, or with one
/// `Failed`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum EngineEvent {
    /// Log-probabilities of the prompt tokens 1.., complete before the first token; a long prompt's
    /// come in several pieces, in order.
    PromptLogprobs(Vec<TokenLogprobs>),
    /// The prompt's embedding, complete, as the model gives it: of no particular length.
    Embedding(Vec<f32>),
    /// One accepted token.
    Token {
        /// The choice it belongs to.
        choice: u32,
        /// The token.
        token: u32,
        /// Its log-probabilities, when asked for.
        logprobs: Option<TokenLogprobs>,
    },
    /// One choice is complete.
    Finished {
        /// The choice.
        choice: u32,
        /// Why.
        reason: FinishReason,
        /// Prompt tokens that the KV cache had when it began.
        cached: u32,
    },
    /// The request failed as a whole.
    Failed(EngineError),
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
    /// The text is complete by what it must be: nothing can come behind it.
    Complete,
}

/// Why the engine refused or gave up a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum EngineError {
    /// The bounded queue is full.
    #[error(
        "the queue is full: {queued} requests, choices or tokens of their prompts are waiting, the \
         bound is {max}"
    )]
    QueueFull {
        /// Requests waiting now, or of requests that wait the choices, or the tokens of their prompts.
        queued: u32,
        /// The bound.
        max: u32,
        /// When to try again, in seconds.
        retry_after_s: u32,
    },
    /// The request can never fit.
    #[error(
        "prompt and max_tokens need {needed} blocks of the KV cache, which has {available}: ask for fewer tokens, or serve with more --kv-cache-memory"
    )]
    TooLarge {
        /// Blocks for prompt and output.
        needed: u32,
        /// Blocks there are.
        available: u32,
    },
    /// No replica can serve, and none came back in time.
    #[error("no replica is ready: {message}")]
    Unavailable {
        /// What is being waited for.
        message: String,
    },
    /// The model produced values that are not finite.
    #[error("the model produced invalid numbers for this request")]
    Corrupted,
    /// What the output must be cannot be followed any further.
    #[error("the structured output cannot go on: {message}")]
    Guide {
        /// Why.
        message: String,
    },
    /// Replicas keep ending while they compute this request and nothing else.
    #[error("{epochs} times the engine stopped while it computed this request; it is given up")]
    Quarantined {
        /// How often.
        epochs: u32,
    },
    /// The coordinator is shutting down.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// The server is behind: the request was taken and waited for too long.
    #[error("the server is overloaded: {message}")]
    Overloaded {
        /// For what.
        message: String,
        /// When to try again, in seconds.
        retry_after_s: u32,
    },
    /// The server's own fault: a defect, which the request may have nothing to do with.
    #[error("the server failed: {message}")]
    Broke {
        /// At what.
        message: String,
    },
}

/// As which reason a refusal is counted.
impl From<&EngineError> for RejectReason {
    fn from(error: &EngineError) -> Self {
        match error {
            EngineError::QueueFull { .. } => Self::QueueFull,
            EngineError::TooLarge { .. } => Self::TooLarge,
            EngineError::Unavailable { .. }
            | EngineError::Corrupted
            | EngineError::Quarantined { .. }
            | EngineError::Overloaded { .. }
            | EngineError::Broke { .. } => Self::Unavailable,
            EngineError::Guide { .. } => Self::Invalid,
            EngineError::ShuttingDown => Self::ShuttingDown,
        }
    }
}

/// Everything a front end says to the coordinator after the handshake.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum FromFrontend {
    /// Run a request.
    Submit(Box<SubmitRequest>),
    /// The client is gone.
    Cancel(RequestId),
    /// Cumulative stats, on a timer.
    Stats(WorkerStats),
    /// The front end leaves on purpose.
    Goodbye {
        /// Why, for the coordinator's log.
        reason: String,
    },
}

/// Everything the coordinator says to a front end after the handshake.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToFrontend {
    /// What happened, in order.
    Events(Vec<(RequestId, EngineEvent)>),
    /// Whether requests can be served, whenever that changes.
    Readiness {
        /// They can.
        ready: bool,
        /// What is being waited for, when not.
        message: String,
    },
}

impl RemoteMessage for FromFrontend {
    fn kind(&self) -> FrameKind {
        match self {
            Self::Submit(_) => FrameKind::Request,
            Self::Cancel(_) | Self::Stats(_) | Self::Goodbye { .. } => FrameKind::Control,
        }
    }
}

impl RemoteMessage for ToFrontend {
    fn kind(&self) -> FrameKind {
        match self {
            Self::Events(_) => FrameKind::Events,
            Self::Readiness { .. } => FrameKind::Control,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_has_some_names_each_once() {
        let names = |list: &[&str]| list.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>();
        assert_eq!(check_model_names(&names(&["a", "org/b"])), Ok(()));
        let long = "x".repeat(MODEL_NAME_MAX + 1);
        for (list, what) in [
            (names(&[]), "0 names"),
            (names(&["a", "b", "a"]), "a is given twice"),
            (names(&["a", ""]), "a name of 0 bytes"),
            (names(&[&long]), "a name of 1025 bytes"),
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
        let others = [
            Serving { served_model_name: "n".into(), ..serving.clone() },
            Serving { model_aliases: vec!["n".into()], ..serving.clone() },
            Serving { max_model_len: 65, ..serving.clone() },
            Serving { text_fingerprint: 8, ..serving.clone() },
            Serving {
                adapters: vec![Adapter { name: "a".into(), path: "/a".into() }],
                ..serving.clone()
            },
        ];
        assert!(others.iter().all(|other| !serving.is_same(other)));
    }
}
