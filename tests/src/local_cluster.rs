//! Real `tutti` processes on loopback.
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::client::Client;
use crate::models::repository;

/// Time limit for a cluster to start or stop; generous enough for a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A `tutti` process and everything that it starts. Killed on drop.
#[derive(Debug)]
pub struct LocalCluster {
    child: Child,
    base: String,
    log: Arc<Mutex<String>>,
    readers: Vec<JoinHandle<()>>,
}

/// The program under test: `TUTTI_BIN`, or the build beside the running test.
#[must_use]
pub fn tutti_binary() -> PathBuf {
    if let Some(path) = std::env::var_os("TUTTI_BIN") {
        return PathBuf::from(path);
    }
    let test = std::env::current_exe().unwrap_or_default();
    let beside = test.parent().and_then(|deps| deps.parent()).map(|dir| dir.join("tutti"));
    beside.unwrap_or_else(|| PathBuf::from("tutti"))
}

/// Less KV cache than a worker takes by itself, unless `args` say how much: 8,192 tokens of the
/// demo model. The kernel clears what a worker takes: 6 % of the processor time of `cluster`.
pub(crate) fn little_cache(args: &[&str]) -> &'static [&'static str] {
    let is_said = args.iter().any(|arg| arg.starts_with("--kv-cache-memory") || *arg == "--config");
    if is_said { &[] } else { &["--kv-cache-memory", "16MiB"] }
}

impl LocalCluster {
    /// Runs `tutti up --listen 127.0.0.1:0 ARGS` and waits until it is ready.
    ///
    /// # Errors
    /// Its output, when it exits or is not ready within a minute.
    pub async fn up(args: &[&str]) -> Result<Self, String> {
        let mut all = vec!["up", "--listen", "127.0.0.1:0"];
        all.extend(args);
        all.extend(little_cache(args));
        let mut cluster = Self::spawn(&all)?;
        cluster.wait_ready().await?;
        Ok(cluster)
    }

    /// Runs `tutti ARGS` without waiting for it to be ready.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn(args: &[&str]) -> Result<Self, String> {
        Self::spawn_in(&[], args)
    }

    /// Runs `PREFIX tutti ARGS`, for instance in a namespace; the prefix must exec the program.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn_in(prefix: &[String], args: &[&str]) -> Result<Self, String> {
        Self::spawn_with(prefix, args, &[])
    }

    /// Same as [`LocalCluster::spawn_in`], with environment variables.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn_with(
        prefix: &[String],
        args: &[&str],
        environment: &[(&str, &str)],
    ) -> Result<Self, String> {
        let binary = tutti_binary();
        let mut command = match prefix {
            [] => Command::new(&binary),
            [program, rest @ ..] => {
                let mut command = Command::new(program);
                command.args(rest).arg(&binary);
                command
            }
        };
        let mut child = command
            .args(args)
            .envs(environment.iter().copied())
            .current_dir(repository())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("cannot start {}: {error}", binary.display()))?;
        let (log, mut readers) = (Arc::new(Mutex::new(String::new())), Vec::new());
        if let Some(stdout) = child.stdout.take() {
            readers.push(collect(stdout, log.clone()));
        }
        if let Some(stderr) = child.stderr.take() {
            readers.push(collect(stderr, log.clone()));
        }
        Ok(Self { child, base: String::new(), log, readers })
    }

    /// Waits until the banner names the URL.
    ///
    /// # Errors
    /// Its output, when it exits or prints no URL within a minute.
    pub async fn wait_url(&mut self) -> Result<(), String> {
        let began = Instant::now();
        while began.elapsed() < PATIENCE {
            if let Ok(Some(status)) = self.child.try_wait() {
                self.wait_logged();
                return Err(format!("it ended with {status}:\n{}", self.log()));
            }
            if let Some(base) = url_in(&self.log()) {
                self.base = base;
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Err(format!("no URL in {PATIENCE:?}:\n{}", self.log()))
    }

    /// Waits until the banner names the URL and `/ready` answers 200.
    ///
    /// # Errors
    /// Its output, when it exits or is not ready within a minute.
    pub async fn wait_ready(&mut self) -> Result<(), String> {
        let began = Instant::now();
        while began.elapsed() < PATIENCE {
            if let Ok(Some(status)) = self.child.try_wait() {
                self.wait_logged();
                return Err(format!("it ended with {status}:\n{}", self.log()));
            }
            if self.base.is_empty() {
                self.base = url_in(&self.log()).unwrap_or_default();
            }
            if !self.base.is_empty()
                && let Ok(reply) = self.client()?.get("/ready").await
                && reply.status == 200
            {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Err(format!("not ready in {PATIENCE:?}:\n{}", self.log()))
    }

    /// A client of this cluster.
    ///
    /// # Errors
    /// When the HTTP client cannot be created.
    pub fn client(&self) -> Result<Client, String> {
        Client::new(&self.base).map_err(|error| error.to_string())
    }

    /// The server's base URL; empty until it is ready.
    #[must_use]
    pub fn base(&self) -> &str {
        &self.base
    }

    /// The main process's id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its output so far.
    #[must_use]
    pub fn log(&self) -> String {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Process ids of its worker processes.
    #[must_use]
    pub fn worker_pids(&self) -> Vec<u32> {
        children_of(self.child.id())
    }

    /// Waits until it exits by itself.
    ///
    /// # Errors
    /// When it has not exited within a minute.
    pub fn wait_end(&mut self) -> Result<std::process::ExitStatus, String> {
        let began = Instant::now();
        while began.elapsed() < PATIENCE {
            if let Ok(Some(status)) = self.child.try_wait() {
                self.wait_logged();
                return Ok(status);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Err(format!("still running after {PATIENCE:?}:\n{}", self.log()))
    }

    /// Waits until [`LocalCluster::log`] has all that an ended process wrote, or for a while: one
    /// that it started may still hold the pipe.
    fn wait_logged(&self) {
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(2)
            && !self.readers.iter().all(JoinHandle::is_finished)
        {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Sends a signal by name (`INT`, `KILL`, `STOP`) to a process.
    ///
    /// # Errors
    /// When `kill` fails.
    pub fn signal(pid: u32, name: &str) -> Result<(), String> {
        let status = Command::new("kill")
            .args([format!("-{name}"), pid.to_string()])
            .status()
            .map_err(|error| error.to_string())?;
        if status.success() { Ok(()) } else { Err(format!("kill -{name} {pid}: {status}")) }
    }
}

impl Drop for LocalCluster {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Process ids whose parent is `pid`.
#[must_use]
pub fn children_of(pid: u32) -> Vec<u32> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let mut children: Vec<u32> = entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok())
        .filter(|child| parent_of(*child) == Some(pid))
        .collect();
    children.sort_unstable();
    children
}

fn parent_of(pid: u32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command name is in parentheses and may contain spaces; state and parent follow it.
    stat.rsplit_once(") ")?.1.split_whitespace().nth(1)?.parse().ok()
}

/// Finds the URL in a server's banner; log lines may contain other URLs, such as etcd's. Lines are
/// added whole.
fn url_in(log: &str) -> Option<String> {
    let banners = ["ready: ", "tutti coordinator: ", "tutti frontend: "];
    let rest = log.lines().find_map(|line| banners.iter().find_map(|it| line.strip_prefix(it)))?;
    rest.split_whitespace().next().map(str::to_owned)
}

fn collect(stream: impl std::io::Read + Send + 'static, log: Arc<Mutex<String>>) -> JoinHandle<()> {
    std::thread::spawn(move || {
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
            log.push_str(&line);
            log.push('\n');
        }
    })
}
