//! The thread that looks at the deadlines of asks, and of watches that wait for their actors: there
//! from the first one on, parked while there is none.
use std::time::Duration;

use super::state::State;
use super::{ActorRuntime, WeakRuntime};

/// How often deadlines are looked at: they may be late by as much.
const TICK: Duration = Duration::from_millis(20);

impl ActorRuntime {
    /// Looks at deadlines as long as there are some.
    pub(super) fn tick_from_now_on(&self, state: &mut State) {
        if std::mem::replace(&mut state.ticks, true) {
            return;
        }
        if let Some(ticker) = &state.ticker {
            ticker.unpark();
            return;
        }
        // A thread of its own: whoever asks may be on one that ends before the answer is there.
        let runtime = self.downgrade();
        let ticking = std::thread::Builder::new().name("actor-deadlines".to_owned());
        match ticking.spawn(move || tick(&runtime)) {
            Ok(thread) => state.ticker = Some(thread.thread().clone()),
            // The next ask tries again.
            Err(_) => state.ticks = false,
        }
    }
}

/// Looks at deadlines until the runtime is gone.
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
            state.ticks = state.exchange.outstanding() > 0 || state.registry.awaits();
            !state.ticks
        };
        if idle {
            // Until there is an ask, or the runtime goes.
            std::thread::park();
        }
    }
}
