//! Recurrent layers: [`Lstm`] and [`Gru`], with their configuration, their weights and the loop over layers that they share.

use phalanx_autograd::Var;
use phalanx_kernels as kernels;

use crate::error::label;
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
        let what = label("recurrent layer", scope.path());
        let sizes =
            [("layers", self.layers), ("hidden features", self.hidden), ("input features", self.inputs)];
        if let Some((name, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return Err(Error::invalid(what, format!("got 0 {name}, wanted at least 1")));
        }
        let rows = gates.checked_mul(self.hidden).ok_or_else(|| {
            let why = format!("got {} hidden features, wanted {gates} times as many countable", self.hidden);
            Error::invalid(what.as_str(), why)
        })?;
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
        Ok(Weights {
            layers: (0..self.layers).map(layer).collect::<Result<_>>()?,
            inputs: self.inputs,
            hidden: self.hidden,
        })
    }
}

/// The weights of all layers.
pub(super) struct Weights {
    layers: Vec<Layer>,
    inputs: usize,
    hidden: usize,
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
    /// The inputs' contribution to the gates, for all times at once: `[B, T, in]` to `[B, T, gates hidden]`.
    fn input_gates(&self, x: &Var) -> Result<Var> {
        Ok(x.linear(&self.weight_ih.var(), self.bias_ih.as_ref().map(Parameter::var).as_ref())?)
    }

    /// The weight and the bias of the hidden state's contribution.
    pub(super) fn hidden_weights(&self) -> (Var, Option<Var>) {
        (self.weight_hh.var(), self.bias_hh.as_ref().map(Parameter::var))
    }
}

impl Weights {
    /// Runs all layers over time. `over_time` computes a layer's outputs `[B, T, hidden]` and last states from its weights, the inputs'
    /// contributions to the gates `[B, T, gates hidden]` and the initial states. `initial` are the initial states of all layers, each
    /// `[layers, B, hidden]`, 0 if absent. Returns the last layer's outputs and the last states of all layers.
    pub(super) fn run<const N: usize>(
        &self,
        x: &Var,
        initial: [Option<&Var>; N],
        over_time: impl Fn(&Layer, &Var, [Var; N]) -> Result<(Var, [Var; N])>,
    ) -> Result<(Var, [Var; N])> {
        let &[_, _, inputs] = x.shape() else { return Err(self.refuse(x)) };
        if inputs != self.inputs {
            return Err(self.refuse(x));
        }
        let (mut outputs, mut last) = (x.clone(), [const { Vec::new() }; N]);
        for (i, layer) in self.layers.iter().enumerate() {
            let (made, states) =
                over_time(layer, &layer.input_gates(&outputs)?, self.initial_states(i, initial, x)?)?;
            outputs = made;
            last.iter_mut().zip(states).for_each(|(all, state)| all.push(state));
        }
        Ok((outputs, each(last.iter().map(|all| Var::stack(all, 0)))?))
    }

    /// The initial states of layer `i`.
    fn initial_states<const N: usize>(
        &self,
        i: usize,
        given: [Option<&Var>; N],
        x: &Var,
    ) -> Result<[Var; N]> {
        let shape = [self.layers.len(), x.shape()[0], self.hidden];
        if let Some(odd) = given.into_iter().flatten().find(|state| state.shape() != shape) {
            let why = format!("got a state of shape {:?}, wanted {shape:?}", odd.shape());
            return Err(Error::invalid("recurrent layer", why));
        }
        each(given.into_iter().map(|state| match state {
            Some(all) => all.select(0, i),
            None => Ok(Var::new(kernels::full(&shape[1..], 0.0, x.dtype(), x.device())?)),
        }))
    }

    fn refuse(&self, x: &Var) -> Error {
        let why = format!("got an input of shape {:?}, wanted [B, T, {}]", x.shape(), self.inputs);
        Error::invalid("recurrent layer", why)
    }
}

/// As many values as there are states.
fn each<const N: usize>(made: impl Iterator<Item = phalanx_autograd::Result<Var>>) -> Result<[Var; N]> {
    let made = made.collect::<phalanx_autograd::Result<Vec<_>>>()?;
    Ok(made.try_into().unwrap_or_else(|_| unreachable!("one was made for each of N")))
}

/// `c = sigmoid(f) c + sigmoid(i) tanh(g)`, `h = sigmoid(o) tanh(c)`, with the gates i, f, g, o stacked in the weights.
/// Source: Hochreiter and Schmidhuber: Long short-term memory (1997).
pub struct Lstm(Weights);

impl RecurrentConfig {
    /// An LSTM.
    ///
    /// # Errors
    /// If it cannot be allocated.
    pub fn init_lstm(self, scope: &Scope) -> Result<Lstm> {
        Ok(Lstm(self.weights(scope, 4)?))
    }
}

impl Parameters for Lstm {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        self.0.visit(path, visitor);
    }
}

/// An LSTM's results.
pub struct LstmOutput {
    /// `[B, T, hidden]`
    pub output: Var,
    /// The last outputs, `[layers, B, hidden]`.
    pub hidden: Var,
    /// The last cells, `[layers, B, hidden]`.
    pub cell: Var,
}

impl Lstm {
    /// Runs over `[B, T, in]`, from the states given (`[layers, B, hidden]`), hidden and cell together, or from 0.
    ///
    /// # Errors
    /// If the inputs do not fit, or one state comes without the other.
    pub fn forward(&self, x: &Var, hidden: Option<&Var>, cell: Option<&Var>) -> Result<LstmOutput> {
        if hidden.is_some() != cell.is_some() {
            let (came, missing) = if hidden.is_some() { ("hidden", "cell") } else { ("cell", "hidden") };
            let why = format!("got a {came} state without a {missing} state, wanted both or neither");
            return Err(Error::invalid("Lstm", why));
        }
        let (output, [hidden, cell]) = self.0.run(x, [hidden, cell], |layer, gates, [h, c]| {
            let (weight, bias) = layer.hidden_weights();
            let (output, cell) = gates.lstm(&weight, bias.as_ref(), [&h, &c])?;
            let hidden = match gates.shape()[1] {
                0 => h,
                times => output.select(1, times - 1)?,
            };
            Ok((output, [hidden, cell]))
        })?;
        Ok(LstmOutput { output, hidden, cell })
    }
}

/// `n = tanh(x_n + sigmoid(r) h_n)`, `h = (1 - sigmoid(z)) n + sigmoid(z) h`, with the gates r, z, n stacked in the
/// weights; `x_n` and `h_n` are the inputs' and the hidden state's contributions to n, each with its bias.
/// Source: Cho et al.: Learning phrase representations (2014).
pub struct Gru(Weights);

impl RecurrentConfig {
    /// A GRU.
    ///
    /// # Errors
    /// If it cannot be allocated.
    pub fn init_gru(self, scope: &Scope) -> Result<Gru> {
        Ok(Gru(self.weights(scope, 3)?))
    }
}

impl Parameters for Gru {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        self.0.visit(path, visitor);
    }
}

impl Gru {
    /// Runs over `[B, T, in]`, from the state given (`[layers, B, hidden]`) or from 0: the outputs `[B, T, hidden]` and
    /// the last ones, `[layers, B, hidden]`.
    ///
    /// # Errors
    /// If the inputs do not fit.
    pub fn forward(&self, x: &Var, hidden: Option<&Var>) -> Result<(Var, Var)> {
        let (output, [hidden]) = self.0.run(x, [hidden], |layer, gates, [mut h]| {
            let ((weight, bias), times) = (layer.hidden_weights(), gates.shape()[1]);
            let mut outputs = Vec::with_capacity(times);
            // `split` is one node for all times. A `narrow` for each time would allocate a gradient of the whole for each.
            for of_time in gates.split_sizes(&vec![1; times], 1)? {
                let (x, own) =
                    (of_time.squeeze(&[1])?.chunk(3, 1)?, h.linear(&weight, bias.as_ref())?.chunk(3, 1)?);
                let (r, z) = (x[0].add(&own[0])?.sigmoid()?, x[1].add(&own[1])?.sigmoid()?);
                let n = x[2].add(&r.mul(&own[2])?)?.tanh()?;
                h = n.add(&z.mul(&h.sub(&n)?)?)?;
                outputs.push(h.clone());
            }
            let output = match times {
                0 => gates.narrow(2, 0, h.shape()[1])?,
                _ => Var::stack(&outputs, 1)?,
            };
            Ok((output, [h]))
        })?;
        Ok((output, hidden))
    }
}
