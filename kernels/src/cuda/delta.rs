//! Linear attention on the GPU.
use super::backend::{CudaBackend, ScratchKind};
use super::batch::{AttentionTiling, live, sizes};
use super::device::Device;
use super::launch::{self, DeltaIo};
use super::memory::{DeviceMemory, DevicePtr};
use super::step::{LaunchRows, StepLists};
use super::tensors::{CudaBuffer, CudaVector, Element};
use crate::backend::{Buffer as _, DeltaAt, DeltaInput, DeltaOps, Rule, StatesShape};
use crate::check::{delta as check, ensure};
use crate::error::KernelError;

/// States of sequences: of each layer and slot what `kernels.h` says, in f32.
#[derive(Debug)]
pub struct CudaStates {
    memory: DeviceMemory,
    shape: StatesShape,
}

impl CudaStates {
    /// Address of the slots of a layer, which must exist.
    fn layer(&self, layer: usize) -> DevicePtr {
        let StatesShape { slots, layer: of, .. } = &self.shape;
        self.memory.ptr().offset(layer * slots * of.state_len() * size_of::<f32>())
    }
}

impl CudaBackend {
    /// Uploads the sequences and their states, unless the step has already done so.
    fn stage_states(&mut self, at: DeltaAt<'_>) -> Result<(), KernelError> {
        let (op, batch) = ("delta_attention", at.batch);
        if self.step.has_batch(batch) && self.step.has_states(at.states) {
            return Ok(());
        }
        ensure!(op, !self.step.is_open(), "batch and states are not those the step began with");
        let cut = AttentionTiling::NONE;
        let (capacity, lists) =
            (sizes(0, batch, cut, 0), StepLists { states: at.states, ..StepLists::default() });
        let Device { context, stream, .. } = &self.device;
        self.step.stage(context, stream, capacity, &[], lists, batch, cut, &[])
    }
}

impl DeltaOps for CudaBackend {
    type States = CudaStates;

    fn new_states(&mut self, shape: StatesShape) -> Result<CudaStates, KernelError> {
        check::states(&shape)?;
        // Graphs refer to the states before these.
        self.step.forget_graphs();
        self.settle()?;
        let Device { context, stream, .. } = &self.device;
        let what = "the states of sequences";
        let memory = DeviceMemory::zeroed(context, stream, shape.bytes(), what)?;
        Ok(CudaStates { memory, shape })
    }

    fn copy_states(
        &mut self,
        states: &mut CudaStates,
        pairs: &[(u32, u32)],
    ) -> Result<(), KernelError> {
        check::copies(&states.shape, pairs)?;
        if pairs.is_empty() {
            return Ok(());
        }
        // The stream may still record one, and the copies would be lost with that.
        self.step.drop_failed(&self.device.stream);
        // A copy for each layer: on the stream, as steps are, and behind all that they do.
        let bytes = states.shape.layer.state_len() * size_of::<f32>();
        let at = |layer: usize, slot: u32| (layer * states.shape.slots + slot as usize) * bytes;
        for &(from, to) in pairs {
            for layer in 0..states.shape.num_layers {
                let (from, to) = (at(layer, from), at(layer, to));
                states.memory.copy_within(&self.device.stream, from, to, bytes)?;
            }
        }
        Ok(())
    }

    fn delta_attention(
        &mut self,
        input: DeltaInput<'_, CudaBuffer, CudaVector>,
        at: DeltaAt<'_>,
        states: &mut CudaStates,
        out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        let op = "delta_attention";
        let of = &states.shape;
        check::operands(&input, at.layer, of, out)?;
        let DeltaInput { qkvz, ba, weights, eps } = input;
        let rows = qkvz.rows();
        // Every layer has the same places.
        let bounds = (rows, of.slots);
        let is_own = self.step.has_states(at.states);
        if !is_own || self.step.is_unchecked(op, at.batch, bounds) {
            check::places(at, rows, of.slots)?;
            if is_own {
                self.step.checked(op, bounds);
            }
        }
        let from = qkvz.of(Element::F32, op, "qkvz")?.ptr;
        let ba_from = ba.of(Element::F32, op, "ba")?.ptr;
        let element = match of.layer.rule {
            Rule::GatedDelta => Element::Bf16,
            Rule::Mamba2 => Element::F32,
        };
        let to = out.of(element, op, "out")?;
        out.set_rows(rows)?;
        self.stage_states(at)?;
        let slots = states.layer(at.layer);
        if self.step.record_or_skip(op, [from.0, weights.conv.ptr().0, slots.0]) || rows == 0 {
            return Ok(());
        }
        let most = [qkvz, ba, &*out].map(CudaBuffer::rows_max).into_iter().min();
        let LaunchRows { rows: count, live } = self.step.launched(op, rows, most.unwrap_or(0))?;
        let (mixed, gates) = DeltaIo::scratch(&of.layer, count);
        let scratch = self.scratch(ScratchKind::Wide, (mixed + gates) * size_of::<f32>())?;
        let layout = *self.step.layout();
        let (conv_bias, skip) = weights.rule.mamba2();
        let vector = |vector: Option<&CudaVector>| vector.map(CudaVector::ptr).unwrap_or_default();
        let io = DeltaIo {
            qkvz: from,
            ba: ba_from,
            conv: weights.conv.ptr(),
            conv_bias: vector(conv_bias),
            decay: weights.decay.ptr(),
            dt_bias: weights.dt_bias.ptr(),
            skip: vector(skip),
            norm: vector(weights.rule.norm()),
            slots,
            seqs: self.step.at(layout.seqs),
            states: self.step.at(layout.states),
            num_seqs: self.step.at(live::SEQS),
            mixed: scratch,
            gates: scratch.offset(mixed * size_of::<f32>()),
            out: to,
        };
        let seqs = self.step.counts().seqs;
        let calls = launch::delta_attention(&io, &of.layer, eps, (count, live), seqs);
        for call in calls {
            // SAFETY: shapes, sequences and slots were checked.
            unsafe { self.device.launch(call) }?;
        }
        Ok(())
    }

    fn gate(&mut self, gate: &CudaBuffer, x: &mut CudaBuffer) -> Result<(), KernelError> {
        let op = "gate";
        check::gate(gate, x)?;
        let from = gate.of(Element::F32, op, "gate")?.ptr;
        let to = x.of(Element::Bf16, op, "x")?;
        let (rows, width) = (x.rows(), x.width());
        if self.step.record_or_skip(op, [from.0, to.ptr.0, width as u64]) || rows == 0 {
            return Ok(());
        }
        let most = gate.rows_max().min(x.rows_max());
        let LaunchRows { rows: count, live } = self.step.launched(op, rows, most)?;
        let call = launch::gate(from, to, width, count, live);
        // SAFETY: shapes were checked.
        unsafe { self.device.launch(call) }
    }
}
