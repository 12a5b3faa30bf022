//! The form messages have between processes.
//!
//! - [`codec`]: values to bytes and back, with limits; the only place that names bincode
//! - [`frame`]: PURE: bytes on a stream to checked frames and back
//!
//! `docs/protocol.md` is the specification.
pub mod codec;
pub mod frame;
