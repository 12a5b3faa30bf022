//! A mask that never comes does not hold up other requests for long.
use std::task::{Context, Poll};
use std::time::Duration;

use coordinator::engine::{
    EngineError, EngineEvent, EventSender, GenerateRequest, GuideEnd, Guided, TokenGuide,
};
use coordinator::metrics::Hub;
use shared::ids::{Epoch, Incarnation, RequestId};
use shared::protocol::TokenMask;
use tokio::sync::mpsc;

use crate::agreement::{SentMessages, WORKERS, core, request, result};

/// A guide that knows what may come first, and then never gets further.
#[derive(Debug)]
struct Stuck {
    first: TokenMask,
    behind: u32,
    knows: u32,
}

impl TokenGuide for Stuck {
    fn poll(&mut self, _: &mut Context<'_>) -> Poll<Result<(), GuideEnd>> {
        if self.behind < self.knows { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    fn allowed(&self) -> Option<&TokenMask> {
        (self.behind < self.knows).then_some(&self.first)
    }

    fn mask_bytes_max(&self) -> usize {
        60
    }

    fn accept(&mut self, _: u32) -> Result<Guided, GuideEnd> {
        self.behind += 1;
        Ok(Guided::GoesOn)
    }
}

#[test]
fn a_request_whose_mask_never_comes_ends_and_the_others_go_on() {
    for knows in [0, 1, 3] {
        let hub = Hub::new(Incarnation(1), shared::metrics::Limits::default());
        let mut core = core(hub.observer());
        let (mut sent, mut answered) = (SentMessages::default(), 0);
        let (stuck, mut stuck_events) = mpsc::channel(64);
        let (other, mut other_events) = mpsc::channel(64);
        let guide = Stuck { first: TokenMask::Only(vec![7]), behind: 0, knows };
        let guided = GenerateRequest { guides: vec![Box::new(guide)], ..request() };
        let plain = GenerateRequest { id: RequestId(2), ..request() };
        let ms = Duration::from_millis;
        core.submit(ms(1), guided, EventSender::Local(stuck), &mut sent);
        core.submit(ms(1), plain, EventSender::Local(other), &mut sent);
        core.epoch_formed(ms(1), Epoch(3), 8, 0, WORKERS.to_vec(), &mut sent);
        let mut ended = None;
        for at in (50..20_000).step_by(50).map(ms) {
            core.tick(at, &mut sent);
            while let Some(plan) = sent.runnable(answered) {
                answered += 1;
                for worker in WORKERS {
                    core.step_done(at, worker, result(&plan, 5), &mut sent);
                }
            }
            while let Ok(event) = stuck_events.try_recv() {
                if let EngineEvent::Failed(error) = event {
                    assert!(matches!(error, EngineError::Overloaded { .. }), "{error}");
                    ended = ended.or(Some(at));
                }
            }
        }
        let ended = ended.unwrap_or_else(|| panic!("it waits for ever behind {knows} tokens"));
        // Half of what a step may take, because the step waits for the mask.
        assert!((ms(4_500)..ms(5_000)).contains(&ended), "{ended:?} behind {knows} tokens");
        let tokens = std::iter::from_fn(|| other_events.try_recv().ok())
            .filter(|event| matches!(event, EngineEvent::Token { .. }));
        assert_eq!(tokens.count(), 30, "behind {knows} tokens");
        assert!(sent.ends.is_empty(), "{:?}", sent.ends);
    }
}

/// A guide that knows what may come next only when asked for the fifth time.
#[derive(Debug)]
struct Slow {
    next: TokenMask,
    asked: u32,
}

impl TokenGuide for Slow {
    fn poll(&mut self, _: &mut Context<'_>) -> Poll<Result<(), GuideEnd>> {
        self.asked += 1;
        if self.asked > 4 { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    fn allowed(&self) -> Option<&TokenMask> {
        (self.asked > 4).then_some(&self.next)
    }

    fn mask_bytes_max(&self) -> usize {
        60
    }

    fn accept(&mut self, _: u32) -> Result<Guided, GuideEnd> {
        self.asked = 0;
        Ok(Guided::GoesOn)
    }
}

/// Each mask comes, but late; a mask is pending at every check.
#[test]
fn masks_that_come_late_end_nothing() {
    let hub = Hub::new(Incarnation(1), shared::metrics::Limits::default());
    let mut core = core(hub.observer());
    let (mut sent, mut answered) = (SentMessages::default(), 0);
    let (events, mut received) = mpsc::channel(64);
    let guide = Slow { next: TokenMask::Only(vec![7]), asked: 0 };
    let guided = GenerateRequest { guides: vec![Box::new(guide)], ..request() };
    let ms = Duration::from_millis;
    core.submit(ms(1), guided, EventSender::Local(events), &mut sent);
    core.epoch_formed(ms(1), Epoch(3), 8, 0, WORKERS.to_vec(), &mut sent);
    for at in (500..40_000).step_by(500).map(ms) {
        core.tick(at, &mut sent);
        assert!(at > ms(5_000) || answered < 30, "longer than a mask may take");
        while let Some(plan) = sent.runnable(answered) {
            answered += 1;
            for worker in WORKERS {
                core.step_done(at, worker, result(&plan, 7), &mut sent);
            }
        }
    }
    let tokens = std::iter::from_fn(|| received.try_recv().ok()).inspect(|event| {
        assert!(!matches!(event, EngineEvent::Failed(_)), "{event:?}");
    });
    assert_eq!(tokens.filter(|event| matches!(event, EngineEvent::Token { .. })).count(), 30);
}
