//! NCCL: how GPUs exchange data over NVLink, PCIe and the network.
//!
//! Its library is found at run time ([`library`]); communicators are made without blocking, watched
//! by a thread of their own and aborted by it (`communicator`); `group` is what the backend
//! calls, [`environment`] what NCCL is told by the process's environment.
mod communicator;
pub mod environment;
mod group;
pub mod library;

pub(super) use group::NcclGroup;
