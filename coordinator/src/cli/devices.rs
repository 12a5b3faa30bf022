//! What there is to compute on: `tutti devices`, and the choice that `--device` makes.
use serde_json::{Value, json};
use worker::device::{CpuDevice, CudaDevice, DeviceChoice, Isa, Survey, bytes_text, survey};

use super::CliError;
use super::options::{ComputeArgs, CudaArgs, Device, DevicesArgs};
use super::output::print_line;
use super::work::cores;

/// Prints what there is.
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
    survey(&args.cuda_lib_dir, args.cuda_kernels.as_deref(), args.nccl_lib.as_deref())
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

/// What one worker computes on; for `auto` one log line says why.
pub(crate) fn choose(args: &ComputeArgs, threads: u32) -> Result<DeviceChoice, CliError> {
    let cpu = DeviceChoice::Cpu(CpuDevice { threads: threads.max(1) as usize });
    let (found, ordinal) = match args.device {
        Device::Cpu => return Ok(cpu),
        Device::Auto => {
            let found = look(&args.cuda);
            let Some(ordinal) = found.roomiest() else {
                let reason = found.unusable().unwrap_or_default();
                tracing::info!(reason, "no usable GPU; computing on the CPU");
                return Ok(cpu);
            };
            (found, ordinal)
        }
        Device::Cuda(wanted) => {
            let found = look(&args.cuda);
            let ordinal = wanted.or_else(|| found.roomiest()).unwrap_or(0);
            if let Some(reason) = found.refusal(ordinal) {
                return Err(CliError::NoDevice(format!("--device cuda: {reason}")));
            }
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
    Ok(DeviceChoice::Cuda(CudaDevice { options, memory_utilization, memory_free, uuid }))
}

/// What each of `count` workers of this host computes on, as values of `--device`; and a line for
/// people.
pub(crate) fn share_out(args: &ComputeArgs, count: u32) -> Result<(Vec<String>, String), CliError> {
    let cpu = |why: String| Ok((vec!["cpu".to_owned()], why));
    if args.device == Device::Cpu {
        return cpu("CPU".to_owned());
    }
    let found = look(&args.cuda);
    let usable: Vec<u32> = match args.device {
        Device::Cuda(Some(ordinal)) => match found.refusal(ordinal) {
            Some(reason) => return Err(CliError::NoDevice(format!("--device cuda: {reason}"))),
            None => vec![ordinal],
        },
        _ => found.usable().map(|device| device.info.ordinal).collect(),
    };
    let short = match found.unusable() {
        Some(reason) => Some(reason),
        None if (usable.len() as u64) < u64::from(count) => Some(format!(
            "{} usable GPU(s) for {count} workers: for the GPU say --workers {} and a \
             --tensor-parallel that divides it",
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
            Ok((devices, format!("GPU ({})", names.join(", "))))
        }
        (Some(reason), Device::Auto) => {
            tracing::info!(reason, "computing on the CPU");
            cpu("CPU".to_owned())
        }
        (Some(reason), _) => Err(CliError::NoDevice(format!("--device cuda: {reason}"))),
    }
}
