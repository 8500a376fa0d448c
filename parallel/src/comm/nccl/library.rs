//! [`Link`]: a communicator of NCCL's. No call of it blocks; [`Link::is_settled`] tells whether the last one has ended.
//!
//! Types are the bindings'; the functions are taken from the file that was found ([`functions`]), whatever it is called.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::{Mutex, MutexGuard, OnceLock};

use phalanx_tensor::cuda::cudarc::nccl::sys;
use phalanx_tensor::cuda::{Library, nccl_lacks, symbol, version};
use phalanx_tensor::{DType, unpoisoned};

use crate::comm::Reduction;

/// The result of a call of NCCL, with NCCL's message as the error.
pub(super) type Called<T = ()> = Result<T, String>;

/// Bytes by which the ranks of a communicator find each other.
pub(super) const ID_BYTES: usize = 128;

/// `NCCL_CONFIG_UNDEF_INT`: NCCL chooses.
const UNDEFINED: c_int = c_int::MIN;
/// The first word of a configuration.
const MAGIC: u32 = 0xcafe_beef;
/// The version whose configuration the bindings describe: 2.30.0.
const VERSION: u32 = 2_30_00;

/// The functions that are called, as NCCL's header declares them.
macro_rules! functions {
    ($($field:ident = $name:ident($($argument:ty),*) -> $result:ty;)*) => {
        #[derive(Debug)]
        pub(super) struct Functions {
            $($field: unsafe extern "C" fn($($argument),*) -> $result),*
        }

        impl Functions {
            fn load() -> Called<Functions> {
                // SAFETY: the types are those of `nccl.h`.
                unsafe { Ok(Functions { $($field: symbol(Library::Nccl, stringify!($name))?),* }) }
            }
        }
    };
}

type Comm = sys::ncclComm_t;
type Input = *const c_void;
type Output = *mut c_void;
type DataType = sys::ncclDataType_t;
type Stream = sys::cudaStream_t;
type Status = sys::ncclResult_t;

functions! {
    unique_id = ncclGetUniqueId(*mut sys::ncclUniqueId) -> Status;
    init = ncclCommInitRankConfig(*mut Comm, c_int, sys::ncclUniqueId, c_int, *mut sys::ncclConfig_t) -> Status;
    async_error = ncclCommGetAsyncError(Comm, *mut Status) -> Status;
    finalize = ncclCommFinalize(Comm) -> Status;
    destroy = ncclCommDestroy(Comm) -> Status;
    abort = ncclCommAbort(Comm) -> Status;
    error_string = ncclGetErrorString(Status) -> *const c_char;
    last_error = ncclGetLastError(Comm) -> *const c_char;
    group_start = ncclGroupStart() -> Status;
    group_end = ncclGroupEnd() -> Status;
    send = ncclSend(Input, usize, DataType, c_int, Comm, Stream) -> Status;
    receive = ncclRecv(Output, usize, DataType, c_int, Comm, Stream) -> Status;
    broadcast = ncclBroadcast(Input, Output, usize, DataType, c_int, Comm, Stream) -> Status;
    all_gather = ncclAllGather(Input, Output, usize, DataType, Comm, Stream) -> Status;
    all_reduce = ncclAllReduce(Input, Output, usize, DataType, sys::ncclRedOp_t, Comm, Stream) -> Status;
    reduce_scatter = ncclReduceScatter(Input, Output, usize, DataType, sys::ncclRedOp_t, Comm, Stream) -> Status;
    reduce = ncclReduce(Input, Output, usize, DataType, sys::ncclRedOp_t, c_int, Comm, Stream) -> Status;
}

/// NCCL, loaded once.
///
/// # Errors
/// If it is not found, or lacks a function because it is too old.
pub(super) fn functions() -> Called<&'static Functions> {
    static NCCL: OnceLock<Called<Functions>> = OnceLock::new();
    NCCL.get_or_init(Functions::load).as_ref().map_err(Clone::clone)
}

/// A communicator of NCCL's, until it is aborted or destroyed.
#[derive(Debug)]
pub(super) struct Link {
    nccl: &'static Functions,
    comm: Mutex<Option<Handle>>,
}

/// NCCL's handle of a communicator.
#[derive(Debug)]
struct Handle(Comm);

// SAFETY: NCCL allows a communicator's calls from any thread, one at a time, which the mutex sees to.
unsafe impl Send for Handle {}

/// One call, on addresses of the GPU's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Op {
    Send { from: u64, count: usize, peer: usize },
    Receive { to: u64, count: usize, peer: usize },
    Broadcast { at: u64, count: usize, root: usize },
    AllGather { from: u64, to: u64, count: usize },
    AllReduce { at: u64, count: usize, by: Reduction },
    ReduceScatter { from: u64, to: u64, count: usize, by: Reduction },
    Reduce { at: u64, count: usize, by: Reduction, root: usize },
}

/// A new identity.
pub(super) fn unique_id() -> Called<[u8; ID_BYTES]> {
    let (nccl, mut id) = (functions()?, sys::ncclUniqueId { internal: [0; ID_BYTES] });
    // SAFETY: it writes the whole of it.
    nccl.check(unsafe { (nccl.unique_id)(&mut id) }, None)?;
    Ok(id.internal.map(|byte| byte.to_ne_bytes()[0]))
}

impl Link {
    /// Begins to meet the other ranks, on the GPU that is current on this thread.
    pub(super) fn begin(id: [u8; ID_BYTES], rank: usize, size: usize) -> Called<Link> {
        let number = |n: usize| c_int::try_from(n).map_err(|_| format!("{n} ranks are too many for NCCL"));
        let (rank, size) = (number(rank)?, number(size)?);
        let id = sys::ncclUniqueId { internal: id.map(|byte| byte as c_char) };
        let (nccl, mut comm, mut config) = (functions()?, null_mut(), not_blocking());
        // SAFETY: it writes a handle, and reads the configuration before it returns.
        nccl.check(unsafe { (nccl.init)(&mut comm, size, id, rank, &mut config) }, None)?;
        Ok(Link { nccl, comm: Mutex::new(Some(Handle(comm))) })
    }

    fn lock(&self) -> MutexGuard<'_, Option<Handle>> {
        unpoisoned(self.comm.lock())
    }

    fn with<T>(&self, call: impl FnOnce(Comm) -> Called<T>) -> Called<T> {
        match &*self.lock() {
            Some(Handle(comm)) => call(*comm),
            None => Err("the communicator has been aborted".into()),
        }
    }

    /// Whether its last call has been carried out, or queued on the GPU.
    pub(super) fn is_settled(&self) -> Called<bool> {
        self.with(|comm| self.settled(comm))
    }

    /// Its error, if it has one. An aborted communicator has none: the code that aborted it reports why.
    pub(super) fn fault(&self) -> Option<String> {
        self.lock().as_ref().and_then(|&Handle(comm)| self.settled(comm).err())
    }

    fn settled(&self, comm: Comm) -> Called<bool> {
        let mut state = sys::ncclResult_t::ncclSuccess;
        // SAFETY: the handle exists, and the state is written whole.
        self.nccl.check(unsafe { (self.nccl.async_error)(comm, &mut state) }, Some(comm))?;
        self.nccl.check(state, Some(comm))?;
        Ok(state != sys::ncclResult_t::ncclInProgress)
    }

    /// Gives calls that belong together to a stream.
    ///
    /// # Safety
    /// The stream is one of the link's GPU. The addresses are of as many elements of `dtype` there, and as many times more as
    /// there are ranks where a call gathers or scatters, which live, and no other code uses, until the stream has passed
    /// this point.
    pub(super) unsafe fn enqueue(&self, dtype: DType, ops: &[Op], stream: *mut c_void) -> Called {
        self.with(|comm| {
            let nccl = self.nccl;
            // SAFETY: beginning a group needs nothing but the library.
            nccl.check(unsafe { (nccl.group_start)() }, Some(comm))?;
            let given = ops.iter().try_for_each(|op| {
                // SAFETY: the handle exists; the rest is this function's contract.
                nccl.check(unsafe { call(nccl, comm, *op, datatype(dtype), stream.cast()) }, Some(comm))
            });
            // SAFETY: this thread began a group above.
            let ended = nccl.check(unsafe { (nccl.group_end)() }, Some(comm));
            given.and(ended)
        })
    }

    /// Ends it at once, with its work on the GPU.
    pub(super) fn abort(&self) {
        if let Some(Handle(comm)) = self.lock().take() {
            // SAFETY: the handle exists, and was taken, so no other call has it. An error of an abort cannot be handled.
            let _ = unsafe { (self.nccl.abort)(comm) };
        }
    }

    /// Begins to end it in order; all ranks do.
    pub(super) fn finalize(&self) -> Called {
        // SAFETY: the handle exists.
        self.with(|comm| self.nccl.check(unsafe { (self.nccl.finalize)(comm) }, Some(comm)))
    }

    /// Ends it, after `finalize` has settled.
    pub(super) fn destroy(&self) {
        if let Some(Handle(comm)) = self.lock().take() {
            // SAFETY: as for `abort`.
            let _ = unsafe { (self.nccl.destroy)(comm) };
        }
    }
}

/// # Safety
/// As for [`Link::enqueue`].
unsafe fn call(nccl: &Functions, comm: Comm, op: Op, dtype: DataType, stream: Stream) -> Status {
    let from = |address: u64| address as *const c_void;
    let to = |address: u64| address as *mut c_void;
    // SAFETY: the caller's contract is NCCL's. Ranks are those of the communicator, so they fit.
    unsafe {
        match op {
            Op::Send { from: at, count, peer } => {
                (nccl.send)(from(at), count, dtype, peer as c_int, comm, stream)
            }
            Op::Receive { to: at, count, peer } => {
                (nccl.receive)(to(at), count, dtype, peer as c_int, comm, stream)
            }
            Op::Broadcast { at, count, root } => {
                (nccl.broadcast)(from(at), to(at), count, dtype, root as c_int, comm, stream)
            }
            Op::AllGather { from: own, to: all, count } => {
                (nccl.all_gather)(from(own), to(all), count, dtype, comm, stream)
            }
            Op::AllReduce { at, count, by } => {
                (nccl.all_reduce)(from(at), to(at), count, dtype, reduction(by), comm, stream)
            }
            Op::ReduceScatter { from: all, to: own, count, by } => {
                (nccl.reduce_scatter)(from(all), to(own), count, dtype, reduction(by), comm, stream)
            }
            Op::Reduce { at, count, by, root } => {
                (nccl.reduce)(from(at), to(at), count, dtype, reduction(by), root as c_int, comm, stream)
            }
        }
    }
}

fn reduction(by: Reduction) -> sys::ncclRedOp_t {
    match by {
        Reduction::Sum => sys::ncclRedOp_t::ncclSum,
        Reduction::Prod => sys::ncclRedOp_t::ncclProd,
        Reduction::Max => sys::ncclRedOp_t::ncclMax,
        Reduction::Min => sys::ncclRedOp_t::ncclMin,
        Reduction::Avg => sys::ncclRedOp_t::ncclAvg,
        Reduction::BitAnd | Reduction::BitOr | Reduction::BitXor => {
            unreachable!("NCCL has no bitwise reductions, so `route` combines their elements")
        }
    }
}

fn datatype(dtype: DType) -> sys::ncclDataType_t {
    match dtype {
        DType::F64 => sys::ncclDataType_t::ncclFloat64,
        DType::F32 => sys::ncclDataType_t::ncclFloat32,
        DType::BF16 => sys::ncclDataType_t::ncclBfloat16,
        DType::F16 => sys::ncclDataType_t::ncclFloat16,
        DType::I64 => sys::ncclDataType_t::ncclInt64,
        DType::I32 => sys::ncclDataType_t::ncclInt32,
        DType::U8 | DType::Bool => sys::ncclDataType_t::ncclUint8,
    }
}

/// Calls return at once; everything else NCCL chooses. A library that knows less of it reads less.
fn not_blocking() -> sys::ncclConfig_t {
    sys::ncclConfig_t {
        size: size_of::<sys::ncclConfig_t>(),
        magic: MAGIC,
        version: VERSION,
        blocking: 0,
        cgaClusterSize: UNDEFINED,
        minCTAs: UNDEFINED,
        maxCTAs: UNDEFINED,
        netName: null(),
        splitShare: UNDEFINED,
        trafficClass: UNDEFINED,
        commName: null(),
        collnetEnable: UNDEFINED,
        CTAPolicy: UNDEFINED,
        shrinkShare: UNDEFINED,
        nvlsCTAs: UNDEFINED,
        nChannelsPerNetPeer: UNDEFINED,
        nvlinkCentricSched: UNDEFINED,
        graphUsageMode: UNDEFINED,
        numRmaCtx: UNDEFINED,
        maxP2pPeers: UNDEFINED,
    }
}

impl Functions {
    fn check(&self, result: Status, comm: Option<Comm>) -> Called {
        if matches!(result, sys::ncclResult_t::ncclSuccess | sys::ncclResult_t::ncclInProgress) {
            return Ok(());
        }
        // SAFETY: it returns a constant text for every result.
        let what = text(unsafe { (self.error_string)(result) });
        // SAFETY: the handle exists, or is null, which is allowed: then it is the last error of any.
        let more = text(unsafe { (self.last_error)(comm.unwrap_or(null_mut())) });
        let hint = match result {
            sys::ncclResult_t::ncclInvalidUsage if more.to_lowercase().contains("duplicate gpu") => {
                let lacks = version(Library::Nccl).ok().and_then(nccl_lacks);
                let how =
                    lacks.unwrap_or_else(|| "NCCL_MULTI_RANK_GPU_ENABLE=1 lets several share one".into());
                format!("; each rank wants a GPU of its own: {how}")
            }
            _ => String::new(),
        };
        let more = if more.is_empty() { more } else { format!(": {more}") };
        Err(format!("NCCL: {what} ({result:?}){more}{hint}"))
    }
}

fn text(from: *const c_char) -> String {
    if from.is_null() {
        return String::new();
    }
    // SAFETY: NCCL's texts end with a zero, and live until its next call of this thread.
    unsafe { CStr::from_ptr(from) }.to_string_lossy().trim().to_string()
}
