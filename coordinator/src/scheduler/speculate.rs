//! PURE: n-gram drafts ("prompt lookup"): the tokens that followed a sequence's last tokens where
//! these occurred before.
//!
//! An index holds, for each n-gram length, where each n-gram of the sequence ended last. A token
//! costs one look-up per length, however long the sequence and whatever its tokens: an n-gram that
//! finds no place within a few probes replaces another. The index allocates its memory at the start
//! and takes in a long prompt bit by bit.
//!
//! Whether drafts pay off is known without making any: before each token the index predicts it, if
//! it can, and [`NgramDrafter::trust`] counts how that turns out. So a sequence that does not
//! repeat itself drafts nothing, and the longer it is wrong, the longer it must be right before it
//! drafts again. All of this depends on its tokens alone.
use super::config::ConfigError;
use super::speculation::within;

/// Longest n-gram allowed, in tokens.
const LOOKUP_MAX: u32 = 16;

/// N-grams that planning one step enters into all indices together: a prompt of a hundred thousand
/// tokens delays no other request, nor do many of them.
const ENTERED_MAX: usize = 2048;

/// Maximum number of places probed for one n-gram. A client can craft tokens whose n-grams all hash
/// to the same places; then the last place's n-gram is replaced, and nobody waits.
const PROBES_MAX: usize = 16;

/// Trust at first, trust needed to draft, and the bounds of trust.
const TRUST_AT_FIRST: i32 = 6;
const TRUST_NEEDED: i32 = 4;
const TRUST_MOST: i32 = 12;
const TRUST_LEAST: i32 = -16;

/// Which n-grams are looked up. Names as in vLLM's `--speculative-config`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NgramConfig {
    /// Longest n-gram looked up, in tokens: `prompt_lookup_min` to 16.
    pub prompt_lookup_max: u32,
    /// Shortest n-gram looked up, in tokens: at least 1.
    pub prompt_lookup_min: u32,
}

impl NgramConfig {
    /// Checks the bounds.
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let Self { prompt_lookup_max: max, prompt_lookup_min: min } = *self;
        within("prompt_lookup_max", max, 1, LOOKUP_MAX)?;
        within("prompt_lookup_min", min, 1, LOOKUP_MAX)?;
        if min > max {
            return Err(ConfigError(format!(
                "prompt_lookup_min ({min}) is above prompt_lookup_max ({max})"
            )));
        }
        Ok(())
    }

    /// N-gram lengths looked up.
    fn lengths(&self) -> usize {
        (self.prompt_lookup_max - self.prompt_lookup_min + 1) as usize
    }

    /// Tokens that planning one step enters into all indices together: at least as many as a step
    /// samples, so that complete indices stay complete.
    pub(super) fn entered_max(&self, max_num_seqs: u32) -> usize {
        (ENTERED_MAX / self.lengths()).max(max_num_seqs as usize)
    }
}

/// Number of places per length of an index for sequences of up to `room` tokens.
fn slots(room: usize) -> usize {
    (room + room / 3 + 1).next_power_of_two()
}

/// One sequence's index, and how far it is trusted.
#[derive(Debug)]
pub struct NgramDrafter {
    /// `slots` places for each length, shortest first: where an n-gram ended last, 0 if the place
    /// is free. Found by the n-gram's hash, then compared token by token.
    index: Vec<u32>,
    /// A power of two; at least a quarter of the places stay empty.
    slots: usize,
    min: usize,
    max: usize,
    /// Number of tokens there is room for.
    room: usize,
    /// Number of tokens entered.
    entered: usize,
    /// Where the longest n-gram at the sequence's end ended before; 0 if it is new.
    found: usize,
    trust: i32,
    /// Number of places probed.
    #[cfg(test)]
    probes: usize,
}

impl NgramDrafter {
    /// Creates an empty index with room for sequences of up to `room` tokens.
    #[must_use]
    pub fn new(config: &NgramConfig, room: usize) -> Self {
        let slots = slots(room);
        Self {
            index: vec![0; slots * config.lengths()],
            slots,
            min: config.prompt_lookup_min as usize,
            max: config.prompt_lookup_max as usize,
            room,
            entered: 0,
            found: 0,
            trust: TRUST_AT_FIRST,
            #[cfg(test)]
            probes: 0,
        }
    }

    /// Bytes of an index with room for sequences of up to `room` tokens.
    #[must_use]
    pub fn bytes_of(config: &NgramConfig, room: usize) -> usize {
        slots(room) * config.lengths() * size_of::<u32>()
    }

    /// Bytes of its index.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(self.index.as_slice())
    }

    /// Enters up to `budget` new tokens of `tokens`, whose first `num_prompt` are the prompt, and
    /// reduces `budget` accordingly; later calls enter the rest.
    pub fn enter(&mut self, tokens: &[u32], num_prompt: usize, budget: &mut usize) {
        let end = self.entered + self.behind(tokens).min(*budget);
        *budget -= end - self.entered;
        while self.entered < end {
            // How a prompt repeats itself says little about what follows it.
            if self.found > 0 && self.entered >= num_prompt {
                let is_right = tokens[self.found] == tokens[self.entered];
                let trust = if is_right { self.trust + 1 } else { self.trust - 1 };
                self.trust = trust.clamp(TRUST_LEAST, TRUST_MOST);
            }
            self.entered += 1;
            self.found = self.exchange(tokens, self.entered);
        }
    }

    /// Number of `tokens` still to be entered, as far as there is room.
    #[must_use]
    pub fn behind(&self, tokens: &[u32]) -> usize {
        tokens.len().min(self.room).saturating_sub(self.entered)
    }

    /// Enters all n-grams that end at `end`; returns where the longest of them that the index still
    /// had ended before, or 0.
    fn exchange(&mut self, tokens: &[u32], end: usize) -> usize {
        let (mut hash, mut found) = (0u64, 0);
        for length in 1..=self.max.min(end) {
            let token = u64::from(tokens[end - length]);
            hash = (hash ^ token).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
            if length < self.min {
                continue;
            }
            let first = (length - self.min) * self.slots;
            let places = &mut self.index[first..first + self.slots];
            let ngram = &tokens[end - length..end];
            // The high bits: the low bits of a product do not depend on the high bits of its
            // factors.
            let home = (hash >> 32) as usize;
            for probe in 1..=PROBES_MAX {
                #[cfg(test)]
                {
                    self.probes += 1;
                }
                let place = &mut places[(home + probe) & (self.slots - 1)];
                let ended = *place as usize;
                let is_same = ended > 0 && tokens[ended - length..ended] == *ngram;
                if ended == 0 || is_same || probe == PROBES_MAX {
                    *place = end as u32;
                    found = if is_same { ended } else { found };
                    break;
                }
            }
        }
        found
    }

    /// Whether there is something to draft from and it is trusted enough.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.found > 0 && self.trust >= TRUST_NEEDED
    }

    /// Fills `draft` with up to `most` tokens: those that followed the earlier occurrence of the
    /// sequence's end, continued with the draft's own tokens once they reach the sequence's end.
    /// `tokens` must be those entered.
    pub fn draft(&self, tokens: &[u32], most: usize, draft: &mut Vec<u32>) {
        draft.clear();
        if !self.is_ready() || self.entered != tokens.len() {
            return;
        }
        for at in self.found..self.found + most {
            let token = tokens.get(at).or_else(|| draft.get(at - tokens.len()));
            let Some(token) = token.copied() else { return };
            draft.push(token);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn config(min: u32, max: u32) -> NgramConfig {
        NgramConfig { prompt_lookup_max: max, prompt_lookup_min: min }
    }

    /// By definition: where the longest n-gram at the end of the tokens ended last before.
    fn naive(tokens: &[u32], min: usize, max: usize) -> usize {
        for length in (min..=max.min(tokens.len())).rev() {
            let ngram = &tokens[tokens.len() - length..];
            for end in (length..tokens.len()).rev() {
                if tokens[end - length..end] == *ngram {
                    return end;
                }
            }
        }
        0
    }

    fn naive_draft(tokens: &[u32], found: usize, most: usize) -> Vec<u32> {
        let mut all = tokens.to_vec();
        for at in found..found + most {
            all.push(all[at]);
        }
        all.split_off(tokens.len())
    }

    fn entered(drafter: &mut NgramDrafter, tokens: &[u32], num_prompt: usize) {
        drafter.enter(tokens, num_prompt, &mut tokens.len());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]
        /// Few distinct tokens, so that all lengths occur; entered one by one or many at a time.
        #[test]
        fn it_finds_what_a_search_of_everything_finds(
            tokens in (2u32..5).prop_flat_map(|kinds| prop::collection::vec(0..kinds, 1..150)),
            min in 1u32..4,
            more in 0u32..5,
            steps in prop::collection::vec(1usize..20, 1..40),
            num_prompt in 0usize..150,
        ) {
            // Enough places for every n-gram to keep its own.
            let mut drafter = NgramDrafter::new(&config(min, min + more), 20 * tokens.len());
            let mut steps = steps.into_iter().cycle();
            let mut draft = Vec::new();
            let (mut end, mut trust) = (0, TRUST_AT_FIRST);
            while end < tokens.len() {
                let before = end;
                end = (end + steps.next().unwrap()).min(tokens.len());
                entered(&mut drafter, &tokens[..end], num_prompt);
                let search = |end: usize| naive(&tokens[..end], min as usize, (min + more) as usize);
                let expected = search(end);
                prop_assert_eq!(drafter.found, expected);
                for at in before.max(num_prompt)..end {
                    let found = search(at);
                    if found > 0 {
                        trust += if tokens[found] == tokens[at] { 1 } else { -1 };
                        trust = trust.clamp(TRUST_LEAST, TRUST_MOST);
                    }
                }
                prop_assert_eq!(drafter.trust, trust);
                drafter.draft(&tokens[..end], 7, &mut draft);
                if expected > 0 && trust >= TRUST_NEEDED {
                    prop_assert_eq!(&draft, &naive_draft(&tokens[..end], expected, 7));
                } else {
                    prop_assert!(draft.is_empty() && !drafter.is_ready());
                }
            }
        }
    }

    /// Tokens that all hash to one of 16 places of an index with so many places.
    fn crafted(slots: u64) -> impl Iterator<Item = u32> {
        let hash = |token: u64| token.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        (0..u32::MAX).filter(move |token| ((hash(u64::from(*token)) >> 32) & (slots - 1)) < 16)
    }

    #[test]
    fn crafted_tokens_cost_no_more_than_a_bound() {
        let mut drafter = NgramDrafter::new(&config(1, 1), 3001);
        let tokens: Vec<u32> = crafted(drafter.slots as u64).take(3000).collect();
        entered(&mut drafter, &tokens, 0);
        assert!(drafter.probes <= 16 * 3000, "{} places looked at", drafter.probes);
        assert!(drafter.probes > 15 * 2900, "they are crafted: {}", drafter.probes);
        // The latest is in the index.
        let again: Vec<u32> = tokens.iter().chain(&tokens[2999..]).copied().collect();
        entered(&mut drafter, &again, 0);
        assert_eq!(drafter.found, 3000);
    }

    proptest! {
        /// N-grams without a place are not found; nothing is found where it is not.
        #[test]
        fn what_is_found_is_there_however_tokens_are_chosen(
            picks in prop::collection::vec(0usize..60, 1..300),
            (min, more) in (1u32..3, 0u32..3),
        ) {
            let mut drafter = NgramDrafter::new(&config(min, min + more), picks.len());
            let kinds: Vec<u32> = crafted(drafter.slots as u64).take(60).collect();
            let tokens: Vec<u32> = picks.iter().map(|pick| kinds[*pick]).collect();
            for end in 1..=tokens.len() {
                entered(&mut drafter, &tokens[..end], 0);
                let mut may = (min..=min + more)
                    .map(|length| naive(&tokens[..end], length as usize, length as usize));
                prop_assert!(drafter.found == 0 || may.any(|found| found == drafter.found));
            }
        }
    }

    #[test]
    fn a_draft_goes_on_in_itself_behind_the_end() {
        let mut drafter = NgramDrafter::new(&config(2, 3), 100);
        let tokens = [9, 1, 2, 3, 1, 2, 3];
        entered(&mut drafter, &tokens, 7);
        let mut draft = Vec::new();
        drafter.draft(&tokens, 7, &mut draft);
        assert_eq!(draft, [1, 2, 3, 1, 2, 3, 1]);
        drafter.draft(&tokens, 0, &mut draft);
        assert!(draft.is_empty());
        // Tokens other than those entered get no draft.
        drafter.draft(&tokens[..5], 7, &mut draft);
        assert!(draft.is_empty());
    }

    #[test]
    fn a_long_prompt_is_entered_bit_by_bit_and_no_more_than_there_is_room_for() {
        let tokens: Vec<u32> = (0..5000).map(|at| at % 1000).collect();
        let mut drafter = NgramDrafter::new(&config(3, 3), 5000);
        let mut budget = 4999;
        drafter.enter(&tokens, 5000, &mut budget);
        assert_eq!((budget, drafter.behind(&tokens)), (0, 1));
        let mut draft = Vec::new();
        drafter.draft(&tokens, 3, &mut draft);
        assert!(draft.is_empty(), "not all is entered");
        budget = 7;
        drafter.enter(&tokens, 5000, &mut budget);
        assert_eq!((budget, drafter.behind(&tokens)), (6, 0));
        drafter.draft(&tokens, 3, &mut draft);
        assert_eq!(draft, [0, 1, 2]);
        let mut small = NgramDrafter::new(&config(1, 2), 10);
        let memory = small.index.capacity();
        assert_eq!(small.bytes(), NgramDrafter::bytes_of(&config(1, 2), 10));
        assert_eq!(small.bytes(), 2 * 16 * 4);
        entered(&mut small, &tokens, 5000);
        assert_eq!((small.entered, small.index.capacity()), (10, memory));
    }

    #[test]
    fn more_lengths_leave_fewer_tokens_a_step_but_never_fewer_than_it_samples() {
        let entered_max = |min, max, seqs| config(min, max).entered_max(seqs);
        assert_eq!((entered_max(3, 3, 256), entered_max(2, 5, 256)), (2048, 512));
        assert_eq!((entered_max(1, 16, 64), entered_max(1, 16, 256)), (128, 256));
    }

    #[test]
    fn who_is_wrong_for_longer_must_be_right_for_longer() {
        // "1 2" is followed by another token each time, then always by the same.
        let wrong = |times: u32| (0..times).flat_map(|at| [1, 2, 100 + at]);
        let drafts_after = |times: u32| {
            let mut tokens: Vec<u32> = wrong(times).collect();
            let mut drafter = NgramDrafter::new(&config(2, 2), 10_000);
            entered(&mut drafter, &tokens, 0);
            for right in 0u32.. {
                tokens.extend([1, 2, 7]);
                entered(&mut drafter, &tokens, 0);
                // "2 7" is followed by 1 again.
                if drafter.is_ready() {
                    return right;
                }
            }
            0
        };
        let waits: Vec<u32> = [2, 6, 10, 14, 1000, 2000].map(drafts_after).to_vec();
        assert!(waits.windows(2).all(|pair| pair[0] <= pair[1]), "{waits:?}");
        assert!(waits[0] < waits[3] && waits[3] < 20 && waits[4] == waits[5], "{waits:?}");
    }

    #[test]
    fn text_without_repetition_never_drafts() {
        let mut drafter = NgramDrafter::new(&config(2, 4), 3000);
        let tokens: Vec<u32> = (0..3000).collect();
        for end in 1..3000 {
            entered(&mut drafter, &tokens[..end], 10);
            assert!(!drafter.is_ready());
        }
    }
}
