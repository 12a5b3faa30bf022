//! What the scheduler decides, for its shell to carry out and its observer to count.
use shared::ids::{RequestId, SeqId};
use shared::protocol::TokenLogprobs;

use crate::engine::{EngineError, FinishReason};

/// Something that happened; reported in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// A request is in a step for the first time.
    FirstScheduled {
        /// The request.
        request: RequestId,
    },
    /// A request that was preempted as a whole is in a step again.
    Resumed {
        /// The request.
        request: RequestId,
    },
    /// All log-probabilities of the prompt are complete.
    PromptLogprobs {
        /// The request.
        request: RequestId,
        /// One for each prompt token but the first.
        logprobs: Vec<TokenLogprobs>,
    },
    /// The prompt's embedding is complete.
    Embedding {
        /// The request.
        request: RequestId,
        /// As many numbers as the model's hidden size.
        embedding: Vec<f32>,
    },
    /// A token was accepted.
    Token {
        /// The request.
        request: RequestId,
        /// The choice.
        choice: u32,
        /// The token.
        token: u32,
        /// Its log-probabilities, when asked for.
        logprobs: Option<TokenLogprobs>,
    },
    /// A choice is complete.
    Finished {
        /// The request.
        request: RequestId,
        /// The sequence it was.
        seq: SeqId,
        /// The choice.
        choice: u32,
        /// Why.
        reason: FinishReason,
        /// Prompt tokens that the KV cache had when it started.
        cached: u32,
        /// Whether it was the request's last.
        last: bool,
    },
    /// A request ended without finishing.
    Dropped {
        /// The request.
        request: RequestId,
        /// Its unfinished sequences.
        seqs: Vec<SeqId>,
        /// Why; `None` when the client went away.
        error: Option<EngineError>,
    },
    /// A sequence gave up its blocks and waits again.
    Preempted {
        /// The request.
        request: RequestId,
        /// Where the request is now.
        place: RequestPlace,
        /// Number of blocks copied to host memory; `None` if the sequence is recomputed.
        swapped: Option<u32>,
        /// Tokens whose K and V were computed and are lost.
        tokens: u32,
    },
    /// A sequence comes back from host memory.
    SwappedIn {
        /// The request.
        request: RequestId,
        /// Number of blocks copied; the KV cache had the others.
        blocks: u32,
    },
    /// A sequence ended, and with it its request left the batch or host memory.
    Rests {
        /// The request.
        request: RequestId,
        /// Where it is now.
        place: RequestPlace,
    },
    /// Drafts were verified; reported before the tokens that come of it.
    Drafted {
        /// The request.
        request: RequestId,
        /// Tokens drafted, at least 1.
        tokens: u32,
        /// How many of them were accepted; always the first ones.
        accepted: u32,
        /// Tokens that the sequence gained: one more than accepted, unless it ended.
        emitted: u32,
    },
    /// A step was answered.
    StepDone(StepSummary),
}

impl Effect {
    /// Whether this is a token of that choice.
    #[must_use]
    pub fn is_token_of(&self, of: RequestId, which: u32) -> bool {
        matches!(self, Self::Token { request, choice, .. } if (*request, *choice) == (of, which))
    }
}

/// Where a request is: the place of its most advanced sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestPlace {
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
    /// Prompt tokens that the KV cache had, so that they are not computed.
    pub cached: u32,
    /// Prompt tokens looked up in the KV cache for sequences in a step for the first time.
    pub looked_up: u32,
    /// How many of those the KV cache had.
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
