//! PURE: what the operations of a device are told: sizes, and what is in a step.
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
    /// Tokens per block.
    pub block_size: usize,
    /// Blocks.
    pub num_blocks: usize,
}

/// One sequence's rows in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeqRows {
    /// First row.
    pub row_start: u32,
    /// Rows (tokens computed), at least 1.
    pub num_rows: u32,
    /// Tokens in the KV cache after this step's K and V are written: row `i` of the sequence is the
    /// token at position `context_len - num_rows + i`.
    pub context_len: u32,
    /// Where its block table begins in `Batch::block_tables`.
    pub table_start: u32,
    /// Blocks in it; covers at least `context_len` tokens.
    pub table_len: u32,
}

/// What is in a step. A backend refuses one that names a block beyond the cache's `num_blocks`, or
/// a position beyond the RoPE tables.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Position of every row's token in its sequence, `[rows]`.
    pub positions: &'a [u32],
    /// Where every row's K and V are written: block id * block_size + offset, `[rows]`.
    pub slots: &'a [u32],
    /// The sequences, in row order, covering all rows.
    pub seqs: &'a [SeqRows],
    /// Block tables, concatenated.
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
}

/// Weights of the fused QKV projection of one layer on one rank.
#[derive(Debug)]
pub struct QkvWeights<M, V> {
    /// `[(num_heads + 2 * num_kv_heads) * head_dim, hidden]`: q rows, then k rows, then v rows.
    pub weight: M,
    /// Same number of rows, where the model has biases.
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
    /// Attend to the last `n` tokens only, the current one included; `None` attends to all.
    pub sliding_window: Option<u32>,
}

/// What attention is computed for: a layer of the cache, for the sequences of a step.
#[derive(Clone, Copy, Debug)]
pub struct AttentionAt<'a> {
    /// Of the layer.
    pub shape: &'a AttentionShape,
    /// The step's.
    pub batch: &'a Batch<'a>,
    /// Which of the cache's layers.
    pub layer: usize,
}

/// What Q, K and V of a layer are made of, in a backend's own buffers, matrices and vectors.
#[derive(Debug)]
pub struct QkvInput<'a, B, M, V> {
    /// `[rows, hidden]`
    pub x: &'a B,
    /// The projection.
    pub weights: &'a QkvWeights<M, V>,
    /// Added to the projection, `[rows, the weights' rows]`.
    pub addend: Option<&'a B>,
    /// How positions rotate.
    pub rope: &'a RopeTable<V>,
}

/// In [`StepInputs::feed`]: the row's own id is its token.
pub const NOT_FED: u32 = u32::MAX;

/// In [`ExpertOps::assign`](super::ExpertOps::assign): the row goes to no matrix.
pub const NOT_ASSIGNED: u32 = u32::MAX;

/// What the gate of an MLP goes through before it is multiplied with up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    #[default]
    Silu,
    /// GELU by its approximation with tanh:
    /// `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`.
    GeluTanh,
}

/// What gate and up of an expert become.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum ExpertActivation {
    /// `silu(gate) * up`.
    #[default]
    Silu,
    /// `g * sigmoid(alpha * g) * (u + 1)`, with `g` = gate, at most `limit`, and `u` = up, in
    /// `-limit ..= limit`.
    Clamped {
        /// How steep the sigmoid is.
        alpha: f32,
        /// Above 0.
        limit: f32,
    },
}

/// Most slots, of a row at one of its experts each, that a device multiplies at a time if nothing
/// else is said: it bounds what lies between two products.
pub const EXPERT_SLOTS: usize = 8192;

/// How the rows of a layer choose among its experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Routing {
    /// Experts of the layer.
    pub num_experts: usize,
    /// Experts that each row goes to: at least 1, at most `num_experts`.
    pub top_k: usize,
    /// The weights of a row's experts are divided by their sum.
    pub normalise: bool,
}

impl Routing {
    /// Most experts of a layer, and most of them that a row may go to.
    pub const MOST: (usize, usize) = (1024, 32);

    /// That rows can choose so.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    pub fn check(&self) -> Result<(), KernelError> {
        let Self { num_experts, top_k, .. } = *self;
        let (experts_most, top_most) = Self::MOST;
        if num_experts <= experts_most && (1..=num_experts.min(top_most)).contains(&top_k) {
            return Ok(());
        }
        let message = format!(
            "{top_k} of {num_experts} experts cannot be chosen: at least 1, at most all and \
             {top_most}, of at most {experts_most}"
        );
        Err(KernelError::Shape { op: "new_routes", message })
    }
}

/// What rows chose: their experts' numbers, `[rows, top_k]`, and these experts' weights, likewise.
pub type Choices = (Vec<u32>, Vec<f32>);

/// Everything that a step reads, named before it: see [`crate::backend`].
#[derive(Clone, Copy, Debug)]
pub struct StepInputs<'a> {
    /// What `embed` will be called with.
    pub ids: &'a [u32],
    /// What attention will be called with.
    pub batch: Batch<'a>,
    /// Likewise, but for the window.
    pub attention: &'a AttentionShape,
    /// The windows of all layers, each once, in any order.
    pub windows: &'a [Option<u32>],
    /// What `lm_head` will be called with, when the step samples.
    pub sample_rows: &'a [u32],
    /// What `sample` will be called with, but for masks; empty on ranks that do not sample.
    pub sampling: &'a [SampleRow<'a>],
    /// Some rows have masks, which come while the step is computed: behind `lm_head` it is handed
    /// to the device ([`StepOps::launch_step`](super::StepOps::launch_step)), and `sample` or
    /// `queue_sample` is called later, with the same rows, masks and all tokens in them. In
    /// between, what was queued before may be fetched.
    pub masked: bool,
    /// Empty, or for every row of the batch the row of the step before, queued by `queue_sample`,
    /// whose token takes the place of `ids`; [`NOT_FED`] where `ids` has the token.
    pub feed: &'a [u32],
    /// What `assign` will be called with; empty when it is not.
    pub adapters: &'a [u32],
    /// Nothing else will be called than one forward pass, and `lm_head` and `sample` once each if
    /// the step samples.
    pub is_plain: bool,
}
