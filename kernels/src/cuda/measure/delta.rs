//! Speed of linear attention in one layer.
use std::time::Duration;

use super::{CudaBackend, TURNS_MOST, fill, random_words};
use crate::backend::{Batch, DeltaShape, Rule, SeqRows};
use crate::cuda::batch::{AttentionTiling, Layout, live, sizes};
use crate::cuda::device::Device;
use crate::cuda::launch::{self, DeltaIo, Rows};
use crate::cuda::memory::{DeviceMemory, DevicePtr};
use crate::cuda::products::small;
use crate::error::KernelError;

impl CudaBackend {
    /// Measures linear attention of one layer for `count` sequences that go on with `rows` tokens
    /// each, on layers whose states are at least `cold` bytes in total and that are used in turn.
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn measure_delta(
        &mut self,
        shape: &DeltaShape,
        (count, rows): (usize, usize),
        cold: usize,
    ) -> Result<Duration, KernelError> {
        let what = "linear attention to be measured";
        let own = small(rows)?;
        let seqs: Vec<SeqRows> = (0..small(count)?)
            .map(|index| SeqRows {
                row_start: index * own,
                num_rows: own,
                context_len: own + 1,
                table_start: 0,
                table_len: 0,
            })
            .collect();
        let all = count * rows;
        let inputs = Batch { positions: &[], slots: &[], seqs: &seqs, block_tables: &[] };
        let cut = AttentionTiling::NONE;
        let layout = Layout::new(sizes(all, &inputs, cut, 0));
        let mut words = vec![0; layout.words(0)];
        layout.fill(&mut words, &[], &inputs, cut, &[], &mut Vec::new())?;
        for (state, word) in (0..).zip(&mut words[layout.states..][..count]) {
            *word = state;
        }
        let Device { context: gpu, stream, .. } = &self.device;
        let lists = DeviceMemory::new(gpu, words.len() * 4, what)?;
        lists.upload(stream, 0, &words)?;
        let state = count * shape.state_len() * 4;
        let layers = cold.div_ceil(state).clamp(1, TURNS_MOST);
        let memory = |floats: usize| -> Result<DeviceMemory, KernelError> {
            let memory = DeviceMemory::new(gpu, floats * 4, what)?;
            fill(&memory, stream, &random_words(1))?;
            Ok(memory)
        };
        let slots = memory(layers * state / 4)?;
        let qkvz = memory(all * (shape.channels() + shape.value_width()))?;
        let ba = memory(all * shape.gates_width())?;
        let weights = memory(shape.channels() * shape.kernel)?;
        // Not negative, or states would grow without end.
        let decay = DeviceMemory::new(gpu, shape.value_heads * 4, what)?;
        let signless: Vec<u32> = random_words(1).iter().map(|word| word & 0x7fff_ffff).collect();
        fill(&decay, stream, &signless)?;
        let (mixed, gates) = DeltaIo::scratch(shape, all);
        let (mixed, gates) = (memory(mixed)?, memory(gates)?);
        let out = memory(all * shape.value_width())?;
        let (of_rule, none) = (weights.ptr(), DevicePtr::default());
        let (of_mamba2, norm) = match shape.rule {
            Rule::GatedDelta => (none, of_rule),
            Rule::Mamba2 => (of_rule, none),
        };
        let at = |words: usize| lists.ptr().offset(words * 4);
        self.measure(layers, |device, turn| {
            let io = DeltaIo {
                qkvz: qkvz.ptr(),
                ba: ba.ptr(),
                conv: weights.ptr(),
                conv_bias: of_mamba2,
                decay: decay.ptr(),
                dt_bias: weights.ptr(),
                skip: of_mamba2,
                norm,
                slots: slots.ptr().offset(turn % layers * state),
                seqs: at(layout.seqs),
                states: at(layout.states),
                num_seqs: at(live::SEQS),
                mixed: mixed.ptr(),
                gates: gates.ptr(),
                out: Rows { ptr: out.ptr(), stride: shape.value_width() },
            };
            let rows = (all, DevicePtr::default());
            for call in launch::delta_attention(&io, shape, 1e-6, rows, count) {
                // SAFETY: everything was allocated for these sequences.
                unsafe { device.launch(call) }?;
            }
            Ok(())
        })
    }
}
