//! The list of operations a device must offer. The decoder is written once over [`Backend`], which
//! is all of these together:
//! - [`tensors`]: what a device holds, and how it comes there
//! - [`rows`], [`products`], [`attention`], [`experts`]: the arithmetic
//! - [`exchange`]: what ranks exchange
//! - [`steps`]: steps as a whole, and sampling
//!
//! `arguments` are sizes, and what is in a step; [`inspect`] is for tests and tools, and not a part
//! of [`Backend`]. Code that is generic over `B: Backend` may call everything; code that has a
//! device's own type imports [`prelude`].
//!
//! All activations are row-major `[rows, width]`, accumulated in f32. Weights are stored bf16 (or
//! as the file has them). `tokens` of all sequences of a step are concatenated along the rows.
//! Reductions run in an order that depends on the shapes of weights and of one sequence alone,
//! never on what else is in the batch (law 7).
//!
//! A backend is owned by one executor thread and owns its threads, streams and collective.
//!
//! # Steps as a whole
//! A device may run a step as one recorded graph instead of call by call. For that the caller
//! frames each step by [`StepOps::begin_step`], which names everything that the step reads, and
//! [`StepOps::end_step`]. Between them a backend is free to put work off: it may record the calls,
//! or only check that they are the ones it recorded for an earlier step of this kind and run its
//! record at the end. So until `sample`, `logprobs`, `read_buffer`, a collective operation or
//! `end_step` returns, no result needs to be there, and errors of a call may come from a later one.
//! Both hooks do nothing by default; without them every call stands for itself.
//! [`KernelError::Again`] from any of these calls means that the whole step, beginning with
//! `begin_step`, is to be called once more.
//!
//! # Masks
//! Which tokens a row may get may be known later than all else that its step reads. The step is
//! begun without masks ([`StepInputs::masked`]), [`StepOps::launch_step`] has the device compute
//! what was called so far, and its rows are sampled when the masks are there; no other step is
//! begun before.
//!
//! # One step ahead
//! A device may also be given a step before the tokens of the one before are known, so that it
//! never waits for its host: [`StepOps::queue_sample`] leaves the tokens on the device, the next
//! step names them by their rows ([`StepInputs::feed`]), and [`StepOps::take_sampled`] fetches them
//! later, in the order of the steps. Two steps whose tokens are not fetched are under way at most;
//! those that sample nothing stand anywhere among them.
mod arguments;
pub mod attention;
pub mod exchange;
pub mod experts;
pub mod inspect;
pub mod products;
pub mod rows;
pub mod steps;
pub mod tensors;

pub use arguments::{
    Activation, AttentionAt, AttentionShape, Batch, Choices, EXPERT_SLOTS, ExpertActivation,
    KvShape, NOT_ASSIGNED, NOT_FED, QkvInput, QkvWeights, RopeTable, Routing, SeqRows, StepInputs,
};
pub use attention::AttentionOps;
pub use exchange::ExchangeOps;
pub use experts::ExpertOps;
pub use inspect::Inspect;
pub use products::ProductOps;
pub use rows::RowOps;
pub use steps::StepOps;
pub use tensors::{Buffer, Tensors};

#[cfg(doc)]
use crate::error::KernelError;
pub use crate::weights::{BlockScales, DType, HostMatrix, Scales};

/// A device. Methods are called from its executor thread alone.
pub trait Backend:
    Tensors + RowOps + ProductOps + AttentionOps + ExpertOps + ExchangeOps + StepOps
{
}

impl<B> Backend for B where
    B: Tensors + RowOps + ProductOps + AttentionOps + ExpertOps + ExchangeOps + StepOps
{
}

/// All operations by name, where a device's own type calls them: `use backend::prelude::*`.
pub mod prelude {
    pub use super::{
        AttentionOps as _, Buffer as _, ExchangeOps as _, ExpertOps as _, Inspect as _,
        ProductOps as _, RowOps as _, StepOps as _, Tensors as _,
    };
}
