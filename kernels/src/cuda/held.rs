//! What this process knows of its GPUs, whichever thread or context found it out: how often
//! its context is claimed here, and whether its work does not end.
//!
//! The driver has one context per GPU and process, so whoever frees anything in it waits for
//! everybody's work.
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// A GPU's number, as the driver's handles count them.
pub(super) type DeviceNumber = i32;

/// One GPU, as all contexts on it in this process see it. Never forgotten: a GPU that hangs does so
/// for as long as the process lives.
#[derive(Debug, Default)]
pub(super) struct HeldGpu {
    hangs: AtomicBool,
    contexts: AtomicUsize,
}

static GPUS: Mutex<BTreeMap<DeviceNumber, Arc<HeldGpu>>> = Mutex::new(BTreeMap::new());

impl HeldGpu {
    /// Notes one more context on a GPU.
    pub(super) fn retained(device: DeviceNumber) -> Arc<Self> {
        let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
        let gpu = gpus.entry(device).or_default().clone();
        gpu.contexts.fetch_add(1, Ordering::AcqRel);
        gpu
    }

    /// Notes that the driver took a context back.
    pub(super) fn released(&self) {
        self.contexts.fetch_sub(1, Ordering::AcqRel);
    }

    /// Notes that the GPU's work does not end.
    pub(super) fn hangs(&self) {
        self.hangs.store(true, Ordering::Release);
    }

    /// Whether resources may be returned to the driver.
    pub(super) fn is_usable(&self) -> bool {
        !self.hangs.load(Ordering::Acquire)
    }

    fn is_held(&self) -> bool {
        self.contexts.load(Ordering::Acquire) > 0
    }
}

/// Whether a GPU may still compute for this process: a context has not been given back, because a
/// thread still uses it, or because the GPU hangs or has failed. The driver's own exit handler
/// could then wait for ever.
#[must_use]
pub fn is_gpu_held() -> bool {
    let gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    gpus.values().any(|gpu| gpu.is_held())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers that no driver gives out: other tests of this process may have GPUs.
    #[test]
    fn a_hang_is_known_to_every_context_of_its_gpu_and_to_no_other() {
        let (one, other) = (HeldGpu::retained(-1), HeldGpu::retained(-2));
        let same = HeldGpu::retained(-1);
        assert!(one.is_usable() && same.is_usable());
        one.hangs();
        assert!(!one.is_usable() && !same.is_usable() && other.is_usable());
        assert!(!HeldGpu::retained(-1).is_usable(), "nor does a new context mend it");
    }

    #[test]
    fn a_gpu_is_held_until_its_last_context_is_given_back() {
        let (first, second) = (HeldGpu::retained(-3), HeldGpu::retained(-3));
        first.released();
        assert!(second.is_held() && is_gpu_held());
        second.released();
        assert!(!second.is_held());
    }
}
