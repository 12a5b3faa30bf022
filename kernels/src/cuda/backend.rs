//! A rank on a GPU, and what its operations share: scratch memory, inputs of a step, copies to and
//! from the host.
use std::fmt;
use std::time::{Duration, Instant};

use super::batch::sizes;
use super::device::{CudaOptions, Device, Scratch};
use super::memory::DevicePtr;
use super::parts::Windows;
use super::peer::Retired;
use super::readback::Readback;
use super::sample_lists::Candidates;
use super::sampling::Sampling;
use super::step::{Step, StepLists};
use super::tensors::{CudaBuffer, Element, Uploader};
use crate::backend::{AttentionShape, Batch, Buffer as _, Tensors as _};
use crate::check::ensure;
use crate::collective::{ByteCounters, Collective};
use crate::error::KernelError;

/// A rank on a GPU. Not `Send`: it stays on the thread that created it.
pub struct CudaBackend {
    // Dropped in this order: graphs before the memory they refer to, everything before the device.
    pub(super) step: Step,
    pub(super) sampling: Sampling,
    wide: Scratch,
    narrow: Scratch,
    partials: Scratch,
    index: Scratch,
    gathered: Scratch,
    widened: Scratch,
    best: Scratch,
    /// Set while the open step's logits are kept on their ranks.
    pub(super) apart: Option<VocabShard>,
    pub(super) uploader: Option<Uploader>,
    pub(super) retired: Retired,
    pub(super) collective: Box<dyn Collective>,
    pub(super) collective_time: Duration,
    pub(super) exchanged: ByteCounters,
    /// Largest size in bytes that any step needs, for each [`ExchangeScratch`].
    exchanged_most: [usize; 2],
    pub(super) host: Vec<f32>,
    pub(super) readback: Readback,
    /// Collective operations do nothing, because other ranks may still be loading.
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
    /// Creates a backend on a GPU.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`], in one line, if the driver, the GPU or the kernels cannot be
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
            gathered: Scratch::new("what ranks exchange"),
            widened: Scratch::new("quantised weights of a product in bf16"),
            best: Scratch::new("the best logits of all ranks"),
            apart: None,
            uploader: None,
            retired: Retired::of_thread(),
            collective,
            collective_time: Duration::ZERO,
            exchanged: ByteCounters::default(),
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

    /// Exchanges data through `collective` from now on. Leaves the group of devices, if any, and
    /// drops the old collective.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the GPU does not become idle; the collective is set nonetheless.
    pub fn set_collective(&mut self, collective: Box<dyn Collective>) -> Result<(), KernelError> {
        let left = self.leave();
        self.collective = collective;
        self.rest_graphs();
        left
    }

    /// Switches graphs off for ranks that have not joined, since they exchange data through host
    /// memory.
    fn rest_graphs(&mut self) {
        let ranks = self.collective.world_size();
        self.step.use_graphs((ranks > 1).then_some("ranks exchange data through host memory"));
    }

    /// Leaves the group of devices: aborts whatever waits for other ranks, and drops graphs first.
    fn leave(&mut self) -> Result<(), KernelError> {
        // Dropping things below may block on work that waits for other ranks, so abort that first.
        let group = &self.device.context.group;
        let _ = group.call(|group| group.abort_handle().abort());
        // A capture that failed because another rank ended the step is no reason to give up graphs.
        let stream = &self.device.stream;
        if self.step.abandon(stream)
            && let Some(fault) = stream.take_capture_fault()
        {
            self.step.not_recorded(Some(fault), "a step failed while its graph was captured");
        }
        self.step.forget_graphs();
        self.sampling.forget();
        self.step.set_grouped(false);
        self.device.context.group.leave(&self.device.stream)
    }

    /// Why something of a group that was left was still there when this rank joined another one, if
    /// so, in one line; returned once.
    pub fn take_left_behind(&self) -> Option<String> {
        self.device.context.take_left_behind()
    }

    /// Whether the ranks exchange data directly between their devices.
    pub(super) fn is_grouped(&self) -> bool {
        !self.device.context.group.is_empty()
    }

    /// While `alone`, collective operations do nothing and failures of other ranks are ignored: for
    /// loading, and for steps whose results nobody reads. Forgets all graphs, since other ranks
    /// have not recorded those of such steps.
    pub fn set_alone(&mut self, alone: bool) {
        self.alone = alone;
        self.device.context.group.rest(alone);
        self.step.forget_graphs();
    }

    /// How long work may take from now on before the GPU is considered hung; by default as long as
    /// the options say.
    pub fn set_patience(&self, patience: Option<Duration>) {
        self.device.stream.set_patience(patience.unwrap_or(self.options.patience));
    }

    /// Free and total memory of the GPU, in bytes.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    pub fn memory(&self) -> Result<(u64, u64), KernelError> {
        self.device.context.memory()
    }

    /// Waits for all work and frees memory that only loading needed.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    pub fn settle(&mut self) -> Result<(), KernelError> {
        self.device.stream.synchronize()?;
        self.uploader = None;
        Ok(())
    }

    /// Whether decode steps become graphs; all ranks of an epoch agree on this.
    #[must_use]
    pub fn captures(&self) -> bool {
        self.step.captures()
    }

    /// Whether no more graphs are made for now, by a rank that is alone, since memory was short.
    #[must_use]
    pub fn is_short_of_memory(&self) -> bool {
        self.step.is_short()
    }

    /// Number of graphs.
    #[must_use]
    pub fn num_graphs(&self) -> usize {
        self.step.num_graphs()
    }

    /// Why graphs, or the overlap of kernels, were given up for good, or why no more graphs are
    /// made for now, if something failed. Results stay correct; steps are slower.
    #[must_use]
    pub fn given_up(&self) -> Option<&str> {
        self.step.given_up()
    }

    /// Switches graphs and the overlap of kernels on or off, as far as the options and the GPU
    /// allow: for measuring what each of them gains.
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
        // Graphs keep the setting that they were recorded with.
        self.step.forget_graphs();
        self.device.set_carveout(percent)
    }

    /// Fills a buffer's memory with NaN, so that a test notices elements that were not written.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    pub fn poison(&mut self, buffer: &CudaBuffer) -> Result<(), KernelError> {
        buffer.poison(&self.device.stream, 0xff)
    }

    /// Reserves room for data exchanged with other ranks, now or once this rank joins a group: for
    /// the largest step, so that no rank moves its scratch, and thereby forgets its graphs, when
    /// others do not.
    pub(super) fn reserve(
        &mut self,
        which: ExchangeScratch,
        bytes: usize,
    ) -> Result<(), KernelError> {
        let most = &mut self.exchanged_most[which as usize];
        *most = bytes.max(*most);
        if self.is_grouped() { self.reserve_exchanged() } else { Ok(()) }
    }

    /// Reserves everything requested by [`CudaBackend::reserve`].
    pub(super) fn reserve_exchanged(&mut self) -> Result<(), KernelError> {
        let [gathered, best] = self.exchanged_most;
        for (which, bytes) in [(ScratchKind::Gathered, gathered), (ScratchKind::Best, best)] {
            if bytes > 0 {
                self.scratch(which, bytes)?;
            }
        }
        Ok(())
    }

    /// Returns scratch memory; forgets graphs that refer to its old address.
    pub(super) fn scratch(
        &mut self,
        which: ScratchKind,
        bytes: usize,
    ) -> Result<DevicePtr, KernelError> {
        let scratch = match which {
            ScratchKind::Wide => &mut self.wide,
            ScratchKind::Narrow => &mut self.narrow,
            ScratchKind::Partials => &mut self.partials,
            ScratchKind::Index => &mut self.index,
            ScratchKind::Gathered => &mut self.gathered,
            ScratchKind::Best => &mut self.best,
            ScratchKind::Widened => &mut self.widened,
        };
        let (ptr, moved) = scratch.get(&self.device, bytes)?;
        if moved {
            self.step.forget_graphs();
        }
        Ok(ptr)
    }

    /// Frees all scratch memory. The device must be idle.
    pub(super) fn free_scratch(&mut self) {
        // Graphs refer to it.
        self.step.forget_buffers();
        self.sampling.free();
        let Self { wide, narrow, partials, index, gathered, widened, best, .. } = self;
        let all = [wide, narrow, partials, index, gathered, widened, best];
        all.into_iter().for_each(Scratch::free);
        self.exchanged_most = [0; 2];
    }

    /// Uploads a batch for the kernels, unless the step has already done so.
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
        let lists = StepLists::default();
        self.step.stage(context, stream, capacity, &[], lists, batch, cut, &[])
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

    /// Overwrites a buffer's rows, rounded to its element type: for tests.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if there are more values than the buffer has room for.
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

/// The part of the vocabulary that a rank's own logits cover.
#[derive(Clone, Copy, Debug)]
pub(super) struct VocabShard {
    /// Token of the first column.
    pub(super) first_id: u32,
    /// Number of columns that are tokens.
    pub(super) count: usize,
    /// What the ranks exchange of them.
    pub(super) candidates: Candidates,
}

/// Kinds of scratch memory.
#[derive(Clone, Copy)]
pub(super) enum ScratchKind {
    /// f32 results.
    Wide,
    /// bf16 inputs.
    Narrow,
    /// Partial results of attention.
    Partials,
    /// Row numbers.
    Index,
    /// What ranks exchange: logits or partial sums of all ranks, one rank after the other, or this
    /// rank's sums in bf16.
    Gathered,
    /// The best of each rank's own logits, one or a few, and those of all ranks.
    Best,
    /// Quantised weights converted to bf16.
    Widened,
}

/// Scratch memory that only ranks in a group need.
#[derive(Clone, Copy)]
pub(super) enum ExchangeScratch {
    /// [`ScratchKind::Gathered`]
    Gathered,
    /// [`ScratchKind::Best`]
    Best,
}

impl CudaBackend {
    /// Uploads row numbers to the scratch memory for them.
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
