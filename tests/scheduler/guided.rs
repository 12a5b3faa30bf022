//! A guide whose masks depend on all previous tokens, and how the scheduler handles guided
//! requests.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use coordinator::engine::{EngineError, FinishReason, GuideEnd, Guided, TokenGuide};
use coordinator::scheduler::SchedulerConfig;
use shared::protocol::TokenMask;

use crate::rig::{ClientRequest, Rig, sizes};

/// Tokens that are sampled here are below this.
pub(crate) const VOCABULARY: u32 = 50;

/// How a client's guide behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Guidance {
    /// Makes this request's masks different from others'.
    pub(crate) key: u64,
    /// One token in this many ends it; 0 for none.
    pub(crate) over_in: u64,
    /// It gives up after this many tokens.
    pub(crate) fails_behind: Option<usize>,
    /// Only this choice gives up; `None` for all choices.
    pub(crate) fails_in: Option<u32>,
    /// Whether its masks take time.
    pub(crate) slow: bool,
    /// Maximum size of each of its masks, in bytes, as it declares.
    pub(crate) mask_bytes: usize,
}

impl Default for Guidance {
    fn default() -> Self {
        Self { key: 7, over_in: 0, fails_behind: None, fails_in: None, slow: false, mask_bytes: 60 }
    }
}

/// Records whether it was woken.
#[derive(Debug, Default)]
pub(crate) struct Woken(AtomicBool);

impl Woken {
    pub(crate) fn take(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Returns the tokens that may come next, waiting as long as it takes to find out.
pub(crate) fn known(guide: &mut dyn TokenGuide) -> &TokenMask {
    while guide.poll(&mut Context::from_waker(Waker::noop())).is_pending() {}
    guide.allowed().unwrap()
}

/// The guide; see the module's documentation.
#[derive(Debug)]
pub(crate) struct TestGuide {
    guidance: Guidance,
    state: u64,
    taken: usize,
    /// Whether it answers "ask again".
    waits: bool,
    allowed: TokenMask,
}

impl TestGuide {
    pub(crate) fn new(guidance: Guidance) -> Self {
        let state = guidance.key;
        Self { guidance, state, taken: 0, waits: false, allowed: allowed(state) }
    }
}

fn told() -> GuideEnd {
    GuideEnd::Refused("as it was told".to_owned())
}

fn allowed(state: u64) -> TokenMask {
    let bits = [state as u32 | 1 << (state % 32), (state >> 32) as u32];
    TokenMask::from_bits(VOCABULARY, &bits)
}

impl TokenGuide for TestGuide {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), GuideEnd>> {
        if std::mem::take(&mut self.waits) {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        match self.guidance.fails_behind {
            Some(taken) if taken == self.taken => Poll::Ready(Err(told())),
            _ => Poll::Ready(Ok(())),
        }
    }

    fn allowed(&self) -> Option<&TokenMask> {
        (!self.waits).then_some(&self.allowed)
    }

    fn mask_bytes_max(&self) -> usize {
        self.guidance.mask_bytes
    }

    fn accept(&mut self, token: u32) -> Result<Guided, GuideEnd> {
        assert!(self.allowed().unwrap().allows(token), "tokens_obey_masks: {token}");
        self.taken += 1;
        self.waits = self.guidance.slow;
        if self.guidance.fails_behind == Some(self.taken) && !self.guidance.slow {
            return Err(told());
        }
        self.state = (self.state ^ u64::from(token)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.state = self.state.rotate_left(29);
        self.allowed = allowed(self.state);
        let over_in = self.guidance.over_in;
        let is_over = over_in > 0 && (self.state >> 7).is_multiple_of(over_in);
        Ok(if is_over { Guided::IsOver } else { Guided::GoesOn })
    }
}

fn config() -> SchedulerConfig {
    SchedulerConfig { max_model_len: 100, max_num_seqs: 8, max_num_batched_tokens: 64, ..sizes() }
}

fn guided(max_tokens: u32) -> ClientRequest {
    ClientRequest { max_tokens, guide: Some(Guidance::default()), ..ClientRequest::default() }
}

/// Number of the last plan's sequences that are masked.
fn masked(rig: &Rig) -> usize {
    rig.plan.sequences.iter().filter(|entry| entry.masked).count()
}

#[test]
fn guided_sequences_are_in_every_step_one_ahead_of_their_tokens() {
    for (guided_ones, free) in [(1, 3), (1, 0), (3, 1)] {
        let mut rig = Rig::new(config());
        rig.ready(40);
        let few: Vec<_> = (0..guided_ones).map(|_| rig.submit(guided(20)).unwrap()).collect();
        let plain = ClientRequest { max_tokens: 20, ..ClientRequest::default() };
        let many: Vec<_> = (0..free).map(|_| rig.submit(plain.clone()).unwrap()).collect();
        assert!(rig.plan());
        // As many steps as unguided sequences need: every sequence gets a token in each.
        for step in 1..20 {
            assert!(rig.plan(), "step {step} is in flight, and the next is planned");
            assert_eq!((masked(&rig), rig.plan.sequences.len()), (few.len(), few.len() + free));
            assert!(!rig.plan(), "two steps are in flight");
            assert!(rig.deliver());
            for id in few.iter().chain(&many) {
                assert_eq!(rig.requests[id].1.tokens[0].len(), step);
            }
        }
        assert!(rig.deliver() && !rig.plan() && !rig.deliver());
        rig.drain();
    }
}

#[test]
fn masks_follow_when_all_are_there_and_the_next_step_is_planned_meanwhile() {
    let mut rig = Rig::new(config());
    rig.ready(30);
    let guide = Some(Guidance { slow: true, ..Guidance::default() });
    let slow = rig.submit(ClientRequest { guide, ..guided(9) }).unwrap();
    let quick = rig.submit(guided(9)).unwrap();
    assert!(rig.plan() && !rig.awaits_masks(), "the first masks are there at once");
    for step in 1..9 {
        assert!(rig.plan() && rig.awaits_masks(), "{step} is not answered");
        assert!(!rig.was_woken() && rig.scheduler.masks_awaited().is_empty());
        assert!(rig.deliver());
        assert_eq!(rig.scheduler.masks_awaited().len(), 1, "only the slow one's");
        assert!(rig.awaits_masks() && rig.was_woken());
        rig.send_masks();
        assert!(!rig.awaits_masks());
        for id in [slow, quick] {
            assert_eq!(rig.requests[&id].1.tokens[0].len(), step);
        }
    }
    rig.drain();
}

#[test]
fn a_first_mask_is_sent_while_another_step_is_under_way() {
    let mut rig = Rig::new(config());
    rig.ready(30);
    rig.submit(ClientRequest { max_tokens: 20, ..ClientRequest::default() }).unwrap();
    assert!(rig.plan());
    rig.submit(guided(3)).unwrap();
    assert!(rig.plan() && masked(&rig) == 1 && !rig.awaits_masks());
    rig.drain();
}

#[test]
fn a_step_whose_sequences_are_gone_gets_its_masks_all_the_same() {
    let goes: [fn(&mut Rig, shared::ids::RequestId); 2] =
        [|rig, id| rig.cancel(id), |rig, _| assert!(rig.deliver())];
    for (at, goes) in goes.into_iter().enumerate() {
        let mut rig = Rig::new(config());
        rig.ready(30);
        // In the second case, the first token completes it while the next step is in progress.
        let over_in = at as u64;
        let guide = Some(Guidance { over_in, ..Guidance::default() });
        let id = rig.submit(ClientRequest { guide, ..guided(9) }).unwrap();
        assert!(rig.plan() && rig.plan() && rig.awaits_masks());
        goes(&mut rig, id);
        assert!(!rig.awaits_masks(), "{at}");
        rig.drain();
        assert_eq!(rig.totals.wasted, 2 - at as u32, "what it still got counts for nothing");
        assert!(rig.requests[&id].1.tokens[0].len() == at);
    }
}

/// A rank that samples before it knows what is allowed has not done what was planned.
#[test]
fn an_answer_before_its_masks_ends_the_requests_that_are_masked() {
    use shared::ids::{Epoch, StepId};
    let mut rig = Rig::new(config());
    rig.ready(30);
    let id = rig.submit(ClientRequest { max_tokens: 9, ..guided(9) }).unwrap();
    assert!(rig.plan() && rig.plan() && rig.awaits_masks());
    rig.rush(&[7]);
    assert_eq!(rig.requests[&id].1.dropped, Some(Some(EngineError::Corrupted)));
    assert_eq!((Epoch(rig.epoch), rig.scheduler.last_step()), (Epoch(1), StepId(2)));
}

#[test]
fn a_prompt_in_parts_has_a_mask_with_its_last_part_alone() {
    let mut rig = Rig::new(config());
    rig.ready(30);
    let prompt: Vec<u32> = (0..40).map(|token| token % 50).chain(0..40).collect();
    rig.submit(ClientRequest { prompt, ..guided(3) }).unwrap();
    assert!(rig.plan());
    assert_eq!((rig.plan.sequences[0].count, rig.plan.sequences[0].masked), (64, false));
    assert!(rig.plan() && rig.plan.sequences[0].masked);
    rig.drain();
}

#[test]
fn a_guide_ends_its_sequence_with_the_token_that_completes_it() {
    let mut rig = Rig::new(config());
    rig.ready(30);
    let guide = Some(Guidance { over_in: 4, ..Guidance::default() });
    let ids: Vec<_> = (0..6)
        .map(|seed| {
            let client = ClientRequest { guide, seed, n: 2, ..guided(60) };
            let id = rig.submit(client);
            rig.drain();
            id.unwrap()
        })
        .collect();
    let reasons: Vec<_> = ids.iter().flat_map(|id| rig.requests[id].1.reasons.clone()).collect();
    let complete = reasons.iter().filter(|it| **it == Some(FinishReason::Complete)).count();
    assert!(complete >= 10, "{reasons:?}");
}

#[test]
fn a_guide_that_gives_up_ends_its_own_request_alone() {
    let mut rig = Rig::new(config());
    rig.ready(30);
    let guide = Some(Guidance { fails_behind: Some(3), ..Guidance::default() });
    let fails = rig.submit(ClientRequest { guide, n: 2, ..guided(9) }).unwrap();
    let goes_on = rig.submit(guided(9)).unwrap();
    rig.drain();
    let message = "as it was told".to_owned();
    let error = Some(Some(EngineError::Guide { message }));
    assert_eq!(rig.requests[&fails].1.dropped, error);
    // The same if this is found out later: by a running sequence, or by one that waits to run
    // again.
    for lost in [false, true] {
        let guide = Some(Guidance { fails_behind: Some(3), slow: true, ..Guidance::default() });
        let fails = rig.submit(ClientRequest { guide, n: 2, ..guided(9) }).unwrap();
        while rig.requests[&fails].1.tokens[1].len() < 3 {
            let _ = rig.plan() || rig.deliver();
        }
        if lost {
            rig.lost();
            rig.ready(30);
        }
        rig.drain();
        assert_eq!(rig.requests[&fails].1.dropped, error);
    }
    assert_eq!(rig.requests[&goes_on].1.reasons, [Some(FinishReason::Length)]);
    // If the last token was already accepted, nothing is left to continue with.
    let guide = Some(Guidance { fails_behind: Some(3), ..Guidance::default() });
    let at_its_end = rig.submit(ClientRequest { guide, ..guided(3) }).unwrap();
    rig.drain();
    assert_eq!(rig.requests[&at_its_end].1.reasons, [Some(FinishReason::Length)]);
}

#[test]
fn a_guide_that_gives_up_as_it_waits_ends_its_request_behind_the_step_its_other_choice_is_in() {
    let mut rig = Rig::new(config());
    rig.ready(30);
    let (fails_behind, fails_in) = (Some(3), Some(1));
    let guide = Some(Guidance { fails_behind, fails_in, slow: true, ..Guidance::default() });
    let fails = rig.submit(ClientRequest { guide, n: 2, ..guided(9) }).unwrap();
    let goes_on = rig.submit(ClientRequest { max_tokens: 40, ..ClientRequest::default() }).unwrap();
    while rig.requests[&fails].1.tokens[1].len() < 3 {
        let _ = rig.plan() || rig.deliver();
    }
    // All wait again: the choice that goes on is planned before it is known that the other one does
    // not.
    rig.lost();
    rig.ready(30);
    rig.drain();
    let message = "as it was told".to_owned();
    assert_eq!(rig.requests[&fails].1.dropped, Some(Some(EngineError::Guide { message })));
    assert_eq!(rig.requests[&goes_on].1.reasons, [Some(FinishReason::Length)]);
}

#[test]
fn no_more_are_admitted_than_a_step_has_room_for_masks() {
    let mut rig = Rig::new(config());
    rig.ready(60);
    // Two of the four fit. The unguided one, which needs no room, overtakes the third; the fourth,
    // which would fit, does not.
    let of = |bytes| Some(Guidance { mask_bytes: bytes, ..Guidance::default() });
    let ids: Vec<_> = [of(8 << 20), of(6 << 20), of(8 << 20), of(1), None]
        .map(|guide| rig.submit(ClientRequest { guide, ..guided(3) }).unwrap())
        .into();
    assert!(rig.plan());
    assert_eq!(rig.plan.sequences.len(), 3);
    assert_eq!(masked(&rig), 2);
    while rig.requests[&ids[0]].1.reasons.contains(&None) {
        assert!(rig.requests[&ids[3]].1.tokens[0].is_empty());
        let _ = rig.plan() || rig.deliver();
    }
    rig.drain();
    for id in ids {
        assert_eq!(rig.requests[&id].1.reasons, [Some(FinishReason::Length)]);
    }
    // A mask that is too large for any batch runs alone rather than never.
    let guide = Some(Guidance { mask_bytes: 17 << 20, ..Guidance::default() });
    rig.submit(ClientRequest { guide, ..guided(3) }).unwrap();
    rig.drain();
}

#[test]
fn guided_sequences_go_on_where_they_were_after_preemption_loss_and_a_move() {
    let mut rig = Rig::new(config());
    rig.ready(5);
    for seed in 0..4 {
        let prompt = (0..30).map(|at| (seed as u32 * 7 + at) % 50).collect();
        rig.submit(ClientRequest { seed, prompt, ..guided(40) }).unwrap();
    }
    let mut moments = 0;
    for at in 0..200 {
        let (planned, delivered) = (rig.plan(), at % 3 != 2 && rig.deliver());
        if at % 41 == 40 {
            rig.lost();
            rig.ready(5);
        }
        if at % 67 == 66 {
            rig.move_on();
            rig.ready(5);
            moments += 1;
        }
        if !planned && !delivered && rig.scheduler.gauges().in_flight == 0 {
            break;
        }
    }
    // The rig has compared every token with the undisturbed one.
    rig.drain();
    assert!(rig.preemptions > 0 && moments > 0, "{} {moments}", rig.preemptions);
}
