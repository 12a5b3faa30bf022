//! Puts a worker together: executor, actor, link; used by `tutti worker` and by tests.
use std::io;
use std::net::{
    IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs as _, UdpSocket,
};
use std::path::PathBuf;
use std::sync::Arc;

use actix::Actor as _;
use shared::actor::liveness::LivenessConfig;
use shared::clock::{Clock, SystemClock};
use shared::ids::Incarnation;
use shared::membership::CoordinatorAddress;
use shared::metrics::application::Metrics;
use shared::protocol::{DeviceKind, Hello, Rejoin};
use shared::wire::auth::Secret;
use tokio::sync::oneshot;

use crate::actor::{Leave, Uplink, WorkerActor, WorkerConfig, WorkerEnd};
use crate::cpu_rank::CpuRank;
use crate::executor::Executor;
use crate::outbox::LinkOutbox;

/// What `tutti worker` was asked for.
#[derive(Clone, Debug)]
pub struct WorkerOptions {
    /// Where the coordinator is.
    pub coordinator: CoordinatorAddress,
    /// This worker's name.
    pub node: String,
    /// Identifies the host; workers with equal values share memory.
    pub host: String,
    /// Compute threads.
    pub threads: u32,
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

/// Runs a worker on the current actix system until it ends by itself, is told to by the
/// coordinator, or has left: once `leave` resolves to a reason it says goodbye, so that its replica
/// goes on without it at once, and ends.
///
/// # Errors
/// When the collective's address cannot be bound or the executor has no thread.
pub async fn run(
    mut options: WorkerOptions,
    leave: impl Future<Output = String>,
) -> io::Result<WorkerEnd> {
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
    let threads = options.threads.max(1);
    let executor = Executor::spawn(
        move || CpuRank::new(threads as usize, listener),
        LinkOutbox::new(uplink.clone(), options.application, options.nvml),
    )?;
    let hello = Hello {
        node: options.node,
        incarnation: Incarnation(options.incarnation),
        host: options.host,
        pid: std::process::id(),
        device: DeviceKind::Cpu,
        threads,
        memory_bytes: available_memory(),
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
    let worker = WorkerActor::new(config, executor, uplink, end).start();
    let mut ended = std::pin::pin!(ended);
    let end = tokio::select! {
        end = &mut ended => end,
        reason = leave => {
            worker.do_send(Leave { reason });
            ended.await
        }
    };
    let failed = WorkerEnd::Failed { message: "the worker actor is gone".to_owned() };
    Ok(end.unwrap_or(failed))
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
