//! How a rank meets the others of its epoch: the host's collective, and the devices' direct
//! exchange.
use std::net::TcpListener;
use std::time::Duration;

use kernels::collective::{
    AbortAll, SharedMemoryOptions, TcpOptions, shared_memory, single_rank, tcp,
};
use kernels::cuda::{GroupSetup, Relay};
use kernels::{Collective, CollectiveError, KernelError};
use shared::ids::Epoch;
use shared::protocol::{CollectiveSpec, Form};

use crate::device::Device;
use crate::rank::{AbortSlot, FormError, FormObserver};

/// A formation in progress.
pub(super) struct Formation<'a> {
    pub(super) form: &'a Form,
    pub(super) abort: &'a AbortSlot,
    /// Everything that an abort must end.
    pub(super) all: &'a AbortAll,
    pub(super) observer: &'a mut dyn FormObserver,
}

/// Connects the collective; `listener` accepts TCP collectives.
///
/// # Errors
/// One sentence; trying again may help.
pub(super) fn connect(
    listener: &TcpListener,
    form: &Form,
    abort: &AbortSlot,
) -> Result<Box<dyn Collective>, FormError> {
    let timeout = Duration::from_millis(form.collective_timeout_ms);
    let (rank, world_size) = (form.rank, form.world_size);
    let is_given_up = || abort.is_aborted(form.epoch);
    let connected = match &form.collective {
        CollectiveSpec::None => Ok(single_rank()),
        CollectiveSpec::SharedMemory { name } => {
            tracing::info!(rank, world_size, "collective: shared memory");
            let name = name.clone();
            shared_memory(&SharedMemoryOptions { name, rank, world_size, timeout }, &is_given_up)
        }
        CollectiveSpec::Tcp { ranks, token } => {
            tracing::info!(rank, world_size, "collective: tcp");
            let token = *token;
            tcp(&TcpOptions { listener, ranks, rank, token, timeout }, &is_given_up)
        }
    };
    connected.map_err(|error| FormError { message: error.to_string(), permanent: false })
}

/// Lets the devices of the epoch's ranks exchange data without their hosts, if they can.
pub(super) fn join<D: Device>(
    backend: &mut D::Backend,
    joining: &mut Formation<'_>,
) -> Result<(), KernelError> {
    let Formation { form, abort, all, observer } = joining;
    let (epoch, abort) = (form.epoch, *abort);
    if form.world_size == 1 {
        D::stay_alone(backend);
        return Ok(());
    }
    D::join(
        backend,
        GroupSetup {
            timeout: Duration::from_millis(form.collective_timeout_ms),
            is_given_up: &|| abort.is_aborted(epoch),
            relay: &mut LinkRelay { epoch, abort, observer: &mut **observer },
            on_abort_handle: &mut |handle| all.add(handle),
        },
    )
}

/// Relays rank 0's group id to the other ranks over their links to the coordinator.
struct LinkRelay<'a> {
    epoch: Epoch,
    abort: &'a AbortSlot,
    observer: &'a mut dyn FormObserver,
}

impl Relay for LinkRelay<'_> {
    fn send(&mut self, bytes: &[u8]) -> Result<(), CollectiveError> {
        self.observer.group_id(bytes.to_vec());
        Ok(())
    }

    fn receive(&mut self, timeout: Duration) -> Result<Vec<u8>, CollectiveError> {
        self.abort.wait_for_group_id(self.epoch, timeout).ok_or_else(|| {
            if self.abort.is_aborted(self.epoch) {
                return CollectiveError::Aborted;
            }
            CollectiveError::TimedOut { op: "connect GPUs", waited: timeout, rank: 0 }
        })
    }
}
