//! Several ranks: sums and gathered logits within graphs, golden values at two and four ranks, the
//! latency of a sum; then one of two ranks is killed or frozen. All of this runs with NCCL, and
//! with this project's own kernels on GPUs that can access each other's memory. Each rank has its
//! own GPU if there are enough. Otherwise they share one, which NCCL supports from 2.30 on with
//! NCCL_MULTI_RANK_GPU_ENABLE=1.
use std::ffi::OsStr;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kernels::backend::prelude::*;
use kernels::collective::{
    Collective, SharedMemoryOptions, local_group, shared_memory, single_rank,
};
use kernels::cuda::choice::NCCL_SHARING_MIN;
use kernels::cuda::peer::tuning::Thresholds;
use kernels::cuda::{CudaBackend, CudaOptions, ExchangePolicy, GroupSetup, JoinedGroup, Relay};
use kernels::{CollectiveError, KernelError};
use testkit::models::goldens;
use testkit::relay::SharedRelay;

use crate::exchange::{choose, exchange};
use crate::goldens::{VARIANTS, engine_over, follow};
use crate::{Options, Step, UNCHECKED};

const TIMEOUT: Duration = Duration::from_secs(30);
/// The option that makes a rank measure the ways of exchanging data.
const MEASURED: &str = "--measured-most";
/// How long ranks wait for one that is gone.
const SHORT: Duration = Duration::from_secs(3);
/// By what ranks say that the driver does not let processes share memory: CUDA IPC is not to be had
/// in containers that have their process and IPC namespaces for themselves, on slices of a GPU
/// (MIG) and on WSL.
const UNSHARED: [&str; 2] =
    ["give GPU memory to another process", "open another rank's GPU memory"];

fn is_unshared(fault: &str) -> bool {
    UNSHARED.iter().any(|words| fault.contains(words))
}

/// Rank 0's message to the others, in a file.
struct FileRelay(PathBuf);

impl Relay for FileRelay {
    fn send(&mut self, bytes: &[u8]) -> Result<(), CollectiveError> {
        let failed = |error: std::io::Error| CollectiveError::Setup(error.to_string());
        let half = self.0.with_extension("half");
        std::fs::write(&half, bytes).map_err(failed)?;
        std::fs::rename(half, &self.0).map_err(failed)
    }

    fn receive(&mut self, timeout: Duration) -> Result<Vec<u8>, CollectiveError> {
        let began = Instant::now();
        while began.elapsed() < timeout {
            if let Ok(bytes) = std::fs::read(&self.0) {
                return Ok(bytes);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Err(CollectiveError::TimedOut { op: "relay", waited: timeout, rank: 0 })
    }
}

/// Joins a rank to its group, of the kind that is returned.
fn joined(
    options: &Options,
    (exchange, timeout): (ExchangePolicy, Duration),
    ordinal: u32,
    collective: Box<dyn Collective>,
    relay: &mut dyn Relay,
) -> Result<(CudaBackend, JoinedGroup), KernelError> {
    let cuda = CudaOptions { exchange, ..options.cuda(ordinal) };
    let mut backend = CudaBackend::new(cuda, collective)?;
    let group = backend.join(GroupSetup {
        timeout,
        is_given_up: &|| false,
        relay,
        on_abort_handle: &mut |_| {},
    })?;
    Ok((backend, group))
}

/// Ranks that share a GPU run in time slices of milliseconds, and would measure those. So they do
/// not measure, except in the step that tests measuring, and there as little as possible.
fn tuned(options: &Options, gpus: &[u32]) -> Options {
    let mut options = options.clone();
    if is_shared(gpus) {
        options.thresholds = Some(Thresholds::default());
    }
    options
}

fn is_shared(gpus: &[u32]) -> bool {
    matches!(gpus, [first, second, ..] if first == second)
}

/// Where some ranks run: `two GPUs`.
fn place(gpus: &[u32]) -> String {
    match (is_shared(gpus), gpus.len()) {
        (true, _) => "one GPU".to_owned(),
        (false, 2) => "two GPUs".to_owned(),
        (false, count) => format!("{count} GPUs"),
    }
}

fn number(ranks: usize) -> String {
    if ranks == 2 { "two".to_owned() } else { ranks.to_string() }
}

/// What rank `rank` has at `i` of a sum over several ranks: integers, whose sums are exact.
pub(crate) fn term(rank: usize, i: usize) -> f32 {
    (rank * 7 + i % 13) as f32
}

/// Checks the sum over all ranks' [`term`]s.
pub(crate) fn check_sum(sums: &[f32], ranks: usize) -> Result<(), String> {
    for (i, found) in sums.iter().enumerate() {
        let expected = (0..ranks).map(|rank| term(rank, i)).sum::<f32>();
        if *found != expected {
            let count = sums.len();
            return Err(format!("sum {i} of {count} is {found}, not {expected}"));
        }
    }
    Ok(())
}

/// Sums of sizes that are exchanged in different ways.
fn sums_of_sizes(backend: &mut CudaBackend, quick: bool) -> Result<(), KernelError> {
    let (rank, ranks) = (backend.rank() as usize, backend.world_size() as usize);
    let wrong = |message| KernelError::Shape { op: "sums", message };
    let sizes: &[usize] = &[4, 1000, 70_001, 400_001, 1_100_000, 5_000_003];
    for &count in if quick { &sizes[..3] } else { sizes } {
        let mut data = backend.new_buffer(1, count)?;
        let own: Vec<f32> = (0..count).map(|i| term(rank, i)).collect();
        backend.write_buffer(&mut data, &own)?;
        backend.all_reduce(&mut data)?;
        let sums = backend.read_buffer(&data)?;
        check_sum(&sums, ranks).map_err(wrong)?;
    }
    // So many rows that they may be exchanged in bf16, in which these numbers are exact, too.
    let (rows, width) = (40, 1000);
    let own: Vec<f32> = (0..rows * width).map(|i| term(rank, i)).collect();
    let mut data = backend.new_buffer(rows, width)?;
    backend.write_buffer(&mut data, &own)?;
    backend.all_reduce_delta(&mut data)?;
    check_sum(&backend.read_buffer(&data)?, ranks).map_err(wrong)?;
    // And with the norm behind it, whose residual is the sums.
    let mut residual = backend.new_buffer(rows, width)?;
    let mut normed = backend.new_input_buffer(rows, width)?;
    backend.write_buffer(&mut residual, &vec![0.0; rows * width])?;
    backend.write_buffer(&mut data, &own)?;
    let weight = backend.load_vector(&vec![1.0; width])?;
    backend.all_reduce_add_rmsnorm(&mut data, &mut residual, &weight, 1e-5, &mut normed)?;
    check_sum(&backend.read_buffer(&residual)?, ranks).map_err(wrong)
}

/// Checks that neither graphs nor overlap was given up: without them results are right, too.
pub(crate) fn not_given_up(backend: &CudaBackend) -> Result<(), String> {
    backend.given_up().map_or(Ok(()), |reason| Err(format!("given up: {reason}")))
}

/// Measures sums of several sizes, launched back to back. Nothing is allocated or freed from the
/// first sum to the last: when ranks are threads that share a GPU, that could wait for another's
/// kernel, which waits for this rank's. The first sum of each size is checked.
fn latencies(
    backend: &mut CudaBackend,
    meeting: &Meeting,
    quick: bool,
) -> Result<Vec<(usize, Duration)>, String> {
    let words = |error: KernelError| error.to_string();
    let sizes: &[usize] = if quick { &[4, 64] } else { &[4, 16, 64, 256, 1024, 4096, 16384] };
    let times = if quick { 2 } else { 50 };
    let (rank, ranks) = (backend.rank() as usize, backend.world_size() as usize);
    let mut buffers = Vec::new();
    for kib in sizes {
        let mut data = backend.new_buffer(1, kib * 256).map_err(words)?;
        let own: Vec<f32> = (0..kib * 256).map(|i| term(rank, i)).collect();
        backend.write_buffer(&mut data, &own).map_err(words)?;
        buffers.push((*kib, data));
    }
    backend.settle().map_err(words)?;
    let mut found = Vec::new();
    for (kib, data) in &mut buffers {
        meeting.wait()?;
        backend.all_reduce(data).map_err(words)?;
        backend.settle().map_err(words)?;
        meeting.wait()?;
        check_sum(&backend.read_buffer(data).map_err(words)?, ranks)?;
        meeting.wait()?;
        let began = Instant::now();
        for _ in 0..times {
            backend.all_reduce(data).map_err(words)?;
        }
        backend.settle().map_err(words)?;
        found.push((*kib, began.elapsed() / times));
    }
    meeting.wait()?;
    Ok(found)
}

/// A barrier of some ranks, with a time limit.
struct Meeting {
    ranks: usize,
    came: Mutex<usize>,
    changed: Condvar,
}

impl Meeting {
    fn of(ranks: usize) -> Self {
        Self { ranks, came: Mutex::default(), changed: Condvar::new() }
    }

    fn wait(&self) -> Result<(), String> {
        let mut came = self.came.lock().unwrap_or_else(PoisonError::into_inner);
        *came += 1;
        let wanted = came.next_multiple_of(self.ranks);
        self.changed.notify_all();
        let waited = self.changed.wait_timeout_while(came, TIMEOUT, |came| *came < wanted);
        let (came, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if *came < wanted { Err("another rank does not come".to_owned()) } else { Ok(()) }
    }
}

/// Sums of ranks that are threads. On one GPU their kernels run concurrently, unlike those of
/// two processes.
fn sums(
    options: &Options,
    exchange: ExchangePolicy,
    gpus: &[u32],
) -> Result<Vec<(usize, Duration)>, String> {
    let options = &tuned(options, gpus);
    let group = local_group(gpus.len(), TIMEOUT).map_err(|error| error.to_string())?;
    let relay = SharedRelay::default();
    let meeting = &Meeting::of(gpus.len());
    let results: Vec<Result<_, String>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0u32..)
            .zip(group)
            .map(|(rank, collective)| {
                let mut relay = relay.clone();
                scope.spawn(move || {
                    let (how, gpu) = ((exchange, SHORT), gpus[rank as usize]);
                    let joined = joined(options, how, gpu, collective, &mut relay);
                    let (mut backend, _) = joined.map_err(|error| error.to_string())?;
                    let found = latencies(&mut backend, meeting, options.quick);
                    // Free nothing before all are done.
                    let _ = meeting.wait();
                    found
                })
            })
            .collect();
        let panicked = || Err("a rank panicked".to_owned());
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| panicked())).collect()
    });
    first_of(results)
}

/// Returns rank 0's result, or the errors of all ranks.
fn first_of<T>(results: Vec<Result<T, String>>) -> Result<T, String> {
    let (mut said, mut faults) = (Vec::new(), Vec::new());
    for (rank, result) in results.into_iter().enumerate() {
        match result {
            Ok(words) => said.push(words),
            Err(fault) => faults.push(format!("rank {rank}: {fault}")),
        }
    }
    match said.into_iter().next() {
        Some(first) if faults.is_empty() => Ok(first),
        _ => Err(faults.join("; ")),
    }
}

/// Checks golden values as one of several ranks.
fn golden(
    options: &Options,
    rank: u32,
    backend: CudaBackend,
    model: &Path,
) -> Result<String, String> {
    let (prompts, output) = if options.quick { (1, 5) } else { (2, 16) };
    let engine = engine_over(backend, model, (rank, options.ranks), !options.quick);
    let mut engine = engine.map_err(|error| error.to_string())?;
    let (mut worst, mut compared, mut number) = (0.0f64, 0, 0);
    for golden in goldens(model).iter().take(prompts) {
        let (error, tokens) = follow(&mut engine, golden, &mut number, output)?;
        worst = worst.max(error);
        compared += tokens;
    }
    not_given_up(engine.backend())?;
    let made = engine.backend().num_graphs();
    Ok(format!("{compared} tokens, worst error {worst:.1e}, {made} graphs"))
}

/// Runs one of several processes of this program, each of which is a rank.
pub(crate) fn child(
    options: &Options,
    rank: u32,
    name: &str,
    relay: &Path,
) -> Result<String, String> {
    let words = |error: KernelError| error.to_string();
    let world_size = options.ranks;
    let shared = SharedMemoryOptions { name: name.to_owned(), rank, world_size, timeout: TIMEOUT };
    let collective = shared_memory(&shared, &|| false).map_err(|error| error.to_string())?;
    let ordinal = options.ordinal.unwrap_or(0);
    let mut relay = FileRelay(relay.to_owned());
    let timeout = if options.endless { SHORT } else { TIMEOUT };
    let how = (options.exchange, timeout);
    let (mut backend, group) =
        joined(options, how, ordinal, collective, &mut relay).map_err(words)?;
    if options.endless {
        return until_the_other_is_gone(&mut backend);
    }
    if let Some(model) = &options.golden {
        return golden(options, rank, backend, model);
    }
    let graphs = exchange(&mut backend).map_err(words)?;
    choose(&mut backend, group.algorithm != "host").map_err(words)?;
    sums_of_sizes(&mut backend, options.quick).map_err(words)?;
    Ok(format!("{graphs}; {}", group.reason))
}

/// Sums until an error occurs, then leaves the group as a worker does, which must keep its process;
/// returns the error.
fn until_the_other_is_gone(backend: &mut CudaBackend) -> Result<String, String> {
    let mut sum = || -> Result<(), KernelError> {
        let mut data = backend.new_buffer(1, 4096)?;
        data.set_rows(1)?;
        println!("running");
        loop {
            for _ in 0..20 {
                backend.all_reduce(&mut data)?;
            }
            backend.settle()?;
        }
    };
    match sum() {
        Ok(()) => Ok(String::new()),
        Err(error @ KernelError::Collective(_)) => {
            let left = backend.set_collective(single_rank());
            left.map_err(|fault| format!("{error}; it does not leave the other: {fault}"))?;
            Ok(error.to_string())
        }
        // A server would have counted its GPU as lost.
        Err(error) => Err(format!("no error of the exchange: {error}")),
    }
}

/// Starts this program as each of some ranks, on these GPUs.
fn start(
    options: &Options,
    exchange: ExchangePolicy,
    gpus: &[u32],
    relay: &Path,
    task: &[&OsStr],
) -> std::io::Result<Vec<Child>> {
    let name = format!("tutti-gpu-{}", std::process::id());
    let program = std::env::current_exe()?;
    (0..)
        .zip(gpus)
        .map(|(rank, gpu): (u32, &u32)| {
            let mut command = Command::new(&program);
            command.args(options.common()).args(["--child", &rank.to_string(), &name]).arg(relay);
            command.args(["--ranks", &gpus.len().to_string()]);
            command.args(["--exchange", exchange.name()]).args(task);
            if is_shared(gpus) && !task.contains(&MEASURED.as_ref()) {
                command.arg("--unmeasured");
            }
            command.args(["--gpu", &gpu.to_string()]);
            command.stdout(std::process::Stdio::piped()).spawn()
        })
        .collect()
}

/// Starts two processes, and sends one of them a signal during its sums. Returns how long the other
/// took to end, and its output.
fn lost(
    options: &Options,
    exchange: ExchangePolicy,
    gpus: [u32; 2],
    signal: &str,
) -> Result<String, String> {
    let words = |error: std::io::Error| error.to_string();
    let folder = tempfile::tempdir().map_err(words)?;
    let relay = folder.path().join("id");
    let mut children = start(options, exchange, &gpus, &relay, &["--endless".as_ref()])
        .map_err(words)?
        .into_iter();
    let (Some(mut survivor), Some(mut victim)) = (children.next(), children.next()) else {
        return Err("no processes".to_owned());
    };
    let mut refused = None;
    for child in [&mut survivor, &mut victim] {
        // Both say that they are running, or why they are not.
        let mut line = [0; 8];
        let out = child.stdout.as_mut().ok_or("no output")?;
        if out.read_exact(&mut line).is_err() || line != *b"running\n" {
            let mut said = String::from_utf8_lossy(&line).into_owned();
            let _ = out.read_to_string(&mut said);
            refused = Some(said.trim_matches(['\0', '\n']).to_owned());
            break;
        }
    }
    if let Some(said) = refused {
        for mut child in [survivor, victim] {
            let _ = child.kill();
            let _ = child.wait();
        }
        return match is_unshared(&said) {
            true => Ok(format!("{UNCHECKED}: {said}")),
            false => Err(format!("a rank does not run: {said}")),
        };
    }
    std::thread::sleep(Duration::from_millis(200));
    let began = Instant::now();
    let pid = victim.id().to_string();
    Command::new("sh").args(["-c", "kill $0 $1", signal, &pid]).status().map_err(words)?;
    let output = survivor.wait_with_output();
    let took = began.elapsed();
    let _ = victim.kill();
    let _ = victim.wait();
    let output = output.map_err(words)?;
    let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if !output.status.success() || said.is_empty() || took > 3 * SHORT {
        return Err(format!("after {took:?}: {said}"));
    }
    Ok(format!("the other ended after {:.1} s: {said}", took.as_secs_f64()))
}

fn processes(
    options: &Options,
    exchange: ExchangePolicy,
    gpus: &[u32],
    task: &[&OsStr],
) -> Result<String, String> {
    let words = |error: std::io::Error| error.to_string();
    let folder = tempfile::tempdir().map_err(words)?;
    let relay = folder.path().join("id");
    let children = start(options, exchange, gpus, &relay, task).map_err(words)?;
    let said = |child: Child| {
        let output = child.wait_with_output().map_err(words)?;
        let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        match output.status.success() {
            true => Ok(said),
            false => Err(format!("{} {said}", output.status)),
        }
    };
    first_of(children.into_iter().map(said).collect())
}

/// As [`processes`] with this project's own kernels. Where processes cannot share memory, that is
/// no fault: what ranks do instead is checked then.
fn neighbours(options: &Options, gpus: &[u32], task: &[&OsStr]) -> Result<String, String> {
    match processes(options, ExchangePolicy::Peers, gpus, task) {
        Err(fault) if is_unshared(&fault) => {
            let instead = processes(options, ExchangePolicy::Auto, gpus, task);
            let instead = instead.map_err(|other| format!("{fault}; and without that: {other}"))?;
            Ok(format!("{UNCHECKED}: {fault}; without that: {instead}"))
        }
        said => said,
    }
}

/// One rank with NCCL: its calls, and their capture in graphs.
fn alone(options: &Options, ordinal: u32) -> Result<String, String> {
    struct Nobody;
    impl Relay for Nobody {
        fn send(&mut self, _: &[u8]) -> Result<(), CollectiveError> {
            Ok(())
        }
        fn receive(&mut self, _: Duration) -> Result<Vec<u8>, CollectiveError> {
            Err(CollectiveError::Setup("there is one rank".to_owned()))
        }
    }
    let words = |error: KernelError| error.to_string();
    let how = (ExchangePolicy::Nccl, TIMEOUT);
    let (mut backend, _) =
        joined(options, how, ordinal, single_rank(), &mut Nobody).map_err(words)?;
    exchange(&mut backend).map_err(words)
}

/// The steps of one part about several ranks.
pub(crate) fn steps<'a>(options: &'a Options, ordinal: u32, part: &str) -> Vec<Step<'a>> {
    let found = options.survey();
    let others = found.usable().map(|device| device.info.ordinal).filter(|gpu| *gpu != ordinal);
    let all: Vec<u32> = std::iter::once(ordinal).chain(others).collect();
    let other = all.get(1).copied();
    let gpus = [ordinal, other.unwrap_or(ordinal)];
    let shares = std::env::var_os("NCCL_MULTI_RANK_GPU_ENABLE").is_some_and(|on| on == "1");
    let pairs = match &found.nccl {
        Err(reason) => Err(reason.clone()),
        Ok(version) if other.is_none() && (*version < NCCL_SHARING_MIN || !shares) => {
            let rule = "ranks share a GPU from NCCL 2.30 on, with NCCL_MULTI_RANK_GPU_ENABLE=1";
            Err(format!("one GPU and NCCL {}: {rule}", found.nccl_text()))
        }
        Ok(_) => Ok(()),
    };
    match part {
        "ranks-peers" => peers(options, ordinal, &all),
        "ranks-nccl" => {
            let mut steps = Vec::new();
            if found.nccl.is_ok() {
                let name = format!("NCCL {}, one rank", found.nccl_text());
                steps.push(Step::new(name.clone(), move |table| {
                    table.add(name, alone(options, ordinal));
                }));
            }
            match pairs {
                Ok(()) => {
                    steps.extend(by_processes(options, ExchangePolicy::Nccl, &gpus));
                    steps.extend(losses(options, ExchangePolicy::Nccl, gpus));
                }
                Err(reason) => steps.push(unchecked("NCCL, two ranks", reason)),
            }
            if found.nccl.is_ok() {
                steps.extend(by_more(options, ExchangePolicy::Nccl, &all));
            }
            steps
        }
        _ => {
            // Threads share one GPU; otherwise they cannot access each other's memory.
            let mut steps = vec![
                sums_step(options, ExchangePolicy::Peers, vec![ordinal; 2]),
                sums_step(options, ExchangePolicy::Peers, vec![ordinal; 4]),
            ];
            match pairs {
                Ok(()) => steps.push(sums_step(options, ExchangePolicy::Nccl, gpus.to_vec())),
                Err(reason) => steps.push(unchecked("nccl: sums", reason)),
            }
            steps
        }
    }
}

fn unchecked<'a>(what: &'static str, reason: String) -> Step<'a> {
    Step::new(what, move |table| table.add(what, Ok(format!("{UNCHECKED}: {reason}"))))
}

fn peers<'a>(options: &'a Options, ordinal: u32, all: &[u32]) -> Vec<Step<'a>> {
    let mut steps = by_processes(options, ExchangePolicy::Peers, &[ordinal; 2]);
    let other = all.get(1).copied();
    if let Some(other) = other {
        steps.extend(by_processes(options, ExchangePolicy::Peers, &[ordinal, other]));
    }
    if !options.quick {
        steps.extend(by_processes(options, ExchangePolicy::Peers, &[ordinal; 4]));
    }
    steps.extend(by_more(options, ExchangePolicy::Peers, all));
    // Ranks that share a GPU do not measure unless requested.
    let name = "peers: ways of exchanging measured, two processes on one GPU";
    steps.push(Step::new(name, move |table| {
        let task: [&OsStr; 2] = [MEASURED.as_ref(), "16384".as_ref()];
        table.add(name, neighbours(options, &[ordinal; 2], &task));
    }));
    steps.extend(losses(options, ExchangePolicy::Peers, [ordinal, other.unwrap_or(ordinal)]));
    steps
}

/// The steps in which one of two ranks is killed or frozen.
fn losses(options: &Options, exchange: ExchangePolicy, gpus: [u32; 2]) -> Vec<Step<'_>> {
    let step = |signal: &'static str| {
        let name = format!("{}: a rank gets {signal}", exchange.name());
        Step::new(name.clone(), move |table| {
            table.add(name, lost(options, exchange, gpus, signal));
        })
    };
    ["-KILL", "-STOP"].map(step).into()
}

/// The steps of four and eight ranks on as many of `all` GPUs.
fn by_more<'a>(options: &'a Options, exchange: ExchangePolicy, all: &[u32]) -> Vec<Step<'a>> {
    let groups = [4, 8].into_iter().filter_map(|count| all.get(..count));
    groups.flat_map(|gpus| by_processes(options, exchange, gpus)).collect()
}

/// The steps of some processes with the given way of exchanging data.
fn by_processes<'a>(options: &'a Options, exchange: ExchangePolicy, gpus: &[u32]) -> Vec<Step<'a>> {
    let (how, ranks, by) = (place(gpus), number(gpus.len()), exchange.name());
    let run = |gpus: Vec<u32>| {
        move |task: &[&OsStr]| match exchange {
            ExchangePolicy::Peers => neighbours(options, &gpus, task),
            _ => processes(options, exchange, &gpus, task),
        }
    };
    let name = format!("{by}: {ranks} processes on {how}");
    let exchanged = run(gpus.to_vec());
    let mut steps = vec![Step::new(name.clone(), move |table| table.add(name, exchanged(&[])))];
    // On one GPU every sum waits for the other process's time slice. Few of these models' heads can
    // be divided by more than two ranks.
    let models: &[&str] = match (options.quick, gpus.len(), is_shared(gpus)) {
        (true, 2, _) => &VARIANTS[..1],
        (false, 2, true) => &["llama-gqa-sharded", "qwen2", "qwen3"],
        (false, 2, false) => &VARIANTS,
        (false, 4, _) => &["llama-gqa"],
        _ => &[],
    };
    for model in models {
        let name = format!("{by}: goldens {model}, {ranks} ranks on {how}");
        let run = run(gpus.to_vec());
        steps.push(Step::new(name.clone(), move |table| {
            let folder = options.root.join("tests/models").join(model);
            let task: [&OsStr; 2] = ["--golden".as_ref(), folder.as_os_str()];
            table.add(name, run(&task));
        }));
    }
    steps
}

fn sums_step(options: &Options, exchange: ExchangePolicy, gpus: Vec<u32>) -> Step<'_> {
    let (how, ranks, by) = (place(&gpus), number(gpus.len()), exchange.name());
    let name = format!("{by}: sums of {ranks} ranks");
    Step::new(name.clone(), move |table| match sums(options, exchange, &gpus) {
        Err(error) => table.add(name, Err(error)),
        Ok(sums) => {
            for (kib, took) in sums {
                let figure = format!("{:.1} us", took.as_secs_f64() * 1e6);
                table.add(format!("{by}: sum of {kib} KiB, {ranks} threads on {how}"), Ok(figure));
            }
        }
    })
}
