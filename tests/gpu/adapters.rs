//! The operations behind LoRA adapters against the reference: each row is multiplied with the down
//! and up matrices of its adapter, or with none; and the result is added to a fused product.
use kernels::KernelError;
use kernels::backend::{Activation, DType, HostMatrix, NOT_ASSIGNED, Routing};

use crate::operations::{Case, ROUNDING, Random, Writable, bytes, input, matrix, poisoned};

/// A module of `[2 * inner, hidden]`, with several adapters that each change gate and up.
pub(crate) struct Adapters {
    rows: usize,
    hidden: usize,
    inner: usize,
    rank: usize,
    adapters: usize,
}

pub(crate) fn cases(quick: bool) -> Vec<Adapters> {
    let of = |rows, hidden, inner, rank, adapters| Adapters { rows, hidden, inner, rank, adapters };
    let mut cases = vec![of(1, 64, 40, 8, 1), of(9, 64, 40, 8, 3), of(70, 96, 40, 16, 3)];
    if !quick {
        cases.extend([
            of(1, 4096, 1024, 16, 2),
            of(33, 1000, 200, 24, 7),
            of(64, 2048, 512, 64, 32),
            of(700, 512, 300, 8, 5),
        ]);
    }
    cases
}

impl Case for Adapters {
    fn name(&self) -> String {
        let Self { rows, hidden, inner, rank, adapters } = self;
        format!("adapters: {adapters}, rank {rank}, gate_up {rows} x {hidden} -> {inner}")
    }

    fn tolerance(&self) -> (f32, f32) {
        // GPUs round the result of the first product before the second one adds it up.
        (ROUNDING, 1e-2)
    }

    fn run<B: Writable>(&self, backend: &mut B) -> Result<Vec<f32>, KernelError> {
        let Self { rows, hidden, inner, rank, adapters } = *self;
        let mut random = Random(22);
        // Exact in bf16, and small enough that sums stay of the order of one.
        let mut small = |rows: usize, cols: usize| -> Vec<f32> {
            let scale = 0.5f32.powi(cols.ilog2() as i32 / 2);
            random.vec(rows * cols).iter().map(|x| x * scale).collect()
        };
        let own = matrix(backend, &small(2 * inner, hidden), hidden)?;
        let mut stack = |backend: &mut B, rows: usize, cols: usize| {
            let data = bytes(&small(adapters * rows, cols));
            let part = |data| HostMatrix {
                data,
                dtype: DType::Bf16,
                rows,
                cols,
                col_start: 0,
                row_stride: cols,
                scales: None,
            };
            backend.load_stack(&data.chunks(rows * cols * 2).map(part).collect::<Vec<_>>())
        };
        let down = stack(backend, rank, hidden)?;
        let up = stack(backend, 2 * inner, rank)?;
        let x = input(backend, &random.vec(rows * hidden), hidden)?;
        // Each adapter in turn, then none.
        let to = |row: usize| match row % (adapters + 1) {
            last if last == adapters => NOT_ASSIGNED,
            adapter => adapter as u32,
        };
        let to: Vec<u32> = (0..rows).map(to).collect();
        let routing = Routing::softmax(adapters, 1, false);
        let mut routes = backend.new_routes(rows, routing)?;
        backend.assign(&to, &mut routes)?;
        let mut narrow = poisoned(backend, rows, rank, true)?;
        backend.experts_down(&x, 0, &down, None, &routes, &mut narrow)?;
        let mut addend = poisoned(backend, rows, 2 * inner, false)?;
        backend.experts_down(&narrow, 0, &up, None, &routes, &mut addend)?;
        let mut out = poisoned(backend, rows, inner, true)?;
        backend.gate_up(&x, &own, None, Some(&addend), Activation::Silu, &mut out)?;
        let mut values = backend.read_buffer(&narrow)?;
        values.extend(backend.read_buffer(&addend)?);
        values.extend(backend.read_buffer(&out)?);
        Ok(values)
    }
}
