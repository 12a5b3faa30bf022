//! Matrix products.
use super::{Activation, PlainActivation, Tensors};
use crate::error::KernelError;

/// Matrix products.
pub trait ProductOps: Tensors {
    /// `out = x W^T + bias`. `x: [rows, in]`, `out: [rows, out]`.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn linear(
        &mut self,
        x: &Self::Buffer,
        weight: &Self::Matrix,
        bias: Option<&Self::Vector>,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// `out = x[.., first..first + in] W^T + bias`: a product over a range of columns.
    /// `x: [rows, at least first + in]`, `out: [rows, out]`.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn linear_columns(
        &mut self,
        x: &Self::Buffer,
        first: usize,
        weight: &Self::Matrix,
        bias: Option<&Self::Vector>,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// `out = activation(x Wg^T + bg + ag) * (x Wu^T + bu + au)`, with `weight: [2 * inner, in]` =
    /// gate rows, then up rows, and `bias` and the columns of `addend: [rows, 2 * inner]` likewise.
    /// `out: [rows, inner]`.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn gate_up(
        &mut self,
        x: &Self::Buffer,
        weight: &Self::Matrix,
        bias: Option<&Self::Vector>,
        addend: Option<&Self::Buffer>,
        activation: Activation,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// `out = activation(x W^T + bias + addend)`, for an MLP without a gate: `weight: [inner, in]`,
    /// `addend` and `out: [rows, inner]`, `out` a [`Tensors::new_input_buffer`].
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn activated(
        &mut self,
        x: &Self::Buffer,
        weight: &Self::Matrix,
        bias: Option<&Self::Vector>,
        addend: Option<&Self::Buffer>,
        activation: PlainActivation,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// Logits of the given rows: `out[i] = x[rows[i]] W^T`, or `cap * tanh(of that / cap)` if there
    /// is a cap (Gemma 2). `out: [rows.len(), vocab_local]`.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn lm_head(
        &mut self,
        x: &Self::Buffer,
        rows: &[u32],
        weight: &Self::Matrix,
        cap: Option<f32>,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;
}
