//! Several ranks: sums and gathered logits within graphs, golden values at two ranks, how long a sum
//! takes; by NCCL, and by this project's own kernels on GPUs that see each other's memory, one rank of
//! which is then killed or frozen. Each rank has a GPU of its own where there are enough, else they
//! share one, which NCCL takes from 2.30 on with NCCL_MULTI_RANK_GPU_ENABLE=1.
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use kernels::backend::{AttentionShape, Batch, Buffer as _, SeqRows, StepInputs};
use kernels::collective::{
    Collective, SharedMemoryOptions, local_group, shared_memory, single_rank,
};
use kernels::cuda::choice::NCCL_SHARING_MIN;
use kernels::cuda::devices::Survey;
use kernels::cuda::{CudaBackend, CudaOptions, Exchange, GroupSetup, Relay};
use kernels::sampling::{SampleParams, SampleRow};
use kernels::{Backend, CollectiveError, KernelError};
use testkit::models::goldens;
use testkit::relay::SharedRelay;

use crate::goldens::{engine_over, follow};
use crate::{Options, Table};

const TIMEOUT: Duration = Duration::from_secs(30);
/// How long ranks wait for one that is gone.
const SHORT: Duration = Duration::from_secs(3);

/// Rank 0's word to the others, in a file.
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

fn joined(
    options: &Options,
    (exchange, timeout): (Exchange, Duration),
    ordinal: u32,
    collective: Box<dyn Collective>,
    relay: &mut dyn Relay,
) -> Result<CudaBackend, KernelError> {
    let cuda = CudaOptions {
        overlap: options.overlap,
        exchange,
        thresholds: options.thresholds,
        nccl_lib: options.nccl_lib.clone(),
        ..Survey::options(ordinal, &options.folders, options.kernels.as_deref())
    };
    let mut backend = CudaBackend::new(cuda, collective)?;
    backend.join(GroupSetup {
        timeout,
        is_given_up: &|| false,
        relay,
        on_abort_handle: &mut |_| {},
    })?;
    Ok(backend)
}

/// Sums and gathers in three equal steps: called, recorded, replayed.
fn exchange(backend: &mut CudaBackend) -> Result<String, KernelError> {
    let (rows, width) = (3, 1000);
    let (rank, ranks) = (backend.rank() as usize, backend.world_size() as usize);
    let mut data = backend.new_buffer(4, width)?;
    let mut local = backend.new_buffer(4, 5)?;
    let mut full = backend.new_buffer(4, 5 * ranks)?;
    let value = |rank: usize, i: usize| (rank * 7 + i % 13) as f32;
    let own: Vec<f32> = (0..rows * width).map(|i| value(rank, i)).collect();
    let logits: Vec<f32> = (0..rows * 5).map(|i| (100 * rank + i) as f32).collect();
    let ids = [0, 1, 2];
    let seqs: Vec<SeqRows> = (0..3)
        .map(|row| SeqRows {
            row_start: row,
            num_rows: 1,
            context_len: 1,
            table_start: row,
            table_len: 1,
        })
        .collect();
    let params = SampleParams { temperature: 0.7, ..SampleParams::default() };
    let sampling = [SampleRow { params: &params, prompt: &[], output: &[] }; 3];
    let shape = AttentionShape {
        num_heads: 1,
        num_kv_heads: 1,
        head_dim: 64,
        norm_eps: 1e-5,
        sliding_window: None,
    };
    let sum = |i: usize| (0..ranks).map(|rank| value(rank, i)).sum::<f32>();
    for _ in 0..3 {
        backend.write_buffer(&mut data, &own)?;
        backend.write_buffer(&mut local, &logits)?;
        let batch = Batch { positions: &ids, slots: &ids, seqs: &seqs, block_tables: &ids };
        backend.begin_step(&StepInputs {
            ids: &ids,
            batch,
            attention: &shape,
            sample_rows: &ids,
            sampling: &sampling,
            feed: &[],
            is_plain: true,
        })?;
        backend.all_reduce(&mut data)?;
        backend.gather_logits(&local, &mut full)?;
        backend.end_step()?;
        let (sums, rows_of_all) = (backend.read_buffer(&data)?, backend.read_buffer(&full)?);
        let wrong = |message: String| KernelError::Shape { op: "exchange", message };
        if let Some(i) = (0..rows * width).find(|i| sums[*i] != sum(*i)) {
            return Err(wrong(format!("sum {i} is {}, not {}", sums[i], sum(i))));
        }
        for (i, found) in rows_of_all.iter().enumerate() {
            let (row, column) = (i / (5 * ranks), i % (5 * ranks));
            let expected = (100 * (column / 5) + row * 5 + column % 5) as f32;
            if *found != expected {
                return Err(wrong(format!("logit {i} is {found}, not {expected}")));
            }
        }
    }
    Ok(format!("{} graphs", backend.num_graphs()))
}

/// How long sums of several sizes take, one after the other and not waited for in between.
fn latencies(
    backend: &mut CudaBackend,
    quick: bool,
) -> Result<Vec<(usize, Duration)>, KernelError> {
    let sizes: &[usize] = if quick { &[4, 64] } else { &[4, 16, 64, 256, 1024, 4096, 16384] };
    let times = if quick { 2 } else { 50 };
    let mut found = Vec::new();
    for kib in sizes {
        let mut data = backend.new_buffer(1, kib * 256)?;
        data.set_rows(1)?;
        backend.all_reduce(&mut data)?;
        backend.settle()?;
        let began = Instant::now();
        for _ in 0..times {
            backend.all_reduce(&mut data)?;
        }
        backend.settle()?;
        found.push((*kib, began.elapsed() / times));
    }
    Ok(found)
}

/// Where two ranks meet when it is dropped: before what they compute with, since that frees memory,
/// which may wait for the other's kernels on the same GPU.
struct Meeting<'a>(&'a Barrier);

impl Drop for Meeting<'_> {
    fn drop(&mut self) {
        self.0.wait();
    }
}

/// Runs `work` on a thread for each of two ranks; what rank 0 says, or what went wrong.
fn two<T: Send>(
    options: &Options,
    exchange: Exchange,
    gpus: [u32; 2],
    work: impl Fn(u32, CudaBackend, Meeting<'_>) -> Result<T, String> + Sync,
) -> Result<T, String> {
    let group = local_group(2, TIMEOUT).map_err(|error| error.to_string())?;
    let relay = SharedRelay::default();
    let (work, meeting) = (&work, &Barrier::new(2));
    let results: Vec<Result<T, String>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0u32..)
            .zip(group)
            .map(|(rank, collective)| {
                let mut relay = relay.clone();
                scope.spawn(move || {
                    let (how, gpu) = ((exchange, TIMEOUT), gpus[rank as usize]);
                    let meeting = Meeting(meeting);
                    let backend = joined(options, how, gpu, collective, &mut relay);
                    work(rank, backend.map_err(|error| error.to_string())?, meeting)
                })
            })
            .collect();
        let panicked = || Err("a rank panicked".to_owned());
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| panicked())).collect()
    });
    let mut first = None;
    for (rank, result) in results.into_iter().enumerate() {
        let said = result.map_err(|error| format!("rank {rank}: {error}"))?;
        first.get_or_insert(said);
    }
    first.ok_or_else(|| "no ranks".to_owned())
}

fn golden_pair(
    options: &Options,
    exchange: Exchange,
    gpus: [u32; 2],
    model: &Path,
) -> Result<String, String> {
    let (prompts, output) = if options.quick { (1, 5) } else { (usize::MAX, usize::MAX) };
    two(options, exchange, gpus, |rank, backend, meeting| {
        let engine = engine_over(backend, model, (rank, 2), !options.quick);
        let mut engine = engine.map_err(|error| error.to_string())?;
        let _meeting = meeting;
        let (mut worst, mut compared, mut number) = (0.0f64, 0, 0);
        for golden in goldens(model).iter().take(prompts) {
            let (error, tokens) = follow(&mut engine, golden, &mut number, output)?;
            worst = worst.max(error);
            compared += tokens;
        }
        let made = engine.backend().num_graphs();
        Ok(format!("{compared} tokens, worst error {worst:.1e}, {made} graphs"))
    })
}

/// One of two processes, the other of which is this program again.
pub(crate) fn child(
    options: &Options,
    rank: u32,
    name: &str,
    relay: &Path,
) -> Result<String, String> {
    let words = |error: KernelError| error.to_string();
    let shared =
        SharedMemoryOptions { name: name.to_owned(), rank, world_size: 2, timeout: TIMEOUT };
    let collective = shared_memory(&shared, &|| false).map_err(|error| error.to_string())?;
    let ordinal = options.ordinal.unwrap_or(0);
    let mut relay = FileRelay(relay.to_owned());
    let timeout = if options.endless { SHORT } else { TIMEOUT };
    let how = (options.exchange, timeout);
    let mut backend = joined(options, how, ordinal, collective, &mut relay).map_err(words)?;
    if options.endless {
        return Ok(until_the_other_is_gone(&mut backend));
    }
    exchange(&mut backend).map_err(words)
}

/// Sums without end; what ends them.
fn until_the_other_is_gone(backend: &mut CudaBackend) -> String {
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
        Ok(()) => String::new(),
        Err(error) => error.to_string(),
    }
}

/// This program as each of two ranks.
fn start(
    options: &Options,
    exchange: Exchange,
    gpus: [u32; 2],
    (relay, endless): (&Path, bool),
) -> std::io::Result<Vec<Child>> {
    let name = format!("tutti-gpu-{}", std::process::id());
    let program = std::env::current_exe()?;
    (0..2)
        .map(|rank| {
            let mut command = Command::new(&program);
            command.args(["--child", &rank.to_string(), &name]).arg(relay);
            command.args(["--exchange", exchange.name()]);
            if endless {
                command.arg("--endless");
            }
            command.args(["--gpu", &gpus[rank].to_string()]);
            for folder in &options.folders {
                command.arg("--cuda-lib-dir").arg(folder);
            }
            for (option, path) in
                [("--cuda-kernels", &options.kernels), ("--nccl-lib", &options.nccl_lib)]
            {
                if let Some(path) = path {
                    command.arg(option).arg(path);
                }
            }
            command.stdout(std::process::Stdio::piped()).spawn()
        })
        .collect()
}

/// Two processes, one of which gets a signal amid its sums; how long the other took to end, and its
/// words.
fn lost(options: &Options, gpus: [u32; 2], signal: &str) -> Result<String, String> {
    let words = |error: std::io::Error| error.to_string();
    let folder = tempfile::tempdir().map_err(words)?;
    let relay = folder.path().join("id");
    let mut children =
        start(options, Exchange::Peers, gpus, (&relay, true)).map_err(words)?.into_iter();
    let (Some(mut survivor), Some(mut victim)) = (children.next(), children.next()) else {
        return Err("no processes".to_owned());
    };
    for child in [&mut survivor, &mut victim] {
        // Both say that they run.
        let mut line = [0; 8];
        let out = child.stdout.as_mut().ok_or("no output")?;
        out.read_exact(&mut line).map_err(|error| format!("a rank does not run: {error}"))?;
    }
    std::thread::sleep(Duration::from_millis(200));
    let began = Instant::now();
    let pid = victim.id().to_string();
    Command::new("kill").args([signal, &pid]).status().map_err(words)?;
    let output = survivor.wait_with_output();
    let took = began.elapsed();
    let _ = victim.kill();
    let _ = victim.wait();
    let said = String::from_utf8_lossy(&output.map_err(words)?.stdout).trim().to_owned();
    if said.is_empty() || took > 3 * SHORT {
        return Err(format!("after {took:?}: {said}"));
    }
    Ok(format!("the other ended after {:.1} s: {said}", took.as_secs_f64()))
}

fn processes(options: &Options, exchange: Exchange, gpus: [u32; 2]) -> Result<String, String> {
    let words = |error: std::io::Error| error.to_string();
    let folder = tempfile::tempdir().map_err(words)?;
    let relay = folder.path().join("id");
    let children = start(options, exchange, gpus, (&relay, false)).map_err(words)?;
    let mut first = None;
    for child in children {
        let output = child.wait_with_output().map_err(words)?;
        let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        if !output.status.success() {
            return Err(said);
        }
        first.get_or_insert(said);
    }
    Ok(first.unwrap_or_default())
}

pub(crate) fn check(options: &Options, ordinal: u32, found: &Survey, table: &mut Table) {
    let other = found.usable().map(|device| device.info.ordinal).find(|other| *other != ordinal);
    // Threads have one GPU, or they do not see each other's memory.
    pairs(options, Exchange::Peers, [ordinal, ordinal], table);
    let gpus = [ordinal, other.unwrap_or(ordinal)];
    for signal in ["-KILL", "-STOP"] {
        table.add(format!("peers: a rank gets {signal}"), lost(options, gpus, signal));
    }
    if other.is_some() {
        let own = processes(options, Exchange::Peers, gpus);
        table.add("peers: two processes on two GPUs", own);
    }
    let version = match &found.nccl {
        Ok(version) => *version,
        Err(reason) => return table.add("ranks", Ok(format!("not checked: {reason}"))),
    };
    let alone = || -> Result<String, String> {
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
        let how = (Exchange::Nccl, TIMEOUT);
        let mut backend =
            joined(options, how, ordinal, single_rank(), &mut Nobody).map_err(words)?;
        exchange(&mut backend).map_err(words)
    };
    table.add(format!("NCCL {}, one rank", found.nccl_text()), alone());
    let shares = std::env::var_os("NCCL_MULTI_RANK_GPU_ENABLE").is_some_and(|on| on == "1");
    if other.is_none() && (version < NCCL_SHARING_MIN || !shares) {
        let why = "not checked: one GPU, which ranks share from NCCL 2.30 on, with \
                   NCCL_MULTI_RANK_GPU_ENABLE=1";
        return table.add("two ranks", Ok(why.to_owned()));
    }
    pairs(options, Exchange::Nccl, gpus, table);
}

/// All that two ranks do by one way of exchanging data.
fn pairs(options: &Options, exchange: Exchange, gpus: [u32; 2], table: &mut Table) {
    let how = if gpus[0] == gpus[1] { "one GPU" } else { "two GPUs" };
    let by = exchange.name();
    let threads = two(options, exchange, gpus, |_, mut backend, meeting| {
        let _meeting = meeting;
        self::exchange(&mut backend).map_err(|error| error.to_string())
    });
    table.add(format!("{by}: two threads on {how}"), threads);
    table.add(format!("{by}: two processes on {how}"), processes(options, exchange, gpus));
    let sums = two(options, exchange, gpus, |_, mut backend, meeting| {
        let _meeting = meeting;
        latencies(&mut backend, options.quick).map_err(|error| error.to_string())
    });
    match sums {
        Err(error) => table.add(format!("{by}: sums"), Err(error)),
        Ok(sums) => {
            for (kib, took) in sums {
                let figure = format!("{:.1} us", took.as_secs_f64() * 1e6);
                table.add(format!("{by}: sum of {kib} KiB, two ranks on {how}"), Ok(figure));
            }
        }
    }
    let models = if options.quick { 1 } else { crate::goldens::VARIANTS.len() };
    for name in &crate::goldens::VARIANTS[..models] {
        let model = options.root.join("tests/models").join(name);
        let golden = golden_pair(options, exchange, gpus, &model);
        table.add(format!("{by}: goldens {name}, two ranks"), golden);
    }
}
