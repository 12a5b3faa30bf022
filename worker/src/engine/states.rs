//! PURE: which states of linear attention are in use. A sequence has one from its admission until
//! it is forgotten; it begins anew at position 0, whatever is in it, or with a copy of a kept one.
//! Behind those of sequences come the kept ones, whose places the plans name.
use shared::ids::{SeqId, StateId};
use shared::protocol::{KeptState, SequenceStep, StepPlan};

/// The states of a rank.
#[derive(Debug, Default)]
pub(super) struct StateSlots {
    /// Unused ones, the next one last.
    free: Vec<u32>,
    count: u32,
    /// Of each place for kept ones, how many tokens the state there has seen, if there is any.
    kept: Vec<Option<u32>>,
}

impl StateSlots {
    /// Makes `count` states, all unused, and places for `kept` kept ones.
    pub(super) fn reset(&mut self, count: u32, kept: u32) {
        self.count = count;
        self.free.clear();
        self.free.extend((0..count).rev());
        self.kept.clear();
        self.kept.resize(kept as usize, None);
    }

    /// Takes an unused state.
    ///
    /// # Errors
    /// There is none.
    pub(super) fn take(&mut self) -> Result<u32, String> {
        let none = || format!("has no state: all {} are in use", self.count);
        self.free.pop().ok_or_else(none)
    }

    /// Gives a state back.
    pub(super) fn give_back(&mut self, state: u32) {
        self.free.push(state);
    }

    /// Returns the state in a place for kept ones, and how many tokens it has seen.
    ///
    /// # Errors
    /// There is no such place.
    fn at(&self, StateId(place): StateId) -> Result<(u32, Option<u32>), String> {
        match self.kept.get(place as usize) {
            Some(seen) => Ok((self.count.saturating_add(place), *seen)),
            None => Err(format!("names state {place} of {} kept ones", self.kept.len())),
        }
    }

    /// Returns the kept state that a new sequence begins with, if it does.
    ///
    /// # Errors
    /// It has not seen just the tokens before the sequence's share; there is no such share; the
    /// sequence is named twice.
    pub(super) fn begins_with(&self, plan: &StepPlan, seq: SeqId) -> Result<Option<u32>, String> {
        let mut named = plan.begin_with.iter().filter(|kept| kept.seq == seq);
        let Some(kept) = named.next() else { return Ok(None) };
        if named.next().is_some() {
            return Err("begins with two states".to_owned());
        }
        let (state, seen) = self.at(kept.place)?;
        let share = plan.sequences.iter().find(|share| share.seq == seq);
        let start = share.ok_or("begins with a state, but is not computed")?.start;
        match seen == Some(start) {
            true => Ok(Some(state)),
            false => Err(format!(
                "is to be computed from {start} with state {}, which has seen {}",
                kept.place.0,
                seen.map_or("nothing".to_owned(), |seen| format!("{seen} tokens"))
            )),
        }
    }

    /// Checks which states a step's shares leave.
    ///
    /// # Errors
    /// A sequence that the step does not compute; a place that does not exist or comes twice.
    pub(super) fn check(&self, keep: &[KeptState], shares: &[SequenceStep]) -> Result<(), String> {
        for (at, KeptState { seq, place }) in keep.iter().enumerate() {
            self.at(*place).map_err(|message| format!("{seq} {message}"))?;
            if !shares.iter().any(|share| share.seq == *seq) {
                return Err(format!("{seq} is not computed, but its state is to be kept"));
            }
            if keep[..at].iter().any(|other| other.place == *place) {
                return Err(format!("two states are to be kept in {place}"));
            }
        }
        Ok(())
    }

    /// Notes that the state in a place has seen so many tokens, once the step is computed; returns
    /// it.
    pub(super) fn keep(&mut self, StateId(place): StateId, seen: u32) -> Option<u32> {
        *self.kept.get_mut(place as usize)? = Some(seen);
        Some(self.count.saturating_add(place))
    }
}

#[cfg(test)]
mod tests {
    use shared::ids::SeqId;
    use shared::protocol::Drafts;

    use super::*;

    #[test]
    fn a_state_is_used_once_at_a_time() {
        let mut states = StateSlots::default();
        assert!(states.take().is_err());
        states.reset(2, 0);
        assert_eq!((states.take(), states.take()), (Ok(0), Ok(1)));
        assert!(states.take().unwrap_err().contains("all 2 are in use"));
        states.give_back(0);
        assert_eq!(states.take(), Ok(0));
        states.reset(1, 0);
        assert_eq!(states.take(), Ok(0));
        assert!(states.take().is_err());
    }

    fn share(seq: u64, start: u32) -> SequenceStep {
        SequenceStep {
            seq: SeqId(seq),
            start,
            count: 1,
            new_blocks: Vec::new(),
            sample: true,
            masked: false,
            drafts: Drafts::none(),
        }
    }

    fn kept(seq: u64, place: u32) -> KeptState {
        KeptState { seq: SeqId(seq), place: StateId(place) }
    }

    #[test]
    fn what_is_kept_has_a_place_of_its_own_and_is_computed() {
        let mut states = StateSlots::default();
        states.reset(4, 2);
        let shares = [share(7, 0), share(8, 0)];
        assert_eq!(states.check(&[kept(8, 0), kept(7, 1)], &shares), Ok(()));
        for (keep, words) in [
            ([kept(7, 1), kept(8, 2)], "names state 2 of 2"),
            ([kept(7, 1), kept(9, 0)], "is not computed"),
            ([kept(7, 1), kept(8, 1)], "two states are to be kept in state-1"),
        ] {
            let error = states.check(&keep, &shares).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn a_sequence_begins_with_a_state_that_has_seen_what_comes_before() {
        let mut states = StateSlots::default();
        states.reset(4, 3);
        assert_eq!((states.keep(StateId(1), 48), states.keep(StateId(3), 48)), (Some(5), None));
        let of = |states: &StateSlots, sequences: Vec<SequenceStep>, begin_with: Vec<KeptState>| {
            let plan = StepPlan { sequences, begin_with, ..StepPlan::default() };
            states.begins_with(&plan, SeqId(7))
        };
        let begins = |start, all| of(&states, vec![share(8, 0), share(7, start)], all);
        assert_eq!(begins(48, vec![kept(8, 0), kept(7, 1)]), Ok(Some(5)));
        assert_eq!(begins(48, vec![kept(8, 1)]), Ok(None));
        for (result, words) in [
            (begins(32, vec![kept(7, 1)]), "from 32 with state 1, which has seen 48 tokens"),
            (begins(48, vec![kept(7, 0)]), "state 0, which has seen nothing"),
            (begins(48, vec![kept(7, 3)]), "names state 3 of 3 kept ones"),
            (begins(48, vec![kept(7, 1), kept(7, 1)]), "begins with two states"),
            (of(&states, vec![share(8, 48)], vec![kept(7, 1)]), "is not computed"),
        ] {
            let error = result.unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        // What an earlier cache had is no state of this one.
        states.reset(4, 3);
        assert!(of(&states, vec![share(7, 48)], vec![kept(7, 1)]).is_err());
    }
}
