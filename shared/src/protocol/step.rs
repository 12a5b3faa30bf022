//! Messages of the data plane: one plan and its result per engine step.
use serde::{Deserialize, Serialize};

use super::control::WorkerStats;
use super::mask::TokenMask;
use crate::ids::{BlockId, Epoch, HostBlockId, SeqId, StateId, StepId};
use crate::sampling::SamplingParams;

/// What every rank of a replica computes in one step. Encoded once; every rank gets the same bytes.
///
/// A worker applies it in this order: forget `finished`, copy `swap_out`, copy `swap_in`, add
/// `admitted`, copy `begin_with`, run `sequences` as one batch, then copy `keep`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepPlan {
    /// The epoch the plan belongs to.
    pub epoch: Epoch,
    /// The step's id, 1 higher than the previous plan's.
    pub step: StepId,
    /// Sequences that will not be run again (finished, cancelled or preempted): forget them. Their
    /// blocks may already belong to another sequence of this same plan.
    pub finished: Vec<SeqId>,
    /// Sequences that move from the KV cache to host memory with all of their blocks, in the order
    /// of their block tables. They are remembered. Their blocks may already belong to another
    /// sequence of this same plan.
    pub swap_out: Vec<Swap>,
    /// Sequences that move back, each one also in `sequences`, which gives its whole new block
    /// table. The first blocks of that table may already hold the right contents: the pairs cover
    /// the rest. All of its host blocks are free afterwards.
    pub swap_in: Vec<Swap>,
    /// Sequences run for the first time (or again after preemption), in full.
    pub admitted: Vec<NewSequence>,
    /// Of `admitted`, those that begin with a kept state of linear attention: that after the tokens
    /// before their share in `sequences`.
    pub begin_with: Vec<KeptState>,
    /// The batch; each sequence occurs at most once.
    pub sequences: Vec<SequenceStep>,
    /// Of `sequences`, those whose state of linear attention after their share is to be kept, in
    /// places that differ.
    pub keep: Vec<KeptState>,
}

/// A sequence's state of linear attention, and the place where such a state is kept for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptState {
    /// The sequence.
    pub seq: SeqId,
    /// The place, below [`EngineConfig::prefix_states`](super::EngineConfig::prefix_states).
    pub place: StateId,
}

/// A sequence that workers have not seen, or have forgotten.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NewSequence {
    /// The sequence.
    pub seq: SeqId,
    /// Prompt and, after a preemption or failover, the tokens accepted so far.
    pub tokens: Vec<u32>,
    /// How many of `tokens` belong to the prompt.
    pub num_prompt: u32,
    /// Adapter that it is computed with, see [`super::Adapter`]; 0 for none.
    pub adapter: u32,
    /// Sampling parameters.
    pub sampling: SamplingParams,
}

/// One sequence's move between the KV cache and host memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Swap {
    /// The sequence.
    pub seq: SeqId,
    /// Pairs of blocks to copy between.
    pub blocks: Vec<SwapPair>,
}

/// A block in the KV cache and one in host memory. Both hold one block's K and V of all layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SwapPair {
    /// Block in the KV cache.
    pub device: BlockId,
    /// Block in host memory.
    pub host: HostBlockId,
}

/// One sequence's share of a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SequenceStep {
    /// The sequence.
    pub seq: SeqId,
    /// Position of the first token to compute: the number of tokens already in the KV cache.
    pub start: u32,
    /// Number of tokens to compute, at least 1. The token at `start` may be one that the worker
    /// sampled in the previous step and that the coordinator has not seen yet.
    pub count: u32,
    /// Blocks appended to the sequence's block table before this step.
    pub new_blocks: Vec<BlockId>,
    /// Whether to sample a token after the last one computed (false within a chunked prefill).
    pub sample: bool,
    /// Whether only some tokens may be sampled: which ones is in the step's [`StepMasks`]. Set only
    /// if `sample` is.
    pub masked: bool,
    /// Draft tokens; mostly none. If there are any, the share is the sequence's last token, which
    /// the coordinator knows, and the drafts after it: `count` is at most their number plus one,
    /// `sample` is set and `masked` is not. A token is sampled after each of these; they count up
    /// to and including the first that differs from the draft in its place.
    pub drafts: Drafts,
}

/// Draft tokens of a sequence, to be verified.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Drafts {
    /// These tokens, drafted by the coordinator.
    Known(Vec<u32>),
    /// Up to this many, at least 1: rank 0 drafts them with its draft model before the step is
    /// computed, and sends them to the other ranks. It may draft fewer, or none.
    UpTo(u32),
}

impl From<Vec<u32>> for Drafts {
    fn from(tokens: Vec<u32>) -> Self {
        Self::Known(tokens)
    }
}

impl Drafts {
    /// No drafts.
    #[must_use]
    pub const fn none() -> Self {
        Self::Known(Vec::new())
    }

    /// Maximum number of drafts.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Known(tokens) => tokens.len(),
            Self::UpTo(most) => *most as usize,
        }
    }

    /// Whether there are certainly no drafts.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the drafts that the coordinator knows.
    #[must_use]
    pub fn known(&self) -> &[u32] {
        match self {
            Self::Known(tokens) => tokens,
            Self::UpTo(_) => &[],
        }
    }

    /// Returns how many drafts the draft model is asked for, if it is asked.
    #[must_use]
    pub fn asked(&self) -> Option<u32> {
        match self {
            Self::Known(_) => None,
            Self::UpTo(most) => Some(*most),
        }
    }
}

/// The tokens that may be sampled in a step, for its masked sequences. They depend on all tokens
/// before, but plans are made ahead of those. So the masks follow the plan as soon as these tokens
/// are known, while the step is already computed or queued. Every rank gets the same bytes; there
/// is one message for each plan that has masked entries.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepMasks {
    /// The plan's epoch.
    pub epoch: Epoch,
    /// The plan's step.
    pub step: StepId,
    /// One per masked entry, in the plan's order. `None` if the sequence has ended or was preempted
    /// meanwhile: all tokens may be sampled then, and the result is ignored.
    pub masks: Vec<Option<TokenMask>>,
}

/// One rank's outcome of one step. Only rank 0 fills `outputs`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepResult {
    /// The plan's epoch.
    pub epoch: Epoch,
    /// The plan's step.
    pub step: StepId,
    /// One per sequence with `sample` set, prompt log-probabilities or an embedding, in the plan's
    /// order; for a sequence with drafts, one per token that counts, at consecutive positions.
    /// Empty on ranks other than 0.
    pub outputs: Vec<SequenceOutput>,
    /// Number of tokens that the draft model drafted for each sequence that it was asked about, in
    /// the plan's order. Empty on ranks other than 0.
    pub drafted: Vec<u32>,
    /// [`TokenDigest`] of this rank's result of the step: equal on all ranks.
    pub digest: u32,
    /// Where the time went.
    pub timings: StepTimings,
    /// Cumulative stats sent along.
    pub stats: WorkerStats,
}

/// A four-byte digest of a step's tokens: ranks with the same tokens have the same digest; ranks
/// with different tokens have different ones, except with probability 2^-32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenDigest(u32);

impl TokenDigest {
    /// Returns the digest of a step that has yielded nothing yet.
    #[must_use]
    pub fn of(step: StepId) -> Self {
        Self(crc32c::crc32c(&step.0.to_le_bytes()))
    }

    /// Adds a token, with its sequence and position.
    #[must_use]
    pub fn with(self, seq: SeqId, position: u32, token: u32) -> Self {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&seq.0.to_le_bytes());
        bytes[8..12].copy_from_slice(&position.to_le_bytes());
        bytes[12..].copy_from_slice(&token.to_le_bytes());
        Self(crc32c::crc32c_append(self.0, &bytes))
    }

    /// Returns the digest as sent.
    #[must_use]
    pub fn value(self) -> u32 {
        self.0
    }
}

/// What one sequence got in one step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SequenceOutput {
    /// The sequence.
    pub seq: SeqId,
    /// Index in the sequence (prompt included) of `token`.
    pub position: u32,
    /// The sampled token; absent for a prefill chunk that only reports prompt log-probabilities.
    pub token: Option<u32>,
    /// Log-probabilities of `token`, if requested.
    pub logprobs: Option<TokenLogprobs>,
    /// Log-probabilities of the prompt tokens at positions `prompt_start..`, if requested; the
    /// prompt's first token has none.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// Position of the first entry of `prompt_logprobs`.
    pub prompt_start: u32,
    /// Whether the logits or the embedding were not finite: the sequence must fail, not continue.
    pub corrupted: bool,
    /// Embedding of the prompt, if it was requested and this step computed the prompt's last token;
    /// its length is the model's hidden size. Of a model that sorts texts into classes, a number
    /// for each class. Empty otherwise.
    pub embedding: Vec<f32>,
}

/// Log-probabilities of one token, from the model's own distribution (before temperature, penalties
/// and truncation).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    /// The token.
    pub token: u32,
    /// Its natural log-probability.
    pub logprob: f32,
    /// Its rank among all tokens; 1 is the most likely.
    pub rank: u32,
    /// The most likely tokens with their log-probabilities, best first, ties by lower id.
    pub top: Vec<(u32, f32)>,
}

/// Where one rank spent one step. Durations, never points in time: clocks differ between hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepTimings {
    /// From receiving the plan to handing the result to the link, in microseconds.
    pub step_us: u64,
    /// Forward pass without collectives.
    pub forward_us: u64,
    /// Waiting for other ranks and exchanging data with them.
    pub collective_us: u64,
    /// Sampling (rank 0).
    pub sample_us: u64,
    /// Waiting for the step's masks; `None` if it has none or the rank does not sample.
    pub masks_us: Option<u64>,
    /// Drafting with the draft model (rank 0); `None` if it was asked for nothing.
    pub draft_us: Option<u64>,
    /// How long the executor was idle before this plan.
    pub idle_us: u64,
}

/// A step could not be run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepFailed {
    /// The plan's epoch.
    pub epoch: Epoch,
    /// The plan's step.
    pub step: StepId,
    /// One sentence.
    pub message: String,
}

impl StepFailed {
    /// Words for a rank, or a rank's device, that did not take part in an exchange in time.
    const IN_VAIN: [&str; 2] =
        ["waiting for rank", "the ranks' devices did not finish an exchange in"];

    /// Whether the rank says that it has waited for another one in vain.
    #[must_use]
    pub fn waited_in_vain(&self) -> bool {
        Self::IN_VAIN.iter().any(|words| self.message.contains(words))
    }
}
