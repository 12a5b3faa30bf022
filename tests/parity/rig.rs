//! Ranks as threads, driven by step plans: a minimal coordinator.
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use kernels::collective::{Collective, local_group, single_rank};
use kernels::cpu::Precision;
use kernels::cuda::peer::tuning::Thresholds;
use kernels::cuda::{CudaBackend, CudaOptions, ExchangePolicy, GroupSetup};
use kernels::reference::ReferenceBackend;
use kernels::{Backend, CpuBackend};
use shared::ids::{BlockId, Epoch, SeqId, StepId};
use shared::protocol::{
    Drafts, EngineConfig, KvCacheDtype, Lora, NewSequence, Quantization, SequenceOutput,
    SequenceStep, StepPlan, TokenMask,
};
use shared::sampling::SamplingParams;
use testkit::fake_cuda::{fake_cuda_of, fake_nccl};
use testkit::relay::SharedRelay;
use worker::device::CudaDevice;
use worker::engine::Engine;
use worker::model::ModelError;
use worker::model::config::ModelConfig;
use worker::model::decoder::Decoder;
use worker::model::draft::DraftFiles;
use worker::model::lora::LoraFiles;
use worker::model::safetensors::WeightFiles;
use worker::model::shard::Shard;
use worker::model::weights::{self, Source};
use worker::rank::StepSource;

use crate::masks;

/// How long a step may take: long enough for one that computes beside other work, at low priority.
const PATIENCE: Duration = Duration::from_secs(300);

const BLOCK_SIZE: u32 = 16;
const NUM_BLOCKS: u32 = 2048;
const SEQS_MAX: u32 = 64;
const TOKENS_MAX: u32 = 1024;

/// A plan, and the masks of its masked entries.
type Planned = (StepPlan, Vec<Option<TokenMask>>);

/// The masks of one step, available at once.
pub(crate) struct Given(pub(crate) Vec<Option<TokenMask>>);

impl StepSource for Given {
    fn peek(&mut self) -> Option<&StepPlan> {
        None
    }

    fn masks(&mut self, _: StepId) -> Result<Vec<Option<TokenMask>>, String> {
        Ok(std::mem::take(&mut self.0))
    }
}

/// Outputs, the number of tokens drafted for each sequence that asked for drafts, and the bytes
/// that the rank sent.
type Answer = Result<(Vec<SequenceOutput>, Vec<u32>, u64), String>;

/// A replica whose ranks are threads.
pub(crate) struct Rig {
    plans: Vec<Sender<Planned>>,
    outputs: Receiver<Answer>,
    threads: Vec<JoinHandle<()>>,
    step: u64,
    next_seq: u64,
    next_block: u32,
    /// Numbers of tokens drafted by a draft model so far, and of those that were right.
    pub(crate) drafted: (u32, u32),
    /// Bytes that rank 0 sent to other ranks in the last step.
    pub(crate) sent: u64,
}

/// A running sequence.
#[derive(Clone, Debug)]
pub(crate) struct Seq {
    pub(crate) id: SeqId,
    pub(crate) tokens: Vec<u32>,
    pub(crate) num_prompt: usize,
    pub(crate) logprobs: Vec<f32>,
    pub(crate) prompt_logprobs: Vec<(u32, f32)>,
    pub(crate) embedding: Vec<f32>,
    computed: u32,
    blocks: u32,
    sampling: SamplingParams,
    /// The number of its adapter; 0 for none.
    pub(crate) adapter: u32,
    /// Number of the rule that its tokens obey.
    pub(crate) rule: Option<u64>,
    /// The drafts of its next step, if that computes only its last token.
    pub(crate) drafts: Vec<u32>,
    /// Number of tokens that the draft model is to draft in that step.
    pub(crate) asks: u32,
    admitted: bool,
}

impl Seq {
    pub(crate) fn output(&self) -> &[u32] {
        &self.tokens[self.num_prompt..]
    }
}

/// The backend under test.
#[derive(Clone, Copy, Debug)]
pub(crate) enum On {
    /// The CPU backend with this machine's instructions and products in f32 precision.
    Cpu,
    /// The same with activations of products rounded to bf16.
    CpuBf16,
    /// The CPU backend in f32 precision, with weights quantised to int8.
    CpuInt8,
    /// The same with activations of products rounded to bf16.
    CpuBf16Int8,
    /// The oracle: the reference backend.
    Reference,
    /// The oracle, with weights quantised to int8.
    ReferenceInt8,
    /// The CPU backend in f32 precision, with K and V in FP8.
    CpuFp8,
    /// The same with activations of products rounded to bf16.
    CpuBf16Fp8,
    /// The oracle, with K and V in FP8.
    ReferenceFp8,
    /// The CUDA backend with emulated kernels; ranks exchange data through host memory.
    FakeCuda,
    /// Same as `FakeCuda`, with batch invariance.
    FakeInvariant,
    /// Same as `FakeCuda`, with ranks that see each other's memory. Messages of up to this many
    /// bytes go one-shot, fused with the following norm.
    FakePeers(usize),
    /// Same as `FakeCuda`, with a GPU per rank and a stand-in for NCCL between them.
    FakeNccl,
    /// Same as `FakeCuda`, with weights quantised to int8.
    FakeCudaInt8,
    /// Same as `FakeCuda`, with K and V in FP8.
    FakeCudaFp8,
}

impl On {
    fn quantization(self) -> Quantization {
        match self {
            Self::CpuInt8 | Self::CpuBf16Int8 | Self::ReferenceInt8 | Self::FakeCudaInt8 => {
                Quantization::Int8
            }
            _ => Quantization::None,
        }
    }

    fn kv_cache_dtype(self) -> KvCacheDtype {
        match self {
            Self::CpuFp8 | Self::CpuBf16Fp8 | Self::ReferenceFp8 | Self::FakeCudaFp8 => {
                KvCacheDtype::Fp8
            }
            _ => KvCacheDtype::Auto,
        }
    }
}

/// Number of GPUs of the stand-in for NVIDIA's driver.
const GPUS: u32 = 6;
/// Those that hang in a test, and then for the rest of the process; ranks have the first four.
pub(crate) const HANGING: [u32; 2] = [4, 5];

/// A backend on the stand-in for NVIDIA's driver.
pub(crate) fn fake_cuda_backend(graphs: bool, collective: Box<dyn Collective>) -> CudaBackend {
    fake_cuda_with(CudaOptions { graphs, ..CudaOptions::default() }, collective)
}

/// Same with any options.
pub(crate) fn fake_cuda_with(options: CudaOptions, collective: Box<dyn Collective>) -> CudaBackend {
    let fake = fake_cuda_of(Path::new(env!("CARGO_TARGET_TMPDIR")), GPUS).unwrap();
    let (folders, kernels) = (vec![fake.libraries], Some(fake.kernels));
    CudaBackend::new(CudaOptions { folders, kernels, ..options }, collective).unwrap()
}

/// A backend on the stand-in that will see other ranks' memory, but has not joined them yet.
pub(crate) fn fake_peers_alone(collective: Box<dyn Collective>) -> CudaBackend {
    fake_peers_backend(256 << 10, collective)
}

fn fake_peers_backend(one_shot: usize, collective: Box<dyn Collective>) -> CudaBackend {
    let fake = fake_cuda_of(Path::new(env!("CARGO_TARGET_TMPDIR")), GPUS).unwrap();
    let options = CudaOptions {
        folders: vec![fake.libraries],
        kernels: Some(fake.kernels),
        exchange: ExchangePolicy::Peers,
        thresholds: Some(Thresholds { one_shot, two_shot: one_shot }),
        ..CudaOptions::default()
    };
    CudaBackend::new(options, collective).unwrap()
}

/// A backend on the stand-in, in a group of ranks that see each other's memory.
pub(crate) fn fake_peer(one_shot: usize, collective: Box<dyn Collective>) -> CudaBackend {
    let mut backend = fake_peers_backend(one_shot, collective);
    let joined = backend.join(GroupSetup {
        timeout: Duration::from_secs(60),
        is_given_up: &|| false,
        relay: &mut SharedRelay::default(),
        on_abort_handle: &mut |_| {},
    });
    let reason = joined.unwrap().reason;
    assert!(reason.contains("GPUs see each other's memory"), "{reason}");
    backend
}

/// Options for the stand-in's GPU number `rank`, with a stand-in for NCCL.
pub(crate) fn fake_nccl_options(rank: u32) -> CudaOptions {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let fake = fake_cuda_of(folder, GPUS).unwrap();
    let nccl = fake_nccl(folder, &fake, None).unwrap();
    CudaOptions {
        ordinal: rank,
        folders: vec![fake.libraries],
        kernels: Some(fake.kernels),
        exchange: ExchangePolicy::Nccl,
        nccl_lib: Some(nccl),
        ..CudaOptions::default()
    }
}

/// The stand-in's GPU number `rank`, for a rank that is formed as its coordinator does.
pub(crate) fn fake_gpu(rank: u32, warmup: Duration) -> CudaDevice {
    CudaDevice {
        options: fake_nccl_options(rank),
        memory_utilization: 0.9,
        memory_free: 1 << 32,
        warmup,
        uuid: String::new(),
    }
}

/// A backend on the stand-in's GPU number `rank` that has joined the other ranks'.
pub(crate) fn fake_nccl_backend(
    rank: u32,
    collective: Box<dyn Collective>,
    relay: SharedRelay,
) -> CudaBackend {
    let mut backend = CudaBackend::new(fake_nccl_options(rank), collective).unwrap();
    join_nccl(&mut backend, relay);
    backend
}

/// Joins the other ranks of an epoch.
pub(crate) fn join_nccl(backend: &mut CudaBackend, mut relay: SharedRelay) {
    let joined = backend.join(GroupSetup {
        timeout: Duration::from_secs(30),
        is_given_up: &|| false,
        relay: &mut relay,
        on_abort_handle: &mut |_| {},
    });
    assert_eq!(joined.unwrap().algorithm, "nccl");
}

/// One rank's engine on the stand-ins; the other ranks follow.
pub(crate) fn fake_nccl_engine(
    model: &Path,
    (rank, degree): (u32, u32),
    collective: Box<dyn Collective>,
    relay: SharedRelay,
) -> Engine<CudaBackend> {
    let backend = fake_nccl_backend(rank, collective, relay);
    engine_on(model, rank, (degree, degree), plain(&Lora::default()), backend).unwrap()
}

/// One rank's engine on the CPU backend.
pub(crate) fn engine(
    model: &Path,
    rank: u32,
    degree: u32,
    collective: Box<dyn Collective>,
) -> Result<Engine<CpuBackend>, ModelError> {
    let backend = CpuBackend::new(1, Precision::Float32, collective)?;
    engine_on(model, rank, (degree, degree), plain(&Lora::default()), backend)
}

/// The model as it is, with these adapters.
fn plain(lora: &Lora) -> (Quantization, &Lora, KvCacheDtype) {
    (Quantization::None, lora, KvCacheDtype::Auto)
}

fn engine_on<B: Backend>(
    model: &Path,
    rank: u32,
    degree: (u32, u32),
    (quantization, lora, kv_cache_dtype): (Quantization, &Lora, KvCacheDtype),
    backend: B,
) -> Result<Engine<B>, ModelError> {
    let sizes = EngineConfig {
        block_size: BLOCK_SIZE,
        max_model_len: ModelConfig::load(model)?.max_positions as u32,
        max_num_seqs: SEQS_MAX,
        max_num_batched_tokens: TOKENS_MAX,
        kv_cache_bytes: 1 << 30,
        swap_bytes: 0,
        kv_cache_dtype,
        prefix_states: 0,
    };
    let mut engine = engine_reducing(model, rank, degree, (quantization, lora), backend, sizes)?;
    engine.start(NUM_BLOCKS, 0)?;
    Ok(engine)
}

/// An engine of any size, not started yet.
pub(crate) fn engine_of<B: Backend>(
    model: &Path,
    rank: u32,
    degree: u32,
    backend: B,
    sizes: EngineConfig,
) -> Result<Engine<B>, ModelError> {
    engine_reducing(
        model,
        rank,
        (degree, degree),
        (Quantization::None, &Lora::default()),
        backend,
        sizes,
    )
}

/// The same, with sums computed as by another number of ranks: `degree` is (ranks, ranks of sums).
fn engine_reducing<B: Backend>(
    model: &Path,
    rank: u32,
    degree: (u32, u32),
    (quantization, lora): (Quantization, &Lora),
    mut backend: B,
    sizes: EngineConfig,
) -> Result<Engine<B>, ModelError> {
    let config = ModelConfig::load(model)?;
    let shard = Shard::new(&config, rank, degree.0)?.with_reduction(&config, degree.1)?;
    let files = WeightFiles::open(model)?;
    let positions = sizes.max_model_len as usize;
    let source = Source { files: &files, config: &config, shard: &shard };
    let weights = weights::load(&mut backend, &source, quantization, positions, &mut |_, _| {})?;
    let tokens = sizes.max_num_batched_tokens as usize;
    let adapters = LoraFiles::open(lora, &config)?.load(&mut backend, &config, &shard, tokens)?;
    let decoder = Decoder::new(&mut backend, config, shard, weights, &sizes)?;
    let decoder = decoder.with_adapters(adapters);
    Ok(Engine::new(backend, decoder, sizes))
}

/// Adds a draft model, if there is one, and starts the engine again.
pub(crate) fn with_draft<B: Backend>(
    mut engine: Engine<B>,
    model: &Path,
    draft: Option<&Path>,
    own: impl FnOnce() -> Option<B>,
) -> Engine<B> {
    let Some(draft) = draft else { return engine };
    engine.release();
    let files = DraftFiles::open(draft, &ModelConfig::load(model).unwrap()).unwrap();
    let sizes = engine.config().clone();
    let draft = files.load(own(), engine.backend(), &sizes).unwrap();
    let mut engine = engine.with_draft(Some(draft));
    engine.start(NUM_BLOCKS, 0).unwrap();
    engine
}

fn serve<B: Backend>(
    rank: u32,
    mut engine: Engine<B>,
    plans: Receiver<Planned>,
    sender: &Sender<Answer>,
) {
    for (plan, masks) in plans {
        let mut outputs = Vec::new();
        let result = engine.step(&plan, &mut Given(masks), &mut outputs);
        if rank == 0 || result.is_err() {
            let drafted = engine.drafted().to_vec();
            let sent = engine.backend().take_exchanged().iter().map(|(_, bytes)| bytes).sum();
            let result =
                result.map(|_| (outputs, drafted, sent)).map_err(|error| error.to_string());
            let _ = sender.send(result);
        }
    }
}

impl Rig {
    pub(crate) fn new(model: &Path, degree: u32) -> Self {
        Self::on(On::Cpu, model, degree)
    }

    pub(crate) fn on(backend: On, model: &Path, degree: u32) -> Self {
        Self::reducing(backend, model, (degree, degree))
    }

    /// `degrees` is (ranks, ranks as which sums are computed).
    pub(crate) fn reducing(backend: On, model: &Path, degrees: (u32, u32)) -> Self {
        Self::adapted(backend, model, degrees, &Lora::default())
    }

    /// The same, with adapters.
    pub(crate) fn adapted(backend: On, model: &Path, degrees: (u32, u32), lora: &Lora) -> Self {
        Self::made(backend, model, degrees, lora, None)
    }

    /// The same, with a draft model.
    pub(crate) fn drafting(on: On, model: &Path, degree: u32, draft: &Path, lora: &Lora) -> Self {
        Self::made(on, model, (degree, degree), lora, Some(draft))
    }

    fn made(
        backend: On,
        model: &Path,
        degrees: (u32, u32),
        lora: &Lora,
        draft: Option<&Path>,
    ) -> Self {
        let degree = degrees.0;
        let group = local_group(degree as usize, Duration::from_secs(30)).unwrap();
        if let On::FakeCuda
        | On::FakeCudaInt8
        | On::FakeCudaFp8
        | On::FakeInvariant
        | On::FakeNccl = backend
        {
            // Compiled once, before the ranks' threads need it.
            let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
            fake_nccl(folder, &fake_cuda_of(folder, GPUS).unwrap(), None).unwrap();
        }
        let relay = SharedRelay::default();
        let (quantization, kv) = (backend.quantization(), backend.kv_cache_dtype());
        let (sender, outputs) = channel();
        let mut plans = Vec::new();
        let mut threads = Vec::new();
        for (rank, collective) in (0..degree).zip(group) {
            let (plan_sender, plan_receiver) = channel::<Planned>();
            plans.push(plan_sender);
            let model = model.to_owned();
            let (sender, relay, lora) = (sender.clone(), relay.clone(), lora.clone());
            let draft = draft.filter(|_| rank == 0).map(Path::to_owned);
            threads.push(std::thread::spawn(move || match backend {
                On::Cpu
                | On::CpuBf16
                | On::CpuInt8
                | On::CpuBf16Int8
                | On::CpuFp8
                | On::CpuBf16Fp8 => {
                    let precision = match backend {
                        On::CpuBf16 | On::CpuBf16Int8 | On::CpuBf16Fp8 => Precision::Bfloat16,
                        _ => Precision::Float32,
                    };
                    let backend = CpuBackend::new(1, precision, collective).unwrap();
                    let engine =
                        engine_on(&model, rank, degrees, (quantization, &lora, kv), backend)
                            .unwrap();
                    let engine = with_draft(engine, &model, draft.as_deref(), || None);
                    serve(rank, engine, plan_receiver, &sender);
                }
                On::FakeCuda | On::FakeCudaInt8 | On::FakeCudaFp8 => {
                    let backend = fake_cuda_backend(true, collective);
                    let engine =
                        engine_on(&model, rank, degrees, (quantization, &lora, kv), backend)
                            .unwrap();
                    let own = || Some(fake_cuda_backend(true, single_rank()));
                    let engine = with_draft(engine, &model, draft.as_deref(), own);
                    serve(rank, engine, plan_receiver, &sender);
                }
                On::FakeInvariant => {
                    let options = CudaOptions { batch_invariant: true, ..CudaOptions::default() };
                    let again = options.clone();
                    let backend = fake_cuda_with(options, collective);
                    let engine =
                        engine_on(&model, rank, degrees, (quantization, &lora, kv), backend)
                            .unwrap();
                    let own = || Some(fake_cuda_with(again, single_rank()));
                    let engine = with_draft(engine, &model, draft.as_deref(), own);
                    serve(rank, engine, plan_receiver, &sender);
                }
                On::FakePeers(one_shot) => {
                    let backend = fake_peer(one_shot, collective);
                    let engine =
                        engine_on(&model, rank, degrees, (quantization, &lora, kv), backend)
                            .unwrap();
                    serve(rank, engine, plan_receiver, &sender);
                }
                On::FakeNccl => {
                    let backend = fake_nccl_backend(rank, collective, relay);
                    let engine =
                        engine_on(&model, rank, degrees, (quantization, &lora, kv), backend)
                            .unwrap();
                    let own =
                        || Some(CudaBackend::new(fake_nccl_options(rank), single_rank()).unwrap());
                    let engine = with_draft(engine, &model, draft.as_deref(), own);
                    serve(rank, engine, plan_receiver, &sender);
                }
                On::Reference | On::ReferenceInt8 | On::ReferenceFp8 => {
                    let backend = ReferenceBackend::new(collective);
                    let engine =
                        engine_on(&model, rank, degrees, (quantization, &lora, kv), backend)
                            .unwrap();
                    let engine = with_draft(engine, &model, draft.as_deref(), || None);
                    serve(rank, engine, plan_receiver, &sender);
                }
            }));
        }
        Self::of(plans, outputs, threads)
    }

    /// Ranks that take plans, and what comes of them.
    fn of(
        plans: Vec<Sender<Planned>>,
        outputs: Receiver<Answer>,
        threads: Vec<JoinHandle<()>>,
    ) -> Self {
        Self {
            plans,
            outputs,
            threads,
            step: 0,
            next_seq: 1,
            next_block: 0,
            drafted: (0, 0),
            sent: 0,
        }
    }

    /// One rank on the CPU backend, with sequences of at most `max_model_len` tokens.
    pub(crate) fn within(model: &Path, max_model_len: u32) -> Self {
        let (sender, outputs) = channel();
        let (plans, received) = channel::<Planned>();
        let model = model.to_owned();
        let thread = std::thread::spawn(move || {
            let backend = CpuBackend::new(1, Precision::Float32, single_rank()).unwrap();
            let sizes = EngineConfig {
                block_size: BLOCK_SIZE,
                max_model_len,
                max_num_seqs: SEQS_MAX,
                max_num_batched_tokens: TOKENS_MAX,
                kv_cache_bytes: 1 << 30,
                swap_bytes: 0,
                kv_cache_dtype: KvCacheDtype::Auto,
                prefix_states: 0,
            };
            let mut engine = engine_of(&model, 0, 1, backend, sizes).unwrap();
            engine.start(NUM_BLOCKS, 0).unwrap();
            serve(0, engine, received, &sender);
        });
        let (plans, threads) = (vec![plans], vec![thread]);
        Self::of(plans, outputs, threads)
    }

    /// A new sequence; `tokens` beyond `num_prompt` were accepted before.
    pub(crate) fn sequence(
        &mut self,
        tokens: &[u32],
        num_prompt: usize,
        sampling: SamplingParams,
    ) -> Seq {
        self.next_seq += 1;
        Seq {
            id: SeqId(self.next_seq),
            tokens: tokens.to_vec(),
            num_prompt,
            logprobs: Vec::new(),
            prompt_logprobs: Vec::new(),
            embedding: Vec::new(),
            computed: 0,
            blocks: 0,
            sampling,
            adapter: 0,
            rule: None,
            drafts: Vec::new(),
            asks: 0,
            admitted: false,
        }
    }

    /// Runs one step over the sequences, at most `chunk` tokens each.
    pub(crate) fn step(&mut self, seqs: &mut [&mut Seq], chunk: u32) {
        self.step += 1;
        let mut plan = StepPlan { epoch: Epoch(1), step: StepId(self.step), ..StepPlan::default() };
        let (mut masks, mut asked) = (Vec::new(), Vec::new());
        for seq in seqs.iter_mut() {
            if !seq.admitted {
                seq.admitted = true;
                plan.admitted.push(NewSequence {
                    seq: seq.id,
                    tokens: seq.tokens.clone(),
                    num_prompt: seq.num_prompt as u32,
                    adapter: seq.adapter,
                    sampling: seq.sampling.clone(),
                });
            }
            let len = seq.tokens.len() as u32;
            let mut drafts = match std::mem::take(&mut seq.asks) {
                0 => Drafts::Known(std::mem::take(&mut seq.drafts)),
                most => Drafts::UpTo(most),
            };
            if seq.computed + 1 != len {
                drafts = Drafts::none();
            }
            asked.extend(drafts.asked().map(|_| seq.id));
            let count = (len - seq.computed).min(chunk);
            let end = seq.computed + count;
            let count = count + drafts.len() as u32;
            let mut new_blocks = Vec::new();
            while seq.blocks * BLOCK_SIZE < seq.computed + count {
                // Scattered over the cache, so that a wrong block table cannot go unnoticed.
                self.next_block += 1;
                new_blocks.push(BlockId(self.next_block * 769 % NUM_BLOCKS));
                seq.blocks += 1;
            }
            let rule = seq.rule.filter(|_| end == len);
            masks.extend(rule.map(|rule| Some(masks::of(rule, &seq.tokens))));
            plan.sequences.push(SequenceStep {
                seq: seq.id,
                start: seq.computed,
                count,
                new_blocks,
                sample: end == len && seq.sampling.pooling.is_none(),
                masked: rule.is_some(),
                drafts,
            });
            seq.computed = end;
        }
        for sender in &self.plans {
            sender.send((plan.clone(), masks.clone())).unwrap();
        }
        let (outputs, drafted, sent) = self.outputs.recv_timeout(PATIENCE).unwrap().unwrap();
        self.sent = sent;
        assert_eq!(drafted.len(), asked.len(), "told of each that was asked for");
        for (seq, drafted) in asked.iter().zip(&drafted) {
            let tokens = outputs.iter().filter(|output| output.seq == *seq).count() as u32;
            assert!((1..=drafted + 1).contains(&tokens), "{tokens} tokens, {drafted} drafted");
            self.drafted.0 += drafted;
            self.drafted.1 += tokens - 1;
        }
        let mut seen = Vec::new();
        for output in outputs {
            let seq = seqs.iter_mut().find(|seq| seq.id == output.seq).unwrap();
            let report = output.prompt_logprobs.iter().map(|entry| (entry.token, entry.logprob));
            seq.prompt_logprobs.extend(report);
            assert!(!output.corrupted);
            if !output.embedding.is_empty() {
                assert!(seq.embedding.is_empty() && seq.computed as usize == seq.tokens.len());
                seq.embedding = output.embedding;
            }
            if let Some(token) = output.token {
                // All but a sequence's first token were drafted, and are already computed.
                seq.computed += u32::from(seen.contains(&seq.id));
                seen.push(seq.id);
                assert_eq!(output.position as usize, seq.tokens.len());
                assert!(seq.rule.is_none_or(|rule| masks::of(rule, &seq.tokens).allows(token)));
                seq.tokens.push(token);
                seq.logprobs.extend(output.logprobs.map(|logprobs| logprobs.logprob));
            }
        }
    }

    /// Runs one sequence until it has generated `output` tokens.
    pub(crate) fn run(&mut self, seq: &mut Seq, output: usize, chunk: u32) {
        while seq.output().len() < output {
            self.step(&mut [seq], chunk);
        }
    }

    /// Generates outputs of so many tokens of all these sequences, in one batch.
    pub(crate) fn run_together(&mut self, seqs: &mut [Seq], output: usize) {
        loop {
            let going = seqs.iter_mut().filter(|seq| seq.output().len() < output);
            let mut going: Vec<&mut Seq> = going.collect();
            if going.is_empty() {
                return;
            }
            self.step(&mut going, 16);
        }
    }

    /// Ends these sequences, and starts over as with an empty cache.
    pub(crate) fn forget(&mut self, seqs: &[&Seq]) {
        self.step += 1;
        let finished = seqs.iter().map(|seq| seq.id).collect();
        let plan =
            StepPlan { epoch: Epoch(1), step: StepId(self.step), finished, ..StepPlan::default() };
        for sender in &self.plans {
            sender.send((plan.clone(), Vec::new())).unwrap();
        }
        self.outputs.recv_timeout(PATIENCE).unwrap().unwrap();
        self.next_block = 0;
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.plans.clear();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
