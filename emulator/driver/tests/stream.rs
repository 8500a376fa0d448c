//! Streams, events and host functions through cudarc's safe interface.
#![allow(unsafe_code)]

mod common;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Barrier, Mutex};

use common::{context, status, stream};
use cudarc::driver::{result, sys};

#[test]
fn work_of_a_stream_runs_in_order() {
    let stream = stream();
    let mut x = stream.alloc_zeros::<u8>(8).unwrap();
    for value in 1..=3 {
        stream.memcpy_htod(&[value; 8], &mut x).unwrap();
    }
    assert_eq!(stream.clone_dtoh(&x).unwrap(), [3; 8]);
}

#[test]
fn an_event_orders_two_streams() {
    let context = context(0);
    let (one, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let x = one.clone_htod(&[7_u32; 16]).unwrap();
    let event = one.record_event(None).unwrap();
    other.wait(&event).unwrap();
    let y = other.clone_dtod(&x).unwrap();
    assert_eq!(other.clone_dtoh(&y).unwrap(), [7; 16]);
    assert!(event.is_complete());
}

#[test]
fn two_streams_without_an_event_between_them_are_reported() {
    let context = context(0);
    let (one, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let x = one.clone_htod(&[7_u32; 16]).unwrap();
    // The missing `other.wait(&event)`.
    let found = other.clone_dtod(&x).and_then(|_| other.synchronize());
    assert_eq!(status(found), sys::CUresult::CUDA_ERROR_LAUNCH_FAILED);
    let text = launch_failure();
    assert!(
        text.contains("missing wait: this reads")
            && text.contains("a copy of 64 bytes from the host")
            && text.contains("bytes 0..64"),
        "{text}"
    );
}

/// The text of a launch failure as this thread is told it.
fn launch_failure() -> String {
    let error = result::DriverError(sys::CUresult::CUDA_ERROR_LAUNCH_FAILED);
    error.error_string().unwrap().to_string_lossy().into_owned()
}

#[test]
fn the_reason_of_a_fault_is_its_contexts_whichever_thread_it_happened_on() {
    static HELD: Barrier = Barrier::new(2);
    extern "C" fn hold(_: *mut std::ffi::c_void) {
        HELD.wait(); // It has begun.
        HELD.wait(); // It may end.
    }
    // A fault of this thread's own, before.
    let earlier = context(0);
    let (one, other) = (earlier.new_stream().unwrap(), earlier.new_stream().unwrap());
    let x = one.clone_htod(&[7_u8; 64]).unwrap();
    assert!(other.clone_dtod(&x).and_then(|_| other.synchronize()).is_err());
    assert!(launch_failure().contains("bytes 0..64"), "{}", launch_failure());

    let context = context(0);
    let (one, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let mut x = one.clone_htod(&[7_u8; 32]).unwrap();
    one.synchronize().unwrap();
    std::thread::scope(|scope| {
        let holder = scope.spawn(|| {
            context.bind_to_thread().unwrap();
            // SAFETY: the function needs no data.
            unsafe { sys::cuLaunchHostFunc(one.cu_stream(), Some(hold), std::ptr::null_mut()) }.result()
        });
        HELD.wait();
        one.memcpy_htod(&[8_u8; 32], &mut x).unwrap();
        // The missing wait: found when the copy's turn comes, on the thread whose function was before it.
        let y = other.clone_dtod(&x).unwrap();
        HELD.wait();
        holder.join().unwrap().unwrap();
        assert_eq!(status(one.synchronize()), sys::CUresult::CUDA_ERROR_LAUNCH_FAILED);
        assert!(launch_failure().contains("bytes 0..32"), "{}", launch_failure());
        drop(y);
    });
}

#[test]
fn a_synchronisation_orders_what_comes_after_it() {
    let context = context(0);
    let (one, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let x = one.clone_htod(&[7_u32; 16]).unwrap();
    one.synchronize().unwrap();
    assert_eq!(other.clone_dtoh(&x).unwrap(), [7; 16]);
}

#[test]
fn the_legacy_default_stream_is_ordered_with_blocking_streams() {
    let context = context(0);
    let legacy = context.default_stream();
    // SAFETY: the stream lives as long as this test.
    let blocking = result::stream::create(result::stream::StreamKind::Default).unwrap();
    let x = legacy.clone_htod(&[1_u8; 4]).unwrap();
    let (address, _guard) = cudarc::driver::DevicePtr::device_ptr(&x, &legacy);
    // SAFETY: 4 bytes of `x`.
    unsafe { result::memset_d8_async(address, 9, 4, blocking) }.unwrap();
    drop(_guard);
    assert_eq!(legacy.clone_dtoh(&x).unwrap(), [9; 4]);
    legacy.synchronize().unwrap();
}

#[test]
fn events_tell_the_time_between_them() {
    let stream = stream();
    let timed = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
    let start = stream.record_event(timed).unwrap();
    stream.clone_htod(&vec![1_u8; 1 << 20]).unwrap();
    let end = stream.record_event(timed).unwrap();
    let ms = start.elapsed_ms(&end).unwrap();
    assert!((0.0..10_000.0).contains(&ms), "{ms}");
    let untimed = stream.record_event(None).unwrap();
    assert_eq!(status(start.elapsed_ms(&untimed)), sys::CUresult::CUDA_ERROR_INVALID_HANDLE);
}

#[test]
fn a_host_function_runs_in_stream_order_and_must_not_call_the_driver() {
    static SEEN: Mutex<Option<sys::CUresult>> = Mutex::new(None);
    unsafe extern "C" fn calls_the_driver(_: *mut std::ffi::c_void) {
        let mut version = 0;
        // SAFETY: a place for an int.
        let init = unsafe { sys::cuInit(0) };
        assert_eq!(init, sys::CUresult::CUDA_SUCCESS);
        // SAFETY: as above.
        *SEEN.lock().unwrap() = Some(unsafe { sys::cuCtxGetDevice(&mut version) });
    }
    let stream = stream();
    // SAFETY: the function needs no data.
    unsafe { sys::cuLaunchHostFunc(stream.cu_stream(), Some(calls_the_driver), std::ptr::null_mut()) }
        .result()
        .unwrap();
    stream.synchronize().unwrap();
    assert_eq!(*SEEN.lock().unwrap(), Some(sys::CUresult::CUDA_ERROR_NOT_PERMITTED));
}

#[test]
fn host_functions_of_several_threads_all_run() {
    let context = context(0);
    let count = Arc::new(AtomicU32::new(0));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let stream = context.new_stream().unwrap();
                for _ in 0..50 {
                    let count = count.clone();
                    stream.memcpy_htod(&[1_u8; 16], &mut stream.alloc_zeros::<u8>(16).unwrap()).unwrap();
                    count.fetch_add(1, Ordering::Relaxed);
                }
                stream.synchronize().unwrap();
            });
        }
    });
    assert_eq!(count.load(Ordering::Relaxed), 200);
}

#[test]
fn a_destroyed_stream_is_an_invalid_handle() {
    let _context = context(0);
    let stream = result::stream::create(result::stream::StreamKind::NonBlocking).unwrap();
    // SAFETY: it is destroyed once, and then only named.
    unsafe {
        result::stream::destroy(stream).unwrap();
        assert_eq!(status(result::stream::synchronize(stream)), sys::CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
}

#[test]
fn memory_used_after_its_free_was_queued_elsewhere_is_reported() {
    let context = context(0);
    let (one, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let x = one.clone_htod(&[7_u8; 256]).unwrap();
    one.synchronize().unwrap();
    let y = other.clone_dtod(&x).unwrap();
    // Freed on its own stream, while nothing says that the other one is through with it.
    drop(x);
    assert_eq!(status(one.synchronize()), sys::CUresult::CUDA_ERROR_LAUNCH_FAILED);
    drop(y);
}
