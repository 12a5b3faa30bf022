//! How ranks find each other: each dials the ranks below it and accepts those above it.
//!
//! The dialling rank sends a greeting, and is connected once its token comes back. Until then the
//! connection may belong to an earlier formation of the other rank, which drops it; the rank then
//! dials again. The accepting rank reads whatever has arrived and never waits for a single
//! connection, so that strangers cannot hold it up; their time and number are bounded.
use std::collections::VecDeque;
use std::io::{self, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use super::{Peer, SLICE, TcpOptions, progress};
use crate::error::CollectiveError;

/// First bytes of a connection; rank, number of ranks and token follow, 8 bytes each.
const MAGIC: [u8; 8] = *b"TUTICOL2";
const GREETING: usize = 32;
/// Maximum duration of one attempt to reach a rank.
const ATTEMPT: Duration = Duration::from_secs(1);
/// Deadline for a connection's whole greeting.
const GREETING_DEADLINE: Duration = Duration::from_secs(1);
/// Maximum number of connections that have not greeted yet, in addition to one per rank.
const STRANGERS_MAX: usize = 64;

fn setup(rank: usize, error: &dyn std::fmt::Display) -> CollectiveError {
    CollectiveError::Setup(format!("rank {rank}: {error}"))
}

/// Connects to every other rank; this rank's own entry stays empty.
pub(super) fn meet(
    options: &TcpOptions<'_>,
    deadline: Instant,
    is_given_up: &dyn Fn() -> bool,
) -> Result<Vec<Option<Peer>>, CollectiveError> {
    let mut peers: Vec<Option<Peer>> = options.ranks.iter().map(|_| None).collect();
    for (rank, peer) in peers.iter_mut().enumerate().take(options.rank as usize) {
        let stream = dial(options, rank, deadline, is_given_up)?;
        *peer = Some(Peer::new(stream).map_err(|error| setup(rank, &error))?);
    }
    accept(options, &mut peers, deadline, is_given_up)?;
    Ok(peers)
}

fn dial(
    options: &TcpOptions<'_>,
    rank: usize,
    deadline: Instant,
    is_given_up: &dyn Fn() -> bool,
) -> Result<TcpStream, CollectiveError> {
    let address = options.ranks[rank];
    loop {
        if is_given_up() {
            return Err(CollectiveError::Aborted);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let left = left.clamp(Duration::from_millis(1), ATTEMPT);
        let dialled = TcpStream::connect_timeout(&address, left)
            .and_then(|stream| introduced(options, stream, deadline, is_given_up));
        match dialled {
            Ok(stream) => return Ok(stream),
            Err(error) if Instant::now() >= deadline => {
                return Err(setup(rank, &format!("cannot reach {address}: {error}")));
            }
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// Sends the greeting and waits for the token. Does not give up a connection before the deadline
/// while the other side keeps it open, since that side may be about to accept it.
fn introduced(
    options: &TcpOptions<'_>,
    mut stream: TcpStream,
    deadline: Instant,
    is_given_up: &dyn Fn() -> bool,
) -> io::Result<TcpStream> {
    stream.set_nodelay(true)?;
    stream.write_all(&greeting(options, options.rank))?;
    stream.set_read_timeout(Some(SLICE))?;
    let (mut answer, mut filled) = ([0u8; 8], 0);
    while filled < answer.len() {
        if is_given_up() || Instant::now() >= deadline {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "it does not answer"));
        }
        filled += progress(stream.read(&mut answer[filled..]))?;
    }
    if u64::from_le_bytes(answer) != options.token {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it belongs to another group"));
    }
    Ok(stream)
}

fn greeting(options: &TcpOptions<'_>, rank: u32) -> [u8; GREETING] {
    let mut greeting = [0u8; GREETING];
    greeting[..8].copy_from_slice(&MAGIC);
    greeting[8..16].copy_from_slice(&u64::from(rank).to_le_bytes());
    greeting[16..24].copy_from_slice(&(options.ranks.len() as u64).to_le_bytes());
    greeting[24..].copy_from_slice(&options.token.to_le_bytes());
    greeting
}

/// Accepts the connections of the ranks above this one; drops strangers.
fn accept(
    options: &TcpOptions<'_>,
    peers: &mut [Option<Peer>],
    deadline: Instant,
    is_given_up: &dyn Fn() -> bool,
) -> Result<(), CollectiveError> {
    let own = options.rank as usize;
    let failed = |error: io::Error| CollectiveError::Setup(format!("cannot accept: {error}"));
    options.listener.set_nonblocking(true).map_err(failed)?;
    let mut pending_connections =
        PendingConnections { waiting: VecDeque::new(), most: peers.len() + STRANGERS_MAX };
    while let Some(missing) = (own + 1..peers.len()).find(|rank| peers[*rank].is_none()) {
        if is_given_up() {
            return Err(CollectiveError::Aborted);
        }
        if Instant::now() >= deadline {
            let message = format!("did not connect within {:?}", options.timeout);
            return Err(setup(missing, &message));
        }
        let came = pending_connections.let_in(options.listener).map_err(failed)?;
        pending_connections.hear(options, |rank, stream| {
            // A rank that dials again has lost its earlier connection: the last one counts.
            peers[rank] = Some(Peer::new(stream)?);
            Ok(())
        });
        if !came {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    Ok(())
}

/// Connections that have not greeted in full, oldest first.
struct PendingConnections {
    waiting: VecDeque<Pending>,
    most: usize,
}

struct Pending {
    stream: TcpStream,
    greeting: [u8; GREETING],
    filled: usize,
    since: Instant,
}

impl PendingConnections {
    /// Accepts a connection, if there is one; drops the oldest if too many are waiting.
    fn let_in(&mut self, listener: &TcpListener) -> io::Result<bool> {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            // Some of these errors persist, such as a network that is down: do not retry
            // immediately.
            Err(error) if is_of_one_connection(&error) => return Ok(false),
            Err(error) => return Err(error),
        };
        if stream.set_nonblocking(true).is_ok() && stream.set_nodelay(true).is_ok() {
            if self.waiting.len() == self.most {
                self.waiting.pop_front();
            }
            let (greeting, since) = ([0; GREETING], Instant::now());
            self.waiting.push_back(Pending { stream, greeting, filled: 0, since });
        }
        Ok(true)
    }

    /// Reads what has arrived. Ranks that have greeted go to `install` and get their answer;
    /// strangers and slow connections are dropped.
    fn hear(
        &mut self,
        options: &TcpOptions<'_>,
        mut install: impl FnMut(usize, TcpStream) -> io::Result<()>,
    ) {
        for _ in 0..self.waiting.len() {
            let Some(mut pending) = self.waiting.pop_front() else { return };
            if pending.read().is_err() {
                continue;
            }
            if pending.filled < GREETING {
                if pending.since.elapsed() < GREETING_DEADLINE {
                    self.waiting.push_back(pending);
                }
                continue;
            }
            let Some(rank) = pending.rank(options) else { continue };
            let mut stream = pending.stream;
            // A few bytes always fit into the send buffer of an unused connection. If this fails,
            // it fails for the other side as well, which dials again.
            if stream.write_all(&options.token.to_le_bytes()).is_ok() {
                let _ = install(rank, stream);
            }
        }
    }
}

impl Pending {
    /// Reads what has arrived; fails if the connection has ended or is not a greeting.
    fn read(&mut self) -> io::Result<()> {
        while self.filled < GREETING {
            let count = progress(self.stream.read(&mut self.greeting[self.filled..]))?;
            if count == 0 {
                break;
            }
            self.filled += count;
        }
        let known = self.filled.min(MAGIC.len());
        if self.greeting[..known] == MAGIC[..known] {
            return Ok(());
        }
        Err(io::Error::new(io::ErrorKind::InvalidData, "not a greeting"))
    }

    /// The rank that has greeted, if it is above this one and in this group.
    fn rank(&self, options: &TcpOptions<'_>) -> Option<usize> {
        let behind = options.rank + 1..options.ranks.len() as u32;
        let rank = behind.into_iter().find(|rank| self.greeting == greeting(options, *rank))?;
        Some(rank as usize)
    }
}

/// Whether accepting failed only for one connection, so that the next can succeed: the errors for
/// which `accept(2)` recommends to retry.
fn is_of_one_connection(error: &io::Error) -> bool {
    let known = [
        libc::ECONNABORTED,
        libc::EINTR,
        libc::EPROTO,
        libc::ENETDOWN,
        libc::ENOPROTOOPT,
        libc::EHOSTDOWN,
        libc::ENONET,
        libc::EHOSTUNREACH,
        libc::EOPNOTSUPP,
        libc::ENETUNREACH,
    ];
    error.raw_os_error().is_some_and(|code| known.contains(&code))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_connections_failure_is_told_from_the_listeners() {
        let is_passing = |code| is_of_one_connection(&io::Error::from_raw_os_error(code));
        assert!([libc::ECONNABORTED, libc::EINTR, libc::EPROTO].map(is_passing) == [true; 3]);
        assert!([libc::EMFILE, libc::EBADF, libc::EINVAL].map(is_passing) == [false; 3]);
    }

    #[test]
    fn the_oldest_goes_where_too_many_wait() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut pending_connections = PendingConnections { waiting: VecDeque::new(), most: 2 };
        let dialled: Vec<TcpStream> = (0..3)
            .map(|_| {
                let stream = TcpStream::connect(address).unwrap();
                assert!(pending_connections.let_in(&listener).unwrap());
                stream
            })
            .collect();
        let names = |stream: &TcpStream| stream.local_addr().unwrap();
        let left: Vec<_> =
            pending_connections.waiting.iter().map(|one| one.stream.peer_addr().unwrap()).collect();
        assert_eq!(left, [names(&dialled[1]), names(&dialled[2])]);
    }
}
