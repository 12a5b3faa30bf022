//! Ends connections on which nothing is asked. actix-web bounds how long one is silent after an
//! answer, and how long the head of its first request takes, but not that of a later one: its first
//! byte ends the silence.
use std::net::Shutdown;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use actix_web::dev::Extensions;
use actix_web::rt;
use socket2::{SockRef, Socket};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

/// What is asked on a connection.
#[derive(Clone, Copy, Debug)]
struct Asked {
    /// Requests that have no whole answer yet.
    requests: usize,
    /// When the last one ended, or the connection began.
    since: Instant,
}

impl Asked {
    /// How long the connection stays at least; `None` when its time is over.
    fn left(&self, now: Instant, max: Duration) -> Option<Duration> {
        if self.requests > 0 {
            return Some(max);
        }
        max.checked_sub(now.saturating_duration_since(self.since)).filter(|left| !left.is_zero())
    }
}

#[derive(Debug)]
struct Connection {
    /// The same connection: to end it from here.
    socket: Socket,
    asked: Mutex<Asked>,
}

impl Connection {
    fn change(&self, change: impl FnOnce(&mut Asked)) {
        change(&mut self.asked.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn left(&self, max: Duration) -> Option<Duration> {
        let asked = *self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        asked.left(Instant::now(), max)
    }
}

/// Among a connection's data, for as long as it lives.
#[derive(Debug)]
pub(super) struct Kept {
    connection: Arc<Connection>,
    watch: JoinHandle<()>,
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.watch.abort();
    }
}

impl Kept {
    /// Begins to watch a connection, which ends when nothing was asked for so long.
    pub(super) fn watch(socket: &SockRef<'_>, data: &mut Extensions, max: Duration) {
        let socket = match socket.try_clone() {
            Ok(socket) => socket,
            // There are no more files: the connection is not bounded by this.
            Err(error) => {
                tracing::debug!(%error, "a connection cannot be watched");
                return;
            }
        };
        let asked = Mutex::new(Asked { requests: 0, since: Instant::now() });
        let connection = Arc::new(Connection { socket, asked });
        // What it holds itself would keep the connection open.
        let weak = Arc::downgrade(&connection);
        let watch = rt::spawn(async move {
            while let Some(left) = weak.upgrade().map(|it| it.left(max)) {
                match left {
                    Some(left) => sleep(left).await,
                    None => {
                        let ended = weak.upgrade().map(|it| it.socket.shutdown(Shutdown::Both));
                        tracing::debug!(?ended, "nothing was asked on a connection for too long");
                        return;
                    }
                }
            }
        });
        data.insert(Self { connection, watch });
    }

    /// A request on it that is being answered, until it is dropped.
    pub(super) fn turn(&self) -> Turn {
        self.connection.change(|asked| asked.requests += 1);
        Turn(self.connection.clone())
    }
}

/// See [`Kept::turn`].
#[derive(Debug)]
pub(super) struct Turn(Arc<Connection>);

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.change(|asked| {
            asked.requests = asked.requests.saturating_sub(1);
            asked.since = Instant::now();
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_runs_while_nothing_is_asked() {
        let since = Instant::now();
        let (max, second) = (Duration::from_secs(80), Duration::from_secs(1));
        let idle = Asked { requests: 0, since };
        assert_eq!(idle.left(since, max), Some(max));
        assert_eq!(idle.left(since + 79 * second, max), Some(second));
        for late in [80, 81, 8000] {
            assert_eq!(idle.left(since + late * second, max), None, "{late}");
        }
        let busy = Asked { requests: 1, since };
        assert_eq!(busy.left(since + 8000 * second, max), Some(max));
    }
}
