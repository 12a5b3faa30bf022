//! PURE: the architectures that this worker supports, and how they differ: which keys of
//! `config.json` their code in transformers reads, the defaults of missing keys, and the layout of
//! their checkpoints. Everything else about them is data.
//!
//! - `differences`: the types of what differs
use kernels::backend::{Activation, PlainActivation};
use shared::model_config;

pub(super) use self::differences::{Biases, ExpertKeys, Unrotated};
pub use self::differences::{Fused, MlpNames, NormKind, Norms};
use super::windows::{Usual, Windows};
use super::{MlpActivation, Raw};

mod differences;

/// Defines the architectures with their names in `architectures`.
macro_rules! architectures {
    ($($architecture:ident: $name:expr,)*) => {
        /// An architecture.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) enum Architecture {
            $($architecture,)*
        }

        impl Architecture {
            const ALL: &[Self] = &[$(Self::$architecture,)*];

            /// Returns its name in `architectures`.
            pub(super) fn name(self) -> &'static str {
                match self {
                    $(Self::$architecture => $name,)*
                }
            }
        }
    };
}

architectures! {
    Arcee: "ArceeForCausalLM",
    Cohere: "CohereForCausalLM",
    Cohere2: "Cohere2ForCausalLM",
    DeepseekV2: "DeepseekV2ForCausalLM",
    DeepseekV3: "DeepseekV3ForCausalLM",
    Dots1: "Dots1ForCausalLM",
    Ernie45: "Ernie4_5ForCausalLM",
    Exaone4: "Exaone4ForCausalLM",
    ExaoneMoe: "ExaoneMoeForCausalLM",
    Gemma: "GemmaForCausalLM",
    Gemma2: "Gemma2ForCausalLM",
    Gemma3: model_config::GEMMA3,
    Glm: "GlmForCausalLM",
    Glm4: "Glm4ForCausalLM",
    Glm4Moe: "Glm4MoeForCausalLM",
    Glm4MoeLite: "Glm4MoeLiteForCausalLM",
    GptOss: "GptOssForCausalLM",
    Granite: "GraniteForCausalLM",
    GraniteMoe: "GraniteMoeForCausalLM",
    GraniteMoeHybrid: "GraniteMoeHybridForCausalLM",
    Helium: "HeliumForCausalLM",
    HyV3: "HYV3ForCausalLM",
    InternLm3: "InternLM3ForCausalLM",
    Llama: "LlamaForCausalLM",
    MiniMaxM2: "MiniMaxM2ForCausalLM",
    Ministral: "MinistralForCausalLM",
    Ministral3: "Ministral3ForCausalLM",
    Mistral: "MistralForCausalLM",
    Mixtral: "MixtralForCausalLM",
    Nemotron: "NemotronForCausalLM",
    Olmo2: "Olmo2ForCausalLM",
    Olmo3: "Olmo3ForCausalLM",
    Olmoe: "OlmoeForCausalLM",
    Phi3: "Phi3ForCausalLM",
    Qwen2: "Qwen2ForCausalLM",
    Qwen2Moe: "Qwen2MoeForCausalLM",
    Qwen3: "Qwen3ForCausalLM",
    Qwen3Moe: "Qwen3MoeForCausalLM",
    Qwen3Next: "Qwen3NextForCausalLM",
    Qwen35: "Qwen3_5ForCausalLM",
    Qwen35Moe: "Qwen3_5MoeForCausalLM",
    SeedOss: "SeedOssForCausalLM",
    SmolLm3: "SmolLM3ForCausalLM",
    SolarOpen: "SolarOpenForCausalLM",
    StableLm: "StableLmForCausalLM",
    Starcoder2: "Starcoder2ForCausalLM",
}

impl Architecture {
    /// Finds the architecture with this name.
    ///
    /// # Errors
    /// One sentence that lists the supported names.
    pub(super) fn parse(name: &str) -> Result<Self, String> {
        Self::ALL.iter().copied().find(|known| known.name() == name).ok_or_else(|| {
            let known = Self::ALL.iter().map(|known| known.name()).chain(model_config::wrappers());
            let known: Vec<&str> = known.collect();
            let known = known.join(", ");
            format!(
                "architecture {name} is not supported; supported are: {known}; and the same with \
                 ForSequenceClassification in place of ForCausalLM"
            )
        })
    }

    /// Which projections have biases.
    pub(super) fn biases(self, raw: &Raw) -> Biases {
        let attention = |usual: bool| raw.attention_bias.unwrap_or(usual);
        let mlp = raw.mlp_bias.unwrap_or(false);
        let (qkv, output, mlp) = match self {
            Self::Arcee | Self::Granite | Self::Llama | Self::Nemotron | Self::SmolLm3 => {
                (attention(false), attention(false), mlp)
            }
            Self::Cohere
            | Self::Cohere2
            | Self::Dots1
            | Self::Gemma
            | Self::Gemma2
            | Self::Gemma3
            | Self::GraniteMoe
            | Self::GraniteMoeHybrid
            | Self::HyV3
            | Self::Olmo2
            | Self::Olmo3
            | Self::Olmoe
            | Self::Qwen3
            | Self::Qwen3Moe => (attention(false), attention(false), false),
            Self::Ernie45 | Self::Starcoder2 => {
                let all = raw.use_bias.unwrap_or(self == Self::Starcoder2);
                (all, all, all)
            }
            Self::Glm | Self::Glm4 => (attention(true), false, false),
            Self::Helium => (attention(false), false, mlp),
            Self::InternLm3 => {
                let others = raw.bias.or(raw.mlp_bias).unwrap_or(false);
                (raw.qkv_bias.unwrap_or(attention(false)), others, others)
            }
            Self::GptOss => (attention(true), attention(true), false),
            Self::Glm4Moe | Self::SolarOpen => (attention(false), false, false),
            Self::Qwen2Moe => (raw.qkv_bias.unwrap_or(true), false, false),
            Self::StableLm => (raw.use_qkv_bias.unwrap_or(false), false, false),
            Self::SeedOss => (attention(true), raw.attention_out_bias.unwrap_or(false), mlp),
            // Their code reads none of these keys.
            Self::Qwen2 => (true, false, false),
            Self::DeepseekV2
            | Self::DeepseekV3
            | Self::Exaone4
            | Self::ExaoneMoe
            | Self::Glm4MoeLite
            | Self::MiniMaxM2
            | Self::Ministral
            | Self::Ministral3
            | Self::Mistral
            | Self::Mixtral
            | Self::Phi3
            | Self::Qwen3Next
            | Self::Qwen35
            | Self::Qwen35Moe => (false, false, false),
        };
        Biases { qkv, output, mlp }
    }

    /// Head size if the file does not give it; `None` means that heads divide `hidden_size`.
    pub(super) fn usual_head_dim(self) -> Option<usize> {
        match self {
            Self::Gemma | Self::Gemma2 | Self::Qwen3Next | Self::Qwen35 | Self::Qwen35Moe => {
                Some(256)
            }
            Self::Ernie45
            | Self::Glm
            | Self::Glm4
            | Self::Helium
            | Self::HyV3
            | Self::InternLm3
            | Self::MiniMaxM2
            | Self::Ministral3
            | Self::Qwen3
            | Self::SeedOss
            | Self::SolarOpen => Some(128),
            Self::GptOss => Some(64),
            _ => None,
        }
    }

    /// Whether it is of the Gemma family, which has its own keys and factors.
    pub(super) fn is_gemma(self) -> bool {
        matches!(self, Self::Gemma | Self::Gemma2 | Self::Gemma3)
    }

    /// Whether it has Granite's factors.
    pub(super) fn is_granite(self) -> bool {
        matches!(self, Self::Granite | Self::GraniteMoe | Self::GraniteMoeHybrid)
    }

    /// Which projections are one tensor in checkpoints.
    pub(super) fn fused(self) -> Fused {
        match self {
            Self::Phi3 => Fused { qkv: true, gate_up: true },
            Self::Glm | Self::Glm4 | Self::GraniteMoeHybrid => Fused { qkv: false, gate_up: true },
            _ => Fused::default(),
        }
    }

    /// What the norms of its residual stream are.
    pub(super) fn norm_kind(self) -> NormKind {
        match self {
            Self::Cohere | Self::Cohere2 => NormKind::Layer { has_bias: false },
            Self::Nemotron | Self::StableLm | Self::Starcoder2 => {
                NormKind::Layer { has_bias: true }
            }
            _ => NormKind::Rms,
        }
    }

    /// Added to the weights of its norms.
    pub(super) fn norm_offset(self) -> f32 {
        let is_offset = self.is_gemma() || self.gates_attention() || self == Self::Nemotron;
        if is_offset { 1.0 } else { 0.0 }
    }

    /// The key of the norms' epsilon.
    pub(super) fn eps_key(self) -> &'static str {
        match self {
            Self::Cohere | Self::Cohere2 | Self::StableLm => "layer_norm_eps",
            Self::Nemotron => "norm_eps",
            Self::Starcoder2 => "norm_epsilon",
            _ => "rms_norm_eps",
        }
    }

    /// The only activation of its MLPs that is supported, and its name in `hidden_act`.
    pub(super) fn activation(self) -> (&'static str, MlpActivation) {
        match self {
            Self::Arcee | Self::Nemotron => {
                ("relu2", MlpActivation::Plain(PlainActivation::SquaredRelu))
            }
            Self::Starcoder2 => {
                ("gelu_pytorch_tanh", MlpActivation::Plain(PlainActivation::GeluTanh))
            }
            Self::Gemma | Self::Gemma2 | Self::Gemma3 => {
                ("gelu_pytorch_tanh", MlpActivation::Gated(Activation::GeluTanh))
            }
            _ => ("silu", MlpActivation::Gated(Activation::Silu)),
        }
    }

    /// Names of the projections of its MLPs.
    pub(super) fn mlp_names(self) -> MlpNames {
        match self {
            Self::Starcoder2 => MlpNames { up: "mlp.c_fc", down: "mlp.c_proj", ..MlpNames::USUAL },
            Self::GraniteMoeHybrid => MlpNames {
                gate_up: "shared_mlp.input_linear",
                down: "shared_mlp.output_linear",
                ..MlpNames::USUAL
            },
            _ => MlpNames::USUAL,
        }
    }

    /// Where its layers have norms.
    pub(super) fn norms(self) -> Norms {
        match self {
            Self::Gemma2 | Self::Gemma3 => Norms::GEMMA,
            Self::Glm4 => Norms::GLM4,
            Self::Exaone4 | Self::Olmo2 | Self::Olmo3 => Norms::AFTER,
            _ => Norms::BEFORE,
        }
    }

    /// Whether each head of q and k is normalised.
    pub(super) fn normalises_heads(self, raw: &Raw) -> bool {
        match self {
            Self::Glm4Moe => raw.use_qk_norm.unwrap_or(false),
            Self::Dots1
            | Self::Exaone4
            | Self::ExaoneMoe
            | Self::Gemma3
            | Self::HyV3
            | Self::Qwen3
            | Self::Qwen3Moe
            | Self::Qwen3Next
            | Self::Qwen35
            | Self::Qwen35Moe => true,
            _ => false,
        }
    }

    /// Whether q and k are normalised over all heads together.
    pub(super) fn normalises_all_heads(self) -> bool {
        matches!(self, Self::MiniMaxM2 | Self::Olmo2 | Self::Olmo3 | Self::Olmoe)
    }

    /// How its mixtures of experts are described, if it has some.
    pub(super) fn experts(self) -> Option<ExpertKeys> {
        match self {
            Self::GptOss | Self::GraniteMoe | Self::Mixtral => Some(ExpertKeys::EveryLayer),
            Self::GraniteMoeHybrid => Some(ExpertKeys::EveryLayerOrNone),
            Self::MiniMaxM2 => Some(ExpertKeys::EveryLayerSigmoid),
            Self::Olmoe => Some(ExpertKeys::EveryLayerAsSaid),
            Self::Qwen3Moe => Some(ExpertKeys::SomeLayers),
            Self::Qwen2Moe | Self::Qwen3Next | Self::Qwen35Moe => Some(ExpertKeys::GatedShared),
            Self::DeepseekV2 => Some(ExpertKeys::AfterFirstGroupedSoftmax),
            Self::DeepseekV3 | Self::Dots1 | Self::ExaoneMoe | Self::Glm4MoeLite | Self::HyV3 => {
                Some(ExpertKeys::AfterFirstGrouped)
            }
            Self::Glm4Moe | Self::SolarOpen => Some(ExpertKeys::AfterFirst),
            _ => None,
        }
    }

    /// Whether its attention is multi-head latent attention.
    pub(super) fn has_latents(self) -> bool {
        matches!(self, Self::DeepseekV2 | Self::DeepseekV3 | Self::Glm4MoeLite)
    }

    /// Whether layers have linear attention by the gated delta rule, or gates of attention.
    pub(super) fn gates_attention(self) -> bool {
        matches!(self, Self::Qwen3Next | Self::Qwen35 | Self::Qwen35Moe)
    }

    /// Whether `sliding_window` applies only with `use_sliding_window`: files of these
    /// architectures have a window that is not used.
    pub(super) fn reads_use_sliding_window(self) -> bool {
        matches!(self, Self::Qwen2 | Self::Qwen2Moe | Self::Qwen3 | Self::Qwen3Moe | Self::SmolLm3)
    }

    /// Which layers have the sliding window.
    pub(super) fn windows(self) -> Windows {
        match self {
            Self::Arcee
            | Self::Cohere
            | Self::DeepseekV2
            | Self::DeepseekV3
            | Self::Ernie45
            | Self::Gemma
            | Self::Glm
            | Self::Glm4
            | Self::Glm4Moe
            | Self::Glm4MoeLite
            | Self::Granite
            | Self::GraniteMoe
            | Self::GraniteMoeHybrid
            | Self::Helium
            | Self::HyV3
            | Self::InternLm3
            | Self::Llama
            | Self::MiniMaxM2
            | Self::Nemotron
            | Self::Olmo2
            | Self::Olmoe
            | Self::Qwen3Next
            | Self::Qwen35
            | Self::Qwen35Moe
            | Self::SeedOss
            | Self::SolarOpen
            | Self::StableLm => Windows::Nowhere,
            Self::Ministral3
            | Self::Mistral
            | Self::Mixtral
            | Self::Phi3
            | Self::Qwen3Moe
            | Self::Starcoder2 => Windows::Everywhere,
            Self::Ministral => Windows::Listed(Usual::All),
            Self::Cohere2 | Self::Exaone4 | Self::ExaoneMoe | Self::Olmo3 => {
                Windows::Listed(Usual::ButEachPatternth(4))
            }
            Self::Gemma3 => Windows::Listed(Usual::ButEachPatternth(6)),
            Self::Gemma2 | Self::GptOss => Windows::Listed(Usual::EverySecond),
            Self::Qwen2Moe => Windows::Listed(Usual::EverySecondUpToMaxWindowLayers(28)),
            Self::Dots1 => Windows::Listed(Usual::FromMaxWindowLayers(62)),
            Self::Qwen2 | Self::Qwen3 => Windows::Listed(Usual::FromMaxWindowLayers(28)),
            Self::SmolLm3 => Windows::Listed(Usual::WithoutRope),
        }
    }

    /// Which layers have no rotary embedding.
    pub(super) fn unrotated(self) -> Unrotated {
        match self {
            Self::SmolLm3 => Unrotated::Listed,
            Self::Exaone4 | Self::ExaoneMoe => Unrotated::BesideWindows,
            Self::GraniteMoeHybrid => Unrotated::UnlessSaid,
            Self::Cohere2 => Unrotated::WithoutWindow,
            _ => Unrotated::None,
        }
    }

    /// Whether checkpoints have the two elements of a rotated pair next to each other.
    pub(super) fn interleaves_pairs(self) -> bool {
        matches!(
            self,
            Self::Cohere
                | Self::Cohere2
                | Self::DeepseekV2
                | Self::DeepseekV3
                | Self::Ernie45
                | Self::Glm
                | Self::Glm4
                | Self::Glm4MoeLite
                | Self::Helium
        )
    }

    /// Whether only a part of each head may be rotated.
    pub(super) fn rotates_parts(self) -> bool {
        matches!(
            self,
            Self::Glm
                | Self::Glm4
                | Self::Glm4Moe
                | Self::MiniMaxM2
                | Self::Nemotron
                | Self::Phi3
                | Self::Qwen3Next
                | Self::Qwen35
                | Self::Qwen35Moe
                | Self::SolarOpen
                | Self::StableLm
        )
    }

    /// `partial_rotary_factor` if the file does not give it.
    pub(super) fn usual_part(self) -> f64 {
        match self {
            Self::Glm | Self::Glm4 | Self::Glm4Moe | Self::Nemotron => 0.5,
            Self::Qwen3Next | Self::Qwen35 | Self::Qwen35Moe | Self::StableLm => 0.25,
            _ => 1.0,
        }
    }

    /// `rope_theta` if the file does not give it.
    pub(super) fn usual_theta(self) -> f64 {
        match self {
            Self::SmolLm3 => 2e6,
            Self::Cohere | Self::Ernie45 | Self::Olmo3 => 5e5,
            Self::Helium => 1e5,
            Self::HyV3 => 11_158_840.0,
            Self::MiniMaxM2 => 5e6,
            Self::Mixtral | Self::SolarOpen => 1e6,
            Self::GptOss => 150_000.0,
            _ => 1e4,
        }
    }

    /// For architectures whose sliding layers have a rotary embedding of their own, which is never
    /// scaled: the key of its base in the older dialect.
    pub(super) fn local_theta(self) -> Option<&'static str> {
        match self {
            Self::Gemma3 => Some("rope_local_base_freq"),
            Self::Olmo3 => Some("rope_theta"),
            _ => None,
        }
    }

    /// Whether the file must say how the rotary embedding is scaled, because the default of
    /// transformers is that of one particular model.
    pub(super) fn needs_rope_scaling(self) -> bool {
        matches!(self, Self::GptOss | Self::Ministral3)
    }
}
