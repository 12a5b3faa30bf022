//! NCCL: data exchange between GPUs over NVLink, PCIe and the network.
//!
//! The library is loaded at run time ([`library`]). Communicators are created without blocking;
//! each has a watcher thread that aborts it when needed (`communicator`). `group` is the backend's
//! interface, [`environment`] prepares NCCL's settings.
mod communicator;
pub mod environment;
mod group;
pub mod library;

pub(super) use communicator::await_left;
pub(super) use group::NcclGroup;
