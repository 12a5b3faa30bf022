//! How many connections each address has, and how long: one that opens all that there are keeps
//! nobody else out.
use std::any::Any;
use std::net::{IpAddr, Shutdown};
use std::time::Duration;

use actix_tls::accept::rustls_0_23::TlsStream;
use actix_web::dev::Extensions;
use actix_web::rt::net::{TcpStream, UnixStream};
use socket2::SockRef;

use super::kept::Kept;
use super::options::{CONNECTIONS_PER_ADDRESS, ConnectionBound};
use crate::addresses::{Addresses, ConnectionSlot, is_private};
use crate::metrics::FrontendStats;

/// How long a connection is kept after an answer, for another request.
pub(super) const KEPT: Duration = Duration::from_secs(75);
/// How long a request's head may take.
pub(super) const HEAD_DEADLINE: Duration = Duration::from_secs(5);

/// The connections of a server. Clones share them.
#[derive(Clone, Debug)]
pub struct Connections {
    addresses: Addresses,
    bound: ConnectionBound,
    /// When nothing was asked for so long, a connection ends.
    kept: Duration,
}

impl Default for Connections {
    fn default() -> Self {
        Self::new(ConnectionBound::default())
    }
}

/// A connection's place, for as long as it lives.
#[derive(Debug)]
struct Counted(#[expect(dead_code, reason = "what counts is when it is dropped")] ConnectionSlot);

impl Connections {
    /// Starts without connections.
    #[must_use]
    pub fn new(bound: ConnectionBound) -> Self {
        Self { addresses: Addresses::default(), bound, kept: KEPT + HEAD_DEADLINE }
    }

    /// With another time that a connection may be without a request; for tests.
    #[must_use]
    pub fn kept_for(self, kept: Duration) -> Self {
        Self { kept, ..self }
    }

    /// Returns how many connections this address may have, if they are counted.
    fn most(&self, address: IpAddr) -> Option<usize> {
        let max = match self.bound {
            ConnectionBound::OfInternet if is_private(address) => return None,
            ConnectionBound::OfInternet => CONNECTIONS_PER_ADDRESS,
            ConnectionBound::Of(0) => return None,
            ConnectionBound::Of(max) => max,
        };
        usize::try_from(max).ok()
    }

    /// Counts a connection that was accepted, or ends it at once.
    pub(super) fn take(&self, stream: &dyn Any, data: &mut Extensions, stats: &FrontendStats) {
        if let Some(stream) = stream.downcast_ref::<UnixStream>() {
            // Its other end is on this host, and has no address.
            Kept::watch(&SockRef::from(stream), data, self.kept);
            return;
        }
        let Some(stream) = tcp(stream) else { return };
        Kept::watch(&SockRef::from(stream), data, self.kept);
        let Ok(peer) = stream.peer_addr() else { return };
        let Some(max) = self.most(peer.ip()) else { return };
        match self.addresses.try_add(peer.ip(), max) {
            Some(place) => {
                data.insert(Counted(place));
            }
            None => {
                stats.connection_refused();
                tracing::debug!(%peer, max, "a connection was refused: its address has as many");
                let _ = SockRef::from(stream).shutdown(Shutdown::Both);
            }
        }
    }
}

/// Returns the socket under a connection, with or without TLS.
fn tcp(stream: &dyn Any) -> Option<&TcpStream> {
    let tls = stream.downcast_ref::<TlsStream<TcpStream>>();
    tls.map(|tls| tls.get_ref().0).or_else(|| stream.downcast_ref())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_be_a_proxy_is_not_counted_unless_a_bound_is_given() {
        let most = |bound, address: &str| Connections::new(bound).most(address.parse().unwrap());
        let default = ConnectionBound::default();
        assert_eq!(most(default, "8.8.8.8"), Some(256));
        for private in ["127.0.0.1", "10.0.0.1", "::ffff:192.168.1.1", "fd00::1"] {
            assert_eq!(most(default, private), None, "{private}");
        }
        assert_eq!(most(ConnectionBound::Of(9), "10.0.0.1"), Some(9));
        assert_eq!(most(ConnectionBound::Of(9), "127.0.0.1"), Some(9));
        assert_eq!(most(ConnectionBound::Of(0), "8.8.8.8"), None);
    }
}
