//! Linear attention: a task has a key head of a sequence, with the value heads that use it or some
//! of them, and takes its tokens one after the other.
use std::ops::Range;

use super::isa::multiversion;
use super::math::{exp, sigmoid, silu, softplus, sum_by};
use super::memory::{AlignedVec, Disjoint};
use super::{CpuBackend, CpuBuffer, CpuVector, GRAIN};
use crate::backend::{
    Buffer as _, DeltaAt, DeltaInput, DeltaOps, DeltaShape, Rule, RuleWeights, SeqRows, StatesShape,
};
use crate::check::delta as check;
use crate::error::KernelError;

/// Most elements of a head.
const HEAD: usize =
    if DeltaShape::MOST.0 > DeltaShape::MOST.1 { DeltaShape::MOST.0 } else { DeltaShape::MOST.1 };
/// Columns of a state that are updated together: what they sum up stays in registers.
const COLUMNS: usize = 32;
/// Most value heads of a task: in Mamba 2 all of a model may use one key head.
const TASK_HEADS: usize = 4;

/// States of sequences, in host memory: of each layer and slot those of the value heads,
/// `[value_heads, key_dim, value_dim]`, then the channels of the last tokens, `[kernel - 1,
/// channels]`, the oldest first.
#[derive(Debug)]
pub struct CpuStates {
    shape: StatesShape,
    values: AlignedVec<f32>,
}

impl DeltaOps for CpuBackend {
    type States = CpuStates;

    fn new_states(&mut self, shape: StatesShape) -> Result<CpuStates, KernelError> {
        check::states(&shape)?;
        let values = AlignedVec::zeroed(shape.num_values(), "states of sequences")?;
        Ok(CpuStates { shape, values })
    }

    fn copy_states(
        &mut self,
        states: &mut CpuStates,
        pairs: &[(u32, u32)],
    ) -> Result<(), KernelError> {
        check::copies(&states.shape, pairs)?;
        if pairs.is_empty() {
            return Ok(());
        }
        let StatesShape { num_layers, slots, layer } = states.shape;
        let len = layer.state_len();
        let values = Disjoint::new(&mut states.values);
        self.pool.run_ranges(num_layers, 1, &|layers, _| {
            for &(from, to) in pairs {
                for layer in layers.clone() {
                    let at = |slot: u32| (layer * slots + slot as usize) * len;
                    // SAFETY: the slot exists, and only this task has this layer.
                    let source = unsafe { values.slice(at(from), len) };
                    // SAFETY: likewise, and it is another slot.
                    let target = unsafe { values.slice(at(to), len) };
                    target.copy_from_slice(source);
                }
            }
        })
    }

    fn delta_attention(
        &mut self,
        input: DeltaInput<'_, CpuBuffer, CpuVector>,
        at: DeltaAt<'_>,
        states: &mut CpuStates,
        out: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        check::attend(&input, at, &states.shape, out)?;
        out.set_rows(input.qkvz.rows())?;
        let (isa, shape, len) = (self.isa, states.shape.layer, states.shape.layer.state_len());
        let (heads, group) = (shape.key_heads, shape.value_heads / shape.key_heads);
        let shares = group.div_ceil(TASK_HEADS);
        let first = at.layer * states.shape.slots;
        let values = Disjoint::new(&mut states.values);
        let out = Disjoint::new(out.values_mut());
        let of = |task: usize| {
            let (index, head) = (task / heads, task % heads);
            let state = (first + at.states[index] as usize) * len;
            Head { shape, head, seq: &at.batch.seqs[index], state }
        };
        let tasks = at.batch.seqs.len() * heads;
        self.pool.run_ranges(tasks * shares, 1, &|range, _| {
            for task in range {
                let head = of(task / shares);
                let share = task % shares * TASK_HEADS;
                let own = share..(share + TASK_HEADS).min(group);
                attend(isa, &head, own, &input, &values, &out);
                if shares == 1 {
                    // SAFETY: the key head has this task alone.
                    unsafe { head.keep_last(input.qkvz, &values) };
                }
            }
        })?;
        if shares == 1 {
            return Ok(());
        }
        // All tasks of a key head read the channels of its last tokens.
        self.pool.run_ranges(tasks, 1, &|range, _| {
            for task in range {
                // SAFETY: none of the tasks above runs, and the key head has this one alone.
                unsafe { of(task).keep_last(input.qkvz, &values) };
            }
        })
    }

    fn gate(&mut self, gate: &CpuBuffer, x: &mut CpuBuffer) -> Result<(), KernelError> {
        check::gate(gate, x)?;
        let isa = self.isa;
        let gate = gate.values();
        let x = Disjoint::new(x.values_mut());
        self.pool.run_ranges(gate.len(), GRAIN, &|range, _| {
            // SAFETY: an element belongs to one task.
            let x = unsafe { x.slice(range.start, range.len()) };
            times_sigmoid(isa, &gate[range], x);
        })
    }
}

/// A key head of a sequence.
struct Head<'a> {
    shape: DeltaShape,
    head: usize,
    seq: &'a SeqRows,
    /// Where the sequence's state of the layer begins.
    state: usize,
}

impl Head<'_> {
    /// The head's channels: first and number of those of q, k, and v of all its value heads.
    fn segments(&self) -> [(usize, usize); 3] {
        let (keys, key_dim) = (self.shape.key_width(), self.shape.key_dim);
        let values = self.shape.value_width() / self.shape.key_heads;
        let first = self.head * key_dim;
        [(first, key_dim), (keys + first, key_dim), (2 * keys + self.head * values, values)]
    }

    /// Whether the sequence begins with this step.
    fn is_new(&self) -> bool {
        self.seq.context_len == self.seq.num_rows
    }

    /// Where the state has the channels of the last tokens.
    fn last(&self) -> usize {
        let DeltaShape { value_heads, key_dim, value_dim, .. } = self.shape;
        self.state + value_heads * key_dim * value_dim
    }

    /// The sequence's tokens. While they are in use, nobody may write the channels of the last ones
    /// in its state, except as [`Head::keep_last`] does.
    fn tokens<'a>(&self, qkvz: &'a CpuBuffer, states: &'a Disjoint<'a, f32>) -> Tokens<'a> {
        let kept = (!self.is_new()).then(|| (states, self.last()));
        Tokens { qkvz, start: self.seq.row_start as usize, kept, shape: self.shape }
    }

    /// Keeps the head's channels of the last tokens: those of this step, and of before if it has
    /// fewer.
    ///
    /// # Safety
    /// Nobody else uses them in the state.
    unsafe fn keep_last(&self, qkvz: &CpuBuffer, states: &Disjoint<'_, f32>) {
        let (kernel, channels) = (self.shape.kernel, self.shape.channels());
        let (tokens, count) = (self.tokens(qkvz, states), self.seq.num_rows as usize);
        for segment in self.segments() {
            for place in 0..kernel - 1 {
                let index = (count + place) as isize + 1 - kernel as isize;
                let to = self.last() + place * channels + segment.0;
                // SAFETY: as the caller says; what is copied within the state comes from a later
                // place, which is another token's.
                let to = unsafe { states.slice(to, segment.1) };
                match tokens.get(index, segment) {
                    Some(from) => to.copy_from_slice(from),
                    None => to.fill(0.0),
                }
            }
        }
    }
}

multiversion! {
    /// `x *= sigmoid(gate)`. Both of one length.
    fn times_sigmoid(gate: &[f32], x: &mut [f32]) = times_sigmoid_body
}

#[inline(always)]
fn times_sigmoid_body<const FMA: bool>(gate: &[f32], x: &mut [f32]) {
    for (x, &gate) in x.iter_mut().zip(gate) {
        *x *= sigmoid(gate);
    }
}

multiversion! {
    /// Computes all rows of some value heads of a key head of a sequence, counted within it.
    fn attend(
        head: &Head<'_>,
        values: Range<usize>,
        input: &DeltaInput<'_, CpuBuffer, CpuVector>,
        states: &Disjoint<'_, f32>,
        out: &Disjoint<'_, f32>,
    ) = attend_body
}

#[inline(always)]
fn attend_body<const FMA: bool>(
    head: &Head<'_>,
    values: Range<usize>,
    input: &DeltaInput<'_, CpuBuffer, CpuVector>,
    states: &Disjoint<'_, f32>,
    out: &Disjoint<'_, f32>,
) {
    let DeltaInput { qkvz, ba, weights, eps } = input;
    let shape = head.shape;
    let DeltaShape { key_heads, value_heads, key_dim, value_dim, .. } = shape;
    let (group, channels, size) = (value_heads / key_heads, shape.channels(), key_dim * value_dim);
    let first = head.head * group + values.start;
    // SAFETY: value heads of a sequence belong to one task.
    let own = unsafe { states.slice(head.state + first * size, values.len() * size) };
    let segments = head.segments();
    if head.is_new() {
        own.fill(0.0);
    }
    let (start, count) = (head.seq.row_start as usize, head.seq.num_rows as usize);
    let tokens = head.tokens(qkvz, states);
    let (conv_bias, _) = weights.rule.mamba2();
    let conv = Convolution { weights: &weights.conv, bias: conv_bias.map(|bias| &**bias) };
    let (mut q, mut k, mut v) = ([0.0; HEAD], [0.0; HEAD], [0.0; HEAD]);
    let (q, k, v) = (&mut q[..key_dim], &mut k[..key_dim], &mut v[..value_dim]);
    for index in 0..count {
        tokens.convolve(index, segments[0], conv, q);
        tokens.convolve(index, segments[1], conv, k);
        if shape.rule == Rule::GatedDelta {
            normalise(q, (key_dim as f32).sqrt());
            normalise(k, 1.0);
        }
        let row = start + index;
        let z = &qkvz.row(row)[channels..];
        let (b, a) = ba.row(row).split_at(shape.gates_width() - value_heads);
        for (head, s) in (first..).zip(own.chunks_exact_mut(size)) {
            tokens.convolve(index, (2 * shape.key_width() + head * value_dim, value_dim), conv, v);
            let step = softplus(a[head] + weights.dt_bias[head]);
            let kept = exp(-(weights.decay[head] * step));
            // SAFETY: a value head of a row belongs to one task.
            let out = unsafe { out.slice((row * value_heads + head) * value_dim, value_dim) };
            let z = &z[head * value_dim..][..value_dim];
            match &weights.rule {
                RuleWeights::GatedDelta { norm } => {
                    let beta = sigmoid(b[head]);
                    let mut column = 0;
                    while column + COLUMNS <= value_dim {
                        replace::<COLUMNS, FMA>(s, column, (q, k, v), (kept, beta), out);
                        column += COLUMNS;
                    }
                    while column < value_dim {
                        replace::<8, FMA>(s, column, (q, k, v), (kept, beta), out);
                        column += 8;
                    }
                    let scale = 1.0 / (sum_by(out, |x| x * x) / value_dim as f32 + eps).sqrt();
                    for ((out, &norm), &z) in out.iter_mut().zip(&**norm).zip(z) {
                        *out = *out * scale * norm * silu(z);
                    }
                }
                RuleWeights::Mamba2 { skip, .. } => {
                    let gates = (kept, step, skip[head]);
                    let mut column = 0;
                    while column + COLUMNS <= value_dim {
                        add::<COLUMNS, FMA>(s, column, (q, k, v), gates, out);
                        column += COLUMNS;
                    }
                    while column < value_dim {
                        add::<8, FMA>(s, column, (q, k, v), gates, out);
                        column += 8;
                    }
                    out.iter_mut().zip(z).for_each(|(out, &z)| *out *= silu(z));
                }
            }
        }
    }
}

/// Weights of the channels' convolutions, and what is added.
#[derive(Clone, Copy)]
struct Convolution<'a> {
    weights: &'a [f32],
    bias: Option<&'a [f32]>,
}

/// The tokens of a sequence, as projected. Not closures: these must be inlined, to be compiled for
/// the instruction set of whom they are called by.
struct Tokens<'a> {
    qkvz: &'a CpuBuffer,
    /// The row of the sequence's first token of this step.
    start: usize,
    /// All states, and where the channels of the tokens before this step begin; nothing if there
    /// are none.
    kept: Option<(&'a Disjoint<'a, f32>, usize)>,
    shape: DeltaShape,
}

impl<'a> Tokens<'a> {
    /// Some channels, their first and their number, of a token, counted from the sequence's first
    /// of this step; down to `-(kernel - 1)`.
    #[inline(always)]
    fn get(&self, index: isize, (first, len): (usize, usize)) -> Option<&'a [f32]> {
        if index >= 0 {
            return Some(&self.qkvz.row(self.start + index as usize)[first..first + len]);
        }
        let (states, last) = self.kept?;
        let place = (self.shape.kernel - 1).wrapping_add_signed(index);
        let from = last + place * self.shape.channels() + first;
        // SAFETY: nobody writes these channels before `keep_last`, where the only task that has
        // them writes a token's place when it has no more use for it.
        Some(unsafe { states.read(from, len) })
    }

    /// `out` = these channels of a token, convolved, with SiLU.
    #[inline(always)]
    fn convolve(
        &self,
        index: usize,
        segment: (usize, usize),
        conv: Convolution<'_>,
        out: &mut [f32],
    ) {
        let (kernel, bias) = (self.shape.kernel, conv.bias);
        let conv = &conv.weights[segment.0 * kernel..][..segment.1 * kernel];
        match bias {
            Some(bias) => out.copy_from_slice(&bias[segment.0..][..segment.1]),
            None => out.fill(0.0),
        }
        for tap in 0..kernel {
            let Some(x) = self.get(index as isize + tap as isize + 1 - kernel as isize, segment)
            else {
                continue;
            };
            for ((out, conv), &x) in out.iter_mut().zip(conv.chunks_exact(kernel)).zip(x) {
                *out += conv[tap] * x;
            }
        }
        out.iter_mut().for_each(|x| *x = silu(*x));
    }
}

/// Divides by the length and by `divisor`.
#[inline(always)]
fn normalise(x: &mut [f32], divisor: f32) {
    let scale = 1.0 / ((sum_by(x, |x| x * x) + DeltaShape::EPS).sqrt() * divisor);
    x.iter_mut().for_each(|x| *x *= scale);
}

/// Updates columns `column..column + N` of a state, `s: [k.len(), v.len()]`, by the delta rule, and
/// computes those of `out`.
#[inline(always)]
fn replace<const N: usize, const FMA: bool>(
    s: &mut [f32],
    column: usize,
    (q, k, v): (&[f32], &[f32], &[f32]),
    (kept, beta): (f32, f32),
    out: &mut [f32],
) {
    let stride = v.len();
    let mut recalled = [0.0f32; N];
    for (row, &k) in s.chunks_exact_mut(stride).zip(k) {
        for (sum, s) in recalled.iter_mut().zip(&mut row[column..][..N]) {
            *s *= kept;
            *sum = fused::<FMA>(k, *s, *sum);
        }
    }
    let mut changes = [0.0f32; N];
    for ((change, &v), recalled) in changes.iter_mut().zip(&v[column..][..N]).zip(recalled) {
        *change = beta * (v - recalled);
    }
    let mut sums = [0.0f32; N];
    for ((row, &k), &q) in s.chunks_exact_mut(stride).zip(k).zip(q) {
        for ((sum, s), &change) in sums.iter_mut().zip(&mut row[column..][..N]).zip(&changes) {
            *s = fused::<FMA>(k, change, *s);
            *sum = fused::<FMA>(q, *s, *sum);
        }
    }
    out[column..][..N].copy_from_slice(&sums);
}

/// The same as in Mamba 2.
#[inline(always)]
fn add<const N: usize, const FMA: bool>(
    s: &mut [f32],
    column: usize,
    (q, k, v): (&[f32], &[f32], &[f32]),
    (kept, step, skip): (f32, f32, f32),
    out: &mut [f32],
) {
    let stride = v.len();
    let (mut changes, mut sums) = ([0.0f32; N], [0.0f32; N]);
    for ((change, sum), &v) in changes.iter_mut().zip(&mut sums).zip(&v[column..][..N]) {
        *change = step * v;
        *sum = skip * v;
    }
    for ((row, &k), &q) in s.chunks_exact_mut(stride).zip(k).zip(q) {
        for ((sum, s), &change) in sums.iter_mut().zip(&mut row[column..][..N]).zip(&changes) {
            *s = fused::<FMA>(k, change, *s * kept);
            *sum = fused::<FMA>(q, *s, *sum);
        }
    }
    out[column..][..N].copy_from_slice(&sums);
}

/// `a * b + c`, rounded once where the hardware does that.
#[inline(always)]
fn fused<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}
