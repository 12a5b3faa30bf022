//! LoRA adapters that come and go on a rank while it computes: the same results as on a rank that
//! was formed with them.
use std::net::TcpListener;
use std::time::Duration;

use shared::ids::{BlockId, Epoch, ReplicaId, SeqId, StepId};
use shared::model_config::ConfigOverrides;
use shared::protocol::{
    Adapter, CollectiveSpec, Drafts, Dtype, EngineConfig, Form, KvCacheDtype, Lora, NewSequence,
    Quantization, SequenceStep, StepPlan,
};
use shared::sampling::SamplingParams;
use testkit::adapters::AdapterSpec;
use testkit::models::{goldens, variant};
use worker::device::{CpuDevice, Device};
use worker::engine_rank::EngineRank;
use worker::model::lora::Piece;
use worker::rank::{AbortSlot, AdapterSink, EmptyStepSource, FormObserver, Rank as _};

use crate::adapters::Scratch;
use crate::rig::fake_gpu;

const TOKENS: u32 = 6;
const BLOCK: u32 = 16;

struct NoNews;

impl FormObserver for NoNews {
    fn progress(&mut self, _: u64, _: u64) {}
    fn group_id(&mut self, _: Vec<u8>) {}
}

/// One rank that serves, and what its plans need.
struct Serving<D: Device> {
    rank: EngineRank<D>,
    slot: AbortSlot,
    epoch: u64,
    step: u64,
    sequences: u64,
    /// The largest step, in tokens.
    step_tokens: u32,
}

impl<D: Device> Serving<D> {
    fn new(device: D) -> Self {
        let rank = EngineRank::new(device, TcpListener::bind("127.0.0.1:0").unwrap());
        let (slot, step_tokens) = (AbortSlot::default(), 64);
        Self { rank, slot, epoch: 0, step: 0, sequences: 0, step_tokens }
    }

    fn form(&mut self, lora: &Lora) -> (f64, u64) {
        self.rank.release();
        self.slot.clear();
        (self.epoch, self.step) = (self.epoch + 1, 0);
        let form = Form {
            epoch: Epoch(self.epoch),
            replica: ReplicaId(0),
            rank: 0,
            world_size: 1,
            reduction_ranks: 1,
            config_overrides: ConfigOverrides::default(),
            dtype: Dtype::Auto,
            quantization: Quantization::None,
            lora: lora.clone(),
            draft_model: None,
            collective: CollectiveSpec::None,
            collective_timeout_ms: 30_000,
            step_timeout_ms: 60_000,
            model: variant("llama-gqa").to_str().unwrap().to_owned(),
            engine: EngineConfig {
                block_size: BLOCK,
                max_model_len: 64,
                max_num_seqs: 4,
                max_num_batched_tokens: self.step_tokens,
                kv_cache_bytes: 1 << 20,
                swap_bytes: 0,
                kv_cache_dtype: KvCacheDtype::Auto,
                prefix_states: 0,
            },
        };
        let ready = self.rank.form(&form, &self.slot, &mut NoNews).unwrap();
        self.rank.start(ready.kv_blocks, 0).unwrap();
        (ready.load_seconds, ready.adapters)
    }

    /// Begins a sequence; returns it with its first token.
    fn begin(&mut self, prompt: &[u32], adapter: u32) -> Result<Running, String> {
        self.sequences += 1;
        let seq = SeqId(self.sequences);
        let sampling = SamplingParams { logprobs: Some(0), ..SamplingParams::greedy() };
        let (tokens, num_prompt) = (prompt.to_vec(), prompt.len() as u32);
        let new = NewSequence { seq, tokens, num_prompt, adapter, sampling };
        // Sequences take turns in the first blocks: two of them at a time.
        let first = (self.sequences as u32 % 2) * 4;
        let blocks = (first..first + 4).map(BlockId).collect();
        let mut running = Running { seq, length: num_prompt, told: Vec::new() };
        self.run(&mut running, vec![new], (0, num_prompt, blocks))?;
        Ok(running)
    }

    /// Adds a token.
    fn go_on(&mut self, running: &mut Running) {
        let start = running.length - 1;
        self.run(running, Vec::new(), (start, 1, Vec::new())).unwrap();
    }

    fn run(
        &mut self,
        running: &mut Running,
        admitted: Vec<NewSequence>,
        (start, count, new_blocks): (u32, u32, Vec<BlockId>),
    ) -> Result<(), String> {
        self.step += 1;
        let (seq, sample, masked) = (running.seq, true, false);
        let drafts = Drafts::none();
        let plan = StepPlan {
            epoch: Epoch(self.epoch),
            step: StepId(self.step),
            finished: Vec::new(),
            swap_out: Vec::new(),
            swap_in: Vec::new(),
            begin_with: Vec::new(),
            keep: Vec::new(),
            admitted,
            sequences: vec![SequenceStep { seq, start, count, new_blocks, sample, masked, drafts }],
        };
        let mut outputs = Vec::new();
        self.rank.step(&plan, &mut EmptyStepSource, &mut outputs)?;
        let output = &outputs[0];
        let logprob = output.logprobs.as_ref().unwrap().logprob.to_bits();
        running.told.push((output.token.unwrap(), logprob));
        running.length += 1;
        Ok(())
    }

    fn whole(&mut self, prompt: &[u32], adapter: u32) -> Vec<(u32, u32)> {
        let mut running = self.begin(prompt, adapter).unwrap();
        for _ in 1..TOKENS {
            self.go_on(&mut running);
        }
        running.told
    }

    /// Loads an adapter as the executor does: its pieces come between the steps of `beside`.
    fn load(&mut self, adapter: &Adapter, beside: &mut Running) -> Result<(), String> {
        let reading = self.rank.open_adapter(adapter)?;
        let mut kept = Kept(Vec::new());
        let identity = reading(&mut kept);
        let Kept(pieces) = kept;
        let identity = identity.inspect_err(|_| self.rank.drop_adapter(adapter.number))?;
        for (index, piece) in pieces.iter().enumerate() {
            self.rank.put_adapter(adapter.number, piece)?;
            if index == 1 {
                let early = self.begin(&[1, 2], adapter.number).err().unwrap_or_default();
                assert!(early.contains("not loaded"), "only some of it is here: {early}");
            }
            if beside.told.len() < TOKENS as usize {
                self.go_on(beside);
            }
        }
        self.rank.complete_adapter(adapter.number, identity);
        Ok(())
    }
}

/// Takes every piece.
struct Kept(Vec<Piece>);

impl AdapterSink for Kept {
    fn take(&mut self, piece: Piece) -> bool {
        self.0.push(piece);
        true
    }

    fn fetches(&mut self, _: Option<(u64, u64)>) -> bool {
        true
    }
}

#[derive(Debug)]
struct Running {
    seq: SeqId,
    /// Its tokens, with the last sampled one.
    length: u32,
    /// The tokens sampled, with the bits of their log-probabilities.
    told: Vec<(u32, u32)>,
}

fn adapters_come_and_go<D: Device>(device: impl Fn() -> D) {
    let model = variant("llama-gqa");
    let specs = [AdapterSpec::whole(8, 1), AdapterSpec::attention(16, 2), AdapterSpec::whole(5, 3)];
    let scratch = Scratch::new(&model, &specs);
    let prompt = &goldens(&model)[0].prompt_ids;
    let prompt = &prompt[..prompt.len().min(40)];
    let listed = |numbers: &[usize], places: u32| {
        let all = &scratch.lora().adapters;
        let adapters = numbers.iter().map(|number| all[number - 1].clone()).collect();
        Lora { adapters, max_rank: 16, places }
    };
    // The oracle: a rank formed with all of them, whose places never change.
    let mut fixed = Serving::new(device());
    fixed.form(&listed(&[1, 2, 3], 3));
    let wanted: Vec<_> = (0..4).map(|adapter| fixed.whole(prompt, adapter)).collect();
    let tokens = |told: &[(u32, u32)]| told.iter().map(|it| it.0).collect::<Vec<_>>();
    assert!(wanted.iter().skip(1).all(|told| told != &wanted[0]), "adapters change something");
    drop(fixed);

    let mut serving = Serving::new(device());
    let (_, none) = serving.form(&listed(&[], 2));
    assert_eq!(serving.whole(prompt, 0), wanted[0]);
    assert!(serving.begin(prompt, 2).is_err(), "it is not there yet");
    let (_, again) = serving.form(&listed(&[], 2));
    assert_eq!(none, again);
    let mut beside = serving.begin(prompt, 0).unwrap();
    for number in [2, 1] {
        serving.load(&scratch.lora().adapters[number - 1], &mut beside).unwrap();
        assert_eq!(serving.whole(prompt, number as u32), wanted[number], "adapter {number}");
    }
    assert_eq!(beside.told, wanted[0][..beside.told.len()], "what ran beside is as it was");
    // There are two places.
    let third = &scratch.lora().adapters[2];
    let full = serving.load(third, &mut beside).unwrap_err();
    assert!(full.contains("all 2 places"), "{full}");
    serving.rank.drop_adapter(2);
    let broken = Adapter { path: "/no/such/adapter".to_owned(), ..third.clone() };
    let error = serving.load(&broken, &mut beside).unwrap_err();
    assert!(error.contains("/no/such/adapter") && !error.contains('\n'), "{error}");
    // The place of another, with modules that this one leaves as they are.
    serving.load(third, &mut beside).unwrap();
    assert_eq!(serving.whole(prompt, 3), wanted[3]);
    assert_eq!(serving.whole(prompt, 1), wanted[1]);
    assert_eq!(tokens(&serving.whole(prompt, 0)), tokens(&wanted[0]));
    // Formed again with other adapters: the weights stay, and so do those that are listed.
    let (seconds, contents) = serving.form(&listed(&[3, 2], 2));
    assert_eq!(seconds, 0.0);
    assert!(contents != 0 && contents != none);
    for number in [0, 2, 3] {
        assert_eq!(serving.whole(prompt, number as u32), wanted[number], "adapter {number}");
    }
    assert!(serving.begin(prompt, 1).unwrap_err().contains("adapter 1, not loaded"));
    // The same fingerprint in other places.
    let (_, swapped) = serving.form(&listed(&[2, 3], 2));
    assert_eq!(swapped, contents);
    // With smaller steps and with larger ones again: the weights stay, and so do the adapters.
    serving.step_tokens = prompt.len() as u32 - 1;
    assert_eq!(serving.form(&listed(&[2, 3], 2)), (0.0, contents));
    let error = serving.begin(prompt, 2).unwrap_err();
    assert!(error.contains(&format!("the limit is {}", serving.step_tokens)), "{error}");
    serving.step_tokens = 64;
    assert_eq!(serving.form(&listed(&[2, 3], 2)), (0.0, contents));
    for number in [0, 2, 3] {
        assert_eq!(serving.whole(prompt, number as u32), wanted[number], "adapter {number}");
    }
}

#[test]
fn adapters_come_and_go_on_cpus() {
    adapters_come_and_go(|| CpuDevice { threads: 2 });
}

/// In graphs that were recorded before the adapters came.
#[test]
fn adapters_come_and_go_on_gpus() {
    adapters_come_and_go(|| fake_gpu(0, Duration::from_secs(5)));
}
