//! What a step costs: [`Run::profile`] times its operations, [`Run::memory_report`] finds its memory on a meta device.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use phalanx_kernels::{peak_bandwidth, peak_flops};
use phalanx_nn::autograd::{OperationTime, Profiler};
use phalanx_nn::{Batch, autograd};
use phalanx_parallel::all_gather_object;
use phalanx_parallel::mesh::Axis;
use phalanx_tensor::{Category, Ledger, Usage};
use serde::{Deserialize, Serialize};

use super::step::{compute_gradients, in_model_dtype, in_step, update};
use crate::report::{Operation, Pass, Profile, Profiled};
use crate::run::Run;
use crate::{Error, Offload, Result};

/// Steps before the timed ones. They compile kernels and allocate memory.
const WARM_UP: u64 = 3;

/// A rank's measurements, which it sends to the others.
#[derive(Serialize, Deserialize)]
struct RankMeasurements(Profiled, Vec<Operation>);

/// The calls and the time of phases that are no operations: `data`, `optimizer`.
type Phases = RefCell<BTreeMap<&'static str, (u64, Duration)>>;

impl Run {
    /// Trains some steps after a warm-up, and times each operation. The result has a row for each name, pass and rank, with floating-point
    /// operations and bytes, and the machine's peaks, which are measured first. The row `other` is the rest of a step's time. On a GPU the
    /// host waits for each operation, so steps take longer than in a run. All ranks call it, and all get the measurements of all.
    ///
    /// # Errors
    /// On a meta device, where nothing takes time; for a pipeline without flushes, whose steps overlap; errors of a step.
    pub fn profile(&mut self, steps: u64) -> Result<Profile> {
        let config = &self.setup.config;
        if config.device.is_meta() || config.asynchronous.is_some() || steps == 0 {
            let got = match (config.device.is_meta(), config.asynchronous.is_some()) {
                (true, _) => "a meta device, wanted one that computes",
                (_, true) => "a pipeline without flushes, wanted a schedule with them",
                _ => "0 steps, wanted 1 at least",
            };
            return Err(Error::Config(format!("profile: got {got}")));
        }
        let (device, dtype, rank) = (self.mesh_rank.device, config.dtype, self.mesh_rank.rank());
        // All ranks measure at the same time, since they train at the same time.
        self.mesh_rank.sum(0.0)?;
        let peaks = [peak_flops(dtype, device)?, peak_bandwidth(device)?];
        let mut loader = self.loader(device, self.done)?;
        let phases = Phases::default();
        let mut batches = |phases: &Phases| -> Result<Vec<Batch>> {
            let begin = Instant::now();
            let batches = loader.next_step()?.into_iter().map(|batch| in_model_dtype(batch, dtype)).collect();
            note(phases, "data", begin);
            batches
        };
        for _ in 0..WARM_UP {
            let micros = batches(&phases)?;
            self.phased(&micros, &phases)?;
        }
        phases.take();
        self.mesh_rank.sum(0.0)?;
        let (profiler, begin) = (Profiler::begin(device)?, Instant::now());
        for _ in 0..steps {
            let micros = batches(&phases)?;
            self.phased(&micros, &phases)?;
        }
        device.synchronize()?;
        let ms = begin.elapsed().as_secs_f64() * 1e3;
        let own = operations(rank, ms, profiler.end(), phases.take());
        let [peak_flops_per_s, peak_bytes_per_s] = peaks;
        let own = RankMeasurements(Profiled { rank, ms, peak_flops_per_s, peak_bytes_per_s }, own);
        let (ranks, operations): (Vec<_>, Vec<_>) = all_gather_object(self.mesh_rank.all_ranks(), &own)?
            .into_iter()
            .map(|RankMeasurements(rank, operations)| (rank, operations))
            .unzip();
        Ok(Profile { steps, ranks, operations: operations.concat() })
    }

    /// A step whose phases are timed.
    fn phased(&mut self, micros: &[Batch], phases: &Phases) -> Result<()> {
        let (device, step) = (self.mesh_rank.device, self.done);
        let watch = |phase: &'static str, begin| {
            // An error of the device is returned by the next operation.
            let _ = device.synchronize();
            note(phases, phase, begin);
        };
        self.optimizers.set_lr(&self.setup.config.lr, step, self.plateau.lr_factor);
        let options = self.setup.step_options(self.counted_in(step), &watch);
        let gradients =
            in_step(step, compute_gradients(&self.model, &self.optimizers, micros, options, step))?;
        in_step(step, update(&mut self.optimizers, &gradients, options))?;
        self.done += 1;
        Ok(())
    }
}

fn note(phases: &Phases, phase: &'static str, begin: Instant) {
    let mut phases = phases.borrow_mut();
    let (calls, time) = phases.entry(phase).or_default();
    (*calls, *time) = (*calls + 1, *time + begin.elapsed());
}

/// The rows of a rank. The last one has the rest of its time.
fn operations(
    rank: usize,
    ms: f64,
    seen: Vec<OperationTime>,
    phases: BTreeMap<&'static str, (u64, Duration)>,
) -> Vec<Operation> {
    let operation = |seen: OperationTime| Operation {
        rank,
        name: seen.name.into(),
        pass: match seen.pass {
            autograd::Pass::Forward => Pass::Forward,
            autograd::Pass::Recompute => Pass::Recompute,
            autograd::Pass::Backward => Pass::Backward,
            autograd::Pass::Wait => Pass::Step,
        },
        calls: seen.calls,
        ms: seen.time.as_secs_f64() * 1e3,
        flops: seen.flops,
        bytes: seen.bytes,
    };
    let phase = |(name, (calls, time)): (&str, (u64, Duration))| Operation {
        rank,
        name: name.into(),
        calls,
        ms: time.as_secs_f64() * 1e3,
        ..Operation::default()
    };
    let mut all: Vec<Operation> =
        seen.into_iter().map(operation).chain(phases.into_iter().map(phase)).collect();
    let rest = ms - all.iter().map(|operation| operation.ms).sum::<f64>();
    all.push(Operation { rank, name: "other".into(), ms: rest.max(0.0), ..Operation::default() });
    all
}

impl Run {
    /// Runs two steps on a meta device, which has no elements, and returns a table of the bytes that the ledger counted: the peak of each
    /// category, its part of the peak of all together, and the bytes after the second backward pass. The second step is the one that
    /// counts, because the first allocates the gradients. Making the model and the optimizer has a peak of its own. With several
    /// ranks the table is that of the first rank. The others need as much, up to a block of 64 elements for each parameter that is cut. In a
    /// pipeline, a tensor that is sent counts until its receiver takes it; the table assumes that receivers come as late as the schedule allows.
    ///
    /// # Errors
    /// What goes wrong in a step.
    pub fn memory_report(&mut self) -> Result<String> {
        let mut loader = self.loader(self.mesh_rank().device, 0)?;
        let ledger = self.mesh_rank().device.ledger()?;
        let config = &self.setup.config;
        let offloads = config.offload != Offload::None || config.offload_activations;
        let host = match offloads {
            true => Some(self.mesh_rank().offload_device(config)?.ledger()?),
            false => None,
        };
        // The peak of building the model is not part of a step.
        let made = ledger.total().peak;
        ledger.reset_peak();
        ledger.watch();
        host.into_iter().for_each(Ledger::reset_peak);
        let mut sent = 0;
        for _ in 0..2 {
            let micros = loader.next_step()?;
            sent = self.setup.data_parallel.traffic().bytes;
            self.step(&micros)?;
        }
        // Steps of very many operations are not recorded to their end.
        let is_peak = |each: &[usize; 5]| each.iter().sum::<usize>() == ledger.total().peak;
        let at_peak = ledger.watched().into_iter().map(|(_, each)| each).find(is_peak);
        sent = self.setup.data_parallel.traffic().bytes - sent;
        let mesh_rank = self.mesh_rank();
        let of = if mesh_rank.size() > 1 { ", for each rank" } else { "" };
        let mut report = match mesh_rank.groups.mesh().size(Axis::Pp) {
            1 => format!("{} parameters; ", self.parameters()),
            n => format!(
                "pipeline rank {} of {n}, if all that it sends waits as long as it can; ",
                mesh_rank.groups.at().pp
            ),
        };
        report +=
            &format!("peak bytes of a training step{of}, of each category alone and in the sum's peak:\n");
        let rows = |ledger: &Ledger, bytes: fn(Usage) -> usize, at_peak: Option<[usize; 5]>| -> String {
            let of = |category: Category| (category.name(), ledger.category(category));
            let usages = Category::ALL.map(of).into_iter().chain([("in all", ledger.total())]);
            let row = |(number, (name, usage)): (usize, (&str, Usage))| {
                let then = at_peak.map(|each| each.get(number).copied().unwrap_or(usage.peak));
                let then = then.map_or(String::new(), |bytes| format!(" {bytes:>15}"));
                format!("  {name:<16} {:>15}{then}\n", bytes(usage))
            };
            usages.enumerate().map(row).collect()
        };
        report += &rows(ledger, |usage| usage.peak, at_peak);
        report += &format!("made with at most: {made:>15}\n");
        report += "after backward:\n";
        report += &rows(ledger, |usage| usage.now, None);
        if let Some(host) = host {
            report += "in the host's memory, at the peak:\n";
            report += &rows(host, |usage| usage.peak, None);
            report += &format!("  {:<16} {:>15}\n", "in files", host.on_disk().peak);
        }
        if mesh_rank.size() > 1 {
            report += &format!("sent in a step:    {sent:>15}\n");
        }
        Ok(report)
    }
}
