//! Loads the emulated driver and cuBLASLt, and describes products to the latter through cudarc's bindings.
#![allow(unsafe_code, dead_code)]

use std::ffi::c_void;
use std::sync::{Arc, Once};

use cudarc::cublaslt::{result, sys};
use cudarc::driver::{CudaContext, CudaStream};
use sys::cublasLtMatmulDescAttributes_t as Attribute;
use sys::cublasLtMatrixLayoutAttribute_t as LayoutAttribute;

pub fn stream() -> Arc<CudaStream> {
    static LOADED: Once = Once::new();
    LOADED.call_once(|| {
        for path in [phalanx_emulated_driver::library(), phalanx_emulated_cublaslt::library()] {
            let path = path.expect("the library is built with this test");
            // SAFETY: loading it runs no code of its own.
            std::mem::forget(unsafe { libloading::Library::new(path) }.unwrap());
        }
    });
    let context = CudaContext::new_non_primary(0, 0).unwrap();
    // SAFETY: the tests order their streams themselves.
    unsafe { context.disable_event_tracking() };
    context.new_stream().unwrap()
}

/// One matrix, or a batch of them, by columns.
#[derive(Clone, Copy)]
pub struct Matrix {
    pub kind: sys::cudaDataType,
    pub rows: usize,
    pub columns: usize,
    pub leading: usize,
    pub batches: i32,
    pub batch_stride: i64,
    pub by_rows: bool,
}

impl Matrix {
    pub fn new(kind: sys::cudaDataType, rows: usize, columns: usize) -> Matrix {
        Matrix { kind, rows, columns, leading: rows, batches: 1, batch_stride: 0, by_rows: false }
    }

    fn layout(&self) -> sys::cublasLtMatrixLayout_t {
        let (rows, columns, leading) = (self.rows as u64, self.columns as u64, self.leading as i64);
        let layout = result::create_matrix_layout(self.kind, rows, columns, leading).unwrap();
        let set = |attribute, at: *const c_void, bytes| {
            // SAFETY: the pointers are to values of these sizes.
            unsafe { result::set_matrix_layout_attribute(layout, attribute, at, bytes) }.unwrap();
        };
        set(LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, (&raw const self.batches).cast(), 4);
        set(
            LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
            (&raw const self.batch_stride).cast(),
            8,
        );
        let order = i32::from(self.by_rows);
        set(LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_ORDER, (&raw const order).cast(), 4);
        layout
    }
}

/// A product as the library is told of it.
pub struct Product {
    pub compute: sys::cublasComputeType_t,
    pub scale: sys::cudaDataType,
    pub matrices: [Matrix; 4],
    description: sys::cublasLtMatmulDesc_t,
}

impl Product {
    pub fn new(
        compute: sys::cublasComputeType_t,
        scale: sys::cudaDataType,
        matrices: [Matrix; 4],
    ) -> Product {
        let description = result::create_matmul_desc(compute, scale).unwrap();
        Product { compute, scale, matrices, description }
    }

    /// Sets an attribute to a plain value.
    pub fn with<T>(self, attribute: Attribute, value: T) -> Product {
        let at = (&raw const value).cast();
        // SAFETY: a pointer to a value of this size.
        unsafe { result::set_matmul_desc_attribute(self.description, attribute, at, size_of::<T>()) }
            .unwrap();
        self
    }

    pub fn transposed(self, a: bool, b: bool) -> Product {
        self.with(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, i32::from(a))
            .with(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, i32::from(b))
    }

    /// Runs it on device addresses a, b, c and d, with alpha and beta of the scale type.
    pub fn run<T>(
        &self,
        stream: &CudaStream,
        scales: [T; 2],
        at: [u64; 4],
    ) -> Result<(), result::CublasError> {
        self.run_in(stream, scales, at, (0, 0)).map(|wanted| assert_eq!(wanted, 0))
    }

    /// The same with a workspace at an address, of as many bytes; how many were wanted.
    pub fn run_in<T>(
        &self,
        stream: &CudaStream,
        scales: [T; 2],
        at: [u64; 4],
        (workspace, bytes): (u64, usize),
    ) -> Result<usize, result::CublasError> {
        let handle = result::create_handle().unwrap();
        let layouts = self.matrices.map(|matrix| matrix.layout());
        let [a, b, c, d] = layouts;
        let preference = result::create_matmul_pref().unwrap();
        // SAFETY: every handle is alive, and every address is one of the caller's.
        unsafe {
            let most = sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            let allowed = if workspace == 0 { 0 } else { 1u64 << 20 };
            result::set_matmul_pref_attribute(preference, most, (&raw const allowed).cast(), 8)?;
            let found = result::get_matmul_algo_heuristic(handle, self.description, a, b, c, d, preference)?;
            let [pa, pb, pc, pd] = at.map(|address| address as *mut c_void);
            let (alpha, beta) = ((&raw const scales[0]).cast(), (&raw const scales[1]).cast());
            let stream = stream.cu_stream().cast();
            let workspace = workspace as *mut c_void;
            result::matmul(
                handle,
                self.description,
                alpha,
                beta,
                pa,
                a,
                pb,
                b,
                pc,
                c,
                pd,
                d,
                &found.algo,
                workspace,
                bytes,
                stream,
            )?;
            result::destroy_matmul_pref(preference)?;
            layouts.into_iter().try_for_each(|layout| result::destroy_matrix_layout(layout))?;
            result::destroy_handle(handle)?;
            Ok(found.workspaceSize)
        }
    }
}

/// Whole numbers small enough for every type to hold them and their products' sums.
pub fn values(count: usize, seed: usize) -> Vec<f64> {
    (0..count).map(|i| ((i * 37 + seed * 11) % 7) as f64 - 3.0).collect()
}
