//! The wire format of messages between processes.
//!
//! - [`codec`]: encodes and decodes values, with bounds; the only place that names bincode
//! - [`bytes`]: PURE: byte fields, encoded in one piece
//! - [`auth`]: PURE: proof of the cluster secret, MACs of frames
//! - [`keyring`]: the cluster's secrets, several while one takes another's place
//! - [`frame`]: PURE: frames with checksums on a byte stream
//!
//! `docs/protocol.md` is the specification.
pub mod auth;
pub mod bytes;
pub mod codec;
pub mod frame;
pub mod keyring;
