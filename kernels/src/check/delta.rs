//! Linear attention.
use super::{Vector, attention, ensure, vector, width};
use crate::backend::{Buffer, DeltaAt, DeltaInput, DeltaShape, StatesShape};
use crate::error::KernelError;

/// Checks the sizes of states.
pub(crate) fn states(shape: &StatesShape) -> Result<(), KernelError> {
    let op = "new_states";
    let DeltaShape { key_heads, value_heads, key_dim, value_dim, kernel, .. } = shape.layer;
    ensure!(
        op,
        key_heads > 0 && value_heads > 0 && value_heads.is_multiple_of(key_heads),
        "value_heads is {value_heads}, not a multiple of key_heads {key_heads}"
    );
    let (key_most, value_most, kernel_most) = DeltaShape::MOST;
    for (name, size, most) in [("key_dim", key_dim, key_most), ("value_dim", value_dim, value_most)]
    {
        ensure!(
            op,
            (1..=most).contains(&size) && size.is_multiple_of(8),
            "{name} is {size}, it must be a multiple of 8, at most {most}"
        );
    }
    ensure!(
        op,
        (2..=kernel_most).contains(&kernel),
        "kernel is {kernel}, it must be in 2..={kernel_most}"
    );
    Ok(())
}

/// Checks slots to copy between.
pub(crate) fn copies(of: &StatesShape, pairs: &[(u32, u32)]) -> Result<(), KernelError> {
    let (op, slots) = ("copy_states", of.slots);
    for &(from, to) in pairs {
        let largest = from.max(to);
        ensure!(op, (largest as usize) < slots, "state {largest} of {slots} is named");
        ensure!(op, from != to, "state {from} is to be copied to itself");
    }
    Ok(())
}

/// Checks all arguments of `delta_attention`.
pub(crate) fn attend<B: Buffer, V: Vector>(
    input: &DeltaInput<'_, B, V>,
    at: DeltaAt<'_>,
    of: &StatesShape,
    out: &B,
) -> Result<(), KernelError> {
    operands(input, at.layer, of, out)?;
    places(at, input.qkvz.rows(), of.slots)
}

/// Checks what a layer's rows and weights are.
pub(crate) fn operands<B: Buffer, V: Vector>(
    input: &DeltaInput<'_, B, V>,
    layer: usize,
    of: &StatesShape,
    out: &B,
) -> Result<(), KernelError> {
    let op = "delta_attention";
    let DeltaInput { qkvz, ba, weights, .. } = input;
    let shape = &of.layer;
    width(op, "qkvz", *qkvz, shape.channels() + shape.value_width())?;
    width(op, "ba", *ba, shape.gates_width())?;
    width(op, "out", out, shape.value_width())?;
    let (rows, found) = (qkvz.rows(), ba.rows());
    ensure!(op, rows == found, "qkvz has {rows} rows, ba has {found}");
    vector(op, "conv", Some(&weights.conv), shape.channels() * shape.kernel)?;
    vector(op, "decay", Some(&weights.decay), shape.value_heads)?;
    vector(op, "dt_bias", Some(&weights.dt_bias), shape.value_heads)?;
    let (own, rule) = (weights.rule.rule(), shape.rule);
    ensure!(op, own == rule, "the weights are of {own:?}, the states of {rule:?}");
    let (conv_bias, skip) = weights.rule.mamba2();
    vector(op, "norm", weights.rule.norm(), shape.value_dim)?;
    vector(op, "conv_bias", conv_bias, shape.channels())?;
    vector(op, "skip", skip, shape.value_heads)?;
    ensure!(op, layer < of.num_layers, "layer is {layer} of {}", of.num_layers);
    Ok(())
}

/// Checks that the sequences cover all rows, and have slots of their own.
pub(crate) fn places(at: DeltaAt<'_>, rows: usize, slots: usize) -> Result<(), KernelError> {
    let op = "delta_attention";
    let (seqs, states) = (at.batch.seqs, at.states);
    ensure!(op, seqs.len() == states.len(), "{} sequences, {} states", seqs.len(), states.len());
    attention::rows(op, seqs, rows)?;
    for (index, &state) in states.iter().enumerate() {
        ensure!(op, (state as usize) < slots, "state {state} of {slots} is named");
        ensure!(op, !states[..index].contains(&state), "state {state} is named twice");
    }
    Ok(())
}

/// Checks `x *= sigmoid(gate)`.
pub(crate) fn gate<B: Buffer>(gate: &B, x: &B) -> Result<(), KernelError> {
    super::shape("gate", "x", Some(x), (gate.rows(), gate.width()))
}
