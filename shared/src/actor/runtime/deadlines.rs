//! The thread that enforces the deadlines of asks, of watches that wait for their actors, and of
//! created actors that wait for a place. It starts with the first deadline, and is parked while
//! there are none.
use std::time::Duration;

use super::state::State;
use super::{ActorRuntime, WeakRuntime};

/// Interval between two checks, and so how late a deadline may be noticed.
const TICK: Duration = Duration::from_millis(20);

impl ActorRuntime {
    /// Starts or wakes the thread, which checks deadlines while there are any.
    pub(super) fn tick_from_now_on(&self, state: &mut State) {
        if std::mem::replace(&mut state.ticks, true) {
            return;
        }
        if let Some(ticker) = &state.ticker {
            ticker.unpark();
            return;
        }
        // A separate thread: the asker's runtime may end before the answer arrives.
        let runtime = self.downgrade();
        let ticking = std::thread::Builder::new().name("actor-deadlines".to_owned());
        match ticking.spawn(move || tick(&runtime)) {
            Ok(thread) => state.ticker = Some(thread.thread().clone()),
            // The next ask tries again.
            Err(_) => state.ticks = false,
        }
    }
}

/// Checks deadlines until the runtime is dropped.
fn tick(runtime: &WeakRuntime) {
    loop {
        std::thread::sleep(TICK);
        let idle = {
            let Some(runtime) = runtime.upgrade() else { return };
            let (now, mut effects) = (runtime.inner.clock.now(), Vec::new());
            let mut state = runtime.state();
            state.exchange.tick(now, &mut effects);
            runtime.carry_out(&mut state, effects);
            let mut notices = Vec::new();
            state.registry.tick(now, &mut notices);
            runtime.notify(&mut state, notices);
            let mut decided = Vec::new();
            state.placement.tick(now, &mut decided);
            runtime.decided(&mut state, decided);
            state.ticks = state.exchange.outstanding() > 0
                || state.registry.awaits()
                || state.placement.awaits(now);
            !state.ticks
        };
        if idle {
            // Until the next ask, or until the runtime is dropped.
            std::thread::park();
        }
    }
}
