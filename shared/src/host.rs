//! CPU time, memory and GPU use of a process and its host, sampled on a separate thread.
//!
//! A sample reads a few files below `/proc` and makes a handful of NVML queries per GPU: well below
//! a millisecond without GPUs, a few with them, once a second and outside every step.
mod gpu;
mod memory;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use sysinfo::{Pid, ProcessRefreshKind, ProcessesToUpdate, System};

use self::gpu::Gpus;
use crate::log::queue::lines_dropped;
use crate::metrics::catalogue::{
    HOST_CPU_USAGE, HOST_CPUS, HOST_MEMORY, HOST_MEMORY_USED, LOG_LINES_DROPPED, PROCESS_CPU,
    PROCESS_MEMORY, PROCESS_MEMORY_LIMIT, PROCESS_MEMORY_LIMIT_USED,
};
use crate::metrics::labels::MAX_LABEL_VALUE_BYTES;
use crate::metrics::{Counter, Gauge, LocalStats, SharedStats};

pub use self::gpu::{GpuDevice, nvlink_island};
pub use self::memory::{available_memory, most_memory, total_memory};

/// Interval between samples.
const INTERVAL: Duration = Duration::from_secs(1);

/// Environment variable with the host's name in metrics, for containers, where the host name is the
/// container's.
const HOST_VARIABLE: &str = "TUTTI_HOST";

/// Takes samples.
pub struct HostSampler {
    /// `None` on systems that the library does not support.
    system: Option<System>,
    pid: Option<Pid>,
    gpus: Gpus,
    handles: Option<Handles>,
    process: String,
    host: String,
    counted: Arc<Counted>,
    samples: u64,
}

/// What is already counted of a process, whatever it was called then.
#[derive(Debug, Default)]
struct Counted {
    /// CPU time, in milliseconds.
    cpu_ms: AtomicU64,
    /// Dropped log lines.
    lines: AtomicU64,
}

/// Raises what is counted to `total`, and returns by how much. Two samplers, one of which is about
/// to end, never count the same.
fn count_up_to(counted: &AtomicU64, total: u64) -> u64 {
    total.saturating_sub(counted.fetch_max(total, Ordering::Relaxed))
}

struct Handles {
    cpu: Counter,
    memory: Gauge,
    memory_limit: Gauge,
    memory_limit_used: Gauge,
    lines_dropped: Counter,
    host_cpu: Gauge,
    host_cpus: Gauge,
    host_memory: Gauge,
    host_memory_used: Gauge,
}

impl std::fmt::Debug for HostSampler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostSampler").field("process", &self.process).finish_non_exhaustive()
    }
}

impl HostSampler {
    /// Creates a sampler of this process under the name `process`, such as `worker-0`. `nvml` is
    /// the path of NVML's library, for systems whose loader does not find it; without NVML, no GPUs
    /// are sampled.
    #[must_use]
    pub fn new(process: &str, nvml: Option<&Path>) -> Self {
        let host = host_name(std::env::var(HOST_VARIABLE).ok(), System::host_name().ok());
        Self {
            system: System::new().ok(),
            pid: sysinfo::get_current_pid().ok(),
            gpus: Gpus::new(nvml, &host),
            handles: None,
            process: process.to_owned(),
            host,
            counted: Arc::default(),
            samples: 0,
        }
    }

    /// Returns the GPUs that NVML found.
    #[must_use]
    pub fn devices(&self) -> Vec<GpuDevice> {
        self.gpus.devices()
    }

    /// Returns why NVML is not available, if it is not.
    #[must_use]
    pub fn nvml_problem(&self) -> Option<&str> {
        self.gpus.problem()
    }

    /// Takes a sample and records it in `stats`.
    pub fn sample(&mut self, stats: &mut LocalStats) {
        let handles = self.handles.get_or_insert_with(|| {
            let (process, host) = ([self.process.as_str()], [self.host.as_str()]);
            Handles {
                cpu: stats.counter(PROCESS_CPU, process),
                memory: stats.gauge(PROCESS_MEMORY, process),
                memory_limit: stats.gauge(PROCESS_MEMORY_LIMIT, process),
                memory_limit_used: stats.gauge(PROCESS_MEMORY_LIMIT_USED, process),
                lines_dropped: stats.counter(LOG_LINES_DROPPED, process),
                host_cpu: stats.gauge(HOST_CPU_USAGE, host),
                host_cpus: stats.gauge(HOST_CPUS, host),
                host_memory: stats.gauge(HOST_MEMORY, host),
                host_memory_used: stats.gauge(HOST_MEMORY_USED, host),
            }
        });
        self.gpus.sample(stats);
        stats.add(handles.lines_dropped, count_up_to(&self.counted.lines, lines_dropped()));
        let bounded = memory::memory_limit(Path::new("/"));
        let limit = bounded.map(|bounded| bounded.limit);
        let used = bounded.and_then(|bounded| bounded.used);
        for (gauge, bytes) in [(handles.memory_limit, limit), (handles.memory_limit_used, used)] {
            match bytes {
                Some(bytes) => stats.set(gauge, bytes as f64),
                None => stats.clear(gauge),
            }
        }
        let Some(system) = &mut self.system else { return };
        system.refresh_cpu_usage();
        system.refresh_memory();
        stats.set(handles.host_cpus, system.cpus().len() as f64);
        stats.set(handles.host_memory, system.total_memory() as f64);
        stats.set(handles.host_memory_used, system.used_memory() as f64);
        self.samples += 1;
        // CPU usage is measured between two samples.
        if self.samples > 1 {
            let usage = f64::from(system.global_cpu_usage()) / 100.0;
            stats.set(handles.host_cpu, usage.clamp(0.0, 1.0));
        }
        if let Some(pid) = self.pid {
            let what = ProcessRefreshKind::nothing().with_cpu().with_memory();
            system.refresh_processes_specifics(ProcessesToUpdate::Some(&[pid]), false, what);
            if let Some(process) = system.process(pid) {
                let grown_ms = count_up_to(&self.counted.cpu_ms, process.accumulated_cpu_time());
                stats.add(handles.cpu, grown_ms.saturating_mul(1_000_000));
                stats.set(handles.memory, process.memory() as f64);
            }
        }
    }
}

/// Returns the configured name of the host, otherwise the host's own name.
fn host_name(said: Option<String>, own: Option<String>) -> String {
    let fits = |name: &String| !name.is_empty() && name.len() <= MAX_LABEL_VALUE_BYTES;
    said.filter(fits).or(own.filter(fits)).unwrap_or_else(|| "host".to_owned())
}

/// A thread that takes samples until this handle is dropped.
#[derive(Debug)]
pub struct HostThread {
    stop: Arc<AtomicBool>,
    counted: Arc<Counted>,
}

impl HostThread {
    /// Starts sampling into `stats`; see [`HostSampler::new`]. If the operating system refuses a
    /// thread, nothing is sampled: that is no reason for a server to fail.
    #[must_use]
    pub fn start(process: &str, nvml: Option<PathBuf>, stats: SharedStats) -> Self {
        Self::spawn(process, nvml, stats, LocalStats::new(), Arc::default())
    }

    /// Starts sampling under another name, into `stats` that may have totals already: what `before`
    /// counted under names before, which another coordinator may hand on, is not counted again.
    #[must_use]
    pub fn start_after(
        before: Option<Self>,
        process: &str,
        nvml: Option<PathBuf>,
        stats: SharedStats,
    ) -> Self {
        let own = stats.with(|stats| stats.clone());
        let counted = before.map_or_else(Arc::default, |before| before.counted.clone());
        Self::spawn(process, nvml, stats, own, counted)
    }

    /// `own`: the cells to record into first, since NVML queries may be slow.
    fn spawn(
        process: &str,
        nvml: Option<PathBuf>,
        stats: SharedStats,
        mut own: LocalStats,
        counted: Arc<Counted>,
    ) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (process, stopped, known) = (process.to_owned(), stop.clone(), counted.clone());
        let thread = std::thread::Builder::new().name("host-stats".into()).spawn(move || {
            let mut sampler = HostSampler::new(&process, nvml.as_deref());
            sampler.counted = known;
            while !stopped.load(Ordering::Relaxed) {
                sampler.sample(&mut own);
                stats.with(|stats| stats.clone_from(&own));
                std::thread::sleep(INTERVAL);
            }
        });
        if let Err(error) = thread {
            tracing::warn!(%error, "the host is not sampled");
        }
        Self { stop, counted }
    }
}

impl Drop for HostThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::host_name;

    #[test]
    fn a_host_is_called_what_is_said_of_it() {
        let name = |said: &str, own: &str| host_name(Some(said.to_owned()), Some(own.to_owned()));
        assert_eq!(name("node-7", "tutti-worker-0"), "node-7");
        assert_eq!(name("", "tutti-worker-0"), "tutti-worker-0");
        assert_eq!(name(&"x".repeat(129), "tutti-worker-0"), "tutti-worker-0");
        assert_eq!(host_name(None, None), "host");
    }
}
