//! The HTTP front end: OpenAI's API, Anthropic's messages, health, metrics.
//!
//! - [`server`]: connection limits, start and stop
//! - [`routes`]: every path and what answers it
//! - `intake`: the way of a request with a body, from the gate to its answer
//! - `traffic`: counts of all requests
//! - [`state`]: what handlers share
//! - [`fields`]: reads the fields of a request body one by one
//! - [`limits`]: every bound of a request
//! - [`params`]: parameters common to completions and chat
//! - [`token_fields`]: what a request wants to know of tokens
//! - [`terms`]: what applies to a request besides its body: its deadline and its owner
//! - [`conversation`]: the part of a chat request that its template is given
//! - [`refused`]: fields that would change the answer and are not supported
//! - [`structured`]: constraints on the output, `structural_tag` on parts of it;
//!   [`thinking`]: a bound on reasoning; [`bad_words`]: words that must not come
//! - [`completions`], [`chat`], [`responses`], [`embeddings`], [`models`]: OpenAI's endpoints
//! - `invocations`: several of these at the one path that SageMaker knows
//! - `classes`: sorts texts into classes
//! - `pooling`: what a model makes of texts
//! - `scores`: how well texts go together: reranking
//! - `vectors`: computes a vector for each of several texts, or of the `pairs` of them
//! - [`messages`]: the endpoints of Anthropic's API
//! - `turns`: turns of another API as chat's messages
//! - [`dialogue`]: turns the fields of a conversation's request into a running one
//! - [`message`], [`tools`]: a choice's message; tools and tool calls
//! - [`reading`]: a reply's text as reasoning, answer and calls
//! - [`generation`]: a running request as a sequence of text pieces
//! - [`envelope`]: fields common to all events of a request; [`sse`]: Server-Sent Events
//! - `again`: retries where there was no room
//! - [`logprobs`]: log-probabilities in OpenAI's two formats; [`prompt_logprobs`]: those of prompts
//!   in vLLM's
//! - [`metrics`]: the cluster's metrics in the requested format; [`probes`]: whether a process is
//!   ready
//! - [`access`]: request ids and the access log
//! - `adapters`: LoRA adapters loaded and unloaded while the cluster runs
//! - [`admin`]: the operator's API
//! - [`tokenize`]: tokenization without generation
//! - [`trace`]: the trace that a request belongs to; [`traced`]: what is exported of it
//! - [`tls`]: HTTPS, with certificates that may change
//! - [`keys`]: who may use the API
//! - [`options`]: the operator's options of the API
//! - [`openapi`]: the API as a document for programs
//! - [`pool`]: runs work on text off the threads that serve connections
//! - [`room`]: how much memory request bodies may take together
//! - `connections`: how many connections each address may have
//! - `kept`: ends connections on which nothing is asked
//! - [`listener`]: where HTTP is served; [`root_path`]: under which path a proxy shows it
//! - `watch`: rereads files when they change
//! - `body`: attaches values to the lifetime of an answer's body, and says how it ends
//! - `not_json`: what is wrong with a body that is not JSON
//! - [`gate`]: lets requests in, and is closed when the server is told to end
//! - [`error`]: every error a client can see, in one mapping
pub mod access;
mod adapters;
pub mod admin;
mod again;
pub mod bad_words;
mod body;
pub mod chat;
mod classes;
pub mod completions;
mod connections;
pub mod conversation;
pub mod dialogue;
pub mod embeddings;
pub mod envelope;
pub mod error;
pub mod fields;
pub mod gate;
pub mod generation;
mod intake;
mod invocations;
mod kept;
pub mod keys;
pub mod limits;
pub mod listener;
pub mod logprobs;
pub mod message;
pub mod messages;
pub mod metrics;
pub mod models;
mod not_json;
pub mod openapi;
pub mod options;
mod pairs;
pub mod params;
pub mod pool;
mod pooling;
pub mod probes;
pub mod prompt_logprobs;
pub mod reading;
pub mod refused;
pub mod responses;
pub mod room;
pub mod root_path;
pub mod routes;
mod scores;
pub mod server;
pub mod sse;
pub mod state;
pub(crate) mod structural_tag;
pub mod structured;
pub mod terms;
pub mod thinking;
pub mod tls;
pub mod token_fields;
pub mod tokenize;
pub mod tools;
pub mod trace;
pub mod traced;
mod traffic;
mod turns;
mod vectors;
pub mod watch;
