//! Measures matrix products on this machine:
//! `cargo run --release -p kernels --example gemm_bench [THREADS] [ROWS,..] [INSTRUCTIONS]`,
//! the last as in `avx512_bf16 bfloat16`, or a part of that; with `attention` instead of rows, only
//! attention.
//!
//! One row against matrices that together do not fit in the caches shows memory bandwidth; 512 rows
//! show arithmetic. Weight formats take turns, so that other load affects them equally. It asserts
//! nothing.
#![allow(clippy::print_stdout, reason = "a tool that prints")]
use std::time::Instant;

use kernels::backend::prelude::*;
use kernels::backend::{
    AttentionAt, AttentionShape, Batch, BlockScales, Buffer, DType, HostMatrix, KvShape, KvStorage,
    Scales, SeqRows,
};
use kernels::collective::single_rank;
use kernels::cpu::{CpuBackend, CpuMatrix, Isa, Precision};
use kernels::error::KernelError;
use kernels::weights::{Groups, Packed, Packing};

/// Inputs of a group of 4-bit integers.
const GROUP: usize = 128;
/// Inputs of a group of 4-bit floats.
const FLOAT_GROUP: usize = 32;
/// Inputs and outputs of a matrix.
const SHAPE: (usize, usize) = (2048, 5632);
/// Matrices per format: together larger than the caches, even with 4 bits.
const MATRICES: usize = 24;

/// Format of weights in memory.
#[derive(Clone, Copy, PartialEq)]
enum Format {
    Bf16,
    Int8,
    /// With a scale per output.
    Fp8,
    /// With a scale per block of 128 x 128.
    Fp8Blocks,
    Int4,
    /// With zero points.
    Int4Zeros,
    Mxfp4,
}

impl Format {
    const ALL: [Self; 7] = [
        Self::Bf16,
        Self::Int8,
        Self::Fp8,
        Self::Fp8Blocks,
        Self::Int4,
        Self::Int4Zeros,
        Self::Mxfp4,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
            Self::Fp8 => "FP8",
            Self::Fp8Blocks => "FP8 in blocks",
            Self::Int4 => "4 bits",
            Self::Int4Zeros => "4 bits with zeros",
            Self::Mxfp4 => "MXFP4",
        }
    }

    /// Bytes per weight, in memory.
    fn size(self) -> f64 {
        match self {
            Self::Bf16 => 2.0,
            Self::Int8 | Self::Fp8 => 1.0,
            Self::Fp8Blocks => 1.0 + 4.0 / GROUP as f64,
            Self::Int4 => 0.5 + 4.0 / GROUP as f64,
            Self::Int4Zeros => 0.5 + 5.0 / GROUP as f64,
            Self::Mxfp4 => 0.5 + 4.0 / FLOAT_GROUP as f64,
        }
    }

    fn load(self, backend: &mut CpuBackend) -> Result<CpuMatrix, KernelError> {
        let (cols, rows) = SHAPE;
        let bytes: Vec<u8> = (0..cols * rows).flat_map(|i| [(i * 37) as u8, 0x3B]).collect();
        let (data, col_start, row_stride) = (&bytes[..], 0, cols);
        let scales = None;
        let plain =
            HostMatrix { data, dtype: DType::Bf16, rows, cols, col_start, row_stride, scales };
        let is_float = self == Self::Mxfp4;
        let group = if is_float { FLOAT_GROUP } else { GROUP };
        // Scales of 4-bit floats are powers of two near 1.
        let powers = vec![127; cols * rows / FLOAT_GROUP];
        let packed = Packed {
            packing: if is_float { Packing::Mxfp4 { step: 1 } } else { Packing::Compressed },
            bits: 4,
            rows,
            cols,
            words: &bytes,
            zeros: (self == Self::Int4Zeros).then_some(&bytes),
            scales: if is_float { &powers } else { &bytes },
            scale_type: if is_float { DType::E8M0 } else { DType::Bf16 },
            num_groups: cols / group,
            groups: Groups::Even(group),
            first_row: 0,
        };
        let scales = Some(Scales::Packed(packed));
        let four = HostMatrix { data: &[], dtype: DType::Packed, scales, ..plain };
        let (block, row_stride) = match self {
            Self::Fp8Blocks => ((GROUP, GROUP), cols / GROUP),
            _ => ((1, usize::MAX), 1),
        };
        let scales =
            BlockScales { data: &bytes, dtype: DType::Bf16, block, row_stride, first_row: 0 };
        // Mostly normal numbers, as weights are that were scaled to the largest.
        let normal: Vec<u8> = bytes.iter().map(|byte| byte & 0xbf | 0x20).collect();
        let scales = Some(Scales::Blocks(scales));
        let eight = HostMatrix { data: &normal, dtype: DType::F8E4M3, scales, ..plain };
        match self {
            Self::Int8 => backend.load_int8_matrix(&[plain]),
            Self::Fp8 | Self::Fp8Blocks => backend.load_matrix(&[eight]),
            Self::Bf16 => backend.load_matrix(&[plain]),
            Self::Int4 | Self::Int4Zeros | Self::Mxfp4 => backend.load_matrix(&[four]),
        }
    }
}

fn products(isa: Isa, precision: Precision, threads: usize) -> Result<(), KernelError> {
    let (cols, rows) = SHAPE;
    let mut backend = CpuBackend::with_isa(threads, isa, precision, single_rank())?;
    let mut matrices = Vec::new();
    for format in Format::ALL {
        for _ in 0..MATRICES {
            matrices.push(format.load(&mut backend)?);
        }
    }
    for m in std::env::args().nth(2).map_or_else(
        || vec![1usize, 2, 4, 8, 16, 32, 64, 512],
        |n| n.split(",").filter_map(|n| n.parse().ok()).collect(),
    ) {
        let mut x = backend.new_buffer(m, cols)?;
        x.values_mut().iter_mut().enumerate().for_each(|(i, x)| *x = (i % 101) as f32 * 0.01);
        let mut out = backend.new_buffer(m, rows)?;
        let mut times = [const { Vec::new() }; Format::ALL.len()];
        // Some calls of one format, then some of the next; the first of each is not counted.
        let (turns, calls) = ((200 / m).clamp(6, 24), (48 / m).clamp(2, 12));
        for turn in 0..turns {
            for (matrices, times) in matrices.chunks(MATRICES).zip(&mut times) {
                for call in 0..=calls {
                    let matrix = &matrices[(turn * (calls + 1) + call) % MATRICES];
                    let start = Instant::now();
                    backend.linear(&x, matrix, None, &mut out)?;
                    if call > 0 {
                        times.push(start.elapsed().as_secs_f64());
                    }
                }
            }
        }
        for (format, times) in Format::ALL.into_iter().zip(&mut times) {
            times.sort_by(f64::total_cmp);
            let median = times[times.len() / 2];
            println!(
                "{}, {}: {m} x {cols} x {rows}: {:.0} us, at best {:.0}, {:.1} GB/s of weights, {:.0} GFLOP/s",
                backend.describe(),
                format.name(),
                median * 1e6,
                times[0] * 1e6,
                (cols * rows) as f64 * format.size() / median / 1e9,
                (2 * m * cols * rows) as f64 / median / 1e9
            );
        }
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
        softcap: None,
        latent: None,
    };
    let context = 4096usize;
    let kv = KvShape {
        num_layers: 8,
        num_kv_heads: 4,
        head_dim: 64,
        latent: None,
        block_size: 16,
        num_blocks: context / 16,
        storage: KvStorage::AsTaken,
    };
    let storages = [KvStorage::AsTaken, KvStorage::Fp8];
    let mut caches = Vec::new();
    for storage in storages {
        caches.push(backend.new_kv_cache(KvShape { storage, ..kv })?);
    }
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
        let mut times = [Vec::new(), Vec::new()];
        // In turn, so that both meet the same state of the machine.
        for call in 0..if rows == 1 { 100 } else { 5 } {
            for (cache, times) in caches.iter().zip(&mut times) {
                let start = Instant::now();
                let at = AttentionAt { shape: &shape, batch: &batch, layer: call % 8 };
                backend.paged_attention(&q, None, at, cache, &mut out)?;
                times.push(start.elapsed().as_secs_f64());
            }
        }
        for (storage, mut times) in storages.into_iter().zip(times) {
            times.sort_by(f64::total_cmp);
            let median = times[times.len() / 2];
            let bytes = backend.kv_block_bytes(&KvShape { num_layers: 1, storage, ..kv });
            let flops = 4 * rows * context * 32 * 64;
            println!(
                "{}, {storage:?}: attention of {} rows at context {context}: {:.3} ms, at best \
                 {:.3}, {:.0} GFLOP/s, {:.1} GB/s",
                backend.describe(),
                out.rows(),
                median * 1e3,
                times[0] * 1e3,
                flops as f64 / median / 1e9,
                (bytes * (context as u64 / 16)) as f64 / median / 1e9
            );
        }
    }
    Ok(())
}

fn main() -> Result<(), KernelError> {
    let threads = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(1);
    let what = std::env::args().nth(2).unwrap_or_default();
    let wanted = std::env::args().nth(3).unwrap_or_default();
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
        let precisions = [Precision::Float32, Precision::Bfloat16];
        let precisions = precisions.into_iter().filter(|p| format!("{isa} {p}").contains(&wanted));
        for precision in precisions.clone().filter(|_| what != "attention") {
            products(isa, precision, threads)?;
        }
        for precision in precisions {
            attention(isa, precision, threads)?;
        }
    }
    Ok(())
}
