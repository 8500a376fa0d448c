//! gpt-s on two ranks of one thread each, the global batch unchanged, against one rank of one thread.

use std::error::Error;
use std::path::Path;

use phalanx::Device;
use phalanx::nn::models::Decoder;
use phalanx::parallel::comm::Comm;
use phalanx::parallel::data_parallel::{Alone, DataParallel, Ddp, DdpConfig};
use phalanx::parallel::launch::Threads;
use phalanx::parallel::sharded::{Stage, Zero, ZeroConfig};

use crate::gpt::{SMALL, Trained, emit, train};
use crate::report::{Report, median};

const RANKS: usize = 2;

/// Rows are named as the peers'. A further way to train on several ranks is a row here.
type Way = fn(&Decoder, Comm) -> phalanx::parallel::Result<Box<dyn DataParallel>>;
const WAYS: [(&str, Way); 4] = [("ddp", ddp), ("zero1", zero1), ("zero2", zero2), ("fsdp", fsdp)];

/// Whether the first losses were the known ones everywhere.
pub fn run(data: &Path) -> Result<bool, Box<dyn Error>> {
    let report = Report { threads: 1 };
    Device::CPU.set_threads(1)?;
    let mut alone = train(&SMALL, data, None, |model| Ok(Box::new(Alone::new(model))))?;
    let mut same = emit(&report, SMALL.name, &SMALL, &mut alone);
    let one_ms = median(&mut alone.times_ms);
    for (name, way) in WAYS {
        let ranks = Threads::new(RANKS).cores(RANKS).run(|rank| {
            let wrap = |model: &Decoder| way(model, rank.comm().clone());
            train(&SMALL, data, Some(&rank), wrap).map_err(|e| e.to_string())
        })?;
        let mut all = ranks.into_iter().reduce(Trained::with).unwrap_or_default();
        same &= emit(&report, name, &SMALL, &mut all);
        let efficiency = one_ms / (RANKS as f64 * median(&mut all.times_ms));
        report.emit(name, "efficiency", 100.0 * efficiency, "%");
    }
    Ok(same)
}

fn ddp(model: &Decoder, comm: Comm) -> phalanx::parallel::Result<Box<dyn DataParallel>> {
    Ok(Box::new(Ddp::new(model, comm, DdpConfig::default())?))
}

fn zero1(model: &Decoder, comm: Comm) -> phalanx::parallel::Result<Box<dyn DataParallel>> {
    Ok(Box::new(Zero::new(model, comm, ZeroConfig::new(Stage::Optimizer))?))
}

fn zero2(model: &Decoder, comm: Comm) -> phalanx::parallel::Result<Box<dyn DataParallel>> {
    Ok(Box::new(Zero::new(model, comm, ZeroConfig::new(Stage::Gradients))?))
}

fn fsdp(model: &Decoder, comm: Comm) -> phalanx::parallel::Result<Box<dyn DataParallel>> {
    Ok(Box::new(Zero::new(model, comm, ZeroConfig::new(Stage::Parameters))?))
}
