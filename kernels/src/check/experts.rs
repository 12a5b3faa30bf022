//! Mixtures of experts.
use super::{Matrix, Vector, columns, ensure, shape_error, vector};
use crate::backend::{Buffer, NOT_ASSIGNED, Routing};
use crate::error::KernelError;

/// Number of matrices in a stack; rows and columns of each.
pub(crate) type StackSizes = (usize, usize, usize);

fn stack(op: &'static str, found: StackSizes, wanted: StackSizes) -> Result<(), KernelError> {
    ensure!(op, found == wanted, "weight is of {found:?}, not {wanted:?} matrices, rows, columns");
    Ok(())
}

/// Checks the routing of rows by a router.
pub(crate) fn route(
    x: &impl Buffer,
    router: &impl Matrix,
    bias: Option<&impl Vector>,
    routing: &Routing,
    rows_max: usize,
) -> Result<(), KernelError> {
    let op = "route";
    let (found, wanted) = ((router.rows(), router.cols()), (routing.num_logits(), x.width()));
    ensure!(op, found == wanted, "router is {found:?}, not {wanted:?}");
    vector(op, "bias", bias, routing.chosen().0)?;
    let rows = x.rows();
    ensure!(op, rows <= rows_max, "x has {rows} rows, room is for {rows_max}");
    Ok(())
}

/// Checks the assignment of rows to given experts.
pub(crate) fn assign(
    experts: &[u32],
    routing: &Routing,
    rows_max: usize,
) -> Result<(), KernelError> {
    let op = "assign";
    let (rows, Routing { num_experts, top_k, .. }) = (experts.len(), *routing);
    ensure!(op, top_k == 1, "rows go to {top_k} experts, not to one");
    ensure!(op, rows <= rows_max, "{rows} rows, room is for {rows_max}");
    let is_there = |expert: u32| expert == NOT_ASSIGNED || (expert as usize) < num_experts;
    match experts.iter().find(|expert| !is_there(**expert)) {
        None => Ok(()),
        Some(missing) => {
            Err(shape_error(op, format!("expert {missing} of {num_experts} is named")))
        }
    }
}

/// Checks gate and up of every expert, for `routed` rows.
pub(crate) fn gate_up<B: Buffer>(
    x: &B,
    found: StackSizes,
    bias: Option<&impl Vector>,
    (routing, routed): (&Routing, usize),
    out: &B,
) -> Result<(), KernelError> {
    let op = "experts_gate_up";
    let (matrices, inner) = (2 * routing.num_experts, out.width());
    stack(op, found, (matrices, inner, x.width()))?;
    vector(op, "bias", bias, matrices * inner)?;
    let rows = x.rows();
    ensure!(op, rows == routed, "x has {rows} rows, {routed} are routed");
    Ok(())
}

/// Checks the down projection over some columns, for `routed` rows; returns the columns' end.
pub(crate) fn down<B: Buffer>(
    (x, first): (&B, usize),
    found: StackSizes,
    bias: Option<&impl Vector>,
    (routing, routed): (&Routing, usize),
    out: &B,
) -> Result<usize, KernelError> {
    let op = "experts_down";
    let Routing { num_experts, top_k, .. } = *routing;
    let (width, (_, _, cols)) = (out.width(), found);
    stack(op, found, (num_experts, width, cols))?;
    vector(op, "bias", bias, num_experts * width)?;
    let end = columns(op, x, first, cols)?;
    let rows = x.rows();
    ensure!(op, rows == routed * top_k, "x has {rows} rows, not {routed} x {top_k}");
    Ok(end)
}
