//! A rank on CPU cores: connects the collective a coordinator asks for, loads its shard, runs the
//! engine over `kernels::CpuBackend`.
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kernels::collective::Collective;
use shared::protocol::{CollectiveSpec, Form, SequenceOutput, StepPlan, StepTimings};

use crate::rank::{AbortSlot, FormError, Rank, RankReady};

/// See the module's documentation.
#[derive(Debug)]
pub struct CpuRank {
    threads: usize,
    listener: TcpListener,
}
