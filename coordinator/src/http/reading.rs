//! A reply as it is read: its pieces of text as parts, and how much of it is reasoning.
use std::sync::Arc;

use super::generation::{Piece, StopReason};
use crate::text::reply::{Part, ReplyReader, ReplyRules};

/// Reads one reply.
#[derive(Clone, Debug)]
pub struct Reading {
    /// Where something is looked for in the reply.
    reader: Option<ReplyReader>,
    /// What it finds of reasoning is shown.
    shows_reasoning: bool,
    reasoning_tokens: u64,
}

/// What a piece said.
#[derive(Debug, Default)]
pub struct Said {
    /// Its parts, those that are not shown too.
    pub parts: Vec<Part>,
    /// Some of it was reasoning, or reasoning goes on behind it.
    pub reasons: bool,
    /// The reply ends within a call, which a `stop` string has cut.
    pub cuts_call: bool,
}

impl Reading {
    /// At the beginning of a reply in which this is looked for.
    #[must_use]
    pub fn new(rules: ReplyRules, shows_reasoning: bool) -> Self {
        let reader = rules.reads().then(|| ReplyReader::new(Arc::new(rules)));
        Self { reader, shows_reasoning, reasoning_tokens: 0 }
    }

    /// Takes the next piece.
    pub fn take(&mut self, piece: &Piece) -> Said {
        let mut said = Said::default();
        match &mut self.reader {
            None if piece.text.is_empty() => {}
            None => said.parts.push(Part::Content(piece.text.clone())),
            Some(reader) => {
                let reasoned = reader.reasons();
                reader.push(&piece.text, &mut said.parts);
                if piece.finish_reason.is_some() {
                    let is_cut = matches!(piece.stop_reason, Some(StopReason::Text(_)));
                    said.cuts_call = is_cut && reader.is_within_call();
                    reader.finish(&mut said.parts);
                }
                let found = said.parts.iter().any(|part| matches!(part, Part::Reasoning(_)));
                said.reasons = reasoned || reader.reasons() || found;
            }
        }
        self.reasoning_tokens += u64::from(said.reasons && piece.token.is_some());
        said
    }

    /// Whether the client is told of a part.
    #[must_use]
    pub fn shows(&self, part: &Part) -> bool {
        self.shows_reasoning || !matches!(part, Part::Reasoning(_))
    }

    /// Tokens of reasoning so far.
    #[must_use]
    pub fn reasoning_tokens(&self) -> u64 {
        self.reasoning_tokens
    }
}
