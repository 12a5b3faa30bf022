//! Frames, the codec and links: what peers can send, and its effect.
//!
//! - [`auth`]: proof of the cluster secret, MACs of frames
//! - [`frames`]: the frame format, bit by bit
//! - [`messages`]: every message through codec and frame, and hostile bytes
//! - [`links`]: real connections on loopback
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests panic")]

mod auth;
mod frames;
mod links;
mod messages;
