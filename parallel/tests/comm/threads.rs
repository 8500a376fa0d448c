//! The suite over threads. An observer is told of every call, from its start to its true end, whether or not a thread waits.

use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use phalanx_parallel::comm::{Call, CollectiveKind, Comm, Error, Observed, Reduction, observed};
use phalanx_parallel::launch;
use phalanx_parallel::launch::{Rank, Threads, threads};
use phalanx_tensor::{DType, Device, Tensor};

use crate::processes::{LONG, run};
use crate::suite;

#[test]
fn every_number_of_ranks_passes_the_suite() {
    for ranks in [1, 2, 3, 4, 8] {
        launch::threads(ranks, |rank| suite::all(rank.comm(), rank.device())).unwrap();
    }
}

#[test]
fn ranks_share_the_cores_and_the_device_gets_its_threads_back() {
    let device = Device::Cpu(3);
    let before = device.pool().unwrap().threads();
    let threads =
        Threads::new(4).cores(9).run(|rank| Ok::<_, Error>(rank.device().pool()?.threads())).unwrap();
    // Other tests run at the same time and may take the devices' pools.
    assert!(threads.iter().sum::<usize>() <= 9 + before * 4, "{threads:?}");
}

#[test]
fn meta_ranks_exchange_shapes_and_count_bytes() {
    let run = |rank: launch::Rank| {
        let mut x = Tensor::zeros(&[1000], DType::BF16, rank.device())?;
        let version = x.version();
        rank.comm().all_reduce(&mut x, Reduction::Sum)?;
        assert!(x.version() > version);
        Ok::<_, Error>(rank.comm().traffic().bytes)
    };
    assert_eq!(Threads::new(4).meta().run(run).unwrap(), [2 * 2 * 750; 4]);
}

#[test]
fn views_of_one_storage_that_is_written_are_refused() {
    let whole = Tensor::zeros(&[4], DType::F32, Device::CPU).unwrap();
    let run = |rank: launch::Rank| {
        rank.comm().run(Call::all_reduce(whole.narrow(0, 2 * rank.rank(), 2)?, Reduction::Sum))
    };
    let error = launch::threads(2, run).unwrap_err().to_string();
    assert!(error.contains("ranks 0 and 1 brought views of one storage"), "{error}");
}

/// A rank's communicator, and what is heard of its calls.
fn watched(rank: &Rank) -> (Comm, Arc<Mutex<Vec<Observed>>>) {
    let heard = Arc::new(Mutex::new(vec![]));
    let told = Arc::clone(&heard);
    (observed(rank.comm().clone(), Arc::new(move |call| told.lock().unwrap().push(call))), heard)
}

/// Makes calls in every way; the observer has been told of each before a waiting thread goes on.
fn every_way(rank: &Rank) -> Result<(), Error> {
    let ((comm, heard), begin) = (watched(rank), Instant::now());
    let mut wanted = vec![];
    let mut next = |kind, bytes| {
        wanted.push((kind, bytes));
        let heard = heard.lock().unwrap();
        let kinds: Vec<_> = heard.iter().map(|call| (call.kind, call.bytes)).collect();
        assert_eq!(kinds, wanted);
        assert!(heard.iter().all(|call| begin <= call.started && call.started <= call.ended));
    };
    let mut x = Tensor::zeros(&[10], DType::F32, rank.device())?;
    comm.all_reduce(&mut x, Reduction::Sum)?;
    next(CollectiveKind::AllReduce, 40);
    comm.start(Call::broadcast(x.clone(), 0)).wait()?;
    next(CollectiveKind::Broadcast, 40);
    let all = comm.split(Some(0), 0)?.unwrap();
    all.barrier()?;
    next(CollectiveKind::Barrier, 0);
    let pair = all.group(&[0, 1])?;
    match rank.rank() {
        0 => pair.send(&x, 1)?,
        _ => pair.recv(&mut x, 0)?,
    }
    next([CollectiveKind::Send, CollectiveKind::Receive][rank.rank()], 40);
    assert_eq!(comm.traffic(), rank.comm().traffic());
    Ok(())
}

#[test]
fn a_call_is_reported_before_its_waiter_goes_on() {
    threads(2, |rank| every_way(&rank)).unwrap();
    for outcome in run(2, LONG, |rank| every_way(&rank).map_err(|e| e.to_string())) {
        outcome.unwrap();
    }
}

/// Rank 1 comes late; rank 0, which looks much later still, is told of the end when it was.
fn no_rank_waits(rank: &Rank, started: &Barrier) -> Result<(), Error> {
    let (comm, heard) = watched(rank);
    let late = Duration::from_millis(200);
    if rank.rank() == 1 {
        started.wait();
        std::thread::sleep(late);
    }
    let x = Tensor::zeros(&[10], DType::F32, rank.device())?;
    let pending = comm.start(Call::all_reduce(x, Reduction::Sum));
    if rank.rank() == 0 {
        started.wait();
    }
    let begin = Instant::now();
    while heard.lock().unwrap().is_empty() && begin.elapsed() < LONG {
        std::thread::sleep(Duration::from_millis(1));
    }
    let looked = Instant::now();
    pending.wait()?;
    let heard = heard.lock().unwrap().clone();
    assert!(heard.len() == 1 && heard[0].ended <= looked, "{heard:?}");
    let took = heard[0].ended - heard[0].started;
    assert!(rank.rank() == 1 || took >= late, "it waited for rank 1, and took {took:?}");
    Ok(())
}

#[test]
fn the_end_is_the_true_one_though_no_rank_waits() {
    let started = Barrier::new(2);
    threads(2, |rank| no_rank_waits(&rank, &started)).unwrap();
    for outcome in run(2, LONG, |rank| no_rank_waits(&rank, &started).map_err(|e| e.to_string())) {
        outcome.unwrap();
    }
}
