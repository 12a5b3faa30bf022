//! A coordinator, workers and front ends as separate processes, as on several machines.
use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::client::Client;
use crate::local_cluster::{LocalCluster, little_cache};

/// Processes of one cluster. Killed on drop.
#[derive(Debug)]
pub struct Fleet {
    /// The coordinator.
    pub coordinator: LocalCluster,
    /// The workers.
    pub workers: Vec<LocalCluster>,
    /// The front ends.
    pub frontends: Vec<LocalCluster>,
    address: String,
}

/// A port that was free a moment ago. Linux gives none below 32768 to whoever asks for any port, so
/// nobody gets this one by chance before it is used.
#[must_use]
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // Processes of tests that run at the same time begin at different places.
    let start = std::process::id().wrapping_mul(997);
    let ports = (0..20_000).map(|_| NEXT.fetch_add(1, Ordering::Relaxed).wrapping_add(start));
    let mut ports = ports.map(|number| 12_000 + (number % 20_000) as u16);
    ports.find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()).unwrap_or(0)
}

impl Fleet {
    /// Starts a coordinator with `args`, `workers` workers and `frontends` front ends, and waits
    /// until all front ends are ready, or the coordinator if there are none.
    ///
    /// # Errors
    /// The output of a process that did not become ready.
    pub async fn start(args: &[&str], workers: u32, frontends: u32) -> Result<Self, String> {
        let address = format!("127.0.0.1:{}", free_port());
        let mut all = vec!["coordinator", "--listen", "127.0.0.1:0", "--cluster-listen", &address];
        all.extend(args);
        all.extend(little_cache(args));
        let mut coordinator = LocalCluster::spawn(&all)?;
        let spawn = |index| spawn_worker(&address, index);
        let workers = (0..workers).map(spawn).collect::<Result<_, _>>()?;
        coordinator.wait_ready().await?;
        let mut fleet = Self { coordinator, workers, frontends: Vec::new(), address };
        for index in 0..frontends {
            let frontend = fleet.spawn_frontend(&format!("frontend-{index}"))?;
            fleet.frontends.push(frontend);
        }
        for frontend in &mut fleet.frontends {
            frontend.wait_ready().await?;
        }
        Ok(fleet)
    }

    /// Restarts worker `index`, which takes its old slot.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn restart_worker(&mut self, index: u32) -> Result<(), String> {
        self.workers[index as usize] = spawn_worker(&self.address, index)?;
        Ok(())
    }

    /// Starts another front end named `node`.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn_frontend(&self, node: &str) -> Result<LocalCluster, String> {
        let (listen, address) = ("127.0.0.1:0", self.address.as_str());
        let args = ["frontend", "--coordinator", address, "--listen", listen, "--node", node];
        LocalCluster::spawn(&args)
    }

    /// The address that workers and front ends dial.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// A client of the coordinator.
    ///
    /// # Errors
    /// When the HTTP client cannot be created.
    pub fn client(&self) -> Result<Client, String> {
        self.coordinator.client()
    }

    /// Clients of the front ends.
    ///
    /// # Errors
    /// When an HTTP client cannot be created.
    pub fn frontend_clients(&self) -> Result<Vec<Client>, String> {
        self.frontends.iter().map(LocalCluster::client).collect()
    }
}

fn spawn_worker(address: &str, index: u32) -> Result<LocalCluster, String> {
    let node = format!("worker-{index}");
    let args = ["worker", "--coordinator", address, "--node", &node, "--threads", "1"];
    LocalCluster::spawn(&args)
}
