//! PURE: error messages for CUDA and cuBLASLt statuses, in one line that says what to do.
use crate::error::KernelError;

/// A status with a specific message: code, NVIDIA's name, what to do about it.
type Known = (u32, &'static str, &'static str);

/// Statuses of the driver (`CUresult`).
const OUT_OF_MEMORY: u32 = 2;
const DRIVER: &[Known] = &[
    (1, "CUDA_ERROR_INVALID_VALUE", "a bug in this program"),
    (3, "CUDA_ERROR_NOT_INITIALIZED", "the driver was not initialised: a bug in this program"),
    (4, "CUDA_ERROR_DEINITIALIZED", "the driver is shutting down"),
    (
        34,
        "CUDA_ERROR_STUB_LIBRARY",
        "libcuda.so is the toolkit's stub, not the driver: put the driver's library first in the loader's path",
    ),
    (36, "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER", "the driver is too old: update it"),
    (
        46,
        "CUDA_ERROR_DEVICE_UNAVAILABLE",
        "the GPU is busy: another process has it for itself (compute mode), or it is being reset",
    ),
    (100, "CUDA_ERROR_NO_DEVICE", "no GPU is visible: look at nvidia-smi and CUDA_VISIBLE_DEVICES"),
    (101, "CUDA_ERROR_INVALID_DEVICE", "there is no GPU with this number"),
    (200, "CUDA_ERROR_INVALID_IMAGE", "the embedded kernels cannot be read by this driver"),
    (201, "CUDA_ERROR_INVALID_CONTEXT", "the context is not current: a bug in this program"),
    (205, "CUDA_ERROR_MAP_FAILED", "memory cannot be mapped into this process"),
    (
        209,
        "CUDA_ERROR_NO_BINARY_FOR_GPU",
        "the embedded kernels have no image for this GPU's architecture",
    ),
    (214, "CUDA_ERROR_ECC_UNCORRECTABLE", "the GPU's memory is faulty: look at nvidia-smi -q"),
    (217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "these GPUs cannot reach each other's memory"),
    (218, "CUDA_ERROR_INVALID_PTX", "the embedded kernels cannot be compiled for this GPU"),
    (
        220,
        "CUDA_ERROR_NVLINK_UNCORRECTABLE",
        "a link between GPUs is faulty: look at nvidia-smi nvlink -e",
    ),
    (
        221,
        "CUDA_ERROR_JIT_COMPILER_NOT_FOUND",
        "the driver does not find its PTX compiler (libnvidia-ptxjitcompiler.so.1)",
    ),
    (
        222,
        "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
        "the embedded kernels are newer than the driver: update it",
    ),
    (
        226,
        "CUDA_ERROR_CONTAINED",
        "a fault of a GPU or a link was contained, at the cost of this process",
    ),
    (304, "CUDA_ERROR_OPERATING_SYSTEM", "a call of the operating system failed"),
    (
        400,
        "CUDA_ERROR_INVALID_HANDLE",
        "a resource of another GPU, or one that is gone, was used: a bug in this program",
    ),
    (
        500,
        "CUDA_ERROR_NOT_FOUND",
        "a kernel that this program needs is not among the embedded ones",
    ),
    (600, "CUDA_ERROR_NOT_READY", "not finished yet"),
    (700, "CUDA_ERROR_ILLEGAL_ADDRESS", "a kernel left its memory"),
    (
        701,
        "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
        "a kernel needs more registers or shared memory than there are",
    ),
    (702, "CUDA_ERROR_LAUNCH_TIMEOUT", "a kernel ran too long for a GPU with a display"),
    (709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "the context is gone"),
    (710, "CUDA_ERROR_ASSERT", "a kernel's own check failed"),
    (714, "CUDA_ERROR_HARDWARE_STACK_ERROR", "a kernel's call stack is broken"),
    (715, "CUDA_ERROR_ILLEGAL_INSTRUCTION", "a kernel is broken for this GPU"),
    (716, "CUDA_ERROR_MISALIGNED_ADDRESS", "a kernel was given a misaligned address"),
    (717, "CUDA_ERROR_INVALID_ADDRESS_SPACE", "a kernel used an address of another kind of memory"),
    (718, "CUDA_ERROR_INVALID_PC", "a kernel jumped out of its program"),
    (719, "CUDA_ERROR_LAUNCH_FAILED", "a kernel failed"),
    (
        720,
        "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE",
        "a cooperative kernel needs more blocks than the GPU runs at once",
    ),
    (721, "CUDA_ERROR_TENSOR_MEMORY_LEAK", "a kernel ended without freeing its tensor memory"),
    (800, "CUDA_ERROR_NOT_PERMITTED", "the driver does not allow it here"),
    (801, "CUDA_ERROR_NOT_SUPPORTED", "this GPU or driver does not support it"),
    (802, "CUDA_ERROR_SYSTEM_NOT_READY", "the driver's services (fabric manager) are not running"),
    (
        803,
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        "the driver's library and its kernel module differ: restart the host or its container",
    ),
    (
        804,
        "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
        "CUDA's compatibility library (cuda-compat) comes before the driver's in the loader's path, and this GPU does not take it",
    ),
    (
        805,
        "CUDA_ERROR_MPS_CONNECTION_FAILED",
        "the MPS daemon does not answer: start it, or unset CUDA_MPS_PIPE_DIRECTORY",
    ),
    (900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "an operation cannot be captured in a graph"),
    (901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "capturing a graph failed"),
    (999, "CUDA_ERROR_UNKNOWN", "the driver gives no reason"),
];

/// Statuses for which a retry on the same device cannot help, because something is missing.
const MISSING: &[u32] = &[34, 36, 46, 100, 101, 200, 209, 218, 221, 222, 500, 802, 803, 804, 805];

/// Statuses of a failed graph capture.
const CAPTURE: std::ops::RangeInclusive<u32> = 900..=908;

/// Turns a `CUresult` other than success into an error. `what` names the operation; `bytes` is the
/// size that it requested.
pub(super) fn driver(code: u32, what: &'static str, bytes: u64) -> KernelError {
    if code == OUT_OF_MEMORY {
        return KernelError::OutOfMemory { what, bytes };
    }
    let line = match DRIVER.iter().find(|(known, ..)| *known == code) {
        Some((_, name, meaning)) => format!("{what}: {name} ({code}): {meaning}"),
        None => format!("{what}: CUDA error {code}"),
    };
    if CAPTURE.contains(&code) {
        // Nothing of the capture has run, and nothing is broken.
        KernelError::Again(line)
    } else if MISSING.contains(&code) {
        KernelError::Unsupported(line)
    } else {
        KernelError::Device(line)
    }
}

/// Turns a `cublasStatus_t` other than success into an error.
pub(super) fn cublas(code: u32, what: &'static str) -> KernelError {
    let (name, meaning) = match code {
        1 => ("CUBLAS_STATUS_NOT_INITIALIZED", "cuBLASLt finds no usable GPU"),
        3 => return KernelError::OutOfMemory { what, bytes: 0 },
        7 => ("CUBLAS_STATUS_INVALID_VALUE", "a bug in this program"),
        8 => ("CUBLAS_STATUS_ARCH_MISMATCH", "this cuBLASLt does not know the GPU"),
        13 => ("CUBLAS_STATUS_EXECUTION_FAILED", "a product failed on the GPU"),
        14 => ("CUBLAS_STATUS_INTERNAL_ERROR", "cuBLASLt gives no reason"),
        15 => ("CUBLAS_STATUS_NOT_SUPPORTED", "cuBLASLt has no algorithm for these sizes"),
        _ => return KernelError::Device(format!("{what}: cuBLASLt status {code}")),
    };
    KernelError::Device(format!("{what}: {name} ({code}): {meaning}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every message is one line that names the operation, NVIDIA's name and the meaning.
    #[test]
    fn one_clear_line_each() {
        for (code, name, meaning) in DRIVER {
            let line = driver(*code, "upload of weights", 0).to_string();
            for word in ["upload of weights", name, meaning] {
                assert!(line.contains(word), "{word} is not in: {line}");
            }
            assert!(!line.contains('\n'));
        }
        assert!(driver(12345, "launch", 0).to_string().contains("CUDA error 12345"));
    }

    #[test]
    fn what_can_be_handled_has_a_kind_of_its_own() {
        let full = driver(OUT_OF_MEMORY, "the KV cache", 7);
        assert!(matches!(full, KernelError::OutOfMemory { what: "the KV cache", bytes: 7 }));
        for code in [46, 100, 209, 500, 803] {
            assert!(matches!(driver(code, "x", 0), KernelError::Unsupported(_)), "{code}");
        }
        assert!(matches!(driver(901, "x", 0), KernelError::Again(_)));
        for code in [700, 719, 999, 12345] {
            assert!(matches!(driver(code, "x", 0), KernelError::Device(_)), "{code}");
        }
        assert!(matches!(cublas(3, "x"), KernelError::OutOfMemory { .. }));
        assert!(cublas(15, "plan").to_string().contains("no algorithm"));
        assert!(cublas(77, "plan").to_string().contains("status 77"));
    }

    #[test]
    fn codes_are_listed_once_and_in_order() {
        assert!(DRIVER.is_sorted_by(|a, b| a.0 < b.0));
        assert!(MISSING.iter().all(|code| DRIVER.iter().any(|known| known.0 == *code)));
    }
}
