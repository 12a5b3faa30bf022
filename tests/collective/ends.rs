//! All the ways in which a group can end.
use std::io::Write as _;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::MetadataExt as _;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kernels::backend::prelude::*;
use kernels::collective::{
    SharedMemoryOptions, TcpOptions, shared_memory, shared_memory_bytes, single_rank, tcp,
};
use kernels::cpu::Precision;
use kernels::{CollectiveError, CpuBackend, KernelError};

use crate::groups::{KINDS, Kind, run, unique_name};

#[test]
fn an_abort_frees_every_rank_and_lasts() {
    for kind in KINDS {
        let waited = run(kind, 3, Duration::from_secs(60), |rank, mut collective| {
            if rank == 0 {
                let handle = collective.abort_handle();
                std::thread::sleep(Duration::from_millis(150));
                assert!(!collective.is_aborted(), "{kind:?}");
                handle.abort();
                handle.abort();
                assert!(collective.is_aborted(), "{kind:?}");
                return Duration::ZERO;
            }
            let began = Instant::now();
            let error = collective.all_reduce_sum(&mut [1.0; 10]).unwrap_err();
            let gone = matches!(error, CollectiveError::Aborted | CollectiveError::LinkLost { .. });
            assert!(gone, "{kind:?}: {error}");
            assert!(collective.barrier().is_err(), "a group that ended stays so");
            began.elapsed()
        });
        let longest = waited.into_iter().max().unwrap();
        assert!(longest < Duration::from_secs(20), "not by its deadline: {kind:?}: {longest:?}");
    }
}

#[test]
fn a_rank_that_never_comes_is_named_within_the_deadline() {
    for kind in KINDS {
        // It holds for the ranks' connecting as well.
        let timeout = Duration::from_secs(5);
        // The missing rank stays until the others have given up.
        let given_up = Barrier::new(3);
        run(kind, 3, timeout, |rank, mut collective| {
            if rank == 1 {
                given_up.wait();
                return;
            }
            let began = Instant::now();
            let ended = collective.barrier();
            let waited = began.elapsed();
            given_up.wait();
            let error = ended.unwrap_err();
            assert!(waited < Duration::from_secs(20), "{kind:?}: {error}");
            match error {
                CollectiveError::TimedOut { rank, .. } => assert_eq!(rank, 1, "{kind:?}"),
                // The other rank timed out first, and said so.
                CollectiveError::Aborted | CollectiveError::LinkLost { .. } => {}
                other => panic!("{kind:?}: {other}"),
            }
        });
    }
}

#[test]
fn ranks_that_disagree_are_told_so() {
    for kind in KINDS {
        let errors = run(kind, 2, Duration::from_secs(5), |rank, mut collective| {
            let len = if rank == 0 { 8 } else { 16 };
            collective.all_reduce_sum(&mut vec![0.0; len]).unwrap_err().to_string()
        });
        let told = errors.iter().any(|error| error.contains("8") && error.contains("16"));
        assert!(told, "{kind:?}: {errors:?}");
        let errors = run(kind, 2, Duration::from_secs(5), |rank, mut collective| {
            if rank == 0 {
                collective.broadcast(&mut [0; 4], 0).is_err()
            } else {
                collective.all_reduce_sum(&mut [0.0; 4]).is_err()
            }
        });
        assert_eq!(errors, [true, true], "{kind:?}: different operations");
    }
}

#[test]
fn shared_memory_leaves_nothing_behind_and_checks_its_names() {
    let objects = || {
        std::fs::read_dir("/dev/shm")
            .unwrap()
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|name| name.starts_with(&format!("tutti-test-{}-", std::process::id())))
            .count()
    };
    let long = Duration::from_secs(60);
    run(Kind::SharedMemory, 2, long, |_, mut collective| collective.barrier().unwrap());
    let timeout = Duration::from_millis(300);
    let lonely = SharedMemoryOptions { name: unique_name(), rank: 0, world_size: 2, timeout };
    let error = shared_memory(&lonely, &|| false).unwrap_err().to_string();
    assert!(error.contains("1 of 2 ranks"), "{error}");
    let patient = SharedMemoryOptions { timeout: long, ..lonely.clone() };
    for rank in 0..2 {
        let error = shared_memory(&SharedMemoryOptions { rank, ..patient.clone() }, &|| true);
        assert!(matches!(error, Err(CollectiveError::Aborted)));
    }
    // While a rank waits, its object's memory is allocated, so nobody else is promised it.
    let waiting = SharedMemoryOptions { name: unique_name(), ..patient };
    let is_over = AtomicBool::new(false);
    let held = std::thread::scope(|scope| {
        scope.spawn(|| shared_memory(&waiting, &|| is_over.load(Ordering::Relaxed)).map(|_| ()));
        let path = format!("/dev/shm/{}", waiting.name);
        let held = || std::fs::metadata(&path).map_or(0, |data| data.blocks() * 512);
        let began = Instant::now();
        while held() < shared_memory_bytes(2) as u64 && began.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let held = held();
        is_over.store(true, Ordering::Relaxed);
        held
    });
    assert!(held >= shared_memory_bytes(2) as u64, "{held} bytes");
    let late = SharedMemoryOptions { rank: 1, ..lonely };
    assert!(
        shared_memory(&late, &|| false).unwrap_err().to_string().contains("rank 0 did not create")
    );
    for name in ["", "a/b", "..", "a b", "\u{e9}"] {
        let named = SharedMemoryOptions { name: name.to_owned(), ..late.clone() };
        assert!(
            shared_memory(&named, &|| false).unwrap_err().to_string().contains("letters, digits")
        );
    }
    // Other tests of this binary create groups too; ours must be gone.
    let began = Instant::now();
    while objects() > 0 && began.elapsed() < Duration::from_secs(5) {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(objects(), 0);
}

#[test]
fn waiting_for_the_other_ranks_can_be_given_up() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let absent = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let own = listener.local_addr().unwrap();
    for (rank, ranks) in [(0, [own, absent]), (1, [absent, own])] {
        let began = Instant::now();
        let is_given_up = || began.elapsed() > Duration::from_millis(50);
        let timeout = Duration::from_secs(60);
        let options = TcpOptions { listener: &listener, ranks: &ranks, rank, token: 1, timeout };
        let error = tcp(&options, &is_given_up);
        assert!(matches!(error, Err(CollectiveError::Aborted)));
        assert!(began.elapsed() < Duration::from_secs(10));
    }
}

#[test]
fn tcp_strangers_are_sent_away_and_the_listener_serves_the_next_group() {
    let listeners: Vec<TcpListener> =
        (0..2).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let ranks: Vec<_> = listeners.iter().map(|l| l.local_addr().unwrap()).collect();
    for token in [7, 8] {
        // One connection speaks another protocol, one belongs to an ended group; both wait in the
        // backlog.
        let mut stranger = TcpStream::connect(ranks[0]).unwrap();
        stranger.write_all(b"GET / HTTP/1.1\r\nhost: somewhere\r\n\r\n").unwrap();
        let mut stale = TcpStream::connect(ranks[0]).unwrap();
        let greeting: Vec<u8> =
            [*b"TUTICOL2", 1u64.to_le_bytes(), 2u64.to_le_bytes(), 6u64.to_le_bytes()].concat();
        stale.write_all(&greeting).unwrap();
        std::thread::scope(|scope| {
            for rank in 0..2u32 {
                let (listener, ranks) = (&listeners[rank as usize], &ranks);
                scope.spawn(move || {
                    let timeout = Duration::from_secs(10);
                    let options = TcpOptions { listener, ranks, rank, token, timeout };
                    let mut collective = tcp(&options, &|| false).unwrap();
                    let mut value = [f32::from(rank as u8 + 1)];
                    collective.all_reduce_sum(&mut value).unwrap();
                    assert_eq!(value, [3.0]);
                });
            }
        });
    }
}

#[test]
fn tcp_strangers_do_not_hold_a_rank_beyond_its_deadline() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let absent = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let ranks = [listener.local_addr().unwrap(), absent];
    let is_over = AtomicBool::new(false);
    let mut stranger = TcpStream::connect(ranks[0]).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // A valid greeting that takes 16 s.
            let greeting =
                [*b"TUTICOL2", 1u64.to_le_bytes(), 2u64.to_le_bytes(), 1u64.to_le_bytes()].concat();
            for byte in greeting {
                if is_over.load(Ordering::Relaxed) || stranger.write_all(&[byte]).is_err() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(500));
            }
        });
        let began = Instant::now();
        let (rank, timeout) = (0, Duration::from_millis(1500));
        let options = TcpOptions { listener: &listener, ranks: &ranks, rank, token: 1, timeout };
        let error = tcp(&options, &|| false).unwrap_err().to_string();
        assert!(error.contains("rank 1: did not connect within 1.5s"), "{error}");
        assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
        is_over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn tcp_ranks_meet_however_many_strangers_say_nothing() {
    let listeners: Vec<TcpListener> =
        (0..2).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let ranks: Vec<_> = listeners.iter().map(|l| l.local_addr().unwrap()).collect();
    // They connect before the ranks do, and others follow meanwhile.
    let mut strangers: Vec<TcpStream> =
        (0..40).map(|_| TcpStream::connect(ranks[0]).unwrap()).collect();
    let is_over = AtomicBool::new(false);
    let meet = |rank: u32| {
        let (listener, timeout) = (&listeners[rank as usize], Duration::from_secs(60));
        let options = TcpOptions { listener, ranks: &ranks, rank, token: 3, timeout };
        tcp(&options, &|| false).unwrap().barrier()
    };
    let began = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                strangers.extend(TcpStream::connect(ranks[0]));
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        let other = scope.spawn(|| meet(1));
        let met = (meet(0), other.join().unwrap());
        is_over.store(true, Ordering::Relaxed);
        assert!(matches!(met, (Ok(()), Ok(()))), "{met:?}");
    });
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
}

#[test]
fn tcp_ranks_find_each_other_behind_an_earlier_formation() {
    let listeners: Vec<TcpListener> =
        (0..2).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let ranks: Vec<_> = listeners.iter().map(|l| l.local_addr().unwrap()).collect();
    let is_old = AtomicBool::new(true);
    let meet = |rank: u32, token: u64, is_given_up: &dyn Fn() -> bool| {
        let (listener, timeout) = (&listeners[rank as usize], Duration::from_secs(20));
        tcp(&TcpOptions { listener, ranks: &ranks, rank, token, timeout }, is_given_up)
    };
    std::thread::scope(|scope| {
        // Rank 1 is already in the next formation, and connects to rank 0, which is still in this
        // one.
        scope.spawn(|| {
            let old = meet(0, 6, &|| !is_old.load(Ordering::Relaxed));
            assert!(matches!(old, Err(CollectiveError::Aborted)));
            meet(0, 7, &|| false).unwrap().barrier().unwrap();
        });
        let early = scope.spawn(|| meet(1, 7, &|| false).unwrap().barrier().unwrap());
        std::thread::sleep(Duration::from_millis(300));
        is_old.store(false, Ordering::Relaxed);
        early.join().unwrap();
    });
}

#[test]
fn a_root_without_room_ends_the_group() {
    for kind in KINDS {
        let errors = run(kind, 2, Duration::from_secs(60), |rank, mut collective| {
            if rank == 1 {
                // Its part of the gather may finish before the root fails; the barrier cannot.
                let gathered = collective.gather(&[1.0; 4], &mut [], 0);
                return gathered.and_then(|()| collective.barrier()).unwrap_err();
            }
            let error = collective.gather(&[1.0; 4], &mut [0.0; 7], 0).unwrap_err();
            assert_eq!(error.to_string().matches("room for 7 elements, 8 are").count(), 1);
            // The root stays, like a rank whose next operation comes much later.
            std::thread::sleep(Duration::from_millis(500));
            error
        });
        let gone = matches!(errors[1], CollectiveError::Aborted | CollectiveError::LinkLost { .. });
        assert!(gone, "{kind:?}: {:?}", errors[1]);
    }
}

#[test]
fn one_rank_alone_can_be_aborted_too() {
    let mut alone = single_rank();
    let mut values = [1.5, -0.0];
    alone.all_reduce_sum(&mut values).unwrap();
    assert_eq!(values, [1.5, -0.0]);
    assert!(!alone.is_aborted());
    alone.abort_handle().abort();
    assert!(matches!(alone.barrier(), Err(CollectiveError::Aborted)) && alone.is_aborted());
}

/// It exchanges nothing within a step, and looks between its layers.
#[test]
fn a_cpu_that_computes_alone_learns_of_an_abort_as_well() {
    let alone = single_rank();
    let handle = alone.abort_handle();
    let mut cpu = CpuBackend::new(1, Precision::Float32, alone).unwrap();
    assert!(cpu.check_abort().is_ok());
    handle.abort();
    let error = cpu.check_abort().unwrap_err();
    assert!(matches!(error, KernelError::Collective(CollectiveError::Aborted)), "{error}");
}
