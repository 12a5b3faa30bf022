//! PURE: how many bytes a plan takes, at most, and a step's masks: each travels as one frame.
use shared::sampling::{LOGIT_BIAS_MAX, SUPPRESSED_MAX};
use shared::wire::frame::BODY_MAX;

use super::config::{ConfigError, SchedulerConfig};
use super::sequence::Sequence;

/// Most bytes of an encoded number: one that says how wide it is, then all of its own.
const U32: usize = 5;
const U64: usize = 9;
/// What a plan has but for its lists: the message's variant, epoch, step, lengths of the five
/// lists.
const HEAD: usize = U32 + 7 * U64;
/// A `SequenceStep` but for its blocks and its drafts.
const SHARE: usize = U64 + 2 * U32 + 2 * U64 + 3;
/// A `NewSequence` but for its tokens and the lists of its sampling parameters.
const NEW: usize = 2 * U64 + 2 * U32 + SAMPLING;
/// `SamplingParams` but for their lists: six floats, three numbers, the seed, two lengths, three
/// that may be absent.
const SAMPLING: usize = 6 * 4 + 3 * U32 + 3 * U64 + 3 * (1 + U32);
const BIAS: usize = U32 + 4;

/// Most bytes of what one plan admits.
pub(super) const ADMITTED_MAX: usize = BODY_MAX as usize / 2;
/// Most bytes of the masks of all guided sequences that are admitted: those of a step travel in a
/// frame of their own. The rest is for what the message has beside them, a byte for each included.
pub(super) const MASKS_MAX: usize = BODY_MAX as usize / 16 * 15;
/// Most bytes of copies out of the KV cache, and as many of copies in.
const SWAPS_MAX: usize = BODY_MAX as usize / 32;
/// Most bytes of a step's embeddings: they are reported in one frame.
const EMBEDDINGS_MAX: usize = BODY_MAX as usize / 4;
/// An embedding's report but for its numbers.
const REPORT: usize = 64;
/// Numbers that an embedding is taken to have where that is not known: more than any model in use.
const HIDDEN_SIZE_MAX: u32 = 1 << 16;
const BATCH_MAX: usize = BODY_MAX as usize - ADMITTED_MAX - 2 * SWAPS_MAX;
/// A swapped sequence but for its blocks.
const SWAP: usize = 2 * U64;
/// One of its blocks: two names, and that in the sequence's new table.
const SWAPPED_BLOCK: usize = 3 * U32;

// Every model and batch in use fits: a million tokens of context, 4,096 sequences, 256 Ki tokens.
const _: () = assert!(longest(1 << 20, 16) <= ADMITTED_MAX);
const _: () = assert!(batch(4096, 256 << 10, 16) <= BATCH_MAX);

/// Bytes of admitting a sequence: its tokens, and all the blocks that it may begin behind.
const fn new_sequence(tokens: usize, block_size: usize, biases: usize, suppressed: usize) -> usize {
    // One block more than full ones, for the token that comes next.
    let blocks = (tokens + 1).div_ceil(block_size) + 1;
    NEW + (tokens + blocks + suppressed) * U32 + biases * BIAS
}

const fn longest(max_model_len: usize, block_size: usize) -> usize {
    new_sequence(max_model_len, block_size, LOGIT_BIAS_MAX, SUPPRESSED_MAX)
}

/// Bytes of a plan's batch: each sequence's share, the blocks that its tokens begin, as many
/// sequences that are forgotten twice, which were finished before and are preempted by the plan,
/// and as many drafted tokens, since a step samples no more rows.
const fn batch(sequences: usize, tokens: usize, block_size: usize) -> usize {
    let blocks = tokens.div_ceil(block_size) + sequences;
    HEAD + sequences * (SHARE + 2 * U64 + U32) + blocks * U32
}

/// Bytes of admitting this one.
pub(super) fn of(seq: &Sequence, config: &SchedulerConfig) -> usize {
    let sampling = &seq.sampling;
    let (biases, suppressed) = (sampling.logit_bias.len(), sampling.suppress_until_min.len());
    new_sequence(seq.tokens.len(), config.block_size as usize, biases, suppressed)
}

/// Most bytes that swapping a sequence of so many blocks takes of a plan: pairs of names, and its
/// new table, which is told whole when it comes in, be its first blocks copied or found.
pub(super) fn swap(blocks: usize) -> usize {
    SWAP + blocks * SWAPPED_BLOCK
}

/// Whether a plan that swaps so many bytes may swap a sequence of so many blocks. One that may go
/// out alone may come in alone.
pub(super) fn may_swap(others: usize, blocks: usize) -> bool {
    others + swap(blocks) <= SWAPS_MAX
}

/// Most embeddings that one step may complete, at least 1.
pub(super) fn embeddings_max(config: &SchedulerConfig) -> u32 {
    let hidden_size = if config.hidden_size == 0 { HIDDEN_SIZE_MAX } else { config.hidden_size };
    let count = EMBEDDINGS_MAX / (hidden_size as usize * size_of::<f32>() + REPORT);
    u32::try_from(count).unwrap_or(u32::MAX).max(1)
}

/// Whether every plan fits into a frame.
pub(super) fn check(config: &SchedulerConfig) -> Result<(), ConfigError> {
    let SchedulerConfig { max_model_len, max_num_seqs, max_num_batched_tokens, .. } = *config;
    let block_size = config.block_size as usize;
    let bytes = longest(max_model_len as usize, block_size);
    if bytes > ADMITTED_MAX {
        return Err(ConfigError(format!(
            "max_model_len ({max_model_len}) is too long: a sequence takes up to {bytes} bytes of \
             a step plan, which has {ADMITTED_MAX} for it"
        )));
    }
    let bytes = batch(max_num_seqs as usize, max_num_batched_tokens as usize, block_size);
    if bytes > BATCH_MAX {
        return Err(ConfigError(format!(
            "max_num_seqs ({max_num_seqs}) and max_num_batched_tokens ({max_num_batched_tokens}) \
             are too many: a batch takes up to {bytes} bytes of a step plan, which has \
             {BATCH_MAX} for it"
        )));
    }
    Ok(())
}
