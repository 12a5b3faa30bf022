//! The HTTP front end: OpenAI's API, health, metrics.
//!
//! - [`server`]: routes, connection limits, start and stop
//! - [`state`]: what handlers share
//! - [`params`]: request bodies to validated requests: every field, its bound, its error
//! - [`completions`], [`chat`], [`models`]: OpenAI's endpoints
//! - [`generation`]: a running request as a sequence of text pieces
//! - [`envelope`]: what all events of a request have in common; [`sse`]: Server-Sent Events
//! - [`logprobs`]: log-probabilities in OpenAI's two shapes
//! - [`metrics`]: the cluster's metrics, in the format asked for
//! - [`admin`]: the operator's side
//! - [`gate`]: closed when the server is told to end: who may come in, and who is inside
//! - [`error`]: every error a client can see, in one mapping
pub mod admin;
pub mod chat;
pub mod completions;
pub mod envelope;
pub mod error;
pub mod gate;
pub mod generation;
pub mod logprobs;
pub mod metrics;
pub mod models;
pub mod params;
pub mod server;
pub mod sse;
pub mod state;
