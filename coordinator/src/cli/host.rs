//! `tutti worker --workers N`: the workers of a host, each in its own process with its own GPU or
//! share of the cores. This process supervises them; it is not a member of the cluster itself.
use std::ffi::OsString;
use std::time::Duration;

use tokio::sync::{mpsc, watch};

use coordinator::cluster::view::UnresponsiveNodes;

use super::children::{ChildEvent, Children, WorkerCommand};
use super::health::{self, ReadyWorkers};
use super::heartbeat::{beat_to_systemd, parent_gone};
use super::options::parse_node;
use super::output::print_line;
use super::signals::Signals;
use super::work::{cores, default_node};
use super::{CliError, WorkerArgs, devices, logging};

/// Passed to each worker, whether this process has it or not.
const EXIT_WITH_STDIN: &str = "--exit-with-stdin";
/// How long workers may take to say goodbye.
const STOP_PATIENCE: Duration = Duration::from_secs(10);
/// Workers that kept failing are retried after this long: a GPU may have been reset meanwhile.
const TRIED_AGAIN: Duration = Duration::from_secs(300);

/// Runs `workers` workers, with the options `given` to this process.
pub(crate) fn run(args: &WorkerArgs, given: &[OsString], workers: u32) -> Result<(), CliError> {
    let name = args.node.clone().unwrap_or_else(default_node);
    let _log = logging::init(&args.common, "workers", &name);
    if let Some(address) = args.collective_listen.filter(|address| address.port() != 0) {
        return Err(CliError::Usage(format!(
            "--collective-listen {address} is for one worker, but there are {workers}: use port 0"
        )));
    }
    let shared = devices::share_out(&args.compute, Some(workers), Some(1))?;
    let on = shared.text;
    let command = command(args, given, name, shared.devices, workers)?;
    actix::System::new().block_on(async move {
        let mut signals = Signals::listen()?;
        beat_to_systemd();
        print_line(&format!("{workers} {on} workers, {0}-0 to {0}-{1}", command.name, workers - 1));
        let (events, ends) = mpsc::channel(64);
        // Missing heartbeats reveal frozen workers; nothing else reports them here.
        let (_kick, kicked) = watch::channel(UnresponsiveNodes::new());
        let ready = ReadyWorkers::default();
        health::serve(args.health_listen, ready.check())?;
        let mut children = Children::start(command, workers, events, kicked, ready);
        let outcome = tokio::select! {
            () = signals.next() => Ok(()),
            () = parent_gone(args.exit_with_stdin, || false) => Ok(()),
            outcome = supervise(&mut children, ends) => outcome,
        };
        children.stop().await;
        outcome
    })
}

fn command(
    args: &WorkerArgs,
    given: &[OsString],
    name: String,
    devices: Vec<String>,
    workers: u32,
) -> Result<WorkerCommand, CliError> {
    let program = std::env::current_exe()
        .map_err(|error| CliError::Failed(format!("cannot find this program's file: {error}")))?;
    parse_node(&format!("{name}-{}", workers.saturating_sub(1)))
        .map_err(|problem| CliError::Usage(format!("--node {name}, with a number: {problem}")))?;
    let mut passed = worker_arguments(given);
    passed.extend(["--workers", "1", EXIT_WITH_STDIN].map(OsString::from));
    Ok(WorkerCommand {
        program,
        args: passed,
        threads: args.compute.threads.unwrap_or_else(|| (cores() / workers).max(1)),
        devices,
        name,
        patience: STOP_PATIENCE,
    })
}

/// Returns the options of each worker: those given, except those that differ between workers.
fn worker_arguments(given: &[OsString]) -> Vec<OsString> {
    const OWN: [&str; 5] = ["--workers", "--node", "--device", "--threads", "--health-listen"];
    let mut given = given.iter().skip(1);
    let mut passed = Vec::with_capacity(given.len());
    while let Some(argument) = given.next() {
        let text = argument.to_string_lossy();
        let (name, has_value) = match text.split_once('=') {
            Some((name, _)) => (name, true),
            None => (&*text, false),
        };
        match OWN.contains(&name) {
            true if has_value => {}
            false if name == EXIT_WITH_STDIN => {}
            true => drop(given.next()),
            false => passed.push(argument.clone()),
        }
    }
    passed
}

/// Ends when no worker is left: all were told to leave, or the rest keep failing.
async fn supervise(
    children: &mut Children,
    mut ends: mpsc::Receiver<ChildEvent>,
) -> Result<(), CliError> {
    let first = tokio::time::Instant::now() + TRIED_AGAIN;
    let mut again = tokio::time::interval_at(first, TRIED_AGAIN);
    loop {
        let last = tokio::select! {
            _ = again.tick() => {
                children.try_again();
                continue;
            }
            event = ends.recv() => match event {
                None | Some(ChildEvent::Started { .. } | ChildEvent::Ended(_)) => continue,
                Some(ChildEvent::Restarting { node, status, after }) => {
                    tracing::warn!(node, status, ?after, "a worker ended; restarting it");
                    continue;
                }
                Some(ChildEvent::Left { node, watcher }) => {
                    tracing::info!(node, "a worker left");
                    children.left(&node, watcher);
                    Ok(())
                }
                Some(ChildEvent::GaveUp { node, watcher, reason }) => {
                    children.give_up(&node, watcher);
                    tracing::error!(node, reason, again = ?TRIED_AGAIN, "a worker keeps failing");
                    Err(CliError::Failed(format!("worker {node}: {reason}")))
                }
            },
        };
        if children.num_tried() == 0 {
            return last;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_get_all_options_but_those_that_differ() {
        let given = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
        let passed = |text| worker_arguments(&given(text));
        assert_eq!(
            passed("tutti worker --workers 8 --etcd http://a:1,http://b:1 --node=n --device cuda"),
            given("worker --etcd http://a:1,http://b:1")
        );
        assert_eq!(
            passed("tutti worker --node n --config f.toml --workers=all --batch-invariant"),
            given("worker --config f.toml --batch-invariant")
        );
        assert_eq!(passed("tutti worker --nodes --threads 3"), given("worker --nodes"));
        assert_eq!(passed("tutti worker --workers"), given("worker"));
        assert_eq!(passed("tutti worker --health-listen 0.0.0.0:8002"), given("worker"));
        assert_eq!(passed("tutti worker --exit-with-stdin"), given("worker"), "once");
    }
}
