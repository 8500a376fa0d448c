//! Long runs: what an operation costs does not grow with how many there were.
#![allow(unsafe_code)]

mod common;

use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use common::context;
use cudarc::driver::sys;

/// Any thread runs any operation, so one test at a time: what is measured is its own work.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How long this thread has had a core, so that a busy machine does not count; where the system does not say, the time.
fn now() -> Duration {
    static BEGIN: LazyLock<Instant> = LazyLock::new(Instant::now);
    let known = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let on_a_core = known.and_then(|text| text.split(' ').next()?.parse().ok());
    on_a_core.map_or_else(|| BEGIN.elapsed(), Duration::from_nanos)
}

/// The shortest of a few rounds.
fn round(mut work: impl FnMut()) -> Duration {
    let mut once = || {
        let start = now();
        work();
        now() - start
    };
    (0..3).map(|_| once()).min().unwrap()
}

#[test]
fn launches_of_a_forked_graph_stay_as_cheap_as_the_first() {
    let (_alone, context) = (alone(), context(0));
    let (origin, side) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let x = origin.clone_htod(&[3_u8; 16]).unwrap();
    let (mut y, mut z) = (origin.alloc_zeros::<u8>(16).unwrap(), origin.alloc_zeros::<u8>(16).unwrap());
    origin.synchronize().unwrap();
    origin.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    side.wait(&origin.record_event(None).unwrap()).unwrap();
    side.memcpy_dtod(&x, &mut y).unwrap();
    origin.memcpy_dtod(&x, &mut z).unwrap();
    origin.wait(&side.record_event(None).unwrap()).unwrap();
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = origin.end_capture(flags).unwrap().unwrap();
    let mut launches = || (0..300).for_each(|_| graph.launch().unwrap());
    let first = round(&mut launches);
    (0..20).for_each(|_| launches());
    let last = round(&mut launches);
    assert!(last < 10 * first + Duration::from_millis(50), "{first:?}, then {last:?}");
}

#[test]
fn streams_that_come_and_go_leave_nothing_behind() {
    let (_alone, context) = (alone(), context(0));
    let main = context.new_stream().unwrap();
    let mut x = main.alloc_zeros::<u8>(64).unwrap();
    let mut steps = || {
        for _ in 0..200 {
            let side = context.new_stream().unwrap();
            side.wait(&main.record_event(None).unwrap()).unwrap();
            side.memset_zeros(&mut x).unwrap();
            main.wait(&side.record_event(None).unwrap()).unwrap();
        }
        main.synchronize().unwrap();
    };
    let first = round(&mut steps);
    (0..20).for_each(|_| steps());
    let last = round(&mut steps);
    assert!(last < 10 * first + Duration::from_millis(50), "{first:?}, then {last:?}");
}

#[test]
fn allocations_in_stream_order_cost_the_same_after_thousands_of_them() {
    let (_alone, context) = (alone(), context(0));
    let stream = context.new_stream().unwrap();
    let steps = || (0..500).for_each(|_| drop(stream.alloc_zeros::<u8>(256).unwrap()));
    let first = round(steps);
    (0..20).for_each(|_| steps());
    let last = round(steps);
    assert!(last < 10 * first + Duration::from_millis(50), "{first:?}, then {last:?}");
}
