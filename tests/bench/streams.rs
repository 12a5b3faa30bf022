//! What serving many streams costs: `streams [REPLICAS] [STREAMS] [STEP_MS] [TOKENS]`.
//!
//! A real coordinator (`TUTTI_BIN`) on core 0 serves the demo model's API; its workers are real
//! worker actors in this process whose steps compute nothing and take `STEP_MS`. As many clients as
//! `STREAMS` read one stream of `TOKENS` tokens each, over a connection of their own. Reported, for
//! the time in which all streams run: tokens per second, the coordinator's processor time per
//! token, and how long a token takes from the end of its step to its client. Run it on another core
//! (`taskset -c 1`), or that time is the clients' own.
#![allow(clippy::print_stdout, reason = "a benchmark's output")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark ends by panicking")]

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use actix::Actor as _;
use shared::actor::ActorRuntime;
use shared::actor::liveness::LivenessConfig;
use shared::clock::SystemClock;
use shared::ids::{Incarnation, SeqId};
use shared::log::SharedLog;
use shared::membership::CoordinatorAddress;
use shared::metrics::application::Metrics;
use shared::model_identity::ModelIdentity;
use shared::protocol::{
    DeviceKind, Form, Hello, NodeResources, Rejoin, SequenceOutput, StepPlan, StepTimings,
    TokenDigest,
};
use testkit::fleet::free_port;
use testkit::local_cluster::LocalCluster;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use worker::actor::{Uplink, WorkerActor, WorkerConfig, WorkerEnd};
use worker::executor::Executor;
use worker::outbox::LinkOutbox;
use worker::rank::{AbortSlot, FormError, FormObserver, Rank, RankReady, StepSource};

/// An ordinary word of the demo model.
const TOKEN: u32 = 300;
/// Prompts are two tokens that name their stream, in digits of this base, above special tokens.
const BASE: usize = 1000;
const FIRST_ID: usize = 100;

/// What ranks and clients know in common.
#[derive(Debug)]
struct Board {
    began: Instant,
    tokens: usize,
    /// When each token of each stream left its step, in microseconds; 0 before.
    made: Vec<AtomicU32>,
    measuring: AtomicBool,
    started: AtomicU64,
    finished: AtomicU64,
    received: AtomicU64,
    /// Number of tokens by the time that they took, in units of 50 microseconds.
    waits: Vec<AtomicU32>,
}

impl Board {
    fn now(&self) -> u32 {
        u32::try_from(self.began.elapsed().as_micros()).unwrap()
    }
}

/// A rank whose steps take a fixed time and give every sequence the same token.
#[derive(Debug)]
struct IdleRank {
    board: Arc<Board>,
    pace: Duration,
    next: Instant,
    streams: HashMap<SeqId, (usize, u32)>,
    digest: TokenDigest,
}

impl Rank for IdleRank {
    fn form(
        &mut self,
        form: &Form,
        _abort: &AbortSlot,
        observer: &mut dyn FormObserver,
    ) -> Result<RankReady, FormError> {
        observer.progress(1, 1);
        let identity = ModelIdentity::read(form.model.as_ref(), &form.lora)
            .map_err(|message| FormError { message, permanent: true })?;
        Ok(RankReady {
            kv_blocks: 1 << 20,
            host_blocks: 0,
            weight_bytes: 1,
            load_seconds: 0.0,
            identity,
            adapters: 0,
        })
    }

    fn start(&mut self, _num_blocks: u32, _host_blocks: u32) -> Result<(), String> {
        Ok(())
    }

    fn step(
        &mut self,
        plan: &StepPlan,
        _: &mut dyn StepSource,
        outputs: &mut Vec<SequenceOutput>,
    ) -> Result<StepTimings, String> {
        for seq in &plan.finished {
            self.streams.remove(seq);
        }
        for new in &plan.admitted {
            let id = |at: usize| new.tokens[at] as usize - FIRST_ID;
            self.streams.insert(new.seq, (id(0) * BASE + id(1), new.num_prompt));
        }
        self.next = (self.next + self.pace).max(Instant::now());
        std::thread::sleep(self.next.saturating_duration_since(Instant::now()));
        let (mut digest, now) = (TokenDigest::of(plan.step), self.board.now());
        for entry in plan.sequences.iter().filter(|entry| entry.sample) {
            let (seq, position) = (entry.seq, entry.start + entry.count);
            digest = digest.with(seq, position, TOKEN);
            let (stream, prompt) = self.streams[&seq];
            let index = stream * self.board.tokens + (position - prompt) as usize;
            if let Some(made) = self.board.made.get(index) {
                made.store(now, Relaxed);
            }
            outputs.push(SequenceOutput {
                seq,
                position,
                token: Some(TOKEN),
                logprobs: None,
                prompt_logprobs: Vec::new(),
                prompt_start: 0,
                corrupted: false,
                embedding: Vec::new(),
            });
        }
        self.digest = digest;
        Ok(StepTimings::default())
    }

    fn digest(&self) -> u32 {
        self.digest.value()
    }

    fn release(&mut self) {
        self.streams.clear();
    }
}

/// Starts a worker whose rank is idle; it runs until its channel is dropped.
fn start_worker(
    index: u32,
    coordinator: &str,
    board: &Arc<Board>,
    pace: Duration,
) -> oneshot::Receiver<WorkerEnd> {
    let uplink = Uplink::default();
    let metrics = Metrics::default();
    let outbox = LinkOutbox::new(uplink.clone(), metrics, Some(PathBuf::from("/none")));
    let board = board.clone();
    let make = move || IdleRank {
        board,
        pace,
        next: Instant::now(),
        streams: HashMap::new(),
        digest: TokenDigest::of(shared::ids::StepId(0)),
    };
    let executor = Executor::spawn(make, outbox).unwrap();
    let hello = Hello {
        node: format!("idle-{index}"),
        incarnation: Incarnation(1),
        host: "bench".to_owned(),
        pid: std::process::id(),
        device: DeviceKind::Cpu,
        threads: 1,
        offer: NodeResources { cpus: 1, memory_bytes: 1 << 30, ..NodeResources::default() },
        collective_addr: SocketAddr::from((Ipv4Addr::LOCALHOST, 1)),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        build: worker::BUILD.to_owned(),
        gpu: String::new(),
        fetched: 0,
        rejoin: Rejoin::default(),
    };
    let clock = Arc::new(SystemClock::start());
    let actors = ActorRuntime::spoke(&hello.node, 1, clock.clone());
    let config = WorkerConfig {
        coordinator: CoordinatorAddress::Fixed(coordinator.to_owned()),
        hello,
        liveness: LivenessConfig::default(),
        clock,
        secret: None,
        log: SharedLog::default(),
        actors,
        hub: Err("none".to_owned()),
        drain_timeout: worker::run::DRAIN_TIMEOUT,
    };
    let (end, ended) = oneshot::channel();
    WorkerActor::new(config, executor, uplink, end).start();
    ended
}

/// Reads one stream to its end.
async fn read_stream(address: SocketAddr, index: usize, board: Arc<Board>) {
    let ids = [index / BASE + FIRST_ID, index % BASE + FIRST_ID];
    let body = format!(
        r#"{{"model":"demo","prompt":[{},{}],"max_tokens":{},"temperature":0,"ignore_eos":true,"stream":true}}"#,
        ids[0], ids[1], board.tokens
    );
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let mut connection = TcpStream::connect(address).await.unwrap();
    connection.write_all((head + &body).as_bytes()).await.unwrap();
    let mut bytes = vec![0; 8192];
    let (mut next, mut matched) = (0usize, 0usize);
    let needle = b"\"text\":";
    let end = b"[DONE]";
    loop {
        let len = connection.read(&mut bytes).await.unwrap();
        assert!(len > 0, "stream {index} broke after {next} tokens");
        let now = board.now();
        for &byte in &bytes[..len] {
            matched = match () {
                () if byte == needle[matched] => matched + 1,
                () if byte == needle[0] => 1,
                () => 0,
            };
            if matched < needle.len() {
                continue;
            }
            matched = 0;
            if next == 0 {
                board.started.fetch_add(1, Relaxed);
            }
            if next < board.tokens && board.measuring.load(Relaxed) {
                let made = board.made[index * board.tokens + next].load(Relaxed);
                let wait = now.saturating_sub(made) as usize / 50;
                board.waits[wait.min(board.waits.len() - 1)].fetch_add(1, Relaxed);
                board.received.fetch_add(1, Relaxed);
            }
            next += 1;
        }
        if bytes[..len].windows(end.len()).any(|window| window == end) {
            break;
        }
    }
    assert!(next >= board.tokens, "stream {index} had {next} tokens");
    board.finished.fetch_add(1, Relaxed);
}

/// Seconds of processor time that a process has had.
fn cpu_seconds(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
}

fn main() {
    let words: Vec<usize> = std::env::args().skip(1).map(|word| word.parse().unwrap()).collect();
    let word = |at: usize, default: usize| words.get(at).copied().unwrap_or(default);
    let (replicas, streams) = (word(0, 4), word(1, 1000));
    let (pace, tokens) = (Duration::from_millis(word(2, 50) as u64), word(3, 200));
    assert!(streams <= BASE * BASE);
    actix::System::new().block_on(run(replicas, streams, pace, tokens));
}

async fn run(replicas: usize, streams: usize, pace: Duration, tokens: usize) {
    let port = free_port();
    let cluster = format!("127.0.0.1:{port}");
    let seqs = streams.div_ceil(replicas).to_string();
    let args = [
        "coordinator",
        "--listen",
        "127.0.0.1:0",
        "--cluster-listen",
        &cluster,
        "--tensor-parallel",
        "1",
        "--max-num-seqs",
        &seqs,
        "--max-queued-requests",
        "20000",
        "--max-num-batched-tokens",
        "8192",
    ];
    let prefix = ["taskset", "-c", "0"].map(str::to_owned);
    let mut coordinator = LocalCluster::spawn_in(&prefix, &args).unwrap();
    let board = Arc::new(Board {
        began: Instant::now(),
        tokens,
        made: (0..streams * tokens).map(|_| AtomicU32::new(0)).collect(),
        measuring: AtomicBool::new(false),
        started: AtomicU64::new(0),
        finished: AtomicU64::new(0),
        received: AtomicU64::new(0),
        waits: (0..200_000).map(|_| AtomicU32::new(0)).collect(),
    });
    let _workers: Vec<_> =
        (0..replicas).map(|index| start_worker(index as u32, &cluster, &board, pace)).collect();
    coordinator.wait_ready().await.unwrap();
    let address: SocketAddr = coordinator.base().trim_start_matches("http://").parse().unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    for index in 0..streams {
        tokio::task::spawn_local(read_stream(address, index, board.clone()));
        if index % 64 == 63 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
    while board.started.load(Relaxed) < streams as u64 {
        assert_eq!(board.finished.load(Relaxed), 0, "a stream ended before all had begun");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let (began, cpu) = (Instant::now(), cpu_seconds(coordinator.pid()));
    board.measuring.store(true, Relaxed);
    while board.finished.load(Relaxed) == 0 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    board.measuring.store(false, Relaxed);
    let (elapsed, cpu) = (began.elapsed().as_secs_f64(), cpu_seconds(coordinator.pid()) - cpu);
    let received = board.received.load(Relaxed);
    let quantile = |q: f64| {
        let mut left = (received as f64 * q) as u64;
        let mut index = 0;
        for (at, count) in board.waits.iter().enumerate() {
            index = at;
            let count = u64::from(count.load(Relaxed));
            if count > left {
                break;
            }
            left -= count;
        }
        index as f64 * 0.05
    };
    println!(
        "{streams} streams, {replicas} replicas, step {pace:?}: {received} tokens in {elapsed:.2} s, \
         {:.0} tokens/s; coordinator {:.1} us a token, {:.0} % of a core; step to client p50 {:.2} ms, \
         p99 {:.2} ms",
        received as f64 / elapsed,
        cpu / received as f64 * 1e6,
        cpu / elapsed * 100.0,
        quantile(0.5),
        quantile(0.99),
    );
}
