//! Linear attention. In place of K and V of all tokens a layer keeps a state of fixed size for each
//! sequence, which each token changes, after all that is kept has decayed. There are two rules:
//! - [`Rule::GatedDelta`] (Gated DeltaNet, as in Qwen3-Next and Qwen3.5): what the token's key `k`
//!   recalls is replaced by its value `v`, as far as `beta` says.
//! - [`Rule::Mamba2`] (as in Granite 4): the value is added. What is called C, B, x and D there is
//!   q, k, v and `skip` here, and its groups are key heads.
//!
//! A token's channels are q, k and v of all heads as projected. For each token, in order:
//! 1. Each channel becomes `silu(sum of conv[channel][j] * x[j])` over the last `kernel` tokens `x`
//!    of the sequence up to this one, oldest first, zeros before its first; in Mamba 2
//!    `conv_bias[channel]` is added to the sum, if there is one.
//! 2. By the delta rule, for each key head, `q = q / sqrt(sum(q^2) + EPS) / sqrt(key_dim)` and
//!    `k = k / sqrt(sum(k^2) + EPS)`.
//! 3. For each value head, which uses the key head `head / (value_heads / key_heads)`, with its
//!    state `S: [key_dim, value_dim]`, in f32: `step = softplus(a + dt_bias)`,
//!    `S *= exp(-decay * step)`; by the delta rule `u = sigmoid(b) * (v - k^T S)`, in Mamba 2
//!    `u = step * v`; `S += k u^T`, `o = q^T S`, to which Mamba 2 adds `skip * v`.
//! 4. By the delta rule `out = o / rms(o) * norm * silu(z)`, the mean of the squares over the head.
//!    In Mamba 2 `out = o * silu(z)`: its norm comes after that, over heads of all ranks.
//!
//! Each token's bits depend on the sequence up to it alone, not on how steps divide it.
use super::{Batch, Tensors};
use crate::error::KernelError;

/// How a token changes the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Its value replaces what its key recalls.
    GatedDelta,
    /// Its value is added.
    Mamba2,
}

/// Sizes of a layer's linear attention on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaShape {
    /// How a token changes the state.
    pub rule: Rule,
    /// Heads of q and k.
    pub key_heads: usize,
    /// Heads of v, z and the result, a multiple of `key_heads`.
    pub value_heads: usize,
    /// Elements per head of q and k.
    pub key_dim: usize,
    /// Elements per head of v, z and the result.
    pub value_dim: usize,
    /// Tokens that a convolution sees, including the current one.
    pub kernel: usize,
}

impl DeltaShape {
    /// Added to the sum of squares of q and of k.
    pub const EPS: f32 = 1e-6;
    /// Upper limits of `key_dim`, `value_dim` and `kernel`.
    pub const MOST: (usize, usize, usize) = (256, 256, 8);

    /// Returns the number of elements of q and k of a token, each.
    #[must_use]
    pub const fn key_width(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Returns the number of elements of v, z and the result of a token, each.
    #[must_use]
    pub const fn value_width(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Returns the number of channels.
    #[must_use]
    pub const fn channels(&self) -> usize {
        2 * self.key_width() + self.value_width()
    }

    /// Returns the number of elements of b and a of a token: Mamba 2 has no b.
    #[must_use]
    pub const fn gates_width(&self) -> usize {
        match self.rule {
            Rule::GatedDelta => 2 * self.value_heads,
            Rule::Mamba2 => self.value_heads,
        }
    }

    /// Returns the number of f32 of the state of a layer: those of the value heads, and the
    /// channels of the last `kernel - 1` tokens.
    #[must_use]
    pub const fn state_len(&self) -> usize {
        self.value_heads * self.key_dim * self.value_dim + (self.kernel - 1) * self.channels()
    }
}

/// The states of sequences on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatesShape {
    /// Layers with linear attention.
    pub num_layers: usize,
    /// Number of states of each layer: one for each sequence that runs, and those that are kept.
    pub slots: usize,
    /// Sizes of each layer.
    pub layer: DeltaShape,
}

impl StatesShape {
    /// Returns the number of f32 of all states, at most the largest number.
    #[must_use]
    pub const fn num_values(&self) -> usize {
        self.num_layers.saturating_mul(self.slots).saturating_mul(self.layer.state_len())
    }

    /// Returns the size of all states, in bytes, at most the largest number.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.num_values().saturating_mul(size_of::<f32>())
    }
}

/// Weights of a layer on one rank, beside its projections.
#[derive(Debug)]
pub struct DeltaWeights<V> {
    /// `[channels, kernel]`, row-major, a channel's oldest token first.
    pub conv: V,
    /// `[value_heads]`, above 0.
    pub decay: V,
    /// `[value_heads]`
    pub dt_bias: V,
    /// Those of the rule.
    pub rule: RuleWeights<V>,
}

/// Weights that only one of the rules has.
#[derive(Debug)]
pub enum RuleWeights<V> {
    /// Of [`Rule::GatedDelta`].
    GatedDelta {
        /// `[value_dim]`
        norm: V,
    },
    /// Of [`Rule::Mamba2`].
    Mamba2 {
        /// `[channels]`
        conv_bias: Option<V>,
        /// `[value_heads]`
        skip: V,
    },
}

impl<V> RuleWeights<V> {
    /// Returns the rule that they are of.
    #[must_use]
    pub const fn rule(&self) -> Rule {
        match self {
            Self::GatedDelta { .. } => Rule::GatedDelta,
            Self::Mamba2 { .. } => Rule::Mamba2,
        }
    }

    /// Returns the biases of the convolutions and the factors of v, where there are some.
    #[must_use]
    pub const fn mamba2(&self) -> (Option<&V>, Option<&V>) {
        match self {
            Self::GatedDelta { .. } => (None, None),
            Self::Mamba2 { conv_bias, skip } => (conv_bias.as_ref(), Some(skip)),
        }
    }

    /// Returns the weight of the norm of each head, if it has one.
    #[must_use]
    pub const fn norm(&self) -> Option<&V> {
        match self {
            Self::GatedDelta { norm } => Some(norm),
            Self::Mamba2 { .. } => None,
        }
    }
}

/// What a layer has projected, and its weights.
#[derive(Debug)]
pub struct DeltaInput<'a, B, V> {
    /// q, k, v and z as projected, `[rows, channels + value_width]`, all heads of one after the
    /// other. A [`Tensors::new_buffer`].
    pub qkvz: &'a B,
    /// b, if there is one, then a, `[rows, gates_width]`. A [`Tensors::new_buffer`].
    pub ba: &'a B,
    /// Weights.
    pub weights: &'a DeltaWeights<V>,
    /// Epsilon of the heads' norm.
    pub eps: f32,
}

/// The layer, and the sequences that it is computed for.
#[derive(Clone, Copy, Debug)]
pub struct DeltaAt<'a> {
    /// The step's batch; its rows' positions go on where each sequence's state is.
    pub batch: &'a Batch<'a>,
    /// The slot of each sequence of the batch, each once. A sequence whose first row is at
    /// position 0 begins with zeros, whatever the slot holds.
    pub states: &'a [u32],
    /// Index of the layer among those with linear attention.
    pub layer: usize,
}

/// Linear attention.
pub trait DeltaOps: Tensors {
    /// The states of all sequences, on the device.
    type States: std::fmt::Debug;

    /// Allocates states.
    ///
    /// # Errors
    /// [`KernelError::Shape`], [`KernelError::OutOfMemory`].
    fn new_states(&mut self, shape: StatesShape) -> Result<Self::States, KernelError>;

    /// Copies states between slots of all layers: (from, to) pairs, one after the other, in the
    /// order of steps. Not within a step; one that has failed is over.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn copy_states(
        &mut self,
        states: &mut Self::States,
        pairs: &[(u32, u32)],
    ) -> Result<(), KernelError>;

    /// Linear attention over a batch, as [`self`](crate::backend::delta) says, before its output
    /// projection: `out: [rows, value_width]`, a [`Tensors::new_input_buffer`] by the delta rule, a
    /// [`Tensors::new_buffer`] in Mamba 2, whose rows it sets.
    ///
    /// # Errors
    /// [`KernelError::Shape`]: the states are as they were then.
    fn delta_attention(
        &mut self,
        input: DeltaInput<'_, Self::Buffer, Self::Vector>,
        at: DeltaAt<'_>,
        states: &mut Self::States,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// `x *= sigmoid(gate)`, both `[rows, width]`: `x` a [`Tensors::new_input_buffer`], `gate` a
    /// [`Tensors::new_buffer`].
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn gate(&mut self, gate: &Self::Buffer, x: &mut Self::Buffer) -> Result<(), KernelError>;
}
