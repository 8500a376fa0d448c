//! Training steps of `nn`'s GPT, with the library's own loss and optimizer, through the example's step function.

use std::path::Path;
use std::time::Instant;

use phalanx::nn::models::{Decoder, GptConfig};
use phalanx::nn::{AdamW, Batch, Group, Optimizer, Parameters, Result, Rule, Scope};
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
    name: &'static str,
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

/// Whether the first losses were the known ones.
pub fn run(report: &Report, size: &Size, data: &Path) -> Result<bool, Box<dyn std::error::Error>> {
    let windows = Windows::open(data, size.batch, CONTEXT)?;
    let mut config = GptConfig::new(VOCABULARY, CONTEXT, size.layers, size.heads, size.width);
    config.stream = (size.dtype != DType::F32).then_some(DType::F32);
    let model = config.init(&Scope::new(0, size.dtype, Device::CPU))?;
    load_initial_weights(&model, size)?;
    report.emit(size.name, "rss_before", peak_rss(), "MiB");
    let group = Group::new(model.parameters(), 3e-4).with_weight_decay(0.1);
    let mut optimizer = AdamW::default().with_betas(0.9, 0.95).init(vec![group])?;
    load_initial_masters(&optimizer, size)?;
    let settings =
        Settings { groups: 1, tokens: size.batch * CONTEXT, ddp: None, clip: 0.0, seed: 0, watch: None };
    let (mut times, mut losses) = (Vec::new(), Vec::new());
    for n in 0..WARMUP + STEPS {
        let start = Instant::now();
        let (inputs, targets) = windows.batch(n)?;
        let micro = [Batch { inputs, targets, first_row: 0 }];
        losses.push(train_step(&model, &mut optimizer, &micro, settings, n as u64)?.loss);
        times.push(millis(start.elapsed()));
    }
    let ms = median(&mut times[WARMUP..]);
    report.emit(size.name, "step", ms, "ms");
    report.emit(size.name, "throughput", (size.batch * CONTEXT) as f64 / ms * 1e3, "tokens/s");
    for (n, &loss) in losses.iter().take(5).enumerate() {
        report.emit(size.name, &format!("loss{n}"), loss, "nat");
    }
    report.emit(size.name, "peak_rss", peak_rss(), "MiB");
    let agrees = |(got, want): (&f64, &f64)| (got - want).abs() <= size.tolerance;
    let same = losses.iter().zip(&size.losses).all(agrees);
    if !same {
        eprintln!("bench: the first losses are {:?}, wanted {:?}", &losses[..5], size.losses);
    }
    Ok(same)
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
