//! Every operation against a naive oracle.
use std::time::Duration;

use kernels::collective::Collective;

use crate::groups::{KINDS, Kind, run};

const TIMEOUT: Duration = Duration::from_secs(20);

/// Numbers for which the order of summation matters.
fn data(rank: u32, len: usize, salt: u64) -> Vec<f32> {
    let mut state = salt ^ (u64::from(rank) << 32) | 1;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let magnitude = [1e-4, 1.0, 3e4][(state >> 60) as usize % 3];
            ((state >> 33) as f32 / 2e9 - 1.0) * magnitude
        })
        .collect()
}

/// Sums as a binary tree over the ranks in order: the largest complete subtree, then the rest in
/// the same way.
fn sum(ranks: std::ops::Range<u32>, len: usize, salt: u64) -> Vec<f32> {
    let count = ranks.end - ranks.start;
    if count == 1 {
        return data(ranks.start, len, salt);
    }
    let middle = ranks.start + count.next_power_of_two() / 2;
    let rest = sum(middle..ranks.end, len, salt);
    let whole = sum(ranks.start..middle, len, salt);
    whole.iter().zip(rest).map(|(a, b)| a + b).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn one_of_each(collective: &mut dyn Collective, rank: u32, ranks: u32, len: usize, salt: u64) {
    let mut reduced = data(rank, len, salt);
    collective.all_reduce_sum(&mut reduced).unwrap();
    let expected = sum(0..ranks, len, salt);
    assert!(bits(&reduced) == bits(&expected), "summed as a tree over {ranks} ranks, bit by bit");
    let all: Vec<f32> = (0..ranks).flat_map(|rank| data(rank, len, salt)).collect();
    let mut gathered = vec![0.0; all.len()];
    collective.all_gather(&data(rank, len, salt), &mut gathered).unwrap();
    assert_eq!(gathered, all);
    let root = salt as u32 % ranks;
    let mut at_root = if rank == root { vec![0.0; all.len()] } else { Vec::new() };
    collective.gather(&data(rank, len, salt), &mut at_root, root).unwrap();
    assert_eq!(at_root, if rank == root { all } else { Vec::new() });
    let mut words: Vec<u32> = (0..len as u32).map(|i| i * (rank + 1)).collect();
    collective.broadcast(&mut words, root).unwrap();
    assert!(words.iter().enumerate().all(|(i, word)| *word == i as u32 * (root + 1)));
    collective.barrier().unwrap();
}

#[test]
fn every_operation_of_every_kind_at_every_size() {
    for kind in KINDS {
        for ranks in 1..=4 {
            run(kind, ranks, TIMEOUT, |rank, mut collective| {
                assert_eq!((collective.rank(), collective.world_size()), (rank, ranks));
                for (salt, len) in (1u64..).zip([0, 1, 3, 1000, 32_768, 32_769, 100_000]) {
                    one_of_each(&mut *collective, rank, ranks, len, salt);
                }
            });
        }
    }
}

#[test]
fn thousands_of_operations_in_a_row_with_delays() {
    for (kind, rounds) in [(Kind::Threads, 1500), (Kind::SharedMemory, 1500), (Kind::Tcp, 400)] {
        run(kind, 3, TIMEOUT, |rank, mut collective| {
            for round in 0..rounds {
                let mixed = (round ^ (u64::from(rank) << 7)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                if mixed >> 59 == 0 {
                    std::thread::sleep(Duration::from_micros(mixed >> 40 & 0xff));
                }
                let len = (round * 37 % 300) as usize;
                one_of_each(&mut *collective, rank, 3, len, round);
            }
        });
    }
}

#[test]
fn large_messages_both_ways_do_not_deadlock() {
    let len = 3_000_000;
    let results = run(Kind::Tcp, 2, TIMEOUT, |rank, mut collective| {
        let mut values = data(rank, len, 9);
        collective.all_reduce_sum(&mut values).unwrap();
        bits(&values)
    });
    let expected = bits(&sum(0..2, len, 9));
    assert!(results.iter().all(|result| *result == expected));
}
