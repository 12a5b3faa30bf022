//! A rank on a GPU: what its operations share. Scratch, inputs of a step, copies to and
//! from the host.
use std::fmt;
use std::time::{Duration, Instant};

use super::batch::sizes;
use super::device::{CudaOptions, Device, Scratch};
use super::memory::DevicePtr;
use super::parts::Windows;
use super::peer::Retired;
use super::readback::Readback;
use super::sampling::Sampling;
use super::step::Step;
use super::tensors::{CudaBuffer, Element, Uploader};
use crate::backend::{AttentionShape, Batch, Buffer as _, Tensors as _};
use crate::check::ensure;
use crate::collective::{Collective, Tally};
use crate::error::KernelError;

/// A rank on a GPU. Stays on the thread that made it.
pub struct CudaBackend {
    // Dropped in this order: graphs before the memory they name, all before the device.
    pub(super) step: Step,
    pub(super) sampling: Sampling,
    wide: Scratch,
    narrow: Scratch,
    partials: Scratch,
    index: Scratch,
    gathered: Scratch,
    widened: Scratch,
    best: Scratch,
    /// The open step's logits stay on their ranks.
    pub(super) apart: Option<Part>,
    pub(super) uploader: Option<Uploader>,
    pub(super) retired: Retired,
    pub(super) collective: Box<dyn Collective>,
    pub(super) collective_time: Duration,
    pub(super) exchanged: Tally,
    /// The most bytes that a step needs room for, of each [`Exchanged`].
    exchanged_most: [usize; 2],
    pub(super) host: Vec<f32>,
    pub(super) readback: Readback,
    /// Collective operations do nothing: other ranks may still be loading.
    pub(super) alone: bool,
    pub(super) options: CudaOptions,
    pub(super) device: Device,
}

impl fmt::Debug for CudaBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaBackend({}, rank {})", self.describe(), self.rank())
    }
}

impl CudaBackend {
    /// A backend on a GPU.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`], in one line, when the driver, the GPU or the kernels cannot be
    /// used; [`KernelError::OutOfMemory`]; [`KernelError::Device`].
    pub fn new(options: CudaOptions, collective: Box<dyn Collective>) -> Result<Self, KernelError> {
        let device = Device::new(&options)?;
        let overlaps = options.overlap && device.context.info().capability >= (9, 0);
        let mut made = Self {
            step: Step::new(options.graphs, overlaps, options.batch_invariant),
            sampling: Sampling::new(),
            wide: Scratch::new("results within a fused operation"),
            narrow: Scratch::new("inputs of a product"),
            partials: Scratch::new("partial results of attention"),
            index: Scratch::new("row numbers"),
            gathered: Scratch::new("logits of all ranks"),
            widened: Scratch::new("quantised weights of a product in bf16"),
            best: Scratch::new("the best logits of all ranks"),
            apart: None,
            uploader: None,
            retired: Retired::default(),
            collective,
            collective_time: Duration::ZERO,
            exchanged: Tally::default(),
            exchanged_most: [0; 2],
            host: Vec::new(),
            readback: Readback::default(),
            alone: false,
            options,
            device,
        };
        made.rest_graphs();
        Ok(made)
    }

    /// Exchanges data through `collective` from now on; the old one, and whatever group the device
    /// was in, is left and dropped.
    ///
    /// # Errors
    /// [`KernelError::Device`] when the GPU does not come to rest; the collective is set
    /// nonetheless.
    pub fn set_collective(&mut self, collective: Box<dyn Collective>) -> Result<(), KernelError> {
        let left = self.leave();
        self.collective = collective;
        self.rest_graphs();
        left
    }

    /// Ranks that have not joined exchange data through host memory.
    fn rest_graphs(&mut self) {
        let ranks = self.collective.world_size();
        self.step.use_graphs((ranks > 1).then_some("ranks exchange data through host memory"));
    }

    /// Leaves the group of devices: what waits for other ranks is freed, graphs go first.
    fn leave(&mut self) -> Result<(), KernelError> {
        // Whatever is given up below may have to wait for what the stream waits for.
        let group = &self.device.context.group;
        let _ = group.call(|group| group.abort_handle().abort());
        // A step that another rank's end broke off is no reason against graphs.
        let stream = &self.device.stream;
        if self.step.abandon(stream) && stream.take_capture_fault() {
            self.step.capture_failed("a step failed while its graph was captured");
        }
        self.step.forget_graphs();
        self.sampling.forget();
        self.step.allow_parts(false);
        self.device.context.group.leave(&self.device.stream)
    }

    /// Whether the ranks exchange data on their devices.
    pub(super) fn is_grouped(&self) -> bool {
        !self.device.context.group.is_empty()
    }

    /// While `alone`, collective operations do nothing, and what becomes of other ranks is nothing
    /// to this one: for loading, and for steps whose results nobody reads. What
    /// graphs came of them is forgotten, since other ranks have not made such steps.
    pub fn set_alone(&mut self, alone: bool) {
        self.alone = alone;
        self.device.context.group.rest(alone);
        self.step.forget_graphs();
    }

    /// Memory that is free on the GPU now, and all there is, in bytes.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    pub fn memory(&self) -> Result<(u64, u64), KernelError> {
        self.device.context.memory()
    }

    /// Waits for all work, and frees what only loading needed.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    pub fn settle(&mut self) -> Result<(), KernelError> {
        self.device.stream.synchronize()?;
        self.uploader = None;
        Ok(())
    }

    /// Whether decode steps become graphs, as all ranks of the epoch find alike.
    #[must_use]
    pub fn captures(&self) -> bool {
        self.step.captures()
    }

    /// How many graphs there are.
    #[must_use]
    pub fn num_graphs(&self) -> usize {
        self.step.num_graphs()
    }

    /// Why decode steps are no graphs for good, or their kernels do not begin before those before
    /// them are complete, if either failed: steps are right all the same, and slower.
    #[must_use]
    pub fn given_up(&self) -> Option<&str> {
        self.step.given_up()
    }

    /// Whether decode steps become graphs from now on, and kernels begin before those before them
    /// are complete, as far as the options and the GPU allow: for measuring what each is worth.
    pub fn set_modes(&mut self, graphs: bool, overlap: bool) {
        self.rest_graphs();
        if !graphs {
            self.step.use_graphs(Some("they are switched off for now"));
        }
        self.step.set_overlap(overlap && self.options.overlap);
        self.device.set_overlap(self.step.overlaps());
    }

    /// As [`CudaOptions::carveout`], from now on.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    pub fn set_carveout(&mut self, percent: Option<u8>) -> Result<(), KernelError> {
        // Graphs keep what their kernels asked for.
        self.step.forget_graphs();
        self.device.set_carveout(percent)
    }

    /// Fills a buffer's memory with NaN, so that a test sees what was not written.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    pub fn poison(&mut self, buffer: &CudaBuffer) -> Result<(), KernelError> {
        buffer.poison(&self.device.stream, 0xff)
    }

    /// Makes room for what is exchanged with other ranks, as soon as it is: all that any step will
    /// need, so that no rank has to move it, and forgets its graphs, when others do not.
    pub(super) fn reserve(&mut self, which: Exchanged, bytes: usize) -> Result<(), KernelError> {
        let most = &mut self.exchanged_most[which as usize];
        *most = bytes.max(*most);
        if self.is_grouped() { self.reserve_exchanged() } else { Ok(()) }
    }

    /// Makes room for all that was asked for by [`CudaBackend::reserve`].
    pub(super) fn reserve_exchanged(&mut self) -> Result<(), KernelError> {
        let [gathered, best] = self.exchanged_most;
        for (which, bytes) in [(Which::Gathered, gathered), (Which::Best, best)] {
            if bytes > 0 {
                self.scratch(which, bytes)?;
            }
        }
        Ok(())
    }

    /// A piece of scratch; graphs that named its old place are forgotten.
    pub(super) fn scratch(&mut self, which: Which, bytes: usize) -> Result<DevicePtr, KernelError> {
        let scratch = match which {
            Which::Wide => &mut self.wide,
            Which::Narrow => &mut self.narrow,
            Which::Partials => &mut self.partials,
            Which::Index => &mut self.index,
            Which::Gathered => &mut self.gathered,
            Which::Best => &mut self.best,
            Which::Widened => &mut self.widened,
        };
        let (ptr, moved) = scratch.get(&self.device, bytes)?;
        if moved {
            self.step.forget_graphs();
        }
        Ok(ptr)
    }

    /// Puts a batch where the kernels read it, unless the step has done so.
    pub(super) fn stage(
        &mut self,
        batch: &Batch<'_>,
        shape: &AttentionShape,
    ) -> Result<(), KernelError> {
        if self.step.has_batch(batch) {
            return Ok(());
        }
        ensure!("attention", !self.step.is_open(), "the batch is not the one the step began with");
        let cut = self.step.cut(shape, Windows::new(&[shape.sliding_window])?);
        let capacity = sizes(0, batch, cut, 0);
        let Device { context, stream, .. } = &self.device;
        self.step.stage(context, stream, capacity, &[], (&[], &[]), batch, cut, &[])
    }

    pub(super) fn timed<T, E: Into<KernelError>>(
        &mut self,
        operation: impl FnOnce(&mut dyn Collective) -> Result<T, E>,
    ) -> Result<T, KernelError> {
        let start = Instant::now();
        let result = operation(self.collective.as_mut());
        self.collective_time += start.elapsed();
        result.map_err(Into::into)
    }

    /// Overwrites an f32 buffer's rows.
    pub(super) fn upload(
        &mut self,
        buffer: &CudaBuffer,
        values: &[f32],
    ) -> Result<(), KernelError> {
        buffer.of(Element::F32, "upload", "the buffer")?;
        self.device.write(buffer.memory(), values)
    }

    /// Sets every byte of all scratch.
    pub(super) fn poison_scratch(&mut self, byte: u8) -> Result<(), KernelError> {
        let Self { wide, narrow, partials, index, gathered, widened, best, .. } = self;
        let all = [wide, narrow, partials, index, gathered, widened, best];
        all.into_iter().try_for_each(|scratch| scratch.fill(&self.device, byte))
    }

    /// Overwrites a buffer's rows, rounded to its type: for tests.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when there are more values than room.
    pub fn write_buffer(
        &mut self,
        buffer: &mut CudaBuffer,
        values: &[f32],
    ) -> Result<(), KernelError> {
        let width = buffer.width().max(1);
        buffer.set_rows(values.len() / width)?;
        match buffer.element() {
            Element::F32 => self.upload(buffer, values),
            Element::Bf16 => {
                let stride = buffer.at().stride;
                let mut words = vec![0u16; values.len() / width * stride];
                for (to, from) in words.chunks_exact_mut(stride).zip(values.chunks_exact(width)) {
                    for (to, from) in to.iter_mut().zip(from) {
                        *to = half::bf16::from_f32(*from).to_bits();
                    }
                }
                self.device.write(buffer.memory(), &words)
            }
        }
    }
}

/// A rank's own logits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    /// The token of the first column.
    pub(super) first_id: u32,
    /// Columns that are tokens.
    pub(super) count: usize,
}

/// The pieces of scratch.
#[derive(Clone, Copy)]
pub(super) enum Which {
    /// f32 results.
    Wide,
    /// bf16 inputs.
    Narrow,
    /// Attention's.
    Partials,
    /// Row numbers.
    Index,
    /// Logits of all ranks, one behind the other.
    Gathered,
    /// The best of each rank's own logits, and of all ranks'.
    Best,
    /// Quantised weights in bf16.
    Widened,
}

/// Pieces of scratch that only ranks in a group need.
#[derive(Clone, Copy)]
pub(super) enum Exchanged {
    /// [`Which::Gathered`]
    Gathered,
    /// [`Which::Best`]
    Best,
}

impl CudaBackend {
    /// Puts row numbers into the scratch for them.
    pub(super) fn index_upload(&mut self, rows: &[u32]) -> Result<(), KernelError> {
        self.index.upload(&self.device, rows)
    }
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        if self.leave().is_ok() && self.device.context.is_usable() {
            let _ = self.device.stream.synchronize();
        }
    }
}
