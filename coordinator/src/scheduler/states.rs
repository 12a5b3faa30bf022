//! PURE: which states of linear attention are kept for sequences that begin alike. Mechanism only,
//! as in `blocks`: the scheduler decides when one is kept.
//!
//! K and V of a prefix are in its blocks, whatever comes behind it. A state is that of one length
//! alone: a sequence begins with a prefix of which the blocks are found and the state is kept.
//! States are large, so few are kept, the most recently used. Each belongs to a block that the
//! state comes right behind, by the name under which the block's content is kept (`blocks`): names
//! are never reused, so a state whose block is lost is never found, and its place is reused in its
//! turn.
//!
//! Workers copy a kept state before they compute a step and keep one after it. So a place that is
//! written in the step being planned is neither found nor reused before the next.
use std::collections::{BTreeMap, HashMap};

use shared::ids::StateId;

use super::blocks::Prefix;
use super::sequence::Sequence;
use super::{Scheduler, SchedulerConfig};

/// It is not worth a step of its own to keep what takes fewer tokens to compute.
const TOKENS_MIN: u32 = 64;
/// While a sequence decodes, its state is kept whenever it has so many tokens more, at least.
const DECODED: u32 = 64;

/// The kept states of one replica. Every rank has the same.
#[derive(Clone, Debug, Default)]
pub struct KeptStates {
    places: Vec<Place>,
    /// Unused ones.
    free: Vec<u32>,
    /// Those that can be found, by the name of the block before.
    by_name: HashMap<u64, u32>,
    /// Those that can be reused, by when they were used last.
    by_use: BTreeMap<u64, u32>,
    uses: u64,
    /// Those written in the step being planned.
    written: Vec<u32>,
    gains: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Place {
    holds: Holds,
    /// Its key in `by_use`, if it is there.
    used: u64,
    is_written: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Holds {
    #[default]
    Nothing,
    /// A state whose tokens are not all known yet.
    Unnamed,
    /// The state behind the block of this name.
    Named(u64),
}

impl KeptStates {
    /// Creates `count` places, all unused.
    #[must_use]
    pub fn new(count: u32) -> Self {
        let places = vec![Place::default(); count as usize];
        Self { places, free: (0..count).rev().collect(), ..Self::default() }
    }

    /// Number of times that a state became findable: each may change how much a sequence finds.
    #[must_use]
    pub fn gains(&self) -> u64 {
        self.gains
    }

    /// Begins another step: what was written in the last one can be found and reused.
    pub fn begin_step(&mut self) {
        while let Some(place) = self.written.pop() {
            self.places[place as usize].is_written = false;
            match self.places[place as usize].holds {
                Holds::Nothing => self.free.push(place),
                Holds::Unnamed => {}
                Holds::Named(_) => {
                    self.gains += 1;
                    self.touch(place);
                }
            }
        }
    }

    /// Finds the state behind a block, given the prefix that comes of it.
    #[must_use]
    pub fn find(&self, prefix: Prefix) -> Option<StateId> {
        let Prefix::Kept(name) = prefix else { return None };
        let place = *self.by_name.get(&name)?;
        (!self.places[place as usize].is_written).then_some(StateId(place))
    }

    /// Notes that a state that was found is used.
    pub fn use_again(&mut self, StateId(place): StateId) {
        self.touch(place);
    }

    /// Takes a place to be written in this step: an unused one, or the one not used for longest.
    pub fn take(&mut self) -> Option<StateId> {
        let place = match self.free.pop() {
            Some(place) => place,
            None => self.by_use.pop_first()?.1,
        };
        let taken = &mut self.places[place as usize];
        if let Holds::Named(name) = taken.holds {
            self.by_name.remove(&name);
        }
        *taken = Place { holds: Holds::Unnamed, used: 0, is_written: true };
        self.written.push(place);
        Some(StateId(place))
    }

    /// Makes a place that was taken findable, behind the block that this prefix comes of; gives it
    /// back if there is such a state.
    pub fn name(&mut self, StateId(place): StateId, prefix: Prefix) {
        debug_assert_eq!(self.places[place as usize].holds, Holds::Unnamed);
        match prefix {
            Prefix::Kept(name) if !self.by_name.contains_key(&name) => {
                self.by_name.insert(name, place);
                self.places[place as usize].holds = Holds::Named(name);
                if !self.places[place as usize].is_written {
                    self.gains += 1;
                    self.touch(place);
                }
            }
            _ => self.give_back(StateId(place)),
        }
    }

    /// Gives back a place that was taken and not named.
    pub fn give_back(&mut self, StateId(place): StateId) {
        self.clear(place);
    }

    /// Makes the state behind a block unfindable, if there is one.
    pub fn forget(&mut self, prefix: Prefix) {
        let Prefix::Kept(name) = prefix else { return };
        if let Some(place) = self.by_name.remove(&name) {
            self.clear(place);
        }
    }

    fn clear(&mut self, place: u32) {
        let cleared = &mut self.places[place as usize];
        cleared.holds = Holds::Nothing;
        if !cleared.is_written {
            self.by_use.remove(&cleared.used);
            self.free.push(place);
        }
    }

    fn touch(&mut self, place: u32) {
        let touched = &mut self.places[place as usize];
        if touched.is_written {
            return;
        }
        self.uses += 1;
        self.by_use.remove(&touched.used);
        touched.used = self.uses;
        self.by_use.insert(self.uses, place);
    }
}

/// What a sequence has of kept states, since its admission.
#[derive(Clone, Debug, Default)]
pub(super) struct OwnStates {
    /// Lengths at which a share of its prompt ends, so that the state there is kept: 0 for none.
    ends: [u32; 2],
    /// Tokens that it had when it was admitted.
    admitted: u32,
    /// States written whose tokens were not all known when it last had any: the length, and where.
    unnamed: Vec<(u32, StateId)>,
    /// Blocks behind which it has found or left a state.
    named: Vec<Prefix>,
    /// The last one that it left while it decoded: the next takes its place.
    decoded: Option<Prefix>,
}

impl OwnStates {
    /// The first length behind `computed` at which a share has to end.
    fn next_end(&self, computed: u32) -> Option<u32> {
        self.ends.into_iter().filter(|end| *end > computed).min()
    }
}

/// Gives places back whose states will not be named.
pub(super) fn drop_unnamed(states: &mut KeptStates, seq: &mut Sequence) {
    seq.states.unnamed.drain(..).for_each(|(_, place)| states.give_back(place));
}

/// Makes the states that a sequence has found or left unfindable.
pub(super) fn forget_own(states: &mut KeptStates, seq: &mut Sequence) {
    seq.states.named.drain(..).for_each(|named| states.forget(named));
    drop_unnamed(states, seq);
}

/// Names a state that was kept behind the sequence's last block that is findable.
pub(super) fn name_kept(states: &mut KeptStates, seq: &mut Sequence, config: &SchedulerConfig) {
    let (end, own) = (seq.kept * config.block_size, &mut seq.states);
    let Some(at) = own.unnamed.iter().position(|(length, _)| *length == end) else { return };
    let (_, place) = own.unnamed.swap_remove(at);
    states.name(place, seq.prefix);
    own.named.push(seq.prefix);
    if end > own.admitted {
        own.decoded = Some(seq.prefix);
    }
}

impl Scheduler {
    /// Whether sequences have states of which some are kept.
    pub(super) fn keeps_states(&self) -> bool {
        self.config.prefix_caching && self.config.prefix_states.is_some()
    }

    /// Cuts the blocks found for a sequence to those behind which a state is kept, if the model has
    /// states.
    pub(super) fn cut_to_state(&mut self) {
        self.found_state = None;
        if !self.keeps_states() {
            self.found_blocks = 0;
            return;
        }
        self.found_blocks = self.found.len() as u32;
        while let Some(last) = self.found.last() {
            self.found_state = self.states.find(last.prefix);
            if self.found_state.is_some() {
                return;
            }
            self.found.pop();
        }
    }

    /// Decides where shares of a sequence that is admitted end so that its state can be kept, which
    /// `cut_to_state` has been called for and which has its blocks.
    pub(super) fn decide_ends(&mut self, slot: usize) {
        if !self.keeps_states() {
            return;
        }
        let (size, found) = (self.config.block_size, self.found_blocks);
        let Some(seq) = &mut self.sequences[slot] else { return };
        let (tokens, begin) = (seq.tokens.len() as u32, seq.kept * size);
        seq.states = OwnStates { admitted: tokens, ..OwnStates::default() };
        if let Some(state) = self.found_state {
            self.states.use_again(state);
            seq.states.named.push(seq.prefix);
        }
        if !seq.publishes || self.config.prefix_states == Some(0) {
            return;
        }
        // Others had as much in common with it, of which no state was kept. And whatever continues
        // it has all of it in common; its last token is computed anyway.
        let shared = found * size;
        let whole = (tokens - 1) / size * size;
        let from = if shared >= begin + TOKENS_MIN { shared } else { begin };
        if from > begin {
            seq.states.ends[0] = shared;
        }
        if whole >= from + TOKENS_MIN {
            seq.states.ends[1] = whole;
        }
    }

    /// Bounds a share of a sequence by the next length at which its state is to be kept.
    pub(super) fn up_to_end(&self, slot: usize, count: u32) -> u32 {
        let Some(seq) = &self.sequences[slot] else { return count };
        let end = seq.states.next_end(seq.computed);
        end.map_or(count, |end| count.min(end - seq.computed))
    }

    /// Returns where a sequence's state after a share up to `end` is to be kept, if it is.
    pub(super) fn keeps_at(&mut self, slot: usize, end: u32) -> Option<StateId> {
        if !self.keeps_states() || !end.is_multiple_of(self.config.block_size) {
            return None;
        }
        let seq = self.sequences[slot].as_mut()?;
        let own = &mut seq.states;
        // Blocks of any size: the first end in each stretch of so many tokens.
        let decodes = end > own.admitted && end % DECODED < self.config.block_size;
        if !seq.publishes || !(own.ends.contains(&end) || decodes) {
            return None;
        }
        if let Some(before) = own.decoded.take_if(|_| decodes) {
            own.named.retain(|named| *named != before);
            self.states.forget(before);
        }
        let place = self.states.take()?;
        own.unnamed.push((end, place));
        Some(place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn behind(name: u64) -> Prefix {
        Prefix::Kept(name)
    }

    #[test]
    fn what_a_step_writes_is_neither_found_nor_reused_in_it() {
        let mut states = KeptStates::new(2);
        states.begin_step();
        let (first, second) = (states.take().unwrap(), states.take().unwrap());
        states.name(first, behind(1));
        states.give_back(second);
        assert_eq!((states.find(behind(1)), states.take()), (None, None));
        assert_eq!(states.gains(), 0);
        states.begin_step();
        assert_eq!((states.find(behind(1)), states.gains()), (Some(first), 1));
        assert_eq!(states.take(), Some(second), "the unused one");
        states.begin_step();
        // Nobody knows yet what the second one holds.
        assert_eq!((states.take(), states.find(behind(1))), (Some(first), None));
        states.name(second, behind(2));
        assert_eq!((states.find(behind(2)), states.gains()), (Some(second), 2));
    }

    #[test]
    fn the_first_state_behind_a_block_stays_until_it_is_forgotten() {
        let mut states = KeptStates::new(2);
        let kept = [0, 1].map(|_| states.take().unwrap());
        kept.into_iter().for_each(|place| states.name(place, behind(1)));
        states.begin_step();
        assert_eq!(states.find(behind(1)), Some(kept[0]));
        states.forget(behind(1));
        states.forget(behind(1));
        states.forget(Prefix::Start { salt: 0, adapter: 0 });
        assert_eq!(states.find(behind(1)), None);
        assert_eq!([0, 1, 2].map(|_| states.take().is_some()), [true, true, false]);
    }

    #[test]
    fn the_one_not_used_for_longest_is_reused_first() {
        let mut states = KeptStates::new(3);
        let places = [1, 2, 3].map(|name| {
            let place = states.take().unwrap();
            states.name(place, behind(name));
            states.begin_step();
            place
        });
        states.use_again(places[0]);
        assert_eq!(states.take(), Some(places[1]));
        states.give_back(places[1]);
        assert_eq!(states.take(), Some(places[2]), "not what this step may write");
    }
}
