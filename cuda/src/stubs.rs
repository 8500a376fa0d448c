//! Stubs: what a build without the feature `cuda` has in place of `driver`, `library`, `nvrtc` and `cublaslt`. No GPU is
//! ever found, so the functions that need one are never called.
#![allow(unsafe_code)]

pub(crate) mod driver {
    use std::ffi::c_void;

    use crate::vendor::{Called, DeviceProperties, Failure};

    pub(crate) type CUcontext = *mut c_void;
    pub(crate) type CUevent = *mut c_void;
    pub(crate) type CUfunction = *mut c_void;
    pub(crate) type CUgraphExec = *mut c_void;
    pub(crate) type CUmodule = *mut c_void;
    pub(crate) type CUstream = *mut c_void;

    /// Always an error.
    pub(crate) fn count() -> Result<usize, String> {
        Err("this program was built without the feature `cuda`".into())
    }

    fn none<T>() -> Called<T> {
        Err(Failure { code: 100, text: "built without the feature `cuda`".into() })
    }

    macro_rules! stubs {
        ($($(#[$kind:ident])? fn $name:ident($($type:ty),*) -> $out:ty;)*) => {$(
            stubs!(@one $($kind)?, $name, ($($type),*), $out);
        )*};
        (@one , $name:ident, ($($type:ty),*), $out:ty) => {
            pub(crate) fn $name($(_: $type),*) -> Called<$out> {
                none()
            }
        };
        (@one unsafety, $name:ident, ($($type:ty),*), $out:ty) => {
            /// # Safety
            /// None: without a device it cannot be called.
            pub(crate) unsafe fn $name($(_: $type),*) -> Called<$out> {
                none()
            }
        };
    }

    /// # Safety
    /// None: without a device it cannot be called.
    pub(crate) unsafe fn call_back(_: CUstream, f: Box<dyn FnOnce(Called) + Send>) {
        f(none());
    }

    stubs! {
        fn open(usize) -> (CUcontext, DeviceProperties);
        fn share_pool(usize, usize) -> ();
        fn trim(usize) -> ();
        #[unsafety] fn set_current(CUcontext) -> ();
        fn stream() -> CUstream;
        #[unsafety] fn synchronize(CUstream) -> ();
        #[unsafety] fn allocate(usize, CUstream) -> u64;
        #[unsafety] fn free(u64, CUstream) -> ();
        #[unsafety] fn fill(u64, u8, usize, CUstream) -> ();
        #[unsafety] fn from_host(u64, &[u8], CUstream) -> ();
        #[unsafety] fn to_host(&mut [u8], u64, CUstream) -> ();
        #[unsafety] fn copy(u64, u64, usize, CUstream) -> ();
        #[unsafety] fn copy_peer((u64, CUcontext), (u64, CUcontext), usize, CUstream) -> ();
        fn host_allocate(usize) -> *mut c_void;
        #[unsafety] fn host_free(*mut c_void) -> ();
        fn event(bool) -> CUevent;
        #[unsafety] fn record(CUevent, CUstream) -> ();
        #[unsafety] fn wait(CUstream, CUevent) -> ();
        #[unsafety] fn query(CUevent) -> ();
        #[unsafety] fn event_synchronize(CUevent) -> ();
        #[unsafety] fn elapsed_ms(CUevent, CUevent) -> f32;
        #[unsafety] fn event_destroy(CUevent) -> ();
        fn load(&[u8]) -> CUmodule;
        #[unsafety] fn function(CUmodule, &str) -> CUfunction;
        #[unsafety] fn allow_shared(CUfunction, u32) -> ();
        #[unsafety] fn parameter_offsets(CUfunction) -> Vec<usize>;
        fn tensor_map(u64, [u64; 4], [u64; 3], [u32; 2]) -> [u64; 16];
        #[unsafety] fn launch(CUfunction, [u32; 3], [u32; 3], u32, CUstream, *mut c_void, usize) -> ();
        #[unsafety] fn begin_capture(CUstream) -> ();
        #[unsafety] fn is_capturing(CUstream) -> bool;
        #[unsafety] fn end_capture(CUstream) -> CUgraphExec;
        #[unsafety] fn graph_launch(CUgraphExec, CUstream) -> ();
        #[unsafety] fn graph_destroy(CUgraphExec) -> ();
    }
}

pub(crate) mod library {
    use crate::vendor::{Library, Version};

    #[derive(PartialEq)]
    pub(crate) enum Mode {
        Gpu,
        #[allow(dead_code)] // there are no stand-in libraries in this build
        Dry,
    }

    pub(crate) fn mode() -> Mode {
        Mode::Gpu
    }

    /// # Safety
    /// None: there is no function.
    pub(crate) unsafe fn symbol<F: Copy>(library: Library, _: &str) -> Result<F, String> {
        require(library).and(Err("there are no libraries".into()))
    }

    /// Whether `PHALANX_CUDA=emulator` asks for the stand-in libraries: not in this build.
    pub fn emulated() -> bool {
        false
    }

    /// Loads nothing.
    ///
    /// # Errors
    /// Always.
    pub fn require(_: Library) -> Result<&'static str, String> {
        Err("this program was built without the feature `cuda`".into())
    }

    /// No library is loaded.
    ///
    /// # Errors
    /// Always.
    pub fn version(library: Library) -> Result<Version, String> {
        require(library).map(|_| Version([0; 3]))
    }

    /// There is no driver.
    ///
    /// # Errors
    /// Always.
    pub fn driver_name() -> Result<&'static str, String> {
        require(Library::Driver)
    }
}

pub(crate) mod doctor {
    use crate::vendor::Version;

    /// What there is of CUDA: nothing in this build.
    #[derive(Debug)]
    pub struct Doctor(());

    /// Nothing is looked for.
    pub fn doctor() -> Doctor {
        Doctor(())
    }

    impl Doctor {
        /// Not in this build.
        pub fn works(&self) -> bool {
            false
        }
    }

    impl std::fmt::Display for Doctor {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("this program was built without the feature `cuda`\n")
        }
    }

    /// There is no NCCL in this build.
    pub fn nccl_lacks(_: Version) -> Option<String> {
        None
    }
}

pub(crate) mod nvrtc {
    use crate::program::{Image, Target};

    /// Compiles nothing.
    ///
    /// # Errors
    /// Always.
    pub fn compile(name: &str, _: &str, target: Target) -> Result<Image, String> {
        Err(format!("{name} for {target}: this program was built without the feature `cuda`"))
    }

    /// There is none.
    ///
    /// # Errors
    /// Always.
    pub fn compile_key(name: &str, _: &str, target: Target) -> Result<String, String> {
        Err(format!("{name} for {target}: this program was built without the feature `cuda`"))
    }

    /// None.
    pub fn compiled(_: usize) -> Option<(String, String)> {
        None
    }
}

pub(crate) mod cublaslt {
    use std::sync::Arc;

    use crate::Result;
    use crate::context::Context;
    use crate::load_gate::LoadGate;
    use crate::product::{ProductForm, ProductPointers};

    #[derive(Default)]
    pub(crate) struct CublasLt;

    /// A form of product, and how the library computes it: there is none.
    pub struct PlannedProduct(());

    impl CublasLt {
        pub(crate) fn plan(
            &self,
            _: &'static Context,
            _: &LoadGate,
            _: &'static str,
            _: &ProductForm,
            _: &ProductPointers,
        ) -> Result<Option<Arc<PlannedProduct>>> {
            Ok(None)
        }

        /// # Safety
        /// None: without a plan it cannot be called.
        pub(crate) unsafe fn multiply(
            &self,
            _: &'static Context,
            _: &LoadGate,
            _: &'static str,
            _: &PlannedProduct,
            _: ProductPointers,
        ) -> Result<()> {
            Ok(())
        }
    }
}
