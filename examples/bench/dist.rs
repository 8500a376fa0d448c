//! gpt-s on two ranks of one thread each, the global batch unchanged, against one rank of one thread.

use std::error::Error;
use std::path::Path;

use phalanx::Device;
use phalanx::parallel::data_parallel::{Ddp, DdpConfig};
use phalanx::parallel::launch::{Rank, Threads};

use crate::gpt::{SMALL, Trained, emit, train};
use crate::report::{Report, median};

const RANKS: usize = 2;

/// Rows are named as the peers'. A further way to train on several ranks is a row here.
type Way = fn(&Rank, &Path) -> Result<Trained, String>;
const WAYS: [(&str, Way); 1] = [("ddp", ddp)];

/// Whether the first losses were the known ones everywhere.
pub fn run(data: &Path) -> Result<bool, Box<dyn Error>> {
    let report = Report { threads: 1 };
    Device::CPU.set_threads(1)?;
    let mut alone = train(&SMALL, data, None, |_| Ok(None))?;
    let mut same = emit(&report, SMALL.name, &SMALL, &mut alone);
    let one_ms = median(&mut alone.times_ms);
    for (name, way) in WAYS {
        let ranks = Threads::new(RANKS).cores(RANKS).run(|rank| way(&rank, data))?;
        let mut all = ranks.into_iter().reduce(Trained::with).unwrap_or_default();
        same &= emit(&report, name, &SMALL, &mut all);
        let efficiency = one_ms / (RANKS as f64 * median(&mut all.times_ms));
        report.emit(name, "efficiency", 100.0 * efficiency, "%");
    }
    Ok(same)
}

fn ddp(rank: &Rank, data: &Path) -> Result<Trained, String> {
    let wrap = |model: &_| Ddp::new(model, rank.comm().clone(), DdpConfig::default()).map(Some);
    train(&SMALL, data, Some(rank), wrap).map_err(|e| e.to_string())
}
