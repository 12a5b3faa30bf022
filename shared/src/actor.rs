//! Actors across processes: links, liveness, names, messages, supervision.
//!
//! The processes of a cluster form a star around the coordinator. Each has an [`ActorRuntime`],
//! which hosts named actors; a [`RemoteAddr`] reaches an actor in any process.
//!
//! - [`link`]: one TCP connection: frames in, frames out, pings
//! - [`liveness`]: PURE: when a silent link is suspect, and when it is dead
//! - [`pulse`]: whether a thread of this process still runs its tasks
//! - [`peer`]: the other end of a link, as an address for messages of one type
//! - [`exchange`]: PURE: pending asks (requests that expect a reply), each resolved exactly once
//! - [`registry`]: PURE: actor names, where the actors live, who watches them
//! - [`runtime`]: the shell around the exchange and the registry, one per process
//! - [`named`]: the actor's own side: mailbox, handler, restarts
//! - [`remote`]: [`RemoteAddr`]: typed tell and ask
//! - [`hosting`]: classes that a process can be told to start actors of, and those actors
//! - [`placement`]: PURE: which process starts a created actor, and what happens when it fails
//! - [`create`]: creating, finding and killing actors anywhere in the cluster
//! - [`supervise`]: PURE: when a crashed child is restarted
pub mod create;
pub mod exchange;
pub mod hosting;
pub mod link;
pub mod liveness;
pub mod named;
pub mod peer;
pub mod placement;
pub mod pulse;
pub mod registry;
pub mod remote;
pub mod runtime;
pub mod supervise;

pub use create::{CreateError, CreateOptions};
pub use hosting::{ActorClass, ActorContext};
pub use named::{ActorSpec, NamedActor};
pub use remote::{ActorMessage, RemoteAddr};
pub use runtime::{ActorRuntime, DeathWatch, NotWatched};
