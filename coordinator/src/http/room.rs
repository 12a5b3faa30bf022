//! How much memory request bodies may take together. One large body is fine, and so are many small
//! ones; with a bound per body only, a few hundred clients could fill a host's memory.
use std::sync::Arc;

use actix_web::web::BytesMut;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::error::ApiError;

/// Bytes of all bodies being read or processed, except the first [`FREE`] of each. What is made
/// from a body may take several times as much.
const ALL_BODIES: usize = 256 << 20;
/// Minimum room, in bodies of the largest size.
const LARGEST: usize = 4;
/// Bytes of each body that are not counted: connections have their own bound.
const FREE: usize = 64 << 10;

/// See the module's documentation. Clones share the room.
#[derive(Clone, Debug)]
pub struct Room {
    left: Arc<Semaphore>,
    body_max: usize,
}

/// One body's share of the room, until its last clone is dropped.
#[derive(Clone, Debug, Default)]
pub struct Share {
    _permit: Option<Arc<OwnedSemaphorePermit>>,
}

impl Room {
    /// Makes the room for bodies of at most so many bytes.
    #[must_use]
    pub fn new(body_max: usize) -> Self {
        let all = ALL_BODIES.max(body_max.saturating_mul(LARGEST)).min(Semaphore::MAX_PERMITS);
        Self { left: Arc::new(Semaphore::new(all)), body_max }
    }

    /// Bytes of further bodies that there is room for.
    #[cfg(test)]
    pub(super) fn left(&self) -> usize {
        self.left.available_permits()
    }

    /// Starts an empty body.
    #[must_use]
    pub fn body(&self) -> Body<'_> {
        Body { room: self, bytes: BytesMut::new(), counted: 0, permit: None }
    }
}

/// A body being received.
#[derive(Debug)]
pub struct Body<'a> {
    room: &'a Room,
    bytes: BytesMut,
    /// Number of bytes it has a permit for.
    counted: usize,
    permit: Option<OwnedSemaphorePermit>,
}

impl Body<'_> {
    /// Appends the next piece. Never waits for room while holding part of a body: two such bodies
    /// would wait for each other.
    ///
    /// # Errors
    /// 413 if the body is too large, 503 if there is no room for it now.
    pub fn push(&mut self, piece: &[u8]) -> Result<(), ApiError> {
        let length = self.bytes.len() + piece.len();
        if length > self.room.body_max {
            return Err(ApiError::too_large(self.room.body_max));
        }
        let more = length.saturating_sub(FREE).saturating_sub(self.counted);
        if more > 0 {
            let busy = || ApiError::overloaded("too many large bodies are being read at once");
            let count = u32::try_from(more).map_err(|_| busy())?;
            let taken = self.room.left.clone().try_acquire_many_owned(count);
            let taken = taken.map_err(|_| busy())?;
            match &mut self.permit {
                Some(permit) => permit.merge(taken),
                None => self.permit = Some(taken),
            }
            self.counted += more;
        }
        self.bytes.extend_from_slice(piece);
        Ok(())
    }

    /// Returns the whole body, with its share of the room.
    #[must_use]
    pub fn whole(self) -> (BytesMut, Share) {
        (self.bytes, Share { _permit: self.permit.map(Arc::new) })
    }
}

#[cfg(test)]
mod tests {
    use shared::metrics::labels::RejectReason;

    use super::*;

    #[test]
    fn large_bodies_have_room_together_and_small_ones_always() {
        let max = 100 << 20;
        let room = Room::new(max);
        let (large, small) = (vec![0; 50 << 20], vec![0; FREE]);
        let body = |pieces: &[&[u8]]| {
            let mut body = room.body();
            pieces.iter().try_for_each(|piece| body.push(piece))?;
            Ok::<_, ApiError>(body.whole())
        };
        let mut shares: Vec<Share> = (0..4).map(|_| body(&[&large, &large]).unwrap().1).collect();
        let error = body(&[&large]).unwrap_err();
        assert!(error.to_string().contains("too many large bodies"), "{error}");
        assert_eq!(error.reason(), Some(RejectReason::Overloaded));
        let (bytes, _share) = body(&[&small[1..], &small[..1]]).unwrap();
        assert_eq!(bytes.len(), FREE, "a small one needs none of it");
        // Its room is freed with the last clone of its share.
        let also = shares[0].clone();
        shares.remove(0);
        assert!(body(&[&large]).is_err());
        drop(also);
        assert!(body(&[&large]).is_ok());
        let error = body(&[&large, &large, &[0]]).unwrap_err();
        assert!(error.to_string().contains(&max.to_string()), "{error}");
        drop(shares);
        assert_eq!(room.left.available_permits(), 4 * max);
    }
}
