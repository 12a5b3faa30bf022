//! The devices of ranks: how their backends are made and their memory is divided.
//!
//! - `cpu`: whether a shard fits into a host's memory
//! - `cuda`: a GPU
use std::fmt::Debug;
use std::path::Path;
use std::time::Duration;

use kernels::backend::prelude::*;
pub use kernels::cpu::{Isa, Precision};
pub use kernels::cuda::ExchangePolicy;
use kernels::cuda::GroupSetup;
pub use kernels::cuda::capacity::bytes_text;
pub use kernels::cuda::devices::{Survey, survey_for};
pub use kernels::cuda::held::is_gpu_held;
pub use kernels::cuda::nccl::environment::prepare as prepare_nccl;
pub use kernels::process::exit_without_handlers;
use kernels::{Backend, Collective, CpuBackend, KernelError};
use shared::protocol::{Dtype, EngineConfig, Quantization};

pub use self::cuda::CudaDevice;
use crate::engine::Engine;
use crate::model::ModelError;
use crate::model::config::ModelConfig;
use crate::model::draft::DraftFiles;
use crate::model::lora::LoraFiles;
use crate::model::shard::Shard;
use crate::model::weights::Source;

mod cpu;
mod cuda;

/// Default KV cache memory on CPUs.
const CPU_KV_BYTES: u64 = 512 << 20;

/// How a shard's weights are stored, and what is loaded beside them.
#[derive(Clone, Copy, Debug)]
pub struct ShardOptions<'a> {
    /// How the weights are stored.
    pub quantization: Quantization,
    /// LoRA adapters.
    pub adapters: &'a LoraFiles,
    /// The draft model, if this rank has it.
    pub draft: Option<&'a DraftFiles>,
    /// Number of ranks known to share this host's memory.
    pub ranks_here: u32,
}

/// A device.
pub trait Device: Debug {
    /// Type of its backend.
    type Backend: Backend;

    /// Returns the data type of matrix products' activations if the coordinator asks for `asked`.
    ///
    /// # Errors
    /// [`ModelError::Dtype`] if the device does not support it.
    fn precision(&self, asked: Dtype, config: &ModelConfig) -> Result<Precision, ModelError> {
        // Most 4-bit checkpoints say float16; rounding to bf16 adds little to their error.
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

    /// Makes a separate backend for the draft model, if the device's backends serve one model each;
    /// otherwise the two models share one.
    ///
    /// # Errors
    /// [`KernelError`].
    fn draft_backend(&self) -> Result<Option<Self::Backend>, KernelError> {
        Ok(None)
    }

    /// Makes a backend exchange data through `collective` from now on.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the device cannot leave the old collective.
    fn set_collective(
        backend: &mut Self::Backend,
        collective: Box<dyn Collective>,
    ) -> Result<(), KernelError>;

    /// Lets the devices of all ranks exchange data without their hosts, if they can. Every rank
    /// must call it after each new collective.
    ///
    /// # Errors
    /// [`KernelError`].
    fn join(backend: &mut Self::Backend, setup: GroupSetup<'_>) -> Result<(), KernelError> {
        let _ = (backend, setup);
        Ok(())
    }

    /// In place of [`Device::join`], for a rank without others: waits for what an earlier group
    /// still holds.
    fn stay_alone(backend: &mut Self::Backend) {
        let _ = backend;
    }

    /// How long steps may take from now on before the device is considered hung; `None` while it
    /// loads and prepares, where the coordinator sets no such limit.
    fn set_patience(backend: &mut Self::Backend, patience: Option<Duration>) {
        let _ = (backend, patience);
    }

    /// While `alone` (weights are being loaded), the backend ignores the other ranks' state.
    fn set_alone(backend: &mut Self::Backend, alone: bool) {
        let _ = (backend, alone);
    }

    /// Checks the limits on a model and its cache that only the device has.
    ///
    /// # Errors
    /// [`ModelError::Fit`]: the size that it does not take.
    fn check_limits(
        &self,
        model: (&ModelConfig, &Shard),
        sizes: &EngineConfig,
    ) -> Result<(), ModelError> {
        let _ = (model, sizes);
        Ok(())
    }

    /// Checks, before anything is loaded, that a shard can fit.
    ///
    /// # Errors
    /// [`ModelError::Fit`]: how much memory is missing, and what would help.
    fn check_fit(
        &self,
        backend: &Self::Backend,
        source: &Source<'_>,
        beside: ShardOptions<'_>,
        sizes: &EngineConfig,
    ) -> Result<(), ModelError> {
        let _ = (backend, source, beside, sizes);
        Ok(())
    }

    /// Checks, before anything of it is given up, that a loaded engine without a cache can have
    /// larger steps.
    ///
    /// # Errors
    /// [`ModelError::Fit`]: how much memory is missing; [`ModelError::Kernel`].
    fn check_steps(
        &self,
        engine: &mut Engine<Self::Backend>,
        quantization: Quantization,
        [before, after]: [&EngineConfig; 2],
    ) -> Result<(), ModelError> {
        let _ = (engine, quantization, before, after);
        Ok(())
    }

    /// Prepares a loaded engine for measuring its memory and for serving.
    ///
    /// # Errors
    /// [`KernelError`].
    fn prepare(&self, engine: &mut Engine<Self::Backend>) -> Result<(), KernelError> {
        let _ = engine;
        Ok(())
    }

    /// Prepares an engine with a cache for decode steps of every size, so that no request waits for
    /// what is made at first use. Every rank of a replica must call it. `is_new` matters on rank 0:
    /// whether no requests are waiting for the replica.
    ///
    /// # Errors
    /// [`KernelError`].
    fn warm(&self, engine: &mut Engine<Self::Backend>, is_new: bool) -> Result<(), KernelError> {
        let _ = (engine, is_new);
        Ok(())
    }

    /// Returns the bytes that the KV cache may take; `asked` is the coordinator's setting, or 0.
    ///
    /// # Errors
    /// [`KernelError`].
    fn kv_bytes(&self, engine: &mut Engine<Self::Backend>, asked: u64) -> Result<u64, KernelError>;

    /// Whether its KV cache is in the host's memory.
    fn computes_on_host(&self) -> bool {
        false
    }

    /// Whether this error means that this process can no longer compute on the device.
    fn is_lost_by(&self, error: &KernelError) -> bool {
        let _ = error;
        false
    }
}

/// The device that a worker is to compute on.
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
    /// Number of compute threads.
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

    fn check_fit(
        &self,
        backend: &CpuBackend,
        source: &Source<'_>,
        beside: ShardOptions<'_>,
        sizes: &EngineConfig,
    ) -> Result<(), ModelError> {
        cpu::check_fit(Path::new("/"), backend, source, beside, sizes)
    }

    fn computes_on_host(&self) -> bool {
        true
    }

    fn kv_bytes(&self, _: &mut Engine<CpuBackend>, asked: u64) -> Result<u64, KernelError> {
        Ok(if asked == 0 { CPU_KV_BYTES } else { asked })
    }
}

#[cfg(test)]
mod tests {
    use kernels::cuda::CudaOptions;

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
        // No other attempt with the same model and command could succeed.
        assert!(error.is_permanent());
        assert!(error.to_string().contains("--dtype float32"), "{error}");
    }
}
