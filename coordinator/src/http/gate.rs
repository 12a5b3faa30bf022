//! The gate of a server that may be told to end: once closed, it lets no new request in, and tells
//! when the last one inside has left.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use actix_web::HttpResponse;
use tokio::sync::watch;

use super::body::{Companion, accompanied};
use super::error::ApiError;
use crate::engine::EngineError;

/// See the module's documentation. Clones share the gate.
#[derive(Clone, Debug)]
pub struct Gate {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    closed: AtomicBool,
    inside: watch::Sender<usize>,
}

/// A request inside the gate, until this is dropped.
#[derive(Debug)]
pub struct Visit {
    inner: Arc<Inner>,
}

impl Default for Gate {
    fn default() -> Self {
        let inside = watch::Sender::new(0);
        Self { inner: Arc::new(Inner { closed: AtomicBool::new(false), inside }) }
    }
}

impl Gate {
    /// Lets a request in; `None` once the gate is closed.
    #[must_use]
    pub fn enter(&self) -> Option<Visit> {
        // Counted first: if the gate is closed meanwhile, the closer waits for this request, or it
        // turns back.
        self.inner.inside.send_modify(|inside| *inside += 1);
        let visit = Visit { inner: self.inner.clone() };
        (!self.is_closed()).then_some(visit)
    }

    /// Closes the gate.
    pub fn close(&self) {
        self.inner.closed.store(true, Ordering::SeqCst);
    }

    /// Whether the gate is closed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.inner.closed.load(Ordering::SeqCst)
    }

    /// Number of requests inside.
    #[must_use]
    pub fn inside(&self) -> usize {
        *self.inner.inside.borrow()
    }

    /// Waits up to `patience` until no request is inside; returns whether that happened.
    pub async fn empty_within(&self, patience: Duration) -> bool {
        let mut inside = self.inner.inside.subscribe();
        let empty = inside.wait_for(|inside| *inside == 0);
        tokio::time::timeout(patience, empty).await.is_ok()
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        self.inner.inside.send_modify(|inside| *inside = inside.saturating_sub(1));
    }
}

impl Visit {
    /// Keeps the request inside until the response's body has been sent whole or dropped.
    #[must_use]
    pub fn until_sent(self, response: HttpResponse) -> HttpResponse {
        response.map_body(|_, body| accompanied(body, self))
    }
}

/// The error of a request that comes too late.
#[must_use]
pub fn closed() -> ApiError {
    EngineError::ShuttingDown.into()
}

impl Companion for Visit {}

#[cfg(test)]
mod tests {
    use actix_web::body::{BodySize, MessageBody as _};

    use super::*;

    #[tokio::test]
    async fn a_closed_gate_lets_nobody_in_and_knows_when_the_last_has_left() {
        let gate = Gate::default();
        let short = Duration::from_millis(1);
        let (first, second) = (gate.enter().unwrap(), gate.enter().unwrap());
        gate.close();
        assert!(gate.enter().is_none() && gate.inside() == 2);
        drop(first);
        assert!(!gate.empty_within(short).await);
        let response = second.until_sent(HttpResponse::Ok().body("text"));
        assert!(!gate.empty_within(short).await, "its body is not sent yet");
        assert_eq!(response.body().size(), BodySize::Sized(4));
        drop(response);
        assert!(gate.empty_within(short).await && gate.inside() == 0);
    }
}
