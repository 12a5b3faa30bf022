//! Bounds on reasoning: masks are made only where a budget may be spent; drafts go on elsewhere.
use coordinator::scheduler::{Method, NgramConfig, SchedulerConfig, Speculation};
use shared::protocol::ThinkingBudget;

use crate::rig::{ClientRequest, Rig, sizes};

fn config() -> SchedulerConfig {
    SchedulerConfig { max_model_len: 400, max_num_seqs: 8, max_num_batched_tokens: 64, ..sizes() }
}

fn plain() -> ClientRequest {
    ClientRequest { max_tokens: 40, seed: 4, ..ClientRequest::default() }
}

/// The same with a bound on its reasoning, which this token ends.
fn reasoning(tokens: u32, close: u32) -> ClientRequest {
    let budget = ThinkingBudget { tokens, open: None, closes: vec![close], is_open: true };
    ClientRequest { thinking: Some(budget), ..plain() }
}

/// A token that is not among these.
fn other_than(tokens: &[u32]) -> u32 {
    (5..50).find(|token| !tokens.contains(token)).unwrap()
}

/// Plans and answers until all is done; returns how many masks were asked for.
fn masks(rig: &mut Rig) -> usize {
    let mut masked = 0;
    loop {
        while rig.plan() {
            masked += rig.plan.sequences.iter().filter(|entry| entry.masked).count();
        }
        if !rig.deliver() {
            return masked;
        }
    }
}

/// What a client gets for its first choice.
fn answer(client: ClientRequest) -> (Vec<u32>, usize) {
    let mut rig = Rig::new(config());
    rig.ready(60);
    let id = rig.submit(client).unwrap();
    let masked = masks(&mut rig);
    (rig.requests[&id].1.tokens[0].clone(), masked)
}

#[test]
fn reasoning_ends_with_the_token_behind_its_budget() {
    let free = answer(plain()).0;
    let close = other_than(&free);
    for budget in [0, 1, 2, 9] {
        let (tokens, masked) = answer(reasoning(budget, close));
        let before = budget as usize;
        assert_eq!((&tokens[..before], tokens[before]), (&free[..before], close), "{tokens:?}");
        // One more is planned before it is known that the reasoning is over.
        assert_eq!(masked, 2, "with a budget of {budget}");
    }
    assert_eq!(answer(reasoning(40, close)), (free, 0));
}

#[test]
fn reasoning_that_ends_by_itself_needs_no_mask() {
    let free = answer(plain()).0;
    assert!(!free[..7].contains(&free[7]));
    assert_eq!(answer(reasoning(20, free[7])), (free, 0));
}

#[test]
fn reasoning_begins_where_it_is_opened() {
    let free = answer(plain()).0;
    let close = other_than(&free);
    let opened_by = |open| {
        let mut client = reasoning(3, close);
        let budget = client.thinking.as_mut().unwrap();
        (budget.open, budget.is_open) = (open, false);
        answer(client).0
    };
    assert_eq!(opened_by(None), free);
    assert_eq!(opened_by(Some(close)), free);
    assert!(!free[..3].contains(&free[3]) && !free[..5].contains(&free[5]));
    let tokens = opened_by(Some(free[3]));
    assert_eq!((&tokens[..7], tokens[7]), (&free[..7], close), "{tokens:?}");
    // Further on it is part of the answer.
    assert_eq!(opened_by(Some(free[5])), free);
}

#[test]
fn every_choice_has_its_own_budget_and_others_are_not_concerned() {
    let mut rig = Rig::new(config());
    rig.ready(60);
    let (two, four) = (|| ClientRequest { n: 2, ..plain() }, 4);
    let free = rig.submit(two()).unwrap();
    masks(&mut rig);
    let of = |rig: &Rig, id| rig.requests[&id].1.tokens.clone();
    let expected = of(&rig, free);
    let close = other_than(&expected.concat());
    let client = ClientRequest { thinking: reasoning(four, close).thinking, ..two() };
    let (bound, free) = (rig.submit(client).unwrap(), rig.submit(two()).unwrap());
    masks(&mut rig);
    assert_eq!(of(&rig, free), expected);
    for (tokens, expected) in of(&rig, bound).iter().zip(&expected) {
        assert_eq!((&tokens[..4], tokens[4]), (&expected[..4], close));
    }
}

#[test]
fn drafts_go_on_until_the_budget_may_be_spent_and_behind_it() {
    let lookup = NgramConfig { prompt_lookup_max: 3, prompt_lookup_min: 2 };
    let speculation = Speculation {
        num_speculative_tokens: 4,
        method: Method::Ngram(lookup),
        disable_by_batch_size: None,
    };
    // Texts of such a seed repeat themselves.
    let client = ClientRequest { seed: 3, max_tokens: 200, ..plain() };
    let close = other_than(&answer(client.clone()).0);
    let mut rig = Rig::new(SchedulerConfig { speculation: Some(speculation), ..config() });
    rig.ready(60);
    let thinking = reasoning(100, close).thinking;
    let id = rig.submit(ClientRequest { thinking, ..client }).unwrap();
    let (mut within, mut behind) = (0, 0);
    loop {
        while rig.plan() {
            for entry in &rig.plan.sequences {
                assert!(!entry.masked || entry.drafts.is_empty(), "{entry:?}");
                let drafted = if entry.start > 104 { &mut behind } else { &mut within };
                *drafted += entry.drafts.len();
            }
        }
        if !rig.deliver() {
            break;
        }
    }
    let tokens = &rig.requests[&id].1.tokens[0];
    assert!(tokens.len() == 200 && tokens[100] == close, "{tokens:?}");
    assert!(within > 50 && behind > 50, "{within} and {behind} drafts");
}
