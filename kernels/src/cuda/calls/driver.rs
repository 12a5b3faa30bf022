//! The driver's functions. `tests/fake_cuda/abi.cpp` compares them with cuda.h.
#![allow(non_snake_case, reason = "NVIDIA's names")]
use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};

pub(in crate::cuda) use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUevent_flags_enum, CUfunction,
    CUfunction_attribute, CUgraph, CUgraphExec, CUipcMem_flags_enum, CUipcMemHandle,
    CUlaunchAttribute, CUlaunchAttributeID_enum, CUlaunchAttributeValue, CUlaunchConfig, CUmodule,
    CUstream, CUstream_flags_enum, CUstreamCaptureMode, CUuuid,
};

use super::{Status, functions};

/// `CUDA_ERROR_NOT_FOUND`
pub(in crate::cuda) const NOT_FOUND: Status = 500;
/// `CUDA_ERROR_NOT_READY`
pub(in crate::cuda) const NOT_READY: Status = 600;

functions! {
    // `CUDA_ERROR_NOT_INITIALIZED`
    absent: 3u8;
    fn cuCtxSetCurrent(context: CUcontext) -> Status;
    fn cuDeviceCanAccessPeer(can: *mut c_int, device: CUdevice, peer: CUdevice) -> Status;
    fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) -> Status;
    fn cuDeviceGetAttribute(
        value: *mut c_int,
        attribute: CUdevice_attribute,
        device: CUdevice,
    ) -> Status;
    fn cuDeviceGetCount(count: *mut c_int) -> Status;
    fn cuDeviceGetName(name: *mut c_char, length: c_int, device: CUdevice) -> Status;
    fn cuDeviceGetPCIBusId(id: *mut c_char, length: c_int, device: CUdevice) -> Status;
    fn cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice) -> Status;
    fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) -> Status;
    fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) -> Status;
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice) -> Status;
    fn cuDriverGetVersion(version: *mut c_int) -> Status;
    fn cuEventCreate(event: *mut CUevent, flags: c_uint) -> Status;
    fn cuEventDestroy_v2(event: CUevent) -> Status;
    fn cuEventElapsedTime_v2(milliseconds: *mut f32, start: CUevent, end: CUevent) -> Status;
    fn cuEventQuery(event: CUevent) -> Status;
    fn cuEventRecord(event: CUevent, stream: CUstream) -> Status;
    fn cuFuncLoad(function: CUfunction) -> Status;
    fn cuFuncSetAttribute(
        function: CUfunction,
        attribute: CUfunction_attribute,
        value: c_int,
    ) -> Status;
    fn cuGraphDestroy(graph: CUgraph) -> Status;
    fn cuGraphExecDestroy(exec: CUgraphExec) -> Status;
    fn cuGraphInstantiateWithFlags(
        exec: *mut CUgraphExec,
        graph: CUgraph,
        flags: c_ulonglong,
    ) -> Status;
    fn cuGraphLaunch(exec: CUgraphExec, stream: CUstream) -> Status;
    fn cuGraphUpload(exec: CUgraphExec, stream: CUstream) -> Status;
    fn cuInit(flags: c_uint) -> Status;
    fn cuIpcCloseMemHandle(at: CUdeviceptr) -> Status;
    fn cuIpcGetMemHandle(handle: *mut CUipcMemHandle, at: CUdeviceptr) -> Status;
    fn cuIpcOpenMemHandle_v2(at: *mut CUdeviceptr, handle: CUipcMemHandle, flags: c_uint) -> Status;
    fn cuLaunchKernelEx(
        config: *const CUlaunchConfig,
        function: CUfunction,
        params: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> Status;
    fn cuMemAllocHost_v2(at: *mut *mut c_void, bytes: usize) -> Status;
    fn cuMemAlloc_v2(at: *mut CUdeviceptr, bytes: usize) -> Status;
    fn cuMemFreeHost(at: *mut c_void) -> Status;
    fn cuMemFree_v2(at: CUdeviceptr) -> Status;
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Status;
    fn cuMemcpyDtoDAsync_v2(
        to: CUdeviceptr,
        from: CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    ) -> Status;
    fn cuMemcpyDtoHAsync_v2(
        to: *mut c_void,
        from: CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    ) -> Status;
    fn cuMemcpyHtoDAsync_v2(
        to: CUdeviceptr,
        from: *const c_void,
        bytes: usize,
        stream: CUstream,
    ) -> Status;
    fn cuMemsetD8Async(to: CUdeviceptr, byte: c_uchar, bytes: usize, stream: CUstream) -> Status;
    fn cuModuleGetFunction(
        function: *mut CUfunction,
        module: CUmodule,
        name: *const c_char,
    ) -> Status;
    fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void) -> Status;
    fn cuModuleUnload(module: CUmodule) -> Status;
    fn cuStreamBeginCapture_v2(stream: CUstream, mode: CUstreamCaptureMode) -> Status;
    fn cuStreamCreate(stream: *mut CUstream, flags: c_uint) -> Status;
    fn cuStreamDestroy_v2(stream: CUstream) -> Status;
    fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) -> Status;
    fn cuStreamQuery(stream: CUstream) -> Status;
}
