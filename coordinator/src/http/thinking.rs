//! vLLM's `thinking_token_budget`: how many tokens a model may reason before it answers.
use shared::protocol::ThinkingBudget;

use super::error::ApiError;
use super::fields::Fields;
use super::params::Common;
use super::state::AppState;
use crate::text::reply::{Reasoning, ReplyRules};

/// The field.
pub const FIELD: &str = "thinking_token_budget";

/// A bound on the reasoning of a request's choices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Thinking {
    budget: ThinkingBudget,
    /// Whether its prompts open reasoning; `None` if their tokens tell.
    begins: Option<bool>,
}

impl Thinking {
    /// Reads the field; `None` without a bound, which is also what -1 says.
    ///
    /// # Errors
    /// 400, if it is no such number, if this server's model has no token that ends its reasoning,
    /// or if that may not come yet.
    pub fn read(
        state: &AppState,
        fields: &Fields,
        common: &Common,
    ) -> Result<Option<Self>, ApiError> {
        let tokens = fields.integer(FIELD, -1, i64::from(u32::MAX))?;
        let Some(tokens) = tokens.and_then(|tokens| u32::try_from(tokens).ok()) else {
            return Ok(None);
        };
        let thinking = Self::of(state, tokens).ok_or_else(|| {
            let why = match (state.reasoning, state.reasoning.marks()) {
                (_, Some(marks)) => format!("the vocabulary has no token `{}`", marks.close),
                (Reasoning::Harmony, None) => "that of harmony ends otherwise".to_owned(),
                (_, None) => "this server knows of none (its operator would say \
                              --reasoning-parser)"
                    .to_owned(),
            };
            let message =
                format!("`{FIELD}` needs reasoning that ends with a token of its own: {why}");
            ApiError::field(FIELD, message)
        })?;
        let close = thinking.budget.closes.first();
        if close.is_some_and(|close| common.sampling.suppress_until_min.contains(close)) {
            let message = format!(
                "`min_tokens` and `{FIELD}` cannot be combined where `stop_token_ids` names the \
                 token that ends reasoning"
            );
            return Err(ApiError::field("min_tokens", message));
        }
        Ok(Some(thinking))
    }

    /// A bound of so many tokens; `None` if no token ends the model's reasoning.
    pub fn of(state: &AppState, tokens: u32) -> Option<Self> {
        let marks = state.reasoning.marks()?;
        let close = state.text.token_with(marks.close)?;
        let open = state.text.token_with(marks.open);
        let budget = ThinkingBudget { tokens, open, closes: vec![close], is_open: false };
        Some(Self { budget, begins: None })
    }

    /// For a conversation whose answer is read by these rules; `None` if they tell no reasoning.
    pub fn in_reply(mut self, state: &AppState, rules: &ReplyRules) -> Option<Self> {
        rules.reasoning?;
        let ends = rules.calls_that_end_reasoning().iter();
        self.budget.closes.extend(ends.filter_map(|mark| state.text.token_with(mark)));
        self.begins = Some(rules.begins_reasoning);
        Some(self)
    }

    /// The bound for answers to this prompt.
    pub fn behind(&self, prompt: &[u32]) -> ThinkingBudget {
        let ThinkingBudget { open, closes, .. } = &self.budget;
        let is_mark = |token: &&u32| Some(**token) == *open || closes.contains(token);
        let opens = || prompt.iter().rev().find(is_mark).is_some_and(|it| Some(*it) == *open);
        ThinkingBudget { is_open: self.begins.unwrap_or_else(opens), ..self.budget.clone() }
    }
}
