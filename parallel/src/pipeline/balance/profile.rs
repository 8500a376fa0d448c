//! What layers cost: [`times`] and [`sizes`].

use std::time::{Duration, Instant};

use phalanx_nn::autograd::{Leaf, Options, Var, grad};
use phalanx_nn::{Module, Parameter};

use super::SizeConfig;
use super::sandbox::Sandbox;
use crate::{Error, Result};

/// Microseconds that each layer took for forward and backward, over as many rounds as began within the budget, at
/// least one.
pub(super) fn times<M: Module>(layers: &[M], sample: &Var, budget: Duration) -> Result<Vec<u64>> {
    if sample.device().is_meta() {
        let why = format!("got a sample on {}, which computes nothing", sample.device());
        return Err(Error::Config(format!("balance_by_time: {why}")));
    }
    let _sandbox = Sandbox::of(layers)?;
    let (begin, mut times) = (Instant::now(), vec![Duration::ZERO; layers.len()]);
    loop {
        let mut x = alone(sample)?;
        for (layer, time) in layers.iter().zip(&mut times) {
            let tick = Instant::now();
            let y = layer.forward(&x)?;
            backward(layer, &x, &y)?;
            *time += tick.elapsed();
            x = alone(&y)?;
        }
        if begin.elapsed() >= budget {
            return Ok(times.iter().map(|time| time.as_micros() as u64).collect());
        }
    }
}

/// Bytes that each layer needs.
pub(super) fn sizes<M: Module>(layers: &[M], sample: &Var, config: SizeConfig) -> Result<Vec<u64>> {
    let SizeConfig { micro_batches, parameter_scale } = config;
    let rows = sample.shape().first().copied().unwrap_or(0);
    if micro_batches == 0 || rows == 0 || !(parameter_scale >= 0.0 && parameter_scale.is_finite()) {
        let got = format!("a sample of {:?} and {config:?}", sample.shape());
        let why = format!("got {got}, wanted rows, micro-batches, and a scale of at least 0");
        return Err(Error::Config(format!("balance_by_size: {why}")));
    }
    let _sandbox = Sandbox::of(layers)?;
    let ledger = sample.device().ledger()?;
    let mut x = alone(&sample.narrow(0, 0, rows.div_ceil(micro_batches))?)?;
    let mut sizes = Vec::with_capacity(layers.len());
    for layer in layers {
        let before = ledger.total().now;
        let y = layer.forward(&x)?;
        let latent = ledger.total().now.saturating_sub(before) as f64;
        let bytes = |p: &Parameter| p.tensor().numel() * p.dtype().size();
        let parameters: usize = layer.parameters().iter().map(bytes).sum();
        sizes.push((latent + parameters as f64 * parameter_scale) as u64);
        x = alone(&y)?;
    }
    Ok(sizes)
}

/// The value without what is behind it; one that requires a gradient, as a leaf.
fn alone(x: &Var) -> Result<Var> {
    Ok(if x.requires_grad() { Var::leaf(x.tensor().clone())? } else { x.detach() })
}

/// Computes the gradients of the layer's input and parameters, and forgets them.
fn backward<M: Module>(layer: &M, x: &Var, y: &Var) -> Result<()> {
    if !y.requires_grad() {
        return Ok(());
    }
    let parameters = layer.parameters().into_iter().chain(layer.borrowed()).filter(Parameter::is_trained);
    let leaves: Vec<Var> =
        parameters.flat_map(|p| p.leaves().iter().map(Leaf::var).collect::<Vec<_>>()).collect();
    let wanted: Vec<&Var> = leaves.iter().chain(Some(x).filter(|x| x.requires_grad())).collect();
    grad(&[(y.clone(), Some(y.detach()))], &wanted, Options::default())?;
    Ok(())
}
