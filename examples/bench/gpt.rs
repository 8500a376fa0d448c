//! Training steps of `nn`'s GPT, with the library's own loss and optimizer, in a loop of its own.

use phalanx::autograd::ContextMode;
use std::error::Error;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use phalanx::nn::models::{Decoder, GptConfig, ModelConfig};
use phalanx::nn::{
    AdamW, Batch, CapturedStep, Group, LayerFactory, OneDevice, Optimizer, Parameters, Rule, Scope, cut,
};
use phalanx::parallel::comm::Comm;
use phalanx::parallel::comm::threads::world;
use phalanx::parallel::data_parallel::{DataParallel, SingleDevice};
use phalanx::parallel::hybrid::{Layout, MeshParallel, StagedModel, Step};
use phalanx::parallel::launch::TIMEOUT;
use phalanx::parallel::mesh::{Axis, Groups};
use phalanx::parallel::pipeline::ranks::{Chunks, Pipeline};
use phalanx::tensor::RngKey;
use phalanx::{Context, DType, Device, Tensor, kernels};

use crate::measure::{Report, Windows, median, millis, peak_rss, uniform};

const WARMUP: usize = 3;
const STEPS: usize = 20;

/// A workload.
pub struct Size {
    pub name: &'static str,
    vocabulary: usize,
    context: usize,
    layers: usize,
    heads: usize,
    width: usize,
    batch: usize,
    /// Of matrix products; everything else is f32.
    dtype: DType,
    /// The first losses that every system prints, if they are known, and how near ours must be.
    losses: &'static [f64],
    tolerance: f64,
}

pub const SMALL: Size = Size {
    name: "gpt-s",
    vocabulary: 256,
    context: 256,
    layers: 4,
    heads: 4,
    width: 256,
    batch: 8,
    dtype: DType::F32,
    losses: &[5.53911, 4.72241, 4.49057, 4.34564, 4.29539],
    tolerance: 1.5e-5,
};

pub const MEDIUM: Size = Size {
    name: "gpt-m",
    vocabulary: 256,
    context: 256,
    layers: 6,
    heads: 6,
    width: 384,
    batch: 16,
    dtype: DType::F32,
    losses: &[5.60631, 4.46119, 4.12745, 4.03176, 3.95005],
    tolerance: 1.5e-5,
};

pub const MEDIUM_BF16: Size = Size { name: "gpt-bf16", dtype: DType::BF16, tolerance: 7e-4, ..MEDIUM };

/// GPT-2 of 124 million parameters, its vocabulary filled up to a multiple of 128: for GPUs.
pub const GPT2: Size = Size {
    name: "gpt2-124m",
    vocabulary: 50304,
    context: 1024,
    layers: 12,
    heads: 12,
    width: 768,
    batch: 64,
    dtype: DType::BF16,
    losses: &[],
    tolerance: 0.0,
};

/// The same layers at a size for an emulator.
pub const GPT2_SMALL: Size = Size {
    name: "gpt2-small",
    vocabulary: 256,
    context: 16,
    layers: 1,
    heads: 1,
    width: 64,
    batch: 2,
    ..GPT2
};

impl Size {
    fn config(&self) -> GptConfig {
        let mut config = GptConfig::new(self.vocabulary, self.context, self.layers, self.heads, self.width);
        config.stream = (self.dtype != DType::F32).then_some(DType::F32);
        config
    }
}

/// The measurements of a training run.
#[derive(Default)]
pub struct Trained {
    /// A step's milliseconds, after the warm-ups.
    pub times_ms: Vec<f64>,
    /// Of every step, in nats; a rank's part of them.
    losses: Vec<f64>,
    /// Floating-point operations of a step, as far as the calling thread started them.
    flops: f64,
}

impl Trained {
    /// The first rank's, with the losses of the next added.
    pub fn with(mut self, next: Trained) -> Trained {
        self.losses.iter_mut().zip(next.losses).for_each(|(sum, loss)| *sum += loss);
        self
    }
}

/// Whether the first losses were the known ones.
pub fn run(report: &Report, size: &Size, data: &Path, device: Device) -> Result<bool, Box<dyn Error>> {
    let at = At { comm: world(1, TIMEOUT).swap_remove(0), device };
    let mut trained = train(
        size,
        data,
        &at,
        &Layout::default(),
        |_| OneDevice,
        |model, _| {
            report.emit(size.name, "rss_before", peak_rss(), "MiB");
            Ok(Box::new(SingleDevice::new(model)))
        },
    )?;
    let same = emit(report, size.name, size, &mut trained);
    if device.is_cuda() {
        emit(report, &format!("{}-captured", size.name), size, &mut captured(size, data, device)?);
    } else {
        // Model FLOPs utilization (Chowdhery et al., "PaLM", 2022, appendix B), hidden scores and embeddings not counted.
        let per_s = trained.flops / (median(&mut trained.times_ms) * 1e-3);
        report.emit(size.name, "mfu", 100.0 * per_s / kernels::peak_flops(size.dtype, device)?, "%");
    }
    report.emit(size.name, "peak_rss", peak_rss(), "MiB");
    let held = device.ledger()?.total().peak as f64 / f64::from(1 << 20);
    report.emit(size.name, "device_peak", held, "MiB");
    Ok(same)
}

/// The training of one GPU with its steps as a CUDA graph, as a run of `phalanx::train` has them.
fn captured(size: &Size, data: &Path, device: Device) -> Result<Trained, Box<dyn Error>> {
    let windows = Windows::open(data, size.batch, size.context)?;
    let model = size.config().init(&Scope::new(0, size.dtype, device))?;
    load_initial_weights(&model, size)?;
    let group = Group::new(model.parameters(), 3e-4).with_weight_decay(0.1);
    let mut optimizer = AdamW::default().with_betas(0.9, 0.95).init(vec![group])?;
    load_initial_masters(&optimizer, size)?;
    let scale = 1.0 / (size.batch * size.context) as f64;
    let (mut step, mut trained) = (None, Trained::default());
    for n in 0..WARMUP + STEPS {
        let start = Instant::now();
        let (inputs, targets) = windows.batch(n)?;
        let batch = [inputs, targets];
        let _context = Context::with(|c| {
            c.set_train(true);
            c.rng = RngKey { seed: 0, step: n as u64 };
        });
        let step: &mut CapturedStep = match &mut step {
            Some(step) => step,
            None => step.insert(CapturedStep::new(device, &batch, None)?),
        };
        step.run(&mut optimizer, &batch, |batch| model.loss(&model.forward(&batch[0])?, &batch[1], scale))?;
        trained.losses.push(step.results().select(0, 0)?.item()?);
        trained.times_ms.push(millis(start.elapsed()));
        if let Some(why) = step.why_not_captured() {
            return Err(format!("steps are not captured: {why}").into());
        }
    }
    trained.times_ms.drain(..WARMUP);
    Ok(trained)
}

/// A rank's communicator and device.
pub struct At {
    pub comm: Comm,
    pub device: Device,
}

/// The wrapper that adds gradients over replicas.
pub type Share = phalanx::parallel::Result<Box<dyn DataParallel>>;

/// Trains under a layout; `wrap` makes the wrapper that adds a rank's gradients over its replicas.
pub fn train<L: LayerFactory>(
    size: &Size,
    data: &Path,
    at: &At,
    layout: &Layout,
    layers: impl FnOnce(&Groups) -> L,
    wrap: impl FnOnce(&Chunks<Decoder<L>>, &Comm) -> Share,
) -> Result<Trained, Box<dyn Error>> {
    let At { comm, device } = at;
    let windows = Windows::open(data, size.batch, size.context)?;
    let config = size.config();
    let groups = Groups::new(layout.mesh()?, comm)?;
    let (layers, scope) = (Arc::new(layers(&groups)), Scope::new(0, size.dtype, *device));
    let (schedule, line) = (layout.schedule()?, groups.along(Axis::Pp));
    let model = Chunks::build(&ModelConfig::Gpt(config), &layers, &scope, &schedule, line.rank())?;
    load_initial_weights(&model, size)?;
    let pipeline = Pipeline::new(&schedule, line.clone(), *device)?;
    let replicas = groups.along(Axis::Dp).clone();
    let share = wrap(&model, &replicas)?;
    let share: Arc<dyn DataParallel> = Arc::new(MeshParallel::new(&model, share, groups.clone(), &schedule)?);
    let model: Arc<dyn StagedModel> = Arc::new(model);
    let group = Group::new(share.parameters(), 3e-4).with_weight_decay(0.1);
    let mut optimizer = AdamW::default().with_betas(0.9, 0.95).init(vec![group])?;
    load_initial_masters(&optimizer, size)?;
    let scale = 1.0 / (size.batch * size.context) as f64;
    let (rows, mut trained) = (size.batch / replicas.size(), Trained::default());
    let counts = groups.at().tp == 0;
    for n in 0..WARMUP + STEPS {
        let start = Instant::now();
        let (inputs, targets) = windows.batch(n)?;
        let micro = |piece: Range<usize>| -> Result<Batch, Box<dyn Error>> {
            let first_row = replicas.rank() * rows + piece.start;
            let part = |all: &Tensor| all.narrow(0, first_row, piece.len())?.to_device(*device, false);
            Ok(Batch { tensors: vec![part(&inputs)?, part(&targets)?], first_row })
        };
        let micros = cut(rows, layout.micro_batches).into_iter().map(micro).collect::<Result<Vec<_>, _>>()?;
        let _context = Context::with(|c| {
            c.set_train(true);
            c.rng = RngKey { seed: 0, step: n as u64 };
        });
        let work = Step { model: model.clone(), replicas: share.clone(), micro_batches: micros, scale };
        let before = kernels::flops();
        let loss = step(&pipeline, work, &mut optimizer)?;
        trained.flops = kernels::flops() - before;
        trained.losses.push(if counts { loss } else { 0.0 });
        trained.times_ms.push(millis(start.elapsed()));
    }
    trained.times_ms.drain(..WARMUP);
    Ok(trained)
}

/// One step, with the norm that clipping would ask for; this rank's part of the loss.
fn step(pipeline: &Pipeline, work: Step, optimizer: &mut Optimizer<AdamW>) -> Result<f64, Box<dyn Error>> {
    let share = work.replicas.clone();
    share.zero_grad()?;
    share.begin()?;
    let losses = pipeline.train(&Arc::new(work))?;
    share.finish()?;
    let norm = share.grad_squares()?.norm()?;
    optimizer.step()?;
    share.updated()?;
    let loss = losses
        .iter()
        .try_fold(0.0, |sum, loss| kernels::cast(loss, DType::F64)?.item::<f64>().map(|x| sum + x))?;
    norm.item::<f64>()?;
    Ok(loss)
}

/// Writes the rows that all GPT workloads have; whether the first losses were the known ones.
pub fn emit(report: &Report, workload: &str, size: &Size, trained: &mut Trained) -> bool {
    let ms = median(&mut trained.times_ms);
    report.emit(workload, "step", ms, "ms");
    report.emit(workload, "throughput", (size.batch * size.context) as f64 / ms * 1e3, "tokens/s");
    let losses = &trained.losses[..if size.losses.is_empty() { 20 } else { 5 }];
    for (n, &loss) in losses.iter().enumerate() {
        report.emit(workload, &format!("loss{n}"), loss, "nat");
    }
    let agrees = |(got, want): (&f64, &f64)| (got - want).abs() <= size.tolerance;
    let same = losses.iter().zip(size.losses).all(agrees);
    if !same {
        eprintln!("bench: {workload}: the first losses are {losses:?}, wanted {:?}", size.losses);
    }
    same
}

/// Every matrix takes the next stream of the generator in GPT-2's order (`shape` is the whole's); biases are 0 and gains 1. Where a matrix
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

fn load_initial_weights(model: &impl Parameters, size: &Size) -> Result<(), Box<dyn Error>> {
    for (name, parameter) in model.named_parameters() {
        if let Some(whole) = initial_weight(size, &name, parameter.global_shape())? {
            let part = parameter.part().of(&whole)?.contiguous()?;
            parameter.load(&part.with_shape(parameter.tensor().shape())?)?;
        }
    }
    Ok(())
}

/// The weights that training changes are f32 in every system: they begin as drawn, not as rounded to bf16.
fn load_initial_masters(optimizer: &Optimizer<AdamW>, size: &Size) -> Result<(), Box<dyn Error>> {
    for (key, mut master) in optimizer.state_dict()? {
        let Some(name) = key.strip_suffix(".master") else { continue };
        if let Some(values) = initial_weight(size, name, master.shape())? {
            let values = values.to_device(master.device(), false)?;
            kernels::copy_(&mut master, &values)?;
        }
    }
    Ok(())
}
