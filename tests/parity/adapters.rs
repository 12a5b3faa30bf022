//! LoRA adapters: same results as a model with merged weights, and as PEFT; same bits alone and in
//! a batch, at every tensor-parallel degree.
use std::path::{Path, PathBuf};

use kernels::ReferenceBackend;
use kernels::collective::single_rank;
use shared::protocol::Lora;
use shared::sampling::{Pooling, SamplingParams};
use tempfile::TempDir;
use testkit::adapters::{AdapterSpec, FUSED, Factors};
use testkit::models::{demo, goldens, repository, variant};
use worker::model::config::ModelConfig;
use worker::model::lora::LoraFiles;
use worker::model::shard::Shard;

use crate::checkpoint::{Folder, Tensor};
use crate::rig::{On, Rig, Seq};

/// Largest error of a log-probability.
const TOLERANCE: f64 = 1e-3;
/// The same with products in bf16; see [`crate::goldens`].
const BF16_TOLERANCE: f64 = 0.15;

/// Adapters in a temporary folder.
pub(crate) struct Scratch {
    folder: TempDir,
    lora: Lora,
    factors: Vec<Vec<Factors>>,
}

impl Scratch {
    pub(crate) fn new(model: &Path, specs: &[AdapterSpec]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (mut adapters, mut factors) = (Vec::new(), Vec::new());
        for (index, spec) in specs.iter().enumerate() {
            let path = folder.path().join(index.to_string());
            std::fs::create_dir(&path).unwrap();
            factors.push(spec.write(model, &path).unwrap());
            adapters.push(named(&path));
        }
        Self { folder, lora: Lora::fixed(adapters, 64), factors }
    }

    pub(crate) fn lora(&self) -> &Lora {
        &self.lora
    }

    fn open(&self, model: &Path) -> Result<LoraFiles, String> {
        let config = ModelConfig::load(model).unwrap();
        LoraFiles::open(&self.lora, &config).map_err(|error| error.to_string())
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join("0").join(name)
    }
}

fn named(path: &Path) -> (String, String) {
    let name = path.file_name().unwrap().to_str().unwrap().to_owned();
    (name, path.to_str().unwrap().to_owned())
}

fn greedy() -> SamplingParams {
    SamplingParams { logprobs: Some(0), prompt_logprobs: Some(0), ..SamplingParams::greedy() }
}

fn prompts(model: &Path) -> Vec<Vec<u32>> {
    goldens(model).into_iter().map(|golden| golden.prompt_ids).collect()
}

fn sequence(rig: &mut Rig, prompt: &[u32], adapter: u32) -> Seq {
    let mut seq = rig.sequence(prompt, prompt.len(), greedy());
    seq.adapter = adapter;
    seq
}

/// The tokens, and the bits of all log-probabilities.
fn bits(seq: &Seq) -> (Vec<u32>, Vec<u32>, Vec<u32>) {
    let prompt = seq.prompt_logprobs.iter().map(|(_, logprob)| logprob.to_bits()).collect();
    let output = seq.logprobs.iter().map(|logprob| logprob.to_bits()).collect();
    (seq.output().to_vec(), prompt, output)
}

/// A copy of a model with the weights `W + scale * B A`, in f32.
fn merged(name: &str, factors: &[Factors], spec: &AdapterSpec) -> Folder {
    let folder = Folder::copy_of(name);
    folder.edit(|tensors| tensors.iter_mut().for_each(|tensor| merge(tensor, factors, spec)));
    folder
}

fn merge(tensor: &mut Tensor, factors: &[Factors], spec: &AdapterSpec) {
    let module = tensor.name.strip_suffix(".weight");
    let Some(found) = factors.iter().find(|factors| Some(&*factors.module) == module) else {
        return;
    };
    if tensor.dtype == "BF16" {
        tensor.widen();
    }
    let ((outputs, inputs), rank) = (found.shape, spec.rank);
    assert_eq!(tensor.shape, [outputs, inputs], "{}", tensor.name);
    let scale = spec.alpha / rank as f64;
    for (at, bytes) in tensor.data.chunks_exact_mut(4).enumerate() {
        let (row, col) = (at / inputs, at % inputs);
        let terms = (0..rank)
            .map(|i| f64::from(found.b[row * rank + i]) * f64::from(found.a[i * inputs + col]));
        let weight = f64::from(f32::from_le_bytes(bytes.try_into().unwrap()));
        bytes.copy_from_slice(&((weight + scale * terms.sum::<f64>()) as f32).to_le_bytes());
    }
}

/// For each architecture, its model and an adapter for it.
fn specs() -> Vec<(&'static str, AdapterSpec)> {
    vec![
        ("llama-gqa", AdapterSpec::whole(8, 1)),
        ("llama-mha-bias", AdapterSpec::whole(3, 2)),
        ("llama-tied", AdapterSpec { modules: vec!["mlp.down_proj"], ..AdapterSpec::whole(16, 3) }),
        ("qwen2", AdapterSpec { modules: vec!["self_attn.v_proj"], ..AdapterSpec::whole(8, 4) }),
        ("qwen3", AdapterSpec::whole(24, 5)),
        ("mistral-swa", AdapterSpec { alpha: 3.0, ..AdapterSpec::whole(4, 6) }),
        ("gemma3", AdapterSpec::whole(8, 8)),
        ("mixtral", AdapterSpec::attention(8, 7)),
        ("gpt-oss", AdapterSpec::attention(8, 9)),
        ("phi4-mini", AdapterSpec { modules: FUSED.to_vec(), ..AdapterSpec::whole(8, 8) }),
        ("olmo2", AdapterSpec::whole(8, 10)),
        ("cohere2", AdapterSpec::whole(8, 11)),
        ("starcoder2", AdapterSpec { modules: vec!["mlp.c_fc"], ..AdapterSpec::whole(8, 12) }),
    ]
}

/// Another adapter for the same model, only for attention.
fn other(spec: &AdapterSpec) -> AdapterSpec {
    let attention = AdapterSpec::attention(5, 99);
    match spec.modules.contains(&FUSED[0]) {
        true => AdapterSpec { modules: FUSED[..2].to_vec(), ..attention },
        false => attention,
    }
}

#[test]
fn an_adapter_makes_what_merged_weights_make() {
    for (name, spec) in specs() {
        let model = variant(name);
        let scratch = Scratch::new(&model, &[other(&spec), spec.clone()]);
        let merged = merged(name, &scratch.factors[1], &spec);
        let mut oracle = Rig::on(On::Reference, merged.path(), 1);
        let mut base = Rig::on(On::Reference, &model, 1);
        let mut longest = prompts(&model).into_iter().max_by_key(Vec::len).unwrap();
        longest.truncate(24);
        let mut wanted = oracle.sequence(&longest, longest.len(), greedy());
        oracle.run(&mut wanted, 1, u32::MAX);
        let mut plain = base.sequence(&longest, longest.len(), greedy());
        base.run(&mut plain, 1, u32::MAX);
        let change = worst(&plain, &wanted);
        assert!(change > 0.05, "{name}: the adapter changes little, {change}");
        let on = [On::Reference, On::Reference, On::Cpu, On::Cpu, On::FakeCuda];
        for (on, degree) in on.into_iter().zip([1, 2, 1, 2, 1]) {
            let mut rig = Rig::adapted(on, &model, (degree, degree), &scratch.lora);
            let mut seq = sequence(&mut rig, &longest, 2);
            rig.run(&mut seq, 1, u32::MAX);
            // CPUs keep the scaled B in bf16, so some scales round it; GPUs' products take bf16.
            let bound = match on {
                On::FakeCuda => BF16_TOLERANCE,
                On::Cpu if spec.alpha == 3.0 => 20.0 * TOLERANCE,
                _ => TOLERANCE,
            };
            let error = worst(&seq, &wanted);
            println!("{name} on {on:?} tp {degree}: {error:.1e} of a change of {change:.1e}");
            assert!(error < bound, "{name} on {on:?} at tp {degree}: off by {error}");
        }
    }
}

/// Largest difference of the log-probabilities of two sequences' prompts.
fn worst(a: &Seq, b: &Seq) -> f64 {
    assert_eq!(a.prompt_logprobs.len(), b.prompt_logprobs.len());
    let pairs = a.prompt_logprobs.iter().zip(&b.prompt_logprobs);
    pairs.map(|(a, b)| f64::from(a.1 - b.1).abs()).fold(0.0, f64::max)
}

#[test]
fn requests_of_all_adapters_in_one_batch_get_the_same_bits_as_alone() {
    let model = demo();
    let specs = [AdapterSpec::whole(8, 11), AdapterSpec::attention(20, 12)];
    let scratch = Scratch::new(&model, &specs);
    let all = prompts(&model);
    for (on, degree) in
        [(On::Cpu, 1), (On::Cpu, 2), (On::CpuBf16, 2), (On::CpuInt8, 2), (On::FakeInvariant, 1)]
    {
        let mut rig = Rig::adapted(on, &model, (degree, degree), &scratch.lora);
        // The base model, without any adapters loaded.
        let mut bare = Rig::on(on, &model, degree);
        let request = |i: usize| (&all[i % 4], (i % 3) as u32);
        let mut alone = Vec::new();
        // An emulated one takes a while for each alone.
        let count = if matches!(on, On::FakeInvariant) { 5 } else { 9 };
        for i in 0..count {
            let (prompt, adapter) = request(i);
            let mut seq = sequence(&mut rig, prompt, adapter);
            rig.run(&mut seq, 6, u32::MAX);
            rig.forget(&[&seq]);
            if adapter == 0 {
                let mut plain = sequence(&mut bare, prompt, 0);
                bare.run(&mut plain, 6, u32::MAX);
                bare.forget(&[&plain]);
                assert_eq!(bits(&plain), bits(&seq), "no adapter on {on:?} at tp {degree}");
            }
            alone.push(seq);
        }
        assert_ne!(alone[0].output(), alone[4].output(), "an adapter changes something");
        let mut batch: Vec<Seq> = (0..count)
            .map(|i| {
                let (prompt, adapter) = request(i);
                sequence(&mut rig, prompt, adapter)
            })
            .collect();
        let mut running = 0;
        while batch.iter().any(|seq| seq.output().len() < 6) {
            running = (running + 3).min(batch.len());
            let mut step: Vec<&mut Seq> =
                batch[..running].iter_mut().filter(|seq| seq.output().len() < 6).collect();
            rig.step(&mut step, 24);
        }
        for (i, (alone, together)) in alone.iter().zip(&batch).enumerate() {
            assert_eq!(bits(alone), bits(together), "request {i} on {on:?} at tp {degree}");
        }
    }
}

#[test]
fn every_degree_makes_the_same_bits() {
    let model = demo();
    let scratch = Scratch::new(&model, &[AdapterSpec::whole(8, 21), AdapterSpec::attention(4, 22)]);
    let all = prompts(&model);
    for on in [On::Cpu, On::CpuBf16, On::Reference] {
        let mut wanted = None;
        for degree in [4, 2, 1] {
            let mut rig = Rig::adapted(on, &model, (degree, 4), &scratch.lora);
            let mut found = Vec::new();
            for adapter in 0..3 {
                let mut seq = sequence(&mut rig, &all[1], adapter);
                rig.run(&mut seq, 6, u32::MAX);
                found.push(bits(&seq));
            }
            let wanted = wanted.get_or_insert_with(|| found.clone());
            assert_eq!(*wanted, found, "{on:?} at tp {degree}");
        }
    }
}

#[test]
fn drafts_are_verified_with_the_sequences_own_adapter() {
    let model = demo();
    let scratch = Scratch::new(&model, &[AdapterSpec::whole(8, 31)]);
    let prompt = &prompts(&model)[2];
    let mut rig = Rig::adapted(On::CpuBf16, &model, (1, 1), &scratch.lora);
    let sampling = SamplingParams { logprobs: Some(0), ..SamplingParams::greedy() };
    let mut plain = rig.sequence(prompt, prompt.len(), sampling.clone());
    plain.adapter = 1;
    rig.run(&mut plain, 9, u32::MAX);
    let mut drafted = rig.sequence(prompt, prompt.len(), sampling);
    drafted.adapter = 1;
    rig.run(&mut drafted, 1, u32::MAX);
    drafted.drafts = plain.output()[1..8].to_vec();
    rig.step(&mut [&mut drafted], u32::MAX);
    assert_eq!(bits(&drafted), bits(&plain), "all drafts count");
}

/// The memory that a GPU reserves before anything is loaded.
#[test]
fn what_adapters_take_is_known_before_they_are_loaded() {
    for (name, spec) in specs() {
        let model = variant(name);
        let other = other(&spec);
        let scratch = Scratch::new(&model, &[spec, other]);
        let config = ModelConfig::load(&model).unwrap();
        let files = scratch.open(&model).unwrap();
        for rank in 0..2 {
            let shard = Shard::new(&config, rank, 2).unwrap();
            let mut backend = ReferenceBackend::new(single_rank());
            let loaded = files.load(&mut backend, &config, &shard, 8).unwrap().unwrap();
            let (matrices, room) = files.bytes(&config, &shard, 8).unwrap();
            assert_eq!(matrices, loaded.bytes(), "{name}");
            assert!(room > 0 && files.bytes(&config, &shard, 16).unwrap().1 == 2 * room);
        }
    }
}

#[test]
fn what_is_wrong_with_an_adapter_is_said_in_a_line() {
    let model = variant("llama-gqa");
    let spec = AdapterSpec::whole(8, 41);
    let refused = |change: &dyn Fn(&mut Scratch), words: &str| {
        let mut scratch = Scratch::new(&model, std::slice::from_ref(&spec));
        change(&mut scratch);
        let error = scratch.open(&model).err().unwrap_or_default();
        assert!(error.contains(words) && !error.contains('\n'), "{words}: {error:?}");
    };
    let configure = |from: &'static str, to: &'static str| {
        move |scratch: &mut Scratch| {
            let path = scratch.file("adapter_config.json");
            let text = std::fs::read_to_string(&path).unwrap();
            assert!(text.contains(from), "{text}");
            std::fs::write(path, text.replace(from, to)).unwrap();
        }
    };
    let rename = |from: &'static str, to: &'static str| {
        move |scratch: &mut Scratch| {
            let path = scratch.file("adapter_model.safetensors");
            let mut bytes = std::fs::read(&path).unwrap();
            assert_eq!(from.len(), to.len());
            let at = bytes.windows(from.len()).position(|it| it == from.as_bytes()).unwrap();
            bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
            std::fs::write(path, bytes).unwrap();
        }
    };
    refused(&|scratch| scratch.lora.max_rank = 4, "r is 8, it must be 1 to 4 (--max-lora-rank)");
    refused(&configure("\"use_dora\":false", "\"use_dora\":true"), "use_dora is true");
    refused(&configure("\"r\":8", "\"r\":4"), "require [4, ");
    refused(&configure("\"LORA\"", "\"IA3\""), "peft_type is \"IA3\"");
    refused(
        &configure("\"target_modules\":[", "\"target_modules\":[\"lm_head\","),
        "tensor lm_head: is missing, but target_modules",
    );
    refused(
        &rename("layers.0.self_attn.q_proj.lora_A", "layers.9.self_attn.q_proj.lora_A"),
        "belongs to layer 9, but the model has 2",
    );
    refused(
        &rename("layers.0.self_attn.q_proj.lora_A", "layers.0.self_attn.q_norm.lora_A"),
        "belongs to none of the modules that adapters can change",
    );
    refused(
        &rename("layers.0.self_attn.q_proj.lora_A", "embed_tokens.aaaaaaaaaaaa.lora_A"),
        "adapters of embeddings and output heads are not supported",
    );
    refused(
        &|scratch| std::fs::remove_file(scratch.file("adapter_config.json")).unwrap(),
        "adapter_config.json: cannot be read",
    );
    refused(
        &|scratch| {
            let file = scratch.file("adapter_model.safetensors");
            std::fs::rename(&file, scratch.file("adapter_model.bin")).unwrap();
        },
        "adapter_model.bin is not read",
    );
    // One that has no matrices of a module which the model has.
    let folder = repository().join("tests/parity/adapters/llama-gqa-qv");
    let scratch = Scratch::new(&model, std::slice::from_ref(&spec));
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        std::fs::copy(folder.join(file), scratch.file(file)).unwrap();
    }
    let path = scratch.file("adapter_config.json");
    let mut config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["target_modules"].as_array_mut().unwrap().push("o_proj".into());
    std::fs::write(path, config.to_string()).unwrap();
    let error = scratch.open(&model).err().unwrap_or_default();
    assert!(error.contains("tensor o_proj: is missing, but target_modules"), "{error}");
    // Experts cannot be adapted.
    let model = variant("mixtral");
    let scratch = Scratch::new(&model, &[AdapterSpec::whole(8, 42)]);
    let error = scratch.open(&model).err().unwrap_or_default();
    assert!(error.contains("has experts: adapters of them are not supported"), "{error}");
}

/// PEFT takes an adapter if the model has any module that it names.
#[test]
fn modules_of_other_models_may_be_named_too() {
    let model = variant("llama-gqa");
    let scratch = Scratch::new(&model, &[AdapterSpec::whole(8, 43)]);
    let path = scratch.file("adapter_config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let names = "\"target_modules\":[\"query_key_value\",\"c_attn\",\"w1\",";
    std::fs::write(path, text.replace("\"target_modules\":[", names)).unwrap();
    scratch.open(&model).unwrap();
}

/// Those of an embedding model, whose names lack the base model's prefix.
#[test]
fn an_adapter_of_a_base_model_is_one_of_the_whole_model() {
    let (model, spec) = (variant("llama-gqa"), AdapterSpec::whole(8, 44));
    let [whole, base] = [(); 2].map(|()| Scratch::new(&model, std::slice::from_ref(&spec)));
    let path = base.file("adapter_model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let header = str::from_utf8(header).unwrap().replace(".model.model.layers.", ".model.layers.");
    let length = (header.len() as u64).to_le_bytes();
    std::fs::write(path, [&length, header.as_bytes(), data].concat()).unwrap();
    let prompt = &prompts(&model)[0];
    let [expected, found] = [&whole, &base].map(|scratch| {
        let mut rig = Rig::adapted(On::Cpu, &model, (1, 1), &scratch.lora);
        let mut seq = rig.sequence(prompt, prompt.len(), greedy());
        seq.adapter = 1;
        rig.run(&mut seq, 4, u32::MAX);
        bits(&seq)
    });
    assert_eq!(found, expected);
}

/// Adapters saved by PEFT, compared with PEFT's results: see `tests/models/make_adapters.py`.
#[test]
fn adapters_make_what_peft_makes() {
    let folder = repository().join("tests/parity/adapters");
    let cases =
        [("llama-gqa-all", "llama-gqa"), ("llama-gqa-qv", "llama-gqa"), ("qwen2-mlp", "qwen2")];
    // Each beside another adapter that is not requested.
    for (name, base) in cases {
        let (path, model) = (folder.join(name), variant(base));
        let other = Scratch::new(&model, &[AdapterSpec::whole(16, 61)]);
        let other = PathBuf::from(&other.lora.adapters[0].path);
        let lora = Lora::fixed([named(&other), named(&path)], 16);
        for (on, degree) in [(On::Cpu, 1), (On::Cpu, 2), (On::Reference, 1), (On::CpuBf16, 1)] {
            let bound = if matches!(on, On::CpuBf16) { BF16_TOLERANCE } else { TOLERANCE };
            let mut rig = Rig::adapted(on, &model, (degree, degree), &lora);
            let mut worst = 0.0f64;
            for golden in goldens(&path) {
                let at = format!("{name}, {} on {on:?} at tp {degree}", golden.name);
                let mut seq = sequence(&mut rig, &golden.prompt_ids, 2);
                rig.run(&mut seq, golden.greedy_ids.len(), u32::MAX);
                for (i, (token, logprob)) in seq.prompt_logprobs.iter().enumerate() {
                    assert_eq!(*token, golden.prompt_ids[i + 1], "{at}");
                    let error =
                        (f64::from(*logprob) - golden.prompt_logprobs[i + 1].unwrap()).abs();
                    assert!(error < bound, "{at}: prompt token {i} is off by {error}");
                    worst = worst.max(error);
                }
                for (i, wanted) in golden.greedy_ids.iter().enumerate() {
                    if seq.output()[i] != *wanted {
                        let gap = golden.greedy_top1_top2_gap[i];
                        assert!(gap < bound, "{at}: token {i} differs, with a gap of {gap}");
                        break;
                    }
                    let error = (f64::from(seq.logprobs[i]) - golden.greedy_logprobs[i]).abs();
                    assert!(error < bound, "{at}: token {i} is off by {error}");
                    worst = worst.max(error);
                }
                rig.forget(&[&seq]);
            }
            println!("{name} on {on:?} tp {degree}: worst error {worst:.1e}");
        }
    }
}

#[test]
fn embeddings_have_adapters_too() {
    let (name, model) = ("llama-gqa", variant("llama-gqa"));
    let spec = AdapterSpec::whole(8, 71);
    let scratch = Scratch::new(&model, std::slice::from_ref(&spec));
    let merged = merged(name, &scratch.factors[0], &spec);
    let prompt = prompts(&model).into_iter().max_by_key(Vec::len).unwrap();
    for pooling in [Pooling::Last, Pooling::Mean] {
        let sampling = SamplingParams { pooling: Some(pooling), ..SamplingParams::greedy() };
        let embed = |rig: &mut Rig, adapter| {
            let mut seq = rig.sequence(&prompt, prompt.len(), sampling.clone());
            seq.adapter = adapter;
            while seq.embedding.is_empty() {
                rig.step(&mut [&mut seq], 33);
            }
            seq.embedding
        };
        let wanted = embed(&mut Rig::on(On::Reference, merged.path(), 1), 0);
        let largest = wanted.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        for (on, degree) in [(On::Reference, 1), (On::Cpu, 1), (On::Cpu, 2)] {
            let mut rig = Rig::adapted(on, &model, (degree, degree), &scratch.lora);
            let apart = |found: &[f32]| {
                let pairs = found.iter().zip(&wanted);
                pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / largest
            };
            let (with, without) = (embed(&mut rig, 1), embed(&mut rig, 0));
            assert!(apart(&with) < 1e-3, "{on:?} at tp {degree}: {}", apart(&with));
            assert!(apart(&without) > 0.1, "the adapter changes something");
        }
    }
}

/// Ranks whose devices exchange data by themselves, in graphs with and without adapters in turn.
#[test]
fn ranks_on_gpus_have_adapters_too() {
    let (name, model) = ("llama-gqa", variant("llama-gqa"));
    let spec = AdapterSpec::whole(8, 72);
    let scratch = Scratch::new(&model, std::slice::from_ref(&spec));
    let merged = merged(name, &scratch.factors[0], &spec);
    let prompt = &prompts(&model)[0];
    let mut oracle = Rig::on(On::Reference, merged.path(), 1);
    let mut base = Rig::on(On::Reference, &model, 1);
    for on in [On::FakeNccl, On::FakePeers(1 << 20)] {
        let mut rig = Rig::adapted(on, &model, (2, 2), &scratch.lora);
        for turn in 0..4 {
            let adapter = turn % 2;
            let mut seq = sequence(&mut rig, prompt, adapter);
            rig.run(&mut seq, 6, u32::MAX);
            // The generated tokens, scored by the oracle as a prompt.
            let oracle = if adapter == 1 { &mut oracle } else { &mut base };
            let mut scored = oracle.sequence(&seq.tokens, seq.tokens.len(), greedy());
            oracle.run(&mut scored, 1, u32::MAX);
            let told = seq.prompt_logprobs.iter().map(|(_, logprob)| logprob).chain(&seq.logprobs);
            for (i, (told, (token, wanted))) in told.zip(&scored.prompt_logprobs).enumerate() {
                assert_eq!(*token, seq.tokens[i + 1]);
                let error = f64::from(told - wanted).abs();
                assert!(error < BF16_TOLERANCE, "{on:?}, turn {turn}, token {i}: off by {error}");
            }
            rig.forget(&[&seq]);
            oracle.forget(&[&scored]);
        }
    }
}
