//! PURE: replays what a lost engine accepted of a request to its stop checks and guides.
//!
//! If the last accepted token completes a choice, only the report of its end was lost: the choice
//! ends at once, for its original reason.
use crate::engine::{EngineError, FinishReason, GenerateRequest, GuideEnd, StopCheck, TokenGuide};
use crate::scheduler::end_of;

/// Replays to the stop checks and guides of a resumed request what was accepted, and notes which
/// choices that completes. `guides` has one entry for each choice that is not over, or none; they
/// become the request's. Changes nothing for a request that is not resumed.
///
/// # Errors
/// Why the request cannot continue.
pub(super) fn resume(
    request: &mut GenerateRequest,
    mut guides: Vec<Box<dyn TokenGuide>>,
    max_model_len: u32,
) -> Result<(), EngineError> {
    let GenerateRequest { prompt, sampling, stop_checks, end_tokens, max_tokens, resumed, .. } =
        request;
    let choices = resumed.iter_mut().flat_map(|resumed| &mut resumed.choices);
    for (at, (choice, sampling)) in choices.zip(sampling).enumerate() {
        let most =
            (*max_tokens as usize).min((max_model_len as usize).saturating_sub(prompt.len()));
        let rules = EndRules { end_tokens, min_tokens: sampling.min_tokens as usize, most };
        choice.end = rules.end(&choice.tokens, stop_checks.get_mut(at), guides.get_mut(at))?;
    }
    request.guides = guides;
    Ok(())
}

/// What ends a choice.
struct EndRules<'a> {
    end_tokens: &'a [u32],
    min_tokens: usize,
    /// Maximum number of tokens.
    most: usize,
}

impl EndRules<'_> {
    /// Returns how these tokens end their choice, if they do.
    fn end(
        &self,
        tokens: &[u32],
        mut check: Option<&mut Box<dyn StopCheck>>,
        mut guide: Option<&mut Box<dyn TokenGuide>>,
    ) -> Result<Option<FinishReason>, EngineError> {
        for (before, token) in tokens.iter().copied().enumerate() {
            let count = before + 1;
            let may_end = count >= self.min_tokens;
            let is_end = may_end && self.end_tokens.contains(&token);
            let stops = check.as_mut().is_some_and(|check| check.push(token)) && may_end;
            let guided = || guide.as_mut().map(|guide| guide.follow(token));
            let end = end_of(token, is_end, stops, guided, count >= self.most);
            match end.map_err(|end: GuideEnd| EngineError::from(end))? {
                Some(_) if count < tokens.len() => {
                    let more = tokens.len() - count;
                    let message = format!("{more} tokens were accepted after a choice's end");
                    return Err(EngineError::Broke { message });
                }
                Some(reason) => return Ok(Some(reason)),
                None => {}
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use shared::ids::RequestId;
    use shared::sampling::SamplingParams;

    use super::*;
    use crate::engine::{Resumed, ResumedChoice};

    /// Stops at the tokens 7, 8.
    #[derive(Debug, Default)]
    struct SevenEight(Vec<u32>);

    impl StopCheck for SevenEight {
        fn push(&mut self, token: u32) -> bool {
            self.0.push(token);
            self.0.ends_with(&[7, 8])
        }
    }

    fn resumed(tokens: &[u32], min_tokens: u32) -> Result<Option<FinishReason>, EngineError> {
        let sampling = SamplingParams { choice: 1, min_tokens, ..SamplingParams::greedy() };
        let mut request = GenerateRequest::new(RequestId(1), vec![1; 10], vec![sampling], 6);
        request.end_tokens = vec![9];
        request.stop_checks = vec![Box::<SevenEight>::default()];
        let choice = ResumedChoice { tokens: tokens.to_vec(), end: None };
        request.resumed = Some(Box::new(Resumed { choices: vec![choice], over: vec![(0, 3)] }));
        resume(&mut request, Vec::new(), 15)?;
        Ok(request.resumed.unwrap().choices[0].end)
    }

    #[test]
    fn a_choice_whose_end_was_lost_has_the_end_that_it_had() {
        assert_eq!(resumed(&[], 0), Ok(None));
        assert_eq!(resumed(&[2, 7], 0), Ok(None), "the stop string has only begun");
        assert_eq!(resumed(&[2, 7, 8], 0), Ok(Some(FinishReason::StopString)));
        assert_eq!(resumed(&[2, 9], 0), Ok(Some(FinishReason::EndToken(9))));
        assert_eq!(resumed(&[2, 9], 3), Ok(None), "nothing ends it before its third token");
        assert_eq!(resumed(&[7, 8, 2], 3), Ok(None), "nor does a stop string");
        assert_eq!(resumed(&[2, 2, 9], 3), Ok(Some(FinishReason::EndToken(9))));
        assert_eq!(resumed(&[2; 4], 0), Ok(None));
        assert_eq!(resumed(&[2; 5], 0), Ok(Some(FinishReason::Length)), "of 15 tokens in all");
        let behind = resumed(&[9, 2], 0);
        assert!(
            matches!(&behind, Err(EngineError::Broke { message }) if message.contains("1 tok"))
        );
    }
}
