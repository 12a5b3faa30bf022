//! What an operator may choose of the HTTP API, at the coordinator and at front ends alike.
use std::path::PathBuf;

use super::keys::ApiKeys;
use super::tls::Tls;
use crate::text::reply::{CallFormat, Reasoning};

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct ApiOptions {
    /// Who is let in.
    pub keys: ApiKeys,
    /// The chat template, instead of the model's own.
    pub chat_template: Option<PathBuf>,
    /// Most bytes of a request's body; enough for one full prompt when absent.
    pub max_body_bytes: Option<u64>,
    /// Most alternatives that a request may ask for.
    pub max_logprobs: u32,
    /// Web pages whose scripts may use the API; `*` is all.
    pub allowed_origins: Vec<String>,
    /// Whether each request is logged.
    pub access_log: bool,
    /// How the model writes calls of tools, where its chat template does not say it.
    pub tool_calls: Option<CallFormat>,
    /// How the model's reasoning is told from its answer, where that is not as its calls tell.
    pub reasoning: Option<Reasoning>,
    /// How HTTPS is served, where it is instead of HTTP.
    pub tls: Option<Tls>,
    /// Whether what is cached of prompts is shared among API keys.
    pub share_prefix_cache: bool,
    /// How many connections one address may have.
    pub connections: ConnectionBound,
}

/// How many connections one address may have at a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ConnectionBound {
    /// [`CONNECTIONS_PER_ADDRESS`] of an address of the internet; of one of a private network,
    /// which may be a proxy that stands for many clients, any number.
    #[default]
    OfInternet,
    /// So many of each, private or not; 0 for any number.
    Of(u32),
}

/// Connections of one address of the internet: what many people behind one router have open.
pub const CONNECTIONS_PER_ADDRESS: u32 = 256;

/// As at vLLM.
pub const MAX_LOGPROBS: u32 = 20;

impl Default for ApiOptions {
    fn default() -> Self {
        Self {
            keys: ApiKeys::default(),
            chat_template: None,
            max_body_bytes: None,
            max_logprobs: MAX_LOGPROBS,
            allowed_origins: Vec::new(),
            access_log: false,
            tool_calls: None,
            reasoning: None,
            tls: None,
            share_prefix_cache: false,
            connections: ConnectionBound::default(),
        }
    }
}

/// How calls are written and how reasoning is told from the answer, by what the operator chose and
/// what the chat template tells of calls. In harmony the one is the other.
#[must_use]
pub fn forms(options: &ApiOptions, told: Option<CallFormat>) -> (Option<CallFormat>, Reasoning) {
    let harmony = Some(CallFormat::Harmony);
    let calls = options.tool_calls.or(told);
    match options.reasoning {
        Some(Reasoning::Harmony) => (harmony, Reasoning::Harmony),
        None if calls == harmony => (calls, Reasoning::Harmony),
        // The operator knows of another form, whatever the template looks like.
        reasoning => (calls.filter(|it| Some(*it) != harmony), reasoning.unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn harmony_is_both_or_neither() {
        use CallFormat::{Harmony, Hermes};
        for (chosen, reasoning, told, expected) in [
            (None, None, None, (None, Reasoning::Untold)),
            (None, None, Some(Hermes), (Some(Hermes), Reasoning::Untold)),
            (None, Some(Reasoning::Marked), Some(Hermes), (Some(Hermes), Reasoning::Marked)),
            (None, None, Some(Harmony), (Some(Harmony), Reasoning::Harmony)),
            (Some(Harmony), None, None, (Some(Harmony), Reasoning::Harmony)),
            (None, Some(Reasoning::Harmony), Some(Hermes), (Some(Harmony), Reasoning::Harmony)),
            (None, Some(Reasoning::First), Some(Harmony), (None, Reasoning::First)),
            (Some(Hermes), None, Some(Harmony), (Some(Hermes), Reasoning::Untold)),
        ] {
            let options = ApiOptions { tool_calls: chosen, reasoning, ..ApiOptions::default() };
            assert_eq!(forms(&options, told), expected, "{chosen:?} {reasoning:?} {told:?}");
        }
    }
}
