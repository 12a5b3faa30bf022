//! PURE: which states of linear attention are in use. A sequence has one from its admission until
//! it is forgotten; it begins anew at position 0, whatever is in it, or with a copy of a kept one.
//! Behind those of sequences come the kept ones, whose places the plans name.
use shared::ids::StateId;
use shared::protocol::{KeptState, SequenceStep};

/// The states of a rank.
#[derive(Debug, Default)]
pub(super) struct StateSlots {
    /// Unused ones, the next one last.
    free: Vec<u32>,
    count: u32,
    kept: u32,
}

impl StateSlots {
    /// Makes `count` states, all unused, and places for `kept` kept ones.
    pub(super) fn reset(&mut self, count: u32, kept: u32) {
        (self.count, self.kept) = (count, kept);
        self.free.clear();
        self.free.extend((0..count).rev());
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

    /// Returns the state in a place for kept ones.
    ///
    /// # Errors
    /// There is no such place.
    pub(super) fn kept(&self, StateId(place): StateId) -> Result<u32, String> {
        match place < self.kept {
            true => Ok(self.count + place),
            false => Err(format!("names state {place} of {} kept ones", self.kept)),
        }
    }

    /// Checks which states a step's shares leave.
    ///
    /// # Errors
    /// A sequence that the step does not compute; a place that does not exist or comes twice.
    pub(super) fn check(&self, keep: &[KeptState], shares: &[SequenceStep]) -> Result<(), String> {
        for (at, KeptState { seq, place }) in keep.iter().enumerate() {
            self.kept(*place).map_err(|message| format!("{seq} {message}"))?;
            if !shares.iter().any(|share| share.seq == *seq) {
                return Err(format!("{seq} is not computed, but its state is to be kept"));
            }
            if keep[..at].iter().any(|other| other.place == *place) {
                return Err(format!("two states are to be kept in {place}"));
            }
        }
        Ok(())
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

    #[test]
    fn what_is_kept_has_a_place_of_its_own_and_is_computed() {
        let mut states = StateSlots::default();
        states.reset(4, 2);
        assert_eq!([0, 1].map(|place| states.kept(StateId(place))), [Ok(4), Ok(5)]);
        assert!(states.kept(StateId(2)).unwrap_err().contains("names state 2 of 2 kept ones"));
        let share = |seq| SequenceStep {
            seq: SeqId(seq),
            start: 0,
            count: 1,
            new_blocks: Vec::new(),
            sample: true,
            masked: false,
            drafts: Drafts::none(),
        };
        let keep = |seq, place| KeptState { seq: SeqId(seq), place: StateId(place) };
        let shares = [share(7), share(8)];
        assert_eq!(states.check(&[keep(8, 0), keep(7, 1)], &shares), Ok(()));
        for (keep, words) in [
            ([keep(7, 1), keep(8, 2)], "names state 2 of 2"),
            ([keep(7, 1), keep(9, 0)], "is not computed"),
            ([keep(7, 1), keep(8, 1)], "two states are to be kept in state-1"),
        ] {
            let error = states.check(&keep, &shares).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
