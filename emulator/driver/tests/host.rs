//! Mistakes of a program on the host's side, and what the environment asks the driver to report or to let fail.
//!
//! The environment is read once a process, so a case with settings of its own is a test that is ignored here and run in a
//! process of its own.
#![allow(unsafe_code)]

mod common;

use common::{alone, context, status, stream};
use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, LaunchConfig, PushKernelArg, result};
use cudarc::nvrtc::Ptx;
use std::sync::Arc;

/// The text that this thread is told of a code.
fn told(code: CUresult) -> String {
    result::DriverError(code).error_string().unwrap().to_string_lossy().into_owned()
}

/// 64 page-locked bytes, all `value`.
fn pinned(value: u8) -> *mut u8 {
    // SAFETY: 64 bytes that no other code has.
    unsafe {
        let host = result::malloc_host(64, 0).unwrap().cast::<u8>();
        host.write_bytes(value, 64);
        host
    }
}

/// Copies 64 bytes to page-locked memory and does not wait.
fn bring(x: &CudaSlice<u8>, host: *mut u8, stream: &Arc<CudaStream>) {
    let (address, _guard) = x.device_ptr(stream);
    // SAFETY: 64 bytes of the host.
    let bytes = unsafe { std::slice::from_raw_parts_mut(host, 64) };
    // SAFETY: the host memory lives until the copy is waited for, unless that is the mistake.
    unsafe { result::memcpy_dtoh_async(bytes, address, stream.cu_stream()) }.unwrap();
}

/// Copies 64 bytes from page-locked memory and does not wait.
fn fetch(x: &CudaSlice<u8>, host: *mut u8, stream: &Arc<CudaStream>) {
    let (address, _guard) = x.device_ptr(stream);
    // SAFETY: as in `bring`.
    unsafe { result::memcpy_htod_async(address, std::slice::from_raw_parts(host, 64), stream.cu_stream()) }
        .unwrap();
}

#[test]
fn what_a_copy_brings_is_there_once_the_host_has_waited() {
    let stream = stream();
    let (x, host) = (stream.clone_htod(&[7_u8; 64]).unwrap(), pinned(1));
    for how in ["stream", "event", "context", "query"] {
        // SAFETY: no copy is under way.
        unsafe { host.write_bytes(1, 64) };
        bring(&x, host, &stream);
        // SAFETY: bytes of this test.
        let early = unsafe { host.read() };
        assert_eq!(early, phalanx_ptx::Memory::POISON, "{how}: it is read before a wait");
        let event = stream.record_event(None).unwrap();
        match how {
            "stream" => stream.synchronize().unwrap(),
            "event" => event.synchronize().unwrap(),
            "query" => while !event.is_complete() {},
            _ => stream.context().synchronize().unwrap(),
        }
        // SAFETY: as above.
        assert_eq!(unsafe { std::slice::from_raw_parts(host, 64) }, [7; 64], "{how}");
    }
    // SAFETY: no copy uses it any more.
    unsafe { result::free_host(host.cast()) }.unwrap();
}

#[test]
fn a_wait_for_another_stream_is_none() {
    let context = context(0);
    let (one, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let (x, host) = (one.clone_htod(&[7_u8; 64]).unwrap(), pinned(1));
    one.synchronize().unwrap();
    bring(&x, host, &one);
    other.synchronize().unwrap();
    // SAFETY: bytes of this test.
    assert_eq!(unsafe { host.read() }, phalanx_ptx::Memory::POISON);
    other.wait(&one.record_event(None).unwrap()).unwrap();
    other.synchronize().unwrap();
    // SAFETY: as above; the second stream has waited for the first.
    unsafe {
        assert_eq!(host.read(), 7);
        result::free_host(host.cast()).unwrap();
    }
}

#[test]
fn copies_that_are_ordered_on_the_device_see_what_others_brought() {
    let stream = stream();
    let (x, y, host) =
        (stream.clone_htod(&[7_u8; 64]).unwrap(), stream.alloc_zeros::<u8>(64).unwrap(), pinned(1));
    bring(&x, host, &stream);
    fetch(&y, host, &stream);
    // The memory is used again, without a wait of the host between.
    bring(&x, host, &stream);
    bring(&y, host, &stream);
    fetch(&x, host, &stream);
    bring(&x, host, &stream);
    assert_eq!(stream.clone_dtoh(&y).unwrap(), [7; 64]);
    stream.synchronize().unwrap();
    // SAFETY: all copies were waited for.
    unsafe {
        assert_eq!(host.read(), 7);
        result::free_host(host.cast()).unwrap();
    }
}

#[test]
fn memory_that_changes_before_a_copy_was_waited_for_is_found() {
    for from in [true, false] {
        let stream = stream();
        let (x, host) = (stream.clone_htod(&[7_u8; 64]).unwrap(), pinned(1));
        if from {
            fetch(&x, host, &stream)
        } else {
            bring(&x, host, &stream)
        }
        // SAFETY: bytes of this test; the missing wait is the mistake.
        unsafe { host.add(5).write(9) };
        assert_eq!(status(stream.synchronize()), CUresult::CUDA_ERROR_LAUNCH_FAILED);
        let (text, verb) = (told(CUresult::CUDA_ERROR_LAUNCH_FAILED), if from { "from" } else { "to" });
        assert!(text.contains(&format!("that it copies {verb} before it had waited for the copy")), "{text}");
    }
}

#[test]
fn memory_that_is_freed_before_a_copy_was_waited_for_is_found() {
    for from in [true, false] {
        let stream = stream();
        let (x, host) = (stream.clone_htod(&[7_u8; 64]).unwrap(), pinned(1));
        stream.synchronize().unwrap();
        if from {
            fetch(&x, host, &stream)
        } else {
            bring(&x, host, &stream)
        }
        // SAFETY: no other code has the memory.
        unsafe { result::free_host(host.cast()) }.unwrap();
        assert_eq!(status(stream.synchronize()), CUresult::CUDA_ERROR_LAUNCH_FAILED);
        let text = told(CUresult::CUDA_ERROR_LAUNCH_FAILED);
        assert!(
            text.contains("page-locked memory is freed before the host has waited for a copy of 64 bytes"),
            "{text}"
        );
    }
}

/// An allocation by a function that a release build keeps too, so that reports can name it.
#[inline(never)]
fn hundred_numbers(stream: &Arc<CudaStream>) -> CudaSlice<u32> {
    // SAFETY: any bytes are a u32.
    let raw = unsafe { stream.alloc::<u32>(100) }.unwrap();
    std::hint::black_box(raw)
}

#[test]
fn bytes_that_nothing_has_written_do_not_come_to_the_host() {
    let stream = stream();
    let raw = hundred_numbers(&stream);
    assert_eq!(status(stream.clone_dtoh(&raw)), CUresult::CUDA_ERROR_LAUNCH_FAILED);
    let text = told(CUresult::CUDA_ERROR_LAUNCH_FAILED);
    for part in ["nothing has written 400 at offset 0", "made by cuMemAllocAsync (object", "hundred_numbers"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
}

/// `out[0] = x[0] + 1`.
const ONE_MORE: &str = ".version 9.0
.target sm_90
.address_size 64
.visible .entry one_more(.param .u64 x, .param .u64 out) {
    .reg .b32 %r<4>; .reg .f32 %f<4>; .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [x];
    ld.param.u64 %rd2, [out];
    ld.global.u32 %r1, [%rd1];
    add.s32 %r2, %r1, 1;
    st.global.u32 [%rd2], %r2;
    mov.f32 %f1, 0f3f000000;
    ex2.approx.f32 %f2, %f1;
    st.global.f32 [%rd2+4], %f2;
    ret;
}";

fn one_more(stream: &Arc<CudaStream>, x: &CudaSlice<u32>) -> CudaSlice<u32> {
    let kernel =
        stream.context().load_module(Ptx::from_src(ONE_MORE)).unwrap().load_function("one_more").unwrap();
    let out = stream.alloc_zeros::<u32>(2).unwrap();
    let shape = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };
    // SAFETY: the arguments are the kernel's.
    unsafe { stream.launch_builder(&kernel).arg(x).arg(&out).launch(shape) }.unwrap();
    out
}

#[test]
fn what_a_kernel_computed_from_unwritten_bytes_names_the_kernel() {
    let stream = stream();
    // SAFETY: any bytes are a u32.
    let raw = unsafe { stream.alloc::<u32>(100) }.unwrap();
    let out = one_more(&stream, &raw);
    stream.synchronize().unwrap();
    assert_eq!(status(stream.clone_dtoh(&out)), CUresult::CUDA_ERROR_LAUNCH_FAILED);
    let text = told(CUresult::CUDA_ERROR_LAUNCH_FAILED);
    assert!(text.contains("kernel \"one_more\" at PTX line 10") && text.contains("at PTX line 8"), "{text}");
}

#[test]
fn unwritten_bytes_are_warned_of_or_left_alone_as_the_environment_says() {
    let (right, said) = alone("copy_of_unwritten_bytes", &[("PHALANX_EMULATOR_UNWRITTEN", "warn")]);
    assert!(right && said.contains("a copy to the host: uninitialised read"), "{said}");
    let (right, said) = alone("copy_of_unwritten_bytes", &[("PHALANX_EMULATOR_UNWRITTEN", "off")]);
    assert!(right && !said.contains("uninitialised"), "{said}");
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn copy_of_unwritten_bytes() {
    let stream = stream();
    // SAFETY: any bytes are a u32.
    let raw = unsafe { stream.alloc::<u32>(100) }.unwrap();
    let poison = u32::from_le_bytes([phalanx_ptx::Memory::POISON; 4]);
    assert_eq!(stream.clone_dtoh(&raw).unwrap(), vec![poison; 100]);
}

#[test]
fn a_free_that_is_refused_ends_the_context() {
    let context = context(0);
    // SAFETY: no other code uses the address.
    unsafe {
        let address = result::malloc_sync(64).unwrap();
        result::free_sync(address).unwrap();
        assert_eq!(status(result::free_sync(address)), CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    assert_eq!(status(context.synchronize()), CUresult::CUDA_ERROR_INVALID_VALUE);
    let text = told(CUresult::CUDA_ERROR_INVALID_VALUE);
    assert!(text.contains("cuMemFree: the free is refused: no allocation begins at"), "{text}");
}

#[test]
fn a_free_that_is_refused_may_have_its_status_alone() {
    let (right, said) = alone("free_twice", &[("PHALANX_EMULATOR_FREES", "status")]);
    assert!(right, "{said}");
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn free_twice() {
    let context = context(0);
    // SAFETY: no other code uses the address.
    unsafe {
        let address = result::malloc_sync(64).unwrap();
        result::free_sync(address).unwrap();
        assert_eq!(status(result::free_sync(address)), CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    context.synchronize().unwrap();
}

#[test]
fn what_is_left_when_a_context_ends_is_listed_with_where_it_was_made() {
    let (right, said) = alone("leaks", &[("PHALANX_EMULATOR_LEAKS", "report")]);
    assert!(right, "{said}");
    let report = &said[said.find("leaks: context").expect(&said)..];
    assert!(report.contains("has ended, and 4 objects are left, 96 bytes of device memory:"), "{said}");
    for part in [
        "allocation 0x",
        " of 96 bytes, made by cuMemAlloc (object",
        "page-locked allocation",
        "event",
        "stream",
        "from host::left_behind",
    ] {
        assert!(report.contains(part), "{part}: {said}");
    }
    assert!(said.contains("leaks: the process has ended, and nothing is left"), "{said}");
    let (_, said) = alone("leaks", &[]);
    assert!(!said.contains("leaks:"), "only where it is asked for: {said}");
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn leaks() {
    common::load();
    // SAFETY: plain calls of the driver. The objects that stay are the subject of the test.
    unsafe {
        result::init().unwrap();
        let mut context = std::ptr::null_mut();
        sys::cuCtxCreate_v4(&mut context, std::ptr::null_mut(), 0, 0).result().unwrap();
        left_behind();
        sys::cuCtxDestroy_v2(context).result().unwrap();
    }
}

/// Leaves an allocation, page-locked memory, an event and a stream. A release build keeps the function too, so that reports can name it.
#[inline(never)]
fn left_behind() {
    // SAFETY: plain calls of the driver. The objects that stay are the subject of the test.
    unsafe {
        let (kept, freed) = (result::malloc_sync(96).unwrap(), result::malloc_sync(32).unwrap());
        result::free_sync(freed).unwrap();
        result::malloc_host(64, 0).unwrap();
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).unwrap();
        result::event::destroy(result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).unwrap()).unwrap();
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking).unwrap();
        assert!(kept != 0 && !event.is_null() && !stream.is_null());
    }
}

/// The function by which a test chooses the allocation that fails.
fn fail_allocation(number: u64) -> u64 {
    // SAFETY: the driver is loaded, and has a function of this name and type.
    unsafe {
        let driver = libloading::Library::new(phalanx_emulated_driver::library().unwrap()).unwrap();
        let choose =
            driver.get::<extern "C" fn(u64) -> u64>(b"phalanx_emulated_driver_fail_allocation").unwrap();
        choose(number)
    }
}

#[test]
fn each_allocation_can_be_made_to_fail() {
    let (right, said) = alone("allocations_fail_in_turn", &[]);
    assert!(right, "{said}");
    let (right, said) = alone("the_second_allocation_fails", &[("PHALANX_EMULATOR_FAIL_ALLOCATION", "2")]);
    assert!(right && said.contains("this allocation was chosen to fail"), "{said}");
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn allocations_fail_in_turn() {
    let stream = stream();
    let used = |stream: &Arc<CudaStream>| {
        stream.synchronize().unwrap();
        let (free, total) = result::mem_get_info().unwrap();
        total - free
    };
    let before = used(&stream);
    let work = || -> Result<Vec<u8>, cudarc::driver::DriverError> {
        let (x, y) = (stream.clone_htod(&[3_u8; 64])?, stream.alloc_zeros::<u8>(64)?);
        let mut z = stream.alloc_zeros::<u8>(64)?;
        stream.memcpy_dtod(&x, &mut z)?;
        drop(y);
        stream.clone_dtoh(&z)
    };
    fail_allocation(0);
    assert_eq!(work(), Ok(vec![3; 64]));
    let allocations = fail_allocation(0);
    assert_eq!(allocations, 3);
    for number in 1..=allocations {
        fail_allocation(number);
        assert_eq!(status(work()), CUresult::CUDA_ERROR_OUT_OF_MEMORY, "allocation {number}");
        assert_eq!(used(&stream), before, "allocation {number}");
        assert_eq!(work(), Ok(vec![3; 64]), "behind the one that fails all go on");
    }
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn the_second_allocation_fails() {
    let stream = stream();
    let first = stream.alloc_zeros::<u8>(64).unwrap();
    assert_eq!(status(stream.alloc_zeros::<u8>(64)), CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    stream.alloc_zeros::<u8>(64).unwrap();
    drop(first);
}

#[test]
fn counters_go_to_stderr_or_to_a_file() {
    let (right, said) = alone("one_launch", &[("PHALANX_EMULATOR_COUNTERS", "print")]);
    assert!(
        right && said.contains("kernel \"one_more\": 1 launches; global: 3 requests, 1.00 sectors each"),
        "{said}"
    );
    let file = std::env::temp_dir().join(format!("phalanx-counters-{}", std::process::id()));
    let (right, said) = alone("one_launch", &[("PHALANX_EMULATOR_COUNTERS", file.to_str().unwrap())]);
    assert!(right, "{said}");
    let table = std::fs::read_to_string(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split('\t').collect()).collect();
    assert_eq!(rows[0][..4], ["kernel", "launches", "global requests", "sectors"]);
    assert_eq!(rows[1][..4], ["one_more", "1", "3", "3"]);
}

#[test]
fn the_errors_of_approximate_instructions_and_the_addresses_follow_their_seeds() {
    let end = |name: &str, value: &str| {
        let (right, said) = alone("one_launch", &[(name, value)]);
        assert!(right, "{said}");
        let found = said.lines().find(|line| line.contains("launched:")).expect(&said).to_string();
        let (bits, address) = found.split_once(" at ").unwrap();
        (bits.to_string(), address.to_string())
    };
    let (exact, ascending) = end("PHALANX_EMULATOR_STREAMS", "eager");
    assert!((1..9).any(|seed| end("PHALANX_EMULATOR_APPROXIMATE", &seed.to_string()).0 != exact));
    let one = end("PHALANX_EMULATOR_ADDRESSES", "random:1").1;
    assert_eq!(one, end("PHALANX_EMULATOR_ADDRESSES", "random:1").1);
    assert!(one != ascending && one != end("PHALANX_EMULATOR_ADDRESSES", "random:2").1);
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn one_launch() {
    let stream = stream();
    let out = one_more(&stream, &stream.clone_htod(&[41_u32]).unwrap());
    let values = stream.clone_dtoh(&out).unwrap();
    assert_eq!(values[0], 42);
    let (address, _guard) = out.device_ptr(&stream);
    println!("launched: {:#x} at {address:#x}", values[1]);
}
