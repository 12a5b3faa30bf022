//! Ranks on GPUs that see each other's memory: same bits as ranks that exchange data through host
//! memory, with sums fused with norms and separate, one-shot and two-shot, in graphs.
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use kernels::backend::Buffer;
use kernels::backend::prelude::*;
use kernels::collective::{AbortHandle, Collective, local_group};
use kernels::cuda::{CudaBackend, GroupSetup};
use kernels::error::{CollectiveError, KernelError};
use testkit::models::variant;
use testkit::relay::SharedRelay;

use crate::cuda::check;
use crate::nccl::transcript;
use crate::rig::{On, fake_peers_alone};

/// All fused and one-shot; depending on size; all two-shot.
const EVERY_WAY: &[usize] = &[1 << 20, BY_SIZE, 0];
const BY_SIZE: usize = 1024;

fn same_bits(folder: &str, degree: u32, ways: &[usize]) {
    let model = variant(folder);
    let host = transcript(On::FakeCuda, &model, degree, 12);
    for &one_shot in ways {
        let devices = transcript(On::FakePeers(one_shot), &model, degree, 12);
        assert_eq!(devices, host, "one-shot up to {one_shot} bytes");
    }
}

#[test]
fn llama_gqa_tp2() {
    same_bits("llama-gqa", 2, EVERY_WAY);
}

/// Two ranks share a KV head.
#[test]
fn llama_gqa_tp4() {
    same_bits("llama-gqa", 4, EVERY_WAY);
}

#[test]
fn qwen2_tp2() {
    same_bits("qwen2", 2, &[BY_SIZE]);
}

#[test]
fn gemma3_tp2() {
    same_bits("gemma3", 2, &[BY_SIZE]);
}

#[test]
fn llama_mha_bias_tp4() {
    same_bits("llama-mha-bias", 4, &[BY_SIZE]);
}

#[test]
fn goldens_hold() {
    check(On::FakePeers(1 << 20), &variant("llama-gqa"), 2, 2, 12);
    check(On::FakePeers(1 << 20), &variant("qwen3"), 2, 1, 12);
}

/// Joins the other ranks, within `timeout`; returns the handle that aborts the exchange.
fn join(backend: &mut CudaBackend, timeout: Duration) -> Arc<dyn AbortHandle> {
    let mut handle = None;
    let joined = backend.join(GroupSetup {
        timeout,
        is_given_up: &|| false,
        relay: &mut SharedRelay::default(),
        on_abort_handle: &mut |given| handle = Some(given),
    });
    assert!(joined.unwrap().reason.contains("see each other's memory"));
    handle.unwrap()
}

/// The sum over all ranks of a buffer of `count` values.
fn sum(backend: &mut CudaBackend, count: usize, value: f32) -> Result<Vec<f32>, KernelError> {
    let mut data = backend.new_buffer(1, count)?;
    data.set_rows(1)?;
    backend.write_buffer(&mut data, &vec![value; count])?;
    backend.all_reduce(&mut data)?;
    backend.read_buffer(&data)
}

/// Rank 0 computes a sum that rank 1 does not join; returns its error, and after how long. Both
/// ranks work afterwards.
fn left_alone(timeout: Duration, abort_after: Option<Duration>) -> (KernelError, Duration) {
    let groups = [(); 2].map(|()| local_group(2, Duration::from_secs(60)).unwrap());
    let [first, second] = groups;
    let meeting = Barrier::new(2);
    let (sender, receiver) = channel();
    let run = |rank: usize, first: Box<dyn Collective>, second: Box<dyn Collective>| {
        let mut backend = fake_peers_alone(first);
        let handle = join(&mut backend, timeout);
        for count in [5, 4096, 300_000] {
            let values = sum(&mut backend, count, rank as f32 + 1.5).unwrap();
            assert_eq!(values, vec![4.0; count]);
        }
        if rank == 0 {
            if let Some(after) = abort_after {
                std::thread::spawn(move || {
                    std::thread::sleep(after);
                    handle.abort();
                });
            }
            let began = Instant::now();
            let error = sum(&mut backend, 64, 1.0).unwrap_err();
            sender.send((error, began.elapsed())).unwrap();
        }
        meeting.wait();
        backend.set_collective(second).unwrap();
        join(&mut backend, Duration::from_secs(60));
        assert_eq!(sum(&mut backend, 999, rank as f32).unwrap(), vec![1.0; 999]);
        meeting.wait();
    };
    std::thread::scope(|scope| {
        for (rank, (first, second)) in first.into_iter().zip(second).enumerate() {
            let run = &run;
            scope.spawn(move || run(rank, first, second));
        }
    });
    receiver.recv().unwrap()
}

#[test]
fn a_rank_that_waits_too_long_says_for_whom() {
    // It holds for the ranks' joining and their first sums as well.
    let (error, took) = left_alone(Duration::from_secs(10), None);
    assert!(took >= Duration::from_millis(9900), "{took:?}");
    let named =
        matches!(&error, KernelError::Collective(CollectiveError::TimedOut { rank: 1, .. }));
    let stalled = matches!(&error, KernelError::Collective(CollectiveError::Stalled { .. }));
    assert!(named || stalled, "{error}");
}

#[test]
fn a_rank_that_waits_is_freed_by_any_thread() {
    let (error, took) = left_alone(Duration::from_secs(300), Some(Duration::from_millis(300)));
    assert!(matches!(error, KernelError::Collective(CollectiveError::Aborted)), "{error}");
    assert!(took < Duration::from_secs(60), "{took:?}");
}
