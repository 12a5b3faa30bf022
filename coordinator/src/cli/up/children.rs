//! The worker processes of `tutti up`: started, watched, restarted with backoff, stopped.
//!
//! A worker must never outlive its parent, however that ends: each has a pipe as stdin whose other
//! end this process holds, and exits when it closes.
use std::os::unix::process::ExitStatusExt as _;
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
    /// Values of `--device`: worker i takes the i-th, and so on round.
    pub(super) devices: Vec<String>,
}

/// What the workers' watchers report.
#[derive(Debug)]
pub(super) enum ChildEvent {
    /// A worker process ended and will be started again.
    Restarting { node: String, status: String, after: Duration },
    /// A worker was told to leave, and did.
    Left { node: String },
    /// A worker keeps failing: nothing more is tried.
    GaveUp { node: String, reason: String },
}

/// The running workers.
#[derive(Debug)]
pub(super) struct Children {
    command: Arc<WorkerCommand>,
    events: mpsc::Sender<ChildEvent>,
    kick: watch::Receiver<Option<(String, u32)>>,
    stop: watch::Sender<bool>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
    /// How many there shall be; their nodes are numbered from 0.
    count: u32,
}

impl Children {
    /// Starts `count` workers, each watched by a task of its own.
    pub(super) fn start(
        command: WorkerCommand,
        count: u32,
        events: mpsc::Sender<ChildEvent>,
        kick: watch::Receiver<Option<(String, u32)>>,
    ) -> Self {
        let (stop, _) = watch::channel(false);
        let command = Arc::new(command);
        let mut children = Self { command, events, kick, stop, tasks: Vec::new(), count: 0 };
        while children.count < count {
            children.add();
        }
        children
    }

    /// How many there shall be.
    pub(super) fn count(&self) -> u32 {
        self.count
    }

    /// The node name of the last.
    pub(super) fn last_node(&self) -> String {
        format!("local-{}", self.count.saturating_sub(1))
    }

    /// The last one leaves; its process ends by itself.
    pub(super) fn forget_last(&mut self) {
        self.count = self.count.saturating_sub(1);
    }

    /// Starts one more.
    pub(super) fn add(&mut self) {
        let devices = &self.command.devices;
        let turn = self.count as usize % devices.len().max(1);
        let watcher = Watcher {
            node: format!("local-{}", self.count),
            device: devices.get(turn).cloned().unwrap_or_else(|| "auto".to_owned()),
            command: self.command.clone(),
            events: self.events.clone(),
            stopped: self.stop.subscribe(),
            kick: self.kick.clone(),
        };
        self.count += 1;
        self.tasks.retain(|task| !task.is_finished());
        self.tasks.push(tokio::spawn(watcher.run()));
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
    device: String,
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
                    // Told to end by the coordinator: it is not wanted any more.
                    Some(status) if status.success() => {
                        let event = ChildEvent::Left { node: self.node.clone() };
                        let _ = self.events.try_send(event);
                        return;
                    }
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
            .args(["--node", &self.node, "--device", &self.device])
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
                status = child.wait() => {
                    // One that cannot be waited for counts as crashed.
                    return Some(status.unwrap_or_else(|_| ExitStatus::from_raw(1 << 8)));
                }
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
