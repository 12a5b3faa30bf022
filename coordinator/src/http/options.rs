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
    /// How the model's reasoning is told from its answer.
    pub reasoning: Reasoning,
    /// How HTTPS is served, where it is instead of HTTP.
    pub tls: Option<Tls>,
}

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
            reasoning: Reasoning::default(),
            tls: None,
        }
    }
}
