//! PURE: a client's request with what was accepted so far: everything needed to submit it again
//! when its coordinator is lost, so that no token is missing or repeated.
use std::sync::Arc;
use std::time::Duration;

use shared::protocol::{AcceptedChoice, EngineEvent, SubmitRequest};

use crate::engine::GenerateRequest;

/// Maximum number of tokens, prompt and output, of a request that can be sent again: 5 bytes each,
/// so that a frame of 16 MiB holds them and everything else.
const SENT_AGAIN_MAX: usize = 2 << 20;

/// A request whose client still waits for part of its answer.
#[derive(Debug)]
pub(super) struct OpenRequest {
    /// Before it is sent, as a coordinator gets it for the first time; then as one that is sent it
    /// again.
    submit: Box<SubmitRequest>,
    arrived: Duration,
    /// How often its coordinator's link broke.
    lost: u32,
    /// Accepted so far, by choice.
    accepted: Vec<AcceptedChoice>,
    /// Tokens of choices that are not over.
    tokens: usize,
    /// Memory of the request's other kept parts, in tokens.
    besides: usize,
    /// Number of choices that are not over.
    left: usize,
    /// Whether some of its answer was delivered.
    has_begun: bool,
    /// Whether its tokens are kept, so that it can be submitted again.
    is_kept: bool,
    prompt: PromptLogprobs,
    is_embedded: bool,
}

/// How many of a prompt's log-probabilities have arrived. They come in pieces.
#[derive(Debug, Default)]
struct PromptLogprobs {
    /// Whether there was a piece, perhaps an empty one: a prompt of one token has none.
    has_begun: bool,
    delivered: usize,
    /// From the coordinator that has the request now.
    received: usize,
}

impl OpenRequest {
    /// Takes a client's request; `None` for one without choices, which does not occur.
    pub(super) fn new(request: GenerateRequest) -> Option<Self> {
        let arrived = request.arrived;
        let submit = Box::new(submit(request)?);
        let left = submit.n as usize;
        let guide = submit.guide.as_ref().map_or(0, shared::protocol::GuideSpec::bytes);
        let stops: usize = submit.stops.iter().map(String::len).sum();
        let bad_words = submit.bad_words.as_ref().map_or(0, shared::protocol::BadWords::tokens);
        let biases = 2 * submit.sampling.logit_bias.len();
        let besides = (guide + stops) / size_of::<u32>() + biases + bad_words;
        Some(Self {
            submit,
            arrived,
            lost: 0,
            accepted: vec![AcceptedChoice::GoesOn(Vec::new()); left],
            tokens: 0,
            besides,
            left,
            has_begun: false,
            is_kept: true,
            prompt: PromptLogprobs::default(),
            is_embedded: false,
        })
    }

    pub(super) fn id(&self) -> shared::ids::RequestId {
        self.submit.id
    }

    /// Memory it takes, in tokens.
    pub(super) fn weight(&self) -> usize {
        self.submit.prompt.len() + self.tokens + self.besides
    }

    /// Whether its answer is complete.
    pub(super) fn is_over(&self) -> bool {
        self.left == 0
    }

    /// Whether some of its answer was delivered.
    pub(super) fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// Whether it can be sent again.
    pub(super) fn is_kept(&self) -> bool {
        self.is_kept
    }

    /// Frees its tokens: it cannot be sent again.
    pub(super) fn free_tokens(&mut self) {
        self.is_kept = false;
        (self.tokens, self.besides) = (0, 0);
        self.submit.prompt = Vec::new();
        self.submit.guide = None;
        self.submit.bad_words = None;
        self.submit.stops = Vec::new();
        self.submit.sampling.logit_bias = Vec::new();
        for choice in &mut self.accepted {
            if let AcceptedChoice::GoesOn(tokens) = choice {
                *tokens = Vec::new();
            }
        }
    }

    /// Whether what happens to it is noted.
    pub(super) fn is_traced(&self) -> bool {
        self.submit.traced
    }

    /// Its coordinator is lost; returns how often that has happened.
    pub(super) fn record_lost_link(&mut self) -> u32 {
        self.lost += 1;
        self.lost
    }

    /// Makes the message that asks a coordinator for what is missing.
    pub(super) fn message(&mut self, now: Duration) -> Box<SubmitRequest> {
        self.prompt.received = 0;
        let mut submit = self.submit.clone();
        // It counts as accepted from now on: no coordinator says so before the first token.
        self.submit.again = true;
        let waited = now.saturating_sub(self.arrived);
        submit.waited_us = u64::try_from(waited.as_micros()).unwrap_or(u64::MAX);
        if self.tokens > 0 || self.left < self.accepted.len() {
            submit.accepted = self.accepted.clone();
        }
        if self.prompt.has_begun && self.prompt.delivered + 1 >= submit.prompt.len() {
            submit.sampling.prompt_logprobs = None;
        }
        submit
    }

    /// Notes an event; returns the part that the client does not have yet.
    pub(super) fn take(&mut self, event: EngineEvent) -> Option<EngineEvent> {
        let news = match event {
            EngineEvent::Token { choice, token, .. } => {
                self.accept(choice, token)?;
                event
            }
            EngineEvent::Finished { choice, .. } => {
                self.finish(choice)?;
                event
            }
            EngineEvent::PromptLogprobs(mut all) => {
                let known = self.prompt.delivered.saturating_sub(self.prompt.received);
                let known = known.min(all.len());
                self.prompt.received += all.len();
                if self.prompt.has_begun && known == all.len() {
                    return None;
                }
                all.drain(..known);
                self.prompt.has_begun = true;
                self.prompt.delivered += all.len();
                EngineEvent::PromptLogprobs(all)
            }
            EngineEvent::Embedding(_) if std::mem::replace(&mut self.is_embedded, true) => {
                return None;
            }
            EngineEvent::Embedding(_) => event,
            EngineEvent::Failed(_) => {
                self.left = 0;
                return Some(event);
            }
            // Nothing that its client is told.
            EngineEvent::Note(_) => return Some(event),
        };
        self.has_begun = true;
        Some(news)
    }

    /// Notes a token; `None` if its choice does not exist or is over.
    fn accept(&mut self, choice: u32, token: u32) -> Option<()> {
        let Some(AcceptedChoice::GoesOn(tokens)) = self.accepted.get_mut(choice as usize) else {
            return None;
        };
        if self.is_kept {
            tokens.push(token);
            self.tokens += 1;
            if self.weight() > SENT_AGAIN_MAX {
                self.free_tokens();
            }
        }
        Some(())
    }

    /// Notes a choice's end; `None` if the choice does not exist or is over.
    fn finish(&mut self, choice: u32) -> Option<()> {
        let choice = self.accepted.get_mut(choice as usize)?;
        let AcceptedChoice::GoesOn(accepted) = &*choice else { return None };
        let tokens = accepted.len();
        self.tokens -= tokens;
        self.left -= 1;
        *choice = AcceptedChoice::Over { tokens: u32::try_from(tokens).unwrap_or(u32::MAX) };
        Some(())
    }
}

/// Converts the request to wire form; `None` if it has no choices. How long it has waited, and what
/// was accepted, is added when it is sent.
fn submit(request: GenerateRequest) -> Option<SubmitRequest> {
    let n = u32::try_from(request.sampling.len()).ok()?;
    Some(SubmitRequest {
        id: request.id,
        prompt: request.prompt,
        sampling: request.sampling.into_iter().next()?,
        n,
        stops: request.stops.to_vec(),
        keep_special: request.keep_special,
        goes_on: request.goes_on,
        guide: request.guide_spec.map(Arc::unwrap_or_clone),
        thinking: request.thinking.map(Arc::unwrap_or_clone),
        bad_words: request.bad_words.map(Arc::unwrap_or_clone),
        max_tokens: request.max_tokens,
        open_ended: request.open_ended,
        priority: request.priority,
        cache_salt: request.cache_salt,
        adapter: request.adapter.number(),
        adapter_name: request.adapter.name().unwrap_or_default().to_owned(),
        end_tokens: request.end_tokens,
        waited_us: 0,
        response_id: request.response_id.as_ref().to_owned(),
        traced: request.traced,
        accepted: Vec::new(),
        again: false,
    })
}

#[cfg(test)]
mod tests {
    use shared::ids::RequestId;
    use shared::protocol::{FinishReason, TokenLogprobs};
    use shared::sampling::SamplingParams;

    use super::*;

    fn open_request(prompt: usize, n: u32) -> OpenRequest {
        let sampling = |choice| SamplingParams {
            choice,
            prompt_logprobs: Some(0),
            ..SamplingParams::greedy()
        };
        let sampling = (0..n).map(sampling).collect();
        OpenRequest::new(GenerateRequest::new(RequestId(1), vec![9; prompt], sampling, 5)).unwrap()
    }

    fn token(choice: u32, token: u32) -> EngineEvent {
        EngineEvent::Token { choice, token, logprobs: None }
    }

    fn finished(choice: u32) -> EngineEvent {
        EngineEvent::Finished { choice, reason: FinishReason::Length, cached: 0 }
    }

    fn piece(tokens: std::ops::Range<u32>) -> EngineEvent {
        let of = |token| TokenLogprobs { token, logprob: 0.0, rank: 1, top: Vec::new() };
        EngineEvent::PromptLogprobs(tokens.map(of).collect())
    }

    #[test]
    fn what_is_asked_for_again_is_what_is_missing() {
        let mut open_request = open_request(3, 3);
        let first = open_request.message(Duration::from_micros(7));
        assert_eq!((first.n, first.waited_us, &*first.accepted), (3, 7, &[][..]));
        assert!(!first.again);
        let unanswered = open_request.message(Duration::from_micros(8));
        assert_eq!((&*unanswered.accepted, unanswered.again), (&[][..], true));
        assert_eq!(first.sampling.prompt_logprobs, Some(0));
        assert!(!open_request.has_begun());
        for event in [piece(0..2), token(0, 4), token(2, 5), token(2, 6), finished(2)] {
            assert_eq!(open_request.take(event.clone()), Some(event));
        }
        // A choice gets nothing after its end, and there is no fourth one.
        for event in [token(2, 7), finished(2), token(3, 1), finished(3)] {
            assert_eq!(open_request.take(event), None);
        }
        assert!(open_request.has_begun() && !open_request.is_over());
        assert_eq!(open_request.weight(), 3 + 1);
        let again = open_request.message(Duration::from_micros(9));
        let going_on = |tokens: &[u32]| AcceptedChoice::GoesOn(tokens.to_vec());
        let accepted = [going_on(&[4]), going_on(&[]), AcceptedChoice::Over { tokens: 2 }];
        assert_eq!((again.n, &*again.accepted), (3, &accepted[..]));
        assert_eq!((again.waited_us, again.choices_left()), (9, 2));
        assert_eq!(again.sampling.prompt_logprobs, None, "the client has them");
        assert_eq!(open_request.take(finished(0)), Some(finished(0)));
        assert_eq!(open_request.take(finished(1)), Some(finished(1)));
        assert!(open_request.is_over());
    }

    #[test]
    fn pieces_of_a_prompt_and_embeddings_come_once() {
        let mut open_request = open_request(8, 1);
        assert_eq!(open_request.take(piece(0..3)), Some(piece(0..3)));
        // Another coordinator starts from the first one, in different pieces.
        assert_eq!(open_request.message(Duration::ZERO).sampling.prompt_logprobs, Some(0));
        assert_eq!(open_request.take(piece(0..2)), None);
        assert_eq!(open_request.take(piece(2..5)), Some(piece(3..5)));
        assert_eq!(open_request.take(piece(5..7)), Some(piece(5..7)));
        assert_eq!(open_request.message(Duration::ZERO).sampling.prompt_logprobs, None);
        let mut of_one = self::open_request(1, 1);
        assert_eq!(of_one.message(Duration::ZERO).sampling.prompt_logprobs, Some(0));
        assert_eq!(of_one.take(piece(0..0)), Some(piece(0..0)), "said to be none");
        assert_eq!(of_one.message(Duration::ZERO).sampling.prompt_logprobs, None);
        let embedding = EngineEvent::Embedding(vec![0.5]);
        assert_eq!(of_one.take(embedding.clone()), Some(embedding.clone()));
        of_one.message(Duration::ZERO);
        assert_eq!(of_one.take(embedding), None);
        assert_eq!(of_one.take(finished(0)), Some(finished(0)));
    }

    #[test]
    fn what_no_frame_holds_is_not_kept() {
        let mut open_request = open_request(SENT_AGAIN_MAX - 1, 1);
        open_request.take(token(0, 1));
        assert!(open_request.is_kept());
        assert_eq!(open_request.take(token(0, 2)), Some(token(0, 2)));
        assert!(!open_request.is_kept());
        assert_eq!(open_request.weight(), 0);
        assert_eq!(
            open_request.take(token(0, 3)),
            Some(token(0, 3)),
            "the client has it all the same"
        );
        assert_eq!(open_request.take(finished(0)), Some(finished(0)));
    }
}
