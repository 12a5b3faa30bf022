//! Mixtures of experts, and per-row choice of a matrix (LoRA adapters).
use super::{ExpertActivation, Routing, Tensors};
#[cfg(doc)]
use super::{NOT_ASSIGNED, ProductOps, Scores};
use crate::error::KernelError;

/// Mixtures of experts (MoE).
pub trait ExpertOps: Tensors {
    /// Allocates routing state for up to `rows_max` rows.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if `routing` is invalid; [`KernelError::OutOfMemory`];
    /// [`KernelError::Unsupported`].
    fn new_routes(
        &mut self,
        rows_max: usize,
        routing: Routing,
    ) -> Result<Self::Routes, KernelError>;

    /// Chooses the experts of every row: `p = softmax(x W^T + bias)` over all experts that can be
    /// chosen, or `p = sigmoid(x W^T)` ([`Scores`]), in f32. The row gets the experts with the
    /// largest p (sigmoid: the largest `p + bias`), largest first, ties by lowest number; their
    /// weights are their p, divided by their sum if [`Routing::normalise`], times
    /// [`Routing::scale`]. After them come the shared experts. `x: [rows, in]`,
    /// `router: [num_logits, in]`, `bias: [experts that can be chosen]`; sets the rows of `routes`.
    /// Every rank chooses for itself and all have to agree: the same bits give the same choices and
    /// weights on every CPU, whatever its instruction set, and on every GPU of one compute
    /// capability, whatever else is in the batch.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn route(
        &mut self,
        x: &Self::Buffer,
        router: &Self::Matrix,
        bias: Option<&Self::Vector>,
        routes: &mut Self::Routes,
    ) -> Result<(), KernelError>;

    /// Sends row `i` to `experts[i]` with weight 1, or to none ([`NOT_ASSIGNED`]), in which case
    /// the row's result of [`Self::experts_down`] is zero. Requires routes with a `top_k` of 1;
    /// sets their rows.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if an expert does not exist or there are too many rows;
    /// [`KernelError::Unsupported`].
    fn assign(&mut self, experts: &[u32], routes: &mut Self::Routes) -> Result<(), KernelError> {
        let _ = (experts, routes);
        Err(KernelError::Unsupported("rows cannot be assigned to matrices here".to_owned()))
    }

    /// As [`ProductOps::gate_up`], for every expert of every row: row `r * top_k + j` of `out` is
    /// the result of row `r` and its expert `j`. `x: [rows, in]`, `weight: 2 * num_experts`
    /// matrices `[inner, in]`, each expert's gate before its up, `bias: [2 * num_experts, inner]`
    /// likewise, `out: [rows * top_k, inner]` (sets its rows).
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn experts_gate_up(
        &mut self,
        x: &Self::Buffer,
        weight: &Self::Stack,
        bias: Option<&Self::Vector>,
        activation: ExpertActivation,
        routes: &Self::Routes,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// Down projection of every row's experts over some of the columns, weighted and summed in the
    /// order in which the row chose them:
    /// `out[r] = sum over j of w(r, j) * (x[r * top_k + j, columns] W^T + bias)`, with columns
    /// `first..first + in`. `x: [rows * top_k, at least first + in]`, `weight: num_experts`
    /// matrices `[out, in]`, `bias: [num_experts, out]`, `out: [rows, out]` (sets its rows), which
    /// can be a [`Tensors::new_input_buffer`].
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn experts_down(
        &mut self,
        x: &Self::Buffer,
        first: usize,
        weight: &Self::Stack,
        bias: Option<&Self::Vector>,
        routes: &Self::Routes,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;
}
