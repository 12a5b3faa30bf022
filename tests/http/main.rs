//! The API with a scripted engine: shapes, bounds, streams, disconnects. No model runs: the engine
//! returns scripted tokens.
//!
//! - [`rig`]: a real server on a free port, with a scripted engine behind it
//! - [`shapes`]: the JSON of every answer
//! - [`bounds`]: every bad request gets a 4xx that names the field
//! - `classes`: `/classify` and `/pooling`, and what a model with classes does instead of others
//! - [`embeddings`]: `/v1/embeddings`, its vectors and bounds
//! - [`fields`]: no field that would change the answer is ignored
//! - [`agents`]: what agents send: groups of tools, pictures that tools found, many instructions
//! - [`contract`]: every answer is what `/openapi.json` says
//! - [`conversations`]: the input that chat templates get from a request
//! - [`harmony`]: the format of gpt-oss, in which replies are messages
//! - [`messages`]: `/v1/messages`, its blocks, events and errors
//! - [`responses`]: `/v1/responses`, its items and events
//! - [`openapi`]: `/openapi.json`, its routes and bounds
//! - [`options`]: API keys, origins, operators' limits
//! - [`overload`]: limits per key and address, time limits of requests
//! - [`root_path`]: the API under a proxy's path
//! - `scrapes`: scrapers of `/metrics` that do not read
//! - [`scores`]: `/rerank` and `/score`
//! - [`structured`]: structured output fields
//! - [`thinking`]: bounds on reasoning
//! - [`bad_words`]: words that must not be generated
//! - [`tls`]: HTTPS, with curl
//! - [`token_ids`]: tokens by their ids, log-probabilities of prompts
//! - [`tokens`]: `/tokenize`, `/detokenize` and `/tokenizer_info`
//! - [`tools`]: tool calls and reasoning, parsed from the text
//! - [`streams`]: Server-Sent Events, stop strings, failures, disconnects
//! - [`traces`]: spans of requests, and collectors that are slow or away
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests panic")]

mod agents;
mod bad_words;
mod bounds;
mod classes;
mod contract;
mod conversations;
mod embeddings;
mod fields;
mod harmony;
mod messages;
mod openapi;
mod options;
mod overload;
mod responses;
mod rig;
mod root_path;
mod scores;
mod scrapes;
mod shapes;
mod streams;
mod structured;
mod thinking;
mod tls;
mod token_ids;
mod tokens;
mod tools;
mod traces;
