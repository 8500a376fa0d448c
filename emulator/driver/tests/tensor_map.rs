//! A box of a matrix, copied by a tensor map that the driver made.
#![allow(unsafe_code)]

mod common;

use common::stream;
use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{DevicePtr, DeviceRepr, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;

/// One thread copies a box of 4 x 2 words from (x, y) to shared memory, and from there to `out`.
const PTX: &str = r#"
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
    let kernel = stream.context().load_module(Ptx::from_src(PTX)).unwrap().load_function("load_box").unwrap();
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
