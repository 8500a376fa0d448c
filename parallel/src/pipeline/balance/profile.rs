//! What layers cost: [`times`] and [`sizes`].

use std::time::{Duration, Instant};

use phalanx_nn::autograd::{Leaf, Options, Var, grad};
use phalanx_nn::{Parameter, Parameters};

use super::SizeConfig;
use super::sandbox::Sandbox;
use crate::pipeline::gpipe::{Batch, Layer, Sequence, Skips};
use crate::{Error, Result};

/// Microseconds that each layer took for forward and backward, the least of as many rounds as began within the budget, at
/// least one: in any other round something else was in the way.
pub(super) fn times(layers: &Sequence, sample: &Batch, budget: Duration) -> Result<Vec<u64>> {
    if let Some(value) = sample.values().iter().find(|value| value.device().is_meta()) {
        let why = format!("got a sample on {}, which computes nothing", value.device());
        return Err(Error::Config(format!("balance_by_time: {why}")));
    }
    let _sandbox = Sandbox::of(layers)?;
    let (begin, mut times) = (Instant::now(), vec![Duration::MAX; layers.layers().len()]);
    loop {
        let (mut x, mut skips) = (alone(sample)?, Skips::default());
        for (i, (layer, time)) in layers.layers().iter().zip(&mut times).enumerate() {
            let tick = Instant::now();
            let y = layers.run_layers(i..i + 1, x.clone(), &mut skips)?;
            backward(&**layer, &x, &y)?;
            *time = tick.elapsed().min(*time);
            x = alone(&y)?;
            skips.map(value_alone)?;
        }
        if begin.elapsed() >= budget {
            return Ok(times.iter().map(|time| time.as_micros() as u64).collect());
        }
    }
}

/// Bytes that each layer needs.
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
        let bytes = |p: &Parameter| p.tensor().numel() * p.dtype().size();
        let parameters: usize = layer.parameters().iter().map(bytes).sum();
        sizes.push((latent + parameters as f64 * parameter_scale) as u64);
        x = alone(&y)?;
        skips.map(value_alone)?;
    }
    Ok(sizes)
}

/// The values without what is behind them; those that require a gradient, as leaves.
fn alone(batch: &Batch) -> Result<Batch> {
    batch.clone().map(value_alone)
}

fn value_alone(x: Var) -> Result<Var> {
    Ok(if x.requires_grad() { Var::leaf(x.into_tensor())? } else { x })
}

/// Computes the gradients of the layer's input and parameters, and forgets them.
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
