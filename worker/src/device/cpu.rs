//! CPU cores: whether a rank's share of a model fits into the memory of its host.
//!
//! Only what is certainly taken counts: weights as packed, and a step's buffers. Pages of weight
//! files do not, since the system takes them back. The KV cache is checked when its size is known.
use std::path::Path;

use kernels::CpuBackend;
use kernels::backend::prelude::*;
use kernels::weights::Compact;
use shared::host::{available_memory, most_memory, total_memory};
use shared::protocol::{EngineConfig, Quantization};

use super::{ShardOptions, bytes_text};
use crate::model::shard::Shard;
use crate::model::weights::{self, Source};
use crate::model::{ModelError, size};

/// Memory that a rank takes from its host.
#[derive(Clone, Copy, Debug)]
struct HostNeed {
    /// Size of its weights, adapters and draft model included, in bytes.
    weights: u64,
    /// Size of the buffers for its largest step, in bytes.
    activations: u64,
}

impl HostNeed {
    fn bytes(self) -> u64 {
        self.weights.saturating_add(self.activations)
    }
}

/// Checks that a shard fits into what the host, whose files are below `root`, has left. Ranks of
/// the same host load at any time: each counts only itself there, as the others may have their
/// weights already. Together they must fit into all that the host has.
///
/// # Errors
/// How much memory is needed, how much there is, and what would help: [`ModelError::Fit`] if it can
/// never fit here, [`ModelError::FitsLater`] if too little is free now.
pub(super) fn check_fit(
    root: &Path,
    backend: &CpuBackend,
    source: &Source<'_>,
    ShardOptions { quantization, adapters, draft, ranks_here }: ShardOptions<'_>,
    sizes: &EngineConfig,
) -> Result<(), ModelError> {
    let Source { config, shard, .. } = *source;
    let Some(available) = available_memory(root) else { return Ok(()) };
    let keeps = |form: &Compact, is_stack: bool| backend.keeps(form, is_stack);
    let drafted = draft.map_or(Ok(0), |draft| draft.weight_bytes(&keeps))?;
    let tables = size::table_bytes(config, sizes);
    let need = |shard: &Shard| -> Result<HostNeed, ModelError> {
        let (matrices, _) = adapters.bytes(config, shard, 0)?;
        let source = Source { shard, ..*source };
        let kept = weights::kept_bytes(&source, quantization, &keeps)?;
        Ok(HostNeed {
            weights: kept + matrices + drafted + tables,
            activations: size::buffer_bytes(config, shard, sizes),
        })
    };
    let own = need(shard)?;
    let smaller = match quantization == Quantization::None && config.quantised.is_none() {
        true => "a quantised checkpoint, or --quantization int8, takes less",
        false => "a checkpoint with fewer bits per weight takes less",
    };
    if own.bytes() > available {
        let of = |rank, degree| -> Result<u64, ModelError> {
            Ok(need(&Shard::new(config, rank, degree)?)?.bytes())
        };
        let fits = |degree: u32| {
            (0..degree).all(|rank| of(rank, degree).is_ok_and(|bytes| bytes <= available))
        };
        let degree = u32::try_from(shard.degree).unwrap_or(u32::MAX);
        let mut larger = degree.saturating_add(1)..=64;
        let advice = match larger.find(|degree| fits(*degree)) {
            Some(degree) => format!("--tensor-parallel {degree} over as many hosts would fit"),
            None => "no tensor-parallel degree of this model fits hosts like this one".to_owned(),
        };
        let never = most_memory(root).is_some_and(|most| own.bytes() > most);
        let (why, error): (_, fn(String) -> ModelError) = match never {
            true => ("the model does not fit into this host's memory", ModelError::Fit),
            false => ("too little of this host's memory is free now", ModelError::FitsLater),
        };
        return Err(error(format!(
            "{why}: {} are needed (weights {}, activations {}), but {} are left; {advice}; \
             {smaller}{}",
            bytes_text(own.bytes()),
            bytes_text(own.weights),
            bytes_text(own.activations),
            bytes_text(available),
            size::advice_on_states(config, shard, sizes),
        )));
    }
    let most = own.bytes().saturating_mul(u64::from(ranks_here));
    let Some(total) = total_memory(root).filter(|total| ranks_here > 1 && most > *total) else {
        return Ok(());
    };
    // Shares differ, and one rank alone has the draft model.
    let of = |rank| -> Result<u64, ModelError> {
        Ok(need(&Shard::new(config, rank, ranks_here)?)?.bytes().saturating_sub(drafted))
    };
    let together = (0..ranks_here).map(of).sum::<Result<u64, ModelError>>()?;
    if together <= total {
        return Ok(());
    }
    Err(ModelError::Fit(format!(
        "the model does not fit into this host's memory: its {ranks_here} ranks here need {} \
         together, but the host has {} in all; spread them over more hosts; {smaller}{}",
        bytes_text(together),
        bytes_text(total),
        size::advice_on_states(config, shard, sizes),
    )))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::net::TcpListener;
    use std::path::PathBuf;

    use kernels::collective::single_rank;
    use kernels::{Collective, KernelError};
    use shared::ids::{BlockId, Epoch, ReplicaId, SeqId, StepId};
    use shared::model_config::ConfigOverrides;
    use shared::protocol::{
        CollectiveSpec, Drafts, Dtype, Form, KvCacheDtype, Lora, NewSequence, SequenceStep,
        StepPlan,
    };
    use shared::sampling::SamplingParams;
    use tempfile::TempDir;

    use super::super::{CpuDevice, Device, Precision};
    use super::*;
    use crate::engine::Engine;
    use crate::engine_rank::EngineRank;
    use crate::model::config::ModelConfig;
    use crate::model::lora::LoraFiles;
    use crate::model::safetensors::WeightFiles;
    use crate::rank::{AbortSlot, EmptyStepSource, FormObserver, Rank as _};

    const CPU: CpuDevice = CpuDevice { threads: 1 };
    const SIZES: EngineConfig = EngineConfig {
        block_size: 16,
        max_model_len: 64,
        max_num_seqs: 4,
        max_num_batched_tokens: 32,
        kv_cache_bytes: 1 << 20,
        swap_bytes: 0,
        kv_cache_dtype: KvCacheDtype::Auto,
        prefix_states: 0,
    };

    fn demo() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo")
    }

    /// The files of a host with so many bytes of memory, rounded up to KiB.
    fn host(total: u64, available: u64) -> TempDir {
        let root = tempfile::tempdir().unwrap();
        let [total, available] = [total, available].map(|bytes| bytes.div_ceil(1024));
        let text = format!("MemTotal: {total} kB\nMemAvailable: {available} kB\n");
        fs::create_dir(root.path().join("proc")).unwrap();
        fs::write(root.path().join("proc/meminfo"), text).unwrap();
        root
    }

    /// CPU cores of a host with these files.
    #[derive(Debug)]
    struct SmallHost(TempDir);

    impl Device for SmallHost {
        type Backend = CpuBackend;

        fn backend(
            &self,
            precision: Precision,
            collective: Box<dyn Collective>,
        ) -> Result<CpuBackend, KernelError> {
            CPU.backend(precision, collective)
        }

        fn set_collective(
            backend: &mut CpuBackend,
            collective: Box<dyn Collective>,
        ) -> Result<(), KernelError> {
            CpuDevice::set_collective(backend, collective)
        }

        fn check_fit(
            &self,
            backend: &CpuBackend,
            source: &Source<'_>,
            beside: ShardOptions<'_>,
            sizes: &EngineConfig,
        ) -> Result<(), ModelError> {
            check_fit(self.0.path(), backend, source, beside, sizes)
        }

        fn kv_bytes(
            &self,
            engine: &mut Engine<CpuBackend>,
            asked: u64,
        ) -> Result<u64, KernelError> {
            CPU.kv_bytes(engine, asked)
        }
    }

    /// Whether weights are being loaded.
    struct Loading(bool);

    impl FormObserver for Loading {
        fn progress(&mut self, _: u64, _: u64) {
            self.0 = true;
        }

        fn group_id(&mut self, _: Vec<u8>) {}
    }

    /// The demo model on one rank.
    fn form() -> Form {
        Form {
            epoch: Epoch(1),
            replica: ReplicaId(0),
            rank: 0,
            world_size: 1,
            reduction_ranks: 1,
            config_overrides: ConfigOverrides::default(),
            dtype: Dtype::Auto,
            quantization: Quantization::None,
            lora: Lora::default(),
            draft_model: None,
            collective: CollectiveSpec::None,
            collective_timeout_ms: 30_000,
            step_timeout_ms: 60_000,
            model: demo().to_str().unwrap().to_owned(),
            engine: SIZES,
        }
    }

    /// It is alone and samples nothing, so it exchanges nothing: it looks between its layers.
    #[test]
    fn a_step_does_not_go_on_when_its_epoch_is_over() {
        let mut rank = EngineRank::new(CPU, TcpListener::bind("127.0.0.1:0").unwrap());
        let abort = AbortSlot::default();
        rank.form(&form(), &abort, &mut Loading(false)).unwrap();
        rank.start(2, 0).unwrap();
        let chunk = |start: u32, new_blocks: Vec<BlockId>| SequenceStep {
            seq: SeqId(1),
            start,
            count: 8,
            new_blocks,
            sample: false,
            masked: false,
            drafts: Drafts::none(),
        };
        let new = NewSequence {
            seq: SeqId(1),
            tokens: vec![1; 20],
            num_prompt: 20,
            adapter: 0,
            sampling: SamplingParams::greedy(),
        };
        let mut step = |number: u64, admitted: Vec<NewSequence>, share: SequenceStep| {
            let (epoch, step, sequences) = (Epoch(1), StepId(number), vec![share]);
            let plan = StepPlan { epoch, step, admitted, sequences, ..StepPlan::default() };
            rank.step(&plan, &mut EmptyStepSource, &mut Vec::new())
        };
        assert!(step(1, vec![new], chunk(0, vec![BlockId(0)])).is_ok());
        abort.abort(Epoch(1));
        let error = step(2, Vec::new(), chunk(8, Vec::new())).unwrap_err();
        assert!(error.contains("aborted"), "{error}");
    }

    #[test]
    fn a_model_beyond_the_hosts_memory_is_refused_before_it_is_loaded() {
        let form = form();
        let formed = |total: u64, available: u64| {
            let device = SmallHost(host(total, available));
            let mut rank = EngineRank::new(device, TcpListener::bind("127.0.0.1:0").unwrap());
            let mut loading = Loading(false);
            let formed = rank.form(&form, &AbortSlot::default(), &mut loading);
            rank.release();
            (formed, loading.0)
        };
        // Its files have nearly 6 MB.
        for (total, is_permanent) in [(4 << 20, true), (1 << 40, false)] {
            let (refused, is_loading) = formed(total, 3 << 20);
            let error = refused.unwrap_err();
            assert!(error.permanent == is_permanent && !is_loading, "{error}");
        }
        let (loaded, is_loading) = formed(1 << 40, 1 << 30);
        assert!(loaded.is_ok_and(|ready| ready.weight_bytes > 5 << 20) && is_loading);
    }

    #[test]
    fn a_rank_needs_what_it_keeps_and_all_ranks_of_a_host_need_what_it_has() {
        let (config, files) =
            (ModelConfig::load(&demo()).unwrap(), WeightFiles::open(&demo()).unwrap());
        let backend = CPU.backend(Precision::Bfloat16, single_rank()).unwrap();
        let shards = [(0, 1), (0, 2), (1, 2)].map(|(rank, degree)| {
            let shard = Shard::new(&config, rank, degree).unwrap();
            let source = Source { files: &files, config: &config, shard: &shard };
            let kept = weights::kept_bytes(&source, Quantization::None, &|_, _| true).unwrap();
            let beside =
                size::table_bytes(&config, &SIZES) + size::buffer_bytes(&config, &shard, &SIZES);
            (shard, kept + beside)
        });
        let [(whole, all), (first, own), (_, other)] = shards;
        let check = |shard: &Shard, ranks_here, total, available| {
            let source = Source { files: &files, config: &config, shard };
            let (quantization, adapters) = (Quantization::None, &LoraFiles::default());
            let beside = ShardOptions { quantization, adapters, draft: None, ranks_here };
            let root = host(total, available);
            let checked = check_fit(root.path(), &backend, &source, beside, &SIZES);
            checked.map_err(|error| error.to_string())
        };
        assert_eq!(check(&whole, 1, all, all), Ok(()));
        let error = check(&whole, 1, 1 << 40, all - 1024).unwrap_err();
        assert!(error.contains("--tensor-parallel 2 over as many hosts would fit"), "{error}");
        assert!(error.contains("--quantization int8") && !error.contains('\n'), "{error}");
        let error = check(&whole, 1, 1 << 40, 0).unwrap_err();
        assert!(error.contains("no tensor-parallel degree"), "{error}");
        // The other rank has its weights, and leaves room for this one's.
        assert_eq!(check(&first, 2, own + other, own), Ok(()));
        let error = check(&first, 2, own + other - 1024, own).unwrap_err();
        assert!(error.contains("its 2 ranks here need "), "{error}");
        assert_eq!(check(&first, 1, own, own), Ok(()), "the other is elsewhere");
        // A system that does not say what it has.
        let nothing = tempfile::tempdir().unwrap();
        let source = Source { files: &files, config: &config, shard: &whole };
        let (quantization, adapters) = (Quantization::None, &LoraFiles::default());
        let beside = ShardOptions { quantization, adapters, draft: None, ranks_here: 1 };
        assert!(check_fit(nothing.path(), &backend, &source, beside, &SIZES).is_ok());
    }
}
