//! Mixtures of experts against the reference: chosen experts, inner activations, weighted sums.
use kernels::KernelError;
use kernels::backend::{DType, ExpertActivation, HostMatrix, Routing};

use crate::operations::{Case, ROUNDING, Random, Writable, bytes, input, matrix, poisoned};

/// A layer's experts for some rows.
pub(crate) struct Experts {
    rows: usize,
    hidden: usize,
    inner: usize,
    routing: Routing,
    /// First column that the second product takes.
    first: usize,
    /// As in gpt-oss: biases everywhere, gate and up clamped.
    is_clamped: bool,
}

impl Experts {
    const PLAIN: Self = Self {
        rows: 1,
        hidden: 64,
        inner: 40,
        routing: Routing::softmax(6, 2, true),
        first: 0,
        is_clamped: false,
    };
}

pub(crate) fn cases(quick: bool) -> Vec<Experts> {
    let few = Routing::softmax(6, 2, true);
    let many = Routing::softmax(128, 8, false);
    let most = Routing::softmax(40, 32, true);
    // As in gpt-oss 20B, whose router takes a softmax over the chosen experts only.
    let clamped = Routing::softmax(32, 4, true);
    let plain = Experts::PLAIN;
    let mut cases = vec![
        // More rows than fit in a chunk: 8192 / 32 = 256.
        Experts { rows: 300, hidden: 32, inner: 16, routing: most, ..plain },
        Experts { routing: few, ..plain },
        Experts { rows: 70, routing: few, first: 3, ..plain },
        Experts { rows: 9, routing: few, is_clamped: true, ..plain },
    ];
    if !quick {
        cases.extend([
            Experts { hidden: 2048, inner: 768, routing: many, ..plain },
            Experts { rows: 33, hidden: 1000, inner: 200, routing: many, first: 8, ..plain },
            // More rows than fit in a chunk: 8192 / 8 = 1024.
            Experts { rows: 1500, hidden: 256, inner: 96, routing: many, ..plain },
            Experts { rows: 400, hidden: 512, inner: 300, routing: few, ..plain },
        ]);
        for rows in [1, 17] {
            let (hidden, inner, routing) = (2880, 2880, clamped);
            cases.push(Experts { rows, hidden, inner, routing, first: 0, is_clamped: true });
        }
    }
    cases
}

/// Distance between the first weights of successive experts in the run of random numbers that all
/// are cut from. Making as many numbers as a real model has would take longer than the case.
const SHIFT: usize = 1016;

/// The smallest gap between successive logits whose order matters: more than what another order of
/// summation changes in f32, in the largest cases.
const CLEAR: f64 = 1e-3;

/// Rows whose choice is clear: for others the order of summation decides, and the reference's is
/// different.
fn clear_rows(random: &mut Random, rows: usize, router: &[f32], routing: &Routing) -> Vec<f32> {
    let hidden = router.len() / routing.num_experts;
    let is_clear = |x: &[f32]| {
        let dot = |row: &[f32]| -> f64 {
            row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum()
        };
        let mut logits: Vec<f64> = router.chunks(hidden).map(dot).collect();
        logits.sort_by(|a, b| b.total_cmp(a));
        logits.windows(2).take(routing.top_k).all(|pair| pair[0] - pair[1] >= CLEAR)
    };
    let drawn = std::iter::repeat_with(|| random.vec(hidden));
    drawn.filter(|x| is_clear(x)).take(rows).flatten().collect()
}

impl Case for Experts {
    fn name(&self) -> String {
        let Self { rows, hidden, inner, routing, first, is_clamped } = self;
        let Routing { num_experts, top_k, .. } = routing;
        let clamped = if *is_clamped { "clamped " } else { "" };
        format!(
            "{top_k} of {num_experts} {clamped}experts, {rows} x {hidden} -> {inner}, columns from \
             {first}"
        )
    }

    fn tolerance(&self) -> (f32, f32) {
        // Inner activations, of the order of one, are rounded on GPUs before they are added up.
        (ROUNDING, 1e-2)
    }

    fn run<B: Writable>(&self, backend: &mut B) -> Result<Vec<f32>, KernelError> {
        let Self { rows, hidden, inner, routing, first, is_clamped } = *self;
        let mut random = Random(11);
        let router = random.vec(routing.num_experts * hidden);
        let x = input(backend, &clear_rows(&mut random, rows, &router, &routing), hidden)?;
        let router = matrix(backend, &router, hidden)?;
        // Exact in bf16, and small enough that sums stay of the order of one.
        let scale = |n: usize| 0.5f32.powi(n.ilog2() as i32 / 2);
        let mut stack = |backend: &mut B, count: usize, rows: usize, cols: usize| {
            let values = random.vec(rows * cols + (count - 1) * SHIFT);
            let small: Vec<f32> = values.iter().map(|x| x * scale(cols)).collect();
            let data = bytes(&small);
            let matrices: Vec<_> = (0..count)
                .map(|expert| HostMatrix {
                    data: &data[expert * SHIFT * 2..][..rows * cols * 2],
                    dtype: DType::Bf16,
                    rows,
                    cols,
                    col_start: 0,
                    row_stride: cols,
                    scales: None,
                })
                .collect();
            backend.load_stack(&matrices)
        };
        let gate_up = stack(backend, 2 * routing.num_experts, inner, hidden)?;
        let down = stack(backend, routing.num_experts, hidden, inner - first)?;
        let mut vector = |backend: &mut B, len: usize, scale: f32| {
            let values: Vec<f32> = random.vec(len).iter().map(|x| x * scale).collect();
            is_clamped.then(|| backend.load_vector(&values)).transpose()
        };
        // Less than the margin of a clear choice.
        let router_bias = vector(backend, routing.num_experts, CLEAR as f32 / 4.0)?;
        let gate_up_bias = vector(backend, 2 * routing.num_experts * inner, 1.0)?;
        let down_bias = vector(backend, routing.num_experts * hidden, 1.0)?;
        // Both ends of the clamp occur.
        let activation = match is_clamped {
            true => ExpertActivation::Clamped { alpha: 1.702, limit: 0.75 },
            false => ExpertActivation::Silu,
        };
        let mut routes = backend.new_routes(rows, routing)?;
        backend.route(&x, &router, router_bias.as_ref(), &mut routes)?;
        let mut middle = poisoned(backend, rows * routing.top_k, inner, true)?;
        backend.experts_gate_up(
            &x,
            &gate_up,
            gate_up_bias.as_ref(),
            activation,
            &routes,
            &mut middle,
        )?;
        let mut out = poisoned(backend, rows, hidden, false)?;
        backend.experts_down(&middle, first, &down, down_bias.as_ref(), &routes, &mut out)?;
        let (experts, mut values) = backend.read_routes(&routes)?;
        values.extend(experts.into_iter().map(|expert| expert as f32));
        values.extend(backend.read_buffer(&middle)?);
        values.extend(backend.read_buffer(&out)?);
        Ok(values)
    }
}
