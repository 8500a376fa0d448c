//! Streams, events and host functions through cudarc's safe interface, and deferred streams: a program with a missing
//! wait must come out wrong for some order, and one without for none.
//!
//! The mode is read once a process, so each case of a deferred stream is a test that is ignored here and run in a
//! process of its own.
#![allow(unsafe_code)]

mod common;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Barrier, Mutex};

use common::{alone, context, status, stream};
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

/// How many orders are tried.
const SEEDS: u32 = 12;

/// Runs a case of this file in a process of its own; whether it succeeded, and what it said.
fn run(case: &str, streams: &str, races: &str) -> (bool, String) {
    alone(case, &[("PHALANX_EMULATOR_STREAMS", streams), ("PHALANX_EMULATOR_RACES", races)])
}

fn successes(case: &str, races: &str) -> u32 {
    (0..SEEDS).map(|seed| u32::from(run(case, &format!("deferred:{seed}"), races).0)).sum()
}

#[test]
fn a_missing_wait_shows_as_wrong_values_for_some_orders() {
    let right = successes("without_a_wait", "off");
    assert!(right > 0 && right < SEEDS, "{right} of {SEEDS} orders were right");
    assert!(run("without_a_wait", "eager", "off").0, "eager streams hide it");
}

#[test]
fn a_missing_wait_is_named_whatever_the_order() {
    for mode in ["eager".to_string()].into_iter().chain((0..6).map(|seed| format!("deferred:{seed}"))) {
        let (right, said) = run("without_a_wait", &mode, "error");
        assert!(!right && said.contains("missing wait: this"), "{mode}: {said}");
        let (_, said) = run("without_a_wait", &mode, "warn");
        assert!(said.contains("missing wait: this"), "{mode}: {said}");
    }
}

#[test]
fn with_an_event_every_order_is_right() {
    assert_eq!(successes("with_a_wait", "error"), SEEDS);
}

#[test]
fn a_graph_with_a_fork_is_right_in_every_order() {
    assert_eq!(successes("a_forked_graph", "error"), SEEDS);
}

#[test]
fn a_host_buffer_that_was_not_waited_for_is_not_written_in_some_orders() {
    let right = successes("a_host_buffer_read_too_early", "error");
    assert!(right < SEEDS, "{right} of {SEEDS} orders were right");
}

#[test]
fn changing_pinned_memory_under_a_queued_copy_is_found() {
    let (right, said) = run("pinned_memory_changed", "deferred:1", "error");
    assert!(right, "{said}");
    assert!(said.contains("was changed after it was queued and before it ran"), "{said}");
}

#[test]
fn freeing_pinned_memory_under_a_queued_copy_is_found() {
    let (right, said) = run("pinned_memory_freed", "deferred:1", "error");
    assert!(right, "{said}");
    assert!(
        said.contains("page-locked memory is freed before the host has waited for a copy of 64 bytes"),
        "{said}"
    );
}

#[test]
fn asking_for_an_event_again_and_again_comes_to_an_end() {
    assert_eq!(successes("polling", "error"), SEEDS);
}

#[test]
fn the_same_seed_gives_the_same_end() {
    let ends = |seed: u32| -> Vec<bool> {
        (0..3).map(|_| run("without_a_wait", &format!("deferred:{seed}"), "off").0).collect()
    };
    for seed in 0..4 {
        let ends = ends(seed);
        assert!(ends.iter().all(|end| *end == ends[0]), "{ends:?}");
    }
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn without_a_wait() {
    producer_and_consumer(false);
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn with_a_wait() {
    producer_and_consumer(true);
}

fn producer_and_consumer(wait: bool) {
    let context = context(0);
    let (one, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let mut x = one.clone_htod(&[1_u32; 64]).unwrap();
    let mut y = one.alloc_zeros::<u32>(64).unwrap();
    one.synchronize().unwrap();
    one.memcpy_htod(&[2_u32; 64], &mut x).unwrap();
    if wait {
        other.wait(&one.record_event(None).unwrap()).unwrap();
    }
    other.memcpy_dtod(&x, &mut y).unwrap();
    let result = other.clone_dtoh(&y).unwrap();
    one.synchronize().unwrap();
    assert_eq!(result, [2; 64]);
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn a_forked_graph() {
    let context = context(0);
    let (origin, side) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let mut x = origin.clone_htod(&[3_u8; 16]).unwrap();
    let (mut y, mut z) = (origin.alloc_zeros::<u8>(16).unwrap(), origin.alloc_zeros::<u8>(16).unwrap());
    origin.synchronize().unwrap();
    origin.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    side.wait(&origin.record_event(None).unwrap()).unwrap();
    side.memcpy_dtod(&x, &mut y).unwrap();
    origin.memcpy_dtod(&x, &mut z).unwrap();
    origin.wait(&side.record_event(None).unwrap()).unwrap();
    origin.memcpy_dtod(&y, &mut z).unwrap();
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = origin.end_capture(flags).unwrap().unwrap();
    for value in 4..8 {
        origin.memcpy_htod(&[value; 16], &mut x).unwrap();
        graph.launch().unwrap();
        assert_eq!(origin.clone_dtoh(&y).unwrap(), [value; 16]);
        assert_eq!(origin.clone_dtoh(&z).unwrap(), [value; 16]);
    }
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn a_host_buffer_read_too_early() {
    let context = context(0);
    let (one, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let x = one.clone_htod(&[1_u8; 64]).unwrap();
    one.synchronize().unwrap();
    // SAFETY: 64 bytes that no other code has.
    unsafe {
        let host = result::malloc_host(64, 0).unwrap().cast::<u8>();
        host.write_bytes(0, 64);
        let (address, _guard) = cudarc::driver::DevicePtr::device_ptr(&x, &one);
        let bytes = std::slice::from_raw_parts_mut(host, 64);
        result::memcpy_dtoh_async(bytes, address, one.cu_stream()).unwrap();
        // The wrong stream.
        other.synchronize().unwrap();
        let _ = other.clone_htod(&[1_u8]).unwrap();
        assert_eq!(host.read(), 1);
    }
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn pinned_memory_changed() {
    let context = context(0);
    let stream = context.new_stream().unwrap();
    let x = stream.alloc_zeros::<u8>(64).unwrap();
    stream.synchronize().unwrap();
    // SAFETY: 64 bytes that no other code has.
    unsafe {
        let host = result::malloc_host(64, 0).unwrap().cast::<u8>();
        host.write_bytes(1, 64);
        let (address, _guard) = cudarc::driver::DevicePtr::device_ptr(&x, &stream);
        result::memcpy_htod_async(address, std::slice::from_raw_parts(host, 64), stream.cu_stream()).unwrap();
        host.write_bytes(2, 64);
    }
    assert_eq!(status(stream.synchronize()), sys::CUresult::CUDA_ERROR_LAUNCH_FAILED);
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn pinned_memory_freed() {
    let context = context(0);
    let stream = context.new_stream().unwrap();
    let x = stream.alloc_zeros::<u8>(64).unwrap();
    // SAFETY: 64 bytes that no other code has.
    unsafe {
        let host = result::malloc_host(64, 0).unwrap();
        host.cast::<u8>().write_bytes(1, 64);
        let (address, _guard) = cudarc::driver::DevicePtr::device_ptr(&x, &stream);
        let bytes = std::slice::from_raw_parts(host.cast::<u8>(), 64);
        result::memcpy_htod_async(address, bytes, stream.cu_stream()).unwrap();
        result::free_host(host).unwrap();
    }
    assert_eq!(status(stream.synchronize()), sys::CUresult::CUDA_ERROR_LAUNCH_FAILED);
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn polling() {
    let context = context(0);
    let (one, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let mut x = one.alloc_zeros::<u8>(64).unwrap();
    let mut y = other.alloc_zeros::<u8>(64).unwrap();
    for value in 0..20 {
        one.memcpy_htod(&[value; 64], &mut x).unwrap();
        other.memcpy_htod(&[value; 64], &mut y).unwrap();
    }
    let event = one.record_event(None).unwrap();
    while !event.is_complete() {}
    assert_eq!(one.clone_dtoh(&x).unwrap(), [19; 64]);
}
