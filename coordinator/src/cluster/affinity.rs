//! PURE: which replica a request goes to: one that recently computed the beginning of its prompt,
//! if that saves more than the others' lower load, otherwise the best candidate.
//!
//! What a replica's KV cache really holds is its scheduler's business. This only remembers which
//! replica was given which beginnings, so a guess can be wrong; that costs a prefill and nothing
//! else.
use std::collections::{HashMap, VecDeque};

use shared::ids::ReplicaId;
use shared::mix::mix;

use super::candidates::{Candidate, Demand};

/// Tokens between two points at which a prompt's beginning is remembered.
const CHUNK: usize = 64;
/// Bounds of the number of beginnings remembered, which take less than 100 bytes each.
const REMEMBERED: (usize, usize) = (1 << 10, 1 << 18);
/// For the sake of a beginning, a request may go where so many more sequences are than elsewhere,
/// or half as many again, or half of a batch, whichever is most; or where so many more requests
/// wait, if it has to wait anyway.
const MORE_MAX: u32 = 4;

/// Beginnings of prompts, and the replica each was last given to.
#[derive(Debug)]
pub struct Affinity {
    max_num_seqs: u32,
    /// Maximum number of beginnings.
    remembered_max: usize,
    given: HashMap<u64, (ReplicaId, u64)>,
    /// In the order in which they were given; those given again are in it twice.
    order: VecDeque<(u64, u64)>,
    turn: u64,
}

impl Affinity {
    /// Remembers nothing yet; replicas run at most `max_num_seqs` sequences at a time.
    #[must_use]
    pub fn new(max_num_seqs: u32) -> Self {
        Self {
            max_num_seqs,
            remembered_max: REMEMBERED.0,
            given: HashMap::new(),
            order: VecDeque::new(),
            turn: 0,
        }
    }

    /// Remembers as much as KV caches that have room for so many tokens together can hold.
    pub fn set_room(&mut self, tokens: u64) {
        let chunks = usize::try_from(tokens / CHUNK as u64).unwrap_or(usize::MAX);
        self.remembered_max = chunks.clamp(REMEMBERED.0, REMEMBERED.1);
        self.forget_oldest();
    }

    /// Chooses a replica for a prompt and remembers it. If none serves, chooses a waiting one,
    /// since it may be back in a moment.
    pub fn route(
        &mut self,
        prompt: &[u32],
        salt: u64,
        candidates: &[Candidate],
        demand: &Demand,
    ) -> Option<ReplicaId> {
        let least = candidates.iter().min_by_key(|it| (!it.serving, it.rank(demand)))?;
        let beginnings: Vec<u64> = prompt
            .chunks_exact(CHUNK)
            .scan(salt, |hash, chunk| {
                *hash = mix(*hash, chunk);
                Some(*hash)
            })
            .collect();
        let mut chosen = least.replica;
        for (hash, matched) in beginnings.iter().zip(1..) {
            let Some((replica, _)) = self.given.get(hash) else { break };
            let gap = self.gap(matched, beginnings.len(), least);
            let found = candidates.iter().find(|candidate| candidate.replica == *replica);
            if found.is_some_and(|found| is_worth_it(found, least, matched, gap, demand)) {
                chosen = *replica;
            }
        }
        self.remember(beginnings, chosen);
        Some(chosen)
    }

    /// How many more sequences than elsewhere there may be where `matched` of `all` chunks are
    /// known. One for each chunk that need not be computed, less where most of the prompt has to
    /// be computed anyway: then little time is saved, and load is spread instead.
    fn gap(&self, matched: u64, all: usize, least: &Candidate) -> u32 {
        let most = MORE_MAX.max(least.load / 2).max(self.max_num_seqs / 2);
        let gap = (matched * matched).div_ceil((all as u64).max(1));
        u32::try_from(gap).unwrap_or(u32::MAX).min(most)
    }

    fn remember(&mut self, beginnings: Vec<u64>, replica: ReplicaId) {
        for hash in beginnings {
            self.turn += 1;
            self.given.insert(hash, (replica, self.turn));
            self.order.push_back((hash, self.turn));
        }
        self.forget_oldest();
    }

    fn forget_oldest(&mut self) {
        // Beginnings given again are skipped at their first place, so the list is at most twice the
        // bound.
        let max = self.remembered_max;
        while self.given.len() > max || self.order.len() > 2 * max {
            let Some((hash, turn)) = self.order.pop_front() else { return };
            if self.given.get(&hash).is_some_and(|(_, last)| *last == turn) {
                self.given.remove(&hash);
            }
        }
    }

    /// Forgets everything: all caches are empty.
    pub fn forget_all(&mut self) {
        self.given.clear();
        self.order.clear();
    }

    /// Forgets a replica whose cache is gone.
    pub fn forget(&mut self, replica: ReplicaId) {
        self.given.retain(|_, (given, _)| *given != replica);
    }
}

/// Whether a request goes to a replica that knows `matched` chunks of its prompt rather than to the
/// best one: not where it would wait while another could run it.
fn is_worth_it(
    found: &Candidate,
    least: &Candidate,
    matched: u64,
    gap: u32,
    demand: &Demand,
) -> bool {
    let known = u32::try_from(matched * CHUNK as u64).unwrap_or(u32::MAX);
    let begins = demand.begins.saturating_sub(known);
    if found.serving != least.serving {
        return false;
    }
    if found.starts(&Demand { begins, ..*demand }) {
        return found.load <= least.load.saturating_add(gap);
    }
    let queue_max = least.queued.saturating_add(gap.min(MORE_MAX));
    !least.starts(demand) && found.queued <= queue_max
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEMAND: Demand = Demand { sequences: 1, begins: 1, needed: 1, wanted: 1 };

    fn candidates(loads: &[u32], max_num_seqs: u32) -> Vec<Candidate> {
        let candidate = |(id, load): (usize, &u32)| Candidate {
            serving: *load < 1000,
            load: *load,
            free_seqs: max_num_seqs.saturating_sub(*load),
            ..Candidate::unknown(ReplicaId(id as u32))
        };
        loads.iter().enumerate().map(candidate).collect()
    }

    fn prompt(same: u32, tail: u32, tail_len: u32) -> Vec<u32> {
        (0..same).chain((0..tail_len).map(|token| token + tail)).collect()
    }

    #[test]
    fn a_prompt_goes_where_its_beginning_was_while_there_is_room() {
        let mut affinity = Affinity::new(8);
        let mut route = |prompt: &[u32], loads: &[u32]| {
            affinity.route(prompt, 0, &candidates(loads, 8), &DEMAND).unwrap().0
        };
        // Fifteen sixteenths of each prompt are known.
        let like = |tail| prompt(960, tail, 64);
        assert_eq!(route(&like(1000), &[1, 0]), 1, "the least loaded one");
        assert_eq!(route(&like(2000), &[0, 4]), 1, "it has the beginning, and room");
        assert_eq!(route(&like(3000), &[0, 5]), 0, "it has no room");
        assert_eq!(route(&like(3000), &[2, 0]), 0, "the longer beginning is there now");
        assert_eq!(route(&prompt(0, 5000, 200), &[2, 0]), 1, "unknown");
        assert_eq!(route(&like(3000), &[1000, 7]), 1, "it does not serve");
        assert_eq!(route(&[1, 2, 3], &[3, 2]), 1, "too short to remember");
        assert_eq!(route(&like(3000), &[7, 9]), 0, "here it would run, there it would wait");
        assert_eq!(route(&like(3000), &[8, 7]), 1);
        assert_eq!(route(&like(3000), &[7, 8]), 0, "all of that one's places are taken");
        assert_eq!(route(&like(3000), &[9, 8]), 0, "it waits anyway");
    }

    #[test]
    fn the_more_is_known_the_more_load_is_taken() {
        // The largest load of a replica that gets a prompt of which it knows this much, while
        // another one has two sequences.
        let largest = |same, tail_len| {
            let gets = |load: &u32| {
                let mut affinity = Affinity::new(64);
                let mut route = |prompt: &[u32], loads: &[u32]| {
                    affinity.route(prompt, 0, &candidates(loads, 64), &DEMAND).unwrap().0
                };
                route(&prompt(same, 10_000, tail_len), &[9, 0]);
                route(&prompt(same, 50_000, tail_len), &[2, *load]) == 1
            };
            (0..64).filter(gets).max().unwrap()
        };
        assert_eq!(largest(0, 640), 1, "nothing is known");
        assert_eq!(largest(64, 640), 3, "little");
        assert_eq!(largest(640, 640 * 9), 3, "more, but of a prompt that is ten times as long");
        assert_eq!(largest(640, 640), 7);
        assert_eq!(largest(640, 64), 12);
        assert_eq!(largest(6400, 64), 34, "no more than half of a batch");
        assert_eq!(largest(64, 0), 3);
    }

    #[test]
    fn what_is_known_needs_no_room() {
        let mut affinity = Affinity::new(8);
        let prompt = prompt(640, 0, 64);
        let demand = Demand { begins: 705, ..DEMAND };
        let mut pair = candidates(&[1, 0], 8);
        assert_eq!(affinity.route(&prompt, 0, &pair, &demand), Some(ReplicaId(1)));
        (pair[0].free_tokens, pair[1].free_tokens) = (1000, 0);
        assert_eq!(affinity.route(&prompt, 0, &pair, &demand), Some(ReplicaId(0)), "not one");
        (pair[0].free_tokens, pair[1].free_tokens) = (65, 1000);
        assert_eq!(affinity.route(&prompt, 0, &pair, &demand), Some(ReplicaId(0)), "it has it all");
    }

    #[test]
    fn salts_and_lost_caches_are_apart() {
        let mut affinity = Affinity::new(8);
        let long = prompt(128, 0, 200);
        let route = |affinity: &mut Affinity, salt, loads: &[u32]| {
            let to = affinity.route(&long, salt, &candidates(loads, 8), &DEMAND);
            to.map(|replica| replica.0)
        };
        assert_eq!(route(&mut affinity, 0, &[1, 0]), Some(1));
        assert_eq!(route(&mut affinity, 7, &[0, 1]), Some(0));
        affinity.forget(ReplicaId(1));
        assert_eq!(route(&mut affinity, 0, &[0, 1]), Some(0));
        assert_eq!(route(&mut affinity, 0, &[]), None);
        affinity.forget_all();
        assert_eq!(route(&mut affinity, 0, &[1, 0]), Some(1));
    }

    #[test]
    fn what_is_remembered_is_bounded_by_what_caches_hold() {
        let mut affinity = Affinity::new(8);
        let bound = |affinity: &mut Affinity, bound: usize| {
            for tail in 0..2000 {
                let one = candidates(&[0], 8);
                affinity.route(&prompt(0, tail * 200, 200), 0, &one, &DEMAND);
                affinity.route(&prompt(0, 0, 200), 0, &one, &DEMAND);
            }
            assert_eq!(affinity.given.len(), bound);
            assert!(affinity.order.len() <= 2 * bound);
            let to = affinity.route(&prompt(0, 0, 200), 0, &candidates(&[1, 0], 8), &DEMAND);
            assert_eq!(to, Some(ReplicaId(0)));
        };
        affinity.set_room(2000 * 64);
        bound(&mut affinity, 2000);
        affinity.set_room(4000 * 64);
        bound(&mut affinity, 4000);
        affinity.set_room(1);
        bound(&mut affinity, REMEMBERED.0);
        affinity.set_room(u64::MAX);
        assert_eq!(affinity.remembered_max, REMEMBERED.1);
    }
}
