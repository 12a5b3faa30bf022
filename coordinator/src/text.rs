//! Everything that knows text: workers and schedulers see tokens only.
//!
//! - [`model`]: what a model folder says about text: tokenizer, template, end tokens, defaults
//! - [`bound`]: how many bytes of text one token can stand for
//! - [`dialect`]: which bytes of text each token stands for
//! - [`reply`]: what a reply says: reasoning, answer, calls of tools (pure)
//! - [`detokenizer`]: tokens to text as they come, never half a character
//! - [`stop`]: stop strings across token boundaries
//! - [`stream`]: the two together: one choice's text, with its end
//! - [`template`]: chat messages to a prompt
pub mod bound;
pub mod detokenizer;
pub mod dialect;
pub mod model;
pub mod reply;
#[cfg(test)]
pub(crate) mod samples;
pub mod stop;
pub mod stream;
pub mod template;
