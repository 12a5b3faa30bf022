//! How ranks share their memory: each allocates its own, offers a handle to it, and opens those of
//! the others. If anything fails on one rank, all ranks learn of it and do without.
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher as _, Hasher as _};
use std::sync::{Arc, OnceLock};

use super::memory::{HANDLE_BYTES, Mapped, SignalWords, check_access, handle_of};
use super::tuning::Thresholds;
use super::{Clock, PeerGroup, Retired, trial};
use crate::collective::{AbortAll, Collective};
use crate::cuda::choice::{Capability, shares_gpu};
use crate::cuda::connect::{GroupSetup, gather_bytes};
use crate::cuda::device::Device;
use crate::cuda::group::{DeviceGroup, give_up};
use crate::cuda::launch::{PEER_BLOCKS, PEER_SLOT};
use crate::cuda::memory::{DeviceMemory, DevicePtr};
use crate::error::{CollectiveError, KernelError};

/// `TUTTI_PEERS_MAX`
pub(super) const PEERS_MAX: usize = 8;
/// Granularity of the driver's allocations: nothing else of this process is in the memory that
/// others open.
const GRANULE: usize = 2 << 20;
/// Handle, address, and a flag that there is an offer.
const OFFER_BYTES: usize = HANDLE_BYTES + 8 + 1;

/// A number that identifies this process.
pub(in crate::cuda) fn process_id() -> u64 {
    static ID: OnceLock<u64> = OnceLock::new();
    *ID.get_or_init(|| RandomState::new().build_hasher().finish())
}

/// Byte offsets within a rank's memory.
struct Layout {
    flags: usize,
    rounds: usize,
    failed: usize,
    spent: usize,
    bytes: usize,
}

impl Layout {
    fn of(ranks: usize) -> Self {
        let flags = 2 * PEER_BLOCKS * ranks * PEER_SLOT * 4;
        let rounds = flags + PEER_BLOCKS * ranks * 8;
        let failed = rounds + PEER_BLOCKS * 8;
        let spent = failed + 8;
        Self { flags, rounds, failed, spent, bytes: (spent + 8).next_multiple_of(GRANULE) }
    }
}

/// What a group is set up from.
pub(in crate::cuda) struct SetupContext<'a> {
    pub(in crate::cuda) device: &'a Device,
    pub(in crate::cuda) collective: &'a mut dyn Collective,
    /// Capabilities of all ranks.
    pub(in crate::cuda) capabilities: &'a [Capability],
    pub(in crate::cuda) retired: &'a Retired,
    /// Fixed thresholds, instead of measured ones.
    pub(in crate::cuda) thresholds: Option<Thresholds>,
    /// Largest message to measure, in bytes.
    pub(in crate::cuda) measured_most: usize,
}

/// Error text without "the device failed": a device that does not support this has not failed.
fn words(error: &KernelError) -> String {
    match error {
        KernelError::Device(message) => message.clone(),
        other => other.to_string(),
    }
}

/// Tells all ranks whether this one succeeded; fails unless all did.
pub(in crate::cuda) fn agree(
    collective: &mut dyn Collective,
    own: Result<(), &str>,
) -> Result<(), AgreeError> {
    let mut flags = vec![0.0; collective.world_size() as usize];
    collective.all_gather(&[f32::from(u8::from(own.is_err()))], &mut flags)?;
    match (own, flags.iter().position(|flag| *flag != 0.0)) {
        (Err(reason), _) => Err(AgreeError::Without(reason.to_owned())),
        (Ok(()), Some(rank)) => Err(AgreeError::Without(format!("rank {rank} cannot"))),
        (Ok(()), None) => Ok(()),
    }
}

/// Why there is no group.
#[derive(Debug, thiserror::Error)]
pub(in crate::cuda) enum AgreeError {
    /// All ranks do without, for this reason.
    #[error("{0}")]
    Without(String),
    /// The ranks disagree, or some are gone.
    #[error(transparent)]
    Broken(#[from] CollectiveError),
    /// This rank's device failed.
    #[error(transparent)]
    Device(#[from] KernelError),
}

impl PeerGroup {
    /// Sets up the group together with all ranks. `large` takes the messages that are too large for
    /// it, and is put back if there is no group.
    pub(in crate::cuda) fn connect(
        site: SetupContext<'_>,
        setup: &mut GroupSetup<'_>,
        large: &mut Option<Box<dyn DeviceGroup>>,
    ) -> Result<Self, AgreeError> {
        let SetupContext { device, collective, capabilities, retired, thresholds, measured_most } =
            site;
        // All ranks that get here have left their old groups.
        let processes: Box<[u64]> = capabilities.iter().map(|it| it.process).collect();
        retired.release(&processes);
        let ranks = capabilities.len();
        let rank = collective.rank() as usize;
        let layout = Layout::of(ranks);

        let made = OwnMemory::new(device, capabilities, rank, &layout);
        let mut offer = vec![0; OFFER_BYTES];
        if let Ok(made) = &made {
            offer[..HANDLE_BYTES].copy_from_slice(&made.handle);
            offer[HANDLE_BYTES..HANDLE_BYTES + 8].copy_from_slice(&made.own.ptr().0.to_le_bytes());
            offer[OFFER_BYTES - 1] = 1;
        }
        let offers = gather_bytes(collective, &offer)?;
        if let Some(other) = offers.iter().position(|offer| offer.last() != Some(&1)) {
            return Err(AgreeError::Without(match &made {
                Err(error) => words(error),
                Ok(_) => format!("rank {other} cannot"),
            }));
        }
        let made = made?;
        let opened = open(device, capabilities, rank, &offers);
        let said = opened.as_ref().map(|_| ()).map_err(words);
        let agreed = agree(collective, said.as_ref().copied().map_err(String::as_str));
        if let Err(error) = agreed {
            // Close the opened memory before its owners free it.
            drop(opened);
            collective.barrier()?;
            return Err(error);
        }
        let (places, mapped) = opened?;
        let timeout = setup.timeout;
        // What the driver does not say could be so.
        let mps = device.context.driver().has_mps(device.context.info().ordinal).unwrap_or(true);
        let shares_gpu = shares_gpu(capabilities, rank, mps);
        let table = Table { places, layout: &layout, made: &made, rank, shares_gpu };
        let (trial, lasting) = (table.words(timeout.min(trial::PATIENCE)), table.words(timeout));
        made.table.upload(&device.stream, 0, &trial)?;
        let abort = Arc::new(AbortAll::default());
        abort.add(made.words.clone());
        (setup.on_abort_handle)(abort.clone());
        let shares = |one: (usize, &Capability)| {
            one.0 != rank && one.1.process == capabilities[rank].process
        };
        let mut group = Self {
            table: made.table,
            own: Some(made.own),
            mapped,
            words: made.words,
            clock: made.clock,
            abort,
            thresholds: thresholds.unwrap_or_default(),
            // Added once this group is known to work.
            large: None,
            shares_process: capabilities.iter().enumerate().any(shares),
            retired: retired.clone(),
            processes,
            timeout,
        };
        let mut kept = None;
        let said = group.try_out(device, collective, &mut kept).map_err(|error| words(&error));
        let agreed = agree(collective, said.as_ref().copied().map_err(String::as_str));
        if let Err(error) = agreed {
            // This group is given up; `large` stays in use.
            give_up(Box::new(group), &device.stream)?;
            return Err(error);
        }
        drop(kept);
        group.table.upload(&device.stream, 0, &lasting)?;
        group.large = large.take();
        if let Some(large) = &group.large {
            group.abort.add(large.abort_handle());
        }
        if thresholds.is_none()
            && let Err(error) = group.tune(device, collective, measured_most)
        {
            give_up(Box::new(group), &device.stream)?;
            return Err(error.into());
        }
        if let Err(error) = group.reset_clock(device) {
            give_up(Box::new(group), &device.stream)?;
            return Err(error.into());
        }
        Ok(group)
    }
}

/// What a rank allocates before it knows the other ranks' memory.
struct OwnMemory {
    own: DeviceMemory,
    handle: [u8; HANDLE_BYTES],
    table: DeviceMemory,
    words: Arc<SignalWords>,
    clock: Clock,
}

impl OwnMemory {
    fn new(
        device: &Device,
        capabilities: &[Capability],
        rank: usize,
        layout: &Layout,
    ) -> Result<Self, KernelError> {
        for (other, capability) in capabilities.iter().enumerate() {
            if other != rank {
                check_access(&device.context, other, &capability.gpu)?;
            }
        }
        let Device { context, stream, .. } = device;
        let what = "the memory that ranks exchange data by";
        let own = DeviceMemory::zeroed(context, stream, layout.bytes, what)?;
        let table = DeviceMemory::new(context, Table::BYTES, what)?;
        let words = Arc::new(SignalWords::new(context)?);
        let clock = Clock::new(context, layout.spent)?;
        // Ranks of one process need none.
        let is_elsewhere = |other: &Capability| other.process != capabilities[rank].process;
        let handle = match capabilities.iter().any(is_elsewhere) {
            true => handle_of(&own)?,
            false => [0; HANDLE_BYTES],
        };
        // Others may write as soon as they get the handle.
        stream.synchronize()?;
        Ok(Self { own, handle, table, words, clock })
    }
}

/// Every rank's memory, as seen from this rank.
type PeerAddresses = (Vec<DevicePtr>, Vec<Mapped>);

fn open(
    device: &Device,
    capabilities: &[Capability],
    rank: usize,
    offers: &[Vec<u8>],
) -> Result<PeerAddresses, KernelError> {
    let mut mapped = Vec::new();
    let mut places = Vec::new();
    for (other, offer) in offers.iter().enumerate() {
        let (handle, address) = offer.split_at(HANDLE_BYTES);
        if capabilities[other].process == capabilities[rank].process {
            let address = address.first_chunk::<8>().copied().unwrap_or_default();
            places.push(DevicePtr(u64::from_le_bytes(address)));
            continue;
        }
        let handle = handle.first_chunk().copied().unwrap_or([0; HANDLE_BYTES]);
        let memory = Mapped::open(&device.context, &handle)?;
        places.push(memory.ptr());
        mapped.push(memory);
    }
    Ok((places, mapped))
}

/// `TuttiPeers`
struct Table<'a> {
    places: Vec<DevicePtr>,
    layout: &'a Layout,
    made: &'a OwnMemory,
    rank: usize,
    shares_gpu: bool,
}

impl Table<'_> {
    const BYTES: usize = 200;

    fn words(&self, timeout: std::time::Duration) -> Vec<u64> {
        let Self { places, layout, made, rank, shares_gpu } = self;
        let at = |offset: usize| {
            let mut all: Vec<u64> = places.iter().map(|place| place.offset(offset).0).collect();
            all.resize(PEERS_MAX, 0);
            all
        };
        let own = made.own.ptr();
        let (abort, outcome) = made.words.places();
        let pair = |low: usize, high: usize| (low as u64) | (high as u64) << 32;
        let mut words = at(0);
        words.extend(at(layout.flags));
        words.extend([
            own.offset(layout.rounds).0,
            own.offset(layout.failed).0,
            abort.0,
            outcome.0,
            u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX),
            pair(*rank, places.len()),
            pair(PEER_SLOT, PEER_BLOCKS),
            own.offset(layout.spent).0,
            u64::from(*shares_gpu),
        ]);
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_overlaps() {
        for ranks in [2, 4, 8] {
            let layout = Layout::of(ranks);
            let slots = 2 * PEER_BLOCKS * ranks * PEER_SLOT;
            assert_eq!(layout.flags, slots * 4);
            assert!(slots < u32::MAX as usize, "the kernels count elements in 32 bits");
            assert_eq!(layout.rounds - layout.flags, PEER_BLOCKS * ranks * 8);
            assert_eq!(layout.failed - layout.rounds, PEER_BLOCKS * 8);
            assert_eq!(layout.spent - layout.failed, 8);
            assert!(layout.bytes >= layout.spent + 8 && layout.bytes.is_multiple_of(GRANULE));
        }
    }
}
