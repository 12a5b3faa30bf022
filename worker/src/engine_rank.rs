//! A rank on some device: connects the collective a coordinator asks for, loads its shard, runs the
//! engine over the device's backend. Weights outlive the epoch: a rank that is formed again with
//! the same shard only connects anew.
use std::fmt;
use std::mem::ManuallyDrop;
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kernels::collective::{
    AbortAll, SharedMemoryOptions, TcpOptions, shared_memory, single_rank, tcp,
};
use kernels::cuda::{GroupSetup, Relay};
use kernels::{Backend as _, Collective, CollectiveError, KernelError};
use shared::host::available_memory;
use shared::ids::Epoch;
use shared::model_identity::ModelIdentity;
use shared::protocol::{
    CollectiveSpec, Dtype, Form, Lora, Quantization, SequenceOutput, StepPlan, StepTimings,
};

use crate::device::{Beside, Device, bytes_text};
use crate::engine::{Engine, EngineError};
use crate::model::ModelError;
use crate::model::config::ModelConfig;
use crate::model::decoder::Decoder;
use crate::model::draft::DraftFiles;
use crate::model::lora::LoraFiles;
use crate::model::safetensors::WeightFiles;
use crate::model::shard::Shard;
use crate::model::weights::{self, Source};
use crate::rank::{
    AbortSlot, Exchanged, FormError, FormNews, NoSteps, Rank, RankReady, StepSource,
};

/// See the module's documentation.
pub struct EngineRank<D: Device> {
    device: D,
    listener: TcpListener,
    loaded: Option<Loaded<D>>,
    /// Why the device computes no more.
    lost: Option<String>,
    /// Exchanges with other ranks that were broken off, not told yet.
    unfinished: u64,
}

/// What was loaded. Whatever is asked for next under an equal key needs no loading.
#[derive(Clone, Debug, PartialEq, Eq)]
struct LoadedKey {
    model: String,
    lora: Lora,
    /// The draft model of rank 0, and what its folder had in it.
    draft: Option<(String, Option<ModelIdentity>)>,
    /// What the folders had in them.
    identity: ModelIdentity,
    dtype: Dtype,
    quantization: Quantization,
    rank: u32,
    world_size: u32,
    reduction_ranks: u32,
    max_model_len: u32,
    max_num_batched_tokens: u32,
    max_num_seqs: u32,
}

impl LoadedKey {
    fn new(form: &Form, identity: ModelIdentity) -> Self {
        let sizes = &form.engine;
        Self {
            model: form.model.clone(),
            lora: form.lora.clone(),
            draft: draft_model(form).map(|folder| {
                let identity = ModelIdentity::read(Path::new(folder), &Lora::default());
                (folder.to_owned(), identity.ok())
            }),
            identity,
            dtype: form.dtype,
            quantization: form.quantization,
            rank: form.rank,
            world_size: form.world_size,
            reduction_ranks: form.reduction_ranks,
            max_model_len: sizes.max_model_len,
            max_num_batched_tokens: sizes.max_num_batched_tokens,
            max_num_seqs: sizes.max_num_seqs,
        }
    }
}

struct Loaded<D: Device> {
    engine: Engine<D::Backend>,
    key: LoadedKey,
    /// It has not served yet.
    is_new: bool,
}

impl<D: Device> fmt::Debug for EngineRank<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = self.loaded.as_ref().map(|loaded| &loaded.key);
        f.debug_struct("EngineRank").field("loaded", &key).field("lost", &self.lost).finish()
    }
}

impl<D: Device> EngineRank<D> {
    /// A rank on `device` that takes TCP collectives on `listener`.
    #[must_use]
    pub fn new(device: D, listener: TcpListener) -> Self {
        Self { device, listener, loaded: None, lost: None, unfinished: 0 }
    }

    /// Remembers what this error says: that the device is lost, that other ranks were.
    fn note(&mut self, error: &KernelError) {
        if matches!(error, KernelError::Collective(_)) {
            self.unfinished += 1;
        }
        if self.device.is_lost_by(error) {
            self.lost = Some(error.to_string());
        }
    }

    /// Whether the host has room for these blocks, those of `ranks` like this one. `swap` is what
    /// was asked for, in bytes: blocks are counted up to a bound. A cache in host memory takes its
    /// pages as sequences fill it, so that one that is too large would end the process much later.
    fn host_fits(
        &self,
        kv_blocks: u32,
        host_blocks: u32,
        swap: u64,
        ranks: u32,
    ) -> Result<(), String> {
        let Some(Loaded { engine, .. }) = &self.loaded else { return Ok(()) };
        let bytes = |blocks: u32, each: u64| u64::from(blocks).saturating_mul(each);
        let kv = match self.device.computes_on_host() {
            true => bytes(kv_blocks, engine.block_bytes()),
            false => 0,
        };
        // What is there from an earlier epoch is taken already.
        let swap = match host_blocks == 0 || engine.has_host_blocks(host_blocks) {
            true => 0,
            false => swap.max(bytes(host_blocks, engine.host_block_bytes())),
        };
        match available_memory(Path::new("/")).filter(|_| kv > 0 || swap > 0) {
            Some(available) => check_host(available, ranks, swap, kv),
            None => Ok(()),
        }
    }

    fn connect(&self, form: &Form, abort: &AbortSlot) -> Result<Box<dyn Collective>, FormError> {
        let timeout = Duration::from_millis(form.collective_timeout_ms);
        let (rank, world_size) = (form.rank, form.world_size);
        let is_given_up = || abort.is_aborted(form.epoch);
        let connected = match &form.collective {
            CollectiveSpec::None => Ok(single_rank()),
            CollectiveSpec::SharedMemory { name } => {
                tracing::info!(rank, world_size, "collective: shared memory");
                let name = name.clone();
                shared_memory(
                    &SharedMemoryOptions { name, rank, world_size, timeout },
                    &is_given_up,
                )
            }
            CollectiveSpec::Tcp { ranks, token } => {
                tracing::info!(rank, world_size, "collective: tcp");
                let (listener, token) = (&self.listener, *token);
                tcp(&TcpOptions { listener, ranks, rank, token, timeout }, &is_given_up)
            }
        };
        connected.map_err(|error| FormError { message: error.to_string(), permanent: false })
    }

    fn load(
        &mut self,
        form: &Form,
        collective: Box<dyn Collective>,
        all: &AbortAll,
        abort: &AbortSlot,
        news: &mut dyn FormNews,
    ) -> Result<Engine<D::Backend>, ModelError> {
        let folder = Path::new(&form.model);
        let config = ModelConfig::load(folder)?;
        let shard = Shard::new(&config, form.rank, form.world_size)?
            .with_reduction(&config, form.reduction_ranks)?;
        let files = WeightFiles::open(folder)?;
        let adapters = LoraFiles::open(&form.lora, &config)?;
        let draft = draft_model(form).map(|folder| DraftFiles::open(Path::new(folder), &config));
        let draft = draft.transpose()?;
        let precision = self.device.precision(form.dtype, &config)?;
        let mut backend = self.device.backend(precision, collective)?;
        // Now, for those that have loaded wait for this one. What becomes of them while it loads,
        // it finds when it first needs them: what it has loaded is good for the next epoch.
        join::<D>(&mut backend, form, all, abort, news)?;
        D::set_alone(&mut backend, true);
        let positions = form.engine.max_model_len as usize;
        if positions > config.max_positions {
            let message = format!(
                "max_position_embeddings is {}, below the max_model_len asked for ({positions})",
                config.max_positions
            );
            return Err(ModelError::file(&folder.join("config.json"), message));
        }
        let (quantization, adapting) = (form.quantization, &adapters);
        let beside = Beside { quantization, adapters: adapting, draft: draft.as_ref() };
        self.device.check_fit(&backend, &config, &shard, beside, &form.engine)?;
        let source = Source { files: &files, config: &config, shard: &shard };
        let mut progress = |done, total| news.progress(done, total);
        let weights =
            weights::load(&mut backend, &source, form.quantization, positions, &mut progress)?;
        let tokens_max = form.engine.max_num_batched_tokens as usize;
        let rows_max = form.engine.max_num_seqs as usize;
        let adapters = adapters.load(&mut backend, &config, &shard, tokens_max)?;
        if let Some(loaded) = &adapters {
            let bytes = bytes_text(loaded.bytes());
            tracing::info!(count = loaded.count(), bytes, "LoRA adapters loaded");
        }
        let decoder = Decoder::new(&mut backend, config, shard, weights, tokens_max, rows_max)?
            .with_adapters(adapters);
        let draft = match draft {
            Some(files) => {
                let own = self.device.draft_backend()?;
                Some(files.load(own, &mut backend, &form.engine)?)
            }
            None => None,
        };
        let mut engine = Engine::new(backend, decoder, form.engine.clone()).with_draft(draft);
        self.device.prepare(&mut engine)?;
        D::set_alone(engine.backend(), false);
        Ok(engine)
    }
}

/// The draft model's own backend, which is in no collective, forgets what it recorded of an epoch:
/// its cache is another in the next.
fn leave<D: Device>(engine: &mut Engine<D::Backend>) -> Result<(), KernelError> {
    let own = engine.draft_backend();
    own.map_or(Ok(()), |own| D::set_collective(own, single_rank()))
}

/// The draft model of a rank that is to have it.
fn draft_model(form: &Form) -> Option<&str> {
    form.draft_model.as_deref().filter(|_| form.rank == 0)
}

/// KV blocks that `bytes` of host memory hold.
fn swap_space(bytes: u64, block_bytes: u64) -> Result<u32, String> {
    match u32::try_from(bytes / block_bytes).unwrap_or(u32::MAX) {
        0 if bytes > 0 => Err(format!(
            "--swap-space is {}, less than the {} that one KV block takes",
            bytes_text(bytes),
            bytes_text(block_bytes)
        )),
        blocks => Ok(blocks),
    }
}

/// Whether a host that has `available` bytes left can give each of `ranks` on it `swap` bytes to
/// swap to, and `kv` for its KV cache where that is in host memory, too.
fn check_host(available: u64, ranks: u32, swap: u64, kv: u64) -> Result<(), String> {
    let each = swap.saturating_add(kv);
    if each.saturating_mul(u64::from(ranks)) <= available {
        return Ok(());
    }
    let cache = format!("a KV cache of {} (--kv-cache-memory)", bytes_text(kv));
    let asked = match (swap, kv) {
        (0, _) => format!("there is to be {cache}"),
        (_, 0) => format!("--swap-space is {}", bytes_text(swap)),
        _ => format!("--swap-space is {} and there is to be {cache}", bytes_text(swap)),
    };
    let ranks = if ranks > 1 { format!(" for each of {ranks} ranks") } else { String::new() };
    let available = bytes_text(available);
    Err(format!("{asked}{ranks}, and this host has {available} of memory left"))
}

/// Has the devices of the epoch's ranks exchange data without their hosts, where they can.
fn join<D: Device>(
    backend: &mut D::Backend,
    form: &Form,
    all: &AbortAll,
    abort: &AbortSlot,
    news: &mut dyn FormNews,
) -> Result<(), KernelError> {
    if form.world_size == 1 {
        return Ok(());
    }
    let epoch = form.epoch;
    D::join(
        backend,
        GroupSetup {
            timeout: Duration::from_millis(form.collective_timeout_ms),
            is_given_up: &|| abort.is_aborted(epoch),
            relay: &mut LinkRelay { epoch, abort, news },
            on_abort_handle: &mut |handle| all.add(handle),
        },
    )
}

/// From rank 0 to the others over their links to the coordinator.
struct LinkRelay<'a> {
    epoch: Epoch,
    abort: &'a AbortSlot,
    news: &'a mut dyn FormNews,
}

impl Relay for LinkRelay<'_> {
    fn send(&mut self, bytes: &[u8]) -> Result<(), CollectiveError> {
        self.news.group_id(bytes.to_vec());
        Ok(())
    }

    fn receive(&mut self, timeout: Duration) -> Result<Vec<u8>, CollectiveError> {
        self.abort.wait_for_group_id(self.epoch, timeout).ok_or_else(|| {
            if self.abort.is_aborted(self.epoch) {
                return CollectiveError::Aborted;
            }
            CollectiveError::TimedOut { op: "connect GPUs", waited: timeout, rank: 0 }
        })
    }
}

impl<D: Device> Rank for EngineRank<D> {
    fn form(
        &mut self,
        form: &Form,
        abort: &AbortSlot,
        news: &mut dyn FormNews,
    ) -> Result<RankReady, FormError> {
        let collective = self.connect(form, abort)?;
        let all = Arc::new(AbortAll::default());
        all.add(collective.abort_handle());
        abort.set(form.epoch, all.clone());
        let sizes = &form.engine;
        let identity = ModelIdentity::read(Path::new(&form.model), &form.lora);
        // Weights that are loaded do not need their files: where those cannot be read any more,
        // nothing says that others are wanted.
        let is_wanted = |loaded: &Loaded<D>| {
            let identity = *identity.as_ref().unwrap_or(&loaded.key.identity);
            loaded.key == LoadedKey::new(form, identity)
        };
        let began = Instant::now();
        let mut load_seconds = 0.0;
        match self.loaded.take().filter(is_wanted) {
            Some(mut loaded) => {
                loaded.engine.reconfigure(form.engine.clone());
                let rested = leave::<D>(&mut loaded.engine);
                let backend = loaded.engine.backend();
                let joined = rested
                    .and_then(|()| D::set_collective(backend, collective))
                    .and_then(|()| join::<D>(backend, form, &all, abort, news));
                // Whatever came of it, the weights stay.
                self.loaded = Some(loaded);
                if let Err(error) = joined {
                    self.note(&error);
                    return Err(FormError { message: error.to_string(), permanent: false });
                }
            }
            None => {
                let loaded = self.load(form, collective, &all, abort, news);
                let engine = loaded.map_err(|error| {
                    if let ModelError::Kernel(error) = &error {
                        self.note(error);
                    }
                    FormError { permanent: error.is_permanent(), message: error.to_string() }
                })?;
                // Files that cannot be read have been named by what loads them, nearly always.
                let identity =
                    identity.map_err(|message| FormError { message, permanent: true })?;
                let key = LoadedKey::new(form, identity);
                load_seconds = began.elapsed().as_secs_f64();
                self.loaded = Some(Loaded { engine, key, is_new: true });
            }
        }
        let Some(loaded) = &mut self.loaded else {
            return Err(FormError { message: "nothing is loaded".to_owned(), permanent: false });
        };
        let kv_bytes = match self.device.kv_bytes(&mut loaded.engine, sizes.kv_cache_bytes) {
            Ok(bytes) => bytes,
            Err(error) => {
                self.note(&error);
                return Err(FormError { message: error.to_string(), permanent: false });
            }
        };
        let kv_blocks = loaded.engine.kv_blocks(kv_bytes);
        let needed = sizes.max_model_len.div_ceil(sizes.block_size);
        if kv_blocks == 0 {
            let message = format!(
                "{kv_bytes} bytes of KV cache memory hold not a single block; one sequence of {} \
                 tokens needs {needed}",
                sizes.max_model_len
            );
            return Err(FormError { message, permanent: true });
        }
        let block_bytes = loaded.engine.host_block_bytes();
        let host_blocks = swap_space(sizes.swap_bytes, block_bytes)
            .map_err(|message| FormError { message, permanent: true })?;
        // Ranks that share memory are on this host. Of others nothing is known: each looks at what
        // is left.
        let ranks = match &form.collective {
            CollectiveSpec::SharedMemory { .. } => form.world_size,
            CollectiveSpec::None | CollectiveSpec::Tcp { .. } => 1,
        };
        self.host_fits(kv_blocks, host_blocks, sizes.swap_bytes, ranks)
            .map_err(|message| FormError { message, permanent: false })?;
        let Some(loaded) = &mut self.loaded else {
            return Err(FormError { message: "nothing is loaded".to_owned(), permanent: false });
        };
        Ok(RankReady {
            kv_blocks,
            host_blocks,
            weight_bytes: loaded.engine.weight_bytes(),
            load_seconds,
            identity: loaded.key.identity,
        })
    }

    fn start(&mut self, num_blocks: u32, host_blocks: u32) -> Result<(), String> {
        // Others may have taken memory since it was formed.
        self.host_fits(num_blocks, host_blocks, 0, 1)?;
        let loaded = self.loaded.as_mut().ok_or("nothing is loaded")?;
        if let Err(error) = loaded.engine.make_host_blocks(host_blocks) {
            // The host is short of memory, not the device.
            let KernelError::OutOfMemory { bytes, .. } = &error else {
                self.note(&error);
                return Err(error.to_string());
            };
            let left = available_memory(Path::new("/")).map_or("unknown".to_owned(), bytes_text);
            return Err(format!(
                "--swap-space: the host gives no {} for it; {left} of its memory are left",
                bytes_text(*bytes)
            ));
        }
        // Behind an epoch that failed requests wait: what decode steps need is made as they come
        // then.
        let is_new = std::mem::take(&mut loaded.is_new);
        let result = loaded.engine.start_with(num_blocks, host_blocks);
        let result = result.and_then(|()| self.device.warm(&mut loaded.engine, is_new));
        result.map_err(|error| {
            self.note(&error);
            error.to_string()
        })
    }

    fn step(
        &mut self,
        plan: &StepPlan,
        outputs: &mut Vec<SequenceOutput>,
    ) -> Result<StepTimings, String> {
        self.step_with(plan, &mut NoSteps, outputs)
    }

    fn step_with(
        &mut self,
        plan: &StepPlan,
        source: &mut dyn StepSource,
        outputs: &mut Vec<SequenceOutput>,
    ) -> Result<StepTimings, String> {
        let loaded = self.loaded.as_mut().ok_or("nothing is loaded")?;
        let result = loaded.engine.step_with(plan, source, outputs);
        result.map_err(|error| {
            if let EngineError::Kernel(error) = &error {
                self.note(error);
            }
            error.to_string()
        })
    }

    fn drafted(&self) -> Vec<u32> {
        self.loaded.as_ref().map_or_else(Vec::new, |loaded| loaded.engine.drafted().to_vec())
    }

    fn digest(&self) -> u32 {
        self.loaded.as_ref().map_or(0, |loaded| loaded.engine.digest())
    }

    fn release(&mut self) {
        let Some(loaded) = &mut self.loaded else { return };
        // Leaving the other ranks first: what the device still waits for would hold up the rest.
        let left = D::set_collective(loaded.engine.backend(), single_rank());
        let left = left.and_then(|()| leave::<D>(&mut loaded.engine));
        if let Err(error) = left {
            self.note(&error);
        }
        // Freeing memory waits for the device, which may not come to rest any more, and whoever
        // asks for it is told so: nothing is freed but by the process's end.
        if self.lost.is_some() {
            let _kept = self.loaded.take().map(ManuallyDrop::new);
        } else if let Some(loaded) = &mut self.loaded {
            loaded.engine.release();
        }
    }

    fn take_exchanged(&mut self) -> Exchanged {
        let unfinished = std::mem::take(&mut self.unfinished);
        let Some(loaded) = &mut self.loaded else {
            return Exchanged { unfinished, is_timed: true, ..Exchanged::default() };
        };
        let backend = loaded.engine.backend();
        let is_timed = !backend.samples_everywhere();
        Exchanged { bytes: backend.take_exchanged(), unfinished, is_timed }
    }

    fn lost_device(&self) -> Option<&str> {
        self.lost.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn swap_space_is_what_the_host_has_for_all_of_its_ranks_and_their_caches() {
        assert_eq!(check_host(10 * GIB, 1, 10 * GIB, 0), Ok(()));
        let error = check_host(10 * GIB, 1, 11 * GIB, 0).unwrap_err();
        assert!(error.contains("11") && error.contains("10") && error.contains("GiB"), "{error}");
        let error = check_host(10 * GIB, 1, 8 * GIB, 3 * GIB).unwrap_err();
        assert!(error.contains("KV cache of 3"), "{error}");
        let error = check_host(10 * GIB, 4, 3 * GIB, 0).unwrap_err();
        assert!(error.contains("each of 4 ranks"), "{error}");
        let error = check_host(10 * GIB, 1, 0, 11 * GIB).unwrap_err();
        assert!(error.contains("KV cache of 11") && !error.contains("--swap-space"), "{error}");
        assert!(check_host(10 * GIB, u32::MAX, u64::MAX, u64::MAX).is_err());
    }

    #[test]
    fn swap_space_holds_a_block_or_is_none() {
        assert_eq!((swap_space(0, 100), swap_space(250, 100)), (Ok(0), Ok(2)));
        assert!(swap_space(99, 100).unwrap_err().contains("--swap-space"));
    }
}
