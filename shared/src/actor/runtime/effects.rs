//! Carries out what the pure cores decided: sends frames, puts messages into mailboxes, informs
//! waiters and watchers.
use std::collections::VecDeque;

use super::ActorRuntime;
use super::state::State;
use crate::actor::exchange::Effect;
use crate::actor::named::Envelope;
use crate::actor::registry::{Home, Notice};
use crate::metrics::labels::MessageRefusal;
use crate::protocol::actors::creation::PLACER;
use crate::protocol::actors::{ActorFrame, AskError, Wants};

impl ActorRuntime {
    pub(super) fn notify(&self, state: &mut State, notices: Vec<Notice>) {
        for Notice { watcher: (home, id), reason } in notices {
            match home {
                Home::Here => state.tell(id, Ok(reason)),
                Home::Peer(peer) => {
                    let _ = state.send(peer, &ActorFrame::Died { id, reason });
                }
            }
        }
        for ((home, id), generation) in state.registry.take_found() {
            if let Home::Peer(peer) = home {
                let _ = state.send(peer, &ActorFrame::Watching { id, generation });
            }
        }
    }

    /// Carries out effects. Returns why a message that nobody waits for was lost, if one was.
    pub(super) fn carry_out(&self, state: &mut State, effects: Vec<Effect>) -> Option<AskError> {
        let mut queue = VecDeque::from(effects);
        let mut lost = None;
        while let Some(effect) = queue.pop_front() {
            let mut more = Vec::new();
            match effect {
                Effect::Send { peer, frame } => {
                    let Err(error) = state.send(peer, &frame) else { continue };
                    match frame {
                        ActorFrame::Deliver { id: 0, .. } => queue.push_back(Effect::Lost(error)),
                        ActorFrame::Deliver { id, .. } => {
                            state.exchange.answered(Some(peer), id, Err(error), &mut more);
                        }
                        ActorFrame::Answer { id, outcome: Ok(_) } => {
                            // The asker is told why there is no reply.
                            self.count(&error);
                            let error = match error {
                                // The message was handled: it must not be sent again without
                                // limit, as one that found its mailbox full.
                                AskError::MailboxFull(queue) => AskError::Failed(format!(
                                    "its reply was not sent: {queue} is full"
                                )),
                                error => error,
                            };
                            let frame = ActorFrame::Answer { id, outcome: Err(error) };
                            more.push(Effect::Send { peer, frame });
                        }
                        // The link is gone, and the peer knows that.
                        _ => self.count(&error),
                    }
                }
                Effect::Deliver { to, id, body, .. } if to == PLACER => {
                    self.requested(state, id, &body);
                }
                Effect::Deliver { to, id, wants, body } => {
                    let envelope = Envelope::new(self.downgrade(), &to, id, wants, body);
                    match state.put(&to, envelope) {
                        Ok(()) => {
                            self.inner
                                .stats
                                .with(|stats| stats.add(self.inner.counters.messages, 1));
                            if wants == Wants::Delivery {
                                state.exchange.answered(None, id, Ok(Vec::new()), &mut more);
                            }
                        }
                        Err(error) if id == 0 => queue.push_back(Effect::Lost(error)),
                        Err(error) => {
                            state.exchange.answered(None, id, Err(error), &mut more);
                        }
                    }
                }
                Effect::Resolve { waiter, outcome } => {
                    if let Err(error) = &outcome {
                        self.count(error);
                    }
                    if let Some(sender) = state.waiters.remove(&waiter) {
                        let _ = sender.send(outcome);
                    }
                }
                Effect::Lost(error) => {
                    self.count(&error);
                    lost = Some(error);
                }
            }
            queue.extend(more);
        }
        lost
    }

    pub(super) fn count(&self, error: &AskError) {
        let reason = match error {
            AskError::NoSuchActor(_) => MessageRefusal::NoSuchActor,
            AskError::MailboxFull(_) => MessageRefusal::MailboxFull,
            AskError::TooManyAsks(_) => MessageRefusal::TooManyAsks,
            AskError::LinkLost(_) => MessageRefusal::LinkLost,
            AskError::Deadline(_) => MessageRefusal::Deadline,
            AskError::Failed(_) => MessageRefusal::Failed,
            AskError::Malformed(_) => MessageRefusal::Malformed,
            AskError::TooLarge(_) => MessageRefusal::TooLarge,
            AskError::Unavailable(_) => MessageRefusal::Unavailable,
        };
        self.inner.stats.with(|stats| stats.add(self.inner.counters.refused.get(reason), 1));
    }
}
