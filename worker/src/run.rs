//! Puts a worker together from executor, actor and link; used by `tutti worker` and by tests.
use std::io;
use std::net::{
    IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs as _, UdpSocket,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use actix::Actor as _;
use shared::actor::link::join::Unreached;
use shared::actor::liveness::LivenessConfig;
use shared::actor::{ActorRuntime, ActorSpec};
use shared::clock::{Clock, SystemClock};
use shared::host::{available_memory, nvlink_island};
use shared::hub::Hub;
use shared::ids::Incarnation;
use shared::log::{LogActor, SharedLog};
use shared::membership::{CoordinatorAddress, Destination};
use shared::metrics::application::Metrics;
use shared::protocol::{DeviceKind, Hello, NVLINK_LABEL, NodeResources, RESOURCES_MAX, Rejoin};
use shared::wire::keyring::Keyring;
use tokio::sync::oneshot;

use crate::actor::{StopWorker, Uplink, WorkerActor, WorkerConfig, WorkerEnd};
use crate::device::DeviceChoice;
use crate::engine_rank::EngineRank;
use crate::executor::Executor;
use crate::health::WorkerHealth;
use crate::outbox::LinkOutbox;

/// Usual value of [`WorkerOptions::drain_timeout`].
pub const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a worker that was told to stop may take, without its actors.
const STOP_PATIENCE: Duration = Duration::from_secs(2);
/// Bounds of the wait between attempts to find a route to the coordinator.
const PAUSE_MIN: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// Between two looks at whether this host still has the address that other ranks were told; it is
/// gone when so many of them in a row say so.
const LOOK: Duration = Duration::from_secs(5);
const LOOKS: u32 = 3;
/// Timeout of name resolution.
const RESOLVE_PATIENCE: Duration = Duration::from_secs(10);

/// Options of `tutti worker`.
#[derive(Clone, Debug)]
pub struct WorkerOptions {
    /// How to find the coordinator.
    pub coordinator: CoordinatorAddress,
    /// This worker's name.
    pub node: String,
    /// Identifies the host; workers with equal values share memory.
    pub host: String,
    /// Device to compute on.
    pub device: DeviceChoice,
    /// Where the TCP collective listens; by default any port of the local address from which this
    /// host reaches the coordinator.
    pub collective_listen: Option<SocketAddr>,
    /// This process run.
    pub incarnation: u64,
    /// Metrics of the application; reported with everything else.
    pub application: Metrics,
    /// The cluster's secrets, if it has any.
    pub secret: Option<Keyring>,
    /// Path of NVML's library, if the system's loader does not find it.
    pub nvml: Option<PathBuf>,
    /// The last lines of the process's log, for the coordinator to keep.
    pub log: SharedLog,
    /// Operator-defined resources and labels of the node; cores and memory are detected.
    pub offer: NodeResources,
    /// Named actors of the process; the program may have its own, and may host classes of them.
    pub actors: ActorRuntime,
    /// Where models of the hub come from, or why there is none: then only folders can be served.
    pub hub: Result<Hub, String>,
    /// How long the process's named actors may take to finish what they have when it is told to end
    /// ([`DRAIN_TIMEOUT`]).
    pub drain_timeout: Duration,
    /// Where the worker records whether it is ready.
    pub health: WorkerHealth,
}

/// Runs a worker on the current actix system until it ends; when `stop` resolves, the worker leaves
/// for that reason.
///
/// # Errors
/// When the collective's address cannot be bound or the executor's thread cannot start. If the
/// coordinator's name cannot be resolved yet, it waits.
pub async fn run(
    mut options: WorkerOptions,
    stop: impl Future<Output = String>,
) -> io::Result<WorkerEnd> {
    let mut stop = std::pin::pin!(stop);
    let listener = tokio::select! {
        listener = listen(&mut options) => listener?,
        reason = &mut stop => return Ok(WorkerEnd::Shutdown { reason }),
    };
    let collective_addr = listener.local_addr()?;
    let (chosen, towards) = (options.collective_listen, options.coordinator.clone());
    let moved = async move {
        match chosen {
            None => moved(collective_addr.ip(), towards).await,
            Some(_) => std::future::pending().await,
        }
    };
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::start());
    let uplink = Uplink::recording(options.health);
    let (lost, device_lost) = oneshot::channel();
    let nvml = options.nvml.clone();
    let outbox = LinkOutbox::new(uplink.clone(), options.application, options.nvml)
        .with_actors(options.actors.stats().clone())
        .with_device_watch(lost);
    let hub = options.hub.clone().ok();
    let StartedExecutor { executor, device, gpu, threads, offer } =
        start_executor(options.device, (listener, hub), outbox, options.offer, nvml.as_deref())?;
    // Its rank has the GPU.
    options.actors.offer_by_default(NodeResources { gpus: 0, ..offer.clone() });
    let hello = Hello {
        node: options.node,
        incarnation: Incarnation(options.incarnation),
        host: options.host,
        pid: std::process::id(),
        device,
        threads: u32::try_from(threads).unwrap_or(u32::MAX),
        offer,
        collective_addr,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        build: crate::BUILD.to_owned(),
        gpu,
        fetched: 0,
        rejoin: Rejoin::default(),
    };
    let config = WorkerConfig {
        coordinator: options.coordinator,
        hello,
        liveness: LivenessConfig::default(),
        clock,
        secret: options.secret,
        log: options.log.clone(),
        actors: options.actors.clone(),
        hub: options.hub,
        drain_timeout: options.drain_timeout,
    };
    let spec = ActorSpec::new(&LogActor::name(&config.hello.node), "log");
    let log = options.log;
    if let Err(error) = options.actors.spawn(spec, move || LogActor(log.clone())) {
        tracing::warn!(%error, "the log cannot be requested; it is still sent once a second");
    }
    let (end, mut ended) = oneshot::channel();
    let worker = WorkerActor::new(config, executor, uplink, end).start();
    let failed = WorkerEnd::Failed { message: "the worker actor is gone".to_owned() };
    let patience = options.drain_timeout + STOP_PATIENCE;
    let (reason, lost) = tokio::select! {
        // A lost device ends the executor, which the actor reports later.
        biased;
        Ok(reason) = device_lost => (reason, true),
        end = &mut ended => return Ok(end.unwrap_or(failed)),
        reason = &mut stop => (reason, false),
        message = moved => {
            worker.do_send(StopWorker { reason: message.clone(), device_lost: false });
            let _ = tokio::time::timeout(patience, ended).await;
            return Ok(WorkerEnd::Failed { message });
        }
    };
    worker.do_send(StopWorker { reason: reason.clone(), device_lost: lost });
    let patience = if lost { STOP_PATIENCE } else { patience };
    let ended = tokio::time::timeout(patience, ended).await;
    match ended {
        _ if lost => Ok(WorkerEnd::DeviceLost { reason }),
        Ok(end) => Ok(end.unwrap_or(failed)),
        // Its thread is stuck in something that will end with the process.
        Err(_) => Ok(WorkerEnd::Shutdown { reason }),
    }
}

/// Binds the collective's address, as soon as it is known.
async fn listen(options: &mut WorkerOptions) -> io::Result<TcpListener> {
    let listen = match options.collective_listen {
        Some(address) => address,
        None => SocketAddr::new(own_address(&mut options.coordinator).await, 0),
    };
    TcpListener::bind(listen).map_err(|error| {
        let option = options.collective_listen.map_or("", |_| " (--collective-listen)");
        io::Error::new(error.kind(), format!("cannot listen on {listen}{option}: {error}"))
    })
}

/// An executor, and what it computes on.
struct StartedExecutor {
    executor: Executor,
    device: DeviceKind,
    /// UUID of the GPU; empty on CPUs.
    gpu: String,
    threads: usize,
    /// What the node offers, including memory and cores.
    offer: NodeResources,
}

/// Starts the executor of a rank on `device`, which takes TCP collectives on `listener` and has
/// models of the hub from `hub`.
fn start_executor(
    device: DeviceChoice,
    (listener, hub): (TcpListener, Option<Hub>),
    outbox: LinkOutbox,
    offer: NodeResources,
    nvml: Option<&Path>,
) -> io::Result<StartedExecutor> {
    let offer = NodeResources {
        cpus: std::thread::available_parallelism()
            .map_or(1, |cores| u32::try_from(cores.get()).unwrap_or(u32::MAX)),
        memory_bytes: available_memory(Path::new("/")).unwrap_or(0),
        ..offer
    };
    match device {
        DeviceChoice::Cpu(device) => {
            let threads = device.threads;
            let rank = move || EngineRank::new(device, listener).with_hub(hub);
            let executor = Executor::spawn(rank, outbox)?;
            Ok(StartedExecutor {
                executor,
                device: DeviceKind::Cpu,
                gpu: String::new(),
                threads,
                offer,
            })
        }
        DeviceChoice::Cuda(device) => {
            let mut offer = NodeResources { gpus: 1, memory_bytes: device.memory_free, ..offer };
            if offer.labels.len() < RESOURCES_MAX
                && !offer.labels.contains_key(NVLINK_LABEL)
                && let Some(island) = nvlink_island(nvml, &device.uuid)
            {
                offer.labels.insert(NVLINK_LABEL.to_owned(), island);
            }
            let gpu = device.uuid.clone();
            let rank = move || EngineRank::new(device, listener).with_hub(hub);
            let executor = Executor::spawn(rank, outbox)?;
            Ok(StartedExecutor { executor, device: DeviceKind::Cuda, gpu, threads: 1, offer })
        }
    }
}

/// Returns this host's address on the route to the coordinator, as soon as there is one: a name (of
/// a pod or container) may be known later than the worker starts, and so may the coordinator.
async fn own_address(coordinator: &mut CoordinatorAddress) -> IpAddr {
    let (mut pause, mut unreached) = (PAUSE_MIN, Unreached::default());
    let began = Instant::now();
    loop {
        let Destination { address, .. } = coordinator.other(None).await;
        // The system's resolver blocks.
        let found = tokio::time::timeout(
            RESOLVE_PATIENCE,
            tokio::task::spawn_blocking(move || address_towards(&address)),
        );
        let error = match found.await {
            Ok(Ok(Ok(address))) => return address,
            Ok(Ok(Err(error))) => error.to_string(),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "the name server does not answer".to_owned(),
        };
        match unreached.failed(began.elapsed()) {
            Some(seconds) => {
                tracing::warn!(error, seconds, "no route to the coordinator yet; trying on");
            }
            None => tracing::debug!(error, "no route to the coordinator yet"),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// Resolves, to why, when this host has another address on the way to the coordinator, and the one
/// that other ranks were told is gone: they would dial it in vain for ever. A cable that is pulled
/// leaves no way at all, and may take the address along for a while.
async fn moved(told: IpAddr, mut coordinator: CoordinatorAddress) -> String {
    let mut looks = 0;
    loop {
        tokio::time::sleep(LOOK).await;
        let Destination { address, .. } = coordinator.other(None).await;
        // The system's resolver blocks.
        let looked = tokio::task::spawn_blocking(move || another_address(told, &address)).await;
        let Ok(Some(now)) = looked else {
            looks = 0;
            continue;
        };
        looks += 1;
        if looks >= LOOKS {
            return format!(
                "this host's address has changed from {told} to {now}, and other ranks know the \
                 old one: started again, this worker tells them"
            );
        }
    }
}

/// The address of this host on the way to `peer`, if it is not `told` and that one is gone.
fn another_address(told: IpAddr, peer: &str) -> Option<IpAddr> {
    let is_gone = UdpSocket::bind((told, 0))
        .is_err_and(|error| error.kind() == io::ErrorKind::AddrNotAvailable);
    is_gone.then(|| address_towards(peer).ok()).flatten().filter(|now| *now != told)
}

/// Returns this host's address on the route to `peer`.
///
/// # Errors
/// When `peer` cannot be resolved or there is no route to it.
pub fn address_towards(peer: &str) -> io::Result<IpAddr> {
    let unknown = || {
        let message = format!("the address {peer} cannot be resolved");
        io::Error::new(io::ErrorKind::InvalidInput, message)
    };
    let peer = peer.to_socket_addrs().ok().and_then(|mut all| all.next()).ok_or_else(unknown)?;
    let any: IpAddr =
        if peer.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    // Connecting a datagram socket sends nothing; it only selects the route.
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(peer)?;
    Ok(socket.local_addr()?.ip())
}

#[cfg(test)]
mod tests {
    use shared::membership::view::{Leader, View};
    use shared::membership::{Record, Role};
    use tokio::sync::watch;

    use super::*;

    fn led_from(address: &str) -> View {
        let record = Record {
            node: "c".to_owned(),
            role: Role::Coordinator,
            incarnation: 1,
            address: address.to_owned(),
            http: String::new(),
            pid: 1,
            version: String::new(),
            protocol: 0,
            model: None,
            serves: None,
        };
        View { leader: Some(Leader { record, epoch: 1, lease: 0 }), ..View::default() }
    }

    #[test]
    fn an_address_that_others_were_told_may_be_gone() {
        let here = IpAddr::from(Ipv4Addr::LOCALHOST);
        // Nobody has this one: it is for documents.
        let gone: IpAddr = "192.0.2.1".parse().unwrap();
        assert_eq!(another_address(gone, "127.0.0.1:1"), Some(here));
        assert_eq!(another_address(here, "127.0.0.1:1"), None);
        // Still here, though the way is another one now.
        let also: IpAddr = "127.0.0.9".parse().unwrap();
        assert_eq!(another_address(also, "127.0.0.1:1"), None);
        assert_eq!(another_address(gone, "no way"), None);
    }

    #[tokio::test]
    async fn a_coordinator_whose_name_is_not_known_yet_is_waited_for() {
        let (publish, view) = watch::channel(led_from("no port"));
        let search =
            tokio::spawn(async move { own_address(&mut CoordinatorAddress::Followed(view)).await });
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!search.is_finished(), "it goes on looking");
        publish.send_replace(led_from("127.0.0.1:9"));
        let found = tokio::time::timeout(Duration::from_secs(30), search).await;
        assert_eq!(found.unwrap().unwrap(), IpAddr::V4(Ipv4Addr::LOCALHOST));
    }
}
