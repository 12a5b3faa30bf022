//! Actors across processes: links, liveness, names, messages, supervision.
//!
//! A cluster's processes form a star around the coordinator. Each has an [`ActorRuntime`], in which
//! named actors live; [`RemoteAddr`] reaches one wherever it is.
//!
//! - [`link`]: one TCP connection: frames in, frames out, pings
//! - [`liveness`]: PURE: when a silent link is suspect, and when it is dead
//! - [`peer`]: the other end of a link, as something that takes messages of one type
//! - [`exchange`]: PURE: asks under way, each resolved exactly once
//! - [`registry`]: PURE: the names, where they live, and who watches them
//! - [`runtime`]: the shell around both, one per process
//! - [`named`]: an actor's own side: mailbox, handler, restarts
//! - [`remote`]: [`RemoteAddr`]: tell and ask, typed
//! - [`supervise`]: PURE: when a crashed child is started again
pub mod exchange;
pub mod link;
pub mod liveness;
pub mod named;
pub mod peer;
pub mod registry;
pub mod remote;
pub mod runtime;
pub mod supervise;

pub use named::{ActorSpec, NamedActor};
pub use remote::{ActorMessage, RemoteAddr};
pub use runtime::{ActorRuntime, DeathWatch, NotWatched};
