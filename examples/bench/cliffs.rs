//! Operations that must not cost much more than plain ones: a reduction along any dimension beside the last one, and
//! an operation that moves as many bytes. A cliff is found on one machine, without another system to compare with.

use phalanx::autograd::Result;
use phalanx::kernels::{ConvOptions, PoolOptions};
use phalanx::nn::no_grad;
use phalanx::{DType, Tensor, Var, kernels};

use crate::measure::{Report, ids, median_ms, uniform};

struct Inputs {
    /// `[512, 512]`, and the same by columns, in bf16 and in bytes.
    x: Var,
    turned: Var,
    half: Var,
    bytes: Var,
    /// Images of 64 channels, by rows and with channels last.
    images: Var,
    last: Var,
    /// A million elements.
    long: Var,
    /// Of a vocabulary.
    scores: Var,
    /// 512 numbers of columns.
    columns: Var,
    /// A filter for each of 64 channels.
    filters: Var,
    /// 21 classes of pixels, in front of the pixels and behind.
    classes: Var,
    classes_last: Var,
}

type Run = fn(&Inputs) -> Result<Var>;

/// An operation, a plain one beside it, and how many times as long it may take on a busy machine: some three times what it takes on a
/// quiet one.
const PAIRS: [(&str, Run, Run, f64); 16] = [
    ("relu of columns", |i| i.turned.relu(), |i| i.x.relu(), 4.0),
    ("add of columns", |i| i.turned.add(&i.turned), |i| i.x.add(&i.x), 4.0),
    ("add of columns to rows", |i| i.turned.add(&i.x), |i| i.x.add(&i.x), 12.0),
    ("add of channels last", |i| i.last.add(&i.last), |i| i.images.add(&i.images), 4.0),
    ("max pool of channels last", |i| i.last.max_pool2d(&pool()), |i| i.images.max_pool2d(&pool()), 6.0),
    ("sum of columns", |i| i.turned.sum(&[0], false), |i| i.x.sum(&[0], false), 12.0),
    ("flip", |i| i.bytes.flip(&[1]), |i| i.bytes.add(&i.bytes), 6.0),
    ("bytes to f32", |i| i.bytes.to(DType::F32), |i| i.x.relu(), 4.0),
    ("bf16 to bool", |i| i.half.to(DType::Bool), |i| i.half.relu(), 6.0),
    ("dot", |i| i.long.matmul(&i.long), |i| i.long.sum(&[0], false), 6.0),
    ("maximum of bytes", |i| i.bytes.amax(&[0, 1], false), |i| i.x.amax(&[0, 1], false), 6.0),
    ("cumsum", |i| i.long.cumsum(0), |i| i.long.relu(), 25.0),
    ("top 50", |i| Ok(i.scores.topk(50, 1, true)?.0), |i| i.scores.amax(&[1], false), 18.0),
    ("columns by number", |i| i.x.index_select(1, &i.columns), |i| i.x.relu(), 16.0),
    ("softmax of channels", |i| i.classes.softmax(1), |i| i.classes_last.softmax(3), 6.0),
    ("depthwise convolution", |i| i.images.conv2d(&i.filters, None, &depthwise()), |i| i.images.relu(), 25.0),
];

fn pool() -> PoolOptions {
    PoolOptions::new([2; 2])
}

fn depthwise() -> ConvOptions {
    ConvOptions { padding: [1; 2], groups: 64, ..ConvOptions::default() }
}

/// A suspected cliff is measured so many times, because other programs may have slowed one measurement; the last one counts.
const TRIES: usize = 3;

/// Whether no operation is a cliff.
pub fn cliffs(report: &Report, only: &str) -> Result<bool> {
    let _grad = no_grad();
    let inputs = inputs()?;
    let mut good = true;
    for (name, operation, plain, limit) in PAIRS.iter().filter(|(name, ..)| name.contains(only)) {
        operation(&inputs)?;
        plain(&inputs)?;
        let mut ratio = f64::INFINITY;
        for _ in 0..TRIES {
            let time = |run: &Run| median_ms(0.05, || assert!(run(&inputs).is_ok()));
            ratio = time(operation) / time(plain);
            if ratio <= *limit {
                break;
            }
        }
        report.emit("cliffs", name, ratio, "of the plain one");
        if ratio > *limit {
            good = false;
            eprintln!(
                "bench: {name} takes {ratio:.1} times as long as the plain operation, wanted {limit} at most"
            );
        }
    }
    Ok(good)
}

fn inputs() -> Result<Inputs> {
    let random = |seed, shape: &[usize]| uniform(seed, shape, 1.0).map(Var::new);
    let x = random(1, &[512, 512])?;
    Ok(Inputs {
        turned: x.transpose(0, 1)?,
        half: x.to(DType::BF16)?,
        bytes: Var::new(ids(3, 512 * 512, 200)?.with_shape(&[512, 512])?).to(DType::U8)?,
        x,
        images: random(2, &[8, 64, 56, 56])?,
        last: random(2, &[8, 56, 56, 64])?.permute(&[0, 3, 1, 2])?,
        long: random(4, &[1 << 20])?,
        scores: random(5, &[64, 50_257])?,
        columns: Var::new(ids(6, 512, 512)?),
        filters: random(7, &[64, 1, 3, 3])?,
        classes: random(8, &[64, 21, 64, 64])?,
        classes_last: random(8, &[64, 64, 64, 21])?,
    })
}

/// No dimension may cost so many times as much as the last: 2.5 is the goal, and a busy machine may double it.
const CLIFF: f64 = 5.0;

type Along = fn(&Tensor, usize) -> phalanx::tensor::Result<Tensor>;

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

/// The milliseconds along each dimension.
fn along_each(along: Along, x: &Tensor) -> phalanx::tensor::Result<Vec<f64>> {
    let time = |dim| {
        along(x, dim)?;
        Ok(median_ms(0.1, || assert!(along(x, dim).is_ok())))
    };
    (0..x.shape().len()).map(time).collect()
}

/// Returns whether there is no cliff.
pub fn dims(report: &Report, only: &str) -> phalanx::tensor::Result<bool> {
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
