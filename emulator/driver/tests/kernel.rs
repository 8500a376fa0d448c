//! Modules, launches and their faults through cudarc's safe interface, with PTX written by hand; boxes of a
//! matrix, copied by a tensor map that the driver made.
#![allow(unsafe_code)]

mod common;

use std::ffi::c_void;
use std::sync::Arc;

use common::{context, status, stream};
use cudarc::driver::sys::{self, CUfunction_attribute_enum as Attribute, CUresult};
use cudarc::driver::{CudaFunction, CudaStream, DevicePtr, DeviceRepr, LaunchConfig, PushKernelArg, result};
use cudarc::nvrtc::Ptx;

/// `scale`: x\[i\] = x\[i\] * factor for i < n. `fill_shared`: out\[0\] = the last word of dynamic shared memory after
/// writing 7 there. `read_table`: out\[i\] = table\[i\]. `trap_now` traps.
const PTX: &str = r#"
.version 9.0
.target sm_90
.address_size 64

.visible .global .align 4 .b8 table[16] = {1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0};
.extern .shared .align 4 .b8 room[];

.visible .entry scale(.param .u64 x, .param .f32 factor, .param .u32 n) {
    .reg .pred %p<2>; .reg .b32 %r<8>; .reg .f32 %f<4>; .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [x];
    ld.param.f32 %f1, [factor];
    ld.param.u32 %r1, [n];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra DONE;
    mul.wide.u32 %rd2, %r5, 4;
    add.s64 %rd3, %rd1, %rd2;
    ld.global.f32 %f2, [%rd3];
    mul.f32 %f3, %f2, %f1;
    st.global.f32 [%rd3], %f3;
DONE:
    ret;
}

.visible .entry fill_shared(.param .u64 out, .param .u32 last) {
    .reg .b32 %r<8>; .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [out];
    ld.param.u32 %r1, [last];
    mov.u32 %r2, room;
    add.s32 %r3, %r2, %r1;
    mov.u32 %r4, 7;
    st.shared.u32 [%r3], %r4;
    ld.shared.u32 %r5, [%r3];
    st.global.u32 [%rd1], %r5;
    ret;
}

.visible .entry read_table(.param .u64 out) {
    .reg .b32 %r<4>; .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    mov.u64 %rd3, table;
    add.s64 %rd4, %rd3, %rd2;
    ld.global.u32 %r2, [%rd4];
    add.s64 %rd5, %rd1, %rd2;
    st.global.u32 [%rd5], %r2;
    ret;
}

.visible .entry few_threads() .maxntid 64, 1, 1 {
    ret;
}

.visible .entry trap_now() {
    trap;
    ret;
}
"#;

fn function(stream: &Arc<CudaStream>, name: &str) -> CudaFunction {
    stream.context().load_module(Ptx::from_src(PTX)).unwrap().load_function(name).unwrap()
}

fn blocks(grid: u32, threads: u32) -> LaunchConfig {
    LaunchConfig { grid_dim: (grid, 1, 1), block_dim: (threads, 1, 1), shared_mem_bytes: 0 }
}

/// Launches `scale` for `n` of the elements.
fn scale(stream: &Arc<CudaStream>, x: &cudarc::driver::CudaSlice<f32>, n: u32) {
    let scale = function(stream, "scale");
    // SAFETY: the emulator finds what is wrong.
    unsafe { stream.launch_builder(&scale).arg(x).arg(&3_f32).arg(&n).launch(blocks(n.div_ceil(128), 128)) }
        .unwrap();
}

#[test]
fn a_kernel_computes_what_its_ptx_says() {
    let stream = stream();
    let values: Vec<f32> = (0..1000).map(|i| i as f32).collect();
    let x = stream.clone_htod(&values).unwrap();
    scale(&stream, &x, 1000);
    assert_eq!(stream.clone_dtoh(&x).unwrap(), values.iter().map(|x| x * 3.0).collect::<Vec<_>>());
}

#[test]
fn a_kernel_is_captured_with_its_parameters() {
    let stream = stream();
    let mut x = stream.clone_htod(&[1_f32; 256]).unwrap();
    let scale = function(&stream, "scale");
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    let n = 256_u32;
    // SAFETY: `x` has 256 elements.
    unsafe { stream.launch_builder(&scale).arg(&x).arg(&3_f32).arg(&n).launch(blocks(2, 128)) }.unwrap();
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags).unwrap().unwrap();
    graph.launch().unwrap();
    graph.launch().unwrap();
    assert_eq!(stream.clone_dtoh(&x).unwrap(), [9.0; 256]);
    stream.memcpy_htod(&[2_f32; 256], &mut x).unwrap();
    graph.launch().unwrap();
    assert_eq!(stream.clone_dtoh(&x).unwrap(), [6.0; 256]);
}

#[test]
fn an_access_out_of_bounds_loses_the_context_and_is_named() {
    let stream = stream();
    let x = stream.clone_htod(&[1_f32; 256]).unwrap();
    scale(&stream, &x, 257);
    assert_eq!(status(stream.synchronize()), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    let text = result::DriverError(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS).error_string().unwrap();
    let text = text.to_string_lossy();
    for part in ["kernel \"scale\"", "allocation of 1024 bytes", "block (2, 0, 0)", "thread (0, 0, 0)"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    // Every later call in the context fails, and one in another context does not.
    assert_eq!(status(stream.alloc_zeros::<u8>(1)), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    let other = common::stream();
    assert_eq!(other.clone_dtoh(&other.alloc_zeros::<u8>(1).unwrap()).unwrap(), [0]);
}

#[test]
fn a_trap_is_a_launch_failure() {
    let stream = stream();
    let trap = function(&stream, "trap_now");
    // SAFETY: it has no parameters.
    unsafe { stream.launch_builder(&trap).launch(blocks(1, 1)) }.unwrap();
    assert_eq!(status(stream.synchronize()), CUresult::CUDA_ERROR_LAUNCH_FAILED);
}

#[test]
fn more_than_48_kib_of_shared_memory_have_to_be_asked_for() {
    let stream = stream();
    let kernel = function(&stream, "fill_shared");
    let out = stream.alloc_zeros::<u32>(1).unwrap();
    let launch = |bytes: u32| {
        let last = bytes - 4;
        let config = LaunchConfig { shared_mem_bytes: bytes, ..blocks(1, 1) };
        // SAFETY: the kernel writes one word of `out`.
        status(unsafe { stream.launch_builder(&kernel).arg(&out).arg(&last).launch(config) })
    };
    let most = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    assert_eq!(launch(48 << 10), CUresult::CUDA_SUCCESS);
    assert_eq!(launch((48 << 10) + 4), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(status(kernel.set_attribute(most, (227 << 10) + 4)), CUresult::CUDA_ERROR_INVALID_VALUE);
    kernel.set_attribute(most, 227 << 10).unwrap();
    assert_eq!(launch(227 << 10), CUresult::CUDA_SUCCESS);
    assert_eq!(stream.clone_dtoh(&out).unwrap(), [7]);
}

#[test]
fn blocks_and_grids_that_no_device_has_are_refused() {
    let stream = stream();
    let (any, few) = (function(&stream, "trap_now"), function(&stream, "few_threads"));
    // SAFETY: neither has parameters.
    let launch =
        |kernel: &CudaFunction, config| status(unsafe { stream.launch_builder(kernel).launch(config) });
    assert_eq!(launch(&any, blocks(0, 32)), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(launch(&any, blocks(1, 1025)), CUresult::CUDA_ERROR_INVALID_VALUE);
    let deep = LaunchConfig { grid_dim: (1, 1, 65_536), ..blocks(1, 1) };
    assert_eq!(launch(&any, deep), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(launch(&few, blocks(1, 65)), CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
    assert_eq!(launch(&few, blocks(1, 64)), CUresult::CUDA_SUCCESS);
    stream.synchronize().unwrap();
}

#[test]
fn variables_of_a_module_can_be_read_and_changed() {
    let stream = stream();
    let module = stream.context().load_module(Ptx::from_src(PTX)).unwrap();
    let mut table = module.get_global("table", &stream).unwrap();
    assert_eq!(stream.clone_dtoh(&table).unwrap()[..8], [1, 0, 0, 0, 2, 0, 0, 0]);
    stream.memcpy_htod(&[9_u8], &mut table.slice_mut(..1)).unwrap();
    let kernel = module.load_function("read_table").unwrap();
    let out = stream.alloc_zeros::<u32>(4).unwrap();
    // SAFETY: `out` has 4 elements.
    unsafe { stream.launch_builder(&kernel).arg(&out).launch(blocks(1, 4)) }.unwrap();
    assert_eq!(stream.clone_dtoh(&out).unwrap(), [9, 2, 3, 4]);
}

#[test]
fn a_binary_is_refused_and_the_reason_named() {
    let context = context(0);
    let refused = context.load_module(Ptx::from_binary(b"\x7fELF\x02\x01\x01\x33\x07".to_vec()));
    assert_eq!(status(refused), CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU);
    let text = result::DriverError(CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU).error_string().unwrap();
    assert!(text.to_string_lossy().contains("a CUBIN cannot be run here: load PTX text"), "{text:?}");
}

#[test]
fn text_that_is_no_ptx_is_refused_with_its_line() {
    let refused = context(0).load_module(Ptx::from_src(PTX.replace("mul.f32 %", "mul.f32 %no")));
    assert_eq!(status(refused), CUresult::CUDA_ERROR_INVALID_PTX);
    let text = result::DriverError(CUresult::CUDA_ERROR_INVALID_PTX).error_string().unwrap();
    assert!(text.to_string_lossy().contains("ptx line 23"), "{text:?}");
}

#[test]
fn a_kernel_that_is_not_there_is_not_found() {
    let module = context(0).load_module(Ptx::from_src(PTX)).unwrap();
    assert_eq!(status(module.load_function("scael").map(|_| ())), CUresult::CUDA_ERROR_NOT_FOUND);
}

#[test]
fn parameters_may_come_in_one_buffer_of_the_right_size() {
    let stream = stream();
    let kernel = function(&stream, "scale");
    let x = stream.clone_htod(&[1_f32; 32]).unwrap();
    let mut bytes = x.device_ptr(&stream).0.to_le_bytes().to_vec();
    bytes.extend(5_f32.to_le_bytes());
    bytes.extend(32_u32.to_le_bytes());
    let launch = |size: usize| {
        let end = std::ptr::null_mut();
        let (buffer, size_at) = (bytes.as_ptr() as *mut c_void, (&raw const size) as *mut c_void);
        let key = std::ptr::without_provenance_mut::<c_void>;
        let mut extra = [key(1), buffer, key(2), size_at, end];
        let (none, raw) = (std::ptr::null_mut(), stream.cu_stream());
        // SAFETY: the list is one as CUDA documents it.
        unsafe {
            sys::cuLaunchKernel(raw_function(&kernel), 1, 1, 1, 32, 1, 1, 0, raw, none, extra.as_mut_ptr())
        }
    };
    assert_eq!(launch(15), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(launch(16), CUresult::CUDA_SUCCESS);
    assert_eq!(stream.clone_dtoh(&x).unwrap(), [5.0; 32]);
}

/// The handle within cudarc's function: a new one of the same kernel.
fn raw_function(_of: &CudaFunction) -> sys::CUfunction {
    let text = std::ffi::CString::new(PTX).unwrap();
    let mut module = std::ptr::null_mut();
    let mut function = std::ptr::null_mut();
    // SAFETY: places for handles, and texts that end.
    unsafe {
        sys::cuModuleLoadData(&mut module, text.as_ptr().cast()).result().unwrap();
        sys::cuModuleGetFunction(&mut function, module, c"scale".as_ptr()).result().unwrap();
    }
    function
}

#[test]
fn occupancy_follows_the_devices_limits() {
    let stream = stream();
    let kernel = function(&stream, "scale");
    assert_eq!(kernel.occupancy_max_active_blocks_per_multiprocessor(1024, 0, None).unwrap(), 2);
    assert_eq!(kernel.occupancy_max_active_blocks_per_multiprocessor(32, 0, None).unwrap(), 32);
    assert_eq!(kernel.occupancy_max_active_blocks_per_multiprocessor(32, 100 << 10, None).unwrap(), 2);
    assert_eq!(kernel.occupancy_max_active_blocks_per_multiprocessor(2048, 0, None).unwrap(), 0);
    assert!((16..=255).contains(&kernel.num_regs().unwrap()));
}

#[test]
fn clusters_have_to_fill_the_grid_and_must_not_be_too_large() {
    let stream = stream();
    let launch = |grid: u32, cluster: u32| {
        // SAFETY: a launch attribute is plain data; all zeros are one.
        let mut attribute: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
        attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        attribute.value.clusterDim =
            sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: cluster, y: 1, z: 1 };
        let config = sys::CUlaunchConfig {
            gridDimX: grid,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: 32,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: 0,
            hStream: stream.cu_stream(),
            attrs: &mut attribute,
            numAttrs: 1,
        };
        let kernel = raw_few_threads();
        // SAFETY: the kernel has no parameters.
        unsafe { sys::cuLaunchKernelEx(&config, kernel, std::ptr::null_mut(), std::ptr::null_mut()) }
    };
    assert_eq!(launch(6, 4), CUresult::CUDA_ERROR_INVALID_CLUSTER_SIZE);
    assert_eq!(launch(16, 16), CUresult::CUDA_ERROR_INVALID_CLUSTER_SIZE);
    assert_eq!(launch(8, 4), CUresult::CUDA_SUCCESS);
    stream.synchronize().unwrap();
}

fn raw_few_threads() -> sys::CUfunction {
    let text = std::ffi::CString::new(PTX).unwrap();
    let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: places for handles, and texts that end.
    unsafe {
        sys::cuModuleLoadData(&mut module, text.as_ptr().cast()).result().unwrap();
        sys::cuModuleGetFunction(&mut function, module, c"few_threads".as_ptr()).result().unwrap();
    }
    function
}

#[test]
fn functions_are_found_by_name_without_their_version() {
    common::load();
    let _context = context(0);
    let find = |name: &std::ffi::CStr| {
        let (mut address, mut found) =
            (std::ptr::null_mut(), sys::CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SUCCESS);
        // SAFETY: places for an address and a status.
        let status = unsafe { sys::cuGetProcAddress_v2(name.as_ptr(), &mut address, 13_000, 0, &mut found) };
        (status, address)
    };
    let (status, address) = find(c"cuDriverGetVersion");
    assert_eq!(status, CUresult::CUDA_SUCCESS);
    // SAFETY: that is the function's type.
    let version: extern "C" fn(*mut i32) -> i32 = unsafe { std::mem::transmute(address) };
    let mut number = 0;
    assert_eq!((version(&mut number), number), (0, 13_000));
    assert!(!find(c"cuMemAlloc").1.is_null());
    assert_eq!(find(c"cuNoSuchFunction").0, CUresult::CUDA_ERROR_NOT_FOUND);
}

#[test]
fn a_kernel_that_was_not_waited_for_is_reported_with_the_bytes() {
    let context = context(0);
    let (one, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let x = one.clone_htod(&[1_f32; 256]).unwrap();
    one.synchronize().unwrap();
    // Unloading its module would wait for the kernel.
    let scale = function(&one, "scale");
    // SAFETY: `x` has more than 100 elements.
    unsafe { one.launch_builder(&scale).arg(&x).arg(&3_f32).arg(&100_u32).launch(blocks(1, 128)) }.unwrap();
    // The bytes behind those that the kernel writes may be written by any other operation.
    assert_eq!(other.clone_dtoh(&x.slice(100..)).unwrap(), [1.0; 156]);
    assert_eq!(status(other.clone_dtoh(&x.slice(99..))), CUresult::CUDA_ERROR_LAUNCH_FAILED);
    let text = result::DriverError(CUresult::CUDA_ERROR_LAUNCH_FAILED).error_string().unwrap();
    let text = text.to_string_lossy();
    assert!(text.contains("kernel \"scale\"") && text.contains("bytes 396..400"), "{text}");
}

/// Each block writes its number and one, meets the others at the grid's barrier, and reads what the next block wrote.
const MEET: &str = r#"
.version 9.0
.target sm_90
.address_size 64
.visible .entry meet(.param .u64 words) {
    .reg .pred %p<2>; .reg .b32 %r<12>; .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [words];
    mov.u32 %r1, %envreg1; mov.u32 %r2, %envreg2; mov.b64 %rd2, {%r2, %r1};
    mov.u32 %r3, %ctaid.x; mov.u32 %r4, %nctaid.x; add.u32 %r5, %r3, 1;
    mul.wide.u32 %rd3, %r3, 4; add.s64 %rd4, %rd1, %rd3;
    st.global.u32 [%rd4], %r5;
    atom.add.acq_rel.gpu.u32 %r6, [%rd2+4], 1;
WAIT:
    ld.acquire.gpu.u32 %r7, [%rd2+4];
    setp.lt.u32 %p1, %r7, %r4;
    @%p1 bra WAIT;
    rem.u32 %r8, %r5, %r4; mul.wide.u32 %rd5, %r8, 4; add.s64 %rd6, %rd1, %rd5;
    ld.global.u32 %r9, [%rd6];
    st.global.u32 [%rd4+64], %r9;
    ret;
}
"#;

#[test]
fn blocks_of_a_cooperative_launch_meet() {
    let stream = stream();
    let module = stream.context().load_module(Ptx::from_src(MEET)).unwrap();
    let meet = module.load_function("meet").unwrap();
    let words = stream.alloc_zeros::<u32>(32).unwrap();
    // SAFETY: the kernel takes one pointer, to 32 words.
    unsafe { stream.launch_builder(&meet).arg(&words).launch_cooperative(blocks(4, 1)) }.unwrap();
    assert_eq!(stream.clone_dtoh(&words).unwrap()[16..20], [2, 3, 4, 1]);
    // More than the device holds at a time.
    // SAFETY: the same; it is refused.
    let refused = unsafe { stream.launch_builder(&meet).arg(&words).launch_cooperative(blocks(1000, 1)) };
    assert_eq!(status(refused), CUresult::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
}

/// One thread copies a box of 4 x 2 words from (x, y) to shared memory, and from there to `out`.
const LOAD_BOX: &str = r#"
.version 8.6
.target sm_90
.address_size 64
.visible .entry load_box(.param .align 64 .b8 map[128], .param .u64 out, .param .u32 x, .param .u32 y) {
    .reg .pred %p<2>; .reg .b32 %r<8>; .reg .b64 %rd<8>;
    .shared .align 128 .b8 box[32];
    .shared .align 8 .b8 barrier[8];
    mov.b64 %rd1, map;
    cvta.param.u64 %rd2, %rd1;
    ld.param.u64 %rd3, [out];
    ld.param.u32 %r1, [x];
    ld.param.u32 %r2, [y];
    mov.u32 %r3, box;
    mov.u32 %r4, barrier;
    mbarrier.init.shared::cta.b64 [%r4], 1;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 32;
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r3], [%rd2, {%r1, %r2}], [%r4];
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r4], 0;
    @!%p1 bra WAIT;
    mov.u32 %r5, 0;
NEXT:
    add.s32 %r6, %r3, %r5;
    ld.shared.u32 %r7, [%r6];
    cvt.u64.u32 %rd4, %r5;
    add.s64 %rd5, %rd3, %rd4;
    st.global.u32 [%rd5], %r7;
    add.s32 %r5, %r5, 4;
    setp.lt.u32 %p1, %r5, 32;
    @%p1 bra NEXT;
    ret;
}"#;

#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Map(sys::CUtensorMap);

// SAFETY: 128 plain bytes.
unsafe impl DeviceRepr for Map {}

/// A map of a matrix of 8 columns, of which a box has `width`.
fn encode(address: u64, rows: u64, width: u32) -> Result<Map, CUresult> {
    // SAFETY: a tensor map is plain words.
    let mut map = Map(unsafe { std::mem::zeroed() });
    // SAFETY: the lists are as long as the rank says.
    let status = unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut map.0,
            sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT32,
            2,
            address as *mut _,
            [8, rows].as_ptr(),
            [32].as_ptr(),
            [width, 2].as_ptr(),
            [1, 1].as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_NONE,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    if status == CUresult::CUDA_SUCCESS { Ok(map) } else { Err(status) }
}

#[test]
fn boxes_are_read_and_what_is_outside_is_zero() {
    let stream = stream();
    let matrix = stream.clone_htod(&(0..40).collect::<Vec<u32>>()).unwrap();
    let out = stream.alloc_zeros::<u32>(8).unwrap();
    let kernel =
        stream.context().load_module(Ptx::from_src(LOAD_BOX)).unwrap().load_function("load_box").unwrap();
    let map = encode(matrix.device_ptr(&stream).0, 5, 4).unwrap();
    let one = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };
    for ((x, y), wanted) in [((2, 1), [10, 11, 12, 13, 18, 19, 20, 21]), ((6, 4), [38, 39, 0, 0, 0, 0, 0, 0])]
    {
        // SAFETY: `out` has room for the box.
        unsafe { stream.launch_builder(&kernel).arg(&map).arg(&out).arg(&x).arg(&y).launch(one) }.unwrap();
        assert_eq!(stream.clone_dtoh(&out).unwrap(), wanted, "from ({x}, {y})");
    }
}

#[test]
fn a_map_that_a_device_would_refuse_is_refused() {
    let _stream = stream();
    assert_eq!(encode(1 << 44, 5, 257).err(), Some(CUresult::CUDA_ERROR_INVALID_VALUE));
    assert_eq!(encode((1 << 44) + 4, 5, 4).err(), Some(CUresult::CUDA_ERROR_INVALID_VALUE));
}
