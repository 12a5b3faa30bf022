//! Linear attention, against one in f64. By the gated delta rule that makes each token's whole
//! transition of the state: `S = kept (I - beta k k^T) S + beta k v^T`. For Mamba 2 it has no state
//! at all: each token's result is a sum over all tokens up to it.
use kernels::backend::prelude::*;
use kernels::backend::{
    Backend, Batch, Buffer, DeltaAt, DeltaInput, DeltaShape, DeltaWeights, Rule, RuleWeights,
    SeqRows, StatesShape,
};
use kernels::collective::single_rank;
use kernels::cpu::CpuBackend;
use kernels::{KernelError, ReferenceBackend};

use crate::support::{Random, assert_close, backend, bits, isas};

/// Not so small that results near zero, which the norm divides by, are all rounding.
pub(crate) const EPS: f32 = 1e-4;
pub(crate) const SLOTS: usize = 7;
const LAYERS: usize = 2;
/// The one that is computed; the other one's states are not to be touched.
const LAYER: usize = 1;

/// A layer's weights.
pub(crate) struct Layer {
    pub(crate) shape: DeltaShape,
    pub(crate) conv: Vec<f32>,
    pub(crate) decay: Vec<f32>,
    pub(crate) dt_bias: Vec<f32>,
    /// Of the delta rule.
    pub(crate) norm: Vec<f32>,
    /// Of Mamba 2, which need not have biases.
    pub(crate) conv_bias: Option<Vec<f32>>,
    pub(crate) skip: Vec<f32>,
}

/// What is projected of a sequence's tokens.
pub(crate) struct Tokens {
    pub(crate) count: usize,
    qkvz: Vec<f32>,
    ba: Vec<f32>,
}

/// A sequence's part of a step: which one, its tokens before and in the step, its slot.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    pub(crate) seq: usize,
    pub(crate) done: usize,
    pub(crate) rows: usize,
    pub(crate) slot: u32,
}

impl Layer {
    /// `sizes`: `key_heads`, `value_heads`, `key_dim`, `value_dim`, `kernel`.
    pub(crate) fn random(random: &mut Random, rule: Rule, sizes: [usize; 5]) -> Self {
        let [key_heads, value_heads, key_dim, value_dim, kernel] = sizes;
        let shape = DeltaShape { rule, key_heads, value_heads, key_dim, value_dim, kernel };
        let spread = |values: Vec<f32>, by: f32| values.into_iter().map(|x| by * x).collect();
        Self {
            conv: random.vec(shape.channels() * kernel),
            decay: random.vec(value_heads).into_iter().map(|x| 0.55 + 0.5 * x).collect(),
            dt_bias: spread(random.vec(value_heads), 2.0),
            norm: random.vec(value_dim),
            conv_bias: (kernel != 3).then(|| random.vec(shape.channels())),
            skip: random.vec(value_heads),
            shape,
        }
    }

    pub(crate) fn qkvz_width(&self) -> usize {
        self.shape.channels() + self.shape.value_width()
    }

    pub(crate) fn tokens(&self, random: &mut Random, count: usize) -> Tokens {
        let twice = |values: Vec<f32>| values.into_iter().map(|x| 2.0 * x).collect();
        let qkvz = twice(random.vec(count * self.qkvz_width()));
        let ba = twice(random.vec(count * self.shape.gates_width()));
        Tokens { count, qkvz, ba }
    }

    /// What a step projects of its parts: q, k, v and z; b, if there is one, and a.
    pub(crate) fn projected(&self, seqs: &[Tokens], parts: &[Part]) -> [Vec<f32>; 2] {
        let of = |width: usize, all: fn(&Tokens) -> &Vec<f32>| {
            let rows = |part: &Part| {
                let own = &all(&seqs[part.seq])[part.done * width..];
                own[..part.rows * width].to_vec()
            };
            parts.iter().flat_map(rows).collect()
        };
        let ba = self.shape.gates_width();
        [of(self.qkvz_width(), |tokens| &tokens.qkvz), of(ba, |tokens| &tokens.ba)]
    }

    /// A channel of a row, convolved.
    fn mixed(&self, tokens: &Tokens, row: usize, channel: usize) -> f64 {
        let (kernel, width) = (self.shape.kernel, self.qkvz_width());
        let taps = (0..kernel).filter(|back| *back <= row);
        let term = |back: usize| {
            let weight = self.conv[channel * kernel + kernel - 1 - back];
            f64::from(weight) * f64::from(tokens.qkvz[(row - back) * width + channel])
        };
        let bias = self.conv_bias.as_ref().filter(|_| self.shape.rule == Rule::Mamba2);
        let sum: f64 = taps.map(term).sum::<f64>() + bias.map_or(0.0, |it| f64::from(it[channel]));
        sum * sigmoid(sum)
    }

    /// Results of a sequence, `[rows, value_width]`.
    pub(crate) fn want(&self, tokens: &Tokens) -> Vec<f64> {
        match self.shape.rule {
            Rule::GatedDelta => self.want_by_the_delta_rule(tokens),
            Rule::Mamba2 => self.want_of_mamba2(tokens),
        }
    }

    fn want_of_mamba2(&self, tokens: &Tokens) -> Vec<f64> {
        let DeltaShape { key_heads, value_heads, key_dim, value_dim, .. } = self.shape;
        let (width, keys) = (self.qkvz_width(), self.shape.key_width());
        let mut out = vec![0.0; tokens.count * value_heads * value_dim];
        for head in 0..value_heads {
            let key = head * key_heads / value_heads * key_dim;
            let step = |row: usize| {
                let a = f64::from(tokens.ba[row * value_heads + head]);
                (a + f64::from(self.dt_bias[head])).exp().ln_1p()
            };
            for row in 0..tokens.count {
                for j in 0..value_dim {
                    let v = |row| self.mixed(tokens, row, 2 * keys + head * value_dim + j);
                    let of = |from: usize| {
                        let alike: f64 = (0..key_dim)
                            .map(|i| {
                                self.mixed(tokens, row, key + i)
                                    * self.mixed(tokens, from, keys + key + i)
                            })
                            .sum();
                        let since: f64 = (from + 1..=row).map(step).sum();
                        let kept = (-f64::from(self.decay[head]) * since).exp();
                        kept * step(from) * alike * v(from)
                    };
                    let sum: f64 = (0..=row).map(of).sum();
                    let z = self.shape.channels() + head * value_dim + j;
                    let z = f64::from(tokens.qkvz[row * width + z]);
                    out[(row * value_heads + head) * value_dim + j] =
                        (sum + f64::from(self.skip[head]) * v(row)) * z * sigmoid(z);
                }
            }
        }
        out
    }

    fn want_by_the_delta_rule(&self, tokens: &Tokens) -> Vec<f64> {
        let DeltaShape { key_heads, value_heads, key_dim, value_dim, .. } = self.shape;
        let (width, channels) = (self.qkvz_width(), self.shape.channels());
        let x = |row: usize, at: usize| f64::from(tokens.qkvz[row * width + at]);
        let mixed = |row, channel| self.mixed(tokens, row, channel);
        let mut out = vec![0.0; tokens.count * value_heads * value_dim];
        for head in 0..value_heads {
            let key = head * key_heads / value_heads * key_dim;
            let mut s = vec![vec![0.0; value_dim]; key_dim];
            for row in 0..tokens.count {
                let unit = |first: usize| -> Vec<f64> {
                    let own: Vec<f64> = (0..key_dim).map(|i| mixed(row, first + i)).collect();
                    let length = (own.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                    own.iter().map(|x| x / length).collect()
                };
                let (q, k) = (unit(key), unit(self.shape.key_width() + key));
                let first = 2 * self.shape.key_width() + head * value_dim;
                let v: Vec<f64> = (0..value_dim).map(|j| mixed(row, first + j)).collect();
                let of = |at: usize| f64::from(tokens.ba[row * 2 * value_heads + at]);
                let beta = sigmoid(of(head));
                let open =
                    (1.0 + (of(value_heads + head) + f64::from(self.dt_bias[head])).exp()).ln();
                let kept = (-f64::from(self.decay[head]) * open).exp();
                let before = s.clone();
                for i in 0..key_dim {
                    for j in 0..value_dim {
                        let recalled: f64 = (0..key_dim).map(|n| k[i] * k[n] * before[n][j]).sum();
                        s[i][j] = kept * (before[i][j] - beta * recalled) + beta * k[i] * v[j];
                    }
                }
                let o: Vec<f64> = (0..value_dim)
                    .map(|j| (0..key_dim).map(|i| q[i] * s[i][j]).sum::<f64>())
                    .map(|sum| sum / (key_dim as f64).sqrt())
                    .collect();
                let squares: f64 = o.iter().map(|o| o * o).sum();
                let rms = (squares / value_dim as f64 + f64::from(EPS)).sqrt();
                for (j, o) in o.iter().enumerate() {
                    let z = x(row, channels + head * value_dim + j);
                    out[(row * value_heads + head) * value_dim + j] =
                        o / rms * f64::from(self.norm[j]) * z * sigmoid(z);
                }
            }
        }
        out
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The sequences of a step.
pub(crate) fn seq_rows(parts: &[Part]) -> Vec<SeqRows> {
    let mut row = 0;
    parts
        .iter()
        .map(|part| {
            let row_start = row;
            row += part.rows as u32;
            SeqRows {
                row_start,
                num_rows: part.rows as u32,
                context_len: (part.done + part.rows) as u32,
                table_start: 0,
                table_len: 0,
            }
        })
        .collect()
}

/// Steps that compute all of the sequences, which are in `slots`: some tokens of some of them each.
pub(crate) fn steps(seqs: &[Tokens], slots: &[u32], shares: &[&[usize]]) -> Vec<Vec<Part>> {
    let mut done = vec![0; seqs.len()];
    let steps: Vec<Vec<Part>> = shares
        .iter()
        .map(|share| {
            let mut parts = Vec::new();
            for (seq, &rows) in share.iter().enumerate().filter(|(_, rows)| **rows > 0) {
                parts.push(Part { seq, done: done[seq], rows, slot: slots[seq] });
                done[seq] += rows;
            }
            parts
        })
        .collect();
    let all: Vec<usize> = seqs.iter().map(|tokens| tokens.count).collect();
    assert_eq!(done, all, "the steps compute all tokens");
    steps
}

/// Backends whose buffers are in host memory.
trait Host: Backend {
    fn values(buffer: &mut Self::Buffer) -> &mut [f32];
}

impl Host for CpuBackend {
    fn values(buffer: &mut Self::Buffer) -> &mut [f32] {
        buffer.values_mut()
    }
}

impl Host for ReferenceBackend {
    fn values(buffer: &mut Self::Buffer) -> &mut [f32] {
        buffer.values_mut()
    }
}

fn filled<B: Host>(backend: &mut B, values: &[f32], width: usize) -> B::Buffer {
    let mut buffer = backend.new_buffer(values.len() / width, width).unwrap();
    buffer.set_rows(values.len() / width).unwrap();
    B::values(&mut buffer).copy_from_slice(values);
    buffer
}

fn loaded<B: Backend>(backend: &mut B, layer: &Layer) -> DeltaWeights<B::Vector> {
    DeltaWeights {
        conv: backend.load_vector(&layer.conv).unwrap(),
        decay: backend.load_vector(&layer.decay).unwrap(),
        dt_bias: backend.load_vector(&layer.dt_bias).unwrap(),
        rule: match layer.shape.rule {
            Rule::GatedDelta => {
                RuleWeights::GatedDelta { norm: backend.load_vector(&layer.norm).unwrap() }
            }
            Rule::Mamba2 => {
                let bias = layer.conv_bias.as_ref();
                RuleWeights::Mamba2 {
                    conv_bias: bias.map(|bias| backend.load_vector(bias).unwrap()),
                    skip: backend.load_vector(&layer.skip).unwrap(),
                }
            }
        },
    }
}

fn states_of(layer: &Layer) -> StatesShape {
    StatesShape { num_layers: LAYERS, slots: SLOTS, layer: layer.shape }
}

/// Computes these steps; returns each sequence's results.
fn run<B: Host>(
    backend: &mut B,
    layer: &Layer,
    states: &mut B::States,
    seqs: &[Tokens],
    steps: &[Vec<Part>],
) -> Vec<Vec<f32>> {
    let weights = loaded(backend, layer);
    let width = layer.shape.value_width();
    let mut results = vec![Vec::new(); seqs.len()];
    for parts in steps {
        let [qkvz, ba] = layer.projected(seqs, parts);
        let qkvz = filled(backend, &qkvz, layer.qkvz_width());
        let ba = filled(backend, &ba, layer.shape.gates_width());
        let mut out = filled(backend, &vec![f32::NAN; (qkvz.rows() + 2) * width], width);
        let rows = seq_rows(parts);
        let slots: Vec<u32> = parts.iter().map(|part| part.slot).collect();
        let batch = Batch { positions: &[], slots: &[], seqs: &rows, block_tables: &[] };
        let input = DeltaInput { qkvz: &qkvz, ba: &ba, weights: &weights, eps: EPS };
        let at = DeltaAt { batch: &batch, states: &slots, layer: LAYER };
        backend.delta_attention(input, at, states, &mut out).unwrap();
        assert_eq!(out.rows(), qkvz.rows());
        let mut values = &B::values(&mut out)[..];
        for part in parts {
            let own;
            (own, values) = values.split_at(part.rows * width);
            results[part.seq].extend_from_slice(own);
        }
    }
    results
}

/// The delta rule's norm divides by what may be small.
fn tolerance(layer: &Layer, want: f64) -> f64 {
    match layer.shape.rule {
        Rule::GatedDelta => 1e-3 * want.abs() + 1e-3,
        Rule::Mamba2 => 1e-4 * want.abs() + 1e-3,
    }
}

fn check<B: Host>(backend: &mut B, layer: &Layer, seqs: &[Tokens], what: &str) -> Vec<Vec<f32>> {
    let mut states = backend.new_states(states_of(layer)).unwrap();
    let counts: Vec<usize> = seqs.iter().map(|tokens| tokens.count).collect();
    let whole = steps(seqs, &[4, 0, 6], &[&counts]);
    let got = run(backend, layer, &mut states, seqs, &whole);
    for (seq, got) in got.iter().enumerate() {
        for (i, (&got, want)) in got.iter().zip(layer.want(&seqs[seq])).enumerate() {
            assert_close(got, want, tolerance(layer, want), format!("{what}, {seq}: {i}"));
        }
    }
    // In slots that others have left; alone and together.
    let shares: [&[usize]; 5] = [&[1, 2], &[3, 0, 1], &[0, 1], &[4, 1], &[1]];
    let parted = run(backend, layer, &mut states, seqs, &steps(seqs, &[0, 5, 4], &shares));
    for (whole, parted) in got.iter().zip(&parted) {
        assert_eq!(bits(whole), bits(parted), "{what}: however steps divide it");
    }
    got
}

#[test]
fn linear_attention_is_its_recurrence_however_steps_divide_it() {
    let mut random = Random(71);
    let all = [
        [2, 4, 16, 16, 4],
        [1, 3, 8, 24, 2],
        [3, 3, 40, 72, 8],
        [1, 1, 16, 8, 3],
        [1, 2, 64, 64, 4],
        // So many that several tasks share a key head.
        [1, 9, 8, 40, 4],
    ];
    let rules = [Rule::GatedDelta, Rule::Mamba2];
    for (sizes, rule) in all.into_iter().flat_map(|sizes| rules.map(|rule| (sizes, rule))) {
        let layer = Layer::random(&mut random, rule, sizes);
        let seqs = [9, 4, 1].map(|count| layer.tokens(&mut random, count));
        let mut reference = ReferenceBackend::new(single_rank());
        check(&mut reference, &layer, &seqs, &format!("reference {rule:?} {sizes:?}"));
        for isa in isas() {
            let what = format!("{isa} {rule:?} {sizes:?}");
            let got = check(&mut backend(isa, 1), &layer, &seqs, &what);
            let again = check(&mut backend(isa, 3), &layer, &seqs, &what);
            for (got, again) in got.iter().zip(&again) {
                assert_eq!(bits(got), bits(again), "{what}: with several threads");
            }
        }
    }
}

/// Sequences go on from copies of their states as from the states themselves.
fn goes_on_from_copies<B: Host>(backend: &mut B, layer: &Layer, seqs: &[Tokens; 2], what: &str) {
    let mut states = backend.new_states(states_of(layer)).unwrap();
    let step = |slots: [u32; 2], at: usize| {
        steps(seqs, &slots, &[&[6, 2], &[3, 3]])
            .split_off(at)
            .into_iter()
            .take(1)
            .collect::<Vec<_>>()
    };
    run(backend, layer, &mut states, seqs, &step([4, 0], 0));
    // One after the other: the second sequence's state comes to 5 by way of 2.
    backend.copy_states(&mut states, &[(4, 1), (0, 2), (2, 5), (4, 2)]).unwrap();
    let want = run(backend, layer, &mut states, seqs, &step([4, 0], 1));
    let got = run(backend, layer, &mut states, seqs, &step([1, 5], 1));
    for (want, got) in want.iter().zip(&got) {
        assert!(!want.is_empty());
        assert_eq!(bits(want), bits(got), "{what}");
    }
    // That they went on changed neither copies nor what was copied from.
    backend.copy_states(&mut states, &[(2, 3)]).unwrap();
    let first = run(backend, layer, &mut states, seqs, &step([3, 6], 1));
    assert_eq!(bits(&want[0]), bits(&first[0]), "{what}");
    assert_ne!(bits(&want[1]), bits(&first[1]), "{what}: there is nothing in slot 6");
}

#[test]
fn sequences_go_on_from_copies_of_their_states() {
    let mut random = Random(75);
    for rule in [Rule::GatedDelta, Rule::Mamba2] {
        let layer = Layer::random(&mut random, rule, [2, 4, 16, 24, 4]);
        let seqs = [9, 5].map(|count| layer.tokens(&mut random, count));
        goes_on_from_copies(&mut ReferenceBackend::new(single_rank()), &layer, &seqs, "reference");
        for isa in isas() {
            goes_on_from_copies(&mut backend(isa, 3), &layer, &seqs, &isa.to_string());
        }
    }
}

/// Softplus and the decay far from zero, where `exp` would overflow.
#[test]
fn extreme_gates_keep_all_or_nothing() {
    extreme_gates(Rule::GatedDelta);
    extreme_gates(Rule::Mamba2);
}

fn extreme_gates(rule: Rule) {
    let mut random = Random(72);
    let mut layer = Layer::random(&mut random, rule, [1, 2, 8, 8, 2]);
    layer.dt_bias = vec![-60.0, 90.0];
    let seqs = [layer.tokens(&mut random, 6)];
    let steps = steps(&seqs, &[2], &[&[6]]);
    let want = layer.want(&seqs[0]);
    let close = |got: &[Vec<f32>], what: &str| {
        for (i, (&got, want)) in got[0].iter().zip(&want).enumerate() {
            assert_close(got, *want, 1e-3 * want.abs() + 1e-3, format!("{rule:?} {what} {i}"));
        }
    };
    let mut reference = ReferenceBackend::new(single_rank());
    let mut states = reference.new_states(states_of(&layer)).unwrap();
    close(&run(&mut reference, &layer, &mut states, &seqs, &steps), "reference");
    for isa in isas() {
        let mut backend = backend(isa, 1);
        let mut states = backend.new_states(states_of(&layer)).unwrap();
        close(&run(&mut backend, &layer, &mut states, &seqs, &steps), &isa.to_string());
    }
}

#[test]
fn gates_are_multiplied() {
    let mut random = Random(73);
    let (x, gate) = (random.vec(3 * 20), random.vec(3 * 20));
    let gate: Vec<f32> = gate.iter().map(|x| 30.0 * x).collect();
    let check = |got: &[f32], what: &str| {
        for (i, &got) in got.iter().enumerate() {
            let want = f64::from(x[i]) / (1.0 + (-f64::from(gate[i])).exp());
            assert_close(got, want, 1e-6 * want.abs() + 1e-30, format!("{what} {i}"));
        }
    };
    let mut reference = ReferenceBackend::new(single_rank());
    let (from, mut to) = (filled(&mut reference, &gate, 20), filled(&mut reference, &x, 20));
    reference.gate(&from, &mut to).unwrap();
    check(to.values(), "reference");
    for isa in isas() {
        let mut backend = backend(isa, 2);
        let (from, mut to) = (filled(&mut backend, &gate, 20), filled(&mut backend, &x, 20));
        backend.gate(&from, &mut to).unwrap();
        check(to.values(), &isa.to_string());
    }
}

fn message<T: std::fmt::Debug>(result: Result<T, KernelError>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn what_does_not_fit_is_refused() {
    let mut backend = ReferenceBackend::new(single_rank());
    let mut random = Random(74);
    for (sizes, said) in [
        ([0, 2, 8, 8, 4], "value_heads is 2, not a multiple of key_heads 0"),
        ([2, 3, 8, 8, 4], "value_heads is 3, not a multiple of key_heads 2"),
        ([1, 0, 8, 8, 4], "value_heads is 0, not a multiple of key_heads 1"),
        ([1, 1, 12, 8, 4], "key_dim is 12, it must be a multiple of 8, at most 256"),
        ([1, 1, 8, 264, 4], "value_dim is 264, it must be a multiple of 8, at most 256"),
        ([1, 1, 8, 8, 1], "kernel is 1, it must be in 2..=8"),
        ([1, 1, 8, 8, 9], "kernel is 9, it must be in 2..=8"),
    ] {
        let [key_heads, value_heads, key_dim, value_dim, kernel] = sizes;
        let rule = Rule::GatedDelta;
        let layer = DeltaShape { rule, key_heads, value_heads, key_dim, value_dim, kernel };
        let shape = StatesShape { num_layers: 1, slots: 1, layer };
        assert_eq!(message(backend.new_states(shape)), format!("new_states: {said}"));
    }
    let layer = Layer::random(&mut random, Rule::GatedDelta, [1, 2, 8, 8, 2]);
    let seqs = [2, 3].map(|count| layer.tokens(&mut random, count));
    let [parts] = &steps(&seqs, &[0, 1], &[&[2, 3]])[..] else { panic!("one step") };
    let mut states = backend.new_states(states_of(&layer)).unwrap();
    let weights = loaded(&mut backend, &layer);
    let [qkvz, ba] = layer.projected(&seqs, parts);
    let qkvz = filled(&mut backend, &qkvz, layer.qkvz_width());
    let ba = filled(&mut backend, &ba, 4);
    let rows = seq_rows(parts);
    for (of, slots, index, said) in [
        (&rows[..], &[0, 0][..], LAYER, "state 0 is named twice"),
        (&rows, &[0, 7], LAYER, "state 7 of 7 is named"),
        (&rows, &[0], LAYER, "2 sequences, 1 states"),
        (&rows, &[0, 1], LAYERS, "layer is 2 of 2"),
        (&rows[..1], &[0], LAYER, "the step has 5 rows, the sequences 2"),
    ] {
        let batch = Batch { positions: &[], slots: &[], seqs: of, block_tables: &[] };
        let input = DeltaInput { qkvz: &qkvz, ba: &ba, weights: &weights, eps: EPS };
        let at = DeltaAt { batch: &batch, states: slots, layer: index };
        let mut out = filled(&mut backend, &[0.0; 80], 16);
        let found = message(backend.delta_attention(input, at, &mut states, &mut out));
        assert_eq!(found, format!("delta_attention: {said}"));
    }
    for (pair, said) in [
        ((0, 7), "state 7 of 7 is named"),
        ((9, 1), "state 9 of 7 is named"),
        ((3, 3), "state 3 is to be copied to itself"),
    ] {
        let found = message(backend.copy_states(&mut states, &[(0, 1), pair]));
        assert_eq!(found, format!("copy_states: {said}"));
    }
}
