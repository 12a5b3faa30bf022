//! A program that embeds a worker and hosts a class of actors: an example to start from.
//!
//! Start a coordinator, then this program as often as you like, each time with another name:
//!
//! ```console
//! tutti coordinator --tensor-parallel 1
//! cargo run -p tests --bin embedding -- --node a
//! cargo run -p tests --bin embedding -- --node b
//! cargo run -p tests --bin embedding -- --node c --count-in words
//! ```
//!
//! The last one has an actor named `words` created in a process that hosts its class, and sends it
//! what you type. Kill the process that `tutti actors` shows as its node with `kill -9`, and go on
//! typing: the actor is back in another process, with what it was created with, and not with what
//! it has counted since.
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "it talks to whoever runs it")]

use std::hash::{BuildHasher as _, Hasher as _};
use std::io::BufRead as _;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use shared::actor::{
    ActorClass, ActorContext, ActorMessage, ActorRuntime, CreateOptions, NamedActor,
};
use shared::clock::SystemClock;
use shared::log::SharedLog;
use shared::membership::{CoordinatorAddress, EtcdMembership, EtcdOptions, Record, Role};
use shared::metrics::application::Metrics;
use shared::protocol::NodeResources;
use shared::protocol::actors::creation::{Needs, Where};
use worker::device::{CpuDevice, DeviceChoice};
use worker::health::WorkerHealth;
use worker::run::WorkerOptions;

/// A message: some text. Both sides must know this type.
#[derive(Serialize, Deserialize)]
struct Text(String);

impl ActorMessage for Text {
    /// The number of words so far, and the node that counted them.
    type Reply = (u64, String);
}

/// Counts words, from a number on.
struct WordCount {
    words: u64,
    node: String,
}

impl NamedActor for WordCount {
    type Message = Text;

    async fn handle(&mut self, Text(text): Text) -> Result<(u64, String), String> {
        self.words += text.split_whitespace().count() as u64;
        Ok((self.words, self.node.clone()))
    }
}

impl ActorClass for WordCount {
    const CLASS: &'static str = "word-count";
    type Argument = u64;

    fn create(from: u64, context: ActorContext) -> Result<Self, String> {
        Ok(Self { words: from, node: context.node })
    }
}

/// Reads from the command line what follows `name`.
fn option(name: &str) -> Option<String> {
    let mut args = std::env::args().skip_while(|arg| arg != name).skip(1);
    args.next()
}

fn main() -> Result<(), String> {
    let node = option("--node").ok_or("--node NAME is missing")?;
    // Differs for each process run.
    let run = std::hash::RandomState::new().build_hasher().finish();
    let actors = ActorRuntime::spoke(&node, run, Arc::new(SystemClock::start()));
    actors.host::<WordCount>().map_err(|error| error.to_string())?;
    if let Some(cpus) = option("--cpus") {
        let cpus = cpus.parse().map_err(|error| format!("--cpus: {error}"))?;
        // Without an offer it is what the worker finds: the cores and the free memory of its host.
        actors.offer(NodeResources { cpus, ..NodeResources::default() })?;
    }
    if let Some(name) = option("--count-in") {
        let actors = actors.clone();
        std::thread::spawn(move || converse(&actors, &name));
    }
    let (coordinator, _membership) = coordinator(&node, run)?;
    let options = WorkerOptions {
        coordinator,
        host: node.clone(),
        node,
        device: DeviceChoice::Cpu(CpuDevice { threads: 1 }),
        collective_listen: None,
        incarnation: run,
        application: Metrics::new(),
        nvml: None,
        secret: None,
        log: SharedLog::default(),
        offer: NodeResources::default(),
        actors,
        hub: Err("this program has no cache for models of the hub".to_owned()),
        drain_timeout: worker::run::DRAIN_TIMEOUT,
        health: WorkerHealth::default(),
    };
    let end = actix::System::new()
        .block_on(worker::run::run(options, std::future::pending()))
        .map_err(|error| error.to_string())?;
    Err(format!("the worker ended: {end:?}"))
}

/// Where the coordinator is: at an address, or wherever etcd says.
fn coordinator(
    node: &str,
    run: u64,
) -> Result<(CoordinatorAddress, Option<EtcdMembership>), String> {
    let Some(endpoint) = option("--etcd") else {
        let address = option("--coordinator").unwrap_or_else(|| "127.0.0.1:8001".to_owned());
        return Ok((address.as_str().into(), None));
    };
    let options = EtcdOptions {
        endpoints: vec![endpoint],
        cluster: "tutti".to_owned(),
        user: None,
        tls: None,
        lease_ttl: Duration::from_secs(10),
    };
    let record = Record {
        node: node.to_owned(),
        role: Role::Worker,
        incarnation: run,
        address: String::new(),
        http: String::new(),
        pid: std::process::id(),
        version: String::new(),
        protocol: 0,
        model: None,
        serves: None,
    };
    let membership =
        EtcdMembership::start(options, record, false).map_err(|error| error.to_string())?;
    Ok((CoordinatorAddress::Followed(membership.view()), Some(membership)))
}

/// Has the actor created, unless it is there already, and sends it one line after the other.
fn converse(actors: &ActorRuntime, name: &str) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    let Ok(runtime) = runtime else { return println!("no runtime") };
    let options = CreateOptions {
        needs: Needs::nothing().cpus(0.5),
        at: Where::spread(),
        max_restarts: Some(10),
        or_get: true,
        ..CreateOptions::named(name)
    };
    let words = match runtime.block_on(actors.create::<WordCount>(&0, options)) {
        Ok(words) => words,
        Err(error) => return println!("{name} is not created: {error}"),
    };
    println!("{name} is alive: type something");
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        // A line that was sent when the process died may have been counted; it is sent once more,
        // to a count that begins anew.
        let line = Text(line);
        match runtime.block_on(words.ask_again(&line, Duration::from_secs(30), 1)) {
            Ok((words, node)) => println!("{words} words, counted on {node}"),
            Err(error) => println!("not counted: {error}"),
        }
    }
}
