//! Training steps of five models that are no GPT: two convolution nets, a segmentation net, a recurrent language model and a vision
//! transformer. `scripts/models_peer.py` does the same work in PyTorch.

#[path = "models/layers.rs"]
mod layers;

use std::error::Error;
use std::time::Instant;

use phalanx::nn::{AdamW, Group, Module, Optimizer, Parameters, Rule, Scope, SequentialConfig, Sgd, no_grad};
use phalanx::tensor::RngKey;
use phalanx::{Context, DType, Device, Tensor, Var};

use crate::inputs::{ids, uniform};
use crate::report::{Report, median, millis, peak_rss};

const WARMUP: usize = 3;
const STEPS: usize = 15;
/// How far losses may be from PyTorch's, as a part of them. MobileNet's fifth is 1.2e-4 away, the others less than 1e-5.
const TOLERANCE: f64 = 2e-4;

/// A model with its batches.
struct Workload {
    name: &'static str,
    layers: fn() -> SequentialConfig,
    input: Input,
    /// Classes that are told apart, and how many answers a batch has.
    classes: u64,
    targets: &'static [usize],
    /// AdamW at 1e-3; otherwise SGD with momentum at 1e-4: batch norm makes larger steps chaotic, so that after three of them at 0.01
    /// PyTorch's own losses in f32 and f64 agree to two digits.
    adam: bool,
    /// PyTorch's first losses in f32.
    losses: [f64; 5],
}

enum Input {
    /// Images of this shape.
    Images([usize; 4]),
    /// Tokens `[batch, time]` below a vocabulary's size.
    Tokens([usize; 2], u64),
}

/// 32 images of 64 x 64, each of one of 200 classes.
const RESNET18: Workload = Workload {
    name: "resnet18",
    layers: layers::resnet18,
    input: Input::Images([32, 3, 64, 64]),
    classes: 200,
    targets: &[32],
    adam: false,
    losses: [5.57455, 5.31482, 5.32062, 5.53886, 5.54467],
};

const WORKLOADS: [Workload; 5] = [
    RESNET18,
    Workload {
        name: "mobilenet",
        layers: layers::mobilenet,
        losses: [5.34908, 5.35792, 5.26980, 5.38708, 5.33383],
        ..RESNET18
    },
    Workload {
        name: "unet",
        layers: layers::unet,
        input: Input::Images([4, 3, 128, 128]),
        classes: 21,
        targets: &[4, 128, 128],
        losses: [3.12862, 3.12600, 3.12310, 3.12521, 3.12507],
        ..RESNET18
    },
    Workload {
        name: "lstm",
        layers: layers::lstm,
        input: Input::Tokens([20, 35], 10_000),
        classes: 100,
        targets: &[20 * 35],
        adam: true,
        losses: [9.21035, 9.20717, 9.20140, 9.18993, 9.15951],
    },
    Workload {
        name: "vit",
        layers: layers::vit,
        adam: true,
        losses: [5.33329, 5.48847, 5.37029, 5.56562, 5.36868],
        ..RESNET18
    },
];

/// The model called `only`, or all whose name contains it; whether the first losses in f32 were the known ones.
pub fn run(report: &Report, only: &str) -> Result<bool, Box<dyn Error>> {
    let dtypes = [(DType::F32, ""), (DType::BF16, "-bf16")];
    let all = WORKLOADS
        .iter()
        .flat_map(|w| dtypes.map(|(dtype, suffix)| (format!("{}{suffix}", w.name), w, dtype)));
    let all: Vec<_> = all.collect();
    let exact = all.iter().any(|(name, ..)| name == only);
    let mut same = true;
    for (name, workload, dtype) in &all {
        if name == only || (!exact && name.contains(only)) {
            same &= one(report, workload, name, *dtype)?;
        }
    }
    Ok(same)
}

fn one(report: &Report, workload: &Workload, name: &str, dtype: DType) -> Result<bool, Box<dyn Error>> {
    let before = Device::CPU.ledger()?.total().now;
    Device::CPU.ledger()?.reset_peak();
    let model = (workload.layers)().init(&Scope::new(0, dtype, Device::CPU))?;
    load_initial_weights(&model)?;
    report.emit(name, "rss_before", peak_rss(), "MiB");
    let rate = if workload.adam { 1e-3 } else { 1e-4 };
    let group = Group::new(model.parameters(), rate);
    let (losses, mut times) = match workload.adam {
        true => train(&model, workload, AdamW::default().init(vec![group])?),
        false => train(&model, workload, Sgd { momentum: 0.9, ..Sgd::default() }.init(vec![group])?),
    }?;
    report.emit(name, "step", median(&mut times), "ms");
    report.emit(name, "peak_rss", peak_rss(), "MiB");
    let held = Device::CPU.ledger()?.total().peak - before;
    report.emit(name, "device_peak", held as f64 / f64::from(1 << 20), "MiB");
    for (n, loss) in losses.iter().take(5).enumerate() {
        report.emit(name, &format!("loss{n}"), *loss, "nat");
    }
    let agrees = |(got, want): (&f64, &f64)| (got - want).abs() <= TOLERANCE * want;
    let same = dtype != DType::F32 || losses.iter().zip(&workload.losses).all(agrees);
    if !same {
        eprintln!("bench: {name}: the first losses are {:?}, wanted {:?}", &losses[..5], workload.losses);
    }
    Ok(same)
}

/// The losses of all steps, and the milliseconds of those after the warm-up.
fn train<R: Rule>(
    model: &dyn Module,
    workload: &Workload,
    mut optimizer: Optimizer<R>,
) -> Result<(Vec<f64>, Vec<f64>), Box<dyn Error>> {
    let (mut losses, mut times) = (Vec::new(), Vec::new());
    for n in 0..WARMUP + STEPS {
        let (input, target) = batch(workload, n as u64, dtype_of(model))?;
        let start = Instant::now();
        let _context = Context::with(|c| (c.train, c.rng) = (true, RngKey { seed: 0, step: n as u64 }));
        model.parameters().iter().try_for_each(|parameter| parameter.zero_grad())?;
        let scores = model.forward(&input)?.to(DType::F32)?;
        let loss = scores.cross_entropy(&target, &Default::default())?;
        loss.backward()?;
        optimizer.step()?;
        losses.push(f64::from(loss.tensor().item::<f32>()?));
        times.push(millis(start.elapsed()));
    }
    times.drain(..WARMUP);
    Ok((losses, times))
}

fn dtype_of(model: &dyn Module) -> DType {
    model.parameters().first().map_or(DType::F32, |parameter| parameter.tensor().dtype())
}

/// Inputs and targets of step `n`.
fn batch(workload: &Workload, n: u64, dtype: DType) -> phalanx::autograd::Result<(Var, Var)> {
    let _grad = no_grad();
    let seed = 1000 + 2 * n;
    let input = match workload.input {
        Input::Images(shape) => Var::new(uniform(seed, &shape, 1.0)?).to(dtype)?,
        Input::Tokens(shape, end) => Var::new(ids(seed, shape.iter().product(), end)?.with_shape(&shape)?),
    };
    let targets = ids(seed + 1, workload.targets.iter().product(), workload.classes)?;
    Ok((input, Var::new(targets.with_shape(workload.targets)?)))
}

/// Parameter number n takes stream n, in order of registration: matrices within `1 / sqrt(inputs)`; gains are 1, biases 0.
fn load_initial_weights(model: &dyn Module) -> Result<(), Box<dyn Error>> {
    for (stream, (name, parameter)) in model.named_parameters().into_iter().enumerate() {
        let shape = parameter.tensor().shape().to_vec();
        let values: Tensor = match shape.as_slice() {
            [_] => {
                let gain = if name.ends_with("weight") { 1.0 } else { 0.0 };
                phalanx::kernels::full(&shape, gain, DType::F32, Device::CPU)?
            }
            [_, inputs @ ..] => {
                let bound = 1.0 / (inputs.iter().product::<usize>() as f64).sqrt();
                uniform(stream as u64, &shape, bound as f32)?
            }
            [] => continue,
        };
        parameter.load(&values)?;
    }
    Ok(())
}
