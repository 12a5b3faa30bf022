//! Turns a front end's request into the engine's.

use std::sync::Arc;
use std::time::Duration;

use shared::ids::RequestId;
use shared::protocol::{AcceptedChoice, SubmitRequest};
use shared::sampling::SUPPRESSED_MAX;

use super::Frontends;
use crate::adapters::AdapterUse;
use crate::engine::{GenerateRequest, Resumed, ResumedChoice, StopCheck};
use crate::text::stream::StopRules;

/// Longest response id, in bytes.
const RESPONSE_ID_MAX: usize = 256;

impl Frontends {
    /// The adapter of a request. The front end may not know yet that its name means another one
    /// now, which a request without accepted tokens gets.
    pub(super) fn adapter_of(&self, submit: &SubmitRequest) -> Option<AdapterUse> {
        let (number, name) = (submit.adapter, submit.adapter_name.as_str());
        let found = self.adapters.numbered(number, name);
        found.or_else(|| self.adapters.find(name).filter(|_| submit.accepted.is_empty()))
    }

    /// Turns a front end's request into the engine's. The front end has already validated it for
    /// its client; the checks here only keep a broken front end from harming the engine.
    pub(super) fn request(
        &self,
        id: RequestId,
        submit: SubmitRequest,
        adapter: AdapterUse,
    ) -> Result<GenerateRequest, String> {
        let max = self.serving.max_model_len;
        let vocab = self.text.vocab_size;
        if submit.prompt.is_empty() || submit.prompt.len() > max as usize {
            return Err(format!("a prompt of {} tokens; 1 to {max} fit", submit.prompt.len()));
        }
        let tokens = submit.prompt.iter().chain(&submit.end_tokens);
        if let Some(token) = tokens.copied().find(|token| *token >= vocab) {
            return Err(format!("token {token} is not below the vocabulary's {vocab}"));
        }
        let choices = self.limits.n;
        if submit.n == 0 || submit.n > choices || submit.max_tokens > max {
            return Err(format!(
                "n {} of 1 to {choices}, max_tokens {} of 0 to {max}",
                submit.n, submit.max_tokens
            ));
        }
        let (stops, stop_bytes) = (self.limits.stops, self.limits.stop_bytes);
        if submit.stops.len() > stops {
            return Err(format!("{} stop strings, at most {stops}", submit.stops.len()));
        }
        let fits = |stop: &&String| !(1..=stop_bytes).contains(&stop.len());
        if let Some(stop) = submit.stops.iter().find(fits) {
            return Err(format!("a stop string of {} bytes, 1 to {stop_bytes} fit", stop.len()));
        }
        if submit.end_tokens.len() > SUPPRESSED_MAX {
            let count = submit.end_tokens.len();
            return Err(format!("{count} end tokens, at most {SUPPRESSED_MAX}"));
        }
        if submit.response_id.len() > RESPONSE_ID_MAX {
            let len = submit.response_id.len();
            return Err(format!("a response id of {len} bytes, at most {RESPONSE_ID_MAX}"));
        }
        if let Some(spec) = &submit.guide {
            spec.check().map_err(|error| format!("the output's constraint {error}"))?;
        }
        if let Some(budget) = &submit.thinking {
            budget.check(vocab).map_err(|error| format!("the bound on reasoning {error}"))?;
        }
        if let Some(words) = &submit.bad_words {
            words.check(vocab).map_err(|error| format!("the bad words {error}"))?;
        }
        submit.sampling.check(vocab)?;
        let (n, max_tokens) = (submit.n, submit.max_tokens);
        if submit.sampling.pooling.is_some() && (n, max_tokens) != (1, 0) {
            return Err(format!(
                "an embedding with n {n} and max_tokens {max_tokens}, not 1 and 0"
            ));
        }
        if submit.sampling.pooling.is_some() && submit.sampling.prompt_logprobs.is_some() {
            return Err(
                "an embedding with prompt_logprobs: a prompt has one or the other".to_owned()
            );
        }
        check_accepted(&submit, vocab, max)?;
        let waited = Duration::from_micros(submit.waited_us);
        let stop_checks = self.stop_checks(&submit);
        let resumed =
            resumed(submit.accepted).or_else(|| submit.again.then(|| unanswered(submit.n)));
        let over = resumed.iter().flat_map(|resumed| &resumed.over);
        let over: Vec<u32> = over.map(|(choice, _)| *choice).collect();
        let sampling = submit.sampling;
        Ok(GenerateRequest {
            id,
            prompt: submit.prompt,
            sampling: (0..submit.n)
                .filter(|choice| !over.contains(choice))
                .map(|choice| shared::sampling::SamplingParams { choice, ..sampling.clone() })
                .collect(),
            stop_checks,
            guides: Vec::new(),
            guide_spec: submit.guide.map(Arc::new),
            thinking: submit.thinking.map(Arc::new),
            bad_words: submit.bad_words.map(Arc::new),
            max_tokens: submit.max_tokens,
            open_ended: submit.open_ended,
            // A front end may not know yet that the coordinator no longer uses priorities.
            priority: if self.serving.priorities { submit.priority } else { 0 },
            cache_salt: submit.cache_salt,
            adapter,
            end_tokens: submit.end_tokens,
            stops: submit.stops.into(),
            keep_special: submit.keep_special,
            goes_on: submit.goes_on,
            arrived: self.clock.now().saturating_sub(waited),
            response_id: submit.response_id.into(),
            traced: submit.traced,
            resumed,
        })
    }

    fn stop_checks(&self, submit: &SubmitRequest) -> Vec<Box<dyn StopCheck>> {
        if submit.stops.is_empty() {
            return Vec::new();
        }
        let rules = Arc::new(StopRules {
            stops: submit.stops.clone(),
            end_tokens: submit.end_tokens.clone(),
            min_tokens: submit.sampling.min_tokens,
            // Only the front end decides which part of the last tokens belongs to the text.
            include_stop: false,
            shown: Vec::new(),
            keep_special: submit.keep_special,
            // The fences around special tokens exist only inside a front end.
            fenced: None,
        });
        let stream = self.text.stream(rules, submit.goes_on.then_some(&submit.prompt));
        (0..submit.choices_left()).map(|_| Box::new(stream.clone()) as Box<dyn StopCheck>).collect()
    }
}

/// Checks what was accepted of a request before.
fn check_accepted(submit: &SubmitRequest, vocab: u32, max_model_len: u32) -> Result<(), String> {
    let SubmitRequest { accepted, n, max_tokens, .. } = submit;
    if accepted.is_empty() {
        return Ok(());
    }
    if submit.sampling.pooling.is_some() {
        return Err("an embedding with accepted tokens".to_owned());
    }
    if accepted.len() != *n as usize || submit.choices_left() == 0 {
        let (count, left) = (accepted.len(), submit.choices_left());
        return Err(format!("accepted tokens of {count} choices of {n}, of which {left} go on"));
    }
    for choice in accepted {
        let tokens = match choice {
            AcceptedChoice::GoesOn(tokens) => tokens.len(),
            AcceptedChoice::Over { tokens } => *tokens as usize,
        };
        let room = (max_model_len as usize).saturating_sub(submit.prompt.len());
        let most = room.min(*max_tokens as usize);
        if tokens > most {
            return Err(format!("{tokens} accepted tokens of a choice, at most {most}"));
        }
        if let AcceptedChoice::GoesOn(tokens) = choice
            && let Some(token) = tokens.iter().find(|token| **token >= vocab)
        {
            return Err(format!("accepted token {token} is not below the vocabulary's {vocab}"));
        }
    }
    Ok(())
}

/// What was accepted of a request that a lost coordinator let in and of which nothing came: no
/// token of any choice.
fn unanswered(choices: u32) -> Box<Resumed> {
    let choices = (0..choices).map(|_| ResumedChoice::default()).collect();
    Box::new(Resumed { choices, over: Vec::new() })
}

/// Collects what was accepted before, if anything. How it completes choices is found out later.
fn resumed(accepted: Vec<AcceptedChoice>) -> Option<Box<Resumed>> {
    if accepted.is_empty() {
        return None;
    }
    let mut resumed = Box::<Resumed>::default();
    for (choice, accepted) in (0..).zip(accepted) {
        match accepted {
            AcceptedChoice::GoesOn(tokens) => {
                resumed.choices.push(ResumedChoice { tokens, end: None });
            }
            AcceptedChoice::Over { tokens } => resumed.over.push((choice, tokens)),
        }
    }
    Some(resumed)
}
