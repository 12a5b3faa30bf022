//! PURE: requests without `max_tokens` that have outgrown the KV cache they were in. They go on at
//! a replica that has room. If none has, they end with what they have, instead of failing.
use shared::ids::ReplicaId;

use super::candidates::Candidate;
use super::migration::{Migrations, Placements};
use crate::replica::driver::MovedRequest;

impl Migrations {
    /// Places requests as [`Migrations::place`] does, and those that have outgrown every cache at a
    /// replica that serves, which ends them. If that is where they come from, they do not wait for
    /// a replica that does not serve: a larger one may never come.
    pub fn place_or_end(
        &mut self,
        from: ReplicaId,
        requests: Vec<MovedRequest>,
        candidates: &[Candidate],
    ) -> Placements {
        let there = candidates.iter().find(|it| it.serving && it.replica == from);
        let has_outgrown = |request: &MovedRequest| {
            there.is_some_and(|it| it.room < request.tokens_needed()) && request.may_end_by_length()
        };
        let (ending, others): (Vec<_>, Vec<_>) = requests.into_iter().partition(has_outgrown);
        // Both parts are one answer, and a request may be cancelled until all are placed.
        let in_parts = !ending.is_empty();
        if in_parts {
            self.expect(from);
        }
        let mut placed = self.place(from, others, candidates.iter().copied());
        if in_parts {
            let serving = candidates.iter().filter(|it| it.serving).copied();
            let Placements { by_replica, cancelled, unplaced, outgrown } =
                self.place(from, ending, serving);
            placed.by_replica.extend(by_replica);
            placed.cancelled.extend(cancelled);
            placed.unplaced.extend(unplaced);
            placed.outgrown.extend(outgrown);
        }
        let serving = candidates.iter().filter(|it| it.serving);
        let end_at = serving.max_by_key(|it| (it.replica == from, it.room));
        if let Some(end_at) = end_at {
            let (ending, refused): (Vec<_>, Vec<_>) =
                placed.outgrown.into_iter().partition(|(request, _)| request.may_end_by_length());
            placed.outgrown = refused;
            if !ending.is_empty() {
                let ending = ending.into_iter().map(|(request, _)| request).collect();
                placed.by_replica.push((end_at.replica, ending));
            }
        }
        placed
    }
}
