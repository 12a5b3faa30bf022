//! The worker processes of `tutti up`: started, watched, restarted with backoff, stopped.
//!
//! A worker must never outlive its parent, however that ends: each has a pipe as stdin whose other
//! end this process holds, and exits when it closes.
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use shared::actor::supervise::{Decision, RestartPolicy, Supervisor};
use shared::clock::{Clock, SystemClock};
use tokio::process::{Child, Command};
use tokio::sync::{mpsc, watch};

/// How long a worker that was asked to stop may take before it is killed.
const STOP_PATIENCE: Duration = Duration::from_secs(3);

/// How to start the workers.
#[derive(Clone, Debug)]
pub(super) struct WorkerCommand {
    pub(super) program: PathBuf,
    /// Arguments but for the node's name.
    pub(super) args: Vec<String>,
}

/// What the workers' watchers report.
#[derive(Debug)]
pub(super) enum ChildEvent {
    /// A worker process ended and will be started again.
    Restarting { node: String, status: String, after: Duration },
    /// A worker keeps failing: nothing more is tried.
    GaveUp { node: String, reason: String },
}

/// The running workers.
#[derive(Debug)]
pub(super) struct Children {
    stop: watch::Sender<bool>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Children {
    /// Starts `count` workers, each watched by a task of its own.
    pub(super) fn start(
        command: &WorkerCommand,
        count: u32,
        events: &mpsc::Sender<ChildEvent>,
        kick: &watch::Receiver<Option<(String, u32)>>,
    ) -> Self {
        let (stop, stopped) = watch::channel(false);
        let command = Arc::new(command.clone());
        let tasks = (0..count)
            .map(|index| {
                let watcher = Watcher {
                    node: format!("local-{index}"),
                    command: command.clone(),
                    events: events.clone(),
                    stopped: stopped.clone(),
                    kick: kick.clone(),
                };
                tokio::spawn(watcher.run())
            })
            .collect();
        Self { stop, tasks }
    }

    /// Stops all workers and waits for their ends.
    pub(super) async fn stop(self) {
        let _ = self.stop.send(true);
        for task in self.tasks {
            let _ = task.await;
        }
    }
}

struct Watcher {
    node: String,
    command: Arc<WorkerCommand>,
    events: mpsc::Sender<ChildEvent>,
    stopped: watch::Receiver<bool>,
    /// Names a node whose process is alive but does not answer (frozen): it is killed, and started
    /// again like a crashed one.
    kick: watch::Receiver<Option<(String, u32)>>,
}

impl Watcher {
    async fn run(mut self) {
        let clock = SystemClock::start();
        let mut supervisor =
            Supervisor::new(RestartPolicy::default(), u64::from(std::process::id()));
        loop {
            let ended = match self.spawn() {
                Ok(child) => match self.watch(child).await {
                    Some(status) => status.to_string(),
                    None => return,
                },
                Err(error) => format!("cannot start: {error}"),
            };
            match supervisor.on_exit(clock.now()) {
                Decision::RestartAfter(after) => {
                    let node = self.node.clone();
                    let event = ChildEvent::Restarting { node, status: ended, after };
                    let _ = self.events.try_send(event);
                    tokio::select! {
                        () = tokio::time::sleep(after) => {}
                        _ = self.stopped.changed() => return,
                    }
                }
                Decision::GiveUp { reason } => {
                    let reason = format!("{reason}; last end: {ended}");
                    let event = ChildEvent::GaveUp { node: self.node.clone(), reason };
                    let _ = self.events.send(event).await;
                    return;
                }
            }
        }
    }

    fn spawn(&self) -> std::io::Result<Child> {
        Command::new(&self.command.program)
            .args(&self.command.args)
            .args(["--node", &self.node])
            .stdin(Stdio::piped())
            .stdout(Stdio::inherit())
            .stderr(Stdio::inherit())
            .kill_on_drop(true)
            .spawn()
    }

    /// Waits for the process's end; `None` when it was stopped on purpose.
    async fn watch(&mut self, mut child: Child) -> Option<ExitStatus> {
        // Held here, because waiting for a child closes the stdin it still has.
        let stdin = child.stdin.take();
        loop {
            tokio::select! {
                status = child.wait() => return status.ok().or_else(|| Some(ExitStatus::default())),
                changed = self.kick.changed() => {
                    let frozen = changed.is_ok() && self.is_kicked(&child);
                    if frozen {
                        let _ = child.start_kill();
                    }
                }
                _ = self.stopped.changed() => {
                    drop(stdin);
                    if tokio::time::timeout(STOP_PATIENCE, child.wait()).await.is_err() {
                        let _ = child.kill().await;
                    }
                    return None;
                }
            }
        }
    }

    fn is_kicked(&self, child: &Child) -> bool {
        let kick = self.kick.borrow();
        kick.as_ref().is_some_and(|(node, pid)| *node == self.node && child.id() == Some(*pid))
    }
}
