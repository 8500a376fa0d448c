//! The library's functions and records: [`Handle`], its context on a device; [`Plan`], what it needs for a form of product.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::OnceLock;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;

use super::algorithms::Algorithm;
use super::is_set;
use crate::driver::CUstream;
use crate::product::{Epilogue, Float, MatrixLayout, ProductForm, ProductPointers};
use crate::vendor::{Failure, OUT_OF_MEMORY};

/// Memory for an algorithm to work in, for each stream: what NVIDIA advises for these GPUs.
pub(super) const WORKSPACE_BYTES: usize = 32 << 20;

/// The library's version.
pub(super) fn version() -> usize {
    // SAFETY: it has no arguments.
    unsafe { sys::cublasLtGetVersion() }
}

/// Whether factors of f32 products may be rounded to 19 bits.
pub(super) fn is_tf32() -> bool {
    static TF32: OnceLock<bool> = OnceLock::new();
    is_set("PHALANX_CUDA_TF32", "1", &TF32)
}

/// The library's context on one device.
pub(super) struct Handle(sys::cublasLtHandle_t);

// SAFETY: the library's documentation allows a handle to be used by several threads at once.
unsafe impl Send for Handle {}
// SAFETY: as for `Send`.
unsafe impl Sync for Handle {}

/// How a form of product is computed.
pub(super) struct Plan {
    /// Of B, A and C, transposed: the library's matrices lie by columns.
    pub(super) layouts: Layouts,
    pub(super) candidate: Candidate,
}

pub(super) type Layouts = [sys::cublasLtMatrixLayout_t; 3];

/// An algorithm, and the memory that it works in.
#[derive(Clone, Copy)]
pub(super) struct Candidate {
    algorithm: sys::cublasLtMatmulAlgo_t,
    pub(super) workspace_bytes: usize,
}

impl Candidate {
    /// The algorithm, to be kept.
    pub(super) fn algorithm(&self) -> Algorithm {
        self.algorithm.data
    }

    /// None if the library cannot use it as it was asked to.
    fn of(found: &sys::cublasLtMatmulHeuristicResult_t) -> Option<Candidate> {
        let fits = found.state.result().is_ok() && found.workspaceSize <= WORKSPACE_BYTES;
        fits.then_some(Candidate { algorithm: found.algo, workspace_bytes: found.workspaceSize })
    }
}

// SAFETY: layouts are only read once they are made; they are plain records, bound to no thread.
unsafe impl Send for Plan {}
// SAFETY: as for `Send`.
unsafe impl Sync for Plan {}

impl From<CublasError> for Failure {
    fn from(CublasError(status): CublasError) -> Failure {
        // Failures other than this one are told apart by their text only.
        let out_of_memory = status == sys::cublasStatus_t::CUBLAS_STATUS_ALLOC_FAILED;
        Failure {
            code: if out_of_memory { OUT_OF_MEMORY } else { u32::MAX },
            text: format!("cuBLASLt: {status:?}"),
        }
    }
}

impl Handle {
    /// In the context that is current.
    pub(super) fn new() -> Result<Handle, Failure> {
        Ok(Handle(result::create_handle()?))
    }

    /// How products of a form are computed, such as the one at these addresses, by the heuristic's first algorithm; none if the library does
    /// not do them.
    pub(super) fn plan(&self, form: &ProductForm, at: &ProductPointers) -> Result<Option<Plan>, Failure> {
        let (count, [m, n, k]) = (form.count, form.size);
        let layouts = [
            layout(form.float, &form.b, n, k, count)?,
            layout(form.float, &form.a, k, m, count)?,
            layout(form.out_float, &form.c, n, m, count)?,
        ];
        if let Some(&candidate) = self.candidates(form, at, layouts, 1)?.first() {
            return Ok(Some(Plan { layouts, candidate }));
        }
        // SAFETY: the layouts were just made and are used no more.
        unsafe { layouts.into_iter().try_for_each(|l| result::destroy_matrix_layout(l)) }?;
        Ok(None)
    }

    /// Algorithms for products of a form, the one that the heuristic holds the fastest first, `most` at most; none if the library does not
    /// do them.
    pub(super) fn candidates(
        &self,
        form: &ProductForm,
        at: &ProductPointers,
        [b, a, c]: Layouts,
        most: usize,
    ) -> Result<Vec<Candidate>, Failure> {
        let (operation, preference) = (Operation::new(form, at)?, Preference::new(form)?);
        let mut found = Vec::<sys::cublasLtMatmulHeuristicResult_t>::with_capacity(most);
        let (mut count, room) = (0, found.spare_capacity_mut().as_mut_ptr().cast());
        // SAFETY: everything exists until the call returns, and there is room for as many results.
        let asked = unsafe {
            let (operation, preference) = (operation.0, preference.0);
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.0,
                operation,
                b,
                a,
                c,
                c,
                preference,
                most as i32,
                room,
                &raw mut count,
            )
        };
        match asked.result() {
            Ok(()) => {
                // SAFETY: the library has written as many.
                unsafe { found.set_len(usize::try_from(count).unwrap_or(0).min(most)) };
                Ok(found.iter().filter_map(Candidate::of).collect())
            }
            // The library calls some unsupported forms invalid: epilogues of some types, leading dimensions of some sizes.
            Err(CublasError(
                sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED
                | sys::cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE
                | sys::cublasStatus_t::CUBLAS_STATUS_ARCH_MISMATCH,
            )) => Ok(Vec::new()),
            Err(error) => Err(error.into()),
        }
    }

    /// An algorithm that was kept; none if the library does not compute products of the form by it.
    pub(super) fn check(
        &self,
        form: &ProductForm,
        at: &ProductPointers,
        [b, a, c]: Layouts,
        data: Algorithm,
    ) -> Result<Option<Candidate>, Failure> {
        let operation = Operation::new(form, at)?;
        let algorithm = sys::cublasLtMatmulAlgo_t { data };
        let mut checked = MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::uninit();
        // SAFETY: everything exists until the call returns; the library tells an algorithm that it does not know.
        let done = unsafe {
            sys::cublasLtMatmulAlgoCheck(
                self.0,
                operation.0,
                b,
                a,
                c,
                c,
                &raw const algorithm,
                checked.as_mut_ptr(),
            )
        };
        // SAFETY: a call that succeeds has written the result.
        let checked = done.result().is_ok().then(|| unsafe { checked.assume_init() });
        // The result need not repeat the algorithm.
        let workspace = checked.and_then(|checked| Candidate::of(&checked));
        Ok(workspace.map(|found| Candidate { algorithm, ..found }))
    }

    /// Computes a product.
    ///
    /// # Safety
    /// The plan is the form's, on this device. The matrices lie as the form says and stay until the stream has come so far. The workspace
    /// is as large as the plan wants, and this stream's alone.
    pub(super) unsafe fn run(
        &self,
        form: &ProductForm,
        plan: &Plan,
        at: &ProductPointers,
        workspace: u64,
        stream: CUstream,
    ) -> Result<(), Failure> {
        let operation = Operation::new(form, at)?;
        let (one, beta) = (1.0f64, f64::from(u8::from(form.accumulate)));
        let (one32, beta32) = (one as f32, beta as f32);
        let wide = form.float == Float::F64;
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
                &plan.candidate.algorithm,
                pointer(workspace),
                plan.candidate.workspace_bytes,
                stream.cast(),
            )?;
        }
        Ok(())
    }
}

fn data_type(float: Float) -> sys::cudaDataType {
    match float {
        Float::F64 => sys::cudaDataType::CUDA_R_64F,
        Float::BF16 => sys::cudaDataType::CUDA_R_16BF,
        Float::F16 => sys::cudaDataType::CUDA_R_16F,
        Float::F32 => sys::cudaDataType::CUDA_R_32F,
    }
}

/// The layout of the transpose of a matrix of `cols` rows and `rows` columns.
fn layout(
    float: Float,
    matrix: &MatrixLayout,
    rows: usize,
    cols: usize,
    count: usize,
) -> Result<sys::cublasLtMatrixLayout_t, Failure> {
    use sys::cublasLtMatrixLayoutAttribute_t as L;
    let (rows, cols) = if matrix.in_columns { (cols, rows) } else { (rows, cols) };
    let made = result::create_matrix_layout(data_type(float), rows as u64, cols as u64, matrix.ld as i64)?;
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

/// The library's description of a product.
struct Operation(sys::cublasLtMatmulDesc_t);

impl Operation {
    fn new(form: &ProductForm, at: &ProductPointers) -> Result<Operation, Failure> {
        use sys::cublasComputeType_t as C;
        use sys::cublasLtMatmulDescAttributes_t as D;
        let (compute, scale) = match form.float {
            Float::F64 => (C::CUBLAS_COMPUTE_64F, Float::F64),
            Float::F32 if is_tf32() => (C::CUBLAS_COMPUTE_32F_FAST_TF32, Float::F32),
            _ => (C::CUBLAS_COMPUTE_32F, Float::F32),
        };
        let operation = Operation(result::create_matmul_desc(compute, data_type(scale))?);
        // CUBLAS_OP_N and CUBLAS_OP_T of cublas_api.h.
        operation.set(D::CUBLASLT_MATMUL_DESC_TRANSA, i32::from(form.b.in_columns))?;
        operation.set(D::CUBLASLT_MATMUL_DESC_TRANSB, i32::from(form.a.in_columns))?;
        operation.set(D::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue(form))?;
        if form.bias || form.epilogue == Epilogue::RowSums {
            operation.set(D::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type(form.out_float) as i32)?;
            operation.set(D::CUBLASLT_MATMUL_DESC_BIAS_POINTER, at.bias)?;
        }
        if form.epilogue.has_kept() {
            operation.set(D::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, at.kept)?;
            operation.set(D::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, form.c.ld as i64)?;
            if form.count > 1 {
                operation.set(D::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, form.c.step as i64)?;
            }
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
        // SAFETY: this is its only owner.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

fn epilogue(form: &ProductForm) -> u32 {
    use sys::cublasLtEpilogue_t as E;
    let which = match (form.epilogue, form.bias) {
        (Epilogue::Plain, false) => E::CUBLASLT_EPILOGUE_DEFAULT,
        (Epilogue::Plain, true) => E::CUBLASLT_EPILOGUE_BIAS,
        (Epilogue::GeluKept, false) => E::CUBLASLT_EPILOGUE_GELU_AUX,
        (Epilogue::GeluKept, true) => E::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
        (Epilogue::GeluBackward, _) => E::CUBLASLT_EPILOGUE_DGELU,
        // The library's B is A's transpose, whose columns are A's rows.
        (Epilogue::RowSums, _) => E::CUBLASLT_EPILOGUE_BGRADB,
    };
    which as u32
}

/// The memory that an algorithm may use, and the ways in which it may sum.
struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new(form: &ProductForm) -> Result<Preference, Failure> {
        use sys::cublasLtMatmulPreferenceAttributes_t as P;
        use sys::cublasLtReductionScheme_t as R;
        let preference = Preference(result::create_matmul_pref()?);
        preference.set(P::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, WORKSPACE_BYTES as u64)?;
        // Split-k sums are added in the type of the sums, in a step of its own: always in the same order.
        let scheme = R::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        preference.set(P::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, scheme)?;
        let [a, b, c] = form.alignment;
        preference.set(P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b)?;
        preference.set(P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a)?;
        preference.set(P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c)?;
        preference.set(P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, c)?;
        Ok(preference)
    }

    fn set<T>(&self, what: sys::cublasLtMatmulPreferenceAttributes_t, value: T) -> Result<(), Failure> {
        let from = (&raw const value).cast();
        // SAFETY: the preferences exist; the library refuses a size that is not the attribute's.
        Ok(unsafe { result::set_matmul_pref_attribute(self.0, what, from, size_of::<T>()) }?)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: this is their only owner.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}
