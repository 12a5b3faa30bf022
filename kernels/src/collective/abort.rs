//! Aborts several groups through one handle: the exchanges of hosts and those of devices.
use std::sync::{Arc, Mutex, PoisonError};

use super::AbortHandle;

/// Aborts everything added to it, including what is added after the abort.
#[derive(Debug, Default)]
pub struct AbortAll {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    aborted: bool,
    handles: Vec<Arc<dyn AbortHandle>>,
}

impl AbortAll {
    /// Adds `handle`; aborts it immediately if `self` was already aborted.
    pub fn add(&self, handle: Arc<dyn AbortHandle>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.aborted {
            handle.abort();
        }
        state.handles.push(handle);
    }
}

impl AbortHandle for AbortAll {
    fn abort(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.aborted = true;
        for handle in &state.handles {
            handle.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::single_rank;

    #[test]
    fn what_is_added_before_and_after_is_aborted() {
        let (mut early, mut late) = (single_rank(), single_rank());
        let all = AbortAll::default();
        all.add(early.abort_handle());
        assert!(early.barrier().is_ok());
        all.abort();
        all.abort();
        assert!(early.barrier().is_err());
        assert!(late.barrier().is_ok());
        all.add(late.abort_handle());
        assert!(late.barrier().is_err());
    }
}
