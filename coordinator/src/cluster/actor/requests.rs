//! Takes requests to replicas, and away from those that cannot continue them, as `dispatch` says.
use actix::{Context, Handler, Message};
use shared::ids::ReplicaId;

use super::super::dispatch::{Messages, NotPlaced, ToReplica};
use super::super::view;
use super::ClusterActor;
use crate::engine::{EngineCommand, EngineError, EngineEvent, EventSender, GenerateRequest};
use crate::replica::actor::{
    AdoptRequests, Cancel, EpochEnded, GiveUpRequests, MigrateRequests, Retire, ShareQueue, Submit,
};
use crate::replica::driver::MovedRequest;

/// The error of a request that was accepted when there was room for it.
fn no_room(needed: u32, room: u32) -> EngineError {
    let message = format!(
        "none has room in its KV cache any more for the {needed} tokens that this request may need \
         (the largest holds {room}); one had when it was accepted"
    );
    EngineError::Unavailable { message }
}

/// Says where requests go on. Those that are `shared` only changed queues: under overload some do
/// so all the time.
fn log_move(from: ReplicaId, (to, message): &(ReplicaId, ToReplica), shared: bool) {
    let ToReplica::Adopt { requests, .. } = message else { return };
    let requests = requests.len();
    if *to == from {
        return;
    }
    match shared {
        true => tracing::debug!(%from, %to, requests, "wait elsewhere"),
        false => tracing::info!(%from, %to, requests, "go on elsewhere"),
    }
}

/// A request or cancellation from the front end.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Command(pub EngineCommand);

impl ClusterActor {
    /// Delivers messages to replicas.
    pub(super) fn tell_replicas(&mut self, ctx: &mut Context<Self>, messages: Messages) {
        for (id, message) in messages {
            self.tell_replica(ctx, id, message);
        }
    }

    fn tell_replica(&mut self, ctx: &mut Context<Self>, id: ReplicaId, message: ToReplica) {
        if matches!(message, ToReplica::Adopt { .. }) {
            self.start_replica(ctx, id);
        }
        let Some(replica) = self.replicas.get(&id) else {
            if let ToReplica::Adopt { requests, .. } = message {
                self.refuse_all(requests);
            }
            return;
        };
        match message {
            ToReplica::Submit { request, events } => replica.do_send(Submit { request, events }),
            ToReplica::Cancel(request) => replica.do_send(Cancel(request)),
            ToReplica::Adopt { requests, .. } => replica.do_send(AdoptRequests(requests)),
            ToReplica::GiveUp => replica.do_send(GiveUpRequests),
            ToReplica::Share(queue_share) => replica.do_send(ShareQueue(queue_share)),
            ToReplica::EpochEnded { epoch, end } => replica.do_send(EpochEnded { epoch, end }),
            ToReplica::Retire => {
                // Its requests arrive by themselves; the actor ends with its last address.
                replica.do_send(Retire);
                self.replicas.remove(&id);
            }
        }
    }

    /// Moves requests of a replica that cannot continue them to those that can, or to one that may
    /// soon, even if it has never served.
    fn place_requests(
        &mut self,
        ctx: &mut Context<Self>,
        MigrateRequests { from, requests, shared }: MigrateRequests,
    ) {
        let known = self.core.replicas().filter(|_| !self.stopping).map(|replica| replica.id);
        let mut messages = Vec::new();
        let NotPlaced { cancelled, unplaced, outgrown } =
            self.dispatch.place(from, requests, known, &mut messages);
        for request in cancelled {
            request.end(self.hub.observer(), None);
        }
        self.refuse_all(unplaced);
        for (request, room) in outgrown {
            let error = no_room(request.tokens_needed(), room);
            request.end(self.hub.observer(), Some(error));
        }
        messages.iter().for_each(|message| log_move(from, message, shared));
        self.tell_replicas(ctx, messages);
    }

    /// Asks replicas for requests that wait there and could run elsewhere.
    pub(super) fn share_queues(&mut self, ctx: &mut Context<Self>) {
        if self.stopping {
            return;
        }
        let mut messages = Vec::new();
        self.dispatch.share_queues(&mut messages);
        self.tell_replicas(ctx, messages);
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

    fn submit(
        &mut self,
        ctx: &mut Context<Self>,
        request: Box<GenerateRequest>,
        events: EventSender,
    ) {
        let mut messages = Vec::new();
        let refused = match self.stopping {
            true => Err((events, EngineError::ShuttingDown)),
            false => self
                .dispatch
                .submit(request, events, &mut messages)
                .map_err(|events| (events, EngineError::Unavailable { message: self.not_ready() })),
        };
        if let Err((events, error)) = refused {
            self.hub.observer().refused(&events, &error);
            let _ = events.send(EngineEvent::Failed(error));
        }
        self.tell_replicas(ctx, messages);
    }

    fn not_ready(&self) -> String {
        view::not_ready(&self.view.borrow(), self.tensor_parallel)
    }
}

impl Handler<Command> for ClusterActor {
    type Result = ();

    fn handle(&mut self, Command(command): Command, ctx: &mut Self::Context) {
        match command {
            EngineCommand::Submit { request, events } => self.submit(ctx, request, events),
            EngineCommand::Cancel { id } => {
                let mut messages = Vec::new();
                self.dispatch.cancel(id, &mut messages);
                self.tell_replicas(ctx, messages);
            }
        }
    }
}

impl Handler<MigrateRequests> for ClusterActor {
    type Result = ();

    fn handle(&mut self, migrating: MigrateRequests, ctx: &mut Self::Context) {
        self.place_requests(ctx, migrating);
    }
}
