//! What stands for the driver where this crate was built without the feature `cuda`: no GPU is ever found, so none of the
//! calls is ever made.
#![allow(unsafe_code)]

use std::ffi::c_void;

pub(super) type CUcontext = *mut c_void;
pub(super) type CUevent = *mut c_void;
pub(super) type CUfunction = *mut c_void;
pub(super) type CUgraphExec = *mut c_void;
pub(super) type CUmodule = *mut c_void;
pub(super) type CUstream = *mut c_void;

/// A failed call: what the driver says of it.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) code: u32,
    pub(super) text: String,
}

impl Failure {
    /// The device has no memory left.
    pub(super) fn is_out_of_memory(&self) -> bool {
        self.code == 2
    }

    /// Of an event: its work has not run yet.
    pub(super) fn is_not_ready(&self) -> bool {
        self.code == 600
    }
}

type Called<T = ()> = Result<T, Failure>;

/// What is known of a GPU before anything runs there.
pub(super) struct About {
    pub(super) context: CUcontext,
    pub(super) name: String,
    pub(super) capability: (u32, u32),
    pub(super) processors: u32,
    pub(super) shared_bytes_max: u32,
}

/// There is none.
pub(super) fn count() -> Result<usize, String> {
    Err("this program was built without the feature `cuda`".into())
}

fn none<T>() -> Called<T> {
    Err(Failure { code: 100, text: "built without the feature `cuda`".into() })
}

macro_rules! never {
    ($($(#[$kind:ident])? fn $name:ident($($type:ty),*) -> $out:ty;)*) => {$(
        never!(@one $($kind)?, $name, ($($type),*), $out);
    )*};
    (@one , $name:ident, ($($type:ty),*), $out:ty) => {
        pub(super) fn $name($(_: $type),*) -> Called<$out> {
            none()
        }
    };
    (@one unsafety, $name:ident, ($($type:ty),*), $out:ty) => {
        /// # Safety
        /// None: it is never called.
        pub(super) unsafe fn $name($(_: $type),*) -> Called<$out> {
            none()
        }
    };
}

never! {
    fn open(usize) -> About;
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
    #[unsafety] fn launch(CUfunction, [u32; 3], [u32; 3], u32, CUstream, *mut c_void, usize) -> ();
    #[unsafety] fn begin_capture(CUstream) -> ();
    #[unsafety] fn end_capture(CUstream) -> CUgraphExec;
    #[unsafety] fn graph_launch(CUgraphExec, CUstream) -> ();
    #[unsafety] fn graph_destroy(CUgraphExec) -> ();
}
