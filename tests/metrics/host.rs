//! Resource usage of processes and hosts; GPUs come from a stand-in for NVML.
use std::time::{Duration, Instant};

use shared::host::{HostSampler, nvlink_island};
use shared::ids::{Incarnation, WorkerId};
use shared::metrics::catalogue as series;
use shared::metrics::{LocalStats, Merged, Merger, SeriesId, Source};
use testkit::fake_nvml::{fake_nvml, set_gpus};

/// A process's cells, merged.
fn merged(stats: &LocalStats, source: Source) -> Merged {
    let mut merger = Merger::default();
    merger.apply(source, Incarnation(1), 1, stats.snapshot()).unwrap();
    merger.merged()
}

fn host_of(merged: &Merged) -> String {
    let family = merged.family(series::HOST_CPUS.series()).unwrap();
    family.keys().next().unwrap()[0].clone()
}

#[test]
fn gpus_are_measured_by_nvml() {
    let folder = tempfile::tempdir().unwrap();
    let library = fake_nvml(folder.path()).unwrap();
    let mut sampler = HostSampler::new("worker-0", Some(&library));
    assert_eq!(sampler.nvml_problem(), None);
    let found: Vec<_> = sampler.devices().into_iter().map(|gpu| (gpu.index, gpu.name)).collect();
    assert_eq!(found, [(0, "Fake GPU A".to_owned()), (1, "Fake GPU B".to_owned())]);
    let mut stats = LocalStats::new();
    sampler.sample(&mut stats);
    sampler.sample(&mut stats);
    let merged = merged(&stats, Source::Worker(WorkerId(0)));
    let host = host_of(&merged);
    let (a, b) = (["0", host.as_str(), "GPU-aaaa"], ["1", host.as_str(), "GPU-bbbb"]);
    assert_eq!(merged.gauge(series::GPU_UTILIZATION, a), Some(0.75));
    assert_eq!(merged.gauge(series::GPU_UTILIZATION, b), Some(0.0));
    let used = merged.gauge(series::GPU_MEMORY_USED, a);
    assert_eq!(used, Some(f64::from(20u32) * (1u64 << 30) as f64));
    assert_eq!(merged.gauge(series::GPU_MEMORY, b), Some(80.0 * (1u64 << 30) as f64));
    assert_eq!(merged.gauge(series::GPU_TEMPERATURE, a), Some(64.0));
    assert_eq!(merged.gauge(series::GPU_POWER, a), Some(350.5));
    let power = merged.gauge(series::GPU_POWER, b);
    assert_eq!(power, None, "it does not tell: absent, and nothing else is");
    let info = merged.gauge(series::GPU_INFO, ["1", &host, "Fake GPU B", "GPU-bbbb"]);
    assert_eq!(info, Some(1.0));
}

/// As in containers: each has one of the host's GPUs, as number 0.
#[test]
fn gpus_that_have_one_number_in_several_processes_are_several() {
    let mut merger = Merger::default();
    for (worker, uuid) in [(0, "GPU-cccc"), (1, "GPU-dddd")] {
        let folder = tempfile::tempdir().unwrap();
        let library = fake_nvml(folder.path()).unwrap();
        set_gpus(folder.path(), &[uuid]).unwrap();
        let mut stats = LocalStats::new();
        HostSampler::new(&format!("worker-{worker}"), Some(&library)).sample(&mut stats);
        let source = Source::Worker(WorkerId(worker));
        merger.apply(source, Incarnation(1), 1, stats.snapshot()).unwrap();
    }
    let merged = merger.merged();
    let host = host_of(&merged);
    for id in [
        series::GPU_UTILIZATION,
        series::GPU_MEMORY_USED,
        series::GPU_MEMORY,
        series::GPU_TEMPERATURE,
        series::GPU_POWER,
    ] {
        let found = ["GPU-cccc", "GPU-dddd"].map(|uuid| merged.gauge(id, ["0", &host, uuid]));
        assert!(found.iter().all(Option::is_some), "{}: {found:?}", id.series().definition().name);
    }
}

#[test]
fn a_gpu_that_is_gone_leaves_nothing_and_another_one_may_come_in_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let library = fake_nvml(folder.path()).unwrap();
    let mut sampler = HostSampler::new("worker-0", Some(&library));
    let mut stats = LocalStats::new();
    // The index and UUID of each GPU, which its name and its figures agree on.
    let mut seen = |uuids: &[&str]| {
        set_gpus(folder.path(), uuids).unwrap();
        sampler.sample(&mut stats);
        let merged = merged(&stats, Source::Worker(WorkerId(0)));
        let of = |id: SeriesId| {
            let labels = merged.family(id).into_iter().flat_map(|family| family.keys());
            labels.map(|of| format!("{} {}", of[0], of[of.len() - 1])).collect::<Vec<_>>()
        };
        let named = of(series::GPU_INFO.series());
        assert_eq!(of(series::GPU_MEMORY.series()), named);
        assert_eq!(of(series::GPU_TEMPERATURE.series()), named);
        named
    };
    assert_eq!(seen(&["GPU-cccc", "GPU-dddd"]), ["0 GPU-cccc", "1 GPU-dddd"]);
    assert_eq!(seen(&["lost", "GPU-dddd"]), ["1 GPU-dddd"]);
    assert_eq!(seen(&["GPU-eeee", "GPU-dddd"]), ["0 GPU-eeee", "1 GPU-dddd"]);
    assert_eq!(seen(&["GPU-eeee"]), ["0 GPU-eeee"], "not counted any more");
    assert!(seen(&[]).is_empty());
}

#[test]
fn gpus_that_nvlink_joins_are_one_island() {
    let folder = tempfile::tempdir().unwrap();
    let library = fake_nvml(folder.path()).unwrap();
    for uuid in ["GPU-aaaa", "GPU-bbbb"] {
        assert_eq!(nvlink_island(Some(&library), uuid).as_deref(), Some("GPU-aaaa"));
    }
    assert_eq!(nvlink_island(Some(&library), "GPU-cccc"), None);
    let missing = std::path::Path::new("/no/such/libnvidia-ml.so");
    assert_eq!(nvlink_island(Some(missing), "GPU-aaaa"), None);
}

#[test]
fn without_nvml_there_are_no_gpus_and_a_reason() {
    let missing = std::path::Path::new("/no/such/libnvidia-ml.so");
    let mut sampler = HostSampler::new("worker-0", Some(missing));
    let problem = sampler.nvml_problem().unwrap().to_owned();
    assert!(problem.contains("/no/such/libnvidia-ml.so"), "{problem}");
    assert!(sampler.devices().is_empty());
    let mut stats = LocalStats::new();
    sampler.sample(&mut stats);
    let merged = merged(&stats, Source::Worker(WorkerId(0)));
    assert!(merged.families().all(|(definition, _)| !definition.name.starts_with("tutti_gpu_")));
    assert!(merged.gauge_sum(series::PROCESS_MEMORY) > 0.0, "the rest is there");
}

/// Computes for about this long.
fn work(how_long: Duration) -> u64 {
    let began = Instant::now();
    let mut x = 1u64;
    while began.elapsed() < how_long {
        x = std::hint::black_box(x.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (x >> 7));
    }
    x
}

#[test]
fn processes_and_hosts_are_measured_and_never_fall() {
    let mut sampler = HostSampler::new("coordinator", None);
    let mut stats = LocalStats::new();
    let mut merger = Merger::default();
    let mut last = 0;
    // The scheduler decides how much CPU time this process gets: repeat until it had a second.
    for sequence in 1..=240 {
        sampler.sample(&mut stats);
        merger.apply(Source::Coordinator, Incarnation(1), sequence, stats.snapshot()).unwrap();
        let now = merger.merged().counter(series::PROCESS_CPU, ["coordinator"]).unwrap();
        assert!(now >= last);
        last = now;
        if sequence > 3 && last > 1_000_000_000 {
            break;
        }
        work(Duration::from_millis(250));
    }
    sampler.sample(&mut stats);
    let merged = merged(&stats, Source::Coordinator);
    let grown = merged.counter(series::PROCESS_CPU, ["coordinator"]).unwrap();
    // In nanoseconds; other tests of this process compute too.
    assert!((1_000_000_000..600_000_000_000).contains(&grown), "{grown} ns");
    let host = host_of(&merged);
    let gauge = |id| merged.gauge(id, [host.as_str()]).unwrap();
    let cores = std::thread::available_parallelism().unwrap().get() as f64;
    assert!(gauge(series::HOST_CPUS) >= cores);
    let usage = gauge(series::HOST_CPU_USAGE);
    assert!((0.0..=1.0).contains(&usage) && usage > 0.0, "{usage}");
    let (used, total) = (gauge(series::HOST_MEMORY_USED), gauge(series::HOST_MEMORY));
    assert!(used > 0.0 && used <= total, "{used} of {total}");
    let own = merged.gauge(series::PROCESS_MEMORY, ["coordinator"]).unwrap();
    assert!(own > 1e6 && own < used * 2.0, "{own}");
}

#[test]
fn processes_of_one_host_do_not_add_it_up() {
    let mut merger = Merger::default();
    for (source, name) in
        [(Source::Coordinator, "coordinator"), (Source::Worker(WorkerId(0)), "worker-0")]
    {
        let mut stats = LocalStats::new();
        HostSampler::new(name, None).sample(&mut stats);
        merger.apply(source, Incarnation(1), 1, stats.snapshot()).unwrap();
    }
    let merged = merger.merged();
    let host = host_of(&merged);
    let cores = merged.gauge(series::HOST_CPUS, [host.as_str()]).unwrap();
    assert!(
        cores < 2.0 * std::thread::available_parallelism().unwrap().get() as f64 || cores > 64.0
    );
    assert_eq!(merged.family(series::HOST_MEMORY.series()).unwrap().len(), 1);
    assert_eq!(merged.family(series::PROCESS_MEMORY.series()).unwrap().len(), 2);
    // A process reports only about itself.
    let mut stats = LocalStats::new();
    HostSampler::new("worker-7", None).sample(&mut stats);
    let lie = merger.apply(Source::Worker(WorkerId(0)), Incarnation(2), 1, stats.snapshot());
    assert!(lie.unwrap_err().to_string().contains("not_owner"));
}
