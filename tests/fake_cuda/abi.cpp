// Checks the stand-in's interfaces of the driver and cuBLASLt against NVIDIA's own headers, at
// compile time only. `kernels/cuda/check` compiles it with nvcc's cuda.h; if cublasLt.h is on the
// include path (PyPI: nvidia-cublas), it is checked as well.
#include <cuda.h>

#include <cstddef>
#include <type_traits>

// Functions under the names that are looked up, including `_v2`; cuda.h's macros map to the latest.
template <class Found, class Expected>
constexpr bool same = std::is_same<Found, Expected>::value;
#define SIGNATURE(name, ...) static_assert(same<decltype(&name), CUresult (*)(__VA_ARGS__)>, #name)
SIGNATURE(cuDriverGetVersion, int*);
SIGNATURE(cuInit, unsigned);
SIGNATURE(cuDeviceGetCount, int*);
SIGNATURE(cuDeviceGet, int*, int);
SIGNATURE(cuDeviceGetName, char*, int, int);
SIGNATURE(cuDeviceGetPCIBusId, char*, int, int);
SIGNATURE(cuDeviceGetUuid_v2, CUuuid*, int);
SIGNATURE(cuDeviceTotalMem_v2, size_t*, int);
SIGNATURE(cuDeviceGetAttribute, int*, CUdevice_attribute, int);
SIGNATURE(cuDeviceCanAccessPeer, int*, int, int);
SIGNATURE(cuDevicePrimaryCtxRetain, CUcontext*, int);
SIGNATURE(cuDevicePrimaryCtxRelease_v2, int);
SIGNATURE(cuCtxSetCurrent, CUcontext);
SIGNATURE(cuMemGetInfo_v2, size_t*, size_t*);
SIGNATURE(cuMemAlloc_v2, CUdeviceptr*, size_t);
SIGNATURE(cuMemFree_v2, CUdeviceptr);
SIGNATURE(cuMemAllocHost_v2, void**, size_t);
SIGNATURE(cuMemFreeHost, void*);
SIGNATURE(cuIpcGetMemHandle, CUipcMemHandle*, CUdeviceptr);
SIGNATURE(cuIpcOpenMemHandle_v2, CUdeviceptr*, CUipcMemHandle, unsigned);
SIGNATURE(cuIpcCloseMemHandle, CUdeviceptr);
SIGNATURE(cuMemcpyHtoDAsync_v2, CUdeviceptr, const void*, size_t, CUstream);
SIGNATURE(cuMemcpyDtoHAsync_v2, void*, CUdeviceptr, size_t, CUstream);
SIGNATURE(cuMemcpyDtoDAsync_v2, CUdeviceptr, CUdeviceptr, size_t, CUstream);
SIGNATURE(cuMemsetD8Async, CUdeviceptr, unsigned char, size_t, CUstream);
SIGNATURE(cuStreamCreate, CUstream*, unsigned);
SIGNATURE(cuStreamDestroy_v2, CUstream);
SIGNATURE(cuStreamSynchronize, CUstream);
SIGNATURE(cuStreamQuery, CUstream);
SIGNATURE(cuStreamBeginCapture_v2, CUstream, CUstreamCaptureMode);
SIGNATURE(cuStreamEndCapture, CUstream, CUgraph*);
SIGNATURE(cuGraphInstantiateWithFlags, CUgraphExec*, CUgraph, unsigned long long);
SIGNATURE(cuGraphDestroy, CUgraph);
SIGNATURE(cuGraphExecDestroy, CUgraphExec);
SIGNATURE(cuGraphLaunch, CUgraphExec, CUstream);
SIGNATURE(cuGraphUpload, CUgraphExec, CUstream);
SIGNATURE(cuEventCreate, CUevent*, unsigned);
SIGNATURE(cuEventDestroy_v2, CUevent);
SIGNATURE(cuEventRecord, CUevent, CUstream);
SIGNATURE(cuEventQuery, CUevent);
SIGNATURE(cuEventSynchronize, CUevent);
SIGNATURE(cuEventElapsedTime_v2, float*, CUevent, CUevent);
SIGNATURE(cuModuleLoadData, CUmodule*, const void*);
SIGNATURE(cuModuleUnload, CUmodule);
SIGNATURE(cuModuleGetFunction, CUfunction*, CUmodule, const char*);
SIGNATURE(cuFuncLoad, CUfunction);
SIGNATURE(cuFuncSetAttribute, CUfunction, CUfunction_attribute, int);
SIGNATURE(cuLaunchKernelEx, const CUlaunchConfig*, CUfunction, void**, void**);

static_assert(sizeof(CUdevice) == 4 && sizeof(CUdeviceptr) == 8 && sizeof(CUresult) == 4, "words");
static_assert(sizeof(CUuuid) == 16 && sizeof(CUipcMemHandle) == 64, "identities");

// LaunchConfig of the stand-in.
static_assert(offsetof(CUlaunchConfig, gridDimX) == 0 && offsetof(CUlaunchConfig, blockDimX) == 12 &&
                  offsetof(CUlaunchConfig, sharedMemBytes) == 24 &&
                  offsetof(CUlaunchConfig, hStream) == 32 && offsetof(CUlaunchConfig, attrs) == 40 &&
                  offsetof(CUlaunchConfig, numAttrs) == 48 && sizeof(CUlaunchConfig) == 56,
              "CUlaunchConfig");
static_assert(offsetof(CUlaunchAttribute, id) == 0 && offsetof(CUlaunchAttribute, value) == 8 &&
                  sizeof(CUlaunchAttribute) == 72,
              "CUlaunchAttribute");

static_assert(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION == 6, "attribute of a launch");
static_assert(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT == 16 &&
                  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR == 75 &&
                  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR == 76 &&
                  CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN == 97,
              "attributes of a device");
static_assert(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES == 8 &&
                  CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT == 9,
              "attributes of a function");
static_assert(CU_STREAM_NON_BLOCKING == 1 && CU_EVENT_DEFAULT == 0 && CU_EVENT_DISABLE_TIMING == 2 &&
                  CU_STREAM_CAPTURE_MODE_THREAD_LOCAL == 1 && CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS == 1,
              "flags");
static_assert(CUDA_SUCCESS == 0 && CUDA_ERROR_INVALID_VALUE == 1 && CUDA_ERROR_OUT_OF_MEMORY == 2 &&
                  CUDA_ERROR_NOT_INITIALIZED == 3 && CUDA_ERROR_NO_DEVICE == 100 &&
                  CUDA_ERROR_INVALID_DEVICE == 101 && CUDA_ERROR_INVALID_IMAGE == 200 &&
                  CUDA_ERROR_INVALID_CONTEXT == 201 && CUDA_ERROR_INVALID_HANDLE == 400 &&
                  CUDA_ERROR_NOT_FOUND == 500 && CUDA_ERROR_CAPTURED_EVENT == 907 &&
                  CUDA_ERROR_CONTEXT_IS_DESTROYED == 709 &&
                  CUDA_ERROR_NOT_READY == 600 && CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES == 701 &&
                  CUDA_ERROR_LAUNCH_FAILED == 719 && CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED == 900 &&
                  CUDA_ERROR_STREAM_CAPTURE_INVALIDATED == 901,
              "statuses");

#if __has_include(<cublasLt.h>)
#include <cublasLt.h>
static_assert(CUBLASLT_MATMUL_DESC_TRANSA == 3 && CUBLAS_OP_T == 1, "description of a product");
static_assert(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES == 1 &&
                  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES == 5 &&
                  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES == 8,
              "preferences");
static_assert(CUDA_R_32F == 0 && CUDA_R_16BF == 14 && CUBLAS_COMPUTE_32F == 68, "types");
static_assert(sizeof(cublasLtMatmulAlgo_t) == 64 && sizeof(cublasLtMatmulHeuristicResult_t) == 96,
              "algorithms");
#endif
