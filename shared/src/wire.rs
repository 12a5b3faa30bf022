//! The form messages have between processes.
//!
//! - [`codec`]: values to bytes and back, with limits; the only place that names bincode
//! - [`bytes`]: PURE: bytes in messages, taken whole
//! - [`auth`]: PURE: proof of the cluster's secret, MACs of frames
//! - [`frame`]: PURE: bytes on a stream to checked frames and back
//!
//! `docs/protocol.md` is the specification.
pub mod auth;
pub mod bytes;
pub mod codec;
pub mod frame;
