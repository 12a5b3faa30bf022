//! The messages on the links between the coordinator and its workers and front ends.
//!
//! These types are the wire format: a change to one requires raising [`PROTOCOL_VERSION`]. Nothing
//! else in the workspace is serialised between processes.
//!
//! - [`actors`]: messages between named actors
//! - [`bad_words`]: words that must not be generated
//! - [`control`]: forming and ending replicas
//! - [`frontend`]: requests and their events
//! - [`guide`]: structured output as a front end requests it
//! - [`lora`]: LoRA adapters
//! - [`mask`]: which tokens structured output allows
//! - [`note`]: what happens to a request, for whoever traces it
//! - [`step`]: step plans and results
//! - [`thinking`]: a bound on reasoning
//!
//! A worker's life: it dials, sends [`Hello`], gets [`ToFetch`] and dials again when it has the
//! model's files, or gets [`Welcome`]; then for every epoch [`Form`] ->
//! [`GroupId`] (ranks on GPUs) -> [`LoadProgress`]* -> [`Formed`] -> [`Start`] -> [`Started`] ->
//! ([`StepPlan`] -> [`StepMasks`] (if any entry is masked) -> [`StepResult`])* until
//! [`ToWorker::Abort`], a new [`Form`], or the end of the link.
pub mod actors;
pub mod bad_words;
pub mod control;
pub mod frontend;
pub mod guide;
pub mod lora;
pub mod mask;
pub mod note;
pub mod step;
pub mod thinking;

pub use bad_words::BadWords;
pub use control::{
    BUILD_MAX, CollectiveSpec, DeviceKind, Dtype, EngineConfig, FailedGroups, Form, FormFailed,
    Formed, GROUP_ID_MAX, GroupId, HeldShard, Hello, KvCacheDtype, LoadProgress, NVLINK_LABEL,
    NodeResources, Quantization, RESOURCES_MAX, Rejoin, Start, Started, TO_FETCH_MAX, ToFetch,
    Trouble, Welcome, WorkerStats,
};
pub use frontend::{
    AcceptedChoice, EngineError, EngineEvent, FinishReason, FromFrontend, FrontendHello,
    FrontendId, FrontendWelcome, MODEL_NAME_MAX, MODEL_NAMES_MAX, Serving, SubmitRequest,
    TEXT_PARTS, ToFrontend, check_model_names,
};
pub use guide::{GuideSpec, Whitespace};
pub use lora::{
    Adapter, AdapterChange, AdapterCommand, AdapterDone, AdapterError, ChangeAdapter, Lora,
};
pub use mask::TokenMask;
pub use note::{NOTES_MAX, RequestNote};
use serde::{Deserialize, Serialize};
pub use step::{
    Drafts, KeptState, NewSequence, SequenceOutput, SequenceStep, StepFailed, StepMasks, StepPlan,
    StepResult, StepTimings, Swap, SwapPair, TokenDigest, TokenLogprobs,
};
pub use thinking::ThinkingBudget;

use crate::actor::peer::RemoteMessage;
use crate::ids::Epoch;
use crate::log::LogLines;
use crate::wire::frame::FrameKind;

/// Raised with every change to a type in this module; both sides must agree exactly.
pub const PROTOCOL_VERSION: u16 = 27;

/// All messages from a coordinator to a worker after the handshake.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToWorker {
    /// Join a replica: build the collective, load the shard.
    Form(Form),
    /// Allocate the KV cache and get ready for plans.
    Start(Start),
    /// Run one step. An epoch's plans arrive in order of step id.
    Step(StepPlan),
    /// Leave this epoch's collective at once, whatever the executor is doing in it; keep the
    /// weights.
    Abort {
        /// Epoch to leave; other epochs are not affected.
        epoch: Epoch,
    },
    /// Finish and exit.
    Shutdown {
        /// Why, for the worker's log.
        reason: String,
        /// Whether it is to be started again, since it hangs: then its exit code is not 0.
        again: bool,
    },
    /// NCCL's unique id, made by rank 0; the other ranks use it to join the communicator.
    GroupId(GroupId),
    /// Tokens that may be sampled in a step with masked entries; follows that step's plan.
    Masks(StepMasks),
    /// Load or drop an adapter.
    Adapter(ChangeAdapter),
    /// To a worker that is no rank: fetch these files of the hub, so that nothing waits for them
    /// when it becomes one. There is no answer.
    Fetch(ToFetch),
    /// Remember this for the next coordinator, in place of what it was told before.
    Remember(Trouble),
}

/// All messages from a worker to the coordinator after the handshake.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum FromWorker {
    /// Weights are being loaded.
    Progress(LoadProgress),
    /// Weights are loaded and the collective is up.
    Formed(Formed),
    /// The replica cannot be formed; the worker is idle again.
    FormFailed(FormFailed),
    /// The KV cache is allocated.
    Started(Started),
    /// The outcome of one step.
    Step(StepResult),
    /// A step could not be run; the epoch is broken.
    StepFailed(StepFailed),
    /// Cumulative stats, sent on a timer while idle (otherwise they are part of `Step`).
    Stats(WorkerStats),
    /// New lines of the worker's log, sent once a second if there are any, and before it ends.
    Logs(LogLines),
    /// The worker is about to exit.
    Goodbye {
        /// Why, for the coordinator's log.
        reason: String,
        /// Whether it ends on purpose.
        exit: ExitReason,
    },
    /// NCCL's unique id, from rank 0 of an epoch that is being formed, for its other ranks only.
    GroupId(GroupId),
    /// An adapter is loaded, or cannot be.
    Adapter(AdapterDone),
}

/// Why a worker exits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExitReason {
    /// It was told to, or is not needed: not counted as a failure.
    OnPurpose,
    /// It cannot go on.
    Failed,
    /// Its device no longer works.
    DeviceLost,
}

impl RemoteMessage for ToWorker {
    fn kind(&self) -> FrameKind {
        match self {
            Self::Step(_) | Self::Masks(_) => FrameKind::Step,
            Self::Form(_)
            | Self::Start(_)
            | Self::Abort { .. }
            | Self::Shutdown { .. }
            | Self::GroupId(_)
            | Self::Adapter(_)
            | Self::Fetch(_)
            | Self::Remember(_) => FrameKind::Control,
        }
    }
}

impl RemoteMessage for FromWorker {
    fn kind(&self) -> FrameKind {
        match self {
            Self::Step(_) => FrameKind::Step,
            _ => FrameKind::Control,
        }
    }
}
