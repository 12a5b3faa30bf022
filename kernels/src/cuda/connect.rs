//! How a rank joins the other ranks' devices: ranks exchange their capabilities through the host's
//! collective, choose accordingly, and set up the exchange.
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::backend::CudaBackend;
use super::choice::{
    CAPABILITY_BYTES, Capability, ExchangeDecision, ExchangeMethod, ExchangePolicy, choose, unlike,
};
use super::device::CudaOptions;
use super::group::{DeviceGroup, give_up};
use super::nccl::{self, NcclGroup};
use super::peer::{AgreeError, PeerGroup, SetupContext, agree, process_id};
use crate::backend::Tensors as _;
use crate::collective::{AbortHandle, Collective};
use crate::error::{CollectiveError, KernelError};

/// What joining needs from its caller.
pub struct GroupSetup<'a> {
    /// Deadline for set-up, and later for each step's wait for other ranks, beyond its own work.
    pub timeout: Duration,
    /// Whether the epoch is already over.
    pub is_given_up: &'a dyn Fn() -> bool,
    /// A way from rank 0 to the other ranks that strangers cannot read.
    pub relay: &'a mut dyn Relay,
    /// Called with a handle that aborts the group, before the group waits for anyone.
    pub on_abort_handle: &'a mut dyn FnMut(Arc<dyn AbortHandle>),
}

impl fmt::Debug for GroupSetup<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GroupSetup").field("timeout", &self.timeout).finish_non_exhaustive()
    }
}

/// Carries a few bytes from rank 0 to all other ranks, once per group.
pub trait Relay {
    /// Sends the bytes; called by rank 0.
    ///
    /// # Errors
    /// [`CollectiveError::Setup`].
    fn send(&mut self, bytes: &[u8]) -> Result<(), CollectiveError>;

    /// Receives the bytes; called by all other ranks.
    ///
    /// # Errors
    /// [`CollectiveError::Aborted`], [`CollectiveError::TimedOut`] after `timeout`.
    fn receive(&mut self, timeout: Duration) -> Result<Vec<u8>, CollectiveError>;
}

/// Result of joining.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JoinedGroup {
    /// How the ranks exchange data: `nccl`, `host`, ..
    pub algorithm: &'static str,
    /// Reason for it, in one line.
    pub reason: String,
    /// What this rank lacks for a faster exchange, in one line.
    pub missing: Option<String>,
    /// Warning about GPUs of different kinds, in one line.
    pub unlike: Option<String>,
    /// Duration of joining.
    pub took: Duration,
}

/// Gathers every rank's `own` bytes, in rank order.
pub(super) fn gather_bytes(
    collective: &mut dyn Collective,
    own: &[u8],
) -> Result<Vec<Vec<u8>>, CollectiveError> {
    // Collectives carry f32: one per byte.
    let local: Vec<f32> = own.iter().map(|byte| f32::from(*byte)).collect();
    let mut all = vec![0.0; local.len() * collective.world_size() as usize];
    collective.all_gather(&local, &mut all)?;
    let bytes = |rank: &[f32]| rank.iter().map(|value| *value as u8).collect();
    Ok(all.chunks_exact(local.len().max(1)).map(bytes).collect())
}

impl CudaBackend {
    /// Waits for what an earlier group still holds on the GPU, before anything is measured or
    /// allocated: the other ranks have left it by now, too, or are gone.
    pub fn await_left(&self) {
        if let Some(reason) = nccl::await_left() {
            self.device.context.leave_behind(reason);
        }
    }

    /// Joins the other ranks' devices, as far as all of them can. Every rank calls this after its
    /// collective was set and before it computes anything.
    ///
    /// # Errors
    /// [`KernelError::Collective`]; [`KernelError::Device`].
    pub fn join(&mut self, mut setup: GroupSetup<'_>) -> Result<JoinedGroup, KernelError> {
        let began = Instant::now();
        self.await_left();
        self.step.group_begins();
        let (own, mut missing) = self.capability();
        let all = gather_bytes(self.collective.as_mut(), &own.to_bytes())?;
        let read = |bytes: &Vec<u8>| Capability::from_bytes(bytes);
        debug_assert!(all.iter().all(|bytes| bytes.len() == CAPABILITY_BYTES));
        let all: Vec<Capability> =
            all.iter().map(read).collect::<Option<_>>().ok_or_else(|| {
                CollectiveError::Setup("a rank describes its GPU in an unknown form".to_owned())
            })?;
        let chosen = choose(&all).map_err(CollectiveError::Setup)?;
        let timeout = setup.timeout;
        let mut reason = chosen.reason.clone();
        let group: Option<Box<dyn DeviceGroup>> = match chosen.choice {
            ExchangeMethod::Host => None,
            ExchangeMethod::Nccl if chosen.insists => {
                Some(Box::new(self.connect_nccl(&mut setup, (timeout, false))?))
            }
            ExchangeMethod::Nccl => match self.try_nccl(&mut setup)? {
                Ok(group) => Some(Box::new(group)),
                Err(why) => {
                    reason = format!("NCCL cannot connect the ranks: {why}");
                    missing = Some(reason.clone());
                    None
                }
            },
        };
        let group = self.join_peers(group, &all, &chosen, &mut setup, &mut reason)?;
        let algorithm = group.as_ref().map_or("host", |group| group.algorithm(0));
        let graphs = chosen.graphs && group.as_ref().is_some_and(|group| group.is_capturable());
        self.step.use_graphs(match (graphs, &group) {
            (true, _) => None,
            (false, None) => Some("ranks exchange data through host memory"),
            (false, Some(_)) => Some("not every rank captures graphs"),
        });
        self.step.set_grouped(group.is_some());
        if let Some(group) = group {
            self.device.context.group.join(group, timeout, graphs);
            self.step.group_formed();
            // Reserved now, since this rank would otherwise do it later than others.
            self.reserve_exchanged()?;
        }
        Ok(JoinedGroup { algorithm, reason, missing, unlike: unlike(&all), took: began.elapsed() })
    }

    fn connect_nccl(
        &self,
        setup: &mut GroupSetup<'_>,
        trial: (Duration, bool),
    ) -> Result<NcclGroup, KernelError> {
        let CudaOptions { folders, nccl_lib, .. } = &self.options;
        let place = (self.rank(), self.world_size());
        NcclGroup::connect(&self.device, (folders, nccl_lib.as_deref()), place, setup, trial)
    }

    /// As [`Self::connect_nccl`], but falls back: if NCCL does not connect some rank, all ranks
    /// learn of it and do without, for the returned reason. The end of the epoch is an error
    /// instead.
    fn try_nccl(
        &mut self,
        setup: &mut GroupSetup<'_>,
    ) -> Result<Result<NcclGroup, String>, KernelError> {
        // A rank that fails early waits for those that time out, so their timeout must be shorter
        // than its own.
        let patience = setup.timeout * 3 / 4;
        let connected = self.connect_nccl(setup, (patience, true));
        let failure = match &connected {
            Ok(_) => None,
            Err(KernelError::Collective(CollectiveError::Aborted)) => return connected.map(Ok),
            Err(KernelError::Collective(error)) => Some(error.to_string()),
            Err(_) => return connected.map(Ok),
        };
        let said = failure.as_deref().map_or(Ok(()), Err);
        match (agree(self.collective.as_mut(), said), connected) {
            (Ok(()), connected) => connected.map(Ok),
            (Err(AgreeError::Without(why)), connected) => {
                if let Ok(group) = connected {
                    give_up(Box::new(group), &self.device.stream)?;
                }
                Ok(Err(why))
            }
            (Err(AgreeError::Broken(error)), _) => Err(error.into()),
            (Err(AgreeError::Device(error)), _) => Err(error),
        }
    }

    /// Puts a group of GPUs that access each other's memory in front of `group`, if possible.
    fn join_peers(
        &mut self,
        group: Option<Box<dyn DeviceGroup>>,
        capabilities: &[Capability],
        chosen: &ExchangeDecision,
        setup: &mut GroupSetup<'_>,
        reason: &mut String,
    ) -> Result<Option<Box<dyn DeviceGroup>>, KernelError> {
        if !chosen.peers {
            return Ok(group);
        }
        let mut large = group;
        let site = SetupContext {
            device: &self.device,
            collective: self.collective.as_mut(),
            capabilities,
            retired: &self.retired,
            thresholds: self.options.thresholds,
            measured_most: self.options.measured_most,
        };
        match PeerGroup::connect(site, setup, &mut large) {
            Ok(group) => {
                *reason = format!("{}; {reason}", group.describe());
                Ok(Some(Box::new(group)))
            }
            Err(AgreeError::Without(why)) if self.options.exchange == ExchangePolicy::Peers => {
                Err(CollectiveError::Setup(format!("--cuda-exchange peers: {why}")).into())
            }
            Err(AgreeError::Without(why)) => {
                *reason = format!("{reason}; GPUs do not see each other's memory: {why}");
                Ok(large)
            }
            Err(AgreeError::Broken(error)) => Err(error.into()),
            Err(AgreeError::Device(error)) => Err(error),
        }
    }

    /// This rank's capabilities, and what it lacks.
    fn capability(&self) -> (Capability, Option<String>) {
        let CudaOptions { folders, nccl_lib, exchange, .. } = &self.options;
        let nccl = match exchange {
            ExchangePolicy::Host | ExchangePolicy::Peers => Ok(0),
            ExchangePolicy::Auto | ExchangePolicy::Nccl => {
                nccl::library::version(folders, nccl_lib.as_deref())
            }
        };
        let shares = std::env::var_os("NCCL_MULTI_RANK_GPU_ENABLE").is_some_and(|on| on == "1");
        let compute: [u32; 2] = self.device.context.info().capability.into();
        let capability = Capability {
            wish: *exchange,
            host: host_id().unwrap_or_default(),
            gpu: self.device.context.info().uuid_bytes,
            nccl: *nccl.as_ref().unwrap_or(&0),
            nccl_shares: shares,
            graphs: self.step.can_capture(),
            batch_invariant: self.options.batch_invariant,
            process: process_id(),
            multiprocessors: self.device.context.info().multiprocessors,
            compute: compute.map(|number| u8::try_from(number).unwrap_or(u8::MAX)),
        };
        (capability, nccl.err().map(|missing| missing.to_string()))
    }
}

/// The kernel's id of this boot of the host.
fn host_id() -> Option<[u8; 16]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let digits: Vec<char> = text.chars().filter(char::is_ascii_hexdigit).collect();
    let mut id = [0; 16];
    for (byte, pair) in id.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = u8::try_from(pair[0].to_digit(16)? * 16 + pair[1].to_digit(16)?).ok()?;
    }
    (digits.len() == 32).then_some(id)
}
