//! Loads a rank's share of the weights into the backend: packs and counts it.
use kernels::backend::{Backend, HostMatrix, QkvWeights};
use kernels::error::KernelError;
use kernels::weights::Compact;
use shared::protocol::Quantization;

use super::part::{Kind, LayerPart, MlpPart, NormPart};
use super::{BackendLayer, BackendMlp, LayerWeights, Mlp, Norm, Projection};
use crate::model::experts::ExpertParts;
use crate::model::size::Keeps;

/// Packs matrices and reports progress.
pub(super) struct Loader<'a, 'p, B> {
    pub(super) backend: &'a mut B,
    pub(super) quantization: Quantization,
    pub(super) progress: &'p mut dyn FnMut(u64, u64),
    /// Sizes of matrices as stored: loaded so far, and in total.
    pub(super) done: u64,
    pub(super) total: u64,
    /// Bytes kept so far.
    pub(super) held: u64,
}

impl<B: Backend> Loader<'_, '_, B> {
    pub(super) fn layer(&mut self, part: &LayerPart<'_>) -> Result<BackendLayer<B>, KernelError> {
        Ok(LayerWeights {
            input_norm: part.input_norm.as_ref().map(|norm| self.norm(norm)).transpose()?,
            rope: part.rope,
            projection: match (&part.latent, &part.delta) {
                (Some(latent), _) => Projection::Latent(self.latent(latent)?),
                (_, Some(delta)) => Projection::Delta(self.delta(delta)?),
                _ => Projection::Qkv(QkvWeights {
                    weight: self.matrix(&part.qkv)?,
                    bias: self.optional(part.qkv_bias.as_deref())?,
                    q_norm: self.optional(part.q_norm.as_deref())?,
                    k_norm: self.optional(part.k_norm.as_deref())?,
                }),
            },
            qk_norm: self.optional(part.qk_norm.as_deref())?,
            sinks: self.optional(part.sinks.as_deref())?,
            gate: match part.gate.as_slice() {
                [] => None,
                gate => Some(self.matrix(gate)?),
            },
            output: self.parts(&part.output)?,
            output_bias: self.optional(part.output_bias.as_deref())?,
            output_norm: self.optional(part.output_norm.as_deref())?,
            post_norm: part.post_norm.as_ref().map(|norm| self.norm(norm)).transpose()?,
            mlp: self.mlp(&part.mlp)?,
            down_norm: self.optional(part.down_norm.as_deref())?,
        })
    }

    fn mlp(&mut self, part: &MlpPart<'_>) -> Result<BackendMlp<B>, KernelError> {
        Ok(match part {
            MlpPart::Dense { gate_up, gate_up_bias, down, down_bias } => Mlp::Dense {
                gate_up: self.matrix(gate_up)?,
                gate_up_bias: self.optional(gate_up_bias.as_deref())?,
                down: self.parts(down)?,
                down_bias: self.optional(down_bias.as_deref())?,
            },
            MlpPart::Experts(ExpertParts { router, gate_up, down, biases }) => Mlp::Experts {
                router: self.small(router)?,
                router_bias: self.optional(biases.router.as_deref())?,
                gate_up: self.stack(gate_up)?,
                gate_up_bias: self.optional(biases.gate_up.as_deref())?,
                down: down.iter().map(|part| self.stack(part)).collect::<Result<_, _>>()?,
                down_bias: self.optional(biases.down.as_deref())?,
            },
        })
    }

    fn stack(&mut self, matrices: &[HostMatrix<'_>]) -> Result<B::Stack, KernelError> {
        let stack = match self.quantization {
            Quantization::None => self.backend.load_stack(matrices),
            Quantization::Int8 => self.backend.load_int8_stack(matrices),
        }?;
        self.loaded(matrices, true);
        Ok(stack)
    }

    /// Packs a matrix, quantised according to `quantization`.
    pub(super) fn matrix(&mut self, parts: &[HostMatrix<'_>]) -> Result<B::Matrix, KernelError> {
        let matrix = match self.quantization {
            Quantization::None => self.backend.load_matrix(parts),
            Quantization::Int8 => self.backend.load_int8_matrix(parts),
        }?;
        self.loaded(parts, false);
        Ok(matrix)
    }

    /// Packs a matrix that is never quantised: an embedding, a router.
    pub(super) fn small(&mut self, parts: &[HostMatrix<'_>]) -> Result<B::Matrix, KernelError> {
        let matrix = self.backend.load_bf16_matrix(parts)?;
        self.advance(parts, &|matrix| held(matrix, Quantization::None, None));
        Ok(matrix)
    }

    /// Counts matrices that were loaded together according to `quantization`.
    fn loaded(&mut self, matrices: &[HostMatrix<'_>], is_stack: bool) {
        let kept = self.quantization;
        let form = Compact::of(matrices).filter(|form| self.backend.keeps(form, is_stack));
        self.advance(matrices, &|matrix| held(matrix, kept, form.as_ref()));
    }

    fn advance(&mut self, loaded: &[HostMatrix<'_>], held: &dyn Fn(&HostMatrix<'_>) -> u64) {
        self.done += loaded.iter().map(bytes).sum::<u64>();
        self.held += loaded.iter().map(held).sum::<u64>();
        (self.progress)(self.done, self.total);
    }

    /// Packs each matrix separately.
    fn parts(&mut self, parts: &[HostMatrix<'_>]) -> Result<Vec<B::Matrix>, KernelError> {
        parts.iter().map(|part| self.matrix(std::slice::from_ref(part))).collect()
    }

    pub(super) fn vector(&mut self, values: &[f32]) -> Result<B::Vector, KernelError> {
        self.backend.load_vector(values)
    }

    pub(super) fn norm(&mut self, part: &NormPart) -> Result<Norm<B::Vector>, KernelError> {
        let weight = self.vector(&part.weight)?;
        Ok(match &part.bias {
            None => Norm::Rms(weight),
            Some(bias) => Norm::Layer { weight, bias: self.vector(bias)? },
        })
    }

    fn optional(&mut self, values: Option<&[f32]>) -> Result<Option<B::Vector>, KernelError> {
        values.map(|values| self.backend.load_vector(values)).transpose()
    }
}

/// Size of a matrix as stored, in bytes.
pub(super) fn bytes(matrix: &HostMatrix<'_>) -> u64 {
    (matrix.rows * matrix.cols * matrix.dtype.bytes()) as u64
}

/// Sizes of matrices that are loaded together, as devices keep them that have at most 16 bits per
/// weight, in bytes: of the weights, and of their scales, which are apart.
pub(super) fn kept(
    matrices: &[HostMatrix<'_>],
    kind: Kind,
    quantization: Quantization,
    keeps: Keeps<'_>,
) -> [u64; 2] {
    let (quantization, form) = match kind {
        Kind::Small => (Quantization::None, None),
        Kind::Matrix | Kind::Stack => {
            let form = Compact::of(matrices).filter(|form| keeps(form, kind == Kind::Stack));
            (quantization, form)
        }
    };
    let (mut weights, mut scales) = (0, 0);
    for matrix in matrices {
        let (rows, cols) = (matrix.rows as u64, matrix.cols as u64);
        let both = held(matrix, quantization, form.as_ref()).min(2 * rows * cols);
        let own = match (quantization, &form) {
            (Quantization::Int8, _) | (Quantization::None, Some(Compact::Fp8(_))) => rows * cols,
            (Quantization::None, Some(Compact::Int4(_))) => rows * cols.div_ceil(2),
            (Quantization::None, None) => both,
        };
        let own = own.min(both);
        weights += own;
        scales += both - own;
    }
    [weights, scales]
}

/// Size of a matrix as kept, in bytes; `form` is that of a matrix that stays as it is.
fn held(matrix: &HostMatrix<'_>, kept: Quantization, form: Option<&Compact>) -> u64 {
    let (rows, cols) = (matrix.rows as u64, matrix.cols as u64);
    match (kept, form) {
        (Quantization::Int8, _) => rows * (cols + 4),
        (Quantization::None, Some(form)) => form.bytes(rows, cols),
        (Quantization::None, None) if matrix.scales.is_some() => rows * cols * 2,
        (Quantization::None, None) => bytes(matrix),
    }
}
