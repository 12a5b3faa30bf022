//! Attaches a value to an answer's body, which is dropped with it and learns whether the body was
//! sent whole; says how a body of unknown length ends.
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use actix_web::body::{BodySize, BoxBody, MessageBody};
use actix_web::dev::ServiceResponse;
use actix_web::http::{ConnectionType, Version};
use actix_web::web::Bytes;

/// Lives as long as a body and is dropped with it.
pub(super) trait Companion: Unpin + 'static {
    /// The body was sent to its end; not called if the client leaves earlier.
    fn sent(&mut self) {}
}

struct Accompanied<C> {
    body: BoxBody,
    companion: C,
}

/// Attaches a companion to a body.
pub(super) fn accompanied<C: Companion>(
    body: impl MessageBody + 'static,
    mut companion: C,
) -> BoxBody {
    if body.size().is_eof() {
        // An empty body is never polled.
        companion.sent();
    }
    BoxBody::new(Accompanied { body: body.boxed(), companion })
}

/// Lets an answer of unknown length to a client of HTTP/1.0, which knows no chunks, end with the
/// connection.
pub(super) fn end_as_client_knows<B: MessageBody>(answer: &mut ServiceResponse<B>) {
    let is_old = answer.request().version() < Version::HTTP_11;
    if is_old && answer.response().body().size() == BodySize::Stream {
        let head = answer.response_mut().head_mut();
        head.no_chunking(true);
        head.set_connection_type(ConnectionType::Close);
    }
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
