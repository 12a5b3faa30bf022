//! A rank on some device: it connects the collective that a coordinator asks for, loads its shard,
//! and runs the engine on the device's backend. Weights outlive the epoch: a rank that is formed
//! again with the same shard only connects anew.
//!
//! - `adapters`: LoRA adapters that come and go
//! - `fetching`: files of the hub that were not there when the worker joined
//! - `joining`: how a rank meets the others of its epoch
//! - `loaded`: what a rank has loaded, and how it loads
//! - `host`: checks that the host's memory suffices
use std::fmt;
use std::mem::ManuallyDrop;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kernels::backend::prelude::*;
use kernels::collective::{AbortAll, single_rank};
use kernels::{Collective, KernelError};
use shared::hub::cache::located;
use shared::hub::{Hub, HubModel, ModelPart};
use shared::model_identity::ModelIdentity;
use shared::protocol::{Adapter, Form, SequenceOutput, StepPlan, StepTimings};

use self::fetching::Fetch;
use self::host::HostMemoryNeed;
use self::joining::{Formation, connect, join};
use self::loaded::{LoadedKey, LoadedShard, rest_draft};
use crate::device::{Device, bytes_text};
use crate::engine::EngineError;
use crate::model::ModelError;
use crate::model::lora::Piece;
use crate::rank::{
    AbortSlot, AdapterReading, ExchangeStats, FormError, FormObserver, Rank, RankReady, StepSource,
};

mod adapters;
mod fetching;
mod host;
mod joining;
mod loaded;

/// Error before a rank is formed.
const NOTHING_LOADED: &str = "nothing is loaded";
/// How much longer than the coordinator a rank waits for a step on its device: the coordinator
/// gives up first, and ranks that wait for another leave their exchange and keep their weights. A
/// device that is still not done after that costs the process.
const STEP_GRACE: Duration = Duration::from_secs(10);

/// A rank on a device; see the module's documentation.
pub struct EngineRank<D: Device> {
    device: D,
    listener: TcpListener,
    loaded: Option<LoadedShard<D>>,
    /// Why the device no longer works.
    lost: Option<String>,
    /// Exchanges with other ranks that were broken off and are not reported yet.
    unfinished: u64,
    /// Where models of the hub come from.
    hub: Option<Hub>,
}

impl<D: Device> fmt::Debug for EngineRank<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = self.loaded.as_ref().map(|loaded| &loaded.key);
        f.debug_struct("EngineRank").field("loaded", &key).field("lost", &self.lost).finish()
    }
}

impl<D: Device> EngineRank<D> {
    /// Creates a rank on `device` that accepts TCP collectives on `listener`.
    #[must_use]
    pub fn new(device: D, listener: TcpListener) -> Self {
        Self { device, listener, loaded: None, lost: None, unfinished: 0, hub: None }
    }

    /// Models of the hub are in its cache; adapters that are not there yet come from it.
    #[must_use]
    pub fn with_hub(mut self, hub: Option<Hub>) -> Self {
        self.hub = hub;
        self
    }

    /// The same with the folders of this host in place of models of the hub. Adapters that are not
    /// there yet are fetched, until the epoch is over.
    fn located(
        &self,
        form: &Form,
        abort: &AbortSlot,
        observer: &mut dyn FormObserver,
    ) -> Result<Form, FormError> {
        let epoch = form.epoch;
        let mut goes_on = |news: Option<(u64, u64)>| {
            if let Some((done, total)) = news {
                observer.progress(done, total);
            }
            !abort.is_aborted(epoch)
        };
        let mut form = form.clone();
        for text in [&mut form.model].into_iter().chain(&mut form.draft_model) {
            let Some(folder) = self.folder(text)? else { continue };
            if !folder.is_dir() {
                let message = format!(
                    "{}: the files of {text} are not there any more: start this worker again",
                    folder.display()
                );
                return Err(FormError { message, permanent: false });
            }
            *text = folder.to_string_lossy().into_owned();
        }
        for adapter in &mut form.lora.adapters {
            let (located, fetch) = self.located_adapter(adapter)?;
            if let Some(fetch) = fetch {
                tracing::info!(adapter = adapter.path, "fetching an adapter that came since");
                fetching::wait(fetch, &mut goes_on)
                    .map_err(|message| FormError { message, permanent: false })?;
            }
            *adapter = located;
        }
        Ok(form)
    }

    /// The folder of a model of the hub; `None` if it is no such model.
    fn folder(&self, text: &str) -> Result<Option<PathBuf>, FormError> {
        if HubModel::parse(text).is_none() {
            return Ok(None);
        }
        let hub = self.hub.as_ref().ok_or("this host has no cache of models".to_owned());
        let folder = hub.and_then(|hub| located(&hub.settings().cache, text));
        folder.map(Some).map_err(|message| FormError { message, permanent: true })
    }

    /// An adapter with its folder on this host, and what fetches its files if they are not there:
    /// one of the hub may have been loaded since this worker joined.
    fn located_adapter(&self, adapter: &Adapter) -> Result<(Adapter, Option<Fetch>), FormError> {
        let mut adapter = adapter.clone();
        let Some(folder) = self.folder(&adapter.path)? else { return Ok((adapter, None)) };
        let wanted = HubModel::parse(&adapter.path).transpose();
        let wanted = wanted.map_err(|message| FormError { message, permanent: true })?;
        adapter.path = folder.to_string_lossy().into_owned();
        let missing = |(hub, model): &(Hub, HubModel)| !hub.has(model, ModelPart::Adapter);
        let fetch = self.hub.clone().zip(wanted).filter(missing).map(|(hub, model)| -> Fetch {
            Box::new(move |handle| {
                let fetched = hub.fetch(&model.wanted(), ModelPart::Adapter, handle);
                fetched.map(drop).map_err(|error| error.to_string())
            })
        });
        Ok((adapter, fetch))
    }

    /// Frees the places of adapters that a formation with the same weights does not list, and loads
    /// those that are not here yet.
    fn match_adapters(&mut self, form: &Form) -> Result<(), FormError> {
        if form.lora.places == 0 {
            return Ok(());
        }
        let matched = adapters::match_list(self.loaded.as_mut(), &form.lora);
        matched.map_err(|error| self.failed(&error))
    }

    /// The error of a formation, whose cause is recorded if it is the device or an exchange.
    fn failed(&mut self, error: &ModelError) -> FormError {
        if let ModelError::Kernel(error) = error {
            self.record(error);
        }
        FormError { permanent: error.is_permanent(), message: error.to_string() }
    }

    /// Records whether an error means that the device or an exchange with other ranks has failed.
    fn record(&mut self, error: &KernelError) {
        if matches!(error, KernelError::Collective(_)) {
            self.unfinished += 1;
        }
        if self.device.is_lost_by(error) {
            self.lost = Some(error.to_string());
        }
    }

    /// Records it in the same way, and returns the error of the formation. Trying again may help.
    fn recorded(&mut self, error: &KernelError) -> FormError {
        self.record(error);
        FormError { message: error.to_string(), permanent: false }
    }

    /// Joins the other ranks of an epoch with the weights already loaded.
    fn reuse(
        &mut self,
        mut loaded: LoadedShard<D>,
        collective: Box<dyn Collective>,
        joining: &mut Formation<'_>,
    ) -> Result<(), FormError> {
        loaded.engine.reconfigure(joining.form.engine.clone());
        loaded.set_patience(None);
        let rested = rest_draft::<D>(&mut loaded.engine);
        let backend = loaded.engine.backend();
        let joined = rested
            .and_then(|()| D::set_collective(backend, collective))
            .and_then(|()| join::<D>(backend, joining));
        // Whatever has become of the others, the weights are good.
        if let Err(error) = joined {
            self.loaded = Some(loaded);
            return Err(self.recorded(&error));
        }
        if let Err(error) = loaded.check(&self.device, &joining.form.engine) {
            self.loaded = Some(loaded);
            return Err(self.failed(&error));
        }
        if loaded.step_tokens != joining.form.engine.max_num_batched_tokens {
            let resized = loaded::resize(&self.device, loaded, &joining.form.engine);
            loaded = resized.map_err(|error| self.recorded(&error))?;
        }
        self.loaded = Some(loaded);
        Ok(())
    }

    /// Loads the shard; returns how many seconds that took.
    fn load_anew(
        &mut self,
        identity: Result<ModelIdentity, String>,
        collective: Box<dyn Collective>,
        joining: &mut Formation<'_>,
    ) -> Result<f64, FormError> {
        let began = Instant::now();
        let engine =
            loaded::load(&self.device, collective, joining).map_err(|error| self.failed(&error))?;
        // Loading has nearly always named the files that cannot be read.
        let identity = identity.map_err(|message| FormError { message, permanent: true })?;
        let step_tokens = joining.form.engine.max_num_batched_tokens;
        let key = LoadedKey::new(joining.form, identity);
        self.loaded = Some(LoadedShard { engine, key, step_tokens, is_new: true });
        Ok(began.elapsed().as_secs_f64())
    }

    /// Determines how many blocks there is room for.
    fn ready(&mut self, form: &Form, load_seconds: f64) -> Result<RankReady, FormError> {
        let sizes = &form.engine;
        let permanent = |message| FormError { message, permanent: true };
        let Some(LoadedShard { engine, key, .. }) = &mut self.loaded else {
            return Err(FormError { message: NOTHING_LOADED.to_owned(), permanent: false });
        };
        let kv_bytes = match self.device.kv_bytes(engine, sizes.kv_cache_bytes) {
            Ok(bytes) => bytes,
            Err(error) => return Err(self.recorded(&error)),
        };
        let kv_blocks = engine.kv_blocks(kv_bytes);
        let needed = sizes.max_model_len.div_ceil(sizes.block_size);
        if kv_blocks == 0 {
            return Err(permanent(format!(
                "{kv_bytes} bytes of KV cache memory do not hold a single block; one sequence of \
                 {} tokens needs {needed}",
                sizes.max_model_len
            )));
        }
        let swap_bytes = sizes.swap_bytes;
        let host_blocks =
            host::swap_space(swap_bytes, engine.host_block_bytes()).map_err(permanent)?;
        let ready = RankReady {
            kv_blocks,
            host_blocks,
            weight_bytes: engine.weight_bytes(),
            load_seconds,
            identity: key.identity,
            adapters: engine.adapting().map_or(0, |(_, adapters, ..)| adapters.fingerprint()),
        };
        // Blocks that will not be used again must not count as taken.
        if !engine.has_host_blocks(host_blocks) {
            engine.drop_host_blocks();
        }
        let kv_blocks = if self.device.computes_on_host() { kv_blocks } else { 0 };
        host::fits(
            engine,
            HostMemoryNeed { kv_blocks, host_blocks, swap_bytes },
            host::ranks_here(form),
        )
        .map_err(|message| FormError { message, permanent: false })?;
        Ok(ready)
    }
}

impl<D: Device> Rank for EngineRank<D> {
    fn form(
        &mut self,
        form: &Form,
        abort: &AbortSlot,
        observer: &mut dyn FormObserver,
    ) -> Result<RankReady, FormError> {
        form.check().map_err(|message| FormError { message, permanent: true })?;
        let form = &self.located(form, abort, observer)?;
        let collective = connect(&self.listener, form, abort)?;
        let all = Arc::new(AbortAll::default());
        all.add(collective.abort_handle());
        abort.set(form.epoch, all.clone());
        let mut joining = Formation { form, abort, all: &all, observer };
        let identity = ModelIdentity::read(Path::new(&form.model), &form.lora.lasting());
        // Loaded weights do not need their files: if those can no longer be read, nothing suggests
        // that other weights are wanted.
        let is_wanted = |loaded: &LoadedShard<D>| {
            let identity = *identity.as_ref().unwrap_or(&loaded.key.identity);
            loaded.key == LoadedKey::new(form, identity)
        };
        let load_seconds = match self.loaded.take().filter(is_wanted) {
            Some(loaded) => {
                self.reuse(loaded, collective, &mut joining)?;
                self.match_adapters(form)?;
                0.0
            }
            None => self.load_anew(identity, collective, &mut joining)?,
        };
        let ready = self.ready(form, load_seconds)?;
        if let Some(loaded) = &mut self.loaded {
            let step = Duration::from_millis(form.step_timeout_ms);
            loaded.set_patience(Some(step.saturating_add(STEP_GRACE)));
        }
        Ok(ready)
    }

    fn start(&mut self, num_blocks: u32, host_blocks: u32) -> Result<(), String> {
        let loaded = self.loaded.as_mut().ok_or(NOTHING_LOADED)?;
        // Other processes may have taken memory since it was formed.
        let kv_blocks = if self.device.computes_on_host() { num_blocks } else { 0 };
        host::fits(&loaded.engine, HostMemoryNeed { kv_blocks, host_blocks, swap_bytes: 0 }, 1)?;
        if let Err(error) = loaded.engine.make_host_blocks(host_blocks) {
            // The host is out of memory, not the device.
            let KernelError::OutOfMemory { bytes, .. } = &error else {
                self.record(&error);
                return Err(error.to_string());
            };
            let (bytes, left) = (bytes_text(*bytes), host::memory_left());
            return Err(format!(
                "--swap-space: the host cannot provide {bytes} for it; it has {left} of memory left"
            ));
        }
        // After an epoch that failed, requests are waiting, so decode steps are not warmed up
        // again.
        let is_new = std::mem::take(&mut loaded.is_new);
        let result = loaded.engine.start(num_blocks, host_blocks);
        let result = result.and_then(|()| self.device.warm(&mut loaded.engine, is_new));
        result.map_err(|error| {
            self.record(&error);
            error.to_string()
        })
    }

    fn step(
        &mut self,
        plan: &StepPlan,
        source: &mut dyn StepSource,
        outputs: &mut Vec<SequenceOutput>,
    ) -> Result<StepTimings, String> {
        let loaded = self.loaded.as_mut().ok_or(NOTHING_LOADED)?;
        let result = loaded.engine.step(plan, source, outputs);
        result.map_err(|error| {
            if let EngineError::Kernel(error) = &error {
                self.record(error);
            }
            error.to_string()
        })
    }

    fn open_adapter(&mut self, adapter: &Adapter) -> Result<AdapterReading, String> {
        let (adapter, fetch) = self.located_adapter(adapter).map_err(|error| error.message)?;
        let reading = adapters::open(self.loaded.as_mut(), &adapter)?;
        Ok(Box::new(move |sink| {
            if let Some(fetch) = fetch {
                fetching::wait(fetch, &mut |news| sink.fetches(news))?;
            }
            reading(sink)
        }))
    }

    fn put_adapter(&mut self, number: u32, piece: &Piece) -> Result<(), String> {
        adapters::put(self.loaded.as_mut(), number, piece).map_err(|error| {
            self.record(&error);
            error.to_string()
        })
    }

    fn complete_adapter(&mut self, number: u32, identity: ModelIdentity) {
        if let Some((_, adapters, ..)) = adapters::of(self.loaded.as_mut()) {
            adapters.complete(number, identity);
        }
    }

    fn drop_adapter(&mut self, number: u32) {
        if let Some((_, adapters, ..)) = adapters::of(self.loaded.as_mut()) {
            adapters.remove(number);
        }
    }

    fn drafted(&self) -> Vec<u32> {
        self.loaded.as_ref().map_or_else(Vec::new, |loaded| loaded.engine.drafted().to_vec())
    }

    fn digest(&self) -> u32 {
        self.loaded.as_ref().map_or(0, |loaded| loaded.engine.digest())
    }

    fn release(&mut self) {
        let Some(loaded) = &mut self.loaded else { return };
        if let Some((_, adapters, ..)) = loaded.engine.adapting() {
            adapters.give_up();
        }
        // Leave the other ranks first: the device may still wait for them, which delays the rest.
        let left = D::set_collective(loaded.engine.backend(), single_rank());
        let left = left.and_then(|()| rest_draft::<D>(&mut loaded.engine));
        if let Err(error) = left {
            self.record(&error);
        }
        // Freeing memory waits for the device, which may never finish: leave it to the end of the
        // process.
        if self.lost.is_some() {
            let _kept = self.loaded.take().map(ManuallyDrop::new);
        } else if let Some(loaded) = &mut self.loaded {
            loaded.engine.release();
        }
    }

    fn take_exchanged(&mut self) -> ExchangeStats {
        let unfinished = std::mem::take(&mut self.unfinished);
        let Some(loaded) = &mut self.loaded else {
            return ExchangeStats { unfinished, is_timed: true, ..ExchangeStats::default() };
        };
        let backend = loaded.engine.backend();
        let is_timed = backend.times_collectives();
        ExchangeStats { bytes: backend.take_exchanged(), unfinished, is_timed }
    }

    fn lost_device(&self) -> Option<&str> {
        self.lost.as_deref()
    }
}
