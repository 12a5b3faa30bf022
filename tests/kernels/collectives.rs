//! How the backend passes buffers to its collective, with simulated ranks.
use kernels::KernelError;
use kernels::backend::Buffer;
use kernels::backend::prelude::*;
use kernels::cpu::{CpuBackend, Precision};

use crate::support::{Pretend, Random, bits, buffer, poisoned};

fn backend(world: u32) -> CpuBackend {
    CpuBackend::new(1, Precision::Float32, Box::new(Pretend { world })).unwrap()
}

#[test]
fn logits_of_all_ranks_lie_side_by_side() {
    let mut random = Random(21);
    for world in [1, 3] {
        let mut backend = backend(world);
        let local = random.vec(4 * 5);
        let local_buffer = buffer(&mut backend, &local, 5);
        let mut full = poisoned(&mut backend, 6, 5 * world as usize);
        backend.gather_logits(&local_buffer, &mut full).unwrap();
        assert_eq!(full.rows(), 4);
        for (row, full) in full.values().chunks(5 * world as usize).enumerate() {
            let want: Vec<f32> = (0..world)
                .flat_map(|rank| (0..5).map(move |i| (rank, i)))
                .map(|(rank, i)| local[row * 5 + i] * (rank + 1) as f32)
                .collect();
            assert_eq!(bits(full), bits(&want));
        }
        let mut narrow = poisoned(&mut backend, 6, 4);
        let error = backend.gather_logits(&local_buffer, &mut narrow);
        assert!(matches!(error, Err(KernelError::Shape { .. })), "{error:?}");
    }
}

#[test]
fn only_rows_in_use_are_reduced() {
    let mut backend = backend(3);
    let mut data = buffer(&mut backend, &[1.0; 8], 2);
    data.set_rows(3).unwrap();
    backend.all_reduce(&mut data).unwrap();
    data.set_rows(4).unwrap();
    assert_eq!(data.values(), &[6.0, 6.0, 6.0, 6.0, 6.0, 6.0, 1.0, 1.0]);
    assert!(!backend.take_collective_time().is_zero());
    assert!(backend.take_collective_time().is_zero());
    assert_eq!((backend.rank(), backend.world_size()), (0, 3));
}
