//! Measures memory bandwidth, then decode and prefill of models with random weights in the shapes
//! of known models. A decode step reads all weights except the embedding (and experts that no row
//! chose), and the KV cache of its sequences. The figure that matters is the achieved share of the
//! measured read bandwidth.
use std::time::Instant;

use kernels::backend::prelude::*;
use kernels::cuda::CudaBackend;
use shared::protocol::Quantization;
use shared::sampling::SamplingParams;
use worker::engine::Engine;
use worker::model::ModelError;
use worker::model::shard::Shard;
use worker::model::size;

use crate::driver::Driver;
use crate::kernels_speed::{attention, matrices, products};
use crate::shapes::{SHAPES, Shape, TINY};
use crate::{Options, Step, Table, delta, graphs_made, mixed, values};

pub(crate) const BLOCK_SIZE: u32 = 16;
/// Share of the L1 cache used as shared memory, in per cent: enough for three blocks of decode
/// attention, which needs the most.
const CARVEOUT: u8 = 58;

/// The sizes of a case.
pub(crate) struct Sizes {
    batches: &'static [u32],
    /// Prompt tokens before decode, and in the prefill case.
    pub(crate) context: u32,
    pub(crate) prefill: u32,
    /// Tokens of a long sequence among short ones, and of a prompt among decode rows.
    pub(crate) long: u32,
    pub(crate) prompt: u32,
    pub(crate) steps: u32,
}

impl Sizes {
    /// Sequences of the largest step.
    pub(crate) fn rows(&self) -> u32 {
        self.batches.iter().copied().max().unwrap_or(1)
    }

    /// Blocks of one decoded sequence.
    pub(crate) fn decoded(&self) -> u32 {
        (self.context + self.steps + 2).div_ceil(BLOCK_SIZE)
    }

    /// Blocks of all sequences, in the largest case. Not every sequence is as long as the longest:
    /// a GPU could not hold that.
    pub(crate) fn blocks(&self) -> u32 {
        let alike = (self.decoded() * self.rows()).max(self.prefill.div_ceil(BLOCK_SIZE));
        alike.max(mixed::blocks(self))
    }
}

/// Seconds of a decode step when all kernels request the same share of shared memory.
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

/// The table rows of a shape. Each is reported as soon as it is measured, and a failure affects no
/// other.
fn cases(
    shape: &Shape,
    engine: &mut Engine<CudaBackend>,
    sizes: &Sizes,
    memory: &Memory,
    table: &mut Table,
) -> Result<(), String> {
    let name = shape.name;
    let config = shape.config().map_err(|error| error.to_string())?;
    let shard = Shard::new(&config, 0, 1).map_err(|error| error.to_string())?;
    let embedding = 2 * (shape.vocab * shape.hidden) as u64;
    let unread = if shape.tied { 0 } else { embedding };
    let weights = size::weight_bytes(&config, &shard, shape.quantization) - unread;
    let token = 4 * (shape.layers * shape.kv_heads * shape.head_dim) as u64;
    let vocab = u32::try_from(shape.vocab).unwrap_or(u32::MAX);
    let mut driver = Driver::new(engine, vocab);
    let together = (sizes.prefill / sizes.context).max(1);
    let greedy = SamplingParams::greedy();
    // Logits of random weights have no peak, so a draw chooses among as many tokens as possible.
    let nucleus = SamplingParams { top_p: 0.95, ..SamplingParams::default() };
    for &batch in sizes.batches {
        let step = driver.step_seconds(batch, sizes, together, &greedy);
        // Without graphs, the figures would be misleading.
        let step = step.and_then(|step| graphs_made(driver.engine.backend()).map(|_| step));
        let cached = u64::from(batch) * u64::from(sizes.context + sizes.steps / 2) * token;
        let read = shape.read_bytes(weights, batch) + cached;
        let words = |step: &f64| {
            let (tokens, rate) = (f64::from(batch) / step, read as f64 / step);
            let shares = memory.shares(rate);
            format!(
                "{tokens:.0} tokens/s, step {:.3} ms, {:.2} TB/s{shares}",
                step * 1e3,
                rate / 1e12
            )
        };
        table.add(
            format!("{name} decode, batch {batch}"),
            step.as_ref().map(words).map_err(Clone::clone),
        );
        let beside = |step: &Result<f64, String>, other: f64| {
            let more = step.as_ref().ok().map(|step| (other - step) * 1e6);
            let more = more.map_or(String::new(), |more| format!(", {more:+.0} us beside greedy"));
            format!("step {:.3} ms{more}", other * 1e3)
        };
        let carved = carved_seconds(&mut driver, batch, sizes, together);
        table.add(
            format!("{name} decode, batch {batch}, carveout {CARVEOUT} %"),
            carved.map(|carved| beside(&step, carved)),
        );
        let sampled = driver.step_seconds(batch, sizes, together, &nucleus);
        table.add(
            format!("{name} decode, batch {batch}, top_p {}", nucleus.top_p),
            sampled.map(|sampled| beside(&step, sampled)),
        );
        if table.is_broken {
            return Ok(());
        }
    }
    let mut others: Vec<(&str, Result<(), String>)> = Vec::new();
    others.push(("values", values::decodes_alike(name, &mut driver, sizes, table)));
    others.push(("draft", drafted(shape, &mut driver, sizes, table)));
    mixed::cases(name, &mut driver, sizes, table);
    others.push(("prefill", prefilled(shape, &mut driver, sizes, table)));
    for (what, result) in others {
        if let Err(fault) = result {
            table.add(format!("{name} {what}"), Err(fault));
        }
    }
    Ok(())
}

/// Measures a single long prompt.
fn prefilled(
    shape: &Shape,
    driver: &mut Driver<'_>,
    sizes: &Sizes,
    table: &mut Table,
) -> Result<(), String> {
    let config = shape.config().map_err(|error| error.to_string())?;
    let shard = Shard::new(&config, 0, 1).map_err(|error| error.to_string())?;
    let embedding = 2 * (shape.vocab * shape.hidden) as u64;
    // The second run counts: algorithms are chosen in the first.
    let mut took = 0.0;
    for _ in 0..2 {
        let began = Instant::now();
        let blocks = sizes.prefill.div_ceil(BLOCK_SIZE);
        let greedy = SamplingParams::greedy();
        let seqs = driver.prefill(1, (sizes.prefill, blocks), 1, &greedy)?;
        took = began.elapsed().as_secs_f64();
        driver.forget(seqs)?;
    }
    // A bf16 weight has two bytes and costs two operations, so bytes count operations per row.
    // Embedding and logits are computed for one row only.
    let unread = if shape.tied { embedding } else { 2 * embedding };
    let weights = size::weight_bytes(&config, &shard, Quantization::None) - unread;
    let flops = shape.read_bytes(weights, 1) as f64 * f64::from(sizes.prefill) / took;
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

/// Measures the cost of verifying drafts of one sequence, with nothing else in the batch.
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
    // A warm-up step, a captured one, and one replay.
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

/// The manufacturer's memory bandwidth in bytes per second, by a part of the GPU's name.
const NOMINAL: [(&str, f64); 4] =
    [("H200", 4.8e12), ("H100 80GB HBM3", 3.35e12), ("A100-SXM4-80GB", 2.04e12), ("B200", 8e12)];

/// The bandwidth of the GPU's memory: measured, and nominal where this program knows it.
struct Memory {
    measured: Result<f64, String>,
    nominal: Option<(&'static str, f64)>,
}

impl Memory {
    fn new(options: &Options, ordinal: u32, gpu: &str) -> Self {
        let measured = bandwidth(options, ordinal).map(|(copy, read)| copy.max(read));
        let nominal = NOMINAL.into_iter().find(|(name, _)| gpu.contains(name));
        Self { measured, nominal }
    }

    /// Describes `rate` as shares of both.
    fn shares(&self, rate: f64) -> String {
        let mut words = String::new();
        if let Ok(measured) = self.measured {
            words += &format!(" = {:.0} % of measured bandwidth", 100.0 * rate / measured);
        }
        if let Some((name, nominal)) = self.nominal {
            let (share, nominal) = (100.0 * rate / nominal, nominal / 1e12);
            words += &format!(", {share:.0} % of the {nominal} TB/s of an {name}");
        }
        words
    }
}

/// Returns the bytes per second of a copy, and of reading.
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
    let run = options
        .backend(ordinal, true)
        .map_err(ModelError::from)
        .and_then(|backend| {
            let memory = Memory::new(options, ordinal, &backend.describe());
            Ok((memory, shape.engine(backend, &sizes)?))
        })
        .map_err(|error| error.to_string())
        .and_then(|(memory, mut engine)| cases(shape, &mut engine, &sizes, &memory, table));
    if let Err(fault) = run {
        table.add(shape.name, Err(fault));
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
    if let Some(shape) = shapes.first() {
        let all = matrices(shape);
        steps.push(Step::new("values of products", move |table| {
            values::products_agree(options, ordinal, shape.name, &all, table);
        }));
        steps.push(Step::new("products", move |table| products(options, ordinal, shape, table)));
        steps.push(Step::new("attention", move |table| attention(options, ordinal, shape, table)));
        let linear = move |table: &mut Table| delta::speed(options, ordinal, table);
        steps.push(Step::new("linear attention", linear));
    }
    steps
}
