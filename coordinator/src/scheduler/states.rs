//! PURE: which states of linear attention are kept for sequences that begin alike: where they are,
//! and when one is worth keeping.
//!
//! K and V of a prefix are in its blocks, whatever comes behind it. A state is that of one length
//! alone: a sequence begins with a prefix of which the blocks are found and the state is kept.
//! States are large, so few are kept, the most recently used. Each belongs to a block that the
//! state comes right behind, by the name under which the block's content is kept (`blocks`): names
//! are never reused, so a state is never found again once its block is lost.
//!
//! Workers copy a kept state before they compute a step and keep one after it. So a place that is
//! written in the step being planned is neither found nor reused before the next.
use std::collections::{BTreeMap, HashMap};

use shared::ids::StateId;
use shared::protocol::KeptState;

use super::blocks::Prefix;
use super::sequence::Sequence;
use super::{Scheduler, SchedulerConfig};

/// It is not worth a step of its own to keep what takes fewer tokens to compute.
const TOKENS_MIN: u32 = 64;
/// While a sequence decodes, its state is kept about whenever it has so many tokens more.
const DECODED: u32 = 64;
/// Chat templates end a prompt with up to so many tokens that the next turn's prompt does not have
/// in their place: a model that reasons begins with a mark that is left out of the history.
const ENDS_OTHERWISE: u32 = 4;

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
    /// Number of those that sequences hold.
    held: u32,
    gains: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Place {
    holds: Holds,
    /// Its key in `by_use`, if it is there.
    used: u64,
    is_written: bool,
    /// Whether a sequence that decodes holds it, for its latest state.
    is_held: bool,
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

    /// Whether every place is unused or can be reused, but for those that were written last.
    #[must_use]
    pub fn is_at_rest(&self) -> bool {
        let here = |place: &&u32| {
            let Place { holds, is_written, .. } = self.places[**place as usize];
            is_written && holds != Holds::Unnamed
        };
        let written = self.written.iter().filter(here).count();
        self.held == 0 && self.free.len() + self.by_use.len() + written == self.places.len()
    }

    /// Begins another step: what was written in the last one can be found and reused.
    pub fn begin_step(&mut self) {
        let mut written = std::mem::take(&mut self.written);
        for place in written.drain(..) {
            let Place { holds, is_written, .. } = &mut self.places[place as usize];
            *is_written = false;
            match holds {
                Holds::Nothing => self.free.push(place),
                Holds::Unnamed => {}
                Holds::Named(_) => {
                    self.gains += 1;
                    self.touch(place);
                }
            }
        }
        // Empty; for its allocation.
        self.written = written;
    }

    /// Finds the state behind a block, given the prefix that comes of it.
    #[must_use]
    pub fn find(&self, prefix: Prefix) -> Option<StateId> {
        let place = self.place_of(prefix)?;
        (!self.places[place as usize].is_written).then_some(StateId(place))
    }

    /// Whether the state behind a block is kept, or will be once this step is computed.
    #[must_use]
    pub fn has(&self, prefix: Prefix) -> bool {
        self.place_of(prefix).is_some()
    }

    fn place_of(&self, prefix: Prefix) -> Option<u32> {
        let Prefix::Kept(name) = prefix else { return None };
        self.by_name.get(&name).copied()
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
        *taken = Place { holds: Holds::Unnamed, is_written: true, ..Place::default() };
        self.written.push(place);
        Some(StateId(place))
    }

    /// Takes a place likewise, and holds it: it is not reused before it is let go. No more than
    /// half of all are held.
    pub fn hold(&mut self) -> Option<StateId> {
        if self.held >= self.places.len() as u32 / 2 {
            return None;
        }
        let StateId(place) = self.take()?;
        self.places[place as usize].is_held = true;
        self.held += 1;
        Some(StateId(place))
    }

    /// Makes a place that was taken findable, behind the block that this prefix comes of. If there
    /// is such a state already, it gives the place back and returns false.
    pub fn name(&mut self, StateId(place): StateId, prefix: Prefix) -> bool {
        debug_assert_eq!(self.places[place as usize].holds, Holds::Unnamed);
        match prefix {
            Prefix::Kept(name) if !self.by_name.contains_key(&name) => {
                self.by_name.insert(name, place);
                self.places[place as usize].holds = Holds::Named(name);
                if !self.places[place as usize].is_written {
                    self.gains += 1;
                    self.touch(place);
                }
                true
            }
            _ => {
                self.clear(place);
                false
            }
        }
    }

    /// Gives back a place that was taken and not named.
    pub fn give_back(&mut self, StateId(place): StateId) {
        self.clear(place);
    }

    /// Lets the state behind a block go, if one is there that is held: it is the latest used.
    pub fn let_go(&mut self, prefix: Prefix) {
        let Some(place) = self.place_of(prefix) else { return };
        if std::mem::take(&mut self.places[place as usize].is_held) {
            self.held -= 1;
            self.touch(place);
        }
    }

    /// Makes the state behind a block unfindable, if there is one.
    pub fn forget(&mut self, prefix: Prefix) {
        let Prefix::Kept(name) = prefix else { return };
        if let Some(place) = self.by_name.remove(&name) {
            self.clear(place);
        }
    }

    /// Makes all states unfindable.
    pub fn forget_all(&mut self) {
        for (_, place) in std::mem::take(&mut self.by_name) {
            self.clear(place);
        }
        // In an order that does not depend on hashing.
        self.free.sort_unstable_by(|a, b| b.cmp(a));
    }

    fn clear(&mut self, place: u32) {
        let cleared = &mut self.places[place as usize];
        cleared.holds = Holds::Nothing;
        self.held -= u32::from(std::mem::take(&mut cleared.is_held));
        if !cleared.is_written {
            self.by_use.remove(&cleared.used);
            self.free.push(place);
        }
    }

    fn touch(&mut self, place: u32) {
        let touched = &mut self.places[place as usize];
        if touched.is_written || touched.is_held {
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
    /// Tokens that it had when it was admitted; its states behind more are kept, too, if it is set.
    admitted: Option<u32>,
    /// Where a state was written whose last token was not known then, and the length.
    unnamed: Option<(u32, StateId)>,
    /// Blocks behind which it has found or left a state.
    named: Vec<Prefix>,
    /// The one of these that holds a place, as it decodes.
    held: Option<Prefix>,
}

impl OwnStates {
    /// The first length behind `computed` at which a share has to end.
    fn next_end(&self, computed: u32) -> Option<u32> {
        self.ends.into_iter().filter(|end| *end > computed).min()
    }
}

/// Lets go of a sequence's places: it no longer runs.
pub(super) fn leave(states: &mut KeptStates, seq: &mut Sequence) {
    if let Some((_, place)) = seq.states.unnamed.take() {
        states.give_back(place);
    }
    if let Some(held) = seq.states.held.take() {
        states.let_go(held);
    }
}

/// Makes the states that a sequence has found or left unfindable.
pub(super) fn forget_own(states: &mut KeptStates, seq: &mut Sequence) {
    seq.states.named.drain(..).for_each(|named| states.forget(named));
    seq.states.held = None;
    leave(states, seq);
}

/// Lets go of a sequence's places, and ends no more of its shares for states: it keeps none.
pub(super) fn stop(states: &mut KeptStates, seq: &mut Sequence) {
    leave(states, seq);
    seq.states = OwnStates::default();
}

/// Names a state that was kept behind the sequence's last block that is findable.
pub(super) fn name_kept(states: &mut KeptStates, seq: &mut Sequence, config: &SchedulerConfig) {
    let (end, own) = (seq.kept * config.block_size, &mut seq.states);
    if let Some((_, place)) = own.unnamed.take_if(|(length, _)| *length == end)
        && states.name(place, seq.prefix)
    {
        own.named.push(seq.prefix);
        own.held = Some(seq.prefix);
    }
}

impl Scheduler {
    /// Whether sequences have states of which some are kept.
    fn keeps_states(&self) -> bool {
        self.config.prefix_caching && self.config.prefix_states.is_some()
    }

    /// Cuts the blocks found for a sequence to those behind which a state is kept, if the model has
    /// states.
    pub(super) fn cut_to_state(&mut self) {
        self.found_state = None;
        self.found_blocks = self.found.len() as u32;
        self.found_soon = 0;
        if !self.keeps_states() {
            return;
        }
        while let Some(last) = self.found.last() {
            self.found_state = self.states.find(last.prefix);
            if self.found_state.is_some() {
                return;
            }
            if self.states.has(last.prefix) {
                self.found_soon = self.found_soon.max(self.found.len() as u32);
            }
            self.found.pop();
        }
    }

    /// Whether a sequence that was looked up finds enough more in the next step: the step being
    /// planned leaves a state behind some of its blocks. So it is with the choices of a request,
    /// and with requests that come together and begin alike.
    pub(super) fn finds_more_soon(&self) -> bool {
        let more = self.found_soon.saturating_sub(self.found.len() as u32);
        more.saturating_mul(self.config.block_size) >= TOKENS_MIN
    }

    /// Decides where shares of a sequence that is admitted end so that its state can be kept, which
    /// `cut_to_state` has been called for and which has its blocks. Returns the state that it
    /// begins with.
    pub(super) fn decide_ends(&mut self, slot: usize) -> Option<KeptState> {
        if !self.keeps_states() {
            return None;
        }
        let (size, found) = (self.config.block_size, self.found_blocks);
        let seq = self.sequences[slot].as_mut()?;
        let (tokens, begin) = (seq.tokens.len() as u32, seq.kept * size);
        seq.states = OwnStates::default();
        if let Some(state) = self.found_state {
            self.states.use_again(state);
            seq.states.named.push(seq.prefix);
        }
        let begins_with = self.found_state.map(|place| KeptState { seq: seq.id, place });
        // Who has to be computed from the first token on would not use it either.
        if !seq.publishes || !seq.may_be_cached() || self.config.prefix_states == Some(0) {
            return begins_with;
        }
        // Others had as much in common with it, of which no state was kept.
        let shared = found * size;
        let from = if shared >= begin + TOKENS_MIN { shared } else { begin };
        if from > begin {
            seq.states.ends[0] = shared;
        }
        // Whatever continues it has nearly all of it in common.
        let whole = tokens.saturating_sub(ENDS_OTHERWISE) / size * size;
        if seq.max_tokens > 0 {
            seq.states.admitted = Some(tokens);
            if whole >= from + TOKENS_MIN {
                seq.states.ends[1] = whole;
            }
        }
        begins_with
    }

    /// Bounds a share of a sequence by the next length at which its state is to be kept.
    pub(super) fn up_to_end(&self, slot: usize, count: u32) -> u32 {
        let Some(seq) = &self.sequences[slot] else { return count };
        let end = seq.states.next_end(seq.computed);
        end.map_or(count, |end| count.min(end - seq.computed))
    }

    /// Returns where a sequence's state after its planned share is to be kept, if it is. What is
    /// known of its blocks is findable already.
    pub(super) fn keep_state(&mut self, slot: usize) -> Option<KeptState> {
        let size = self.config.block_size;
        let seq = self.sequences[slot].as_mut()?;
        let (end, own) = (seq.computed, &mut seq.states);
        if !seq.publishes || !end.is_multiple_of(size) {
            return None;
        }
        let (is_known, is_end) = (seq.kept * size == end, own.ends.contains(&end));
        // Blocks of any size: about one in so many tokens.
        let decodes = own.admitted.is_some_and(|admitted| end > admitted);
        let decodes = decodes && end % DECODED < size && own.unnamed.is_none();
        if !is_end && !decodes || is_known && self.states.has(seq.prefix) {
            return None;
        }
        let place = if is_end {
            self.states.take()?
        } else {
            // Now, not once the next is named: it takes the same place.
            if let Some(before) = own.held.take() {
                own.named.retain(|named| *named != before);
                self.states.forget(before);
            }
            self.states.hold()?
        };
        if is_known {
            self.states.name(place, seq.prefix);
            own.named.push(seq.prefix);
            own.held = own.held.or((!is_end).then_some(seq.prefix));
        } else {
            own.unnamed = Some((end, place));
        }
        Some(KeptState { seq: seq.id, place })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn behind(name: u64) -> Prefix {
        Prefix::Kept(name)
    }

    #[test]
    fn what_a_step_writes_is_neither_found_nor_reused_in_it() {
        let mut states = KeptStates::new(2);
        states.begin_step();
        let (first, second) = (states.take().unwrap(), states.take().unwrap());
        assert!(states.name(first, behind(1)));
        states.give_back(second);
        assert_eq!((states.find(behind(1)), states.take()), (None, None));
        assert!(states.has(behind(1)) && states.is_at_rest());
        assert_eq!(states.gains(), 0);
        states.begin_step();
        assert_eq!((states.find(behind(1)), states.gains()), (Some(first), 1));
        assert_eq!(states.take(), Some(second), "the unused one");
        states.begin_step();
        // Nobody knows yet what the second one holds.
        assert!(!states.is_at_rest());
        assert_eq!((states.take(), states.find(behind(1))), (Some(first), None));
        assert!(states.name(second, behind(2)));
        assert_eq!((states.find(behind(2)), states.gains()), (Some(second), 2));
    }

    #[test]
    fn the_first_state_behind_a_block_stays_until_it_is_forgotten() {
        let mut states = KeptStates::new(2);
        let kept = [0, 1].map(|_| states.take().unwrap());
        assert_eq!(kept.map(|place| states.name(place, behind(1))), [true, false]);
        states.begin_step();
        assert_eq!(states.find(behind(1)), Some(kept[0]));
        states.forget(behind(1));
        states.forget(behind(1));
        states.forget(Prefix::Start { salt: 0, adapter: 0 });
        assert_eq!(states.find(behind(1)), None);
        assert_eq!([0, 1, 2].map(|_| states.take().is_some()), [true, true, false]);
    }

    #[test]
    fn what_is_held_is_not_reused_and_is_half_at_most() {
        let mut states = KeptStates::new(5);
        let held = [1, 2].map(|name| {
            let place = states.hold().unwrap();
            assert!(states.name(place, behind(name)));
            place
        });
        assert_eq!(states.hold(), None);
        states.begin_step();
        assert_eq!([0, 1, 2, 3].map(|_| states.take().is_some()), [true, true, true, false]);
        assert_eq!(states.find(behind(2)), Some(held[1]));
        states.let_go(behind(2));
        assert_eq!(states.take(), Some(held[1]));
        states.forget(behind(1));
        assert_eq!(states.hold(), Some(held[0]));
    }

    proptest! {
        /// Compares with a list of what is kept, the one used last at its end.
        #[test]
        fn it_agrees_with_a_naive_list(ops in prop::collection::vec((0u8..9, 0u64..9), 1..200)) {
            const COUNT: u32 = 5;
            let mut states = KeptStates::new(COUNT);
            let mut kept: Vec<u64> = Vec::new();
            let (mut held, mut unnamed) = (BTreeSet::new(), Vec::new());
            let mut written: Vec<u64> = Vec::new();
            for (op, name) in ops {
                match op {
                    0 | 1 if !kept.contains(&name) => {
                        let holds = op == 1;
                        let may = !holds || held.len() < COUNT as usize / 2;
                        let reusable = |it: &&u64| !held.contains(*it) && !written.contains(*it);
                        let is_full = kept.len() + unnamed.len() == COUNT as usize;
                        let oldest = kept.iter().find(reusable).copied();
                        let place = if holds { states.hold() } else { states.take() };
                        // A place that was given back in this step is not free yet.
                        if place.is_none() && may && !is_full && oldest.is_none() {
                            continue;
                        }
                        prop_assert_eq!(place.is_some(), may && (!is_full || oldest.is_some()));
                        let Some(place) = place else { continue };
                        if let Some(oldest) = oldest.filter(|it| states.find(behind(*it)).is_none()) {
                            kept.retain(|it| *it != oldest);
                        }
                        prop_assert!(states.name(place, behind(name)));
                        kept.push(name);
                        written.push(name);
                        if holds {
                            held.insert(name);
                        }
                    }
                    2 => unnamed.extend(states.take().inspect(|_| {
                        kept.retain(|it| states.has(behind(*it)));
                    })),
                    3 => unnamed.drain(..).for_each(|place| states.give_back(place)),
                    4 => {
                        states.forget(behind(name));
                        kept.retain(|it| *it != name);
                        held.remove(&name);
                        written.retain(|it| *it != name);
                    }
                    5 => {
                        states.let_go(behind(name));
                        if held.remove(&name) && !written.contains(&name) {
                            kept.retain(|it| *it != name);
                            kept.push(name);
                        }
                    }
                    6 => {
                        if let Some(found) = states.find(behind(name)) {
                            states.use_again(found);
                            if !held.contains(&name) {
                                kept.retain(|it| *it != name);
                                kept.push(name);
                            }
                        }
                    }
                    _ => {
                        states.begin_step();
                        for name in written.drain(..) {
                            kept.retain(|it| *it != name);
                            kept.push(name);
                        }
                    }
                }
                for name in 0..9 {
                    let found = kept.contains(&name) && !written.contains(&name);
                    prop_assert_eq!(states.has(behind(name)), kept.contains(&name));
                    prop_assert_eq!(states.find(behind(name)).is_some(), found);
                }
            }
            unnamed.drain(..).for_each(|place| states.give_back(place));
            held.iter().for_each(|name| states.let_go(behind(*name)));
            prop_assert!(states.is_at_rest());
            states.begin_step();
            prop_assert!(states.is_at_rest());
        }
    }
}
