//! PURE: requests on their way from a replica that cannot continue them to one that can.
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use shared::ids::{ReplicaId, RequestId};

use crate::replica::driver::MovedRequest;

/// A replica that may take requests.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// The replica.
    pub replica: ReplicaId,
    /// Whether steps run there.
    pub serving: bool,
    /// Number of its requests.
    pub load: u32,
    /// Those of them that it could give up, since they have not run in its epoch.
    pub shareable: u32,
    /// Places in its batch that no sequence has taken or waits for.
    pub free_seqs: u32,
    /// Tokens its KV cache has room for; `u32::MAX` before it has ever served.
    pub room: u32,
    /// Whether one of its ranks is silent.
    pub doubtful: bool,
}

impl Candidate {
    /// A replica about which nothing is known yet.
    #[must_use]
    pub fn unknown(replica: ReplicaId) -> Self {
        Self {
            replica,
            serving: false,
            load: 0,
            shareable: 0,
            free_seqs: u32::MAX,
            room: u32::MAX,
            doubtful: false,
        }
    }
}

/// Returns the replicas whose KV cache has room for so many tokens; if there are none, all of them,
/// so that one refuses the request.
#[must_use]
pub fn with_room(candidates: impl Iterator<Item = Candidate>, tokens: u32) -> Vec<Candidate> {
    let candidates: Vec<Candidate> = candidates.collect();
    let fits = |candidate: &&Candidate| candidate.room >= tokens;
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

/// What a replica gives up from its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueShare {
    /// Maximum number of requests.
    pub most: u32,
    /// Maximum number of tokens of each: the other replica has no more room.
    pub room: u32,
}

/// Returns the replica that shares its queue, and how much: half of its excess over the one with
/// the fewest requests, as far as that waits. Of several, the one that can give most; the busiest
/// may have nothing but requests that run. Those for which the other has no room stay, so it may
/// give fewer, or none.
///
/// Requests are bound to a replica on arrival, and go where one serves when theirs breaks. Without
/// sharing, a replica that begins to serve later, or whose requests were shorter, would idle beside
/// the queues of others.
#[must_use]
pub fn queue_share(candidates: &[Candidate]) -> Option<(ReplicaId, QueueShare)> {
    let serving = || candidates.iter().filter(|candidate| candidate.serving);
    let to = serving().min_by_key(|candidate| (candidate.load, Reverse(candidate.room)))?;
    let gives = |from: &Candidate| from.shareable.min(from.load.saturating_sub(to.load) / 2);
    let from = serving().max_by_key(|candidate| (gives(candidate), candidate.load))?;
    let queue_share = QueueShare { most: gives(from), room: to.room };
    (queue_share.most > 0).then_some((from.replica, queue_share))
}

/// Where requests go.
#[derive(Debug, Default)]
pub struct Placements {
    /// By new replica, in their order.
    pub by_replica: Vec<(ReplicaId, Vec<MovedRequest>)>,
    /// Cancelled while they were on their way.
    pub cancelled: Vec<MovedRequest>,
    /// There is no replica at all.
    pub unplaced: Vec<MovedRequest>,
    /// No replica has room now or soon; with the room of the largest one.
    pub outgrown: Vec<(MovedRequest, u32)>,
}

/// Requests on their way.
#[derive(Debug, Default)]
pub struct Migrations {
    /// How many requests to give up each replica has not answered yet.
    due: BTreeMap<ReplicaId, u32>,
    /// Requests cancelled meanwhile: a replica without the request cannot cancel it.
    cancelled: BTreeSet<RequestId>,
}

impl Migrations {
    /// A replica was asked for its requests; it answers once, with none if it can continue.
    pub fn expect(&mut self, replica: ReplicaId) {
        *self.due.entry(replica).or_default() += 1;
    }

    /// A replica's actor crashed: it will not answer any more.
    pub fn gone(&mut self, replica: ReplicaId) {
        self.due.remove(&replica);
        self.forget_cancelled();
    }

    fn forget_cancelled(&mut self) {
        if self.due.is_empty() {
            self.cancelled.clear();
        }
    }

    /// A request was cancelled; every replica is told as well.
    pub fn cancelled(&mut self, id: RequestId) {
        if !self.due.is_empty() {
            self.cancelled.insert(id);
        }
    }

    /// Places the requests that a replica answered with: on serving replicas with room, first those
    /// whose batch has places left, then the least loaded, on doubtful ones only if no other has
    /// room. Requests without room on any
    /// serving replica wait where there may be room soon, preferably where they were.
    pub fn place(
        &mut self,
        from: ReplicaId,
        requests: Vec<MovedRequest>,
        candidates: impl Iterator<Item = Candidate>,
    ) -> Placements {
        if let Some(due) = self.due.get_mut(&from) {
            *due -= 1;
            if *due == 0 {
                self.due.remove(&from);
            }
        }
        let candidates: Vec<Candidate> = candidates.collect();
        let mut serving: BTreeMap<ReplicaId, (Candidate, Vec<MovedRequest>)> = candidates
            .iter()
            .filter(|candidate| candidate.serving)
            .map(|candidate| (candidate.replica, (*candidate, Vec::new())))
            .collect();
        let mut placed = Placements::default();
        let mut waiting: BTreeMap<ReplicaId, Vec<MovedRequest>> = BTreeMap::new();
        let largest = candidates.iter().map(|candidate| candidate.room).max().unwrap_or(0);
        for request in requests {
            if self.cancelled.contains(&request.id()) {
                placed.cancelled.push(request);
                continue;
            }
            let needed = request.tokens_needed();
            let fits = serving.values_mut().filter(|(candidate, _)| candidate.room >= needed);
            let sequences = request.num_sequences();
            let best = fits.min_by_key(|(candidate, _)| {
                (candidate.doubtful, candidate.free_seqs < sequences, candidate.load)
            });
            if let Some((candidate, requests)) = best {
                candidate.load += 1;
                candidate.free_seqs = candidate.free_seqs.saturating_sub(sequences);
                requests.push(request);
                continue;
            }
            // Where it was, it may soon fit again.
            let waits = candidates
                .iter()
                .filter(|candidate| !candidate.serving && candidate.room >= needed);
            let waits =
                waits.min_by_key(|candidate| (candidate.replica != from, candidate.replica));
            match waits {
                Some(candidate) => waiting.entry(candidate.replica).or_default().push(request),
                None if candidates.is_empty() => placed.unplaced.push(request),
                None => placed.outgrown.push((request, largest)),
            }
        }
        placed.by_replica.extend(serving.into_iter().map(|(id, (_, requests))| (id, requests)));
        placed.by_replica.retain(|(_, requests)| !requests.is_empty());
        placed.by_replica.extend(waiting);
        self.forget_cancelled();
        placed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_go_where_they_fit() {
        let candidate = |id: u32, room| Candidate {
            serving: id > 0,
            room,
            ..Candidate::unknown(ReplicaId(id))
        };
        let candidates = [candidate(0, u32::MAX), candidate(1, 100), candidate(2, 200)];
        let fit = |candidates: &[Candidate], tokens| -> Vec<u32> {
            with_room(candidates.iter().copied(), tokens)
                .iter()
                .map(|candidate| candidate.replica.0)
                .collect()
        };
        assert_eq!(fit(&candidates, 100), [0, 1, 2]);
        assert_eq!(fit(&candidates, 101), [0, 2]);
        assert_eq!(fit(&candidates, 201), [0], "one that has not served yet may have room");
        assert_eq!(fit(&candidates[1..], 201), [1, 2], "one of them says that it has none");
    }

    #[test]
    fn the_longest_queue_is_shared_with_the_shortest() {
        let candidate = |id: u32, serving, load| Candidate {
            serving,
            load,
            shareable: load,
            room: 9,
            ..Candidate::unknown(ReplicaId(id))
        };
        let candidates = [
            candidate(0, true, 8),
            candidate(1, true, 3),
            candidate(2, false, 0),
            candidate(3, true, 5),
        ];
        let of = |id, most| Some((ReplicaId(id), QueueShare { most, room: 9 }));
        assert_eq!(queue_share(&candidates), of(0, 2));
        assert_eq!(queue_share(&candidates[1..]), of(3, 1));
        assert_eq!(queue_share(&candidates[..1]), None, "with nobody");
        assert_eq!(
            queue_share(&[candidate(0, true, 4), candidate(1, true, 3)]),
            None,
            "it would go to and fro"
        );
    }

    #[test]
    fn who_is_asked_to_share_has_something_that_waits() {
        let candidate = |id: u32, load, shareable, room| Candidate {
            serving: true,
            load,
            shareable,
            room,
            ..Candidate::unknown(ReplicaId(id))
        };
        let of = |id, most, room| Some((ReplicaId(id), QueueShare { most, room }));
        // The busiest one runs all that it has.
        let candidates = [candidate(0, 20, 0, 9), candidate(1, 12, 3, 9), candidate(2, 0, 0, 5)];
        assert_eq!(queue_share(&candidates), of(1, 3, 5), "no more than waits");
        let candidates = [candidate(0, 20, 0, 9), candidate(1, 12, 9, 9), candidate(2, 0, 0, 5)];
        assert_eq!(queue_share(&candidates), of(1, 6, 5), "no more than half of the excess");
        assert_eq!(queue_share(&[candidates[0], candidates[2]]), None, "nothing waits");
        // Of two that idle, the one that more requests fit.
        let idle = [candidate(3, 0, 0, 7), candidates[1], candidates[2]];
        assert_eq!(queue_share(&idle), of(1, 6, 7));
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
        let kept = |tokens| heard(with_room([candidates[0], large].into_iter(), tokens));
        assert_eq!((kept(9).len(), kept(9)[0].replica), (1, ReplicaId(0)));
        assert_eq!((kept(10).len(), kept(10)[0].replica), (1, ReplicaId(1)));
    }
}
