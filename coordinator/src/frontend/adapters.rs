//! Commands about LoRA adapters on their way to the coordinator, and the list of those it serves.
use std::collections::{BTreeMap, VecDeque};

use shared::protocol::{Adapter, AdapterError, FromFrontend};
use tokio::sync::{mpsc, oneshot};

use crate::adapters::{AdapterAsk, ServedAdapters};

/// Maximum number of commands that wait for the coordinator's answer.
const ASKED_MAX: usize = 64;

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Adapting {
    served: ServedAdapters,
    asks: mpsc::Receiver<AdapterAsk>,
    /// The next command's number.
    next: u64,
    asked: BTreeMap<u64, oneshot::Sender<Result<(), AdapterError>>>,
    /// To be sent.
    messages: VecDeque<FromFrontend>,
}

impl Adapting {
    pub(super) fn new(served: ServedAdapters, asks: mpsc::Receiver<AdapterAsk>) -> Self {
        Self { served, asks, next: 0, asked: BTreeMap::new(), messages: VecDeque::new() }
    }

    /// Waits for the next command, if there is room for one.
    pub(super) async fn ask(&mut self) -> AdapterAsk {
        if self.asked.len() < ASKED_MAX
            && let Some(ask) = self.asks.recv().await
        {
            return ask;
        }
        std::future::pending().await
    }

    /// Sends a command to the coordinator.
    pub(super) fn take(&mut self, AdapterAsk { command, answer }: AdapterAsk) {
        self.next += 1;
        self.asked.insert(self.next, answer);
        self.messages.push_back(FromFrontend::ChangeAdapter(self.next, command));
    }

    pub(super) fn next_message(&mut self) -> Option<FromFrontend> {
        self.messages.pop_front()
    }

    /// The coordinator serves these.
    pub(super) fn serve(&mut self, adapters: &[Adapter]) {
        self.served.replace(adapters);
    }

    /// The coordinator has answered a command.
    pub(super) fn changed(&mut self, ask: u64, outcome: Result<(), AdapterError>) {
        if let Some(answer) = self.asked.remove(&ask) {
            let _ = answer.send(outcome);
        }
    }

    /// The link has ended, with all answers.
    pub(super) fn link_lost(&mut self) {
        self.messages.clear();
        for (_, answer) in std::mem::take(&mut self.asked) {
            let message = "the link to the coordinator ended; GET /v1/models shows whether the \
                           command was carried out";
            let _ = answer.send(Err(AdapterError::NotNow(message.to_owned())));
        }
    }
}
