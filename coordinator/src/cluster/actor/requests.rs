//! Requests on their way to replicas, and away from those that cannot continue them.
use actix::{Context, Handler, Message};
use shared::ids::ReplicaId;

use super::super::migration::{Candidate, heard, queue_share, with_room};
use super::super::view;
use super::{ClusterActor, RunningReplica};
use crate::engine::{EngineCommand, EngineError, EngineEvent, GenerateRequest};
use crate::replica::actor::{AdoptRequests, Cancel, MigrateRequests, ShareQueue, Submit};
use crate::replica::driver::MovedRequest;

/// The error of a request that was accepted when there was room for it.
fn no_room(needed: u32, room: u32) -> EngineError {
    let message = format!(
        "none has room in its KV cache any more for the {needed} tokens that this request may need \
         (the largest holds {room}); one had when it was accepted"
    );
    EngineError::Unavailable { message }
}

/// A request or cancellation from the front end.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Command(pub EngineCommand);

impl ClusterActor {
    /// Moves requests of a replica that cannot continue them to those that can, or to one that may
    /// soon, even if it has never served.
    fn place_requests(
        &mut self,
        ctx: &mut Context<Self>,
        MigrateRequests { from, requests }: MigrateRequests,
    ) {
        let candidates = self.core.replicas().filter(|_| !self.stopping).map(|replica| {
            let unknown = Candidate::unknown(replica.id);
            self.replicas.get(&replica.id).map_or(unknown, |it| self.candidate(replica.id, it))
        });
        let candidates: Vec<Candidate> = candidates.collect();
        let placed = self.migrations.place(from, requests, candidates.into_iter());
        for request in placed.cancelled {
            request.end(self.hub.observer(), None);
        }
        self.refuse_all(placed.unplaced);
        for (request, room) in placed.outgrown {
            let error = no_room(request.tokens_needed(), room);
            request.end(self.hub.observer(), Some(error));
        }
        for (id, requests) in placed.by_replica {
            if id != from {
                tracing::info!(from = %from, to = %id, requests = requests.len(), "go on elsewhere");
            }
            self.start_replica(ctx, id);
            match self.replicas.get(&id) {
                Some(running) => running.addr.do_send(AdoptRequests(requests)),
                None => self.refuse_all(requests),
            }
        }
    }

    /// Balances queues: requests are bound to a replica on arrival, and all of a broken one go
    /// where one serves. So a replica is asked for some that wait, if another has fewer.
    pub(super) fn share_queues(&mut self) {
        if self.stopping {
            return;
        }
        let candidates = heard(self.candidates().collect());
        if let Some((from, queue_share)) = queue_share(&candidates)
            && let Some(running) = self.replicas.get(&from)
        {
            running.addr.do_send(ShareQueue(queue_share));
            self.migrations.expect(from);
        }
    }

    fn refuse_all(&self, requests: Vec<MovedRequest>) {
        for request in requests {
            let error = match self.stopping {
                true => EngineError::ShuttingDown,
                false => EngineError::Unavailable { message: self.not_ready() },
            };
            request.end(self.hub.observer(), Some(error));
        }
    }

    fn candidate(&self, id: ReplicaId, running: &RunningReplica) -> Candidate {
        let doubtful = running.is_doubtful(&self.suspects);
        running.candidate(id, self.engine.max_num_seqs, doubtful)
    }

    fn candidates(&self) -> impl Iterator<Item = Candidate> {
        self.replicas.iter().map(|(id, running)| self.candidate(*id, running))
    }

    fn route(&mut self, request: &GenerateRequest) -> Option<&RunningReplica> {
        let candidates = heard(with_room(self.candidates(), request.tokens_needed()));
        let id = self.affinity.route(&request.prompt, request.affinity_salt(), &candidates)?;
        self.replicas.get(&id)
    }

    fn submit(&mut self, command: EngineCommand) {
        match command {
            EngineCommand::Submit { request, events } => {
                let error = if self.stopping {
                    EngineError::ShuttingDown
                } else if let Some(running) = self.route(&request) {
                    return running.addr.do_send(Submit { request, events });
                } else {
                    EngineError::Unavailable { message: self.not_ready() }
                };
                self.hub.observer().refused(&events, &error);
                let _ = events.send(EngineEvent::Failed(error));
            }
            EngineCommand::Cancel { id } => {
                self.migrations.cancelled(id);
                for running in self.replicas.values() {
                    running.addr.do_send(Cancel(id));
                }
            }
        }
    }

    fn not_ready(&self) -> String {
        view::not_ready(&self.view.borrow(), self.tensor_parallel)
    }
}

impl Handler<Command> for ClusterActor {
    type Result = ();

    fn handle(&mut self, Command(command): Command, _ctx: &mut Self::Context) {
        self.submit(command);
    }
}

impl Handler<MigrateRequests> for ClusterActor {
    type Result = ();

    fn handle(&mut self, migrating: MigrateRequests, ctx: &mut Self::Context) {
        self.place_requests(ctx, migrating);
    }
}
