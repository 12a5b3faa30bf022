//! Linear attention, and gates of attention's results.
use kernels::KernelError;
use kernels::backend::{
    Batch, DeltaAt, DeltaInput, DeltaShape, DeltaWeights, Rule, RuleWeights, SeqRows, StatesShape,
};
use kernels::cuda::measure::COLD;

use crate::operations::{Case, ROUNDING, Random, Writable, input, poisoned, wide};
use crate::{Options, Table};

/// Qwen3-Next.
const REAL: DeltaShape = DeltaShape {
    rule: Rule::GatedDelta,
    key_heads: 16,
    value_heads: 32,
    key_dim: 128,
    value_dim: 128,
    kernel: 4,
};
/// Granite 4.0 H Tiny.
const MAMBA2: DeltaShape = DeltaShape {
    rule: Rule::Mamba2,
    key_heads: 1,
    value_heads: 48,
    key_dim: 128,
    value_dim: 64,
    kernel: 4,
};

/// Three sequences that begin in one step and go on in the next, one of them from a copy.
pub(crate) struct Delta {
    shape: DeltaShape,
}

impl Case for Delta {
    fn name(&self) -> String {
        let DeltaShape { rule, key_heads, value_heads, key_dim, value_dim, kernel } = self.shape;
        format!("{rule:?} {key_heads}, {value_heads} heads of {key_dim}, {value_dim}, {kernel}")
    }

    fn tolerance(&self) -> (f32, f32) {
        (ROUNDING, 1e-2)
    }

    fn run<B: Writable>(&self, backend: &mut B) -> Result<Vec<f32>, KernelError> {
        let mut random = Random(34);
        let shape = self.shape;
        let states = StatesShape { num_layers: 2, slots: 4, layer: shape };
        let mut states = backend.new_states(states)?;
        let decay: Vec<f32> = random.vec(shape.value_heads).iter().map(|x| x.abs()).collect();
        let weights = DeltaWeights {
            conv: backend.load_vector(&random.vec(shape.channels() * shape.kernel))?,
            decay: backend.load_vector(&decay)?,
            dt_bias: backend.load_vector(&random.vec(shape.value_heads))?,
            rule: match shape.rule {
                Rule::GatedDelta => RuleWeights::GatedDelta {
                    norm: backend.load_vector(&random.vec(shape.value_dim))?,
                },
                Rule::Mamba2 => RuleWeights::Mamba2 {
                    conv_bias: Some(backend.load_vector(&random.vec(shape.channels()))?),
                    skip: backend.load_vector(&random.vec(shape.value_heads))?,
                },
            },
        };
        let is_input = shape.rule == Rule::GatedDelta;
        let mut seen = Vec::new();
        // (rows, tokens afterwards).
        for (at, step) in
            [[(70, 70), (1, 1), (9, 9)], [(1, 71), (1, 2), (37, 46)]].into_iter().enumerate()
        {
            let slots = [[3, 0, 2], [1, 0, 2]][at];
            if at == 1 {
                backend.copy_states(&mut states, &[(3, 1)])?;
            }
            let (mut list, mut rows) = (Vec::new(), 0);
            for (num_rows, context_len) in step {
                let row_start = rows;
                rows += num_rows;
                let (table_start, table_len) = (0, 0);
                list.push(SeqRows { row_start, num_rows, context_len, table_start, table_len });
            }
            let rows = rows as usize;
            let batch = Batch { positions: &[], slots: &[], seqs: &list, block_tables: &[] };
            let width = shape.channels() + shape.value_width();
            let qkvz = wide(backend, &random.vec(rows * width), width)?;
            let ba = shape.gates_width();
            let ba = wide(backend, &random.vec(rows * ba), ba)?;
            let mut out = poisoned(backend, rows, shape.value_width(), is_input)?;
            let input = DeltaInput { qkvz: &qkvz, ba: &ba, weights: &weights, eps: 1e-4 };
            let at = DeltaAt { batch: &batch, states: &slots, layer: 1 };
            backend.delta_attention(input, at, &mut states, &mut out)?;
            seen.extend(backend.read_buffer(&out)?);
        }
        Ok(seen)
    }
}

/// `x *= sigmoid(gate)`.
pub(crate) struct Gate {
    width: usize,
}

impl Case for Gate {
    fn name(&self) -> String {
        format!("gate 5 x {}", self.width)
    }

    fn tolerance(&self) -> (f32, f32) {
        (ROUNDING, 1e-6)
    }

    fn run<B: Writable>(&self, backend: &mut B) -> Result<Vec<f32>, KernelError> {
        let mut random = Random(35);
        let gate = wide(backend, &random.vec(5 * self.width), self.width)?;
        let mut x = input(backend, &random.vec(5 * self.width), self.width)?;
        backend.gate(&gate, &mut x)?;
        backend.read_buffer(&x)
    }
}

pub(crate) fn cases(quick: bool) -> Vec<Delta> {
    let of = |[key_heads, value_heads, key_dim, value_dim, kernel]: [usize; 5]| DeltaShape {
        rule: Rule::GatedDelta,
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        kernel,
    };
    let small = of([2, 4, 16, 24, 2]);
    let small = [small, DeltaShape { rule: Rule::Mamba2, ..small }];
    let all = [small[0], small[1], of([1, 3, 256, 256, 8]), REAL, MAMBA2];
    let shapes: &[DeltaShape] = if quick { &small } else { &all };
    shapes.iter().map(|shape| Delta { shape: *shape }).collect()
}

pub(crate) fn gates(quick: bool) -> Vec<Gate> {
    let widths: &[usize] = if quick { &[60] } else { &[60, 4096] };
    widths.iter().map(|width| Gate { width: *width }).collect()
}

/// Measures a layer of Qwen3-Next, and one of Granite 4: sequences that decode, and prompts.
pub(crate) fn speed(options: &Options, ordinal: u32, table: &mut Table) {
    let small = |shape| DeltaShape { key_heads: 1, value_heads: 2, key_dim: 16, ..shape };
    let (shapes, cold) = match options.quick {
        true => ([small(REAL), small(MAMBA2)], 1 << 16),
        false => ([REAL, MAMBA2], COLD),
    };
    let all: &[(usize, usize)] = match options.quick {
        true => &[(2, 1), (1, 9)],
        false => &[(1, 1), (8, 1), (64, 1), (256, 1), (1, 8192), (8, 1024)],
    };
    for (shape, &(count, rows)) in shapes.iter().flat_map(|it| all.iter().map(move |of| (it, of))) {
        let run = || -> Result<String, KernelError> {
            let mut backend = options.backend(ordinal, true)?;
            let took = backend.measure_delta(shape, (count, rows), cold)?.as_secs_f64();
            let bytes = 8 * count * shape.state_len();
            let rate = bytes as f64 / took / 1e12;
            Ok(format!("{:.1} us, states {rate:.2} TB/s", took * 1e6))
        };
        let name = format!("{:?}, {count} x {rows} tokens", shape.rule);
        table.add(name, run().map_err(|error| error.to_string()));
    }
}
