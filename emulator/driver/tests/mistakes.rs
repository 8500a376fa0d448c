//! What a program does wrong when it launches a kernel, and what the report says.
#![allow(unsafe_code)]

mod common;

use std::ffi::{CString, c_void};
use std::ptr::{null_mut, without_provenance_mut};

use common::context;
use cudarc::driver::{result, sys};
use sys::CUresult;

const PTX: &str = r#"
.version 9.0
.target sm_90
.address_size 64

.global .u64 nothing[1];
.global .texref texture;

.visible .entry four(.param .u64 out, .param .u32 a, .param .u64 b, .param .align 4 .b8 c[12]) {
    .reg .b32 %r<4>; .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [out];
    ld.param.u32 %r1, [a];
    ld.param.u32 %r2, [c+8];
    add.u32 %r1, %r1, %r2;
    st.global.u32 [%rd1], %r1;
    ret;
}

.visible .entry calls_nothing() {
    .reg .b64 %rd1;
    ld.global.u64 %rd1, [nothing];
    P: .callprototype _ ();
    call %rd1, P;
    ret;
}

.visible .entry looks_up(.param .u64 out) {
    .reg .f32 %f<6>;
    tex.2d.v4.f32.f32 {%f1, %f2, %f3, %f4}, [texture, {%f5, %f5}];
    ret;
}

.visible .entry meets() {
    .reg .b32 %r1; .reg .pred %p1;
    mov.u32 %r1, %envreg2;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra DONE;
    trap;
DONE:
    ret;
}
"#;

/// A kernel of a module that is loaded into the current context.
fn function(name: &str) -> sys::CUfunction {
    let (text, name) = (CString::new(PTX).unwrap(), CString::new(name).unwrap());
    let (mut module, mut function) = (null_mut(), null_mut());
    // SAFETY: places for handles, and texts that end.
    unsafe {
        sys::cuModuleLoadData(&mut module, text.as_ptr().cast()).result().unwrap();
        sys::cuModuleGetFunction(&mut function, module, name.as_ptr()).result().unwrap();
    }
    function
}

fn launch(function: sys::CUfunction, pointers: *mut *mut c_void, extra: *mut *mut c_void) -> CUresult {
    // SAFETY: the driver checks the lists, whose mistakes are the subject of these tests.
    unsafe { sys::cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, null_mut(), pointers, extra) }
}

fn text(code: CUresult) -> String {
    result::DriverError(code).error_string().unwrap().to_string_lossy().into_owned()
}

/// A word in the device's memory.
fn word() -> u64 {
    // SAFETY: the context is current.
    unsafe { result::malloc_sync(4) }.unwrap()
}

#[test]
fn pointers_to_arguments_that_are_not_there_are_refused() {
    let _context = context(0);
    let (four, mut out, mut a, mut b, mut c) = (function("four"), word(), 5_u32, 0_u64, [0_u32, 0, 37]);
    let right =
        [(&raw mut out).cast::<c_void>(), (&raw mut a).cast(), (&raw mut b).cast(), (&raw mut c).cast()];
    assert_eq!(launch(four, right.clone().as_mut_ptr(), null_mut()), CUresult::CUDA_SUCCESS);
    let mut found = [0_u32];
    // SAFETY: the word is there.
    unsafe { result::memcpy_dtoh_sync(&mut found, out) }.unwrap();
    assert_eq!(found, [42]);
    for missing in 0..4 {
        for (value, what) in
            [(null_mut(), "is null"), (without_provenance_mut(0x21), "0x21"), (null_mut(), "4 parameters")]
        {
            let mut wrong = right;
            wrong[missing] = value;
            assert_eq!(launch(four, wrong.as_mut_ptr(), null_mut()), CUresult::CUDA_ERROR_INVALID_VALUE);
            let said = text(CUresult::CUDA_ERROR_INVALID_VALUE);
            assert!(
                said.contains(what)
                    && said.contains(&format!("parameter {missing}"))
                    && said.contains("\"four\""),
                "{said}"
            );
        }
    }
    assert_eq!(launch(four, without_provenance_mut(0x1000), null_mut()), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert!(text(CUresult::CUDA_ERROR_INVALID_VALUE).contains("is not there"));
    assert_eq!(launch(four, null_mut(), null_mut()), CUresult::CUDA_ERROR_INVALID_VALUE);
}

#[test]
fn a_buffer_of_arguments_has_the_kernels_size() {
    let _context = context(0);
    let (four, out, end) = (function("four"), word(), null_mut());
    let mut bytes = out.to_le_bytes().to_vec();
    [5_u32, 0, 0, 0, 0, 0, 37, 0].iter().for_each(|word| bytes.extend(word.to_le_bytes()));
    let key = without_provenance_mut::<c_void>;
    for (mut size, right) in [(0_usize, false), (35, false), (36, true), (37, false), (64, false)] {
        let mut extra = [key(1), bytes.as_mut_ptr().cast(), key(2), (&raw mut size).cast(), end];
        let status = launch(four, null_mut(), extra.as_mut_ptr());
        assert_eq!(status == CUresult::CUDA_SUCCESS, right, "{size} bytes: {status:?}");
    }
    let mut size = 36_usize;
    for mut wrong in [
        [key(1), key(0x21), key(2), (&raw mut size).cast(), end],
        [key(1), bytes.as_mut_ptr().cast(), key(2), key(0x21), end],
        [key(1), bytes.as_mut_ptr().cast(), end, end, end],
        [key(7), end, end, end, end],
    ] {
        let status = launch(four, null_mut(), wrong.as_mut_ptr());
        assert_eq!(status, CUresult::CUDA_ERROR_INVALID_VALUE, "{wrong:?}");
    }
}

/// Launches a kernel that faults: the status of the next call, and its text.
fn fault(name: &str) -> (CUresult, String) {
    let _context = context(0);
    let (function, mut out) = (function(name), 0_u64);
    let mut pointers = [(&raw mut out).cast::<c_void>()];
    launch(function, pointers.as_mut_ptr(), null_mut());
    let status = result::ctx::synchronize().unwrap_err().0;
    (status, text(status))
}

#[test]
fn faults_name_the_kernel_once_and_what_to_do() {
    for (name, status, what) in [
        ("calls_nothing", CUresult::CUDA_ERROR_INVALID_PC, "null pointer to a function"),
        (
            "looks_up",
            CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION,
            "instruction `tex.2d.v4.f32.f32`, at PTX line 29",
        ),
        (
            "meets",
            CUresult::CUDA_ERROR_LAUNCH_FAILED,
            "not cooperative (cuLaunchCooperativeKernel), at PTX line",
        ),
    ] {
        let (found, text) = fault(name);
        assert!(found == status && text.contains(what), "{found:?}: {text}");
        assert_eq!(text.matches("kernel \"").count(), 1, "{text}");
        assert!(text.contains(&format!("kernel \"{name}\" on the default stream")), "{text}");
    }
}
