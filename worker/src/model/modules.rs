//! PURE: the matrices of a decoder layer except those of experts, and their places in checkpoints.
use std::ops::Range;

use super::config::ModelConfig;

/// A matrix of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Module {
    Q,
    K,
    V,
    O,
    Gate,
    Up,
    Down,
}

/// Where a checkpoint stores a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Name, within its layer and without `.weight`, of the checkpoint's matrix that contains it.
    pub(crate) name: &'static str,
    /// Shape of that matrix, `[out, in]`.
    pub(crate) shape: [usize; 2],
    /// Row of that matrix with the module's first output.
    pub(crate) first: usize,
}

impl Module {
    /// All modules, in the order in which checkpoints concatenate them.
    pub(crate) const ALL: [Self; 7] =
        [Self::Q, Self::K, Self::V, Self::O, Self::Gate, Self::Up, Self::Down];

    /// Returns the shape of its matrix, `[out, in]`.
    pub(crate) fn shape(self, config: &ModelConfig) -> [usize; 2] {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let q = config.num_heads * config.head_dim;
        let kv = config.num_kv_heads * config.head_dim;
        match self {
            Self::Q => [q, hidden],
            Self::K | Self::V => [kv, hidden],
            Self::O => [hidden, config.num_heads * config.value_dim()],
            Self::Gate | Self::Up => [inner, hidden],
            Self::Down => [hidden, inner],
        }
    }

    /// Returns where the model's checkpoint stores it.
    pub(crate) fn place(self, config: &ModelConfig) -> Place {
        let is_fused = match self {
            Self::Q | Self::K | Self::V => config.fused.qkv,
            _ => config.fused.gate_up,
        };
        let (name, joined): (_, &[Self]) = match (self, is_fused) {
            (Self::Q | Self::K | Self::V, true) => {
                ("self_attn.qkv_proj", &[Self::Q, Self::K, Self::V])
            }
            (Self::Gate | Self::Up, true) => (config.mlp_names.gate_up, &[Self::Gate, Self::Up]),
            (Self::Q, false) => ("self_attn.q_proj", &[Self::Q]),
            (Self::K, false) => ("self_attn.k_proj", &[Self::K]),
            (Self::V, false) => ("self_attn.v_proj", &[Self::V]),
            (Self::Gate, false) => ("mlp.gate_proj", &[Self::Gate]),
            (Self::Up, false) => (config.mlp_names.up, &[Self::Up]),
            (Self::O, _) => ("self_attn.o_proj", &[Self::O]),
            (Self::Down, _) => (config.mlp_names.down, &[Self::Down]),
        };
        let outputs = |modules: &[Self]| modules.iter().map(|it| it.shape(config)[0]).sum();
        let before = joined.iter().position(|it| *it == self).unwrap_or(0);
        let shape = [outputs(joined), self.shape(config)[1]];
        Place { name, shape, first: outputs(&joined[..before]) }
    }

    /// Returns the rows of the checkpoint's matrix with these outputs of the module, in the files'
    /// order.
    pub(crate) fn rows(self, config: &ModelConfig, outputs: &Range<usize>) -> Range<usize> {
        let first = self.place(config).first;
        first + outputs.start..first + outputs.end
    }

    /// Whether layers of the model can have this module.
    pub(crate) fn is_known(self, config: &ModelConfig) -> bool {
        self != Self::Gate || config.is_gated()
    }

    /// Whether a layer has this module.
    pub(crate) fn is_in(self, config: &ModelConfig, layer: usize) -> bool {
        let is_dense = config.experts.as_ref().is_none_or(|experts| !experts.layers[layer]);
        self.is_known(config) && (is_dense || !matches!(self, Self::Gate | Self::Up | Self::Down))
    }
}
