//! Devices to compute on: `tutti devices`, and the choice for `--device`.
use std::time::Duration;

use serde_json::{Value, json};
use worker::device::{CpuDevice, CudaDevice, DeviceChoice, Isa, Survey, bytes_text, survey_for};

use super::options::{ComputeArgs, CudaArgs, Device, DevicesArgs, TENSOR_PARALLEL, Workers};
use super::output::print_line;
use super::work::cores;
use super::{CliError, claims};

/// Prints the devices found.
pub(crate) fn run(args: &DevicesArgs) {
    let found = look(&args.cuda);
    if args.json {
        return print_line(&as_json(&found).to_string());
    }
    print_line(&format!("cpu: {} cores, {}", cores(), Isa::detect()));
    for device in &found.devices {
        let info = &device.info;
        let (major, minor) = info.capability;
        let free = match &device.memory_free {
            Ok(bytes) => {
                format!("{} of {} free", bytes_text(*bytes), bytes_text(info.memory_total))
            }
            Err(reason) => reason.clone(),
        };
        print_line(&format!(
            "cuda:{}: {}, {free}, compute capability {major}.{minor}, PCI {}, {}",
            info.ordinal, info.name, info.pci, info.uuid
        ));
    }
    let cublas_lt = found.cublas_lt.as_ref().map_or_else(String::clone, |()| "found".to_owned());
    let lines = [
        ("NVIDIA driver", found.driver_text()),
        ("cuBLASLt", cublas_lt),
        ("NCCL", found.nccl_text()),
    ];
    for (name, text) in lines {
        print_line(&match text.strip_prefix(&format!("no {name}: ")) {
            Some(reason) => format!("{name}: none ({reason})"),
            None => format!("{name}: {text}"),
        });
    }
    let kernels = if found.has_kernels { "yes" } else { "none in this program" };
    print_line(&format!("CUDA kernels: {kernels}"));
    print_line(&match found.unusable() {
        None => format!("CUDA is usable: {} GPU(s)", found.usable().count()),
        Some(reason) => format!("CUDA is not usable here: {reason}"),
    });
}

fn look(args: &CudaArgs) -> Survey {
    look_at(args, None)
}

/// Like [`look`]; if a GPU is named, ignores the memory of others.
fn look_at(args: &CudaArgs, only: Option<u32>) -> Survey {
    let (folders, kernels) = (&args.cuda_lib_dir, args.cuda_kernels.as_deref());
    survey_for(folders, kernels, args.nccl_lib.as_deref(), only)
}

fn as_json(found: &Survey) -> Value {
    let devices = found.devices.iter().map(|device| {
        let info = &device.info;
        json!({
            "ordinal": info.ordinal,
            "name": info.name,
            "uuid": info.uuid,
            "pci": info.pci,
            "compute_capability": format!("{}.{}", info.capability.0, info.capability.1),
            "multiprocessors": info.multiprocessors,
            "memory_total_bytes": info.memory_total,
            "memory_free_bytes": device.memory_free.as_ref().ok(),
            "unusable": device.unusable(),
        })
    });
    json!({
        "cpu": { "cores": cores(), "instructions": Isa::detect().to_string() },
        "cuda": {
            "usable": found.unusable().is_none(),
            "unusable": found.unusable(),
            "driver": found.driver.as_ref().ok(),
            "devices": devices.collect::<Vec<_>>(),
            "cublaslt": found.cublas_lt.is_ok(),
            "cublaslt_missing": found.cublas_lt.as_ref().err(),
            "nccl": found.nccl.as_ref().ok(),
            "nccl_missing": found.nccl.as_ref().err(),
            "kernels": found.has_kernels,
        },
    })
}

/// Chooses a worker's device; for `auto`, logs the reason.
pub(crate) fn choose(args: &ComputeArgs, threads: u32) -> Result<DeviceChoice, CliError> {
    let cpu = DeviceChoice::Cpu(CpuDevice { threads: threads.max(1) as usize });
    let (found, ordinal) = match args.device {
        Device::Cpu => return Ok(cpu),
        Device::Auto => {
            let found = look(&args.cuda);
            let Some(ordinal) = free_gpu(&found) else {
                let reason = found.unusable().unwrap_or_default();
                tracing::info!(reason, "no usable GPU; computing on the CPU");
                return Ok(cpu);
            };
            (found, ordinal)
        }
        Device::Cuda(wanted) => {
            let found = look_at(&args.cuda, wanted);
            let ordinal = wanted.or_else(|| free_gpu(&found)).unwrap_or(0);
            if let Some(reason) = found.refusal(ordinal) {
                return Err(CliError::NoDevice(format!("--device cuda: {reason}")));
            }
            claims::claim(uuid(&found, ordinal));
            (found, ordinal)
        }
    };
    let device = found.devices.iter().find(|device| device.info.ordinal == ordinal);
    let name = device.map_or("", |device| device.info.name.as_str());
    let uuid = device.map_or("", |device| device.info.uuid.as_str()).to_owned();
    let memory_free = device.and_then(|device| device.memory_free.clone().ok()).unwrap_or(0);
    tracing::info!(gpu = ordinal, name, free = bytes_text(memory_free), "computing on a GPU");
    let mut options =
        Survey::options(ordinal, &args.cuda.cuda_lib_dir, args.cuda.cuda_kernels.as_deref());
    options.graphs = !args.no_cuda_graphs;
    options.overlap = !args.no_cuda_overlap;
    options.batch_invariant = args.batch_invariant;
    options.exchange = args.cuda_exchange;
    options.nccl_lib = args.cuda.nccl_lib.clone();
    let memory_utilization = args.gpu_memory_utilization;
    let warmup = Duration::from_secs(args.cuda_warmup);
    let device = CudaDevice { options, memory_utilization, memory_free, warmup, uuid };
    Ok(DeviceChoice::Cuda(device))
}

/// Returns the usable GPU with the most free memory that no other process of this program uses; if
/// all are used, the one with the most memory.
fn free_gpu(found: &Survey) -> Option<u32> {
    let by_room: Vec<(u32, &str)> =
        found.by_room().map(|ordinal| (ordinal, uuid(found, ordinal))).collect();
    let free = by_room.iter().find(|(_, uuid)| claims::claim(uuid));
    if let (None, Some((gpu, _))) = (free, by_room.first()) {
        tracing::warn!(
            gpu,
            "every usable GPU already has a worker on this host; this one shares a GPU"
        );
    }
    free.or(by_room.first()).map(|(ordinal, _)| *ordinal)
}

fn uuid(found: &Survey, ordinal: u32) -> &str {
    let device = found.devices.iter().find(|device| device.info.ordinal == ordinal);
    device.map_or("", |device| device.info.uuid.as_str())
}

/// Number of workers of this host.
pub(crate) fn of_host(args: &ComputeArgs, workers: Workers) -> u32 {
    match (workers, args.device) {
        (Workers::Number(number), _) => number,
        (Workers::All, Device::Cpu | Device::Cuda(Some(_))) => 1,
        (Workers::All, Device::Auto | Device::Cuda(None)) => {
            let found = look(&args.cuda);
            u32::try_from(found.by_room().count()).unwrap_or(1).max(1)
        }
    }
}

/// The workers of this host.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Number of workers.
    pub(crate) workers: u32,
    /// Number of workers per replica.
    pub(crate) degree: u32,
    /// Device of each, as values of `--device`.
    pub(crate) devices: Vec<String>,
    /// Description for people.
    pub(crate) text: String,
}

/// Workers and tensor-parallel degree on a host with so many usable GPUs: as requested; otherwise a
/// worker per GPU if these are enough for a replica, or two on the CPU.
fn sizes(usable: u32, workers: Option<u32>, degree: Option<u32>) -> (u32, u32) {
    let workers = workers.unwrap_or(match degree {
        _ if usable > 0 && usable >= degree.unwrap_or(1) => usable,
        _ => degree.unwrap_or(TENSOR_PARALLEL).max(TENSOR_PARALLEL),
    });
    (workers, degree.unwrap_or_else(|| workers.min(TENSOR_PARALLEL)))
}

/// Assigns devices to the workers of this host: `workers` of them, `degree` per replica, if given.
pub(crate) fn share_out(
    args: &ComputeArgs,
    workers: Option<u32>,
    degree: Option<u32>,
) -> Result<Shared, CliError> {
    let cpu = || {
        let (workers, degree) = sizes(0, workers, degree);
        let (devices, text) = (vec!["cpu".to_owned()], "CPU".to_owned());
        Ok(Shared { workers, degree, devices, text })
    };
    if args.device == Device::Cpu {
        return cpu();
    }
    let found = look(&args.cuda);
    let usable: Vec<u32> = match args.device {
        Device::Cuda(Some(ordinal)) => match found.refusal(ordinal) {
            Some(reason) => return Err(CliError::NoDevice(format!("--device cuda: {reason}"))),
            None => vec![ordinal],
        },
        _ => found.usable().map(|device| device.info.ordinal).collect(),
    };
    let (count, of_each) = sizes(u32::try_from(usable.len()).unwrap_or(0), workers, degree);
    let short = match found.unusable() {
        Some(reason) => Some(reason),
        None if (usable.len() as u64) < u64::from(count) => Some(format!(
            "{} usable GPU(s) for {count} workers: to use the GPU, set --workers {} (and a \
             --tensor-parallel that divides it)",
            usable.len(),
            usable.len()
        )),
        None => None,
    };
    match (short, args.device) {
        (None, _) => {
            let devices: Vec<String> = usable.iter().map(|i| format!("cuda:{i}")).collect();
            let names: Vec<&str> = found
                .usable()
                .filter(|device| usable.contains(&device.info.ordinal))
                .map(|device| device.info.name.as_str())
                .collect();
            let text = format!("GPU ({})", names.join(", "));
            Ok(Shared { workers: count, degree: of_each, devices, text })
        }
        (Some(reason), Device::Auto) => {
            tracing::info!(reason, "computing on the CPU");
            cpu()
        }
        (Some(reason), _) => Err(CliError::NoDevice(format!("--device cuda: {reason}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_are_as_many_as_gpus_where_those_make_a_replica() {
        for (usable, workers, degree, expected) in [
            (0, None, None, (2, 2)),
            (0, Some(1), None, (1, 1)),
            (0, None, Some(4), (4, 4)),
            (0, None, Some(1), (2, 1)),
            (1, None, None, (1, 1)),
            (4, None, None, (4, 2)),
            (8, None, Some(8), (8, 8)),
            (4, Some(2), Some(1), (2, 1)),
            // Too few for a replica: uses the CPU.
            (1, None, Some(2), (2, 2)),
        ] {
            assert_eq!(sizes(usable, workers, degree), expected, "{usable} {workers:?} {degree:?}");
        }
    }
}
