//! Pages that are being sent: shared by those who ask at the same time, and bounded in number, so
//! that clients that ask and then read nothing hold a few pages, not one each.
//!
//! Whoever asks gets a page that was begun after it asked, unless as many pages as may be are still
//! being sent: then the newest of them is good enough for a while, and after that the oldest makes
//! room. Those who have still not read that one to its end are cut off.
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use actix_web::body::{BodySize, MessageBody};
use actix_web::error::BlockingError;
use actix_web::web::{self, Bytes};
use shared::clock::Clock;

/// Maximum number of pages of a kind that are being sent.
pub(super) const SENT_MAX: usize = 4;
/// Where as many are being sent, one begun so recently is shared.
const RECENT: Duration = Duration::from_secs(5);
/// Bytes that are handed to a connection at a time: it copies them.
const PIECE: usize = 16 << 10;

/// A page, kept as long as somebody is to get it.
#[derive(Debug)]
pub(super) struct SentPage {
    began: Duration,
    length: usize,
    /// None once another page has taken its place.
    bytes: Mutex<Option<Bytes>>,
}

impl SentPage {
    fn new(began: Duration, bytes: Vec<u8>) -> Self {
        Self { began, length: bytes.len(), bytes: Mutex::new(Some(bytes.into())) }
    }

    /// A piece of it; none if it has been given up.
    fn piece(&self, from: usize) -> Option<Bytes> {
        let bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let end = from.saturating_add(PIECE).min(self.length);
        bytes.as_ref().filter(|_| from <= end).map(|bytes| bytes.slice(from..end))
    }

    /// Frees its memory, whoever still reads it.
    fn give_up(&self) {
        drop(self.bytes.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

/// The pages of one kind that are being sent, the oldest first.
#[derive(Clone, Debug, Default)]
pub(super) struct SentPages(Arc<tokio::sync::Mutex<Vec<Weak<SentPage>>>>);

impl SentPages {
    /// Returns a page for somebody who asks now: made by `render`, on another thread than this one,
    /// or one that others get as well.
    ///
    /// # Errors
    /// When there is no thread, or rendering panics.
    pub(super) async fn get(
        &self,
        clock: Arc<dyn Clock>,
        render: impl FnOnce() -> Vec<u8> + Send + 'static,
    ) -> Result<Arc<SentPage>, BlockingError> {
        let asked = clock.now();
        // One at a time; those who wait meanwhile can share what comes of it.
        let mut sent = self.0.clone().lock_owned().await;
        sent.retain(|page| page.strong_count() > 0);
        let now = clock.now();
        let is_full = sent.len() >= SENT_MAX;
        let newest = sent.last().and_then(Weak::upgrade).filter(|page| {
            page.began >= asked || (is_full && now.saturating_sub(page.began) <= RECENT)
        });
        if let Some(page) = newest {
            return Ok(page);
        }
        if is_full && let Some(oldest) = sent.remove(0).upgrade() {
            tracing::debug!("a metrics page that is read too slowly is given up");
            oldest.give_up();
        }
        // Not on a thread that serves streams. Whoever asked may leave meanwhile: the place is
        // taken until the page is there, so that no two are rendered at once.
        web::block(move || {
            let page = Arc::new(SentPage::new(now, render()));
            sent.push(Arc::downgrade(&page));
            page
        })
        .await
    }
}

/// A page as the body of an answer.
pub(super) struct PageBody {
    /// None when all of it has been handed over.
    page: Option<Arc<SentPage>>,
    length: u64,
    at: usize,
}

impl PageBody {
    pub(super) fn new(page: Arc<SentPage>) -> Self {
        let length = page.length as u64;
        Self { page: Some(page), length, at: 0 }
    }
}

impl MessageBody for PageBody {
    type Error = io::Error;

    fn size(&self) -> BodySize {
        BodySize::Sized(self.length)
    }

    fn poll_next(
        self: Pin<&mut Self>,
        _context: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, Self::Error>>> {
        let this = self.get_mut();
        let Some(page) = this.page.take() else { return Poll::Ready(None) };
        let Some(piece) = page.piece(this.at) else {
            let error = io::Error::new(io::ErrorKind::TimedOut, "newer pages take its place");
            return Poll::Ready(Some(Err(error)));
        };
        this.at += piece.len();
        // Let go with its last piece, not when somebody asks for more.
        this.page = Some(page).filter(|page| this.at < page.length);
        Poll::Ready(Some(Ok(piece)))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use shared::clock::ManualClock;

    use super::*;

    const LENGTH: usize = 3 * PIECE + 1;

    struct Asker {
        pages: SentPages,
        clock: Arc<ManualClock>,
        rendered: Arc<AtomicUsize>,
    }

    impl Asker {
        fn new() -> Self {
            let (pages, rendered) = (SentPages::default(), Arc::default());
            Self { pages, clock: Arc::new(ManualClock::default()), rendered }
        }

        async fn ask(&self) -> PageBody {
            let rendered = self.rendered.clone();
            let page = self.pages.get(self.clock.clone(), move || {
                let number = rendered.fetch_add(1, Ordering::Relaxed);
                vec![number as u8; LENGTH]
            });
            PageBody::new(page.await.unwrap())
        }
    }

    /// Reads a body to its end; the page's number and its length.
    fn read(mut body: PageBody) -> Result<(u8, usize), io::Error> {
        let mut context = Context::from_waker(std::task::Waker::noop());
        let mut all = Vec::new();
        loop {
            match Pin::new(&mut body).poll_next(&mut context) {
                Poll::Ready(Some(piece)) => all.extend_from_slice(&piece?),
                Poll::Ready(None) => return Ok((all[0], all.len())),
                Poll::Pending => panic!("a page is there"),
            }
        }
    }

    #[actix_rt::test]
    async fn a_page_is_new_for_each_who_reads_it_before_the_next_asks() {
        let asker = Asker::new();
        for number in 0..9 {
            assert_eq!(read(asker.ask().await).unwrap(), (number, LENGTH));
        }
    }

    #[actix_rt::test]
    async fn no_more_pages_than_allowed_are_held_by_those_who_do_not_read() {
        let asker = Asker::new();
        let mut bodies = Vec::new();
        for _ in 0..400 {
            bodies.push(asker.ask().await);
            asker.clock.advance(Duration::from_millis(10));
        }
        assert_eq!(asker.rendered.load(Ordering::Relaxed), SENT_MAX);
        // The last one is too old now: the first makes room, and nobody else.
        asker.clock.advance(RECENT);
        assert_eq!(read(asker.ask().await).unwrap(), (SENT_MAX as u8, LENGTH));
        let whole = bodies.into_iter().map(|body| read(body).is_ok());
        let whole: Vec<bool> = whole.collect();
        assert!(!whole[0] && whole[1..].iter().all(|whole| *whole), "{whole:?}");
        assert!(asker.pages.0.lock().await.iter().all(|page| page.strong_count() == 0));
    }

    #[actix_rt::test]
    async fn who_asks_at_the_same_time_shares_a_page_that_began_afterwards() {
        let asker = Asker::new();
        let bodies = futures_util::future::join_all((0..100).map(|_| asker.ask())).await;
        assert_eq!(bodies.len(), 100);
        assert_eq!(asker.rendered.load(Ordering::Relaxed), 1);
    }
}
