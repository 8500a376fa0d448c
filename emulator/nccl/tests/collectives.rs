//! Collectives between ranks as threads, and between several ranks of one thread.
#![allow(unsafe_code)]

mod common;

use common::{load, ranks, raw_ranks, values};
use cudarc::driver::{DevicePtr, sys};
use cudarc::nccl::sys as nccl;
use cudarc::nccl::{Comm, ReduceOp, group_end, group_start};

/// The sum of what all ranks contribute.
fn sum(ranks: usize, i: usize) -> f32 {
    (0..ranks).map(|rank| (rank * 100 + i) as f32).sum()
}

#[test]
fn all_ranks_get_the_same_reduction() {
    for count in [1, 2, 4] {
        let results = ranks(count, |comm| {
            let stream = comm.stream();
            let from = stream.clone_htod(&values(comm.rank(), 10)).unwrap();
            let mut to = stream.alloc_zeros::<f32>(10).unwrap();
            let mut all = Vec::new();
            for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min, ReduceOp::Avg] {
                comm.all_reduce(&from, &mut to, &op).unwrap();
                all.push(stream.clone_dtoh(&to).unwrap());
            }
            all
        });
        for [sums, largest, smallest, averages] in
            results.into_iter().map(|all| <[Vec<f32>; 4]>::try_from(all).unwrap())
        {
            for i in 0..10 {
                assert_eq!(sums[i], sum(count, i));
                assert_eq!(largest[i], ((count - 1) * 100 + i) as f32);
                assert_eq!(smallest[i], i as f32);
                assert_eq!(averages[i], sum(count, i) / count as f32);
            }
        }
    }
}

#[test]
fn gathers_scatters_and_broadcasts_put_ranks_in_order() {
    const RANKS: usize = 3;
    let results = ranks(RANKS, |comm| {
        let stream = comm.stream();
        let from = stream.clone_htod(&values(comm.rank(), 6)).unwrap();
        let mut gathered = stream.alloc_zeros::<f32>(18).unwrap();
        comm.all_gather(&from, &mut gathered).unwrap();
        let mut share = stream.alloc_zeros::<f32>(2).unwrap();
        comm.reduce_scatter(&from, &mut share, &ReduceOp::Sum).unwrap();
        let mut broadcast = stream.alloc_zeros::<f32>(6).unwrap();
        comm.broadcast(Some(&from), &mut broadcast, 2).unwrap();
        let back = |slice| stream.clone_dtoh(slice).unwrap();
        (comm.rank(), back(&gathered), back(&share), back(&broadcast))
    });
    let all: Vec<f32> = (0..RANKS).flat_map(|rank| values(rank, 6)).collect();
    for (rank, gathered, share, broadcast) in results {
        assert_eq!(gathered, all);
        assert_eq!(share, [sum(RANKS, 2 * rank), sum(RANKS, 2 * rank + 1)]);
        assert_eq!(broadcast, values(2, 6));
    }
}

#[test]
fn a_ring_of_sends_within_a_group_does_not_wait_for_itself() {
    const RANKS: usize = 4;
    let results = ranks(RANKS, |comm| {
        let stream = comm.stream();
        let from = stream.clone_htod(&values(comm.rank(), 5)).unwrap();
        let mut to = stream.alloc_zeros::<f32>(5).unwrap();
        group_start().unwrap();
        comm.send(&from, ((comm.rank() + 1) % RANKS) as i32).unwrap();
        comm.recv(&mut to, ((comm.rank() + RANKS - 1) % RANKS) as i32).unwrap();
        group_end().unwrap();
        stream.clone_dtoh(&to).unwrap()
    });
    for (rank, got) in results.iter().enumerate() {
        assert_eq!(*got, values((rank + RANKS - 1) % RANKS, 5));
    }
}

#[test]
fn who_has_done_its_part_of_a_group_may_leave() {
    let (left, late) = (std::sync::Barrier::new(2), std::time::Duration::from_millis(20));
    let results = ranks(3, |comm| {
        let stream = comm.stream();
        let mut to = stream.alloc_zeros::<f32>(5).unwrap();
        let from = stream.clone_htod(&values(comm.rank(), 5)).unwrap();
        match comm.rank() {
            0 => {
                group_start().unwrap();
                comm.send(&from, 1).unwrap();
                comm.recv(&mut to, 2).unwrap();
                group_end().unwrap();
            }
            1 => {
                comm.recv(&mut to, 0).unwrap();
                let got = stream.clone_dtoh(&to).unwrap();
                drop(comm);
                left.wait();
                return got;
            }
            _ => {
                left.wait();
                // The first rank asks how its calls are meanwhile.
                std::thread::sleep(late);
                comm.send(&from, 0).unwrap();
            }
        }
        stream.clone_dtoh(&to).unwrap()
    });
    assert_eq!(results[0], values(2, 5));
    assert_eq!(results[1], values(0, 5));
}

#[test]
fn all_to_all_is_a_transposition() {
    const RANKS: usize = 3;
    let results = raw_ranks(RANKS, |comm| {
        let stream = &comm.stream;
        let from = stream.clone_htod(&values(comm.rank, 2 * RANKS)).unwrap();
        let to = stream.alloc_zeros::<f32>(2 * RANKS).unwrap();
        // SAFETY: the buffers have RANKS times 2 elements.
        unsafe {
            let (from, to) = (from.device_ptr(stream).0 as *const _, to.device_ptr(stream).0 as *mut _);
            let kind = nccl::ncclDataType_t::ncclFloat32;
            nccl::ncclAlltoAll(from, to, 2, kind, comm.comm, comm.raw_stream()).result().unwrap();
        }
        stream.clone_dtoh(&to).unwrap()
    });
    for (rank, got) in results.iter().enumerate() {
        let wanted: Vec<f32> =
            (0..RANKS).flat_map(|other| values(other, 2 * RANKS)[2 * rank..][..2].to_vec()).collect();
        assert_eq!(*got, wanted);
    }
}

#[test]
fn one_thread_serves_several_ranks_within_a_group() {
    load();
    for devices in [[0, 1], [0, 0]] {
        let streams: Vec<_> = devices
            .map(|device| cudarc::driver::CudaContext::new(device).unwrap().new_stream().unwrap())
            .into();
        let comms = Comm::from_devices(streams.clone()).unwrap();
        let mut buffers: Vec<_> =
            streams.iter().enumerate().map(|(i, s)| s.clone_htod(&values(i, 4)).unwrap()).collect();
        group_start().unwrap();
        for (comm, buffer) in comms.iter().zip(&mut buffers) {
            comm.all_reduce_in_place(buffer, &ReduceOp::Sum).unwrap();
        }
        group_end().unwrap();
        for (stream, buffer) in streams.iter().zip(&buffers) {
            assert_eq!(stream.clone_dtoh(buffer).unwrap(), [sum(2, 0), sum(2, 1), sum(2, 2), sum(2, 3)]);
        }
    }
}

#[test]
fn a_collective_is_captured_and_meets_at_each_launch() {
    let results = ranks(2, |comm| {
        let stream = comm.stream();
        let mut buffer = stream.clone_htod(&[1_f32 + comm.rank() as f32]).unwrap();
        stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        comm.all_reduce_in_place(&mut buffer, &ReduceOp::Sum).unwrap();
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = stream.end_capture(flags).unwrap().unwrap();
        (0..3).for_each(|_| graph.launch().unwrap());
        stream.clone_dtoh(&buffer).unwrap()
    });
    // 1 + 2, then twice that and again.
    assert_eq!(results, [[12.0], [12.0]]);
}

#[test]
fn a_split_makes_communicators_of_a_colour() {
    let results = raw_ranks(4, |comm| {
        let stream = &comm.stream;
        let mut child = std::ptr::null_mut();
        let (colour, key) = ((comm.rank % 2) as i32, -(comm.rank as i32));
        // SAFETY: a place for a handle; the buffers have one element a rank.
        let got = unsafe {
            nccl::ncclCommSplit(comm.comm, colour, key, &mut child, std::ptr::null_mut()).result().unwrap();
            let from = stream.clone_htod(&[comm.rank as f32]).unwrap();
            let to = stream.alloc_zeros::<f32>(2).unwrap();
            let (from, at) = (from.device_ptr(stream).0 as *const _, to.device_ptr(stream).0 as *mut _);
            let kind = nccl::ncclDataType_t::ncclFloat32;
            nccl::ncclAllGather(from, at, 1, kind, child, comm.raw_stream()).result().unwrap();
            stream.clone_dtoh(&to).unwrap()
        };
        // SAFETY: the handle is alive.
        unsafe { nccl::ncclCommDestroy(child).result().unwrap() };
        got
    });
    // Keys are descending, so the larger rank comes first.
    assert_eq!(results, [[2.0, 0.0], [3.0, 1.0], [2.0, 0.0], [3.0, 1.0]]);
}

#[test]
fn calls_on_two_streams_of_a_communicator_come_one_after_another() {
    let results = raw_ranks(2, |comm| {
        let (first, second) = (&comm.stream, comm.stream.context().new_stream().unwrap());
        let buffer = first.clone_htod(&[1_f32]).unwrap();
        let at = buffer.device_ptr(first).0;
        let (kind, op) = (nccl::ncclDataType_t::ncclFloat32, nccl::ncclRedOp_t::ncclSum);
        for stream in [first, &second] {
            let raw_stream = stream.cu_stream().cast();
            // SAFETY: one element.
            let status = unsafe {
                nccl::ncclAllReduce(at as *const _, at as *mut _, 1, kind, op, comm.comm, raw_stream)
            };
            status.result().unwrap();
        }
        second.clone_dtoh(&buffer).unwrap()
    });
    assert_eq!(results, [[4.0], [4.0]]);
}

#[test]
fn every_type_is_added_in_its_own_arithmetic() {
    use nccl::ncclDataType_t as Kind;
    let cases: Vec<(Kind, Vec<u8>, Vec<u8>)> = vec![
        (Kind::ncclInt8, vec![100], vec![200_i32 as u8]),
        (Kind::ncclUint8, vec![100], vec![200]),
        (Kind::ncclInt32, (-5_i32).to_le_bytes().into(), (-10_i32).to_le_bytes().into()),
        (Kind::ncclUint32, 5_u32.to_le_bytes().into(), 10_u32.to_le_bytes().into()),
        (Kind::ncclInt64, (-5_i64).to_le_bytes().into(), (-10_i64).to_le_bytes().into()),
        (Kind::ncclUint64, 5_u64.to_le_bytes().into(), 10_u64.to_le_bytes().into()),
        (
            Kind::ncclFloat16,
            half::f16::from_f32(0.5).to_le_bytes().into(),
            half::f16::from_f32(1.0).to_le_bytes().into(),
        ),
        (
            Kind::ncclBfloat16,
            half::bf16::from_f32(0.5).to_le_bytes().into(),
            half::bf16::from_f32(1.0).to_le_bytes().into(),
        ),
        (Kind::ncclFloat32, 0.5_f32.to_le_bytes().into(), 1_f32.to_le_bytes().into()),
        (Kind::ncclFloat64, 0.5_f64.to_le_bytes().into(), 1_f64.to_le_bytes().into()),
    ];
    let results = raw_ranks(2, |comm| {
        let stream = &comm.stream;
        let one = |(kind, value, _): &(Kind, Vec<u8>, Vec<u8>)| {
            let buffer = stream.clone_htod(value).unwrap();
            let at = buffer.device_ptr(stream).0;
            // SAFETY: one element.
            let status = unsafe {
                let op = nccl::ncclRedOp_t::ncclSum;
                nccl::ncclAllReduce(at as *const _, at as *mut _, 1, *kind, op, comm.comm, comm.raw_stream())
            };
            status.result().unwrap();
            stream.clone_dtoh(&buffer).unwrap()
        };
        cases.iter().map(one).collect::<Vec<_>>()
    });
    for got in results {
        for ((kind, _, wanted), got) in cases.iter().zip(got) {
            assert_eq!(got, *wanted, "{kind:?}");
        }
    }
}

#[test]
fn a_bad_root_and_a_null_buffer_are_invalid_arguments() {
    let results = raw_ranks(1, |comm| {
        let at = std::ptr::null_mut();
        let kind = nccl::ncclDataType_t::ncclFloat32;
        // SAFETY: refused before anything is touched.
        unsafe {
            let raw_stream = comm.raw_stream();
            (
                nccl::ncclBroadcast(at, at, 4, kind, 1, comm.comm, raw_stream),
                nccl::ncclAllGather(at, at, 4, kind, comm.comm, raw_stream),
            )
        }
    });
    let invalid = nccl::ncclResult_t::ncclInvalidArgument;
    assert_eq!(results, [(invalid, invalid)]);
}
