//! How long GPUs wait for and exchange data with each other, as their backends report it.
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kernels::backend::Buffer;
use kernels::backend::prelude::*;
use kernels::collective::{Collective, local_group};
use kernels::cuda::{CudaBackend, CudaOptions};
use kernels::sampling::{SampleParams, SampleRow};
use testkit::relay::SharedRelay;

use crate::rig::{fake_nccl_options, fake_peer, join_nccl};

/// How much later rank 1 begins than rank 0.
const LATE: Duration = Duration::from_secs(2);
/// Time limit that is generous enough for a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);
const VOCAB: usize = 8;

/// Computes a sum with the other rank and samples, as a step does; rank 1 is late, counted from
/// when rank 0 says that it begins, however long it takes until then.
fn step(backend: &mut CudaBackend, first_begins: &AtomicBool) {
    let mut data = backend.new_buffer(1, VOCAB).unwrap();
    data.set_rows(1).unwrap();
    backend.write_buffer(&mut data, &[1.5; VOCAB]).unwrap();
    if backend.rank() == 0 {
        first_begins.store(true, Ordering::Relaxed);
    } else {
        let began = Instant::now();
        while !first_begins.load(Ordering::Relaxed) {
            assert!(began.elapsed() < PATIENCE, "rank 0 does not begin");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(LATE);
    }
    backend.all_reduce(&mut data).unwrap();
    let params = SampleParams::default();
    let row = SampleRow { params: &params, prompt: &[], output: &[], allowed: None };
    backend.sample(&data, VOCAB, 0, &[row], &mut Vec::new()).unwrap();
}

/// The reported time, once there is a report: it may come after a step's tokens.
fn reported(backend: &mut CudaBackend) -> Duration {
    let began = Instant::now();
    loop {
        let time = backend.take_collective_time();
        if time > Duration::ZERO || began.elapsed() > PATIENCE {
            return time;
        }
    }
}

/// What two ranks, made by `make`, say after a step.
fn on_two_ranks<R: Send>(
    make: impl Fn(Box<dyn Collective>, SharedRelay) -> CudaBackend + Sync,
    say: impl Fn(&mut CudaBackend) -> R + Sync,
) -> Vec<R> {
    let (relay, first_begins) = (SharedRelay::default(), AtomicBool::new(false));
    let run = |collective, relay| {
        let mut backend = make(collective, relay);
        // The rank that connects last must not count as late.
        backend.broadcast_tokens(&mut [0]).unwrap();
        let _ = backend.take_collective_time();
        step(&mut backend, &first_begins);
        say(&mut backend)
    };
    std::thread::scope(|scope| {
        let group = local_group(2, Duration::from_secs(60)).unwrap();
        let threads: Vec<_> = (group.into_iter())
            .map(|collective| {
                let (run, relay) = (&run, relay.clone());
                scope.spawn(move || run(collective, relay))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn a_rank_that_waits_for_a_late_one_reports_that_time() {
    let make = |collective, _| {
        let mut backend = fake_peer(256 << 10, collective);
        // What was exchanged for a trial is not reported.
        assert_eq!(backend.take_collective_time(), Duration::ZERO);
        backend
    };
    let say = |backend: &mut CudaBackend| {
        assert!(backend.times_collectives());
        reported(backend)
    };
    let times = on_two_ranks(make, say);
    // Rank 0 may be held up for a while between its sign and the sum.
    assert!(times[0] > LATE / 8, "{times:?}");
    assert!(times[1] > Duration::ZERO && times[1] < times[0], "{times:?}");
}

#[test]
fn exchanges_by_nccl_are_timed_unless_they_are_in_graphs() {
    for graphs in [false, true] {
        let make = |collective: Box<dyn Collective>, relay| {
            let options = CudaOptions { graphs, ..fake_nccl_options(collective.rank()) };
            let mut backend = CudaBackend::new(options, collective).unwrap();
            join_nccl(&mut backend, relay);
            backend
        };
        let say = |backend: &mut CudaBackend| match backend.times_collectives() {
            true => reported(backend),
            false => backend.take_collective_time(),
        };
        let times = on_two_ranks(make, say);
        assert!(times.iter().all(|time| (*time == Duration::ZERO) == graphs), "{times:?}");
    }
}
