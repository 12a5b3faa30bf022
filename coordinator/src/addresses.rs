//! Numbers of connections per party, identified by address: no party takes all places.
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, PoisonError};

/// Number of connections by party, without zeros. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Addresses(Arc<Mutex<HashMap<IpAddr, usize>>>);

impl Addresses {
    /// Returns a place for one more connection of this address's party, if it has fewer than `max`.
    pub(crate) fn try_add(&self, address: IpAddr, max: usize) -> Option<ConnectionSlot> {
        let address = network(address);
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = taken.entry(address).or_default();
        if *count >= max {
            return None;
        }
        *count += 1;
        Some(ConnectionSlot { addresses: self.clone(), address })
    }
}

/// The network that one party owns: for IPv6 a /64.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
        }
        address => address,
    }
}

/// Whether an address belongs to a private network, where one address may stand for many parties: a
/// proxy, a load balancer, an ingress.
pub(crate) fn is_private(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(address) => {
            // 100.64.0.0/10 is shared by providers and overlay networks.
            let [a, b, ..] = address.octets();
            let shared = a == 100 && (64..128).contains(&b);
            address.is_loopback() || address.is_private() || address.is_link_local() || shared
        }
        IpAddr::V6(address) => {
            address.is_loopback() || address.is_unique_local() || address.is_unicast_link_local()
        }
    }
}

/// A connection's place among its party's; freed when dropped.
#[derive(Debug)]
pub(crate) struct ConnectionSlot {
    addresses: Addresses,
    address: IpAddr,
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let mut taken = self.addresses.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = taken.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                taken.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_its_share_of_places_and_no_more() {
        const MAX: usize = 64;
        let addresses = Addresses::default();
        let enter = |address: &str| addresses.try_add(address.parse().unwrap(), MAX);
        let mut places: Vec<ConnectionSlot> = Vec::new();
        for _ in 0..MAX {
            places.push(enter("10.0.0.1").unwrap());
        }
        assert!(enter("10.0.0.1").is_none() && enter("::ffff:10.0.0.1").is_none());
        let other = enter("10.0.0.2").unwrap();
        places.pop();
        let again = enter("10.0.0.1").unwrap();
        assert!(enter("10.0.0.1").is_none());
        // An IPv6 network is one party.
        let six: Vec<ConnectionSlot> =
            (0..MAX).map(|host| enter(&format!("2001:db8:1:2::{host:x}")).unwrap()).collect();
        assert!(enter("2001:db8:1:2:ffff::").is_none() && enter("2001:db8:1:3::").is_some());
        drop((places, other, again, six));
        assert!(addresses.0.lock().unwrap().is_empty());
    }

    #[test]
    fn addresses_of_private_networks_are_known() {
        for (address, private) in [
            ("127.8.0.1", true),
            ("10.1.2.3", true),
            ("172.31.0.1", true),
            ("172.32.0.1", false),
            ("192.168.9.9", true),
            ("169.254.1.1", true),
            ("100.64.0.1", true),
            ("100.128.0.1", false),
            ("8.8.8.8", false),
            ("::1", true),
            ("::ffff:10.0.0.1", true),
            ("::ffff:8.8.8.8", false),
            ("fd00::1", true),
            ("fe80::1", true),
            ("2001:db8::1", false),
        ] {
            assert_eq!(is_private(address.parse().unwrap()), private, "{address}");
        }
    }
}
