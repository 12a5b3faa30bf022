//! Ranks that share memory: threads of one process, or processes of one host.
//!
//! # Protocol
//! Every rank has two slots, used by even and odd rounds in turn, and a round counter. In round `r`
//! a rank writes its words into its slot `r % 2`, sets its counter to `r` (release), waits until
//! every rank's counter is at least `r` (acquire), and reads all slots `r % 2`.
//!
//! - A slot is read only after acquiring the owner's release of `r`, so the reader sees what was
//!   written.
//! - A slot is written again in round `r + 2`, after all counters have reached `r + 1`. A rank sets
//!   its counter to `r + 1` only after it has read round `r`, so no rank still reads the slot.
//!
//! A waiting rank first spins, then sleeps on the counter's futex, in slices, between which it
//! checks the abort word, the deadline and the peer's process.
#![allow(unsafe_code, reason = "memory that other threads and processes write")]
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::AbortHandle;
use super::exchange::{Op, Transport};
use crate::error::CollectiveError;

/// Maximum number of ranks in a region.
pub(super) const RANKS_MAX: usize = 64;
/// Words per slot: a message of 128 KiB takes one round.
pub(super) const SLOT_WORDS: usize = 32 * 1024;
/// Time to spin before sleeping, if every rank has a core.
const SPIN: Duration = Duration::from_micros(30);
/// Time to sleep before the next check.
const SLICE: Duration = Duration::from_millis(20);

/// One rank's part of the header, on separate cache lines.
#[repr(C, align(128))]
struct RankHeader {
    /// Last round that this rank has written.
    round: AtomicU32,
    /// Number of ranks sleeping on `round`.
    sleepers: AtomicU32,
    /// Process id of the rank; 0 for threads.
    pid: AtomicU32,
    /// Operation (high half) and number of words of the last rounds, by parity.
    tag: [AtomicU64; 2],
}

/// The header at the beginning of a region.
#[repr(C, align(128))]
pub(super) struct Header {
    /// [`MAGIC`] once the creator has initialised the rest.
    pub(super) magic: AtomicU64,
    /// Number of ranks that have mapped the region.
    pub(super) attached: AtomicU32,
    /// Nonzero if the group was aborted and every rank must leave.
    aborted: AtomicU32,
    ranks: [RankHeader; RANKS_MAX],
}

/// Identifies a region of this layout.
pub(super) const MAGIC: u64 = 0x7475_7474_6932_0001;

/// Size in bytes of a region for `ranks` ranks.
pub(super) const fn region_bytes(ranks: usize) -> usize {
    size_of::<Header>() + ranks * 2 * SLOT_WORDS * 4
}

/// Memory of a region: aligned for [`Header`], initially zero, valid as long as the value lives.
///
/// # Safety
/// `base` must return the same address each time. It must be valid for [`region_bytes`] of its
/// ranks and shared only by the ranks of the group.
pub(super) unsafe trait RegionMemory: Send + Sync + fmt::Debug + 'static {
    fn base(&self) -> *mut u8;
}

/// One rank's view of a region.
#[derive(Debug)]
pub(super) struct Region<M> {
    memory: Arc<M>,
    rank: usize,
    ranks: usize,
    round: u32,
    timeout: Duration,
    spin: Duration,
}

impl<M: RegionMemory> Region<M> {
    pub(super) fn new(memory: Arc<M>, rank: usize, ranks: usize, timeout: Duration) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let spin = if ranks <= cores { SPIN } else { Duration::ZERO };
        Self { memory, rank, ranks, round: 0, timeout, spin }
    }

    /// Publishes this rank's process id, so that other ranks notice when it ends.
    pub(super) fn announce(&self, pid: u32) {
        header(&*self.memory).ranks[self.rank].pid.store(pid, Ordering::Release);
    }

    fn slot(&self, rank: usize, parity: usize) -> *mut u32 {
        let offset = size_of::<Header>() + (rank * 2 + parity) * SLOT_WORDS * 4;
        // SAFETY: `rank < ranks` and `parity < 2`, so the slot lies within `region_bytes(ranks)`.
        unsafe { self.memory.base().add(offset).cast() }
    }

    /// Waits until `rank` has written round `self.round`.
    fn wait(&self, op: Op, rank: usize, began: Instant) -> Result<(), CollectiveError> {
        let header = header(&*self.memory);
        let peer = &header.ranks[rank];
        let arrived = |round: u32| round.wrapping_sub(self.round) < u32::MAX / 2;
        loop {
            let round = peer.round.load(Ordering::Acquire);
            if arrived(round) {
                return Ok(());
            }
            if header.aborted.load(Ordering::Acquire) != 0 {
                return Err(CollectiveError::Aborted);
            }
            let waited = began.elapsed();
            if waited < self.spin {
                std::hint::spin_loop();
                continue;
            }
            if waited >= self.timeout {
                // The group is unusable now: spare the other ranks the wait until their own
                // deadline.
                abort(&*self.memory);
                return Err(CollectiveError::TimedOut { op: op.name(), waited, rank: rank as u32 });
            }
            peer.sleepers.fetch_add(1, Ordering::SeqCst);
            // The rank may have arrived, or the group may have been aborted, before it could see a
            // sleeper.
            if peer.round.load(Ordering::SeqCst) == round
                && header.aborted.load(Ordering::SeqCst) == 0
            {
                futex_wait(&peer.round, round, SLICE.min(self.timeout));
            }
            peer.sleepers.fetch_sub(1, Ordering::SeqCst);
            if waited > SLICE
                && peer.round.load(Ordering::Acquire) == round
                && is_gone(peer.pid.load(Ordering::Acquire))
            {
                abort(&*self.memory);
                let message = "its process has ended".to_owned();
                return Err(CollectiveError::LinkLost { rank: rank as u32, message });
            }
        }
    }
}

impl<M: RegionMemory> Transport for Region<M> {
    fn rank(&self) -> u32 {
        self.rank as u32
    }

    fn world_size(&self) -> u32 {
        self.ranks as u32
    }

    fn round_max(&self) -> usize {
        SLOT_WORDS
    }

    fn round(
        &mut self,
        op: Op,
        mine: &[u32],
        see: &mut dyn FnMut(usize, &[u32]),
    ) -> Result<(), CollectiveError> {
        assert!(mine.len() <= SLOT_WORDS, "a round of {} words", mine.len());
        let header = header(&*self.memory);
        if header.aborted.load(Ordering::Acquire) != 0 {
            return Err(CollectiveError::Aborted);
        }
        self.round = self.round.wrapping_add(1);
        let parity = (self.round % 2) as usize;
        let own = &header.ranks[self.rank];
        // SAFETY: the slot is this rank's, has room (asserted above), and nobody reads it now: see
        // the protocol.
        unsafe {
            std::ptr::copy_nonoverlapping(mine.as_ptr(), self.slot(self.rank, parity), mine.len());
        }
        let tag = (u64::from(op as u32) << 32) | mine.len() as u64;
        own.tag[parity].store(tag, Ordering::Relaxed);
        own.round.store(self.round, Ordering::SeqCst);
        if own.sleepers.load(Ordering::SeqCst) > 0 {
            futex_wake(&own.round);
        }
        let began = Instant::now();
        for rank in 0..self.ranks {
            self.wait(op, rank, began)?;
            let theirs = header.ranks[rank].tag[parity].load(Ordering::Relaxed);
            if theirs != tag {
                abort(&*self.memory);
                let (ours, theirs) = (mine.len() as u64, theirs & u64::from(u32::MAX));
                return Err(CollectiveError::Mismatch {
                    op: op.name(),
                    rank: rank as u32,
                    theirs,
                    ours,
                });
            }
            // SAFETY: the rank's release of this round was acquired, its slot holds `mine.len()`
            // initialised words (its tag is ours) and is not written before we have left the round.
            let words = unsafe { std::slice::from_raw_parts(self.slot(rank, parity), mine.len()) };
            see(rank, words);
        }
        Ok(())
    }

    fn abort_handle(&self) -> Arc<dyn AbortHandle> {
        Arc::new(RegionAbort { memory: self.memory.clone() })
    }

    fn is_aborted(&self) -> bool {
        header(&*self.memory).aborted.load(Ordering::Acquire) != 0
    }
}

#[derive(Debug)]
struct RegionAbort<M> {
    memory: Arc<M>,
}

impl<M: RegionMemory> AbortHandle for RegionAbort<M> {
    fn abort(&self) {
        abort(&*self.memory);
    }
}

pub(super) fn header<M: RegionMemory>(memory: &M) -> &Header {
    // SAFETY: the memory is valid, aligned and large enough by `RegionMemory`'s contract; every
    // field is an atomic, for which any bits are a value.
    unsafe { &*memory.base().cast::<Header>() }
}

fn abort<M: RegionMemory>(memory: &M) {
    let header = header(memory);
    header.aborted.store(1, Ordering::SeqCst);
    for rank in &header.ranks {
        if rank.sleepers.load(Ordering::SeqCst) > 0 {
            futex_wake(&rank.round);
        }
    }
}

/// Whether a process has certainly ended.
fn is_gone(pid: u32) -> bool {
    if pid == 0 || pid == std::process::id() {
        return false;
    }
    // A killed process remains as a zombie (state Z) until its parent reaps it.
    match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['Z', 'X'])),
        Err(error) => error.kind() == std::io::ErrorKind::NotFound,
    }
}

fn futex_wait(word: &AtomicU32, expected: u32, timeout: Duration) {
    let timeout = libc::timespec {
        tv_sec: timeout.as_secs() as libc::time_t,
        tv_nsec: timeout.subsec_nanos().into(),
    };
    // SAFETY: the word is a valid, aligned u32 and the timeout outlives the call. Not the private
    // futex: the word may be shared with other processes.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT,
            expected,
            &raw const timeout,
        );
    }
}

fn futex_wake(word: &AtomicU32) {
    // SAFETY: the word is a valid, aligned u32; waking touches no memory.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX);
    }
}
