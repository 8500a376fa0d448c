//! Loads the emulated driver and NCCL, and runs ranks as threads.
#![allow(unsafe_code, dead_code)]

use std::sync::{Arc, Once};

use cudarc::driver::{CudaContext, CudaStream};
use cudarc::nccl::{Comm, Id, result, sys};

/// Whether ranks of a communicator may share a GPU.
pub const SHARED_GPUS: &str = "NCCL_MULTI_RANK_GPU_ENABLE";

/// Loads the libraries, with two devices, which ranks may share.
pub fn load() {
    static LOADED: Once = Once::new();
    LOADED.call_once(|| {
        // SAFETY: tests load the driver before all else, and the driver reads its environment later.
        unsafe {
            std::env::set_var("PHALANX_EMULATED_DEVICES", "2");
            // Most tests have more ranks than that.
            std::env::set_var(SHARED_GPUS, "1");
        }
        for path in [phalanx_emulated_driver::library(), phalanx_emulated_nccl::library()] {
            let path = path.expect("the library is built with this test");
            // SAFETY: loading it runs no code of its own.
            std::mem::forget(unsafe { libloading::Library::new(path) }.unwrap());
        }
    });
}

/// A stream in a context of its own, so that a fault in it is no other rank's.
pub fn stream(device: usize) -> Arc<CudaStream> {
    load();
    let context = CudaContext::new_non_primary(device, 0).unwrap();
    // SAFETY: the tests order their streams themselves.
    unsafe { context.disable_event_tracking() };
    context.new_stream().unwrap()
}

/// Runs `rank` on a thread for each rank; ranks share the two devices.
pub fn ranks<R: Send>(count: usize, rank: impl Fn(Comm) -> R + Sync) -> Vec<R> {
    load();
    let id = Id::new().unwrap();
    std::thread::scope(|scope| {
        let start = |i: usize| {
            let rank = &rank;
            scope.spawn(move || rank(Comm::from_rank(stream(i % 2), i, count, id).unwrap()))
        };
        let threads: Vec<_> = (0..count).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// A rank by its raw handle, for what cudarc's safe interface does not have.
pub struct RawRank {
    pub comm: sys::ncclComm_t,
    pub rank: usize,
    pub stream: Arc<CudaStream>,
}

impl RawRank {
    /// The stream as NCCL takes it.
    pub fn raw_stream(&self) -> sys::cudaStream_t {
        self.stream.cu_stream().cast()
    }
}

/// As [`ranks`].
pub fn raw_ranks<R: Send>(count: usize, rank: impl Fn(RawRank) -> R + Sync) -> Vec<R> {
    load();
    let id = result::get_uniqueid().unwrap();
    std::thread::scope(|scope| {
        let start = |i: usize| {
            let rank = &rank;
            scope.spawn(move || {
                let stream = stream(i % 2);
                let mut comm = std::ptr::null_mut();
                // SAFETY: a place for a handle.
                unsafe { result::comm_init_rank(&mut comm, count as i32, id, i as i32) }.unwrap();
                rank(RawRank { comm, rank: i, stream })
            })
        };
        let threads: Vec<_> = (0..count).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// What rank `rank` contributes.
pub fn values(rank: usize, count: usize) -> Vec<f32> {
    (0..count).map(|i| (rank * 100 + i) as f32).collect()
}
