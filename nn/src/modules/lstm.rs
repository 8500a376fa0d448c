//! Long short-term memory.

use phalanx_autograd::Var;

use super::recurrent::{RecurrentConfig, Weights};
use crate::{Entry, Error, Parameters, Result, Scope};

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

/// What an LSTM gives.
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
        let (output, [hidden, cell]) = self.0.run(x, [hidden, cell], |layer, shares, [h, c]| {
            let (weight, bias) = layer.of_hidden();
            let (output, cell) = shares.lstm(&weight, bias.as_ref(), [&h, &c])?;
            let hidden = match shares.shape()[1] {
                0 => h,
                times => output.select(1, times - 1)?,
            };
            Ok((output, [hidden, cell]))
        })?;
        Ok(LstmOutput { output, hidden, cell })
    }
}
