//! The HTTP front end: OpenAI's API, Anthropic's messages, health, metrics.
//!
//! - [`server`]: routes, connection limits, start and stop
//! - [`state`]: what handlers share
//! - [`fields`]: a request body's fields, read one by one
//! - [`limits`]: every bound of a request
//! - [`params`]: what completions and chat have in common
//! - [`terms`]: what holds of a request besides what its body says: its time, whose it is
//! - [`conversation`]: the part of a chat request that its template is given
//! - [`refused`]: fields that would change the answer and are not supported
//! - [`structured`]: what the output must be
//! - [`completions`], [`chat`], [`responses`], [`embeddings`], [`models`]: OpenAI's endpoints
//! - [`messages`]: the endpoints of Anthropic's API
//! - [`dialogue`]: a conversation's request, from its fields to a running one
//! - [`message`], [`tools`]: a choice's message; tools, and calls of them
//! - [`reading`]: a reply's text as reasoning, answer and calls
//! - [`generation`]: a running request as a sequence of text pieces
//! - [`envelope`]: what all events of a request have in common; [`sse`]: Server-Sent Events
//! - `again`: asking again where there was no room
//! - [`logprobs`]: log-probabilities in OpenAI's two shapes
//! - [`metrics`]: the cluster's metrics, in the format asked for
//! - [`access`]: every request has an id
//! - [`admin`]: the operator's side
//! - [`tokenize`]: tokens without generating any
//! - [`trace`]: the trace that a request belongs to
//! - [`tls`]: HTTPS, by certificates that may change
//! - [`keys`]: who may use the API
//! - [`options`]: what an operator may choose of it
//! - [`pool`]: work on text, off the threads that serve connections
//! - [`room`]: how much memory the bodies of requests may take together
//! - `connections`: how many connections each address may have
//! - `kept`: ends connections on which nothing is asked
//! - `watch`: files that are read again when they change
//! - `body`: what lives as long as an answer's body
//! - [`gate`]: closed when the server is told to end: who may come in, and who is inside
//! - [`error`]: every error a client can see, in one mapping
pub mod access;
pub mod admin;
mod again;
mod body;
pub mod chat;
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
mod kept;
pub mod keys;
pub mod limits;
pub mod logprobs;
pub mod message;
pub mod messages;
pub mod metrics;
pub mod models;
pub mod options;
pub mod params;
pub mod pool;
pub mod reading;
pub mod refused;
pub mod responses;
pub mod room;
pub mod server;
pub mod sse;
pub mod state;
pub mod structured;
pub mod terms;
pub mod tls;
pub mod tokenize;
pub mod tools;
pub mod trace;
pub mod watch;
