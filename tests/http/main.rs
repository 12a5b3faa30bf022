//! The API against a scripted engine: shapes, bounds, streams, disconnects. No model is computed:
//! the engine gives the tokens it is told to.
//!
//! - [`rig`]: a real server on a free port, with a scripted engine behind it
//! - [`shapes`]: the JSON of every answer
//! - [`bounds`]: every bad request gets a 4xx that names the field
//! - [`embeddings`]: `/v1/embeddings`, its vectors and bounds
//! - [`fields`]: no field is ignored that would change the answer
//! - [`conversations`]: what templates are given of a chat request
//! - [`harmony`]: gpt-oss' format, in which replies are messages
//! - [`responses`]: `/v1/responses`, its items and events
//! - [`options`]: API keys, origins, limits that an operator chooses
//! - [`overload`]: limits of keys and addresses, the time that requests are given
//! - [`structured`]: fields that say what the output must be
//! - [`tls`]: HTTPS, with curl
//! - [`tokens`]: `/tokenize` and `/detokenize`
//! - [`tools`]: calls of tools and reasoning, told from the text
//! - [`streams`]: Server-Sent Events, stop strings, failures, disconnects
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests panic")]

mod bounds;
mod conversations;
mod embeddings;
mod fields;
mod harmony;
mod options;
mod overload;
mod responses;
mod rig;
mod shapes;
mod streams;
mod structured;
mod tls;
mod tokens;
mod tools;
