//! The suite over threads.

use phalanx_parallel::comm::{Call, Error, Reduction};
use phalanx_parallel::launch::{self, Threads};
use phalanx_tensor::{DType, Device, Tensor};

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
