//! A GPU: its memory, and what it prepares before the first request.
use std::time::{Duration, Instant};

use kernels::backend::prelude::*;
use kernels::collective::single_rank;
use kernels::cuda::bucket::decode_buckets;
use kernels::cuda::capacity::{
    MeasuredMemory, MemoryNeed, allocated_bytes, check_fit, check_steps, graph_bytes,
};
use kernels::cuda::{CudaBackend, CudaOptions, GroupSetup};
use kernels::weights::Compact;
use kernels::{Collective, KernelError};
use shared::protocol::{Dtype, EngineConfig, Quantization};

use super::{Device, Precision, ShardOptions};
use crate::engine::{Engine, WarmUp};
use crate::model::ModelError;
use crate::model::config::ModelConfig;
use crate::model::shard::Shard;
use crate::model::size;
use crate::model::weights::{self, KeptSizes, Source};

/// One GPU.
#[derive(Clone, Debug)]
pub struct CudaDevice {
    /// GPU to use, and how.
    pub options: CudaOptions,
    /// Fraction of its memory that may be in use in total.
    pub memory_utilization: f64,
    /// Free memory when it was chosen, in bytes.
    pub memory_free: u64,
    /// How long decode steps may be captured before the first request.
    pub warmup: Duration,
    /// Its UUID, such as `GPU-01234567-89ab-cdef-0123-456789abcdef`.
    pub uuid: String,
}

impl CudaDevice {
    /// Has all products planned that steps will make, while there is memory for what that loads.
    fn plan(&self, engine: &mut Engine<CudaBackend>) -> Result<(), KernelError> {
        let began = Instant::now();
        let limit = self.warmup / 2;
        let mut products = engine.backend().plan_products(limit)?;
        if let Some(draft) = engine.draft_backend() {
            products += draft.plan_products(limit.saturating_sub(began.elapsed()))?;
        }
        if let Some(reason) = engine.backend().take_product_fault() {
            tracing::warn!(reason, "prompts are slower than they could be");
        }
        if products > 0 {
            tracing::info!(products, took = ?began.elapsed(), "matrix products planned");
        }
        Ok(())
    }

    /// Captures the decode steps of every size.
    fn capture(&self, engine: &mut Engine<CudaBackend>, is_new: bool) -> Result<(), KernelError> {
        if !engine.backend().captures() {
            return Ok(());
        }
        let began = Instant::now();
        let sizes = engine.config();
        let rows = decode_buckets(sizes.max_num_seqs.min(sizes.max_num_batched_tokens));
        let patience = if is_new { self.warmup } else { Duration::ZERO };
        let mut warmed = engine.warm(&rows, patience);
        if let Err(KernelError::Again(reason)) = &warmed
            && !engine.backend().samples_everywhere()
            && !engine.backend().is_short_of_memory()
        {
            tracing::warn!(reason, "decode steps are captured again");
            warmed = engine.warm(&rows, patience);
        }
        let WarmUp { kinds, of } = match warmed {
            // One rank goes on: the next step gives up what failed, or waits for memory. Several
            // form anew.
            Err(KernelError::Again(reason)) if !engine.backend().samples_everywhere() => {
                tracing::warn!(reason, "decode steps are not captured");
                return Ok(());
            }
            warmed => warmed?,
        };
        let (graphs, took) = (engine.backend().num_graphs(), began.elapsed());
        if kinds > 0 {
            tracing::info!(graphs, of, ?took, "decode steps captured");
        }
        Ok(())
    }

    /// Measures the memory for a model of so many layers.
    fn measure(
        &self,
        backend: &CudaBackend,
        layers: usize,
        sizes: &EngineConfig,
    ) -> Result<MeasuredMemory, KernelError> {
        let (free, total) = backend.memory()?;
        let rows = sizes.max_num_seqs.min(sizes.max_num_batched_tokens);
        let graphs = match self.options.graphs {
            true => graph_bytes(layers, rows, backend.world_size()),
            false => 0,
        };
        Ok(MeasuredMemory { total, free, utilization: self.memory_utilization, graphs })
    }
}

fn warn_of_left(backend: &mut CudaBackend) {
    if let Some(reason) = backend.take_left_behind() {
        tracing::warn!(reason, "an exchange that is over is not released yet");
    }
}

impl Device for CudaDevice {
    type Backend = CudaBackend;

    fn precision(&self, asked: Dtype, _: &ModelConfig) -> Result<Precision, ModelError> {
        if asked == Dtype::Float32 {
            let message = "--dtype float32: matrix products on GPUs are bfloat16; choose auto or \
                           bfloat16, or compute on CPUs (--device cpu)";
            return Err(ModelError::Dtype(message.to_owned()));
        }
        Ok(Precision::Bfloat16)
    }

    fn backend(
        &self,
        _: Precision,
        collective: Box<dyn Collective>,
    ) -> Result<CudaBackend, KernelError> {
        let backend = CudaBackend::new(self.options.clone(), collective)?;
        tracing::info!(device = backend.describe(), "computing");
        Ok(backend)
    }

    fn draft_backend(&self) -> Result<Option<CudaBackend>, KernelError> {
        // Recorded steps belong to one model.
        CudaBackend::new(self.options.clone(), single_rank()).map(Some)
    }

    fn set_collective(
        backend: &mut CudaBackend,
        collective: Box<dyn Collective>,
    ) -> Result<(), KernelError> {
        backend.set_collective(collective)
    }

    fn join(backend: &mut CudaBackend, setup: GroupSetup<'_>) -> Result<(), KernelError> {
        let joined = backend.join(setup);
        warn_of_left(backend);
        let joined = joined?;
        let (algorithm, reason, took) = (joined.algorithm, joined.reason, joined.took);
        tracing::info!(algorithm, reason, ?took, "GPUs exchange data");
        match joined.missing {
            // Steps wait for the host's memory twice a layer, and are not graphs.
            Some(missing) if algorithm == "host" => {
                tracing::warn!(missing, "GPUs could exchange data faster");
            }
            Some(missing) => tracing::info!(missing, "GPUs could exchange data faster"),
            None => {}
        }
        if let Some(unlike) = joined.unlike {
            tracing::warn!(unlike, "GPUs of one replica are of different kinds");
        }
        Ok(())
    }

    fn stay_alone(backend: &mut CudaBackend) {
        backend.await_left();
        warn_of_left(backend);
    }

    fn set_patience(backend: &mut CudaBackend, patience: Option<Duration>) {
        backend.set_patience(patience);
    }

    fn set_alone(backend: &mut CudaBackend, alone: bool) {
        backend.set_alone(alone);
    }

    fn check_limits(
        &self,
        (config, shard): (&ModelConfig, &Shard),
        sizes: &EngineConfig,
    ) -> Result<(), ModelError> {
        let cache = shard.kv_shape(config, sizes, 1);
        let latents = config.latent.map_or(Ok(()), |latent| {
            CudaBackend::check_latents(latent.rank, latent.width(), latent.plain)
        });
        let (attention, windows) = (shard.attention(config), config.windows());
        latents
            .and_then(|()| CudaBackend::check_attention(&attention, &windows, &cache))
            .map_err(ModelError::Fit)
    }

    fn check_fit(
        &self,
        backend: &CudaBackend,
        source: &Source<'_>,
        ShardOptions { quantization, adapters, draft, .. }: ShardOptions<'_>,
        sizes: &EngineConfig,
    ) -> Result<(), ModelError> {
        let Source { config, shard, .. } = *source;
        let tokens = sizes.max_num_batched_tokens as usize;
        let widens_any = backend.widens_int8(tokens);
        let is_quantised = quantization == Quantization::Int8 || config.quantised.is_some();
        let widens = is_quantised && widens_any;
        let keeps = |form: &Compact, is_stack: bool| backend.keeps(form, is_stack);
        let configs = [config].into_iter().chain(draft.map(|draft| draft.model().0));
        // Cosines and sines are apart.
        let tables = configs.flat_map(|config| [size::table_bytes(config, sizes) / 2; 2]);
        let drafted_weights = draft.map(|draft| draft.weight_sizes(&keeps)).transpose()?;
        let KeptSizes { matrices, vectors } = drafted_weights.unwrap_or_default();
        let beside: Vec<u64> = tables.chain(matrices).chain(vectors).collect();
        let need = |shard: &Shard| -> Result<MemoryNeed, ModelError> {
            let (stacks, room) = adapters.sizes(config, shard, tokens)?;
            let source = Source { shard, ..*source };
            let KeptSizes { matrices, vectors } =
                weights::kept_sizes(&source, quantization, &keeps)?;
            let own = matrices.into_iter().chain(vectors).chain(stacks);
            let activations = size::activation_bytes(config, shard, widens, sizes) + room;
            let (drafting, drafted) =
                draft.map_or((0, 0), |draft| draft.step_bytes(sizes, widens_any));
            Ok(MemoryNeed {
                degree: u32::try_from(shard.degree).unwrap_or(u32::MAX),
                weights: allocated_bytes(own.chain(beside.iter().copied())),
                activations: activations + drafting,
                one_sequence: allocated_bytes([
                    size::sequence_bytes(config, shard, sizes),
                    drafted,
                ]),
            })
        };
        let memory = self.measure(backend, config.num_layers, sizes)?;
        let own = need(shard)?;
        if own.bytes() <= memory.kv_bytes() {
            return Ok(());
        }
        // Ranks of one degree can keep different forms: the columns that they take differ.
        let most = |degree: u32| {
            let of = |rank| need(&Shard::new(config, rank, degree)?);
            let all: Vec<MemoryNeed> = (0..degree).map(of).collect::<Result<_, _>>().ok()?;
            all.into_iter().max_by_key(MemoryNeed::bytes)
        };
        let larger = own.degree.saturating_add(1)..=64;
        let fitting = larger.filter_map(most).find(|need| need.bytes() <= memory.kv_bytes());
        check_fit(&memory, &own, fitting.as_slice()).map_err(|message| {
            ModelError::Fit(message + &size::advice_on_states(config, shard, sizes))
        })
    }

    fn check_steps(
        &self,
        engine: &mut Engine<CudaBackend>,
        quantization: Quantization,
        sizes: [&EngineConfig; 2],
    ) -> Result<(), ModelError> {
        let layers = engine.num_layers();
        let memory = self.measure(engine.backend(), layers, sizes[1])?;
        let [before, after] = sizes.map(|sizes| {
            let widens = engine.backend().widens_int8(sizes.max_num_batched_tokens as usize);
            engine.step_bytes(sizes, quantization, widens)
        });
        let one_sequence = allocated_bytes([after.1]);
        check_steps(&memory, before.0, after.0, one_sequence).map_err(ModelError::Fit)
    }

    fn prepare(&self, engine: &mut Engine<CudaBackend>) -> Result<(), KernelError> {
        // Other ranks may take longer to load.
        engine.backend().set_alone(true);
        let profiled = engine.profile().and_then(|()| {
            if let Some(draft) = engine.draft_backend() {
                draft.set_alone(false);
                draft.settle()?;
            }
            engine.backend().settle()
        });
        let planned = profiled.and_then(|()| self.plan(engine));
        engine.backend().set_alone(false);
        planned
    }

    fn warm(&self, engine: &mut Engine<CudaBackend>, is_new: bool) -> Result<(), KernelError> {
        self.capture(engine, is_new)?;
        if self.options.graphs
            && let Some(reason) = engine.backend().given_up()
        {
            tracing::warn!(reason, "decode steps are slower than they could be");
        }
        Ok(())
    }

    fn kv_bytes(&self, engine: &mut Engine<CudaBackend>, asked: u64) -> Result<u64, KernelError> {
        let (layers, sizes) = (engine.num_layers(), engine.config().clone());
        let free = self.measure(engine.backend(), layers, &sizes)?.kv_bytes();
        Ok(if asked == 0 { free } else { free.min(asked) })
    }

    fn is_lost_by(&self, error: &KernelError) -> bool {
        // A context that failed once always fails, and a device that runs out of memory in a step
        // would do so again. Failures of other ranks are not this device's.
        match error {
            KernelError::Device(_) | KernelError::Unsupported(_) => true,
            KernelError::OutOfMemory { .. } => true,
            KernelError::Shape { .. } | KernelError::Collective(_) | KernelError::Again(_) => false,
        }
    }
}
