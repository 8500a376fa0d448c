//! Ranks in several processes: this program, started again with the communicator's id and a rank.
#![allow(unsafe_code)]

mod common;

use std::ffi::c_void;
use std::process::{Child, Command, ExitCode};
use std::time::{Duration, Instant};

use common::{load, stream};
use cudarc::driver::{DevicePtrMut, sys as driver};
use cudarc::nccl::{Comm, Id, ReduceOp, result, sys};

const ID: &str = "PHALANX_TEST_NCCL_ID";
const RANKS: usize = 3;
/// What the process that is lost ends with.
const LOST: i32 = 3;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().collect();
    if let (Ok(id), Some(Ok(rank))) = (std::env::var(ID), words.get(1).map(|word| word.parse())) {
        run(rank, from_text(&id), words.get(2).is_some());
        return ExitCode::SUCCESS;
    }
    if words.iter().any(|word| word == "--list") {
        println!("processes: test");
        return ExitCode::SUCCESS;
    }
    // Rank 1 has the longest way: what it does goes to the process that made the id, and from there to rank 2.
    for is_lost in [false, true] {
        load();
        let id = Id::new().unwrap();
        let mut others: Vec<Child> = (1..RANKS).map(|rank| start(rank, &id, is_lost)).collect();
        run(0, id, is_lost);
        for (rank, child) in others.iter_mut().enumerate() {
            let status = child.wait().unwrap();
            let wanted = if is_lost && rank + 1 == RANKS - 1 { LOST } else { 0 };
            assert_eq!(status.code(), Some(wanted), "rank {} of {RANKS}", rank + 1);
        }
    }
    println!("processes: ranks of three processes exchange their elements ... ok");
    println!("processes: a process that is gone is named ... ok");
    ExitCode::SUCCESS
}

fn start(rank: usize, id: &Id, is_lost: bool) -> Child {
    let text: String = id.internal().iter().map(|byte| format!("{:02x}", *byte as u8)).collect();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.arg(rank.to_string()).args(is_lost.then_some("lost"));
    command.env(ID, text).spawn().unwrap()
}

fn from_text(text: &str) -> Id {
    let byte = |i: usize| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap() as std::ffi::c_char;
    Id::uninit(std::array::from_fn(byte))
}

fn run(rank: usize, id: Id, is_lost: bool) {
    if is_lost {
        return lose_one(rank, id);
    }
    load();
    let stream = stream(rank % 2);
    let comm = Comm::from_rank(stream.clone(), rank, RANKS, id).unwrap();
    let own: Vec<f32> = (0..50_000).map(|i| (i % 97 + rank) as f32).collect();
    let there = stream.clone_htod(&own).unwrap();
    let mut sum = stream.alloc_zeros::<f32>(own.len()).unwrap();
    for round in 0..3 {
        comm.all_reduce(&there, &mut sum, &ReduceOp::Sum).unwrap();
        let wanted: Vec<f32> = (0..50_000).map(|i| (3 * (i % 97) + 3) as f32).collect();
        assert_eq!(stream.clone_dtoh(&sum).unwrap(), wanted, "round {round}");
        // In a ring, where each first sends.
        let mut came = stream.alloc_zeros::<f32>(own.len()).unwrap();
        cudarc::nccl::group_start().unwrap();
        comm.send(&there, (rank + 1) as i32 % RANKS as i32).unwrap();
        comm.recv(&mut came, ((rank + RANKS - 1) % RANKS) as i32).unwrap();
        cudarc::nccl::group_end().unwrap();
        let before = (rank + RANKS - 1) % RANKS;
        let wanted: Vec<f32> = (0..50_000).map(|i| (i % 97 + before) as f32).collect();
        assert_eq!(stream.clone_dtoh(&came).unwrap(), wanted, "round {round}");
    }
    // No process ends before all have what they were sent.
    comm.all_reduce(&there, &mut sum, &ReduceOp::Max).unwrap();
    stream.synchronize().unwrap();
}

/// The last process goes before it calls anything: the others' call is queued, and their communicators say why it
/// never ends.
fn lose_one(rank: usize, id: Id) {
    load();
    let (stream, mut comm) = (stream(rank % 2), std::ptr::null_mut());
    let id = sys::ncclUniqueId { internal: *id.internal() };
    // SAFETY: a place for a handle.
    unsafe { result::comm_init_rank(&mut comm, RANKS as i32, id, rank as i32) }.unwrap();
    if rank == RANKS - 1 {
        std::process::exit(LOST);
    }
    let mut sum = stream.alloc_zeros::<f32>(100).unwrap();
    let at = sum.device_ptr_mut(&stream).0 as *mut c_void;
    let (kind, by) = (sys::ncclDataType_t::ncclFloat32, sys::ncclRedOp_t::ncclSum);
    // SAFETY: the elements are there, and stay until the communicator is aborted.
    unsafe { result::all_reduce(at, at, 100, kind, by, comm, stream.cu_stream().cast()) }.unwrap();
    let (begin, mut state) = (Instant::now(), sys::ncclResult_t::ncclSuccess);
    while state != sys::ncclResult_t::ncclRemoteError {
        assert!(begin.elapsed().as_secs() < 30, "got {state:?}");
        // Looking at the stream lets what is queued there be asked.
        // SAFETY: the stream and the communicator exist; the state is written whole.
        unsafe {
            let _ = driver::cuStreamQuery(stream.cu_stream());
            sys::ncclCommGetAsyncError(comm, &raw mut state).result().unwrap();
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    // SAFETY: it is used no more.
    unsafe { result::comm_abort(comm) }.unwrap();
}
