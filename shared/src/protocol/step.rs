//! Messages of the data plane: one plan and its result per engine step.
use serde::{Deserialize, Serialize};

use super::control::WorkerStats;
use super::mask::TokenMask;
use crate::ids::{BlockId, Epoch, HostBlockId, SeqId, StepId};
use crate::sampling::SamplingParams;

/// What every rank of a replica computes in one step. Encoded once; every rank gets the same bytes.
///
/// Order of application on a worker: `finished` is forgotten, `swap_out` is copied, then `swap_in`,
/// `admitted` is added, then `sequences` is run as one batch.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepPlan {
    /// The epoch the plan belongs to.
    pub epoch: Epoch,
    /// The step, 1 higher than the plan before it.
    pub step: StepId,
    /// Sequences that will not be run again (finished, cancelled or preempted): forget them. Their
    /// blocks may already belong to another sequence of this very plan.
    pub finished: Vec<SeqId>,
    /// Sequences that leave the KV cache for host memory with all of their blocks, in the order of
    /// their block tables. They are remembered. Their blocks may already belong to another sequence
    /// of this very plan.
    pub swap_out: Vec<Swap>,
    /// Sequences that come back, each one also in `sequences`, where its new block table is given
    /// whole. The first blocks of that may hold what they shall already: the pairs are those of the
    /// rest. All of its host blocks are free then.
    pub swap_in: Vec<Swap>,
    /// Sequences run for the first time (or again after preemption), in full.
    pub admitted: Vec<NewSequence>,
    /// The batch. Each sequence occurs at most once.
    pub sequences: Vec<SequenceStep>,
}

/// A sequence that workers have not seen, or have forgotten.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NewSequence {
    /// The sequence.
    pub seq: SeqId,
    /// Prompt and, after a preemption or failover, the tokens accepted so far.
    pub tokens: Vec<u32>,
    /// How many of `tokens` are prompt.
    pub num_prompt: u32,
    /// The adapter that it is computed with, see [`super::Adapter`]; 0 for none.
    pub adapter: u32,
    /// How to choose its tokens.
    pub sampling: SamplingParams,
}

/// One sequence's way between the KV cache and host memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Swap {
    /// The sequence.
    pub seq: SeqId,
    /// Which block is copied to which, or from which.
    pub blocks: Vec<SwapPair>,
}

/// A block in the KV cache and one in host memory. Both hold one block's K and V of all layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SwapPair {
    /// In the KV cache.
    pub device: BlockId,
    /// In host memory.
    pub host: HostBlockId,
}

/// One sequence's share of a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SequenceStep {
    /// The sequence.
    pub seq: SeqId,
    /// Position of the first token to compute = tokens already in the KV cache.
    pub start: u32,
    /// Tokens to compute, at least 1. The token at `start` may be one the worker itself sampled in
    /// the step before and the coordinator has not seen yet.
    pub count: u32,
    /// Blocks appended to the sequence's block table before this step.
    pub new_blocks: Vec<BlockId>,
    /// Sample a token after the last one computed (false within a chunked prefill).
    pub sample: bool,
    /// Not all tokens may be sampled: which, is in the step's [`StepMasks`]. Only where `sample` is
    /// set.
    pub masked: bool,
    /// Tokens that may come next; mostly none. Where there are, the share is the sequence's last
    /// token, known to the coordinator, and the drafts behind it: `count` is one more than they are
    /// at most, `sample` is set and `masked` is not. A token is sampled after each, and those count
    /// up to the first that is not the draft in its place, that one included.
    pub drafts: Drafts,
}

/// Tokens that may come next in a sequence, to be verified.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Drafts {
    /// These, drafted by the coordinator.
    Known(Vec<u32>),
    /// Up to so many, at least 1: rank 0 drafts them by its draft model before the step is
    /// computed, and tells the other ranks. It may draft fewer, or none.
    UpTo(u32),
}

impl From<Vec<u32>> for Drafts {
    fn from(tokens: Vec<u32>) -> Self {
        Self::Known(tokens)
    }
}

impl Drafts {
    /// None.
    #[must_use]
    pub const fn none() -> Self {
        Self::Known(Vec::new())
    }

    /// How many there are at most.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Known(tokens) => tokens.len(),
            Self::UpTo(most) => *most as usize,
        }
    }

    /// Whether there can be none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Those that are known.
    #[must_use]
    pub fn known(&self) -> &[u32] {
        match self {
            Self::Known(tokens) => tokens,
            Self::UpTo(_) => &[],
        }
    }

    /// How many a draft model is asked for, if it is.
    #[must_use]
    pub fn asked(&self) -> Option<u32> {
        match self {
            Self::Known(_) => None,
            Self::UpTo(most) => Some(*most),
        }
    }
}

/// The tokens that may be sampled in a step, for its masked sequences. What a sequence may get
/// depends on all its tokens before, and plans are made ahead of those: so this comes behind its
/// plan, as soon as they are known, while the step is computed or waits for others. Every rank gets
/// the same bytes; one for each plan that has masked entries.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepMasks {
    /// The plan's epoch.
    pub epoch: Epoch,
    /// The plan's step.
    pub step: StepId,
    /// One per masked entry, in the plan's order. None where it makes no difference, since the
    /// sequence has ended or was preempted meanwhile: all may be sampled then, and it is ignored.
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
    /// order; of a sequence with drafts one per token that counts, at consecutive positions. Empty
    /// on other ranks than 0.
    pub outputs: Vec<SequenceOutput>,
    /// How many tokens the draft model drafted for each sequence that it was asked to draft for, in
    /// the plan's order. Empty on other ranks than 0.
    pub drafted: Vec<u32>,
    /// A [`TokenDigest`] of what the step yielded, as this rank has it: equal on all ranks.
    pub digest: u32,
    /// Where the time went.
    pub timings: StepTimings,
    /// Cumulative stats riding along.
    pub stats: WorkerStats,
}

/// What a step yielded, in four bytes: ranks that have the same tokens have the same digest, others
/// a different one, but for one in 2^32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenDigest(u32);

impl TokenDigest {
    /// Of a step that has yielded nothing yet.
    #[must_use]
    pub fn of(step: StepId) -> Self {
        Self(crc32c::crc32c(&step.0.to_le_bytes()))
    }

    /// With one more token: which sequence got it, and at which position.
    #[must_use]
    pub fn with(self, seq: SeqId, position: u32, token: u32) -> Self {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&seq.0.to_le_bytes());
        bytes[8..12].copy_from_slice(&position.to_le_bytes());
        bytes[12..].copy_from_slice(&token.to_le_bytes());
        Self(crc32c::crc32c_append(self.0, &bytes))
    }

    /// As it travels.
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
    /// Log-probabilities of `token`, when asked for.
    pub logprobs: Option<TokenLogprobs>,
    /// Log-probabilities of the prompt tokens at positions `prompt_start..`, when asked for; the
    /// prompt's first token has none.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// Position of the first entry of `prompt_logprobs`.
    pub prompt_start: u32,
    /// The logits or the embedding were not finite: the sequence must fail, not continue.
    pub corrupted: bool,
    /// The prompt's embedding, where one was asked for and this step computed its last token: as
    /// many numbers as the model's hidden size. Empty otherwise.
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
    /// Plan received to result handed to the link, in microseconds.
    pub step_us: u64,
    /// Forward pass without collectives.
    pub forward_us: u64,
    /// Waiting for and exchanging with other ranks.
    pub collective_us: u64,
    /// Sampling (rank 0).
    pub sample_us: u64,
    /// Waiting for the step's masks; none where it has none, or the rank does not sample.
    pub masks_us: Option<u64>,
    /// Drafting by the draft model (rank 0); none where it was asked for nothing.
    pub draft_us: Option<u64>,
    /// How long the executor had nothing to do before this plan.
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
