//! Two ranks of this process: gpt-s with the global batch unchanged against one rank of one thread, and all-reduce of f32 sums
//! as `mpirun -n 2` does it over two processes.

use std::error::Error;
use std::path::Path;
use std::time::Instant;

use phalanx::nn::models::Decoder;
use phalanx::nn::{LayerFactory, OneDevice};
use phalanx::parallel::comm::threads::world;
use phalanx::parallel::comm::{self, Comm, Reduction};
use phalanx::parallel::data_parallel::{Ddp, DdpConfig, SingleDevice};
use phalanx::parallel::hybrid::Layout;
use phalanx::parallel::launch::{Rank, TIMEOUT, Threads};
use phalanx::parallel::mesh::{Axis, Groups};
use phalanx::parallel::pipeline::ranks::Chunks;
use phalanx::parallel::sharded::{Zero, ZeroConfig, ZeroStage};
use phalanx::parallel::tensor_parallel::TensorParallel;
use phalanx::{DType, Device, Tensor};

use crate::gpt::{At, SMALL, Share, Trained, emit, train};
use crate::measure::{Report, median, millis};

const RANKS: usize = 2;

/// Micro-batches of a pipeline's rows: as many as the peers', and twice that.
const MICRO_BATCHES: usize = 4;

/// Ways to share the batch. Rows are named as the peers'.
type Way = fn(&Model, &Comm) -> Share;
type Model = Chunks<Decoder<OneDevice>>;
const WAYS: [(&str, Way); 4] = [("ddp", ddp), ("zero1", zero1), ("zero2", zero2), ("fsdp", fsdp)];

/// Ways to share the model: schedules of pipelines.
const SCHEDULES: [(&str, &str, usize); 5] = [
    ("pp-gpipe", "gpipe", MICRO_BATCHES),
    ("pp-1f1b", "1f1b", MICRO_BATCHES),
    ("pp-zb-h1", "zb-h1", MICRO_BATCHES),
    ("pp-zb-v", "zb-v", MICRO_BATCHES),
    ("pp-1f1b-8", "1f1b", 2 * MICRO_BATCHES),
];

/// Whether the first losses were the known ones everywhere.
pub fn training(data: &Path) -> Result<bool, Box<dyn Error>> {
    let report = Report { threads: 1 };
    Device::CPU.set_threads(1)?;
    let at = At { comm: world(1, TIMEOUT).swap_remove(0), device: Device::CPU };
    let mut alone = train(
        &SMALL,
        data,
        &at,
        &Layout::default(),
        |_| OneDevice,
        |m, _| Ok(Box::new(SingleDevice::new(m))),
    )?;
    let mut same = emit(&report, SMALL.name, &SMALL, &mut alone);
    let rows = Rows { report, data, one_ms: median(&mut alone.times_ms) };
    let one = Layout::default();
    let replicas = Layout { dp: RANKS, ..one.clone() };
    for (name, way) in WAYS {
        same &= rows.row(name, &replicas, |_| OneDevice, way)?;
    }
    let layers = |groups: &Groups| TensorParallel::new(groups.along(Axis::Tp));
    let cut = Layout { tp: RANKS, ..one.clone() };
    same &= rows.row("tp", &cut, layers, |model, _| Ok(Box::new(SingleDevice::new(model))))?;
    for (name, schedule, micro_batches) in SCHEDULES {
        let stages = Layout { pp: RANKS, schedule: schedule.into(), micro_batches, ..one.clone() };
        same &= rows.row(name, &stages, |_| OneDevice, |model, _| Ok(Box::new(SingleDevice::new(model))))?;
    }
    Ok(same)
}

struct Rows<'a> {
    report: Report,
    data: &'a Path,
    /// A step on one rank.
    one_ms: f64,
}

impl Rows<'_> {
    fn row<L: LayerFactory>(
        &self,
        name: &str,
        layout: &Layout,
        layers: impl Fn(&Groups) -> L + Sync,
        way: impl Fn(&Chunks<Decoder<L>>, &Comm) -> Share + Sync,
    ) -> Result<bool, Box<dyn Error>> {
        let ranks = Threads::new(RANKS).cores(RANKS).run(|rank| {
            let at = At { comm: rank.comm().clone(), device: rank.device() };
            train(&SMALL, self.data, &at, layout, &layers, &way).map_err(|e| e.to_string())
        })?;
        let mut all = ranks.into_iter().reduce(Trained::with).unwrap_or_default();
        let same = emit(&self.report, name, &SMALL, &mut all);
        let efficiency = self.one_ms / (RANKS as f64 * median(&mut all.times_ms));
        self.report.emit(name, "efficiency", 100.0 * efficiency, "%");
        Ok(same)
    }
}

fn ddp(model: &Model, comm: &Comm) -> Share {
    Ok(Box::new(Ddp::new(model, comm.clone(), DdpConfig::default())?))
}

fn zero1(model: &Model, comm: &Comm) -> Share {
    Ok(Box::new(Zero::new(model, comm.clone(), ZeroConfig::new(ZeroStage::Optimizer))?))
}

fn zero2(model: &Model, comm: &Comm) -> Share {
    Ok(Box::new(Zero::new(model, comm.clone(), ZeroConfig::new(ZeroStage::Gradients))?))
}

fn fsdp(model: &Model, comm: &Comm) -> Share {
    Ok(Box::new(Zero::new(model, comm.clone(), ZeroConfig::new(ZeroStage::Parameters))?))
}

const WARMUPS: usize = 3;
const REPEATS: usize = 15;

pub fn allreduce(threads: usize) -> Result<(), Box<dyn std::error::Error>> {
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

fn measure(rank: &Rank, count: usize) -> comm::Result<f64> {
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
