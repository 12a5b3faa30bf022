//! Prompt log-probabilities and greedy tokens of every golden prompt.
use std::path::Path;

use serde_json::{Value, json};
use shared::protocol::Quantization;
use shared::sampling::SamplingParams;
use testkit::models::{Golden, demo, goldens, variant};

use crate::checkpoint::Folder;
use crate::rig::{On, Rig};

/// Largest error of a log-probability.
const TOLERANCE: f64 = 1e-3;

/// The same with products in bf16. Rounding changes an activation by at most 2^-9; over a model's
/// layers this makes a mean error of about 1e-2, and the largest of some thousand log-probabilities
/// is off by several times that (7.8e-2 here; other instruction sets round differently). A wrong
/// layer is off by 1 or more.
const BF16_TOLERANCE: f64 = 0.15;
/// Bound on the greedy tokens' mean error, which hardly depends on the instruction set: at most
/// 1.0e-2 was observed.
const BF16_MEAN: f64 = 0.02;

fn check(model: &Path) {
    check_on(On::Cpu, model, &[1, 2, 4], TOLERANCE);
    check_on(On::Reference, model, &[1, 2], TOLERANCE);
    check_on(On::CpuBf16, model, &[1, 2], BF16_TOLERANCE);
}

/// How a prompt's log-probabilities and greedy tokens compare with the golden ones.
#[derive(Default)]
pub(crate) struct Followed {
    /// Largest error of a log-probability.
    pub(crate) worst: f64,
    /// Sum of the errors of the greedy tokens' log-probabilities.
    pub(crate) total: f64,
    /// Number of greedy tokens equal to the golden ones, up to the first that differs.
    pub(crate) compared: u32,
    /// Description of that first difference, if there is one.
    pub(crate) differs: Option<String>,
}

/// Computes a prompt and up to `output` greedy tokens. `tolerance` bounds the error of
/// log-probabilities, and the gap between the best two tokens where a greedy token differs.
pub(crate) fn follow(
    rig: &mut Rig,
    golden: &Golden,
    output: usize,
    tolerance: f64,
    at: &str,
) -> Followed {
    let mut found = Followed::default();
    let sampling =
        SamplingParams { logprobs: Some(0), prompt_logprobs: Some(0), ..SamplingParams::greedy() };
    let prompt = &golden.prompt_ids;
    let mut seq = rig.sequence(prompt, prompt.len(), sampling);
    rig.run(&mut seq, output.min(golden.greedy_ids.len()), u32::MAX);
    assert_eq!(seq.prompt_logprobs.len() + 1, prompt.len(), "{at}");
    for (i, (token, logprob)) in seq.prompt_logprobs.iter().enumerate() {
        assert_eq!(*token, prompt[i + 1], "{at}");
        let expected = golden.prompt_logprobs[i + 1].unwrap();
        let error = (f64::from(*logprob) - expected).abs();
        assert!(error < tolerance, "{at}: prompt token {i}: {logprob} for {expected}");
        found.worst = found.worst.max(error);
    }
    for (i, expected) in golden.greedy_ids.iter().take(output).enumerate() {
        if seq.output()[i] != *expected {
            let gap = golden.greedy_top1_top2_gap[i];
            assert!(gap < tolerance, "{at}: token {i} differs, with a gap of {gap}");
            found.differs = Some(format!("{} at {i}, gap {gap:.1e}", golden.name));
            break;
        }
        let (logprob, expected) = (f64::from(seq.logprobs[i]), golden.greedy_logprobs[i]);
        let error = (logprob - expected).abs();
        assert!(error < tolerance, "{at}: token {i}: {logprob} for {expected}");
        found.worst = found.worst.max(error);
        found.total += error;
        found.compared += 1;
    }
    rig.forget(&[&seq]);
    found
}

/// `tolerance` bounds the error of log-probabilities, and the gap between the best two tokens where
/// a greedy token differs.
fn check_on(backend: On, model: &Path, degrees: &[u32], tolerance: f64) {
    let goldens = goldens(model);
    assert!(goldens.len() >= 6);
    for degree in degrees {
        let mut rig = Rig::on(backend, model, *degree);
        let (mut worst, mut total, mut differ) = (0.0f64, 0.0f64, vec![]);
        let mut compared = 0u32;
        for golden in &goldens {
            let at = format!("{} at tp {degree}", golden.name);
            let found = follow(&mut rig, golden, usize::MAX, tolerance, &at);
            worst = worst.max(found.worst);
            total += found.total;
            compared += found.compared;
            differ.extend(found.differs);
        }
        println!(
            "{} on {backend:?} tp {degree}: {compared} tokens, worst error {worst:.1e}, mean {:.1e}; \
             others than the golden ones: {differ:?}",
            model.display(),
            total / f64::from(compared)
        );
        let mean = total / f64::from(compared);
        assert!(mean < tolerance.min(BF16_MEAN), "mean error {mean}");
        // Rounding took place: in f32 the error would be smaller.
        assert!(!matches!(backend, On::CpuBf16) || mean > 1e-4, "mean error {mean}");
        // Rounding may change the tokens of a few prompts, even early ones; not of many.
        let enough = if tolerance > TOLERANCE { 20 } else { 30 };
        assert!(compared as usize >= goldens.len() * enough, "{compared} tokens compared");
    }
}

#[test]
fn demo_model() {
    check(&demo());
}

macro_rules! variants {
    ($($test:ident: $folder:literal,)*) => {
        $(#[test]
        fn $test() {
            check(&variant($folder));
        })*
    };
}

variants! {
    llama_gqa: "llama-gqa",
    llama_gqa_sharded: "llama-gqa-sharded",
    llama_tied: "llama-tied",
    llama3_rope: "llama3-rope",
    llama_mha_bias: "llama-mha-bias",
    qwen2: "qwen2",
    qwen3: "qwen3",
    mistral_swa: "mistral-swa",
    phi3: "phi3",
    phi4_mini: "phi4-mini",
    qwen3_yarn: "qwen3-yarn",
    smollm3: "smollm3",
    granite: "granite",
    seed_oss: "seed-oss",
    mistral3: "mistral3",
    glm4: "glm4",
    ernie4_5: "ernie4_5",
    exaone4: "exaone4",
    olmo2: "olmo2",
    olmo3: "olmo3",
    cohere: "cohere",
    cohere2: "cohere2",
    starcoder2: "starcoder2",
    nemotron: "nemotron",
    stablelm: "stablelm",
    ministral3: "ministral3",
    granite_4: "granite-4",
    granite_4_h: "granite-4-h",
    qwen2_5_vl: "qwen2_5-vl",
    qwen3_vl: "qwen3-vl",
    glm4v: "glm4v",
    gemma: "gemma",
    gemma2: "gemma2",
    gemma3: "gemma3",
    mixtral: "mixtral",
    granite_moe: "granite-moe",
    granite_4_h_moe: "granite-4-h-moe",
    qwen2_moe: "qwen2-moe",
    glm4_moe: "glm4-moe",
    deepseek_v2: "deepseek-v2",
    deepseek_v3: "deepseek-v3",
    glm4_moe_lite: "glm4-moe-lite",
    hy_v3: "hy-v3",
    exaone_moe: "exaone-moe",
    dots1: "dots1",
    solar_open: "solar-open",
    olmoe: "olmoe",
    minimax_m2: "minimax-m2",
    qwen3_moe: "qwen3-moe",
    qwen3_moe_stacked: "qwen3-moe-stacked",
    qwen3_vl_moe: "qwen3-vl-moe",
    qwen3_5: "qwen3_5",
    qwen3_next: "qwen3-next",
    qwen3_5_moe: "qwen3_5-moe",
    glm4v_moe: "glm4v-moe",
    qwen2_fp8: "qwen2-fp8",
    qwen3_fp8_blocks: "qwen3-fp8-blocks",
    qwen3_moe_fp8: "qwen3-moe-fp8",
    llama_int8: "llama-int8",
    llama_gptq: "llama-gptq",
    qwen2_gptq_order: "qwen2-gptq-order",
    mistral_gptq_8: "mistral-gptq-8",
    qwen3_awq: "qwen3-awq",
    llama_w4a16: "llama-w4a16",
    qwen3_moe_w4a16: "qwen3-moe-w4a16",
    gpt_oss: "gpt-oss",
    gpt_oss_mxfp4: "gpt-oss-mxfp4",
}

/// Gemma 3 as transformers 5 saves it with its vision tower: tensor names have a prefix, and the
/// text model's configuration, in the newer dialect, is inside another one.
#[test]
fn gemma3_within_a_model_that_does_more() {
    let folder = Folder::copy_of("gemma3");
    folder.edit(|tensors| {
        for tensor in tensors {
            let name = tensor.name.strip_prefix("model.").unwrap();
            tensor.name = format!("model.language_model.{name}");
        }
    });
    let file = folder.file("config.json");
    let mut text: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    let table = text.as_object_mut().unwrap();
    let older = ["architectures", "rope_theta", "rope_scaling", "rope_local_base_freq"];
    for key in older.into_iter().chain(["sliding_window_pattern", "torch_dtype", "rms_norm_eps"]) {
        assert!(table.remove(key).is_some(), "{key}");
    }
    let (sliding, full) = ("sliding_attention", "full_attention");
    text["layer_types"] = json!([sliding, full, sliding]);
    text["rope_parameters"] = json!({
        full: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        sliding: {"rope_type": "default", "rope_theta": 1e4},
    });
    let config = json!({
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "dtype": "bfloat16", "text_config": text, "vision_config": {"hidden_size": 8},
    });
    std::fs::write(&file, config.to_string()).unwrap();
    check_on(On::Cpu, folder.path(), &[1, 2], TOLERANCE);
}

/// As embedding models are saved, in one file and in several; quantised ones, too.
#[test]
fn a_base_model_alone_is_the_whole_model() {
    for name in ["qwen3", "llama-gqa-sharded"] {
        let folder = Folder::copy_of(name);
        folder.save_base_model();
        check_on(On::Cpu, folder.path(), &[1, 2], TOLERANCE);
        let needs = |model: &Path| {
            let needs = worker::check::model(model, 2, Quantization::None).unwrap();
            (needs.files, needs.weight_bytes)
        };
        assert_eq!(needs(folder.path()), needs(&variant(name)), "{name}");
    }
    let (whole, base) = (variant("qwen3-awq"), Folder::copy_of("qwen3-awq"));
    base.save_base_model();
    let golden = &goldens(&whole)[0];
    let [expected, found] = [&*whole, base.path()].map(|model| {
        let mut rig = Rig::on(On::Cpu, model, 2);
        let sampling = SamplingParams { logprobs: Some(0), ..SamplingParams::greedy() };
        let mut seq = rig.sequence(&golden.prompt_ids, golden.prompt_ids.len(), sampling);
        rig.run(&mut seq, 8, u32::MAX);
        (seq.output().to_vec(), seq.logprobs.clone())
    });
    assert_eq!(found, expected);
}
