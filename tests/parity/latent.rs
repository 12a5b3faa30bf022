//! Multi-head latent attention: what is refused, and how weights are counted.
use shared::protocol::{Lora, Quantization};
use testkit::models::variant;
use worker::model::config::ModelConfig;
use worker::model::lora::LoraFiles;

use crate::checkpoint::{Folder, Tensor};

/// No rank loads a model of which it would use only a part.
#[test]
fn adapters_are_refused() {
    let fixed = Lora::fixed([("a".to_owned(), "/nowhere".to_owned())], 16);
    let places = Lora { places: 2, ..Lora::fixed([], 16) };
    for (model, kind) in [
        ("deepseek-v2", "multi-head latent attention (DeepSeek's)"),
        ("qwen3_5", "linear attention (Qwen3-Next, Qwen3.5, Granite 4.0 H)"),
    ] {
        let config = ModelConfig::load(&variant(model)).unwrap();
        for lora in [&fixed, &places] {
            let error = LoraFiles::open(lora, &config).unwrap_err().to_string();
            assert!(error.contains(&format!("LoRA adapters of models with {kind}")), "{error}");
        }
        assert!(LoraFiles::open(&Lora::fixed([], 16), &config).is_ok());
    }
}

/// What all ranks have counts for each of them.
#[test]
fn weights_are_counted_as_ranks_keep_them() {
    let folder = variant("deepseek-v3");
    let needs = |degree| worker::check::model(&folder, degree, Quantization::None).unwrap();
    let (one, two) = (needs(1).weight_bytes, needs(2).weight_bytes);
    // Of 3 layers q's and the latents' first projections, and of 2 the routers.
    assert_eq!(two - one, 2 * (3 * (40 + 48 + 16) * 64 + 2 * 8 * 64));
}

/// As GLM's and DeepSeek's files have one.
#[test]
fn a_layer_that_is_not_loaded_takes_no_memory() {
    let folder = Folder::copy_of("glm4-moe");
    let needs = || worker::check::model(folder.path(), 1, Quantization::None).unwrap();
    let without = needs();
    folder.edit(|tensors| {
        let name = "model.layers.3.eh_proj.weight".to_owned();
        tensors.push(Tensor { name, ..tensors[0].clone() });
    });
    assert_eq!(needs(), without);
}
