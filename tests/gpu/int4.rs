//! Products with 4-bit weights against the reference, which multiplies the dequantised values.
use kernels::KernelError;
use kernels::backend::{Activation, DType, HostMatrix, Scales};
use kernels::weights::{Compact, Groups, Packed, Packing};

use crate::operations::{Case, ROUNDING, Random, SUM, Writable, bytes, input, poisoned};

#[derive(Clone, Copy)]
enum Product {
    Linear,
    GateUp,
    Head,
}

/// Rows of x times a matrix `[n, k]`: a tensor's inputs from `first` on, in groups of `group`.
pub(crate) struct Int4 {
    product: Product,
    rows: usize,
    n: usize,
    k: usize,
    first: usize,
    group: usize,
}

pub(crate) fn cases(quick: bool) -> Vec<Int4> {
    let of = |rows, n, k, first, group| {
        [Product::Linear, Product::GateUp, Product::Head].map(|product| Int4 {
            product,
            rows,
            n,
            k,
            first,
            group,
        })
    };
    let mut cases: Vec<Int4> =
        [1, 9, 33].map(|rows| of(rows, 80, 160, 32, 64)).into_iter().flatten().collect();
    if !quick {
        for rows in [1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 130, 300] {
            cases.extend(of(rows, 520, 1024, 0, 128));
        }
        // A first group that is cut, a single group, groups of 32.
        cases.extend(of(5, 136, 608, 32, 64));
        cases.extend(of(20, 136, 1000, 0, 1000));
        cases.extend(of(40, 136, 1000, 0, 32));
        cases.extend(of(1, 4096, 4096, 0, 128));
    }
    cases
}

impl Case for Int4 {
    fn name(&self) -> String {
        let Self { product, rows, n, k, first, group } = *self;
        let (what, n) = match product {
            Product::Linear => ("linear", n),
            Product::GateUp => ("gate_up_silu", n / 2),
            Product::Head => ("lm_head", n),
        };
        format!("{what} {rows} x {k} -> {n}, 4 bits by {group}, from {first}")
    }

    fn tolerance(&self) -> (f32, f32) {
        match self.product {
            Product::GateUp => (ROUNDING, 1e-3),
            Product::Linear | Product::Head => (SUM, 1e-5 * self.k as f32),
        }
    }

    fn run<B: Writable>(&self, backend: &mut B) -> Result<Vec<f32>, KernelError> {
        let Self { product, rows, n, k, first, group } = *self;
        let mut random = Random(21);
        let all = first + k;
        let num_groups = all.div_ceil(group);
        let mut words = |count: usize| -> Vec<u8> {
            (0..count).flat_map(|_| (random.next() as u32).to_le_bytes()).collect()
        };
        let (integers, zeros) = (words(n * all.div_ceil(8)), words(n.div_ceil(8) * num_groups));
        // Scaled so that sums are of the order of one; exact in bf16.
        let small = 0.5f32.powi(k.ilog2() as i32 / 2 + 2);
        let scales: Vec<f32> =
            random.vec(n * num_groups).iter().map(|x| (1.0 + x.abs()) * small).collect();
        let scales = bytes(&scales);
        let packed = Packed {
            packing: Packing::Compressed,
            bits: 4,
            rows: n,
            cols: all,
            words: &integers,
            zeros: Some(&zeros),
            scales: &scales,
            scale_type: DType::Bf16,
            num_groups,
            groups: Groups::Even(group),
            first_row: 0,
        };
        let part = HostMatrix {
            data: &[],
            dtype: DType::Packed,
            rows: n,
            cols: k,
            col_start: first,
            row_stride: all,
            scales: Some(Scales::Packed(packed)),
        };
        let form = Compact::of(std::slice::from_ref(&part));
        if !form.is_some_and(|form| backend.keeps(&form, false)) {
            return Err(KernelError::Unsupported("the matrix would become bf16".to_owned()));
        }
        let weight = backend.load_matrix(&[part])?;
        let x = input(backend, &random.vec(rows * k), k)?;
        match product {
            Product::Linear => {
                let bias = backend.load_vector(&random.vec(n))?;
                let mut out = poisoned(backend, rows, n, false)?;
                backend.linear(&x, &weight, Some(&bias), &mut out)?;
                backend.read_buffer(&out)
            }
            Product::GateUp => {
                let mut out = poisoned(backend, rows, n / 2, true)?;
                backend.gate_up(&x, &weight, None, None, Activation::Silu, &mut out)?;
                backend.read_buffer(&out)
            }
            Product::Head => {
                let chosen: Vec<u32> = (0..rows as u32).rev().step_by(2).collect();
                let mut out = poisoned(backend, chosen.len(), n, false)?;
                backend.lm_head(&x, &chosen, &weight, None, &mut out)?;
                backend.read_buffer(&out)
            }
        }
    }
}
