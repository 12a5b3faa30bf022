//! What the scheduler decides, for its shell to carry out and its observer to count.
use shared::ids::{RequestId, SeqId};
use shared::protocol::TokenLogprobs;

use crate::engine::{EngineError, FinishReason};

/// Something that happened. In order.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// A request is in a step for the first time.
    FirstScheduled {
        /// Which.
        request: RequestId,
    },
    /// A request that was preempted as a whole is in a step again.
    Resumed {
        /// Which.
        request: RequestId,
    },
    /// All prompt tokens' log-probabilities are there.
    PromptLogprobs {
        /// Of which request.
        request: RequestId,
        /// One for each prompt token but the first.
        logprobs: Vec<TokenLogprobs>,
    },
    /// The prompt's embedding is there.
    Embedding {
        /// Of which request.
        request: RequestId,
        /// As many numbers as the model's hidden size.
        embedding: Vec<f32>,
    },
    /// A token was accepted.
    Token {
        /// Of which request.
        request: RequestId,
        /// Of which choice.
        choice: u32,
        /// The token.
        token: u32,
        /// Its log-probabilities, when asked for.
        logprobs: Option<TokenLogprobs>,
    },
    /// A choice is complete.
    Finished {
        /// Of which request.
        request: RequestId,
        /// Which sequence it was.
        seq: SeqId,
        /// Which choice.
        choice: u32,
        /// Why.
        reason: FinishReason,
        /// Prompt tokens that the KV cache had when it began.
        cached: u32,
        /// It was the request's last.
        last: bool,
    },
    /// A request ended without finishing.
    Dropped {
        /// Which.
        request: RequestId,
        /// Its sequences that were unfinished.
        seqs: Vec<SeqId>,
        /// Why; `None` when the client went away.
        error: Option<EngineError>,
    },
    /// A sequence gave up its blocks and waits again.
    Preempted {
        /// Of which request.
        request: RequestId,
        /// Where the request is now.
        place: Place,
        /// Blocks that are copied to host memory; none of one that is computed again.
        swapped: Option<u32>,
        /// Tokens whose K and V were computed and are lost.
        tokens: u32,
    },
    /// A sequence comes back from host memory.
    SwappedIn {
        /// Of which request.
        request: RequestId,
        /// Blocks that are copied; the KV cache had the others.
        blocks: u32,
    },
    /// A sequence ended, and those that are left of its request are not in the batch.
    Rests {
        /// Which request.
        request: RequestId,
        /// Where it is now.
        place: Place,
    },
    /// Drafts were verified.
    Drafted {
        /// Tokens drafted, at least 1.
        tokens: u32,
        /// Of them those that the sequence got: the first so many.
        accepted: u32,
        /// Tokens that the sequence got by it: one more, unless it ended.
        emitted: u32,
    },
    /// A step was answered.
    StepDone(StepSummary),
}

impl Effect {
    /// Whether it is a token of this choice.
    #[must_use]
    pub fn is_token_of(&self, of: RequestId, which: u32) -> bool {
        matches!(self, Self::Token { request, choice, .. } if (*request, *choice) == (of, which))
    }
}

/// Where a request is: where the foremost of its sequences is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the queue.
    Waiting,
    /// In host memory.
    Swapped,
    /// In the batch.
    Running,
}

/// What one step did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepSummary {
    /// Prompt tokens computed for the first time.
    pub prompt: u32,
    /// Prompt tokens that need not be computed at all: the KV cache had them.
    pub cached: u32,
    /// Prompt tokens looked up in the KV cache for sequences that were in a step for the first
    /// time, and how many of them it had.
    pub looked_up: u32,
    /// See `looked_up`.
    pub found: u32,
    /// Tokens accepted.
    pub generated: u32,
    /// Tokens whose K and V had been computed before and lost.
    pub recomputed: u32,
    /// Tokens sampled and not accepted: their sequence had ended, or was preempted.
    pub wasted: u32,
    /// Sequences in the step.
    pub sequences: u32,
}
