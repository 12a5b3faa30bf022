//! The scheduler's bounds.
use super::{Speculation, weight};

/// Bounds of one replica's scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Tokens per KV block.
    pub block_size: u32,
    /// Longest sequence (prompt and output together), in tokens.
    pub max_model_len: u32,
    /// Maximum number of sequences in one step, and of sequences admitted at a time.
    pub max_num_seqs: u32,
    /// Maximum number of tokens computed in one step.
    pub max_num_batched_tokens: u32,
    /// Maximum number of prompt tokens computed in one step while a sequence decodes; absent: see
    /// [`Scheduler::limit_steps`](super::Scheduler::limit_steps).
    pub max_mixed_prefill_tokens: Option<u32>,
    /// Maximum number of requests waiting for their first step; the bounds on choices and prompts
    /// follow from it.
    pub max_queued_requests: u32,
    /// Maximum number of steps sent and not yet answered: 2 keeps the workers one step ahead.
    pub max_steps_in_flight: u32,
    /// Whether a sequence reuses the KV blocks that the cache still has of its prefix.
    pub prefix_caching: bool,
    /// Number of states of linear attention that are kept for that, if the model has some: a prefix
    /// is only reused up to where one is kept.
    pub prefix_states: Option<u32>,
    /// Length of an embedding: the model's hidden size, or 0 if unknown. For a model that sorts
    /// texts into classes, their number.
    pub hidden_size: u32,
    /// Ids of tokens are below this.
    pub vocab_size: u32,
    /// Whether sequences draft tokens, and how.
    pub speculation: Option<Speculation>,
}

/// Conflicting bounds.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(pub(super) String);

impl SchedulerConfig {
    /// Checks the bounds against each other.
    ///
    /// # Errors
    /// One sentence naming the values in conflict.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let positive = [
            ("block_size", self.block_size),
            ("max_model_len", self.max_model_len),
            ("max_num_seqs", self.max_num_seqs),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
            ("max_mixed_prefill_tokens", self.max_mixed_prefill_tokens.unwrap_or(1)),
            ("max_queued_requests", self.max_queued_requests),
            ("max_steps_in_flight", self.max_steps_in_flight),
        ];
        if let Some((name, _)) = positive.iter().find(|(_, value)| *value == 0) {
            return Err(ConfigError(format!("{name} is 0, it must be at least 1")));
        }
        if self.max_num_batched_tokens < self.max_num_seqs {
            return Err(ConfigError(format!(
                "max_num_batched_tokens ({}) is below max_num_seqs ({}): a step could not give \
                 every sequence a token",
                self.max_num_batched_tokens, self.max_num_seqs
            )));
        }
        if let Some(speculation) = &self.speculation {
            speculation.validate(self.max_num_seqs)?;
        }
        weight::check(self)
    }

    /// Number of blocks that hold `tokens` tokens.
    #[must_use]
    pub fn blocks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.block_size)
    }
}
