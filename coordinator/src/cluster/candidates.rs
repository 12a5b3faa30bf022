//! PURE: replicas that may take a request, and which of them is the best.
use shared::ids::ReplicaId;

use crate::engine::GenerateRequest;
use crate::replica::driver::MovedRequest;

/// What a request asks of a replica.
#[derive(Clone, Copy, Debug)]
pub struct Demand {
    /// Places in its batch.
    pub sequences: u32,
    /// Tokens that must be free in its KV cache for the first step.
    pub begins: u32,
    /// Tokens that its KV cache must have room for.
    pub needed: u32,
    /// Tokens that its KV cache should have room for, at least as many.
    pub wanted: u32,
}

impl From<&GenerateRequest> for Demand {
    fn from(request: &GenerateRequest) -> Self {
        Self {
            sequences: u32::try_from(request.sampling.len()).unwrap_or(u32::MAX),
            begins: request.tokens_to_begin(),
            needed: request.tokens_needed(),
            wanted: request.tokens_wanted(),
        }
    }
}

impl From<&MovedRequest> for Demand {
    fn from(request: &MovedRequest) -> Self {
        Self {
            sequences: request.num_sequences(),
            begins: request.tokens_to_begin(),
            needed: request.tokens_needed(),
            wanted: request.tokens_wanted(),
        }
    }
}

/// A replica that may take requests.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// The replica.
    pub replica: ReplicaId,
    /// Whether steps run there.
    pub serving: bool,
    /// Number of its requests.
    pub requests: u32,
    /// Number of their sequences.
    pub load: u32,
    /// How many of its requests wait, though steps have begun without them, and have not run in
    /// its epoch: it could give them up.
    pub queued: u32,
    /// Places in its batch that no sequence has taken or waits for.
    pub free_seqs: u32,
    /// Tokens of its KV cache that no sequence holds.
    pub free_tokens: u32,
    /// Tokens its KV cache has room for; `u32::MAX` before it has ever served.
    pub room: u32,
    /// Whether one of its ranks is silent.
    pub doubtful: bool,
}

/// Order of candidates, best first: whether the request would wait, behind how many, and the load.
pub type Rank = (bool, u32, u32);

impl Candidate {
    /// A replica about which nothing is known yet.
    #[must_use]
    pub fn unknown(replica: ReplicaId) -> Self {
        Self {
            replica,
            serving: false,
            requests: 0,
            load: 0,
            queued: 0,
            free_seqs: u32::MAX,
            free_tokens: u32::MAX,
            room: u32::MAX,
            doubtful: false,
        }
    }

    /// Whether a request would be in the next step: nothing waits there, and a place in the batch
    /// and what it needs of the KV cache are free.
    #[must_use]
    pub fn starts(&self, demand: &Demand) -> bool {
        self.queued == 0 && self.free_seqs >= demand.sequences && self.free_tokens >= demand.begins
    }

    /// Its place among candidates for a request.
    #[must_use]
    pub fn rank(&self, demand: &Demand) -> Rank {
        let waits = !self.starts(demand);
        (waits, if waits { self.queued } else { 0 }, self.load)
    }

    /// A request is on its way to it.
    pub(super) fn take(&mut self, demand: &Demand) {
        self.queued += u32::from(!self.starts(demand));
        self.requests += 1;
        self.load = self.load.saturating_add(demand.sequences);
        self.free_seqs = self.free_seqs.saturating_sub(demand.sequences);
        self.free_tokens = self.free_tokens.saturating_sub(demand.begins);
    }
}

/// Returns the replicas whose KV cache has room for what a request wants, if one of them serves;
/// else those with room for what it needs; if there are none, all of them, so that one refuses it.
#[must_use]
pub fn with_room(candidates: Vec<Candidate>, demand: &Demand) -> Vec<Candidate> {
    let serves = |it: &Candidate| it.serving && it.room >= demand.wanted;
    let enough = if candidates.iter().any(serves) { demand.wanted } else { demand.needed };
    let fits = |candidate: &&Candidate| candidate.room >= enough;
    match candidates.iter().any(|candidate| fits(&candidate)) {
        true => candidates.iter().filter(fits).copied().collect(),
        false => candidates,
    }
}

/// Returns the replicas without those that serve and are doubtful; all of them if no other serves,
/// since most silences end. Apply it to replicas with room, so that a request that only a doubtful
/// one has room for is not refused.
#[must_use]
pub fn heard(candidates: Vec<Candidate>) -> Vec<Candidate> {
    let (doubtful, heard): (Vec<Candidate>, Vec<Candidate>) =
        candidates.iter().partition(|candidate| candidate.serving && candidate.doubtful);
    if doubtful.is_empty() || !heard.iter().any(|candidate| candidate.serving) {
        candidates
    } else {
        heard
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn demand(needed: u32, wanted: u32) -> Demand {
        Demand { sequences: 1, begins: needed, needed, wanted }
    }

    #[test]
    fn requests_go_where_they_fit() {
        let candidate = |id: u32, room| Candidate {
            serving: id > 0,
            room,
            ..Candidate::unknown(ReplicaId(id))
        };
        let candidates = [candidate(0, u32::MAX), candidate(1, 100), candidate(2, 200)];
        let fit = |candidates: &[Candidate], needed, wanted| -> Vec<u32> {
            with_room(candidates.to_vec(), &demand(needed, wanted))
                .iter()
                .map(|candidate| candidate.replica.0)
                .collect()
        };
        assert_eq!(fit(&candidates, 100, 100), [0, 1, 2]);
        assert_eq!(fit(&candidates, 101, 101), [0, 2]);
        assert_eq!(fit(&candidates, 201, 201), [0], "one that has not served yet may have room");
        assert_eq!(fit(&candidates[1..], 201, 201), [1, 2], "one of them says that it has none");
        assert_eq!(fit(&candidates[1..], 99, 150), [2], "in the other one it would soon end");
        assert_eq!(fit(&candidates[1..], 99, 300), [1, 2], "it would in both");
        assert_eq!(fit(&candidates, 99, 300), [0, 1, 2], "nothing serves where it would not");
    }

    #[test]
    fn a_replica_of_a_silent_rank_gets_what_no_other_can_take() {
        let candidate =
            |id: u32, serving| Candidate { serving, room: 9, ..Candidate::unknown(ReplicaId(id)) };
        let candidates = [candidate(0, true), candidate(1, true), candidate(2, false)];
        let of = |candidates: &[Candidate], silent: &[u32]| -> Vec<u32> {
            let doubts = |candidate: &Candidate| Candidate {
                doubtful: silent.contains(&candidate.replica.0),
                ..*candidate
            };
            let kept = heard(candidates.iter().map(doubts).collect());
            kept.iter().map(|candidate| candidate.replica.0).collect()
        };
        assert_eq!(of(&candidates, &[]), [0, 1, 2]);
        assert_eq!(of(&candidates, &[0]), [1, 2]);
        assert_eq!(of(&candidates, &[0, 1]), [0, 1, 2], "most silences end");
        assert_eq!(of(&[candidates[0], candidates[2]], &[0]), [0, 2], "the other does not serve");
        // As requests are routed: the one that is heard is too small.
        let large = Candidate { room: 100, doubtful: true, ..candidates[1] };
        let kept = |tokens| heard(with_room(vec![candidates[0], large], &demand(tokens, tokens)));
        assert_eq!((kept(9).len(), kept(9)[0].replica), (1, ReplicaId(0)));
        assert_eq!((kept(10).len(), kept(10)[0].replica), (1, ReplicaId(1)));
    }

    #[test]
    fn a_request_goes_where_it_runs_at_once_and_else_where_fewest_wait() {
        let free = Candidate {
            serving: true,
            load: 5,
            free_seqs: 3,
            free_tokens: 100,
            ..Candidate::unknown(ReplicaId(0))
        };
        let of = |sequences, begins| Demand { sequences, begins, needed: 1, wanted: 1 };
        assert!(free.starts(&of(3, 100)) && !free.starts(&of(4, 1)) && !free.starts(&of(1, 101)));
        let queue = |queued, load| Candidate { queued, load, ..free };
        let mut all = [queue(1, 9), queue(2, 3), queue(0, 20), queue(1, 8)];
        all.sort_by_key(|candidate| candidate.rank(&of(1, 1)));
        assert_eq!(all.map(|it| (it.queued, it.load)), [(0, 20), (1, 8), (1, 9), (2, 3)]);
        let mut taking = free;
        taking.take(&of(3, 60));
        assert_eq!((taking.load, taking.free_seqs, taking.free_tokens), (8, 0, 40));
        taking.take(&of(1, 1));
        assert_eq!((taking.requests, taking.queued), (2, 1));
    }
}
