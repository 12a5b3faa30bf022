//! The experts of gpt-oss. A layer has one tensor for all experts' gate and up projections, whose
//! outputs alternate, and one for their down projections. They are stored as `[in, out]` in bf16
//! and as `[out, in]` in MXFP4. Router and projections have biases.
use std::ops::Range;

use kernels::backend::{DType, HostMatrix, Scales};
use kernels::weights::{Columns, Groups, Packed, Packing};

use super::super::ModelError;
use super::super::quantization::Tensors;
use super::super::safetensors::{TensorView, WeightFiles};
use super::super::shard::Shard;
use super::{Biases, ExpertParts, ExpertsConfig, MXFP4_GROUP as GROUP, columns};

/// A projection of all experts, also those of Qwen3-VL; each has `size` `[out, in]`.
#[derive(Clone, Copy)]
pub(super) enum Projection<'a> {
    Plain { tensor: TensorView<'a>, size: [usize; 2] },
    Mxfp4 { blocks: &'a [u8], scales: &'a [u8], count: usize, size: [usize; 2] },
}

impl<'a> Projection<'a> {
    /// Finds the projection `name` of `count` experts.
    pub(super) fn find(
        files: &'a WeightFiles,
        name: &str,
        count: usize,
        size: [usize; 2],
    ) -> Result<Self, ModelError> {
        let [outputs, inputs] = size;
        let blocks = format!("{name}_blocks");
        if !files.has(&blocks) {
            let tensor = files.tensor(name, &[count, inputs, outputs])?;
            return Ok(Self::Plain { tensor, size });
        }
        if !inputs.is_multiple_of(GROUP) {
            return Err(ModelError::Tensor {
                file: files.folder().to_owned(),
                tensor: blocks,
                message: format!("has {inputs} inputs, which is not a multiple of {GROUP}"),
            });
        }
        let groups = inputs / GROUP;
        let (blocks, _) = files.bytes(&blocks, &[count, outputs, groups, GROUP / 2])?;
        let (scales, _) = files.bytes(&format!("{name}_scales"), &[count, outputs, groups])?;
        Ok(Self::Mxfp4 { blocks, scales, count, size })
    }

    /// Cuts out of one expert `rows` outputs from `first` on, `step` apart, and a range of inputs.
    pub(super) fn cut(
        &self,
        expert: usize,
        (first, step, rows): (usize, usize, usize),
        inputs: &Range<usize>,
    ) -> HostMatrix<'a> {
        let (scales, row_stride) = match *self {
            Self::Plain { tensor, size: [outputs, cols] } => {
                let bytes = outputs * cols * tensor.dtype.bytes();
                let data = &tensor.data[expert * bytes..][..bytes];
                let (dtype, first_row) = (tensor.dtype, first);
                (Scales::Columns(Columns { data, dtype, cols, outputs, first_row, step }), cols)
            }
            Self::Mxfp4 { blocks, scales, count, size: [outputs, cols] } => {
                let packed = Packed {
                    packing: Packing::Mxfp4 { step },
                    bits: 4,
                    rows: count * outputs,
                    cols,
                    words: blocks,
                    zeros: None,
                    scales,
                    scale_type: DType::E8M0,
                    num_groups: cols / GROUP,
                    groups: Groups::Even(GROUP),
                    first_row: expert * outputs + first,
                };
                (Scales::Packed(packed), cols)
            }
        };
        HostMatrix {
            data: &[],
            dtype: DType::Packed,
            rows,
            cols: inputs.len(),
            col_start: inputs.start,
            row_stride,
            scales: Some(scales),
        }
    }
}

/// Same as [`ExpertParts::find`].
pub(super) fn find<'a>(
    tensors: Tensors<'a>,
    config: &ExpertsConfig,
    layer: &str,
    hidden: usize,
    shard: &Shard,
) -> Result<ExpertParts<'a>, ModelError> {
    let files = tensors.files;
    let (count, inner) = (config.routing.num_experts, config.intermediate_size);
    let name = |part: &str| format!("{layer}.mlp.{part}");
    let router = files.tensor(&name("router.weight"), &[count, hidden])?;
    let projection =
        |part: &str, size| Projection::find(files, &name(&format!("experts.{part}")), count, size);
    let both = projection("gate_up_proj", [2 * inner, hidden])?;
    let down = projection("down_proj", [hidden, inner])?;
    let both_bias = files.numbers(&name("experts.gate_up_proj_bias"), &[count, 2 * inner])?;
    let down_bias = files.numbers(&name("experts.down_proj_bias"), &[count, hidden])?;

    let own = &shard.expert;
    let (mut gate_up, mut gate_up_bias) = (Vec::with_capacity(2 * count), Vec::new());
    for expert in 0..count {
        for part in 0..2 {
            let first = 2 * own.start + part;
            gate_up.push(both.cut(expert, (first, 2, own.len()), &(0..hidden)));
            let biases = &both_bias[expert * 2 * inner..][..2 * inner];
            gate_up_bias.extend(biases[2 * own.start..2 * own.end].iter().skip(part).step_by(2));
        }
    }
    let part = |index: usize| {
        let inputs = columns(shard, index);
        (0..count).map(|expert| down.cut(expert, (0, 1, hidden), &inputs)).collect()
    };
    Ok(ExpertParts {
        router: vec![router.cut(0..count, 0..hidden)],
        gate_up,
        down: (0..shard.parts).map(part).collect(),
        biases: Biases {
            router: Some(files.numbers(&name("router.bias"), &[count])?),
            gate_up: Some(gate_up_bias),
            // Checked on every rank, kept on rank 0.
            down: Some(down_bias).filter(|_| shard.rank == 0),
        },
    })
}
