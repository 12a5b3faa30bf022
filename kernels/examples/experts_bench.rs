//! Measures how fast this machine computes a layer's experts:
//! `cargo run --release -p kernels --example experts_bench [THREADS] [bfloat16|float32]`.
//!
//! The shape is that of Qwen3-30B-A3B (128 experts of 768, 8 for each row, hidden 2048), compared
//! with an MLP as wide as a row's experts together. With few rows, memory bandwidth for weights
//! matters; with 512 rows, arithmetic. It asserts nothing.
#![allow(clippy::print_stdout, reason = "a tool that prints")]
use std::time::Instant;

use kernels::backend::prelude::*;
use kernels::backend::{Activation, DType, ExpertActivation, HostMatrix, Routing};
use kernels::collective::single_rank;
use kernels::cpu::{CpuBackend, CpuBuffer, Precision};
use kernels::error::KernelError;

const HIDDEN: usize = 2048;
const INNER: usize = 768;
const ROUTING: Routing = Routing::softmax(128, 8, true);
/// Number of MLPs: together they do not fit in the caches.
const DENSE: usize = 6;

/// Small pseudorandom numbers with a long period.
fn noise(state: &mut u64) -> f32 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    ((*state >> 40) as f32 / (1u64 << 24) as f32 - 0.5) * 0.1
}

fn bytes(rows: usize, cols: usize, state: &mut u64) -> Vec<u8> {
    (0..rows * cols)
        .flat_map(|_| (noise(state).to_bits() >> 16).to_le_bytes()[..2].to_vec())
        .collect()
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

fn fill(buffer: &mut CpuBuffer, state: &mut u64) {
    buffer.values_mut().iter_mut().for_each(|x| *x = noise(state) * 20.0);
}

fn main() -> Result<(), KernelError> {
    let mut words = std::env::args().skip(1);
    let threads = words.next().and_then(|word| word.parse().ok()).unwrap_or(1);
    let precision = match words.next().as_deref() {
        Some("float32") => Precision::Float32,
        _ => Precision::Bfloat16,
    };
    let mut backend = CpuBackend::new(threads, precision, single_rank())?;
    println!("{}", backend.describe());
    let mut state = 1;
    let router = bytes(ROUTING.num_experts, HIDDEN, &mut state);
    let router = backend.load_matrix(&[host(&router, ROUTING.num_experts, HIDDEN)])?;
    let one = bytes(2 * INNER, HIDDEN, &mut state);
    let gate_up = vec![host(&one, INNER, HIDDEN); 2 * ROUTING.num_experts];
    let gate_up = backend.load_stack(&gate_up)?;
    let down = backend.load_stack(&vec![host(&one, HIDDEN, INNER); ROUTING.num_experts])?;
    let wide = ROUTING.top_k * INNER;
    let all = bytes(2 * wide, HIDDEN, &mut state);
    let mut dense = Vec::new();
    for _ in 0..DENSE {
        let up = backend.load_matrix(&[host(&all, 2 * wide, HIDDEN)])?;
        dense.push((up, backend.load_matrix(&[host(&all, HIDDEN, wide)])?));
    }
    let expert_bytes = (3 * INNER * HIDDEN * 2) as f64;
    for rows in [1usize, 2, 4, 8, 16, 64, 512] {
        let mut x = backend.new_buffer(rows, HIDDEN)?;
        let mut out = backend.new_buffer(rows, HIDDEN)?;
        let mut inner = backend.new_buffer(rows * ROUTING.top_k, INNER)?;
        let mut dense_inner = backend.new_buffer(rows, wide)?;
        let mut routes = backend.new_routes(rows, ROUTING)?;
        let rounds = if rows > 64 { 10 } else { 100 };
        // Interleaved, and the best of each: other load may share the machine.
        let (mut sparse_rates, mut dense_rates, mut routing) = (vec![], vec![], 0.0);
        for round in 0..rounds {
            fill(&mut x, &mut state);
            let start = Instant::now();
            backend.route(&x, &router, None, &mut routes)?;
            routing += start.elapsed().as_secs_f64() / f64::from(rounds);
            backend.experts_gate_up(
                &x,
                &gate_up,
                None,
                ExpertActivation::Silu,
                &routes,
                &mut inner,
            )?;
            backend.experts_down(&inner, 0, &down, None, &routes, &mut out)?;
            let took = start.elapsed().as_secs_f64();
            let mut used = backend.read_routes(&routes)?.0;
            used.sort_unstable();
            used.dedup();
            let flops = (rows * ROUTING.top_k * 3 * INNER * HIDDEN * 2) as f64;
            sparse_rates.push((used.len() as f64 * expert_bytes / took, flops / took));
            let (up, down) = &dense[round as usize % DENSE];
            let start = Instant::now();
            backend.gate_up(&x, up, None, None, Activation::Silu, &mut dense_inner)?;
            backend.linear(&dense_inner, down, None, &mut out)?;
            let took = start.elapsed().as_secs_f64();
            dense_rates.push((expert_bytes * ROUTING.top_k as f64 / took, flops / took));
        }
        let best = |rates: &mut Vec<(f64, f64)>| {
            rates.sort_by(|a, b| b.0.total_cmp(&a.0));
            let (bytes, flops) = rates[0];
            let median = rates[rates.len() / 2].1 / flops;
            format!("{:5.1} GB/s {:5.1} GFLOP/s (median x{median:.2})", bytes / 1e9, flops / 1e9)
        };
        println!(
            "{rows:4} rows: experts {}; dense {}; routing {:.1} us",
            best(&mut sparse_rates),
            best(&mut dense_rates),
            routing * 1e6
        );
    }
    Ok(())
}
