//! PURE: arguments of a device's operations: sizes, and the contents of a step.
use crate::error::KernelError;
use crate::sampling::SampleRow;

/// Sizes of a paged KV cache on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Decoder layers.
    pub num_layers: usize,
    /// KV heads held by this rank.
    pub num_kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// If so many of K's first elements are also V (multi-head latent attention): V has no place of
    /// its own unless the device's layout needs one.
    pub latent: Option<usize>,
    /// Number of tokens per block.
    pub block_size: usize,
    /// Number of blocks.
    pub num_blocks: usize,
    /// How its elements are stored.
    pub storage: KvStorage,
}

impl KvShape {
    /// Returns the number of elements of V per head.
    #[must_use]
    pub fn value_dim(&self) -> usize {
        self.latent.unwrap_or(self.head_dim)
    }
}

/// How a KV cache stores its elements. Everything else of attention is the same: queries, softmax
/// weights and sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvStorage {
    /// As the device's products take activations: bf16 or f32.
    #[default]
    AsTaken,
    /// A byte each ([`crate::fp8`]), rounded once, from the f32 results of projection and RoPE.
    Fp8,
}

/// One sequence's rows in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeqRows {
    /// First row.
    pub row_start: u32,
    /// Number of rows (tokens computed), at least 1.
    pub num_rows: u32,
    /// Tokens in the KV cache after this step's K and V are written: row `i` of the sequence is the
    /// token at position `context_len - num_rows + i`.
    pub context_len: u32,
    /// Start of its block table in `Batch::block_tables`.
    pub table_start: u32,
    /// Number of blocks in the table; they cover at least `context_len` tokens.
    pub table_len: u32,
}

/// Contents of a step. A backend rejects a block beyond the cache's `num_blocks` and a position
/// beyond the RoPE tables.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Position of every row's token in its sequence, `[rows]`.
    pub positions: &'a [u32],
    /// Slot that every row's K and V are written to: block id * block_size + offset, `[rows]`.
    pub slots: &'a [u32],
    /// The sequences, in row order, covering all rows.
    pub seqs: &'a [SeqRows],
    /// Concatenated block tables.
    pub block_tables: &'a [u32],
}

/// RoPE tables: cos and sin of position x frequency, for half the head dimension ("rotate half":
/// element `i` pairs with `i + head_dim / 2`).
#[derive(Debug)]
pub struct RopeTable<V> {
    /// `[max_positions, head_dim / 2]`, row-major.
    pub cos: V,
    /// `[max_positions, head_dim / 2]`, row-major.
    pub sin: V,
    /// `[max_positions]`: factors of q, after it is rotated (Ministral 3). Not for latents.
    pub q_scale: Option<V>,
}

/// Weights of the fused QKV projection of one layer on one rank.
#[derive(Debug)]
pub struct QkvWeights<M, V> {
    /// `[(num_heads + 2 * num_kv_heads) * head_dim, hidden]`: q rows, then k rows, then v rows.
    pub weight: M,
    /// As many elements as `weight` has rows; only for models with biases.
    pub bias: Option<V>,
    /// RMSNorm over each q head, `[head_dim]` (Qwen3), applied before RoPE.
    pub q_norm: Option<V>,
    /// RMSNorm over each k head, `[head_dim]`.
    pub k_norm: Option<V>,
}

/// Shape of attention on one rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Query heads on this rank, a multiple of `num_kv_heads`.
    pub num_heads: usize,
    /// KV heads on this rank.
    pub num_kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Epsilon of `q_norm` and `k_norm`.
    pub norm_eps: f32,
    /// Attend only to the last `n` tokens, including the current one; `None` attends to all.
    pub sliding_window: Option<u32>,
    /// Replaces every score `s` by `cap * tanh(s / cap)`, before the softmax (Gemma 2).
    pub softcap: Option<f32>,
    /// As in [`KvShape::latent`].
    pub latent: Option<usize>,
}

impl AttentionShape {
    /// Returns the number of elements of V, and of results, per head.
    #[must_use]
    pub fn value_dim(&self) -> usize {
        self.latent.unwrap_or(self.head_dim)
    }
}

/// The layer and the sequences that attention is computed for.
#[derive(Clone, Copy, Debug)]
pub struct AttentionAt<'a> {
    /// Shape of the layer.
    pub shape: &'a AttentionShape,
    /// The step's batch.
    pub batch: &'a Batch<'a>,
    /// Index of the layer in the cache.
    pub layer: usize,
}

/// Inputs of a layer's QKV projection, in a backend's own buffers, matrices and vectors.
#[derive(Debug)]
pub struct QkvInput<'a, B, M, V> {
    /// `[rows, hidden]`
    pub x: &'a B,
    /// Weights of the projection.
    pub weights: &'a QkvWeights<M, V>,
    /// Added to the projection, `[rows, rows of the weights]`.
    pub addend: Option<&'a B>,
    /// RoPE tables.
    pub rope: &'a RopeTable<V>,
}

/// In [`StepInputs::feed`]: the row's token is its own id.
pub const NOT_FED: u32 = u32::MAX;

/// In [`ExpertOps::assign`](super::ExpertOps::assign): the row goes to no matrix.
pub const NOT_ASSIGNED: u32 = u32::MAX;

/// The vectors of a LayerNorm.
#[derive(Clone, Copy, Debug)]
pub struct LayerNorm<'a, V> {
    /// Factors.
    pub weight: &'a V,
    /// Added at the end.
    pub bias: &'a V,
}

/// Activation of an MLP's gate, before the product with up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    #[default]
    Silu,
    /// GELU in its tanh approximation:
    /// `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`.
    GeluTanh,
}

/// Activation of an MLP without a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlainActivation {
    /// GELU in its tanh approximation, as [`Activation::GeluTanh`].
    GeluTanh,
    /// `max(x, 0)^2`.
    SquaredRelu,
}

/// How an expert combines gate and up.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum ExpertActivation {
    /// `silu(gate) * up`.
    #[default]
    Silu,
    /// `g * sigmoid(alpha * g) * (u + 1)`, with `g` = gate, at most `limit`, and `u` = up, in
    /// `-limit ..= limit`.
    Clamped {
        /// Steepness of the sigmoid.
        alpha: f32,
        /// Clamping limit, above 0.
        limit: f32,
    },
}

/// Default limit of slots (pairs of a row and one of its experts) that a device multiplies at a
/// time. It bounds the intermediate results between two products.
pub const EXPERT_SLOTS: usize = 8192;

/// How a router's logits become the weights of experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scores {
    /// Softmax over all logits. A bias is added to the logits.
    #[default]
    Softmax,
    /// Sigmoid of each logit. A bias is added to the scores, but only to choose (GLM-4.5).
    Sigmoid,
}

/// How the rows of a layer are routed to its experts.
///
/// Shared experts, which every row has, are ordinary matrices of the layer's stacks: the last ones.
/// A row has them after those that it chose.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// Number of experts in the layer, shared ones included.
    pub num_experts: usize,
    /// Number of experts per row, in `1..=num_experts`, shared ones included.
    pub top_k: usize,
    /// Whether the weights of a row's chosen experts are divided by their sum.
    pub normalise: bool,
    /// How logits become weights.
    pub scores: Scores,
    /// Factor of the chosen experts' weights.
    pub scale: f32,
    /// Number of shared experts, below `top_k`.
    pub shared: usize,
    /// Whether the shared experts' weight is the sigmoid of one more output of the router, its
    /// last (Qwen2-MoE); otherwise it is 1.
    pub gated: bool,
    /// Number of groups of consecutive experts, of one size. A row only chooses experts of its
    /// best groups; a group is as good as its best expert or, with sigmoids, as the sum of its two
    /// best (DeepSeek V2 and V3).
    pub groups: usize,
    /// Number of groups that a row chooses from.
    pub kept_groups: usize,
}

impl Routing {
    /// Upper limits of `num_experts` and `top_k`.
    pub const MOST: (usize, usize) = (1024, 32);

    /// Upper limit of `groups`.
    pub const GROUPS_MOST: usize = 32;

    /// A softmax over `num_experts` experts, of which none is shared.
    #[must_use]
    pub const fn softmax(num_experts: usize, top_k: usize, normalise: bool) -> Self {
        Self {
            num_experts,
            top_k,
            normalise,
            scores: Scores::Softmax,
            scale: 1.0,
            shared: 0,
            gated: false,
            groups: 1,
            kept_groups: 1,
        }
    }

    /// Returns the number of experts to choose from, and the number that a row chooses.
    #[must_use]
    pub const fn chosen(&self) -> (usize, usize) {
        (self.num_experts.saturating_sub(self.shared), self.top_k.saturating_sub(self.shared))
    }

    /// Returns the number of outputs of the router.
    #[must_use]
    pub const fn num_logits(&self) -> usize {
        self.chosen().0 + self.gated as usize
    }

    /// Returns the number of experts per group.
    #[must_use]
    pub const fn group_size(&self) -> usize {
        self.chosen().0 / if self.groups > 0 { self.groups } else { 1 }
    }

    /// Checks that the groups are of one size, and that rows find enough experts in theirs.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check_groups(&self) -> Result<(), String> {
        let Self { groups, kept_groups, .. } = *self;
        let (experts, chosen) = self.chosen();
        let most = Self::GROUPS_MOST.min(experts);
        if !(1..=most).contains(&groups) || !experts.is_multiple_of(groups) {
            return Err(format!(
                "{experts} experts cannot be in {groups} groups: at least 1, at most {most}, of \
                 one size"
            ));
        }
        let size = self.group_size();
        if !(1..=groups).contains(&kept_groups) || kept_groups * size < chosen {
            return Err(format!(
                "{chosen} experts cannot be chosen of {kept_groups} of {groups} groups of {size}"
            ));
        }
        if groups > 1 && size < 2 && self.scores == Scores::Sigmoid {
            return Err("a group has 1 expert, its score is the sum of two".to_owned());
        }
        Ok(())
    }

    /// Checks that the numbers are consistent and within [`Self::MOST`].
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    pub fn check(&self) -> Result<(), KernelError> {
        let Self { num_experts, top_k, shared, scale, .. } = *self;
        let (experts_most, top_most) = Self::MOST;
        let op = "new_routes";
        if num_experts > experts_most || !(1..=num_experts.min(top_most)).contains(&top_k) {
            let message = format!(
                "{top_k} of {num_experts} experts cannot be chosen: at least 1, at most all and \
                 {top_most}, of at most {experts_most}"
            );
            return Err(KernelError::Shape { op, message });
        }
        if shared >= top_k || (self.gated && shared == 0) {
            let message =
                format!("{shared} of the {top_k} experts of a row are shared: one must be chosen");
            return Err(KernelError::Shape { op, message });
        }
        self.check_groups().map_err(|message| KernelError::Shape { op, message })?;
        if !(scale.is_finite() && scale > 0.0) {
            let message = format!("the weights' factor is {scale}, not finite and above 0");
            return Err(KernelError::Shape { op, message });
        }
        Ok(())
    }
}

/// Routing of rows: expert numbers `[rows, top_k]`, and the experts' weights, of the same shape.
pub type Choices = (Vec<u32>, Vec<f32>);

/// Everything that a step reads, named before it begins: see [`crate::backend`].
#[derive(Clone, Copy, Debug)]
pub struct StepInputs<'a> {
    /// Ids that `embed` will be called with.
    pub ids: &'a [u32],
    /// Batch that attention will be called with.
    pub batch: Batch<'a>,
    /// Shape that attention will be called with, apart from the window.
    pub attention: &'a AttentionShape,
    /// Windows of all layers, each once, in any order.
    pub windows: &'a [Option<u32>],
    /// Rows that `lm_head` will be called with, if the step samples.
    pub sample_rows: &'a [u32],
    /// Rows that `sample` will be called with, apart from masks; empty on ranks that do not sample.
    pub sampling: &'a [SampleRow<'a>],
    /// Whether some rows have masks that arrive while the step is computed. After `lm_head` the
    /// step is then handed to the device ([`StepOps::launch_step`](super::StepOps::launch_step)),
    /// and `sample` or `queue_sample` is called later with the same rows, including masks and all
    /// tokens. In between, results that were queued earlier can be fetched.
    pub masked: bool,
    /// For every row of the batch, the row of the previous step (queued by `queue_sample`) whose
    /// token replaces the one in `ids`, or [`NOT_FED`] to keep `ids`. Empty if nothing is fed.
    pub feed: &'a [u32],
    /// States that `delta_attention` will be called with; empty if it is not called.
    pub states: &'a [u32],
    /// Experts that `assign` will be called with; empty if it is not called.
    pub adapters: &'a [u32],
    /// The step is one forward pass, followed by `lm_head` and `sample` once each if it samples,
    /// and nothing else.
    pub is_plain: bool,
}
