//! GPU measurements through NVML, NVIDIA's management library: loaded at run time, never required.
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
    /// Product name.
    pub name: String,
    /// Its UUID, as NVML prints it.
    pub uuid: String,
    /// Its total memory, in bytes.
    pub memory_bytes: u64,
}

/// The host's GPUs.
pub(super) struct Gpus {
    nvml: Result<Nvml, String>,
    host: String,
    handles: Vec<Option<Handles>>,
}

/// Series of the GPU that is at an index now.
struct Handles {
    info: Gauge,
    utilization: Gauge,
    memory_used: Gauge,
    memory: Gauge,
    temperature: Gauge,
    power: Gauge,
}

fn load(library: Option<&Path>) -> Result<Nvml, NvmlError> {
    match library {
        Some(path) => Nvml::builder().lib_path(path.as_os_str()).init(),
        // The library's name on systems without development packages.
        None => Nvml::builder().lib_path("libnvidia-ml.so.1".as_ref()).init(),
    }
}

/// Returns the NVLink island of the GPU with this UUID: all GPUs of the host that NVLink connects
/// to it, directly, through other GPUs or through a switch. The island is named after its lowest
/// UUID, so that all its GPUs give the same answer. `None` for a GPU without NVLink connections, or
/// if NVML cannot tell.
#[must_use]
pub fn nvlink_island(library: Option<&Path>, uuid: &str) -> Option<String> {
    let nvml = load(library).ok()?;
    let devices: Vec<_> = (0..nvml.device_count().ok()?)
        .filter_map(|index| nvml.device_by_index(index).ok())
        .filter_map(|device| Some((device.uuid().ok()?, device)))
        .collect();
    let own = devices.iter().position(|(found, _)| found == uuid)?;
    let joined = |a: usize, b: usize| {
        let status = devices[a].1.p2p_status(&devices[b].1, P2pCapabilitiesIndex::NvLink);
        matches!(status, Ok(P2pStatus::Ok))
    };
    let island = island(own, devices.len(), joined);
    if island.len() < 2 {
        return None;
    }
    island.into_iter().map(|index| devices[index].0.clone()).min()
}

/// Returns the indices below `count` that are connected to `own`, directly or through others,
/// including `own`.
fn island(own: usize, count: usize, joined: impl Fn(usize, usize) -> bool) -> Vec<usize> {
    let mut found = vec![own];
    let mut next = 0;
    while let Some(&from) = found.get(next) {
        let new = |to: &usize| !found.contains(to) && joined(from, *to);
        let new: Vec<usize> = (0..count).filter(new).collect();
        found.extend(new);
        next += 1;
    }
    found
}

impl Gpus {
    pub(super) fn new(library: Option<&Path>, host: &str) -> Self {
        let nvml = load(library).map_err(|error| error.to_string());
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
        // One that is not counted any more is looked for, too, and not found.
        let count = nvml.device_count().unwrap_or(0) as usize;
        self.handles.resize_with(count.max(self.handles.len()), || None);
        for (index, held) in (0u32..).zip(&mut self.handles) {
            let Ok(device) = nvml.device_by_index(index) else {
                // The GPU has fallen off the bus, or the driver is gone: nothing that was said of
                // it is valid any longer, and another GPU may come in its place.
                if let Some(lost) = held.take() {
                    for gauge in lost.all() {
                        stats.remove(gauge);
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
                // A process that sees one GPU of several, as in a container, calls it 0, and so
                // does the next one on the same host: only the UUID tells them apart.
                let labels = [index.as_str(), self.host.as_str(), uuid.as_str()];
                Handles {
                    info,
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
            // A query that a device does not answer leaves only its own series absent.
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
    fn all(&self) -> [Gauge; 6] {
        let Self { info, utilization, memory_used, memory, temperature, power } = *self;
        [info, utilization, memory_used, memory, temperature, power]
    }
}

#[cfg(test)]
mod tests {
    use super::island;

    #[test]
    fn an_island_is_all_that_is_joined_directly_or_over_others() {
        let links = [(0, 3), (3, 4), (1, 2)];
        let joined = |a, b| links.contains(&(a, b)) || links.contains(&(b, a));
        let of = |own| {
            let mut found = island(own, 6, joined);
            found.sort_unstable();
            found
        };
        for own in [0, 3, 4] {
            assert_eq!(of(own), [0, 3, 4]);
        }
        assert_eq!((of(1), of(2), of(5)), (vec![1, 2], vec![1, 2], vec![5]));
    }
}
