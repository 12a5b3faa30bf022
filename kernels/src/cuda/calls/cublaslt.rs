//! cuBLASLt's functions. `tests/fake_cuda/abi.cpp` compares them with cublasLt.h.
#![allow(non_snake_case, reason = "NVIDIA's names")]
use std::ffi::{c_int, c_void};

pub(in crate::cuda) use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t,
    cublasLtMatmulDescAttributes_t, cublasLtMatmulHeuristicResult_t, cublasLtMatmulPreference_t,
    cublasLtMatmulPreferenceAttributes_t, cublasLtMatrixLayout_t, cudaDataType_t, cudaStream_t,
};

use super::{Status, functions};

functions! {
    // `CUBLAS_STATUS_NOT_INITIALIZED`
    absent: 1u8;
    fn cublasLtCreate(handle: *mut cublasLtHandle_t) -> Status;
    fn cublasLtDestroy(handle: cublasLtHandle_t) -> Status;
    fn cublasLtGetVersion() -> usize;
    fn cublasLtMatmul(
        handle: cublasLtHandle_t,
        description: cublasLtMatmulDesc_t,
        alpha: *const c_void,
        a: *const c_void,
        a_layout: cublasLtMatrixLayout_t,
        b: *const c_void,
        b_layout: cublasLtMatrixLayout_t,
        beta: *const c_void,
        c: *const c_void,
        c_layout: cublasLtMatrixLayout_t,
        d: *mut c_void,
        d_layout: cublasLtMatrixLayout_t,
        algorithm: *const cublasLtMatmulAlgo_t,
        workspace: *mut c_void,
        workspace_bytes: usize,
        stream: cudaStream_t,
    ) -> Status;
    fn cublasLtMatmulAlgoGetHeuristic(
        handle: cublasLtHandle_t,
        description: cublasLtMatmulDesc_t,
        a_layout: cublasLtMatrixLayout_t,
        b_layout: cublasLtMatrixLayout_t,
        c_layout: cublasLtMatrixLayout_t,
        d_layout: cublasLtMatrixLayout_t,
        preference: cublasLtMatmulPreference_t,
        room: c_int,
        results: *mut cublasLtMatmulHeuristicResult_t,
        count: *mut c_int,
    ) -> Status;
    fn cublasLtMatmulDescCreate(
        description: *mut cublasLtMatmulDesc_t,
        compute: cublasComputeType_t,
        scale: cudaDataType_t,
    ) -> Status;
    fn cublasLtMatmulDescDestroy(description: cublasLtMatmulDesc_t) -> Status;
    fn cublasLtMatmulDescSetAttribute(
        description: cublasLtMatmulDesc_t,
        attribute: cublasLtMatmulDescAttributes_t,
        value: *const c_void,
        bytes: usize,
    ) -> Status;
    fn cublasLtMatmulPreferenceCreate(preference: *mut cublasLtMatmulPreference_t) -> Status;
    fn cublasLtMatmulPreferenceDestroy(preference: cublasLtMatmulPreference_t) -> Status;
    fn cublasLtMatmulPreferenceSetAttribute(
        preference: cublasLtMatmulPreference_t,
        attribute: cublasLtMatmulPreferenceAttributes_t,
        value: *const c_void,
        bytes: usize,
    ) -> Status;
    fn cublasLtMatrixLayoutCreate(
        layout: *mut cublasLtMatrixLayout_t,
        element: cudaDataType_t,
        rows: u64,
        columns: u64,
        stride: i64,
    ) -> Status;
    fn cublasLtMatrixLayoutDestroy(layout: cublasLtMatrixLayout_t) -> Status;
}
