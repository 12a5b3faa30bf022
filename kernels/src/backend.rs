//! The operations a device must offer. The decoder is written once, over [`Backend`], which
//! combines all of these traits:
//! - [`tensors`]: what a device holds, and how it is loaded
//! - [`rows`], [`products`], [`attention`], [`qk_norm`], [`latent`], [`delta`],
//!   [`experts`]: the arithmetic
//! - [`exchange`]: exchanges between ranks
//! - [`steps`]: steps as a whole, and sampling
//!
//! `arguments` holds their argument types: sizes, and the contents of a step. [`inspect`] is for
//! tests and tools and not part of [`Backend`]. Code generic over `B: Backend` can call everything;
//! code that uses a concrete device type imports [`prelude`].
//!
//! All activations are row-major `[rows, width]`, accumulated in f32. Weights are stored in bf16 or
//! as in the file. The tokens of all sequences of a step are concatenated along the rows. The order
//! of a reduction depends only on the shapes of the weights and of one sequence, never on what else
//! is in the batch (law 7).
//!
//! A backend is owned by one executor thread, and owns its threads, streams and collective.
//!
//! # Steps as a whole
//! A device can run a step as one recorded graph instead of call by call. For this, the caller
//! brackets each step with [`StepOps::begin_step`], which names everything that the step reads, and
//! [`StepOps::end_step`]. In between, a backend is free to defer work: it can record the calls, or
//! only check that they match those it recorded for an earlier step of this kind, and run the
//! recording at the end. So no result needs to be available until `sample`, `logprobs`,
//! `read_buffer`, a collective operation or `end_step` returns, and a later call may report the
//! error of an earlier one. Both hooks do nothing by default; without them every call stands on its
//! own. [`KernelError::Again`] from any of these calls means that the caller must repeat the whole
//! step, starting with `begin_step`.
//!
//! # Masks
//! The tokens that a row is allowed to choose can become known later than everything else that its
//! step reads. The step is then begun without masks ([`StepInputs::masked`]),
//! [`StepOps::launch_step`] makes the device compute what was called so far, and the rows are
//! sampled once the masks have arrived. No other step begins before that.
//!
//! # One step ahead
//! A device can also be given a step before the tokens of the previous one are known, so that it
//! never waits for the host: [`StepOps::queue_sample`] leaves the tokens on the device, the next
//! step refers to them by row ([`StepInputs::feed`]), and [`StepOps::take_sampled`] fetches them
//! later, in step order. At most two steps with unfetched tokens are in flight; steps that sample
//! nothing can come anywhere among them.
mod arguments;
pub mod attention;
pub mod delta;
pub mod exchange;
pub mod experts;
pub mod inspect;
pub mod latent;
pub mod products;
pub mod qk_norm;
pub mod rows;
pub mod steps;
pub mod tensors;

pub use arguments::{
    Activation, AttentionAt, AttentionShape, Batch, Choices, EXPERT_SLOTS, ExpertActivation,
    KvShape, KvStorage, LayerNorm, NOT_ASSIGNED, NOT_FED, PlainActivation, QkvInput, QkvWeights,
    RopeTable, Routing, Scores, SeqRows, StepInputs,
};
pub use attention::AttentionOps;
pub use delta::{
    DeltaAt, DeltaInput, DeltaOps, DeltaShape, DeltaWeights, Rule, RuleWeights, StatesShape,
};
pub use exchange::ExchangeOps;
pub use experts::ExpertOps;
pub use inspect::Inspect;
pub use latent::{LatentInput, LatentOps};
pub use products::ProductOps;
pub use qk_norm::{QkNorm, QkNormOps};
pub use rows::RowOps;
pub use steps::StepOps;
pub use tensors::{Buffer, Tensors};

#[cfg(doc)]
use crate::error::KernelError;
pub use crate::weights::{BlockScales, DType, HostMatrix, Scales};

/// A device. Only its executor thread calls these methods.
pub trait Backend:
    Tensors
    + RowOps
    + ProductOps
    + AttentionOps
    + QkNormOps
    + LatentOps
    + DeltaOps
    + ExpertOps
    + ExchangeOps
    + StepOps
{
}

impl<B> Backend for B where
    B: Tensors
        + RowOps
        + ProductOps
        + AttentionOps
        + QkNormOps
        + LatentOps
        + DeltaOps
        + ExpertOps
        + ExchangeOps
        + StepOps
{
}

/// All operations, for code that uses a concrete device type: `use backend::prelude::*`.
pub mod prelude {
    pub use super::{
        AttentionOps as _, Buffer as _, DeltaOps as _, ExchangeOps as _, ExpertOps as _,
        Inspect as _, LatentOps as _, ProductOps as _, QkNormOps as _, RowOps as _, StepOps as _,
        Tensors as _,
    };
}
