//! Linear attention whose sequences change their rows and slots from one step to the next, on a
//! stand-in for a GPU: launched kernel by kernel, captured and replayed.
use kernels::backend::prelude::*;
use kernels::backend::{
    AttentionShape, Batch, DeltaAt, DeltaInput, DeltaShape, DeltaWeights, Rule, RuleWeights,
    SeqRows, StatesShape, StepInputs,
};
use kernels::collective::single_rank;
use kernels::cuda::CudaBackend;
use kernels::sampling::{SampleParams, SampleRow};
use kernels::{Backend, KernelError, ReferenceBackend};

use crate::rig::fake_cuda_backend;

const SHAPE: DeltaShape = DeltaShape {
    rule: Rule::GatedDelta,
    key_heads: 1,
    value_heads: 2,
    key_dim: 16,
    value_dim: 16,
    kernel: 4,
};
const WIDTH: usize = SHAPE.channels() + SHAPE.value_width();
const STATES: StatesShape = StatesShape { num_layers: 2, slots: 6, layer: SHAPE };
const EPS: f32 = 1e-4;

/// Exact in bf16, in -2..2.
fn numbers(seed: usize, len: usize) -> Vec<f32> {
    let mut state = 77 + seed as u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((state >> 24) as f32 - 128.0) / 64.0
    };
    (0..len).map(|_| next()).collect()
}

fn weights<B: Backend>(backend: &mut B) -> DeltaWeights<B::Vector> {
    let mut vector = |values: &[f32]| backend.load_vector(values).unwrap();
    DeltaWeights {
        conv: vector(&numbers(1, SHAPE.channels() * SHAPE.kernel)),
        decay: vector(&[0.5, 0.1]),
        dt_bias: vector(&[-1.0, 1.0]),
        rule: RuleWeights::GatedDelta { norm: vector(&numbers(2, SHAPE.value_dim)) },
    }
}

/// A decode step: tokens of each sequence after it, and its slot.
struct Step {
    seqs: Vec<SeqRows>,
    slots: Vec<u32>,
    qkvz: Vec<f32>,
    ba: Vec<f32>,
}

impl Step {
    /// `all`: sequences' tokens and slots.
    fn new(seed: usize, all: &[(u32, u32)]) -> Self {
        let seq = |(row_start, (context_len, _)): (u32, &(u32, u32))| SeqRows {
            row_start,
            num_rows: 1,
            context_len: *context_len,
            table_start: row_start,
            table_len: 1,
        };
        Self {
            seqs: (0..).zip(all).map(seq).collect(),
            slots: all.iter().map(|(_, slot)| *slot).collect(),
            qkvz: numbers(10 + seed, all.len() * WIDTH),
            ba: numbers(50 + seed, all.len() * 2 * SHAPE.value_heads),
        }
    }

    fn rows(&self) -> usize {
        self.seqs.len()
    }
}

/// A device with a layer, and buffers for every step.
struct Device<B: Backend> {
    backend: B,
    weights: DeltaWeights<B::Vector>,
    states: B::States,
    qkvz: B::Buffer,
    ba: B::Buffer,
    out: B::Buffer,
}

impl<B: Backend> Device<B> {
    fn new(mut backend: B) -> Self {
        let most = 4;
        Self {
            weights: weights(&mut backend),
            states: backend.new_states(STATES).unwrap(),
            qkvz: backend.new_buffer(most, WIDTH).unwrap(),
            ba: backend.new_buffer(most, 2 * SHAPE.value_heads).unwrap(),
            out: backend.new_input_buffer(most, SHAPE.value_width()).unwrap(),
            backend,
        }
    }

    /// Both layers.
    fn attend(&mut self, batch: &Batch<'_>, slots: &[u32]) -> Result<(), KernelError> {
        let Self { backend, weights, states, qkvz, ba, out } = self;
        for layer in 0..STATES.num_layers {
            let input = DeltaInput { qkvz: &*qkvz, ba: &*ba, weights: &*weights, eps: EPS };
            let at = DeltaAt { batch, states: slots, layer };
            backend.delta_attention(input, at, states, out)?;
        }
        Ok(())
    }
}

impl Device<ReferenceBackend> {
    fn run(&mut self, step: &Step) -> Vec<f32> {
        for (buffer, values) in [(&mut self.qkvz, &step.qkvz), (&mut self.ba, &step.ba)] {
            buffer.set_rows(step.rows()).unwrap();
            buffer.values_mut().copy_from_slice(values);
        }
        let positions = vec![0; step.rows()];
        let batch =
            Batch { positions: &positions, slots: &positions, seqs: &step.seqs, block_tables: &[] };
        self.attend(&batch, &step.slots).unwrap();
        self.out.values().to_vec()
    }
}

impl Device<CudaBackend> {
    /// Begins with `begun` slots, and attends with `slots`.
    fn run(&mut self, step: &Step, begun: &[u32], slots: &[u32]) -> Result<Vec<f32>, KernelError> {
        self.backend.write_buffer(&mut self.qkvz, &step.qkvz)?;
        self.backend.write_buffer(&mut self.ba, &step.ba)?;
        let all: Vec<u32> = (0..step.rows() as u32).collect();
        let positions = vec![0; step.rows()];
        let batch = Batch {
            positions: &positions,
            slots: &positions,
            seqs: &step.seqs,
            block_tables: &all,
        };
        let attention = AttentionShape {
            num_heads: 1,
            num_kv_heads: 1,
            head_dim: 16,
            norm_eps: 1e-6,
            sliding_window: None,
            softcap: None,
            latent: None,
        };
        let params = SampleParams::default();
        let sampled = SampleRow { params: &params, prompt: &[], output: &[], allowed: None };
        let sampling = vec![sampled; step.rows()];
        self.backend.begin_step(&StepInputs {
            ids: &all,
            batch,
            attention: &attention,
            windows: &[None],
            sample_rows: &all,
            sampling: &sampling,
            feed: &[],
            states: begun,
            adapters: &[],
            masked: false,
            is_plain: true,
        })?;
        self.attend(&batch, slots)?;
        self.backend.end_step()?;
        self.backend.read_buffer(&self.out)
    }
}

#[test]
fn graphs_find_the_states_of_each_step() {
    let mut reference = Device::new(ReferenceBackend::new(single_rank()));
    let mut cuda = Device::new(fake_cuda_backend(true, single_rank()));
    // The second step of a kind is captured. Four sequences, then three that have a graph for four:
    // two that go on elsewhere among the rows, and one that begins in the slot of another.
    let four = |done: u32| [(done, 5), (done, 0), (done, 3), (done, 1)];
    let mut steps: Vec<Step> = (1..=3).map(|done| Step::new(done as usize, &four(done))).collect();
    steps.push(Step::new(4, &[(4, 3), (1, 0), (4, 5)]));
    steps.push(Step::new(5, &[(5, 5), (2, 0), (5, 3), (1, 2)]));
    for (index, step) in steps.iter().enumerate() {
        let want = reference.run(step);
        let got = cuda.run(step, &step.slots, &step.slots).unwrap();
        assert_eq!(got.len(), want.len());
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            let error = (got - want).abs();
            assert!(error <= want.abs() / 128.0 + 1e-3, "step {index}, {i}: {got}, not {want}");
        }
    }
    assert_eq!(cuda.backend.given_up(), None);
    assert!(cuda.backend.num_graphs() > 0);
}

/// One that failed while it was captured, too: its stream would swallow the copies.
#[test]
fn states_are_copied_behind_a_step_that_failed() {
    // The step that fails is called, captured or replayed, depending on how many came before.
    for done in 1..5 {
        let mut reference = Device::new(ReferenceBackend::new(single_rank()));
        let mut cuda = Device::new(fake_cuda_backend(true, single_rank()));
        for step in 1..=done {
            let step = Step::new(step as usize, &[(step, 5), (step, 0)]);
            reference.run(&step);
            cuda.run(&step, &step.slots, &step.slots).unwrap();
        }
        let next = Step::new(9, &[(done + 1, 5), (done + 1, 0)]);
        cuda.run(&next, &next.slots, &[0, 5]).unwrap_err();
        let copies = [(5, 3), (0, 1)];
        reference.backend.copy_states(&mut reference.states, &copies).unwrap();
        cuda.backend.copy_states(&mut cuda.states, &copies).unwrap();
        for slots in [[3, 0], [5, 1]] {
            let next = Step::new(9, &slots.map(|slot| (done + 1, slot)));
            let want = reference.run(&next);
            let got = cuda.run(&next, &next.slots, &next.slots).unwrap();
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                let close = (got - want).abs() <= want.abs() / 128.0 + 1e-3;
                assert!(close, "{done}, {slots:?}, {i}: {got}, not {want}");
            }
        }
    }
}

#[test]
fn a_step_attends_with_the_states_that_it_began_with() {
    let mut cuda = Device::new(fake_cuda_backend(false, single_rank()));
    let step = Step::new(1, &[(1, 2), (1, 4)]);
    for (begun, slots, said) in [
        (&[2, 4][..], &[4, 2][..], "batch and states are not those the step began with"),
        (&[], &[2, 4], "batch and states are not those the step began with"),
        (&[2], &[2, 4], "1 states of 2 sequences"),
    ] {
        let error = cuda.run(&step, begun, slots).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
    cuda.run(&step, &step.slots, &step.slots).unwrap();
}
