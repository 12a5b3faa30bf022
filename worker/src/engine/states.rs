//! PURE: which states of linear attention are in use. A sequence has one from its admission until
//! it is forgotten; it begins anew at position 0, whatever is in it.

/// The states of a rank.
#[derive(Debug, Default)]
pub(super) struct StateSlots {
    /// Unused ones, the next one last.
    free: Vec<u32>,
    count: u32,
}

impl StateSlots {
    /// Makes `count` states, all unused.
    pub(super) fn reset(&mut self, count: u32) {
        self.count = count;
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_used_once_at_a_time() {
        let mut states = StateSlots::default();
        assert!(states.take().is_err());
        states.reset(2);
        assert_eq!((states.take(), states.take()), (Ok(0), Ok(1)));
        assert!(states.take().unwrap_err().contains("all 2 are in use"));
        states.give_back(0);
        assert_eq!(states.take(), Ok(0));
        states.reset(1);
        assert_eq!(states.take(), Ok(0));
        assert!(states.take().is_err());
    }
}
