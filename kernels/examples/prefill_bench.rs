//! Breaks down the time of a prompt: `cargo run --release -p kernels --example prefill_bench --`,
//! then `[THREADS] [ROWS] [bfloat16|float32] [ROUNDS] [ISA]`, where ISA is as the first line of the
//! output names it.
//!
//! Times the operations of a decoder in the shape of a Llama with 160M parameters (hidden 768, 12
//! layers, 12 heads of 64 over 4 KV heads, intermediate 2048), in the order of a step. Takes the
//! best of all rounds, since other load may share the machine. It asserts nothing.
#![allow(clippy::print_stdout, reason = "a tool that prints")]
use std::time::Instant;

use kernels::backend::prelude::*;
use kernels::backend::{
    Activation, AttentionAt, AttentionShape, Batch, DType, HostMatrix, KvShape, KvStorage,
    QkvInput, QkvWeights, RopeTable, SeqRows,
};
use kernels::collective::single_rank;
use kernels::cpu::{CpuBackend, CpuMatrix, CpuVector, Isa, Precision};
use kernels::error::KernelError;

const HIDDEN: usize = 768;
const INNER: usize = 2048;
const LAYERS: usize = 12;
const VOCAB: usize = 32000;
const BLOCK: usize = 16;
const SHAPE: AttentionShape = AttentionShape {
    num_heads: 12,
    num_kv_heads: 4,
    head_dim: 64,
    norm_eps: 1e-5,
    sliding_window: None,
    softcap: None,
    latent: None,
};
const QKV: usize = (SHAPE.num_heads + 2 * SHAPE.num_kv_heads) * SHAPE.head_dim;

struct Layer {
    qkv: QkvWeights<CpuMatrix, CpuVector>,
    output: CpuMatrix,
    gate_up: CpuMatrix,
    down: CpuMatrix,
}

/// Pseudorandom numbers about zero with a long period.
fn noise(state: &mut u64) -> f32 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    ((*state >> 40) as f32 / (1u64 << 24) as f32 - 0.5) * 0.07
}

fn matrix(
    backend: &mut CpuBackend,
    rows: usize,
    cols: usize,
    state: &mut u64,
) -> Result<CpuMatrix, KernelError> {
    let data: Vec<u8> = (0..rows * cols)
        .flat_map(|_| (noise(state).to_bits() >> 16).to_le_bytes()[..2].to_vec())
        .collect();
    let (dtype, scales) = (DType::Bf16, None);
    let host =
        HostMatrix { data: &data, dtype, rows, cols, col_start: 0, row_stride: cols, scales };
    backend.load_matrix(&[host])
}

/// Timed parts of a step.
const NAMES: [&str; 8] =
    ["embed", "norm", "qkv+rope+kv", "attention", "output", "gate+up", "down", "head"];

fn main() -> Result<(), KernelError> {
    let mut words = std::env::args().skip(1);
    let threads = words.next().and_then(|word| word.parse().ok()).unwrap_or(1);
    let rows: usize = words.next().and_then(|word| word.parse().ok()).unwrap_or(512);
    let precision = match words.next().as_deref() {
        Some("float32") => Precision::Float32,
        _ => Precision::Bfloat16,
    };
    let rounds = words.next().and_then(|word| word.parse().ok()).unwrap_or(15usize);
    let isa =
        words.next().and_then(|word| Isa::ALL.into_iter().find(|isa| isa.to_string() == word));
    let isa = isa.unwrap_or_else(Isa::detect);
    let mut backend = CpuBackend::with_isa(threads, isa, precision, single_rank())?;
    println!("{}, a prompt of {rows} tokens", backend.describe());
    let mut state = 1;
    let embedding = matrix(&mut backend, VOCAB, HIDDEN, &mut state)?;
    let head = matrix(&mut backend, VOCAB, HIDDEN, &mut state)?;
    let mut layers = Vec::new();
    for _ in 0..LAYERS {
        let weight = matrix(&mut backend, QKV, HIDDEN, &mut state)?;
        layers.push(Layer {
            qkv: QkvWeights { weight, bias: None, q_norm: None, k_norm: None },
            output: matrix(&mut backend, HIDDEN, HIDDEN, &mut state)?,
            gate_up: matrix(&mut backend, 2 * INNER, HIDDEN, &mut state)?,
            down: matrix(&mut backend, HIDDEN, INNER, &mut state)?,
        });
    }
    let ones = backend.load_vector(&[1.0; HIDDEN])?;
    let angles = |f: fn(f64) -> f64| -> Vec<f32> {
        let angle = |i: usize| (i / 32) as f64 * 1e4f64.powf(-((i % 32) as f64) / 32.0);
        (0..rows * 32).map(|i| f(angle(i)) as f32).collect()
    };
    let rope = RopeTable {
        cos: backend.load_vector(&angles(f64::cos))?,
        sin: backend.load_vector(&angles(f64::sin))?,
        q_scale: None,
    };
    let table: Vec<u32> = (0..rows.div_ceil(BLOCK) as u32).collect();
    let mut cache = backend.new_kv_cache(KvShape {
        num_layers: LAYERS,
        num_kv_heads: SHAPE.num_kv_heads,
        head_dim: SHAPE.head_dim,
        latent: None,
        block_size: BLOCK,
        num_blocks: table.len(),
        storage: KvStorage::AsTaken,
    })?;
    let count = rows as u32;
    let (positions, ids): (Vec<u32>, Vec<u32>) =
        (0..count).map(|i| (i, i * 7919 % VOCAB as u32)).unzip();
    let seqs = [SeqRows {
        row_start: 0,
        num_rows: count,
        context_len: count,
        table_start: 0,
        table_len: table.len() as u32,
    }];
    let batch =
        Batch { positions: &positions, slots: &positions, seqs: &seqs, block_tables: &table };
    let mut residual = backend.new_buffer(rows, HIDDEN)?;
    let mut normed = backend.new_input_buffer(rows, HIDDEN)?;
    let mut delta = backend.new_buffer(rows, HIDDEN)?;
    let mut q = backend.new_input_buffer(rows, HIDDEN)?;
    let mut attended = backend.new_input_buffer(rows, HIDDEN)?;
    let mut inner = backend.new_input_buffer(rows, INNER)?;
    let mut logits = backend.new_buffer(1, VOCAB)?;
    let mut times: Vec<[f64; NAMES.len()]> = Vec::new();
    for _ in 0..rounds + 2 {
        let mut spent = [0.0; NAMES.len()];
        let mut last = Instant::now();
        let mut took = |what: usize| {
            let now = Instant::now();
            spent[what] += (now - last).as_secs_f64();
            last = now;
        };
        backend.embed(&embedding, &ids, 0, 30.0, &mut residual)?;
        took(0);
        backend.add_rmsnorm(&mut residual, None, &ones, 1e-5, &mut normed)?;
        took(1);
        for (index, layer) in layers.iter().enumerate() {
            let input = QkvInput { x: &normed, weights: &layer.qkv, addend: None, rope: &rope };
            let at = AttentionAt { shape: &SHAPE, batch: &batch, layer: index };
            backend.qkv_rope_write(input, at, &mut cache, &mut q)?;
            took(2);
            backend.paged_attention(&q, None, at, &cache, &mut attended)?;
            took(3);
            backend.linear(&attended, &layer.output, None, &mut delta)?;
            took(4);
            backend.add_rmsnorm(&mut residual, Some(&delta), &ones, 1e-5, &mut normed)?;
            took(1);
            let silu = Activation::Silu;
            backend.gate_up(&normed, &layer.gate_up, None, None, silu, &mut inner)?;
            took(5);
            backend.linear(&inner, &layer.down, None, &mut delta)?;
            took(6);
            backend.add_rmsnorm(&mut residual, Some(&delta), &ones, 1e-5, &mut normed)?;
            took(1);
        }
        backend.lm_head(&normed, &[count - 1], &head, None, &mut logits)?;
        took(7);
        times.push(spent);
    }
    times.drain(..2);
    let total = times.iter().map(|spent| spent.iter().sum()).fold(f64::INFINITY, f64::min);
    for (what, name) in NAMES.iter().enumerate() {
        let time = times.iter().map(|spent| spent[what]).fold(f64::INFINITY, f64::min);
        let weights = match what {
            2 => LAYERS * QKV * HIDDEN,
            // Half of all scores and of all weighted sums, because of causality.
            3 => LAYERS * rows * HIDDEN,
            4 => LAYERS * HIDDEN * HIDDEN,
            5 => LAYERS * 2 * INNER * HIDDEN,
            6 => LAYERS * INNER * HIDDEN,
            _ => 0,
        };
        let rate = match weights {
            0 => String::new(),
            weights => format!("{:7.0} GFLOP/s", (2 * weights * rows) as f64 / time / 1e9),
        };
        println!("{name:12} {:8.2} ms {:5.1} %{rate}", time * 1e3, time / total * 100.0);
    }
    println!("all          {:8.2} ms, {:.0} tokens/s", total * 1e3, rows as f64 / total);
    Ok(())
}
