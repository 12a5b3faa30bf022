//! PURE: upper bounds on the bytes of a plan, of a step's masks and of its results: each travels as
//! one frame.
use shared::sampling::{LOGIT_BIAS_MAX, LOGPROBS_MAX, SUPPRESSED_MAX};
use shared::wire::frame::BODY_MAX;

use super::config::{ConfigError, SchedulerConfig};
use super::sequence::Sequence;

/// Maximum bytes of an encoded number: one for its width, then all of its own.
const U32: usize = 5;
const U64: usize = 9;
/// A plan without its lists' contents: the message's variant, epoch, step, lengths of the seven
/// lists.
const HEAD: usize = U32 + 9 * U64;
/// A `SequenceStep` without its blocks and drafts, and where its state is kept.
const SHARE: usize = U64 + 2 * U32 + 2 * U64 + 3 + KEPT_STATE;
/// A `NewSequence` without its tokens and the lists of its sampling parameters, and the state that
/// it begins with.
const NEW: usize = 2 * U64 + 2 * U32 + SAMPLING + KEPT_STATE;
const KEPT_STATE: usize = U64 + U32;
/// `SamplingParams` without their lists: six floats, three numbers, the seed, two lengths, three
/// optional numbers.
const SAMPLING: usize = 6 * 4 + 3 * U32 + 3 * U64 + 3 * (1 + U32);
const BIAS: usize = U32 + 4;

/// Maximum bytes of what one plan admits.
pub(super) const ADMITTED_MAX: usize = BODY_MAX as usize / 2;
/// Maximum bytes of the masks of all admitted guided sequences: a step's masks travel in a frame of
/// their own. The rest is for the message's other fields, including a byte for each mask.
pub(super) const MASKS_MAX: usize = BODY_MAX as usize / 16 * 15;
/// Maximum bytes of copies out of the KV cache, and again of copies in.
const SWAPS_MAX: usize = BODY_MAX as usize / 32;
/// Maximum bytes of a step's embeddings, which are reported in one frame.
const EMBEDDINGS_MAX: usize = BODY_MAX as usize / 4;
/// Maximum bytes of the log-probabilities of prompts in a step's results, beside its embeddings and
/// its own tokens with theirs.
const SCORES_MAX: usize = BODY_MAX as usize / 8 * 3;
/// What a step reports of a sequence, without the numbers of an embedding and without
/// log-probabilities.
const REPORT: usize = 64;
/// A token's log-probabilities without their list of alternatives.
const SCORE: usize = 2 * U32 + 4 + U64;
/// One of these alternatives: a token and its log-probability.
const ALTERNATIVE: usize = U32 + 4;
/// Length assumed for an embedding where it is unknown: more than any model in use has.
const HIDDEN_SIZE_MAX: u32 = 1 << 16;
const BATCH_MAX: usize = BODY_MAX as usize - ADMITTED_MAX - 2 * SWAPS_MAX;
/// A swapped sequence without its blocks.
const SWAP: usize = 2 * U64;
/// One of its blocks: two ids, and the one in the sequence's new table.
const SWAPPED_BLOCK: usize = 3 * U32;

// Every model and batch in use fits: a million tokens of context, 4,096 sequences, 256 Ki tokens.
const _: () = assert!(longest(1 << 20, 16) <= ADMITTED_MAX);
const _: () = assert!(batch(4096, 256 << 10, 16) <= BATCH_MAX);
const _: () = assert!(256 << 10 <= SCORES_MAX / score(0));
const _: () = assert!(
    EMBEDDINGS_MAX + SCORES_MAX + 4096 * (REPORT + score(LOGPROBS_MAX)) <= BODY_MAX as usize
);

/// Bytes of admitting a sequence: its tokens, and the blocks it may start with.
const fn new_sequence(tokens: usize, block_size: usize, biases: usize, suppressed: usize) -> usize {
    // One more than the full blocks, for the next token.
    let blocks = (tokens + 1).div_ceil(block_size) + 1;
    NEW + (tokens + blocks + suppressed) * U32 + biases * BIAS
}

const fn longest(max_model_len: usize, block_size: usize) -> usize {
    new_sequence(max_model_len, block_size, LOGIT_BIAS_MAX, SUPPRESSED_MAX)
}

/// Bytes of a plan's batch: each sequence's share; the blocks that its tokens begin; two forgotten
/// sequences for each, one finished before and one preempted by this plan; and as many drafted
/// tokens, since a step samples no more rows.
const fn batch(sequences: usize, tokens: usize, block_size: usize) -> usize {
    let blocks = tokens.div_ceil(block_size) + sequences;
    HEAD + sequences * (SHARE + 2 * U64 + U32) + blocks * U32
}

/// Bytes of admitting this sequence.
pub(super) fn of(seq: &Sequence, config: &SchedulerConfig) -> usize {
    let sampling = &seq.sampling;
    let (biases, suppressed) = (sampling.logit_bias.len(), sampling.suppress_until_min.len());
    new_sequence(seq.tokens.len(), config.block_size as usize, biases, suppressed)
}

/// Maximum bytes that swapping a sequence of `blocks` blocks takes in a plan: pairs of ids, and its
/// new table, which is sent whole when it comes in, whether its first blocks are copied or found.
pub(super) fn swap(blocks: usize) -> usize {
    SWAP + blocks * SWAPPED_BLOCK
}

/// Whether a plan that swaps `others` bytes may also swap a sequence of `blocks` blocks. One that
/// may go out alone may come in alone.
pub(super) fn may_swap(others: usize, blocks: usize) -> bool {
    others + swap(blocks) <= SWAPS_MAX
}

/// Maximum number of embeddings that one step may complete, at least 1.
pub(super) fn embeddings_max(config: &SchedulerConfig) -> u32 {
    let hidden_size = if config.hidden_size == 0 { HIDDEN_SIZE_MAX } else { config.hidden_size };
    let count = EMBEDDINGS_MAX / (hidden_size as usize * size_of::<f32>() + REPORT);
    u32::try_from(count).unwrap_or(u32::MAX).max(1)
}

/// Maximum bytes of a token's log-probabilities with so many alternatives.
const fn score(alternatives: u32) -> usize {
    SCORE + alternatives as usize * ALTERNATIVE
}

/// Maximum bytes of the log-probabilities of its prompt that the next `count` tokens of a sequence
/// yield.
pub(super) fn scores(seq: &Sequence, count: u32) -> usize {
    seq.num_scored(count) as usize * score(seq.sampling.prompt_logprobs.unwrap_or(0))
}

/// How many of a sequence's next `count` tokens may be in a step whose other sequences yield
/// `others` bytes of log-probabilities of prompts. At least one token of a sequence is in a step
/// where no other yields any.
pub(super) fn scored_max(seq: &Sequence, count: u32, others: usize) -> u32 {
    let each = score(seq.sampling.prompt_logprobs.unwrap_or(0));
    let room = u32::try_from(SCORES_MAX.saturating_sub(others) / each).unwrap_or(u32::MAX);
    let room = if others == 0 { room.max(1) } else { room };
    // Those that yield some come before those that yield none.
    if seq.num_scored(count) <= room { count } else { room }
}

/// Checks that every plan fits into a frame.
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
