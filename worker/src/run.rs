//! Puts a worker together: executor, actor, link; used by `tutti worker` and by tests.
use std::io;
use std::net::{
    IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs as _, UdpSocket,
};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use actix::Actor as _;
use shared::actor::liveness::LivenessConfig;
use shared::clock::{Clock, SystemClock};
use shared::ids::Incarnation;
use shared::membership::CoordinatorAddress;
use shared::metrics::application::Metrics;
use shared::protocol::{DeviceKind, Hello, Rejoin};
use shared::wire::auth::Secret;
use tokio::sync::oneshot;

use crate::actor::{Uplink, WorkerActor, WorkerConfig, WorkerEnd};
use crate::device::DeviceChoice;
use crate::engine_rank::EngineRank;
use crate::executor::Executor;
use crate::outbox::LinkOutbox;

/// How long a worker whose device is lost waits for its messages to leave.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// What `tutti worker` was asked for.
#[derive(Clone, Debug)]
pub struct WorkerOptions {
    /// Where the coordinator is.
    pub coordinator: CoordinatorAddress,
    /// This worker's name.
    pub node: String,
    /// Identifies the host; workers with equal values share memory.
    pub host: String,
    /// What to compute on.
    pub device: DeviceChoice,
    /// Where the TCP collective listens; by default any port of the address from which this host
    /// reaches the coordinator.
    pub collective_listen: Option<SocketAddr>,
    /// This process run.
    pub incarnation: u64,
    /// What the application counts; reported with everything else.
    pub application: Metrics,
    /// The cluster's secret.
    pub secret: Option<Secret>,
    /// NVML's library, when the system's loader does not find it.
    pub nvml: Option<PathBuf>,
}

/// Runs a worker on the current actix system until it ends.
///
/// # Errors
/// When the collective's address cannot be bound or the executor has no thread.
pub async fn run(mut options: WorkerOptions) -> io::Result<WorkerEnd> {
    let listen = match options.collective_listen {
        Some(address) => address,
        None => {
            let coordinator = options.coordinator.other(None).await;
            SocketAddr::new(address_towards(&coordinator.address)?, 0)
        }
    };
    let listener = TcpListener::bind(listen)?;
    let collective_addr = listener.local_addr()?;
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::start());
    let uplink = Uplink::default();
    let (lost, device_lost) = oneshot::channel();
    let outbox =
        LinkOutbox::new(uplink.clone(), options.application, options.nvml).with_device_watch(lost);
    let (device, memory_bytes, threads, executor) = match options.device {
        DeviceChoice::Cpu(device) => {
            let executor = Executor::spawn(move || EngineRank::new(device, listener), outbox)?;
            (DeviceKind::Cpu, available_memory(), device.threads, executor)
        }
        DeviceChoice::Cuda(device) => {
            let memory_bytes = device.memory_free;
            let executor = Executor::spawn(move || EngineRank::new(device, listener), outbox)?;
            (DeviceKind::Cuda, memory_bytes, 1, executor)
        }
    };
    let hello = Hello {
        node: options.node,
        incarnation: Incarnation(options.incarnation),
        host: options.host,
        pid: std::process::id(),
        device,
        threads: u32::try_from(threads).unwrap_or(u32::MAX),
        memory_bytes,
        collective_addr,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        rejoin: Rejoin::default(),
    };
    let config = WorkerConfig {
        coordinator: options.coordinator,
        hello,
        liveness: LivenessConfig::default(),
        clock,
        secret: options.secret,
    };
    let (end, ended) = oneshot::channel();
    WorkerActor::new(config, executor, uplink, end).start();
    let failed = WorkerEnd::Failed { message: "the worker actor is gone".to_owned() };
    tokio::select! {
        end = ended => Ok(end.unwrap_or(failed)),
        Ok(reason) = device_lost => {
            // What was said of it before is still on its way.
            tokio::time::sleep(LAST_WORDS).await;
            Ok(WorkerEnd::DeviceLost { reason })
        }
    }
}

/// The address of this host on the way to `peer`.
///
/// # Errors
/// When `peer` cannot be resolved or there is no way to it.
pub fn address_towards(peer: &str) -> io::Result<IpAddr> {
    let unknown = || {
        let message = format!("the address {peer} cannot be resolved");
        io::Error::new(io::ErrorKind::InvalidInput, message)
    };
    let peer = peer.to_socket_addrs().ok().and_then(|mut all| all.next()).ok_or_else(unknown)?;
    let any: IpAddr =
        if peer.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    // Connecting a datagram socket sends nothing; it only chooses the way.
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(peer)?;
    Ok(socket.local_addr()?.ip())
}

/// Memory that could be had without swapping, in bytes; 0 where the system does not say.
fn available_memory() -> u64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}
