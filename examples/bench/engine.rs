//! What the dependency engine costs: operations that do nothing, with versions and poisoning as always.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use phalanx::Device;
use phalanx::parallel::engine::Result;
use phalanx::parallel::engine::{Engine, EngineConfig, Op, Variable};

use crate::report::{Report, median};

const OPS: usize = 1 << 16;
/// Reads after each write of the fan.
const READERS: usize = 16;
const REPEATS: usize = 9;

pub fn run(report: &Report) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let engine = Engine::threaded(&EngineConfig::new().lane(Device::CPU, report.threads))?;
    let variables: Vec<Variable> = (0..OPS).map(|_| engine.new_variable()).collect();
    let first = &variables[0];
    let write = |variable| engine.push(Op::new("op").mutates(&[variable]), || Ok(()));
    // Counted where the engine runs one at a time: a read and a write that were not ordered would lose some.
    let count: &'static AtomicU64 = Box::leak(Box::default());
    let counted = || {
        engine.push(Op::new("op").mutates(&[first]), move || {
            count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
            Ok(())
        })
    };
    let read = || engine.push(Op::new("op").reads(&[first]), || Ok(()));
    measure(report, &engine, "independent", || variables.iter().try_for_each(write))?;
    measure(report, &engine, "chain", || (0..OPS).try_for_each(|_| counted()))?;
    let fan = |i: usize| if i.is_multiple_of(READERS + 1) { counted() } else { read() };
    measure(report, &engine, "fan", || (0..OPS).try_for_each(fan))?;
    let expected = (REPEATS + 1) * (OPS + OPS.div_ceil(READERS + 1));
    let ran = count.load(Ordering::Relaxed) as usize;
    if ran != expected {
        return Err(format!("the engine ran {ran} of {expected}").into());
    }
    Ok(())
}

/// Operations a second: until the last push has returned, and until all have run.
fn measure(report: &Report, engine: &Engine, name: &str, pattern: impl Fn() -> Result<()>) -> Result<()> {
    let (mut pushed, mut done) = (Vec::new(), Vec::new());
    pattern()?;
    engine.wait_for_all()?;
    for _ in 0..REPEATS {
        let start = Instant::now();
        pattern()?;
        pushed.push(start.elapsed().as_secs_f64());
        engine.wait_for_all()?;
        done.push(start.elapsed().as_secs_f64());
    }
    for (metric, times) in [("push", &mut pushed), ("run", &mut done)] {
        report.emit("engine", &format!("{name}/{metric}"), OPS as f64 / median(times), "ops/s");
    }
    Ok(())
}
