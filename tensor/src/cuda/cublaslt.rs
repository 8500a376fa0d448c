//! cuBLASLt's calls: one plan (layouts and an algorithm) for each form of product, and its launch.
#![allow(unsafe_code)]

use std::ffi::c_void;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;

use super::driver::{CUstream, Failure};
use super::product::{Form, Layout, Sums};
use crate::DType;

/// The library's context on one device.
pub(super) struct Handle(sys::cublasLtHandle_t);

// SAFETY: the library's documentation allows a handle to be used by several threads at once.
unsafe impl Send for Handle {}
// SAFETY: as for `Send`.
unsafe impl Sync for Handle {}

/// How a form of product is computed.
pub(super) struct Plan {
    /// Of B, A and C, transposed: the library's matrices lie in columns.
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
    /// Memory that the algorithm works in.
    pub(super) workspace_bytes: usize,
}

// SAFETY: layouts are only read once they are made; they are plain records, bound to no thread.
unsafe impl Send for Plan {}
// SAFETY: as for `Send`.
unsafe impl Sync for Plan {}

/// Where a product's tensors are.
pub(super) struct Addresses {
    pub(super) a: u64,
    pub(super) b: u64,
    pub(super) c: u64,
    /// Null without one.
    pub(super) bias: u64,
    /// Null without one.
    pub(super) before: u64,
    pub(super) workspace: u64,
}

impl From<CublasError> for Failure {
    fn from(CublasError(status): CublasError) -> Failure {
        // The driver's number for memory that is not there; others are only told apart by their text.
        let out_of_memory = status == sys::cublasStatus_t::CUBLAS_STATUS_ALLOC_FAILED;
        Failure { code: if out_of_memory { 2 } else { u32::MAX }, text: format!("cuBLASLt: {status:?}") }
    }
}

impl Handle {
    /// In the context that is current.
    pub(super) fn new() -> Result<Handle, Failure> {
        Ok(Handle(result::create_handle()?))
    }

    /// How products of a form are computed, such as the one of these tensors; none if the library does not do them.
    pub(super) fn plan(
        &self,
        form: &Form,
        at: &Addresses,
        workspace_bytes: usize,
    ) -> Result<Option<Plan>, Failure> {
        let operation = Operation::new(form, at)?;
        let (count, [m, n, k]) = (form.count, form.size);
        let layouts = [
            layout(form.dtype, &form.b, n, k, count)?,
            layout(form.dtype, &form.a, k, m, count)?,
            layout(form.out_dtype, &form.c, n, m, count)?,
        ];
        let [b, a, c] = layouts;
        let wishes = Wishes::new(form, workspace_bytes)?;
        // SAFETY: everything was just made and is destroyed by its owner, or, the layouts, never.
        let found = unsafe { result::get_matmul_algo_heuristic(self.0, operation.0, b, a, c, c, wishes.0) };
        match found {
            Ok(found) => {
                let workspace_bytes = found.workspaceSize;
                Ok(Some(Plan { layouts, algorithm: found.algo, workspace_bytes }))
            }
            // Some forms are refused as wrong, not as unsupported: epilogues of some dtypes, leading dimensions of some sizes.
            Err(CublasError(
                sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED
                | sys::cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE
                | sys::cublasStatus_t::CUBLAS_STATUS_ARCH_MISMATCH,
            )) => {
                // SAFETY: nobody has the layouts.
                unsafe { layouts.into_iter().try_for_each(|l| result::destroy_matrix_layout(l)) }?;
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Computes a product.
    ///
    /// # Safety
    /// The plan is the form's, on this device; the addresses are of tensors that lie as the form says and stay until the
    /// stream has done its work; the workspace is as large as the plan wants, and this stream's alone.
    pub(super) unsafe fn run(
        &self,
        form: &Form,
        plan: &Plan,
        at: &Addresses,
        stream: CUstream,
    ) -> Result<(), Failure> {
        let operation = Operation::new(form, at)?;
        let (one, beta) = (1.0f64, f64::from(u8::from(form.accumulate)));
        let (one32, beta32) = (one as f32, beta as f32);
        let wide = form.dtype == DType::F64;
        let pick = |x: &f64, y: &f32| -> *const c_void {
            if wide { std::ptr::from_ref(x).cast() } else { std::ptr::from_ref(y).cast() }
        };
        let [b, a, c] = plan.layouts;
        let pointer = |address: u64| std::ptr::with_exposed_provenance_mut::<c_void>(address as usize);
        // SAFETY: by the caller; both factors live until the call returns, which has read them.
        unsafe {
            result::matmul(
                self.0,
                operation.0,
                pick(&one, &one32),
                pick(&beta, &beta32),
                pointer(at.b),
                b,
                pointer(at.a),
                a,
                pointer(at.c),
                c,
                pointer(at.c),
                c,
                &plan.algorithm,
                pointer(at.workspace),
                plan.workspace_bytes,
                stream.cast(),
            )?;
        }
        Ok(())
    }
}

fn data_type(dtype: DType) -> sys::cudaDataType {
    match dtype {
        DType::F64 => sys::cudaDataType::CUDA_R_64F,
        DType::BF16 => sys::cudaDataType::CUDA_R_16BF,
        DType::F16 => sys::cudaDataType::CUDA_R_16F,
        _ => sys::cudaDataType::CUDA_R_32F,
    }
}

/// The layout of the transpose of a matrix of `cols` rows and `rows` columns.
fn layout(
    dtype: DType,
    matrix: &Layout,
    rows: usize,
    cols: usize,
    count: usize,
) -> Result<sys::cublasLtMatrixLayout_t, Failure> {
    use sys::cublasLtMatrixLayoutAttribute_t as L;
    let (rows, cols) = if matrix.in_columns { (cols, rows) } else { (rows, cols) };
    let made = result::create_matrix_layout(data_type(dtype), rows as u64, cols as u64, matrix.ld as i64)?;
    let (count, step) = (count as i32, matrix.step as i64);
    // SAFETY: the layout was just made, and the attributes have these types.
    unsafe {
        let count = (&raw const count).cast();
        result::set_matrix_layout_attribute(made, L::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, count, 4)?;
        let step = (&raw const step).cast();
        result::set_matrix_layout_attribute(made, L::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, step, 8)?;
    }
    Ok(made)
}

/// A description of what is computed.
struct Operation(sys::cublasLtMatmulDesc_t);

impl Operation {
    fn new(form: &Form, at: &Addresses) -> Result<Operation, Failure> {
        use sys::cublasComputeType_t as C;
        use sys::cublasLtMatmulDescAttributes_t as D;
        let (compute, scale) = match form.dtype {
            DType::F64 => (C::CUBLAS_COMPUTE_64F, DType::F64),
            DType::F32 if form.tf32 => (C::CUBLAS_COMPUTE_32F_FAST_TF32, DType::F32),
            _ => (C::CUBLAS_COMPUTE_32F, DType::F32),
        };
        let operation = Operation(result::create_matmul_desc(compute, data_type(scale))?);
        // CUBLAS_OP_N and CUBLAS_OP_T of cublas_api.h.
        operation.set(D::CUBLASLT_MATMUL_DESC_TRANSA, i32::from(form.b.in_columns))?;
        operation.set(D::CUBLASLT_MATMUL_DESC_TRANSB, i32::from(form.a.in_columns))?;
        operation.set(D::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue(form))?;
        if form.bias {
            operation.set(D::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type(form.dtype) as i32)?;
            operation.set(D::CUBLASLT_MATMUL_DESC_BIAS_POINTER, at.bias)?;
        }
        if form.sums == Sums::GeluKept {
            operation.set(D::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, at.before)?;
            operation.set(D::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, form.c.ld as i64)?;
            operation.set(D::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, form.c.step as i64)?;
        }
        Ok(operation)
    }

    fn set<T>(&self, what: sys::cublasLtMatmulDescAttributes_t, value: T) -> Result<(), Failure> {
        let from = (&raw const value).cast();
        // SAFETY: the description exists; the library refuses a size that is not the attribute's.
        Ok(unsafe { result::set_matmul_desc_attribute(self.0, what, from, size_of::<T>()) }?)
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        // SAFETY: nobody else has it.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

fn epilogue(form: &Form) -> u32 {
    use sys::cublasLtEpilogue_t as E;
    let which = match (form.sums, form.bias) {
        (Sums::Plain, false) => E::CUBLASLT_EPILOGUE_DEFAULT,
        (Sums::Plain, true) => E::CUBLASLT_EPILOGUE_BIAS,
        (Sums::Gelu, false) => E::CUBLASLT_EPILOGUE_GELU,
        (Sums::Gelu, true) => E::CUBLASLT_EPILOGUE_GELU_BIAS,
        (Sums::GeluKept, false) => E::CUBLASLT_EPILOGUE_GELU_AUX,
        (Sums::GeluKept, true) => E::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
    };
    which as u32
}

/// What an algorithm may need and do.
struct Wishes(sys::cublasLtMatmulPreference_t);

impl Wishes {
    fn new(form: &Form, workspace_bytes: usize) -> Result<Wishes, Failure> {
        use sys::cublasLtMatmulPreferenceAttributes_t as P;
        use sys::cublasLtReductionScheme_t as R;
        let wishes = Wishes(result::create_matmul_pref()?);
        wishes.set(P::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes as u64)?;
        // A k that is cut is added up in the type of the sums, in a step of its own: always in the same order.
        let scheme = R::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        wishes.set(P::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, scheme)?;
        let [a, b, c] = form.alignment;
        wishes.set(P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b)?;
        wishes.set(P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a)?;
        wishes.set(P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c)?;
        wishes.set(P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, c)?;
        Ok(wishes)
    }

    fn set<T>(&self, what: sys::cublasLtMatmulPreferenceAttributes_t, value: T) -> Result<(), Failure> {
        let from = (&raw const value).cast();
        // SAFETY: the preferences exist; the library refuses a size that is not the attribute's.
        Ok(unsafe { result::set_matmul_pref_attribute(self.0, what, from, size_of::<T>()) }?)
    }
}

impl Drop for Wishes {
    fn drop(&mut self) {
        // SAFETY: nobody else has them.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}
