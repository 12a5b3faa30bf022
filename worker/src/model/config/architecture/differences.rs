//! PURE: what architectures differ in: which of their layers and projections have what, and the
//! names in their checkpoints.

/// Which projections have biases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::model::config) struct Biases {
    pub(in crate::model::config) qkv: bool,
    pub(in crate::model::config) output: bool,
    pub(in crate::model::config) mlp: bool,
}

/// Which projections are one tensor in checkpoints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fused {
    /// q, k and v.
    pub qkv: bool,
    /// Gate and up.
    pub gate_up: bool,
}

/// Names of an MLP's projections within a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MlpNames {
    /// Up.
    pub up: &'static str,
    /// Gate and up, where they are one tensor.
    pub gate_up: &'static str,
    /// Down.
    pub down: &'static str,
}

impl MlpNames {
    /// As in Llama.
    pub(super) const USUAL: Self =
        Self { up: "mlp.up_proj", gate_up: "mlp.gate_up_proj", down: "mlp.down_proj" };
}

/// What the norms of the residual stream are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// RMSNorms.
    Rms,
    /// LayerNorms.
    Layer {
        /// Whether checkpoints have biases for them.
        has_bias: bool,
    },
}

/// Names of a layer's norms in checkpoints, where it has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Norms {
    /// Of the residual stream, before attention.
    pub input: Option<&'static str>,
    /// Of the attention's output, before it is added to the residual stream.
    pub output: Option<&'static str>,
    /// Of the residual stream, before the MLP.
    pub post: Option<&'static str>,
    /// Of the MLP's output, before it is added.
    pub down: Option<&'static str>,
}

impl Norms {
    /// Before attention and MLP, as in Llama.
    pub(super) const BEFORE: Self = Self {
        input: Some("input_layernorm"),
        output: None,
        post: Some("post_attention_layernorm"),
        down: None,
    };
    /// Before both at once, as in Cohere's models.
    pub(in crate::model::config) const PARALLEL: Self =
        Self { input: Some("input_layernorm"), output: None, post: None, down: None };
    /// Only after them, as in OLMo 2.
    pub(super) const AFTER: Self = Self {
        input: None,
        output: Some("post_attention_layernorm"),
        post: None,
        down: Some("post_feedforward_layernorm"),
    };
    /// Before and after, as in Gemma.
    pub(super) const GEMMA: Self = Self {
        input: Some("input_layernorm"),
        output: Some("post_attention_layernorm"),
        post: Some("pre_feedforward_layernorm"),
        down: Some("post_feedforward_layernorm"),
    };
    /// The same under GLM's names.
    pub(super) const GLM4: Self = Self {
        input: Some("input_layernorm"),
        output: Some("post_self_attn_layernorm"),
        post: Some("post_attention_layernorm"),
        down: Some("post_mlp_layernorm"),
    };
}

/// Which layers have no rotary embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::model::config) enum Unrotated {
    None,
    /// Those that `no_rope_layers` lists, or one in each `no_rope_layer_interval`.
    Listed,
    /// Those without a sliding window, if others have one.
    BesideWindows,
    /// Those without a sliding window.
    WithoutWindow,
    /// All, unless `position_embedding_type` is "rope".
    UnlessSaid,
}

/// How a configuration describes its mixtures of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::model::config) enum ExpertKeys {
    /// Every layer has experts, of width `intermediate_size`; their weights are normalised.
    EveryLayer,
    /// The same, normalised only if `norm_topk_prob` says so.
    EveryLayerAsSaid,
    /// As `EveryLayer`, beside a shared expert of width `shared_intermediate_size`; if there are
    /// none, that is the MLP.
    EveryLayerOrNone,
    /// As `EveryLayer`, with sigmoids as scores.
    EveryLayerSigmoid,
    /// Only the layers selected by `decoder_sparse_step` and `mlp_only_layers` have experts, of
    /// width `moe_intermediate_size`.
    SomeLayers,
    /// As `SomeLayers`, with a shared expert and its gate.
    GatedShared,
    /// The layers from `first_k_dense_replace` on (in Solar Open, all) have experts, and shared
    /// ones without a gate. Their scores are sigmoids.
    AfterFirst,
    /// As `AfterFirst`, in groups of experts (DeepSeek V3); `mlp_layer_types` may list the layers
    /// that have them.
    AfterFirstGrouped,
    /// The same with a softmax (DeepSeek V2).
    AfterFirstGroupedSoftmax,
}
