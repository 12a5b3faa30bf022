//! The interface between the HTTP front end and the engine: what is asked for and what comes back.
//!
//! The front end (validation, templates, detokenization) knows only these types. The engine
//! (router, replicas, schedulers) never sees text; only a [`StopCheck`] tells it whether a token
//! completes a stop string, so that the accepted-token log ends exactly there.
use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use shared::ids::RequestId;
use shared::mix::mix;
use shared::protocol::{BadWords, GuideSpec, NOTES_MAX, ThinkingBudget, TokenMask};
pub use shared::protocol::{EngineError, EngineEvent, FinishReason};
use shared::sampling::SamplingParams;
use tokio::sync::mpsc;

use crate::adapters::AdapterUse;
use crate::frontends::RemoteEvents;

/// Decides whether a sequence ends for a reason that only the text shows (a stop string).
///
/// One per choice; fed every accepted token in order. Pure: no IO, no clock.
pub trait StopCheck: Send + fmt::Debug {
    /// Takes the next accepted token; returns true when it completes a stop string.
    fn push(&mut self, token: u32) -> bool;
}

/// Why a guide cannot go on, in one sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GuideEnd {
    /// The request is at fault: following it takes more than it may use.
    Refused(String),
    /// The server is at fault: a defect.
    Broke(String),
}

impl From<GuideEnd> for EngineError {
    fn from(end: GuideEnd) -> Self {
        match end {
            GuideEnd::Refused(message) => Self::Guide { message },
            GuideEnd::Broke(message) => Self::Broke { message },
        }
    }
}

/// Decides which tokens a sequence may get, so that its text has the requested structure.
///
/// One per choice; sees every accepted token in order, and depends on them alone: no IO, no clock.
/// It may compute its answer elsewhere, and then wakes whoever waits for it.
pub trait TokenGuide: Send + fmt::Debug {
    /// Ready once it is known which tokens may come next. Called only while the guide can go on.
    ///
    /// # Errors
    /// If it cannot go on; it is not called again then.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), GuideEnd>>;

    /// Returns the tokens that may come next, at least one; `None` while they are not known.
    fn allowed(&self) -> Option<&TokenMask>;

    /// Whether it certainly allows every token once any `ahead` more are accepted. No mask is made
    /// then, and the sequence may draft that far. If so for `ahead`, so for less.
    fn leaves_open(&self, ahead: u32) -> bool {
        let _ = ahead;
        false
    }

    /// Upper bound on the bytes of one of its masks in a message.
    fn mask_bytes_max(&self) -> usize;

    /// Takes the next accepted token, which is an allowed one and not an end token.
    ///
    /// # Errors
    /// If it cannot go on; it is not called again then.
    fn accept(&mut self, token: u32) -> Result<Guided, GuideEnd>;

    /// Takes the next token of a resumed sequence: it was allowed when it was accepted, so no mask
    /// is computed for it.
    ///
    /// # Errors
    /// As when the token was first accepted.
    fn follow(&mut self, token: u32) -> Result<Guided, GuideEnd> {
        self.accept(token)
    }
}

/// Whether a guided sequence continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guided {
    /// More tokens may come.
    GoesOn,
    /// The text is complete: nothing can follow.
    IsOver,
}

/// One validated, tokenized request.
#[derive(Debug)]
pub struct GenerateRequest {
    /// Unique within the process.
    pub id: RequestId,
    /// The prompt, at least one token.
    pub prompt: Vec<u32>,
    /// One entry per choice (`n`), equal except for `choice`.
    pub sampling: Vec<SamplingParams>,
    /// One entry per choice where the request has stop strings; empty otherwise.
    pub stop_checks: Vec<Box<dyn StopCheck>>,
    /// One entry per choice where the request is guided; empty otherwise.
    pub guides: Vec<Box<dyn TokenGuide>>,
    /// What the guides were made from, for an engine in another process.
    pub guide_spec: Option<Arc<GuideSpec>>,
    /// The bound on reasoning that the guides keep, for an engine in another process.
    pub thinking: Option<Arc<ThinkingBudget>>,
    /// The words that the guides keep from coming, for an engine in another process.
    pub bad_words: Option<Arc<BadWords>>,
    /// Maximum number of tokens to generate per choice. 0 is legal (echo with log-probabilities
    /// only).
    pub max_tokens: u32,
    /// Whether the client set no bound: it gets at most what the KV cache of its replica has room
    /// for, if that is less than `max_tokens`.
    pub open_ended: bool,
    /// Lower is earlier; 0 unless priorities are followed.
    pub priority: i32,
    /// Requests with another salt do not share cached prompts.
    pub cache_salt: u64,
    /// The adapter it is computed with.
    pub adapter: AdapterUse,
    /// Tokens that end a sequence (the model's end tokens unless `ignore_eos`, and
    /// `stop_token_ids`). The ending token is accepted and counted, but not part of the text.
    pub end_tokens: Vec<u32>,
    /// The stop strings themselves, for an engine in another process.
    pub stops: Arc<[String]>,
    /// Whether stop strings are looked for in text that includes special tokens; for an engine in
    /// another process.
    pub keep_special: bool,
    /// Whether the text continues the prompt's, see [`crate::text::stream::TextStream::behind`];
    /// for an engine in another process.
    pub goes_on: bool,
    /// When the HTTP layer took the request, by the process's clock.
    pub arrived: Duration,
    /// Id of the client's response, for exemplars.
    pub response_id: Arc<str>,
    /// Whether to note what happens to it ([`EngineEvent::Note`]).
    pub traced: bool,
    /// What a lost engine accepted for it, perhaps nothing; it continues from there, and was let in
    /// before.
    pub resumed: Option<Box<Resumed>>,
}

/// What a lost engine accepted of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resumed {
    /// The choices that are not over: one entry for each of [`GenerateRequest::sampling`].
    pub choices: Vec<ResumedChoice>,
    /// The choices that are over, each with its number of tokens.
    pub over: Vec<(u32, u32)>,
}

/// What was accepted of one choice. Its stop check and guide have taken these tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResumedChoice {
    /// The tokens, in order.
    pub tokens: Vec<u32>,
    /// How they complete the choice, if they do: then only the report of its end was lost.
    pub end: Option<FinishReason>,
}

impl Resumed {
    /// Whether any token was accepted, or any choice has ended.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        !self.over.is_empty() || self.choices.iter().any(|choice| !choice.tokens.is_empty())
    }
}

impl GenerateRequest {
    /// Makes a request with defaults otherwise, which arrived when the process began.
    #[must_use]
    pub fn new(
        id: RequestId,
        prompt: Vec<u32>,
        sampling: Vec<SamplingParams>,
        max_tokens: u32,
    ) -> Self {
        Self {
            id,
            prompt,
            sampling,
            stop_checks: Vec::new(),
            guides: Vec::new(),
            guide_spec: None,
            thinking: None,
            bad_words: None,
            max_tokens,
            open_ended: false,
            priority: 0,
            cache_salt: 0,
            adapter: AdapterUse::default(),
            end_tokens: Vec::new(),
            stops: Arc::default(),
            keep_special: false,
            goes_on: false,
            arrived: Duration::ZERO,
            response_id: Arc::default(),
            traced: false,
            resumed: None,
        }
    }

    /// Whether its choices are guided.
    #[must_use]
    pub fn is_guided(&self) -> bool {
        self.guide_spec.is_some() || self.thinking.is_some() || self.bad_words.is_some()
    }

    /// Number of choices that the client asked for.
    #[must_use]
    pub fn n(&self) -> u32 {
        let over = self.resumed.as_ref().map_or(0, |resumed| resumed.over.len());
        u32::try_from(self.sampling.len() + over).unwrap_or(u32::MAX)
    }

    /// Maximum number of tokens accepted of a choice before.
    fn accepted_before(&self) -> u32 {
        let choices = self.resumed.iter().flat_map(|resumed| &resumed.choices);
        let most = choices.map(|choice| choice.tokens.len()).max().unwrap_or(0);
        u32::try_from(most).unwrap_or(u32::MAX)
    }

    /// Salt of routing: requests whose prompts begin alike share cached blocks only if this is
    /// equal.
    #[must_use]
    pub fn affinity_salt(&self) -> u64 {
        self.cache_salt ^ u64::from(self.adapter.number()).rotate_right(16)
    }

    /// Tokens of its longest choice so far.
    fn tokens_so_far(&self) -> u32 {
        let prompt = u32::try_from(self.prompt.len()).unwrap_or(u32::MAX);
        prompt.saturating_add(self.accepted_before())
    }

    /// Tokens that must be free in a replica's KV cache for its first step there.
    #[must_use]
    pub fn tokens_to_begin(&self) -> u32 {
        self.tokens_so_far().saturating_add(1)
    }

    /// Tokens that a replica's KV cache should have room for, see [`room_wanted`].
    #[must_use]
    pub fn tokens_wanted(&self) -> u32 {
        let prompt = u32::try_from(self.prompt.len()).unwrap_or(u32::MAX);
        let all = prompt.saturating_add(self.max_tokens);
        if self.open_ended { room_wanted(self.tokens_so_far(), all) } else { all }
    }

    /// Tokens that a replica's KV cache must have room for: the most that one sequence needs.
    #[must_use]
    pub fn tokens_needed(&self) -> u32 {
        let prompt = u32::try_from(self.prompt.len()).unwrap_or(u32::MAX);
        prompt.saturating_add(if self.open_ended {
            self.max_tokens.min(self.accepted_before().saturating_add(1))
        } else {
            self.max_tokens
        })
    }
}

/// An open-ended request should find room for so many more tokens, at least.
const OUTPUT_WANTED: u32 = 4096;

/// Returns how many tokens a KV cache should have room for, so that an open-ended sequence of
/// `tokens` tokens, which may have up to `all`, does not soon end for want of room: as many again,
/// or 4,096 more if that is more. Not `all`, which usually is whatever the model can do: then
/// smaller caches would get no such requests.
#[must_use]
pub fn room_wanted(tokens: u32, all: u32) -> u32 {
    tokens.saturating_add(tokens.max(OUTPUT_WANTED)).min(all)
}

/// Where a request's events go.
#[derive(Clone, Debug)]
pub enum EventSender {
    /// To a front end in this process. The channel holds all events of the request, up to a bound;
    /// a reader that falls further behind is given up, so that it never blocks a step.
    Local(mpsc::Sender<EngineEvent>),
    /// To a front end in another process.
    Remote(RemoteEvents),
}

/// A client that reads nothing for this long, although something waits for it, is disconnected.
/// Sockets take pieces of 64 KiB, so slow links survive at about 1 KiB a second.
pub const TAKEN_WITHIN: Duration = Duration::from_secs(60);

/// Tracks whether a request's events are taken.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReaderProgress {
    sent: u64,
    taken: u64,
    /// When events were last seen to be taken, or none waited.
    since: Duration,
}

impl ReaderProgress {
    /// Starts at `now` with nothing sent.
    #[must_use]
    pub fn new(now: Duration) -> Self {
        Self { since: now, ..Self::default() }
    }

    /// Starts at `now` with so many events waiting.
    #[must_use]
    pub fn behind(now: Duration, waiting: usize) -> Self {
        Self { sent: waiting as u64, ..Self::new(now) }
    }

    /// One more event was sent.
    pub fn sent(&mut self) {
        self.sent += 1;
    }

    /// Checks whether events were taken since the last call, given how many wait; returns whether
    /// none were for too long.
    pub fn is_stuck(&mut self, now: Duration, waiting: usize) -> bool {
        let taken = self.sent.saturating_sub(waiting as u64);
        if waiting == 0 || taken != self.taken {
            (self.taken, self.since) = (taken, now);
        }
        now.saturating_sub(self.since) >= TAKEN_WITHIN
    }
}

/// The receiver of a request's events is gone: the client or its front end left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceiverGone;

impl EventSender {
    /// Sends one event; never waits.
    ///
    /// # Errors
    /// [`ReceiverGone`].
    pub fn send(&self, event: EngineEvent) -> Result<(), ReceiverGone> {
        match self {
            Self::Local(events) => events.try_send(event).map_err(|_| ReceiverGone),
            Self::Remote(events) => events.send(event),
        }
    }

    /// Number of events sent and not taken, as far as this process knows.
    #[must_use]
    pub fn waiting(&self) -> usize {
        match self {
            Self::Local(events) => events.max_capacity() - events.capacity(),
            // Its own process checks.
            Self::Remote(_) => 0,
        }
    }

    /// Whether the front end is in another process.
    #[must_use]
    pub fn is_remote(&self) -> bool {
        matches!(self, Self::Remote(_))
    }

    /// Whether nobody takes events any more.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        match self {
            Self::Local(events) => events.is_closed(),
            Self::Remote(events) => events.is_closed(),
        }
    }
}

/// What the front end sends to the engine.
#[derive(Debug)]
pub enum EngineCommand {
    /// Run a request.
    Submit {
        /// The request.
        request: Box<GenerateRequest>,
        /// Where its events go. When the receiver is dropped the request is cancelled.
        events: EventSender,
    },
    /// The client is gone: free everything the request holds.
    Cancel {
        /// The request.
        id: RequestId,
    },
}

/// The front end's handle to the engine.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    commands: mpsc::Sender<EngineCommand>,
}

/// A running request. Dropping it cancels the request.
#[derive(Debug)]
pub struct Generation {
    id: RequestId,
    events: mpsc::Receiver<EngineEvent>,
    commands: mpsc::Sender<EngineCommand>,
    choices_left: usize,
}

/// Tokens per piece of a prompt's log-probabilities from another process.
pub const PROMPT_LOGPROBS_PIECE: usize = 4096;

/// Maximum number of a request's events that wait for its reader. One further behind has stopped
/// reading.
const UNTAKEN_MAX: usize = 1 << 16;

/// Bound of the command channel between front end and engine.
pub const COMMAND_QUEUE_MAX: usize = 4096;

impl EngineHandle {
    /// Makes a handle and the receiving end that the engine drains.
    #[must_use]
    pub fn channel() -> (Self, mpsc::Receiver<EngineCommand>) {
        let (commands, receiver) = mpsc::channel(COMMAND_QUEUE_MAX);
        (Self { commands }, receiver)
    }

    /// Sender for commands that come from other processes.
    #[must_use]
    pub fn commands(&self) -> mpsc::Sender<EngineCommand> {
        self.commands.clone()
    }

    /// Hands a request to the engine.
    ///
    /// # Errors
    /// Returns [`EngineError::QueueFull`] when the command channel is full and
    /// [`EngineError::ShuttingDown`] when the engine is gone. Later failures arrive as events.
    pub fn submit(&self, request: GenerateRequest) -> Result<Generation, EngineError> {
        let id = request.id;
        let choices = request.sampling.len();
        // A long prompt's log-probabilities may come in pieces.
        let pieces = request.prompt.len() / PROMPT_LOGPROBS_PIECE + 2;
        let all = choices * (request.max_tokens as usize + 1);
        // As many as some coordinators make, one after another.
        let notes = if request.traced { 4 * NOTES_MAX as usize } else { 0 };
        let bound = all.min(UNTAKEN_MAX) + pieces + notes;
        let (sender, events) = mpsc::channel(bound);
        let events_to = EventSender::Local(sender);
        let command = EngineCommand::Submit { request: Box::new(request), events: events_to };
        self.commands.try_send(command).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => EngineError::QueueFull {
                queued: COMMAND_QUEUE_MAX as u32,
                max: COMMAND_QUEUE_MAX as u32,
                retry_after_s: retry_after_seconds(id),
            },
            mpsc::error::TrySendError::Closed(_) => EngineError::ShuttingDown,
        })?;
        Ok(Generation { id, events, commands: self.commands.clone(), choices_left: choices })
    }
}

/// The request's events ended without a reason; a replica that shuts down gives one.
fn replica_crashed() -> EngineError {
    let message = "the replica that ran this request crashed and is restarting; try again";
    EngineError::Unavailable { message: message.to_owned() }
}

impl Generation {
    /// Returns the next event, or `None` after the last.
    pub async fn next(&mut self) -> Option<EngineEvent> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// Like [`Generation::next`], for callers that wait for several at once.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<EngineEvent>> {
        if self.choices_left == 0 {
            return Poll::Ready(None);
        }
        let event = ready!(self.events.poll_recv(context));
        let event = event.unwrap_or_else(|| EngineEvent::Failed(replica_crashed()));
        self.choices_left = event.left_after(self.choices_left);
        Poll::Ready(Some(event))
    }
}

impl Generation {
    /// Whether more events will come.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.choices_left > 0
    }

    /// Ends it: no more events come.
    pub fn cancel(&mut self) {
        if std::mem::take(&mut self.choices_left) > 0 {
            self.events.close();
            // A full channel is no loss: the engine also notices the closed event receiver.
            let _ = self.commands.try_send(EngineCommand::Cancel { id: self.id });
        }
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.cancel();
    }
}

/// Returns the seconds after which a request may retry if what it found full empties within
/// moments. Each request has its own, so that those refused together do not retry together.
#[must_use]
pub fn retry_after_seconds(request: RequestId) -> u32 {
    1 + (mix(request.0, &[0]) % 3) as u32
}

#[cfg(test)]
mod tests {
    use shared::sampling::SamplingParams;

    use super::*;

    #[tokio::test]
    async fn a_request_that_is_dropped_without_a_word_fell_to_a_defect() {
        let (handle, mut commands) = EngineHandle::channel();
        let greedy = vec![SamplingParams::greedy()];
        let request = GenerateRequest::new(RequestId(1), vec![1], greedy, 1);
        let mut generation = handle.submit(request).unwrap();
        drop(commands.recv().await);
        let Some(EngineEvent::Failed(EngineError::Unavailable { message })) =
            generation.next().await
        else {
            panic!("not unavailable")
        };
        assert!(message.contains("crashed"), "{message}");
        assert!(generation.next().await.is_none());
    }

    #[test]
    fn a_reader_that_takes_nothing_is_stuck_and_a_slow_one_is_not() {
        let secs = Duration::from_secs;
        let (events, mut taken) = mpsc::channel(100);
        let events = EventSender::Local(events);
        let mut reading = ReaderProgress::new(secs(5));
        assert!(!reading.is_stuck(secs(500), events.waiting()), "there is nothing to take");
        for _ in 0..10 {
            let token = EngineEvent::Token { choice: 0, token: 1, logprobs: None };
            events.send(token).unwrap();
            reading.sent();
        }
        assert_eq!(events.waiting(), 10);
        // One now and then, although more arrive.
        for at in [559, 618, 677] {
            assert!(!reading.is_stuck(secs(at), events.waiting()));
            assert!(taken.try_recv().is_ok());
            assert!(!reading.is_stuck(secs(at), events.waiting()));
        }
        assert!(!reading.is_stuck(secs(736), events.waiting()));
        assert!(reading.is_stuck(secs(737), events.waiting()));
    }
}
