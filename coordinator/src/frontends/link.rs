//! The receiving side of one front end's link.

use std::sync::Arc;

use shared::actor::exchange::PeerId;
use shared::actor::link::LinkEvent;
use shared::ids::{Incarnation, RequestId};
use shared::protocol::actors::ActorLife;
use shared::protocol::{EngineEvent, FromFrontend, FrontendHello, FrontendId, SubmitRequest};
use shared::wire::codec;
use shared::wire::frame::FrameKind;

use super::Frontends;
use super::events::LinkRequests;
use super::preparation::PendingRequests;
use crate::engine::{EngineCommand, EngineError, EventSender};
use crate::links::link_end;

/// A front end's request numbers are below 2^40; the bits above hold the link's number.
pub(super) const LINK_SHIFT: u32 = 40;

/// Handles the messages of one front end.
pub(super) struct Receiver {
    pub(super) frontends: Arc<Frontends>,
    id: FrontendId,
    incarnation: Incarnation,
    /// Unique among all links ever made, so that the request numbers of two front ends differ.
    link_number: u64,
    requests: LinkRequests,
    /// The link's number in the actor runtime.
    peer: PeerId,
    node: String,
    /// Its requests that wait for what must be made first.
    pub(super) pending: PendingRequests,
}

impl Receiver {
    /// For link number `link_number`, of the front end that sent `hello`.
    pub(super) fn new(
        frontends: Arc<Frontends>,
        hello: &FrontendHello,
        id: FrontendId,
        link_number: u64,
        requests: LinkRequests,
        peer: PeerId,
    ) -> Self {
        Self {
            frontends,
            id,
            incarnation: hello.incarnation,
            link_number,
            requests,
            peer,
            node: hello.node.clone(),
            pending: PendingRequests::default(),
        }
    }

    /// Handles an event of the link; returning false ends it.
    pub(super) fn take(&self, event: LinkEvent) -> bool {
        match event {
            LinkEvent::Frame(frame) if frame.kind == FrameKind::Actor => {
                self.frontends.actors.frame(self.peer, &frame.body)
            }
            LinkEvent::Frame(frame) => {
                match codec::decode_message::<FromFrontend>(&frame.body) {
                    Ok(message) => return self.message(message),
                    Err(error) => {
                        tracing::error!(
                            frontend = %self.id, %error,
                            "sent a message that cannot be read"
                        );
                    }
                }
                false
            }
            LinkEvent::Suspect | LinkEvent::Alive => true,
            LinkEvent::Closed { reason } => {
                self.frontends.hub.observer().record().link_ended(link_end(&reason));
                self.requests.close();
                self.pending.clear();
                let (frontends, number) = (&self.frontends, self.link_number);
                let reason = reason.to_string();
                frontends.actors.peer_lost(self.peer, &reason);
                if frontends.left(self.id, self.incarnation, number, &reason) {
                    frontends.name(&self.node, self.id, ActorLife::Dead, Some(&reason));
                }
                true
            }
        }
    }

    pub(super) fn message(&self, message: FromFrontend) -> bool {
        match message {
            FromFrontend::Submit(submit) => self.submit(*submit),
            FromFrontend::Cancel(id) => {
                self.requests.cancel(id);
                let Some(id) = self.engine_id(id) else {
                    return self.protocol_violation(&id_out_of_range(id));
                };
                if self.pending.cancel(id) {
                    return true;
                }
                // A full channel loses nothing: the engine sees that the events are closed.
                let _ = self.frontends.commands.try_send(EngineCommand::Cancel { id });
                true
            }
            FromFrontend::Stats(stats) => {
                self.frontends.report(self.id, self.incarnation, &stats);
                true
            }
            FromFrontend::ChangeAdapter(ask, command) => {
                self.frontends.change_adapter(self.id, self.link_number, ask, command);
                true
            }
            FromFrontend::Goodbye { reason } => {
                tracing::info!(frontend = %self.id, %reason, "the front end says goodbye");
                self.frontends.leaves(self.id, self.link_number);
                true
            }
        }
    }

    /// The engine's number for a request of this link; `None` if `id` is out of range and would
    /// collide with another link's.
    fn engine_id(&self, id: RequestId) -> Option<RequestId> {
        (id.0 >> LINK_SHIFT == 0).then_some(RequestId(self.link_number << LINK_SHIFT | id.0))
    }

    /// Logs a message that no working front end sends; the result ends the link.
    fn protocol_violation(&self, reason: &str) -> bool {
        tracing::error!(frontend = %self.id, %reason, "sent an impossible request");
        false
    }

    fn submit(&self, submit: SubmitRequest) -> bool {
        let frontends = &self.frontends;
        let Some(id) = self.engine_id(submit.id) else {
            return self.protocol_violation(&id_out_of_range(submit.id));
        };
        let visit = frontends.gate.enter();
        let late = visit.is_none();
        let Some(events) = self.requests.begin(submit.id, submit.choices_left(), visit) else {
            return self
                .protocol_violation(&format!("request number {} is already running", submit.id.0));
        };
        if late {
            // The front end sends it to the next leader, and counts what it tells its client.
            let _ = events.send(EngineEvent::Failed(EngineError::ShuttingDown));
            return true;
        }
        let Some(adapter) = frontends.adapter_of(&submit) else {
            let error = EngineError::NoAdapter { name: submit.adapter_name };
            frontends.refuse(&EventSender::Remote(events), error);
            return true;
        };
        let request = match frontends.request(id, submit, adapter) {
            Ok(request) => Box::new(request),
            Err(message) => {
                // Its front end lets no such request through, so one of the two has a defect. The
                // link's other requests must not end with it, nor be sent again with it.
                tracing::error!(frontend = %self.id, reason = message, "sent a bad request");
                frontends.refuse(&EventSender::Remote(events), EngineError::Broke { message });
                return true;
            }
        };
        if PendingRequests::is_needed_for(&request) {
            self.pending.prepare(self.frontends.clone(), request, events);
        } else {
            frontends.submit_to_engine(request, events);
        }
        true
    }
}

fn id_out_of_range(id: RequestId) -> String {
    format!("request number {} is not below 2^{LINK_SHIFT}", id.0)
}
