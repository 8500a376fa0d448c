//! What would hang on GPUs ends, and says who did what. Each case runs in a process of its own, to read what it says
//! and to set how long it waits; those that run no case are ignored here.
#![allow(unsafe_code)]

mod common;

use std::process::Command;
use std::sync::{Arc, Barrier};

use common::{ranks, raw_ranks, values};
use cudarc::driver::sys::{CUresult, cuLaunchHostFunc};
use cudarc::driver::{CudaContext, CudaStream, DevicePtr};
use cudarc::nccl::{Comm, Id, ReduceOp, sys};

/// Cases in which a rank waits in vain, so that the time is to be over soon. Their ranks are served by one thread,
/// and none is late that is not meant to be.
const IN_VAIN: [&str; 4] = ["one_is_missing", "one_leaves", "one_comes_after_an_abort", "one_does_not_join"];

/// Runs a case of this file; it must succeed, and say `wanted`.
fn says(case: &str, streams: &str, wanted: &[&str]) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", case, "--ignored", "--nocapture"]).env("PHALANX_EMULATOR_STREAMS", streams);
    if IN_VAIN.contains(&case) {
        command.env("PHALANX_EMULATOR_NCCL_TIMEOUT_MS", "300");
    }
    if case == "unlike_orders_on_gpus" {
        command.env("PHALANX_EMULATOR_NCCL_AT_ONCE", "1");
    }
    if case == "without_execution" {
        command.env("PHALANX_CUDA", "dry");
    }
    let ran = command.output().unwrap();
    let said = String::from_utf8_lossy(&ran.stdout).into_owned() + &String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success() && said.contains("running 1 test"), "{case}, {streams}: {said}");
    for part in wanted {
        assert!(said.contains(part), "{case}, {streams}: no {part:?} in {said}");
    }
}

fn both_ways(case: &str, wanted: &[&str]) {
    for streams in ["eager", "deferred:1", "deferred:2", "deferred:3"] {
        says(case, streams, wanted);
    }
}

#[test]
fn ranks_that_call_different_things_are_named() {
    both_ways(
        "different_counts",
        &["differs between ranks", "all_reduce of 10 f32 (sum)", "all_reduce of 11 f32 (sum)"],
    );
}

#[test]
fn a_send_and_a_receive_of_different_sizes_are_named() {
    both_ways(
        "different_sizes",
        &["rank 0 calls send of 4 f32 to rank 1, rank 1 calls receive of 5 f32 from rank 0"],
    );
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    both_ways("one_is_missing", &["rank 0 has waited", "all_reduce of 10 f32 (sum) for [1]"]);
}

#[test]
fn a_rank_that_leaves_is_named() {
    both_ways("one_leaves", &["rank 0 waits in all_reduce of 10 f32 (sum) for rank 1, which has left"]);
}

#[test]
fn a_call_whose_turn_comes_after_anothers_abort_ends_when_the_time_is_over() {
    both_ways("one_comes_after_an_abort", &["for rank 2, which has left"]);
}

#[test]
fn a_rank_that_hears_of_an_abort_and_aborts_keeps_its_context() {
    both_ways("both_abort", &["for rank 1, which has left"]);
}

#[test]
fn a_rank_that_does_not_join_is_named() {
    says("one_does_not_join", "eager", &["rank 0 of 2 waits for ranks [1], which do not come"]);
}

#[test]
fn ranks_on_one_gpu_are_named_unless_that_is_allowed() {
    says("two_on_one_gpu", "eager", &["duplicate GPU: ranks 0 and 1 are both on device 1"]);
}

#[test]
fn unlike_orders_of_two_communicators_on_a_stream_are_named() {
    let wanted = [
        "GPU 0 runs NCCL's all_reduce of 4 f32 (sum) of rank 0 of communicator 1, which waits for rank 1, whose turn on \
         GPU 1 comes after NCCL's all_reduce of 5 f32 (sum) of rank 1 of communicator 2",
        "GPU 1 runs NCCL's all_reduce of 5 f32 (sum) of rank 1 of communicator 2, which waits for rank 0, whose turn on \
         GPU 0 comes after NCCL's all_reduce of 4 f32 (sum) of rank 0 of communicator 1",
    ];
    both_ways("unlike_orders_on_a_stream", &wanted);
}

#[test]
fn unlike_orders_on_gpus_that_run_one_operation_at_a_time_are_named() {
    both_ways(
        "unlike_orders_on_gpus",
        &["whose turn on GPU 1 comes after", "whose turn on GPU 0 comes after"],
    );
}

#[test]
fn without_execution_no_rank_waits_and_calls_that_differ_are_named() {
    says(
        "without_execution",
        "eager",
        &[
            "differs between ranks: rank 0 calls all_reduce of 10 f32 (sum), rank 1 calls all_reduce of 11 f32 (sum)",
        ],
    );
}

#[test]
fn what_is_right_is_right_in_every_order() {
    for seed in 0..8 {
        says("training_steps", &format!("deferred:{seed}"), &[]);
    }
}

/// Ranks that have joined, dealt out over the two devices.
fn ranks_of_one_thread(count: usize) -> Vec<Comm> {
    common::load();
    let stream = |rank| CudaContext::new(rank % 2).unwrap().new_stream().unwrap();
    Comm::from_devices((0..count).map(stream).collect()).unwrap()
}

/// Whether the rank's stream failed.
fn failed(comm: &Comm) -> bool {
    comm.stream().synchronize().map_err(|error| error.0) == Err(CUresult::CUDA_ERROR_LAUNCH_FAILED)
}

fn all_reduce(comm: &Comm, count: usize) {
    let stream = comm.stream();
    let from = stream.clone_htod(&values(comm.rank(), count)).unwrap();
    let mut to = stream.alloc_zeros::<f32>(count).unwrap();
    comm.all_reduce(&from, &mut to, &ReduceOp::Sum).unwrap();
    std::mem::forget((from, to));
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn different_counts() {
    let failed = ranks(2, |comm| {
        all_reduce(&comm, 10 + comm.rank());
        failed(&comm)
    });
    assert_eq!(failed, [true, true]);
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn without_execution() {
    let ranks = ranks_of_one_thread(2);
    // Of 20 GB each, without memory and without waiting for the other rank.
    for comm in &ranks {
        let stream = comm.stream();
        // SAFETY: nothing reads it.
        let mut x = unsafe { stream.alloc::<f32>(5_000_000_000) }.unwrap();
        comm.all_reduce_in_place(&mut x, &ReduceOp::Sum).unwrap();
        assert!(!failed(comm));
    }
    all_reduce(&ranks[0], 10);
    assert!(!failed(&ranks[0]));
    all_reduce(&ranks[1], 11);
    assert!(failed(&ranks[1]));
    // The other rank hears of it with its next call.
    let mut x = ranks[0].stream().alloc_zeros::<f32>(10).unwrap();
    assert!(ranks[0].all_reduce_in_place(&mut x, &ReduceOp::Sum).is_err());
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn different_sizes() {
    let failed = ranks(2, |comm| {
        let stream = comm.stream();
        let mut buffer = stream.alloc_zeros::<f32>(4 + comm.rank()).unwrap();
        if comm.rank() == 0 {
            comm.send(&buffer, 1).map(|_| ())
        } else {
            comm.recv(&mut buffer, 0).map(|_| ())
        }
        .unwrap();
        failed(&comm)
    });
    assert_eq!(failed, [true, true]);
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn one_is_missing() {
    let ranks = ranks_of_one_thread(2);
    all_reduce(&ranks[0], 10);
    assert!(failed(&ranks[0]));
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn one_leaves() {
    let mut ranks = ranks_of_one_thread(2);
    // Dropping a communicator aborts it.
    drop(ranks.pop());
    all_reduce(&ranks[0], 10);
    assert!(failed(&ranks[0]));
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn one_comes_after_an_abort() {
    static HELD: Barrier = Barrier::new(2);
    extern "C" fn hold(_: *mut std::ffi::c_void) {
        HELD.wait(); // It has begun.
        HELD.wait(); // It may end.
    }
    let mut ranks = ranks_of_one_thread(3);
    drop(ranks.pop());
    let stream = ranks[1].stream();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            stream.context().bind_to_thread().unwrap();
            // SAFETY: the function needs no data.
            unsafe { cuLaunchHostFunc(stream.cu_stream(), Some(hold), std::ptr::null_mut()) }
                .result()
                .unwrap();
            // Deferred, it begins when a thread waits.
            let _ = stream.synchronize();
        });
        HELD.wait();
        all_reduce(&ranks[1], 10);
        all_reduce(&ranks[0], 10);
        assert!(failed(&ranks[0]));
        HELD.wait();
    });
    assert!(failed(&ranks[1]));
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn both_abort() {
    let ends = raw_ranks(2, |comm| {
        let (stream, kind, op) = (&comm.stream, sys::ncclDataType_t::ncclFloat32, sys::ncclRedOp_t::ncclSum);
        let buffer = stream.clone_htod(&[1_f32]).unwrap();
        let at = buffer.device_ptr(stream).0;
        // SAFETY: one element, and a handle that is not used after it was aborted.
        unsafe {
            if comm.rank == 0 {
                sys::ncclAllReduce(at as *const _, at as *mut _, 1, kind, op, comm.comm, comm.raw_stream())
                    .result()
                    .unwrap();
                let mut error = sys::ncclResult_t::ncclSuccess;
                while error == sys::ncclResult_t::ncclSuccess {
                    // The calls' turns come while a thread asks.
                    let _ = cudarc::driver::sys::cuStreamQuery(stream.cu_stream());
                    sys::ncclCommGetAsyncError(comm.comm, &mut error).result().unwrap();
                }
                assert_eq!(error, sys::ncclResult_t::ncclRemoteError);
            }
            sys::ncclCommAbort(comm.comm).result().unwrap();
        }
        stream.synchronize().is_ok()
    });
    assert_eq!(ends, [true, true]);
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn one_does_not_join() {
    let stream = common::stream(0);
    assert!(Comm::from_rank(stream, 0, 2, Id::new().unwrap()).is_err());
}

/// Gradients on one stream, reduced on another, as data-parallel training overlaps them.
#[test]
#[ignore = "run by another test, in a process of its own"]
fn training_steps() {
    let results = ranks(2, |comm| {
        let (communication, compute) = (comm.stream(), comm.context().new_stream().unwrap());
        let mut gradient = compute.alloc_zeros::<f32>(8).unwrap();
        for step in 0..5 {
            compute.memcpy_htod(&values(comm.rank() + step, 8), &mut gradient).unwrap();
            communication.wait(&compute.record_event(None).unwrap()).unwrap();
            comm.all_reduce_in_place(&mut gradient, &ReduceOp::Sum).unwrap();
            compute.wait(&communication.record_event(None).unwrap()).unwrap();
        }
        let result = compute.clone_dtoh(&gradient).unwrap();
        communication.synchronize().unwrap();
        result
    });
    let wanted: Vec<f32> = (0..8).map(|i| values(4, 8)[i] + values(5, 8)[i]).collect();
    assert_eq!(results, [wanted.clone(), wanted]);
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn two_on_one_gpu() {
    common::load();
    // SAFETY: no other thread runs in this process.
    unsafe { std::env::remove_var(common::SHARED_GPUS) };
    let streams = || vec![common::stream(1), common::stream(1)];
    let refused = Comm::from_devices(streams()).map(drop).map_err(|error| error.0);
    assert_eq!(refused, Err(sys::ncclResult_t::ncclInvalidUsage));
    // SAFETY: as above.
    unsafe { std::env::set_var(common::SHARED_GPUS, "1") };
    assert!(Comm::from_devices(streams()).is_ok());
}

/// Two communicators of the same two ranks, each on its streams of the two devices.
fn pairs(streams: [&[Arc<CudaStream>]; 2]) -> [Vec<Comm>; 2] {
    streams.map(|streams| Comm::from_devices(streams.to_vec()).unwrap())
}

/// A call of a rank of the first communicator, of 4 elements, or of the second one, of 5.
fn call_of(pairs: &[Vec<Comm>; 2], which: usize, rank: usize) {
    all_reduce(&pairs[which][rank], 4 + which);
}

fn streams() -> Vec<Arc<CudaStream>> {
    common::load();
    (0..2).map(|device| CudaContext::new(device).unwrap().new_stream().unwrap()).collect()
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn unlike_orders_on_a_stream() {
    let streams = streams();
    let pairs = pairs([&streams, &streams]);
    let call = |(which, rank): &(usize, usize)| call_of(&pairs, *which, *rank);
    // In like orders all is well.
    [(0, 0), (1, 0), (0, 1), (1, 1)].iter().for_each(call);
    assert!(pairs[0].iter().all(|comm| !failed(comm)));
    [(0, 0), (1, 0), (1, 1), (0, 1)].iter().for_each(call);
    assert!(pairs[0].iter().all(failed));
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn unlike_orders_on_gpus() {
    let (first, second) = (streams(), streams());
    let pairs = pairs([&first, &second]);
    // Each rank's operations come one after the other, by events, in an order of its own.
    let after = |rank: usize, which: usize| {
        let event = pairs[1 - which][rank].stream().record_event(None).unwrap();
        pairs[which][rank].stream().wait(&event).unwrap();
    };
    for rank in 0..2 {
        call_of(&pairs, rank, rank);
        after(rank, 1 - rank);
        call_of(&pairs, 1 - rank, rank);
    }
    assert!((0..2).all(|rank| failed(&pairs[rank][rank])));
}
