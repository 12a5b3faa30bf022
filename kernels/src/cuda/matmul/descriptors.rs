//! cuBLASLt's descriptors of a product, and of the preferences for an algorithm.
use super::{Product, check};
use crate::cuda::calls::cublaslt as sys;
use crate::error::KernelError;

/// `CUBLAS_OP_T`, which the bindings of cuBLASLt alone lack.
const TRANSPOSED: i32 = 1;

/// cuBLASLt's descriptors of a product.
pub(super) struct Shape {
    pub(super) product: sys::cublasLtMatmulDesc_t,
    pub(super) w: sys::cublasLtMatrixLayout_t,
    pub(super) x: sys::cublasLtMatrixLayout_t,
    pub(super) out: sys::cublasLtMatrixLayout_t,
}

impl Shape {
    pub(super) fn new(product: &Product) -> Result<Self, KernelError> {
        let mut shape = Self {
            product: std::ptr::null_mut(),
            w: std::ptr::null_mut(),
            x: std::ptr::null_mut(),
            out: std::ptr::null_mut(),
        };
        let what = "describe a matrix product";
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let (bf16, f32) = (sys::cudaDataType_t::CUDA_R_16BF, sys::cudaDataType_t::CUDA_R_32F);
        // SAFETY: writes a handle, destroyed when `shape` is dropped.
        let status = unsafe { sys::cublasLtMatmulDescCreate(&raw mut shape.product, compute, f32) };
        check(status, what)?;
        let transposed = TRANSPOSED;
        let attribute = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
        // SAFETY: the attribute has the given size.
        let status = unsafe {
            sys::cublasLtMatmulDescSetAttribute(
                shape.product,
                attribute,
                (&raw const transposed).cast(),
                size_of_val(&transposed),
            )
        };
        check(status, what)?;
        let Product { rows, n, k, x_stride, w_stride, out_stride } = *product;
        let layouts = [
            (&mut shape.w, bf16, k, n, w_stride),
            (&mut shape.x, bf16, k, rows, x_stride),
            (&mut shape.out, f32, n, rows, out_stride),
        ];
        for (layout, element, rows, columns, stride) in layouts {
            let (rows, columns, stride) = (u64::from(rows), u64::from(columns), i64::from(stride));
            // SAFETY: writes a handle, destroyed when `shape` is dropped.
            let status =
                unsafe { sys::cublasLtMatrixLayoutCreate(layout, element, rows, columns, stride) };
            check(status, what)?;
        }
        Ok(shape)
    }
}

impl Drop for Shape {
    fn drop(&mut self) {
        for layout in [self.w, self.x, self.out] {
            if !layout.is_null() {
                // SAFETY: made in `new`.
                let _ = unsafe { sys::cublasLtMatrixLayoutDestroy(layout) };
            }
        }
        if !self.product.is_null() {
            // SAFETY: made in `new`.
            let _ = unsafe { sys::cublasLtMatmulDescDestroy(self.product) };
        }
    }
}

pub(super) struct Preference(pub(super) sys::cublasLtMatmulPreference_t);

impl Preference {
    pub(super) fn new(workspace: usize, alignment: u32) -> Result<Self, KernelError> {
        let what = "choose an algorithm for a matrix product";
        let mut made = Self(std::ptr::null_mut());
        // SAFETY: writes a handle, destroyed when `made` is dropped.
        check(unsafe { sys::cublasLtMatmulPreferenceCreate(&raw mut made.0) }, what)?;
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        made.set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace)?;
        for operand in [
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            made.set(operand, &alignment)?;
        }
        Ok(made)
    }

    /// Sets an attribute whose type is `T`.
    fn set<T>(
        &self,
        attribute: sys::cublasLtMatmulPreferenceAttributes_t,
        value: &T,
    ) -> Result<(), KernelError> {
        let value = (&raw const *value).cast();
        // SAFETY: the attribute has the given size.
        let status = unsafe {
            sys::cublasLtMatmulPreferenceSetAttribute(self.0, attribute, value, size_of::<T>())
        };
        check(status, "choose an algorithm for a matrix product")
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: made in `new`.
            let _ = unsafe { sys::cublasLtMatmulPreferenceDestroy(self.0) };
        }
    }
}
