//! What a front end answers until it serves: that it is alive, and what it waits for. Whoever looks
//! after it must not take one whose coordinator is away for one that hangs.
use std::io;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use actix_web::dev::{Server, ServerHandle};

use super::FrontendError;
use crate::http::listener::{BoundHttp, Endpoint, HttpListener};
use crate::http::state::{Readiness, ReadinessCheck};

/// How long connections that were accepted before a stop get to be answered.
const LAST_ANSWERS: Duration = Duration::from_millis(50);

/// How far a front end has come. Clones share it.
#[derive(Clone)]
pub(super) struct StartUp(Arc<Inner>);

struct Inner {
    waits_for: Mutex<String>,
    /// Set once it serves.
    serves: OnceLock<ReadinessCheck>,
}

impl std::fmt::Debug for StartUp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StartUp").field("readiness", &self.readiness()).finish()
    }
}

impl StartUp {
    pub(super) fn new() -> Self {
        let waits_for = Mutex::new("it dials its coordinator".to_owned());
        Self(Arc::new(Inner { waits_for, serves: OnceLock::new() }))
    }

    /// Says what it waits for.
    pub(super) fn waits_for(&self, what: String) {
        *self.0.waits_for.lock().unwrap_or_else(PoisonError::into_inner) = what;
    }

    /// From now on it serves, and this tells whether it can.
    pub(super) fn serves(&self, readiness: ReadinessCheck) {
        let _ = self.0.serves.set(readiness);
    }

    fn readiness(&self) -> Readiness {
        if let Some(readiness) = self.0.serves.get() {
            return readiness();
        }
        let waits_for = self.0.waits_for.lock().unwrap_or_else(PoisonError::into_inner);
        let message = format!("this front end does not serve yet: {waits_for}");
        Readiness { ready: false, message }
    }

    pub(super) fn check(&self) -> ReadinessCheck {
        let this = self.clone();
        Arc::new(move || this.readiness())
    }
}

/// An address, or a Unix socket, that is held from the start.
#[derive(Debug)]
pub(super) struct Bound {
    pub(super) http: BoundHttp,
    option: &'static str,
}

impl Bound {
    pub(super) fn new(endpoint: &Endpoint, option: &'static str) -> Result<Self, FrontendError> {
        match BoundHttp::bind(endpoint) {
            Ok(http) => Ok(Self { http, option }),
            Err(error) => Err(FrontendError::Listen { address: endpoint.clone(), option, error }),
        }
    }

    pub(super) fn failed(&self) -> impl FnOnce(io::Error) -> FrontendError + use<> {
        let (address, option) = (self.http.endpoint.clone(), self.option);
        move |error| FrontendError::Listen { address, option, error }
    }
}

/// A server that ends when this is dropped.
#[derive(Debug)]
pub(super) struct OwnedServer(ServerHandle);

impl OwnedServer {
    /// Starts what `serve` makes of a listener on this address.
    pub(super) fn start(
        bound: &Bound,
        serve: impl FnOnce(HttpListener) -> io::Result<Server>,
    ) -> Result<Self, FrontendError> {
        let listener = bound.http.listener.try_clone();
        let server = listener.and_then(serve).map_err(bound.failed())?;
        let handle = server.handle();
        actix::spawn(server);
        Ok(Self(handle))
    }

    /// Ends it. Connections from now on wait for the next server on the address.
    pub(super) async fn end(self) {
        self.0.pause().await;
        tokio::time::sleep(LAST_ANSWERS).await;
        self.0.stop(true).await;
    }
}

impl Drop for OwnedServer {
    fn drop(&mut self) {
        // It is told at once, whether or not anybody waits for its end.
        drop(self.0.stop(false));
    }
}
