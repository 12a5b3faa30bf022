//! PURE: which replica a request goes to: one that recently computed the beginning of its prompt
//! and has room, otherwise the one with the fewest requests.
//!
//! What a replica's KV cache really holds is its scheduler's business. This only remembers which
//! replica was given which beginnings, so a guess can be wrong; that costs a prefill and nothing
//! else.
use std::collections::{HashMap, VecDeque};

use shared::ids::ReplicaId;
use shared::mix::mix;

use super::migration::Candidate;

/// Tokens between two points at which a prompt's beginning is remembered.
const CHUNK: usize = 64;
/// Maximum number of beginnings remembered.
const REMEMBERED_MAX: usize = 1 << 16;
/// A replica has room while it has at most this many requests more than the least loaded one, or
/// half as many again, whichever is more.
const ROOM: u32 = 4;

/// Beginnings of prompts, and the replica each was last given to.
#[derive(Debug)]
pub struct Affinity {
    max_num_seqs: u32,
    given: HashMap<u64, (ReplicaId, u64)>,
    /// In the order in which they were given; those given again are in it twice.
    order: VecDeque<(u64, u64)>,
    turn: u64,
}

impl Affinity {
    /// Remembers nothing yet; replicas run at most `max_num_seqs` sequences at a time.
    #[must_use]
    pub fn new(max_num_seqs: u32) -> Self {
        Self { max_num_seqs, given: HashMap::new(), order: VecDeque::new(), turn: 0 }
    }

    /// Chooses a replica for a prompt and remembers it. If none serves, chooses a waiting one,
    /// since it may be back in a moment.
    pub fn route(
        &mut self,
        prompt: &[u32],
        salt: u64,
        candidates: &[Candidate],
    ) -> Option<ReplicaId> {
        let least =
            candidates.iter().min_by_key(|candidate| (!candidate.serving, candidate.load))?;
        let room = least.load + ROOM.max(least.load / 2);
        // Not where it would wait while another could run it.
        let room = room.min(self.max_num_seqs.saturating_sub(1).max(least.load));
        let has_room =
            |candidate: &&Candidate| candidate.serving == least.serving && candidate.load <= room;
        let mut chosen = least.replica;
        let beginnings: Vec<u64> = prompt
            .chunks_exact(CHUNK)
            .scan(salt, |hash, chunk| {
                *hash = mix(*hash, chunk);
                Some(*hash)
            })
            .collect();
        for hash in &beginnings {
            let Some((replica, _)) = self.given.get(hash) else { break };
            if candidates.iter().filter(has_room).any(|candidate| candidate.replica == *replica) {
                chosen = *replica;
            }
        }
        self.remember(beginnings, chosen);
        Some(chosen)
    }

    fn remember(&mut self, beginnings: Vec<u64>, replica: ReplicaId) {
        for hash in beginnings {
            self.turn += 1;
            self.given.insert(hash, (replica, self.turn));
            self.order.push_back((hash, self.turn));
        }
        // Beginnings given again are skipped at their first place, so the list is at most twice the
        // bound.
        while self.given.len() > REMEMBERED_MAX || self.order.len() > 2 * REMEMBERED_MAX {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates(loads: &[u32]) -> Vec<Candidate> {
        let candidate = |(id, load): (usize, &u32)| Candidate {
            serving: *load < 1000,
            load: *load,
            ..Candidate::unknown(ReplicaId(id as u32))
        };
        loads.iter().enumerate().map(candidate).collect()
    }

    fn prompt(same: u32, tail: u32) -> Vec<u32> {
        (0..same).chain((0..200).map(|token| token + tail)).collect()
    }

    #[test]
    fn a_prompt_goes_where_its_beginning_was_while_there_is_room() {
        let mut affinity = Affinity::new(8);
        let mut route = |prompt: &[u32], loads: &[u32]| {
            affinity.route(prompt, 0, &candidates(loads)).unwrap().0
        };
        assert_eq!(route(&prompt(128, 1000), &[1, 0]), 1, "the least loaded one");
        assert_eq!(route(&prompt(128, 2000), &[0, 4]), 1, "it has the beginning, and room");
        assert_eq!(route(&prompt(128, 3000), &[0, 5]), 0, "it has no room");
        assert_eq!(route(&prompt(128, 3000), &[2, 0]), 0, "the longer beginning is there now");
        assert_eq!(route(&prompt(0, 5000), &[2, 0]), 1, "unknown");
        assert_eq!(route(&prompt(128, 3000), &[1000, 9]), 1, "it does not serve");
        assert_eq!(route(&[1, 2, 3], &[3, 2]), 1, "too short to remember");
        assert_eq!(route(&prompt(128, 3000), &[7, 9]), 0, "here it would run, there it would wait");
        assert_eq!(route(&prompt(128, 3000), &[8, 7]), 1);
        assert_eq!(route(&prompt(128, 3000), &[7, 8]), 0, "all of that one's places are taken");
    }

    #[test]
    fn salts_and_lost_caches_are_apart() {
        let mut affinity = Affinity::new(8);
        let long = prompt(128, 0);
        assert_eq!(affinity.route(&long, 0, &candidates(&[1, 0])), Some(ReplicaId(1)));
        assert_eq!(affinity.route(&long, 7, &candidates(&[0, 1])), Some(ReplicaId(0)));
        affinity.forget(ReplicaId(1));
        assert_eq!(affinity.route(&long, 0, &candidates(&[0, 1])), Some(ReplicaId(0)));
        assert_eq!(affinity.route(&long, 0, &candidates(&[])), None);
        affinity.forget_all();
        assert_eq!(affinity.route(&long, 0, &candidates(&[1, 0])), Some(ReplicaId(1)));
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut affinity = Affinity::new(8);
        for tail in 0..40_000 {
            affinity.route(&prompt(0, tail * 200), 0, &candidates(&[0]));
            affinity.route(&prompt(0, 0), 0, &candidates(&[0]));
        }
        assert!(affinity.given.len() <= REMEMBERED_MAX);
        assert!(affinity.order.len() <= 2 * REMEMBERED_MAX);
        assert_eq!(affinity.route(&prompt(0, 0), 0, &candidates(&[4, 0])), Some(ReplicaId(0)));
    }
}
