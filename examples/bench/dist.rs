//! gpt-s on two ranks of one thread each, the global batch unchanged, against one rank of one thread.

use std::error::Error;
use std::path::Path;

use phalanx::Device;
use phalanx::nn::models::Decoder;
use phalanx::nn::{Layers, OneDevice};
use phalanx::parallel::comm::Comm;
use phalanx::parallel::comm::threads::world;
use phalanx::parallel::data_parallel::{Alone, Ddp, DdpConfig};
use phalanx::parallel::hybrid::Layout;
use phalanx::parallel::launch::{TIMEOUT, Threads};
use phalanx::parallel::mesh::{Axis, Groups};
use phalanx::parallel::pipeline::ranks::Chunks;
use phalanx::parallel::sharded::{Stage, Zero, ZeroConfig};
use phalanx::parallel::tensor_parallel::TensorParallel;

use crate::gpt::{At, SMALL, Share, Trained, emit, train};
use crate::report::{Report, median};

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
pub fn run(data: &Path) -> Result<bool, Box<dyn Error>> {
    let report = Report { threads: 1 };
    Device::CPU.set_threads(1)?;
    let at = At { comm: world(1, TIMEOUT).swap_remove(0), device: Device::CPU };
    let mut alone =
        train(&SMALL, data, &at, &Layout::default(), |_| OneDevice, |m, _| Ok(Box::new(Alone::new(m))))?;
    let mut same = emit(&report, SMALL.name, &SMALL, &mut alone);
    let rows = Rows { report, data, one_ms: median(&mut alone.times_ms) };
    let one = Layout::default();
    let replicas = Layout { dp: RANKS, ..one.clone() };
    for (name, way) in WAYS {
        same &= rows.row(name, &replicas, |_| OneDevice, way)?;
    }
    let layers = |groups: &Groups| TensorParallel::new(groups.along(Axis::Tp));
    let cut = Layout { tp: RANKS, ..one.clone() };
    same &= rows.row("tp", &cut, layers, |model, _| Ok(Box::new(Alone::new(model))))?;
    for (name, schedule, micro_batches) in SCHEDULES {
        let stages = Layout { pp: RANKS, schedule: schedule.into(), micro_batches, ..one.clone() };
        same &= rows.row(name, &stages, |_| OneDevice, |model, _| Ok(Box::new(Alone::new(model))))?;
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
    fn row<L: Layers>(
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
    Ok(Box::new(Zero::new(model, comm.clone(), ZeroConfig::new(Stage::Optimizer))?))
}

fn zero2(model: &Model, comm: &Comm) -> Share {
    Ok(Box::new(Zero::new(model, comm.clone(), ZeroConfig::new(Stage::Gradients))?))
}

fn fsdp(model: &Model, comm: &Comm) -> Share {
    Ok(Box::new(Zero::new(model, comm.clone(), ZeroConfig::new(Stage::Parameters))?))
}
