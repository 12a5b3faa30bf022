//! How a worker gets the files of models of the hub before it joins: the coordinator names them in
//! place of a welcome, and takes the worker when it says that it has them. Nothing waits for it
//! meanwhile: it is no rank yet. One that has joined and is a spare fetches in the same way what
//! has come since.
use std::sync::Arc;
use std::time::Duration;

use actix::{AsyncContext as _, Context, Handler, Message};
use shared::actor::link::join::REDIAL_MIN;
use shared::hub::{DownloadHandle, Hub, HubError, HubModel, ModelPart};
use shared::protocol::{TO_FETCH_MAX, ToFetch};

use super::{WorkerActor, WorkerEnd};

/// Before it is tried again, where the hub or the way to it was at fault.
const TRIED_AGAIN: Duration = Duration::from_secs(15);

/// A fetching under way.
#[derive(Debug)]
pub(super) struct ModelFetch(Arc<DownloadHandle>);

impl Drop for ModelFetch {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

#[derive(Message)]
#[rtype(result = "()")]
struct FetchDone(Result<(), HubError>);

/// The outcome of a fetching that nothing waits for.
#[derive(Message)]
#[rtype(result = "()")]
struct FetchedAhead(Result<(), HubError>);

/// What is to be fetched, with the part that is wanted of each.
fn parts(to_fetch: &ToFetch) -> Result<Vec<(HubModel, ModelPart)>, String> {
    let ToFetch { models, adapters } = to_fetch;
    if models.len() > TO_FETCH_MAX || adapters.len() > TO_FETCH_MAX {
        return Err(format!("more than {TO_FETCH_MAX} models or adapters are to be fetched"));
    }
    let models = models.iter().map(|text| (text, ModelPart::Weights));
    let all = models.chain(adapters.iter().map(|text| (text, ModelPart::Adapter)));
    let read = |(text, part): (&String, ModelPart)| match HubModel::parse(text) {
        Some(model) => Ok((model?, part)),
        None => Err(format!("{text} is no model of the hub")),
    };
    all.map(read).collect()
}

fn fetch_all(
    hub: &Hub,
    parts: &[(HubModel, ModelPart)],
    watch: &Arc<DownloadHandle>,
) -> Result<(), HubError> {
    parts.iter().try_for_each(|(model, part)| hub.fetch(&model.wanted(), *part, watch).map(drop))
}

impl WorkerActor {
    /// Of which files it can say that it has them: all that it was last told to fetch.
    pub(super) fn fetched(&self) -> u64 {
        let (Some(to_fetch), Ok(hub)) = (&self.to_fetch, &self.config.hub) else { return 0 };
        let has_all = parts(to_fetch)
            .is_ok_and(|parts| parts.iter().all(|(model, part)| hub.has(model, *part)));
        if has_all { to_fetch.fingerprint() } else { 0 }
    }

    /// Fetches what the coordinator wants it to have, and dials again.
    pub(super) fn fetch(&mut self, ctx: &mut Context<Self>, to_fetch: ToFetch) {
        let ready = self.config.hub.clone().and_then(|hub| Ok((hub, parts(&to_fetch)?)));
        let (hub, parts) = match ready {
            Ok(ready) => ready,
            Err(message) => return self.cannot_fetch(ctx, message),
        };
        let addr = ctx.address();
        let done = move |outcome| addr.do_send(FetchDone(outcome));
        if let Err(message) = self.begin_fetching(to_fetch, hub, parts, done) {
            self.cannot_fetch(ctx, message);
        }
    }

    /// Fetches what it will need as a rank; what fails now is fetched then.
    pub(super) fn fetch_ahead(&mut self, ctx: &mut Context<Self>, to_fetch: ToFetch) {
        let addr = ctx.address();
        let done = move |outcome| addr.do_send(FetchedAhead(outcome));
        let ready = self.config.hub.clone().and_then(|hub| Ok((hub, parts(&to_fetch)?)));
        let begun = ready.and_then(|(hub, it)| self.begin_fetching(to_fetch, hub, it, done));
        if let Err(reason) = begun {
            tracing::warn!(reason, "adapters cannot be fetched before they are needed");
        }
    }

    /// Begins to fetch, in place of what is being fetched, and remembers the list.
    fn begin_fetching(
        &mut self,
        to_fetch: ToFetch,
        hub: Hub,
        parts: Vec<(HubModel, ModelPart)>,
        done: impl FnOnce(Result<(), HubError>) + Send + 'static,
    ) -> Result<(), String> {
        self.to_fetch = Some(to_fetch);
        let watch = Arc::new(DownloadHandle::default());
        self.fetching = Some(ModelFetch(watch.clone()));
        let thread = std::thread::Builder::new().name("fetch".to_owned());
        let spawned = thread.spawn(move || done(fetch_all(&hub, &parts, &watch)));
        spawned.map(drop).map_err(|error| format!("no thread to download with: {error}"))
    }

    fn cannot_fetch(&mut self, ctx: &mut Context<Self>, message: String) {
        tracing::error!(message, "the worker cannot have the model");
        self.finish(ctx, WorkerEnd::Failed { message });
    }
}

impl Handler<FetchedAhead> for WorkerActor {
    type Result = ();

    fn handle(&mut self, FetchedAhead(outcome): FetchedAhead, _ctx: &mut Self::Context) {
        match outcome {
            Ok(()) => tracing::info!("all files that a rank needs are here"),
            // Others are fetched in its place.
            Err(HubError::Cancelled) => {}
            Err(error) => {
                tracing::warn!(%error, "adapters cannot be fetched before they are needed");
            }
        }
    }
}

impl Handler<FetchDone> for WorkerActor {
    type Result = ();

    fn handle(&mut self, FetchDone(outcome): FetchDone, ctx: &mut Self::Context) {
        self.fetching = None;
        let pause = match outcome {
            // Not the files that the coordinator serves: asking again at once would not help.
            Ok(()) if self.fetched() == 0 => TRIED_AGAIN,
            Ok(()) => {
                self.redial = REDIAL_MIN;
                Duration::ZERO
            }
            Err(error) if error.is_transient() => {
                tracing::warn!(%error, "the model cannot be fetched; trying again in {TRIED_AGAIN:?}");
                TRIED_AGAIN
            }
            // Only its owner calls it off, who is gone then.
            Err(HubError::Cancelled) => return,
            Err(error) => return self.cannot_fetch(ctx, error.to_string()),
        };
        self.dial(ctx, pause);
    }
}
