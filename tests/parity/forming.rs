//! Ranks on CPUs and on (stand-ins for) GPUs, formed as by a coordinator.
use std::net::TcpListener;
use std::time::Duration;

use serde_json::json;
use shared::ids::{Epoch, ReplicaId};
use shared::model_config::ConfigOverrides;
use shared::protocol::{
    CollectiveSpec, Dtype, EngineConfig, Form, KvCacheDtype, Lora, Quantization,
};
use testkit::models::variant;
use worker::device::{CpuDevice, Device};
use worker::engine_rank::EngineRank;
use worker::rank::{AbortSlot, FormError, FormObserver, Rank as _};

use crate::checkpoint::Folder;
use crate::rig::fake_gpu;

/// Relays rank 0's group id to rank 1 and, if requested, ends the epoch while the rank loads.
struct FormReporter<'a> {
    epoch: Epoch,
    other: &'a AbortSlot,
    ends: Option<&'a AbortSlot>,
}

impl FormObserver for FormReporter<'_> {
    fn progress(&mut self, _: u64, _: u64) {
        if let Some(own) = self.ends {
            own.abort(self.epoch);
        }
    }

    fn group_id(&mut self, bytes: Vec<u8>) {
        self.other.tell_group_id(self.epoch, bytes);
    }
}

/// The message with which a coordinator forms one of two ranks.
fn form(rank: u32, epoch: u64) -> Form {
    let name = format!("tutti-forming-{}-{epoch}", std::process::id());
    Form {
        epoch: Epoch(epoch),
        replica: ReplicaId(0),
        rank,
        world_size: 2,
        reduction_ranks: 2,
        config_overrides: ConfigOverrides::default(),
        dtype: Dtype::Auto,
        quantization: Quantization::None,
        lora: Lora::default(),
        draft_model: None,
        collective: CollectiveSpec::SharedMemory { name },
        collective_timeout_ms: 30_000,
        step_timeout_ms: 60_000,
        model: variant("llama-gqa").to_str().unwrap().to_owned(),
        engine: EngineConfig {
            block_size: 16,
            max_model_len: 64,
            max_num_seqs: 4,
            max_num_batched_tokens: 32,
            kv_cache_bytes: 1 << 20,
            swap_bytes: 0,
            kv_cache_dtype: KvCacheDtype::Auto,
            prefix_states: 0,
        },
    }
}

/// Forms a rank as its coordinator does; returns the load times, in seconds, of two epochs, of
/// which the first ends while the rank loads.
fn formed(rank: u32, slots: &[AbortSlot; 2]) -> [f64; 2] {
    let device = fake_gpu(rank, Duration::ZERO);
    let mut engine = EngineRank::new(device, TcpListener::bind("127.0.0.1:0").unwrap());
    let own = &slots[rank as usize];
    [1, 2].map(|epoch| {
        let form = form(rank, epoch);
        let ends = (epoch == 1).then_some(own);
        let mut observer = FormReporter { epoch: form.epoch, other: &slots[1], ends };
        let ready = engine.form(&form, own, &mut observer).unwrap();
        assert!(ready.weight_bytes > 0 && ready.kv_blocks > 0);
        engine.release();
        own.clear();
        assert_eq!(engine.lost_device(), None);
        ready.load_seconds
    })
}

/// Loaded weights are kept for the next epoch even if their epoch ended meanwhile.
#[test]
fn a_load_outlives_its_epoch() {
    let slots = [AbortSlot::default(), AbortSlot::default()];
    let seconds = std::thread::scope(|scope| {
        let slots = &slots;
        let threads = [0, 1].map(|rank| scope.spawn(move || formed(rank, slots)));
        threads.map(|thread| thread.join().unwrap())
    });
    for [first, second] in seconds {
        assert!(first > 0.0 && second == 0.0, "{first} {second}");
    }
}

/// The form of a single rank, with this draft model.
fn alone(epoch: u64, draft: Option<&str>) -> Form {
    Form {
        epoch: Epoch(epoch),
        replica: ReplicaId(0),
        rank: 0,
        world_size: 1,
        reduction_ranks: 1,
        config_overrides: ConfigOverrides::default(),
        dtype: Dtype::Auto,
        quantization: Quantization::None,
        lora: Lora::default(),
        draft_model: draft.map(|name| variant(name).to_str().unwrap().to_owned()),
        collective: CollectiveSpec::None,
        collective_timeout_ms: 30_000,
        step_timeout_ms: 60_000,
        model: variant("llama-gqa").to_str().unwrap().to_owned(),
        engine: EngineConfig {
            block_size: 16,
            max_model_len: 64,
            max_num_seqs: 4,
            max_num_batched_tokens: 32,
            // Less memory than could be used.
            kv_cache_bytes: 60_000,
            swap_bytes: 20_000,
            kv_cache_dtype: KvCacheDtype::Auto,
            prefix_states: 0,
        },
    }
}

/// The draft model takes its part of the memory, stays loaded like the rest, and is read again when
/// its files change.
fn with_drafts<D: Device>(device: D) {
    let slots = [AbortSlot::default(), AbortSlot::default()];
    let mut rank = EngineRank::new(device, TcpListener::bind("127.0.0.1:0").unwrap());
    let mut formed = |epoch, draft, step_tokens| {
        let mut observer = FormReporter { epoch: Epoch(epoch), other: &slots[1], ends: None };
        let mut form = alone(epoch, draft);
        form.engine.max_num_batched_tokens = step_tokens;
        let ready = rank.form(&form, &slots[0], &mut observer).unwrap();
        rank.start(ready.kv_blocks, ready.host_blocks).unwrap();
        rank.release();
        slots[0].clear();
        ready
    };
    let mut form = |epoch, draft| formed(epoch, draft, 32);
    let plain = form(1, None);
    let drafting = form(2, Some("llama-gqa"));
    assert_eq!(drafting.weight_bytes, 2 * plain.weight_bytes, "the same model twice");
    assert_eq!(drafting.kv_blocks, plain.kv_blocks / 2);
    assert_eq!(drafting.host_blocks, plain.host_blocks, "nothing of drafts is swapped");
    assert!(plain.load_seconds > 0.0 && drafting.load_seconds > 0.0);
    let again = form(3, Some("llama-gqa"));
    assert_eq!((again.load_seconds, again.kv_blocks), (0.0, drafting.kv_blocks));
    let other = form(4, Some("smollm3"));
    assert!(other.load_seconds > 0.0 && other.kv_blocks < drafting.kv_blocks, "{other:?}");
    // Steps of another size need other buffers, but the same weights.
    for (epoch, step_tokens) in [(5, 96), (6, 32)] {
        let resized = formed(epoch, Some("smollm3"), step_tokens);
        assert_eq!((resized.load_seconds, resized.kv_blocks), (0.0, other.kv_blocks));
        assert_eq!(resized.weight_bytes, other.weight_bytes);
    }
    let mut observer = FormReporter { epoch: Epoch(7), other: &slots[1], ends: None };
    let error =
        rank.form(&alone(7, Some("../../models/demo")), &slots[0], &mut observer).unwrap_err();
    assert!(error.permanent, "{error}");
    let message = error.to_string();
    assert!(message.contains("demo/config.json: vocab_size is 2048, but the model"), "{message}");
    assert!(!message.contains('\n'));
}

#[test]
fn a_draft_model_is_formed_with_its_rank_on_cpus() {
    with_drafts(CpuDevice { threads: 1 });
}

#[test]
fn a_draft_model_is_formed_with_its_rank_on_gpus() {
    with_drafts(fake_gpu(0, Duration::from_secs(5)));
}

/// Whatever a coordinator sends, its worker goes on.
#[test]
fn ranks_and_sizes_that_cannot_be_are_refused() {
    let slots = [AbortSlot::default(), AbortSlot::default()];
    let device = CpuDevice { threads: 1 };
    let mut rank = EngineRank::new(device, TcpListener::bind("127.0.0.1:0").unwrap());
    let mut refused = |edit: fn(&mut Form), expected: &str| {
        let mut form = alone(1, None);
        edit(&mut form);
        let mut observer = FormReporter { epoch: Epoch(1), other: &slots[1], ends: None };
        let error = rank.form(&form, &slots[0], &mut observer).unwrap_err();
        assert_eq!((error.message.as_str(), error.permanent), (expected, true));
    };
    refused(|form| form.rank = 1, "rank 1 of 1 is to be formed");
    refused(|form| form.world_size = 0, "rank 0 of 0 is to be formed");
    refused(|form| form.world_size = 2, "1 of 2 ranks are to be connected");
    refused(
        |form| form.collective = CollectiveSpec::Tcp { ranks: Vec::new(), token: 1 },
        "0 of 1 ranks are to be connected",
    );
    refused(|form| form.engine.block_size = 0, "block_size is 0, it must be at least 1");
    refused(|form| form.engine.max_model_len = 0, "max_model_len is 0, it must be at least 1");
    refused(|form| form.engine.max_num_seqs = 0, "max_num_seqs is 0, it must be at least 1");
    refused(
        |form| form.engine.max_num_batched_tokens = 0,
        "max_num_batched_tokens is 0, it must be at least 1",
    );
}

/// Steps for which there is no memory are refused in a line, before anything is given up for them.
#[test]
fn steps_beyond_a_gpus_memory_are_refused_and_the_weights_stay() {
    let slots = [AbortSlot::default(), AbortSlot::default()];
    let device = fake_gpu(0, Duration::ZERO);
    let mut rank = EngineRank::new(device, TcpListener::bind("127.0.0.1:0").unwrap());
    let mut formed = |epoch, step_tokens| {
        let mut form = alone(epoch, None);
        form.engine.max_num_batched_tokens = step_tokens;
        let mut observer = FormReporter { epoch: form.epoch, other: &slots[1], ends: None };
        let ready = rank.form(&form, &slots[0], &mut observer);
        assert_eq!(rank.lost_device(), None);
        rank.release();
        slots[0].clear();
        ready
    };
    let small = formed(1, 32).unwrap();
    // Gigabytes of activations.
    let error = formed(2, 1 << 23).unwrap_err();
    assert!(error.permanent && !error.message.contains('\n'), "{error}");
    for words in ["do not fit on the GPU beside the weights: ", "--max-num-batched-tokens"] {
        assert!(error.message.contains(words), "{error}");
    }
    let again = formed(3, 48).unwrap();
    assert_eq!((again.load_seconds, again.kv_blocks), (0.0, small.kv_blocks));
}

/// A host without room for all pages of a cache would end the process that writes to them.
#[test]
fn a_cache_beyond_the_hosts_memory_is_refused() {
    let slots = [AbortSlot::default(), AbortSlot::default()];
    let device = CpuDevice { threads: 1 };
    let mut rank = EngineRank::new(device, TcpListener::bind("127.0.0.1:0").unwrap());
    let mut form = |kv_cache_bytes| {
        let plain = alone(1, None);
        // A block for each of many sequences, each of many tokens: terabytes.
        let (block_size, max_num_seqs) = (1 << 18, 1 << 16);
        let engine = EngineConfig { block_size, max_num_seqs, kv_cache_bytes, ..plain.engine };
        let engine = EngineConfig { swap_bytes: 0, ..engine };
        let mut observer = FormReporter { epoch: Epoch(1), other: &slots[1], ends: None };
        let ready = rank.form(&Form { engine, ..plain }, &slots[0], &mut observer);
        rank.release();
        ready
    };
    let error = form(u64::MAX).unwrap_err();
    assert!(!error.permanent, "another process may give memory back");
    let message = error.to_string();
    assert!(message.starts_with("a KV cache of "), "{message}");
    assert!(message.contains("(--kv-cache-memory) is needed, but this host has "), "{message}");
    assert!(form(256 << 20).unwrap().kv_blocks > 0);
}

/// Loaded weights are kept as long as their files are unchanged or missing, but not if other files
/// replace them.
#[test]
fn a_folder_that_was_replaced_is_loaded_anew() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    std::fs::create_dir(&model).unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(variant("llama-gqa").join(name), model.join(name)).unwrap();
    }
    let device = CpuDevice { threads: 1 };
    let mut engine = EngineRank::new(device, TcpListener::bind("127.0.0.1:0").unwrap());
    let (own, other) = (AbortSlot::default(), AbortSlot::default());
    let mut epoch = 0;
    let mut form = || {
        epoch += 1;
        let form = Form {
            epoch: Epoch(epoch),
            world_size: 1,
            reduction_ranks: 1,
            collective: CollectiveSpec::None,
            model: model.to_str().unwrap().to_owned(),
            ..form(0, epoch)
        };
        let ready = engine.form(
            &form,
            &own,
            &mut FormReporter { epoch: form.epoch, other: &other, ends: None },
        );
        engine.release();
        own.clear();
        ready.map(|ready| (ready.load_seconds > 0.0, ready.identity))
    };
    let (loaded, first) = form().unwrap();
    assert!(loaded);
    assert_eq!(form().unwrap(), (false, first), "the same again");
    // Touched, but not changed.
    let file = model.join("model.safetensors");
    let whole = std::fs::read(&file).unwrap();
    std::fs::write(&file, &whole).unwrap();
    assert_eq!(form().unwrap(), (false, first));
    // Gone: the loaded weights do not need the file.
    std::fs::remove_file(&file).unwrap();
    assert_eq!(form().unwrap(), (false, first));
    // Other weights of the same shapes: one bit differs in the middle of every kilobyte.
    let mut others = whole.clone();
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    others[header..].iter_mut().skip(2).step_by(256).for_each(|byte| *byte ^= 1);
    std::fs::write(&file, &others).unwrap();
    let (loaded, second) = form().unwrap();
    assert!(loaded && second != first);
    std::fs::write(&file, &whole).unwrap();
    assert_eq!(form().unwrap(), (true, first));
}

/// A model with other keys laid over its configuration is another one.
#[test]
fn other_keys_laid_over_the_configuration_are_loaded_anew() {
    let device = CpuDevice { threads: 1 };
    let mut engine = EngineRank::new(device, TcpListener::bind("127.0.0.1:0").unwrap());
    let (own, other) = (AbortSlot::default(), AbortSlot::default());
    let mut epoch = 0;
    let mut is_loaded = |text: &str| {
        epoch += 1;
        let config_overrides = ConfigOverrides::parse(text).unwrap();
        let form = Form { config_overrides, ..alone(epoch, None) };
        let mut observer = FormReporter { epoch: form.epoch, other: &other, ends: None };
        let ready = engine.form(&form, &own, &mut observer);
        engine.release();
        own.clear();
        ready.map(|ready| ready.load_seconds > 0.0).map_err(|error| error.message)
    };
    let theta = r#"{"rope_parameters": null, "rope_scaling": null, "rope_theta": 500000.0}"#;
    for (text, expected) in [("{}", true), ("{}", false), (theta, true), (theta, false)] {
        assert_eq!(is_loaded(text), Ok(expected), "{text}");
    }
    let error = is_loaded(r#"{"max_position_embeddings": 32}"#).unwrap_err();
    assert!(error.contains("max_position_embeddings is 32, below"), "{error}");
    assert_eq!(is_loaded("{}"), Ok(true), "back to the file's own");
}

/// Before weights are read, which would say that a tensor has another shape. It is no fault of the
/// GPU, and its worker goes on.
#[test]
fn gpus_refuse_what_they_do_not_take_before_they_load() {
    let device = fake_gpu(0, Duration::ZERO);
    let slots = [AbortSlot::default(), AbortSlot::default()];
    let mut rank = EngineRank::new(device, TcpListener::bind("127.0.0.1:0").unwrap());
    let mut formed = |folder: &Folder, edit: fn(&mut Form)| {
        let mut form = Form { model: folder.path().to_str().unwrap().to_owned(), ..alone(1, None) };
        edit(&mut form);
        let mut observer = FormReporter { epoch: Epoch(1), other: &slots[1], ends: None };
        let ready = rank.form(&form, &slots[0], &mut observer);
        assert_eq!(rank.lost_device(), None);
        rank.release();
        slots[0].clear();
        ready
    };
    let refuses = |error: FormError, expected: &str| {
        assert!(error.permanent && error.message.contains(expected), "{error}");
    };
    let latents = Folder::copy_of("deepseek-v3");
    latents.configure("kv_lora_rank", json!(40));
    let expected = "latents of 40 in vectors of 56: GPUs take multiples of 16";
    refuses(formed(&latents, |_| {}).unwrap_err(), expected);
    let expected = "LoRA adapters of models with multi-head latent attention";
    refuses(formed(&latents, |form| form.lora.places = 2).unwrap_err(), expected);
    let wide = Folder::copy_of("llama-gqa");
    wide.configure("head_dim", json!(320));
    refuses(formed(&wide, |_| {}).unwrap_err(), "head_dim is 320: GPUs take up to 256");
    let plain = Folder::copy_of("llama-gqa");
    let expected = "a block size of 24 tokens: GPUs need a power of two";
    let odd_blocks = |form: &mut Form| form.engine.block_size = 24;
    refuses(formed(&plain, odd_blocks).unwrap_err(), expected);
    assert!(formed(&plain, |_| {}).unwrap().load_seconds > 0.0);
    refuses(formed(&plain, odd_blocks).unwrap_err(), expected);
    assert_eq!(formed(&plain, |_| {}).unwrap().load_seconds, 0.0, "its weights stay");
}
