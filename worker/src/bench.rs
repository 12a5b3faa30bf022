//! Measures the engine alone for `tutti bench`: ranks are threads of this process, driven by step
//! plans, without HTTP and links.
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kernels::collective::{Collective, local_group};
use shared::ids::{BlockId, Epoch, SeqId, StepId};
use shared::model_config::ConfigOverrides;
use shared::protocol::{
    Drafts, Dtype, EngineConfig, KvCacheDtype, NewSequence, Quantization, SequenceStep, StepPlan,
};
use shared::sampling::SamplingParams;

use crate::device::{Device, DeviceChoice, ShardOptions};
use crate::engine::Engine;
use crate::model::ModelError;
use crate::model::config::ModelConfig;
use crate::model::decoder::Decoder;
use crate::model::lora::LoraFiles;
use crate::model::safetensors::WeightFiles;
use crate::model::shard::Shard;
use crate::model::weights::{self, Source};
use crate::rank::EmptyStepSource;

const BLOCK_SIZE: u32 = 16;
/// Number of decode steps before anything is measured.
pub const WARM_UP_STEPS: u32 = 4;
const TIMEOUT: Duration = Duration::from_secs(120);

/// What to measure.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// The model folder.
    pub model: PathBuf,
    /// What is laid over its `config.json`.
    pub config_overrides: ConfigOverrides,
    /// Data type of activations in matrix products.
    pub dtype: Dtype,
    /// How the weights are stored.
    pub quantization: Quantization,
    /// Data type of the KV cache.
    pub kv_cache_dtype: KvCacheDtype,
    /// Number of ranks.
    pub tensor_parallel: u32,
    /// Device of each rank; rank r uses GPU i + r.
    pub device: DeviceChoice,
    /// Prompt length of the prefill case, in tokens.
    pub prompt_tokens: u32,
    /// Number of decode steps of each decode case.
    pub decode_steps: u32,
    /// Number of sequences of each decode case.
    pub batches: Vec<u32>,
}

/// Results, in tokens per second unless noted.
#[derive(Clone, Debug, PartialEq)]
pub struct BenchFigures {
    /// Prefill of one prompt, including the first token.
    pub prefill: f64,
    /// (sequences, tokens per second of all of them together), in decode steps only.
    pub decode: Vec<(u32, f64)>,
    /// Microseconds of a step that computes nothing: plan handed over, ranks met, result returned.
    pub empty_step_us: f64,
    /// Description of the backend.
    pub backend: String,
    /// Data type of activations in matrix products.
    pub dtype: String,
}

/// Runs all cases once.
///
/// # Errors
/// A sentence when the model cannot be loaded or a step fails.
pub fn run(options: &BenchOptions) -> Result<BenchFigures, String> {
    let mut replica = Replica::start(options)?;
    // Warm up: the first steps touch every page of weights and grow every buffer.
    for _ in 0..2 {
        replica.case(1, options.prompt_tokens, WARM_UP_STEPS)?;
    }
    let (prefill, _) = replica.case(1, options.prompt_tokens, 1)?;
    let mut decode = Vec::new();
    for batch in &options.batches {
        let (_, elapsed) = replica.case(*batch, 32, options.decode_steps)?;
        let tokens = f64::from(batch * options.decode_steps);
        decode.push((*batch, tokens / elapsed.as_secs_f64()));
    }
    let began = Instant::now();
    for _ in 0..1000 {
        replica.run(StepPlan::default())?;
    }
    Ok(BenchFigures {
        prefill: f64::from(options.prompt_tokens) / prefill.as_secs_f64(),
        decode,
        empty_step_us: began.elapsed().as_secs_f64() * 1e6 / 1000.0,
        backend: replica.backend.clone(),
        dtype: replica.dtype.clone(),
    })
}

/// The backend's description, and the data type of activations.
type Described = (String, String);

struct Replica {
    plans: Vec<SyncSender<StepPlan>>,
    results: Receiver<Result<(), String>>,
    threads: Vec<JoinHandle<()>>,
    backend: String,
    dtype: String,
    vocab: u32,
    step: u64,
    next_seq: u64,
}

impl Replica {
    fn start(options: &BenchOptions) -> Result<Self, String> {
        let ranks = options.tensor_parallel;
        let group = local_group(ranks as usize, TIMEOUT).map_err(|error| error.to_string())?;
        let config = ModelConfig::load_with(&options.model, &options.config_overrides)
            .map_err(|error| error.to_string())?;
        let (sender, results) = sync_channel(ranks as usize);
        let mut replica = Self {
            plans: Vec::new(),
            results,
            threads: Vec::new(),
            backend: String::new(),
            dtype: String::new(),
            vocab: u32::try_from(config.vocab_size).unwrap_or(u32::MAX),
            step: 0,
            next_seq: 0,
        };
        let (described, descriptions) = sync_channel(ranks as usize);
        for (rank, collective) in (0..ranks).zip(group) {
            let (plans, received) = sync_channel::<StepPlan>(2);
            replica.plans.push(plans);
            let (options, sender, described) = (options.clone(), sender.clone(), described.clone());
            let thread = move || match &options.device {
                DeviceChoice::Cpu(device) => {
                    serve(device, &options, rank, collective, received, &sender, &described);
                }
                DeviceChoice::Cuda(device) => {
                    let mut device = device.clone();
                    device.options.ordinal += rank;
                    serve(&device, &options, rank, collective, received, &sender, &described);
                }
            };
            replica.threads.push(std::thread::spawn(thread));
        }
        for _ in 0..ranks {
            (replica.backend, replica.dtype) =
                descriptions.recv().map_err(|error| error.to_string())??;
        }
        Ok(replica)
    }

    fn run(&mut self, mut plan: StepPlan) -> Result<(), String> {
        self.step += 1;
        plan.step = StepId(self.step);
        plan.epoch = Epoch(1);
        for plans in &self.plans {
            plans.send(plan.clone()).map_err(|error| error.to_string())?;
        }
        self.results.recv_timeout(TIMEOUT).map_err(|error| error.to_string())?
    }

    /// Runs `batch` sequences of `prompt` tokens for `steps` decode steps; returns the time of the
    /// prefill and of the decode steps.
    fn case(
        &mut self,
        batch: u32,
        prompt: u32,
        steps: u32,
    ) -> Result<(Duration, Duration), String> {
        let blocks = (prompt + steps + 1).div_ceil(BLOCK_SIZE);
        let first = self.next_seq;
        self.next_seq += u64::from(batch);
        let seqs: Vec<SeqId> = (first..self.next_seq).map(SeqId).collect();
        let mut elapsed = Duration::ZERO;
        for (index, seq) in (0u32..).zip(&seqs) {
            let mut random = u64::from(index) + 1;
            let tokens = (0..prompt)
                .map(|_| {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (random >> 33) as u32 % self.vocab
                })
                .collect();
            let sampling = SamplingParams::greedy();
            let admitted =
                vec![NewSequence { seq: *seq, tokens, num_prompt: prompt, adapter: 0, sampling }];
            let own = index * blocks..(index + 1) * blocks;
            let sequences = vec![SequenceStep {
                seq: *seq,
                start: 0,
                count: prompt,
                new_blocks: own.map(BlockId).collect(),
                sample: true,
                masked: false,
                drafts: Drafts::none(),
            }];
            let began = Instant::now();
            self.run(StepPlan { admitted, sequences, ..StepPlan::default() })?;
            elapsed += began.elapsed();
        }
        let began = Instant::now();
        for step in 0..steps {
            let entry = |seq: &SeqId| SequenceStep {
                seq: *seq,
                start: prompt + step,
                count: 1,
                new_blocks: Vec::new(),
                sample: true,
                masked: false,
                drafts: Drafts::none(),
            };
            let sequences = seqs.iter().map(entry).collect();
            self.run(StepPlan { sequences, ..StepPlan::default() })?;
        }
        let decode = began.elapsed();
        self.run(StepPlan { finished: seqs, ..StepPlan::default() })?;
        Ok((elapsed, decode))
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.plans.clear();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// One rank's thread.
fn serve<D: Device>(
    device: &D,
    options: &BenchOptions,
    rank: u32,
    collective: Box<dyn Collective>,
    plans: Receiver<StepPlan>,
    results: &SyncSender<Result<(), String>>,
    described: &SyncSender<Result<Described, String>>,
) {
    let engine = engine(device, options, rank, collective).map_err(|error| error.to_string());
    let _ = described.send(engine.as_ref().map(|e| e.1.clone()).map_err(String::clone));
    let Ok((mut engine, _)) = engine else { return };
    let mut outputs = Vec::new();
    for plan in plans {
        outputs.clear();
        let result = engine.step(&plan, &mut EmptyStepSource, &mut outputs);
        if rank == 0 || result.is_err() {
            let _ = results.send(result.map(|_| ()).map_err(|error| error.to_string()));
        }
    }
}

fn engine<D: Device>(
    device: &D,
    options: &BenchOptions,
    rank: u32,
    collective: Box<dyn Collective>,
) -> Result<(Engine<D::Backend>, Described), ModelError> {
    let model: &Path = &options.model;
    let config = ModelConfig::load_with(model, &options.config_overrides)?;
    let shard = Shard::new(&config, rank, options.tensor_parallel)?;
    let files = WeightFiles::open(model)?;
    let precision = device.precision(options.dtype, &config)?;
    let mut backend = device.backend(precision, collective)?;
    let described = (kernels::backend::Tensors::describe(&backend), precision.to_string());
    let longest = options.prompt_tokens.max(32) + options.decode_steps.max(WARM_UP_STEPS) + 1;
    let positions = config.max_positions.min(longest as usize);
    let seqs = options.batches.iter().copied().max().unwrap_or(1);
    let sizes = EngineConfig {
        block_size: BLOCK_SIZE,
        max_model_len: u32::try_from(positions).unwrap_or(u32::MAX),
        max_num_seqs: seqs,
        max_num_batched_tokens: options.prompt_tokens.max(seqs).max(32),
        kv_cache_bytes: u64::MAX,
        swap_bytes: 0,
        kv_cache_dtype: options.kv_cache_dtype,
        prefix_states: 0,
    };
    let quantization = options.quantization;
    let (adapters, ranks_here) = (&LoraFiles::default(), options.tensor_parallel);
    let alone = ShardOptions { quantization, adapters, draft: None, ranks_here };
    let source = Source { files: &files, config: &config, shard: &shard };
    device.check_limits((&config, &shard), &sizes)?;
    device.check_fit(&backend, &source, alone, &sizes)?;
    let weights = weights::load(&mut backend, &source, quantization, positions, &mut |_, _| {})?;
    let decoder = Decoder::new(&mut backend, config, shard, weights, &sizes)?;
    let num_blocks = longest.div_ceil(BLOCK_SIZE) * seqs.max(2);
    let mut engine = Engine::new(backend, decoder, sizes);
    device.prepare(&mut engine)?;
    engine.start(num_blocks, 0)?;
    Ok((engine, described))
}
