//! Measures how fast weights are packed while they are loaded:
//! `cargo run --release -p kernels --example load_bench [THREADS]`.
//!
//! Packs a bf16 matrix that is already in memory, as bf16 and as int8; whole, and as the column
//! parts that a rank takes of a row-parallel matrix. It asserts nothing.
#![allow(clippy::print_stdout, reason = "a tool that prints")]
use std::time::Instant;

use kernels::backend::prelude::*;
use kernels::backend::{DType, HostMatrix};
use kernels::collective::single_rank;
use kernels::cpu::{CpuBackend, Precision};
use kernels::error::KernelError;

fn main() -> Result<(), KernelError> {
    let threads = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(2);
    let mut backend = CpuBackend::new(threads, Precision::Bfloat16, single_rank())?;
    let (rows, cols) = (4096usize, 14336usize);
    let bytes: Vec<u8> = (0..rows * cols).flat_map(|i| [(i * 37) as u8, 0x3B]).collect();
    for parts in [1, 8] {
        let part = |index: usize| HostMatrix {
            data: &bytes,
            dtype: DType::Bf16,
            rows,
            cols: cols / parts,
            col_start: cols / parts * index,
            row_stride: cols,
            scales: None,
        };
        for is_int8 in [false, true] {
            let mut least = f64::INFINITY;
            for _ in 0..5 {
                let began = Instant::now();
                for index in 0..parts {
                    match is_int8 {
                        true => backend.load_int8_matrix(&[part(index)])?,
                        false => backend.load_matrix(&[part(index)])?,
                    };
                }
                least = least.min(began.elapsed().as_secs_f64());
            }
            let format = if is_int8 { "int8" } else { "bf16" };
            let speed = bytes.len() as f64 / least / 1e9;
            println!("{threads} threads, {format}, {parts} parts: {speed:.2} GB/s of the file");
        }
    }
    Ok(())
}
