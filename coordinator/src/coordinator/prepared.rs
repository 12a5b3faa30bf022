//! Everything that can fail before a coordinator serves.
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;

use shared::hub::HubModel;
use shared::ids::Incarnation;
use shared::membership::Serves;
use shared::metrics;
use shared::model_identity::ModelIdentity;
use shared::protocol::{EngineConfig, Lora, check_model_names};
use shared::wire::keyring::Keyring;

use super::options::{CoordinatorOptions, StartError};
use super::parts::lora_sources;
use crate::http::listener::{BoundHttp, Endpoint};
use crate::http::root_path::RootPath;
use crate::http::tls::{Tls, scheme};
use crate::metrics::Hub;
use crate::scheduler::SchedulerConfig;
use crate::text::model::TextModel;

/// Steps in flight: one runs, and the next is ready when it is done.
const STEPS_IN_FLIGHT: u32 = 2;

/// A bound address.
#[derive(Debug)]
pub(crate) struct BoundListener {
    pub(crate) listener: TcpListener,
    pub(crate) address: SocketAddr,
}

/// Maximum number of tokens in one step where none is given: a CPU computes a prompt hardly faster
/// in larger chunks, and running sequences wait for each of them.
const STEP_TOKENS_ON_CPUS: u32 = 512;
/// The same for GPUs, which need more rows to be busy.
const STEP_TOKENS_ON_GPUS: u32 = 2048;

/// A coordinator that could serve at once: its options are checked, its tokenizer and templates are
/// loaded, its weights are looked into, its addresses are bound.
#[derive(Debug)]
pub struct PreparedCoordinator {
    pub(super) options: CoordinatorOptions,
    pub(super) text: Arc<TextModel>,
    /// What workers must have; unknown without weights here.
    pub(super) identity: Option<ModelIdentity>,
    /// For replicas on GPUs, if they differ.
    pub(super) engine: EngineConfig,
    /// Maximum number of tokens in one step of a replica on CPUs.
    pub(super) cpu_step_tokens: u32,
    pub(super) scheduling: SchedulerConfig,
    pub(super) hub: Arc<Hub>,
    pub(crate) http: BoundHttp,
    pub(crate) cluster: BoundListener,
    pub(crate) metrics: Option<BoundListener>,
}

impl PreparedCoordinator {
    /// Checks the options, loads tokenizer and templates, binds the addresses.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn new(mut options: CoordinatorOptions) -> Result<Self, StartError> {
        let names = [&options.served_model_name].into_iter().chain(&options.model_aliases);
        let names: Vec<String> = names.cloned().collect();
        check_model_names(&names)
            .map_err(|why| StartError::Sizes(format!("--served-model-name: {why}")))?;
        options
            .lora
            .check(names.iter().map(String::as_str))
            .map_err(|why| StartError::Sizes(format!("--lora-modules: {why}")))?;
        let text = Arc::new(TextModel::load_with(&options.model, &options.api.text)?);
        if let Some(why) = text.cannot(options.swap_bytes > 0, options.speculation.is_some()) {
            return Err(StartError::Sizes(why));
        }
        let prefix_states = prefix_states(&mut options, text.has_linear_attention);
        let max_model_len = options.max_model_len.unwrap_or(text.usual_positions);
        if options.max_model_len.is_none() && max_model_len < text.max_positions {
            let most = text.max_positions;
            tracing::info!(
                max_model_len,
                most,
                "sequences are limited to the length that the model handles best; --max-model-len \
                 allows longer ones"
            );
        }
        if max_model_len > text.max_positions {
            return Err(StartError::Sizes(format!(
                "--max-model-len {max_model_len} exceeds the model's own limit of {}",
                text.max_positions
            )));
        }
        if max_model_len > text.usual_positions {
            let usual = text.usual_positions;
            tracing::info!(
                max_model_len,
                usual,
                "sequences may be longer than the model's usual length: this makes short ones \
                 slightly less accurate"
            );
        }
        // Where there is a choice, every sequence gets its token.
        let usual = |tokens: u32| tokens.max(options.max_num_seqs);
        let step_tokens = |tokens| options.max_num_batched_tokens.unwrap_or(usual(tokens));
        let cpu_step_tokens = step_tokens(STEP_TOKENS_ON_CPUS);
        let engine = EngineConfig {
            block_size: options.block_size,
            max_model_len,
            max_num_seqs: options.max_num_seqs,
            max_num_batched_tokens: step_tokens(STEP_TOKENS_ON_GPUS),
            kv_cache_bytes: options.kv_cache_bytes,
            swap_bytes: options.swap_bytes,
            kv_cache_dtype: options.kv_cache_dtype,
            prefix_states: prefix_states.unwrap_or(0),
        };
        let scheduling = SchedulerConfig {
            block_size: engine.block_size,
            max_model_len,
            max_num_seqs: engine.max_num_seqs,
            max_num_batched_tokens: engine.max_num_batched_tokens,
            max_mixed_prefill_tokens: options.max_mixed_prefill_tokens,
            max_queued_requests: options.max_queued_requests,
            max_steps_in_flight: STEPS_IN_FLIGHT,
            prefix_caching: options.prefix_caching,
            prefix_states,
            hidden_size: text.numbers(),
            vocab_size: text.vocab_size,
            speculation: options.speculation,
        };
        scheduling.validate()?;
        let identity = identity(&options);
        let http = BoundHttp::bind(&options.listen).map_err(|error| {
            let (address, option) = (options.listen.clone(), options.listen.option());
            StartError::Listen { address, option, error }
        })?;
        let cluster = listen(options.cluster_listen, "--cluster-listen")?;
        let alone = options.metrics_listen;
        let alone = alone.map(|address| listen(address, "--metrics-listen")).transpose()?;
        let make_hub = if options.metrics { Hub::new } else { Hub::disabled };
        let hub = Arc::new(make_hub(Incarnation(options.run), metrics::Limits::default()));
        Ok(Self {
            options,
            text,
            identity,
            engine,
            cpu_step_tokens,
            scheduling,
            hub,
            http,
            cluster,
            metrics: alone,
        })
    }

    /// What it would serve if it led, and which secrets it accepts now, for others in etcd.
    #[must_use]
    pub fn serves(&self, cluster: &str) -> Serves {
        let options = &self.options;
        let names = [&options.served_model_name].into_iter().chain(&options.model_aliases);
        let cache = options.kv_cache_dtype.name();
        Serves {
            names: names.cloned().collect(),
            model: self.identity,
            text: self.text.fingerprint,
            max_model_len: self.engine.max_model_len,
            tensor_parallel: options.tensor_parallel,
            dtypes: format!(
                "{}, quantization {}, KV cache {cache}",
                options.dtype.name(),
                options.quantization.name()
            ),
            secrets: options.secret.as_ref().map(|it| it.fingerprints(cluster)).unwrap_or_default(),
        }
    }

    /// The secrets that it accepts, which may change.
    #[must_use]
    pub fn secrets(&self) -> Option<Keyring> {
        self.options.secret.clone()
    }

    /// What reads the adapters as workers are told of them. Their folders may be replaced while
    /// another coordinator leads, so this is for when it takes the lead; and for a thread that may
    /// pause, unlike a leader's.
    pub fn lora_reader(&self) -> impl FnOnce() -> Lora + Send + 'static + use<> {
        let (sources, here) = (self.options.sources.lora.clone(), self.options.lora.clone());
        move || lora_sources(sources, &here)
    }

    /// The hub that counts everything; nothing is counted yet.
    #[must_use]
    pub fn hub(&self) -> &Arc<Hub> {
        &self.hub
    }

    /// Where HTTP is served.
    #[must_use]
    pub fn http(&self) -> &Endpoint {
        &self.http.endpoint
    }

    /// The address that workers dial.
    #[must_use]
    pub fn cluster_addr(&self) -> SocketAddr {
        self.cluster.address
    }

    /// The scheme of the URLs that serve HTTP.
    #[must_use]
    pub fn scheme(&self) -> &'static str {
        scheme(self.tls())
    }

    pub(crate) fn tls(&self) -> Option<&Tls> {
        self.options.api.tls.as_ref()
    }

    pub(crate) fn root_path(&self) -> &RootPath {
        &self.options.api.root_path
    }
}

/// Number of states that replicas keep for prefix caching; absent if the model has none. Without
/// any there is no prefix caching.
fn prefix_states(options: &mut CoordinatorOptions, has_states: bool) -> Option<u32> {
    if !has_states {
        if options.prefix_states.is_some() {
            tracing::info!("--prefix-states has no effect: the model has no linear attention");
        }
        return None;
    }
    let usual = CoordinatorOptions::usual_prefix_states(options.max_num_seqs);
    let count = options.prefix_states.unwrap_or(usual);
    options.prefix_caching &= count > 0;
    Some(if options.prefix_caching { count } else { 0 })
}

/// Identity of the model folder's contents here. A coordinator needs no weights; without them, its
/// workers only have to agree with each other.
fn identity(options: &CoordinatorOptions) -> Option<ModelIdentity> {
    let read = ModelIdentity::read(&options.model, &options.lora.lasting());
    read.inspect_err(|reason| {
        if HubModel::parse(&options.sources.model).is_some() {
            // Its commit says what it is.
            return;
        }
        tracing::warn!(reason, "cannot tell whether workers have the same model as this host");
    })
    .ok()
}

fn listen(address: SocketAddr, option: &'static str) -> Result<BoundListener, StartError> {
    let bind = || {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let bound = listener.local_addr()?;
        Ok(BoundListener { listener, address: bound })
    };
    bind().map_err(|error| StartError::Listen { address: address.into(), option, error })
}
