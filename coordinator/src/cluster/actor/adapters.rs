//! LoRA adapters that operators load and unload: who waits for the outcome, which adapters requests
//! may name, and when the last request of an unloaded one has ended.
use std::collections::BTreeMap;
use std::time::Duration;

use actix::{Handler, Message, ResponseFuture};
use shared::protocol::{AdapterCommand, AdapterError};
use tokio::sync::oneshot;

use super::super::{Effect, Ticket};
use super::ClusterActor;
use crate::adapters::{Leaving, ServedAdapters};

/// Maximum number of commands that wait for their outcome.
const WAITING_MAX: usize = 256;

/// An operator's command about an adapter. Answers when it is carried out, with the number of
/// commands so far.
#[derive(Clone, Debug, Message)]
#[rtype(result = "Result<u64, AdapterError>")]
pub struct ChangeAdapters(pub AdapterCommand);

/// Whether adapters that are not served any more still have their places, which requests may use.
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "bool")]
pub struct HasLeavingAdapters;

type Outcome = Result<u64, AdapterError>;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Adapting {
    served: ServedAdapters,
    leaving: Vec<Leaving>,
    tickets: u64,
    waiting: BTreeMap<Ticket, oneshot::Sender<Outcome>>,
}

impl Adapting {
    pub(super) fn serve(&mut self, served: ServedAdapters) {
        self.served = served;
    }
}

impl ClusterActor {
    /// Publishes the list of adapters.
    pub(super) fn adapters_changed(&mut self) {
        let list = self.core.adapters();
        self.to_fetch = self.core.to_fetch();
        self.hub.observer().record().adapters(list.iter().map(|adapter| adapter.name.as_str()));
        let gone = self.adapters.served.replace(list);
        self.adapters.leaving.extend(gone);
    }

    /// Tells whoever gave a command what became of it.
    pub(super) fn adapter_changed(&mut self, ticket: Ticket, outcome: Result<(), AdapterError>) {
        match &outcome {
            Ok(()) => {
                let list = self.core.adapters().iter().map(|adapter| adapter.name.as_str());
                let list = list.collect::<Vec<_>>().join(", ");
                tracing::info!(adapters = list, "an operator changed the adapters");
            }
            Err(error) => tracing::warn!(%error, "an operator's command about an adapter failed"),
        }
        if let Some(waiting) = self.adapters.waiting.remove(&ticket) {
            let _ = waiting.send(outcome.map(|()| self.core.desired().generation));
        }
    }

    /// Frees the places of unloaded adapters that no request uses any more.
    pub(super) fn free_adapters(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        let leaving = self.core.leaving_adapters().iter().map(|adapter| adapter.number);
        let tracked = &self.adapters.leaving;
        let is_unused =
            |number: &u32| !tracked.iter().any(|it| it.number == *number && !it.is_unused());
        let unused: Vec<u32> = leaving.filter(is_unused).collect();
        if unused.is_empty() {
            return;
        }
        self.adapters.leaving.retain(|it| !unused.contains(&it.number));
        self.core.adapters_unused(now, &unused, effects);
    }
}

impl Handler<ChangeAdapters> for ClusterActor {
    type Result = ResponseFuture<Outcome>;

    fn handle(
        &mut self,
        ChangeAdapters(command): ChangeAdapters,
        ctx: &mut Self::Context,
    ) -> Self::Result {
        if self.adapters.waiting.len() >= WAITING_MAX {
            let message = format!("{WAITING_MAX} commands about adapters wait already");
            return Box::pin(async move { Err(AdapterError::NotNow(message)) });
        }
        self.adapters.tickets += 1;
        let ticket = Ticket(self.adapters.tickets);
        let (sender, outcome) = oneshot::channel();
        self.adapters.waiting.insert(ticket, sender);
        let (now, mut effects) = (self.clock.now(), Vec::new());
        // What was unloaded since the last tick may have left room for this one.
        self.free_adapters(now, &mut effects);
        self.core.change_adapters(now, ticket, command, &mut effects);
        self.carry_out(ctx, effects);
        Box::pin(async move {
            let stopped = || AdapterError::NotNow("the coordinator is stopping".to_owned());
            outcome.await.unwrap_or_else(|_| Err(stopped()))
        })
    }
}

impl Handler<HasLeavingAdapters> for ClusterActor {
    type Result = bool;

    fn handle(&mut self, _: HasLeavingAdapters, _ctx: &mut Self::Context) -> bool {
        !self.core.leaving_adapters().is_empty()
    }
}
