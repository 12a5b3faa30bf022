//! Heartbeats from a process to whoever started it: a process that exists but does nothing any more
//! (stopped, or stuck in a call that never returns) is killed and restarted.
//!
//! Heartbeats come from the thread that runs the process's actors, not from a dedicated one, which
//! would go on beating in a process that is otherwise dead. A worker started by our own parent
//! process beats into its stdin, a socket whose other end tells it when the parent is gone, and
//! says with each heartbeat whether it is ready; a systemd service with `WatchdogSec=` beats to
//! systemd. Only until that thread runs tasks at all, another one beats in its place: a start may
//! take minutes, and systemd counts from its beginning.
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixStream};
use std::sync::mpsc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{MissedTickBehavior, interval};

/// Interval of a worker's heartbeats and of its parent's checks.
pub(super) const EVERY: Duration = Duration::from_secs(1);
/// A heartbeat, that of a worker that is ready, and the announcement of an end, which may take its
/// time.
const BEAT: u8 = b'.';
const READY: u8 = b'+';
const FAREWELL: u8 = b'!';
/// Checks in a row without a heartbeat after which a process is dead.
const MISSED_CHECKS_MAX: u32 = 10;
/// Checks in a row without a heartbeat after which a process does not count as ready.
const SILENT_CHECKS_MAX: u32 = 3;

/// Resolves when the parent is gone, which the end of stdin shows if `tells`; otherwise never.
/// Sends heartbeats meanwhile, if somebody listens, and says whether this process `is_ready`.
pub(super) async fn parent_gone(tells: bool, is_ready: impl Fn() -> bool + 'static) {
    if !tells {
        return std::future::pending().await;
    }
    let (sender, receiver) = oneshot::channel();
    match stdin_socket() {
        // A separate task: it beats as long as this thread runs tasks, whatever becomes of the one
        // that waits here.
        Some(stream) => drop(actix::spawn(async move {
            beat(stream, is_ready).await;
            let _ = sender.send(());
        })),
        None => drop(std::thread::spawn(move || {
            let mut bytes = [0u8; 64];
            while std::io::stdin().read(&mut bytes).is_ok_and(|n| n > 0) {}
            let _ = sender.send(());
        })),
    }
    drop(receiver.await);
}

/// Announces that this process is about to end: releasing its resources may keep it from beating.
pub(super) fn farewell() {
    if let Some(stream) = stdin_socket() {
        let _ = (&stream).write(&[FAREWELL]);
    }
}

/// Returns stdin, if it is a socket.
fn stdin_socket() -> Option<UnixStream> {
    let stream = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().ok()?);
    // Fails for anything else, to which nothing is written.
    stream.peer_addr().ok()?;
    stream.set_nonblocking(true).ok()?;
    Some(stream)
}

/// Sends heartbeats until the other end is closed.
async fn beat(beats: UnixStream, is_ready: impl Fn() -> bool) {
    let stream = beats.try_clone().and_then(tokio::net::UnixStream::from_std);
    let Ok(stream) = stream else { return std::future::pending().await };
    let mut timer = interval(EVERY);
    timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut bytes = [0u8; 64];
    loop {
        tokio::select! {
            _ = timer.tick() => {
                // A parent that reads nothing is stopped itself: it has enough of them.
                let _ = (&beats).write(&[if is_ready() { READY } else { BEAT }]);
            }
            ready = stream.readable() => {
                let read = ready.and_then(|()| stream.try_read(&mut bytes));
                match read {
                    Ok(0) => return,
                    Ok(_) => {}
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    Err(_) => return,
                }
            }
        }
    }
}

/// The parent's end of the socket: as long as it is open, the child knows that its parent lives.
#[derive(Debug)]
pub(super) struct HeartbeatMonitor {
    stream: UnixStream,
    missed: MissedBeats,
    /// Whether the child has announced its end.
    ends: bool,
    /// Whether its last heartbeat said that it is ready.
    ready: bool,
}

impl HeartbeatMonitor {
    /// Returns the parent's end, and the descriptor for the child's stdin.
    pub(super) fn pair() -> std::io::Result<(Self, OwnedFd)> {
        let (stream, child) = UnixStream::pair()?;
        stream.set_nonblocking(true)?;
        Ok((
            Self { stream, missed: MissedBeats::default(), ends: false, ready: false },
            child.into(),
        ))
    }

    /// Call it every [`EVERY`]; returns whether the child is dead.
    pub(super) fn is_dead(&mut self) -> bool {
        let (mut bytes, mut heard) = ([0u8; 256], false);
        loop {
            match (&self.stream).read(&mut bytes) {
                Ok(0) => return false,
                Ok(n) => {
                    heard = true;
                    self.ends |= bytes[..n].contains(&FAREWELL);
                    self.ready = bytes[..n].last() == Some(&READY);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return self.missed.check(heard) && !self.ends,
            }
        }
    }

    /// Whether the child is ready, as it last said, and still says it.
    pub(super) fn is_ready(&self) -> bool {
        self.ready && self.missed.checks <= SILENT_CHECKS_MAX
    }
}

/// Counts checks without a heartbeat. It counts checks rather than time: a parent that was stopped
/// itself, perhaps with its whole host, has not checked.
#[derive(Debug, Default)]
struct MissedBeats {
    /// Whether the program sends heartbeats at all.
    begun: bool,
    checks: u32,
}

impl MissedBeats {
    fn check(&mut self, heard: bool) -> bool {
        self.begun |= heard;
        self.checks = if heard || !self.begun { 0 } else { self.checks + 1 };
        self.checks >= MISSED_CHECKS_MAX
    }
}

/// systemd's watchdog.
#[derive(Debug)]
struct Watchdog {
    address: SocketAddr,
    every: Duration,
}

impl Watchdog {
    /// Reads the environment; `None` if the watchdog is not meant for this process.
    fn of(variable: impl Fn(&str) -> Option<String>, pid: u32) -> Option<Self> {
        let micros: u64 = variable("WATCHDOG_USEC")?.parse().ok().filter(|micros| *micros > 0)?;
        let is_mine = variable("WATCHDOG_PID").is_none_or(|it| it.parse() == Ok(pid));
        let path = variable("NOTIFY_SOCKET").filter(|_| is_mine)?;
        let address = match path.strip_prefix('@') {
            Some(name) => SocketAddr::from_abstract_name(name),
            None => SocketAddr::from_pathname(&path),
        };
        // The rule is twice within the timeout; a third of it leaves room for a lost one.
        Some(Self { address: address.ok()?, every: Duration::from_micros(micros) / 3 })
    }

    /// Beats for ever, as a task.
    async fn beat(self) {
        let Some(socket) = Self::socket() else { return };
        let mut timer = interval(self.every);
        timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            timer.tick().await;
            self.beat_once(&socket);
        }
    }

    /// Beats on this thread until the other end is dropped.
    fn beat_until(self, over: &mpsc::Receiver<()>) {
        let Some(socket) = Self::socket() else { return };
        loop {
            self.beat_once(&socket);
            if !matches!(over.recv_timeout(self.every), Err(mpsc::RecvTimeoutError::Timeout)) {
                return;
            }
        }
    }

    fn socket() -> Option<UnixDatagram> {
        let socket = UnixDatagram::unbound().ok()?;
        socket.set_nonblocking(true).ok()?;
        Some(socket)
    }

    fn beat_once(&self, socket: &UnixDatagram) {
        let _ = socket.send_to_addr(b"WATCHDOG=1", &self.address);
    }
}

/// Heartbeats to systemd, if it wants them, from a thread of its own until this is dropped.
#[derive(Debug)]
pub(super) struct StartUpBeats {
    /// While it is there, the thread goes on.
    _lasts: Option<mpsc::Sender<()>>,
}

impl StartUpBeats {
    /// Begins; to be dropped when the main thread runs tasks.
    pub(super) fn start() -> Self {
        Self::of(Watchdog::of(|name| std::env::var(name).ok(), std::process::id()))
    }

    fn of(watchdog: Option<Watchdog>) -> Self {
        let Some(watchdog) = watchdog else { return Self { _lasts: None } };
        let (lasts, over) = mpsc::channel();
        let thread = std::thread::Builder::new().name("start-up".to_owned());
        // Without a thread, a start must be as quick as systemd wants it.
        let thread = thread.spawn(move || watchdog.beat_until(&over));
        Self { _lasts: thread.ok().map(|_| lasts) }
    }
}

/// Sends heartbeats to systemd, if it wants them, from tasks of this thread.
pub(super) fn beat_to_systemd() {
    if let Some(watchdog) = Watchdog::of(|name| std::env::var(name).ok(), std::process::id()) {
        drop(actix::spawn(watchdog.beat()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_has_beaten_is_dead_after_ten_silent_looks() {
        let mut missed = MissedBeats::default();
        // A program that sends no heartbeats is left alone.
        assert!((0..100).all(|_| !missed.check(false)));
        assert!(!missed.check(true));
        assert!((0..9).all(|_| !missed.check(false)));
        assert!(!missed.check(true), "late, and in time");
        assert!((0..9).all(|_| !missed.check(false)));
        assert!(missed.check(false));
    }

    #[test]
    fn a_parent_hears_beats_that_came_while_it_did_not_look_and_the_end() {
        let (mut monitor, child) = HeartbeatMonitor::pair().unwrap();
        let mut child = UnixStream::from(child);
        child.write_all(b"...").unwrap();
        assert!(!monitor.is_dead());
        assert!((0..9).all(|_| !monitor.is_dead()));
        child.write_all(b".").unwrap();
        assert!(!monitor.is_dead());
        assert!((0..9).all(|_| !monitor.is_dead()));
        assert!(monitor.is_dead());
        assert!(!monitor.is_ready());
        child.write_all(&[BEAT, READY]).unwrap();
        assert!(!monitor.is_dead() && monitor.is_ready());
        assert!((0..3).all(|_| !monitor.is_dead() && monitor.is_ready()));
        assert!(!monitor.is_dead() && !monitor.is_ready(), "it has not said so for a while");
        child.write_all(&[READY, BEAT]).unwrap();
        assert!(!monitor.is_dead() && !monitor.is_ready());
        child.write_all(&[FAREWELL]).unwrap();
        assert!((0..100).all(|_| !monitor.is_dead()), "it ends by itself");
        drop(child);
        assert!((0..100).all(|_| !monitor.is_dead()));
    }

    #[test]
    fn a_worker_beats_until_its_parent_is_gone() {
        let (monitor, child) = HeartbeatMonitor::pair().unwrap();
        let heard = actix::System::new().block_on(async move {
            let child = UnixStream::from(child);
            child.set_nonblocking(true).unwrap();
            let beating = actix::spawn(beat(child, || true));
            tokio::time::sleep(Duration::from_millis(200)).await;
            let mut bytes = [0u8; 8];
            let heard = (&monitor.stream).read(&mut bytes);
            drop(monitor);
            tokio::time::timeout(Duration::from_secs(5), beating).await.unwrap().unwrap();
            heard
        });
        assert_eq!(heard.unwrap(), 1);
    }

    #[test]
    fn systemd_is_told_as_often_as_it_wants() {
        let name = format!("tutti-watchdog-{}", std::process::id());
        let listens = SocketAddr::from_abstract_name(&name).unwrap();
        let listener = UnixDatagram::bind_addr(&listens).unwrap();
        let variables = |micros: &str, pid: &str| {
            let all = [("WATCHDOG_USEC", micros), ("WATCHDOG_PID", pid)];
            let socket = ("NOTIFY_SOCKET", format!("@{name}"));
            let mut all = all.map(|(key, value)| (key, value.to_owned())).to_vec();
            all.push(socket);
            move |wanted: &str| {
                all.iter().find(|(key, _)| *key == wanted).map(|(_, value)| value.clone())
            }
        };
        assert!(Watchdog::of(|_| None, 7).is_none());
        assert!(Watchdog::of(variables("300000", "8"), 7).is_none(), "for another process");
        assert!(Watchdog::of(variables("0", "7"), 7).is_none());
        let watchdog = Watchdog::of(variables("300000", "7"), 7).unwrap();
        assert_eq!(watchdog.every, Duration::from_millis(100));
        listener.set_nonblocking(true).unwrap();
        actix::System::new().block_on(async move {
            let listener = tokio::net::UnixDatagram::from_std(listener).unwrap();
            let beating = actix::spawn(watchdog.beat());
            let heard = async {
                let mut bytes = [0u8; 64];
                for _ in 0..12 {
                    let length = listener.recv(&mut bytes).await.unwrap();
                    assert_eq!(&bytes[..length], b"WATCHDOG=1");
                }
            };
            // Much time for so many, but too little if they come once a second.
            tokio::time::timeout(Duration::from_secs(10), heard).await.unwrap();
            beating.abort();
        });
    }

    #[test]
    fn systemd_hears_of_a_start_that_takes_long_until_it_is_over() {
        let name = format!("tutti-start-up-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let listener = UnixDatagram::bind_addr(&address).unwrap();
        listener.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let beats = StartUpBeats::of(Some(Watchdog { address, every: Duration::from_millis(50) }));
        let mut bytes = [0u8; 64];
        for _ in 0..3 {
            let length = listener.recv(&mut bytes).unwrap();
            assert_eq!(&bytes[..length], b"WATCHDOG=1");
        }
        drop(beats);
        // What was under way, up to a full queue, is over after a while.
        listener.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        let late = (0..40).take_while(|_| listener.recv(&mut bytes).is_ok()).count();
        assert!(late < 40, "it goes on");
    }
}
