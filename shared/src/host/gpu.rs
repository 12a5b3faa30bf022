//! GPUs by NVML, NVIDIA's management library: found at run time, never needed.
use std::path::Path;

use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::error::NvmlError;

use crate::metrics::catalogue::{
    GPU_INFO, GPU_MEMORY, GPU_MEMORY_USED, GPU_POWER, GPU_TEMPERATURE, GPU_UTILIZATION,
};
use crate::metrics::{Gauge, LocalStats};

/// A GPU of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuDevice {
    /// Its index on the host.
    pub index: u32,
    /// The product's name.
    pub name: String,
    /// Its own identity.
    pub uuid: String,
    /// Its memory.
    pub memory_bytes: u64,
}

/// The host's GPUs.
pub(super) struct Gpus {
    nvml: Result<Nvml, String>,
    host: String,
    handles: Vec<Option<Handles>>,
}

struct Handles {
    utilization: Gauge,
    memory_used: Gauge,
    memory: Gauge,
    temperature: Gauge,
    power: Gauge,
}

impl Gpus {
    pub(super) fn new(library: Option<&Path>, host: &str) -> Self {
        let nvml = match library {
            Some(path) => Nvml::builder().lib_path(path.as_os_str()).init(),
            // The loader's name on systems without development packages.
            None => Nvml::builder().lib_path("libnvidia-ml.so.1".as_ref()).init(),
        };
        let nvml = nvml.map_err(|error| error.to_string());
        if let Err(problem) = &nvml {
            if library.is_some() {
                tracing::warn!(%problem, "NVML cannot be used (--nvml-lib): GPUs are not measured");
            } else {
                tracing::debug!(%problem, "no NVML: GPUs are not measured");
            }
        }
        Self { nvml, host: host.to_owned(), handles: Vec::new() }
    }

    pub(super) fn problem(&self) -> Option<&str> {
        self.nvml.as_ref().err().map(String::as_str)
    }

    pub(super) fn devices(&self) -> Vec<GpuDevice> {
        let Ok(nvml) = &self.nvml else { return Vec::new() };
        let describe = |index| -> Result<GpuDevice, NvmlError> {
            let device = nvml.device_by_index(index)?;
            Ok(GpuDevice {
                index,
                name: device.name()?,
                uuid: device.uuid()?,
                memory_bytes: device.memory_info()?.total,
            })
        };
        (0..nvml.device_count().unwrap_or(0)).filter_map(|index| describe(index).ok()).collect()
    }

    pub(super) fn sample(&mut self, stats: &mut LocalStats) {
        let Ok(nvml) = &self.nvml else { return };
        let count = nvml.device_count().unwrap_or(0);
        self.handles.resize_with(count as usize, || None);
        for (index, held) in (0u32..).zip(&mut self.handles) {
            let Ok(device) = nvml.device_by_index(index) else {
                // Fallen off the bus: what was last seen of it is not true any more.
                if let Some(held) = held {
                    for gauge in held.all() {
                        stats.clear(gauge);
                    }
                }
                continue;
            };
            let held = held.get_or_insert_with(|| {
                let index = index.to_string();
                let name = device.name().unwrap_or_else(|_| "unknown".to_owned());
                let uuid = device.uuid().unwrap_or_else(|_| "unknown".to_owned());
                let info = stats.gauge(GPU_INFO, [&index, &self.host, &name, &uuid]);
                stats.set(info, 1.0);
                let labels = [index.as_str(), self.host.as_str()];
                Handles {
                    utilization: stats.gauge(GPU_UTILIZATION, labels),
                    memory_used: stats.gauge(GPU_MEMORY_USED, labels),
                    memory: stats.gauge(GPU_MEMORY, labels),
                    temperature: stats.gauge(GPU_TEMPERATURE, labels),
                    power: stats.gauge(GPU_POWER, labels),
                }
            });
            let memory = device.memory_info();
            let used = memory.as_ref().map(|memory| memory.used as f64).ok();
            let total = memory.map(|memory| memory.total as f64).ok();
            let utilization = device.utilization_rates().map(|rates| f64::from(rates.gpu) / 100.0);
            let celsius = device.temperature(TemperatureSensor::Gpu).map(f64::from);
            let watts = device.power_usage().map(|milliwatts| f64::from(milliwatts) / 1000.0);
            // A question that a device does not answer leaves its own series absent, no other.
            for (gauge, value) in [
                (held.utilization, utilization.ok()),
                (held.memory_used, used),
                (held.memory, total),
                (held.temperature, celsius.ok()),
                (held.power, watts.ok()),
            ] {
                match value {
                    Some(value) => stats.set(gauge, value),
                    None => stats.clear(gauge),
                }
            }
        }
    }
}

impl Handles {
    fn all(&self) -> [Gauge; 5] {
        [self.utilization, self.memory_used, self.memory, self.temperature, self.power]
    }
}
