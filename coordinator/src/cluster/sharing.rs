//! PURE: which replicas give up requests that wait in their queues, for which others.
//!
//! Requests are bound to a replica on arrival, and go where one serves when theirs breaks. Without
//! sharing, a replica that begins to serve later, or whose requests were shorter, would idle beside
//! the queues of others.
use std::cmp::Reverse;

use shared::ids::ReplicaId;

use super::candidates::Candidate;
use super::migration::QueueShare;

/// Returns which replicas share their queues, and how much of them. `gives` is whether a replica
/// may have something for one with so much room.
///
/// First those that have a place and room for more, and nothing that waits, get what waits
/// elsewhere, however many requests either has. Those with the most room choose first: what does
/// not fit there does not fit into another, so that one for which everything is too large keeps
/// nobody waiting. Then queues are evened out: the longest gives half of its excess over the
/// shortest.
///
/// A replica may have fewer that fit, or none. What it gives up goes wherever it is best then.
#[must_use]
pub fn shares(
    mut candidates: Vec<Candidate>,
    gives: impl Fn(ReplicaId, u32) -> bool,
) -> Vec<(ReplicaId, QueueShare)> {
    candidates.retain(|candidate| candidate.serving);
    let mut shares = Vec::new();
    let free = |it: &Candidate| it.room.min(it.free_tokens);
    let takes = |it: &Candidate| it.queued == 0 && it.free_seqs > 0 && free(it) > 0;
    let mut takers: Vec<usize> =
        (0..candidates.len()).filter(|at| takes(&candidates[*at])).collect();
    takers.sort_by_key(|at| (Reverse(free(&candidates[*at])), candidates[*at].load));
    for taker in takers {
        let room = free(&candidates[taker]);
        let mut asked = vec![false; candidates.len()];
        let mut places = candidates[taker].free_seqs;
        while places > 0 {
            let may = |(at, it): &(usize, &mut Candidate)| {
                it.queued > 0 && !asked[*at] && gives(it.replica, room)
            };
            let all = candidates.iter_mut().enumerate();
            let longest = all.filter(may).max_by_key(|(at, it)| (it.queued, Reverse(*at)));
            let Some((at, from)) = longest else { break };
            asked[at] = true;
            let each = from.load.div_ceil(from.requests.max(1)).max(1);
            let most = from.queued.min((places / each).max(1));
            places = places.saturating_sub(most.saturating_mul(each));
            from.queued -= most;
            shares.push((from.replica, QueueShare { most, room }));
        }
        candidates[taker].free_seqs = places;
    }
    even_out(candidates, gives, shares)
}

fn even_out(
    mut candidates: Vec<Candidate>,
    gives: impl Fn(ReplicaId, u32) -> bool,
    mut shares: Vec<(ReplicaId, QueueShare)>,
) -> Vec<(ReplicaId, QueueShare)> {
    let mut done = vec![false; candidates.len()];
    // Each round one gives, or has nothing to give.
    for _ in 0..2 * candidates.len() {
        let all = candidates.iter().enumerate().filter(|(at, _)| !done[*at]);
        let longest = all.max_by_key(|(at, it)| (it.queued, Reverse(*at)));
        let Some((at, from)) = longest.filter(|(_, it)| it.queued > 1) else { break };
        let others = candidates.iter().enumerate();
        let others = others.filter(|(_, to)| gives(from.replica, to.room));
        let shortest = others.min_by_key(|(_, to)| (to.queued, to.load));
        let excess = |to: &Candidate| from.queued.saturating_sub(to.queued) / 2;
        match shortest.map(|(to, it)| (to, it.room, excess(it))).filter(|(.., most)| *most > 0) {
            Some((to, room, most)) => {
                shares.push((from.replica, QueueShare { most, room }));
                candidates[at].queued -= most;
                candidates[to].queued += most;
            }
            None => done[at] = true,
        }
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A replica that serves, with as many sequences as requests.
    fn of(id: u32, load: u32, queued: u32, free_seqs: u32, room: u32) -> Candidate {
        Candidate {
            serving: true,
            requests: load,
            load,
            queued,
            free_seqs,
            free_tokens: if free_seqs > 0 { room } else { 0 },
            room,
            ..Candidate::unknown(ReplicaId(id))
        }
    }

    const NONE: [(u32, u32, u32); 0] = [];

    fn all(candidates: &[Candidate]) -> Vec<(u32, u32, u32)> {
        let shares = shares(candidates.to_vec(), |_, _| true);
        shares.into_iter().map(|(from, share)| (from.0, share.most, share.room)).collect()
    }

    #[test]
    fn what_waits_goes_where_a_place_is_free_whatever_the_counts() {
        // Six long requests fill the first one's KV cache; the other runs more, but short ones.
        assert_eq!(all(&[of(0, 8, 2, 2, 90), of(1, 9, 0, 7, 80)]), [(0, 2, 80)]);
        assert_eq!(all(&[of(0, 8, 2, 2, 90), of(1, 9, 0, 1, 80)]), [(0, 1, 80)], "one place");
        assert_eq!(all(&[of(0, 8, 2, 2, 90), of(1, 9, 1, 7, 80)]), NONE, "something waits there");
        let full = Candidate { free_tokens: 30, ..of(1, 9, 0, 7, 80) };
        assert_eq!(all(&[of(0, 8, 2, 2, 90), full]), [(0, 2, 30)], "what fits now");
        let off = Candidate { serving: false, ..of(1, 0, 0, 8, 80) };
        assert_eq!(all(&[of(0, 8, 8, 0, 90), off]), NONE, "it does not serve");
        assert_eq!(all(&[of(0, 20, 0, 0, 9), of(1, 0, 0, 9, 5)]), NONE, "nothing waits");
    }

    #[test]
    fn all_pairs_share_at_once() {
        let candidates =
            [of(0, 9, 5, 0, 90), of(1, 9, 4, 0, 90), of(2, 0, 0, 3, 90), of(3, 1, 0, 4, 90)];
        // The emptiest of the same size chooses first; each takes from the longest queue left.
        assert_eq!(all(&candidates), [(0, 3, 90), (1, 4, 90), (0, 1, 90)]);
        // Two requests of four choices each fill eight places.
        let many = Candidate { requests: 4, ..of(0, 16, 3, 0, 90) };
        assert_eq!(all(&[many, of(1, 0, 0, 8, 90)]), [(0, 2, 90)]);
    }

    #[test]
    fn one_for_which_everything_is_too_large_keeps_nobody_waiting() {
        let candidates = [of(0, 9, 3, 0, 90), of(1, 0, 0, 8, 10), of(2, 4, 0, 4, 90)];
        assert_eq!(all(&candidates), [(0, 3, 90)], "the larger one, though it has requests");
        // What the first one has fits nowhere, as it has said.
        let candidates = [of(0, 9, 3, 0, 90), of(1, 9, 2, 0, 90), of(2, 0, 0, 8, 50)];
        let shares = shares(candidates.to_vec(), |from, room| from.0 != 0 || room > 50);
        let share = QueueShare { most: 2, room: 50 };
        assert_eq!(shares[0], (ReplicaId(1), share));
    }

    #[test]
    fn queues_are_evened_out() {
        let full = |id, queued| of(id, 4 + queued, queued, 0, 9);
        assert_eq!(all(&[full(0, 8), full(1, 3)]), [(0, 2, 9)]);
        assert_eq!(all(&[full(0, 4), full(1, 3)]), NONE, "it would go to and fro");
        assert_eq!(all(&[full(0, 9), full(1, 0), full(2, 1)]), [(0, 4, 9), (0, 2, 9)]);
        // Few requests, many sequences: what counts is what waits.
        assert_eq!(all(&[full(0, 10), of(1, 25, 5, 0, 9)]), [(0, 2, 9)]);
    }
}
