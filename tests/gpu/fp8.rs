//! Products with weights in FP8 against the reference, which multiplies numbers times scales.
use kernels::KernelError;
use kernels::backend::{
    Activation, BlockScales, DType, ExpertActivation, HostMatrix, Routing, Scales,
};
use kernels::weights::Compact;

use crate::operations::{Case, ROUNDING, Random, SUM, Writable, bytes, input, poisoned};

#[derive(Clone, Copy)]
enum Product {
    Linear,
    GateUp,
    Head,
    /// Gates and ups of four experts, one for each row.
    Experts,
}

/// Rows of x times a matrix `[n, k]`: a tensor's inputs from `first` on, in blocks of `block`.
pub(crate) struct Fp8 {
    product: Product,
    rows: usize,
    n: usize,
    k: usize,
    first: usize,
    block: (usize, usize),
}

pub(crate) fn cases(quick: bool) -> Vec<Fp8> {
    let of = |rows, n, k, first, block| {
        [Product::Linear, Product::GateUp, Product::Head, Product::Experts].map(|product| Fp8 {
            product,
            rows,
            n,
            k,
            first,
            block,
        })
    };
    let mut cases: Vec<Fp8> =
        [1, 9].map(|rows| of(rows, 80, 192, 64, (128, 128))).into_iter().flatten().collect();
    cases.extend(of(33, 80, 100, 3, (1, usize::MAX)));
    // Enough rows to be widened first.
    cases.extend(of(300, 80, 256, 0, (128, 128)));
    if !quick {
        for rows in [1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 130, 300] {
            cases.extend(of(rows, 520, 1024, 0, (128, 128)));
        }
        cases.extend(of(20, 136, 1000, 0, (1, usize::MAX)));
        cases.extend(of(40, 136, 1000, 0, (usize::MAX, usize::MAX)));
        cases.extend(of(1, 4096, 4096, 0, (128, 128)));
    }
    cases
}

impl Case for Fp8 {
    fn name(&self) -> String {
        let Self { product, rows, n, k, first, block } = *self;
        let (what, n) = match product {
            Product::Linear => ("linear", n),
            Product::GateUp => ("gate_up_silu", n / 2),
            Product::Head => ("lm_head", n),
            Product::Experts => ("experts_gate_up", n / 2),
        };
        let by = match block {
            (1, usize::MAX) => "channel".to_owned(),
            (_, usize::MAX) => "tensor".to_owned(),
            (rows, cols) => format!("{rows} x {cols}"),
        };
        format!("{what} {rows} x {k} -> {n}, FP8 by {by}, from {first}")
    }

    fn tolerance(&self) -> (f32, f32) {
        match self.product {
            Product::GateUp | Product::Experts => (ROUNDING, 1e-3),
            // Widened weights are rounded once more, by at most 1/512 each: in sums of the order of
            // one that is 1e-3 on average, and several times that in the worst of many.
            Product::Linear | Product::Head if self.rows > 256 => (SUM, 1e-2),
            Product::Linear | Product::Head => (SUM, 1e-5 * self.k as f32),
        }
    }

    fn run<B: Writable>(&self, backend: &mut B) -> Result<Vec<f32>, KernelError> {
        let Self { product, rows, n, k, first, block } = *self;
        let mut random = Random(23);
        let all = first + k;
        // All numbers but NaN.
        let number = |random: &mut Random| match random.next() as u8 {
            byte if byte & 0x7f == 0x7f => byte & 0x80,
            byte => byte,
        };
        let numbers: Vec<u8> = (0..n * all).map(|_| number(&mut random)).collect();
        let (down, across) = (n.div_ceil(block.0), all.div_ceil(block.1));
        // Scaled so that sums are of the order of one; exact in bf16.
        let small = 0.5f32.powi(k.ilog2() as i32 / 2 + 8);
        let scales: Vec<f32> =
            random.vec(down * across).iter().map(|x| (1.0 + x.abs()) * small).collect();
        let scales = bytes(&scales);
        let of_rows = |start: usize, rows: usize| HostMatrix {
            data: &numbers[start * all..],
            dtype: DType::F8E4M3,
            rows,
            cols: k,
            col_start: first,
            row_stride: all,
            scales: Some(Scales::Blocks(BlockScales {
                data: &scales,
                dtype: DType::Bf16,
                block,
                row_stride: across,
                first_row: start,
            })),
        };
        let part = of_rows(0, n);
        let form = Compact::of(std::slice::from_ref(&part));
        let is_stack = matches!(product, Product::Experts);
        if !form.is_some_and(|form| backend.keeps(&form, is_stack)) {
            return Err(KernelError::Unsupported("the matrix would become bf16".to_owned()));
        }
        let x = random.vec(rows * k);
        let x = input(backend, &x, k)?;
        match product {
            Product::Linear => {
                let weight = backend.load_matrix(&[part])?;
                let bias = backend.load_vector(&random.vec(n))?;
                let mut out = poisoned(backend, rows, n, false)?;
                backend.linear(&x, &weight, Some(&bias), &mut out)?;
                backend.read_buffer(&out)
            }
            Product::GateUp => {
                let weight = backend.load_matrix(&[part])?;
                let mut out = poisoned(backend, rows, n / 2, true)?;
                backend.gate_up(&x, &weight, None, None, Activation::Silu, &mut out)?;
                backend.read_buffer(&out)
            }
            Product::Head => {
                let weight = backend.load_matrix(&[part])?;
                let chosen: Vec<u32> = (0..rows as u32).rev().step_by(2).collect();
                let mut out = poisoned(backend, chosen.len(), n, false)?;
                backend.lm_head(&x, &chosen, &weight, None, &mut out)?;
                backend.read_buffer(&out)
            }
            Product::Experts => {
                let inner = n / 8;
                let parts: Vec<_> = (0..8).map(|i| of_rows(i * inner, inner)).collect();
                let stack = backend.load_stack(&parts)?;
                let mut routes = backend.new_routes(rows, Routing::softmax(4, 1, true))?;
                let chosen: Vec<u32> = (0..rows as u32).map(|row| row * row % 4).collect();
                backend.assign(&chosen, &mut routes)?;
                let mut out = poisoned(backend, rows, inner, true)?;
                let silu = ExpertActivation::Silu;
                backend.experts_gate_up(&x, &stack, None, silu, &routes, &mut out)?;
                backend.read_buffer(&out)
            }
        }
    }
}
