//! Requests that continue at another replica, with everything that belongs to them.
use std::time::Duration;

use shared::ids::{RequestId, SeqId};
use shared::mix::IdSet;

use super::deliver::dropped;
use super::{LiveRequest, ReplicaDriver};
use crate::cluster::migration::QueueShare;
use crate::engine::{EngineError, StopCheck};
use crate::metrics::Observer;
use crate::scheduler::HandedOver;

/// A request moved from one replica to another, with everything that belongs to it.
#[derive(Debug)]
pub struct MovedRequest {
    handed: HandedOver,
    live: LiveRequest,
    stop_checks: Vec<(SeqId, Box<dyn StopCheck>)>,
}

impl MovedRequest {
    /// The request's id.
    #[must_use]
    pub fn id(&self) -> RequestId {
        self.handed.id()
    }

    /// Tokens that a replica's KV cache must have room for.
    #[must_use]
    pub fn tokens_needed(&self) -> u32 {
        self.handed.tokens_needed()
    }

    /// Tokens that a replica's KV cache should have room for.
    #[must_use]
    pub fn tokens_wanted(&self) -> u32 {
        self.handed.tokens_wanted()
    }

    /// Tokens that must be free in a replica's KV cache for its first step there.
    #[must_use]
    pub fn tokens_to_begin(&self) -> u32 {
        self.handed.tokens_to_begin()
    }

    /// Whether it can end with what it has where a KV cache has no more room.
    #[must_use]
    pub fn may_end_by_length(&self) -> bool {
        self.handed.may_end_by_length()
    }

    /// How many places in a batch it takes.
    #[must_use]
    pub fn num_sequences(&self) -> u32 {
        self.handed.num_sequences()
    }

    /// Whether it comes from the queue of a replica that keeps running.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.handed.is_shared()
    }

    /// Ends it if no replica will continue it; without an error its client is gone.
    pub fn end(self, observer: &Observer, error: Option<EngineError>) {
        dropped(&mut observer.record(), self.live, error);
    }
}

impl ReplicaDriver {
    /// Gives up all requests for another replica to continue, oldest first. Only between two
    /// epochs.
    pub fn hand_over(&mut self) -> Vec<MovedRequest> {
        let handed = self.scheduler.hand_over();
        self.take_out(handed)
    }

    /// Gives up requests that have not run in this epoch, for a replica with fewer to continue.
    pub fn share(&mut self, QueueShare { most, room }: QueueShare) -> Vec<MovedRequest> {
        let handed = self.scheduler.share(most, room);
        self.take_out(handed)
    }

    /// Collects what the scheduler gave up, with everything that belongs to it.
    pub(super) fn take_out(&mut self, handed: Vec<HandedOver>) -> Vec<MovedRequest> {
        let mut moved = Vec::with_capacity(handed.len());
        let gone: IdSet<RequestId> = self.gone.iter().copied().collect();
        for handed in handed {
            let Some(live) = self.live.remove(&handed.id()) else { continue };
            if gone.contains(&handed.id()) {
                handed.sequences().for_each(|seq| drop(self.stop_checks.remove(&seq)));
                dropped(&mut self.observer.record(), live, None);
                continue;
            }
            let stop_checks = handed
                .sequences()
                .filter_map(|seq| Some((seq, self.stop_checks.remove(&seq)?)))
                .collect();
            moved.push(MovedRequest { handed, live, stop_checks });
        }
        moved
    }

    /// Continues another replica's requests: before its own waiting ones, or after those like them
    /// if they were shared.
    pub fn adopt(&mut self, now: Duration, moved: Vec<MovedRequest>) {
        let (shared, older): (Vec<MovedRequest>, Vec<MovedRequest>) =
            moved.into_iter().partition(|moved| moved.handed.is_shared());
        // The oldest is put in front of the queue last.
        let moved = older.into_iter().rev().chain(shared);
        for MovedRequest { handed, mut live, mut stop_checks } in moved {
            let id = handed.id();
            if handed.is_shared() {
                // Its replica served when it gave it up, and may not any more, like this one.
                live.waits_since = now;
            }
            match self.scheduler.adopt(handed) {
                Ok(names) => {
                    for (there, here) in names {
                        let found = stop_checks.iter().position(|(seq, _)| *seq == there);
                        if let Some(found) = found {
                            self.stop_checks.insert(here, stop_checks.swap_remove(found).1);
                        }
                    }
                    self.observer.record().routed(&mut live.track, self.id);
                    self.note_wait(live.unscheduled_since);
                    self.live.insert(id, live);
                }
                Err(refused) => {
                    let (_, error) = *refused;
                    dropped(&mut self.observer.record(), live, Some(outgrown(&error)));
                }
            }
        }
        self.scheduler.end_outgrown(&mut self.effects);
        self.deliver(now);
    }
}

/// Maps the error of a request that was accepted where there was room for it: it is not to blame
/// that there is none any more.
pub(super) fn outgrown(error: &EngineError) -> EngineError {
    match error {
        EngineError::TooLarge { needed, available } => EngineError::Unavailable {
            message: format!(
                "none has room in its KV cache any more for the {needed} blocks that this request \
                 may need (the remaining one has {available}); one had when it was accepted"
            ),
        },
        other => other.clone(),
    }
}
