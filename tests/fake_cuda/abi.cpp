// Checks the structs and numbers of the stand-ins for the driver and cuBLASLt against NVIDIA's own
// headers, at compile time only; `interface` does the same for functions. `kernels/cuda/check`
// compiles it with nvcc's cuda.h, and with cublasLt.h if it has that.
#include <cuda.h>

#include <cstddef>

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
static_assert(offsetof(CUlaunchAttributeValue, programmaticStreamSerializationAllowed) == 0 &&
                  sizeof(CUlaunchAttributeValue) == 64 &&
                  sizeof(CUlaunchAttributeValue{}.programmaticStreamSerializationAllowed) == 4,
              "value of the attribute");
static_assert(sizeof(CUstreamCaptureMode) == 4 && sizeof(CUdevice_attribute) == 4 &&
                  sizeof(CUfunction_attribute) == 4 && sizeof(CUlaunchAttributeID) == 4,
              "enumerations are passed as ints");

static_assert(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION == 6, "attribute of a launch");
static_assert(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT == 16 &&
                  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR == 75 &&
                  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR == 76 &&
                  CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN == 97 &&
                  CU_DEVICE_ATTRIBUTE_MPS_ENABLED == 133,
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
static_assert(sizeof(cublasLtMatmulAlgo_t) == 64 && sizeof(cublasLtMatmulHeuristicResult_t) == 96 &&
                  offsetof(cublasLtMatmulHeuristicResult_t, algo) == 0 &&
                  offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize) == 64 &&
                  offsetof(cublasLtMatmulHeuristicResult_t, state) == 72,
              "algorithms");
static_assert(CUBLAS_STATUS_SUCCESS == 0 && CUBLAS_STATUS_NOT_INITIALIZED == 1 &&
                  CUBLAS_STATUS_ALLOC_FAILED == 3 && CUBLAS_STATUS_INVALID_VALUE == 7 &&
                  CUBLAS_STATUS_ARCH_MISMATCH == 8 && CUBLAS_STATUS_EXECUTION_FAILED == 13 &&
                  CUBLAS_STATUS_INTERNAL_ERROR == 14 && CUBLAS_STATUS_NOT_SUPPORTED == 15,
              "statuses of a product");
#endif
