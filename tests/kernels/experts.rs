//! Mixtures of experts on CPUs, compared with a naive version in f64 and with the reference
//! backend. Law 7: a row's bits depend neither on other rows nor on the threads.
use kernels::KernelError;
use kernels::backend::prelude::*;
use kernels::backend::{Backend, Buffer, DType, ExpertActivation, HostMatrix, Routing, Scores};
use kernels::collective::single_rank;
use kernels::cpu::{CpuBackend, CpuRoutes, CpuStack, CpuVector, Isa, Precision};
use kernels::reference::ReferenceBackend;

use crate::support::{
    Random, Weight, as_taken, assert_close, backend_in, bits, buffer, expert_activated, isas,
    poisoned, variants,
};

const TOLERANCE: f64 = 1.5e-5;

/// The experts of a layer, as plain numbers.
pub(crate) struct Layer {
    pub(crate) routing: Routing,
    pub(crate) hidden: usize,
    pub(crate) inner: usize,
    pub(crate) router: Weight,
    /// Gate, up, gate, up, ..
    pub(crate) gate_up: Vec<Weight>,
    pub(crate) down: Vec<Weight>,
    /// Biases of the router, of all gates and ups, of all downs.
    pub(crate) biases: Option<[Vec<f32>; 3]>,
    pub(crate) activation: ExpertActivation,
}

/// The layer as loaded into a backend.
struct Loaded {
    router: kernels::cpu::CpuMatrix,
    gate_up: CpuStack,
    down: CpuStack,
    biases: Option<[CpuVector; 3]>,
}

impl Loaded {
    /// The bias of the router (0), of gate and up (1), or of down (2).
    fn bias(&self, which: usize) -> Option<&CpuVector> {
        self.biases.as_ref().map(|biases| &biases[which])
    }
}

fn hosts(weights: &[Weight]) -> Vec<HostMatrix<'_>> {
    weights.iter().map(Weight::host).collect()
}

fn load_stack<B: Backend>(backend: &mut B, weights: &[Weight]) -> B::Stack {
    match weights[0].is_int8 {
        true => backend.load_int8_stack(&hosts(weights)).unwrap(),
        false => backend.load_stack(&hosts(weights)).unwrap(),
    }
}

impl Layer {
    pub(crate) fn random(
        random: &mut Random,
        routing: Routing,
        hidden: usize,
        inner: usize,
    ) -> Self {
        let experts = routing.num_experts;
        let mut many = |count: usize, rows: usize, cols: usize| {
            (0..count).map(|_| Weight::random(random, rows, cols)).collect::<Vec<_>>()
        };
        let router = many(1, routing.num_logits(), hidden).remove(0);
        let (gate_up, down) = (many(2 * experts, inner, hidden), many(experts, hidden, inner));
        let activation = ExpertActivation::Silu;
        Self { routing, hidden, inner, router, gate_up, down, biases: None, activation }
    }

    /// The same with biases, and with activations that often reach their limit.
    fn clamped(self, random: &mut Random) -> Self {
        let (experts, hidden, inner) = (self.routing.num_experts, self.hidden, self.inner);
        let routed = experts - self.routing.shared;
        let biases = [routed, 2 * experts * inner, experts * hidden].map(|len| random.vec(len));
        let activation = ExpertActivation::Clamped { alpha: 1.702, limit: 0.75 };
        Self { biases: Some(biases), activation, ..self }
    }

    /// The bias of matrix `index` within `biases[which]`.
    fn bias(&self, which: usize, index: usize, width: usize) -> Option<&[f32]> {
        self.biases.as_ref().map(|biases| &biases[which][index * width..][..width])
    }

    /// The same with experts in int8.
    pub(crate) fn quantised(self) -> Self {
        let all = |weights: Vec<Weight>| weights.iter().map(Weight::quantised).collect();
        Self { gate_up: all(self.gate_up), down: all(self.down), ..self }
    }

    fn load(&self, backend: &mut CpuBackend) -> Loaded {
        Loaded {
            router: self.router.load(backend),
            gate_up: load_stack(backend, &self.gate_up),
            down: load_stack(backend, &self.down),
            biases: self
                .biases
                .as_ref()
                .map(|all| all.each_ref().map(|bias| backend.load_vector(bias).unwrap())),
        }
    }

    /// Runs the layer; returns choices, inner activations and result.
    fn run(
        &self,
        backend: &mut CpuBackend,
        loaded: &Loaded,
        x: &[f32],
    ) -> (CpuRoutes, Vec<f32>, Vec<f32>) {
        let rows = x.len() / self.hidden;
        let input = buffer(backend, x, self.hidden);
        let mut routes = backend.new_routes(rows + 2, self.routing).unwrap();
        backend.route(&input, &loaded.router, loaded.bias(0), &mut routes).unwrap();
        let mut inner = poisoned(backend, rows * self.routing.top_k + 1, self.inner);
        let (bias, activation) = (loaded.bias(1), self.activation);
        backend
            .experts_gate_up(&input, &loaded.gate_up, bias, activation, &routes, &mut inner)
            .unwrap();
        assert_eq!(inner.rows(), rows * self.routing.top_k);
        let mut out = poisoned(backend, rows + 1, self.hidden);
        backend.experts_down(&inner, 0, &loaded.down, loaded.bias(2), &routes, &mut out).unwrap();
        assert_eq!(out.rows(), rows);
        (routes, inner.values().to_vec(), out.values().to_vec())
    }

    /// The experts of one row and their weights, in f64.
    pub(crate) fn choose(&self, x: &[f32]) -> Vec<(usize, f64)> {
        let Routing { num_experts, top_k, normalise, scores, scale, shared, gated, .. } =
            self.routing;
        let routed = num_experts - shared;
        let logits: Vec<f64> = self.router.product(x, None).into_iter().map(|(x, _)| x).collect();
        let bias = |i: usize| self.bias(0, 0, routed).map_or(0.0, |bias| f64::from(bias[i]));
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        // Before any division, and what the choice goes by.
        let (score, key): (Vec<f64>, Vec<f64>) = (0..routed)
            .map(|i| match scores {
                Scores::Softmax => ((logits[i] + bias(i)).exp(), logits[i] + bias(i)),
                Scores::Sigmoid => (sigmoid(logits[i]), sigmoid(logits[i]) + bias(i)),
            })
            .unzip();
        let Routing { groups, kept_groups, .. } = self.routing;
        let size = routed / groups;
        let mut best: Vec<(f64, usize)> = (0..groups)
            .map(|group| {
                let mut own = key[group * size..(group + 1) * size].to_vec();
                own.sort_by(|a, b| b.total_cmp(a));
                let counted = if scores == Scores::Sigmoid { 2 } else { 1 };
                (own.iter().take(counted).sum(), group)
            })
            .collect();
        best.sort_by(|a, b| b.0.total_cmp(&a.0));
        best.truncate(kept_groups);
        let is_kept = |expert: &usize| best.iter().any(|(_, group)| *group == expert / size);
        let mut order: Vec<usize> = (0..routed).filter(is_kept).collect();
        order.sort_by(|a, b| key[*b].total_cmp(&key[*a]));
        order.truncate(top_k - shared);
        let all = match (normalise, scores) {
            (true, _) => order.iter().map(|expert| score[*expert]).sum(),
            (false, Scores::Softmax) => score.iter().sum(),
            (false, Scores::Sigmoid) => 1.0,
        };
        let gate = if gated { sigmoid(logits[routed]) } else { 1.0 };
        let chosen =
            order.into_iter().map(|expert| (expert, score[expert] / all * f64::from(scale)));
        chosen.chain((routed..num_experts).map(|expert| (expert, gate))).collect()
    }

    /// The inner activations of a row at an expert, with the sums of absolute terms.
    pub(crate) fn inner_of(&self, x: &[f32], expert: usize) -> Vec<(f64, f64)> {
        let [gate, up] = [2 * expert, 2 * expert + 1]
            .map(|index| self.gate_up[index].product(x, self.bias(1, index, self.inner)));
        let both = gate.into_iter().zip(up);
        both.map(|((gate, gate_size), (up, up_size))| {
            let size = gate_size * (2.0 + up.abs()) + up_size * (1.0 + gate.abs());
            (expert_activated(self.activation, gate, up), size)
        })
        .collect()
    }
}

const fn routing(num_experts: usize, top_k: usize, normalise: bool) -> Routing {
    Routing::softmax(num_experts, top_k, normalise)
}

/// Shared experts with a gate, as in Qwen2-MoE.
const GATED: Routing = Routing { shared: 4, gated: true, ..routing(10, 6, false) };
/// Sigmoids and a shared expert, as in GLM-4.5.
const SIGMOID: Routing =
    Routing { shared: 1, scores: Scores::Sigmoid, scale: 2.5, ..routing(17, 5, true) };

/// Sigmoids in groups and a shared expert, as in DeepSeek V3.
const GROUPED: Routing = Routing { groups: 4, kept_groups: 2, ..SIGMOID };

#[test]
fn experts_match_the_naive_version() {
    let mut random = Random(61);
    for (isa, precision) in variants() {
        for (routing, hidden, inner, is_int8) in [
            (routing(1, 1, true), 5, 3, false),
            (routing(4, 2, true), 33, 64, false),
            (routing(4, 2, true), 34, 64, true),
            (routing(9, 3, false), 40, 20, true),
            (routing(70, 8, true), 66, 130, false),
            (routing(20, 8, true), 66, 130, true),
            (GATED, 33, 20, false),
            (SIGMOID, 34, 24, false),
            (Routing { normalise: false, ..SIGMOID }, 34, 24, true),
            (GROUPED, 34, 24, false),
            (
                Routing { groups: 4, kept_groups: 2, scale: 16.0, ..routing(20, 5, false) },
                33,
                8,
                false,
            ),
        ] {
            let layer = Layer::random(&mut random, routing, hidden, inner);
            let layer = if is_int8 { layer.quantised() } else { layer };
            let layer = if routing.normalise { layer.clamped(&mut random) } else { layer };
            let mut backend = backend_in(isa, precision, 2);
            let loaded = layer.load(&mut backend);
            for rows in [1, 2, 7, 40] {
                let x: Vec<f32> = random.vec(rows * hidden);
                let (routes, inner, out) = layer.run(&mut backend, &loaded, &x);
                let (experts, weights) = backend.read_routes(&routes).unwrap();
                for (row, x) in x.chunks(hidden).enumerate() {
                    let at = format!("{isa} {precision} {routing:?} row {row} of {rows}");
                    // The router computes in f32, whatever the precision of the products.
                    let chosen = layer.choose(x);
                    let taken = as_taken(precision, x);
                    let mut want = vec![(0.0, 0.0); hidden];
                    for (j, (expert, weight)) in chosen.into_iter().enumerate() {
                        let slot = row * routing.top_k + j;
                        assert_eq!(experts[slot] as usize, expert, "{at}");
                        assert_close(weights[slot], weight, 1e-4, &at);
                        let own = &inner[slot * layer.inner..][..layer.inner];
                        for (got, (want, size)) in own.iter().zip(layer.inner_of(&taken, expert)) {
                            assert_close(*got, want, TOLERANCE * size + 1e-6, &at);
                        }
                        let down = layer.down[expert]
                            .product(&as_taken(precision, own), layer.bias(2, expert, hidden));
                        for (want, (made, size)) in want.iter_mut().zip(down) {
                            want.0 += f64::from(weights[slot]) * made;
                            want.1 += f64::from(weights[slot]) * size;
                        }
                    }
                    let out = &out[row * hidden..][..hidden];
                    for (got, (want, size)) in out.iter().zip(want) {
                        assert_close(*got, want, TOLERANCE * size + 1e-6, &at);
                    }
                }
            }
        }
    }
}

#[test]
fn the_reference_makes_the_same() {
    let mut random = Random(62);
    let plain = [routing(6, 2, true), routing(11, 4, false)];
    let routings = plain.into_iter().chain([GATED, SIGMOID, GROUPED]);
    for (routing, is_int8) in routings.flat_map(|it| [(it, false), (it, true)]) {
        let layer = Layer::random(&mut random, routing, 24, 20);
        let layer = if is_int8 { layer.quantised() } else { layer };
        let layer = if routing.normalise { layer.clamped(&mut random) } else { layer };
        let mut cpu = backend_in(Isa::Portable, Precision::Float32, 1);
        let loaded = layer.load(&mut cpu);
        let x = random.vec(9 * 24);
        let (routes, inner, out) = layer.run(&mut cpu, &loaded, &x);
        let (experts, weights) = cpu.read_routes(&routes).unwrap();

        let mut reference = ReferenceBackend::new(single_rank());
        let router = reference.load_matrix(&[layer.router.host()]).unwrap();
        let gate_up = load_stack(&mut reference, &layer.gate_up);
        let down = load_stack(&mut reference, &layer.down);
        let bias = |which: usize| layer.biases.as_ref().map(|biases| &biases[which]);
        let mut input = reference.new_buffer(9, 24).unwrap();
        input.values_mut().copy_from_slice(&x);
        let mut found = reference.new_routes(9, routing).unwrap();
        reference.route(&input, &router, bias(0), &mut found).unwrap();
        let (same, close) = reference.read_routes(&found).unwrap();
        assert_eq!(experts, same);
        let mut middle = reference.new_buffer(9 * routing.top_k, 20).unwrap();
        reference
            .experts_gate_up(&input, &gate_up, bias(1), layer.activation, &found, &mut middle)
            .unwrap();
        let mut sum = reference.new_buffer(9, 24).unwrap();
        reference.experts_down(&middle, 0, &down, bias(2), &found, &mut sum).unwrap();
        for (a, b) in [(&weights, &close), (&inner, &middle.values().to_vec())]
            .into_iter()
            .chain([(&out, &sum.values().to_vec())])
            .flat_map(|(a, b)| a.iter().zip(b))
        {
            assert_close(*a, f64::from(*b), 2e-4, "reference");
        }
    }
}

/// The ranks of a replica choose independently, on hosts that may differ. A rank that chose another
/// expert would contribute to a wrong sum, and no rank would notice.
#[test]
fn choices_have_the_same_bits_with_every_instruction_set() {
    let mut random = Random(67);
    for (routing, hidden, rows) in [
        (routing(128, 8, true), 129, 10_000),
        (routing(128, 8, false), 1024, 100),
        (GATED, 129, 1000),
        (SIGMOID, 129, 1000),
    ] {
        let router = Weight::random(&mut random, routing.num_logits(), hidden);
        let x = random.vec(rows * hidden);
        let mut first: Option<(Vec<u32>, Vec<u32>)> = None;
        for (isa, precision) in variants() {
            let mut backend = backend_in(isa, precision, 2);
            let router = router.load(&mut backend);
            let x = buffer(&mut backend, &x, hidden);
            let mut routes = backend.new_routes(rows, routing).unwrap();
            backend.route(&x, &router, None, &mut routes).unwrap();
            let (experts, weights) = backend.read_routes(&routes).unwrap();
            let found = (experts, bits(&weights));
            let same = *first.get_or_insert_with(|| found.clone()) == found;
            assert!(same, "{isa} {precision}: others than with the first");
        }
    }
}

#[test]
fn a_rows_bits_depend_on_no_other_row_and_not_on_threads() {
    let mut random = Random(63);
    // More rows than are computed at a time: 8192 / 30 = 273.
    let many = Layer::random(&mut random, routing(40, 30, false), 34, 9);
    let wide = Layer::random(&mut random, routing(7, 3, true), 1100, 70).clamped(&mut random);
    for (isa, precision) in variants() {
        for (layer, rows) in [(&many, 300), (&wide, 90)] {
            let x = random.vec(rows * layer.hidden);
            let mut first: Option<Vec<u32>> = None;
            for (threads, at_a_time) in [(1, rows), (2, 1), (3, rows), (2, 7), (1, 64)] {
                let mut backend = backend_in(isa, precision, threads);
                let loaded = layer.load(&mut backend);
                let all: Vec<u32> = x
                    .chunks(at_a_time * layer.hidden)
                    .flat_map(|x| bits(&layer.run(&mut backend, &loaded, x).2))
                    .collect();
                let same = *first.get_or_insert_with(|| all.clone()) == all;
                assert!(same, "{isa} {precision} {threads} threads, {at_a_time} rows");
            }
        }
    }
}

#[test]
fn parts_of_the_columns_add_up() {
    let mut random = Random(64);
    let layer = Layer::random(&mut random, routing(5, 2, true), 32, 24);
    for isa in isas() {
        let mut backend = backend_in(isa, Precision::Float32, 2);
        let loaded = layer.load(&mut backend);
        let x = random.vec(6 * 32);
        let (routes, inner, whole) = layer.run(&mut backend, &loaded, &x);
        let inner = buffer(&mut backend, &inner, 24);
        let mut sum = vec![0.0; whole.len()];
        for first in [0, 12] {
            let mut parts = hosts(&layer.down);
            parts.iter_mut().for_each(|part| (part.cols, part.col_start) = (12, first));
            let down = backend.load_stack(&parts).unwrap();
            let mut out = poisoned(&mut backend, 6, 32);
            backend.experts_down(&inner, first, &down, None, &routes, &mut out).unwrap();
            sum.iter_mut().zip(out.values()).for_each(|(sum, part)| *sum += part);
        }
        for (a, b) in sum.iter().zip(&whole) {
            assert_close(*a, f64::from(*b), 1e-4, isa);
        }
    }
}

#[test]
fn experts_that_do_not_fit_are_errors() {
    let mut backend = backend_in(Isa::Portable, Precision::Float32, 1);
    for bad in [routing(4, 0, true), routing(4, 5, true), routing(1025, 1, true)] {
        let error = backend.new_routes(1, bad).err().unwrap().to_string();
        assert!(error.contains("experts cannot be chosen"), "{error}");
    }
    let layer = Layer::random(&mut Random(65), routing(3, 2, true), 8, 6);
    let loaded = layer.load(&mut backend);
    let x = buffer(&mut backend, &[0.5; 16], 8);
    let mut routes = backend.new_routes(1, layer.routing).unwrap();
    let refused = |result: Result<(), KernelError>| {
        assert!(matches!(result, Err(KernelError::Shape { .. })), "{result:?}");
    };
    refused(backend.route(&x, &loaded.router, None, &mut routes));
    let mut routes = backend.new_routes(2, layer.routing).unwrap();
    let mut inner = backend.new_buffer(4, 6).unwrap();
    let short = backend.load_vector(&[0.0; 2]).unwrap();
    refused(backend.route(&x, &loaded.router, Some(&short), &mut routes));
    // No row has been routed yet.
    refused(backend.experts_gate_up(
        &x,
        &loaded.gate_up,
        None,
        ExpertActivation::Silu,
        &routes,
        &mut inner,
    ));
    backend.route(&x, &loaded.router, None, &mut routes).unwrap();
    refused(backend.experts_gate_up(
        &x,
        &loaded.down,
        None,
        ExpertActivation::Silu,
        &routes,
        &mut inner,
    ));
    backend
        .experts_gate_up(&x, &loaded.gate_up, None, ExpertActivation::Silu, &routes, &mut inner)
        .unwrap();
    let mut out = backend.new_buffer(2, 8).unwrap();
    refused(backend.experts_down(&inner, 1, &loaded.down, None, &routes, &mut out));
    refused(backend.experts_down(&inner, 0, &loaded.gate_up, None, &routes, &mut out));
    let mut narrow = backend.new_buffer(2, 7).unwrap();
    refused(backend.experts_down(&inner, 0, &loaded.down, None, &routes, &mut narrow));
    backend.experts_down(&inner, 0, &loaded.down, None, &routes, &mut out).unwrap();
    refused(backend.experts_down(&inner, 0, &loaded.down, Some(&short), &routes, &mut out));
    let silu = ExpertActivation::Silu;
    let gate_up = &loaded.gate_up;
    refused(backend.experts_gate_up(&x, gate_up, Some(&short), silu, &routes, &mut inner));
    let other = Weight::random(&mut Random(66), 5, 8);
    let two = [layer.gate_up[0].host(), other.host()];
    assert!(matches!(backend.load_stack(&two), Err(KernelError::Shape { .. })));
    assert!(matches!(backend.load_stack(&[]), Err(KernelError::Shape { .. })));
    assert_eq!(two[0].dtype, DType::Bf16);
}
