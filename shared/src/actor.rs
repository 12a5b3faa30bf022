//! Remote actors: typed addresses over framed links, liveness, supervision.
//!
//! - [`link`]: one TCP connection: frames in, frames out, pings
//! - [`liveness`]: PURE: when a silent link is suspect, and when it is dead
//! - [`remote`]: [`remote::RemoteAddr`]: the address of an actor in another process
//! - [`supervise`]: PURE: when a crashed child is started again
pub mod link;
pub mod liveness;
pub mod remote;
pub mod supervise;
