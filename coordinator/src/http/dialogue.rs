//! A conversation's request, from its fields to a running one: what `/v1/chat/completions`,
//! `/v1/responses` and `/v1/messages` have in common.
use std::sync::Arc;

use shared::metrics::labels::RejectReason;

use super::bad_words::Words;
use super::classes;
use super::conversation;
use super::error::ApiError;
use super::generation::RunningPrompt;
use super::message::CallIds;
use super::params::{Common, Fields};
use super::state::AppState;
use super::thinking::Thinking;
use super::tools::{Begins, Tools, Wanted};
use crate::guide::GrammarError;
use crate::text::model::TextModel;
use crate::text::reply::{Harmony, Reasoning, ReplyRules};

/// The API that answers; the fields have chat's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/responses`: its output limit is only an upper bound, so it may exceed what the model's
    /// length leaves.
    Responses,
    /// `/v1/messages`: so it is there.
    Messages,
}

impl Form {
    /// What the id of an answer begins with.
    fn prefix(self) -> &'static str {
        match self {
            Self::Chat => "chatcmpl-",
            Self::Responses => "resp_",
            Self::Messages => "msg_",
        }
    }
}

/// A running request.
#[derive(Debug)]
pub struct Started {
    /// Its common parameters.
    pub common: Common,
    /// Its text as it arrives.
    pub running: RunningPrompt,
    /// What is looked for in the text.
    pub rules: ReplyRules,
    /// Whether reasoning that is found is shown.
    pub shows_reasoning: bool,
    /// Whether tool calls are a finish reason.
    pub told: bool,
    /// The ids of its calls.
    pub ids: CallIds,
    /// The id of its answer.
    pub id: Arc<str>,
    /// The ids of its prompt's tokens, if the client wants them.
    pub prompt: Option<Vec<u32>>,
}

/// Validates a request and hands it to the engine.
///
/// # Errors
/// Everything a client can do wrong, and the engine's refusals.
pub async fn start(state: &AppState, fields: Fields, form: Form) -> Result<Started, ApiError> {
    let arrived = state.clock.now();
    let limits = &state.limits;
    let mut common = Common::read(&fields, limits, &state.text, &state.models)?;
    classes::check_generates(&state.text)?;
    let logprobs = fields.boolean("logprobs", false)?;
    let top = fields.count("top_logprobs", 0, limits.top_logprobs)?;
    if top.is_some_and(|top| top > 0) && !logprobs {
        return Err(ApiError::field("top_logprobs", "`top_logprobs` needs `logprobs`: true"));
    }
    common.sampling.logprobs = logprobs.then_some(top.unwrap_or(0));
    let prompt_logprobs = common.tokens.prompt_logprobs;
    common.sampling.prompt_logprobs = prompt_logprobs;
    // Exceeding the model's length has an error code of its own, which clients act on.
    let max_tokens = fields.count("max_tokens", 1, u32::MAX)?;
    let max_completion_tokens = fields.count("max_completion_tokens", 1, u32::MAX)?;
    common.max_tokens = max_completion_tokens.or(max_tokens);
    common.is_capped = form != Form::Chat;
    common.prompt_field = "messages";
    common.output_field = match (max_completion_tokens, max_tokens) {
        _ if common.is_capped => None,
        (Some(_), _) => Some("max_completion_tokens"),
        (None, max) => max.map(|_| "max_tokens"),
    };
    common.check_least()?;
    let template = state.text.template.as_ref().ok_or_else(conversation::no_template)?;
    let bad_words = Words::read(&fields, limits, &common)?;
    let tools = Tools::read(&fields, limits)?;
    let mut rules = tools.rules(state.tool_calls)?;
    let wanted = tools.wanted(&fields, common.asked.take(), state.tool_calls)?;
    // A grammar may hold calls to another format than the model's own.
    if let Some(wanted) = wanted.as_ref().filter(|wanted| !wanted.is_tagged()) {
        rules.calls = wanted.calls();
    }
    let is_called = wanted.as_ref().is_some_and(|wanted| wanted.calls().is_some());
    let conversation = conversation::read(&fields, limits, template, tools.told())?;
    common.goes_on = conversation.continue_final_message;
    let thinking = Thinking::read(state, &fields, &common)?;
    let shows_reasoning = fields.boolean("include_reasoning", true)?;
    let special = fields.boolean("add_special_tokens", false)?;
    let id: Arc<str> = fields.response_id(form.prefix(), limits)?.into();
    let (bytes, share, fit) = (fields.bytes(), fields.share(), common.fit(limits));
    // The fields may be much larger than what is kept of them.
    drop(fields);
    let lets_reason = wanted.as_ref().is_none_or(Wanted::lets_reason);
    let is_harmony = state.reasoning == Reasoning::Harmony;
    let reasoning = if lets_reason || is_harmony { state.reasoning } else { Reasoning::Untold };
    rules.reasoning = reasoning.marks();
    let encode = move |text: &TextModel| {
        let _share = share;
        let rendered =
            conversation::encode(text, &conversation, special, fit, reasoning, !lets_reason)?;
        let begins = match (&rendered.opening, reasoning.marks()) {
            (Some(opening), _) if lets_reason => Begins::Message(opening.clone()),
            (Some(_), _) | (None, None) => Begins::Plain,
            (None, Some(marks)) => Begins::Reasoned(marks, rendered.begins_reasoning),
        };
        let token = |mark: &str| text.special_token(mark);
        let asked = wanted.map(|wanted| wanted.made(&begins, &token)).transpose()?;
        let bad_words = bad_words.map(|words| words.tokens(text)).transpose()?;
        Ok((rendered, asked, bad_words))
    };
    let deadline = common.deadline;
    let (rendered, asked, bad_words) =
        state.in_time(deadline, state.with_text(bytes, encode)).await?;
    common.bad_words = bad_words;
    rules.begins_reasoning = rendered.begins_reasoning;
    common.thinking = thinking.and_then(|thinking| thinking.in_reply(state, &rules));
    let marks =
        |rules: &ReplyRules| rules.marks().any(|mark| state.text.special_token(mark).is_some());
    rules.harmony = rendered.opening.map(|opening| Harmony { fenced: false, opening });
    if let Some(harmony) = &mut rules.harmony {
        common.fences = harmony.is_fenced(&|mark| state.text.special_token(mark));
        harmony.fenced = common.fences;
    }
    common.asked = asked;
    let tools_of_calls = is_called.then_some(&tools);
    state.in_time(deadline, make_guide(state, &mut common, tools_of_calls)).await?;
    // A mark that is a special token must not be left out of the text.
    common.keep_special |= marks(&rules);
    let mut tokens = rendered.tokens;
    if tokens.is_empty() {
        return Err(ApiError::field("messages", "`messages` give an empty prompt"));
    }
    common.truncate(&mut tokens, limits);
    if common.is_capped {
        common.cap_output(tokens.len(), limits);
    }
    let max_tokens = common.output_tokens("messages", tokens.len(), limits)?;
    limits.check_prompts(tokens.len() * common.n as usize)?;
    // They are told once, for all choices.
    limits.check_alternatives("prompt_logprobs", tokens.len(), prompt_logprobs)?;
    // The last events of a response's stream repeat them all.
    if !common.stream || form == Form::Responses {
        let field = if top.is_some_and(|top| top > 0) { "top_logprobs" } else { "logprobs" };
        // Who does not say how long it may become rarely means as long as the model's length.
        let open = max_tokens.min(limits.reserved_output());
        let most = common.max_tokens.map_or(open, |_| max_tokens) as usize;
        let most = most.saturating_mul(common.n as usize);
        limits.check_output_alternatives(field, most, common.sampling.logprobs)?;
    }
    let prompt = common.tokens.ids.then(|| tokens.clone());
    let running = RunningPrompt::start(state, &common, tokens, max_tokens, arrived, &id)?;
    let ids = CallIds { drawn: state.draw_seed(state.next_request()) };
    let told = tools.finish_with_calls();
    Ok(Started { common, running, rules, shows_reasoning, told, ids, id, prompt })
}

/// Compiles the constraint; an error in a function's schema names the function.
async fn make_guide(
    state: &AppState,
    common: &mut Common,
    tools: Option<&Tools>,
) -> Result<(), ApiError> {
    let made = state.make_guide(common).await;
    if !made.as_ref().is_err_and(|error| error.reason() == Some(RejectReason::Invalid)) {
        return made;
    }
    for (name, spec) in tools.map(Tools::arguments).unwrap_or_default() {
        let alone = state.text.grammars.compile(&state.text, &spec).await;
        if let Err(GrammarError::Refused(why)) = alone {
            let message = format!("`tools`: the parameters of the function {name:?}: {why}");
            return Err(ApiError::field("tools", message));
        }
    }
    made
}
