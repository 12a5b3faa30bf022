//! Mixtures of experts, and rows that go to matrices of their own (LoRA adapters).
use super::{ExpertActivation, Routing, Tensors};
#[cfg(doc)]
use super::{NOT_ASSIGNED, ProductOps};
use crate::error::KernelError;

/// Mixtures of experts (MoE).
pub trait ExpertOps: Tensors {
    /// Makes room for what up to `rows_max` rows choose.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when `routing` asks for what cannot be; [`KernelError::OutOfMemory`];
    /// [`KernelError::Unsupported`].
    fn new_routes(
        &mut self,
        rows_max: usize,
        routing: Routing,
    ) -> Result<Self::Routes, KernelError>;

    /// Every row chooses its experts: `p = softmax(x W^T + bias)` over all experts, in f32; the
    /// `top_k` experts of the largest p, largest first, of equal ones the lowest number first;
    /// their weights are their p, divided by their sum where [`Routing::normalise`].
    /// `x: [rows, in]`, `router: [num_experts, in]`, `bias: [num_experts]`; the rows of `routes`
    /// are set. Every rank chooses for itself, and has to choose alike: from the same bits come the
    /// same choices and weights on every CPU, whatever its instructions, and on every GPU of one
    /// compute capability, whatever else is in the batch.
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

    /// Row `i` goes to `experts[i]`, with weight 1, or to none ([`NOT_ASSIGNED`]): then what
    /// [`Self::experts_down`] makes of it is zero. For routes whose `top_k` is 1; their rows are
    /// set.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when an expert is not there or there is no room for so many rows;
    /// [`KernelError::Unsupported`].
    fn assign(&mut self, experts: &[u32], routes: &mut Self::Routes) -> Result<(), KernelError> {
        let _ = (experts, routes);
        Err(KernelError::Unsupported("rows cannot be assigned to matrices here".to_owned()))
    }

    /// As [`ProductOps::gate_up`] for every expert that a row goes to: row `r * top_k + j` of `out`
    /// is of row `r` and its expert `j`. `x: [rows, in]`, `weight: 2 * num_experts` matrices
    /// `[inner, in]`, each expert's gate before its up, `bias: [2 * num_experts, inner]` likewise,
    /// `out: [rows * top_k, inner]` (its rows are set).
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

    /// What a row's experts make of some of their columns, weighted and added up in the order in
    /// which the row chose them: `out[r] = sum over j of w(r, j) * (x[r * top_k + j, columns] W^T +
    /// bias)`, with columns `first..first + in`. `x: [rows * top_k, at least first + in]`,
    /// `weight: num_experts` matrices `[out, in]`, `bias: [num_experts, out]`, `out: [rows, out]`
    /// (its rows are set), which may be one of [`Tensors::new_input_buffer`].
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
