//! PURE: how many tokens a draft model drafts for a sequence, depending on how its drafts turned
//! out: more while all are right, fewer when some are wrong, none for a while when almost none was
//! right. A sequence that does not draft is planned one step ahead, as without a draft model.

/// Tokens added to the next draft after one that was right throughout.
const FASTER: u32 = 2;
/// Shortest draft, if drafts may be that long: a shorter one is not worth waiting for.
const LEAST: u32 = 2;

/// Trust at first, after a pause, and at most. Each draft with at least one right token adds one,
/// any other subtracts one; at zero, drafting pauses.
const TRUST_AT_FIRST: u32 = 4;
const TRUST_AGAIN: u32 = 2;
const TRUST_MOST: u32 = 8;

/// Length of the first pause and of the longest, in tokens. Each is twice the one before, until
/// trust is back at its initial level.
const PAUSE: u32 = 16;
const PAUSE_MOST: u32 = 512;

/// Empty drafts in a row after which drafting pauses, too. The draft model may be catching up with
/// the prompt, a part in each step, or the sequence is longer than it can compute.
const MISSED_MOST: u32 = 32;

/// Draft length of one sequence.
#[derive(Clone, Copy, Debug)]
pub(super) struct DraftPace {
    /// Tokens of its next draft; `None` before the first one, which has the maximum.
    length: Option<u32>,
    trust: u32,
    /// Length of the next pause, in tokens.
    pause: u32,
    missed: u32,
    /// Nothing is drafted before the sequence has so many tokens.
    resumes_at: u32,
}

impl Default for DraftPace {
    fn default() -> Self {
        Self { length: None, trust: TRUST_AT_FIRST, pause: PAUSE, missed: 0, resumes_at: 0 }
    }
}

impl DraftPace {
    /// Returns the length of the next draft, at most `most`, of a sequence of `len` tokens.
    pub(super) fn length(&self, len: u32, most: u32) -> u32 {
        if len < self.resumes_at { 0 } else { self.length.unwrap_or(most).min(most) }
    }

    /// Learns that `accepted` of `drafted` tokens were right; the sequence has `len` tokens now.
    pub(super) fn verified(&mut self, (drafted, accepted): (u32, u32), most: u32, len: u32) {
        if drafted == 0 {
            self.missed += 1;
            if self.missed >= MISSED_MOST {
                // It is asked once more after the pause.
                self.missed = MISSED_MOST - 1;
                self.rest(len);
            }
            return;
        }
        self.missed = 0;
        let least = LEAST.min(most);
        let length = self.length.unwrap_or(most);
        let next = if accepted == drafted { length + FASTER } else { length.saturating_sub(1) };
        self.length = Some(next.clamp(least, most));
        if accepted > 0 {
            self.trust = (self.trust + 1).min(TRUST_MOST);
            if self.trust >= TRUST_AT_FIRST {
                self.pause = PAUSE;
            }
            return;
        }
        self.trust = self.trust.saturating_sub(1);
        if self.trust == 0 {
            self.trust = TRUST_AGAIN;
            self.length = Some(least);
            self.rest(len);
        }
    }

    /// Pauses drafting.
    fn rest(&mut self, len: u32) {
        self.resumes_at = len.saturating_add(self.pause);
        self.pause = (self.pause * 2).min(PAUSE_MOST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Generates `tokens` tokens with drafts whose first `right` tokens are right; returns the
    /// steps, the drafted tokens and the final pace.
    fn run(tokens: u32, most: u32, right: impl Fn(u32) -> u32) -> (u32, u32, DraftPace) {
        let (mut pace, mut len, mut steps, mut drafted) = (DraftPace::default(), 0, 0, 0);
        while len < tokens {
            let draft = pace.length(len, most);
            let accepted = right(len).min(draft);
            steps += 1;
            drafted += draft;
            len += accepted + 1;
            if draft > 0 {
                pace.verified((draft, accepted), most, len);
            }
        }
        (steps, drafted, pace)
    }

    #[test]
    fn drafts_that_are_right_stay_as_long_as_they_may_be() {
        assert_eq!(run(600, 5, |_| 5).0, 100);
        assert_eq!(run(100, 1, |_| 1).0, 50);
    }

    #[test]
    fn drafts_that_are_wrong_are_all_but_given_up() {
        let (steps, drafted, _) = run(2000, 5, |_| 0);
        assert_eq!(steps, 2000);
        // Four drafts at first, then two of two tokens after each pause of 16, 32, .. 512.
        assert!((20..60).contains(&drafted), "{drafted}");
    }

    #[test]
    fn drafts_become_as_long_as_what_is_right() {
        for (right, between) in [(1, 2..=3), (3, 3..=5)] {
            let (_, _, pace) = run(1000, 12, |_| right);
            let length = pace.length(2000, 12);
            assert!(between.contains(&length), "{length} tokens where {right} are right");
        }
    }

    #[test]
    fn a_draft_model_that_does_not_catch_up_is_asked_ever_less() {
        let (mut pace, mut asked) = (DraftPace::default(), 0);
        for len in 0..5000 {
            if pace.length(len, 4) > 0 {
                asked += 1;
                pace.verified((0, 0), 4, len);
            }
        }
        assert!((MISSED_MOST..60).contains(&asked), "{asked}");
        // Once it has caught up, it drafts the maximum.
        assert_eq!(pace.length(10_000, 4), 4);
    }

    #[test]
    fn a_text_that_the_draft_model_knows_again_is_drafted_again() {
        let (_, _, pace) = run(3000, 8, |len| if len < 1000 { 0 } else { 8 });
        assert_eq!(pace.length(5000, 8), 8);
        assert_eq!(pace.pause, PAUSE);
    }
}
