//! Mixtures of experts (MoE): their configuration, and the names of their tensors in checkpoints.
//!
//! Published checkpoints have a tensor for each projection of each expert, named as in Mixtral or
//! in Qwen. transformers 5 keeps all experts of a layer in two tensors, and can save them that way;
//! Qwen3-VL always has two, inputs before outputs, and gpt-oss in its own layout (`interleaved`).
use std::ops::Range;

use kernels::backend::{ExpertActivation, HostMatrix, Routing, Scores};

use self::interleaved::Projection;
use super::ModelError;
use super::quantization::{PACKED, Tensors};
use super::safetensors::{TensorView, WeightFiles};
use super::shard::Shard;

mod interleaved;

/// Number of inputs that share a scale in MXFP4.
pub(crate) const MXFP4_GROUP: usize = 32;

/// The configuration shared by all layers with experts.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// How the router chooses experts for a row.
    pub routing: Routing,
    /// Width of each expert, in elements.
    pub intermediate_size: usize,
    /// For each layer of the model, whether it has experts.
    pub layers: Vec<bool>,
    /// Activation between gate, up and down projections.
    pub activation: ExpertActivation,
    /// Whether router and experts have biases, and tensors are laid out as in gpt-oss.
    pub is_interleaved: bool,
    /// Name of the shared experts in checkpoints, where they are one MLP, if there are any.
    pub shared: Option<&'static str>,
}

/// One rank's share of one layer's experts: checked, but not read yet.
#[derive(Debug)]
pub(crate) struct ExpertParts<'a> {
    /// The router's outputs, `[num_logits, hidden]`, the same on all ranks.
    pub(crate) router: Vec<HostMatrix<'a>>,
    /// The gate of each expert, followed by its up: `[own, hidden]` each, where `own` is this
    /// rank's number of columns.
    pub(crate) gate_up: Vec<HostMatrix<'a>>,
    /// For each part of the sum over columns, the down projections of all experts: `[hidden, own /
    /// parts]`.
    pub(crate) down: Vec<Vec<HostMatrix<'a>>>,
    /// The biases, if the model has any.
    pub(crate) biases: Biases,
}

/// Biases of one layer's router and experts.
#[derive(Debug, Default)]
pub(crate) struct Biases {
    /// `[num_experts]`, without shared ones.
    pub(crate) router: Option<Vec<f32>>,
    /// The gate's bias of each expert, followed by its up's: `[own]` each.
    pub(crate) gate_up: Option<Vec<f32>>,
    /// The down bias of each expert, `[hidden]`; only on rank 0, since the ranks' results are
    /// summed.
    pub(crate) down: Option<Vec<f32>>,
}

/// How a checkpoint names the tensors of a layer's experts.
enum Names {
    /// `block_sparse_moe.experts.N.w1`, `w3`, `w2`.
    Mixtral,
    /// `mlp.experts.N.gate_proj`, `up_proj`, `down_proj`.
    Qwen,
    /// `mlp.experts.gate_up_proj`, `down_proj`, each for all experts.
    Stacked,
    /// The same as `block_sparse_moe.input_linear`, `output_linear`.
    Granite,
    /// As in Qwen, with names of its own for the router and what is shared.
    HunYuan,
}

impl Names {
    /// Recognises the naming of a layer by its first expert. Falls back to Qwen's, so that an error
    /// names the missing tensor.
    fn of(files: &WeightFiles, layer: &str) -> Self {
        let has = |name: &str| files.has(&format!("{layer}.{name}"));
        let first = "block_sparse_moe.experts.0.w1.";
        if has(&format!("{first}weight")) || PACKED.iter().any(|own| has(&format!("{first}{own}")))
        {
            Self::Mixtral
        } else if has("block_sparse_moe.input_linear.weight") {
            Self::Granite
        } else if has("mlp.router.gate.weight") {
            Self::HunYuan
        } else if has("mlp.experts.gate_up_proj") {
            Self::Stacked
        } else {
            Self::Qwen
        }
    }
}

impl<'a> ExpertParts<'a> {
    /// Finds the tensors of a layer (`layer` is `model.layers.N`) and cuts this rank's columns out
    /// of each expert; down projections are cut into `shard.parts` parts.
    ///
    /// # Errors
    /// [`ModelError::Tensor`].
    pub(crate) fn find(
        tensors: Tensors<'a>,
        config: &ExpertsConfig,
        layer: &str,
        hidden: usize,
        shard: &Shard,
    ) -> Result<Self, ModelError> {
        if config.is_interleaved {
            return interleaved::find(tensors, config, layer, hidden, shard);
        }
        let Shard { expert: own, parts, .. } = shard;
        let ((count, _), inner) = (config.routing.chosen(), config.intermediate_size);
        let files = tensors.files;
        let names = Names::of(files, layer);
        let (block, router) = match names {
            Names::Mixtral => ("block_sparse_moe", "gate"),
            Names::Granite => ("block_sparse_moe", "router.layer"),
            Names::Qwen | Names::Stacked => ("mlp", "gate"),
            Names::HunYuan => ("mlp", "router.gate"),
        };
        let router = files.tensor(&format!("{layer}.{block}.{router}.weight"), &[count, hidden])?;
        let mut router = vec![router.cut(0..count, 0..hidden)];
        let all = config.routing.num_experts;
        let (mut gate_up, mut downs) = (Vec::with_capacity(2 * all), Vec::with_capacity(all));
        let stacked = match names {
            Names::Stacked => Some(["experts.gate_up_proj", "experts.down_proj"]),
            Names::Granite => Some(["input_linear.weight", "output_linear.weight"]),
            Names::Mixtral | Names::Qwen | Names::HunYuan => None,
        };
        let in_block = |name: &str| format!("{layer}.{block}.{name}");
        let is_turned = |name: &str| {
            let [turned, plain] = [[count, inner, hidden], [count, hidden, inner]];
            files.shape(&in_block(name)).is_some_and(|shape| shape == turned && shape != plain)
        };
        if let Some([both, down]) = stacked.filter(|[_, down]| is_turned(down)) {
            let find = |name: &str, size| Projection::find(files, &in_block(name), count, size);
            let both = find(both, [2 * inner, hidden])?;
            let down = find(down, [hidden, inner])?;
            for expert in 0..count {
                for first in [own.start, inner + own.start] {
                    gate_up.push(both.cut(expert, (first, 1, own.len()), &(0..hidden)));
                }
                downs.push(Down::Turned { projection: down, expert });
            }
        } else if let Some([both, down]) = stacked {
            let both = files.tensor(&in_block(both), &[count, 2 * inner, hidden])?;
            let down = files.tensor(&in_block(down), &[count, hidden, inner])?;
            for expert in 0..count {
                let rows = expert * 2 * inner + own.start..expert * 2 * inner + own.end;
                gate_up.push(both.cut(rows.clone(), 0..hidden));
                gate_up.push(both.cut(rows.start + inner..rows.end + inner, 0..hidden));
                downs.push(Down::Plain { tensor: down, row: expert * hidden, column: 0 });
            }
        } else {
            let [gate, up, down] = match names {
                Names::Mixtral => ["w1", "w3", "w2"],
                _ => ["gate_proj", "up_proj", "down_proj"],
            };
            for expert in 0..count {
                let name = |part: &str| format!("{layer}.{block}.experts.{expert}.{part}.weight");
                for part in [gate, up] {
                    let tensor = tensors.weight(&name(part), &[inner, hidden])?;
                    gate_up.push(tensor.cut(own.clone(), 0..hidden));
                }
                let tensor = tensors.weight(&name(down), &[hidden, inner])?;
                downs.push(Down::Plain { tensor, row: 0, column: 0 });
            }
        }
        // An MLP is the sum of MLPs over parts of its inner width: shared experts of another width
        // become several of the others' width.
        if let Some(shared) = config.shared {
            let count = config.routing.shared;
            let shared = if matches!(names, Names::HunYuan) { "shared_mlp" } else { shared };
            let all = count * inner;
            // Beside the block in Granite's, with both in one tensor.
            let is_granite = matches!(names, Names::Granite);
            let name = |part: &str| match is_granite {
                true => format!("{layer}.{shared}.{part}.weight"),
                false => format!("{layer}.{block}.{shared}.{part}.weight"),
            };
            let (gates, down) = match is_granite {
                true => {
                    let both = tensors.weight(&name("input_linear"), &[2 * all, hidden])?;
                    ([(both, 0), (both, all)], "output_linear")
                }
                false => {
                    let gate = tensors.weight(&name("gate_proj"), &[all, hidden])?;
                    let up = tensors.weight(&name("up_proj"), &[all, hidden])?;
                    ([(gate, 0), (up, 0)], "down_proj")
                }
            };
            let down = tensors.weight(&name(down), &[hidden, all])?;
            for expert in 0..count {
                let rows = expert * inner + own.start..expert * inner + own.end;
                gate_up.extend(gates.map(|(tensor, first)| {
                    tensor.cut(first + rows.start..first + rows.end, 0..hidden)
                }));
                downs.push(Down::Plain { tensor: down, row: 0, column: expert * inner });
            }
            if config.routing.gated {
                let gate = format!("{layer}.{block}.{shared}_gate.weight");
                router.push(files.tensor(&gate, &[1, hidden])?.cut(0..1, 0..hidden));
            }
        }
        let part = |i: usize| {
            let columns = columns(shard, i);
            downs.iter().map(|down| down.cut(hidden, &columns)).collect()
        };
        let down = (0..*parts).map(part).collect();
        // It changes choices, and no logits.
        let bias = match config.routing.scores {
            Scores::Softmax => None,
            Scores::Sigmoid => {
                // Of the router or, in MiniMax-M2, of the block. transformers 5 keeps this
                // difference when it gives blocks and routers its own names.
                let [of_router, of_block] =
                    ["gate.", ""].map(|of| format!("{layer}.{block}.{of}e_score_correction_bias"));
                let is_of_block = matches!(names, Names::Mixtral) || files.has(&of_block);
                let name = match names {
                    Names::HunYuan => format!("{layer}.{block}.expert_bias"),
                    _ if is_of_block => of_block,
                    _ => of_router,
                };
                Some(files.numbers(&name, &[count])?)
            }
        };
        let biases = Biases { router: bias, ..Biases::default() };
        Ok(Self { router, gate_up, down, biases })
    }
}

/// An expert's down projection within a tensor.
enum Down<'a> {
    /// From this row and column on.
    Plain { tensor: TensorView<'a>, row: usize, column: usize },
    /// One of those whose inputs come before their outputs.
    Turned { projection: Projection<'a>, expert: usize },
}

impl<'a> Down<'a> {
    fn cut(&self, hidden: usize, columns: &Range<usize>) -> HostMatrix<'a> {
        match self {
            Self::Plain { tensor, row, column } => {
                let columns = column + columns.start..column + columns.end;
                tensor.cut(*row..row + hidden, columns)
            }
            Self::Turned { projection, expert } => projection.cut(*expert, (0, 1, hidden), columns),
        }
    }
}

/// Columns of the down projections in part `index` of this rank's sums.
fn columns(shard: &Shard, index: usize) -> Range<usize> {
    let (first, width) = (shard.expert.start, shard.expert.len() / shard.parts);
    first + index * width..first + (index + 1) * width
}
