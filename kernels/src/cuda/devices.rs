//! Survey of CUDA on this host, and why it cannot be used if it cannot: for people.
use std::cmp::Reverse;
use std::path::{Path, PathBuf};

use super::choice::Version;
use super::context::{CAPABILITY_MIN, Context, DeviceInfo, Driver, version_text};
use super::device::{CudaOptions, has_kernels};
use super::libraries::{self, CudaLibrary, LibraryError};
use super::nccl;
use crate::error::KernelError;

/// A GPU that was found.
#[derive(Clone, Debug, PartialEq)]
pub struct FoundDevice {
    /// Its properties.
    pub info: DeviceInfo,
    /// Free memory in bytes, or why no context can be created on it; 0 if that was not tried.
    pub memory_free: Result<u64, String>,
}

impl FoundDevice {
    /// Why it cannot be used, in one line.
    #[must_use]
    pub fn unusable(&self) -> Option<String> {
        let DeviceInfo { ordinal, name, capability: (major, minor), .. } = &self.info;
        if (*major, *minor) < CAPABILITY_MIN {
            return Some(format!(
                "GPU {ordinal} ({name}) has compute capability {major}.{minor}, this program needs \
                 {}.{} or later",
                CAPABILITY_MIN.0, CAPABILITY_MIN.1
            ));
        }
        self.memory_free.as_ref().err().map(|reason| format!("GPU {ordinal} ({name}): {reason}"))
    }
}

/// What was found.
#[derive(Clone, Debug, PartialEq)]
pub struct Survey {
    /// The driver's CUDA version (13000 is 13.0), or why there is no driver.
    pub driver: Result<u32, String>,
    /// The GPUs.
    pub devices: Vec<FoundDevice>,
    /// Whether cuBLASLt is available, or why not. Prompts are slow without it.
    pub cublas_lt: Result<(), String>,
    /// NCCL's version (22809 is 2.28.9), or why there is no NCCL.
    pub nccl: Result<u32, String>,
    /// Whether there are kernels: embedded, or in the given folder.
    pub has_kernels: bool,
}

/// Surveys everything. Creates and releases a context on each GPU. Never panics.
#[must_use]
pub fn survey(folders: &[PathBuf], kernels: Option<&Path>, nccl: Option<&Path>) -> Survey {
    survey_for(folders, kernels, nccl, None)
}

/// As [`survey`], but creates a context only on GPU `only`, if given: contexts on the others would
/// take time and memory in each of the workers that start at the same time.
#[must_use]
pub fn survey_for(
    folders: &[PathBuf],
    kernels: Option<&Path>,
    nccl: Option<&Path>,
    only: Option<u32>,
) -> Survey {
    let words = |error: KernelError| error.to_string();
    let missing = |missing: LibraryError| missing.to_string();
    let driver = Driver::load(folders).map_err(words);
    let mut devices = Vec::new();
    let mut failed = None;
    if let Ok(driver) = driver {
        match driver.count() {
            Ok(count) => devices.extend((0..count).filter_map(|i| find(driver, i, only))),
            Err(error) => failed = Some(error.to_string()),
        }
    }
    Survey {
        driver: match failed {
            Some(reason) => Err(reason),
            None => driver.map(Driver::version),
        },
        devices,
        cublas_lt: libraries::find(CudaLibrary::CublasLt, folders).map_err(missing),
        nccl: nccl::library::version(folders, nccl).map_err(missing),
        has_kernels: kernels.is_some() || has_kernels(),
    }
}

fn find(driver: Driver, ordinal: u32, only: Option<u32>) -> Option<FoundDevice> {
    let info = driver.device(ordinal).ok()?;
    let free = || -> Result<u64, KernelError> {
        if only.is_some_and(|only| only != ordinal) {
            return Ok(0);
        }
        Ok(Context::new(driver, ordinal)?.memory()?.0)
    };
    Some(FoundDevice { memory_free: free().map_err(|error| error.to_string()), info })
}

impl Survey {
    /// Why CUDA cannot be used here at all, in one line; `None` if it can.
    #[must_use]
    pub fn unusable(&self) -> Option<String> {
        if let Err(reason) = &self.driver {
            return Some(reason.clone());
        }
        if self.devices.is_empty() {
            return Some("the driver shows no GPU".to_owned());
        }
        if self.usable().next().is_none() {
            return self.devices.first().and_then(FoundDevice::unusable);
        }
        (!self.has_kernels).then(|| {
            "this program was built without CUDA kernels: build it with TUTTI_CUDA=1 where nvcc is \
             found"
                .to_owned()
        })
    }

    /// The GPUs that can be used, provided that there are kernels for them.
    pub fn usable(&self) -> impl Iterator<Item = &FoundDevice> {
        self.devices.iter().filter(|device| device.unusable().is_none())
    }

    /// The usable GPUs, in order of decreasing free memory.
    pub fn by_room(&self) -> impl Iterator<Item = u32> + use<> {
        let mut usable: Vec<_> = match self.unusable() {
            None => self.usable().collect(),
            Some(_) => Vec::new(),
        };
        // Stable: ties stay in the driver's order.
        usable.sort_by_key(|device| Reverse(*device.memory_free.as_ref().unwrap_or(&0)));
        let ordinals: Vec<u32> = usable.iter().map(|device| device.info.ordinal).collect();
        ordinals.into_iter()
    }

    /// The usable GPU with the most free memory.
    #[must_use]
    pub fn roomiest(&self) -> Option<u32> {
        self.by_room().next()
    }

    /// Why GPU `ordinal` cannot be used, in one line; `None` if it can.
    #[must_use]
    pub fn refusal(&self, ordinal: u32) -> Option<String> {
        if let Some(device) = self.devices.iter().find(|device| device.info.ordinal == ordinal) {
            return device.unusable().or_else(|| self.unusable());
        }
        Some(self.unusable().unwrap_or_else(|| {
            format!("there is no GPU {ordinal}: {} visible, numbered from 0", self.devices.len())
        }))
    }

    /// Options for a GPU that was found.
    #[must_use]
    pub fn options(ordinal: u32, folders: &[PathBuf], kernels: Option<&Path>) -> CudaOptions {
        CudaOptions {
            ordinal,
            folders: folders.to_vec(),
            kernels: kernels.map(Path::to_owned),
            ..CudaOptions::default()
        }
    }

    /// NCCL's version such as `2.28.9`, or why there is no NCCL.
    #[must_use]
    pub fn nccl_text(&self) -> String {
        match &self.nccl {
            Ok(version) => Version(*version).to_string(),
            Err(reason) => reason.clone(),
        }
    }

    /// The driver's version such as `CUDA 13.0`, or why there is no driver.
    #[must_use]
    pub fn driver_text(&self) -> String {
        match &self.driver {
            Ok(version) => format!("CUDA {}", version_text(*version)),
            Err(reason) => reason.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(ordinal: u32, capability: (u32, u32), free: Result<u64, String>) -> FoundDevice {
        let info = DeviceInfo {
            ordinal,
            name: "GPU".to_owned(),
            uuid: String::new(),
            uuid_bytes: [0; 16],
            pci: String::new(),
            capability,
            multiprocessors: 1,
            shared_memory: 1,
            memory_total: 1 << 30,
        };
        FoundDevice { info, memory_free: free }
    }

    fn found(devices: Vec<FoundDevice>) -> Survey {
        Survey {
            driver: Ok(13_000),
            devices,
            cublas_lt: Ok(()),
            nccl: Ok(22_809),
            has_kernels: true,
        }
    }

    #[test]
    fn one_line_says_why_not() {
        let busy = || device(0, (9, 0), Err("busy".to_owned()));
        let cases = [
            (Survey { driver: Err("no driver".into()), ..found(vec![]) }, "no driver"),
            (found(vec![]), "no GPU"),
            (found(vec![device(0, (7, 5), Ok(1))]), "compute capability 7.5"),
            (found(vec![busy()]), "busy"),
            (
                Survey { has_kernels: false, ..found(vec![device(0, (9, 0), Ok(1))]) },
                "without CUDA",
            ),
        ];
        for (survey, words) in cases {
            let line = survey.unusable().unwrap();
            assert!(line.contains(words) && !line.contains('\n'), "{line}");
            assert_eq!(survey.roomiest(), None);
            assert!(survey.refusal(0).is_some());
        }
    }

    #[test]
    fn the_roomiest_usable_one_is_chosen() {
        let survey = found(vec![
            device(0, (9, 0), Ok(5)),
            device(1, (7, 0), Ok(100)),
            device(2, (8, 0), Ok(9)),
            device(3, (8, 0), Ok(9)),
            device(4, (9, 0), Err("busy".to_owned())),
        ]);
        assert_eq!(survey.unusable(), None);
        assert_eq!(survey.by_room().collect::<Vec<_>>(), [2, 3, 0]);
        assert_eq!(survey.roomiest(), Some(2));
        assert_eq!(survey.usable().count(), 3);
        assert!(survey.refusal(4).unwrap().contains("busy"));
        assert!(survey.refusal(9).unwrap().contains("no GPU 9: 5 visible"));
        assert_eq!(survey.refusal(0), None);
        assert_eq!(survey.nccl_text(), "2.28.9");
    }
}
