//! The coordinator: HTTP in, plans out, tokens back, one `/metrics`.
//!
//! Map:
//! - [`engine`]: interface between the front end and everything below it
//! - [`scheduler`]: PURE: one replica's queue, batch, blocks and preemption
//! - [`replica`]: a running replica: its scheduler, request channels and links to ranks
//! - [`cluster`]: PURE: assigns workers to replicas, counts epochs; and the actor around it
//! - [`adapters`]: which LoRA adapters requests may name, and which are in use
//! - `addresses`: numbers of connections per party
//! - [`links`]: accepts connections from workers and front ends, performs the handshake
//! - [`frontends`]: front-end processes, as the coordinator sees them
//! - [`frontend`]: the front-end process itself
//! - [`coordinator`]: puts everything together
//! - [`checkpoint`]: totals that outlive the coordinator
//! - [`kept_actors`]: created actors that outlive the coordinator together with their process
//! - [`standby`]: a coordinator that waits until it leads
//! - [`guide`]: structured output: which tokens are allowed next
//! - [`http`]: the API
//! - [`private_file`]: checks that only a file's owner can read it
//! - [`secret_file`]: the file of the cluster's secrets, read again when it changes
//! - [`text`]: tokenizer, templates, incremental decoding, stop strings
//! - [`traces`]: a span for each request, for collectors of traces
//! - [`metrics`]: what is observed and how it is published
#![forbid(unsafe_code)]

pub mod adapters;
mod addresses;
pub mod checkpoint;
pub mod cluster;
pub mod coordinator;
pub mod engine;
pub mod frontend;
pub mod frontends;
pub mod guide;
pub mod http;
pub mod kept_actors;
pub mod links;
pub mod metrics;
pub mod private_file;
pub mod replica;
pub mod scheduler;
pub mod secret_file;
pub mod standby;
pub mod text;
pub mod traces;
