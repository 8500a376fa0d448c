//! Training steps of `nn`'s GPT, with the library's own loss and optimizer, through the example's step function.

use std::error::Error;
use std::path::Path;
use std::time::Instant;

use phalanx::nn::models::{Decoder, GptConfig};
use phalanx::nn::{AdamW, Batch, Group, Optimizer, Parameters, Result, Rule, Scope};
use phalanx::parallel::data_parallel::{Alone, DataParallel};
use phalanx::parallel::launch::Rank;
use phalanx::{DType, Device, Tensor, kernels};

use crate::inputs::{Windows, uniform};
use crate::report::{Report, median, millis, peak_rss};
use crate::step::{Settings, train_step};

const VOCABULARY: usize = 256;
const CONTEXT: usize = 256;
const WARMUP: usize = 3;
const STEPS: usize = 20;

/// A workload.
pub struct Size {
    pub name: &'static str,
    layers: usize,
    heads: usize,
    width: usize,
    batch: usize,
    /// Of matrix products; everything else is f32.
    dtype: DType,
    /// The first losses that every system prints, and how near ours must be.
    losses: [f64; 5],
    tolerance: f64,
}

pub const SMALL: Size = Size {
    name: "gpt-s",
    layers: 4,
    heads: 4,
    width: 256,
    batch: 8,
    dtype: DType::F32,
    losses: [5.53911, 4.72241, 4.49057, 4.34564, 4.29539],
    tolerance: 1.5e-5,
};

pub const MEDIUM: Size = Size {
    name: "gpt-m",
    layers: 6,
    heads: 6,
    width: 384,
    batch: 16,
    dtype: DType::F32,
    losses: [5.60631, 4.46119, 4.12745, 4.03176, 3.95005],
    tolerance: 1.5e-5,
};

pub const MEDIUM_BF16: Size = Size { name: "gpt-bf16", dtype: DType::BF16, tolerance: 7e-4, ..MEDIUM };

/// What training has shown.
#[derive(Default)]
pub struct Trained {
    /// A step's milliseconds, after the warm-ups.
    pub times_ms: Vec<f64>,
    /// Of every step, in nats; a rank's part of them.
    losses: Vec<f64>,
}

impl Trained {
    /// The first rank's, with the losses of the next added.
    pub fn with(mut self, next: Trained) -> Trained {
        self.losses.iter_mut().zip(next.losses).for_each(|(sum, loss)| *sum += loss);
        self
    }
}

/// Whether the first losses were the known ones.
pub fn run(report: &Report, size: &Size, data: &Path) -> Result<bool, Box<dyn Error>> {
    let mut trained = train(size, data, None, |model| {
        report.emit(size.name, "rss_before", peak_rss(), "MiB");
        Ok(Box::new(Alone::new(model)))
    })?;
    let same = emit(report, size.name, size, &mut trained);
    report.emit(size.name, "peak_rss", peak_rss(), "MiB");
    Ok(same)
}

/// Trains alone or, as one of several ranks, on an equal share of every batch; `wrap` makes of the model what adds
/// gradients over the ranks.
pub fn train(
    size: &Size,
    data: &Path,
    rank: Option<&Rank>,
    wrap: impl FnOnce(&Decoder) -> phalanx::parallel::Result<Box<dyn DataParallel>>,
) -> Result<Trained, Box<dyn Error>> {
    let (device, me, ranks) = rank.map_or((Device::CPU, 0, 1), |r| (r.device(), r.rank(), r.size()));
    let windows = Windows::open(data, size.batch, CONTEXT)?;
    let mut config = GptConfig::new(VOCABULARY, CONTEXT, size.layers, size.heads, size.width);
    config.stream = (size.dtype != DType::F32).then_some(DType::F32);
    let model = config.init(&Scope::new(0, size.dtype, device))?;
    load_initial_weights(&model, size)?;
    let share = wrap(&model)?;
    let group = Group::new(share.parameters(), 3e-4).with_weight_decay(0.1);
    let mut optimizer = AdamW::default().with_betas(0.9, 0.95).init(vec![group])?;
    load_initial_masters(&optimizer, size)?;
    let tokens = size.batch * CONTEXT;
    let settings = Settings { groups: 1, tokens, ranks: &*share, clip: 0.0, seed: 0, watch: None };
    let (share, mut trained) = (size.batch / ranks, Trained::default());
    for n in 0..WARMUP + STEPS {
        let start = Instant::now();
        let (inputs, targets) = windows.batch(n)?;
        let part = |all: Tensor| all.narrow(0, me * share, share)?.to_device(device, false);
        let micro = [Batch { inputs: part(inputs)?, targets: part(targets)?, first_row: me * share }];
        trained.losses.push(train_step(&model, &mut optimizer, &micro, settings, n as u64)?.loss);
        trained.times_ms.push(millis(start.elapsed()));
    }
    trained.times_ms.drain(..WARMUP);
    Ok(trained)
}

/// Writes the rows that all GPT workloads have; whether the first losses were the known ones.
pub fn emit(report: &Report, workload: &str, size: &Size, trained: &mut Trained) -> bool {
    let ms = median(&mut trained.times_ms);
    report.emit(workload, "step", ms, "ms");
    report.emit(workload, "throughput", (size.batch * CONTEXT) as f64 / ms * 1e3, "tokens/s");
    let losses = &trained.losses[..5];
    for (n, &loss) in losses.iter().enumerate() {
        report.emit(workload, &format!("loss{n}"), loss, "nat");
    }
    let agrees = |(got, want): (&f64, &f64)| (got - want).abs() <= size.tolerance;
    let same = losses.iter().zip(&size.losses).all(agrees);
    if !same {
        eprintln!("bench: {workload}: the first losses are {losses:?}, wanted {:?}", size.losses);
    }
    same
}

/// Every matrix takes the next stream of the generator in GPT-2's order; biases are 0 and gains 1. Where a matrix
/// ends in the residual stream its bound is smaller.
fn initial_weight(size: &Size, name: &str, shape: &[usize]) -> phalanx::tensor::Result<Option<Tensor>> {
    let bound = 0.02 * 3f64.sqrt();
    let residual = bound / (2.0 * size.layers as f64).sqrt();
    let mut order = vec!["wte.weight".to_string(), "wpe.weight".to_string()];
    for layer in 0..size.layers {
        let names = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"];
        order.extend(names.map(|name| format!("h.{layer}.{name}.weight")));
    }
    let Some(stream) = order.iter().position(|known| known == name) else { return Ok(None) };
    let bound = if name.ends_with("c_proj.weight") { residual } else { bound };
    uniform(stream as u64, shape, bound as f32).map(Some)
}

fn load_initial_weights(model: &Decoder, size: &Size) -> Result<()> {
    for (name, parameter) in model.named_parameters() {
        if let Some(values) = initial_weight(size, &name, parameter.tensor().shape())? {
            parameter.load(&values)?;
        }
    }
    Ok(())
}

/// The weights that training changes are f32 in every system: they begin as drawn, not as rounded to bf16.
fn load_initial_masters(optimizer: &Optimizer<AdamW>, size: &Size) -> Result<()> {
    for (key, mut master) in optimizer.state_dict()? {
        let Some(name) = key.strip_suffix(".master") else { continue };
        if let Some(values) = initial_weight(size, name, master.shape())? {
            kernels::copy_(&mut master, &values)?;
        }
    }
    Ok(())
}
