//! GPUs by NVML, NVIDIA's management library: found at run time, never needed.
use std::path::Path;

use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::{P2pCapabilitiesIndex, P2pStatus, TemperatureSensor};
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

/// The least of those that `own` is linked with, by way of others, too; none when it is alone.
fn domain_of(own: usize, count: usize, is_linked: impl Fn(usize, usize) -> bool) -> Option<u32> {
    let mut reached = vec![false; count];
    *reached.get_mut(own)? = true;
    let mut frontier = vec![own];
    while let Some(from) = frontier.pop() {
        for (to, reached) in reached.iter_mut().enumerate() {
            if !*reached && (is_linked(from, to) || is_linked(to, from)) {
                *reached = true;
                frontier.push(to);
            }
        }
    }
    let linked = reached.iter().filter(|reached| **reached).count() > 1;
    let least = reached.iter().position(|reached| *reached)?;
    if linked { u32::try_from(least).ok() } else { None }
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

    /// The part of the host that NVLink links a GPU's memory with, named by the least index of a GPU
    /// in it; none where there is no other.
    pub(super) fn nvlink_domain(&self, uuid: &str) -> Option<u32> {
        let nvml = self.nvml.as_ref().ok()?;
        let count = nvml.device_count().ok()?;
        let devices: Vec<_> = (0..count).map(|index| nvml.device_by_index(index).ok()).collect();
        let own = devices.iter().position(|device| {
            device.as_ref().is_some_and(|device| device.uuid().is_ok_and(|found| found == uuid))
        })?;
        let is_linked = |a: usize, b: usize| match (&devices[a], &devices[b]) {
            (Some(a), Some(b)) => {
                matches!(a.p2p_status(b, P2pCapabilitiesIndex::NvLink), Ok(P2pStatus::Ok))
            }
            _ => false,
        };
        domain_of(own, devices.len(), is_linked)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linked_gpus_are_a_domain_named_by_its_least() {
        // Pairs 0-2 and 1-3, a chain 4-5-6, and 7 alone.
        let links = [(0, 2), (1, 3), (4, 5), (5, 6)];
        let is_linked = |a: usize, b: usize| links.contains(&(a, b));
        let domains: Vec<_> = (0..8).map(|own| domain_of(own, 8, is_linked)).collect();
        let named = [0, 1, 0, 1, 4, 4, 4].map(Some);
        assert_eq!(domains[..7], named);
        assert_eq!(domains[7], None);
        assert_eq!(domain_of(9, 8, is_linked), None);
    }
}
