//! PURE: masks of steps in flight. A guided sequence is planned ahead of its tokens like any other,
//! and its mask follows the plan: once all tokens before are accepted, its guide is asked; when all
//! guides of a step have answered, the masks are sent together. A sequence whose guide certainly
//! allows every token has no mask.
//!
//! Ranks wait for the masks of a step with masked entries, so these are always sent. Where the
//! planned sequence is gone, its entry has no mask: the sampled token is ignored anyway.
use std::task::{Context, Poll};

use shared::ids::RequestId;
use shared::protocol::StepMasks;

use super::{Effect, Scheduler};
use crate::engine::{EngineError, GuideEnd};

impl Scheduler {
    /// Fills `masks` with those of the first step that still owes them, once all are known, and
    /// returns true. Call it after everything else, until it returns false. Ends requests whose
    /// guides cannot go on.
    pub fn masks(&mut self, masks: &mut StepMasks, effects: &mut Vec<Effect>) -> bool {
        let Some(epoch) = self.epoch else { return false };
        let Some(next) = self.in_flight.iter().position(|step| step.owes_masks) else {
            self.masks_awaited.clear();
            return false;
        };
        let mut over = Vec::new();
        let ready = loop {
            self.masks_awaited.clear();
            let ready = self.ask_guides(next, &mut over);
            // Masks of later steps are computed meanwhile, where all tokens are known.
            for step in next + 1..self.in_flight.len() {
                self.ask_guides(step, &mut over);
            }
            if over.is_empty() {
                break ready;
            }
            // The ended requests await nothing any more: ask once more for the others.
            let ends = over.drain(..);
            let ends = ends.map(|(id, end)| (id, Some(EngineError::from(end))));
            self.end_requests(ends.collect(), effects);
        };
        if !ready {
            return false;
        }
        let Self { in_flight, sequences, .. } = self;
        let Some(step) = in_flight.get_mut(next) else { return false };
        step.owes_masks = false;
        masks.epoch = epoch;
        masks.step = step.step;
        masks.masks.clear();
        for entry in step.entries.iter().filter(|entry| entry.masked) {
            let seq = sequences[entry.slot].as_ref().filter(|seq| entry.is_of(seq));
            let guide = seq.and_then(|seq| seq.guide.as_ref());
            masks.masks.push(guide.and_then(|guide| guide.allowed().cloned()));
        }
        true
    }

    /// Asks the guides of a step's masked entries, unless its masks are sent. Returns whether all
    /// of them know what may come next.
    fn ask_guides(&mut self, step: usize, over: &mut Vec<(RequestId, GuideEnd)>) -> bool {
        let Self { in_flight, sequences, waker, masks_awaited, .. } = self;
        let mut context = Context::from_waker(waker);
        let mut ready = true;
        let Some(step) = in_flight.get(step).filter(|step| step.owes_masks) else { return ready };
        for entry in step.entries.iter().filter(|entry| entry.masked) {
            let seq = sequences[entry.slot].as_mut().filter(|seq| entry.is_of(seq));
            let Some(seq) = seq else { continue };
            if seq.tokens.len() != entry.end as usize {
                // An earlier step that samples for it is in flight.
                ready = false;
                continue;
            }
            let awaited = seq.awaited_mask();
            match seq.guide.as_mut().map(|guide| guide.poll(&mut context)) {
                Some(Poll::Ready(Ok(()))) | None => {}
                Some(Poll::Ready(Err(end))) => over.push((seq.request, end)),
                Some(Poll::Pending) => {
                    masks_awaited.push(awaited);
                    ready = false;
                }
            }
        }
        ready
    }
}
