//! The pure scheduler against a fake worker whose every token depends on all tokens before it, so
//! that any gap, repeat or reorder shows.
//!
//! - [`worker`]: applies plans exactly as the protocol says, and refuses any other
//! - [`rig`]: scheduler, worker and clients, with named invariants checked after every event
//! - [`agreement`]: what a replica does when its ranks report different things
//! - [`frames`]: plans as sent
//! - [`growing`]: blocks that sequences need while a long prompt is computed
//! - [`guided`]: a guide whose masks depend on every token, and how guided requests are handled
//! - [`leaving`]: many requests that end at once, and readers that stop reading
//! - [`masks`]: a mask that never comes
//! - [`mixed`]: prompts beside sequences that decode
//! - [`outgrowing`]: a KV cache that comes back smaller
//! - [`placement`]: the cost of a large cluster
//! - [`priorities`]: which request goes first, and which is preempted
//! - [`random`]: random schedules
//! - [`readiness`]: when a replica counts as ready
//! - [`resuming`]: requests that continue from what another coordinator accepted
//! - [`scenarios`]: the main cases, readable
//! - [`shorter`]: short prompts beside long ones
//! - [`states`]: kept states of linear attention
//! - [`swapping`]: sequences that go to host memory and come back
//! - [`deadlines`]: steps that take much longer than such steps do
//! - [`draft_model`]: drafts by a model that only rank 0 has
//! - [`speculation`]: sequences that repeat themselves, and their drafts
//! - [`thinking`]: bounds on reasoning
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests panic and print"
)]

mod agreement;
mod deadlines;
mod draft_model;
mod frames;
mod growing;
mod guided;
mod leaving;
mod masks;
mod mixed;
mod outgrowing;
mod placement;
mod priorities;
mod random;
mod readiness;
mod resuming;
mod rig;
mod scenarios;
mod shorter;
mod speculation;
mod states;
mod swapping;
mod thinking;
mod worker;
