//! What a rank computes on: how its backend is made, how its memory is divided.
use std::fmt::Debug;
use std::time::{Duration, Instant};

use kernels::backend::prelude::*;
use kernels::collective::single_rank;
pub use kernels::cpu::{Isa, Precision};
pub use kernels::cuda::Exchange;
use kernels::cuda::bucket::decode_buckets;
pub use kernels::cuda::capacity::bytes_text;
use kernels::cuda::capacity::{Measured, Need, check_fit};
pub use kernels::cuda::devices::{Survey, survey_for};
pub use kernels::cuda::nccl::environment::prepare as prepare_nccl;
use kernels::cuda::{CudaBackend, CudaOptions, GroupSetup};
use kernels::weights::Int4Groups;
use kernels::{Backend, Collective, CpuBackend, KernelError};
use shared::protocol::{Dtype, EngineConfig, Quantization};

use crate::engine::{Engine, Warmed};
use crate::model::ModelError;
use crate::model::config::ModelConfig;
use crate::model::draft::DraftFiles;
use crate::model::lora::LoraFiles;
use crate::model::shard::Shard;
use crate::model::size;

/// KV cache memory on CPUs where the coordinator names none.
const CPU_KV_BYTES: u64 = 512 << 20;

/// What a shard is kept in, and with.
#[derive(Clone, Copy, Debug)]
pub struct Beside<'a> {
    /// How its weights are kept.
    pub quantization: Quantization,
    /// Adapters.
    pub adapters: &'a LoraFiles,
    /// The draft model, where this rank has it.
    pub draft: Option<&'a DraftFiles>,
}

/// A device.
pub trait Device: Debug {
    /// Its backend.
    type Backend: Backend;

    /// What matrix products take of their activations when the coordinator asks for `asked`.
    ///
    /// # Errors
    /// [`ModelError::Dtype`] when the device has no such products.
    fn precision(&self, asked: Dtype, config: &ModelConfig) -> Result<Precision, ModelError> {
        // Most checkpoints of 4 bits say float16; what rounding to bf16 adds is little beside
        // theirs.
        let is_packed = config.quantised.is_some_and(|quantised| quantised.packed.is_some());
        Ok(match asked {
            Dtype::Auto if config.is_bf16 || is_packed => Precision::Bfloat16,
            Dtype::Auto | Dtype::Float32 => Precision::Float32,
            Dtype::Bfloat16 => Precision::Bfloat16,
        })
    }

    /// Makes a backend on the executor's thread.
    ///
    /// # Errors
    /// [`KernelError`].
    fn backend(
        &self,
        precision: Precision,
        collective: Box<dyn Collective>,
    ) -> Result<Self::Backend, KernelError>;

    /// A backend of its own for the draft model, where that of the model it drafts for is made for
    /// one model; else they share one.
    ///
    /// # Errors
    /// [`KernelError`].
    fn draft_backend(&self) -> Result<Option<Self::Backend>, KernelError> {
        Ok(None)
    }

    /// Exchanges data through `collective` from now on.
    ///
    /// # Errors
    /// [`KernelError::Device`] when the device does not let go of the old one.
    fn set_collective(
        backend: &mut Self::Backend,
        collective: Box<dyn Collective>,
    ) -> Result<(), KernelError>;

    /// Has the devices of all ranks exchange data without their hosts, where they can: called by
    /// every rank behind each new collective.
    ///
    /// # Errors
    /// [`KernelError`].
    fn join(backend: &mut Self::Backend, setup: GroupSetup<'_>) -> Result<(), KernelError> {
        let _ = (backend, setup);
        Ok(())
    }

    /// While `alone` (weights are being loaded), the backend does not watch the other ranks.
    fn set_alone(backend: &mut Self::Backend, alone: bool) {
        let _ = (backend, alone);
    }

    /// Says before anything is loaded that a shard cannot fit.
    ///
    /// # Errors
    /// [`ModelError::Fit`]: how much is missing, and what would do.
    fn check_fit(
        &self,
        backend: &Self::Backend,
        config: &ModelConfig,
        shard: &Shard,
        beside: Beside<'_>,
        sizes: &EngineConfig,
    ) -> Result<(), ModelError> {
        let _ = (backend, config, shard, beside, sizes);
        Ok(())
    }

    /// Makes a loaded engine ready to be measured and to serve.
    ///
    /// # Errors
    /// [`KernelError`].
    fn prepare(&self, engine: &mut Engine<Self::Backend>) -> Result<(), KernelError> {
        let _ = engine;
        Ok(())
    }

    /// Makes an engine that has its cache ready for decode steps of every size, so that no request
    /// waits for what is made at first use; every rank of a replica calls it. `is_new`: of rank 0,
    /// no requests wait for it.
    ///
    /// # Errors
    /// [`KernelError`].
    fn warm(&self, engine: &mut Engine<Self::Backend>, is_new: bool) -> Result<(), KernelError> {
        let _ = (engine, is_new);
        Ok(())
    }

    /// Bytes that the KV cache may take; `asked` is what the coordinator says, 0 when nothing.
    ///
    /// # Errors
    /// [`KernelError`].
    fn kv_bytes(&self, engine: &mut Engine<Self::Backend>, asked: u64) -> Result<u64, KernelError>;

    /// Whether its KV cache is in the host's own memory.
    fn computes_on_host(&self) -> bool {
        false
    }

    /// Whether nothing can be computed on it any more by this process, after this error.
    fn is_lost_by(&self, error: &KernelError) -> bool {
        let _ = error;
        false
    }
}

/// What a worker was told to compute on.
#[derive(Clone, Debug)]
pub enum DeviceChoice {
    /// CPU cores.
    Cpu(CpuDevice),
    /// A GPU.
    Cuda(CudaDevice),
}

/// CPU cores.
#[derive(Clone, Copy, Debug)]
pub struct CpuDevice {
    /// Compute threads.
    pub threads: usize,
}

impl Device for CpuDevice {
    type Backend = CpuBackend;

    fn backend(
        &self,
        precision: Precision,
        collective: Box<dyn Collective>,
    ) -> Result<CpuBackend, KernelError> {
        let backend = CpuBackend::new(self.threads, precision, collective)?;
        tracing::info!(device = backend.describe(), "computing");
        Ok(backend)
    }

    fn set_collective(
        backend: &mut CpuBackend,
        collective: Box<dyn Collective>,
    ) -> Result<(), KernelError> {
        backend.set_collective(collective);
        Ok(())
    }

    fn computes_on_host(&self) -> bool {
        true
    }

    fn kv_bytes(&self, _: &mut Engine<CpuBackend>, asked: u64) -> Result<u64, KernelError> {
        Ok(if asked == 0 { CPU_KV_BYTES } else { asked })
    }
}

/// One GPU.
#[derive(Clone, Debug)]
pub struct CudaDevice {
    /// Which, and with what.
    pub options: CudaOptions,
    /// The share of its memory that may be in use altogether.
    pub memory_utilization: f64,
    /// What was free when it was chosen, in bytes.
    pub memory_free: u64,
    /// How long decode steps may be captured for before the first request.
    pub warmup: Duration,
    /// Its own identity, as `GPU-01234567-89ab-cdef-0123-456789abcdef`.
    pub uuid: String,
}

impl CudaDevice {
    fn measure(&self, backend: &CudaBackend) -> Result<Measured, KernelError> {
        let (free, total) = backend.memory()?;
        Ok(Measured { total, free, utilization: self.memory_utilization })
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
        // Recorded steps are of one model.
        CudaBackend::new(self.options.clone(), single_rank()).map(Some)
    }

    fn set_collective(
        backend: &mut CudaBackend,
        collective: Box<dyn Collective>,
    ) -> Result<(), KernelError> {
        backend.set_collective(collective)
    }

    fn join(backend: &mut CudaBackend, setup: GroupSetup<'_>) -> Result<(), KernelError> {
        let joined = backend.join(setup)?;
        let (algorithm, reason, took) = (joined.algorithm, joined.reason, joined.took);
        tracing::info!(algorithm, reason, ?took, "GPUs exchange data");
        if let Some(missing) = joined.missing {
            tracing::info!(missing, "GPUs could exchange data faster");
        }
        if let Some(unlike) = joined.unlike {
            tracing::warn!(unlike, "GPUs of one replica are of different kinds");
        }
        Ok(())
    }

    fn set_alone(backend: &mut CudaBackend, alone: bool) {
        backend.set_alone(alone);
    }

    fn check_fit(
        &self,
        backend: &CudaBackend,
        config: &ModelConfig,
        shard: &Shard,
        Beside { quantization, adapters, draft }: Beside<'_>,
        sizes: &EngineConfig,
    ) -> Result<(), ModelError> {
        let is_packed = config.quantised.is_some_and(|quantised| quantised.packed.is_some());
        let widens = (quantization == Quantization::Int8 || is_packed)
            && backend.widens_int8(sizes.max_num_batched_tokens as usize);
        let keeps_int4 = |groups: &Int4Groups, is_stack: bool| backend.keeps_int4(groups, is_stack);
        let tokens = sizes.max_num_batched_tokens as usize;
        let need = |shard: &Shard| -> Result<Need, ModelError> {
            let (matrices, room) = adapters.bytes(config, shard, tokens)?;
            let weights = size::weight_bytes(config, shard, quantization, &keeps_int4) + matrices;
            let activations = size::activation_bytes(config, shard, widens, sizes) + room;
            let (drafting, drafted) = draft.map_or((0, 0), |draft| draft.step_bytes(sizes));
            Ok(Need {
                degree: u32::try_from(shard.degree).unwrap_or(u32::MAX),
                weights: weights + draft.map_or(0, |draft| draft.weight_bytes(&keeps_int4)),
                activations: activations + drafting,
                one_sequence: size::sequence_bytes(config, shard, sizes) + drafted,
            })
        };
        let own = u32::try_from(shard.degree).unwrap_or(u32::MAX);
        let others: Vec<Need> = (own.saturating_add(1)..=64)
            .filter_map(|degree| need(&Shard::new(config, 0, degree).ok()?).ok())
            .collect();
        check_fit(&self.measure(backend)?, &need(shard)?, &others).map_err(ModelError::Fit)
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
        engine.backend().set_alone(false);
        profiled
    }

    fn warm(&self, engine: &mut Engine<CudaBackend>, is_new: bool) -> Result<(), KernelError> {
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
        {
            tracing::warn!(reason, "decode steps are captured again");
            warmed = engine.warm(&rows, patience);
        }
        let Warmed { kinds, of } = match warmed {
            // One rank goes on without graphs: the next step gives them up. Several form anew.
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

    fn kv_bytes(&self, engine: &mut Engine<CudaBackend>, asked: u64) -> Result<u64, KernelError> {
        let free = self.measure(engine.backend())?.kv_bytes();
        Ok(if asked == 0 { free } else { free.min(asked) })
    }

    fn is_lost_by(&self, error: &KernelError) -> bool {
        // A context that failed once fails for ever, and one short of memory in a step would be
        // short again. What the other ranks did is no fault of this device.
        match error {
            KernelError::Device(_) | KernelError::Unsupported(_) => true,
            KernelError::OutOfMemory { .. } => true,
            KernelError::Shape { .. } | KernelError::Collective(_) | KernelError::Again(_) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn auto_is_the_checkpoints_precision_and_gpus_refuse_float32() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo");
        let bf16 = ModelConfig::load(&folder).unwrap();
        assert!(bf16.is_bf16);
        let other = ModelConfig { is_bf16: false, ..bf16.clone() };
        let cpu = CpuDevice { threads: 1 };
        let on_cpu = |asked, config| cpu.precision(asked, config).unwrap();
        assert_eq!(on_cpu(Dtype::Auto, &bf16), Precision::Bfloat16);
        assert_eq!(on_cpu(Dtype::Auto, &other), Precision::Float32);
        let packed = folder.join("../../tests/models/llama-gptq");
        let packed = ModelConfig { is_bf16: false, ..ModelConfig::load(&packed).unwrap() };
        assert_eq!(on_cpu(Dtype::Auto, &packed), Precision::Bfloat16);
        for config in [&bf16, &other] {
            assert_eq!(on_cpu(Dtype::Float32, config), Precision::Float32);
            assert_eq!(on_cpu(Dtype::Bfloat16, config), Precision::Bfloat16);
        }
        let gpu = CudaDevice {
            options: CudaOptions::default(),
            memory_utilization: 0.9,
            memory_free: 0,
            warmup: Duration::ZERO,
            uuid: String::new(),
        };
        assert_eq!(gpu.precision(Dtype::Auto, &other).unwrap(), Precision::Bfloat16);
        assert_eq!(gpu.precision(Dtype::Bfloat16, &other).unwrap(), Precision::Bfloat16);
        let error = gpu.precision(Dtype::Float32, &bf16).unwrap_err();
        // No other attempt with the same model and order could succeed.
        assert!(error.is_permanent());
        assert!(error.to_string().contains("--dtype float32"), "{error}");
    }
}
