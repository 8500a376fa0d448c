//! What recurrent layers share: their weights, and the walk over time.

use phalanx_autograd::Var;
use phalanx_kernels as kernels;

use crate::scope::join;
use crate::{Entry, Error, Init, Parameter, Parameters, Result, Scope};

/// How a recurrent layer is made.
#[derive(Clone, Copy, Debug)]
pub struct RecurrentConfig {
    inputs: usize,
    hidden: usize,
    layers: usize,
    bias: bool,
}

impl RecurrentConfig {
    /// One layer from `inputs` features to `hidden`, with biases.
    pub fn new(inputs: usize, hidden: usize) -> RecurrentConfig {
        RecurrentConfig { inputs, hidden, layers: 1, bias: true }
    }

    /// With that many layers, each over the outputs of the one before.
    #[must_use]
    pub fn with_layers(self, layers: usize) -> RecurrentConfig {
        RecurrentConfig { layers, ..self }
    }

    /// With biases or without.
    #[must_use]
    pub fn with_bias(self, bias: bool) -> RecurrentConfig {
        RecurrentConfig { bias, ..self }
    }

    /// Weights of `gates` gates stacked, uniform within `1 / sqrt(hidden)`.
    pub(super) fn weights(self, scope: &Scope, gates: usize) -> Result<Weights> {
        let rows = gates * self.hidden;
        let init = Init::layer(self.hidden);
        let layer = |i: usize| -> Result<Layer> {
            let inputs = if i == 0 { self.inputs } else { self.hidden };
            let matrix =
                |name: &str, columns: usize| scope.parameter(&format!("{name}_l{i}"), &[rows, columns], init);
            let bias = |name: &str| {
                self.bias.then(|| scope.parameter(&format!("{name}_l{i}"), &[rows], init)).transpose()
            };
            Ok(Layer {
                weight_ih: matrix("weight_ih", inputs)?,
                weight_hh: matrix("weight_hh", self.hidden)?,
                bias_ih: bias("bias_ih")?,
                bias_hh: bias("bias_hh")?,
            })
        };
        Ok(Weights { layers: (0..self.layers).map(layer).collect::<Result<_>>()?, hidden: self.hidden })
    }
}

/// The weights of all layers.
pub(super) struct Weights {
    pub(super) layers: Vec<Layer>,
    pub(super) hidden: usize,
}

pub(super) struct Layer {
    weight_ih: Parameter,
    weight_hh: Parameter,
    bias_ih: Option<Parameter>,
    bias_hh: Option<Parameter>,
}

impl Parameters for Weights {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        for (i, layer) in self.layers.iter().enumerate() {
            layer.weight_ih.visit(&join(path, format!("weight_ih_l{i}")), visitor);
            layer.weight_hh.visit(&join(path, format!("weight_hh_l{i}")), visitor);
            layer.bias_ih.visit(&join(path, format!("bias_ih_l{i}")), visitor);
            layer.bias_hh.visit(&join(path, format!("bias_hh_l{i}")), visitor);
        }
    }
}

impl Layer {
    /// The gates' share of the inputs, for all times at once: `[B, T, in]` to `[B, T, gates hidden]`.
    pub(super) fn of_inputs(&self, x: &Var) -> Result<Var> {
        Ok(x.linear(&self.weight_ih.var(), self.bias_ih.as_ref().map(Parameter::var).as_ref())?)
    }

    /// The gates' share of the hidden state: `[B, hidden]` to `[B, gates hidden]`.
    pub(super) fn of_hidden(&self, h: &Var) -> Result<Var> {
        Ok(h.linear(&self.weight_hh.var(), self.bias_hh.as_ref().map(Parameter::var).as_ref())?)
    }
}

impl Weights {
    /// Runs all layers over time. `step` makes a layer's next states from its weights, the inputs' share at that time
    /// and the states; the first state is the output. `first` are the states to begin with, each
    /// `[layers, B, hidden]`, 0 if absent. Gives the outputs `[B, T, hidden]` and the last states.
    pub(super) fn run<const N: usize>(
        &self,
        x: &Var,
        first: [Option<&Var>; N],
        step: impl Fn(&Layer, &Var, [Var; N]) -> Result<[Var; N]>,
    ) -> Result<(Var, [Var; N])> {
        let &[batch, times, _] = x.shape() else {
            return Err(Error::invalid("recurrent layer", format!("got {:?}, wanted [B, T, in]", x.shape())));
        };
        let (mut outputs, mut last) = (x.clone(), [const { Vec::new() }; N]);
        for (i, layer) in self.layers.iter().enumerate() {
            let mut states = Vec::with_capacity(N);
            for given in first {
                states.push(match given {
                    Some(all) => all.select(0, i)?,
                    None => Var::new(kernels::full(&[batch, self.hidden], 0.0, x.dtype(), x.device())?),
                });
            }
            let mut states = <[Var; N]>::try_from(states)
                .unwrap_or_else(|_| unreachable!("one state was pushed for each of N"));
            let shares = layer.of_inputs(&outputs)?;
            let mut hidden = Vec::with_capacity(times);
            for t in 0..times {
                states = step(layer, &shares.select(1, t)?, states)?;
                hidden.push(states[0].clone());
            }
            outputs = match hidden.is_empty() {
                true => Var::new(kernels::full(&[batch, 0, self.hidden], 0.0, x.dtype(), x.device())?),
                false => Var::stack(&hidden, 1)?,
            };
            last.iter_mut().zip(states).for_each(|(all, state)| all.push(state));
        }
        let mut stacked = Vec::with_capacity(N);
        for all in &last {
            stacked.push(Var::stack(all, 0)?);
        }
        let stacked =
            <[Var; N]>::try_from(stacked).unwrap_or_else(|_| unreachable!("one was pushed for each of N"));
        Ok((outputs, stacked))
    }
}
