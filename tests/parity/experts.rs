//! Experts on the CUDA backend (emulated kernels), with slots grouped in many chunks, as for
//! thousands of rows on a GPU, but with few rows. Compared with the reference, and bit by bit with
//! a single chunk.
use kernels::backend::prelude::*;
use kernels::backend::{Backend, Buffer, DType, ExpertActivation, HostMatrix, Inspect, Routing};
use kernels::collective::single_rank;
use kernels::cuda::{CudaBackend, CudaOptions};
use kernels::reference::ReferenceBackend;
use kernels::sampling::{SampleParams, SampleRow};

use crate::queued;
use crate::rig::fake_cuda_with;

/// Slots per chunk: 8 rows, or one row with more experts.
const SLOTS: usize = 16;

/// Numbers between -1 and 1, exact in bf16, of such different magnitudes that their sums are
/// rounded.
fn numbers(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_769) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        let sign = if state & 1 == 0 { 1.0 } else { -1.0 };
        sign * (128 + (state >> 8 & 127)) as f32 * 0.5f32.powi(8 + (state >> 20 & 7) as i32)
    };
    (0..count).map(|_| next()).collect()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| ((x.to_bits() >> 16) as u16).to_le_bytes()).collect()
}

fn host(data: &[u8], rows: usize, cols: usize) -> HostMatrix<'_> {
    HostMatrix {
        data,
        dtype: DType::Bf16,
        rows,
        cols,
        col_start: 0,
        row_stride: cols,
        scales: None,
    }
}

struct Case {
    rows: usize,
    hidden: usize,
    inner: usize,
    routing: Routing,
    /// First column that the second product takes.
    first: usize,
}

/// Choices, weights, inner activations, sums.
type Made = (Vec<u32>, Vec<f32>, Vec<f32>, Vec<f32>);

impl Case {
    /// `fill` writes activations to a buffer, `poison` fills a buffer's memory with NaN.
    fn run<B: Backend + Inspect>(
        &self,
        backend: &mut B,
        fill: impl Fn(&mut B, &mut B::Buffer, &[f32]),
        poison: impl Fn(&mut B, &B::Buffer),
    ) -> Made {
        let Self { rows, hidden, inner, routing, first } = *self;
        let Routing { num_experts, top_k, .. } = routing;
        let router = bytes(&numbers(1, num_experts * hidden));
        let router = backend.load_matrix(&[host(&router, num_experts, hidden)]).unwrap();
        let mut stack = |seed, count: usize, rows: usize, cols: usize| {
            // Exact in bf16, and small enough for sums of the order of one.
            let scale = 0.5f32.powi(cols.ilog2() as i32 / 2);
            let values = numbers(seed, count * rows * cols);
            let data = bytes(&values.iter().map(|x| x * scale).collect::<Vec<_>>());
            let all: Vec<_> =
                data.chunks(rows * cols * 2).map(|data| host(data, rows, cols)).collect();
            backend.load_stack(&all).unwrap()
        };
        let gate_up = stack(2, 2 * num_experts, inner, hidden);
        let down = stack(3, num_experts, hidden, inner - first);
        let mut x = backend.new_input_buffer(rows, hidden).unwrap();
        fill(backend, &mut x, &numbers(4, rows * hidden));
        let mut routes = backend.new_routes(rows, routing).unwrap();
        backend.route(&x, &router, None, &mut routes).unwrap();
        let (experts, weights) = backend.read_routes(&routes).unwrap();
        let mut middle = backend.new_input_buffer(rows * top_k, inner).unwrap();
        poison(backend, &middle);
        backend
            .experts_gate_up(&x, &gate_up, None, ExpertActivation::Silu, &routes, &mut middle)
            .unwrap();
        let mut out = backend.new_buffer(rows, hidden).unwrap();
        poison(backend, &out);
        backend.experts_down(&middle, first, &down, None, &routes, &mut out).unwrap();
        let made = backend.read_buffer(&middle).unwrap();
        (experts, weights, made, backend.read_buffer(&out).unwrap())
    }
}

fn on_cuda(case: &Case, expert_slots: usize) -> Made {
    let options = CudaOptions { expert_slots, ..CudaOptions::default() };
    let mut backend = fake_cuda_with(options, single_rank());
    let fill = |backend: &mut CudaBackend, buffer: &mut _, values: &[f32]| {
        backend.write_buffer(buffer, values).unwrap();
    };
    case.run(&mut backend, fill, |backend, buffer| backend.poison(buffer).unwrap())
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn many_chunks_of_slots_make_what_one_does() {
    let routing = Routing::softmax;
    for (rows, hidden, inner, routing, first) in [
        // The last chunk has fewer rows; columns that begin at an odd index are copied first.
        (21, 40, 24, routing(6, 2, true), 0),
        (70, 24, 20, routing(5, 3, false), 3),
        // A row has more slots than fit into a chunk.
        (5, 16, 16, routing(40, 20, true), 8),
    ] {
        let case = Case { rows, hidden, inner, routing, first };
        let at = format!("{rows} rows, {routing:?}");
        let (experts, weights, middle, out) = on_cuda(&case, SLOTS);
        let one = on_cuda(&case, CudaOptions::default().expert_slots);
        assert_eq!(experts, one.0, "{at}");
        for (found, want) in [(&weights, &one.1), (&middle, &one.2), (&out, &one.3)] {
            assert_eq!(bits(found), bits(want), "{at}");
        }
        let mut reference = ReferenceBackend::new(single_rank());
        let fill = |_: &mut ReferenceBackend, buffer: &mut _, values: &[f32]| {
            let buffer: &mut kernels::reference::ReferenceBuffer = buffer;
            buffer.set_rows(rows).unwrap();
            buffer.values_mut().copy_from_slice(values);
        };
        let want = case.run(&mut reference, fill, |_, _| ());
        assert_eq!(experts, want.0, "{at}");
        // On GPUs the intermediates are rounded to bf16.
        for (found, want, tolerance) in
            [(&weights, &want.1, 1e-5), (&middle, &want.2, 2e-2), (&out, &want.3, 4e-2)]
        {
            assert_eq!(found.len(), want.len(), "{at}");
            for (found, want) in found.iter().zip(want) {
                let error = (found - want).abs();
                assert!(error <= tolerance * (1.0 + want.abs()), "{at}: {found} for {want}");
            }
        }
    }
}

/// Ranks may use different kernels for products of many rows, because of their GPUs or timings, and
/// a request may come again in another batch. Choices depend on neither.
#[test]
fn a_rows_choice_depends_on_no_other_row() {
    let (rows, hidden) = (200, 328);
    let routing = Routing::softmax(24, 4, true);
    let mut backend = fake_cuda_with(CudaOptions::default(), single_rank());
    let router = bytes(&numbers(5, routing.num_experts * hidden));
    let router = backend.load_matrix(&[host(&router, routing.num_experts, hidden)]).unwrap();
    let mut routes = backend.new_routes(rows, routing).unwrap();
    let mut x = backend.new_input_buffer(rows, hidden).unwrap();
    let values = numbers(6, rows * hidden);
    let mut choose = |at_a_time: usize| -> (Vec<u32>, Vec<u32>) {
        let chunks = values.chunks(at_a_time * hidden);
        let chosen = chunks.map(|values| {
            backend.write_buffer(&mut x, values).unwrap();
            backend.route(&x, &router, None, &mut routes).unwrap();
            let (experts, weights) = backend.read_routes(&routes).unwrap();
            (experts, bits(&weights))
        });
        let (experts, weights): (Vec<_>, Vec<_>) = chosen.unzip();
        (experts.concat(), weights.concat())
    };
    let all = choose(rows);
    for at_a_time in [1, 7, 33, 64, 130] {
        assert!(choose(at_a_time) == all, "{at_a_time} rows at a time");
    }
}

/// A step that may become a graph is launched for more rows than are live (12 for 9; the last 4 are
/// a separate chunk): nothing is computed for the others, in any chunk.
#[test]
fn rows_that_are_not_there_are_not_written_in_later_chunks() {
    let (there, launched, hidden, inner) = (9, 12, 24, 16);
    let routing = Routing::softmax(6, 2, true);
    let options = CudaOptions { expert_slots: SLOTS, ..CudaOptions::default() };
    let mut backend = fake_cuda_with(options, single_rank());
    let router = bytes(&numbers(1, routing.num_experts * hidden));
    let router = backend.load_matrix(&[host(&router, routing.num_experts, hidden)]).unwrap();
    let mut stack = |seed, count: usize, rows: usize, cols: usize| {
        let data = bytes(&numbers(seed, count * rows * cols));
        let all: Vec<_> = data.chunks(rows * cols * 2).map(|data| host(data, rows, cols)).collect();
        backend.load_stack(&all).unwrap()
    };
    let gate_up = stack(2, 2 * routing.num_experts, inner, hidden);
    let down = stack(3, routing.num_experts, hidden, inner);
    let mut x = backend.new_input_buffer(16, hidden).unwrap();
    let mut routes = backend.new_routes(16, routing).unwrap();
    let mut middle = backend.new_input_buffer(16 * routing.top_k, inner).unwrap();
    let mut out = backend.new_buffer(16, hidden).unwrap();
    backend.write_buffer(&mut x, &numbers(4, there * hidden)).unwrap();
    backend.poison(&middle).unwrap();
    backend.poison(&out).unwrap();
    let params = SampleParams::default();
    let row = SampleRow { params: &params, prompt: &[], output: &[], allowed: None };
    queued::begin(&mut backend, &vec![row; there], &[]);
    backend.route(&x, &router, None, &mut routes).unwrap();
    backend
        .experts_gate_up(&x, &gate_up, None, ExpertActivation::Silu, &routes, &mut middle)
        .unwrap();
    backend.experts_down(&middle, 0, &down, None, &routes, &mut out).unwrap();
    backend.end_step().unwrap();
    middle.set_rows(launched * routing.top_k).unwrap();
    out.set_rows(launched).unwrap();
    for (buffer, first) in [(&middle, there * routing.top_k * inner), (&out, there * hidden)] {
        let values = backend.read_buffer(buffer).unwrap();
        assert!(values[..first].iter().all(|x| x.is_finite()));
        assert!(values[first..].iter().all(|x| x.is_nan()), "a row that is not there was written");
    }
}
