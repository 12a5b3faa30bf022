//! Checks every model folder's golden log-probabilities and greedy tokens, with and without graphs,
//! and with verified drafts.
use std::path::{Path, PathBuf};
use std::time::Duration;

use kernels::backend::prelude::*;
use kernels::cuda::CudaBackend;
use shared::ids::{BlockId, Epoch, SeqId, StepId};
use shared::protocol::{
    Drafts, EngineConfig, KvCacheDtype, NewSequence, Quantization, SequenceOutput, SequenceStep,
    StepPlan,
};
use shared::sampling::SamplingParams;
use testkit::models::{Golden, goldens};
use worker::engine::Engine;
use worker::model::ModelError;
use worker::model::config::ModelConfig;
use worker::model::decoder::Decoder;
use worker::model::safetensors::WeightFiles;
use worker::model::shard::Shard;
use worker::model::weights::{self, Source};
use worker::rank::EmptyStepSource;

use crate::{Options, Step, graphs_made};

const BLOCK_SIZE: u32 = 16;
/// How long products may be planned for, as a worker does before it serves.
pub(crate) const PLANNING: Duration = Duration::from_secs(10);
/// Error caused by bf16 inputs of products in small random models; measured in emulation: 0.065.
const TOLERANCE: f64 = 0.15;

pub(crate) const VARIANTS: [&str; 60] = [
    "llama-gqa",
    "llama-gqa-sharded",
    "llama-tied",
    "llama3-rope",
    "llama-mha-bias",
    "qwen2",
    "qwen3",
    "mistral-swa",
    "phi3",
    "phi4-mini",
    "qwen3-yarn",
    "smollm3",
    "granite",
    "seed-oss",
    "mistral3",
    "glm4",
    "ernie4_5",
    "exaone4",
    "olmo2",
    "olmo3",
    "cohere",
    "cohere2",
    "starcoder2",
    "nemotron",
    "stablelm",
    "ministral3",
    "granite-4",
    "granite-4-h",
    "qwen2_5-vl",
    "qwen3-vl",
    "glm4v",
    "gemma",
    "gemma2",
    "gemma3",
    "mixtral",
    "granite-moe",
    "granite-4-h-moe",
    "olmoe",
    "minimax-m2",
    "qwen2-moe",
    "glm4-moe",
    "deepseek-v2",
    "deepseek-v3",
    "glm4-moe-lite",
    "hy-v3",
    "exaone-moe",
    "dots1",
    "solar-open",
    "qwen3-moe",
    "qwen3-moe-stacked",
    "qwen3-vl-moe",
    "qwen3_5",
    "qwen3-next",
    "qwen3_5-moe",
    "glm4v-moe",
    "llama-gptq",
    "llama-w4a16",
    "qwen3-awq",
    "gpt-oss",
    "gpt-oss-mxfp4",
];

fn engine(
    options: &Options,
    ordinal: u32,
    graphs: bool,
    model: &Path,
) -> Result<Engine<CudaBackend>, ModelError> {
    engine_over(options.backend(ordinal, graphs)?, model, (0, 1), true)
}

/// The engine of one of `degree` ranks; with `profiled`, it runs its largest steps first.
pub(crate) fn engine_over(
    mut backend: CudaBackend,
    model: &Path,
    (rank, degree): (u32, u32),
    profiled: bool,
) -> Result<Engine<CudaBackend>, ModelError> {
    let config = ModelConfig::load(model)?;
    let shard = Shard::new(&config, rank, degree)?;
    let files = WeightFiles::open(model)?;
    let sizes = EngineConfig {
        block_size: BLOCK_SIZE,
        max_model_len: u32::try_from(config.max_positions).unwrap_or(u32::MAX).min(1024),
        max_num_seqs: 8,
        max_num_batched_tokens: 1024,
        kv_cache_bytes: 0,
        swap_bytes: 0,
        kv_cache_dtype: KvCacheDtype::Auto,
        prefix_states: 0,
    };
    let positions = sizes.max_model_len as usize;
    let source = Source { files: &files, config: &config, shard: &shard };
    let none = Quantization::None;
    let weights = weights::load(&mut backend, &source, none, positions, &mut |_, _| {})?;
    let decoder = Decoder::new(&mut backend, config, shard, weights, &sizes)?;
    let mut engine = Engine::new(backend, decoder, sizes);
    if profiled {
        engine.backend().set_alone(true);
        let profile = engine.profile().and_then(|()| engine.backend().plan_products(PLANNING));
        engine.backend().set_alone(false);
        profile?;
    }
    engine.start(256, 0)?;
    Ok(engine)
}

/// Follows one prompt and its greedy tokens. Returns the worst error and how many tokens were
/// compared (none on ranks other than the first).
pub(crate) fn follow(
    engine: &mut Engine<CudaBackend>,
    golden: &Golden,
    number: &mut u64,
    output: usize,
) -> Result<(f64, usize), String> {
    let seq = SeqId(*number + 1);
    let sampling =
        SamplingParams { logprobs: Some(0), prompt_logprobs: Some(0), ..SamplingParams::greedy() };
    let prompt = u32::try_from(golden.prompt_ids.len()).unwrap_or(u32::MAX);
    let (mut worst, mut compared) = (0.0f64, 0);
    let (mut start, mut count, mut blocks) = (0, prompt, 0);
    let mut parted = false;
    for i in 0..output.min(golden.greedy_ids.len()) {
        *number += 1;
        let mut plan = StepPlan { epoch: Epoch(1), step: StepId(*number), ..StepPlan::default() };
        if i == 0 {
            let tokens = golden.prompt_ids.clone();
            let sampling = sampling.clone();
            plan.admitted.push(NewSequence {
                seq,
                tokens,
                num_prompt: prompt,
                adapter: 0,
                sampling,
            });
        }
        let mut new_blocks = Vec::new();
        while blocks * BLOCK_SIZE < start + count {
            new_blocks.push(BlockId(255 - blocks));
            blocks += 1;
        }
        plan.sequences.push(SequenceStep {
            seq,
            start,
            count,
            new_blocks,
            sample: true,
            masked: false,
            drafts: Drafts::none(),
        });
        let mut outputs = Vec::new();
        engine
            .step(&plan, &mut EmptyStepSource, &mut outputs)
            .map_err(|error| error.to_string())?;
        (start, count) = (start + count, 1);
        // The other ranks continue, whatever the first one finds.
        if parted || engine.backend().rank() > 0 {
            continue;
        }
        let got = outputs.first().ok_or("no output")?;
        if i == 0 {
            for (at, entry) in got.prompt_logprobs.iter().enumerate() {
                let expected = golden.prompt_logprobs[at + 1].unwrap_or_default();
                worst = worst.max((f64::from(entry.logprob) - expected).abs());
            }
        }
        parted = !agrees(golden, i, got, &mut worst)?;
        compared += usize::from(!parted);
    }
    forget(engine, golden, (seq, number), worst)?;
    Ok((worst, compared))
}

/// Compares a greedy token; false if it differs and either of the two could be right.
fn agrees(
    golden: &Golden,
    at: usize,
    got: &SequenceOutput,
    worst: &mut f64,
) -> Result<bool, String> {
    if got.token != Some(golden.greedy_ids[at]) {
        let gap = golden.greedy_top1_top2_gap[at];
        if gap > TOLERANCE {
            return Err(format!("{}: token {at} differs, with a gap of {gap}", golden.name));
        }
        return Ok(false);
    }
    let logprob = got.logprobs.as_ref().map_or(f64::NAN, |all| f64::from(all.logprob));
    let error = (logprob - golden.greedy_logprobs[at]).abs();
    *worst = if error > *worst || error.is_nan() { error } else { *worst };
    Ok(true)
}

/// Ends a sequence; its worst error must be small.
fn forget(
    engine: &mut Engine<CudaBackend>,
    golden: &Golden,
    (seq, number): (SeqId, &mut u64),
    worst: f64,
) -> Result<(), String> {
    *number += 1;
    let plan = StepPlan {
        epoch: Epoch(1),
        step: StepId(*number),
        finished: vec![seq],
        ..StepPlan::default()
    };
    engine.step(&plan, &mut EmptyStepSource, &mut Vec::new()).map_err(|error| error.to_string())?;
    if worst.is_nan() || worst > TOLERANCE {
        return Err(format!("{}: a log-probability is off by {worst}", golden.name));
    }
    Ok(())
}

/// Follows one prompt, with its greedy tokens as drafts: the first and the second of each three are
/// right, so that a step has four rows and yields three tokens. Returns the same as `follow`.
fn verify(
    engine: &mut Engine<CudaBackend>,
    golden: &Golden,
    number: &mut u64,
    output: usize,
) -> Result<(f64, usize), String> {
    let seq = SeqId(*number + 1);
    let sampling = SamplingParams { logprobs: Some(0), ..SamplingParams::greedy() };
    let prompt = u32::try_from(golden.prompt_ids.len()).unwrap_or(u32::MAX);
    let greedy = &golden.greedy_ids[..output.min(golden.greedy_ids.len())];
    let (mut worst, mut compared, mut blocks) = (0.0f64, 0, 0);
    while compared < greedy.len() {
        *number += 1;
        let mut plan = StepPlan { epoch: Epoch(1), step: StepId(*number), ..StepPlan::default() };
        let done = u32::try_from(compared).unwrap_or(u32::MAX);
        let (mut start, mut count, mut drafts) = (0, prompt, Vec::new());
        if compared == 0 {
            let (tokens, sampling) = (golden.prompt_ids.clone(), sampling.clone());
            plan.admitted.push(NewSequence {
                seq,
                tokens,
                num_prompt: prompt,
                adapter: 0,
                sampling,
            });
        } else {
            drafts.extend(greedy[compared..].iter().take(3));
            if let Some(wrong) = drafts.get_mut(2) {
                *wrong = u32::from(*wrong == 0);
            }
            (start, count) = (prompt + done - 1, 1 + u32::try_from(drafts.len()).unwrap_or(0));
        }
        let mut new_blocks = Vec::new();
        while blocks * BLOCK_SIZE < start + count {
            new_blocks.push(BlockId(255 - blocks));
            blocks += 1;
        }
        let (masked, sample) = (false, true);
        let expected = drafts.len().min(2) + 1;
        let drafts = drafts.into();
        plan.sequences.push(SequenceStep { seq, start, count, new_blocks, sample, masked, drafts });
        let mut outputs = Vec::new();
        engine
            .step(&plan, &mut EmptyStepSource, &mut outputs)
            .map_err(|error| error.to_string())?;
        for (at, got) in (compared..greedy.len()).zip(&outputs) {
            if !agrees(golden, at, got, &mut worst)? {
                forget(engine, golden, (seq, number), worst)?;
                return Ok((worst, compared));
            }
            compared += 1;
        }
        if outputs.len() != expected {
            let (name, got) = (&golden.name, outputs.len());
            return Err(format!("{name}: {got} tokens of a step instead of {expected}"));
        }
    }
    forget(engine, golden, (seq, number), worst)?;
    Ok((worst, compared))
}

/// Checks one model, with or without graphs and drafts.
fn whole(
    options: &Options,
    ordinal: u32,
    (graphs, drafts): (bool, bool),
    model: &Path,
) -> Result<String, String> {
    let follow = if drafts { verify } else { follow };
    // A step is captured the second time it occurs; one with drafts yields three tokens.
    let quick = if drafts { 14 } else { 5 };
    let (prompts, output) = if options.quick { (1, quick) } else { (usize::MAX, usize::MAX) };
    let mut engine = engine(options, ordinal, graphs, model).map_err(|error| error.to_string())?;
    let (mut worst, mut compared, mut number) = (0.0f64, 0, 0);
    for golden in goldens(model).iter().take(prompts) {
        let (error, tokens) = follow(&mut engine, golden, &mut number, output)?;
        worst = worst.max(error);
        compared += tokens;
    }
    let made = if graphs { graphs_made(engine.backend())? } else { "no graphs".to_owned() };
    Ok(format!("{compared} tokens, worst error {worst:.1e}, {made}"))
}

pub(crate) fn steps(options: &Options, ordinal: u32) -> Vec<Step<'_>> {
    let variants = VARIANTS.map(|name| options.root.join("tests/models").join(name));
    let models = variants.into_iter().chain([options.root.join("models/demo")]);
    let ways = [("calls", (false, false)), ("graphs", (true, false))];
    let all = models.flat_map(|model| ways.map(|way| (model.clone(), way)));
    // Draft rows are computed like decode rows: one model is enough to show that.
    let demo = options.root.join("models/demo");
    let all = all.chain([(demo, ("drafts", (true, true)))]);
    let step = |(model, (how, way)): (PathBuf, (&str, (bool, bool)))| {
        let name = model.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let name = format!("goldens {name}, {how}");
        Step::new(name.clone(), move |table| {
            table.add(name, whole(options, ordinal, way, &model));
        })
    };
    all.map(step).collect()
}
