//! Passes messages from rank 0 to the other ranks, for ranks that are threads of a test.
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use kernels::CollectiveError;
use kernels::cuda::Relay;

/// A relay between threads; clones share the message that was sent.
#[derive(Clone, Debug, Default)]
pub struct SharedRelay {
    sent: Arc<(Mutex<Option<Vec<u8>>>, Condvar)>,
}

impl Relay for SharedRelay {
    fn send(&mut self, bytes: &[u8]) -> Result<(), CollectiveError> {
        *self.sent.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(bytes.to_vec());
        self.sent.1.notify_all();
        Ok(())
    }

    fn receive(&mut self, timeout: Duration) -> Result<Vec<u8>, CollectiveError> {
        let sent = self.sent.0.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.sent.1.wait_timeout_while(sent, timeout, |sent| sent.is_none());
        let (sent, _) = waited.unwrap_or_else(PoisonError::into_inner);
        sent.clone().ok_or(CollectiveError::TimedOut { op: "relay", waited: timeout, rank: 0 })
    }
}
