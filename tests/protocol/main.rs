//! Frames, the codec and links: what peers can send, and its effect.
//!
//! - [`auth`]: proof of the cluster secret, MACs of frames
//! - [`fetching`]: what workers are told to fetch
//! - [`frames`]: the frame format, bit by bit
//! - [`messages`]: every message through codec and frame, and hostile bytes
//! - [`links`]: real connections on loopback
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests panic")]

mod auth;
mod fetching;
mod frames;
mod links;
mod messages;
