//! Training steps of five models that are no GPT: two convolution nets, a segmentation net, a recurrent language model and a vision
//! transformer. `scripts/models_peer.py` does the same work in PyTorch.

use phalanx::autograd::ContextMode;
use std::error::Error;
use std::time::Instant;

use phalanx::autograd::Var;
use phalanx::nn::models::Activation;
use phalanx::nn::{
    AdamW, AdaptiveAvgPool2d, BatchNormConfig, Conv2d, Conv2dConfig, ConvTranspose2d, EmbeddingConfig,
    Flatten, Group, Init, LayerNormConfig, LinearConfig, Lstm, MaxPool2d, Module, Optimizer, Parameter,
    Parameters, PoolOptions, RecurrentConfig, Relu, Relu6, Result, Rule, Scope, Sequential, SequentialConfig,
    Sgd, TransformerEncoderLayerConfig, no_grad, parameters,
};
use phalanx::tensor::RngKey;
use phalanx::{Context, DType, Device, Tensor};

use crate::measure::{Report, ids, median, millis, peak_rss, uniform};

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
    layers: resnet18,
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
        layers: mobilenet,
        losses: [5.34908, 5.35792, 5.26980, 5.38708, 5.33383],
        ..RESNET18
    },
    Workload {
        name: "unet",
        layers: unet,
        input: Input::Images([4, 3, 128, 128]),
        classes: 21,
        targets: &[4, 128, 128],
        losses: [3.12862, 3.12600, 3.12310, 3.12521, 3.12507],
        ..RESNET18
    },
    Workload {
        name: "lstm",
        layers: lstm,
        input: Input::Tokens([20, 35], 10_000),
        classes: 100,
        targets: &[20 * 35],
        adam: true,
        losses: [9.21035, 9.20717, 9.20140, 9.18993, 9.15951],
    },
    Workload {
        name: "vit",
        layers: vit,
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
        let _context = Context::with(|c| {
            c.set_train(true);
            c.rng = RngKey { seed: 0, step: n as u64 };
        });
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

fn conv(inputs: usize, outputs: usize, kernel: usize, stride: usize) -> Conv2dConfig {
    let config = Conv2dConfig::new(inputs, outputs, [kernel; 2]).with_stride([stride; 2]);
    config.with_padding([kernel / 2; 2]).with_bias(false)
}

fn conv_norm(inputs: usize, outputs: usize, kernel: usize, stride: usize) -> SequentialConfig {
    let conv = conv(inputs, outputs, kernel, stride);
    SequentialConfig::new().with(conv).with(BatchNormConfig::new(outputs))
}

/// `f(x)` plus `x`, or plus a projection of it.
struct Residual {
    f: Sequential,
    shortcut: Option<Sequential>,
}

parameters!(Residual { f, shortcut });

impl Module for Residual {
    fn forward(&self, x: &Var) -> Result<Var> {
        let carried = self.shortcut.as_ref().map(|layers| layers.forward(x)).transpose()?;
        Ok(self.f.forward(x)?.add(carried.as_ref().unwrap_or(x))?)
    }
}

/// The basic block. Source: He et al.: Deep residual learning (2015).
fn basic(inputs: usize, outputs: usize, stride: usize) -> impl FnOnce(&Scope) -> Result<Residual> + Send {
    move |scope| {
        let f = conv_norm(inputs, outputs, 3, stride).with(Relu).with(conv(outputs, outputs, 3, 1));
        let f = f.with(BatchNormConfig::new(outputs)).init(&scope.child("f"))?;
        let projects = stride != 1 || inputs != outputs;
        let shortcut = projects.then(|| conv_norm(inputs, outputs, 1, stride).init(&scope.child("shortcut")));
        Ok(Residual { f, shortcut: shortcut.transpose()? })
    }
}

/// ResNet-18 for 200 classes, 11.3 million parameters.
pub fn resnet18() -> SequentialConfig {
    let pool = MaxPool2d(PoolOptions { stride: [2; 2], padding: [1; 2], ..PoolOptions::new([3; 2]) });
    let mut layers = conv_norm(3, 64, 7, 2).with(Relu).with(pool);
    let mut inputs = 64;
    for (outputs, stride) in [(64, 1), (128, 2), (256, 2), (512, 2)] {
        layers = layers.with_fn(basic(inputs, outputs, stride)).with(Relu);
        layers = layers.with_fn(basic(outputs, outputs, 1)).with(Relu);
        inputs = outputs;
    }
    layers.with(AdaptiveAvgPool2d([1; 2])).with(Flatten::default()).with(LinearConfig::new(512, 200))
}

/// An inverted residual. Source: Sandler et al.: MobileNetV2 (2018).
fn inverted(inputs: usize, outputs: usize, stride: usize, wider: usize) -> SequentialConfig {
    let inner = inputs * wider;
    let widened = match wider {
        1 => SequentialConfig::new(),
        _ => conv_norm(inputs, inner, 1, 1).with(Relu6),
    };
    let mut depthwise = conv(inner, inner, 3, stride);
    depthwise = depthwise.with_options(phalanx::kernels::ConvOptions {
        stride: [stride; 2],
        padding: [1; 2],
        groups: inner,
        ..Default::default()
    });
    let layers = widened.with(depthwise).with(BatchNormConfig::new(inner)).with(Relu6);
    layers.with(conv(inner, outputs, 1, 1)).with(BatchNormConfig::new(outputs))
}

/// MobileNetV2 for small images: its first convolution keeps their size. 2.5 million parameters.
pub fn mobilenet() -> SequentialConfig {
    let mut layers = conv_norm(3, 32, 3, 1).with(Relu6);
    let mut inputs = 32;
    let stages = [
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ];
    for (wider, outputs, count, stride) in stages {
        for n in 0..count {
            let (from, stride) = if n == 0 { (inputs, stride) } else { (outputs, 1) };
            let block = inverted(from, outputs, stride, wider);
            layers = match n {
                0 => layers.with(block),
                _ => {
                    layers.with_fn(|scope| Ok(Residual { f: block.init(&scope.child("f"))?, shortcut: None }))
                }
            };
        }
        inputs = outputs;
    }
    let head = SequentialConfig::new().with(AdaptiveAvgPool2d([1; 2])).with(Flatten::default());
    layers.with(conv_norm(320, 1280, 1, 1)).with(Relu6).with(head).with(LinearConfig::new(1280, 200))
}

/// A level of the U-Net: `after([x', below(x')])` with `x' = before(x)`.
struct Level {
    before: Sequential,
    below: Sequential,
    after: Sequential,
}

parameters!(Level { before, below, after });

impl Module for Level {
    fn forward(&self, x: &Var) -> Result<Var> {
        let x = self.before.forward(x)?;
        let below = self.below.forward(&x)?;
        self.after.forward(&Var::cat(&[x, below], 1)?)
    }
}

fn twice(inputs: usize, outputs: usize) -> SequentialConfig {
    conv_norm(inputs, outputs, 3, 1)
        .with(Relu)
        .with(conv(outputs, outputs, 3, 1))
        .with(BatchNormConfig::new(outputs))
        .with(Relu)
}

fn level(inputs: usize, width: usize, depth: usize, scope: &Scope) -> Result<Box<dyn Module>> {
    if depth == 0 {
        return Ok(Box::new(twice(inputs, width).init(scope)?));
    }
    let up = Conv2dConfig::new(2 * width, width, [2; 2]).with_stride([2; 2]);
    let below = SequentialConfig::new()
        .with(MaxPool2d::new([2; 2]))
        .with_fn(move |scope| level(width, 2 * width, depth - 1, scope))
        .with_fn(move |scope| -> Result<ConvTranspose2d> { up.init_transposed(scope) });
    Ok(Box::new(Level {
        before: twice(inputs, width).init(&scope.child("before"))?,
        below: below.init(&scope.child("below"))?,
        after: twice(2 * width, width).init(&scope.child("after"))?,
    }))
}

/// A U-Net of four halvings that gives each pixel one of 21 classes, 7.8 million parameters.
/// Source: Ronneberger et al.: U-Net (2015).
pub fn unet() -> SequentialConfig {
    let head = |scope: &Scope| -> Result<Conv2d> { Conv2dConfig::new(32, 21, [1; 2]).init(scope) };
    SequentialConfig::new().with_fn(|scope| level(3, 32, 4, scope)).with_fn(head)
}

/// The outputs of an LSTM, `[B, T, hidden]` to `[B T, hidden]`.
struct Recurrent {
    lstm: Lstm,
}

parameters!(Recurrent { lstm });

impl Module for Recurrent {
    fn forward(&self, x: &Var) -> Result<Var> {
        Ok(self.lstm.forward(x, None, None)?.output.flatten(0, 1)?)
    }
}

/// A language model: a table, two recurrent layers, a head; 13.9 million parameters.
/// Source: Zaremba et al.: Recurrent neural network regularization (2014), without dropout.
pub fn lstm() -> SequentialConfig {
    let lstm = RecurrentConfig::new(256, 512).with_layers(2);
    SequentialConfig::new()
        .with(EmbeddingConfig::new(10_000, 256))
        .with_fn(move |scope| Ok(Recurrent { lstm: lstm.init_lstm(&scope.child("lstm"))? }))
        .with(LinearConfig::new(512, 10_000))
}

/// Images to sequences of patches, with learnt positions.
struct Patches {
    projection: Conv2d,
    positions: Parameter,
}

parameters!(Patches { positions, projection });

impl Module for Patches {
    fn forward(&self, x: &Var) -> Result<Var> {
        let patches = self.projection.forward(x)?.flatten(2, 3)?.transpose(1, 2)?;
        Ok(patches.add(&self.positions.var())?)
    }
}

/// The mean over a sequence.
struct MeanOverTime;

parameters!(MeanOverTime {});

impl Module for MeanOverTime {
    fn forward(&self, x: &Var) -> Result<Var> {
        Ok(x.mean(&[1], false)?)
    }
}

/// A vision transformer, ViT-Ti with six layers, over patches of 8 x 8, 2.7 million parameters.
/// Source: Dosovitskiy et al.: An image is worth 16x16 words (2020).
pub fn vit() -> SequentialConfig {
    const WIDTH: usize = 192;
    let patches = |scope: &Scope| {
        let projection = Conv2dConfig::new(3, WIDTH, [8; 2]).with_stride([8; 2]);
        Ok(Patches {
            projection: projection.init(&scope.child("projection"))?,
            positions: scope.parameter("positions", &[64, WIDTH], Init::ZEROS)?,
        })
    };
    let layer = TransformerEncoderLayerConfig {
        inner: 4 * WIDTH,
        dropout: 0.0,
        activation: Activation::Gelu,
        norm_first: true,
        ..TransformerEncoderLayerConfig::new(WIDTH, 3)
    };
    let layers = (0..6).fold(SequentialConfig::new().with_fn(patches), |layers, _| layers.with(layer));
    layers.with(LayerNormConfig::new(&[WIDTH])).with(MeanOverTime).with(LinearConfig::new(WIDTH, 200))
}
