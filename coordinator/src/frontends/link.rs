//! The receiving side of one front end's link.

use std::sync::Arc;

use shared::actor::exchange::PeerId;
use shared::actor::link::LinkEvent;
use shared::ids::{Incarnation, RequestId};
use shared::metrics::labels::RejectReason;
use shared::protocol::actors::ActorLife;
use shared::protocol::{EngineEvent, FromFrontend, FrontendHello, FrontendId, SubmitRequest};
use shared::wire::codec;
use shared::wire::frame::FrameKind;

use super::Frontends;
use super::events::LinkRequests;
use super::making::Making;
use crate::engine::{EngineCommand, EngineError};
use crate::links::link_end;

/// A front end's own request numbers lie below this; the link's number comes above.
pub(super) const LINK_SHIFT: u32 = 40;

/// Takes what one front end sends.
pub(super) struct Receiver {
    pub(super) frontends: Arc<Frontends>,
    id: FrontendId,
    incarnation: Incarnation,
    /// Unique among all links there ever were, so that two front ends' request numbers differ.
    link_number: u64,
    requests: LinkRequests,
    /// The link, as named actors know it.
    peer: PeerId,
    node: String,
    /// Its requests that a grammar is being made for.
    pub(super) making: Making,
}

impl Receiver {
    /// Of the `link_number`th link, that of the front end which said `hello`.
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
            making: Making::default(),
        }
    }

    /// Takes what the link has; false ends it.
    pub(super) fn take(&self, event: LinkEvent) -> bool {
        match event {
            LinkEvent::Frame(frame) if frame.kind == FrameKind::Actor => {
                self.frontends.actors.frame(self.peer, &frame.body)
            }
            LinkEvent::Frame(frame) => {
                match codec::decode_message::<FromFrontend>(&frame.body) {
                    Ok(message) => return self.message(message),
                    Err(error) => {
                        tracing::error!(frontend = %self.id, %error, "sent what cannot be read");
                    }
                }
                false
            }
            LinkEvent::Suspect | LinkEvent::Alive => true,
            LinkEvent::Closed { reason } => {
                self.frontends.hub.observer().record().link_ended(link_end(&reason));
                self.requests.close();
                self.making.clear();
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
                let Some(id) = self.global(id) else { return self.impossible(&over(id)) };
                if self.making.cancel(id) {
                    return true;
                }
                // A full channel is no loss: whoever has it sees that its events are closed.
                let _ = self.frontends.commands.try_send(EngineCommand::Cancel { id });
                true
            }
            FromFrontend::Stats(stats) => {
                self.frontends.report(self.id, self.incarnation, &stats);
                true
            }
            FromFrontend::Goodbye { reason } => {
                tracing::info!(frontend = %self.id, %reason, "the front end says goodbye");
                self.frontends.hub.observer().record().frontend_leaves(self.id);
                true
            }
        }
    }

    /// The engine's number for a request of this link; `None` for one that would be another link's.
    fn global(&self, id: RequestId) -> Option<RequestId> {
        (id.0 >> LINK_SHIFT == 0).then_some(RequestId(self.link_number << LINK_SHIFT | id.0))
    }

    /// What no working front end sends ends its link.
    fn impossible(&self, reason: &str) -> bool {
        tracing::error!(frontend = %self.id, %reason, "sent an impossible request");
        false
    }

    fn submit(&self, submit: SubmitRequest) -> bool {
        let frontends = &self.frontends;
        let visit = frontends.gate.enter();
        let late = visit.is_none();
        let Some(events) = self.requests.begin(submit.id, submit.n as usize, visit) else {
            return self.impossible(&format!("request number {} runs already", submit.id.0));
        };
        if late {
            frontends.hub.observer().record().rejected(RejectReason::ShuttingDown);
            let _ = events.send(EngineEvent::Failed(EngineError::ShuttingDown));
            return true;
        }
        let request = match self.global(submit.id) {
            Some(id) => frontends.request(id, submit),
            None => Err(over(submit.id)),
        };
        let request = match request {
            Ok(request) => Box::new(request),
            Err(reason) => return self.impossible(&reason),
        };
        if request.guide_spec.is_some() {
            self.making.make(self.frontends.clone(), request, events);
        } else {
            frontends.enter(request, events);
        }
        true
    }
}

fn over(id: RequestId) -> String {
    format!("request number {} is not below 2^{LINK_SHIFT}", id.0)
}
