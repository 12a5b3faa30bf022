//! Bodies of answers that something lives as long as, and learns whether they were taken whole.
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use actix_web::body::{BodySize, BoxBody, MessageBody};
use actix_web::web::Bytes;

/// Lives as long as a body, and is dropped with it.
pub(super) trait Companion: Unpin + 'static {
    /// The body was taken to its end; not called when the client leaves before.
    fn sent(&mut self) {}
}

struct Accompanied<C> {
    body: BoxBody,
    companion: C,
}

/// A body with its companion.
pub(super) fn accompanied<C: Companion>(
    body: impl MessageBody + 'static,
    mut companion: C,
) -> BoxBody {
    if body.size().is_eof() {
        // Nobody asks for pieces of an empty one.
        companion.sent();
    }
    BoxBody::new(Accompanied { body: body.boxed(), companion })
}

impl<C: Companion> MessageBody for Accompanied<C> {
    type Error = <BoxBody as MessageBody>::Error;

    fn size(&self) -> BodySize {
        self.body.size()
    }

    fn poll_next(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, Self::Error>>> {
        let piece = ready!(Pin::new(&mut self.body).poll_next(context));
        if piece.is_none() {
            self.companion.sent();
        }
        Poll::Ready(piece)
    }
}
