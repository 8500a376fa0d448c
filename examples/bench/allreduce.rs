//! All-reduce of f32 sums over two ranks, threads of this process, as `mpirun -n 2` does it over two processes.

use std::time::Instant;

use phalanx::parallel::comm::{Error, Reduction};
use phalanx::parallel::launch::{Rank, Threads};
use phalanx::{DType, Tensor};

use crate::report::{Report, median, millis};

const RANKS: usize = 2;
const WARMUPS: usize = 3;
const REPEATS: usize = 15;

pub fn run(threads: usize) -> Result<(), Box<dyn std::error::Error>> {
    // A row's threads are those of one rank, as the peers count them.
    let report = Report { threads: (threads / RANKS).max(1) };
    for mib in [1, 16, 64] {
        let times = Threads::new(RANKS).cores(threads).run(|rank| measure(&rank, mib << 18))?;
        let ms = times[0];
        report.emit("allreduce", &format!("{mib}MiB"), ms, "ms");
        report.emit("allreduce", &format!("{mib}MiB"), (mib << 20) as f64 / ms / 1e6, "GB/s");
    }
    Ok(())
}

fn measure(rank: &Rank, count: usize) -> Result<f64, Error> {
    let mut x = Tensor::empty(&[count], DType::F32, rank.device())?;
    let mut times = vec![];
    for _ in 0..WARMUPS + REPEATS {
        x.write::<f32>("allreduce")?.fill(1.0);
        rank.comm().barrier()?;
        let start = Instant::now();
        rank.comm().all_reduce(&mut x, Reduction::Sum)?;
        times.push(millis(start.elapsed()));
    }
    assert_eq!(x.narrow(0, count - 1, 1)?.item::<f32>()?, RANKS as f32);
    Ok(median(&mut times[WARMUPS..]))
}
