//! Inner loops in plain Rust, for any architecture.
use super::super::pack::PairRow;
use super::{Acc, ActPair};

/// See [`super::tile`].
pub(super) fn tile<const M: usize>(acts: &[ActPair<M>], weights: &[PairRow], acc: &mut [Acc; M]) {
    for quarter in 0..4 {
        let mut sums = [[0.0f32; 16]; M];
        for (sums, acc) in sums.iter_mut().zip(acc.iter()) {
            *sums = acc[quarter];
        }
        for ([even, odd], weight) in acts.iter().zip(weights) {
            let words = &weight[quarter];
            for ((sums, &even), &odd) in sums.iter_mut().zip(even).zip(odd) {
                let (even, odd) = (f32::from_bits(even), f32::from_bits(odd));
                for (sum, &word) in sums.iter_mut().zip(words) {
                    *sum += even * f32::from_bits(word << 16);
                    *sum += odd * f32::from_bits(word & 0xFFFF_0000);
                }
            }
        }
        for (sums, acc) in sums.iter().zip(acc.iter_mut()) {
            acc[quarter] = *sums;
        }
    }
}
