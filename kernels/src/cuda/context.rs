//! GPUs as the driver knows them: which ones exist, their properties, and this thread's context on
//! one of them.
use std::cell::{Cell, RefCell};
use std::ffi::{CStr, c_char, c_int};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use super::calls::{Status, driver as sys};
use super::failure;
use super::group::GroupSlot;
use super::held::HeldGpu;
use super::libraries::{self, CudaLibrary, LibraryError};
use crate::error::KernelError;

/// Minimum driver: the CUDA version whose API the embedded kernels were built for, 13.0.
pub const DRIVER_MIN: u32 = 13_000;
/// Minimum architecture that the embedded kernels have an image for.
pub const CAPABILITY_MIN: (u32, u32) = (8, 0);

/// Turns a status into a result.
pub(super) fn check(status: Status, what: &'static str) -> Result<(), KernelError> {
    check_bytes(status, what, 0)
}

/// As [`check`], for an allocation of `bytes`.
pub(super) fn check_bytes(
    status: Status,
    what: &'static str,
    bytes: u64,
) -> Result<(), KernelError> {
    match status {
        0 => Ok(()),
        code => Err(failure::driver(code, what, bytes)),
    }
}

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its number among the visible GPUs.
    pub ordinal: u32,
    /// Its name, such as `NVIDIA H200`.
    pub name: String,
    /// Its UUID, such as `GPU-01234567-89ab-cdef-0123-456789abcdef`.
    pub uuid: String,
    /// The UUID as bytes.
    pub uuid_bytes: [u8; 16],
    /// Its PCI address, such as `0000:17:00.0`.
    pub pci: String,
    /// Its compute capability, such as (9, 0).
    pub capability: (u32, u32),
    /// Number of streaming multiprocessors.
    pub multiprocessors: u32,
    /// Maximum shared memory of a thread block, in bytes.
    pub shared_memory: u32,
    /// Total memory in bytes.
    pub memory_total: u64,
}

/// Proof that the driver's library is loaded, complete and initialised; required for calling the
/// driver.
#[derive(Clone, Copy, Debug)]
pub struct Driver {
    version: u32,
}

impl Driver {
    /// Loads and initialises the driver; searches `folders` before it asks the system's loader.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`], in one line: no driver, too old, or no GPU visible.
    pub fn load(folders: &[PathBuf]) -> Result<Self, KernelError> {
        let unusable = |missing: LibraryError| KernelError::Unsupported(missing.to_string());
        libraries::find(CudaLibrary::Driver, folders).map_err(unusable)?;
        let mut version: c_int = 0;
        // SAFETY: writes one int; may be called before cuInit.
        let status = unsafe { sys::cuDriverGetVersion(&raw mut version) };
        check(status, "ask for the driver's version")?;
        let version = u32::try_from(version).unwrap_or(0);
        if version < DRIVER_MIN {
            return Err(KernelError::Unsupported(format!(
                "the NVIDIA driver supports CUDA {}, but this program needs CUDA {} or later: \
                 update the driver",
                version_text(version),
                version_text(DRIVER_MIN)
            )));
        }
        // SAFETY: the library is loaded; may be called any number of times.
        check(unsafe { sys::cuInit(0) }, "initialise the driver")?;
        Ok(Self { version })
    }

    /// CUDA version of the driver: 13000 is 13.0.
    #[must_use]
    pub fn version(self) -> u32 {
        self.version
    }

    /// Number of visible GPUs.
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn count(self) -> Result<u32, KernelError> {
        let mut count: c_int = 0;
        // SAFETY: the driver is initialised; writes one int.
        check(unsafe { sys::cuDeviceGetCount(&raw mut count) }, "count the GPUs")?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    /// Properties of a GPU, without creating a context on it.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] if there is no GPU of this number.
    pub fn device(self, ordinal: u32) -> Result<DeviceInfo, KernelError> {
        let device = self.handle(ordinal)?;
        let mut name: [c_char; 128] = [0; 128];
        // SAFETY: writes at most the length given, with a closing zero.
        let status = unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), 128, device) };
        check(status, "ask for the GPU's name")?;
        let mut pci: [c_char; 32] = [0; 32];
        // SAFETY: as above.
        let status = unsafe { sys::cuDeviceGetPCIBusId(pci.as_mut_ptr(), 32, device) };
        check(status, "ask for the GPU's PCI address")?;
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: writes 16 bytes.
        let status = unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, device) };
        check(status, "ask for the GPU's UUID")?;
        let mut memory_total = 0usize;
        // SAFETY: writes one word.
        let status = unsafe { sys::cuDeviceTotalMem_v2(&raw mut memory_total, device) };
        check(status, "ask for the GPU's memory")?;
        let uuid = uuid.bytes.map(|byte| byte as u8);
        use sys::CUdevice_attribute as Attribute;
        let attribute = |attribute| self.attribute(device, attribute);
        Ok(DeviceInfo {
            ordinal,
            name: text(&name),
            uuid: uuid_text(uuid),
            uuid_bytes: uuid,
            pci: text(&pci),
            capability: (
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_memory: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )?,
            memory_total: memory_total as u64,
        })
    }

    /// Whether one GPU can access the memory of another.
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn can_access(self, from: u32, to: u32) -> Result<bool, KernelError> {
        let (from, to) = (self.handle(from)?, self.handle(to)?);
        let mut can: c_int = 0;
        // SAFETY: both are devices; writes one int.
        let status = unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, from, to) };
        check(status, "ask whether GPUs reach each other")?;
        Ok(can != 0)
    }

    /// Whether NVIDIA's multi-process service lets kernels of other processes run on a GPU at the
    /// same time as this one's.
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn has_mps(self, ordinal: u32) -> Result<bool, KernelError> {
        let device = self.handle(ordinal)?;
        let enabled = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MPS_ENABLED;
        Ok(self.attribute(device, enabled)? != 0)
    }

    fn handle(self, ordinal: u32) -> Result<sys::CUdevice, KernelError> {
        let count = self.count()?;
        if ordinal >= count {
            return Err(KernelError::Unsupported(format!(
                "there is no GPU {ordinal}: {count} visible, numbered from 0"
            )));
        }
        let mut device = 0;
        // SAFETY: the driver is initialised; writes one int.
        let status = unsafe { sys::cuDeviceGet(&raw mut device, ordinal as c_int) };
        check(status, "look for the GPU")?;
        Ok(device)
    }

    fn attribute(
        self,
        device: sys::CUdevice,
        attribute: sys::CUdevice_attribute,
    ) -> Result<u32, KernelError> {
        let mut value: c_int = 0;
        // SAFETY: writes one int.
        let status = unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, device) };
        check(status, "ask what the GPU can do")?;
        Ok(u32::try_from(value).unwrap_or(0))
    }
}

/// One claim to a GPU's primary context. While there is one in this process, what was made in the
/// context stays valid; any thread may drop it.
#[derive(Debug)]
pub(super) struct RetainedContext {
    device: sys::CUdevice,
    raw: sys::CUcontext,
    /// What all contexts on this GPU share: if its work never ends, anything that waits for it
    /// would not return either.
    held: Arc<HeldGpu>,
}

// SAFETY: the driver lets any thread use and release a context; the pointer is never changed.
unsafe impl Send for RetainedContext {}

impl RetainedContext {
    fn new(device: sys::CUdevice) -> Result<Self, KernelError> {
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver is initialised; released when `Self` is dropped.
        let status = unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, device) };
        check(status, "make a context on the GPU")?;
        Ok(Self { device, raw: context, held: HeldGpu::retained(device) })
    }

    /// Makes it this thread's context. If the driver refuses, later calls say so.
    pub(super) fn set_current(&self) {
        // SAFETY: the context is retained; any context may be current on a thread.
        let _ = unsafe { sys::cuCtxSetCurrent(self.raw) };
    }
}

impl Drop for RetainedContext {
    fn drop(&mut self) {
        if !self.held.is_usable() {
            return;
        }
        // SAFETY: retained in `new`; whatever uses the context holds a claim of its own.
        let status = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
        // A GPU that has failed keeps its context, and nobody knows what it still does.
        if check(status, "give the GPU's context back").is_ok() {
            self.held.released();
        }
    }
}

/// The primary context of a GPU, current on the thread that created it. Everything created from it
/// is used only on that thread.
#[derive(Debug)]
pub struct Context {
    info: DeviceInfo,
    driver: Driver,
    /// Group of ranks that exchange data on their devices; everything that waits for the device
    /// polls it, too.
    pub(super) group: GroupSlot,
    retained: RetainedContext,
    /// The longest wait so far for work that needs no other rank.
    longest_work: Cell<Duration>,
    /// Why something of a group that was left is still there.
    left_behind: RefCell<Option<String>>,
}

impl Context {
    /// Makes the context current on this thread.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`]: no such GPU, too old, or busy; [`KernelError::OutOfMemory`].
    pub fn new(driver: Driver, ordinal: u32) -> Result<Rc<Self>, KernelError> {
        let info = driver.device(ordinal)?;
        if info.capability < CAPABILITY_MIN {
            let ((major, minor), (needed, _)) = (info.capability, CAPABILITY_MIN);
            return Err(KernelError::Unsupported(format!(
                "GPU {ordinal} ({}) has compute capability {major}.{minor}, this program needs \
                 {needed}.0 or later",
                info.name
            )));
        }
        let retained = RetainedContext::new(driver.handle(ordinal)?)?;
        let raw = retained.raw;
        let made = Rc::new(Self {
            info,
            driver,
            group: GroupSlot::default(),
            retained,
            longest_work: Cell::new(Duration::ZERO),
            left_behind: RefCell::default(),
        });
        // SAFETY: the context was just retained.
        check(unsafe { sys::cuCtxSetCurrent(raw) }, "use the GPU's context")?;
        Ok(made)
    }

    /// Properties of the GPU.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// The driver.
    #[must_use]
    pub fn driver(&self) -> Driver {
        self.driver
    }

    /// The context once more, for another thread, which may use it longer than this one does.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    pub(super) fn retain(&self) -> Result<RetainedContext, KernelError> {
        RetainedContext::new(self.retained.device)
    }

    /// Records that the GPU's work does not end, for this reason. From now on nothing of any
    /// context on it is returned to the driver, which would wait for that work first: the process
    /// has to end.
    pub(super) fn hangs(&self, reason: String) -> KernelError {
        self.retained.held.hangs();
        KernelError::Device(reason)
    }

    /// Notes why something of a group that was left is still there.
    pub(super) fn leave_behind(&self, reason: String) {
        *self.left_behind.borrow_mut() = Some(reason);
    }

    /// Returns what [`Context::leave_behind`] noted last, once.
    pub(super) fn take_left_behind(&self) -> Option<String> {
        self.left_behind.borrow_mut().take()
    }

    /// Notes how long a wait for work was that needs no other rank.
    pub(super) fn note_work(&self, waited: Duration) {
        self.longest_work.set(waited.max(self.longest_work.get()));
    }

    /// How long the own work of the steps in flight may take: twice the longest such wait, since
    /// there can be two. The largest steps have run in the profile, without other ranks.
    pub(super) fn own_work(&self) -> Duration {
        self.longest_work.get().saturating_mul(2)
    }

    /// Reports errors of the group, and aborts it if a wait has taken so long that it must be for
    /// other ranks, for longer than they are given.
    pub(super) fn check_group(&self, waited: Duration) -> Result<(), KernelError> {
        self.group.check(waited.saturating_sub(self.own_work()))
    }

    /// Whether resources may be returned to the driver.
    pub(super) fn is_usable(&self) -> bool {
        self.retained.held.is_usable()
    }

    /// Free and total memory in bytes.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    pub fn memory(&self) -> Result<(u64, u64), KernelError> {
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: a context is current; writes two words.
        let status = unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) };
        check(status, "ask for the GPU's free memory")?;
        Ok((free as u64, total as u64))
    }
}

/// Formats a CUDA version: `13.0` for 13000.
#[must_use]
pub fn version_text(version: u32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

fn text(buffer: &[c_char]) -> String {
    let bytes: Vec<u8> = buffer.iter().map(|byte| *byte as u8).collect();
    CStr::from_bytes_until_nul(&bytes).map_or_else(
        |_| String::from_utf8_lossy(&bytes).into_owned(),
        |text| text.to_string_lossy().into_owned(),
    )
}

/// Formats a UUID as `nvidia-smi -L` does.
fn uuid_text(bytes: [u8; 16]) -> String {
    let mut text = String::from("GPU-");
    for (i, byte) in bytes.iter().enumerate() {
        if [4, 6, 8, 10].contains(&i) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts() {
        assert_eq!(version_text(13_000), "13.0");
        assert_eq!(version_text(12_080), "12.8");
        let bytes: [u8; 16] = std::array::from_fn(|i| i as u8 * 17);
        assert_eq!(uuid_text(bytes), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }
}
