//! How fast: memory bandwidth, then decode and prefill of models of random weights in the shapes of
//! known ones. A decode step reads all weights but the embedding (and but for experts that no row
//! chose), and the KV cache of its sequences: what that is of the measured read bandwidth is the
//! figure that counts.
use std::collections::VecDeque;
use std::ops::Range;
use std::time::Instant;

use kernels::KernelError;
use kernels::backend::{
    Activation, AttentionShape, Backend, DType, ExpertActivation, HostMatrix, QkvWeights,
    RopeTable, Routing,
};
use kernels::cuda::CudaBackend;
use kernels::cuda::measure::{COLD, Multiplier};
use shared::ids::{BlockId, Epoch, SeqId, StepId};
use shared::protocol::{
    Drafts, EngineConfig, NewSequence, Quantization, SequenceOutput, SequenceStep, StepPlan,
    TokenMask,
};
use shared::sampling::SamplingParams;
use worker::engine::Engine;
use worker::model::ModelError;
use worker::model::config::ModelConfig;
use worker::model::decoder::Decoder;
use worker::model::experts::ExpertsConfig;
use worker::model::rope::{RopeConfig, RopeScaling};
use worker::model::shard::Shard;
use worker::model::size;
use worker::model::weights::{BackendWeights, LayerWeights, Mlp, Weights};
use worker::rank::StepSource;

use crate::{Options, Step, Table, mixed, values};

pub(crate) const BLOCK_SIZE: u32 = 16;
/// Of the cache as shared memory, in per cent: three blocks of decode attention, which ask for the most.
const CARVEOUT: u8 = 58;

struct Shape {
    name: &'static str,
    hidden: usize,
    /// Of the MLP, or of an expert.
    inner: usize,
    experts: Option<Routing>,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    vocab: usize,
    tied: bool,
    quantization: Quantization,
}

/// As Llama 3.1 8B.
const DENSE: Shape = Shape {
    name: "8B",
    hidden: 4096,
    inner: 14_336,
    experts: None,
    layers: 32,
    heads: 32,
    kv_heads: 8,
    head_dim: 128,
    vocab: 128_256,
    tied: false,
    quantization: Quantization::None,
};
/// As Llama 3.2 1B, a third of Qwen3 30B-A3B's layers, and Llama 3.1 8B.
static SHAPES: [Shape; 4] = [
    Shape {
        name: "1B",
        hidden: 2048,
        inner: 8192,
        experts: None,
        layers: 16,
        heads: 32,
        kv_heads: 8,
        head_dim: 64,
        vocab: 128_256,
        tied: true,
        quantization: Quantization::None,
    },
    Shape {
        name: "30B-A3B, 16 layers",
        hidden: 2048,
        inner: 768,
        experts: Some(Routing { num_experts: 128, top_k: 8, normalise: true }),
        layers: 16,
        heads: 32,
        kv_heads: 4,
        head_dim: 128,
        vocab: 151_936,
        tied: false,
        quantization: Quantization::None,
    },
    Shape { name: "8B, int8", quantization: Quantization::Int8, ..DENSE },
    DENSE,
];
static TINY: [Shape; 3] = [
    Shape {
        name: "tiny experts",
        inner: 24,
        experts: Some(Routing { num_experts: 4, top_k: 2, normalise: true }),
        ..TINY_DENSE
    },
    Shape { name: "tiny, int8", quantization: Quantization::Int8, ..TINY_DENSE },
    TINY_DENSE,
];
const TINY_DENSE: Shape = Shape {
    name: "tiny",
    hidden: 64,
    inner: 96,
    experts: None,
    layers: 2,
    heads: 4,
    kv_heads: 2,
    head_dim: 16,
    vocab: 300,
    tied: false,
    quantization: Quantization::None,
};

/// What a case measures.
pub(crate) struct Sizes {
    batches: &'static [u32],
    /// Tokens of a prompt before decode, and of the prefill case.
    pub(crate) context: u32,
    pub(crate) prefill: u32,
    /// Tokens of a long sequence among short ones, and of a prompt among decoded ones.
    pub(crate) long: u32,
    pub(crate) prompt: u32,
    pub(crate) steps: u32,
}

impl Sizes {
    /// The most sequences of a step.
    pub(crate) fn rows(&self) -> u32 {
        self.batches.iter().copied().max().unwrap_or(1)
    }

    /// Blocks of one decoded sequence.
    fn decoded(&self) -> u32 {
        (self.context + self.steps + 2).div_ceil(BLOCK_SIZE)
    }

    /// Blocks of all sequences of any case: not of as many of the longest, which is more than a GPU
    /// holds.
    fn blocks(&self) -> u32 {
        let alike = (self.decoded() * self.rows()).max(self.prefill.div_ceil(BLOCK_SIZE));
        alike.max(mixed::blocks(self))
    }
}

impl Shape {
    fn config(&self) -> ModelConfig {
        let rope = RopeConfig { dim: self.head_dim, theta: 5e5, scaling: RopeScaling::None };
        ModelConfig {
            hidden_size: self.hidden,
            intermediate_size: if self.experts.is_some() { 0 } else { self.inner },
            experts: self.experts.map(|routing| ExpertsConfig {
                routing,
                intermediate_size: self.inner,
                layers: vec![true; self.layers],
                activation: ExpertActivation::Silu,
                is_interleaved: false,
            }),
            sinks: false,
            num_layers: self.layers,
            num_heads: self.heads,
            num_kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            vocab_size: self.vocab,
            max_positions: 8192,
            norm_eps: 1e-5,
            ropes: vec![rope; self.layers],
            sliding_windows: vec![None; self.layers],
            tied: self.tied,
            qkv_bias: false,
            output_bias: false,
            mlp_bias: false,
            is_fused: false,
            qk_norm: false,
            query_scale: 1.0,
            embedding_scale: 1.0,
            norm_offset: 0.0,
            delta_norms: false,
            activation: Activation::Silu,
            quantised: None,
            is_bf16: true,
        }
    }

    /// Bytes of weights that a step of so many rows is likely to read: of experts those that some row
    /// goes to, if they all choose at random.
    fn read_bytes(&self, all: u64, rows: u32) -> u64 {
        let Some(routing) = self.experts else { return all };
        let experts = routing.num_experts as f64;
        let missed = (1.0 - routing.top_k as f64 / experts).powf(f64::from(rows));
        let one = 2 * 3 * self.hidden * self.inner * self.layers;
        all - (experts * missed * one as f64) as u64
    }

    /// All matrices from one run of random bytes.
    fn weights(
        &self,
        backend: &mut CudaBackend,
        positions: usize,
    ) -> Result<BackendWeights<CudaBackend>, ModelError> {
        let config = self.config();
        let widths = [self.vocab, 2 * self.inner, (self.heads + 2 * self.kv_heads) * self.head_dim];
        let count = widths.into_iter().max().unwrap_or(1) * self.hidden;
        let mut state = 1u64;
        // Sign and mantissa at random, exponents of about 1/32: sums stay small.
        let mut data = vec![0u8; count * 2];
        for element in data.chunks_exact_mut(2) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let bits = (state >> 48) as u16;
            element.copy_from_slice(&(0x3c80 ^ (bits & 0x80ff)).to_le_bytes());
        }
        let part = |rows: usize, cols: usize| HostMatrix {
            data: &data,
            dtype: DType::Bf16,
            rows,
            cols,
            col_start: 0,
            row_stride: cols,
            scales: None,
        };
        let quantization = self.quantization;
        let matrix = |backend: &mut CudaBackend, rows: usize, cols: usize| match quantization {
            Quantization::None => backend.load_matrix(&[part(rows, cols)]),
            Quantization::Int8 => backend.load_int8_matrix(&[part(rows, cols)]),
        };
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let embedding = backend.load_matrix(&[part(self.vocab, self.hidden)])?;
        let lm_head = (!self.tied).then(|| matrix(backend, self.vocab, self.hidden)).transpose()?;
        let mut products = Vec::new();
        for _ in 0..self.layers {
            let qkv = matrix(backend, q + 2 * kv, self.hidden)?;
            products.push((qkv, matrix(backend, self.hidden, q)?));
        }
        let ones = vec![1.0; self.hidden];
        let mut layers = Vec::new();
        for (qkv, output) in products {
            let mlp = match self.experts {
                None => Mlp::Dense {
                    gate_up: matrix(backend, 2 * self.inner, self.hidden)?,
                    gate_up_bias: None,
                    down: vec![matrix(backend, self.hidden, self.inner)?],
                    down_bias: None,
                },
                Some(Routing { num_experts, .. }) => {
                    let gate_up = vec![part(self.inner, self.hidden); 2 * num_experts];
                    let down = vec![part(self.hidden, self.inner); num_experts];
                    Mlp::Experts {
                        router: backend.load_matrix(&[part(num_experts, self.hidden)])?,
                        router_bias: None,
                        gate_up: backend.load_stack(&gate_up)?,
                        gate_up_bias: None,
                        down: vec![backend.load_stack(&down)?],
                        down_bias: None,
                    }
                }
            };
            layers.push(LayerWeights {
                rope: 0,
                input_norm: backend.load_vector(&ones)?,
                qkv: QkvWeights { weight: qkv, bias: None, q_norm: None, k_norm: None },
                sinks: None,
                output: vec![output],
                output_bias: None,
                output_norm: None,
                post_norm: backend.load_vector(&ones)?,
                mlp,
                down_norm: None,
            });
        }
        let (cos, sin) = config.ropes[0].tables(config.head_dim, positions);
        let shard = Shard::new(&config, 0, 1)?;
        Ok(Weights {
            embedding,
            embedding_scale: 1.0,
            lm_head,
            layers,
            final_norm: backend.load_vector(&ones)?,
            ropes: vec![RopeTable {
                cos: backend.load_vector(&cos)?,
                sin: backend.load_vector(&sin)?,
            }],
            bytes: size::weight_bytes(&config, &shard, quantization, &|_, _| false),
        })
    }

    fn engine(
        &self,
        mut backend: CudaBackend,
        sizes: &Sizes,
    ) -> Result<Engine<CudaBackend>, ModelError> {
        let batch = sizes.rows();
        let longest = sizes.prefill.max(sizes.context.max(sizes.long) + sizes.steps + 2);
        let config = EngineConfig {
            block_size: BLOCK_SIZE,
            max_model_len: longest,
            max_num_seqs: batch,
            max_num_batched_tokens: sizes.prefill.max(batch),
            kv_cache_bytes: 0,
            swap_bytes: 0,
        };
        let weights = self.weights(&mut backend, longest as usize)?;
        let model = self.config();
        let shard = Shard::new(&model, 0, 1)?;
        let (tokens, rows) = (config.max_num_batched_tokens as usize, batch as usize);
        let decoder = Decoder::new(&mut backend, model, shard, weights, tokens, rows)?;
        let mut engine = Engine::new(backend, decoder, config);
        engine.profile()?;
        engine.backend().settle()?;
        engine.start(sizes.blocks())?;
        Ok(engine)
    }
}

/// Plans that wait.
pub(crate) struct Plans(pub(crate) VecDeque<StepPlan>);

impl StepSource for Plans {
    fn peek(&mut self) -> Option<&StepPlan> {
        self.0.front()
    }

    fn masks(&mut self, _: StepId) -> Result<Vec<Option<TokenMask>>, String> {
        Err("nothing is masked here".to_owned())
    }
}

/// That what a step yields was chosen from numbers.
fn sound(outputs: &[SequenceOutput]) -> Result<(), String> {
    match outputs.iter().find(|output| output.corrupted) {
        None => Ok(()),
        Some(SequenceOutput { seq, position, .. }) => {
            Err(format!("logits of sequence {} at {position} are not finite", seq.0))
        }
    }
}

/// Steps of one engine.
pub(crate) struct Driver<'a> {
    pub(crate) engine: &'a mut Engine<CudaBackend>,
    pub(crate) vocab: u32,
    step: u64,
    next_seq: u64,
}

impl Driver<'_> {
    pub(crate) fn new_seq(&mut self) -> SeqId {
        self.next_seq += 1;
        SeqId(self.next_seq - 1)
    }

    pub(crate) fn run(&mut self, mut plan: StepPlan) -> Result<(), String> {
        self.step += 1;
        plan.epoch = Epoch(1);
        plan.step = StepId(self.step);
        let mut outputs = Vec::new();
        self.engine.step(&plan, &mut outputs).map_err(|error| error.to_string())?;
        sound(&outputs)
    }

    /// Computes the prompts of `batch` sequences of some blocks each, as many together as a step takes.
    pub(crate) fn prefill(
        &mut self,
        batch: u32,
        (tokens, blocks): (u32, u32),
        together: u32,
        sampling: &SamplingParams,
    ) -> Result<Vec<SeqId>, String> {
        let first = self.next_seq;
        self.next_seq += u64::from(batch);
        let seqs: Vec<SeqId> = (first..self.next_seq).map(SeqId).collect();
        let mut slot = 0;
        for group in seqs.chunks(together.max(1) as usize) {
            let mut plan = StepPlan::default();
            for seq in group {
                let ids = (0..tokens).map(|i| (i * 7919 + slot * 31) % self.vocab).collect();
                plan.admitted.push(NewSequence {
                    seq: *seq,
                    tokens: ids,
                    num_prompt: tokens,
                    adapter: 0,
                    sampling: sampling.clone(),
                });
                let own = slot * blocks..(slot + 1) * blocks;
                plan.sequences.push(SequenceStep {
                    seq: *seq,
                    start: 0,
                    count: tokens,
                    new_blocks: own.map(BlockId).collect(),
                    sample: true,
                    masked: false,
                    drafts: Drafts::none(),
                });
                slot += 1;
            }
            self.run(plan)?;
        }
        Ok(seqs)
    }

    /// Decode steps whose plans are all known, as a coordinator has the next one ready.
    fn decode(&mut self, seqs: &[SeqId], positions: Range<u32>) -> Result<(), String> {
        let plans = Plans(positions.map(|at| self.decode_plan(seqs, at)).collect());
        self.run_all(plans)
    }

    /// Steps whose numbers are in their plans.
    pub(crate) fn run_all(&mut self, plans: Plans) -> Result<(), String> {
        self.run_each(plans, |_| ())
    }

    /// The same; `seen` is shown what each of them yields.
    pub(crate) fn run_each(
        &mut self,
        mut plans: Plans,
        mut seen: impl FnMut(&[SequenceOutput]),
    ) -> Result<(), String> {
        let mut outputs = Vec::new();
        while let Some(plan) = plans.0.pop_front() {
            outputs.clear();
            self.engine
                .step_with(&plan, &mut plans, &mut outputs)
                .map_err(|error| error.to_string())?;
            sound(&outputs)?;
            seen(&outputs);
        }
        Ok(())
    }

    /// What a decode step of `batch` sequences takes.
    fn step_seconds(
        &mut self,
        batch: u32,
        sizes: &Sizes,
        together: u32,
        sampling: &SamplingParams,
    ) -> Result<f64, String> {
        let blocks = (sizes.context, sizes.decoded());
        let seqs = self.prefill(batch, blocks, together, sampling)?;
        // Warm, captured, and one replay.
        let (first, warm) = (sizes.context, sizes.context + 3);
        self.decode(&seqs, first..warm)?;
        let began = Instant::now();
        self.decode(&seqs, warm..first + sizes.steps)?;
        let step = began.elapsed().as_secs_f64() / f64::from(sizes.steps - 3);
        self.forget(seqs)?;
        Ok(step)
    }

    /// Steps of one sequence with drafts, which stand for what nobody knows: what such a step costs,
    /// however many of them are right. Returns where it is then, and how many steps it was.
    fn verify(
        &mut self,
        seq: SeqId,
        drafts: u32,
        positions: Range<u32>,
    ) -> Result<(u32, u32), String> {
        let (mut at, mut steps) = (positions.start, 0);
        while at + drafts < positions.end {
            let mut plan = self.decode_plan(&[seq], at);
            for entry in &mut plan.sequences {
                entry.count += drafts;
                let tokens = (at..at + drafts).map(|token| token * 7919 % self.vocab);
                entry.drafts = tokens.collect::<Vec<u32>>().into();
            }
            let mut outputs = Vec::new();
            self.engine.step(&plan, &mut outputs).map_err(|error| error.to_string())?;
            if outputs.is_empty() {
                return Err("a step with drafts yields no token".to_owned());
            }
            sound(&outputs)?;
            at += u32::try_from(outputs.len()).unwrap_or(u32::MAX);
            steps += 1;
        }
        Ok((at, steps))
    }

    pub(crate) fn decode_plan(&mut self, seqs: &[SeqId], at: u32) -> StepPlan {
        let entry = |seq: &SeqId| SequenceStep {
            seq: *seq,
            start: at,
            count: 1,
            new_blocks: Vec::new(),
            sample: true,
            masked: false,
            drafts: Drafts::none(),
        };
        self.step += 1;
        StepPlan {
            epoch: Epoch(1),
            step: StepId(self.step),
            sequences: seqs.iter().map(entry).collect(),
            ..StepPlan::default()
        }
    }

    pub(crate) fn forget(&mut self, seqs: Vec<SeqId>) -> Result<(), String> {
        self.run(StepPlan { finished: seqs, ..StepPlan::default() })
    }
}

/// What a decode step takes where all kernels ask for as much shared memory.
fn carved_seconds(
    driver: &mut Driver<'_>,
    batch: u32,
    sizes: &Sizes,
    together: u32,
) -> Result<f64, String> {
    let set = |driver: &mut Driver<'_>, percent| {
        driver.engine.backend().set_carveout(percent).map_err(|error| error.to_string())
    };
    set(driver, Some(CARVEOUT))?;
    let seconds = driver.step_seconds(batch, sizes, together, &SamplingParams::greedy());
    set(driver, None)?;
    seconds
}

fn cases(
    shape: &Shape,
    engine: &mut Engine<CudaBackend>,
    sizes: &Sizes,
    bandwidth: f64,
    table: &mut Table,
) -> Result<(), String> {
    let config = shape.config();
    let shard = Shard::new(&config, 0, 1).map_err(|error| error.to_string())?;
    let embedding = 2 * (shape.vocab * shape.hidden) as u64;
    let unread = if shape.tied { 0 } else { embedding };
    let weights = size::weight_bytes(&config, &shard, shape.quantization, &|_, _| false) - unread;
    let token = 4 * (shape.layers * shape.kv_heads * shape.head_dim) as u64;
    let vocab = u32::try_from(shape.vocab).unwrap_or(u32::MAX);
    let mut driver = Driver { engine, vocab, step: 0, next_seq: 1 };
    let together = (sizes.prefill / sizes.context).max(1);
    let greedy = SamplingParams::greedy();
    // Logits of random weights are a bell without a peak: as many tokens as there can be are drawn from.
    let nucleus = SamplingParams { top_p: 0.95, ..SamplingParams::default() };
    for &batch in sizes.batches {
        let step = driver.step_seconds(batch, sizes, together, &greedy)?;
        let carved = carved_seconds(&mut driver, batch, sizes, together)?;
        let cached = u64::from(batch) * u64::from(sizes.context + sizes.steps / 2) * token;
        let rate = (shape.read_bytes(weights, batch) + cached) as f64 / step;
        table.add(
            format!("{} decode, batch {batch}", shape.name),
            Ok(format!(
                "{:.0} tokens/s, step {:.3} ms, {:.2} TB/s = {:.0} % of read bandwidth; {:.3} ms \
                 with a carveout of {CARVEOUT} %",
                f64::from(batch) / step,
                step * 1e3,
                rate / 1e12,
                100.0 * rate / bandwidth,
                carved * 1e3
            )),
        );
        let sampled = driver.step_seconds(batch, sizes, together, &nucleus)?;
        table.add(
            format!("{} decode, batch {batch}, top_p {}", shape.name, nucleus.top_p),
            Ok(format!(
                "step {:.3} ms, {:.0} us more than greedy",
                sampled * 1e3,
                (sampled - step) * 1e6
            )),
        );
    }
    values::decodes_alike(shape.name, &mut driver, sizes, table)?;
    drafted(shape, &mut driver, sizes, table)?;
    mixed::cases(shape.name, &mut driver, sizes, table)?;
    // The second time: plans are chosen in the first.
    let mut took = 0.0;
    for _ in 0..2 {
        let began = Instant::now();
        let blocks = sizes.prefill.div_ceil(BLOCK_SIZE);
        let seqs = driver.prefill(1, (sizes.prefill, blocks), 1, &greedy)?;
        took = began.elapsed().as_secs_f64();
        driver.forget(seqs)?;
    }
    // Two bytes of bf16 for each weight, and two operations.
    let weights = size::weight_bytes(&config, &shard, Quantization::None, &|_, _| false) - unread;
    let weights = shape.read_bytes(weights, 1);
    let flops = (weights as f64 - embedding as f64) * f64::from(sizes.prefill) / took;
    table.add(
        format!("{} prefill of {} tokens", shape.name, sizes.prefill),
        Ok(format!(
            "{:.0} tokens/s, {:.0} TFLOP/s without attention",
            f64::from(sizes.prefill) / took,
            flops / 1e12
        )),
    );
    Ok(())
}

/// What it costs to verify drafts of one sequence, with nothing else in the batch.
fn drafted(
    shape: &Shape,
    driver: &mut Driver<'_>,
    sizes: &Sizes,
    table: &mut Table,
) -> Result<(), String> {
    let rows = sizes.rows().min(5);
    let greedy = SamplingParams::greedy();
    let seqs = driver.prefill(1, (sizes.context, sizes.decoded()), 1, &greedy)?;
    let Some(seq) = seqs.first().copied() else { return Ok(()) };
    // Warm, captured, and one replay.
    let (first, end) = (sizes.context, sizes.decoded() * BLOCK_SIZE);
    let (warm, _) = driver.verify(seq, rows - 1, first..first + rows + 2)?;
    let began = Instant::now();
    let (_, steps) = driver.verify(seq, rows - 1, warm..end)?;
    let took = began.elapsed().as_secs_f64();
    driver.forget(seqs)?;
    let step = took / f64::from(steps.max(1));
    table.add(
        format!("{} decode, a draft of {}", shape.name, rows - 1),
        Ok(format!(
            "step {:.3} ms: {:.0} tokens/s if one is right of each, {:.0} if all are",
            step * 1e3,
            2.0 / step,
            f64::from(rows) / step
        )),
    );
    Ok(())
}

/// Bytes per second: of a copy, and read.
fn bandwidth(options: &Options, ordinal: u32) -> Result<(f64, f64), String> {
    let bytes = if options.quick { 1 << 20 } else { 8 << 30 };
    options
        .backend(ordinal, false)
        .and_then(|mut backend| backend.measure_bandwidth(bytes))
        .map_err(|error| error.to_string())
}

fn measure(options: &Options, ordinal: u32, shape: &Shape, table: &mut Table) {
    let quick =
        Sizes { batches: &[1, 3], context: 20, prefill: 80, long: 150, prompt: 17, steps: 6 };
    let batches: &[u32] = match shape.quantization {
        Quantization::None => &[1, 8, 64, 256],
        Quantization::Int8 => &[1, 8],
    };
    let full = Sizes { batches, context: 512, prefill: 4096, long: 8192, prompt: 256, steps: 67 };
    let sizes = if options.quick { quick } else { full };
    let best = bandwidth(options, ordinal).map_or(f64::NAN, |(copy, read)| copy.max(read));
    let run = options
        .backend(ordinal, true)
        .map_err(ModelError::from)
        .and_then(|backend| shape.engine(backend, &sizes))
        .map_err(|error| error.to_string())
        .and_then(|mut engine| cases(shape, &mut engine, &sizes, best, table));
    if let Err(fault) = run {
        table.add(shape.name, Err(fault));
    }
}

fn cold(options: &Options) -> usize {
    if options.quick { 1 << 16 } else { COLD }
}

/// The products of a layer and of the logits: rows and columns of their matrices.
fn matrices(shape: &Shape) -> [(&'static str, usize, usize); 5] {
    let (q, kv) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    [
        ("qkv", q + 2 * kv, shape.hidden),
        ("output", shape.hidden, q),
        ("gate_up", 2 * shape.inner, shape.hidden),
        ("down", shape.hidden, shape.inner),
        ("lm_head", shape.vocab, shape.hidden),
    ]
}

/// Those products, by this project's kernels and by cuBLASLt: where the
/// second is quicker at up to 32 rows, or the first are at more, `SKINNY_MAX` is to be moved.
fn products(options: &Options, ordinal: u32, shape: &Shape, table: &mut Table) {
    let all: &[usize] = if options.quick { &[1, 9] } else { &[1, 8, 16, 32, 40, 64, 128] };
    let mut backend = match options.backend(ordinal, true) {
        Ok(backend) => backend,
        Err(error) => return table.add("products", Err(error.to_string())),
    };
    for (what, n, k) in matrices(shape) {
        for &rows in all {
            let mut figure = |by| {
                let took = backend.measure_product((rows, n, k), by, cold(options))?.as_secs_f64();
                let rate = (2 * n * k) as f64 / took / 1e12;
                Ok(format!("{:.1} us {rate:.2} TB/s", took * 1e6))
            };
            let own = figure(Multiplier::Own);
            let library = figure(Multiplier::Library);
            let both = own.and_then(|own| Ok(format!("own {own}, cuBLASLt {}", library?)));
            let name = format!("{} {what} {n} x {k}, {rows} rows", shape.name);
            table.add(name, both.map_err(|error: KernelError| error.to_string()));
        }
    }
}

fn attention(options: &Options, ordinal: u32, shape: &Shape, table: &mut Table) {
    // So many sequences of so many tokens, and so many more of another number.
    type Case = [(usize, usize); 2];
    let cases: &[Case] = match options.quick {
        true => &[[(2, 100), (0, 0)], [(3, 20), (1, 300)]],
        false => &[
            [(1, 512), (0, 0)],
            [(1, 8192), (0, 0)],
            [(8, 2048), (0, 0)],
            [(64, 512), (0, 0)],
            [(64, 4096), (0, 0)],
            [(64, 200), (0, 0)],
            [(64, 200), (1, 8192)],
            [(255, 512), (1, 4096)],
        ],
    };
    let heads = AttentionShape {
        num_heads: shape.heads,
        num_kv_heads: shape.kv_heads,
        head_dim: shape.head_dim,
        norm_eps: 1e-5,
        sliding_window: None,
    };
    for case in cases {
        let contexts: Vec<usize> =
            case.iter().flat_map(|&(count, tokens)| std::iter::repeat_n(tokens, count)).collect();
        let run = || -> Result<String, KernelError> {
            let mut backend = options.backend(ordinal, true)?;
            let took = backend.measure_attention(&heads, &contexts, cold(options))?.as_secs_f64();
            let tokens: usize = contexts.iter().sum();
            let bytes = 4 * tokens * shape.kv_heads * shape.head_dim;
            Ok(format!("{:.1} us {:.2} TB/s", took * 1e6, bytes as f64 / took / 1e12))
        };
        let parts = case.iter().filter(|(count, _)| *count > 0);
        let parts: Vec<String> = parts.map(|(count, of)| format!("{count} x {of}")).collect();
        let name = format!("{} decode attention, {} tokens", shape.name, parts.join(" and "));
        table.add(name, run().map_err(|error| error.to_string()));
    }
}

pub(crate) fn steps(options: &Options, ordinal: u32) -> Vec<Step<'_>> {
    let memory = Step::new("memory bandwidth", move |table| {
        let found = bandwidth(options, ordinal).map(|(copy, read)| {
            format!("copy {:.2} TB/s (read + write), read {:.2} TB/s", copy / 1e12, read / 1e12)
        });
        table.add("memory bandwidth", found);
    });
    let shapes: &'static [Shape] = if options.quick { &TINY } else { &SHAPES };
    let mut steps = vec![memory];
    for shape in shapes {
        steps.push(Step::new(shape.name, move |table| measure(options, ordinal, shape, table)));
    }
    if let Some(shape) = shapes.last() {
        let all = matrices(shape);
        steps.push(Step::new("values of products", move |table| {
            values::products_agree(options, ordinal, shape.name, &all, table);
        }));
        steps.push(Step::new("products", move |table| products(options, ordinal, shape, table)));
        steps.push(Step::new("attention", move |table| attention(options, ordinal, shape, table)));
    }
    steps
}
