//! One rank's share of the tensors of multi-head latent attention, and what is loaded of them.
use std::ops::Range;

use half::bf16;
use kernels::backend::{Backend, DType, HostMatrix};
use kernels::error::KernelError;

use super::loader::{Loader, bytes};
use super::part::{Kind, Layer, rows_of};
use super::{BackendLatent, LatentWeights, Source};
use crate::model::ModelError;
use crate::model::config::Latent;

/// One rank's share of one layer: checked, but not read yet.
pub(super) struct LatentPart<'a> {
    /// The first of two projections that make q, and the norm of what it makes.
    q_down: Option<(HostMatrix<'a>, Vec<f32>)>,
    q: Vec<HostMatrix<'a>>,
    kv: Vec<HostMatrix<'a>>,
    kv_norm: Vec<f32>,
    /// For each head, `[plain, rank]`.
    keys: Vec<HostMatrix<'a>>,
    /// For each head, `[value, rank]`.
    values: Vec<HostMatrix<'a>>,
}

impl<'a> LatentPart<'a> {
    /// All matrices, those together that are loaded together.
    pub(super) fn loads(&self) -> Vec<(&[HostMatrix<'a>], Kind)> {
        let down = self.q_down.iter();
        let mut loads: Vec<_> =
            down.map(|(matrix, _)| (std::slice::from_ref(matrix), Kind::Matrix)).collect();
        loads.extend([&self.q, &self.kv].map(|parts| (parts.as_slice(), Kind::Matrix)));
        loads.extend([&self.keys, &self.values].map(|heads| (heads.as_slice(), Kind::Small)));
        loads
    }

    /// The norms.
    pub(super) fn norms(&self) -> impl Iterator<Item = &[f32]> {
        let of_q = self.q_down.iter().map(|(_, norm)| norm.as_slice());
        of_q.chain([self.kv_norm.as_slice()])
    }
}

impl<'a> Layer<'a> {
    pub(super) fn latent(&self, sizes: &Latent) -> Result<LatentPart<'a>, ModelError> {
        let Source { config, shard, .. } = self.part.0;
        let Latent { q_rank, rank, plain, rotated, value } = *sizes;
        let hidden = config.hidden_size;
        let named = |name: &str| self.name(&format!("self_attn.{name}.weight"));
        let weight = |name: &str, shape| self.part.weight(&named(name), shape);
        // Rotated elements in the order in which backends rotate them.
        let order = config.ropes[self.index].rows(rotated, 0..1);
        let behind = |first: usize| {
            let ranges = order.iter().map(move |range| first + range.start..first + range.end);
            ranges.collect::<Vec<Range<usize>>>()
        };
        let q_down = match q_rank {
            None => None,
            Some(q_rank) => {
                let matrix = weight("q_a_proj", [q_rank, hidden])?;
                let norm = self.part.norm(&named("q_a_layernorm"), q_rank)?;
                Some((rows_of(&matrix, &(0..q_rank)), norm))
            }
        };
        let (name, inputs) = q_rank.map_or(("q_proj", hidden), |q_rank| ("q_b_proj", q_rank));
        let head_dim = plain + rotated;
        let tensor = weight(name, [config.num_heads * head_dim, inputs])?;
        let mut q = Vec::new();
        for head in shard.heads.clone() {
            let first = head * head_dim;
            q.push(rows_of(&tensor, &(first..first + plain)));
            q.extend(behind(first + plain).iter().map(|rows| rows_of(&tensor, rows)));
        }
        let tensor = weight("kv_a_proj_with_mqa", [rank + rotated, hidden])?;
        let mut kv = vec![rows_of(&tensor, &(0..rank))];
        kv.extend(behind(rank).iter().map(|rows| rows_of(&tensor, rows)));
        let tensor = weight("kv_b_proj", [config.num_heads * (plain + value), rank])?;
        let of_heads = |first: usize, len: usize| {
            let rows = shard.heads.clone().map(|head| head * (plain + value) + first);
            rows.map(|first| rows_of(&tensor, &(first..first + len))).collect()
        };
        Ok(LatentPart {
            q_down,
            q,
            kv,
            kv_norm: self.part.norm(&named("kv_a_layernorm"), rank)?,
            keys: of_heads(0, plain),
            values: of_heads(plain, value),
        })
    }
}

impl<B: Backend> Loader<'_, '_, B> {
    pub(super) fn latent(
        &mut self,
        part: &LatentPart<'_>,
    ) -> Result<BackendLatent<B>, KernelError> {
        let LatentPart { q_down, q, kv, kv_norm, keys, values } = part;
        Ok(LatentWeights {
            q_down: match q_down {
                None => None,
                Some((matrix, norm)) => {
                    Some((self.matrix(std::slice::from_ref(matrix))?, self.vector(norm)?))
                }
            },
            q: self.matrix(q)?,
            kv: self.matrix(kv)?,
            kv_norm: self.vector(kv_norm)?,
            keys: self.heads(keys, true)?,
            values: self.heads(values, false)?,
        })
    }

    /// Loads a matrix for each head, or its transpose. Never quantised; what files have quantised
    /// becomes bf16.
    fn heads(
        &mut self,
        matrices: &[HostMatrix<'_>],
        transposes: bool,
    ) -> Result<B::Stack, KernelError> {
        let copies: Vec<Copied> = matrices.iter().map(|it| Copied::of(it, transposes)).collect();
        let views: Vec<HostMatrix<'_>> = copies.iter().map(Copied::view).collect();
        let stack = self.backend.load_stack(&views)?;
        self.done += matrices.iter().map(bytes).sum::<u64>();
        self.held += views.iter().map(bytes).sum::<u64>();
        (self.progress)(self.done, self.total);
        Ok(stack)
    }
}

/// A matrix of its own.
struct Copied {
    data: Vec<u8>,
    dtype: DType,
    rows: usize,
    cols: usize,
}

impl Copied {
    /// A matrix or its transpose, in bf16 if it is quantised or has that type, else in f32.
    fn of(matrix: &HostMatrix<'_>, transposes: bool) -> Self {
        let (rows, cols) = (matrix.rows, matrix.cols);
        let is_bf16 = matrix.scales.is_some() || matrix.dtype == DType::Bf16;
        let dtype = if is_bf16 { DType::Bf16 } else { DType::F32 };
        let mut data = vec![0; rows * cols * dtype.bytes()];
        let mut values = vec![0.0; cols];
        for row in 0..rows {
            matrix.row_f32(row, &mut values);
            for (col, &value) in values.iter().enumerate() {
                let at = if transposes { col * rows + row } else { row * cols + col };
                if is_bf16 {
                    let value = bf16::from_f32(value).to_le_bytes();
                    data[2 * at..2 * at + 2].copy_from_slice(&value);
                } else {
                    data[4 * at..4 * at + 4].copy_from_slice(&value.to_le_bytes());
                }
            }
        }
        let (rows, cols) = if transposes { (cols, rows) } else { (rows, cols) };
        Self { data, dtype, rows, cols }
    }

    fn view(&self) -> HostMatrix<'_> {
        let Self { data, dtype, rows, cols } = self;
        HostMatrix {
            data,
            dtype: *dtype,
            rows: *rows,
            cols: *cols,
            col_start: 0,
            row_stride: *cols,
            scales: None,
        }
    }
}
