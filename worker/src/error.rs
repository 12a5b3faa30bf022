//! Why a model cannot be loaded, and why a step cannot be run. One sentence each, naming the file,
//! key, tensor or sequence, what was found and what the bound is.
use std::path::PathBuf;

use kernels::KernelError;
use shared::ids::{SeqId, StepId};

/// A model folder cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's words.
        source: std::io::Error,
    },
    /// A file is not what its name says, or is damaged.
    #[error("{}: {problem}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A configuration key is missing, out of bounds or asks for what is not supported.
    #[error("{}: {key}: {problem}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// The value found, and what is accepted.
        problem: String,
    },
    /// A tensor is missing, or has another shape or type than the configuration says.
    #[error("{}: tensor `{tensor}` {problem}", path.display())]
    Tensor {
        /// The file, or the folder where no file has it.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Expected and found.
        problem: String,
    },
    /// The model cannot be split over this many ranks.
    #[error(
        "the model cannot be split over {world_size} ranks: {problem}; possible degrees: {possible}"
    )]
    Degree {
        /// The tensor-parallel degree asked for.
        world_size: u32,
        /// What does not divide.
        problem: String,
        /// The degrees that work, separated by commas.
        possible: String,
    },
    /// The device failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

impl ModelError {
    /// True when trying again with the same files and sizes cannot help.
    #[must_use]
    pub fn is_permanent(&self) -> bool {
        match self {
            // A network file system may come back.
            Self::Io { source, .. } => source.kind() == std::io::ErrorKind::NotFound,
            Self::File { .. } | Self::Config { .. } | Self::Tensor { .. } | Self::Degree { .. } => {
                true
            }
            Self::Kernel(error) => {
                matches!(error, KernelError::Shape { .. } | KernelError::Unsupported(_))
            }
        }
    }
}

/// An engine cannot be set up, or a step cannot be run. After a failed step the epoch is broken: the
/// engine may have applied part of the plan, and other ranks may be waiting in a collective.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A size is zero or too large.
    #[error("{field} is {value}, it must be in {min}..={max}")]
    OutOfBounds {
        /// The size.
        field: &'static str,
        /// What was asked for.
        value: u64,
        /// The least.
        min: u64,
        /// The most.
        max: u64,
    },
    /// A plan arrived before [`start`](crate::engine::Engine::start).
    #[error("the KV cache is not allocated: the engine was not started")]
    NotStarted,
    /// A plan is not the successor of the one before.
    #[error("{found} arrived where {expected} was due")]
    OutOfOrder {
        /// The plan's step.
        found: StepId,
        /// One higher than the last.
        expected: StepId,
    },
    /// A plan names a sequence that this worker does not have.
    #[error("{0} is not known here")]
    UnknownSequence(SeqId),
    /// A plan admits a sequence that is already here.
    #[error("{0} is admitted twice")]
    AlreadyAdmitted(SeqId),
    /// A sequence occurs twice in one batch.
    #[error("{0} occurs twice in one step")]
    DuplicateSequence(SeqId),
    /// Something about one sequence does not fit.
    #[error("{seq}: {problem}")]
    Sequence {
        /// The sequence.
        seq: SeqId,
        /// What, with the value and its bound.
        problem: String,
    },
    /// The device or the collective failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}
