//! Ranks on different hosts: a TCP connection between each pair.
//!
//! Meant for trying out a cluster on CPUs, not for speed: every rank sends its words to every
//! other. `rendezvous` is how the ranks find each other.
#![allow(unsafe_code, reason = "poll(2)")]
mod rendezvous;

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::exchange::{Exchange, Op, Transport};
use super::{AbortHandle, Collective};
use crate::error::CollectiveError;

/// Bytes before a round's words: operation and number of words, 4 bytes each.
const HEADER: usize = 8;
/// Maximum number of words per round.
const ROUND_WORDS: usize = 256 * 1024;
/// Time to wait before checking the abort flag and the deadline.
const SLICE: Duration = Duration::from_millis(20);

/// Options of a connection.
#[derive(Clone, Debug)]
pub struct TcpOptions<'a> {
    /// Listener of this rank; already bound, and usable again afterwards.
    pub listener: &'a TcpListener,
    /// Every rank's address, in rank order.
    pub ranks: &'a [SocketAddr],
    /// This rank.
    pub rank: u32,
    /// Distinguishes this group from others and from its own earlier formations.
    pub token: u64,
    /// Deadline for connecting, and for every round of an operation.
    pub timeout: Duration,
}

/// Connects this process as one rank. Returns when all ranks are connected, or soon after
/// `is_given_up` returns true.
///
/// # Errors
/// [`CollectiveError::Setup`] naming the rank that cannot be reached; [`CollectiveError::Aborted`].
pub fn tcp(
    options: &TcpOptions<'_>,
    is_given_up: &dyn Fn() -> bool,
) -> Result<Box<dyn Collective>, CollectiveError> {
    let ranks = options.ranks.len();
    if options.rank as usize >= ranks {
        let message = format!("rank {} of {ranks}", options.rank);
        return Err(CollectiveError::Setup(message));
    }
    let deadline = Instant::now() + options.timeout;
    let peers = rendezvous::meet(options, deadline, is_given_up)?;
    let streams = peers.iter().flatten().map(|peer| peer.stream.try_clone()).collect();
    let streams: Vec<TcpStream> = io::Result::from_iter(Vec::into_iter(streams))
        .map_err(|error| CollectiveError::Setup(error.to_string()))?;
    let abort = Arc::new(TcpAbort { aborted: AtomicBool::new(false), streams });
    Ok(Box::new(Exchange::new(Mesh {
        peers,
        rank: options.rank as usize,
        timeout: options.timeout,
        abort,
        words: Vec::new(),
        theirs: Vec::new(),
        waits: Vec::with_capacity(ranks),
    })))
}

/// Another rank, and the progress of this round's transfers to and from it.
#[derive(Debug)]
struct Peer {
    stream: TcpStream,
    sent: usize,
    received: Vec<u8>,
    arrived: usize,
}

impl Peer {
    /// Takes a connection that both sides have confirmed.
    fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self { stream, sent: 0, received: Vec::new(), arrived: 0 })
    }
}

#[derive(Debug)]
struct TcpAbort {
    aborted: AtomicBool,
    streams: Vec<TcpStream>,
}

impl AbortHandle for TcpAbort {
    fn abort(&self) {
        self.aborted.store(true, Ordering::Release);
        for stream in &self.streams {
            // Also releases the other side: it reads the end of the stream.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// All connections of one rank.
#[derive(Debug)]
struct Mesh {
    peers: Vec<Option<Peer>>,
    rank: usize,
    timeout: Duration,
    abort: Arc<TcpAbort>,
    /// This round's bytes to every peer: header and words.
    words: Vec<u8>,
    /// Scratch: the words of one peer.
    theirs: Vec<u32>,
    /// Scratch: file descriptors to poll.
    waits: Vec<libc::pollfd>,
}

impl Mesh {
    fn lost(&self, rank: usize, error: &io::Error) -> CollectiveError {
        if self.abort.aborted.load(Ordering::Acquire) {
            return CollectiveError::Aborted;
        }
        self.abort.abort();
        CollectiveError::LinkLost { rank: rank as u32, message: error.to_string() }
    }

    /// Transfers as much as possible without blocking; returns (anything transferred, all done).
    fn advance(&mut self) -> Result<(bool, bool), CollectiveError> {
        let (mut moved, mut done) = (false, true);
        for rank in 0..self.peers.len() {
            let Some(peer) = &mut self.peers[rank] else { continue };
            let mut result = Ok(0);
            if peer.sent < self.words.len() {
                result = progress(peer.stream.write(&self.words[peer.sent..]));
                peer.sent += *result.as_ref().unwrap_or(&0);
            }
            let sent = *result.as_ref().unwrap_or(&0);
            if result.is_ok() && peer.arrived < peer.received.len() {
                result = progress(peer.stream.read(&mut peer.received[peer.arrived..]));
                peer.arrived += *result.as_ref().unwrap_or(&0);
            }
            moved |= sent + *result.as_ref().unwrap_or(&0) > 0;
            done &= peer.sent == self.words.len() && peer.arrived == peer.received.len();
            if let Err(error) = result {
                return Err(self.lost(rank, &error));
            }
        }
        Ok((moved, done))
    }

    /// Waits until some connection is ready.
    fn wait(&mut self) {
        let fds = &mut self.waits;
        fds.clear();
        for peer in self.peers.iter().flatten() {
            let mut events = 0;
            if peer.sent < self.words.len() {
                events |= libc::POLLOUT;
            }
            if peer.arrived < peer.received.len() {
                events |= libc::POLLIN;
            }
            if events != 0 {
                fds.push(libc::pollfd { fd: peer.stream.as_raw_fd(), events, revents: 0 });
            }
        }
        let slice = SLICE.as_millis() as libc::c_int;
        // SAFETY: the array is valid for its length during the call.
        unsafe {
            libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, slice);
        }
    }
}

/// Number of bytes transferred; 0 if the connection is not ready, an error if it has ended.
fn progress(moved: io::Result<usize>) -> io::Result<usize> {
    match moved {
        Ok(0) => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the connection was closed")),
        Ok(n) => Ok(n),
        Err(error)
            if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) =>
        {
            Ok(0)
        }
        Err(error) => Err(error),
    }
}

impl Transport for Mesh {
    fn rank(&self) -> u32 {
        self.rank as u32
    }

    fn world_size(&self) -> u32 {
        self.peers.len() as u32
    }

    fn round_max(&self) -> usize {
        ROUND_WORDS
    }

    fn round(
        &mut self,
        op: Op,
        mine: &[u32],
        see: &mut dyn FnMut(usize, &[u32]),
    ) -> Result<(), CollectiveError> {
        if self.abort.aborted.load(Ordering::Acquire) {
            return Err(CollectiveError::Aborted);
        }
        self.words.clear();
        self.words.extend_from_slice(&(op as u32).to_le_bytes());
        self.words.extend_from_slice(&(mine.len() as u32).to_le_bytes());
        self.words.extend(mine.iter().flat_map(|word| word.to_le_bytes()));
        for peer in self.peers.iter_mut().flatten() {
            (peer.sent, peer.arrived) = (0, 0);
            peer.received.resize(HEADER + mine.len() * 4, 0);
        }
        let began = Instant::now();
        loop {
            let (moved, done) = self.advance()?;
            if let Some((rank, theirs)) = self.mismatch() {
                self.abort.abort();
                let ours = mine.len() as u64;
                return Err(CollectiveError::Mismatch { op: op.name(), rank, theirs, ours });
            }
            if done {
                break;
            }
            if self.abort.aborted.load(Ordering::Acquire) {
                return Err(CollectiveError::Aborted);
            }
            let waited = began.elapsed();
            if waited >= self.timeout {
                let late = |peer: &Option<Peer>| {
                    peer.as_ref().is_some_and(|peer| peer.arrived < peer.received.len())
                };
                let rank = self.peers.iter().position(late).unwrap_or(self.rank) as u32;
                self.abort.abort();
                return Err(CollectiveError::TimedOut { op: op.name(), waited, rank });
            }
            if !moved {
                self.wait();
            }
        }
        let words = &mut self.theirs;
        for (rank, peer) in self.peers.iter().enumerate() {
            match peer {
                None => see(rank, mine),
                Some(peer) => {
                    words.clear();
                    words.extend(
                        peer.received[HEADER..]
                            .as_chunks::<4>()
                            .0
                            .iter()
                            .map(|bytes| u32::from_le_bytes(*bytes)),
                    );
                    see(rank, words);
                }
            }
        }
        Ok(())
    }

    fn abort_handle(&self) -> Arc<dyn AbortHandle> {
        self.abort.clone()
    }

    fn is_aborted(&self) -> bool {
        self.abort.aborted.load(Ordering::Acquire)
    }
}

impl Mesh {
    /// A rank whose header has arrived and differs from ours: (rank, its number of words).
    fn mismatch(&self) -> Option<(u32, u64)> {
        let differs =
            |peer: &Peer| peer.arrived >= HEADER && peer.received[..HEADER] != self.words[..HEADER];
        let peer = |(rank, peer): (usize, &Option<Peer>)| {
            let peer = peer.as_ref().filter(|peer| differs(peer))?;
            let len = peer.received[4..HEADER].as_chunks::<4>().0.first()?;
            Some((rank as u32, u64::from(u32::from_le_bytes(*len))))
        };
        self.peers.iter().enumerate().find_map(peer)
    }
}
