//! Differences between models of the Llama family: scaled rotary embeddings, fused projections,
//! experts as transformers 5 names them, text models within multimodal ones.
use std::path::Path;

use kernels::backend::DType;
use kernels::weights::widen;
use serde_json::{Value, json};
use shared::protocol::{Lora, Quantization};
use shared::sampling::SamplingParams;
use testkit::adapters::AdapterSpec;
use testkit::models::{goldens, goldens_in, repository, variant};
use worker::model::config::ModelConfig;

use crate::checkpoint::{Folder, Tensor};
use crate::rig::{On, Rig, Seq};

fn greedy() -> SamplingParams {
    SamplingParams { logprobs: Some(0), prompt_logprobs: Some(0), ..SamplingParams::greedy() }
}

fn run(rig: &mut Rig, prompt: &[u32], output: usize) -> Seq {
    let mut seq = rig.sequence(prompt, prompt.len(), greedy());
    rig.run(&mut seq, output, u32::MAX);
    rig.forget(&[&seq]);
    seq
}

/// The tokens, and the bits of all log-probabilities.
fn bits(seq: &Seq) -> (Vec<u32>, Vec<u32>) {
    let all = seq.prompt_logprobs.iter().map(|(_, logprob)| logprob).chain(&seq.logprobs);
    (seq.output().to_vec(), all.map(|logprob| logprob.to_bits()).collect())
}

#[test]
fn frequencies_are_those_of_transformers() {
    let text = std::fs::read_to_string(repository().join("tests/parity/rope.json")).unwrap();
    let cases: Vec<Value> = serde_json::from_str(&text).unwrap();
    assert!(cases.len() >= 14);
    for case in cases {
        let folder = Folder::copy_of("llama-gqa");
        for key in ["head_dim", "max_position_embeddings", "rope_parameters"] {
            folder.configure(key, case[key].clone());
        }
        let config = ModelConfig::load(folder.path()).unwrap();
        let rope = &config.ropes[0];
        let what = &case["rope_parameters"];
        let served = case["served"].as_u64().unwrap() as usize;
        // The longest lengths served are the longest for which transformers' results exist.
        assert!(served <= config.max_positions, "{what}: {}", config.max_positions);
        let expected: Vec<f64> =
            serde_json::from_value(case["inverse_frequencies"].clone()).unwrap();
        let found = rope.inverse_frequencies(served);
        assert_eq!(found.len(), expected.len(), "{what}");
        for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let error = (found / expected - 1.0).abs();
            assert!(error < 2e-6, "{what}: frequency {i} is {found}, not {expected}");
        }
        let factor = case["attention_factor"].as_f64().unwrap();
        assert!((rope.attention_factor() - factor).abs() < 1e-9, "{what}: {factor}");
        if served > 1024 {
            continue;
        }
        let (cos, sin) = rope.tables(config.head_dim, served);
        let position = 100;
        let half = config.head_dim / 2;
        assert_eq!((cos.len(), sin.len()), (served * half, served * half), "{what}");
        for (i, frequency) in expected.iter().enumerate() {
            let angle = position as f64 * frequency;
            for (table, expected) in [(&cos, angle.cos() * factor), (&sin, angle.sin() * factor)] {
                let found = f64::from(table[position * half + i]);
                assert!((found - expected).abs() < 1e-4, "{what}: {found} for {expected}");
            }
        }
    }
}

/// The served length, not the length of a sequence, selects the divisors.
#[test]
fn longrope_has_one_set_of_divisors_up_to_the_original_length_and_another_beyond() {
    let model = variant("phi3");
    let original = 256;
    let worst_of = |max_model_len: u32, file: &str| {
        let mut rig = Rig::within(&model, max_model_len);
        let mut worst = 0f64;
        for golden in goldens_in(&model, file) {
            let seq = run(&mut rig, &golden.prompt_ids, 1);
            let expected = golden.prompt_logprobs[1..].iter().map(|it| it.unwrap());
            for ((_, logprob), expected) in seq.prompt_logprobs.iter().zip(expected) {
                worst = worst.max((f64::from(*logprob) - expected).abs());
            }
        }
        worst
    };
    let (short, long) = ("golden-short.json", "golden.json");
    for (length, own, other) in [(original, short, long), (original + 1, long, short)] {
        let (right, wrong) = (worst_of(length, own), worst_of(length, other));
        assert!(right < 1e-3, "{length}: {own} is {right} off");
        assert!(wrong > 0.01, "{length}: {other} is {wrong} off, the sets make no difference");
    }
}

/// Concatenates tensors by rows or by columns.
fn joined(parts: &[Tensor], by_columns: bool) -> Tensor {
    let [first, ..] = parts else { panic!("nothing to join") };
    let mut all = Tensor { data: Vec::new(), ..first.clone() };
    let axis = usize::from(by_columns);
    all.shape[axis] = parts.iter().map(|part| part.shape[axis]).sum();
    if by_columns {
        let rows = first.shape[0];
        for row in 0..rows {
            for part in parts {
                let width = part.data.len() / rows;
                all.data.extend(&part.data[row * width..][..width]);
            }
        }
    } else {
        parts.iter().for_each(|part| all.data.extend(&part.data));
    }
    all
}

/// A copy of a model in the layout of Phi-3's checkpoints.
fn fused(name: &str) -> Folder {
    let folder = Folder::copy_of(name);
    folder.configure("architectures", json!(["Phi3ForCausalLM"]));
    folder.edit(|tensors| {
        for (whole, parts) in [
            (
                "self_attn.qkv_proj",
                &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"][..],
            ),
            ("mlp.gate_up_proj", &["mlp.gate_proj", "mlp.up_proj"]),
        ] {
            let first = |tensor: &&Tensor| tensor.name.contains(parts[0]);
            let names: Vec<String> =
                tensors.iter().filter(first).map(|tensor| tensor.name.clone()).collect();
            for name in names {
                let mut take = |part: &&str| {
                    let name = name.replace(parts[0], part);
                    let at = tensors.iter().position(|tensor| tensor.name == name).unwrap();
                    tensors.remove(at)
                };
                let taken: Vec<Tensor> = parts.iter().map(&mut take).collect();
                // GPTQ stores outputs in columns, and its list of groups only once.
                let tensor = match name.rsplit('.').next().unwrap() {
                    "g_idx" => taken[0].clone(),
                    "qweight" | "qzeros" | "scales" => joined(&taken, true),
                    _ => joined(&taken, false),
                };
                tensors.push(Tensor { name: name.replace(parts[0], whole), ..tensor });
            }
        }
    });
    folder
}

/// A copy of MiniMax-M2 as transformers 5 holds it: its own names, all experts in two tensors.
fn minimax_of_transformers_5() -> Folder {
    let folder = Folder::copy_of("minimax-m2");
    folder.edit(|tensors| {
        for layer in 0..2 {
            let block = format!("model.layers.{layer}.block_sparse_moe");
            let mut stacked =
                [("gate_up_proj", 64, 64), ("down_proj", 64, 32)].map(|(name, rows, columns)| {
                    Tensor {
                        name: format!("model.layers.{layer}.mlp.experts.{name}"),
                        dtype: "BF16".to_owned(),
                        shape: vec![7, rows, columns],
                        data: Vec::new(),
                    }
                });
            for expert in 0..7 {
                for (part, to) in [("w1", 0), ("w3", 0), ("w2", 1)] {
                    let name = format!("{block}.experts.{expert}.{part}.weight");
                    let at = tensors.iter().position(|tensor| tensor.name == name).unwrap();
                    stacked[to].data.extend(tensors.remove(at).data);
                }
            }
            tensors.extend(stacked);
        }
        for tensor in tensors {
            tensor.name = tensor.name.replace("block_sparse_moe", "mlp");
        }
    });
    folder
}

#[test]
fn experts_have_the_names_of_the_authors_or_of_transformers_5() {
    let (published, own) = (variant("minimax-m2"), minimax_of_transformers_5());
    let prompt = &goldens(&published)[2].prompt_ids;
    for degree in [1, 2] {
        let expected = run(&mut Rig::on(On::Cpu, &published, degree), prompt, 8);
        let found = run(&mut Rig::on(On::Cpu, own.path(), degree), prompt, 8);
        assert_eq!(bits(&found), bits(&expected), "tp {degree}");
    }
    // The bias changes choices: without it, nothing is served.
    let bias = "model.layers.1.mlp.e_score_correction_bias";
    own.edit(|tensors| tensors.retain(|tensor| tensor.name != bias));
    let error = worker::check::model(own.path(), 1, Quantization::None).unwrap_err().to_string();
    assert!(error.contains("e_score_correction_bias") && error.contains("missing"), "{error}");
}

#[test]
fn projections_that_are_one_tensor_make_what_separate_ones_make() {
    for name in ["llama-gqa", "llama-gptq"] {
        let (apart, folder) = (variant(name), fused(name));
        assert!(ModelConfig::load(folder.path()).unwrap().fused.qkv);
        let prompt = &goldens(&apart)[2].prompt_ids;
        for (on, degree) in
            [(On::Cpu, 1), (On::Cpu, 2), (On::Cpu, 4), (On::CpuInt8, 2), (On::FakeCuda, 2)]
        {
            let expected = run(&mut Rig::on(on, &apart, degree), prompt, 8);
            let found = run(&mut Rig::on(on, folder.path(), degree), prompt, 8);
            assert_eq!(bits(&found), bits(&expected), "{name} on {on:?} at tp {degree}");
        }
        let needs = |model: &Path| worker::check::model(model, 4, Quantization::None).unwrap();
        assert_eq!(needs(folder.path()), needs(&apart), "{name}");
    }
    let folder = fused("llama-gqa");
    folder.edit(|tensors| {
        let joint = tensors.iter_mut().find(|tensor| tensor.name.contains("qkv_proj")).unwrap();
        joint.cut_rows(64);
    });
    let error = worker::check::model(folder.path(), 1, Quantization::None);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("qkv_proj.weight") && error.contains("[128, 64]"), "{error}");
}

/// A copy of a symmetric GPTQ checkpoint, with the weights that it stands for according to the
/// format's definition: words of eight inputs, one scale per 32.
fn unpacked(folder: &Folder) -> Folder {
    let copy = Folder::copy_of("llama-gptq");
    std::fs::copy(folder.file("config.json"), copy.file("config.json")).unwrap();
    copy.configure("quantization_config", Value::Null);
    std::fs::copy(folder.file("model.safetensors"), copy.file("model.safetensors")).unwrap();
    copy.edit(|tensors| {
        let all = std::mem::take(tensors);
        let find = |name: &str| all.iter().find(|tensor| tensor.name == name).unwrap();
        for tensor in &all {
            let Some(stem) = tensor.name.strip_suffix("qweight") else {
                let parts = ["scales", "qzeros", "g_idx"];
                if !parts.iter().any(|part| tensor.name.ends_with(part)) {
                    tensors.push(tensor.clone());
                }
                continue;
            };
            let scales = find(&format!("{stem}scales"));
            assert_eq!(scales.dtype, "F16");
            let (words, rows) = (tensor.shape[0], tensor.shape[1]);
            let mut data = Vec::new();
            for row in 0..rows {
                for col in 0..words * 8 {
                    let word = &tensor.data[(col / 8 * rows + row) * 4..][..4];
                    let word = u32::from_le_bytes(word.try_into().unwrap());
                    let scale = &scales.data[(col / 32 * rows + row) * 2..][..2];
                    let mut wide = [0.0];
                    widen(DType::F16, scale, &mut wide);
                    let number = (word >> (col % 8 * 4) & 15) as f32 - 8.0;
                    data.extend((number * wide[0]).to_le_bytes());
                }
            }
            let (name, shape) = (format!("{stem}weight"), vec![rows, words * 8]);
            tensors.push(Tensor { name, dtype: "F32".to_owned(), shape, data });
        }
    });
    copy
}

/// Rows of packed integers, in the order of rotation, may begin anywhere in a word.
#[test]
fn packed_rows_of_partly_rotated_heads_are_found() {
    let packed = fused("llama-gptq");
    packed.configure("partial_rotary_factor", json!(0.5));
    let plain = unpacked(&packed);
    let prompt = &goldens(&variant("llama-gqa"))[2].prompt_ids;
    let whole = unpacked(&fused("llama-gptq"));
    let off = |a: &Seq, b: &Seq| {
        let pairs = a.prompt_logprobs.iter().zip(&b.prompt_logprobs);
        pairs.map(|(a, b)| (a.1 - b.1).abs()).fold(0.0, f32::max)
    };
    let expected = run(&mut Rig::on(On::Reference, plain.path(), 1), prompt, 1);
    let other = run(&mut Rig::on(On::Reference, whole.path(), 1), prompt, 1);
    assert!(off(&other, &expected) > 0.1, "how much is rotated makes no difference");
    for (on, degree) in [(On::Reference, 1), (On::Cpu, 1), (On::Cpu, 4)] {
        let found = run(&mut Rig::on(on, packed.path(), degree), prompt, 1);
        let off = off(&found, &expected);
        assert!(off < 0.05, "{on:?} at tp {degree} is {off} off");
    }
}

/// A copy with renamed tensors.
fn renamed(name: &str, change: impl Fn(&str) -> String) -> Folder {
    let folder = Folder::copy_of(name);
    folder.edit(|tensors| {
        for tensor in tensors {
            tensor.name = change(&tensor.name);
        }
    });
    folder
}

/// The name of a tensor in a text-only model.
fn plain(name: &str) -> String {
    let within = name.replace("model.language_model.", "model.");
    within.strip_prefix("language_model.").unwrap_or(&within).to_owned()
}

/// The text model of `mistral3` in a separate folder.
fn alone() -> Folder {
    let alone = renamed("mistral3", plain);
    let text = std::fs::read_to_string(alone.file("config.json")).unwrap();
    let mut text = serde_json::from_str::<Value>(&text).unwrap()["text_config"].take();
    text["architectures"] = json!(["MistralForCausalLM"]);
    std::fs::write(alone.file("config.json"), text.to_string()).unwrap();
    alone
}

/// PEFT names modules as in the model that was adapted.
#[test]
fn adapters_of_a_model_that_holds_another_are_those_of_the_text_model() {
    let (wrapped, alone) = (variant("mistral3"), alone());
    let scratch = tempfile::tempdir().unwrap();
    let folder = |name: &str| {
        let folder = scratch.path().join(name);
        std::fs::create_dir(&folder).unwrap();
        folder
    };
    let plain = folder("plain");
    AdapterSpec::whole(8, 5).write(alone.path(), &plain).unwrap();
    let prompt = &goldens(&wrapped)[2].prompt_ids;
    let answer = |model: &Path, folder: &Path| {
        let path = folder.to_str().unwrap().to_owned();
        let lora = Lora::fixed([("it".to_owned(), path)], 8);
        let mut rig = Rig::adapted(On::Cpu, model, (2, 2), &lora);
        let mut seq = rig.sequence(prompt, prompt.len(), greedy());
        seq.adapter = 1;
        rig.run(&mut seq, 4, u32::MAX);
        bits(&seq)
    };
    let expected = answer(alone.path(), &plain);
    assert_ne!(expected, bits(&run(&mut Rig::on(On::Cpu, &wrapped, 2), prompt, 4)));
    for (name, layers) in
        [("four", "language_model.model.layers"), ("five", "model.language_model.layers")]
    {
        let folder = folder(name);
        let file = "adapter_config.json";
        std::fs::copy(plain.join(file), folder.join(file)).unwrap();
        let bytes = std::fs::read(plain.join("adapter_model.safetensors")).unwrap();
        let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
        let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
        let header = String::from_utf8(header.to_vec()).unwrap().replace("model.layers", layers);
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes().iter().chain(data));
        std::fs::write(folder.join("adapter_model.safetensors"), bytes).unwrap();
        assert_eq!(answer(&wrapped, &folder), expected, "{layers}");
    }
}

#[test]
fn a_text_model_is_served_from_what_holds_it() {
    let wrapped = variant("mistral3");
    let prompt = &goldens(&wrapped)[2].prompt_ids;
    let expected = bits(&run(&mut Rig::on(On::Cpu, &wrapped, 2), prompt, 8));
    let alone = alone();
    // The names of transformers 4 and 5.
    let four = renamed("mistral3", |name| match plain(name) {
        name if name.contains("vision") || name.contains("projector") => name,
        name => format!("language_model.{name}"),
    });
    let five = renamed("mistral3", |name| match plain(name) {
        name if name.starts_with("lm_head") || name.contains("vision") => name,
        name if name.contains("projector") => name,
        name => name.replace("model.", "model.language_model."),
    });
    for folder in [&alone, &four, &five] {
        let found = bits(&run(&mut Rig::on(On::Cpu, folder.path(), 2), prompt, 8));
        assert_eq!(found, expected);
        let needs = |model| worker::check::model(model, 1, Quantization::None);
        assert_eq!(needs(folder.path()).unwrap(), needs(&wrapped).unwrap(), "without the tower");
    }
    // A tensor that exists twice is an error.
    four.edit(|tensors| {
        let norm =
            tensors.iter().find(|tensor| tensor.name.ends_with("model.norm.weight")).unwrap();
        let again = Tensor { name: "model.norm.weight".to_owned(), ..norm.clone() };
        tensors.push(again);
    });
    let error = worker::check::model(four.path(), 1, Quantization::None);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("model.norm.weight: is a duplicate"), "{error}");
}

#[test]
fn what_is_not_known_of_a_model_that_holds_another_is_said() {
    let folder = Folder::copy_of("mistral3");
    let error = |text: Value| {
        folder.configure("text_config", text);
        ModelConfig::load(folder.path()).unwrap_err().to_string()
    };
    let other = error(json!({"model_type": "pixtral"}));
    assert!(other.contains("\"pixtral\"; supported is: mistral, ministral3"), "{other}");
    let none = error(Value::Null);
    assert!(none.contains("text_config of Mistral3ForConditionalGeneration"), "{none}");
    let bad = error(json!({"model_type": "mistral", "hidden_size": "64"}));
    assert!(bad.contains("config.json") && !bad.contains('\n'), "{bad}");
}
