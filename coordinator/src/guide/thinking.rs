//! PURE: a guide that bounds how much a model reasons. Where the answer is also bound to a grammar,
//! it follows that too.
use std::sync::Arc;
use std::task::{Context, Poll};

use shared::protocol::{ThinkingBudget, TokenMask};

use super::Guide;
use super::grammar::not_allowed;
use crate::engine::{GuideEnd, Guided, TokenGuide};

/// Reasoning that the prompt has not opened is opened by one of so many first tokens, or there is
/// none: only white space comes before, and a mark further on is part of the answer.
const OPENING_MAX: u32 = 4;

/// One sequence's place in its reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// It has not begun; so many tokens were taken.
    Before(u32),
    /// The prompt has opened it and no token was taken. Some models open it again.
    Opened,
    /// So many tokens of it were taken.
    Within(u32),
    /// There is none, or it is over: it does not begin again.
    Behind,
}

/// Ends the reasoning of one sequence when its budget is spent: the token that ends it is then the
/// only one that may come next, unless a grammar does not let it come yet.
#[derive(Debug)]
pub struct ThinkingGuide {
    budget: Arc<ThinkingBudget>,
    place: Place,
    grammar: Option<Guide>,
    /// The mask of a budget that is spent.
    end: TokenMask,
    /// The mask of all tokens.
    any: TokenMask,
}

impl ThinkingGuide {
    /// A guide before its first token. `budget` has passed [`ThinkingBudget::check`].
    #[must_use]
    pub fn new(budget: Arc<ThinkingBudget>, grammar: Option<Guide>) -> Self {
        let place = if budget.is_open { Place::Opened } else { Place::Before(0) };
        let end = TokenMask::Only(budget.closes.iter().copied().take(1).collect());
        Self { budget, place, grammar, end, any: TokenMask::Except(Vec::new()) }
    }

    fn is_spent(&self) -> bool {
        self.taken().is_some_and(|taken| taken >= self.budget.tokens)
    }

    /// Tokens of reasoning so far, while it goes on.
    fn taken(&self) -> Option<u32> {
        match self.place {
            Place::Opened => Some(0),
            Place::Within(taken) => Some(taken),
            Place::Before(_) | Place::Behind => None,
        }
    }

    fn take(&mut self, token: u32) {
        let (opens, closes) =
            (self.budget.open == Some(token), self.budget.closes.contains(&token));
        self.place = match self.place {
            Place::Before(_) | Place::Opened if opens => Place::Within(0),
            Place::Before(before) if before + 1 < OPENING_MAX => Place::Before(before + 1),
            Place::Before(_) | Place::Behind => Place::Behind,
            Place::Opened | Place::Within(_) if closes => Place::Behind,
            Place::Opened => Place::Within(1),
            Place::Within(taken) => Place::Within(taken.saturating_add(1)),
        };
    }
}

impl TokenGuide for ThinkingGuide {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), GuideEnd>> {
        self.grammar.as_mut().map_or(Poll::Ready(Ok(())), |grammar| grammar.poll(context))
    }

    fn allowed(&self) -> Option<&TokenMask> {
        let allowed = match &self.grammar {
            Some(grammar) => grammar.allowed()?,
            None => &self.any,
        };
        let may_end = || self.budget.closes.first().is_some_and(|token| allowed.allows(*token));
        Some(if self.is_spent() && may_end() { &self.end } else { allowed })
    }

    fn leaves_open(&self, ahead: u32) -> bool {
        let is_within = match self.place {
            // The first token may open it.
            Place::Before(_) => {
                let taken = ahead.checked_sub(1).filter(|_| self.budget.open.is_some());
                taken.is_none_or(|taken| taken < self.budget.tokens)
            }
            Place::Opened | Place::Within(_) => {
                let taken = self.taken().unwrap_or_default();
                taken.saturating_add(ahead) < self.budget.tokens
            }
            Place::Behind => true,
        };
        self.grammar.is_none() && is_within
    }

    fn mask_bytes_max(&self) -> usize {
        let own = self.end.weight().max(self.any.weight());
        self.grammar.as_ref().map_or(own, |grammar| grammar.mask_bytes_max().max(own))
    }

    fn accept(&mut self, token: u32) -> Result<Guided, GuideEnd> {
        if !self.allowed().is_some_and(|allowed| allowed.allows(token)) {
            return Err(not_allowed(token));
        }
        self.take(token);
        self.grammar.as_mut().map_or(Ok(Guided::GoesOn), |grammar| grammar.accept(token))
    }

    fn follow(&mut self, token: u32) -> Result<Guided, GuideEnd> {
        self.take(token);
        self.grammar.as_mut().map_or(Ok(Guided::GoesOn), |grammar| grammar.follow(token))
    }
}
