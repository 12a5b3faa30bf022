//! The embedded kernels on a GPU: looked up by name, launched with checked arguments.
use std::ffi::{CString, c_void};
use std::fmt;
use std::rc::Rc;

use super::calls::driver as sys;
use super::context::{Context, check};
use super::memory::DevicePtr;
use super::stream::Stream;
use crate::error::KernelError;

/// Arguments of a kernel, each starting at a word of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Args {
    words: Vec<u64>,
    /// First word and size in bytes of each argument.
    places: Vec<(usize, usize)>,
}

impl Args {
    /// Creates an empty list of arguments.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn word(mut self, word: u64, bytes: usize) -> Self {
        self.places.push((self.words.len(), bytes));
        self.words.push(word);
        self
    }

    /// A pointer.
    #[must_use]
    pub fn ptr(self, ptr: DevicePtr) -> Self {
        self.word(ptr.0, 8)
    }

    /// A pointer that can be null.
    #[must_use]
    pub fn maybe(self, ptr: Option<DevicePtr>) -> Self {
        self.ptr(ptr.unwrap_or_default())
    }

    /// An `int`.
    #[must_use]
    pub fn i32(self, value: i32) -> Self {
        self.word(u64::from(value.cast_unsigned()), 4)
    }

    /// A size that a kernel takes as `int`; larger sizes never reach a launch.
    #[must_use]
    pub fn int(self, value: usize) -> Self {
        self.i32(i32::try_from(value).unwrap_or(i32::MAX))
    }

    /// An `unsigned`.
    #[must_use]
    pub fn u32(self, value: u32) -> Self {
        self.word(u64::from(value), 4)
    }

    /// An `unsigned long long`, or a `size_t`.
    #[must_use]
    pub fn u64(self, value: u64) -> Self {
        self.word(value, 8)
    }

    /// A `float`.
    #[must_use]
    pub fn f32(self, value: f32) -> Self {
        self.word(u64::from(value.to_bits()), 4)
    }

    /// Size of each argument in bytes, in order.
    #[must_use]
    pub fn sizes(&self) -> Vec<usize> {
        self.places.iter().map(|(_, bytes)| *bytes).collect()
    }
}

/// Blocks, threads per block and dynamic shared memory of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Number of blocks.
    pub grid: (u32, u32, u32),
    /// Number of threads per block.
    pub block: (u32, u32, u32),
    /// Dynamic shared memory per block, in bytes.
    pub shared: u32,
}

/// Launch attribute that lets a kernel begin early (programmatic dependent launch).
fn overlap() -> sys::CUlaunchAttribute {
    sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID_enum::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    }
}

/// A loaded image of embedded kernels.
pub struct Module {
    raw: sys::CUmodule,
    overlaps: bool,
    context: Rc<Context>,
    _image: Vec<u64>,
}

impl Module {
    /// Loads a fatbin or cubin. With `overlap`, its kernels can begin before earlier ones are
    /// complete, if the GPU supports it: all of this project's kernels wait for their inputs.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] if it has no image for this GPU.
    pub fn load(context: &Rc<Context>, image: &[u8], overlap: bool) -> Result<Self, KernelError> {
        if image.is_empty() {
            return Err(KernelError::Unsupported(
                "this program was built without CUDA kernels: build it where nvcc is found".into(),
            ));
        }
        // Embedded bytes have any alignment; the driver reads words.
        let mut aligned = vec![0u64; image.len().div_ceil(8)];
        for (word, bytes) in aligned.iter_mut().zip(image.chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_le_bytes(whole);
        }
        let mut raw = std::ptr::null_mut();
        // SAFETY: the image is a whole fatbin, which carries its own size; it lives as long as the
        // module.
        let status = unsafe { sys::cuModuleLoadData(&raw mut raw, aligned.as_ptr().cast()) };
        check(status, "load the kernels")?;
        let overlaps = overlap && context.info().capability >= (9, 0);
        Ok(Self { raw, overlaps, context: context.clone(), _image: aligned })
    }

    /// A kernel by its name, allowed to use `shared` bytes of dynamic shared memory, or 48 KiB
    /// where the GPU does not have so much; none where another module may have it.
    ///
    /// # Errors
    /// [`KernelError`] naming it, when it is there and cannot be loaded.
    pub fn kernel(
        self: &Rc<Self>,
        name: &'static str,
        shared: u32,
    ) -> Result<Option<Kernel>, KernelError> {
        let wanted = CString::new(name).unwrap_or_default();
        let mut raw = std::ptr::null_mut();
        // SAFETY: the module is loaded; the name ends with a zero.
        let status = unsafe { sys::cuModuleGetFunction(&raw mut raw, self.raw, wanted.as_ptr()) };
        if status == sys::NOT_FOUND {
            return Ok(None);
        }
        check(status, name)?;
        // Loaded now instead of at its first launch: before the driver loads a kernel it may wait
        // for everything that runs, including a kernel that waits for another rank, and it cannot
        // load within a capture.
        // SAFETY: the function belongs to the loaded module.
        check(unsafe { sys::cuFuncLoad(raw) }, name)?;
        let has_room = shared <= self.context.info().shared_memory;
        let shared_max = if has_room { shared.max(48 << 10) } else { 48 << 10 };
        let overlaps = self.overlaps;
        let kernel = Kernel { raw, name, shared_max, overlaps, module: self.clone() };
        if shared_max > 48 << 10 {
            use sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let attribute = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function belongs to the loaded module.
            let status = unsafe {
                sys::cuFuncSetAttribute(raw, attribute, i32::try_from(shared).unwrap_or(i32::MAX))
            };
            check(status, name)?;
        }
        Ok(Some(kernel))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if !self.context.is_usable() {
            return;
        }
        // SAFETY: loaded in `load`; its kernels hold it alive.
        let _ = unsafe { sys::cuModuleUnload(self.raw) };
    }
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Module")
    }
}

/// One kernel.
#[derive(Clone)]
pub struct Kernel {
    raw: sys::CUfunction,
    name: &'static str,
    shared_max: u32,
    /// Begins before earlier kernels are complete, and waits for them itself.
    overlaps: bool,
    module: Rc<Module>,
}

impl Kernel {
    /// Switches early launch on, if the module allows it, or off.
    pub(super) fn set_overlap(&mut self, overlap: bool) {
        self.overlaps = overlap && self.module.overlaps;
    }

    /// Requests this percentage of the L1 cache as shared memory whenever the kernel runs, or
    /// leaves it to the driver. Kernels with different settings never run at the same time.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    pub(super) fn set_carveout(&self, percent: Option<u8>) -> Result<(), KernelError> {
        use sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        let attribute = CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        let value = percent.map_or(-1, |percent| i32::from(percent.min(100)));
        // SAFETY: the function belongs to the loaded module.
        let status = unsafe { sys::cuFuncSetAttribute(self.raw, attribute, value) };
        check(status, self.name)
    }

    /// Whether it can be launched with this much dynamic shared memory.
    #[must_use]
    pub fn has_room(&self, shared: u32) -> bool {
        shared <= self.shared_max
    }

    /// Name of the kernel.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Launches the kernel, in stream order.
    ///
    /// # Safety
    /// `args` must match the kernel's signature in number, type and order. Every pointer among them
    /// must point to as much memory as the kernel accesses, alive until the stream has passed the
    /// launch.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        launch: Launch,
        args: &mut Args,
    ) -> Result<(), KernelError> {
        let Launch { grid, block, shared } = launch;
        if !self.has_room(shared) || grid.0 == 0 || grid.1 == 0 || grid.2 == 0 {
            let message = format!("{} cannot be launched that way: {launch:?}", self.name);
            return Err(KernelError::Shape { op: self.name, message });
        }
        let words = args.words.as_mut_ptr();
        let mut params: Vec<*mut c_void> =
            args.places.iter().map(|(word, _)| words.wrapping_add(*word).cast()).collect();
        let mut attribute = overlap();
        let config = sys::CUlaunchConfig {
            gridDimX: grid.0,
            gridDimY: grid.1,
            gridDimZ: grid.2,
            blockDimX: block.0,
            blockDimY: block.1,
            blockDimZ: block.2,
            sharedMemBytes: shared,
            hStream: stream.raw(),
            attrs: &raw mut attribute,
            numAttrs: u32::from(self.overlaps),
        };
        // SAFETY: the arguments match the kernel, by this function's contract; the driver copies
        // them and the settings before it returns.
        let status = unsafe {
            sys::cuLaunchKernelEx(
                &raw const config,
                self.raw,
                params.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        check(status, self.name).map_err(|error| stream.failed(error))
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let _ = &self.module;
        write!(f, "Kernel({})", self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_have_the_sizes_of_their_types() {
        let args = Args::new()
            .ptr(DevicePtr(0x1234))
            .maybe(None)
            .int(7)
            .u32(u32::MAX)
            .u64(1 << 40)
            .f32(1.5);
        assert_eq!(args.sizes(), [8, 8, 4, 4, 8, 4]);
        assert_eq!(args.words[2], 7);
        assert_eq!(args.words[3], u64::from(u32::MAX));
        assert_eq!(args.words[5], u64::from(1.5f32.to_bits()));
        assert_eq!(Args::new().i32(-1).words[0] as u32 as i32, -1);
    }
}
