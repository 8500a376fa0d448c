//! Overheads: chains of tiny operations, pools beside a program that uses rayon itself, the dependency engine.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use phalanx::autograd::{Options, grad, no_grad};
use phalanx::parallel::engine::{self, Engine, EngineConfig, Op, Variable};
use phalanx::tensor::Pool;
use phalanx::{DType, Device, Tensor, Var, kernels};
use rayon::prelude::*;

use crate::measure::{Report, median, median_ms, uniform};

/// Multiplications and additions of 8-element tensors in a chain.
const PAIRS: usize = 1000;

pub fn chains(report: &Report) -> Result<(), Box<dyn std::error::Error>> {
    let filled = |x: f64| kernels::full(&[8], x, DType::F32, Device::CPU);
    let (a, b) = (Var::new(filled(1.0001)?), Var::new(filled(0.001)?));
    let chain = |x: &Var| -> phalanx::autograd::Result<Var> {
        (0..PAIRS).try_fold(x.clone(), |x, _| x.mul(&a)?.add(&b))
    };
    let leaf = Var::leaf(filled(1.0)?)?;
    let ones: Tensor = filled(1.0)?;
    chain(&leaf)?;
    let emit = |metric: &str, f: &mut dyn FnMut()| {
        report.emit("overhead", metric, median_ms(1.0, f) * 1e6 / (2 * PAIRS) as f64, "ns/op");
    };
    emit("fwd_no_grad", &mut || {
        let _guard = no_grad();
        drop(chain(&leaf));
    });
    emit("fwd", &mut || drop(chain(&leaf)));
    emit("fwd+bwd", &mut || {
        let both = chain(&leaf)
            .and_then(|y| grad(&[(y, Some(Var::new(ones.clone())))], &[&leaf], Options::default()));
        assert!(both.is_ok(), "the chain has a gradient");
    });
    Ok(())
}

/// Tasks of the program's loop.
const TASKS: usize = 32;
/// Multiplications of the program's own, some tens of microseconds.
const OWN_WORK: usize = 50_000;

/// Reports milliseconds and how far the program's own loop comes, for both kinds of device.
pub fn pools(report: &Report) -> phalanx::tensor::Result<()> {
    rayon::ThreadPoolBuilder::new().num_threads(report.threads).build_global().ok();
    let (own, shared) = (Device::Cpu(1), Device::Cpu(2));
    own.set_threads(report.threads)?;
    shared.set_pool(Pool::on_rayon(None))?;
    for (name, device) in [("own threads", own), ("rayon's", shared)] {
        let on = |seed, shape: &[usize]| uniform(seed, shape, 1.0)?.to_device(device, false);
        let (few, many, weight) = (on(1, &[64, 256])?, on(2, &[1024, 256])?, on(3, &[256, 256])?);
        let emit = |what: &str, value: f64, unit: &str| {
            report.emit("rayon", &format!("{what}, {name}"), value, unit)
        };
        for (what, x) in [("64 rows", &few), ("1024 rows", &many)] {
            let alone = median_ms(0.5, || assert!(layers(x, &weight).is_ok()));
            emit(&format!("{what} from one thread"), alone, "ms");
            let each = || (0..TASKS).into_par_iter().for_each(|_| assert!(layers(x, &weight).is_ok()));
            emit(&format!("{what} in each of {TASKS} tasks"), median_ms(0.5, each), "ms");
        }
        let (alone, rounds) = beside(|| median_ms(1.0, || assert!(layers(&many, &weight).is_ok())));
        emit("1024 rows beside a busy loop", alone, "ms");
        emit("the busy loop beside them", rounds, "tasks/s");
    }
    Ok(())
}

/// Four layers.
fn layers(x: &Tensor, weight: &Tensor) -> phalanx::tensor::Result<Tensor> {
    (0..4).try_fold(x.clone(), |x, _| kernels::tanh(&kernels::matmul(&x, weight)?))
}

/// What `measure` returns while a loop of rayon's goes on, and how many tasks that does a second.
fn beside(measure: impl FnOnce() -> f64) -> (f64, f64) {
    let (stop, tasks) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                (0..TASKS).into_par_iter().for_each(|_| {
                    let sum = (0..OWN_WORK).fold(1.0f64, |sum, i| sum.mul_add(0.5, i as f64));
                    std::hint::black_box(sum);
                    tasks.fetch_add(1, Ordering::Relaxed);
                });
            }
        });
        let start = Instant::now();
        let measured = measure();
        stop.store(true, Ordering::Relaxed);
        (measured, tasks.load(Ordering::Relaxed) as f64 / start.elapsed().as_secs_f64())
    })
}

const OPS: usize = 1 << 16;
/// Reads after each write of the fan.
const READERS: usize = 16;
const REPEATS: usize = 9;

pub fn engine(report: &Report) -> std::result::Result<(), Box<dyn std::error::Error>> {
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
fn measure(
    report: &Report,
    engine: &Engine,
    name: &str,
    pattern: impl Fn() -> engine::Result<()>,
) -> engine::Result<()> {
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
