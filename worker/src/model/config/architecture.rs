//! PURE: the architectures that this worker supports, and how they differ: which keys of
//! `config.json` their code in transformers reads, the defaults of missing keys, and the layout of
//! their checkpoints. Everything else about them is data.
use shared::model_config;

use super::Raw;
use super::windows::{Usual, Windows};

/// An architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Architecture {
    Gemma3,
    GptOss,
    Granite,
    Llama,
    Mistral,
    Mixtral,
    Phi3,
    Qwen2,
    Qwen3,
    Qwen3Moe,
    SeedOss,
    SmolLm3,
}

/// Which projections have biases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Biases {
    pub(super) qkv: bool,
    pub(super) output: bool,
    pub(super) mlp: bool,
}

/// How a configuration describes its mixtures of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExpertKeys {
    /// Every layer has experts, of width `intermediate_size`; their weights are normalised.
    EveryLayer,
    /// Only the layers selected by `decoder_sparse_step` and `mlp_only_layers` have experts, of
    /// width `moe_intermediate_size`.
    SomeLayers,
}

impl Architecture {
    const ALL: [Self; 12] = [
        Self::Gemma3,
        Self::GptOss,
        Self::Granite,
        Self::Llama,
        Self::Mistral,
        Self::Mixtral,
        Self::Phi3,
        Self::Qwen2,
        Self::Qwen3,
        Self::Qwen3Moe,
        Self::SeedOss,
        Self::SmolLm3,
    ];

    /// Finds the architecture with this name.
    ///
    /// # Errors
    /// One sentence that lists the supported names.
    pub(super) fn parse(name: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|known| known.name() == name).ok_or_else(|| {
            let known = Self::ALL.into_iter().map(Self::name).chain(model_config::wrappers());
            let known: Vec<&str> = known.collect();
            let known = known.join(", ");
            format!("architecture {name} is not supported; supported are: {known}")
        })
    }

    /// Returns its name in `architectures`.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Gemma3 => model_config::GEMMA3,
            Self::GptOss => "GptOssForCausalLM",
            Self::Granite => "GraniteForCausalLM",
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Mixtral => "MixtralForCausalLM",
            Self::Phi3 => "Phi3ForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
            Self::Qwen3Moe => "Qwen3MoeForCausalLM",
            Self::SeedOss => "SeedOssForCausalLM",
            Self::SmolLm3 => "SmolLM3ForCausalLM",
        }
    }

    /// Which projections have biases.
    pub(super) fn biases(self, raw: &Raw) -> Biases {
        let attention = |usual: bool| raw.attention_bias.unwrap_or(usual);
        let mlp = raw.mlp_bias.unwrap_or(false);
        let (qkv, output, mlp) = match self {
            Self::Granite | Self::Llama | Self::SmolLm3 => {
                (attention(false), attention(false), mlp)
            }
            Self::Gemma3 | Self::Qwen3 | Self::Qwen3Moe => {
                (attention(false), attention(false), false)
            }
            Self::GptOss => (attention(true), attention(true), false),
            Self::SeedOss => (attention(true), raw.attention_out_bias.unwrap_or(false), mlp),
            // Their code reads none of these keys.
            Self::Qwen2 => (true, false, false),
            Self::Mistral | Self::Mixtral | Self::Phi3 => (false, false, false),
        };
        Biases { qkv, output, mlp }
    }

    /// Head size if the file does not give it; `None` means that heads divide `hidden_size`.
    pub(super) fn usual_head_dim(self) -> Option<usize> {
        (self == Self::SeedOss).then_some(128)
    }

    /// Whether the output head is tied to the embedding if the file does not say.
    pub(super) fn is_tied_by_default(self) -> bool {
        self == Self::SmolLm3
    }

    /// Whether checkpoints have q, k and v in one tensor, and gate and up in one.
    pub(super) fn is_fused(self) -> bool {
        self == Self::Phi3
    }

    /// Whether each head of q and k is normalised.
    pub(super) fn normalises_heads(self) -> bool {
        matches!(self, Self::Gemma3 | Self::Qwen3 | Self::Qwen3Moe)
    }

    /// How its mixtures of experts are described, if it has some.
    pub(super) fn experts(self) -> Option<ExpertKeys> {
        match self {
            Self::Mixtral | Self::GptOss => Some(ExpertKeys::EveryLayer),
            Self::Qwen3Moe => Some(ExpertKeys::SomeLayers),
            _ => None,
        }
    }

    /// Whether `sliding_window` applies only with `use_sliding_window`: files of these
    /// architectures have a window that is not used.
    pub(super) fn reads_use_sliding_window(self) -> bool {
        matches!(self, Self::Qwen2 | Self::Qwen3 | Self::Qwen3Moe | Self::SmolLm3)
    }

    /// Which layers have the sliding window.
    pub(super) fn windows(self) -> Windows {
        match self {
            Self::Granite | Self::Llama | Self::SeedOss => Windows::Nowhere,
            Self::Mistral | Self::Mixtral | Self::Phi3 | Self::Qwen3Moe => Windows::Everywhere,
            Self::Gemma3 => Windows::Listed(Usual::ButEachPatternth),
            Self::GptOss => Windows::Listed(Usual::EverySecond),
            Self::Qwen2 | Self::Qwen3 => Windows::Listed(Usual::FromMaxWindowLayers),
            Self::SmolLm3 => Windows::Listed(Usual::WithoutRope),
        }
    }

    /// Whether some layers have no rotary embedding.
    pub(super) fn has_layers_without_rope(self) -> bool {
        self == Self::SmolLm3
    }

    /// Whether only a part of each head may be rotated.
    pub(super) fn rotates_parts(self) -> bool {
        self == Self::Phi3
    }

    /// `rope_theta` if the file does not give it.
    pub(super) fn usual_theta(self) -> f64 {
        match self {
            Self::SmolLm3 => 2e6,
            Self::GptOss => 150_000.0,
            _ => 1e4,
        }
    }

    /// Whether the file must say how the rotary embedding is scaled, because the default of
    /// transformers is that of one particular model.
    pub(super) fn needs_rope_scaling(self) -> bool {
        self == Self::GptOss
    }
}
