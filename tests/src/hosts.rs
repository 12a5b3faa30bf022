//! Simulated hosts on one machine: network namespaces behind a bridge, whose cables can be pulled.
//! Needs root.
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// Hosts that are connected to this machine, and to each other, by a network. Removed on drop.
#[derive(Debug)]
pub struct Hosts {
    /// Distinguishes several networks on one machine.
    name: String,
    subnet: u32,
    count: usize,
}

fn ip(args: &str) -> Result<(), String> {
    let output = Command::new("ip").args(args.split_whitespace()).output();
    let output = output.map_err(|error| format!("ip: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("ip {args}: {}", String::from_utf8_lossy(&output.stderr).trim()))
}

impl Hosts {
    /// Creates `count` hosts.
    ///
    /// # Errors
    /// Why this is not possible: no root, no `ip`, no namespaces.
    pub fn new(count: usize) -> Result<Self, String> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let made = MADE.fetch_add(1, Ordering::Relaxed);
        let process = std::process::id();
        // Interface names have at most 15 characters.
        let name = format!("tt{:x}{made}", process % 0xffff);
        let hosts = Self { name, subnet: (process + made) % 250, count };
        hosts.build()?;
        Ok(hosts)
    }

    fn build(&self) -> Result<(), String> {
        let (name, subnet) = (&self.name, self.subnet);
        ip(&format!("link add {name} type bridge"))?;
        ip(&format!("addr add 10.213.{subnet}.1/24 dev {name}"))?;
        ip(&format!("link set {name} up"))?;
        for host in 0..self.count {
            let space = self.space(host);
            let (outside, inside) = (self.cable(host), format!("{name}i{host}"));
            ip(&format!("netns add {space}"))?;
            ip(&format!("link add {outside} type veth peer name {inside}"))?;
            ip(&format!("link set {inside} netns {space}"))?;
            ip(&format!("link set {outside} master {name} up"))?;
            ip(&format!("-n {space} link set lo up"))?;
            let address = format!("10.213.{subnet}.{}/24", host + 2);
            ip(&format!("-n {space} addr add {address} dev {inside}"))?;
            ip(&format!("-n {space} link set {inside} up"))?;
        }
        Ok(())
    }

    fn space(&self, host: usize) -> String {
        format!("{}-{host}", self.name)
    }

    fn cable(&self, host: usize) -> String {
        format!("{}o{host}", self.name)
    }

    /// This machine's address in the network.
    #[must_use]
    pub fn gateway(&self) -> String {
        format!("10.213.{}.1", self.subnet)
    }

    /// The command prefix that runs a command on a host.
    #[must_use]
    pub fn prefix(&self, host: usize) -> Vec<String> {
        ["ip", "netns", "exec", &self.space(host)].map(str::to_owned).to_vec()
    }

    /// Pulls a host's cable: packets are dropped silently.
    ///
    /// # Errors
    /// The output of `ip`.
    pub fn cut(&self, host: usize) -> Result<(), String> {
        ip(&format!("link set {} down", self.cable(host)))
    }

    /// Plugs the cable in again.
    ///
    /// # Errors
    /// The output of `ip`.
    pub fn mend(&self, host: usize) -> Result<(), String> {
        ip(&format!("link set {} up", self.cable(host)))
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in 0..self.count {
            let _ = ip(&format!("link del {}", self.cable(host)));
            let _ = ip(&format!("netns del {}", self.space(host)));
        }
        let _ = ip(&format!("link del {}", self.name));
    }
}
