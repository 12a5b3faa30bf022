// Checks NCCL's interface in `kernels/src/cuda/nccl/library.rs` against NCCL's own header, at
// compile time only. `kernels/cuda/check` compiles it if it has nccl.h, which comes in a package of
// 196 MB (`check --headers`). Done by hand with 2.22.3, 2.28.9, 2.30.7 and 2.32.3:
//
//   c++ -std=c++17 -fsyntax-only -I .../nvidia/nccl/include -I .../nvidia/cu13/include abi.cpp
#include <nccl.h>

#include <climits>
#include <cstddef>
#include <type_traits>

static_assert(NCCL_VERSION_CODE >= 22203, "the oldest that is taken");
static_assert(sizeof(ncclUniqueId) == 128 && alignof(ncclUniqueId) == 1, "ncclUniqueId");
static_assert(sizeof(ncclResult_t) == 4 && sizeof(ncclDataType_t) == 4 && sizeof(ncclRedOp_t) == 4,
              "enumerations are ints");
static_assert(ncclSuccess == 0 && ncclUnhandledCudaError == 1 && ncclSystemError == 2 &&
                  ncclInternalError == 3 && ncclInvalidArgument == 4 && ncclInvalidUsage == 5 &&
                  ncclRemoteError == 6 && ncclInProgress == 7,
              "statuses");
static_assert(ncclInt8 == 0 && ncclFloat32 == 7 && ncclSum == 0, "types and operations");

// The first 48 bytes. NCCL ignores fields of later versions if the caller states an older one.
static_assert(offsetof(ncclConfig_t, size) == 0 && offsetof(ncclConfig_t, magic) == 8 &&
                  offsetof(ncclConfig_t, version) == 12 && offsetof(ncclConfig_t, blocking) == 16 &&
                  offsetof(ncclConfig_t, cgaClusterSize) == 20 &&
                  offsetof(ncclConfig_t, minCTAs) == 24 && offsetof(ncclConfig_t, maxCTAs) == 28 &&
                  offsetof(ncclConfig_t, netName) == 32 && offsetof(ncclConfig_t, splitShare) == 40 &&
                  sizeof(ncclConfig_t) >= 48,
              "ncclConfig_t");
static_assert(NCCL_CONFIG_UNDEF_INT == INT_MIN, "unset");
constexpr ncclConfig_t unset = NCCL_CONFIG_INITIALIZER;
static_assert(unset.magic == 0xcafebeef && unset.netName == nullptr, "NCCL_CONFIG_INITIALIZER");

#define SIGNATURE(name, result, ...)                                                               \
    static_assert(std::is_same<decltype(&name), result (*)(__VA_ARGS__)>::value, #name)
SIGNATURE(ncclGetVersion, ncclResult_t, int*);
SIGNATURE(ncclGetUniqueId, ncclResult_t, ncclUniqueId*);
SIGNATURE(ncclCommInitRankConfig, ncclResult_t, ncclComm_t*, int, ncclUniqueId, int, ncclConfig_t*);
SIGNATURE(ncclCommGetAsyncError, ncclResult_t, ncclComm_t, ncclResult_t*);
SIGNATURE(ncclCommAbort, ncclResult_t, ncclComm_t);
SIGNATURE(ncclGetLastError, const char*, ncclComm_t);
SIGNATURE(ncclAllReduce, ncclResult_t, const void*, void*, size_t, ncclDataType_t, ncclRedOp_t,
          ncclComm_t, cudaStream_t);
SIGNATURE(ncclAllGather, ncclResult_t, const void*, void*, size_t, ncclDataType_t, ncclComm_t,
          cudaStream_t);
