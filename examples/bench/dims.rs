//! Reductions and what else runs along one dimension, along each: a dimension must not cost much more than the last.

use phalanx::tensor::Result;
use phalanx::{DType, Tensor, kernels};

use crate::inputs::uniform;
use crate::report::{Report, median_ms};

/// No dimension may cost so many times as much as the last: 2.5 is the goal, and a busy machine may double it.
const CLIFF: f64 = 5.0;

type Along = fn(&Tensor, usize) -> Result<Tensor>;

const OPERATIONS: [(&str, Along); 12] = [
    ("logsumexp", |x, dim| kernels::logsumexp(x, &[dim], false)),
    ("norm 3", |x, dim| kernels::norm(x, 3.0, &[dim], false)),
    ("norm 2", |x, dim| kernels::norm(x, 2.0, &[dim], false)),
    ("var", |x, dim| kernels::var(x, &[dim], 1.0, false)),
    ("sum", |x, dim| kernels::sum(x, &[dim], false)),
    ("prod", |x, dim| kernels::prod(x, &[dim], false)),
    ("amax", |x, dim| kernels::amax(x, &[dim], false)),
    ("max", |x, dim| Ok(kernels::max(x, dim, false)?.0)),
    ("argmax", |x, dim| kernels::argmax(x, Some(dim), false)),
    ("softmax", |x, dim| kernels::softmax(x, dim)),
    ("log_softmax", |x, dim| kernels::log_softmax(x, dim)),
    ("cumsum", |x, dim| kernels::cumsum(x, dim)),
];

/// A ratio above the limit is measured so many times, since other programs may have slowed one measurement; the last one counts.
const TRIES: usize = 3;

/// The milliseconds along each dimension.
fn along_each(along: Along, x: &Tensor) -> Result<Vec<f64>> {
    let time = |dim| {
        along(x, dim)?;
        Ok(median_ms(0.1, || assert!(along(x, dim).is_ok())))
    };
    (0..x.shape().len()).map(time).collect()
}

/// Returns whether there is no cliff.
pub fn run(report: &Report, only: &str) -> Result<bool> {
    let mut worst = (0.0, String::new());
    for shape in [&[256, 192, 160][..], &[4096, 1000]] {
        for dtype in [DType::F32, DType::BF16] {
            let x = kernels::cast(&uniform(7, shape, 1.0)?, dtype)?;
            for (name, along) in OPERATIONS.iter().filter(|(name, _)| name.contains(only)) {
                let mut times = along_each(*along, &x)?;
                for _ in 1..TRIES {
                    let last = times[shape.len() - 1];
                    if times.iter().all(|time| time / last <= CLIFF) {
                        break;
                    }
                    times = along_each(*along, &x)?;
                }
                for (dim, &ms) in times.iter().enumerate() {
                    let ratio = ms / times[shape.len() - 1];
                    let metric = format!("{name} {dtype:?} {shape:?} along {dim}");
                    report.emit("dims", &metric, ms * 1e6 / x.numel() as f64, "ns/element");
                    report.emit("dims", &metric, ratio, "of the last");
                    if ratio > worst.0 {
                        worst = (ratio, metric);
                    }
                }
            }
        }
    }
    println!("bench: worst: {}, {:.2} times the last dimension", worst.1, worst.0);
    Ok(worst.0 <= CLIFF)
}
