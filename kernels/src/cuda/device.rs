//! A GPU ready for launches: context, stream, kernels and cuBLASLt.
use std::fmt;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use super::calls::driver::NOT_FOUND;
use super::choice::ExchangePolicy;
use super::context::{Context, Driver};
use super::failure;
use super::fatbin;
use super::late::DelayedWrites;
use super::launch::{Call, Entry, NAMES};
use super::matmul::{Matmul, Product};
use super::memory::{DeviceMemory, DevicePtr};
use super::module::{Kernel, Module};
use super::peer::tuning::Thresholds;
use super::stream::Stream;
use crate::backend::EXPERT_SLOTS;
use crate::error::KernelError;

/// Selects a GPU and how to use it.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// The GPU's number among the visible GPUs.
    pub ordinal: u32,
    /// Folders to search for NVIDIA's libraries first.
    pub folders: Vec<PathBuf>,
    /// Folder of `.fatbin` files to use instead of the embedded kernels.
    pub kernels: Option<PathBuf>,
    /// Whether to capture decode steps as graphs.
    pub graphs: bool,
    /// Whether kernels begin before earlier ones are complete (programmatic dependent launch), if
    /// the GPU supports it.
    pub overlap: bool,
    /// Percentage of the L1 cache that all kernels except prefill attention request as shared
    /// memory; `None` leaves it to the driver.
    pub carveout: Option<u8>,
    /// Whether a row's bits depend on nothing else in the batch, nor on whether the row belongs to
    /// a prompt or was sampled.
    pub batch_invariant: bool,
    /// Slots (pairs of a row and one of its experts) that are grouped and multiplied at a time,
    /// which bounds the intermediate results. Does not affect the results.
    pub expert_slots: usize,
    /// How long work may take before the GPU is considered hung, unless
    /// [`CudaBackend::set_patience`](super::CudaBackend::set_patience) says otherwise.
    pub patience: Duration,
    /// How ranks exchange data.
    pub exchange: ExchangePolicy,
    /// Message sizes up to which this project's own exchanges are used; measured if `None`.
    pub thresholds: Option<Thresholds>,
    /// Largest message to measure for the thresholds, in bytes; the same on all ranks.
    pub measured_most: usize,
    /// Path of NCCL's library; searched for if `None`.
    pub nccl_lib: Option<PathBuf>,
}

impl Default for CudaOptions {
    fn default() -> Self {
        Self {
            ordinal: 0,
            folders: Vec::new(),
            kernels: None,
            graphs: true,
            overlap: true,
            carveout: None,
            batch_invariant: false,
            expert_slots: EXPERT_SLOTS,
            // Enough for the largest step of any model, at a few TFLOP/s.
            patience: Duration::from_secs(600),
            exchange: ExchangePolicy::Auto,
            thresholds: None,
            measured_most: usize::MAX,
            nccl_lib: None,
        }
    }
}

/// Whether this build has kernels for GPUs.
#[must_use]
pub fn has_kernels() -> bool {
    fatbin::built_with_kernels()
}

/// A GPU ready for launches; see the module.
pub(super) struct Device {
    kernels: Vec<Kernel>,
    pub(super) matmul: Result<Matmul, KernelError>,
    pub(super) late: DelayedWrites,
    pub(super) stream: Stream,
    pub(super) context: Rc<Context>,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("matmul", &self.matmul).finish_non_exhaustive()
    }
}

impl Device {
    pub(super) fn new(options: &CudaOptions) -> Result<Self, KernelError> {
        let driver = Driver::load(&options.folders)?;
        let context = Context::new(driver, options.ordinal)?;
        let modules = load_modules(&context, options)?;
        let kernels =
            (0..NAMES.len()).map(|i| find(&modules, Entry(i))).collect::<Result<_, _>>()?;
        let stream = Stream::new(&context, options.patience)?;
        // Products of few rows do without cuBLASLt; those of many are slow without it, but correct.
        let matmul = Matmul::new(&context, &options.folders);
        let device = Self { kernels, matmul, late: DelayedWrites::default(), stream, context };
        if options.carveout.is_some() {
            device.set_carveout(options.carveout)?;
        }
        Ok(device)
    }

    /// Switches programmatic dependent launch, if it was enabled when the kernels were loaded.
    pub(super) fn set_overlap(&mut self, overlap: bool) {
        for kernel in &mut self.kernels {
            kernel.set_overlap(overlap);
        }
    }

    /// See [`CudaOptions::carveout`]. Excludes prefill attention, which runs one or two blocks per
    /// multiprocessor and needs its shared memory.
    pub(super) fn set_carveout(&self, percent: Option<u8>) -> Result<(), KernelError> {
        let others =
            self.kernels.iter().filter(|kernel| !kernel.name().starts_with("tutti_prefill_"));
        others.into_iter().try_for_each(|kernel| kernel.set_carveout(percent))
    }

    /// Whether this GPU has enough shared memory for a launch: those of capability 8.6, 8.9 and
    /// 12.0 have 99 KiB, less than prefill attention needs for heads of 256.
    pub(super) fn has_room(&self, call: &Call) -> bool {
        self.kernels.get(call.entry.0).is_some_and(|kernel| kernel.has_room(call.launch.shared))
    }

    /// Launches a kernel, in stream order.
    ///
    /// # Safety
    /// Every pointer among the arguments must point to as much memory as `kernels.h` requires,
    /// alive until the stream has passed the launch.
    pub(super) unsafe fn launch(&self, call: Call) -> Result<(), KernelError> {
        self.deliver()?;
        // SAFETY: this function's contract.
        unsafe { self.launch_now(call) }
    }

    /// As [`Device::launch`], before what is to arrive late.
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn launch_now(&self, mut call: Call) -> Result<(), KernelError> {
        let kernel = self.kernels.get(call.entry.0).ok_or_else(|| KernelError::Shape {
            op: "launch",
            message: format!("there is no kernel {}", call.entry.0),
        })?;
        // SAFETY: the arguments match the header, which the tests of `launch` compare; the pointers
        // are valid by this function's contract.
        unsafe { kernel.launch(&self.stream, call.launch, &mut call.args) }
    }

    /// Queues a product of many rows; returns false, with nothing queued, if the library cannot.
    ///
    /// # Safety
    /// As [`Matmul::run`].
    pub(super) unsafe fn multiply(
        &mut self,
        product: &Product,
        x: DevicePtr,
        w: DevicePtr,
        out: DevicePtr,
    ) -> Result<bool, KernelError> {
        self.deliver()?;
        match &mut self.matmul {
            // SAFETY: this function's contract.
            Ok(matmul) => unsafe { matmul.run(&self.stream, product, x, w, out) },
            Err(error) => Err(KernelError::Unsupported(error.to_string())),
        }
    }
}

fn load_modules(
    context: &Rc<Context>,
    options: &CudaOptions,
) -> Result<Vec<Rc<Module>>, KernelError> {
    let overlap = options.overlap;
    let Some(folder) = &options.kernels else {
        if fatbin::IMAGES.is_empty() {
            return Module::load(context, &[], overlap).map(|module| vec![Rc::new(module)]);
        }
        let load = |(_, image): &(&str, &[u8])| Module::load(context, image, overlap).map(Rc::new);
        return fatbin::IMAGES.iter().map(load).collect();
    };
    let at = |what: &str| KernelError::Unsupported(format!("{}: {what}", folder.display()));
    let entries = std::fs::read_dir(folder).map_err(|error| at(&error.to_string()))?;
    let mut files: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "fatbin"))
        .collect();
    files.sort();
    if files.is_empty() {
        return Err(at("no .fatbin file is there"));
    }
    let load = |file: &PathBuf| {
        let image = std::fs::read(file).map_err(|error| at(&error.to_string()))?;
        Module::load(context, &image, overlap).map(Rc::new)
    };
    files.iter().map(load).collect()
}

/// Looks through all modules. One that has it and cannot load it is no reason to look further: what
/// the others say would hide why.
fn find(modules: &[Rc<Module>], entry: Entry) -> Result<Kernel, KernelError> {
    for module in modules {
        if let Some(kernel) = module.kernel(entry.name(), entry.shared())? {
            return Ok(kernel);
        }
    }
    Err(failure::driver(NOT_FOUND, entry.name(), 0))
}

/// Device memory that is reused from call to call and grows when a call needs more than any before.
#[derive(Debug)]
pub(super) struct Scratch {
    memory: Option<DeviceMemory>,
    what: &'static str,
}

impl Scratch {
    pub(super) fn new(what: &'static str) -> Self {
        Self { memory: None, what }
    }

    /// Returns at least `bytes` with undefined contents, and whether the address is new. Waits for
    /// the stream before the memory moves.
    pub(super) fn get(
        &mut self,
        device: &Device,
        bytes: usize,
    ) -> Result<(DevicePtr, bool), KernelError> {
        if let Some(memory) = &self.memory
            && memory.bytes() >= bytes
        {
            return Ok((memory.ptr(), false));
        }
        device.stream.synchronize()?;
        // Frees the old memory first: there may not be enough for both.
        self.memory = None;
        let bytes = bytes.max(1).next_multiple_of(256);
        let memory = DeviceMemory::zeroed(&device.context, &device.stream, bytes, self.what)?;
        let ptr = memory.ptr();
        self.memory = Some(memory);
        Ok((ptr, true))
    }

    /// Frees it; nothing may use it any more.
    pub(super) fn free(&mut self) {
        self.memory = None;
    }

    /// Sets every byte of it, if there is any.
    pub(super) fn fill(&self, device: &Device, byte: u8) -> Result<(), KernelError> {
        self.memory.as_ref().map_or(Ok(()), |memory| memory.fill(&device.stream, byte))
    }

    /// Copies `words` to the beginning; [`Scratch::get`] must have made it large enough.
    pub(super) fn upload(&self, device: &Device, words: &[u32]) -> Result<(), KernelError> {
        match &self.memory {
            Some(memory) => memory.upload(&device.stream, 0, words),
            None => Err(KernelError::Shape { op: "upload", message: "no memory yet".to_owned() }),
        }
    }
}
