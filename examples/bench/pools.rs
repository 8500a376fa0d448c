//! A program that uses rayon itself, beside a device with threads of its own and beside one that runs on rayon's.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use phalanx::tensor::{Pool, Result};
use phalanx::{Device, Tensor, kernels};
use rayon::prelude::*;

use crate::inputs::uniform;
use crate::report::{Report, median_ms};

/// Tasks of the program's loop.
const TASKS: usize = 32;
/// Multiplications of the program's own, some tens of microseconds.
const OWN_WORK: usize = 50_000;

/// Reports milliseconds and how far the program's own loop comes, for both kinds of device.
pub fn run(report: &Report) -> Result<()> {
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
fn layers(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
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
