//! All code that handles text; workers and schedulers see only tokens.
//!
//! - [`model`]: the text side of a model folder: tokenizer, chat template, end tokens, defaults
//! - [`bound`]: the most bytes of text that one token can stand for
//! - [`dialect`]: which bytes of text each token stands for
//! - [`reply`]: PURE: parses a reply into reasoning, answer and tool calls
//! - [`detokenizer`]: incremental detokenization, never half a character
//! - [`stop`]: stop strings across token boundaries
//! - [`stream`]: detokenizer and stop strings together: one choice's text and its end
//! - [`template`]: chat messages to a prompt
//! - `date`: dates in UTC, for templates and headers
//! - `samples`: small tokenizers for tests
pub mod bound;
pub(crate) mod date;
pub mod detokenizer;
pub mod dialect;
pub mod model;
pub mod reply;
#[cfg(test)]
pub(crate) mod samples;
pub mod stop;
pub mod stream;
pub mod template;
