//! The operator's options of the HTTP API, the same at the coordinator and at front ends.
use super::keys::ApiKeys;
use super::root_path::RootPath;
use super::tls::Tls;
use crate::text::model::TextOptions;
use crate::text::reply::{CallFormat, Reasoning};
use crate::traces::Traces;

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct ApiOptions {
    /// Keys that are admitted.
    pub keys: ApiKeys,
    /// What is chosen about templates and sampling, and about telling of the tokenizer.
    pub text: TextOptions,
    /// Whether streams report usage although their requests do not ask for it.
    pub reports_usage: bool,
    /// Whether log-probabilities tell tokens by their ids, unless their requests say otherwise.
    pub tokens_by_id: bool,
    /// Maximum bytes of a request body; absent: enough for one full prompt.
    pub max_body_bytes: Option<u64>,
    /// Maximum number of alternatives that a request may ask for.
    pub max_logprobs: u32,
    /// Web origins whose scripts may use the API; `*` for all.
    pub allowed_origins: Vec<String>,
    /// Whether each request is logged.
    pub access_log: bool,
    /// Traces requests, if traces are exported.
    pub traces: Option<Traces>,
    /// Format of the model's tool calls, if its chat template does not tell.
    pub tool_calls: Option<CallFormat>,
    /// How reasoning is told apart from the answer, if the call format does not imply it.
    pub reasoning: Option<Reasoning>,
    /// TLS, if HTTPS is served instead of HTTP.
    pub tls: Option<Tls>,
    /// The path under which a proxy shows the API.
    pub root_path: RootPath,
    /// Whether API keys share cached prompts.
    pub share_prefix_cache: bool,
    /// How many connections one address may have.
    pub connections: ConnectionBound,
    /// Whether all who may use the API may load and unload LoRA adapters.
    pub runtime_adapters: bool,
}

/// How many connections one address may have at a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ConnectionBound {
    /// [`CONNECTIONS_PER_ADDRESS`] for an internet address; any number for a private one, which may
    /// be a proxy for many clients.
    #[default]
    OfInternet,
    /// This number for each address, private or not; 0 for any number.
    Of(u32),
}

/// Connections per internet address; enough for all users behind one router.
pub const CONNECTIONS_PER_ADDRESS: u32 = 256;

/// As in vLLM.
pub const MAX_LOGPROBS: u32 = 20;

impl Default for ApiOptions {
    fn default() -> Self {
        Self {
            keys: ApiKeys::default(),
            text: TextOptions::default(),
            reports_usage: false,
            tokens_by_id: false,
            max_body_bytes: None,
            max_logprobs: MAX_LOGPROBS,
            allowed_origins: Vec::new(),
            access_log: false,
            traces: None,
            tool_calls: None,
            reasoning: None,
            tls: None,
            root_path: RootPath::default(),
            share_prefix_cache: false,
            connections: ConnectionBound::default(),
            runtime_adapters: false,
        }
    }
}

/// Returns the format of tool calls and of reasoning, from the operator's choice and what the chat
/// template reveals about calls. In harmony, one implies the other.
#[must_use]
pub fn forms(options: &ApiOptions, told: Option<CallFormat>) -> (Option<CallFormat>, Reasoning) {
    let harmony = Some(CallFormat::Harmony);
    let calls = options.tool_calls.or(told);
    match options.reasoning {
        Some(Reasoning::Harmony) => (harmony, Reasoning::Harmony),
        None if calls == harmony => (calls, Reasoning::Harmony),
        // The operator knows of another format, whatever the template looks like.
        reasoning => (calls.filter(|it| Some(*it) != harmony), reasoning.unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::reply::ThinkMarks;

    #[test]
    fn harmony_is_both_or_neither() {
        use CallFormat::{Harmony, Hermes};
        let marked = Reasoning::Marked(ThinkMarks::THINK);
        for (chosen, reasoning, told, expected) in [
            (None, None, None, (None, Reasoning::Untold)),
            (None, None, Some(Hermes), (Some(Hermes), Reasoning::Untold)),
            (None, Some(marked), Some(Hermes), (Some(Hermes), marked)),
            (None, None, Some(Harmony), (Some(Harmony), Reasoning::Harmony)),
            (Some(Harmony), None, None, (Some(Harmony), Reasoning::Harmony)),
            (None, Some(Reasoning::Harmony), Some(Hermes), (Some(Harmony), Reasoning::Harmony)),
            (None, Some(marked), Some(Harmony), (None, marked)),
            (Some(Hermes), None, Some(Harmony), (Some(Hermes), Reasoning::Untold)),
        ] {
            let options = ApiOptions { tool_calls: chosen, reasoning, ..ApiOptions::default() };
            assert_eq!(forms(&options, told), expected, "{chosen:?} {reasoning:?} {told:?}");
        }
    }
}
