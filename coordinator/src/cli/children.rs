//! The worker processes of `tutti up` and of `tutti worker --workers`: started, watched, restarted
//! with backoff, stopped.
//!
//! A worker's stderr is passed on to ours; its end is kept with the exit status, for `tutti logs`.
//!
//! A worker must never outlive its parent, however that ends: its stdin is a socket whose other end
//! this process holds, and it exits when that closes. The worker sends heartbeats through it; one
//! that stops is killed, and restarted like one that crashed.
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs::File;
use std::io::{IsTerminal as _, Read as _, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use coordinator::cluster::records::ProcessExit;
use coordinator::cluster::view::UnresponsiveNodes;
use shared::actor::supervise::{Decision, RestartPolicy, Supervisor};
use shared::clock::{Clock, SystemClock};
use shared::log::{LogLimits, LogWriter, SharedLog};
use tokio::process::{Child, ChildStderr, Command};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;

use super::health::ReadyWorkers;
use super::heartbeat::{EVERY, HeartbeatMonitor};
use super::logging::{self, COLOURS};

/// Longer lines of a worker's stderr are passed on in parts.
const LINES_MAX: usize = 16 << 10;

/// How long to wait for the last lines of an ended worker's stderr.
const TAIL_PATIENCE: Duration = Duration::from_millis(500);

/// How to start the workers.
#[derive(Clone, Debug)]
pub(crate) struct WorkerCommand {
    pub(crate) program: PathBuf,
    /// Arguments other than threads, device and the node's name.
    pub(crate) args: Vec<OsString>,
    /// Threads of each worker.
    pub(crate) threads: u32,
    /// Values of `--device`, assigned to workers in turn.
    pub(crate) devices: Vec<String>,
    /// Prefix of the nodes' names; a number follows.
    pub(crate) name: String,
    /// How long a worker that was asked to stop may take before it is killed.
    pub(crate) patience: Duration,
}

/// What the workers' watchers report.
#[derive(Debug)]
pub(crate) enum ChildEvent {
    /// A worker is watched from now on, and restarted up to so many times in a row.
    Started { node: String, max_restarts: u32 },
    /// A worker process ended, whatever follows.
    Ended(ProcessExit),
    /// A worker process ended and will be restarted.
    Restarting { node: String, status: String, after: Duration },
    /// A worker was told to leave and did, as this watcher saw.
    Left { node: String, watcher: u64 },
    /// A worker keeps failing and is not restarted any more.
    GaveUp { node: String, watcher: u64, reason: String },
}

/// A task that watches a worker.
#[derive(Debug)]
struct WatcherTask {
    watcher: u64,
    stop: watch::Sender<bool>,
    handle: JoinHandle<()>,
}

/// The running workers.
#[derive(Debug)]
pub(crate) struct Children {
    command: Arc<WorkerCommand>,
    events: mpsc::Sender<ChildEvent>,
    kick: watch::Receiver<UnresponsiveNodes>,
    tasks: Vec<WatcherTask>,
    /// The workers wanted, also for the tasks that watch them: the numbers of their nodes, lowest
    /// first, each with its present watcher.
    wanted: watch::Sender<BTreeMap<u32, u64>>,
    /// Number of watchers so far.
    watchers: u64,
    /// Workers that kept failing and are not restarted any more.
    given_up: BTreeSet<u32>,
    /// Drained workers that are not wanted any more, and had not ended when last heard of: nodes,
    /// and their processes' ids. Others may run under these names already.
    leaving: BTreeSet<(String, u32)>,
    ready: ReadyWorkers,
}

impl Children {
    /// Starts `count` workers, each watched by its own task, which says there whether it is ready.
    pub(crate) fn start(
        command: WorkerCommand,
        count: u32,
        events: mpsc::Sender<ChildEvent>,
        kick: watch::Receiver<UnresponsiveNodes>,
        ready: ReadyWorkers,
    ) -> Self {
        let command = Arc::new(command);
        let mut children = Self {
            command,
            events,
            kick,
            tasks: Vec::new(),
            wanted: watch::channel(BTreeMap::new()).0,
            watchers: 0,
            given_up: BTreeSet::new(),
            leaving: BTreeSet::new(),
            ready,
        };
        while children.count() < count {
            children.add();
        }
        children
    }

    /// Number of workers wanted.
    pub(crate) fn count(&self) -> u32 {
        u32::try_from(self.wanted.borrow().len()).unwrap_or(u32::MAX)
    }

    /// Number of threads of each worker.
    pub(crate) fn threads(&self) -> u32 {
        self.command.threads
    }

    /// Number of workers wanted, without those given up.
    pub(crate) fn num_tried(&self) -> u32 {
        self.count().saturating_sub(u32::try_from(self.given_up.len()).unwrap_or(u32::MAX))
    }

    /// Names of the workers beyond this number, the last one first.
    pub(crate) fn nodes_from(&self, count: u32) -> Vec<String> {
        let wanted = self.wanted.borrow();
        wanted.keys().skip(count as usize).rev().map(|index| self.node(*index)).collect()
    }

    /// Wants this worker no more. If it is `told` to leave, its process ends by itself; otherwise,
    /// as when it has not joined yet, it is stopped.
    pub(crate) fn dismiss(&mut self, node: &str, told: bool) {
        let Some(index) = self.index(node) else { return };
        self.given_up.remove(&index);
        let mut watcher = None;
        self.wanted.send_modify(|wanted| watcher = wanted.remove(&index));
        let task = self.tasks.iter().find(|task| Some(task.watcher) == watcher);
        if let Some(task) = task.filter(|_| !told) {
            task.stop.send_replace(true);
        }
    }

    /// These workers are drained and have not ended: they are not wanted any more.
    pub(crate) fn drained(&mut self, leaving: &[(String, u32)]) {
        let leaving: BTreeSet<_> = leaving.iter().cloned().collect();
        for (node, _) in leaving.difference(&std::mem::take(&mut self.leaving)) {
            self.dismiss(node, true);
        }
        self.leaving = leaving;
    }

    /// This watcher saw its worker leave: that is not wanted any more, unless it has been started
    /// again since. Returns whether nobody watches it now.
    pub(crate) fn left(&mut self, node: &str, watcher: u64) -> bool {
        self.wanted.send_modify(|wanted| wanted.retain(|_, present| *present != watcher));
        self.index(node).is_none()
    }

    /// Gives up a worker that keeps failing, as this watcher says. Returns whether it is the one
    /// that watches it now.
    pub(crate) fn give_up(&mut self, node: &str, watcher: u64) -> bool {
        let index = self.index(node);
        let index = index.filter(|index| self.wanted.borrow().get(index) == Some(&watcher));
        self.given_up.extend(index);
        index.is_some()
    }

    /// Retries the workers that were given up.
    pub(crate) fn try_again(&mut self) {
        for index in std::mem::take(&mut self.given_up) {
            self.start_one(index);
        }
    }

    /// Starts one more worker, with the lowest number that is free.
    pub(crate) fn add(&mut self) {
        let is_free = |index: &u32| !self.wanted.borrow().contains_key(index);
        let index = (0..=u32::MAX).find(is_free).unwrap_or(u32::MAX);
        self.start_one(index);
    }

    fn start_one(&mut self, index: u32) {
        let devices = &self.command.devices;
        let turn = index as usize % devices.len().max(1);
        self.watchers += 1;
        let number = self.watchers;
        self.wanted.send_modify(|wanted| {
            wanted.insert(index, number);
        });
        let (stop, stopped) = watch::channel(false);
        let watcher = Watcher {
            node: self.node(index),
            number,
            device: devices.get(turn).cloned().unwrap_or_else(|| "auto".to_owned()),
            command: self.command.clone(),
            events: self.events.clone(),
            stopped,
            kick: self.kick.clone(),
            wanted: self.wanted.subscribe(),
            ready: self.ready.clone(),
            index,
        };
        self.ready.set(&watcher.node, false);
        self.tasks.retain(|task| !task.handle.is_finished());
        let handle = tokio::spawn(watcher.run());
        self.tasks.push(WatcherTask { watcher: number, stop, handle });
    }

    /// The number of a worker that is wanted.
    fn index(&self, node: &str) -> Option<u32> {
        self.wanted.borrow().keys().copied().find(|index| self.node(*index) == node)
    }

    fn node(&self, index: u32) -> String {
        format!("{}-{index}", self.command.name)
    }

    /// Stops all workers and waits until they have ended.
    pub(crate) async fn stop(self) {
        for task in &self.tasks {
            task.stop.send_replace(true);
        }
        for task in self.tasks {
            let _ = task.handle.await;
        }
    }
}

/// Seed of the waits of child `index` of this process: those that end together must not come back
/// together. A supervisor ignores the lowest bit.
fn seed(parent: u32, index: u32) -> u64 {
    (u64::from(parent) << 32) | (u64::from(index) << 1)
}

struct Watcher {
    node: String,
    /// Its node's number.
    index: u32,
    /// This watcher's own.
    number: u64,
    device: String,
    command: Arc<WorkerCommand>,
    events: mpsc::Sender<ChildEvent>,
    stopped: watch::Receiver<bool>,
    /// Nodes whose processes are alive but do not answer: they are killed, and restarted like
    /// crashed ones.
    kick: watch::Receiver<UnresponsiveNodes>,
    /// See [`Children`]: a worker that is not among them is not restarted, however it ended.
    wanted: watch::Receiver<BTreeMap<u32, u64>>,
    ready: ReadyWorkers,
}

impl Watcher {
    async fn run(mut self) {
        let clock = SystemClock::start();
        let policy = RestartPolicy::default();
        let mut supervisor = Supervisor::new(policy, seed(std::process::id(), self.index));
        let (node, max_restarts) = (self.node.clone(), policy.max_restarts);
        self.send_event(ChildEvent::Started { node, max_restarts }).await;
        loop {
            let ended = match self.spawn() {
                Ok((child, monitor, stderr)) => {
                    match self.watch_and_report(child, monitor, stderr).await {
                        // The coordinator told it to end: it is no longer wanted.
                        Some(status) if status.success() || !self.is_wanted() => {
                            return self.send_left().await;
                        }
                        Some(status) => status.to_string(),
                        // All are stopped.
                        None if self.is_wanted() => return,
                        None => return self.send_left().await,
                    }
                }
                Err(error) => format!("cannot start: {error}"),
            };
            match supervisor.on_exit(clock.now()) {
                Decision::RestartAfter(after) => {
                    let node = self.node.clone();
                    let event = ChildEvent::Restarting { node, status: ended, after };
                    self.send_event(event).await;
                    tokio::select! {
                        () = tokio::time::sleep(after) => {}
                        _ = self.stopped.changed() => if self.is_wanted() {
                            return;
                        },
                    }
                    if !self.is_wanted() {
                        return self.send_left().await;
                    }
                }
                Decision::GiveUp { reason } => {
                    let reason = format!("{reason}; last exit: {ended}");
                    let (node, watcher) = (self.node.clone(), self.number);
                    return self.send_event(ChildEvent::GaveUp { node, watcher, reason }).await;
                }
            }
        }
    }

    fn is_wanted(&self) -> bool {
        self.wanted.borrow().get(&self.index) == Some(&self.number)
    }

    async fn send_left(&self) {
        // It may have been started again meanwhile.
        if self.wanted.borrow().get(&self.index).is_none_or(|present| *present == self.number) {
            self.ready.forget(&self.node);
        }
        let (node, watcher) = (self.node.clone(), self.number);
        self.send_event(ChildEvent::Left { node, watcher }).await;
    }

    /// Waits for room: a lost event is never made up for. Without a receiver, all workers are about
    /// to be stopped.
    async fn send_event(&self, event: ChildEvent) {
        let _ = self.events.send(event).await;
    }

    fn spawn(&self) -> std::io::Result<(Child, HeartbeatMonitor, Tail)> {
        let mut command = Command::new(&self.command.program);
        command.args(&self.command.args);
        command.args(["--threads", &self.command.threads.to_string()]);
        command.args(["--node", &self.node, "--device", &self.device]);
        if std::io::stderr().is_terminal() {
            command.env(COLOURS, "1");
        }
        let (monitor, stdin) = HeartbeatMonitor::pair()?;
        let mut child = command
            .stdin(stdin)
            .stdout(Stdio::inherit())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            // Ctrl-C is for this process only: workers keep computing until requests have finished.
            .process_group(0)
            .spawn()?;
        let tail = Tail::of(child.stderr.take())?;
        Ok((child, monitor, tail))
    }

    /// Watches a process and reports its end.
    async fn watch_and_report(
        &mut self,
        child: Child,
        monitor: HeartbeatMonitor,
        tail: Tail,
    ) -> Option<ExitStatus> {
        let pid = child.id().unwrap_or_default();
        let status = self.watch(child, monitor).await;
        self.ready.set(&self.node, false);
        let status = status?;
        let (node, stderr) = (self.node.clone(), tail.lines().await);
        let ended = ProcessExit { node, pid, status: status.to_string(), stderr };
        self.send_event(ChildEvent::Ended(ended)).await;
        Some(status)
    }

    /// Waits for the process's end; `None` if it was stopped on purpose.
    async fn watch(
        &mut self,
        mut child: Child,
        mut monitor: HeartbeatMonitor,
    ) -> Option<ExitStatus> {
        let mut look = tokio::time::interval(EVERY);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                status = child.wait() => {
                    // A process that cannot be waited for counts as crashed.
                    return Some(status.unwrap_or_else(|_| ExitStatus::from_raw(1 << 8)));
                }
                changed = self.kick.changed() => {
                    let frozen = changed.is_ok() && self.kicked(&child);
                    if frozen {
                        let _ = child.start_kill();
                    }
                }
                _ = look.tick() => {
                    if monitor.is_dead() {
                        let (node, pid) = (&self.node, child.id());
                        tracing::error!(node, pid, "the worker's heartbeat stopped; killing it");
                        let _ = child.start_kill();
                    }
                    self.ready.set(&self.node, monitor.is_ready());
                }
                _ = self.stopped.changed() => {
                    drop(monitor);
                    if tokio::time::timeout(self.command.patience, child.wait()).await.is_err() {
                        let _ = child.kill().await;
                    }
                    return None;
                }
            }
        }
    }

    fn kicked(&self, child: &Child) -> bool {
        let kick = self.kick.borrow();
        kick.get(&self.node).is_some_and(|pid| child.id() == Some(*pid))
    }
}

/// The last lines of a process's stderr, which is also passed on to ours.
struct Tail {
    log: SharedLog,
    /// Resolves when the process's end of the pipe is closed.
    closed: oneshot::Receiver<()>,
}

impl Tail {
    /// Passes `stderr` on from its own thread. If ours stalls, lines are dropped, so that the
    /// worker never waits.
    fn of(stderr: Option<ChildStderr>) -> std::io::Result<Self> {
        let log = SharedLog::new(LogLimits::SENT);
        let (close, closed) = oneshot::channel();
        if let Some(stderr) = stderr {
            let mut from = File::from(stderr.into_owned_fd()?);
            let mut kept = log.writer();
            std::thread::Builder::new().name("worker-stderr".to_owned()).spawn(move || {
                let mut chunk = [0u8; LINES_MAX];
                let mut held = 0;
                // Its log's own lines are forwarded as text.
                let keeps = !logging::is_json();
                while let Ok(n @ 1..) = from.read(&mut chunk[held..]) {
                    if keeps {
                        let _ = kept.write_all(&chunk[held..held + n]);
                    }
                    held += n;
                    // Whole lines, so that those of several workers do not mix.
                    let end = chunk[..held].iter().rposition(|byte| *byte == b'\n');
                    let whole = end.map_or(if held == LINES_MAX { held } else { 0 }, |end| end + 1);
                    if !keeps {
                        keep_others(&mut kept, &chunk[..whole]);
                    }
                    logging::pass_on(&chunk[..whole]);
                    chunk.copy_within(whole..held, 0);
                    held -= whole;
                }
                if !keeps {
                    keep_others(&mut kept, &chunk[..held]);
                }
                logging::pass_on(&chunk[..held]);
                drop(kept);
                let _ = close.send(());
            })?;
        }
        Ok(Self { log, closed })
    }

    /// Returns the last lines once the process has ended. A process it started may still hold the
    /// pipe.
    async fn lines(self) -> Vec<String> {
        let _ = tokio::time::timeout(TAIL_PATIENCE, self.closed).await;
        self.log.ring().last(LogLimits::SENT.lines)
    }
}

/// Keeps the lines that are no objects of a log.
fn keep_others(kept: &mut LogWriter, text: &[u8]) {
    for line in text.split_inclusive(|byte| *byte == b'\n').filter(|line| !line.starts_with(b"{")) {
        let _ = kept.write_all(line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Starts workers `w-0`, `w-1` .. Who has the last value never kicks one.
    fn start(
        program: &str,
        args: &[&str],
        workers: u32,
        room: usize,
    ) -> (Children, mpsc::Receiver<ChildEvent>, watch::Sender<UnresponsiveNodes>) {
        let command = WorkerCommand {
            program: PathBuf::from(program),
            args: args.iter().map(OsString::from).collect(),
            threads: 1,
            devices: Vec::new(),
            name: "w".to_owned(),
            patience: Duration::from_secs(1),
        };
        let (events, ends) = mpsc::channel(room);
        let (kick, kicked) = watch::channel(UnresponsiveNodes::new());
        let children = Children::start(command, workers, events, kicked, ReadyWorkers::default());
        (children, ends, kick)
    }

    /// Waits until a worker has left; returns who watched it.
    async fn left(ends: &mut mpsc::Receiver<ChildEvent>, wanted: &str) -> u64 {
        loop {
            let event = tokio::time::timeout(Duration::from_secs(30), ends.recv()).await;
            match event.unwrap_or_else(|_| panic!("{wanted} is still there")).unwrap() {
                ChildEvent::Left { node, watcher } if node == wanted => return watcher,
                _ => {}
            }
        }
    }

    #[tokio::test]
    async fn who_has_left_is_not_counted_until_it_is_started_again() {
        let (mut children, mut ends, _kick) = start("true", &[], 3, 64);
        let before = left(&mut ends, "w-1").await;
        assert!(children.left("w-1", before));
        assert_eq!((children.count(), children.num_tried()), (2, 2));
        assert_eq!(children.nodes_from(1), ["w-2"]);
        assert!(children.nodes_from(2).is_empty());
        children.add();
        assert_eq!(children.nodes_from(0), ["w-2", "w-1", "w-0"]);
        // What is told late of the one before does not concern its successor.
        assert!(!children.left("w-1", before));
        assert!(!children.give_up("w-1", before));
        assert_eq!((children.count(), children.num_tried()), (3, 3));
        assert!(children.give_up("w-0", 1));
        assert_eq!((children.count(), children.num_tried()), (3, 2));
        children.dismiss("w-0", true);
        assert_eq!((children.count(), children.num_tried()), (2, 2));
        drop(ends);
        children.stop().await;
    }

    #[tokio::test]
    async fn who_is_dismissed_and_not_told_so_is_stopped() {
        // Ends with its stdin, and has no use for what else it is given.
        let (mut children, mut ends, _kick) = start("sh", &["-c", "cat"], 2, 64);
        children.dismiss("w-1", false);
        left(&mut ends, "w-1").await;
        assert_eq!(children.nodes_from(0), ["w-0"]);
        drop(ends);
        children.stop().await;
    }

    /// Of workers that end at once while nobody listens, counts those of which each event is told:
    /// started, ended, restarting, left.
    async fn told(program: &str, workers: u32, wanted: usize) -> [usize; 4] {
        let (children, mut ends, _kick) = start(program, &[], workers, 1);
        let mut told = BTreeSet::<(usize, String)>::new();
        while told.len() < wanted {
            let event = tokio::time::timeout(Duration::from_secs(30), ends.recv()).await;
            let event = event.unwrap_or_else(|_| panic!("{told:?}")).unwrap();
            let (kind, node) = match event {
                ChildEvent::Started { node, .. } => (0, node),
                ChildEvent::Ended(exit) => (1, exit.node),
                ChildEvent::Restarting { node, .. } => (2, node),
                ChildEvent::Left { node, .. } => (3, node),
                ChildEvent::GaveUp { node, reason, .. } => panic!("{node}: {reason}"),
            };
            // One that is restarted ends again, perhaps before others are heard of.
            let restarts = told.contains(&(2, node.clone()));
            let is_new = told.insert((kind, node.clone()));
            assert!(is_new || restarts, "{node} is told of twice: {told:?}");
            if told.len() == workers as usize && told.iter().all(|(kind, _)| *kind == 0) {
                // All processes end in the meantime.
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
        }
        drop(ends);
        children.stop().await;
        [0, 1, 2, 3].map(|kind| told.iter().filter(|(of, _)| *of == kind).count())
    }

    #[test]
    fn workers_that_end_together_come_back_one_by_one() {
        let wait = |index| {
            let mut supervisor = Supervisor::new(RestartPolicy::default(), seed(4711, index));
            match supervisor.on_exit(Duration::from_secs(1)) {
                Decision::RestartAfter(wait) => wait,
                Decision::GiveUp { reason } => panic!("{reason}"),
            }
        };
        let waits: BTreeSet<Duration> = (0..8).map(wait).collect();
        assert_eq!(waits.len(), 8, "{waits:?}");
    }

    #[tokio::test]
    async fn what_many_workers_do_at_once_is_told_of_each() {
        assert_eq!(told("true", 8, 24).await, [8, 8, 0, 8]);
        assert_eq!(told("false", 8, 24).await, [8, 8, 8, 0]);
    }
}
