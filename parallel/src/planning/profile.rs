//! What the layers of a [`Sequence`] cost, measured one after the other: [`profile()`], [`times`] and [`sizes`].
//!
//! A layer runs alone, on the device where it is, and its time is the device's: a GPU's from event to event. The model comes out
//! as it was ([`Sandbox`]): layers run on copies of their buffers, and gradients are computed by [`grad`], which writes to no leaf.
//! Skips work as in the plain model.

use phalanx_nn::autograd::ContextMode;
use std::time::{Duration, Instant};

use phalanx_nn::autograd::{Leaf, Options, Var, grad};
use phalanx_nn::{Buffer, Entry, Parameter, Parameters};
use phalanx_tensor::cuda::Moment;
use phalanx_tensor::{Context, ContextGuard, Device, Tensor};

use crate::pipeline::gpipe::{Batch, Layer, Sequence, Skips, verify_skips};
use crate::{Error, Result};

/// What a layer costs, measured with one micro-batch on one worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerProfile {
    /// The time of its forward and backward pass together, in seconds (or any unit, the same everywhere).
    pub time: f64,
    /// The bytes of its output; the gradient of the output has as many.
    pub activation_bytes: f64,
    /// The bytes of its parameters.
    pub parameter_bytes: f64,
}

/// The memory that [`balance_by_size`](super::balance_by_size) counts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SizeConfig {
    /// The number of micro-batches into which the sample will be split.
    pub micro_batches: usize,
    /// The memory of training as a multiple of the parameters' bytes: 2 with gradients, 2 to 3 for SGD, 4 to 5 for Adam.
    pub parameter_scale: f64,
}

impl Default for SizeConfig {
    fn default() -> SizeConfig {
        SizeConfig { micro_batches: 1, parameter_scale: 2.0 }
    }
}

/// Measures each layer of a model on `sample`, a micro-batch, for [`plan`](super::plan): its time as
/// [`balance_by_time`](super::balance_by_time) measures it, the bytes of its output and those of its parameters. Skips are not
/// counted, since the plan is for layers in a row.
///
/// # Errors
/// As [`balance_by_time`](super::balance_by_time).
pub fn profile(layers: &Sequence, sample: impl Into<Batch>, budget: Duration) -> Result<Vec<LayerProfile>> {
    let measured = measure("profile", layers, &sample.into(), budget)?;
    let one = |(i, Measured { time, output_bytes }): (usize, Measured)| LayerProfile {
        time: time.as_secs_f64(),
        activation_bytes: output_bytes as f64,
        parameter_bytes: parameter_bytes(&*layers.layers()[i]) as f64,
    };
    Ok(measured.into_iter().enumerate().map(one).collect())
}

/// Microseconds that each layer took.
pub(super) fn times(layers: &Sequence, sample: &Batch, budget: Duration) -> Result<Vec<u64>> {
    let measured = measure("balance_by_time", layers, sample, budget)?;
    Ok(measured.iter().map(|measured| measured.time.as_micros() as u64).collect())
}

/// A layer's time for forward and backward, and the bytes of its output.
struct Measured {
    time: Duration,
    output_bytes: usize,
}

/// Runs all layers in rounds, at least once and until the budget is over. The least time of a layer counts, since in other rounds
/// something else used the machine.
fn measure(op: &str, layers: &Sequence, sample: &Batch, budget: Duration) -> Result<Vec<Measured>> {
    if let Some(value) = sample.values().iter().find(|value| value.device().is_meta()) {
        let why = format!("got a sample on {}, which computes nothing", value.device());
        return Err(Error::Config(format!("{op}: {why}")));
    }
    let _sandbox = Sandbox::of(layers)?;
    let begin = Instant::now();
    let unmeasured = || Measured { time: Duration::MAX, output_bytes: 0 };
    let mut measured: Vec<Measured> = layers.layers().iter().map(|_| unmeasured()).collect();
    loop {
        let (mut x, mut skips) = (alone(sample)?, Skips::default());
        for (i, (layer, measured)) in layers.layers().iter().zip(&mut measured).enumerate() {
            let device = x.values().first().map_or(Device::CPU, Var::device);
            let tick = Moment::now(device)?;
            let y = layers.run_layers(i..i + 1, x.clone(), &mut skips)?;
            backward(&**layer, &x, &y)?;
            measured.time = tick.until(&Moment::now(device)?)?.min(measured.time);
            measured.output_bytes = y.values().iter().map(|y| y.numel() * y.dtype().size()).sum();
            x = alone(&y)?;
            skips.map(value_alone)?;
        }
        if begin.elapsed() >= budget {
            return Ok(measured);
        }
    }
}

/// The bytes that each layer needs.
pub(super) fn sizes(layers: &Sequence, sample: &Batch, config: SizeConfig) -> Result<Vec<u64>> {
    let SizeConfig { micro_batches, parameter_scale } = config;
    let rows = sample.rows()?;
    if micro_batches == 0 || rows == 0 || !(parameter_scale >= 0.0 && parameter_scale.is_finite()) {
        let why =
            format!("got {rows} rows and {config:?}, wanted rows, micro-batches, and a scale of at least 0");
        return Err(Error::Config(format!("balance_by_size: {why}")));
    }
    let _sandbox = Sandbox::of(layers)?;
    let ledger = sample.values()[0].device().ledger()?;
    let one = sample.clone().map(|value| value.narrow(0, 0, rows.div_ceil(micro_batches)))?;
    let (mut x, mut skips) = (alone(&one)?, Skips::default());
    let mut sizes = Vec::with_capacity(layers.layers().len());
    for (i, layer) in layers.layers().iter().enumerate() {
        let before = ledger.total().now;
        let y = layers.run_layers(i..i + 1, x.clone(), &mut skips)?;
        let latent = ledger.total().now.saturating_sub(before) as f64;
        sizes.push((latent + parameter_bytes(&**layer) as f64 * parameter_scale) as u64);
        x = alone(&y)?;
        skips.map(value_alone)?;
    }
    Ok(sizes)
}

fn parameter_bytes(layer: &dyn Layer) -> usize {
    layer.parameters().iter().map(|p| p.tensor().numel() * p.dtype().size()).sum()
}

/// The values without the graph that made them; those that require a gradient, as leaves.
fn alone(batch: &Batch) -> Result<Batch> {
    batch.clone().map(value_alone)
}

fn value_alone(x: Var) -> Result<Var> {
    Ok(if x.requires_grad() { Var::leaf(x.into_tensor())? } else { x })
}

/// Computes the gradients of the layer's input and parameters, and drops them.
fn backward(layer: &dyn Layer, x: &Batch, y: &Batch) -> Result<()> {
    let outputs = y.values().iter().filter(|y| y.requires_grad());
    let outputs: Vec<(Var, Option<Var>)> = outputs.map(|y| (y.clone(), Some(y.detach()))).collect();
    if outputs.is_empty() {
        return Ok(());
    }
    let parameters = layer.parameters().into_iter().chain(layer.borrowed()).filter(Parameter::is_trained);
    let leaves: Vec<Leaf> = parameters.flat_map(|p| p.leaves().to_vec()).collect();
    let leaves: Vec<Var> = leaves.iter().map(Leaf::var).collect();
    let wanted: Vec<&Var> = leaves.iter().chain(x.values().iter().filter(|x| x.requires_grad())).collect();
    grad(&outputs, &wanted, Options::default())?;
    Ok(())
}

/// While it lives, this thread is in train mode and the layers' buffers are copies.
pub(super) struct Sandbox {
    /// The original buffers in the order in which they were replaced. A buffer that two layers share is here twice.
    buffers: Vec<(Buffer, Tensor)>,
    _context: ContextGuard,
}

impl Sandbox {
    /// # Errors
    /// If skips do not match, a parameter has a gradient, or a buffer cannot be copied.
    pub(super) fn of(layers: &Sequence) -> Result<Sandbox> {
        verify_skips(&layers.skippables())?;
        let has_grad = |p: &Parameter| p.leaves().iter().any(|leaf| leaf.grad().is_some());
        if let Some(parameter) = layers.parameters().into_iter().find(has_grad) {
            let why = format!("got a gradient of {}, wanted a model that has none yet", parameter.name());
            return Err(Error::Config(format!("balance: {why}")));
        }
        let context = Context::with(|c| {
            c.set_train(true);
            c.set_grad(true);
            c.set_recomputing(false);
        });
        let mut sandbox = Sandbox { buffers: Vec::new(), _context: context };
        let mut buffers = Vec::new();
        layers.visit("", &mut |_, entry| match entry {
            Entry::Buffer(buffer) => buffers.push(buffer.clone()),
            Entry::Parameter(_) => {}
        });
        for buffer in buffers {
            let held = buffer.tensor();
            buffer.set(held.copy()?);
            sandbox.buffers.push((buffer, held));
        }
        Ok(sandbox)
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        self.buffers.drain(..).rev().for_each(|(buffer, held)| buffer.set(held));
    }
}
