//! The calls of the CUDA driver, each with its error mapped to [`Failure`].
#![allow(unsafe_code)]

use std::ffi::{CString, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use cudarc::driver::{DriverError, result, sys};

use crate::library::{require, symbol};
use crate::vendor::{Called, DeviceProperties, Failure, Library};

pub(crate) use sys::{CUcontext, CUevent, CUfunction, CUgraphExec, CUmodule, CUstream};

impl From<DriverError> for Failure {
    fn from(error: DriverError) -> Failure {
        let text =
            |s: Result<&std::ffi::CStr, _>| s.map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
        let (name, why) = (text(error.error_name()), text(error.error_string()));
        Failure { code: error.0 as u32, text: format!("{name}: {why}") }
    }
}

/// The number of GPUs.
pub(crate) fn count() -> Result<usize, String> {
    require(Library::Driver)?;
    let count = result::init().and_then(|()| result::device::get_count());
    let count = count.map_err(|e| format!("the driver finds no GPU: {}", Failure::from(e).text))?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// What a GPU says of itself before it is opened.
#[derive(Debug)]
pub(crate) struct GpuFacts {
    pub(crate) name: String,
    /// The compute capability: major and minor.
    pub(crate) capability: (u32, u32),
    /// Its memory.
    pub(crate) bytes: u64,
}

/// All GPUs; none is opened.
pub(crate) fn facts() -> Result<Vec<GpuFacts>, String> {
    use sys::CUdevice_attribute as A;
    let facts = |ordinal: usize| {
        let device = result::device::get(ordinal as c_int)?;
        // SAFETY: `device` was just obtained, and no attribute has further requirements.
        unsafe {
            let attribute = |which| result::device::get_attribute(device, which).map(|x| x.max(0) as u32);
            Ok(GpuFacts {
                name: result::device::get_name(device)?,
                capability: (
                    attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                    attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
                ),
                bytes: result::device::total_mem(device)? as u64,
            })
        }
    };
    (0..count()?).map(facts).collect::<Called<_>>().map_err(|failure| failure.text)
}

/// Opens GPU number `ordinal`, which exists: its primary context and its properties.
pub(crate) fn open(ordinal: usize) -> Called<(CUcontext, DeviceProperties)> {
    use sys::CUdevice_attribute as A;
    let device = result::device::get(ordinal as c_int)?;
    // SAFETY: `device` was just obtained and no attribute has further requirements; the context is never released, so it lives
    // as long as the process.
    unsafe {
        let attribute = |which| result::device::get_attribute(device, which).map(|x| x.max(0) as u32);
        let context = result::primary_ctx::retain(device)?;
        result::ctx::set_current(context)?;
        let pool = result::device::get_default_mem_pool(device)?;
        // The pool keeps freed memory for the next request. Otherwise it would return it whenever the host waits.
        let mut threshold = u64::MAX;
        let release = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        result::mem_pool::set_attribute(pool, release, (&raw mut threshold).cast())?;
        let properties = DeviceProperties {
            name: result::device::get_name(device)?,
            capability: (
                attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            processors: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_bytes_max: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        };
        Ok((context, properties))
    }
}

/// Lets GPU number `reader` access the pooled memory of `owner` directly, if they are connected for it. Otherwise copies between them go
/// through the host, and NCCL chooses a transport of its own.
pub(crate) fn share_pool(owner: usize, reader: usize) -> Called {
    let [owner, reader] = [owner, reader].map(|ordinal| result::device::get(ordinal as c_int));
    let (owner, reader, mut can) = (owner?, reader?, 0);
    let location =
        sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: reader };
    let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    let access = sys::CUmemAccessDesc { location, flags };
    // SAFETY: both devices exist, and the owner's default pool with it; `can` is written and `access` read at once.
    unsafe {
        sys::cuDeviceCanAccessPeer(&raw mut can, reader, owner).result()?;
        if can != 0 {
            let pool = result::device::get_default_mem_pool(owner)?;
            sys::cuMemPoolSetAccess(pool, &raw const access, 1).result()?;
        }
    }
    Ok(())
}

/// Returns memory that the pool keeps.
pub(crate) fn trim(ordinal: usize) -> Called {
    let device = result::device::get(ordinal as c_int)?;
    // SAFETY: the device exists, and its default pool with it.
    unsafe { Ok(result::mem_pool::trim_to(result::device::get_default_mem_pool(device)?, 0)?) }
}

/// # Safety
/// The context is one that [`open`] returned.
pub(crate) unsafe fn set_current(context: CUcontext) -> Called {
    // SAFETY: by the caller.
    Ok(unsafe { result::ctx::set_current(context) }?)
}

pub(crate) fn stream() -> Called<CUstream> {
    Ok(result::stream::create(result::stream::StreamKind::NonBlocking)?)
}

/// # Safety
/// The stream exists, as in every function below that takes one; so do the memory and the host's slices until the work
/// is done, which a copy from or to pageable host memory waits for.
pub(crate) unsafe fn synchronize(stream: CUstream) -> Called {
    // SAFETY: by the caller.
    Ok(unsafe { result::stream::synchronize(stream) }?)
}

/// Calls `f` with the stream's status when the stream has done what it has been given so far, on a thread of the driver; at once if the
/// driver refuses.
///
/// # Safety
/// As [`synchronize`].
pub(crate) unsafe fn call_back(stream: CUstream, f: Box<dyn FnOnce(Called) + Send>) {
    type Callback = Box<dyn FnOnce(Called) + Send>;
    // Without the driver's text: a callback must not call the driver.
    fn outcome(status: sys::CUresult) -> Called {
        status.result().map_err(|error| Failure { code: error.0 as u32, text: format!("{:?}", error.0) })
    }
    unsafe extern "C" fn call(_: CUstream, status: sys::CUresult, data: *mut c_void) {
        // SAFETY: the driver calls this once, with the pointer made below.
        let f = unsafe { Box::from_raw(data.cast::<Callback>()) };
        // A panic must not unwind into the driver.
        let _ = catch_unwind(AssertUnwindSafe(|| f(outcome(status))));
    }
    let data = Box::into_raw(Box::new(f));
    // SAFETY: by the caller; the pointer is `call`'s to free, unless the driver refuses.
    let queued = unsafe { sys::cuStreamAddCallback(stream, Some(call), data.cast(), 0) }.result();
    if let Err(error) = queued {
        // SAFETY: the driver has refused, so nothing else owns the pointer.
        let f = unsafe { Box::from_raw(data) };
        f(Err(error.into()));
    }
}

/// # Safety
/// As [`synchronize`].
pub(crate) unsafe fn allocate(bytes: usize, stream: CUstream) -> Called<u64> {
    // SAFETY: by the caller.
    Ok(unsafe { result::malloc_async(stream, bytes) }?)
}

/// # Safety
/// As [`synchronize`]; `address` came from [`allocate`], and is used by nothing after what `stream` has been given.
pub(crate) unsafe fn free(address: u64, stream: CUstream) -> Called {
    // SAFETY: by the caller.
    Ok(unsafe { result::free_async(address, stream) }?)
}

/// # Safety
/// As [`synchronize`].
pub(crate) unsafe fn fill(address: u64, byte: u8, bytes: usize, stream: CUstream) -> Called {
    // SAFETY: by the caller.
    Ok(unsafe { result::memset_d8_async(address, byte, bytes, stream) }?)
}

/// # Safety
/// As [`synchronize`].
pub(crate) unsafe fn from_host(to: u64, from: &[u8], stream: CUstream) -> Called {
    // SAFETY: by the caller.
    Ok(unsafe { result::memcpy_htod_async(to, from, stream) }?)
}

/// # Safety
/// As [`synchronize`].
pub(crate) unsafe fn to_host(to: &mut [u8], from: u64, stream: CUstream) -> Called {
    // SAFETY: by the caller.
    Ok(unsafe { result::memcpy_dtoh_async(to, from, stream) }?)
}

/// # Safety
/// As [`synchronize`].
pub(crate) unsafe fn copy(to: u64, from: u64, bytes: usize, stream: CUstream) -> Called {
    // SAFETY: by the caller.
    Ok(unsafe { result::memcpy_dtod_async(to, from, bytes, stream) }?)
}

/// # Safety
/// As [`synchronize`]; both contexts are ones that [`open`] returned.
pub(crate) unsafe fn copy_peer(
    (to, to_context): (u64, CUcontext),
    (from, from_context): (u64, CUcontext),
    bytes: usize,
    stream: CUstream,
) -> Called {
    // SAFETY: by the caller.
    Ok(unsafe { result::memcpy_peer_async(to_context, to, from_context, from, bytes, stream) }?)
}

pub(crate) fn host_allocate(bytes: usize) -> Called<*mut c_void> {
    // SAFETY: no requirement; flags 0 is memory that the CPU reads fast.
    Ok(unsafe { result::malloc_host(bytes, 0) }?)
}

/// # Safety
/// `start` came from [`host_allocate`].
pub(crate) unsafe fn host_free(start: *mut c_void) -> Called {
    // SAFETY: by the caller.
    Ok(unsafe { result::free_host(start) }?)
}

pub(crate) fn event(timing: bool) -> Called<CUevent> {
    use sys::CUevent_flags as F;
    Ok(result::event::create(if timing { F::CU_EVENT_DEFAULT } else { F::CU_EVENT_DISABLE_TIMING })?)
}

/// # Safety
/// The event and the stream exist.
pub(crate) unsafe fn record(event: CUevent, stream: CUstream) -> Called {
    // SAFETY: by the caller.
    Ok(unsafe { result::event::record(event, stream) }?)
}

/// # Safety
/// The event and the stream exist.
pub(crate) unsafe fn wait(stream: CUstream, event: CUevent) -> Called {
    let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
    // SAFETY: by the caller.
    Ok(unsafe { result::stream::wait_event(stream, event, flags) }?)
}

/// # Safety
/// The event exists.
pub(crate) unsafe fn query(event: CUevent) -> Called {
    // SAFETY: by the caller.
    Ok(unsafe { result::event::query(event) }?)
}

/// # Safety
/// The event exists.
pub(crate) unsafe fn event_synchronize(event: CUevent) -> Called {
    // SAFETY: by the caller.
    Ok(unsafe { result::event::synchronize(event) }?)
}

/// # Safety
/// Both events exist, measure time and were recorded.
pub(crate) unsafe fn elapsed_ms(start: CUevent, end: CUevent) -> Called<f32> {
    // SAFETY: by the caller.
    Ok(unsafe { result::event::elapsed(start, end) }?)
}

/// # Safety
/// The event exists and is used no more.
pub(crate) unsafe fn event_destroy(event: CUevent) -> Called {
    // SAFETY: by the caller.
    Ok(unsafe { result::event::destroy(event) }?)
}

/// Loads PTX (with a 0 at its end) or a CUBIN into the current context.
pub(crate) fn load(image: &[u8]) -> Called<CUmodule> {
    // SAFETY: the image is whole, and of a form that the driver tells by its beginning.
    Ok(unsafe { result::module::load_data(image.as_ptr().cast()) }?)
}

/// # Safety
/// The module exists.
pub(crate) unsafe fn function(module: CUmodule, name: &str) -> Called<CUfunction> {
    let name = CString::new(name).unwrap_or_default();
    // SAFETY: by the caller.
    Ok(unsafe { result::module::get_function(module, name) }?)
}

/// Where a kernel's parameters begin, in bytes. Drivers since CUDA 12.4 tell; of an older one it is a failure.
///
/// # Safety
/// The function exists.
pub(crate) unsafe fn parameter_offsets(function: CUfunction) -> Called<Vec<usize>> {
    type ParamInfo = unsafe extern "C" fn(CUfunction, usize, *mut usize, *mut usize) -> sys::CUresult;
    // SAFETY: the driver's function of this name is of this type.
    let info: ParamInfo = unsafe { symbol(Library::Driver, "cuFuncGetParamInfo") }
        .map_err(|text| Failure { code: u32::MAX, text })?;
    let mut offsets = Vec::new();
    loop {
        let (mut offset, mut bytes) = (0, 0);
        // SAFETY: by the caller; both places are there.
        let told = unsafe { info(function, offsets.len(), &raw mut offset, &raw mut bytes) };
        match told.result() {
            Ok(()) => offsets.push(offset),
            Err(DriverError(sys::CUresult::CUDA_ERROR_INVALID_VALUE)) => return Ok(offsets),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Allows a kernel as much dynamic shared memory.
///
/// # Safety
/// The function exists.
pub(crate) unsafe fn allow_shared(function: CUfunction, bytes: u32) -> Called {
    let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    // SAFETY: by the caller.
    Ok(unsafe { result::function::set_function_attribute(function, which, bytes as c_int) }?)
}

/// # Safety
/// The function and the stream exist; `arguments` points to `bytes` bytes, laid out as the kernel's parameters. (The driver
/// refuses another size than theirs.)
pub(crate) unsafe fn launch(
    function: CUfunction,
    [bx, by, bz]: [u32; 3],
    [tx, ty, tz]: [u32; 3],
    shared_bytes: u32,
    stream: CUstream,
    arguments: *mut c_void,
    mut bytes: usize,
) -> Called {
    // CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE and CU_LAUNCH_PARAM_END of cuda.h.
    let tag = |n: usize| std::ptr::without_provenance_mut::<c_void>(n);
    let mut extra = [tag(1), arguments, tag(2), (&raw mut bytes).cast(), tag(0)];
    let none = std::ptr::null_mut();
    // SAFETY: by the caller; `extra` names the arguments and their size, and is read before the call returns.
    let called = unsafe {
        sys::cuLaunchKernel(function, bx, by, bz, tx, ty, tz, shared_bytes, stream, none, extra.as_mut_ptr())
    };
    Ok(called.result()?)
}

/// A map of a tensor of 16-bit elements, of which boxes are one element wide but in the two inner dimensions. It names an address, and reads
/// nothing there.
pub(crate) fn tensor_map(
    address: u64,
    sizes: [u64; 4],
    strides: [u64; 3],
    [columns, rows]: [u32; 2],
) -> Called<[u64; 16]> {
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    let (window, steps) = ([columns, rows, 1, 1], [1; 4]);
    // SAFETY: the lists are as long as the rank says.
    let made = unsafe {
        sys::cuTensorMapEncodeTiled(
            &raw mut map,
            sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT16,
            4,
            std::ptr::with_exposed_provenance_mut(address as usize),
            sizes.as_ptr(),
            strides.as_ptr(),
            window.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    made.result()?;
    Ok(map.opaque)
}

/// # Safety
/// The stream exists.
pub(crate) unsafe fn begin_capture(stream: CUstream) -> Called {
    // Relaxed, because captured uploads pin memory.
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: by the caller.
    Ok(unsafe { result::stream::begin_capture(stream, mode) }?)
}

/// Whether what the stream is given makes a graph.
///
/// # Safety
/// The stream exists.
pub(crate) unsafe fn is_capturing(stream: CUstream) -> Called<bool> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: by the caller; the status is written before the call returns.
    unsafe { sys::cuStreamIsCapturing(stream, &raw mut status) }.result()?;
    Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// Ends a capture and instantiates the graph.
///
/// # Safety
/// The stream exists.
pub(crate) unsafe fn end_capture(stream: CUstream) -> Called<CUgraphExec> {
    let flags = sys::CUgraphInstantiate_flags(0);
    // SAFETY: by the caller; the graph is destroyed once, after its last use.
    unsafe {
        let graph = result::stream::end_capture(stream)?;
        let ready = result::graph::instantiate(graph, flags);
        result::graph::destroy(graph)?;
        Ok(ready?)
    }
}

/// # Safety
/// Graph and stream exist, and so does the memory that the captured work uses.
pub(crate) unsafe fn graph_launch(graph: CUgraphExec, stream: CUstream) -> Called {
    // SAFETY: by the caller.
    Ok(unsafe { result::graph::launch(graph, stream) }?)
}

/// # Safety
/// The graph exists and is used no more.
pub(crate) unsafe fn graph_destroy(graph: CUgraphExec) -> Called {
    // SAFETY: by the caller.
    Ok(unsafe { result::graph::exec_destroy(graph) }?)
}
