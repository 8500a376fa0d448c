//! Capturing streams into graphs, launching those, and what is not allowed meanwhile.
#![allow(unsafe_code)]

mod common;

use std::sync::Arc;

use common::{context, status, stream};
use cudarc::driver::sys::{self, CUresult, CUstreamCaptureMode as Mode};
use cudarc::driver::{CudaGraph, CudaStream, DevicePtr, result};

const FLAGS: sys::CUgraphInstantiate_flags =
    sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;

fn begin(stream: &Arc<CudaStream>) {
    stream.begin_capture(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
}

fn end(stream: &Arc<CudaStream>) -> CudaGraph {
    stream.end_capture(FLAGS).unwrap().unwrap()
}

#[test]
fn a_graph_runs_at_each_launch_and_not_at_capture() {
    let stream = stream();
    let x = stream.clone_htod(&[1_u8; 16]).unwrap();
    let mut y = stream.alloc_zeros::<u8>(16).unwrap();
    begin(&stream);
    stream.memcpy_dtod(&x, &mut y).unwrap();
    let graph = end(&stream);
    assert_eq!(stream.clone_dtoh(&y).unwrap(), [0; 16]);
    let mut x = x;
    for value in [1, 5] {
        stream.memcpy_htod(&[value; 16], &mut x).unwrap();
        graph.launch().unwrap();
        assert_eq!(stream.clone_dtoh(&y).unwrap(), [value; 16]);
    }
}

#[test]
fn a_fork_and_a_join_through_events_are_captured() {
    let context = context(0);
    let (origin, side) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let x = origin.clone_htod(&[3_u8; 16]).unwrap();
    let (mut y, mut z) = (origin.alloc_zeros::<u8>(16).unwrap(), origin.alloc_zeros::<u8>(16).unwrap());
    origin.synchronize().unwrap();
    begin(&origin);
    side.wait(&origin.record_event(None).unwrap()).unwrap();
    assert_eq!(side.capture_status().unwrap(), sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE);
    side.memcpy_dtod(&x, &mut y).unwrap();
    origin.memcpy_dtod(&x, &mut z).unwrap();
    origin.wait(&side.record_event(None).unwrap()).unwrap();
    let graph = end(&origin);
    graph.launch().unwrap();
    assert_eq!(origin.clone_dtoh(&y).unwrap(), [3; 16]);
    assert_eq!(origin.clone_dtoh(&z).unwrap(), [3; 16]);
}

#[test]
fn branches_of_a_graph_that_touch_the_same_bytes_are_reported() {
    let context = context(0);
    let (origin, side) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let x = origin.clone_htod(&[3_u8; 16]).unwrap();
    let mut y = origin.alloc_zeros::<u8>(16).unwrap();
    origin.synchronize().unwrap();
    begin(&origin);
    side.wait(&origin.record_event(None).unwrap()).unwrap();
    side.memcpy_dtod(&x, &mut y).unwrap();
    origin.memcpy_dtod(&x, &mut y).unwrap();
    origin.wait(&side.record_event(None).unwrap()).unwrap();
    let launched = end(&origin).launch().and_then(|()| origin.synchronize());
    assert_eq!(status(launched), CUresult::CUDA_ERROR_LAUNCH_FAILED);
}

#[test]
fn a_side_stream_that_is_not_joined_is_an_error() {
    let context = context(0);
    let (origin, side) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let mut y = origin.alloc_zeros::<u8>(16).unwrap();
    origin.synchronize().unwrap();
    begin(&origin);
    side.wait(&origin.record_event(None).unwrap()).unwrap();
    side.memset_zeros(&mut y).unwrap();
    assert_eq!(status(origin.end_capture(FLAGS).map(|_| ())), CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
}

#[test]
fn waiting_for_a_stream_that_is_captured_breaks_the_capture() {
    let stream = stream();
    begin(&stream);
    assert_eq!(status(stream.synchronize()), CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    assert_eq!(
        stream.capture_status().unwrap(),
        sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED
    );
    assert_eq!(
        status(stream.end_capture(FLAGS).map(|_| ())),
        CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    );
}

#[test]
fn a_synchronous_allocation_during_a_capture_breaks_it() {
    let stream = stream();
    begin(&stream);
    // SAFETY: nothing is allocated.
    let refused = unsafe { result::malloc_sync(64) };
    assert_eq!(status(refused), CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    assert_eq!(
        status(stream.end_capture(FLAGS).map(|_| ())),
        CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    );
}

#[test]
fn the_legacy_default_stream_cannot_be_captured() {
    let context = context(0);
    let refused = context.default_stream().begin_capture(Mode::CU_STREAM_CAPTURE_MODE_RELAXED);
    assert_eq!(status(refused), CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
}

#[test]
fn an_event_from_outside_cannot_be_waited_for_in_a_capture() {
    let context = context(0);
    let (one, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let event = one.record_event(None).unwrap();
    begin(&other);
    assert_eq!(status(other.wait(&event)), CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    let _ = other.end_capture(FLAGS);
}

#[test]
fn an_event_of_a_capture_cannot_be_waited_for_by_the_host() {
    let stream = stream();
    begin(&stream);
    let event = stream.record_event(None).unwrap();
    assert_eq!(status(event.synchronize()), CUresult::CUDA_ERROR_CAPTURED_EVENT);
    let _ = stream.end_capture(FLAGS);
}

#[test]
fn two_captures_cannot_be_merged() {
    let context = context(0);
    let (one, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    begin(&one);
    begin(&other);
    let event = one.record_event(None).unwrap();
    assert_eq!(status(other.wait(&event)), CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE);
    let _ = (one.end_capture(FLAGS), other.end_capture(FLAGS));
}

#[test]
fn a_capture_ends_where_and_by_whom_it_began() {
    let context = context(0);
    let (origin, side) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    begin(&origin);
    side.wait(&origin.record_event(None).unwrap()).unwrap();
    assert_eq!(status(side.end_capture(FLAGS).map(|_| ())), CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    let _ = origin.end_capture(FLAGS);
    begin(&origin);
    let elsewhere =
        std::thread::scope(|s| s.spawn(|| status(origin.end_capture(FLAGS).map(|_| ()))).join().unwrap());
    assert_eq!(elsewhere, CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    assert_eq!(status(origin.end_capture(FLAGS).map(|_| ())), CUresult::CUDA_SUCCESS);
}

#[test]
fn memory_made_in_a_graph_has_the_same_address_at_each_launch() {
    let stream = stream();
    let x = stream.clone_htod(&[9_u8; 64]).unwrap();
    let mut y = stream.alloc_zeros::<u8>(64).unwrap();
    begin(&stream);
    let between = stream.clone_dtod(&x).unwrap();
    stream.memcpy_dtod(&between, &mut y).unwrap();
    drop(between);
    let graph = end(&stream);
    for _ in 0..3 {
        graph.launch().unwrap();
    }
    assert_eq!(stream.clone_dtoh(&y).unwrap(), [9; 64]);
}

#[test]
fn a_graph_whose_memory_is_not_freed_cannot_be_launched_again() {
    let stream = stream();
    begin(&stream);
    let kept = stream.clone_htod(&[7_u8; 64]).unwrap();
    let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0)).unwrap().unwrap();
    for _ in 0..2 {
        graph.launch().unwrap();
        assert_eq!(graph.launch().unwrap_err().0, sys::CUresult::CUDA_ERROR_INVALID_VALUE);
        // SAFETY: it was allocated by the launch, and is used no more until the next.
        unsafe { result::free_async(kept.device_ptr(&stream).0, stream.cu_stream()) }.unwrap();
    }
    graph.launch().unwrap();
    assert_eq!(stream.clone_dtoh(&kept).unwrap(), [7; 64]);
}
