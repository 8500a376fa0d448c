//! Saves over sockets, on which ranks also do other things meanwhile.

use std::time::Duration;

use phalanx_parallel::checkpoint::{Checkpoint, Saver};
use phalanx_parallel::comm::Reduction;
use phalanx_parallel::launch::{Environment, Rank};
use phalanx_parallel::sharded_tensor::ShardedTensor;
use phalanx_parallel::{Error, Result};
use phalanx_tensor::{DType, Device, Tensor};

use crate::port::free_port;
use crate::{Place, settings};

const RANKS: usize = 3;

/// Ranks that meet over TCP, each on a thread in place of a process.
fn run(f: impl Fn(Rank) -> Result<()> + Sync) -> Vec<Result<(), String>> {
    let port = free_port();
    let process = |rank| {
        let place = Environment::new().local(rank, RANKS, port).timeout(Duration::from_secs(20));
        place.run(&f).map_err(|e| e.to_string())
    };
    std::thread::scope(|scope| {
        let process = &process;
        let threads: Vec<_> = (0..RANKS).map(|rank| scope.spawn(move || process(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn parts(rank: &Rank, value: f64) -> Result<Vec<ShardedTensor>> {
    let of = |n: usize| phalanx_kernels::full(&[n], value, DType::F32, Device::CPU);
    Ok(vec![
        ShardedTensor::whole("all", of(500)?),
        ShardedTensor::whole(format!("w{}", rank.rank()), of(100_000)?),
    ])
}

/// Saves while other calls go on.
fn save(rank: &Rank, place: &Place, then: impl Fn(&Rank) -> Result<()>) -> Result<()> {
    let mut saver = Saver::new(rank.comm())?.with_block(512)?;
    let parts = parts(rank, 3.0)?;
    for step in 1..4 {
        saver.save(place.join("saved"), parts.clone(), &settings(step))?;
        for _ in 0..20 {
            let mut sum = Tensor::from_slice(&[1.0f32], &[1], Device::CPU)?;
            rank.comm().all_reduce(&mut sum, Reduction::Sum)?;
            assert_eq!(sum.item::<f32>()?, RANKS as f32);
        }
        then(rank)?;
        saver.wait()?;
    }
    Ok(())
}

#[test]
fn ranks_over_sockets_save_while_they_do_other_things() {
    let place = Place::new("wires");
    let outcomes = run(|rank| {
        save(&rank, &place, |_| Ok(()))?;
        let read = parts(&rank, 0.0)?;
        Checkpoint::open(place.join("saved"))?.load(rank.comm(), &read)?;
        assert_eq!(read[1].values.to_vec::<f32>()?, [3.0; 100_000]);
        Ok(())
    });
    outcomes.into_iter().for_each(|outcome| outcome.unwrap());
}

#[test]
fn a_rank_that_fails_over_sockets_ends_all_with_its_cause() {
    let place = Place::new("wires-fail");
    let outcomes = run(|rank| {
        save(&rank, &place, |rank| match rank.rank() {
            1 => Err(Error::Config("the disk of rank 1 is on fire".into())),
            _ => Ok(()),
        })
    });
    for outcome in outcomes {
        let error = outcome.unwrap_err();
        assert!(error.contains("on fire"), "{error}");
    }
}
