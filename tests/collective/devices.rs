//! Ranks that exchange data on their devices, with stand-ins for NVIDIA's driver and NCCL: the
//! effect of a missing rank, an abort and a deadline; afterwards ranks must work again.
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kernels::backend::Buffer as _;
use kernels::backend::prelude::*;
use kernels::collective::{AbortAll, AbortHandle, Collective, local_group, single_rank};
use kernels::cuda::choice::Capability;
use kernels::cuda::{CudaBackend, CudaOptions, ExchangePolicy, GroupSetup};
use kernels::{CollectiveError, KernelError};
use testkit::fake_cuda::{FakeCuda, fake_cuda_of, fake_nccl};
use testkit::relay::SharedRelay;

const LONG: Duration = Duration::from_secs(30);
/// Time limit for an abort: generous, since many tests share the machine.
const SOON: Duration = Duration::from_secs(5);

fn options(rank: u32) -> CudaOptions {
    static FAKES: OnceLock<(FakeCuda, std::path::PathBuf)> = OnceLock::new();
    let (cuda, nccl) = FAKES.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let cuda = fake_cuda_of(folder, 4).unwrap();
        let nccl = fake_nccl(folder, &cuda, None).unwrap();
        (cuda, nccl)
    });
    CudaOptions {
        ordinal: rank,
        folders: vec![cuda.libraries.clone()],
        kernels: Some(cuda.kernels.clone()),
        exchange: ExchangePolicy::Nccl,
        nccl_lib: Some(nccl.clone()),
        ..CudaOptions::default()
    }
}

type Work = Box<dyn FnOnce(&mut CudaBackend) + Send>;

/// Ranks that execute commands, each on its own thread with its own backend.
struct Ranks {
    work: Vec<Sender<Work>>,
    threads: Vec<JoinHandle<()>>,
}

impl Ranks {
    fn new(count: u32) -> Self {
        Self::with(count, false)
    }

    fn with(count: u32, batch_invariant: bool) -> Self {
        let group = local_group(count as usize, LONG).unwrap();
        let (mut work, mut threads) = (Vec::new(), Vec::new());
        for (rank, collective) in (0..count).zip(group) {
            let (sender, receiver): (Sender<Work>, Receiver<Work>) = channel();
            work.push(sender);
            // Outside the thread: it may have to compile the stand-in, and no rank waits for
            // another meanwhile.
            let options = CudaOptions { batch_invariant, ..options(rank) };
            threads.push(std::thread::spawn(move || {
                let mut backend = CudaBackend::new(options, collective).unwrap();
                for work in receiver {
                    work(&mut backend);
                }
            }));
        }
        Self { work, threads }
    }

    /// Sends a command to a rank; the receiver gets its result.
    fn tell<T: Send + 'static>(
        &self,
        rank: usize,
        work: impl FnOnce(&mut CudaBackend) -> T + Send + 'static,
    ) -> Receiver<T> {
        let (sender, answer) = channel();
        let work: Work = Box::new(move |backend| drop(sender.send(work(backend))));
        self.work[rank].send(work).unwrap();
        answer
    }

    /// Makes all ranks join a new group.
    fn join(&self, timeout: Duration) -> Vec<Arc<AbortAll>> {
        let collectives = local_group(self.work.len(), LONG).unwrap();
        let relay = SharedRelay::default();
        let joined: Vec<_> = collectives
            .into_iter()
            .enumerate()
            .map(|(rank, collective)| {
                let relay = relay.clone();
                self.tell(rank, move |backend| join(backend, collective, relay, timeout))
            })
            .collect();
        joined.into_iter().map(|joined| joined.recv_timeout(LONG).unwrap().unwrap()).collect()
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.work.clear();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn join(
    backend: &mut CudaBackend,
    collective: Box<dyn Collective>,
    mut relay: SharedRelay,
    timeout: Duration,
) -> Result<Arc<AbortAll>, KernelError> {
    let all = Arc::new(AbortAll::default());
    all.add(collective.abort_handle());
    backend.set_collective(collective)?;
    let joined = backend.join(GroupSetup {
        timeout,
        is_given_up: &|| false,
        relay: &mut relay,
        on_abort_handle: &mut |handle| all.add(handle),
    })?;
    assert_eq!(joined.algorithm, "nccl");
    Ok(all)
}

/// Sums `value` over the ranks.
fn sum(backend: &mut CudaBackend, value: f32) -> Result<Vec<f32>, KernelError> {
    sum_of(backend, (2, 8), value)
}

fn sum_of(
    backend: &mut CudaBackend,
    (rows, width): (usize, usize),
    value: f32,
) -> Result<Vec<f32>, KernelError> {
    let mut buffer = backend.new_buffer(rows, width)?;
    backend.write_buffer(&mut buffer, &vec![value; rows * width])?;
    backend.all_reduce(&mut buffer)?;
    assert_eq!(buffer.rows(), rows);
    backend.read_buffer(&buffer)
}

fn aborted(error: &KernelError) -> bool {
    matches!(error, KernelError::Collective(CollectiveError::Aborted))
}

fn all_sum(ranks: &Ranks) {
    let answers: Vec<_> = (0..ranks.work.len())
        .map(|rank| ranks.tell(rank, move |backend| sum(backend, 1.5 + rank as f32)))
        .collect();
    let total: f32 = (0..ranks.work.len()).map(|rank| 1.5 + rank as f32).sum();
    for answer in answers {
        assert_eq!(answer.recv_timeout(LONG).unwrap().unwrap(), vec![total; 16]);
    }
}

#[test]
fn ranks_sum_and_gather_on_their_devices() {
    for count in [1, 2, 4] {
        let ranks = Ranks::new(count);
        ranks.join(LONG);
        all_sum(&ranks);
        let gathered: Vec<_> = (0..count as usize)
            .map(|rank| {
                ranks.tell(rank, move |backend| {
                    let mut local = backend.new_buffer(3, 5).unwrap();
                    let mut full = backend.new_buffer(3, 5 * count as usize).unwrap();
                    let own: Vec<f32> = (0..15).map(|i| (100 * rank + i) as f32).collect();
                    backend.write_buffer(&mut local, &own).unwrap();
                    backend.gather_logits(&local, &mut full).unwrap();
                    backend.read_buffer(&full).unwrap()
                })
            })
            .collect();
        let row = |row: usize| {
            let of = move |rank: usize| (0..5).map(move |i| (100 * rank + row * 5 + i) as f32);
            (0..count as usize).flat_map(of)
        };
        let expected: Vec<f32> = (0..3).flat_map(row).collect();
        for full in gathered {
            assert_eq!(full.recv_timeout(LONG).unwrap(), expected, "{count} ranks");
        }
    }
}

/// What is added to the residual stream is rounded to bf16 in large steps, and only there: not in
/// steps of few rows, in small messages, or where the same bits are promised; other sums never.
#[test]
fn only_large_steps_are_summed_in_bf16() {
    // No bf16; its sums over 2 and 4 ranks are f32.
    let value = 1.0 + 1.0 / 1024.0;
    for (count, batch_invariant) in [(2, false), (4, false), (2, true)] {
        let ranks = Ranks::with(count, batch_invariant);
        ranks.join(LONG);
        for (rows, width, is_rounded) in
            [(32, 1000, false), (33, 1000, !batch_invariant), (33, 400, false)]
        {
            let sums = |is_delta: bool| -> Vec<f32> {
                let sum = move |backend: &mut CudaBackend| {
                    let mut buffer = backend.new_buffer(rows, width).unwrap();
                    backend.write_buffer(&mut buffer, &vec![value; rows * width]).unwrap();
                    match is_delta {
                        true => backend.all_reduce_delta(&mut buffer).unwrap(),
                        false => backend.all_reduce(&mut buffer).unwrap(),
                    }
                    backend.read_buffer(&buffer).unwrap()
                };
                let all: Vec<_> = (0..count as usize).map(|rank| ranks.tell(rank, sum)).collect();
                all.into_iter().flat_map(|sums| sums.recv_timeout(LONG).unwrap()).collect()
            };
            let exact = count as f32 * value;
            let expected = if is_rounded { count as f32 } else { exact };
            assert!(sums(true).iter().all(|it| *it == expected), "{count} {rows} {width}");
            assert!(sums(false).iter().all(|it| *it == exact), "{count} {rows} {width}");
        }
    }
}

/// Small messages are summed as a tree over the ranks in order: steps of other sizes sum them, too.
/// Larger ones are NCCL's, which receives less, unless the same bits are promised.
#[test]
fn four_ranks_are_added_as_a_tree() {
    let values = [1e8f32, 1.0, -1e8, 3.0];
    let tree = (values[0] + values[1]) + (values[2] + values[3]);
    for batch_invariant in [false, true] {
        let ranks = Ranks::with(4, batch_invariant);
        ranks.join(LONG);
        // 64 KiB are the most that are gathered.
        for (width, in_order) in [(8, true), (8192, true), (8193, batch_invariant)] {
            let sums: Vec<_> = values
                .into_iter()
                .enumerate()
                .map(|(rank, value)| {
                    ranks.tell(rank, move |backend| sum_of(backend, (2, width), value))
                })
                .collect();
            for answer in sums {
                let found = answer.recv_timeout(LONG).unwrap().unwrap();
                let is_tree = found == vec![tree; 2 * width];
                assert_eq!(is_tree, in_order, "{width} {batch_invariant} {:?}", &found[..2]);
            }
        }
    }
}

/// A rank's stream waits for a rank that never arrives; the coordinator's abort frees it.
#[test]
fn an_abort_frees_a_rank_that_waits_and_the_next_group_works() {
    let ranks = Ranks::new(2);
    let handles = ranks.join(LONG);
    all_sum(&ranks);
    let waits = ranks.tell(0, |backend| sum(backend, 1.0));
    assert!(waits.recv_timeout(Duration::from_millis(300)).is_err(), "it has to wait");
    handles[0].abort();
    // It usually takes about ten milliseconds.
    let error = waits.recv_timeout(SOON).unwrap().unwrap_err();
    assert!(aborted(&error), "{error}");
    handles[1].abort();
    // Memory and context still work.
    for _ in 0..3 {
        ranks.join(LONG);
        all_sum(&ranks);
    }
}

/// NCCL releases an aborted communicator when all ranks of the host have left theirs. One that
/// stands still costs the others neither time nor their GPU.
#[test]
fn a_rank_that_stands_still_holds_up_no_other() {
    let ranks = Ranks::new(2);
    let handles = ranks.join(LONG);
    all_sum(&ranks);
    let waits = ranks.tell(0, |backend| sum(backend, 1.0));
    handles[0].abort();
    let error = waits.recv_timeout(SOON).unwrap().unwrap_err();
    assert!(aborted(&error), "{error}");
    // It leaves, and joins others: here nobody else.
    let leaves = ranks.tell(0, |backend| backend.set_collective(single_rank()));
    leaves.recv_timeout(SOON).unwrap().unwrap();
    let joins = ranks.tell(0, |backend| {
        join(backend, single_rank(), SharedRelay::default(), LONG).map(drop)?;
        Ok::<_, KernelError>(backend.take_left_behind())
    });
    let reason = joins.recv_timeout(LONG).unwrap().unwrap();
    assert!(reason.is_some_and(|reason| reason.contains("left behind")));
    // Memory and context work, while the other still has its communicator; then with both again.
    let own = ranks.tell(0, |backend| sum(backend, 2.5)).recv_timeout(SOON).unwrap().unwrap();
    assert_eq!(own, vec![2.5; 16]);
    ranks.join(LONG);
    all_sum(&ranks);
    let again = ranks.tell(0, |backend| backend.take_left_behind());
    assert_eq!(again.recv_timeout(SOON).unwrap(), None);
}

/// Ranks stop waiting at the deadline, without an abort from the coordinator.
#[test]
fn a_deadline_ends_the_wait_and_the_next_group_works() {
    let ranks = Ranks::new(2);
    // It holds for the ranks' connecting as well.
    ranks.join(Duration::from_secs(5));
    let error = ranks.tell(0, |backend| sum(backend, 1.0)).recv_timeout(LONG).unwrap().unwrap_err();
    let stalled = matches!(
        error,
        KernelError::Collective(CollectiveError::Stalled { algorithm: "nccl", .. })
    );
    assert!(stalled, "{error}");
    let error = ranks.tell(0, |backend| sum(backend, 1.0)).recv_timeout(SOON).unwrap().unwrap_err();
    assert!(aborted(&error), "{error}");
    ranks.join(LONG);
    all_sum(&ranks);
}

/// Rank 1 knows the other ranks' capabilities, and then does not connect.
#[test]
fn ranks_that_do_not_connect_are_given_up() {
    let ranks = Ranks::new(2);
    let mut group = local_group(2, LONG).unwrap().into_iter();
    let (first, mut second) = (group.next().unwrap(), group.next().unwrap());
    let short = Duration::from_millis(300);
    let relay = SharedRelay::default();
    let joins = ranks.tell(0, move |backend| join(backend, first, relay, short).map(|_| ()));
    // The announcement of a rank on another GPU.
    let says = Capability {
        wish: ExchangePolicy::Nccl,
        gpu: [7; 16],
        nccl: 22_809,
        graphs: true,
        process: 7,
        ..Capability::default()
    };
    let own: Vec<f32> = says.to_bytes().into_iter().map(f32::from).collect();
    second.all_gather(&own, &mut vec![0.0; 2 * own.len()]).unwrap();
    let error = joins.recv_timeout(SOON).unwrap().unwrap_err();
    let stalled = matches!(error, KernelError::Collective(CollectiveError::Stalled { .. }));
    assert!(stalled, "{error}");
    ranks.join(LONG);
    all_sum(&ranks);
}

#[test]
fn a_group_that_is_left_without_an_abort_ends() {
    let ranks = Ranks::new(2);
    for _ in 0..3 {
        ranks.join(LONG);
        all_sum(&ranks);
    }
    let began = Instant::now();
    drop(ranks);
    assert!(began.elapsed() < SOON);
}
