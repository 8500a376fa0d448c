//! Matrix products by cuBLASLt.
//!
//! The library's matrices lie by columns, Phalanx's by rows. So the transpose is asked for: `Cᵀ = Bᵀ Aᵀ`. A matrix by rows is its
//! transpose by columns and needs no flag, and a bias for C's columns is one for the rows of `Cᵀ`, which the library offers.
//!
//! For each form of product the library is asked once for an algorithm, so the same form has the same bits each time. f32 is computed in
//! f32, unless `PHALANX_CUDA_TF32=1` allows factors of 19 bits. 16-bit floats are summed in f32. `PHALANX_CUDA_CUBLASLT=0` turns the
//! library off.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;

use crate::Result;
use crate::context::{Context, lock};
use crate::driver::CUstream;
use crate::library::require;
use crate::load_gate::LoadGate;
use crate::memory::DeviceBlock;
use crate::product::{Epilogue, Float, MatrixLayout, ProductForm, ProductPointers};
use crate::trace::Work;
use crate::vendor::{Failure, Library, OUT_OF_MEMORY};

/// Memory for an algorithm to work in, for each stream: what NVIDIA advises for these GPUs.
const WORKSPACE_BYTES: usize = 32 << 20;

/// A device's library context, plans and workspaces.
#[derive(Default)]
pub(crate) struct CublasLt {
    handle: OnceLock<Handle>,
    plans: RwLock<HashMap<ProductForm, Option<Arc<PlannedProduct>>>>,
    /// By stream.
    workspaces: Mutex<HashMap<usize, DeviceBlock>>,
}

/// A form of product, and how the library computes it.
pub struct PlannedProduct {
    form: ProductForm,
    plan: Plan,
    /// Whether the library has loaded its kernel.
    has_run: AtomicBool,
}

impl CublasLt {
    /// How products of a form are computed, such as the one at these addresses. None if the library is not there or does not do them.
    pub(crate) fn plan(
        &self,
        context: &'static Context,
        gate: &LoadGate,
        op: &'static str,
        form: &ProductForm,
        at: &ProductPointers,
    ) -> Result<Option<Arc<PlannedProduct>>> {
        if is_refused() || require(Library::CublasLt).is_err() {
            return Ok(None);
        }
        let handle = self.handle(context, gate, op)?;
        let plans = self.plans.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(planned) = plans.get(form) {
            return Ok(planned.clone());
        }
        drop(plans);
        context.bind(op)?;
        let plan = context.called(op, handle.plan(form, at, WORKSPACE_BYTES))?;
        let planned =
            plan.map(|plan| Arc::new(PlannedProduct { form: *form, plan, has_run: AtomicBool::new(false) }));
        let mut plans = self.plans.write().unwrap_or_else(PoisonError::into_inner);
        Ok(plans.entry(*form).or_insert(planned).clone())
    }

    /// Computes a product on this thread's current stream.
    ///
    /// # Safety
    /// As [`Gpu::multiply`](crate::Gpu::multiply).
    pub(crate) unsafe fn multiply(
        &self,
        context: &'static Context,
        gate: &LoadGate,
        op: &'static str,
        planned: &PlannedProduct,
        at: ProductPointers,
    ) -> Result<()> {
        let PlannedProduct { form, plan, has_run } = planned;
        let handle = self.handle(context, gate, op)?;
        let workspace = if plan.workspace_bytes > 0 { self.workspace(context, op)? } else { 0 };
        context.bind(op)?;
        // SAFETY: the plan is the form's, the rest is by the caller; the workspace is this stream's, and never freed.
        let run = || unsafe { handle.run(form, plan, &at, workspace, context.stream()) };
        let queue =
            || context.called(op, if has_run.load(Ordering::Relaxed) { run() } else { gate.load(run) });
        context.traced(op, Work::Product { float: form.float, count: form.count, size: form.size }, queue)?;
        has_run.store(true, Ordering::Relaxed);
        context.count_launch();
        Ok(())
    }

    fn handle(&self, context: &Context, gate: &LoadGate, op: &'static str) -> Result<&Handle> {
        if let Some(handle) = self.handle.get() {
            return Ok(handle);
        }
        context.bind(op)?;
        let handle = context.called(op, gate.load(Handle::new))?;
        Ok(self.handle.get_or_init(|| handle))
    }

    /// The current stream's working memory.
    fn workspace(&self, context: &'static Context, op: &'static str) -> Result<u64> {
        match lock(&self.workspaces).entry(context.stream().addr()) {
            Entry::Occupied(kept) => Ok(kept.get().address()),
            Entry::Vacant(free) => Ok(free.insert(context.allocate(op, WORKSPACE_BYTES)?).address()),
        }
    }
}

/// Whether the library shall not be used.
fn is_refused() -> bool {
    static REFUSED: OnceLock<bool> = OnceLock::new();
    is_set("PHALANX_CUDA_CUBLASLT", "0", &REFUSED)
}

/// Whether factors of f32 products may be rounded to 19 bits.
fn is_tf32() -> bool {
    static TF32: OnceLock<bool> = OnceLock::new();
    is_set("PHALANX_CUDA_TF32", "1", &TF32)
}

/// Whether a variable of the environment has this value, looked up once.
fn is_set(name: &str, wanted: &str, known: &OnceLock<bool>) -> bool {
    *known.get_or_init(|| std::env::var_os(name).is_some_and(|value| value == wanted))
}

/// The library's context on one device.
struct Handle(sys::cublasLtHandle_t);

// SAFETY: the library's documentation allows a handle to be used by several threads at once.
unsafe impl Send for Handle {}
// SAFETY: as for `Send`.
unsafe impl Sync for Handle {}

/// How a form of product is computed.
struct Plan {
    /// Of B, A and C, transposed: the library's matrices lie by columns.
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
    /// Memory that the algorithm works in.
    workspace_bytes: usize,
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
    fn new() -> Result<Handle, Failure> {
        Ok(Handle(result::create_handle()?))
    }

    /// How products of a form are computed, such as the one at these addresses; none if the library does not do them.
    fn plan(
        &self,
        form: &ProductForm,
        at: &ProductPointers,
        workspace_bytes: usize,
    ) -> Result<Option<Plan>, Failure> {
        let operation = Operation::new(form, at)?;
        let (count, [m, n, k]) = (form.count, form.size);
        let layouts = [
            layout(form.float, &form.b, n, k, count)?,
            layout(form.float, &form.a, k, m, count)?,
            layout(form.out_float, &form.c, n, m, count)?,
        ];
        let [b, a, c] = layouts;
        let preference = Preference::new(form, workspace_bytes)?;
        // SAFETY: everything was just made and is destroyed by its owner, or, the layouts, never.
        let found =
            unsafe { result::get_matmul_algo_heuristic(self.0, operation.0, b, a, c, c, preference.0) };
        match found {
            Ok(found) => {
                let workspace_bytes = found.workspaceSize;
                Ok(Some(Plan { layouts, algorithm: found.algo, workspace_bytes }))
            }
            // The library calls some unsupported forms invalid: epilogues of some types, leading dimensions of some sizes.
            Err(CublasError(
                sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED
                | sys::cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE
                | sys::cublasStatus_t::CUBLAS_STATUS_ARCH_MISMATCH,
            )) => {
                // SAFETY: the layouts were just made and are used no more.
                unsafe { layouts.into_iter().try_for_each(|l| result::destroy_matrix_layout(l)) }?;
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Computes a product.
    ///
    /// # Safety
    /// The plan is the form's, on this device. The matrices lie as the form says and stay until the stream has come so far. The workspace
    /// is as large as the plan wants, and this stream's alone.
    unsafe fn run(
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
                &plan.algorithm,
                pointer(workspace),
                plan.workspace_bytes,
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
        if form.bias {
            operation.set(D::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type(form.float) as i32)?;
            operation.set(D::CUBLASLT_MATMUL_DESC_BIAS_POINTER, at.bias)?;
        }
        if form.epilogue == Epilogue::GeluKept {
            operation.set(D::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, at.sums)?;
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
        // SAFETY: this is its only owner.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

fn epilogue(form: &ProductForm) -> u32 {
    use sys::cublasLtEpilogue_t as E;
    let which = match (form.epilogue, form.bias) {
        (Epilogue::Plain, false) => E::CUBLASLT_EPILOGUE_DEFAULT,
        (Epilogue::Plain, true) => E::CUBLASLT_EPILOGUE_BIAS,
        (Epilogue::Gelu, false) => E::CUBLASLT_EPILOGUE_GELU,
        (Epilogue::Gelu, true) => E::CUBLASLT_EPILOGUE_GELU_BIAS,
        (Epilogue::GeluKept, false) => E::CUBLASLT_EPILOGUE_GELU_AUX,
        (Epilogue::GeluKept, true) => E::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
    };
    which as u32
}

/// The memory that an algorithm may use, and the ways in which it may sum.
struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new(form: &ProductForm, workspace_bytes: usize) -> Result<Preference, Failure> {
        use sys::cublasLtMatmulPreferenceAttributes_t as P;
        use sys::cublasLtReductionScheme_t as R;
        let preference = Preference(result::create_matmul_pref()?);
        preference.set(P::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes as u64)?;
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
