//! The operations behind LoRA adapters on CPUs: rows assigned to matrices from outside, and results
//! added to fused products. Each must give the same bits as the operation that it replaces.
use kernels::KernelError;
use kernels::backend::prelude::*;
use kernels::backend::{
    Activation, AttentionAt, AttentionShape, Batch, Buffer, KvShape, KvStorage, NOT_ASSIGNED,
    QkvInput, QkvWeights, RopeTable, Routing, SeqRows,
};
use kernels::collective::single_rank;
use kernels::cpu::{CpuBackend, CpuStack, Isa, Precision};
use kernels::reference::ReferenceBackend;

use crate::support::{ACTIVATIONS, Random, Weight, backend_in, bits, buffer, poisoned, variants};

const ROUTING: Routing = Routing::softmax(3, 1, false);

#[test]
fn a_row_is_multiplied_with_the_matrix_it_goes_to_or_none() {
    let mut random = Random(81);
    for (isa, precision) in variants() {
        let mut backend = backend_in(isa, precision, 3);
        for (rows, inputs, outputs, first) in
            [(1, 40, 8, 0), (2, 33, 70, 5), (9, 16, 24, 0), (40, 130, 200, 6)]
        {
            let weights: Vec<Weight> =
                (0..3).map(|_| Weight::random(&mut random, outputs, inputs)).collect();
            let hosts: Vec<_> = weights.iter().map(Weight::host).collect();
            let stack = backend.load_stack(&hosts).unwrap();
            let matrices: Vec<_> = weights.iter().map(|it| it.load(&mut backend)).collect();
            let width = first + inputs + 3;
            let x = random.vec(rows * width);
            let to: Vec<u32> =
                (0..rows).map(|_| [0, 1, 2, NOT_ASSIGNED][random.below(4)]).collect();
            let input = buffer(&mut backend, &x, width);
            let mut routes = backend.new_routes(rows + 1, ROUTING).unwrap();
            backend.assign(&to, &mut routes).unwrap();
            let mut out = poisoned(&mut backend, rows + 1, outputs);
            backend.experts_down(&input, first, &stack, None, &routes, &mut out).unwrap();
            assert_eq!(out.rows(), rows);
            for (row, to) in to.iter().enumerate() {
                let got = &out.values()[row * outputs..][..outputs];
                let Some(matrix) = matrices.get(*to as usize) else {
                    assert!(got.iter().all(|x| *x == 0.0), "row {row} goes to none");
                    continue;
                };
                let own = buffer(&mut backend, &x[row * width..][..width], width);
                let mut want = poisoned(&mut backend, 1, outputs);
                backend.linear_columns(&own, first, matrix, None, &mut want).unwrap();
                assert_eq!(bits(got), bits(want.values()), "row {row} on {isa} {precision}");
            }
        }
    }
}

#[test]
fn the_reference_backend_does_the_same() {
    let mut random = Random(82);
    let mut backend = ReferenceBackend::new(single_rank());
    let weights: Vec<Weight> = (0..3).map(|_| Weight::random(&mut random, 5, 7)).collect();
    let hosts: Vec<_> = weights.iter().map(Weight::host).collect();
    let stack = backend.load_stack(&hosts).unwrap();
    let x = random.vec(4 * 9);
    let mut input = backend.new_buffer(4, 9).unwrap();
    input.values_mut().copy_from_slice(&x);
    let mut routes = backend.new_routes(4, ROUTING).unwrap();
    let to = [2, NOT_ASSIGNED, 0, 2];
    backend.assign(&to, &mut routes).unwrap();
    let mut out = backend.new_buffer(4, 5).unwrap();
    out.values_mut().fill(f32::NAN);
    backend.experts_down(&input, 1, &stack, None, &routes, &mut out).unwrap();
    for (row, to) in to.iter().enumerate() {
        let want = match weights.get(*to as usize) {
            Some(weight) => weight.product(&x[row * 9 + 1..][..7], None),
            None => vec![(0.0, 0.0); 5],
        };
        for (got, (want, size)) in out.row(row).iter().zip(want) {
            assert!((f64::from(*got) - want).abs() <= 1e-6 * size, "row {row}");
        }
    }
    assert!(matches!(backend.assign(&[3], &mut routes), Err(KernelError::Shape { .. })));
    assert!(matches!(backend.assign(&[0; 5], &mut routes), Err(KernelError::Shape { .. })));
}

#[test]
fn a_matrix_of_a_stack_is_replaced_in_place() {
    let mut random = Random(85);
    for (isa, precision) in variants() {
        let mut backend = backend_in(isa, precision, 2);
        for (inputs, outputs) in [(40, 8), (33, 70), (130, 200)] {
            let weights: Vec<Weight> =
                (0..4).map(|_| Weight::random(&mut random, outputs, inputs)).collect();
            let [a, b, c, other] = [0, 1, 2, 3].map(|i| weights[i].host());
            let x = random.vec(5 * inputs);
            let input = buffer(&mut backend, &x, inputs);
            let mut routes = backend.new_routes(5, ROUTING).unwrap();
            backend.assign(&[0, 1, 2, 1, NOT_ASSIGNED], &mut routes).unwrap();
            let product = |backend: &mut CpuBackend, stack: &CpuStack| {
                let mut out = poisoned(backend, 5, outputs);
                backend.experts_down(&input, 0, stack, None, &routes, &mut out).unwrap();
                bits(out.values())
            };
            let whole = backend.load_stack(&[a, b, c]).unwrap();
            let wanted = product(&mut backend, &whole);
            let mut stack = backend.load_stack(&[a, other, c]).unwrap();
            assert_ne!(product(&mut backend, &stack), wanted);
            backend.replace_in_stack(&mut stack, 1, &b).unwrap();
            assert_eq!(product(&mut backend, &stack), wanted, "{isa} {precision}");
            let larger = Weight::random(&mut random, outputs + 1, inputs);
            for (index, matrix) in [(3, b), (1, larger.host())] {
                let refused = backend.replace_in_stack(&mut stack, index, &matrix);
                assert!(matches!(refused, Err(KernelError::Shape { .. })), "{refused:?}");
            }
            assert_eq!(product(&mut backend, &stack), wanted, "a refusal changes nothing");
        }
    }
}

#[test]
fn an_addend_is_as_good_as_a_bias() {
    let mut random = Random(83);
    for (isa, precision) in variants() {
        let mut backend = backend_in(isa, precision, 2);
        for (cols, inner) in [(9, 1), (33, 64), (20, 70), (40, 192)] {
            let weight = Weight::random(&mut random, inner * 2, cols);
            let packed = weight.load(&mut backend);
            let bias = random.vec(inner * 2);
            let vector = backend.load_vector(&bias).unwrap();
            for rows in [1, 2, 7, 17] {
                let x = random.vec(rows * cols);
                let input = buffer(&mut backend, &x, cols);
                let addend = buffer(&mut backend, &bias.repeat(rows), inner * 2);
                for activation in ACTIVATIONS {
                    let [mut want, mut out] = [(); 2].map(|()| poisoned(&mut backend, rows, inner));
                    let bias = Some(&vector);
                    backend.gate_up(&input, &packed, bias, None, activation, &mut want).unwrap();
                    let addend = Some(&addend);
                    backend.gate_up(&input, &packed, None, addend, activation, &mut out).unwrap();
                    assert_eq!(bits(out.values()), bits(want.values()), "{isa} {precision} {rows}");
                }
            }
        }
    }
}

#[test]
fn an_addend_comes_before_norms_and_rotation() {
    let mut random = Random(84);
    let shape = AttentionShape {
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 16,
        norm_eps: 1e-5,
        sliding_window: None,
        softcap: None,
        latent: None,
    };
    let (hidden, rows) = (24, 3);
    let width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim;
    let (positions, slots) = ([4u32, 5, 6], [4u32, 5, 6]);
    let seqs =
        [SeqRows { row_start: 0, num_rows: 3, context_len: 7, table_start: 0, table_len: 1 }];
    let batch = Batch { positions: &positions, slots: &slots, seqs: &seqs, block_tables: &[0] };
    for (isa, precision) in variants() {
        let mut backend = backend_in(isa, precision, 2);
        let weight = Weight::random(&mut random, width, hidden);
        let bias = random.vec(width);
        let (cos, sin) = (random.vec(8 * 8), random.vec(8 * 8));
        let norms = (random.vec(16), random.vec(16));
        let x = random.vec(rows * hidden);
        let mut run = |biased: bool| {
            let mut vector = |values: &[f32]| backend.load_vector(values).unwrap();
            let rope = RopeTable { cos: vector(&cos), sin: vector(&sin), q_scale: None };
            let bias_vector = biased.then(|| vector(&bias));
            let (q_norm, k_norm) = (Some(vector(&norms.0)), Some(vector(&norms.1)));
            let weight = weight.load(&mut backend);
            let weights = QkvWeights { weight, bias: bias_vector, q_norm, k_norm };
            let kv = KvShape {
                num_layers: 1,
                num_kv_heads: 2,
                head_dim: 16,
                latent: None,
                block_size: 16,
                num_blocks: 1,
                storage: KvStorage::AsTaken,
            };
            let mut cache = backend.new_kv_cache(kv).unwrap();
            let input = buffer(&mut backend, &x, hidden);
            let addend = buffer(&mut backend, &bias.repeat(rows), width);
            let addend = (!biased).then_some(&addend);
            let mut q = poisoned(&mut backend, rows, 64);
            let qkv = QkvInput { x: &input, weights: &weights, addend, rope: &rope };
            let at = AttentionAt { shape: &shape, batch: &batch, layer: 0 };
            backend.qkv_rope_write(qkv, at, &mut cache, &mut q).unwrap();
            let mut out = poisoned(&mut backend, rows, 64);
            backend.paged_attention(&q, None, at, &cache, &mut out).unwrap();
            (bits(q.values()), bits(out.values()))
        };
        assert_eq!(run(true), run(false), "{isa} {precision}");
    }
}

#[test]
fn what_does_not_fit_is_an_error() {
    let mut backend = backend_in(Isa::Portable, Precision::Float32, 1);
    let refused = |result: Result<(), KernelError>| {
        assert!(matches!(result, Err(KernelError::Shape { .. })), "{result:?}");
    };
    let mut routes = backend.new_routes(2, ROUTING).unwrap();
    let error = backend.assign(&[0, 3], &mut routes).unwrap_err().to_string();
    assert_eq!(error, "assign: expert 3 of 3 is named");
    refused(backend.assign(&[0, 1, 2], &mut routes));
    let mut pairs = backend.new_routes(2, Routing { top_k: 2, ..ROUTING }).unwrap();
    refused(backend.assign(&[0], &mut pairs));
    let weight = Weight::random(&mut Random(85), 8, 6).load(&mut backend);
    let x = buffer(&mut backend, &[0.5; 12], 6);
    let mut out = poisoned(&mut backend, 2, 4);
    let narrow = buffer(&mut backend, &[0.5; 14], 7);
    let short = buffer(&mut backend, &[0.5; 8], 8);
    refused(backend.gate_up(&x, &weight, None, Some(&narrow), Activation::Silu, &mut out));
    refused(backend.gate_up(&x, &weight, None, Some(&short), Activation::Silu, &mut out));
    assert!(out.values().iter().all(|x| x.is_nan()), "nothing was written");
}
