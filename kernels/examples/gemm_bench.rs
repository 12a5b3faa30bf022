//! How fast this machine multiplies:
//! `cargo run --release -p kernels --example gemm_bench [THREADS]`.
//!
//! One row against matrices that together do not fit in the caches shows memory bandwidth; 512 rows
//! show arithmetic. Prints; asserts nothing.
#![allow(clippy::print_stdout, reason = "a tool that prints")]
use std::time::Instant;

use kernels::backend::prelude::*;
use kernels::backend::{
    AttentionAt, AttentionShape, Batch, Buffer, DType, HostMatrix, KvShape, Scales, SeqRows,
};
use kernels::collective::single_rank;
use kernels::cpu::{CpuBackend, Isa, Precision};
use kernels::error::KernelError;
use kernels::weights::{Groups, Packed, Packing};

/// Inputs of a group of 4 bits.
const GROUP: usize = 128;

/// What weights are kept in.
#[derive(Clone, Copy, PartialEq)]
enum Format {
    Bf16,
    Int8,
    /// With zeros of their own, or without.
    Int4 {
        symmetric: bool,
    },
}

fn products(
    isa: Isa,
    precision: Precision,
    format: Format,
    threads: usize,
) -> Result<(), KernelError> {
    let (cols, rows) = (2048usize, 5632usize);
    let mut backend = CpuBackend::with_isa(threads, isa, precision, single_rank())?;
    let bytes: Vec<u8> = (0..cols * rows).flat_map(|i| [(i * 37) as u8, 0x3B]).collect();
    let plain = HostMatrix {
        data: &bytes,
        dtype: DType::Bf16,
        rows,
        cols,
        col_start: 0,
        row_stride: cols,
        scales: None,
    };
    let packed = Packed {
        packing: Packing::Compressed,
        bits: 4,
        rows,
        cols,
        words: &bytes,
        zeros: (format != Format::Int4 { symmetric: true }).then_some(&bytes),
        scales: &bytes,
        scale_type: DType::Bf16,
        num_groups: cols / GROUP,
        groups: Groups::Even(GROUP),
        first_row: 0,
    };
    let scales = Some(Scales::Packed(packed));
    let four = HostMatrix { data: &[], dtype: DType::Packed, scales, ..plain };
    let mut load = || match format {
        Format::Int8 => backend.load_int8_matrix(&[plain]),
        Format::Bf16 => backend.load_matrix(&[plain]),
        Format::Int4 { .. } => backend.load_matrix(&[four]),
    };
    // Together larger than the caches, in 4 bits too.
    let matrices = (0..24).map(|_| load()).collect::<Result<Vec<_>, KernelError>>()?;
    let (size, format) = match format {
        Format::Bf16 => (2.0, "bf16"),
        Format::Int8 => (1.0, "int8"),
        Format::Int4 { symmetric: true } => (0.5 + 4.0 / GROUP as f64, "4 bits"),
        Format::Int4 { symmetric: false } => (0.5 + 5.0 / GROUP as f64, "4 bits less zeros"),
    };
    for m in std::env::args().nth(2).map_or_else(
        || vec![1usize, 2, 4, 8, 16, 32, 64, 512],
        |n| n.split(",").filter_map(|n| n.parse().ok()).collect(),
    ) {
        let mut x = backend.new_buffer(m, cols)?;
        x.values_mut().iter_mut().enumerate().for_each(|(i, x)| *x = (i % 101) as f32 * 0.01);
        let mut out = backend.new_buffer(m, rows)?;
        let calls = (600 / m).clamp(3, 120);
        let mut times = Vec::new();
        for call in 0..calls + 2 {
            let start = Instant::now();
            backend.linear(&x, &matrices[call % matrices.len()], None, &mut out)?;
            times.push(start.elapsed().as_secs_f64());
        }
        times.drain(..2);
        times.sort_by(f64::total_cmp);
        let median = times[times.len() / 2];
        println!(
            "{}, {format}: {m} x {cols} x {rows}: {:.0} us, {:.1} GB/s of weights, {:.0} GFLOP/s",
            backend.describe(),
            median * 1e6,
            (cols * rows) as f64 * size / median / 1e9,
            (2 * m * cols * rows) as f64 / median / 1e9
        );
    }
    Ok(())
}

fn attention(isa: Isa, precision: Precision, threads: usize) -> Result<(), KernelError> {
    let mut backend = CpuBackend::with_isa(threads, isa, precision, single_rank())?;
    let shape = AttentionShape {
        num_heads: 32,
        num_kv_heads: 4,
        head_dim: 64,
        norm_eps: 1e-6,
        sliding_window: None,
    };
    let context = 2048usize;
    let kv = KvShape {
        num_layers: 8,
        num_kv_heads: 4,
        head_dim: 64,
        block_size: 16,
        num_blocks: context / 16,
    };
    let cache = backend.new_kv_cache(kv)?;
    let table: Vec<u32> = (0..context as u32 / 16).collect();
    for rows in [1usize, 512] {
        let seqs = [SeqRows {
            row_start: 0,
            num_rows: rows as u32,
            context_len: context as u32,
            table_start: 0,
            table_len: table.len() as u32,
        }];
        let batch = Batch { positions: &[], slots: &[], seqs: &seqs, block_tables: &table };
        let q = backend.new_buffer(rows, 32 * 64)?;
        let mut out = backend.new_buffer(rows, 32 * 64)?;
        let mut times = Vec::new();
        for call in 0..if rows == 1 { 60 } else { 5 } {
            let start = Instant::now();
            let at = AttentionAt { shape: &shape, batch: &batch, layer: call % 8 };
            backend.paged_attention(&q, None, at, &cache, &mut out)?;
            times.push(start.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        let median = times[times.len() / 2];
        let bytes = backend.kv_block_bytes(&KvShape { num_layers: 1, ..kv });
        let flops = 4 * rows * context * 32 * 64;
        println!(
            "{}: attention of {} rows at context {context}: {:.3} ms, {:.0} GFLOP/s, {:.1} GB/s",
            backend.describe(),
            out.rows(),
            median * 1e3,
            flops as f64 / median / 1e9,
            (bytes * (context as u64 / 16)) as f64 / median / 1e9
        );
    }
    Ok(())
}

fn main() -> Result<(), KernelError> {
    let threads = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(1);
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
        for precision in [Precision::Float32, Precision::Bfloat16] {
            for format in [
                Format::Bf16,
                Format::Int8,
                Format::Int4 { symmetric: true },
                Format::Int4 { symmetric: false },
            ] {
                products(isa, precision, format, threads)?;
            }
        }
        for precision in [Precision::Float32, Precision::Bfloat16] {
            attention(isa, precision, threads)?;
        }
    }
    Ok(())
}
