//! Runs work on text off the threads that serve connections: about as many pieces at a time as
//! there are cores, after a bounded queue.
//!
//! Work that has started runs to its end, however long that takes: its size is bounded. Large texts
//! leave a core to small ones.
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::error::ApiError;

/// Longest wait for a core.
const QUEUE_DEADLINE: Duration = Duration::from_secs(30);
/// Maximum number of pieces of work that wait: the default number of requests that may wait for a
/// replica. Their memory is bounded by [`super::room`].
const QUEUE_MAX: usize = 16 << 10;
/// Texts of more bytes count as large.
pub const LARGE: usize = 64 << 10;

/// See the module's documentation. Clones share the pool.
#[derive(Clone, Debug)]
pub struct TextPool {
    all: Arc<Semaphore>,
    large: Arc<Semaphore>,
    waiting: Arc<AtomicUsize>,
    deadline: Duration,
}

impl Default for TextPool {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self::new(cores, QUEUE_DEADLINE)
    }
}

/// Counts a piece of work that waits.
struct Waiting(Arc<AtomicUsize>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl TextPool {
    pub(super) fn new(cores: usize, deadline: Duration) -> Self {
        Self {
            all: Arc::new(Semaphore::new(cores.max(1))),
            large: Arc::new(Semaphore::new(cores.saturating_sub(1).max(1))),
            waiting: Arc::default(),
            deadline,
        }
    }

    async fn enter(&self, bytes: usize) -> Result<[Option<OwnedSemaphorePermit>; 2], ApiError> {
        let busy = || ApiError::overloaded("too many texts wait to be tokenized");
        let waiting = self.waiting.fetch_add(1, Ordering::Relaxed);
        let _waiting = Waiting(self.waiting.clone());
        if waiting >= QUEUE_MAX {
            return Err(busy());
        }
        let permits = async {
            let large = match bytes > LARGE {
                true => Some(self.large.clone().acquire_owned().await),
                false => None,
            };
            (large, self.all.clone().acquire_owned().await)
        };
        let permits = tokio::time::timeout(self.deadline, permits).await;
        let (large, one) = permits.map_err(|_| busy())?;
        Ok([large.and_then(Result::ok), one.ok()])
    }

    /// Runs work on a text of so many bytes.
    ///
    /// # Errors
    /// The work's own, and 503 if too much work waits, or for too long.
    pub async fn run<R: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> Result<R, ApiError> + Send + 'static,
    ) -> Result<R, ApiError> {
        let permits = self.enter(bytes).await?;
        let work = actix_web::web::block(move || {
            // Held until the work ends, even if the client has left.
            let _permits = permits;
            work()
        });
        work.await.map_err(|_| ApiError::internal("processing this text was interrupted"))?
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use shared::metrics::labels::RejectReason;

    use super::*;

    #[actix_rt::test]
    async fn small_texts_pass_large_ones_and_a_wait_has_an_end() {
        let pool = TextPool::new(2, Duration::from_millis(200));
        let (go, wait) = mpsc::channel::<()>();
        let slow = {
            let pool = pool.clone();
            actix_rt::spawn(
                async move { pool.run(LARGE + 1, move || Ok(wait.recv().is_ok())).await },
            )
        };
        while pool.all.available_permits() == 2 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(pool.run(LARGE, || Ok(1)).await.unwrap(), 1);
        let late = pool.run(LARGE + 1, || Ok(2)).await.unwrap_err();
        assert!(late.to_string().contains("wait"), "{late}");
        assert_eq!(late.reason(), Some(RejectReason::Overloaded));
        go.send(()).unwrap();
        assert!(slow.await.unwrap().unwrap(), "what runs is let finish, past the deadline");
        assert_eq!(pool.run(LARGE + 1, || Ok(3)).await.unwrap(), 3);
        assert_eq!(pool.waiting.load(Ordering::Relaxed), 0);
    }
}
