//! How fast: memory bandwidth, then decode and prefill of models of random weights in the shapes of
//! known ones. A decode step reads all weights but the embedding, and the KV cache of its sequences:
//! what that is of the measured read bandwidth is the figure that counts.
use std::collections::VecDeque;
use std::ops::Range;
use std::time::Instant;

use kernels::backend::{Backend, DType, HostMatrix, QkvWeights, RopeTable};
use kernels::cuda::CudaBackend;
use shared::ids::{BlockId, Epoch, SeqId, StepId};
use shared::protocol::{EngineConfig, NewSequence, SequenceStep, StepPlan};
use shared::sampling::SamplingParams;
use worker::engine::Engine;
use worker::model::ModelError;
use worker::model::config::ModelConfig;
use worker::model::decoder::Decoder;
use worker::model::rope::{RopeConfig, RopeScaling};
use worker::model::shard::Shard;
use worker::model::size;
use worker::model::weights::{LayerWeights, Weights};
use worker::rank::StepSource;

use crate::{Options, Table};

const BLOCK_SIZE: u32 = 16;

struct Shape {
    name: &'static str,
    hidden: usize,
    inner: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    vocab: usize,
    tied: bool,
}

/// As Llama 3.1 8B and Llama 3.2 1B.
const SHAPES: [Shape; 2] = [
    Shape {
        name: "1B",
        hidden: 2048,
        inner: 8192,
        layers: 16,
        heads: 32,
        kv_heads: 8,
        head_dim: 64,
        vocab: 128_256,
        tied: true,
    },
    Shape {
        name: "8B",
        hidden: 4096,
        inner: 14_336,
        layers: 32,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        vocab: 128_256,
        tied: false,
    },
];
const TINY: Shape = Shape {
    name: "tiny",
    hidden: 64,
    inner: 96,
    layers: 2,
    heads: 4,
    kv_heads: 2,
    head_dim: 16,
    vocab: 300,
    tied: false,
};

/// What a case measures.
struct Sizes {
    batches: &'static [u32],
    /// Tokens of a prompt before decode, and of the prefill case.
    context: u32,
    prefill: u32,
    steps: u32,
}

impl Shape {
    fn config(&self) -> ModelConfig {
        ModelConfig {
            hidden_size: self.hidden,
            intermediate_size: self.inner,
            num_layers: self.layers,
            num_heads: self.heads,
            num_kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            vocab_size: self.vocab,
            max_positions: 8192,
            norm_eps: 1e-5,
            rope: RopeConfig { theta: 5e5, scaling: RopeScaling::None },
            sliding_windows: vec![None; self.layers],
            tied: self.tied,
            qkv_bias: false,
            output_bias: false,
            mlp_bias: false,
            qk_norm: false,
            is_bf16: true,
        }
    }

    /// All matrices from one run of random bytes.
    fn weights(
        &self,
        backend: &mut CudaBackend,
        positions: usize,
    ) -> Result<
        Weights<<CudaBackend as Backend>::Matrix, <CudaBackend as Backend>::Vector>,
        ModelError,
    > {
        let config = self.config();
        let largest = [self.vocab, 2 * self.inner, self.hidden].into_iter().max().unwrap_or(1);
        let count = largest * self.hidden.max(self.inner.min(self.hidden * 4));
        let mut state = 1u64;
        // Sign and mantissa at random, exponents of about 1/32: sums stay small.
        let data: Vec<u8> = (0..count)
            .flat_map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let bits = (state >> 48) as u16;
                (0x3c80 ^ (bits & 0x80ff)).to_le_bytes()
            })
            .collect();
        let mut matrix = |rows: usize, cols: usize| {
            let part = HostMatrix {
                data: &data,
                dtype: DType::Bf16,
                rows,
                cols,
                col_start: 0,
                row_stride: cols,
            };
            backend.load_matrix(&[part])
        };
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let embedding = matrix(self.vocab, self.hidden)?;
        let lm_head = (!self.tied).then(|| matrix(self.vocab, self.hidden)).transpose()?;
        let mut products = Vec::new();
        for _ in 0..self.layers {
            products.push((
                matrix(q + 2 * kv, self.hidden)?,
                matrix(self.hidden, q)?,
                matrix(2 * self.inner, self.hidden)?,
                matrix(self.hidden, self.inner)?,
            ));
        }
        let ones = vec![1.0; self.hidden];
        let mut layers = Vec::new();
        for (qkv, output, gate_up, down) in products {
            layers.push(LayerWeights {
                input_norm: backend.load_vector(&ones)?,
                qkv: QkvWeights { weight: qkv, bias: None, q_norm: None, k_norm: None },
                output: vec![output],
                output_bias: None,
                post_norm: backend.load_vector(&ones)?,
                gate_up,
                gate_up_bias: None,
                down: vec![down],
                down_bias: None,
            });
        }
        let (cos, sin) = config.rope.tables(config.head_dim, positions);
        let shard = Shard::new(&config, 0, 1)?;
        Ok(Weights {
            embedding,
            lm_head,
            layers,
            final_norm: backend.load_vector(&ones)?,
            rope: RopeTable { cos: backend.load_vector(&cos)?, sin: backend.load_vector(&sin)? },
            bytes: size::weight_bytes(&config, &shard),
        })
    }

    fn engine(
        &self,
        mut backend: CudaBackend,
        sizes: &Sizes,
    ) -> Result<Engine<CudaBackend>, ModelError> {
        let batch = sizes.batches.iter().copied().max().unwrap_or(1);
        let longest = sizes.prefill.max(sizes.context + sizes.steps + 2);
        let config = EngineConfig {
            block_size: BLOCK_SIZE,
            max_model_len: longest,
            max_num_seqs: batch,
            max_num_batched_tokens: sizes.prefill.max(batch),
            kv_cache_bytes: 0,
        };
        let weights = self.weights(&mut backend, longest as usize)?;
        let model = self.config();
        let shard = Shard::new(&model, 0, 1)?;
        let (tokens, rows) = (config.max_num_batched_tokens as usize, batch as usize);
        let decoder = Decoder::new(&mut backend, model, shard, weights, tokens, rows)?;
        let mut engine = Engine::new(backend, decoder, config);
        engine.profile()?;
        engine.backend().settle()?;
        engine.start(longest.div_ceil(BLOCK_SIZE) * batch)?;
        Ok(engine)
    }
}

/// Plans that wait.
struct Plans(VecDeque<StepPlan>);

impl StepSource for Plans {
    fn peek(&mut self) -> Option<&StepPlan> {
        self.0.front()
    }
}

/// Steps of one engine.
struct Driver<'a> {
    engine: &'a mut Engine<CudaBackend>,
    vocab: u32,
    blocks_each: u32,
    step: u64,
    next_seq: u64,
}

impl Driver<'_> {
    fn run(&mut self, mut plan: StepPlan) -> Result<(), String> {
        self.step += 1;
        plan.epoch = Epoch(1);
        plan.step = StepId(self.step);
        self.engine.step(&plan, &mut Vec::new()).map(|_| ()).map_err(|error| error.to_string())
    }

    /// Computes the prompts of `batch` sequences, as many together as a step takes.
    fn prefill(&mut self, batch: u32, tokens: u32, together: u32) -> Result<Vec<SeqId>, String> {
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
                    sampling: SamplingParams::greedy(),
                });
                let own = slot * self.blocks_each..(slot + 1) * self.blocks_each;
                plan.sequences.push(SequenceStep {
                    seq: *seq,
                    start: 0,
                    count: tokens,
                    new_blocks: own.map(BlockId).collect(),
                    sample: true,
                });
                slot += 1;
            }
            self.run(plan)?;
        }
        Ok(seqs)
    }

    /// Decode steps whose plans are all known, as a coordinator has the next one ready.
    fn decode(&mut self, seqs: &[SeqId], positions: Range<u32>) -> Result<(), String> {
        let mut plans = Plans(positions.map(|at| self.decode_plan(seqs, at)).collect());
        while let Some(plan) = plans.0.pop_front() {
            self.engine
                .step_with(&plan, &mut plans, &mut Vec::new())
                .map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    fn decode_plan(&mut self, seqs: &[SeqId], at: u32) -> StepPlan {
        let entry = |seq: &SeqId| SequenceStep {
            seq: *seq,
            start: at,
            count: 1,
            new_blocks: Vec::new(),
            sample: true,
        };
        self.step += 1;
        StepPlan {
            epoch: Epoch(1),
            step: StepId(self.step),
            sequences: seqs.iter().map(entry).collect(),
            ..StepPlan::default()
        }
    }

    fn forget(&mut self, seqs: Vec<SeqId>) -> Result<(), String> {
        self.run(StepPlan { finished: seqs, ..StepPlan::default() })
    }
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
    let weights = size::weight_bytes(&config, &shard) - if shape.tied { 0 } else { embedding };
    let token = 4 * (shape.layers * shape.kv_heads * shape.head_dim) as u64;
    let blocks_each = engine.config().max_model_len.div_ceil(BLOCK_SIZE);
    let vocab = u32::try_from(shape.vocab).unwrap_or(u32::MAX);
    let mut driver = Driver { engine, vocab, blocks_each, step: 0, next_seq: 1 };
    let together = (sizes.prefill / sizes.context).max(1);
    for &batch in sizes.batches {
        let seqs = driver.prefill(batch, sizes.context, together)?;
        // Warm, captured, and one replay.
        let (first, warm) = (sizes.context, sizes.context + 3);
        driver.decode(&seqs, first..warm)?;
        let began = Instant::now();
        driver.decode(&seqs, warm..first + sizes.steps)?;
        let step = began.elapsed().as_secs_f64() / f64::from(sizes.steps - 3);
        driver.forget(seqs)?;
        let cached = u64::from(batch) * u64::from(sizes.context + sizes.steps / 2) * token;
        let rate = (weights + cached) as f64 / step;
        table.add(
            format!("{} decode, batch {batch}", shape.name),
            Ok(format!(
                "{:.0} tokens/s, step {:.3} ms, {:.2} TB/s = {:.0} % of read bandwidth",
                f64::from(batch) / step,
                step * 1e3,
                rate / 1e12,
                100.0 * rate / bandwidth
            )),
        );
    }
    // The second time: plans are chosen in the first.
    let mut took = 0.0;
    for _ in 0..2 {
        let began = Instant::now();
        let seqs = driver.prefill(1, sizes.prefill, 1)?;
        took = began.elapsed().as_secs_f64();
        driver.forget(seqs)?;
    }
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

pub(crate) fn measure(options: &Options, ordinal: u32, table: &mut Table) {
    let bytes = if options.quick { 1 << 20 } else { 8 << 30 };
    let bandwidth = options
        .backend(ordinal, false)
        .and_then(|mut backend| backend.measure_bandwidth(bytes))
        .map_err(|error| error.to_string());
    let best = bandwidth.as_ref().map_or(f64::NAN, |(copy, read)| copy.max(*read));
    table.add(
        "memory bandwidth",
        bandwidth.map(|(copy, read)| {
            format!("copy {:.2} TB/s (read + write), read {:.2} TB/s", copy / 1e12, read / 1e12)
        }),
    );
    let quick = Sizes { batches: &[1, 3], context: 20, prefill: 80, steps: 6 };
    let full = Sizes { batches: &[1, 8, 64, 256], context: 512, prefill: 4096, steps: 67 };
    let (shapes, sizes): (&[Shape], _) =
        if options.quick { (&[TINY], quick) } else { (&SHAPES, full) };
    for shape in shapes {
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
}
