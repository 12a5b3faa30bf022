//! The clients: what they were promised, and what they got.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use coordinator::adapters::AdapterUse;
use coordinator::engine::{
    EngineError, EngineEvent, EventSender, FinishReason, GenerateRequest, StopCheck, TokenGuide,
};
use shared::ids::{ReplicaId, RequestId};
use shared::metrics::catalogue::REQUEST_SUCCESS;
use shared::metrics::labels::FinishedReason;
use shared::protocol::{NOTES_MAX, RequestNote};
use shared::sampling::SamplingParams;
use tokio::sync::mpsc::{Receiver, channel, error::TryRecvError};

use coordinator::scheduler::SUSPICION_MAX;

use crate::coordinator::Life;
use crate::model::{OF_THE_HUB, before, embedding, extend, undisturbed_with};
use crate::scenario::{Client, Leaving, MS, Time};
use crate::tally::Tally;
use crate::world::World;

/// Every token that was accepted for a request, by choice.
type Log = Arc<Mutex<Vec<Vec<u32>>>>;

/// Watches the tokens that are accepted, as a stop check sees them.
#[derive(Debug)]
struct Watch {
    log: Log,
    choice: usize,
    stop_token: Option<u32>,
}

impl StopCheck for Watch {
    fn push(&mut self, token: u32) -> bool {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)[self.choice].push(token);
        self.stop_token == Some(token)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Not submitted yet.
    Coming,
    /// Submitted to a replica, but not accepted yet.
    Submitted,
    /// Accepted, and not ended.
    Live,
    Rejected,
    /// The coordinator that had it is gone, which ended the connection; or there was no
    /// coordinator.
    Lost,
    Ended(FinishedReason),
}

struct Open {
    client: Client,
    events: Option<Receiver<EngineEvent>>,
    log: Log,
    got: Vec<Vec<u32>>,
    reasons: Vec<Option<FinishReason>>,
    embedded: bool,
    /// What the adapter of its request contains.
    contents: u64,
    state: State,
    left: Option<Leaving>,
    left_at: Time,
    /// The coordinator that has or had it.
    life: Option<Life>,
    replica: Option<ReplicaId>,
    /// Since when it has waited for a replica that can serve, if it waits.
    waits_since: Option<Time>,
    /// How many tokens of each choice were accepted when an epoch that ran it ended.
    lost_at: Vec<Vec<usize>>,
    notes: Notes,
}

/// What was noted of a request, if it is traced.
#[derive(Default)]
struct Notes {
    are_asked: bool,
    number: u16,
    /// The replica that runs it.
    runs_at: Option<ReplicaId>,
}

impl Notes {
    /// Whether all of them are here.
    fn are_complete(&self) -> bool {
        self.are_asked && self.number + 1 < NOTES_MAX
    }

    fn take(&mut self, note: RequestNote) -> Result<(), String> {
        self.number += 1;
        let fits = match note {
            RequestNote::Scheduled { replica, ranks } => {
                self.runs_at = Some(replica);
                ranks > 0
            }
            RequestNote::Preempted { replica } => self.runs_at == Some(replica),
            RequestNote::Interrupted { replica, .. } => {
                self.runs_at.take().is_none_or(|at| at == replica)
            }
            RequestNote::Drafted { tokens, accepted } => tokens > 0 && accepted <= tokens,
            RequestNote::CoordinatorLost => false,
        };
        if !self.are_asked || self.number > NOTES_MAX || !fits {
            return Err(format!("the note {note:?}, after {} others", self.number - 1));
        }
        Ok(())
    }

    /// Something was computed for it.
    fn check_runs(&self) -> Result<(), String> {
        if self.are_complete() && self.runs_at.is_none() {
            return Err("computed by nobody, as its notes have it".to_owned());
        }
        Ok(())
    }
}

/// A request that a replica has.
pub(crate) struct Held {
    pub(crate) seed: u64,
    pub(crate) n: u32,
    /// Tokens that a KV cache must have room for, for each choice.
    pub(crate) needed: u32,
    /// Whether it is happy with less.
    pub(crate) open_ended: bool,
    /// Whether its client has left.
    pub(crate) left: bool,
}

pub(crate) struct Clients {
    open: Vec<Open>,
    /// Requests that have not ended, by where they were routed.
    at: BTreeMap<(Life, ReplicaId), Vec<usize>>,
}

impl Clients {
    pub(crate) fn new(clients: Vec<Client>) -> Self {
        let open = |client: Client| {
            let n = client.n as usize;
            Open {
                events: None,
                log: Arc::new(Mutex::new(vec![Vec::new(); n])),
                got: vec![Vec::new(); n],
                reasons: vec![None; n],
                embedded: false,
                contents: 0,
                state: State::Coming,
                left: None,
                left_at: 0,
                life: None,
                replica: None,
                waits_since: None,
                lost_at: Vec::new(),
                notes: Notes::default(),
                client,
            }
        };
        let open = clients.into_iter().map(open).collect();
        Self { open, at: BTreeMap::new() }
    }

    pub(crate) fn open(
        &mut self,
        index: usize,
        life: Life,
        now: Time,
        (adapter, contents): (AdapterUse, u64),
    ) -> (GenerateRequest, EventSender) {
        let open = &mut self.open[index];
        open.life = Some(life);
        open.contents = contents;
        let client = &mut open.client;
        if contents >= OF_THE_HUB && client.pooling.is_none() {
            // Only now is it known which of that name it gets.
            let (prompt, seed, ends) = (&client.prompt, client.seed, &client.ends);
            let text = |choice| undisturbed_with(contents, prompt, seed, choice, ends);
            client.expected = (0..client.n).map(text).collect();
        }
        let sampling = |choice| SamplingParams {
            choice,
            seed: client.seed,
            min_tokens: client.ends.min_tokens,
            pooling: client.pooling,
            ..SamplingParams::greedy()
        };
        let stop_check = |choice| -> Box<dyn StopCheck> {
            let (log, stop_token) = (open.log.clone(), client.ends.stop_token);
            Box::new(Watch { log, choice: choice as usize, stop_token })
        };
        let guide = |_| client.ends.guide().map(|guide| Box::new(guide) as Box<dyn TokenGuide>);
        let request = GenerateRequest {
            stop_checks: (0..client.n).map(stop_check).collect(),
            guides: (0..client.n).filter_map(guide).collect(),
            // Text and promises do not depend on the priority.
            priority: (index % 3) as i32 - 1,
            adapter,
            end_tokens: client.ends.end_tokens.clone(),
            arrived: Duration::from_micros(now),
            open_ended: client.open_ended,
            traced: index.is_multiple_of(3),
            ..GenerateRequest::new(
                RequestId(index as u64),
                client.prompt.clone(),
                (0..client.n).map(sampling).collect(),
                client.ends.max_tokens,
            )
        };
        open.notes.are_asked = request.traced;
        let all = client.n * (client.ends.max_tokens + 1) + 2 + u32::from(NOTES_MAX);
        let (sender, events) = channel(all as usize);
        open.events = Some(events);
        open.state = State::Submitted;
        (request, EventSender::Local(sender))
    }

    pub(crate) fn routed(&mut self, index: usize, replica: ReplicaId, down_since: Option<Time>) {
        self.open[index].replica = Some(replica);
        self.open[index].waits_since = down_since;
        let Some(life) = self.open[index].life else { return };
        self.at.entry((life, replica)).or_default().push(index);
    }

    /// A replica's requests continue.
    pub(crate) fn served(&mut self, life: Life, replica: ReplicaId) {
        for index in self.at.get(&(life, replica)).into_iter().flatten() {
            self.open[*index].waits_since = None;
        }
    }

    /// A replica's requests wait again.
    pub(crate) fn interrupted(&mut self, life: Life, replica: ReplicaId, now: Time) {
        for index in self.at.get(&(life, replica)).into_iter().flatten() {
            self.open[*index].waits_since = Some(now);
            let accepted = self.open[*index].accepted();
            self.open[*index].lost_at.push(accepted);
        }
    }

    /// Requests continue, or wait, at another replica.
    pub(crate) fn moved(
        &mut self,
        life: Life,
        from: ReplicaId,
        to: ReplicaId,
        indices: Vec<usize>,
    ) {
        if let Some(at) = self.at.get_mut(&(life, from)) {
            at.retain(|index| !indices.contains(index));
        }
        for index in &indices {
            self.open[*index].replica = Some(to);
        }
        self.at.entry((life, to)).or_default().extend(indices);
    }

    /// Returns a request that has not ended, if there is one.
    pub(crate) fn hung(&self) -> Option<String> {
        let ended =
            |open: &Open| matches!(open.state, State::Rejected | State::Lost | State::Ended(_));
        let index = self.open.iter().position(|open| !ended(open))?;
        let open = &self.open[index];
        Some(format!("req-{index} at {:?} ({:?})", open.replica, open.state))
    }

    /// The requests that a replica has, or is about to get.
    pub(crate) fn held_at(&self, life: Life, replica: ReplicaId) -> Vec<Held> {
        let at = self.at.get(&(life, replica)).into_iter().flatten();
        at.map(|index| {
            let Open { client, left, .. } = &self.open[*index];
            let needed = client.prompt.len() as u32 + client.ends.max_tokens;
            let open_ended = client.open_ended;
            Held { seed: client.seed, n: client.n, needed, open_ended, left: left.is_some() }
        })
        .collect()
    }

    /// Whether its client will cancel but has not done so yet.
    pub(crate) fn would_cancel(&self, index: usize) -> bool {
        let open = &self.open[index];
        let leaves = open.client.leaves.is_some_and(|(_, leaving)| leaving == Leaving::Cancels);
        leaves && open.left.is_none()
    }

    /// Returns a request that is still held long after its client left, if there is one.
    pub(crate) fn unnoticed(&self, life: Life, now: Time) -> Option<usize> {
        let held = |open: &Open| {
            open.life == Some(life)
                && open.left.is_some()
                && open.state == State::Live
                && now > open.left_at + 100 * MS
        };
        self.open.iter().position(held)
    }

    /// Tokens that a coordinator accepted so far, over all its requests.
    pub(crate) fn accepted_tokens(&self, life: Life) -> u64 {
        let of = |open: &Open| -> usize {
            let log = open.log.lock().unwrap_or_else(PoisonError::into_inner);
            log.iter().map(Vec::len).sum()
        };
        self.of(life).map(of).sum::<usize>() as u64
    }

    fn of(&self, life: Life) -> impl Iterator<Item = &Open> {
        self.open.iter().filter(move |open| open.life == Some(life))
    }

    /// Tokens accepted plus requests answered, by any coordinator: grows while all is well.
    pub(crate) fn progress(&self) -> u64 {
        let lives: BTreeSet<Life> = self.open.iter().filter_map(|open| open.life).collect();
        let tokens: u64 = lives.into_iter().map(|life| self.accepted_tokens(life)).sum();
        tokens
            + self.open.iter().filter(|open| matches!(open.state, State::Ended(_))).count() as u64
    }

    pub(crate) fn in_flight(&self, life: Life) -> u64 {
        self.of(life).filter(|open| open.state == State::Live).count() as u64
    }

    /// Counts what is in flight as ended with its coordinator.
    pub(crate) fn end_in_flight(&self, life: Life, tally: &mut Tally) {
        for open in self.of(life).filter(|open| open.state == State::Live) {
            *tally.ended.entry(FinishedReason::Error).or_default() += 1;
            tally.prompts_of_others += open.prompts();
        }
    }

    /// The coordinator that has a request, if it has not ended.
    pub(crate) fn life_of(&self, index: usize) -> Option<Life> {
        self.open[index].life
    }

    /// No coordinator takes the request.
    pub(crate) fn refused(&mut self, index: usize) {
        self.open[index].state = State::Lost;
    }
}

impl Open {
    fn accepted(&self) -> Vec<usize> {
        let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        log.iter().map(Vec::len).collect()
    }

    /// Whether so many epochs in a row ended without progress of one choice that the request counts
    /// as the cause.
    fn is_suspect(&self) -> bool {
        let stuck = |(choice, accepted): (usize, usize)| {
            let lost = self.lost_at.iter().rev();
            let fruitless = lost.take_while(|at| at[choice] == accepted).count();
            fruitless >= SUSPICION_MAX as usize
        };
        self.accepted().into_iter().enumerate().any(stuck)
    }

    /// Prompt tokens of all choices.
    fn prompts(&self) -> u64 {
        u64::from(self.client.n) * self.client.prompt.len() as u64
    }

    fn whole(&self) -> bool {
        let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        self.client.expected.iter().zip(&*log).all(|((text, _), got)| text.len() == got.len())
    }

    /// Checks that the accepted tokens are the undisturbed text, as far as they go.
    fn check(&self, lost: bool) -> Result<(), String> {
        let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        for (choice, (text, _)) in self.client.expected.iter().enumerate() {
            if !text.starts_with(&log[choice]) {
                return Err(format!("choice {choice} is {:?}, not {text:?}", log[choice]));
            }
            // Events that were in transit when the coordinator was lost did not arrive.
            if !lost && self.left != Some(Leaving::Drops) && self.got[choice] != log[choice] {
                let (got, log) = (&self.got[choice], &log[choice]);
                return Err(format!("choice {choice}: the client got {got:?} of {log:?}"));
            }
        }
        Ok(())
    }

    fn finished_reason(&self) -> FinishedReason {
        let expected = self.client.expected.iter().map(|(_, reason)| *reason);
        let mut ends =
            expected.zip(&self.reasons).map(|(expected, found)| found.unwrap_or(expected));
        let by_length = ends.any(|reason| reason == FinishReason::Length);
        if by_length { FinishedReason::Length } else { FinishedReason::Stop }
    }
}

/// Whether this part of a text is all that a KV cache of `room` tokens has room for, so that it
/// ends there: its client set no bound.
fn fills(client: &Client, text: &[u32], got: &[u32], room: Option<u32>) -> bool {
    let len = (client.prompt.len() + got.len()) as u32;
    client.open_ended && text.starts_with(got) && room.is_some_and(|room| len >= room)
}

impl World {
    pub(crate) fn leave(&mut self, index: usize) {
        let open = &mut self.clients.open[index];
        if open.left.is_some() || !matches!(open.state, State::Submitted | State::Live) {
            return;
        }
        open.left_at = self.now;
        let Some((_, leaving)) = open.client.leaves else { return };
        open.left = Some(leaving);
        match leaving {
            _ if self.switches.leaving_unnoticed => {}
            Leaving::Drops => {
                if let Some(events) = &mut open.events {
                    events.close();
                }
            }
            Leaving::Cancels => {
                if self.clients.life_of(index).is_some_and(|life| self.coordinator.act(life)) {
                    self.cancel(RequestId(index as u64));
                }
            }
        }
    }

    /// The coordinator of these requests is gone: their connections end.
    pub(crate) fn clients_lost(&mut self, life: Life) {
        for index in 0..self.clients.open.len() {
            let open = &mut self.clients.open[index];
            let waits = matches!(open.state, State::Submitted | State::Live);
            if open.life != Some(life) || !waits {
                continue;
            }
            open.state = State::Lost;
            open.events = None;
            self.report.lost += 1;
            if let Err(why) = open.check(true) {
                self.fail(format!("req-{index}, lost: {why}"));
            }
        }
        self.clients.at.retain(|(of, _), _| *of != life);
    }

    /// A request for which no replica was found.
    pub(crate) fn hear_refused(&mut self, index: usize) {
        if let Err(why) = self.hear(index, true) {
            self.fail(format!("req-{index}: {why}"));
        }
    }

    /// Takes what a replica has sent to its clients. `submitted` has just reached it.
    pub(crate) fn hear_clients(&mut self, replica: ReplicaId, submitted: Option<usize>) {
        let life = self.coordinator.life;
        let Some(mut at) = self.clients.at.remove(&(life, replica)) else { return };
        at.retain(|index| {
            if self.clients.open[*index].state == State::Submitted && submitted != Some(*index) {
                return true;
            }
            match self.hear(*index, submitted == Some(*index)) {
                Ok(goes_on) => goes_on,
                Err(why) => {
                    self.fail(format!("req-{index}: {why}"));
                    false
                }
            }
        });
        self.clients.at.entry((life, replica)).or_default().extend(at);
    }

    /// Takes what came for one request; returns whether more will come.
    fn hear(&mut self, index: usize, submitted: bool) -> Result<bool, String> {
        let (now, switches) = (self.now, self.switches);
        let open = &mut self.clients.open[index];
        let prompts = open.prompts();
        let coordinator = &mut *self.coordinator;
        let room = open.replica.and_then(|id| coordinator.dispatch.room(id));
        let tally = &mut coordinator.tally;
        let is_suspect = open.is_suspect();
        let Some(events) = &mut open.events else { return Ok(false) };
        if submitted && open.state == State::Submitted {
            // A refusal comes at once or never.
            match events.try_recv() {
                Ok(EngineEvent::Failed(error)) => {
                    let allowed = matches!(
                        error,
                        EngineError::QueueFull { .. } | EngineError::Unavailable { .. }
                    );
                    open.state = State::Rejected;
                    *tally.rejected.entry((&error).into()).or_default() += 1;
                    return if allowed { Ok(false) } else { Err(format!("refused: {error}")) };
                }
                // Its client closed the channel, so the refusal cannot be seen.
                Err(_)
                    if open.left == Some(Leaving::Drops) && events.sender_strong_count() == 0 =>
                {
                    return Err("gone before it was accepted".to_owned());
                }
                Ok(EngineEvent::Note(note)) => open.notes.take(note)?,
                Ok(event) => return Err(format!("{event:?} before it was accepted")),
                Err(_) => {}
            }
            open.state = State::Live;
            tally.accepted += 1;
        }
        let mut tokens = Vec::new();
        loop {
            match events.try_recv() {
                Ok(EngineEvent::Token { choice, token, .. }) => {
                    let choice = choice as usize;
                    if open.reasons[choice].is_some() {
                        return Err(format!("a token after the end of choice {choice}"));
                    }
                    open.notes.check_runs()?;
                    tokens.push(u64::from(token));
                    let lost = switches.token_lost && token % 50 == 0;
                    let repeated = switches.token_repeated && token % 50 == 0;
                    for _ in 0..1 + u32::from(repeated) - u32::from(lost) {
                        open.got[choice].push(token);
                    }
                }
                Ok(EngineEvent::Finished { choice, reason, .. }) => {
                    if open.reasons[choice as usize].replace(reason).is_some() {
                        return Err(format!("choice {choice} finishes twice"));
                    }
                    if open.client.pooling.is_some() && !open.embedded {
                        return Err("finishes without its embedding".to_owned());
                    }
                    let (text, expected) = &open.client.expected[choice as usize];
                    let got = &open.got[choice as usize];
                    let whole = reason == *expected && text == got;
                    let full =
                        reason == FinishReason::Length && fills(&open.client, text, got, room);
                    self.report.filled += u64::from(full && !whole);
                    if !whole && !full {
                        return Err(format!(
                            "choice {choice} is {got:?}, {reason:?}; undisturbed it is {text:?}, \
                             {expected:?}"
                        ));
                    }
                }
                Ok(EngineEvent::Failed(error)) => {
                    let waited = open.waits_since.map(|since| Duration::from_micros(now - since));
                    let long = waited >= Some(self.scenario.limits.unavailable_timeout);
                    match error {
                        EngineError::Unavailable { .. } if long => self.report.unavailable += 1,
                        EngineError::Quarantined { .. } if is_suspect => {
                            self.report.quarantined += 1;
                        }
                        error => {
                            let lost = &open.lost_at;
                            return Err(format!("failed: {error}, after {waited:?}, {lost:?}"));
                        }
                    }
                    open.state = State::Ended(FinishedReason::Error);
                }
                Ok(EngineEvent::Embedding(found)) => {
                    let state = open.client.prompt.iter();
                    let begun = before(open.contents);
                    let state = state.fold(begun, |state, token| extend(state, *token));
                    let asked = open.client.pooling.is_some() && !open.embedded;
                    if !asked || found != embedding(state) {
                        return Err(format!("the embedding {found:?}, asked for: {asked}"));
                    }
                    open.embedded = true;
                }
                Ok(EngineEvent::PromptLogprobs(_)) => return Err("nobody asked".to_owned()),
                Ok(EngineEvent::Note(note)) => open.notes.take(note)?,
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => break,
            }
        }
        let over = events.sender_strong_count() == 0;
        let finished = open.reasons.iter().all(Option::is_some);
        open.check(false)?;
        if over && open.state == State::Live {
            let whole = finished || (open.left == Some(Leaving::Drops) && open.whole());
            // Whether the request was given up before its client was missed; only the totals show
            // it.
            let given_up = || {
                let errors = coordinator.hub.merged();
                let errors = errors.counter_sum_of(REQUEST_SUCCESS, FinishedReason::Error);
                errors > tally.ended.get(&FinishedReason::Error).copied().unwrap_or_default()
            };
            open.state = match open.left {
                Some(Leaving::Drops) if is_suspect && given_up() => {
                    self.report.quarantined += 1;
                    State::Ended(FinishedReason::Error)
                }
                _ if whole => State::Ended(open.finished_reason()),
                Some(_) => State::Ended(FinishedReason::Abort),
                None => return Err("ended without a word".to_owned()),
            };
        } else if finished && !over {
            return Err("finished and still held".to_owned());
        }
        if let State::Ended(reason) = open.state {
            *tally.ended.entry(reason).or_default() += 1;
            if matches!(reason, FinishedReason::Stop | FinishedReason::Length) {
                self.report.finished += 1;
                tally.prompts_of_finished += prompts;
            } else {
                tally.prompts_of_others += prompts;
            }
        }
        let goes_on = open.state == State::Live;
        self.trace(&tokens);
        Ok(goes_on)
    }
}
