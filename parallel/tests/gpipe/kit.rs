//! What these tests share: devices of their own, layers that note when they run, a model with and without a pipeline.

use phalanx_nn::autograd::ContextMode;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use phalanx_nn::autograd::{Cx, Function, Grads, Var, grads1, is_recomputing};
use phalanx_nn::models::RecomputeMode;
use phalanx_nn::{
    Dropout, Entry, Gelu, LayerNormConfig, LinearConfig, Module, Parameters, Result as NnResult, Scope,
};
use phalanx_parallel::Result;
use phalanx_parallel::pipeline::MicroBatch;
use phalanx_parallel::pipeline::gpipe::{
    Batch, GPipe, GPipeConfig, Layer, Partition, Sequence, Skippable, Skips,
};
use phalanx_tensor::{Context, DType, Device, RngKey, Tensor};

pub const MODES: [RecomputeMode; 3] =
    [RecomputeMode::Always, RecomputeMode::ExceptLast, RecomputeMode::Never];

/// Set where all devices of these tests are CUDA devices (`gpus.rs`).
pub const ON_GPUS: &str = "PHALANX_GPIPE_ON_GPUS";

fn device(index: u16) -> Device {
    if std::env::var_os(ON_GPUS).is_some() { Device::Cuda(index) } else { Device::Cpu(index) }
}

/// The device of plain models.
pub fn plain_device() -> Device {
    device(0)
}

/// Devices that no other test uses.
pub fn devices(count: usize) -> Vec<Device> {
    static NEXT: AtomicU16 = AtomicU16::new(100);
    let first = NEXT.fetch_add(count as u16, Ordering::Relaxed);
    let devices: Vec<Device> = (first..).take(count).map(device).collect();
    devices.iter().for_each(|d| d.set_threads(1).unwrap());
    devices
}

/// `n` numbers without a pattern, in (-1, 1).
pub fn numbers(seed: u64, n: usize) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as f64 / u64::MAX as f64 * 2.0 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// A constant of f64 without a pattern.
pub fn constant(seed: u64, shape: &[usize], device: Device) -> Var {
    Var::from_slice(&numbers(seed, shape.iter().product()), shape, device).unwrap()
}

pub fn leaf(seed: u64, shape: &[usize], device: Device) -> Var {
    Var::leaf(constant(seed, shape, device).into_tensor()).unwrap()
}

pub fn bits(var: &Var) -> Vec<u64> {
    var.to_vec::<f64>().unwrap().into_iter().map(f64::to_bits).collect()
}

/// Every parameter's name and gradient.
pub fn gradients(model: &impl Parameters) -> Vec<(String, Vec<u64>)> {
    let grad = |p: phalanx_nn::Parameter| p.grad().unwrap().map(|g| g.to_vec::<f64>().unwrap());
    let bits = |g: Option<Vec<f64>>| g.unwrap_or_default().into_iter().map(f64::to_bits).collect();
    model.named_parameters().into_iter().map(|(name, p)| (name, bits(grad(p)))).collect()
}

/// The key of every test's draws.
pub fn key(context: &mut Context) {
    context.set_train(true);
    context.rng = RngKey { seed: 11, step: 3 };
}

pub const WIDTH: usize = 5;

/// A model of eight layers with two dropouts, each layer on the device that `place` names.
pub fn net(place: impl Fn(usize) -> Device) -> Sequence {
    let scope = |i: usize| Scope::new(9, DType::F64, place(i)).child(i);
    let linear = |i, inputs, outputs| LinearConfig::new(inputs, outputs).init(&scope(i)).unwrap();
    Sequence::new()
        .with(linear(0, WIDTH, 7))
        .with(Gelu { kind: phalanx_kernels::Gelu::Tanh })
        .with(Dropout::new(0.3, &scope(2)).unwrap())
        .with(LayerNormConfig::new(&[7]).init(&scope(3)).unwrap())
        .with(linear(4, 7, 6))
        .with(Dropout::new(0.5, &scope(5)).unwrap())
        .with(Gelu { kind: phalanx_kernels::Gelu::Exact })
        .with(linear(7, 6, WIDTH))
}

/// [`net`] as a pipeline.
pub fn pipe(balance: &[usize], devices: &[Device], config: GPipeConfig) -> GPipe {
    let partition = Partition::new(balance, devices).unwrap();
    let model = net(|layer| partition.device(layer).unwrap());
    GPipe::new(model, partition, config).unwrap()
}

/// A pipeline of given layers, one a stage.
pub fn each(layers: Vec<Box<dyn Layer>>, devices: &[Device], config: GPipeConfig) -> GPipe {
    let partition = Partition::new(&vec![1; layers.len()], devices).unwrap();
    GPipe::new(layers.into(), partition, config).unwrap()
}

/// A layer without parameters or skips, made of a function.
pub struct Apply<F>(pub F);

impl<F> Parameters for Apply<F> {
    fn visit(&self, _: &str, _: &mut dyn FnMut(&str, Entry<'_>)) {}
}

impl<F: Fn(Batch) -> Result<Batch> + Send + Sync> Layer for Apply<F> {
    fn run(&self, input: Batch, _: &mut Skips) -> Result<Batch> {
        (self.0)(input)
    }
}

/// A boxed [`Apply`].
pub fn apply(f: impl Fn(Batch) -> Result<Batch> + Send + Sync + 'static) -> Box<dyn Layer> {
    Box::new(Apply(f))
}

/// Whether something comes to be, on a machine that may be busy.
pub fn soon(is: impl Fn() -> bool) -> bool {
    (0..5000).any(|_| {
        is() || {
            std::thread::sleep(Duration::from_millis(2));
            false
        }
    })
}

/// A layer that runs a function on its batch and its skips.
pub struct Skipping<F>(pub Skippable, pub F);

impl<F> Parameters for Skipping<F> {
    fn visit(&self, _: &str, _: &mut dyn FnMut(&str, Entry<'_>)) {}
}

impl<F: Fn(Batch, &mut Skips) -> Result<Batch> + Send + Sync> Layer for Skipping<F> {
    fn run(&self, input: Batch, skips: &mut Skips) -> Result<Batch> {
        (self.1)(input, skips)
    }

    fn skippable(&self) -> Skippable {
        self.0.clone()
    }
}

/// What was run: device, what, micro-batch, stage.
pub type Journal = Arc<Mutex<Vec<(Device, &'static str, usize, usize)>>>;

/// `y = x w`, which notes when it runs, and takes its time.
pub struct Probe {
    pub stage: usize,
    pub journal: Journal,
    pub forward_ms: u64,
    pub backward_ms: u64,
    pub weight: phalanx_nn::Parameter,
}

phalanx_nn::parameters!(Probe { weight });

impl Probe {
    pub fn new(stage: usize, device: Device, journal: &Journal) -> Probe {
        let weight = Tensor::from_slice(&[1.0 + stage as f64], &[1], device).unwrap();
        let weight = phalanx_nn::Parameter::new(format!("{stage}.weight"), weight).unwrap();
        Probe { stage, journal: journal.clone(), forward_ms: 0, backward_ms: 0, weight }
    }
}

impl Module for Probe {
    fn forward(&self, x: &Var) -> NnResult<Var> {
        let micro_batch = MicroBatch::current().index;
        let what = if is_recomputing() { "again" } else { "forward" };
        std::thread::sleep(Duration::from_millis(self.forward_ms));
        self.journal.lock().unwrap().push((x.device(), what, micro_batch, self.stage));
        let note = NoteBackward(self.journal.clone(), x.device(), micro_batch, self.stage, self.backward_ms);
        Ok(note.apply(&[&x.mul(&self.weight.var())?])?.remove(0))
    }
}

/// The identity, which notes when its backward runs.
struct NoteBackward(Journal, Device, usize, usize, u64);

impl Function for NoteBackward {
    fn name(&self) -> &'static str {
        "note"
    }

    fn forward(&self, inputs: &[&Tensor]) -> phalanx_nn::autograd::Result<Vec<Tensor>> {
        Ok(vec![inputs[0].copy()?])
    }

    fn backward(
        &self,
        cx: &Cx<'_>,
        _: &[phalanx_nn::autograd::SavedVariable],
    ) -> phalanx_nn::autograd::Result<Grads> {
        std::thread::sleep(Duration::from_millis(self.4));
        self.0.lock().unwrap().push((self.1, "backward", self.2, self.3));
        grads1(cx.dy().clone())
    }
}

/// What a device did of one kind: (micro-batch, stage).
pub fn done(journal: &Journal, device: Device, what: &str) -> Vec<(usize, usize)> {
    let journal = journal.lock().unwrap();
    let own = journal.iter().filter(|entry| entry.0 == device && entry.1 == what);
    own.map(|&(_, _, micro_batch, stage)| (micro_batch, stage)).collect()
}
